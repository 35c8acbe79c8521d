//! Engine without threads, driven by its owner. For simulators.

use super::event::{Event, EventSender, process_call};
use super::handle::Handle;
use crate::peer::Peers;
use crate::{Error, Store, WriteError};
use std::sync::mpsc::{Receiver, channel};

/// A store that processes its events in explicit steps.
pub struct SteppedEngine {
    /// `None` after a graceful stop.
    store: Option<Store>,
    incoming: Receiver<Event>,
}

impl SteppedEngine {
    pub(super) fn start(mut store: Store, peers: Box<dyn Peers>, wake: Box<dyn Fn() + Send + Sync>) -> (Handle, Self) {
        store.set_peers(peers);
        let (events, incoming) = channel();
        let handle = Handle::new(&store, EventSender { events, wake: Some(wake) });
        (handle, Self { store: Some(store), incoming })
    }

    /// Processes all queued events, writes and syncs the log, applies and answers, snapshots what is due, and sends to peers.
    ///
    /// Has to be called soon after each wake, and every few milliseconds without one, for leases, retries and snapshots.
    ///
    /// # Errors
    /// A sync or the device failed. It must not be called again then.
    pub fn step(&mut self) -> Result<(), Error> {
        while let Ok(event) = self.incoming.try_recv() {
            match (event, &mut self.store) {
                (Event::Stop(done), store) => done(store.take().map_or(Ok(()), Store::stop)),
                (event, Some(store)) => process_call(store, event)?,
                (event, None) => event.refuse(&WriteError::of_failure(&Error::Stopped)),
            }
        }
        match &mut self.store {
            Some(store) => store.turn().inspect_err(|error| {
                store.shared().end(error);
            }),
            None => Ok(()),
        }
    }
}
