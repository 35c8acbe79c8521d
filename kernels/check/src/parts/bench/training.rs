//! Gradients of networks in training.

use anyhow::Result;
use engram_kernels::Gpu;
use engram_kernels::gpu::{Activation, Layer, Operation, TrainedNetwork, TrainingBatch, TrainingKernels, TrainingLoss};
use engram_memory::mix64;

use super::{Clock, TimingFilter};
use crate::parts::Part;
use crate::report::Row;

/// Inputs of the network.
const INPUTS: usize = 512;
/// Widths of its two hidden layers; the smaller one where few memories are measured.
const WIDTHS: [usize; 2] = [64, 1_024];
/// Rows of a batch around the estimated threshold, and of a large one.
const ROWS: [usize; 2] = [128, 4_096];
/// Number of memories from which large networks are measured.
const MANY: u64 = 1_000_000;

pub(super) fn rows(clock: Clock, part: &Part) -> Result<Vec<Row>> {
    let is_large = part.memories >= MANY;
    let width = WIDTHS[usize::from(is_large)];
    let layers = [(INPUTS, width), (width, width), (width, 1)];
    let mut network = TrainedNetwork { widths: vec![INPUTS], operations: Vec::new(), parameters: 0 };
    for (place, (inputs, outputs)) in layers.into_iter().enumerate() {
        network.widths.push(outputs);
        let layer = Layer::Dense { inputs, outputs, weight: network.parameters, bias: true };
        network.operations.push(Operation { layer, input: place, output: place + 1, trains: true });
        network.parameters += inputs * outputs + outputs;
        if place < 2 {
            let layer = Layer::Activation(Activation::Relu);
            network.operations.push(Operation { layer, input: place + 1, output: place + 1, trains: false });
        }
    }
    let parameters = uniform(network.parameters, 1);
    let moved = uniform(network.parameters, 2);
    let mut gpu = Gpu::new(part.open()?, "gpu".to_owned());
    let mut rows = Vec::new();
    for count in ROWS.into_iter().take(if is_large { 2 } else { 1 }) {
        let (values, targets) = (uniform(count * INPUTS, 3), uniform(count, 4));
        let positions: Vec<u32> = (0..count as u32).collect();
        let mut batch = TrainingBatch {
            parameters: &parameters,
            rows: &values,
            positions: &positions,
            loss: TrainingLoss::Mse(&targets),
            weights: None,
            scale: 1.0,
            key: 1,
            step: 1,
        };
        let mut is_moved = false;
        rows.push(clock.row(
            &mut gpu,
            ("gradient of a network 512-1024-1024-1, of a batch of so many rows", "training"),
            count as u64,
            0,
            TimingFilter::Kernels,
            |gpu| {
                // Each call uploads its parameters, as each step of a training does.
                is_moved = !is_moved;
                batch.parameters = if is_moved { &moved } else { &parameters };
                gpu.training_gradient(&network, &batch).map(drop)
            },
        )?);
    }
    Ok(rows)
}

fn uniform(count: usize, key: u64) -> Vec<f32> {
    (0..count as u64).map(|n| ((mix64(mix64(key) ^ n) >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.05).collect()
}
