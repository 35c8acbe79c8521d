//! Training on a GPU: the kernels, compiled for the CPU, agree with the closed form of this crate.
#![allow(clippy::unwrap_used)] // Test helpers.

#[path = "../../../kernels/tests/host/mod.rs"]
mod host;

use engram_geodesic::{
    Axes, Decoder, Generator, Metric, MetricNetwork, Noise, Settings, StepError, Trainer, advance_all,
};
use engram_kernels::gpu::{GeodesicKernels, NetworkBatch, NetworkGradient, PathAdjoint, PathBatch, PathFeatures};
use engram_kernels::{Error, Gpu};
use host::{Host, Variant, program};

const PPB: [f64; 4] = [0.0, 15.0, 30.0, 60.0];

/// Few wavelengths and nodes: a thread of a GPU is a fiber here.
fn settings() -> Settings {
    Settings { steps: 6, evaluate_every: 3, stride: 4, nodes: 3, ..Settings::default() }
}

fn trainer(start: u64, settings: Settings) -> Trainer {
    let nm: Vec<f64> = (0..25).map(|i| 200.0 + 25.0 * f64::from(i)).collect();
    let data = Generator::Mixed.spectra(&PPB, &nm, &Noise::default(), 0).unwrap();
    Trainer::new(data, Axes::new(&PPB, &nm).unwrap(), settings, start).unwrap()
}

fn all(mut trainers: Vec<Trainer>, gpu: &mut dyn GeodesicKernels) -> Vec<Trainer> {
    while trainers.iter().any(|trainer| !trainer.finished()) {
        advance_all(&mut trainers.iter_mut().collect::<Vec<_>>(), gpu).unwrap();
    }
    trainers
}

#[test]
fn models_trained_in_one_batch_on_a_gpu_agree_with_the_cpu_and_with_models_trained_alone() {
    let Some(program) = program(Variant::Plain, None) else { return };
    let mut gpu = Gpu::new(Host::start(&program, None), "kernels on the CPU".to_owned());
    // The starts draw their wavelengths independently, so some steps have two shapes.
    let trained = all((0..3).map(|start| trainer(start, settings())).collect(), &mut gpu);
    let alone = all(vec![trainer(1, settings())], &mut gpu).remove(0);
    assert!(alone.save() == trained[1].save(), "the other models of a batch change its bits");
    for (start, trained) in trained.iter().enumerate() {
        let mut expected = trainer(start as u64, settings());
        while !expected.finished() {
            expected.advance().unwrap();
        }
        // AdamW divides by the root of the second moment, so a rounding error of a small gradient shows.
        let loss = trained.last_loss().reconstruction / expected.last_loss().reconstruction - 1.0;
        let validation = trained.validation_loss() / expected.validation_loss() - 1.0;
        assert!(loss.abs() < 1e-9 && validation.abs() < 1e-9, "start {start}: {loss:e} {validation:e}");
        let (ours, theirs) = (trained.predict(20.0).unwrap(), expected.predict(20.0).unwrap());
        let error = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(error < 1e-9, "start {start}: {error:e}");
        assert!(trained.save() != trainer(start as u64, settings()).save(), "start {start} made no steps");
    }
}

/// A GPU that fails at a call.
struct Failing(u32);

impl Failing {
    fn fail<T>(&mut self) -> Result<T, Error> {
        self.0 += 1;
        Err(Error::Failed { pass: "path_features", code: 700 })
    }
}

impl GeodesicKernels for Failing {
    fn network_values(&mut self, _: &NetworkBatch<'_>) -> Result<Vec<f64>, Error> {
        self.fail()
    }

    fn network_gradient(&mut self, _: &NetworkBatch<'_>, _: &[f64], _: bool) -> Result<NetworkGradient, Error> {
        self.fail()
    }

    fn path_features(&mut self, _: &PathBatch<'_>) -> Result<PathFeatures, Error> {
        self.fail()
    }

    fn path_gradient(&mut self, _: &PathBatch<'_>, _: &PathFeatures, _: &PathAdjoint<'_>) -> Result<Vec<f64>, Error> {
        self.fail()
    }
}

#[test]
fn step_on_a_gpu_that_fails_changes_no_trainer_and_flows_need_no_gpu() {
    let mut gpu = Failing(0);
    let mut trainers = [trainer(0, settings())];
    let before = trainers[0].save();
    let failed = advance_all(&mut [&mut trainers[0]], &mut gpu);
    assert!(matches!(failed, Err(StepError::Device(Error::Failed { .. }))), "{failed:?}");
    assert!(trainers[0].save() == before && gpu.0 == 1);
    trainers[0].advance().unwrap();
    let flow = Settings { decoder: Decoder::Flow, steps: 1, ..settings() };
    let mut flows = [trainer(0, flow)];
    advance_all(&mut [&mut flows[0]], &mut gpu).unwrap();
    assert_eq!((flows[0].steps(), gpu.0), (1, 1));
}

/// Largest resident memory of this process so far, in bytes; `None` where the system does not report it.
fn peak_memory() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse::<usize>().ok().map(|kilobytes| kilobytes << 10)
}

#[test]
fn peak_memory_of_an_evaluation_does_not_grow_with_activations() {
    const POINTS: usize = 200_000;
    let Some(before) = peak_memory() else {
        println!("skipped: the system reports no peak memory");
        return;
    };
    let points: Vec<(f64, f64)> = (0..POINTS).map(|i| (i as f64 / POINTS as f64, 0.5)).collect();
    let values = MetricNetwork::xavier(1).values(&points);
    assert!(values.iter().all(|g| *g > 0.1));
    let grown = peak_memory().unwrap().saturating_sub(before);
    // Points, inputs and outputs take 40 bytes a point, the 192 activations of each would take 1,536 more: 300 MB.
    assert!(grown < 60 << 20, "{} MiB for {POINTS} points", grown >> 20);
}
