//! Compares replicas by digests at markers in the log.
//!
//! A marker is a record, so all replicas compute the digest of the same state. The primary sends its digest; a follower whose digest
//! differs discards its state and is rebuilt. All state is integer, so a difference is a hardware or software fault, never
//! rounding.

use crate::peer::{Envelope, Message};
use crate::replication;
use crate::stats;
use crate::store::{Mark, Store};
use crate::{Error, WriteError, snapshot_file};
use engram_cluster::replica::{self, History};
use engram_memory::{Command, Digest, Lsn, Member, Ordinal, PartitionId, Record, Term};

/// Suffix of snapshots set aside because the replica's digest differed; kept for analysis.
const ASIDE_SUFFIX: &str = ".different";

/// Digests of one partition that wait to be compared.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DigestCheck {
    /// Newest digest here.
    own: Option<(Lsn, Digest)>,
    /// Digest of the primary at a marker that is not applied here yet.
    reported: Option<(Lsn, Digest, Member, Term)>,
}

impl Store {
    /// Proposes a marker to the next partition when due: once per partition and [`crate::Options::digest_ms`].
    pub(crate) fn propose_digest_marker(&mut self, now_ms: u64) {
        let partitions = u64::from(self.options.shape.partitions);
        let every_ms = (self.options.digest_ms / partitions).max(1);
        if self.options.replication.replicas < 2 || now_ms.saturating_sub(self.background.marked_at_ms) < every_ms {
            return;
        }
        self.background.marked_at_ms = now_ms;
        let partition = PartitionId(self.background.next_marked);
        self.background.next_marked = (partition.0 + 1) % self.options.shape.partitions;
        let state = &self.states[partition.0 as usize];
        if state.replica.serving_term().is_some() && state.replica.in_sync_count() > 1 {
            self.propose(partition, Record::bare(Command::DigestMarker { marker: now_ms }), None);
        }
    }

    /// Handles an applied marker: the primary sends its digest, a follower compares.
    pub(crate) fn compare_or_send_digest(&mut self, partition: PartitionId, lsn: Lsn, digest: Digest) {
        let state = &mut self.states[partition.0 as usize];
        state.digest_check.own = Some((lsn, digest));
        if let Some(term) = state.replica.serving_term() {
            // A replica that is to be repaired must not make intact ones discard their state.
            if self.partitions.arena.payloads.is_repairable(partition) {
                return;
            }
            let followers: Vec<_> = state.replica.followers().map(|(ordinal, _)| ordinal).collect();
            for to in followers {
                let body = Message::Digest { term, lsn, digest: digest.0 };
                self.replication.outbox.entry(to).or_default().push(Envelope::new(partition, body));
            }
        } else if let Some((at, expected, from, term)) = state.digest_check.reported.take_if(|report| report.0 <= lsn)
            && at == lsn
        {
            self.compare(partition, digest, expected, from, term);
        }
    }

    /// Processes the primary's digest.
    pub(crate) fn receive_digest(
        &mut self,
        partition: PartitionId,
        from: Member,
        term: Term,
        lsn: Lsn,
        digest: Digest,
    ) {
        let state = &mut self.states[partition.0 as usize];
        if !state.replica.follows(from) || state.replica.promised() != term || state.corrupt.is_some() {
            return;
        }
        match state.digest_check.own {
            Some((own_lsn, own)) if own_lsn == lsn => self.compare(partition, own, digest, from, term),
            _ if state.applied < lsn => state.digest_check.reported = Some((lsn, digest, from, term)),
            _ => {}
        }
    }

    fn compare(&mut self, partition: PartitionId, own: Digest, expected: Digest, from: Member, term: Term) {
        stats::add(&self.shared.digests_compared, 1);
        if own != expected {
            stats::add(&self.shared.digest_mismatches, 1);
            let what = format!("its digest {own} differs from that of its primary, {expected}");
            if let Err(error) = self.discard_replica(partition, from.ordinal, term, &what) {
                self.replication.failed.get_or_insert(error);
            }
        }
    }

    /// Discards the state of a replica and requests a state transfer. It does not become primary until it is repaired.
    pub(crate) fn discard_replica(
        &mut self,
        partition: PartitionId,
        from: Ordinal,
        term: Term,
        what: &str,
    ) -> Result<(), Error> {
        self.drop_pending(partition);
        self.partitions.close(partition);
        for lsn in snapshot_file::list(&*self.disk)?.remove(&partition).unwrap_or_default() {
            let name = snapshot_file::name(partition, lsn);
            let failed = |source| Error::Io { operation: "rename", path: self.disk.describe(&name), source };
            self.disk.rename(&name, &format!("{name}{ASIDE_SUFFIX}")).map_err(failed)?;
        }
        self.disk.sync_dir().map_err(|source| Error::SyncFailed { path: self.disk.describe(""), source })?;
        self.log_installed(Mark::Other(partition), Term(0), Lsn(0))?;
        let (member, state) = (self.member(), &mut self.states[partition.0 as usize]);
        let (promised, empty) = (state.replica.promised(), (History::default(), Lsn(0)));
        let granted = self.options.replication.replicas > 1;
        state.replica =
            replication::recovered_replica(member, &self.options, member.incarnation, promised, empty, granted);
        (state.applied, state.applied_term, state.written) = Default::default();
        state.complete_at = Lsn(u64::MAX);
        (state.digest_check, state.snapshots) = (DigestCheck::default(), [None; 2]);
        state.damaged.clear();
        let body = Message::Replica(replica::Message::NotOpen { term }, Vec::new());
        self.replication.outbox.entry(from).or_default().push(Envelope::new(partition, body));
        self.set_damage_note(partition, what)
    }

    pub(crate) fn drop_pending(&mut self, partition: PartitionId) {
        let state = &mut self.states[partition.0 as usize];
        state.creates = 0;
        for pending in std::mem::take(&mut state.pending) {
            self.refuse(partition, pending, &WriteError::NotPrimary { partition, term: None });
        }
        self.replication.shipping.truncate(partition, Lsn(0));
        self.replication.shipping.set_applied(partition, Lsn(0));
    }
}
