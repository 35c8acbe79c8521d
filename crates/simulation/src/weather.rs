//! What a seed decides before its run begins: the size of the cluster, its settings, and which faults it meets how often.
//!
//! Every run has some faults and lacks others: those that always come together would hide what each does alone.

use crate::draw::Draw;
use crate::faults::Fault;
use crate::season::Season;
use engram_cluster::detector::Timing;
use engram_store::Durability;

/// The conditions of one run. Times are in microseconds, chances per thousand.
#[derive(Debug, Clone)]
pub(crate) struct Weather {
    pub(crate) nodes: usize,
    pub(crate) copies: u32,
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
    /// When faults end.
    pub(crate) calm_us: u64,
    /// Between two faults, at most.
    pub(crate) fault_every_us: u64,
    /// Until a process that ended is started again, at most.
    pub(crate) down_us: u64,
    /// Ids of one client while there are faults.
    pub(crate) accounts: usize,
    /// Between two operations of a client, at most.
    pub(crate) think_us: u64,
    pub(crate) delay_us: u64,
    /// A learning run goes on beside the clients.
    pub(crate) epochs: bool,
    /// Few ids are written by all clients, and read in between this often.
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
    /// How fast everybody judges.
    pub(crate) timing: Timing,
    /// The end of a process is reported by its supervisor,
    pub(crate) proof: u64,
    /// so long after it, at most.
    pub(crate) proof_late_us: u64,
    pub(crate) restart_grace_ms: u64,
    pub(crate) copies_at_once: usize,
    /// A decision of the coordinator is replaced by another one, and promotions are made without any.
    pub(crate) erratic: u64,
    pub(crate) false_promotion: u64,
    pub(crate) blind_promotion: u64,
    pub(crate) extra_learner: u64,
    /// Who was just promoted cannot tell the map.
    pub(crate) mute_promoted: u64,
    /// Who was just left alone loses power.
    pub(crate) strike_alone: u64,
    /// A primary that was replaced and runs hears nothing of it, nor of most of the others.
    pub(crate) deafen_deposed: u64,
    /// A process that was just started ends again within 60 ms, alone or with all others.
    pub(crate) strike_started: u64,
    /// Others hear the proof of the death of a process directly, and late.
    pub(crate) hearsay: u64,
    /// One of those that a change of the map names is struck by one of these,
    pub(crate) strike_changed: u64,
    pub(crate) strikes: Vec<Fault>,
    /// so long after it, at most.
    pub(crate) strike_within_us: u64,
    /// Those that are injected one by one; a kind may stand several times.
    pub(crate) faults: Vec<Fault>,
}

/// Injected one by one, with the most weight that a run may give each.
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
    (Fault::HandOver, 3),
    (Fault::DriverDeath, 3),
    (Fault::CoordinatorRestart, 2),
    (Fault::CoordinatorPause, 2),
    (Fault::Drain, 2),
];

impl Weather {
    pub(crate) fn draw(draw: &mut Draw, durability: Durability, season: Option<Season>) -> Self {
        let drawn = Season::draw(draw);
        let season = season.unwrap_or(drawn);
        let nodes = draw.pick(&[2_usize, 3, 3, 3, 4, 5]);
        let copies = if nodes == 2 { 2 } else { draw.pick(&[2, 2, 3]) };
        let mut faults = Vec::new();
        for &(fault, most) in INJECTED {
            let weight = draw.sometimes(most);
            faults.extend((0..weight).map(|_| fault));
        }
        let mut weather = Self {
            nodes,
            copies,
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
            copies_at_once: draw.pick(&[1, 2, 16]),
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
        season.bend(&mut weather, draw);
        if durability == Durability::Async {
            weather.spare_what_is_behind();
        }
        weather
    }
}

impl Weather {
    /// Mode async promises something of what dies, one at a time, while the others are heard: a primary that is cut off goes on
    /// acknowledging until it hears of its successor, and all of that is lost.
    fn spare_what_is_behind(&mut self) {
        self.faults.retain(|fault| ASYNC.contains(fault));
        self.delay_us = self.delay_us.min(3_000);
        (self.loss, self.duplicate, self.reorder) = (0, 0, 0);
        (self.erratic, self.false_promotion, self.blind_promotion, self.extra_learner) = (0, 0, 0, 0);
        (self.mute_promoted, self.strike_alone, self.deafen_deposed, self.strike_changed) = (0, 0, 0, 0);
        self.strike_started = 0;
        (self.map_late, self.map_stale, self.shared_reads, self.epochs) = (0, 0, 0, false);
    }
}

/// What mode async says what it costs.
pub(crate) const ASYNC: &[Fault] = &[
    Fault::Kill,
    Fault::PowerLoss,
    Fault::OrderlyStop,
    Fault::OrderlyPowerOff,
    Fault::PlannedStop,
    Fault::EmptyDisk,
    Fault::ClockStep,
    Fault::HandOver,
    Fault::CoordinatorRestart,
    Fault::Drain,
];

/// The default timing, or a part of it, so that more happens in a run.
fn timing(draw: &mut Draw) -> Timing {
    let (suspect_ms, opinion_ms) = draw.pick(&[(1_200, 3_000), (600, 1_500), (300, 500)]);
    Timing { suspect_ms, opinion_ms, ..Timing::default() }
}
