//! What passes ask of a driver: memory, copies, launches.

use crate::Error;
use std::ops::Range;

/// Threads of a block, of every kernel.
pub const THREADS: usize = 256;

/// Runs kernels by name on memory of its own. Calls take effect in call order.
pub trait Driver: Send {
    /// Memory of the device, given back when dropped; at least 256-byte aligned.
    type Buffer: Send;

    /// Memory for `bytes` bytes, more than 0, whose content is undefined.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`].
    fn allocate(&mut self, bytes: usize) -> Result<Self::Buffer, Error>;

    /// Copies `bytes` to `buffer`, from `offset` bytes on.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn upload(&mut self, buffer: &mut Self::Buffer, offset: usize, bytes: &[u8]) -> Result<(), Error>;

    /// Fills `out` from `buffer`, from `offset` bytes on, with what all calls before have made of it.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn download(&mut self, buffer: &Self::Buffer, offset: usize, out: &mut [u8]) -> Result<(), Error>;

    /// Copies the first `bytes` bytes of one buffer to another.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn copy(&mut self, from: &Self::Buffer, to: &mut Self::Buffer, bytes: usize) -> Result<(), Error>;

    /// Fills a range, in bytes.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn fill(&mut self, buffer: &mut Self::Buffer, range: Range<usize>, byte: u8) -> Result<(), Error>;

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
