//! The primary's side: which acknowledgements it waits for, when it serves, and which map changes it proposes.

use super::{Action, Message, Replica};
use crate::change::Change;
use crate::injected;
use crate::injected::InjectedBug;
use crate::map::Entry;
use engram_memory::{Lsn, Member, Ordinal, Term};
use std::collections::{BTreeMap, BTreeSet};

/// A replica that a primary keeps up to date.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Follower {
    /// The process that opened this term; `None` until one did.
    pub member: Option<Member>,
    /// Last record that it acknowledged under this term.
    pub acked: Lsn,
}

/// A planned leadership transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Transfer {
    /// The next primary.
    pub(super) to: Ordinal,
    /// End of the log when the transfer was requested: everything up to here is committed here.
    log_end: Lsn,
}

/// In-memory state of a primary.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct PrimaryState {
    /// The entry under which it is primary.
    pub(super) entry: Entry,
    /// End of the log when this process became primary: the previous primary may have acknowledged up to here.
    pub(super) tail: Lsn,
    pub(super) followers: BTreeMap<Ordinal, Follower>,
    /// The proposed map change whose outcome is unknown.
    pub(super) pending: Option<Change>,
    pub(super) transfer: Option<Transfer>,
    /// It has read that its term is settled, and its promise is durable.
    pub(super) serving: bool,
    /// It accepts requests: it serves, or served the previous term.
    pub(super) admitting: bool,
    /// Followers to which this term was not opened yet.
    unopened: Vec<Ordinal>,
    /// Members that came back with another disk: the ones in the map are permanently gone.
    replaced: BTreeSet<Ordinal>,
    /// A sync was requested and is not complete.
    syncing: bool,
}

impl PrimaryState {
    pub(super) fn begin(before: Option<Self>, entry: &Entry, me: Ordinal, end: Lsn) -> Self {
        // Its own change of the in-sync set does not end a transfer; a promotion does.
        let transfer = before.as_ref().filter(|_| entry.activated).and_then(|before| before.transfer);
        let mut state = Self {
            entry: entry.clone(),
            tail: before.as_ref().map_or(end, |before| before.tail),
            followers: BTreeMap::new(),
            pending: None,
            transfer: transfer.filter(|transfer| entry.in_sync(transfer.to).is_some()),
            serving: false,
            admitting: before.is_some_and(|before| before.admitting),
            unopened: Vec::new(),
            replaced: BTreeSet::new(),
            syncing: false,
        };
        state.adjust_followers(me);
        state
    }

    /// Transfers leadership to an in-sync member.
    pub(super) fn transfer_to(&mut self, to: Option<Ordinal>, log_end: Lsn) {
        let before = self.transfer.filter(|transfer| Some(transfer.to) == to);
        let requested = to.filter(|to| self.entry.in_sync(*to).is_some()).map(|to| Transfer { to, log_end });
        self.transfer = before.or(requested);
    }

    /// Applies a newer entry of the same term.
    pub(super) fn update_entry(&mut self, entry: &Entry) {
        if entry.activated && self.pending == Some(Change::Activate) {
            self.pending = None;
        }
        let me = self.entry.primary;
        self.entry = entry.clone();
        self.adjust_followers(me);
    }

    fn adjust_followers(&mut self, me: Ordinal) {
        let members = self.entry.isr.iter().map(|member| member.ordinal);
        let wanted: Vec<Ordinal> =
            members.chain(self.entry.learners.iter().copied()).filter(|ordinal| *ordinal != me).collect();
        let pending = self.newcomer().map(|newcomer| newcomer.ordinal);
        self.followers.retain(|ordinal, _| wanted.contains(ordinal) || pending == Some(*ordinal));
        for ordinal in wanted {
            if let std::collections::btree_map::Entry::Vacant(vacant) = self.followers.entry(ordinal) {
                vacant.insert(Follower::default());
                self.unopened.push(ordinal);
            }
        }
    }

    fn newcomer(&self) -> Option<Member> {
        match self.pending {
            Some(Change::Add { newcomer, .. }) => Some(newcomer),
            _ => None,
        }
    }

    /// Returns the maximal in-sync set without this replica: that of the map, and a newcomer once it is proposed.
    pub(super) fn required(&self, me: Ordinal, bug: InjectedBug) -> Vec<Ordinal> {
        let newcomer = self.newcomer().filter(|_| !injected!(bug, AckIgnoresPendingAdd));
        let members = self.entry.isr.iter().chain(&newcomer).map(|member| member.ordinal);
        let mut required: Vec<Ordinal> = members.filter(|ordinal| *ordinal != me).collect();
        required.sort_unstable();
        required.dedup();
        required
    }

    /// Returns the member whose acknowledgements count for an ordinal: its disk, as this process or a later one.
    pub(super) fn counted(&self, ordinal: Ordinal) -> Option<Member> {
        self.newcomer().filter(|newcomer| newcomer.ordinal == ordinal).or_else(|| self.entry.in_sync(ordinal).copied())
    }

    fn is_alone(&self, me: Ordinal) -> bool {
        self.entry.isr.iter().all(|member| member.ordinal == me)
    }

    /// Returns the replica that may become primary at any moment because of this replica's proposal. Once proposed,
    /// only the map shows whether the transfer happens, and records that the successor does not hold by then are
    /// lost.
    fn successor(&self) -> Option<Ordinal> {
        match &self.pending {
            Some(Change::Promote { primary, .. }) => Some(primary.ordinal),
            _ => self.transfer.map(|transfer| transfer.to),
        }
    }

    /// Whether the proposed change leaves this replica as the only one.
    fn will_be_alone(&self, me: Ordinal) -> bool {
        match self.pending {
            Some(Change::Remove { leaver, .. }) => {
                self.entry.isr.iter().all(|member| member.ordinal == me || member.ordinal == leaver)
            }
            _ => false,
        }
    }
}

impl Replica {
    fn opening(&self, term: Term) -> Message {
        Message::Open { term, history: self.history.clone(), commit: self.commit }
    }

    /// Opens the term again to a follower that reconnected, perhaps as another process: what it holds is unknown.
    pub(super) fn reopen(&mut self, member: &Member, out: &mut Vec<Action>) {
        let Some(state) = &mut self.primary else { return };
        let Some(follower) = state.followers.get_mut(&member.ordinal) else { return };
        *follower = Follower::default();
        let term = state.entry.term;
        if self.durable_promise == term {
            out.push(Action::Send(member.ordinal, self.opening(term)));
        }
    }

    pub(super) fn receive_opened(
        &mut self,
        from: Member,
        term: Term,
        end: Option<Lsn>,
        written: Lsn,
        out: &mut Vec<Action>,
    ) {
        let Some(state) = self.primary.as_mut().filter(|state| state.entry.term == term) else { return };
        // No log of this term is longer than its primary's. A report that claims more is ignored: later records would
        // be committed that the follower never had.
        let here = self.history.end();
        if written > here || end.is_some_and(|end| end > here) {
            return;
        }
        let counted = state.counted(from.ordinal);
        let Some(follower) = state.followers.get_mut(&from.ordinal) else { return };
        if counted.is_some_and(|member| member.store != from.store) && !injected!(self.bug, AckByOrdinal) {
            if !injected!(self.bug, KeepsReplaced) {
                state.replaced.insert(from.ordinal);
            }
            return;
        }
        let is_over = |member: Member| member.store == from.store && member.incarnation > from.incarnation;
        let recorded = [counted, follower.member].into_iter().flatten();
        if recorded.into_iter().any(is_over) && !injected!(self.bug, AckOfOlderProcess) {
            return;
        }
        state.replaced.remove(&from.ordinal);
        follower.member = Some(from);
        match end {
            Some(end) => {
                follower.acked = written;
                out.push(Action::Stream { to: from.ordinal, after: end });
            }
            None => out.push(Action::SendSnapshot(from.ordinal)),
        }
    }

    pub(super) fn receive_ack(&mut self, from: &Member, term: Term, written: Lsn) {
        let Some(state) = self.primary.as_mut().filter(|state| state.entry.term == term) else { return };
        if let Some(follower) = state.followers.get_mut(&from.ordinal)
            && follower.member.as_ref() == Some(from)
            && written <= self.history.end()
        {
            follower.acked = follower.acked.max(written);
        }
    }

    /// Takes every step that has become possible.
    pub(super) fn make_progress(&mut self, out: &mut Vec<Action>) {
        let Some(term) = self.primary_term() else { return };
        if self.durable_promise < term {
            return;
        }
        self.open_new_followers(out);
        self.activate(out);
        self.serve(out);
        self.advance(out);
        self.reconfigure(out);
    }

    /// Opens the term to followers that the map added.
    fn open_new_followers(&mut self, out: &mut Vec<Action>) {
        let Some(state) = &mut self.primary else { return };
        let added: Vec<Ordinal> = std::mem::take(&mut state.unopened);
        let term = state.entry.term;
        for ordinal in added {
            out.push(Action::Send(ordinal, self.opening(term)));
        }
    }

    fn activate(&mut self, out: &mut Vec<Action>) {
        let Some(state) = &self.primary else { return };
        if state.entry.activated || state.pending.is_some() {
            return;
        }
        let on_disk = !state.is_alone(self.me.ordinal) || injected!(self.bug, MarkSoloWithoutFsync);
        if on_disk || self.synced(out) {
            self.propose(Change::Activate, out);
        }
    }

    /// Whether the whole log is durable; requests a sync otherwise.
    fn synced(&mut self, out: &mut Vec<Action>) -> bool {
        let Some(state) = &mut self.primary else { return false };
        let synced = self.durable >= self.history.end();
        if !synced && !std::mem::replace(&mut state.syncing, true) {
            out.push(Action::Sync);
        }
        state.syncing &= !synced;
        synced
    }

    fn serve(&mut self, out: &mut Vec<Action>) {
        let granted = self.granted && !injected!(self.bug, ServeBeforeGrantOver);
        let Some(state) = &mut self.primary else { return };
        let settled = state.entry.is_settled() || injected!(self.bug, ServeBeforeActivated);
        if settled && !granted && !state.serving {
            (state.serving, state.admitting) = (true, true);
            out.push(Action::Serve(state.entry.term));
        }
    }

    /// Commits what every member of the maximal in-sync set holds under this term.
    fn advance(&mut self, out: &mut Vec<Action>) {
        let me = self.me.ordinal;
        let Some(state) = self.primary.as_ref().filter(|state| state.serving) else { return };
        if state.entry.isr.len() < self.rules.min_in_sync {
            return;
        }
        let required = if self.rules.primary_only {
            state.successor().into_iter().collect()
        } else {
            state.required(me, self.bug)
        };
        let alone = state.is_alone(me)
            && (required.is_empty() || !injected!(self.bug, SoloFsyncOnlyWithoutLearner))
            && !injected!(self.bug, SoloAckWithoutFsync);
        let will_be_alone = state.will_be_alone(me) && !injected!(self.bug, ShrinkRaceAck);
        let mut commit = if (alone || will_be_alone) && !self.rules.primary_only {
            self.durable.min(self.written)
        } else {
            self.written
        };
        for ordinal in required {
            if injected!(self.bug, AckWithoutBackup) {
                break;
            }
            let follower = state.followers.get(&ordinal).filter(|follower| follower.member.is_some());
            commit = commit.min(follower.map_or(Lsn(0), |follower| follower.acked));
        }
        if commit > self.commit {
            self.commit = commit;
            self.reported_commit = self.reported_commit.max(commit);
            out.push(Action::Commit(commit));
        }
    }

    /// Proposes one change of the in-sync set at a time.
    fn reconfigure(&mut self, out: &mut Vec<Action>) {
        let me = self.me;
        let Some(state) = self.primary.as_ref().filter(|state| state.serving && state.pending.is_none()) else {
            return;
        };
        let is_gone = |ordinal: &Ordinal| self.suspects.contains(ordinal) || state.replaced.contains(ordinal);
        // A leaving member is removed only if writes continue without it.
        let spares_one = state.entry.isr.len() > self.rules.min_in_sync;
        let leaves = |ordinal: &Ordinal| spares_one && self.leaving.contains(ordinal);
        let others = || state.entry.isr.iter().filter(|member| **member != me);
        let leaver = others().find(|member| is_gone(&member.ordinal));
        let leaver = leaver.or_else(|| others().find(|member| leaves(&member.ordinal)));
        if let Some(leaver) = leaver.map(|member| member.ordinal) {
            // The only replica left has nothing but its own disk.
            let stays = state.entry.isr.len() > 2 || injected!(self.bug, ShrinkWithoutFsync);
            if stays || self.synced(out) {
                self.propose(Change::Remove { primary: me, leaver }, out);
            }
            return;
        }
        if let Some(newcomer) = self.newcomer(state) {
            self.propose(Change::Add { primary: me, newcomer }, out);
        } else if let Some(transfer) = state.transfer {
            self.propose_transfer(transfer, out);
        }
    }

    /// Returns the member to add: a learner that holds everything that may have been acknowledged, or a member as its
    /// current process, since the one in the map may have lost records so that this one could not be promoted.
    fn newcomer(&self, state: &PrimaryState) -> Option<Member> {
        let held = self.commit.max(state.tail);
        let renews = !self.rules.keeps_all && !injected!(self.bug, NeverRenews);
        let members = state.entry.isr.iter().filter(|_| renews).map(|member| member.ordinal);
        let learns = |learner: &Ordinal| state.transfer.is_none() && state.entry.in_sync(*learner).is_none();
        let learners = state.entry.learners.iter().copied().filter(learns);
        members.chain(learners).find_map(|ordinal| {
            let follower = state.followers.get(&ordinal)?;
            let caught_up = follower.acked >= held || injected!(self.bug, AddBeforeCaughtUp);
            let is_new = |member: &Member| state.entry.in_sync(ordinal) != Some(member);
            let stays = !self.suspects.contains(&ordinal) && !self.leaving.contains(&ordinal);
            follower.member.filter(is_new).filter(|_| caught_up && stays)
        })
    }

    /// Proposes the transfer once the successor holds what is committed, and will hold what this replica commits from
    /// here on: the map decides. Nothing waits for the result: writes that arrive meanwhile and are not committed when
    /// the successor takes over are retried there.
    fn propose_transfer(&mut self, transfer: Transfer, out: &mut Vec<Action>) {
        let Some(state) = &self.primary else { return };
        let successor = state.followers.get(&transfer.to).filter(|follower| follower.acked >= self.commit);
        if self.commit >= transfer.log_end
            && let Some(primary) = successor.and_then(|follower| follower.member)
        {
            let isr = state.entry.isr.iter().map(|member| member.ordinal).collect();
            self.propose(Change::Promote { primary, isr }, out);
        }
    }

    fn propose(&mut self, change: Change, out: &mut Vec<Action>) {
        let Some(state) = &mut self.primary else { return };
        state.pending = Some(change.clone());
        out.push(Action::Propose(state.entry.expectation(), change));
    }

    /// Sends again what may have been lost.
    pub(super) fn resend(&mut self, out: &mut Vec<Action>) {
        let Some(state) = &mut self.primary else { return };
        if injected!(self.bug, AddWithoutIncarnation)
            && let Some(Change::Add { newcomer, .. }) = &mut state.pending
            && let Some(runs) = state.followers.get(&newcomer.ordinal).and_then(|follower| follower.member)
        {
            *newcomer = runs;
        }
        if let Some(change) = &state.pending {
            if injected!(self.bug, TimeoutIsFailure) && *change != Change::Activate {
                state.pending = None;
                return;
            }
            out.push(Action::Propose(state.entry.expectation(), change.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::replica::{Action, Event, History, Message, RecoveredReplica, Replica, Rules};
    use crate::{Change, Entry};
    use engram_memory::{Incarnation, Lsn, Member, Ordinal, StoreId, Term};

    fn member(ordinal: u32) -> Member {
        Member { ordinal: Ordinal(ordinal), store: StoreId(u128::from(ordinal) + 1), incarnation: Incarnation(1) }
    }

    fn step(replica: &mut Replica, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        replica.step(event, &mut out);
        out
    }

    /// State of a new disk.
    fn empty_disk() -> RecoveredReplica {
        RecoveredReplica {
            lossless_since: Incarnation(1),
            promised: Term(0),
            history: History::default(),
            commit: Lsn(0),
            granted: false,
        }
    }

    /// Appends a record, and reports it written.
    fn write(replica: &mut Replica, lsn: u64) -> Vec<Action> {
        step(replica, Event::Appended(Lsn(lsn)));
        step(replica, Event::Written(Lsn(lsn), Term(1)))
    }

    /// A primary of these members that serves, and has opened its term to all of them.
    fn serving(members: &[Member], rules: Rules) -> Replica {
        let mut primary = Replica::new(members[0], rules, empty_disk());
        primary.apply_entry(&Entry::first(members.to_vec()), &mut Vec::new());
        step(&mut primary, Event::Promised(Term(1)));
        for follower in &members[1..] {
            let opened = Message::Opened { term: Term(1), end: Some(Lsn(0)), written: Lsn(0) };
            step(&mut primary, Event::Received(*follower, opened));
        }
        primary
    }

    const SYNC: Rules = Rules { keeps_all: true, min_in_sync: 1, primary_only: false };

    fn removes(actions: &[Action], place: u32) -> bool {
        let is_it = |change: &Change| matches!(change, Change::Remove { leaver, .. } if *leaver == Ordinal(place));
        actions.iter().any(|action| matches!(action, Action::Propose(_, change) if is_it(change)))
    }

    #[test]
    fn leaving_member_is_removed_while_alive_and_not_added_again() {
        let mut primary = serving(&[member(0), member(1)], SYNC);
        write(&mut primary, 1);
        let actions = step(&mut primary, Event::Leaving([Ordinal(1)].into()));
        assert!(
            actions.contains(&Action::Sync) && !removes(&actions, 1),
            "the only replica left has everything on disk: {actions:?}"
        );
        let actions = step(&mut primary, Event::Synced(Lsn(1), Term(1)));
        assert!(removes(&actions, 1), "{actions:?}");
        assert!(primary.admits_writes() && primary.serving_term().is_some(), "it continues meanwhile");
        let acked = step(&mut primary, Event::Received(member(1), Message::Ack { term: Term(1), written: Lsn(1) }));
        assert!(acked.contains(&Action::Commit(Lsn(1))), "both are required until the map changes: {acked:?}");

        let alone = Entry::first(vec![member(0), member(1)]);
        let alone = alone.apply(&Change::Remove { primary: member(0), leaver: Ordinal(1) }).unwrap();
        let learning = alone.apply(&Change::Learn(vec![Ordinal(1)])).unwrap();
        primary.apply_entry(&learning, &mut Vec::new());
        step(&mut primary, Event::Promised(Term(2)));
        let whole = Message::Opened { term: Term(2), end: Some(Lsn(1)), written: Lsn(1) };
        let adds =
            |actions: &[Action]| actions.iter().any(|action| matches!(action, Action::Propose(_, Change::Add { .. })));
        assert!(!adds(&step(&mut primary, Event::Received(member(1), whole))), "it is still leaving");
        assert!(adds(&step(&mut primary, Event::Leaving([].into()))), "it no longer leaves");
    }

    #[test]
    fn leaving_member_stays_in_sync_if_writes_need_it() {
        let strict = Rules { min_in_sync: 2, ..SYNC };
        let mut pair = serving(&[member(0), member(1)], strict);
        let actions = step(&mut pair, Event::Leaving([Ordinal(1)].into()));
        assert_eq!(actions, [], "one member is too few");
        let mut three = serving(&[member(0), member(1), member(2)], strict);
        let actions = step(&mut three, Event::Leaving([Ordinal(1), Ordinal(2)].into()));
        assert!(removes(&actions, 1) && !removes(&actions, 2), "one after the other: {actions:?}");
        let left = three.entry().unwrap().apply(&Change::Remove { primary: member(0), leaver: Ordinal(1) }).unwrap();
        three.apply_entry(&left, &mut Vec::new());
        let actions = step(&mut three, Event::Promised(Term(2)));
        assert!(!removes(&actions, 2), "two members are the minimum: {actions:?}");
    }

    #[test]
    fn transferring_primary_serves_until_it_reads_the_promotion_and_commits_first() {
        let mut primary = serving(&[member(0), member(1)], SYNC);
        let acks = |lsn| Event::Received(member(1), Message::Ack { term: Term(1), written: Lsn(lsn) });
        let promotes = |actions: &[Action]| {
            actions.iter().any(|action| matches!(action, Action::Propose(_, Change::Promote { .. })))
        };
        write(&mut primary, 1);
        assert!(!promotes(&step(&mut primary, Event::TransferLeadership(Ordinal(1)))), "a record is in flight");
        write(&mut primary, 2);
        let actions = step(&mut primary, acks(1));
        assert!(
            actions.contains(&Action::Commit(Lsn(1))) && promotes(&actions),
            "later records do not delay the transfer: {actions:?}"
        );
        assert!(primary.admits_writes() && primary.required_leases().is_some(), "it is still the only primary");
        assert!(step(&mut primary, acks(2)).contains(&Action::Commit(Lsn(2))));

        let promote = Change::Promote { primary: member(1), isr: vec![Ordinal(0), Ordinal(1)] };
        let entry = primary.entry().unwrap().apply(&promote).unwrap();
        let mut stops = Vec::new();
        primary.apply_entry(&entry, &mut stops);
        assert!(stops.contains(&Action::Stop) && !primary.admits_writes());
    }

    #[test]
    fn promotion_with_all_replicas_serves_before_activation_and_others_wait() {
        let pair = Entry::first(vec![member(0), member(1)]);
        let promoted = |isr| pair.apply(&Change::Promote { primary: member(1), isr }).unwrap();
        let serves_at_once = |entry: &Entry| {
            let mut primary = Replica::new(member(1), SYNC, empty_disk());
            primary.apply_entry(entry, &mut Vec::new());
            let actions = step(&mut primary, Event::Promised(entry.term));
            assert!(actions.iter().any(|action| matches!(action, Action::Propose(_, Change::Activate))), "{actions:?}");
            primary.serving_term() == Some(entry.term)
        };
        assert!(serves_at_once(&promoted(vec![Ordinal(0), Ordinal(1)])));
        assert!(!serves_at_once(&promoted(vec![Ordinal(1)])), "the removed replica may be promoted until activation");
    }

    #[test]
    fn async_transfer_in_flight_loses_nothing_even_when_cancelled() {
        let rules = Rules { keeps_all: false, min_in_sync: 1, primary_only: true };
        let mut primary = serving(&[member(0), member(1)], rules);
        let received = |message| Event::Received(member(1), message);
        assert!(write(&mut primary, 1).contains(&Action::Commit(Lsn(1))), "no backup is required");
        step(&mut primary, received(Message::Ack { term: Term(1), written: Lsn(1) }));

        let actions = step(&mut primary, Event::TransferLeadership(Ordinal(1)));
        assert!(
            actions.iter().any(|action| matches!(action, Action::Propose(_, Change::Promote { .. }))),
            "{actions:?}"
        );
        step(&mut primary, Event::TransferLeadership(Ordinal(0)));
        assert!(primary.admits_writes(), "it continues");
        assert_eq!(write(&mut primary, 2), [], "the map may still promote the other replica, which lacks the record");
        let acked = step(&mut primary, received(Message::Ack { term: Term(1), written: Lsn(2) }));
        assert!(acked.contains(&Action::Commit(Lsn(2))), "{acked:?}");
    }

    #[test]
    fn async_follower_detects_commits_that_the_next_primary_lost() {
        let loses_commits = |rules: Rules, theirs: History| {
            let mut follower = serving(&[member(0), member(1)], rules);
            write(&mut follower, 1);
            write(&mut follower, 2);
            step(&mut follower, Event::Received(member(1), Message::Ack { term: Term(1), written: Lsn(2) }));
            assert_eq!(follower.commit(), Lsn(2));
            let open = Message::Open { term: Term(10), history: theirs, commit: Lsn(1) };
            step(&mut follower, Event::Received(member(1), open));
            assert!(!follower.accepts_snapshot(Term(10), Lsn(2)), "the snapshot does not go further");
            follower.has_lost_commits(Term(10))
        };
        let asynchronous = Rules { keeps_all: false, min_in_sync: 1, primary_only: true };
        let from = |lsn| History::from_floor(Lsn(lsn), Term(9));
        assert!(loses_commits(asynchronous, from(1)), "the new primary's log ends before");
        assert!(loses_commits(asynchronous, from(2)), "another record has the same lsn");
        assert!(!loses_commits(asynchronous, from(3)), "the record may still be there");
        assert!(!loses_commits(SYNC, from(1)));
    }
}
