//! Payloads of an exported partition: readable by any thread, whatever happens to the state meanwhile.

use super::reference::{REFERENCE_BYTES, Reference};
use super::segment::SegmentFile;
use crate::Error;
use bytes::Bytes;
use std::sync::Arc;

/// Where an exported payload can be read from.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    File(Arc<SegmentFile>),
    /// The disk does not take it, for this reason.
    Memory(Bytes, std::io::ErrorKind),
}

/// A payload of an exported partition.
#[derive(Debug, Clone)]
pub struct StoredPayload {
    /// Place of its item in slot order.
    pub(crate) row: u32,
    pub(crate) reference: Reference,
    /// Content hash of its item.
    pub(crate) content: u128,
    pub(crate) source: Source,
    /// Whether no replica has it intact.
    pub(crate) is_lost: bool,
}

/// Of a length: the payload is lost; a reference follows in its place.
pub(crate) const LOST: u32 = 1 << 31;

impl PartialEq for StoredPayload {
    /// Whether both are the same payload, wherever they are.
    fn eq(&self, other: &Self) -> bool {
        let identity = |it: &Self| (it.row, it.reference.length, it.reference.hash, it.content);
        identity(self) == identity(other)
    }
}

impl Eq for StoredPayload {}

impl StoredPayload {
    /// Returns its length in a stream.
    pub(crate) const fn sent_length(&self) -> u32 {
        if self.is_lost { LOST | REFERENCE_BYTES as u32 } else { self.reference.length }
    }

    /// Reads and verifies it.
    ///
    /// # Errors
    /// [`Error::Corrupt`]; those of the disk.
    pub(crate) fn read(&self) -> Result<Bytes, Error> {
        match &self.source {
            Source::Memory(bytes, _) => Ok(bytes.clone()),
            Source::File(file) => {
                let Reference { offset, length, hash, .. } = self.reference;
                file.read_payload(offset, length, hash)
            }
        }
    }
}

/// The bytes of payloads in pieces; holds one payload at a time.
#[derive(Debug)]
pub(crate) struct PayloadStream {
    payloads: std::vec::IntoIter<StoredPayload>,
    rest: Bytes,
    piece_bytes: usize,
    /// The payload that failed to be read.
    pub(crate) failed: Option<Reference>,
}

impl PayloadStream {
    pub(crate) fn new(payloads: Vec<StoredPayload>, piece_bytes: usize) -> Self {
        Self { payloads: payloads.into_iter(), rest: Bytes::new(), piece_bytes, failed: None }
    }

    /// Returns the number of pieces of these payloads.
    pub(crate) fn pieces(payloads: &[StoredPayload], piece_bytes: usize) -> u64 {
        let bytes: u64 = payloads.iter().map(|payload| u64::from(payload.sent_length() & !LOST)).sum();
        bytes.div_ceil(piece_bytes as u64)
    }

    /// Returns the next piece, `None` after the last. Pieces have the same length, but for the last.
    ///
    /// # Errors
    /// Those of [`StoredPayload::read`].
    pub(crate) fn next(&mut self) -> Result<Option<Bytes>, Error> {
        let mut piece = Vec::new();
        loop {
            let missing = self.piece_bytes - piece.len();
            let taken = self.rest.split_to(self.rest.len().min(missing));
            if piece.is_empty() && taken.len() == self.piece_bytes {
                return Ok(Some(taken));
            }
            piece.extend_from_slice(&taken);
            if piece.len() == self.piece_bytes {
                return Ok(Some(piece.into()));
            }
            match self.payloads.next() {
                Some(payload) if payload.is_lost => {
                    let mut row = Vec::with_capacity(REFERENCE_BYTES);
                    payload.reference.encode(payload.content, &mut row);
                    self.rest = row.into();
                }
                Some(payload) => {
                    self.failed = Some(payload.reference);
                    self.rest = payload.read()?;
                    self.failed = None;
                }
                None => return Ok((!piece.is_empty()).then(|| piece.into())),
            }
        }
    }
}
