//! Hosts, faults and checks.

use crate::draw::Draw;
use crate::learning::{self, Plan};
use crate::node::{CLIENT_PORT, CLUSTER, COORDINATOR, COORDINATOR_PORT, MachineOptions, Node};
use crate::trace::Trace;
use crate::wire::{Wire, listen};
use crate::{Counters, Fault, Outcome, ledger};
use engram_api::LearnerClusterSpec;
use engram_client::{Client, GetOptions, Network};
use engram_cluster::Entry;
use engram_coordinator::Coordinator;
use engram_mapstore::{MapStore, MemoryStore};
use engram_memory::{Member, MemoryId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::sleep;
use turmoil::{Builder, Sim};

/// Time limit for a cluster to recover after the last fault.
const CALM_MS: u64 = 90_000;
/// Time without faults at the start.
const QUIET_MS: u64 = 4_000;
/// Client deadlines: short, so that a run meets them.
const DEADLINE: Duration = Duration::from_secs(4);
const ATTEMPT: Duration = Duration::from_millis(1_500);

/// State shared by hosts and world.
#[derive(Clone)]
pub(crate) struct Common {
    pub(crate) trace: Trace,
    pub(crate) partitions: u32,
    workers: u32,
    calm: Arc<AtomicBool>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    acked: AtomicU64,
    unknown: AtomicU64,
    resolved: AtomicU64,
    reads: AtomicU64,
    epochs: AtomicU64,
    drivers_died: AtomicU64,
    /// Clients that have finished.
    finished: AtomicU64,
}

fn add(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

impl Common {
    pub(crate) fn is_calm(&self) -> bool {
        self.calm.load(Ordering::Relaxed)
    }

    pub(crate) fn acked(&self) {
        add(&self.counts.acked);
    }

    pub(crate) fn unknown(&self) {
        add(&self.counts.unknown);
    }

    pub(crate) fn resolved(&self) {
        add(&self.counts.resolved);
    }

    pub(crate) fn read(&self) {
        add(&self.counts.reads);
    }

    pub(crate) fn learned(&self) {
        add(&self.counts.epochs);
    }

    pub(crate) fn driver_died(&self) {
        add(&self.counts.drivers_died);
    }

    /// Connects a client as soon as a worker answers.
    pub(crate) async fn client(&self) -> Client {
        let endpoints = (0..self.workers).map(|ordinal| format!("{}:{CLIENT_PORT}", Node::name(ordinal)));
        let mut options = engram_client::Options::new(endpoints).with_cluster(CLUSTER);
        (options.write_deadline, options.read_deadline, options.attempt_deadline) = (DEADLINE, DEADLINE, ATTEMPT);
        options.network = Network::simulated(Wire);
        loop {
            match Client::connect(options.clone()).await {
                Ok(client) => return client,
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
        }
    }
}

/// Source and destination of messages.
type Link = (String, String);

struct World {
    draw: Draw,
    common: Common,
    nodes: Vec<Node>,
    map: Arc<MemoryStore>,
    replicas: usize,
    now_ms: u64,
    /// Hosts that are down, and when they restart.
    down: BTreeMap<String, u64>,
    /// Links that are cut or held, and until when.
    cut: BTreeMap<Link, (Fault, u64)>,
    hosts: Vec<String>,
    faults: Counters,
}

/// Runs a seed to its end. Panics of the code under test pass through.
pub(crate) fn run(seed: u64, trace: &Trace) -> Outcome {
    let mut draw = Draw::new(seed);
    let workers = draw.within(3, 5) as u32;
    let mut spec = LearnerClusterSpec::with_workers(workers);
    spec.partitions = draw.within(2, 8) as u32;
    spec.replication_factor = if draw.chance(70) { 2 } else { 3 };
    // Far from the default rate, so that using the wrong one is noticed.
    spec.learning.rate = draw.within(100, 900) as f64 / 1_000.0;
    let plan = Plan {
        seed,
        epochs: draw.within(4, 12) as u32,
        // Decay affects every memory: without it clients can count.
        decay: if seed.is_multiple_of(2) { 0.0 } else { 0.01 },
        partitions: spec.partitions,
        rate: spec.learning.rate,
        initial_weight: spec.learning.initial_weight,
    };
    let counting = if plan.decay == 0.0 { draw.within(1, 3) } else { 0 };
    let common = Common {
        trace: trace.clone(),
        partitions: spec.partitions,
        workers,
        calm: Arc::default(),
        counts: Arc::default(),
    };
    trace.note(format!(
        "{workers} workers, {} partitions, {} replicas, {counting} clients, {} epochs",
        spec.partitions, spec.replication_factor, plan.epochs
    ));
    let mut sim = Builder::new()
        .rng_seed(seed)
        .enable_random_order()
        .simulation_duration(Duration::from_secs(600))
        .tick_duration(Duration::from_millis(1))
        .min_message_latency(Duration::from_millis(1))
        .max_message_latency(Duration::from_millis(draw.within(2, 20)))
        .tcp_capacity(1 << 16)
        .build();
    let (kept_bytes, snapshot_ms, digest_ms) =
        if draw.chance(50) { (4 << 10, 3_000, 2_000) } else { (1 << 20, 60_000, 3_600_000) };
    let nodes: Vec<Node> = (0..workers)
        .map(|ordinal| {
            let options = MachineOptions { disk_ms: draw.within(0, 5), kept_bytes, snapshot_ms, digest_ms };
            Node::new(ordinal, draw.next(), options, spec.clone(), trace.clone())
        })
        .collect();
    let map = Arc::new(MemoryStore::default());
    coordinate(&mut sim, &spec, &map);
    for (ordinal, node) in (0..).zip(&nodes) {
        let node = node.clone();
        sim.host(Node::name(ordinal), move || node.clone().run());
    }
    let mut hosts: Vec<String> = (0..workers).map(Node::name).chain([COORDINATOR.to_owned()]).collect();
    for number in 0..counting {
        let (common, draw) = (common.clone(), Draw::new(draw.next()));
        hosts.push(format!("client-{number}"));
        sim.client(format!("client-{number}"), async move {
            ledger::run(common.clone(), number, draw).await;
            add(&common.counts.finished);
            Ok(())
        });
    }
    let learning = {
        let (common, plan, draw) = (common.clone(), plan.clone(), Draw::new(draw.next()));
        async move {
            learning::run(common.clone(), plan, draw).await;
            add(&common.counts.finished);
            Ok(())
        }
    };
    hosts.push("driver".into());
    sim.client("driver", learning);
    let (checked, clients) = (common.clone(), counting + 1);
    sim.client("checker", async move {
        while checked.counts.finished.load(Ordering::Relaxed) < clients || !checked.is_calm() {
            sleep(Duration::from_millis(100)).await;
        }
        check(&checked, &plan).await;
        Ok(())
    });
    let replicas = spec.replication_factor as usize;
    let mut world = World {
        draw,
        common,
        nodes,
        map,
        replicas,
        now_ms: 0,
        down: BTreeMap::new(),
        cut: BTreeMap::new(),
        hosts,
        faults: Counters::default(),
    };
    world.run(&mut sim);
    world.outcome()
}

/// Starts the coordinator, over a map store that outlives it.
fn coordinate(sim: &mut Sim<'_>, spec: &LearnerClusterSpec, map: &Arc<MemoryStore>) {
    let mut options = engram_coordinator::Options::new(CLUSTER, "simulated", spec.partitions, spec.workers);
    options.replication_factor = spec.replication_factor;
    let map = Arc::clone(map);
    sim.host(COORDINATOR, move || {
        let (options, map) = (options.clone(), Arc::clone(&map));
        async move {
            let incoming = listen(COORDINATOR_PORT).await?.incoming;
            let coordinator = Coordinator::build(options, map)?;
            coordinator.run_on(incoming, std::future::pending()).await?;
            Ok(())
        }
    });
}

/// Compares all memories at the end with those of a run without faults.
async fn check(common: &Common, plan: &Plan) {
    let client = common.client().await;
    let read = || async {
        let mut scan = client.scan(GetOptions::default()).await?;
        let mut found = BTreeMap::new();
        while let Some(memories) = scan.next().await? {
            found.extend(memories.into_iter().map(|memory| (memory.id, memory.weight.units())));
        }
        Ok::<_, engram_client::Error>((found, client.digest().await?))
    };
    loop {
        match read().await {
            Ok((found, digested)) => {
                if found.len() as u64 != digested.memories {
                    common.trace.fail(format!(
                        "{} memories were read, {} were counted",
                        found.len(),
                        digested.memories
                    ));
                }
                let others: BTreeMap<MemoryId, u32> =
                    found.into_iter().filter(|(id, _)| !plan.ids().contains(id)).collect();
                let expected = plan.expected_digest(&others);
                common.trace.note(format!("{} other memories, digest {}", others.len(), digested.digest));
                if digested.digest != expected {
                    let found = digested.digest;
                    common.trace.fail(format!("the digest is {found}; without faults it is {expected}"));
                }
                return;
            }
            Err(error) => common.trace.note(format!("checker: {}", ledger::kind(&error))),
        }
    }
}

impl World {
    fn run(&mut self, sim: &mut Sim<'_>) {
        let calm_at_ms = QUIET_MS + self.draw.within(6_000, 16_000);
        let mut next_ms = QUIET_MS;
        let mut version = 0;
        loop {
            match sim.step() {
                Ok(true) if self.is_healthy() => return,
                Ok(_) => {}
                Err(error) => return self.common.trace.fail(format!("a host ended: {error}")),
            }
            self.now_ms += 1;
            self.common.trace.set_time(self.now_ms);
            self.nodes.iter().for_each(|node| node.pass(1));
            if let Ok(Some(map)) = self.map.get()
                && map.version != version
            {
                version = map.version;
                let entries: Vec<String> = map
                    .entries()
                    .map(|(partition, entry)| {
                        let isr: Vec<u32> = entry.isr.iter().map(|member| member.ordinal.0).collect();
                        format!(
                            "{partition}:{}@{}{:?}{}",
                            entry.primary,
                            entry.term.0,
                            isr,
                            if entry.activated { "" } else { "?" }
                        )
                    })
                    .collect();
                self.common.trace.note(format!("map {version}: {}", entries.join(" ")));
            }
            if self.common.trace.failure().is_some() {
                return;
            }
            self.restore_links(sim, false);
            if self.now_ms >= calm_at_ms && !self.common.is_calm() {
                self.restore_links(sim, true);
                self.common.trace.note("calm");
                self.common.calm.store(true, Ordering::Relaxed);
            }
            if self.now_ms >= next_ms && !self.common.is_calm() {
                next_ms = self.now_ms + self.draw.within(100, 1_500);
                self.inject(sim);
            }
            if self.now_ms > calm_at_ms + CALM_MS {
                let finished = self.common.counts.finished.load(Ordering::Relaxed);
                let healthy = self.is_healthy();
                return self.common.trace.fail(format!(
                    "{CALM_MS} ms after the last fault {finished} clients have finished; healthy: {healthy}"
                ));
            }
        }
    }

    /// Whether every partition has all its replicas. The map may not know yet that a disk is gone.
    fn is_healthy(&self) -> bool {
        let there = |member: &Member| self.nodes[member.ordinal.0 as usize].has(member.store);
        let healthy =
            |entry: &Entry| entry.isr.len() == self.replicas && entry.activated && entry.isr.iter().all(there);
        self.map.get().ok().flatten().is_some_and(|map| map.entries().all(|(_, entry)| healthy(entry)))
    }

    fn note(&mut self, fault: Fault, text: &str) {
        self.faults.count(fault);
        self.common.trace.note(format!("{fault:?} {text}"));
    }

    /// Ends faults that are over, or all.
    fn restore_links(&mut self, sim: &mut Sim<'_>, all: bool) {
        let now_ms = self.now_ms;
        let due: Vec<Link> =
            self.cut.iter().filter(|(_, (_, until))| all || *until <= now_ms).map(|(link, _)| link.clone()).collect();
        for link in due {
            let (from, to) = &link;
            match self.cut.remove(&link) {
                Some((Fault::Held, _)) => sim.release(from.as_str(), to.as_str()),
                Some((Fault::OneWay, _)) => sim.repair_oneway(from.as_str(), to.as_str()),
                _ => sim.repair(from.as_str(), to.as_str()),
            }
            self.common.trace.note(format!("restored {from} {to}"));
        }
        let due: Vec<String> =
            self.down.iter().filter(|(_, until)| all || **until <= now_ms).map(|(host, _)| host.clone()).collect();
        for host in due {
            self.down.remove(&host);
            self.common.trace.note(format!("{host} starts"));
            sim.bounce(host.as_str());
        }
    }

    /// Injects one fault.
    fn inject(&mut self, sim: &mut Sim<'_>) {
        let until_ms = self.now_ms + self.draw.within(50, 5_000);
        let worker = self.draw.within(0, self.nodes.len() as u64 - 1) as usize;
        let host = self.hosts[worker].clone();
        match self.draw.within(0, 9) {
            0..=4 => self.cut(sim, until_ms),
            5 if !self.down.contains_key(COORDINATOR) => {
                self.note(Fault::CoordinatorKilled, COORDINATOR);
                sim.crash(COORDINATOR);
                self.down.insert(COORDINATOR.to_owned(), until_ms);
            }
            6 | 7 if !self.down.contains_key(&host) => {
                self.note(Fault::Killed, &host);
                sim.crash(host.as_str());
                self.nodes[worker].killed();
                self.down.insert(host, until_ms);
            }
            8 if !self.down.contains_key(&host) => {
                self.note(Fault::PowerLost, &host);
                sim.crash(host.as_str());
                self.nodes[worker].lost_power();
                self.down.insert(host, until_ms);
            }
            // A disk may be lost only if another replica has its data: while all replicas are in sync according to the
            // map, all have it.
            9 if !self.down.contains_key(&host) && self.is_healthy() => {
                self.note(Fault::DiskLost, &host);
                sim.crash(host.as_str());
                let seed = self.draw.next();
                self.nodes[worker].lost_disk(seed);
                self.down.insert(host, until_ms);
            }
            _ => {}
        }
    }

    /// Cuts the link between two hosts, or holds its messages.
    fn cut(&mut self, sim: &mut Sim<'_>, until_ms: u64) {
        let hosts = self.hosts.len() as u64;
        let from = self.draw.within(0, hosts - 1) as usize;
        let to = (from + self.draw.within(1, hosts - 1) as usize) % hosts as usize;
        let link = (self.hosts[from].clone(), self.hosts[to].clone());
        if self.cut.contains_key(&link) || self.cut.contains_key(&(link.1.clone(), link.0.clone())) {
            return;
        }
        let fault = match self.draw.within(0, 2) {
            0 => Fault::Cut,
            1 => Fault::OneWay,
            _ => Fault::Held,
        };
        let (from, to) = &link;
        match fault {
            Fault::OneWay => sim.partition_oneway(from.as_str(), to.as_str()),
            Fault::Held => sim.hold(from.as_str(), to.as_str()),
            _ => sim.partition(from.as_str(), to.as_str()),
        }
        self.note(fault, &format!("{from} {to} until {until_ms}"));
        self.cut.insert(link, (fault, until_ms));
    }

    fn outcome(&self) -> Outcome {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.common.counts;
        Outcome {
            trace_hash: self.common.trace.hash(),
            steps: self.common.trace.steps(),
            simulated_ms: self.now_ms,
            acked: count(&counts.acked),
            unknown: count(&counts.unknown),
            resolved: count(&counts.resolved),
            reads: count(&counts.reads),
            epochs: count(&counts.epochs),
            drivers_died: count(&counts.drivers_died),
            map_versions: self.map.get().ok().flatten().map_or(0, |map| map.version),
            faults: self.faults,
            failure: self.common.trace.failure(),
        }
    }
}
