//! What a run is about: the weather of half the seeds is bent towards one part of the protocol.
//!
//! Weather that has a little of everything seldom has enough of what one rule is about: power that fails within milliseconds of a
//! change of the map, two promotions while an old lease still counts. A season changes how often things happen and after what,
//! never what is right: the same real code runs, and the same is checked.

use crate::draw::Draw;
use crate::faults::Fault;
use crate::weather::Weather;
use engram_cluster::detector::Timing;

/// A part of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Season {
    /// Everything, at the draw's mercy.
    Open,
    /// Who is alone: false suspicions and deaths leave one copy, whose power fails at once.
    Alone,
    /// Old primaries that hear nothing of the new one, and what their leases still allow.
    Leases,
    /// A coordinator that promotes whom it likes, and power that fails.
    Promotions,
    /// Processes that end, in order and not, and what the next one finds.
    Restarts,
    /// Short logs, lost messages, copies of the state on their way.
    Copies,
    /// Bits that flip in stored files.
    Rot,
}

impl Season {
    /// All of them, by name.
    pub const ALL: [(Self, &'static str); 7] = [
        (Self::Open, "open"),
        (Self::Alone, "alone"),
        (Self::Leases, "leases"),
        (Self::Promotions, "promotions"),
        (Self::Restarts, "restarts"),
        (Self::Copies, "copies"),
        (Self::Rot, "rot"),
    ];

    /// The season of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(season, _)| *season)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(season, _)| *season == self).map_or("", |(_, name)| name)
    }

    pub(crate) fn draw(draw: &mut Draw) -> Self {
        if draw.chance(500) { Self::Open } else { Self::ALL[draw.within(1, 6) as usize].0 }
    }

    /// Bends the weather.
    pub(crate) fn bend(self, weather: &mut Weather, draw: &mut Draw) {
        match self {
            Self::Open => return,
            Self::Alone => alone(weather, draw),
            Self::Leases => leases(weather, draw),
            Self::Promotions => promotions(weather, draw),
            Self::Restarts => restarts(weather, draw),
            Self::Copies => copies(weather, draw),
            Self::Rot => rot(weather, draw),
        }
        weather.calm_us = draw.within(3_000_000, 8_000_000);
    }
}

/// One partition, few machines, clients in a hurry, a quick network, judges in a hurry.
fn small_and_busy(weather: &mut Weather, draw: &mut Draw) {
    weather.nodes = draw.pick(&[2, 3, 3]);
    (weather.copies, weather.min_in_sync, weather.partitions) = (2, 1, 1);
    (weather.clients, weather.accounts) = (3, 40);
    weather.think_us = draw.pick(&[8_000, 20_000]);
    weather.delay_us = draw.pick(&[300, 3_000]);
    weather.down_us = draw.pick(&[20_000, 300_000]);
    weather.timing = Timing { suspect_ms: 300, opinion_ms: 500, ..Timing::default() };
    weather.epochs = false;
}

fn alone(weather: &mut Weather, draw: &mut Draw) {
    small_and_busy(weather, draw);
    weather.faults = vec![Fault::FalseSuspicion, Fault::FalseSuspicion, Fault::FalseSuspicion, Fault::Kill];
    weather.fault_every_us = draw.pick(&[100_000, 400_000]);
    weather.proof = draw.pick(&[0, 900]);
    weather.restart_grace_ms = draw.pick(&[0, 500]);
    weather.delay_us = draw.pick(&[300, 3_000, 30_000]);
    weather.strike_alone = draw.pick(&[0, 300, 800]);
    (weather.false_promotion, weather.blind_promotion) = (draw.sometimes(40), 0);
    // The newcomer that ends it is under way for a while.
    weather.map_late = draw.pick(&[0, 500]);
    weather.strike_changed = draw.pick(&[0, 500]);
    weather.strikes = vec![Fault::PowerLoss];
    weather.strike_within_us = draw.pick(&[30_000, 200_000, 1_000_000]);
}

fn leases(weather: &mut Weather, draw: &mut Draw) {
    small_and_busy(weather, draw);
    weather.nodes = draw.pick(&[3, 3, 4]);
    weather.copies = draw.pick(&[2, 3, 3]);
    weather.faults = vec![Fault::Kill, Fault::LinkBreak, Fault::HandOver];
    weather.fault_every_us = draw.pick(&[400_000, 1_500_000]);
    weather.false_promotion = draw.within(20, 120);
    weather.erratic = draw.pick(&[0, 500]);
    weather.blind_promotion = 0;
    weather.deafen_deposed = draw.pick(&[500, 950]);
    weather.hearsay = draw.pick(&[300, 900]);
    (weather.proof, weather.proof_late_us) = (draw.pick(&[500, 950]), draw.pick(&[60_000, 800_000, 2_500_000]));
    weather.strike_changed = draw.pick(&[0, 200, 500]);
    weather.strikes = vec![Fault::Kill, Fault::Kill, Fault::EmptyDisk];
    weather.strike_within_us = draw.pick(&[100_000, 600_000]);
    weather.down_us = 20_000;
}

fn promotions(weather: &mut Weather, draw: &mut Draw) {
    small_and_busy(weather, draw);
    weather.copies = if weather.nodes == 2 { 2 } else { draw.pick(&[2, 2, 3]) };
    weather.faults = vec![Fault::PowerLoss, Fault::PowerLoss, Fault::Kill, Fault::Pause, Fault::OneWayPartition];
    weather.fault_every_us = draw.pick(&[200_000, 800_000]);
    weather.false_promotion = draw.within(30, 200);
    weather.blind_promotion = draw.pick(&[0, 300, 800]);
    weather.erratic = draw.pick(&[300, 900]);
    weather.mute_promoted = draw.sometimes(400);
    weather.deafen_deposed = draw.sometimes(300);
    weather.map_late = draw.sometimes(400);
    weather.map_duplicate = draw.sometimes(400);
    weather.strike_changed = draw.pick(&[0, 200, 500]);
    weather.strikes = vec![Fault::PowerLoss, Fault::PowerLoss, Fault::Kill, Fault::EmptyDisk];
    weather.strike_within_us = draw.pick(&[10_000, 100_000, 600_000]);
}

fn restarts(weather: &mut Weather, draw: &mut Draw) {
    small_and_busy(weather, draw);
    let ends = [Fault::OrderlyStop, Fault::OrderlyPowerOff, Fault::PowerLoss, Fault::Kill, Fault::KillMidway];
    weather.faults = ends.to_vec();
    weather.faults.push(Fault::PlannedStop);
    weather.faults.extend((0..draw.below(4)).map(|_| Fault::SyncFailure));
    weather.faults.extend((0..draw.below(4)).map(|_| Fault::EmptyDisk));
    weather.fault_every_us = draw.pick(&[100_000, 300_000, 900_000]);
    weather.down_us = draw.pick(&[8_000, 50_000]);
    weather.false_promotion = draw.sometimes(100);
    weather.blind_promotion = 0;
    weather.strike_changed = draw.sometimes(300);
    weather.strikes = vec![Fault::OrderlyPowerOff, Fault::PowerLoss];
    weather.strike_within_us = draw.pick(&[10_000, 300_000]);
}

fn copies(weather: &mut Weather, draw: &mut Draw) {
    small_and_busy(weather, draw);
    weather.nodes = draw.pick(&[3, 4, 5]);
    weather.copies = draw.pick(&[2, 3]);
    weather.min_in_sync = draw.pick(&[1, 1, 2]);
    weather.kept_bytes = 300;
    weather.snapshot_bytes = 48 << 10;
    weather.snapshot_ms = draw.pick(&[300, 1_000]);
    weather.faults = vec![Fault::Kill, Fault::PowerLoss, Fault::LinkBreak, Fault::FalseSuspicion, Fault::EmptyDisk];
    weather.faults.extend([Fault::Drain, Fault::PlannedStop]);
    weather.fault_every_us = draw.pick(&[100_000, 400_000]);
    weather.delay_us = draw.pick(&[3_000, 30_000]);
    weather.loss = draw.sometimes(100);
    weather.reorder = draw.sometimes(300);
    weather.duplicate = draw.sometimes(300);
    weather.map_lost = draw.sometimes(400);
    weather.map_late = draw.sometimes(400);
    weather.false_promotion = draw.sometimes(100);
    weather.erratic = draw.sometimes(800);
    weather.extra_learner = draw.sometimes(100);
    weather.strike_changed = draw.pick(&[0, 300, 700]);
    weather.strikes = vec![Fault::Kill, Fault::PowerLoss, Fault::LinkBreak];
    weather.strike_within_us = draw.pick(&[10_000, 60_000, 600_000]);
}

fn rot(weather: &mut Weather, draw: &mut Draw) {
    small_and_busy(weather, draw);
    weather.faults = vec![Fault::BitFlip, Fault::BitFlip, Fault::Kill, Fault::Kill, Fault::OrderlyStop];
    weather.fault_every_us = draw.pick(&[100_000, 300_000, 900_000]);
    weather.delay_us = draw.pick(&[300, 3_000, 30_000]);
    weather.proof = draw.pick(&[0, 900]);
    weather.strike_started = draw.pick(&[0, 200, 500]);
    weather.snapshot_bytes = 48 << 10;
    weather.snapshot_ms = draw.pick(&[300, 1_000]);
    weather.scrub_ms = draw.pick(&[300, 3_000, 0]);
    weather.down_us = draw.pick(&[8_000, 50_000]);
    weather.false_promotion = draw.sometimes(100);
    weather.strike_changed = draw.sometimes(300);
    weather.strikes = vec![Fault::BitFlip, Fault::Kill];
    weather.strike_within_us = draw.pick(&[60_000, 600_000]);
}
