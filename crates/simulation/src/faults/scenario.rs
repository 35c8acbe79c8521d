//! Scenarios: half the seeds focus their fault plan on one part of the protocol.
//!
//! A plan with a little of everything seldom has enough of what one rule is about: a power loss within milliseconds of
//! a map change, two promotions while an old lease still counts. A scenario changes how often things happen and after
//! what, never what is correct: the same real code runs, and the same invariants are checked.

use crate::draw::Draw;
use crate::faults::Fault;
use crate::faults::plan::FaultPlan;
use engram_cluster::detector::Timing;

/// A part of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scenario {
    /// Everything, without focus.
    Open,
    /// Single replicas: false suspicions and deaths leave one replica, whose power fails at once.
    Alone,
    /// Old primaries that do not learn of the new one, and their remaining leases.
    Leases,
    /// An erratic coordinator, and power losses.
    Promotions,
    /// Process stops, orderly and not, and what the next process recovers.
    Restarts,
    /// Short logs, lost messages, snapshots in flight.
    Copies,
    /// Bit flips in stored files.
    Rot,
}

impl Scenario {
    /// All scenarios, by name.
    pub const ALL: [(Self, &'static str); 7] = [
        (Self::Open, "open"),
        (Self::Alone, "alone"),
        (Self::Leases, "leases"),
        (Self::Promotions, "promotions"),
        (Self::Restarts, "restarts"),
        (Self::Copies, "copies"),
        (Self::Rot, "rot"),
    ];

    /// Finds a scenario by name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, other)| *other == name).map(|(scenario, _)| *scenario)
    }

    /// Returns its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(scenario, _)| *scenario == self).map_or("", |(_, name)| name)
    }

    pub(crate) fn draw(draw: &mut Draw) -> Self {
        if draw.chance(500) { Self::Open } else { Self::ALL[draw.within(1, 6) as usize].0 }
    }

    /// Applies the scenario to a fault plan.
    pub(crate) fn apply(self, plan: &mut FaultPlan, draw: &mut Draw) {
        match self {
            Self::Open => return,
            Self::Alone => alone(plan, draw),
            Self::Leases => leases(plan, draw),
            Self::Promotions => promotions(plan, draw),
            Self::Restarts => restarts(plan, draw),
            Self::Copies => copies(plan, draw),
            Self::Rot => rot(plan, draw),
        }
        plan.calm_us = draw.within(3_000_000, 8_000_000);
    }
}

/// One partition, few machines, eager clients, a fast network, fast detectors.
fn small_and_busy(plan: &mut FaultPlan, draw: &mut Draw) {
    plan.nodes = draw.pick(&[2, 3, 3]);
    (plan.replicas, plan.min_in_sync, plan.partitions) = (2, 1, 1);
    (plan.clients, plan.accounts) = (3, 40);
    plan.think_us = draw.pick(&[8_000, 20_000]);
    plan.delay_us = draw.pick(&[300, 3_000]);
    plan.down_us = draw.pick(&[20_000, 300_000]);
    plan.timing = Timing { suspect_ms: 300, warmup_ms: 500, ..Timing::default() };
    plan.epochs = false;
}

fn alone(plan: &mut FaultPlan, draw: &mut Draw) {
    small_and_busy(plan, draw);
    plan.faults = vec![Fault::FalseSuspicion, Fault::FalseSuspicion, Fault::FalseSuspicion, Fault::Kill];
    plan.fault_every_us = draw.pick(&[100_000, 400_000]);
    plan.proof = draw.pick(&[0, 900]);
    plan.restart_grace_ms = draw.pick(&[0, 500]);
    plan.delay_us = draw.pick(&[300, 3_000, 30_000]);
    plan.strike_alone = draw.pick(&[0, 300, 800]);
    (plan.false_promotion, plan.blind_promotion) = (draw.sometimes(40), 0);
    // The newcomer that ends the single-replica state takes a while.
    plan.map_late = draw.pick(&[0, 500]);
    plan.strike_changed = draw.pick(&[0, 500]);
    plan.strikes = vec![Fault::PowerLoss];
    plan.strike_within_us = draw.pick(&[30_000, 200_000, 1_000_000]);
}

fn leases(plan: &mut FaultPlan, draw: &mut Draw) {
    small_and_busy(plan, draw);
    plan.nodes = draw.pick(&[3, 3, 4]);
    plan.replicas = draw.pick(&[2, 3, 3]);
    plan.faults = vec![Fault::Kill, Fault::LinkBreak, Fault::LeadershipTransfer];
    plan.fault_every_us = draw.pick(&[400_000, 1_500_000]);
    plan.false_promotion = draw.within(20, 120);
    plan.erratic = draw.pick(&[0, 500]);
    plan.blind_promotion = 0;
    plan.deafen_deposed = draw.pick(&[500, 950]);
    plan.hearsay = draw.pick(&[300, 900]);
    (plan.proof, plan.proof_late_us) = (draw.pick(&[500, 950]), draw.pick(&[60_000, 800_000, 2_500_000]));
    plan.strike_changed = draw.pick(&[0, 200, 500]);
    plan.strikes = vec![Fault::Kill, Fault::Kill, Fault::EmptyDisk];
    plan.strike_within_us = draw.pick(&[100_000, 600_000]);
    plan.down_us = 20_000;
}

fn promotions(plan: &mut FaultPlan, draw: &mut Draw) {
    small_and_busy(plan, draw);
    plan.replicas = if plan.nodes == 2 { 2 } else { draw.pick(&[2, 2, 3]) };
    plan.faults = vec![Fault::PowerLoss, Fault::PowerLoss, Fault::Kill, Fault::Pause, Fault::OneWayPartition];
    plan.fault_every_us = draw.pick(&[200_000, 800_000]);
    plan.false_promotion = draw.within(30, 200);
    plan.blind_promotion = draw.pick(&[0, 300, 800]);
    plan.erratic = draw.pick(&[300, 900]);
    plan.mute_promoted = draw.sometimes(400);
    plan.deafen_deposed = draw.sometimes(300);
    plan.map_late = draw.sometimes(400);
    plan.map_duplicate = draw.sometimes(400);
    plan.strike_changed = draw.pick(&[0, 200, 500]);
    plan.strikes = vec![Fault::PowerLoss, Fault::PowerLoss, Fault::Kill, Fault::EmptyDisk];
    plan.strike_within_us = draw.pick(&[10_000, 100_000, 600_000]);
}

fn restarts(plan: &mut FaultPlan, draw: &mut Draw) {
    small_and_busy(plan, draw);
    let ends = [Fault::OrderlyStop, Fault::OrderlyPowerOff, Fault::PowerLoss, Fault::Kill, Fault::KillMidway];
    plan.faults = ends.to_vec();
    plan.faults.push(Fault::PlannedStop);
    plan.faults.extend((0..draw.below(4)).map(|_| Fault::SyncFailure));
    plan.faults.extend((0..draw.below(4)).map(|_| Fault::EmptyDisk));
    plan.fault_every_us = draw.pick(&[100_000, 300_000, 900_000]);
    plan.down_us = draw.pick(&[8_000, 50_000]);
    plan.false_promotion = draw.sometimes(100);
    plan.blind_promotion = 0;
    plan.strike_changed = draw.sometimes(300);
    plan.strikes = vec![Fault::OrderlyPowerOff, Fault::PowerLoss];
    plan.strike_within_us = draw.pick(&[10_000, 300_000]);
}

fn copies(plan: &mut FaultPlan, draw: &mut Draw) {
    small_and_busy(plan, draw);
    plan.nodes = draw.pick(&[3, 4, 5]);
    plan.replicas = draw.pick(&[2, 3]);
    plan.min_in_sync = draw.pick(&[1, 1, 2]);
    plan.kept_bytes = 300;
    plan.snapshot_bytes = 48 << 10;
    plan.snapshot_ms = draw.pick(&[300, 1_000]);
    plan.faults = vec![Fault::Kill, Fault::PowerLoss, Fault::LinkBreak, Fault::FalseSuspicion, Fault::EmptyDisk];
    plan.faults.extend([Fault::Drain, Fault::PlannedStop]);
    plan.fault_every_us = draw.pick(&[100_000, 400_000]);
    plan.delay_us = draw.pick(&[3_000, 30_000]);
    plan.loss = draw.sometimes(100);
    plan.reorder = draw.sometimes(300);
    plan.duplicate = draw.sometimes(300);
    plan.map_lost = draw.sometimes(400);
    plan.map_late = draw.sometimes(400);
    plan.false_promotion = draw.sometimes(100);
    plan.erratic = draw.sometimes(800);
    plan.extra_learner = draw.sometimes(100);
    plan.strike_changed = draw.pick(&[0, 300, 700]);
    plan.strikes = vec![Fault::Kill, Fault::PowerLoss, Fault::LinkBreak];
    plan.strike_within_us = draw.pick(&[10_000, 60_000, 600_000]);
}

fn rot(plan: &mut FaultPlan, draw: &mut Draw) {
    small_and_busy(plan, draw);
    plan.faults = vec![Fault::BitFlip, Fault::BitFlip, Fault::Kill, Fault::Kill, Fault::OrderlyStop];
    plan.fault_every_us = draw.pick(&[100_000, 300_000, 900_000]);
    plan.delay_us = draw.pick(&[300, 3_000, 30_000]);
    plan.proof = draw.pick(&[0, 900]);
    plan.strike_started = draw.pick(&[0, 200, 500]);
    plan.snapshot_bytes = 48 << 10;
    plan.snapshot_ms = draw.pick(&[300, 1_000]);
    plan.scrub_ms = draw.pick(&[300, 3_000, 0]);
    plan.down_us = draw.pick(&[8_000, 50_000]);
    plan.false_promotion = draw.sometimes(100);
    plan.strike_changed = draw.sometimes(300);
    plan.strikes = vec![Fault::BitFlip, Fault::Kill];
    plan.strike_within_us = draw.pick(&[60_000, 600_000]);
}
