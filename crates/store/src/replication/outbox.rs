//! Messages and proposals that wait for the end of the turn.

use super::peer::{Envelope, NoPeers, Peers, Proposal};
use engram_memory::Ordinal;
use std::collections::BTreeMap;

/// What is sent at the end of the turn, through the interface to the peers.
pub(super) struct Outbox {
    peers: Box<dyn Peers>,
    messages: BTreeMap<Ordinal, Vec<Envelope>>,
    proposals: Vec<Proposal>,
}

impl Default for Outbox {
    fn default() -> Self {
        Self { peers: Box::new(NoPeers), messages: BTreeMap::new(), proposals: Vec::new() }
    }
}

impl Outbox {
    pub(super) fn set_peers(&mut self, peers: Box<dyn Peers>) {
        self.peers = peers;
    }

    pub(super) fn push(&mut self, to: Ordinal, envelope: Envelope) {
        self.messages.entry(to).or_default().push(envelope);
    }

    pub(super) fn propose(&mut self, proposal: Proposal) {
        self.proposals.push(proposal);
    }

    /// Drops the messages to a worker.
    pub(super) fn reset_peer(&mut self, to: Ordinal) {
        self.messages.remove(&to);
    }

    /// Sends messages and proposals.
    pub(super) fn send_all(&mut self) {
        for (to, envelopes) in std::mem::take(&mut self.messages) {
            self.peers.send(to, envelopes);
        }
        let proposals = std::mem::take(&mut self.proposals);
        if !proposals.is_empty() {
            self.peers.propose(proposals);
        }
    }
}
