//! Items as columns: read from the store, merged from several workers, cut into messages.

use super::convert::{column_to_wire, invalid};
use crate::buffers::catalog::Definition;
use bytes::Bytes;
use engram_client::Column;
use engram_kernels::Error;
use engram_memory::MemoryId;
use engram_proto::v1::{self, Problem};
use engram_replay::item::{self, Head};
use engram_store::{Partitions, PayloadPart};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a message with items: below the limit of 4 MiB, with room for a last large item.
const MESSAGE_BYTES: usize = 2 << 20;
/// Bytes of an item in a message without tag and fields.
const HEAD_BYTES: usize = 64;

/// Bytes of fields that a call holds at a time, over all workers: below the limit of 16 MiB per call, as messages are made of them. Above the
/// largest item, so that a call for one item always succeeds.
pub(crate) const ANSWER_BYTES: usize = 8 << 20;
/// Items read before these bytes are checked.
const READ_ITEMS: usize = 16;

/// Rows that are read.
struct Rows {
    batch: v1::ItemBatch,
    /// Rows and bytes of each field.
    data: Vec<(Vec<u32>, Vec<u8>)>,
    bytes: usize,
    /// Bytes above which nothing more is read.
    most: usize,
}

impl Rows {
    /// Makes room for `items` of the size of those that were read.
    fn reserve(&mut self, items: usize) {
        let found = self.batch.handles.len().max(1);
        let most = self.most;
        for (_, data) in &mut self.data {
            let expected = (data.len() / found + 1).saturating_mul(items).min(most);
            data.reserve(expected.saturating_sub(data.len()));
        }
    }
}

/// Fields of the schema that a call returns.
#[derive(Debug, Clone)]
pub(crate) struct Selection {
    pub(crate) definition: Arc<Definition>,
    /// Positions in the schema.
    fields: Vec<usize>,
}

impl Selection {
    /// Selects fields by name: all if there is no name, unless `none`.
    pub(crate) fn new(definition: Arc<Definition>, names: &[String], none: bool) -> Result<Self, Problem> {
        let fields = if none {
            Vec::new()
        } else if names.is_empty() {
            (0..definition.schema.fields().len()).collect()
        } else {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            definition.schema.select(&names).map_err(|error| invalid(error.to_string()))?
        };
        Ok(Self { definition, fields })
    }

    /// Returns the names of the fields.
    pub(crate) fn names(&self) -> Vec<String> {
        self.fields.iter().map(|field| self.definition.schema.fields()[*field].name.clone()).collect()
    }

    /// Reads items in the order of `ids`; those that do not exist, or are no items of the buffer, are in `missing`. Items with more than
    /// `max_bytes` of fields have no columns; 0 = [`ANSWER_BYTES`].
    pub(crate) fn read(
        &self,
        store: &mut Partitions,
        ids: &[MemoryId],
        max_bytes: u64,
    ) -> Result<v1::ItemBatch, Error> {
        let most = usize::try_from(max_bytes).unwrap_or(usize::MAX).min(2 * ANSWER_BYTES);
        let most = if most == 0 { ANSWER_BYTES } else { most };
        let (batch, data) = (v1::ItemBatch::default(), vec![Default::default(); self.fields.len()]);
        let mut rows = Rows { batch, data, bytes: 0, most };
        for piece in ids.chunks(if self.fields.is_empty() { ids.len().max(1) } else { READ_ITEMS }) {
            self.read_some(store, piece, &mut rows)?;
            if rows.bytes > most {
                return Self { fields: Vec::new(), ..self.clone() }.read(store, ids, 0);
            }
            rows.reserve(ids.len());
        }
        rows.batch.columns = self.columns(rows.data);
        Ok(rows.batch)
    }

    fn read_some(&self, store: &mut Partitions, ids: &[MemoryId], rows: &mut Rows) -> Result<(), Error> {
        let spec = &self.definition.spec;
        let Rows { batch, data, bytes, most } = rows;
        let part = match self.fields.is_empty() {
            true => PayloadPart::Start(item::MAX_HEAD_BYTES as u32),
            false => PayloadPart::All,
        };
        store.get_parts(ids, part, |id, memory| {
            let memory = memory.filter(|memory| memory.group == self.definition.buffer.group);
            let decoded = memory.and_then(|memory| {
                let (head, fields) = Head::decode(memory.payload)?;
                let ranges =
                    if self.fields.is_empty() { Vec::new() } else { self.definition.schema.ranges(fields).ok()? };
                Some((memory.weight.units(), head, fields, ranges))
            });
            let Some((weight, head, fields, ranges)) = decoded else { return batch.missing.push(id.0) };
            batch.handles.push(id.0);
            batch.priorities.push(spec.priority(weight));
            batch.versions.push(head.version);
            batch.trajectories.push(head.trajectory);
            batch.tags.push(Bytes::copy_from_slice(head.tag));
            *bytes += self.fields.iter().map(|field| ranges[*field].bytes.len()).sum::<usize>();
            if bytes > most {
                return;
            }
            for (field, (rows, data)) in self.fields.iter().zip(data.iter_mut()) {
                let range = &ranges[*field];
                rows.extend(range.rows);
                data.extend_from_slice(&fields[range.bytes.clone()]);
            }
        })
    }

    /// Whether rows have no columns because of their size.
    pub(crate) const fn lacks_columns(&self, batch: &v1::ItemBatch) -> bool {
        !self.fields.is_empty() && !batch.handles.is_empty() && batch.columns.is_empty()
    }

    fn columns(&self, data: Vec<(Vec<u32>, Vec<u8>)>) -> Vec<v1::FieldColumn> {
        let column = |(field, (rows, data)): (&usize, (Vec<u32>, Vec<u8>))| {
            let field = &self.definition.schema.fields()[*field];
            column_to_wire(Column {
                name: field.name.clone(),
                dtype: field.dtype,
                shape: field.shape.clone(),
                rows: field.jagged.then_some(rows),
                data: data.into(),
            })
        };
        self.fields.iter().zip(data).map(column).collect()
    }

    /// Returns where each item of a column begins, and the end.
    fn ends(&self, index: usize, column: &v1::FieldColumn, items: usize) -> Vec<usize> {
        let field = &self.definition.schema.fields()[self.fields[index]];
        let row_bytes = field.row_bytes().unwrap_or_default();
        let mut ends = vec![0];
        let mut end = 0;
        for item in 0..items {
            end +=
                row_bytes * if field.jagged { column.rows.get(item).copied().unwrap_or_default() as usize } else { 1 };
            ends.push(end);
        }
        ends
    }

    /// Picks items of several batches, in this order. A batch has the columns of this selection; if one has none because of its size, the
    /// result has none.
    pub(crate) fn merge(&self, batches: &[v1::ItemBatch], order: &[(usize, usize)]) -> Result<v1::ItemBatch, Problem> {
        let mut merged = v1::ItemBatch::default();
        for &(batch, row) in order {
            let batch = &batches[batch];
            merged.handles.push(batch.handles[row]);
            merged.priorities.push(batch.priorities[row]);
            merged.versions.push(batch.versions[row]);
            merged.trajectories.push(batch.trajectories[row]);
            merged.tags.push(batch.tags[row].clone());
            // Of samples.
            merged.weights.extend(batch.weights.get(row));
            merged.draws.extend(batch.draws.get(row));
            merged.drawn_priorities.extend(batch.drawn_priorities.get(row));
        }
        if batches.iter().any(|batch| self.lacks_columns(batch)) {
            return Ok(merged);
        }
        let mut data = Vec::with_capacity(self.fields.len());
        for index in 0..self.fields.len() {
            let mut ends = Vec::with_capacity(batches.len());
            for batch in batches {
                let column = batch.columns.get(index).filter(|_| !batch.handles.is_empty());
                let found = column.map(|column| self.ends(index, column, batch.handles.len())).unwrap_or_default();
                if found.last().copied() != column.map(|column| column.data.len()) {
                    return Err(Problem::of(
                        v1::ProblemKind::Unavailable,
                        "a worker returned columns of another length",
                    ));
                }
                ends.push(found);
            }
            let (mut rows, mut bytes) = (Vec::new(), Vec::new());
            for &(batch, row) in order {
                let column = &batches[batch].columns[index];
                rows.extend(column.rows.get(row));
                bytes.extend_from_slice(&column.data[ends[batch][row]..ends[batch][row + 1]]);
            }
            data.push((rows, bytes));
        }
        merged.columns = self.columns(data);
        Ok(merged)
    }

    /// Cuts a batch into messages.
    pub(crate) fn cut(&self, batch: v1::ItemBatch) -> Vec<v1::ItemBatch> {
        let mut heads = vec![0];
        let head = |end: &mut usize, tag: &Bytes| {
            *end += HEAD_BYTES + tag.len();
            Some(*end)
        };
        heads.extend(batch.tags.iter().scan(0, head));
        let bytes = batch.columns.iter().map(|column| column.data.len()).sum::<usize>();
        if bytes + heads[batch.tags.len()] <= MESSAGE_BYTES {
            return vec![batch];
        }
        let items = batch.handles.len();
        let ends: Vec<Vec<usize>> =
            batch.columns.iter().enumerate().map(|(index, column)| self.ends(index, column, items)).collect();
        let end = |row: usize| heads[row] + ends.iter().map(|ends| ends[row]).sum::<usize>();
        let mut messages = Vec::new();
        let mut start = 0;
        while start < items {
            let fits = (start + 1..items).find(|next| end(*next + 1) - end(start) > MESSAGE_BYTES);
            let rows = start..fits.unwrap_or(items);
            start = rows.end;
            messages.push(part(&batch, &ends, rows));
        }
        if let Some(first) = messages.first_mut() {
            first.missing = batch.missing;
            first.scale = batch.scale;
        }
        messages
    }

    /// Joins the messages of one worker.
    pub(crate) fn join(&self, mut messages: Vec<v1::ItemBatch>) -> Result<v1::ItemBatch, Problem> {
        if messages.len() == 1 {
            return Ok(messages.swap_remove(0));
        }
        let rows = |(index, message): (usize, &v1::ItemBatch)| {
            (0..message.handles.len()).map(move |row| (index, row)).collect::<Vec<_>>()
        };
        let order: Vec<(usize, usize)> = messages.iter().enumerate().flat_map(rows).collect();
        let mut joined = self.merge(&messages, &order)?;
        for message in messages {
            joined.missing.extend(message.missing);
        }
        Ok(joined)
    }
}

/// Returns some rows of a batch, without a copy of their fields; `ends` are the places of each column.
fn part(batch: &v1::ItemBatch, ends: &[Vec<usize>], rows: Range<usize>) -> v1::ItemBatch {
    fn of<T: Clone>(column: &[T], rows: &Range<usize>) -> Vec<T> {
        column.get(rows.clone()).unwrap_or_default().to_vec()
    }
    let column = |(column, ends): (&v1::FieldColumn, &Vec<usize>)| v1::FieldColumn {
        field: column.field.clone(),
        dtype: column.dtype.clone(),
        shape: column.shape.clone(),
        data: column.data.slice(ends[rows.start]..ends[rows.end]),
        rows: of(&column.rows, &rows),
    };
    v1::ItemBatch {
        handles: of(&batch.handles, &rows),
        columns: batch.columns.iter().zip(ends).map(column).collect(),
        priorities: of(&batch.priorities, &rows),
        versions: of(&batch.versions, &rows),
        trajectories: of(&batch.trajectories, &rows),
        tags: of(&batch.tags, &rows),
        weights: of(&batch.weights, &rows),
        draws: of(&batch.draws, &rows),
        drawn_priorities: of(&batch.drawn_priorities, &rows),
        ..v1::ItemBatch::default()
    }
}
