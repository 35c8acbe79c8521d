//! What a coordinator has heard, as values. Time comes in as milliseconds of the detector's clock.

mod bootstrap;
mod wanted;

pub use bootstrap::Bootstrapping;
pub(crate) use wanted::{Proposal, Proposals, Wanted};

use crate::last_resort::Told;
use crate::relief::Surroundings;
use crate::{Options, wire};
use engram_cluster::detector::{Action, Event, Standing, Timing};
use engram_cluster::{Detector, HandOver, PartitionMap};
use engram_identity::RootId;
use engram_mapstore::{Goal, Order};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId, StoreId};
use engram_proto::v1;
use std::collections::{BTreeMap, BTreeSet};

/// Reads one after the other that find less than was known before an older map is believed to be in the newest one's place: a
/// single read may be stale.
const LESS_FOUND: u32 = 2;

/// A worker that was heard since this coordinator started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Heard {
    /// Who it is.
    pub(crate) member: Member,
    /// Where clients, peers and the metrics page find it.
    pub(crate) addresses: Addresses,
    /// Whether it is thought to live.
    pub(crate) alive: bool,
    /// Whether it is dead by proof.
    pub(crate) dead: bool,
    /// Whether it serves all it should.
    pub(crate) ready: bool,
    /// Since when it is about to be stopped.
    leaving_since_ms: Option<u64>,
    heard_since_ms: u64,
    memories: u64,
    lossless_since: Incarnation,
    /// 0 = unknown.
    process_id: u32,
    suspects: BTreeSet<Ordinal>,
    /// Why it does without a GPU that it would use.
    pub(crate) gpu_trouble: Option<GpuTrouble>,
    /// Partitions that are its to lead, and that it cannot lead.
    pub(crate) unled: BTreeSet<PartitionId>,
    /// How its disk stands, of a cluster that begins from a snapshot.
    pub(crate) bootstrap: Option<v1::Bootstrap>,
    /// Whom it believes, and who signed for it.
    pub(crate) certified: Option<Certified>,
}

/// Whom a worker believes, and who signed for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certified {
    /// In the order in which they were published.
    pub believed: Vec<RootId>,
    /// The root that its certificate leads to.
    pub root: RootId,
}

/// Why a worker does without a GPU that it would use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuTrouble {
    /// It used one, and has given it up until it starts again; otherwise it found none when it started.
    pub given_up: bool,
    /// In words.
    pub why: String,
}

impl Heard {
    /// Whether it is about to be stopped.
    pub(crate) const fn is_leaving(&self) -> bool {
        self.leaving_since_ms.is_some()
    }
}

/// Where a worker listens, each as `host:port`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) client: String,
    pub(crate) peer: String,
    pub(crate) http: String,
}

/// What a worker says when it opens a stream.
#[derive(Debug, Clone)]
pub(crate) struct Introduction {
    pub(crate) member: Member,
    pub(crate) lossless_since: Incarnation,
    pub(crate) process_id: u32,
    pub(crate) addresses: Addresses,
    /// Version of the newest map that its disk has seen; 0 = none.
    pub(crate) seen_version: u64,
}

/// What a beat says.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pulse {
    pub(crate) memories: u64,
    pub(crate) ready: bool,
    pub(crate) leaving: bool,
    pub(crate) suspects: BTreeSet<Ordinal>,
    pub(crate) queued: bool,
    pub(crate) turns: u64,
    /// Version of the newest map that it has read; 0 = none.
    pub(crate) map_version: u64,
    pub(crate) gpu_trouble: Option<GpuTrouble>,
    pub(crate) unled: BTreeSet<PartitionId>,
    pub(crate) bootstrap: Option<v1::Bootstrap>,
    pub(crate) certified: Option<Certified>,
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
    goal: Goal,
    detector: Detector,
    members: BTreeMap<Ordinal, Heard>,
    proposals: Proposals,
    pub(crate) hand_overs: Vec<HandOver>,
    conditions: Vec<String>,
    failed_over_ms: Option<u64>,
    /// Why there is no map to go on with, though there was one.
    lost: Option<String>,
    /// Newest version that any worker's disk has seen.
    seen_version: u64,
    /// Newest version that beats told of.
    told_version: u64,
    /// Another coordinator, or a worker, has written the map since it was read here.
    is_overtaken: bool,
    /// It ends: it takes no more proposals, and decides nothing.
    is_closing: bool,
    /// Reads of the map that found an older one than is known, one after the other.
    less_found: u32,
    orders: Vec<Order>,
    /// Somebody else has written the map since the orders were read.
    reads_orders: bool,
    pub(crate) told: Told,
    pub(crate) surroundings: Surroundings,
}

impl State {
    pub(crate) fn new(map: Option<PartitionMap>, goal: Goal, now_ms: u64) -> Self {
        Self {
            map,
            goal,
            detector: Detector::new(Timing::default(), now_ms),
            members: BTreeMap::new(),
            proposals: Proposals::new(),
            hand_overs: Vec::new(),
            conditions: Vec::new(),
            failed_over_ms: None,
            lost: None,
            seen_version: 0,
            told_version: 0,
            is_overtaken: false,
            is_closing: false,
            less_found: 0,
            orders: Vec::new(),
            reads_orders: false,
            told: Told::default(),
            surroundings: Surroundings::default(),
        }
    }

    pub(crate) const fn map(&self) -> Option<&PartitionMap> {
        self.map.as_ref()
    }

    pub(crate) const fn goal(&self) -> &Goal {
        &self.goal
    }

    pub(crate) fn set_goal(&mut self, goal: Goal) {
        self.goal = goal;
    }

    /// Why there is no map to go on with, though there was one.
    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// What people ordered against the rules of the map.
    pub(crate) fn orders(&self) -> &[Order] {
        &self.orders
    }

    pub(crate) fn set_orders(&mut self, orders: Vec<Order>) {
        (self.orders, self.reads_orders) = (orders, false);
    }

    /// Whether a person may have written the map, and an order with it, since the orders were read.
    pub(crate) const fn reads_orders(&self) -> bool {
        self.reads_orders
    }

    /// Takes the map for lost: nothing is written until it is found again, or made anew.
    pub(crate) fn lose(&mut self, why: String) {
        if self.lost.as_ref() != Some(&why) {
            tracing::error!(why, "the partition map is lost");
            self.lost = Some(why);
        }
    }

    /// From now on it finishes what was asked of it, and begins nothing.
    pub(crate) fn close(&mut self) {
        self.is_closing = true;
    }

    pub(crate) const fn is_closing(&self) -> bool {
        self.is_closing
    }

    pub(crate) fn has_proposals(&self) -> bool {
        !self.proposals.is_empty()
    }

    /// Whether a worker has seen a newer map than is known here.
    pub(crate) fn is_behind(&self) -> bool {
        let older = |map: &PartitionMap| self.is_overtaken || map.version < self.seen_version;
        self.lost.is_none() && self.map.as_ref().is_some_and(older)
    }

    /// Takes a map that a person ordered.
    pub(crate) fn overruled(&mut self, map: PartitionMap, orders: Vec<Order>, now_ms: u64) {
        self.lost = None;
        self.orders = orders;
        self.set_map(Some(map), now_ms);
    }

    /// Takes what was found where the map is kept. It is never taken for one that is not there yet, nor an older one for the newest.
    pub(crate) fn found(&mut self, map: Option<PartitionMap>, now_ms: u64) {
        self.is_overtaken = false;
        let known = self.map.as_ref().map_or(0, |map| map.version).max(self.seen_version);
        let found = map.as_ref().map_or(0, |map| map.version);
        if found >= known {
            (self.lost, self.less_found) = (None, 0);
            if map != self.map {
                self.reads_orders = true;
                self.set_map(map, now_ms);
            }
            return;
        }
        self.less_found += 1;
        match map {
            None => self.lose(gone(known)),
            Some(_) if self.less_found >= LESS_FOUND => {
                self.lose(format!(
                    "the partition map has version {found}, and version {known} was seen: an older one is in its place"
                ));
            }
            Some(_) => {}
        }
    }

    pub(crate) fn members(&self) -> impl Iterator<Item = &Heard> {
        self.members.values()
    }

    pub(crate) fn conditions(&self) -> &[String] {
        &self.conditions
    }

    /// Takes a hello.
    pub(crate) fn greet(&mut self, hello: Introduction, now_ms: u64) -> Greeting {
        let Introduction { member, lossless_since, process_id, addresses, seen_version } = hello;
        self.seen_version = self.seen_version.max(seen_version);
        let known = self.members.get(&member.ordinal);
        if known
            .is_some_and(|known| known.member.store == member.store && known.member.incarnation > member.incarnation)
        {
            return Greeting::Superseded;
        }
        let again = known.filter(|known| known.member == member);
        let (memories, ready, leaving_since_ms, heard_since_ms) = again.map_or((0, false, None, now_ms), |known| {
            (known.memories, known.ready, known.leaving_since_ms, known.heard_since_ms)
        });
        let (suspects, gpu_trouble) = (BTreeSet::new(), None);
        let (alive, dead) = (true, false);
        let heard = Heard {
            member,
            addresses,
            alive,
            dead,
            ready,
            leaving_since_ms,
            heard_since_ms,
            memories,
            lossless_since,
            process_id,
            suspects,
            gpu_trouble,
            unled: BTreeSet::new(),
            bootstrap: None,
            certified: None,
        };
        self.members.insert(member.ordinal, heard);
        let domain = self.domain(member.ordinal);
        self.step(Event::Met { member, domain }, now_ms);
        Greeting::Welcome
    }

    /// Takes a beat; whether anything that others see changed.
    pub(crate) fn beat(&mut self, member: &Member, pulse: Pulse, now_ms: u64) -> bool {
        let Some(heard) = self.process_mut(member) else { return false };
        let changed =
            (heard.ready, heard.is_leaving()) != (pulse.ready, pulse.leaving) || heard.bootstrap != pulse.bootstrap;
        heard.bootstrap = pulse.bootstrap;
        heard.ready = pulse.ready;
        heard.leaving_since_ms = pulse.leaving.then(|| heard.leaving_since_ms.unwrap_or(now_ms));
        (heard.memories, heard.suspects, heard.gpu_trouble) = (pulse.memories, pulse.suspects, pulse.gpu_trouble);
        heard.unled = pulse.unled;
        heard.certified = pulse.certified;
        let overtakes = self.is_overtaken_by(pulse.map_version);
        self.step(Event::Beat { member: *member, turns: pulse.turns, queued: pulse.queued }, now_ms)
            || changed
            || overtakes
    }

    /// Whether a worker knows a newer map than anybody has told of before.
    fn is_overtaken_by(&mut self, version: u64) -> bool {
        let known = self.map.as_ref().map_or(0, |map| map.version).max(self.told_version);
        let overtakes = version > known;
        if overtakes {
            (self.told_version, self.is_overtaken) = (version, true);
        }
        overtakes
    }

    /// The stream of this very process ended; whether that changed anything.
    pub(crate) fn closed(&mut self, member: &Member, now_ms: u64) -> bool {
        self.step(Event::Closed(*member), now_ms)
    }

    /// Takes a supervisor's word that a process of `ordinal` is dead: the one of that incarnation on that disk that was heard with that
    /// process id, as far as any of it is known. Whether that changed anything.
    pub(crate) fn died(
        &mut self,
        ordinal: Ordinal,
        store: Option<StoreId>,
        incarnation: u64,
        process_id: u32,
        now_ms: u64,
    ) -> bool {
        // The next process may have said hello before the word of the last one's death arrived, and on an empty disk it has the
        // same incarnation.
        let another = self.members.get(&ordinal).is_some_and(|heard| {
            let ids = [heard.process_id, process_id];
            store.is_some_and(|store| store != heard.member.store) || (!ids.contains(&0) && ids[0] != ids[1])
        });
        let named = (incarnation != 0).then_some(Incarnation(incarnation));
        !another && self.step(Event::Died(ordinal, named), now_ms)
    }

    /// Takes the word of somebody who knows that this very process has ended. Of one that was never heard it says nothing: what ended may
    /// have ended long ago. Whether that changed anything.
    pub(crate) fn ended(&mut self, member: &Member, now_ms: u64) -> bool {
        self.process_mut(member).is_some() && self.step(Event::Died(member.ordinal, Some(member.incarnation)), now_ms)
    }

    /// The timer fired; whether anybody's standing changed.
    pub(crate) fn tick(&mut self, options: &Options, now_ms: u64) -> bool {
        let changed = self.step(Event::Tick, now_ms);
        let workers = self.members.len();
        self.forget_the_emptied(options);
        changed || self.members.len() != workers
    }

    /// Forgets workers that were emptied and then stopped: nobody waits for them.
    fn forget_the_emptied(&mut self, options: &Options) {
        if self.members.values().all(|heard| heard.alive) {
            return;
        }
        let entries = self.map.iter().flat_map(|map| &map.partitions);
        let holders: BTreeSet<_> = entries.flat_map(|entry| entry.candidates()).map(|member| member.ordinal).collect();
        let draining = self.draining(options);
        let detector = &mut self.detector;
        self.members.retain(|ordinal, heard| {
            let wanted = !draining.contains(ordinal);
            let stays = heard.alive || holders.contains(ordinal) || wanted;
            if !stays {
                tracing::info!(member = %heard.member, "an empty worker is gone");
                detector.forget(*ordinal);
            }
            stays
        });
    }

    fn step(&mut self, event: Event, now_ms: u64) -> bool {
        let actions = self.detector.step(event, now_ms);
        for action in &actions {
            match action {
                Action::Suspect(member, cause) => tracing::warn!(%member, ?cause, "worker suspected"),
                Action::Trust(member) => tracing::info!(%member, "worker trusted again"),
                Action::Dead(member) => tracing::warn!(%member, "worker is dead, by proof"),
            }
        }
        let mut changed = !actions.is_empty();
        for (ordinal, heard) in &mut self.members {
            let standing = self.detector.standing(*ordinal);
            let alive = standing.is_some_and(Standing::is_alive);
            heard.dead = matches!(standing, Some(Standing::Dead { .. }));
            changed |= std::mem::replace(&mut heard.alive, alive) != alive;
        }
        changed
    }

    /// Takes the map that the store has now.
    pub(crate) fn set_map(&mut self, map: Option<PartitionMap>, now_ms: u64) {
        if let (Some(old), Some(new)) = (&self.map, &map) {
            // A hand-over keeps both in sync.
            let failed: BTreeSet<_> = (old.partitions.iter().zip(&new.partitions))
                .filter(|(old, new)| old.primary != new.primary && new.in_sync(old.primary).is_none())
                .map(|(old, _)| old.primary)
                .collect();
            for ordinal in failed {
                self.step(Event::FailedOver(ordinal), now_ms);
                self.failed_over_ms = Some(now_ms);
            }
        }
        self.map = map;
    }

    /// What workers are told.
    pub(crate) fn view(&self) -> v1::BeatReply {
        let order = |order: &HandOver| v1::HandOver { partition: order.partition.0, to: order.to.0 };
        v1::BeatReply {
            map: self.map.as_ref().map(wire::map_to_proto),
            members: self.members.values().map(wire::member_to_proto).collect(),
            hand_overs: self.hand_overs.iter().map(order).collect(),
            testify: self.told.asked(),
        }
    }

    fn process_mut(&mut self, member: &Member) -> Option<&mut Heard> {
        self.members.get_mut(&member.ordinal).filter(|heard| heard.member == *member)
    }
}

fn gone(version: u64) -> String {
    format!("the partition map is gone, and workers have seen version {version} of it")
}

#[cfg(test)]
mod tests;
