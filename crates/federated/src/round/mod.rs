//! The rounds of a run as a state machine: who trains, whose update counts, when a round ends.
//!
//! Invariants:
//! - **An update counts at most once.** It needs a live lease, and accepting it ends the lease. A repeated upload is acknowledged again and
//!   changes nothing.
//! - **An acknowledged update is not lost.** It is in exactly one batch, or it is discarded with its aborted round.
//! - **A restart changes nothing.** The state is serializable; the same events give the same actions, and `Rounds::resume` repeats the one
//!   action that may have been lost.
//! - **The budget is charged before a round starts** and never refunded.
//!
//! Times are milliseconds of the server's clock; clients' clocks are not used.

mod machine;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use self::machine::Rounds;
use crate::error::{InvalidInput, require};
use crate::model::ClientId;
use crate::privacy::budget::BudgetExhausted;

/// SHA-256 of the content of a model or an update.
pub type Digest = [u8; 32];

/// How the clients of a round are chosen and when it ends.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Mode {
    /// A round over a fixed number of clients.
    Synchronous {
        /// Updates that end a round.
        target: u32,
        /// Updates without which a round is aborted at its deadline; 1 to `target`.
        minimum: u32,
        /// Clients that are assigned beyond `target`, in percent of it.
        over_selection_percent: u32,
    },
    /// Every enrolled client takes part independently; the round ends when all chosen clients reported, or at its deadline.
    Poisson {
        /// Probability that a client takes part, above 0 and at most 1.
        rate: f64,
    },
    /// `FedBuff`: up to `concurrency` clients train at any time; each `buffer` updates are aggregated.
    Buffered {
        /// Clients that train at the same time.
        concurrency: u32,
        /// Updates per aggregation.
        buffer: u32,
    },
    /// `FedBuff` with secure aggregation: clients that check in form cohorts, which train at the same time; the sum of each is aggregated.
    Cohorts {
        /// Clients of a cohort.
        size: u32,
        /// Updates that a cohort waits for before it goes on without its slowest clients, at most `size`.
        goal: u32,
        /// Updates without which a cohort is aborted, 2 to `goal`.
        minimum: u32,
        /// Most cohorts at the same time.
        cohorts: u32,
    },
}

/// Settings of the rounds of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RoundSettings {
    /// Name of the run; uploads for another one are refused.
    pub run: String,
    /// Mode of the rounds.
    pub mode: Mode,
    /// Aggregations after which the run is complete.
    pub versions: u64,
    /// How long a client may train and upload.
    pub lease_millis: u64,
    /// How long a round or a cohort may take; not used by the buffered mode.
    pub deadline_millis: u64,
    /// How long a client that checked in counts as available.
    pub check_in_millis: u64,
    /// Available clients that are remembered; others are asked to retry.
    pub max_waiting: usize,
    /// Aborted rounds in sequence after which the run fails.
    pub max_aborts: u32,
    /// Clients mask their updates together: a round takes no further client once it has begun.
    pub is_masked: bool,
}

impl RoundSettings {
    /// Checks the ranges.
    ///
    /// # Errors
    /// When a number is out of its range.
    pub fn validate(&self) -> Result<(), InvalidInput> {
        for (field, value) in [
            ("versions", self.versions),
            ("leaseMillis", self.lease_millis),
            ("deadlineMillis", self.deadline_millis),
            ("checkInMillis", self.check_in_millis),
            ("maxWaiting", self.max_waiting as u64),
            ("maxAborts", u64::from(self.max_aborts)),
        ] {
            require(value > 0, field, value, "at least 1")?;
        }
        match self.mode {
            Mode::Synchronous { target, minimum, over_selection_percent } => {
                require((1..=target).contains(&minimum), "minimum", minimum, "1 to target")?;
                require(over_selection_percent <= 1_000, "overSelectionPercent", over_selection_percent, "0 to 1000")?;
                require(target as usize <= self.max_waiting, "target", target, "at most maxWaiting")
            }
            Mode::Poisson { rate } => require(rate > 0.0 && rate <= 1.0, "rate", rate, "above 0, at most 1"),
            Mode::Buffered { concurrency, buffer } => {
                require((1..=concurrency).contains(&buffer), "buffer", buffer, "1 to concurrency")
            }
            Mode::Cohorts { size, goal, minimum, cohorts } => {
                require((3..=size).contains(&goal), "goal", goal, "3 to size")?;
                require((2..=goal).contains(&minimum), "minimum", minimum, "2 to goal")?;
                require(cohorts > 0, "cohorts", cohorts, "at least 1")?;
                require(size as usize <= self.max_waiting, "size", size, "at most maxWaiting")
            }
        }
    }
}

/// An update that was uploaded completely and whose content was checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadedUpdate {
    /// Name of the run that it is for.
    pub run: String,
    /// The authenticated client.
    pub client: ClientId,
    /// The task that it answers.
    pub task: u64,
    /// Hash of its content.
    pub digest: Digest,
}

/// What happens to the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A client is available.
    CheckIn(ClientId),
    /// An update arrived.
    Upload(UploadedUpdate),
    /// A client gives its task up.
    GiveUp {
        /// The client.
        client: ClientId,
        /// Its task.
        task: u64,
    },
    /// A client was revoked: it takes no further part.
    Leave(ClientId),
    /// The model of a batch was stored.
    Aggregated {
        /// Number of the batch.
        batch: u64,
        /// Hash of the new model.
        model: Digest,
    },
    /// Time has passed; due at `Rounds::next_deadline`.
    Tick,
    /// No further update of this round or cohort can come: it ends as at its deadline.
    CloseRound(u64),
    /// The user stops the run.
    Stop,
}

/// Work for a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// The client.
    pub client: ClientId,
    /// Number of the task: never reused.
    pub number: u64,
    /// The round.
    pub round: u64,
    /// Version of the model to train from.
    pub version: u64,
    /// Hash of that model.
    pub model: Digest,
    /// End of the lease.
    pub expires_millis: u64,
}

/// An update that was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contribution {
    /// The client.
    pub client: ClientId,
    /// Its task.
    pub task: u64,
    /// Version that it trained from.
    pub version: u64,
    /// Hash of its content.
    pub digest: Digest,
}

/// Updates to aggregate into the next version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Number of the batch: never reused.
    pub number: u64,
    /// The round, or the cohort, whose updates it has.
    pub round: u64,
    /// Version that it is added to.
    pub version: u64,
    /// The updates; empty only with Poisson participation.
    pub contributions: Vec<Contribution>,
}

/// Why a client's request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The client is not enrolled in this run.
    #[error("client is not enrolled in this run")]
    NotEnrolled,
    /// The upload names another run.
    #[error("upload is for another run")]
    OtherRun,
    /// The task was assigned to another client.
    #[error("task belongs to another client")]
    OtherClient,
    /// There is no lease for this task, or it ended.
    #[error("lease of the task has expired or the round has ended: check in again")]
    LeaseExpired,
    /// The task was answered already, with another content.
    #[error("task was answered already with another content")]
    Conflict,
    /// The update is too old.
    #[error("update is {staleness} versions old, more than 20: download the model again")]
    Stale {
        /// Age in versions.
        staleness: u64,
    },
    /// Too many clients wait.
    #[error("too many clients are waiting: retry later")]
    Busy,
    /// The run has ended.
    #[error("run has ended")]
    Ended,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Outcome {
    /// All versions were aggregated.
    Complete,
    /// The user stopped it.
    Stopped,
    /// Too many rounds in sequence had too few updates.
    TooManyAborts,
    /// The next round does not fit the privacy budget.
    Exhausted {
        /// Epsilon after that round.
        needed: f64,
        /// The budget.
        epsilon: f64,
        /// The fixed delta.
        delta: f64,
    },
}

impl From<BudgetExhausted> for Outcome {
    fn from(exhausted: BudgetExhausted) -> Self {
        let BudgetExhausted { needed, epsilon, delta } = exhausted;
        Self::Exhausted { needed, epsilon, delta }
    }
}

/// What the caller has to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Action {
    /// Send a task to its client.
    Assign(Task),
    /// Ask the client to stay available: it has no task yet.
    Wait(ClientId),
    /// Refuse the client's request.
    Refuse(ClientId, Refusal),
    /// Acknowledge an update; it is durable in this state.
    Acknowledge {
        /// The client.
        client: ClientId,
        /// Its task.
        task: u64,
        /// It was acknowledged before.
        repeated: bool,
    },
    /// A lease ended without an update; an incomplete upload may be deleted.
    Revoke {
        /// The client.
        client: ClientId,
        /// Its task.
        task: u64,
    },
    /// An accepted update will not be used.
    Discard(Contribution),
    /// Aggregate these updates, store the model, then report `Event::Aggregated`.
    Aggregate(Batch),
    /// A round or a cohort ended with fewer updates than its minimum, or too late.
    Abort {
        /// The round.
        round: u64,
        /// Updates that it had.
        updates: u32,
    },
    /// The run ended.
    End(Outcome),
}
