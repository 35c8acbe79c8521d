//! The same store and the same handle without a thread: whoever made it says when it works. For simulators.

use super::{Door, Event, Handle, Queue, take};
use crate::peer::Peers;
use crate::store::Store;
use crate::{Error, WriteError};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

/// A store whose events wait until it is told to take them.
pub struct Stepped {
    /// `None` when it was stopped in order.
    store: Option<Store>,
    incoming: Receiver<Event>,
}

impl Stepped {
    pub(super) fn start(mut store: Store, peers: Box<dyn Peers>, wake: Box<dyn Fn() + Send + Sync>) -> (Handle, Self) {
        store.set_peers(peers);
        let (events, incoming) = channel();
        let (queue, shared) = (Arc::new(Queue::of(&store.options)), Arc::clone(&store.shared));
        let identity = (store.identity().store(), store.identity().incarnation());
        let handle = Handle { door: Arc::new(Door { events, wake: Some(wake) }), queue, shared, identity };
        (handle, Self { store: Some(store), incoming })
    }

    /// Takes everything that waits, writes and syncs the log, applies and answers, snapshots what is due, and tells peers.
    ///
    /// Has to be called soon after each wake, and every few milliseconds without one: leases, reminders and snapshots are due with
    /// time.
    ///
    /// # Errors
    /// What ends the engine with threads: a sync or the device failed. It must not be called again then.
    pub fn step(&mut self) -> Result<(), Error> {
        while let Ok(event) = self.incoming.try_recv() {
            match (event, &mut self.store) {
                (Event::Stop(done), store) => done(store.take().map_or(Ok(()), Store::stop)),
                (event, Some(store)) => take(store, event)?,
                (event, None) => event.refuse(&WriteError::of_failure(&Error::Stopped)),
            }
        }
        match &mut self.store {
            Some(store) => store.turn().inspect_err(|error| {
                store.shared.end(error);
            }),
            None => Ok(()),
        }
    }
}
