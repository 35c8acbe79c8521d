//! The primary's side: whose acknowledgements it waits for, when it serves, what it asks of the map.

use super::planted::Planted;
use super::{Action, Defect, Message, Replica};
use crate::change::Change;
use crate::map::Entry;
use engram_memory::{Lsn, Member, Ordinal, Term};
use std::collections::{BTreeMap, BTreeSet};

/// A copy that a primary keeps up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Follower {
    /// The process that opened this term; `None` until one did.
    pub member: Option<Member>,
    /// Last record that it acknowledged at this term.
    pub acked: Lsn,
}

/// A planned hand-over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Draining {
    /// Who shall lead.
    pub(super) to: Ordinal,
    /// What was under way when it was asked for: that is committed here.
    under_way: Lsn,
}

/// What a primary keeps in memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Lead {
    /// The entry under which it leads.
    pub(super) entry: Entry,
    /// End of the log when this process took over: up to here the primary before may have acknowledged.
    pub(super) tail: Lsn,
    pub(super) followers: BTreeMap<Ordinal, Follower>,
    /// What it asked of the map, and does not know the outcome of.
    pub(super) pending: Option<Change>,
    pub(super) draining: Option<Draining>,
    /// It has read that its term is settled, and its promise is durable.
    pub(super) serving: bool,
    /// It takes requests: it serves, or served the term before.
    pub(super) admitting: bool,
    /// Followers that were not told of this term.
    unopened: Vec<Ordinal>,
    /// Members that came back with another disk: those that the map means are gone for good.
    replaced: BTreeSet<Ordinal>,
    /// A sync was asked for, and has not come.
    syncing: bool,
}

impl Lead {
    pub(super) fn begin(before: Option<Self>, entry: &Entry, me: Ordinal, end: Lsn) -> Self {
        // Its own change of the in-sync set ends no hand-over; a promotion does.
        let draining = before.as_ref().filter(|_| entry.activated).and_then(|before| before.draining);
        let mut lead = Self {
            entry: entry.clone(),
            tail: before.as_ref().map_or(end, |before| before.tail),
            followers: BTreeMap::new(),
            pending: None,
            draining: draining.filter(|draining| entry.in_sync(draining.to).is_some()),
            serving: false,
            admitting: before.is_some_and(|before| before.admitting),
            unopened: Vec::new(),
            replaced: BTreeSet::new(),
            syncing: false,
        };
        lead.adjust_followers(me);
        lead
    }

    /// Hands over to a member in sync; to nobody else.
    pub(super) fn drain_to(&mut self, to: Option<Ordinal>, under_way: Lsn) {
        let before = self.draining.filter(|draining| Some(draining.to) == to);
        let asked = to.filter(|to| self.entry.in_sync(*to).is_some()).map(|to| Draining { to, under_way });
        self.draining = before.or(asked);
    }

    /// Takes an entry of the same term.
    pub(super) fn take_marks(&mut self, entry: &Entry) {
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

    /// The maximal in-sync set without this replica: that of the map, and a newcomer from its proposal on.
    pub(super) fn required(&self, me: Ordinal, planted: Planted) -> Vec<Ordinal> {
        let newcomer = self.newcomer().filter(|_| !planted.has(Defect::AckIgnoresPendingAdd));
        let members = self.entry.isr.iter().chain(&newcomer).map(|member| member.ordinal);
        let mut required: Vec<Ordinal> = members.filter(|ordinal| *ordinal != me).collect();
        required.sort_unstable();
        required.dedup();
        required
    }

    /// The member whose acknowledgements count for a place: its disk, as this process or a later one.
    pub(super) fn counted(&self, ordinal: Ordinal) -> Option<Member> {
        self.newcomer().filter(|newcomer| newcomer.ordinal == ordinal).or_else(|| self.entry.in_sync(ordinal).copied())
    }

    fn is_alone(&self, me: Ordinal) -> bool {
        self.entry.isr.iter().all(|member| member.ordinal == me)
    }

    /// Who may lead any moment because this replica asks for it. Called off or not, that is for the map to say once it was asked, and
    /// what the successor does not hold by then is lost.
    fn successor(&self) -> Option<Ordinal> {
        match &self.pending {
            Some(Change::Promote { primary, .. }) => Some(primary.ordinal),
            _ => self.draining.map(|draining| draining.to),
        }
    }

    /// Whether the change that was asked for leaves this replica alone.
    fn asked_to_be_alone(&self, me: Ordinal) -> bool {
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

    /// A follower is there again, perhaps as another process: nothing is known of what it holds.
    pub(super) fn open_again(&mut self, member: &Member, out: &mut Vec<Action>) {
        let Some(lead) = &mut self.lead else { return };
        let Some(follower) = lead.followers.get_mut(&member.ordinal) else { return };
        *follower = Follower::default();
        let term = lead.entry.term;
        if self.kept == term {
            out.push(Action::Send(member.ordinal, self.opening(term)));
        }
    }

    pub(super) fn follower_opened(
        &mut self,
        from: Member,
        term: Term,
        end: Option<Lsn>,
        written: Lsn,
        out: &mut Vec<Action>,
    ) {
        let Some(lead) = self.lead.as_mut().filter(|lead| lead.entry.term == term) else { return };
        // No log of this term is longer than its primary's. The word of who says so counts nothing: later records would be
        // committed that it never had.
        let here = self.history.end();
        if written > here || end.is_some_and(|end| end > here) {
            return;
        }
        let counted = lead.counted(from.ordinal);
        let Some(follower) = lead.followers.get_mut(&from.ordinal) else { return };
        if counted.is_some_and(|known| known.store != from.store) && !self.planted.has(Defect::AckByOrdinal) {
            if !self.planted.has(Defect::KeepsReplaced) {
                lead.replaced.insert(from.ordinal);
            }
            return;
        }
        let is_over = |known: Member| known.store == from.store && known.incarnation > from.incarnation;
        let known = [counted, follower.member].into_iter().flatten();
        if known.into_iter().any(is_over) && !self.planted.has(Defect::AckOfOlderProcess) {
            return;
        }
        lead.replaced.remove(&from.ordinal);
        follower.member = Some(from);
        match end {
            Some(end) => {
                follower.acked = written;
                out.push(Action::Stream { to: from.ordinal, after: end });
            }
            None => out.push(Action::Copy(from.ordinal)),
        }
    }

    pub(super) fn acked(&mut self, from: &Member, term: Term, written: Lsn) {
        let Some(lead) = self.lead.as_mut().filter(|lead| lead.entry.term == term) else { return };
        if let Some(follower) = lead.followers.get_mut(&from.ordinal)
            && follower.member.as_ref() == Some(from)
            && written <= self.history.end()
        {
            follower.acked = follower.acked.max(written);
        }
    }

    /// Does what has become possible.
    pub(super) fn consider(&mut self, out: &mut Vec<Action>) {
        let Some(term) = self.leads() else { return };
        if self.kept < term {
            return;
        }
        self.open_new(out);
        self.activate(out);
        self.serve(out);
        self.advance(out);
        self.reconfigure(out);
    }

    /// Opens followers that the map named since.
    fn open_new(&mut self, out: &mut Vec<Action>) {
        let Some(lead) = &mut self.lead else { return };
        let named: Vec<Ordinal> = std::mem::take(&mut lead.unopened);
        let term = lead.entry.term;
        for ordinal in named {
            out.push(Action::Send(ordinal, self.opening(term)));
        }
    }

    fn activate(&mut self, out: &mut Vec<Action>) {
        let Some(lead) = &self.lead else { return };
        if lead.entry.activated || lead.pending.is_some() {
            return;
        }
        let on_disk = !lead.is_alone(self.me.ordinal) || self.planted.has(Defect::MarkSoloWithoutFsync);
        if on_disk || self.synced(out) {
            self.propose(Change::Activate, out);
        }
    }

    /// Whether the whole log is durable; asks for it otherwise.
    fn synced(&mut self, out: &mut Vec<Action>) -> bool {
        let Some(lead) = &mut self.lead else { return false };
        let synced = self.durable >= self.history.end();
        if !synced && !std::mem::replace(&mut lead.syncing, true) {
            out.push(Action::Sync);
        }
        lead.syncing &= !synced;
        synced
    }

    fn serve(&mut self, out: &mut Vec<Action>) {
        let granted = self.granted && !self.planted.has(Defect::ServeBeforeGrantOver);
        let Some(lead) = &mut self.lead else { return };
        let settled = lead.entry.is_settled() || self.planted.has(Defect::ServeBeforeActivated);
        if settled && !granted && !lead.serving {
            (lead.serving, lead.admitting) = (true, true);
            out.push(Action::Serve(lead.entry.term));
        }
    }

    /// Commits what every member of the maximal in-sync set holds at this term.
    fn advance(&mut self, out: &mut Vec<Action>) {
        let me = self.me.ordinal;
        let Some(lead) = self.lead.as_ref().filter(|lead| lead.serving) else { return };
        if lead.entry.isr.len() < self.rules.min_in_sync {
            return;
        }
        let required = if self.rules.primary_only {
            lead.successor().into_iter().collect()
        } else {
            lead.required(me, self.planted)
        };
        let alone = lead.is_alone(me)
            && (required.is_empty() || !self.planted.has(Defect::SoloFsyncOnlyWithoutLearner))
            && !self.planted.has(Defect::SoloAckWithoutFsync);
        let will_be_alone = lead.asked_to_be_alone(me) && !self.planted.has(Defect::ShrinkRaceAck);
        let mut commit = if (alone || will_be_alone) && !self.rules.primary_only {
            self.durable.min(self.written)
        } else {
            self.written
        };
        for ordinal in required {
            if self.planted.has(Defect::AckWithoutBackup) {
                break;
            }
            let follower = lead.followers.get(&ordinal).filter(|follower| follower.member.is_some());
            commit = commit.min(follower.map_or(Lsn(0), |follower| follower.acked));
        }
        if commit > self.commit {
            self.commit = commit;
            self.told = self.told.max(commit);
            out.push(Action::Commit(commit));
        }
    }

    /// Asks for one change of the in-sync set at a time.
    fn reconfigure(&mut self, out: &mut Vec<Action>) {
        let me = self.me;
        let Some(lead) = self.lead.as_ref().filter(|lead| lead.serving && lead.pending.is_none()) else { return };
        let is_gone = |place: &Ordinal| self.suspects.contains(place) || lead.replaced.contains(place);
        // Writes go on without who leaves, or it stays.
        let spares_one = lead.entry.isr.len() > self.rules.min_in_sync;
        let leaves = |place: &Ordinal| spares_one && self.leavers.contains(place);
        let others = || lead.entry.isr.iter().filter(|member| **member != me);
        let leaver = others().find(|member| is_gone(&member.ordinal));
        let leaver = leaver.or_else(|| others().find(|member| leaves(&member.ordinal)));
        if let Some(leaver) = leaver.map(|member| member.ordinal) {
            // Who will be alone has no other memory than its disk.
            let stays = lead.entry.isr.len() > 2 || self.planted.has(Defect::ShrinkWithoutFsync);
            if stays || self.synced(out) {
                self.propose(Change::Remove { primary: me, leaver }, out);
            }
            return;
        }
        if let Some(newcomer) = self.newcomer(lead) {
            self.propose(Change::Add { primary: me, newcomer }, out);
        } else if let Some(draining) = lead.draining {
            self.hand_over(draining, out);
        }
    }

    /// Who may enter: a learner that holds all that may have been acknowledged, or a member as the process that runs now. The one
    /// that the map names may have taken something with it, so that this one could not be promoted.
    fn newcomer(&self, lead: &Lead) -> Option<Member> {
        let held = self.commit.max(lead.tail);
        let renews = !self.rules.keeps_all && !self.planted.has(Defect::NeverRenews);
        let members = lead.entry.isr.iter().filter(|_| renews).map(|member| member.ordinal);
        let learns = |learner: &Ordinal| lead.draining.is_none() && lead.entry.in_sync(*learner).is_none();
        let learners = lead.entry.learners.iter().copied().filter(learns);
        members.chain(learners).find_map(|ordinal| {
            let follower = lead.followers.get(&ordinal)?;
            let caught_up = follower.acked >= held || self.planted.has(Defect::AddBeforeCaughtUp);
            let is_new = |member: &Member| lead.entry.in_sync(ordinal) != Some(member);
            let stays = !self.suspects.contains(&ordinal) && !self.leavers.contains(&ordinal);
            follower.member.filter(is_new).filter(|_| caught_up && stays)
        })
    }

    /// The successor holds what is committed, and will hold what this replica commits from here on: the map decides. Nobody waits for
    /// its answer: what comes meanwhile and is not committed when the successor takes over is asked of it again.
    fn hand_over(&mut self, draining: Draining, out: &mut Vec<Action>) {
        let Some(lead) = &self.lead else { return };
        let successor = lead.followers.get(&draining.to).filter(|follower| follower.acked >= self.commit);
        if self.commit >= draining.under_way
            && let Some(primary) = successor.and_then(|follower| follower.member)
        {
            let isr = lead.entry.isr.iter().map(|member| member.ordinal).collect();
            self.propose(Change::Promote { primary, isr }, out);
        }
    }

    fn propose(&mut self, change: Change, out: &mut Vec<Action>) {
        let Some(lead) = &mut self.lead else { return };
        lead.pending = Some(change.clone());
        out.push(Action::Propose(lead.entry.expected(), change));
    }

    /// Says again what may have been lost on the way.
    pub(super) fn remind(&mut self, out: &mut Vec<Action>) {
        let Some(lead) = &mut self.lead else { return };
        if self.planted.has(Defect::AddWithoutIncarnation)
            && let Some(Change::Add { newcomer, .. }) = &mut lead.pending
            && let Some(runs) = lead.followers.get(&newcomer.ordinal).and_then(|follower| follower.member)
        {
            *newcomer = runs;
        }
        if let Some(change) = &lead.pending {
            if self.planted.has(Defect::TimeoutIsFailure) && *change != Change::Activate {
                lead.pending = None;
                return;
            }
            out.push(Action::Propose(lead.entry.expected(), change.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::replica::{Action, Event, Found, History, Message, Replica, Rules};
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

    /// What a new disk holds.
    fn found() -> Found {
        Found {
            lossless_since: Incarnation(1),
            promised: Term(0),
            history: History::default(),
            commit: Lsn(0),
            granted: false,
        }
    }

    /// Appends a record, and has it written.
    fn write(replica: &mut Replica, lsn: u64) -> Vec<Action> {
        step(replica, Event::Appended(Lsn(lsn)));
        step(replica, Event::Written(Lsn(lsn), Term(1)))
    }

    /// A primary of these members that serves, and has opened its term to all of them.
    fn serving(members: &[Member], rules: Rules) -> Replica {
        let mut primary = Replica::new(members[0], rules, found());
        primary.learn(&Entry::first(members.to_vec()), &mut Vec::new());
        step(&mut primary, Event::Promised(Term(1)));
        for follower in &members[1..] {
            let opened = Message::Opened { term: Term(1), end: Some(Lsn(0)), written: Lsn(0) };
            step(&mut primary, Event::Heard(*follower, opened));
        }
        primary
    }

    const SYNC: Rules = Rules { keeps_all: true, min_in_sync: 1, primary_only: false };

    fn removes(actions: &[Action], place: u32) -> bool {
        let is_it = |change: &Change| matches!(change, Change::Remove { leaver, .. } if *leaver == Ordinal(place));
        actions.iter().any(|action| matches!(action, Action::Propose(_, change) if is_it(change)))
    }

    #[test]
    fn who_leaves_is_done_without_while_it_lives_and_is_not_taken_in_again() {
        let mut primary = serving(&[member(0), member(1)], SYNC);
        write(&mut primary, 1);
        let asked = step(&mut primary, Event::Leaving([Ordinal(1)].into()));
        assert!(asked.contains(&Action::Sync) && !removes(&asked, 1), "who will be alone has all on disk: {asked:?}");
        let asked = step(&mut primary, Event::Synced(Lsn(1), Term(1)));
        assert!(removes(&asked, 1), "{asked:?}");
        assert!(primary.admits() && primary.serves().is_some(), "meanwhile it goes on");
        let acked = step(&mut primary, Event::Heard(member(1), Message::Ack { term: Term(1), written: Lsn(1) }));
        assert!(acked.contains(&Action::Commit(Lsn(1))), "with both, until the map says otherwise: {acked:?}");

        let alone = Entry::first(vec![member(0), member(1)]);
        let alone = alone.changed(&Change::Remove { primary: member(0), leaver: Ordinal(1) }).unwrap();
        let learning = alone.changed(&Change::Learn(vec![Ordinal(1)])).unwrap();
        primary.learn(&learning, &mut Vec::new());
        step(&mut primary, Event::Promised(Term(2)));
        let whole = Message::Opened { term: Term(2), end: Some(Lsn(1)), written: Lsn(1) };
        let adds =
            |actions: &[Action]| actions.iter().any(|action| matches!(action, Action::Propose(_, Change::Add { .. })));
        assert!(!adds(&step(&mut primary, Event::Heard(member(1), whole))), "it leaves still");
        assert!(adds(&step(&mut primary, Event::Leaving([].into()))), "it stays after all");
    }

    #[test]
    fn who_leaves_stays_in_sync_where_nobody_could_write_without_it() {
        let strict = Rules { min_in_sync: 2, ..SYNC };
        let mut pair = serving(&[member(0), member(1)], strict);
        let asked = step(&mut pair, Event::Leaving([Ordinal(1)].into()));
        assert_eq!(asked, [], "one is too few");
        let mut three = serving(&[member(0), member(1), member(2)], strict);
        let asked = step(&mut three, Event::Leaving([Ordinal(1), Ordinal(2)].into()));
        assert!(removes(&asked, 1) && !removes(&asked, 2), "one after the other: {asked:?}");
        let left = three.seen().unwrap().changed(&Change::Remove { primary: member(0), leaver: Ordinal(1) }).unwrap();
        three.learn(&left, &mut Vec::new());
        let asked = step(&mut three, Event::Promised(Term(2)));
        assert!(!removes(&asked, 2), "two are as few as may be: {asked:?}");
    }

    #[test]
    fn who_hands_over_serves_until_it_reads_that_another_one_leads_and_commits_what_was_under_way_first() {
        let mut primary = serving(&[member(0), member(1)], SYNC);
        let acks = |lsn| Event::Heard(member(1), Message::Ack { term: Term(1), written: Lsn(lsn) });
        let promotes = |actions: &[Action]| {
            actions.iter().any(|action| matches!(action, Action::Propose(_, Change::Promote { .. })))
        };
        write(&mut primary, 1);
        assert!(!promotes(&step(&mut primary, Event::HandOver(Ordinal(1)))), "a record is under way");
        write(&mut primary, 2);
        let asked = step(&mut primary, acks(1));
        assert!(
            asked.contains(&Action::Commit(Lsn(1))) && promotes(&asked),
            "what came since waits for nobody: {asked:?}"
        );
        assert!(primary.admits() && primary.readable().is_some(), "nobody else leads yet");
        assert!(step(&mut primary, acks(2)).contains(&Action::Commit(Lsn(2))));

        let promote = Change::Promote { primary: member(1), isr: vec![Ordinal(0), Ordinal(1)] };
        let entry = primary.seen().unwrap().changed(&promote).unwrap();
        let mut stops = Vec::new();
        primary.learn(&entry, &mut stops);
        assert!(stops.contains(&Action::Stop) && !primary.admits());
    }

    #[test]
    fn who_takes_over_with_all_copies_serves_before_the_map_says_so_and_who_leaves_one_out_does_not() {
        let pair = Entry::first(vec![member(0), member(1)]);
        let promoted = |isr| pair.changed(&Change::Promote { primary: member(1), isr }).unwrap();
        let takes_over = |entry: &Entry| {
            let mut primary = Replica::new(member(1), SYNC, found());
            primary.learn(entry, &mut Vec::new());
            let actions = step(&mut primary, Event::Promised(entry.term));
            assert!(actions.iter().any(|action| matches!(action, Action::Propose(_, Change::Activate))), "{actions:?}");
            primary.serves() == Some(entry.term)
        };
        assert!(takes_over(&promoted(vec![Ordinal(0), Ordinal(1)])));
        assert!(!takes_over(&promoted(vec![Ordinal(1)])), "the one left out may be promoted until the map says so");
    }

    #[test]
    fn in_mode_async_a_hand_over_that_is_under_way_loses_nothing_even_when_it_was_called_off() {
        let rules = Rules { keeps_all: false, min_in_sync: 1, primary_only: true };
        let mut primary = serving(&[member(0), member(1)], rules);
        let heard = |message| Event::Heard(member(1), message);
        assert!(write(&mut primary, 1).contains(&Action::Commit(Lsn(1))), "nobody else is asked");
        step(&mut primary, heard(Message::Ack { term: Term(1), written: Lsn(1) }));

        let asked = step(&mut primary, Event::HandOver(Ordinal(1)));
        assert!(asked.iter().any(|action| matches!(action, Action::Propose(_, Change::Promote { .. }))), "{asked:?}");
        step(&mut primary, Event::HandOver(Ordinal(0)));
        assert!(primary.admits(), "it goes on");
        assert_eq!(
            write(&mut primary, 2),
            [],
            "the map may still say that the other one leads, which does not have it"
        );
        let acked = step(&mut primary, heard(Message::Ack { term: Term(1), written: Lsn(2) }));
        assert!(acked.contains(&Action::Commit(Lsn(2))), "{acked:?}");
    }

    #[test]
    fn in_mode_async_what_the_next_primary_has_lost_is_known_to_be_lost_and_in_the_others_nothing_ever_is() {
        let is_bereft = |rules: Rules, theirs: History| {
            let mut follower = serving(&[member(0), member(1)], rules);
            write(&mut follower, 1);
            write(&mut follower, 2);
            step(&mut follower, Event::Heard(member(1), Message::Ack { term: Term(1), written: Lsn(2) }));
            assert_eq!(follower.commit(), Lsn(2));
            let open = Message::Open { term: Term(10), history: theirs, commit: Lsn(1) };
            step(&mut follower, Event::Heard(member(1), open));
            assert!(!follower.takes_copy(Term(10), Lsn(2)), "it goes no further");
            follower.is_bereft(Term(10))
        };
        let asynchronous = Rules { keeps_all: false, min_in_sync: 1, primary_only: true };
        let from = |lsn| History::from_floor(Lsn(lsn), Term(9));
        assert!(is_bereft(asynchronous, from(1)), "it ends before");
        assert!(is_bereft(asynchronous, from(2)), "another record is in its place");
        assert!(!is_bereft(asynchronous, from(3)), "it may be there still");
        assert!(!is_bereft(SYNC, from(1)));
    }
}
