//! `engram get`: memories as they are now.

use super::reads::PrimaryReads;
use super::select::Selection;
use crate::args::Context;
use crate::error::Ended;
use crate::output::Table;
use crate::rows::{Object, weight};
use crate::target;
use engram_api::{Code, ExitCode};
use engram_client::{GetOptions, Memory};

/// Show memories: weight, group, and what they carry
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram get government                   by key
  engram get government congress --id 42  keys, and an id
  engram get government -o json           with features and payload

Weights are exact: a weight is a multiple of 2^-30.")]
pub(crate) struct Arguments {
    #[command(flatten)]
    selection: Selection,
    /// Read features and payloads too (always so with -o json, yaml and wide)
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    reads: PrimaryReads,
}

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let ids = arguments.selection.ids()?;
    let everything =
        arguments.all || context.output.is_structured() || context.output.format == crate::output::Format::Wide;
    let options = GetOptions { features: everything, payloads: everything };
    let found = target::connect(context).await?.reading(arguments.reads.mode()).get(&ids, options).await?;
    let mut table = Table::new(if everything { &COLUMNS } else { &COLUMNS[..4] });
    for memory in &found.memories {
        let mut cells =
            vec![name(memory), weight(memory).to_string(), memory.group.0.to_string(), memory.id.to_string()];
        if everything {
            cells.push(memory.features.iter().map(f32::to_string).collect::<Vec<_>>().join(" "));
            cells.push(String::from_utf8_lossy(&memory.payload).into_owned());
        }
        table.row(cells);
    }
    let shown: Vec<Object<'_>> = found.memories.iter().map(Object::of).collect();
    context.output.list(&shown, &table)?;
    if found.missing.is_empty() {
        return Ok(ExitCode::Ok);
    }
    for id in &found.missing {
        eprintln!("{}: no such memory ({})", arguments.selection.name(*id), Code::MemoryNotFound);
    }
    Err(Ended(ExitCode::NotFound).into())
}

const COLUMNS: [&str; 6] = ["memory", ">weight", ">group", "+>id", "features", "payload"];

/// What people call a memory: its key, else its id.
pub(crate) fn name(memory: &Memory) -> String {
    memory.key.clone().unwrap_or_else(|| memory.id.to_string())
}
