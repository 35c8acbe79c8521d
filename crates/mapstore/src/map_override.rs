//! Manual overrides of the map's rules, and their permanent records.

use crate::format::{DecodeError, EntryFile, entry_from_file, entry_to_file, seal, unseal};
use crate::{Error, MapStore};
use engram_cluster::{Entry, PartitionMap};
use engram_memory::PartitionId;
use serde::{Deserialize, Serialize};
use std::time::SystemTime;

/// Maximum attempts to apply an override against concurrent writers.
const ATTEMPTS: u32 = 8;

/// One override.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapOverride {
    /// Time, in milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Caller.
    pub by: String,
    /// Reason; may be empty if no data could be lost.
    pub reason: String,
    /// Kind of the override.
    pub what: OverrideKind,
    /// Version of the resulting map.
    pub version: u64,
    /// Overridden entries.
    pub steps: Vec<EntryOverride>,
}

impl MapOverride {
    /// Maximum length of caller and reason, in bytes.
    pub const MAX_TEXT_BYTES: usize = 1_024;

    /// Creates an override with the current time. The store sets its version.
    pub fn now(what: OverrideKind, by: &str, reason: &str, steps: Vec<EntryOverride>) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (by, reason) = (by.to_owned(), reason.trim().to_owned());
        Self { at_ms: now.as_millis() as u64, by, reason, what, version: 0, steps }
    }

    /// Applies the override: writes the map that `ordered` returns for the current one (`None`: there is none, or an unreadable one).
    ///
    /// # Errors
    /// [`Error::Conflict`] if `ordered` returns `None`, or after too many concurrent writes. Otherwise as for [`MapStore::overrule`].
    pub fn apply(
        &self,
        store: &dyn MapStore,
        ordered: impl Fn(Option<&PartitionMap>) -> Option<PartitionMap>,
    ) -> Result<PartitionMap, Error> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let there = match store.get() {
                Err(Error::Damaged { .. }) => None,
                there => there?,
            };
            let expected = there.as_ref().map(|map| map.version);
            let Some(map) = ordered(there.as_ref()) else {
                return Err(Error::Conflict { expected, found: there.map(Box::new) });
            };
            match store.override_map(expected, map, self.clone()) {
                // A concurrent write.
                Err(Error::Conflict { .. }) if attempts < ATTEMPTS => {}
                written => return written,
            }
        }
    }
}

impl EntryOverride {
    /// Applies the entry to the current map; `None` if the partition has changed since the override was decided.
    pub fn apply_to(&self, there: Option<&PartitionMap>) -> Option<PartitionMap> {
        let place = self.partition.0 as usize;
        let mut map = there.filter(|map| map.partitions.get(place) == self.before.as_ref())?.clone();
        *map.partitions.get_mut(place)? = self.after.clone();
        Some(map)
    }
}

/// Returns a rebuilt map, unless the current map is at least as new: another rebuilt one.
pub fn unless_superseded(made: &PartitionMap, there: Option<&PartitionMap>) -> Option<PartitionMap> {
    there.is_none_or(|there| there.version < made.version).then(|| made.clone())
}

/// Kind of a manual override.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OverrideKind {
    /// Promotes a replica that was not in sync.
    ForcePromote,
    /// Rebuilds a lost map from the maps that workers have seen.
    RebuildMap,
}

/// One overridden entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryOverride {
    /// Partition.
    pub partition: PartitionId,
    /// Previous entry, or the last one seen.
    pub before: Option<Entry>,
    /// New entry.
    pub after: Entry,
    /// Human-readable extent of the data loss.
    pub lost: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct OrderFile {
    at_ms: u64,
    by: String,
    reason: String,
    what: OverrideKind,
    version: u64,
    steps: Vec<StepFile>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct StepFile {
    partition: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    before: Option<EntryFile>,
    after: EntryFile,
    lost: String,
}

pub(crate) fn encode(orders: &[MapOverride]) -> String {
    let step = |step: &EntryOverride| StepFile {
        partition: step.partition.0,
        before: step.before.as_ref().map(entry_to_file),
        after: entry_to_file(&step.after),
        lost: step.lost.clone(),
    };
    let order = |order: &MapOverride| OrderFile {
        at_ms: order.at_ms,
        by: order.by.clone(),
        reason: order.reason.clone(),
        what: order.what,
        version: order.version,
        steps: order.steps.iter().map(step).collect(),
    };
    let files: Vec<_> = orders.iter().map(order).collect();
    seal("orders", serde_json::to_value(files).expect("an order has string keys only"))
}

pub(crate) fn decode(text: &str) -> Result<Vec<MapOverride>, DecodeError> {
    let files: Vec<OrderFile> =
        serde_json::from_value(unseal("orders", text)?).map_err(|error| DecodeError::Damaged(error.to_string()))?;
    let step = |file: StepFile| {
        Ok(EntryOverride {
            partition: PartitionId(file.partition),
            before: file.before.as_ref().map(entry_from_file).transpose()?,
            after: entry_from_file(&file.after)?,
            lost: file.lost,
        })
    };
    let order = |file: OrderFile| {
        let OrderFile { at_ms, by, reason, what, version, steps } = file;
        let steps = steps.into_iter().map(step).collect::<Result<_, String>>().map_err(DecodeError::Damaged)?;
        Ok(MapOverride { at_ms, by, reason, what, version, steps })
    };
    files.into_iter().map(order).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use engram_cluster::Change;
    use engram_memory::{ClusterId, Incarnation, Member, Ordinal, StoreId, Term};

    fn member(ordinal: u32) -> Member {
        Member { ordinal: Ordinal(ordinal), store: StoreId(u128::from(ordinal) + 10), incarnation: Incarnation(1) }
    }

    fn step() -> EntryOverride {
        let (before, after) = (Entry::solo(Term(4), member(0)), Entry::solo(Term(9), member(2)));
        EntryOverride { partition: PartitionId(1), before: Some(before), after, lost: "all after lsn 7".into() }
    }

    fn map() -> PartitionMap {
        let partitions = vec![Entry::solo(Term(4), member(0)); 3];
        PartitionMap { cluster: ClusterId(7), version: 1, partitions }
    }

    #[test]
    fn an_override_applies_to_its_unchanged_partition_whatever_else_changed() {
        let store = MemoryStore::default();
        let mut others = store.compare_and_swap(None, map()).unwrap();
        others.partitions[0] = others.partitions[0].apply(&Change::Learn(vec![Ordinal(1)])).unwrap();
        let others = store.compare_and_swap(Some(others.version), others).unwrap();
        let order = MapOverride::now(OverrideKind::ForcePromote, "ann", " both disks burnt ", vec![step()]);
        let written = order.apply(&store, |there| step().apply_to(there)).unwrap();
        assert_eq!(written.partitions, [others.partitions[0].clone(), step().after, others.partitions[2].clone()]);
        let record = store.overrides().unwrap().remove(0);
        assert_eq!(
            (record.version, record.by.as_str(), record.reason.as_str()),
            (written.version, "ann", "both disks burnt")
        );

        let again = order.apply(&store, |there| step().apply_to(there));
        assert!(matches!(again, Err(Error::Conflict { .. })), "the entry has changed: {again:?}");
        assert_eq!((store.get().unwrap().unwrap(), store.overrides().unwrap().len()), (written, 1));
    }

    #[test]
    fn concurrent_rebuilds_write_one_map() {
        let made = PartitionMap { version: 1_000_001, ..map() };
        assert_eq!(unless_superseded(&made, None), Some(made.clone()));
        assert_eq!(unless_superseded(&made, Some(&map())), Some(made.clone()), "an old map exists");
        assert_eq!(unless_superseded(&made, Some(&made)), None);
    }
}
