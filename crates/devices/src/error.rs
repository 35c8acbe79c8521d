//! Errors of distributed computations.

use crate::members::MemberFailure;
use engram_kernels::partitioner;
use std::time::Duration;

/// Why a distributed computation has no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Every device was removed before the end.
    #[error("failed to finish {what}: all {devices} devices were removed")]
    NoDevice {
        /// Name of the computation.
        what: &'static str,
        /// Number of devices at the start.
        devices: usize,
    },
    /// A kernel returned an error. It would fail on every device.
    #[error("failed to compute {what} on device {device}: {message}")]
    Kernel {
        /// Name of the kernel.
        what: &'static str,
        /// Name of the device.
        device: String,
        /// The kernel's error.
        message: String,
    },
    /// The computation took too long.
    #[error("failed to finish {what} within {limit:?}")]
    Deadline {
        /// Name of the computation.
        what: &'static str,
        /// The allowed time.
        limit: Duration,
    },
    /// Another member of the group ended the run.
    #[error("failed to finish {what}: rank {rank} {failure}")]
    Member {
        /// Name of the computation.
        what: &'static str,
        /// Rank of the member.
        rank: usize,
        /// What it did.
        failure: MemberFailure,
    },
    /// An argument cannot be used.
    #[error("{name}: {value} is not allowed; allowed: {allowed}")]
    Argument {
        /// Name of the argument.
        name: &'static str,
        /// Its value.
        value: String,
        /// The usable values.
        allowed: &'static str,
    },
    /// The devices cannot hold the work.
    #[error("failed to assign work to devices: {0}")]
    Assignment(#[from] partitioner::Error),
}

impl Error {
    // By value: callers pass numbers and texts that they have just made.
    #[allow(clippy::needless_pass_by_value)]
    pub(crate) fn argument(name: &'static str, value: impl ToString, allowed: &'static str) -> Self {
        Self::Argument { name, value: value.to_string(), allowed }
    }
}
