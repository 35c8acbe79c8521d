//! Conversion between maps and `PartitionMap` objects.

use super::MapLocation;
use crate::{Error, format};
use engram_cluster::{Entry, PartitionMap};
use engram_memory::{ClusterId, Incarnation, Law, Member, Ordinal, StoreId, Term};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Annotation with the records of manual overrides.
pub(super) const OVERRIDES_ANNOTATION: &str = "engram.dev/overrides";

/// A store: its ordinal and its identity.
type Disk = (Ordinal, StoreId);

/// A decoded object.
#[derive(Debug, Clone)]
pub(super) struct StoredMap {
    pub(super) map: PartitionMap,
    resource_version: String,
    stores: BTreeMap<u32, Disk>,
    /// Partition keys of a damaged object, to be removed.
    strays: Vec<String>,
    /// Serialized overrides.
    pub(super) orders: Option<String>,
}

impl StoredMap {
    pub(super) fn resource_version(&self) -> &str {
        &self.resource_version
    }

    /// Returns what can be recovered of an unreadable object: resource version, store numbers, overrides.
    pub(super) fn damaged(object: &Value) -> Self {
        let stores = object.pointer("/spec/stores").and_then(Value::as_object);
        let stores = stores.into_iter().flatten().filter_map(|(number, store)| {
            let store: StoreFile = serde_json::from_value(store.clone()).ok()?;
            Some((number.parse().ok()?, (Ordinal(store.ordinal), store.store_id.parse().ok()?)))
        });
        let unknown_partitions = object.pointer("/spec/partitions").and_then(Value::as_object);
        Self {
            map: PartitionMap { cluster: ClusterId(0), version: 0, partitions: Vec::new() },
            resource_version: resource_version(object),
            stores: stores.collect(),
            strays: unknown_partitions.into_iter().flatten().map(|(key, _)| key.clone()).collect(),
            orders: orders(object),
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Spec {
    format_version: u32,
    version: u64,
    cluster_id: String,
    #[serde(rename = "law")]
    _law: String,
    partition_count: u32,
    #[serde(default, rename = "suspended")]
    _suspended: bool,
    stores: BTreeMap<String, StoreFile>,
    partitions: BTreeMap<String, EntryFile>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct StoreFile {
    ordinal: u32,
    store_id: String,
}

/// One partition. `null` takes away what a merge patch would leave.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct EntryFile {
    term: u64,
    primary: u32,
    isr: Vec<String>,
    activated: bool,
    #[serde(default)]
    solo_safe: Option<bool>,
    #[serde(default)]
    prev: Option<Vec<String>>,
    #[serde(default)]
    learners: Option<Vec<u32>>,
}

/// Why an object is not a map.
#[derive(Debug)]
pub(super) enum ObjectError {
    NewerFormat(u32),
    Damaged(String),
}

impl ObjectError {
    pub(super) fn of(self, path: PathBuf) -> Error {
        match self {
            Self::NewerFormat(found) => Error::NewerFormat { path, found, known: format::FORMAT },
            Self::Damaged(why) => Error::Damaged { path, why },
        }
    }
}

impl From<format::DecodeError> for ObjectError {
    fn from(unreadable: format::DecodeError) -> Self {
        match unreadable {
            format::DecodeError::NewerFormat(found) => Self::NewerFormat(found),
            format::DecodeError::Damaged(why) => Self::Damaged(why),
        }
    }
}

/// Reads an object.
pub(super) fn read(object: &Value) -> Result<StoredMap, ObjectError> {
    let damaged = |why: String| ObjectError::Damaged(why);
    // The version is checked first: a newer object may have other fields.
    match object.pointer("/spec/formatVersion").and_then(Value::as_u64) {
        Some(found) if found > u64::from(format::FORMAT) => {
            return Err(ObjectError::NewerFormat(u32::try_from(found).unwrap_or(u32::MAX)));
        }
        _ => {}
    }
    let spec = object.get("spec").cloned().unwrap_or_default();
    let spec: Spec = serde_json::from_value(spec).map_err(|error| damaged(format!("spec: {error}")))?;
    if spec.format_version != format::FORMAT {
        return Err(damaged(format!("spec.formatVersion is {}", spec.format_version)));
    }
    let cluster = spec.cluster_id.parse().map_err(|error| damaged(format!("spec.clusterId: {error}")))?;
    let mut stores = BTreeMap::new();
    for (number, store) in &spec.stores {
        let disk = number.parse::<u32>().ok().zip(store.store_id.parse::<StoreId>().ok());
        let (number, id) = disk.ok_or_else(|| damaged(format!("spec.stores has {number:?}: {:?}", store.store_id)))?;
        stores.insert(number, (Ordinal(store.ordinal), id));
    }
    if spec.partitions.len() != spec.partition_count as usize {
        let (found, expected) = (spec.partitions.len(), spec.partition_count);
        return Err(damaged(format!("spec.partitions has {found} entries, spec.partitionCount is {expected}")));
    }
    let entry = |id: u32| {
        let name = format!("spec.partitions[{id}]");
        let file = spec.partitions.get(&id.to_string()).ok_or_else(|| damaged(format!("{name} is absent")))?;
        entry_of(file, &stores).map_err(|why| damaged(format!("{name}: {why}")))
    };
    let partitions = (0..spec.partition_count).map(entry).collect::<Result<_, _>>()?;
    let map = PartitionMap { cluster, version: spec.version, partitions };
    Ok(StoredMap {
        map,
        resource_version: resource_version(object),
        stores,
        strays: Vec::new(),
        orders: orders(object),
    })
}

fn entry_of(file: &EntryFile, stores: &BTreeMap<u32, Disk>) -> Result<Entry, String> {
    let disk =
        |number: u32| stores.get(&number).copied().ok_or_else(|| format!("{number} is no number of spec.stores"));
    let member = |text: &String| {
        let parts = text.split_once('/').and_then(|(store, of)| Some((store.parse().ok()?, of.parse().ok()?)));
        let (number, incarnation) = parts.ok_or_else(|| format!("{text:?} is not <store>/<incarnation>"))?;
        let (ordinal, store) = disk(number)?;
        Ok::<_, String>(Member { ordinal, store, incarnation: Incarnation(incarnation) })
    };
    let members = |list: &[String]| list.iter().map(member).collect::<Result<Vec<_>, _>>();
    let entry = Entry {
        term: Term(file.term),
        primary: disk(file.primary)?.0,
        isr: members(&file.isr)?,
        solo_safe: file.solo_safe.unwrap_or(false),
        activated: file.activated,
        prev: members(file.prev.as_deref().unwrap_or_default())?,
        learners: file.learners.iter().flatten().map(|&ordinal| Ordinal(ordinal)).collect(),
    };
    // The API server's rules say so too, where they are installed.
    entry.check_invariants().map_err(|illegal| illegal.to_string())?;
    Ok(entry)
}

/// Gives numbers to the disks of `map` that have none.
fn number(stores: &mut BTreeMap<u32, Disk>, map: &PartitionMap) -> BTreeMap<Disk, u32> {
    let mut numbers: BTreeMap<Disk, u32> = stores.iter().map(|(number, disk)| (*disk, *number)).collect();
    let mut next = stores.keys().next_back().map_or(0, |number| number + 1);
    let members = map.partitions.iter().flat_map(|entry| entry.isr.iter().chain(&entry.prev));
    for disk in members.map(|member| (member.ordinal, member.store)) {
        numbers.entry(disk).or_insert_with(|| {
            stores.insert(next, disk);
            next += 1;
            next - 1
        });
    }
    numbers
}

fn entry_to(entry: &Entry, numbers: &BTreeMap<Disk, u32>) -> EntryFile {
    let number = |member: &Member| numbers[&(member.ordinal, member.store)];
    let text = |member: &Member| format!("{}/{}", number(member), member.incarnation.0);
    let some = |members: &[Member]| Some(members.iter().map(text).collect::<Vec<_>>()).filter(|list| !list.is_empty());
    let primary = entry.primary_member().expect("the rules of the map: the primary is in sync");
    EntryFile {
        term: entry.term.0,
        primary: number(primary),
        isr: entry.isr.iter().map(text).collect(),
        activated: entry.activated,
        solo_safe: entry.solo_safe.then_some(true),
        prev: some(&entry.prev),
        learners: Some(entry.learners.iter().map(|ordinal| ordinal.0).collect())
            .filter(|list: &Vec<_>| !list.is_empty()),
    }
}

fn store_to((ordinal, store): &Disk) -> Value {
    json!(StoreFile { ordinal: ordinal.0, store_id: store.to_string() })
}

/// What changes `known` into `next`, and nothing if `known` is no longer there.
pub(super) fn patch(known: &StoredMap, next: &PartitionMap, annotations: &Value) -> Value {
    let mut stores = known.stores.clone();
    let numbers = number(&mut stores, next);
    let mut partitions: Map<String, Value> = known.strays.iter().map(|key| (key.clone(), Value::Null)).collect();
    for (id, entry) in next.partitions.iter().enumerate() {
        if known.map.partitions.get(id) != Some(entry) {
            partitions.insert(id.to_string(), json!(entry_to(entry, &numbers)));
        }
    }
    let new = stores.iter().filter(|(number, _)| !known.stores.contains_key(number));
    let new: Map<String, Value> = new.map(|(number, disk)| (number.to_string(), store_to(disk))).collect();
    let mut spec = json!({ "version": next.version, "partitions": partitions });
    if !new.is_empty() {
        spec["stores"] = new.into();
    }
    // Field tracking is half of the cost of a write, and serves server-side apply alone: this switches it off for the object.
    let mut metadata = json!({ "resourceVersion": known.resource_version, "managedFields": [{}] });
    if annotations.is_object() {
        metadata["annotations"] = annotations.clone();
    }
    json!({ "metadata": metadata, "spec": spec })
}

/// The object of a cluster's first map.
pub(super) fn first(place: &MapLocation, law: Law, map: &PartitionMap, annotations: &Value) -> Value {
    let mut stores = BTreeMap::new();
    let numbers = number(&mut stores, map);
    let entries = map.partitions.iter().enumerate();
    let mut partitions: Map<String, Value> =
        entries.map(|(id, entry)| (id.to_string(), json!(entry_to(entry, &numbers)))).collect();
    for entry in partitions.values_mut().filter_map(Value::as_object_mut) {
        entry.retain(|_, value| !value.is_null());
    }
    let stores: Map<String, Value> = stores.iter().map(|(number, disk)| (number.to_string(), store_to(disk))).collect();
    let law = match law {
        Law::Linear => "Linear",
    };
    let mut metadata = json!({
        "name": place.name, "namespace": place.namespace, "labels": place.labels, "ownerReferences": place.owners,
    });
    if annotations.is_object() {
        metadata["annotations"] = annotations.clone();
    }
    json!({
        "apiVersion": "engram.dev/v1alpha1",
        "kind": "PartitionMap",
        "metadata": metadata,
        "spec": {
            "formatVersion": format::FORMAT,
            "version": map.version,
            "clusterId": map.cluster.to_string(),
            "law": law,
            "partitionCount": map.partitions.len(),
            "suspended": false,
            "stores": stores,
            "partitions": partitions,
        },
    })
}

fn orders(object: &Value) -> Option<String> {
    annotation(object, OVERRIDES_ANNOTATION).map(str::to_owned)
}

pub(super) fn annotation<'a>(object: &'a Value, name: &str) -> Option<&'a str> {
    object.pointer("/metadata/annotations")?.get(name)?.as_str()
}

pub(super) fn resource_version(object: &Value) -> String {
    object.pointer("/metadata/resourceVersion").and_then(Value::as_str).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(ordinal: u32, store: u128, incarnation: u64) -> Member {
        Member { ordinal: Ordinal(ordinal), store: StoreId(store), incarnation: Incarnation(incarnation) }
    }

    fn map() -> PartitionMap {
        let pair = Entry::first(vec![member(0, 10, 1), member(1, 11, 4)]);
        let solo = Entry::solo(Term(3), member(1, 11, 4));
        PartitionMap { cluster: ClusterId(7), version: 1, partitions: vec![pair, solo] }
    }

    /// As an API server merges.
    fn merge(object: &mut Value, patch: &Value) {
        let Value::Object(patch) = patch else {
            object.clone_from(patch);
            return;
        };
        if !object.is_object() {
            *object = json!({});
        }
        let fields = object.as_object_mut().unwrap();
        for (name, value) in patch {
            if value.is_null() {
                fields.remove(name);
            } else {
                merge(fields.entry(name.clone()).or_insert(Value::Null), value);
            }
        }
    }

    #[test]
    fn a_map_comes_back_as_it_was_written_whatever_was_there_before() {
        let place = MapLocation { namespace: "ns".into(), name: "words".into(), ..MapLocation::default() };
        let mut object = first(&place, Law::Linear, &map(), &Value::Null);
        assert_eq!(read(&object).unwrap().map, map());
        assert_eq!(
            object["spec"]["partitions"]["1"],
            json!({
                "term": 3, "primary": 1, "isr": ["1/4"], "activated": true, "soloSafe": true,
            }),
            "no node that says nothing"
        );

        // Every field of an entry appears and goes again; a disk is replaced.
        object["metadata"]["resourceVersion"] = "5".into();
        let mut next = PartitionMap { version: 2, ..map() };
        next.partitions[0] = Entry {
            term: Term(2),
            primary: Ordinal(1),
            isr: vec![member(1, 11, 4)],
            activated: false,
            solo_safe: true,
            prev: vec![member(0, 10, 1), member(1, 11, 4)],
            learners: vec![Ordinal(2)],
        };
        let written = patch(&read(&object).unwrap(), &next, &Value::Null);
        assert_eq!(written["metadata"], json!({ "resourceVersion": "5", "managedFields": [{}] }));
        assert_eq!(written["spec"]["partitions"].as_object().unwrap().len(), 1, "only what changes is named");
        assert_eq!(written["spec"].get("stores"), None);
        merge(&mut object, &written);
        assert_eq!(read(&object).unwrap().map, next);

        next.version = 3;
        next.partitions[0] = Entry::first(vec![member(1, 11, 4), member(2, 99, 1)]);
        let written = patch(&read(&object).unwrap(), &next, &Value::Null);
        assert_eq!(written["spec"]["stores"], json!({ "2": { "ordinal": 2, "storeId": format!("{:032x}", 99) } }));
        merge(&mut object, &written);
        assert_eq!(read(&object).unwrap().map, next);
        assert_eq!(object["spec"]["partitions"]["0"].as_object().unwrap().len(), 4);
    }

    #[test]
    fn object_without_a_map_is_named_and_can_be_rebuilt() {
        let place = MapLocation { namespace: "ns".into(), name: "words".into(), ..MapLocation::default() };
        let whole = first(&place, Law::Linear, &map(), &Value::Null);
        let broken = |path: &str, value: Value| {
            let mut object = whole.clone();
            *object.pointer_mut(path).unwrap() = value;
            (read(&object).unwrap_err(), object)
        };
        for (path, value, why) in [
            ("/spec/partitionCount", json!(3), "spec.partitions has 2 entries, spec.partitionCount is 3"),
            ("/spec/partitions/1/isr", json!(["9/4"]), "spec.partitions[1]: 9 is no number of spec.stores"),
            ("/spec/partitions/1/isr", json!(["x"]), "spec.partitions[1]: \"x\" is not <store>/<incarnation>"),
            ("/spec/clusterId", json!("zz"), "spec.clusterId"),
        ] {
            match broken(path, value).0 {
                ObjectError::Damaged(found) => assert!(found.starts_with(why), "{found}"),
                other @ ObjectError::NewerFormat(_) => panic!("{other:?}"),
            }
        }
        assert!(matches!(broken("/spec/formatVersion", json!(9)).0, ObjectError::NewerFormat(9)));
        let (_, mut object) = broken("/spec/partitions", json!({ "0": {}, "77": {} }));
        let again = PartitionMap { version: 1_000, ..map() };
        let written = patch(&StoredMap::damaged(&object), &again, &json!({ OVERRIDES_ANNOTATION: "x" }));
        merge(&mut object, &written);
        assert_eq!(read(&object).unwrap().map, again);
        assert_eq!(annotation(&object, OVERRIDES_ANNOTATION), Some("x"));
    }
}
