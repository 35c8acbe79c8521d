//! Conversions between the coordinator's types and protocol messages.

use crate::state::{Addresses, WorkerState};
use engram_mapstore::{EntryOverride, MapOverride, OverrideKind};
use engram_memory::PartitionId;
use engram_proto::v1;
use engram_wire::{Malformed, entry_from_proto, entry_to_proto};

pub(crate) fn order_to_proto(order: &MapOverride) -> v1::MapOverride {
    let what = match order.what {
        OverrideKind::ForcePromote => "force-promote",
        OverrideKind::RebuildMap => "rebuild-map",
    };
    v1::MapOverride {
        at_ms: order.at_ms,
        requested_by: order.by.clone(),
        reason: order.reason.clone(),
        operation: what.to_owned(),
        map_version: order.version,
        steps: order.steps.iter().map(step_to_proto).collect(),
    }
}

pub(crate) fn step_to_proto(step: &EntryOverride) -> v1::MapOverrideStep {
    v1::MapOverrideStep {
        partition: step.partition.0,
        before: step.before.as_ref().map(entry_to_proto),
        after: Some(entry_to_proto(&step.after)),
        data_loss: step.lost.clone(),
    }
}

/// Reads a step of an order.
///
/// # Errors
/// The entry after the step is absent, or an entry is malformed.
pub fn step_from_proto(step: &v1::MapOverrideStep) -> Result<EntryOverride, Malformed> {
    let absent = Malformed { field: "after", expected: "a value", found: 0 };
    Ok(EntryOverride {
        partition: PartitionId(step.partition),
        before: step.before.as_ref().map(entry_from_proto).transpose()?,
        after: entry_from_proto(step.after.as_ref().ok_or(absent)?)?,
        lost: step.data_loss.clone(),
    })
}

pub(crate) fn member_to_proto(worker: &WorkerState) -> v1::MemberEntry {
    v1::MemberEntry {
        ordinal: worker.member.ordinal.0,
        store: worker.member.store.0.to_be_bytes().to_vec().into(),
        incarnation: worker.member.incarnation.0,
        client_address: worker.addresses.client.clone(),
        peer_address: worker.addresses.peer.clone(),
        http_address: worker.addresses.http.clone(),
        alive: worker.alive,
        dead: worker.dead,
        leaving: worker.is_leaving(),
    }
}

pub(crate) fn addresses(hello: &v1::Hello) -> Addresses {
    Addresses {
        client: hello.client_address.clone(),
        peer: hello.peer_address.clone(),
        http: hello.http_address.clone(),
    }
}
