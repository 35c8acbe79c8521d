//! The event loop: due events are handled, and their consequences queued.

use crate::checks::Checks;
use crate::checks::trace::Trace;
use crate::cluster::coordinator::Coordinator;
use crate::cluster::liveness::{Heartbeat, View};
use crate::cluster::map::MapStore;
use crate::cluster::network::Network;
use crate::cluster::node::{Answer, Node, Process};
use crate::draw::Draw;
use crate::faults::plan::FaultPlan;
use crate::faults::{Counters, Fault};
use crate::workload::client::Clients;
use crate::workload::epochs::{Epochs, FIRST_STEP};
use crate::workload::items::{FIRST_APPEND, Items};
use crate::{Options, Outcome};
use engram_cluster::PartitionMap;
use engram_memory::{Member, Ordinal, PartitionId};
use engram_store::peer::{Envelope, Proposal};
use engram_store::{Durability, Error, Store};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Interval of a node's detector and timers.
const TICK_US: u64 = 50_000;
/// The cluster must be healthy this long after the last fault.
const HEALTHY_WITHIN_US: u64 = 60_000_000;
/// How long the map must have been idle for an unrecoverable partition.
const MAP_IDLE_US: u64 = 30_000_000;

/// An event.
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
        /// Owner of the stream, which ends with its process.
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
    /// A process requests a read lease, at this time of its clock.
    RequestLease {
        to: usize,
        holder: Member,
        requested_ms: u64,
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
    /// A heartbeat arrives; the index after the last node is the coordinator's.
    Heartbeat {
        to: usize,
        heartbeat: Heartbeat,
    },
    /// The streams of a process ended.
    Closed {
        to: usize,
        member: Member,
    },
    /// A supervisor reports the end of its process.
    Died {
        member: Member,
        number: u64,
    },
    /// A view of the coordinator arrives.
    View {
        node: usize,
        view: View,
    },
    /// A worker is no longer drained.
    Undrain(Ordinal),
    Coordinate,
    /// The driver of the learning run acts.
    Drive,
    Step {
        node: usize,
        partition: PartitionId,
        step: usize,
    },
    ReadProgress {
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
    /// The writer of items acts.
    Append,
    AppendStep {
        node: usize,
        partition: PartitionId,
        step: usize,
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
    RestoreLink {
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
    pub(crate) plan: FaultPlan,
    pub(crate) now_us: u64,
    queue: BTreeMap<(u64, u64), Event>,
    queued: u64,
    pub(crate) nodes: Vec<Node>,
    pub(crate) network: Network,
    pub(crate) map_store: MapStore,
    pub(crate) coordinator: Coordinator,
    pub(crate) clients: Clients,
    pub(crate) epochs: Epochs,
    pub(crate) items: Items,
    pub(crate) checks: Checks,
    pub(crate) trace: Trace,
    pub(crate) counters: Counters,
    pub(crate) failure: Option<String>,
    pub(crate) is_calm: bool,
    is_over: bool,
    /// The last intact replica of a partition was damaged.
    unrecoverable: bool,
}

impl World {
    pub(crate) fn new(seed: u64, options: &Options) -> Self {
        let mut draw = Draw::new(seed);
        let plan = FaultPlan::draw(&mut draw, options.durability, options.scenario);
        let mut nodes: Vec<Node> = (0..plan.nodes).map(|ordinal| Node::new(ordinal as u32, &plan, &mut draw)).collect();
        #[cfg(feature = "defects")]
        nodes.iter_mut().for_each(|node| node.inject_bug(options.injected_bug));
        for node in &mut nodes {
            node.start(plan.timing, 0).expect("an empty disk without faults can be used");
        }
        let members: Vec<Member> =
            nodes.iter().map(|node| node.process.as_ref().expect("the process was just started").member).collect();
        let mut world = Self {
            network: Network::new(plan.nodes),
            map_store: MapStore::new(&plan, &members),
            coordinator: Coordinator::new(&plan),
            clients: Clients::new(&plan, &mut draw),
            epochs: Epochs::new(&plan, &mut draw),
            items: Items::new(&plan, &mut draw, options.has_items && options.durability != Durability::Async),
            checks: Checks::default(),
            trace: Trace::new(options.prints),
            counters: Counters::default(),
            failure: None,
            is_calm: false,
            is_over: false,
            unrecoverable: false,
            now_us: 0,
            queue: BTreeMap::new(),
            queued: 0,
            draw,
            plan,
            nodes,
        };
        if options.prints {
            println!("{:#?}", world.plan);
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
        for client in 0..self.plan.clients {
            self.at(20_000, Event::Client(client));
        }
        self.at(100_000, Event::Coordinate);
        if self.plan.epochs {
            self.at(50_000, Event::Drive);
        }
        if self.items.is_used() {
            self.at(60_000, Event::Append);
        }
        if !self.plan.faults.is_empty() {
            self.at(300_000, Event::Inject);
        }
        self.at(self.plan.calm_us, Event::Calm);
    }

    /// Runs until everything is healthy, or an invariant is violated.
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
        let tally = self.clients.tally();
        Outcome {
            trace_hash: self.trace.hash(),
            steps: self.trace.steps(),
            simulated_us: self.now_us,
            acked: tally.acked,
            unknown: tally.unknown,
            never: tally.never,
            lost: self.checks.lost(),
            promotions: self.map_store.promotions,
            failovers: self.map_store.failovers,
            unnecessary: self.map_store.unnecessary,
            reads: self.checks.reads(),
            searched: self.clients.searched,
            snapshots: self.nodes.iter().map(Node::snapshots_installed).sum(),
            unrecoverable: self.unrecoverable,
            faults: self.counters.clone(),
            failure: self.failure.as_ref().map(|what| format!("at {:.6} s: {what}", self.now_us as f64 / 1e6)),
        }
    }

    /// Notes a violation; the first counts.
    pub(crate) fn fail(&mut self, what: String) {
        self.failure.get_or_insert(what);
    }

    pub(crate) fn at(&mut self, after_us: u64, event: Event) {
        self.queued += 1;
        self.queue.insert((self.now_us + after_us, self.queued), event);
    }

    /// Removes matching events from the queue.
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
                        store.connect_peer(peer);
                    }
                    Ok(())
                });
            }
            Event::Push { node, map } => {
                self.trace
                    .note(self.now_us, &[4, node as u64, map.version], || format!("{node} learns map {}", map.version));
                self.with(node, |store| {
                    store.update_map(&map);
                    Ok(())
                });
            }
            Event::Propose { proposals } => self.decide(proposals),
            Event::RequestLease { to, holder, requested_ms } => self.grant_lease(to, holder, requested_ms),
            Event::GrantLease { to, holder, granter, until_ms, except } => self.with(to, |store| {
                if store.member() == holder {
                    store.record_lease(granter, until_ms, except);
                }
                Ok(())
            }),
            Event::ProvenDead { to, dead } => self.with(to, |store| {
                store.confirm_dead(dead);
                Ok(())
            }),
            Event::Heartbeat { to, heartbeat } => self.receive_heartbeat(to, &heartbeat),
            Event::Closed { to, member } => self.stream_closed(to, member),
            Event::Died { member, number } => self.report_death(member, number),
            Event::View { node, view } => self.receive_view(node, &view),
            Event::Undrain(ordinal) => {
                self.coordinator.draining.remove(&ordinal);
            }
            Event::Coordinate => self.coordinate(),
            Event::Drive => self.drive(),
            Event::Step { node, partition, step } => self.step_arrives(node, partition, step),
            Event::ReadProgress { node, partition, driver } => self.read_progress(node, partition, driver),
            Event::Progress { partition, driver, done, open } => {
                self.receive_progress(partition, driver, done, open);
            }
            Event::Append => self.append(),
            Event::AppendStep { node, partition, step } => self.append_arrives(node, partition, step),
            Event::Read { node, read } => self.read(node, read),
            Event::ReadAnswer { read, weight } => self.read_answered(read, weight),
            Event::Client(client) => self.client_acts(client),
            Event::Attempt(attempt) => self.attempt(attempt),
            Event::Request { node, attempt } => self.request(node, attempt),
            Event::Answer(answer) if answer.0 >= FIRST_STEP => self.step_answered(answer),
            Event::Answer(answer) if answer.0 >= FIRST_APPEND => self.append_answered(answer),
            Event::Answer(answer) => self.answered(answer),
            Event::Inject => self.inject(),
            Event::Strike(fault, node) => self.try_inject(fault, node),
            Event::Start(node) => self.start(node),
            Event::End(node) => self.end(node, "planned"),
            Event::Space(node) => self.nodes[node].disk.set_capacity(None),
            Event::RestoreLink { from, to } => self.restore_link(from, to),
            Event::KeepPartition { node, partition } => self.with(node, |store| {
                let own = store.member().ordinal;
                store.transfer_leadership(partition, own);
                Ok(())
            }),
            Event::Calm => self.calm_down(),
            Event::Check => self.check_healthy(),
        }
    }

    /// Delays events of a paused process.
    fn wait_for_paused(&mut self, event: Event) -> Option<Event> {
        let node = match &event {
            Event::Turn(node)
            | Event::Tick(node)
            | Event::Deliver { to: node, .. }
            | Event::Connected { node, .. }
            | Event::Push { node, .. }
            | Event::RequestLease { to: node, .. }
            | Event::GrantLease { to: node, .. }
            | Event::ProvenDead { to: node, .. }
            | Event::Heartbeat { to: node, .. }
            | Event::Closed { to: node, .. }
            | Event::View { node, .. }
            | Event::Step { node, .. }
            | Event::ReadProgress { node, .. }
            | Event::AppendStep { node, .. }
            | Event::Read { node, .. }
            | Event::Request { node, .. } => *node,
            Event::Coordinate | Event::Died { .. } => self.map_index(),
            _ => return Some(event),
        };
        let paused_until_us =
            self.nodes.get(node).map_or(self.coordinator.paused_until_us, |node| node.paused_until_us);
        if paused_until_us <= self.now_us {
            return Some(event);
        }
        self.at(paused_until_us - self.now_us, event);
        None
    }

    /// Lets a store act, and takes its output; an error ends its process. No effect if no process runs.
    pub(crate) fn with(&mut self, node: usize, act: impl FnOnce(&mut Store) -> Result<(), Error>) {
        self.nodes[node].set_time(self.now_us);
        let Some(process) = &mut self.nodes[node].process else { return };
        let acted = act(&mut process.store);
        self.take_output(node);
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
                    self.fail(format!("node {node}: {error} without a disk fault"));
                }
                self.end(node, &error.to_string());
            }
        }
    }

    fn take_output(&mut self, node: usize) {
        let Some(Process { out, member, .. }) = &self.nodes[node].process else { return };
        let (output, from) = (out.take(), *member);
        for (to, envelopes) in output.sent {
            self.send(node, from, to.0 as usize, envelopes);
        }
        if !output.proposals.is_empty() {
            self.submit(node, output.proposals);
        }
        for answer in output.answers {
            if let Ok(committed) = &answer.1 {
                self.checks.acknowledged(committed.partition, committed.lsn);
                self.note_answer(answer.0, from);
            }
            self.send_answer(answer);
        }
    }

    fn turn(&mut self, node: usize) {
        self.trace.note(self.now_us, &[1, node as u64], || format!("{node} turns"));
        self.with(node, |store| store.turn());
        self.nodes[node].turns = false;
        // Leftover work is done in the next turn, and an idle store is left alone.
        let busy = self.nodes[node].process.as_ref().is_some_and(|process| process.store.stats().waiting_records > 0);
        if busy {
            self.nodes[node].turns = true;
            let wait_us = self.draw.within(100, 3_000);
            self.at(wait_us, Event::Turn(node));
        }
    }

    /// Sends heartbeats, ticks the detector, reads the map again.
    fn tick(&mut self, node: usize) {
        let wait_us = TICK_US + self.draw.below(10_000);
        self.at(wait_us, Event::Tick(node));
        if self.nodes[node].process.is_none() {
            return;
        }
        self.send_heartbeats(node, TICK_US);
        self.tick_detector(node);
        self.leave(node);
        if self.draw.chance(100) {
            self.push_map(node, 0);
        }
        if self.draw.chance(300) {
            self.request_leases(node);
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
        self.nodes[node].set_time(self.now_us);
        let (count, now_us) = (self.nodes.len(), self.now_us);
        match self.nodes[node].start(self.plan.timing, now_us) {
            Ok(()) => {
                let member = self.nodes[node].process.as_ref().expect("it was just started").member;
                self.trace
                    .note(now_us, &[6, node as u64, member.incarnation.0], || format!("{node} starts as {member}"));
                self.push_map(node, 0);
                if self.draw.chance(self.plan.strike_started) {
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
                self.trace.note(now_us, &[7, node as u64], || format!("{node} failed to start: {error}"));
                if self.nodes[node].flipped && is_damage(&error) {
                    // The damage affects what all partitions share: the disk is discarded.
                    let seed = self.draw.next();
                    self.nodes[node].replace_disk(seed);
                    self.nodes[node].known = None;
                } else if !self.nodes[node].disk_suffers || matches!(error, Error::Corrupt { .. }) {
                    self.fail(format!("node {node} failed to start: {error:?}"));
                }
                self.nodes[node].kill();
                let wait_us = self.draw.within(50_000, 500_000);
                self.at(wait_us, Event::Start(node));
            }
        }
    }

    /// Ends a process at once, and starts another one later.
    pub(crate) fn end(&mut self, node: usize, reason: &str) {
        if self.nodes[node].process.is_none() {
            return;
        }
        self.trace.note(self.now_us, &[8, node as u64], || format!("{node} ends: {reason}"));
        self.nodes[node].kill();
        self.process_ended(node);
    }

    /// Handles the consequences of a process's end for the others.
    pub(crate) fn process_ended(&mut self, node: usize) {
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            self.network.take_down(node, other);
        }
        if let Some((dead, _)) = self.nodes[node].known.filter(|_| self.draw.chance(self.plan.hearsay)) {
            for to in (0..self.nodes.len()).filter(|to| *to != node) {
                let wait_us = self.draw.within(1_000, self.plan.proof_late_us.max(400_000));
                self.at(wait_us, Event::ProvenDead { to, dead });
            }
        }
        if let Some((member, number)) = self.nodes[node].ended.take() {
            self.checks.ended(member, self.now_us);
            let silently = self.nodes[node].lost_power || std::mem::take(&mut self.nodes[node].vanished);
            self.announce_end(member, number, silently);
        }
        let down_us = if self.is_calm { 100_000 } else { self.plan.down_us };
        let wait_us = self.draw.within(5_000, down_us);
        self.at(wait_us, Event::Start(node));
    }

    /// Ends all faults.
    fn calm_down(&mut self) {
        self.trace.note(self.now_us, &[9], || "calm".to_owned());
        self.is_calm = true;
        let plan = &mut self.plan;
        (plan.loss, plan.duplicate, plan.reorder) = (0, 0, 0);
        (plan.map_late, plan.map_lost, plan.map_duplicate, plan.map_stale) = (0, 0, 0, 0);
        (plan.request_again, plan.request_lost) = (0, 0);
        (plan.false_promotion, plan.blind_promotion, plan.extra_learner) = (0, 0, 0);
        (plan.mute_promoted, plan.strike_alone, plan.erratic) = (0, 0, 0);
        (plan.deafen_deposed, plan.strike_changed, plan.strike_started) = (0, 0, 0);
        (self.coordinator.paused_until_us, self.coordinator.down_until_us) =
            (0, self.coordinator.down_until_us.map(|_| self.now_us));
        self.coordinator.draining.clear();
        plan.faults.clear();
        self.network.restore_all();
        for node in 0..self.nodes.len() {
            let machine = &mut self.nodes[node];
            (machine.paused_until_us, machine.false_suspicion) = (0, None);
            machine.disk.set_capacity(None);
            machine.disk.fail_syncs(0);
            if machine.disk_suffers && machine.process.is_some() {
                self.end(node, "its disk is repaired");
            }
            self.nodes[node].disk_suffers = false;
            self.at(10_000, Event::Start(node));
            for partition in (0..self.plan.partitions).map(PartitionId) {
                self.at(0, Event::KeepPartition { node, partition });
            }
            for other in node + 1..self.nodes.len() {
                self.break_link(node, other);
            }
        }
        self.at(200_000, Event::Check);
    }

    fn check_healthy(&mut self) {
        let missing = self.missing();
        if missing.is_none() {
            self.check_ledger();
            self.check_items();
            self.check_histories();
            self.is_over = true;
        } else if let Some(partition) =
            self.unrecoverable().filter(|_| self.now_us > self.plan.calm_us + HEALTHY_WITHIN_US)
        {
            // The only replica was damaged before another one was created: only a forced promotion helps.
            self.check_histories();
            if self.now_us < self.map_store.changed_us[partition] + MAP_IDLE_US {
                let entry = &self.map_store.entries[partition];
                self.fail(format!(
                    "partition {partition} has no eligible replica, but the map still changes: {entry:?}"
                ));
            }
            self.unrecoverable = true;
            self.is_over = true;
        } else if self.now_us > self.plan.calm_us + HEALTHY_WITHIN_US {
            let missing = missing.unwrap_or_default();
            let states: Vec<String> = (self.nodes.iter().enumerate())
                .map(|(node, machine)| {
                    let replicas = machine.process.as_ref().map(|process| (process.member, process.store.replicas()));
                    format!("node {node}: {replicas:?}")
                })
                .collect();
            let map = &self.map_store.entries;
            self.fail(format!(
                "not healthy a minute after the last fault: {missing}\nmap {map:#?}\n{}",
                states.join("\n")
            ));
        } else {
            self.at(200_000, Event::Check);
        }
    }

    /// Returns a partition without an intact candidate: each is damaged, has lost its end, or was on a discarded disk.
    fn unrecoverable(&self) -> Option<usize> {
        let lacks = |partition, member: &Member, entry| {
            let node = &self.nodes[member.ordinal.0 as usize];
            node.lacks_replica(partition, member) || node.declines(partition, entry)
        };
        let mut entries = (0..).map(PartitionId).zip(&self.map_store.entries);
        let found =
            entries.find(|(partition, entry)| entry.candidates().all(|member| lacks(*partition, member, entry)));
        found.map(|(partition, _)| partition.0 as usize)
    }

    pub(crate) fn count(&mut self, fault: Fault) {
        self.counters.count(fault);
    }
}

/// Whether an error reports stored bytes that differ from what was written.
pub(crate) const fn is_damage(error: &Error) -> bool {
    matches!(error, Error::Corrupt { .. } | Error::UnknownFormat { .. } | Error::IdentityMissing { .. })
}
