//! Spans of records whose trace is sampled: log, replication and apply at the primary, append at the other replicas.
//!
//! Times are measured while the store works, and recorded when a step is complete. Other records cost nothing.

use super::PartitionState;
use engram_memory::{Lsn, PartitionId};
use engram_trace::{Context, FinishedSpan, Kind, Value, is_recording, record, record_child};
use std::time::SystemTime;

/// Times of a record.
#[derive(Debug, Clone)]
pub(crate) struct RecordTrace {
    /// Span that waits for the record; at another replica, the replication span of the primary.
    parent: Context,
    /// Replication span at the primary; `None` at other replicas.
    replication: Option<Context>,
    started: SystemTime,
}

impl RecordTrace {
    fn attributes(partition: PartitionId, lsn: Lsn) -> Vec<(&'static str, Value)> {
        vec![("engram.partition", partition.0.into()), ("engram.lsn", lsn.0.into())]
    }

    /// Records that the log is written.
    fn written(&self, partition: PartitionId, lsn: Lsn) {
        let name = if self.replication.is_some() { "log" } else { "append" };
        record_child(self.parent, name, (self.started, SystemTime::now()), Self::attributes(partition, lsn));
    }

    /// Records that the record is committed, and applied from `started` on.
    pub(crate) fn applied(&self, partition: PartitionId, lsn: Lsn, started: SystemTime) {
        let attributes = Self::attributes(partition, lsn);
        if let Some(context) = self.replication {
            record(FinishedSpan {
                context,
                parent: Some(self.parent.span),
                parent_is_remote: false,
                kind: Kind::Internal,
                name: "replicate".into(),
                started: self.started,
                ended: started,
                attributes: attributes.clone(),
                links: Vec::new(),
                error: None,
            });
        }
        record_child(self.parent, "apply", (started, SystemTime::now()), attributes);
    }
}

impl PartitionState {
    /// Traces the newest record, which was just logged.
    pub(crate) fn trace_logged(&mut self, parent: Context) {
        // A repeated request adds no record: the trace of the first one remains.
        if let Some(pending) = self.pending.back_mut().filter(|pending| pending.trace.is_none()) {
            let replication = Some(parent.child());
            pending.trace = Some(Box::new(RecordTrace { parent, replication, started: SystemTime::now() }));
        }
    }

    /// Traces the last record above `after` that a primary sent.
    pub(crate) fn trace_received(&mut self, after: Lsn, parent: Option<Context>) {
        let Some(parent) = parent.filter(|parent| parent.is_sampled() && is_recording()) else { return };
        if let Some(pending) = self.pending.back_mut().filter(|pending| pending.lsn > after) {
            pending.trace = Some(Box::new(RecordTrace { parent, replication: None, started: SystemTime::now() }));
        }
    }

    /// Notes that the log of a record is written.
    pub(crate) fn trace_written(&self, partition: PartitionId, lsn: Lsn) {
        if !is_recording() {
            return;
        }
        let first = self.pending.front().map_or(Lsn(0), |pending| pending.lsn);
        let traced = lsn.0.checked_sub(first.0).and_then(|at| self.pending.get(at as usize));
        if let Some(trace) = traced.and_then(|pending| pending.trace.as_ref()) {
            trace.written(partition, lsn);
        }
    }

    /// Returns the replication span of the first traced record among `count` records after `after`.
    pub(crate) fn trace_of(&self, after: Lsn, count: usize) -> Option<Context> {
        if count == 0 || !is_recording() {
            return None;
        }
        let records = self.pending.iter();
        let mut sent = records.filter(|pending| pending.lsn > after && pending.lsn.0 <= after.0 + count as u64);
        sent.find_map(|pending| pending.trace.as_ref()?.replication)
    }
}
