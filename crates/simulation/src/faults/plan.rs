//! The fault plan of a run, drawn from its seed: cluster size, settings, and the rates of its faults.
//!
//! Every run has some faults and lacks others: faults that always come together would hide the effect of each.

use crate::draw::Draw;
use crate::faults::Fault;
use crate::faults::scenario::Scenario;
use engram_cluster::detector::Timing;
use engram_store::Durability;

/// The conditions of one run. Times are in microseconds, chances per thousand.
#[derive(Debug, Clone)]
pub(crate) struct FaultPlan {
    pub(crate) nodes: usize,
    pub(crate) replicas: u32,
    pub(crate) min_in_sync: usize,
    pub(crate) partitions: u32,
    pub(crate) clients: usize,
    pub(crate) durability: Durability,
    pub(crate) kept_bytes: usize,
    pub(crate) segment_bytes: u64,
    pub(crate) snapshot_bytes: u64,
    pub(crate) snapshot_ms: u64,
    pub(crate) digest_ms: u64,
    pub(crate) scrub_ms: u64,
    /// End of the faults.
    pub(crate) calm_us: u64,
    /// Maximum time between two faults.
    pub(crate) fault_every_us: u64,
    /// Maximum downtime of a process.
    pub(crate) down_us: u64,
    /// Ids per client while there are faults.
    pub(crate) accounts: usize,
    /// Maximum time between two operations of a client.
    pub(crate) think_us: u64,
    pub(crate) delay_us: u64,
    /// A learning run goes on alongside the clients.
    pub(crate) epochs: bool,
    /// Few ids are shared by all clients, with reads in between at this rate.
    pub(crate) shared_reads: u64,
    pub(crate) loss: u64,
    pub(crate) duplicate: u64,
    pub(crate) reorder: u64,
    pub(crate) map_late: u64,
    pub(crate) map_lost: u64,
    pub(crate) map_duplicate: u64,
    pub(crate) map_stale: u64,
    pub(crate) request_again: u64,
    pub(crate) request_lost: u64,
    /// Timing of all detectors.
    pub(crate) timing: Timing,
    /// Chance that a supervisor reports the end of a process,
    pub(crate) proof: u64,
    /// within this time.
    pub(crate) proof_late_us: u64,
    pub(crate) restart_grace_ms: u64,
    pub(crate) max_transfers: usize,
    /// Chance that a decision of the coordinator is replaced by another one; promotions are made without any.
    pub(crate) erratic: u64,
    pub(crate) false_promotion: u64,
    pub(crate) blind_promotion: u64,
    pub(crate) extra_learner: u64,
    /// A just promoted primary cannot reach the map.
    pub(crate) mute_promoted: u64,
    /// A just created single replica loses power.
    pub(crate) strike_alone: u64,
    /// A deposed primary that still runs does not learn of it, nor most of the others.
    pub(crate) deafen_deposed: u64,
    /// A just started process ends again within 60 ms, alone or with all others.
    pub(crate) strike_started: u64,
    /// Others receive proof of the death of a process directly, and late.
    pub(crate) hearsay: u64,
    /// Chance that a node named by a map change suffers one of these,
    pub(crate) strike_changed: u64,
    pub(crate) strikes: Vec<Fault>,
    /// within this time.
    pub(crate) strike_within_us: u64,
    /// Faults injected one by one; a kind may occur several times.
    pub(crate) faults: Vec<Fault>,
}

/// Faults injected one by one, with the maximum weight of each in a run.
const INJECTED: &[(Fault, u64)] = &[
    (Fault::Kill, 4),
    (Fault::KillMidway, 4),
    (Fault::PowerLoss, 4),
    (Fault::OrderlyStop, 2),
    (Fault::OrderlyPowerOff, 2),
    (Fault::PlannedStop, 2),
    (Fault::EmptyDisk, 2),
    (Fault::DiskFull, 2),
    (Fault::WriteError, 2),
    (Fault::SyncFailure, 2),
    (Fault::BitFlip, 2),
    (Fault::Pause, 3),
    (Fault::ClockStep, 1),
    (Fault::Partition, 4),
    (Fault::OneWayPartition, 3),
    (Fault::LinkBreak, 3),
    (Fault::FalseSuspicion, 3),
    (Fault::LeadershipTransfer, 3),
    (Fault::DriverDeath, 3),
    (Fault::CoordinatorRestart, 2),
    (Fault::CoordinatorPause, 2),
    (Fault::Drain, 2),
];

impl FaultPlan {
    pub(crate) fn draw(draw: &mut Draw, durability: Durability, scenario: Option<Scenario>) -> Self {
        let drawn = Scenario::draw(draw);
        let scenario = scenario.unwrap_or(drawn);
        let nodes = draw.pick(&[2_usize, 3, 3, 3, 4, 5]);
        let replicas = if nodes == 2 { 2 } else { draw.pick(&[2, 2, 3]) };
        let mut faults = Vec::new();
        for &(fault, most) in INJECTED {
            let weight = draw.sometimes(most);
            faults.extend((0..weight).map(|_| fault));
        }
        let mut plan = Self {
            nodes,
            replicas,
            min_in_sync: if draw.chance(200) { 2 } else { 1 },
            partitions: draw.pick(&[1, 1, 2, 3]),
            clients: draw.pick(&[1, 2, 3]),
            durability,
            kept_bytes: draw.pick(&[300, 2_000, 1 << 20]),
            segment_bytes: draw.pick(&[32 << 10, 64 << 10, 256 << 10]),
            snapshot_bytes: draw.pick(&[48 << 10, 200 << 10, 4 << 20]),
            snapshot_ms: draw.pick(&[500, 3_000, 60_000]),
            digest_ms: draw.pick(&[300, 3_000, 3_600_000]),
            scrub_ms: draw.pick(&[300, 3_000, 0]),
            calm_us: draw.within(2_000_000, 12_000_000),
            fault_every_us: draw.pick(&[100_000, 400_000, 1_500_000]),
            down_us: draw.pick(&[50_000, 500_000, 3_000_000]),
            accounts: 12,
            think_us: draw.pick(&[20_000, 100_000, 400_000]),
            delay_us: draw.pick(&[300, 3_000, 30_000]),
            epochs: draw.chance(400) && durability != Durability::Async,
            shared_reads: if draw.chance(300) { draw.within(300, 700) } else { 0 },
            loss: draw.sometimes(60),
            duplicate: draw.sometimes(150),
            reorder: draw.sometimes(150),
            map_late: draw.sometimes(250),
            map_lost: draw.sometimes(200),
            map_duplicate: draw.sometimes(200),
            map_stale: draw.sometimes(250),
            request_again: draw.sometimes(200),
            request_lost: draw.sometimes(200),
            timing: timing(draw),
            proof: draw.pick(&[0, 500, 900]),
            proof_late_us: 60_000,
            restart_grace_ms: draw.pick(&[0, 500, 3_000]),
            max_transfers: draw.pick(&[1, 2, 16]),
            erratic: draw.sometimes(700),
            false_promotion: draw.sometimes(60),
            blind_promotion: draw.sometimes(300),
            extra_learner: draw.sometimes(40),
            mute_promoted: draw.sometimes(300),
            strike_alone: draw.sometimes(500),
            deafen_deposed: 0,
            strike_started: 0,
            hearsay: 300,
            strike_changed: 0,
            strikes: Vec::new(),
            strike_within_us: 0,
            faults,
        };
        scenario.apply(&mut plan, draw);
        if durability == Durability::Async {
            plan.limit_to_async_faults();
        }
        plan
    }
}

impl FaultPlan {
    /// Mode async makes promises for single deaths while the others are connected: a primary that is cut off keeps
    /// acknowledging until it learns of its successor, and all of that is lost.
    fn limit_to_async_faults(&mut self) {
        self.faults.retain(|fault| ASYNC.contains(fault));
        self.delay_us = self.delay_us.min(3_000);
        (self.loss, self.duplicate, self.reorder) = (0, 0, 0);
        (self.erratic, self.false_promotion, self.blind_promotion, self.extra_learner) = (0, 0, 0, 0);
        (self.mute_promoted, self.strike_alone, self.deafen_deposed, self.strike_changed) = (0, 0, 0, 0);
        self.strike_started = 0;
        (self.map_late, self.map_stale, self.shared_reads, self.epochs) = (0, 0, 0, false);
    }
}

/// Faults whose cost mode async documents.
pub(crate) const ASYNC: &[Fault] = &[
    Fault::Kill,
    Fault::PowerLoss,
    Fault::OrderlyStop,
    Fault::OrderlyPowerOff,
    Fault::PlannedStop,
    Fault::EmptyDisk,
    Fault::ClockStep,
    Fault::LeadershipTransfer,
    Fault::CoordinatorRestart,
    Fault::Drain,
];

/// The default timing, or a fraction of it, so that more happens in a run.
fn timing(draw: &mut Draw) -> Timing {
    let (suspect_ms, opinion_ms) = draw.pick(&[(1_200, 3_000), (600, 1_500), (300, 500)]);
    Timing { suspect_ms, warmup_ms: opinion_ms, ..Timing::default() }
}
