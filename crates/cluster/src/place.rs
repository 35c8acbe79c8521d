//! Where the copies of a partition go: rendezvous hashing with bounded load.
//!
//! Every partition ranks the workers by a hash of (partition, worker) and takes the best that still have room. The order
//! depends on the names alone, so that a worker which joins or leaves moves little more than its own share.

use engram_memory::{Ordinal, mix64};

/// A worker that may hold copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Its place.
    pub ordinal: Ordinal,
    /// What fails together with it (node, zone): two copies go to different domains where there are enough.
    pub domain: String,
}

/// Why copies cannot be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{copies} copies need as many workers; there are {workers}")]
pub struct PlaceError {
    /// Copies asked for.
    pub copies: usize,
    /// Workers there are.
    pub workers: usize,
}

/// Chooses the workers of every partition, the primary first. No worker gets more than its share of primaries or of copies,
/// rounded up.
///
/// # Errors
/// Fewer workers than copies.
pub fn place(partitions: u32, candidates: &[Candidate], copies: usize) -> Result<Vec<Vec<Ordinal>>, PlaceError> {
    let workers = candidates.len();
    if workers < copies || copies == 0 {
        return Err(PlaceError { copies, workers });
    }
    let domains = candidates.iter().map(|candidate| &candidate.domain).collect::<std::collections::BTreeSet<_>>().len();
    let mut placed = vec![Vec::with_capacity(copies); partitions as usize];
    let mut load = vec![0_usize; workers];
    for copy in 0..copies {
        // The bound of each round is that of all copies placed so far, so primaries are balanced on their own.
        let bound = (partitions as usize * (copy + 1)).div_ceil(workers);
        for (partition, chosen) in placed.iter_mut().enumerate() {
            let best = preference(partition as u32, candidates)
                .filter(|&worker| !chosen.contains(&worker))
                .min_by_key(|&worker| {
                    let shares_domain =
                        chosen.iter().any(|&other: &usize| candidates[other].domain == candidates[worker].domain);
                    (domains > copy && shares_domain, load[worker] >= bound)
                })
                .expect("there are at least as many workers as copies");
            load[best] += 1;
            chosen.push(best);
        }
        even_out(&mut placed, &mut load, candidates, domains > copy);
    }
    let ordinal = |worker: usize| candidates[worker].ordinal;
    Ok(placed.into_iter().map(|chosen| chosen.into_iter().map(ordinal).collect()).collect())
}

/// Who loads each partition of a snapshot that a cluster of `workers` begins with: the same whoever computes it, before any of them is
/// known.
pub fn loaders(partitions: u32, workers: u32) -> Vec<Ordinal> {
    let candidate = |worker: u32| Candidate { ordinal: Ordinal(worker), domain: format!("worker-{worker}") };
    let candidates: Vec<Candidate> = (0..workers).map(candidate).collect();
    place(partitions, &candidates, 1).unwrap_or_default().into_iter().map(|placed| placed[0]).collect()
}

/// Moves last copies from the fullest worker to the emptiest: a bound leaves the rest to whoever comes last, and the last
/// partitions of a round may have found nobody with room but those that hold them already.
fn even_out(placed: &mut [Vec<usize>], load: &mut [usize], candidates: &[Candidate], apart: bool) {
    loop {
        let workers = || 0..load.len();
        let (Some(full), Some(empty)) =
            (workers().max_by_key(|&worker| load[worker]), workers().min_by_key(|&worker| load[worker]))
        else {
            return;
        };
        let movable = |chosen: &&mut Vec<usize>| {
            let (last, others) = chosen.split_last().expect("a copy was just placed");
            let shares = |other: &usize| candidates[*other].domain == candidates[empty].domain;
            *last == full && !others.contains(&empty) && !(apart && others.iter().any(shares))
        };
        let Some(chosen) = placed.iter_mut().find(movable).filter(|_| load[full] > load[empty] + 1) else { return };
        *chosen.last_mut().expect("a copy was just placed") = empty;
        load[full] -= 1;
        load[empty] += 1;
    }
}

/// How much `partition` prefers a worker: the more the higher.
pub(crate) const fn weight(partition: u32, ordinal: Ordinal) -> u64 {
    mix64(mix64(partition as u64 + 1) ^ mix64(ordinal.0 as u64 + (1 << 32)))
}

/// The workers as `partition` prefers them.
fn preference(partition: u32, candidates: &[Candidate]) -> impl Iterator<Item = usize> {
    let mut order: Vec<_> = (0..candidates.len())
        .map(|worker| (std::cmp::Reverse(weight(partition, candidates[worker].ordinal)), worker))
        .collect();
    order.sort_unstable();
    order.into_iter().map(|(_, worker)| worker)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn workers(count: u32) -> Vec<Candidate> {
        (0..count).map(|worker| Candidate { ordinal: Ordinal(worker), domain: format!("node-{worker}") }).collect()
    }

    #[test]
    fn copies_are_apart_and_shares_are_even_for_every_size_up_to_50() {
        for count in 1..=50 {
            for copies in 1..=3.min(count as usize) {
                let placed = place(256, &workers(count), copies).unwrap();
                let mut primaries = BTreeMap::new();
                let mut all = BTreeMap::new();
                for chosen in &placed {
                    assert_eq!(chosen.len(), copies);
                    let distinct: std::collections::BTreeSet<_> = chosen.iter().collect();
                    assert_eq!(distinct.len(), copies, "two copies on one worker of {count}");
                    *primaries.entry(chosen[0]).or_insert(0) += 1;
                    chosen.iter().for_each(|worker| *all.entry(*worker).or_insert(0) += 1);
                }
                let share = 256_usize.div_ceil(count as usize);
                assert!(primaries.values().all(|&held| held <= share), "{count} workers: {primaries:?}");
                let bound = (256 * copies).div_ceil(count as usize) + 1;
                assert!(all.values().all(|&held| held <= bound), "{count} workers, {copies} copies: {all:?}");
            }
        }
    }

    #[test]
    fn a_worker_that_joins_moves_little_more_than_its_share() {
        for count in 2..50 {
            let before = place(256, &workers(count), 1).unwrap();
            let after = place(256, &workers(count + 1), 1).unwrap();
            let moved = before.iter().zip(&after).filter(|(old, new)| old != new).count();
            // Bounded load makes some partitions give way to others, so a placement from scratch moves more than the
            // one share of plain rendezvous hashing; hashing over the number of workers would move all but one share.
            let share = 256.0 / f64::from(count + 1);
            assert!(moved as f64 <= 1.3 * share + 64.0, "{count} -> {}: {moved} of 256 moved", count + 1);
        }
    }

    #[test]
    fn copies_go_to_different_domains_where_there_are_enough() {
        let zones = |worker: u32| Candidate { ordinal: Ordinal(worker), domain: format!("zone-{}", worker % 2) };
        for chosen in place(256, &(0..6).map(zones).collect::<Vec<_>>(), 2).unwrap() {
            assert_ne!(chosen[0].0 % 2, chosen[1].0 % 2);
        }
        assert_eq!(place(8, &workers(1), 2), Err(PlaceError { copies: 2, workers: 1 }));
    }
}
