//! What each rank sends, receives and adds: the schedule of an all-reduce as data.
//!
//! A rank executes its phases in order. In a phase it first sends, then takes the expected messages in the listed order, so that the order of
//! additions is fixed whatever the order of arrival. Sends of a phase use the buffer as it is at the start of the phase.

use std::ops::Range;

use crate::cost::Algorithm;
use crate::split;

/// What a received message does to the range that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Replaces the elements.
    Copy,
    /// Adds to the elements.
    Add,
}

/// A message to another rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Send {
    /// The receiver.
    pub to: usize,
    /// The elements.
    pub range: Range<usize>,
}

/// A contribution of a phase, applied in the listed order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receive {
    /// The sender; the rank itself for its own contribution to a sum in rank order.
    pub from: usize,
    /// The elements.
    pub range: Range<usize>,
    /// How they are applied.
    pub operation: Operation,
}

/// One phase of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Phase {
    /// Messages to send.
    pub sends: Vec<Send>,
    /// Contributions to apply, in order.
    pub receives: Vec<Receive>,
}

/// Returns the phases of `rank` in an all-reduce of `elements` over `weights.len()` ranks. `weights` are the shares of the parts that ranks own in
/// [`Algorithm::Direct`] (see [`split::weights`]); the other algorithms use equal parts.
///
/// # Panics
/// The rank is not in the group, or the algorithm does not support the number of ranks.
pub fn phases(algorithm: Algorithm, rank: usize, elements: usize, weights: &[f64]) -> Vec<Phase> {
    let ranks = weights.len();
    assert!(rank < ranks, "a rank of the group");
    assert!(algorithm.supports(ranks), "{algorithm:?} does not support {ranks} ranks");
    if ranks == 1 {
        return Vec::new();
    }
    match algorithm {
        Algorithm::OneShot => vec![one_shot(rank, ranks, elements)],
        Algorithm::RecursiveDoubling => recursive_doubling(rank, ranks, elements),
        Algorithm::HalvingDoubling => halving_doubling(rank, ranks, elements),
        Algorithm::Direct => direct(rank, &split::ranges(&split::shares(elements, weights))),
        Algorithm::Ring => ring(rank, &split::ranges(&split::shares(elements, &vec![1.0; ranks]))),
        Algorithm::GatherBroadcast => gather_broadcast(rank, ranks, elements),
    }
}

fn others(rank: usize, ranks: usize) -> impl Iterator<Item = usize> {
    // Beginning after the rank itself, so that not all send to rank 0 at the same time.
    (1..ranks).map(move |offset| (rank + offset) % ranks)
}

/// The contributions of all ranks to a range, in rank order: the first replaces, the others add.
fn in_rank_order(ranks: usize, range: &Range<usize>) -> Vec<Receive> {
    let receive = |from: usize| Receive {
        from,
        range: range.clone(),
        operation: if from == 0 { Operation::Copy } else { Operation::Add },
    };
    if range.is_empty() { Vec::new() } else { (0..ranks).map(receive).collect() }
}

fn one_shot(rank: usize, ranks: usize, elements: usize) -> Phase {
    let sends = if elements == 0 {
        Vec::new()
    } else {
        others(rank, ranks).map(|to| Send { to, range: 0..elements }).collect()
    };
    Phase { sends, receives: in_rank_order(ranks, &(0..elements)) }
}

fn direct(rank: usize, parts: &[Range<usize>]) -> Vec<Phase> {
    let ranks = parts.len();
    let to_owners = others(rank, ranks).filter(|&to| !parts[to].is_empty());
    let scatter = Phase {
        sends: to_owners.map(|to| Send { to, range: parts[to].clone() }).collect(),
        receives: in_rank_order(ranks, &parts[rank]),
    };
    let own = &parts[rank];
    let to_all = others(rank, ranks).filter(|_| !own.is_empty());
    let from_owners = others(rank, ranks).filter(|&from| !parts[from].is_empty());
    let gather = Phase {
        sends: to_all.map(|to| Send { to, range: own.clone() }).collect(),
        receives: from_owners
            .map(|from| Receive { from, range: parts[from].clone(), operation: Operation::Copy })
            .collect(),
    };
    vec![scatter, gather]
}

fn gather_broadcast(rank: usize, ranks: usize, elements: usize) -> Vec<Phase> {
    let all = 0..elements;
    if elements == 0 {
        return Vec::new();
    }
    if rank == 0 {
        let gather = Phase { sends: Vec::new(), receives: in_rank_order(ranks, &all) };
        let sends = (1..ranks).map(|to| Send { to, range: all.clone() }).collect();
        return vec![gather, Phase { sends, receives: Vec::new() }];
    }
    let send = Phase { sends: vec![Send { to: 0, range: all.clone() }], receives: Vec::new() };
    let receive = Receive { from: 0, range: all, operation: Operation::Copy };
    vec![send, Phase { sends: Vec::new(), receives: vec![receive] }]
}

fn ring(rank: usize, parts: &[Range<usize>]) -> Vec<Phase> {
    let ranks = parts.len();
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let phase = |sent: usize, received: usize, operation: Operation| Phase {
        sends: if parts[sent].is_empty() { Vec::new() } else { vec![Send { to: next, range: parts[sent].clone() }] },
        receives: if parts[received].is_empty() {
            Vec::new()
        } else {
            vec![Receive { from: previous, range: parts[received].clone(), operation }]
        },
    };
    let part = |back: usize| (rank + 2 * ranks - back) % ranks;
    let reduce = (0..ranks - 1).map(|step| phase(part(step), part(step + 1), Operation::Add));
    let distribute = (0..ranks - 1).map(|step| phase(part(step + ranks - 1), part(step), Operation::Copy));
    reduce.chain(distribute).collect()
}

fn exchange(with: usize, sent: Range<usize>, received: Range<usize>, operation: Operation) -> Phase {
    Phase {
        sends: if sent.is_empty() { Vec::new() } else { vec![Send { to: with, range: sent }] },
        receives: if received.is_empty() {
            Vec::new()
        } else {
            vec![Receive { from: with, range: received, operation }]
        },
    }
}

fn recursive_doubling(rank: usize, ranks: usize, elements: usize) -> Vec<Phase> {
    let rounds = ranks.trailing_zeros();
    (0..rounds).map(|round| exchange(rank ^ 1 << round, 0..elements, 0..elements, Operation::Add)).collect()
}

fn halving_doubling(rank: usize, ranks: usize, elements: usize) -> Vec<Phase> {
    let mut range = 0..elements;
    let mut halvings = Vec::new();
    let mut distance = ranks / 2;
    while distance > 0 {
        let middle = range.start + range.len() / 2;
        let (low, high) = (range.start..middle, middle..range.end);
        let (kept, sent) = if rank & distance == 0 { (low, high) } else { (high, low) };
        halvings.push((rank ^ distance, kept.clone(), sent));
        range = kept;
        distance /= 2;
    }
    let reduce = halvings.iter().map(|(with, kept, sent)| exchange(*with, sent.clone(), kept.clone(), Operation::Add));
    let distribute =
        halvings.iter().rev().map(|(with, kept, sent)| exchange(*with, kept.clone(), sent.clone(), Operation::Copy));
    reduce.chain(distribute).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Executes all ranks in lockstep, and returns their buffers and the elements on the busiest direction of a rank.
    #[allow(clippy::needless_range_loop)] // Several plans are read at one step.
    fn execute(algorithm: Algorithm, inputs: &[Vec<f32>], weights: &[f64]) -> (Vec<Vec<f32>>, usize) {
        let mut buffers = inputs.to_vec();
        let (ranks, elements) = (inputs.len(), inputs[0].len());
        let plans: Vec<Vec<Phase>> = (0..ranks).map(|rank| phases(algorithm, rank, elements, weights)).collect();
        let mut sent = vec![0; ranks];
        let mut received = vec![0; ranks];
        for step in 0..plans.iter().map(Vec::len).max().unwrap_or(0) {
            let before = buffers.clone();
            for rank in 0..ranks {
                let phase = &plans[rank][step];
                for send in &phase.sends {
                    let expected =
                        plans[send.to][step].receives.iter().filter(|it| it.from == rank && it.range == send.range);
                    assert_eq!(expected.count(), 1, "rank {} expects what {rank} sends", send.to);
                    sent[rank] += send.range.len();
                }
                for receive in &phase.receives {
                    if receive.from != rank {
                        let sends = plans[receive.from][step].sends.iter();
                        assert_eq!(sends.filter(|it| it.to == rank && it.range == receive.range).count(), 1);
                        received[rank] += receive.range.len();
                    }
                    for index in receive.range.clone() {
                        let value = before[receive.from][index];
                        let target = &mut buffers[rank][index];
                        *target = if receive.operation == Operation::Copy { value } else { *target + value };
                    }
                }
            }
        }
        let busiest = sent.into_iter().chain(received).max().unwrap_or(0);
        (buffers, busiest)
    }

    fn inputs(ranks: usize, elements: usize) -> Vec<Vec<f32>> {
        let value = |rank: usize, index: usize| ((rank * 7_919 + index * 104_729) % 1_009) as f32 - 500.0;
        (0..ranks).map(|rank| (0..elements).map(|index| value(rank, index)).collect()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn every_algorithm_gives_every_rank_the_sum(ranks in 1_usize..10, elements in 0_usize..70) {
            let inputs = inputs(ranks, elements);
            // Small integers: sums are exact in any order.
            let sum: Vec<f32> = (0..elements).map(|index| inputs.iter().map(|it| it[index]).sum()).collect();
            for algorithm in Algorithm::ALL.into_iter().filter(|it| it.supports(ranks)) {
                let weights: Vec<f64> = (0..ranks).map(|rank| (rank % 3) as f64).collect();
                for weights in [vec![1.0; ranks], weights] {
                    let (buffers, _) = execute(algorithm, &inputs, &weights);
                    prop_assert!(buffers.iter().all(|it| *it == sum), "{algorithm:?}");
                }
            }
        }
    }

    #[test]
    fn rank_order_algorithms_have_the_bits_of_the_sum_in_rank_order() {
        let elements = 33;
        for ranks in 2..7 {
            let inputs: Vec<Vec<f32>> =
                inputs(ranks, elements).into_iter().map(|it| it.iter().map(|x| x * 1e-3 + 0.1).collect()).collect();
            let in_order: Vec<f32> =
                (0..elements).map(|i| inputs[1..].iter().fold(inputs[0][i], |sum, it| sum + it[i])).collect();
            for algorithm in Algorithm::ALL.into_iter().filter(|it| it.supports(ranks)) {
                let (buffers, _) = execute(algorithm, &inputs, &vec![1.0; ranks]);
                assert!(buffers.iter().all(|it| it == &buffers[0]), "{algorithm:?}: all ranks have the same bits");
                if algorithm.adds_in_rank_order() {
                    assert_eq!(buffers[0], in_order, "{algorithm:?}");
                }
            }
        }
    }

    #[test]
    fn bandwidth_optimal_algorithms_load_no_link_beyond_the_bound() {
        for ranks in [2_usize, 4, 8] {
            let elements = 8_000;
            let bound = 1.05 * 2.0 * (ranks - 1) as f64 / ranks as f64 * elements as f64;
            for algorithm in [Algorithm::Direct, Algorithm::Ring, Algorithm::HalvingDoubling] {
                let (_, busiest) = execute(algorithm, &inputs(ranks, elements), &vec![1.0; ranks]);
                assert!(busiest as f64 <= bound, "{algorithm:?} of {ranks}: {busiest} over {bound}");
            }
            let (_, baseline) = execute(Algorithm::GatherBroadcast, &inputs(ranks, elements), &vec![1.0; ranks]);
            assert_eq!(baseline, (ranks - 1) * elements, "one rank carries everything");
        }
    }
}
