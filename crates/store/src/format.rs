//! Common file header: magic, format version, cluster, store and shape.
//!
//! Invariants: a file of another cluster, store or shape, or of an unknown version, is rejected before the rest is read;
//! multi-byte values are little-endian; every layout change is a new [`VERSION`], and old golden files are kept.

use engram_memory::{ClusterId, FeatureShape, FeatureType, Law, Shape, StoreId};

use crate::Error;

/// Format version of all files of this crate.
pub(crate) const VERSION: u32 = 1;
/// Bytes that [`encode`] appends.
pub(crate) const HEAD_BYTES: usize = 64;

/// Owner of a file: part of the header of log segments, snapshots and the identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileHead {
    /// Cluster.
    pub cluster: ClusterId,
    /// Store that wrote the file.
    pub store: StoreId,
    /// Partitions, law and features of the cluster.
    pub shape: Shape,
}

impl FileHead {
    /// Format version that this build reads and writes.
    pub const VERSION: u32 = VERSION;

    /// Checks that a file with header `found` belongs to this cluster and store.
    pub(crate) fn check(&self, found: &Self, path: &str) -> Result<(), Error> {
        self.check_cluster(found, path)?;
        if found.store != self.store {
            return Err(Error::OtherStore { path: path.into(), found: found.store, expected: self.store });
        }
        Ok(())
    }

    /// Checks that a file with header `found` belongs to any store of this cluster.
    pub(crate) fn check_cluster(&self, found: &Self, path: &str) -> Result<(), Error> {
        if found.cluster != self.cluster {
            return Err(Error::OtherCluster { path: path.into(), found: found.cluster, expected: self.cluster });
        }
        if found.shape != self.shape {
            return Err(Error::OtherShape { path: path.into(), found: found.shape, expected: self.shape });
        }
        Ok(())
    }
}

/// Appends the header of [`HEAD_BYTES`] bytes.
pub(crate) fn encode(magic: &[u8; 8], head: &FileHead, out: &mut Vec<u8>) {
    out.extend_from_slice(magic);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&head.shape.partitions.to_le_bytes());
    out.extend_from_slice(&head.cluster.0.to_le_bytes());
    out.extend_from_slice(&head.store.0.to_le_bytes());
    out.extend_from_slice(&head.shape.law.code().to_le_bytes());
    out.extend_from_slice(&head.shape.features.dimension.to_le_bytes());
    out.extend_from_slice(&head.shape.features.dtype.code().to_le_bytes());
    out.extend_from_slice(&[0; 4]);
}

/// Decodes the output of [`encode`]. The caller has verified the checksum, unless the version is unknown: only the offset of the
/// version is the same in all versions.
pub(crate) fn decode(bytes: &mut Bytes<'_>, magic: &[u8; 8], path: &str) -> Result<FileHead, Error> {
    let corrupt = |what| Error::Corrupt { path: path.into(), offset: 0, what };
    check_version(bytes.0, magic, path, |_| false)?;
    let mut read = || {
        bytes.array::<12>()?;
        let partitions = bytes.u32()?;
        let cluster = ClusterId(bytes.u128()?);
        let store = StoreId(bytes.u128()?);
        let law = Law::from_code(bytes.u32()?)?;
        let dimension = bytes.u32()?;
        let dtype = FeatureType::from_code(bytes.u32()?)?;
        bytes.array::<4>()?;
        let features = FeatureShape { dimension, dtype };
        Some(FileHead { cluster, store, shape: Shape { partitions, law, features } })
    };
    read().ok_or_else(|| corrupt("header has an unknown decay law or feature type"))
}

/// Checks magic and version only. `is_intact` verifies the checksum of a header of this version: if it covers the given bytes with
/// [`VERSION`] in place of another version, that one is damage and not a newer format.
pub(crate) fn check_version(
    bytes: &[u8],
    magic: &[u8; 8],
    path: &str,
    is_intact: impl FnOnce(&[u8]) -> bool,
) -> Result<(), Error> {
    let corrupt = |what| Error::Corrupt { path: path.into(), offset: 0, what };
    let mut header = Bytes(bytes);
    if header.array() != Some(*magic) {
        return Err(corrupt("wrong magic number"));
    }
    let found = header.u32().ok_or_else(|| corrupt("truncated header"))?;
    if found == VERSION {
        return Ok(());
    }
    let mut current = bytes.to_vec();
    current[magic.len()..magic.len() + 4].copy_from_slice(&VERSION.to_le_bytes());
    if is_intact(&current) {
        return Err(corrupt("damaged format version"));
    }
    Err(Error::UnknownFormat { path: path.into(), found, supported: VERSION })
}

/// Whether the last four bytes are the CRC-32C of the others.
pub(crate) fn has_valid_crc(bytes: &[u8]) -> bool {
    bytes.split_last_chunk().is_some_and(|(covered, crc)| crc32c::crc32c(covered) == u32::from_le_bytes(*crc))
}

/// Reads values from the front of a slice; `None` if it is too short.
#[derive(Clone, Copy)]
pub(crate) struct Bytes<'a>(pub(crate) &'a [u8]);

impl<'a> Bytes<'a> {
    pub(crate) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn u128(&mut self) -> Option<u128> {
        self.array().map(u128::from_le_bytes)
    }
}
