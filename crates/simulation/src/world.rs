//! The loop: what is due happens, and what follows from it is put in its place.

use crate::checks::Checks;
use crate::client::Clients;
use crate::coordinator::Coordinator;
use crate::draw::Draw;
use crate::epochs::{Epochs, FIRST_STEP};
use crate::faults::{Counters, Fault};
use crate::map::Authority;
use crate::network::Network;
use crate::node::{Answer, Node, Process};
use crate::senses::{Beat, View};
use crate::trace::Trace;
use crate::weather::Weather;
use crate::{Options, Outcome};
use engram_cluster::PartitionMap;
use engram_memory::{Member, Ordinal, PartitionId};
use engram_store::peer::{Envelope, Proposal};
use engram_store::{Error, Store};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Every node is looked after so often: its detector, its timers.
const TICK_US: u64 = 50_000;
/// Everything has to be whole again so long after the last fault.
const WHOLE_WITHIN_US: u64 = 60_000_000;
/// How long the map has left alone what nobody can lead.
const AT_REST_US: u64 = 30_000_000;

/// Something that happens at a time.
pub(crate) enum Event {
    Turn(usize),
    Tick(usize),
    Deliver {
        to: usize,
        from: Member,
        envelopes: Vec<Envelope>,
        link: u64,
    },
    Reconnect(usize, usize),
    Connected {
        node: usize,
        /// Whose stream it is: it ends with its process.
        process: Member,
        peer: Member,
    },
    Push {
        node: usize,
        map: Arc<PartitionMap>,
    },
    Propose {
        proposals: Vec<Proposal>,
    },
    /// A process asks another for a read lease, at this time of its clock.
    AskLease {
        to: usize,
        holder: Member,
        asked_ms: u64,
    },
    GrantLease {
        to: usize,
        holder: Member,
        granter: Member,
        until_ms: u64,
        except: Vec<PartitionId>,
    },
    ProvenDead {
        to: usize,
        dead: Member,
    },
    /// A process says that it lives; the place behind the last node is the coordinator's.
    Beat {
        to: usize,
        beat: Beat,
    },
    /// The streams of a process ended.
    Closed {
        to: usize,
        member: Member,
    },
    /// Its supervisor says that a process ended.
    Died {
        member: Member,
        number: u64,
    },
    /// What the coordinator says.
    Told {
        node: usize,
        view: View,
    },
    /// Somebody is no longer to be emptied.
    Undrain(Ordinal),
    Coordinate,
    /// The driver of the learning run acts.
    Drive,
    Step {
        node: usize,
        partition: PartitionId,
        step: usize,
    },
    AskProgress {
        node: usize,
        partition: PartitionId,
        driver: u64,
    },
    Progress {
        partition: PartitionId,
        driver: u64,
        done: u64,
        open: Option<u32>,
    },
    /// A client reads an id.
    Read {
        node: usize,
        read: usize,
    },
    ReadAnswer {
        read: usize,
        weight: Option<u32>,
    },
    Client(usize),
    Attempt(u64),
    Request {
        node: usize,
        attempt: u64,
    },
    Answer(Answer),
    Inject,
    Strike(Fault, usize),
    Start(usize),
    End(usize),
    Space(usize),
    Mend {
        from: usize,
        to: usize,
    },
    KeepPartition {
        node: usize,
        partition: PartitionId,
    },
    Calm,
    Check,
}

/// A run.
pub(crate) struct World {
    pub(crate) draw: Draw,
    pub(crate) weather: Weather,
    pub(crate) now_us: u64,
    queue: BTreeMap<(u64, u64), Event>,
    queued: u64,
    pub(crate) nodes: Vec<Node>,
    pub(crate) network: Network,
    pub(crate) authority: Authority,
    pub(crate) coordinator: Coordinator,
    pub(crate) clients: Clients,
    pub(crate) epochs: Epochs,
    pub(crate) checks: Checks,
    pub(crate) trace: Trace,
    pub(crate) counters: Counters,
    pub(crate) failure: Option<String>,
    pub(crate) is_calm: bool,
    is_over: bool,
    /// The last whole copy of a partition was damaged.
    forsaken: bool,
}

impl World {
    pub(crate) fn new(seed: u64, options: &Options) -> Self {
        let mut draw = Draw::new(seed);
        let weather = Weather::draw(&mut draw, options.durability, options.season);
        let mut nodes: Vec<Node> =
            (0..weather.nodes).map(|ordinal| Node::new(ordinal as u32, &weather, &mut draw)).collect();
        #[cfg(feature = "defects")]
        nodes.iter_mut().for_each(|node| node.plant(options.defect));
        for node in &mut nodes {
            node.start(weather.timing, 0).expect("an empty disk without faults can be used");
        }
        let members: Vec<Member> =
            nodes.iter().map(|node| node.process.as_ref().expect("it was just started").member).collect();
        let mut world = Self {
            network: Network::new(weather.nodes),
            authority: Authority::new(&weather, &members),
            coordinator: Coordinator::new(&weather),
            clients: Clients::new(&weather, &mut draw),
            epochs: Epochs::new(&weather, &mut draw),
            checks: Checks::default(),
            trace: Trace::new(options.prints),
            counters: Counters::default(),
            failure: None,
            is_calm: false,
            is_over: false,
            forsaken: false,
            now_us: 0,
            queue: BTreeMap::new(),
            queued: 0,
            draw,
            weather,
            nodes,
        };
        if options.prints {
            println!("{:#?}", world.weather);
        }
        world.begin();
        world
    }

    fn begin(&mut self) {
        for node in 0..self.nodes.len() {
            self.push_map(node, 0);
            self.at(TICK_US + node as u64 * 1_000, Event::Tick(node));
            for other in node + 1..self.nodes.len() {
                self.at(1_000, Event::Reconnect(node, other));
            }
        }
        for client in 0..self.weather.clients {
            self.at(20_000, Event::Client(client));
        }
        self.at(100_000, Event::Coordinate);
        if self.weather.epochs {
            self.at(50_000, Event::Drive);
        }
        if !self.weather.faults.is_empty() {
            self.at(300_000, Event::Inject);
        }
        self.at(self.weather.calm_us, Event::Calm);
    }

    /// Until all is well, or something is not.
    pub(crate) fn run(&mut self) {
        while !self.is_over
            && self.failure.is_none()
            && let Some(((at_us, _), event)) = self.queue.pop_first()
        {
            self.now_us = at_us;
            self.handle(event);
        }
    }

    pub(crate) fn outcome(&self) -> Outcome {
        let told = self.clients.told();
        Outcome {
            trace_hash: self.trace.hash(),
            steps: self.trace.steps(),
            simulated_us: self.now_us,
            acked: told.acked,
            unknown: told.unknown,
            never: told.never,
            lost: self.checks.lost(),
            promotions: self.authority.promotions,
            failovers: self.authority.failovers,
            unnecessary: self.authority.unnecessary,
            reads: self.checks.reads(),
            searched: self.clients.searched,
            copies: self.nodes.iter().map(Node::copies).sum(),
            forsaken: self.forsaken,
            faults: self.counters.clone(),
            failure: self.failure.as_ref().map(|what| format!("at {:.6} s: {what}", self.now_us as f64 / 1e6)),
        }
    }

    /// Notes what does not hold; the first counts.
    pub(crate) fn fail(&mut self, what: String) {
        self.failure.get_or_insert(what);
    }

    pub(crate) fn at(&mut self, after_us: u64, event: Event) {
        self.queued += 1;
        self.queue.insert((self.now_us + after_us, self.queued), event);
    }

    /// Takes back what is on its way and fits.
    pub(crate) fn purge(&mut self, goes: impl Fn(&Event) -> bool) {
        self.queue.retain(|_, event| !goes(event));
    }

    fn handle(&mut self, event: Event) {
        let event = match self.wait_for_paused(event) {
            Some(event) => event,
            None => return,
        };
        match event {
            Event::Turn(node) => self.turn(node),
            Event::Tick(node) => self.tick(node),
            Event::Deliver { to, from, envelopes, link } => self.deliver(to, from, envelopes, link),
            Event::Reconnect(a, b) => self.reconnect(a, b),
            Event::Connected { node, process, peer } => {
                self.trace.note(self.now_us, &[3, node as u64], || format!("{node} connected to {peer}"));
                self.with(node, |store| {
                    if store.member() == process {
                        store.connected(peer);
                    }
                    Ok(())
                });
            }
            Event::Push { node, map } => {
                self.trace
                    .note(self.now_us, &[4, node as u64, map.version], || format!("{node} learns map {}", map.version));
                self.with(node, |store| {
                    store.learn(&map);
                    Ok(())
                });
            }
            Event::Propose { proposals } => self.decide(proposals),
            Event::AskLease { to, holder, asked_ms } => self.grant_lease(to, holder, asked_ms),
            Event::GrantLease { to, holder, granter, until_ms, except } => self.with(to, |store| {
                if store.member() == holder {
                    store.lease_held(granter, until_ms, except);
                }
                Ok(())
            }),
            Event::ProvenDead { to, dead } => self.with(to, |store| {
                store.proven_dead(dead);
                Ok(())
            }),
            Event::Beat { to, beat } => self.hear_beat(to, &beat),
            Event::Closed { to, member } => self.stream_closed(to, member),
            Event::Died { member, number } => self.reported_dead(member, number),
            Event::Told { node, view } => self.told(node, &view),
            Event::Undrain(ordinal) => {
                self.coordinator.draining.remove(&ordinal);
            }
            Event::Coordinate => self.coordinate(),
            Event::Drive => self.drive(),
            Event::Step { node, partition, step } => self.step_arrives(node, partition, step),
            Event::AskProgress { node, partition, driver } => self.progress_asked(node, partition, driver),
            Event::Progress { partition, driver, done, open } => {
                self.progress_told(partition, driver, done, open);
            }
            Event::Read { node, read } => self.read(node, read),
            Event::ReadAnswer { read, weight } => self.read_answered(read, weight),
            Event::Client(client) => self.client_acts(client),
            Event::Attempt(attempt) => self.attempt(attempt),
            Event::Request { node, attempt } => self.request(node, attempt),
            Event::Answer(answer) if answer.0 >= FIRST_STEP => self.stepped(answer),
            Event::Answer(answer) => self.answered(answer),
            Event::Inject => self.inject(),
            Event::Strike(fault, node) => self.try_strike(fault, node),
            Event::Start(node) => self.start(node),
            Event::End(node) => self.end(node, "it was told to"),
            Event::Space(node) => self.nodes[node].disk.set_capacity(None),
            Event::Mend { from, to } => self.mend(from, to),
            Event::KeepPartition { node, partition } => self.with(node, |store| {
                let own = store.member().ordinal;
                store.hand_over(partition, own);
                Ok(())
            }),
            Event::Calm => self.calm_down(),
            Event::Check => self.check_whole(),
        }
    }

    /// Puts off what would make a paused process act.
    fn wait_for_paused(&mut self, event: Event) -> Option<Event> {
        let node = match &event {
            Event::Turn(node)
            | Event::Tick(node)
            | Event::Deliver { to: node, .. }
            | Event::Connected { node, .. }
            | Event::Push { node, .. }
            | Event::AskLease { to: node, .. }
            | Event::GrantLease { to: node, .. }
            | Event::ProvenDead { to: node, .. }
            | Event::Beat { to: node, .. }
            | Event::Closed { to: node, .. }
            | Event::Told { node, .. }
            | Event::Step { node, .. }
            | Event::AskProgress { node, .. }
            | Event::Read { node, .. }
            | Event::Request { node, .. } => *node,
            Event::Coordinate | Event::Died { .. } => self.map_place(),
            _ => return Some(event),
        };
        let paused_until_us =
            self.nodes.get(node).map_or(self.coordinator.paused_until_us, |place| place.paused_until_us);
        if paused_until_us <= self.now_us {
            return Some(event);
        }
        self.at(paused_until_us - self.now_us, event);
        None
    }

    /// Lets a store do something, and takes what it says; an error ends its process. Nothing when no process runs.
    pub(crate) fn with(&mut self, node: usize, act: impl FnOnce(&mut Store) -> Result<(), Error>) {
        self.nodes[node].tell_time(self.now_us);
        let Some(process) = &mut self.nodes[node].process else { return };
        let acted = act(&mut process.store);
        self.take_said(node);
        match acted {
            Ok(()) => {
                self.observe(node);
                if !std::mem::replace(&mut self.nodes[node].turns, true) {
                    let wait_us = self.draw.within(20, 1_500);
                    self.at(wait_us, Event::Turn(node));
                }
            }
            Err(error) => {
                let is_expected = self.nodes[node].was_flipped && is_damage(&error);
                if !self.nodes[node].disk_suffers && !is_expected {
                    self.fail(format!("node {node}: {error} without a fault of its disk"));
                }
                self.end(node, &error.to_string());
            }
        }
    }

    fn take_said(&mut self, node: usize) {
        let Some(Process { out, member, .. }) = &self.nodes[node].process else { return };
        let (said, from) = (out.take(), *member);
        for (to, envelopes) in said.sent {
            self.send(node, from, to.0 as usize, envelopes);
        }
        if !said.proposals.is_empty() {
            self.submit(node, said.proposals);
        }
        for answer in said.answers {
            if let Ok(committed) = &answer.1 {
                self.checks.acknowledged(committed.partition, committed.lsn);
                self.note_answer(answer.0, from);
            }
            self.answer_leaves(answer);
        }
    }

    fn turn(&mut self, node: usize) {
        self.trace.note(self.now_us, &[1, node as u64], || format!("{node} turns"));
        self.with(node, |store| store.turn());
        self.nodes[node].turns = false;
        // What a turn leaves to do is done in the next one, and a store that has nothing to do is left alone.
        let busy = self.nodes[node].process.as_ref().is_some_and(|process| process.store.stats().waiting_records > 0);
        if busy {
            self.nodes[node].turns = true;
            let wait_us = self.draw.within(100, 3_000);
            self.at(wait_us, Event::Turn(node));
        }
    }

    /// Says that it lives, looks who else does, reads the map again.
    fn tick(&mut self, node: usize) {
        let wait_us = TICK_US + self.draw.below(10_000);
        self.at(wait_us, Event::Tick(node));
        if self.nodes[node].process.is_none() {
            return;
        }
        self.beat(node, TICK_US);
        self.look(node);
        self.leave(node);
        if self.draw.chance(100) {
            self.push_map(node, 0);
        }
        if self.draw.chance(300) {
            self.ask_leases(node);
        }
        if !self.nodes[node].turns {
            self.nodes[node].turns = true;
            self.at(0, Event::Turn(node));
        }
    }

    fn start(&mut self, node: usize) {
        if self.nodes[node].process.is_some() {
            return;
        }
        self.nodes[node].tell_time(self.now_us);
        let (count, now_us) = (self.nodes.len(), self.now_us);
        match self.nodes[node].start(self.weather.timing, now_us) {
            Ok(()) => {
                let member = self.nodes[node].process.as_ref().expect("it was just started").member;
                self.trace
                    .note(now_us, &[6, node as u64, member.incarnation.0], || format!("{node} starts as {member}"));
                self.push_map(node, 0);
                if self.draw.chance(self.weather.strike_started) {
                    let (all, wait_us) = (self.draw.chance(500), self.draw.within(1_000, 60_000));
                    for victim in (0..count).filter(|other| all || *other == node) {
                        self.at(wait_us, Event::Strike(Fault::Kill, victim));
                    }
                }
                for other in (0..count).filter(|other| *other != node) {
                    self.break_link(node, other);
                }
                self.observe(node);
            }
            Err(error) => {
                self.trace.note(now_us, &[7, node as u64], || format!("{node} does not start: {error}"));
                if self.nodes[node].flipped && is_damage(&error) {
                    // The damage is in what all partitions share: the disk is given up.
                    let seed = self.draw.next();
                    self.nodes[node].replace_disk(seed);
                    self.nodes[node].known = None;
                } else if !self.nodes[node].disk_suffers || matches!(error, Error::Corrupt { .. }) {
                    self.fail(format!("node {node} does not start: {error:?}"));
                }
                self.nodes[node].kill();
                let wait_us = self.draw.within(50_000, 500_000);
                self.at(wait_us, Event::Start(node));
            }
        }
    }

    /// Ends a process at once, and starts another one later.
    pub(crate) fn end(&mut self, node: usize, why: &str) {
        if self.nodes[node].process.is_none() {
            return;
        }
        self.trace.note(self.now_us, &[8, node as u64], || format!("{node} ends: {why}"));
        self.nodes[node].kill();
        self.was_ended(node);
    }

    /// What the end of a process means for others.
    pub(crate) fn was_ended(&mut self, node: usize) {
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            self.network.take_down(node, other);
        }
        if let Some((dead, _)) = self.nodes[node].known.filter(|_| self.draw.chance(self.weather.hearsay)) {
            for to in (0..self.nodes.len()).filter(|to| *to != node) {
                let wait_us = self.draw.within(1_000, self.weather.proof_late_us.max(400_000));
                self.at(wait_us, Event::ProvenDead { to, dead });
            }
        }
        if let Some((member, number)) = self.nodes[node].ended.take() {
            self.checks.ended(member, self.now_us);
            let silently = self.nodes[node].lost_power || std::mem::take(&mut self.nodes[node].vanished);
            self.tell_of_end(member, number, silently);
        }
        let down_us = if self.is_calm { 100_000 } else { self.weather.down_us };
        let wait_us = self.draw.within(5_000, down_us);
        self.at(wait_us, Event::Start(node));
    }

    /// Ends all faults.
    fn calm_down(&mut self) {
        self.trace.note(self.now_us, &[9], || "calm".to_owned());
        self.is_calm = true;
        let weather = &mut self.weather;
        (weather.loss, weather.duplicate, weather.reorder) = (0, 0, 0);
        (weather.map_late, weather.map_lost, weather.map_duplicate, weather.map_stale) = (0, 0, 0, 0);
        (weather.request_again, weather.request_lost) = (0, 0);
        (weather.false_promotion, weather.blind_promotion, weather.extra_learner) = (0, 0, 0);
        (weather.mute_promoted, weather.strike_alone, weather.erratic) = (0, 0, 0);
        (weather.deafen_deposed, weather.strike_changed, weather.strike_started) = (0, 0, 0);
        (self.coordinator.paused_until_us, self.coordinator.down_until_us) =
            (0, self.coordinator.down_until_us.map(|_| self.now_us));
        self.coordinator.draining.clear();
        weather.faults.clear();
        self.network.mend_all();
        for node in 0..self.nodes.len() {
            let place = &mut self.nodes[node];
            (place.paused_until_us, place.misled) = (0, None);
            place.disk.set_capacity(None);
            place.disk.fail_syncs(0);
            if place.disk_suffers && place.process.is_some() {
                self.end(node, "its disk is mended");
            }
            self.nodes[node].disk_suffers = false;
            self.at(10_000, Event::Start(node));
            for partition in (0..self.weather.partitions).map(PartitionId) {
                self.at(0, Event::KeepPartition { node, partition });
            }
            for other in node + 1..self.nodes.len() {
                self.break_link(node, other);
            }
        }
        self.at(200_000, Event::Check);
    }

    fn check_whole(&mut self) {
        let missing = self.missing();
        if missing.is_none() {
            self.check_ledger();
            self.check_histories();
            self.is_over = true;
        } else if let Some(partition) = self.forsaken().filter(|_| self.now_us > self.weather.calm_us + WHOLE_WITHIN_US)
        {
            // Its only copy was damaged before another was made: what is left is a person's to order.
            self.check_histories();
            if self.now_us < self.authority.changed_us[partition] + AT_REST_US {
                let entry = &self.authority.entries[partition];
                self.fail(format!("nobody can lead partition {partition}, and the map still changes: {entry:?}"));
            }
            self.forsaken = true;
            self.is_over = true;
        } else if self.now_us > self.weather.calm_us + WHOLE_WITHIN_US {
            let missing = missing.unwrap_or_default();
            let stand: Vec<String> = (self.nodes.iter().enumerate())
                .map(|(node, place)| {
                    let replicas = place.process.as_ref().map(|process| (process.member, process.store.replicas()));
                    format!("node {node}: {replicas:?}")
                })
                .collect();
            let map = &self.authority.entries;
            self.fail(format!(
                "not whole a minute after the last fault: {missing}\nmap {map:#?}\n{}",
                stand.join("\n")
            ));
        } else {
            self.at(200_000, Event::Check);
        }
    }

    /// A partition that has no candidate left whose copy is whole: each is damaged, has lost its end, or was on a disk that was given up.
    fn forsaken(&self) -> Option<usize> {
        let lacks = |partition, member: &Member, entry| {
            let node = &self.nodes[member.ordinal.0 as usize];
            node.lacks(partition, member) || node.declines(partition, entry)
        };
        let mut entries = (0..).map(PartitionId).zip(&self.authority.entries);
        let found =
            entries.find(|(partition, entry)| entry.candidates().all(|member| lacks(*partition, member, entry)));
        found.map(|(partition, _)| partition.0 as usize)
    }

    pub(crate) fn count(&mut self, fault: Fault) {
        self.counters.count(fault);
    }
}

/// Whether this is said of bytes that are not what was written.
pub(crate) const fn is_damage(error: &Error) -> bool {
    matches!(error, Error::Corrupt { .. } | Error::UnknownFormat { .. } | Error::IdentityMissing { .. })
}
