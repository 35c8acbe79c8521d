//! Inputs of runs: files of this machine, volumes of the cluster, object storage, and content supplied with the run.
//!
//! Supplied content is a record in the run's partition, available to every driver of the run. It is removed when the run ends.

use crate::runs::record;
use crate::shared::Shared;
use engram_api::{Code, ConfigMapKey, DataFile, Events, LearnerRunSpec, MAX_DATA_BYTES, ObjectLocation, Source};
use engram_learn::source::{Origin, SourceOptions, read_data};
use engram_memory::{Command, PartitionId, Refusal, RunId};
use engram_proto::v1::{Problem, ProblemKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum size of supplied content: that of a ConfigMap.
pub(in crate::runs) const MAX_BYTES: usize = 1 << 20;
/// Prefix of such a record; records of runs are JSON.
const CONTENT_PREFIX: &[u8] = b"input\n";
/// Distinguishes the id of the content's record from that of the run.
const INPUT_ID_MASK: u128 = 0x656e_6772_616d_2d69_6e70_7574;

/// Returns whether a record is content rather than a run.
pub(in crate::runs) fn is_content(state: &[u8]) -> bool {
    state.starts_with(CONTENT_PREFIX)
}

/// Returns why this worker cannot provide what the specification asks for; `None` if it can.
pub(in crate::runs) fn refusal(shared: &Shared, spec: &LearnerRunSpec) -> Option<String> {
    let in_pod = shared.setup.options.inputs.is_some();
    if let Some(volume) = spec.snapshot.as_ref().and_then(|object| object.volume.as_ref()).filter(|_| !in_pod) {
        return Some(format!("spec.snapshot.volume is {volume}; allowed in clusters in Kubernetes only: here set url"));
    }
    if let Some(file) = spec.data_file() {
        return data_refusal(in_pod, file);
    }
    match &spec.memory.as_ref()?.source {
        Source::Events(Events { input: None, config_map: None, s3: None, .. }) if in_pod => Some(
            "spec.memory.source.events.path without input is a file of one machine, which pods do not have; allowed: \
             configMap, s3, or input and path"
                .into(),
        ),
        Source::Git(_) if in_pod => Some("spec.memory.source.git is not supported in pods".into()),
        Source::Events(Events { config_map: Some(_), .. }) if !in_pod => {
            Some("spec.memory.source.events.configMap is for clusters in Kubernetes; set path: to a file, or s3".into())
        }
        Source::Events(Events { input: Some(_), .. }) if !in_pod => {
            Some("spec.memory.source.events.input is for clusters in Kubernetes; set path: to a file, or s3".into())
        }
        _ => None,
    }
}

/// Returns why this worker cannot read a data file.
fn data_refusal(in_pod: bool, file: &DataFile) -> Option<String> {
    match file {
        DataFile { input: None, config_map: None, path } if in_pod => {
            let path = path.as_deref().unwrap_or_default();
            Some(format!(
                "path {path} is a file of one machine, which pods do not have; allowed: configMap, or input and path"
            ))
        }
        DataFile { config_map: Some(ConfigMapKey { name, .. }), .. } if !in_pod => {
            Some(format!("configMap {name} is for clusters in Kubernetes; set path: to a file"))
        }
        DataFile { input: Some(input), .. } if !in_pod => {
            Some(format!("input {input} is for clusters in Kubernetes; set path: to a file"))
        }
        DataFile { .. } => None,
    }
}

/// Returns whether content must be supplied with the run.
pub(in crate::runs) fn is_supplied(spec: &LearnerRunSpec) -> bool {
    if spec.data_file().is_some_and(|file| file.config_map.is_some()) {
        return true;
    }
    let source = spec.memory.as_ref().map(|memory| &memory.source);
    matches!(source, Some(Source::Events(Events { config_map: Some(_), .. })))
}

/// Returns the object that the run learns from.
pub(in crate::runs) fn object(spec: &LearnerRunSpec) -> Option<&ObjectLocation> {
    match &spec.memory.as_ref()?.source {
        Source::Events(events) => events.s3.as_ref(),
        _ => None,
    }
}

/// Stores the content of a run that is about to be recorded in the partition of `run`.
pub(in crate::runs) async fn keep(shared: &Shared, run: RunId, identity: RunId, content: &[u8]) -> Result<(), Problem> {
    let partition = crate::runs::partition(shared, run);
    // May be left from an interrupted attempt; it is not read before the run exists.
    let expected = record::load(shared, partition, record_id(identity)).await?.map_or(0, |entry| entry.version);
    let state = [CONTENT_PREFIX, content].concat();
    write(shared, partition, Command::RunRecord { run: record_id(identity), expected, state, row: None }).await
}

/// Removes the content of a run that has ended.
pub(in crate::runs) async fn forget(shared: &Shared, run: RunId, identity: RunId) -> Result<(), Problem> {
    let partition = crate::runs::partition(shared, run);
    match record::load(shared, partition, record_id(identity)).await? {
        Some(_) => write(shared, partition, Command::RunRemove { run: record_id(identity) }).await,
        None => Ok(()),
    }
}

async fn write(shared: &Shared, partition: PartitionId, command: Command) -> Result<(), Problem> {
    match record::write(shared, partition, command).await? {
        // Another call has removed it meanwhile.
        Ok(()) | Err(Refusal::RunUnknown) => Ok(()),
        Err(refusal) => Err(Problem::of(ProblemKind::Unavailable, refusal.to_string())),
    }
}

/// Returns the source of a run by its specification; without content that is supplied or downloaded.
pub(in crate::runs) fn source(source: &Source, inputs: Option<&Path>) -> SourceOptions {
    let mut options = SourceOptions::from_manifest(source, Path::new("/"));
    if let (SourceOptions::Events(options), Source::Events(events)) = (&mut options, source) {
        match (&events.config_map, &events.input, inputs) {
            _ if events.s3.is_some() => options.path = PathBuf::from(events.file_name()),
            (Some(file), ..) => options.path = PathBuf::from(format!("ConfigMap {}, key {}", file.name, file.key)),
            (None, Some(name), Some(inputs)) => {
                let folder = inputs.join(name);
                options.path = folder.join(events.path.as_deref().unwrap_or_default());
                options.origin = Origin::Folder(folder);
            }
            _ => {}
        }
    }
    options
}

/// Fills supplied content into the source of its run.
pub(in crate::runs) async fn fill(
    shared: &Shared,
    (run, identity): (RunId, RunId),
    is_supplied: bool,
    source: &mut SourceOptions,
) -> Result<(), Problem> {
    let SourceOptions::Events(events) = source else { return Ok(()) };
    if is_supplied {
        let entry = record::load(shared, crate::runs::partition(shared, run), record_id(identity)).await?;
        let content = entry.as_ref().and_then(|entry| entry.state.strip_prefix(CONTENT_PREFIX)).unwrap_or_default();
        events.origin = Origin::Content(Arc::from(content));
    }
    Ok(())
}

/// Why the data of a run cannot be provided.
pub(in crate::runs) enum DataError {
    /// A retry may succeed.
    Unavailable(Problem),
    /// The file cannot be read.
    Unusable(engram_api::Problem),
}

impl From<Problem> for DataError {
    fn from(problem: Problem) -> Self {
        Self::Unavailable(problem)
    }
}

/// Returns the content of the data file of a run. A file is read once and kept with the run, so that every driver has the same.
pub(in crate::runs) async fn data(
    shared: &Shared,
    (run, identity): (RunId, RunId),
    file: &DataFile,
) -> Result<Vec<u8>, DataError> {
    let entry = record::load(shared, crate::runs::partition(shared, run), record_id(identity)).await?;
    let kept = entry.as_ref().and_then(|entry| entry.state.strip_prefix(CONTENT_PREFIX)).unwrap_or_default();
    if !kept.is_empty() {
        return Ok(kept.to_vec());
    }
    let (path, origin) = match (&file.path, &file.input, shared.setup.options.inputs.as_deref()) {
        (Some(path), Some(input), Some(inputs)) => {
            let folder = inputs.join(input);
            (folder.join(path), Origin::Folder(folder))
        }
        (Some(path), ..) => (PathBuf::from(path), Origin::Disk),
        (None, ..) => return Err(empty("the ConfigMap of the run")),
    };
    let shown = path.display().to_string();
    let read = tokio::task::spawn_blocking(move || read_data(&path, &origin, MAX_DATA_BYTES)).await;
    let read = read.map_err(|error| Problem::of(ProblemKind::Unavailable, error.to_string()))?;
    let content =
        read.map_err(|error| DataError::Unusable(engram_api::Problem::new(Code::SourceUnreadable, error.to_string())))?;
    if content.is_empty() {
        return Err(empty(&shown));
    }
    keep(shared, run, identity, &content).await?;
    Ok(content)
}

fn empty(what: &str) -> DataError {
    DataError::Unusable(engram_api::Problem::new(Code::SourceUnreadable, format!("{what} is empty")))
}

/// Returns the id of the record with the content of a run.
const fn record_id(identity: RunId) -> RunId {
    RunId(identity.0 ^ INPUT_ID_MASK)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(json: &str) -> Source {
        serde_json::from_str(&format!(r#"{{"events":{{{json},"columns":{{"key":"k","epoch":"e"}}}}}}"#)).unwrap()
    }

    fn object(source_: &Source, inputs: Option<&str>) -> (String, Origin) {
        let SourceOptions::Events(events) = source(source_, inputs.map(Path::new)) else { panic!("events") };
        (events.path.display().to_string(), events.origin)
    }

    #[test]
    fn sources_are_named_by_where_their_content_is() {
        assert_eq!(object(&events(r#""path":"/a/b.csv""#), None), ("/a/b.csv".into(), Origin::Disk));
        let volume = events(r#""input":"corpus","path":"2026/b.csv""#);
        let folder = Origin::Folder("/inputs/corpus".into());
        assert_eq!(object(&volume, Some("/inputs")), ("/inputs/corpus/2026/b.csv".into(), folder));
        let supplied = events(r#""configMap":{"name":"sales","key":"b.csv"}"#);
        assert_eq!(object(&supplied, Some("/inputs")).0, "ConfigMap sales, key b.csv");
        let stored = events(r#""s3":{"url":"s3://events/2026/b.csv.zst"}"#);
        assert_eq!(object(&stored, Some("/inputs")).0, "s3://events/2026/b.csv.zst");
        assert!(is_content(CONTENT_PREFIX) && !is_content(b"{}"));
    }
}
