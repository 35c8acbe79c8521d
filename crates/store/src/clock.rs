//! Time source of the store; every use goes through a [`Clock`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};

/// Time source. Simulations provide a virtual one.
pub trait Clock: Send + Sync {
    /// Wall clock in milliseconds since 1970; may jump.
    fn now_ms(&self) -> u64;

    /// Monotonic milliseconds since an arbitrary moment, including suspend.
    fn elapsed_ms(&self) -> u64;
}

/// The operating system's clocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
    }

    fn elapsed_ms(&self) -> u64 {
        let time = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("every kernel since 2.6.39 has this clock");
        time.tv_sec().unsigned_abs() * 1_000 + time.tv_nsec().unsigned_abs() / 1_000_000
    }
}

/// A clock that is advanced explicitly.
#[derive(Debug, Default)]
pub struct ManualClock {
    now_ms: AtomicU64,
    elapsed_ms: AtomicU64,
}

impl ManualClock {
    /// Creates a clock at wall time `now_ms` and 0 elapsed.
    pub fn new(now_ms: u64) -> Self {
        Self { now_ms: AtomicU64::new(now_ms), elapsed_ms: AtomicU64::new(0) }
    }

    /// Advances both clocks by `ms`.
    pub fn advance(&self, ms: u64) {
        self.now_ms.fetch_add(ms, Ordering::SeqCst);
        self.elapsed_ms.fetch_add(ms, Ordering::SeqCst);
    }

    /// Sets the wall clock alone, as an operator or a time server does.
    pub fn set_wall(&self, now_ms: u64) {
        self.now_ms.store(now_ms, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_ms(&self) -> u64 {
        self.now_ms.load(Ordering::SeqCst)
    }

    fn elapsed_ms(&self) -> u64 {
        self.elapsed_ms.load(Ordering::SeqCst)
    }
}
