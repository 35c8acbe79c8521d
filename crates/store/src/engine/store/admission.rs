//! Checks before a record is logged: primary, validity, duplicates, capacity.

use super::Store;
use crate::engine::pending_calls::Waiter;
use crate::engine::results::{ActivateError, CommittedWrite, WriteError};
use crate::engine::sequencer::{Answer, Mark};
use crate::state::Pending;
use crate::stats;
use engram_cluster::Entry as MapEntry;
use engram_cluster::injected;
use engram_cluster::replica::Event;
use engram_memory::session::Admission;
use engram_memory::{
    BufferCommand, Command, Lsn, MemoryId, PartitionId, Record, Refusal, Reply, Request, Term, Updates, partition_of,
};
use std::collections::HashSet;

impl Store {
    /// Proposes records, each of one partition; `done` is called once with all answers, in order, during this call, a later turn
    /// or a later call. Records of one partition are applied in the given order.
    pub fn write(
        &mut self,
        records: Vec<(PartitionId, Record)>,
        done: impl FnOnce(Vec<Result<CommittedWrite, WriteError>>) + Send + 'static,
    ) {
        self.write_traced(records, None, done);
    }

    /// As [`Store::write`], within a trace.
    pub(crate) fn write_traced(
        &mut self,
        records: Vec<(PartitionId, Record)>,
        trace: Option<engram_trace::Context>,
        done: impl FnOnce(Vec<Result<CommittedWrite, WriteError>>) + Send + 'static,
    ) {
        let waiter = self.sequencer.begin_write(records.len(), Box::new(done));
        for (index, (partition, record)) in records.into_iter().enumerate() {
            let answer = self.propose(partition, record, Some(waiter(index)));
            if let (Some(parent), None) = (trace, &answer) {
                self.state.of_mut(partition).trace_logged(parent);
            }
            if let Some(answer) = answer {
                let shared = &self.context.shared;
                let counter = if answer.is_ok() { &shared.answered_records } else { &shared.refused_records };
                stats::add(counter, 1);
                self.sequencer.answer(waiter(index), answer);
            }
        }
    }

    /// Starts serving partitions, each at its term, as the only replica: for a store without peers. The term has to be above every
    /// one promised on this disk, unless this process already serves it. `done` is called once the promises are durable. A missing
    /// partition starts empty; one whose settings differ from [`crate::Options::settings`] is configured.
    pub fn activate(
        &mut self,
        partitions: Vec<(PartitionId, Term)>,
        done: impl FnOnce(Vec<Result<(), ActivateError>>) + Send + 'static,
    ) {
        let waiter = self.state.begin_activation(partitions.len(), Box::new(done));
        for (index, (partition, term)) in partitions.into_iter().enumerate() {
            if let Some(answer) = self.activate_one(partition, term, waiter(index)) {
                self.state.answer_activation(waiter(index), answer);
            }
        }
    }

    fn activate_one(
        &mut self,
        partition: PartitionId,
        term: Term,
        waiter: Waiter,
    ) -> Option<Result<(), ActivateError>> {
        let Some(state) = self.state.get(partition) else {
            let partitions = self.context.options.shape.partitions;
            return Some(Err(ActivateError::Unknown { partition, partitions }));
        };
        if let Some(what) = state.corrupt() {
            return Some(Err(ActivateError::Corrupt { partition, what: what.to_owned() }));
        }
        if state.replica().serving_term() == Some(term) {
            return Some(Ok(()));
        }
        let promised = state.replica().promised();
        if term <= promised {
            return Some(Err(ActivateError::TermPromised { partition, promised, requested: term }));
        }
        self.state.of_mut(partition).add_activation(term, waiter);
        self.update_entry(partition, &MapEntry::solo(term, self.context.member));
        None
    }

    /// Logs a record, or returns the answer; `None` = logged, answered when it is applied.
    pub(crate) fn propose(
        &mut self,
        partition: PartitionId,
        mut record: Record,
        waiter: Option<Waiter>,
    ) -> Option<Answer> {
        record.request = record.request.filter(|_| !injected!(NoDedupe));
        if let Command::Epoch { updates, .. } = &record.command
            && injected!(NoEpochTable)
        {
            record.command = Command::Reinforce(updates.clone());
        }
        match self.admit(partition, &record, waiter) {
            Ok(Some(term)) => self.log(partition, term, record, waiter).err().map(Err),
            Ok(None) => None,
            Err(answer) => Some(*answer),
        }
    }

    /// `Ok` with the term: to be logged; `Ok(None)`: waits for the same request in flight; `Err`: the answer.
    fn admit(
        &mut self,
        partition: PartitionId,
        record: &Record,
        waiter: Option<Waiter>,
    ) -> Result<Option<Term>, Box<Answer>> {
        let Some(state) = self.state.get(partition) else {
            return Err(Box::new(Err(WriteError::NotPrimary { partition, term: None })));
        };
        if let Some(what) = state.corrupt() {
            return Err(Box::new(Err(WriteError::Corrupt { partition, what: what.to_owned() })));
        }
        let replica = state.replica();
        // A client with a session can safely retry at the next primary; without one the outcome would be unknown.
        let must_wait = record.request.is_none() && replica.transfer_target().is_some();
        let Some(term) = replica.primary_term().filter(|_| replica.takes_requests() && !must_wait) else {
            let promised = replica.promised();
            let term = (promised > Term(0)).then_some(promised);
            return Err(Box::new(Err(WriteError::NotPrimary { partition, term })));
        };
        if !replica.admits_writes() {
            return Err(Box::new(Err(WriteError::NotEnoughReplicas { partition, in_sync: replica.in_sync_count() })));
        }
        let (is_idle, replicas, applied) = (state.is_idle(), replica.in_sync_count(), state.applied().0);
        self.check(partition, record).map_err(|refusal| Box::new(Err(WriteError::Invalid { partition, refusal })))?;
        if let Some(request) = record.request
            && let Some(lsn) = self.sequencer.request_in_flight(partition, request)
        {
            self.state.of_mut(partition).join(lsn, waiter);
            return Ok(None);
        }
        if let Some(reply) = self.foresee(partition, record, is_idle) {
            let durable = self.sequencer.is_durable();
            let committed = CommittedWrite { partition, term, lsn: applied, replicas, durable, reply };
            return Err(Box::new(Ok(committed)));
        }
        match self.over_capacity(partition, record) {
            Some(error) => Err(Box::new(Err(error))),
            None => Ok(Some(term)),
        }
    }

    /// Returns the reply of a record that needs no execution, if it is final: a reply stored by a session always, any other only
    /// while nothing in flight could change it.
    fn foresee(&self, partition: PartitionId, record: &Record, is_idle: bool) -> Option<Reply> {
        let ledger = self.state.partitions().ledger(partition)?;
        match record.request.map(|request| ledger.sessions.admit(request)) {
            Some(Admission::Stored(reply)) => Some(reply),
            // Logged even if the epoch table has the result, so that the session stores it too.
            Some(Admission::Execute) => None,
            // Another worker may be primary by now: without leases it is logged and decided at apply.
            Some(Admission::Refuse(_)) | None => {
                is_idle.then(|| ledger.lookup_reply(record)).flatten().filter(|_| self.is_readable(partition))
            }
        }
    }

    fn check(&self, partition: PartitionId, record: &Record) -> Result<(), Refusal> {
        record.check()?;
        let shape = self.context.options.shape;
        record.command.check_features(shape.features)?;
        let closed = match record.command {
            Command::CloseRequest(request) => Some(request),
            _ => None,
        };
        let is_ahead = |request: Request| !self.context.session_clock.accepts(request.session.opened_ms);
        if record.request.is_some_and(is_ahead) || closed.is_some_and(is_ahead) {
            return Err(Refusal::Malformed { what: "session: opened at most one hour ahead of the cluster's clocks" });
        }
        let partitions = shape.partitions;
        if ids(&record.command).iter().any(|id| partition_of(*id, partitions) != partition) {
            return Err(Refusal::Malformed { what: "ids: only those that hash to this partition" });
        }
        if let Command::Buffer(BufferCommand::Append { from, .. }) = &record.command
            && from % u64::from(partitions) != u64::from(partition.0)
        {
            return Err(Refusal::Malformed { what: "position: only those of this partition" });
        }
        Ok(())
    }

    /// Returns the capacity error of a record that does not fit a partition with policy `Refuse`.
    fn over_capacity(&self, partition: PartitionId, record: &Record) -> Option<WriteError> {
        let max_created = record.command.may_create() as u64;
        let settings = self.state.partitions().ledger(partition)?.settings;
        let (count, state) = (self.state.partitions().count(partition), self.state.of(partition));
        if state.has_room(&settings, count, max_created) {
            return None;
        }
        // Near the limit new ids are counted exactly.
        let mut new: HashSet<MemoryId> = HashSet::new();
        let mut appended = 0;
        for command in state.commands_in_flight() {
            self.add_new(command, &mut new);
            appended += appended_items(command);
        }
        let in_flight = new.len() as u64 + appended;
        self.add_new(&record.command, &mut new);
        let wanted = new.len() as u64 + appended + appended_items(&record.command) - in_flight;
        let memories = count + in_flight;
        (wanted > 0 && memories + wanted > settings.limit).then_some(WriteError::Capacity {
            partition,
            limit: settings.limit,
            memories,
            wanted,
        })
    }

    fn add_new(&self, command: &Command, new: &mut HashSet<MemoryId>) {
        if command.may_create() > 0 {
            new.extend(ids(command).iter().copied().filter(|id| !self.state.partitions().contains_memory(*id)));
        }
    }

    fn log(
        &mut self,
        partition: PartitionId,
        term: Term,
        record: Record,
        waiter: Option<Waiter>,
    ) -> Result<(), WriteError> {
        let lsn = Lsn(self.state.of(partition).last().0 + 1);
        let replication = &mut self.replication;
        self.sequencer.append_record((partition, term, lsn), &record, |bytes| {
            replication.retain(partition, lsn, term, bytes);
        })?;
        // A single replica acknowledges from its disk, in every mode.
        let is_single = self.state.of(partition).replica().in_sync_count() == 1 && self.context.is_replicated();
        // The replica waits for the disk too; an injected bug breaks the rule in both places.
        let is_single = is_single && !injected!(SoloAckWithoutFsync) && !injected!(SoloFsyncOnlyWithoutLearner);
        self.sequencer.push(Mark::Record(partition, lsn, term), is_single);
        self.add_pending(partition, Pending::new(lsn, term, record, waiter.into_iter().collect()));
        self.step(partition, Event::Appended(lsn));
        Ok(())
    }

    /// Proposes records without callers. Rejected ones are proposed again when they are next due.
    pub(super) fn propose_all(&mut self, records: impl IntoIterator<Item = (PartitionId, Record)>) {
        for (partition, record) in records {
            self.propose(partition, record, None);
        }
    }

    /// Adds a logged record to those in flight.
    pub(super) fn add_pending(&mut self, partition: PartitionId, pending: Pending) {
        if self.state.will_execute(partition, &pending.record)
            && let Some(request) = pending.record.request
        {
            self.sequencer.index_request(partition, request, pending.lsn);
        }
        self.state.of_mut(partition).push(pending);
    }
}

/// Items that a command appends to a buffer.
fn appended_items(command: &Command) -> u64 {
    if let Command::Buffer(command) = command { command.appended() as u64 } else { 0 }
}

/// Ids named by a command.
fn ids(command: &Command) -> &[MemoryId] {
    match command {
        Command::Upsert(upsert) => &upsert.ids,
        Command::Remove { ids } => ids,
        Command::Buffer(command) => command.ids(),
        Command::Reinforce(updates) | Command::Epoch { updates, .. } | Command::EpochPart { updates, .. } => {
            match updates {
                Updates::ById { ids, .. } => ids,
                Updates::ByGroup(_) => &[],
            }
        }
        _ => &[],
    }
}
