//! From what was made for a cluster to the spec that was good last: for a cluster whose spec is refused now, and for an operator that
//! has never seen it otherwise.

use serde_json::{Map, Value, json};

use crate::build::{BOOTSTRAP_WORKERS, CONFIG_FILE, ZONE_KEY};
use crate::validate::{ValidatedCluster, validate};

/// Says what `object`, a `LearnerCluster`, was when its ConfigMap `config` and its StatefulSet `set` were made: as far as a coordinator
/// wants to know it. What only pods and Services are made from is not in them. `None` where they do not say it.
pub fn recall(object: &Value, config: &Value, set: &Value) -> Option<ValidatedCluster> {
    let settings = config.pointer("/data")?.get(CONFIG_FILE)?.as_str()?;
    let Value::Object(mut spec) = serde_json::from_str(settings).ok()? else { return None };
    for of_workers in ["clusterId", "coordinators", BOOTSTRAP_WORKERS] {
        spec.remove(of_workers);
    }
    // Without disks of its own a pod has its data in itself.
    let size = set.pointer("/spec/volumeClaimTemplates/0/spec/resources/requests/storage");
    let storage = size.map_or_else(|| json!({ "ephemeral": true }), |size| json!({ "size": size }));
    spec.insert("storage".into(), storage);
    let spread = set.pointer("/spec/template/spec/topologySpreadConstraints/0/topologyKey");
    let spread = if spread.is_some_and(|key| key == ZONE_KEY) { "Zone" } else { "Node" };
    spec.insert("scheduling".into(), json!({ "topologySpread": spread }));
    // Workers in clear are told nothing of certificates.
    spec.entry("tls").or_insert_with(|| json!({ "mode": "Disabled" }));
    let mut known = object.clone();
    known["spec"] = Value::Object(without_nothing(spec));
    validate(&known).ok()
}

/// Leaves out what was not given.
fn without_nothing(fields: Map<String, Value>) -> Map<String, Value> {
    let given = fields.into_iter().filter(|(_, value)| !value.is_null());
    let deeper = given.map(|(name, value)| match value {
        Value::Object(fields) => (name, Value::Object(without_nothing(fields))),
        value => (name, value),
    });
    deeper.collect()
}
