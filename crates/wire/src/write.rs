//! Writes of one kind to some partitions, as the message that clients send and workers forward.

use engram_memory::PartitionId;
use engram_proto::v1;
use engram_proto::v1::items_part::Change;
use prost::Message as _;

/// Content of a write to one partition.
#[derive(Debug, Clone)]
pub enum WriteBody {
    /// Inserts or changes rows.
    Upsert(v1::UpsertPart),
    /// Removes ids.
    Remove(Vec<u64>),
    /// Reinforces memories by id or by group.
    Reinforce(v1::Updates),
    /// Decays all memories by an amount in [0, 1].
    Decay(f64),
    /// Changes items of a buffer.
    Items(v1::ItemsPart),
}

/// A write to one partition with its sequence number; 0 = without a session.
#[derive(Debug, Clone)]
pub struct PartitionWrite {
    /// The partition.
    pub partition: PartitionId,
    /// Sequence number in (session, partition).
    pub seq: u64,
    /// The content.
    pub body: WriteBody,
}

/// A write message: parts of one kind under one session.
#[derive(Debug, Clone)]
pub enum WriteRequest {
    /// For `Upsert`, a stream of one message.
    Upsert(v1::UpsertRequest),
    /// For `Remove`.
    Remove(v1::RemoveRequest),
    /// For `ApplyReinforcement`.
    Reinforce(v1::ApplyReinforcementRequest),
    /// For `ApplyDecay`.
    Decay(v1::ApplyDecayRequest),
    /// For `WriteItems`, a stream of one message.
    Items(v1::WriteItemsRequest),
}

impl WriteBody {
    /// Returns the ids that the write names; none for updates by group and decay.
    pub fn ids(&self) -> &[u64] {
        match self {
            Self::Upsert(part) => &part.ids,
            Self::Remove(ids) => ids,
            Self::Reinforce(updates) => &updates.ids,
            Self::Decay(_) => &[],
            Self::Items(part) => match &part.change {
                Some(Change::Priorities(priorities)) => &priorities.handles,
                Some(Change::Delete(delete)) => &delete.handles,
                Some(Change::Acknowledge(acknowledge)) => &acknowledge.handles,
                Some(Change::Append(_)) | None => &[],
            },
        }
    }

    /// Returns the number of rows that count against the limit of a message.
    pub fn rows(&self) -> usize {
        match self {
            Self::Reinforce(updates) => updates.ids.len() + updates.groups.len(),
            Self::Items(v1::ItemsPart { change: Some(Change::Append(append)), .. }) => append.count as usize,
            other => other.ids().len(),
        }
    }

    /// Returns an upper bound of the bytes that the write takes in a message.
    pub fn encoded_bytes(&self) -> usize {
        /// Bytes of sequence number, partition and field tags of a part.
        const HEAD: usize = 32;
        HEAD + match self {
            Self::Upsert(part) => part.encoded_len(),
            Self::Remove(ids) => 8 * ids.len(),
            Self::Reinforce(updates) => updates.encoded_len(),
            Self::Decay(_) => 0,
            Self::Items(part) => part.encoded_len(),
        }
    }
}

impl WriteRequest {
    /// Creates the message for writes of the kind of the first one; `None` without a write. Writes of another kind, and decays by another amount,
    /// are left out: callers group writes by kind.
    pub fn new(session: Option<v1::Session>, writes: impl IntoIterator<Item = PartitionWrite>) -> Option<Self> {
        let mut writes = writes.into_iter().peekable();
        Some(match writes.peek()?.body {
            WriteBody::Upsert(_) => {
                Self::Upsert(v1::UpsertRequest { session, parts: writes.filter_map(upsert).collect() })
            }
            WriteBody::Remove(_) => {
                Self::Remove(v1::RemoveRequest { session, parts: writes.filter_map(remove).collect() })
            }
            WriteBody::Reinforce(_) => {
                let parts = writes.filter_map(reinforce).collect();
                Self::Reinforce(v1::ApplyReinforcementRequest { session, parts })
            }
            WriteBody::Decay(amount) => {
                let parts = writes.filter_map(|write| decay(&write, amount)).collect();
                Self::Decay(v1::ApplyDecayRequest { session, amount, parts })
            }
            WriteBody::Items(_) => {
                let parts = writes.filter_map(items).collect();
                Self::Items(v1::WriteItemsRequest { session, parts, ..Default::default() })
            }
        })
    }
}

fn items(write: PartitionWrite) -> Option<v1::ItemsPart> {
    let WriteBody::Items(part) = write.body else { return None };
    Some(v1::ItemsPart { partition: write.partition.0, seq: write.seq, ..part })
}

fn upsert(write: PartitionWrite) -> Option<v1::UpsertPart> {
    let WriteBody::Upsert(rows) = write.body else { return None };
    Some(v1::UpsertPart { partition: Some(write.partition.0), seq: write.seq, ..rows })
}

fn remove(write: PartitionWrite) -> Option<v1::RemovePart> {
    let WriteBody::Remove(ids) = write.body else { return None };
    Some(v1::RemovePart { partition: Some(write.partition.0), seq: write.seq, ids })
}

fn reinforce(write: PartitionWrite) -> Option<v1::ReinforcePart> {
    let WriteBody::Reinforce(updates) = write.body else { return None };
    Some(v1::ReinforcePart { partition: Some(write.partition.0), seq: write.seq, updates: Some(updates) })
}

fn decay(write: &PartitionWrite, amount: f64) -> Option<v1::DecayPart> {
    let is_same = matches!(write.body, WriteBody::Decay(other) if other.to_bits() == amount.to_bits());
    is_same.then_some(v1::DecayPart { partition: write.partition.0, seq: write.seq })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_has_the_writes_of_the_first_kind_with_partition_and_number() {
        let write = |partition, seq, body| PartitionWrite { partition: PartitionId(partition), seq, body };
        let writes = [
            write(3, 7, WriteBody::Remove(vec![1, 2])),
            write(4, 8, WriteBody::Decay(0.5)),
            write(5, 9, WriteBody::Remove(vec![3])),
        ];
        let Some(WriteRequest::Remove(request)) = WriteRequest::new(None, writes) else { panic!("a removal") };
        let parts: Vec<_> = request.parts.iter().map(|part| (part.partition, part.seq, part.ids.len())).collect();
        assert_eq!(parts, [(Some(3), 7, 2), (Some(5), 9, 1)]);
        assert!(WriteRequest::new(None, []).is_none());
    }

    #[test]
    fn size_bounds_the_encoded_part() {
        let rows = v1::UpsertPart { ids: (0..100).collect(), weights: vec![0.5; 100], ..Default::default() };
        let body = WriteBody::Upsert(rows.clone());
        let part = v1::UpsertPart { partition: Some(u32::MAX), seq: u64::MAX, ..rows };
        assert!(part.encoded_len() <= body.encoded_bytes());
        assert_eq!((body.rows(), body.ids().len()), (100, 100));
    }
}
