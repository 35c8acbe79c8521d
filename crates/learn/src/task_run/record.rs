//! What the record of a run holds about its tasks: a row per result, and the findings.

use super::{StageResults, TaskFindings, TimelineSpan};
use crate::run::RunState;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use xxhash_rust::xxh3::Xxh3;

/// First byte of a row: the version of its format.
const FORMAT: u8 = 1;
/// Stage of the row that holds the report page.
const PAGE_STAGE: u32 = u32::MAX;
/// Stage of the rows that hold the timelines of stages.
const TIMELINE_STAGE: u32 = u32::MAX - 1;

/// Small part of the findings of a run, kept in its state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TaskSummary {
    /// Figures by name.
    pub metrics: BTreeMap<String, f64>,
    /// Small texts by name.
    pub outputs: BTreeMap<String, String>,
    /// Lines for the terminal.
    pub summary: Vec<String>,
}

/// Results that are recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordedTasks {
    results: BTreeMap<(u32, u32), Vec<u8>>,
    page: Option<Vec<u8>>,
    /// Compressed timelines of stages.
    timelines: Vec<Vec<u8>>,
}

/// The rows of a run of tasks cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a row of the run is damaged or of a newer version")]
pub struct CorruptRow;

impl RecordedTasks {
    /// Reads the rows of a record. Of two results of one task the first counts.
    ///
    /// # Errors
    /// A row is damaged or of another version.
    pub fn read(rows: &[Vec<u8>]) -> Result<Self, CorruptRow> {
        let mut recorded = Self::default();
        for row in rows {
            let [FORMAT, s0, s1, s2, s3, i0, i1, i2, i3, content @ ..] = &row[..] else { return Err(CorruptRow) };
            let (stage, index) = (u32::from_le_bytes([*s0, *s1, *s2, *s3]), u32::from_le_bytes([*i0, *i1, *i2, *i3]));
            if stage == PAGE_STAGE {
                recorded.page = Some(content.to_vec());
            } else if stage == TIMELINE_STAGE {
                recorded.timelines.push(content.to_vec());
            } else {
                recorded.insert(stage, index, content.to_vec());
            }
        }
        Ok(recorded)
    }

    /// Adds the result of a task.
    pub fn insert(&mut self, stage: u32, index: u32, result: Vec<u8>) {
        self.results.entry((stage, index)).or_insert(result);
    }

    /// Returns the number of results.
    pub fn len(&self) -> usize {
        self.results.len()
    }

    /// Returns whether there is no result.
    pub fn is_empty(&self) -> bool {
        self.results.is_empty()
    }

    /// Returns the indexes of the recorded tasks of a stage.
    pub fn indexes(&self, stage: u32) -> impl Iterator<Item = u32> {
        self.results.range((stage, 0)..=(stage, u32::MAX)).map(|((_, index), _)| *index)
    }

    /// Returns the results of a stage of `tasks` tasks; `None` while one is missing.
    pub fn stage(&self, stage: u32, tasks: usize) -> Option<StageResults> {
        let of = |index: usize| self.results.get(&(stage, u32::try_from(index).ok()?)).cloned();
        (0..tasks).map(of).collect()
    }

    /// Returns the digest of all results, 32 hexadecimal digits.
    pub fn digest(&self) -> String {
        let mut hash = Xxh3::new();
        for ((stage, index), result) in &self.results {
            hash.update(&stage.to_le_bytes());
            hash.update(&index.to_le_bytes());
            hash.update(&(result.len() as u64).to_le_bytes());
            hash.update(result);
        }
        format!("{:032x}", hash.digest128())
    }

    /// Returns the report page, once recorded.
    ///
    /// # Errors
    /// It is damaged.
    pub fn page(&self) -> Result<Option<String>, CorruptRow> {
        let Some(page) = &self.page else { return Ok(None) };
        let bytes = zstd::decode_all(&page[..]).map_err(|_| CorruptRow)?;
        String::from_utf8(bytes).map(Some).map_err(|_| CorruptRow)
    }

    /// Returns the timeline of all complete stages.
    ///
    /// # Errors
    /// It is damaged.
    pub fn timeline(&self) -> Result<Vec<TimelineSpan>, CorruptRow> {
        let mut spans = Vec::new();
        for row in &self.timelines {
            let bytes = zstd::decode_all(&row[..]).map_err(|_| CorruptRow)?;
            let stage: Vec<TimelineSpan> = serde_json::from_slice(&bytes).map_err(|_| CorruptRow)?;
            spans.extend(stage);
        }
        Ok(spans)
    }
}

/// Returns the row of a result.
pub fn result_row(stage: u32, index: u32, result: &[u8]) -> Vec<u8> {
    [&[FORMAT][..], &stage.to_le_bytes(), &index.to_le_bytes(), result].concat()
}

/// Returns the row of a report page.
pub fn page_row(page: &str) -> Vec<u8> {
    let compressed = zstd::encode_all(page.as_bytes(), 0).expect("memory can be written");
    result_row(PAGE_STAGE, 0, &compressed)
}

/// Returns the row of the timeline of a stage.
pub fn timeline_row(stage: u32, spans: &[TimelineSpan]) -> Vec<u8> {
    let json = serde_json::to_vec(spans).expect("spans have string keys and finite numbers");
    let compressed = zstd::encode_all(&json[..], 0).expect("memory can be written");
    result_row(TIMELINE_STAGE, stage, &compressed)
}

impl TaskSummary {
    /// Returns the findings without the page; `digest` is an output of every run.
    pub fn new(findings: TaskFindings, digest: String) -> Self {
        let TaskFindings { metrics, mut outputs, summary, page: _ } = findings;
        outputs.entry("digest".into()).or_insert(digest);
        Self { metrics, outputs, summary }
    }
}

/// Report of a run that is split into tasks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskReport {
    /// Version of this structure.
    pub api_version: String,
    /// Always [`TaskReport::KIND`].
    pub kind: String,
    /// Name of the run.
    pub run: String,
    /// Name of the cluster.
    pub cluster: String,
    /// `spec.kind` of the run.
    pub run_kind: String,
    /// Tasks done.
    pub tasks: u64,
    /// Seconds of work, over all drivers.
    pub elapsed_seconds: f64,
    /// Findings.
    #[serde(flatten)]
    pub findings: TaskSummary,
    /// The report page; empty until the run has succeeded.
    pub page: String,
    /// What workers and drivers did in the complete stages; empty for kinds without tasks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timeline: Vec<TimelineSpan>,
}

impl TaskReport {
    /// Value of `api_version`.
    pub const API_VERSION: &'static str = "engram.dev/v1alpha1";
    /// Value of `kind`.
    pub const KIND: &'static str = "TaskReport";

    /// Builds the report of a run from the state and the rows of its record.
    ///
    /// # Errors
    /// The report page is damaged.
    pub fn new(state: &RunState, rows: &[Vec<u8>], cluster: &str) -> Result<Self, CorruptRow> {
        let recorded = RecordedTasks::read(rows)?;
        Ok(Self {
            api_version: Self::API_VERSION.into(),
            kind: Self::KIND.into(),
            run: state.name.clone(),
            cluster: cluster.to_owned(),
            run_kind: state.spec["kind"].as_str().unwrap_or_default().to_owned(),
            tasks: state.done,
            elapsed_seconds: state.elapsed_ms as f64 / 1_000.0,
            findings: state.tasks.clone().unwrap_or_default(),
            page: recorded.page()?.unwrap_or_default(),
            timeline: recorded.timeline()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::TimelineKind;
    use super::*;

    #[test]
    fn rows_give_back_results_and_page_in_any_order() {
        let rows = [result_row(1, 0, b"c"), result_row(0, 1, b"b"), page_row("<p>"), result_row(0, 0, b"a")];
        let recorded = RecordedTasks::read(&rows).unwrap();
        assert_eq!(recorded.stage(0, 2), Some(vec![b"a".to_vec(), b"b".to_vec()]));
        assert_eq!((recorded.stage(0, 3), recorded.len()), (None, 3));
        assert_eq!(recorded.indexes(0).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(recorded.page().unwrap().as_deref(), Some("<p>"));
        let reversed: Vec<_> = rows.iter().rev().cloned().collect();
        assert_eq!(RecordedTasks::read(&reversed).unwrap().digest(), recorded.digest());
        let other = RecordedTasks::read(&[result_row(1, 0, b"C"), result_row(0, 1, b"b"), result_row(0, 0, b"a")]);
        assert_ne!(other.unwrap().digest(), recorded.digest());
        assert_eq!(RecordedTasks::read(&[b"{}".to_vec()]), Err(CorruptRow));
    }

    #[test]
    fn timeline_is_kept_apart_from_the_results() {
        let span = |stage, worker| TimelineSpan {
            worker,
            kind: TimelineKind::Task,
            name: "fold 1".into(),
            stage,
            begin_us: 5,
            end_us: 7,
            lost: stage == 1,
            devices: Vec::new(),
        };
        let (first, second) = ([span(0, Some(3)), span(0, None)], [span(1, Some(0))]);
        let rows = [result_row(0, 0, b"a"), timeline_row(0, &first), timeline_row(1, &second)];
        let recorded = RecordedTasks::read(&rows).unwrap();
        assert_eq!(recorded.timeline().unwrap(), [&first[..], &second].concat());
        assert_eq!(recorded.len(), 1);
        assert_eq!(recorded.digest(), RecordedTasks::read(&rows[..1]).unwrap().digest(), "times are no result");
    }
}
