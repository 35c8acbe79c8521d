//! One replica of one partition: what it may promise, log, acknowledge, commit and serve.
//!
//! Free of time and of payloads: a record is (lsn, term), a lease that ends is an event. The process around it logs what
//! the actions say, in their order, and reports what the log has done; nothing that rests on a promise leaves before
//! [`Event::Promised`].
//!
//! ```text
//! map ──────┐                      ┌──> Promise, Truncate, Log, Sync      (the log)
//! log ──────┼─> Replica::step ─────┼──> Send, Stream, Copy               (the other copies)
//! messages ─┘                      ├──> Propose                          (the map)
//!                                  └──> Commit, Serve, Stop              (the state machine)
//! ```
//!
//! Invariants, checked by the model in this crate's tests:
//! - a record is committed when every member of the maximal in-sync set holds it *at this term*, from the disk that the
//!   map names: the in-sync set of the map, and a newcomer from the moment its entry is proposed;
//! - a replica answers nothing of a term below its promise, and drops what the primary of a term does not have before it
//!   acknowledges anything of that term;
//! - a term is served by one process, once, and only after it has read in the map that it is settled: activated, or nobody may be
//!   promoted who is not in sync;
//! - who is alone acknowledges from its disk, and has all of it there before it asks to be alone;
//! - a grant of a read lease that was given ends before the granter serves.

mod history;
mod lead;
mod planted;

pub use history::History;
pub use lead::Follower;
#[cfg(feature = "defects")]
pub use planted::plant;
pub use planted::{Defect, is_planted};

use crate::change::{Change, Expected};
use crate::map::Entry;
use engram_memory::{Incarnation, Lsn, Member, Ordinal, Term};
use lead::Lead;
use planted::Planted;
use std::collections::BTreeSet;

/// What holds for all replicas of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Every log write is durable before it counts (mode `sync`): whatever happens to a process, its disk has what it
    /// acknowledged.
    pub keeps_all: bool,
    /// Fewest members in sync with which writes are committed.
    pub min_in_sync: usize,
    /// What the primary alone has written, synced or not, is committed (mode `async`). Copies follow; a planned hand-over alone
    /// waits for the one that shall lead.
    pub primary_only: bool,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// A promise is durable.
    Promised(Term),
    /// A record, and all before it, is in the log as the mode demands it for an acknowledgement.
    Written(Lsn, Term),
    /// A record, and all before it, would survive a loss of power.
    Synced(Lsn, Term),
    /// The primary appended to its own log, up to this lsn, at its term.
    Appended(Lsn),
    /// A process said something.
    Heard(Member, Message),
    /// A way to a process is open; what was sent before to its place may be lost.
    Connected(Member),
    /// The detector takes the process at this place for dead.
    Suspected(Ordinal),
    /// It no longer does.
    Trusted(Ordinal),
    /// The processes at these places, and no others, are about to be stopped, and lead nothing any more: a primary goes on without
    /// them while they still acknowledge, so that nobody waits for them when they have gone.
    Leaving(BTreeSet<Ordinal>),
    /// A copy of the state, committed at this record, took the place of what was here, durably. Nothing comes between
    /// [`Replica::takes_copy`] and this.
    Installed(Lsn, Term),
    /// The read lease that this process granted has ended, for its holder too.
    GrantOver,
    /// A planned hand-over of primaryship; to this replica itself: none after all. It goes on until it reads that another one leads.
    HandOver(Ordinal),
    /// Say again what has no answer yet.
    Remind,
}

/// What replicas say to each other.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Message {
    /// A primary opens its term: what its log holds.
    Open {
        /// Term.
        term: Term,
        /// Its log.
        history: History,
        /// What is committed of it.
        commit: Lsn,
    },
    /// The log of the sender is a prefix of the primary's.
    Opened {
        /// Term.
        term: Term,
        /// Its end; `None`: nothing in common is known, a copy of the state is needed.
        end: Option<Lsn>,
        /// What counts as acknowledged.
        written: Lsn,
    },
    /// Records follow, in the envelope of this message.
    Append {
        /// Term.
        term: Term,
        /// The lsn before the first record.
        after: Lsn,
        /// Their names, as runs of equal terms; empty: no records, only a commit.
        runs: Vec<(Lsn, Term)>,
        /// What is committed.
        commit: Lsn,
    },
    /// Records are in the log.
    Ack {
        /// Term.
        term: Term,
        /// Up to here.
        written: Lsn,
    },
    /// The term was not opened to the sender: it is a new process.
    NotOpen {
        /// Term.
        term: Term,
    },
    /// The sender has promised a higher term.
    Refused {
        /// The term refused.
        term: Term,
        /// Its promise.
        promised: Term,
    },
}

/// What to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Log a promise, durable in every mode, then report [`Event::Promised`].
    Promise(Term),
    /// Log that records above `after` of terms below `term` never were, and forget them; then report [`Event::Written`] for
    /// the last one that stays: reports on what was forgotten say nothing.
    Truncate {
        /// The primary's term.
        term: Term,
        /// Last record that stays.
        after: Lsn,
    },
    /// Log the records of the message that was heard, those above this lsn.
    Log {
        /// Last record that is here.
        after: Lsn,
    },
    /// Make the whole log durable, then report [`Event::Synced`].
    Sync,
    /// Say something to whoever is at a place.
    Send(Ordinal, Message),
    /// From now on send records above this lsn, and commits, to a place, at this term.
    Stream {
        /// To whom.
        to: Ordinal,
        /// Its last record.
        after: Lsn,
    },
    /// Send a copy of the committed state.
    Copy(
        /// To whom.
        Ordinal,
    ),
    /// Apply, and answer, records up to here.
    Commit(Lsn),
    /// Take requests, at this term; go on taking them where they were taken before.
    Serve(Term),
    /// Take no more, and answer those under way that nobody knows.
    Stop,
    /// Ask for a change of the map; its outcome is known from the map alone.
    Propose(Expected, Change),
}

/// A replica.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Replica {
    me: Member,
    rules: Rules,
    planted: Planted,
    /// Nothing that this incarnation or a later one wrote has been lost.
    lossless_since: Incarnation,
    /// Highest term promised.
    promised: Term,
    /// Highest promise that is durable.
    kept: Term,
    /// The term whose primary's log this one was matched with, by this process.
    matched: Term,
    history: History,
    written: Lsn,
    durable: Lsn,
    /// Committed, as told by the primary or found.
    told: Lsn,
    /// Committed and acted upon.
    commit: Lsn,
    /// The primary whose term it was matched with.
    follows: Option<Ordinal>,
    /// A [`Message::Open`] that waits for its promise.
    owes: Option<Ordinal>,
    /// A copy of the state is needed before records.
    copies: bool,
    /// What is committed here is not in the log of the primary that it was matched with (mode `async`): it is lost.
    bereft: bool,
    /// Newest entry of the map.
    seen: Option<Entry>,
    lead: Option<Lead>,
    suspects: BTreeSet<Ordinal>,
    leavers: BTreeSet<Ordinal>,
    /// Somebody may hold a read lease from this replica.
    granted: bool,
}

/// What a process finds of a replica when it starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Nothing that this incarnation or a later one wrote has been lost.
    pub lossless_since: Incarnation,
    /// Highest promise in the log.
    pub promised: Term,
    /// The log, all of it durable.
    pub history: History,
    /// What is known to be committed of it.
    pub commit: Lsn,
    /// The process before may have granted a read lease that has not ended.
    pub granted: bool,
}

impl Replica {
    /// A replica as a process finds it.
    pub fn new(me: Member, rules: Rules, found: Found) -> Self {
        let end = found.history.end();
        Self {
            me,
            rules,
            planted: Planted::default(),
            lossless_since: found.lossless_since,
            promised: found.promised,
            kept: found.promised,
            matched: Term(0),
            written: end,
            durable: end,
            told: found.commit,
            commit: found.commit,
            history: found.history,
            follows: None,
            owes: None,
            copies: false,
            bereft: false,
            seen: None,
            lead: None,
            suspects: BTreeSet::new(),
            leavers: BTreeSet::new(),
            granted: found.granted,
        }
    }

    /// The same with a planted defect.
    #[cfg(feature = "defects")]
    #[must_use]
    pub fn with_defect(mut self, defect: Option<Defect>) -> Self {
        self.planted = Planted(defect);
        self
    }

    /// Highest term promised.
    pub const fn promised(&self) -> Term {
        self.promised
    }

    /// Highest term whose promise is durable.
    pub const fn kept(&self) -> Term {
        self.kept
    }

    /// Takes back records that could not be logged.
    ///
    /// # Panics
    /// When somebody else may have them: with followers.
    pub fn withdraw(&mut self, end: Lsn) {
        assert!(self.followers().next().is_none(), "a record that was sent cannot be taken back");
        self.history.truncate(end);
        self.written = self.written.min(end);
        self.durable = self.durable.min(end);
    }

    /// Names of the records in the log.
    pub const fn history(&self) -> &History {
        &self.history
    }

    /// Last record that was committed and acted upon.
    pub const fn commit(&self) -> Lsn {
        self.commit
    }

    /// The term at which this replica writes: it is primary, and may be activating still.
    pub fn leads(&self) -> Option<Term> {
        self.lead.as_ref().map(|lead| lead.entry.term)
    }

    /// The term at which it takes requests.
    pub fn serves(&self) -> Option<Term> {
        self.lead.as_ref().filter(|lead| lead.serving).map(|lead| lead.entry.term)
    }

    /// Whether requests come to it: it serves, or served the term before and activates its own change.
    pub fn takes_requests(&self) -> bool {
        self.lead.as_ref().is_some_and(|lead| lead.admitting)
    }

    /// Whether it takes new writes: it leads, and has enough members in sync. A primary that changes its own configuration, or hands
    /// over, goes on.
    pub fn admits(&self) -> bool {
        self.lead.as_ref().is_some_and(|lead| lead.admitting && lead.entry.isr.len() >= self.rules.min_in_sync)
    }

    /// The newest entry of the map that it has read.
    pub const fn seen(&self) -> Option<&Entry> {
        self.seen.as_ref()
    }

    /// To whom it hands over. What is written meanwhile may be for the successor to answer.
    pub fn draining(&self) -> Option<Ordinal> {
        self.lead.as_ref()?.draining.map(|draining| draining.to)
    }

    /// Who is about to be stopped, as far as it was told.
    pub const fn leavers(&self) -> &BTreeSet<Ordinal> {
        &self.leavers
    }

    /// Copies that a record committed now is on.
    pub fn replicas(&self) -> u32 {
        self.lead.as_ref().map_or(1, |lead| lead.entry.isr.len() as u32)
    }

    /// Members, beside this one, whose read leases a read needs, as this process of theirs or a later one, but from no other disk;
    /// `None` while no linearizable read is possible.
    pub fn readable(&self) -> Option<Vec<Member>> {
        let lead = self.lead.as_ref().filter(|lead| lead.serving)?;
        let settled = self.commit >= lead.tail || self.planted.has(Defect::ReadUncommittedTail);
        let required = || lead.required(self.me.ordinal, self.planted).into_iter();
        settled.then(|| required().filter_map(|ordinal| lead.counted(ordinal)).collect())
    }

    /// What a read waits for that rests on no clock: the term served, the record up to which the state has to go, and the members,
    /// as this process of theirs or a later one on the same disk, who have to say afterwards that they have promised no higher
    /// term. `None` while it does not serve.
    pub fn confirmable(&self) -> Option<(Term, Lsn, Vec<Member>)> {
        let lead = self.lead.as_ref().filter(|lead| lead.serving)?;
        let required = lead.required(self.me.ordinal, self.planted).into_iter();
        let members = required.filter_map(|ordinal| lead.counted(ordinal)).collect();
        Some((lead.entry.term, self.commit.max(lead.tail), members))
    }

    /// Whether it has nothing in common with its primary that it knows of, and waits for a copy of the state.
    pub const fn awaits_copy(&self) -> bool {
        self.copies
    }

    /// Whether it follows a primary at this place, and nobody else.
    pub fn follows(&self, primary: Member) -> bool {
        self.lead.is_none() && self.leader() == Some(primary.ordinal)
    }

    /// Whether it may grant a primary a read lease: of who is not in sync nobody needs one, and it would wait for the end of it when it
    /// leads itself.
    pub fn may_grant(&self, primary: Member) -> bool {
        self.follows(primary) && self.seen.as_ref().is_some_and(|entry| entry.in_sync(self.me.ordinal).is_some())
    }

    /// Who may lead in its place now or next, as far as it knows: whose log it follows, which it may hear of before the map says so,
    /// and whom the map names. One of them may have granted it a read lease, and waits for its end before it serves.
    pub fn successors(&self) -> BTreeSet<Ordinal> {
        let named = self.seen.iter().flat_map(Entry::candidates).map(|member| member.ordinal);
        let all = named.chain(self.follows).filter(|ordinal| self.lead.is_none() && *ordinal != self.me.ordinal);
        all.collect()
    }

    /// Notes that a read lease was granted; [`Event::GrantOver`] ends it.
    pub const fn set_granted(&mut self) {
        self.granted = true;
    }

    /// The followers of a primary: everyone whose copy it keeps up.
    pub fn followers(&self) -> impl Iterator<Item = (Ordinal, &Follower)> {
        self.lead.iter().flat_map(|lead| lead.followers.iter().map(|(ordinal, follower)| (*ordinal, follower)))
    }

    /// Whether a copy of the state for this term may take the place of what is here: not of records that may have been
    /// acknowledged at this term.
    pub fn takes_copy(&self, term: Term, lsn: Lsn) -> bool {
        let unmatched = self.copies || self.planted.has(Defect::CopyOverRecords);
        let goes_further = lsn > self.history.end() || (unmatched && lsn > self.commit);
        self.matched == term && self.promised == term && self.lead.is_none() && goes_further
    }

    /// Whether the primary of this term has lost what is committed here, which mode `async` allows: no copy of its state will ever
    /// go further, unless somebody writes. What is here is to be given up.
    pub fn is_bereft(&self, term: Term) -> bool {
        self.bereft && self.copies && self.matched == term && self.promised == term && self.lead.is_none()
    }

    /// Whether this process may serve under `entry`: its disk is the map's, and it has lost nothing that it had
    /// acknowledged.
    pub fn is_eligible(&self, entry: &Entry) -> bool {
        if self.planted.has(Defect::RestartKeepsIsr) {
            return true;
        }
        entry.holds_all(&self.me, self.lossless_since, self.rules.keeps_all)
    }

    /// Takes the newest entry of the map that was read.
    pub fn learn(&mut self, entry: &Entry, out: &mut Vec<Action>) {
        if self.seen.as_ref().is_some_and(|seen| !seen.is_older_than(entry)) {
            return;
        }
        self.seen = Some(entry.clone());
        let named = self.is_named(entry);
        match &mut self.lead {
            Some(lead) if lead.entry.term == entry.term => lead.take_marks(entry),
            _ if named => self.begin(entry, out),
            Some(lead) if lead.entry.term < entry.term => self.step_down(out),
            _ => {}
        }
        self.consider(out);
    }

    /// Takes an event.
    pub fn step(&mut self, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Promised(term) => self.promise_kept(term, out),
            Event::Written(lsn, term) => self.wrote(lsn, term, out),
            Event::Synced(lsn, term) => {
                if self.history.term_at(lsn) == Some(term) {
                    self.durable = self.durable.max(lsn);
                }
            }
            Event::Appended(lsn) => {
                let term = self.leads().expect("a primary appends");
                self.history.append(lsn, term);
            }
            Event::Heard(from, message) => self.hear(from, message, out),
            Event::Connected(member) => self.open_again(&member, out),
            Event::Suspected(ordinal) => {
                self.suspects.insert(ordinal);
            }
            Event::Trusted(ordinal) => {
                self.suspects.remove(&ordinal);
            }
            Event::Leaving(leavers) => self.leavers = leavers,
            Event::Installed(lsn, term) => self.installed(lsn, term, out),
            Event::GrantOver => self.granted = false,
            Event::HandOver(to) => {
                let (me, under_way) = (self.me.ordinal, self.history.end());
                if let Some(lead) = &mut self.lead {
                    lead.drain_to(Some(to).filter(|to| *to != me), under_way);
                }
            }
            Event::Remind => self.remind(out),
        }
        self.consider(out);
    }

    fn is_named(&self, entry: &Entry) -> bool {
        let same_disk = |member: &Member| (member.ordinal, member.store) == (self.me.ordinal, self.me.store);
        entry.served_by(&self.me)
            || self.planted.has(Defect::RestartSameTerm) && entry.primary_member().is_some_and(same_disk)
    }

    /// Takes over under an entry that names this very process.
    fn begin(&mut self, entry: &Entry, out: &mut Vec<Action>) {
        let goes_on = self.lead.is_some();
        // A term is served once: one that was promised already may have been served by a process before this one.
        let unused = self.promised < entry.term || self.planted.has(Defect::RestartSameTerm);
        if !unused || !(goes_on || self.is_eligible(entry)) {
            if goes_on {
                self.step_down(out);
            }
            return;
        }
        self.promised = entry.term;
        self.matched = entry.term;
        (self.follows, self.owes, self.copies) = (None, None, false);
        out.push(Action::Promise(entry.term));
        self.lead = Some(Lead::begin(self.lead.take(), entry, self.me.ordinal, self.history.end()));
    }

    fn step_down(&mut self, out: &mut Vec<Action>) {
        if self.lead.take().is_some() {
            out.push(Action::Stop);
        }
    }

    fn promise_kept(&mut self, term: Term, out: &mut Vec<Action>) {
        self.kept = self.kept.max(term);
        self.answer_open(out);
    }

    fn wrote(&mut self, lsn: Lsn, term: Term, out: &mut Vec<Action>) {
        if self.history.term_at(lsn) != Some(term) || lsn <= self.written {
            return;
        }
        self.written = lsn;
        if let (None, Some(leader)) = (&self.lead, self.leader()) {
            out.push(Action::Send(leader, Message::Ack { term: self.matched, written: self.written }));
        }
        self.follow_commit(out);
    }

    /// The primary that this replica follows, once its promise is durable and its log a prefix of the primary's.
    fn leader(&self) -> Option<Ordinal> {
        let matches = !self.copies || self.planted.has(Defect::AckWhileCopying);
        let follows = self.matched == self.promised && self.kept == self.promised && matches;
        self.follows.filter(|_| follows && self.owes.is_none())
    }

    fn hear(&mut self, from: Member, message: Message, out: &mut Vec<Action>) {
        match message {
            Message::Open { term, history, commit } => self.opened_by(from, term, &history, commit, out),
            Message::Append { term, after, runs, commit } => self.appended_by(from, term, after, &runs, commit, out),
            Message::Opened { term, end, written } => self.follower_opened(from, term, end, written, out),
            Message::Ack { term, written } => self.acked(&from, term, written),
            Message::NotOpen { term } => {
                if self.leads() == Some(term) {
                    self.open_again(&from, out);
                }
            }
            // A higher promise comes from a map that this primary will read.
            Message::Refused { .. } => {}
        }
    }

    fn refuses(&self, from: Member, term: Term, out: &mut Vec<Action>) -> bool {
        let refused = term < self.promised && !self.planted.has(Defect::AcceptOldTerm);
        if refused {
            out.push(Action::Send(from.ordinal, Message::Refused { term, promised: self.promised }));
        }
        refused
    }

    fn opened_by(&mut self, from: Member, term: Term, theirs: &History, commit: Lsn, out: &mut Vec<Action>) {
        if self.refuses(from, term, out) || self.leads() == Some(term) {
            return;
        }
        self.step_down(out);
        if term > self.promised {
            self.promised = term;
            out.push(Action::Promise(term));
        }
        self.follows = Some(from.ordinal);
        self.told = if self.matched == term { self.told.max(commit) } else { commit };
        self.matched = term;
        // Records of this very term came from its primary: an opening without them is older, and they were acknowledged.
        if self.history.last().1 < term || self.planted.has(Defect::ReopenTruncates) {
            self.match_log(term, theirs, out);
        }
        self.owes = Some(from.ordinal);
        self.answer_open(out);
    }

    /// Drops what the primary of a new term does not have.
    fn match_log(&mut self, term: Term, theirs: &History, out: &mut Vec<Action>) {
        // What is committed here is in every log that may lead; if it seems not to be, a copy decides.
        let common = self.history.common(theirs).filter(|common| *common >= self.commit);
        self.copies = common.is_none();
        let theirs_at_commit = theirs.term_at(self.commit);
        let differs = theirs_at_commit.is_some() && theirs_at_commit != self.history.term_at(self.commit);
        self.bereft = self.rules.primary_only && (theirs.end() < self.commit || differs);
        if let Some(common) = common
            && common < self.history.end()
            && !self.planted.has(Defect::KeepTail)
        {
            out.push(Action::Truncate { term, after: common });
            self.history.truncate(common);
            self.written = self.written.min(common);
            self.durable = self.durable.min(common);
        }
    }

    fn answer_open(&mut self, out: &mut Vec<Action>) {
        if self.lead.is_none()
            && self.kept == self.promised
            && let Some(to) = self.owes.take()
        {
            let end = (!self.copies).then(|| self.history.end());
            let written = if self.copies { Lsn(0) } else { self.written };
            out.push(Action::Send(to, Message::Opened { term: self.matched, end, written }));
            self.follow_commit(out);
        }
    }

    fn appended_by(
        &mut self,
        from: Member,
        term: Term,
        after: Lsn,
        runs: &[(Lsn, Term)],
        commit: Lsn,
        out: &mut Vec<Action>,
    ) {
        if self.refuses(from, term, out) || self.leads() == Some(term) {
            return;
        }
        if self.matched != term {
            out.push(Action::Send(from.ordinal, Message::NotOpen { term }));
            return;
        }
        if self.copies || self.owes.is_some() {
            return;
        }
        let end = self.history.end();
        if after > end {
            // Something was lost on the way: from here again.
            out.push(Action::Send(from.ordinal, Message::Opened { term, end: Some(end), written: self.written }));
            return;
        }
        let new = runs.iter().filter(|run| run.0 > end);
        if new.clone().next_back().is_some_and(|last| last.1 <= term) && self.history.may_append(new.clone()) {
            new.for_each(|run| self.history.append(run.0, run.1));
            out.push(Action::Log { after: end });
        } else if !runs.is_empty() {
            // They came before; what was said of them did not, perhaps.
            out.push(Action::Send(from.ordinal, Message::Ack { term, written: self.written }));
        }
        self.told = self.told.max(commit);
        self.follow_commit(out);
    }

    /// A backup acts upon what its primary says is committed, as far as its own log holds it.
    fn follow_commit(&mut self, out: &mut Vec<Action>) {
        let commit = self.told.min(self.written);
        if self.lead.is_none() && self.owes.is_none() && !self.copies && commit > self.commit {
            self.commit = commit;
            out.push(Action::Commit(commit));
        }
    }

    fn installed(&mut self, lsn: Lsn, term: Term, out: &mut Vec<Action>) {
        self.history = History::from_floor(lsn, term);
        (self.written, self.durable, self.commit) = (lsn, lsn, lsn);
        self.told = self.told.max(lsn);
        self.copies = false;
        self.owes = self.follows;
        self.answer_open(out);
    }
}
