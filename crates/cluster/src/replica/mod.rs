//! One replica of one partition: what it may promise, log, acknowledge, commit and serve.
//!
//! Free of time and of payloads: a record is (lsn, term), an expired lease is an event. The process around it carries
//! out the actions in order and reports what the log has done; nothing that depends on a promise is sent before
//! [`Event::Promised`].
//!
//! ```text
//! map ──────┐                      ┌──> Promise, Truncate, Log, Sync      (the log)
//! log ──────┼─> Replica::step ─────┼──> Send, Stream, SendSnapshot       (the other replicas)
//! messages ─┘                      ├──> Propose                          (the map)
//!                                  └──> Commit, Serve, Stop              (the state machine)
//! ```
//!
//! Invariants, checked by the model in this crate's tests:
//! - a record is committed when every member of the maximal in-sync set holds it *under this term*, from the disk that
//!   the map names: the in-sync set of the map, and a newcomer from the moment its entry is proposed;
//! - a replica answers nothing of a term below its promise, and drops what the primary of a term does not have before
//!   it acknowledges anything of that term;
//! - a term is served by one process, once, and only after it has read in the map that it is settled: activated, or
//!   every candidate for promotion is in sync;
//! - a single replica acknowledges from its disk, and has everything there before it proposes to be the only one;
//! - a read lease that a replica granted expires before the replica serves.

mod history;
mod primary;

pub use history::History;
pub use primary::Follower;

use crate::change::{Change, ExpectedEntry};
use crate::injected;
#[cfg(feature = "defects")]
use crate::injected::Bug;
use crate::injected::InjectedBug;
use crate::map::Entry;
use engram_memory::{Incarnation, Lsn, Member, Ordinal, Term};
use primary::PrimaryState;
use std::collections::BTreeSet;

/// Settings that all replicas of a cluster share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Every log write is durable before it counts (mode `sync`): a disk always has what its process acknowledged.
    pub keeps_all: bool,
    /// Minimum number of in-sync members for writes to be committed.
    pub min_in_sync: usize,
    /// What the primary alone has written, synced or not, is committed (mode `async`). Backups follow; only a planned
    /// leadership transfer waits for the next primary.
    pub primary_only: bool,
}

/// An input of the state machine.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// A promise is durable.
    Promised(Term),
    /// A record, and all before it, is in the log with the durability that the mode requires for an acknowledgement.
    Written(Lsn, Term),
    /// A record, and all before it, would survive a power loss.
    Synced(Lsn, Term),
    /// The primary appended to its own log, up to this lsn, under its term.
    Appended(Lsn),
    /// A message arrived from a process.
    Received(Member, Message),
    /// A connection to a process is open; messages sent to its ordinal before may be lost.
    Connected(Member),
    /// The detector suspects the process with this ordinal.
    Suspected(Ordinal),
    /// The detector trusts it again.
    Trusted(Ordinal),
    /// The processes with these ordinals, and no others, are about to stop, and are no longer primary: a primary
    /// continues without them while they still acknowledge, so that no write waits for them after they stop.
    Leaving(BTreeSet<Ordinal>),
    /// A snapshot, committed at this record, durably replaced the state here. No event comes between
    /// [`Replica::accepts_snapshot`] and this one.
    Installed(Lsn, Term),
    /// The read lease that this process granted has expired, for its holder too.
    GrantExpired,
    /// Start a planned leadership transfer; to this replica itself: cancel it. The primary continues until it reads
    /// that another one is primary.
    TransferLeadership(Ordinal),
    /// Send again what has no answer yet.
    Resend,
}

/// Messages between replicas.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Message {
    /// A primary opens its term and describes its log.
    Open {
        /// Term.
        term: Term,
        /// The primary's log.
        history: History,
        /// Its committed prefix.
        commit: Lsn,
    },
    /// The log of the sender is a prefix of the primary's.
    Opened {
        /// Term.
        term: Term,
        /// Its end; `None`: no common record is known, a snapshot is needed.
        end: Option<Lsn>,
        /// What counts as acknowledged.
        written: Lsn,
    },
    /// Records, in the envelope of this message.
    Append {
        /// Term.
        term: Term,
        /// The lsn before the first record.
        after: Lsn,
        /// Their identifiers, as runs of equal terms; empty: no records, only a commit.
        runs: Vec<(Lsn, Term)>,
        /// Committed lsn.
        commit: Lsn,
    },
    /// Records are in the log.
    Ack {
        /// Term.
        term: Term,
        /// Last record in the log.
        written: Lsn,
    },
    /// The term was not opened to the sender: it is a new process.
    NotOpen {
        /// Term.
        term: Term,
    },
    /// The sender has promised a higher term.
    Rejected {
        /// The rejected term.
        term: Term,
        /// The sender's promise.
        promised: Term,
    },
}

/// Actions for the surrounding process, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Log a promise, durable in every mode, then report [`Event::Promised`].
    Promise(Term),
    /// Log that records above `after` of terms below `term` are void, and forget them; then report [`Event::Written`]
    /// for the last remaining one: reports about void records are ignored.
    Truncate {
        /// The primary's term.
        term: Term,
        /// Last record that stays.
        after: Lsn,
    },
    /// Log the records of the received message above this lsn.
    Log {
        /// Last record in the log.
        after: Lsn,
    },
    /// Make the whole log durable, then report [`Event::Synced`].
    Sync,
    /// Send a message to an ordinal.
    Send(Ordinal, Message),
    /// Stream records above this lsn, and commits, to an ordinal under this term.
    Stream {
        /// Receiver.
        to: Ordinal,
        /// Its last record.
        after: Lsn,
    },
    /// Send a snapshot of the committed state.
    SendSnapshot(
        /// Receiver.
        Ordinal,
    ),
    /// Apply, and answer, records up to here.
    Commit(Lsn),
    /// Accept requests under this term; continue where they were accepted before.
    Serve(Term),
    /// Accept no more requests, and answer pending ones whose outcome is unknown.
    Stop,
    /// Propose a map change; its outcome is known only from the map.
    Propose(ExpectedEntry, Change),
}

/// State machine of one replica.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Replica {
    me: Member,
    rules: Rules,
    bug: InjectedBug,
    /// Nothing that this incarnation or a later one wrote has been lost.
    lossless_since: Incarnation,
    /// Highest term promised.
    promised: Term,
    /// Highest promise that is durable.
    durable_promise: Term,
    /// The term whose primary's log this one was matched with, by this process.
    matched: Term,
    history: History,
    written: Lsn,
    durable: Lsn,
    /// Commit reported by the primary or recovered.
    reported_commit: Lsn,
    /// Committed and applied.
    commit: Lsn,
    /// The primary whose term it was matched with.
    followed: Option<Ordinal>,
    /// Sender of a [`Message::Open`] that waits for the promise.
    pending_open: Option<Ordinal>,
    /// A snapshot is needed before records.
    needs_snapshot: bool,
    /// What is committed here is missing from the log of the primary that it was matched with (mode `async`): it is
    /// lost.
    lost_commits: bool,
    /// Newest entry of the map.
    entry: Option<Entry>,
    primary: Option<PrimaryState>,
    suspects: BTreeSet<Ordinal>,
    leaving: BTreeSet<Ordinal>,
    /// Another replica may hold a read lease from this one.
    granted: bool,
}

/// State of a replica that a process recovers at its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveredReplica {
    /// Nothing that this incarnation or a later one wrote has been lost.
    pub lossless_since: Incarnation,
    /// Highest promise in the log.
    pub promised: Term,
    /// The log, all of it durable.
    pub history: History,
    /// Known committed prefix.
    pub commit: Lsn,
    /// The previous process may have granted a read lease that has not expired.
    pub granted: bool,
}

impl Replica {
    /// Creates a replica from its recovered state.
    pub fn new(me: Member, rules: Rules, recovered: RecoveredReplica) -> Self {
        let end = recovered.history.end();
        Self {
            me,
            rules,
            bug: InjectedBug::default(),
            lossless_since: recovered.lossless_since,
            promised: recovered.promised,
            durable_promise: recovered.promised,
            matched: Term(0),
            written: end,
            durable: end,
            reported_commit: recovered.commit,
            commit: recovered.commit,
            history: recovered.history,
            followed: None,
            pending_open: None,
            needs_snapshot: false,
            lost_commits: false,
            entry: None,
            primary: None,
            suspects: BTreeSet::new(),
            leaving: BTreeSet::new(),
            granted: recovered.granted,
        }
    }

    /// The replica with an injected bug.
    #[cfg(feature = "defects")]
    #[must_use]
    pub fn with_bug(mut self, bug: Option<Bug>) -> Self {
        self.bug = InjectedBug(bug);
        self
    }

    /// Returns the highest promised term.
    pub const fn promised(&self) -> Term {
        self.promised
    }

    /// Returns the highest term whose promise is durable.
    pub const fn durable_promise(&self) -> Term {
        self.durable_promise
    }

    /// Withdraws records that could not be logged.
    ///
    /// # Panics
    /// If there are followers: they may already hold the records.
    pub fn withdraw(&mut self, end: Lsn) {
        assert!(self.followers().next().is_none(), "a record that was sent cannot be taken back");
        self.history.truncate(end);
        self.written = self.written.min(end);
        self.durable = self.durable.min(end);
    }

    /// Returns the identifiers of the records in the log.
    pub const fn history(&self) -> &History {
        &self.history
    }

    /// Returns the last record that was committed and applied.
    pub const fn commit(&self) -> Lsn {
        self.commit
    }

    /// Returns the term under which this replica is primary; it may still be activating.
    pub fn primary_term(&self) -> Option<Term> {
        self.primary.as_ref().map(|state| state.entry.term)
    }

    /// Returns the term under which it serves requests.
    pub fn serving_term(&self) -> Option<Term> {
        self.primary.as_ref().filter(|state| state.serving).map(|state| state.entry.term)
    }

    /// Whether it accepts requests: it serves, or served the previous term and activates its own change.
    pub fn takes_requests(&self) -> bool {
        self.primary.as_ref().is_some_and(|state| state.admitting)
    }

    /// Whether it accepts new writes: it is primary and has enough in-sync members. It continues during its own
    /// reconfiguration and during a leadership transfer.
    pub fn admits_writes(&self) -> bool {
        self.primary.as_ref().is_some_and(|state| state.admitting && state.entry.isr.len() >= self.rules.min_in_sync)
    }

    /// Returns the newest map entry that it has read.
    pub const fn entry(&self) -> Option<&Entry> {
        self.entry.as_ref()
    }

    /// Returns the target of the leadership transfer in progress. Records written meanwhile may be for the successor to
    /// answer.
    pub fn transfer_target(&self) -> Option<Ordinal> {
        self.primary.as_ref()?.transfer.map(|draining| draining.to)
    }

    /// Returns the ordinals that are about to stop, as far as reported.
    pub const fn leaving(&self) -> &BTreeSet<Ordinal> {
        &self.leaving
    }

    /// Number of replicas that hold a record committed under the current entry.
    pub fn in_sync_count(&self) -> u32 {
        self.primary.as_ref().map_or(1, |state| state.entry.isr.len() as u32)
    }

    /// Members, besides this one, whose read leases a read needs, as this process of theirs or a later one, but from no
    /// other disk; `None` while no linearizable read is possible.
    pub fn required_leases(&self) -> Option<Vec<Member>> {
        let state = self.primary.as_ref().filter(|state| state.serving)?;
        let settled = self.commit >= state.tail || injected!(self.bug, ReadUncommittedTail);
        let required = || state.required(self.me.ordinal, self.bug).into_iter();
        settled.then(|| required().filter_map(|ordinal| state.counted(ordinal)).collect())
    }

    /// What a clock-free read waits for: the serving term, the record that must be applied, and the members, as this
    /// process of theirs or a later one on the same disk, that must confirm afterwards that they have promised no
    /// higher term. `None` while it does not serve.
    pub fn read_confirmation(&self) -> Option<(Term, Lsn, Vec<Member>)> {
        let state = self.primary.as_ref().filter(|state| state.serving)?;
        let required = state.required(self.me.ordinal, self.bug).into_iter();
        let members = required.filter_map(|ordinal| state.counted(ordinal)).collect();
        Some((state.entry.term, self.commit.max(state.tail), members))
    }

    /// Whether it knows no common record with its primary, and waits for a snapshot.
    pub const fn needs_snapshot(&self) -> bool {
        self.needs_snapshot
    }

    /// Whether it follows this primary.
    pub fn follows(&self, primary: Member) -> bool {
        self.primary.is_none() && self.matched_primary() == Some(primary.ordinal)
    }

    /// Whether it may grant a primary a read lease. A replica that is not in sync does not: no read needs its lease,
    /// and it would have to wait for its end before it serves.
    pub fn may_grant_lease(&self, primary: Member) -> bool {
        self.follows(primary) && self.entry.as_ref().is_some_and(|entry| entry.in_sync(self.me.ordinal).is_some())
    }

    /// Replicas that may be primary instead of this one now or next: the one whose log it follows, and the candidates
    /// of the map. One of them may have granted it a read lease, and waits for its end before it serves.
    pub fn successors(&self) -> BTreeSet<Ordinal> {
        let candidates = self.entry.iter().flat_map(Entry::candidates).map(|member| member.ordinal);
        let all =
            candidates.chain(self.followed).filter(|ordinal| self.primary.is_none() && *ordinal != self.me.ordinal);
        all.collect()
    }

    /// Notes that a read lease was granted; [`Event::GrantExpired`] ends it.
    pub const fn note_lease_granted(&mut self) {
        self.granted = true;
    }

    /// Returns the followers of a primary: every replica that it keeps up to date.
    pub fn followers(&self) -> impl Iterator<Item = (Ordinal, &Follower)> {
        self.primary.iter().flat_map(|state| state.followers.iter().map(|(ordinal, follower)| (*ordinal, follower)))
    }

    /// Whether a snapshot of this term may replace the state here: it must not lose records that may have been
    /// acknowledged under this term.
    pub fn accepts_snapshot(&self, term: Term, lsn: Lsn) -> bool {
        let unmatched = self.needs_snapshot || injected!(self.bug, CopyOverRecords);
        let goes_further = lsn > self.history.end() || (unmatched && lsn > self.commit);
        self.matched == term && self.promised == term && self.primary.is_none() && goes_further
    }

    /// Whether the primary of this term has lost records that are committed here, which mode `async` allows: no
    /// snapshot of it will go further unless there are new writes. The state here must be discarded.
    pub fn has_lost_commits(&self, term: Term) -> bool {
        self.lost_commits
            && self.needs_snapshot
            && self.matched == term
            && self.promised == term
            && self.primary.is_none()
    }

    /// Whether this process may serve under `entry`: it runs on the map's disk and lost nothing that it had
    /// acknowledged.
    pub fn is_eligible(&self, entry: &Entry) -> bool {
        if injected!(self.bug, RestartKeepsIsr) {
            return true;
        }
        entry.holds_all(&self.me, self.lossless_since, self.rules.keeps_all)
    }

    /// Applies the newest map entry that was read.
    pub fn apply_entry(&mut self, entry: &Entry, out: &mut Vec<Action>) {
        if self.entry.as_ref().is_some_and(|seen| !seen.is_older_than(entry)) {
            return;
        }
        self.entry = Some(entry.clone());
        let is_primary = self.is_primary_of(entry);
        match &mut self.primary {
            Some(state) if state.entry.term == entry.term => state.update_entry(entry),
            _ if is_primary => self.become_primary(entry, out),
            Some(state) if state.entry.term < entry.term => self.step_down(out),
            _ => {}
        }
        self.make_progress(out);
    }

    /// Handles an event.
    pub fn step(&mut self, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Promised(term) => self.promise_durable(term, out),
            Event::Written(lsn, term) => self.log_written(lsn, term, out),
            Event::Synced(lsn, term) => {
                if self.history.term_at(lsn) == Some(term) {
                    self.durable = self.durable.max(lsn);
                }
            }
            Event::Appended(lsn) => {
                let term = self.primary_term().expect("a primary appends");
                self.history.append(lsn, term);
            }
            Event::Received(from, message) => self.receive(from, message, out),
            Event::Connected(member) => self.reopen(&member, out),
            Event::Suspected(ordinal) => {
                self.suspects.insert(ordinal);
            }
            Event::Trusted(ordinal) => {
                self.suspects.remove(&ordinal);
            }
            Event::Leaving(leavers) => self.leaving = leavers,
            Event::Installed(lsn, term) => self.snapshot_installed(lsn, term, out),
            Event::GrantExpired => self.granted = false,
            Event::TransferLeadership(to) => {
                let (me, log_end) = (self.me.ordinal, self.history.end());
                if let Some(state) = &mut self.primary {
                    state.transfer_to(Some(to).filter(|to| *to != me), log_end);
                }
            }
            Event::Resend => self.resend(out),
        }
        self.make_progress(out);
    }

    fn is_primary_of(&self, entry: &Entry) -> bool {
        let same_disk = |member: &Member| (member.ordinal, member.store) == (self.me.ordinal, self.me.store);
        entry.served_by(&self.me)
            || injected!(self.bug, RestartSameTerm) && entry.primary_member().is_some_and(same_disk)
    }

    /// Takes over under an entry that names this exact process.
    fn become_primary(&mut self, entry: &Entry, out: &mut Vec<Action>) {
        let was_primary = self.primary.is_some();
        // A term is served once: one that was already promised may have been served by an earlier process.
        let unused = self.promised < entry.term || injected!(self.bug, RestartSameTerm);
        if !unused || !(was_primary || self.is_eligible(entry)) {
            if was_primary {
                self.step_down(out);
            }
            return;
        }
        self.promised = entry.term;
        self.matched = entry.term;
        (self.followed, self.pending_open, self.needs_snapshot) = (None, None, false);
        out.push(Action::Promise(entry.term));
        self.primary = Some(PrimaryState::begin(self.primary.take(), entry, self.me.ordinal, self.history.end()));
    }

    fn step_down(&mut self, out: &mut Vec<Action>) {
        if self.primary.take().is_some() {
            out.push(Action::Stop);
        }
    }

    fn promise_durable(&mut self, term: Term, out: &mut Vec<Action>) {
        self.durable_promise = self.durable_promise.max(term);
        self.answer_open(out);
    }

    fn log_written(&mut self, lsn: Lsn, term: Term, out: &mut Vec<Action>) {
        if self.history.term_at(lsn) != Some(term) || lsn <= self.written {
            return;
        }
        self.written = lsn;
        if let (None, Some(primary)) = (&self.primary, self.matched_primary()) {
            out.push(Action::Send(primary, Message::Ack { term: self.matched, written: self.written }));
        }
        self.follow_commit(out);
    }

    /// Returns the primary that this replica follows, once its promise is durable and its log is a prefix of the
    /// primary's.
    fn matched_primary(&self) -> Option<Ordinal> {
        let matches = !self.needs_snapshot || injected!(self.bug, AckWhileCopying);
        let follows = self.matched == self.promised && self.durable_promise == self.promised && matches;
        self.followed.filter(|_| follows && self.pending_open.is_none())
    }

    fn receive(&mut self, from: Member, message: Message, out: &mut Vec<Action>) {
        match message {
            Message::Open { term, history, commit } => self.receive_open(from, term, &history, commit, out),
            Message::Append { term, after, runs, commit } => self.receive_append(from, term, after, &runs, commit, out),
            Message::Opened { term, end, written } => self.receive_opened(from, term, end, written, out),
            Message::Ack { term, written } => self.receive_ack(&from, term, written),
            Message::NotOpen { term } => {
                if self.primary_term() == Some(term) {
                    self.reopen(&from, out);
                }
            }
            // A higher promise comes from a map that this primary will read.
            Message::Rejected { .. } => {}
        }
    }

    fn rejects(&self, from: Member, term: Term, out: &mut Vec<Action>) -> bool {
        let refused = term < self.promised && !injected!(self.bug, AcceptOldTerm);
        if refused {
            out.push(Action::Send(from.ordinal, Message::Rejected { term, promised: self.promised }));
        }
        refused
    }

    fn receive_open(&mut self, from: Member, term: Term, theirs: &History, commit: Lsn, out: &mut Vec<Action>) {
        if self.rejects(from, term, out) || self.primary_term() == Some(term) {
            return;
        }
        self.step_down(out);
        if term > self.promised {
            self.promised = term;
            out.push(Action::Promise(term));
        }
        self.followed = Some(from.ordinal);
        self.reported_commit = if self.matched == term { self.reported_commit.max(commit) } else { commit };
        self.matched = term;
        // Records of this term came from its primary: an opening without them is older, and they were acknowledged.
        if self.history.last().1 < term || injected!(self.bug, ReopenTruncates) {
            self.match_log(term, theirs, out);
        }
        self.pending_open = Some(from.ordinal);
        self.answer_open(out);
    }

    /// Drops what the primary of a new term does not have.
    fn match_log(&mut self, term: Term, theirs: &History, out: &mut Vec<Action>) {
        // Committed records are in every log that may become primary; if they seem not to be, a snapshot decides.
        let common = self.history.last_common(theirs).filter(|common| *common >= self.commit);
        self.needs_snapshot = common.is_none();
        let theirs_at_commit = theirs.term_at(self.commit);
        let differs = theirs_at_commit.is_some() && theirs_at_commit != self.history.term_at(self.commit);
        self.lost_commits = self.rules.primary_only && (theirs.end() < self.commit || differs);
        if let Some(common) = common
            && common < self.history.end()
            && !injected!(self.bug, KeepTail)
        {
            out.push(Action::Truncate { term, after: common });
            self.history.truncate(common);
            self.written = self.written.min(common);
            self.durable = self.durable.min(common);
        }
    }

    fn answer_open(&mut self, out: &mut Vec<Action>) {
        if self.primary.is_none()
            && self.durable_promise == self.promised
            && let Some(to) = self.pending_open.take()
        {
            let end = (!self.needs_snapshot).then(|| self.history.end());
            let written = if self.needs_snapshot { Lsn(0) } else { self.written };
            out.push(Action::Send(to, Message::Opened { term: self.matched, end, written }));
            self.follow_commit(out);
        }
    }

    fn receive_append(
        &mut self,
        from: Member,
        term: Term,
        after: Lsn,
        runs: &[(Lsn, Term)],
        commit: Lsn,
        out: &mut Vec<Action>,
    ) {
        if self.rejects(from, term, out) || self.primary_term() == Some(term) {
            return;
        }
        if self.matched != term {
            out.push(Action::Send(from.ordinal, Message::NotOpen { term }));
            return;
        }
        if self.needs_snapshot || self.pending_open.is_some() {
            return;
        }
        let end = self.history.end();
        if after > end {
            // Records were lost in transit: request them from here again.
            out.push(Action::Send(from.ordinal, Message::Opened { term, end: Some(end), written: self.written }));
            return;
        }
        let new = runs.iter().filter(|run| run.0 > end);
        if new.clone().next_back().is_some_and(|last| last.1 <= term) && self.history.may_append(new.clone()) {
            new.for_each(|run| self.history.append(run.0, run.1));
            out.push(Action::Log { after: end });
        } else if !runs.is_empty() {
            // The records are already here, but their acknowledgement may have been lost.
            out.push(Action::Send(from.ordinal, Message::Ack { term, written: self.written }));
        }
        self.reported_commit = self.reported_commit.max(commit);
        self.follow_commit(out);
    }

    /// A backup applies what its primary reports as committed, as far as its own log holds it.
    fn follow_commit(&mut self, out: &mut Vec<Action>) {
        let commit = self.reported_commit.min(self.written);
        if self.primary.is_none() && self.pending_open.is_none() && !self.needs_snapshot && commit > self.commit {
            self.commit = commit;
            out.push(Action::Commit(commit));
        }
    }

    fn snapshot_installed(&mut self, lsn: Lsn, term: Term, out: &mut Vec<Action>) {
        self.history = History::from_floor(lsn, term);
        (self.written, self.durable, self.commit) = (lsn, lsn, lsn);
        self.reported_commit = self.reported_commit.max(lsn);
        self.needs_snapshot = false;
        self.pending_open = self.followed;
        self.answer_open(out);
    }
}
