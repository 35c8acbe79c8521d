//! What is decided before the log: who serves, what is malformed, what was there before, what does not fit.

use crate::answers::{ActivateError, Committed, WriteError};
use crate::gather::Waiter;
use crate::stats;
use crate::store::{Item, Kind, State, Store};
use crate::wal::{Body, Entry};
use engram_memory::codec::encode_record;
use engram_memory::session::Admission;
use engram_memory::{
    CapacityPolicy, Command, Lsn, MAX_RECORD_BYTES, MemoryId, PartitionId, Record, Refusal, Reply, Settings, Term,
    Updates, partition_of,
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

    /// Serves partitions from now on, each at its term, which no process may have served: it has to be above every term
    /// promised on this disk, unless this very process serves it. `done` is called once the promises are durable. A partition that
    /// is not here begins empty; one whose settings are not those of [`crate::Options::settings`] is configured.
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

    /// Serves a partition no longer; its data stays. What was proposed before is answered still.
    pub fn deactivate(&mut self, partition: PartitionId) {
        if let Some(place) = self.places.get_mut(partition.0 as usize)
            && let State::Serving(_) = place.state
        {
            place.state = State::Idle;
            self.shared.set_term(partition, None);
        }
    }

    fn activate_one(
        &mut self,
        partition: PartitionId,
        term: Term,
        waiter: Waiter,
    ) -> Option<Result<(), ActivateError>> {
        let partitions = self.options.shape.partitions;
        let Some(place) = self.places.get(partition.0 as usize) else {
            return Some(Err(ActivateError::Unknown { partition, partitions }));
        };
        match &place.state {
            State::Corrupt(what) => return Some(Err(ActivateError::Corrupt { partition, what: what.clone() })),
            State::Serving(serving) if *serving == term => return Some(Ok(())),
            _ if term <= place.promised => {
                return Some(Err(ActivateError::Promised { partition, promised: place.promised, asked: term }));
            }
            _ => {}
        }
        let promise = Entry { partition, term, lsn: Lsn(0), body: Body::Promise { seen: true } };
        if let Err(error) = self.append(&promise) {
            return Some(Err(ActivateError::Failed { reason: error.to_string() }));
        }
        let before = self.places[partition.0 as usize].promised;
        self.push(Item { partition, term, kind: Kind::Promise { waiter, before } });
        let place = &mut self.places[partition.0 as usize];
        place.promised = term;
        place.state = State::Serving(term);
        self.shared.set_term(partition, Some(term));
        if !self.partitions.contains(partition) {
            self.partitions.open(partition, Settings::default());
        }
        let current = self.partitions.ledger(partition).map_or_else(Settings::default, |ledger| ledger.settings);
        let wanted = Settings { count_updates: current.count_updates, ..self.options.settings };
        self.shared.set_settings(partition, Some(wanted));
        if wanted != current {
            // An answer at once would be a refusal of settings that were checked when the process began.
            let _ = self.propose(partition, Record::bare(Command::Configure(wanted)), None);
        }
        None
    }

    /// Logs a record, or says why not; `None` = logged, the answer comes when it is applied.
    pub(crate) fn propose(&mut self, partition: PartitionId, record: Record, waiter: Option<Waiter>) -> Option<Answer> {
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
        let term = match &place.state {
            State::Serving(term) => *term,
            State::Corrupt(what) => {
                return Err(Box::new(Err(WriteError::Corrupt { partition, what: what.clone() })));
            }
            State::Idle => {
                let term = (place.promised > Term(0)).then_some(place.promised);
                return Err(Box::new(Err(WriteError::NotPrimary { partition, term })));
            }
        };
        let (idle, lsn) = (place.waiting == 0, place.applied);
        self.check(partition, record).map_err(|refusal| Box::new(Err(WriteError::Invalid { partition, refusal })))?;
        if let Some(request) = record.request
            && let Some(number) = self.requests.get(&(partition, request))
        {
            let item = &mut self.tail[(number - self.first) as usize];
            let Kind::Record { waiters, .. } = &mut item.kind else { unreachable!("requests are records") };
            waiters.extend(waiter);
            return Ok(None);
        }
        if let Some(reply) = self.foresee(partition, record, idle) {
            let durable = self.wal.durable(self.wal.written());
            let committed = Committed { partition, term, lsn, replicas: 1, durable, reply };
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
            Some(Admission::Refuse(_)) | None => idle.then(|| ledger.foresee(record)).flatten(),
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
        for item in self.tail.iter().filter(|item| item.partition == partition) {
            if let Kind::Record { record, .. } = &item.kind {
                self.add_new(&record.command, &mut new);
            }
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
        let lsn = Lsn(self.places[partition.0 as usize].last.0 + 1);
        let logged = if bytes.len() > MAX_RECORD_BYTES {
            let refusal = Refusal::Malformed { what: "record: at most 8 MiB encoded" };
            Err(WriteError::Invalid { partition, refusal })
        } else {
            self.append(&Entry { partition, term, lsn, body: Body::Command(&bytes) })
                .map_err(|error| WriteError::Failed { reason: error.to_string() })
        };
        stats::add(&self.shared.logged_bytes, bytes.len() as u64);
        self.scratch = bytes;
        logged?;
        let place = &mut self.places[partition.0 as usize];
        place.last = lsn;
        place.waiting += 1;
        place.creates += record.command.may_create() as u64;
        // A request that its session would refuse now may be let through once what is under way is applied, so each copy of it is
        // judged in its own place.
        let ledger = self.partitions.ledger(partition);
        let request = record
            .request
            .filter(|request| ledger.is_some_and(|ledger| ledger.sessions.admit(*request) == Admission::Execute));
        let waiters = waiter.into_iter().collect();
        let number = self.push(Item { partition, term, kind: Kind::Record { lsn, record, waiters } });
        if let Some(request) = request {
            self.requests.insert((partition, request), number);
        }
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
