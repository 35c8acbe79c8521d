//! Progress of the background work: snapshot rounds, received states to be written, scrubbing, compaction, and what is due when.
//!
//! A *round* snapshots partitions one after another: each is exported in memory between two turns and written by another thread
//! (in single-thread mode by this one). Two generations are kept; the log is deleted below the older. A backup to another disk
//! yields to writes as state transfers do: a [`Throttle`] limits its bytes, a [`TimeShare`] its engine time, and another one its
//! disk time, since syncs of the log wait for the disk.

use super::job::{Job, SnapshotInfo, SnapshotWrite};
use super::scrub::Scrub;
use crate::payload::Compaction;
use crate::payload::scrub::PayloadScrub;
use crate::replication::throttle::{Throttle, TimeShare};
use crate::wal::Position;
use crate::{Disk, Error, Options};
use engram_memory::{Ordinal, PartitionId, Term};
use std::collections::VecDeque;
use std::sync::Arc;

/// Most queued rounds.
const MAX_ROUNDS: usize = 8;
/// Time until a received replica state that could not be written is requested again: a full disk stays full for a while.
const INSTALL_RETRY_MS: u64 = 5_000;

/// Called when a requested round is finished.
pub(crate) type RoundCallback = Box<dyn FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send>;

/// State of the background work.
pub(crate) struct Background {
    rounds: VecDeque<Round>,
    /// Rounds that have ended and are not answered.
    ended: VecDeque<EndedRound>,
    in_flight: bool,
    /// Exported, and waiting until the log up to it is durable.
    exported: Option<SnapshotWrite>,
    /// Received replica states, to be written.
    installs: VecDeque<SnapshotWrite>,
    /// Received replica states that could not be written, with the time at which each is requested again.
    failed_installs: VecDeque<(u64, FailedInstall)>,
    pub(crate) scrub: Scrub,
    pub(crate) payload_scrub: PayloadScrub,
    pub(crate) compaction: Compaction,
    backup: BackupPace,
    schedule: Schedule,
}

/// Limits of backups.
struct BackupPace {
    /// Byte budget of backups, and whether there were writes at the last evaluation.
    throttle: Throttle,
    has_writes: bool,
    /// Disk time of backups, and when the job in flight began.
    disk: TimeShare,
    begun_ms: u64,
}

/// When periodic work was or is due.
struct Schedule {
    round_at_ms: u64,
    round_at_bytes: u64,
    expire_at_ms: u64,
    /// When the last digest marker was proposed, and the partition of the next one.
    marked_at_ms: u64,
    next_marked: u32,
}

/// A received replica state that could not be written.
pub(crate) struct FailedInstall {
    pub(crate) partition: PartitionId,
    pub(crate) term: Term,
    pub(crate) from: Ordinal,
}

struct Round {
    left: VecDeque<PartitionId>,
    /// Destination of a backup; `None` = the store's own disk.
    target: Option<Arc<dyn Disk>>,
    written: Vec<SnapshotInfo>,
    failed: Option<Error>,
    done: Option<RoundCallback>,
}

/// A round that has ended.
pub(crate) struct EndedRound {
    /// Whether the store's own snapshots may cover more log.
    pub(crate) covers_log: bool,
    result: Result<Vec<SnapshotInfo>, Error>,
    done: Option<RoundCallback>,
}

impl EndedRound {
    /// Answers the caller who requested it.
    pub(crate) fn answer(self) {
        if let Some(done) = self.done {
            done(self.result);
        }
    }
}

/// Next step of the first round.
pub(crate) struct NextExport {
    /// `None`: the round is over.
    pub(crate) partition: Option<PartitionId>,
    /// Destination of a backup; `None` = the store's own disk.
    pub(crate) target: Option<Arc<dyn Disk>>,
}

impl Background {
    pub(crate) fn new(now_ms: u64, options: &Options) -> Self {
        let throttle = Throttle::new(options.replication.transfer_bytes_per_s);
        Self {
            rounds: VecDeque::new(),
            ended: VecDeque::new(),
            in_flight: false,
            exported: None,
            installs: VecDeque::new(),
            failed_installs: VecDeque::new(),
            scrub: Scrub::new(now_ms),
            payload_scrub: PayloadScrub::default(),
            compaction: Compaction::default(),
            backup: BackupPace { throttle, has_writes: false, disk: TimeShare::default(), begun_ms: now_ms },
            schedule: Schedule {
                round_at_ms: now_ms,
                round_at_bytes: 0,
                expire_at_ms: now_ms + options.expiry_ms,
                marked_at_ms: now_ms,
                next_marked: 0,
            },
        }
    }
}

/// Rounds.
impl Background {
    /// Whether a backup round is in progress.
    pub(crate) fn writes_backup(&self) -> bool {
        self.rounds.front().is_some_and(|round| round.target.is_some())
    }

    pub(crate) fn has_rounds(&self) -> bool {
        !self.rounds.is_empty()
    }

    /// Checks that another round may be queued; `folder` is the directory that the error names.
    pub(crate) fn check_capacity(&self, folder: impl FnOnce() -> String) -> Result<(), Error> {
        if self.rounds.len() < MAX_ROUNDS {
            return Ok(());
        }
        let source = std::io::Error::other(format!("{MAX_ROUNDS} snapshot rounds are already queued"));
        Err(Error::Io { operation: "snapshot", path: folder(), source })
    }

    /// Queues a round. Returns whether [`Background::end_rounds`] is due.
    pub(crate) fn begin_round(
        &mut self,
        left: VecDeque<PartitionId>,
        target: Option<Arc<dyn Disk>>,
        done: Option<RoundCallback>,
    ) -> bool {
        self.rounds.push_back(Round { left, target, written: Vec::new(), failed: None, done });
        !self.in_flight && self.exported.is_none()
    }

    /// Ends the rounds without partitions left.
    pub(crate) fn end_rounds(&mut self) {
        while let Some(round) = self.rounds.pop_front_if(|round| round.left.is_empty()) {
            let covers_log = round.target.is_none() && round.failed.is_none();
            let result = round.failed.map_or(Ok(round.written), Err);
            self.ended.push_back(EndedRound { covers_log, result, done: round.done });
        }
    }

    /// Takes the next round that has ended.
    pub(crate) fn next_ended(&mut self) -> Option<EndedRound> {
        self.ended.pop_front()
    }

    /// Takes the next partition to export.
    pub(crate) fn next_export(&mut self) -> Option<NextExport> {
        let round = self.rounds.front_mut()?;
        Some(NextExport { partition: round.left.pop_front(), target: round.target.clone() })
    }

    /// Records a snapshot written for the first round.
    pub(crate) fn add_written(&mut self, info: SnapshotInfo) {
        if let Some(round) = self.rounds.front_mut() {
            round.written.push(info);
        }
    }

    /// Fails the first round: a full or failing disk fails its other partitions too; the next round retries.
    pub(crate) fn fail_round(&mut self, error: Error) {
        if let Some(round) = self.rounds.front_mut() {
            round.left.clear();
            round.failed = Some(error);
        }
    }

    /// Whether a round is due after `written_bytes` of log; if so, the next one is due later.
    pub(crate) fn round_is_due(&mut self, now_ms: u64, written: Position, options: &Options) -> bool {
        let logged = written.0.saturating_sub(self.schedule.round_at_bytes);
        let is_due =
            logged >= options.snapshot_bytes || now_ms.saturating_sub(self.schedule.round_at_ms) >= options.snapshot_ms;
        let begins = is_due && self.rounds.is_empty();
        if begins {
            (self.schedule.round_at_ms, self.schedule.round_at_bytes) = (now_ms, written.0);
        }
        begins
    }
}

/// Jobs.
impl Background {
    pub(crate) const fn has_job(&self) -> bool {
        self.in_flight
    }

    /// Records that a job begins, if there is one.
    pub(crate) const fn begin_job(&mut self, job: Option<&Job>, now_ms: u64) {
        self.in_flight = job.is_some();
        self.backup.begun_ms = now_ms;
    }

    pub(crate) const fn end_job(&mut self) {
        self.in_flight = false;
    }

    pub(crate) const fn has_export(&self) -> bool {
        self.exported.is_some()
    }

    pub(crate) fn set_export(&mut self, write: Option<SnapshotWrite>) {
        self.exported = write;
    }

    /// Takes the exported partition once the log is durable up to its position.
    pub(crate) fn take_export(&mut self, is_durable: impl FnOnce(Position) -> bool) -> Option<SnapshotWrite> {
        self.exported.take_if(|write| is_durable(write.needs))
    }

    /// Whether the next partition of a round may be exported: a backup waits while writes need disk and engine.
    pub(crate) fn may_export(&mut self, now_ms: u64, write_us: (u64, u64), engine: &TimeShare) -> bool {
        let is_backup = self.writes_backup();
        let BackupPace { throttle, has_writes, disk, .. } = &mut self.backup;
        if throttle.is_due(now_ms) {
            *has_writes = throttle.evaluate(now_ms, write_us, is_backup) > 0;
        }
        let waits = is_backup && *has_writes;
        !waits || (throttle.may_send(now_ms) && disk.may_work(now_ms) && engine.may_work(now_ms))
    }

    /// Charges the job in flight, which wrote `bytes` of a backup.
    pub(crate) fn charge_backup(&mut self, bytes: u64, now_ms: u64, served: u64) {
        self.backup.throttle.charge(bytes as usize);
        self.backup.disk.charge(self.backup.begun_ms, now_ms, served);
    }
}

/// Received states.
impl Background {
    /// Queues a received replica state, which takes precedence over snapshots.
    pub(crate) fn install(&mut self, write: SnapshotWrite) {
        self.installs.push_back(write);
    }

    pub(crate) fn next_install(&mut self) -> Option<SnapshotWrite> {
        self.installs.pop_front()
    }

    /// Records that a received state could not be written.
    pub(crate) fn install_failed(&mut self, now_ms: u64, failed: FailedInstall) {
        self.failed_installs.push_back((now_ms + INSTALL_RETRY_MS, failed));
    }

    /// Takes a state that is to be requested again.
    pub(crate) fn next_failed_install(&mut self, now_ms: u64) -> Option<FailedInstall> {
        self.failed_installs.pop_front_if(|(at_ms, _)| *at_ms <= now_ms).map(|(_, failed)| failed)
    }
}

/// Periodic proposals.
impl Background {
    /// Whether sessions are to be expired; if so, the next time is later.
    pub(crate) const fn expiry_is_due(&mut self, now_ms: u64, options: &Options) -> bool {
        let is_due = now_ms >= self.schedule.expire_at_ms;
        if is_due {
            self.schedule.expire_at_ms = now_ms + options.expiry_ms;
        }
        is_due
    }

    /// Returns the partition that is due for a digest marker: each once per [`Options::digest_ms`].
    pub(crate) fn next_marked(&mut self, now_ms: u64, options: &Options) -> Option<PartitionId> {
        let partitions = options.shape.partitions;
        let every_ms = (options.digest_ms / u64::from(partitions)).max(1);
        if options.replication.replicas < 2 || now_ms.saturating_sub(self.schedule.marked_at_ms) < every_ms {
            return None;
        }
        self.schedule.marked_at_ms = now_ms;
        let partition = PartitionId(self.schedule.next_marked);
        self.schedule.next_marked = (partition.0 + 1) % partitions;
        Some(partition)
    }
}
