//! Rankings: the full order by a sort, or the first entries by a selection.

use super::sort::SortedPairs;
use crate::gpu::driver::{Argument, Driver};
use crate::gpu::{Gpu, THREADS, View, firsts};
use crate::{Error, Order, RankRequest, Scope, Segment, Slot};
use engram_memory::ONE;

/// Slots per block of the key kernel.
const KEYED: usize = THREADS * 4;

/// Lists of used slots, built on demand.
pub(in crate::gpu) struct SlotLists<B> {
    /// In tile order.
    by_tile: Option<B>,
    /// In ascending order of id.
    by_id: Option<B>,
}

impl<B> Default for SlotLists<B> {
    fn default() -> Self {
        Self { by_tile: None, by_id: None }
    }
}

/// Slots and their keys, in the same order.
pub(in crate::gpu) struct KeyedSlots<B> {
    pub(in crate::gpu) keys: B,
    pub(in crate::gpu) slots: B,
    pub(in crate::gpu) count: usize,
}

impl<D: Driver> View<'_, D> {
    /// Returns those of `count` slots whose memory is in scope, in order, with the key of their weight.
    pub(in crate::gpu) fn weight_keys(
        &mut self,
        slots: &D::Buffer,
        count: usize,
        scope: Scope,
    ) -> Result<KeyedSlots<D::Buffer>, Error> {
        let (kind, wanted) = match scope {
            Scope::All => (0, 0),
            Scope::Segment(segment) => (1, segment),
            Scope::Group(group) => (2, u32::from(group.0)),
        };
        let (keys, kept_slots) = (self.memory.undefined::<u32>(count)?, self.memory.undefined::<u32>(count)?);
        let (kept, ticket) = (self.memory.zeroed::<u32>(1)?, self.memory.zeroed::<u32>(1)?);
        let status = self.memory.zeroed::<u32>(count.div_ceil(KEYED))?;
        let [potentials, groups, segments, tiles] = self.columns.weights_and_groups(&self.segments);
        let arguments = [
            Argument::Buffer(slots),
            Argument::U32(count as u32),
            potentials,
            groups,
            segments,
            tiles,
            Argument::U32(kind),
            Argument::U32(wanted),
            Argument::Buffer(&keys),
            Argument::Buffer(&kept_slots),
            Argument::Buffer(&kept),
            Argument::Buffer(&status),
            Argument::Buffer(&ticket),
        ];
        self.memory.launch("weight_keys", count, KEYED, &arguments)?;
        let kept = self.memory.downloaded::<u32>(&kept, 1)?[0] as usize;
        Ok(KeyedSlots { keys, slots: kept_slots, count: kept })
    }

    /// Sorts slots (at least 1) by id: by its low half, then stably by its high half.
    pub(in crate::gpu) fn by_id(&mut self, slots: D::Buffer, count: usize) -> Result<D::Buffer, Error> {
        let mut slots = slots;
        for shift in [0, 32] {
            let keys = self.memory.undefined::<u32>(count)?;
            let arguments = [
                Argument::Buffer(&slots),
                Argument::U32(count as u32),
                Argument::Buffer(&self.columns.ids),
                Argument::U32(shift),
                Argument::Buffer(&keys),
            ];
            self.memory.launch("id_keys", count, THREADS, &arguments)?;
            slots = self.memory.sort(keys, Some(slots), count)?.values;
        }
        Ok(slots)
    }

    /// Downloads (slot, key) of `count` sorted entries.
    pub(in crate::gpu) fn entries(
        &mut self,
        sorted: &SortedPairs<D::Buffer>,
        count: usize,
    ) -> Result<Vec<(Slot, u32)>, Error> {
        let keys = self.memory.downloaded::<u32>(&sorted.keys, count)?;
        let slots = self.memory.downloaded::<u32>(&sorted.values, count)?;
        Ok(slots.into_iter().zip(keys).collect())
    }
}

impl<D: Driver> Gpu<D> {
    /// Builds the list of used slots in tile order and returns their number.
    pub(in crate::gpu) fn list(&mut self) -> Result<usize, Error> {
        let used = self.used();
        if self.listed.by_tile.is_none() && used > 0 {
            let tiles: Vec<u32> = (0..self.tile_blocks()).collect();
            let list = self.list_tiles(&tiles)?;
            self.listed.by_tile = Some(list);
        }
        Ok(used)
    }

    /// Lists the used slots of these tiles, in that order.
    pub(in crate::gpu) fn list_tiles(&mut self, tiles: &[u32]) -> Result<D::Buffer, Error> {
        let first = firsts(tiles.iter().map(|&tile| self.tiles[tile as usize].count));
        let columns = self.columns.as_ref().expect("an arena with tiles has columns");
        let slots = self.memory.undefined::<u32>(first[tiles.len()] as usize)?;
        let (order, first) = (self.memory.uploaded(tiles)?, self.memory.uploaded(&first)?);
        let arguments = [
            Argument::Buffer(&order),
            Argument::Buffer(&first),
            Argument::Buffer(&columns.tiles),
            Argument::Buffer(&slots),
        ];
        self.memory.launch("list_slots", tiles.len(), 1, &arguments)?;
        Ok(slots)
    }

    /// Builds the list of slots by id, if necessary.
    fn list_by_id(&mut self, segments: &[Segment], used: usize) -> Result<(), Error> {
        if self.listed.by_id.is_some() {
            return Ok(());
        }
        let all: Vec<u32> = (0..self.tile_blocks()).collect();
        let slots = self.list_tiles(&all)?;
        let Some(mut view) = self.view(segments)? else { return Ok(()) };
        let slots = view.by_id(slots, used)?;
        self.listed.by_id = Some(slots);
        Ok(())
    }

    /// Returns an upper bound of the memories in scope: those of all groups.
    fn at_most(&self, segments: &[Segment], scope: Scope) -> usize {
        let wanted = |tile: &&crate::Tile| match scope {
            Scope::Segment(only) => only == tile.segment,
            Scope::All | Scope::Group(_) => !segments[tile.segment as usize].hidden,
        };
        self.tiles.iter().filter(|tile| tile.count > 0).filter(wanted).map(|tile| tile.count as usize).sum()
    }

    pub(in crate::gpu) fn ranked(
        &mut self,
        request: &RankRequest<'_>,
        out: &mut Vec<(Slot, u32)>,
    ) -> Result<(), Error> {
        let RankRequest { segments, ids, scope, order, limit } = *request;
        out.clear();
        self.check_segments(segments.len());
        let at_most = self.at_most(segments, scope);
        if limit == Some(0) || at_most == 0 {
            return Ok(());
        }
        self.mirror(ids)?;
        // The tile table must be current before slots are listed by it.
        self.view(segments)?;
        let used = self.list()?;
        let few = limit.filter(|&limit| limit <= at_most / 16);
        if few.is_none() {
            self.list_by_id(segments, used)?;
        }
        // The lists are taken out while a view borrows the rest.
        let listed = std::mem::take(&mut self.listed);
        let ranked = self.rank_listed(request, few, &listed, used);
        self.listed = listed;
        *out = ranked?;
        out.iter_mut().for_each(|entry| entry.1 = ONE - entry.1);
        if order == Order::LightestFirst {
            out.reverse();
        }
        out.truncate(limit.unwrap_or(usize::MAX));
        Ok(())
    }

    fn rank_listed(
        &mut self,
        request: &RankRequest<'_>,
        few: Option<usize>,
        listed: &SlotLists<D::Buffer>,
        used: usize,
    ) -> Result<Vec<(Slot, u32)>, Error> {
        let RankRequest { segments, scope, order, .. } = *request;
        let Some(mut view) = self.view(segments)? else { return Ok(Vec::new()) };
        let list = if few.is_some() { &listed.by_tile } else { &listed.by_id };
        let list = list.as_ref().expect("the caller built the list");
        let mut keyed = view.weight_keys(list, used, scope)?;
        if let Some(limit) = few {
            let first = view.select(&keyed, limit, order == Order::LightestFirst)?;
            if first.count == 0 {
                return Ok(Vec::new());
            }
            let slots = view.by_id(first.slots, first.count)?;
            keyed = view.weight_keys(&slots, first.count, scope)?;
        }
        if keyed.count == 0 {
            return Ok(Vec::new());
        }
        let sorted = view.memory.sort(keyed.keys, Some(keyed.slots), keyed.count)?;
        view.entries(&sorted, keyed.count)
    }

    /// Calls `f` with all used slots in tile order and a view; returns `None` if there are no memories.
    pub(in crate::gpu) fn with_list<T>(
        &mut self,
        segments: &[Segment],
        f: impl FnOnce(&mut View<'_, D>, &D::Buffer, usize) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        if self.view(segments)?.is_none() {
            return Ok(None);
        }
        let used = self.list()?;
        let listed = std::mem::take(&mut self.listed);
        let result = match (self.view(segments)?, &listed.by_tile) {
            (Some(mut view), Some(list)) => Some(f(&mut view, list, used)),
            _ => None,
        };
        self.listed = listed;
        result.transpose()
    }
}
