//! Every workload on random devices, some of which are removed in the middle: the bits of a single device.

mod members;

use engram_devices::workloads::{
    Algebra, Division, HeatEquation, LifeAutomaton, QualityBatch, fisher_matrix, max_plus_product, quality_pipeline,
};
use engram_devices::{ComputeDevice, Error, Grid, GridRun, PipelineRun, run_blocks, run_grid};
use engram_kernels::partitioner::Strategy;
use engram_memory::mix64;
use engram_tropical::{Layer, Matrix};
use std::time::Duration;

/// Runs of each of the six workloads: more than 1,000 together.
const RUNS: u64 = 200;
/// Far away: a run that needs it has failed.
const LIMIT: Duration = Duration::from_secs(60);

/// Pseudo-random numbers of a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix64(mix64(self.0)) % bound
    }

    fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.below(2_000_001) as f32 / 1e6 - 1.0).collect()
    }

    fn strategy(&mut self) -> Strategy {
        Strategy::ALL[self.below(4) as usize]
    }

    fn division(&mut self, blocks_below: u64) -> Division {
        Division { strategy: self.strategy(), block: 1 + self.below(blocks_below) as usize, limit: LIMIT }
    }

    /// One to four devices of random speeds; all but one may be removed after some executions.
    fn devices(&mut self) -> Vec<ComputeDevice> {
        let count = 1 + self.below(4);
        let survivor = self.below(count);
        let device = |number| {
            let speed = (self.below(4) > 0).then(|| 1 + self.below(9));
            let device = ComputeDevice::new(format!("logical {number}")).with_speed(speed);
            if number != survivor && self.below(2) == 0 {
                device.health().remove_after(self.below(6));
            }
            device
        };
        (0..count).map(device).collect()
    }
}

fn one() -> [ComputeDevice; 1] {
    [ComputeDevice::new("one")]
}

fn whole(block: usize) -> Division {
    Division { strategy: Strategy::Balanced, block, limit: LIMIT }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Calls `check` with the devices of each run: at least [`RUNS`], and as many as it takes until enough devices were removed, since a device
/// that receives no block is not.
fn each_run(workload: u64, mut check: impl FnMut(&mut Random, &[ComputeDevice])) {
    let (mut runs, mut removed) = (0, 0);
    while runs < RUNS || removed < RUNS / 10 {
        let mut random = Random(mix64(workload * 1_000_000 + runs));
        let devices = random.devices();
        check(&mut random, &devices);
        removed += devices.iter().filter(|device| device.health().is_removed()).count() as u64;
        runs += 1;
        assert!(runs < 100 * RUNS, "only {removed} devices were removed in {runs} runs");
    }
}

#[test]
fn fisher_matrix_has_the_bits_of_one_device() {
    let scores = Random(1).numbers(150 * 7);
    let expected = fisher_matrix(&one(), &scores, 7, &whole(64)).unwrap().0;
    each_run(1, |random, devices| {
        let (matrix, loads) = fisher_matrix(devices, &scores, 7, &random.division(9)).unwrap();
        assert_eq!(matrix, expected);
        assert_eq!(loads.iter().map(|load| load.items).sum::<usize>(), 64, "each leaf once");
    });
}

#[test]
fn geometric_products_have_the_bits_of_one_device() {
    let algebra = Algebra::new(1, 3).unwrap();
    let (left, right) = (Random(2).numbers(50 * 16), Random(3).numbers(50 * 16));
    let expected = bits(&algebra.product(&left, &right).unwrap());
    each_run(2, |random, devices| {
        let (products, _) = algebra.product_on(devices, &left, &right, &random.division(12)).unwrap();
        assert_eq!(bits(&products), expected);
    });
}

#[test]
fn max_plus_products_have_the_bits_of_one_device() {
    let mut random = Random(4);
    let mut matrix = |name, rows, columns| {
        let mut entries = random.numbers(rows * columns);
        entries.iter_mut().step_by(5).for_each(|entry| *entry = f32::NEG_INFINITY);
        Matrix::new(name, rows, columns, entries).unwrap()
    };
    let (left, right) = (matrix("left", 40, 17), matrix("right", 17, 70));
    let expected = max_plus_product(&one(), &left, &right, &whole(40)).unwrap().0;
    assert_eq!(expected, engram_tropical::product(&left, &right, 1).unwrap());
    each_run(3, |random, devices| {
        let (product, _) = max_plus_product(devices, &left, &right, &random.division(9)).unwrap();
        assert_eq!(bits(product.entries()), bits(expected.entries()));
    });
}

#[test]
fn grids_have_the_cells_of_one_device() {
    let cells: Vec<u8> = (0..13 * 9).map(|cell| (mix64(cell) % 2) as u8).collect();
    let start = Grid::new(9, cells).unwrap();
    let heat = HeatEquation::new(0.2, 1.5).unwrap();
    let warm = Grid::new(9, start.cells().iter().map(|&cell| f64::from(cell) / 3.0).collect()).unwrap();
    let run = |steps_per_round, strategy| GridRun { steps: 12, steps_per_round, strategy, limit: LIMIT };
    let (mut life_expected, mut heat_expected) = (start.clone(), warm.clone());
    run_grid(&one(), &mut life_expected, &LifeAutomaton, &run(12, Strategy::Balanced)).unwrap();
    run_grid(&one(), &mut heat_expected, &heat, &run(12, Strategy::Balanced)).unwrap();
    assert_ne!(life_expected, start);
    let mut repeated = 0;
    each_run(4, |random, devices| {
        let (mut life, how) = (start.clone(), run(1 + random.below(6) as usize, random.strategy()));
        repeated += run_grid(devices, &mut life, &LifeAutomaton, &how).unwrap();
        assert_eq!(life, life_expected);
    });
    assert!(repeated > 10, "only {repeated} rounds were repeated");
    each_run(5, |random, devices| {
        let (mut cells, how) = (warm.clone(), run(1 + random.below(6) as usize, random.strategy()));
        run_grid(devices, &mut cells, &heat, &how).unwrap();
        assert!(cells.cells().iter().zip(heat_expected.cells()).all(|(one, other)| one.to_bits() == other.to_bits()));
    });
}

#[test]
fn pipeline_has_the_results_of_one_device_in_order() {
    let mut random = Random(6);
    let weights = Matrix::new("weights", 5, 4, random.numbers(20)).unwrap();
    let layer = Layer::new(weights, random.numbers(4)).unwrap();
    let batches: Vec<QualityBatch> =
        (1..=20).map(|rows| QualityBatch { rows, width: 5, values: random.numbers(rows * 5) }).collect();
    let run = |capacity, strategy| PipelineRun { name: "quality", capacity, strategy, limit: LIMIT };
    let expected = quality_pipeline(&one(), &layer, batches.clone(), &run(1, Strategy::Balanced)).unwrap();
    assert!(expected.iter().enumerate().all(|(index, batch)| (batch.rows, batch.width) == (index + 1, 1)));
    each_run(6, |random, devices| {
        let how = run(1 + random.below(4) as usize, random.strategy());
        assert_eq!(quality_pipeline(devices, &layer, batches.clone(), &how).unwrap(), expected);
    });
}

#[test]
fn run_without_a_device_left_fails_with_the_number_of_devices() {
    let devices = [ComputeDevice::new("a"), ComputeDevice::new("b")];
    devices.iter().for_each(|device| device.health().remove_after(2));
    let scores = vec![0.5; 64];
    let error = fisher_matrix(&devices, &scores, 1, &whole(1)).unwrap_err();
    assert_eq!(error, Error::NoDevice { what: "fisher sums", devices: 2 });
    let mut grid = Grid::new(2, vec![0_u8; 8]).unwrap();
    let run = GridRun { steps: 9, steps_per_round: 3, strategy: Strategy::Balanced, limit: LIMIT };
    let error = run_grid(&devices, &mut grid, &LifeAutomaton, &run).unwrap_err();
    assert_eq!(error.to_string(), "failed to finish cellular automaton: all 2 devices were removed");
}

#[test]
fn errors_of_kernels_and_deadlines_end_the_run_on_all_devices() {
    let devices = [ComputeDevice::new("a"), ComputeDevice::new("b")];
    let mut scores = vec![0.5; 640];
    scores[100] = f32::NAN;
    let error = fisher_matrix(&devices, &scores, 10, &whole(1)).unwrap_err().to_string();
    assert!(error.starts_with("failed to compute fisher sums on device") && error.contains("NaN"), "{error}");
    assert!(fisher_matrix(&devices, &[0.0; 7], 2, &whole(1)).unwrap_err().to_string().contains("7 for 2 parameters"));
    let (left, right) = (Matrix::missing(2, 3), Matrix::missing(4, 2));
    assert!(max_plus_product(&devices, &left, &right, &whole(1)).is_err());

    let late = Division { limit: Duration::ZERO, ..whole(1) };
    let error = fisher_matrix(&devices, &[0.0; 8], 2, &late).unwrap_err();
    assert_eq!(error, Error::Deadline { what: "fisher sums", limit: Duration::ZERO });
    let work = engram_devices::Work { kernel: "division", items: 9, block: 1, bytes_per_item: 0 };
    let resources: Vec<_> = devices.iter().map(ComputeDevice::resource).collect();
    let distribution = engram_devices::Distribution::new(work, Strategy::Balanced, &resources).unwrap();
    let panics = |items: std::ops::Range<usize>| Ok::<_, String>(10 / (4 - items.start as i32));
    let error = run_blocks(&devices, distribution, LIMIT, panics).unwrap_err().to_string();
    assert!(error.ends_with("the kernel panicked"), "{error}");
}
