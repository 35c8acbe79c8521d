//! Replay runs: workers train together, from generated data and from a replay buffer, survive the death of each, and predict.

use super::runs;
use super::settings::train_with_settings;
use crate::has_ended;
use engram_client::{Buffer, BufferSpec, Column, DType, Field, Items, RateLimit};
use engram_proto::v1::{PredictRequest, PredictSample};
use engram_tests::{Cluster, ClusterBuilder, DEADLINE, cluster_manifest, wait_for};
use serde_json::Value;

pub(super) const STEPS: u64 = 1_500;
/// So many that a busy machine still kills a worker in the middle.
const STEPS_IN_STAGES: u64 = 3_000;
/// As above, of a larger model.
const STEPS_BY_BUCKET: u64 = 300;
/// Features of the items of the buffer, and their share of the loss of a model that predicts 0 that may be left.
const FEATURES: u64 = 12;
const SHARE: f64 = 0.25;

pub(super) fn manifest(name: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: train }}\n  \
         kind: Replay\n  replay:\n    source: {{ synthetic: {{ features: 60, samples: 1000, largest: 20 }} }}\n    model:\n      \
         inputs: [{{ field: mask, dim: 60 }}]\n      layers: [{{ dense: 32, activation: Relu }}, {{ dropout: 0.1 }}, {{ dense: 1, \
         activation: Sigmoid }}]\n      loss: {{ kind: Mse, target: score }}\n    optimizer: {{ rate: 0.003 }}\n    batch: 128\n    \
         steps: {STEPS}\n    order: PartitionInvariant\n    checkpoint: {{ every: 500 }}\n"
    )
}

fn run(cluster: &Cluster) -> Option<Value> {
    let ran = cluster.engram(&["list", "runs", "-o", "json"]);
    // Runs of partitions without primary are not listed.
    (ran.code == Some(0)).then(|| ran.json()["items"][0].clone()).filter(|run| run["phase"].is_string())
}

fn wait_for_step(cluster: &Cluster, step: u64) -> Value {
    wait_for("the run to train", DEADLINE, || run(cluster).filter(|run| run["epoch"].as_u64() >= Some(step)))
}

fn wait_for_end(cluster: &Cluster) -> Value {
    let ended = wait_for("the run to end", DEADLINE, || run(cluster).filter(has_ended));
    assert_eq!((&ended["phase"], ended["epoch"].as_u64()), (&"Succeeded".into(), Some(STEPS)), "{ended}");
    ended
}

fn predict(cluster: &Cluster, run: &str, input: &str) -> Value {
    cluster.engram_with(&["predict", run, "--input", "-", "-o", "json"], input).exits_with(0).json()["items"].clone()
}

fn predictions(cluster: &Cluster) -> Value {
    predict(cluster, "model", "0,1,2,3,4\n50,51\n")
}

#[test]
fn killed_workers_cost_a_training_no_step_and_no_bit() {
    let cluster = Cluster::up(&cluster_manifest("train", 1, "  partitions: 4\n"));
    let file = cluster.file("run.yaml", manifest("model") + "    ensemble: 2\n");
    let wrong = cluster.file("wrong.yaml", manifest("wrong").replace("dim: 60", "dim: 61"));
    cluster.engram(&["run", &wrong]).fails_with(2, &["inputs[0].dim is 61", "60"]);
    cluster.engram(&["run", &file]).exits_with(0);
    let undisturbed = runs(&cluster)[0].clone();
    assert!(undisturbed["metrics"]["held_out_correlation"].as_f64() > Some(0.8), "{undisturbed}");
    assert!(undisturbed["metrics"]["held_out_deviation"].as_f64() > Some(0.0), "{undisturbed}");
    assert_eq!(undisturbed["updates"], 2 * STEPS * 128, "{undisturbed}");
    let predicted = predictions(&cluster);
    assert!(predicted[0]["prediction"].as_f64() > predicted[1]["prediction"].as_f64(), "{predicted}");
    let unsplit = train(&cluster, "stages", in_stages(""));
    cluster.engram_with(&["predict", "model", "--input", "-"], "60\n").fails_with(2, &["feature 60", "0 to 59"]);
    cluster.stop();

    // Reductions use the certificates of the workers.
    let mut cluster = ClusterBuilder::new(&cluster_manifest("train", 3, "  partitions: 8\n")).with(&["--tls"]).start();
    // The devices of a worker change no bit either.
    let devices = "    ensemble: 2\n    parallelism: { data: 2, pipeline: 2 }\n";
    let file = cluster.file("run.yaml", manifest("model") + devices);
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let driver = |run: &Value| run["driver"].as_u64().expect("a running run has a driver") as usize;
    let training = wait_for_step(&cluster, 100);
    let member = (driver(&training) + 1) % 3;
    let pid = cluster.worker(member).expect("the worker runs");
    cluster.kill(pid);
    cluster.wait_for_restart(member, pid);
    let training = wait_for_step(&cluster, 300);
    let driver = driver(&training);
    let pid = cluster.worker(driver).expect("the worker runs");
    cluster.kill(pid);
    cluster.wait_for_restart(driver, pid);
    let ended = wait_for_end(&cluster);
    assert_eq!(ended["outputs"]["digest"], undisturbed["outputs"]["digest"], "{ended}");
    assert_eq!(ended["updates"], undisturbed["updates"], "{ended}");
    assert_eq!(predictions(&cluster), predicted);
    let bubble = ended["metrics"]["pipeline_bubble"].as_f64();
    assert!(bubble > Some(0.0) && bubble < Some(1.0), "{ended}");
    // Of the last generation, whose members have all joined again.
    let figure = |name: &str| ended["metrics"][name].as_f64();
    assert!(figure("link_latency_seconds") > Some(0.0) && figure("link_bytes_per_second") > Some(0.0), "{ended}");
    let profile = cluster.engram(&["profile", "model"]).exits_with(0);
    assert!(profile.stdout.contains("slowest link: "), "{}", profile.stdout);
    train_in_stages(&mut cluster, &unsplit);
    train_by_bucket(&mut cluster);
    train_from_buffer(&mut cluster);
    train_with_options(&cluster);
    train_privately(&cluster);
    train_an_ensemble(&cluster);
    train_from_tables(&cluster);
    train_with_settings(&cluster);
    wait_for_workers(&cluster);
    cluster.stop();
}

/// A manifest in the order of ranks, with a pipeline over the workers.
fn in_stages(parallelism: &str) -> String {
    let steps = format!("steps: {STEPS_IN_STAGES}");
    manifest("stages").replace(&format!("steps: {STEPS}\n    order: PartitionInvariant"), &steps) + parallelism
}

/// Workers that are stages have the bits of one worker, also after one was killed.
fn train_in_stages(cluster: &mut Cluster, unsplit: &Value) {
    let wrong = cluster.file("stages.yaml", in_stages("    parallelism: { over: Workers, data: 2, pipeline: 2 }\n"));
    let text = "spec.replay.parallelism is 2 pipelines of 2 workers; allowed: data times pipeline at most 3";
    cluster.engram(&["run", &wrong]).fails_with(2, &[text]);
    let file = cluster.file("stages.yaml", in_stages("    parallelism: { over: Workers, pipeline: 3 }\n"));
    let workers = [0, 1, 2].map(|worker| cluster.worker(worker).expect("the worker runs"));
    cluster.engram(&["run", &file, "--rerun", "--no-wait"]).exits_with(0);
    let of = |cluster: &Cluster| named(cluster, "stages").filter(|run| run["driver"].is_u64());
    let training =
        wait_for("a training in stages", DEADLINE, || of(cluster).filter(|run| run["epoch"].as_u64() >= Some(50)));
    let member = (training["driver"].as_u64().expect("the filter checked it") as usize + 1) % 3;
    cluster.kill(workers[member]);
    cluster.wait_for_restart(member, workers[member]);
    let ended = wait_for("the training in stages to end", DEADLINE, || named(cluster, "stages").filter(has_ended));
    assert_eq!((&ended["phase"], ended["epoch"].as_u64()), (&"Succeeded".into(), Some(STEPS_IN_STAGES)), "{ended}");
    assert!(ended["metrics"]["failed_members"].as_f64() >= Some(1.0), "{ended}");
    assert!(ended["metrics"]["pipeline_bubble"].as_f64() > Some(0.0), "{ended}");
    assert_eq!(ended["outputs"]["digest"], unsplit["outputs"]["digest"], "{ended}");
}

/// Workers reduce the gradients of a larger model during the backward pass, also after one was killed.
fn train_by_bucket(cluster: &mut Cluster) {
    let small = "layers: [{ dense: 32, activation: Relu }, { dropout: 0.1 }";
    let large =
        "layers: [{ dense: 600, activation: Relu }, { dense: 600, activation: Relu }, { dense: 600, activation: Relu }";
    let steps = format!("steps: {STEPS_BY_BUCKET}");
    let text = manifest("buckets").replace(small, large);
    assert!(text.contains(large), "{text}");
    let text = text.replace(&format!("steps: {STEPS}\n    order: PartitionInvariant"), &steps);
    let file = cluster.file("buckets.yaml", text);
    let workers = [0, 1, 2].map(|worker| cluster.worker(worker).expect("the worker runs"));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let of = |cluster: &Cluster| named(cluster, "buckets").filter(|run| run["driver"].is_u64());
    let training = wait_for("a training of a larger model", DEADLINE, || {
        of(cluster).filter(|run| run["metrics"]["hidden_reduction_share"].as_f64() > Some(0.0))
    });
    let member = (training["driver"].as_u64().expect("the filter checked it") as usize + 1) % 3;
    cluster.kill(workers[member]);
    cluster.wait_for_restart(member, workers[member]);
    let ended =
        wait_for("the larger model to be trained", 3 * DEADLINE, || named(cluster, "buckets").filter(has_ended));
    assert_eq!((&ended["phase"], ended["epoch"].as_u64()), (&"Succeeded".into(), Some(STEPS_BY_BUCKET)), "{ended}");
    assert!(ended["metrics"]["failed_members"].as_f64() >= Some(1.0), "{ended}");
    let profile = cluster.engram(&["profile", "buckets"]).exits_with(0);
    assert!(profile.stdout.contains("hidden by the backward pass: "), "{}", profile.stdout);
}

/// A run that needs more workers than there are says so, and does not train.
fn wait_for_workers(cluster: &Cluster) {
    let file = cluster.file("many.yaml", manifest("many") + "    minWorkers: 4\n");
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let waiting = wait_for_message(cluster, "many", "paused: 3 workers train, spec.replay.minWorkers is 4");
    assert_eq!(waiting["epoch"], 0, "{waiting}");
}

/// Runs a manifest to its end; returns the run.
pub(super) fn train(cluster: &Cluster, name: &str, text: String) -> Value {
    let file = cluster.file(&format!("{name}.yaml"), text);
    cluster.engram(&["run", &file]).exits_with(0);
    named(cluster, name).expect("the run is known")
}

/// Every option of the sums shows in the result or in a figure.
fn train_with_options(cluster: &Cluster) {
    let with = |name: &str, more: &str| {
        let text = manifest(name).replace(&format!("steps: {STEPS}\n    order: PartitionInvariant"), "steps: 60");
        train(cluster, name, text + more)
    };
    let local = with("local", "    order: Fast\n    syncEvery: 4\n    accumulate: 2\n");
    assert_eq!(local["updates"], 60 * 4 * 2 * 128, "{local}");
    let exact = with("exact", "    sync: ParameterServer\n    balance: { every: 5, maxRatio: 3 }\n");
    assert!(exact["metrics"]["part_ratio"].as_f64() >= Some(1.0), "{exact}");
    let compressed = with("compressed", "    compression: { kind: TopK, share: 0.05 }\n");
    let factored = with("factored", "    compression: { kind: PowerSgd, rank: 2 }\n");
    let bytes = |run: &Value| run["metrics"]["reduced_bytes_per_step"].as_f64().expect("a number");
    assert!(4.0 * bytes(&compressed) < bytes(&exact), "{compressed} {exact}");
    assert!(4.0 * bytes(&factored) < bytes(&exact), "{factored} {exact}");
    for run in [&local, &exact, &compressed, &factored] {
        assert!(run["metrics"]["held_out_correlation"].as_f64() > Some(0.3), "{run}");
        assert!(run["metrics"]["ridge_squared_error"].as_f64() > Some(0.0), "{run}");
        assert!(run["metrics"]["boosted_squared_error"].as_f64() > Some(0.0), "{run}");
    }
    assert_ne!(exact["outputs"]["digest"], compressed["outputs"]["digest"]);
}

/// All workers add the same noise, a run shows what it spent, and one that would exceed its budget does not start.
fn train_privately(cluster: &Cluster) {
    let with = |name: &str, steps: u64| {
        let text = manifest(name)
            .replace(&format!("steps: {STEPS}\n    order: PartitionInvariant"), &format!("steps: {steps}"));
        text + "    privacy: { epsilon: 6, delta: 0.0001, clip: 1, noiseMultiplier: 2 }\n"
    };
    let private = train(cluster, "private", with("private", 40));
    let figure = |name: &str| private["metrics"][name].as_f64().expect("a number");
    assert!((1.0..6.0).contains(&figure("epsilon_spent")), "{private}");
    assert_eq!((figure("epsilon_budget"), figure("delta")), (6.0, 0.0001), "{private}");
    let samples = private["updates"].as_u64().expect("a number");
    // Each of 900 samples with a probability of 128/900 in each step: 5,120 and a standard deviation of 67.
    assert!(samples.abs_diff(40 * 128) < 500, "{private}");
    assert!(private["metrics"]["ridge_squared_error"].is_null(), "baselines are fitted without noise: {private}");
    let file = cluster.file("spent.yaml", with("spent", 4_000));
    cluster.engram(&["run", &file]).fails_with(2, &["spec.replay.steps is 4000", "allowed: at most", "epsilon 6"]);
}

/// The members of an ensemble are what a run of one model with their seed is, and predictions are their mean and deviation.
fn train_an_ensemble(cluster: &Cluster) {
    let steps = |name: &str| manifest(name).replace(&format!("steps: {STEPS}"), "steps: 60");
    let pair = train(cluster, "pair", steps("pair") + "    ensemble: 2\n");
    train(cluster, "alone", steps("alone"));
    assert_eq!(pair["metrics"]["ensemble"], 2.0, "{pair}");
    let sample = "0,1,2,3,4\n";
    let asked = cluster.engram_with(&["predict", "pair", "--input", "-", "--members", "-o", "json"], sample);
    let together = asked.exits_with(0).json()["items"][0].clone();
    let [first, second] = [0, 1].map(|member| together["members"][member].as_f64().expect("a prediction"));
    assert_eq!(predict(cluster, "alone", sample)[0]["prediction"].as_f64(), Some(first), "{together}");
    assert_ne!(first, second, "{together}");
    let figure = |name: &str| together[name].as_f64().expect("a number");
    assert!((figure("prediction") - (first + second) / 2.0).abs() < 1e-6, "{together}");
    assert!((figure("deviation") - (first - second).abs() / 2.0).abs() < 1e-6, "{together}");
    let file = cluster.file("many.yaml", steps("many") + "    ensemble: 17\n");
    cluster.engram(&["run", &file]).fails_with(2, &["ensemble", "17"]);
}

fn train_from_tables(cluster: &Cluster) {
    let table = |name: &str, source: &str, (field, dim): (&str, u64), target: &str| {
        format!(
            "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: train }}\n  \
             kind: Replay\n  replay:\n    source: {{ {source} }}\n    model:\n      inputs: [{{ field: {field}, dim: {dim} }}]\n      \
             layers: [{{ dense: 32, activation: Relu }}, {{ dense: 10 }}]\n      loss: {{ kind: CrossEntropy, target: {target} }}\n    \
             optimizer: {{ rate: 0.01 }}\n    batch: 128\n    steps: 100\n"
        )
    };
    let digits = train(cluster, "digits", table("digits", "example: { name: Digits }", ("pixels", 64), "digit"));
    assert!(digits["metrics"]["held_out_accuracy"].as_f64() > Some(0.8), "{digits}");
    assert!(digits["metrics"]["ridge_accuracy"].as_f64() > Some(0.8), "{digits}");
    assert!(digits["metrics"]["boosted_accuracy"].as_f64() > Some(0.8), "{digits}");
    cluster
        .engram_with(&["predict", "digits", "--input", "-"], "1,2\n")
        .fails_with(2, &["reads the numbers of a table", "a header line"]);
    let rows: String = (0..400).map(|row| format!("{row},{},{}\n", row % 7, row / 200)).collect();
    let path = cluster.file("rows.csv", format!("a,b,kind\n{rows}"));
    let source = format!("csv: {{ file: {{ path: {path} }} }}");
    let rows = train(cluster, "rows", table("rows", &source, ("features", 2), "kind"));
    assert!(rows["metrics"]["held_out_accuracy"].as_f64() > Some(0.7), "{rows}");
    // Named columns in any order, with the scale of the training.
    let predicted = predict(cluster, "rows", "b,a\n3,5\n3,395\n");
    assert_eq!((predicted[0]["kind"].as_f64(), predicted[1]["kind"].as_f64()), (Some(0.0), Some(1.0)), "{predicted}");
    cluster.engram_with(&["predict", "rows", "--input", "-"], "a\n3\n").fails_with(2, &["column b is missing"]);
    let path = cluster.file("gap.csv", "a,b,kind\n1,2,0\n3,,1\n");
    let source = format!("csv: {{ file: {{ path: {path} }} }}");
    let gap = cluster.file("gap.yaml", table("gap", &source, ("features", 2), "kind"));
    cluster.engram(&["run", &gap]).fails_with(2, &["line 3, column b: missing; allowed: a number"]);
}

/// A run on the buffer `experience`; `buffer` is YAML of its source.
fn buffer_manifest(name: &str, buffer: &str, rate: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: train }}\n  \
         kind: Replay\n  replay:\n    source: {{ buffer: {{ name: {buffer} }} }}\n    model:\n      inputs: [{{ field: mask, dim: \
         {FEATURES} }}]\n      layers: [{{ dense: 1 }}]\n      loss: {{ kind: Mse, target: score }}\n    optimizer: {{ rate: {rate}, \
         weightDecay: 0, schedule: Cosine }}\n    batch: 64\n    steps: 60\n"
    )
}

/// Features of an item, and their sum of values between -0.5 and 0.5.
fn linear(item: u64) -> (Vec<u16>, f32) {
    let features: Vec<u16> =
        (0..FEATURES).filter(|bit| item.wrapping_mul(0x9e37_79b9) >> bit & 1 == 1).map(|it| it as u16).collect();
    let score = features.iter().map(|feature| f32::from(feature * 5 % 12) / 11.0 - 0.5).sum();
    (features, score)
}

fn items(numbers: std::ops::Range<u64>) -> Items {
    scaled_items(numbers, 1.0)
}

fn scaled_items(numbers: std::ops::Range<u64>, scale: f32) -> Items {
    let all: Vec<(Vec<u16>, f32)> = numbers.map(linear).collect();
    let features: Vec<u8> =
        all.iter().flat_map(|(features, _)| features.iter().flat_map(|it| it.to_le_bytes())).collect();
    let rows = all.iter().map(|(features, _)| features.len() as u32).collect();
    let scores: Vec<u8> = all.iter().flat_map(|(_, score)| (scale * score).to_le_bytes()).collect();
    let subset = Column { rows: Some(rows), ..Column::new("subset", DType::UInt16, vec![], features) };
    let reward = Column::new("reward", DType::Float32, vec![], scores);
    Items { count: all.len(), columns: vec![subset, reward], ..Items::default() }
}

fn append(cluster: &Cluster, numbers: std::ops::Range<u64>) {
    cluster.client(async |client| {
        let buffer = client.buffer("experience").await.expect("it exists");
        buffer.append(items(numbers)).await.expect("failed to append");
    });
}

pub(super) fn named(cluster: &Cluster, name: &str) -> Option<Value> {
    let ran = cluster.engram(&["list", "runs", "-o", "json"]);
    let found = (ran.code == Some(0)).then(|| ran.json()["items"].as_array().cloned()).flatten()?;
    found.into_iter().find(|run| run["name"] == name)
}

fn wait_for_message(cluster: &Cluster, name: &str, message: &str) -> Value {
    let says = |run: &Value| run["message"].as_str().is_some_and(|it| it.contains(message));
    wait_for(message, DEADLINE, || named(cluster, name).filter(says))
}

/// The rate limiter of the buffer stops the run in the middle until items are appended, so that a worker dies within it.
fn train_from_buffer(cluster: &mut Cluster) {
    let fields = vec![
        Field { name: "subset".into(), dtype: DType::UInt16, shape: vec![], jagged: true },
        Field { name: "reward".into(), dtype: DType::Float32, shape: vec![], jagged: false },
    ];
    let limiter = RateLimit { samples_per_insert: 4.0, min_size: 64, min_diff: 0.0, max_diff: 100_000.0 };
    let spec = BufferSpec { limiter: Some(limiter), ..BufferSpec::new("experience", fields, 10_000) };
    cluster.client(async |client| client.create_buffer(&spec).await.map(|_| ()).expect("failed to create the buffer"));
    let source = "experience, fields: { mask: subset, score: reward }, beta: { start: 0.2, end: 0.5, steps: 60 }";
    let fails = |cluster: &Cluster, (name, code): (&str, i32), buffer: &str, rate: &str, texts: &[&str]| {
        let file = cluster.file(&format!("{name}.yaml"), buffer_manifest(name, buffer, rate));
        cluster.engram(&["run", &file]).fails_with(code, texts);
    };
    fails(cluster, ("unknown", 2), "experiences", "0.1", &["source.buffer.name is experiences, which does not exist"]);
    let texts = ["mask (field reward) number[12] or integer[*]", "experience has, reward float32[]"];
    fails(cluster, ("misfit", 2), "experience, fields: { mask: reward, score: reward }", "0.1", &texts);

    let file = cluster.file("linear.yaml", buffer_manifest("linear", source, "0.1") + "    serveEvery: 7\n");
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    wait_for_message(cluster, "linear", "buffer experience has 0 of 64");
    append(cluster, 0..512);
    let waiting = wait_for_message(cluster, "linear", "waiting for inserts");
    let half = waiting["epoch"].as_u64().expect("a number of steps");
    assert!(half < 60, "{waiting}");
    let message =
        PredictRequest { name: "linear".into(), samples: vec![PredictSample::default()], ..Default::default() };
    let updates = cluster.client(async |client| client.predict(message).await.expect("a prediction").updates);
    // A worker that joined later counts from its first step.
    assert!(updates + 7 > half && updates <= half, "weights of {updates} updates at step {half}");
    let member = (waiting["driver"].as_u64().expect("a running run has a driver") as usize + 1) % 3;
    let pid = cluster.worker(member).expect("the worker runs");
    cluster.kill(pid);
    cluster.wait_for_restart(member, pid);
    append(cluster, 512..2_048);
    let ended = wait_for("the run to end", DEADLINE, || named(cluster, "linear").filter(has_ended));
    assert_eq!((&ended["phase"], ended["epoch"].as_u64()), (&"Succeeded".into(), Some(60)), "{ended}");
    // The loss of the steps is weighted; this one is not.
    let tested: Vec<(Vec<u16>, f32)> = (5_001..5_033).map(linear).collect();
    let lines =
        tested.iter().map(|(features, _)| features.iter().map(u16::to_string).collect::<Vec<_>>().join(",") + "\n");
    let predicted = predict(cluster, "linear", &lines.collect::<String>());
    let square = |(item, (_, score)): (usize, &(Vec<u16>, f32))| {
        let predicted = predicted[item]["prediction"].as_f64().expect("a prediction");
        (f64::from(*score).powi(2), (predicted - f64::from(*score)).powi(2))
    };
    let squares = tested.iter().enumerate().map(square).fold((0.0, 0.0), |sums, it| (sums.0 + it.0, sums.1 + it.1));
    assert!(squares.1 < SHARE * squares.0, "squared errors before and after: {squares:?}");
    assert!(ended["metrics"]["loss"].as_f64() < Some(SHARE * squares.0 / 32.0), "{squares:?}: {ended}");
    assert!(ended["metrics"]["priorities_changed"].as_f64() >= Some(32.0 * 64.0), "{ended}");
    let listed = cluster.client(async |client| {
        let buffer: Buffer = client.buffer("experience").await.expect("it exists");
        buffer.list(None, 0).await.expect("failed to list")
    });
    let changed = listed.priorities.iter().filter(|priority| **priority < 0.9).count();
    assert!(changed > 512, "{changed} priorities of {} are errors", listed.len());
    fails(cluster, ("diverges", 1), source, "1e30", &["step ", "not finite", "items of buffer experience: "]);
    assert!(ended["metrics"]["spread_ratio"].as_f64() > Some(0.5), "{ended}");
    collapse_is_seen(cluster, &spec);
}

/// A model that learns too slowly for the scale of its targets predicts a constant, compared with them.
fn collapse_is_seen(cluster: &Cluster, of: &BufferSpec) {
    let spec = BufferSpec { name: "large".into(), limiter: None, ..of.clone() };
    cluster.client(async |client| {
        client.create_buffer(&spec).await.expect("failed to create the buffer");
        let buffer = client.buffer("large").await.expect("it exists");
        buffer.append(scaled_items(0..256, 1_000.0)).await.expect("failed to append");
    });
    let source = "large, fields: { mask: subset, score: reward }";
    let flat = train(cluster, "flat", buffer_manifest("flat", source, "0.0001"));
    let ratio = flat["metrics"]["spread_ratio"].as_f64();
    assert!(ratio > Some(0.0) && ratio < Some(0.01), "{flat}");
    let logs = std::fs::read_dir(cluster.state_dir().join("logs")).expect("a folder").flatten();
    let warns = |path: &std::path::Path| {
        std::fs::read_to_string(path).is_ok_and(|it| it.lines().any(|line| line.contains("predictions have collapsed")))
    };
    assert!(logs.into_iter().any(|entry| warns(&entry.path())), "no worker warned");
}
