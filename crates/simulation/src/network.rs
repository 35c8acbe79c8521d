//! Between the nodes: streams that break, directions that are cut, messages that are late, lost, doubled or overtaken.
//!
//! A stream keeps its messages in order; what is lost or overtaken nevertheless is the network at its worst, and the streams
//! that suffered it are opened again a while later.

use crate::faults::Fault;
use crate::world::{Event, World};
use engram_memory::Member;
use engram_store::leases::LEASE_MS;
use engram_store::peer::{Envelope, Message};

/// Streams and cuts. The place behind the last node is the map's.
pub(crate) struct Network {
    places: usize,
    /// Directions that are cut.
    cut: Vec<bool>,
    /// Streams that are open, each in both directions.
    up: Vec<bool>,
    /// Streams that will be opened again.
    comes: Vec<bool>,
    /// When the last message of a direction arrives.
    last_us: Vec<u64>,
    /// When the receiver of a direction knows that the stream is open: nothing of it is heard before.
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
            comes: vec![false; all],
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

    pub(crate) fn mend_all(&mut self) {
        self.cut.fill(false);
    }

    /// Ends a stream.
    pub(crate) fn take_down(&mut self, a: usize, b: usize) {
        let pair = self.pair(a, b);
        self.up[pair] = false;
    }
}

impl World {
    /// The place of the map in the network.
    pub(crate) fn map_place(&self) -> usize {
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
        if self.draw.chance(self.weather.loss) {
            self.count(Fault::Loss);
            // Somebody will notice that an answer is missing.
            let wait_us = self.draw.within(50_000, 800_000);
            self.reconnect_later(node, to, wait_us);
            return;
        }
        let (index, link) = (self.network.index(node, to), self.network.opened[pair]);
        let mut arrives_us = (self.now_us + self.delay_us()).max(self.network.ready_us[index] + 1);
        if self.draw.chance(self.weather.reorder) {
            self.count(Fault::Reorder);
            let most_us = if self.draw.chance(200) { 2_500_000 } else { 300_000 };
            arrives_us += self.draw.within(1_000, most_us);
            let wait_us = self.draw.within(300_000, 900_000);
            self.reconnect_later(node, to, wait_us);
        } else {
            arrives_us = arrives_us.max(self.network.last_us[index] + 1);
            self.network.last_us[index] = arrives_us;
        }
        if self.draw.chance(self.weather.duplicate) {
            self.count(Fault::Duplicate);
            let again_us = arrives_us + self.draw.within(1, 200_000);
            let event = Event::Deliver { to, from, envelopes: envelopes.clone(), link };
            self.at(again_us - self.now_us, event);
        }
        self.at(arrives_us - self.now_us, Event::Deliver { to, from, envelopes, link });
    }

    /// How long a message takes.
    pub(crate) fn delay_us(&mut self) -> u64 {
        let most_us = if self.draw.chance(20) { self.weather.delay_us * 10 } else { self.weather.delay_us };
        self.draw.within(50, most_us)
    }

    pub(crate) fn deliver(&mut self, to: usize, from: Member, envelopes: Vec<Envelope>, link: u64) {
        let node = from.ordinal.0 as usize;
        let stale = self.network.opened[self.network.pair(node, to)] != link;
        // Most of what was under way when a stream broke is gone with it.
        if self.network.is_cut(node, to) || (stale && self.draw.chance(if self.is_calm { 1_000 } else { 700 })) {
            return;
        }
        self.trace.note(self.now_us, &[11, node as u64, to as u64], || {
            format!("{to} hears {from}: {}", describe(&envelopes))
        });
        self.with(to, |store| store.hear(from, envelopes));
    }

    /// Breaks a stream, and opens it again soon.
    pub(crate) fn break_link(&mut self, a: usize, b: usize) {
        self.network.take_down(a, b);
        let wait_us = self.draw.within(1_000, 100_000);
        self.reconnect_later(a, b, wait_us);
    }

    fn reconnect_later(&mut self, a: usize, b: usize, wait_us: u64) {
        let pair = self.network.pair(a, b);
        if !std::mem::replace(&mut self.network.comes[pair], true) {
            self.at(wait_us, Event::Reconnect(a, b));
        }
    }

    pub(crate) fn reconnect(&mut self, a: usize, b: usize) {
        let pair = self.network.pair(a, b);
        self.network.comes[pair] = false;
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

    /// A node asks all others for read leases.
    pub(crate) fn ask_leases(&mut self, node: usize) {
        let Some(holder) = self.nodes[node].process.as_ref().map(|process| process.member) else { return };
        let asked_ms = self.nodes[node].elapsed_ms();
        for to in (0..self.nodes.len()).filter(|to| *to != node) {
            if !self.network.is_cut(node, to) {
                let wait_us = self.delay_us();
                self.at(wait_us, Event::AskLease { to, holder, asked_ms });
            }
        }
    }

    pub(crate) fn grant_lease(&mut self, node: usize, holder: Member, asked_ms: u64) {
        let to = holder.ordinal.0 as usize;
        let Some(granter) = self.nodes[node].process.as_ref().map(|process| process.member) else { return };
        let mut except = Vec::new();
        self.with(node, |store| {
            except = store.grant_lease(holder);
            Ok(())
        });
        if !self.network.is_cut(node, to) {
            let (wait_us, until_ms) = (self.delay_us(), asked_ms + LEASE_MS);
            self.at(wait_us, Event::GrantLease { to, holder, granter, until_ms, except });
        }
    }

    /// Ends a cut.
    pub(crate) fn mend(&mut self, from: usize, to: usize) {
        self.network.set_cut(from, to, false);
        if from < self.nodes.len() && to < self.nodes.len() {
            self.break_link(from, to);
        }
    }
}

fn describe(envelopes: &[Envelope]) -> String {
    let one = |envelope: &Envelope| match &envelope.body {
        Message::Replica(message, _) => format!("p{} {message:?}", envelope.partition),
        Message::Copy(piece) => format!(
            "p{} Copy term {} lsn {} piece {}/{}",
            envelope.partition, piece.term, piece.lsn, piece.piece, piece.pieces
        ),
        other => format!("p{} {other:?}", envelope.partition),
    };
    envelopes.iter().map(one).collect::<Vec<_>>().join("; ")
}
