//! Controllers: watch settings, concurrency and triggers of reconciles.

use std::time::Duration;

use kube::api::DynamicObject;
use kube::runtime::controller::{Config, Controller};
use kube::runtime::utils::Backoff;
use kube::runtime::watcher;
use tokio::sync::watch;

use crate::context::Context;
use crate::kube::resource_kinds::Kind;
use crate::run::until;

/// Timeout of a watch, after which a stalled one is re-established.
const WATCH_SECONDS: u32 = 25;
/// First and maximum back-off of a broken watch. All dozen watches of a controller back off in one queue, each more than once after an
/// outage: longer delays would leave the operator without events for half a minute after the API server's return.
const WATCH_BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(200));

/// Creates a controller for the objects of `kind` in a namespace, or in all. It reconciles an object on change, and all objects when this
/// replica becomes the leader. Objects are untyped, so that an invalid one does not break the watch.
pub(crate) fn controller(
    context: &Context,
    kind: Kind,
    scope: Option<&str>,
    concurrency: u16,
    stopped: watch::Receiver<bool>,
) -> Controller<DynamicObject> {
    Controller::new_with(kind.within(&context.client, scope), watcher_config(), kind.resource())
        .with_config(Config::default().concurrency(concurrency))
        .trigger_backoff(WatchBackoff::new())
        .graceful_shutdown_on(until(stopped))
        .reconcile_all_on(on_leadership(context.leadership.changes()))
}

/// Returns the configuration of every watch.
pub(crate) fn watcher_config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
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
