//! Recovery of a cluster's last valid spec from its generated objects, for coordination while its current spec is invalid.

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::{Map, Value, json};

use crate::cluster::build::{CONFIG_FILE, OF_WORKERS, ZONE_KEY};
use crate::cluster::object::ClusterObject;
use crate::cluster::validate::{ValidatedCluster, validate_with_spec};
use crate::kube::api_object::ApiObject;

/// Reconstructs the spec of `object`, a `LearnerCluster`, from its ConfigMap `config` and its StatefulSet `set`, as far as a coordinator
/// needs it. `None` if they do not contain it.
pub fn last_valid_spec(object: &ClusterObject, config: &ApiObject, set: &ApiObject) -> Option<ValidatedCluster> {
    let settings = config.read_kind::<ConfigMap>()?.data?.remove(CONFIG_FILE)?;
    let Value::Object(mut spec) = serde_json::from_str(&settings).ok()? else { return None };
    for of_workers in OF_WORKERS {
        spec.remove(of_workers);
    }
    let set = set.read_kind::<StatefulSet>()?.spec?;
    // A StatefulSet without claim templates is ephemeral.
    let claim = set.volume_claim_templates.and_then(|mut templates| templates.pop()?.spec?.resources?.requests);
    let size = claim.and_then(|mut requests| requests.remove("storage"));
    let storage = size.map_or_else(|| json!({ "ephemeral": true }), |size| json!({ "size": size }));
    spec.insert("storage".into(), storage);
    let constraints = set.template.spec.and_then(|pod| pod.topology_spread_constraints);
    let is_by_zone = constraints.iter().flatten().next().is_some_and(|first| first.topology_key == ZONE_KEY);
    spec.insert("scheduling".into(), json!({ "topologySpread": if is_by_zone { "Zone" } else { "Node" } }));
    // The settings of clusters without TLS have no `tls`.
    spec.entry("tls").or_insert_with(|| json!({ "mode": "Disabled" }));
    validate_with_spec(object, Value::Object(without_nulls(spec))).ok()
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
