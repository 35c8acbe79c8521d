//! What a member's state machine lets the engine do, and what the engine reports.

use crate::training::transport::connections::Generation;
use engram_collective::group::{MemberId, Position, Suspicion};
use engram_proto::v1;
use engram_train::Checkpoint;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio::sync::oneshot;

/// One piece of work.
pub(in crate::training) enum Work {
    /// Compute the gradient sums of a step, as the given rank of so many members of a generation.
    Compute { step: u64, generation: u64, rank: usize, members: usize },
    /// Reduce the sums of a step.
    Reduce { step: u64, generation: Generation },
    /// Send the own commit flag, receive those of the others.
    Flags { step: u64, valid: bool, cancel: Arc<AtomicBool> },
    /// Finish a step.
    Apply { step: u64, apply: bool, digest: oneshot::Sender<u64> },
    /// Replace the state.
    Install { checkpoint: Checkpoint },
    /// Copy the state, if it is at the position that may be named.
    Copy { at: Option<Position>, reply: oneshot::Sender<Checkpoint> },
    /// Measure the result and write the last checkpoint.
    Complete,
    /// Write a checkpoint of the present step, then end.
    Stop,
}

/// What happened in the engine.
pub(in crate::training) enum EngineEvent {
    Gradients {
        step: u64,
    },
    /// Whether gradient sums are computed during the reduction.
    Computes(bool),
    Reduced {
        generation: u64,
        step: u64,
        valid: bool,
    },
    Flag {
        generation: u64,
        step: u64,
        from: MemberId,
        valid: bool,
    },
    PeerFailed {
        generation: u64,
        suspicion: Suspicion,
    },
    CaughtUp(Position),
    Failed(v1::TrainingFailure),
    /// Why the source has no data at present.
    Waiting(String),
    Progress(v1::TrainingProgress),
    Completed(v1::TrainingResult),
    Stopped,
}
