//! Parsing of Kubernetes objects into views. An invalid object is an error, never a default: a map with a missing partition must not look
//! like an empty cluster.

use std::collections::BTreeMap;

use engram_api::Size;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde::Deserialize;

use crate::cluster::observe::observation::{ClaimView, MapView, PartitionView, SetView};
use crate::kube::api_object::{ApiObject, InvalidObject};
use crate::names::CLUSTER_ID_LABEL;

impl SetView {
    /// Parses a StatefulSet. Its newest revision is empty until its controller has observed the newest template.
    ///
    /// # Errors
    ///
    /// Fails if it has no number of replicas.
    pub fn read(object: &ApiObject) -> Result<Self, InvalidObject> {
        let StatefulSet { metadata, spec, status } = object.read()?;
        let status = status.unwrap_or_default();
        let found = spec.and_then(|spec| spec.replicas);
        let replicas = found.and_then(|replicas| u32::try_from(replicas).ok());
        let replicas =
            replicas.ok_or_else(|| object.invalid("spec.replicas", format!("{found:?}"), "a whole number"))?;
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
    pub fn read(object: &ApiObject) -> Result<Self, InvalidObject> {
        let PersistentVolumeClaim { metadata, spec, status } = object.read()?;
        let (spec, status) = (spec.unwrap_or_default(), status.unwrap_or_default());
        let requested = spec.resources.and_then(|resources| resources.requests?.remove("storage"));
        let size = requested.as_ref().and_then(|size| size.0.parse::<Size>().ok());
        let size = size.ok_or_else(|| {
            let found = requested.map_or_else(|| "absent".to_owned(), |size| size.0);
            object.invalid("spec.resources.requests.storage", found, "a size such as 50Gi")
        })?;
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

/// A `PartitionMap` as it is stored, as far as a plan depends on it.
#[derive(Deserialize)]
struct StoredMap {
    spec: StoredSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct StoredSpec {
    cluster_id: String,
    partition_count: u32,
    #[serde(default)]
    suspended: bool,
    /// Stores by number.
    stores: BTreeMap<u32, Store>,
    /// Entries by partition.
    #[serde(default)]
    partitions: BTreeMap<u32, Entry>,
}

#[derive(Deserialize)]
struct Store {
    ordinal: u32,
}

#[derive(Deserialize)]
struct Entry {
    /// Number of a store.
    primary: u32,
    /// Members, each `STORE/INCARNATION`.
    #[serde(default)]
    isr: Vec<String>,
    /// Ordinals, not stores.
    #[serde(default)]
    learners: Vec<u32>,
    #[serde(default)]
    activated: bool,
}

impl MapView {
    /// Parses a `PartitionMap`. Stores are resolved to workers: the newest store of each ordinal; replicas on older stores are dropped.
    ///
    /// # Errors
    ///
    /// Fails if a partition is missing or refers to an unknown store.
    pub fn read(object: &ApiObject) -> Result<Self, InvalidObject> {
        let StoredMap { spec } = object.read()?;
        // Store numbers increase: the highest number of an ordinal is its current store.
        let newest: BTreeMap<u32, u32> = spec.stores.iter().map(|(number, store)| (store.ordinal, *number)).collect();
        let worker = |number: &u32| {
            let ordinal = spec.stores.get(number)?.ordinal;
            Some(Some(ordinal).filter(|ordinal| newest[ordinal] == *number))
        };
        let partitions = (0..spec.partition_count).map(|id| {
            let field = format!("spec.partitions.{id}");
            let entry = spec.partitions.get(&id);
            let entry = entry.ok_or_else(|| object.invalid(&field, "absent".to_owned(), "an entry"))?;
            let unknown = |found: String| object.invalid(&field, found, "a number of spec.stores");
            partition(entry, worker).map_err(unknown)
        });
        let partitions = partitions.collect::<Result<_, _>>()?;
        Ok(Self {
            uid: object.uid().to_owned(),
            owner: object.owners().find(|owner| owner.kind == "LearnerCluster").map(|owner| owner.uid.clone()),
            resource_version: object.metadata().resource_version.clone().unwrap_or_default(),
            cluster_id: spec.cluster_id,
            suspended: spec.suspended,
            stores: newest,
            partitions,
        })
    }
}

/// Parses one partition. `worker` maps store numbers to ordinals: `None` for an unknown store, `Some(None)` for a replaced one. An error is
/// the unknown store.
fn partition(entry: &Entry, worker: impl Fn(&u32) -> Option<Option<u32>>) -> Result<PartitionView, String> {
    let primary = worker(&entry.primary).ok_or_else(|| entry.primary.to_string())?;
    let of_member = |member: &String| {
        let number = member.split_once('/').and_then(|(number, _)| number.parse().ok());
        number.and_then(|number| worker(&number)).ok_or_else(|| member.clone())
    };
    let in_sync: Vec<Option<u32>> = entry.isr.iter().map(of_member).collect::<Result<_, _>>()?;
    Ok(PartitionView {
        primary: primary.unwrap_or(u32::MAX),
        in_sync: in_sync.into_iter().flatten().collect(),
        learners: entry.learners.clone(),
        // A replaced store does not serve.
        activated: entry.activated && primary.is_some(),
    })
}

/// Returns the number after the last dash of an object's name.
pub(super) fn ordinal(object: &ApiObject) -> Result<u32, InvalidObject> {
    let number = object.name().rsplit_once('-').and_then(|(_, number)| number.parse().ok());
    number.ok_or_else(|| object.invalid("metadata.name", object.name().to_owned(), "a name that ends with an ordinal"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use crate::cluster::observe::observation::{ClaimView, MapView, SetView};
    use crate::kube::api_object::{ApiObject, InvalidObject};
    use crate::kube::resource_kinds::{CLAIM, MAP, SET};

    fn map_view(map: &Value) -> Result<MapView, InvalidObject> {
        MapView::read(&ApiObject::new(MAP, map.clone()))
    }

    fn set_view(set: &Value) -> SetView {
        SetView::read(&ApiObject::new(SET, set.clone())).expect("a set")
    }

    fn claim_view(claim: &Value) -> ClaimView {
        ClaimView::read(&ApiObject::new(CLAIM, claim.clone())).expect("a claim")
    }

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
        let view = map_view(&map).expect("a map");
        assert_eq!((view.resource_version.as_str(), view.suspended), ("7", true));
        assert_eq!((view.partitions[0].in_sync.as_slice(), view.partitions[0].activated), (&[0, 2][..], true));
        assert_eq!((view.partitions[1].primary, view.partitions[1].learners.as_slice()), (1, &[2][..]));
        assert_eq!((view.primaries(1), view.copies(2), view.is_full(1), view.is_full(2)), (1, 2, false, false));

        assert_eq!(view.stores, BTreeMap::from([(0, 0), (1, 1), (2, 5)]));

        map["spec"]["stores"]["7"] = json!({ "ordinal": 0 });
        let replaced = map_view(&map).expect("a map");
        assert_eq!((replaced.partitions[0].in_sync.as_slice(), replaced.partitions[0].activated), (&[2][..], false));

        map["spec"]["partitions"]["1"]["isr"] = json!(["9/1"]);
        let error = map_view(&map).expect_err("an unknown store").to_string();
        assert_eq!(error, "PartitionMap words: spec.partitions.1 is 9/1; expected a number of spec.stores");
        map["spec"]["partitions"] = json!({ "0": map["spec"]["partitions"]["0"].clone() });
        assert!(map_view(&map).is_err(), "a partition is missing");
    }

    #[test]
    fn claims_and_sets_are_parsed() {
        let mut set = json!({
            "kind": "StatefulSet", "metadata": { "name": "words-worker", "generation": 2 }, "spec": { "replicas": 3 },
            "status": { "observedGeneration": 1, "updateRevision": "old" },
        });
        assert_eq!(set_view(&set).update_revision, "", "its controller has not observed the template");
        set["status"]["observedGeneration"] = 2.into();
        assert_eq!(set_view(&set).update_revision, "old");
        let mut claim = json!({
            "kind": "PersistentVolumeClaim",
            "metadata": { "name": "data-words-worker-0", "labels": { "engram.dev/cluster-id": "00" } },
            "spec": { "resources": { "requests": { "storage": "50Gi" } }, "storageClassName": "fast" },
            "status": { "phase": "Pending" },
        });
        let view = claim_view(&claim);
        assert_eq!((view.ordinal, view.size_bytes, view.cluster_id.as_deref()), (0, 50 << 30, Some("00")));
        assert_eq!((view.storage_class.as_deref(), view.is_pending), (Some("fast"), true));
        claim["spec"]["volumeName"] = "pvc-1".into();
        assert!(!claim_view(&claim).is_pending, "its volume is being bound");
    }
}
