//! How the operator watches a kind: with what patience, how many of it are looked at at a time, and when all of them are.

use std::time::Duration;

use kube::api::DynamicObject;
use kube::runtime::controller::{Config, Controller};
use kube::runtime::utils::Backoff;
use kube::runtime::watcher;
use tokio::sync::watch;

use super::kinds::Kind;
use super::{Context, until};

/// A watch that the API server forgot is noticed after this and a little.
const WATCH_SECONDS: u32 = 25;
/// First and longest wait before a broken watch is tried again. All watches of a controller, a dozen, wait in one queue, each more than
/// once after an outage: with two seconds apiece the operator was deaf for half a minute after the API server's return.
const WATCH_AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(200));

/// Looks at the objects of `kind` in a namespace, or in all, whenever one changes, and at all of them when this replica begins to lead.
/// They have no schema here: one that says nonsense is refused by itself, and stops no watch.
pub(super) fn controller(
    context: &Context,
    kind: Kind,
    scope: Option<&str>,
    concurrency: u16,
    stopped: watch::Receiver<bool>,
) -> Controller<DynamicObject> {
    Controller::new_with(kind.within(&context.client, scope), watched(), kind.resource())
        .with_config(Config::default().concurrency(concurrency))
        .trigger_backoff(Again::new())
        .graceful_shutdown_on(until(stopped))
        .reconcile_all_on(leads(context.leadership.changes()))
}

/// What every watch is begun with.
pub(super) fn watched() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}

/// Every time that this replica begins to lead.
fn leads(changes: watch::Receiver<bool>) -> impl futures::Stream<Item = ()> + Send + 'static {
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

/// Every time that something else was written into it.
pub(super) fn changed(mut changes: watch::Receiver<()>) -> impl futures::Stream<Item = ()> + Send + 'static {
    changes.mark_unchanged();
    futures::stream::unfold(changes, |mut changes| async move {
        changes.changed().await.ok()?;
        Some(((), changes))
    })
}

/// Waits between attempts to watch.
struct Again {
    next: Duration,
}

impl Again {
    const fn new() -> Self {
        Self { next: WATCH_AGAIN.0 }
    }
}

impl Iterator for Again {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let now = self.next;
        self.next = (now * 2).min(WATCH_AGAIN.1);
        Some(now)
    }
}

impl Backoff for Again {
    fn reset(&mut self) {
        self.next = WATCH_AGAIN.0;
    }
}
