//! `engram recall`: memories whose features are like a vector, weighed by how well they are remembered.

use super::get::name;
use super::reads::Reads;
use crate::args::Context;
use crate::error::problem;
use crate::output::Table;
use crate::rows::{Object, weight};
use crate::target;
use engram_api::{Code, ExitCode};
use engram_client::{Client, GetOptions, RecallOptions, Recalled};
use engram_memory::{Group, MemoryId, key_id};
use serde::Serialize;

/// Show the memories most alike a vector, or a memory
#[derive(Debug, clap::Args)]
#[command(
    group = clap::ArgGroup::new("query").required(true),
    before_help = "Examples:
  engram recall note-17                     what is like this memory
  engram recall --features 0.1,0.9 -k 100   what is like this vector
  engram recall --id 42 --group 1 --read replica

Order: score descending, then id ascending. The score is the cosine of the features times the weight, and the same bits on every
device. The cluster needs features of type F16."
)]
pub(crate) struct Arguments {
    /// Key of a memory whose features are the query
    #[arg(value_name = "KEY", group = "query")]
    key: Option<String>,
    /// Id of such a memory
    #[arg(long, value_name = "N", group = "query")]
    id: Option<u64>,
    /// The query itself
    #[arg(long, value_name = "X,Y,..", value_delimiter = ',', allow_negative_numbers = true, group = "query")]
    features: Vec<f32>,
    /// How many
    #[arg(short = 'k', long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    limit: u32,
    /// Of this group only
    #[arg(short, long, value_name = "0-255")]
    group: Option<u8>,
    #[command(flatten)]
    reads: Reads,
}

/// A memory that was recalled, for programs.
#[derive(Serialize)]
struct Shown<'a> {
    score: f32,
    #[serde(flatten)]
    memory: Object<'a>,
}

pub(crate) async fn run(arguments: Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let client = target::connect(context).await?;
    let like = arguments.key.as_ref().map(|key| (key_id(key.as_bytes()), key.clone()));
    let like = like.or_else(|| arguments.id.map(|id| (MemoryId(id), format!("id {id}"))));
    let query = match like {
        Some((id, called)) => features_of(&client, id, &called).await?,
        None => arguments.features,
    };
    let options = RecallOptions { limit: arguments.limit, group: arguments.group.map(Group), keys: true };
    let recalled = client.reading(arguments.reads.mode()).recall(query, options).await?;
    let mut table = Table::new(&["memory", ">score", ">weight", ">group", "+>id"]);
    for Recalled { memory, score } in &recalled {
        let (weight, group) = (weight(memory).to_string(), memory.group.0.to_string());
        table.row([name(memory), score.to_string(), weight, group, memory.id.to_string()]);
    }
    let shown: Vec<_> =
        recalled.iter().map(|one| Shown { score: one.score, memory: Object::of(&one.memory) }).collect();
    context.output.list(&shown, &table)?;
    Ok(ExitCode::Ok)
}

/// The features of the memory that others shall be like.
async fn features_of(client: &Client, id: MemoryId, called: &str) -> anyhow::Result<Vec<f32>> {
    let mut found = client.get(&[id], GetOptions { features: true, payloads: false }).await?;
    match found.memories.pop() {
        Some(memory) => Ok(memory.features),
        None => Err(problem(Code::MemoryNotFound, format!("{called}: no such memory"))),
    }
}
