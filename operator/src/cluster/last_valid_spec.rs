//! Recovery of a cluster's last valid spec from its generated objects, for coordination while its current spec is invalid.

use serde_json::{Map, Value, json};

use crate::cluster::build::{BOOTSTRAP_WORKERS, CONFIG_FILE, ZONE_KEY};
use crate::cluster::validate::{ValidatedCluster, validate};

/// Reconstructs the spec of `object`, a `LearnerCluster`, from its ConfigMap `config` and its StatefulSet `set`, as far as a coordinator
/// needs it. `None` if they do not contain it.
pub fn last_valid_spec(object: &Value, config: &Value, set: &Value) -> Option<ValidatedCluster> {
    let settings = config.pointer("/data")?.get(CONFIG_FILE)?.as_str()?;
    let Value::Object(mut spec) = serde_json::from_str(settings).ok()? else { return None };
    for of_workers in ["clusterId", "coordinators", BOOTSTRAP_WORKERS] {
        spec.remove(of_workers);
    }
    // A StatefulSet without claim templates is ephemeral.
    let size = set.pointer("/spec/volumeClaimTemplates/0/spec/resources/requests/storage");
    let storage = size.map_or_else(|| json!({ "ephemeral": true }), |size| json!({ "size": size }));
    spec.insert("storage".into(), storage);
    let spread = set.pointer("/spec/template/spec/topologySpreadConstraints/0/topologyKey");
    let spread = if spread.is_some_and(|key| key == ZONE_KEY) { "Zone" } else { "Node" };
    spec.insert("scheduling".into(), json!({ "topologySpread": spread }));
    // The settings of clusters without TLS have no `tls`.
    spec.entry("tls").or_insert_with(|| json!({ "mode": "Disabled" }));
    let mut recovered = object.clone();
    recovered["spec"] = Value::Object(without_nulls(spec));
    validate(&recovered).ok()
}

/// Removes nulls recursively.
fn without_nulls(fields: Map<String, Value>) -> Map<String, Value> {
    let present = fields.into_iter().filter(|(_, value)| !value.is_null());
    let deeper = present.map(|(name, value)| match value {
        Value::Object(fields) => (name, Value::Object(without_nulls(fields))),
        value => (name, value),
    });
    deeper.collect()
}
