//! Times a training step of the reference model: 432,641 parameters, batch 512, AdamW.
//!
//! `train_step FOLDER THREADS STEPS dense|bag` reads `parameters.f32`, `x.f32`, `y.f32` and `w.f32` from the folder,
//! writes `gradient.f32` of the first step and `after.f32`, and prints the times as JSON. `compare_step.py` in
//! `tests/golden` calls it.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use engram_neural::{
    Batch, GradientEngine, LabeledBatch, Loss, LossKind, LossSpec, Model, ModelSpec, Optimizer, OptimizerSpec,
    RandomStep, Targets,
};

const TAIL: &str = "{ residual: [{ dense: 256, activation: Relu }, { dense: 256 }] },
     { residual: [{ dense: 256, activation: Relu }, { dense: 256 }] },
     { dense: 128, activation: Relu }, { dense: 64, activation: Relu }, { dense: 1, activation: Sigmoid }";

fn read(folder: &Path, name: &str) -> anyhow::Result<Vec<f32>> {
    let bytes = std::fs::read(folder.join(name)).with_context(|| format!("failed to read {name}"))?;
    Ok(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

fn write(folder: &Path, name: &str, values: &[f32]) -> anyhow::Result<()> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    std::fs::write(folder.join(name), bytes).with_context(|| format!("failed to write {name}"))
}

/// Swaps the first layer's weight between `outputs x features` and `features x outputs`.
fn transpose(values: &mut [f32], rows: usize, columns: usize) {
    let old = values.to_vec();
    for i in 0..rows {
        for j in 0..columns {
            values[j * rows + i] = old[i * columns + j];
        }
    }
}

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, threads, steps, first] = &args[..] else { anyhow::bail!("arguments: FOLDER THREADS STEPS dense|bag") };
    let (folder, threads, steps) = (Path::new(folder), threads.parse::<usize>()?, steps.parse::<u64>()?);
    let bag = first == "bag";
    let head = if bag { "featureBag" } else { "dense" };
    let yaml = format!("{{ inputs: 500, layers: [{{ {head}: 256, activation: Relu }}, {TAIL}] }}");
    let mut model = Model::new(&serde_saphyr::from_str::<ModelSpec>(&yaml)?, 42)?;
    let mut parameters = read(folder, "parameters.f32")?;
    ensure!(parameters.len() == model.parameter_count(), "parameters of another model");
    if bag {
        transpose(&mut parameters[..500 * 256], 256, 500);
    }
    model.parameters_mut().copy_from_slice(&parameters);

    let (x, y, w) = (read(folder, "x.f32")?, read(folder, "y.f32")?, read(folder, "w.f32")?);
    let (mut offsets, mut indices) = (vec![0], Vec::new());
    for row in x.chunks_exact(500) {
        indices.extend((0..500u32).filter(|&i| row[i as usize] != 0.0));
        offsets.push(indices.len() as u32);
    }
    let batch = if bag { Batch::features(&offsets, &indices)? } else { Batch::rows(&x, y.len(), 500)? };
    let data = LabeledBatch { batch, targets: Targets::Values(&y), weights: Some(&w) };
    let loss = Loss::new(&LossSpec { kind: LossKind::Mse, delta: None, correlation: None }, 1)?;
    let spec = OptimizerSpec::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 1e-5 };
    let mut optimizer = Optimizer::new(spec, model.parameter_count())?;
    let views = model.views().to_vec();
    let mut engine = GradientEngine::new();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let mut times = Vec::new();
    pool.install(|| -> anyhow::Result<()> {
        for step in 0..steps {
            let start = Instant::now();
            let random = RandomStep { seed: 42, step };
            let (sum, _, _) = engine.gradient(&model, &data, &loss, threads as u32, random, 1.0)?;
            let factor = 1.0 / sum.samples as f32;
            optimizer.step(model.parameters_mut(), &sum.values, &views, factor, 1e-4);
            times.push(start.elapsed().as_secs_f64() * 1e3);
            if step == 0 {
                let mut mean: Vec<f32> = sum.values.iter().map(|g| g * factor).collect();
                if bag {
                    transpose(&mut mean[..500 * 256], 500, 256);
                }
                write(folder, "gradient.f32", &mean)?;
            }
            engine.recycle(sum);
        }
        Ok(())
    })?;
    let mut after = model.parameters().to_vec();
    if bag {
        transpose(&mut after[..500 * 256], 500, 256);
    }
    write(folder, "after.f32", &after)?;
    let mut sorted = times.split_off((times.len() / 10).min(20));
    sorted.sort_by(f64::total_cmp);
    println!("{{\"best_ms\": {:.3}, \"median_ms\": {:.3}}}", sorted[0], sorted[sorted.len() / 2]);
    Ok(())
}
