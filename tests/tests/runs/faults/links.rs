//! Trainings over TCP whose links are cut, that send fewer bits, and that draw ahead.

use super::cuts::{Cut, cut, enter_namespace};
use super::replay::{named, train};
use crate::has_ended;
use engram_client::{BufferSpec, Column, DType, Field, Items};
use engram_tests::{Cluster, DEADLINE, cluster_manifest, page, skipped, wait_for};
use serde_json::Value;
use std::time::Duration;

/// Time that a training takes undisturbed whose links are cut: more than passes between all cuts.
const SECONDS: f64 = 16.0;
/// Cuts, and whether one end is the driver of the run.
const CUTS: [(Cut, bool); 2] = [(Cut::BothWays, false), (Cut::OneWay, true)];
/// Longer than it takes to remove a silent member.
const CUT: Duration = Duration::from_millis(1_200);

fn manifest(name: &str, steps: u64, more: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: links }}\n  \
         kind: Replay\n  replay:\n    source: {{ synthetic: {{ features: 60, samples: 1000, largest: 20 }} }}\n    model:\n      \
         inputs: [{{ field: mask, dim: 60 }}]\n      layers: [{{ dense: 32, activation: Relu }}, {{ dense: 1, activation: Sigmoid }}]\n      \
         loss: {{ kind: Mse, target: score }}\n    optimizer: {{ rate: 0.003 }}\n    batch: 128\n    steps: {steps}\n{more}"
    )
}

fn figure(run: &Value, name: &str) -> f64 {
    run["metrics"][name].as_f64().unwrap_or_else(|| panic!("{name}: {run}"))
}

/// Adds up a counter of all workers.
fn counter(cluster: &Cluster, name: &str) -> f64 {
    let endpoints = cluster.endpoints().expect("the cluster runs");
    let workers = endpoints["workers"].as_array().expect("workers");
    let port = |worker: &Value| worker["http"].as_str()?.rsplit_once(':')?.1.parse::<u16>().ok();
    let pages: Vec<String> = workers.iter().filter_map(|worker| page(port(worker)?, "/metrics")).collect();
    let value = |line: &str| line.strip_prefix(name)?.rsplit_once(' ')?.1.parse::<f64>().ok();
    pages.iter().flat_map(|page| page.lines()).filter_map(value).sum()
}

#[test]
#[ignore = "full: over a minute, as a removed member stays out for four detection times, and twice as long each time"]
fn cut_links_between_workers_cost_a_training_no_step_and_no_bit() {
    if let Err(reason) = enter_namespace() {
        return skipped(&reason);
    }
    let settings = "    order: PartitionInvariant\n    sharedMemory: false\n    streams: 2\n    detectAfter: 500ms\n";
    let alone = Cluster::up(&cluster_manifest("links", 1, "  partitions: 4\n"));
    let measured = train(&alone, "measured", manifest("measured", 500, settings));
    let steps = ((SECONDS / figure(&measured, "step_seconds")) as u64).max(500);
    let expected = train(&alone, "alone", manifest("alone", steps, settings));
    alone.stop();

    let cluster = Cluster::up(&cluster_manifest("links", 3, "  partitions: 8\n"));
    let file = cluster.file("run.yaml", manifest("cut", steps, settings));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let run = || named(&cluster, "cut").filter(|run| run["driver"].is_u64() || has_ended(run));
    let is_whole = |run: &Value| run["metrics"]["members"] == 3.0 && run["epoch"].is_u64() || has_ended(run);
    let mut recoveries: Vec<f64> = Vec::new();
    for (number, (kind, with_driver)) in CUTS.into_iter().enumerate() {
        let before = wait_for("all workers to train", DEADLINE, || run().filter(is_whole));
        assert!(!has_ended(&before), "cut {number}: the training has ended: {before}");
        assert_eq!((figure(&before, "shared_memory_links"), figure(&before, "link_streams")), (0.0, 2.0), "{before}");
        let driver = before["driver"].as_u64().expect("the filter checked it") as usize;
        let pair = if with_driver { [driver, (driver + 1) % 3] } else { [(driver + 1) % 3, (driver + 2) % 3] };
        let pids = pair.map(|worker| cluster.worker(worker).expect("the worker runs"));
        assert!(cut(kind, (pids[0], pids[1]), CUT) > 0, "cut {number}: nothing was connected");
        let step = before["epoch"].as_u64();
        let after = wait_for("steps after the cut", DEADLINE, || run().filter(|run| run["epoch"].as_u64() > step));
        let measured = after["metrics"]["recovery_seconds"].as_f64().filter(|it| recoveries.last() != Some(it));
        println!("cut {number}: {kind:?} between {pair:?}, driver {driver}: recovery {measured:?} s");
        recoveries.extend(measured);
    }
    let ended = wait_for("the training to end", 5 * DEADLINE, || named(&cluster, "cut").filter(has_ended));
    assert_eq!((&ended["phase"], ended["epoch"].as_u64()), (&"Succeeded".into(), Some(steps)), "{ended}");
    assert_eq!(ended["updates"], expected["updates"], "a step was lost or repeated: {ended}");
    assert_eq!(ended["outputs"]["digest"], expected["outputs"]["digest"], "{ended}");
    assert!(figure(&ended, "failed_members") >= 1.0, "no member left in spite of cuts: {ended}");
    cluster.stop();
}

#[test]
fn one_bit_adam_sends_fewer_bytes_and_a_killed_training_resumes_with_what_was_lost() {
    const STEPS: u64 = 4_000;
    /// So many that a busy machine still kills the worker in the middle.
    const LONG: u64 = 10_000;
    let compression = "    compression: { kind: OneBitAdam, warmupSteps: 400 }\n    checkpoint: { every: 100 }\n";
    let cluster = Cluster::up(&cluster_manifest("links", 2, "  partitions: 4\n"));
    let sent = |name: &str, more: &str| {
        let before = counter(&cluster, "engram_training_sent_bytes_total");
        let run = train(&cluster, name, manifest(name, STEPS, more));
        (counter(&cluster, "engram_training_sent_bytes_total") - before, run)
    };
    let (whole, exact) = sent("exact", "");
    let (bits, compressed) = sent("bits", compression);
    println!("bytes of {STEPS} steps: {whole} whole, {bits} with a warm-up of 400 steps");
    assert!(bits > 0.0 && 4.0 * bits < whole, "{bits} {whole}");
    let [exact, compressed] = [exact, compressed].map(|run| figure(&run, "held_out_correlation"));
    assert!(exact > 0.8 && compressed > 0.8, "held-out correlation: {exact}, {compressed} with one bit");
    let wrong = cluster.file("wrong.yaml", manifest("wrong", 300, compression));
    let texts = ["spec.replay.compression.warmupSteps is 400", "1 to below steps, 300"];
    cluster.engram(&["run", &wrong]).fails_with(2, &texts);
    cluster.stop();

    let mut cluster = Cluster::up(&cluster_manifest("links", 1, "  partitions: 4\n"));
    let unbroken = train(&cluster, "unbroken", manifest("unbroken", LONG, compression));
    let pid = cluster.worker(0).expect("the worker runs");
    let file = cluster.file("run.yaml", manifest("broken", LONG, compression));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let after_warmup = |run: &Value| run["epoch"].as_u64() >= Some(500);
    let training = wait_for("steps", DEADLINE, || named(&cluster, "broken").filter(after_warmup));
    assert!(!has_ended(&training), "{training}");
    cluster.kill(pid);
    cluster.wait_for_restart(0, pid);
    let ended = wait_for("the run to end", DEADLINE, || named(&cluster, "broken").filter(has_ended));
    assert_eq!(ended["outputs"]["digest"], unbroken["outputs"]["digest"], "{ended}");
    cluster.stop();
}

/// A buffer of items with two numbers, and a run that draws from it.
fn create_buffer(cluster: &Cluster) {
    let number = |name: &str, shape: Vec<u32>| Field { name: name.into(), dtype: DType::Float32, shape, jagged: false };
    let spec = BufferSpec::new("pairs", vec![number("x", vec![2]), number("y", vec![])], 1_000);
    let rows: Vec<[f32; 2]> = (0..500).map(|row| [(row % 23) as f32 / 23.0, (row % 7) as f32 / 7.0]).collect();
    let bytes = |values: Vec<f32>| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let x = Column::new("x", DType::Float32, vec![2], bytes(rows.iter().flatten().copied().collect()));
    let y = Column::new("y", DType::Float32, vec![], bytes(rows.iter().map(|[a, b]| a - b).collect()));
    cluster.client(async |client| {
        client.create_buffer(&spec).await.expect("failed to create the buffer");
        let buffer = client.buffer("pairs").await.expect("it exists");
        let items = Items { count: rows.len(), columns: vec![x, y], ..Items::default() };
        buffer.append(items).await.expect("failed to append");
    });
}

#[test]
fn prefetch_draws_the_items_of_steps_before_they_begin() {
    let cluster = Cluster::up(&cluster_manifest("links", 2, "  partitions: 4\n"));
    create_buffer(&cluster);
    let drawn = |name: &str, prefetch: u32| {
        let text = manifest(name, 200, "");
        let source = "synthetic: { features: 60, samples: 1000, largest: 20 }";
        let buffer = format!("buffer: {{ name: pairs, fields: {{ x: x, score: y }}, prefetch: {prefetch} }}");
        let text = text.replace(source, &buffer).replace("field: mask, dim: 60", "field: x, dim: 2");
        assert!(text.contains("prefetch") && text.contains("field: x"), "{text}");
        let before = counter(&cluster, "engram_training_steps_drawn_ahead_total");
        let run = train(&cluster, name, text);
        let ahead = counter(&cluster, "engram_training_steps_drawn_ahead_total") - before;
        println!("prefetch {prefetch}: {ahead} of 400 draws were ahead, {} s per step", figure(&run, "draw_seconds"));
        (ahead, figure(&run, "drawn_ahead_share"))
    };
    assert_eq!(drawn("none", 0), (0.0, 0.0), "a step draws its own items only");
    let (ahead, share) = drawn("four", 4);
    assert!(ahead > 0.0 && ahead <= 400.0 && share > 0.0 && share <= 1.0, "{ahead} {share}");
    assert!(counter(&cluster, "engram_training_draw_seconds_total") > 0.0);
    let profile = cluster.engram(&["profile", "four"]).exits_with(0);
    assert!(profile.stdout.contains("steps drawn ahead: "), "{}", profile.stdout);
    cluster.stop();
}
