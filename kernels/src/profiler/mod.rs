//! Where the time of devices goes: a timeline for each, and what it says.
//!
//! [`Profiled`] records the passes of a [`Device`](crate::Device), [`ProfiledDriver`] what a GPU's passes are made of: kernels, copies,
//! waits. Both stand around what they record, by a [`Recorder`] that may be off: then a span costs one look at a flag, and nothing waits for
//! the device that would not have. While it records a span costs two looks at the clock and one lock that nobody else wants, some 100 ns. [`analyse`] is a pure function of timelines, [`chrome_trace`] writes them for
//! <https://ui.perfetto.dev> or `chrome://tracing`.

mod analysis;
mod chrome;
mod device;
mod driver;

pub use analysis::{Analysis, Bottleneck, Parts, analyse};
pub use chrome::chrome_trace;
pub use device::Profiled;
pub use driver::ProfiledDriver;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What a device did during a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// It computed: a kernel, or a whole pass where no more is known.
    Kernel,
    /// Rows or columns went to it, or came from it.
    Copy,
    /// It waited for another device, or the host for it.
    Wait,
}

/// Something that took time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Which kind of thing.
    pub kind: Kind,
    /// The kernel, the pass, or what was waited for.
    pub name: &'static str,
    /// Nanoseconds from the origin that all tracks of a timeline share.
    pub begin_ns: u64,
    /// As `begin_ns`; not before it.
    pub end_ns: u64,
}

/// What one device did, in the order in which it ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Track {
    /// The device, for people.
    pub device: String,
    /// What was recorded.
    pub spans: Vec<Span>,
    /// Spans that were not, for want of room: those after the last.
    pub dropped: u64,
}

/// Records the spans of one device, or is off; clones record to the same track.
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
    /// Of a device with this name, with room for `most` spans of 40 bytes. Devices that shall stand in one timeline have the same `origin`.
    pub fn new(device: String, origin: Instant, most: usize) -> Self {
        let recorder = Self::off(device);
        recorder.start(origin, most);
        recorder
    }

    /// The same, which records nothing before [`Recorder::start`].
    pub fn off(device: String) -> Self {
        let track = Track { device, ..Track::default() };
        let recording = Mutex::new(Recording { origin: Instant::now(), most: 0, track });
        Self(Arc::new(Shared { is_on: AtomicBool::new(false), recording }))
    }

    /// Records from now on, from nothing.
    pub fn start(&self, origin: Instant, most: usize) {
        self.take();
        let mut recording = self.recording();
        (recording.origin, recording.most) = (origin, most);
        self.0.is_on.store(true, Ordering::Relaxed);
    }

    /// Whether it records.
    pub fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed)
    }

    /// Records no more; what was recorded.
    pub fn stop(&self) -> Track {
        self.0.is_on.store(false, Ordering::Relaxed);
        self.take()
    }

    /// Calls `f` and records how long it took, whatever comes of it.
    pub fn span<T>(&self, kind: Kind, name: &'static str, f: impl FnOnce() -> T) -> T {
        self.span_of(name, || (f(), kind))
    }

    /// The same where `f` tells of which kind it was.
    pub fn span_of<T>(&self, name: &'static str, f: impl FnOnce() -> (T, Kind)) -> T {
        if !self.is_on() {
            return f().0;
        }
        let begin = Instant::now();
        let (result, kind) = f();
        let end = Instant::now();
        let mut recording = self.recording();
        // Recording may have ended meanwhile, or begun anew.
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

    /// What was recorded so far. Recording goes on with a track that is empty.
    pub fn take(&self) -> Track {
        let mut recording = self.recording();
        let next = Track { device: recording.track.device.clone(), ..Track::default() };
        std::mem::replace(&mut recording.track, next)
    }

    fn recording(&self) -> MutexGuard<'_, Recording> {
        self.0.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_track_counts_what_it_drops_and_a_taken_one_begins_anew() {
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
    fn what_is_off_records_nothing_and_begins_from_nothing() {
        let recorder = Recorder::off("a".to_owned());
        assert_eq!(recorder.span(Kind::Copy, "before", || 7), 7);
        assert!(!recorder.is_on() && recorder.take().spans.is_empty());
        let origin = Instant::now();
        recorder.start(origin, 10);
        recorder.span_of("within", || ((), Kind::Wait));
        // A span that ends after the recording is of none, and one that began before it neither.
        let first = recorder.span(Kind::Kernel, "around its end", || recorder.stop());
        recorder.span(Kind::Kernel, "around its begin", || recorder.start(Instant::now(), 10));
        let second = recorder.stop();
        let names = |track: &Track| track.spans.iter().map(|span| (span.kind, span.name)).collect::<Vec<_>>();
        assert_eq!((names(&first), names(&second)), (vec![(Kind::Wait, "within")], vec![]));
        assert!(!recorder.is_on());
    }
}
