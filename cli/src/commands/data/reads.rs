//! `--read` and `--max-lag`: how a read is answered.

use engram_client::ReadMode;
use std::time::Duration;

/// How a read is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// At the primary, under its read leases
    Linearizable,
    /// At the primary, after every copy in sync has said that it leads; rests on no clock
    Confirmed,
    /// Of any copy that lags by at most --max-lag
    Replica,
}

/// How the memories of all workers are read.
#[derive(Debug, clap::Args)]
pub(super) struct Reads {
    /// How the read is answered
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Mode::Linearizable)]
    read: Mode,
    /// With --read replica: how many milliseconds a copy may lag
    #[arg(long, value_name = "MS", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(0..=86_400_000))]
    max_lag: u64,
}

impl Reads {
    pub(super) const fn mode(&self) -> ReadMode {
        match self.read {
            Mode::Linearizable => ReadMode::Linearizable,
            Mode::Confirmed => ReadMode::Confirmed,
            Mode::Replica => ReadMode::Replica { max_lag: Duration::from_millis(self.max_lag) },
        }
    }
}

/// How a read is answered that only a primary answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum PrimaryMode {
    /// Under read leases
    Linearizable,
    /// After every copy in sync has said that the primary leads; rests on no clock
    Confirmed,
}

/// How the memories that are named are read.
#[derive(Debug, clap::Args)]
pub(super) struct PrimaryReads {
    /// How the read is answered
    #[arg(long, value_name = "MODE", value_enum, default_value_t = PrimaryMode::Linearizable)]
    read: PrimaryMode,
}

impl PrimaryReads {
    pub(super) const fn mode(&self) -> ReadMode {
        match self.read {
            PrimaryMode::Linearizable => ReadMode::Linearizable,
            PrimaryMode::Confirmed => ReadMode::Confirmed,
        }
    }
}
