//! Computations over 1, 2 and 4 logical devices, each a thread, over as many members of a group, and over the GPUs of the machine: time, speed-up, efficiency, imbalance,
//! synchronization.
//!
//! The result of every repeat is compared with that of one device, within the measured time. Efficiency is the achieved speed over the sum of
//! the solo speeds of the devices: on a machine with fewer cores than devices it cannot reach 1.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use engram_devices::workloads::{
    Algebra, Division, HeatEquation, LifeAutomaton, QualityBatch, fisher_matrix, max_plus_product, quality_pipeline,
};
use engram_devices::{ComputeDevice, Distribution, Grid, GridRun, Load, PipelineRun, Rule, SpeedModel, Work, run_grid};
use engram_kernels::Gpu;
use engram_kernels::gpu::cuda::{self, Cuda};
use engram_kernels::partitioner::{Resource, Strategy};
use engram_kernels::profiler::{Recorder, analyse};
use engram_memory::mix64;
use engram_tropical::{Layer, Matrix};

use super::members;
use crate::measure;
use crate::row::{Better, Row};

/// Numbers of devices.
const COUNTS: [usize; 3] = [1, 2, 4];
/// Runs that calibrate a device.
const CALIBRATION_RUNS: usize = 10;
/// Spans that a repeat records at most.
const SPANS: usize = 10_000;
pub(super) const LIMIT: Duration = Duration::from_secs(60);
/// Devices and blocks of the measured decision: more than any cluster has.
const DECISION: (usize, usize) = (64, 1_024);

const PARAMETERS: usize = 400;
const SAMPLES: usize = 4_000;
const NODES: usize = 768;
const MULTIVECTORS: usize = 200_000;
const ROWS: usize = 512;
const COLUMNS: usize = 512;
pub(super) const STEPS: usize = 16;
pub(super) const BATCHES: usize = 96;
const BATCH: usize = 64;
const WIDTH: usize = 64;

/// Runs a workload on some devices.
pub(super) type Run = Box<dyn Fn(&[ComputeDevice]) -> Result<Outcome>>;

/// What a run has shown.
pub(super) struct Outcome {
    /// Whether the result is that of one device.
    is_same: bool,
    /// Memory of the work of each device; empty if unknown.
    bytes: Vec<u64>,
}

impl Outcome {
    pub(super) fn new(is_same: bool, loads: &[Load]) -> Self {
        Self { is_same, bytes: loads.iter().map(|load| load.bytes).collect() }
    }
}

/// Measures all patterns; sizes are fixed, and the size of a row is the number of devices.
///
/// # Errors
/// When a run fails or its result differs from that of one device.
pub(crate) fn pattern_rows() -> Result<Vec<Row>> {
    let mut rows = vec![decision()?];
    let (sums, product) = (fisher()?, max_plus()?);
    rows.extend(workload("batch: Fisher matrix, 400 parameters, 4,000 samples", &sums)?);
    rows.extend(workload("batch: 200,000 geometric products in Cl(4, 0)", &products()?)?);
    rows.extend(workload("rows: max-plus product of 768 x 768", &product)?);
    let (life, heat) = (life_grid()?, heat_grid()?);
    let equation = HeatEquation::new(0.2, 0.0)?;
    rows.extend(workload("halo: cellular automaton, 512 x 512, 16 steps", &grid(life.clone(), LifeAutomaton)?)?);
    rows.extend(workload("halo: heat equation, 512 x 512, 16 steps", &grid(heat.clone(), equation)?)?);
    rows.extend(workload("pipeline: tropical layer, softmax, quality, 96 batches of 64", &pipeline()?)?);
    let of_members = [
        ("halo over workers: cellular automaton, 512 x 512, 16 steps", members::grid(life, LifeAutomaton)?),
        ("halo over workers: heat equation, 512 x 512, 16 steps", members::grid(heat, equation)?),
        ("pipeline over workers: tropical layer, softmax, quality, 96 batches of 64", members::pipeline()?),
    ];
    for (title, run) in &of_members {
        rows.extend(workload(title, run)?);
    }
    let gpus = cuda::devices().context("failed to count GPUs")?;
    if gpus == 0 {
        eprintln!("devices: no GPU, so no rows of GPUs");
    }
    let on_gpus = |title: &str, run: &Run| workload_on(title, run, &gpu, gpus);
    rows.extend(on_gpus("GPUs: Fisher matrix, 400 parameters, 4,000 samples", &sums)?);
    rows.extend(on_gpus("GPUs: max-plus product of 768 x 768", &product)?);
    Ok(rows)
}

/// Returns a thread of the CPU.
fn logical(number: usize) -> Result<ComputeDevice> {
    Ok(ComputeDevice::new(format!("logical {number}")))
}

/// Opens a GPU of this machine.
fn gpu(number: usize) -> Result<ComputeDevice> {
    let driver = Cuda::open(number, cuda::DEADLINE).with_context(|| format!("failed to open GPU {number}"))?;
    let name = format!("gpu {number}");
    Ok(ComputeDevice::new(name.clone()).with_gpu(Gpu::new(driver, name)))
}

/// Measures the assignment of blocks to devices of different speed.
fn decision() -> Result<Row> {
    let (devices, blocks) = DECISION;
    let resource = |device| Resource {
        throughput: Some(1 + mix64(device) % 1_000_000),
        free_bytes: u64::MAX,
        latency_ns: mix64(device + 100) % 100_000,
        healthy: true,
    };
    let resources: Vec<Resource> = (0..devices as u64).map(resource).collect();
    let work = Work { kernel: "decision", items: blocks * 10, block: 10, bytes_per_item: 1 };
    let ours = measure::milliseconds(|| -> Result<()> {
        let distribution = Distribution::new(black_box(work), Strategy::LatencyOptimized, black_box(&resources))?;
        ensure!(distribution.assigned_items().iter().sum::<usize>() == work.items, "an item has no device");
        Ok(())
    })?;
    Ok(super::row(format!("decision of the planner, {blocks} blocks"), devices as u32, "ms", ours, Some(5.0)))
}

fn workload(title: &str, run: &Run) -> Result<Vec<Row>> {
    workload_on(title, run, &logical, COUNTS[COUNTS.len() - 1])
}

/// Measures a workload on up to `available` devices; none without a device.
fn workload_on(
    title: &str,
    run: &Run,
    open: &dyn Fn(usize) -> Result<ComputeDevice>,
    available: usize,
) -> Result<Vec<Row>> {
    let counts = || COUNTS.into_iter().filter(|&count| count <= available);
    if available > 0 {
        eprintln!("devices: {title}");
    }
    let mut model = SpeedModel::default();
    for device in 0..counts().next_back().unwrap_or(0) {
        let solo = [open(device)?];
        for _ in 0..CALIBRATION_RUNS {
            let started = Instant::now();
            ensure!(run(&solo)?.is_same, "{title}: another result on device {device}");
            // One run is one item: only ratios of speeds matter here.
            model.add("workload", solo[0].name(), 1_000_000, started.elapsed());
        }
    }
    let mut rows = Vec::new();
    let mut first_ms = 0.0;
    for count in counts() {
        let origin = Instant::now();
        let device = |number: usize| {
            let device = open(number)?;
            let speed = model.speed("workload", device.name(), 1_000_000);
            let recorder = Recorder::new(device.name().to_owned(), origin, SPANS);
            Ok(device.with_speed(speed).with_recorder(recorder))
        };
        let devices: Vec<ComputeDevice> = (0..count).map(device).collect::<Result<_>>()?;
        let (mut imbalances, mut waits, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        let time = measure::milliseconds(|| -> Result<()> {
            let outcome = run(&devices)?;
            ensure!(outcome.is_same, "{title}: another result on {count} devices");
            bytes.extend(outcome.bytes.into_iter().max().map(|most| most as f64 / 1e6));
            let tracks: Vec<_> = devices.iter().map(|device| device.recorder().take()).collect();
            if let Some(analysis) = analyse(&tracks) {
                imbalances.push(analysis.imbalance * 100.0);
                waits.push(analysis.shares.waits * 100.0);
            }
            Ok(())
        })?;
        if count == 1 {
            first_ms = time.median;
        }
        let solo: f64 = devices.iter().filter_map(|it| it.resource().throughput).map(|speed| speed as f64 / 1e6).sum();
        let efficiency = 1e3 / time.median / solo;
        let mut add = |figure: &str, unit: &str, better: Better, ours, budget: Option<f64>| {
            let row = super::row(format!("{title}: {figure}"), count as u32, unit, ours, budget);
            rows.push(Row { better, ..row });
        };
        add("time", "ms", Better::Lower, time, None);
        add("speed-up", "x", Better::Higher, measure::once(first_ms / time.median), None);
        add("efficiency", "of the sum of solo speeds", Better::Higher, measure::once(efficiency), None);
        add("load deviation", "%", Better::Lower, measure::lowest(imbalances), (count > 1).then_some(5.0));
        add("waits", "% of the time", Better::Lower, measure::lowest(waits), None);
        if !bytes.is_empty() {
            add("memory of the busiest device", "MB", Better::Lower, measure::lowest(bytes), None);
        }
    }
    Ok(rows)
}

fn division(block: usize) -> Division {
    Division { strategy: Strategy::CapabilityAware, block, limit: LIMIT }
}

fn one() -> [ComputeDevice; 1] {
    [ComputeDevice::new("one")]
}

fn fisher() -> Result<Run> {
    let scores = numbers(SAMPLES * PARAMETERS, 1);
    let expected = fisher_matrix(&one(), &scores, PARAMETERS, &division(4))?.0;
    Ok(Box::new(move |devices| {
        let (matrix, loads) = fisher_matrix(devices, &scores, PARAMETERS, &division(4))?;
        Ok(Outcome::new(matrix == expected, &loads))
    }))
}

fn products() -> Result<Run> {
    let algebra = Algebra::new(4, 0)?;
    let count = MULTIVECTORS * algebra.components();
    let (left, right) = (numbers(count, 2), numbers(count, 3));
    let expected = algebra.product(&left, &right)?;
    Ok(Box::new(move |devices| {
        let (products, loads) = algebra.product_on(devices, &left, &right, &division(MULTIVECTORS / 128))?;
        Ok(Outcome::new(same_bits(&products, &expected), &loads))
    }))
}

fn max_plus() -> Result<Run> {
    let matrix = |name, key| Matrix::new(name, NODES, NODES, numbers(NODES * NODES, key));
    let (left, right) = (matrix("left", 4)?, matrix("right", 5)?);
    let expected = engram_tropical::product(&left, &right, 1)?;
    Ok(Box::new(move |devices| {
        let (product, loads) = max_plus_product(devices, &left, &right, &division(24))?;
        Ok(Outcome::new(same_bits(product.entries(), expected.entries()), &loads))
    }))
}

fn life_grid() -> Result<Grid<u8>> {
    Ok(Grid::new(COLUMNS, (0..ROWS * COLUMNS).map(|cell| (mix64(cell as u64) % 2) as u8).collect())?)
}

fn heat_grid() -> Result<Grid<f64>> {
    Ok(Grid::new(COLUMNS, numbers(ROWS * COLUMNS, 9).into_iter().map(f64::from).collect())?)
}

fn how() -> GridRun {
    GridRun { steps: STEPS, steps_per_round: STEPS, strategy: Strategy::CapabilityAware, limit: LIMIT }
}

/// Returns the cells after all steps on one device.
pub(super) fn on_one<T: Copy + Send + Sync, R: Rule<T>>(start: &Grid<T>, rule: &R) -> Result<Grid<T>> {
    let mut cells = start.clone();
    run_grid(&one(), &mut cells, rule, &how())?;
    Ok(cells)
}

fn grid<T: Copy + PartialEq + Send + Sync + 'static, R: Rule<T> + 'static>(start: Grid<T>, rule: R) -> Result<Run> {
    let expected = on_one(&start, &rule)?;
    Ok(Box::new(move |devices| {
        let mut cells = start.clone();
        run_grid(devices, &mut cells, &rule, &how())?;
        Ok(Outcome::new(cells == expected, &[]))
    }))
}

pub(super) fn quality_layer() -> Result<Layer> {
    Ok(Layer::new(Matrix::new("weights", WIDTH, WIDTH, numbers(WIDTH * WIDTH, 6))?, numbers(WIDTH, 7))?)
}

pub(super) fn quality_batches() -> Vec<QualityBatch> {
    let batch = |key| QualityBatch { rows: BATCH, width: WIDTH, values: numbers(BATCH * WIDTH, key) };
    (0..BATCHES as u64).map(|key| batch(100 + key)).collect()
}

fn qualities_on(devices: &[ComputeDevice], layer: &Layer, batches: &[QualityBatch]) -> Result<Vec<QualityBatch>> {
    let run = PipelineRun { name: "quality", capacity: 4, strategy: Strategy::CapabilityAware, limit: LIMIT };
    Ok(quality_pipeline(devices, layer, batches.to_vec(), &run)?)
}

/// Returns the qualities of all batches, computed on one device.
pub(super) fn qualities_on_one(layer: &Layer, batches: &[QualityBatch]) -> Result<Vec<QualityBatch>> {
    qualities_on(&one(), layer, batches)
}

fn pipeline() -> Result<Run> {
    let (layer, batches) = (quality_layer()?, quality_batches());
    let expected = qualities_on_one(&layer, &batches)?;
    Ok(Box::new(move |devices| Ok(Outcome::new(qualities_on(devices, &layer, &batches)? == expected, &[]))))
}

fn same_bits(one: &[f32], other: &[f32]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.to_bits() == other.to_bits())
}

/// Returns numbers in [-1, 1).
fn numbers(count: usize, key: u64) -> Vec<f32> {
    (0..count as u64).map(|index| (mix64(mix64(key) ^ index) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}
