//! The store of one worker on one thread: log, apply, answer, snapshot.
//!
//! ```text
//!  write ──> checks, dedupe ──┐
//! peers ──> Append ──────────┴─> log buffer ──seal──> batch ──Writer (inline, or a thread)──> written
//!                                   │ pending: logged, not applied                              │
//!  answer <── ledger, columns, device <── apply, in log order <── commit <── Replica::step <────┘
//! ```
//!
//! A store composes three owners: [`Sequencer`] has the log, its batches and the requests in flight; [`Replication`] what is sent to
//! and known of other workers; [`State`] the partitions and the background work on them. What concerns several of them is here: which
//! record is logged (`admission`), how the decisions of a replica are executed (`actions`), and the order of a turn (this module).
//!
//! Invariants: state changes only by applied records, and a record is applied once the partition's replica has committed it; LSNs
//! are dense per partition; a partition that was never configured has default settings, so that the log alone determines the
//! state; a term is served only by the process that promised it; after a device failure nothing is served.

mod actions;
mod admission;

use super::results::{CommittedWrite, WriteError};
use super::sequencer::{Mark, Outgoing, Sequencer};
use crate::context::Context;
use crate::disk::reserve;
use crate::peer::Peers;
use crate::replication::leases::LeaseGrant;
use crate::replication::{ReplicaStatus, Replication, status};
use crate::session_clock::SessionClock;
use crate::snapshot::background::FailedInstall;
use crate::snapshot::job::{Job, JobOutput, SnapshotWrite};
use crate::snapshot::recovery::{RecoveredStore, recover};
use crate::state::{Partitions, Pending, State};
use crate::stats::{self, Shared};
use crate::wal::{Batch, Durability, Position, Writer};
use crate::{Clock, ConfirmError, Disk, Error, Identity, Options, Recovery, ReplicaPosition, SnapshotInfo};
use engram_cluster::replica::Event;
use engram_kernels::Device;
use engram_memory::{Lsn, Member, PartitionId, Reply, Term};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

/// The partitions of one worker, their log and snapshots.
pub struct Store {
    context: Arc<Context>,
    identity: Identity,
    sequencer: Sequencer,
    replication: Replication,
    state: State,
    /// First failure of an action of a replica; ends the store at the end of the turn.
    failed: Option<Error>,
}

/// Start and stop.
impl Store {
    /// Opens the store of a directory, empty at first start; nothing is served before [`Store::activate`].
    ///
    /// # Errors
    /// Another cluster, store, shape or format; a locked directory; a damaged log; those of the disk and the device.
    pub fn open(
        disk: Arc<dyn Disk>,
        clock: Arc<dyn Clock>,
        device: Box<dyn Device>,
        options: Options,
    ) -> Result<(Self, Recovery), Error> {
        let (recovered, mut recovery) = recover(disk, clock, device, options)?;
        let mut store = Self::assemble(recovered)?;
        let context = Arc::clone(&store.context);
        recovery.disk_full = !reserve::refill(&*context.disk, context.options.reserve_bytes);
        // Other replicas can restore a corrupt partition: it restarts empty and is marked incomplete until then.
        for (partition, what) in recovery.corrupt.iter().filter(|_| context.is_replicated()) {
            store.log_installed(*partition, Term(0), Lsn(0))?;
            store.set_damage_note(*partition, what)?;
        }
        Ok((store, recovery))
    }

    fn assemble(recovered: RecoveredStore) -> Result<Self, Error> {
        let RecoveredStore { context, identity, partitions, states, wal, writer, shipping, ahead_of_log } = recovered;
        let mut store = Self {
            sequencer: Sequencer::new(wal, writer, Arc::clone(&context.shared)),
            replication: Replication::new(Arc::clone(&context), shipping),
            state: State::new(Arc::clone(&context), partitions, states),
            context,
            identity,
            failed: None,
        };
        store.index_requests();
        store.update_gauges();
        for (partition, tail) in ahead_of_log {
            store.log_installed(partition, tail.term, tail.lsn)?;
        }
        Ok(store)
    }

    /// Indexes the requests of records that recovery found logged and not applied.
    fn index_requests(&mut self) {
        for (partition, request, lsn) in self.state.pending_requests() {
            self.sequencer.index_request(partition, request, lsn);
        }
    }

    /// Stops gracefully: proposals are logged and answered, the log is sealed, and the clean mark is written.
    ///
    /// # Errors
    /// Those of the log and of the clean mark.
    pub fn stop(mut self) -> Result<(), Error> {
        self.flush()?;
        let end = self.sequencer.close()?;
        self.identity.leave_clean_mark(&self.context.disk, end)
    }

    /// Returns the writer, for a thread of its own.
    pub(crate) fn take_writer(&mut self) -> Writer {
        self.sequencer.take_writer()
    }

    /// [`Store::stop`] with the writer returned by its thread.
    pub(crate) fn stop_with(mut self, writer: Writer) -> Result<(), Error> {
        self.sequencer.return_writer(writer);
        self.stop()
    }
}

/// What is known without a change.
impl Store {
    /// Returns the time of sessions.
    pub fn session_clock(&self) -> &SessionClock {
        &self.context.session_clock
    }

    /// Returns the identity of store and process.
    pub const fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns this process as a member of its cluster.
    pub fn member(&self) -> Member {
        self.context.member
    }

    /// Returns the committed state for reads.
    pub const fn partitions(&mut self) -> &mut Partitions {
        self.state.partitions_mut()
    }

    /// Returns the term at which a partition is served; `None` if it is not.
    pub fn serving(&self, partition: PartitionId) -> Option<Term> {
        self.state.get(partition)?.serving()
    }

    /// Returns the last applied LSN of a partition and its term.
    pub fn applied(&self, partition: PartitionId) -> (Term, Lsn) {
        let (lsn, term) = self.state.get(partition).map_or_else(Default::default, |state| state.applied());
        (term, lsn)
    }

    /// Returns the highest promised term of a partition.
    pub fn promised(&self, partition: PartitionId) -> Term {
        self.state.get(partition).map_or(Term(0), |state| state.replica().promised())
    }

    /// Returns the status of every replica.
    pub fn replicas(&self) -> Vec<ReplicaStatus> {
        status::replicas(&self.state)
    }

    /// Returns the counters.
    pub fn stats(&self) -> stats::Stats {
        self.context.shared.snapshot()
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the live counters, for other threads.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.context.shared
    }

    /// Whether a backup is in progress.
    pub(crate) fn writes_backup(&self) -> bool {
        self.state.writes_backup()
    }

    fn update_gauges(&self) {
        self.sequencer.update_gauges();
        self.state.update_gauges(self.replication.retained_bytes());
    }
}

/// Reads and leases.
impl Store {
    /// Whether a read of a partition that ran before this call is linearizable: it is served here, everything acknowledged by
    /// earlier primaries is committed, and every other in-sync member has promised not to serve meanwhile.
    pub fn is_readable(&self, partition: PartitionId) -> bool {
        self.replication.is_readable(&self.state, partition)
    }

    /// Records a lease granted until `until_ms` for all partitions but `except`.
    pub fn record_lease(&mut self, granter: Member, until_ms: u64, except: Vec<PartitionId>) {
        self.replication.record_lease(granter, until_ms, except);
    }

    /// Grants a lease to a process that requests it now; returns the partitions not covered.
    pub fn grant_lease(&mut self, holder: Member) -> Vec<PartitionId> {
        let LeaseGrant { granted, except } = self.replication.grant_lease(&self.state, holder);
        for partition in granted {
            self.state.of_mut(partition).note_lease_granted();
        }
        except
    }

    /// Ends the grants to a process that is proven dead.
    pub fn confirm_dead(&mut self, dead: Member) {
        self.replication.end_grants(dead);
        self.expire_grants();
    }

    /// Reads `partitions`, linearizable without relying on clocks: `done` gets the state in a later turn, once every other in-sync
    /// member has confirmed this process as primary. The head of module `confirmed_reads` has the proof.
    pub fn read_confirmed(
        &mut self,
        partitions: Vec<PartitionId>,
        done: impl FnOnce(Result<&mut Partitions, ConfirmError>) + Send + 'static,
    ) {
        self.replication.read_confirmed(partitions, Box::new(done));
    }

    /// Reads those of `partitions` whose replica here lags at most `max_lag_ms` behind this call. `done` sees only these and gets
    /// their positions.
    pub fn read_replicas(
        &mut self,
        partitions: Vec<PartitionId>,
        max_lag_ms: u64,
        done: impl FnOnce(&mut Partitions, Vec<ReplicaPosition>) + Send + 'static,
    ) {
        self.replication.read_replicas(partitions, max_lag_ms, Box::new(done));
    }
}

/// Turns.
impl Store {
    /// Sets the interface to the peers.
    pub fn set_peers(&mut self, peers: Box<dyn Peers>) {
        self.replication.set_peers(peers);
    }

    /// Runs everything due on this thread: logs proposals, applies and answers them, takes snapshots. For simulators and tests; an
    /// engine uses threads.
    ///
    /// # Errors
    /// [`Error::SyncFailed`]: the process must abort. A device failure. A failed log write is no error here: it is the answer to the
    /// writes.
    pub fn turn(&mut self) -> Result<(), Error> {
        self.flush()?;
        self.housekeeping()?;
        self.flush()?;
        while let Some(job) = self.next_job()? {
            let result = job.run();
            self.job_done(&job, result)?;
        }
        self.flush()?;
        self.dispatch()?;
        let now_ms = self.context.now_ms();
        self.sequencer.writer().tick(now_ms)
    }

    fn flush(&mut self) -> Result<(), Error> {
        while let Some(outgoing) = self.next_batch() {
            let now_ms = self.context.now_ms();
            match outgoing.write(self.sequencer.writer(), now_ms) {
                Ok(position) => self.handle_written(outgoing.batch, position)?,
                Err(error @ Error::SyncFailed { .. }) => return Err(error),
                Err(error) => self.handle_write_failure(outgoing.batch, error)?,
            }
        }
        Ok(())
    }

    /// Finishes a turn: applies what its events committed, and sends messages and proposals.
    ///
    /// # Errors
    /// The log or the device failed.
    pub(crate) fn dispatch(&mut self) -> Result<(), Error> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if self.replication.retry_is_due(self.context.now_ms()) {
            self.step_all(&Event::Resend);
            self.replication.decline_leadership(&self.state);
        }
        self.apply_due()?;
        self.replication.complete_confirmed_reads(&mut self.state);
        self.replication.complete_stale_reads(&mut self.state);
        self.replication.ship_pending(&self.state);
        self.replication.send_state(&mut self.state)?;
        self.replication.flush();
        Ok(())
    }

    /// Starts what is due by the clock: expiry, digest markers, snapshot rounds, repeated transfers.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn housekeeping(&mut self) -> Result<(), Error> {
        self.expire_grants();
        let now_ms = self.context.now_ms();
        while let Some(FailedInstall { partition, term, from }) = self.state.next_failed_install(now_ms) {
            self.replication.request_transfer_again(partition, from, term);
        }
        self.state.compact_payloads();
        self.repair_payloads()?;
        let marker = self.state.next_digest_marker(self.context.now_ms());
        self.propose_all(marker);
        let expired = self.state.expire_sessions();
        self.propose_all(expired);
        if self.state.round_is_due(self.sequencer.written_position()) {
            let (outdated, idle) = (self.state.outdated(), self.state.advance_idle(self.sequencer.log_bytes()));
            let advanced: Vec<PartitionId> = idle.iter().map(|(partition, _)| *partition).collect();
            self.propose_all(idle);
            self.state.begin_own_round(outdated, &advanced);
            self.end_rounds();
        }
        Ok(())
    }
}

/// Snapshots.
impl Store {
    /// Requests a snapshot of every partition with data on the store's own disk, or a backup to `target` of the visible ones:
    /// where several workers write into one directory, each writes the partitions it is primary of. `done` is called when all are
    /// durable, or with the first error.
    pub fn snapshot_all(
        &mut self,
        target: Option<Arc<dyn Disk>>,
        done: impl FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send + 'static,
    ) {
        self.state.snapshot_all(target, Box::new(done));
        self.end_rounds();
    }

    /// Requests a backup of one partition; of none unless it is visible here.
    pub fn snapshot_one(
        &mut self,
        partition: PartitionId,
        target: Arc<dyn Disk>,
        done: impl FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send + 'static,
    ) {
        self.state.snapshot_one(partition, target, Box::new(done));
        self.end_rounds();
    }

    /// Deletes the log that ended rounds of snapshots cover, and answers them.
    fn end_rounds(&mut self) {
        while let Some(round) = self.state.next_ended_round() {
            if round.covers_log {
                self.sequencer.delete_covered(&self.state.covered());
            }
            round.answer();
        }
    }

    /// Returns the next background job: a snapshot to write, or something to scrub. Each ends in [`Store::job_done`].
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn next_job(&mut self) -> Result<Option<Job>, Error> {
        let job = self.state.next_job(&self.sequencer);
        self.end_rounds();
        job
    }

    /// Handles a finished job.
    ///
    /// # Errors
    /// [`Error::SyncFailed`].
    pub(crate) fn job_done(&mut self, job: &Job, result: Result<JobOutput, Error>) -> Result<(), Error> {
        self.state.end_job();
        match job {
            Job::Write(write) if write.install.is_some() => self.install_written(write, result),
            _ => {
                self.state.job_done(job, result)?;
                self.end_rounds();
                Ok(())
            }
        }
    }

    fn install_written(&mut self, write: &SnapshotWrite, result: Result<JobOutput, Error>) -> Result<(), Error> {
        let Some((term, from)) = write.install else { return Ok(()) };
        match result {
            Ok(_) => {
                let from_ms = self.context.now_ms();
                self.install(&write.content, write.head, term, from)?;
                self.state.charge_transfer(from_ms);
            }
            Err(error @ Error::SyncFailed { .. }) => return Err(error),
            Err(_) => self.state.install_failed(FailedInstall { partition: write.head.partition, term, from }),
        }
        Ok(())
    }
}

/// Log.
impl Store {
    /// Returns the next batch for the writer. Each one ends in [`Store::handle_written`] or [`Store::handle_write_failure`].
    pub(crate) fn next_batch(&mut self) -> Option<Outgoing> {
        self.sequencer.next_batch()
    }

    /// Handles the oldest batch of the writer as written: applies and answers what it commits.
    ///
    /// # Errors
    /// The device failed; all callers were answered.
    pub(crate) fn handle_written(&mut self, batch: Batch, position: Position) -> Result<(), Error> {
        let written = self.sequencer.finish_batch(batch, position);
        let mut touched = BTreeSet::new();
        for mark in written.marks {
            touched.insert(mark.partition());
            match mark {
                // The last of several records stands for all.
                Mark::Record(partition, lsn, term) => {
                    let state = self.state.of_mut(partition);
                    state.set_written(lsn, term);
                    state.trace_written(partition, lsn);
                }
                Mark::Promise(partition, term) => self.step(partition, Event::Promised(term)),
                Mark::Other(_) => {}
            }
        }
        self.sequencer.synced(written.is_durable, &mut touched);
        for partition in touched {
            let (lsn, term) = self.state.of(partition).written();
            if written.is_durable {
                self.step(partition, Event::Synced(lsn, term));
            }
            self.step(partition, Event::Written(lsn, term));
        }
        self.apply_due()
    }

    /// Applies and answers what is committed.
    ///
    /// # Errors
    /// The device failed; all callers were answered.
    pub(crate) fn apply_due(&mut self) -> Result<(), Error> {
        let committed = self.state.take_committed();
        if committed.is_empty() {
            // The batch may contain only promises.
            self.update_gauges();
            return Ok(());
        }
        let started = engram_trace::is_recording().then(SystemTime::now);
        let replies = match self.state.apply(&committed) {
            Ok(replies) => replies,
            Err(error) => {
                let error = error.into();
                let cause = WriteError::of_failure(&error);
                for (partition, pending) in committed {
                    self.sequencer.refuse(partition, pending, &cause);
                }
                self.fail(&cause);
                return Err(error);
            }
        };
        let durable = self.sequencer.is_durable();
        for ((partition, pending), reply) in committed.into_iter().zip(replies) {
            self.finish_record(partition, &pending, &reply);
            if let (Some(started), Some(trace)) = (started, &pending.trace) {
                trace.applied(partition, pending.lsn, started);
            }
            self.answer_record(partition, pending, reply, durable);
        }
        self.update_gauges();
        Ok(())
    }

    fn finish_record(&mut self, partition: PartitionId, pending: &Pending, reply: &Reply) {
        self.replication.set_applied(partition, pending.lsn);
        self.sequencer.set_applied(partition, pending.term, pending.lsn);
        self.state.finish_record(partition, pending);
        self.sequencer.remove_request(partition, pending);
        let context = Arc::clone(&self.context);
        stats::add(&context.shared.applied_records, 1);
        if let Reply::Applied(outcome) = reply {
            if let Some(digest) = outcome.digest.filter(|_| context.is_replicated()) {
                let mismatch = self.replication.compare_or_send_digest(&self.state, partition, pending.lsn, digest);
                self.discard_mismatch(partition, mismatch);
            }
            stats::add(&context.shared.applied_rows, outcome.applied);
            stats::add(&context.shared.created_memories, outcome.created);
            stats::add(&context.shared.evicted_memories, outcome.evicted);
        }
    }

    fn answer_record(&mut self, partition: PartitionId, pending: Pending, reply: Reply, durable: bool) {
        let Pending { lsn, term, waiters, .. } = pending;
        if waiters.is_empty() {
            return;
        }
        // Mode async does not wait for the other replicas.
        let is_async = self.context.options.wal.durability == Durability::Async;
        let replicas = if is_async { 1 } else { self.state.of(partition).replica().in_sync_count() };
        let committed = CommittedWrite { partition, term, lsn, replicas, durable, reply };
        for waiter in waiters {
            self.sequencer.answer(waiter, Ok(committed.clone()));
        }
    }

    /// Handles a batch that failed to be written: no pending proposal is logged. Other replicas may have them, so with peers this ends
    /// the store.
    ///
    /// # Errors
    /// `error`, with peers.
    pub(crate) fn handle_write_failure(&mut self, batch: Batch, error: Error) -> Result<(), Error> {
        self.sequencer.withdraw(batch);
        self.fail(&WriteError::of_failure(&error));
        if self.context.is_replicated() { Err(error) } else { Ok(()) }
    }

    /// Answers everything in flight with a failure, and rolls partitions back to what is written.
    pub(crate) fn fail(&mut self, cause: &WriteError) {
        self.state.clear_due();
        for partition in self.sequencer.clear() {
            self.roll_back(partition, cause);
        }
        self.update_gauges();
    }
}
