//! The threads of one device.
//!
//! A pass over a million memories takes about 100 us, as long as it takes to wake a sleeping thread. So workers spin
//! for a moment after a pass before they sleep, and nobody waits for a worker that has not come: work lies in shared
//! queues, the caller takes from them too, and closes the pass when they are empty. A worker that wakes too late finds
//! the pass closed.
//!
//! Invariants: the job is written only while the pass is closed and no worker is inside; a worker enters only while the
//! pass is open; [`Pool::each`] returns only when the pass is closed and nobody is inside.
#![allow(unsafe_code)] // One lifetime is erased: the borrow of a job that outlives every use of it.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// How often a worker looks for the next pass before it sleeps: some 50 to 150 us, as long as waking it would take.
const SPINS: u32 = 2_000;

/// More would neither help nor be counted safely.
const MAX_THREADS: usize = 1 << 10;

/// The lowest bits of [`Shared::state`]: how many workers are inside.
const INSIDE: u64 = (1 << 16) - 1;
/// Set while a pass may be entered.
const OPEN: u64 = 1 << 16;
/// Set for ever once the pool is dropped.
const STOP: u64 = 1 << 17;
/// One pass; the number of the pass is what lies at and above this bit.
const PASS: u64 = 1 << 18;

type Job = dyn Fn(usize) + Sync;

struct Shared {
    state: AtomicU64,
    job: UnsafeCell<Option<&'static Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    sleepers: AtomicUsize,
    bed: Mutex<()>,
    bell: Condvar,
}

// SAFETY: `job` is the only field that is not `Sync` by itself. It is written by the one caller of a pass while the state
// says closed and nobody inside, and read only by workers that are inside; the state orders the two (release, acquire).
unsafe impl Sync for Shared {}

/// A caller and the workers that help it.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

/// A queue's next index, on a cache line of its own.
#[repr(align(64))]
struct Next(AtomicUsize);

impl Pool {
    /// A pool of `threads` threads, the caller's included; at most [`MAX_THREADS`], and fewer where the machine gives no more.
    pub(crate) fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            sleepers: AtomicUsize::new(0),
            bed: Mutex::new(()),
            bell: Condvar::new(),
        });
        let workers = (1..threads.min(MAX_THREADS))
            .map_while(|thread| {
                let shared = Arc::clone(&shared);
                // A machine that gives no more threads gets slower passes, not a failed device.
                std::thread::Builder::new().name(format!("pass-{thread}")).spawn(move || work(&shared, thread)).ok()
            })
            .collect();
        Self { shared, workers }
    }

    /// Number of threads, the caller's included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(thread, item)` for every item and returns when all calls have.
    ///
    /// Each thread begins with its own share of consecutive items, so that a repeated pass finds them in its cache, then
    /// helps the others.
    pub(crate) fn each<T: Send>(&mut self, items: Vec<T>, f: impl Fn(usize, T) + Sync) {
        let (threads, count) = (self.threads(), items.len());
        if threads == 1 || count <= 1 {
            return items.into_iter().for_each(|item| f(0, item));
        }
        let items: Vec<_> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
        let share = |thread: usize| thread * count / threads;
        let queues: Vec<_> = (0..threads).map(|thread| Next(AtomicUsize::new(share(thread)))).collect();
        self.all(&|thread| {
            for owner in (thread..threads).chain(0..thread) {
                loop {
                    let next = queues[owner].0.fetch_add(1, Ordering::Relaxed);
                    if next >= share(owner + 1) {
                        break;
                    }
                    let item = locked(&items[next]).take().expect("a queue gives each index once");
                    f(thread, item);
                }
            }
        });
    }

    /// Runs `job(0)` here and `job(n)` on every worker n that comes before this one is done.
    fn all(&mut self, job: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The reference is used by workers that are inside the pass, and this function
        // neither returns nor unwinds before the pass is closed and nobody is inside.
        let job: &'static Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Job>(job) };
        // SAFETY: the last pass was closed and left before its caller went on, `&mut self` makes this the only caller.
        unsafe { *shared.job.get() = Some(job) };
        let pass = (shared.state.load(Ordering::Relaxed) & !(PASS - 1)) + PASS;
        shared.state.store(pass | OPEN, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(locked(&shared.bed));
            shared.bell.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        // No deadline: to return while a worker is inside would free what it uses.
        let mut spins = 0;
        while shared.state.load(Ordering::Acquire) & INSIDE > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        // SAFETY: the pass is closed and left. No reference stays behind to what the caller may now free.
        unsafe { *shared.job.get() = None };
        let panic = locked(&shared.panic).take();
        if let Some(panic) = own.err().or(panic) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.fetch_or(STOP, Ordering::SeqCst);
        drop(locked(&self.shared.bed));
        self.shared.bell.notify_all();
        for worker in self.workers.drain(..) {
            // Panics were handed to the caller of their pass.
            let _ = worker.join();
        }
    }
}

/// What worker `thread` does all its life.
fn work(shared: &Shared, thread: usize) {
    let mut last = 0;
    while let Some(state) = next_pass(shared, last) {
        if shared.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // It was closed, or another worker entered: look again.
            continue;
        }
        last = state / PASS;
        // SAFETY: this worker is inside, so the job is that of the open pass and is not written.
        let job = unsafe { *shared.job.get() }.expect("a pass that opened has a job");
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(thread))) {
            locked(&shared.panic).get_or_insert(panic);
        }
        shared.state.fetch_sub(1, Ordering::Release);
    }
}

/// Waits for an open pass other than `last`; `None` when the pool is dropped.
fn next_pass(shared: &Shared, last: u64) -> Option<u64> {
    let look = || {
        let state = shared.state.load(Ordering::SeqCst);
        (state & STOP > 0 || (state & OPEN > 0 && state / PASS != last)).then_some(state)
    };
    let awake = (0..SPINS).find_map(|_| {
        std::hint::spin_loop();
        look()
    });
    let state = awake.unwrap_or_else(|| {
        let mut bed = locked(&shared.bed);
        // Announced before the last look: either the caller sees a sleeper, or the sleeper sees the pass.
        shared.sleepers.fetch_add(1, Ordering::SeqCst);
        let state = loop {
            match look() {
                Some(state) => break state,
                None => bed = shared.bell.wait(bed).unwrap_or_else(PoisonError::into_inner),
            }
        };
        shared.sleepers.fetch_sub(1, Ordering::SeqCst);
        state
    });
    (state & STOP == 0).then_some(state)
}

/// Nothing here is left half changed by a panic.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_taken_once_whoever_comes() {
        for threads in [1, 2, 3, 8] {
            let mut pool = Pool::new(threads);
            for pass in 0..2_000 {
                let count = pass % 37;
                let taken: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.each((0..count).collect(), |thread, item: usize| {
                    assert!(thread < threads);
                    taken[item].fetch_add(1, Ordering::Relaxed);
                });
                assert!(taken.iter().all(|times| times.load(Ordering::Relaxed) == 1), "threads {threads}, pass {pass}");
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(3);
        for bad in 0..50 {
            let pass = catch_unwind(AssertUnwindSafe(|| {
                pool.each((0..50).collect(), |_, item: i32| assert!(item != bad, "planted"));
            }));
            assert!(pass.is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.each((0..100).collect(), |_, item| _ = sum.fetch_add(item, Ordering::Relaxed));
        assert_eq!(sum.into_inner(), 4_950);
    }

    #[test]
    fn workers_that_fell_asleep_help_again() {
        let mut pool = Pool::new(2);
        // Long enough that the worker has spun out; both outcomes are legal, this only makes the sleeping path likely.
        for _ in 0..20 {
            while pool.shared.sleepers.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let together = std::sync::Barrier::new(2);
            // Neither item ends before both have begun, so the worker must come.
            pool.each(vec![(), ()], |_, ()| _ = together.wait());
        }
    }
}
