//! Codec of records, replies and ledgers in log and snapshots.
//!
//! Little-endian, one column after another, each preceded by its length. Decoding never allocates more than the input can contain,
//! and rejects unknown values and trailing bytes: a value has exactly one encoding. The format version is in the file header; a
//! change here is a new version there.

mod buffer;
mod ledger;
mod record;
mod reply;

pub use ledger::{decode_ledger, encode_ledger};
pub use record::{decode_record, encode_record};
pub use reply::{decode_reply, encode_reply};

/// Why bytes cannot be decoded. Their checksum was valid, so this is another version or a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The input ends inside a value.
    #[error("the input ends inside {0}")]
    Short(&'static str),
    /// A value unknown to this version.
    #[error("unknown {what} {found}")]
    Unknown {
        /// Kind of the value.
        what: &'static str,
        /// The value.
        found: u64,
    },
    /// Values that contradict each other.
    #[error("invalid value: {0}")]
    Invalid(&'static str),
    /// Trailing bytes after the value.
    #[error("{0} trailing bytes")]
    LeftOver(usize),
}

type Decoded<T> = Result<T, DecodeError>;

/// Appends values to a buffer.
pub(crate) struct Writer<'a>(pub(crate) &'a mut Vec<u8>);

impl Writer<'_> {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u128(&mut self, value: u128) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Writes a length. Everything encoded here is bounded far below 4 GiB.
    pub(crate) fn len(&mut self, len: usize) {
        self.u32(u32::try_from(len).expect("columns are bounded by the record size"));
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.len(bytes.len());
        self.0.extend_from_slice(bytes);
    }

    pub(crate) fn u32s(&mut self, values: &[u32]) {
        self.len(values.len());
        self.0.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    pub(crate) fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        self.u8(u8::from(value.is_some()));
        if let Some(value) = value {
            write(self, value);
        }
    }
}

/// Reads values from the front of a slice.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, len: usize, what: &'static str) -> Decoded<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len).ok_or(DecodeError::Short(what))?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Decoded<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Decoded<u8> {
        Ok(self.array::<1>(what)?[0])
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Decoded<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Decoded<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    pub(crate) fn u128(&mut self, what: &'static str) -> Decoded<u128> {
        self.array(what).map(u128::from_le_bytes)
    }

    pub(crate) fn bool(&mut self, what: &'static str) -> Decoded<bool> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(DecodeError::Unknown { what, found: found.into() }),
        }
    }

    /// Reads the bytes of a column of `size`-byte values.
    pub(crate) fn column(&mut self, size: usize, what: &'static str) -> Decoded<&'a [u8]> {
        let len = self.u32(what)? as usize;
        self.take(len.checked_mul(size).ok_or(DecodeError::Short(what))?, what)
    }

    /// Reads a count of values of at least `size` bytes each, so that an impossible count causes no allocation.
    pub(crate) fn count(&mut self, size: usize, what: &'static str) -> Decoded<usize> {
        let count = self.u32(what)? as usize;
        if count.saturating_mul(size) > self.0.len() { Err(DecodeError::Short(what)) } else { Ok(count) }
    }

    pub(crate) fn bytes(&mut self, what: &'static str) -> Decoded<&'a [u8]> {
        self.column(1, what)
    }

    pub(crate) fn u32s(&mut self, what: &'static str) -> Decoded<Vec<u32>> {
        Ok(words(self.column(4, what)?).map(u32::from_le_bytes).collect())
    }

    pub(crate) fn option<T>(
        &mut self,
        what: &'static str,
        read: impl FnOnce(&mut Self) -> Decoded<T>,
    ) -> Decoded<Option<T>> {
        if self.bool(what)? { read(self).map(Some) } else { Ok(None) }
    }

    pub(crate) fn finish(self) -> Decoded<()> {
        if self.0.is_empty() { Ok(()) } else { Err(DecodeError::LeftOver(self.0.len())) }
    }
}

/// Iterates over the `N`-byte words of a column.
pub(crate) fn words<const N: usize>(column: &[u8]) -> impl Iterator<Item = [u8; N]> {
    let (words, _) = column.as_chunks::<N>();
    words.iter().copied()
}
