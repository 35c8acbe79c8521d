//! Comparison of the specifications of runs.

use engram_api::LearnerRunSpec;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_128;

/// Fields that may differ between submissions of one run.
const CHANGEABLE: [&str; 5] = ["suspend", "ttlSecondsAfterFinished", "managedBy", "dependsOn", "backoffLimit"];

/// Returns a specification with its defaults and without the fields that may differ between submissions of one run.
pub fn comparable_spec(spec: &Value) -> Value {
    let parsed = serde_json::from_value::<LearnerRunSpec>(spec.clone());
    let mut spec = parsed.and_then(serde_json::to_value).unwrap_or_else(|_| spec.clone());
    if let Some(fields) = spec.as_object_mut() {
        fields.retain(|field, _| !CHANGEABLE.contains(&field.as_str()));
    }
    spec
}

/// Returns a fingerprint of a specification, 32 hexadecimal digits: equal for specifications that are the same run.
pub fn spec_fingerprint(spec: &Value) -> String {
    format!("{:032x}", xxh3_128(comparable_spec(spec).to_string().as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_fingerprint_changes_with_what_the_run_computes() {
        let spec = |memories: u64| json!({ "clusterRef": { "name": "a" }, "kind": "Memory", "memory": { "source": { "synthetic": { "memories": memories } } } });
        let mut held = spec(10);
        held["suspend"] = json!(true);
        held["dependsOn"] = json!([{ "run": "b" }]);
        assert_eq!(spec_fingerprint(&spec(10)), spec_fingerprint(&held));
        assert_ne!(spec_fingerprint(&spec(10)), spec_fingerprint(&spec(11)));
    }
}
