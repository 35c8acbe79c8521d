//! `engram import`: submits a run for a file of events or a git repository, or converts a repository to a file of events.

use super::run::{self, follow};
use super::run_report::Report;
use crate::context::Context;
use crate::error::problem;
use crate::output::count;
use crate::output_file::OutputFile;
use crate::progress::Progress;
use crate::rows::Compression;
use crate::target::Target;
use anyhow::Context as _;
use engram_api::{API_VERSION, Code, ExitCode, MAX_NAME_LENGTH, Problem, Requirement, Source};
use engram_learn::source::{GitOptions, SourceError, export_git, is_shallow_git};
use engram_proto::v1::ResumeMode;
use serde_json::{Value, json};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Folder of the state directory with the events that were imported from stdin.
const IMPORTS: &str = "imports";

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
  engram import events export.txt --format csv --separator semicolon --key product --epoch week
  zcat log.gz | engram import events - --format jsonl --id item --epoch day

Each row reinforces one memory in one epoch, and epochs never decrease from row to row. The command submits a run and follows it;
a manifest for `engram run` has more options. A file that was imported before is not learned twice: the run continues with what was
added to the file, or with the epoch in which it failed, and ends with an error if an epoch that it has learned was changed.")]
pub(crate) struct Events {
    /// File of events, optionally .gz or .zst; `-` is stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Format of the file [default: by its extension]
    #[arg(long, value_enum, ignore_case = true, required_if_eq("file", "-"))]
    format: Option<EventsFormat>,
    /// Separator of the columns of a CSV file [default: comma]
    #[arg(long, value_enum, ignore_case = true)]
    separator: Option<Separator>,
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

/// Format of a file of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum EventsFormat {
    /// One JSON object per line.
    Jsonl,
    /// Separated values with a header line.
    Csv,
    /// Apache Parquet.
    Parquet,
}

impl EventsFormat {
    /// Returns its name in manifests, and its extension.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Jsonl => ("Jsonl", "jsonl"),
            Self::Csv => ("Csv", "csv"),
            Self::Parquet => ("Parquet", "parquet"),
        }
    }
}

/// Separator of columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Separator {
    /// ,
    #[value(alias = ",")]
    Comma,
    /// ;
    #[value(alias = ";")]
    Semicolon,
    /// A tab.
    #[value(alias = "\t")]
    Tab,
    /// |
    #[value(alias = "|")]
    Pipe,
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
            Self::Events(events) => events.import(context).await,
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
                let target = Target::find(context).await?;
                submit_run(source, &target, default_name(&git.path), &git.run, context).await
            }
        }
    }
}

impl Events {
    async fn import(self, context: &Context) -> anyhow::Result<ExitCode> {
        let target = Target::find(context).await?;
        let (file, name) = if self.file == Path::new("-") {
            let extension = self.format.map_or("", |format| format.names().1);
            store_stdin(&target, extension)?
        } else {
            (self.file.clone(), default_name(&self.file))
        };
        let source = json!({ "events": {
            "path": text(&file)?,
            "format": self.format.map(|format| format.names().0),
            "separator": self.separator.map(|separator| format!("{separator:?}")),
            "columns": {
                "key": self.key, "id": self.id, "epoch": self.epoch, "time": self.time,
                "quality": self.quality_column, "delta": self.delta_column,
            },
            "quality": self.quality,
            "epochSpan": self.span,
        } });
        submit_run(source, &target, name, &self.run, context).await
    }
}

/// Copies stdin to a file in the state directory, where the workers can read it as long as the run needs it. Returns its path and the
/// default name of the run, both by the content: the same content is not learned twice.
fn store_stdin(target: &Target, extension: &str) -> anyhow::Result<(PathBuf, String)> {
    let Target::Local(local) = target else {
        let message =
            "events from stdin can be imported into local clusters only; give a file that the workers can read";
        return Err(problem(Code::NotSupported, message));
    };
    let folder = std::path::absolute(local.folder.join(IMPORTS)).context("failed to get the current directory")?;
    let failed = || format!("failed to write stdin to {}", folder.display());
    std::fs::create_dir_all(&folder).with_context(failed)?;
    let mut file = tempfile::NamedTempFile::new_in(&folder).with_context(failed)?;
    let (mut hasher, mut buffer, mut stdin) = (Xxh3::new(), vec![0; 1 << 20], std::io::stdin().lock());
    loop {
        let read = stdin.read(&mut buffer).context("failed to read stdin")?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
        file.write_all(&buffer[..read]).with_context(failed)?;
    }
    let name = format!("import-stdin-{:016x}", hasher.digest128() as u64);
    let path = folder.join(format!("{name}.{extension}"));
    file.persist(&path).map_err(|error| error.error).with_context(failed)?;
    Ok((path, name))
}

/// Builds a manifest from the options, so that manifest validation applies, and submits it.
async fn submit_run(
    source: Value,
    target: &Target,
    default_name: String,
    options: &RunOptions,
    context: &Context,
) -> anyhow::Result<ExitCode> {
    let client = target.connect().await?;
    let name = options.name.clone().unwrap_or(default_name);
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
    run::check(&manifest, target, &client)?;
    let submission = run::submit(&client, &manifest, &manifest.runs[0], ResumeMode::Always).await?;
    if submission.resumed {
        let epochs = submission.status.epoch;
        context
            .output
            .note(format!("run {name} has learned {epochs} epochs of it before and continues with the next one"));
    } else if !submission.created {
        context.output.note(format!("run {name} exists and has not ended"));
    }
    if options.no_wait {
        let describe = context.output.command_line(&format!("describe run {name}"));
        context.output.note(format!("submitted run {name}; show its progress: {describe}"));
        return Ok(ExitCode::Ok);
    }
    let report = follow(&client, &name, &context.output).await?;
    if let (true, Some(Report::Learning(report))) = (submission.resumed, &report)
        && report.epochs.len() as u64 == submission.status.epoch
    {
        context.output.note("nothing was added since; to learn all of it once more, give another --name");
    }
    if let Some(Report::Learning(report)) = &report
        && report.prediction.iter().any(|rate| rate.memory() < rate.frequent().max(rate.recent()))
    {
        // Of a repository its folder is enough.
        let what = manifest.runs[0].spec.memory.as_ref().map(|memory| &memory.source);
        let what = if let Some(Source::Git(git)) = what { git.path.as_str() } else { "FILE" };
        context.output.note(format!(
            "a simpler ranking predicts better than the memory with the settings of this cluster; to search better ones: engram tune {what}"
        ));
    }
    if let (Some(path), Some(report)) = (&options.report, &report) {
        report.write_page(path)?;
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
pub(crate) fn source_problem(error: &SourceError) -> Problem {
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
