//! Folds and updates: by slot in buckets or sorted, and of whole groups.

use super::clamped_add::ClampedAdd;
use crate::gpu::driver::{Argument, Driver};
use crate::gpu::{Columns, Gpu, THREADS, View, firsts};
use crate::{Error, GroupUpdate, Segment, TILE, Update};
use engram_memory::quality::GroupQuality;
use engram_memory::{Group, ONE, QualityVector};
use std::collections::HashMap;

/// Updates per block of the sorted path.
const SORTED_UPDATES: usize = THREADS * 4;
/// Bytes of a run of the sorted path (`Run` of update.cu).
const RUN_BYTES: usize = 24;

/// Updates as columns on the device.
struct StagedUpdates<B> {
    slots: B,
    deltas: B,
    count: usize,
}

impl<D: Driver> View<'_, D> {
    fn stage(&mut self, updates: &[Update]) -> Result<StagedUpdates<D::Buffer>, Error> {
        let slots: Vec<u32> = updates.iter().map(|update| update.slot).collect();
        let deltas: Vec<i32> = updates.iter().map(|update| update.delta).collect();
        Ok(StagedUpdates {
            slots: self.memory.uploaded(&slots)?,
            deltas: self.memory.uploaded(&deltas)?,
            count: updates.len(),
        })
    }

    fn fold(&mut self) -> Result<(), Error> {
        self.memory.launch("fold", self.slots, TILE, &self.columns.weights(&self.segments))
    }

    /// Folds if requested, then applies updates: sorted by slot, with a scan over each run of one slot. Allocates all memory first.
    pub(in crate::gpu) fn apply(
        &mut self,
        slots: D::Buffer,
        deltas: &D::Buffer,
        count: usize,
        fold: bool,
    ) -> Result<(), Error> {
        if count == 0 {
            return if fold { self.fold() } else { Ok(()) };
        }
        let sorted = self.memory.sort(slots, None, count)?;
        let blocks = count.div_ceil(SORTED_UPDATES);
        let (status, ticket) = (self.memory.zeroed::<u32>(blocks)?, self.memory.zeroed::<u32>(1)?);
        let aggregates = self.memory.undefined::<u8>(blocks * RUN_BYTES)?;
        let prefixes = self.memory.undefined::<u8>(blocks * RUN_BYTES)?;
        if fold {
            self.fold()?;
        }
        let [potentials, segments, tiles] = self.columns.weights(&self.segments);
        let arguments = [
            Argument::Buffer(&sorted.keys),
            Argument::Buffer(&sorted.values),
            Argument::Buffer(deltas),
            Argument::U32(count as u32),
            potentials,
            segments,
            tiles,
            Argument::Buffer(&status),
            Argument::Buffer(&aggregates),
            Argument::Buffer(&prefixes),
            Argument::Buffer(&ticket),
        ];
        self.memory.launch("apply_updates", count, SORTED_UPDATES, &arguments)
    }

    fn fold_quality(&mut self, groups: usize, totals: &D::Buffer) -> Result<(), Error> {
        let arguments = quality_arguments(self.columns, &self.segments, groups, Argument::Buffer(totals));
        self.memory.launch("fold_quality", self.slots, TILE, &arguments)
    }
}

impl<D: Driver> Gpu<D> {
    pub(in crate::gpu) fn fold_and_apply(&mut self, segments: &[Segment], updates: &[Update]) -> Result<(), Error> {
        self.check_slots(updates.iter().map(|update| update.slot));
        let Some(mut view) = self.view(segments)? else { return Ok(()) };
        let staged = view.stage(updates)?;
        view.apply(staged.slots, &staged.deltas, staged.count, any_folds(segments))
    }

    /// Computes one total for each segment and group, `groups` groups per segment.
    pub(in crate::gpu) fn qualities(
        &mut self,
        segments: &[Segment],
        updates: &[Update],
        out: &mut Vec<QualityVector>,
    ) -> Result<(), Error> {
        self.check_slots(updates.iter().map(|update| update.slot));
        let groups = usize::from(self.highest_group) + 1;
        out.clear();
        out.resize(segments.len(), QualityVector::default());
        if !self.has_memories(segments.len())? {
            return Ok(());
        }
        if let Some(totals) = self.epoch_by_tile(segments, updates, groups)? {
            assign(totals, groups, out);
            return Ok(());
        }
        let Some(mut view) = self.view(segments)? else { return Ok(()) };
        let totals = view.memory.zeroed::<[u32; 6]>(segments.len() * groups)?;
        let staged = view.stage(updates)?;
        let folded: Vec<_> = segments.iter().map(|it| [it.clock.units(), 0, u32::from(it.hidden)]).collect();
        let folded = view.memory.uploaded(&folded)?;
        view.apply(staged.slots, &staged.deltas, staged.count, any_folds(segments))?;
        view.segments = folded;
        view.fold_quality(groups, &totals)?;
        assign(&view.memory.downloaded::<[u32; 6]>(&totals, segments.len() * groups)?, groups, out);
        Ok(())
    }

    pub(in crate::gpu) fn apply_to_groups(
        &mut self,
        segments: &[Segment],
        updates: &[GroupUpdate],
        changed: &mut Vec<u64>,
    ) -> Result<(), Error> {
        // Consecutive updates of one group of a segment are one map; maps of a segment are adjacent.
        let mut of_segment = vec![Vec::<(Group, ClampedAdd)>::new(); segments.len()];
        let mut place: HashMap<_, usize> = HashMap::new();
        for update in updates {
            let rules = &mut of_segment[update.segment as usize];
            let next = ClampedAdd::update(update.delta);
            let rule = *place.entry((update.segment, update.group.0)).or_insert(rules.len());
            match rules.get_mut(rule) {
                Some((_, map)) => *map = map.then(next),
                None => rules.push((update.group, next)),
            }
        }
        let first = firsts(of_segment.iter().map(|rules| rules.len() as u32));
        let rules: Vec<[u32; 6]> = of_segment
            .iter()
            .flatten()
            .map(|(group, map)| [map.add as u32, (map.add >> 32) as u32, map.low, map.high, u32::from(group.0), 0])
            .collect();
        let counts = match self.view(segments)? {
            None => vec![0; rules.len()],
            Some(view) => {
                let counts = view.memory.zeroed::<u32>(rules.len())?;
                let (first, rules_there) = (view.memory.uploaded(&first)?, view.memory.uploaded(&rules)?);
                let own = [&first, &rules_there, &counts].map(Argument::Buffer);
                let arguments = [&view.columns.weights_and_groups(&view.segments)[..], &own].concat();
                view.memory.launch("update_groups", view.slots, TILE, &arguments)?;
                view.memory.downloaded::<u32>(&counts, rules.len())?
            }
        };
        changed.extend(updates.iter().map(|update| {
            let rule = first[update.segment as usize] as usize + place[&(update.segment, update.group.0)];
            u64::from(counts[rule])
        }));
        Ok(())
    }
}

/// Returns the arguments of both passes that sum by segment and group.
pub(in crate::gpu) fn quality_arguments<'a, B>(
    columns: &'a Columns<B>,
    segments: &'a B,
    groups: usize,
    totals: Argument<'a, B>,
) -> [Argument<'a, B>; 6] {
    let [potentials, of_memories, segments, tiles] = columns.weights_and_groups(segments);
    [potentials, of_memories, segments, tiles, Argument::U32(groups as u32), totals]
}

/// Returns whether a fold precedes the updates.
pub(in crate::gpu) fn any_folds(segments: &[Segment]) -> bool {
    segments.iter().any(|segment| segment.fold > 0)
}

/// Assigns each segment the totals of its groups.
fn assign(totals: &[[u32; 6]], groups: usize, out: &mut [QualityVector]) {
    for (vector, totals) in out.iter_mut().zip(totals.chunks(groups)) {
        vector.assign(totals.iter().enumerate().map(|(group, total)| (Group(group as u8), quality(*total))));
    }
}

/// Decodes (sum low, sum high, count, largest weight, largest distance from ONE).
fn quality([low, high, count, max, missing, _]: [u32; 6]) -> GroupQuality {
    let min = if count == 0 { u32::MAX } else { ONE - missing };
    GroupQuality { count: u64::from(count), sum: u128::from(u64::from(high) << 32 | u64::from(low)), min, max }
}
