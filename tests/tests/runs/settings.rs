//! Settings of Replay runs that show elsewhere than in the sums, warm start and frozen layers; and those that are refused.

use super::replay::{STEPS, manifest, named, train};
use engram_tests::{Cluster, DEADLINE, cluster_manifest, page, wait_for};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Tensors of the newest checkpoint of a run by name, as bytes.
fn tensors(run: &Value) -> Vec<(String, Vec<u8>)> {
    let folder = run["outputs"]["checkpoint"].as_str().expect("a folder");
    let bytes = fs::read(Path::new(folder).join("model.safetensors")).expect("the weights are readable");
    let (length, rest) = bytes.split_first_chunk().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: Value = serde_json::from_slice(header).expect("a header");
    let tensors = header.as_object().expect("a map").iter().filter(|(name, _)| *name != "__metadata__");
    let range = |tensor: &Value, end: usize| tensor["data_offsets"][end].as_u64().expect("an offset") as usize;
    tensors.map(|(name, tensor)| (name.clone(), data[range(tensor, 0)..range(tensor, 1)].to_vec())).collect()
}

/// Uses the run `alone`, which has ended.
pub(super) fn train_with_settings(cluster: &Cluster) {
    let steps = |name: &str| manifest(name).replace(&format!("steps: {STEPS}"), "steps: 20");
    let warm = steps("warm").replace("    optimizer:", "      init: { run: alone }\n    optimizer:");
    assert!(warm.contains("init:"), "{warm}");
    let warm = train(cluster, "warm", warm + "    freeze: [layers.0]\n");
    let (before, after) = (tensors(&named(cluster, "alone").expect("the run is known")), tensors(&warm));
    assert_eq!(before.len(), after.len());
    for ((name, before), (_, after)) in before.iter().zip(&after) {
        assert_eq!(before == after, name.starts_with("layers.0."), "tensor {name}");
    }
}

/// A run that trains while another test looks: fast sums, so that NCCL would be allowed.
fn training(name: &str, steps: u64) -> String {
    let fast = format!("steps: {steps}\n    order: Fast");
    manifest(name).replace(&format!("steps: {STEPS}\n    order: PartitionInvariant"), &fast)
}

/// Metrics of all workers.
fn pages(cluster: &Cluster) -> String {
    let endpoints = cluster.endpoints().expect("the cluster runs");
    let workers = endpoints["workers"].as_array().expect("workers");
    let port = |worker: &Value| worker["http"].as_str()?.rsplit_once(':')?.1.parse::<u16>().ok();
    workers.iter().filter_map(|worker| page(port(worker)?, "/metrics")).collect()
}

#[test]
fn training_shows_its_figures_while_it_runs_and_refuses_bad_settings_by_name() {
    let cluster = Cluster::up(&cluster_manifest("train", 2, "  partitions: 4\n"));
    let file = cluster.file("run.yaml", training("live", 1_000_000));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let figures = [
        "loss",
        "efficiency",
        "samples_per_second",
        "step_seconds",
        "reduce_seconds",
        "members",
        "failed_members",
        "fallback",
    ];
    // Times are means over all steps: the first one connects the members.
    let has_all = |run: &Value| {
        run["epoch"].as_u64() > Some(200) && figures.iter().all(|figure| run["metrics"][figure].is_number())
    };
    let run = wait_for("all figures", DEADLINE, || named(&cluster, "live").filter(has_all));
    let of = |figure: &str| run["metrics"][figure].as_f64().expect("the filter checked it");
    assert_eq!((of("members"), of("failed_members"), of("fallback")), (2.0, 0.0, 0.0), "{run}");
    assert!(of("reduce_seconds") > 0.0 && of("reduce_seconds") < of("step_seconds"), "{run}");
    assert!(of("efficiency") > 0.0, "{run}");
    assert!(run["epoch"].as_u64() > Some(0) && run["updates"].as_u64() > Some(0), "{run}");
    assert_eq!(run["outputs"]["nccl"], "no candidate: not found", "{run}");
    let gauges = [
        "engram_training_efficiency",
        "engram_training_samples_per_second",
        "engram_training_step_seconds",
        "engram_training_step_reduce_seconds",
        "engram_training_group_members",
        "engram_training_failed_members",
        "engram_training_fallback",
    ];
    let text = pages(&cluster);
    for gauge in gauges {
        let is_sample = |line: &&str| line.starts_with(gauge) && line.contains("run=\"live\"");
        assert_eq!(text.lines().filter(is_sample).count(), 1, "{gauge}: {text}");
    }
    let top = cluster.engram(&["top", "--once", "-o", "json"]).exits_with(0).json();
    assert!(top["runs"].as_array().is_some_and(|runs| runs.iter().any(has_all)), "{top}");
    let profile = cluster.engram(&["profile", "live"]).exits_with(0).stdout;
    for line in ["efficiency: ", "slowest link: ", "reduction: ", "NCCL: no candidate: not found"] {
        assert!(profile.contains(line), "{line}: {profile}");
    }
    cluster.engram(&["suspend", "live"]).exits_with(0);
    wait_for("the series to end", DEADLINE, || (!pages(&cluster).contains("run=\"live\"")).then_some(()));

    let report = cluster.folder().join("report.html").display().to_string();
    let file = cluster.file("run.yaml", training("alone", 5_000));
    cluster.engram(&["run", &file, "--report", &report]).exits_with(0);
    let report = fs::read_to_string(report).expect("the report is readable");
    for shown in ["Efficiency", "Samples/s", "of it in reduction", "0 left by failures", "Loss", "Throughput", "<svg"] {
        assert!(report.contains(shown), "{shown}");
    }
    refuse_bad_input(&cluster);
    cluster.stop();
}

/// Uses the run `alone`, which has ended.
fn refuse_bad_input(cluster: &Cluster) {
    let refused = |name: &str, (from, to): (&str, &str), code: i32, texts: &[&str]| {
        let text = manifest(name);
        assert!(text.contains(from), "{text}");
        let file = cluster.file(&format!("{name}.yaml"), text.replace(from, to));
        cluster.engram(&["run", &file]).fails_with(code, texts);
    };
    refused("layer", ("{ dropout: 0.1 }", "{ convolution: 3 }"), 2, &["layers[1]", "convolution", "featureBag"]);
    let narrow = ("{ dense: 1,", "{ inputs: 31, dense: 1,");
    refused("narrow", narrow, 2, &["layer 2: inputs is 31, but the layer below gives 32"]);
    refused("wide", ("dense: 1,", "dense: 3,"), 2, &["3 outputs", "1 output"]);
    refused("target", ("target: score", "target: label"), 2, &["model.loss.target is label", "score"]);
    let private = "    steps: 20\n    privacy: { epsilon: 6, delta: 0.0001, clip: 1, noiseMultiplier: 2 }\n";
    let steps = format!("    steps: {STEPS}\n    order: PartitionInvariant\n");
    let file = manifest("private-buffer").replace(&steps, private);
    let source = "{ synthetic: { features: 60, samples: 1000, largest: 20 } }";
    assert!(file.contains("privacy") && file.contains(source), "{file}");
    let file = cluster.file("private-buffer.yaml", file.replace(source, "{ buffer: { name: experience } }"));
    let texts = ["spec.replay.source.buffer is set", "privacy"];
    cluster.engram(&["run", &file]).fails_with(2, &texts);
    let other = manifest("other").replace("    optimizer:", "      init: { run: alone }\n    optimizer:");
    let file = cluster.file("other.yaml", other.replace("layers: [", "layers: [{ dropout: 0.1 }, "));
    let texts = ["spec.replay.model.init.run: no parameter has the name and shape"];
    cluster.engram(&["run", &file]).fails_with(1, &texts);
}
