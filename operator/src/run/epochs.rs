//! How much the clusters have learned: the learning epochs that all runs of a cluster have done, by its workers' own records.
//!
//! Asked seldom: every answer is news while a run goes on, and every change of a status is a reason to look again.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Context, Key, runs};

/// Between questions. Whoever wants to see a run go on looks at the run.
const BETWEEN: Duration = Duration::from_secs(60);
/// How long an answer may hold up the look at a cluster; without one the figure stays.
const DEADLINE: Duration = Duration::from_secs(1);

/// When each cluster was asked, and what it said.
#[derive(Default)]
pub(super) struct Epochs(Mutex<BTreeMap<Key, (Instant, Option<i64>)>>);

impl Epochs {
    fn known(&self) -> MutexGuard<'_, BTreeMap<Key, (Instant, Option<i64>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many a cluster has done; `None` where that is not known.
    pub(super) async fn of(&self, context: &Context, cluster: &Key) -> Option<i64> {
        let known = self.known().get(cluster).copied();
        if let Some((_, done)) = known.filter(|(asked, _)| asked.elapsed() < BETWEEN) {
            return done;
        }
        let done = tokio::time::timeout(DEADLINE, ask(context, cluster)).await.ok().flatten();
        self.known().insert(cluster.clone(), (Instant::now(), done));
        done
    }

    /// Has a cluster asked again: a run of it has ended.
    pub(super) fn forget(&self, cluster: &Key) {
        self.known().remove(cluster);
    }

    /// Forgets those of a scope that are not in `present`.
    pub(super) fn keep_only(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) {
        self.known().retain(|key, _| key.stays(scope, &present));
    }
}

async fn ask(context: &Context, cluster: &Key) -> Option<i64> {
    let client = runs::client(context, cluster).await.ok()??;
    let runs = client.list_runs().await.ok()?;
    Some(runs.iter().map(|run| i64::try_from(run.epoch).unwrap_or(i64::MAX)).fold(0, i64::saturating_add))
}
