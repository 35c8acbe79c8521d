//! Gradients of trainings on a GPU of the worker.
//!
//! Decides which batches are worth a GPU, and describes models for its kernels. What the GPU does not compute, the CPU does.

use crate::task_run::ComputeDevice;
use engram_kernels::gpu::{
    Activation as Function, Layer, Operation, TrainedNetwork, TrainingBatch, TrainingGradient, TrainingLoss,
};
use engram_neural::{
    Activation, DeviceBatch, DeviceGradient, DeviceLayer, DeviceNetwork, GradientDevice, LossKind, Targets,
};
use std::ops::Range;

/// Multiply-adds of a batch from which a GPU is worth its launches. An estimate, not yet measured on a GPU: forward and backward pass are about 30
/// launches and 5 transfers, 0.3 ms, in which a core multiplies and adds 2^23 times.
const LEAST_OPERATIONS: u64 = 1 << 23;
/// Rows of a batch from which a GPU is worth the transfers of the parameters. An estimate, not yet measured on a GPU: a parameter and its gradient
/// are 8 bytes of transfers, 1 ns, in which 16 cores multiply and add about 300 times, and each row needs 3 of them per parameter.
const LEAST_ROWS: usize = 100;
/// Multiply-adds after which the results are awaited: work on a GPU that takes more than 2 s counts as failed. A tenth of a second on an H100, a second
/// on a GPU with a tenth of its speed.
const MOST_OPERATIONS: u64 = 1 << 40;
/// Sizes in kernels are below 2^31.
const MAX_VALUES: usize = i32::MAX as usize;

/// A GPU that computes gradients.
#[derive(Debug)]
pub struct GpuGradients {
    device: ComputeDevice,
    /// Whether small batches are computed too.
    always: bool,
    /// The failure that the log has.
    reported: Option<String>,
}

/// Returns the multiply-adds of forward and backward pass: three products per parameter and row.
pub fn operations(parameters: usize, rows: usize) -> u64 {
    3 * parameters as u64 * rows as u64
}

/// Returns whether a GPU is worth it for batches of so many rows.
pub fn is_worth_a_gpu(parameters: usize, rows: usize) -> bool {
    rows >= LEAST_ROWS && operations(parameters, rows) >= LEAST_OPERATIONS
}

/// Returns the most rows that a GPU computes at once; 0 if it cannot compute one.
fn rows_at_once(network: &DeviceNetwork) -> usize {
    if network.parameters > MAX_VALUES {
        return 0;
    }
    let widest = network.widths.iter().copied().max().unwrap_or(0);
    let in_time = MOST_OPERATIONS / operations(network.parameters, 1).max(1);
    (MAX_VALUES / widest.max(1)).min(usize::try_from(in_time).unwrap_or(usize::MAX).max(1))
}

impl GpuGradients {
    /// Uses a GPU; with `always` for batches of any size.
    pub fn new(device: ComputeDevice, always: bool) -> Self {
        Self { device, always, reported: None }
    }

    /// Computes the gradient of some rows of a batch.
    fn gradient_of(&mut self, network: &TrainedNetwork, batch: &TrainingBatch<'_>) -> Result<TrainingGradient, String> {
        let mut error = None;
        let gradient = self.device.training(|kernels| {
            kernels.training_gradient(network, batch).inspect_err(|failure| error = Some(failure.to_string()))
        });
        gradient.ok_or_else(|| {
            let gpu = self.device.name();
            let is_lost = self.device.health().is_removed();
            let reason = if is_lost { format!("{gpu} failed") } else { format!("{gpu} has too little memory") };
            if self.reported.as_ref() != Some(&reason) {
                let error = error.unwrap_or_default();
                tracing::warn!(gpu, is_lost, error, "GPU failed: the CPU computes the gradients of the training");
                self.reported = Some(reason.clone());
            }
            reason
        })
    }
}

impl GradientDevice for GpuGradients {
    fn compute(&mut self, network: &DeviceNetwork, batch: &DeviceBatch<'_>) -> Result<DeviceGradient, String> {
        let (rows, parameters, most) = (batch.positions.len(), network.parameters, rows_at_once(network));
        if !self.always && !is_worth_a_gpu(parameters, rows) {
            return Err(format!(
                "a part of {rows} samples of a model of {parameters} parameters is too small for a GPU"
            ));
        }
        if most == 0 {
            return Err(format!("a model of {parameters} parameters is too large for the kernels"));
        }
        let trained = trained_network(network);
        let each = rows.div_ceil(rows.div_ceil(most));
        let mut sum = DeviceGradient { parameters: Vec::new(), losses: Vec::new(), errors: Vec::new() };
        for start in (0..rows).step_by(each) {
            let own = start..rows.min(start + each);
            let own = TrainingBatch {
                parameters: batch.parameters,
                rows: part(batch.rows, rows, &own),
                positions: &batch.positions[own.clone()],
                loss: loss(batch, rows, &own)?,
                weights: batch.weights.map(|weights| &weights[own.clone()]),
                scale: batch.scale,
                key: batch.dropout_key,
                step: batch.step,
            };
            let TrainingGradient { parameters, losses, errors } = self.gradient_of(&trained, &own)?;
            if start == 0 {
                sum.parameters = parameters;
            } else {
                sum.parameters.iter_mut().zip(parameters).for_each(|(sum, value)| *sum += value);
            }
            sum.losses.extend(losses);
            sum.errors.extend(errors);
        }
        Ok(sum)
    }
}

/// Returns the values of some of so many rows.
fn part<'a>(values: &'a [f32], rows: usize, own: &Range<usize>) -> &'a [f32] {
    let width = values.len() / rows;
    &values[own.start * width..own.end * width]
}

fn loss<'a>(batch: &DeviceBatch<'a>, rows: usize, own: &Range<usize>) -> Result<TrainingLoss<'a>, String> {
    match (batch.loss, batch.targets) {
        (LossKind::Mse, Targets::Values(values)) => Ok(TrainingLoss::Mse(part(values, rows, own))),
        (LossKind::Huber, Targets::Values(values)) => {
            Ok(TrainingLoss::Huber(part(values, rows, own), batch.huber_delta))
        }
        (LossKind::Bce, Targets::Values(values)) => Ok(TrainingLoss::Bce(part(values, rows, own))),
        (LossKind::CrossEntropy, Targets::Classes(classes)) => Ok(TrainingLoss::CrossEntropy(&classes[own.clone()])),
        (kind, _) => Err(format!("loss {kind:?} has no kernels for these targets")),
    }
}

/// Returns the network as the kernels compute it.
pub fn trained_network(network: &DeviceNetwork) -> TrainedNetwork {
    let operations = network.operations.iter().map(|operation| Operation {
        layer: match operation.layer {
            DeviceLayer::Dense { inputs, outputs, weight, bias } => Layer::Dense { inputs, outputs, weight, bias },
            DeviceLayer::Activation(kind) => Layer::Activation(match kind {
                Activation::Relu => Function::Relu,
                Activation::Gelu => Function::Gelu,
                Activation::Tanh => Function::Tanh,
                Activation::Sigmoid => Function::Sigmoid,
            }),
            DeviceLayer::Dropout { probability, layer } => Layer::Dropout { probability, layer },
            DeviceLayer::LayerNorm { epsilon, weight } => Layer::Norm { epsilon, weight },
            DeviceLayer::Fork => Layer::Fork,
            DeviceLayer::Add { skip } => Layer::Add { skip },
        },
        input: operation.input,
        output: operation.output,
        trains: operation.trains,
    });
    TrainedNetwork { widths: network.widths.clone(), operations: operations.collect(), parameters: network.parameters }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_devices::Accelerator;
    use engram_kernels::Error;
    use engram_kernels::gpu::{ProductShape, TrainingKernels};

    /// Kernels whose gradient is the weighted sum of the inputs and targets of the rows; full or lost after so many calls.
    struct Sums {
        calls_left: usize,
        failure: fn() -> Error,
    }

    impl TrainingKernels for Sums {
        fn training_gradient(
            &mut self,
            network: &TrainedNetwork,
            batch: &TrainingBatch<'_>,
        ) -> Result<TrainingGradient, Error> {
            self.calls_left = self.calls_left.checked_sub(1).ok_or_else(self.failure)?;
            let TrainingLoss::Huber(targets, delta) = batch.loss else { panic!("{:?}", batch.loss) };
            let (rows, width) = (batch.positions.len(), network.widths[0]);
            assert!(rows <= 2 && targets.len() == rows && batch.rows.len() == rows * width, "{rows} rows");
            let sums: Vec<f32> = batch.rows.chunks(width).map(|row| row.iter().sum()).collect();
            let weights = batch.weights.unwrap();
            let total = sums.iter().zip(targets).zip(weights).map(|((sum, target), weight)| (sum + target) * weight);
            let errors = batch.positions.iter().map(|position| *position as f32 * delta).collect();
            Ok(TrainingGradient { parameters: vec![total.sum()], losses: sums, errors })
        }
    }

    impl Accelerator for Sums {
        fn max_plus_product(&mut self, _: &[f32], _: &[f32], _: ProductShape) -> Result<Vec<f32>, Error> {
            unreachable!("trainings need no such product")
        }

        fn outer_products(&mut self, _: &[f32], _: usize, _: &Range<usize>, _: &[u32]) -> Result<Vec<f64>, Error> {
            unreachable!("trainings need no such product")
        }

        fn training(&mut self) -> Option<&mut dyn TrainingKernels> {
            Some(self)
        }
    }

    /// The gradient of five rows of two inputs, of a network so wide that kernels compute two rows at once.
    fn gradient(gradients: &mut GpuGradients) -> Result<DeviceGradient, String> {
        let network = DeviceNetwork { widths: vec![2, MAX_VALUES / 2], operations: Vec::new(), parameters: 1 };
        let values: Vec<f32> = (0..10_u8).map(f32::from).collect();
        let batch = DeviceBatch {
            parameters: &[0.0],
            rows: &values,
            positions: &[10, 11, 12, 13, 14],
            targets: Targets::Values(&[100.0, 200.0, 300.0, 400.0, 500.0]),
            weights: Some(&[1.0, 2.0, 3.0, 4.0, 5.0]),
            loss: LossKind::Huber,
            huber_delta: 2.0,
            scale: 1.0,
            dropout_key: 1,
            step: 1,
        };
        gradients.compute(&network, &batch)
    }

    fn device(calls_left: usize, failure: fn() -> Error) -> ComputeDevice {
        ComputeDevice::new("T4").with_gpu(Sums { calls_left, failure })
    }

    fn full() -> Error {
        Error::Full { missing_bytes: 1 }
    }

    #[test]
    fn large_batch_is_the_sum_of_its_parts_in_order() {
        let device = device(3, full);
        let found = gradient(&mut GpuGradients::new(device.clone(), true)).unwrap();
        assert_eq!(device.usage().computations, 3);
        assert_eq!(found.parameters, [101.0 + 2.0 * 205.0 + 3.0 * 309.0 + 4.0 * 413.0 + 5.0 * 517.0]);
        assert_eq!(found.losses, [1.0, 5.0, 9.0, 13.0, 17.0]);
        assert_eq!(found.errors, [20.0, 22.0, 24.0, 26.0, 28.0]);
    }

    #[test]
    fn cpu_computes_small_batches_and_those_of_a_full_or_failed_gpu() {
        let small = gradient(&mut GpuGradients::new(device(3, full), false));
        assert_eq!(small.unwrap_err(), "a part of 5 samples of a model of 1 parameters is too small for a GPU");
        // In the second of three parts.
        let (full, lost) = (device(1, full), device(1, || Error::Failed { pass: "dense_input", code: 700 }));
        let (mut of_full, mut of_lost) = (GpuGradients::new(full.clone(), true), GpuGradients::new(lost.clone(), true));
        assert_eq!(gradient(&mut of_full).unwrap_err(), "T4 has too little memory");
        assert!(full.resource().healthy, "a GPU that is full stays in use");
        for _ in 0..2 {
            assert_eq!(gradient(&mut of_lost).unwrap_err(), "T4 failed");
        }
        assert!(!lost.resource().healthy && lost.usage().computations == 2);
    }

    #[test]
    fn sizes_bound_what_a_gpu_computes_at_once() {
        let at_once = |widths, parameters| rows_at_once(&DeviceNetwork { widths, operations: Vec::new(), parameters });
        assert_eq!(at_once(vec![10, 1 << 20], 1000), 2047);
        assert_eq!(at_once(vec![10, 20], 1 << 26), 5461);
        assert_eq!(at_once(vec![10, MAX_VALUES + 1], 1000), 0);
        assert_eq!(at_once(vec![10, 20], MAX_VALUES + 1), 0);
        assert!(is_worth_a_gpu(1 << 16, 100) && !is_worth_a_gpu(1 << 16, 30) && !is_worth_a_gpu(1 << 10, 100));
    }
}
