//! Store without a log: epochs, updates and reads by id.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use engram_kernels::Cpu;
use engram_memory::hash::mix64;
use engram_memory::{Command, PartitionId, Settings};
use engram_store::Partitions;

use super::{Epochs, SHAPE, applied, check_epoch, inserts};
use crate::measure;
use crate::population::{self, PARTITIONS, UPDATES};
use crate::row::{Budget, Row};

/// Batches per repeat: enough to evict earlier updates from the cache.
const BATCHES: usize = 100;
/// Reads per repeat, and repeats.
const READS: usize = 100_000;
const ROUNDS: u64 = 7;

/// Measures one size.
pub(super) fn unlogged_rows(memories: u32, threads: usize) -> Result<Vec<Row>> {
    let mut rows = epoch(&mut create_filled_store(memories, threads)?, memories)?;
    let mut store = create_filled_store(memories, 1)?;
    rows.push(reinforce(&mut store, memories)?);
    rows.push(read(&mut store, memories)?);
    Ok(rows)
}

fn create_filled_store(memories: u32, threads: usize) -> Result<Partitions> {
    let mut store = Partitions::new(Box::new(Cpu::new(threads)), SHAPE);
    for partition in 0..PARTITIONS {
        store.open(PartitionId(partition), Settings::default());
    }
    for batch in inserts(memories) {
        store.apply_batch(&batch)?;
    }
    ensure!(store.memories() == u64::from(memories), "{} of {memories} memories were inserted", store.memories());
    Ok(store)
}

fn epoch(store: &mut Partitions, memories: u32) -> Result<Vec<Row>> {
    let mut epochs = Epochs::new(memories)?;
    let split = measure::milliseconds(|| {
        epochs.split();
        turn(store, &mut epochs, memories).map(drop)
    })?;
    let given = measure::milliseconds(|| turn(store, &mut epochs, memories).map(drop))?;
    let mean = measure::mean_with_one_fold(|| turn(store, &mut epochs, memories))?;
    let title = "learning epoch, 10,000 updates by id, 2 groups, 256 partitions";
    let row = |title: &str, figure| Row::lower(title, memories, "ms", figure).workload("epoch-by-id");
    Ok(vec![
        row(title, given),
        row("learning epoch by id, including the split of updates by partition", split),
        row("learning epoch by id, mean from one fold of the decay clock to the next", mean),
    ])
}

/// Runs one epoch and returns whether the clocks folded.
fn turn(store: &mut Partitions, epochs: &mut Epochs, memories: u32) -> Result<bool> {
    let before = clock(store)?;
    let replies = store.apply_batch(epochs.next())?;
    check_epoch(memories, &replies)?;
    Ok(clock(store)? < before)
}

fn clock(store: &Partitions) -> Result<u32> {
    Ok(store.clock(PartitionId(0)).context("partition 0 is missing")?.units())
}

fn reinforce(store: &mut Partitions, memories: u32) -> Result<Row> {
    let delta = population::delta()?;
    let command = |ids| Command::Reinforce(population::by_id(ids, delta));
    let batch = |seed| population::records(&population::drawn(UPDATES, memories, seed), command);
    let batches: Vec<_> = (0..BATCHES).map(|number| batch(number as u64)).collect();
    let mut touches = Touches::new(memories);
    let (all, floor) = measure::side_by_side(
        || -> Result<()> {
            for batch in &batches {
                let applied = store.apply_batch(batch)?.iter().map(applied).sum::<u64>();
                ensure!(applied == UPDATES as u64, "{applied} of {UPDATES} updates were applied");
            }
            Ok(())
        },
        || {
            touches.all();
            Ok(())
        },
    )?;
    let rate = |ms| measure::millions_per_second(BATCHES * UPDATES, ms);
    let budget = match memories {
        1_000_000 => Some(Budget::Absolute(15.0)),
        10_000_000 => Some(Budget::Absolute(5.0)),
        _ => None,
    };
    let title = "reinforcement by id, batches of 10,000, 256 partitions, one core";
    let row = Row::higher(title, memories, "M updates/s", rate(all));
    Ok(row.with_peer("memory accesses only", rate(floor)).with_budgets(budget))
}

/// Lower bound of an update by id: a word of an index, the id that it points to, and the potential, at random positions, by batch and partition.
struct Touches {
    index: Vec<u32>,
    ids: Vec<u64>,
    potentials: Vec<u32>,
    homes: Vec<u32>,
}

impl Touches {
    fn new(memories: u32) -> Self {
        let region = memories.div_ceil(PARTITIONS);
        let homes = (0..BATCHES).flat_map(|number| {
            let seed = mix64(number as u64);
            let draw = |update| (mix64(seed ^ update) % u64::from(memories)) as u32;
            let mut homes: Vec<u32> = (0..UPDATES as u64).map(draw).collect();
            homes.sort_by_key(|home| home / region);
            homes
        });
        Self {
            homes: homes.collect(),
            // As many words as a half-full index, with random targets.
            index: (0..2 * memories).map(|place| place / 2).collect(),
            ids: (0..u64::from(memories)).collect(),
            potentials: vec![0; memories as usize],
        }
    }

    fn all(&mut self) {
        let mut sum = 0;
        for &home in &self.homes {
            let slot = self.index[2 * home as usize] as usize;
            sum ^= self.ids[slot];
            self.potentials[slot] += 1;
        }
        black_box(sum);
    }
}

fn read(store: &mut Partitions, memories: u32) -> Result<Row> {
    let mut p99 = Vec::new();
    for round in 0..ROUNDS {
        let ids = population::drawn(READS, memories, !round);
        let mut took_us = Vec::with_capacity(READS);
        for id in ids {
            let before = Instant::now();
            let found = black_box(store.get(id)?).is_some();
            took_us.push(before.elapsed().as_secs_f64() * 1e6);
            ensure!(found, "memory {id} is missing");
        }
        took_us.sort_by(f64::total_cmp);
        p99.push(took_us[READS * 99 / 100]);
    }
    let title = "read of one memory by id, 99th percentile";
    Ok(Row::lower(title, memories, "us", measure::lowest(p99)).with_budgets([Budget::Absolute(2.0)]))
}
