//! A driver whose kernels, copies and waits are recorded.

use super::{Kind, Recorder};
use crate::Error;
use crate::gpu::{Argument, Driver, Step, in_turn};
use std::ops::Range;

/// A driver, each of whose kernels and copies is a span.
///
/// While the recorder is on each is waited for, so that its span is the time of the work and not that of the call which only asks for it.
/// Nothing overlaps then, and a launch costs a round trip to the device (some 10 us): shares of kernels much shorter than that are too high.
pub struct ProfiledDriver<D> {
    driver: D,
    recorder: Recorder,
}

impl<D: Driver> ProfiledDriver<D> {
    /// The same driver, recorded by `recorder`.
    pub const fn new(driver: D, recorder: Recorder) -> Self {
        Self { driver, recorder }
    }

    /// The driver.
    pub const fn driver_mut(&mut self) -> &mut D {
        &mut self.driver
    }

    fn waited(
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
        self.waited(Kind::Copy, "upload", |driver| driver.upload(buffer, offset, bytes))
    }

    fn download(&mut self, buffer: &D::Buffer, offset: usize, out: &mut [u8]) -> Result<(), Error> {
        self.waited(Kind::Copy, "download", |driver| driver.download(buffer, offset, out))
    }

    fn copy(&mut self, from: &D::Buffer, to: &D::Buffer, bytes: usize) -> Result<(), Error> {
        self.waited(Kind::Copy, "copy", |driver| driver.copy(from, to, bytes))
    }

    fn fill(&mut self, buffer: &D::Buffer, range: Range<usize>, byte: u8) -> Result<(), Error> {
        self.waited(Kind::Kernel, "fill", |driver| driver.fill(buffer, range, byte))
    }

    fn launch(
        &mut self,
        kernel: &'static str,
        blocks: u32,
        arguments: &[Argument<'_, D::Buffer>],
    ) -> Result<(), Error> {
        self.waited(Kind::Kernel, kernel, |driver| driver.launch(kernel, blocks, arguments))
    }

    fn wait(&mut self) -> Result<(), Error> {
        self.recorder.span(Kind::Wait, "wait", || self.driver.wait())
    }

    fn sequence(&mut self, kept: &mut Option<D::Graph>, steps: &mut [Step<'_, D::Buffer>]) -> Result<(), Error> {
        if !self.recorder.is_on() {
            return self.driver.sequence(kept, steps);
        }
        // Each is to be seen.
        in_turn(self, steps)
    }
}
