//! The trace of a run: a hash that two runs of a seed share, and text for readers.

use engram_memory::mix64;
use std::sync::{Arc, Mutex, MutexGuard};

/// The trace of one run.
#[derive(Clone, Default)]
pub(crate) struct Trace(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    hash: u64,
    steps: u64,
    prints: bool,
    now_ms: u64,
    failure: Option<String>,
}

impl Trace {
    pub(crate) fn new(prints: bool) -> Self {
        let trace = Self::default();
        trace.state().prints = prints;
        trace
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("one thread, and no panic while it is held")
    }

    pub(crate) fn set_time(&self, now_ms: u64) {
        self.state().now_ms = now_ms;
    }

    /// Adds a number that is not printed.
    pub(crate) fn count(&self, number: u64) {
        let mut state = self.state();
        state.steps += 1;
        state.hash = mix64(state.hash.wrapping_mul(31) ^ state.now_ms.rotate_left(32) ^ number);
    }

    /// Adds an event.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        let text = text.as_ref();
        text.bytes().for_each(|byte| self.count(u64::from(byte)));
        let state = self.state();
        if state.prints {
            println!("{:>9.3} {text}", state.now_ms as f64 / 1e3);
        }
    }

    /// Reports a violated invariant; only the first one is kept.
    pub(crate) fn fail(&self, what: impl Into<String>) {
        let what = what.into();
        self.note(format!("FAILED {what}"));
        self.state().failure.get_or_insert(what);
    }

    pub(crate) fn failure(&self) -> Option<String> {
        self.state().failure.clone()
    }

    pub(crate) fn hash(&self) -> u64 {
        self.state().hash
    }

    pub(crate) fn steps(&self) -> u64 {
        self.state().steps
    }
}
