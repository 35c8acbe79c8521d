//! All-reduce between two ranks over TCP on the loopback interface, and the training step of the reference model.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use engram_collective::cost::Link;
use engram_collective::executor::{Executor, Plan, Reduction};
use engram_collective::transport::{self, Tcp, TcpOptions, Wait};
use engram_train::dataset::{Dataset, Subsets};
use engram_train::job::Rows;
use engram_train::{Alone, SummationOrder, Trainer, TrainerSpec};

use crate::measure;
use crate::row::{Budget, Row};

/// Elements of the messages: 4 kB, 1 MB and 64 MB.
const ELEMENTS: [usize; 3] = [1 << 10, 1 << 18, 1 << 24];
/// Suffix of the peer that splits a message over four connections.
const FOUR: &str = ", 4 connections";
/// Samples of a batch.
const BATCH: usize = 512;
/// Limit of the wait for the other rank.
const LIMIT: Duration = Duration::from_secs(30);

/// Measures all-reduce; the sizes are fixed.
///
/// # Errors
/// When a sum is wrong, or a connection fails.
pub(crate) fn reduce_rows() -> Result<Vec<Row>> {
    ELEMENTS.into_iter().map(reduce_row).collect()
}

fn reduce_row(elements: usize) -> Result<Row> {
    eprintln!("reduce: {elements} elements");
    let listeners = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
    let addresses = [listeners[0].local_addr()?, listeners[1].local_addr()?];
    let is_done = AtomicBool::new(false);
    let ours = thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut rank = Rank::connect(1, elements, &addresses, &listeners[1])?;
            loop {
                match rank.reduce(&is_done) {
                    Ok(()) => {}
                    // The first rank has all its figures.
                    Err(_) if is_done.load(Ordering::Relaxed) => return Ok(()),
                    Err(error) => return Err(anyhow::Error::from(error)),
                }
            }
        });
        let measured = measured(elements, &addresses, &listeners[0]);
        is_done.store(true, Ordering::Relaxed);
        other.join().ok().context("the second rank panicked")??;
        measured
    })?;
    let budget = |peer: &str| Budget::Ratio { peer: peer.to_owned(), at_least: 1.3 };
    let bytes = u32::try_from(4 * elements).context("a size fits")?;
    Ok(Row::lower("all-reduce of f32 over loopback TCP, 2 ranks, size: bytes", bytes, "ms", ours)
        .workload("all-reduce")
        .workload_with("all-reduce-4", FOUR)
        .with_budgets([budget("gloo"), budget(&format!("gloo{FOUR}"))]))
}

fn measured(elements: usize, addresses: &[SocketAddr], listener: &TcpListener) -> Result<crate::row::Figure> {
    let never = AtomicBool::new(false);
    let mut rank = Rank::connect(0, elements, addresses, listener)?;
    measure::milliseconds(|| -> Result<()> {
        rank.reduce(&never)?;
        let found = rank.output[elements / 3];
        let expected = 2.0 * ((elements / 3) % 1_000) as f32 + 1.0;
        ensure!(found == expected, "{found} instead of {expected}");
        rank.output[elements / 3] = f32::NAN;
        Ok(())
    })
}

struct Rank {
    transport: Tcp,
    executor: Executor,
    plan: Plan,
    input: Vec<f32>,
    output: Vec<f32>,
    step: u64,
}

impl Rank {
    fn connect(rank: usize, elements: usize, addresses: &[SocketAddr], listener: &TcpListener) -> Result<Self> {
        let options = TcpOptions { connect: LIMIT, ..TcpOptions::default() };
        let transport = Tcp::connect(rank, 1, addresses, listener, None, options)?;
        let algorithm = Link::LOOPBACK.choose(2, 4 * elements, true);
        Ok(Self {
            transport,
            executor: Executor::new(),
            plan: Plan::new(algorithm, rank, elements, &[1.0, 1.0]),
            input: (0..elements).map(|index| (index % 1_000) as f32 + rank as f32).collect(),
            output: vec![0.0; elements],
            step: 0,
        })
    }

    fn reduce(&mut self, cancel: &AtomicBool) -> Result<(), transport::Error> {
        self.step += 1;
        let mut give_up = |_: usize| false;
        let mut wait = Wait::new(LIMIT, cancel, &mut give_up);
        let reduction = Reduction { generation: 1, step: self.step, bucket: 0 };
        self.executor.all_reduce(&mut self.transport, reduction, &self.plan, &self.input, &mut self.output, &mut wait)
    }
}

/// Measures a training step of the reference model with 432,641 parameters; the size is fixed.
///
/// # Errors
/// When a step fails, or the loss does not fall.
pub(crate) fn train_rows(threads: usize) -> Result<Vec<Row>> {
    eprintln!("train: batch of {BATCH}");
    let spec: TrainerSpec = serde_json::from_value(serde_json::json!({
        "model": { "inputs": 500, "layers": [
            { "dense": 256, "activation": "Relu" },
            { "residual": [{ "dense": 256, "activation": "Relu" }, { "dense": 256 }] },
            { "residual": [{ "dense": 256, "activation": "Relu" }, { "dense": 256 }] },
            { "dense": 128, "activation": "Relu" },
            { "dense": 64, "activation": "Relu" },
            { "dense": 1, "activation": "Sigmoid" },
        ] },
        "loss": { "kind": "Mse" },
        "optimizer": { "kind": "AdamW", "weightDecay": 1e-5 },
        "schedule": { "rate": 1e-4 },
    }))?;
    let mut trainer = Trainer::new(&spec)?;
    let settings = Subsets { features: 500, samples: BATCH, sizes: (10, 100), noise: 0.01, seed: 42 };
    let samples: Vec<usize> = (0..BATCH).collect();
    let rows = Rows::of(trainer.model(), &Dataset::subsets(&settings), &samples);
    let order = SummationOrder::Rank { leaves: u32::try_from(2 * threads).unwrap_or(u32::MAX) };
    let (mut first, mut last) = (None, 0.0);
    let ours = measure::milliseconds(|| -> Result<()> {
        let report = trainer.step(&[rows.labeled(0)?], &order, &mut Alone)?.0;
        (first, last) = (first.or(Some(report.loss)), report.loss);
        Ok(())
    })?;
    ensure!(first.is_some_and(|first| last < first), "the loss did not fall: {first:?}, {last}");
    let budget = Budget::Ratio { peer: "torch".to_owned(), at_least: 1.0 };
    Ok(vec![
        Row::lower("training step of 432,641 parameters (peer: fused AdamW), size: samples", BATCH as u32, "ms", ours)
            .workload("train-step")
            .with_budgets([budget]),
    ])
}
