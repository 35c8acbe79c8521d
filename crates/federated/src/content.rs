//! Models and updates as bytes: 32-bit little-endian floats, and their digests.

use ring::digest::{Context, SHA256, digest as ring_digest};

use crate::error::{InvalidInput, require};
use crate::model::check_vector;
use crate::round::Digest;

/// Returns the SHA-256 of a content.
#[must_use]
pub fn digest(content: &[u8]) -> Digest {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(ring_digest(&SHA256, content).as_ref());
    bytes
}

/// The SHA-256 of a content that is not in memory as a whole.
#[derive(Clone)]
pub struct DigestStream(Context);

impl Default for DigestStream {
    fn default() -> Self {
        Self(Context::new(&SHA256))
    }
}

impl DigestStream {
    /// Adds the next bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the digest of all bytes.
    #[must_use]
    pub fn finish(self) -> Digest {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(self.0.finish().as_ref());
        bytes
    }
}

/// Decodes the content of an update: 32-bit little-endian floats.
///
/// # Errors
/// It has another length or another digest, or a value that is not finite.
pub fn decode_update(content: &[u8], parameters: usize, expected: &Digest) -> Result<Vec<f32>, InvalidInput> {
    let bytes = 4 * parameters;
    require(content.len() == bytes, "update", format!("{} bytes", content.len()), &format!("{bytes} bytes"))?;
    require(digest(content) == *expected, "digest", "another one", "the SHA-256 of the uploaded content")?;
    let values = decode_values(content);
    check_vector("update", &values, parameters)?;
    Ok(values)
}

/// Checks a chunk of an update that is not held in memory as a whole.
///
/// # Errors
/// A value is not finite.
pub fn check_chunk(chunk: &[u8]) -> Result<(), InvalidInput> {
    let values = decode_values(chunk);
    check_vector("update", &values, chunk.len() / 4)
}

/// Returns the digest of an update of more than one block whose model is on disk: that of the digests of its chunks. The server then checks a
/// commit without a pass over the content.
#[must_use]
pub fn digest_of_chunks(chunks: &[Digest]) -> Digest {
    digest(&chunks.concat())
}

/// Decodes 32-bit little-endian floats; bytes after the last whole one are left out.
#[must_use]
pub fn decode_values(content: &[u8]) -> Vec<f32> {
    content.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Encodes values as 32-bit little-endian floats.
#[must_use]
pub fn encode_values(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_cover_every_chunk_in_its_order() {
        let mut stream = DigestStream::default();
        stream.add(b"ab");
        stream.add(b"c");
        assert_eq!(stream.finish(), digest(b"abc"));
        let of = |chunks: &[&[u8]]| digest_of_chunks(&chunks.iter().map(|chunk| digest(chunk)).collect::<Vec<_>>());
        assert_eq!(of(&[b"a", b"b"]), of(&[b"a", b"b"]));
        for other in [[b"b", b"a"], [b"a", b"c"], [b"c", b"b"]] {
            assert_ne!(of(&[b"a", b"b"]), of(&other.map(|chunk| &chunk[..])));
        }
    }

    #[test]
    fn chunk_with_a_value_that_is_not_finite_is_refused() {
        assert!(check_chunk(&encode_values(&[1.0, -2.0])).is_ok());
        for value in [f32::NAN, f32::INFINITY] {
            assert!(check_chunk(&encode_values(&[1.0, value])).unwrap_err().to_string().contains("at 1"));
        }
    }
}
