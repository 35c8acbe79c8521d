//! The network between nodes: streams that break, cut directions, and messages that are late, lost, duplicated or
//! reordered.
//!
//! A stream keeps its messages in order; losses and reordering model a worst-case network, and the affected streams are
//! reopened a while later.

use crate::faults::Fault;
use crate::world::{Event, World};
use engram_memory::Member;
use engram_store::leases::LEASE_MS;
use engram_store::peer::{Envelope, Message};

/// Streams and cuts. The index after the last node is the map's.
pub(crate) struct Network {
    places: usize,
    /// Cut directions.
    cut: Vec<bool>,
    /// Open streams, each in both directions.
    up: Vec<bool>,
    /// Streams that will be reopened.
    reopening: Vec<bool>,
    /// Arrival of the last message of a direction.
    last_us: Vec<u64>,
    /// When the receiver of a direction knows that the stream is open: nothing arrives before.
    ready_us: Vec<u64>,
    /// How often a stream was opened.
    opened: Vec<u64>,
}

impl Network {
    pub(crate) fn new(nodes: usize) -> Self {
        let places = nodes + 1;
        let all = places * places;
        Self {
            places,
            cut: vec![false; all],
            up: vec![false; all],
            reopening: vec![false; all],
            last_us: vec![0; all],
            ready_us: vec![0; all],
            opened: vec![0; all],
        }
    }

    const fn index(&self, from: usize, to: usize) -> usize {
        from * self.places + to
    }

    fn pair(&self, a: usize, b: usize) -> usize {
        self.index(a.min(b), a.max(b))
    }

    pub(crate) fn is_cut(&self, from: usize, to: usize) -> bool {
        self.cut[self.index(from, to)]
    }

    pub(crate) fn set_cut(&mut self, from: usize, to: usize, cut: bool) {
        let index = self.index(from, to);
        self.cut[index] = cut;
    }

    pub(crate) fn restore_all(&mut self) {
        self.cut.fill(false);
    }

    /// Ends a stream.
    pub(crate) fn take_down(&mut self, a: usize, b: usize) {
        let pair = self.pair(a, b);
        self.up[pair] = false;
    }
}

impl World {
    /// Index of the map in the network.
    pub(crate) fn map_index(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn send(&mut self, node: usize, from: Member, to: usize, envelopes: Vec<Envelope>) {
        let bytes: usize = envelopes.iter().map(Envelope::bytes).sum();
        self.trace.note(self.now_us, &[10, node as u64, to as u64, envelopes.len() as u64, bytes as u64], || {
            format!("{node} -> {to}: {}", describe(&envelopes))
        });
        let pair = self.network.pair(node, to);
        if to >= self.nodes.len() || !self.network.up[pair] || self.network.is_cut(node, to) {
            return;
        }
        if self.draw.chance(self.plan.loss) {
            self.count(Fault::Loss);
            // A missing response will be noticed.
            let wait_us = self.draw.within(50_000, 800_000);
            self.reconnect_later(node, to, wait_us);
            return;
        }
        let (index, link) = (self.network.index(node, to), self.network.opened[pair]);
        let mut arrives_us = (self.now_us + self.delay_us()).max(self.network.ready_us[index] + 1);
        if self.draw.chance(self.plan.reorder) {
            self.count(Fault::Reorder);
            let most_us = if self.draw.chance(200) { 2_500_000 } else { 300_000 };
            arrives_us += self.draw.within(1_000, most_us);
            let wait_us = self.draw.within(300_000, 900_000);
            self.reconnect_later(node, to, wait_us);
        } else {
            arrives_us = arrives_us.max(self.network.last_us[index] + 1);
            self.network.last_us[index] = arrives_us;
        }
        if self.draw.chance(self.plan.duplicate) {
            self.count(Fault::Duplicate);
            let again_us = arrives_us + self.draw.within(1, 200_000);
            let event = Event::Deliver { to, from, envelopes: envelopes.clone(), link };
            self.at(again_us - self.now_us, event);
        }
        self.at(arrives_us - self.now_us, Event::Deliver { to, from, envelopes, link });
    }

    /// Delay of a message.
    pub(crate) fn delay_us(&mut self) -> u64 {
        let most_us = if self.draw.chance(20) { self.plan.delay_us * 10 } else { self.plan.delay_us };
        self.draw.within(50, most_us)
    }

    pub(crate) fn deliver(&mut self, to: usize, from: Member, envelopes: Vec<Envelope>, link: u64) {
        let node = from.ordinal.0 as usize;
        let stale = self.network.opened[self.network.pair(node, to)] != link;
        // Most messages in flight on a broken stream are lost with it.
        if self.network.is_cut(node, to) || (stale && self.draw.chance(if self.is_calm { 1_000 } else { 700 })) {
            return;
        }
        self.trace.note(self.now_us, &[11, node as u64, to as u64], || {
            format!("{to} receives {from}: {}", describe(&envelopes))
        });
        self.with(to, |store| store.receive(from, envelopes));
    }

    /// Breaks a stream, and reopens it soon.
    pub(crate) fn break_link(&mut self, a: usize, b: usize) {
        self.network.take_down(a, b);
        let wait_us = self.draw.within(1_000, 100_000);
        self.reconnect_later(a, b, wait_us);
    }

    fn reconnect_later(&mut self, a: usize, b: usize, wait_us: u64) {
        let pair = self.network.pair(a, b);
        if !std::mem::replace(&mut self.network.reopening[pair], true) {
            self.at(wait_us, Event::Reconnect(a, b));
        }
    }

    pub(crate) fn reconnect(&mut self, a: usize, b: usize) {
        let pair = self.network.pair(a, b);
        self.network.reopening[pair] = false;
        let lives = |node: usize| self.nodes[node].process.as_ref().map(|process| process.member);
        let (Some(first), Some(second)) = (lives(a), lives(b)) else { return };
        if self.network.is_cut(a, b) || self.network.is_cut(b, a) {
            self.network.take_down(a, b);
            self.reconnect_later(a, b, 100_000);
            return;
        }
        self.network.up[pair] = true;
        self.network.opened[pair] += 1;
        let (one_us, other_us) = (self.draw.below(2_000), self.draw.below(2_000));
        let (to_first, to_second) = (self.network.index(b, a), self.network.index(a, b));
        self.network.ready_us[to_first] = self.now_us + one_us;
        self.network.ready_us[to_second] = self.now_us + other_us;
        self.at(one_us, Event::Connected { node: a, process: first, peer: second });
        self.at(other_us, Event::Connected { node: b, process: second, peer: first });
    }

    /// A node requests read leases from all others.
    pub(crate) fn request_leases(&mut self, node: usize) {
        let Some(holder) = self.nodes[node].process.as_ref().map(|process| process.member) else { return };
        let requested_ms = self.nodes[node].elapsed_ms();
        for to in (0..self.nodes.len()).filter(|to| *to != node) {
            if !self.network.is_cut(node, to) {
                let wait_us = self.delay_us();
                self.at(wait_us, Event::RequestLease { to, holder, requested_ms });
            }
        }
    }

    pub(crate) fn grant_lease(&mut self, node: usize, holder: Member, requested_ms: u64) {
        let to = holder.ordinal.0 as usize;
        let Some(granter) = self.nodes[node].process.as_ref().map(|process| process.member) else { return };
        let mut except = Vec::new();
        self.with(node, |store| {
            except = store.grant_lease(holder);
            Ok(())
        });
        if !self.network.is_cut(node, to) {
            let (wait_us, until_ms) = (self.delay_us(), requested_ms + LEASE_MS);
            self.at(wait_us, Event::GrantLease { to, holder, granter, until_ms, except });
        }
    }

    /// Ends a cut.
    pub(crate) fn restore_link(&mut self, from: usize, to: usize) {
        self.network.set_cut(from, to, false);
        if from < self.nodes.len() && to < self.nodes.len() {
            self.break_link(from, to);
        }
    }
}

fn describe(envelopes: &[Envelope]) -> String {
    let one = |envelope: &Envelope| match &envelope.body {
        Message::Replica(message, _) => format!("p{} {message:?}", envelope.partition),
        Message::State(piece) => format!(
            "p{} Copy term {} lsn {} piece {}/{}",
            envelope.partition, piece.term, piece.lsn, piece.index, piece.count
        ),
        other => format!("p{} {other:?}", envelope.partition),
    };
    envelopes.iter().map(one).collect::<Vec<_>>().join("; ")
}
