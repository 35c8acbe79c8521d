//! `--read` and `--max-lag`: consistency of reads.

use engram_client::ReadMode;
use std::time::Duration;

/// Consistency of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// Read from the primary under its read lease
    Linearizable,
    /// Read from the primary after all in-sync replicas confirm it; independent of clocks
    Confirmed,
    /// Read from any replica that lags by at most --max-lag
    Replica,
}

/// Consistency options of reads from all workers.
#[derive(Debug, clap::Args)]
pub(super) struct Reads {
    /// Consistency of the read
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Mode::Linearizable)]
    read: Mode,
    /// Maximum replication lag in milliseconds, with --read replica
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

/// Consistency of a read that only primaries serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum PrimaryMode {
    /// Read under the read lease of the primary
    Linearizable,
    /// Read after all in-sync replicas confirm the primary; independent of clocks
    Confirmed,
}

/// Consistency options of reads by key or id.
#[derive(Debug, clap::Args)]
pub(super) struct PrimaryReads {
    /// Consistency of the read
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
