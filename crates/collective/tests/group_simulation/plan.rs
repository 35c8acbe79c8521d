//! What happens in a run: settings, faults and injected bugs, all from a seed.

use engram_collective::group::{Quorum, Settings, Timing};

use crate::random::Random;
use crate::world::SERVICE;

/// An injected bug of the drivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bug {
    /// The reduction overwrites the kept sums.
    ReducesInPlace,
    /// A returner with any state keeps it and reports the requested position.
    TrustsStepNumber,
    /// The store confirms a record before it is durable.
    PublishesBeforeRecord,
    /// A stopped process still reports and answers probes, and its peers do not report missing chunks.
    HeartbeatWithoutProgress,
    /// A member commits as soon as it has reduced, without the flags of the others.
    CommitsAlone,
    /// The last member of a group applies a gradient of zeros.
    DropsGradientsAlone,
    /// A process that starts later does not report to the service.
    NeverReturns,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The process ends; with `broken`, its connections are reset.
    Kill { member: usize, broken: bool },
    /// The process is stopped and continues later.
    Stop { member: usize, for_ms: u64 },
    /// Nothing passes between two processes, or a process and the service.
    Cut { between: (usize, usize), for_ms: u64 },
    /// Another worker takes over the service; the old one runs on for a while if `overlap`.
    Failover { after_ms: u64, overlap: bool },
    /// A new process starts: blank, or with the state of a dead one.
    Start { from: Option<usize> },
    /// A member leaves as planned.
    Leave { member: usize },
}

/// What a run consists of.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) members: usize,
    pub(crate) settings: Settings,
    pub(crate) loss: f64,
    /// Time of a transfer of the state.
    pub(crate) fetch_ms: u64,
    pub(crate) faults: Vec<(u64, Fault)>,
}

impl Plan {
    pub(crate) fn quiet(members: usize, detect_ms: u64) -> Self {
        let settings = Settings { timing: Timing::new(detect_ms), min_members: 1, quorum: Quorum::StoreTerm };
        Self { seed: 7, members, settings, loss: 0.0, fetch_ms: 10, faults: Vec::new() }
    }

    pub(crate) fn random(seed: u64) -> Self {
        let mut random = Random(seed);
        let members = 2 + random.below(4) as usize;
        let majority = members >= 3 && random.below(3) == 0;
        let min_members = 1 + random.below(2) as usize;
        let quorum = if majority { Quorum::Majority } else { Quorum::StoreTerm };
        let settings = Settings { timing: Timing::new(200), min_members, quorum };
        let mut faults = Vec::new();
        let mut at = 500;
        for _ in 0..3 + random.below(6) {
            at += random.below(1_200);
            let member = random.below(members as u64 + 2) as usize;
            let other = random.below(members as u64 + 1) as usize;
            let other = if other == members { SERVICE } else { other };
            let for_ms = 50 + random.below(1_500);
            faults.push((
                at,
                match random.below(if majority { 6 } else { 9 }) {
                    0 | 1 => Fault::Stop { member, for_ms },
                    2 | 3 => Fault::Cut { between: (member, other), for_ms },
                    4 => Fault::Failover { after_ms: random.below(800), overlap: random.below(2) == 0 },
                    5 => Fault::Start { from: (random.below(2) == 0).then_some(member) },
                    6 => Fault::Leave { member },
                    _ => Fault::Kill { member, broken: random.below(4) > 0 },
                },
            ));
        }
        let loss = [0.0, 0.0, 0.01, 0.05][random.below(4) as usize];
        let fetch_ms = [5, 20, 60, 300][random.below(4) as usize];
        Self { seed, members, settings, loss, fetch_ms, faults }
    }
}

/// What a run reached.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Summary {
    pub(crate) steps: u64,
    pub(crate) generations: u64,
    pub(crate) repeated_reductions: u64,
    pub(crate) finished_by_service: u64,
    pub(crate) transfers: u64,
    pub(crate) deposed: u64,
    pub(crate) longest_gap_ms: u64,
}

impl std::ops::AddAssign for Summary {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.generations += other.generations;
        self.repeated_reductions += other.repeated_reductions;
        self.finished_by_service += other.finished_by_service;
        self.transfers += other.transfers;
        self.deposed += other.deposed;
        self.longest_gap_ms = self.longest_gap_ms.max(other.longest_gap_ms);
    }
}
