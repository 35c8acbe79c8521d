//! Columns of requests and rows of responses.

use bytes::Bytes;
use engram_memory::{Blobs, Group, MemoryId, OnMissing, Weight, key_id};
use engram_proto::v1;

/// Memories to insert or change. Columns have one entry per id, or none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rows {
    /// Ids; one that repeats is applied in order.
    pub ids: Vec<MemoryId>,
    /// Weights in [0, 1]; NaN = keep, or the cluster's initial weight.
    pub weights: Vec<f32>,
    /// Groups; absent = keep, or group 0.
    pub groups: Vec<Group>,
    /// Keys, UTF-8, at most 1,024 bytes; empty = none.
    pub keys: Option<Blobs>,
    /// Feature vectors, row-major; absent = keep.
    pub features: Vec<f32>,
    /// Payloads of at most 64 KiB; empty = keep.
    pub payloads: Option<Blobs>,
}

impl Rows {
    /// Creates rows from string keys: ids are derived from them.
    pub fn keyed<K: AsRef<str>>(keys: impl IntoIterator<Item = K>) -> Self {
        let keys: Blobs = keys.into_iter().map(|key| key.as_ref().as_bytes().to_vec()).collect();
        Self { ids: keys.iter().map(key_id).collect(), keys: Some(keys), ..Self::default() }
    }

    pub(crate) fn into_wire(self) -> v1::UpsertPart {
        v1::UpsertPart {
            partition: None,
            seq: 0,
            ids: raw(self.ids),
            weights: self.weights,
            groups: self.groups.iter().map(|group| group.0).collect::<Vec<u8>>().into(),
            keys: self.keys.as_ref().map(Into::into),
            features: self.features,
            payloads: self.payloads.as_ref().map(Into::into),
        }
    }
}

/// The signal of an update.
#[derive(Debug, Clone, PartialEq)]
pub enum Signals {
    /// The same quality in [0, 1] for all.
    Quality(f32),
    /// A quality in [0, 1] per id.
    Qualities(Vec<f32>),
    /// A change of weight in [-1, 1] per id.
    Deltas(Vec<f32>),
}

impl Default for Signals {
    fn default() -> Self {
        Self::Qualities(Vec::new())
    }
}

/// Updates by id, applied in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Updates {
    /// Ids; one that repeats is updated again, clamped after each.
    pub ids: Vec<MemoryId>,
    /// The signals.
    pub signals: Signals,
    /// What to do with an unknown id.
    pub on_missing: OnMissing,
    /// Keys, one per id, compared with stored ones and given to created memories.
    pub keys: Option<Blobs>,
}

impl Updates {
    pub(crate) fn into_wire(self) -> v1::Updates {
        let mut wire = v1::Updates {
            on_missing: match self.on_missing {
                OnMissing::Report => v1::OnMissing::Report,
                OnMissing::Create => v1::OnMissing::Create,
            }
            .into(),
            keys: self.keys.as_ref().map(Into::into),
            ids: raw(self.ids),
            ..Default::default()
        };
        match self.signals {
            Signals::Quality(quality) => wire.quality = Some(quality),
            Signals::Qualities(qualities) => wire.qualities = qualities,
            Signals::Deltas(deltas) => wire.deltas = deltas,
        }
        wire
    }
}

/// An update of every memory of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GroupSignal {
    /// A quality in [0, 1].
    Quality(f32),
    /// A change of weight in [-1, 1].
    Delta(f32),
}

pub(crate) fn groups_to_wire(groups: &[(Group, GroupSignal)]) -> v1::Updates {
    let update = |(group, signal): &(Group, GroupSignal)| v1::GroupUpdate {
        group: u32::from(group.0),
        signal: Some(match signal {
            GroupSignal::Quality(quality) => v1::group_update::Signal::Quality(*quality),
            GroupSignal::Delta(delta) => v1::group_update::Signal::Delta(*delta),
        }),
    };
    v1::Updates { groups: groups.iter().map(update).collect(), ..Default::default() }
}

/// A memory read from the cluster.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Memory {
    /// Id.
    pub id: MemoryId,
    /// Current weight.
    pub weight: Weight,
    /// Group.
    pub group: Group,
    /// Key, if it has one.
    pub key: Option<String>,
    /// Features, if requested and available.
    pub features: Vec<f32>,
    /// Payload, if requested.
    pub payload: Bytes,
}

/// Validates the columns of a batch and converts them to rows.
pub(crate) fn memories(batch: &v1::MemoryBatch) -> Result<Vec<Memory>, crate::Error> {
    let rows = batch.ids.len();
    let column = |len: usize| len == 0 || len == rows;
    let blobs = |blobs: Option<&v1::Blobs>| blobs.is_none_or(|blobs| column(blobs.ends.len()));
    let dimension = batch.features.len().checked_div(rows).unwrap_or(0);
    if batch.weight_units.len() != rows
        || !column(batch.groups.len())
        || !blobs(batch.keys.as_ref())
        || !blobs(batch.payloads.as_ref())
        || dimension * rows != batch.features.len()
    {
        return Err(crate::Error::Protocol("a batch of memories whose columns differ in length".into()));
    }
    let entry = |column: Option<&v1::Blobs>, row| column.map_or(&[] as &[u8], |column| column.entry(row)).to_vec();
    let memory = |row: usize| {
        let key = String::from_utf8(entry(batch.keys.as_ref(), row));
        Ok(Memory {
            id: MemoryId(batch.ids[row]),
            weight: Weight::from_units(batch.weight_units[row])
                .ok_or_else(|| crate::Error::Protocol("a weight above 1".into()))?,
            group: Group(batch.groups.get(row).copied().unwrap_or_default()),
            key: key.ok().filter(|key| !key.is_empty()),
            features: batch.features[row * dimension..(row + 1) * dimension].to_vec(),
            payload: entry(batch.payloads.as_ref(), row).into(),
        })
    };
    (0..rows).map(memory).collect()
}

/// Converts ids for the wire, in the same allocation.
pub(crate) fn raw(ids: Vec<MemoryId>) -> Vec<u64> {
    ids.into_iter().map(|id| id.0).collect()
}
