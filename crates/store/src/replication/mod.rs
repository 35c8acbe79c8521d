//! Replication: what is sent to other workers and what is known of them. Log shipping, state transfers, read leases, and reads
//! that other workers confirm.
//!
//! [`Replication`] decides nothing about the log or the state of a partition: it reads the replicas of [`State`] and reports what
//! is to be done. Outgoing messages are collected and sent once per turn, so that partitions share frames as they share log batches.

pub(crate) mod confirmed_reads;
pub(crate) mod decline;
pub(crate) mod digest_check;
pub mod leases;
mod outbox;
pub mod peer;
pub(crate) mod shipping;
pub(crate) mod stale_reads;
pub(crate) mod status;
pub(crate) mod throttle;
pub(crate) mod transfer;

pub use confirmed_reads::ConfirmError;
pub use peer::{NoPeers, Peers};
pub use stale_reads::ReplicaPosition;
pub use status::ReplicaStatus;

use crate::context::Context;
use crate::peer::{Envelope, Message, Proposal};
use crate::state::State;
use crate::stats;
use crate::wal::Durability;
use confirmed_reads::ConfirmedReads;
use decline::{DeclineAction, Declines};
use digest_check::DigestCheck;
#[cfg(feature = "defects")]
use engram_cluster::injected::Bug;
use engram_cluster::replica::{self, History, RecoveredReplica};
use engram_cluster::{Entry, Replica};
use engram_memory::{Lsn, Member, Ordinal, PartitionId, Term};
use leases::Leases;
use outbox::Outbox;
use shipping::Shipping;
use stale_reads::StaleReads;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use transfer::{IncomingTransfer, StateTransfers};

/// Milliseconds after which proposals without effect are repeated.
const RETRY_MS: u64 = 300;

/// Replication options of this worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Ordinal of this worker.
    pub ordinal: Ordinal,
    /// Configured replicas per partition.
    pub replicas: u32,
    /// Fewest in-sync replicas with which writes are committed.
    pub min_in_sync: usize,
    /// Bytes of records retained in memory for lagging followers; a follower that needs older ones gets a state transfer. Unused with
    /// a single replica.
    pub retained_bytes: usize,
    /// Most bytes per second of all state transfers to followers; reduced while they slow down writes. Raising it speeds up
    /// re-replication and slows down writes meanwhile; 0 = no limit.
    pub transfer_bytes_per_s: u64,
    /// A bug injected into every replica.
    #[cfg(feature = "defects")]
    pub bug: Option<Bug>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            ordinal: Ordinal(0),
            replicas: 1,
            min_in_sync: 1,
            retained_bytes: 64 << 20,
            transfer_bytes_per_s: 64 << 20,
            #[cfg(feature = "defects")]
            bug: None,
        }
    }
}

/// Messages to other workers, what they hold and granted, and what is known of their processes.
pub(crate) struct Replication {
    context: Arc<Context>,
    outbox: Outbox,
    shipping: Shipping,
    /// Outgoing state transfers.
    transfers: StateTransfers,
    /// Incoming state transfers.
    incoming: BTreeMap<PartitionId, IncomingTransfer>,
    leases: Leases,
    confirmed_reads: ConfirmedReads,
    stale_reads: StaleReads,
    digests: BTreeMap<PartitionId, DigestCheck>,
    declines: Declines,
    processes: Processes,
    retried_ms: u64,
}

/// Other processes, by ordinal.
#[derive(Debug, Default)]
struct Processes {
    /// Ordinals suspected dead. Replicas track them too, but lose them when recreated.
    suspected: BTreeSet<Ordinal>,
    /// Last known process at each ordinal.
    known: BTreeMap<Ordinal, Member>,
}

impl Replication {
    pub(crate) fn new(context: Arc<Context>, shipping: Shipping) -> Self {
        // Before the first process on a disk no lease can have been granted.
        let granted = context.is_replicated() && context.member.incarnation > engram_memory::Incarnation(1);
        let leases = Leases::assume_granted(context.all_partitions().filter(|_| granted), context.now_ms());
        let transfers = StateTransfers::new(context.options.replication.transfer_bytes_per_s);
        Self {
            context,
            outbox: Outbox::default(),
            shipping,
            transfers,
            incoming: BTreeMap::new(),
            leases,
            confirmed_reads: ConfirmedReads::default(),
            stale_reads: StaleReads::default(),
            digests: BTreeMap::new(),
            declines: Declines::default(),
            processes: Processes::default(),
            retried_ms: 0,
        }
    }
}

/// Messages and processes.
impl Replication {
    /// Sets the interface to the peers.
    pub(crate) fn set_peers(&mut self, peers: Box<dyn Peers>) {
        self.outbox.set_peers(peers);
    }

    /// Queues a message outside a trace.
    pub(crate) fn send(&mut self, to: Ordinal, partition: PartitionId, body: Message) {
        self.outbox.push(to, Envelope::new(partition, body));
    }

    /// Queues a proposal to the map.
    pub(crate) fn propose_change(&mut self, proposal: Proposal) {
        self.outbox.propose(proposal);
    }

    /// Sends what is queued.
    pub(crate) fn flush(&mut self) {
        self.outbox.send_all();
    }

    /// Handles a new stream to a process; messages sent before to its ordinal may be lost.
    pub(crate) fn connect(&mut self, peer: Member) {
        self.shipping.reset_peer(peer.ordinal);
        self.transfers.reset_peer(peer.ordinal);
        self.outbox.reset_peer(peer.ordinal);
        self.processes.known.insert(peer.ordinal, peer);
    }

    pub(crate) fn suspect(&mut self, ordinal: Ordinal) {
        self.processes.suspected.insert(ordinal);
    }

    pub(crate) fn trust(&mut self, ordinal: Ordinal) {
        self.processes.suspected.remove(&ordinal);
    }

    /// Whether proposals without effect are to be repeated; if so, the next time is later.
    pub(crate) const fn retry_is_due(&mut self, now_ms: u64) -> bool {
        let is_due = now_ms.saturating_sub(self.retried_ms) >= RETRY_MS;
        if is_due {
            self.retried_ms = now_ms;
        }
        is_due
    }
}

/// Primary roles that are declined.
impl Replication {
    /// Processes an entry of the map; `declines`: it assigns the primary role to this worker, whose replica declines.
    pub(crate) fn observe_entry(&mut self, partition: PartitionId, entry: &Entry, promised: Term, declines: bool) {
        self.declines.observe(partition, entry, promised, declines);
    }

    /// Records that a process declined the primary role.
    pub(crate) fn receive_decline(&mut self, partition: PartitionId, from: Member) {
        let now_ms = self.context.now_ms();
        self.declines.receive(partition, from, now_ms);
    }

    /// Proposes another candidate for each partition whose primary role is declined here.
    pub(crate) fn decline_leadership(&mut self, state: &State) {
        let (own_ordinal, now_ms) = (self.context.options.replication.ordinal, self.context.now_ms());
        let Processes { suspected, known } = &self.processes;
        // The map may name an earlier process than the running one.
        let running_at = |member: &Member| {
            (!suspected.contains(&member.ordinal)).then(|| *known.get(&member.ordinal).unwrap_or(member))
        };
        let actions = self.declines.actions(own_ordinal, now_ms, running_at);
        self.context.shared.set_leaderless_partitions(self.declines.leaderless().collect());
        for action in actions {
            match action {
                DeclineAction::Notify(partition, to, term) => {
                    let promised = state.get(partition).map_or(Term(0), |state| state.replica().promised());
                    let rejected = replica::Message::Rejected { term, promised };
                    self.send(to, partition, Message::Replica(rejected, Vec::new()));
                }
                DeclineAction::PromoteOther(partition, entry, change) => {
                    self.propose_change(Proposal { partition, expected: entry.expectation(), change });
                }
            }
        }
    }
}

/// Log shipping.
impl Replication {
    /// Returns the bytes of the records retained for followers.
    pub(crate) const fn retained_bytes(&self) -> u64 {
        self.shipping.bytes()
    }

    /// Retains a record that follows the last one of its partition.
    pub(crate) fn retain(&mut self, partition: PartitionId, lsn: Lsn, term: Term, record: &[u8]) {
        self.shipping.retain(partition, lsn, term, record);
    }

    /// Sets the last applied record.
    pub(crate) fn set_applied(&mut self, partition: PartitionId, lsn: Lsn) {
        self.shipping.set_applied(partition, lsn);
    }

    /// Drops the retained records above `after`.
    pub(crate) fn truncate(&mut self, partition: PartitionId, after: Lsn) {
        self.shipping.truncate(partition, after);
    }

    /// Marks a partition as having a commit to send.
    pub(crate) fn mark_pending(&mut self, partition: PartitionId) {
        self.shipping.mark_pending(partition);
    }

    /// Processes an acknowledgment of a follower. `opened`: it is the answer to a new stream, which ends a state transfer.
    pub(crate) fn acknowledge(&mut self, partition: PartitionId, from: Ordinal, written: Lsn, opened: bool) {
        self.shipping.acknowledge(partition, from, written);
        if opened {
            self.transfers.finish(partition, from);
        }
    }

    /// Streams records to a follower, or transfers the state if the records are no longer retained.
    pub(crate) fn stream(&mut self, state: &State, partition: PartitionId, to: Ordinal, after: Lsn) {
        let replica = state.of(partition).replica();
        let Some(term) = replica.primary_term() else { return };
        if self.shipping.covers(partition, after, replica.history().end()) {
            self.shipping.start(partition, to, term, after);
        } else {
            self.transfers.enqueue(partition, to);
        }
    }

    /// Ends streams and state transfers to followers that the map does not name any more. Such a follower may never answer, and what is in
    /// flight to it counts against the capacity of its worker.
    pub(crate) fn drop_removed_followers(&mut self, state: &State, partition: PartitionId) {
        let followers: BTreeSet<Ordinal> =
            state.of(partition).replica().followers().map(|(ordinal, _)| ordinal).collect();
        self.transfers.keep_only(partition, &followers);
        let removed: Vec<Ordinal> = self.shipping.followers(partition).filter(|to| !followers.contains(to)).collect();
        removed.into_iter().for_each(|to| self.shipping.stop(partition, to));
    }

    /// Ends all streams and transfers of a partition, and releases its read leases at `granters`.
    pub(crate) fn stop(&mut self, partition: PartitionId, granters: BTreeSet<Ordinal>) {
        self.shipping.stop_all(partition);
        self.transfers.stop(partition);
        // The next primary need not wait for the expiry of unused leases.
        self.release_leases(partition, granters);
    }

    /// Releases the read leases of a partition at their granters.
    pub(crate) fn release_leases(&mut self, partition: PartitionId, granters: BTreeSet<Ordinal>) {
        for granter in granters {
            self.send(granter, partition, Message::Release);
        }
    }

    /// Queues the records and commits of all partitions that followers do not have.
    pub(crate) fn ship_pending(&mut self, state: &State) {
        for partition in self.shipping.take_pending() {
            self.ship(state, partition);
        }
    }

    fn ship(&mut self, state: &State, partition: PartitionId) {
        let partition_state = state.of(partition);
        let replica = partition_state.replica();
        let (Some(term), commit) = (replica.primary_term(), replica.commit()) else { return };
        let followers: Vec<Ordinal> = self.shipping.followers(partition).collect();
        for to in followers {
            if self.shipping.fell_behind(partition, to) {
                let acked = replica.followers().find(|(ordinal, _)| *ordinal == to).map_or(Lsn(0), |it| it.1.acked);
                self.shipping.stop(partition, to);
                self.stream(state, partition, to, acked);
            }
            let Some(batch) = self.shipping.next(partition, to, term, commit) else { continue };
            debug_assert!(batch.after <= partition_state.last(), "a follower holds a prefix");
            stats::add(&self.context.shared.shipped_records, batch.records.len() as u64);
            let trace = partition_state.trace_of(batch.after, batch.records.len());
            let append = replica::Message::Append { term, after: batch.after, runs: batch.runs, commit };
            let body = Message::Replica(append, batch.records);
            self.outbox.push(to, Envelope { partition, body, trace });
        }
    }
}

pub(crate) fn rules(options: &crate::Options) -> replica::Rules {
    replica::Rules {
        keeps_all: options.wal.durability.syncs_first(options.replication.replicas),
        min_in_sync: options.replication.min_in_sync,
        primary_only: options.wal.durability == Durability::Async,
    }
}

/// Creates the replica of a partition after recovery, or after its state was discarded; `granted`: a read lease granted for it may
/// be in force.
pub(crate) fn recovered_replica(
    member: Member,
    options: &crate::Options,
    lossless_since: engram_memory::Incarnation,
    promised: Term,
    (history, commit): (History, Lsn),
    granted: bool,
) -> Replica {
    let recovered = RecoveredReplica { lossless_since, promised, history, commit, granted };
    replica_of(member, rules(options), recovered, &options.replication)
}

#[cfg_attr(not(feature = "defects"), expect(unused_variables, reason = "used for injected bugs only"))]
pub(crate) fn replica_of(
    member: Member,
    rules: replica::Rules,
    recovered: RecoveredReplica,
    options: &Options,
) -> Replica {
    let replica = Replica::new(member, rules, recovered);
    #[cfg(feature = "defects")]
    let replica = replica.with_bug(options.bug);
    replica
}
