//! Leave-one-out on S4 with 2 threads, and the time of 18,030 path features.
//!
//! `cargo run --release -p engram-geodesic --example leave_one_out [NOISE [STARTS [STEPS]]]`

use std::sync::Mutex;
use std::time::Instant;

use engram_geodesic::{
    FeatureAdjoint, Generator, Lattice, MetricNetwork, Noise, REFERENCE_PPB, Report, Settings, reference_nm, tasks,
};

const THREADS: usize = 2;
const REPEATS: usize = 7;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<f64> = std::env::args().skip(1).map(|a| a.parse()).collect::<Result<_, _>>()?;
    let noise = Noise { additive: arguments.first().copied().unwrap_or(0.005), ..Noise::default() };
    let starts = arguments.get(1).copied().unwrap_or(1.0) as u64;
    let mut settings = Settings::default();
    if let Some(&steps) = arguments.get(2) {
        settings.steps = steps as u64;
    }
    features()?;
    let spectra = Generator::Mixed.spectra(&REFERENCE_PPB, &reference_nm(), &noise, 1)?;
    let queue = Mutex::new(tasks(REFERENCE_PPB.len(), starts));
    let results = Mutex::new(Vec::new());
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let worker = || -> Result<(), engram_geodesic::Error> {
            loop {
                let Some(task) = queue.lock().expect("no worker panics").pop() else { return Ok(()) };
                let result = task.run(&spectra, settings)?;
                results.lock().expect("no worker panics").push(result);
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(worker)).collect();
        threads.into_iter().try_for_each(|t| t.join().expect("no worker panics"))
    })?;
    let results = results.into_inner()?;
    let seconds = begin.elapsed().as_secs_f64();
    let report = Report::new(&spectra, &settings, &results, Some(noise.additive))?;
    println!("S4, noise {}, {starts} start(s) per fold, {THREADS} threads: {seconds:.1} s", noise.additive);
    for r in &results {
        let (t, v) = (r.training_loss, r.validation_loss);
        println!("fold {} start {}: {} steps, loss {t:.2e}, validation {v:.2e}", r.task.fold, r.task.start, r.steps);
    }
    print!("{}", report.table());
    Ok(())
}

/// Times the features of 30 pairs at 601 wavelengths, one thread, least and median of the repeats.
fn features() -> Result<(), engram_geodesic::Error> {
    let breaks: Vec<f64> = REFERENCE_PPB.iter().map(|p| (p - 30.0) / 30.0).collect();
    let wavelengths: Vec<f64> = reference_nm().iter().map(|w| (w - 500.0) / 300.0).collect();
    let lattice = Lattice::new(&breaks, &wavelengths, 8)?;
    let pairs = lattice.all_pairs();
    let metric = MetricNetwork::xavier(1);
    let ones = vec![1.0; pairs.len() * wavelengths.len()];
    let adjoint = FeatureAdjoint { length: ones.clone(), mean: ones.clone(), velocity: ones };
    let mut gradient = vec![0.0; metric.network().parameters().len()];
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..REPEATS {
        let begin = Instant::now();
        std::hint::black_box(lattice.features(&metric, &pairs));
        times[0].push(begin.elapsed().as_secs_f64());
        let begin = Instant::now();
        let pass = lattice.forward(&metric, &pairs);
        lattice.backward(&metric, &pass, &adjoint, &mut gradient);
        std::hint::black_box(&gradient);
        times[1].push(begin.elapsed().as_secs_f64());
    }
    for (name, times) in ["forward", "forward and backward"].iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        let (least, median) = (times[0], times[REPEATS / 2]);
        println!(
            "{} features {name}: {least:.4} s least, {median:.4} s median, 1 thread",
            pairs.len() * wavelengths.len()
        );
    }
    Ok(())
}
