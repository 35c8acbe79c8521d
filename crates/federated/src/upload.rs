//! Resumable uploads in chunks: what arrived, what is missing, and the bounds. The bytes are stored by the caller.
//!
//! Uploads are independent: a slow one holds only its reservation, never a queue. Memory is bounded by the number of uploads and the total of
//! their declared sizes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::ClientId;

/// Name of an upload. A repeated request has the same key and changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UploadKey {
    /// The client.
    pub client: ClientId,
    /// The task that it works on.
    pub task: u64,
    /// A number that the client draws per upload.
    pub nonce: u64,
}

/// Bounds of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadLimits {
    /// Bytes of a chunk; the last one may be shorter. At most 16 MiB.
    pub chunk_bytes: u64,
    /// Bytes of one upload.
    pub upload_bytes: u64,
    /// Bytes of all uploads that are not complete.
    pub reserved_bytes: u64,
    /// Number of uploads that are not complete.
    pub uploads: usize,
}

/// Why a chunk or an upload was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UploadError {
    /// The upload is larger than allowed.
    #[error("upload of {bytes} bytes is not allowed; allowed: 1 to {allowed}")]
    Size {
        /// Declared size.
        bytes: u64,
        /// The limit.
        allowed: u64,
    },
    /// The server holds as many incomplete uploads as it may; the client retries later.
    #[error("too many incomplete uploads: retry later")]
    Busy,
    /// The key is in use with another size.
    #[error("upload was begun with {begun} bytes, not {bytes}")]
    Conflict {
        /// Size of the first request.
        begun: u64,
        /// Size of this request.
        bytes: u64,
    },
    /// No upload was begun under this key.
    #[error("no upload with this key: begin again")]
    Unknown,
    /// The chunk does not exist, or has another length.
    #[error("chunk {index} of {bytes} bytes is not allowed; allowed: chunk 0 to {last}, of {expected} bytes")]
    Chunk {
        /// Number of the chunk.
        index: u64,
        /// Its length.
        bytes: u64,
        /// Number of the last chunk.
        last: u64,
        /// Length that a chunk of this number has.
        expected: u64,
    },
    /// The chunk was damaged on the way.
    #[error("checksum of chunk {index} does not match: send it again")]
    Checksum {
        /// Number of the chunk.
        index: u64,
    },
}

/// State after a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkReceipt {
    /// Where the bytes belong; `None` when the chunk was there already.
    pub write_at: Option<u64>,
    /// All chunks are there.
    pub complete: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Upload {
    bytes: u64,
    /// One bit per chunk.
    chunks: Vec<u64>,
    missing: u64,
}

/// The incomplete uploads of a server. Serializable, so that an upload resumes after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uploads {
    limits: UploadLimits,
    reserved_bytes: u64,
    incomplete: BTreeMap<UploadKey, Upload>,
}

impl Uploads {
    /// Creates a server without uploads.
    #[must_use]
    pub const fn new(limits: UploadLimits) -> Self {
        Self { limits, reserved_bytes: 0, incomplete: BTreeMap::new() }
    }

    /// Begins or resumes an upload. Returns the first missing chunk.
    ///
    /// # Errors
    /// When the size is out of range, does not match an earlier request, or the server is at its bounds.
    pub fn begin(&mut self, key: UploadKey, bytes: u64) -> Result<u64, UploadError> {
        if let Some(upload) = self.incomplete.get(&key) {
            if upload.bytes != bytes {
                return Err(UploadError::Conflict { begun: upload.bytes, bytes });
            }
            return Ok(self.first_missing(upload));
        }
        if bytes == 0 || bytes > self.limits.upload_bytes {
            return Err(UploadError::Size { bytes, allowed: self.limits.upload_bytes });
        }
        let reserved_bytes = self.reserved_bytes.saturating_add(bytes);
        if self.incomplete.len() >= self.limits.uploads || reserved_bytes > self.limits.reserved_bytes {
            return Err(UploadError::Busy);
        }
        let missing = bytes.div_ceil(self.limits.chunk_bytes);
        self.reserved_bytes = reserved_bytes;
        self.incomplete.insert(key, Upload { bytes, chunks: vec![0; missing.div_ceil(64) as usize], missing });
        Ok(0)
    }

    /// Receives a chunk with its CRC-32C. A chunk that is there already is accepted again. A complete upload leaves this state: the caller
    /// submits it to the round.
    ///
    /// # Errors
    /// When there is no such upload or chunk, or the chunk is damaged. Nothing changes then.
    pub fn receive(
        &mut self,
        key: UploadKey,
        index: u64,
        chunk: &[u8],
        checksum: u32,
    ) -> Result<ChunkReceipt, UploadError> {
        let chunk_bytes = self.limits.chunk_bytes;
        let upload = self.incomplete.get_mut(&key).ok_or(UploadError::Unknown)?;
        let last = upload.bytes.div_ceil(chunk_bytes) - 1;
        let expected = if index == last { upload.bytes - last * chunk_bytes } else { chunk_bytes };
        if index > last || chunk.len() as u64 != expected {
            return Err(UploadError::Chunk { index, bytes: chunk.len() as u64, last, expected });
        }
        if crc32c::crc32c(chunk) != checksum {
            return Err(UploadError::Checksum { index });
        }
        let (word, bit) = ((index / 64) as usize, 1 << (index % 64));
        let repeated = upload.chunks[word] & bit != 0;
        if !repeated {
            upload.chunks[word] |= bit;
            upload.missing -= 1;
        }
        let complete = upload.missing == 0;
        if complete {
            self.abandon(key);
        }
        Ok(ChunkReceipt { write_at: (!repeated).then_some(index * chunk_bytes), complete })
    }

    /// Forgets an upload whose lease ended. Returns whether there was one.
    pub fn abandon(&mut self, key: UploadKey) -> bool {
        let removed = self.incomplete.remove(&key);
        self.reserved_bytes -= removed.as_ref().map_or(0, |upload| upload.bytes);
        removed.is_some()
    }

    fn first_missing(&self, upload: &Upload) -> u64 {
        let chunks = upload.bytes.div_ceil(self.limits.chunk_bytes);
        (0..chunks).find(|index| upload.chunks[(index / 64) as usize] & 1 << (index % 64) == 0).unwrap_or(chunks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: UploadLimits =
        UploadLimits { chunk_bytes: 1 << 20, upload_bytes: 1 << 30, reserved_bytes: 2 << 30, uploads: 2_000 };

    fn key(client: ClientId) -> UploadKey {
        UploadKey { client, task: client, nonce: 7 }
    }

    #[test]
    fn large_slow_upload_delays_no_small_one_and_resumes_after_a_cut_and_a_restart() {
        let mut uploads = Uploads::new(LIMITS);
        let (large, chunk) = (vec![0; 1 << 20], [5; 1_000]);
        let (large_sum, sum) = (crc32c::crc32c(&large), crc32c::crc32c(&chunk));
        assert_eq!(uploads.begin(key(0), 1 << 30), Ok(0));
        for index in 0..3 {
            assert!(!uploads.receive(key(0), index, &large, large_sum).unwrap().complete);
        }
        for client in 1..=1_000 {
            assert_eq!(uploads.begin(key(client), 1_000), Ok(0));
            assert!(uploads.receive(key(client), 0, &chunk, sum).unwrap().complete);
        }
        let mut uploads: Uploads = postcard::from_bytes(&postcard::to_stdvec(&uploads).unwrap()).unwrap();
        assert_eq!(uploads.begin(key(0), 1 << 30), Ok(3), "resumes where it was cut");
        for index in 3..1_024 {
            let receipt = uploads.receive(key(0), index, &large, large_sum).unwrap();
            assert_eq!(receipt, ChunkReceipt { write_at: Some(index << 20), complete: index == 1_023 });
        }
        assert_eq!((uploads.reserved_bytes, uploads.incomplete.len()), (0, 0));
    }

    #[test]
    fn repeated_damaged_and_foreign_chunks_change_nothing() {
        let mut uploads = Uploads::new(UploadLimits { chunk_bytes: 4, ..LIMITS });
        uploads.begin(key(1), 6).unwrap();
        let send =
            |uploads: &mut Uploads, index, chunk: &[u8]| uploads.receive(key(1), index, chunk, crc32c::crc32c(chunk));
        assert_eq!(send(&mut uploads, 0, b"abcd").unwrap().write_at, Some(0));
        assert_eq!(send(&mut uploads, 0, b"abcd").unwrap(), ChunkReceipt { write_at: None, complete: false });
        assert_eq!(uploads.receive(key(1), 1, b"ef", 0), Err(UploadError::Checksum { index: 1 }));
        assert!(matches!(send(&mut uploads, 1, b"efg"), Err(UploadError::Chunk { expected: 2, .. })));
        assert!(matches!(send(&mut uploads, 2, b"ef"), Err(UploadError::Chunk { last: 1, .. })));
        assert_eq!(uploads.receive(key(2), 0, b"abcd", 0), Err(UploadError::Unknown));
        assert_eq!(uploads.begin(key(1), 7), Err(UploadError::Conflict { begun: 6, bytes: 7 }));
        assert!(send(&mut uploads, 1, b"ef").unwrap().complete);
    }

    #[test]
    fn reservations_are_bounded() {
        let mut uploads = Uploads::new(UploadLimits { reserved_bytes: 10, uploads: 2, upload_bytes: 9, ..LIMITS });
        assert_eq!(uploads.begin(key(1), 10), Err(UploadError::Size { bytes: 10, allowed: 9 }));
        assert_eq!(uploads.begin(key(1), 9), Ok(0));
        assert_eq!(uploads.begin(key(2), 2), Err(UploadError::Busy));
        assert_eq!(uploads.begin(key(2), 1), Ok(0));
        assert!(uploads.abandon(key(1)) && !uploads.abandon(key(1)));
        assert_eq!(uploads.begin(key(3), 9), Ok(0));
        assert_eq!(uploads.begin(key(4), 1), Err(UploadError::Busy));
    }
}
