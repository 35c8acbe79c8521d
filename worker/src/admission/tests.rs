use super::*;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

const WRITE: &str = "ApplyReinforcement";
const RANK: &str = "Rank";
const MS: Duration = Duration::from_millis(1);

/// A machine that takes calls along in groups, as a log does: all that wait when it is done with those before, each group for `sync`
/// and `each` for every call of it. Workers with a limit each share it.
struct Machine {
    limits: Vec<Limit>,
    start: Instant,
    now: Duration,
    sync: Duration,
    each: Duration,
    waiting: VecDeque<Call>,
    group: Vec<Call>,
    done_at: Duration,
    arrived: f64,
    calls: usize,
}

#[derive(Clone, Copy)]
struct Call {
    worker: usize,
    method: &'static str,
    begun: Duration,
}

/// What became of the calls of some time.
#[derive(Default)]
struct Tally {
    took: Vec<Duration>,
    refused: usize,
}

impl Tally {
    fn quantile(&mut self, share: f64) -> Duration {
        self.took.sort();
        self.took[(self.took.len() as f64 * share) as usize]
    }
}

impl Machine {
    fn new(sync: Duration, each: Duration) -> Self {
        Self::shared(1, Waits::unknown(), sync, each)
    }

    fn shared(workers: usize, processors: Waits, sync: Duration, each: Duration) -> Self {
        let start = Instant::now();
        Self {
            limits: (0..workers).map(|_| Limit::new(start, processors)).collect(),
            start,
            now: Duration::ZERO,
            sync,
            each,
            waiting: VecDeque::new(),
            group: Vec::new(),
            done_at: Duration::ZERO,
            arrived: 0.0,
            calls: 0,
        }
    }

    /// As many come a second, for so long.
    fn load(&mut self, per_second: f64, lasts: Duration) -> Tally {
        let mut tally = Tally::default();
        let until = self.now + lasts;
        let step = Duration::from_micros(100);
        while self.now < until {
            self.now += step;
            self.turn(&mut tally);
            self.arrived += per_second * step.as_secs_f64();
            while self.arrived >= 1.0 {
                self.arrived -= 1.0;
                self.call(WRITE, &mut tally);
            }
        }
        tally
    }

    fn call(&mut self, method: &'static str, tally: &mut Tally) {
        self.calls += 1;
        let worker = self.calls % self.limits.len();
        match self.limits[worker].begin() {
            Ok(()) => self.waiting.push_back(Call { worker, method, begun: self.now }),
            Err(_) => tally.refused += 1,
        }
    }

    fn turn(&mut self, tally: &mut Tally) {
        if self.now < self.done_at {
            return;
        }
        for call in self.group.drain(..) {
            let took = self.now - call.begun;
            self.limits[call.worker].end(call.method, Some(took), self.start + self.now);
            tally.took.push(took);
        }
        self.group.extend(self.waiting.drain(..));
        if !self.group.is_empty() {
            self.done_at = self.now + self.sync + self.each * self.group.len() as u32;
        }
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn of_twice_the_capacity_half_is_refused_and_the_rest_waits_no_longer_than_three_times() {
    // 5,000 a second at most.
    let mut machine = Machine::new(4 * MS, MS / 5);
    let mut half = machine.load(2_500.0, 10 * SECOND);
    assert_eq!(half.refused, 0);
    machine.load(10_000.0, 5 * SECOND);
    let mut over = machine.load(10_000.0, 600 * SECOND);
    for share in [0.5, 0.99] {
        let (over, half) = (over.quantile(share), half.quantile(share));
        assert!(over < 3 * half, "{over:?} beside {half:?}, of the {share} quantile");
    }
    assert!(over.took.len() > 600 * 2_500, "{} were answered", over.took.len());
    machine.load(2_500.0, 5 * SECOND);
    let after = machine.load(2_500.0, 60 * SECOND);
    assert_eq!((after.refused, machine.limits[0].limit()), (0, CEILING), "it is over, and leaves nothing behind");
}

#[test]
fn workers_that_share_a_processor_do_not_wait_for_each_other_either() {
    static WAITED: AtomicU64 = AtomicU64::new(0);
    // An hour more at each look.
    let short = Waits::told_by(|| Some(Duration::from_secs(WAITED.fetch_add(3_600, Ordering::Relaxed))));
    // 1,250 a second at most, of all three together.
    let mut machine = Machine::shared(3, short, MS, 4 * MS / 5);
    machine.load(1_125.0, 10 * SECOND);
    let mut half = machine.load(625.0, 20 * SECOND);
    machine.load(2_500.0, 5 * SECOND);
    let mut over = machine.load(2_500.0, 600 * SECOND);
    for share in [0.5, 0.99] {
        let (over, half) = (over.quantile(share), half.quantile(share));
        assert!(over < 3 * half, "{over:?} beside {half:?}, of the {share} quantile");
    }
    assert!(over.took.len() > 600 * 700, "{} were answered: {:?}", over.took.len(), machine.limits);
}

#[test]
fn a_worker_that_begins_under_full_load_finds_out_how_much_it_can_do() {
    // What the first calls took, which nobody else waited for, is no measure of what follows.
    let mut machine = Machine::new(4 * MS, MS / 5);
    machine.load(10_000.0, 10 * SECOND);
    let many = machine.load(10_000.0, 60 * SECOND);
    assert!(many.took.len() > 60 * 2_500, "{} were answered: {:?}", many.took.len(), machine.limits);
}

#[test]
fn a_disk_that_syncs_slowly_gets_many_to_sync_at_a_time() {
    let mut machine = Machine::new(100 * MS, MS / 100);
    machine.load(10.0, 10 * SECOND);
    let many = machine.load(4_000.0, 60 * SECOND);
    assert_eq!(many.refused, 0, "{:?}", machine.limits);
}

#[test]
fn a_disk_that_becomes_slow_is_not_taken_for_a_queue_for_long() {
    let mut machine = Machine::new(4 * MS, MS / 50);
    assert_eq!(machine.load(4_000.0, 20 * SECOND).refused, 0);
    machine.sync = 40 * MS;
    let slow = machine.load(4_000.0, 300 * SECOND);
    // With no more than sixty-four under way there would be less than a third of this.
    assert!(slow.took.len() > 300 * 1_800, "{} were answered: {:?}", slow.took.len(), machine.limits);
    machine.sync = 4 * MS;
    machine.load(2_000.0, 60 * SECOND);
    let after = machine.load(4_000.0, 60 * SECOND);
    assert_eq!(after.refused, 0, "{:?}", machine.limits);
}

#[test]
fn bursts_are_taken_in() {
    let mut machine = Machine::new(4 * MS, MS / 5);
    let mut tally = machine.load(100.0, 10 * SECOND);
    for _ in 0..20 {
        (0..1_000).for_each(|_| machine.call(WRITE, &mut tally));
        tally.refused += machine.load(100.0, 2 * SECOND).refused;
    }
    assert_eq!(tally.refused, 0);
}

#[test]
fn what_takes_long_by_its_nature_is_no_queue() {
    let start = Instant::now();
    let mut limit = Limit::new(start, Waits::unknown());
    let mut now = start;
    let mut calls = |limit: &mut Limit, method: &'static str, took: Duration, at_once: usize, rounds: u32| {
        for _ in 0..rounds {
            (0..at_once).for_each(|_| limit.begin().unwrap());
            now += took;
            (0..at_once).for_each(|_| limit.end(method, Some(took), now));
        }
    };
    calls(&mut limit, WRITE, 5 * MS, 8, 200);
    calls(&mut limit, RANK, 500 * MS, 4, 50);
    // A hundred rankings at once take as long as four: the machine has the room.
    calls(&mut limit, RANK, 600 * MS, 100, 50);
    assert_eq!(limit.limit(), CEILING);
    // What was given up says nothing, and gives its place back.
    (0..10).for_each(|_| limit.begin().unwrap());
    (0..10).for_each(|_| limit.end(RANK, None, start));
    assert_eq!(limit.under_way(), 0);
}

#[tokio::test]
async fn whoever_is_one_too_many_is_told_when_to_come_again() {
    let admission = Admission::new(Waits::unknown());
    let places: Vec<_> = (0..CEILING).map(|_| admission.begin(Kind::Write, WRITE).unwrap()).collect();
    let write = || admission.within(WRITE, async { Ok(()) });
    assert_eq!(admission.room(WRITE).unwrap_err(), write().await.unwrap_err());
    let problem = write().await.unwrap_err();
    assert_eq!((problem.kind(), problem.retry_after_ms), (ProblemKind::Overloaded, RETRY_MS));
    assert!(problem.message.contains("1024 writes are under way"), "{}", problem.message);
    assert_eq!(admission.within(RANK, async { Ok(()) }).await, Ok(()), "reads are another matter");
    assert_eq!((admission.room(RANK), admission.room("GetPartitionMap")), (Ok(()), Ok(())));
    places.into_iter().for_each(Place::answered);
    assert_eq!(write().await, Ok(()));
    assert_eq!(admission.with(Kind::Write, |it| (it.under_way(), it.refused())), (0, 3));
}
