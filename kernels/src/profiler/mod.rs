//! Profiler of devices: a timeline for each, and its analysis.
//!
//! [`ProfiledDevice`] records the passes of a [`Device`](crate::Device), [`ProfiledDriver`] the kernels, copies and waits of a GPU's passes.
//! Both wrap what they record with a [`Recorder`]. While it is off, a span costs one atomic load and adds no waits; while it is on, a span costs
//! two clock reads and one uncontended lock, about 100 ns. [`analyse`] is a pure function of timelines, [`chrome_trace`] writes them for
//! <https://ui.perfetto.dev> or `chrome://tracing`.

mod analysis;
mod chrome;
mod device;
mod driver;

pub use analysis::{Analysis, Bottleneck, Parts, analyse};
pub use chrome::chrome_trace;
pub use device::ProfiledDevice;
pub use driver::ProfiledDriver;

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Activity of a device during a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Computation: a kernel, or a whole pass if no details are known.
    Kernel,
    /// Transfer of rows or columns.
    Copy,
    /// Wait of the device for another one, or of the host for the device.
    Wait,
}

/// A named time interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Activity of the span.
    pub kind: Kind,
    /// The kernel, the pass, or the reason of the wait.
    pub name: &'static str,
    /// Nanoseconds since the common origin of all tracks.
    pub begin_ns: u64,
    /// As `begin_ns`; not before it.
    pub end_ns: u64,
}

/// Spans of one device, in order of their end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Track {
    /// Display name of the device.
    pub device: String,
    /// Recorded spans.
    pub spans: Vec<Span>,
    /// Spans dropped after the track was full.
    pub dropped: u64,
}

/// Records the spans of one device, or is off; clones share a track.
#[derive(Debug, Clone)]
pub struct Recorder(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    is_on: AtomicBool,
    recording: Mutex<Recording>,
}

#[derive(Debug)]
struct Recording {
    origin: Instant,
    most: usize,
    track: Track,
}

impl Recorder {
    /// Creates a recorder for a device that holds up to `most` spans of 40 bytes. Devices of one timeline share the same `origin`.
    pub fn new(device: String, origin: Instant, most: usize) -> Self {
        let recorder = Self::off(device);
        recorder.start(origin, most);
        recorder
    }

    /// Creates a recorder that records nothing before [`Recorder::start`].
    pub fn off(device: String) -> Self {
        let track = Track { device, ..Track::default() };
        let recording = Mutex::new(Recording { origin: Instant::now(), most: 0, track });
        Self(Arc::new(Shared { is_on: AtomicBool::new(false), recording }))
    }

    /// Starts recording with an empty track.
    pub fn start(&self, origin: Instant, most: usize) {
        self.take();
        let mut recording = self.recording();
        (recording.origin, recording.most) = (origin, most);
        self.0.is_on.store(true, Ordering::Relaxed);
    }

    /// Returns whether it is recording.
    pub fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed)
    }

    /// Stops recording and returns the track.
    pub fn stop(&self) -> Track {
        self.0.is_on.store(false, Ordering::Relaxed);
        self.take()
    }

    /// Calls `f` and records its duration.
    pub fn span<T>(&self, kind: Kind, name: &'static str, f: impl FnOnce() -> T) -> T {
        self.span_of(name, || (f(), kind))
    }

    /// Calls `f`, which also returns the kind of the span, and records its duration.
    pub fn span_of<T>(&self, name: &'static str, f: impl FnOnce() -> (T, Kind)) -> T {
        if !self.is_on() {
            return f().0;
        }
        let begin = Instant::now();
        let (result, kind) = f();
        let end = Instant::now();
        let mut recording = self.recording();
        // Recording may have stopped or restarted meanwhile.
        if !self.is_on() || begin < recording.origin {
            return result;
        }
        let since = |at: Instant| u64::try_from((at - recording.origin).as_nanos()).unwrap_or(u64::MAX);
        let span = Span { kind, name, begin_ns: since(begin), end_ns: since(end) };
        if recording.track.spans.len() < recording.most {
            recording.track.spans.push(span);
        } else {
            recording.track.dropped += 1;
        }
        result
    }

    /// Returns the track so far and continues with an empty one.
    pub fn take(&self) -> Track {
        let mut recording = self.recording();
        let next = Track { device: recording.track.device.clone(), ..Track::default() };
        std::mem::replace(&mut recording.track, next)
    }

    fn recording(&self) -> MutexGuard<'_, Recording> {
        self.0.recording.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_track_counts_dropped_spans_and_restarts_when_taken() {
        let recorder = Recorder::new("a".to_owned(), Instant::now(), 2);
        let other = recorder.clone();
        assert_eq!([1, 2, 3].map(|number| other.span(Kind::Kernel, "pass", || number)), [1, 2, 3]);
        let track = recorder.take();
        assert_eq!((track.device.as_str(), track.spans.len(), track.dropped), ("a", 2, 1));
        assert!(track.spans.is_sorted_by_key(|span| span.end_ns));
        assert!(track.spans.iter().all(|span| span.begin_ns <= span.end_ns));
        assert_eq!(recorder.take(), Track { device: "a".to_owned(), ..Track::default() });
    }

    #[test]
    fn stopped_recorder_records_nothing_and_restarts_empty() {
        let recorder = Recorder::off("a".to_owned());
        assert_eq!(recorder.span(Kind::Copy, "before", || 7), 7);
        assert!(!recorder.is_on() && recorder.take().spans.is_empty());
        let origin = Instant::now();
        recorder.start(origin, 10);
        recorder.span_of("within", || ((), Kind::Wait));
        // A span that crosses the start or the end of recording is not recorded.
        let first = recorder.span(Kind::Kernel, "around its end", || recorder.stop());
        recorder.span(Kind::Kernel, "around its begin", || recorder.start(Instant::now(), 10));
        let second = recorder.stop();
        let names = |track: &Track| track.spans.iter().map(|span| (span.kind, span.name)).collect::<Vec<_>>();
        assert_eq!((names(&first), names(&second)), (vec![(Kind::Wait, "within")], vec![]));
        assert!(!recorder.is_on());
    }
}
