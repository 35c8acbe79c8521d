//! The passes of [`Device`] as kernel launches.

mod clamped_add;
pub(super) mod epoch_sequence;
pub(super) mod index;
pub(super) mod rank;
pub(super) mod recall;
mod sample;
mod select;
mod sort;
mod update;

pub use sample::{PrioritySums, Share};

use crate::gpu::driver::{Argument, Driver};
use crate::gpu::plain::{bytes, bytes_mut};
use crate::gpu::{BYTES_PER_SLOT, Gpu, THREADS};
use crate::recall::{RecallMatch, RecallRequest};
use crate::{Device, DigestRequest, Error, GroupUpdate, Info, RankRequest, Segment, Slot, TILE, Tile, TileId, Update};
use engram_memory::{Digest, Group, Histogram, QualityVector};
use std::collections::HashMap;

impl<D: Driver> Gpu<D> {
    /// Writes potential and group of distinct slots, whose ids stay the same. Failures may surface in a later call.
    pub(crate) fn refresh(&mut self, slots: &[Slot], rows: &[(u32, Group)]) -> Result<(), Error> {
        self.check_slots(slots.iter().copied());
        if let Some(columns) = self.columns.as_ref().filter(|_| !slots.is_empty()) {
            let potentials: Vec<u32> = rows.iter().map(|row| row.0).collect();
            let groups: Vec<u8> = rows.iter().map(|row| row.1.0).collect();
            let memory = &mut self.memory;
            let there = (memory.uploaded(slots)?, memory.uploaded(&potentials)?, memory.uploaded(&groups)?);
            let arguments = [
                Argument::Buffer(&there.0),
                Argument::U32(slots.len() as u32),
                Argument::Buffer(&there.1),
                Argument::Buffer(&there.2),
                Argument::Buffer(&columns.potentials),
                Argument::Buffer(&columns.groups),
            ];
            memory.launch("scatter_rows", slots.len(), THREADS, &arguments)?;
        }
        self.highest_group = rows.iter().map(|row| row.1.0).fold(self.highest_group, u8::max);
        Ok(())
    }

    /// Replaces potentials and groups from the first slot of `tile` on; the ids stay the same.
    ///
    /// # Errors
    /// [`Error::Failed`].
    ///
    /// # Panics
    /// When the rows exceed the columns, or the numbers of potentials and groups differ.
    pub fn replace(&mut self, tile: TileId, potentials: &[u32], groups: &[u8]) -> Result<(), Error> {
        let first = tile as usize * TILE;
        assert!(first + potentials.len() <= self.tiles.len() * TILE, "rows from tile {tile} on exceed the arena");
        assert_eq!(potentials.len(), groups.len(), "as many groups as potentials");
        if let Some(columns) = &mut self.columns {
            self.memory.0.upload(&columns.potentials, first * size_of::<u32>(), bytes(potentials))?;
            self.memory.0.upload(&columns.groups, first, groups)?;
        }
        self.highest_group = groups.iter().copied().fold(self.highest_group, u8::max);
        Ok(())
    }
}

impl<D: Driver> Device for Gpu<D> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn reserve(&mut self, tiles: u32) -> Result<(), Error> {
        self.grow(tiles)
    }

    fn map_tile(&mut self, tile: TileId, entry: Tile) {
        assert!(entry.count as usize <= TILE, "tile entry has {} used slots, at most {TILE} are allowed", entry.count);
        self.tiles[tile as usize] = entry;
        if let Some(columns) = &mut self.columns {
            columns.tiles_stale = true;
        }
        self.touch(tile);
    }

    fn write(&mut self, rows: &[(Slot, u32, Group)]) -> Result<(), Error> {
        // The last row of a slot wins; threads would write them in any order.
        let last: HashMap<Slot, usize> = rows.iter().enumerate().map(|(place, row)| (row.0, place)).collect();
        let mut places: Vec<usize> = last.into_values().collect();
        places.sort_unstable();
        let slots: Vec<Slot> = places.iter().map(|&place| rows[place].0).collect();
        let rows: Vec<(u32, Group)> = places.iter().map(|&place| (rows[place].1, rows[place].2)).collect();
        self.refresh(&slots, &rows)?;
        self.memory.0.wait()?;
        slots.into_iter().for_each(|slot| self.touch(slot / TILE as u32));
        Ok(())
    }

    fn read(&mut self, slots: &[Slot], out: &mut Vec<(u32, Group)>) -> Result<(), Error> {
        out.clear();
        self.check_slots(slots.iter().copied());
        let Some(columns) = &self.columns else { return Ok(()) };
        let (memory, count) = (&mut self.memory, slots.len());
        let there = memory.uploaded(slots)?;
        let (potentials, groups) = (memory.undefined::<u32>(count)?, memory.undefined::<u8>(count)?);
        let arguments = [
            Argument::Buffer(&there),
            Argument::U32(count as u32),
            Argument::Buffer(&columns.potentials),
            Argument::Buffer(&columns.groups),
            Argument::Buffer(&potentials),
            Argument::Buffer(&groups),
        ];
        memory.launch("gather_rows", count, THREADS, &arguments)?;
        let groups = memory.downloaded::<u8>(&groups, count)?;
        out.extend(memory.downloaded::<u32>(&potentials, count)?.into_iter().zip(groups.into_iter().map(Group)));
        Ok(())
    }

    fn update(&mut self, segments: &[Segment], updates: &[Update]) -> Result<(), Error> {
        self.fold_and_apply(segments, updates)?;
        self.memory.0.wait()
    }

    fn update_groups(
        &mut self,
        segments: &[Segment],
        updates: &[GroupUpdate],
        changed: &mut Vec<u64>,
    ) -> Result<(), Error> {
        self.apply_to_groups(segments, updates, changed)
    }

    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error> {
        self.qualities(segments, updates, out)
    }

    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error> {
        let mut histogram = Histogram::new(bits).expect("the caller passes bits in range");
        let width = usize::from(self.highest_group) + 1;
        let Some(view) = self.view(segments)? else { return Ok(histogram) };
        let bins = view.memory.zeroed::<u32>(width << bits)?;
        let own = [Argument::U32(bits), Argument::Buffer(&bins)];
        let arguments = [&view.columns.weights_and_groups(&view.segments)[..], &own].concat();
        view.memory.launch("weight_histogram", view.slots, TILE, &arguments)?;
        let bins = view.memory.downloaded::<u32>(&bins, width << bits)?;
        for (group, bins) in bins.chunks(1 << bits).enumerate().filter(|(_, bins)| bins.iter().any(|&count| count > 0))
        {
            let sums = histogram.bins_mut(Group(group as u8));
            sums.iter_mut().zip(bins).for_each(|(sum, &count)| *sum += u64::from(count));
        }
        Ok(histogram)
    }

    fn rank(&mut self, request: &RankRequest<'_>, out: &mut Vec<(Slot, u32)>) -> Result<(), Error> {
        self.ranked(request, out)
    }

    fn recall(&mut self, request: &RecallRequest<'_>, out: &mut Vec<RecallMatch>) -> Result<(), Error> {
        let segments = request.segments;
        self.mirror_features(request.features)?;
        let mut found = Vec::new();
        self.best_matches(request, &mut found)?;
        let slots: Vec<Slot> = found.iter().map(|(slot, _)| *slot).collect();
        let mut rows = Vec::new();
        self.read(&slots, &mut rows)?;
        out.clear();
        out.extend(found.into_iter().zip(rows).map(|((slot, score), (potential, _))| {
            let segment = self.tiles[slot as usize / TILE].segment;
            RecallMatch { slot, weight: segments[segment as usize].clock.weight(potential).units(), score }
        }));
        Ok(())
    }

    fn digest(&mut self, request: &DigestRequest<'_>, out: &mut Vec<Digest>) -> Result<(), Error> {
        let DigestRequest { segments, ids, content } = *request;
        self.mirror(ids)?;
        out.clear();
        out.resize(segments.len(), Digest::default());
        let column = content.map(|content| {
            let mut column = vec![0; self.tiles.len() * TILE];
            let used = self.tiles.iter().zip(&self.origins).zip(column.chunks_mut(TILE)).filter(|of| of.0.0.count > 0);
            used.for_each(|((_, &origin), own)| own.copy_from_slice(content.tile(origin as usize)));
            column
        });
        let Some(view) = self.view(segments)? else { return Ok(()) };
        let sums = view.memory.zeroed::<u128>(segments.len())?;
        let content = column.map(|column| view.memory.uploaded(&column)).transpose()?;
        let arguments = [
            Argument::Buffer(&view.columns.potentials),
            Argument::Buffer(&view.columns.groups),
            Argument::Buffer(&view.columns.ids),
            content.as_ref().map_or(Argument::Null, Argument::Buffer),
            Argument::Buffer(&view.segments),
            Argument::Buffer(&view.columns.tiles),
            Argument::Buffer(&sums),
        ];
        view.memory.launch("digest", view.slots, TILE, &arguments)?;
        let sums = view.memory.downloaded::<u128>(&sums, segments.len())?;
        out.iter_mut().zip(sums).for_each(|(digest, sum)| *digest = Digest(sum));
        Ok(())
    }

    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error> {
        let count = self.tiles[tile as usize].count as usize;
        potentials.clear();
        potentials.resize(count, 0);
        groups.clear();
        groups.resize(count, 0);
        let Some(columns) = &self.columns else { return Ok(()) };
        let first = tile as usize * TILE;
        self.memory.0.download(&columns.potentials, first * size_of::<u32>(), bytes_mut(potentials))?;
        self.memory.0.download(&columns.groups, first, bytes_mut(groups))
    }

    fn bytes(&self) -> u64 {
        self.tiles.len() as u64 * TILE as u64 * BYTES_PER_SLOT
    }
}
