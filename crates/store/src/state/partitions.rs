//! The partitions of a worker over one device: applies records, serves reads.

use crate::payload::{PayloadOptions, Payloads};
use crate::state::apply::Pass;
use crate::state::arena::Arena;
use crate::state::partition::Partition;
use bytes::Bytes;
use engram_kernels::recall::{Query, RecallMatch, RecallRequest};
use engram_kernels::{Device, DigestRequest, Error, Order, RankRequest, Scope, Slot};
use engram_memory::{
    DecayClock, Digest, FeatureShape, Group, Histogram, Ledger, MemoryId, PartitionId, QualityVector, Settings, Shape,
    Weight, partition_of,
};

/// The partitions of one worker: deterministic state machines over a shared arena, without a log.
///
/// Reads see everything applied. After a device error nothing here may be served.
pub struct Partitions {
    pub(crate) shape: Shape,
    pub(crate) arena: Arena,
    /// By [`PartitionId`], which is also the segment; `None` = not on this worker.
    pub(crate) partitions: Vec<Option<Partition>>,
    pub(crate) pass: Pass,
    /// The payload that [`Partitions::get`] read last.
    read_payload: Option<Bytes>,
}

/// What replicas keep besides memories: counts, and approximate bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LedgerUsage {
    pub(crate) run_records: u64,
    pub(crate) run_record_bytes: u64,
    pub(crate) sessions: u64,
    pub(crate) session_bytes: u64,
    /// Runs with remembered learning epochs.
    pub(crate) epoch_entries: u64,
}

/// One memory, as returned by reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory<'a> {
    /// Id.
    pub id: MemoryId,
    /// Current weight.
    pub weight: Weight,
    /// Group.
    pub group: Group,
    /// Key it was inserted with; empty = none.
    pub key: &'a [u8],
    /// Feature bits; empty if the cluster has none.
    pub features: &'a [u8],
    /// Payload; empty = none.
    pub payload: &'a [u8],
    /// Number of counted updates, saturating.
    pub updates: u16,
}

/// The part of payloads that a read needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadPart {
    /// Nothing: payloads on disk are not read, and empty.
    None,
    /// The first bytes of payloads on disk, at least this many or all; others whole.
    Start(u32),
    /// Whole payloads.
    All,
}

/// An entry of a ranking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankedMemory {
    /// Id.
    pub id: MemoryId,
    /// Current weight.
    pub weight: Weight,
}

/// A memory similar to a query.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecalledMemory {
    /// Id.
    pub id: MemoryId,
    /// Current weight.
    pub weight: Weight,
    /// Cosine of features and query, times weight: [`Query::score`](engram_kernels::recall::Query::score).
    pub score: f32,
}

/// Number of memories of a group that were addressed by counted updates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Coverage {
    /// The group.
    pub group: Group,
    /// Memories in the group.
    pub memories: u64,
    /// Memories addressed at least once.
    pub addressed: u64,
    /// Memories addressed exactly the requested number of times (saturating).
    pub full: u64,
}

impl Partitions {
    /// Creates an empty set of partitions over `device`, for a cluster of `shape`. Payloads of items are in memory too.
    pub fn new(device: Box<dyn Device>, shape: Shape) -> Self {
        Self::with_payloads(device, shape, Payloads::new(PayloadOptions::in_memory(shape)))
    }

    pub(crate) fn with_payloads(device: Box<dyn Device>, shape: Shape, payloads: Payloads) -> Self {
        let partitions = (0..shape.partitions).map(|_| None).collect();
        let arena = Arena::new(device, shape.features, shape.partitions, payloads);
        Self { shape, arena, partitions, pass: Pass::default(), read_payload: None }
    }

    /// Adds an empty partition.
    ///
    /// # Panics
    /// When it is open already, or not one of the cluster's.
    pub fn open(&mut self, partition: PartitionId, settings: Settings) {
        let slot = &mut self.partitions[partition.0 as usize];
        assert!(slot.is_none(), "partition {partition} is opened twice");
        *slot = Some(Partition::new(partition.0, settings));
        self.arena.segments[partition.0 as usize].clock = DecayClock::default();
    }

    /// Drops a partition and its data, if it is open.
    pub fn close(&mut self, partition: PartitionId) {
        if let Some(mut closed) = self.partitions[partition.0 as usize].take() {
            closed.clear(&mut self.arena);
        }
    }

    /// Excludes a partition from reads over all of them, or includes it: a backup is counted at its primary only.
    pub fn set_hidden(&mut self, partition: PartitionId, hidden: bool) {
        self.arena.segments[partition.0 as usize].hidden = hidden;
    }

    /// Runs a read over exactly the given partitions, regardless of which are hidden.
    pub fn with_visible<T>(&mut self, visible: &[PartitionId], read: impl FnOnce(&mut Self) -> T) -> T {
        let before: Vec<bool> = self.arena.segments.iter().map(|segment| segment.hidden).collect();
        self.arena.segments.iter_mut().for_each(|segment| segment.hidden = true);
        visible.iter().for_each(|partition| self.set_hidden(*partition, false));
        let result = read(self);
        self.arena.segments.iter_mut().zip(before).for_each(|(segment, hidden)| segment.hidden = hidden);
        result
    }

    pub(crate) fn is_hidden(&self, partition: usize) -> bool {
        self.arena.segments[partition].hidden
    }

    /// Returns the immutable shape of the cluster.
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the shape of the cluster's feature vectors.
    pub const fn features(&self) -> FeatureShape {
        self.shape.features
    }

    /// Describes the device.
    pub fn device(&self) -> &engram_kernels::Info {
        self.arena.device.info()
    }

    /// Returns the status of the GPU, if there is one.
    pub fn gpu(&self) -> Option<&engram_kernels::MirrorStatus> {
        self.arena.device.mirror_status()
    }

    /// Whether `partition` is open here.
    pub fn contains(&self, partition: PartitionId) -> bool {
        self.partitions.get(partition.0 as usize).is_some_and(Option::is_some)
    }

    /// Returns the open partitions, ascending.
    pub fn iter(&self) -> impl Iterator<Item = PartitionId> + '_ {
        (0..self.shape.partitions).map(PartitionId).filter(|partition| self.contains(*partition))
    }

    /// Returns the replicated state of a partition other than its memories; `None` if it is not open.
    pub fn ledger(&self, partition: PartitionId) -> Option<&Ledger> {
        self.get_partition(partition).map(|partition| &partition.ledger)
    }

    /// Returns the decay clock of a partition; `None` if it is not open.
    pub fn clock(&self, partition: PartitionId) -> Option<DecayClock> {
        self.get_partition(partition).map(|partition| partition.clock)
    }

    /// Returns the number of memories of one partition; 0 if it is not open.
    pub fn count(&self, partition: PartitionId) -> u64 {
        self.get_partition(partition).map_or(0, |partition| u64::from(partition.count()))
    }

    /// Returns the number of memories of all visible partitions.
    pub fn memories(&self) -> u64 {
        let visible = self.partitions.iter().enumerate().filter(|(index, _)| !self.is_hidden(*index));
        visible.filter_map(|(_, partition)| partition.as_ref()).map(|partition| u64::from(partition.count())).sum()
    }

    /// Returns the bytes of device, columns with keys, payloads in memory, and indices.
    pub fn bytes(&self) -> u64 {
        self.arena.bytes() + self.partitions.iter().flatten().map(Partition::index_bytes).sum::<u64>()
    }

    /// Returns how much the replicas here keep besides memories.
    pub(crate) fn ledger_usage(&self) -> LedgerUsage {
        let mut usage = LedgerUsage::default();
        for Partition { ledger, .. } in self.partitions.iter().flatten() {
            usage.run_records += ledger.runs.len() as u64;
            usage.run_record_bytes += ledger.runs.total_bytes();
            usage.sessions += ledger.sessions.len() as u64;
            usage.session_bytes += ledger.sessions.kept_bytes();
            usage.epoch_entries += ledger.epochs.len() as u64;
        }
        usage
    }

    /// Returns the partition of a memory.
    pub const fn partition_of(&self, id: MemoryId) -> PartitionId {
        partition_of(id, self.shape.partitions)
    }

    /// Whether a memory exists here.
    pub fn contains_memory(&self, id: MemoryId) -> bool {
        self.find(id).is_some()
    }

    /// Returns one memory; `None` if it, or its partition, is not here.
    ///
    /// # Errors
    /// The device failed.
    pub fn get(&mut self, id: MemoryId) -> Result<Option<Memory<'_>>, Error> {
        let Some((slot, clock)) = self.find(id) else { return Ok(None) };
        let (potential, group) = self.arena.read(&[slot])?[0];
        self.read_payload = self.arena.read_payload(self.partition_of(id).0, slot, PayloadPart::All)?;
        Ok(Some(self.view(slot, clock.weight(potential), group, self.read_payload.as_ref())))
    }

    /// Reads many memories, in order, with one device read; `each` is called with `None` for missing ones.
    ///
    /// # Errors
    /// The device failed, or a payload cannot be read.
    pub fn get_many(&mut self, ids: &[MemoryId], each: impl FnMut(MemoryId, Option<Memory<'_>>)) -> Result<(), Error> {
        self.get_parts(ids, PayloadPart::All, each)
    }

    /// As [`Partitions::get_many`], with a part of the payloads.
    ///
    /// # Errors
    /// The device failed, or a payload cannot be read.
    pub fn get_parts(
        &mut self,
        ids: &[MemoryId],
        part: PayloadPart,
        mut each: impl FnMut(MemoryId, Option<Memory<'_>>),
    ) -> Result<(), Error> {
        let places: Vec<Option<(Slot, DecayClock)>> = ids.iter().map(|id| self.find(*id)).collect();
        let slots: Vec<Slot> = places.iter().flatten().map(|(slot, _)| *slot).collect();
        let rows = self.arena.read(&slots)?.to_vec();
        let mut rows = rows.iter();
        for (&id, slot) in ids.iter().zip(&places) {
            let Some((&(slot, clock), &(potential, group))) = slot.as_ref().zip(slot.and_then(|_| rows.next())) else {
                each(id, None);
                continue;
            };
            let payload = self.arena.read_payload(self.partition_of(id).0, slot, part)?;
            each(id, Some(self.view(slot, clock.weight(potential), group, payload.as_ref())));
        }
        Ok(())
    }

    /// Returns the key of a memory; empty if it has none or does not exist.
    pub fn key(&self, id: MemoryId) -> &[u8] {
        self.find(id).map_or(&[], |(slot, _)| self.arena.columns.key(slot))
    }

    /// Returns the quality of all visible partitions.
    ///
    /// # Errors
    /// The device failed.
    pub fn quality(&mut self) -> Result<QualityVector, Error> {
        let mut total = QualityVector::default();
        self.qualities()?;
        let visible = self.pass.quality.iter().zip(&self.arena.segments).filter(|(_, segment)| !segment.hidden);
        visible.for_each(|(quality, _)| total.merge(quality));
        Ok(total)
    }

    /// Returns the quality of each partition, by [`PartitionId`]; empty vectors for those that are not open.
    ///
    /// # Errors
    /// The device failed.
    pub fn qualities(&mut self) -> Result<&[QualityVector], Error> {
        self.arena.device.epoch(&self.arena.segments, &[], &mut self.pass.quality)?;
        Ok(&self.pass.quality)
    }

    /// Returns the histogram of the weights of all visible partitions in `2^bits` bins.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Panics
    /// When `bits` is above [`engram_memory::quality::MAX_HISTOGRAM_BITS`].
    pub fn histogram(&mut self, bits: u32) -> Result<Histogram, Error> {
        self.arena.device.histogram(&self.arena.segments, bits)
    }

    /// Returns the first `limit` memories in rank order (`None` = all), of one group if given.
    ///
    /// # Errors
    /// The device failed.
    pub fn rank(&mut self, limit: Option<usize>, group: Option<Group>) -> Result<Vec<RankedMemory>, Error> {
        let Arena { device, segments, columns, .. } = &mut self.arena;
        let scope = group.map_or(Scope::All, Scope::Group);
        let mut ranked = Vec::new();
        let request = RankRequest { segments, ids: columns.ids(), scope, order: Order::HeaviestFirst, limit };
        device.rank(&request, &mut ranked)?;
        let weight = |units| Weight::from_units(units).expect("a device returns weights in range");
        Ok(ranked.iter().map(|&(slot, units)| RankedMemory { id: columns.id(slot), weight: weight(units) }).collect())
    }

    /// Returns the first `limit` memories by descending score, then ascending id, of one group if given. Empty unless the cluster has
    /// f16 features.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Panics
    /// When the query's dimension is not the cluster's.
    pub fn recall(&mut self, query: &Query, limit: usize, group: Option<Group>) -> Result<Vec<RecalledMemory>, Error> {
        let Arena { device, segments, columns, .. } = &mut self.arena;
        let Some(features) = columns.feature_column() else { return Ok(Vec::new()) };
        let scope = group.map_or(Scope::All, Scope::Group);
        let request = RecallRequest { segments, ids: columns.ids(), query, features, scope, limit };
        let mut matches = Vec::new();
        device.recall(&request, &mut matches)?;
        let recalled_memory = |item: &RecallMatch| RecalledMemory {
            id: columns.id(item.slot),
            weight: Weight::from_units(item.weight).expect("a device returns weights in range"),
            score: item.score,
        };
        Ok(matches.iter().map(recalled_memory).collect())
    }

    /// Reads up to `limit` memories of a partition from slot `before` (exclusive; `None` = the end) downwards. Since scans go down,
    /// every memory that exists throughout a paged scan is returned at least once despite removals in between; a memory moved by a
    /// removal may be returned twice. Returns the start of the next page, `None` after the last.
    ///
    /// # Errors
    /// The device failed.
    pub fn scan(
        &mut self,
        partition: PartitionId,
        before: Option<u32>,
        limit: u32,
        each: impl FnMut(Memory<'_>),
    ) -> Result<Option<u32>, Error> {
        self.scan_parts(partition, before, limit, PayloadPart::All, each)
    }

    /// As [`Partitions::scan`], with a part of the payloads.
    ///
    /// # Errors
    /// The device failed, or a payload cannot be read.
    pub fn scan_parts(
        &mut self,
        partition: PartitionId,
        before: Option<u32>,
        limit: u32,
        part: PayloadPart,
        mut each: impl FnMut(Memory<'_>),
    ) -> Result<Option<u32>, Error> {
        let Some(source) = self.get_partition(partition) else { return Ok(None) };
        let clock = source.clock;
        let end = before.map_or(source.count(), |before| before.min(source.count()));
        let start = end.saturating_sub(limit);
        let slots: Vec<Slot> = (start..end).rev().map(|local| source.slot(local)).collect();
        let rows = self.arena.read(&slots)?.to_vec();
        for (&slot, (potential, group)) in slots.iter().zip(rows) {
            let payload = self.arena.read_payload(partition.0, slot, part)?;
            each(self.view(slot, clock.weight(potential), group, payload.as_ref()));
        }
        Ok((start > 0).then_some(start))
    }

    /// Returns the digest of the memories of all visible partitions.
    ///
    /// # Errors
    /// The device failed.
    pub fn digest(&mut self) -> Result<Digest, Error> {
        let mut total = Digest::default();
        self.digests()?;
        let visible = self.pass.digests.iter().zip(&self.arena.segments).filter(|(_, segment)| !segment.hidden);
        visible.for_each(|(digest, _)| total.merge(*digest));
        Ok(total)
    }

    /// Returns the digest of the memories of each partition, by [`PartitionId`].
    ///
    /// # Errors
    /// The device failed.
    pub fn digests(&mut self) -> Result<&[Digest], Error> {
        let Arena { device, segments, columns, .. } = &mut self.arena;
        let request = DigestRequest { segments, ids: columns.ids(), content: columns.content() };
        device.digest(&request, &mut self.pass.digests)?;
        Ok(&self.pass.digests)
    }

    /// Returns the digest that replicas of a partition compare: memories, clock and ledger; `None` if it is not open.
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

    /// Returns the coverage per group after `epochs` epochs that each addressed every memory once, groups ascending; groups without
    /// memories are absent.
    ///
    /// # Errors
    /// The device failed.
    pub fn coverage(&mut self, epochs: u64) -> Result<Vec<Coverage>, Error> {
        let expected = epochs.min(u64::from(u16::MAX)) as u16;
        let mut groups = vec![Coverage::default(); 256];
        let (mut potentials, mut column) = (Vec::new(), Vec::new());
        let segments = self.arena.segments.clone();
        let visible = self.partitions.iter().flatten().filter(|partition| !segments[partition.segment as usize].hidden);
        for partition in visible {
            for (tile, _) in partition.tiles() {
                self.arena.device.export(tile, &mut potentials, &mut column)?;
                for (offset, &group) in column.iter().enumerate() {
                    let updates = self.arena.columns.updates(crate::state::columns::slot_at(tile, offset as u32));
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

    pub(crate) fn open_partition_mut(&mut self, id: PartitionId) -> Option<(&mut Partition, &mut Arena)> {
        let partition = self.partitions.get_mut(id.0 as usize).and_then(Option::as_mut)?;
        Some((partition, &mut self.arena))
    }

    pub(crate) fn get_partition(&self, id: PartitionId) -> Option<&Partition> {
        self.partitions.get(id.0 as usize).and_then(Option::as_ref)
    }

    pub(crate) fn ledger_digest(&self, id: PartitionId) -> Digest {
        self.get_partition(id).map_or(Digest::default(), |partition| Digest(partition.ledger.digest(partition.clock)))
    }

    fn find(&self, id: MemoryId) -> Option<(Slot, DecayClock)> {
        let partition = self.get_partition(self.partition_of(id))?;
        Some((partition.find(&self.arena, id)?, partition.clock))
    }

    fn view<'a>(&'a self, slot: Slot, weight: Weight, group: Group, payload: Option<&'a Bytes>) -> Memory<'a> {
        let columns = &self.arena.columns;
        Memory {
            id: columns.id(slot),
            weight,
            group,
            key: columns.key(slot),
            features: columns.features(slot),
            payload: payload.map_or_else(|| columns.payload(slot), |payload| &payload[..]),
            updates: columns.updates(slot),
        }
    }
}
