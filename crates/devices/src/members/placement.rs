//! Which member has which stages of a pipeline.

use std::ops::Range;

/// Consecutive stages and the ranks that have them. Several ranks take items in turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Stages.
    pub stages: Range<usize>,
    /// Ranks, at least one.
    pub ranks: Range<usize>,
}

impl Part {
    /// Returns the rank that computes an item.
    pub fn rank_of(&self, item: usize) -> usize {
        self.ranks.start + item % self.ranks.len()
    }
}

/// Returns the parts of a pipeline over the ranks: with fewer ranks than stages, consecutive stages such that the slowest rank is as fast as
/// possible; with more, the stage with the highest cost per rank has one more, until all ranks have a stage. `speeds` has one entry per
/// rank, 0 if unmeasured, which makes all ranks equal.
pub fn place_stages(costs: &[u64], speeds: &[u64]) -> Vec<Part> {
    if costs.is_empty() || speeds.is_empty() {
        return Vec::new();
    }
    let counts = if speeds.len() > costs.len() { ranks_per_stage(costs, speeds.len()) } else { Vec::new() };
    if counts.is_empty() {
        let ends = best_ends(costs, speeds);
        let begins = std::iter::once(0).chain(ends.iter().copied());
        return begins.zip(&ends).enumerate().map(|(rank, (begin, &end))| part(begin..end, rank..rank + 1)).collect();
    }
    let mut next = 0;
    let of_stage = |(stage, count): (usize, usize)| {
        next += count;
        part(stage..stage + 1, next - count..next)
    };
    counts.into_iter().enumerate().map(of_stage).collect()
}

const fn part(stages: Range<usize>, ranks: Range<usize>) -> Part {
    Part { stages, ranks }
}

/// Returns the number of ranks of each stage.
fn ranks_per_stage(costs: &[u64], ranks: usize) -> Vec<usize> {
    let mut counts = vec![1; costs.len()];
    for _ in costs.len()..ranks {
        // The first on ties.
        let cost = |&stage: &usize| (costs[stage].max(1) as f64 / counts[stage] as f64, std::cmp::Reverse(stage));
        let busiest = (0..costs.len()).max_by(|one, other| {
            let (one, other) = (cost(one), cost(other));
            one.0.total_cmp(&other.0).then(one.1.cmp(&other.1))
        });
        counts[busiest.expect("there is a stage")] += 1;
    }
    counts
}

/// Returns the end of the stages of each rank: least possible time of the slowest rank, by dynamic programming over ranks and stages.
fn best_ends(costs: &[u64], speeds: &[u64]) -> Vec<usize> {
    let (stages, ranks) = (costs.len(), speeds.len());
    let is_measured = speeds.iter().all(|&it| it > 0);
    let time = |range: Range<usize>, rank: usize| {
        let cost: u64 = costs[range].iter().map(|&it| it.max(1)).sum();
        cost as f64 / if is_measured { speeds[rank] as f64 } else { 1.0 }
    };
    // By rank and end: time of the slowest rank so far, and where its stages begin.
    let mut best = vec![vec![(f64::INFINITY, 0); stages + 1]; ranks];
    best[0] = (0..=stages).map(|end| (time(0..end, 0), 0)).collect();
    for rank in 1..ranks {
        for end in rank + 1..=stages {
            let candidates = (rank..end).map(|begin| (best[rank - 1][begin].0.max(time(begin..end, rank)), begin));
            best[rank][end] = candidates.min_by(|one, other| one.0.total_cmp(&other.0)).expect("there is a begin");
        }
    }
    let mut ends = vec![stages; ranks];
    for rank in (1..ranks).rev() {
        ends[rank - 1] = best[rank][ends[rank]].1;
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(costs: &[u64], speeds: &[u64]) -> Vec<(Range<usize>, Range<usize>)> {
        place_stages(costs, speeds).into_iter().map(|it| (it.stages, it.ranks)).collect()
    }

    #[test]
    fn every_stage_and_every_rank_is_in_one_part() {
        for stages in 1..6 {
            for ranks in 1..7 {
                let costs: Vec<u64> = (0..stages).map(|stage| 1 + stage * 7 % 5).collect();
                let parts = place_stages(&costs, &vec![0; ranks]);
                let all_stages: Vec<usize> = parts.iter().flat_map(|it| it.stages.clone()).collect();
                let all_ranks: Vec<usize> = parts.iter().flat_map(|it| it.ranks.clone()).collect();
                assert_eq!(all_stages, (0..stages as usize).collect::<Vec<_>>(), "{parts:?}");
                assert_eq!(all_ranks, (0..ranks).collect::<Vec<_>>(), "{parts:?}");
            }
        }
        assert!(place_stages(&[], &[1]).is_empty());
    }

    #[test]
    fn slowest_rank_is_as_fast_as_possible() {
        assert_eq!(ranges(&[10, 1, 2], &[0, 0]), [(0..1, 0..1), (1..3, 1..2)]);
        assert_eq!(ranges(&[1, 1, 4, 4], &[0, 0]), [(0..3, 0..1), (3..4, 1..2)]);
        assert_eq!(ranges(&[4, 4, 4], &[100, 200]), [(0..1, 0..1), (1..3, 1..2)]);
        assert_eq!(ranges(&[4, 4, 4], &[200, 100]), [(0..2, 0..1), (2..3, 1..2)]);
        assert_eq!(ranges(&[10, 1, 2], &[0; 5]), [(0..1, 0..3), (1..2, 3..4), (2..3, 4..5)]);
        let part = Part { stages: 0..1, ranks: 2..5 };
        assert_eq!((0..4).map(|item| part.rank_of(item)).collect::<Vec<_>>(), [2, 3, 4, 2]);
    }
}
