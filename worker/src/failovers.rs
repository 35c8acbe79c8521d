//! Spans of failovers: from the death of a primary until this worker serves the partitions that it takes over.
//!
//! Workers and coordinators agree on the trace of a failover by the process that died, so that it has the spans of all of them without a
//! message between them.

use crate::shared::Shared;
use engram_memory::{Ordinal, PartitionId};
use engram_trace::{Span, record_child};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::time::{sleep, timeout};

/// A failover that takes longer is recorded as failed.
const LIMIT: Duration = Duration::from_secs(60);
/// Interval of checks whether a partition is served: the store has no notification for it, and only traced failovers check.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Failovers of which this worker records spans now.
#[derive(Debug, Default)]
pub(crate) struct Failovers(Mutex<BTreeSet<Ordinal>>);

impl Failovers {
    /// Traces the failover from a worker that is dead, or suspected to be, if its trace is sampled and this worker has replicas of its
    /// partitions.
    pub(crate) fn begin(shared: &Shared, dead: Ordinal) {
        if !engram_trace::is_recording() || !shared.failovers.0.lock().insert(dead) {
            return;
        }
        let Some(span) = start(shared, dead) else {
            shared.failovers.0.lock().remove(&dead);
            return;
        };
        let Some(shared) = shared.this.upgrade() else { return };
        tokio::spawn(async move {
            follow(&shared, dead, span).await;
            shared.failovers.0.lock().remove(&dead);
        });
    }
}

/// Partitions whose primary is `dead` and which have a replica here.
fn concerned(shared: &Shared, dead: Ordinal) -> Vec<PartitionId> {
    let Some(map) = shared.view.borrow().map.clone() else { return Vec::new() };
    let here = |entry: &engram_cluster::Entry| entry.isr.iter().any(|member| member.ordinal == shared.ordinal());
    map.entries().filter(|(_, entry)| entry.primary == dead && here(entry)).map(|(partition, _)| partition).collect()
}

fn start(shared: &Shared, dead: Ordinal) -> Option<Span> {
    let concerned = concerned(shared, dead);
    let map = shared.view.borrow().map.clone()?;
    let entry = map.partitions.get(concerned.first()?.0 as usize)?;
    let trace = engram_wire::failover_trace(shared.options.cluster, entry.primary_member()?);
    let mut span = Span::agreed(trace.child(), None, "failover");
    span.context()?;
    span.set("engram.worker", shared.options.ordinal);
    span.set("engram.worker.failed", dead.0);
    span.set("engram.partitions", concerned.len());
    Some(span)
}

async fn follow(shared: &Arc<Shared>, dead: Ordinal, mut span: Span) {
    let Some(context) = span.context() else { return };
    let started = SystemTime::now();
    let partitions = concerned(shared, dead);
    let mut view = shared.view.subscribe();
    let moved = async {
        while !concerned(shared, dead).is_empty() && view.changed().await.is_ok() {}
        let promoted = SystemTime::now();
        record_child(context, "promote", (started, promoted), Vec::new());
        let is_own = |partition: &&PartitionId| shared.view.borrow().primary(**partition) == Some(shared.ordinal());
        let own: Vec<PartitionId> = partitions.iter().filter(is_own).copied().collect();
        while own.iter().any(|partition| shared.engine.position(*partition).is_none()) {
            sleep(POLL_INTERVAL).await;
        }
        let attributes = vec![("engram.partitions", own.len().into())];
        record_child(context, "activate", (promoted, SystemTime::now()), attributes);
    };
    if timeout(LIMIT, moved).await.is_err() {
        span.fail("partitions are not served");
    }
}
