//! What runs learn from: files of this machine, volumes of the cluster, storages for objects, and content that was handed over with the run.
//!
//! Such content is a record beside that of its run, in the same partition, so that whoever drives the run has it. It goes when the run ends.

use super::record;
use crate::shared::Shared;
use engram_api::{Events, LearnerRunSpec, ObjectPlace, Source};
use engram_learn::source::{Origin, SourceOptions};
use engram_memory::{Command, PartitionId, RunId};
use engram_proto::v1::{Problem, ProblemKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most content: what a ConfigMap holds.
pub(super) const MAX_BYTES: usize = 1 << 20;
/// What such a record begins with. That of a run is JSON.
const MARK: &[u8] = b"input\n";
/// Tells the id of the record from that of its run.
const APART: u128 = 0x656e_6772_616d_2d69_6e70_7574;

/// Whether a record is content, and no run.
pub(super) fn is_content(state: &[u8]) -> bool {
    state.starts_with(MARK)
}

/// Why the specification of a run asks for what this worker does not have; `None` where it does not.
pub(super) fn refusal(shared: &Shared, spec: &LearnerRunSpec) -> Option<String> {
    let in_pod = shared.options.inputs.is_some();
    if let Some(volume) = spec.snapshot.as_ref().and_then(|place| place.volume.as_ref()).filter(|_| !in_pod) {
        return Some(format!("spec.snapshot.volume is {volume}; allowed in clusters in Kubernetes only: here set url"));
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

/// Whether somebody has to hand over content with such a run.
pub(super) fn is_handed_over(spec: &LearnerRunSpec) -> bool {
    let source = spec.memory.as_ref().map(|memory| &memory.source);
    matches!(source, Some(Source::Events(Events { config_map: Some(_), .. })))
}

/// The file in a storage for objects that such a run learns from.
pub(super) fn place(spec: &LearnerRunSpec) -> Option<&ObjectPlace> {
    match &spec.memory.as_ref()?.source {
        Source::Events(events) => events.s3.as_ref(),
        _ => None,
    }
}

/// Keeps the content of a run that is about to be recorded.
pub(super) async fn keep(shared: &Shared, run: RunId, content: &[u8]) -> Result<(), Problem> {
    let partition = super::partition(shared, run);
    // Of an attempt that ended in between; nobody reads it before the run is there.
    let version = record::load(shared, partition, of(run)).await?.map_or(0, |entry| entry.version);
    put(shared, partition, run, version, [MARK, content].concat()).await
}

/// Forgets the content of a run that has ended.
pub(super) async fn forget(shared: &Shared, run: RunId) -> Result<(), Problem> {
    let partition = super::partition(shared, run);
    match record::load(shared, partition, of(run)).await? {
        Some(entry) if entry.state.len() > MARK.len() => {
            put(shared, partition, run, entry.version, MARK.to_vec()).await
        }
        _ => Ok(()),
    }
}

async fn put(
    shared: &Shared,
    partition: PartitionId,
    run: RunId,
    expected: u64,
    state: Vec<u8>,
) -> Result<(), Problem> {
    let command = Command::RunRecord { run: of(run), expected, state, row: None };
    let written = record::write(shared, partition, command).await?;
    written.map_err(|refusal| Problem::of(ProblemKind::Unavailable, refusal.to_string()))
}

/// The source of a run, by what its specification says; without content that was handed over or is fetched.
pub(super) fn source(source: &Source, inputs: Option<&Path>) -> SourceOptions {
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

/// Puts the content into a source that was handed over with its run.
pub(super) async fn fill(
    shared: &Shared,
    run: RunId,
    handed_over: bool,
    source: &mut SourceOptions,
) -> Result<(), Problem> {
    let SourceOptions::Events(events) = source else { return Ok(()) };
    if handed_over {
        let entry = record::load(shared, super::partition(shared, run), of(run)).await?;
        let content = entry.as_ref().and_then(|entry| entry.state.strip_prefix(MARK)).unwrap_or_default();
        events.origin = Origin::Content(Arc::from(content));
    }
    Ok(())
}

/// The id of the record that holds the content of a run.
const fn of(run: RunId) -> RunId {
    RunId(run.0 ^ APART)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(json: &str) -> Source {
        serde_json::from_str(&format!(r#"{{"events":{{{json},"columns":{{"key":"k","epoch":"e"}}}}}}"#)).unwrap()
    }

    fn place(source_: &Source, inputs: Option<&str>) -> (String, Origin) {
        let SourceOptions::Events(events) = source(source_, inputs.map(Path::new)) else { panic!("events") };
        (events.path.display().to_string(), events.origin)
    }

    #[test]
    fn a_source_is_a_path_a_file_of_a_volume_or_of_a_storage_or_content_with_a_name() {
        assert_eq!(place(&events(r#""path":"/a/b.csv""#), None), ("/a/b.csv".into(), Origin::Disk));
        let volume = events(r#""input":"corpus","path":"2026/b.csv""#);
        let folder = Origin::Folder("/inputs/corpus".into());
        assert_eq!(place(&volume, Some("/inputs")), ("/inputs/corpus/2026/b.csv".into(), folder));
        let handed = events(r#""configMap":{"name":"sales","key":"b.csv"}"#);
        assert_eq!(place(&handed, Some("/inputs")).0, "ConfigMap sales, key b.csv");
        let stored = events(r#""s3":{"url":"s3://events/2026/b.csv.zst"}"#);
        assert_eq!(place(&stored, Some("/inputs")).0, "s3://events/2026/b.csv.zst");
        assert!(is_content(MARK) && !is_content(b"{}"));
    }
}
