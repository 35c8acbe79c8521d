//! What people ordered against the rules of the map: a record that stays, kept beside it.

use crate::format::{EntryFile, Unreadable, entry_from_file, entry_to_file, seal, unseal};
use engram_cluster::Entry;
use engram_memory::PartitionId;
use serde::{Deserialize, Serialize};

/// One order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// Who gave it.
    pub by: String,
    /// Why; empty where nothing was at stake.
    pub reason: String,
    /// What was ordered.
    pub what: What,
    /// Version of the map that it made.
    pub version: u64,
    /// The entries that the rules would not have made.
    pub steps: Vec<Step>,
}

/// What a person may order against the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// A copy that was not in sync leads.
    ForcePromote,
    /// A map that was lost was made anew from what workers have seen of it.
    RebuildMap,
}

/// One entry that was changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
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
    what: What,
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

pub(crate) fn encode(orders: &[Order]) -> String {
    let step = |step: &Step| StepFile {
        partition: step.partition.0,
        before: step.before.as_ref().map(entry_to_file),
        after: entry_to_file(&step.after),
        lost: step.lost.clone(),
    };
    let order = |order: &Order| OrderFile {
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

pub(crate) fn decode(text: &str) -> Result<Vec<Order>, Unreadable> {
    let files: Vec<OrderFile> =
        serde_json::from_value(unseal("orders", text)?).map_err(|error| Unreadable::Damaged(error.to_string()))?;
    let step = |file: StepFile| {
        Ok(Step {
            partition: PartitionId(file.partition),
            before: file.before.as_ref().map(entry_from_file).transpose()?,
            after: entry_from_file(&file.after)?,
            lost: file.lost,
        })
    };
    let order = |file: OrderFile| {
        let OrderFile { at_ms, by, reason, what, version, steps } = file;
        let steps = steps.into_iter().map(step).collect::<Result<_, String>>().map_err(Unreadable::Damaged)?;
        Ok(Order { at_ms, by, reason, what, version, steps })
    };
    files.into_iter().map(order).collect()
}
