//! State of a partition other than its state machine: its replica core, and what is logged and not applied.

use super::traces::RecordTrace;
use crate::engine::pending_calls::Waiter;
use engram_cluster::replica::{Action, Event};
use engram_cluster::{Entry, Replica};
use engram_memory::{CapacityPolicy, Command, Lsn, Record, Settings, Term};
use std::collections::VecDeque;

/// A record that is logged and not applied.
pub(crate) struct Pending {
    pub(crate) lsn: Lsn,
    pub(crate) term: Term,
    pub(crate) record: Record,
    /// Waiting callers; several if the request was repeated before it was applied.
    pub(crate) waiters: Vec<Waiter>,
    /// Present if its trace is sampled.
    pub(crate) trace: Option<Box<RecordTrace>>,
}

impl Pending {
    /// Creates a record that is not traced.
    pub(crate) const fn new(lsn: Lsn, term: Term, record: Record, waiters: Vec<Waiter>) -> Self {
        Self { lsn, term, record, waiters, trace: None }
    }
}

/// Replica core of a partition, and its records in flight.
pub(crate) struct PartitionState {
    /// Decides what is promised, logged, acknowledged and served.
    replica: Replica,
    /// Damage, if any: the partition is not served, its files are kept for repair.
    corrupt: Option<String>,
    /// LSN up to which a damaged partition has to commit to be repaired.
    complete_at: Lsn,
    /// LSN and term of the last applied record.
    applied: (Lsn, Term),
    /// Records logged and not applied, dense after `applied`.
    pub(super) pending: VecDeque<Pending>,
    /// Most memories that these can create.
    creates: u64,
    /// Last record written as the durability mode requires.
    written: (Lsn, Term),
    /// Callers that wait for the partition to be served at a term.
    activations: Vec<(Term, Waiter)>,
    /// Since when it is continuously served here, by the monotonic clock.
    served_since_ms: Option<u64>,
    snapshots: Generations,
}

/// Snapshots of a partition on the store's own disk.
#[derive(Debug, Default)]
struct Generations {
    /// The newest and the older one.
    kept: [Option<Lsn>; 2],
    /// Damaged ones: removed when the next one is written.
    damaged: Vec<Lsn>,
}

/// What recovery found of a partition.
pub(crate) struct RecoveredState {
    pub(crate) corrupt: Option<String>,
    pub(crate) applied: (Lsn, Term),
    pub(crate) pending: VecDeque<Pending>,
    pub(crate) written: (Lsn, Term),
    pub(crate) snapshots: [Option<Lsn>; 2],
}

/// Replica core.
impl PartitionState {
    pub(crate) fn recovered(replica: Replica, recovered: RecoveredState) -> Self {
        let RecoveredState { corrupt, applied, pending, written, snapshots } = recovered;
        Self {
            replica,
            corrupt,
            // Unknown until a primary sends its history.
            complete_at: Lsn(u64::MAX),
            applied,
            creates: created_by(&pending),
            pending,
            written,
            activations: Vec::new(),
            served_since_ms: None,
            snapshots: Generations { kept: snapshots, damaged: Vec::new() },
        }
    }

    pub(crate) const fn replica(&self) -> &Replica {
        &self.replica
    }

    /// Passes an event to the replica; returns its decisions.
    pub(crate) fn step(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.replica.step(event, &mut actions);
        actions
    }

    /// Passes an entry of the map to the replica; returns its decisions.
    pub(crate) fn apply_entry(&mut self, entry: &Entry) -> Vec<Action> {
        let mut actions = Vec::new();
        self.replica.apply_entry(entry, &mut actions);
        actions
    }

    /// Replaces the replica by one that was recreated.
    pub(crate) fn replace_replica(&mut self, replica: Replica) {
        self.replica = replica;
    }

    /// Rolls the log of a primary without peers back to `kept`.
    pub(crate) fn withdraw(&mut self, kept: Lsn) {
        self.replica.withdraw(kept);
    }

    /// Records that a read lease was granted.
    pub(crate) fn note_lease_granted(&mut self) {
        self.replica.note_lease_granted();
    }

    /// Returns the LSN of the last record in the local log.
    pub(crate) fn last(&self) -> Lsn {
        self.replica.history().end()
    }

    /// Returns the term at which the partition is served; `None` if it is not.
    pub(crate) fn serving(&self) -> Option<Term> {
        self.replica.serving_term().filter(|_| self.corrupt.is_none())
    }

    /// Returns since when it is served, if everything committed is applied and not damaged.
    pub(crate) fn readable_since_ms(&self) -> Option<u64> {
        // Records committed but not applied are missing in the state that was read.
        self.served_since_ms.filter(|_| self.corrupt.is_none() && self.applied.0 >= self.replica.commit())
    }

    pub(super) fn begin_serving(&mut self, now_ms: u64) {
        self.served_since_ms.get_or_insert(now_ms);
    }

    pub(super) const fn end_serving(&mut self) {
        self.served_since_ms = None;
    }

    pub(crate) fn add_activation(&mut self, term: Term, waiter: Waiter) {
        self.activations.push((term, waiter));
    }

    pub(super) fn take_activations(&mut self) -> Vec<(Term, Waiter)> {
        std::mem::take(&mut self.activations)
    }

    pub(crate) fn corrupt(&self) -> Option<&str> {
        self.corrupt.as_deref()
    }

    /// Sets or clears the damage.
    pub(crate) fn set_corrupt(&mut self, corrupt: Option<String>) {
        self.corrupt = corrupt;
    }

    /// Sets the history that a damaged replica has to reach to be repaired.
    pub(crate) fn complete_at(&mut self, lsn: Lsn) {
        if self.corrupt.is_some() {
            self.complete_at = lsn;
        }
    }

    /// Whether a damaged replica has caught up with what its primary had when it opened the term.
    pub(crate) fn is_repaired(&self) -> bool {
        self.corrupt.is_some() && self.replica.commit() >= self.complete_at
    }
}

/// Records in flight.
impl PartitionState {
    /// Returns LSN and term of the last applied record.
    pub(crate) const fn applied(&self) -> (Lsn, Term) {
        self.applied
    }

    pub(crate) const fn written(&self) -> (Lsn, Term) {
        self.written
    }

    /// Sets the last written record; the last of several stands for all.
    pub(crate) const fn set_written(&mut self, lsn: Lsn, term: Term) {
        self.written = (lsn, term);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// Adds a logged record.
    pub(crate) fn push(&mut self, pending: Pending) {
        self.creates += pending.record.command.may_create() as u64;
        self.pending.push_back(pending);
    }

    /// Adds a caller to the record in flight at `lsn`.
    pub(crate) fn join(&mut self, lsn: Lsn, waiter: Option<Waiter>) {
        let index = (lsn.0 - self.applied.0.0 - 1) as usize;
        self.pending[index].waiters.extend(waiter);
    }

    /// Takes the committed records, which are then applied in order.
    pub(super) fn take_committed(&mut self) -> impl Iterator<Item = Pending> {
        let commit = self.replica.commit();
        let count = self.pending.iter().take_while(|pending| pending.lsn <= commit).count();
        self.pending.drain(..count)
    }

    /// Records that a record taken by `take_committed` is applied.
    pub(super) fn finish(&mut self, pending: &Pending) {
        self.applied = (pending.lsn, pending.term);
        self.creates -= pending.record.command.may_create() as u64;
    }

    /// Removes the records above `after`.
    pub(crate) fn remove_above(&mut self, after: Lsn) -> VecDeque<Pending> {
        let removed = self.pending.split_off(self.pending.partition_point(|pending| pending.lsn <= after));
        self.creates = created_by(&self.pending);
        removed
    }

    /// Takes the waiting callers of all records, with whether each has a request.
    pub(super) fn take_waiters(&mut self) -> Vec<(Waiter, bool)> {
        let mut waiters = Vec::new();
        for pending in &mut self.pending {
            let has_request = pending.record.request.is_some();
            waiters.extend(pending.waiters.drain(..).map(|waiter| (waiter, has_request)));
        }
        waiters
    }

    /// Replaces position and snapshot by those of an installed snapshot.
    pub(super) fn install(&mut self, lsn: Lsn, term: Term) {
        (self.applied, self.written) = ((lsn, term), (lsn, term));
        let [newest, _] = self.snapshots.kept;
        self.snapshots.kept = [Some(lsn), newest.filter(|older| *older < lsn)];
    }

    /// Forgets what was applied, written and snapshotted.
    pub(super) fn discard(&mut self) {
        (self.applied, self.written) = Default::default();
        self.complete_at = Lsn(u64::MAX);
        self.snapshots = Generations::default();
    }

    /// Returns the newest pending settings.
    pub(super) fn pending_settings(&self) -> Option<Settings> {
        self.pending.iter().rev().find_map(|pending| match pending.record.command {
            Command::Configure(settings) => Some(settings),
            _ => None,
        })
    }

    /// Returns the commands in flight.
    pub(crate) fn commands_in_flight(&self) -> impl Iterator<Item = &Command> {
        self.pending.iter().map(|pending| &pending.record.command)
    }

    /// Whether a record that creates at most `created` memories certainly fits a partition with `count` memories.
    pub(crate) fn has_room(&self, settings: &Settings, count: u64, created: u64) -> bool {
        settings.policy != CapacityPolicy::Refuse || created == 0 || count + self.creates + created <= settings.limit
    }
}

/// Snapshots.
impl PartitionState {
    /// Returns the LSNs of the newest and the older snapshot.
    pub(crate) const fn snapshots(&self) -> [Option<Lsn>; 2] {
        self.snapshots.kept
    }

    pub(crate) fn damaged_snapshots(&self) -> &[Lsn] {
        &self.snapshots.damaged
    }

    /// Whether the newest snapshot is outdated or one is damaged.
    pub(crate) fn needs_snapshot(&self) -> bool {
        let applied = self.applied.0;
        applied > Lsn(0) && (self.snapshots.kept[0] != Some(applied) || !self.snapshots.damaged.is_empty())
    }

    /// Records a written snapshot, which replaced these damaged ones.
    pub(super) fn set_snapshots(&mut self, newest: Lsn, older: Option<Lsn>, replaced: &[Lsn]) {
        self.snapshots.kept = [Some(newest), older];
        self.snapshots.damaged.retain(|damaged| !replaced.contains(damaged));
    }

    /// Records a damaged snapshot; `false` if it was replaced meanwhile.
    pub(super) fn mark_damaged(&mut self, lsn: Lsn) -> bool {
        let is_kept = self.snapshots.kept.contains(&Some(lsn));
        if is_kept {
            let [newest, older] = self.snapshots.kept.map(|snapshot| snapshot.filter(|other| *other != lsn));
            self.snapshots.kept = [newest.or(older), newest.and(older)];
            self.snapshots.damaged.push(lsn);
        }
        is_kept
    }
}

fn created_by(pending: &VecDeque<Pending>) -> u64 {
    pending.iter().map(|pending| pending.record.command.may_create() as u64).sum()
}
