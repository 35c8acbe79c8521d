//! Examples for Argo Workflows, Kueue, KEDA and the Gateway API, against names and types of their published definitions.
//!
//! The files of `tests/integrations` name their source. They have every field of an object that an example uses, and nothing below the
//! fields that no example uses.

use engram_api::parse_object;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const SCHEMAS: [&str; 4] = [
    include_str!("../integrations/argo.json"),
    include_str!("../integrations/kueue.json"),
    include_str!("../integrations/keda.json"),
    include_str!("../integrations/gateway.json"),
];
const EXAMPLES: [(&str, &str); 4] = [
    ("argo-workflows.yaml", include_str!("../../../../examples/kubernetes/argo-workflows.yaml")),
    ("kueue.yaml", include_str!("../../../../examples/kubernetes/kueue.yaml")),
    ("keda-scaledobject.yaml", include_str!("../../../../examples/kubernetes/keda-scaledobject.yaml")),
    ("federated-ingress.yaml", include_str!("../../../../examples/kubernetes/federated-ingress.yaml")),
];
/// Values of placeholders of Argo, by the end of their name; others are replaced by their position.
const VALUES: [(&str, &str); 5] = [
    ("parameters.rate", "0.001"),
    ("parameters.missing", "Report"),
    ("parameters.events", "s3://events/2026.csv"),
    ("parameters.target", "s3://backups/promoted"),
    ("workflow.name", "search-x7k2p"),
];

/// Returns definitions by `apiVersion kind`.
fn definitions() -> BTreeMap<String, Value> {
    let kinds = SCHEMAS.iter().flat_map(|text| {
        let schema: Value = serde_json::from_str(text).expect("a file of definitions is JSON");
        schema["kinds"].as_object().expect("kinds are an object").clone()
    });
    kinds.collect()
}

/// Returns the objects of a file.
fn objects(text: &str) -> Vec<Value> {
    text.split("\n---\n").map(|part| serde_saphyr::from_str(part).expect("an example is YAML")).collect()
}

/// Returns what of `value` does not fit.
fn misfits(value: &Value, schema: &Value, path: &str) -> Vec<String> {
    assert!(schema["trimmed"].is_null(), "{path}: the definition has no fields below this one; generate it again");
    if schema["x-kubernetes-int-or-string"] == true {
        return if value.is_i64() || value.is_string() { vec![] } else { vec![format!("{path}: {value}")] };
    }
    let fits = match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_i64(),
        Some("number") => value.is_number(),
        _ => true,
    };
    let is_listed = schema["enum"].as_array().is_none_or(|allowed| allowed.contains(value));
    if !fits || !is_listed {
        return vec![format!("{path}: {value} is not {schema}")];
    }
    match value {
        Value::Array(items) => {
            items.iter().flat_map(|item| misfits(item, &schema["items"], &format!("{path}[]"))).collect()
        }
        Value::Object(fields) => {
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let missing =
                required.filter(|name| !fields.contains_key(*name)).map(|name| format!("{path}.{name} is missing"));
            let of_field = |(name, value): (&String, &Value)| {
                let path = format!("{path}.{name}");
                let is_open = schema["x-kubernetes-preserve-unknown-fields"] == true || path == ".metadata";
                match schema["properties"].get(name).or_else(|| schema.get("additionalProperties")) {
                    Some(schema) => misfits(value, schema, &path),
                    None if is_open => vec![],
                    None => vec![format!("{path} is unknown")],
                }
            };
            missing.chain(fields.iter().flat_map(of_field)).collect()
        }
        _ => vec![],
    }
}

/// Returns the manifest of a template of Argo with values for its placeholders.
fn filled(manifest: &str) -> String {
    let mut parts = manifest.split("{{");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for (at, part) in parts.enumerate() {
        let (name, rest) = part.split_once("}}").expect("a placeholder ends");
        let value = VALUES.iter().find(|(end, _)| name.ends_with(end));
        text += &value.map_or_else(|| format!("value-{at}"), |(_, value)| (*value).to_owned());
        text += rest;
    }
    text
}

#[test]
fn examples_of_other_projects_fit_their_published_definitions() {
    let definitions = definitions();
    let mut checked = BTreeMap::new();
    for (file, text) in EXAMPLES {
        for mut object in objects(text) {
            let kind = format!("{} {}", object["apiVersion"].as_str().unwrap(), object["kind"].as_str().unwrap());
            if let Some(definition) = definitions.get(&kind) {
                object["metadata"] = json!({});
                assert_eq!(misfits(&object, definition, ""), [""; 0], "{file}: {kind}");
                *checked.entry(kind).or_insert(0) += 1;
            }
        }
    }
    assert!(checked.len() == definitions.len(), "kinds without an example: {checked:?}");
}

#[test]
fn runs_within_these_examples_are_accepted() {
    let mut kinds = Vec::new();
    for (file, text) in EXAMPLES {
        for object in objects(text) {
            let templates = object["spec"]["templates"].as_array().into_iter().flatten();
            let manifests = templates.filter_map(|template| template["resource"]["manifest"].as_str());
            let mut runs: Vec<Value> = manifests.flat_map(|manifest| objects(&filled(manifest))).collect();
            runs.extend((object["kind"] == "LearnerRun").then_some(object.clone()));
            for run in runs {
                parse_object(&run).unwrap_or_else(|problems| panic!("{file}: {run}\n{}", problems.render(false)));
                kinds.push(run["spec"]["kind"].as_str().unwrap_or_default().to_owned());
            }
        }
    }
    kinds.sort();
    assert_eq!(kinds, ["Job", "Memory", "Replay", "Snapshot"]);
}

#[test]
fn unknown_wrong_and_missing_fields_do_not_fit() {
    let definition = &definitions()["keda.sh/v1alpha1 ScaledObject"];
    let mut object = objects(EXAMPLES[2].1).remove(0);
    object["metadata"] = json!({});
    object["spec"]["minReplicas"] = json!(1);
    object["spec"]["maxReplicaCount"] = json!("many");
    object["spec"]["scaleTargetRef"].as_object_mut().unwrap().remove("name");
    let mut found = misfits(&object, definition, "");
    found.sort();
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[0].starts_with(".spec.maxReplicaCount: \"many\"") && found[1] == ".spec.minReplicas is unknown");
    assert_eq!(found[2], ".spec.scaleTargetRef.name is missing");
}
