//! `engram rank`: memories by weight descending, then id ascending, merged from all workers.

use super::get::name;
use super::reads::Reads;
use crate::args::Context;
use crate::output::{Format, Output, Table};
use crate::rows::{Object, weight};
use crate::target;
use engram_api::{API_VERSION, ExitCode};
use engram_client::{Client, Memory, RankOptions};
use engram_memory::Group;
use serde::Serialize;
use std::io::{self, BufWriter, Write as _};

/// More rows than this are printed as they arrive, not laid out as a table: nobody reads them, and memory is bounded.
const TABLE_ROWS: u64 = 10_000;

/// Show the memories of highest weight
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram rank                  the first 10
  engram rank -k 100 --group 1
  engram rank -k 0 -o tsv      all, streamed
  engram rank --read replica   of copies, at most a second old

Order: weight descending, then id ascending. Weights are exact: multiples of 2^-30.")]
pub(crate) struct Arguments {
    /// How many; 0 = all
    #[arg(short = 'k', long, value_name = "N", default_value_t = 10)]
    limit: u64,
    /// Of this group only
    #[arg(short, long, value_name = "0-255")]
    group: Option<u8>,
    #[command(flatten)]
    reads: Reads,
}

/// A ranked memory, for programs.
#[derive(Serialize)]
struct Ranked<'a> {
    rank: u64,
    #[serde(flatten)]
    memory: Object<'a>,
}

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let client = target::connect(context).await?.reading(arguments.reads.mode());
    let group = arguments.group.map(Group);
    if !(1..=TABLE_ROWS).contains(&arguments.limit) {
        stream(&client, RankOptions { limit: arguments.limit, group, keys: true }, &context.output).await?;
        return Ok(ExitCode::Ok);
    }
    let memories = client.top(arguments.limit, group).await?;
    let mut table = Table::new(&["memory", ">weight", ">rank", ">group", "+>id"]);
    let mut ranked = Vec::with_capacity(memories.len());
    for (rank, memory) in (1..).zip(&memories) {
        table.row(cells(rank, memory));
        ranked.push(Ranked { rank, memory: Object::of(memory) });
    }
    context.output.list(&ranked, &table)?;
    Ok(ExitCode::Ok)
}

fn cells(rank: u64, memory: &Memory) -> [String; 5] {
    [name(memory), weight(memory).to_string(), rank.to_string(), memory.group.0.to_string(), memory.id.to_string()]
}

/// Prints rows as they arrive: TSV, names, or a list in JSON (which is YAML too).
async fn stream(client: &Client, options: RankOptions, output: &Output) -> anyhow::Result<()> {
    let mut ranked = client.rank(options).await?;
    let mut to = BufWriter::new(io::stdout());
    match output.format {
        Format::Json | Format::Yaml => write!(to, r#"{{"apiVersion":"{API_VERSION}","kind":"List","items":["#)?,
        Format::Name => {}
        _ => writeln!(to, "memory\tweight\trank\tgroup\tid")?,
    }
    let mut rank = 0;
    while let Some(memories) = ranked.next().await? {
        for memory in &memories {
            rank += 1;
            match output.format {
                Format::Json | Format::Yaml => {
                    to.write_all(if rank == 1 { b"\n" } else { b",\n" })?;
                    serde_json::to_writer(&mut to, &Ranked { rank, memory: Object::of(memory) })?;
                }
                Format::Name => writeln!(to, "{}", name(memory))?,
                _ => writeln!(to, "{}", cells(rank, memory).map(|cell| escaped(&cell)).join("\t"))?,
            }
        }
    }
    if output.is_structured() {
        writeln!(to, "\n]}}")?;
    }
    Ok(to.flush()?)
}

/// What separates must not be in what is separated.
fn escaped(cell: &str) -> String {
    cell.replace('\\', "\\\\").replace('\t', "\\t").replace('\n', "\\n")
}
