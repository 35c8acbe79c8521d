//! One machine: its disk, its clocks, and the process on it, which runs the real store.

use crate::draw::Draw;
use crate::senses::Senses;
use crate::weather::Weather;
use engram_cluster::Entry;
use engram_cluster::detector::Timing;
use engram_kernels::Cpu;
use engram_memory::{
    ClusterId, FeatureShape, Incarnation, Law, Lsn, Member, Ordinal, PartitionId, Settings, Shape, Term, Weight,
};
use engram_store::disk::Disk;
use engram_store::peer::{Envelope, Proposal};
use engram_store::{Committed, Durability, Error, ManualClock, Options, Origin, Peers, SimDisk, Store, WriteError};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// Every cluster of a simulation is this one.
pub(crate) const CLUSTER: ClusterId = ClusterId(7);
/// Wall time when a run begins.
pub(crate) const BEGINS_MS: u64 = 1_700_000_000_000;

/// An answer to the attempt of a client, by its number.
pub(crate) type Answer = (u64, Result<Committed, WriteError>);

/// What a store said since it was last asked.
#[derive(Default)]
pub(crate) struct Said {
    pub(crate) sent: Vec<(Ordinal, Vec<Envelope>)>,
    pub(crate) proposals: Vec<Proposal>,
    pub(crate) answers: Vec<Answer>,
}

/// Where a store says it to.
#[derive(Clone, Default)]
pub(crate) struct Out(Arc<Mutex<Said>>);

impl Out {
    pub(crate) fn take(&self) -> Said {
        std::mem::take(&mut *self.0.lock().expect("one thread"))
    }

    pub(crate) fn answer(&self, answer: Answer) {
        self.0.lock().expect("one thread").answers.push(answer);
    }
}

impl Peers for Out {
    fn send(&mut self, to: Ordinal, envelopes: Vec<Envelope>) {
        self.0.lock().expect("one thread").sent.push((to, envelopes));
    }

    fn propose(&mut self, proposals: Vec<Proposal>) {
        self.0.lock().expect("one thread").proposals.extend(proposals);
    }
}

/// A process.
pub(crate) struct Process {
    pub(crate) store: Store,
    pub(crate) member: Member,
    pub(crate) lossless_since: Incarnation,
    pub(crate) out: Out,
    /// Which process of this machine it is.
    pub(crate) number: u64,
    pub(crate) senses: Senses,
    /// It is about to be stopped, and has so long to prepare for it.
    pub(crate) leaves_until_us: Option<u64>,
    /// What was last seen applied of each partition.
    pub(crate) applied: Vec<(Term, Lsn)>,
}

/// A machine.
pub(crate) struct Node {
    ordinal: Ordinal,
    options: Options,
    pub(crate) disk: SimDisk,
    clock: Arc<ManualClock>,
    /// How much faster than the world's its clocks run, in millionths.
    rate_ppm: i64,
    boot: u128,
    booted_us: u64,
    passed_ms: u64,
    /// How far its wall clock is from the world's.
    wall_offset_ms: i64,
    pub(crate) process: Option<Process>,
    /// Events wait until then.
    pub(crate) paused_until_us: u64,
    /// A turn is due.
    pub(crate) turns: bool,
    /// Until then, somebody is taken for dead who is not.
    pub(crate) misled: Option<(Ordinal, u64)>,
    /// A fault of the disk was planned since it was last mended: a start may fail.
    pub(crate) disk_suffers: bool,
    /// The process that runs, or will, counts as having lost what it had not synced.
    pub(crate) lost_power: bool,
    /// Its streams did not end with the process that ended last: the machine is gone.
    pub(crate) vanished: bool,
    /// Copies of a state that processes before installed.
    copies: u64,
    /// Bits of the disk flipped since a process found it whole: it may hold nothing that it should.
    pub(crate) flipped: bool,
    /// Bits of the disk flipped at some time.
    pub(crate) was_flipped: bool,
    /// Partitions whose copy is not whole, as far as the process that ran last knew.
    damaged: BTreeSet<PartitionId>,
    /// Processes that were started.
    started: u64,
    /// The process that ended last, until others were told.
    pub(crate) ended: Option<(Member, u64)>,
    /// The process that ran last on the disk, and since when it had lost nothing; `None` on a disk that was never used.
    pub(crate) known: Option<(Member, Incarnation)>,
}

impl Node {
    pub(crate) fn new(ordinal: u32, weather: &Weather, draw: &mut Draw) -> Self {
        let shape = Shape { partitions: weather.partitions, law: Law::Linear, features: FeatureShape::NONE };
        let settings = Settings { initial_weight: Weight::ZERO, ..Settings::default() };
        let mut options = Options::new(CLUSTER, shape, settings);
        options.replication.ordinal = Ordinal(ordinal);
        options.replication.copies = weather.copies;
        options.replication.min_in_sync = weather.min_in_sync;
        options.replication.kept_bytes = weather.kept_bytes;
        options.wal.durability = weather.durability;
        options.wal.segment_bytes = weather.segment_bytes;
        options.snapshot_bytes = weather.snapshot_bytes;
        options.snapshot_ms = weather.snapshot_ms;
        options.digest_ms = weather.digest_ms;
        options.scrub_ms = weather.scrub_ms;
        Self {
            ordinal: Ordinal(ordinal),
            options,
            disk: SimDisk::new(draw.next()),
            clock: Arc::new(ManualClock::new(BEGINS_MS)),
            rate_ppm: draw.below(20_001) as i64 - 10_000,
            boot: u128::from(draw.next()) + 1,
            booted_us: 0,
            passed_ms: 0,
            wall_offset_ms: 0,
            process: None,
            paused_until_us: 0,
            turns: false,
            misled: None,
            disk_suffers: false,
            lost_power: false,
            vanished: false,
            copies: 0,
            flipped: false,
            was_flipped: false,
            damaged: BTreeSet::new(),
            started: 0,
            ended: None,
            known: None,
        }
    }

    #[cfg(feature = "defects")]
    pub(crate) fn plant(&mut self, defect: Option<engram_cluster::replica::Defect>) {
        self.options.replication.defect = defect;
    }

    /// Starts a process on the disk.
    pub(crate) fn start(&mut self, timing: Timing, now_us: u64) -> Result<(), Error> {
        self.options.origin = Origin { boot: self.boot, mount: 0 };
        let device = Box::new(Cpu::new(1));
        let disk: Arc<dyn Disk> = Arc::new(self.disk.clone());
        let clock = Arc::clone(&self.clock);
        let (mut store, recovery) = Store::open(disk, clock, device, self.options.clone())?;
        let is_whole = recovery.corrupt.is_empty() && recovery.passed_over.is_empty();
        // In mode async a copy is given up whose primary has lost its last records.
        let may_be = self.was_flipped || self.options.wal.durability == Durability::Async;
        assert!(is_whole || may_be, "node {}: nothing was damaged, and yet {recovery:?}", self.ordinal);
        let out = Out::default();
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
            senses: Senses::new(timing, now_us),
            leaves_until_us: None,
            applied,
        });
        Ok(())
    }

    /// Takes the process, and remembers what was known of it.
    pub(crate) fn take(&mut self) -> Option<Process> {
        let process = self.process.take()?;
        self.damaged = damaged(&process.store);
        self.copies += process.store.stats().copies_installed;
        self.ended = Some((process.member, process.number));
        Some(process)
    }

    /// Ends the process; what it wrote is in the page cache.
    pub(crate) fn kill(&mut self) {
        drop(self.take());
        self.disk.kill();
        self.paused_until_us = 0;
        self.misled = None;
    }

    /// Ends the process by taking the machine's power.
    pub(crate) fn lose_power(&mut self, now_us: u64) {
        self.kill();
        self.disk.lose_power();
        self.lost_power = true;
        self.boot += 1;
        self.booted_us = now_us;
        self.passed_ms = 0;
        self.clock = Arc::new(ManualClock::new(self.wall_ms(now_us)));
    }

    /// Takes the disk away, and puts an empty one in.
    pub(crate) fn replace_disk(&mut self, seed: u64) {
        self.kill();
        self.disk = SimDisk::new(seed);
        (self.flipped, self.was_flipped) = (false, false);
        self.damaged.clear();
    }

    /// Turns bits of a file, whose name ends so, on the medium; false where there is none.
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

    /// Whether the copy that a member had of a partition is not whole, as far as anybody knows, or gone with its disk.
    pub(crate) fn lacks(&self, partition: PartitionId, member: &Member) -> bool {
        let is_damaged = match &self.process {
            Some(process) => damaged(&process.store).contains(&partition),
            None => self.damaged.contains(&partition),
        };
        is_damaged || self.known.is_none_or(|(known, _)| known.store != member.store)
    }

    /// Whether its copy of a partition takes up no term that the map gives it: it lost what it had promised under, and knows that. Who leads has
    /// read the map; who led under the term before has too.
    pub(crate) fn declines(&self, partition: PartitionId, entry: &Entry) -> bool {
        let Some(process) = &self.process else { return false };
        let leads = entry.primary == process.member.ordinal;
        let given = if leads { entry.term.0 } else { entry.term.0.saturating_sub(1) };
        let replicas = process.store.replicas();
        replicas.iter().any(|it| it.partition == partition && it.term.0 < given)
    }

    /// Whether its copy of a partition may not be whole.
    pub(crate) fn is_damaged(&self, partition: PartitionId) -> bool {
        let now = self.process.as_ref().map(|process| damaged(&process.store));
        self.flipped || now.as_ref().unwrap_or(&self.damaged).contains(&partition)
    }

    /// Lets the clocks show what they show at `now_us` of the world.
    pub(crate) fn tell_time(&mut self, now_us: u64) {
        let real_us = (now_us - self.booted_us) as i64;
        let passed_ms = ((real_us + real_us / 1_000_000 * self.rate_ppm) / 1_000) as u64;
        self.clock.advance(passed_ms.saturating_sub(self.passed_ms));
        self.passed_ms = self.passed_ms.max(passed_ms);
    }

    /// What the clock of leases shows.
    pub(crate) const fn elapsed_ms(&self) -> u64 {
        self.passed_ms
    }

    /// Steps the wall clock to this far from the world's.
    pub(crate) fn step_clock(&mut self, offset_ms: i64, now_us: u64) {
        self.wall_offset_ms = offset_ms;
        self.clock.set_wall(self.wall_ms(now_us));
    }

    const fn wall_ms(&self, now_us: u64) -> u64 {
        (BEGINS_MS + now_us / 1_000).saturating_add_signed(self.wall_offset_ms)
    }

    /// Copies of a state that were installed.
    pub(crate) fn copies(&self) -> u64 {
        self.copies + self.process.as_ref().map_or(0, |process| process.store.stats().copies_installed)
    }

    /// Bytes that the files of the disk take.
    pub(crate) fn used_bytes(&self) -> u64 {
        let names = self.disk.list().unwrap_or_default();
        names.iter().map(|name| self.disk.bytes(name).len() as u64).sum()
    }
}

/// The partitions whose copy is not whole.
fn damaged(store: &Store) -> BTreeSet<PartitionId> {
    let replicas = store.replicas().into_iter();
    replicas.filter(|replica| replica.role == "corrupt").map(|replica| replica.partition).collect()
}
