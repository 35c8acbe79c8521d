//! The stored bytes of an item: a head, then the fields as [`crate::schema`] encodes them.
//!
//! ```text
//! u64 policy version | u64 trajectory or prompt | u8 length of the tag | tag | fields
//! ```
//!
//! Little-endian. A reader of the head never touches the fields.

/// Longest tag, in bytes.
pub const MAX_TAG_BYTES: usize = u8::MAX as usize;
/// Bytes of a head without tag.
const FIXED_BYTES: usize = 17;

/// What an item carries next to its fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Head<'a> {
    /// Policy version that produced the item.
    pub version: u64,
    /// Trajectory for slices, or prompt for groups; 0 = none.
    pub trajectory: u64,
    /// Tag, at most [`MAX_TAG_BYTES`].
    pub tag: &'a [u8],
}

impl<'a> Head<'a> {
    /// Appends the head to `payload`.
    ///
    /// # Panics
    /// The tag is longer than [`MAX_TAG_BYTES`].
    pub fn encode(&self, payload: &mut Vec<u8>) {
        payload.extend_from_slice(&self.version.to_le_bytes());
        payload.extend_from_slice(&self.trajectory.to_le_bytes());
        payload.push(u8::try_from(self.tag.len()).expect("a tag is checked before it is encoded"));
        payload.extend_from_slice(self.tag);
    }

    /// Splits a payload into head and fields; `None` if it is too short for a head.
    pub fn decode(payload: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (version, rest) = payload.split_first_chunk()?;
        let (trajectory, rest) = rest.split_first_chunk()?;
        let (&length, rest) = rest.split_first()?;
        let (tag, fields) = rest.split_at_checked(length.into())?;
        let head = Self { version: u64::from_le_bytes(*version), trajectory: u64::from_le_bytes(*trajectory), tag };
        Some((head, fields))
    }

    /// Returns the bytes of the head.
    pub const fn bytes(&self) -> usize {
        FIXED_BYTES + self.tag.len()
    }
}

/// Returns the lowest version of items that are not too old for a learner at `version`: at most `max_age` versions behind.
pub const fn oldest_version(version: u64, max_age: u64) -> u64 {
    version.saturating_sub(max_age)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_survives_and_a_short_payload_is_refused() {
        let head = Head { version: 7, trajectory: u64::MAX, tag: b"done" };
        let mut payload = Vec::new();
        head.encode(&mut payload);
        assert_eq!(payload.len(), head.bytes());
        payload.extend_from_slice(b"fields");
        assert_eq!(Head::decode(&payload), Some((head, &b"fields"[..])));
        assert_eq!(Head::decode(&payload[..18]), None);
        assert_eq!(Head::decode(&[]), None);
    }

    #[test]
    fn age_has_an_exact_limit() {
        assert_eq!((oldest_version(10, 2), oldest_version(1, 2)), (8, 0));
    }
}
