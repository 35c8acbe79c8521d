use std::collections::BTreeMap;
use std::time::Duration;

use engram_neural::LabeledBatch;
use serde_json::{Value, json};

use super::*;
use crate::job::{Job, Rows};
use crate::{Alone, Checkpoint, Ensemble, InProcess, Reduce};

fn job(changes: &[(&str, Value)]) -> Result<Job, String> {
    let mut spec = json!({
        "source": { "synthetic": { "features": 40, "samples": 500, "largest": 20 } },
        "model": {
            "inputs": [{ "field": "mask", "dim": 40 }],
            "layers": [{ "dense": 8, "activation": "Relu" }, { "dropout": 0.1 }, { "dense": 1, "activation": "Sigmoid" }],
            "loss": { "kind": "Mse", "target": "score" },
        },
        "optimizer": { "kind": "Sgd", "rate": 0.5 },
        "batch": 90,
        "steps": 40,
        "privacy": { "epsilon": 20.0, "delta": 1e-3, "clip": 1.0, "noiseMultiplier": 1.0 },
    });
    for (at, value) in changes {
        if *at == "/model/init" {
            spec["model"]["init"] = value.clone();
            continue;
        }
        match spec.pointer_mut(at) {
            Some(place) => *place = value.clone(),
            None => spec[&at[1..]] = value.clone(),
        }
    }
    let mut job = Job::new(&serde_json::from_value(spec).unwrap()).map_err(|error| error.to_string())?;
    job.set_noise_secret(NoiseSecret::new(&[7; 32]).unwrap());
    Ok(job)
}

/// One step of a member.
fn step<R: Reduce>(job: &Job, models: &mut Ensemble, rank: usize, members: usize, reduce: &mut R)
where
    R::Error: std::error::Error + 'static,
{
    let data = job.dataset().unwrap();
    let (rows, order) = job.part(rank, members);
    let samples = job.samples(0, &data, models.counters().step, &rows);
    let batches: Vec<Rows> = samples.iter().map(|samples| Rows::of(models.first().model(), &data, samples)).collect();
    let positions: Vec<Vec<u32>> = samples.iter().map(|it| it.iter().map(|sample| *sample as u32).collect()).collect();
    let labeled = batches.iter().zip(&positions).map(|(rows, positions)| {
        let data = rows.labeled(0).unwrap();
        LabeledBatch { batch: data.batch.at_positions(positions).unwrap(), ..data }
    });
    let local = models.prepare(&labeled.collect::<Vec<_>>(), &order, reduce).unwrap();
    let sum = reduce.gradient(local.gradient()).unwrap();
    models.commit::<R::Error>(local, &sum).unwrap();
}

fn digest_of(job: &Job, members: usize, steps: u64) -> u128 {
    let group = InProcess::group(members, Duration::from_secs(60));
    std::thread::scope(|scope| {
        let threads: Vec<_> = group
            .into_iter()
            .enumerate()
            .map(|(rank, mut reduce)| {
                scope.spawn(move || {
                    let mut models = job.models().unwrap();
                    (0..steps).for_each(|_| step(job, &mut models, rank, members, &mut reduce));
                    models.digest()
                })
            })
            .collect();
        let digests: Vec<u128> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(digests.iter().all(|digest| *digest == digests[0]), "all ranks have the same parameters");
        digests[0]
    })
}

#[test]
fn members_use_disjoint_poisson_samples_and_any_number_of_them_gives_the_same_bits() {
    let job = job(&[("/accumulate", 2.into()), ("/batch", 45.into())]).unwrap();
    let data = job.dataset().unwrap();
    let secret = NoiseSecret::new(&[7; 32]).unwrap();
    for step in 0..3 {
        let parts = (0..3).map(|rank| job.samples(0, &data, step, &job.part(rank, 3).0));
        let mut all: Vec<usize> = parts.flatten().flatten().collect();
        all.sort_unstable();
        assert_eq!(all, secret.sample(step, 450, 0.2), "every sample of a step is computed once");
    }
    let alone = digest_of(&job, 1, 4);
    assert_eq!(alone, digest_of(&job, 3, 4));
}

#[test]
fn noise_of_a_group_has_the_variance_of_one_release_even_in_an_empty_step() {
    let job = job(&[("/privacy/noiseMultiplier", 2.0.into()), ("/model/layers/0/dense", 4_000.into())]).unwrap();
    let spec = job.spec.privacy.unwrap();
    let secret = NoiseSecret::new(&[7; 32]).unwrap();
    let parameters = 20_000;
    let part = |step| PrivateGradient { sum: PrivateSum::new(parameters), samples: 0, loss: 0.0, step, spec, secret };
    let variance = |values: &[f32]| values.iter().map(|it| f64::from(*it).powi(2)).sum::<f64>() / values.len() as f64;
    // (z C / expected)^2, whether one or four members take part and however few samples there are.
    let expected = (2.0_f64 / 90.0).powi(2);
    for members in [1, 4] {
        let parts: Vec<PrivateGradient> = (0..members).map(|_| part(3)).collect();
        let release = PrivateGradient::release(&parts.iter().collect::<Vec<_>>()).unwrap();
        let measured = variance(&release.values) / expected;
        assert!((measured - 1.0).abs() < 0.05, "{members}: {measured}");
    }
    let values = |step| PrivateGradient::release(&[&part(step)]).unwrap().values;
    assert_eq!(values(3), values(3), "a repeated step is the same release");
    assert_ne!(values(3), values(4));
    assert_ne!(values(3)[..PART], values(3)[PART..2 * PART], "parts have their own noise");
    let mut models = job.models().unwrap();
    let (before, order) = (models.first().digest(), job.part(0, 1).1);
    let local = models.prepare(&[], &order, &mut Alone).unwrap();
    let sum = Alone.gradient(local.gradient()).unwrap();
    let report = models.commit::<crate::SumError>(local, &sum).unwrap();
    assert_eq!((report.outcome, report.samples), (crate::StepOutcome::Applied, 0));
    assert_ne!(models.first().digest(), before, "an empty step is released and charged");
    assert_eq!(models.first().charged_steps(), 1);
}

#[test]
fn each_sample_moves_the_sum_by_at_most_the_clip() {
    let job = job(&[("/privacy/clip", 1e-3.into())]).unwrap();
    let data = job.dataset().unwrap();
    let mut models = job.models().unwrap();
    let mut steps_of = |samples: &[usize]| {
        let rows = Rows::of(models.first().model(), &data, samples);
        let local = models.prepare(&[rows.labeled(0).unwrap()], &job.part(0, 1).1, &mut Alone).unwrap();
        let LocalGradient::Private(gradient) = local.gradient().clone() else { panic!("a private sum") };
        gradient.sum.steps().to_vec()
    };
    let (with, without) = (steps_of(&[3, 5, 8, 11]), steps_of(&[3, 5, 8]));
    let length = with.iter().zip(&without).map(|(a, b)| ((a - b) as f64).powi(2)).sum::<f64>().sqrt();
    let bound = engram_federated::privacy::clipping::STEPS_PER_NORM as f64;
    assert!(length <= bound && length > 0.99 * bound, "{length} of {bound}");
}

#[test]
fn a_sum_without_clipping_is_the_gradient_of_the_batch() {
    let private = job(&[("/privacy/clip", 10.0.into())]).unwrap();
    let plain = job(&[("/privacy", Value::Null)]).unwrap();
    let data = plain.dataset().unwrap();
    let gradient = |job: &Job| {
        let mut models = job.models().unwrap();
        let rows = Rows::of(models.first().model(), &data, &(0..90).collect::<Vec<_>>());
        models.prepare(&[rows.labeled(0).unwrap()], &job.part(0, 1).1, &mut Alone).unwrap().gradient().clone()
    };
    let (LocalGradient::Private(private), LocalGradient::Sum(plain)) = (gradient(&private), gradient(&plain)) else {
        panic!("a private sum and a plain one")
    };
    let unit = 10.0 / engram_federated::privacy::clipping::STEPS_PER_NORM as f64;
    for (step, value) in private.sum.steps().iter().zip(&plain.values) {
        // Each of 90 samples is rounded by at most half a step.
        assert!((*step as f64 * unit - f64::from(*value)).abs() < 90.0 * unit, "{step} {value}");
    }
    assert!(plain.values.iter().any(|value| f64::from(*value).abs() > 1_000.0 * unit));
    assert_eq!((private.samples, plain.samples), (90, 90));
    assert!((private.loss - plain.loss).abs() < 1e-3);
}

#[test]
fn training_learns_within_its_budget_and_stops_at_it() {
    let job = job(&[
        ("/steps", 60.into()),
        ("/source/synthetic/samples", 2_000.into()),
        ("/batch", 400.into()),
        ("/privacy/delta", 1e-4.into()),
    ])
    .unwrap();
    let data = job.dataset().unwrap();
    let mut models = job.models().unwrap();
    let before = crate::job::evaluate(models.first().model(), job.spec.loss.kind, &data).unwrap();
    for _ in 0..60 {
        step(&job, &mut models, 0, 1, &mut Alone);
    }
    let after = crate::job::evaluate(models.first().model(), job.spec.loss.kind, &data).unwrap();
    assert!(after.squared_error < 0.7 * before.squared_error, "{before:?} {after:?}");
    let spent = job.spec.privacy.unwrap().spent(60);
    assert!(spent > 1.0 && spent <= 20.0, "{spent}");
    let refused = models.prepare(&[], &job.part(0, 1).1, &mut Alone).unwrap_err().to_string();
    assert_eq!(refused, "privacy budget exhausted: step 60 does not fit epsilon 20 at delta 1e-4");
}

#[test]
fn charges_are_part_of_checkpoints_and_a_repeated_step_is_the_same_release() {
    let job = job(&[]).unwrap();
    let mut models = job.models().unwrap();
    (0..3).for_each(|_| step(&job, &mut models, 0, 1, &mut Alone));
    let saved: Checkpoint = models.checkpoint(1, 1, BTreeMap::new()).unwrap();
    assert_eq!(saved.verify().unwrap().privacy, Some(PrivacyCharge { steps: 3 }));
    assert!(!String::from_utf8_lossy(&saved.manifest).contains("secret"));
    step(&job, &mut models, 0, 1, &mut Alone);
    let (mut restored, _) = job.restore(&saved).unwrap();
    assert_eq!(restored.first().charged_steps(), 3);
    step(&job, &mut restored, 0, 1, &mut Alone);
    assert_eq!(restored.digest(), models.digest());
    let mut other = job.clone();
    other.set_noise_secret(NoiseSecret::new(&[8; 32]).unwrap());
    let (mut restored, _) = other.restore(&saved).unwrap();
    step(&other, &mut restored, 0, 1, &mut Alone);
    assert_ne!(restored.digest(), models.digest());
}

#[test]
fn what_the_accountants_do_not_cover_is_refused_with_the_reason() {
    let refused = |at: &str, value: Value| job(&[(at, value)]).unwrap_err();
    for (at, value, message) in [
        ("/ensemble", json!(2), "spec.replay.ensemble is above 1; allowed: 1 with privacy"),
        ("/syncEvery", json!(2), "spec.replay.syncEvery is above 1; allowed: 1 with privacy"),
        ("/compression", json!({ "kind": "TopK" }), "spec.replay.compression is set; allowed: absent with privacy"),
        ("/parallelism", json!({}), "spec.replay.parallelism is set; allowed: absent with privacy"),
        ("/precision", json!("F16"), "spec.replay.precision is F16; allowed: F32 or Bf16 with privacy"),
        ("/privacy/clip", json!(0.0), "spec.replay.privacy.clip is 0; allowed: above 0"),
        ("/privacy/noiseMultiplier", json!(0.01), "spec.replay.privacy.noiseMultiplier is 0.01; allowed: 0.1 to 64"),
        ("/privacy/delta", json!(0.01), "spec.replay.privacy.delta is 0.01; allowed: above 0 and below 1/population"),
        ("/privacy/epsilon", json!(0.0), "spec.replay.privacy.epsilon is 0; allowed: above 0"),
        ("/batch", json!(451), "spec.replay.batch is 451; allowed: at most 450 with accumulate 1 and privacy"),
        ("/privacy/epsilon", json!(1.0), "spec.replay.steps is 40; allowed: at most "),
    ] {
        let text = refused(at, value);
        assert!(text.starts_with(message), "{text}");
    }
    let correlation = json!({ "kind": "Mse", "target": "score", "correlation": { "weight": 0.1, "target": 0.9 } });
    assert!(refused("/model/loss", correlation).starts_with("spec.replay.model.loss.correlation is set"));
    let buffer = json!({ "buffer": { "name": "b" } });
    assert!(refused("/source", buffer).starts_with("spec.replay.source.buffer is set; allowed: another source"));
    assert!(refused("/model/init", json!({ "run": "a" })).starts_with("spec.replay.model.init.run is set"));
    let location = json!({ "location": { "url": "s3://b/c" } });
    assert!(refused("/checkpoint", location).starts_with("spec.replay.checkpoint.location is set"));
}
