//! `engram recall`: memories with features similar to a vector, scored by similarity times weight.

use super::get::name;
use super::reads::Reads;
use crate::context::Context;
use crate::error::problem;
use crate::output::Table;
use crate::rows::{Object, weight};
use crate::target;
use engram_api::{Code, ExitCode};
use engram_client::{Client, GetOptions, RecallMatch, RecallOptions};
use engram_memory::{Group, MemoryId, key_id};
use serde::Serialize;

/// Find memories with features similar to a vector or to another memory
#[derive(Debug, clap::Args)]
#[command(
    group = clap::ArgGroup::new("query").required(true),
    before_help = "Examples:
  engram recall note-17                     memories similar to this one
  engram recall --features 0.1,0.9 -k 100   memories similar to this vector
  engram recall --id 42 --group 1 --read replica

Sorted by descending score, then ascending id. The score is the cosine similarity times the weight, bitwise identical on all
devices. The cluster needs features of type F16."
)]
pub(crate) struct Recall {
    /// Key of the memory whose features are the query
    #[arg(value_name = "KEY", group = "query")]
    key: Option<String>,
    /// Id of the memory whose features are the query
    #[arg(long, value_name = "N", group = "query")]
    id: Option<u64>,
    /// Query vector
    #[arg(long, value_name = "X,Y,..", value_delimiter = ',', allow_negative_numbers = true, group = "query")]
    features: Vec<f32>,
    /// Number of memories
    #[arg(short = 'k', long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    limit: u32,
    /// Only memories of this group
    #[arg(short, long, value_name = "0-255")]
    group: Option<u8>,
    #[command(flatten)]
    reads: Reads,
}

/// A recalled memory, for JSON and YAML output.
#[derive(Serialize)]
struct RecalledMemory<'a> {
    score: f32,
    #[serde(flatten)]
    memory: Object<'a>,
}

pub(crate) async fn run(arguments: Recall, context: &Context) -> anyhow::Result<ExitCode> {
    let client = target::connect(context).await?;
    let reference = arguments.key.as_ref().map(|key| (key_id(key.as_bytes()), key.clone()));
    let reference = reference.or_else(|| arguments.id.map(|id| (MemoryId(id), format!("id {id}"))));
    let query = match reference {
        Some((id, name)) => features_of(&client, id, &name).await?,
        None => arguments.features,
    };
    let options = RecallOptions { limit: arguments.limit, group: arguments.group.map(Group), keys: true };
    let recalled = client.with_read_mode(arguments.reads.mode()).recall(query, options).await?;
    let mut table = Table::new(&["memory", ">score", ">weight", ">group", "+>id"]);
    for RecallMatch { memory, score } in &recalled {
        let (weight, group) = (weight(memory).to_string(), memory.group.0.to_string());
        table.row([name(memory), score.to_string(), weight, group, memory.id.to_string()]);
    }
    let objects: Vec<_> =
        recalled.iter().map(|it| RecalledMemory { score: it.score, memory: Object::of(&it.memory) }).collect();
    context.output.list(&objects, &table)?;
    Ok(ExitCode::Ok)
}

/// Reads the features of a memory.
async fn features_of(client: &Client, id: MemoryId, name: &str) -> anyhow::Result<Vec<f32>> {
    let mut result = client.get(&[id], GetOptions { features: true, payloads: false }).await?;
    match result.memories.pop() {
        Some(memory) => Ok(memory.features),
        None => Err(problem(Code::MemoryNotFound, format!("{name}: memory not found"))),
    }
}
