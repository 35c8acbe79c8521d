//! Recall: the best matches of a query, by cosine times weight.

use crate::gpu::driver::{Argument, Driver};
use crate::gpu::plain::bytes;
use crate::gpu::{Gpu, Memory, THREADS, View};
use crate::recall::{FeatureColumn, Query, RecallRequest, score_of};
use crate::{Error, Slot, TILE, TileId};

/// Memories per block: one warp each.
const SCORED: usize = THREADS / 32;

/// The feature column on the device.
pub(in crate::gpu) struct Features<B> {
    dimension: usize,
    /// f16 bits, by slot.
    bits: B,
    /// Inverse norm, by slot.
    inverse_norms: B,
    /// Change counter of each tile when it was mirrored.
    mirrored: Vec<Option<u64>>,
}

impl<B: Send> Features<B> {
    pub(in crate::gpu) fn grown<D: Driver<Buffer = B>>(
        &self,
        memory: &mut Memory<D>,
        tiles: usize,
        wanted: usize,
    ) -> Result<Self, Error> {
        let mut grown = Self::new(memory, self.dimension, wanted)?;
        grown.mirrored[..self.mirrored.len()].copy_from_slice(&self.mirrored);
        memory.0.copy(&self.bits, &grown.bits, tiles * TILE * self.dimension * size_of::<u16>())?;
        memory.0.copy(&self.inverse_norms, &grown.inverse_norms, tiles * TILE * size_of::<f32>())?;
        Ok(grown)
    }

    fn new<D: Driver<Buffer = B>>(memory: &mut Memory<D>, dimension: usize, tiles: usize) -> Result<Self, Error> {
        let slots = tiles * TILE;
        // Zero vectors, which score 0.
        Ok(Self {
            dimension,
            bits: memory.zeroed::<u16>(slots * dimension)?,
            inverse_norms: memory.zeroed::<f32>(slots)?,
            mirrored: vec![None; tiles],
        })
    }

    /// Marks the vectors of a tile as unknown.
    pub(in crate::gpu) fn forget(&mut self, tile: TileId) {
        self.mirrored[tile as usize] = None;
    }

    /// Computes the score keys of `count` slots.
    fn keys<D: Driver<Buffer = B>>(
        &self,
        view: &mut View<'_, D>,
        query: &Query,
        slots: &B,
        count: usize,
    ) -> Result<B, Error> {
        let keys = view.memory.undefined::<u32>(count)?;
        let features = view.memory.uploaded(&query.features)?;
        let [potentials, segments, tiles] = view.columns.weights(&view.segments);
        let arguments = [
            Argument::Buffer(&self.bits),
            Argument::Buffer(&self.inverse_norms),
            Argument::U32(self.dimension as u32),
            Argument::Buffer(&features),
            Argument::F32(query.inverse_norm),
            Argument::Buffer(slots),
            Argument::U32(count as u32),
            potentials,
            segments,
            tiles,
            Argument::Buffer(&keys),
        ];
        view.memory.launch("recall_keys", count, SCORED, &arguments)?;
        Ok(keys)
    }
}

impl<D: Driver> Gpu<D> {
    /// Updates changed tiles from the host's column.
    pub(in crate::gpu) fn mirror_features(&mut self, column: FeatureColumn<'_>) -> Result<(), Error> {
        if self.features.as_ref().is_none_or(|own| own.dimension != column.dimension) {
            self.features = Some(Features::new(&mut self.memory, column.dimension, self.tiles.len())?);
        }
        let features = self.features.as_mut().expect("the features were created above");
        for (tile, entry) in self.tiles.iter().enumerate().filter(|(_, entry)| entry.count > 0) {
            let origin = self.origins[tile] as usize;
            let changes = column.changes[origin];
            if features.mirrored[tile] == Some(changes) {
                continue;
            }
            let (first, count) = (tile * TILE, entry.count as usize);
            let width = column.dimension * size_of::<u16>();
            self.memory.0.upload(&features.bits, first * width, &column.bits[origin][..count * width])?;
            let norms = &column.inverse_norms.tile(origin)[..count];
            self.memory.0.upload(&features.inverse_norms, first * size_of::<f32>(), bytes(norms))?;
            features.mirrored[tile] = Some(changes);
        }
        Ok(())
    }

    /// Returns the slots of the best matches by score descending, then id ascending, with their scores; `out` is replaced. The features are
    /// mirrored, and the query has their dimension.
    pub(in crate::gpu) fn best_matches(
        &mut self,
        request: &RecallRequest<'_>,
        out: &mut Vec<(Slot, f32)>,
    ) -> Result<(), Error> {
        let RecallRequest { segments, ids, query, scope, limit, .. } = *request;
        out.clear();
        if limit == 0 {
            return Ok(());
        }
        self.mirror(ids)?;
        let features = self.features.take().expect("the caller mirrored the features");
        assert_eq!(query.features.len(), features.dimension, "query and features have the same dimension");
        let found = self.with_list(segments, |view, list, used| {
            let mut keyed = view.weight_keys(list, used, scope)?;
            if keyed.count == 0 {
                return Ok(Vec::new());
            }
            keyed.keys = features.keys(view, query, &keyed.slots, keyed.count)?;
            let first = view.select(&keyed, limit, false)?;
            let slots = view.by_id(first.slots, first.count)?;
            let keys = features.keys(view, query, &slots, first.count)?;
            let sorted = view.memory.sort(keys, Some(slots), first.count)?;
            view.entries(&sorted, first.count)
        });
        self.features = Some(features);
        out.extend(found?.unwrap_or_default().into_iter().take(limit).map(|(slot, key)| (slot, score_of(key))));
        Ok(())
    }
}
