//! Spans of failovers: from the death of a primary until this worker serves the partitions that it takes over.
//!
//! Workers and coordinators agree on the trace of a failover by the process that died, so that it has the spans of all of them without a
//! message between them.

use crate::shared::Shared;
use engram_memory::{Ordinal, PartitionId};
use engram_trace::{Span, record_child};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};
use tokio::time::timeout;

/// A failover that takes longer is recorded as failed.
const LIMIT: Duration = Duration::from_secs(60);

/// Failovers of which this worker records spans now.
pub(crate) struct Failovers {
    /// Processes whose failover is traced.
    open: Mutex<BTreeSet<Ordinal>>,
    /// The worker, for the tasks that follow a failover.
    shared: Weak<Shared>,
}

impl Failovers {
    pub(crate) fn new(shared: Weak<Shared>) -> Self {
        Self { open: Mutex::default(), shared }
    }

    /// Traces the failover from a worker that is dead, or suspected to be, if its trace is sampled and this worker has replicas of its
    /// partitions.
    pub(crate) fn begin(&self, dead: Ordinal) {
        if !engram_trace::is_recording() || !self.open.lock().insert(dead) {
            return;
        }
        let started = self.shared.upgrade().and_then(|shared| start(&shared, dead).map(|span| (shared, span)));
        let Some((shared, span)) = started else {
            self.open.lock().remove(&dead);
            return;
        };
        tokio::spawn(async move {
            follow(&shared, dead, span).await;
            shared.membership.failovers.open.lock().remove(&dead);
        });
    }
}

/// Partitions whose primary is `dead` and which have a replica here.
fn concerned(shared: &Shared, dead: Ordinal) -> Vec<PartitionId> {
    let Some(map) = shared.membership.view().map.clone() else { return Vec::new() };
    let here = |entry: &engram_cluster::Entry| entry.isr.iter().any(|member| member.ordinal == shared.ordinal());
    map.entries().filter(|(_, entry)| entry.primary == dead && here(entry)).map(|(partition, _)| partition).collect()
}

fn start(shared: &Shared, dead: Ordinal) -> Option<Span> {
    let concerned = concerned(shared, dead);
    let map = shared.membership.view().map.clone()?;
    let entry = map.partitions.get(concerned.first()?.0 as usize)?;
    let trace = engram_wire::failover_trace(shared.setup.options.cluster, entry.primary_member()?);
    let mut span = Span::agreed(trace.child(), None, "failover");
    span.context()?;
    span.set("engram.worker", shared.setup.options.ordinal);
    span.set("engram.worker.failed", dead.0);
    span.set("engram.partitions", concerned.len());
    Some(span)
}

async fn follow(shared: &Arc<Shared>, dead: Ordinal, mut span: Span) {
    let Some(context) = span.context() else { return };
    let started = SystemTime::now();
    let partitions = concerned(shared, dead);
    let mut view = shared.membership.subscribe();
    let moved = async {
        while !concerned(shared, dead).is_empty() && view.changed().await.is_ok() {}
        let promoted = SystemTime::now();
        record_child(context, "promote", (started, promoted), Vec::new());
        let is_own = |partition: &&PartitionId| shared.membership.view().primary(**partition) == Some(shared.ordinal());
        let own: Vec<PartitionId> = partitions.iter().filter(is_own).copied().collect();
        let is_served = || own.iter().all(|partition| shared.engine.position(*partition).is_some());
        shared.engine.wait_until(is_served).await;
        let attributes = vec![("engram.partitions", own.len().into())];
        record_child(context, "activate", (promoted, SystemTime::now()), attributes);
    };
    if timeout(LIMIT, moved).await.is_err() {
        span.fail("partitions are not served");
    }
}
