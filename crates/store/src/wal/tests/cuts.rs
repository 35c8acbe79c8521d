//! A log truncated at any byte.

use super::super::batch::{Header, Link, PAGE};
use super::super::record;
use super::super::segment::Segment;
use super::*;

/// Decodes each cut from the start of its batch and of its record; a complete recovery at each of a million bytes would take
/// hours.
#[test]
fn a_log_truncated_at_any_byte_decodes_exactly_the_complete_records() {
    let disk = SimDisk::new(1);
    let large = Options { segment_bytes: 4 << 20, ..options() };
    let (mut wal, mut writer, ..) = try_open(&disk, large).unwrap();
    let mut draw = Draw(1);
    let all: Vec<OwnedEntry> = (1..=10_000).map(|lsn| OwnedEntry::command(0, lsn, draw.bytes(64))).collect();
    for entries in all.chunks(100) {
        write(&mut wal, &mut writer, entries).unwrap();
    }
    let end = writer.close().unwrap();
    let bytes = disk.bytes(&super::super::segment::name(1));
    assert_eq!(bytes.len() as u64, PAGE as u64 + end.0, "a graceful stop leaves nothing after the end");

    // A file that ends inside the header page is rejected.
    for cut in 0..PAGE {
        let short = SimDisk::new(0);
        short.put(&super::super::segment::name(1), &bytes[..cut]);
        assert!(matches!(Segment::open(&short, &head(), 1), Err(Error::Corrupt { .. })), "cut at {cut}");
    }

    let whole = SimDisk::new(0);
    whole.put(&super::super::segment::name(1), &bytes);
    let segment = Segment::open(&whole, &head(), 1).unwrap();
    let mut link = Link { seed: segment.seed, position: 0, prev_crc: segment.head_crc };
    let (mut start, mut records, mut cuts) = (PAGE, 0, PAGE);
    while start < bytes.len() {
        let header = Header::decode(&bytes[start..], link.seed).unwrap();
        header.check_link(link).unwrap();
        let end = start + header.len as usize;
        for cut in start..end {
            let decoded = Header::decode(&bytes[start..cut], link.seed)
                .and_then(|header| header.records(&bytes[start..cut], link.seed).map(<[u8]>::len));
            assert!(decoded.is_err(), "a batch cut at {cut} is incomplete");
        }
        let mut rest = header.records(&bytes[start..end], link.seed).unwrap();
        while !rest.is_empty() {
            let from = rest;
            let entry = record::decode(&mut rest).unwrap();
            assert_eq!(OwnedEntry::of(&entry), all[records]);
            for cut in 0..from.len() - rest.len() {
                let mut short = &from[..cut];
                assert!(
                    record::decode(&mut short).is_err() && short.len() == cut,
                    "a record cut at {cut} is incomplete"
                );
            }
            records += 1;
        }
        cuts += end - start;
        link = Link { position: link.position + u64::from(header.len), prev_crc: header.crc, ..link };
        start = end;
    }
    assert_eq!((records, cuts), (all.len(), bytes.len()));
}

/// Copies the log up to `bytes` of segment `at`, as if nothing later had been written.
fn cut(log: &Log, at: usize, bytes: usize) -> SimDisk {
    let disk = SimDisk::new(0);
    let names = log.segments();
    for name in &names[..at] {
        disk.put(name, &log.disk.bytes(name));
    }
    disk.put(&names[at], &log.disk.bytes(&names[at])[..bytes]);
    disk
}

#[test]
fn recovery_after_a_cut_replays_exactly_the_complete_batches_before_it() {
    recover_after_cuts(1_000);
}

#[test]
#[ignore = "full: thirty thousand recoveries of a log of ten thousand records take minutes"]
fn recovery_after_cuts_in_a_long_log_replays_exactly_the_complete_batches() {
    recover_after_cuts(10_000);
}

fn recover_after_cuts(records: usize) {
    let log = Log::of(records, 20, 2);
    let names = log.segments();
    let segments: Vec<Segment> =
        (1..=names.len() as u64).map(|index| Segment::open(&log.disk, &head(), index).unwrap()).collect();
    assert!(segments.len() > 3, "cuts fall into several segments");

    let mut cuts = Vec::new();
    for (at, segment) in segments.iter().enumerate() {
        let through = segments.get(at + 1).map(|next| next.head.starts_at);
        segment
            .walk(through, &mut |header, records| {
                let batch = segment.offset(header.position) as usize;
                cuts.extend([(at, batch), (at, batch + header.len as usize)]);
                let mut rest = records;
                while !rest.is_empty() {
                    record::decode(&mut rest).unwrap();
                    let end = batch + header.header_bytes() + records.len() - rest.len();
                    cuts.extend([(at, end - 1), (at, end), (at, end + 1)]);
                }
                Ok(())
            })
            .unwrap();
    }
    let mut draw = Draw(3);
    for _ in 0..1_000 {
        let at = draw.below(segments.len() as u64) as usize;
        cuts.push((at, PAGE + draw.below(segments[at].file_bytes - PAGE as u64) as usize));
    }
    for (at, bytes) in cuts {
        let bytes = bytes.min(segments[at].file_bytes as usize);
        let position = Position(segments[at].head.starts_at + (bytes - PAGE) as u64);
        let (recovery, replayed) = read(&cut(&log, at, bytes), None).unwrap();
        let expected = log.through(position);
        assert!(replayed == expected, "segment {at} cut at {bytes}: {} of {} entries", replayed.len(), expected.len());
        assert!(recovery.end <= position);
        let last_end = log.batches.iter().map(|(_, end)| *end).filter(|end| *end <= position).max();
        assert_eq!(recovery.dropped_bytes > 0, recovery.dropped_because.is_some());
        assert!(recovery.end >= last_end.unwrap_or_default());
    }
}
