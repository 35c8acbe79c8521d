//! Parts of a fatbin: one per architecture, and PTX.

use std::collections::BTreeMap;

const HEADER_BYTES: usize = 16;
/// Kind of a PTX part; all others are code for a real architecture.
const PTX: u16 = 1;

/// Returns the names of the architectures in which two fatbins differ.
pub(super) fn differences(one: &[u8], other: &[u8]) -> Vec<String> {
    let (Some(one), Some(other)) = (parts(one), parts(other)) else {
        return vec!["its format (not a valid fatbin)".to_owned()];
    };
    let mut names: Vec<_> = one.keys().chain(other.keys()).filter(|name| one.get(*name) != other.get(*name)).collect();
    names.sort();
    names.dedup();
    match names.is_empty() {
        true => vec!["its header".to_owned()],
        false => names.into_iter().cloned().collect(),
    }
}

/// Returns header and payload by name; `None` for a truncated fatbin.
fn parts(bytes: &[u8]) -> Option<BTreeMap<String, &[u8]>> {
    let (mut parts, mut rest) = (BTreeMap::new(), bytes.get(HEADER_BYTES..)?);
    while !rest.is_empty() {
        let number = |at: usize, length: usize| -> Option<u64> {
            let bytes = rest.get(at..at + length)?;
            Some(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
        };
        let (kind, header, payload, architecture) = (number(0, 2)?, number(4, 4)?, number(8, 8)?, number(28, 4)?);
        let length = usize::try_from(header.checked_add(payload)?).ok()?;
        let name = if kind == u64::from(PTX) { "PTX of compute" } else { "sm" };
        parts.insert(format!("{name}_{architecture}"), rest.get(..length).filter(|part| !part.is_empty())?);
        rest = &rest[length..];
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(kind: u16, architecture: u32, payload: &[u8]) -> Vec<u8> {
        let mut part = vec![0; 32];
        part[..2].copy_from_slice(&kind.to_le_bytes());
        part[4..8].copy_from_slice(&32_u32.to_le_bytes());
        part[8..16].copy_from_slice(&(payload.len() as u64).to_le_bytes());
        part[28..].copy_from_slice(&architecture.to_le_bytes());
        part.extend(payload);
        part
    }

    #[test]
    fn differing_architecture_is_named() {
        let fatbin =
            |of_90: &[u8]| [vec![0; 16], part(1, 90, b"ptx"), part(2, 80, b"code"), part(2, 90, of_90)].concat();
        assert_eq!(differences(&fatbin(b"one"), &fatbin(b"two!")), ["sm_90"]);
        let without = &fatbin(b"one")[..16 + 35];
        assert_eq!(differences(&fatbin(b"one"), without), ["sm_80", "sm_90"]);
        let mut cut = fatbin(b"one");
        cut.pop();
        assert_eq!(differences(&fatbin(b"one"), &cut), ["its format (not a valid fatbin)"]);
    }
}
