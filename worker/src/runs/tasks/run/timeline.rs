//! Records what the workers and the driver do during a run.

use engram_learn::task_run::{SpanDevice, TimelineKind, TimelineSpan};
use std::time::{Duration, Instant};

/// Spans of the current stage, in microseconds of work of the run.
pub(in crate::runs::tasks::run) struct Timeline {
    origin: Instant,
    /// Time of earlier drivers.
    earlier: Duration,
    stage: u32,
    spans: Vec<TimelineSpan>,
}

impl Timeline {
    /// Creates an empty timeline of a driver that has started at `origin`, after `earlier_ms` of work by other drivers.
    pub(in crate::runs::tasks::run) const fn new(origin: Instant, earlier_ms: u64) -> Self {
        Self { origin, earlier: Duration::from_millis(earlier_ms), stage: 0, spans: Vec::new() }
    }

    /// Adds a span of a worker, or of the driver.
    pub(in crate::runs::tasks::run) fn add(
        &mut self,
        worker: Option<u32>,
        kind: TimelineKind,
        name: &str,
        (begin, end): (Instant, Instant),
    ) {
        let since = |at: Instant| {
            u64::try_from((self.earlier + at.saturating_duration_since(self.origin)).as_micros()).unwrap_or(u64::MAX)
        };
        let (begin_us, end_us) = (since(begin), since(end.max(begin)));
        self.spans.push(TimelineSpan {
            worker,
            kind,
            name: name.to_owned(),
            stage: self.stage,
            begin_us,
            end_us,
            lost: false,
            devices: Vec::new(),
        });
    }

    /// Sets what computed the span that was added last.
    pub(in crate::runs::tasks::run) fn set_devices(&mut self, devices: Vec<SpanDevice>) {
        if let Some(span) = self.spans.last_mut() {
            span.devices = devices;
        }
    }

    /// Marks the newest task of a worker as lost.
    pub(in crate::runs::tasks::run) fn lose(&mut self, worker: u32) {
        let of_worker = |it: &&mut TimelineSpan| it.worker == Some(worker) && it.kind == TimelineKind::Task;
        if let Some(span) = self.spans.iter_mut().rev().find(of_worker) {
            span.lost = true;
        }
    }

    /// Ends the stage; returns its spans.
    pub(in crate::runs::tasks::run) fn end_stage(&mut self) -> Vec<TimelineSpan> {
        self.stage += 1;
        std::mem::take(&mut self.spans)
    }
}
