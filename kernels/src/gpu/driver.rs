//! What passes ask of a driver: memory, copies, launches.

use crate::Error;
use std::ops::Range;

/// Threads of a block, of every kernel.
pub const THREADS: usize = 256;

/// Runs kernels by name on memory of its own. Calls take effect in call order.
pub trait Driver: Send {
    /// Memory of the device, given back when dropped; at least 256-byte aligned.
    type Buffer: Send;
    /// What a driver keeps of a [sequence](Driver::sequence).
    type Graph: Send;

    /// Memory for `bytes` bytes, more than 0, whose content is undefined.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`].
    fn allocate(&mut self, bytes: usize) -> Result<Self::Buffer, Error>;

    /// Copies `bytes` to `buffer`, from `offset` bytes on.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn upload(&mut self, buffer: &Self::Buffer, offset: usize, bytes: &[u8]) -> Result<(), Error>;

    /// Fills `out` from `buffer`, from `offset` bytes on, with what all calls before have made of it.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn download(&mut self, buffer: &Self::Buffer, offset: usize, out: &mut [u8]) -> Result<(), Error>;

    /// Copies the first `bytes` bytes of one buffer to another.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn copy(&mut self, from: &Self::Buffer, to: &Self::Buffer, bytes: usize) -> Result<(), Error>;

    /// Fills a range, in bytes.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn fill(&mut self, buffer: &Self::Buffer, range: Range<usize>, byte: u8) -> Result<(), Error>;

    /// Launches `blocks` (more than 0) blocks of [`THREADS`] threads.
    ///
    /// The arguments are those of the kernel's declaration, in order; whoever launches answers for it, and for slots and lengths
    /// being in range.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn launch(
        &mut self,
        kernel: &'static str,
        blocks: u32,
        arguments: &[Argument<'_, Self::Buffer>],
    ) -> Result<(), Error>;

    /// Waits until all calls before have taken effect; what went wrong in a launch shows here or in a download, if not before.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn wait(&mut self) -> Result<(), Error>;

    /// Takes these steps in turn, and waits for the last of them. A driver may keep in `kept` what lets it ask for all of them at once the
    /// next time. Whoever gives that again gives the same steps again: the same buffers, ranges, kernels, blocks and arguments, and as many
    /// bytes; which bytes go up is another matter.
    ///
    /// # Errors
    /// [`Error::Full`], with nothing done; [`Error::Failed`].
    fn sequence(&mut self, kept: &mut Option<Self::Graph>, steps: &mut [Step<'_, Self::Buffer>]) -> Result<(), Error> {
        let _ = kept;
        in_turn(self, steps)?;
        self.wait()
    }
}

/// A step of a sequence.
#[derive(Debug)]
pub enum Step<'a, B> {
    /// These bytes go to the begin of a buffer.
    Upload(&'a B, &'a [u8]),
    /// A range of a buffer, in bytes, is filled.
    Fill(&'a B, Range<usize>, u8),
    /// So many blocks of a kernel are launched.
    Launch(&'static str, u32, &'a [Argument<'a, B>]),
    /// The begin of a buffer comes back.
    Download(&'a B, &'a mut [u8]),
}

/// Asks a driver for one step after the other.
///
/// # Errors
/// As the first that fails.
pub fn in_turn<D: Driver + ?Sized>(driver: &mut D, steps: &mut [Step<'_, D::Buffer>]) -> Result<(), Error> {
    steps.iter_mut().try_for_each(|step| match step {
        Step::Upload(buffer, bytes) => driver.upload(buffer, 0, bytes),
        Step::Fill(buffer, range, byte) => driver.fill(buffer, range.clone(), *byte),
        Step::Launch(kernel, blocks, arguments) => driver.launch(kernel, *blocks, arguments),
        Step::Download(buffer, out) => driver.download(buffer, 0, out),
    })
}

/// An argument of a kernel.
#[derive(Debug)]
pub enum Argument<'a, B> {
    /// Address of a buffer's first byte.
    Buffer(&'a B),
    /// An address so many bytes behind that.
    Inside(&'a B, usize),
    /// A null pointer.
    Null,
    /// A number of 32 bits.
    U32(u32),
    /// A number of 64 bits.
    U64(u64),
    /// A number with a fraction.
    F32(f32),
}

impl<B> Clone for Argument<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Argument<'_, B> {}
