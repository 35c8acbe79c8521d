//! Distributes the memories of a snapshot over another number of partitions.
//!
//! A memory keeps its id, weight, group, key, features, payload and update count; so the digest of all memories is that of the
//! snapshot, and later decay and reinforcement give the same bits as without repartitioning. All other partition state is reset:
//! the clock is 0, there are no learning epochs and no runs, and every session opened before is expired, since the requests it sent to
//! one partition now belong to several. Replay buffers keep their definitions, items and counts; uses and consumers start again. Slot order follows
//! the input snapshots, so sampling is reproducible for the same snapshots and number of partitions, but differs from sampling before.

use crate::snapshot::recovery::{LoadError, load};
use crate::snapshot_file::{self, SnapshotHead, SnapshotReader, SnapshotWriter};
use crate::state::content::{Chunks, Column};
use crate::state::partitions::{Memory, Partitions};
use crate::{Disk, Error, FileHead, ImportError, SnapshotInfo};
use engram_kernels::Cpu;
use engram_memory::buffer;
use engram_memory::codec::encode_ledger;
use engram_memory::hash::content_hash;
use engram_memory::{DecayClock, Digest, Group, Ledger, Lsn, PartitionId, Settings, Shape, Term, partition_of};
use std::collections::BTreeMap;

/// Memories read per page.
const PAGE: u32 = 4_096;
/// Bytes of a payload that are added to a chunk at once: within the room that a chunk leaves for a row.
const PIECE_BYTES: usize = 32 << 10;

/// Partitions of a new shape under construction, held in memory until they are written.
pub struct Repartition {
    shape: Shape,
    builders: BTreeMap<PartitionId, PartitionBuilder>,
    settings: Option<Settings>,
    counts_updates: bool,
    /// Highest LSN of the input: the new partitions start after it.
    lsn: Lsn,
    term: Term,
    /// Sessions opened before this are expired.
    watermark_ms: u64,
    /// Buffers of the input.
    buffers: Vec<buffer::RepartitionSource>,
}

/// A partition under construction.
#[derive(Default)]
struct PartitionBuilder {
    memories: u64,
    digest: Digest,
    columns: [Chunks; Column::ALL.len()],
    /// Bytes of payloads of items.
    item_payloads: Chunks,
    has_keys: bool,
    has_payloads: bool,
    has_items: bool,
    /// Items of each buffer.
    items: BTreeMap<Group, u64>,
}

impl Repartition {
    /// Creates the empty partitions `wanted` of `shape`; memories of other partitions are skipped. Sessions opened before `now_ms`,
    /// in milliseconds since 1970, are expired.
    pub fn new(shape: Shape, wanted: impl IntoIterator<Item = PartitionId>, now_ms: u64) -> Self {
        Self {
            shape,
            builders: wanted.into_iter().map(|partition| (partition, PartitionBuilder::default())).collect(),
            settings: None,
            counts_updates: false,
            lsn: Lsn(1),
            term: Term(1),
            watermark_ms: now_ms,
            buffers: Vec::new(),
        }
    }

    /// Raises the first LSN and term of the new partitions to at least `lsn` and `term`: workers that build different partitions from
    /// different parts of the same snapshot then start alike.
    #[must_use]
    pub fn starting_after(mut self, lsn: Lsn, term: Term) -> Self {
        (self.lsn, self.term) = (self.lsn.max(lsn), self.term.max(term));
        self
    }

    /// Adds the memories of one partition of the old shape.
    ///
    /// # Errors
    /// [`Error::OtherShape`] if law or features differ; [`Error::Corrupt`] if the snapshot does not match its digest; those of the
    /// disk.
    pub fn add_snapshot(&mut self, reader: &SnapshotReader) -> Result<(), Error> {
        let (source_shape, head) = (reader.file_head().shape, reader.head());
        if (source_shape.law, source_shape.features) != (self.shape.law, self.shape.features) {
            return Err(Error::OtherShape { path: reader.path().into(), found: source_shape, expected: self.shape });
        }
        let mut partitions = Partitions::new(Box::new(Cpu::new(1)), source_shape);
        load(&mut partitions, reader).map_err(|error| match error {
            LoadError::File(error) => error,
            LoadError::Import(ImportError::Device(error)) => error.into(),
            LoadError::Import(_) => {
                let what = "content does not match its digest";
                Error::Corrupt { path: reader.path().into(), offset: 0, what }
            }
        })?;
        if let Some(ledger) = partitions.ledger(head.partition) {
            self.settings.get_or_insert(ledger.settings);
            self.counts_updates |= ledger.settings.count_updates;
            let opened = ledger.sessions.last_opened_ms().map_or(0, |opened_ms| opened_ms + 1);
            self.watermark_ms = self.watermark_ms.max(ledger.sessions.watermark_ms()).max(opened);
        }
        (self.lsn, self.term) = (self.lsn.max(head.lsn), self.term.max(head.term));
        let (builders, shape) = (&mut self.builders, self.shape);
        let buffers = partitions.ledger(head.partition).map(|ledger| ledger.buffers.clone()).unwrap_or_default();
        let mut before = None;
        let mut items: BTreeMap<Group, u64> = BTreeMap::new();
        loop {
            before = partitions.scan(head.partition, before, PAGE, |memory| {
                let is_item = buffers.is_item(memory.id);
                let of_buffer = is_item && buffers.get(memory.group).is_some();
                if of_buffer {
                    *items.entry(memory.group).or_default() += 1;
                }
                if let Some(builder) = builders.get_mut(&partition_of(memory.id, shape.partitions)) {
                    builder.push(&memory, shape, is_item);
                    if of_buffer {
                        *builder.items.entry(memory.group).or_default() += 1;
                    }
                }
            })?;
            if before.is_none() {
                break;
            }
        }
        if !buffers.is_empty() {
            self.buffers.push(buffer::RepartitionSource { partition: head.partition.0, table: buffers, items });
        }
        Ok(())
    }

    /// Returns the number of memories of each partition so far.
    pub fn memories(&self) -> impl Iterator<Item = (PartitionId, u64)> {
        self.builders.iter().map(|(partition, builder)| (*partition, builder.memories))
    }

    /// Writes a snapshot of every wanted partition, including empty ones, for the store of `head`, which recovers them at start. Their
    /// LSN and term are the highest of the input.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn write(self, disk: &dyn Disk, head: &FileHead, created_ms: u64) -> Result<Vec<SnapshotInfo>, Error> {
        let settings = self.settings.unwrap_or_default();
        // The old limit was for another number of partitions; a partition is configured when it is served.
        let limit = Settings::default().limit;
        let mut ledger = Ledger {
            settings: Settings { count_updates: self.counts_updates, limit, ..settings },
            ..Ledger::default()
        };
        ledger.sessions.expire(self.watermark_ms);
        let (lsn, term, clock) = (self.lsn, self.term, DecayClock::default());
        let mut written = Vec::new();
        for (partition, builder) in self.builders {
            let (sources, items) = (&self.buffers, &builder.items);
            ledger.buffers = buffer::BufferTable::repartitioned(sources, items, partition.0, self.shape.partitions);
            let mut encoded = Vec::new();
            encode_ledger(&ledger, &mut encoded);
            let ledger_digest = Digest(ledger.digest(clock));
            let (memories, digest, mut whole) = (builder.memories, builder.digest, builder.digest);
            whole.merge(ledger_digest);
            let snapshot = SnapshotHead { partition, clock, lsn, term, memories, created_ms, digest: whole.0 };
            let mut writer = SnapshotWriter::create(disk, head, snapshot, &encoded)?;
            for (column, bytes) in builder.chunks(self.counts_updates) {
                writer.chunk(column.code(), &bytes)?;
            }
            let bytes = writer.finish()?;
            let path = disk.describe(&snapshot_file::name(partition, lsn));
            written.push(SnapshotInfo { partition, lsn, term, memories, bytes, digest, path });
        }
        Ok(written)
    }
}

impl PartitionBuilder {
    /// Adds a memory; the payload of an item is stored apart from those of other memories.
    fn push(&mut self, memory: &Memory<'_>, shape: Shape, is_item: bool) {
        let mut push = |column: Column, row: &[u8]| self.columns[column as usize - 1].push(column, row);
        push(Column::Ids, &memory.id.0.to_le_bytes());
        push(Column::Potentials, &DecayClock::default().potential(memory.weight).to_le_bytes());
        push(Column::Groups, &[memory.group.0]);
        push(Column::Updates, &memory.updates.to_le_bytes());
        if shape.features.dimension > 0 {
            push(Column::Features, memory.features);
        }
        self.columns[Column::Keys as usize - 1].push_string(Column::Keys, memory.key);
        let (item, other) = if is_item { (memory.payload, &[][..]) } else { (&[][..], memory.payload) };
        let lengths = &mut self.columns[Column::Lengths as usize - 1];
        lengths.push(Column::Lengths, &(item.len() as u32).to_le_bytes());
        item.chunks(PIECE_BYTES).for_each(|piece| self.item_payloads.push(Column::Bytes, piece));
        self.has_items |= !item.is_empty();
        self.columns[Column::Payloads as usize - 1].push_string(Column::Payloads, other);
        self.has_keys |= !memory.key.is_empty();
        self.has_payloads |= !other.is_empty();
        let content = content_hash(Some((shape.features.dtype, memory.features)), memory.payload);
        self.digest.add(memory.id, memory.weight, memory.group, content);
        self.memories += 1;
    }

    /// Returns the chunks of the present columns, in snapshot order.
    fn chunks(self, counts_updates: bool) -> impl Iterator<Item = (Column, Vec<u8>)> {
        let Self { has_keys, has_payloads, has_items, columns, item_payloads, .. } = self;
        let has = move |column: Column| match column {
            Column::Keys => has_keys,
            Column::Payloads => has_payloads,
            Column::Updates => counts_updates,
            Column::Lengths | Column::Bytes => has_items,
            Column::References | Column::Segments => false,
            Column::Ids | Column::Potentials | Column::Groups | Column::Features => true,
        };
        columns.into_iter().chain([item_payloads]).flat_map(Chunks::into_chunks).filter(move |(column, _)| has(*column))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SimDisk;
    use engram_memory::{ClusterId, Command, FeatureShape, FeatureType, Law, ONE, Record, StoreId};
    use engram_testing::commands::arb_log;
    use proptest::prelude::*;

    fn head(shape: Shape) -> FileHead {
        FileHead { cluster: ClusterId(7), store: StoreId(9), shape }
    }

    fn shape(partitions: u32, features: FeatureShape) -> Shape {
        Shape { partitions, law: Law::Linear, features }
    }

    /// All fields of every memory, by id.
    type Rows = BTreeMap<u64, (u32, u8, u16, [Vec<u8>; 3])>;

    fn rows(partitions: &mut Partitions) -> Rows {
        let mut rows = Rows::new();
        for partition in partitions.iter().collect::<Vec<_>>() {
            let take = |memory: Memory<'_>| {
                let Memory { id, weight, group, key, features, payload, updates } = memory;
                let row = (weight.units(), group.0, updates, [key, features, payload].map(<[u8]>::to_vec));
                assert!(rows.insert(id.0, row).is_none(), "memory {id} is duplicate");
            };
            partitions.scan(partition, None, u32::MAX, take).unwrap();
        }
        rows
    }

    fn apply(partitions: &mut Partitions, partition: PartitionId, records: &[Record]) {
        for record in records {
            let _ = partitions.apply(partition, record).unwrap();
        }
    }

    /// Writes every partition as a worker does.
    fn snapshot(partitions: &mut Partitions, disk: &SimDisk) {
        for partition in partitions.iter().collect::<Vec<_>>() {
            let content = partitions.export(partition).unwrap().unwrap();
            let snapshot = SnapshotHead {
                partition,
                clock: content.clock,
                lsn: Lsn(u64::from(partition.0) + 3),
                term: Term(2),
                memories: content.memories,
                created_ms: 1,
                digest: content.digest.0,
            };
            let head = head(partitions.shape());
            let mut writer = SnapshotWriter::create(disk, &head, snapshot, &content.ledger).unwrap();
            content.chunks.iter().for_each(|(column, bytes)| writer.chunk(column.code(), bytes).unwrap());
            writer.finish().unwrap();
        }
    }

    fn readers(disk: &SimDisk) -> Vec<SnapshotReader> {
        let listing = snapshot_file::list(disk).unwrap();
        let names = listing.iter().map(|(partition, lsns)| snapshot_file::name(*partition, lsns[0]));
        names.map(|name| SnapshotReader::open_any(disk, &name).unwrap()).collect()
    }

    /// Splits snapshots into `to` partitions on `workers` stores, and loads them all.
    fn split_snapshots(disk: &SimDisk, to: Shape, workers: u32) -> Partitions {
        let mut loaded = Partitions::new(Box::new(Cpu::new(1)), to);
        for worker in 0..workers {
            let wanted = (0..to.partitions).filter(|partition| partition % workers == worker).map(PartitionId);
            let mut repartition = Repartition::new(to, wanted, 5_000);
            readers(disk).iter().for_each(|reader| repartition.add_snapshot(reader).unwrap());
            let own = SimDisk::new(u64::from(worker));
            let written = repartition.write(&own, &head(to), 2).unwrap();
            assert_eq!(written.len() as u64, (0..to.partitions).filter(|it| it % workers == worker).count() as u64);
            for reader in readers(&own) {
                reader.verify().unwrap();
                assert!(load(&mut loaded, &reader).is_ok(), "the written snapshot loads with a matching digest");
            }
        }
        loaded
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn repartitioned_memories_are_equal_and_decay_identically(
            (features, settings, records) in arb_log(0..60),
            (from, to, workers) in (1u32..7, 1u32..11, 1u32..4),
            amount in 0..=ONE,
        ) {
            let mut one = Partitions::new(Box::new(Cpu::new(1)), shape(1, features));
            one.open(PartitionId(0), settings);
            apply(&mut one, PartitionId(0), &records);
            let whole = SimDisk::new(1);
            snapshot(&mut one, &whole);
            // From one to `from`, and from there to `to`.
            let mut many = split_snapshots(&whole, shape(from, features), workers);
            let middle = SimDisk::new(2);
            snapshot(&mut many, &middle);
            let mut split = split_snapshots(&middle, shape(to, features), 1);

            prop_assert_eq!(rows(&mut many), rows(&mut one));
            prop_assert_eq!(rows(&mut split), rows(&mut one));
            prop_assert_eq!(split.digest().unwrap(), one.digest().unwrap());
            prop_assert_eq!(split.quality().unwrap(), one.quality().unwrap());
            // Decay gives the same bits despite another clock value.
            let after = |partitions: &mut Partitions| {
                for partition in partitions.iter().collect::<Vec<_>>() {
                    apply(partitions, partition, &[Record::bare(Command::Decay { amount })]);
                }
                partitions.digest().unwrap()
            };
            prop_assert_eq!(after(&mut split), after(&mut one));
        }
    }

    #[test]
    fn another_feature_shape_is_rejected_and_old_sessions_are_expired() {
        let mut one = Partitions::new(Box::new(Cpu::new(1)), shape(1, FeatureShape::NONE));
        one.open(PartitionId(0), Settings { count_updates: true, ..Settings::default() });
        let disk = SimDisk::new(1);
        snapshot(&mut one, &disk);
        let other = shape(2, FeatureShape { dimension: 3, dtype: FeatureType::F16 });
        let refused = Repartition::new(other, [PartitionId(0)], 0).add_snapshot(&readers(&disk)[0]);
        assert!(matches!(refused, Err(Error::OtherShape { .. })), "{refused:?}");
        let split = split_snapshots(&disk, shape(3, FeatureShape::NONE), 2);
        for partition in split.iter() {
            let ledger = split.ledger(partition).unwrap();
            assert_eq!((ledger.sessions.watermark_ms(), ledger.settings.count_updates), (5_000, true));
        }
        assert_eq!(split.iter().count(), 3);
    }
}
