//! The coordinators of the cluster: where they are, and whether any is connected.

use super::coordinator_addresses::CoordinatorAddresses;
use crate::setup::Setup;
use engram_store::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::watch;

/// Tracks the coordinators, and whether any of them is connected.
pub(crate) struct Coordinators {
    clock: Arc<dyn Clock>,
    addresses: CoordinatorAddresses,
    streams: watch::Sender<usize>,
    /// When the last stream ended, in milliseconds of the clock that counts suspends; initially the start of the worker.
    lost_ms: AtomicU64,
}

impl Coordinators {
    pub(super) fn new(setup: &Setup) -> Self {
        let addresses = CoordinatorAddresses::new(&setup.options.coordinators, !setup.network.is_simulated());
        let lost_ms = AtomicU64::new(setup.clock.elapsed_ms());
        Self { clock: Arc::clone(&setup.clock), addresses, streams: watch::Sender::new(0), lost_ms }
    }

    pub(crate) const fn addresses(&self) -> &CoordinatorAddresses {
        &self.addresses
    }

    /// Counts a stream as open while the returned value lives.
    pub(crate) fn stream_opened(&self) -> impl Drop + '_ {
        struct Open<'a>(&'a Coordinators);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                self.0.lost_ms.store(self.0.clock.elapsed_ms(), Ordering::Release);
                self.0.streams.send_modify(|streams| *streams -= 1);
            }
        }
        self.streams.send_modify(|streams| *streams += 1);
        Open(self)
    }

    /// Returns a receiver of the number of connected coordinators.
    pub(crate) fn connections(&self) -> watch::Receiver<usize> {
        self.streams.subscribe()
    }

    /// Returns for how long no coordinator has been connected; 0 = one is.
    pub(crate) fn silence_ms(&self) -> u64 {
        if *self.streams.borrow() > 0 {
            return 0;
        }
        self.clock.elapsed_ms().saturating_sub(self.lost_ms.load(Ordering::Acquire))
    }
}
