//! Exit codes of the `engram` command. Scripts branch on them: a code never changes its meaning.

/// What a command's end means. `engram check` alone has codes of its own: it is a monitoring probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ExitCode {
    /// It did what it was asked.
    Ok = 0,
    /// It failed.
    Failed = 1,
    /// It was asked wrongly: the command line, or a manifest that does not validate.
    Usage = 2,
    /// Something that was named is not there.
    NotFound = 3,
    /// Not ready, or out of time.
    NotReady = 4,
    /// Something is in the way: state directory or port in use, immutable field changed, required GPU missing.
    Conflict = 5,
    /// Nobody answers.
    Unreachable = 6,
    /// Not allowed.
    Denied = 7,
    /// Versions that do not go together.
    Incompatible = 8,
    /// Stopped by a signal from the keyboard.
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

    /// Returns the number that the process ends with.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Returns the meaning, for the documentation.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed => "failed",
            Self::Usage => "usage; a manifest that does not validate",
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
