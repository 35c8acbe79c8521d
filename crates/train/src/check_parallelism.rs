//! The logical devices of a manifest, checked.

use engram_api::{PipelineDevices, ReplayRun, ReplaySource, SumOrder};
use engram_neural::Parallelism;

use crate::job::{JobError, LEAVES, LOCAL_LEAVES, field};

/// Most pipelines, and most stages of a pipeline.
const MAX_DEVICES: u64 = 16;
/// Most micro-batches of a worker.
const MAX_MICRO_BATCHES: u64 = 256;

/// Returns the devices of each worker, and into how many leaves they split each batch.
///
/// # Errors
/// A number is out of range, or excludes another setting.
pub(crate) fn devices(run: &ReplayRun) -> Result<(Option<Parallelism>, u32), JobError> {
    let Some(it) = &run.parallelism else { return Ok((None, LOCAL_LEAVES)) };
    for (name, value) in [("spec.replay.parallelism.data", it.data), ("spec.replay.parallelism.pipeline", it.pipeline)]
    {
        if !(1..=MAX_DEVICES).contains(&value) {
            return Err(field(name, value, format!("1 to {MAX_DEVICES}")));
        }
    }
    let layers = run.model.layers.len() as u64;
    if it.pipeline > layers {
        let allowed = format!("1 to {}, the layers of the model", layers.min(MAX_DEVICES));
        return Err(field("spec.replay.parallelism.pipeline", it.pipeline, allowed));
    }
    if run.model.loss.correlation.is_some() {
        let allowed = "absent with loss.correlation, whose gradients follow from the whole batch";
        return Err(field("spec.replay.parallelism", "set", allowed));
    }
    let is_invariant = run.order == SumOrder::PartitionInvariant;
    if let Some(count) = it.micro_batches {
        const FIELD: &str = "spec.replay.parallelism.microBatches";
        if is_invariant {
            let allowed = format!("absent with order PartitionInvariant, which splits each batch into {LEAVES} parts");
            return Err(field(FIELD, count, allowed));
        }
        if !count.is_power_of_two() || count > MAX_MICRO_BATCHES {
            return Err(field(FIELD, count, format!("a power of two from 1 to {MAX_MICRO_BATCHES}")));
        }
    }
    if it.over == PipelineDevices::Workers {
        check_workers(run)?;
    }
    let leaves = it.micro_batches.map_or(LOCAL_LEAVES, |count| count as u32);
    if it.over == PipelineDevices::Devices && !is_invariant && it.data > u64::from(leaves) {
        let allowed = format!("1 to {}, the micro-batches", u64::from(leaves).min(MAX_DEVICES));
        return Err(field("spec.replay.parallelism.data", it.data, allowed));
    }
    Ok((Some(Parallelism { data: it.data as usize, pipeline: it.pipeline as usize }), leaves))
}

/// Refuses what members that share the layers of a model cannot do.
fn check_workers(run: &ReplayRun) -> Result<(), JobError> {
    const OVER: &str = "with parallelism.over Workers";
    if matches!(run.source, ReplaySource::Buffer(_)) {
        let allowed = "Devices with source.buffer: the workers of a pipeline would draw different items from a buffer that changes";
        return Err(field("spec.replay.parallelism.over", PipelineDevices::Workers, allowed));
    }
    if run.sync_every > 1 {
        return Err(field("spec.replay.syncEvery", run.sync_every, format!("1 {OVER}")));
    }
    if run.compression.is_some() {
        return Err(field("spec.replay.compression", "set", format!("absent {OVER}")));
    }
    if run.balance.is_some() {
        return Err(field("spec.replay.balance", "set", format!("absent {OVER}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::Alone;
    use crate::job::{Job, Rows};

    fn job(changes: &[(&str, Value)]) -> Result<Job, String> {
        let mut spec = json!({
            "source": { "synthetic": { "features": 30, "samples": 400, "largest": 20 } },
            "model": {
                "inputs": [{ "field": "mask", "dim": 30 }],
                "layers": [{ "dense": 8, "activation": "Relu" }, { "dropout": 0.2 }, { "dense": 4 }, { "dense": 1 }],
                "loss": { "kind": "Mse", "target": "score" },
            },
            "optimizer": { "rate": 0.01 }, "batch": 64, "steps": 12,
        });
        changes.iter().for_each(|(at, value)| match spec.pointer_mut(at) {
            Some(place) => *place = value.clone(),
            None => spec[&at[1..]] = value.clone(),
        });
        let run = serde_json::from_value(spec).map_err(|error| error.to_string())?;
        Job::new(&run).map_err(|error| error.to_string())
    }

    /// Digest of the training, saved and restored in the middle.
    fn digest(job: &Job) -> u128 {
        let data = job.dataset().unwrap();
        let mut trained = job.models().unwrap();
        for step in 0..12 {
            if step == 6 {
                trained = job.restore(&trained.checkpoint(1, 1, Default::default()).unwrap()).unwrap().0;
            }
            let (rows, order) = job.part(0, 1);
            let samples: Vec<_> = (0..job.ensemble).flat_map(|it| job.samples(it, &data, step, &rows)).collect();
            let rows: Vec<Rows> =
                samples.iter().map(|samples| Rows::of(trained.first().model(), &data, samples)).collect();
            let batches: Vec<_> = rows.iter().map(|rows| rows.labeled(0).unwrap()).collect();
            let local = trained.prepare(&batches, &order, &mut Alone).unwrap();
            let reduced = crate::Reduce::gradient(&mut Alone, local.gradient()).unwrap();
            trained.commit::<crate::SumError>(local, &reduced).unwrap();
            assert_eq!(trained.first().bubble().is_some(), job.parallelism.is_some());
        }
        trained.digest()
    }

    #[test]
    fn devices_change_no_bit_of_a_training() {
        let options: [&[(&str, Value)]; 5] = [
            &[],
            &[("/order", "PartitionInvariant".into())],
            &[("/syncEvery", 2.into()), ("/accumulate", 2.into())],
            &[("/precision", "F16".into()), ("/ensemble", 2.into())],
            &[("/compression", json!({ "kind": "TopK" }))],
        ];
        for options in options {
            let with =
                |parallelism: Value| digest(&job(&[options, &[("/parallelism", parallelism)]].concat()).unwrap());
            let unsplit = digest(&job(options).unwrap());
            for (data, pipeline) in [(1, 1), (1, 2), (1, 3), (1, 4), (4, 1), (2, 3)] {
                let found = with(json!({ "data": data, "pipeline": pipeline }));
                assert_eq!(found, unsplit, "{data} x {pipeline} with {options:?}");
            }
        }
        let of = |parallelism: Value| digest(&job(&[("/parallelism", parallelism)]).unwrap());
        let split = of(json!({ "microBatches": 16 }));
        assert_eq!(of(json!({ "microBatches": 16, "pipeline": 4, "data": 2 })), split);
        assert_ne!(
            split,
            of(json!({ "microBatches": 4 })),
            "the number of micro-batches is part of the order of additions"
        );
    }

    #[test]
    fn parallelism_that_is_not_possible_is_refused() {
        let refused = |parallelism: Value, more: &[(&str, Value)]| {
            job(&[&[("/parallelism", parallelism)], more].concat()).unwrap_err()
        };
        let at = |name: &str, text: &str| format!("spec.replay.parallelism{name} is {text}");
        assert_eq!(
            refused(json!({ "pipeline": 5 }), &[]),
            at(".pipeline", "5; allowed: 1 to 4, the layers of the model")
        );
        assert_eq!(refused(json!({ "pipeline": 0 }), &[]), at(".pipeline", "0; allowed: 1 to 16"));
        assert_eq!(refused(json!({ "data": 17 }), &[]), at(".data", "17; allowed: 1 to 16"));
        assert_eq!(refused(json!({ "data": 8 }), &[]), at(".data", "8; allowed: 1 to 4, the micro-batches"));
        let text = refused(json!({ "microBatches": 6 }), &[]);
        assert_eq!(text, at(".microBatches", "6; allowed: a power of two from 1 to 256"));
        let text = refused(json!({ "microBatches": 8 }), &[("/order", "PartitionInvariant".into())]);
        assert!(text.starts_with(&at(".microBatches", "8; allowed: absent with order PartitionInvariant")), "{text}");
        let correlated = json!({ "kind": "Mse", "target": "score", "correlation": { "weight": 0.1, "target": 0.9 } });
        let text = refused(json!({ "pipeline": 2 }), &[("/model/loss", correlated)]);
        assert!(text.starts_with(&at("", "set; allowed: absent with loss.correlation")), "{text}");
    }
}
