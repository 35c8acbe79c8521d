//! Applies records to slots and columns, merging the device passes of many partitions.
//!
//! A batch of records is split into *waves*: the first record of each partition, then the second of each, and so on. Records of
//! one wave touch different partitions, so their writes, updates and quality take one device pass each; the order within every
//! partition is kept from wave to wave.

use crate::state::arena::Arena;
use crate::state::partition::{LOOKAHEAD, NOWHERE, Partition, Row};
use crate::state::partitions::Partitions;
use engram_kernels::{DigestRequest, Error, GroupUpdate, Order, RankRequest, Scope, Slot, Update};
use engram_memory::clock::Advance;
use engram_memory::hash::key_id;
use engram_memory::ledger::Gate;
use engram_memory::{
    Blobs, BufferCommand, Command, Digest, Group, MemoryId, OnMissing, Outcome, PartitionId, QualityVector, Record,
    RejectionReason, Reply, Updates, Upsert, Weight,
};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

/// Device work of one wave; reused from wave to wave.
#[derive(Debug, Default)]
pub(crate) struct Pass {
    rows: Vec<Row>,
    updates: Vec<Update>,
    groups: Vec<GroupUpdate>,
    changed: Vec<u64>,
    folds: bool,
    pub(crate) quality: Vec<QualityVector>,
    pub(crate) digests: Vec<Digest>,
    ranked: Vec<(Slot, u32)>,
}

/// A record of the wave that the ledger admitted.
struct Job<'a> {
    /// Index in the batch.
    at: usize,
    partition: PartitionId,
    record: &'a Record,
    outcome: Outcome,
    /// Its entries of [`Pass::groups`].
    groups: Range<usize>,
}

impl Partitions {
    /// Applies one record, the next of its partition in log order.
    ///
    /// # Errors
    /// See [`Partitions::apply_batch`].
    ///
    /// # Panics
    /// When the partition does not exist here.
    pub fn apply(&mut self, partition: PartitionId, record: &Record) -> Result<Reply, Error> {
        let mut replies = self.apply_refs(&[(partition, record)])?;
        Ok(replies.pop().expect("one record, one reply"))
    }

    /// Applies records, those of one partition in the given order, and returns one reply each. Device work of different partitions
    /// is merged into one pass.
    ///
    /// # Errors
    /// The device failed or is full. Records may be partially applied: nothing may be served any more.
    ///
    /// # Panics
    /// When a partition does not exist here.
    pub fn apply_batch(&mut self, batch: &[(PartitionId, Record)]) -> Result<Vec<Reply>, Error> {
        let refs: Vec<(PartitionId, &Record)> = batch.iter().map(|(partition, record)| (*partition, record)).collect();
        self.apply_refs(&refs)
    }

    /// [`Partitions::apply_batch`] of borrowed records.
    ///
    /// # Errors
    /// As [`Partitions::apply_batch`].
    pub fn apply_refs(&mut self, batch: &[(PartitionId, &Record)]) -> Result<Vec<Reply>, Error> {
        let mut replies: Vec<Option<Reply>> = vec![None; batch.len()];
        for wave in waves(batch, self.shape().partitions) {
            self.wave(batch, &wave, &mut replies)?;
        }
        Ok(replies.into_iter().map(|reply| reply.expect("every record is in one wave")).collect())
    }

    fn wave(
        &mut self,
        batch: &[(PartitionId, &Record)],
        wave: &[usize],
        replies: &mut [Option<Reply>],
    ) -> Result<(), Error> {
        let partitions = self.shape().partitions;
        let mut pass = std::mem::take(&mut self.pass);
        pass.clear();
        let mut jobs = Vec::with_capacity(wave.len());
        for &at in wave {
            let (id, record) = batch[at];
            let (partition, arena) = self.partition_mut(id);
            match partition.ledger.admit(record) {
                Gate::Answer(reply) => replies[at] = Some(reply),
                Gate::Execute => {
                    if let Command::Buffer(command) = &record.command {
                        let reply = pass.buffer(partition, arena, partitions, command)?;
                        partition.ledger.complete(record, &reply);
                        replies[at] = Some(reply);
                        continue;
                    }
                    let mut outcome = Outcome::default();
                    let first = pass.groups.len();
                    pass.prepare(partition, arena, &record.command, &mut outcome)?;
                    let groups = first..pass.groups.len();
                    jobs.push(Job { at, partition: id, record, outcome, groups });
                }
            }
        }
        self.execute(&mut pass, &mut jobs)?;
        for Job { at, partition, record, outcome, .. } in jobs {
            let reply = Reply::Applied(outcome);
            self.partition_mut(partition).0.ledger.complete(record, &reply);
            replies[at] = Some(reply);
        }
        self.pass = pass;
        Ok(())
    }

    fn execute(&mut self, pass: &mut Pass, jobs: &mut [Job<'_>]) -> Result<(), Error> {
        let closes = |job: &Job<'_>| matches!(job.record.command, Command::Epoch { .. } | Command::EpochEnd { .. });
        let any_closes = jobs.iter().any(closes);
        pass.run(&mut self.arena, any_closes)?;
        for job in jobs.iter_mut().filter(|job| !job.groups.is_empty()) {
            job.outcome.applied += pass.changed[job.groups.clone()].iter().sum::<u64>();
            let (partition, arena) = self.partition_mut(job.partition);
            if partition.ledger.settings.count_updates {
                count_group_updates(partition, arena, &pass.groups[job.groups.clone()])?;
            }
        }
        if jobs.iter().any(|job| matches!(job.record.command, Command::DigestMarker { .. })) {
            let Arena { device, columns, segments, .. } = &mut self.arena;
            let request = DigestRequest { segments, ids: columns.ids(), content: columns.content() };
            device.digest(&request, &mut pass.digests)?;
            for job in jobs.iter_mut().filter(|job| matches!(job.record.command, Command::DigestMarker { .. })) {
                let mut digest = pass.digests[job.partition.0 as usize];
                digest.merge(self.ledger_digest(job.partition));
                job.outcome.digest = Some(digest);
            }
        }
        let mut closed_and_evicted = false;
        for job in jobs.iter_mut() {
            let (partition, arena) = self.partition_mut(job.partition);
            let requested = if let Command::Evict { count } = job.record.command { count } else { 0 };
            let evicted = pass.evict(partition, arena, requested)?;
            let excess = partition.ledger.settings.excess(u64::from(partition.count()));
            let evicted = evicted + pass.evict(partition, arena, excess)?;
            job.outcome.evicted += evicted;
            closed_and_evicted |= evicted > 0 && closes(job);
        }
        if closed_and_evicted {
            self.arena.device.epoch(&self.arena.segments, &[], &mut pass.quality)?;
        }
        for job in jobs.iter_mut().filter(|job| closes(job)) {
            job.outcome.quality = Some(pass.quality[job.partition.0 as usize].clone());
        }
        Ok(())
    }
}

impl Pass {
    fn clear(&mut self) {
        self.rows.clear();
        self.updates.clear();
        self.groups.clear();
        self.changed.clear();
        self.folds = false;
    }

    /// Executes the host's part of `command` and collects the device's part.
    fn prepare(
        &mut self,
        partition: &mut Partition,
        arena: &mut Arena,
        command: &Command,
        outcome: &mut Outcome,
    ) -> Result<(), Error> {
        partition.items.follow(&partition.ledger.buffers, command);
        let decay = match command {
            Command::Decay { amount } => *amount,
            Command::EpochBegin { decay, .. } | Command::Epoch { decay, .. } => *decay,
            _ => 0,
        };
        let fold = match partition.clock.advance(decay) {
            Advance::Moved => 0,
            Advance::Fold { subtract } => subtract,
        };
        match command {
            Command::Upsert(upsert) => self.upsert(partition, arena, upsert, outcome)?,
            Command::Remove { ids } => {
                outcome.evicted += partition.remove(arena, ids, |id| outcome.reject(id, RejectionReason::Unknown))?;
            }
            Command::Reinforce(updates) | Command::EpochPart { updates, .. } | Command::Epoch { updates, .. } => {
                match updates {
                    Updates::ById { ids, deltas, on_missing, keys } => {
                        let updates = ById { ids, deltas, on_missing: *on_missing, keys: keys.as_ref(), fold };
                        self.update_by_id(partition, arena, &updates, outcome)?;
                    }
                    Updates::ByGroup(groups) => {
                        let segment = partition.segment;
                        let updates = groups.iter().map(|&(group, delta)| GroupUpdate { segment, group, delta });
                        self.groups.extend(updates);
                    }
                }
            }
            Command::Configure(settings) if !settings.count_updates && arena.columns.has_updates() => {
                for local in 0..partition.count() {
                    arena.columns.set_updates(partition.slot(local), 0);
                }
            }
            _ => {}
        }
        partition.remap(arena);
        let segment = &mut arena.segments[partition.segment as usize];
        segment.clock = partition.clock;
        segment.fold = fold;
        self.folds |= fold > 0;
        Ok(())
    }

    /// Runs the collected device work. With `quality`, [`Pass::quality`] then holds that of every partition.
    fn run(&mut self, arena: &mut Arena, quality: bool) -> Result<(), Error> {
        let Arena { device, segments, .. } = arena;
        if !self.rows.is_empty() {
            device.write(&self.rows)?;
        }
        if !self.groups.is_empty() {
            device.update_groups(segments, &self.groups, &mut self.changed)?;
            segments.iter_mut().for_each(|segment| segment.fold = 0);
            self.folds = false;
        }
        if quality {
            device.epoch(segments, &self.updates, &mut self.quality)?;
        } else if self.folds || !self.updates.is_empty() {
            device.update(segments, &self.updates)?;
        }
        if self.folds {
            segments.iter_mut().for_each(|segment| segment.fold = 0);
        }
        Ok(())
    }

    fn update_by_id(
        &mut self,
        partition: &mut Partition,
        arena: &mut Arena,
        updates: &ById<'_>,
        outcome: &mut Outcome,
    ) -> Result<(), Error> {
        let settings = partition.ledger.settings;
        let initial = partition.potential(updates.fold, settings.initial_weight);
        let mut known_slot = [NOWHERE; LOOKAHEAD];
        let chunks = updates.ids.chunks(LOOKAHEAD).zip(updates.deltas.chunks(LOOKAHEAD));
        for (chunk, (ids, deltas)) in chunks.enumerate() {
            partition.find_many(arena, ids, &mut known_slot);
            for (offset, ((&id, &delta), &known_slot)) in ids.iter().zip(deltas).zip(&known_slot).enumerate() {
                let key = updates.keys.map_or(&[][..], |keys| keys.get(chunk * LOOKAHEAD + offset));
                // An earlier row of this record may have created it.
                let slot = if known_slot == NOWHERE { partition.find(arena, id) } else { Some(known_slot) };
                let slot = match (refuse_key(arena, slot, id, key), slot) {
                    (Some(reason), _) => {
                        outcome.reject(id, reason);
                        continue;
                    }
                    (None, Some(slot)) => slot,
                    (None, None) if updates.on_missing == OnMissing::Create => {
                        let slot = partition.create(arena, id, key)?;
                        self.rows.push((slot, initial, Group(0)));
                        outcome.created += 1;
                        slot
                    }
                    (None, None) => {
                        outcome.reject(id, RejectionReason::Unknown);
                        continue;
                    }
                };
                self.updates.push(Update { slot, delta });
                outcome.applied += 1;
                if settings.count_updates {
                    arena.columns.count_update(slot);
                }
            }
        }
        Ok(())
    }

    fn upsert(
        &mut self,
        partition: &mut Partition,
        arena: &mut Arena,
        upsert: &Upsert,
        outcome: &mut Outcome,
    ) -> Result<(), Error> {
        let width = if upsert.features.is_empty() { 0 } else { upsert.features.len() / upsert.ids.len() };
        let new = (partition.potential(0, partition.ledger.settings.initial_weight), Group(0));
        // Row of each slot that the record touches; kept values of existing memories are read in one pass.
        let mut row_of_slot: HashMap<Slot, usize> = HashMap::new();
        let (mut kept, mut kept_at) = (Vec::new(), Vec::new());
        let mut accepted = Vec::with_capacity(upsert.ids.len());
        for (index, &id) in upsert.ids.iter().enumerate() {
            let key = upsert.keys.as_ref().map_or(&[][..], |keys| keys.get(index));
            let known_slot = partition.find(arena, id);
            if let Some(reason) = refuse_key(arena, known_slot, id, key) {
                outcome.reject(id, reason);
                continue;
            }
            let slot = match known_slot {
                Some(slot) => slot,
                None => {
                    outcome.created += 1;
                    partition.create(arena, id, key)?
                }
            };
            outcome.applied += 1;
            let features = &upsert.features[index * width..][..width];
            let payload = upsert.payloads.as_ref().map_or(&[][..], |payloads| payloads.get(index));
            arena.set_content(partition.segment, slot, features, payload)?;
            let at = match row_of_slot.entry(slot) {
                Entry::Occupied(entry) => *entry.get(),
                Entry::Vacant(entry) => {
                    if known_slot.is_some() {
                        kept.push(slot);
                        kept_at.push(self.rows.len());
                    }
                    self.rows.push((slot, new.0, new.1));
                    *entry.insert(self.rows.len() - 1)
                }
            };
            accepted.push((index, at));
        }
        for (&(potential, group), at) in arena.read(&kept)?.iter().zip(kept_at) {
            self.rows[at] = (self.rows[at].0, potential, group);
        }
        for (index, at) in accepted {
            let (_, potential, group) = &mut self.rows[at];
            if let Some(weight) = upsert.weights.get(index).copied().and_then(Weight::from_units) {
                *potential = partition.potential(0, weight);
            }
            if let Some(new_group) = upsert.groups.get(index) {
                *group = *new_group;
            }
        }
        Ok(())
    }

    /// Executes a command on a buffer at once: it writes rows of its own partition only.
    fn buffer(
        &mut self,
        partition: &mut Partition,
        arena: &mut Arena,
        partitions: u32,
        command: &BufferCommand,
    ) -> Result<Reply, Error> {
        match partition.execute_buffer(arena, partitions, command)? {
            Ok(mut outcome) => {
                let excess = partition.ledger.settings.excess(u64::from(partition.count()));
                outcome.evicted += self.evict(partition, arena, excess)?;
                Ok(Reply::Applied(outcome))
            }
            Err(refusal) => Ok(Reply::Refused(refusal)),
        }
    }

    /// Evicts the `count` lightest memories, lightest first.
    fn evict(&mut self, partition: &mut Partition, arena: &mut Arena, count: u64) -> Result<u64, Error> {
        let count = count.min(u64::from(partition.count())) as usize;
        if count == 0 {
            return Ok(0);
        }
        partition.items.forget();
        let Arena { device, segments, columns, .. } = arena;
        let scope = Scope::Segment(partition.segment);
        let order = Order::LightestFirst;
        let request = RankRequest { segments, ids: columns.ids(), scope, order, limit: Some(count) };
        device.rank(&request, &mut self.ranked)?;
        let ids: Vec<MemoryId> = self.ranked.iter().map(|(slot, _)| columns.id(*slot)).collect();
        partition.remove(arena, &ids, |id| unreachable!("memory {id} was ranked but does not exist"))
    }
}

/// Updates of one record by id.
struct ById<'a> {
    ids: &'a [MemoryId],
    deltas: &'a [i32],
    on_missing: OnMissing,
    keys: Option<&'a Blobs>,
    /// Amount subtracted by the fold of the same record; 0 without one.
    fold: u32,
}

/// Why `key` conflicts with `id` at `slot`, if it does. An absent key never conflicts.
fn refuse_key(arena: &Arena, slot: Option<Slot>, id: MemoryId, key: &[u8]) -> Option<RejectionReason> {
    match slot {
        _ if key.is_empty() => None,
        Some(slot) if arena.columns.key(slot) != key => Some(RejectionReason::KeyCollision),
        None if key_id(key) != id => Some(RejectionReason::KeyMismatch),
        _ => None,
    }
}

fn count_group_updates(partition: &Partition, arena: &mut Arena, updates: &[GroupUpdate]) -> Result<(), Error> {
    let (mut potentials, mut groups) = (Vec::new(), Vec::new());
    for (tile, _) in partition.tiles() {
        arena.device.export(tile, &mut potentials, &mut groups)?;
        for update in updates {
            for offset in (0..groups.len()).filter(|&offset| groups[offset] == update.group.0) {
                arena.columns.count_update(crate::state::columns::slot_at(tile, offset as u32));
            }
        }
    }
    Ok(())
}

/// Indices of the batch by wave: the first record of each partition, then the second of each, ...
fn waves(batch: &[(PartitionId, &Record)], partitions: u32) -> Vec<Vec<usize>> {
    let mut next = vec![0; partitions as usize];
    let mut waves: Vec<Vec<usize>> = Vec::new();
    for (at, (partition, _)) in batch.iter().enumerate() {
        let wave: &mut usize = &mut next[partition.0 as usize];
        if waves.len() == *wave {
            waves.push(Vec::new());
        }
        waves[*wave].push(at);
        *wave += 1;
    }
    waves
}
