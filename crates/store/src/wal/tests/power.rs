//! Power loss at any moment.

use std::collections::BTreeMap;

use super::super::Durability;
use super::*;

/// Writes of a process until it stopped.
struct WriteSession {
    /// Acknowledged batches.
    acknowledged: usize,
    /// End of the part reported as durable.
    synced: Position,
    /// All batches written, in order; the last may have failed.
    written: Vec<(Vec<OwnedEntry>, Option<Position>)>,
}

/// Writes until the disk fails.
fn write_until_failure(disk: &SimDisk, draw: &mut Draw, options: Options, lsns: &mut [u64; 8]) -> Option<WriteSession> {
    let (mut wal, mut writer, ..) = try_open(disk, options).ok()?;
    let mut session = WriteSession { acknowledged: 0, synced: wal.synced(), written: Vec::new() };
    let mut now_ms = 0;
    loop {
        let mut entries = Vec::new();
        for _ in 0..=draw.below(6) {
            let partition = draw.below(8);
            lsns[partition as usize] += 1;
            entries.push(OwnedEntry::command(partition as u32, lsns[partition as usize], draw.bytes(3_000)));
        }
        now_ms += draw.below(40);
        if draw.below(10) == 0 {
            now_ms += 2_000;
            let _ = writer.tick(now_ms);
        }
        for entry in &entries {
            wal.append(&entry.entry()).unwrap();
        }
        let batch = wal.seal(&[]).unwrap();
        let written = writer.write(&batch, now_ms);
        session.synced = wal.synced();
        let is_over = written.is_err();
        session.written.push((entries, written.ok()));
        if is_over {
            return Some(session);
        }
        session.acknowledged = session.written.len();
    }
}

fn survives(seed: u64, durability: Durability) -> (u64, u64) {
    let mut draw = Draw(seed);
    let disk = SimDisk::new(seed);
    if seed % 2 == 1 {
        disk.show_stale_bytes();
    }
    let options = Options { durability, segment_bytes: 24 << 10, ..options() };
    let mut expected: Vec<OwnedEntry> = Vec::new();
    let (mut lost, mut kept_unacknowledged) = (0, 0);
    for _ in 0..6 {
        let mut lsns = [0; 8];
        for entry in &expected {
            lsns[entry.partition as usize] = entry.lsn;
        }
        disk.stop_after(draw.below(120));
        let session = write_until_failure(&disk, &mut draw, options, &mut lsns);
        let power_went = draw.below(3) > 0;
        if power_went {
            disk.lose_power();
        } else {
            disk.kill();
        }
        let (recovery, replayed) = read(&disk, None).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let written = session.as_ref().map_or(&[][..], |session| &session.written);
        // Complete batches in order without gaps: a prefix of the written batches follows the earlier entries.
        let mut prefix = expected.clone();
        let mut survived = 0;
        while replayed.len() > prefix.len() && survived < written.len() {
            prefix.extend(written[survived].0.iter().cloned());
            survived += 1;
        }
        assert!(
            replayed == prefix,
            "seed {seed}: {} entries are no prefix of {} batches",
            replayed.len(),
            written.len()
        );
        if let Some(session) = &session {
            assert!(recovery.end >= session.synced, "seed {seed}: durable data is lost");
            let may_lose = durability == Durability::Async && power_went;
            assert!(may_lose || survived >= session.acknowledged, "seed {seed}: acknowledged batches are lost");
            lost += session.acknowledged.saturating_sub(survived) as u64;
            kept_unacknowledged += survived.saturating_sub(session.acknowledged) as u64;
        }
        // Deleted data may appear in segments preallocated later.
        let is_deleting = draw.below(2) == 0;
        expected = prefix;
        if is_deleting && let Ok((wal, _writer, _, replayed)) = try_open(&disk, options) {
            let covered = (0..8).map(|p| (PartitionId(p), Lsn(u64::MAX))).collect::<BTreeMap<_, _>>();
            wal.delete_below(&covered).unwrap();
            assert_eq!(replayed, expected);
            expected = read(&disk, None).unwrap().1;
        }
    }
    (lost, kept_unacknowledged)
}

#[test]
fn acknowledged_batches_survive_any_power_loss_complete_and_in_order() {
    let kept: u64 = (0..250).map(|seed| survives(seed, Durability::Sync).1).sum();
    assert!(kept > 0, "some unacknowledged batch survives");
}

#[test]
fn async_loses_at_most_a_tail_and_nothing_reported_as_durable() {
    let lost: u64 = (0..150).map(|seed| survives(seed, Durability::Async).0).sum();
    assert!(lost > 0, "the simulated disk loses unsynced data");
}
