//! The stored bytes of an item: a head, then the fields as [`crate::schema`] encodes them.
//!
//! ```text
//! u64 policy version | u64 trajectory or prompt | u8 length of the tag | tag | fields
//! ```
//!
//! Little-endian. A reader of the head never touches the fields.

/// Longest tag, in bytes.
pub const MAX_TAG_BYTES: usize = u8::MAX as usize;
/// Maximum number of bytes of a head.
pub const MAX_HEAD_BYTES: usize = 17 + MAX_TAG_BYTES;
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
    use crate::schema::{DType, Field, Schema, Value};

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

    /// Bytes of format version 1, which stay readable: a change needs a new version in the head of the files.
    #[test]
    fn stored_bytes_are_those_of_version_1() {
        let field = |name: &str, dtype, shape: &[u32], jagged| Field {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            jagged,
        };
        let fields = vec![
            field("obs", DType::Float32, &[2], false),
            field("tokens", DType::UInt16, &[], true),
            field("done", DType::Bool, &[], false),
        ];
        let schema = Schema::new(fields).unwrap();
        let obs: Vec<u8> = [1.0_f32, -2.5].iter().flat_map(|it| it.to_le_bytes()).collect();
        let mut payload = Vec::new();
        Head { version: 7, trajectory: 0x0102_0304_0506_0708, tag: b"done" }.encode(&mut payload);
        let values = [
            Value { field: "obs", dtype: DType::Float32, shape: &[2], bytes: &obs },
            Value { field: "tokens", dtype: DType::UInt16, shape: &[3], bytes: &[1, 0, 2, 0, 255, 255] },
            Value { field: "done", dtype: DType::Bool, shape: &[], bytes: &[1] },
        ];
        payload.extend(schema.encode(&values).unwrap());
        let golden: &[u8] = &[
            7, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 4, b'd', b'o', b'n', b'e', // head
            0, 0, 0x80, 0x3F, 0, 0, 0x20, 0xC0, // obs
            3, 0, 0, 0, 1, 0, 2, 0, 255, 255, // tokens
            1,   // done
        ];
        assert_eq!(payload, golden);
        let (head, fields) = Head::decode(golden).unwrap();
        assert_eq!((head.version, head.tag), (7, &b"done"[..]));
        let ranges = schema.ranges(fields).unwrap();
        assert_eq!((ranges[1].rows, &fields[ranges[1].bytes.clone()]), (Some(3), &[1, 0, 2, 0, 255, 255][..]));
    }

    #[test]
    fn age_has_an_exact_limit() {
        assert_eq!((oldest_version(10, 2), oldest_version(1, 2)), (8, 0));
    }
}
