//! Commands on buffers, by scans over all memories.

use super::{Memory, Partition};
use crate::Weight;
use crate::buffer::{BufferCommand, BufferRef, Position, Remover, handle_at, position_of};
use crate::command::Blobs;
use crate::ids::{Group, MemoryId};
use crate::outcome::{Outcome, Refusal, RejectionReason};
use std::cmp::Reverse;

impl Partition {
    /// Executes a command whose buffer exists.
    pub(super) fn execute_buffer(&mut self, command: &BufferCommand) -> Result<Outcome, Refusal> {
        let mut outcome = Outcome::default();
        match command {
            BufferCommand::Define { .. } => {}
            BufferCommand::Drop { buffer } => {
                for (_, id) in self.items(buffer.group) {
                    self.memories.remove(&id);
                    outcome.evicted += 1;
                }
                self.ledger.buffers.remove(buffer.group);
            }
            BufferCommand::Append { buffer, from, weights, payloads } => {
                self.append(*buffer, *from, weights, payloads, &mut outcome)?;
            }
            BufferCommand::SetWeights { buffer, ids, weights } => {
                for (&id, &units) in ids.iter().zip(weights) {
                    let weight = Weight::from_units(units).expect("checked before the log");
                    match self.item(buffer.group, id) {
                        Some(memory) => memory.weight = weight,
                        None => outcome.reject(id, RejectionReason::Unknown),
                    }
                }
                outcome.applied = ids.len() as u64 - outcome.rejected;
            }
            BufferCommand::Delete { buffer, ids } => {
                for &id in ids {
                    self.remove_item(*buffer, id, &mut outcome)?;
                }
            }
            BufferCommand::Use { buffer, sampled, ids } => {
                self.ledger.buffers.get_mut(*buffer)?.counts.sampled += sampled;
                for &id in ids {
                    if self.item(buffer.group, id).is_none() {
                        outcome.reject(id, RejectionReason::Unknown);
                        continue;
                    }
                    outcome.applied += 1;
                    if self.ledger.buffers.get_mut(*buffer)?.used(id) {
                        self.remove_item(*buffer, id, &mut outcome)?;
                    }
                }
            }
            BufferCommand::Lease { buffer, consumer, ids, now_ms, until_ms } => {
                for &id in ids {
                    let exists = self.item(buffer.group, id).is_some();
                    let cursor = self.ledger.buffers.get_mut(*buffer)?.consumer(consumer)?;
                    if exists && cursor.lease(position_of(id), *now_ms, *until_ms).is_ok() {
                        outcome.applied += 1;
                    } else {
                        outcome.reject(id, RejectionReason::Unknown);
                    }
                }
            }
            BufferCommand::Acknowledge { buffer, consumer, ids } => {
                let existing: Vec<Position> = self.items(buffer.group).into_iter().map(|(at, _)| at).collect();
                let end = self.ledger.buffers.high() + 1;
                let cursor = self.ledger.buffers.get_mut(*buffer)?.consumer(consumer)?;
                for &id in ids {
                    match cursor.acknowledge(position_of(id)) {
                        Ok(()) => outcome.applied += 1,
                        Err(_) => outcome.reject(id, RejectionReason::Unknown),
                    }
                }
                cursor.advance(existing, end);
            }
        }
        Ok(outcome)
    }

    fn append(
        &mut self,
        buffer: BufferRef,
        from: Position,
        weights: &[u32],
        payloads: &Blobs,
        outcome: &mut Outcome,
    ) -> Result<(), Refusal> {
        let mut items = self.items(buffer.group);
        let needed = weights.len() as u64;
        let state = self.ledger.buffers.get_mut(buffer)?;
        let excess = state.excess(items.len() as u64, needed)? as usize;
        let weight = |id: &MemoryId| self.memories[id].weight;
        match state.limits.remover {
            Remover::Fifo | Remover::Refuse => {}
            Remover::Lifo => items.reverse(),
            Remover::LowestPriority => items.sort_by_key(|(_, id)| weight(id)),
            Remover::HighestPriority => items.sort_by_key(|(_, id)| Reverse(weight(id))),
        }
        for &(_, id) in &items[..excess] {
            self.memories.remove(&id);
            state.remove(id);
            outcome.evicted += 1;
        }
        state.counts.inserted += needed;
        let memories = &mut self.memories;
        let first = self.ledger.buffers.take(from, needed, self.partitions, |id| memories.contains_key(&id));
        for (row, (&units, payload)) in weights.iter().zip(payloads.iter()).enumerate() {
            let memory = Memory {
                weight: Weight::from_units(units).expect("checked before the log"),
                group: buffer.group,
                key: Vec::new(),
                features: vec![0; self.features.bytes()],
                payload: payload.to_vec(),
                updates: 0,
            };
            memories.insert(handle_at(first + row as u64 * u64::from(self.partitions)), memory);
        }
        (outcome.applied, outcome.created) = (needed, needed);
        outcome.first = Some(handle_at(first));
        Ok(())
    }

    fn remove_item(&mut self, buffer: BufferRef, id: MemoryId, outcome: &mut Outcome) -> Result<(), Refusal> {
        if self.item(buffer.group, id).is_none() {
            outcome.reject(id, RejectionReason::Unknown);
            return Ok(());
        }
        self.memories.remove(&id);
        self.ledger.buffers.get_mut(buffer)?.remove(id);
        outcome.evicted += 1;
        Ok(())
    }

    /// Returns the items of a buffer by position.
    fn items(&self, group: Group) -> Vec<(Position, MemoryId)> {
        let of_group = self.memories.iter().filter(|(id, memory)| memory.group == group && self.is_item(**id));
        let mut items: Vec<_> = of_group.map(|(id, _)| (position_of(*id), *id)).collect();
        items.sort_unstable();
        items
    }

    fn item(&mut self, group: Group, id: MemoryId) -> Option<&mut Memory> {
        let is_item = self.is_item(id);
        self.memories.get_mut(&id).filter(|memory| memory.group == group && is_item)
    }

    fn is_item(&self, id: MemoryId) -> bool {
        self.ledger.buffers.is_item(id)
    }
}
