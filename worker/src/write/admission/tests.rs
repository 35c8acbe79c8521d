use super::*;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

const WRITE: &str = "ApplyReinforcement";
const RANK: &str = "Rank";
const MS: Duration = Duration::from_millis(1);

/// A machine that processes calls in groups, like a log: each group consists of all calls that waited for the previous one, and
/// takes `sync` plus `each` per call. Several workers, each with a limit, share it.
struct SimulatedMachine {
    limits: Vec<ConcurrencyLimit>,
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
    started: Duration,
}

/// Results of the calls of a period.
#[derive(Default)]
struct Tally {
    latencies: Vec<Duration>,
    rejected: usize,
}

impl Tally {
    fn quantile(&mut self, share: f64) -> Duration {
        self.latencies.sort();
        self.latencies[(self.latencies.len() as f64 * share) as usize]
    }
}

impl SimulatedMachine {
    fn new(sync: Duration, each: Duration) -> Self {
        Self::shared(1, CpuPressure::unknown(), sync, each)
    }

    fn shared(workers: usize, cpu_pressure: CpuPressure, sync: Duration, each: Duration) -> Self {
        let start = Instant::now();
        Self {
            limits: (0..workers).map(|_| ConcurrencyLimit::new(start, cpu_pressure)).collect(),
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

    /// Offers `per_second` calls per second.
    fn load(&mut self, per_second: f64, lasts: Duration) -> Tally {
        let mut tally = Tally::default();
        let until = self.now + lasts;
        let step = Duration::from_micros(100);
        while self.now < until {
            self.now += step;
            self.advance(&mut tally);
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
            Ok(()) => self.waiting.push_back(Call { worker, method, started: self.now }),
            Err(_) => tally.rejected += 1,
        }
    }

    fn advance(&mut self, tally: &mut Tally) {
        if self.now < self.done_at {
            return;
        }
        for call in self.group.drain(..) {
            let latencies = self.now - call.started;
            self.limits[call.worker].end(call.method, Some(latencies), self.start + self.now);
            tally.latencies.push(latencies);
        }
        self.group.extend(self.waiting.drain(..));
        if !self.group.is_empty() {
            self.done_at = self.now + self.sync + self.each * self.group.len() as u32;
        }
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn at_twice_the_capacity_half_is_rejected_and_latency_stays_bounded() {
    // At most 5,000 per second.
    let mut machine = SimulatedMachine::new(4 * MS, MS / 5);
    let mut moderate = machine.load(2_500.0, 10 * SECOND);
    assert_eq!(moderate.rejected, 0);
    machine.load(10_000.0, 5 * SECOND);
    let mut overloaded = machine.load(10_000.0, 600 * SECOND);
    for share in [0.5, 0.99] {
        let (overloaded, moderate) = (overloaded.quantile(share), moderate.quantile(share));
        assert!(overloaded < 3 * moderate, "{overloaded:?} against {moderate:?}, for the {share} quantile");
    }
    assert!(overloaded.latencies.len() > 600 * 2_500, "{} were answered", overloaded.latencies.len());
    machine.load(2_500.0, 5 * SECOND);
    let after = machine.load(2_500.0, 60 * SECOND);
    assert_eq!((after.rejected, machine.limits[0].limit()), (0, CEILING), "the limit recovers completely");
}

#[test]
fn workers_that_share_a_cpu_keep_latency_bounded() {
    static WAITED: AtomicU64 = AtomicU64::new(0);
    // Reports another hour at each sample.
    let short = CpuPressure::from_source(|| Some(Duration::from_secs(WAITED.fetch_add(3_600, Ordering::Relaxed))));
    // At most 1,250 per second, over all three.
    let mut machine = SimulatedMachine::shared(3, short, MS, 4 * MS / 5);
    machine.load(1_125.0, 10 * SECOND);
    let mut moderate = machine.load(625.0, 20 * SECOND);
    machine.load(2_500.0, 5 * SECOND);
    let mut overloaded = machine.load(2_500.0, 600 * SECOND);
    for share in [0.5, 0.99] {
        let (overloaded, moderate) = (overloaded.quantile(share), moderate.quantile(share));
        assert!(overloaded < 3 * moderate, "{overloaded:?} against {moderate:?}, for the {share} quantile");
    }
    assert!(
        overloaded.latencies.len() > 600 * 700,
        "{} were answered: {:?}",
        overloaded.latencies.len(),
        machine.limits
    );
}

#[test]
fn a_worker_that_starts_under_full_load_finds_its_capacity() {
    // The latency of the first calls, before any queueing, is no baseline for the rest.
    let mut machine = SimulatedMachine::new(4 * MS, MS / 5);
    machine.load(10_000.0, 10 * SECOND);
    let many = machine.load(10_000.0, 60 * SECOND);
    assert!(many.latencies.len() > 60 * 2_500, "{} were answered: {:?}", many.latencies.len(), machine.limits);
}

#[test]
fn a_disk_with_slow_syncs_gets_large_batches() {
    let mut machine = SimulatedMachine::new(100 * MS, MS / 100);
    machine.load(10.0, 10 * SECOND);
    let many = machine.load(4_000.0, 60 * SECOND);
    assert_eq!(many.rejected, 0, "{:?}", machine.limits);
}

#[test]
fn a_disk_that_becomes_slow_is_not_mistaken_for_a_queue_for_long() {
    let mut machine = SimulatedMachine::new(4 * MS, MS / 50);
    assert_eq!(machine.load(4_000.0, 20 * SECOND).rejected, 0);
    machine.sync = 40 * MS;
    let slow = machine.load(4_000.0, 300 * SECOND);
    // A limit of 64 would achieve less than a third of this.
    assert!(slow.latencies.len() > 300 * 1_800, "{} were answered: {:?}", slow.latencies.len(), machine.limits);
    machine.sync = 4 * MS;
    machine.load(2_000.0, 60 * SECOND);
    let after = machine.load(4_000.0, 60 * SECOND);
    assert_eq!(after.rejected, 0, "{:?}", machine.limits);
}

#[test]
fn bursts_are_admitted() {
    let mut machine = SimulatedMachine::new(4 * MS, MS / 5);
    let mut tally = machine.load(100.0, 10 * SECOND);
    for _ in 0..20 {
        (0..1_000).for_each(|_| machine.call(WRITE, &mut tally));
        tally.rejected += machine.load(100.0, 2 * SECOND).rejected;
    }
    assert_eq!(tally.rejected, 0);
}

#[test]
fn slow_methods_are_no_queue() {
    let start = Instant::now();
    let mut limit = ConcurrencyLimit::new(start, CpuPressure::unknown());
    let mut now = start;
    let mut calls =
        |limit: &mut ConcurrencyLimit, method: &'static str, latencies: Duration, at_once: usize, rounds: u32| {
            for _ in 0..rounds {
                (0..at_once).for_each(|_| limit.begin().unwrap());
                now += latencies;
                (0..at_once).for_each(|_| limit.end(method, Some(latencies), now));
            }
        };
    calls(&mut limit, WRITE, 5 * MS, 8, 200);
    calls(&mut limit, RANK, 500 * MS, 4, 50);
    // A hundred concurrent rankings take as long as four: the machine has the capacity.
    calls(&mut limit, RANK, 600 * MS, 100, 50);
    assert_eq!(limit.limit(), CEILING);
    // An abandoned call has no meaningful duration, and frees its capacity.
    (0..10).for_each(|_| limit.begin().unwrap());
    (0..10).for_each(|_| limit.end(RANK, None, start));
    assert_eq!(limit.in_flight(), 0);
}

#[tokio::test]
async fn a_call_above_the_limit_fails_fast_with_a_retry_hint() {
    let admission = Admission::new(CpuPressure::unknown());
    let permits: Vec<_> = (0..CEILING).map(|_| admission.begin(RequestKind::Write, WRITE).unwrap()).collect();
    let write = || admission.run(WRITE, async { Ok(()) });
    assert_eq!(admission.check_capacity(WRITE).unwrap_err(), write().await.unwrap_err());
    let problem = write().await.unwrap_err();
    assert_eq!((problem.kind(), problem.retry_after_ms), (ProblemKind::Overloaded, RETRY_MS));
    assert!(problem.message.contains("1024 writes are in flight"), "{}", problem.message);
    assert_eq!(admission.run(RANK, async { Ok(()) }).await, Ok(()), "reads have their own limit");
    assert_eq!((admission.check_capacity(RANK), admission.check_capacity("GetPartitionMap")), (Ok(()), Ok(())));
    permits.into_iter().for_each(Permit::mark_answered);
    assert_eq!(write().await, Ok(()));
    assert_eq!(admission.with(RequestKind::Write, |it| (it.in_flight(), it.rejected())), (0, 3));
}
