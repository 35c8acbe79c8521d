//! Controllers: watch settings, concurrency and triggers of reconciles.

use std::time::Duration;

use kube::runtime::controller::{Action, Config, Controller};
use kube::runtime::utils::Backoff;
use kube::runtime::{WatchStreamExt as _, reflector, watcher};
use kube::{Api, ResourceExt as _};
use tokio::sync::watch;

use crate::context::Context;
use crate::kube::failure::Failure;
use crate::kube::stored_object::StoredObject;
use crate::run::until;

/// Timeout of a watch, after which a stalled one is re-established.
const WATCH_SECONDS: u32 = 25;
/// First and maximum back-off of a broken watch. All dozen watches of a controller back off in one queue, each more than once after an
/// outage: longer delays would leave the operator without events for half a minute after the API server's return.
const WATCH_BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(200));

/// Interval at which state of deleted objects is removed: without finalizers a deletion triggers no reconcile.
pub(crate) const SWEEP_PERIOD: Duration = Duration::from_secs(5);

/// Creates a controller for the objects of a kind in a namespace, or in all. It reconciles an object on change, and all objects when this
/// replica becomes the leader.
pub(crate) fn controller<O: StoredObject + Send + Sync + 'static>(
    context: &Context,
    scope: Option<&str>,
    concurrency: u16,
    stopped: watch::Receiver<bool>,
) -> Controller<O> {
    let client = context.client.clone();
    let api: Api<O> = match scope {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::all(client),
    };
    let (reader, writer) = reflector::store();
    // Managed fields are most of an object, and nothing reads them.
    let objects = watcher(api, watcher_config()).modify(|object| object.managed_fields_mut().clear());
    Controller::for_stream(objects.reflect(writer).applied_objects(), reader)
        .with_config(Config::default().concurrency(concurrency))
        .trigger_backoff(WatchBackoff::new())
        .graceful_shutdown_on(until(stopped))
        .reconcile_all_on(on_leadership(context.leadership.changes()))
}

/// Returns the configuration of every watch.
pub(crate) fn watcher_config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}

/// Returns the result of a reconcile. One that failed because its object or namespace is being deleted is repeated until the object is gone.
pub(crate) fn deletion_as_success<E: Failure>(result: Result<Action, E>) -> Result<Action, E> {
    match result {
        Err(error) if error.root_cause().is_deletion() => {
            tracing::debug!(%error, "reconcile ended by a deletion");
            Ok(Action::requeue(SWEEP_PERIOD))
        }
        result => result,
    }
}

/// Yields whenever this replica becomes the leader.
fn on_leadership(changes: watch::Receiver<bool>) -> impl futures::Stream<Item = ()> + Send + 'static {
    futures::stream::unfold(changes, |mut changes| async move {
        loop {
            if changes.changed().await.is_err() {
                return None;
            }
            if *changes.borrow_and_update() {
                return Some(((), changes));
            }
        }
    })
}

/// Yields whenever the watched value changes.
pub(crate) fn on_change(mut changes: watch::Receiver<()>) -> impl futures::Stream<Item = ()> + Send + 'static {
    changes.mark_unchanged();
    futures::stream::unfold(changes, |mut changes| async move {
        changes.changed().await.ok()?;
        Some(((), changes))
    })
}

/// Back-off between attempts to watch.
struct WatchBackoff {
    next: Duration,
}

impl WatchBackoff {
    const fn new() -> Self {
        Self { next: WATCH_BACKOFF.0 }
    }
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let now = self.next;
        self.next = (now * 2).min(WATCH_BACKOFF.1);
        Some(now)
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.next = WATCH_BACKOFF.0;
    }
}
