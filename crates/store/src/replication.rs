//! Between the replicas and the log, the peers and the map: what replicas decide is done here.
//!
//! Every event of a replica goes through [`Store::step`], every action is executed in its order. What goes out is gathered and
//! handed over once per turn ([`Store::dispatch`]), so that partitions share frames as they share log batches.

use crate::answers::WriteError;
use crate::copy::{Copies, Incoming};
use crate::decline::{Declines, Say};
use crate::peer::{Alone, Envelope, Message, Peers, Proposal};
use crate::ship::Shipping;
use crate::stats;
use crate::store::{Mark, Pending, Store};
use crate::wal::{Body, Durability, Entry};
use crate::{ActivateError, Error};
use engram_cluster::replica::{self, Action, Defect, Event, Found, History, is_planted};
use engram_cluster::{PartitionMap, Replica};
use engram_memory::codec::decode_record;
use engram_memory::session::Admission;
use engram_memory::{Command, Lsn, Member, Ordinal, PartitionId, Record, Settings, Term};
use std::collections::{BTreeMap, BTreeSet};

/// A proposal without an answer is made again after so many milliseconds.
const REMIND_MS: u64 = 300;

/// This worker's part in the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Its place.
    pub ordinal: Ordinal,
    /// Copies that a partition shall have, this one included.
    pub copies: u32,
    /// Fewest copies in sync with which writes are committed.
    pub min_in_sync: usize,
    /// Bytes of records kept in memory for followers that were away; who needs older ones gets a copy of the state. Used with
    /// more than one copy only.
    pub kept_bytes: usize,
    /// Bytes of state copied to followers per second at most, together; fewer while writes are slowed by them. More makes copies
    /// sooner, and writes meanwhile slower; 0 = no limit.
    pub copy_bytes_per_s: u64,
    /// A defect planted in every replica.
    #[cfg(feature = "defects")]
    pub defect: Option<Defect>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            ordinal: Ordinal(0),
            copies: 1,
            min_in_sync: 1,
            kept_bytes: 64 << 20,
            copy_bytes_per_s: 64 << 20,
            #[cfg(feature = "defects")]
            defect: None,
        }
    }
}

/// What the store keeps for its peers.
pub(crate) struct Replication {
    pub(crate) peers: Box<dyn Peers>,
    pub(crate) shipping: Shipping,
    pub(crate) outbox: BTreeMap<Ordinal, Vec<Envelope>>,
    proposals: Vec<Proposal>,
    /// Copies that go out.
    pub(crate) copies: Copies,
    /// Copies that are coming in.
    pub(crate) incoming: BTreeMap<PartitionId, Incoming>,
    declines: Declines,
    /// Whom the detector takes for dead: replicas know too, but one that is made anew forgets it.
    suspected: BTreeSet<Ordinal>,
    /// The process that runs at each place, as far as it was met.
    met: BTreeMap<Ordinal, Member>,
    reminded_ms: u64,
    /// A log entry that an action needed could not be made.
    pub(crate) failed: Option<Error>,
}

impl Replication {
    pub(crate) fn new(shipping: Shipping, options: &Options) -> Self {
        Self {
            peers: Box::new(Alone),
            shipping,
            outbox: BTreeMap::new(),
            proposals: Vec::new(),
            copies: Copies::new(options.copy_bytes_per_s),
            incoming: BTreeMap::new(),
            declines: Declines::default(),
            suspected: BTreeSet::new(),
            met: BTreeMap::new(),
            reminded_ms: 0,
            failed: None,
        }
    }

    /// Tells who may have granted a read lease that nobody here reads by it.
    fn say_released(&mut self, partition: PartitionId, granters: BTreeSet<Ordinal>) {
        for granter in granters {
            self.outbox.entry(granter).or_default().push(Envelope { partition, body: Message::Release });
        }
    }
}

/// Records of a message.
struct Received<'a> {
    bytes: &'a [bytes::Bytes],
    /// Lsn before the first.
    before: Lsn,
    /// Those that are new here, decoded.
    new: Vec<(Lsn, Term, Record)>,
}

/// How a replica stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// Partition.
    pub partition: PartitionId,
    /// `primary`, `activating`, `backup`, `corrupt` or `idle`.
    pub role: &'static str,
    /// Highest term promised.
    pub term: Term,
    /// Last record in the log.
    pub last: Lsn,
    /// The term that wrote it.
    pub last_term: Term,
    /// Last record known to be committed.
    pub commit: Lsn,
    /// Last record applied.
    pub applied: Lsn,
    /// Of a primary: its followers with what they acknowledged.
    pub followers: Vec<(Ordinal, Lsn)>,
}

impl Store {
    /// Gives the store its way out.
    pub fn set_peers(&mut self, peers: Box<dyn Peers>) {
        self.replication.peers = peers;
    }

    /// Takes the newest map that was read.
    pub fn learn(&mut self, map: &PartitionMap) {
        for (partition, entry) in map.entries() {
            let Some(place) = self.places.get(partition.0 as usize) else { continue };
            // A damaged copy leads nobody; its primary makes it whole.
            let leads_nobody = place.corrupt.is_some() && entry.primary == self.options.replication.ordinal;
            if !leads_nobody {
                self.learn_entry(partition, entry);
            }
            let promised = self.places[partition.0 as usize].replica.promised();
            let declines = leads_nobody || (entry.served_by(&self.member()) && promised < entry.term);
            self.replication.declines.learn(partition, entry, promised, declines);
        }
    }

    pub(crate) fn learn_entry(&mut self, partition: PartitionId, entry: &engram_cluster::Entry) {
        let mut actions = Vec::new();
        self.places[partition.0 as usize].replica.learn(entry, &mut actions);
        self.act(partition, actions, None);
    }

    /// A stream to a process is open in both directions; what was sent before to its place may be lost.
    pub fn connected(&mut self, peer: Member) {
        self.replication.shipping.lose(peer.ordinal);
        self.replication.copies.lose(peer.ordinal);
        self.replication.outbox.remove(&peer.ordinal);
        self.replication.met.insert(peer.ordinal, peer);
        self.step_all(&Event::Connected(peer));
    }

    /// The detector takes the process at a place for dead.
    pub fn suspected(&mut self, ordinal: Ordinal) {
        self.replication.suspected.insert(ordinal);
        self.step_all(&Event::Suspected(ordinal));
    }

    /// The detector no longer does.
    pub fn trusted(&mut self, ordinal: Ordinal) {
        self.replication.suspected.remove(&ordinal);
        self.step_all(&Event::Trusted(ordinal));
    }

    /// The processes at these places, and no others, are about to be stopped, and lead nothing any more: what is led here goes on
    /// without them, where there are copies enough.
    pub fn leaving(&mut self, leavers: &BTreeSet<Ordinal>) {
        self.step_all(&Event::Leaving(leavers.clone()));
    }

    /// Hands a partition over. It is served here until the map says that it is served there.
    pub fn hand_over(&mut self, partition: PartitionId, to: Ordinal) {
        if self.places.get(partition.0 as usize).is_some() {
            self.step(partition, Event::HandOver(to));
            if is_planted(Defect::ReleaseBeforeStop) {
                self.replication.say_released(partition, [to].into());
            }
        }
    }

    /// Takes what a peer says.
    ///
    /// # Errors
    /// The device failed.
    pub fn hear(&mut self, from: Member, envelopes: Vec<Envelope>) -> Result<(), Error> {
        for Envelope { partition, body } in envelopes {
            if self.places.get(partition.0 as usize).is_none() {
                continue;
            }
            match body {
                Message::Replica(message, records) => self.hear_replica(partition, from, message, &records),
                Message::Copy(piece) => self.hear_copy(partition, from.ordinal, &piece)?,
                Message::Release => self.lease_released(partition, from),
                Message::Confirm { term, round } => self.hear_confirm(partition, from, term, round),
                Message::Confirmed { term, round, promised } => {
                    self.confirming.hear(partition, from, term, round, promised);
                }
                Message::AskPosition { asked_ms } => self.hear_ask_position(partition, from, asked_ms),
                Message::Position { term, lsn, asked_ms } => self.hear_position(partition, from, term, lsn, asked_ms),
                Message::Digest { term, lsn, digest } => {
                    self.hear_digest(partition, from, term, lsn, engram_memory::Digest(digest));
                }
            }
        }
        self.apply_due()
    }

    /// How every replica stands.
    pub fn replicas(&self) -> Vec<ReplicaStatus> {
        let status = |(partition, place): (usize, &crate::store::Place)| {
            let role = match (&place.corrupt, place.replica.serves(), place.replica.leads()) {
                (Some(_), ..) => "corrupt",
                (_, Some(_), _) => "primary",
                (_, _, Some(_)) => "activating",
                _ if place.last() > Lsn(0) => "backup",
                _ => "idle",
            };
            ReplicaStatus {
                partition: PartitionId(partition as u32),
                role,
                term: place.replica.promised(),
                last: place.last(),
                last_term: place.replica.history().last().1,
                commit: place.replica.commit(),
                applied: place.applied,
                followers: place.replica.followers().map(|(ordinal, follower)| (ordinal, follower.acked)).collect(),
            }
        };
        self.places.iter().enumerate().map(status).collect()
    }

    /// Does what events of this turn left to be done: applies what they committed, hands over what goes out.
    ///
    /// # Errors
    /// The log failed, or the device.
    pub(crate) fn dispatch(&mut self) -> Result<(), Error> {
        if let Some(error) = self.replication.failed.take() {
            return Err(error);
        }
        self.remind();
        self.apply_due()?;
        self.answer_confirmed();
        self.answer_copies();
        for partition in self.replication.shipping.take_news() {
            self.ship(partition);
        }
        self.send_copies()?;
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
        let replica = &self.places[partition.0 as usize].replica;
        let (Some(term), commit) = (replica.leads(), replica.commit()) else { return };
        let followers: Vec<Ordinal> = self.replication.shipping.followers(partition).collect();
        for to in followers {
            if self.replication.shipping.fell_behind(partition, to) {
                let replica = &self.places[partition.0 as usize].replica;
                let acked = replica.followers().find(|(ordinal, _)| *ordinal == to).map_or(Lsn(0), |it| it.1.acked);
                self.replication.shipping.stop(partition, to);
                self.stream(partition, to, acked);
            }
            let end = self.places[partition.0 as usize].last();
            let Some(batch) = self.replication.shipping.next(partition, to, term, commit) else { continue };
            debug_assert!(batch.after <= end, "a follower holds a prefix");
            stats::add(&self.shared.shipped_records, batch.records.len() as u64);
            let append = replica::Message::Append { term, after: batch.after, runs: batch.runs, commit };
            let body = Message::Replica(append, batch.records);
            self.replication.outbox.entry(to).or_default().push(Envelope { partition, body });
        }
    }

    fn remind(&mut self) {
        let now_ms = self.clock.elapsed_ms();
        if now_ms.saturating_sub(self.replication.reminded_ms) >= REMIND_MS {
            self.replication.reminded_ms = now_ms;
            self.step_all(&Event::Remind);
            self.decline();
        }
    }

    /// Where the map wants a copy to lead that does not, another candidate shall.
    fn decline(&mut self) {
        let (own, now_ms) = (self.options.replication.ordinal, self.clock.elapsed_ms());
        let Replication { suspected, met, declines, .. } = &mut self.replication;
        // The map may name a process before the one that runs.
        let runs =
            |known: &Member| (!suspected.contains(&known.ordinal)).then(|| *met.get(&known.ordinal).unwrap_or(known));
        let said = declines.say(own, now_ms, runs);
        self.shared.set_unled(declines.unled().collect());
        for said in said {
            match said {
                Say::Declined(partition, to, term) => {
                    let promised = self.promised(partition);
                    let body = Message::Replica(replica::Message::Refused { term, promised }, Vec::new());
                    self.replication.outbox.entry(to).or_default().push(Envelope { partition, body });
                }
                Say::PassOn(partition, entry, change) => {
                    let proposal = Proposal { partition, expected: entry.expected(), change };
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
        self.places[partition.0 as usize].replica.step(event, &mut actions);
        self.act(partition, actions, None);
    }

    fn hear_replica(
        &mut self,
        partition: PartitionId,
        from: Member,
        message: replica::Message,
        records: &[bytes::Bytes],
    ) {
        let mut received = None;
        match &message {
            replica::Message::Append { after, runs, .. } => {
                let end = self.places[partition.0 as usize].last();
                let Some(decoded) = decode(*after, end, runs, records) else {
                    stats::add(&self.shared.malformed_messages, 1);
                    return;
                };
                received = Some(Received { bytes: records, before: *after, new: decoded });
            }
            replica::Message::Ack { written, .. } | replica::Message::Opened { written, .. } => {
                self.replication.shipping.acked(partition, from.ordinal, *written);
                if matches!(message, replica::Message::Opened { .. }) {
                    self.replication.copies.answered(partition, from.ordinal);
                }
            }
            // Whoever leads a term is refused by those who promised more; of any other term its own primary says it.
            replica::Message::Refused { .. } => {
                let now_ms = self.clock.elapsed_ms();
                self.replication.declines.heard(partition, from, now_ms);
            }
            replica::Message::Open { history, .. } => {
                let place = &mut self.places[partition.0 as usize];
                if place.corrupt.is_some() {
                    place.whole_at = history.end();
                }
            }
            _ => {}
        }
        let mut actions = Vec::new();
        self.places[partition.0 as usize].replica.step(Event::Heard(from, message), &mut actions);
        self.act(partition, actions, received);
    }

    /// Does what a replica decided, with the records of the message that it heard.
    fn act(&mut self, partition: PartitionId, actions: Vec<Action>, received: Option<Received<'_>>) {
        let mut received = received;
        for action in actions {
            let done = match action {
                Action::Promise(term) => self.log_promise(partition, term),
                Action::Truncate { term, after } => self.log_truncate(partition, term, after),
                Action::Log { after } => {
                    let received = received.take().expect("it comes of a message with records");
                    self.log_received(partition, after, received)
                }
                // A promise that is made again: an entry that is durable with all before it.
                Action::Sync => self.log_promise(partition, self.promised(partition)),
                Action::Send(to, message) => {
                    let body = Message::Replica(message, Vec::new());
                    self.replication.outbox.entry(to).or_default().push(Envelope { partition, body });
                    Ok(())
                }
                Action::Stream { to, after } => {
                    self.stream(partition, to, after);
                    Ok(())
                }
                Action::Copy(to) => {
                    self.replication.copies.ask(partition, to);
                    Ok(())
                }
                Action::Commit(_) => {
                    self.due.insert(partition);
                    self.replication.shipping.note(partition);
                    self.heal(partition)
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
        self.append(&Entry { partition, term, lsn: Lsn(0), body: Body::Promise { seen: true } })?;
        self.push(Mark::Promise(partition, term), true);
        Ok(())
    }

    fn log_truncate(&mut self, partition: PartitionId, term: Term, after: Lsn) -> Result<(), Error> {
        let place = &mut self.places[partition.0 as usize];
        let kept = place.pending.partition_point(|pending| pending.lsn <= after);
        for pending in place.pending.split_off(kept) {
            self.places[partition.0 as usize].creates -= pending.record.command.may_create() as u64;
            self.refuse(partition, pending, &WriteError::NotPrimary { partition, term: Some(term) });
        }
        self.replication.shipping.truncate(partition, after);
        self.append(&Entry { partition, term, lsn: after, body: Body::Truncate })?;
        // What is reported of records that are gone says nothing of the one that is now the last.
        let (lsn, term) = self.places[partition.0 as usize].replica.history().last();
        self.push(Mark::Record(partition, lsn, term), false);
        Ok(())
    }

    fn log_received(&mut self, partition: PartitionId, after: Lsn, received: Received<'_>) -> Result<(), Error> {
        let Received { bytes, before, new } = received;
        for (lsn, term, record) in new.into_iter().filter(|(lsn, ..)| *lsn > after) {
            let encoded = &bytes[(lsn.0 - before.0 - 1) as usize];
            self.append(&Entry { partition, term, lsn, body: Body::Command(encoded) })?;
            self.replication.shipping.keep(partition, lsn, term, encoded);
            stats::add(&self.shared.logged_bytes, encoded.len() as u64);
            self.add_pending(partition, lsn, term, record, Vec::new());
            self.push(Mark::Record(partition, lsn, term), false);
        }
        Ok(())
    }

    /// Notes a record that was logged.
    pub(crate) fn add_pending(
        &mut self,
        partition: PartitionId,
        lsn: Lsn,
        term: Term,
        record: Record,
        waiters: Vec<crate::gather::Waiter>,
    ) {
        // A request that its session would refuse now may be let through once what is under way is applied, so each copy of it is
        // judged in its own place.
        let ledger = self.partitions.ledger(partition);
        let request = record
            .request
            .filter(|request| ledger.is_none_or(|ledger| ledger.sessions.admit(*request) == Admission::Execute));
        if let Some(request) = request {
            self.requests.entry((partition, request)).or_insert(lsn);
        }
        let place = &mut self.places[partition.0 as usize];
        place.creates += record.command.may_create() as u64;
        place.pending.push_back(Pending { lsn, term, record, waiters });
    }

    /// Notes the requests of what a start found logged and not applied.
    pub(crate) fn find_requests(&mut self) {
        for (partition, place) in self.places.iter().enumerate() {
            for pending in &place.pending {
                if let Some(request) = pending.record.request {
                    self.requests.entry((PartitionId(partition as u32), request)).or_insert(pending.lsn);
                }
            }
        }
    }

    /// Streams to a follower, or copies where the records it needs are not kept.
    fn stream(&mut self, partition: PartitionId, to: Ordinal, after: Lsn) {
        let replica = &self.places[partition.0 as usize].replica;
        let Some(term) = replica.leads() else { return };
        if self.replication.shipping.reaches(partition, after, replica.history().end()) {
            self.replication.shipping.start(partition, to, term, after);
        } else {
            self.replication.copies.ask(partition, to);
        }
    }

    fn serve(&mut self, partition: PartitionId, term: Term) {
        if !self.partitions.contains(partition) {
            self.partitions.open(partition, Settings::default());
        }
        self.partitions.set_hidden(partition, false);
        // What is committed already is applied before it is judged what is configured.
        let now_ms = self.clock.elapsed_ms();
        let place = &mut self.places[partition.0 as usize];
        place.served_since_ms.get_or_insert(now_ms);
        let waiting = std::mem::take(&mut place.activations);
        let pending = place.pending.iter().rev().find_map(|pending| match pending.record.command {
            Command::Configure(settings) => Some(settings),
            _ => None,
        });
        let ledger = self.partitions.ledger(partition).map_or_else(Settings::default, |ledger| ledger.settings);
        let current = pending.unwrap_or(ledger);
        let wanted = Settings { count_updates: current.count_updates, ..self.options.settings };
        // In this order: whoever finds the partition served finds the settings that it is served with.
        self.shared.set_settings(partition, Some(wanted));
        self.shared.set_term(partition, Some(term));
        if wanted != current {
            // An answer at once would be a refusal of settings that were checked when the process began.
            let _ = self.propose(partition, Record::bare(Command::Configure(wanted)), None);
            // Served is configured, for good, in every mode.
            self.must_sync = true;
        }
        for (asked, waiter) in waiting {
            let answer =
                if asked == term { Ok(()) } else { Err(ActivateError::Promised { partition, promised: term, asked }) };
            self.activations.answer(waiter, answer);
        }
    }

    fn stop_serving(&mut self, partition: PartitionId) {
        self.shared.set_term(partition, None);
        let hidden = self.options.replication.copies > 1;
        self.partitions.set_hidden(partition, hidden);
        self.replication.shipping.stop_all(partition);
        self.replication.copies.stop(partition);
        let place = &mut self.places[partition.0 as usize];
        // Whoever leads now, or soon after, need not wait for the end of a lease that nobody uses.
        self.replication.say_released(partition, place.replica.successors());
        place.served_since_ms = None;
        let promised = place.replica.promised();
        let mut answers = Vec::new();
        for pending in &mut place.pending {
            // Under a session it is asked for again, and answered once. Without one nobody can tell whether it will be applied.
            let error = match pending.record.request {
                Some(_) => WriteError::NotPrimary { partition, term: Some(promised) },
                None => WriteError::Unknown { partition },
            };
            answers.extend(pending.waiters.drain(..).map(|waiter| (waiter, error.clone())));
        }
        for (waiter, error) in answers {
            self.writes.answer(waiter, Err(error));
        }
        for (asked, waiter) in std::mem::take(&mut self.places[partition.0 as usize].activations) {
            self.activations.answer(waiter, Err(ActivateError::Promised { partition, promised, asked }));
        }
    }

    /// A damaged copy is whole again when it has all that its primary had when it opened it.
    pub(crate) fn heal(&mut self, partition: PartitionId) -> Result<(), Error> {
        let place = &self.places[partition.0 as usize];
        let heals = place.corrupt.is_some() && place.replica.commit() >= place.whole_at;
        if heals { self.note(partition, "") } else { Ok(()) }
    }

    /// Sets a partition back to what is written, after the log refused: only without peers, who might have more.
    pub(crate) fn set_back(&mut self, partition: PartitionId, why: &WriteError) {
        let (member, rules, options) = (self.member(), self.rules(), self.options.replication);
        let place = &mut self.places[partition.0 as usize];
        let kept = place.applied.max(place.wrote.0.min(place.last()));
        let served = place.replica.serves();
        if served.is_some() && self.options.replication.copies == 1 {
            place.replica.withdraw(kept);
        } else {
            // Nothing was served at a term whose promise is not in the log: this process may promise it again.
            let mut history = place.replica.history().clone();
            history.truncate(kept.max(history.floor().0));
            let found = Found {
                lossless_since: member.incarnation,
                promised: place.replica.kept(),
                history,
                commit: place.replica.commit(),
                granted: false,
            };
            place.replica = replica_of(member, rules, found, &options);
            self.shared.set_term(partition, None);
        }
        let place = &mut self.places[partition.0 as usize];
        let refused = place.pending.split_off(place.pending.partition_point(|pending| pending.lsn <= kept));
        let waiting = std::mem::take(&mut place.activations);
        place.creates = place.pending.iter().map(|pending| pending.record.command.may_create() as u64).sum();
        for pending in refused {
            self.refuse(partition, pending, why);
        }
        for (_, waiter) in waiting {
            self.activations.answer(waiter, Err(ActivateError::Failed { reason: why.reason() }));
        }
        self.replication.shipping.truncate(partition, kept);
    }

    pub(crate) fn rules(&self) -> replica::Rules {
        rules(&self.options)
    }
}

pub(crate) fn rules(options: &crate::Options) -> replica::Rules {
    replica::Rules {
        keeps_all: options.wal.durability.syncs_first(options.replication.copies),
        min_in_sync: options.replication.min_in_sync,
        primary_only: options.wal.durability == Durability::Async,
    }
}

/// The replica of a partition as a start finds it, or as a copy that was thrown away leaves it; `granted`: somebody may hold a read
/// lease of it.
pub(crate) fn found(
    member: Member,
    options: &crate::Options,
    lossless_since: engram_memory::Incarnation,
    promised: Term,
    (history, commit): (History, Lsn),
    granted: bool,
) -> Replica {
    let found = Found { lossless_since, promised, history, commit, granted };
    replica_of(member, rules(options), found, &options.replication)
}

#[cfg_attr(not(feature = "defects"), expect(unused_variables, reason = "only defects are taken from there"))]
fn replica_of(member: Member, rules: replica::Rules, found: Found, options: &Options) -> Replica {
    let replica = Replica::new(member, rules, found);
    #[cfg(feature = "defects")]
    let replica = replica.with_defect(options.defect);
    replica
}

/// The records of a message that are new here; `None` when the message is malformed.
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
