//! All partitions of this worker over one device: applies records, answers reads.

use crate::apply::Pass;
use crate::arena::Arena;
use crate::partition::Partition;
use engram_kernels::recall::{Alike, Query, Recall};
use engram_kernels::{Device, Error, Order, Scope, Slot};
use engram_memory::{
    DecayClock, Digest, FeatureShape, Group, Histogram, Ledger, MemoryId, PartitionId, QualityVector, Settings, Shape,
    Weight, partition_of,
};

/// The partitions of one worker: deterministic state machines over a shared arena, without a log.
///
/// Reads see whatever was applied. A device that fails takes everything with it: after an error nothing here may be served.
pub struct Partitions {
    pub(crate) shape: Shape,
    pub(crate) arena: Arena,
    /// By [`PartitionId`], which is also the segment; `None` = not here.
    pub(crate) partitions: Vec<Option<Partition>>,
    pub(crate) pass: Pass,
}

/// One memory, as a read finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory<'a> {
    /// Id.
    pub id: MemoryId,
    /// Weight now.
    pub weight: Weight,
    /// Group.
    pub group: Group,
    /// Key it was inserted with; empty = none.
    pub key: &'a [u8],
    /// Feature bits; empty where the cluster has none.
    pub features: &'a [u8],
    /// Payload; empty = none.
    pub payload: &'a [u8],
    /// Updates that addressed it while they were counted, saturating.
    pub updates: u16,
}

/// A place in a ranking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranked {
    /// Id.
    pub id: MemoryId,
    /// Weight now.
    pub weight: Weight,
}

/// A memory that is like a query.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recalled {
    /// Id.
    pub id: MemoryId,
    /// Weight now.
    pub weight: Weight,
    /// Cosine of features and query, times weight: [`Query::score`](engram_kernels::recall::Query::score).
    pub score: f32,
}

/// How many memories of a group were addressed by updates, while these were counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Coverage {
    /// The group.
    pub group: Group,
    /// Its memories.
    pub memories: u64,
    /// Those addressed at least once.
    pub addressed: u64,
    /// Those addressed exactly as often as asked for (capped as the counts are).
    pub full: u64,
}

impl Partitions {
    /// No partition yet, over `device`, for a cluster of `shape`.
    pub fn new(device: Box<dyn Device>, shape: Shape) -> Self {
        let partitions = (0..shape.partitions).map(|_| None).collect();
        let arena = Arena::new(device, shape.features, shape.partitions);
        Self { shape, arena, partitions, pass: Pass::default() }
    }

    /// Adds an empty partition.
    ///
    /// # Panics
    /// When it is here, or not one of the cluster's.
    pub fn open(&mut self, partition: PartitionId, settings: Settings) {
        let place = &mut self.partitions[partition.0 as usize];
        assert!(place.is_none(), "partition {partition} is opened twice");
        *place = Some(Partition::new(partition.0, settings));
        self.arena.segments[partition.0 as usize].clock = DecayClock::default();
    }

    /// Drops a partition and what it holds; nothing when it is not here.
    pub fn close(&mut self, partition: PartitionId) {
        if let Some(mut closed) = self.partitions[partition.0 as usize].take() {
            closed.clear(&mut self.arena);
        }
    }

    /// Leaves a partition out of reads over all of them, or takes it in: a copy of what another worker serves is counted there.
    pub fn set_hidden(&mut self, partition: PartitionId, hidden: bool) {
        self.arena.segments[partition.0 as usize].hidden = hidden;
    }

    /// Runs a read that counts exactly the partitions given, whatever is hidden otherwise.
    pub fn showing<T>(&mut self, shown: &[PartitionId], read: impl FnOnce(&mut Self) -> T) -> T {
        let before: Vec<bool> = self.arena.segments.iter().map(|segment| segment.hidden).collect();
        self.arena.segments.iter_mut().for_each(|segment| segment.hidden = true);
        shown.iter().for_each(|partition| self.set_hidden(*partition, false));
        let result = read(self);
        self.arena.segments.iter_mut().zip(before).for_each(|(segment, hidden)| segment.hidden = hidden);
        result
    }

    pub(crate) fn is_hidden(&self, partition: usize) -> bool {
        self.arena.segments[partition].hidden
    }

    /// What is fixed of the cluster.
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Feature vectors of the cluster.
    pub const fn features(&self) -> FeatureShape {
        self.shape.features
    }

    /// What executes the passes.
    pub fn device(&self) -> &engram_kernels::Info {
        self.arena.device.info()
    }

    /// How the GPU stands that does large passes, where there is one.
    pub fn gpu(&self) -> Option<&engram_kernels::Standing> {
        self.arena.device.standing()
    }

    /// Whether `partition` is here.
    pub fn contains(&self, partition: PartitionId) -> bool {
        self.partitions.get(partition.0 as usize).is_some_and(Option::is_some)
    }

    /// The partitions that are here, ascending.
    pub fn iter(&self) -> impl Iterator<Item = PartitionId> + '_ {
        (0..self.shape.partitions).map(PartitionId).filter(|partition| self.contains(*partition))
    }

    /// What a partition replicates beside its memories; `None` when it is not here.
    pub fn ledger(&self, partition: PartitionId) -> Option<&Ledger> {
        self.get_partition(partition).map(|partition| &partition.ledger)
    }

    /// The decay clock of a partition; `None` when it is not here.
    pub fn clock(&self, partition: PartitionId) -> Option<DecayClock> {
        self.get_partition(partition).map(|partition| partition.clock)
    }

    /// Memories of one partition; 0 when it is not here.
    pub fn count(&self, partition: PartitionId) -> u64 {
        self.get_partition(partition).map_or(0, |partition| u64::from(partition.count()))
    }

    /// Memories of all partitions here that are not hidden.
    pub fn memories(&self) -> u64 {
        let shown = self.partitions.iter().enumerate().filter(|(index, _)| !self.is_hidden(*index));
        shown.filter_map(|(_, partition)| partition.as_ref()).map(|partition| u64::from(partition.count())).sum()
    }

    /// Bytes of device, columns and indices; keys and payloads on the heap apart.
    pub fn bytes(&self) -> u64 {
        self.arena.bytes() + self.partitions.iter().flatten().map(Partition::index_bytes).sum::<u64>()
    }

    /// Where a memory of this cluster lives.
    pub const fn partition_of(&self, id: MemoryId) -> PartitionId {
        partition_of(id, self.shape.partitions)
    }

    /// Whether a memory is here.
    pub fn contains_memory(&self, id: MemoryId) -> bool {
        self.find(id).is_some()
    }

    /// One memory; `None` when it, or its partition, is not here.
    ///
    /// # Errors
    /// The device failed.
    pub fn get(&mut self, id: MemoryId) -> Result<Option<Memory<'_>>, Error> {
        let Some((slot, clock)) = self.find(id) else { return Ok(None) };
        let (potential, group) = self.arena.read(&[slot])?[0];
        Ok(Some(self.view(slot, clock.weight(potential), group)))
    }

    /// Many memories, in order, with one read of the device; `each` is called with `None` for those that are not here.
    ///
    /// # Errors
    /// The device failed.
    pub fn get_many(
        &mut self,
        ids: &[MemoryId],
        mut each: impl FnMut(MemoryId, Option<Memory<'_>>),
    ) -> Result<(), Error> {
        let places: Vec<Option<(Slot, DecayClock)>> = ids.iter().map(|id| self.find(*id)).collect();
        let slots: Vec<Slot> = places.iter().flatten().map(|(slot, _)| *slot).collect();
        let rows = self.arena.read(&slots)?.to_vec();
        let mut rows = rows.iter();
        for (&id, place) in ids.iter().zip(&places) {
            let memory = place.and_then(|(slot, clock)| {
                let &(potential, group) = rows.next()?;
                Some(self.view(slot, clock.weight(potential), group))
            });
            each(id, memory);
        }
        Ok(())
    }

    /// The key of a memory; empty when it has none or is not here.
    pub fn key(&self, id: MemoryId) -> &[u8] {
        self.find(id).map_or(&[], |(slot, _)| self.arena.columns.key(slot))
    }

    /// Quality of all partitions here that are not hidden.
    ///
    /// # Errors
    /// The device failed.
    pub fn quality(&mut self) -> Result<QualityVector, Error> {
        let mut total = QualityVector::default();
        self.qualities()?;
        let shown = self.pass.quality.iter().zip(&self.arena.segments).filter(|(_, segment)| !segment.hidden);
        shown.for_each(|(quality, _)| total.merge(quality));
        Ok(total)
    }

    /// Quality of each partition, by [`PartitionId`]; empty vectors for those that are not here.
    ///
    /// # Errors
    /// The device failed.
    pub fn qualities(&mut self) -> Result<&[QualityVector], Error> {
        self.arena.device.epoch(&self.arena.segments, &[], &mut self.pass.quality)?;
        Ok(&self.pass.quality)
    }

    /// Histogram of the weights of all partitions here in `2^bits` bins.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Panics
    /// When `bits` is above [`engram_memory::quality::MAX_HISTOGRAM_BITS`].
    pub fn histogram(&mut self, bits: u32) -> Result<Histogram, Error> {
        self.arena.device.histogram(&self.arena.segments, bits)
    }

    /// The first `limit` memories in rank order, all without one; of one group when it is given.
    ///
    /// # Errors
    /// The device failed.
    pub fn rank(&mut self, limit: Option<usize>, group: Option<Group>) -> Result<Vec<Ranked>, Error> {
        let Arena { device, segments, columns, .. } = &mut self.arena;
        let scope = group.map_or(Scope::All, Scope::Group);
        let mut ranked = Vec::new();
        device.rank(segments, scope, Order::HeaviestFirst, limit, columns.ids(), &mut ranked)?;
        let weight = |units| Weight::from_units(units).expect("a device gives weights in range");
        Ok(ranked.iter().map(|&(slot, units)| Ranked { id: columns.id(slot), weight: weight(units) }).collect())
    }

    /// The first `limit` memories by score descending, then id ascending; of one group when it is given. None where the cluster has no
    /// features of f16.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Panics
    /// The query has not the cluster's dimension.
    pub fn recall(&mut self, query: &Query, limit: usize, group: Option<Group>) -> Result<Vec<Recalled>, Error> {
        let Arena { device, segments, columns, .. } = &mut self.arena;
        let Some(features) = columns.feature_column() else { return Ok(Vec::new()) };
        let asked = Recall { query, features, scope: group.map_or(Scope::All, Scope::Group), limit };
        let mut alike = Vec::new();
        device.recall(segments, &asked, columns.ids(), &mut alike)?;
        let recalled = |alike: &Alike| Recalled {
            id: columns.id(alike.slot),
            weight: Weight::from_units(alike.weight).expect("a device gives weights in range"),
            score: alike.score,
        };
        Ok(alike.iter().map(recalled).collect())
    }

    /// Up to `limit` memories of a partition from slot `before` (exclusive; `None` = the end) downwards. Going down, a scan over
    /// pages meets every memory that stays all the time at least once, whatever is removed in between; one that a removal
    /// moves may come twice. Returns where the next page starts, `None` after the last.
    ///
    /// # Errors
    /// The device failed.
    pub fn scan(
        &mut self,
        partition: PartitionId,
        before: Option<u32>,
        limit: u32,
        mut each: impl FnMut(Memory<'_>),
    ) -> Result<Option<u32>, Error> {
        let Some(found) = self.get_partition(partition) else { return Ok(None) };
        let clock = found.clock;
        let end = before.map_or(found.count(), |before| before.min(found.count()));
        let start = end.saturating_sub(limit);
        let slots: Vec<Slot> = (start..end).rev().map(|local| found.slot(local)).collect();
        let rows = self.arena.read(&slots)?.to_vec();
        for (&slot, (potential, group)) in slots.iter().zip(rows) {
            each(self.view(slot, clock.weight(potential), group));
        }
        Ok((start > 0).then_some(start))
    }

    /// The digest of the memories of all partitions here that are not hidden.
    ///
    /// # Errors
    /// The device failed.
    pub fn digest(&mut self) -> Result<Digest, Error> {
        let mut total = Digest::default();
        self.digests()?;
        let shown = self.pass.digests.iter().zip(&self.arena.segments).filter(|(_, segment)| !segment.hidden);
        shown.for_each(|(digest, _)| total.merge(*digest));
        Ok(total)
    }

    /// The digest of the memories of each partition, by [`PartitionId`].
    ///
    /// # Errors
    /// The device failed.
    pub fn digests(&mut self) -> Result<&[Digest], Error> {
        let Arena { device, segments, columns, .. } = &mut self.arena;
        device.digest(segments, columns.ids(), columns.content(), &mut self.pass.digests)?;
        Ok(&self.pass.digests)
    }

    /// What replicas of one partition compare: memories, clock and ledger; `None` when it is not here.
    ///
    /// # Errors
    /// The device failed.
    pub fn replica_digest(&mut self, partition: PartitionId) -> Result<Option<Digest>, Error> {
        if !self.contains(partition) {
            return Ok(None);
        }
        let mut digest = self.digests()?[partition.0 as usize];
        digest.merge(self.ledger_digest(partition));
        Ok(Some(digest))
    }

    /// Coverage per group after `epochs` epochs that addressed every memory once, groups ascending; those without a memory are absent.
    ///
    /// # Errors
    /// The device failed.
    pub fn coverage(&mut self, epochs: u64) -> Result<Vec<Coverage>, Error> {
        let expected = epochs.min(u64::from(u16::MAX)) as u16;
        let mut groups = vec![Coverage::default(); 256];
        let (mut potentials, mut column) = (Vec::new(), Vec::new());
        let segments = self.arena.segments.clone();
        let shown = self.partitions.iter().flatten().filter(|partition| !segments[partition.segment as usize].hidden);
        for partition in shown {
            for (tile, _) in partition.tiles() {
                self.arena.device.export(tile, &mut potentials, &mut column)?;
                for (offset, &group) in column.iter().enumerate() {
                    let updates = self.arena.columns.updates(crate::columns::slot_at(tile, offset as u32));
                    let coverage = &mut groups[usize::from(group)];
                    coverage.group = Group(group);
                    coverage.memories += 1;
                    coverage.addressed += u64::from(updates > 0);
                    coverage.full += u64::from(updates == expected);
                }
            }
        }
        groups.retain(|coverage| coverage.memories > 0);
        Ok(groups)
    }

    pub(crate) fn partition_mut(&mut self, id: PartitionId) -> (&mut Partition, &mut Arena) {
        let partition = self.partitions.get_mut(id.0 as usize).and_then(Option::as_mut);
        (partition.unwrap_or_else(|| panic!("partition {id} is not here")), &mut self.arena)
    }

    pub(crate) fn get_partition(&self, id: PartitionId) -> Option<&Partition> {
        self.partitions.get(id.0 as usize).and_then(Option::as_ref)
    }

    pub(crate) fn ledger_digest(&self, id: PartitionId) -> Digest {
        self.get_partition(id).map_or(Digest::default(), |found| Digest(found.ledger.digest(found.clock)))
    }

    fn find(&self, id: MemoryId) -> Option<(Slot, DecayClock)> {
        let partition = self.get_partition(self.partition_of(id))?;
        Some((partition.find(&self.arena, id)?, partition.clock))
    }

    fn view(&self, slot: Slot, weight: Weight, group: Group) -> Memory<'_> {
        let columns = &self.arena.columns;
        Memory {
            id: columns.id(slot),
            weight,
            group,
            key: columns.key(slot),
            features: columns.features(slot),
            payload: columns.payload(slot),
            updates: columns.updates(slot),
        }
    }
}
