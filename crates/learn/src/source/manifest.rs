//! From a checked manifest to the options of a source.

use super::{
    Columns, EventsOptions, ExampleName, Format, GitOptions, MemoryColumn, Origin, SignalSource, SourceOptions,
    SyntheticOptions, TimeColumn,
};
use engram_api::{Clock, EventFormat, EventSeparator, Events, Identity, Signal, Source};
use std::path::Path;

impl SourceOptions {
    /// Converts the source of a validated manifest; relative paths are relative to `folder`, the manifest's folder. Callers that
    /// read events from another location set `origin` and `path`.
    ///
    /// Numbers are narrowed to single precision, as everywhere at the edge: the store takes nothing wider.
    pub fn from_manifest(source: &Source, folder: &Path) -> Self {
        match source {
            Source::Example(example) => Self::Example(match example.name {
                engram_api::ExampleName::StateOfTheUnion => ExampleName::StateOfTheUnion,
            }),
            Source::Events(events) => Self::Events(events_options(events, folder)),
            Source::Git(git) => Self::Git(GitOptions {
                path: folder.join(&git.path),
                revision: git.revision.clone(),
                max_commits: git.max_commits,
                quality: git.quality as f32,
            }),
            Source::Synthetic(synthetic) => Self::Synthetic(SyntheticOptions {
                memories: synthetic.memories,
                initial_weight: synthetic.initial_weight as f32,
                rewarded: synthetic.rewarded as f32,
                punished: synthetic.punished as f32,
                noise: synthetic.noise as f32,
                seed: synthetic.seed,
            }),
        }
    }
}

fn events_options(events: &Events, folder: &Path) -> EventsOptions {
    let memory = match events.identity() {
        Identity::Id(column) => MemoryColumn::Id(column.to_owned()),
        Identity::Key(column) => MemoryColumn::Key(column.to_owned()),
    };
    let time = match events.clock() {
        Clock::Epoch(column) => TimeColumn::Epoch(column.to_owned()),
        Clock::Time { column, span } => TimeColumn::Time { column: column.to_owned(), span_ms: span.as_millis() },
    };
    let signal = match events.signal() {
        Signal::Quality(quality) => SignalSource::Quality(quality as f32),
        Signal::Delta(delta) => SignalSource::Delta(delta as f32),
        Signal::QualityColumn(column) => SignalSource::QualityColumn(column.to_owned()),
        Signal::DeltaColumn(column) => SignalSource::DeltaColumn(column.to_owned()),
    };
    let format = match events.format {
        EventFormat::Auto => Format::Auto,
        EventFormat::Jsonl => Format::Jsonl,
        EventFormat::Csv => Format::Csv,
        EventFormat::Parquet => Format::Parquet,
    };
    let path = folder.join(events.path.as_deref().unwrap_or_default());
    let separator = events.separator.map(EventSeparator::as_byte);
    EventsOptions { path, origin: Origin::Disk, format, separator, columns: Columns { memory, time }, signal }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_of_the_manifest_are_those_of_the_source() {
        let synthetic = Source::Synthetic(engram_api::Synthetic::default());
        let folder = Path::new("/a");
        assert_eq!(
            SourceOptions::from_manifest(&synthetic, folder),
            SourceOptions::Synthetic(SyntheticOptions::default())
        );
        let events: Events = serde_json::from_str(r#"{"path":"b.csv","columns":{"key":"k","time":"t"}}"#).unwrap();
        let expected = EventsOptions {
            path: "/a/b.csv".into(),
            origin: Origin::Disk,
            format: Format::Auto,
            separator: None,
            columns: Columns {
                memory: MemoryColumn::Key("k".to_owned()),
                time: TimeColumn::Time { column: "t".to_owned(), span_ms: 86_400_000 },
            },
            signal: SignalSource::Quality(0.9),
        };
        let from = |source| SourceOptions::from_manifest(&source, folder);
        assert_eq!(from(Source::Events(events)), SourceOptions::Events(expected));
        let git: engram_api::Git = serde_json::from_str(r#"{"path":"/r","maxCommits":3,"quality":1}"#).unwrap();
        let expected = GitOptions { path: "/r".into(), revision: "HEAD".to_owned(), max_commits: 3, quality: 1.0 };
        assert_eq!(from(Source::Git(git)), SourceOptions::Git(expected));
    }
}
