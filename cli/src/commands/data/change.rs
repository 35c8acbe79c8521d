//! `engram remove`, `reinforce` and `decay`: exactly-once changes outside of runs.

use super::insert::{add, stream};
use super::select::Selection;
use crate::context::Context;
use crate::error::{Exit, problem};
use crate::output::{Table, count};
use crate::rows::{Format, Purpose, Row};
use crate::target;
use engram_api::{API_VERSION, Code, ExitCode, printable_line};
use engram_client::{Error, GroupSignal, Session, Signals, Updates};
use engram_memory::{Group, OnMissing, Outcome, RejectionReason};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Remove memories
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram remove government congress
  engram remove --id 1,2,3")]
pub(crate) struct Remove {
    #[command(flatten)]
    selection: Selection,
}

/// Reinforce memories by a quality or a change of weight
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram reinforce government --quality 0.9          increase the weight above 0.5, decrease it below
  engram reinforce government --delta=-0.05          or a change of weight
  engram reinforce note-17 --quality 1 --create      create the memory if it does not exist
  engram reinforce --group 1 --quality 0.2           all memories of a group
  engram reinforce --file events.jsonl               rows with key or id, and quality or delta; - is stdin

Updates are applied in order, and the weight is clamped to 0-1 after each. A memory that is given twice is updated twice.")]
pub(crate) struct Reinforce {
    #[command(flatten)]
    selection: Selection,
    /// Quality, 0 to 1
    #[arg(short = 'Q', long, value_name = "0-1", conflicts_with = "delta")]
    quality: Option<f32>,
    /// Change of weight, -1 to 1
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    delta: Option<f32>,
    /// Create missing memories with the initial weight of the cluster
    #[arg(long)]
    create: bool,
    /// All memories of this group
    #[arg(short, long, value_name = "0-255", conflicts_with_all = ["keys", "ids", "file", "create"])]
    group: Option<u8>,
    /// Read rows from a file: JSON Lines or CSV, also .zst and .gz; `-` is stdin
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["keys", "ids", "quality", "delta"])]
    file: Option<PathBuf>,
    /// Format of the file [default: by its extension; jsonl for stdin]
    #[arg(long, value_enum, requires = "file")]
    format: Option<Format>,
}

/// Decay the weights of all memories
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram decay 0.01    subtract 0.01 from every weight, down to 0")]
pub(crate) struct Decay {
    /// Amount to subtract from every weight, 0 to 1
    #[arg(value_name = "0-1", allow_negative_numbers = true)]
    amount: f64,
}

pub(crate) async fn remove(arguments: &Remove, context: &Context) -> anyhow::Result<ExitCode> {
    let ids = arguments.selection.ids()?;
    let written = target::connect(context).await?.session().remove(ids).await?;
    Summary::new("remove", written.outcome).print(&arguments.selection, context)
}

pub(crate) async fn reinforce(arguments: &Reinforce, context: &Context) -> anyhow::Result<ExitCode> {
    let on_missing = if arguments.create { OnMissing::Create } else { OnMissing::Report };
    if let Some(path) = &arguments.file {
        let session = target::connect(context).await?.session();
        let send = async |rows, sum: &mut Outcome| reinforce_rows(&session, rows, on_missing, sum).await;
        let summary = stream(path, arguments.format, Purpose::Reinforce, context, send).await?;
        return summary.print(&Selection::default(), context);
    }
    if arguments.quality.is_none() && arguments.delta.is_none() {
        return Err(problem(Code::InvalidValue, "neither --quality nor --delta is given; one of them is needed"));
    }
    if let Some(group) = arguments.group {
        let signal = match (arguments.quality, arguments.delta) {
            (Some(quality), _) => GroupSignal::Quality(quality),
            (None, delta) => GroupSignal::Delta(delta.unwrap_or_default()),
        };
        let session = target::connect(context).await?.session();
        let written = session.reinforce_groups(&[(Group(group), signal)]).await?;
        return Summary::new("reinforce", written.outcome).print(&arguments.selection, context);
    }
    let ids = arguments.selection.ids()?;
    let signals = match (arguments.quality, arguments.delta) {
        (Some(quality), _) => Signals::Quality(quality),
        (None, delta) => Signals::Deltas(vec![delta.unwrap_or_default(); ids.len()]),
    };
    let updates = Updates { ids, signals, on_missing, keys: arguments.selection.key_column() };
    let written = target::connect(context).await?.session().reinforce(updates).await?;
    Summary::new("reinforce", written.outcome).print(&arguments.selection, context)
}

pub(crate) async fn decay(arguments: &Decay, context: &Context) -> anyhow::Result<ExitCode> {
    let client = target::connect(context).await?;
    client.session().decay(arguments.amount).await?;
    context.output.note(format!("decayed all memories by {}", arguments.amount));
    Ok(ExitCode::Ok)
}

/// Reinforces in the order of the rows. Rows with qualities and rows with deltas go into separate requests.
async fn reinforce_rows(
    session: &Session,
    rows: Vec<Row>,
    on_missing: OnMissing,
    sum: &mut Outcome,
) -> Result<(), Error> {
    for rows in rows.chunk_by(|a, b| a.quality.is_some() == b.quality.is_some()) {
        let keys = rows.iter().any(|row| row.key.is_some());
        let signals = if rows[0].quality.is_some() {
            Signals::Qualities(rows.iter().filter_map(|row| row.quality).collect())
        } else {
            Signals::Deltas(rows.iter().filter_map(|row| row.delta).collect())
        };
        let updates = Updates {
            ids: rows.iter().map(|row| row.id).collect(),
            signals,
            on_missing,
            keys: keys.then(|| rows.iter().map(|row| row.key.clone().unwrap_or_default().into_bytes()).collect()),
        };
        add(sum, session.reinforce(updates).await)?;
    }
    Ok(())
}

/// Summary of a change.
pub(super) struct Summary {
    command: &'static str,
    /// Rows read, for input from a file.
    pub(super) requested: u64,
    pub(super) outcome: Outcome,
}

impl Summary {
    pub(super) fn new(command: &'static str, outcome: Outcome) -> Self {
        Self { command, requested: 0, outcome }
    }

    /// Prints the outcome and the rejected updates.
    ///
    /// # Errors
    /// Some updates were rejected: unknown memories, or colliding keys.
    pub(super) fn print(&self, selection: &Selection, context: &Context) -> anyhow::Result<ExitCode> {
        let Outcome { applied, created, evicted, rejected, rejections, .. } = &self.outcome;
        let mut table = Table::new(&["command", ">applied", ">created", ">evicted", ">rejected"]);
        let mut cells = vec![self.command.to_owned()];
        cells.extend([applied, created, evicted, rejected].map(|number| count(*number)));
        table.row(cells);
        let rejected_updates: Vec<Value> =
            rejections.iter().map(|it| json!({ "id": it.id.0, "reason": reason(it.reason) })).collect();
        let object = json!({
            "apiVersion": API_VERSION, "kind": "Outcome", "command": self.command,
            "applied": applied, "created": created, "evicted": evicted, "rejected": rejected, "rejections": rejected_updates,
        });
        context.output.object(&object, &table)?;
        if *rejected == 0 {
            return Ok(ExitCode::Ok);
        }
        for rejection in rejections {
            eprintln!("{}: {}", printable_line(&selection.name(rejection.id)), message(rejection.reason));
        }
        if *rejected > rejections.len() as u64 {
            eprintln!("and {} more", count(rejected - rejections.len() as u64));
        }
        let unknown = rejections.iter().all(|rejection| rejection.reason == RejectionReason::Unknown);
        Err(Exit(if unknown { ExitCode::NotFound } else { ExitCode::Conflict }).into())
    }
}

const fn reason(reason: RejectionReason) -> &'static str {
    match reason {
        RejectionReason::Unknown => "Unknown",
        RejectionReason::KeyCollision => "KeyCollision",
        RejectionReason::KeyMismatch => "KeyMismatch",
    }
}

fn message(reason: RejectionReason) -> String {
    match reason {
        RejectionReason::Unknown => format!("memory not found ({})", Code::MemoryNotFound),
        RejectionReason::KeyCollision => format!("another key has the same id ({})", Code::KeyCollision),
        RejectionReason::KeyMismatch => format!("the key does not hash to the id ({})", Code::KeyCollision),
    }
}
