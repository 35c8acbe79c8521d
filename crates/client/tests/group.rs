//! Elastic groups in one process: members are groups of threads, connections are in memory, and members are killed at random points of their
//! reductions.
//!
//! `ENGRAM_GROUP_SEED=<seed> cargo test -p engram-client --test group` repeats a seed.
#![allow(clippy::unwrap_used, reason = "the helpers are tests, too")]

use engram_client::group::{
    Bucket, Committed, Connect, Fetch, Generation, Group, Outcome, Parts, PeerAddress, Readiness, Signal, State,
};
use engram_collective::group::{
    MemberId, Notice, Position, Quorum, Record, Report, Service, ServiceAction, ServiceEvent, Settings, Timing,
};
use engram_collective::message::Tag;
use engram_collective::transport::{Error, Memory, Transport, Wait, memory_group};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const STEPS: u64 = 24;
/// Elements of the buckets: of one chunk, and of several parts.
const BUCKETS: [usize; 3] = [3, 700, 2_000];
/// Nothing here takes longer, on any machine.
const LIMIT: Duration = Duration::from_secs(120);

fn timing() -> Timing {
    Timing::new(1_000)
}

/// Gradient sum of one element: an integer, so that every sum is exact.
fn gradient(member: MemberId, step: u64, bucket: usize, element: usize) -> f32 {
    ((member.0 * 31 + step * 17 + bucket as u64 * 7 + element as u64) % 1_009) as f32
}

fn samples(member: MemberId, step: u64) -> u64 {
    1 + (member.0 + step) % 5
}

/// Kills a member after a number of messages.
struct Fuse {
    left: AtomicI64,
    is_killed: AtomicBool,
}

impl Fuse {
    fn new(messages: i64) -> Arc<Self> {
        Arc::new(Self { left: AtomicI64::new(messages), is_killed: AtomicBool::new(false) })
    }

    fn is_killed(&self) -> bool {
        self.is_killed.load(Ordering::Acquire)
    }

    fn burn(&self) -> bool {
        if self.left.fetch_sub(1, Ordering::AcqRel) <= 0 {
            self.is_killed.store(true, Ordering::Release);
        }
        self.is_killed()
    }
}

/// A connection of a process that may be killed.
struct Killable {
    memory: Option<Memory>,
    place: (usize, usize),
    fuse: Arc<Fuse>,
}

impl Killable {
    fn alive(&mut self) -> Result<&mut Memory, Error> {
        if self.fuse.burn() {
            self.memory = None;
        }
        self.memory.as_mut().ok_or(Error::Cancelled)
    }
}

impl Transport for Killable {
    fn rank(&self) -> usize {
        self.place.0
    }

    fn ranks(&self) -> usize {
        self.place.1
    }

    fn send(&mut self, to: usize, tag: Tag, payload: &[u8], wait: &mut Wait<'_>) -> Result<(), Error> {
        self.alive()?.send(to, tag, payload, wait)
    }

    fn receive(&mut self, tag: Tag, into: &mut [u8], wait: &mut Wait<'_>) -> Result<(), Error> {
        self.alive()?.receive(tag, into, wait)
    }
}

type Places = Vec<Option<Memory>>;
/// Where a process receives its messages, while it lives.
type Inbox = (Sender<Signal>, Arc<Fuse>);

/// The network of a cluster, and what its processes share with the host.
#[derive(Default)]
struct World {
    generations: Mutex<HashMap<u64, Places>>,
    /// State of each process after its newest step.
    states: Mutex<HashMap<MemberId, State>>,
    /// What was committed, per step.
    steps: Mutex<BTreeMap<u64, (u64, Vec<MemberId>)>>,
    inboxes: Mutex<HashMap<MemberId, Inbox>>,
    is_over: AtomicBool,
}

struct Network {
    world: Arc<World>,
    fuse: Arc<Fuse>,
}

impl Connect for Network {
    fn connect(&mut self, generation: &Generation, _limit: Duration) -> Result<Box<dyn Transport + Send>, Error> {
        let ranks = generation.members.len();
        let mut generations = self.world.generations.lock().unwrap();
        let places = || memory_group(ranks).into_iter().map(Some).collect::<Places>();
        let memory = generations.entry(generation.number).or_insert_with(places)[generation.rank].take();
        Ok(Box::new(Killable { memory, place: (generation.rank, ranks), fuse: Arc::clone(&self.fuse) }))
    }
}

/// Runs the membership service, and replaces it at some points as a failover would. Returns the number of generations.
fn host(world: &World, reports: &Receiver<(MemberId, Option<Report>)>, min_members: usize, seed: u64) -> u64 {
    let settings = Settings { timing: timing(), min_members, quorum: Quorum::StoreTerm };
    let mut random = StdRng::seed_from_u64(seed);
    let (started, mut record, mut term) = (Instant::now(), Record::default(), 1);
    let now_ms = || started.elapsed().as_millis() as u64;
    let mut service = Service::new(record.clone(), term, settings, now_ms());
    let (mut dead, mut next) = (Vec::new(), Instant::now());
    while !world.is_over.load(Ordering::Acquire) {
        let mut events = Vec::new();
        if let Ok((member, report)) = reports.recv_timeout(next.saturating_duration_since(Instant::now())) {
            events.push(report.map_or(ServiceEvent::ProbeAnswered(member), ServiceEvent::Report));
        } else {
            next = Instant::now() + Duration::from_millis(50);
            events.push(ServiceEvent::Tick);
            let inboxes = world.inboxes.lock().unwrap();
            let killed = inboxes.iter().filter(|(id, (_, fuse))| fuse.is_killed() && !dead.contains(*id));
            let killed: Vec<MemberId> = killed.map(|(id, _)| *id).collect();
            // Half of the deaths are seen; the others are found by silence and by failed connections.
            events.extend(killed.iter().filter(|_| random.random_bool(0.5)).map(|id| ServiceEvent::Died(*id)));
            dead.extend(killed);
            if random.random_bool(0.01) {
                term += 1;
                service = Service::new(record.clone(), term, settings, now_ms());
            }
        }
        for event in events {
            let mut actions = service.step(event, now_ms());
            while !actions.is_empty() {
                let mut more = Vec::new();
                for action in actions {
                    match action {
                        ServiceAction::Send { to, term, notice } => send(world, to, term, notice),
                        ServiceAction::Probe(member) => deliver(world, member, Signal::Probe),
                        ServiceAction::Record { record: new, .. } => {
                            record = new;
                            let generation = record.generation;
                            more.extend(service.step(ServiceEvent::Recorded { generation }, now_ms()));
                        }
                        _ => {}
                    }
                }
                actions = more;
            }
        }
    }
    record.generation
}

fn send(world: &World, to: MemberId, term: u64, notice: Notice) {
    let named = match &notice {
        Notice::Publish { record, .. } => record.members.clone(),
        Notice::CatchUp { sources, .. } => sources.clone(),
        _ => Vec::new(),
    };
    // The address of a state is the id of its member.
    let address = |id: MemberId| (id, PeerAddress { reduce: String::new(), state: id.0.to_string() });
    deliver(world, to, Signal::Notice(term, notice, named.into_iter().map(address).collect()));
}

fn deliver(world: &World, to: MemberId, signal: Signal) {
    let inboxes = world.inboxes.lock().unwrap();
    if let Some((inbox, _)) = inboxes.get(&to).filter(|(_, fuse)| !fuse.is_killed()) {
        // The member may have ended.
        let _ = inbox.send(signal);
    }
}

struct Numbers {
    key: u32,
    sums: Vec<f32>,
    reduced: Vec<f32>,
}

impl Bucket for Numbers {
    fn key(&self) -> u32 {
        self.key
    }

    fn parts(&mut self) -> (&[f32], &mut [f32]) {
        (&self.sums, &mut self.reduced)
    }
}

/// Returns a function that finds the state of another member in this process.
fn fetch(world: &Arc<World>) -> Fetch {
    let world = Arc::clone(world);
    Box::new(move |position, sources, done| {
        let world = Arc::clone(&world);
        std::thread::spawn(move || {
            let end = Instant::now() + Duration::from_secs(2);
            let find = || {
                let states = world.states.lock().unwrap();
                let ids = sources.iter().filter_map(|it| Some(MemberId(it.state.parse().ok()?)));
                ids.filter_map(|id| states.get(&id)).find(|it| it.position.step >= position.step).cloned()
            };
            loop {
                let found = find();
                if found.is_some() || Instant::now() > end {
                    return done(found);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    })
}

/// Checks that a committed step is the exact sum over one membership, the same on all members.
fn check(world: &World, committed: &Committed, buckets: &mut [Box<dyn Bucket>]) {
    let Committed { step, generation, members, samples: total } = committed;
    let counted: u64 = members.iter().map(|member| samples(*member, *step)).sum();
    assert_eq!(*total, counted, "samples of step {step}");
    for (number, bucket) in buckets.iter_mut().enumerate() {
        for (element, value) in bucket.parts().1.iter().enumerate() {
            let sum: f32 = members.iter().map(|member| gradient(*member, *step, number, element)).sum();
            assert_eq!(*value, sum / *total as f32, "step {step}, bucket {number}, element {element}, {members:?}");
        }
    }
    let mut steps = world.steps.lock().unwrap();
    let first = steps.entry(*step).or_insert_with(|| (*generation, members.clone()));
    assert_eq!(*first, (*generation, members.clone()), "step {step} was committed by two memberships");
}

/// One process of the group.
struct Process {
    world: Arc<World>,
    id: MemberId,
    fuse: Arc<Fuse>,
    parameters: Vec<f32>,
}

impl Process {
    fn publish(&self, position: Position) {
        let content = Arc::new(self.parameters.iter().flat_map(|it| it.to_le_bytes()).collect());
        self.world.states.lock().unwrap().insert(self.id, State { position, content });
    }

    fn join(&self, reports: Sender<(MemberId, Option<Report>)>) -> Group {
        let (id, fuse) = (self.id, Arc::clone(&self.fuse));
        let outgoing = move |report| {
            if !fuse.is_killed() {
                // The host ends first.
                let _ = reports.send((id, report));
            }
        };
        let parts = Parts {
            id,
            position: Position::default(),
            timing: timing(),
            connect: Box::new(Network { world: Arc::clone(&self.world), fuse: Arc::clone(&self.fuse) }),
            outgoing: Box::new(outgoing),
            fetch: fetch(&self.world),
            wait_limit: LIMIT,
        };
        let (group, inbox) = Group::start(parts).unwrap();
        self.publish(Position::default());
        self.world.inboxes.lock().unwrap().insert(id, (inbox, Arc::clone(&self.fuse)));
        group
    }

    /// Ends the test once all living processes have the last step: until then others may need this one's flags and state.
    fn wait_for_others(&self) {
        std::thread::sleep(Duration::from_millis(5));
        let states = self.world.states.lock().unwrap();
        let inboxes = self.world.inboxes.lock().unwrap();
        let is_done = |id: &MemberId| states.get(id).is_some_and(|it| it.position.step >= STEPS);
        if inboxes.iter().all(|(id, (_, fuse))| fuse.is_killed() || is_done(id)) {
            self.world.is_over.store(true, Ordering::Release);
        }
    }

    /// Trains until the last step; returns the parameters, `None` if it was killed.
    fn train(mut self, reports: Sender<(MemberId, Option<Report>)>) -> Option<Vec<f32>> {
        let group = self.join(reports);
        let mut random = StdRng::seed_from_u64(self.id.0);
        let end = Instant::now() + LIMIT;
        while !self.world.is_over.load(Ordering::Acquire) {
            assert!(Instant::now() < end, "member {} hangs: {group:?}", self.id.0);
            if self.fuse.is_killed() {
                return None;
            }
            match group.wait_ready(Duration::from_millis(20)).unwrap() {
                Readiness::Ready if group.view().step >= STEPS => self.wait_for_others(),
                Readiness::Ready => self.step(&group, &mut random)?,
                Readiness::Pending(_) => {}
                Readiness::Install(State { position, content }) => {
                    self.parameters = content.chunks(4).map(|it| f32::from_le_bytes(it.try_into().unwrap())).collect();
                    self.publish(position);
                    group.installed(position);
                }
            }
        }
        Some(self.parameters)
    }

    fn step(&mut self, group: &Group, random: &mut StdRng) -> Option<()> {
        let step = group.view().step + 1;
        let (done, outcomes) = channel();
        for (number, elements) in BUCKETS.into_iter().enumerate() {
            let sums = (0..elements).map(|element| gradient(self.id, step, number, element)).collect();
            let bucket = Numbers { key: number as u32 + 1, sums, reduced: vec![0.0; elements] };
            group.submit(Box::new(bucket)).unwrap();
            std::thread::sleep(Duration::from_micros(random.random_range(0..2_000)));
        }
        let completion = Box::new(move |result, buckets| drop(done.send((result, buckets))));
        group.finish(samples(self.id, step), 0, completion).unwrap();
        let end = Instant::now() + LIMIT;
        let (result, mut buckets) = loop {
            match outcomes.recv_timeout(Duration::from_millis(20)) {
                Ok(outcome) => break outcome,
                Err(_) if self.fuse.is_killed() => return None,
                Err(_) => assert!(Instant::now() < end, "member {} hangs in step {step}: {group:?}", self.id.0),
            }
        };
        match result.unwrap() {
            Outcome::Superseded => {}
            Outcome::Skipped(step) => panic!("{step:?} was skipped"),
            Outcome::Applied(committed) => {
                assert_eq!(committed.step, step);
                check(&self.world, &committed, &mut buckets);
                let reduced = buckets.iter_mut().flat_map(|bucket| bucket.parts().1.to_vec());
                self.parameters.iter_mut().zip(reduced).for_each(|(parameter, value)| *parameter -= value);
                self.publish(group.position_after(step).unwrap());
            }
        }
        Some(())
    }
}

fn run(seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let members = random.random_range(3..=4_u64);
    let world = Arc::<World>::default();
    let (reports, received) = channel();
    let host = std::thread::spawn({
        let world = Arc::clone(&world);
        move || host(&world, &received, 2, seed)
    });
    let start = |id: u64, fuse: Arc<Fuse>| {
        let (world, reports) = (Arc::clone(&world), reports.clone());
        let process = Process { world, id: MemberId(id + 1), fuse, parameters: vec![0.0; BUCKETS.iter().sum()] };
        std::thread::spawn(move || process.train(reports))
    };
    // Two of the first members are killed, and two join later.
    let mut fuse = |id: u64| if id < 2 { Fuse::new(random.random_range(20..600)) } else { Fuse::new(i64::MAX) };
    let mut threads: Vec<_> = (0..members).map(|id| start(id, fuse(id))).collect();
    for id in members..members + 2 {
        std::thread::sleep(Duration::from_millis(150));
        threads.push(start(id, fuse(id)));
    }
    let results: Vec<Option<Vec<f32>>> = threads.into_iter().map(|it| it.join().unwrap()).collect();
    world.is_over.store(true, Ordering::Release);
    let generations = host.join().unwrap();
    let survivors: Vec<&Vec<f32>> = results.iter().flatten().collect();
    assert!(survivors.len() as u64 >= members, "seed {seed}: {} survivors", survivors.len());
    assert!(survivors.windows(2).all(|pair| pair[0] == pair[1]), "seed {seed}: parameters differ");
    let steps = world.steps.lock().unwrap();
    let committed: Vec<u64> = steps.keys().copied().collect();
    assert_eq!(committed, (1..=STEPS).collect::<Vec<_>>(), "seed {seed}: steps were lost");
    let used: BTreeSet<u64> = steps.values().map(|(generation, _)| *generation).collect();
    println!("seed {seed}: {generations} generations, {} of them committed steps", used.len());
    assert!(used.len() > 1, "seed {seed}: the faults changed no membership");
}

#[test]
fn killed_members_cost_no_step_and_every_step_has_one_membership() {
    let only = std::env::var("ENGRAM_GROUP_SEED").ok().and_then(|it| it.parse::<u64>().ok());
    for seed in only.map_or(0..2, |seed| seed..seed + 1) {
        run(seed);
    }
}
