//! Conversions of outcomes, quality vectors, histograms and identities to and from wire messages.

use crate::v1;
use engram_memory::outcome::MAX_REJECTIONS;
use engram_memory::{
    ClusterId, Group, GroupQuality, Histogram, Incarnation, Lsn, Member, MemoryId, Ordinal, Outcome, PartitionId,
    QualityVector, Rejection, RejectionReason, RunId, SessionId, StoreId, Term,
};

/// Error for a message that no worker or client of this version sends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed {field}: {why}")]
pub struct Malformed {
    /// Name of the message field.
    pub field: &'static str,
    /// Required form of the field.
    pub why: &'static str,
}

fn malformed(field: &'static str, why: &'static str) -> Malformed {
    Malformed { field, why }
}

/// Encodes an identity as 16 bytes, big-endian.
pub fn identity(value: u128) -> bytes::Bytes {
    value.to_be_bytes().to_vec().into()
}

fn identity_from(field: &'static str, bytes: &[u8]) -> Result<u128, Malformed> {
    bytes.try_into().map(u128::from_be_bytes).map_err(|_| malformed(field, "16 bytes, big-endian"))
}

/// Decodes a cluster id.
///
/// # Errors
/// The field does not have 16 bytes.
pub fn cluster_id(bytes: &[u8]) -> Result<ClusterId, Malformed> {
    identity_from("cluster", bytes).map(ClusterId)
}

/// Decodes a run id.
///
/// # Errors
/// The field does not have 16 bytes.
pub fn run_id(bytes: &[u8]) -> Result<RunId, Malformed> {
    identity_from("run", bytes).map(RunId)
}

/// Decodes a 128-bit digest.
///
/// # Errors
/// The field does not have 16 bytes.
pub fn digest(bytes: &[u8]) -> Result<engram_memory::Digest, Malformed> {
    identity_from("digest", bytes).map(engram_memory::Digest)
}

impl From<Member> for v1::MemberId {
    fn from(member: Member) -> Self {
        Self { ordinal: member.ordinal.0, store: identity(member.store.0), incarnation: member.incarnation.0 }
    }
}

impl TryFrom<&v1::MemberId> for Member {
    type Error = Malformed;

    fn try_from(from: &v1::MemberId) -> Result<Self, Malformed> {
        Ok(Self {
            ordinal: Ordinal(from.ordinal),
            store: StoreId(identity_from("store", &from.store)?),
            incarnation: Incarnation(from.incarnation),
        })
    }
}

impl From<SessionId> for v1::Session {
    fn from(session: SessionId) -> Self {
        Self { opened_ms: session.opened_ms, random: session.random }
    }
}

impl From<v1::Session> for SessionId {
    fn from(session: v1::Session) -> Self {
        Self { opened_ms: session.opened_ms, random: session.random }
    }
}

impl v1::PartitionVersion {
    /// Creates the version of a partition from its term and log position.
    pub const fn of(partition: PartitionId, term: Term, lsn: Lsn) -> Self {
        Self { partition: partition.0, term: term.0, lsn: lsn.0, lag_ms: None }
    }
}

/// Encodes an outcome. Quality and digest have their own messages.
impl From<&Outcome> for v1::Outcome {
    fn from(outcome: &Outcome) -> Self {
        Self {
            applied: outcome.applied,
            created: outcome.created,
            evicted: outcome.evicted,
            rejected: outcome.rejected,
            rejected_ids: outcome.rejections.iter().map(|rejection| rejection.id.0).collect(),
            reasons: outcome.rejections.iter().map(|rejection| i32::from(rejection.reason.code())).collect(),
            first_handle: outcome.first.map(|first| first.0),
        }
    }
}

impl TryFrom<v1::Outcome> for Outcome {
    type Error = Malformed;

    fn try_from(from: v1::Outcome) -> Result<Self, Malformed> {
        if from.rejected_ids.len() != from.reasons.len() || from.reasons.len() > MAX_REJECTIONS {
            return Err(malformed("rejected_ids", "at most 64, with a reason each"));
        }
        let rejections = from.rejected_ids.iter().zip(&from.reasons).map(|(&id, &reason)| {
            let reason = u8::try_from(reason).ok().and_then(RejectionReason::from_code);
            Ok(Rejection { id: MemoryId(id), reason: reason.ok_or_else(|| malformed("reasons", "unknown reason"))? })
        });
        Ok(Self {
            applied: from.applied,
            created: from.created,
            evicted: from.evicted,
            rejected: from.rejected,
            rejections: rejections.collect::<Result<_, _>>()?,
            quality: None,
            digest: None,
            first: from.first_handle.map(MemoryId),
        })
    }
}

/// Encodes a quality vector.
pub fn quality_to_wire(quality: &QualityVector) -> Vec<v1::GroupQuality> {
    let group = |(group, quality): &(Group, GroupQuality)| v1::GroupQuality {
        group: u32::from(group.0),
        count: quality.count,
        sum_units: u64::try_from(quality.sum).expect("2^30 units each of fewer than 2^34 memories"),
        min_units: quality.min,
        max_units: quality.max,
    };
    quality.groups().iter().map(group).collect()
}

/// Decodes a quality vector.
///
/// # Errors
/// Counts, sums and extremes contradict each other, or groups do not ascend.
pub fn quality_from_wire(from: &[v1::GroupQuality]) -> Result<QualityVector, Malformed> {
    let groups = from.iter().map(|entry| {
        let quality = GroupQuality {
            count: entry.count,
            sum: u128::from(entry.sum_units),
            min: entry.min_units,
            max: entry.max_units,
        };
        Ok((group(entry.group)?, quality))
    });
    QualityVector::from_parts(groups.collect::<Result<_, _>>()?)
        .ok_or_else(|| malformed("quality", "ascending groups whose counts, sums and extremes agree"))
}

/// Encodes a histogram.
pub fn histogram_to_wire(histogram: &Histogram) -> Vec<v1::GroupHistogram> {
    let group =
        |(group, bins): &(Group, Vec<u64>)| v1::GroupHistogram { group: u32::from(group.0), bins: bins.clone() };
    histogram.groups().iter().map(group).collect()
}

/// Decodes a histogram of `2^bits` bins.
///
/// # Errors
/// The number of bins differs from `2^bits`, or groups do not ascend.
pub fn histogram_from_wire(bits: u32, from: Vec<v1::GroupHistogram>) -> Result<Histogram, Malformed> {
    let groups = from.into_iter().map(|entry| Ok((group(entry.group)?, entry.bins)));
    Histogram::from_parts(bits, groups.collect::<Result<_, _>>()?)
        .ok_or_else(|| malformed("histogram", "ascending groups with 2^bits bins each"))
}

/// Decodes a group number.
///
/// # Errors
/// The number exceeds 255.
pub fn group(from: u32) -> Result<Group, Malformed> {
    u8::try_from(from).map(Group).map_err(|_| malformed("group", "0 to 255"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::Weight;

    #[test]
    fn answers_survive_the_wire() {
        let mut outcome = Outcome { applied: 3, created: 1, evicted: 2, ..Outcome::default() };
        outcome.reject(MemoryId(9), RejectionReason::KeyCollision);
        assert_eq!(Outcome::try_from(v1::Outcome::from(&outcome)), Ok(outcome));

        let mut quality = QualityVector::default();
        quality.add(Group(7), Weight::HALF);
        quality.add(Group(0), Weight::ONE);
        let wire = quality_to_wire(&quality);
        assert_eq!(quality_from_wire(&wire), Ok(quality));
        assert!(quality_from_wire(&[wire[1], wire[0]]).is_err(), "groups ascend");

        let mut histogram = Histogram::new(3).unwrap();
        histogram.add(Group(2), Weight::HALF);
        assert_eq!(histogram_from_wire(3, histogram_to_wire(&histogram)), Ok(histogram.clone()));
        assert!(histogram_from_wire(4, histogram_to_wire(&histogram)).is_err());

        let member = Member { ordinal: Ordinal(4), store: StoreId(1 << 100), incarnation: Incarnation(9) };
        assert_eq!(Member::try_from(&v1::MemberId::from(member)), Ok(member));
        assert!(cluster_id(&[0; 15]).is_err());
    }
}
