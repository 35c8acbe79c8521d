//! Power that goes at any moment, again and again.

use std::collections::BTreeMap;

use super::super::Durability;
use super::*;

/// What a machine did until it stopped.
struct Life {
    /// Batches that were acknowledged.
    acknowledged: usize,
    /// End of what the log said to be durable.
    synced: Position,
    /// All batches tried, in order; the last may have failed.
    tried: Vec<(Vec<Seen>, Option<Position>)>,
}

/// Writes until the disk stops answering.
fn live(disk: &SimDisk, draw: &mut Draw, options: Options, lsns: &mut [u64; 8]) -> Option<Life> {
    let (mut wal, mut writer, ..) = try_open(disk, options).ok()?;
    let mut life = Life { acknowledged: 0, synced: wal.synced(), tried: Vec::new() };
    let mut now_ms = 0;
    loop {
        let mut entries = Vec::new();
        for _ in 0..=draw.below(6) {
            let partition = draw.below(8);
            lsns[partition as usize] += 1;
            entries.push(Seen::command(partition as u32, lsns[partition as usize], draw.bytes(3_000)));
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
        life.synced = wal.synced();
        let is_over = written.is_err();
        life.tried.push((entries, written.ok()));
        if is_over {
            return Some(life);
        }
        life.acknowledged = life.tried.len();
    }
}

fn survives(seed: u64, durability: Durability) -> (u64, u64) {
    let mut draw = Draw(seed);
    let disk = SimDisk::new(seed);
    if seed % 2 == 1 {
        disk.show_stale_bytes();
    }
    let options = Options { durability, segment_bytes: 24 << 10, ..options() };
    let mut stands: Vec<Seen> = Vec::new();
    let (mut lost, mut kept_unacknowledged) = (0, 0);
    for _ in 0..6 {
        let mut lsns = [0; 8];
        for entry in &stands {
            lsns[entry.partition as usize] = entry.lsn;
        }
        disk.stop_after(draw.below(120));
        let life = live(&disk, &mut draw, options, &mut lsns);
        let power_went = draw.below(3) > 0;
        if power_went {
            disk.lose_power();
        } else {
            disk.kill();
        }
        let (recovery, seen) = read(&disk, None).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let tried = life.as_ref().map_or(&[][..], |life| &life.tried);
        // Whole batches, in order, none left out: some prefix of what was tried stands behind what stood.
        let mut prefix = stands.clone();
        let mut whole = 0;
        while seen.len() > prefix.len() && whole < tried.len() {
            prefix.extend(tried[whole].0.iter().cloned());
            whole += 1;
        }
        assert!(seen == prefix, "seed {seed}: {} entries are no prefix of {} batches", seen.len(), tried.len());
        if let Some(life) = &life {
            assert!(recovery.end >= life.synced, "seed {seed}: what was durable is gone");
            let may_lose = durability == Durability::Async && power_went;
            assert!(may_lose || whole >= life.acknowledged, "seed {seed}: acknowledged batches are gone");
            lost += life.acknowledged.saturating_sub(whole) as u64;
            kept_unacknowledged += whole.saturating_sub(life.acknowledged) as u64;
        }
        // What is deleted in between may show through in segments that are preallocated later.
        let is_deleting = draw.below(2) == 0;
        stands = prefix;
        if is_deleting && let Ok((wal, _writer, _, seen)) = try_open(&disk, options) {
            let covered = (0..8).map(|p| (PartitionId(p), Lsn(u64::MAX))).collect::<BTreeMap<_, _>>();
            wal.delete_below(&covered).unwrap();
            assert_eq!(seen, stands);
            stands = read(&disk, None).unwrap().1;
        }
    }
    (lost, kept_unacknowledged)
}

#[test]
fn what_was_acknowledged_survives_any_loss_of_power_in_order_and_whole() {
    let kept: u64 = (0..250).map(|seed| survives(seed, Durability::Sync).1).sum();
    assert!(kept > 0, "a batch may survive without having been acknowledged, and sometimes does");
}

#[test]
fn async_loses_a_tail_at_most_and_nothing_that_it_called_durable() {
    let lost: u64 = (0..150).map(|seed| survives(seed, Durability::Async).0).sum();
    assert!(lost > 0, "otherwise the simulated disk keeps what was never synced");
}
