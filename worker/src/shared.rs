//! What the services, the heartbeat and the pages of one worker share.

use crate::admission::Admission;
use crate::bootstrap::Bootstrap;
use crate::device::Device;
use crate::engine::Engine;
use crate::hands;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::peers::{Greeter, Links, MapKeeper, OPINION_MS, Proposals, Witness};
use crate::processors::Waits;
use crate::rights::Accounts;
use crate::roster::Roster;
use crate::runs::Runs;
use crate::view::View;
use engram_client::{Client, Network};
use engram_cluster::PartitionMap;
use engram_identity::{Expected, Keys, Reason, Role};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId, Shape};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::Clock;
use engram_store::leases::GRANT_MS;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;
use tokio::sync::{Semaphore, watch};

/// One worker.
pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) shape: Shape,
    pub(crate) member: Member,
    /// The one that the store has too.
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) network: Network,
    /// Who this process is to others, under TLS.
    pub(crate) keys: Option<Arc<Keys>>,
    /// Whose tokens clients may show instead of a certificate.
    pub(crate) accounts: Option<Arc<Accounts>>,
    pub(crate) engine: Engine,
    /// To the other workers, and to this one for what is asked of all.
    pub(crate) peers: Client,
    pub(crate) metrics: Metrics,
    /// How much of its work may be under way.
    pub(crate) admission: Admission,
    /// The learning runs that are driven here.
    pub(crate) runs: Runs,
    pub(crate) view: watch::Sender<View>,
    /// Who this worker is, to others.
    pub(crate) greeter: Greeter,
    /// Open streams to the stores of other workers.
    pub(crate) links: Arc<Links>,
    /// What the replicas here ask of the map.
    pub(crate) proposals: Arc<Proposals>,
    /// The map where it is kept, if this worker reaches it.
    pub(crate) map_keeper: Option<MapKeeper>,
    witness: Mutex<Witness>,
    pub(crate) coordinators: Coordinators,
    pub(crate) roster: Roster,
    /// Version of the newest map that this disk had seen when this process began; 0 = none.
    pub(crate) seen_before: AtomicU64,
    /// The newest question of a coordinator for what this disk has seen; 0 = none.
    pub(crate) testify: watch::Sender<u64>,
    /// Planned moves of primaryship that the store was told of.
    hand_overs: Mutex<HandOvers>,
    /// Who is about to be stopped, as far as the store was told.
    leavers: Mutex<BTreeSet<Ordinal>>,
    /// Room for requests that wait for a partition that is coming here.
    pub(crate) held: Semaphore,
    /// Set once: no request is taken any more.
    pub(crate) stopping: watch::Sender<bool>,
    /// About to be stopped: it hands over what it leads.
    pub(crate) leaving: AtomicBool,
    /// How the load of a new disk stands.
    pub(crate) bootstrap: Bootstrap,
    /// It stops to be started again at once.
    pub(crate) begins_again: AtomicBool,
    /// Somebody asked for an orderly stop.
    pub(crate) asked_to_stop: tokio::sync::Notify,
    pub(crate) broadcast: RwLock<Option<v1::BroadcastQualityRequest>>,
    pub(crate) started: Instant,
    /// The same by the clock of beats and leases, in milliseconds.
    started_ms: u64,
    pub(crate) recovery: String,
    pub(crate) device: Device,
    pub(crate) last_snapshot_ms: AtomicU64,
    /// When the thread of the beats turned last, by the clock of beats and leases.
    pub(crate) turned_ms: AtomicU64,
    /// Lateness of timers on the runtime of the services, in milliseconds.
    pub(crate) loop_lag_ms: AtomicU64,
}

/// Planned moves of primaryship.
#[derive(Debug, Default)]
struct HandOvers {
    /// What each coordinator wants, by its address. They decide the same, but not in one moment: what one does not name yet is not
    /// called off, or a partition would be stopped and let go again.
    wanted: BTreeMap<String, BTreeMap<PartitionId, Ordinal>>,
    /// What the store was told.
    asked: BTreeMap<PartitionId, Ordinal>,
}

/// What a worker is made of before it runs.
pub(crate) struct Parts {
    pub(crate) options: Options,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) network: Network,
    pub(crate) keys: Option<Arc<Keys>>,
    pub(crate) greeter: Greeter,
    pub(crate) links: Arc<Links>,
    pub(crate) proposals: Arc<Proposals>,
    pub(crate) engine: Engine,
    pub(crate) peers: Client,
    pub(crate) recovery: String,
    pub(crate) device: Device,
}

/// Whether a coordinator is heard.
pub(crate) struct Coordinators {
    clock: Arc<dyn Clock>,
    streams: AtomicUsize,
    /// When the last stream ended, in milliseconds of the clock that counts suspends; at first when this worker started.
    lost_ms: AtomicU64,
}

impl Coordinators {
    fn new(clock: Arc<dyn Clock>) -> Self {
        Self { streams: AtomicUsize::new(0), lost_ms: AtomicU64::new(clock.elapsed_ms()), clock }
    }

    /// A stream is open while the value lives.
    pub(crate) fn heard(&self) -> impl Drop + '_ {
        struct Open<'a>(&'a Coordinators);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                self.0.lost_ms.store(self.0.clock.elapsed_ms(), Ordering::Release);
                self.0.streams.fetch_sub(1, Ordering::AcqRel);
            }
        }
        self.streams.fetch_add(1, Ordering::AcqRel);
        Open(self)
    }

    /// For how long none has been heard; 0 = one is.
    pub(crate) fn unheard_ms(&self) -> u64 {
        if self.streams.load(Ordering::Acquire) > 0 {
            return 0;
        }
        self.clock.elapsed_ms().saturating_sub(self.lost_ms.load(Ordering::Acquire))
    }
}

impl Shared {
    /// The network towards coordinators: over TLS nobody else is believed.
    pub(crate) fn to_coordinators(&self) -> Network {
        self.network.to(Expected::any(Role::Coordinator))
    }

    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { options, clock, network, keys, greeter, links, proposals, engine, peers, recovery, device } = parts;
        let tokens = options.tls.as_ref().and_then(|tls| tls.tokens.as_ref());
        let accounts = tokens.map(|files| Arc::new(Accounts::open(files, options.cluster)));
        if let Some(accounts) = &accounts {
            accounts.follow();
        }
        Self {
            shape: options.shape(),
            metrics: Metrics::new(&options.cluster_name, options.ordinal, &links.traffic, keys.is_some()),
            admission: Admission::new(if network.is_simulated() { Waits::unknown() } else { Waits::here() }),
            roster: Roster::new(&options.coordinators, !network.is_simulated()),
            map_keeper: MapKeeper::of(&options),
            options,
            member: greeter.member,
            network,
            keys,
            accounts,
            engine,
            peers,
            runs: Runs::default(),
            view: watch::Sender::new(View::default()),
            greeter,
            links,
            proposals,
            witness: Mutex::new(Witness::new(clock.elapsed_ms())),
            coordinators: Coordinators::new(Arc::clone(&clock)),
            seen_before: AtomicU64::new(0),
            testify: watch::Sender::new(0),
            hand_overs: Mutex::default(),
            leavers: Mutex::default(),
            held: Semaphore::new(hands::HELD),
            started_ms: clock.elapsed_ms(),
            turned_ms: AtomicU64::new(clock.elapsed_ms()),
            clock,
            stopping: watch::Sender::new(false),
            leaving: AtomicBool::new(false),
            bootstrap: Bootstrap::default(),
            begins_again: AtomicBool::new(false),
            asked_to_stop: tokio::sync::Notify::new(),
            broadcast: RwLock::default(),
            started: Instant::now(),
            recovery,
            device,
            last_snapshot_ms: AtomicU64::new(0),
            loop_lag_ms: AtomicU64::new(0),
        }
    }

    /// The clock of beats and leases.
    pub(crate) fn elapsed_ms(&self) -> u64 {
        self.clock.elapsed_ms()
    }

    pub(crate) const fn ordinal(&self) -> Ordinal {
        self.member.ordinal
    }

    pub(crate) const fn partitions(&self) -> u32 {
        self.shape.partitions
    }

    /// The partitions that are served here.
    pub(crate) fn served(&self) -> Vec<PartitionId> {
        self.engine.served(self.partitions())
    }

    pub(crate) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Whether it is about to be stopped and shall be given nothing to lead.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Has a map, serves all that it gives to this process, and could take over from a partner.
    pub(crate) fn is_ready(&self) -> bool {
        !self.is_stopping() && self.is_settled() && self.is_complete()
    }

    /// Whether this process is old enough to take over: until the leases have ended that the process before it may have granted it serves
    /// nothing, and without an opinion it is no witness. Whoever stops workers one after another waits for it.
    fn is_settled(&self) -> bool {
        let first = self.options.spec.replication_factor == 1 || self.member.incarnation == Incarnation(1);
        first || self.elapsed_ms().saturating_sub(self.started_ms) >= OPINION_MS.max(GRANT_MS)
    }

    /// Serves every partition whose primary by the map is at this place. One that still stands under the process before this one waits
    /// to be given to it, or to another.
    fn is_complete(&self) -> bool {
        let Some(map) = self.view.borrow().map.clone() else { return false };
        let mine = map.entries().filter(|(_, entry)| entry.primary == self.ordinal());
        let mut served =
            mine.map(|(partition, entry)| entry.served_by(&self.member) && self.engine.position(partition).is_some());
        served.all(|served| served)
    }

    /// Counts somebody who was turned away for who they are or what they may.
    pub(crate) fn count_refusal(&self, reason: Reason) {
        if let Some(keys) = &self.keys {
            keys.refusals().count(reason);
        }
    }

    /// What keeps the store from serving, if something does.
    pub(crate) fn fault(&self) -> Option<String> {
        self.engine.stats().fault
    }

    /// Takes what a coordinator says; whether it is news.
    pub(crate) fn hear(&self, coordinator: &str, mut reply: v1::BeatReply) -> bool {
        for member in &mut reply.members {
            if let Some(detour) = self.options.peer_detours.get(&member.ordinal) {
                member.peer_address.clone_from(detour);
            }
        }
        let news = self.view.send_if_modified(|view| view.take(&reply, self.options.cluster, self.shape.partitions));
        if news {
            self.tell_map();
        }
        self.hand_over(coordinator, &reply.hand_overs);
        self.testify.send_if_modified(|asked| std::mem::replace(asked, reply.testify) != reply.testify);
        news
    }

    /// Version of the newest map that this disk has seen; 0 = none.
    pub(crate) fn seen_version(&self) -> u64 {
        self.view.borrow().version().max(self.seen_before.load(Ordering::Acquire))
    }

    /// Gives partitions to those who shall lead them: all that a coordinator wants now, so that one that nobody names any more is called
    /// off. One that is not heard any more wants nothing.
    pub(crate) fn hand_over(&self, coordinator: &str, wanted: &[v1::HandOver]) {
        let mut moves = self.hand_overs.lock().unwrap_or_else(PoisonError::into_inner);
        if wanted.is_empty() {
            moves.wanted.remove(coordinator);
        } else {
            let wanted = wanted.iter().map(|move_| (PartitionId(move_.partition), Ordinal(move_.to))).collect();
            moves.wanted.insert(coordinator.to_owned(), wanted);
        }
        // Where two differ the first one counts.
        let all: BTreeMap<PartitionId, Ordinal> =
            moves.wanted.values().rev().flatten().map(|(partition, to)| (*partition, *to)).collect();
        for partition in moves.asked.keys().filter(|partition| !all.contains_key(partition)) {
            // To itself: it goes on leading.
            self.engine.hand_over(*partition, self.ordinal());
        }
        for (partition, to) in &all {
            self.engine.hand_over(*partition, *to);
        }
        moves.asked = all;
    }

    /// Takes a map that was read where it is kept.
    pub(crate) fn read_map(&self, map: PartitionMap) {
        if self.view.send_if_modified(|view| view.take_map(map, self.options.cluster, self.shape.partitions)) {
            self.tell_map();
        }
    }

    /// Tells the store who leaves, where that is news. Where this worker is about to be stopped itself it shrinks nothing: of all that
    /// are stopped at once none is alone for it.
    pub(crate) fn tell_leavers(&self) {
        let leavers = if self.is_leaving() { BTreeSet::new() } else { self.view.borrow().leavers() };
        let mut told = self.leavers.lock().unwrap_or_else(PoisonError::into_inner);
        if *told != leavers {
            self.engine.leaving(leavers.clone());
            *told = leavers;
        }
    }

    /// Tells the store and the way to the other workers what the view says.
    fn tell_map(&self) {
        self.tell_leavers();
        let view = self.view.borrow();
        if let Some(map) = &view.map {
            self.engine.learn(Arc::clone(map));
        }
        if let Some(map) = view.client_map(&self.options.cluster_name, self.shape.features.dimension) {
            self.peers.set_map(map);
        }
    }

    /// What this worker thinks of its partners.
    pub(crate) fn witness(&self) -> MutexGuard<'_, Witness> {
        // A panic while it was held left a detector behind that goes on with the next event.
        self.witness.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What to tell of a partition that is not served here.
    pub(crate) fn not_primary(&self, partition: PartitionId) -> Problem {
        let view = self.view.borrow();
        let owner = view.owner(partition);
        let text = match owner {
            Some(owner) if owner == self.ordinal() => {
                format!("partition {partition} is being activated on this worker")
            }
            Some(owner) => format!("partition {partition} is served by worker {owner}"),
            None => "the partition map is not known yet".to_owned(),
        };
        let mut problem = Problem::of(ProblemKind::NotPrimary, text).at(partition);
        problem.map_version = view.version();
        problem.primary = owner.map(|owner| owner.0);
        problem
    }

    /// Checks a partition number.
    pub(crate) fn check_partition(&self, partition: u32) -> Result<PartitionId, Problem> {
        if partition < self.partitions() {
            return Ok(PartitionId(partition));
        }
        let text = format!("partition: {partition} is not allowed; allowed: 0 to {}", self.partitions() - 1);
        Err(Problem::of(ProblemKind::Invalid, text))
    }
}
