//! `engram import`: submits a run for a file of events or a git repository, or converts a repository to a file of events.

use super::run::{self, follow};
use crate::context::Context;
use crate::error::problem;
use crate::output::count;
use crate::output_file::OutputFile;
use crate::progress::Progress;
use crate::rows::Compression;
use crate::target;
use anyhow::Context as _;
use engram_api::{API_VERSION, Code, ExitCode, MAX_NAME_LENGTH, Problem, Requirement};
use engram_learn::source::{GitOptions, SourceError, export_git, is_shallow_git};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Submit a run for a file of events or for the history of a git repository
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Import {
    Events(Events),
    Git(Git),
}

/// Submit a run for a file of events: CSV, JSON Lines or Parquet
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram import events sales.csv --key product --time sold_at
  engram import events log.jsonl.zst --id item --epoch day --quality-column score
  engram import events sales.parquet --key product --epoch week --name sales-2026

Each row reinforces one memory in one epoch, and epochs never decrease from row to row. The command submits a run and follows it;
a manifest for `engram run` has more options.")]
pub(crate) struct Events {
    /// File of events, optionally .gz or .zst
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Column with keys
    #[arg(long, value_name = "COLUMN", required_unless_present = "id")]
    key: Option<String>,
    /// Column with integer ids
    #[arg(long, value_name = "COLUMN", conflicts_with = "key")]
    id: Option<String>,
    /// Column with epoch numbers
    #[arg(long, value_name = "COLUMN", required_unless_present = "time")]
    epoch: Option<String>,
    /// Column with times, in RFC 3339 or Unix milliseconds
    #[arg(long, value_name = "COLUMN", conflicts_with = "epoch")]
    time: Option<String>,
    /// Duration of an epoch, with --time
    #[arg(long, value_name = "DURATION", requires = "time")]
    span: Option<String>,
    /// Quality of every event [default: 0.9]
    #[arg(long, value_name = "0-1", conflicts_with_all = ["quality_column", "delta_column"])]
    quality: Option<f64>,
    /// Column with qualities
    #[arg(long, value_name = "COLUMN", conflicts_with = "delta_column")]
    quality_column: Option<String>,
    /// Column with changes of weight
    #[arg(long, value_name = "COLUMN")]
    delta_column: Option<String>,
    #[command(flatten)]
    run: RunOptions,
}

/// Submit a run for the history of a git repository: commits are epochs, paths are memories
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram import git .                             submit a run for this repository
  engram import git ../linux --max-commits 10000
  engram import git . --to events.csv.zst         write a file of events, without a cluster")]
pub(crate) struct Git {
    /// Path of the repository
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Last commit of the history
    #[arg(long, value_name = "REVISION", default_value = "HEAD")]
    revision: String,
    /// Only the newest N commits; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_commits: u64,
    /// Quality of every event
    #[arg(long, value_name = "0-1", default_value_t = 0.9)]
    quality: f64,
    /// Write events to a .csv file, optionally .zst or .gz, instead of submitting a run
    #[arg(long, value_name = "FILE", conflicts_with_all = ["name", "decay", "epochs", "no_wait", "report"])]
    to: Option<PathBuf>,
    #[command(flatten)]
    run: RunOptions,
}

/// Options of the submitted run.
#[derive(Debug, clap::Args)]
struct RunOptions {
    /// Name of the run [default: derived from the file name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Decay per epoch [default: decay of the cluster]
    #[arg(long, value_name = "0-1")]
    decay: Option<f64>,
    /// Maximum number of epochs [default: all]
    #[arg(long, value_name = "N")]
    epochs: Option<u64>,
    /// Submit the run without waiting for it
    #[arg(long, conflicts_with = "report")]
    no_wait: bool,
    /// Write the report as a self-contained HTML page
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

impl Import {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<ExitCode> {
        match self {
            Self::Events(events) => {
                let source = json!({ "events": {
                    "path": text(&events.file)?,
                    "columns": {
                        "key": events.key, "id": events.id, "epoch": events.epoch, "time": events.time,
                        "quality": events.quality_column, "delta": events.delta_column,
                    },
                    "quality": events.quality,
                    "epochSpan": events.span,
                } });
                submit_run(source, &events.file, &events.run, context).await
            }
            Self::Git(Git { path, revision, max_commits, quality, to: Some(file), .. }) => {
                note_shallow(&path, context);
                let options = GitOptions { path, revision, max_commits, quality: quality as f32 };
                write_events(options, file, context).await
            }
            Self::Git(git) => {
                note_shallow(&git.path, context);
                let source = json!({ "git": {
                    "path": text(&git.path)?, "revision": git.revision, "maxCommits": git.max_commits,
                    "quality": git.quality,
                } });
                submit_run(source, &git.path, &git.run, context).await
            }
        }
    }
}

/// Builds a manifest from the options, so that manifest validation applies, and submits it.
async fn submit_run(source: Value, from: &Path, options: &RunOptions, context: &Context) -> anyhow::Result<ExitCode> {
    let target = target::Target::find(context).await?;
    let client = target.connect().await?;
    let name = options.name.clone().unwrap_or_else(|| default_name(from));
    let manifest = json!({
        "apiVersion": API_VERSION,
        "kind": "LearnerRun",
        "metadata": { "name": name },
        "spec": {
            "clusterRef": { "name": client.map()?.cluster_name },
            "kind": "Memory",
            "memory": { "source": source, "decay": options.decay, "epochs": options.epochs },
        },
    });
    let text = serde_json::to_string_pretty(&without_nulls(manifest)).context("failed to write JSON")?;
    let manifest = engram_api::parse(&text, "command line", Requirement::Runs)?;
    run::check(&manifest, &target, &client)?;
    let submitted = run::submit(&client, &manifest, &manifest.runs[0]).await?;
    if !submitted {
        context.output.note(format!("run {name} already exists; to run it again, give another --name"));
    }
    if options.no_wait {
        context.output.note(format!("submitted run {name}; show its progress: engram describe run {name}"));
        return Ok(ExitCode::Ok);
    }
    let report = follow(&client, &name, &context.output).await?;
    if let (Some(path), Some(report)) = (&options.report, &report) {
        run::write_page(report, path)?;
        context.output.note(format!("wrote {}", path.display()));
    }
    Ok(ExitCode::Ok)
}

/// Notes that a history is incomplete. A repository that cannot be read is reported by what reads it next.
fn note_shallow(path: &Path, context: &Context) {
    if is_shallow_git(path).unwrap_or(false) {
        context.output.note(format!(
            "note: {} is a shallow clone, so older commits are missing; `git fetch --unshallow` fetches them",
            path.display()
        ));
    }
}

async fn write_events(options: GitOptions, file: PathBuf, context: &Context) -> anyhow::Result<ExitCode> {
    let mut progress = Progress::new(&context.output, "commits", None);
    let to = file.clone();
    let written = tokio::task::spawn_blocking(move || {
        let failed = || format!("failed to write {}", to.display());
        let output = OutputFile::create(&to).with_context(failed)?;
        let compressed =
            Compression::of_path(&to).writer(output.handle().with_context(failed)?).with_context(failed)?;
        let show = |done, total| {
            progress.set_total(total);
            progress.set(done, "");
        };
        let (compressed, epochs, events) =
            export_git(&options, compressed, &to, show).map_err(|error| match error {
                SourceError::Unwritable { .. } => anyhow::Error::new(error),
                unreadable => source_problem(&unreadable).into(),
            })?;
        compressed.finish().with_context(failed)?;
        output.finish().with_context(failed)?;
        anyhow::Ok((epochs, events))
    });
    let (epochs, events) = written.await.context("the export task failed")??;
    let text = format!("wrote {} events of {} commits to {}", count(events), count(epochs), file.display());
    context.output.note(text);
    context.output.note(format!("to submit a run: engram import events {} --key path --epoch epoch", file.display()));
    Ok(ExitCode::Ok)
}

/// Converts an error of a source to a problem with its error code.
pub(super) fn source_problem(error: &SourceError) -> Problem {
    Problem::new(Code::find(error.code()).unwrap_or(Code::SourceUnreadable), error.to_string())
}

fn text(path: &Path) -> anyhow::Result<&str> {
    let not_text = || problem(Code::SourceUnreadable, format!("the path {} is not UTF-8", path.display()));
    path.to_str().ok_or_else(not_text)
}

/// Derives the name of a run: `data/Own Events.csv.zst` gives `import-own-events-` and a hash of its absolute path. A stable name
/// prevents importing a file twice, and the hash keeps files of the same name in different folders apart.
fn default_name(from: &Path) -> String {
    let from = std::path::absolute(from).unwrap_or_else(|_| from.to_owned());
    let hash = format!("-{:08x}", engram_memory::key_id(from.as_os_str().as_encoded_bytes()).0 >> 32);
    let from = from.components().next_back().map(|part| part.as_os_str().to_string_lossy().to_lowercase());
    let from = from.unwrap_or_default();
    let stem = from.split('.').find(|part| !part.is_empty()).unwrap_or_default();
    let plain = stem.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' });
    let mut name: String = "import-".chars().chain(plain).take(MAX_NAME_LENGTH - hash.len()).collect();
    name.truncate(name.trim_end_matches('-').len());
    name.push_str(&hash);
    name
}

/// Removes fields that are null.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let present = fields.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(present.map(|(name, value)| (name, without_nulls(value))).collect())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_names_derived_from_files_are_valid() {
        for (path, name) in [
            ("data/Own Events.csv.zst", "import-own-events"),
            ("/x/.hidden", "import-hidden"),
            ("Ärger.csv", "import--rger"),
            ("/", "import"),
        ] {
            let derived = default_name(Path::new(path));
            assert_eq!(derived.rsplit_once('-').map(|(base, hash)| (base, hash.len())), Some((name, 8)));
            assert!(engram_api::is_name(&derived), "{derived}");
        }
        assert_ne!(default_name(Path::new("monday/e.csv")), default_name(Path::new("tuesday/e.csv")));
        let long = default_name(Path::new(&"x".repeat(200)));
        assert!(engram_api::is_name(&long), "{long}");
    }

    #[test]
    fn imports_are_validated_as_manifests() {
        let source = json!({ "events": {
            "path": "a.csv", "columns": { "key": "k", "id": null, "epoch": "e" }, "quality": null,
        } });
        let run = |source| {
            without_nulls(json!({
                "apiVersion": API_VERSION, "kind": "LearnerRun", "metadata": { "name": "a" },
                "spec": { "clusterRef": { "name": "c" }, "kind": "Memory", "memory": { "source": source, "decay": null } },
            }))
        };
        let manifest = engram_api::parse(&run(source).to_string(), "command line", Requirement::Runs).unwrap();
        assert_eq!(manifest.runs.len(), 1);
        let bad = json!({ "events": { "path": "a.csv", "columns": { "key": "k", "epoch": "e" }, "quality": 2.0 } });
        let problems = engram_api::parse(&run(bad).to_string(), "command line", Requirement::Runs).unwrap_err();
        assert!(problems.to_string().contains("ENG-0103"), "{problems}");
    }
}
