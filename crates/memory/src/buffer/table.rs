//! Replicated state of the buffers of a partition, next to their items.

use super::{BufferRef, Cursor, Limits, MAX_BUFFERS, MAX_CONSUMERS, Position, Remover, handle_at};
use crate::ids::{Group, MemoryId};
use crate::outcome::Refusal;
use std::collections::BTreeMap;
use xxhash_rust::xxh3::xxh3_64;

/// What was done with a buffer in a partition.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Items appended.
    pub inserted: u64,
    /// Items drawn, with repetition, as far as they are counted: see [`super::BufferCommand::Use`].
    pub sampled: u64,
    /// Items removed by commands of the buffer.
    pub deleted: u64,
}

/// One buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Name.
    pub name: String,
    /// Schema and settings, opaque.
    pub definition: Vec<u8>,
    /// Limits.
    pub limits: Limits,
    /// Counts.
    pub counts: Counts,
    /// Consumers by name.
    pub consumers: BTreeMap<String, Cursor>,
    /// Uses of the items that were used, if they are limited.
    pub uses: BTreeMap<MemoryId, u32>,
}

impl Buffer {
    /// Returns the hash of a definition.
    pub fn stamp(&self) -> u64 {
        xxh3_64(&self.definition)
    }

    /// Returns the number of items to remove so that `needed` new ones fit.
    ///
    /// # Errors
    /// [`Refusal::BufferFull`] under [`Remover::Refuse`], or when `needed` exceeds the share of the partition.
    pub fn excess(&self, items: u64, needed: u64) -> Result<u64, Refusal> {
        let excess = (items + needed).saturating_sub(self.limits.share);
        if needed > self.limits.share || (excess > 0 && self.limits.remover == Remover::Refuse) {
            return Err(Refusal::BufferFull { items, capacity: self.limits.share, needed });
        }
        Ok(excess)
    }

    /// Forgets an item.
    pub fn remove(&mut self, id: MemoryId) {
        self.uses.remove(&id);
        self.counts.deleted += 1;
    }

    /// Counts a use of an item; returns whether it is used up.
    pub fn used(&mut self, id: MemoryId) -> bool {
        let uses = self.uses.entry(id).or_default();
        *uses = uses.saturating_add(1);
        self.limits.max_reuse > 0 && *uses >= self.limits.max_reuse
    }

    /// Returns the cursor of a consumer, created at its first call.
    ///
    /// # Errors
    /// [`Refusal::BufferLimit`].
    pub fn consumer(&mut self, name: &str) -> Result<&mut Cursor, Refusal> {
        if !self.consumers.contains_key(name) && self.consumers.len() >= MAX_CONSUMERS {
            return Err(Refusal::BufferLimit { what: "consumers of a buffer", most: MAX_CONSUMERS as u64 });
        }
        Ok(self.consumers.entry(name.to_owned()).or_default())
    }
}

/// A partition whose items are moved to another number of partitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepartitionSource {
    /// Its number.
    pub partition: u32,
    /// Its buffers.
    pub table: BufferTable,
    /// Items of each buffer.
    pub items: BTreeMap<Group, u64>,
}

/// The buffers of one partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BufferTable {
    /// Highest position of an item so far; 0 = none.
    pub(crate) high: Position,
    pub(crate) buffers: BTreeMap<Group, Buffer>,
}

impl BufferTable {
    /// Whether there never was an item and there is no buffer.
    pub fn is_empty(&self) -> bool {
        self.high == 0 && self.buffers.is_empty()
    }

    /// Returns the highest position of an item so far; 0 = none.
    pub const fn high(&self) -> Position {
        self.high
    }

    /// Returns the buffers by group.
    pub fn iter(&self) -> impl Iterator<Item = (Group, &Buffer)> {
        self.buffers.iter().map(|(group, buffer)| (*group, buffer))
    }

    /// Returns the buffer of a group.
    pub fn get(&self, group: Group) -> Option<&Buffer> {
        self.buffers.get(&group)
    }

    /// Returns the buffer with this name.
    pub fn find(&self, name: &str) -> Option<(Group, &Buffer)> {
        self.iter().find(|(_, buffer)| buffer.name == name)
    }

    /// Whether a memory with this id in the group of a buffer is an item.
    pub const fn is_item(&self, id: MemoryId) -> bool {
        let position = super::position_of(id);
        position > 0 && position <= self.high
    }

    /// Returns the buffer that a command addresses.
    ///
    /// # Errors
    /// [`Refusal::BufferUnknown`] if it does not exist or has another definition.
    pub fn get_mut(&mut self, buffer: BufferRef) -> Result<&mut Buffer, Refusal> {
        let found = self.buffers.get_mut(&buffer.group).filter(|found| found.stamp() == buffer.stamp);
        found.ok_or(Refusal::BufferUnknown)
    }

    /// Checks that the buffer that a command addresses exists.
    ///
    /// # Errors
    /// As [`Self::get_mut`].
    pub fn check(&self, buffer: BufferRef) -> Result<(), Refusal> {
        let found = self.buffers.get(&buffer.group).is_some_and(|found| found.stamp() == buffer.stamp);
        if found { Ok(()) } else { Err(Refusal::BufferUnknown) }
    }

    /// Creates a buffer, or accepts an equal one. An existing buffer keeps its share, which a restore may have changed.
    ///
    /// # Errors
    /// [`Refusal::BufferConflict`], [`Refusal::BufferLimit`].
    pub fn define(
        &mut self,
        group: Option<Group>,
        name: &str,
        definition: &[u8],
        limits: Limits,
    ) -> Result<(), Refusal> {
        if let Some((found, buffer)) = self.find(name) {
            let same =
                buffer.definition == definition && Limits { share: buffer.limits.share, ..limits } == buffer.limits;
            let equal = same && group.is_none_or(|group| group == found);
            return if equal { Ok(()) } else { Err(Refusal::BufferConflict) };
        }
        if self.buffers.len() >= MAX_BUFFERS {
            return Err(Refusal::BufferLimit { what: "buffers", most: MAX_BUFFERS as u64 });
        }
        let free = || (0..=u8::MAX).rev().map(Group).find(|group| !self.buffers.contains_key(group));
        let group = group.or_else(free).filter(|group| !self.buffers.contains_key(group));
        let group = group.ok_or(Refusal::BufferConflict)?;
        let buffer = Buffer { name: name.to_owned(), definition: definition.to_vec(), limits, ..Buffer::default() };
        self.buffers.insert(group, buffer);
        Ok(())
    }

    /// Takes positions for `count` items of a cluster with `partitions` from `from` on; `exists` says whether a memory has this id. Returns the
    /// first: the others follow at distance `partitions`.
    pub fn take(
        &mut self,
        from: Position,
        count: u64,
        partitions: u32,
        mut exists: impl FnMut(MemoryId) -> bool,
    ) -> Position {
        let distance = u64::from(partitions);
        let above = |position: Position| {
            let steps = (position + 1).saturating_sub(from).div_ceil(distance);
            from + steps * distance
        };
        let mut first = above(self.high).max(from);
        // An id that a client has chosen may be in the way.
        let taken = |first: Position, exists: &mut dyn FnMut(MemoryId) -> bool| {
            (0..count).map(|row| first + row * distance).filter(|position| exists(handle_at(*position))).last()
        };
        while let Some(position) = taken(first, &mut exists) {
            first = above(position);
        }
        if count > 0 {
            self.high = first + (count - 1) * distance;
        }
        first
    }

    /// Removes a buffer.
    pub fn remove(&mut self, group: Group) {
        self.buffers.remove(&group);
    }

    /// Returns the state of a partition of another number of partitions, which gets these numbers of items: definitions and positions are kept,
    /// uses and consumers start again. The counts over all partitions are kept, which rate limiters use: those of the items that are gone, and of
    /// draws, are added to one new partition each.
    #[must_use]
    pub fn repartitioned<'a>(
        sources: impl IntoIterator<Item = &'a RepartitionSource>,
        items: &BTreeMap<Group, u64>,
        partition: u32,
        partitions: u32,
    ) -> Self {
        let of = |items: &BTreeMap<Group, u64>, group| items.get(group).copied().unwrap_or_default();
        let mut whole = Self::default();
        for source in sources {
            whole.high = whole.high.max(source.table.high);
            for (group, buffer) in &source.table.buffers {
                let new = whole.buffers.entry(*group).or_insert_with(|| Buffer {
                    name: buffer.name.clone(),
                    definition: buffer.definition.clone(),
                    limits: buffer.limits.shared(partition, partitions),
                    counts: Counts { inserted: of(items, group), ..Counts::default() },
                    ..Buffer::default()
                });
                if source.partition % partitions == partition {
                    new.counts.inserted += buffer.counts.inserted.saturating_sub(of(&source.items, group));
                    new.counts.sampled += buffer.counts.sampled;
                    new.counts.deleted += buffer.counts.deleted;
                }
            }
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{Placement, order, position, position_of};
    use crate::partition_of;
    use proptest::prelude::*;

    #[test]
    fn positions_rise_are_of_the_partition_and_skip_ids_of_clients() {
        let mut table = BufferTable::default();
        let at = position(order(1_700_000_000_000, 5), 3, 7);
        let first = table.take(at, 4, 7, |_| false);
        assert_eq!(first, at);
        assert_eq!(partition_of(handle_at(first + 7), 7).0, 3);
        let second = table.take(at, 2, 7, |_| false);
        assert_eq!(second, at + 4 * 7);
        let blocked = handle_at(second + 3 * 7);
        let third = table.take(at, 3, 7, |id| id == blocked);
        assert_eq!(third, second + 4 * 7);
        assert_eq!(position_of(handle_at(third)), third);
        // After a change of the number of partitions positions still rise.
        let other = table.take(position(0, 2, 5), 1, 5, |_| false);
        assert!(other > third + 2 * 7 && other % 5 == 2);
    }

    #[test]
    fn definition_is_accepted_again_only_unchanged() {
        let mut table = BufferTable::default();
        let limits = Limits { capacity: 10, share: 10, ..Limits::default() };
        table.define(None, "a", b"x", limits).unwrap();
        table.define(None, "a", b"x", limits).unwrap();
        assert_eq!(table.define(None, "a", b"y", limits), Err(Refusal::BufferConflict));
        table.define(None, "b", b"x", limits).unwrap();
        assert_eq!(table.find("b").unwrap().0, Group(254));
        assert_eq!(table.define(Some(Group(255)), "c", b"x", limits), Err(Refusal::BufferConflict));
        let stamp = table.get(Group(255)).unwrap().stamp();
        assert!(table.check(BufferRef { group: Group(255), stamp }).is_ok());
        assert_eq!(table.check(BufferRef { group: Group(255), stamp: stamp + 1 }), Err(Refusal::BufferUnknown));
    }

    #[test]
    fn shares_add_up_to_the_capacity() {
        let limits = Limits { capacity: 10, ..Limits::default() };
        let shares: Vec<u64> = (0..4).map(|partition| limits.shared(partition, 4).share).collect();
        assert_eq!(shares, [3, 3, 2, 2]);
        let placement = Placement { first: 3, used: 3, partitions: 4 };
        let shares: Vec<u64> = (0..4).map(|partition| limits.placed(placement, partition).share).collect();
        assert_eq!(shares, [3, 3, 0, 4]);
    }

    #[test]
    fn counts_over_all_partitions_survive_another_number_of_partitions() {
        const FROM: u32 = 3;
        let group = Group(255);
        let source = |partition: u32| {
            let counts = Counts { inserted: 25, sampled: 7 + u64::from(partition), deleted: 5 };
            let buffer = Buffer { name: "b".into(), counts, ..Buffer::default() };
            let table = BufferTable { high: 9, buffers: BTreeMap::from([(group, buffer)]) };
            RepartitionSource { partition, table, items: BTreeMap::from([(group, 20)]) }
        };
        let sources: Vec<RepartitionSource> = (0..FROM).map(source).collect();
        for to in [1_u32, 2, 3, 7] {
            let mut whole = Counts::default();
            for partition in 0..to {
                // 60 items in all.
                let items = 60 / u64::from(to) + u64::from(u64::from(partition) < 60 % u64::from(to));
                let items_of = BTreeMap::from([(group, items)]);
                let table = BufferTable::repartitioned(&sources, &items_of, partition, to);
                let counts = table.get(group).unwrap().counts;
                assert_eq!(counts.inserted - counts.deleted, items, "{partition} of {to}");
                whole.inserted += counts.inserted;
                whole.sampled += counts.sampled;
                whole.deleted += counts.deleted;
            }
            assert_eq!(whole, Counts { inserted: 75, sampled: 24, deleted: 15 }, "{to} partitions");
        }
    }

    proptest! {
        #[test]
        fn placed_shares_add_up_and_are_large_enough(
            capacity in 1_u64..3_000_000, partitions in 1_u32..1_025, most in 1_u64..20_000, name in "[a-z]{1,8}",
        ) {
            let used = Placement::spread(capacity, most, partitions);
            let placement = Placement::new(&name, used, partitions);
            let limits = Limits { capacity, ..Limits::default() };
            let shares: Vec<u64> = (0..partitions).map(|partition| limits.placed(placement, partition).share).collect();
            prop_assert_eq!(shares.iter().sum::<u64>(), capacity);
            let held = || shares.iter().copied().filter(|share| *share > 0);
            prop_assert!(held().count() as u64 <= u64::from(used).min(capacity));
            let (least, largest) = (held().min().unwrap(), held().max().unwrap());
            prop_assert!(largest - least <= 1);
            prop_assert!(largest <= most || u64::from(partitions) * most < capacity, "{largest} items in a partition for {most}");
            prop_assert!(least >= Placement::LEAST_SHARE.min(capacity).min(most / 2), "{least} items in a partition");
        }
    }
}
