//! The first generation of a group: which state its processes start from.

use engram_collective::group::{MemberId, Position};
use std::collections::BTreeMap;

/// Returns the position from which a group starts: the newest step, and there the state that most processes have; of as many the one of the lowest
/// id.
pub(super) fn base(positions: &BTreeMap<MemberId, Position>) -> Option<Position> {
    let newest = positions.values().map(|position| position.step).max()?;
    let at_newest = || positions.values().filter(|position| position.step == newest);
    let votes = |position: &Position| at_newest().filter(|it| *it == position).count();
    at_newest().rev().max_by_key(|position| votes(position)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(positions: &[(u64, u64)]) -> Option<Position> {
        let positions = positions.iter().enumerate();
        base(&positions.map(|(id, &(step, digest))| (MemberId(id as u64), Position { step, digest })).collect())
    }

    #[test]
    fn newest_state_of_most_processes_is_chosen() {
        assert_eq!(chosen(&[]), None);
        assert_eq!(chosen(&[(0, 1), (0, 2), (0, 2)]), Some(Position { step: 0, digest: 2 }));
        assert_eq!(chosen(&[(0, 1), (0, 1), (40, 9)]), Some(Position { step: 40, digest: 9 }));
        assert_eq!(chosen(&[(3, 5), (3, 4)]), Some(Position { step: 3, digest: 5 }));
    }
}
