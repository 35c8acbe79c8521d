//! `engram export`: writes all memories to a file, worker by worker.

use crate::context::Context;
use crate::error::problem;
use crate::output::{bytes, count};
use crate::output_file::OutputFile;
use crate::progress::Progress;
use crate::rows::{Compression, Format, Writer};
use crate::target;
use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use engram_client::{Client, GetOptions, QualityOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Export all memories to a file that `engram insert --file` can read
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram export memories.jsonl.zst       format by extension: .jsonl or .csv, optionally .zst or .gz
  engram export --format csv > all.csv
  engram insert --file memories.jsonl.zst

Exports keys, weights, groups, features and payloads in no particular order. A file appears only when complete. `engram insert` reads
weights in single precision; for an exact copy use `engram snapshot create`.")]
pub(crate) struct Export {
    /// Output file [default: stdout]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Format of the output [default: by extension; jsonl for stdout]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Overwrite an existing file
    #[arg(long)]
    force: bool,
}

pub(crate) async fn run(arguments: &Export, context: &Context) -> anyhow::Result<ExitCode> {
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
    let failed = || format!("failed to write {}", path.display());
    if !arguments.force && OutputFile::is_overwritten(path).with_context(failed)? {
        let message = format!("{} already exists; overwrite it with --force", path.display());
        return Err(problem(Code::Conflicting, message));
    }
    let client = target::connect(context).await?;
    let file = OutputFile::create(path).with_context(failed)?;
    let compressed = Compression::of_path(path).writer(file.handle().with_context(failed)?).with_context(failed)?;
    let (compressed, written) = write(&client, compressed, format, context).await.with_context(failed)?;
    let length = compressed.finish().with_context(failed)?;
    file.finish().with_context(failed)?;
    context.output.note(format!("wrote {} memories to {} ({})", count(written), path.display(), bytes(length)));
    Ok(ExitCode::Ok)
}

/// Writes all memories and returns their number.
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
