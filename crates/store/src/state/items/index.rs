//! The index of a buffer's items: by age, with sums of priorities.

use crate::payload::Reference;
use crate::state::arena::Arena;
use crate::state::columns::slot_at;
use crate::state::partition::Partition;
use engram_kernels::{Error, priority};
use engram_memory::buffer::{Position, position_of};
use engram_memory::{Command, Group, Updates};
use engram_replay::item::Head;
use engram_replay::tiles::Priorities;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Weight of a removed item.
const REMOVED: u32 = u32::MAX;
/// Sums kept per buffer: one for each exponent and limit of age in use.
const MAX_SUMS: usize = 4;
/// Removed items that are kept regardless of the number of items.
const MIN_REMOVED: usize = 4_096;

/// How probable an item is.
#[derive(Debug, Clone)]
pub enum Sampler {
    /// Every item alike.
    Uniform,
    /// By a power of its weight.
    Prioritized {
        /// The exponent in units of 2^-16.
        exponent: u32,
        /// Its table.
        table: Arc<priority::Priorities>,
    },
}

impl Sampler {
    /// Returns prioritized sampling with an exponent in units of 2^-16, at most 2^16.
    pub fn prioritized(exponent: u32) -> Self {
        Self::Prioritized { exponent, table: Arc::new(priority::Priorities::new(exponent)) }
    }

    /// Returns the priority of an item.
    fn priority(&self, weight: u32) -> u32 {
        match (self, weight) {
            (_, REMOVED) => 0,
            (Self::Uniform, _) => 1,
            (Self::Prioritized { table, .. }, weight) => table.of(weight),
        }
    }

    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Uniform, Self::Uniform) => true,
            (Self::Prioritized { exponent, .. }, Self::Prioritized { exponent: other, .. }) => exponent == other,
            _ => false,
        }
    }
}

/// Indexes of a partition's buffers, as far as they are built.
#[derive(Debug, Default)]
pub(crate) struct Items {
    indexes: BTreeMap<Group, Index>,
}

/// One item.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) position: Position,
    /// Weight in units.
    pub(crate) weight: u32,
    pub(crate) version: u64,
    pub(crate) trajectory: u64,
}

/// Items of one buffer in order of their positions. A removed item keeps its place until the index is compacted.
#[derive(Debug, Default)]
pub(crate) struct Index {
    entries: Vec<Entry>,
    items: usize,
    /// All entries before are removed.
    first: usize,
    /// Weights changed by other commands than those of the buffer.
    stale: bool,
    sums: Vec<Sums>,
}

/// Sums of priorities of the items from a version on.
#[derive(Debug)]
struct Sums {
    sampler: Sampler,
    oldest_version: u64,
    priorities: Priorities,
}

impl Sums {
    fn priority(&self, entry: &Entry) -> u32 {
        if entry.version < self.oldest_version { 0 } else { self.sampler.priority(entry.weight) }
    }
}

impl Items {
    /// Follows a command that is not one of a buffer, before it is executed.
    pub(crate) fn follow(&mut self, partition: &engram_memory::buffer::BufferTable, command: &Command) {
        if self.indexes.is_empty() {
            return;
        }
        let any_item = |ids: &[engram_memory::MemoryId]| ids.iter().any(|id| partition.is_item(*id));
        match command {
            Command::Upsert(upsert) if any_item(&upsert.ids) => self.forget(),
            Command::Remove { ids } if any_item(ids) => self.forget(),
            Command::Reinforce(updates) | Command::EpochPart { updates, .. } | Command::Epoch { updates, .. } => {
                let decays = matches!(command, Command::Epoch { decay: 1.., .. });
                let changes = match updates {
                    Updates::ById { ids, .. } => any_item(ids),
                    Updates::ByGroup(groups) => groups.iter().any(|(group, _)| self.indexes.contains_key(group)),
                };
                if decays || changes {
                    self.mark_stale();
                }
            }
            Command::Decay { amount: 1.. } | Command::EpochBegin { decay: 1.., .. } => self.mark_stale(),
            _ => {}
        }
    }

    /// Drops all indexes, after memories were removed.
    pub(crate) fn forget(&mut self) {
        self.indexes.clear();
    }

    fn mark_stale(&mut self) {
        self.indexes.values_mut().for_each(|index| index.stale = true);
    }

    pub(crate) fn remove(&mut self, group: Group) {
        self.indexes.remove(&group);
    }
}

impl Partition {
    /// Returns the index of a buffer, built if necessary; with `weights`, its weights are exact.
    pub(crate) fn items(&mut self, arena: &mut Arena, group: Group, weights: bool) -> Result<&mut Index, Error> {
        let usable = self.items.indexes.get(&group).is_some_and(|index| !weights || !index.stale);
        if !usable {
            let index = Index::build(self, arena, group)?;
            self.items.indexes.insert(group, index);
        }
        Ok(self.items.indexes.get_mut(&group).expect("it was built"))
    }
}

impl Index {
    fn build(partition: &Partition, arena: &mut Arena, group: Group) -> Result<Self, Error> {
        let (mut potentials, mut groups) = (Vec::new(), Vec::new());
        let mut entries = Vec::new();
        for (tile, _) in partition.tiles() {
            arena.device.export(tile, &mut potentials, &mut groups)?;
            for (offset, (&potential, &of)) in potentials.iter().zip(&groups).enumerate() {
                let slot = slot_at(tile, offset as u32);
                let id = arena.columns.id(slot);
                if of == group.0 && partition.ledger.buffers.is_item(id) {
                    let weight = partition.clock.weight(potential).units();
                    let position = position_of(id);
                    entries.push(match arena.columns.reference(slot) {
                        Some(&Reference { version, trajectory, .. }) => Entry { position, weight, version, trajectory },
                        None => Entry::of(position, weight, arena.columns.payload(slot)),
                    });
                }
            }
        }
        entries.sort_unstable_by_key(|entry| entry.position);
        Ok(Self { items: entries.len(), entries, ..Self::default() })
    }

    /// Returns the number of items.
    pub(crate) const fn len(&self) -> usize {
        self.items
    }

    /// Returns the items from `position` on, oldest first.
    pub(crate) fn from(&self, position: Position) -> impl DoubleEndedIterator<Item = &Entry> {
        let start = self.entries[self.first..].partition_point(|entry| entry.position < position);
        self.entries[self.first + start..].iter().filter(|entry| entry.weight != REMOVED)
    }

    /// Adds the newest item.
    pub(crate) fn push(&mut self, entry: Entry) {
        debug_assert!(self.entries.last().is_none_or(|last| last.position < entry.position), "positions rise");
        for sums in &mut self.sums {
            let priority = sums.priority(&entry);
            sums.priorities.push(priority);
        }
        self.entries.push(entry);
        self.items += 1;
    }

    fn find(&self, position: Position) -> Option<usize> {
        let place = self.entries.binary_search_by_key(&position, |entry| entry.position).ok()?;
        (self.entries[place].weight != REMOVED).then_some(place)
    }

    /// Whether there is an item at this position.
    pub(crate) fn contains(&self, position: Position) -> bool {
        self.find(position).is_some()
    }

    /// Sets the weight of an item; returns whether it exists.
    pub(crate) fn set_weight(&mut self, position: Position, weight: u32) -> bool {
        let Some(place) = self.find(position) else { return false };
        self.entries[place].weight = weight;
        self.update_sums(place);
        true
    }

    /// Removes an item; returns whether it existed.
    pub(crate) fn remove(&mut self, position: Position) -> bool {
        let Some(place) = self.find(position) else { return false };
        self.entries[place].weight = REMOVED;
        self.items -= 1;
        self.update_sums(place);
        while self.entries.get(self.first).is_some_and(|entry| entry.weight == REMOVED) {
            self.first += 1;
        }
        if self.entries.len() > 2 * self.items + MIN_REMOVED {
            self.compact();
        }
        true
    }

    /// Forgets removed items: the cost is paid by as many removals.
    fn compact(&mut self) {
        self.entries.retain(|entry| entry.weight != REMOVED);
        self.first = 0;
        for sums in &mut self.sums {
            let priorities = self.entries.iter().map(|entry| sums.priority(entry)).collect();
            sums.priorities = Priorities::new(priorities);
        }
    }

    fn update_sums(&mut self, place: usize) {
        let entry = self.entries[place];
        for sums in &mut self.sums {
            let priority = sums.priority(&entry);
            sums.priorities.set(place, priority);
        }
    }

    /// Returns the sums of a sampler over the items from a version on.
    pub(crate) fn sums(&mut self, sampler: &Sampler, oldest_version: u64) -> &Priorities {
        let same = |sums: &Sums| sums.sampler.is(sampler);
        let exact = |sums: &Sums| same(sums) && sums.oldest_version == oldest_version;
        if let Some(place) = self.sums.iter().position(exact) {
            // The one used last is at the end.
            let sums = self.sums.remove(place);
            self.sums.push(sums);
        } else if let Some(place) =
            self.sums.iter().position(|sums| same(sums) && (1..oldest_version).contains(&sums.oldest_version))
        {
            // A learner moves on: items become too old once.
            let mut sums = self.sums.remove(place);
            let before = std::mem::replace(&mut sums.oldest_version, oldest_version);
            for (place, entry) in self.entries.iter().enumerate().skip(self.first) {
                if (before..oldest_version).contains(&entry.version) {
                    sums.priorities.set(place, 0);
                }
            }
            self.sums.push(sums);
        } else {
            if self.sums.len() >= MAX_SUMS {
                self.sums.remove(0);
            }
            let mut sums = Sums { sampler: sampler.clone(), oldest_version, priorities: Priorities::default() };
            sums.priorities = Priorities::new(self.entries.iter().map(|entry| sums.priority(entry)).collect());
            self.sums.push(sums);
        }
        &self.sums.last().expect("one was added").priorities
    }

    /// Returns the item at a place of the sums.
    pub(crate) fn entry(&self, place: usize) -> &Entry {
        &self.entries[place]
    }

    /// Returns the items of each trajectory in order of age; trajectories in order of their first item.
    pub(crate) fn trajectories(&self, oldest_version: u64) -> Vec<(u64, Vec<Position>)> {
        let mut place_of: HashMap<u64, usize> = HashMap::new();
        let mut trajectories: Vec<(u64, Vec<Position>)> = Vec::new();
        for entry in self.from(0).filter(|entry| entry.version >= oldest_version) {
            let place = *place_of.entry(entry.trajectory).or_insert_with(|| {
                trajectories.push((entry.trajectory, Vec::new()));
                trajectories.len() - 1
            });
            trajectories[place].1.push(entry.position);
        }
        trajectories
    }
}

impl Entry {
    /// Returns the entry of a stored item.
    pub(crate) fn of(position: Position, weight: u32, payload: &[u8]) -> Self {
        let (head, _) = Head::decode(payload).unwrap_or_default();
        Self { position, weight, version: head.version, trajectory: head.trajectory }
    }
}
