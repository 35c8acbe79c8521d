//! Applies commands on buffers to columns, device and index.

use super::index::Entry;
use crate::state::arena::Arena;
use crate::state::partition::{Partition, Row};
use engram_kernels::{Error, Slot};
use engram_memory::buffer::{BufferCommand, BufferRef, Position, Remover, handle_at, position_of};
use engram_memory::{Blobs, Group, MemoryId, Outcome, Refusal, RejectionReason, Weight};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Result of a command: its effects, or why it was refused with nothing changed.
type Executed = Result<Outcome, Refusal>;

impl Partition {
    /// Executes a command whose buffer exists.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn execute_buffer(
        &mut self,
        arena: &mut Arena,
        partitions: u32,
        command: &BufferCommand,
    ) -> Result<Executed, Error> {
        let mut outcome = Outcome::default();
        match command {
            BufferCommand::Define { .. } => {}
            BufferCommand::Drop { buffer } => self.drop_buffer(arena, *buffer, &mut outcome)?,
            BufferCommand::Append { buffer, from, weights, payloads } => {
                let append = Append { buffer: *buffer, from: *from, weights, payloads, partitions };
                return self.append(arena, &append);
            }
            BufferCommand::SetWeights { buffer, ids, weights } => {
                self.set_weights(arena, buffer.group, ids, weights, &mut outcome)?;
            }
            BufferCommand::Delete { buffer, ids } => self.delete(arena, *buffer, ids, &mut outcome)?,
            BufferCommand::Use { buffer, sampled, ids } => {
                let spent = match self.count_uses(arena, *buffer, *sampled, ids, &mut outcome)? {
                    Ok(spent) => spent,
                    Err(refusal) => return Ok(Err(refusal)),
                };
                self.delete(arena, *buffer, &spent, &mut outcome)?;
            }
            BufferCommand::Lease { buffer, consumer, ids, now_ms, until_ms } => {
                let index = self.items(arena, buffer.group, false)?;
                let exists: Vec<bool> = ids.iter().map(|id| index.contains(position_of(*id))).collect();
                let cursor = self.ledger.buffers.get_mut(*buffer).and_then(|found| found.consumer(consumer));
                let cursor = match cursor {
                    Ok(cursor) => cursor,
                    Err(refusal) => return Ok(Err(refusal)),
                };
                for (&id, exists) in ids.iter().zip(exists) {
                    let leased = exists && cursor.lease(position_of(id), *now_ms, *until_ms).is_ok();
                    count(&mut outcome, id, leased);
                }
            }
            BufferCommand::Acknowledge { buffer, consumer, ids } => {
                return self.acknowledge(arena, *buffer, consumer, ids);
            }
        }
        Ok(Ok(outcome))
    }

    fn append(&mut self, arena: &mut Arena, append: &Append<'_>) -> Result<Executed, Error> {
        let Append { buffer, from, weights, payloads, partitions } = *append;
        let needed = weights.len() as u64;
        let items = self.items(arena, buffer.group, false)?.len() as u64;
        let state = self.ledger.buffers.get_mut(buffer);
        let plan = state.and_then(|state| state.excess(items, needed).map(|excess| (excess, state.limits.remover)));
        let (excess, remover) = match plan {
            Ok(plan) => plan,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let mut outcome = Outcome { applied: needed, created: needed, ..Outcome::default() };
        let victims = self.victims(arena, buffer.group, remover, excess as usize)?;
        self.delete(arena, buffer, &victims, &mut outcome)?;
        let mut table = std::mem::take(&mut self.ledger.buffers);
        let first = table.take(from, needed, partitions, |id| self.find(arena, id).is_some());
        self.ledger.buffers = table;
        if let Ok(state) = self.ledger.buffers.get_mut(buffer) {
            state.counts.inserted += needed;
        }
        let mut rows: Vec<Row> = Vec::with_capacity(weights.len());
        for (row, (&units, payload)) in weights.iter().zip(payloads.iter()).enumerate() {
            let position = first + row as u64 * u64::from(partitions);
            let slot = self.create(arena, handle_at(position), &[])?;
            arena.store_payload(self.segment, slot, payload);
            rows.push((slot, self.clock.potential(weight(units)), buffer.group));
            let entry = Entry::of(position, units, payload);
            self.items(arena, buffer.group, false)?.push(entry);
        }
        self.remap(arena);
        arena.segments[self.segment as usize].clock = self.clock;
        arena.device.write(&rows)?;
        outcome.first = Some(handle_at(first));
        Ok(Ok(outcome))
    }

    /// Returns the items that make room for others.
    fn victims(
        &mut self,
        arena: &mut Arena,
        group: Group,
        remover: Remover,
        count: usize,
    ) -> Result<Vec<MemoryId>, Error> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let by_weight = matches!(remover, Remover::LowestPriority | Remover::HighestPriority);
        let index = self.items(arena, group, by_weight)?;
        let handle = |entry: &Entry| handle_at(entry.position);
        Ok(match remover {
            Remover::Fifo | Remover::Refuse => index.from(0).take(count).map(handle).collect(),
            Remover::Lifo => index.from(0).rev().take(count).map(handle).collect(),
            Remover::LowestPriority => least(index.from(0), count, |entry| (entry.weight, entry.position)),
            Remover::HighestPriority => least(index.from(0), count, |entry| (Reverse(entry.weight), entry.position)),
        })
    }

    fn set_weights(
        &mut self,
        arena: &mut Arena,
        group: Group,
        ids: &[MemoryId],
        weights: &[u32],
        outcome: &mut Outcome,
    ) -> Result<(), Error> {
        // Of a repeated handle the last weight counts.
        let mut changed: BTreeMap<Slot, u32> = BTreeMap::new();
        for (&id, &units) in ids.iter().zip(weights) {
            let exists = self.items(arena, group, false)?.set_weight(position_of(id), units);
            count(outcome, id, exists);
            if let Some(slot) = self.find(arena, id).filter(|_| exists) {
                changed.insert(slot, units);
            }
        }
        let row = |(slot, units)| (slot, self.clock.potential(weight(units)), group);
        let rows: Vec<Row> = changed.into_iter().map(row).collect();
        arena.device.write(&rows)
    }

    /// Removes items; reports missing ones.
    fn delete(
        &mut self,
        arena: &mut Arena,
        buffer: BufferRef,
        ids: &[MemoryId],
        outcome: &mut Outcome,
    ) -> Result<(), Error> {
        if ids.is_empty() {
            return Ok(());
        }
        let index = self.items(arena, buffer.group, false)?;
        let mut removed = Vec::with_capacity(ids.len());
        for &id in ids {
            if index.remove(position_of(id)) {
                removed.push(id);
            } else {
                outcome.reject(id, RejectionReason::Unknown);
            }
        }
        if let Ok(state) = self.ledger.buffers.get_mut(buffer) {
            removed.iter().for_each(|id| state.remove(*id));
        }
        outcome.evicted +=
            self.remove(arena, &removed, |id| unreachable!("item {id} is indexed but does not exist"))?;
        Ok(())
    }

    fn drop_buffer(&mut self, arena: &mut Arena, buffer: BufferRef, outcome: &mut Outcome) -> Result<(), Error> {
        let index = self.items(arena, buffer.group, false)?;
        let ids: Vec<MemoryId> = index.from(0).map(|entry| handle_at(entry.position)).collect();
        self.delete(arena, buffer, &ids, outcome)?;
        self.items.remove(buffer.group);
        self.ledger.buffers.remove(buffer.group);
        Ok(())
    }

    /// Counts a batch; returns the items that are used up.
    fn count_uses(
        &mut self,
        arena: &mut Arena,
        buffer: BufferRef,
        sampled: u64,
        ids: &[MemoryId],
        outcome: &mut Outcome,
    ) -> Result<Result<Vec<MemoryId>, Refusal>, Error> {
        let index = self.items(arena, buffer.group, false)?;
        let mut exists: Vec<bool> = ids.iter().map(|id| index.contains(position_of(*id))).collect();
        let state = match self.ledger.buffers.get_mut(buffer) {
            Ok(state) => state,
            Err(refusal) => return Ok(Err(refusal)),
        };
        state.counts.sampled += sampled;
        let mut spent: Vec<MemoryId> = Vec::new();
        for (&id, exists) in ids.iter().zip(&mut exists) {
            *exists &= !spent.contains(&id);
            count(outcome, id, *exists);
            if *exists && state.used(id) {
                spent.push(id);
            }
        }
        Ok(Ok(spent))
    }

    fn acknowledge(
        &mut self,
        arena: &mut Arena,
        buffer: BufferRef,
        consumer: &str,
        ids: &[MemoryId],
    ) -> Result<Executed, Error> {
        let mut outcome = Outcome::default();
        let end = self.ledger.buffers.high() + 1;
        // Built before the table is taken, which the index needs.
        self.items(arena, buffer.group, false)?;
        let mut table = std::mem::take(&mut self.ledger.buffers);
        let cursor = table.get_mut(buffer).and_then(|found| found.consumer(consumer));
        let result = match cursor {
            Ok(cursor) => {
                for &id in ids {
                    let done = cursor.acknowledge(position_of(id)).is_ok();
                    count(&mut outcome, id, done);
                }
                let next = cursor.position();
                let index = self.items(arena, buffer.group, false)?;
                cursor.advance(index.from(next).map(|entry| entry.position), end);
                Ok(outcome)
            }
            Err(refusal) => Err(refusal),
        };
        self.ledger.buffers = table;
        Ok(result)
    }
}

/// An append to a buffer.
struct Append<'a> {
    buffer: BufferRef,
    from: Position,
    weights: &'a [u32],
    payloads: &'a Blobs,
    partitions: u32,
}

/// Returns the `count` items with the least keys, in their order, without sorting the others.
fn least<'a, K: Ord>(
    entries: impl Iterator<Item = &'a Entry>,
    count: usize,
    key: impl Fn(&Entry) -> K + Copy,
) -> Vec<MemoryId> {
    let mut entries: Vec<&Entry> = entries.collect();
    if count < entries.len() {
        entries.select_nth_unstable_by_key(count, |entry| key(entry));
        entries.truncate(count);
    }
    entries.sort_unstable_by_key(|entry| key(entry));
    entries.into_iter().map(|entry| handle_at(entry.position)).collect()
}

fn weight(units: u32) -> Weight {
    Weight::from_units(units).expect("checked before the log")
}

/// Counts an id as applied, or as rejected.
fn count(outcome: &mut Outcome, id: MemoryId, applied: bool) {
    if applied {
        outcome.applied += 1;
    } else {
        outcome.reject(id, RejectionReason::Unknown);
    }
}
