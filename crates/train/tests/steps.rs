//! Training steps of groups, with an in-process reduction.
#![allow(clippy::unwrap_used, reason = "a helper of a test may panic")]

use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Range;
use std::time::Duration;

use engram_neural::{Batch, LabeledBatch, LeafSplit, SampleErrors, Targets, philox};
use engram_train::{
    Alone, Checkpoint, InProcess, Reduce, StepOutcome, StepReport, SummationOrder, TrainError, Trainer, TrainerSpec,
};

const SPEC: &str = "
model:
  inputs: 20
  layers:
    - { featureBag: 16, activation: Relu }
    - { dropout: 0.2 }
    - { residual: [{ dense: 16, activation: Gelu }] }
    - { dense: 1 }
loss: { kind: Mse, correlation: { weight: 0.1, target: 0.9 } }
optimizer: { kind: AdamW, weightDecay: 0.01 }
schedule: { rate: 0.01, warmupSteps: 5, cosine: { totalSteps: 100 } }
clipNorm: 1.0
seed: 7
";
const DEADLINE: Duration = Duration::from_secs(30);
const GLOBAL: usize = 300;

/// Global batch of a step: offsets, feature indices, targets, weights.
struct Data {
    offsets: Vec<u32>,
    indices: Vec<u32>,
    targets: Vec<f32>,
    weights: Vec<f32>,
}

impl Data {
    fn of(step: u64) -> Self {
        let mut data = Self { offsets: vec![0], indices: Vec::new(), targets: Vec::new(), weights: Vec::new() };
        for i in 0..GLOBAL as u32 {
            let w = philox(99, [i, step as u32, 0, 0]);
            let own: Vec<u32> = (0..=w[0] % 5).map(|j| philox(98, [i, j, step as u32, 0])[0] % 20).collect();
            data.targets.push(own.iter().map(|f| (*f as f32 - 10.0) * 0.1).sum::<f32>());
            data.weights.push(0.5 + (w[1] % 100) as f32 * 0.01);
            data.indices.extend(own);
            data.offsets.push(data.indices.len() as u32);
        }
        data
    }

    /// Calls `f` with the rows of a member.
    fn rows<T>(&self, rows: Range<usize>, f: impl FnOnce(&LabeledBatch<'_>) -> T) -> T {
        let first = self.offsets[rows.start];
        let offsets: Vec<u32> = self.offsets[rows.start..=rows.end].iter().map(|o| o - first).collect();
        let indices = &self.indices[first as usize..self.offsets[rows.end] as usize];
        f(&LabeledBatch {
            batch: Batch::features(&offsets, indices).unwrap().starting_at(rows.start as u32),
            targets: Targets::Values(&self.targets[rows.clone()]),
            weights: Some(&self.weights[rows]),
        })
    }
}

fn spec() -> TrainerSpec {
    serde_saphyr::from_str(SPEC).unwrap()
}

fn parts(counts: &[usize]) -> Vec<Range<usize>> {
    let mut start = 0;
    let mut next = |count: &usize| {
        start += count;
        start - count..start
    };
    counts.iter().map(&mut next).collect()
}

fn step<R: Reduce>(trainer: &mut Trainer, rows: Range<usize>, order: &SummationOrder, reduce: &mut R) -> StepReport
where
    R::Error: Error + 'static,
{
    let data = Data::of(trainer.counters().step);
    data.rows(rows, |batch| trainer.step(&[*batch], order, reduce)).unwrap().0
}

/// Runs `steps` steps on a member per count; returns the trainers.
fn group(trainers: Vec<Trainer>, counts: &[usize], steps: usize) -> Vec<Trainer> {
    let members = InProcess::group(counts.len(), DEADLINE);
    std::thread::scope(|scope| {
        let run = |((mut trainer, mut member), rows): ((Trainer, InProcess), Range<usize>)| {
            scope.spawn(move || {
                for _ in 0..steps {
                    step(&mut trainer, rows.clone(), &SummationOrder::Rank { leaves: 2 }, &mut member);
                }
                trainer
            })
        };
        let threads: Vec<_> = trainers.into_iter().zip(members).zip(parts(counts)).map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn fresh(count: usize) -> Vec<Trainer> {
    (0..count).map(|_| Trainer::new(&spec()).unwrap()).collect()
}

fn largest_difference(a: &Trainer, b: &Trainer) -> f32 {
    let pairs = a.model().parameters().iter().zip(b.model().parameters());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn members_with_uneven_batches_keep_equal_digests_and_match_one_member() {
    let members = group(fresh(3), &[200, 90, 10], 50);
    let digests: Vec<u128> = members.iter().map(Trainer::digest).collect();
    assert!(digests.iter().all(|d| *d == digests[0]), "{digests:?}");
    let alone = group(fresh(1), &[300], 50).pop().unwrap();
    assert_eq!(members[0].counters(), alone.counters());
    assert_eq!(alone.counters().samples, 15_000);
    let start = &fresh(1)[0];
    assert!(largest_difference(start, &alone) > 0.1, "training moves the parameters");
    assert!(largest_difference(&members[0], &alone) < 2e-3, "{}", largest_difference(&members[0], &alone));
    assert_ne!(group(fresh(1), &[300], 49)[0].digest(), alone.digest());
}

#[test]
fn update_divides_the_sum_by_the_samples_of_all_members() {
    // y = b at b = 0 has the gradient -2 y: the mean over samples has a closed form, and scaling cancels.
    let yaml = "
        model: { inputs: 1, layers: [{ dense: 1 }] }
        loss: { kind: Mse }
        optimizer: { kind: Sgd }
        schedule: { rate: 1.0 }
        scaler: { initial: 1024 }";
    let spec: TrainerSpec = serde_saphyr::from_str(yaml).unwrap();
    let counts = [(200usize, -0.25f32), (90, 0.5), (10, 1.5)];
    let mean = (200.0 * -0.25 + 90.0 * 0.5 + 10.0 * 1.5) / 300.0;
    let members = InProcess::group(3, DEADLINE);
    std::thread::scope(|scope| {
        for ((count, target), mut member) in counts.into_iter().zip(members) {
            let spec = &spec;
            scope.spawn(move || {
                let mut trainer = Trainer::new(spec).unwrap();
                trainer.model_mut().parameters_mut().fill(0.0);
                let (rows, targets) = (vec![0.0; count], vec![target; count]);
                let batch = Batch::rows(&rows, count, 1).unwrap();
                let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: None };
                let order = SummationOrder::Rank { leaves: 2 };
                let (report, _) = trainer.step(&[data], &order, &mut member).unwrap();
                assert!((f64::from(trainer.model().parameters()[1]) - 2.0 * mean).abs() < 1e-6);
                assert!((report.gradient_norm - 2.0 * mean.abs()).abs() < 1e-6, "{report:?}");
                assert!((report.loss - (200.0 * 0.0625 + 90.0 * 0.25 + 10.0 * 2.25) / 300.0).abs() < 1e-6);
            });
        }
    });
}

#[test]
fn each_step_has_its_own_dropout_masks() {
    let mut trainer = Trainer::new(&spec()).unwrap();
    assert_eq!(trainer.model_mut().set_frozen("layers", true), trainer.model().views().len());
    let data = Data::of(0);
    let order = SummationOrder::Rank { leaves: 1 };
    let mut loss = || data.rows(0..300, |b| trainer.step(&[*b], &order, &mut Alone)).unwrap().0.loss;
    assert_ne!(loss(), loss(), "equal parameters and data, other masks");
}

#[test]
fn training_in_f16_skips_the_overflow_of_one_member_and_follows_f32() {
    let run = |precision: &str| {
        let spec: TrainerSpec = serde_saphyr::from_str(&SPEC.replace("seed: 7", precision)).unwrap();
        let trainers = (0..2).map(|_| Trainer::new(&spec).unwrap()).collect();
        group(trainers, &[180, 120], 30)
    };
    let (full, half) = (run("precision: F32"), run("precision: F16\nscaler: { initial: 1024 }"));
    assert_eq!(half[0].digest(), half[1].digest());
    assert_eq!(half[0].scaler().state().skipped, 0, "this scale suits the model");
    let difference = largest_difference(&full[0], &half[0]);
    assert!(difference > 0.0 && difference < 0.05, "{difference}");
    let mut half = half;
    for report in overflow(&mut half) {
        assert_eq!(report.unwrap().outcome, StepOutcome::SkippedOverflow);
    }
    assert_eq!(half[0].scaler().scale(), 512.0);
    let unscaled = run("precision: F16");
    assert!(unscaled[0].scaler().state().skipped > 0, "F16 without settings starts with the default scale of 65536");
    assert!(unscaled[0].counters().updates > 20, "the scale adapts: {:?}", unscaled[0].counters());
}

#[test]
fn part_of_a_reduction_that_timed_out_is_withdrawn() {
    let mut members = InProcess::group(2, Duration::from_millis(20));
    assert!(members[0].moments(&[]).is_err());
    assert!(members[1].moments(&[]).is_err(), "the first member no longer takes part");
}

#[test]
fn accumulation_over_k_batches_equals_one_step_with_the_k_fold_batch() {
    let order = SummationOrder::Rank { leaves: 2 };
    let data = Data::of(0);
    let (mut whole, mut parts) = (Trainer::new(&spec()).unwrap(), Trainer::new(&spec()).unwrap());
    let (one, errors) = data.rows(0..300, |b| whole.step(&[*b], &order, &mut Alone)).unwrap();
    let (many, part_errors) = data
        .rows(0..40, |a| data.rows(40..250, |b| data.rows(250..300, |c| parts.step(&[*a, *b, *c], &order, &mut Alone))))
        .unwrap();
    assert_eq!(errors.errors.len(), 300);
    let close = |a: &SampleErrors, b: &SampleErrors| a.errors.iter().zip(&b.errors).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(close(&errors, &part_errors));
    assert!((one.loss - many.loss).abs() < 1e-6 && one.samples == many.samples, "{one:?} {many:?}");
    assert!((one.gradient_norm / many.gradient_norm - 1.0).abs() < 1e-5, "{one:?} {many:?}");
    assert_eq!(parts.counters().step, 1);
}

fn uncoupled(more: &str) -> TrainerSpec {
    let text = SPEC.replace(", correlation: { weight: 0.1, target: 0.9 }", "").replace("dropout: 0.2", "dropout: 0.0");
    serde_saphyr::from_str(&(text + more)).unwrap()
}

/// Runs steps of `batches` batches per member; returns the trainers.
fn group_of(trainers: Vec<Trainer>, counts: &[usize], (steps, batches): (usize, u64)) -> Vec<Trainer> {
    let members = InProcess::group(counts.len(), DEADLINE);
    std::thread::scope(|scope| {
        let run = |((mut trainer, mut member), rows): ((Trainer, InProcess), Range<usize>)| {
            scope.spawn(move || {
                for _ in 0..steps {
                    step_of(&mut trainer, batches, rows.clone(), &mut member);
                }
                trainer
            })
        };
        let threads: Vec<_> = trainers.into_iter().zip(members).zip(parts(counts)).map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// One step of several batches.
fn step_of<R: Reduce>(trainer: &mut Trainer, batches: u64, rows: Range<usize>, reduce: &mut R) -> StepReport
where
    R::Error: Error + 'static,
{
    let first = trainer.counters().step * batches;
    let all: Vec<Data> = (first..first + batches).map(Data::of).collect();
    let offsets: Vec<Vec<u32>> = all
        .iter()
        .map(|data| data.offsets[rows.start..=rows.end].iter().map(|o| o - data.offsets[rows.start]).collect())
        .collect();
    let labeled: Vec<LabeledBatch<'_>> = all
        .iter()
        .zip(&offsets)
        .enumerate()
        .map(|(micro, (data, offsets))| {
            let indices = &data.indices[data.offsets[rows.start] as usize..data.offsets[rows.end] as usize];
            LabeledBatch {
                batch: Batch::features(offsets, indices).unwrap().starting_at((micro * GLOBAL + rows.start) as u32),
                targets: Targets::Values(&data.targets[rows.clone()]),
                weights: Some(&data.weights[rows.clone()]),
            }
        })
        .collect();
    trainer.step(&labeled, &SummationOrder::Rank { leaves: 2 }, reduce).unwrap().0
}

#[test]
fn local_updates_are_averaged_by_samples_and_keep_members_equal() {
    let spec = uncoupled("localUpdates: 4\n");
    let fresh = |count: usize| (0..count).map(|_| Trainer::new(&spec).unwrap()).collect::<Vec<_>>();
    let members = group_of(fresh(3), &[200, 90, 10], (12, 8));
    assert!(members.iter().all(|it| it.digest() == members[0].digest()));
    let counters = members[0].counters();
    assert_eq!((counters.step, counters.updates, counters.samples), (12, 48, 12 * 8 * 300));
    // A member alone makes the same updates as with a reduction at each of them.
    let alone = group_of(fresh(1), &[300], (12, 8)).pop().unwrap();
    let every = Trainer::new(&uncoupled("")).unwrap();
    let every = group_of(vec![every], &[300], (48, 2)).pop().unwrap();
    assert!(largest_difference(&alone, &every) < 1e-4, "{}", largest_difference(&alone, &every));
    assert!(largest_difference(&members[0], &every) > 1e-4, "members update alone in between");
    // A member without samples changes nothing.
    let idle = group_of(fresh(2), &[300, 0], (12, 8)).pop().unwrap();
    assert!(largest_difference(&alone, &idle) < 1e-4);
    let refused = |more: &str| Trainer::new(&uncoupled(more)).unwrap_err().to_string();
    assert!(refused("localUpdates: 0\n").starts_with("localUpdates is 0"));
    assert!(refused("localUpdates: 2\nprecision: F16\n").contains("allowed: 1 with loss scaling"));
}

#[test]
fn compressed_sums_train_alike_on_all_members_and_resume_with_what_was_lost() {
    let exact = group_of(vec![Trainer::new(&uncoupled("")).unwrap()], &[300], (60, 1)).pop().unwrap();
    let start = Trainer::new(&uncoupled("")).unwrap();
    let moved = largest_difference(&exact, &start);
    for compression in ["kind: Bf16", "kind: F16", "kind: TopK, share: 0.2", "kind: PowerSgd, rank: 2"] {
        let spec = uncoupled(&format!("compression: {{ {compression}, samples: 300 }}\n"));
        let fresh = |count: usize| (0..count).map(|_| Trainer::new(&spec).unwrap()).collect::<Vec<_>>();
        let members = group_of(fresh(3), &[200, 90, 10], (60, 1));
        assert!(members.iter().all(|it| it.digest() == members[0].digest()), "{compression}");
        let distance = largest_difference(&members[0], &exact);
        assert!(distance > 0.0 && distance < moved, "{compression}: {distance} of {moved}");
        let undisturbed = group_of(fresh(1), &[300], (20, 1)).pop().unwrap();
        let half = group_of(fresh(1), &[300], (10, 1)).pop().unwrap();
        let saved = half.checkpoint(1, 1, BTreeMap::new()).unwrap();
        let restored = Trainer::restore(&spec, &saved).unwrap().0;
        let continued = group_of(vec![restored], &[300], (10, 1)).pop().unwrap();
        assert_eq!(continued.digest(), undisturbed.digest(), "{compression}");
        let mut forgetful = Trainer::restore(&spec, &saved).unwrap().0;
        forgetful.forget_feedback();
        let forgetful = group_of(vec![forgetful], &[300], (10, 1)).pop().unwrap();
        assert_ne!(forgetful.digest(), undisturbed.digest(), "{compression}: what was lost counts");
    }
    let wrong = uncoupled("compression: { kind: Bf16, share: 0.1, samples: 300 }\n");
    let text = Trainer::new(&wrong).unwrap_err().to_string();
    assert!(text.contains("compression.share is 0.1") && text.contains("TopK only"), "{text}");
}

#[test]
fn survivors_reduce_their_kept_sums_again_as_if_the_lost_samples_were_absent() {
    let mut plain = spec();
    plain.loss.correlation = None;
    let order = SummationOrder::Rank { leaves: 1 };
    let data = Data::of(0);
    let rows = parts(&[100, 120]);
    let mut trainers: Vec<Trainer> = (0..2).map(|_| Trainer::new(&plain).unwrap()).collect();
    let before = trainers[0].digest();
    // The third member of the group never arrives.
    let three = InProcess::group(3, Duration::from_millis(200));
    let two = InProcess::group(2, DEADLINE);
    std::thread::scope(|scope| {
        for (((trainer, mut three), mut two), rows) in trainers.iter_mut().zip(three).zip(two).zip(rows.clone()) {
            let (data, order) = (&data, &order);
            scope.spawn(move || {
                let local = data.rows(rows, |b| trainer.prepare(&[*b], order, &mut three)).unwrap();
                assert!(three.gradient(&local.gradient).unwrap_err().to_string().contains("of 3 members arrived"));
                assert_eq!(trainer.digest(), before, "nothing changes before the commit");
                let reduced = two.gradient(&local.gradient).unwrap();
                assert_eq!(reduced.samples, 220);
                trainer.commit::<engram_train::InProcessError>(local, &reduced).unwrap();
            });
        }
    });
    let mut reference: Vec<Trainer> = (0..2).map(|_| Trainer::new(&plain).unwrap()).collect();
    let two = InProcess::group(2, DEADLINE);
    std::thread::scope(|scope| {
        for ((trainer, mut member), rows) in reference.iter_mut().zip(two).zip(rows) {
            let order = &order;
            scope.spawn(move || step(trainer, rows, order, &mut member));
        }
    });
    for trainer in &trainers {
        assert_eq!(trainer.digest(), reference[0].digest());
    }
}

/// A step whose target overflows the squared error on one member of two.
fn overflow(trainers: &mut [Trainer]) -> Vec<Result<StepReport, String>> {
    let members = InProcess::group(2, DEADLINE);
    let order = SummationOrder::Rank { leaves: 1 };
    std::thread::scope(|scope| {
        let threads: Vec<_> = trainers
            .iter_mut()
            .zip(members)
            .enumerate()
            .map(|(rank, (trainer, mut member))| {
                let order = &order;
                scope.spawn(move || {
                    let mut data = Data::of(1);
                    data.targets[200] = 3e38;
                    let rows = parts(&[150, 150])[rank].clone();
                    data.rows(rows, |b| trainer.step(&[*b], order, &mut member))
                        .map(|(report, _)| report)
                        .map_err(|e: TrainError<_>| e.to_string())
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn overflow_on_one_member_makes_all_skip_with_the_same_scale() {
    let mut scaled = spec();
    scaled.scaler = Some(serde_saphyr::from_str("{ initial: 1024 }").unwrap());
    let mut trainers: Vec<Trainer> = (0..2).map(|_| Trainer::new(&scaled).unwrap()).collect();
    let before = trainers[0].model().clone();
    for report in overflow(&mut trainers) {
        assert_eq!(report.unwrap().outcome, StepOutcome::SkippedOverflow);
    }
    assert_eq!(trainers[0].digest(), trainers[1].digest());
    assert_eq!(trainers[0].model(), &before);
    assert_eq!((trainers[0].scaler().scale(), trainers[0].scaler().state().skipped), (512.0, 1));
    let counters = trainers[0].counters();
    assert_eq!((counters.step, counters.updates, counters.samples), (1, 0, 300), "the data cursor advances");
    let saved = trainers[0].checkpoint(1, 2, BTreeMap::new()).unwrap();
    assert_eq!(Trainer::restore(&scaled, &saved).unwrap().0.digest(), trainers[0].digest());

    // The scale itself changes nothing: powers of two are exact.
    let order = SummationOrder::Rank { leaves: 2 };
    let (mut a, mut b) = (Trainer::new(&scaled).unwrap(), Trainer::new(&spec()).unwrap());
    step(&mut a, 0..300, &order, &mut Alone);
    step(&mut b, 0..300, &order, &mut Alone);
    assert!(largest_difference(&a, &b) < 1e-6);
}

#[test]
fn non_finite_step_without_scaling_is_an_error_that_names_the_step() {
    let mut trainers = fresh(2);
    let before = trainers[0].digest();
    for report in overflow(&mut trainers) {
        let error = report.unwrap_err();
        assert!(error.starts_with("step 0: loss inf or gradient norm"), "{error}");
    }
    assert!(trainers.iter().all(|t| t.digest() == before), "a failed step changes nothing");
}

#[test]
fn restored_trainer_continues_with_the_same_bits() {
    let order = SummationOrder::Rank { leaves: 2 };
    let run = |trainer: &mut Trainer, steps: usize| {
        (0..steps).for_each(|_| {
            step(trainer, 0..300, &order, &mut Alone);
        });
    };
    for optimizer in ["{ kind: AdamW }", "{ kind: Sgd, momentum: 0.9 }", "{ kind: Sgd }"] {
        let mut spec = spec();
        spec.optimizer = serde_saphyr::from_str(optimizer).unwrap();
        spec.scaler = Some(serde_saphyr::from_str("{ growthInterval: 8 }").unwrap());
        let mut undisturbed = Trainer::new(&spec).unwrap();
        undisturbed.model_mut().set_frozen("layers.2.layers.0", true);
        run(&mut undisturbed, 6);
        let cursors = BTreeMap::from([("sampler".to_owned(), 6)]);
        let saved = undisturbed.checkpoint(3, 1, cursors.clone()).unwrap();
        assert_eq!(saved, undisturbed.checkpoint(3, 1, cursors.clone()).unwrap(), "equal states give equal bytes");
        let (mut restored, at) = Trainer::restore(&spec, &saved).unwrap();
        assert_eq!(at, cursors);
        assert_eq!(restored.digest(), undisturbed.digest());
        run(&mut undisturbed, 7);
        run(&mut restored, 7);
        assert_eq!(restored.digest(), undisturbed.digest(), "{optimizer}");
        assert_eq!(restored.scaler().scale(), 131_072.0, "the growth counter survives");
        assert_eq!(restored.model().views(), undisturbed.model().views(), "frozen tensors stay frozen");
    }
}

#[test]
fn checkpoint_restores_at_any_number_of_members_with_the_same_next_step() {
    let invariant = |trainers: Vec<Trainer>, steps: usize| -> Vec<(Trainer, u64)> {
        let world = trainers.len();
        let members = InProcess::group(world, DEADLINE);
        std::thread::scope(|scope| {
            let run = |(rank, (mut trainer, mut member)): (usize, (Trainer, InProcess))| {
                scope.spawn(move || {
                    let bound = |r: usize| (64 * r / world) as u32;
                    let owned = bound(rank)..bound(rank + 1);
                    let rows = LeafSplit::global_rows(GLOBAL, 64, owned.clone());
                    let order = SummationOrder::PartitionInvariant { leaves: 64, owned, global_rows: GLOBAL };
                    let mut loss = 0;
                    for _ in 0..steps {
                        loss = step(&mut trainer, rows.clone(), &order, &mut member).loss.to_bits();
                    }
                    (trainer, loss)
                })
            };
            let threads: Vec<_> = trainers.into_iter().zip(members).enumerate().map(run).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    };
    let trained: Vec<Trainer> = invariant(fresh(4), 3).into_iter().map(|(trainer, _)| trainer).collect();
    let saved = trained[0].checkpoint(1, 4, BTreeMap::new()).unwrap();
    let restored = |world: usize| (0..world).map(|_| Trainer::restore(&spec(), &saved).unwrap().0).collect();
    let (expected, loss) = &invariant(trained, 2)[0];
    for world in 1..=5 {
        for (trainer, own_loss) in invariant(restored(world), 2) {
            assert_eq!((trainer.digest(), own_loss), (expected.digest(), *loss), "{world} members");
        }
    }
}

#[test]
fn damaged_foreign_and_incomplete_checkpoints_are_refused() {
    let trainer = Trainer::new(&spec()).unwrap();
    let saved = trainer.checkpoint(1, 1, BTreeMap::new()).unwrap();
    let refused =
        |spec: &TrainerSpec, checkpoint: &Checkpoint| Trainer::restore(spec, checkpoint).unwrap_err().to_string();
    for name in ["model.safetensors", "optimizer.safetensors"] {
        let mut damaged = saved.clone();
        let bytes = damaged.files.get_mut(name).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        assert!(refused(&spec(), &damaged).starts_with(&format!("{name}: chunk 0 (4 MiB each) is damaged")));
        damaged.files.get_mut(name).unwrap().pop();
        assert!(refused(&spec(), &damaged).starts_with(&format!("{name}: size is ")));
        damaged.files.remove(name);
        assert_eq!(refused(&spec(), &damaged), format!("{name}: missing from the checkpoint"));
    }
    let other: TrainerSpec =
        serde_saphyr::from_str(&SPEC.replace("dense: 1 }", "dense: 1, activation: Tanh }")).unwrap();
    let expected = "checkpoint is of another model: it has {\"dense\":1} at layer 3, expected \
                    {\"dense\":1,\"activation\":\"Tanh\"}";
    assert_eq!(refused(&other, &saved), expected);
    let sgd: TrainerSpec =
        serde_saphyr::from_str(&SPEC.replace("{ kind: AdamW, weightDecay: 0.01 }", "{ kind: Sgd, momentum: 0.5 }"))
            .unwrap();
    assert!(refused(&sgd, &saved).starts_with("checkpoint is of optimizer AdamW { beta1: 0.9,"));
    for at in 0..saved.manifest.len() {
        let mut damaged = saved.clone();
        damaged.manifest[at] ^= 4;
        assert!(damaged.verify().is_err(), "bit of byte {at} of the manifest");
    }
    let mut newer = saved.clone();
    newer.manifest = String::from_utf8(newer.manifest).unwrap().replace("\"format\": 1", "\"format\": 2").into_bytes();
    assert_eq!(refused(&spec(), &newer), "manifest.json: format is 2, expected 1");

    // Places in the manifest are those of the bytes.
    let manifest = saved.verify().unwrap();
    assert_eq!(manifest.tensors.len(), trainer.model().views().len() + 2);
    for entry in manifest.tensors.iter().filter(|t| t.file == "model.safetensors") {
        let bytes = &saved.files[&entry.file][entry.offset..][..4];
        let value = f32::from_le_bytes(bytes.try_into().unwrap());
        assert_eq!(value, trainer.model().tensor(&entry.name).unwrap()[0], "{}", entry.name);
    }
}

#[test]
fn every_setting_changes_what_is_trained() {
    let digest = |yaml: &str| {
        let mut trainer = Trainer::new(&serde_saphyr::from_str(yaml).unwrap()).unwrap();
        (0..4).for_each(|_| {
            step(&mut trainer, 0..300, &SummationOrder::Rank { leaves: 1 }, &mut Alone);
        });
        trainer.digest()
    };
    let base = digest(SPEC);
    let changes = [
        ("kind: Mse", "kind: Huber"),
        ("weight: 0.1", "weight: 0.2"),
        ("target: 0.9", "target: -1"),
        ("weightDecay: 0.01", "weightDecay: 0.02"),
        ("kind: AdamW,", "kind: AdamW, beta1: 0.8,"),
        ("kind: AdamW,", "kind: AdamW, beta2: 0.9,"),
        ("kind: AdamW,", "kind: AdamW, epsilon: 0.1,"),
        ("kind: AdamW,", "kind: Sgd, momentum: 0.9,"),
        ("rate: 0.01", "rate: 0.02"),
        ("warmupSteps: 5", "warmupSteps: 6"),
        ("warmupSteps: 5, cosine: { totalSteps: 100 }", "warmupSteps: 0, cosine: { totalSteps: 9, floor: 0.001 }"),
        ("clipNorm: 1.0", "clipNorm: 0.01"),
        ("clipNorm: 1.0", "scaler: {}"),
        ("seed: 7", "seed: 8"),
        ("seed: 7", "precision: Bf16"),
        ("seed: 7", "precision: F16"),
        ("dropout: 0.2", "dropout: 0.3"),
    ];
    for (from, to) in changes {
        let changed = SPEC.replace(from, to);
        assert_ne!(changed, SPEC, "{from}");
        assert_ne!(digest(&changed), base, "{from} -> {to} has no effect");
    }
    let weights = SPEC.replace("seed: 7", "normalization: Weights");
    let error = Trainer::new(&serde_saphyr::from_str(&weights).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "normalization is Weights, allowed with loss.correlation: Samples");
    let local = weights.replace(", correlation: { weight: 0.1, target: 0.9 }", "").replace("clipNorm: 1.0", "");
    assert_ne!(digest(&local), digest(&local.replace("Weights", "Samples")));
    assert!(serde_saphyr::from_str::<TrainerSpec>(&SPEC.replace("seed", "sed")).is_err(), "unknown keys are refused");
}
