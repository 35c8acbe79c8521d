//! Whether copies are equal: digests at markers in the log, compared by whoever follows.
//!
//! A marker is a record, so every copy takes its digest at the same state. The primary tells its own; a follower whose digest
//! differs drops what it has and is made anew. Integers all the way, so a difference is a fault of a machine, never of
//! rounding.

use crate::peer::{Envelope, Message};
use crate::replication;
use crate::stats;
use crate::store::{Mark, Store};
use crate::{Error, WriteError, snapshot_file};
use engram_cluster::replica::{self, History};
use engram_memory::{Command, Digest, Lsn, Member, Ordinal, PartitionId, Record, Term};

/// What is added to the name of a snapshot that differed from the other copies: kept for who wants to know why.
const ASIDE_SUFFIX: &str = ".different";

/// Digests of one partition that wait to be compared.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Marked {
    /// The newest digest here.
    own: Option<(Lsn, Digest)>,
    /// What the primary told of a marker that is not applied here yet.
    told: Option<(Lsn, Digest, Member, Term)>,
}

impl Store {
    /// Proposes a marker to the next partition when it is due: each one once per [`crate::Options::digest_ms`].
    pub(crate) fn mark_next(&mut self, now_ms: u64) {
        let partitions = u64::from(self.options.shape.partitions);
        let every_ms = (self.options.digest_ms / partitions).max(1);
        if self.options.replication.copies < 2 || now_ms.saturating_sub(self.background.marked_at_ms) < every_ms {
            return;
        }
        self.background.marked_at_ms = now_ms;
        let partition = PartitionId(self.background.next_marked);
        self.background.next_marked = (partition.0 + 1) % self.options.shape.partitions;
        let place = &self.places[partition.0 as usize];
        if place.replica.serves().is_some() && place.replica.replicas() > 1 {
            self.propose(partition, Record::bare(Command::DigestMarker { marker: now_ms }), None);
        }
    }

    /// A marker was applied: the primary tells its digest, a follower compares.
    pub(crate) fn digested(&mut self, partition: PartitionId, lsn: Lsn, digest: Digest) {
        let place = &mut self.places[partition.0 as usize];
        place.marked.own = Some((lsn, digest));
        if let Some(term) = place.replica.serves() {
            let followers: Vec<_> = place.replica.followers().map(|(ordinal, _)| ordinal).collect();
            for to in followers {
                let body = Message::Digest { term, lsn, digest: digest.0 };
                self.replication.outbox.entry(to).or_default().push(Envelope { partition, body });
            }
        } else if let Some((at, expected, from, term)) = place.marked.told.take_if(|told| told.0 <= lsn)
            && at == lsn
        {
            self.compare(partition, digest, expected, from, term);
        }
    }

    /// Takes the primary's digest.
    pub(crate) fn hear_digest(&mut self, partition: PartitionId, from: Member, term: Term, lsn: Lsn, digest: Digest) {
        let place = &mut self.places[partition.0 as usize];
        if !place.replica.follows(from) || place.replica.promised() != term || place.corrupt.is_some() {
            return;
        }
        match place.marked.own {
            Some((own_lsn, own)) if own_lsn == lsn => self.compare(partition, own, digest, from, term),
            _ if place.applied < lsn => place.marked.told = Some((lsn, digest, from, term)),
            _ => {}
        }
    }

    fn compare(&mut self, partition: PartitionId, own: Digest, expected: Digest, from: Member, term: Term) {
        stats::add(&self.shared.digests_compared, 1);
        if own != expected {
            stats::add(&self.shared.digests_different, 1);
            let what = format!("its digest {own} is not that of its primary, {expected}");
            if let Err(error) = self.start_over(partition, from.ordinal, term, &what) {
                self.replication.failed.get_or_insert(error);
            }
        }
    }

    /// Puts a copy that cannot be trusted aside, and has its primary make it anew. Until it is whole it leads nobody.
    pub(crate) fn start_over(
        &mut self,
        partition: PartitionId,
        from: Ordinal,
        term: Term,
        what: &str,
    ) -> Result<(), Error> {
        self.forget_pending(partition);
        self.partitions.close(partition);
        for lsn in snapshot_file::list(&*self.disk)?.remove(&partition).unwrap_or_default() {
            let name = snapshot_file::name(partition, lsn);
            let failed = |source| Error::Io { operation: "rename", path: self.disk.describe(&name), source };
            self.disk.rename(&name, &format!("{name}{ASIDE_SUFFIX}")).map_err(failed)?;
        }
        self.disk.sync_dir().map_err(|source| Error::SyncFailed { path: self.disk.describe(""), source })?;
        self.log_installed(Mark::Other(partition), Term(0), Lsn(0))?;
        let (member, place) = (self.member(), &mut self.places[partition.0 as usize]);
        let (promised, nothing) = (place.replica.promised(), (History::default(), Lsn(0)));
        let granted = self.options.replication.copies > 1;
        place.replica = replication::found(member, &self.options, member.incarnation, promised, nothing, granted);
        (place.applied, place.applied_term, place.wrote) = Default::default();
        place.whole_at = Lsn(u64::MAX);
        (place.marked, place.snapshots) = (Marked::default(), [None; 2]);
        place.damaged.clear();
        let body = Message::Replica(replica::Message::NotOpen { term }, Vec::new());
        self.replication.outbox.entry(from).or_default().push(Envelope { partition, body });
        self.note(partition, what)
    }

    pub(crate) fn forget_pending(&mut self, partition: PartitionId) {
        let place = &mut self.places[partition.0 as usize];
        place.creates = 0;
        for pending in std::mem::take(&mut place.pending) {
            self.refuse(partition, pending, &WriteError::NotPrimary { partition, term: None });
        }
        self.replication.shipping.truncate(partition, Lsn(0));
        self.replication.shipping.applied(partition, Lsn(0));
    }
}
