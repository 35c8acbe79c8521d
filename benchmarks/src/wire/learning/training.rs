//! Training on a cluster of processes: efficiency at two workers, the pause for a checkpoint, and the recovery from a killed worker.
//!
//! Each worker computes with one thread, so that two workers do not share the processors that one of them would use alone.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::row::{Budget, Figure, Row};
use crate::wire::processes::Cluster;

/// Samples of a batch: large enough that a step computes for most of its time.
const BATCH: u32 = 2_048;
const STEPS: u64 = 500;
/// Steps between two checkpoints.
const CHECKPOINT_STEPS: u64 = 100;
/// Rounds of one worker and of two, in turn.
const ROUNDS: usize = 3;

/// Limit of the wait for a training to begin, and for its recovery.
const LIMIT: Duration = Duration::from_secs(60);
/// Time between two reads of the status of a run.
const POLL: Duration = Duration::from_millis(50);

/// Figures of a run in its last two seconds.
struct Training {
    samples_per_second: f64,
    step_seconds: f64,
    stall_seconds: f64,
}

/// Measures runs of kind `Replay` on one worker and on two.
///
/// # Errors
/// A cluster does not start, or a run fails.
pub(in crate::wire) fn training_rows(scratch: &Path) -> Result<Vec<Row>> {
    let (mut ratios, mut alone, mut together, mut stalls) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        eprintln!("train: clusters of one and of two workers, round {round} of {ROUNDS}");
        let (one, two) = (train(scratch, 1)?, train(scratch, 2)?);
        ratios.push(two.samples_per_second / (2.0 * one.samples_per_second));
        alone.push(one.samples_per_second / 1e3);
        together.push(two.samples_per_second / 1e3);
        stalls.push(100.0 * two.stall_seconds / (CHECKPOINT_STEPS as f64 * two.step_seconds));
    }
    let size = "batch of 2,048, one thread per worker, size: workers";
    let throughput = format!("training of the reference model, {size}");
    let rows = vec![
        Row::higher(throughput.clone(), 1, "k samples/s", highest(alone)),
        Row::higher(throughput, 2, "k samples/s", highest(together)),
        Row::higher(format!("samples/s over those of the workers alone, {size}"), 2, "ratio", highest(ratios))
            .with_budgets([Budget::Absolute(0.85)]),
        Row::lower(
            format!("longest pause for a checkpoint every 100 steps, {size}"),
            2,
            "% of the steps",
            lowest(stalls),
        )
        .with_budgets([Budget::Absolute(2.0)]),
        recovery_row(scratch)?,
    ];
    Ok(rows)
}

/// Kills one of two workers with SIGKILL: the time from the last step of both to the first one of the survivor, as the run reports it.
fn recovery_row(scratch: &Path) -> Result<Row> {
    let mut took_ms = Vec::new();
    for round in 1..=ROUNDS {
        eprintln!("train: recovery, round {round} of {ROUNDS}");
        took_ms.push(1e3 * recovery_seconds(scratch)?);
    }
    let title = "recovery after SIGKILL of a worker (peer: heartbeat timeout of 1 s), size: workers";
    Ok(Row::lower(title, 2, "ms", lowest(took_ms)).workload("recovery").with_budgets([Budget::Absolute(1e3)]))
}

fn recovery_seconds(scratch: &Path) -> Result<f64> {
    let cluster = cluster(scratch, 2)?;
    let file = cluster.folder().join("run.yaml");
    std::fs::write(&file, manifest(512, 1_000_000).to_string())?;
    cluster.engram(["run", file.to_str().context("the folder is not UTF-8")?, "--no-wait"])?;
    let run = wait(&cluster, |run| run["metrics"]["members"] == 2.0 && run["epoch"].as_u64() > Some(100))?;
    // The other one than the driver: with one replica the record of the run would wait for the restart.
    let driver = run["driver"].as_u64().context("the run has no driver")?;
    cluster.kill_worker(usize::from(driver == 0))?;
    let run = wait(&cluster, |run| run["metrics"]["recovery_seconds"].as_f64() > Some(0.0))?;
    run["metrics"]["recovery_seconds"].as_f64().context("the run has no recovery_seconds")
}

/// Waits until the only run satisfies a condition; returns it.
fn wait(cluster: &Cluster, is_satisfied: impl Fn(&Value) -> bool) -> Result<Value> {
    let started = Instant::now();
    while started.elapsed() < LIMIT {
        // A worker that was just killed cannot answer.
        if let Ok(listed) = cluster.engram(["list", "runs", "-o", "json"]) {
            let run = serde_json::from_slice::<Value>(&listed)?["items"][0].take();
            ensure!(run["phase"] != "Failed", "the run failed: {run}");
            if is_satisfied(&run) {
                return Ok(run);
            }
        }
        // Runs are only listed on request: there is no notification.
        std::thread::sleep(POLL);
    }
    anyhow::bail!("the run made no progress within {} s", LIMIT.as_secs())
}

fn train(scratch: &Path, workers: u32) -> Result<Training> {
    let cluster = cluster(scratch, workers)?;
    let file = cluster.folder().join("run.yaml");
    std::fs::write(&file, manifest(BATCH, STEPS).to_string())?;
    cluster.engram(["run", file.to_str().context("the folder is not UTF-8")?])?;
    let listed: Value = serde_json::from_slice(&cluster.engram(["list", "runs", "-o", "json"])?)?;
    let run = &listed["items"][0];
    ensure!(run["phase"] == "Succeeded", "the run did not succeed: {run}");
    let figure = |name: &str| run["metrics"][name].as_f64().with_context(|| format!("the run has no {name}"));
    Ok(Training {
        samples_per_second: figure("samples_per_second")?,
        step_seconds: figure("step_seconds")?,
        stall_seconds: figure("checkpoint_stall_seconds")?,
    })
}

fn cluster(scratch: &Path, workers: u32) -> Result<Cluster> {
    let spec = json!({ "workers": workers, "partitions": 4, "capacity": { "memories": 1_000 } });
    Cluster::start(scratch, &spec, |command| Ok(command.env("RAYON_NUM_THREADS", "1").spawn()?))
}

fn manifest(batch: u32, steps: u64) -> Value {
    let block = json!({ "residual": [{ "dense": 256, "activation": "Relu" }, { "dense": 256 }] });
    json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": "train" },
        "spec": { "clusterRef": { "name": "bench" }, "kind": "Replay", "replay": {
            "source": { "synthetic": { "features": 500, "samples": 10_000 } },
            "model": {
                "inputs": [{ "field": "mask", "dim": 500 }],
                "layers": [
                    { "dense": 256, "activation": "Relu" }, block, block, { "dense": 128, "activation": "Relu" },
                    { "dense": 64, "activation": "Relu" }, { "dense": 1, "activation": "Sigmoid" },
                ],
                "loss": { "kind": "Mse", "target": "score" },
            },
            "optimizer": { "kind": "AdamW", "rate": 1e-4, "weightDecay": 1e-5 },
            "batch": batch, "steps": steps, "checkpoint": { "every": CHECKPOINT_STEPS },
        } },
    })
}

fn highest(values: Vec<f64>) -> Figure {
    let best = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Figure { best, ..lowest(values) }
}

/// Summarizes rounds; the best one is the lowest.
fn lowest(mut values: Vec<f64>) -> Figure {
    values.sort_by(f64::total_cmp);
    Figure { best: values[0], median: values[values.len() / 2], repeats: ROUNDS as u32 }
}
