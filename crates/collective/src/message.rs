//! Messages of a reduction: a tag that no two messages of a group share, and a checksum over tag and payload.

/// Identifies a message. Without all of it, reductions that overlap would take each other's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag {
    /// Generation of the group. Receivers discard other generations.
    pub generation: u64,
    /// Training step.
    pub step: u64,
    /// Bucket of the step.
    pub bucket: u32,
    /// Phase of the schedule.
    pub phase: u16,
    /// Chunk of the range.
    pub chunk: u16,
    /// Rank of the sender.
    pub from: u16,
}

/// Bytes of a header: tag, length of the payload and checksum.
pub const HEADER_BYTES: usize = 8 + 8 + 4 + 2 + 2 + 2 + 2 + 4 + 4;
/// Largest payload of one message in bytes; longer ranges travel as chunks.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 20;
/// First bytes of the two reserved ones: the version of the header.
const VERSION: u16 = 1;

/// Why a message was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The header has another version.
    #[error("message version: {0} is not allowed; allowed: {VERSION}")]
    Version(u16),
    /// The payload is too long.
    #[error("message payload: {0} bytes are not allowed; allowed: at most {MAX_PAYLOAD_BYTES}")]
    Length(u32),
    /// Tag or payload was damaged.
    #[error("message checksum of step {} bucket {} from rank {} does not match", .0.step, .0.bucket, .0.from)]
    Checksum(Tag),
}

/// Encodes the header of a message with this payload.
pub fn header(tag: Tag, payload: &[u8]) -> [u8; HEADER_BYTES] {
    let mut bytes = fields(tag, payload.len());
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&bytes[..HEADER_BYTES - 4]), payload);
    bytes[HEADER_BYTES - 4..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

fn fields(tag: Tag, payload_bytes: usize) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    let mut at = 0;
    let mut put = |part: &[u8]| {
        bytes[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    };
    put(&tag.generation.to_le_bytes());
    put(&tag.step.to_le_bytes());
    put(&tag.bucket.to_le_bytes());
    put(&tag.phase.to_le_bytes());
    put(&tag.chunk.to_le_bytes());
    put(&tag.from.to_le_bytes());
    put(&VERSION.to_le_bytes());
    put(&(payload_bytes as u32).to_le_bytes());
    bytes
}

/// Encodes the header of a message whose payload stays in the memory of one host: the checksum covers the tag and the length only.
pub fn local_header(tag: Tag, payload_bytes: usize) -> [u8; HEADER_BYTES] {
    let mut bytes = fields(tag, payload_bytes);
    let checksum = crc32c::crc32c(&bytes[..HEADER_BYTES - 4]);
    bytes[HEADER_BYTES - 4..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Decodes a header into tag and payload length. The checksum is checked by [`verify`] once the payload is there.
///
/// # Errors
/// [`Error::Version`], [`Error::Length`]: nothing may be allocated for such a message.
pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<(Tag, usize), Error> {
    let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
    let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
    let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let tag = Tag {
        generation: u64_at(0),
        step: u64_at(8),
        bucket: u32_at(16),
        phase: u16_at(20),
        chunk: u16_at(22),
        from: u16_at(24),
    };
    let (version, length) = (u16_at(26), u32_at(28));
    if version != VERSION {
        return Err(Error::Version(version));
    }
    if length as usize > MAX_PAYLOAD_BYTES {
        return Err(Error::Length(length));
    }
    Ok((tag, length as usize))
}

/// Checks tag and payload against the checksum of the header.
///
/// # Errors
/// [`Error::Checksum`], and those of [`decode`].
pub fn verify(header: &[u8; HEADER_BYTES], payload: &[u8]) -> Result<Tag, Error> {
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&header[..HEADER_BYTES - 4]), payload);
    compare(header, payload.len(), checksum)
}

/// Checks a header of [`local_header`].
///
/// # Errors
/// As [`verify`].
pub fn verify_local(header: &[u8; HEADER_BYTES], payload_bytes: usize) -> Result<Tag, Error> {
    compare(header, payload_bytes, crc32c::crc32c(&header[..HEADER_BYTES - 4]))
}

fn compare(header: &[u8; HEADER_BYTES], payload_bytes: usize, checksum: u32) -> Result<Tag, Error> {
    let (tag, length) = decode(header)?;
    let expected: [u8; 4] = std::array::from_fn(|index| header[HEADER_BYTES - 4 + index]);
    let valid = length == payload_bytes && checksum == u32::from_le_bytes(expected);
    if valid { Ok(tag) } else { Err(Error::Checksum(tag)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tag() -> impl Strategy<Value = Tag> {
        any::<(u64, u64, u32, u16, u16, u16)>().prop_map(|(generation, step, bucket, phase, chunk, from)| Tag {
            generation,
            step,
            bucket,
            phase,
            chunk,
            from,
        })
    }

    proptest! {
        #[test]
        fn message_survives_and_any_flipped_bit_is_found(
            tag in tag(), payload in proptest::collection::vec(any::<u8>(), 0..200), flip in any::<prop::sample::Index>(),
        ) {
            let mut bytes = header(tag, &payload).to_vec();
            bytes.extend_from_slice(&payload);
            let read = |bytes: &[u8]| {
                let header: [u8; HEADER_BYTES] = bytes[..HEADER_BYTES].try_into().unwrap();
                verify(&header, &bytes[HEADER_BYTES..])
            };
            prop_assert_eq!(read(&bytes), Ok(tag));
            let bit = flip.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(read(&bytes).is_err());
        }
    }

    #[test]
    fn oversized_payload_is_refused_before_it_is_read() {
        let tag = Tag { generation: 1, step: 2, bucket: 3, phase: 4, chunk: 5, from: 6 };
        let mut bytes = header(tag, &[]);
        bytes[28..32].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(decode(&bytes), Err(Error::Length(u32::MAX)));
    }
}
