//! A test cluster: stores, links between them, and the map.

use engram_cluster::{Change, Entry, PartitionMap};
use engram_kernels::Cpu;
use engram_memory::{
    ClusterId, Command, FeatureShape, Law, Member, MemoryId, OnMissing, Ordinal, PartitionId, Record, Request,
    SessionId, Settings, Shape, Updates, Upsert,
};
use engram_store::peer::{Envelope, Message, Proposal};
use engram_store::{
    Clock as _, CommittedWrite, ConfirmError, Disk as _, Durability, ManualClock, Options, Peers, ReplicaPosition,
    SimDisk, Store, WriteError,
};
use parking_lot::Mutex;
use std::sync::Arc;

pub(crate) type Answer = Result<CommittedWrite, WriteError>;
pub(crate) const P: PartitionId = PartitionId(0);

type Sent = (Vec<(Ordinal, Vec<Envelope>)>, Vec<Proposal>);

#[derive(Clone, Default)]
struct SentMessages(Arc<Mutex<Sent>>);

impl Peers for SentMessages {
    fn send(&mut self, to: Ordinal, envelopes: Vec<Envelope>) {
        self.0.lock().0.push((to, envelopes));
    }

    fn propose(&mut self, proposals: Vec<Proposal>) {
        self.0.lock().1.extend(proposals);
    }
}

pub(crate) struct Node {
    disk: SimDisk,
    store: Option<Store>,
    out: SentMessages,
}

pub(crate) struct TestCluster {
    pub(crate) nodes: Vec<Node>,
    pub(crate) entry: Entry,
    /// Entries of the further partitions.
    pub(crate) others: Vec<Entry>,
    version: u64,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) retained_bytes: usize,
    /// Node that does not receive the map.
    pub(crate) without_map: Option<usize>,
    durability: Durability,
    /// Messages held back until [`TestCluster::deliver_delayed`].
    pub(crate) delays: fn(&Message) -> bool,
    delayed: Vec<(Member, Ordinal, Envelope)>,
}

impl TestCluster {
    pub(crate) fn new(nodes: u32, replicas: u32) -> Self {
        Self::with(nodes, replicas, Durability::Sync)
    }

    pub(crate) fn with(nodes: u32, replicas: u32, durability: Durability) -> Self {
        Self::with_partitions(nodes, replicas, durability, 1)
    }

    pub(crate) fn with_partitions(nodes: u32, replicas: u32, durability: Durability, partitions: usize) -> Self {
        let clock = Arc::new(ManualClock::new(10_000_000));
        let mut cluster = Self {
            nodes: (0..nodes)
                .map(|seed| Node { disk: SimDisk::new(u64::from(seed)), store: None, out: SentMessages::default() })
                .collect(),
            entry: Entry::first(vec![Member {
                ordinal: Ordinal(0),
                store: Default::default(),
                incarnation: Default::default(),
            }]),
            others: Vec::new(),
            version: 0,
            clock,
            retained_bytes: 1 << 20,
            without_map: None,
            durability,
            delays: |_| false,
            delayed: Vec::new(),
        };
        cluster.others = vec![cluster.entry.clone(); partitions - 1];
        (0..nodes as usize).for_each(|node| cluster.start(node));
        cluster.entry = Entry::first((0..replicas as usize).map(|node| cluster.member(node)).collect());
        cluster.others.fill(cluster.entry.clone());
        cluster.publish();
        (0..nodes as usize).for_each(|node| cluster.connect(node));
        cluster.settle();
        cluster.wait();
        cluster
    }

    pub(crate) fn start(&mut self, node: usize) {
        let shape = Shape { partitions: 1 + self.others.len() as u32, law: Law::Linear, features: FeatureShape::NONE };
        let mut options = Options::new(ClusterId(7), shape, Settings::default());
        options.replication.ordinal = Ordinal(node as u32);
        options.replication.replicas = 2;
        options.replication.retained_bytes = self.retained_bytes;
        options.origin = engram_store::Origin { boot: 0, mount: 0 };
        options.wal.durability = self.durability;
        let slot = &mut self.nodes[node];
        let (mut store, recovery) =
            Store::open(Arc::new(slot.disk.clone()), self.clock.clone(), Box::new(Cpu::new(1)), options).unwrap();
        assert!(recovery.corrupt.is_empty(), "{recovery:?}");
        store.set_peers(Box::new(slot.out.clone()));
        slot.store = Some(store);
    }

    pub(crate) fn member(&self, node: usize) -> Member {
        self.nodes[node].store.as_ref().unwrap().member()
    }

    pub(crate) fn store(&mut self, node: usize) -> &mut Store {
        self.nodes[node].store.as_mut().unwrap()
    }

    /// Connects a node to all running ones.
    pub(crate) fn connect(&mut self, node: usize) {
        let me = self.member(node);
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            if self.nodes[other].store.is_some() {
                let peer = self.member(other);
                self.store(node).connect_peer(peer);
                self.store(other).connect_peer(me);
            }
        }
    }

    /// Advances the clock until all grants of previous processes have expired.
    pub(crate) fn wait(&mut self) {
        self.clock.advance(engram_store::leases::GRANT_MS);
        self.settle();
    }

    pub(crate) fn publish(&mut self) {
        self.version += 1;
        let partitions = [&self.entry].into_iter().chain(&self.others).cloned().collect();
        let map = PartitionMap { cluster: ClusterId(7), version: self.version, partitions };
        let receivers = self.nodes.iter_mut().enumerate().filter(|(node, _)| Some(*node) != self.without_map);
        receivers.filter_map(|(_, node)| node.store.as_mut()).for_each(|store| store.update_map(&map));
    }

    pub(crate) fn change(&mut self, change: &Change) {
        self.change_of(P, change);
    }

    pub(crate) fn change_of(&mut self, partition: PartitionId, change: &Change) {
        let entry = self.entry_of(partition);
        *entry = entry.apply(change).unwrap();
        self.publish();
    }

    pub(crate) fn entry_of(&mut self, partition: PartitionId) -> &mut Entry {
        match partition.0 {
            0 => &mut self.entry,
            other => &mut self.others[other as usize - 1],
        }
    }

    pub(crate) fn kill(&mut self, node: usize) {
        self.nodes[node].store = None;
        self.nodes[node].disk.kill();
        *self.nodes[node].out.0.lock() = Default::default();
    }

    /// Makes the state of a backup differ until that is detected, but not repaired yet.
    pub(crate) fn damage(&mut self, node: usize) {
        self.store(node).partitions().apply(P, &reinforce(3, 9)).unwrap();
        self.clock.advance(2 * 60 * 60 * 1_000);
        while self.store(node).stats().digest_mismatches == 0 {
            self.step();
        }
        self.store(node).turn().unwrap();
    }

    /// Flips a bit of a payload on the disk of a node.
    pub(crate) fn flip_payload_bit(&mut self, node: usize) {
        let disk = &self.nodes[node].disk;
        let segment = disk.list().unwrap().into_iter().find(|name| name.starts_with("payload-")).unwrap();
        disk.flip_bit(&segment, 8 * 10_000);
    }

    /// Limits the bytes that can still be written to the disk of a node; `None` removes the limit.
    pub(crate) fn set_free_space(&mut self, node: usize, bytes: Option<u64>) {
        let disk = &self.nodes[node].disk;
        let used: usize = disk.list().unwrap().iter().map(|name| disk.bytes(name).len()).sum();
        disk.set_capacity(bytes.map(|bytes| bytes + used as u64));
    }

    /// Replaces the disk of a stopped node by an empty one.
    pub(crate) fn replace_disk(&mut self, node: usize) {
        let seed = (self.nodes.len() + node) as u64;
        self.nodes[node].disk = SimDisk::new(seed);
    }

    pub(crate) fn lose_power(&mut self, node: usize) {
        self.kill(node);
        self.nodes[node].disk.lose_power();
    }

    /// Steps until the cluster is idle.
    pub(crate) fn settle(&mut self) {
        for _ in 0..200 {
            if self.step() {
                return;
            }
        }
        panic!(
            "the cluster does not become idle: {:?}",
            self.nodes.iter().map(|node| node.store.as_ref().map(Store::replicas)).collect::<Vec<_>>()
        );
    }

    /// Delivers all delayed messages and stops delaying.
    pub(crate) fn deliver_delayed(&mut self) {
        self.delays = |_| false;
        for (from, to, envelope) in std::mem::take(&mut self.delayed) {
            self.store(to.0 as usize).receive(from, vec![envelope]).unwrap();
        }
        self.settle();
    }

    /// Runs one turn of every node and delivers what was sent; returns whether nothing was.
    pub(crate) fn step(&mut self) -> bool {
        let mut quiet = true;
        for node in 0..self.nodes.len() {
            if let Some(store) = &mut self.nodes[node].store {
                store.turn().unwrap();
            }
        }
        for node in 0..self.nodes.len() {
            let (sent, proposals) = std::mem::take(&mut *self.nodes[node].out.0.lock());
            if self.nodes[node].store.is_none() {
                continue;
            }
            let from = self.member(node);
            quiet &= sent.is_empty() && proposals.is_empty();
            for (to, envelopes) in sent {
                let (held, envelopes): (Vec<_>, Vec<_>) =
                    envelopes.into_iter().partition(|envelope| (self.delays)(&envelope.body));
                self.delayed.extend(held.into_iter().map(|envelope| (from, to, envelope)));
                if let Some(store) = &mut self.nodes[to.0 as usize].store {
                    store.receive(from, envelopes).unwrap();
                }
            }
            for Proposal { partition, expected, change } in proposals {
                if self.entry_of(partition).expectation() == expected {
                    self.change_of(partition, &change);
                }
            }
        }
        quiet
    }

    pub(crate) fn submit(&mut self, node: usize, record: Record) -> Arc<Mutex<Option<Answer>>> {
        self.submit_to(P, node, record)
    }

    pub(crate) fn submit_to(
        &mut self,
        partition: PartitionId,
        node: usize,
        record: Record,
    ) -> Arc<Mutex<Option<Answer>>> {
        let slot = Arc::new(Mutex::new(None));
        let result = Arc::clone(&slot);
        self.store(node).write(vec![(partition, record)], move |mut answers| *result.lock() = answers.pop());
        slot
    }

    pub(crate) fn write(&mut self, node: usize, record: Record) -> Answer {
        self.write_to(P, node, record)
    }

    pub(crate) fn write_to(&mut self, partition: PartitionId, node: usize, record: Record) -> Answer {
        let answer = self.submit_to(partition, node, record);
        self.settle();
        let answer = answer.lock().take();
        answer.expect("answered once the cluster is idle")
    }

    /// Reads the number of memories by a confirmed read.
    pub(crate) fn confirm(&mut self, node: usize) -> Arc<Mutex<Option<Result<u64, ConfirmError>>>> {
        let slot = Arc::new(Mutex::new(None));
        let result = Arc::clone(&slot);
        let read = move |confirmed: Result<&mut engram_store::Partitions, ConfirmError>| {
            *result.lock() = Some(confirmed.map(|partitions| partitions.memories()));
        };
        self.store(node).read_confirmed(vec![P], read);
        slot
    }

    /// Reads the number of memories of a replica that lags at most `max_lag_ms`, and its position; `None` if it lags more.
    pub(crate) fn read_replica(&mut self, node: usize, max_lag_ms: u64) -> Option<(u64, ReplicaPosition)> {
        let slot = Arc::new(Mutex::new(None));
        let result = Arc::clone(&slot);
        self.store(node).read_replicas(vec![P], max_lag_ms, move |partitions, positions| {
            *result.lock() = Some((partitions.memories(), positions));
        });
        self.settle();
        for _ in 0..3 {
            if is_unanswered(&slot) {
                self.clock.advance(50);
                self.settle();
            }
        }
        let (memories, positions) = slot.lock().take().expect("answered within the timeout");
        assert!(positions.len() == 1 || memories == 0, "no other partition is visible");
        positions.first().map(|positions| (memories, *positions))
    }

    /// All nodes grant the first one a lease, as heartbeats would.
    pub(crate) fn lease(&mut self) {
        let holder = self.member(0);
        for other in 1..self.nodes.len() {
            let granter = self.member(other);
            let except = self.store(other).grant_lease(holder);
            let until = self.clock.elapsed_ms() + engram_store::leases::LEASE_MS;
            self.store(0).record_lease(granter, until, except);
        }
    }

    pub(crate) fn digests(&mut self) -> Vec<engram_memory::Digest> {
        let stores = self.nodes.iter_mut().filter_map(|node| node.store.as_mut());
        stores.filter_map(|store| store.partitions().replica_digest(P).unwrap()).collect()
    }
}

pub(crate) fn is_unanswered<T>(slot: &Mutex<Option<T>>) -> bool {
    slot.lock().is_none()
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
