//! A process around a replica: executes its actions in order, and reports what the log has done.

use crate::bounds::Bounds;
use crate::state::{Body, Envelope, Harm, Record, World, end_of, up_to};
use engram_cluster::Entry;
use engram_cluster::Replica;
use engram_cluster::replica::{Action, Event, History, Message, RecoveredReplica};
use engram_memory::{Lsn, Ordinal, Term};
use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Once};

thread_local! {
    /// A panic of the core is a violation and is printed with its steps.
    static IN_CORE: Cell<bool> = const { Cell::new(false) };
}

/// Prints panics outside the core.
pub(crate) fn quiet_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IN_CORE.get() {
                usual(info);
            }
        }));
    });
}

/// Input of a replica.
pub(crate) enum Input {
    Event(Event),
    Entry(Arc<Entry>),
}

/// Records of the received message: the lsn before the first one, and the records.
type Received<'a> = Option<(Lsn, &'a [Record])>;

impl Bounds {
    /// Starts a process with the contents of its disk.
    pub(crate) fn start_process(&self, world: &mut World, ordinal: Ordinal) {
        let node = world.node(ordinal);
        node.kept = node.promise;
        node.disk.clone_from(&node.log);
        let below = node.floor.0.checked_sub(1).map_or(Term(0), |index| node.log[index as usize].0);
        let mut history = History::from_floor(node.floor, below);
        for (index, record) in node.log.iter().enumerate().skip(node.floor.0 as usize) {
            history.append(Lsn(index as u64 + 1), record.0);
        }
        let found = RecoveredReplica {
            lossless_since: node.lossless_since,
            promised: node.promise,
            history,
            commit: node.floor,
            granted: !node.granted.is_empty(),
        };
        let replica = Replica::new(node.me, self.rules(), found);
        #[cfg(feature = "defects")]
        let replica = replica.with_bug(self.bug);
        node.replica = Some(replica);
    }

    /// Passes an event to a replica, and the events that follow from it on its own machine.
    pub(crate) fn feed(&self, world: &mut World, ordinal: Ordinal, first: Input, received: Received<'_>) {
        let mut inputs = VecDeque::from([first]);
        while let Some(input) = inputs.pop_front() {
            let Some(replica) = &mut world.node(ordinal).replica else { return };
            let mut out = Vec::new();
            IN_CORE.set(true);
            let done = catch_unwind(AssertUnwindSafe(|| match input {
                Input::Event(event) => replica.step(event, &mut out),
                Input::Entry(entry) => replica.apply_entry(&entry, &mut out),
            }));
            IN_CORE.set(false);
            if done.is_err() {
                world.harm = Some(Harm::Panicked);
                return;
            }
            for action in out {
                self.act(world, ordinal, action, received, &mut inputs);
            }
        }
        settle(world, ordinal);
    }

    fn act(
        &self,
        world: &mut World,
        me: Ordinal,
        action: Action,
        received: Received<'_>,
        inputs: &mut VecDeque<Input>,
    ) {
        let node = world.node(me);
        match action {
            Action::Promise(term) => {
                node.promise = term;
                settle(world, me);
                if !self.lazy {
                    world.node(me).kept = term;
                    inputs.push_back(Input::Event(Event::Promised(term)));
                }
            }
            Action::Truncate { after, .. } => {
                node.log.truncate(after.0 as usize);
                if !world.at(me).log.starts_with(up_to(&world.committed, committed_here(world, me))) {
                    world.harm = Some(Harm::Truncated);
                }
                self.logged(world, me, inputs);
            }
            Action::Log { after } => {
                let (before, records) = received.expect("records are logged when they are received");
                match records.get((after.0 - before.0) as usize..) {
                    Some(new) => node.log.extend_from_slice(new),
                    None => world.harm = Some(Harm::Diverged),
                }
                self.logged(world, me, inputs);
            }
            Action::Send(_, Message::Rejected { .. }) | Action::Serve(_) | Action::Sync => {}
            Action::Send(to, message) => send(world, me, to, Body::Replica(message, Vec::new())),
            Action::Stream { to, after } => {
                if after < node.floor {
                    send_snapshot(world, me, to);
                } else {
                    node.streams.insert(to);
                    append(world, me, to, after);
                }
            }
            Action::SendSnapshot(to) => send_snapshot(world, me, to),
            Action::Commit(lsn) => commit(world, me, lsn),
            Action::Stop => node.streams.clear(),
            Action::Propose(expected, change) => {
                world.proposals.insert((expected, change));
            }
        }
    }

    /// Handles new records in the log, which reports them unless it is lazy.
    pub(crate) fn logged(&self, world: &mut World, me: Ordinal, inputs: &mut VecDeque<Input>) {
        let node = world.node(me);
        if self.lazy {
            return;
        }
        if self.sync {
            node.disk.clone_from(&node.log);
        }
        if let Some((term, _)) = node.log.last() {
            let (end, term) = (end_of(&node.log), *term);
            inputs.push_back(Input::Event(Event::Written(end, term)));
            if self.sync {
                inputs.push_back(Input::Event(Event::Synced(end, term)));
            }
        }
    }
}

fn committed_here(world: &World, me: Ordinal) -> Lsn {
    world.at(me).replica.as_ref().map_or(Lsn(0), Replica::commit)
}

fn commit(world: &mut World, me: Ordinal, lsn: Lsn) {
    let node = &world.nodes[me.0 as usize];
    let known = &mut world.committed;
    let here = up_to(&node.log, lsn);
    if here.len() < lsn.0 as usize || !here.starts_with(&known[..known.len().min(here.len())]) {
        world.harm = Some(Harm::Diverged);
        return;
    }
    if here.len() > known.len() {
        *known = here.to_vec();
    }
    let end = end_of(&node.log);
    for to in node.streams.clone() {
        append(world, me, to, end);
    }
}

pub(crate) fn send(world: &mut World, me: Ordinal, to: Ordinal, body: Body) {
    let from = world.at(me).me;
    world.net.insert(Arc::new(Envelope { from, to, body }));
}

/// Sends the records above an lsn, and the commit position.
pub(crate) fn append(world: &mut World, me: Ordinal, to: Ordinal, after: Lsn) {
    let node = world.at(me);
    let Some(replica) = &node.replica else { return };
    let Some(term) = replica.primary_term() else { return };
    let Some(records) = node.log.get(after.0 as usize..).map(<[Record]>::to_vec) else {
        // A follower cannot have more than its primary.
        world.harm = Some(Harm::Diverged);
        return;
    };
    let message = Message::Append { term, after, runs: replica.history().above(after), commit: replica.commit() };
    send(world, me, to, Body::Replica(message, records));
}

fn send_snapshot(world: &mut World, me: Ordinal, to: Ordinal) {
    let node = world.at(me);
    if let (Some(replica), Some(term)) = (&node.replica, node.leads()) {
        let records = up_to(&node.log, replica.commit()).to_vec();
        send(world, me, to, Body::Snapshot(term, records));
    }
}

/// Ends what belongs to a previous term.
fn settle(world: &mut World, me: Ordinal) {
    let node = world.node(me);
    let leads = node.leads();
    let followers: BTreeSet<Ordinal> = node.replica.iter().flat_map(Replica::followers).map(|known| known.0).collect();
    if node.streaming != leads {
        node.streaming = leads;
        node.streams.clear();
    }
    node.streams.retain(|to| followers.contains(to));
}
