//! Parsing of Kubernetes objects into views. An invalid object is an error, never a default: a map with a missing partition must not look
//! like an empty cluster.

use std::collections::BTreeMap;

use engram_api::Size;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::cluster::observe::observation::{ClaimView, MapView, PartitionView, SetView};
use crate::names::CLUSTER_ID_LABEL;

/// Why an object cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{object}: {field} is {found}; expected {expected}")]
pub struct InvalidObject {
    object: String,
    field: String,
    found: String,
    expected: &'static str,
}

fn invalid_object(object: &Value, field: &str, found: Option<&Value>, expected: &'static str) -> InvalidObject {
    let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or("?").to_owned();
    InvalidObject {
        object: format!("{} {}", text("/kind"), text("/metadata/name")),
        field: field.to_owned(),
        found: found.map_or_else(|| "absent".into(), Value::to_string),
        expected,
    }
}

/// Parses an object of the Kubernetes API.
///
/// # Errors
/// Names the object and what does not fit its type.
pub(super) fn parse<T: DeserializeOwned>(object: &Value) -> Result<T, InvalidObject> {
    T::deserialize(object).map_err(|error| InvalidObject {
        found: error.to_string(),
        ..invalid_object(object, "object", None, "an object of its kind")
    })
}

impl SetView {
    /// Parses a StatefulSet. Its newest revision is empty until its controller has observed the newest template.
    ///
    /// # Errors
    ///
    /// Fails if it has no number of replicas.
    pub fn read(object: &Value) -> Result<Self, InvalidObject> {
        let StatefulSet { metadata, spec, status } = parse(object)?;
        let status = status.unwrap_or_default();
        let replicas = spec.and_then(|spec| spec.replicas).and_then(|replicas| u32::try_from(replicas).ok());
        let replicas = replicas.ok_or_else(|| {
            invalid_object(object, "/spec/replicas", object.pointer("/spec/replicas"), "a whole number")
        })?;
        let is_current = status.observed_generation == metadata.generation;
        Ok(Self {
            replicas,
            update_revision: status.update_revision.filter(|_| is_current).unwrap_or_default(),
            created: metadata.creation_timestamp.map(|time| time.0.to_string()),
        })
    }
}

impl ClaimView {
    /// Parses a PersistentVolumeClaim.
    ///
    /// # Errors
    ///
    /// Fails if its name has no ordinal or its size is invalid.
    pub fn read(object: &Value) -> Result<Self, InvalidObject> {
        const SIZE: &str = "/spec/resources/requests/storage";
        let PersistentVolumeClaim { metadata, spec, status } = parse(object)?;
        let (spec, status) = (spec.unwrap_or_default(), status.unwrap_or_default());
        let requested = spec.resources.and_then(|resources| resources.requests?.remove("storage"));
        let size = requested.and_then(|size| size.0.parse::<Size>().ok());
        let size = size.ok_or_else(|| invalid_object(object, SIZE, object.pointer(SIZE), "a size such as 50Gi"))?;
        Ok(Self {
            ordinal: ordinal(object)?,
            uid: metadata.uid.unwrap_or_default(),
            size_bytes: size.as_bytes(),
            cluster_id: metadata.labels.and_then(|mut labels| labels.remove(CLUSTER_ID_LABEL)),
            storage_class: spec.storage_class_name,
            is_pending: status.phase.as_deref() == Some("Pending") && spec.volume_name.is_none(),
        })
    }
}

impl MapView {
    /// Parses a `PartitionMap`. Stores are resolved to workers: the newest store of each ordinal; replicas on older stores are dropped.
    ///
    /// # Errors
    ///
    /// Fails if a partition is missing or refers to an unknown store.
    pub fn read(object: &Value) -> Result<Self, InvalidObject> {
        const STORES: &str = "/spec/stores";
        let stores = object.pointer(STORES).and_then(Value::as_object);
        let stores = stores.ok_or_else(|| invalid_object(object, STORES, None, "store numbers"))?;
        let mut ordinals = BTreeMap::new();
        for (number, store) in stores {
            let number =
                number.parse::<u32>().ok().zip(store["ordinal"].as_u64().and_then(|ordinal| ordinal.try_into().ok()));
            let (number, ordinal) =
                number.ok_or_else(|| invalid_object(object, STORES, Some(store), "a number with an ordinal"))?;
            ordinals.insert(number, ordinal);
        }
        // Store numbers increase: the highest number of an ordinal is its current store.
        let newest: BTreeMap<u32, u32> = ordinals.iter().map(|(number, ordinal)| (*ordinal, *number)).collect();
        let stores: BTreeMap<u32, Option<u32>> =
            ordinals.into_iter().map(|(number, of)| (number, Some(of).filter(|of| newest[of] == number))).collect();
        let count = natural(object, "/spec/partitionCount")?;
        let partitions = (0..count).map(|id| partition(object, id, &stores)).collect::<Result<_, _>>()?;
        let owners = object.pointer("/metadata/ownerReferences").and_then(Value::as_array).into_iter().flatten();
        let mut owners = owners.filter(|owner| owner["kind"] == "LearnerCluster");
        Ok(Self {
            uid: text(object, "/metadata/uid").unwrap_or_default(),
            owner: owners.next().and_then(|owner| owner["uid"].as_str()).map(str::to_owned),
            resource_version: text(object, "/metadata/resourceVersion").unwrap_or_default(),
            cluster_id: text(object, "/spec/clusterId")
                .ok_or_else(|| invalid_object(object, "/spec/clusterId", None, "32 hexadecimal digits"))?,
            suspended: object.pointer("/spec/suspended") == Some(&Value::Bool(true)),
            stores: newest,
            partitions,
        })
    }
}

/// Parses one partition; `stores` maps store numbers to ordinals, `None` for replaced stores.
fn partition(object: &Value, id: u32, stores: &BTreeMap<u32, Option<u32>>) -> Result<PartitionView, InvalidObject> {
    let path = format!("/spec/partitions/{id}");
    let entry = object.pointer(&path).ok_or_else(|| invalid_object(object, &path, None, "an entry"))?;
    let bad = |value: &Value| invalid_object(object, &path, Some(value), "a number of spec.stores");
    let of_number = |value: &Value| {
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        number.and_then(|number| stores.get(&number).copied()).ok_or_else(|| bad(value))
    };
    let of_member = |value: &Value| {
        let number = value.as_str().and_then(|member| member.split_once('/')?.0.parse().ok());
        number.and_then(|number: u32| stores.get(&number).copied()).ok_or_else(|| bad(value))
    };
    let list = |name: &str| entry[name].as_array().into_iter().flatten();
    let on_workers = |members: Result<Vec<Option<u32>>, InvalidObject>| Ok(members?.into_iter().flatten().collect());
    let primary = of_number(&entry["primary"])?;
    Ok(PartitionView {
        primary: primary.unwrap_or(u32::MAX),
        in_sync: on_workers(list("isr").map(of_member).collect())?,
        // Learners are ordinals, not stores.
        learners: list("learners").filter_map(|ordinal| ordinal.as_u64()?.try_into().ok()).collect(),
        // A replaced store does not serve.
        activated: entry["activated"] == true && primary.is_some(),
    })
}

/// Returns the number after the last dash of an object's name.
pub(super) fn ordinal(object: &Value) -> Result<u32, InvalidObject> {
    const NAME: &str = "/metadata/name";
    let name = object.pointer(NAME);
    let number = name.and_then(Value::as_str).and_then(|name| name.rsplit_once('-')?.1.parse().ok());
    number.ok_or_else(|| invalid_object(object, NAME, name, "a name that ends with an ordinal"))
}

fn natural(object: &Value, path: &str) -> Result<u32, InvalidObject> {
    let number = object.pointer(path).and_then(Value::as_u64).and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| invalid_object(object, path, object.pointer(path), "a whole number"))
}

fn text(object: &Value, path: &str) -> Option<String> {
    object.pointer(path).and_then(Value::as_str).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use crate::cluster::observe::observation::{ClaimView, MapView, SetView};

    #[test]
    fn map_view_resolves_stores_to_workers() {
        let mut map = json!({
            "kind": "PartitionMap",
            "metadata": { "name": "words", "resourceVersion": "7" },
            "spec": {
                "clusterId": "5b1c00009f3ac2d17be84450a1b2c3d4", "partitionCount": 2, "suspended": true,
                "stores": { "0": { "ordinal": 0 }, "1": { "ordinal": 1 }, "5": { "ordinal": 2 } },
                "partitions": {
                    "0": { "term": 12, "primary": 0, "isr": ["0/3", "5/1"], "activated": true },
                    "1": { "term": 4, "primary": 1, "isr": ["1/5"], "activated": false, "learners": [2] },
                },
            },
        });
        let view = MapView::read(&map).expect("a map");
        assert_eq!((view.resource_version.as_str(), view.suspended), ("7", true));
        assert_eq!((view.partitions[0].in_sync.as_slice(), view.partitions[0].activated), (&[0, 2][..], true));
        assert_eq!((view.partitions[1].primary, view.partitions[1].learners.as_slice()), (1, &[2][..]));
        assert_eq!((view.primaries(1), view.copies(2), view.is_full(1), view.is_full(2)), (1, 2, false, false));

        assert_eq!(view.stores, BTreeMap::from([(0, 0), (1, 1), (2, 5)]));

        map["spec"]["stores"]["7"] = json!({ "ordinal": 0 });
        let replaced = MapView::read(&map).expect("a map");
        assert_eq!((replaced.partitions[0].in_sync.as_slice(), replaced.partitions[0].activated), (&[2][..], false));

        map["spec"]["partitions"]["1"]["isr"] = json!(["9/1"]);
        let error = MapView::read(&map).expect_err("an unknown store").to_string();
        assert_eq!(error, "PartitionMap words: /spec/partitions/1 is \"9/1\"; expected a number of spec.stores");
        map["spec"]["partitions"] = json!({ "0": map["spec"]["partitions"]["0"].clone() });
        assert!(MapView::read(&map).is_err(), "a partition is missing");
    }

    #[test]
    fn claims_and_sets_are_parsed() {
        let mut set = json!({
            "kind": "StatefulSet", "metadata": { "name": "words-worker", "generation": 2 }, "spec": { "replicas": 3 },
            "status": { "observedGeneration": 1, "updateRevision": "old" },
        });
        assert_eq!(
            SetView::read(&set).expect("a set").update_revision,
            "",
            "its controller has not observed the template"
        );
        set["status"]["observedGeneration"] = 2.into();
        assert_eq!(SetView::read(&set).expect("a set").update_revision, "old");
        let mut claim = json!({
            "kind": "PersistentVolumeClaim",
            "metadata": { "name": "data-words-worker-0", "labels": { "engram.dev/cluster-id": "00" } },
            "spec": { "resources": { "requests": { "storage": "50Gi" } }, "storageClassName": "fast" },
            "status": { "phase": "Pending" },
        });
        let view = ClaimView::read(&claim).expect("a claim");
        assert_eq!((view.ordinal, view.size_bytes, view.cluster_id.as_deref()), (0, 50 << 30, Some("00")));
        assert_eq!((view.storage_class.as_deref(), view.is_pending), (Some("fast"), true));
        claim["spec"]["volumeName"] = "pvc-1".into();
        assert!(!ClaimView::read(&claim).expect("a claim").is_pending, "its volume is being bound");
    }
}
