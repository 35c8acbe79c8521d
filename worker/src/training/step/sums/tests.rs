use crate::training::engine::{Kept, Part};
use crate::training::step::agreement::agree;
use crate::training::step::reduce::OwnWork;
use crate::training::step::stages::Stages;
use engram_collective::cost::Link;
use engram_collective::transport::TcpOptions;
use engram_neural::{GradientSum, LabeledBatch};
use engram_proto::v1::ReduceAlgorithm;
use engram_train::dataset::Dataset;
use engram_train::job::{Job, Rows};
use engram_train::{
    Alone, CompressionLevel, CompressionSwitch, Ensemble, EnsembleStep, InProcess, LocalGradient, Reduce, StepTimes,
    SummationOrder, TrainError,
};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use super::*;

const STEPS: u64 = 3;
const DEADLINE: Duration = Duration::from_secs(60);

/// A training whose gradients have three buckets.
fn job(changes: &[(&str, serde_json::Value)]) -> Job {
    let mut spec = serde_json::json!({
        "source": { "synthetic": { "features": 300, "samples": 400, "largest": 20 } },
        "model": {
            "inputs": [{ "field": "mask", "dim": 300 }],
            "layers": [
                { "dense": 512, "activation": "Relu" }, { "dropout": 0.2 },
                { "residual": [{ "dense": 512, "activation": "Gelu" }, { "dense": 512 }] },
                { "layerNorm": {} }, { "dense": 1 },
            ],
            "loss": { "kind": "Mse", "target": "score" },
        },
        "optimizer": { "rate": 0.001 }, "batch": 64, "steps": STEPS,
    });
    for (at, value) in changes {
        match spec.pointer_mut(at) {
            Some(place) => *place = value.clone(),
            None => spec[&at[1..]] = value.clone(),
        }
    }
    Job::new(&serde_json::from_value(spec).unwrap()).unwrap()
}

/// Connects the members of a generation.
fn connect(members: usize, generation: u64) -> Vec<Connections> {
    let listeners: Vec<TcpListener> = (0..members).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<SocketAddr> = listeners.iter().map(|it| it.local_addr().unwrap()).collect();
    std::thread::scope(|scope| {
        let connect = |(rank, listener): (usize, &TcpListener)| {
            let options = TcpOptions { connect: DEADLINE, ..TcpOptions::default() };
            let transport = Tcp::connect(rank, generation, &addresses, listener, None, options).unwrap();
            Connections {
                generation,
                members: (0..members as u64).map(MemberId).collect(),
                rank,
                transport: Some(transport),
                network: Network::assumed(Link::LOOPBACK, members),
                accelerator: None,
                nccl: String::new(),
            }
        };
        let threads: Vec<_> = listeners.iter().enumerate().map(|it| scope.spawn(move || connect(it))).collect();
        threads.into_iter().map(|it| it.join().unwrap()).collect()
    })
}

/// A member of a group, and what it trains.
struct Member<'a> {
    job: &'a Job,
    data: Arc<Dataset>,
    rank: usize,
    members: usize,
    trained: Ensemble,
}

impl<'a> Member<'a> {
    fn new(job: &'a Job, rank: usize, members: usize) -> Self {
        Self { job, data: job.dataset().unwrap(), rank, members, trained: job.models().unwrap() }
    }

    /// Computes the sums of the next step.
    fn prepare<R: Reduce>(&mut self, reduce: &mut R) -> Result<EnsembleStep, TrainError<R::Error>>
    where
        R::Error: std::error::Error + 'static,
    {
        let (rows, order) = self.job.part(self.rank, self.members);
        let step = self.trained.counters().step;
        let samples = self.job.samples(0, &self.data, step, &rows);
        let all: Vec<Rows> = samples.iter().map(|it| Rows::of(self.trained.first().model(), &self.data, it)).collect();
        let batches: Vec<LabeledBatch<'_>> = all.iter().map(|it| it.labeled(rows.start).unwrap()).collect();
        self.trained.prepare(&batches, &order, reduce)
    }

    /// Makes all steps without overlap.
    fn train(mut self, mut reduce: InProcess) -> u128 {
        for _ in 0..STEPS {
            let local = self.prepare(&mut reduce).unwrap();
            let sum = reduce.gradient(local.gradient()).unwrap();
            self.trained.commit::<ReduceError>(local, &sum).unwrap();
        }
        self.trained.digest()
    }

    /// Makes all steps with overlap.
    fn train_by_bucket(mut self, mut connections: Connections) -> u128 {
        for step in 0..STEPS {
            let buckets = self.trained.buckets();
            let job = self.job;
            reduce(job, &mut connections, (step, buckets), &AtomicBool::new(false), &mut |_| {}, |reduce| {
                let local = self.prepare(reduce).unwrap();
                assert!(matches!(reduce.overlapped, Some(Ok(_))), "reduced during the backward pass");
                let sum = reduce.gradient(local.gradient()).unwrap();
                self.trained.commit::<ReduceError>(local, &sum).unwrap();
            });
        }
        self.trained.digest()
    }
}

/// Calls `work` with the reductions of a step.
fn reduce<T>(
    job: &Job,
    connections: &mut Connections,
    (step, buckets): (u64, Vec<Range<usize>>),
    cancel: &AtomicBool,
    suspect: &mut (dyn FnMut(Suspicion) + Send),
    work: impl FnOnce(&mut GroupReduce<'_>) -> T,
) -> T {
    let members = connections.members.len();
    let leaves = |rank: usize| match job.part(rank, members).1 {
        SummationOrder::Rank { leaves } => leaves as usize * job.batches,
        SummationOrder::PartitionInvariant { .. } => unreachable!("it has no buckets"),
    };
    work(&mut GroupReduce {
        connections,
        executor: &mut Executor::new(),
        step,
        leaves: &leaves,
        job,
        own: OwnWork::default(),
        planner: None,
        planned: None,
        times: Vec::new(),
        moments: 0,
        stages: Stages::default(),
        buckets,
        overlapped: None,
        hidden: Duration::ZERO,
        waited: Duration::ZERO,
        cancel,
        limit: Duration::from_millis(100),
        algorithm: ReduceAlgorithm::Unspecified,
        computes: &|_| (),
        suspect,
    })
}

#[test]
fn training_has_the_same_bits_with_and_without_overlap() {
    let correlation = serde_json::json!({ "weight": 0.1, "target": 0.9 });
    let cases = [
        (2, vec![]),
        (3, vec![("/accumulate", 2.into())]),
        (4, vec![("/precision", "F16".into())]),
        (3, vec![("/sync", "ParameterServer".into()), ("/freeze", serde_json::json!(["layers.2.layers.0"]))]),
        (2, vec![("/model/loss", serde_json::json!({ "kind": "Mse", "target": "score", "correlation": correlation }))]),
        (2, vec![("/order", "Fast".into())]),
    ];
    for (members, changes) in cases {
        let job = job(&changes);
        assert_eq!(job.models().unwrap().buckets().len(), 3);
        let member = |rank: usize| Member::new(&job, rank, members);
        std::thread::scope(|scope| {
            let group = InProcess::group(members, DEADLINE).into_iter().enumerate();
            let whole: Vec<_> = group.map(|(rank, group)| scope.spawn(move || member(rank).train(group))).collect();
            let whole: Vec<u128> = whole.into_iter().map(|it| it.join().unwrap()).collect();
            let group = connect(members, 1).into_iter().enumerate();
            let parts: Vec<_> = group.map(|(rank, it)| scope.spawn(move || member(rank).train_by_bucket(it))).collect();
            let parts: Vec<u128> = parts.into_iter().map(|it| it.join().unwrap()).collect();
            // Of two members each sum has the same bits in any order.
            assert_eq!(parts, whole, "{members} members, {changes:?}");
        });
    }
}

#[test]
fn failure_within_a_bucket_loses_nothing_and_the_kept_sums_are_reduced_by_the_survivors() {
    let job = job(&[]);
    let buckets = job.models().unwrap().buckets();
    let alone = |rank: usize| Member::new(&job, rank, 3).prepare(&mut Alone).unwrap();
    let mut first = connect(3, 1);
    let mut dying = first.pop().unwrap();
    let kept: Vec<EnsembleStep> = std::thread::scope(|scope| {
        let survivor = |mut connections: Connections| {
            let (job, buckets) = (&job, buckets.clone());
            scope.spawn(move || {
                let mut member = Member::new(job, connections.rank, 3);
                let cancel = AtomicBool::new(false);
                reduce(job, &mut connections, (0, buckets), &cancel, &mut |_| {}, |reduce| {
                    let local = member.prepare(reduce).unwrap();
                    let error = reduce.gradient(local.gradient()).unwrap_err();
                    assert!(matches!(error, ReduceError::Transport(Error::Closed { .. })), "{error:?}");
                    local
                })
            })
        };
        let survivors: Vec<_> = first.into_iter().map(survivor).collect();
        // One bucket is complete, and a part of the second one is sent.
        let LocalGradient::Sum(own) = alone(2).gradient().clone() else { panic!("one sum") };
        reduce(&job, &mut dying, (0, buckets.clone()), &AtomicBool::new(false), &mut |_| {}, |reduce| {
            let mut sums = reduce.vector_sums().unwrap();
            let mut output = vec![0.0; own.values.len()];
            sums.sum_bucket(0, &own.values[buckets[0].clone()], &mut output[buckets[0].clone()]).unwrap();
            let cancel = AtomicBool::new(true);
            sums.cancel = &cancel;
            sums.sum(BUCKETS + 1, &own.values[buckets[1].clone()], &mut output[buckets[1].clone()]).ok();
        });
        drop(dying);
        survivors.into_iter().map(|it| it.join().unwrap()).collect()
    });
    let expected: Vec<EnsembleStep> = (0..2).map(alone).collect();
    assert!(kept.iter().zip(&expected).all(|(kept, expected)| kept == expected), "the whole sums are kept");

    // In the next generation one survivor sends what it kept, and the other computes it meanwhile.
    let sums: Vec<GradientSum> = std::thread::scope(|scope| {
        let survivor = |mut connections: Connections| {
            let (job, kept, buckets) = (&job, &kept, buckets.clone());
            scope.spawn(move || {
                let rank = connections.rank;
                let mut member = Member::new(job, rank, 3);
                let cancel = AtomicBool::new(false);
                reduce(job, &mut connections, (0, buckets), &cancel, &mut |_| {}, |reduce| {
                    let computed = (rank == 1).then(|| member.prepare(reduce).unwrap());
                    reduce.gradient(computed.as_ref().unwrap_or(&kept[rank]).gradient()).unwrap()
                })
            })
        };
        let survivors: Vec<_> = connect(2, 2).into_iter().map(survivor).collect();
        survivors.into_iter().map(|it| it.join().unwrap()).collect()
    });
    let [LocalGradient::Sum(one), LocalGradient::Sum(other)] = [expected[0].gradient(), expected[1].gradient()] else {
        panic!("each has one sum")
    };
    let mut undisturbed = one.clone();
    undisturbed.add(other);
    assert!(sums.iter().all(|sum| *sum == undisturbed), "the sum of the survivors");
}

#[test]
fn cancelled_reduction_reports_the_silent_peer_and_does_not_end_the_backward_pass() {
    let job = job(&[]);
    let mut group = connect(2, 1);
    let _silent = group.pop();
    let mut member = Member::new(&job, 0, 2);
    let (cancel, buckets) = (AtomicBool::new(false), member.trained.buckets());
    let mut suspect = |suspicion| {
        assert_eq!(suspicion, Suspicion { peer: MemberId(1), cause: Cause::Stalled });
        cancel.store(true, Ordering::Relaxed);
    };
    let local = reduce(&job, &mut group[0], (0, buckets), &cancel, &mut suspect, |reduce| {
        let local = member.prepare(reduce).unwrap();
        let error = reduce.gradient(local.gradient()).unwrap_err();
        assert!(matches!(error, ReduceError::Transport(Error::Cancelled)), "{error:?}");
        local
    });
    assert_eq!(local, Member::new(&job, 0, 2).prepare(&mut Alone).unwrap());
}

#[test]
fn gradients_that_travel_otherwise_have_no_buckets() {
    for (at, value) in [
        ("/compression", serde_json::json!({ "kind": "Bf16" })),
        ("/syncEvery", 2.into()),
        ("/ensemble", 2.into()),
        ("/parallelism", serde_json::json!({ "data": 1, "pipeline": 2 })),
        ("/model/layers/0/dense", 64.into()),
    ] {
        let changes = if at == "/model/layers/0/dense" {
            vec![("/model/layers", serde_json::json!([{ "dense": 64, "activation": "Relu" }, { "dense": 1 }]))]
        } else {
            vec![(at, value)]
        };
        assert!(job(&changes).models().unwrap().buckets().is_empty(), "{changes:?}");
    }
}

#[test]
fn automatic_compression_has_buckets_only_while_sums_travel_whole_without_what_was_lost() {
    let job = job(&[("/compression", serde_json::json!({ "kind": "Automatic" }))]);
    let mut trained = job.models().unwrap();
    let mut buckets_after = |reduction| {
        for _ in 0..100 {
            trained.observe_times(&[StepTimes { step: 100, reduction }; 2]);
        }
        trained.buckets().len()
    };
    assert_eq!(buckets_after(15), 3, "whole sums");
    assert_eq!(buckets_after(40), 0, "Bf16");
    assert_eq!(buckets_after(1), 0, "a whole sum with what was lost");
    let step = trained.prepare(&[], &job.part(0, 1).1, &mut Alone).unwrap();
    let sum = GradientSum { samples: 1, ..Alone.gradient(step.gradient()).unwrap() };
    trained.commit::<ReduceError>(step, &sum).unwrap();
    assert_eq!(trained.buckets().len(), 3, "it is sent");
}

/// Rows that each member of generation 9 sums, of which some kept sums of earlier parts.
fn summed_rows(job: &Job, kept: &[Option<Part>]) -> Vec<Range<usize>> {
    let members = kept.len();
    let rows = |connections: &mut Connections, kept: Option<Part>| {
        let part = Part { generation: 9, rank: connections.rank, members };
        let keep = |part: Part| Kept {
            local: None,
            part,
            counts_in: part.generation,
            share: job.part(part.rank, part.members),
            data: Arc::default(),
            nanoseconds: 0,
        };
        let (mut kept, never, mut keep_waiting) = (kept.map(keep), AtomicBool::new(false), |_| true);
        agree(connections, 4, &mut kept, &mut Wait::new(DEADLINE, &never, &mut keep_waiting)).unwrap();
        kept.filter(|kept| !kept.is_stale(job, part)).unwrap_or_else(|| keep(part)).share.0
    };
    std::thread::scope(|scope| {
        let group = connect(members, 9).into_iter().zip(kept);
        let threads = group.map(|(mut connections, kept)| scope.spawn(move || rows(&mut connections, *kept)));
        threads.collect::<Vec<_>>().into_iter().map(|it| it.join().unwrap()).collect()
    })
}

#[test]
fn no_row_counts_twice_after_deaths_and_joins() {
    let of_four = |rank: usize| Some(Part { generation: 3, rank, members: 4 });
    let of_five = |rank: usize| Some(Part { generation: 2, rank, members: 5 });
    let own = |rank: usize, members: usize| Some(Part { generation: 9, rank, members });
    let cases = [
        (vec![of_four(2), of_four(3)], 32, "two deaths: no backward pass is repeated"),
        (vec![of_four(0), of_four(1), of_four(2), of_four(3)], 64, "connections that broke"),
        (vec![of_four(2), of_four(3), None], 64, "two deaths, and a member that joined"),
        (vec![of_four(1), of_four(3), own(2, 3)], 64, "it has computed its sums"),
        (vec![of_four(1), None], 64, "a survivor that finished the last step later than the other"),
        (vec![of_four(2), of_five(3), of_four(3)], 64, "sums of two generations"),
        (vec![own(0, 2), own(1, 2)], 64, "sums of this generation"),
        (vec![None; 3], 64, "no sums"),
    ];
    for order in ["Rank", "Fast"] {
        let job = job(&[("/order", order.into())]);
        for (kept, expected, case) in &cases {
            let mut rows: Vec<usize> = summed_rows(&job, kept).into_iter().flatten().collect();
            let all = rows.len();
            rows.sort_unstable();
            rows.dedup();
            assert_eq!((all, rows.len()), (*expected, *expected), "{order}, {case}");
        }
    }
}

/// A member whose step ended, with the switch of its compression, or one whose reduction failed, with the sums that it keeps.
type TimedStep = Result<Option<CompressionSwitch>, Box<EnsembleStep>>;

impl Member<'_> {
    /// Makes a step with the sums that it kept or computes.
    fn timed_step(
        &mut self,
        connections: &mut Connections,
        kept: Option<Box<EnsembleStep>>,
        last: StepTimes,
    ) -> TimedStep {
        let (job, step) = (self.job, self.trained.counters().step);
        let local = kept.unwrap_or_else(|| Box::new(self.prepare(&mut Alone).unwrap()));
        reduce(job, connections, (step, Vec::new()), &AtomicBool::new(false), &mut |_| {}, |reduce| {
            reduce.own.last_step = last;
            let Ok(sum) = reduce.gradient(local.gradient()) else { return Err(local) };
            self.trained.commit::<ReduceError>(*local, &sum).unwrap();
            Ok(self.trained.observe_times(&reduce.times))
        })
    }

    /// Makes so many steps; returns its digest and switch in each.
    fn timed_steps(&mut self, connections: &mut Connections, steps: usize, last: StepTimes) -> Vec<(u128, String)> {
        let step = |_| {
            let switch = self.timed_step(connections, None, last).unwrap();
            (self.trained.digest(), switch.map_or_else(String::new, |it| it.to_string()))
        };
        (0..steps).map(step).collect()
    }

    fn level(&self) -> CompressionLevel {
        self.trained.first().automatic_compression().unwrap().level
    }
}

/// Lets all members work at the same time; returns what each returns, by rank.
fn all<'a, T: Send>(
    members: &mut [Member<'a>],
    generation: u64,
    work: impl Fn(&mut Member<'a>, Connections) -> T + Sync,
) -> Vec<T> {
    let (count, work) = (members.len(), &work);
    let connections = connect(count, generation);
    std::thread::scope(|scope| {
        let threads = members.iter_mut().zip(connections).map(|(member, connections)| {
            (member.rank, member.members) = (connections.rank, count);
            scope.spawn(move || work(member, connections))
        });
        threads.collect::<Vec<_>>().into_iter().map(|it| it.join().unwrap()).collect()
    })
}

#[test]
fn members_switch_compression_together_also_when_one_dies_in_that_step_and_another_joins() {
    let layers = serde_json::json!([{ "dense": 8, "activation": "Relu" }, { "dense": 1 }]);
    let automatic = serde_json::json!({ "kind": "Automatic" });
    let job = job(&[("/model/layers", layers), ("/compression", automatic), ("/steps", 500.into())]);
    let mut members: Vec<Member<'_>> = (0..3).map(|rank| Member::new(&job, rank, 3)).collect();
    let (slow, fast) = (StepTimes { step: 20_000, reduction: 10_000 }, StepTimes { step: 20_000, reduction: 10 });
    let of =
        |member: &Member<'_>, times: StepTimes| StepTimes { reduction: times.reduction + member.rank as u64, ..times };

    // The third member dies in step 100, at whose end the others switch.
    let kept = all(&mut members, 1, |member, mut connections| {
        let last = of(member, slow);
        assert!(member.timed_steps(&mut connections, 99, last).iter().all(|(_, switch)| switch.is_empty()));
        (member.rank < 2).then(|| member.timed_step(&mut connections, None, last).unwrap_err())
    });
    assert!(members.iter().all(|it| it.level() == CompressionLevel::None && it.trained.counters().step == 99));
    members.pop();
    let switched = all(&mut members, 2, |member, mut connections| {
        let last = of(member, slow);
        let switch = member.timed_step(&mut connections, kept[member.rank].clone(), last).unwrap();
        (switch.map(|it| (it.from, it.to)), member.timed_steps(&mut connections, 30, last))
    });
    assert_eq!(switched[0].0, Some((CompressionLevel::None, CompressionLevel::Bf16)));
    assert!(switched[0] == switched[1] && switched[0].1.iter().all(|(_, switch)| switch.is_empty()), "{switched:?}");

    let received = members[1].trained.checkpoint(2, 2, BTreeMap::new()).unwrap();
    let mut joiner = Member::new(&job, 2, 3);
    joiner.trained = job.restore(&received).unwrap().0;
    joiner.trained.forget_feedback();
    members.push(joiner);
    let steps = all(&mut members, 3, |member, mut connections| {
        let last = of(member, fast);
        let first = member.timed_steps(&mut connections, 1, StepTimes::default());
        [first, member.timed_steps(&mut connections, 180, last)].concat()
    });
    assert!(steps[0] == steps[1] && steps[0] == steps[2], "members have other parameters or levels");
    assert!(steps[0].iter().any(|(_, switch)| switch.contains("from Bf16 to None")), "{steps:?}");
    assert!(members.iter().all(|it| it.level() == CompressionLevel::None));
}
