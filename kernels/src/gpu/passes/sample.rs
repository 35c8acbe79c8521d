//! Prioritized sampling: prefix sums once, then any number of draws from them.

use crate::gpu::driver::{Argument, Driver};
use crate::gpu::{Gpu, THREADS, firsts};
use crate::priority::{Draws, Priorities};
use crate::{Error, Segment, SegmentId, Slot, TILE, TileId};

/// Prefix sums of the priorities of some segments, at the time of their computation.
pub struct PrioritySums<B> {
    sums: B,
    slots: B,
    shares: Vec<Share>,
}

/// The priorities of one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Segment of the share.
    pub segment: SegmentId,
    /// Sum of its priorities.
    pub total: u64,
    /// Sum of the preceding priorities in the prefix sums.
    before: u64,
    begin: u32,
    end: u32,
}

impl<B> PrioritySums<B> {
    /// Returns the segments in the order of their tiles.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }
}

impl<D: Driver> Gpu<D> {
    /// Sums the priorities of the memories of `order`: tiles, grouped by segment and in the segment's own order. Draws are therefore independent of
    /// the position of tiles in the arena.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`].
    pub fn priority_sums(
        &mut self,
        segments: &[Segment],
        order: &[TileId],
        priorities: &Priorities,
    ) -> Result<PrioritySums<D::Buffer>, Error> {
        let order: Vec<TileId> = order.iter().copied().filter(|&tile| self.tiles[tile as usize].count > 0).collect();
        let first = firsts(order.iter().map(|&tile| self.tiles[tile as usize].count));
        let count = *first.last().expect("prefix sums have one more entry than tiles") as usize;
        if self.view(segments)?.is_none() || order.is_empty() {
            let none = self.memory.undefined::<u64>(0)?;
            return Ok(PrioritySums { sums: none, slots: self.memory.undefined::<u32>(0)?, shares: Vec::new() });
        }
        let slots = self.list_tiles(&order)?;
        let owners: Vec<SegmentId> = order.iter().map(|&tile| self.tiles[tile as usize].segment).collect();
        let Some(view) = self.view(segments)? else { unreachable!("there are memories, checked above") };
        let sums = view.memory.undefined::<u64>(count)?;
        let (status, ticket) = (view.memory.zeroed::<u64>(order.len())?, view.memory.zeroed::<u32>(1)?);
        let table = view.memory.uploaded(priorities.table())?;
        let (order_there, first_there) = (view.memory.uploaded(&order)?, view.memory.uploaded(&first)?);
        let [potentials, segments, tiles] = view.columns.weights(&view.segments);
        let arguments = [
            Argument::Buffer(&order_there),
            Argument::Buffer(&first_there),
            potentials,
            segments,
            tiles,
            Argument::Buffer(&table),
            Argument::Buffer(&sums),
            Argument::Buffer(&status),
            Argument::Buffer(&ticket),
        ];
        view.memory.launch("priority_sums", order.len() * TILE, TILE, &arguments)?;
        // The look-back words hold the sums up to the end of every tile.
        let ends = view.memory.downloaded::<u64>(&status, order.len())?;
        let mut shares: Vec<Share> = Vec::new();
        for (turn, &segment) in owners.iter().enumerate() {
            let before = if turn == 0 { 0 } else { ends[turn - 1] >> 2 };
            if turn == 0 || owners[turn - 1] != segment {
                shares.push(Share { segment, total: 0, before, begin: first[turn], end: 0 });
            }
            let share = shares.last_mut().expect("a share was pushed above");
            share.total = (ends[turn] >> 2) - share.before;
            share.end = first[turn + 1];
        }
        Ok(PrioritySums { sums, slots, shares })
    }

    /// Draws memories: for each the slot and its priority, `None` if the threshold falls outside of these segments. `offsets` holds, for every share
    /// of `sums`, its offset among the priorities of all partitions of the cluster; ranges do not overlap.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn sample(
        &mut self,
        sums: &PrioritySums<D::Buffer>,
        offsets: &[u64],
        draws: &Draws,
    ) -> Result<Vec<Option<(Slot, u32)>>, Error> {
        assert!(draws.count > 0 && draws.total > 0, "at least one draw and a positive total are required");
        assert_eq!(offsets.len(), sums.shares.len(), "an offset for each share");
        let mut shares: Vec<[u64; 4]> = sums
            .shares
            .iter()
            .zip(offsets)
            .filter(|(share, _)| share.total > 0)
            .map(|(share, &offset)| {
                [offset, share.total, share.before, u64::from(share.end) << 32 | u64::from(share.begin)]
            })
            .collect();
        shares.sort_unstable();
        let count = draws.count as usize;
        let there = self.memory.uploaded(&shares)?;
        let (slots, drawn) = (self.memory.undefined::<u32>(count)?, self.memory.undefined::<u32>(count)?);
        let arguments = [
            Argument::Buffer(&there),
            Argument::U32(shares.len() as u32),
            Argument::Buffer(&sums.slots),
            Argument::Buffer(&sums.sums),
            Argument::U64(draws.seed),
            Argument::U64(draws.step),
            Argument::U32(draws.count),
            Argument::U64(draws.total),
            Argument::Buffer(&slots),
            Argument::Buffer(&drawn),
        ];
        self.memory.launch("sample", count, THREADS, &arguments)?;
        let slots = self.memory.downloaded::<u32>(&slots, count)?;
        let drawn = self.memory.downloaded::<u32>(&drawn, count)?;
        Ok(slots.into_iter().zip(drawn).map(|(slot, own)| (slot != Slot::MAX).then_some((slot, own))).collect())
    }
}
