//! Who masks with whom: a complete graph for small cohorts, a random k-regular graph for large ones (Bell et al. 2020).

use std::collections::BTreeSet;

use crate::random::{Seed, below, stream};

/// Cohorts up to this size use the complete graph.
const COMPLETE: usize = 32;
/// Log of the probability that an aggregation fails because some neighbourhood falls below its threshold.
const LOG_FAILURE: f64 = -14.0;

/// Number of neighbours and the threshold of shares for a cohort.
///
/// Complete graph: `k = n - 1`, `t = ceil(2k/3)`; 1/3 of the clients may drop out. Larger cohorts: the least even k at which, if each client
/// drops out with probability `drop_out`, all neighbourhoods keep `t = k/2 + 1` clients except with probability 1e-6. A majority threshold
/// keeps a server that sends different lists to different clients from collecting both kinds of shares of one client.
#[must_use]
pub fn neighbours_and_threshold(clients: usize, drop_out: f64) -> (usize, usize) {
    let complete = clients.saturating_sub(1);
    let log2 = clients.next_power_of_two().trailing_zeros() as usize;
    let mut neighbours = 2 * log2 + 2;
    while clients > COMPLETE && neighbours < complete {
        let threshold = neighbours / 2 + 1;
        if log_binomial_tail(neighbours, threshold, 1.0 - drop_out) + (clients as f64).ln() < LOG_FAILURE {
            return (neighbours, threshold);
        }
        neighbours += 2;
    }
    (complete, (2 * complete).div_ceil(3).max(2))
}

/// `ln P[Binomial(n, p) < t]`.
fn log_binomial_tail(n: usize, t: usize, p: f64) -> f64 {
    let log_choose =
        |k: usize| libm::lgamma(n as f64 + 1.0) - libm::lgamma(k as f64 + 1.0) - libm::lgamma((n - k) as f64 + 1.0);
    let log_term = |k: usize| log_choose(k) + k as f64 * p.ln() + (n - k) as f64 * (-p).ln_1p();
    (0..t).map(log_term).fold(f64::NEG_INFINITY, |sum, term| {
        let high = f64::max(sum, term);
        if high == f64::NEG_INFINITY { high } else { high + ((sum - high).exp() + (term - high).exp()).ln() }
    })
}

/// The neighbours of each position: a ring of a random order in which each position is joined to `neighbours / 2` on each side.
pub(super) fn random_regular(clients: usize, neighbours: usize, seed: &Seed) -> Vec<BTreeSet<usize>> {
    if neighbours + 1 >= clients {
        return (0..clients).map(|own| (0..clients).filter(|other| *other != own).collect()).collect();
    }
    let mut order: Vec<usize> = (0..clients).collect();
    let mut rng = stream(seed, "graph", 0);
    for last in (1..clients).rev() {
        order.swap(last, below(&mut rng, last as u128 + 1) as usize);
    }
    let mut graph = vec![BTreeSet::new(); clients];
    for (place, position) in order.iter().enumerate() {
        for distance in 1..=neighbours / 2 {
            let other = order[(place + distance) % clients];
            graph[*position].insert(other);
            graph[other].insert(*position);
        }
    }
    graph
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graph_is_regular_and_symmetric() {
        let graph = random_regular(101, 14, &[1; 32]);
        for (own, neighbours) in graph.iter().enumerate() {
            assert_eq!(neighbours.len(), 14);
            assert!(neighbours.iter().all(|other| *other != own && graph[*other].contains(&own)));
        }
        assert_ne!(graph, random_regular(101, 14, &[2; 32]));
        assert_eq!(random_regular(5, 4, &[1; 32])[2], BTreeSet::from([0, 1, 3, 4]));
    }

    #[test]
    fn threshold_is_a_majority_and_neighbourhoods_grow_with_drop_out() {
        assert_eq!(neighbours_and_threshold(31, 0.3), (30, 20));
        let (few, many) = (neighbours_and_threshold(1_024, 0.1), neighbours_and_threshold(1_024, 1.0 / 3.0));
        assert!(few.0 < many.0 && many.0 < 500, "{few:?} {many:?}");
        for (neighbours, threshold) in [few, many, neighbours_and_threshold(33, 1.0 / 3.0)] {
            assert!(2 * threshold > neighbours && threshold < neighbours);
        }
    }

    /// `P[Binomial(n, p) < t]` from the exact sequence of its terms: independent of `log_binomial_tail`.
    fn tail(n: usize, t: usize, p: f64) -> f64 {
        let next = |term: f64, k: usize| term * (n - k) as f64 / (k + 1) as f64 * p / (1.0 - p);
        let terms = (0..n).scan((1.0 - p).powi(n as i32), |term, k| Some(std::mem::replace(term, next(*term, k))));
        terms.take(t).sum()
    }

    #[test]
    fn a_sparse_graph_has_the_least_degree_at_which_a_neighbourhood_rarely_falls_below_the_threshold() {
        let limit = (-14.0_f64).exp();
        for (clients, drop_out) in [(100, 0.05), (500, 0.1), (1_024, 0.1), (1_024, 1.0 / 3.0), (100_000, 0.2)] {
            let (neighbours, threshold) = neighbours_and_threshold(clients, drop_out);
            assert!(neighbours.is_multiple_of(2) && neighbours + 1 < clients, "{clients} {drop_out}");
            assert_eq!(threshold, neighbours / 2 + 1, "a majority");
            let failure = |neighbours| clients as f64 * tail(neighbours, neighbours / 2 + 1, 1.0 - drop_out);
            assert!(failure(neighbours) < limit, "{clients} {drop_out}: {}", failure(neighbours));
            let least = 2 * clients.next_power_of_two().trailing_zeros() as usize + 2;
            assert!(neighbours == least || failure(neighbours - 2) >= limit, "{clients} {drop_out}: {neighbours}");
        }
    }
}
