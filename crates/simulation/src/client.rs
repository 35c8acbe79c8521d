//! Clients that write a ledger into the weights, and remember what they were told.
//!
//! An id begins at weight 0; the j-th operation on it adds 4^j units, at most [`OPERATIONS`] of them, so that the j-th base-4
//! digit of its weight is how often operation j was applied. Every operation is a request of a session and is sent again
//! under the same number until it is answered. One that was not in time is closed, or stays unknown for good.

use crate::draw::Draw;
use crate::faults::Fault;
use crate::linear::{Call, MOST_CALLS, What};
use crate::node::{Answer, BEGINS_MS};
use crate::weather::Weather;
use crate::world::{Event, World};
use engram_cluster::replica::{Defect, is_planted};
use engram_memory::session::WINDOW;
use engram_memory::{
    Command, Member, MemoryId, OnMissing, PartitionId, Record, Refusal, Reply, Request, SessionId, Updates, Upsert,
    partition_of,
};
use engram_store::{Durability, WriteError};
use std::collections::{BTreeMap, BTreeSet};

/// Operations on one id: applied three times each they still sum to less than the highest weight.
pub(crate) const OPERATIONS: usize = 15;
/// Ids in use of all clients together, where they share them.
const SHARED: usize = 2;
/// Operations under way of one client.
const OPEN: usize = 5;
/// How long an operation is tried while there are faults, and how long it is tried to close it.
const PATIENCE_US: u64 = 4_000_000;
/// Operations that every client has answered in the calm.
const IN_CALM: u32 = 6;

/// What a client was told of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    Acked,
    Never,
    Unknown,
}

/// One id: how it was created, and its operations; `None` = under way.
pub(crate) struct Account {
    pub(crate) id: MemoryId,
    pub(crate) partition: PartitionId,
    pub(crate) created: Option<Told>,
    pub(crate) operations: Vec<Option<Told>>,
    /// Mode async: every record names this memory too, of the same partition, and both show the same in the end.
    pub(crate) twin: Option<MemoryId>,
    /// The answer that counts of each operation, the creation first: who gave it, and when.
    pub(crate) answered: BTreeMap<Option<usize>, (Member, u64)>,
    /// The client that made it.
    owner: usize,
    /// What was seen of it, if that is to be searched.
    calls: Vec<Call>,
}

struct Operation {
    client: usize,
    account: usize,
    /// `None` = the creation of the id.
    j: Option<usize>,
    request: Request,
    deadline_us: u64,
    /// It is no longer tried to execute it, but to know that it never will be.
    closes: bool,
    told: Option<Told>,
    in_calm: bool,
    /// Its place among the calls of its account.
    call: Option<usize>,
}

struct Client {
    session: SessionId,
    /// Last number used, by partition.
    seqs: Vec<u64>,
    /// Who is thought to serve, by partition.
    believed: Vec<usize>,
    /// Operations without an answer.
    open: BTreeSet<usize>,
    begun_in_calm: u32,
    answered_in_calm: u32,
}

/// How many operations have which end.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) acked: u64,
    pub(crate) never: u64,
    pub(crate) unknown: u64,
}

/// All clients, and what they asked for.
pub(crate) struct Clients {
    clients: Vec<Client>,
    accounts: Vec<Account>,
    operations: Vec<Operation>,
    /// Reads under way and done: the account, its call, the client.
    reads: Vec<(usize, usize, usize)>,
    sessions: u64,
    /// Requests and answers so far, of all clients.
    moments: u64,
    pub(crate) searched: u64,
}

impl Clients {
    pub(crate) fn new(weather: &Weather, draw: &mut Draw) -> Self {
        let mut clients = Self {
            clients: Vec::new(),
            accounts: Vec::new(),
            operations: Vec::new(),
            reads: Vec::new(),
            sessions: 0,
            moments: 0,
            searched: 0,
        };
        for _ in 0..weather.clients {
            let session = clients.next_session(0);
            let believed = (0..weather.partitions).map(|_| draw.below(weather.nodes as u64) as usize).collect();
            clients.clients.push(Client {
                session,
                seqs: vec![0; weather.partitions as usize],
                believed,
                open: BTreeSet::new(),
                begun_in_calm: 0,
                answered_in_calm: 0,
            });
        }
        clients
    }

    fn next_session(&mut self, now_us: u64) -> SessionId {
        self.sessions += 1;
        SessionId { opened_ms: BEGINS_MS + now_us / 1_000, random: self.sessions }
    }

    pub(crate) fn accounts(&self) -> impl Iterator<Item = &Account> {
        self.accounts.iter()
    }

    pub(crate) fn told(&self) -> Tally {
        let mut tally = Tally::default();
        for operation in &self.operations {
            match operation.told {
                Some(Told::Acked) => tally.acked += 1,
                Some(Told::Never) => tally.never += 1,
                _ => tally.unknown += 1,
            }
        }
        tally
    }

    /// What still has to be answered; `None` = nothing.
    pub(crate) fn waits_for(&self) -> Option<String> {
        if let Some(open) = self.clients.iter().find_map(|client| client.open.first()) {
            return Some(format!("request {:?} has no answer", self.operations[*open].request));
        }
        let eager = self.clients.iter().position(|client| client.answered_in_calm < IN_CALM);
        eager.map(|client| format!("client {client} has not written enough since"))
    }

    /// Whether a request is within the window of what is not answered.
    fn may_send(&self, client: usize, session: SessionId, partition: PartitionId, seq: u64) -> bool {
        let open = self.clients[client].open.iter().map(|number| &self.operations[*number]).filter(|operation| {
            self.accounts[operation.account].partition == partition && operation.request.session == session
        });
        open.map(|operation| operation.request.seq).min().is_none_or(|oldest| seq < oldest + WINDOW)
    }

    /// The next moment.
    const fn moment(&mut self) -> u64 {
        self.moments += 1;
        self.moments
    }

    /// What was seen of each id that was read, without what never was and reads that nobody answered.
    pub(crate) fn histories(&self) -> Vec<(MemoryId, Vec<Call>)> {
        let never: BTreeSet<(usize, usize)> = (self.operations.iter())
            .filter(|operation| operation.told == Some(Told::Never))
            .filter_map(|operation| Some((operation.account, operation.call?)))
            .collect();
        let of_account = |(index, account): (usize, &Account)| {
            let calls = account.calls.iter().enumerate();
            let counts = |(call, what): &(usize, &Call)| {
                let is_add = matches!(what.what, What::Add(_));
                !never.contains(&(index, *call)) && (is_add || what.answered.is_some())
            };
            let calls: Vec<Call> = calls.filter(counts).map(|(_, call)| *call).collect();
            (account.id, calls)
        };
        let all = self.accounts.iter().enumerate().map(of_account);
        all.filter(|(_, calls)| calls.iter().any(|call| matches!(call.what, What::Read(_)))).collect()
    }

    fn note(&mut self, number: usize, told: Told) {
        let operation = &mut self.operations[number];
        operation.told = Some(told);
        let client = &mut self.clients[operation.client];
        client.open.remove(&number);
        client.answered_in_calm += u32::from(operation.in_calm && told != Told::Never);
        let account = &mut self.accounts[operation.account];
        if let Some(call) = operation.call.filter(|_| told == Told::Acked) {
            self.moments += 1;
            account.calls[call].answered = Some(self.moments);
        }
        match operation.j {
            Some(j) => account.operations[j] = Some(told),
            None => account.created = Some(told),
        }
    }
}

impl World {
    /// A client begins an operation, if it has one to begin.
    pub(crate) fn client_acts(&mut self, client: usize) {
        let think_us = if self.is_calm { 50_000 } else { self.weather.think_us };
        let wait_us = self.draw.within(1_000, think_us);
        self.at(wait_us, Event::Client(client));
        if self.draw.chance(self.weather.shared_reads) {
            self.begin_read(client);
        }
        let own = &self.clients.clients[client];
        if own.open.len() >= OPEN || (self.is_calm && own.begun_in_calm >= IN_CALM) {
            return;
        }
        let shared = self.weather.shared_reads > 0;
        let own = || self.clients.accounts.iter().enumerate().filter(|(_, account)| shared || account.owner == client);
        let usable: Vec<usize> = own()
            .filter(|(_, account)| account.created == Some(Told::Acked) && account.operations.len() < OPERATIONS)
            .map(|(index, _)| index)
            .collect();
        let begun = own().filter(|(_, account)| !shared || account.operations.len() < OPERATIONS).count();
        let may_create = begun < if shared { SHARED } else { self.weather.accounts } || self.is_calm;
        let creates = may_create && (usable.is_empty() || self.draw.chance(150));
        if !creates && usable.is_empty() {
            return;
        }
        let (account, j) = if creates {
            let id = MemoryId(self.draw.next());
            let partition = partition_of(id, self.weather.partitions);
            let twin = (self.weather.durability == Durability::Async).then(|| self.id_of(partition));
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

    /// Any id of a partition.
    fn id_of(&mut self, partition: PartitionId) -> MemoryId {
        loop {
            let id = MemoryId(self.draw.next());
            if partition_of(id, self.weather.partitions) == partition {
                return id;
            }
        }
    }

    /// A process has answered an operation; a client may hear of it, or not.
    pub(crate) fn note_answer(&mut self, number: u64, by: Member) {
        if let Some(operation) = self.clients.operations.get(number as usize) {
            let answered = &mut self.clients.accounts[operation.account].answered;
            answered.insert(operation.j, (by, self.now_us));
        }
    }

    fn begin_operation(&mut self, client: usize, account: usize, j: Option<usize>) {
        let partition = self.clients.accounts[account].partition;
        let asked = self.clients.moment();
        let call = j.filter(|_| self.weather.shared_reads > 0).map(|j| {
            let calls = &mut self.clients.accounts[account].calls;
            calls.push(Call { what: What::Add(1 << (2 * j)), asked, answered: None });
            calls.len() - 1
        });
        let owner = &mut self.clients.clients[client];
        owner.seqs[partition.0 as usize] += 1;
        let request = Request { session: owner.session, seq: owner.seqs[partition.0 as usize] };
        let deadline_us = if self.is_calm { u64::MAX } else { self.now_us + PATIENCE_US };
        let in_calm = self.is_calm;
        let operation =
            Operation { client, account, j, request, deadline_us, closes: false, told: None, in_calm, call };
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

    /// A client reads one of the ids.
    fn begin_read(&mut self, client: usize) {
        let of_use = |(_, account): &(usize, &Account)| {
            account.created == Some(Told::Acked) && account.calls.len() < MOST_CALLS - OPERATIONS
        };
        let newest = self.clients.accounts.iter().enumerate().filter(of_use).map(|(index, _)| index);
        let among: Vec<usize> = newest.rev().take(SHARED + 1).collect();
        if among.is_empty() {
            return;
        }
        let account = self.draw.pick(&among);
        let asked = self.clients.moment();
        let partition = self.clients.accounts[account].partition;
        let calls = &mut self.clients.accounts[account].calls;
        calls.push(Call { what: What::Read(None), asked, answered: None });
        let call = calls.len() - 1;
        self.clients.reads.push((account, call, client));
        let read = self.clients.reads.len() - 1;
        // Who was thought to serve may not know that it does no longer.
        let mut node = self.clients.clients[client].believed[partition.0 as usize];
        if self.draw.chance(300) {
            node = self.draw.below(self.nodes.len() as u64) as usize;
        }
        let wait_us = self.delay_us();
        self.at(wait_us, Event::Read { node, read });
    }

    /// A node is asked for a weight, which it tells where it holds the leases for it.
    pub(crate) fn read(&mut self, node: usize, read: usize) {
        let (account, ..) = self.clients.reads[read];
        let (id, partition) = (self.clients.accounts[account].id, self.clients.accounts[account].partition);
        let mut found = None;
        self.with(node, |store| {
            if store.is_readable(partition) || is_planted(Defect::ReadUnasked) {
                let weight = store.partitions().get(id)?.map(|memory| memory.weight.units());
                // The lease that was there before may have ended meanwhile.
                found = (store.is_readable(partition) || is_planted(Defect::ReadUnasked)).then_some(weight);
            }
            Ok(())
        });
        if let Some(weight) = found {
            let wait_us = self.delay_us();
            self.at(wait_us, Event::ReadAnswer { read, weight });
        }
    }

    /// A client is told a weight.
    pub(crate) fn read_answered(&mut self, read: usize, weight: Option<u32>) {
        let (account, call, client) = self.clients.reads[read];
        self.trace.note(self.now_us, &[24, read as u64, u64::from(weight.unwrap_or(u32::MAX))], || {
            format!("client {client} reads {weight:?} of account {account}")
        });
        let answered = self.clients.moment();
        let call = &mut self.clients.accounts[account].calls[call];
        (call.what, call.answered) = (What::Read(weight), Some(answered));
    }

    /// Sends a request, again and again until there is an answer or no time.
    pub(crate) fn attempt(&mut self, number: u64) {
        let operation = &self.clients.operations[number as usize];
        if operation.told.is_some() {
            return;
        }
        let (client, request) = (operation.client, operation.request);
        let partition = self.clients.accounts[operation.account].partition;
        if self.now_us > operation.deadline_us {
            // After an operation whose fate it does not know a client goes on under a new session.
            if self.clients.clients[client].session == request.session {
                let session = self.clients.next_session(self.now_us);
                let owner = &mut self.clients.clients[client];
                owner.session = session;
                owner.seqs.fill(0);
            }
            let closed = operation_mut(&mut self.clients, number).closes;
            if closed || self.draw.chance(500) {
                self.trace.note(self.now_us, &[15, number], || format!("client {client} gives {number} up"));
                self.clients.note(number as usize, Told::Unknown);
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
        let mut node = self.clients.clients[client].believed[partition.0 as usize];
        if !self.is_calm && self.draw.chance(100) {
            node = self.draw.below(self.nodes.len() as u64) as usize;
        }
        if self.draw.chance(self.weather.request_lost) {
            self.count(Fault::RequestLost);
            return;
        }
        let wait_us = self.delay_us();
        self.at(wait_us, Event::Request { node, attempt: number });
        if self.draw.chance(self.weather.request_again) {
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
        self.trace.note(self.now_us, &[16, node as u64, number], || format!("{node} is asked {number}: {record:?}"));
        if self.authority.entry(partition).primary.0 as usize != node {
            self.count(Fault::RequestAstray);
        }
        if !self.hand_in(node, partition, record, number) {
            self.look_up(number);
        }
    }

    /// Gives a record to the process of a node, which answers under `number`; false where none runs.
    pub(crate) fn hand_in(&mut self, node: usize, partition: PartitionId, record: Record, number: u64) -> bool {
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

    /// An answer leaves a node.
    pub(crate) fn answer_leaves(&mut self, answer: Answer) {
        if self.draw.chance(self.weather.request_lost) {
            self.count(Fault::RequestLost);
            return;
        }
        let wait_us = self.delay_us();
        self.at(wait_us, Event::Answer(answer));
    }

    /// A client is told what became of a request.
    pub(crate) fn answered(&mut self, (number, answer): Answer) {
        let operation = &self.clients.operations[number as usize];
        let (told, closes) = (operation.told, operation.closes);
        self.trace
            .note(self.now_us, &[17, number, u64::from(answer.is_ok())], || format!("{number} is told {answer:?}"));
        let loses = self.weather.durability == Durability::Async;
        let now = match answer {
            Ok(committed) => match committed.reply {
                Reply::Applied(outcome) => {
                    let ids = if loses { 2 } else { 1 };
                    let is_gone = loses && outcome.applied == 0 && outcome.rejected == ids;
                    if !is_gone && (outcome.applied != ids || outcome.rejected != 0) {
                        self.fail(format!("operation {number} of an id that is there: {outcome:?}"));
                    }
                    // The creation of the id may be lost, as all that was acknowledged a moment before its process ended.
                    if is_gone { Told::Unknown } else { Told::Acked }
                }
                Reply::Refused(Refusal::AlreadyClosed) if closes => Told::Never,
                Reply::Refused(Refusal::OutOfWindow { .. }) if closes => Told::Unknown,
                Reply::Refused(refusal) => {
                    if told.is_none() {
                        self.fail(format!("operation {number} was refused: {refusal:?}"));
                    }
                    return;
                }
            },
            Err(WriteError::Invalid { refusal, .. }) => {
                // The clock of the node is far behind that of who opened the session.
                let is_clock = matches!(&refusal, Refusal::Malformed { what } if what.starts_with("session"));
                if !is_clock {
                    self.fail(format!("operation {number} was refused: {refusal}"));
                }
                return;
            }
            // In mode async a copy is given up whose primary has lost its last records.
            Err(WriteError::Corrupt { what, .. })
                if self.counters.get(Fault::BitFlip) == 0 && self.weather.durability != Durability::Async =>
            {
                self.fail(format!("operation {number}: nothing was damaged, and yet {what}"));
                return;
            }
            Err(_) => {
                self.look_up(number);
                return;
            }
        };
        match told {
            None => self.clients.note(number as usize, now),
            // Told that it never was, and now that it was, or the other way round.
            Some(before) if before != now && !loses && before != Told::Unknown && now != Told::Unknown => {
                self.fail(format!("operation {number} was told {before:?}, then {now:?}"));
            }
            Some(_) => {}
        }
    }

    /// A client asks the map who serves.
    fn look_up(&mut self, number: u64) {
        let operation = &self.clients.operations[number as usize];
        let client = operation.client;
        let partition = self.clients.accounts[operation.account].partition;
        let primary = self.authority.entry(partition).primary.0 as usize;
        self.clients.clients[client].believed[partition.0 as usize] = primary;
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
