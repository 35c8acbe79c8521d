//! The partition map as the API server has it, as far as copies go.

use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::BTreeMap;

/// A process of a worker, as the map names it: the number of its disk, and its incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    store: u32,
    incarnation: u64,
}

/// What the map says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Map {
    /// The place of each disk.
    ordinals: BTreeMap<u32, u32>,
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    term: u64,
    primary: u32,
    activated: bool,
    in_sync: Vec<Process>,
}

impl Map {
    /// Reads a `PartitionMap`.
    pub(super) fn read(object: &Value) -> Result<Self> {
        let spec = &object["spec"];
        let stores = spec["stores"].as_object().context("spec.stores is missing")?;
        let ordinal = |(number, store): (&String, &Value)| Some((number.parse().ok()?, number_of(&store["ordinal"])?));
        let ordinals =
            stores.iter().map(ordinal).collect::<Option<_>>().context("spec.stores is not as it should be")?;
        let entries = spec["partitions"].as_object().context("spec.partitions is missing")?;
        let entries = entries.values().map(Entry::read).collect::<Option<_>>();
        Ok(Self { ordinals, entries: entries.context("spec.partitions is not as it should be")? })
    }

    /// Every process of a worker that is in sync anywhere.
    pub(super) fn processes(&self, ordinal: u32) -> Vec<Process> {
        let mut found: Vec<Process> = self.in_sync().filter(|it| self.ordinal(it) == Some(ordinal)).collect();
        found.dedup();
        found
    }

    /// How many partitions a worker leads.
    pub(super) fn primaries(&self, ordinal: u32) -> usize {
        self.entries.iter().filter(|entry| self.ordinals.get(&entry.primary) == Some(&ordinal)).count()
    }

    /// The term of each partition: it rises with every new primary.
    pub(super) fn terms(&self) -> Vec<u64> {
        self.entries.iter().map(|entry| entry.term).collect()
    }

    /// Returns why some partition lacks replicas in processes other than those of `gone`; `None` if all have them.
    pub(super) fn wanting(&self, replicas: usize, gone: &[Process]) -> Option<String> {
        let is_gone = |process: &Process| {
            gone.iter().any(|gone| gone.store == process.store && process.incarnation <= gone.incarnation)
        };
        self.entries.iter().enumerate().find_map(|(partition, entry)| {
            let in_sync = entry.in_sync.iter().filter(|process| !is_gone(process)).count();
            match in_sync >= replicas {
                _ if entry.in_sync.iter().any(is_gone) => Some(format!("entry {partition} names an ended process")),
                false => Some(format!("entry {partition} has {in_sync} of {replicas} replicas in sync")),
                true if !entry.activated => Some(format!("entry {partition} is not activated")),
                true => None,
            }
        })
    }

    fn in_sync(&self) -> impl Iterator<Item = Process> {
        self.entries.iter().flat_map(|entry| entry.in_sync.iter().copied())
    }

    fn ordinal(&self, process: &Process) -> Option<u32> {
        self.ordinals.get(&process.store).copied()
    }
}

impl Entry {
    fn read(entry: &Value) -> Option<Self> {
        let member = |text: &Value| {
            let (store, incarnation) = text.as_str()?.split_once('/')?;
            Some(Process { store: store.parse().ok()?, incarnation: incarnation.parse().ok()? })
        };
        Some(Self {
            term: entry["term"].as_u64()?,
            primary: number_of(&entry["primary"])?,
            activated: entry["activated"].as_bool()?,
            in_sync: entry["isr"].as_array()?.iter().map(member).collect::<Option<_>>()?,
        })
    }
}

fn number_of(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| number.try_into().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(isr: &Value, activated: bool) -> Value {
        json!({ "spec": {
            "stores": { "0": { "ordinal": 0, "storeId": "a" }, "1": { "ordinal": 1, "storeId": "b" } },
            "partitions": { "0": { "term": 3, "primary": 0, "isr": isr, "activated": activated } },
        } })
    }

    #[test]
    fn replica_of_an_ended_process_does_not_count_and_its_successor_does() {
        let map = |isr| Map::read(&object(&isr, true)).unwrap();
        let before = map(json!(["0/4", "1/7"]));
        assert_eq!((before.wanting(2, &[]), before.primaries(0), before.primaries(1)), (None, 1, 0));
        let gone = before.processes(1);
        assert!(before.wanting(2, &gone).is_some_and(|it| it.contains("names an ended process")));
        assert!(map(json!(["0/4"])).wanting(2, &gone).is_some_and(|it| it.contains("1 of 2 replicas")));
        assert_eq!(map(json!(["0/4", "1/8"])).wanting(2, &gone), None);
        let idle = Map::read(&object(&json!(["0/4", "1/8"]), false)).unwrap();
        assert!(idle.wanting(2, &gone).is_some_and(|it| it.contains("not activated")));
    }
}
