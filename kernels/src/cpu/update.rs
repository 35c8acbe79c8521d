//! Changes of potentials: folds, updates by slot, updates of a group.

use crate::instructions::{Level, Set, dispatch};
use crate::tiles::{TilesMut, prefetch};
use crate::{Segment, TILE, Tile, Update};
use engram_memory::ONE;
use std::ops::Range;

/// Prefetch distance in updates.
const AHEAD: usize = 24;

/// Branch-free version of [`engram_memory::DecayClock::updated`].
#[inline(always)]
fn updated(potential: u32, clock: u32, delta: i32) -> u32 {
    let moved = i64::from(potential.max(clock)) + i64::from(delta);
    moved.clamp(i64::from(clock), i64::from(clock) + i64::from(ONE)) as u32
}

dispatch! {
    /// Subtracts a fold from a tile.
    pub(super) fn fold_tile(potentials: &mut [u32], subtract: u32) {
        potentials.iter_mut().for_each(|potential| *potential = potential.saturating_sub(subtract));
    }
}

dispatch! {
    /// Applies one delta to every memory of a group in a tile and returns their number.
    pub(super) fn update_group(potentials: &mut [u32], groups: &[u8], group: u8, clock: u32, delta: i32) -> u32 {
        // A weight moves by at most ONE; within that, a potential plus the delta fits in 32 bits.
        let (up, down) = (delta.clamp(0, ONE as i32) as u32, delta.min(0).unsigned_abs().min(ONE));
        let mut count = 0;
        for (potential, &other) in potentials.iter_mut().zip(groups) {
            let raised = (*potential).max(clock) + up;
            let moved = raised.saturating_sub(down).clamp(clock, clock + ONE);
            *potential = if other == group { moved } else { *potential };
            count += u32::from(other == group);
        }
        count
    }
}

/// Applies `updates` in order; their slots lie in `potentials`, the tiles from `first` on.
///
/// A pending fold is not applied: updated slots are written so that the later fold yields the value after the update.
pub(super) fn apply(
    tiles: &[Tile],
    segments: &[Segment],
    first: usize,
    potentials: &mut TilesMut<'_, u32>,
    updates: &[Update],
) {
    let one = |update: &Update, potentials: &mut TilesMut<'_, u32>| {
        let tile = update.slot as usize / TILE;
        let Segment { clock, fold, .. } = segments[tiles[tile].segment as usize];
        let potential = &mut potentials.tile_mut(tile - first)[update.slot as usize % TILE];
        *potential = updated(potential.saturating_sub(fold), clock.units(), update.delta) + fold;
    };
    let (with_later, last) = updates.split_at(updates.len().saturating_sub(AHEAD));
    for (update, later) in with_later.iter().zip(&updates[updates.len() - with_later.len()..]) {
        // The processor by itself overlaps only a few loads.
        prefetch(&potentials.tile_mut(later.slot as usize / TILE - first)[later.slot as usize % TILE]);
        one(update, potentials);
    }
    last.iter().for_each(|update| one(update, potentials));
}

/// Returns the updates of `slots`, in order. `out` grows as needed.
#[cfg_attr(target_arch = "x86_64", allow(unsafe_code))]
pub(super) fn select<'a>(
    level: Level,
    updates: &[Update],
    slots: Range<u64>,
    out: &'a mut Vec<Update>,
) -> &'a [Update] {
    if out.len() < updates.len() {
        out.resize(updates.len(), Update { slot: 0, delta: 0 });
    }
    let out = &mut out[..updates.len()];
    let count = match level.set() {
        // SAFETY: the level says that the processor has these instructions.
        #[cfg(target_arch = "x86_64")]
        Set::Avx512 => unsafe { super::avx512::select(updates, slots, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Set::Avx2 => unsafe { super::avx2::select(updates, slots, out) },
        Set::Portable => select_plain(updates, slots, out),
    };
    &out[..count]
}

/// Moves the updates of `slots` to the front of `out`, which has space for all, and returns their number.
#[inline(always)]
pub(super) fn select_plain(updates: &[Update], slots: Range<u64>, out: &mut [Update]) -> usize {
    let mut count = 0;
    for update in updates {
        // Written always and kept if selected: avoids an unpredictable branch.
        out[count] = *update;
        count += usize::from(slots.contains(&u64::from(update.slot)));
    }
    count
}

/// Returns whether [`apply`] may run before the fold: its results must fit in 32 bits, which always holds if the clock is 0 after a fold.
pub(super) fn fold_may_follow(segments: &[Segment]) -> bool {
    segments.iter().all(|segment| segment.fold == 0 || segment.fold <= u32::MAX - ONE - segment.clock.units())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instructions::Instructions;
    use engram_memory::DecayClock;
    use engram_memory::clock::FOLD_AT;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_falls_in_some_slots_is_selected_in_its_order(
            updates in prop::collection::vec((prop_oneof![0..300_u32, Just(u32::MAX)], any::<i32>()), 0..200),
            start in prop_oneof![0..300_u64, Just(u64::from(u32::MAX))],
            count in prop_oneof![0..300_u64, Just(1 << 32)],
        ) {
            let updates: Vec<_> = updates.into_iter().map(|(slot, delta)| Update { slot, delta }).collect();
            let slots = start..start + count;
            let expected: Vec<_> =
                updates.iter().copied().filter(|update| slots.contains(&u64::from(update.slot))).collect();
            for most in [Instructions::Widest, Instructions::Avx2, Instructions::Portable] {
                let mut out = Vec::new();
                prop_assert_eq!(select(Level::of(most), &updates, slots.clone(), &mut out), &expected[..]);
            }
        }

        #[test]
        fn an_update_is_that_of_the_law(clock in 0..FOLD_AT, above in 0..=ONE, forgotten: bool, delta: i32) {
            let law = DecayClock::from_units(clock).unwrap();
            let potential = if forgotten { clock.saturating_sub(above) } else { clock + above };
            prop_assert_eq!(updated(potential, clock, delta), law.updated(potential, delta));
            for most in [Instructions::Widest, Instructions::Avx2, Instructions::Portable] {
                let mut one = [potential];
                prop_assert_eq!(update_group(Level::of(most), &mut one, &[3], 3, clock, delta), 1);
                prop_assert_eq!(one[0], law.updated(potential, delta));
                prop_assert_eq!(update_group(Level::of(most), &mut one, &[3], 4, clock, i32::MIN), 0);
                prop_assert_eq!(one[0], law.updated(potential, delta));
            }
        }
    }
}
