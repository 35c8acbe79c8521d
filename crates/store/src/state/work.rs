//! Background work on the state: snapshots, scrubbing, compaction, and what it proposes by the clock.

use super::{PartitionState, State};
use crate::engine::sequencer::Sequencer;
use crate::payload::{self, scrub::Repair};
use crate::snapshot::background::{EndedRound, FailedInstall, NextExport, RoundCallback};
use crate::snapshot::job::{Job, JobOutput, SnapshotWrite, WrittenSnapshot};
use crate::snapshot::scrub::ScrubOutcome;
use crate::snapshot_file::SnapshotHead;
use crate::stats;
use crate::wal::Position;
use crate::{Disk, Error, SnapshotInfo};
use engram_memory::{Command, Lsn, PartitionId, Record};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Multiples of [`crate::Options::snapshot_bytes`] of log after which idle partitions get a new record: their last records keep the
/// log from being deleted.
const PINNED_FACTOR: u64 = 4;

/// Rounds of snapshots.
impl State {
    /// Requests a snapshot of every partition with data, or a backup to `target` of the visible ones.
    pub(crate) fn snapshot_all(&mut self, target: Option<Arc<dyn Disk>>, done: RoundCallback) {
        let left = if target.is_none() {
            self.outdated()
        } else {
            self.partitions.iter().filter(|partition| !self.partitions.is_hidden(partition.0 as usize)).collect()
        };
        self.request_round(left, target, done);
    }

    /// Requests a backup of one partition; of none unless it is visible here.
    pub(crate) fn snapshot_one(&mut self, partition: PartitionId, target: Arc<dyn Disk>, done: RoundCallback) {
        let is_wanted = |it: &PartitionId| *it == partition && !self.partitions.is_hidden(it.0 as usize);
        let left = self.partitions.iter().filter(is_wanted).collect();
        self.request_round(left, Some(target), done);
    }

    fn request_round(&mut self, left: VecDeque<PartitionId>, target: Option<Arc<dyn Disk>>, done: RoundCallback) {
        match self.background.check_capacity(|| self.context.disk.describe("")) {
            Ok(()) => self.begin_round(left, target, Some(done)),
            Err(error) => done(Err(error)),
        }
    }

    /// Snapshots a partition whose snapshot is damaged, now or with the next round.
    fn rewrite_snapshot(&mut self, partition: PartitionId) {
        if self.background.check_capacity(String::new).is_ok() {
            self.begin_round(VecDeque::from([partition]), None, None);
        }
    }

    /// Begins a round of the store's own snapshots with these partitions and all outdated ones.
    pub(crate) fn begin_own_round(&mut self, outdated: VecDeque<PartitionId>, idle: &[PartitionId]) {
        let left = outdated.into_iter().chain(idle.iter().copied()).collect();
        self.begin_round(left, None, None);
    }

    fn begin_round(&mut self, left: VecDeque<PartitionId>, target: Option<Arc<dyn Disk>>, done: Option<RoundCallback>) {
        if self.background.begin_round(left, target, done) {
            self.background.end_rounds();
        }
    }

    /// Takes the next round that has ended; the log that is covered is deleted before it is answered.
    pub(crate) fn next_ended_round(&mut self) -> Option<EndedRound> {
        self.background.next_ended()
    }

    /// Returns the LSNs up to which two generations of snapshots cover the log.
    pub(crate) fn covered(&self) -> BTreeMap<PartitionId, Lsn> {
        self.iter().filter_map(|(partition, state)| Some((partition, state.snapshots()[1]?))).collect()
    }

    /// Whether a round is due by the clock or by the bytes logged; if so, the next one is due later.
    pub(crate) fn round_is_due(&mut self, written: Position) -> bool {
        self.background.round_is_due(self.context.now_ms(), written, &self.context.options)
    }

    /// Returns the partitions whose snapshot is outdated or damaged.
    pub(crate) fn outdated(&self) -> VecDeque<PartitionId> {
        self.partitions.iter().filter(|partition| self.of(*partition).needs_snapshot()).collect()
    }

    /// Whether a backup is in progress.
    pub(crate) fn writes_backup(&self) -> bool {
        self.background.writes_backup()
    }
}

/// Records that are due by the clock.
impl State {
    /// Returns records that change nothing for idle partitions that keep much log from being deleted, so that the next round writes
    /// a newer generation.
    pub(crate) fn advance_idle(&self, log_bytes: u64) -> Vec<(PartitionId, Record)> {
        if log_bytes < self.context.options.snapshot_bytes.saturating_mul(PINNED_FACTOR) {
            return Vec::new();
        }
        let is_idle = |state: &PartitionState| state.applied().0 > Lsn(0) && state.is_idle() && !state.needs_snapshot();
        let idle = self.partitions.iter().filter(|partition| is_idle(self.of(*partition)));
        idle.map(|partition| {
            let before_ms = self.partitions.ledger(partition).map_or(0, |ledger| ledger.sessions.watermark_ms());
            (partition, Record::bare(Command::ExpireSessions { before_ms }))
        })
        .collect()
    }

    /// Returns the records that expire old sessions of served partitions, when due.
    pub(crate) fn expire_sessions(&mut self) -> Vec<(PartitionId, Record)> {
        if !self.background.expiry_is_due(self.context.now_ms(), &self.context.options) {
            return Vec::new();
        }
        let Some(before_ms) = self.context.session_clock.expire_before_ms() else { return Vec::new() };
        let has_expired = |partition: PartitionId| {
            let sessions = self.partitions.ledger(partition).map(|ledger| &ledger.sessions);
            sessions.is_some_and(|sessions| !sessions.is_empty() && sessions.watermark_ms() < before_ms)
        };
        let served = self.partitions.iter().filter(|partition| self.of(*partition).serving().is_some());
        let due = served.filter(|partition| has_expired(*partition));
        due.map(|partition| (partition, Record::bare(Command::ExpireSessions { before_ms }))).collect()
    }

    /// Returns the digest marker of the next partition, when due and if it is served here and replicated.
    pub(crate) fn next_digest_marker(&mut self, now_ms: u64) -> Option<(PartitionId, Record)> {
        let partition = self.background.next_marked(now_ms, &self.context.options)?;
        let replica = self.of(partition).replica();
        let is_compared = replica.serving_term().is_some() && replica.in_sync_count() > 1;
        is_compared.then(|| (partition, Record::bare(Command::DigestMarker { marker: now_ms })))
    }
}

/// Payloads.
impl State {
    /// Moves some payloads out of a sparse segment, when due.
    pub(crate) fn compact_payloads(&mut self) {
        self.background.compaction.step(&mut self.partitions, self.context.now_ms());
    }

    /// Reports damaged payloads, and returns how to repair replicas that have some.
    pub(crate) fn payload_repairs(&mut self) -> Vec<Repair> {
        let shared = &self.context.shared;
        stats::add(&shared.damaged_payloads, self.partitions.arena.payloads.take_found());
        for (partition, what) in self.partitions.arena.payloads.take_damages() {
            *shared.damage.write() = Some(format!("a payload of partition {partition} is damaged: {what}"));
            self.background.payload_scrub.add_damaged(partition, what);
        }
        if !self.context.is_replicated() {
            return Vec::new();
        }
        let (now_ms, own) = (self.context.now_ms(), self.context.options.replication.ordinal);
        let (states, partitions) = (&self.states, &self.partitions);
        let state_of = |partition: PartitionId| {
            let state = &states[partition.0 as usize];
            (state.replica(), state.corrupt().is_some() || !partitions.contains(partition))
        };
        self.background.payload_scrub.repairs(now_ms, own, state_of)
    }

    /// Records that a payload failed to be read for a transfer. Without another replica that may have it, it is lost: the result is `true`, and
    /// the transfer begins again without it.
    pub(crate) fn payload_failed(
        &mut self,
        partition: PartitionId,
        failed: Option<payload::Reference>,
        error: &Error,
    ) -> bool {
        let payloads = &mut self.partitions.arena.payloads;
        if let Some(reference) = failed {
            payloads.mark_damaged(partition, &reference);
        }
        let what = payload::describe(error);
        let is_lost = failed.is_some() && self.states[partition.0 as usize].replica().in_sync_count() <= 1;
        if is_lost {
            let message = format!("a payload of partition {partition} is damaged: {what}");
            *self.context.shared.damage.write() = Some(message);
        } else {
            payloads.report_damage(partition, what);
        }
        is_lost
    }
}

/// Jobs.
impl State {
    /// Returns the next job: a snapshot to write, or something to scrub. Each ends in [`State::job_done`].
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn next_job(&mut self, log: &Sequencer) -> Result<Option<Job>, Error> {
        if self.background.has_job() {
            return Ok(None);
        }
        let job = match self.next_write(log)? {
            Some(write) => Some(Job::Write(Box::new(write))),
            None => self.next_scrub().or_else(|| self.next_payload_scrub()),
        };
        self.background.begin_job(job.as_ref(), self.context.now_ms());
        Ok(job)
    }

    fn next_write(&mut self, log: &Sequencer) -> Result<Option<SnapshotWrite>, Error> {
        if self.may_transfer()
            && let Some(write) = self.background.next_install()
        {
            return Ok(Some(write));
        }
        if !self.background.has_export() && self.may_export() {
            // Only backups yield to calls; the store's own rounds do not.
            let (from_ms, is_backup) = (self.context.now_ms(), self.background.writes_backup());
            let exported = self.export_next(log)?;
            if is_backup {
                self.charge_transfer(from_ms);
            }
            self.background.set_export(exported);
        }
        Ok(self.background.take_export(|position| log.is_durable_at(position)))
    }

    fn may_export(&mut self) -> bool {
        let write_us = self.context.shared.write_us.totals();
        self.background.may_export(self.context.now_ms(), write_us, &self.share)
    }

    fn export_next(&mut self, log: &Sequencer) -> Result<Option<SnapshotWrite>, Error> {
        while let Some(NextExport { partition, target }) = self.background.next_export() {
            let is_wanted = |partition| target.is_some() || self.of(partition).needs_snapshot();
            let content = match partition.filter(|partition| is_wanted(*partition)) {
                Some(partition) => self.partitions.export(partition)?,
                None => None,
            };
            let Some(content) = content else {
                self.background.end_rounds();
                continue;
            };
            let (partition, own) = (content.partition, target.is_none());
            let state = self.of(partition);
            let (lsn, term) = state.applied();
            let (clock, memories, digest) = (content.clock, content.memories, content.digest.0);
            let created_ms = self.context.clock.now_ms();
            let unused_segments = if own { self.partitions.arena.payloads.unused(partition) } else { Vec::new() };
            return Ok(Some(SnapshotWrite {
                disk: target.unwrap_or_else(|| Arc::clone(&self.context.disk)),
                own,
                file_head: self.context.file_head,
                head: SnapshotHead { partition, lsn, term, clock, memories, created_ms, digest },
                content,
                needs: log.written_position(),
                damaged: if own { state.damaged_snapshots().to_vec() } else { Vec::new() },
                unused_segments,
                install: None,
            }));
        }
        Ok(None)
    }

    fn next_scrub(&mut self) -> Option<Job> {
        let snapshots = || {
            let intact = |state: &PartitionState| state.snapshots().map(|it| it.filter(|_| state.corrupt().is_none()));
            self.states.iter().flat_map(intact).collect()
        };
        let read = self.background.scrub.next_read(&self.context, snapshots)?;
        Some(Job::Scrub(read))
    }

    fn next_payload_scrub(&mut self) -> Option<Job> {
        let options = &self.context.options;
        let (period_ms, partitions) = (options.scrub_ms, options.shape.partitions);
        let scrub = &mut self.background.payload_scrub;
        scrub.next(self.context.now_ms(), period_ms, partitions, &mut self.partitions).map(Job::ScrubPayloads)
    }

    /// Handles a finished job, other than that of a received state.
    ///
    /// # Errors
    /// [`Error::SyncFailed`].
    pub(crate) fn job_done(&mut self, job: &Job, result: Result<JobOutput, Error>) -> Result<(), Error> {
        let now_ms = self.context.now_ms();
        match (job, result) {
            (Job::Scrub(read), result) => {
                let outcome = self.background.scrub.finish(read, result, now_ms, &self.context.shared);
                if let Some(ScrubOutcome { partition, lsn, error }) = outcome {
                    self.snapshot_is_damaged(partition, lsn, &error);
                }
            }
            (Job::ScrubPayloads(read), Ok(JobOutput::ScrubbedPayloads(output))) => {
                stats::add(&self.context.shared.scrubbed_bytes, output.bytes());
                self.background.payload_scrub.finish(read, output, &mut self.partitions, now_ms);
            }
            (Job::Write(write), Ok(JobOutput::Written(written))) => self.write_done(write, Ok(written))?,
            (Job::Write(write), Err(error)) => self.write_done(write, Err(error))?,
            (Job::Write(_) | Job::ScrubPayloads(_), _) => {}
        }
        Ok(())
    }

    /// Records that the job in flight ended.
    pub(crate) const fn end_job(&mut self) {
        self.background.end_job();
    }

    /// Queues a received replica state to be written.
    pub(crate) fn queue_install(&mut self, write: SnapshotWrite) {
        self.background.install(write);
    }

    /// Records that a received replica state failed to be written.
    pub(crate) fn install_failed(&mut self, failed: FailedInstall) {
        stats::add(&self.context.shared.failed_snapshots, 1);
        self.background.install_failed(self.context.now_ms(), failed);
    }

    /// Takes a replica state that is to be requested again.
    pub(crate) fn next_failed_install(&mut self, now_ms: u64) -> Option<FailedInstall> {
        self.background.next_failed_install(now_ms)
    }

    /// Handles a written snapshot.
    fn write_done(&mut self, write: &SnapshotWrite, result: Result<WrittenSnapshot, Error>) -> Result<(), Error> {
        if !self.background.has_rounds() {
            return Ok(());
        }
        match result {
            Ok(WrittenSnapshot { info, older, removed_segments }) => {
                self.partitions.arena.payloads.removed(info.partition, &removed_segments);
                self.snapshot_written(write, info, older);
            }
            Err(error @ Error::SyncFailed { .. }) => return Err(error),
            Err(error) => {
                if let (Error::Corrupt { .. }, false) = (&error, write.own) {
                    let damage = payload::describe(&error);
                    self.partitions.arena.payloads.report_damage(write.head.partition, damage);
                }
                stats::add(&self.context.shared.failed_snapshots, 1);
                self.background.fail_round(error);
            }
        }
        self.background.end_rounds();
        Ok(())
    }

    fn snapshot_written(&mut self, write: &SnapshotWrite, info: SnapshotInfo, older: Option<Lsn>) {
        let shared = &self.context.shared;
        stats::add(&shared.snapshots, 1);
        stats::add(&shared.snapshot_bytes, info.bytes);
        if write.own {
            self.states[info.partition.0 as usize].set_snapshots(info.lsn, older, &write.damaged);
        } else {
            self.background.charge_backup(info.bytes, self.context.now_ms(), shared.served());
        }
        self.background.add_written(info);
    }

    fn snapshot_is_damaged(&mut self, partition: PartitionId, lsn: Lsn, error: &Error) {
        // A state transfer may have replaced the snapshot meanwhile.
        if self.states[partition.0 as usize].mark_damaged(lsn) {
            stats::add(&self.context.shared.damaged_snapshots, 1);
            let message = format!("snapshot of partition {partition} is damaged and will be rewritten: {error}");
            *self.context.shared.damage.write() = Some(message);
            self.rewrite_snapshot(partition);
        }
    }
}
