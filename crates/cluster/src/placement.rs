//! Initial placement of replicas: rendezvous hashing with bounded load.
//!
//! Every partition ranks the workers by a hash of (partition, worker) and takes the best that have capacity. The order
//! depends only on the ordinals, so that a worker that joins or leaves moves little more than its own share.

use engram_memory::{Ordinal, mix64};

/// A worker that may hold replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Ordinal of the worker.
    pub ordinal: Ordinal,
    /// Failure domain (node, zone): replicas go to different domains where there are enough.
    pub domain: String,
}

/// Too few workers for the replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{replicas} replicas need as many workers; there are {workers}")]
pub struct PlacementError {
    /// Requested replicas.
    pub replicas: usize,
    /// Available workers.
    pub workers: usize,
}

/// Chooses the workers of every partition, the primary first. No worker gets more than its share of primaries or
/// replicas, rounded up.
///
/// # Errors
/// Fewer workers than replicas.
pub fn place_replicas(
    partitions: u32,
    candidates: &[Candidate],
    replicas: usize,
) -> Result<Vec<Vec<Ordinal>>, PlacementError> {
    let workers = candidates.len();
    if workers < replicas || replicas == 0 {
        return Err(PlacementError { replicas, workers });
    }
    let domains = candidates.iter().map(|candidate| &candidate.domain).collect::<std::collections::BTreeSet<_>>().len();
    let mut placed = vec![Vec::with_capacity(replicas); partitions as usize];
    let mut load = vec![0_usize; workers];
    for round in 0..replicas {
        // The bound of each round covers all replicas placed so far, so primaries are balanced on their own.
        let bound = (partitions as usize * (round + 1)).div_ceil(workers);
        for (partition, chosen) in placed.iter_mut().enumerate() {
            let best = preference(partition as u32, candidates)
                .filter(|&worker| !chosen.contains(&worker))
                .min_by_key(|&worker| {
                    let shares_domain =
                        chosen.iter().any(|&other: &usize| candidates[other].domain == candidates[worker].domain);
                    (domains > round && shares_domain, load[worker] >= bound)
                })
                .expect("there are at least as many workers as replicas");
            load[best] += 1;
            chosen.push(best);
        }
        rebalance(&mut placed, &mut load, candidates, domains > round);
    }
    let ordinal = |worker: usize| candidates[worker].ordinal;
    Ok(placed.into_iter().map(|chosen| chosen.into_iter().map(ordinal).collect()).collect())
}

/// Assigns each partition of an initial snapshot to the worker that loads it. Every process computes the same
/// assignment, before any worker has connected.
pub fn assign_loaders(partitions: u32, workers: u32) -> Vec<Ordinal> {
    let candidate = |worker: u32| Candidate { ordinal: Ordinal(worker), domain: format!("worker-{worker}") };
    let candidates: Vec<Candidate> = (0..workers).map(candidate).collect();
    place_replicas(partitions, &candidates, 1).unwrap_or_default().into_iter().map(|placed| placed[0]).collect()
}

/// Moves last replicas from the fullest worker to the emptiest: the bound leaves the remainder to the last partitions
/// of a round, which may have found capacity only on workers that already hold them.
fn rebalance(placed: &mut [Vec<usize>], load: &mut [usize], candidates: &[Candidate], apart: bool) {
    loop {
        let workers = || 0..load.len();
        let (Some(full), Some(empty)) =
            (workers().max_by_key(|&worker| load[worker]), workers().min_by_key(|&worker| load[worker]))
        else {
            return;
        };
        let movable = |chosen: &&mut Vec<usize>| {
            let (last, others) = chosen.split_last().expect("a replica was just placed");
            let shares = |other: &usize| candidates[*other].domain == candidates[empty].domain;
            *last == full && !others.contains(&empty) && !(apart && others.iter().any(shares))
        };
        let Some(chosen) = placed.iter_mut().find(movable).filter(|_| load[full] > load[empty] + 1) else { return };
        *chosen.last_mut().expect("a replica was just placed") = empty;
        load[full] -= 1;
        load[empty] += 1;
    }
}

/// Preference of `partition` for a worker: higher is better.
pub(crate) const fn rendezvous_weight(partition: u32, ordinal: Ordinal) -> u64 {
    mix64(mix64(partition as u64 + 1) ^ mix64(ordinal.0 as u64 + (1 << 32)))
}

/// The workers in order of preference of `partition`.
fn preference(partition: u32, candidates: &[Candidate]) -> impl Iterator<Item = usize> {
    let mut order: Vec<_> = (0..candidates.len())
        .map(|worker| (std::cmp::Reverse(rendezvous_weight(partition, candidates[worker].ordinal)), worker))
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
    fn replicas_are_apart_and_shares_are_even_for_every_size_up_to_50() {
        for count in 1..=50 {
            for replicas in 1..=3.min(count as usize) {
                let placed = place_replicas(256, &workers(count), replicas).unwrap();
                let mut primaries = BTreeMap::new();
                let mut all = BTreeMap::new();
                for chosen in &placed {
                    assert_eq!(chosen.len(), replicas);
                    let distinct: std::collections::BTreeSet<_> = chosen.iter().collect();
                    assert_eq!(distinct.len(), replicas, "two replicas on one worker of {count}");
                    *primaries.entry(chosen[0]).or_insert(0) += 1;
                    chosen.iter().for_each(|worker| *all.entry(*worker).or_insert(0) += 1);
                }
                let share = 256_usize.div_ceil(count as usize);
                assert!(primaries.values().all(|&held| held <= share), "{count} workers: {primaries:?}");
                let bound = (256 * replicas).div_ceil(count as usize) + 1;
                assert!(all.values().all(|&held| held <= bound), "{count} workers, {replicas} replicas: {all:?}");
            }
        }
    }

    #[test]
    fn joining_worker_moves_little_more_than_its_share() {
        for count in 2..50 {
            let before = place_replicas(256, &workers(count), 1).unwrap();
            let after = place_replicas(256, &workers(count + 1), 1).unwrap();
            let moved = before.iter().zip(&after).filter(|(old, new)| old != new).count();
            // Bounded load makes some partitions give way to others, so a placement from scratch moves more than the
            // one share of plain rendezvous hashing; hashing over the number of workers would move all but one share.
            let share = 256.0 / f64::from(count + 1);
            assert!(moved as f64 <= 1.3 * share + 64.0, "{count} -> {}: {moved} of 256 moved", count + 1);
        }
    }

    #[test]
    fn replicas_go_to_different_domains_where_there_are_enough() {
        let zones = |worker: u32| Candidate { ordinal: Ordinal(worker), domain: format!("zone-{}", worker % 2) };
        for chosen in place_replicas(256, &(0..6).map(zones).collect::<Vec<_>>(), 2).unwrap() {
            assert_ne!(chosen[0].0 % 2, chosen[1].0 % 2);
        }
        assert_eq!(place_replicas(8, &workers(1), 2), Err(PlacementError { replicas: 2, workers: 1 }));
    }
}
