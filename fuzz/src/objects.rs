//! Objects from the API server: those of users, and the map of the workers.

use crate::heartbeats::accepted;
use engram_api::parse_object;
use serde_json::{Value, json};

const KINDS: [&str; 2] = ["LearnerCluster", "LearnerRun"];

/// JSON as any kind of object: unchanged, and as the spec of each.
pub(crate) fn api(bytes: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return };
    object(&value);
    let spec = value.get("spec").unwrap_or(&value);
    for kind in KINDS {
        object(&json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": kind, "metadata": { "name": "fuzz", "namespace": "ml" }, "spec": spec,
        }));
    }
    map(&value);
    map(&json!({ "metadata": { "resourceVersion": "1" }, "spec": spec }));
}

fn object(value: &Value) {
    let manifest = match parse_object(value) {
        Ok(manifest) => manifest,
        Err(problems) => return assert!(!problems.to_string().is_empty(), "the error has a text"),
    };
    assert!(manifest.cluster.is_some() || !manifest.runs.is_empty(), "a manifest has an object");
    // Serializing and parsing again returns the same object.
    let again = engram_api::parse(&manifest.to_effective_yaml(), "again.yaml", engram_api::Requirement::Anything);
    let again = again.unwrap_or_else(|problems| panic!("{problems}\n{}", manifest.to_effective_yaml()));
    assert_eq!(again.to_effective_yaml(), manifest.to_effective_yaml());
    if let Some(cluster) = &manifest.cluster {
        assert!(again.check_against(&cluster.spec, 0).is_ok(), "an unchanged cluster is valid");
    }
}

fn map(value: &Value) {
    match engram_mapstore::read_object(value) {
        Ok(map) => accepted(&map),
        Err(error) => assert!(error.to_string().contains("the object"), "{error}"),
    }
}
