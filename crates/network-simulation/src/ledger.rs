//! Clients whose writes can be counted afterwards.
//!
//! The j-th operation on a memory adds 4^j units to a weight that begins at 0, so that each base-4 digit of the weight is how often that
//! operation was applied: once where it was acknowledged, never where the client was told so, at most once where it was told
//! nothing.

use crate::draw::Draw;
use crate::world::Common;
use engram_client::{Client, Error, WriteOutcome, GetOptions, PartFailure, Rows, Session, Signals, Updates};
use engram_memory::law::ONE;
use engram_memory::{MemoryId, OnMissing, PartitionId, SessionId, partition_of};
use std::time::Duration;
use tokio::time::sleep;

/// Operations on one memory: their sum stays below 1.
const OPERATIONS: usize = 15;
/// Memories of one client, unless all of them are used up.
const ACCOUNTS: usize = 24;
/// Writes that a client has acknowledged in calm before it is content.
const IN_CALM: u32 = 5;

/// What a client knows of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Acked,
    Unknown,
    Never,
}

/// A memory, with what was done to it.
struct Account {
    id: MemoryId,
    operations: Vec<Told>,
}

/// A request whose fate is not known.
struct Open {
    session: SessionId,
    partition: PartitionId,
    seq: u64,
    /// Its operations: accounts, each with the last operation then.
    operations: Vec<(usize, usize)>,
}

/// One client.
pub(crate) struct Ledger {
    number: u64,
    common: Common,
    draw: Draw,
    client: Client,
    session: Session,
    accounts: Vec<Account>,
    open: Vec<Open>,
}

/// The life of a client, until it has written enough in calm, knows what can be known, and has read everything.
pub(crate) async fn live(common: Common, number: u64, draw: Draw) {
    let client = common.client().await;
    let session = client.session();
    let mut ledger = Ledger { number, common, draw, client, session, accounts: Vec::new(), open: Vec::new() };
    let mut acked_in_calm = 0;
    loop {
        sleep(Duration::from_millis(ledger.draw.within(0, 60))).await;
        let is_calm = ledger.common.is_calm();
        match ledger.draw.within(0, 9) {
            0..=1 if ledger.accounts.len() < ACCOUNTS => ledger.create().await,
            2..=3 => {
                // Nobody answers: it is tried again soon enough.
                let _ = ledger.read().await;
            }
            4 => ledger.ask_fate().await,
            _ => {
                let acked = ledger.write().await;
                acked_in_calm += u32::from(acked && is_calm);
            }
        }
        if acked_in_calm >= IN_CALM {
            break;
        }
    }
    while !ledger.open.is_empty() {
        ledger.ask_fate().await;
    }
    while !ledger.read().await {}
}

impl Ledger {
    fn note(&self, text: &str) {
        self.common.trace.note(format!("client {}: {text}", self.number));
    }

    /// Makes a memory, and again until it is there: nothing is written to it before.
    async fn create(&mut self) {
        let id = MemoryId(self.draw.next());
        let rows = || Rows { ids: vec![id], weights: vec![0.0], ..Rows::default() };
        match self.session.upsert(rows()).await {
            Ok(_) => {
                self.note(&format!("made {id}"));
                self.common.acked();
                self.accounts.push(Account { id, operations: Vec::new() });
            }
            // Given up: a late one may set a weight that something else changed since.
            Err(error) => self.note(&format!("did not make {id}: {}", kind(&error))),
        }
    }

    /// Adds to some memories; whether all of it was acknowledged.
    async fn write(&mut self) -> bool {
        let usable = |account: &Account| account.operations.len() < OPERATIONS;
        let mut chosen: Vec<usize> = (0..self.accounts.len()).filter(|&at| usable(&self.accounts[at])).collect();
        let most = self.draw.within(1, 6) as usize;
        while chosen.len() > most {
            let at = self.draw.within(0, chosen.len() as u64 - 1) as usize;
            chosen.swap_remove(at);
        }
        if chosen.is_empty() {
            self.create().await;
            return false;
        }
        let deltas = chosen.iter().map(|&at| (1_u64 << (2 * self.accounts[at].operations.len())) as f32 / ONE as f32);
        let updates = Updates {
            ids: chosen.iter().map(|&at| self.accounts[at].id).collect(),
            signals: Signals::Deltas(deltas.collect()),
            on_missing: OnMissing::Report,
            keys: None,
        };
        for &at in &chosen {
            self.accounts[at].operations.push(Told::Unknown);
        }
        let answer = self.session.reinforce(updates).await;
        let rejected = match &answer {
            Ok(written) => written.outcome.rejected,
            Err(Error::Partial { written, .. }) => written.outcome.rejected,
            Err(_) => 0,
        };
        if rejected > 0 {
            self.common.trace.fail(format!("client {}: an acknowledged memory is not there: {answer:?}", self.number));
        }
        let partitions = self.common.partitions;
        let of = |at: &usize, accounts: &[Account]| partition_of(accounts[*at].id, partitions);
        match answer {
            Ok(_) => {
                self.note(&format!("wrote {}", chosen.len()));
                self.common.acked();
                self.tell(&chosen, Told::Acked);
                true
            }
            Err(Error::Partial { failures, .. }) => {
                for at in &chosen {
                    let partition = of(at, &self.accounts);
                    if !failures.iter().any(|failure| failure.partition == partition) {
                        self.tell(&[*at], Told::Acked);
                    }
                }
                for PartFailure { partition, error } in failures {
                    let of_part: Vec<usize> =
                        chosen.iter().copied().filter(|at| of(at, &self.accounts) == partition).collect();
                    self.failed(&of_part, &error);
                }
                false
            }
            Err(error) => {
                self.failed(&chosen, &error);
                false
            }
        }
    }

    fn tell(&mut self, accounts: &[usize], told: Told) {
        for &at in accounts {
            *self.accounts[at].operations.last_mut().expect("one was just begun") = told;
        }
    }

    fn failed(&mut self, accounts: &[usize], error: &Error) {
        self.note(&format!("{} not acknowledged: {}", accounts.len(), kind(error)));
        match error {
            Error::OutcomeUnknown { session, partition, seq, .. } => {
                self.common.unknown();
                let last = |&at: &usize| (at, self.accounts[at].operations.len() - 1);
                let operations = accounts.iter().map(last).collect();
                self.open.push(Open { session: *session, partition: *partition, seq: *seq, operations });
            }
            Error::Protocol(what) => self.common.trace.fail(format!("client {}: {what}", self.number)),
            _ => self.tell(accounts, Told::Never),
        }
    }

    /// Asks what became of the oldest request without an answer.
    async fn ask_fate(&mut self) {
        let Some(Open { session, partition, seq, operations }) = self.open.pop() else { return };
        let told = match self.session.write_outcome(session, partition, seq).await {
            Ok(WriteOutcome::Applied(_)) => Told::Acked,
            Ok(WriteOutcome::NeverExecuted | WriteOutcome::Rejected(_)) => Told::Never,
            Err(error) if self.common.is_calm() => {
                self.note(&format!("does not learn what became of {partition}/{seq}: {}", kind(&error)));
                // Nobody knows any more, and says so.
                if !matches!(error, Error::Rejected(_)) {
                    self.open.push(Open { session, partition, seq, operations });
                }
                return;
            }
            Err(_) => {
                self.open.push(Open { session, partition, seq, operations });
                return;
            }
        };
        self.note(&format!("learns that {partition}/{seq} is {told:?}"));
        self.common.resolved();
        for (at, operation) in operations {
            self.accounts[at].operations[operation] = told;
        }
    }

    /// Reads all memories of the client and compares; whether somebody answered.
    async fn read(&mut self) -> bool {
        let ids: Vec<MemoryId> = self.accounts.iter().map(|account| account.id).collect();
        let found = match self.client.get(&ids, GetOptions::default()).await {
            Ok(found) => found,
            Err(error) => {
                self.note(&format!("cannot read: {}", kind(&error)));
                return false;
            }
        };
        self.note(&format!("read {}", found.memories.len()));
        self.common.read();
        for missing in &found.missing {
            self.common.trace.fail(format!("client {}: {missing} was acknowledged and is lost", self.number));
        }
        for (account, memory) in self.accounts.iter().zip(&found.memories) {
            for (j, told) in account.operations.iter().enumerate() {
                let times = memory.weight.units() >> (2 * j) & 3;
                let holds = match told {
                    Told::Acked => times == 1,
                    Told::Unknown => times <= 1,
                    Told::Never => times == 0,
                };
                if !holds {
                    let (number, id) = (self.number, account.id);
                    self.common
                        .trace
                        .fail(format!("client {number}: operation {j} on {id} ({told:?}) was applied {times} times"));
                }
            }
        }
        true
    }
}

/// An error in a few words that are the same whenever the seed is.
pub(crate) fn kind(error: &Error) -> String {
    match error {
        Error::Rejected(problem) => format!("refused, {:?}", problem.kind()),
        Error::OutcomeUnknown { partition, seq, .. } => format!("unknown, {partition}/{seq}"),
        Error::Deadline { last, .. } => format!("deadline, {:?}", last.kind()),
        Error::Partial { failures, .. } => format!("{} parts failed", failures.len()),
        Error::Connect { .. } => "no worker answers".into(),
        Error::Protocol(what) => what.clone(),
    }
}
