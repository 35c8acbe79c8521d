//! Pipelines over members, in threads of one process.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use engram_neural::{Moments, StageLink, StageMessage};
use serde_json::{Value, json};

use super::*;
use crate::job::Rows;
use crate::{InProcess, InProcessError};

const STEPS: u64 = 10;
const DEADLINE: Duration = Duration::from_secs(60);

type Message = ((u32, StageMessage), Vec<f32>);

/// A member of a group with queues between the stages.
struct Member {
    group: InProcess,
    senders: Vec<Sender<Message>>,
    receiver: Receiver<Message>,
    early: HashMap<(u32, StageMessage), VecDeque<Vec<f32>>>,
    place: Option<StagePlace>,
    batches: u32,
}

impl Member {
    fn group(members: usize) -> Vec<Self> {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..members).map(|_| channel()).unzip();
        let of = |(group, receiver)| Self {
            group,
            senders: senders.clone(),
            receiver,
            early: HashMap::new(),
            place: None,
            batches: 0,
        };
        InProcess::group(members, DEADLINE).into_iter().zip(receivers).map(of).collect()
    }
}

impl Reduce for Member {
    type Error = InProcessError;

    fn moments(&mut self, local: &[Moments]) -> Result<Moments, InProcessError> {
        self.group.moments(local)
    }

    fn gradient(&mut self, local: &LocalGradient) -> Result<GradientSum, InProcessError> {
        self.group.gradient(local)
    }

    fn stage_link(&mut self, place: StagePlace) -> Option<&mut dyn StageLink<Error = InProcessError>> {
        self.place = Some(place);
        self.batches += 1;
        Some(self)
    }
}

impl StageLink for Member {
    type Error = InProcessError;

    fn send(&mut self, message: StageMessage, values: &[f32]) -> Result<(), InProcessError> {
        let place = self.place.unwrap();
        let own = StageMessage { stage: place.stage, ..message };
        self.senders[place.first_rank + message.stage].send(((self.batches, own), values.to_vec())).unwrap();
        Ok(())
    }

    fn receive(&mut self, message: StageMessage, into: &mut [f32]) -> Result<(), InProcessError> {
        let wanted = (self.batches, message);
        loop {
            if let Some(values) = self.early.get_mut(&wanted).and_then(VecDeque::pop_front) {
                into.copy_from_slice(&values);
                return Ok(());
            }
            let (name, values) = self.receiver.recv_timeout(DEADLINE).unwrap();
            self.early.entry(name).or_default().push_back(values);
        }
    }
}

fn job(changes: &[(&str, Value)]) -> Result<Job, String> {
    let mut spec = json!({
        "source": { "synthetic": { "features": 30, "samples": 400, "largest": 20 } },
        "model": {
            "inputs": [{ "field": "mask", "dim": 30 }],
            "layers": [
                { "dense": 8, "activation": "Relu" }, { "dropout": 0.2 },
                { "residual": [{ "dense": 8, "activation": "Tanh" }] }, { "dense": 4 }, { "dense": 1 },
            ],
            "loss": { "kind": "Mse", "target": "score" },
        },
        "optimizer": { "rate": 0.01 }, "batch": 66, "steps": STEPS,
    });
    for (at, value) in changes {
        match spec.pointer_mut(at) {
            Some(place) => *place = value.clone(),
            None => spec[&at[1..]] = value.clone(),
        }
    }
    Job::new(&serde_json::from_value(spec).map_err(|error| error.to_string())?).map_err(|error| error.to_string())
}

fn over_workers(data: usize, pipeline: usize) -> (&'static str, Value) {
    ("/parallelism", json!({ "data": data, "pipeline": pipeline, "over": "Workers" }))
}

/// Makes the steps `steps` as a rank of a group.
fn train(
    job: &Job,
    trained: &mut Ensemble,
    (rank, members): (usize, usize),
    member: &mut Member,
    steps: std::ops::Range<u64>,
) {
    let data = job.dataset().unwrap();
    for step in steps {
        trained.set_place(job.place(rank, members));
        if step == 4 {
            // Another cut in the middle changes no bit.
            let costs: Vec<f64> = (0..trained.take_stage_seconds().len()).map(|op| (op + 1) as f64).collect();
            trained.set_stage_costs(Some(&costs));
        }
        let (rows, order) = job.part(rank, members);
        let samples: Vec<_> = (0..job.ensemble).flat_map(|it| job.samples(it, &data, step, &rows)).collect();
        let collected: Vec<Rows> =
            samples.iter().map(|samples| Rows::of(trained.first().model(), &data, samples)).collect();
        let first = |at: usize| at % job.batches * job.batch + rows.start;
        let batches: Vec<_> = collected.iter().enumerate().map(|(at, rows)| rows.labeled(first(at)).unwrap()).collect();
        let local = trained.prepare(&batches, &order, member).unwrap();
        let reduced = member.gradient(local.gradient()).unwrap();
        trained.commit::<InProcessError>(local, &reduced).unwrap();
    }
}

/// Digest after all steps, half of which are made by `members` members and the others by `then` of them.
fn digest(job: &Job, members: usize, then: usize) -> u128 {
    let mut states: Vec<Ensemble> = (0..members).map(|_| job.models().unwrap()).collect();
    for (members, steps) in [(members, 0..STEPS / 2), (then, STEPS / 2..STEPS)] {
        states.truncate(members);
        std::thread::scope(|scope| {
            for ((rank, trained), mut member) in states.iter_mut().enumerate().zip(Member::group(members)) {
                let steps = steps.clone();
                scope.spawn(move || train(job, trained, (rank, members), &mut member, steps));
            }
        });
    }
    let digests: Vec<u128> = states.iter().map(Ensemble::digest).collect();
    assert!(digests.iter().all(|digest| *digest == digests[0]), "members differ");
    digests[0]
}

#[test]
fn pipelines_over_members_have_the_bits_of_the_unsplit_run_also_when_members_are_lost() {
    let options: [&[(&str, Value)]; 4] = [
        &[],
        &[("/order", "PartitionInvariant".into())],
        &[("/precision", "F16".into()), ("/ensemble", 2.into())],
        &[("/order", "PartitionInvariant".into()), ("/accumulate", 2.into())],
    ];
    for options in options {
        for data in [1, 2] {
            let unsplit = digest(&job(options).unwrap(), data, data);
            for (pipeline, members, then) in [(2, 2 * data, 2 * data), (4, 4, 4), (3, 5, 3), (2, 4, 2)] {
                let staged = job(&[options, &[over_workers(data, pipeline)]].concat()).unwrap();
                assert!(staged.place(0, 3).is_some());
                let found = digest(&staged, members, then);
                assert_eq!(found, unsplit, "{data} x {pipeline} over {members}, then {then} members, {options:?}");
            }
        }
    }
}

#[test]
fn four_pipelines_add_the_leaves_of_their_parts_where_they_are_in_the_batch() {
    let invariant = ("/order", "PartitionInvariant".into());
    let unsplit = digest(&job(std::slice::from_ref(&invariant)).unwrap(), 1, 1);
    let staged = job(&[invariant, over_workers(4, 2)]).unwrap();
    assert_eq!(digest(&staged, 8, 7), unsplit);
}

#[test]
fn measured_costs_move_the_cut_between_two_stages() {
    let job = job(&[over_workers(1, 2)]).unwrap();
    let mut states: Vec<Ensemble> = (0..2).map(|_| job.models().unwrap()).collect();
    // Operations that each stage has measured in a step.
    let mut measured = |step: u64, costs: Option<&[f64]>| -> Vec<Vec<bool>> {
        std::thread::scope(|scope| {
            for ((rank, trained), mut member) in states.iter_mut().enumerate().zip(Member::group(2)) {
                let job = &job;
                trained.set_stage_costs(costs);
                scope.spawn(move || train(job, trained, (rank, 2), &mut member, step..step + 1));
            }
        });
        let seconds = states.iter_mut().map(Ensemble::take_stage_seconds);
        seconds.map(|seconds| seconds.into_iter().map(|it| it > 0.0).collect()).collect()
    };
    let estimated = measured(0, None);
    let operations = estimated[0].len();
    let mut costs = vec![1.0; operations];
    costs[operations - 1] = 1_000.0;
    let moved = measured(1, Some(&costs));
    assert_eq!(moved[0], (0..operations).map(|at| at + 1 < operations).collect::<Vec<_>>(), "the last costs the most");
    assert_ne!(estimated[0], moved[0]);
    assert!(moved[1].iter().zip(&moved[0]).all(|(second, first)| second != first), "{moved:?}");
}

#[test]
fn stages_are_spread_over_the_members_of_each_pipeline() {
    let at = |data, pipeline, rank, members| {
        let place = StagePlace::of(Parallelism { data, pipeline }, rank, members)?;
        Some((place.pipeline, place.stage, place.stages, place.first_rank))
    };
    let all = |data, pipeline, members| (0..members).map(|rank| at(data, pipeline, rank, members)).collect::<Vec<_>>();
    assert_eq!(all(2, 2, 4), [(0, 0, 2, 0), (0, 1, 2, 0), (1, 0, 2, 2), (1, 1, 2, 2)].map(Some));
    // A member without a stage, and pipelines that are shorter.
    assert_eq!(all(1, 2, 3), [(0, 0, 2, 0), (0, 1, 2, 0), (0, 2, 2, 0)].map(Some));
    assert_eq!(all(2, 2, 3), [(0, 0, 1, 0), (1, 0, 2, 1), (1, 1, 2, 1)].map(Some));
    // As without pipelines.
    assert_eq!(all(2, 2, 2), [None, None]);
    assert_eq!(all(2, 1, 4), [None; 4]);
}

#[test]
fn pipelines_over_members_that_are_not_possible_are_refused() {
    let refused = |more: &[(&str, Value)]| job(&[&[over_workers(1, 2)], more].concat()).unwrap_err();
    assert_eq!(
        job(&[over_workers(1, 6)]).unwrap_err(),
        "spec.replay.parallelism.pipeline is 6; allowed: 1 to 5, the layers of the model"
    );
    for (setting, text) in [
        (("/syncEvery", 2.into()), "spec.replay.syncEvery is 2; allowed: 1 with parallelism.over Workers"),
        (("/compression", json!({ "kind": "TopK" })), "spec.replay.compression is set; allowed: absent with"),
        (("/balance", json!({})), "spec.replay.balance is set; allowed: absent with parallelism.over Workers"),
        (("/batch", 1_048_576.into()), "spec.replay.batch is 1048576; allowed: at most"),
    ] {
        let found = refused(&[setting]);
        assert!(found.starts_with(text), "{found}");
    }
}
