//! A driver wrapper that records kernels, copies and waits.

use super::{Kind, Recorder};
use crate::Error;
use crate::gpu::{Argument, Driver, Step, run_steps};
use std::ops::Range;

/// Records each kernel and copy of a driver as a span.
///
/// While recording, it waits for each operation, so that a span measures the work and not only the call. Nothing overlaps then, and a launch
/// costs a round trip to the device (about 10 us): shares of much shorter kernels are overestimated.
pub struct ProfiledDriver<D> {
    driver: D,
    recorder: Recorder,
}

impl<D: Driver> ProfiledDriver<D> {
    /// Wraps a driver.
    pub const fn new(driver: D, recorder: Recorder) -> Self {
        Self { driver, recorder }
    }

    /// Returns the wrapped driver.
    pub const fn driver_mut(&mut self) -> &mut D {
        &mut self.driver
    }

    fn record_and_wait(
        &mut self,
        kind: Kind,
        name: &'static str,
        call: impl FnOnce(&mut D) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if !self.recorder.is_on() {
            return call(&mut self.driver);
        }
        self.recorder.span(kind, name, || {
            call(&mut self.driver)?;
            self.driver.wait()
        })
    }
}

impl<D: Driver> Driver for ProfiledDriver<D> {
    type Buffer = D::Buffer;
    type Graph = D::Graph;

    fn allocate(&mut self, bytes: usize) -> Result<D::Buffer, Error> {
        self.driver.allocate(bytes)
    }

    fn upload(&mut self, buffer: &D::Buffer, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        self.record_and_wait(Kind::Copy, "upload", |driver| driver.upload(buffer, offset, bytes))
    }

    fn download(&mut self, buffer: &D::Buffer, offset: usize, out: &mut [u8]) -> Result<(), Error> {
        self.record_and_wait(Kind::Copy, "download", |driver| driver.download(buffer, offset, out))
    }

    fn copy(&mut self, from: &D::Buffer, to: &D::Buffer, bytes: usize) -> Result<(), Error> {
        self.record_and_wait(Kind::Copy, "copy", |driver| driver.copy(from, to, bytes))
    }

    fn fill(&mut self, buffer: &D::Buffer, range: Range<usize>, byte: u8) -> Result<(), Error> {
        self.record_and_wait(Kind::Kernel, "fill", |driver| driver.fill(buffer, range, byte))
    }

    fn launch(
        &mut self,
        kernel: &'static str,
        blocks: u32,
        arguments: &[Argument<'_, D::Buffer>],
    ) -> Result<(), Error> {
        self.record_and_wait(Kind::Kernel, kernel, |driver| driver.launch(kernel, blocks, arguments))
    }

    fn wait(&mut self) -> Result<(), Error> {
        self.recorder.span(Kind::Wait, "wait", || self.driver.wait())
    }

    fn sequence(&mut self, graph: &mut Option<D::Graph>, steps: &mut [Step<'_, D::Buffer>]) -> Result<(), Error> {
        if !self.recorder.is_on() {
            return self.driver.sequence(graph, steps);
        }
        // Step by step, so that each is recorded.
        run_steps(self, steps)
    }
}
