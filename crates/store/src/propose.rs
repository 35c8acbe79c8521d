//! What is decided before the log: who serves, what is malformed, what was there before, what does not fit.

use crate::answers::{ActivateError, Committed, WriteError};
use crate::gather::Waiter;
use crate::stats;
use crate::store::{Mark, Store};
use crate::wal::{Body, Entry};
use engram_cluster::Entry as EntryOfMap;
use engram_cluster::replica::{Defect, Event, is_planted};
use engram_memory::codec::encode_record;
use engram_memory::session::Admission;
use engram_memory::{
    CapacityPolicy, Command, Lsn, MAX_RECORD_BYTES, MemoryId, PartitionId, Record, Refusal, Reply, Term, Updates,
    partition_of,
};
use std::collections::HashSet;

/// How far ahead of this clock a session may have been opened: what clocks of workers are assumed to agree within.
const CLOCK_SKEW_MS: u64 = 60 * 60 * 1_000;

/// A record that is not logged: answered from the state, or refused.
type Answer = Result<Committed, WriteError>;

impl Store {
    /// Proposes records, each of one partition; `done` is called once with all answers, in order, from within this call, a
    /// later turn or a later call. Records of one partition are applied in the order given.
    pub fn write(
        &mut self,
        records: Vec<(PartitionId, Record)>,
        done: impl FnOnce(Vec<Result<Committed, WriteError>>) + Send + 'static,
    ) {
        let waiter = self.begin_write(records.len(), Box::new(done));
        for (index, (partition, record)) in records.into_iter().enumerate() {
            if let Some(answer) = self.propose(partition, record, Some(waiter(index))) {
                let counter = if answer.is_ok() { &self.shared.answered_records } else { &self.shared.refused_records };
                stats::add(counter, 1);
                self.writes.answer(waiter(index), answer);
            }
        }
    }

    /// Serves partitions from now on, each at its term, as the only copy: for a store without peers. The term has to be above
    /// every one promised on this disk, unless this very process serves it. `done` is called once the promises are durable. A
    /// partition that is not here begins empty; one whose settings are not those of [`crate::Options::settings`] is configured.
    pub fn activate(
        &mut self,
        partitions: Vec<(PartitionId, Term)>,
        done: impl FnOnce(Vec<Result<(), ActivateError>>) + Send + 'static,
    ) {
        let waiter = self.activations.begin(partitions.len(), Box::new(done));
        for (index, (partition, term)) in partitions.into_iter().enumerate() {
            if let Some(answer) = self.activate_one(partition, term, waiter(index)) {
                self.activations.answer(waiter(index), answer);
            }
        }
    }

    fn activate_one(
        &mut self,
        partition: PartitionId,
        term: Term,
        waiter: Waiter,
    ) -> Option<Result<(), ActivateError>> {
        let (partitions, member) = (self.options.shape.partitions, self.member());
        let Some(place) = self.places.get_mut(partition.0 as usize) else {
            return Some(Err(ActivateError::Unknown { partition, partitions }));
        };
        if let Some(what) = &place.corrupt {
            return Some(Err(ActivateError::Corrupt { partition, what: what.clone() }));
        }
        if place.replica.serves() == Some(term) {
            return Some(Ok(()));
        }
        let promised = place.replica.promised();
        if term <= promised {
            return Some(Err(ActivateError::Promised { partition, promised, asked: term }));
        }
        place.activations.push((term, waiter));
        self.learn_entry(partition, &EntryOfMap::solo(term, member));
        None
    }

    /// Logs a record, or says why not; `None` = logged, the answer comes when it is applied.
    pub(crate) fn propose(
        &mut self,
        partition: PartitionId,
        mut record: Record,
        waiter: Option<Waiter>,
    ) -> Option<Answer> {
        record.request = record.request.filter(|_| !is_planted(Defect::NoDedupe));
        if let Command::Epoch { updates, .. } = &record.command
            && is_planted(Defect::NoEpochTable)
        {
            record.command = Command::Reinforce(updates.clone());
        }
        match self.admit(partition, &record, waiter) {
            Ok(Some(term)) => self.log(partition, term, record, waiter).err().map(Err),
            Ok(None) => None,
            Err(answer) => Some(*answer),
        }
    }

    /// `Ok` with the term: to be logged; `Ok(None)`: waits for the same request, which is under way; `Err`: the answer.
    fn admit(
        &mut self,
        partition: PartitionId,
        record: &Record,
        waiter: Option<Waiter>,
    ) -> Result<Option<Term>, Box<Answer>> {
        let Some(place) = self.places.get(partition.0 as usize) else {
            return Err(Box::new(Err(WriteError::NotPrimary { partition, term: None })));
        };
        if let Some(what) = &place.corrupt {
            return Err(Box::new(Err(WriteError::Corrupt { partition, what: what.clone() })));
        }
        // Under a session it is asked again of the successor, where it comes too late here. Nobody could tell what became of another one.
        let waits = record.request.is_none() && place.replica.draining().is_some();
        let Some(term) = place.replica.leads().filter(|_| place.replica.takes_requests() && !waits) else {
            let promised = place.replica.promised();
            let term = (promised > Term(0)).then_some(promised);
            return Err(Box::new(Err(WriteError::NotPrimary { partition, term })));
        };
        if !place.replica.admits() {
            return Err(Box::new(Err(WriteError::TooFewCopies { partition, in_sync: place.replica.replicas() })));
        }
        let (idle, applied) = (place.pending.is_empty(), place.applied);
        self.check(partition, record).map_err(|refusal| Box::new(Err(WriteError::Invalid { partition, refusal })))?;
        if let Some(request) = record.request
            && let Some(lsn) = self.requests.get(&(partition, request))
        {
            let place = &mut self.places[partition.0 as usize];
            let index = (lsn.0 - applied.0 - 1) as usize;
            place.pending[index].waiters.extend(waiter);
            return Ok(None);
        }
        if let Some(reply) = self.foresee(partition, record, idle) {
            let durable = self.wal.durable(self.wal.written());
            let replicas = self.places[partition.0 as usize].replica.replicas();
            let committed = Committed { partition, term, lsn: applied, replicas, durable, reply };
            return Err(Box::new(Ok(committed)));
        }
        match self.over_capacity(partition, record) {
            Some(error) => Err(Box::new(Err(error))),
            None => Ok(Some(term)),
        }
    }

    /// What the record would be answered without being executed, where that is final: what a session has stored always, everything
    /// else only when nothing is under way that could change it.
    fn foresee(&self, partition: PartitionId, record: &Record, idle: bool) -> Option<Reply> {
        let ledger = self.partitions.ledger(partition)?;
        match record.request.map(|request| ledger.sessions.admit(request)) {
            Some(Admission::Stored(reply)) => Some(reply),
            // The epoch table may know it, but its session has to know too what became of it: it is logged.
            Some(Admission::Execute) => None,
            // Another worker may serve by now and know better: without leases it is logged, and judged in its place.
            Some(Admission::Refuse(_)) | None => {
                idle.then(|| ledger.foresee(record)).flatten().filter(|_| self.is_readable(partition))
            }
        }
    }

    fn check(&self, partition: PartitionId, record: &Record) -> Result<(), Refusal> {
        record.check()?;
        record.command.check_features(self.options.shape.features)?;
        let ahead = |request: engram_memory::Request| {
            request.session.opened_ms > self.clock.now_ms().saturating_add(CLOCK_SKEW_MS)
        };
        if record.request.is_some_and(ahead) {
            return Err(Refusal::Malformed { what: "session: opened at most one hour ahead of the worker's clock" });
        }
        let partitions = self.options.shape.partitions;
        if ids(&record.command).iter().any(|id| partition_of(*id, partitions) != partition) {
            return Err(Refusal::Malformed { what: "ids: only those that hash to the partition named" });
        }
        Ok(())
    }

    /// Whether a partition that refuses what is over its limit refuses this.
    fn over_capacity(&self, partition: PartitionId, record: &Record) -> Option<WriteError> {
        let most = record.command.may_create() as u64;
        let settings = self.partitions.ledger(partition)?.settings;
        let (count, place) = (self.partitions.count(partition), &self.places[partition.0 as usize]);
        if settings.policy != CapacityPolicy::Refuse || most == 0 || count + place.creates + most <= settings.limit {
            return None;
        }
        // Near the limit it is counted which ids are really new.
        let mut new: HashSet<MemoryId> = HashSet::new();
        for pending in &place.pending {
            self.add_new(&pending.record.command, &mut new);
        }
        let under_way = new.len() as u64;
        self.add_new(&record.command, &mut new);
        let wanted = new.len() as u64 - under_way;
        let memories = count + under_way;
        (wanted > 0 && memories + wanted > settings.limit).then_some(WriteError::Capacity {
            partition,
            limit: settings.limit,
            memories,
            wanted,
        })
    }

    fn add_new(&self, command: &Command, new: &mut HashSet<MemoryId>) {
        if command.may_create() > 0 {
            new.extend(ids(command).iter().copied().filter(|id| !self.partitions.contains_memory(*id)));
        }
    }

    fn log(
        &mut self,
        partition: PartitionId,
        term: Term,
        record: Record,
        waiter: Option<Waiter>,
    ) -> Result<(), WriteError> {
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        encode_record(&record, &mut bytes);
        let lsn = Lsn(self.places[partition.0 as usize].last().0 + 1);
        let logged = if bytes.len() > MAX_RECORD_BYTES {
            let refusal = Refusal::Malformed { what: "record: at most 8 MiB encoded" };
            Err(WriteError::Invalid { partition, refusal })
        } else {
            self.append(&Entry { partition, term, lsn, body: Body::Command(&bytes) })
                .map_err(|error| WriteError::of_failure(&error))
        };
        stats::add(&self.shared.logged_bytes, bytes.len() as u64);
        if logged.is_ok() {
            self.replication.shipping.keep(partition, lsn, term, &bytes);
        }
        self.scratch = bytes;
        logged?;
        // Who is alone acknowledges from its disk, in every mode.
        let alone = self.places[partition.0 as usize].replica.replicas() == 1 && self.options.replication.copies > 1;
        // The replica waits for the disk too; a defect that breaks the rule breaks it in both places.
        let alone =
            alone && !is_planted(Defect::SoloAckWithoutFsync) && !is_planted(Defect::SoloFsyncOnlyWithoutLearner);
        self.push(Mark::Record(partition, lsn, term), alone);
        self.add_pending(partition, lsn, term, record, waiter.into_iter().collect());
        self.step(partition, Event::Appended(lsn));
        Ok(())
    }
}

/// The ids that a command names.
fn ids(command: &Command) -> &[MemoryId] {
    match command {
        Command::Upsert(upsert) => &upsert.ids,
        Command::Remove { ids } => ids,
        Command::Reinforce(updates) | Command::Epoch { updates, .. } | Command::EpochPart { updates, .. } => {
            match updates {
                Updates::ById { ids, .. } => ids,
                Updates::ByGroup(_) => &[],
            }
        }
        _ => &[],
    }
}
