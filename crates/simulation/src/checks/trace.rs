//! Trace of a run: a hash that is equal for two runs of a seed, and optionally text.

use engram_memory::mix64;

/// The trace of one run.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    hash: u64,
    steps: u64,
    prints: bool,
}

impl Trace {
    pub(crate) fn new(prints: bool) -> Self {
        Self { prints, ..Self::default() }
    }

    /// Adds a step: its numbers always, its text only when printing.
    pub(crate) fn note(&mut self, now_us: u64, numbers: &[u64], text: impl FnOnce() -> String) {
        self.steps += 1;
        self.hash = mix64(self.hash ^ now_us);
        for number in numbers {
            self.hash = mix64(self.hash.wrapping_mul(31) ^ number);
        }
        if self.prints {
            println!("{:>12.6} {}", now_us as f64 / 1e6, text());
        }
    }

    pub(crate) const fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) const fn steps(&self) -> u64 {
        self.steps
    }
}
