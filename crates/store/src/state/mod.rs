//! State of the partitions: columns, index and items of each, what is logged and not applied, and the background work on them.
//!
//! [`State`] is changed only by applied records and installed snapshots. It knows no peers, and of the log only its positions: it is
//! given what is committed, and returns what is to be answered, logged, deleted or requested.

pub(crate) mod apply;
pub(crate) mod arena;
pub(crate) mod columns;
pub(crate) mod content;
pub(crate) mod import;
pub(crate) mod index;
pub(crate) mod items;
pub(crate) mod partition;
mod partition_state;
pub(crate) mod partitions;
pub(crate) mod traces;
mod work;

pub use content::{Column, Content, ImportError};
pub use items::{ByAge, DrawnItem, ItemSums, Sampler, Trajectory};
pub(crate) use partition_state::{PartitionState, Pending, RecoveredState};
pub use partitions::{Coverage, Memory, Partitions, PayloadPart, RankedMemory, RecalledMemory};

use crate::ActivateError;
use crate::context::Context;
use crate::engine::pending_calls::{Callback, PendingCalls, Waiter};
use crate::replication::throttle::TimeShare;
use crate::snapshot::background::Background;
use crate::stats;
use engram_memory::session::Admission;
use engram_memory::{Command, Lsn, PartitionId, Record, Reply, Request, Settings, Term};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Partitions of a worker, their records in flight, and the background work on them.
pub(crate) struct State {
    context: Arc<Context>,
    partitions: Partitions,
    states: Vec<PartitionState>,
    /// Partitions with committed records that are not applied.
    due: BTreeSet<PartitionId>,
    activations: PendingCalls<Result<(), ActivateError>>,
    background: Background,
    /// Engine time of exports and installations.
    share: TimeShare,
}

/// Callers whose records will not be answered here, with whether each has a request.
pub(crate) type AbandonedWaiters = Vec<(Waiter, bool)>;

impl State {
    pub(crate) fn new(context: Arc<Context>, partitions: Partitions, states: Vec<PartitionState>) -> Self {
        let background = Background::new(context.now_ms(), &context.options);
        let mut state = Self {
            context,
            partitions,
            states,
            due: BTreeSet::new(),
            activations: PendingCalls::default(),
            background,
            share: TimeShare::default(),
        };
        state.publish_recovered();
        state
    }

    fn publish_recovered(&mut self) {
        let context = Arc::clone(&self.context);
        for partition in context.all_partitions().filter(|it| self.partitions.contains(*it)).collect::<Vec<_>>() {
            context.serving.set_settings(partition, self.partitions.ledger(partition).map(|ledger| ledger.settings));
            context.serving.set_lsn(partition, self.of(partition).applied().0);
            self.observe_sessions(partition);
            // Until it is served here, another worker may be its primary.
            self.partitions.set_hidden(partition, context.is_replicated());
        }
    }

    /// Takes over the session times of a partition.
    fn observe_sessions(&self, partition: PartitionId) {
        if let Some(ledger) = self.partitions.ledger(partition) {
            let (watermark_ms, newest_ms) = (ledger.sessions.watermark_ms(), ledger.sessions.last_opened_ms());
            self.context.session_clock.recovered(watermark_ms, newest_ms.unwrap_or(0));
        }
    }

    /// Returns the state of a partition of the cluster.
    pub(crate) fn of(&self, partition: PartitionId) -> &PartitionState {
        &self.states[partition.0 as usize]
    }

    /// As [`State::of`], for a change.
    pub(crate) fn of_mut(&mut self, partition: PartitionId) -> &mut PartitionState {
        &mut self.states[partition.0 as usize]
    }

    /// Returns the state of a partition; `None` if the cluster has no such partition.
    pub(crate) fn get(&self, partition: PartitionId) -> Option<&PartitionState> {
        self.states.get(partition.0 as usize)
    }

    /// Returns all partitions of the cluster with their state.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PartitionId, &PartitionState)> {
        (0..).map(PartitionId).zip(&self.states)
    }

    /// Returns the committed state.
    pub(crate) const fn partitions(&self) -> &Partitions {
        &self.partitions
    }

    /// As [`State::partitions`], for reads that use the device.
    pub(crate) const fn partitions_mut(&mut self) -> &mut Partitions {
        &mut self.partitions
    }

    /// Returns the requests of records that are logged and not applied.
    pub(crate) fn pending_requests(&self) -> impl Iterator<Item = (PartitionId, Request, Lsn)> {
        self.iter().flat_map(|(partition, state)| {
            let requests = state.pending.iter().filter_map(|pending| Some((pending.record.request?, pending.lsn)));
            requests.map(move |(request, lsn)| (partition, request, lsn))
        })
    }

    /// Whether a record with this request is executed when it is applied, as far as is known.
    pub(crate) fn will_execute(&self, partition: PartitionId, record: &Record) -> bool {
        let ledger = self.partitions.ledger(partition);
        // A request that its session would refuse now may be admitted once records in flight are applied, so its repeats are decided
        // at apply.
        record
            .request
            .is_some_and(|request| ledger.is_none_or(|ledger| ledger.sessions.admit(request) == Admission::Execute))
    }

    pub(crate) fn update_gauges(&self, retained_bytes: u64) {
        let shared = &self.context.shared;
        stats::set(&shared.memories, self.partitions.memories());
        let usage = self.partitions.ledger_usage();
        let ledgers = usage.run_record_bytes + usage.session_bytes;
        stats::set(&shared.memory_bytes, self.partitions.bytes() + ledgers + retained_bytes);
        stats::set(&shared.run_records, usage.run_records);
        stats::set(&shared.run_record_bytes, usage.run_record_bytes);
        stats::set(&shared.sessions, usage.sessions);
        stats::set(&shared.session_bytes, usage.session_bytes);
        stats::set(&shared.epoch_entries, usage.epoch_entries);
        let payloads = self.partitions.arena.payloads.usage();
        stats::set(&shared.payload_live_bytes, payloads.live_bytes);
        stats::set(&shared.payload_disk_bytes, payloads.disk_bytes);
        stats::set(&shared.payload_cached_bytes, payloads.cached_bytes);
        stats::set(&shared.payload_segments, payloads.segments);
        stats::set(&shared.payload_cache_hits, payloads.hits);
        stats::set(&shared.payload_cache_misses, payloads.misses);
        stats::set(&shared.payload_compacted_bytes, payloads.compacted_bytes);
        shared.set_gpu(self.partitions.gpu());
    }
}

/// Records.
impl State {
    /// Marks a partition as having committed records.
    pub(crate) fn mark_due(&mut self, partition: PartitionId) {
        self.due.insert(partition);
    }

    /// Forgets which partitions have committed records: the log failed.
    pub(crate) fn clear_due(&mut self) {
        self.due.clear();
    }

    /// Takes the committed records of all partitions; each ends in [`State::finish_record`].
    pub(crate) fn take_committed(&mut self) -> Vec<(PartitionId, Pending)> {
        let mut committed: Vec<(PartitionId, Pending)> = Vec::new();
        for partition in std::mem::take(&mut self.due) {
            let state = &mut self.states[partition.0 as usize];
            let count = committed.len();
            committed.extend(state.take_committed().map(|pending| (partition, pending)));
            if committed.len() > count && !self.partitions.contains(partition) {
                self.partitions.open(partition, Settings::default());
                let served = state.replica().serving_term().is_some();
                self.partitions.set_hidden(partition, !served && self.context.is_replicated());
            }
        }
        committed
    }

    /// Applies committed records, and returns one reply each.
    ///
    /// # Errors
    /// The device failed: nothing may be served any more.
    pub(crate) fn apply(&mut self, committed: &[(PartitionId, Pending)]) -> Result<Vec<Reply>, engram_kernels::Error> {
        let records: Vec<(PartitionId, &Record)> =
            committed.iter().map(|(partition, pending)| (*partition, &pending.record)).collect();
        self.partitions.apply_refs(&records)
    }

    /// Records that a record is applied.
    pub(crate) fn finish_record(&mut self, partition: PartitionId, pending: &Pending) {
        self.states[partition.0 as usize].finish(pending);
        let Context { serving, session_clock, .. } = &*self.context;
        serving.set_lsn(partition, pending.lsn);
        match pending.record.command {
            Command::Configure(settings) => serving.set_settings(partition, Some(settings)),
            Command::ExpireSessions { before_ms } => session_clock.recovered(before_ms, 0),
            _ => {}
        }
    }
}

/// Serving.
impl State {
    /// Begins a call to activate partitions, whose answers are passed to `done`.
    pub(crate) fn begin_activation(
        &mut self,
        count: usize,
        done: Callback<Result<(), ActivateError>>,
    ) -> impl Fn(usize) -> Waiter + use<> {
        self.activations.begin(count, done)
    }

    /// Answers a caller of an activation.
    pub(crate) fn answer_activation(&mut self, waiter: Waiter, answer: Result<(), ActivateError>) {
        self.activations.answer(waiter, answer);
    }

    /// Starts to serve a partition at `term`. Returns the settings to be logged, if they differ from those in force, and the callers
    /// that wait; they are answered by [`State::answer_activations`].
    pub(crate) fn serve(&mut self, partition: PartitionId, term: Term) -> (Option<Settings>, Vec<(Term, Waiter)>) {
        if !self.partitions.contains(partition) {
            self.partitions.open(partition, Settings::default());
        }
        self.partitions.set_hidden(partition, false);
        // Committed records are applied before the current settings are determined.
        let now_ms = self.context.now_ms();
        let state = &mut self.states[partition.0 as usize];
        state.begin_serving(now_ms);
        let waiting = state.take_activations();
        let pending = state.pending_settings();
        let ledger = self.partitions.ledger(partition).map_or_else(Settings::default, |ledger| ledger.settings);
        let current = pending.unwrap_or(ledger);
        let target = Settings { count_updates: current.count_updates, ..self.context.options.settings };
        // In this order, so that a reader that sees the term also sees the settings.
        self.context.serving.set_settings(partition, Some(target));
        self.context.serving.publish(partition, Some(term));
        ((target != current).then_some(target), waiting)
    }

    /// Answers the callers that wait for a partition, which is served at `term`.
    pub(crate) fn answer_activations(&mut self, partition: PartitionId, term: Term, waiting: Vec<(Term, Waiter)>) {
        for (requested, waiter) in waiting {
            let answer = if requested == term {
                Ok(())
            } else {
                Err(ActivateError::TermPromised { partition, promised: term, requested })
            };
            self.activations.answer(waiter, answer);
        }
    }

    /// Stops serving a partition. Returns the callers of its records.
    pub(crate) fn stop_serving(&mut self, partition: PartitionId) -> AbandonedWaiters {
        self.context.serving.publish(partition, None);
        self.partitions.set_hidden(partition, self.context.is_replicated());
        let state = &mut self.states[partition.0 as usize];
        state.end_serving();
        state.take_waiters()
    }

    /// Rejects the callers that wait for a partition: a higher term is promised.
    pub(crate) fn reject_activations(&mut self, partition: PartitionId) {
        let state = &mut self.states[partition.0 as usize];
        let promised = state.replica().promised();
        for (requested, waiter) in state.take_activations() {
            self.activations.answer(waiter, Err(ActivateError::TermPromised { partition, promised, requested }));
        }
    }

    /// Fails the callers that wait for a partition.
    pub(crate) fn fail_activations(&mut self, partition: PartitionId, reason: &str) {
        for (_, waiter) in self.states[partition.0 as usize].take_activations() {
            self.activations.answer(waiter, Err(ActivateError::Failed { reason: reason.to_owned() }));
        }
    }
}

/// Replacement of a partition's state.
impl State {
    /// Loads a received state that is durable as a snapshot, in place of the present one.
    ///
    /// # Errors
    /// [`ImportError`]: the partition is then empty.
    pub(crate) fn import(&mut self, content: &Content) -> Result<(), ImportError> {
        self.partitions.close(content.partition);
        self.partitions.import(content)
    }

    /// Records that a partition was loaded by [`State::import`] at this position.
    pub(crate) fn installed(&mut self, partition: PartitionId, lsn: Lsn, term: Term) {
        self.partitions.set_hidden(partition, true);
        self.states[partition.0 as usize].install(lsn, term);
        self.context.serving.set_lsn(partition, lsn);
        self.observe_sessions(partition);
        let settings = self.partitions.ledger(partition).map(|ledger| ledger.settings);
        self.context.serving.set_settings(partition, settings);
    }

    /// Removes the memories of a partition.
    pub(crate) fn close(&mut self, partition: PartitionId) {
        self.partitions.close(partition);
    }

    /// Forgets what a partition without memories had applied, written and snapshotted.
    pub(crate) fn discard(&mut self, partition: PartitionId) {
        self.states[partition.0 as usize].discard();
    }

    /// Exports a partition for a state transfer; `None` if it is empty. If it `has_single_replica`, payloads that are damaged here are lost.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn export_for_transfer(
        &mut self,
        partition: PartitionId,
        has_single_replica: bool,
    ) -> Result<Option<Content>, engram_kernels::Error> {
        if has_single_replica {
            self.partitions.arena.payloads.declare_lost(partition);
            self.background.payload_scrub.forget(partition);
        }
        self.partitions.export(partition)
    }

    /// Whether work for transfers may block the engine now.
    pub(crate) fn may_transfer(&self) -> bool {
        self.share.may_work(self.context.now_ms())
    }

    /// Charges work for transfers that blocked the engine since `from_ms`.
    pub(crate) fn charge_transfer(&mut self, from_ms: u64) {
        self.share.charge(from_ms, self.context.now_ms(), self.context.shared.served());
    }
}
