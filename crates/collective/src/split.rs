//! How elements are split over ranks.

use std::ops::Range;

/// Returns the shares of an element count in proportion to weights, by largest remainders; ties go to the lowest rank.
///
/// Equal weights give shares that differ by at most one element. Weights that are all 0 count as equal.
pub fn shares(elements: usize, weights: &[f64]) -> Vec<usize> {
    let sum: f64 = weights.iter().sum();
    let equal = 1.0 / weights.len() as f64;
    let exact: Vec<f64> =
        weights.iter().map(|weight| elements as f64 * if sum > 0.0 { weight / sum } else { equal }).collect();
    let mut shares: Vec<usize> = exact.iter().map(|it| it.floor() as usize).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    let remainder = |rank: usize| exact[rank] - exact[rank].floor();
    order.sort_by(|&a, &b| remainder(b).total_cmp(&remainder(a)).then(a.cmp(&b)));
    let missing = elements.saturating_sub(shares.iter().sum());
    order.iter().cycle().take(missing).for_each(|&rank| shares[rank] += 1);
    // Rounding of large counts can give one too many.
    let mut surplus = shares.iter().sum::<usize>().saturating_sub(elements);
    for share in shares.iter_mut().rev() {
        let taken = surplus.min(*share);
        *share -= taken;
        surplus -= taken;
    }
    shares
}

/// Returns the ranges that follow each other with these lengths.
pub fn ranges(shares: &[usize]) -> Vec<Range<usize>> {
    let mut start = 0;
    let range = |&share: &usize| {
        let range = start..start + share;
        start += share;
        range
    };
    shares.iter().map(range).collect()
}

/// Returns the weights of the parts that minimise `max_i (1 + (n - 2) w_i) / B_i` for bandwidths B, in the order of the ranks.
///
/// Closed form: with bandwidths sorted descending, the largest m for which all weights stay at or above 0, `xi = (n - 2 + m) / sum of the m largest`,
/// `w_i = max(0, (xi B_i - 1) / (n - 2))`. For two ranks both have 1/2, since each sends and receives everything.
pub fn weights(bandwidths: &[f64]) -> Vec<f64> {
    let ranks = bandwidths.len();
    if ranks < 3 {
        return vec![1.0 / ranks.max(1) as f64; ranks];
    }
    let others = (ranks - 2) as f64;
    let mut sorted = bandwidths.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let level = |m: usize| (others + m as f64) / sorted[..m].iter().sum::<f64>();
    // The condition holds for m = 1 and, once broken, stays broken.
    let used = (1..=ranks).rev().find(|&m| level(m) * sorted[m - 1] >= 1.0).unwrap_or(1);
    let xi = level(used);
    bandwidths.iter().map(|bandwidth| ((xi * bandwidth - 1.0) / others).max(0.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn unequal_bandwidths_match_the_linear_programme() {
        let close = |bandwidths: &[f64], expected: &[f64]| {
            let weights = weights(bandwidths);
            assert!(weights.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4), "{weights:?}");
        };
        close(&[10.0, 5.0, 1.0, 1.0], &[0.8333, 0.1667, 0.0, 0.0]);
        close(&[10.0, 10.0, 1.0, 0.3, 0.2], &[0.5, 0.5, 0.0, 0.0, 0.0]);
        close(&[2.0, 1.0], &[0.5, 0.5]);
        close(&[3.0, 3.0, 3.0], &[1.0 / 3.0; 3]);
    }

    proptest! {
        #[test]
        fn weights_sum_to_one_and_no_grid_point_is_faster(bandwidths in proptest::collection::vec(0.1_f64..10.0, 3)) {
            let time = |w: &[f64]| w.iter().zip(&bandwidths).map(|(w, b)| (1.0 + w) / b).fold(0.0, f64::max);
            let optimal = weights(&bandwidths);
            prop_assert!((optimal.iter().sum::<f64>() - 1.0).abs() < 1e-9);
            for a in 0..=20 {
                for b in 0..=20 - a {
                    let grid = [f64::from(a) / 20.0, f64::from(b) / 20.0, f64::from(20 - a - b) / 20.0];
                    prop_assert!(time(&optimal) <= time(&grid) + 1e-9);
                }
            }
        }

        #[test]
        fn shares_cover_all_elements_within_one_of_the_exact_share(
            elements in 0_usize..100_000, weights in proptest::collection::vec(0.0_f64..5.0, 1..9),
        ) {
            let shares = shares(elements, &weights);
            prop_assert_eq!(shares.iter().sum::<usize>(), elements);
            let sum: f64 = weights.iter().sum();
            for (share, weight) in shares.iter().zip(&weights).filter(|_| sum > 0.0) {
                prop_assert!((*share as f64 - elements as f64 * weight / sum).abs() < 1.0 + 1e-6);
            }
            prop_assert_eq!(ranges(&shares).last().unwrap().end, elements);
        }
    }
}
