//! Pipeline parallelism as pure logic: where a list of operations is cut into stages, and in which order a stage works on micro-batches.

use std::ops::Range;

/// One piece of work of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StageWork {
    /// The forward pass of a micro-batch.
    Forward(usize),
    /// The backward pass of a micro-batch.
    Backward(usize),
}

/// Returns what stage `stage` of `stages` does with `micro_batches` micro-batches: one forward, one backward (1F1B) as in PipeDream-Flush
/// (Narayanan and others, 2021). First as many forward passes as there are stages after it, then a forward and a backward pass in turn, then the
/// backward passes that are left. So a stage keeps the activations of at most `stages - stage` micro-batches.
///
/// # Panics
/// There is no such stage.
pub fn schedule(stages: usize, stage: usize, micro_batches: usize) -> Vec<StageWork> {
    assert!(stage < stages, "stage {stage} of {stages}");
    let ahead = (stages - stage - 1).min(micro_batches);
    let mut work: Vec<StageWork> = (0..ahead).map(StageWork::Forward).collect();
    for next in ahead..micro_batches {
        work.extend([StageWork::Forward(next), StageWork::Backward(next - ahead)]);
    }
    work.extend((micro_batches - ahead..micro_batches).map(StageWork::Backward));
    work
}

/// Cuts operations of the given costs into contiguous stages, at least one operation each, so that the most expensive stage is as cheap as possible.
/// Among equal cuts the one with the earliest bounds.
///
/// # Panics
/// There are no stages, or more than operations.
pub fn cut(costs: &[f64], stages: usize) -> Vec<Range<usize>> {
    let count = costs.len();
    assert!((1..=count).contains(&stages), "{stages} stages of {count} operations");
    let mut before = vec![0.0; count + 1];
    (0..count).for_each(|op| before[op + 1] = before[op] + costs[op]);
    // The largest cost of the first operations in so many stages, and where the last of these stages starts.
    let mut best = vec![vec![(f64::INFINITY, 0); count + 1]; stages + 1];
    best[0][0] = (0.0, 0);
    for stage in 1..=stages {
        for end in stage..=count {
            for start in stage - 1..end {
                let largest = best[stage - 1][start].0.max(before[end] - before[start]);
                if largest < best[stage][end].0 {
                    best[stage][end] = (largest, start);
                }
            }
        }
    }
    let mut ranges = Vec::with_capacity(stages);
    let mut end = count;
    for stage in (1..=stages).rev() {
        let start = best[stage][end].1;
        ranges.push(start..end);
        end = start;
    }
    ranges.reverse();
    ranges
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Executes the schedules of all stages with queues between them; returns the steps that were made, and the most micro-batches in flight of each stage.
    fn simulate(stages: usize, micro_batches: usize) -> (usize, Vec<usize>) {
        let mut work: Vec<VecDeque<StageWork>> =
            (0..stages).map(|stage| schedule(stages, stage, micro_batches).into()).collect();
        let (mut forward, mut backward) = (vec![VecDeque::new(); stages + 1], vec![VecDeque::new(); stages + 1]);
        forward[0].extend(0..micro_batches);
        let (mut flying, mut most) = (vec![0usize; stages], vec![0; stages]);
        let mut ticks = 0;
        while work.iter().any(|it| !it.is_empty()) {
            let mut done = Vec::new();
            for stage in 0..stages {
                match work[stage].front() {
                    Some(StageWork::Forward(number)) if forward[stage].front() == Some(number) => {
                        done.push((stage, StageWork::Forward(*number)));
                    }
                    Some(StageWork::Backward(number))
                        if backward[stage].front() == Some(number) || stage + 1 == stages =>
                    {
                        done.push((stage, StageWork::Backward(*number)));
                    }
                    _ => {}
                }
            }
            assert!(!done.is_empty(), "{stages} stages and {micro_batches} micro-batches: no stage can go on");
            for (stage, piece) in done {
                work[stage].pop_front();
                match piece {
                    StageWork::Forward(number) => {
                        assert_eq!(forward[stage].pop_front(), Some(number));
                        forward[stage + 1].push_back(number);
                        flying[stage] += 1;
                        most[stage] = most[stage].max(flying[stage]);
                    }
                    StageWork::Backward(number) => {
                        if stage + 1 < stages {
                            assert_eq!(backward[stage].pop_front(), Some(number));
                        }
                        if stage > 0 {
                            backward[stage - 1].push_back(number);
                        }
                        flying[stage] -= 1;
                    }
                }
            }
            ticks += 1;
        }
        assert_eq!(forward[stages].len(), micro_batches);
        (ticks, most)
    }

    #[test]
    fn stages_never_wait_for_each_other_in_a_circle_and_keep_few_micro_batches() {
        for stages in 1..=6 {
            for micro_batches in 0..=12 {
                let (ticks, most) = simulate(stages, micro_batches);
                for (stage, most) in most.iter().enumerate() {
                    assert_eq!(*most, (stages - stage).min(micro_batches), "stage {stage} of {stages}");
                }
                // The bubble is that of filling and emptying the pipeline once.
                let expected = if micro_batches == 0 { 0 } else { 2 * (micro_batches + stages - 1) };
                assert_eq!(ticks, expected, "{stages} stages, {micro_batches} micro-batches");
            }
        }
    }

    #[test]
    fn every_micro_batch_passes_every_stage_once_in_order() {
        for stage in 0..4 {
            let work = schedule(4, stage, 7);
            let of = |is: fn(&StageWork) -> Option<usize>| work.iter().filter_map(is).collect::<Vec<_>>();
            let forward = of(|it| if let StageWork::Forward(number) = it { Some(*number) } else { None });
            let backward = of(|it| if let StageWork::Backward(number) = it { Some(*number) } else { None });
            assert_eq!((forward, backward), ((0..7).collect(), (0..7).collect()));
        }
    }

    #[test]
    fn cut_minimizes_the_most_expensive_stage() {
        assert_eq!(cut(&[1.0, 1.0, 4.0, 1.0, 1.0], 2), [0..2, 2..5]);
        assert_eq!(cut(&[1.0, 1.0, 4.0, 1.0, 1.0], 3), [0..2, 2..3, 3..5]);
        assert_eq!(cut(&[5.0, 0.0, 0.0], 3), [0..1, 1..2, 2..3]);
        // Every cut, compared with all.
        let costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0];
        let largest =
            |ranges: &[Range<usize>]| ranges.iter().map(|it| costs[it.clone()].iter().sum::<f64>()).fold(0.0, f64::max);
        let mut least = f64::INFINITY;
        for first in 1..7 {
            for second in first + 1..8 {
                least = least.min(largest(&[0..first, first..second, second..8]));
            }
        }
        let found = cut(&costs, 3);
        assert_eq!(largest(&found), least);
        assert_eq!((found[0].start, found[2].end), (0, 8));
    }
}
