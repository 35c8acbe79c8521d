//! Log segments from a description: any value in any field, with checksums that are correct unless disabled.
//!
//! Intentionally a second implementation of the layouts documented in `engram_store::wal`: an encoding error of one is rejected by the other.

use crate::input::Input;
use engram_memory::{ClusterId, FeatureShape, Law, Shape, StoreId};
use engram_store::{FileHead, SimDisk};

const PAGE: usize = 4_096;
const HEADER_BYTES: usize = 48;

/// Header identity of the log.
pub(crate) fn head() -> FileHead {
    let shape = Shape { partitions: 4, law: Law::Linear, features: FeatureShape::NONE };
    FileHead { cluster: ClusterId(7), store: StoreId(11), shape }
}

/// Returns the file name of a segment.
fn name(index: u64) -> String {
    format!("wal-{index:016x}.log")
}

/// Returns an arbitrary value of the input if the bit is set, otherwise the correct one.
fn or_arbitrary<T>(flags: u8, bit: u8, right: T, arbitrary: impl FnOnce() -> T) -> T {
    if flags & 1 << bit == 0 { right } else { arbitrary() }
}

/// Writes up to four segments to `disk` as described by `input`. Returns the number of entries before the first wrong checksum: at most that many
/// may be recovered.
pub(crate) fn assemble(disk: &SimDisk, input: &mut Input<'_>) -> usize {
    let (mut index, mut end, mut entries, mut whole) = (1, 0, 0, usize::MAX);
    for _ in 0..4 {
        if input.is_empty() {
            break;
        }
        let flags = input.u8();
        let stated_index = or_arbitrary(flags, 0, index, || input.u64());
        let starts_at = or_arbitrary(flags, 1, end, || input.u64());
        let carried = or_arbitrary(flags, 2, 0, || input.u64());
        let uuid = u128::from(input.u8()) + 1;
        let mut bytes = segment_head(uuid, stated_index, starts_at, carried);
        let mut prev_crc = crc32c::crc32c(&bytes[..PAGE - 4]);
        if flags & 8 != 0 {
            bytes[PAGE - 1] ^= 1;
            whole = whole.min(entries);
        }
        let seed = crc32c::crc32c(&uuid.to_le_bytes());
        end = starts_at;
        for _ in 0..input.u8() & 7 {
            let (batch, crc, is_whole) = batch(input, seed, end, prev_crc, &mut entries, whole);
            whole = is_whole;
            (prev_crc, end) = (crc, end.wrapping_add(batch.len() as u64));
            bytes.extend_from_slice(&batch);
        }
        if flags & 16 != 0 {
            bytes.resize(bytes.len() + PAGE, 0);
        }
        if flags & 32 != 0 {
            bytes.truncate(bytes.len() - usize::from(input.u16()) % bytes.len());
        }
        disk.put(&name(index), &bytes);
        index += 1;
    }
    whole.min(entries)
}

fn segment_head(uuid: u128, index: u64, starts_at: u64, carried: u64) -> Vec<u8> {
    let FileHead { cluster, store, shape } = head();
    let mut page = b"ENGRWAL\0".to_vec();
    page.extend_from_slice(&1_u32.to_le_bytes());
    page.extend_from_slice(&shape.partitions.to_le_bytes());
    page.extend_from_slice(&cluster.0.to_le_bytes());
    page.extend_from_slice(&store.0.to_le_bytes());
    for code in [shape.law.code(), shape.features.dimension, shape.features.dtype.code(), 0] {
        page.extend_from_slice(&code.to_le_bytes());
    }
    page.extend_from_slice(&uuid.to_le_bytes());
    for value in [index, starts_at, carried] {
        page.extend_from_slice(&value.to_le_bytes());
    }
    page.resize(PAGE - 4, 0);
    let crc = crc32c::crc32c(&page);
    page.extend_from_slice(&crc.to_le_bytes());
    page
}

/// Appends the next batch with its checksum; `whole` becomes whether it is valid.
fn batch(
    input: &mut Input<'_>,
    seed: u32,
    position: u64,
    prev_crc: u32,
    entries: &mut usize,
    mut whole: usize,
) -> (Vec<u8>, u32, usize) {
    let flags = input.u8();
    if flags & 0b1100_0000 != 0 {
        whole = whole.min(*entries);
    }
    let mut commits = Vec::new();
    let named = input.u8() & 3;
    for _ in 0..named {
        commits.extend_from_slice(&u32::from(input.u8()).to_le_bytes());
        commits.extend_from_slice(&u64::from(input.u16()).to_le_bytes());
        commits.extend_from_slice(&u64::from(input.u16()).to_le_bytes());
    }
    let mut records = Vec::new();
    for _ in 0..input.u8() & 15 {
        record(input, &mut records);
        *entries += 1;
    }
    let header_bytes = HEADER_BYTES + commits.len();
    let len = (header_bytes + records.len()).next_multiple_of(PAGE);
    let mut body = records.clone();
    body.resize(len - header_bytes, 0);
    let mut covered = Vec::new();
    covered.extend_from_slice(&or_arbitrary(flags, 0, len as u32, || input.u32()).to_le_bytes());
    covered.extend_from_slice(&or_arbitrary(flags, 1, u32::from(named), || input.u32()).to_le_bytes());
    let position = or_arbitrary(flags, 2, position, || input.u64());
    covered.extend_from_slice(&position.to_le_bytes());
    covered.extend_from_slice(&or_arbitrary(flags, 3, 0, || input.u64()).to_le_bytes());
    covered.extend_from_slice(&or_arbitrary(flags, 4, prev_crc, || input.u32()).to_le_bytes());
    let body_crc = crc32c::crc32c_append(seed, &body) ^ u32::from(flags >> 6 & 1);
    covered.extend_from_slice(&body_crc.to_le_bytes());
    covered.extend_from_slice(&or_arbitrary(flags, 5, records.len() as u32, || input.u32()).to_le_bytes());
    covered.extend_from_slice(&[0; 4]);
    covered.extend_from_slice(&commits);
    let crc = crc32c::crc32c_append(seed, &covered) ^ u32::from(flags >> 7);
    let batch = [b"EBAT".as_slice(), &crc.to_le_bytes(), &covered, &body].concat();
    (batch, crc, whole)
}

/// Appends one entry; kinds 0 and above 5 have arbitrary bytes.
fn record(input: &mut Input<'_>, out: &mut Vec<u8>) {
    let kind = input.u8();
    if !(1..=5).contains(&kind) {
        return out.extend_from_slice(input.bytes());
    }
    let (partition, term, lsn) = (input.u8(), input.u16(), input.u16());
    let payload = input.bytes();
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.push(kind);
    out.extend_from_slice(&u32::from(partition).to_le_bytes());
    out.extend_from_slice(&u64::from(term).to_le_bytes());
    out.extend_from_slice(&u64::from(lsn).to_le_bytes());
    out.extend_from_slice(payload);
}

/// Writes a log of one batch with these records.
pub(crate) fn of_records(disk: &SimDisk, records: &[u8]) {
    let mut bytes = segment_head(1, 1, 0, 0);
    let prev_crc = crc32c::crc32c(&bytes[..PAGE - 4]);
    let seed = crc32c::crc32c(&1_u128.to_le_bytes());
    let len = (HEADER_BYTES + records.len()).next_multiple_of(PAGE);
    let mut body = records.to_vec();
    body.resize(len - HEADER_BYTES, 0);
    let mut covered = Vec::new();
    for word in [len as u32, 0, 0, 0, 0, 0, prev_crc, crc32c::crc32c_append(seed, &body), records.len() as u32, 0] {
        covered.extend_from_slice(&word.to_le_bytes());
    }
    let crc = crc32c::crc32c_append(seed, &covered);
    bytes.extend_from_slice(&[b"EBAT".as_slice(), &crc.to_le_bytes(), &covered, &body].concat());
    disk.put(&name(1), &bytes);
}
