//! Conversion of changes of items to commands. Every value is checked here, before anything is logged.

use crate::buffers::catalog::Definition;
use crate::shared::Shared;
use engram_client::{BufferSpec, Column};
use engram_memory::buffer::{BufferCommand, order, position};
use engram_memory::{Blobs, MAX_ITEM_PAYLOAD_BYTES, MemoryId};
use engram_proto::columns::check_rows;
use engram_proto::v1::items_part::Change;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_replay::columns::ColumnView;
use engram_replay::item::{Head, MAX_TAG_BYTES};
use engram_replay::schema::DType;
use std::time::{SystemTime, UNIX_EPOCH};

/// Clocks of clients may be ahead by this much.
const MAX_AHEAD_MS: u64 = 60 * 60 * 1_000;

/// Converts a change of a buffer with this definition.
pub(crate) fn command(part: v1::ItemsPart, definition: &Definition, shared: &Shared) -> Result<BufferCommand, Problem> {
    let buffer = definition.buffer;
    let partition = shared.check_partition(part.partition)?;
    Ok(match part.change {
        Some(Change::Append(append)) => {
            let from = from(&append, partition.0, shared.partitions())?;
            let (weights, payloads) = items(&append, definition)?;
            BufferCommand::Append { buffer, from, weights, payloads }
        }
        Some(Change::Priorities(change)) => {
            check_rows(change.handles.len())?;
            let weights = weights(&definition.spec, &change.priorities)?;
            if weights.len() != change.handles.len() {
                return Err(length("priorities", weights.len(), change.handles.len()));
            }
            BufferCommand::SetWeights { buffer, ids: ids(change.handles), weights }
        }
        Some(Change::Delete(change)) => {
            check_rows(change.handles.len())?;
            BufferCommand::Delete { buffer, ids: ids(change.handles) }
        }
        Some(Change::Acknowledge(change)) => {
            check_rows(change.handles.len())?;
            BufferCommand::Acknowledge { buffer, consumer: change.consumer, ids: ids(change.handles) }
        }
        None => return Err(invalid("change: absent is not allowed; allowed: append, priorities, delete, acknowledge")),
    })
}

fn from(append: &v1::AppendItems, partition: u32, partitions: u32) -> Result<u64, Problem> {
    let now_ms = now_ms();
    if append.at_ms > now_ms + MAX_AHEAD_MS {
        let text = format!(
            "at_ms: {} is not allowed; allowed: at most one hour ahead of this worker's clock ({now_ms})",
            append.at_ms
        );
        return Err(invalid(text));
    }
    let at_ms = if append.at_ms == 0 { now_ms } else { append.at_ms };
    Ok(position(order(at_ms, append.first_row), partition, partitions))
}

/// Returns weights and payloads of an append.
fn items(append: &v1::AppendItems, definition: &Definition) -> Result<(Vec<u32>, Blobs), Problem> {
    let count = append.count as usize;
    check_rows(count)?;
    for (column, found) in [
        ("priorities", append.priorities.len()),
        ("versions", append.versions.len()),
        ("trajectories", append.trajectories.len()),
        ("tags", append.tags.len()),
    ] {
        if found != 0 && found != count {
            return Err(length(column, found, count));
        }
    }
    let views = views(&append.columns, definition)?;
    let columns = definition.schema.columns(&views, count).map_err(|error| invalid(error.to_string()))?;
    let tag_of = |row: usize| append.tags.get(row).map_or(&[][..], |tag| &tag[..]);
    let mut bytes = 0;
    for row in 0..count {
        let tag = tag_of(row);
        if tag.len() > MAX_TAG_BYTES {
            return Err(invalid(format!("tags[{row}]: {} bytes are not allowed; allowed: at most 255", tag.len())));
        }
        let item_bytes = Head { version: 0, trajectory: 0, tag }.bytes() + columns.bytes(row);
        if item_bytes > MAX_ITEM_PAYLOAD_BYTES {
            return Err(invalid(format!(
                "item {row}: {item_bytes} bytes are not allowed; allowed: at most {MAX_ITEM_PAYLOAD_BYTES}"
            )));
        }
        bytes += item_bytes;
    }
    let mut payloads = Blobs::with_capacity(count, bytes);
    for row in 0..count {
        let at = |column: &[u64]| column.get(row).copied().unwrap_or_default();
        let head = Head { version: at(&append.versions), trajectory: at(&append.trajectories), tag: tag_of(row) };
        payloads.push_with(|payload| {
            head.encode(payload);
            columns.encode(row, payload);
        });
    }
    let spec = &definition.spec;
    let weights = match append.priorities.is_empty() {
        true => vec![spec.weight_units(spec.initial_priority).unwrap_or_default(); count],
        false => weights(spec, &append.priorities)?,
    };
    Ok((weights, payloads))
}

/// Returns columns for a check against the schema.
fn views<'a>(columns: &'a [v1::FieldColumn], definition: &Definition) -> Result<Vec<ColumnView<'a>>, Problem> {
    let view = |column: &'a v1::FieldColumn| {
        let dtype = DType::from_name(&column.dtype).ok_or_else(|| {
            let text =
                format!("field {}: dtype {:?} is not allowed; allowed: names of NumPy", column.field, column.dtype);
            invalid(text)
        })?;
        let is_jagged = definition.spec.fields.iter().any(|field| field.jagged && field.name == column.field);
        let rows = (is_jagged || !column.rows.is_empty()).then_some(&column.rows[..]);
        Ok(ColumnView { field: &column.field, dtype, shape: &column.shape, rows, data: &column.data })
    };
    columns.iter().map(view).collect()
}

fn weights(spec: &BufferSpec, priorities: &[f64]) -> Result<Vec<u32>, Problem> {
    let units = |(row, priority): (usize, &f64)| {
        spec.weight_units(*priority).ok_or_else(|| {
            let text = format!("priorities[{row}]: {priority} is not allowed; allowed: a finite number of at least 0");
            invalid(text)
        })
    };
    priorities.iter().enumerate().map(units).collect()
}

fn ids(handles: Vec<u64>) -> Vec<MemoryId> {
    handles.into_iter().map(MemoryId).collect()
}

fn length(column: &str, found: usize, count: usize) -> Problem {
    invalid(format!("{column}: {found} entries are not allowed; allowed: one per item ({count})"))
}

pub(crate) fn invalid(text: impl Into<String>) -> Problem {
    Problem::of(ProblemKind::Invalid, text)
}

/// Returns the time in milliseconds since the Unix epoch.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Encodes a column.
pub(crate) fn column_to_wire(column: Column) -> v1::FieldColumn {
    v1::FieldColumn {
        field: column.name,
        dtype: column.dtype.name().into(),
        shape: column.shape,
        data: column.data,
        rows: column.rows.unwrap_or_default(),
    }
}
