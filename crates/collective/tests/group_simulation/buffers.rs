//! The buffers of a simulated member that make a step repeatable.

/// Gradient sums, the reduced gradient, and the last committed one. Reduction is out of place, so that the sums stay untouched until commit.
///
/// The three buffers are allocated once.
#[derive(Debug, Clone)]
pub(crate) struct StepBuffers {
    sums: Vec<f32>,
    reduced: Vec<f32>,
    committed: Vec<f32>,
    committed_step: Option<u64>,
}

impl StepBuffers {
    /// Creates buffers for gradients of `elements` elements.
    pub(crate) fn new(elements: usize) -> Self {
        let zeros = || vec![0.0; elements];
        Self { sums: zeros(), reduced: zeros(), committed: zeros(), committed_step: None }
    }

    /// Returns the local gradient sums, to be filled by the backward pass.
    pub(crate) fn sums_mut(&mut self) -> &mut [f32] {
        &mut self.sums
    }

    /// Returns source and target of a reduction. It can be repeated with other members as often as needed.
    pub(crate) fn reduction(&mut self) -> (&[f32], &mut [f32]) {
        (&self.sums, &mut self.reduced)
    }

    /// Keeps the reduced gradient as the committed one of `step`. A skipped step commits zeros.
    pub(crate) fn commit(&mut self, step: u64, apply: bool) {
        std::mem::swap(&mut self.reduced, &mut self.committed);
        if !apply {
            self.committed.fill(0.0);
        }
        self.committed_step = Some(step);
    }

    /// Returns the committed gradient of `step`; `None` if it is not the last one.
    pub(crate) fn committed(&self, step: u64) -> Option<&[f32]> {
        (self.committed_step == Some(step)).then_some(&self.committed)
    }
}
