//! `engram buffer`: replay buffers.

mod files;
mod npz;
mod parquet;
mod rows;

use crate::context::Context;
use crate::error::problem;
use crate::output::{Table, count};
use crate::target;
use engram_api::{Code, ExitCode};
use engram_client::{BufferDescription, DeclarationProblem, Fields, Sample, SampleBy};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Replay buffers: list, describe, sample, import, export and delete them
#[derive(Debug, clap::Subcommand)]
pub(crate) enum BufferCommand {
    /// List the replay buffers
    #[command(before_help = "Examples:
  engram buffer list
  engram buffer list -o json")]
    List,
    /// Show the fields, settings and figures of a replay buffer
    #[command(before_help = "Examples:
  engram buffer describe train")]
    Describe {
        /// Name of the buffer
        #[arg(value_name = "BUFFER")]
        name: String,
    },
    /// Draw items of a replay buffer
    #[command(before_help = "Examples:
  engram buffer sample train --count 5
  engram buffer sample train --count 5 --alpha 0.6 --seed 1 --step 7
  engram buffer sample train --count 512 --to batch.npz

Without --alpha the sampler of the buffer applies, or every item is drawn alike. A draw is a function of the seed, the step and the items. Uses and the rate limiter of the buffer are counted.")]
    Sample(SampleArguments),
    /// Append the items of a file: .npz, .npy or .parquet
    #[command(before_help = "Examples:
  engram buffer import train items.npz
  engram buffer import train items.parquet
  engram buffer import train items.npz --capacity 1000000    create the buffer if it does not exist

In .npz files, an array per field: its first dimension is the number of items. A field with a jagged first dimension has its rows in one array and the
rows per item in `FIELD.rows` (uint32). In .parquet files, a column per field: a number, or a list of the elements in row-major order; files
that `engram buffer export` wrote declare the shapes, in others a list is a jagged field, unless the buffer exists and says otherwise. An .npy
file is one field. `_priority` (float64), `_version` and `_trajectory` (uint64) and `_tag` (bytes) are optional.")]
    Import {
        /// Name of the buffer
        #[arg(value_name = "BUFFER")]
        name: String,
        /// File to read: .npz, .npy or .parquet
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Create the buffer with this capacity if it does not exist
        #[arg(long, value_name = "ITEMS")]
        capacity: Option<u64>,
    },
    /// Write all items to a file: .npz, .npy or .parquet
    #[command(before_help = "Examples:
  engram buffer export train items.npz
  engram buffer export train items.parquet    any number of items; an .npz file has less than 4 GiB")]
    Export {
        /// Name of the buffer
        #[arg(value_name = "BUFFER")]
        name: String,
        /// File to write: .npz, .npy or .parquet
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Overwrite an existing file
        #[arg(long)]
        force: bool,
    },
    /// Delete a replay buffer with its items
    #[command(before_help = "Examples:
  engram buffer delete train")]
    Delete {
        /// Name of the buffer
        #[arg(value_name = "BUFFER")]
        name: String,
    },
}

/// Arguments of `engram buffer sample`.
#[derive(Debug, clap::Args)]
pub(crate) struct SampleArguments {
    /// Name of the buffer
    #[arg(value_name = "BUFFER")]
    name: String,
    /// Number of items
    #[arg(long, value_name = "ITEMS", default_value_t = 10)]
    count: u32,
    /// Exponent of the priorities; without it, the sampler of the buffer applies, or every item is drawn alike
    #[arg(long, value_name = "0-1")]
    alpha: Option<f64>,
    /// Exponent of the importance weights
    #[arg(long, value_name = "0-1", default_value_t = 0.4, requires = "alpha")]
    beta: f64,
    /// Seed of the draws
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    seed: u64,
    /// Step of the draws
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    step: u64,
    /// Write the items with their fields to this file: .npz, .npy or .parquet
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    /// Overwrite an existing file
    #[arg(long, requires = "to")]
    force: bool,
}

impl BufferCommand {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<ExitCode> {
        let client = target::connect(context).await?;
        match self {
            Self::List => {
                let (buffers, problems) = client.declared_buffers().await?;
                list(&buffers, context)?;
                for DeclarationProblem { buffer, problem } in problems {
                    context.output.note(format!("note: buffer {buffer}: {problem}"));
                }
            }
            Self::Describe { name } => {
                let buffers = client.list_buffers().await?;
                let found = buffers.iter().find(|buffer| buffer.spec.name == name);
                let unknown = || problem(Code::InvalidValue, format!("buffer {name:?} does not exist"));
                show_description(found.ok_or_else(unknown)?, context)?;
            }
            Self::Sample(arguments) => sample(&client, arguments, context).await?,
            Self::Import { name, file, capacity } => {
                let handles = files::import(&client, &name, &file, capacity).await?;
                context.output.note(format!("appended {} items to {name}", count(handles.len() as u64)));
            }
            Self::Export { name, file, force } => {
                let items = files::export(&client.buffer(&name).await?, &file, force).await?;
                context.output.note(format!("wrote {} items to {}", count(items as u64), file.display()));
            }
            Self::Delete { name } => {
                let items = client.drop_buffer(&name).await?;
                context.output.note(format!("deleted buffer {name} with {} items", count(items)));
            }
        }
        Ok(ExitCode::Ok)
    }
}

/// A buffer, for JSON and YAML output.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BufferView {
    name: String,
    fields: Vec<Value>,
    capacity: u64,
    remover: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    sampler: Option<String>,
    /// Partitions that hold items.
    partitions: usize,
    items: u64,
    priority_sum: f64,
    appended: u64,
    sampled: u64,
    deleted: u64,
    consumers: Vec<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limiter_cursor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    append_waits: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sample_waits: Option<String>,
}

impl From<&BufferDescription> for BufferView {
    fn from(buffer: &BufferDescription) -> Self {
        let BufferDescription { spec, stats, .. } = buffer;
        let field = |field: &engram_client::Field| json!({ "name": field.name, "dtype": field.dtype.name(), "shape": field.shape, "jagged": field.jagged });
        let consumer = |it: &engram_client::ConsumerStats| json!({ "name": it.name, "leased": it.leased });
        Self {
            name: spec.name.clone(),
            fields: spec.fields.iter().map(field).collect(),
            capacity: spec.capacity,
            remover: format!("{:?}", spec.remover),
            sampler: spec.sampler.map(sampler),
            partitions: buffer.partitions,
            items: stats.items,
            priority_sum: stats.priority_sum,
            appended: stats.appended,
            sampled: stats.sampled,
            deleted: stats.deleted,
            consumers: stats.consumers.iter().map(consumer).collect(),
            limiter_cursor: stats.limiter_cursor,
            append_waits: stats.append_waits.clone(),
            sample_waits: stats.sample_waits.clone(),
        }
    }
}

/// Describes a sampler.
fn sampler(by: SampleBy) -> String {
    match by {
        SampleBy::Default => "Default".to_owned(),
        SampleBy::Prioritized { alpha, beta } => format!("Prioritized, alpha {alpha}, beta {beta}"),
        SampleBy::Uniform => "Uniform".to_owned(),
        SampleBy::Fifo => "Fifo".to_owned(),
        SampleBy::Lifo => "Lifo".to_owned(),
        SampleBy::Slices { length } => format!("Slices of {length}"),
        SampleBy::Groups { size } => format!("Groups of {size}"),
    }
}

fn list(buffers: &[BufferDescription], context: &Context) -> anyhow::Result<()> {
    let mut table = Table::new(&["buffer", ">items", ">capacity", ">appended", ">sampled", "fields"]);
    let views: Vec<BufferView> = buffers.iter().map(BufferView::from).collect();
    for (buffer, view) in buffers.iter().zip(&views) {
        let fields: Vec<&str> = buffer.spec.fields.iter().map(|field| field.name.as_str()).collect();
        let numbers = [view.items, view.capacity, view.appended, view.sampled].map(count);
        let [items, capacity, appended, sampled] = numbers;
        table.row([view.name.clone(), items, capacity, appended, sampled, fields.join(", ")]);
    }
    context.output.list(&views, &table)
}

fn show_description(buffer: &BufferDescription, context: &Context) -> anyhow::Result<()> {
    let view = BufferView::from(buffer);
    let mut table = Table::new(&["field", "value"]);
    let mut row = |name: &str, value: String| table.row([name.to_owned(), value]);
    row("name", view.name.clone());
    for field in &buffer.spec.fields {
        row("field", format!("{} {}", field.name, field.describe()));
    }
    row("items", format!("{} of {}", count(view.items), count(view.capacity)));
    row("partitions", view.partitions.to_string());
    row("remover", view.remover.clone());
    if let Some(sampler) = &view.sampler {
        row("sampler", sampler.clone());
    }
    row("priority sum", format!("{:.6}", view.priority_sum));
    row("appended", count(view.appended));
    row("sampled", count(view.sampled));
    row("deleted", count(view.deleted));
    for consumer in &buffer.stats.consumers {
        row("consumer", format!("{}, {} leased", consumer.name, count(consumer.leased)));
    }
    for (name, reason) in [("append", &view.append_waits), ("sample", &view.sample_waits)] {
        if let Some(reason) = reason {
            row(name, reason.clone());
        }
    }
    context.output.object(&view, &table)
}

/// A drawn item, for JSON and YAML output.
#[derive(Serialize)]
struct ItemView {
    handle: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight: Option<f32>,
    priority: f64,
    version: u64,
    trajectory: u64,
}

async fn sample(client: &engram_client::Client, arguments: SampleArguments, context: &Context) -> anyhow::Result<()> {
    let buffer = client.buffer(&arguments.name).await?;
    let by = match arguments.alpha {
        Some(alpha) => SampleBy::Prioritized { alpha, beta: arguments.beta },
        None if buffer.spec().sampler.is_some() => SampleBy::Default,
        None => SampleBy::Uniform,
    };
    let request = Sample::new(by, arguments.count, arguments.seed, arguments.step);
    if let Some(path) = &arguments.to {
        let mut file = files::ItemFile::create(path, buffer.spec(), arguments.force)?;
        let batch = buffer.sample(request).await?;
        let items = batch.len();
        file.push(batch)?;
        file.finish()?;
        context.output.note(format!("wrote {} items to {}", count(items as u64), path.display()));
        return Ok(());
    }
    let batch = buffer.sample(Sample { fields: Fields::None, ..request }).await?;
    let view = |row: usize| ItemView {
        handle: batch.handles[row].0,
        weight: batch.weights.get(row).copied(),
        priority: batch.priorities[row],
        version: batch.versions[row],
        trajectory: batch.trajectories[row],
    };
    let views: Vec<ItemView> = (0..batch.len()).map(view).collect();
    let mut table = Table::new(&["item", ">priority", ">weight", ">version", ">trajectory"]);
    for view in &views {
        let weight = view.weight.map_or_else(String::new, |weight| format!("{weight:.6}"));
        let priority = format!("{:.6}", view.priority);
        let numbers = [priority, weight, view.version.to_string(), view.trajectory.to_string()];
        table.row(std::iter::once(view.handle.to_string()).chain(numbers));
    }
    context.output.list(&views, &table)
}
