//! Replay buffers in process: draws, importance weights and a copy of the payload, by the parts of `engram-replay` that workers use.

use anyhow::{Context, Result, ensure};
use engram_kernels::priority::Priorities as Exponent;
use engram_memory::{ONE, PartitionId, mix64};
use engram_replay::importance;
use engram_replay::plan::{PartitionSum, Plan};
use engram_replay::tiles::Priorities;

use crate::measure::{self, scaled};
use crate::row::{Budget, Row};

/// Items per batch of samples and of new priorities.
pub(crate) const BATCH: usize = 512;
/// Items per insert.
pub(crate) const INSERT: usize = 4_096;
/// Bytes of an item.
pub(crate) const ITEM_BYTES: usize = 256;
/// Exponents, the first in units of 2^-16.
const ALPHA: u32 = 39_322;
const BETA: f64 = 0.4;
const SEED: u64 = 42;
const PARTITION: PartitionId = PartitionId(0);

/// Items in a ring, with their priorities.
struct Items {
    exponent: Exponent,
    priorities: Priorities,
    payload: Vec<u8>,
    next: usize,
}

impl Items {
    fn new(count: usize) -> Self {
        let exponent = Exponent::new(ALPHA);
        let priorities = Priorities::new((0..count as u64).map(|number| exponent.of(weight(number))).collect());
        let payload = (0..count).flat_map(|number| [number as u8; ITEM_BYTES]).collect();
        Self { exponent, priorities, payload, next: 0 }
    }

    /// Draws a batch: slots, importance weights, and the bytes of the items.
    fn sample(&self, step: u64, batch: &mut Batch) -> Result<()> {
        batch.slots.clear();
        batch.weights.clear();
        batch.payload.clear();
        let (items, smallest) = self.priorities.positive();
        let sum = PartitionSum {
            partition: PARTITION,
            total: self.priorities.total(),
            items: u32::try_from(items)?,
            smallest: smallest.context("there are items")?,
        };
        let plan = Plan::new(vec![sum])?;
        let draws = plan.draws(PARTITION, SEED, step, BATCH as u32)?;
        self.priorities.find_all(draws.iter().map(|draw| draw.threshold), &mut batch.slots);
        // Copies of different items do not wait for each other; next to other work they would.
        for slot in &batch.slots {
            batch.payload.extend_from_slice(&self.payload[slot * ITEM_BYTES..][..ITEM_BYTES]);
        }
        let weight = |slot: &usize| importance::weight(&plan, self.priorities.get(*slot), BETA) as f32;
        batch.weights.extend(batch.slots.iter().map(weight));
        Ok(())
    }

    fn update(&mut self, slots: &[usize], step: u64) {
        for (row, slot) in slots.iter().enumerate() {
            self.priorities.set(*slot, self.exponent.of(weight(step ^ row as u64)));
        }
    }

    fn insert(&mut self, payload: &[u8], step: u64) {
        for (row, bytes) in payload.chunks_exact(ITEM_BYTES).enumerate() {
            let slot = self.next;
            self.payload[slot * ITEM_BYTES..][..ITEM_BYTES].copy_from_slice(bytes);
            self.priorities.set(slot, self.exponent.of(weight(step ^ row as u64)));
            self.next = (slot + 1) % self.priorities.len();
        }
    }
}

#[derive(Default)]
struct Batch {
    slots: Vec<usize>,
    weights: Vec<f32>,
    payload: Vec<u8>,
}

/// Returns a weight from 1 % to 100 % of the range.
fn weight(number: u64) -> u32 {
    (u64::from(ONE) / 100 + mix64(number) % (u64::from(ONE) * 99 / 100)) as u32
}

/// Measures one size.
///
/// # Errors
/// When a draw fails.
pub(crate) fn replay_rows(items: u32, _threads: usize) -> Result<Vec<Row>> {
    eprintln!("replay: {items} items in process");
    let mut buffer = Items::new(items as usize);
    let (mut batch, mut step) = (Batch::default(), 0);
    let sample = measure::milliseconds(|| {
        step += 1;
        buffer.sample(step, &mut batch)?;
        ensure!(batch.slots.len() == BATCH && batch.payload.len() == BATCH * ITEM_BYTES, "a batch is incomplete");
        ensure!(batch.weights.iter().all(|weight| *weight > 0.0 && *weight <= 1.0), "a weight is out of range");
        Ok(())
    })?;
    let slots = batch.slots;
    let update = measure::milliseconds(|| {
        step += 1;
        buffer.update(&slots, step);
        Ok::<_, anyhow::Error>(())
    })?;
    let payload = vec![7; INSERT.min(items as usize) * ITEM_BYTES];
    let insert = measure::milliseconds(|| {
        step += 1;
        buffer.insert(&payload, step);
        Ok::<_, anyhow::Error>(())
    })?;
    let budget = (items == 1_000_000).then(|| Budget::Ratio { peer: "cpprb".to_owned(), at_least: 2.0 });
    let row = |title: &str, figure| Row::lower(title, items, "us", scaled(figure, 1e3));
    Ok(vec![
        row("in process: prioritized sample of 512 items of 256 B", sample)
            .workload("replay-sample")
            .with_budgets(budget),
        row("in process: 512 new priorities", update).workload("replay-update"),
        row("in process: insert of 4,096 items", insert).workload("replay-insert"),
    ])
}
