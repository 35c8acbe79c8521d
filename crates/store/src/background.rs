//! What happens beside the writes: snapshots, deletion of log they cover, a second look at them, expiry of sessions.
//!
//! A *round* snapshots partitions one after another: each is copied between two turns, in memory, and written by another thread
//! (in single-thread mode by this one). Two generations are kept; the log is deleted below the older. What is written elsewhere, a
//! backup, gives way to writes as copies do: by [`Throttle`] in bytes, by a [`Share`] in the time of the engine and another in that of the
//! disk, whose syncs the log's wait for.

use crate::content::Content;
use crate::scrub::{Look, Looked, Scrub};
use crate::snapshot_file::{self, SnapshotHead, SnapshotWriter};
use crate::stats;
use crate::store::Store;
use crate::throttle::{Share, Throttle};
use crate::wal::Position;
use crate::{Disk, Error, FileHead};
use engram_memory::{Command, Digest, Lsn, Ordinal, PartitionId, Record, Term};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Sessions are forgotten after a day: the client library renews them after hours.
const SESSION_MS: u64 = 24 * 60 * 60 * 1_000;
/// How often expiry is proposed.
const EXPIRE_EVERY_MS: u64 = 60 * 60 * 1_000;
/// Rounds that may be asked for and not begun.
const MAX_ROUNDS: usize = 8;
/// Multiples of [`crate::Options::snapshot_bytes`] of log after which partitions that rest are made to move on: their last records
/// are what keeps the log from being deleted.
const PINNED_FACTOR: u64 = 4;

/// A snapshot that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Partition.
    pub partition: PartitionId,
    /// Its last record in it.
    pub lsn: Lsn,
    /// Term of that record.
    pub term: Term,
    /// Memories in it.
    pub memories: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Digest of the memories in it.
    pub digest: Digest,
    /// Where it is.
    pub path: String,
}

/// What is called when a round that was asked for is over.
pub(crate) type RoundDone = Box<dyn FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send>;

/// State of the background work.
pub(crate) struct Background {
    rounds: VecDeque<Round>,
    in_flight: bool,
    /// Copied, and waiting until the log behind it is durable.
    held: Option<Write>,
    /// Copies of other workers' partitions, to be written.
    installs: VecDeque<Write>,
    pub(crate) scrub: Scrub,
    /// Bytes that go elsewhere, and whether somebody wrote here when it was judged last.
    throttle: Throttle,
    is_written_to: bool,
    /// The disk's time for them, and since when it works for the one in flight.
    disk: Share,
    begun_ms: u64,
    round_at_ms: u64,
    round_at_bytes: u64,
    expire_at_ms: u64,
    /// When a partition was last given a marker, and which one is next.
    pub(crate) marked_at_ms: u64,
    pub(crate) next_marked: u32,
}

struct Round {
    left: VecDeque<PartitionId>,
    /// Where to, when not to the store's own disk.
    elsewhere: Option<Arc<dyn Disk>>,
    written: Vec<SnapshotInfo>,
    failed: Option<Error>,
    done: Option<RoundDone>,
}

/// Something to be done on any thread.
pub(crate) enum Job {
    Write(Box<Write>),
    Look(Look),
}

/// What became of a job.
pub(crate) enum JobDone {
    Written(Written),
    Looked(Looked),
}

/// A copied partition, to be written.
pub(crate) struct Write {
    disk: Arc<dyn Disk>,
    own: bool,
    file_head: FileHead,
    head: SnapshotHead,
    content: Content,
    /// The log must be durable up to here before the snapshot may be found by a recovery.
    needs: Position,
    /// Damaged snapshots of the partition, to be removed when this one is durable.
    damaged: Vec<Lsn>,
    /// A copy from the primary of this term, at this place, that shall take the place of what is here.
    install: Option<(Term, Ordinal)>,
}

/// A snapshot that was written.
pub(crate) struct Written {
    info: SnapshotInfo,
    /// On the store's own disk: the older generation, once there are two.
    older: Option<Lsn>,
}

impl Background {
    pub(crate) fn new(elapsed_ms: u64, elsewhere_bytes_per_s: u64) -> Self {
        Self {
            throttle: Throttle::new(elsewhere_bytes_per_s),
            is_written_to: false,
            disk: Share::default(),
            begun_ms: elapsed_ms,
            rounds: VecDeque::new(),
            in_flight: false,
            held: None,
            installs: VecDeque::new(),
            scrub: Scrub::new(elapsed_ms),
            round_at_ms: elapsed_ms,
            round_at_bytes: 0,
            expire_at_ms: elapsed_ms + EXPIRE_EVERY_MS,
            marked_at_ms: elapsed_ms,
            next_marked: 0,
        }
    }

    /// Takes a copy to be written before anything else.
    pub(crate) fn install(&mut self, write: Write) {
        self.installs.push_back(write);
    }

    /// Whether a round is under way that writes elsewhere.
    pub(crate) fn writes_elsewhere(&self) -> bool {
        self.rounds.front().is_some_and(|round| round.elsewhere.is_some())
    }
}

impl Job {
    pub(crate) fn run(&self) -> Result<JobDone, Error> {
        match self {
            Self::Write(write) => write.run().map(JobDone::Written),
            Self::Look(look) => look.run().map(JobDone::Looked),
        }
    }
}

impl Write {
    pub(crate) fn install(
        disk: Arc<dyn Disk>,
        file_head: FileHead,
        head: SnapshotHead,
        content: Content,
        from: (Term, Ordinal),
    ) -> Self {
        let (needs, damaged) = (Position::default(), Vec::new());
        Self { disk, own: true, file_head, head, content, needs, damaged, install: Some(from) }
    }

    fn run(&self) -> Result<Written, Error> {
        let mut writer = SnapshotWriter::create(&*self.disk, &self.file_head, self.head, &self.content.ledger)?;
        let chunks = &self.content.chunks;
        if let Err(error) = chunks.iter().try_for_each(|(column, bytes)| writer.chunk(column.code(), bytes)) {
            writer.abandon();
            return Err(error);
        }
        let bytes = writer.finish()?;
        let SnapshotHead { partition, lsn, term, memories, .. } = self.head;
        let path = self.disk.describe(&snapshot_file::name(partition, lsn));
        // A copy of another worker's is judged when it is taken over, and nobody is told of it as of a snapshot.
        let digest = if self.install.is_some() { Digest::default() } else { self.content.memories_digest() };
        for &damaged in self.damaged.iter().filter(|damaged| **damaged != lsn) {
            // One that stays is found again.
            let _ = self.disk.remove(&snapshot_file::name(partition, damaged));
        }
        let older = if self.own { snapshot_file::keep_generations(&*self.disk, partition)? } else { None };
        Ok(Written { info: SnapshotInfo { partition, lsn, term, memories, bytes, digest, path }, older })
    }
}

impl Store {
    /// Asks for a snapshot of every partition that has data, on the store's own disk; or `elsewhere` of those that this store shows:
    /// where several write into one folder, each writes what it leads. `done` is called when all are durable, or with the first
    /// error.
    pub fn snapshot_all(
        &mut self,
        elsewhere: Option<Arc<dyn Disk>>,
        done: impl FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send + 'static,
    ) {
        let own = elsewhere.is_none();
        let shown = |partition: PartitionId| !self.partitions.is_hidden(partition.0 as usize);
        let wanted = |partition| if own { self.moved_on(partition) } else { shown(partition) };
        let left = self.partitions.iter().filter(|partition| wanted(*partition)).collect();
        self.ask_for_round(left, elsewhere, Box::new(done));
    }

    /// The same of one partition; of none where this store does not show it.
    pub fn snapshot_one(
        &mut self,
        partition: PartitionId,
        elsewhere: Arc<dyn Disk>,
        done: impl FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send + 'static,
    ) {
        let is_shown = |it: &PartitionId| *it == partition && !self.partitions.is_hidden(it.0 as usize);
        let left = self.partitions.iter().filter(is_shown).collect();
        self.ask_for_round(left, Some(elsewhere), Box::new(done));
    }

    fn ask_for_round(&mut self, left: VecDeque<PartitionId>, elsewhere: Option<Arc<dyn Disk>>, done: RoundDone) {
        if self.background.rounds.len() >= MAX_ROUNDS {
            let source = std::io::Error::other(format!("{MAX_ROUNDS} snapshots are already asked for"));
            done(Err(Error::Io { operation: "snapshot", path: self.disk.describe(""), source }));
            return;
        }
        self.begin_round(left, elsewhere, Some(done));
    }

    /// Proposes and begins what is due by the clock.
    pub(crate) fn housekeeping(&mut self) {
        self.expire_grants();
        let now_ms = self.clock.elapsed_ms();
        self.mark_next(now_ms);
        if now_ms >= self.background.expire_at_ms {
            self.background.expire_at_ms = now_ms + EXPIRE_EVERY_MS;
            self.expire_sessions();
        }
        let logged = self.wal.written().0.saturating_sub(self.background.round_at_bytes);
        let due = logged >= self.options.snapshot_bytes
            || now_ms.saturating_sub(self.background.round_at_ms) >= self.options.snapshot_ms;
        if due && self.background.rounds.is_empty() {
            self.background.round_at_ms = now_ms;
            self.background.round_at_bytes = self.wal.written().0;
            let mut left: VecDeque<_> = self.partitions.iter().filter(|partition| self.moved_on(*partition)).collect();
            left.extend(self.move_resting_on());
            self.begin_round(left, None, None);
        }
    }

    /// What is to be done next beside the log: a partition to be written, copied, or a snapshot to be read again. Each ends in
    /// [`Store::job_done`].
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn next_job(&mut self) -> Result<Option<Job>, Error> {
        if self.background.in_flight {
            return Ok(None);
        }
        let job = match self.next_write()? {
            Some(write) => Some(Job::Write(Box::new(write))),
            None => self.next_look(),
        };
        self.background.in_flight = job.is_some();
        self.background.begun_ms = self.clock.elapsed_ms();
        Ok(job)
    }

    fn next_write(&mut self) -> Result<Option<Write>, Error> {
        if self.replication.copies.share.may_work(self.clock.elapsed_ms())
            && let Some(write) = self.background.installs.pop_front()
        {
            return Ok(Some(write));
        }
        if self.background.held.is_none() && self.may_copy() {
            // What goes elsewhere gives way to calls as copies do; the store's own rounds, and turns with nothing to copy, are no such work.
            self.background.held = if self.background.writes_elsewhere() {
                self.working_for_copies(Self::copy_next)?
            } else {
                self.copy_next()?
            };
        }
        Ok(self.background.held.take_if(|write| self.wal.durable(write.needs)))
    }

    /// Whether the next partition of a round may be copied: one that goes elsewhere waits while writes need disk and engine.
    fn may_copy(&mut self) -> bool {
        let (now_ms, elsewhere) = (self.clock.elapsed_ms(), self.background.writes_elsewhere());
        let Background { throttle, is_written_to, disk, .. } = &mut self.background;
        if throttle.is_due(now_ms) {
            *is_written_to = throttle.judge(now_ms, self.shared.write_us.totals(), elsewhere) > 0;
        }
        let waits = elsewhere && *is_written_to;
        !waits || (throttle.may_send(now_ms) && disk.may_work(now_ms) && self.replication.copies.share.may_work(now_ms))
    }

    /// A job is over.
    ///
    /// # Errors
    /// [`Error::SyncFailed`].
    pub(crate) fn job_done(&mut self, job: &Job, result: Result<JobDone, Error>) -> Result<(), Error> {
        self.background.in_flight = false;
        match (job, result) {
            (Job::Look(look), result) => {
                self.looked(look, result);
                Ok(())
            }
            (Job::Write(write), Ok(JobDone::Written(written))) => self.write_done(write, Ok(written)),
            (Job::Write(write), Err(error)) => self.write_done(write, Err(error)),
            (Job::Write(_), Ok(JobDone::Looked(_))) => Ok(()),
        }
    }

    /// A snapshot was written, or was not. Deletes the log that no partition needs any more when the round is over.
    fn write_done(&mut self, write: &Write, result: Result<Written, Error>) -> Result<(), Error> {
        if let Some((term, from)) = write.install {
            return match result {
                Ok(_) => self.install(&write.content, write.head, term, from),
                Err(error @ Error::SyncFailed { .. }) => Err(error),
                Err(_) => {
                    stats::add(&self.shared.failed_snapshots, 1);
                    Ok(())
                }
            };
        }
        let Some(round) = self.background.rounds.front_mut() else { return Ok(()) };
        match result {
            Ok(Written { info, older }) => {
                stats::add(&self.shared.snapshots, 1);
                stats::add(&self.shared.snapshot_bytes, info.bytes);
                if !write.own {
                    let (now_ms, served) = (self.clock.elapsed_ms(), self.shared.served());
                    self.background.throttle.sent(info.bytes as usize);
                    self.background.disk.worked(self.background.begun_ms, now_ms, served);
                } else {
                    let place = &mut self.places[info.partition.0 as usize];
                    place.snapshots = [Some(info.lsn), older];
                    place.damaged.retain(|damaged| !write.damaged.contains(damaged));
                }
                round.written.push(info);
            }
            Err(error @ Error::SyncFailed { .. }) => return Err(error),
            Err(error) => {
                stats::add(&self.shared.failed_snapshots, 1);
                // A full or failing disk fails the others alike; the next round tries again.
                round.left.clear();
                round.failed = Some(error);
            }
        }
        self.end_round_if_over();
        Ok(())
    }

    /// Snapshots a partition whose snapshot was found damaged, at once or with the next round.
    pub(crate) fn write_anew(&mut self, partition: PartitionId) {
        if self.background.rounds.len() < MAX_ROUNDS {
            self.begin_round(VecDeque::from([partition]), None, None);
        }
    }

    fn begin_round(&mut self, left: VecDeque<PartitionId>, elsewhere: Option<Arc<dyn Disk>>, done: Option<RoundDone>) {
        self.background.rounds.push_back(Round { left, elsewhere, written: Vec::new(), failed: None, done });
        if !self.background.in_flight && self.background.held.is_none() {
            self.end_round_if_over();
        }
    }

    fn end_round_if_over(&mut self) {
        while self.background.rounds.front().is_some_and(|round| round.left.is_empty()) {
            let Some(round) = self.background.rounds.pop_front() else { return };
            if round.elsewhere.is_none() && round.failed.is_none() {
                self.delete_covered_log();
            }
            if let Some(done) = round.done {
                done(round.failed.map_or(Ok(round.written), Err));
            }
        }
    }

    fn copy_next(&mut self) -> Result<Option<Write>, Error> {
        while let Some(round) = self.background.rounds.front_mut() {
            let Some(partition) = round.left.pop_front() else {
                self.end_round_if_over();
                continue;
            };
            let elsewhere = round.elsewhere.clone();
            let own = elsewhere.is_none();
            let needed = !own || self.moved_on(partition);
            let content = if needed { self.partitions.export(partition)? } else { None };
            let Some(content) = content else {
                self.end_round_if_over();
                continue;
            };
            let place = &self.places[partition.0 as usize];
            let head = SnapshotHead {
                partition,
                lsn: place.applied,
                term: place.applied_term,
                clock: content.clock,
                memories: content.memories,
                created_ms: self.clock.now_ms(),
                digest: content.digest.0,
            };
            let disk = elsewhere.unwrap_or_else(|| Arc::clone(&self.disk));
            let (file_head, needs) = (self.identity().head(), self.wal.written());
            let damaged = if own { place.damaged.clone() } else { Vec::new() };
            return Ok(Some(Write { disk, own, file_head, head, content, needs, damaged, install: None }));
        }
        Ok(None)
    }

    /// Whether a partition has applied records that its newest snapshot does not hold, or a snapshot of it is damaged.
    fn moved_on(&self, partition: PartitionId) -> bool {
        let place = &self.places[partition.0 as usize];
        place.applied > Lsn(0) && (place.snapshots[0] != Some(place.applied) || !place.damaged.is_empty())
    }

    fn delete_covered_log(&mut self) {
        let covered: BTreeMap<PartitionId, Lsn> = (self.places.iter().enumerate())
            .filter_map(|(partition, place)| Some((PartitionId(partition as u32), place.snapshots[1]?)))
            .collect();
        match self.wal.delete_below(&covered) {
            Ok(bytes) => stats::add(&self.shared.deleted_log_bytes, bytes),
            // What stays costs space and is tried again after the next round.
            Err(_) => stats::add(&self.shared.failed_snapshots, 1),
        }
    }

    /// Where much log is held by partitions that rest, gives them a record that changes nothing, so that this round makes them a
    /// younger generation. Returns which.
    fn move_resting_on(&mut self) -> Vec<PartitionId> {
        if self.wal.bytes() < self.options.snapshot_bytes.saturating_mul(PINNED_FACTOR) {
            return Vec::new();
        }
        let resting: Vec<PartitionId> = (self.partitions.iter())
            .filter(|partition| {
                let place = &self.places[partition.0 as usize];
                place.applied > Lsn(0) && place.pending.is_empty() && !self.moved_on(*partition)
            })
            .collect();
        for &partition in &resting {
            let before_ms = self.partitions.ledger(partition).map_or(0, |ledger| ledger.sessions.watermark_ms());
            self.propose(partition, Record::bare(Command::ExpireSessions { before_ms }), None);
        }
        resting
    }

    fn expire_sessions(&mut self) {
        let before_ms = self.clock.now_ms().saturating_sub(SESSION_MS);
        let due: Vec<PartitionId> = (self.partitions.iter())
            .filter(|partition| self.serving(*partition).is_some())
            .filter(|partition| {
                let sessions = self.partitions.ledger(*partition).map(|ledger| &ledger.sessions);
                sessions.is_some_and(|sessions| !sessions.is_empty() && sessions.watermark_ms() < before_ms)
            })
            .collect();
        for partition in due {
            self.propose(partition, Record::bare(Command::ExpireSessions { before_ms }), None);
        }
    }
}
