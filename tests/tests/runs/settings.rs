//! Settings of Replay runs that show elsewhere than in the sums: warm start and frozen layers.

use super::replay::{STEPS, manifest, named, train};
use engram_tests::Cluster;
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
