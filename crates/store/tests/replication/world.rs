//! The stores, the links between them and the map, as a test sees them.

use engram_cluster::{Change, Entry, PartitionMap};
use engram_kernels::Cpu;
use engram_memory::{
    ClusterId, Command, FeatureShape, Law, Member, MemoryId, OnMissing, Ordinal, PartitionId, Record, Request,
    SessionId, Settings, Shape, Updates, Upsert,
};
use engram_store::peer::{Envelope, Message, Proposal};
use engram_store::{
    Clock as _, Committed, Copied, Durability, ManualClock, Options, Peers, SimDisk, Store, Unconfirmed, WriteError,
};
use std::sync::{Arc, Mutex};

pub(crate) type Answer = Result<Committed, WriteError>;
pub(crate) const P: PartitionId = PartitionId(0);

type Sent = (Vec<(Ordinal, Vec<Envelope>)>, Vec<Proposal>);

#[derive(Clone, Default)]
struct Out(Arc<Mutex<Sent>>);

impl Peers for Out {
    fn send(&mut self, to: Ordinal, envelopes: Vec<Envelope>) {
        self.0.lock().unwrap().0.push((to, envelopes));
    }

    fn propose(&mut self, proposals: Vec<Proposal>) {
        self.0.lock().unwrap().1.extend(proposals);
    }
}

pub(crate) struct Node {
    disk: SimDisk,
    store: Option<Store>,
    out: Out,
}

pub(crate) struct World {
    pub(crate) nodes: Vec<Node>,
    pub(crate) entry: Entry,
    version: u64,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) kept_bytes: usize,
    /// Hears nothing of the map.
    pub(crate) deaf: Option<usize>,
    durability: Durability,
    /// What stays on its way until [`World::deliver_delayed`].
    pub(crate) delays: fn(&Message) -> bool,
    delayed: Vec<(Member, Ordinal, Envelope)>,
}

impl World {
    pub(crate) fn new(nodes: u32, copies: u32) -> Self {
        Self::with(nodes, copies, Durability::Sync)
    }

    pub(crate) fn with(nodes: u32, copies: u32, durability: Durability) -> Self {
        let clock = Arc::new(ManualClock::new(10_000_000));
        let mut world = Self {
            nodes: (0..nodes)
                .map(|seed| Node { disk: SimDisk::new(u64::from(seed)), store: None, out: Out::default() })
                .collect(),
            entry: Entry::first(vec![Member {
                ordinal: Ordinal(0),
                store: Default::default(),
                incarnation: Default::default(),
            }]),
            version: 0,
            clock,
            kept_bytes: 1 << 20,
            deaf: None,
            durability,
            delays: |_| false,
            delayed: Vec::new(),
        };
        (0..nodes as usize).for_each(|node| world.start(node));
        world.entry = Entry::first((0..copies as usize).map(|node| world.member(node)).collect());
        world.publish();
        (0..nodes as usize).for_each(|node| world.connect(node));
        world.settle();
        world.wait();
        world
    }

    pub(crate) fn start(&mut self, node: usize) {
        let shape = Shape { partitions: 1, law: Law::Linear, features: FeatureShape::NONE };
        let mut options = Options::new(ClusterId(7), shape, Settings::default());
        options.replication.ordinal = Ordinal(node as u32);
        options.replication.copies = 2;
        options.replication.kept_bytes = self.kept_bytes;
        options.origin = engram_store::Origin { boot: 0, mount: 0 };
        options.wal.durability = self.durability;
        let place = &mut self.nodes[node];
        let (mut store, recovery) =
            Store::open(Arc::new(place.disk.clone()), self.clock.clone(), Box::new(Cpu::new(1)), options).unwrap();
        assert!(recovery.corrupt.is_empty(), "{recovery:?}");
        store.set_peers(Box::new(place.out.clone()));
        place.store = Some(store);
    }

    pub(crate) fn member(&self, node: usize) -> Member {
        self.nodes[node].store.as_ref().unwrap().member()
    }

    pub(crate) fn store(&mut self, node: usize) -> &mut Store {
        self.nodes[node].store.as_mut().unwrap()
    }

    /// Links of a node to all others that live.
    pub(crate) fn connect(&mut self, node: usize) {
        let me = self.member(node);
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            if self.nodes[other].store.is_some() {
                let peer = self.member(other);
                self.store(node).connected(peer);
                self.store(other).connected(me);
            }
        }
    }

    /// Time in which every grant of a process before has ended.
    pub(crate) fn wait(&mut self) {
        self.clock.advance(engram_store::leases::GRANT_MS);
        self.settle();
    }

    pub(crate) fn publish(&mut self) {
        self.version += 1;
        let map = PartitionMap { cluster: ClusterId(7), version: self.version, partitions: vec![self.entry.clone()] };
        let hearing = self.nodes.iter_mut().enumerate().filter(|(node, _)| Some(*node) != self.deaf);
        hearing.filter_map(|(_, node)| node.store.as_mut()).for_each(|store| store.learn(&map));
    }

    pub(crate) fn change(&mut self, change: &Change) {
        self.entry = self.entry.changed(change).unwrap();
        self.publish();
    }

    pub(crate) fn kill(&mut self, node: usize) {
        self.nodes[node].store = None;
        self.nodes[node].disk.kill();
        *self.nodes[node].out.0.lock().unwrap() = Default::default();
    }

    /// Makes the copy of a backup differ, and lets that be found; it is not made anew yet.
    pub(crate) fn damage(&mut self, node: usize) {
        self.store(node).partitions().apply(P, &reinforce(3, 9)).unwrap();
        self.clock.advance(2 * 60 * 60 * 1_000);
        while self.store(node).stats().digests_different == 0 {
            self.step();
        }
        self.store(node).turn().unwrap();
    }

    /// An empty disk at the place of one whose process has ended.
    pub(crate) fn replace_disk(&mut self, node: usize) {
        let seed = (self.nodes.len() + node) as u64;
        self.nodes[node].disk = SimDisk::new(seed);
    }

    pub(crate) fn lose_power(&mut self, node: usize) {
        self.kill(node);
        self.nodes[node].disk.lose_power();
    }

    /// Turns, delivers and decides until nothing happens any more.
    pub(crate) fn settle(&mut self) {
        for _ in 0..200 {
            if self.step() {
                return;
            }
        }
        panic!(
            "it never comes to rest: {:?}",
            self.nodes.iter().map(|node| node.store.as_ref().map(Store::replicas)).collect::<Vec<_>>()
        );
    }

    /// Lets everything arrive that was kept on its way, and delays nothing any more.
    pub(crate) fn deliver_delayed(&mut self) {
        self.delays = |_| false;
        for (from, to, envelope) in std::mem::take(&mut self.delayed) {
            self.store(to.0 as usize).hear(from, vec![envelope]).unwrap();
        }
        self.settle();
    }

    /// One turn of everybody, then everything that was sent; whether nothing was.
    pub(crate) fn step(&mut self) -> bool {
        let mut quiet = true;
        for node in 0..self.nodes.len() {
            if let Some(store) = &mut self.nodes[node].store {
                store.turn().unwrap();
            }
        }
        for node in 0..self.nodes.len() {
            let (sent, proposals) = std::mem::take(&mut *self.nodes[node].out.0.lock().unwrap());
            if self.nodes[node].store.is_none() {
                continue;
            }
            let from = self.member(node);
            quiet &= sent.is_empty() && proposals.is_empty();
            for (to, envelopes) in sent {
                let (late, envelopes): (Vec<_>, Vec<_>) =
                    envelopes.into_iter().partition(|envelope| (self.delays)(&envelope.body));
                self.delayed.extend(late.into_iter().map(|envelope| (from, to, envelope)));
                if let Some(store) = &mut self.nodes[to.0 as usize].store {
                    store.hear(from, envelopes).unwrap();
                }
            }
            for Proposal { expected, change, .. } in proposals {
                if self.entry.expected() == expected {
                    self.change(&change);
                }
            }
        }
        quiet
    }

    pub(crate) fn ask(&mut self, node: usize, record: Record) -> Arc<Mutex<Option<Answer>>> {
        let place = Arc::new(Mutex::new(None));
        let answered = Arc::clone(&place);
        self.store(node).write(vec![(P, record)], move |mut answers| *answered.lock().unwrap() = answers.pop());
        place
    }

    pub(crate) fn write(&mut self, node: usize, record: Record) -> Answer {
        let answer = self.ask(node, record);
        self.settle();
        let answer = answer.lock().unwrap().take();
        answer.expect("answered when all is at rest")
    }

    /// Asks for the memories of the partition by a confirmed read.
    pub(crate) fn confirm(&mut self, node: usize) -> Arc<Mutex<Option<Result<u64, Unconfirmed>>>> {
        let place = Arc::new(Mutex::new(None));
        let answered = Arc::clone(&place);
        let read = move |confirmed: Result<&mut engram_store::Partitions, Unconfirmed>| {
            *answered.lock().unwrap() = Some(confirmed.map(|partitions| partitions.memories()));
        };
        self.store(node).read_confirmed(vec![P], read);
        place
    }

    /// The memories of a copy that lags by at most so much, and where it stands; `None` = none is close enough.
    pub(crate) fn copy(&mut self, node: usize, max_lag_ms: u64) -> Option<(u64, Copied)> {
        let place = Arc::new(Mutex::new(None));
        let answered = Arc::clone(&place);
        self.store(node).read_copies(vec![P], max_lag_ms, move |partitions, copied| {
            *answered.lock().unwrap() = Some((partitions.memories(), copied));
        });
        self.settle();
        for _ in 0..3 {
            if answered_nothing(&place) {
                self.clock.advance(50);
                self.settle();
            }
        }
        let (memories, copied) = place.lock().unwrap().take().expect("answered in its time");
        assert!(copied.len() == 1 || memories == 0, "nothing else is shown");
        copied.first().map(|copied| (memories, *copied))
    }

    /// Everybody grants the first a lease, as beats would.
    pub(crate) fn lease(&mut self) {
        let holder = self.member(0);
        for other in 1..self.nodes.len() {
            let granter = self.member(other);
            let except = self.store(other).grant_lease(holder);
            let until = self.clock.elapsed_ms() + engram_store::leases::LEASE_MS;
            self.store(0).lease_held(granter, until, except);
        }
    }

    pub(crate) fn digests(&mut self) -> Vec<engram_memory::Digest> {
        let stores = self.nodes.iter_mut().filter_map(|node| node.store.as_mut());
        stores.filter_map(|store| store.partitions().replica_digest(P).unwrap()).collect()
    }
}

pub(crate) fn answered_nothing<T>(place: &Mutex<Option<T>>) -> bool {
    place.lock().unwrap().is_none()
}

pub(crate) fn upsert(ids: std::ops::Range<u64>) -> Record {
    Record::bare(Command::Upsert(Upsert { ids: ids.map(MemoryId).collect(), ..Upsert::default() }))
}

pub(crate) fn reinforce(id: u64, seq: u64) -> Record {
    let updates =
        Updates::ById { ids: vec![MemoryId(id)], deltas: vec![1 << 20], on_missing: OnMissing::Report, keys: None };
    let request = Request { session: SessionId { opened_ms: 9_999_000, random: 5 }, seq };
    Record { request: Some(request), command: Command::Reinforce(updates) }
}
