//! Runs of kinds Tropical and Fisher.

use std::collections::BTreeMap;

use engram_tests::{Cluster, cluster_manifest};
use serde_json::Value;

use super::runs;

/// Runs of kinds Tropical and Fisher, small enough for a debug build.
const ALGEBRA: &str = "apiVersion: engram.dev/v1alpha1
kind: LearnerRun
metadata: { name: max-plus }
spec:
  clusterRef: { name: demo }
  kind: Tropical
  tropical:
    decode: { source: { synthetic: { states: 6, symbols: 8, length: 3000 } } }
    classify: { hidden: 40, epochs: 6, starts: 1, learningRates: [0.01] }
---
apiVersion: engram.dev/v1alpha1
kind: LearnerRun
metadata: { name: information }
spec:
  clusterRef: { name: demo }
  kind: Fisher
  fisher: { form: Empirical, epochs: 4, steps: 6, naturalRates: [0.3], sgdRates: [3] }
";

#[test]
fn max_plus_and_fisher_runs_give_the_same_bits_on_one_and_two_workers() {
    let outputs: Vec<Value> = [1, 2]
        .map(|workers| {
            let cluster = Cluster::up(&cluster_manifest("demo", workers, "  partitions: 4\n"));
            let file = cluster.file("algebra.yaml", ALGEBRA);
            cluster.engram(&["run", &file]).exits_with(0);
            let outputs: BTreeMap<String, Value> =
                runs(&cluster).into_iter().map(|run| (run["name"].to_string(), run["outputs"].clone())).collect();
            cluster.stop();
            serde_json::to_value(outputs).expect("names are strings")
        })
        .into();
    assert_eq!(outputs[0], outputs[1]);
    for name in ["decodeDigest", "classifyWinner", "fisherDigest", "digest"] {
        assert!(outputs[0].to_string().contains(&format!("\"{name}\":")), "{name} is missing: {}", outputs[0]);
    }
}
