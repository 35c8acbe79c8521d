//! Whether two submissions of a run have the same specification.

use engram_learn::run::comparable_spec;
use engram_proto::v1::{Problem, ProblemKind};

/// Checks that a run of this name is the run that is submitted again.
pub(in crate::runs) fn check_same(
    name: &str,
    recorded: &serde_json::Value,
    spec: &serde_json::Value,
) -> Result<(), Problem> {
    match difference("spec", &comparable_spec(recorded), &comparable_spec(spec)) {
        None => Ok(()),
        Some(field) => {
            let text = format!(
                "name: {name:?} is taken by a run with another specification (they differ in {field}); allowed: the same \
                 specification, or another name"
            );
            Err(Problem::of(ProblemKind::Invalid, text))
        }
    }
}

/// Returns the first field in which two values differ.
fn difference(path: &str, left: &serde_json::Value, right: &serde_json::Value) -> Option<String> {
    match (left, right) {
        _ if left == right => None,
        (serde_json::Value::Object(one), serde_json::Value::Object(other)) => {
            let fields: std::collections::BTreeSet<&String> = one.keys().chain(other.keys()).collect();
            fields.into_iter().find_map(|field| difference(&format!("{path}.{field}"), &left[field], &right[field]))
        }
        _ => Some(path.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_not_shared_by_runs_of_different_specifications() {
        let spec = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        let first = spec(r#"{"clusterRef":{"name":"a"},"kind":"Snapshot","snapshot":{"url":"s3://bbb/x"}}"#);
        assert!(check_same("nightly", &first, &first).is_ok());
        let resumed = spec(
            r#"{"clusterRef":{"name":"a"},"kind":"Snapshot","suspend":true,"managedBy":"kueue","snapshot":{"url":"s3://bbb/x"}}"#,
        );
        assert!(check_same("nightly", &first, &resumed).is_ok());
        let other = spec(r#"{"clusterRef":{"name":"a"},"kind":"Snapshot","snapshot":{"url":"s3://bbb/y"}}"#);
        let refused = check_same("nightly", &first, &other).unwrap_err().message;
        assert!(refused.contains("spec.snapshot.url") && !refused.contains("bbb"), "{refused}");
    }
}
