//! What people ordered against the rules of the map: a record that stays, kept beside it.

use crate::format::{DecodeError, EntryFile, entry_from_file, entry_to_file, seal, unseal};
use crate::{Error, MapStore};
use engram_cluster::{Entry, PartitionMap};
use engram_memory::PartitionId;
use serde::{Deserialize, Serialize};
use std::time::SystemTime;

/// How often an order is tried against others who write the map.
const ATTEMPTS: u32 = 8;

/// One order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapOverride {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// Who gave it.
    pub by: String,
    /// Why; empty where nothing was at stake.
    pub reason: String,
    /// What was ordered.
    pub what: OverrideKind,
    /// Version of the map that it made.
    pub version: u64,
    /// The entries that the rules would not have made.
    pub steps: Vec<EntryOverride>,
}

impl MapOverride {
    /// Longest name, and reason, that is put on record, in bytes.
    pub const MAX_TEXT_BYTES: usize = 1_024;

    /// An order of now. Its version is the store's to say.
    pub fn now(what: OverrideKind, by: &str, reason: &str, steps: Vec<EntryOverride>) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (by, reason) = (by.to_owned(), reason.trim().to_owned());
        Self { at_ms: now.as_millis() as u64, by, reason, what, version: 0, steps }
    }

    /// Carries it out: writes over the rules what `ordered` makes of the map that is there (`None`: there is none, or one that nobody
    /// can read), if it makes something of it.
    ///
    /// # Errors
    /// [`Error::Conflict`]: nothing is to be made of what is there, or others write it all the time. Or as for [`MapStore::overrule`].
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
                // Another writer was faster.
                Err(Error::Conflict { .. }) if attempts < ATTEMPTS => {}
                written => return written,
            }
        }
    }
}

impl EntryOverride {
    /// The map that is there with this step taken; `None` where the partition is no longer as it was when the step was judged.
    pub fn apply_to(&self, there: Option<&PartitionMap>) -> Option<PartitionMap> {
        let place = self.partition.0 as usize;
        let mut map = there.filter(|map| map.partitions.get(place) == self.before.as_ref())?.clone();
        *map.partitions.get_mut(place)? = self.after.clone();
        Some(map)
    }
}

/// A map that was made anew, unless somebody has put one in its place meanwhile that follows it: one made anew, too.
pub fn unless_superseded(made: &PartitionMap, there: Option<&PartitionMap>) -> Option<PartitionMap> {
    there.is_none_or(|there| there.version < made.version).then(|| made.clone())
}

/// What a person may order against the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OverrideKind {
    /// A copy that was not in sync leads.
    ForcePromote,
    /// A map that was lost was made anew from what workers have seen of it.
    RebuildMap,
}

/// One entry that was changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryOverride {
    /// Of which partition.
    pub partition: PartitionId,
    /// What was there, or was seen last.
    pub before: Option<Entry>,
    /// What is there since.
    pub after: Entry,
    /// What was given up, in words.
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
    fn an_order_holds_for_its_partition_as_it_was_judged_whatever_became_of_others() {
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
        assert!(matches!(again, Err(Error::Conflict { .. })), "it was judged of an entry that is no more: {again:?}");
        assert_eq!((store.get().unwrap().unwrap(), store.overrides().unwrap().len()), (written, 1));
    }

    #[test]
    fn of_two_who_make_a_map_anew_one_does() {
        let made = PartitionMap { version: 1_000_001, ..map() };
        assert_eq!(unless_superseded(&made, None), Some(made.clone()));
        assert_eq!(unless_superseded(&made, Some(&map())), Some(made.clone()), "an old one is in its place");
        assert_eq!(unless_superseded(&made, Some(&made)), None);
    }
}
