//! CustomResourceDefinitions of the kinds, generated from the same types and tables as the validation.
//!
//! ```
//! let definition = engram_api::crd::definition("learnerclusters").expect("a kind");
//! assert_eq!(definition["spec"]["names"]["kind"], "LearnerCluster");
//! ```

mod partition_map;
mod rules;
mod structural;

use serde_json::{Value, json};

use self::rules::Rule;
use self::structural::Structural;
use crate::cluster::LearnerClusterSpec;
use crate::object::Kind;
use crate::run::LearnerRunSpec;
use crate::schema::{KINDS, inline};
use crate::status::{LearnerClusterStatus, LearnerRunStatus};

/// The group of every kind.
pub const GROUP: &str = "engram.dev";
/// The version of every kind.
pub const VERSION: &str = "v1alpha1";
/// Plural names of the kinds, in the order of the documentation.
pub const PLURALS: [&str; 3] = ["learnerclusters", "learnerruns", "partitionmaps"];

/// Returns the CustomResourceDefinition called `plural`; `None` for a word that is no kind.
pub fn definition(plural: &str) -> Option<Value> {
    match plural {
        "learnerclusters" => Some(learner_clusters()),
        "learnerruns" => Some(learner_runs()),
        "partitionmaps" => Some(partition_map::definition()),
        _ => None,
    }
}

/// Returns the schema of the objects of the kind called `plural`; `None` for a word that is no kind.
pub fn schema(plural: &str) -> Option<Value> {
    Some(definition(plural)?["spec"]["versions"][0]["schema"]["openAPIV3Schema"].take())
}

/// Returns [`definition`] as YAML, in its committed form.
pub fn to_yaml(plural: &str) -> Option<String> {
    let yaml = serde_saphyr::to_string(&definition(plural)?).expect("a definition has text keys and finite numbers");
    Some(format!("# Written by `cargo xtask generate`; do not edit.\n{yaml}"))
}

/// Fills in the defaults of the structural `schema` in `value`, as an API server does.
pub fn fill_defaults(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in schema["properties"].as_object().into_iter().flatten() {
                if let Some(default) = field.get("default").filter(|_| !fields.contains_key(name)) {
                    fields.insert(name.clone(), default.clone());
                }
                if let Some(value) = fields.get_mut(name) {
                    fill_defaults(field, value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| fill_defaults(&schema["items"], item)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn learner_clusters() -> Value {
    let names = json!({
        "kind": LearnerClusterSpec::KIND, "plural": "learnerclusters", "singular": "learnercluster",
        "shortNames": ["lc"], "categories": ["engram"],
    });
    // No default for replicationFactor: it depends on workers, so the operator chooses it.
    let schema = object(
        LearnerClusterSpec::KIND,
        &inline::<LearnerClusterStatus>(),
        "A fleet of workers that holds one set of memories.",
        &rules::cluster(),
        &["spec.replicationFactor"],
    );
    let columns = json!([
        column("Phase", "string", ".status.phase", 0, "Summary of the state"),
        column("Workers", "integer", ".spec.workers", 0, "Desired workers"),
        column("Ready", "integer", ".status.workers.ready", 0, "Ready workers"),
        column("Healthy", "integer", ".status.partitions.healthy", 0, "Partitions with all replicas in sync"),
        column(
            "Under-Replicated",
            "integer",
            ".status.partitions.underReplicated",
            0,
            "Partitions with fewer in-sync replicas than configured",
        ),
        column("Epoch", "integer", ".status.epoch", 0, "Completed learning epochs"),
        column("GPU", "string", ".status.conditions[?(@.type=='GpuAvailable')].status", 1, "Whether GPUs are used"),
        column("Version", "string", ".status.version", 1, "Version of the workers"),
        column("Age", "date", ".metadata.creationTimestamp", 0, "Time since creation"),
    ]);
    let subresources = json!({
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.workers",
            "statusReplicasPath": ".status.workers.total",
            "labelSelectorPath": ".status.selector",
        },
    });
    wrap(&names, &schema, &columns, &subresources)
}

fn learner_runs() -> Value {
    let names = json!({
        "kind": LearnerRunSpec::KIND, "plural": "learnerruns", "singular": "learnerrun",
        "shortNames": ["lr"], "categories": ["engram"],
    });
    let schema =
        object(LearnerRunSpec::KIND, &inline::<LearnerRunStatus>(), "A learning job on a cluster.", &rules::run(), &[]);
    let columns = json!([
        column("Cluster", "string", ".spec.clusterRef.name", 0, "Cluster that the run belongs to"),
        column("Phase", "string", ".status.phase", 0, "Summary of the state"),
        column("Epoch", "integer", ".status.progress.epoch", 0, "Completed epochs"),
        column("Total", "integer", ".status.progress.total", 0, "Total number of epochs"),
        column("ETA", "string", ".status.progress.eta", 0, "Estimated time to completion"),
        column("Driver", "string", ".status.driver", 1, "Worker that drives the run"),
        column("Age", "date", ".metadata.creationTimestamp", 0, "Time since creation"),
    ]);
    wrap(&names, &schema, &columns, &json!({ "status": {} }))
}

/// Builds the schema of a whole object of `kind`.
fn object(kind: &str, status: &Value, description: &str, rules: &[Rule], without_default: &[&'static str]) -> Value {
    let (_, schema) = KINDS.iter().find(|(name, _)| *name == kind).expect("every kind has a schema");
    let defaults = rules::defaults();
    // Rows for fields that the kind does not have find nothing.
    let structural = Structural { rules, defaults: &defaults, without_default };
    let mut status = Structural { rules: &[], defaults: &[], without_default: &[] }.of(status, "status");
    without_defaults(&mut status);
    let validations: Vec<Value> = rules.iter().filter(|rule| rule.at.is_empty()).map(Rule::to_json).collect();
    json!({
        "type": "object",
        "description": description,
        "required": ["spec"],
        "properties": {
            "apiVersion": { "type": "string" },
            "kind": { "type": "string" },
            "metadata": { "type": "object" },
            "spec": structural.of(&schema["properties"]["spec"], "spec"),
            "status": status,
        },
        "x-kubernetes-validations": validations,
    })
}

/// Removes the defaults from the schema of a status: the operator writes a status whole, so that a default would be a
/// value that it never observed.
fn without_defaults(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            fields.retain(|keyword, value| keyword != "default" || value.is_object() && value.get("type").is_some());
            fields.values_mut().for_each(without_defaults);
        }
        Value::Array(items) => items.iter_mut().for_each(without_defaults),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn column(name: &str, kind: &str, path: &str, priority: u32, description: &str) -> Value {
    let mut column = json!({ "name": name, "type": kind, "jsonPath": path, "description": description });
    if priority > 0 {
        column["priority"] = priority.into();
    }
    column
}

/// Normalizes whole numbers as an API server does. Otherwise applying the same definition twice, with two tools, is a conflict.
fn normalize_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            let whole = number.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 1e15);
            if let Some(whole) = whole.filter(|_| number.is_f64()) {
                *number = (whole as i64).into();
            }
        }
        Value::Object(fields) => fields.values_mut().for_each(normalize_numbers),
        Value::Array(items) => items.iter_mut().for_each(normalize_numbers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

/// Assembles a definition.
fn wrap(names: &Value, schema: &Value, columns: &Value, subresources: &Value) -> Value {
    let mut definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{}.{GROUP}", names["plural"].as_str().unwrap_or_default()) },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [{
                "name": VERSION,
                "served": true,
                "storage": true,
                "schema": { "openAPIV3Schema": schema },
                "additionalPrinterColumns": columns,
                "subresources": subresources,
            }],
        },
    });
    normalize_numbers(&mut definition);
    definition
}
