//! CustomResourceDefinition of `PartitionMap`: the assignment of partitions to stores, changed by compare-and-swap only.
//!
//! It has no status subresource (status and spec would change independently), no defaults (every value is written
//! explicitly), short atomic lists and few nodes: the API server's work grows with the nodes of the whole object.

use serde_json::{Value, json};

use super::{column, wrap};

/// Maximum number of partitions of a cluster.
const PARTITIONS: u32 = 1024;
/// Maximum number of stores that a cluster ever has: 100 workers, each disk replaced a hundred times.
const STORES: u32 = 10_000;
/// Maximum number of members of an entry: three replicas, their successors while all of them move, and successors that move in turn
/// before the first moves end. A map that the API server rejects can no longer be changed.
const MEMBERS: u32 = 16;

pub(super) fn definition() -> Value {
    let names = json!({
        "kind": "PartitionMap", "plural": "partitionmaps", "singular": "partitionmap", "categories": ["engram"],
    });
    let members = |description: &str| {
        json!({
            "type": "array", "description": description, "maxItems": MEMBERS, "x-kubernetes-list-type": "atomic",
            "items": { "type": "string", "maxLength": 31, "pattern": "^[0-9]+/[0-9]+$" },
        })
    };
    let natural =
        |description: &str| json!({ "type": "integer", "format": "int64", "minimum": 0, "description": description });
    let flag = |description: &str| json!({ "type": "boolean", "description": description });
    let entry = json!({
        "type": "object",
        "required": ["term", "primary", "isr", "activated"],
        "properties": {
            "term": natural("Term: raised with every change of the primary or of the in-sync set."),
            "primary": natural("Store number of the primary."),
            "isr": members("In-sync replicas, each STORE/INCARNATION."),
            "activated": flag("Whether the primary has activated this term."),
            "soloSafe": flag("Whether a single replica has written every acknowledged change to disk."),
            "prev": members("In-sync replicas of the last activated term, while this one is not activated."),
            "learners": {
                "type": "array", "description": "Ordinals of the workers that hold a learner (a replica that is catching up).", "maxItems": 100,
                "x-kubernetes-list-type": "atomic", "items": { "type": "integer", "format": "int64", "minimum": 0 },
            },
        },
    });
    let store = json!({
        "type": "object",
        "required": ["ordinal", "storeId"],
        "properties": {
            "ordinal": natural("Ordinal of the worker that owns the store."),
            "storeId": { "type": "string", "pattern": "^[0-9a-f]{32}$", "description": "Identity of the store." },
        },
    });
    let spec = json!({
        "type": "object",
        "required": ["formatVersion", "version", "clusterId", "law", "partitionCount", "stores", "partitions"],
        "properties": {
            "formatVersion": natural("Version of this layout."),
            "version": natural("Raised by one at every change of the map."),
            "clusterId": { "type": "string", "pattern": "^[0-9a-f]{32}$", "description": "Identity of the cluster's data." },
            "law": { "type": "string", "description": "Decay law." },
            "partitionCount": {
                "type": "integer", "format": "int64", "minimum": 1, "maximum": PARTITIONS,
                "description": "Number of partitions; immutable.",
            },
            "suspended": flag("Whether the cluster is suspended by its spec: no failover takes place."),
            "stores": {
                "type": "object", "maxProperties": STORES, "additionalProperties": store,
                "description": "Stores by number; numbers are never reused.",
            },
            "partitions": {
                "type": "object", "maxProperties": PARTITIONS, "additionalProperties": entry,
                "description": "Entries by partition id.",
            },
        },
    });
    let schema = json!({
        "type": "object",
        "description": "Assignment of partitions to stores. Internal: do not edit.",
        "required": ["spec"],
        "properties": {
            "apiVersion": { "type": "string" },
            "kind": { "type": "string" },
            "metadata": { "type": "object" },
            "spec": spec,
        },
    });
    let columns = json!([
        column("Partitions", "integer", ".spec.partitionCount", 0, "Number of partitions"),
        column("Suspended", "boolean", ".spec.suspended", 0, "Whether the cluster is suspended"),
        column("Cluster-Id", "string", ".spec.clusterId", 1, "Identity of the cluster's data"),
        column("Age", "date", ".metadata.creationTimestamp", 0, "Time since creation"),
    ]);
    wrap(&names, &schema, &columns, &json!({}))
}
