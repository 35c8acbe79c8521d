//! Where the time of devices goes: a timeline for each, and what it says.
//!
//! [`Profiled`] records the passes of a [`Device`](crate::Device), [`ProfiledDriver`] what a GPU's passes are made of: kernels, copies,
//! waits. Both stand around what they record, so that nothing is paid where nothing is recorded; a span costs two looks at the clock and one
//! lock that nobody else wants, some 100 ns. [`analyse`] is a pure function of timelines, [`chrome_trace`] writes them for
//! <https://ui.perfetto.dev> or `chrome://tracing`.

mod analysis;
mod chrome;
mod device;
mod driver;

pub use analysis::{Analysis, Bottleneck, Parts, analyse};
pub use chrome::chrome_trace;
pub use device::Profiled;
pub use driver::ProfiledDriver;

use std::sync::{Arc, Mutex, PoisonError};
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

/// Records the spans of one device; clones record to the same track.
#[derive(Debug, Clone)]
pub struct Recorder {
    origin: Instant,
    most: usize,
    track: Arc<Mutex<Track>>,
}

impl Recorder {
    /// Of a device with this name, with room for `most` spans of 40 bytes. Devices that shall stand in one timeline have the same `origin`.
    pub fn new(device: String, origin: Instant, most: usize) -> Self {
        Self { origin, most, track: Arc::new(Mutex::new(Track { device, ..Track::default() })) }
    }

    /// Calls `f` and records how long it took, whatever comes of it.
    pub fn span<T>(&self, kind: Kind, name: &'static str, f: impl FnOnce() -> T) -> T {
        let begin_ns = self.now_ns();
        let result = f();
        let end_ns = self.now_ns();
        let mut track = self.track.lock().unwrap_or_else(PoisonError::into_inner);
        if track.spans.len() < self.most {
            track.spans.push(Span { kind, name, begin_ns, end_ns });
        } else {
            track.dropped += 1;
        }
        result
    }

    /// What was recorded so far. Recording goes on with a track that is empty.
    pub fn take(&self) -> Track {
        let mut track = self.track.lock().unwrap_or_else(PoisonError::into_inner);
        let next = Track { device: track.device.clone(), ..Track::default() };
        std::mem::replace(&mut track, next)
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
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
}
