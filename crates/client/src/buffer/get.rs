//! Reads by handle: each primary returns its own items, in calls of bounded size, a few at a time.

use super::read::Fields;
use super::{Batch, Buffer, Column};
use crate::call::{Failure, Service};
use crate::client::Client;
use crate::error::Error;
use crate::map::Map;
use bytes::{Bytes, BytesMut};
use engram_memory::{MemoryId, Ordinal};
use engram_proto::v1;
use engram_replay::schema::{Field, Schema};
use futures::stream::{StreamExt as _, TryStreamExt as _};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes of fields that a call is expected to return: a worker sends as much without a second read.
const CALL_BYTES: usize = 2 << 20;
/// Most items of a call, and fewest.
const CALL_ITEMS: [usize; 2] = [32_768, 16];
/// Calls in flight.
const CALLS: usize = 4;
/// Bytes of the jagged fields of an item that are expected before any was read.
const FIRST_JAGGED_BYTES: usize = 8 << 10;

impl Buffer {
    /// Returns items by handle, in the order of the handles; those that do not exist are in `missing`.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn get(&self, handles: &[MemoryId], fields: Fields) -> Result<Batch, Error> {
        let calls = self.calls(handles, &fields)?;
        // Collected, since a future that holds the closure is not `Send`.
        let answers: Vec<_> = calls.iter().map(|rows| self.get_rows(handles, rows, &fields)).collect();
        let answers: Vec<Vec<v1::ItemBatch>> = futures::stream::iter(answers).buffered(CALLS).try_collect().await?;
        let batch = Gather::new(handles, &calls, answers, self.schema())?.batch()?;
        let jagged = batch.columns.iter().filter(|column| column.rows.is_some());
        let bytes: usize = jagged.map(|column| column.data.len()).sum();
        if let Some(average) = bytes.checked_div(batch.len()).filter(|average| *average > 0) {
            self.0.jagged_bytes.store(average, Ordering::Relaxed);
        }
        Ok(batch)
    }

    /// Returns the rows of each call: items of one primary, calls to different primaries in turn.
    fn calls(&self, handles: &[MemoryId], fields: &Fields) -> Result<Vec<Vec<usize>>, Error> {
        let most = self.items_per_call(fields);
        let map = self.client().map()?;
        let mut by_owner: BTreeMap<Option<Ordinal>, Vec<usize>> = BTreeMap::new();
        for (row, handle) in handles.iter().enumerate() {
            by_owner.entry(map.owner(map.partition_of(*handle))).or_default().push(row);
        }
        let mut calls: Vec<(usize, Vec<usize>)> = Vec::new();
        for rows in by_owner.values() {
            calls.extend(rows.chunks(most).map(<[usize]>::to_vec).enumerate());
        }
        calls.sort_by_key(|(turn, _)| *turn);
        let calls: Vec<Vec<usize>> = calls.into_iter().map(|(_, rows)| rows).collect();
        // Without handles, too, a worker checks the names of the fields.
        Ok(if calls.is_empty() { vec![Vec::new()] } else { calls })
    }

    fn items_per_call(&self, fields: &Fields) -> usize {
        let is_read = |field: &&Field| match fields {
            Fields::All => true,
            Fields::None => false,
            Fields::Named(names) => names.contains(&field.name),
        };
        let mut bytes = 0;
        let mut has_jagged = false;
        for field in self.schema().fields().iter().filter(is_read) {
            has_jagged |= field.jagged;
            bytes += if field.jagged { 0 } else { field.row_bytes().unwrap_or_default() };
        }
        if has_jagged {
            bytes += match self.0.jagged_bytes.load(Ordering::Relaxed) {
                0 => FIRST_JAGGED_BYTES,
                average => average,
            };
        }
        let [most, fewest] = CALL_ITEMS;
        CALL_BYTES.checked_div(bytes).unwrap_or(most).clamp(fewest, most)
    }

    async fn get_rows(
        &self,
        handles: &[MemoryId],
        rows: &[usize],
        fields: &Fields,
    ) -> Result<Vec<v1::ItemBatch>, Error> {
        let (fields, without_fields) = fields.to_wire();
        let message = v1::GetItemsRequest {
            buffer: self.name().to_owned(),
            handles: rows.iter().map(|row| handles[*row].0).collect(),
            fields,
            without_fields,
            max_bytes: 0,
        };
        let first = rows.first().map(|row| handles[*row]);
        let worker = |client: &Client| match first {
            Some(handle) => client.primary_of(handle),
            None => client.any_worker(),
        };
        let call = |mut worker: Service, request| async move { worker.buffers().get_items(request).await };
        self.parts(Duration::ZERO, message, worker, call).await
    }
}

impl Client {
    /// Returns the primary of a memory by the current map, or any worker if there is none: it waits for one.
    fn primary_of(&self, id: MemoryId) -> Result<(Arc<Map>, Ordinal, Service), Failure> {
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        match map.owner(map.partition_of(id)) {
            Some(owner) => {
                let service = self.service_of(&map, owner)?;
                Ok((map, owner, service))
            }
            None => self.any_worker(),
        }
    }
}

/// Messages of several calls, and where the items are in them.
struct Gather<'a> {
    schema: &'a Schema,
    messages: Vec<v1::ItemBatch>,
    /// Message and row of each found item, in the order of the handles.
    order: Vec<(usize, usize)>,
    missing: Vec<MemoryId>,
}

impl<'a> Gather<'a> {
    fn new(
        handles: &[MemoryId],
        calls: &[Vec<usize>],
        answers: Vec<Vec<v1::ItemBatch>>,
        schema: &'a Schema,
    ) -> Result<Self, Error> {
        let mut places: Vec<Option<(usize, usize)>> = vec![None; handles.len()];
        let mut messages: Vec<v1::ItemBatch> = Vec::new();
        for (rows, answer) in calls.iter().zip(answers) {
            let first = messages.len();
            messages.extend(answer);
            let found = messages[first..]
                .iter()
                .enumerate()
                .flat_map(|(message, batch)| (0..batch.handles.len()).map(move |row| (first + message, row)));
            let mut found = found.peekable();
            for &row in rows {
                let is_same = |place: &(usize, usize)| messages[place.0].handles[place.1] == handles[row].0;
                places[row] = found.next_if(is_same);
            }
            if found.peek().is_some() {
                return Err(Error::Protocol("items in another order than their handles".into()));
            }
        }
        let missing = handles.iter().zip(&places).filter(|(_, place)| place.is_none());
        let missing = missing.map(|(handle, _)| *handle).collect();
        Ok(Self { schema, messages, order: places.into_iter().flatten().collect(), missing })
    }

    fn batch(self) -> Result<Batch, Error> {
        let Self { messages, order, .. } = &self;
        fn pick<T: Clone>(
            messages: &[v1::ItemBatch],
            order: &[(usize, usize)],
            of: impl Fn(&v1::ItemBatch) -> &[T],
        ) -> Result<Vec<T>, Error> {
            let value = |(message, row): &(usize, usize)| of(&messages[*message]).get(*row).cloned();
            let values: Option<Vec<T>> = order.iter().map(value).collect();
            values.ok_or_else(|| Error::Protocol("a column that is shorter than its batch".into()))
        }
        let handles: Vec<u64> = pick(messages, order, |batch| &batch.handles)?;
        let template = messages.iter().find(|batch| !batch.handles.is_empty()).or_else(|| messages.first());
        let names: Vec<String> =
            template.map(|batch| batch.columns.iter().map(|it| it.field.clone()).collect()).unwrap_or_default();
        let columns = names.iter().enumerate().map(|(index, name)| self.column(index, name));
        Ok(Batch {
            columns: columns.collect::<Result<_, Error>>()?,
            handles: handles.into_iter().map(MemoryId).collect(),
            weights: Vec::new(),
            scale: None,
            priorities: pick(messages, order, |batch| &batch.priorities)?,
            versions: pick(messages, order, |batch| &batch.versions)?,
            trajectories: pick(messages, order, |batch| &batch.trajectories)?,
            tags: pick(messages, order, |batch| &batch.tags)?,
            missing: self.missing,
        })
    }

    fn column(&self, index: usize, name: &str) -> Result<Column, Error> {
        let malformed = |what: &str| Error::Protocol(format!("a column {name} {what}"));
        let field = self.schema.fields().iter().find(|field| field.name == name);
        let field = field.ok_or_else(|| malformed("that the buffer does not have"))?;
        let columns: Vec<Option<&v1::FieldColumn>> =
            self.messages.iter().map(|message| message.columns.get(index).filter(|it| it.field == name)).collect();
        let mut ends: Vec<Vec<usize>> = Vec::with_capacity(columns.len());
        for (column, message) in columns.iter().zip(&self.messages) {
            let Some(column) = column.filter(|_| !message.handles.is_empty()) else {
                ends.push(Vec::new());
                continue;
            };
            let places = places(field, column, message.handles.len());
            if places.last().copied() != Some(column.data.len()) {
                return Err(malformed("of another length than its items"));
            }
            ends.push(places);
        }
        let mut rows = Vec::with_capacity(if field.jagged { self.order.len() } else { 0 });
        let mut pieces: Vec<Bytes> = Vec::new();
        for run in self.order.chunk_by(|one, next| one.0 == next.0 && one.1 + 1 == next.1) {
            let ((message, first), last) = (run[0], run[run.len() - 1].1);
            let column = columns[message].ok_or_else(|| malformed("that is missing in a part of the answer"))?;
            pieces.push(column.data.slice(ends[message][first]..ends[message][last + 1]));
            if field.jagged {
                rows.extend_from_slice(&column.rows[first..=last]);
            }
        }
        let data = joined(pieces);
        let rows = field.jagged.then_some(rows);
        Ok(Column { name: field.name.clone(), dtype: field.dtype, shape: field.shape.clone(), rows, data })
    }
}

/// Returns where each item of a column begins, and the end of the last.
fn places(field: &Field, column: &v1::FieldColumn, items: usize) -> Vec<usize> {
    let row_bytes = field.row_bytes().unwrap_or_default();
    let mut end = 0_usize;
    let mut places = Vec::with_capacity(items + 1);
    places.push(0);
    for item in 0..items {
        let rows = if field.jagged { column.rows.get(item).copied().unwrap_or_default() as usize } else { 1 };
        end = end.saturating_add(row_bytes.saturating_mul(rows));
        places.push(end);
    }
    places
}

/// Joins pieces; copies nothing if there is only one.
fn joined(mut pieces: Vec<Bytes>) -> Bytes {
    if pieces.len() == 1 {
        return pieces.swap_remove(0);
    }
    let mut data = BytesMut::with_capacity(pieces.iter().map(Bytes::len).sum());
    pieces.iter().for_each(|piece| data.extend_from_slice(piece));
    data.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_replay::schema::DType;

    fn message(handles: &[u64], rows: &[u32]) -> v1::ItemBatch {
        let data: Vec<u8> = handles.iter().zip(rows).flat_map(|(id, rows)| vec![*id as u8; *rows as usize]).collect();
        let column = |field: &str, data: Vec<u8>, rows: &[u32]| v1::FieldColumn {
            field: field.into(),
            dtype: "uint8".into(),
            data: data.into(),
            rows: rows.to_vec(),
            ..v1::FieldColumn::default()
        };
        let fixed = handles.iter().map(|id| *id as u8 + 100).collect();
        v1::ItemBatch {
            handles: handles.to_vec(),
            columns: vec![column("fixed", fixed, &[]), column("jagged", data, rows)],
            priorities: vec![1.0; handles.len()],
            versions: handles.to_vec(),
            trajectories: vec![0; handles.len()],
            tags: vec![Bytes::new(); handles.len()],
            ..v1::ItemBatch::default()
        }
    }

    fn gather(handles: &[u64], calls: &[Vec<usize>], answers: Vec<Vec<v1::ItemBatch>>) -> Result<Batch, Error> {
        let field = |name: &str, jagged| Field { name: name.into(), dtype: DType::UInt8, shape: vec![], jagged };
        let schema = Schema::new(vec![field("fixed", false), field("jagged", true)]).unwrap();
        let handles: Vec<MemoryId> = handles.iter().copied().map(MemoryId).collect();
        Gather::new(&handles, calls, answers, &schema)?.batch()
    }

    #[test]
    fn items_of_several_workers_are_in_the_order_of_their_handles() {
        // Handle 4 is missing; 1 is requested twice; a call has two messages.
        let calls = [vec![0, 2, 3, 5], vec![1, 4]];
        let answers = vec![vec![message(&[1, 3], &[2, 0]), message(&[1], &[2])], vec![message(&[2, 5], &[1, 3])]];
        let batch = gather(&[1, 2, 3, 4, 5, 1], &calls, answers).unwrap();
        assert_eq!(batch.handles.iter().map(|id| id.0).collect::<Vec<_>>(), [1, 2, 3, 5, 1]);
        assert_eq!((batch.missing, batch.versions), (vec![MemoryId(4)], vec![1, 2, 3, 5, 1]));
        assert_eq!(&batch.columns[0].data[..], [101, 102, 103, 105, 101]);
        assert_eq!(batch.columns[1].rows.as_deref(), Some(&[2, 1, 0, 3, 2][..]));
        assert_eq!(&batch.columns[1].data[..], [1, 1, 2, 5, 5, 5, 1, 1]);
    }

    #[test]
    fn malformed_answers_are_refused() {
        let calls = [vec![0, 1]];
        let text = |answers| gather(&[1, 2], &calls, answers).unwrap_err().to_string();
        assert!(text(vec![vec![message(&[2, 1], &[1, 1])]]).contains("another order"));
        let mut short = message(&[1, 2], &[1, 1]);
        short.columns[1].data = Bytes::from_static(&[1]);
        assert!(text(vec![vec![short]]).contains("column jagged of another length"));
        let mut other = message(&[2], &[1]);
        other.columns.pop();
        assert!(text(vec![vec![message(&[1], &[1]), other]]).contains("missing in a part"));
    }
}
