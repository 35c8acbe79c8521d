//! Index on the device (id -> slot), for millions of updates by id.

use super::update::any_folds;
use crate::gpu::driver::{Argument, Driver};
use crate::gpu::{Gpu, THREADS};
use crate::{Error, Segment, Slot, TILE, Tiles};
use engram_memory::MemoryId;

/// Open-addressing table of slots; at most half of the entries are occupied.
pub(in crate::gpu) struct Index<B> {
    entries: B,
    mask: u32,
    seed: u64,
    /// Occupied entries, erased ones included.
    taken: usize,
}

impl<B> Index<B> {
    /// Returns the arguments of every index kernel: `id` by slot, `seed`, `entries`, `mask`.
    fn arguments<'a>(&'a self, ids: &'a B) -> [Argument<'a, B>; 4] {
        let Self { entries, mask, seed, .. } = self;
        [Argument::Buffer(ids), Argument::U64(*seed), Argument::Buffer(entries), Argument::U32(*mask)]
    }

    /// Returns the same arguments after `count` ids or slots.
    fn arguments_for<'a>(&'a self, given: &'a B, count: usize, ids: &'a B) -> [Argument<'a, B>; 6] {
        let [ids, seed, entries, mask] = self.arguments(ids);
        [Argument::Buffer(given), Argument::U32(count as u32), ids, seed, entries, mask]
    }
}

impl<D: Driver> Gpu<D> {
    /// Builds the index of all memories. `seed` must be unknown to clients, which could otherwise force collisions.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`].
    pub fn build_index(&mut self, seed: u64, ids: &Tiles<MemoryId>) -> Result<(), Error> {
        self.mirror(ids)?;
        let taken = self.used();
        // Twice the memories, before it is rebuilt.
        let capacity = (taken * 4).next_power_of_two().max(1_024);
        let entries = self.memory.undefined::<u32>(capacity)?;
        self.memory.0.fill(&entries, 0..capacity * size_of::<u32>(), u8::MAX)?;
        let index = Index { entries, mask: capacity as u32 - 1, seed, taken };
        if taken > 0 {
            let segments = self.tiles.iter().map(|tile| tile.segment).max().map_or(0, |highest| highest as usize + 1);
            if let Some(view) = self.view(&vec![Segment::default(); segments])? {
                let tiles = [Argument::Buffer(&view.columns.tiles)];
                let arguments = [&tiles[..], &index.arguments(&view.columns.ids)].concat();
                view.memory.launch("index_build", view.slots, TILE, &arguments)?;
            }
        }
        self.index = Some(index);
        Ok(())
    }

    /// Removes ids from the index, before their rows are removed or moved; missing ids are ignored. Ids must be distinct.
    ///
    /// # Errors
    /// [`Error::Failed`].
    ///
    /// # Panics
    /// Without a preceding [`Gpu::build_index`].
    pub fn erase(&mut self, ids: &[MemoryId]) -> Result<(), Error> {
        let index = self.index.as_ref().expect("the index was built");
        let Some(columns) = &self.columns else { return Ok(()) };
        let wanted = self.memory.uploaded(&ids.iter().map(|id| id.0).collect::<Vec<_>>())?;
        let arguments = index.arguments_for(&wanted, ids.len(), &columns.ids);
        self.memory.launch("index_erase", ids.len(), THREADS, &arguments)
    }

    /// Inserts the ids at these slots, after their rows were written; none of them is in the index yet.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`].
    ///
    /// # Panics
    /// Without a preceding [`Gpu::build_index`].
    pub fn insert(&mut self, slots: &[Slot], ids: &Tiles<MemoryId>) -> Result<(), Error> {
        self.check_slots(slots.iter().copied());
        self.mirror(ids)?;
        let index = self.index.as_mut().expect("the index was built");
        index.taken += slots.len();
        if index.taken * 2 > index.mask as usize + 1 {
            let seed = index.seed;
            return self.build_index(seed, ids);
        }
        let columns = self.columns.as_ref().expect("slots lie in tiles of an arena");
        let there = self.memory.uploaded(slots)?;
        let arguments = index.arguments_for(&there, slots.len(), &columns.ids);
        self.memory.launch("index_insert", slots.len(), THREADS, &arguments)
    }

    /// Returns the slots of ids, on the device; `u32::MAX` for a missing id.
    fn look_up(&mut self, ids: &[MemoryId]) -> Result<D::Buffer, Error> {
        let index = self.index.as_ref().expect("the index was built");
        let wanted = self.memory.uploaded(&ids.iter().map(|id| id.0).collect::<Vec<_>>())?;
        let slots = self.memory.undefined::<u32>(ids.len())?;
        let Some(columns) = &self.columns else {
            self.memory.0.fill(&slots, 0..size_of_val(ids) / 2, u8::MAX)?;
            return Ok(slots);
        };
        let found = [Argument::Buffer(&slots)];
        let arguments = [&index.arguments_for(&wanted, ids.len(), &columns.ids)[..], &found].concat();
        self.memory.launch("index_find", ids.len(), THREADS, &arguments)?;
        Ok(slots)
    }

    /// Returns the slot of each id.
    ///
    /// # Errors
    /// [`Error::Failed`].
    ///
    /// # Panics
    /// Without a preceding [`Gpu::build_index`].
    pub fn find(&mut self, ids: &[MemoryId]) -> Result<Vec<Option<Slot>>, Error> {
        let slots = self.look_up(ids)?;
        let slots = self.memory.downloaded::<u32>(&slots, ids.len())?;
        Ok(slots.into_iter().map(|slot| (slot != Slot::MAX).then_some(slot)).collect())
    }

    /// Folds like [`crate::Device::update`], then applies updates by id in order; returns the indices of updates whose id is missing.
    ///
    /// # Errors
    /// [`Error::Failed`].
    ///
    /// # Panics
    /// Without a preceding [`Gpu::build_index`].
    pub fn update_by_id(&mut self, segments: &[Segment], updates: &[(MemoryId, i32)]) -> Result<Vec<usize>, Error> {
        let ids: Vec<MemoryId> = updates.iter().map(|update| update.0).collect();
        let deltas: Vec<i32> = updates.iter().map(|update| update.1).collect();
        let slots = self.look_up(&ids)?;
        let found = self.memory.downloaded::<u32>(&slots, ids.len())?;
        if let Some(mut view) = self.view(segments)? {
            let deltas = view.memory.uploaded(&deltas)?;
            view.apply(slots, &deltas, ids.len(), any_folds(segments))?;
            view.memory.0.wait()?;
        }
        Ok(found.iter().enumerate().filter(|(_, slot)| **slot == Slot::MAX).map(|(place, _)| place).collect())
    }
}
