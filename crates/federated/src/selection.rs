//! Choice of the clients of a round, from a seed.

use std::collections::BTreeSet;

use chacha20::rand_core::Rng;

use crate::model::ClientId;
use crate::random::{Seed, stream, unit};

/// Chooses each client independently with probability `rate`. `seed` must be secret: amplification by sampling rests on it.
#[must_use]
pub fn poisson(enrolled: &BTreeSet<ClientId>, rate: f64, seed: &Seed, round: u64) -> BTreeSet<ClientId> {
    let mut rng = stream(seed, "participation", round);
    enrolled.iter().copied().filter(|_| unit(&mut rng) < rate).collect()
}

/// Chooses `count` candidates, each set with the same probability; all of them when there are fewer.
#[must_use]
pub fn uniform(candidates: &BTreeSet<ClientId>, count: usize, seed: &Seed, round: u64) -> BTreeSet<ClientId> {
    let mut rng = stream(seed, "selection", round);
    let mut ranked: Vec<(u64, ClientId)> = candidates.iter().map(|client| (rng.next_u64(), *client)).collect();
    ranked.sort_unstable();
    ranked.truncate(count);
    ranked.into_iter().map(|(_, client)| client).collect()
}

/// Number of clients that are assigned so that `target` report in spite of stragglers and drop-outs: `target` plus `percent`, rounded up.
#[must_use]
pub const fn over_selected(target: u32, percent: u32) -> usize {
    target as usize + (target as usize * percent as usize).div_ceil(100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn participation_has_the_rate_and_is_independent_between_rounds() {
        let enrolled: BTreeSet<ClientId> = (0..2_000).collect();
        let chosen: Vec<BTreeSet<ClientId>> = (0..20).map(|round| poisson(&enrolled, 0.1, &[1; 32], round)).collect();
        let total: usize = chosen.iter().map(BTreeSet::len).sum();
        assert!(total.abs_diff(4_000) < 300, "{total}");
        let both = chosen[0].intersection(&chosen[1]).count();
        assert!((5..45).contains(&both), "{both}");
        assert!(chosen.iter().any(|set| set.len() != chosen[0].len()), "the number of participants varies");
        assert_eq!(poisson(&enrolled, 1.0, &[1; 32], 0).len(), 2_000);
        assert_ne!(poisson(&enrolled, 0.1, &[2; 32], 0), chosen[0]);
    }

    #[test]
    fn every_candidate_is_chosen_equally_often() {
        let candidates: BTreeSet<ClientId> = (10..20).collect();
        let mut counts = [0_u32; 10];
        for round in 0..3_000 {
            let chosen = uniform(&candidates, 3, &[1; 32], round);
            assert_eq!(chosen.len(), 3);
            chosen.iter().for_each(|client| counts[*client as usize - 10] += 1);
        }
        assert!(counts.iter().all(|count| count.abs_diff(900) < 150), "{counts:?}");
        assert_eq!(uniform(&candidates, 50, &[1; 32], 0), candidates);
        assert_eq!(over_selected(10, 25), 13);
    }
}
