//! Clients that write a ledger into the weights, and remember the responses.
//!
//! An id begins at weight 0; the j-th operation on it adds 4^j units, at most [`OPERATIONS`] of them, so that the j-th
//! base-4 digit of its weight is how often operation j was applied. Every operation is a request of a session and is
//! retried with the same number until it gets a response. After its deadline it is closed, or stays unknown.

use crate::checks::linear::{Call, CallKind, MAX_CALLS};
use crate::cluster::node::{Answer, START_MS};
use crate::draw::Draw;
use crate::faults::Fault;
use crate::faults::plan::FaultPlan;
use crate::world::{Event, World};
use engram_cluster::injected;
use engram_memory::session::WINDOW;
use engram_memory::{
    Command, Member, MemoryId, OnMissing, PartitionId, Record, Refusal, Reply, Request, SessionId, Updates, Upsert,
    partition_of,
};
use engram_store::{Durability, WriteError};
use std::collections::{BTreeMap, BTreeSet};

/// Operations on one id: applied three times each they still sum to less than the highest weight.
pub(crate) const OPERATIONS: usize = 15;
/// Shared ids in use by all clients together.
const SHARED: usize = 2;
/// Operations in flight per client.
const MAX_IN_FLIGHT: usize = 5;
/// How long an operation is tried while there are faults, and how long its closing is tried.
const PATIENCE_US: u64 = 4_000_000;
/// Distance from the true time above which a clock that was wrong opened a session: more than a run lasts and clocks differ.
const FAR_SESSION_MS: u64 = 60 * 60 * 1_000;
/// Operations that every client completes in the calm phase.
const IN_CALM: u32 = 6;

/// Response that a client got for an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Response {
    Acked,
    Never,
    Unknown,
}

/// One id: how it was created, and its operations; `None` = in flight.
pub(crate) struct Account {
    pub(crate) id: MemoryId,
    pub(crate) partition: PartitionId,
    pub(crate) created: Option<Response>,
    pub(crate) operations: Vec<Option<Response>>,
    /// Mode async: every record also names this memory of the same partition; both must be equal at the end.
    pub(crate) twin: Option<MemoryId>,
    /// The decisive response of each operation, the creation first: its member and time.
    pub(crate) answered: BTreeMap<Option<usize>, (Member, u64)>,
    /// The client that created it.
    owner: usize,
    /// Its call history, if it is checked for linearizability.
    calls: Vec<Call>,
}

struct Operation {
    client: usize,
    account: usize,
    /// `None` = the creation of the id.
    j: Option<usize>,
    request: Request,
    deadline_us: u64,
    /// It is no longer executed, but closed.
    closes: bool,
    response: Option<Response>,
    in_calm: bool,
    /// Its index among the calls of its account.
    call: Option<usize>,
}

struct Client {
    session: SessionId,
    /// Last number used, by partition.
    seqs: Vec<u64>,
    /// Presumed primary, by partition.
    presumed_primary: Vec<usize>,
    /// Operations without a response.
    open: BTreeSet<usize>,
    begun_in_calm: u32,
    answered_in_calm: u32,
}

/// Number of operations by outcome.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) acked: u64,
    pub(crate) never: u64,
    pub(crate) unknown: u64,
}

/// All clients and their operations.
pub(crate) struct Clients {
    clients: Vec<Client>,
    accounts: Vec<Account>,
    operations: Vec<Operation>,
    /// Reads so far: account, call, client.
    reads: Vec<(usize, usize, usize)>,
    sessions: u64,
    /// Logical time: requests and responses so far, of all clients.
    moments: u64,
    pub(crate) searched: u64,
}

impl Clients {
    pub(crate) fn new(plan: &FaultPlan, draw: &mut Draw) -> Self {
        let mut clients = Self {
            clients: Vec::new(),
            accounts: Vec::new(),
            operations: Vec::new(),
            reads: Vec::new(),
            sessions: 0,
            moments: 0,
            searched: 0,
        };
        for _ in 0..plan.clients {
            let session = clients.next_session(START_MS);
            let presumed_primary = (0..plan.partitions).map(|_| draw.below(plan.nodes as u64) as usize).collect();
            clients.clients.push(Client {
                session,
                seqs: vec![0; plan.partitions as usize],
                presumed_primary,
                open: BTreeSet::new(),
                begun_in_calm: 0,
                answered_in_calm: 0,
            });
        }
        clients
    }

    const fn next_session(&mut self, opened_ms: u64) -> SessionId {
        self.sessions += 1;
        SessionId { opened_ms, random: self.sessions }
    }

    pub(crate) fn accounts(&self) -> impl Iterator<Item = &Account> {
        self.accounts.iter()
    }

    pub(crate) fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        for operation in &self.operations {
            match operation.response {
                Some(Response::Acked) => tally.acked += 1,
                Some(Response::Never) => tally.never += 1,
                _ => tally.unknown += 1,
            }
        }
        tally
    }

    /// Returns what is still pending; `None` = nothing.
    pub(crate) fn pending(&self) -> Option<String> {
        if let Some(open) = self.clients.iter().find_map(|client| client.open.first()) {
            return Some(format!("request {:?} has no answer", self.operations[*open].request));
        }
        let eager = self.clients.iter().position(|client| client.answered_in_calm < IN_CALM);
        eager.map(|client| format!("client {client} has not written enough in the calm phase"))
    }

    /// Whether a request is within the window of unanswered ones.
    fn may_send(&self, client: usize, session: SessionId, partition: PartitionId, seq: u64) -> bool {
        let open = self.clients[client].open.iter().map(|number| &self.operations[*number]).filter(|operation| {
            self.accounts[operation.account].partition == partition && operation.request.session == session
        });
        open.map(|operation| operation.request.seq).min().is_none_or(|oldest| seq < oldest + WINDOW)
    }

    /// Returns the next logical time.
    const fn moment(&mut self) -> u64 {
        self.moments += 1;
        self.moments
    }

    /// Returns the history of each id that was read, without operations that never happened and reads without a
    /// response.
    pub(crate) fn histories(&self) -> Vec<(MemoryId, Vec<Call>)> {
        let never: BTreeSet<(usize, usize)> = (self.operations.iter())
            .filter(|operation| operation.response == Some(Response::Never))
            .filter_map(|operation| Some((operation.account, operation.call?)))
            .collect();
        let of_account = |(index, account): (usize, &Account)| {
            let calls = account.calls.iter().enumerate();
            let counts = |(call, what): &(usize, &Call)| {
                let is_add = matches!(what.what, CallKind::Add(_));
                !never.contains(&(index, *call)) && (is_add || what.answered.is_some())
            };
            let calls: Vec<Call> = calls.filter(counts).map(|(_, call)| *call).collect();
            (account.id, calls)
        };
        let all = self.accounts.iter().enumerate().map(of_account);
        all.filter(|(_, calls)| calls.iter().any(|call| matches!(call.what, CallKind::Read(_)))).collect()
    }

    fn note(&mut self, number: usize, response: Response) {
        let operation = &mut self.operations[number];
        operation.response = Some(response);
        let client = &mut self.clients[operation.client];
        client.open.remove(&number);
        client.answered_in_calm += u32::from(operation.in_calm && response != Response::Never);
        let account = &mut self.accounts[operation.account];
        if let Some(call) = operation.call.filter(|_| response == Response::Acked) {
            self.moments += 1;
            account.calls[call].answered = Some(self.moments);
        }
        match operation.j {
            Some(j) => account.operations[j] = Some(response),
            None => account.created = Some(response),
        }
    }
}

impl World {
    /// Starts an operation of a client, if it has one to start.
    pub(crate) fn client_acts(&mut self, client: usize) {
        let think_us = if self.is_calm { 50_000 } else { self.plan.think_us };
        let wait_us = self.draw.within(1_000, think_us);
        self.at(wait_us, Event::Client(client));
        if self.draw.chance(self.plan.shared_reads) {
            self.begin_read(client);
        }
        let own = &self.clients.clients[client];
        if own.open.len() >= MAX_IN_FLIGHT || (self.is_calm && own.begun_in_calm >= IN_CALM) {
            return;
        }
        let shared = self.plan.shared_reads > 0;
        let own = || self.clients.accounts.iter().enumerate().filter(|(_, account)| shared || account.owner == client);
        let usable: Vec<usize> = own()
            .filter(|(_, account)| account.created == Some(Response::Acked) && account.operations.len() < OPERATIONS)
            .map(|(index, _)| index)
            .collect();
        let begun = own().filter(|(_, account)| !shared || account.operations.len() < OPERATIONS).count();
        let may_create = begun < if shared { SHARED } else { self.plan.accounts } || self.is_calm;
        let creates = may_create && (usable.is_empty() || self.draw.chance(150));
        if !creates && usable.is_empty() {
            return;
        }
        let (account, j) = if creates {
            let id = MemoryId(self.draw.next());
            let partition = partition_of(id, self.plan.partitions);
            let twin = (self.plan.durability == Durability::Async).then(|| self.id_of(partition));
            let accounts = &mut self.clients.accounts;
            let (operations, calls, answered) = (Vec::new(), Vec::new(), BTreeMap::new());
            accounts.push(Account { id, partition, created: None, operations, twin, answered, owner: client, calls });
            (accounts.len() - 1, None)
        } else {
            let account = self.draw.pick(&usable);
            let operations = &mut self.clients.accounts[account].operations;
            operations.push(None);
            (account, Some(operations.len() - 1))
        };
        self.begin_operation(client, account, j);
    }

    /// Draws an id of a partition.
    fn id_of(&mut self, partition: PartitionId) -> MemoryId {
        loop {
            let id = MemoryId(self.draw.next());
            if partition_of(id, self.plan.partitions) == partition {
                return id;
            }
        }
    }

    /// Notes the response of a process to an operation; it may be lost on its way.
    pub(crate) fn note_answer(&mut self, number: u64, member: Member) {
        if let Some(operation) = self.clients.operations.get(number as usize) {
            let answered = &mut self.clients.accounts[operation.account].answered;
            answered.insert(operation.j, (member, self.now_us));
        }
    }

    fn begin_operation(&mut self, client: usize, account: usize, j: Option<usize>) {
        let partition = self.clients.accounts[account].partition;
        let requested = self.clients.moment();
        let call = j.filter(|_| self.plan.shared_reads > 0).map(|j| {
            let calls = &mut self.clients.accounts[account].calls;
            calls.push(Call { what: CallKind::Add(1 << (2 * j)), requested, answered: None });
            calls.len() - 1
        });
        let owner = &mut self.clients.clients[client];
        owner.seqs[partition.0 as usize] += 1;
        let request = Request { session: owner.session, seq: owner.seqs[partition.0 as usize] };
        let deadline_us = if self.is_calm { u64::MAX } else { self.now_us + PATIENCE_US };
        let in_calm = self.is_calm;
        let operation =
            Operation { client, account, j, request, deadline_us, closes: false, response: None, in_calm, call };
        self.clients.operations.push(operation);
        let number = self.clients.operations.len() as u64 - 1;
        let owner = &mut self.clients.clients[client];
        owner.open.insert(number as usize);
        owner.begun_in_calm += u32::from(in_calm);
        self.trace.note(self.now_us, &[14, number, client as u64, request.seq], || {
            format!("client {client} begins {number}: {request:?} of p{partition}, account {account}, {j:?}")
        });
        self.attempt(number);
    }

    /// Starts a read of one of the ids.
    fn begin_read(&mut self, client: usize) {
        let usable_account = |(_, account): &(usize, &Account)| {
            account.created == Some(Response::Acked) && account.calls.len() < MAX_CALLS - OPERATIONS
        };
        let newest = self.clients.accounts.iter().enumerate().filter(usable_account).map(|(index, _)| index);
        let among: Vec<usize> = newest.rev().take(SHARED + 1).collect();
        if among.is_empty() {
            return;
        }
        let account = self.draw.pick(&among);
        let requested = self.clients.moment();
        let partition = self.clients.accounts[account].partition;
        let calls = &mut self.clients.accounts[account].calls;
        calls.push(Call { what: CallKind::Read(None), requested, answered: None });
        let call = calls.len() - 1;
        self.clients.reads.push((account, call, client));
        let read = self.clients.reads.len() - 1;
        // The presumed primary may not know that it is no longer primary.
        let mut node = self.clients.clients[client].presumed_primary[partition.0 as usize];
        if self.draw.chance(300) {
            node = self.draw.below(self.nodes.len() as u64) as usize;
        }
        let wait_us = self.delay_us();
        self.at(wait_us, Event::Read { node, read });
    }

    /// Reads a weight at a node that holds the required leases.
    pub(crate) fn read(&mut self, node: usize, read: usize) {
        let (account, ..) = self.clients.reads[read];
        let (id, partition) = (self.clients.accounts[account].id, self.clients.accounts[account].partition);
        let mut readable = None;
        self.with(node, |store| {
            if store.is_readable(partition) || injected!(ReadUnasked) {
                let weight = store.partitions().get(id)?.map(|memory| memory.weight.units());
                // The lease may have expired in between.
                readable = (store.is_readable(partition) || injected!(ReadUnasked)).then_some(weight);
            }
            Ok(())
        });
        if let Some(weight) = readable {
            let wait_us = self.delay_us();
            self.at(wait_us, Event::ReadAnswer { read, weight });
        }
    }

    /// Delivers a weight to a client.
    pub(crate) fn read_answered(&mut self, read: usize, weight: Option<u32>) {
        let (account, call, client) = self.clients.reads[read];
        self.trace.note(self.now_us, &[24, read as u64, u64::from(weight.unwrap_or(u32::MAX))], || {
            format!("client {client} reads {weight:?} of account {account}")
        });
        let answered = self.clients.moment();
        let call = &mut self.clients.accounts[account].calls[call];
        (call.what, call.answered) = (CallKind::Read(weight), Some(answered));
    }

    /// Whether the session of an operation was opened by a clock that was wrong by days.
    fn has_far_session(&self, number: u64) -> bool {
        let opened_ms = self.clients.operations[number as usize].request.session.opened_ms;
        opened_ms.abs_diff(START_MS + self.now_us / 1_000) > FAR_SESSION_MS
    }

    /// Continues under a new session, unless that happened since the operation began.
    fn replace_session(&mut self, number: u64) {
        let Operation { client, request, .. } = self.clients.operations[number as usize];
        if self.clients.clients[client].session == request.session {
            let session = self.open_session();
            let owner = &mut self.clients.clients[client];
            owner.session = session;
            owner.seqs.fill(0);
        }
    }

    /// Opens a session at the first primary that runs.
    fn open_session(&mut self) -> SessionId {
        let primaries = self.map_store.entries.iter().map(|entry| entry.primary.0 as usize);
        let running: Vec<usize> = primaries.filter(|node| self.nodes[*node].process.is_some()).take(1).collect();
        let mut opened_ms = START_MS + self.now_us / 1_000;
        for node in running {
            self.nodes[node].set_time(self.now_us);
            if let Some(process) = &self.nodes[node].process {
                opened_ms = process.store.session_clock().opening_ms();
            }
        }
        self.clients.next_session(opened_ms)
    }

    /// Sends a request, with retries until there is a response or the deadline passes.
    pub(crate) fn attempt(&mut self, number: u64) {
        let operation = &self.clients.operations[number as usize];
        if operation.response.is_some() {
            return;
        }
        let (client, request) = (operation.client, operation.request);
        let partition = self.clients.accounts[operation.account].partition;
        if self.now_us > operation.deadline_us {
            // After an operation with unknown outcome a client continues under a new session.
            self.replace_session(number);
            let closed = operation_mut(&mut self.clients, number).closes;
            if closed || self.draw.chance(500) {
                self.trace.note(self.now_us, &[15, number], || format!("client {client} gives {number} up"));
                self.clients.note(number as usize, Response::Unknown);
                return;
            }
            let operation = operation_mut(&mut self.clients, number);
            operation.closes = true;
            operation.deadline_us = self.now_us + PATIENCE_US;
        }
        let wait_us = self.draw.within(50_000, 500_000);
        self.at(wait_us, Event::Attempt(number));
        if !self.clients.may_send(client, request.session, partition, request.seq) {
            return;
        }
        let mut node = self.clients.clients[client].presumed_primary[partition.0 as usize];
        if !self.is_calm && self.draw.chance(100) {
            node = self.draw.below(self.nodes.len() as u64) as usize;
        }
        if self.draw.chance(self.plan.request_lost) {
            self.count(Fault::RequestLost);
            return;
        }
        let wait_us = self.delay_us();
        self.at(wait_us, Event::Request { node, attempt: number });
        if self.draw.chance(self.plan.request_again) {
            self.count(Fault::RequestAgain);
            let node = if self.draw.chance(500) { node } else { self.draw.below(self.nodes.len() as u64) as usize };
            let wait_us = wait_us + self.draw.below(1_500_000);
            self.at(wait_us, Event::Request { node, attempt: number });
        }
    }

    /// A request arrives at a node.
    pub(crate) fn request(&mut self, node: usize, number: u64) {
        let operation = &self.clients.operations[number as usize];
        let account = &self.clients.accounts[operation.account];
        let partition = account.partition;
        let record = record(account, operation);
        self.trace.note(self.now_us, &[16, node as u64, number], || format!("{node} receives {number}: {record:?}"));
        if self.map_store.entry(partition).primary.0 as usize != node {
            self.count(Fault::RequestAstray);
        }
        if !self.submit_record(node, partition, record, number) {
            self.look_up_primary(number);
        }
    }

    /// Submits a record to the process of a node, which answers under `number`; false if none runs.
    pub(crate) fn submit_record(&mut self, node: usize, partition: PartitionId, record: Record, number: u64) -> bool {
        let Some(process) = &self.nodes[node].process else { return false };
        let out = process.out.clone();
        self.with(node, |store| {
            store.write(vec![(partition, record)], move |answers| {
                answers.into_iter().for_each(|answer| out.answer((number, answer)));
            });
            Ok(())
        });
        true
    }

    /// Sends an answer from a node.
    pub(crate) fn send_answer(&mut self, answer: Answer) {
        if self.draw.chance(self.plan.request_lost) {
            self.count(Fault::RequestLost);
            return;
        }
        let wait_us = self.delay_us();
        self.at(wait_us, Event::Answer(answer));
    }

    /// Delivers the result of a request to a client.
    pub(crate) fn answered(&mut self, (number, answer): Answer) {
        let operation = &self.clients.operations[number as usize];
        let (previous, closes) = (operation.response, operation.closes);
        self.trace.note(self.now_us, &[17, number, u64::from(answer.is_ok())], || format!("{number} gets {answer:?}"));
        let may_lose = self.plan.durability == Durability::Async;
        let now = match answer {
            Ok(committed) => match committed.reply {
                Reply::Applied(outcome) => {
                    let ids = if may_lose { 2 } else { 1 };
                    let is_gone = may_lose && outcome.applied == 0 && outcome.rejected == ids;
                    if !is_gone && (outcome.applied != ids || outcome.rejected != 0) {
                        self.fail(format!("operation {number} of an id that is there: {outcome:?}"));
                    }
                    // The creation of the id may be lost, like everything acknowledged just before its process ended.
                    if is_gone { Response::Unknown } else { Response::Acked }
                }
                Reply::Refused(Refusal::AlreadyClosed) if closes => Response::Never,
                Reply::Refused(Refusal::OutOfWindow { .. }) if closes => Response::Unknown,
                // It was opened by a worker whose clock was wrong, before that knew enough other clocks.
                Reply::Refused(Refusal::SessionExpired) if self.has_far_session(number) => {
                    self.replace_session(number);
                    Response::Unknown
                }
                Reply::Refused(refusal) => {
                    if previous.is_none() {
                        self.fail(format!("operation {number} was rejected: {refusal:?}"));
                    }
                    return;
                }
            },
            Err(WriteError::Invalid { refusal, .. }) => {
                let is_clock = matches!(&refusal, Refusal::Malformed { what } if what.starts_with("session"));
                if !is_clock {
                    self.fail(format!("operation {number} was rejected: {refusal}"));
                    return;
                }
                // Otherwise the clock of this node is wrong: another one, or this one later, accepts the session.
                if !self.has_far_session(number) {
                    return;
                }
                self.replace_session(number);
                Response::Unknown
            }
            // In mode async a replica is discarded if its primary lost its last records.
            Err(WriteError::Corrupt { what, .. })
                if self.counters.get(Fault::BitFlip) == 0 && self.plan.durability != Durability::Async =>
            {
                self.fail(format!("operation {number}: unexpected damage: {what}"));
                return;
            }
            Err(_) => {
                self.look_up_primary(number);
                return;
            }
        };
        match previous {
            None => self.clients.note(number as usize, now),
            // Contradicting final responses.
            Some(before) if before != now && !may_lose && before != Response::Unknown && now != Response::Unknown => {
                self.fail(format!("operation {number} got response {before:?}, then {now:?}"));
            }
            Some(_) => {}
        }
    }

    /// Looks up the primary in the map.
    fn look_up_primary(&mut self, number: u64) {
        let operation = &self.clients.operations[number as usize];
        let client = operation.client;
        let partition = self.clients.accounts[operation.account].partition;
        let primary = self.map_store.entry(partition).primary.0 as usize;
        self.clients.clients[client].presumed_primary[partition.0 as usize] = primary;
    }
}

fn operation_mut(clients: &mut Clients, number: u64) -> &mut Operation {
    &mut clients.operations[number as usize]
}

fn record(account: &Account, operation: &Operation) -> Record {
    if operation.closes {
        return Record::bare(Command::CloseRequest(operation.request));
    }
    let ids: Vec<MemoryId> = [account.id].into_iter().chain(account.twin).collect();
    let command = match operation.j {
        None => Command::Upsert(Upsert { weights: vec![0; ids.len()], ids, ..Upsert::default() }),
        Some(j) => Command::Reinforce(Updates::ById {
            deltas: vec![1 << (2 * j); ids.len()],
            ids,
            on_missing: OnMissing::Report,
            keys: None,
        }),
    };
    Record { request: Some(operation.request), command }
}
