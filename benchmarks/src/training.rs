//! The training step of the reference model.

use anyhow::{Result, ensure};
use engram_train::dataset::{Dataset, Subsets};
use engram_train::job::Rows;
use engram_train::{Alone, SummationOrder, Trainer, TrainerSpec};

use crate::measure;
use crate::row::{Budget, Row};

/// Samples of a batch.
const BATCH: usize = 512;

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
