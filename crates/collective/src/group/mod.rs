//! Elastic groups: who takes part in a reduction, and how a step is committed everywhere or nowhere.
//!
//! [`Service`] owns the membership; it runs next to the partition that stores the group's record. [`Member`] runs in every worker of the group.
//! Both are state machines without I/O and without a clock.
//!
//! ```text
//! member:   Compute ─> Gradients ─> Reduce ─> Reduced ─> flags to all peers ─> all flags ─> Apply
//! service:  suspect ─> probe ─> fence ─> reports ─> finish or repeat the open step ─> record ─> publish
//! ```
//!
//! Invariants:
//! - A generation is recorded durably before it is published, and a generation number names one membership permanently.
//! - A fenced member sends and accepts nothing of the old generation.
//! - A member sends its commit flag only after it holds the complete reduced gradient. So if any member applied a step, every member of the same
//!   generation can apply it from its own memory.
//! - All members of a new generation start from the same position: the same step and the same digest of the state.
//! - A member that returns offers a position; the service compares the digest, never the step number alone.

mod joining;
mod member;
mod service;

pub use member::{Member, MemberAction, MemberEvent};
pub use service::{PauseReason, Service, ServiceAction, ServiceEvent, Settings};

/// Identifies one process of a group. A restarted process has a new id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId(pub u64);

/// Where a training state is: the last finished step and the digest of parameters and optimizer state after it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Position {
    /// The last finished step; 0 before the first.
    pub step: u64,
    /// Digest of the state after that step.
    pub digest: u64,
}

/// The durable record of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Record {
    /// Number of the membership; rises with each change.
    pub generation: u64,
    /// Members in rank order.
    pub members: Vec<MemberId>,
    /// Position from which the generation starts.
    pub position: Position,
}

/// What allows a new generation, so that two sides of a network partition can't both form one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Quorum {
    /// More than half of the members of the previous generation must confirm the fence.
    Majority,
    /// The store rejects the record of a service with an old term; one surviving member is enough.
    StoreTerm,
}

/// All timeouts, derived from one detection time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Timing {
    detect_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self::new(500)
    }
}

impl Timing {
    /// Creates the timeouts for a detection time in milliseconds, at least 10.
    pub const fn new(detect_ms: u64) -> Self {
        Self { detect_ms: if detect_ms < 10 { 10 } else { detect_ms } }
    }

    /// Time without progress of a chunk after which a peer is suspected.
    pub const fn progress_ms(self) -> u64 {
        self.detect_ms
    }

    /// Interval of reports and retransmissions, and time that a probe may take: a fifth of the detection time.
    pub const fn probe_ms(self) -> u64 {
        self.detect_ms / 5
    }

    /// Silence after which the service probes a member: with two probes, it is found within the detection time.
    pub const fn silence_ms(self) -> u64 {
        3 * self.probe_ms()
    }

    /// Time that a generation change waits for members that must fetch the state, and that a member stays out the first time when a link to a peer failed
    /// repeatedly: four detection times.
    pub const fn change_ms(self) -> u64 {
        4 * self.detect_ms
    }

    /// Time without a finished step after which a member reports a stall to its caller, and the longest time that a member stays out because of a
    /// failing link: twenty detection times.
    pub const fn abort_ms(self) -> u64 {
        20 * self.detect_ms
    }
}

/// What a member does at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Not part of a generation that it knows.
    Outside,
    /// Part of a generation that is paused.
    Paused,
    /// Computes its gradient sums.
    Computing,
    /// Exchanges buckets.
    Reducing,
    /// Holds the reduced gradient and waits for the flags of its peers.
    Flagged,
    /// Stopped for a generation change.
    Fenced,
}

/// Why a peer is suspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// No chunk or flag arrived for the detection time.
    Stalled,
    /// The connection ended.
    Broken,
}

/// A suspected peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Suspicion {
    /// The peer.
    pub peer: MemberId,
    /// Why.
    pub cause: Cause,
}

/// A complete reduced gradient that is not applied yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Prepared {
    /// Generation that reduced it.
    pub generation: u64,
    /// Its step.
    pub step: u64,
    /// Whether this member agrees to apply it.
    pub valid: bool,
}

/// The complete status of a member. Reports are idempotent: a lost one is replaced by the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Report {
    /// The member.
    pub member: MemberId,
    /// Its generation; 0 outside of any.
    pub generation: u64,
    /// What it does.
    pub stage: Stage,
    /// Term and generation of the newest fence that it obeys.
    pub fence: (u64, u64),
    /// Its last finished step and digest.
    pub position: Position,
    /// Whether that step was skipped by common decision.
    pub skipped: bool,
    /// The reduced gradient of the next step, if complete.
    pub prepared: Option<Prepared>,
    /// A peer that it suspects.
    pub suspicion: Option<Suspicion>,
    /// Whether it wants to leave.
    pub leaving: bool,
}

/// A message of the service to a member. Every message carries the term of the service; members ignore older terms.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Notice {
    /// Stop the old generation and report.
    Fence {
        /// The generation that is being formed.
        generation: u64,
    },
    /// Finish the open step from the own reduced gradient.
    Finish {
        /// The generation that is being formed.
        generation: u64,
        /// The step.
        step: u64,
        /// Whether it is applied or skipped.
        apply: bool,
    },
    /// Replace the own state by that of a source, at this position or a later one.
    CatchUp {
        /// The position to reach.
        position: Position,
        /// Members that have it.
        sources: Vec<MemberId>,
    },
    /// The group does not need this leaving member any more.
    Release,
    /// Start a generation.
    Publish {
        /// Its record.
        record: Record,
        /// Whether it has too few members to train.
        paused: bool,
    },
}
