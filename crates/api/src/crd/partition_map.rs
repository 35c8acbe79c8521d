//! The definition of `PartitionMap`: who holds which partition, changed by compare-and-swap only.
//!
//! It has no status subresource (a second half would have a second life), no defaults (a default is something that
//! nobody wrote), short atomic lists and few nodes: the API server's work grows with the nodes of the whole object.

use serde_json::{Value, json};

use super::{column, wrap};

/// Most partitions of a cluster.
const PARTITIONS: u32 = 1024;
/// Most numbers that disks of a cluster can be given: 100 workers, each disk replaced a hundred times.
const STORES: u32 = 10_000;
/// Most members of an entry: three copies, their successors while all of them move, and the successors of those that are to move as
/// well before the first have gone. A map that the API server refuses cannot be changed at all.
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
            "term": natural("Raised with every change of primary or copies in sync."),
            "primary": natural("Number of the store that serves."),
            "isr": members("Copies in sync: number of the store, a slash, its incarnation."),
            "activated": flag("Whether the primary has taken up this entry."),
            "soloSafe": flag("Whether a lone copy has put everything on disk before it acknowledged."),
            "prev": members("Copies in sync of the last activated entry, while this one is not."),
            "learners": {
                "type": "array", "description": "Ordinals of the workers that are catching up.", "maxItems": 100,
                "x-kubernetes-list-type": "atomic", "items": { "type": "integer", "format": "int64", "minimum": 0 },
            },
        },
    });
    let store = json!({
        "type": "object",
        "required": ["ordinal", "storeId"],
        "properties": {
            "ordinal": natural("Ordinal of the worker that has the disk."),
            "storeId": { "type": "string", "pattern": "^[0-9a-f]{32}$", "description": "Identity of the disk." },
        },
    });
    let spec = json!({
        "type": "object",
        "required": ["formatVersion", "version", "clusterId", "law", "partitionCount", "stores", "partitions"],
        "properties": {
            "formatVersion": natural("Version of this layout."),
            "version": natural("Raised by one at every change of the map."),
            "clusterId": { "type": "string", "pattern": "^[0-9a-f]{32}$", "description": "Identity of the data." },
            "law": { "type": "string", "description": "The law of decay." },
            "partitionCount": {
                "type": "integer", "format": "int64", "minimum": 1, "maximum": PARTITIONS,
                "description": "Number of partitions; it never changes.",
            },
            "suspended": flag("Whether the cluster is suspended on purpose: it is not failed over."),
            "stores": {
                "type": "object", "maxProperties": STORES, "additionalProperties": store,
                "description": "Number to disk; a number is given once and never again.",
            },
            "partitions": {
                "type": "object", "maxProperties": PARTITIONS, "additionalProperties": entry,
                "description": "Partition id to its entry.",
            },
        },
    });
    let schema = json!({
        "type": "object",
        "description": "Who holds which partition. Internal: read it, do not edit it.",
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
        column("Suspended", "boolean", ".spec.suspended", 0, "Suspended on purpose"),
        column("Cluster-Id", "string", ".spec.clusterId", 1, "Identity of the data"),
        column("Age", "date", ".metadata.creationTimestamp", 0, "Time since it was made"),
    ]);
    wrap(&names, &schema, &columns, &json!({}))
}
