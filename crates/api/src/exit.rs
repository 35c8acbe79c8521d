//! Exit codes of the `engram` command. Scripts branch on them: a code never changes its meaning.

/// Exit code of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ExitCode {
    /// Success.
    Ok = 0,
    /// The command failed.
    Failed = 1,
    /// Invalid command line or manifest.
    Usage = 2,
    /// A named object does not exist.
    NotFound = 3,
    /// Not ready, or deadline exceeded.
    NotReady = 4,
    /// Failed precondition: state directory or port in use, immutable field changed, required GPU missing.
    Conflict = 5,
    /// No worker responds.
    Unreachable = 6,
    /// Permission denied.
    Denied = 7,
    /// Incompatible versions.
    Incompatible = 8,
    /// Interrupted by a signal.
    Interrupted = 130,
}

impl ExitCode {
    /// Every code, in the order of the documentation.
    pub const ALL: [Self; 10] = [
        Self::Ok,
        Self::Failed,
        Self::Usage,
        Self::NotFound,
        Self::NotReady,
        Self::Conflict,
        Self::Unreachable,
        Self::Denied,
        Self::Incompatible,
        Self::Interrupted,
    ];

    /// Returns the process exit status.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Returns a description, for the documentation.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed => "failed",
            Self::Usage => "invalid usage or manifest",
            Self::NotFound => "not found",
            Self::NotReady => "not ready or timed out",
            Self::Conflict => {
                "conflict or precondition (state directory or port in use, immutable field changed, required GPU missing)"
            }
            Self::Unreachable => "unreachable",
            Self::Denied => "denied",
            Self::Incompatible => "incompatible version",
            Self::Interrupted => "interrupted",
        }
    }
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        Self::from(code.number())
    }
}
