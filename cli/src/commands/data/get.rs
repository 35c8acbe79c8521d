//! `engram get`: reads memories.

use super::reads::PrimaryReads;
use super::select::Selection;
use crate::context::Context;
use crate::error::Exit;
use crate::output::Table;
use crate::rows::{Object, weight};
use crate::target;
use engram_api::{Code, ExitCode, printable_line};
use engram_client::{GetOptions, Memory};

/// Get memories by key or id
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram get government                   by key
  engram get government congress --id 42  by keys and an id
  engram get government -o json           including features and payload

Weights are exact multiples of 2^-30.")]
pub(crate) struct Get {
    #[command(flatten)]
    selection: Selection,
    /// Include features and payloads; implied by -o json, yaml and wide
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    reads: PrimaryReads,
}

pub(crate) async fn run(arguments: &Get, context: &Context) -> anyhow::Result<ExitCode> {
    let ids = arguments.selection.ids()?;
    let all_columns =
        arguments.all || context.output.is_structured() || context.output.format == crate::output::Format::Wide;
    let options = GetOptions { features: all_columns, payloads: all_columns };
    let result = target::connect(context).await?.with_read_mode(arguments.reads.mode()).get(&ids, options).await?;
    let mut table = Table::new(if all_columns { &COLUMNS } else { &COLUMNS[..4] });
    for memory in &result.memories {
        let mut cells =
            vec![name(memory), weight(memory).to_string(), memory.group.0.to_string(), memory.id.to_string()];
        if all_columns {
            cells.push(memory.features.iter().map(f32::to_string).collect::<Vec<_>>().join(" "));
            cells.push(String::from_utf8_lossy(&memory.payload).into_owned());
        }
        table.row(cells);
    }
    let objects: Vec<Object<'_>> = result.memories.iter().map(Object::of).collect();
    context.output.list(&objects, &table)?;
    if result.missing.is_empty() {
        return Ok(ExitCode::Ok);
    }
    for id in &result.missing {
        eprintln!("{}: memory not found ({})", printable_line(&arguments.selection.name(*id)), Code::MemoryNotFound);
    }
    Err(Exit(ExitCode::NotFound).into())
}

const COLUMNS: [&str; 6] = ["memory", ">weight", ">group", "+>id", "features", "payload"];

/// Returns the key of a memory, else its id.
pub(crate) fn name(memory: &Memory) -> String {
    memory.key.clone().unwrap_or_else(|| memory.id.to_string())
}
