//! Clients whose writes are counted at the end.
//!
//! The j-th operation on a memory adds 4^j units to a weight that starts at 0, so each base-4 digit of the weight is
//! the number of times that operation was applied: once if acknowledged, never if the response says so, at most once if
//! its outcome is unknown.

use crate::draw::Draw;
use crate::world::Common;
use engram_client::{Client, Error, GetOptions, PartFailure, Rows, Session, Signals, Updates, WriteOutcome};
use engram_memory::law::ONE;
use engram_memory::{MemoryId, OnMissing, PartitionId, SessionId, partition_of};
use std::time::Duration;
use tokio::time::sleep;

/// Operations on one memory: their sum stays below 1.
const OPERATIONS: usize = 15;
/// Memories of one client, unless all are used up.
const ACCOUNTS: usize = 24;
/// Writes that each client must get acknowledged in the calm phase.
const IN_CALM: u32 = 5;

/// Response to an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Response {
    Acked,
    Unknown,
    NeverExecuted,
}

/// A memory and its operations.
struct Account {
    id: MemoryId,
    operations: Vec<Response>,
}

/// A request with unknown outcome.
struct OpenRequest {
    session: SessionId,
    partition: PartitionId,
    seq: u64,
    /// Its operations: account and index.
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
    open: Vec<OpenRequest>,
}

/// Runs a client until it has written enough in the calm phase, has resolved unknown outcomes, and has read everything.
pub(crate) async fn run(common: Common, number: u64, draw: Draw) {
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
                // Without an answer it retries soon enough.
                let _ = ledger.read().await;
            }
            4 => ledger.query_outcome().await,
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
        ledger.query_outcome().await;
    }
    while !ledger.read().await {}
}

impl Ledger {
    fn note(&self, text: &str) {
        self.common.trace.note(format!("client {}: {text}", self.number));
    }

    /// Creates a memory. Nothing is written to it before it exists.
    async fn create(&mut self) {
        let id = MemoryId(self.draw.next());
        let rows = || Rows { ids: vec![id], weights: vec![0.0], ..Rows::default() };
        match self.session.upsert(rows()).await {
            Ok(_) => {
                self.note(&format!("created {id}"));
                self.common.acked();
                self.accounts.push(Account { id, operations: Vec::new() });
            }
            // Given up: a late execution may reset a weight that has changed since.
            Err(error) => self.note(&format!("failed to create {id}: {}", kind(&error))),
        }
    }

    /// Adds to some memories; returns whether everything was acknowledged.
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
            self.accounts[at].operations.push(Response::Unknown);
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
                self.note_response(&chosen, Response::Acked);
                true
            }
            Err(Error::Partial { failures, .. }) => {
                for at in &chosen {
                    let partition = of(at, &self.accounts);
                    if !failures.iter().any(|failure| failure.partition == partition) {
                        self.note_response(&[*at], Response::Acked);
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

    fn note_response(&mut self, accounts: &[usize], response: Response) {
        for &at in accounts {
            *self.accounts[at].operations.last_mut().expect("an operation was just begun") = response;
        }
    }

    fn failed(&mut self, accounts: &[usize], error: &Error) {
        self.note(&format!("{} not acknowledged: {}", accounts.len(), kind(error)));
        match error {
            Error::OutcomeUnknown { session, partition, seq, .. } => {
                self.common.unknown();
                let last = |&at: &usize| (at, self.accounts[at].operations.len() - 1);
                let operations = accounts.iter().map(last).collect();
                self.open.push(OpenRequest { session: *session, partition: *partition, seq: *seq, operations });
            }
            Error::Protocol(what) => self.common.trace.fail(format!("client {}: {what}", self.number)),
            _ => self.note_response(accounts, Response::NeverExecuted),
        }
    }

    /// Queries the outcome of the latest request with unknown outcome.
    async fn query_outcome(&mut self) {
        let Some(OpenRequest { session, partition, seq, operations }) = self.open.pop() else { return };
        let response = match self.session.write_outcome(session, partition, seq).await {
            Ok(WriteOutcome::Applied(_)) => Response::Acked,
            Ok(WriteOutcome::NeverExecuted | WriteOutcome::Rejected(_)) => Response::NeverExecuted,
            Err(error) if self.common.is_calm() => {
                self.note(&format!("failed to query the outcome of {partition}/{seq}: {}", kind(&error)));
                // The outcome is no longer known.
                if !matches!(error, Error::Rejected(_)) {
                    self.open.push(OpenRequest { session, partition, seq, operations });
                }
                return;
            }
            Err(_) => {
                self.open.push(OpenRequest { session, partition, seq, operations });
                return;
            }
        };
        self.note(&format!("outcome of {partition}/{seq}: {response:?}"));
        self.common.resolved();
        for (at, operation) in operations {
            self.accounts[at].operations[operation] = response;
        }
    }

    /// Reads all memories of the client and compares; returns whether there was an answer.
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
            self.common.trace.fail(format!("client {}: {missing} was acknowledged but is lost", self.number));
        }
        for (account, memory) in self.accounts.iter().zip(&found.memories) {
            for (j, response) in account.operations.iter().enumerate() {
                let times = memory.weight.units() >> (2 * j) & 3;
                let holds = match response {
                    Response::Acked => times == 1,
                    Response::Unknown => times <= 1,
                    Response::NeverExecuted => times == 0,
                };
                if !holds {
                    let (number, id) = (self.number, account.id);
                    self.common.trace.fail(format!(
                        "client {number}: operation {j} on {id} ({response:?}) was applied {times} times"
                    ));
                }
            }
        }
        true
    }
}

/// Describes an error in a way that is the same in every run of a seed.
pub(crate) fn kind(error: &Error) -> String {
    match error {
        Error::Rejected(problem) => format!("rejected, {:?}", problem.kind()),
        Error::OutcomeUnknown { partition, seq, .. } => format!("unknown, {partition}/{seq}"),
        Error::Deadline { last, .. } => format!("deadline, {:?}", last.kind()),
        Error::Partial { failures, .. } => format!("{} parts failed", failures.len()),
        Error::Connect { .. } => "no worker answers".into(),
        Error::Protocol(what) => what.clone(),
    }
}
