//! Thread pool of one device.
//!
//! A pass over a million memories takes about 100 us, as long as waking a sleeping thread. Workers therefore spin for a moment after a pass
//! before they sleep, and no pass waits for a worker that has not entered: work is in shared queues, the caller drains them too, and closes the
//! pass when they are empty. A worker that wakes too late finds the pass closed.
//!
//! Invariants: the job is written only while the pass is closed and no worker is inside; a worker enters only while the
//! pass is open; [`Pool::for_each`] returns only when the pass is closed and no worker is inside.
#![allow(unsafe_code)] // Erases the lifetime of a job's borrow, which outlives every use.

use parking_lot::{Condvar, Mutex};
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// Spins before a worker sleeps: 50 to 150 us, as long as waking it would take.
const SPINS: u32 = 2_000;

/// Maximum pool size; the state counts workers in 16 bits.
const MAX_THREADS: usize = 1 << 10;

/// The lowest bits of [`Shared::state`]: number of workers inside.
const INSIDE: u64 = (1 << 16) - 1;
/// Set while workers may enter the pass.
const OPEN: u64 = 1 << 16;
/// Set permanently when the pool is dropped.
const STOP: u64 = 1 << 17;
/// Lowest bit of the pass number.
const PASS: u64 = 1 << 18;

type Job = dyn Fn(usize) + Sync;

struct Shared {
    state: AtomicU64,
    job: UnsafeCell<Option<&'static Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    sleepers: AtomicUsize,
    sleep_lock: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is the only field that is not `Sync` by itself. The single caller of a pass writes it while the pass is closed and no worker is
// inside, and only workers inside read it; `state` orders the two (release, acquire).
unsafe impl Sync for Shared {}

/// Threads that execute passes: the caller's and workers.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

/// Next index of a queue, on its own cache line.
#[repr(align(64))]
struct QueueIndex(AtomicUsize);

impl Pool {
    /// Creates a pool of `threads` threads, the caller's included; at most [`MAX_THREADS`], and fewer if the system refuses more.
    pub(crate) fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            sleepers: AtomicUsize::new(0),
            sleep_lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let workers = (1..threads.min(MAX_THREADS))
            .map_while(|thread| {
                let shared = Arc::clone(&shared);
                // Fewer threads make passes slower; that is no device failure.
                std::thread::Builder::new()
                    .name(format!("pass-{thread}"))
                    .spawn(move || run_worker(&shared, thread))
                    .ok()
            })
            .collect();
        Self { shared, workers }
    }

    /// Returns the number of threads, the caller's included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(thread, item)` for every item and returns after all calls.
    ///
    /// Each thread starts with its own share of consecutive items, so that repeated passes find them in its cache, and then takes items of others.
    pub(crate) fn for_each<T: Send>(&mut self, items: Vec<T>, f: impl Fn(usize, T) + Sync) {
        let (threads, count) = (self.threads(), items.len());
        if threads == 1 || count <= 1 {
            return items.into_iter().for_each(|item| f(0, item));
        }
        let items: Vec<_> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
        let share = |thread: usize| thread * count / threads;
        let queues: Vec<_> = (0..threads).map(|thread| QueueIndex(AtomicUsize::new(share(thread)))).collect();
        self.run_on_all(&|thread| {
            for owner in (thread..threads).chain(0..thread) {
                loop {
                    let next = queues[owner].0.fetch_add(1, Ordering::Relaxed);
                    if next >= share(owner + 1) {
                        break;
                    }
                    let item = items[next].lock().take().expect("a queue yields each index once");
                    f(thread, item);
                }
            }
        });
    }

    /// Runs `job(0)` on this thread and `job(n)` on every worker n that enters before this one is done.
    fn run_on_all(&mut self, job: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Only workers inside the pass use the reference, and this function neither returns nor unwinds before
        // the pass is closed and no worker is inside.
        let job: &'static Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Job>(job) };
        // SAFETY: the previous pass was closed and empty before its caller continued; `&mut self` makes this the only caller.
        unsafe { *shared.job.get() = Some(job) };
        let pass = (shared.state.load(Ordering::Relaxed) & !(PASS - 1)) + PASS;
        shared.state.store(pass | OPEN, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(shared.sleep_lock.lock());
            shared.wake.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        // No deadline: returning while a worker is inside would free data in use.
        let mut spins = 0;
        while shared.state.load(Ordering::Acquire) & INSIDE > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        // SAFETY: the pass is closed and empty. No reference to data that the caller may free remains.
        unsafe { *shared.job.get() = None };
        let panic = shared.panic.lock().take();
        if let Some(panic) = own.err().or(panic) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.fetch_or(STOP, Ordering::SeqCst);
        drop(self.shared.sleep_lock.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // The caller of the pass has received its panic.
            let _ = worker.join();
        }
    }
}

/// Main loop of worker `thread`.
fn run_worker(shared: &Shared, thread: usize) {
    let mut last = 0;
    while let Some(state) = next_pass(shared, last) {
        if shared.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // The pass was closed, or another worker entered: retry.
            continue;
        }
        last = state / PASS;
        // SAFETY: this worker is inside, so the job belongs to the open pass and is not written.
        let job = unsafe { *shared.job.get() }.expect("an open pass has a job");
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(thread))) {
            shared.panic.lock().get_or_insert(panic);
        }
        shared.state.fetch_sub(1, Ordering::Release);
    }
}

/// Waits for an open pass other than `last`; returns `None` when the pool is dropped.
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
        let mut sleep_lock = shared.sleep_lock.lock();
        // Registered before the final check: either the caller sees a sleeper, or the sleeper sees the pass.
        shared.sleepers.fetch_add(1, Ordering::SeqCst);
        let state = loop {
            match look() {
                Some(state) => break state,
                None => shared.wake.wait(&mut sleep_lock),
            }
        };
        shared.sleepers.fetch_sub(1, Ordering::SeqCst);
        state
    });
    (state & STOP == 0).then_some(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_processed_once() {
        for threads in [1, 2, 3, 8] {
            let mut pool = Pool::new(threads);
            for pass in 0..2_000 {
                let count = pass % 37;
                let taken: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each((0..count).collect(), |thread, item: usize| {
                    assert!(thread < threads);
                    taken[item].fetch_add(1, Ordering::Relaxed);
                });
                assert!(taken.iter().all(|times| times.load(Ordering::Relaxed) == 1), "threads {threads}, pass {pass}");
            }
        }
    }

    #[test]
    fn panic_reaches_the_caller_and_the_pool_stays_usable() {
        let mut pool = Pool::new(3);
        for bad in 0..50 {
            let pass = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each((0..50).collect(), |_, item: i32| assert!(item != bad, "injected panic"));
            }));
            assert!(pass.is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.for_each((0..100).collect(), |_, item| _ = sum.fetch_add(item, Ordering::Relaxed));
        assert_eq!(sum.into_inner(), 4_950);
    }

    #[test]
    fn sleeping_workers_wake_for_the_next_pass() {
        let mut pool = Pool::new(2);
        // Long enough for the worker to go to sleep; both paths are valid, this makes sleeping likely.
        for _ in 0..20 {
            while pool.shared.sleepers.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let together = std::sync::Barrier::new(2);
            // Neither item ends before both have started, so the worker must enter.
            pool.for_each(vec![(), ()], |_, ()| _ = together.wait());
        }
    }
}
