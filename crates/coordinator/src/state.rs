//! What a coordinator heard, as values. No clock: silence is counted in ticks, so that a process which was stalled does
//! not find everybody silent at once.

use crate::wire;
use engram_cluster::{Observed, PartitionMap};
use engram_memory::{Member, Ordinal};
use engram_proto::v1;
use std::collections::BTreeMap;

/// Ticks without a beat after which a worker counts as silent; a tick is a sixth of `SUSPECT_AFTER`.
const SILENT_TICKS: u32 = 6;

/// A worker that was heard since this coordinator started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heard {
    /// Who it is.
    pub member: Member,
    /// Where clients, peers and the metrics page find it.
    pub addresses: Addresses,
    /// Whether it beats.
    pub alive: bool,
    /// Memories it holds, as it said last.
    pub memories: u64,
    /// Whether it serves all it should.
    pub ready: bool,
    silent_ticks: u32,
}

/// Where a worker listens, each as `host:port`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Addresses {
    pub(crate) client: String,
    pub(crate) peer: String,
    pub(crate) http: String,
}

/// What came of a hello.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Greeting {
    Welcome,
    /// A newer process of the same store was heard.
    Superseded,
}

#[derive(Debug)]
pub(crate) struct State {
    map: Option<PartitionMap>,
    members: BTreeMap<Ordinal, Heard>,
    conditions: Vec<String>,
}

impl State {
    pub(crate) fn new(map: Option<PartitionMap>) -> Self {
        Self { map, members: BTreeMap::new(), conditions: Vec::new() }
    }

    pub(crate) fn map(&self) -> Option<&PartitionMap> {
        self.map.as_ref()
    }

    pub(crate) fn members(&self) -> impl Iterator<Item = &Heard> {
        self.members.values()
    }

    pub(crate) fn conditions(&self) -> &[String] {
        &self.conditions
    }

    pub(crate) fn greet(&mut self, member: Member, addresses: Addresses) -> Greeting {
        if let Some(known) = self.members.get(&member.ordinal)
            && known.member.store == member.store
            && known.member.incarnation > member.incarnation
        {
            return Greeting::Superseded;
        }
        let heard = Heard { member, addresses, alive: true, memories: 0, ready: false, silent_ticks: 0 };
        self.members.insert(member.ordinal, heard);
        Greeting::Welcome
    }

    /// Notes a beat; whether anything that others see changed.
    pub(crate) fn beat(&mut self, member: &Member, memories: u64, ready: bool) -> bool {
        match self.process_mut(member) {
            Some(heard) => {
                let changed = !heard.alive || heard.ready != ready;
                (heard.alive, heard.ready, heard.memories, heard.silent_ticks) = (true, ready, memories, 0);
                changed
            }
            None => false,
        }
    }

    /// Notes that this very process is gone, or its stream was cut; whether that changed anything.
    pub(crate) fn lost(&mut self, member: &Member) -> bool {
        self.process_mut(member).is_some_and(|heard| std::mem::replace(&mut heard.alive, false))
    }

    /// Notes a supervisor's word that the latest process of `ordinal` is dead, if that is the one it names.
    pub(crate) fn died(&mut self, ordinal: Ordinal, incarnation: u64) -> bool {
        let named = self.members.get(&ordinal).map(|heard| heard.member);
        named.is_some_and(|member| (incarnation == 0 || member.incarnation.0 == incarnation) && self.lost(&member))
    }

    /// One tick passed; whether somebody fell silent.
    pub(crate) fn tick(&mut self) -> bool {
        let mut changed = false;
        for heard in self.members.values_mut() {
            heard.silent_ticks = heard.silent_ticks.saturating_add(1);
            if heard.silent_ticks >= SILENT_TICKS {
                changed |= std::mem::replace(&mut heard.alive, false);
            }
        }
        changed
    }

    pub(crate) fn observed(&self, options: &crate::Options) -> Observed {
        Observed {
            cluster: options.cluster,
            partitions: options.partitions,
            workers: options.workers,
            // Local workers share one machine: each process is its own failure domain.
            members: self
                .members
                .values()
                .map(|heard| (heard.member, format!("worker-{}", heard.member.ordinal)))
                .collect(),
        }
    }

    pub(crate) fn set_map(&mut self, map: Option<PartitionMap>) {
        self.map = map;
    }

    pub(crate) fn set_conditions(&mut self, conditions: Vec<String>) {
        self.conditions = conditions;
    }

    /// What workers are told.
    pub(crate) fn view(&self) -> v1::BeatReply {
        v1::BeatReply {
            map: self.map.as_ref().map(wire::map_to_proto),
            members: self.members.values().map(wire::member_to_proto).collect(),
        }
    }

    fn process_mut(&mut self, member: &Member) -> Option<&mut Heard> {
        self.members.get_mut(&member.ordinal).filter(|heard| heard.member == *member)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::{Incarnation, StoreId};

    fn member(incarnation: u64) -> Member {
        Member { ordinal: Ordinal(1), store: StoreId(5), incarnation: Incarnation(incarnation) }
    }

    #[test]
    fn silence_is_counted_in_ticks_and_ends_with_a_beat() {
        let mut state = State::new(None);
        assert_eq!(state.greet(member(1), Addresses::default()), Greeting::Welcome);
        assert!((1..SILENT_TICKS).all(|_| !state.tick()));
        assert!(state.tick(), "the sixth tick without a beat makes it silent");
        assert!(!state.tick(), "and is told once");
        assert!(state.beat(&member(1), 10, true));
        assert!(!state.beat(&member(1), 11, true), "a beat like the last changes nothing that others see");
    }

    #[test]
    fn an_older_process_neither_replaces_nor_ends_the_newer_one() {
        let mut state = State::new(None);
        assert_eq!(state.greet(member(4), Addresses::default()), Greeting::Welcome);
        assert_eq!(state.greet(member(3), Addresses::default()), Greeting::Superseded);
        assert!(!state.beat(&member(3), 1, true));
        assert!(!state.lost(&member(3)), "the end of an older stream says nothing of the living process");
        assert!(!state.died(Ordinal(1), 3), "nor does a proof that names it");
        assert!(state.died(Ordinal(1), 4));
    }
}
