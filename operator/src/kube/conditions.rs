//! Conditions of a status, and their time.

use engram_api::status::Condition;
use k8s_openapi::jiff::{Timestamp, Unit};

/// Returns the current time for conditions, in whole seconds.
pub(crate) fn now() -> String {
    let now = Timestamp::now();
    now.round(Unit::Second).unwrap_or(now).to_string()
}

/// Replaces the condition of the same type; its transition time is kept unless the status changed.
pub(crate) fn set_condition(conditions: &mut Vec<Condition>, mut fresh: Condition) {
    match conditions.iter_mut().find(|entry| entry.kind == fresh.kind) {
        Some(entry) => {
            if entry.status == fresh.status {
                fresh.last_transition_time.clone_from(&entry.last_transition_time);
            }
            *entry = fresh;
        }
        None => conditions.push(fresh),
    }
}
