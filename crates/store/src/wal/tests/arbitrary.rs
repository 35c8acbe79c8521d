//! Arbitrary bytes.

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::batch::{Header, MAX_HEADER_BYTES};
use super::super::record;
use super::super::segment::{Segment, name};
use super::*;

proptest! {
    #[test]
    fn decoders_never_panic_or_read_beyond_the_input(bytes in vec(any::<u8>(), 0..6_000), seed: u32) {
        let mut rest = &bytes[..];
        while record::decode(&mut rest).is_ok() && !rest.is_empty() {}
        prop_assert!(Header::decode(&bytes, seed).is_err());
        let disk = SimDisk::new(0);
        disk.put(&name(1), &bytes);
        prop_assert!(read(&disk, None).is_err());
    }

    #[test]
    fn garbage_after_or_within_a_log_is_never_replayed(
        garbage in vec(any::<u8>(), 1..5_000), at in 0u64..200_000, seed in 0u64..4
    ) {
        let log = Log::of(100, 10, seed);
        let name = log.segments()[0].clone();
        let mut bytes = log.disk.bytes(&name);
        let at = (at as usize).min(bytes.len());
        let end = (at + garbage.len()).min(bytes.len());
        bytes[at..end].copy_from_slice(&garbage[..end - at]);
        log.disk.put(&name, &bytes);
        if let Ok((recovery, replayed)) = read(&log.disk, None) {
            prop_assert_eq!(replayed, log.through(recovery.end));
        }
    }
}

/// A header with a valid checksum and a length beyond the file causes no allocation.
#[test]
fn an_impossible_length_is_rejected_before_allocation() {
    let mut bytes = vec![0; MAX_HEADER_BYTES];
    bytes[..4].copy_from_slice(b"EBAT");
    let records = u32::MAX - 2 * 4_096;
    bytes[8..12].copy_from_slice(&(records + 48).next_multiple_of(4_096).to_le_bytes());
    bytes[40..44].copy_from_slice(&records.to_le_bytes());
    let disk = SimDisk::new(0);
    drop(open(&disk));
    let segment = Segment::open(&disk, &head(), 1).unwrap();
    bytes[32..36].copy_from_slice(&segment.head_crc.to_le_bytes());
    let crc = crc32c::crc32c_append(segment.seed, &bytes[8..48]);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    let mut file = disk.bytes(&name(1));
    file[4_096..4_096 + bytes.len()].copy_from_slice(&bytes);
    disk.put(&name(1), &file);
    let (recovery, replayed) = read(&disk, None).unwrap();
    assert_eq!((recovery.end, recovery.dropped_because, replayed.len()), (Position(0), Some("truncated batch"), 0));

    let mut record = u32::MAX.to_le_bytes().to_vec();
    record.resize(record::HEADER_BYTES, 1);
    assert_eq!(record::decode(&mut &record[..]), Err("record exceeds the limit"));
}
