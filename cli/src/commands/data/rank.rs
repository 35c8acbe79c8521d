//! `engram rank`: memories by descending weight, then ascending id, merged from all workers.

use super::get::name;
use super::reads::Reads;
use crate::context::Context;
use crate::output::{Format, Output, Table, tsv_cell};
use crate::rows::{Object, weight};
use crate::target;
use engram_api::{API_VERSION, ExitCode, printable_line};
use engram_client::{Client, Memory, RankOptions};
use engram_memory::Group;
use serde::Serialize;
use std::io::{self, BufWriter, Write as _};

/// Larger results are streamed instead of laid out as a table, which bounds memory.
const TABLE_ROWS: u64 = 10_000;

/// List the memories with the highest weight
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram rank                  list the top 10
  engram rank -k 100 --group 1
  engram rank -k 0 -o tsv      stream all memories
  engram rank --read replica   read replicas that lag by at most 1 s

Sorted by descending weight, then ascending id. Weights are exact multiples of 2^-30.")]
pub(crate) struct Rank {
    /// Number of memories; 0 = all
    #[arg(short = 'k', long, value_name = "N", default_value_t = 10)]
    limit: u64,
    /// Only memories of this group
    #[arg(short, long, value_name = "0-255")]
    group: Option<u8>,
    #[command(flatten)]
    reads: Reads,
}

/// A ranked memory, for JSON and YAML output.
#[derive(Serialize)]
struct Ranked<'a> {
    rank: u64,
    #[serde(flatten)]
    memory: Object<'a>,
}

pub(crate) async fn run(arguments: &Rank, context: &Context) -> anyhow::Result<ExitCode> {
    let client = target::connect(context).await?.with_read_mode(arguments.reads.mode());
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

/// Prints rows as they arrive: TSV, names, or a JSON list (which is valid YAML).
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
                Format::Name => writeln!(to, "{}", printable_line(&name(memory)))?,
                _ => writeln!(to, "{}", cells(rank, memory).map(|cell| tsv_cell(&cell)).join("\t"))?,
            }
        }
    }
    if output.is_structured() {
        writeln!(to, "\n]}}")?;
    }
    Ok(to.flush()?)
}
