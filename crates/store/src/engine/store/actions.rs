//! Executes the decisions of the replicas: log entries, messages to peers, proposals to the map.
//!
//! Every event of a replica passes through `Store::step`, and its actions are executed in order.

use super::Store;
use crate::engine::results::WriteError;
use crate::engine::sequencer::Mark;
use crate::payload::scrub::Repair;
use crate::peer::{Envelope, Message, Proposal};
use crate::replication::digest_check::DigestMismatch;
use crate::replication::transfer::TransferProgress;
use crate::replication::{self, recovered_replica, rules};
use crate::snapshot_file::{self, SnapshotHead};
use crate::state::{Content, Pending};
use crate::stats;
use crate::wal::{Body, Entry};
use crate::{Error, ImportError};
use engram_cluster::PartitionMap;
use engram_cluster::injected;
use engram_cluster::replica::{self, Action, Event, History, RecoveredReplica};
use engram_memory::codec::decode_record;
use engram_memory::{Command, Digest, Lsn, Member, Ordinal, PartitionId, Record, Term};
use std::collections::BTreeSet;

/// Suffix of snapshots set aside because the replica's digest differed; kept for analysis.
const ASIDE_SUFFIX: &str = ".different";

/// Records of a received message.
struct ReceivedRecords<'a> {
    bytes: &'a [bytes::Bytes],
    /// LSN before the first record.
    before: Lsn,
    /// Records that are new here, decoded.
    new: Vec<(Lsn, Term, Record)>,
}

/// Events.
impl Store {
    /// Processes the newest partition map.
    pub fn update_map(&mut self, map: &PartitionMap) {
        for (partition, entry) in map.entries() {
            let Some(state) = self.state.get(partition) else { continue };
            // A corrupt replica does not become primary; another primary has to repair it.
            let own_ordinal = self.context.options.replication.ordinal;
            let is_corrupt_primary = state.corrupt().is_some() && entry.primary == own_ordinal;
            if !is_corrupt_primary {
                self.update_entry(partition, entry);
            }
            let promised = self.promised(partition);
            let declines = is_corrupt_primary || (entry.served_by(&self.context.member) && promised < entry.term);
            self.replication.observe_entry(partition, entry, promised, declines);
        }
    }

    pub(super) fn update_entry(&mut self, partition: PartitionId, entry: &engram_cluster::Entry) {
        let actions = self.state.of_mut(partition).apply_entry(entry);
        self.execute_actions(partition, actions, None);
        self.replication.drop_removed_followers(&self.state, partition);
    }

    /// Handles a new stream to a process; messages sent before to its ordinal may be lost.
    pub fn connect_peer(&mut self, peer: Member) {
        self.replication.connect(peer);
        self.step_all(&Event::Connected(peer));
    }

    /// Marks the process at an ordinal as suspected dead.
    pub fn suspect(&mut self, ordinal: Ordinal) {
        self.replication.suspect(ordinal);
        self.step_all(&Event::Suspected(ordinal));
    }

    /// Clears the suspicion of the process at an ordinal.
    pub fn trust(&mut self, ordinal: Ordinal) {
        self.replication.trust(ordinal);
        self.step_all(&Event::Trusted(ordinal));
    }

    /// Sets the ordinals whose processes are about to stop and are no longer primary of any partition: partitions with their primary
    /// here continue without them if enough replicas remain.
    pub fn set_leaving(&mut self, leavers: &BTreeSet<Ordinal>) {
        self.step_all(&Event::Leaving(leavers.clone()));
    }

    /// Transfers the leadership of a partition. It is served here until the map names the new primary.
    pub fn transfer_leadership(&mut self, partition: PartitionId, to: Ordinal) {
        if self.state.get(partition).is_some() {
            self.step(partition, Event::TransferLeadership(to));
            if injected!(ReleaseBeforeStop) {
                self.replication.release_leases(partition, [to].into());
            }
        }
    }

    /// Removes expired grants of read leases.
    pub(super) fn expire_grants(&mut self) {
        for partition in self.replication.take_expired_grants() {
            self.step(partition, Event::GrantExpired);
        }
    }

    pub(super) fn step_all(&mut self, event: &Event) {
        for partition in self.context.all_partitions() {
            self.step(partition, event.clone());
        }
    }

    pub(super) fn step(&mut self, partition: PartitionId, event: Event) {
        let actions = self.state.of_mut(partition).step(event);
        self.execute_actions(partition, actions, None);
    }
}

/// Messages.
impl Store {
    /// Processes messages of a peer.
    ///
    /// # Errors
    /// The device failed.
    pub fn receive(&mut self, from: Member, envelopes: Vec<Envelope>) -> Result<(), Error> {
        for Envelope { partition, body, trace } in envelopes {
            if self.state.get(partition).is_none() {
                continue;
            }
            let (replication, state) = (&mut self.replication, &mut self.state);
            match body {
                Message::Replica(message, records) => {
                    let end = state.of(partition).last();
                    self.receive_replica_message(partition, from, message, &records);
                    self.state.of_mut(partition).trace_received(end, trace);
                }
                Message::State(chunk) => {
                    let received = replication.receive_state(state, partition, from.ordinal, &chunk);
                    self.state_received(partition, from.ordinal, chunk.term, received)?;
                }
                Message::Release => {
                    if replication.end_grant(state, partition, from) {
                        self.expire_grants();
                    }
                }
                Message::Confirm { term, round } => replication.receive_confirm(state, partition, from, (term, round)),
                Message::Confirmed { term, round, promised } => {
                    replication.receive_confirmed(partition, from, (term, round), promised);
                }
                Message::PositionRequest { requested_ms } => {
                    replication.receive_position_query(state, partition, from, requested_ms);
                }
                Message::Position { term, lsn, requested_ms } => {
                    replication.receive_position(state, partition, from, (term, lsn, requested_ms));
                }
                Message::Digest { term, lsn, digest } => {
                    let mismatch = replication.receive_digest(state, partition, from, (term, lsn, Digest(digest)));
                    self.discard_mismatch(partition, mismatch);
                }
            }
        }
        self.apply_due()
    }

    fn receive_replica_message(
        &mut self,
        partition: PartitionId,
        from: Member,
        message: replica::Message,
        records: &[bytes::Bytes],
    ) {
        let mut received = None;
        match &message {
            replica::Message::Append { after, runs, .. } => {
                let end = self.state.of(partition).last();
                let Some(decoded) = decode(*after, end, runs, records) else {
                    stats::add(&self.context.shared.malformed_messages, 1);
                    return;
                };
                received = Some(ReceivedRecords { bytes: records, before: *after, new: decoded });
            }
            replica::Message::Ack { written, .. } => {
                self.replication.acknowledge(partition, from.ordinal, *written, false);
            }
            replica::Message::Opened { written, .. } => {
                self.replication.acknowledge(partition, from.ordinal, *written, true);
            }
            // A rejection without a matching term here is a notification that the sender declines the primary role.
            replica::Message::Rejected { .. } => self.replication.receive_decline(partition, from),
            replica::Message::Open { history, .. } => self.state.of_mut(partition).complete_at(history.end()),
            _ => {}
        }
        let actions = self.state.of_mut(partition).step(Event::Received(from, message));
        self.execute_actions(partition, actions, received);
    }

    fn state_received(
        &mut self,
        partition: PartitionId,
        from: Ordinal,
        term: Term,
        progress: TransferProgress,
    ) -> Result<(), Error> {
        match progress {
            TransferProgress::Incomplete => Ok(()),
            TransferProgress::LostCommits => {
                self.discard_replica(partition, from, term, "its primary lost records that are committed here")
            }
            TransferProgress::Complete(write) => {
                self.state.queue_install(*write);
                Ok(())
            }
        }
    }
}

/// Actions.
impl Store {
    /// Executes the actions of a replica, with the records of the message that caused them.
    fn execute_actions(&mut self, partition: PartitionId, actions: Vec<Action>, received: Option<ReceivedRecords<'_>>) {
        let mut received = received;
        for action in actions {
            let done = match action {
                Action::Promise(term) => self.log_promise(partition, term),
                Action::Truncate { term, after } => self.log_truncate(partition, term, after),
                Action::Log { after } => {
                    let received = received.take().expect("only messages with records cause it");
                    self.log_received(partition, after, received)
                }
                // Repeats the promise: once this entry is durable, all entries before it are.
                Action::Sync => self.log_promise(partition, self.promised(partition)),
                Action::Commit(_) => {
                    self.state.mark_due(partition);
                    self.replication.mark_pending(partition);
                    self.finish_repair(partition)
                }
                Action::Serve(term) => {
                    self.serve(partition, term);
                    Ok(())
                }
                Action::Stop => {
                    self.stop_serving(partition);
                    Ok(())
                }
                Action::Send(to, message) => {
                    self.replication.send(to, partition, Message::Replica(message, Vec::new()));
                    Ok(())
                }
                Action::Stream { to, after } => {
                    self.replication.stream(&self.state, partition, to, after);
                    Ok(())
                }
                Action::SendSnapshot(to) => {
                    self.replication.enqueue_transfer(partition, to);
                    Ok(())
                }
                Action::Propose(expected, change) => {
                    self.replication.propose_change(Proposal { partition, expected, change });
                    Ok(())
                }
            };
            if let Err(error) = done {
                self.failed.get_or_insert(error);
            }
        }
    }

    fn log_promise(&mut self, partition: PartitionId, term: Term) -> Result<(), Error> {
        let entry = Entry { partition, term, lsn: Lsn(0), body: Body::Promise { accepted: true } };
        self.sequencer.append(&entry, Mark::Promise(partition, term), true)
    }

    fn log_truncate(&mut self, partition: PartitionId, term: Term, after: Lsn) -> Result<(), Error> {
        for pending in self.state.of_mut(partition).remove_above(after) {
            let error = WriteError::NotPrimary { partition, term: Some(term) };
            self.sequencer.refuse(partition, pending, &error);
        }
        self.replication.truncate(partition, after);
        // Write notifications of truncated records do not cover the record that is now the last.
        let (lsn, last_term) = self.state.of(partition).replica().history().last();
        let mark = Mark::Record(partition, lsn, last_term);
        self.sequencer.append(&Entry { partition, term, lsn: after, body: Body::Truncate }, mark, false)
    }

    fn log_received(&mut self, partition: PartitionId, after: Lsn, received: ReceivedRecords<'_>) -> Result<(), Error> {
        let ReceivedRecords { bytes, before, new } = received;
        for (lsn, term, record) in new.into_iter().filter(|(lsn, ..)| *lsn > after) {
            let encoded = &bytes[(lsn.0 - before.0 - 1) as usize];
            let entry = Entry { partition, term, lsn, body: Body::Command(encoded) };
            self.sequencer.append(&entry, Mark::Record(partition, lsn, term), false)?;
            self.replication.retain(partition, lsn, term, encoded);
            stats::add(&self.context.shared.logged_bytes, encoded.len() as u64);
            self.add_pending(partition, Pending::new(lsn, term, record, Vec::new()));
        }
        Ok(())
    }

    fn serve(&mut self, partition: PartitionId, term: Term) {
        let (settings, waiting) = self.state.serve(partition, term);
        if let Some(settings) = settings {
            // The settings were validated at process start, so the proposal is not rejected.
            let _ = self.propose(partition, Record::bare(Command::Configure(settings)), None);
            // The configuration of a served partition is durable in every mode.
            self.sequencer.require_sync();
        }
        self.state.answer_activations(partition, term, waiting);
    }

    fn stop_serving(&mut self, partition: PartitionId) {
        let waiters = self.state.stop_serving(partition);
        let replica = self.state.of(partition).replica();
        let (promised, granters) = (replica.promised(), replica.successors());
        self.replication.stop(partition, granters);
        for (waiter, has_request) in waiters {
            // With a session the client can safely retry. Without one the outcome is unknown.
            let error = if has_request {
                WriteError::NotPrimary { partition, term: Some(promised) }
            } else {
                WriteError::Unknown { partition }
            };
            self.sequencer.answer(waiter, Err(error));
        }
        self.state.reject_activations(partition);
    }
}

/// Repair and roll-back.
impl Store {
    /// Clears the damage of a replica that has caught up with what its primary had when it opened the term.
    fn finish_repair(&mut self, partition: PartitionId) -> Result<(), Error> {
        if self.state.of(partition).is_repaired() { self.set_damage_note(partition, "") } else { Ok(()) }
    }

    /// Records durably why the replica here is damaged; empty = repaired. A damaged replica does not become primary, even if the map
    /// still lists it as in sync.
    pub(super) fn set_damage_note(&mut self, partition: PartitionId, what: &str) -> Result<(), Error> {
        let state = self.state.of_mut(partition);
        state.set_corrupt((!what.is_empty()).then(|| what.to_owned()));
        let term = state.replica().promised();
        let entry = Entry { partition, term, lsn: Lsn(0), body: Body::Note(what.as_bytes()) };
        self.sequencer.append(&entry, Mark::Other(partition), true)
    }

    /// Logs that the partition was replaced by a snapshot at `lsn`, or cleared if 0.
    pub(super) fn log_installed(&mut self, partition: PartitionId, term: Term, lsn: Lsn) -> Result<(), Error> {
        self.sequencer.append(&Entry { partition, term, lsn, body: Body::Installed }, Mark::Other(partition), true)
    }

    /// Rolls a partition back to what is written after a log failure. Only without peers, which might have more.
    pub(super) fn roll_back(&mut self, partition: PartitionId, cause: &WriteError) {
        let options = &self.context.options;
        let state = self.state.of_mut(partition);
        let kept = state.applied().0.max(state.written().0.min(state.last()));
        if state.replica().serving_term().is_some() && options.replication.replicas == 1 {
            state.withdraw(kept);
        } else {
            // Nothing was served at a term whose promise is not logged: this process may promise it again.
            let replica = state.replica();
            let mut history = replica.history().clone();
            history.truncate(kept.max(history.floor().0));
            let recovered = RecoveredReplica {
                lossless_since: self.context.member.incarnation,
                promised: replica.durable_promise(),
                history,
                commit: replica.commit(),
                granted: false,
            };
            let options = (rules(options), &options.replication);
            state.replace_replica(replication::replica_of(self.context.member, options.0, recovered, options.1));
            self.context.serving.publish(partition, None);
        }
        for pending in self.state.of_mut(partition).remove_above(kept) {
            self.sequencer.refuse(partition, pending, cause);
        }
        self.state.fail_activations(partition, &cause.reason());
        self.replication.truncate(partition, kept);
    }

    /// Replaces the local state by a received one that is durable as a snapshot.
    pub(super) fn install(
        &mut self,
        content: &Content,
        head: SnapshotHead,
        term: Term,
        from: Ordinal,
    ) -> Result<(), Error> {
        let partition = head.partition;
        let accepts = self.state.of(partition).replica().accepts_snapshot(term, head.lsn);
        let imported = if accepts { self.state.import(content) } else { Ok(()) };
        if !accepts || imported.is_err() {
            // The next start must not find the unused snapshot, unless a duplicate transfer names the installed one.
            if !self.state.of(partition).snapshots().contains(&Some(head.lsn)) {
                let _ = self.context.disk.remove(&snapshot_file::name(partition, head.lsn));
            }
            if let Err(ImportError::Device(error)) = imported {
                return Err(error.into());
            }
            if accepts {
                // The previous state is gone without a replacement.
                stats::add(&self.context.shared.malformed_messages, 1);
                let what = "the state received from its primary failed to load";
                return self.discard_replica(partition, from, term, what);
            }
            self.replication.request_transfer_again(partition, from, term);
            return Ok(());
        }
        stats::add(&self.context.shared.transfers_installed, 1);
        self.drop_pending(partition);
        self.replication.set_applied(partition, head.lsn);
        self.sequencer.replace_applied(partition, head.term, head.lsn);
        self.state.installed(partition, head.lsn, head.term);
        self.log_installed(partition, head.term, head.lsn)?;
        // The snapshot is durable; a restart finds it even if the log does not name it.
        self.step(partition, Event::Installed(head.lsn, head.term));
        self.finish_repair(partition)
    }

    /// Rebuilds replicas with damaged payloads.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn repair_payloads(&mut self) -> Result<(), Error> {
        for repair in self.state.payload_repairs() {
            match repair {
                Repair::Discard { partition, primary, term, what } => {
                    self.discard_replica(partition, primary, term, &what)?;
                }
                Repair::TransferLeadership(partition, to) => self.transfer_leadership(partition, to),
            }
        }
        Ok(())
    }

    /// Discards a replica whose digest differs from that of its primary.
    pub(super) fn discard_mismatch(&mut self, partition: PartitionId, mismatch: Option<DigestMismatch>) {
        let Some(DigestMismatch { primary, term, what }) = mismatch else { return };
        if let Err(error) = self.discard_replica(partition, primary.ordinal, term, &what) {
            self.failed.get_or_insert(error);
        }
    }

    /// Discards the state of a replica and requests a state transfer. It does not become primary until it is repaired.
    fn discard_replica(&mut self, partition: PartitionId, from: Ordinal, term: Term, what: &str) -> Result<(), Error> {
        self.drop_pending(partition);
        self.state.close(partition);
        self.set_snapshots_aside(partition)?;
        self.log_installed(partition, Term(0), Lsn(0))?;
        let (member, granted) = (self.context.member, self.context.is_replicated());
        let (promised, empty) = (self.promised(partition), (History::default(), Lsn(0)));
        let replica = recovered_replica(member, &self.context.options, member.incarnation, promised, empty, granted);
        self.state.of_mut(partition).replace_replica(replica);
        self.state.discard(partition);
        self.sequencer.replace_applied(partition, Term(0), Lsn(0));
        self.replication.forget_digests(partition);
        self.replication.request_transfer_again(partition, from, term);
        self.set_damage_note(partition, what)
    }

    /// Renames the snapshots of a partition, so that the next start does not load them.
    fn set_snapshots_aside(&self, partition: PartitionId) -> Result<(), Error> {
        let disk = &self.context.disk;
        for lsn in snapshot_file::list(&**disk)?.remove(&partition).unwrap_or_default() {
            let name = snapshot_file::name(partition, lsn);
            let failed = |source| Error::Io { operation: "rename", path: disk.describe(&name), source };
            disk.rename(&name, &format!("{name}{ASIDE_SUFFIX}")).map_err(failed)?;
        }
        disk.sync_dir().map_err(|source| Error::SyncFailed { path: disk.describe(""), source })
    }

    fn drop_pending(&mut self, partition: PartitionId) {
        for pending in self.state.of_mut(partition).remove_above(Lsn(0)) {
            let error = WriteError::NotPrimary { partition, term: None };
            self.sequencer.refuse(partition, pending, &error);
        }
        self.replication.truncate(partition, Lsn(0));
        self.replication.set_applied(partition, Lsn(0));
    }
}

/// Decodes the records of a message that are new here; `None` if the message is malformed.
fn decode(after: Lsn, end: Lsn, runs: &[(Lsn, Term)], records: &[bytes::Bytes]) -> Option<Vec<(Lsn, Term, Record)>> {
    let last = runs.last().map_or(after, |run| run.0);
    let ascending = runs.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 < pair[1].1);
    if !ascending || runs.first().is_some_and(|run| run.0 <= after) || last.0 - after.0 != records.len() as u64 {
        return None;
    }
    let mut decoded = Vec::new();
    let mut runs = runs.iter();
    let mut run = runs.next();
    for (index, bytes) in records.iter().enumerate() {
        let lsn = Lsn(after.0 + 1 + index as u64);
        if run.is_some_and(|run| run.0 < lsn) {
            run = runs.next();
        }
        if lsn > end {
            decoded.push((lsn, run?.1, decode_record(bytes).ok()?));
        }
    }
    Some(decoded)
}
