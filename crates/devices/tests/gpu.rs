//! Workloads over threads of the CPU and GPUs together: the kernels, compiled for the CPU, give the bits of the CPU.
#![allow(clippy::unwrap_used)] // Test helpers.

#[path = "../../../kernels/tests/host/mod.rs"]
mod host;

use engram_devices::workloads::{Division, fisher_matrix, max_plus_product};
use engram_devices::{Accelerator, ComputeDevice, Health};
use engram_kernels::gpu::ProductShape;
use engram_kernels::partitioner::Strategy;
use engram_kernels::{Error, Gpu};
use engram_memory::mix64;
use engram_tropical::Matrix;
use host::{Host, Variant, program};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Far away: a run that needs it has failed.
const LIMIT: Duration = Duration::from_secs(120);

fn gpu(program: &Path) -> Gpu<Host> {
    Gpu::new(Host::start(program, None), "kernels on the CPU".to_owned())
}

/// What happens to a GPU.
enum Event {
    /// Its calls after the first one fail.
    Error(fn() -> Error),
    /// Its calls wait until another GPU is removed.
    Waits(Health),
}

/// A GPU whose calls are counted.
struct Observed {
    gpu: Gpu<Host>,
    calls: Arc<AtomicU64>,
    event: Option<Event>,
}

impl Observed {
    fn begin(&self) -> Result<(), Error> {
        let calls = self.calls.fetch_add(1, Ordering::Relaxed);
        match &self.event {
            Some(Event::Error(error)) if calls > 0 => return Err(error()),
            Some(Event::Waits(other)) => {
                while !other.is_removed() {
                    std::thread::yield_now();
                }
            }
            _ => {}
        }
        Ok(())
    }
}

impl Accelerator for Observed {
    fn max_plus_product(&mut self, left: &[f32], right: &[f32], shape: ProductShape) -> Result<Vec<f32>, Error> {
        self.begin()?;
        self.gpu.max_plus_product(left, right, shape)
    }

    fn outer_products(
        &mut self,
        scores: &[f32],
        parameters: usize,
        rows: &Range<usize>,
        leaves: &[u32],
    ) -> Result<Vec<f64>, Error> {
        self.begin()?;
        self.gpu.outer_products(scores, parameters, rows, leaves)
    }
}

fn numbers(count: usize, seed: u64) -> Vec<f32> {
    (0..count as u64).map(|index| (mix64(index ^ (seed << 32)) % 2_000_001) as f32 / 1e6 - 1.0).collect()
}

/// Runs `check` on devices: a GPU alone, with threads of the CPU, one that is full after a call, and two of which one fails after a call.
fn each(check: impl Fn(&[ComputeDevice])) {
    let Some(program) = program(Variant::Plain, None) else { return };
    let observed = |event| {
        let calls = Arc::new(AtomicU64::new(0));
        let gpu = Observed { gpu: gpu(&program), calls: Arc::clone(&calls), event };
        (ComputeDevice::new("gpu").with_gpu(gpu), calls)
    };
    let (gpu, calls) = observed(None);
    check(std::slice::from_ref(&gpu));
    assert!(calls.load(Ordering::Relaxed) > 1);
    check(&[ComputeDevice::new("cpu"), gpu, ComputeDevice::new("cpu")]);

    let (gpu, calls) = observed(Some(Event::Error(|| Error::Full { missing_bytes: 1 })));
    check(std::slice::from_ref(&gpu));
    assert!(calls.load(Ordering::Relaxed) > 1 && !gpu.health().is_removed(), "the CPU computes what does not fit");

    let (lost, _) = observed(Some(Event::Error(|| Error::Failed { pass: "max_plus_product", code: 700 })));
    let (other, calls) = observed(Some(Event::Waits(lost.health())));
    check(&[lost.clone(), other]);
    assert!(calls.load(Ordering::Relaxed) > 1 && lost.health().is_removed(), "the other GPU computes the rest");
}

fn division(block: usize) -> Division {
    Division { strategy: Strategy::Balanced, block, limit: LIMIT }
}

#[test]
fn max_plus_products_on_gpus_have_the_bits_of_the_cpu() {
    let matrix = |name, rows, columns, seed| {
        let mut entries = numbers(rows * columns, seed);
        entries.iter_mut().step_by(5).for_each(|entry| *entry = f32::NEG_INFINITY);
        Matrix::new(name, rows, columns, entries).unwrap()
    };
    let (left, right) = (matrix("left", 40, 19, 1), matrix("right", 19, 33, 2));
    let expected = engram_tropical::product(&left, &right, 1).unwrap();
    each(|devices| {
        let (product, loads) = max_plus_product(devices, &left, &right, &division(7)).unwrap();
        let bits = |matrix: &Matrix| matrix.entries().iter().map(|entry| entry.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&product), bits(&expected));
        assert_eq!(loads.iter().map(|load| load.items).sum::<usize>(), 40, "each row once");
    });
}

#[test]
fn fisher_matrices_on_gpus_have_the_bits_of_the_cpu() {
    let scores = numbers(150 * 21, 3);
    let cpu = [ComputeDevice::new("cpu")];
    let expected = fisher_matrix(&cpu, &scores, 21, &division(64)).unwrap().0;
    // Blocks of 11 leaves are several subtrees each.
    each(|devices| {
        let (matrix, loads) = fisher_matrix(devices, &scores, 21, &division(11)).unwrap();
        assert_eq!(matrix, expected);
        assert_eq!(loads.iter().map(|load| load.items).sum::<usize>(), 64, "each leaf once");
    });
}
