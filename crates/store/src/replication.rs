//! Executes the decisions of the replicas: log entries, messages to peers, proposals to the map.
//!
//! Every event of a replica passes through `Store::step`, and its actions are executed in order. Outgoing messages are collected
//! and sent once per turn (`Store::dispatch`), so that partitions share frames as they share log batches.

use crate::decline::{DeclineAction, Declines};
use crate::peer::{Envelope, Message, NoPeers, Peers, Proposal};
use crate::results::WriteError;
use crate::shipping::Shipping;
use crate::state_transfer::{IncomingTransfer, StateTransfers};
use crate::stats;
use crate::store::{Mark, Pending, Store};
use crate::wal::{Body, Durability, Entry};
use crate::{ActivateError, Error};
use engram_cluster::injected;
#[cfg(feature = "defects")]
use engram_cluster::injected::Bug;
use engram_cluster::replica::{self, Action, Event, History, RecoveredReplica};
use engram_cluster::{PartitionMap, Replica};
use engram_memory::codec::decode_record;
use engram_memory::session::Admission;
use engram_memory::{Command, Lsn, Member, Ordinal, PartitionId, Record, Settings, Term};
use std::collections::{BTreeMap, BTreeSet};

/// Milliseconds after which proposals without effect are repeated.
const RETRY_MS: u64 = 300;

/// Replication options of this worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Ordinal of this worker.
    pub ordinal: Ordinal,
    /// Configured replicas per partition.
    pub replicas: u32,
    /// Fewest in-sync replicas with which writes are committed.
    pub min_in_sync: usize,
    /// Bytes of records retained in memory for lagging followers; a follower that needs older ones gets a state transfer. Unused with
    /// a single replica.
    pub retained_bytes: usize,
    /// Most bytes per second of all state transfers to followers; reduced while they slow down writes. Raising it speeds up
    /// re-replication and slows down writes meanwhile; 0 = no limit.
    pub transfer_bytes_per_s: u64,
    /// A bug injected into every replica.
    #[cfg(feature = "defects")]
    pub bug: Option<Bug>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            ordinal: Ordinal(0),
            replicas: 1,
            min_in_sync: 1,
            retained_bytes: 64 << 20,
            transfer_bytes_per_s: 64 << 20,
            #[cfg(feature = "defects")]
            bug: None,
        }
    }
}

/// Replication state of the store.
pub(crate) struct Replication {
    pub(crate) peers: Box<dyn Peers>,
    pub(crate) shipping: Shipping,
    pub(crate) outbox: BTreeMap<Ordinal, Vec<Envelope>>,
    proposals: Vec<Proposal>,
    /// Outgoing state transfers.
    pub(crate) transfers: StateTransfers,
    /// Incoming state transfers.
    pub(crate) incoming: BTreeMap<PartitionId, IncomingTransfer>,
    declines: Declines,
    /// Ordinals suspected dead. Replicas track them too, but lose them when recreated.
    suspected: BTreeSet<Ordinal>,
    /// Last known process at each ordinal.
    known_members: BTreeMap<Ordinal, Member>,
    retried_ms: u64,
    /// Error of an action that failed to append to the log.
    pub(crate) failed: Option<Error>,
}

impl Replication {
    pub(crate) fn new(shipping: Shipping, options: &Options) -> Self {
        Self {
            peers: Box::new(NoPeers),
            shipping,
            outbox: BTreeMap::new(),
            proposals: Vec::new(),
            transfers: StateTransfers::new(options.transfer_bytes_per_s),
            incoming: BTreeMap::new(),
            declines: Declines::default(),
            suspected: BTreeSet::new(),
            known_members: BTreeMap::new(),
            retried_ms: 0,
            failed: None,
        }
    }

    /// Releases the read leases of a partition at their granters.
    fn release_leases(&mut self, partition: PartitionId, granters: BTreeSet<Ordinal>) {
        for granter in granters {
            self.outbox.entry(granter).or_default().push(Envelope::new(partition, Message::Release));
        }
    }
}

/// Records of a received message.
struct ReceivedRecords<'a> {
    bytes: &'a [bytes::Bytes],
    /// LSN before the first record.
    before: Lsn,
    /// Records that are new here, decoded.
    new: Vec<(Lsn, Term, Record)>,
}

/// Status of a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// Partition.
    pub partition: PartitionId,
    /// `primary`, `activating`, `backup`, `corrupt` or `idle`.
    pub role: &'static str,
    /// Highest promised term.
    pub term: Term,
    /// LSN of the last record in the log.
    pub last: Lsn,
    /// Term of that record.
    pub last_term: Term,
    /// LSN of the last record known to be committed.
    pub commit: Lsn,
    /// LSN of the last applied record.
    pub applied: Lsn,
    /// For a primary: its followers with their acknowledged LSN.
    pub followers: Vec<(Ordinal, Lsn)>,
}

impl Store {
    /// Sets the interface to the peers.
    pub fn set_peers(&mut self, peers: Box<dyn Peers>) {
        self.replication.peers = peers;
    }

    /// Processes the newest partition map.
    pub fn update_map(&mut self, map: &PartitionMap) {
        for (partition, entry) in map.entries() {
            let Some(state) = self.states.get(partition.0 as usize) else { continue };
            // A corrupt replica does not become primary; another primary has to repair it.
            let is_corrupt_primary = state.corrupt.is_some() && entry.primary == self.options.replication.ordinal;
            if !is_corrupt_primary {
                self.update_entry(partition, entry);
            }
            let promised = self.states[partition.0 as usize].replica.promised();
            let declines = is_corrupt_primary || (entry.served_by(&self.member()) && promised < entry.term);
            self.replication.declines.observe(partition, entry, promised, declines);
        }
    }

    pub(crate) fn update_entry(&mut self, partition: PartitionId, entry: &engram_cluster::Entry) {
        let mut actions = Vec::new();
        self.states[partition.0 as usize].replica.apply_entry(entry, &mut actions);
        self.execute_actions(partition, actions, None);
        self.drop_removed_followers(partition);
    }

    /// Ends streams and state transfers to followers that the map does not name any more. Such a follower may never answer, and what is in
    /// flight to it counts against the capacity of its worker.
    fn drop_removed_followers(&mut self, partition: PartitionId) {
        let followers: BTreeSet<Ordinal> =
            self.states[partition.0 as usize].replica.followers().map(|(ordinal, _)| ordinal).collect();
        self.replication.transfers.keep_only(partition, &followers);
        let shipping = &mut self.replication.shipping;
        let removed: Vec<Ordinal> = shipping.followers(partition).filter(|to| !followers.contains(to)).collect();
        removed.into_iter().for_each(|to| shipping.stop(partition, to));
    }

    /// Handles a new stream to a process; messages sent before to its ordinal may be lost.
    pub fn connect_peer(&mut self, peer: Member) {
        self.replication.shipping.reset_peer(peer.ordinal);
        self.replication.transfers.reset_peer(peer.ordinal);
        self.replication.outbox.remove(&peer.ordinal);
        self.replication.known_members.insert(peer.ordinal, peer);
        self.step_all(&Event::Connected(peer));
    }

    /// Marks the process at an ordinal as suspected dead.
    pub fn suspect(&mut self, ordinal: Ordinal) {
        self.replication.suspected.insert(ordinal);
        self.step_all(&Event::Suspected(ordinal));
    }

    /// Clears the suspicion of the process at an ordinal.
    pub fn trust(&mut self, ordinal: Ordinal) {
        self.replication.suspected.remove(&ordinal);
        self.step_all(&Event::Trusted(ordinal));
    }

    /// Sets the ordinals whose processes are about to stop and are no longer primary of any partition: partitions with their primary
    /// here continue without them if enough replicas remain.
    pub fn set_leaving(&mut self, leavers: &BTreeSet<Ordinal>) {
        self.step_all(&Event::Leaving(leavers.clone()));
    }

    /// Transfers the leadership of a partition. It is served here until the map names the new primary.
    pub fn transfer_leadership(&mut self, partition: PartitionId, to: Ordinal) {
        if self.states.get(partition.0 as usize).is_some() {
            self.step(partition, Event::TransferLeadership(to));
            if injected!(ReleaseBeforeStop) {
                self.replication.release_leases(partition, [to].into());
            }
        }
    }

    /// Processes messages of a peer.
    ///
    /// # Errors
    /// The device failed.
    pub fn receive(&mut self, from: Member, envelopes: Vec<Envelope>) -> Result<(), Error> {
        for Envelope { partition, body, trace } in envelopes {
            if self.states.get(partition.0 as usize).is_none() {
                continue;
            }
            match body {
                Message::Replica(message, records) => {
                    let end = self.states[partition.0 as usize].last();
                    self.receive_replica_message(partition, from, message, &records);
                    self.trace_received(partition, end, trace);
                }
                Message::State(chunk) => self.receive_state(partition, from.ordinal, &chunk)?,
                Message::Release => self.release_lease(partition, from),
                Message::Confirm { term, round } => self.receive_confirm(partition, from, term, round),
                Message::Confirmed { term, round, promised } => {
                    self.confirmed_reads.receive(partition, from, term, round, promised);
                }
                Message::PositionRequest { requested_ms } => self.receive_position_query(partition, from, requested_ms),
                Message::Position { term, lsn, requested_ms } => {
                    self.receive_position(partition, from, term, lsn, requested_ms);
                }
                Message::Digest { term, lsn, digest } => {
                    self.receive_digest(partition, from, term, lsn, engram_memory::Digest(digest));
                }
            }
        }
        self.apply_due()
    }

    /// Returns the status of every replica.
    pub fn replicas(&self) -> Vec<ReplicaStatus> {
        let status = |(partition, state): (usize, &crate::store::PartitionState)| {
            let role = match (&state.corrupt, state.replica.serving_term(), state.replica.primary_term()) {
                (Some(_), ..) => "corrupt",
                (_, Some(_), _) => "primary",
                (_, _, Some(_)) => "activating",
                _ if state.last() > Lsn(0) => "backup",
                _ => "idle",
            };
            ReplicaStatus {
                partition: PartitionId(partition as u32),
                role,
                term: state.replica.promised(),
                last: state.last(),
                last_term: state.replica.history().last().1,
                commit: state.replica.commit(),
                applied: state.applied,
                followers: state.replica.followers().map(|(ordinal, follower)| (ordinal, follower.acked)).collect(),
            }
        };
        self.states.iter().enumerate().map(status).collect()
    }

    /// Finishes a turn: applies what its events committed, and sends messages and proposals.
    ///
    /// # Errors
    /// The log or the device failed.
    pub(crate) fn dispatch(&mut self) -> Result<(), Error> {
        if let Some(error) = self.replication.failed.take() {
            return Err(error);
        }
        self.retry_proposals();
        self.apply_due()?;
        self.complete_confirmed_reads();
        self.complete_stale_reads();
        for partition in self.replication.shipping.take_pending() {
            self.ship(partition);
        }
        self.send_state()?;
        for (to, envelopes) in std::mem::take(&mut self.replication.outbox) {
            self.replication.peers.send(to, envelopes);
        }
        let proposals = std::mem::take(&mut self.replication.proposals);
        if !proposals.is_empty() {
            self.replication.peers.propose(proposals);
        }
        Ok(())
    }

    fn ship(&mut self, partition: PartitionId) {
        let replica = &self.states[partition.0 as usize].replica;
        let (Some(term), commit) = (replica.primary_term(), replica.commit()) else { return };
        let followers: Vec<Ordinal> = self.replication.shipping.followers(partition).collect();
        for to in followers {
            if self.replication.shipping.fell_behind(partition, to) {
                let replica = &self.states[partition.0 as usize].replica;
                let acked = replica.followers().find(|(ordinal, _)| *ordinal == to).map_or(Lsn(0), |it| it.1.acked);
                self.replication.shipping.stop(partition, to);
                self.stream(partition, to, acked);
            }
            let end = self.states[partition.0 as usize].last();
            let Some(batch) = self.replication.shipping.next(partition, to, term, commit) else { continue };
            debug_assert!(batch.after <= end, "a follower holds a prefix");
            stats::add(&self.shared.shipped_records, batch.records.len() as u64);
            let trace = self.trace_of(partition, batch.after, batch.records.len());
            let append = replica::Message::Append { term, after: batch.after, runs: batch.runs, commit };
            let body = Message::Replica(append, batch.records);
            self.replication.outbox.entry(to).or_default().push(Envelope { partition, body, trace });
        }
    }

    fn retry_proposals(&mut self) {
        let now_ms = self.clock.elapsed_ms();
        if now_ms.saturating_sub(self.replication.retried_ms) >= RETRY_MS {
            self.replication.retried_ms = now_ms;
            self.step_all(&Event::Resend);
            self.decline_leadership();
        }
    }

    /// Proposes another candidate for each partition whose primary role is declined here.
    fn decline_leadership(&mut self) {
        let (own_ordinal, now_ms) = (self.options.replication.ordinal, self.clock.elapsed_ms());
        let Replication { suspected, known_members, declines, .. } = &mut self.replication;
        // The map may name an earlier process than the running one.
        let running_at = |member: &Member| {
            (!suspected.contains(&member.ordinal)).then(|| *known_members.get(&member.ordinal).unwrap_or(member))
        };
        let actions = declines.actions(own_ordinal, now_ms, running_at);
        self.shared.set_leaderless_partitions(declines.leaderless().collect());
        for action in actions {
            match action {
                DeclineAction::Notify(partition, to, term) => {
                    let promised = self.promised(partition);
                    let body = Message::Replica(replica::Message::Rejected { term, promised }, Vec::new());
                    self.replication.outbox.entry(to).or_default().push(Envelope::new(partition, body));
                }
                DeclineAction::PromoteOther(partition, entry, change) => {
                    let proposal = Proposal { partition, expected: entry.expectation(), change };
                    self.replication.proposals.push(proposal);
                }
            }
        }
    }

    fn step_all(&mut self, event: &Event) {
        for partition in (0..self.options.shape.partitions).map(PartitionId) {
            self.step(partition, event.clone());
        }
    }

    pub(crate) fn step(&mut self, partition: PartitionId, event: Event) {
        let mut actions = Vec::new();
        self.states[partition.0 as usize].replica.step(event, &mut actions);
        self.execute_actions(partition, actions, None);
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
                let end = self.states[partition.0 as usize].last();
                let Some(decoded) = decode(*after, end, runs, records) else {
                    stats::add(&self.shared.malformed_messages, 1);
                    return;
                };
                received = Some(ReceivedRecords { bytes: records, before: *after, new: decoded });
            }
            replica::Message::Ack { written, .. } | replica::Message::Opened { written, .. } => {
                self.replication.shipping.acknowledge(partition, from.ordinal, *written);
                if matches!(message, replica::Message::Opened { .. }) {
                    self.replication.transfers.finish(partition, from.ordinal);
                }
            }
            // A rejection without a matching term here is a notification that the sender declines the primary role.
            replica::Message::Rejected { .. } => {
                let now_ms = self.clock.elapsed_ms();
                self.replication.declines.receive(partition, from, now_ms);
            }
            replica::Message::Open { history, .. } => {
                let state = &mut self.states[partition.0 as usize];
                if state.corrupt.is_some() {
                    state.complete_at = history.end();
                }
            }
            _ => {}
        }
        let mut actions = Vec::new();
        self.states[partition.0 as usize].replica.step(Event::Received(from, message), &mut actions);
        self.execute_actions(partition, actions, received);
    }

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
                Action::Send(to, message) => {
                    let body = Message::Replica(message, Vec::new());
                    self.replication.outbox.entry(to).or_default().push(Envelope::new(partition, body));
                    Ok(())
                }
                Action::Stream { to, after } => {
                    self.stream(partition, to, after);
                    Ok(())
                }
                Action::SendSnapshot(to) => {
                    self.replication.transfers.enqueue(partition, to);
                    Ok(())
                }
                Action::Commit(_) => {
                    self.due.insert(partition);
                    self.replication.shipping.mark_pending(partition);
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
                Action::Propose(expected, change) => {
                    self.replication.proposals.push(Proposal { partition, expected, change });
                    Ok(())
                }
            };
            if let Err(error) = done {
                self.replication.failed.get_or_insert(error);
            }
        }
    }

    fn log_promise(&mut self, partition: PartitionId, term: Term) -> Result<(), Error> {
        self.append(&Entry { partition, term, lsn: Lsn(0), body: Body::Promise { accepted: true } })?;
        self.push(Mark::Promise(partition, term), true);
        Ok(())
    }

    fn log_truncate(&mut self, partition: PartitionId, term: Term, after: Lsn) -> Result<(), Error> {
        let state = &mut self.states[partition.0 as usize];
        let kept = state.pending.partition_point(|pending| pending.lsn <= after);
        for pending in state.pending.split_off(kept) {
            self.states[partition.0 as usize].creates -= pending.record.command.may_create() as u64;
            self.refuse(partition, pending, &WriteError::NotPrimary { partition, term: Some(term) });
        }
        self.replication.shipping.truncate(partition, after);
        self.append(&Entry { partition, term, lsn: after, body: Body::Truncate })?;
        // Write notifications of truncated records do not cover the record that is now the last.
        let (lsn, term) = self.states[partition.0 as usize].replica.history().last();
        self.push(Mark::Record(partition, lsn, term), false);
        Ok(())
    }

    fn log_received(&mut self, partition: PartitionId, after: Lsn, received: ReceivedRecords<'_>) -> Result<(), Error> {
        let ReceivedRecords { bytes, before, new } = received;
        for (lsn, term, record) in new.into_iter().filter(|(lsn, ..)| *lsn > after) {
            let encoded = &bytes[(lsn.0 - before.0 - 1) as usize];
            self.append(&Entry { partition, term, lsn, body: Body::Command(encoded) })?;
            self.replication.shipping.retain(partition, lsn, term, encoded);
            stats::add(&self.shared.logged_bytes, encoded.len() as u64);
            self.add_pending(partition, lsn, term, record, Vec::new());
            self.push(Mark::Record(partition, lsn, term), false);
        }
        Ok(())
    }

    /// Adds a logged record to the pending ones.
    pub(crate) fn add_pending(
        &mut self,
        partition: PartitionId,
        lsn: Lsn,
        term: Term,
        record: Record,
        waiters: Vec<crate::pending_calls::Waiter>,
    ) {
        // A request that its session would refuse now may be admitted once records in flight are applied, so its repeats are decided
        // at apply.
        let ledger = self.partitions.ledger(partition);
        let request = record
            .request
            .filter(|request| ledger.is_none_or(|ledger| ledger.sessions.admit(*request) == Admission::Execute));
        if let Some(request) = request {
            self.requests.entry((partition, request)).or_insert(lsn);
        }
        let state = &mut self.states[partition.0 as usize];
        state.creates += record.command.may_create() as u64;
        state.pending.push_back(Pending { lsn, term, record, waiters, trace: None });
    }

    /// Indexes the requests of records that recovery found logged and not applied.
    pub(crate) fn index_pending_requests(&mut self) {
        for (partition, state) in self.states.iter().enumerate() {
            for pending in &state.pending {
                if let Some(request) = pending.record.request {
                    self.requests.entry((PartitionId(partition as u32), request)).or_insert(pending.lsn);
                }
            }
        }
    }

    /// Streams records to a follower, or transfers the state if the records are no longer retained.
    fn stream(&mut self, partition: PartitionId, to: Ordinal, after: Lsn) {
        let replica = &self.states[partition.0 as usize].replica;
        let Some(term) = replica.primary_term() else { return };
        if self.replication.shipping.covers(partition, after, replica.history().end()) {
            self.replication.shipping.start(partition, to, term, after);
        } else {
            self.replication.transfers.enqueue(partition, to);
        }
    }

    fn serve(&mut self, partition: PartitionId, term: Term) {
        if !self.partitions.contains(partition) {
            self.partitions.open(partition, Settings::default());
        }
        self.partitions.set_hidden(partition, false);
        // Committed records are applied before the current settings are determined.
        let now_ms = self.clock.elapsed_ms();
        let state = &mut self.states[partition.0 as usize];
        state.served_since_ms.get_or_insert(now_ms);
        let waiting = std::mem::take(&mut state.activations);
        let pending = state.pending.iter().rev().find_map(|pending| match pending.record.command {
            Command::Configure(settings) => Some(settings),
            _ => None,
        });
        let ledger = self.partitions.ledger(partition).map_or_else(Settings::default, |ledger| ledger.settings);
        let current = pending.unwrap_or(ledger);
        let target_settings = Settings { count_updates: current.count_updates, ..self.options.settings };
        // In this order, so that a reader that sees the term also sees the settings.
        self.shared.set_settings(partition, Some(target_settings));
        self.shared.set_term(partition, Some(term));
        if target_settings != current {
            // The settings were validated at process start, so the proposal is not rejected.
            let _ = self.propose(partition, Record::bare(Command::Configure(target_settings)), None);
            // The configuration of a served partition is durable in every mode.
            self.must_sync = true;
        }
        for (requested, waiter) in waiting {
            let answer = if requested == term {
                Ok(())
            } else {
                Err(ActivateError::TermPromised { partition, promised: term, requested })
            };
            self.activations.answer(waiter, answer);
        }
    }

    fn stop_serving(&mut self, partition: PartitionId) {
        self.shared.set_term(partition, None);
        let hidden = self.options.replication.replicas > 1;
        self.partitions.set_hidden(partition, hidden);
        self.replication.shipping.stop_all(partition);
        self.replication.transfers.stop(partition);
        let state = &mut self.states[partition.0 as usize];
        // The next primary need not wait for the expiry of unused leases.
        self.replication.release_leases(partition, state.replica.successors());
        state.served_since_ms = None;
        let promised = state.replica.promised();
        let mut answers = Vec::new();
        for pending in &mut state.pending {
            // With a session the client can safely retry. Without one the outcome is unknown.
            let error = match pending.record.request {
                Some(_) => WriteError::NotPrimary { partition, term: Some(promised) },
                None => WriteError::Unknown { partition },
            };
            answers.extend(pending.waiters.drain(..).map(|waiter| (waiter, error.clone())));
        }
        for (waiter, error) in answers {
            self.writes.answer(waiter, Err(error));
        }
        for (requested, waiter) in std::mem::take(&mut self.states[partition.0 as usize].activations) {
            self.activations.answer(waiter, Err(ActivateError::TermPromised { partition, promised, requested }));
        }
    }

    /// Clears the damage of a replica that has caught up with what its primary had when it opened the term.
    pub(crate) fn finish_repair(&mut self, partition: PartitionId) -> Result<(), Error> {
        let state = &self.states[partition.0 as usize];
        let is_repaired = state.corrupt.is_some() && state.replica.commit() >= state.complete_at;
        if is_repaired { self.set_damage_note(partition, "") } else { Ok(()) }
    }

    /// Rolls a partition back to what is written after a log failure. Only without peers, which might have more.
    pub(crate) fn roll_back(&mut self, partition: PartitionId, cause: &WriteError) {
        let (member, rules, options) = (self.member(), self.rules(), self.options.replication);
        let state = &mut self.states[partition.0 as usize];
        let kept = state.applied.max(state.written.0.min(state.last()));
        let serving_term = state.replica.serving_term();
        if serving_term.is_some() && self.options.replication.replicas == 1 {
            state.replica.withdraw(kept);
        } else {
            // Nothing was served at a term whose promise is not logged: this process may promise it again.
            let mut history = state.replica.history().clone();
            history.truncate(kept.max(history.floor().0));
            let recovered = RecoveredReplica {
                lossless_since: member.incarnation,
                promised: state.replica.durable_promise(),
                history,
                commit: state.replica.commit(),
                granted: false,
            };
            state.replica = replica_of(member, rules, recovered, &options);
            self.shared.set_term(partition, None);
        }
        let state = &mut self.states[partition.0 as usize];
        let refused = state.pending.split_off(state.pending.partition_point(|pending| pending.lsn <= kept));
        let waiting = std::mem::take(&mut state.activations);
        state.creates = state.pending.iter().map(|pending| pending.record.command.may_create() as u64).sum();
        for pending in refused {
            self.refuse(partition, pending, cause);
        }
        for (_, waiter) in waiting {
            self.activations.answer(waiter, Err(ActivateError::Failed { reason: cause.reason() }));
        }
        self.replication.shipping.truncate(partition, kept);
    }

    pub(crate) fn rules(&self) -> replica::Rules {
        rules(&self.options)
    }
}

pub(crate) fn rules(options: &crate::Options) -> replica::Rules {
    replica::Rules {
        keeps_all: options.wal.durability.syncs_first(options.replication.replicas),
        min_in_sync: options.replication.min_in_sync,
        primary_only: options.wal.durability == Durability::Async,
    }
}

/// Creates the replica of a partition after recovery, or after its state was discarded; `granted`: a read lease granted for it may
/// be in force.
pub(crate) fn recovered_replica(
    member: Member,
    options: &crate::Options,
    lossless_since: engram_memory::Incarnation,
    promised: Term,
    (history, commit): (History, Lsn),
    granted: bool,
) -> Replica {
    let recovered = RecoveredReplica { lossless_since, promised, history, commit, granted };
    replica_of(member, rules(options), recovered, &options.replication)
}

#[cfg_attr(not(feature = "defects"), expect(unused_variables, reason = "used for injected bugs only"))]
fn replica_of(member: Member, rules: replica::Rules, recovered: RecoveredReplica, options: &Options) -> Replica {
    let replica = Replica::new(member, rules, recovered);
    #[cfg(feature = "defects")]
    let replica = replica.with_bug(options.bug);
    replica
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
