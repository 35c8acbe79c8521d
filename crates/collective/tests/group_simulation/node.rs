//! A simulated member: its state machine, its training state, and what it receives.

use std::collections::{BTreeMap, BTreeSet};

use engram_collective::group::{Member, MemberId, Position};

use crate::buffers::StepBuffers;
use crate::check::Entry;
use crate::random::mix;
use crate::world::Item;

#[derive(Debug)]
pub(crate) struct Reduction {
    pub(crate) generation: u64,
    pub(crate) step: u64,
    pub(crate) members: Vec<MemberId>,
    pub(crate) since_ms: u64,
    pub(crate) done: bool,
}

pub(crate) struct Node {
    pub(crate) member: Member,
    pub(crate) history: Vec<Entry>,
    pub(crate) buffers: StepBuffers,
    pub(crate) alive: bool,
    /// Its host lives: a probe of the dead process is refused.
    pub(crate) refuses: bool,
    pub(crate) stopped: bool,
    /// What arrived while the process was stopped.
    pub(crate) waiting: Vec<Item>,
    pub(crate) computation: u64,
    pub(crate) computing: u64,
    /// A transfer of the state is in progress.
    pub(crate) fetches: bool,
    pub(crate) reduction: Option<Reduction>,
    pub(crate) reduced_steps: BTreeSet<u64>,
    pub(crate) inbox: BTreeMap<(u64, u64, usize), Vec<f32>>,
}

impl Node {
    pub(crate) fn digest(&self) -> u64 {
        self.history.last().map_or(0, |it| it.digest)
    }

    pub(crate) fn push(&mut self, gradient: Option<Vec<f32>>) {
        let fold = |digest: u64, values: &Vec<f32>| values.iter().fold(digest, |d, v| mix(d ^ u64::from(v.to_bits())));
        let digest = gradient.as_ref().map_or(self.digest(), |it| fold(self.digest().wrapping_add(1), it));
        self.history.push(Entry { gradient, digest });
    }

    pub(crate) fn position(&self) -> Position {
        Position { step: self.history.len() as u64, digest: self.digest() }
    }
}
