//! `engram insert`: inserts memories from arguments or a file, each batch exactly once.

use super::change::Summary;
use super::select::Selection;
use crate::context::Context;
use crate::error::problem;
use crate::output::count;
use crate::progress::Progress;
use crate::rows::{Format, Purpose, Reader, Row};
use crate::target;
use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use engram_client::{Error, Rows, Session, WriteResult};
use engram_memory::{Blobs, Group, Outcome};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use tokio::sync::mpsc;

/// Batches that are read ahead.
const READ_AHEAD: usize = 2;

/// Insert memories, or update fields of existing ones
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram insert government congress --weight 0.5
  engram insert --id 1,2,3 --group 1
  engram insert note-17 --payload 'call back on Monday' --features 0.1,0.9
  engram insert --file memories.jsonl.zst      or .csv, or - for stdin

A row of a file has `key` or `id`, and any of `weight`, `group`, `features`, `payload`, `payloadBase64`. In CSV, features are
separated by spaces. Omitted fields keep their value; new memories get the initial weight of the cluster and group 0.
Weights are read in single precision.")]
pub(crate) struct Insert {
    #[command(flatten)]
    selection: Selection,
    /// Weight, 0 to 1
    #[arg(short, long, value_name = "0-1")]
    weight: Option<f32>,
    /// Group
    #[arg(short, long, value_name = "0-255")]
    group: Option<u8>,
    /// Payload as text
    #[arg(long, value_name = "TEXT")]
    payload: Option<String>,
    /// Feature vector
    #[arg(long, value_name = "X,Y,..", value_delimiter = ',', allow_negative_numbers = true)]
    features: Vec<f32>,
    /// Read rows from a file: JSON Lines or CSV, also .zst and .gz; `-` is stdin
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["keys", "ids", "weight", "group", "payload", "features"])]
    file: Option<PathBuf>,
    /// Format of the file [default: by its extension; jsonl for stdin]
    #[arg(long, value_enum, requires = "file")]
    format: Option<Format>,
}

pub(crate) async fn run(arguments: Insert, context: &Context) -> anyhow::Result<ExitCode> {
    let client = target::connect(context).await?;
    let session = client.session();
    if let Some(path) = &arguments.file {
        let purpose = Purpose::Insert { dimension: client.map()?.feature_dimension as usize };
        let send = async |rows, sum: &mut Outcome| insert(&session, rows, sum).await;
        let summary = stream(path, arguments.format, purpose, context, send).await?;
        return summary.print(&Selection::default(), context);
    }
    // On the wire NaN means "keep the weight"; on the command line it is an error.
    if let Some(weight) = arguments.weight.filter(|weight| !(0.0..=1.0).contains(weight)) {
        return Err(problem(Code::InvalidValue, format!("weight is {weight}; allowed: 0 to 1")));
    }
    let ids = arguments.selection.ids()?;
    let rows = ids.len();
    let memories = Rows {
        keys: arguments.selection.key_column(),
        weights: arguments.weight.map_or_else(Vec::new, |weight| vec![weight; rows]),
        groups: arguments.group.map_or_else(Vec::new, |group| vec![Group(group); rows]),
        features: arguments.features.repeat(rows),
        payloads: arguments.payload.map(|text| vec![text.into_bytes(); rows].into_iter().collect()),
        ids,
    };
    let written = session.upsert(memories).await?;
    Summary::new("insert", written.outcome).print(&arguments.selection, context)
}

/// Inserts rows in order. All rows of a request have the same columns.
async fn insert(session: &Session, rows: Vec<Row>, sum: &mut Outcome) -> Result<(), Error> {
    for rows in rows.chunk_by(|a, b| columns(a) == columns(b)) {
        add(sum, session.upsert(upsert(rows)).await)?;
    }
    Ok(())
}

/// Adds the outcome of a request to `sum`, including the applied part of a failed request.
pub(super) fn add(sum: &mut Outcome, written: Result<WriteResult, Error>) -> Result<(), Error> {
    match &written {
        Ok(written) => sum.merge(&written.outcome),
        Err(Error::Partial { written, .. }) => sum.merge(&written.outcome),
        Err(_) => {}
    }
    written.map(|_| ())
}

fn columns(row: &Row) -> (bool, bool) {
    (row.group.is_some(), !row.features.is_empty())
}

fn upsert(rows: &[Row]) -> Rows {
    let blobs = |column: &dyn Fn(&Row) -> Vec<u8>| -> Option<Blobs> {
        let entries: Vec<Vec<u8>> = rows.iter().map(column).collect();
        entries.iter().any(|entry| !entry.is_empty()).then(|| entries.into_iter().collect())
    };
    let weighs = rows.iter().any(|row| row.weight.is_some());
    Rows {
        ids: rows.iter().map(|row| row.id).collect(),
        weights: rows.iter().filter(|_| weighs).map(|row| row.weight.unwrap_or(f32::NAN)).collect(),
        groups: rows.iter().filter_map(|row| row.group.map(Group)).collect(),
        keys: blobs(&|row| row.key.clone().unwrap_or_default().into_bytes()),
        features: rows.iter().flat_map(|row| row.features.iter().copied()).collect(),
        payloads: blobs(&|row| row.payload.clone()),
    }
}

/// Sends the rows of a file in batches, in order. A file is validated completely before the first batch. Stdin and pipes can be read
/// only once: they are validated as they are read.
///
/// # Errors
/// A row is invalid, or the cluster rejects it; prints how many rows were applied before.
pub(super) async fn stream(
    path: &Path,
    format: Option<Format>,
    purpose: Purpose,
    context: &Context,
    send: impl AsyncFn(Vec<Row>, &mut Outcome) -> Result<(), Error>,
) -> anyhow::Result<Summary> {
    let bytes =
        std::fs::metadata(path).ok().filter(|meta| path != Path::new("-") && meta.is_file()).map(|meta| meta.len());
    let reader = Reader::open(path, format, purpose)?;
    if bytes.is_some() {
        let path = path.to_owned();
        let validation = tokio::task::spawn_blocking(move || Reader::open(&path, format, purpose)?.check());
        validation.await.context("the validation task failed")??;
    }
    let read = reader.bytes_read();
    let (batches, mut next) = mpsc::channel(READ_AHEAD);
    tokio::task::spawn_blocking(move || {
        let mut reader = reader.batches();
        loop {
            let batch = reader.next_batch().transpose();
            let last = !matches!(batch, Some(Ok(_)));
            // A closed channel means that sending failed.
            if batch.is_some_and(|batch| batches.blocking_send(batch).is_err()) || last {
                return;
            }
        }
    });
    let mut progress = Progress::new(&context.output, "bytes read", bytes);
    let mut summary = Summary::new(purpose.command(), Outcome::default());
    while let Some(batch) = next.recv().await {
        let rows: Vec<Row> = batch.map_err(|error| report_applied(&summary, error.into()))?;
        summary.requested += rows.len() as u64;
        send(rows, &mut summary.outcome).await.map_err(|error| report_applied(&summary, error.into()))?;
        let message = format!("{} rows", count(summary.requested));
        progress.set(read.load(Ordering::Relaxed), &message);
    }
    if summary.requested == 0 {
        return Err(problem(Code::InvalidValue, format!("{} has no rows", path.display())));
    }
    Ok(summary)
}

/// Prints how many rows were applied before an error; they stay applied.
fn report_applied(summary: &Summary, error: anyhow::Error) -> anyhow::Error {
    let applied = summary.outcome.applied;
    if applied > 0 {
        eprintln!("applied {} rows before the error", count(applied));
    }
    error
}
