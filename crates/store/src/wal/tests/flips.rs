//! Bit flips on the medium.

use super::super::segment::Segment;
use super::*;

const FLIPS: u64 = 7_500;

/// Outcomes of bit flips.
#[derive(Debug, Default)]
struct Outcomes {
    /// The start fails.
    detected: u64,
    /// The last, unsealed batch was dropped, and the drop was reported.
    last_batch: u64,
    /// Preallocated bytes after the end: nothing was lost, and the garbage was reported.
    behind_the_end: u64,
}

fn flip_all(log: &Log, sealed_at: Option<Position>, seed: u64) -> Outcomes {
    let names = log.segments();
    let newest = Segment::open(&log.disk, &head(), names.len() as u64).unwrap();
    let (all, end) = (log.through(Position(u64::MAX)), read(&log.disk, sealed_at).unwrap().0.end);
    let last_start = log.batches[log.batches.len() - 2].1;
    let but_last = log.through(last_start);
    let files: Vec<(&String, u64)> = names.iter().map(|name| (name, log.disk.bytes(name).len() as u64 * 8)).collect();
    let bits = files.iter().map(|(_, bits)| bits).sum();
    let (mut draw, mut outcomes) = (Draw(seed), Outcomes::default());
    for _ in 0..FLIPS {
        let mut bit = draw.below(bits);
        let (name, _) = files
            .iter()
            .find(|(_, bits)| {
                let here = bit < *bits;
                bit -= if here { 0 } else { *bits };
                here
            })
            .unwrap();
        let is_newest = *name == names.last().unwrap();
        log.disk.flip_bit(name, bit);
        match read(&log.disk, sealed_at) {
            Err(_) => outcomes.detected += 1,
            Ok((recovery, replayed)) => {
                assert!(is_newest, "bit {bit} of {name} was not detected");
                assert!(recovery.dropped_bytes > 0, "bit {bit} of {name} was not reported");
                if bit / 8 >= newest.offset(end.0) {
                    assert_eq!((replayed, recovery.end), (all.clone(), end));
                    outcomes.behind_the_end += 1;
                } else {
                    assert!(bit / 8 >= newest.offset(last_start.0), "bit {bit} of {name} dropped a sealed batch");
                    assert_eq!((replayed, recovery.end), (but_last.clone(), last_start));
                    outcomes.last_batch += 1;
                }
            }
        }
        log.disk.flip_bit(name, bit);
    }
    println!("{FLIPS} bit flips in {bits} bits of {} segments (seed {seed}): {outcomes:?}", names.len());
    outcomes
}

#[test]
fn a_bit_flip_in_a_crashed_log_is_detected_or_drops_the_unsealed_last_batch() {
    let log = Log::of(2_000, 100, 4);
    let outcomes = flip_all(&log, None, 5);
    assert!(outcomes.detected > 0 && outcomes.last_batch > 0 && outcomes.behind_the_end > 0);
}

#[test]
fn every_bit_flip_in_a_gracefully_closed_log_is_detected() {
    let mut log = Log::of(2_000, 100, 6);
    let end = log.writer.close().unwrap();
    log.writer = open(&SimDisk::new(0)).1;
    let outcomes = flip_all(&log, Some(end), 7);
    assert_eq!((outcomes.detected, outcomes.last_batch, outcomes.behind_the_end), (FLIPS, 0, 0));
}

#[test]
fn an_idle_log_is_sealed_so_that_damage_to_the_last_batch_is_corruption() {
    let mut log = Log::of(40, 10, 8);
    let newest = log.segments().pop().unwrap();
    let index = log.segments().len() as u64;
    let (segment, last_end) = (Segment::open(&log.disk, &head(), index).unwrap(), log.batches.last().unwrap().1);
    let in_last_batch = (segment.offset(last_end.0) - 4_000) * 8;
    log.disk.flip_bit(&newest, in_last_batch);
    assert!(read(&log.disk, None).unwrap().0.dropped_bytes > 0, "unsealed: indistinguishable from a torn write");
    log.disk.flip_bit(&newest, in_last_batch);

    assert_eq!(log.writer.wait_ms(0), Some(super::super::IDLE_SEAL_MS));
    log.writer.tick(999).unwrap();
    assert_eq!(log.writer.wait_ms(999), Some(1));
    log.writer.tick(1_000).unwrap();
    assert_eq!(log.writer.wait_ms(1_000), None, "sealed once, not again");
    log.disk.flip_bit(&newest, in_last_batch);
    assert!(matches!(read(&log.disk, None), Err(Error::Corrupt { .. })));
}
