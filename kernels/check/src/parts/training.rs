//! Compares trainings on the device with the CPU: gradients of models with every layer and loss that has kernels, and the losses of whole trainings. Then
//! measures steps of both, from which follow the sizes at which a GPU is worth it.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use engram_kernels::Gpu;
use engram_learn::gradients::GpuGradients;
use engram_learn::task_run::ComputeDevice;
use engram_memory::mix64;
use engram_neural::{
    Batch, DeviceEngine, GradientEngine, LabeledBatch, Loss, LossKind, LossSpec, Model, ModelSpec, RandomStep, Targets,
};
use engram_train::{Alone, SummationOrder, Trainer, TrainerSpec};
use serde_json::{Value, json};

use super::Part;
use crate::report::{Figure, PartResult};

/// Of gradients, losses and errors on the device and on the CPU, relative to the largest value (docs/gpu.md).
const TOLERANCE: f32 = 1e-4;
/// Of the losses of the steps of a training.
const LOSS_TOLERANCE: f64 = 1e-3;
/// Steps whose losses are compared.
const STEPS: usize = 10;
/// Number of memories from which large networks are measured.
const MANY: u64 = 1_000_000;
const INPUTS: usize = 40;
const OUTPUTS: usize = 5;

/// Compares trainings, and measures steps.
///
/// # Errors
/// When the device cannot be opened or fails, or results differ.
pub(super) fn run(part: &Part) -> Result<PartResult> {
    let gpu = Gpu::new(part.open()?, "gpu".to_owned());
    let device = ComputeDevice::new("gpu").with_gpu(gpu);
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u32);
    let mut largest = 0_f32;
    let models = models();
    for layers in &models {
        // Less than a tile, and sums in several parts.
        for rows in [37, 700] {
            largest = largest.max(compare_gradients(&device, layers, rows).with_context(|| layers.to_string())?);
        }
    }
    compare_losses(&device, &models[0], threads)?;
    let mut details = vec![format!(
        "gradients of {} models with 4 losses agree with the CPU: {largest:.1e} of the largest value; so do the losses of {STEPS} steps",
        models.len()
    )];
    let (width, batches) = if part.memories >= MANY { (1_024, &[128, 1_024, 8_192][..]) } else { (64, &[128][..]) };
    for rows in batches {
        details.push(measure(&device, width, *rows, part.repeats, threads)?);
    }
    Ok(PartResult::passed(details.join("; ")))
}

/// Returns layer lists with every layer that has kernels.
fn models() -> [Value; 2] {
    [
        json!([
            { "dense": 70, "activation": "Relu" },
            { "layerNorm": {} },
            { "residual": [{ "dense": 70, "activation": "Gelu" }, { "dropout": 0.2 }, { "dense": 70, "bias": false }] },
            { "activation": "Tanh" },
            { "dense": OUTPUTS, "activation": "Sigmoid" },
            { "dense": OUTPUTS },
        ]),
        json!([
            { "activation": "Gelu" },
            { "dropout": 0.5 },
            { "dense": 130, "activation": "Tanh", "frozen": true },
            { "residual": [{ "layerNorm": { "epsilon": 0.001 } }, { "dense": 130, "activation": "Relu" }] },
            { "dense": OUTPUTS },
        ]),
    ]
}

/// Returns numbers in [-1, 1).
fn noise(count: usize, key: u64) -> Vec<f32> {
    (0..count as u64).map(|n| (mix64(mix64(key) ^ n) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// Returns the largest difference relative to the largest expected value.
fn difference(what: &str, found: &[f32], expected: &[f32]) -> Result<f32> {
    ensure!(found.len() == expected.len(), "{what}: {} values instead of {}", found.len(), expected.len());
    let largest = expected.iter().map(|value| value.abs()).fold(1e-6, f32::max);
    let mut error = 0_f32;
    for (found, expected) in found.iter().zip(expected) {
        ensure!(found.is_finite(), "{what}: {found} instead of {expected}");
        error = error.max((found - expected).abs() / largest);
    }
    ensure!(error <= TOLERANCE, "{what} differ from the CPU by {error:e} of the largest value, allowed: {TOLERANCE:e}");
    Ok(error)
}

/// Compares the gradient of a model with each loss; returns the largest difference.
fn compare_gradients(device: &ComputeDevice, layers: &Value, rows: usize) -> Result<f32> {
    let spec: ModelSpec = serde_json::from_value(json!({ "inputs": INPUTS, "layers": layers }))?;
    let mut model = Model::new(&spec, 42)?;
    // Biases that start at 0 would hide errors in them.
    let moved = noise(model.parameter_count(), 9);
    model.parameters_mut().iter_mut().zip(moved).for_each(|(parameter, by)| *parameter += 0.3 * by);
    let on_gpu = DeviceEngine::new(&model, Box::new(GpuGradients::new(device.clone(), true)));
    let mut on_gpu = on_gpu.map_err(|layer| anyhow::anyhow!("{layer} has no kernels"))?;
    let values = noise(rows * INPUTS, 5);
    let units: Vec<f32> = noise(rows * OUTPUTS, 6).iter().map(|value| value.abs()).collect();
    let classes: Vec<u32> = (0..rows as u32).map(|row| row % OUTPUTS as u32).collect();
    let weights: Vec<f32> = noise(rows, 7).iter().map(|value| value.abs()).collect();
    let random = RandomStep { seed: 42, step: 3 };
    let mut largest = 0_f32;
    for kind in [LossKind::Mse, LossKind::Huber, LossKind::Bce, LossKind::CrossEntropy] {
        let is_class = kind == LossKind::CrossEntropy;
        let targets = if is_class { Targets::Classes(&classes) } else { Targets::Values(&units) };
        let batch = Batch::rows(&values, rows, INPUTS)?.starting_at(1_000);
        let data = LabeledBatch { batch, targets, weights: is_class.then_some(&weights) };
        let delta = (kind == LossKind::Huber).then_some(0.3);
        let loss = Loss::new(&LossSpec { kind, delta, correlation: None }, OUTPUTS)?;
        let (expected, _, samples) = GradientEngine::new().gradient(&model, &data, &loss, 4, random, 2.0)?;
        let mut compute = || on_gpu.batch_gradient(&model, &data, &loss, random, 2.0);
        let Some((found, found_samples)) = compute()? else {
            bail!("the device failed: {}", on_gpu.take_declined().unwrap_or_default())
        };
        for (what, found, expected) in [
            ("gradients", &found.values, &expected.values),
            ("losses", &found_samples.losses, &samples.losses),
            ("errors", &found_samples.errors, &samples.errors),
        ] {
            largest = largest.max(difference(what, found, expected).with_context(|| format!("{kind:?}"))?);
        }
        ensure!(compute()? == Some((found, found_samples)), "{kind:?}: a repeated gradient has other bits");
    }
    Ok(largest)
}

/// A model in training with the batch of all its steps.
struct Training {
    trainer: Trainer,
    values: Vec<f32>,
    targets: Vec<f32>,
    rows: usize,
    order: SummationOrder,
}

impl Training {
    fn new(layers: &Value, (inputs, outputs): (usize, usize), rows: usize, threads: u32) -> Result<Self> {
        let spec: TrainerSpec = serde_json::from_value(json!({
            "model": { "inputs": inputs, "layers": layers },
            "loss": { "kind": "Mse" },
            "schedule": { "rate": 0.001 },
        }))?;
        let (values, targets) = (noise(rows * inputs, 11), noise(rows * outputs, 12));
        let order = SummationOrder::Rank { leaves: threads };
        Ok(Self { trainer: Trainer::new(&spec)?, values, targets, rows, order })
    }

    fn on(mut self, device: &ComputeDevice) -> Result<Self> {
        let gradients = Box::new(GpuGradients::new(device.clone(), true));
        self.trainer.set_device(gradients).map_err(anyhow::Error::msg)?;
        Ok(self)
    }

    /// Trains for a step; returns its loss.
    fn step(&mut self) -> Result<f64> {
        let batch = Batch::rows(&self.values, self.rows, self.values.len() / self.rows)?;
        let data = LabeledBatch { batch, targets: Targets::Values(&self.targets), weights: None };
        let (report, _) = self.trainer.step(&[data], &self.order, &mut Alone)?;
        match self.trainer.take_declined() {
            None => Ok(report.loss),
            Some(reason) => bail!("a step was not computed on the device: {reason}"),
        }
    }

    /// Returns the duration of a step in milliseconds, after one to warm up.
    fn time(&mut self, repeats: usize) -> Result<Figure> {
        self.step()?;
        let mut milliseconds = Vec::new();
        for _ in 0..repeats.clamp(1, STEPS) {
            let begin = Instant::now();
            self.step()?;
            milliseconds.push(begin.elapsed().as_secs_f64() * 1e3);
        }
        Ok(Figure::of(milliseconds))
    }
}

/// Compares the losses of a training on the device and on the CPU, which depend on all gradients before.
fn compare_losses(device: &ComputeDevice, layers: &Value, threads: u32) -> Result<()> {
    let training = || Training::new(layers, (INPUTS, OUTPUTS), 100, threads);
    let (mut on_gpu, mut on_cpu) = (training()?.on(device)?, training()?);
    for step in 0..STEPS {
        let (found, expected) = (on_gpu.step()?, on_cpu.step()?);
        let is_near = (found - expected).abs() <= LOSS_TOLERANCE * expected.abs();
        ensure!(is_near, "loss of step {step}: {found}, on the CPU {expected}");
    }
    Ok(())
}

/// Returns the duration of a step of a training on the device, and on the CPU.
fn measure(device: &ComputeDevice, width: usize, rows: usize, repeats: usize, threads: u32) -> Result<String> {
    let hidden = json!({ "dense": width, "activation": "Relu" });
    let layers = json!([hidden, hidden, { "dense": 1 }]);
    let training = || Training::new(&layers, (512, 1), rows, threads);
    let on_gpu = training()?.on(device)?.time(repeats)?.median;
    let on_cpu = training()?.time(repeats)?.median;
    Ok(format!(
        "a step of {rows} samples of a network 512-{width}-{width}-1 takes {on_gpu:.2} ms, {on_cpu:.2} ms with {threads} threads of the CPU"
    ))
}
