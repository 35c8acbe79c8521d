//! The memories of a snapshot, dealt out to another number of partitions.
//!
//! A memory keeps all that it is: id, weight, group, key, features, payload, count of updates; so the digest of all memories is
//! that of the snapshot, and later decay and reinforcement give the same bits as they would have there. A partition begins anew
//! in everything else: its clock stands at 0, no learning epoch and no run is known, and every session that was opened before is
//! expired, since what it had asked of one partition now belongs to several. Slots follow the snapshots taken in, so what is
//! sampled is the same wherever the same snapshots are dealt out to the same number, and not what it was in them.

use crate::content::{Chunks, Column};
use crate::partitions::{Memory, Partitions};
use crate::recover::{LoadError, load};
use crate::snapshot_file::{self, SnapshotHead, SnapshotReader, SnapshotWriter};
use crate::{Disk, Error, FileHead, ImportError, SnapshotInfo};
use engram_kernels::Cpu;
use engram_memory::codec::encode_ledger;
use engram_memory::hash::content_hash;
use engram_memory::{DecayClock, Digest, Ledger, Lsn, PartitionId, Settings, Shape, Term, partition_of};
use std::collections::BTreeMap;

/// Memories that are read at once.
const PAGE: u32 = 4_096;

/// Partitions of a new shape, being filled. They are held in memory until they are written.
pub struct Repartition {
    shape: Shape,
    parts: BTreeMap<PartitionId, Part>,
    settings: Option<Settings>,
    counts_updates: bool,
    /// The furthest of what was taken: the new partitions begin behind all of it.
    lsn: Lsn,
    term: Term,
    /// No session opened before this goes on.
    watermark_ms: u64,
}

/// A partition being filled.
#[derive(Default)]
struct Part {
    memories: u64,
    digest: Digest,
    columns: [Chunks; Column::ALL.len()],
    has_keys: bool,
    has_payloads: bool,
}

impl Repartition {
    /// The partitions of `shape` that `wanted` names, empty; what belongs to others is left out. Sessions opened before `now_ms`, in
    /// milliseconds since 1970, are expired.
    pub fn new(shape: Shape, wanted: impl IntoIterator<Item = PartitionId>, now_ms: u64) -> Self {
        Self {
            shape,
            parts: wanted.into_iter().map(|partition| (partition, Part::default())).collect(),
            settings: None,
            counts_updates: false,
            lsn: Lsn(1),
            term: Term(1),
            watermark_ms: now_ms,
        }
    }

    /// The same, of partitions that begin behind `lsn` and under `term` at least, whatever is taken: where several make some each of the same
    /// snapshot, and take no more of it than they need, all of theirs begin alike.
    #[must_use]
    pub fn behind(mut self, lsn: Lsn, term: Term) -> Self {
        (self.lsn, self.term) = (self.lsn.max(lsn), self.term.max(term));
        self
    }

    /// Takes the memories of one partition of the old shape.
    ///
    /// # Errors
    /// [`Error::OtherShape`] when law or features are others; [`Error::Corrupt`] when it does not load to the digest that it names;
    /// those of the disk.
    pub fn take(&mut self, reader: &SnapshotReader) -> Result<(), Error> {
        let (found, head) = (reader.file_head().shape, reader.head());
        if (found.law, found.features) != (self.shape.law, self.shape.features) {
            return Err(Error::OtherShape { path: reader.path().into(), found, expected: self.shape });
        }
        let mut partitions = Partitions::new(Box::new(Cpu::new(1)), found);
        load(&mut partitions, reader).map_err(|error| match error {
            LoadError::File(error) => error,
            LoadError::Import(ImportError::Device(error)) => error.into(),
            LoadError::Import(_) => {
                let what = "its content does not fit its checksums";
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
        let (parts, shape) = (&mut self.parts, self.shape);
        let mut before = None;
        loop {
            before = partitions.scan(head.partition, before, PAGE, |memory| {
                if let Some(part) = parts.get_mut(&partition_of(memory.id, shape.partitions)) {
                    part.push(&memory, shape);
                }
            })?;
            if before.is_none() {
                return Ok(());
            }
        }
    }

    /// Memories of each partition so far.
    pub fn memories(&self) -> impl Iterator<Item = (PartitionId, u64)> {
        self.parts.iter().map(|(partition, part)| (*partition, part.memories))
    }

    /// Writes a snapshot of every partition wanted, those without memories too, for the store of `head`, which recovers them when it
    /// starts. They stand at the furthest lsn and term of what was taken.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn write(self, disk: &dyn Disk, head: &FileHead, created_ms: u64) -> Result<Vec<SnapshotInfo>, Error> {
        let settings = self.settings.unwrap_or_default();
        // The limit was that of another share of the whole: a partition is given its own when it is served.
        let limit = Settings::default().limit;
        let mut ledger = Ledger {
            settings: Settings { count_updates: self.counts_updates, limit, ..settings },
            ..Ledger::default()
        };
        ledger.sessions.expire(self.watermark_ms);
        let (lsn, term, clock) = (self.lsn, self.term, DecayClock::default());
        let mut encoded = Vec::new();
        encode_ledger(&ledger, &mut encoded);
        let beside = Digest(ledger.digest(clock));
        let mut written = Vec::new();
        for (partition, part) in self.parts {
            let (memories, digest, mut whole) = (part.memories, part.digest, part.digest);
            whole.merge(beside);
            let snapshot = SnapshotHead { partition, clock, lsn, term, memories, created_ms, digest: whole.0 };
            let mut writer = SnapshotWriter::create(disk, head, snapshot, &encoded)?;
            for (column, bytes) in part.chunks(self.counts_updates) {
                writer.chunk(column.code(), &bytes)?;
            }
            let bytes = writer.finish()?;
            let path = disk.describe(&snapshot_file::name(partition, lsn));
            written.push(SnapshotInfo { partition, lsn, term, memories, bytes, digest, path });
        }
        Ok(written)
    }
}

impl Part {
    fn push(&mut self, memory: &Memory<'_>, shape: Shape) {
        let mut push = |column: Column, row: &[u8]| self.columns[column as usize - 1].push(column, row);
        push(Column::Ids, &memory.id.0.to_le_bytes());
        push(Column::Potentials, &DecayClock::default().potential(memory.weight).to_le_bytes());
        push(Column::Groups, &[memory.group.0]);
        push(Column::Updates, &memory.updates.to_le_bytes());
        if shape.features.dimension > 0 {
            push(Column::Features, memory.features);
        }
        self.columns[Column::Keys as usize - 1].push_string(Column::Keys, memory.key);
        self.columns[Column::Payloads as usize - 1].push_string(Column::Payloads, memory.payload);
        self.has_keys |= !memory.key.is_empty();
        self.has_payloads |= !memory.payload.is_empty();
        let content = content_hash(Some((shape.features.dtype, memory.features)), memory.payload);
        self.digest.add(memory.id, memory.weight, memory.group, content);
        self.memories += 1;
    }

    /// The columns that the partition has, in the order of a snapshot.
    fn chunks(self, counts_updates: bool) -> impl Iterator<Item = (Column, Vec<u8>)> {
        let Self { has_keys, has_payloads, columns, .. } = self;
        let has = move |column: Column| match column {
            Column::Keys => has_keys,
            Column::Payloads => has_payloads,
            Column::Updates => counts_updates,
            Column::Ids | Column::Potentials | Column::Groups | Column::Features => true,
        };
        columns.into_iter().flat_map(Chunks::into_chunks).filter(move |(column, _)| has(*column))
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

    /// Everything of every memory, by id.
    type Rows = BTreeMap<u64, (u32, u8, u16, [Vec<u8>; 3])>;

    fn rows(partitions: &mut Partitions) -> Rows {
        let mut rows = Rows::new();
        for partition in partitions.iter().collect::<Vec<_>>() {
            let take = |memory: Memory<'_>| {
                let Memory { id, weight, group, key, features, payload, updates } = memory;
                let row = (weight.units(), group.0, updates, [key, features, payload].map(<[u8]>::to_vec));
                assert!(rows.insert(id.0, row).is_none(), "memory {id} is there twice");
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
        let found = snapshot_file::list(disk).unwrap();
        let names = found.iter().map(|(partition, lsns)| snapshot_file::name(*partition, lsns[0]));
        names.map(|name| SnapshotReader::open_any(disk, &name).unwrap()).collect()
    }

    /// Deals out to `to` partitions on `workers` stores, and loads them all.
    fn deal(disk: &SimDisk, to: Shape, workers: u32) -> Partitions {
        let mut loaded = Partitions::new(Box::new(Cpu::new(1)), to);
        for worker in 0..workers {
            let wanted = (0..to.partitions).filter(|partition| partition % workers == worker).map(PartitionId);
            let mut anew = Repartition::new(to, wanted, 5_000);
            readers(disk).iter().for_each(|reader| anew.take(reader).unwrap());
            let own = SimDisk::new(u64::from(worker));
            let written = anew.write(&own, &head(to), 2).unwrap();
            assert_eq!(written.len() as u64, (0..to.partitions).filter(|it| it % workers == worker).count() as u64);
            for reader in readers(&own) {
                reader.verify().unwrap();
                assert!(load(&mut loaded, &reader).is_ok(), "what was dealt out loads, to its digest");
            }
        }
        loaded
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn memories_dealt_out_to_any_number_of_partitions_are_the_same_and_go_on_alike(
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
            let mut many = deal(&whole, shape(from, features), workers);
            let middle = SimDisk::new(2);
            snapshot(&mut many, &middle);
            let mut dealt = deal(&middle, shape(to, features), 1);

            prop_assert_eq!(rows(&mut many), rows(&mut one));
            prop_assert_eq!(rows(&mut dealt), rows(&mut one));
            prop_assert_eq!(dealt.digest().unwrap(), one.digest().unwrap());
            prop_assert_eq!(dealt.quality().unwrap(), one.quality().unwrap());
            // The clock stands elsewhere, and decay gives the same bits all the same.
            let after = |partitions: &mut Partitions| {
                for partition in partitions.iter().collect::<Vec<_>>() {
                    apply(partitions, partition, &[Record::bare(Command::Decay { amount })]);
                }
                partitions.digest().unwrap()
            };
            prop_assert_eq!(after(&mut dealt), after(&mut one));
        }
    }

    #[test]
    fn features_of_another_shape_are_refused_and_old_sessions_are_expired() {
        let mut one = Partitions::new(Box::new(Cpu::new(1)), shape(1, FeatureShape::NONE));
        one.open(PartitionId(0), Settings { count_updates: true, ..Settings::default() });
        let disk = SimDisk::new(1);
        snapshot(&mut one, &disk);
        let other = shape(2, FeatureShape { dimension: 3, dtype: FeatureType::F16 });
        let refused = Repartition::new(other, [PartitionId(0)], 0).take(&readers(&disk)[0]);
        assert!(matches!(refused, Err(Error::OtherShape { .. })), "{refused:?}");
        let dealt = deal(&disk, shape(3, FeatureShape::NONE), 2);
        for partition in dealt.iter() {
            let ledger = dealt.ledger(partition).unwrap();
            assert_eq!((ledger.sessions.watermark_ms(), ledger.settings.count_updates), (5_000, true));
        }
        assert_eq!(dealt.iter().count(), 3);
    }
}
