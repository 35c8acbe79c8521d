//! Reference partition: slow and simple, with eager decay and an ordered map.
//!
//! Every other implementation has the same weights, replies and digests after every record.

use crate::buffer::BufferCommand;
use crate::command::{Command, OnMissing, Record, Updates, Upsert};
use crate::hash::{Digest, content_hash, key_id};
use crate::ids::{Group, MemoryId};
use crate::law::{Weight, rank_order};
use crate::ledger::{Gate, Ledger};
use crate::outcome::{Outcome, RejectionReason, Reply};
use crate::quality::{Histogram, QualityVector};
use crate::settings::{FeatureShape, Shape};
use crate::{DecayClock, Settings};
use std::collections::BTreeMap;

mod buffers;

/// One memory with all its fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// Current weight.
    pub weight: Weight,
    /// Group.
    pub group: Group,
    /// Key it was inserted with; empty = none.
    pub key: Vec<u8>,
    /// Feature bits; empty if the cluster has none.
    pub features: Vec<u8>,
    /// Payload; empty = none.
    pub payload: Vec<u8>,
    /// Number of counted updates, saturating.
    pub updates: u16,
}

/// A reference partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    features: FeatureShape,
    partitions: u32,
    memories: BTreeMap<MemoryId, Memory>,
    ledger: Ledger,
    /// Kept only for comparison: weights here decay eagerly.
    clock: DecayClock,
}

impl Partition {
    /// Creates an empty partition.
    pub fn new(shape: Shape, settings: Settings) -> Self {
        let ledger = Ledger { settings, ..Ledger::default() };
        Self {
            features: shape.features,
            partitions: shape.partitions,
            memories: BTreeMap::new(),
            ledger,
            clock: DecayClock::default(),
        }
    }

    /// Returns the memories by id.
    pub fn memories(&self) -> &BTreeMap<MemoryId, Memory> {
        &self.memories
    }

    /// Returns the replicated state other than the memories.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the decay clock after the same records.
    pub fn clock(&self) -> DecayClock {
        self.clock
    }

    /// Applies one record, the next in log order.
    ///
    /// # Panics
    /// When the record did not pass [`Record::check`] and [`Command::check_features`].
    pub fn apply(&mut self, record: &Record) -> Reply {
        match self.ledger.admit(record) {
            Gate::Answer(reply) => reply,
            Gate::Execute => {
                let reply = match &record.command {
                    Command::Buffer(command) => self.buffer_reply(command),
                    command => Reply::Applied(self.execute(command)),
                };
                self.ledger.complete(record, &reply);
                reply
            }
        }
    }

    /// Returns the quality per group.
    pub fn quality(&self) -> QualityVector {
        let mut vector = QualityVector::default();
        self.memories.values().for_each(|memory| vector.add(memory.group, memory.weight));
        vector
    }

    /// Returns the histogram of `2^bits` bins.
    ///
    /// # Panics
    /// When `bits` is above [`crate::quality::MAX_HISTOGRAM_BITS`].
    pub fn histogram(&self, bits: u32) -> Histogram {
        let mut histogram = Histogram::new(bits).expect("bits are within MAX_HISTOGRAM_BITS");
        self.memories.values().for_each(|memory| histogram.add(memory.group, memory.weight));
        histogram
    }

    /// Returns all memories, heaviest first, ties by id.
    pub fn rank(&self) -> Vec<(Weight, MemoryId)> {
        let mut order: Vec<_> = self.memories.iter().map(|(id, memory)| (memory.weight, *id)).collect();
        order.sort_by(|a, b| rank_order(*a, *b));
        order
    }

    /// Returns the digest of the memories.
    pub fn digest(&self) -> Digest {
        let mut digest = Digest::default();
        for (id, memory) in &self.memories {
            let features = (self.features.dimension > 0).then_some((self.features.dtype, memory.features.as_slice()));
            digest.add(*id, memory.weight, memory.group, content_hash(features, &memory.payload));
        }
        digest
    }

    /// Returns the digest that replicas compare: memories, clock and ledger.
    pub fn replica_digest(&self) -> Digest {
        let mut digest = self.digest();
        digest.merge(Digest(self.ledger.digest(self.clock)));
        digest
    }

    fn buffer_reply(&mut self, command: &BufferCommand) -> Reply {
        match self.execute_buffer(command) {
            Ok(mut outcome) => {
                let excess = self.ledger.settings.excess(self.memories.len() as u64);
                self.evict(excess, &mut outcome);
                Reply::Applied(outcome)
            }
            Err(refusal) => Reply::Refused(refusal),
        }
    }

    fn execute(&mut self, command: &Command) -> Outcome {
        let mut outcome = Outcome::default();
        match command {
            Command::Upsert(upsert) => self.upsert(upsert, &mut outcome),
            Command::Remove { ids } => {
                for id in ids {
                    match self.memories.remove(id) {
                        Some(_) => outcome.evicted += 1,
                        None => outcome.reject(*id, RejectionReason::Unknown),
                    }
                }
            }
            Command::Reinforce(updates) | Command::EpochPart { updates, .. } => self.update(updates, &mut outcome),
            Command::Decay { amount } | Command::EpochBegin { decay: amount, .. } => self.decay(*amount),
            Command::Epoch { decay, updates, .. } => {
                self.decay(*decay);
                self.update(updates, &mut outcome);
            }
            Command::Evict { count } => self.evict(*count, &mut outcome),
            Command::Configure(settings) if !settings.count_updates => {
                self.memories.values_mut().for_each(|memory| memory.updates = 0);
            }
            Command::DigestMarker { .. } => outcome.digest = Some(self.replica_digest()),
            _ => {}
        }
        let excess = self.ledger.settings.excess(self.memories.len() as u64);
        self.evict(excess, &mut outcome);
        if matches!(command, Command::Epoch { .. } | Command::EpochEnd { .. }) {
            outcome.quality = Some(self.quality());
        }
        outcome
    }

    fn decay(&mut self, amount: u32) {
        self.clock.advance(amount);
        self.memories.values_mut().for_each(|memory| memory.weight = memory.weight.decayed(amount));
    }

    fn evict(&mut self, count: u64, outcome: &mut Outcome) {
        for (_, id) in self.rank().into_iter().rev().take(count as usize) {
            self.memories.remove(&id);
            outcome.evicted += 1;
        }
    }

    fn update(&mut self, updates: &Updates, outcome: &mut Outcome) {
        let settings = self.ledger.settings;
        let apply = |memory: &mut Memory, delta: i32| {
            memory.weight = memory.weight.updated(delta);
            memory.updates = memory.updates.saturating_add(u16::from(settings.count_updates));
        };
        match updates {
            Updates::ByGroup(groups) => {
                for (group, delta) in groups {
                    for memory in self.memories.values_mut().filter(|memory| memory.group == *group) {
                        apply(memory, *delta);
                        outcome.applied += 1;
                    }
                }
            }
            Updates::ById { ids, deltas, on_missing, keys } => {
                for (index, (id, delta)) in ids.iter().zip(deltas).enumerate() {
                    let key = keys.as_ref().map_or(&[][..], |keys| keys.get(index));
                    if let Some(reason) = self.refuse_key(*id, key) {
                        outcome.reject(*id, reason);
                    } else if let Some(memory) = self.memories.get_mut(id) {
                        apply(memory, *delta);
                        outcome.applied += 1;
                    } else if *on_missing == OnMissing::Create {
                        apply(self.create(*id, key), *delta);
                        outcome.created += 1;
                        outcome.applied += 1;
                    } else {
                        outcome.reject(*id, RejectionReason::Unknown);
                    }
                }
            }
        }
    }

    fn upsert(&mut self, upsert: &Upsert, outcome: &mut Outcome) {
        let width = self.features.bytes();
        for (index, id) in upsert.ids.iter().enumerate() {
            let key = upsert.keys.as_ref().map_or(&[][..], |keys| keys.get(index));
            if let Some(reason) = self.refuse_key(*id, key) {
                outcome.reject(*id, reason);
                continue;
            }
            if !self.memories.contains_key(id) {
                self.create(*id, key);
                outcome.created += 1;
            }
            outcome.applied += 1;
            let memory = self.memories.get_mut(id).expect("exists or was created above");
            if let Some(weight) = upsert.weights.get(index).copied().and_then(Weight::from_units) {
                memory.weight = weight;
            }
            if let Some(group) = upsert.groups.get(index) {
                memory.group = *group;
            }
            if !upsert.features.is_empty() {
                memory.features = upsert.features[index * width..][..width].to_vec();
            }
            match upsert.payloads.as_ref().map_or(&[][..], |payloads| payloads.get(index)) {
                [] => {}
                payload => memory.payload = payload.to_vec(),
            }
        }
    }

    fn create(&mut self, id: MemoryId, key: &[u8]) -> &mut Memory {
        self.memories.entry(id).or_insert(Memory {
            weight: self.ledger.settings.initial_weight,
            group: Group(0),
            key: key.to_vec(),
            features: vec![0; self.features.bytes()],
            payload: Vec::new(),
            updates: 0,
        })
    }

    /// Why `key` conflicts with `id`, if it does. An absent key never conflicts.
    fn refuse_key(&self, id: MemoryId, key: &[u8]) -> Option<RejectionReason> {
        match self.memories.get(&id) {
            _ if key.is_empty() => None,
            Some(memory) if memory.key != key => Some(RejectionReason::KeyCollision),
            None if key_id(key) != id => Some(RejectionReason::KeyMismatch),
            _ => None,
        }
    }
}
