//! Compares replicas by digests at markers in the log.
//!
//! A marker is a record, so all replicas compute the digest of the same state. The primary sends its digest; a follower whose digest
//! differs discards its state and is rebuilt. All state is integer, so a difference is a hardware or software fault, never
//! rounding.

use super::Replication;
use crate::peer::Message;
use crate::state::State;
use crate::stats;
use engram_memory::{Digest, Lsn, Member, PartitionId, Term};

/// Digests of one partition that wait to be compared.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DigestCheck {
    /// Newest digest here.
    own: Option<(Lsn, Digest)>,
    /// Digest of the primary at a marker that is not applied here yet.
    reported: Option<(Lsn, Digest, Member, Term)>,
}

/// A replica here whose digest differs from that of its primary.
pub(crate) struct DigestMismatch {
    pub(crate) primary: Member,
    pub(crate) term: Term,
    pub(crate) what: String,
}

impl Replication {
    /// Handles an applied marker: the primary sends its digest, a follower compares.
    pub(crate) fn compare_or_send_digest(
        &mut self,
        state: &State,
        partition: PartitionId,
        lsn: Lsn,
        digest: Digest,
    ) -> Option<DigestMismatch> {
        let check = self.digests.entry(partition).or_default();
        check.own = Some((lsn, digest));
        let replica = state.of(partition).replica();
        if let Some(term) = replica.serving_term() {
            // A replica that is to be repaired must not make intact ones discard their state.
            if !state.partitions().has_repairable_payloads(partition) {
                for (to, _) in replica.followers() {
                    self.send(to, partition, Message::Digest { term, lsn, digest: digest.0 });
                }
            }
            return None;
        }
        let (at, expected, primary, term) = check.reported.take_if(|report| report.0 <= lsn)?;
        if at == lsn { self.compare((digest, expected), primary, term) } else { None }
    }

    /// Processes the primary's digest.
    pub(crate) fn receive_digest(
        &mut self,
        state: &State,
        partition: PartitionId,
        from: Member,
        (term, lsn, digest): (Term, Lsn, Digest),
    ) -> Option<DigestMismatch> {
        let state = state.of(partition);
        if !state.replica().follows(from) || state.replica().promised() != term || state.corrupt().is_some() {
            return None;
        }
        let check = self.digests.entry(partition).or_default();
        match check.own {
            Some((own_lsn, own)) if own_lsn == lsn => self.compare((own, digest), from, term),
            _ => {
                if state.applied().0 < lsn {
                    check.reported = Some((lsn, digest, from, term));
                }
                None
            }
        }
    }

    fn compare(&self, (own, expected): (Digest, Digest), primary: Member, term: Term) -> Option<DigestMismatch> {
        stats::add(&self.context.shared.digests_compared, 1);
        (own != expected).then(|| {
            stats::add(&self.context.shared.digest_mismatches, 1);
            let what = format!("its digest {own} differs from that of its primary, {expected}");
            DigestMismatch { primary, term, what }
        })
    }

    /// Forgets the digests and the retained records of a partition that is discarded here.
    pub(crate) fn forget_digests(&mut self, partition: PartitionId) {
        self.digests.remove(&partition);
    }
}
