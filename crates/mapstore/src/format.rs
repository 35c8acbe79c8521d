//! File format of the map, goal and overrides: JSON with a format version and a checksum over the content.

use engram_cluster::{Entry, PartitionMap};
use engram_memory::{ClusterId, Incarnation, Member, Ordinal, StoreId, Term};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

/// Newest supported format version.
pub(crate) const FORMAT: u32 = 1;

/// Why a file cannot be decoded.
#[derive(Debug)]
pub(crate) enum DecodeError {
    NewerFormat(u32),
    Damaged(String),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct MapFile {
    cluster: String,
    version: u64,
    partitions: Vec<EntryFile>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct EntryFile {
    term: u64,
    primary: u32,
    isr: Vec<MemberFile>,
    solo_safe: bool,
    activated: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    prev: Vec<MemberFile>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    learners: Vec<u32>,
}

/// (ordinal, store id, incarnation)
#[derive(Serialize, Deserialize)]
struct MemberFile(u32, String, u64);

pub(crate) fn encode(map: &PartitionMap) -> String {
    let file = MapFile {
        cluster: map.cluster.to_string(),
        version: map.version,
        partitions: map.partitions.iter().map(entry_to_file).collect(),
    };
    seal("map", serde_json::to_value(file).expect("a map has string keys only"))
}

/// Serializes `content` under `name`, with format version and checksum.
pub(crate) fn seal(name: &str, content: Value) -> String {
    let envelope = [("format", Value::from(FORMAT)), ("checksum", Value::from(checksum(&content))), (name, content)];
    let envelope: serde_json::Map<_, _> = envelope.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    Value::Object(envelope).to_string() + "\n"
}

/// Parses and verifies the output of [`seal`].
pub(crate) fn unseal(name: &str, text: &str) -> Result<Value, DecodeError> {
    let damaged = |why: &str| DecodeError::Damaged(why.to_owned());
    let mut value: Value = serde_json::from_str(text).map_err(|error| damaged(&error.to_string()))?;
    // The version is checked first: a newer file may have other fields.
    match value.get("format").and_then(Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => {}
        Some(format) => return Err(DecodeError::NewerFormat(u32::try_from(format).unwrap_or(u32::MAX))),
        None => return Err(damaged("it has no format version")),
    }
    let fields = value.as_object_mut().ok_or_else(|| damaged("it is not an object"))?;
    let content = fields.remove(name).ok_or_else(|| damaged("it has no content"))?;
    if fields.get("checksum").and_then(Value::as_str) != Some(&checksum(&content)) {
        return Err(damaged("the checksum does not match"));
    }
    match fields.keys().find(|key| !matches!(key.as_str(), "format" | "checksum")) {
        Some(unknown) => Err(damaged(&format!("unknown field {unknown:?}"))),
        None => Ok(content),
    }
}

pub(crate) fn decode(text: &str) -> Result<PartitionMap, DecodeError> {
    let damaged = |why: &dyn std::fmt::Display| DecodeError::Damaged(why.to_string());
    let file: MapFile = serde_json::from_value(unseal("map", text)?).map_err(|error| damaged(&error))?;
    let cluster: ClusterId = file.cluster.parse().map_err(|error| damaged(&error))?;
    let partitions =
        file.partitions.iter().map(entry_from_file).collect::<Result<_, _>>().map_err(DecodeError::Damaged)?;
    Ok(PartitionMap { cluster, version: file.version, partitions })
}

/// Returns the XXH3-64 of the compact JSON with sorted keys.
fn checksum(content: &Value) -> String {
    format!("{:016x}", xxh3_64(content.to_string().as_bytes()))
}

pub(crate) fn entry_to_file(entry: &Entry) -> EntryFile {
    EntryFile {
        term: entry.term.0,
        primary: entry.primary.0,
        isr: entry.isr.iter().map(member_to_file).collect(),
        solo_safe: entry.solo_safe,
        activated: entry.activated,
        prev: entry.prev.iter().map(member_to_file).collect(),
        learners: entry.learners.iter().map(|ordinal| ordinal.0).collect(),
    }
}

pub(crate) fn entry_from_file(file: &EntryFile) -> Result<Entry, String> {
    let members = |files: &[MemberFile]| files.iter().map(member_from_file).collect::<Result<Vec<_>, _>>();
    let entry = Entry {
        term: Term(file.term),
        primary: Ordinal(file.primary),
        isr: members(&file.isr)?,
        solo_safe: file.solo_safe,
        activated: file.activated,
        prev: members(&file.prev)?,
        learners: file.learners.iter().map(|&ordinal| Ordinal(ordinal)).collect(),
    };
    // The checksum does not prove that the writer was correct.
    entry.check_invariants().map_err(|illegal| illegal.to_string())?;
    Ok(entry)
}

fn member_to_file(member: &Member) -> MemberFile {
    MemberFile(member.ordinal.0, member.store.to_string(), member.incarnation.0)
}

fn member_from_file(file: &MemberFile) -> Result<Member, String> {
    let store: StoreId = file.1.parse().map_err(|error| format!("store id {:?}: {error}", file.1))?;
    Ok(Member { ordinal: Ordinal(file.0), store, incarnation: Incarnation(file.2) })
}
