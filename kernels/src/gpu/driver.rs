//! The driver interface of passes: memory, copies, launches.

use crate::Error;
use std::ops::Range;

/// Threads per block, for every kernel.
pub const THREADS: usize = 256;

/// Runs kernels by name on its own memory. Calls take effect in call order.
pub trait Driver: Send {
    /// Device memory, freed when dropped; at least 256-byte aligned.
    type Buffer: Send;
    /// Cached form of a [sequence](Driver::sequence).
    type Graph: Send;

    /// Allocates `bytes` bytes (more than 0) with undefined content.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`].
    fn allocate(&mut self, bytes: usize) -> Result<Self::Buffer, Error>;

    /// Copies `bytes` to `buffer`, from `offset` bytes on.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn upload(&mut self, buffer: &Self::Buffer, offset: usize, bytes: &[u8]) -> Result<(), Error>;

    /// Fills `out` from `buffer`, from `offset` bytes on, after all earlier calls have taken effect.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn download(&mut self, buffer: &Self::Buffer, offset: usize, out: &mut [u8]) -> Result<(), Error>;

    /// Copies the first `bytes` bytes of one buffer to another.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn copy(&mut self, from: &Self::Buffer, to: &Self::Buffer, bytes: usize) -> Result<(), Error>;

    /// Fills a byte range with `byte`.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn fill(&mut self, buffer: &Self::Buffer, range: Range<usize>, byte: u8) -> Result<(), Error>;

    /// Launches `blocks` (more than 0) blocks of [`THREADS`] threads.
    ///
    /// The arguments are those of the kernel's declaration, in order; the caller is responsible for them and for slots and lengths being in range.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn launch(
        &mut self,
        kernel: &'static str,
        blocks: u32,
        arguments: &[Argument<'_, Self::Buffer>],
    ) -> Result<(), Error>;

    /// Waits until all earlier calls have taken effect; reports launch failures that no earlier call reported.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn wait(&mut self) -> Result<(), Error>;

    /// Runs these steps in order and waits for the last one. A driver may cache in `kept` a form that it can run at once the next time. A caller
    /// that passes the cache again must pass the same steps: the same buffers, ranges, kernels, blocks, arguments and byte counts; the uploaded
    /// content may differ.
    ///
    /// # Errors
    /// [`Error::Full`], with nothing done; [`Error::Failed`].
    fn sequence(&mut self, kept: &mut Option<Self::Graph>, steps: &mut [Step<'_, Self::Buffer>]) -> Result<(), Error> {
        let _ = kept;
        run_steps(self, steps)?;
        self.wait()
    }
}

/// A step of a sequence.
#[derive(Debug)]
pub enum Step<'a, B> {
    /// Uploads bytes to the start of a buffer.
    Upload(&'a B, &'a [u8]),
    /// Fills a byte range of a buffer.
    Fill(&'a B, Range<usize>, u8),
    /// Launches blocks of a kernel.
    Launch(&'static str, u32, &'a [Argument<'a, B>]),
    /// Downloads the start of a buffer.
    Download(&'a B, &'a mut [u8]),
}

/// Runs the steps one after another.
///
/// # Errors
/// That of the first step that fails.
pub fn run_steps<D: Driver + ?Sized>(driver: &mut D, steps: &mut [Step<'_, D::Buffer>]) -> Result<(), Error> {
    steps.iter_mut().try_for_each(|step| match step {
        Step::Upload(buffer, bytes) => driver.upload(buffer, 0, bytes),
        Step::Fill(buffer, range, byte) => driver.fill(buffer, range.clone(), *byte),
        Step::Launch(kernel, blocks, arguments) => driver.launch(kernel, *blocks, arguments),
        Step::Download(buffer, out) => driver.download(buffer, 0, out),
    })
}

/// A kernel argument.
#[derive(Debug)]
pub enum Argument<'a, B> {
    /// Address of a buffer's first byte.
    Buffer(&'a B),
    /// Address at a byte offset in a buffer.
    Inside(&'a B, usize),
    /// A null pointer.
    Null,
    /// A 32-bit integer.
    U32(u32),
    /// A 64-bit integer.
    U64(u64),
    /// A 32-bit float.
    F32(f32),
}

impl<B> Clone for Argument<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Argument<'_, B> {}
