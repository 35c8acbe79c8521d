//! `engram export`: all memories into a file, worker by worker.

use crate::args::Context;
use crate::error::problem;
use crate::output::{bytes, count};
use crate::progress::Progress;
use crate::rows::{Format, Packing, Writer, temporary_beside};
use crate::target;
use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use engram_client::{Client, GetOptions, QualityOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Write all memories into a file that `insert` reads
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram export memories.jsonl.zst       format and packing by the name: .jsonl, .csv, also .zst and .gz
  engram export --format csv > all.csv
  engram insert --file memories.jsonl.zst

Keys, weights, groups, features and payloads are written, in no order; the file appears whole or not at all. `insert` takes
weights in single precision: to keep every bit, use `engram snapshot`.")]
pub(crate) struct Arguments {
    /// File to write; absent or `-` is stdout
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Format, where the name does not tell (stdout is JSON Lines)
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Replace a file that is there
    #[arg(long)]
    force: bool,
}

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let file = arguments.file.as_deref().filter(|path| *path != Path::new("-"));
    let Some(path) = file else {
        let format = arguments.format.unwrap_or(Format::Jsonl);
        let client = target::connect(context).await?;
        let (mut to, _) = write(&client, BufWriter::new(std::io::stdout()), format, context).await?;
        to.flush()?;
        return Ok(ExitCode::Ok);
    };
    let format = match arguments.format {
        Some(format) => format,
        None => Format::of_path(path)?,
    };
    if path.exists() && !arguments.force {
        let message = format!("{} is there already; --force replaces it", path.display());
        return Err(problem(Code::Conflicting, message));
    }
    let client = target::connect(context).await?;
    let failed = || format!("failed to write {}", path.display());
    let file = temporary_beside(path).with_context(failed)?;
    let packed = Packing::of_path(path).writer(file.reopen().with_context(failed)?).with_context(failed)?;
    let (packed, written) = write(&client, packed, format, context).await.with_context(failed)?;
    packed.finish().with_context(failed)?;
    let length = file.as_file().metadata().map_or(0, |meta| meta.len());
    file.persist(path).with_context(failed)?;
    context.output.note(format!("wrote {} memories to {} ({})", count(written), path.display(), bytes(length)));
    Ok(ExitCode::Ok)
}

/// Writes all memories; returns how many.
async fn write<W: Write>(client: &Client, to: W, format: Format, context: &Context) -> anyhow::Result<(W, u64)> {
    let columns = GetOptions { features: client.map()?.feature_dimension > 0, payloads: true };
    let total = client.quality(QualityOptions::default()).await?.vector.total().count;
    let mut progress = Progress::new(&context.output, "export", Some(total));
    let mut writer = Writer::new(to, format, columns)?;
    let mut scan = client.scan(columns).await?;
    let mut written = 0;
    while let Some(memories) = scan.next().await? {
        for memory in &memories {
            writer.write(memory)?;
        }
        written += memories.len() as u64;
        progress.set(written, "memories");
    }
    Ok((writer.finish()?, written))
}
