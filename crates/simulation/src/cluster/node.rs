//! One machine: its disk, its clocks, and its process, which runs the real store.

use crate::cluster::liveness::LivenessTracker;
use crate::draw::Draw;
use crate::faults::Fault;
use crate::faults::inject::NEAR_STEP_MS;
use crate::faults::plan::FaultPlan;
use engram_cluster::Entry;
use engram_cluster::detector::Timing;
use engram_kernels::Cpu;
use engram_memory::{
    ClusterId, FeatureShape, Incarnation, Law, Lsn, Member, Ordinal, PartitionId, Settings, Shape, Term, Weight,
};
use engram_store::disk::Disk;
use engram_store::peer::{Envelope, Proposal};
use engram_store::{
    CommittedWrite, Durability, Error, ManualClock, Options, Origin, Peers, SimDisk, Store, WriteError,
};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// Cluster id of every simulation.
pub(crate) const CLUSTER: ClusterId = ClusterId(7);
/// Interval of session expiry in runs with clock steps: several times per run.
const EXPIRY_MS: u64 = 400;
/// Payloads in memory: a few, so that most are read from the disk.
const PAYLOAD_CACHE_BYTES: u64 = 64 << 10;
/// Small, so that segments are closed and compacted.
const PAYLOAD_SEGMENT_BYTES: u32 = 128 << 10;
/// Wall time at the start of a run.
pub(crate) const START_MS: u64 = 1_700_000_000_000;

/// Answer to the attempt of a client, by its number.
pub(crate) type Answer = (u64, Result<CommittedWrite, WriteError>);

/// Output of a store since it was last taken.
#[derive(Default)]
pub(crate) struct StoreOutput {
    pub(crate) sent: Vec<(Ordinal, Vec<Envelope>)>,
    pub(crate) proposals: Vec<Proposal>,
    pub(crate) answers: Vec<Answer>,
}

/// Receives the output of a store.
#[derive(Clone, Default)]
pub(crate) struct StoreSink(Arc<Mutex<StoreOutput>>);

impl StoreSink {
    pub(crate) fn take(&self) -> StoreOutput {
        std::mem::take(&mut *self.0.lock().expect("one thread"))
    }

    pub(crate) fn answer(&self, answer: Answer) {
        self.0.lock().expect("one thread").answers.push(answer);
    }
}

impl Peers for StoreSink {
    fn send(&mut self, to: Ordinal, envelopes: Vec<Envelope>) {
        self.0.lock().expect("one thread").sent.push((to, envelopes));
    }

    fn propose(&mut self, proposals: Vec<Proposal>) {
        self.0.lock().expect("one thread").proposals.extend(proposals);
    }
}

/// A running process.
pub(crate) struct Process {
    pub(crate) store: Store,
    pub(crate) member: Member,
    pub(crate) lossless_since: Incarnation,
    pub(crate) out: StoreSink,
    /// Number of the process on this machine.
    pub(crate) number: u64,
    pub(crate) liveness: LivenessTracker,
    /// Deadline of its drain, if it is leaving.
    pub(crate) leaves_until_us: Option<u64>,
    /// Last observed applied record, by partition.
    pub(crate) applied: Vec<(Term, Lsn)>,
}

/// A machine.
pub(crate) struct Node {
    ordinal: Ordinal,
    options: Options,
    pub(crate) disk: SimDisk,
    clock: Arc<ManualClock>,
    /// Drift of its clocks from the world's, in parts per million.
    rate_ppm: i64,
    boot: u128,
    booted_us: u64,
    passed_ms: u64,
    /// Offset of its wall clock from the world's.
    wall_offset_ms: i64,
    pub(crate) process: Option<Process>,
    /// Events are delayed until then.
    pub(crate) paused_until_us: u64,
    /// A turn is due.
    pub(crate) turns: bool,
    /// A false suspicion, and its end.
    pub(crate) false_suspicion: Option<(Ordinal, u64)>,
    /// A disk fault was planned since the last repair: a start may fail.
    pub(crate) disk_suffers: bool,
    /// The current or next process counts as having lost what it had not synced.
    pub(crate) lost_power: bool,
    /// Its streams did not end with the last process: the machine is gone.
    pub(crate) vanished: bool,
    /// Snapshots installed by earlier processes.
    snapshots: u64,
    /// Bits of the disk flipped since a process found it intact: it may miss anything.
    pub(crate) flipped: bool,
    /// Bits of the disk flipped at some time.
    pub(crate) was_flipped: bool,
    /// Partitions with a damaged replica, as known by the last process.
    damaged: BTreeSet<PartitionId>,
    /// Processes started.
    started: u64,
    /// The last ended process, until the others are notified.
    pub(crate) ended: Option<(Member, u64)>,
    /// The last process on this disk, and its `lossless_since`; `None` for an unused disk.
    pub(crate) known: Option<(Member, Incarnation)>,
}

impl Node {
    pub(crate) fn new(ordinal: u32, plan: &FaultPlan, draw: &mut Draw) -> Self {
        let shape = Shape { partitions: plan.partitions, law: Law::Linear, features: FeatureShape::NONE };
        let settings = Settings { initial_weight: Weight::ZERO, ..Settings::default() };
        let mut options = Options::new(CLUSTER, shape, settings);
        options.replication.ordinal = Ordinal(ordinal);
        options.replication.replicas = plan.replicas;
        options.replication.min_in_sync = plan.min_in_sync;
        options.replication.retained_bytes = plan.kept_bytes;
        options.wal.durability = plan.durability;
        options.wal.segment_bytes = plan.segment_bytes;
        options.snapshot_bytes = plan.snapshot_bytes;
        options.snapshot_ms = plan.snapshot_ms;
        options.digest_ms = plan.digest_ms;
        options.scrub_ms = plan.scrub_ms;
        options.payload_cache_bytes = PAYLOAD_CACHE_BYTES;
        options.payload_segment_bytes = PAYLOAD_SEGMENT_BYTES;
        if plan.faults.contains(&Fault::ClockStep) {
            options.expiry_ms = EXPIRY_MS;
        }
        Self {
            ordinal: Ordinal(ordinal),
            options,
            disk: SimDisk::new(draw.next()),
            clock: Arc::new(ManualClock::new(START_MS)),
            rate_ppm: draw.below(20_001) as i64 - 10_000,
            boot: u128::from(draw.next()) + 1,
            booted_us: 0,
            passed_ms: 0,
            wall_offset_ms: 0,
            process: None,
            paused_until_us: 0,
            turns: false,
            false_suspicion: None,
            disk_suffers: false,
            lost_power: false,
            vanished: false,
            snapshots: 0,
            flipped: false,
            was_flipped: false,
            damaged: BTreeSet::new(),
            started: 0,
            ended: None,
            known: None,
        }
    }

    #[cfg(feature = "defects")]
    pub(crate) fn inject_bug(&mut self, defect: Option<engram_cluster::injected::Bug>) {
        self.options.replication.bug = defect;
    }

    /// Starts a process on the disk.
    pub(crate) fn start(&mut self, timing: Timing, now_us: u64) -> Result<(), Error> {
        self.options.origin = Origin { boot: self.boot, mount: 0 };
        let device = Box::new(Cpu::new(1));
        let disk: Arc<dyn Disk> = Arc::new(self.disk.clone());
        let clock = Arc::clone(&self.clock);
        let (mut store, recovery) = Store::open(disk, clock, device, self.options.clone())?;
        let is_whole = recovery.corrupt.is_empty() && recovery.skipped_snapshots.is_empty();
        // In mode async a replica is discarded if its primary lost its last records.
        let may_be_damaged = self.was_flipped || self.options.wal.durability == Durability::Async;
        assert!(is_whole || may_be_damaged, "node {}: unexpected damage: {recovery:?}", self.ordinal);
        let out = StoreSink::default();
        store.set_peers(Box::new(out.clone()));
        let (member, lossless_since) = (store.member(), store.identity().lossless_since());
        let partitions = self.options.shape.partitions;
        let applied = (0..partitions).map(|partition| store.applied(PartitionId(partition))).collect();
        self.flipped = false;
        self.lost_power = false;
        self.started += 1;
        self.known = Some((member, lossless_since));
        self.process = Some(Process {
            store,
            member,
            lossless_since,
            out,
            number: self.started,
            liveness: LivenessTracker::new(timing, now_us),
            leaves_until_us: None,
            applied,
        });
        Ok(())
    }

    /// Takes the process, and remembers its state.
    pub(crate) fn take(&mut self) -> Option<Process> {
        let process = self.process.take()?;
        self.damaged = damaged(&process.store);
        self.snapshots += process.store.stats().transfers_installed;
        self.ended = Some((process.member, process.number));
        Some(process)
    }

    /// Ends the process; its writes are in the page cache.
    pub(crate) fn kill(&mut self) {
        drop(self.take());
        self.disk.kill();
        self.paused_until_us = 0;
        self.false_suspicion = None;
    }

    /// Ends the process by a power loss of the machine.
    pub(crate) fn lose_power(&mut self, now_us: u64) {
        self.kill();
        self.disk.lose_power();
        self.lost_power = true;
        self.boot += 1;
        self.booted_us = now_us;
        self.passed_ms = 0;
        self.clock = Arc::new(ManualClock::new(self.wall_ms(now_us)));
    }

    /// Replaces the disk by an empty one.
    pub(crate) fn replace_disk(&mut self, seed: u64) {
        self.kill();
        self.disk = SimDisk::new(seed);
        (self.flipped, self.was_flipped) = (false, false);
        self.damaged.clear();
    }

    /// Flips bits of a file with this suffix; false if there is none.
    pub(crate) fn flip_bits(&mut self, suffix: &str, draw: &mut Draw) -> bool {
        let names = self.disk.list().unwrap_or_default();
        let names = names.iter().filter(|name| name.ends_with(suffix) && !self.disk.bytes(name).is_empty());
        let names: Vec<&str> = names.map(String::as_str).collect();
        if names.is_empty() {
            return false;
        }
        let name = draw.pick(&names);
        for _ in 0..draw.within(1, 3) {
            let bits = self.disk.bytes(name).len() as u64 * 8;
            self.disk.flip_bit(name, draw.below(bits));
        }
        (self.flipped, self.was_flipped) = (true, true);
        true
    }

    /// Whether the replica of a member is damaged, as far as known, or gone with its disk.
    pub(crate) fn lacks_replica(&self, partition: PartitionId, member: &Member) -> bool {
        let is_damaged = match &self.process {
            Some(process) => damaged(&process.store).contains(&partition),
            None => self.damaged.contains(&partition),
        };
        is_damaged || self.known.is_none_or(|(known, _)| known.store != member.store)
    }

    /// Whether its replica declines every term that the map assigns: it lost its promise, and knows that. A primary has
    /// read the map; the primary of the previous term has, too.
    pub(crate) fn declines(&self, partition: PartitionId, entry: &Entry) -> bool {
        let Some(process) = &self.process else { return false };
        let is_primary = entry.primary == process.member.ordinal;
        let assigned = if is_primary { entry.term.0 } else { entry.term.0.saturating_sub(1) };
        let replicas = process.store.replicas();
        replicas.iter().any(|replica| replica.partition == partition && replica.term.0 < assigned)
    }

    /// Whether its replica of a partition may be damaged.
    pub(crate) fn is_damaged(&self, partition: PartitionId) -> bool {
        let now = self.process.as_ref().map(|process| damaged(&process.store));
        self.flipped || now.as_ref().unwrap_or(&self.damaged).contains(&partition)
    }

    /// Sets the clocks to `now_us` of the world.
    pub(crate) fn set_time(&mut self, now_us: u64) {
        let real_us = (now_us - self.booted_us) as i64;
        let passed_ms = ((real_us + real_us / 1_000_000 * self.rate_ppm) / 1_000) as u64;
        self.clock.advance(passed_ms.saturating_sub(self.passed_ms));
        self.passed_ms = self.passed_ms.max(passed_ms);
    }

    /// Returns the lease clock.
    pub(crate) const fn elapsed_ms(&self) -> u64 {
        self.passed_ms
    }

    /// Steps the wall clock to this offset.
    pub(crate) fn step_clock(&mut self, offset_ms: i64, now_us: u64) {
        self.wall_offset_ms = offset_ms;
        self.clock.set_wall(self.wall_ms(now_us));
    }

    /// Whether its wall clock is wrong by more than clocks may differ.
    pub(crate) const fn has_far_clock(&self) -> bool {
        self.wall_offset_ms.abs() > NEAR_STEP_MS
    }

    const fn wall_ms(&self, now_us: u64) -> u64 {
        (START_MS + now_us / 1_000).saturating_add_signed(self.wall_offset_ms)
    }

    /// Snapshots installed.
    pub(crate) fn snapshots_installed(&self) -> u64 {
        self.snapshots + self.process.as_ref().map_or(0, |process| process.store.stats().transfers_installed)
    }

    /// Bytes used by the files of the disk.
    pub(crate) fn used_bytes(&self) -> u64 {
        let names = self.disk.list().unwrap_or_default();
        names.iter().map(|name| self.disk.bytes(name).len() as u64).sum()
    }
}

/// Partitions with a damaged replica.
fn damaged(store: &Store) -> BTreeSet<PartitionId> {
    let replicas = store.replicas().into_iter();
    replicas.filter(|replica| replica.role == "corrupt").map(|replica| replica.partition).collect()
}
