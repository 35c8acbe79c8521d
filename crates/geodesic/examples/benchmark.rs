//! Measuring program of `cargo xtask bench geodesic`: writes rows as JSON. Times are CPU-seconds of one thread, in milliseconds, so that
//! other work on the machine matters little; errors are relative to Gauss-Legendre with 64 nodes.

#[path = "../../../benchmarks/src/row.rs"]
mod row;

use engram_geodesic::{
    Axes, BatchedShooting, ChristoffelGrid, FeatureAdjoint, Features, Generator, GeodesicBvp as _, GridEngine,
    Interpolation, Lattice, Line, Manifold, MetricNetwork, MixedPrecision, Noise, PathTable, Problem, REFERENCE_PPB,
    Settings, Task, Trainer, reference_nm, trajectory,
};
use row::{Better, Budget, Figure, Report, Row, Workload};
use std::hint::black_box;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Repeats of a measurement after one unmeasured run.
const REPEATS: usize = 5;
/// Wavelengths whose problems are solved one by one; the figures are scaled to all 601.
const SAMPLE: usize = 20;
/// Times of a trajectory.
const TIMES: usize = 50;
/// Knots of a table of s.
const KNOTS: usize = 257;
/// Knots in c of the grids: the reference, and coarser ones. All have 601 in l.
const GRID_KNOTS: [usize; 4] = [2_000, 512, 256, 128];
/// Problems of the reference task.
const PROBLEMS: u64 = 18_030;
/// Fraction of the variance of the inner validation split that a model must explain in T5.
const VALIDATION_R2: f64 = 0.98;

fn main() -> Result<()> {
    let mut rows = Vec::new();
    for (name, metric) in [("Xavier", MetricNetwork::xavier(1)), ("stress", MetricNetwork::stress(1))] {
        eprintln!("geodesic: {name} metric");
        rows.extend(features(name, &metric)?);
        rows.extend(solutions(name, &metric)?);
        rows.extend(grids(name, &metric)?);
    }
    rows.extend(lookups()?);
    eprintln!("geodesic: training");
    rows.extend(training()?);
    serde_json::to_writer(std::io::stdout().lock(), &Report { threads: 1, rows })?;
    Ok(())
}

/// CPU time of this thread in milliseconds.
fn cpu_ms() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(text.split(' ').next().unwrap_or_default().parse::<f64>()? / 1e6)
}

fn measured(scale: f64, mut work: impl FnMut() -> Result<()>) -> Result<Figure> {
    work()?;
    let mut took = Vec::new();
    for _ in 0..REPEATS {
        let before = cpu_ms()?;
        work()?;
        took.push((cpu_ms()? - before) * scale);
    }
    took.sort_by(f64::total_cmp);
    Ok(Figure { best: took[0], median: took[REPEATS / 2], repeats: REPEATS as u32 })
}

fn row(title: String, unit: &str, ours: Figure, workloads: &[(&str, &str)], budgets: Vec<Budget>) -> Row {
    let workload = |&(name, remark): &(&str, &str)| Workload { name: name.to_owned(), remark: remark.to_owned() };
    Row {
        title,
        workloads: workloads.iter().map(workload).collect(),
        memories: PROBLEMS,
        unit: unit.to_owned(),
        better: Better::Lower,
        ours,
        peers: Vec::new(),
        budgets,
    }
}

fn error(value: f64) -> Figure {
    // Zero has no ratio.
    let value = value.max(1e-16);
    Figure { best: value, median: value, repeats: 1 }
}

/// Workloads of the peers for one quantity on one metric.
fn workloads(quantity: &str, metric: &str) -> Vec<(String, String)> {
    let ways = [
        ("closed", ", closed form in torch"),
        ("shooting", ", batched shooting"),
        ("sequential", ", sequential shooting"),
    ];
    let name = |way: &str| format!("geodesic-{quantity}-{way}-{}", metric.to_lowercase());
    ways.iter().map(|(way, remark)| (name(way), (*remark).to_owned())).collect()
}

fn lattice(nodes: usize) -> Result<Lattice> {
    let breaks: Vec<f64> = REFERENCE_PPB.iter().map(|p| (p - 30.0) / 30.0).collect();
    let wavelengths: Vec<f64> = reference_nm().iter().map(|w| (w - 500.0) / 300.0).collect();
    Ok(Lattice::new(&breaks, &wavelengths, nodes)?)
}

/// Largest relative error of the lengths.
fn length_error(found: &Features, exact: &Features) -> f64 {
    let pairs = found.displacement.iter().zip(&exact.displacement);
    pairs.map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max)
}

/// T1 and T2: features of all problems by the closed form.
fn features(name: &str, metric: &MetricNetwork) -> Result<Vec<Row>> {
    let exact_lattice = lattice(64)?;
    let exact = exact_lattice.features(metric, &exact_lattice.all_pairs());
    let lattice = lattice(8)?;
    let pairs = lattice.all_pairs();
    let forward = measured(1.0, || {
        black_box(lattice.features(metric, &pairs));
        Ok(())
    })?;
    let mixed = MixedPrecision::new(metric);
    let in_f32 = measured(1.0, || {
        black_box(lattice.features(&mixed, &pairs));
        Ok(())
    })?;
    let ones = vec![1.0; pairs.len() * lattice.wavelengths().len()];
    let adjoint = FeatureAdjoint { length: ones.clone(), mean: ones.clone(), velocity: ones };
    let mut gradient = vec![0.0; metric.network().parameters().len()];
    let backward = measured(1.0, || {
        let pass = lattice.forward(metric, &pairs);
        lattice.backward(metric, &pass, &adjoint, &mut gradient);
        black_box(&gradient);
        Ok(())
    })?;
    let error_of_eight = length_error(&lattice.features(metric, &pairs), &exact);
    let peers = |quantity: &str| workloads(quantity, name);
    let with = |title: String, unit: &str, ours, quantity: &str, budget: Option<f64>| {
        let names = peers(quantity);
        let names: Vec<(&str, &str)> = names.iter().map(|(a, b)| (&**a, &**b)).collect();
        row(title, unit, ours, &names, budget.map(Budget::Absolute).into_iter().collect())
    };
    Ok(vec![
        with(format!("T1 features, forward, {name} metric, Q = 8"), "ms", forward, "features", Some(30.0)),
        with(
            format!("T1 largest relative error of the length, {name} metric"),
            "1",
            error(error_of_eight),
            "error",
            None,
        ),
        with(format!("T1 features, forward, {name} metric, network in f32"), "ms", in_f32, "features", None),
        with(
            format!("T1 largest relative error of the length, {name} metric, network in f32"),
            "1",
            error(length_error(&lattice.features(&mixed, &pairs), &exact)),
            "error",
            None,
        ),
        with(format!("T2 features, forward and backward, {name} metric"), "ms", backward, "gradient", Some(60.0)),
    ])
}

/// Lookups in the Christoffel grid of the reference, for few and for many points.
fn lookups() -> Result<Vec<Row>> {
    let grid = ChristoffelGrid::build(&MetricNetwork::stress(1), 2_000, 601)?;
    let mut rows = Vec::new();
    for points in [1_000_u32, 1_000_000] {
        let repeats = 1_000_000 / points;
        let took = measured(1e6 / f64::from(points * repeats), || {
            for _ in 0..repeats {
                for i in 0..points {
                    // Spread over the whole grid, in no order.
                    let (c, l) = (f64::from(i.wrapping_mul(2_654_435_761)), f64::from(i.wrapping_mul(2_246_822_519)));
                    let scale = |x: f64| x / f64::from(u32::MAX) * 2.0 - 1.0;
                    black_box(grid.value(scale(c), scale(l), Interpolation::Bilinear));
                }
            }
            Ok(())
        })?;
        rows.push(row(
            format!("lookup in the Christoffel grid, {points} points"),
            "ns per point",
            took,
            &[],
            Vec::new(),
        ));
    }
    Ok(rows)
}

/// Shooting with the tolerance of the peers.
fn shooting() -> BatchedShooting {
    BatchedShooting { tolerance: 1e-6, residual: 1e-5, ..BatchedShooting::default() }
}

/// The problems of all pairs of concentrations, at a sample of the wavelengths.
fn sample(concentrations: &[f64]) -> Vec<Problem> {
    let wavelengths = (0..SAMPLE).map(|i| -1.0 + 2.0 * i as f64 / (SAMPLE - 1) as f64);
    let pairs = |wavelength: f64| {
        concentrations.iter().flat_map(move |&start| {
            let ends = concentrations.iter().filter(move |end| **end != start);
            ends.map(move |&end| Problem { start, end, wavelength })
        })
    };
    wavelengths.flat_map(pairs).collect()
}

/// The grid method: a grid of the metric is built, which a training does in each step, then shooting looks the Christoffel symbols up.
fn grids(name: &str, metric: &MetricNetwork) -> Result<Vec<Row>> {
    let problems = sample(&REFERENCE_PPB.map(|p| (p - 30.0) / 30.0));
    let scale = PROBLEMS as f64 / problems.len() as f64;
    let mut rows = Vec::new();
    for knots in GRID_KNOTS {
        let before = cpu_ms()?;
        let grid = ChristoffelGrid::build(metric, knots, 601)?;
        let built = cpu_ms()? - before;
        let engine = GridEngine::new(&grid, metric, Interpolation::Bilinear, shooting())?;
        let solved = measured(scale, || {
            for &problem in &problems {
                black_box(engine.solve(problem, &[])?);
            }
            Ok(())
        })?;
        let mut worst = 0.0f64;
        for &problem in &problems {
            let (found, exact) = (engine.solve(problem, &[])?, trajectory(metric, problem, &[])?.initial_velocity);
            if !found.converged {
                return Err(format!("{problem:?} does not converge on {knots} x 601 knots").into());
            }
            worst = worst.max(((found.initial_velocity - exact) / exact).abs());
        }
        let title = format!("grid method, {knots} x 601 knots, {name} metric");
        let once = Figure { best: built, median: built, repeats: 1 };
        rows.push(row(format!("{title}, building the grid"), "ms", once, &[], Vec::new()));
        rows.push(row(format!("{title}, shooting on it"), "ms", solved, &[], Vec::new()));
        rows.push(row(format!("{title}, largest relative error of v0"), "1", error(worst), &[], Vec::new()));
    }
    Ok(rows)
}

/// T3 and our own shooting, on a sample of the wavelengths, scaled to all.
fn solutions(name: &str, metric: &MetricNetwork) -> Result<Vec<Row>> {
    let c: Vec<f64> = REFERENCE_PPB.iter().map(|p| (p - 30.0) / 30.0).collect();
    let problems = sample(&c);
    let scale = PROBLEMS as f64 / problems.len() as f64;
    let times: Vec<f64> = (0..TIMES).map(|i| i as f64 / (TIMES - 1) as f64).collect();
    let all: Vec<f64> = reference_nm().iter().map(|w| (w - 500.0) / 300.0).collect();
    let paths = measured(1.0, || {
        for &wavelength in &all {
            let table = PathTable::new(metric, wavelength, -1.0, 1.0, KNOTS)?;
            for &start in &c {
                for &end in c.iter().filter(|end| **end != start) {
                    black_box(table.path(start, end, &times)?);
                }
            }
        }
        Ok(())
    })?;
    let mut path_error = 0.0f64;
    for &problem in &problems {
        let table = PathTable::new(metric, problem.wavelength, -1.0, 1.0, KNOTS)?;
        let (found, exact) = (table.path(problem.start, problem.end, &times)?, trajectory(metric, problem, &times)?);
        path_error = found.iter().zip(&exact.c).map(|(a, b)| (a - b).abs()).fold(path_error, f64::max);
    }
    let lines: Vec<Line<'_>> = problems.iter().map(|it| Line { metric, wavelength: it.wavelength }).collect();
    let ends: Vec<([f64; 1], [f64; 1])> = problems.iter().map(|it| ([it.start], [it.end])).collect();
    let batch: Vec<(&dyn Manifold, &[f64], &[f64])> =
        lines.iter().zip(&ends).map(|(line, (a, b))| (line as &dyn Manifold, &a[..], &b[..])).collect();
    let engine = shooting();
    let shooting = measured(scale, || {
        black_box(engine.solve(&batch)?);
        Ok(())
    })?;
    let mut worst = 0.0f64;
    for (shot, &problem) in engine.solve(&batch)?.iter().zip(&problems) {
        let exact = trajectory(metric, problem, &[])?.initial_velocity;
        worst = worst.max(((shot.initial_velocity[0] - exact) / exact).abs());
    }
    let names = workloads("path", name);
    let names: Vec<(&str, &str)> = names.iter().map(|(a, b)| (&**a, &**b)).collect();
    Ok(vec![
        row(format!("T3 c(t) at {TIMES} times, {name} metric, closed form"), "ms", paths, &names, Vec::new()),
        row(format!("T3 largest error of c(t), {name} metric"), "1", error(path_error), &[], Vec::new()),
        row(
            format!("BatchedShooting at 1e-6, {name} metric, from {} problems", problems.len()),
            "ms",
            shooting,
            &[],
            Vec::new(),
        ),
        row(
            format!("BatchedShooting at 1e-6, {name} metric, largest relative error of v0"),
            "1",
            error(worst),
            &[],
            Vec::new(),
        ),
    ])
}

/// T4 and T5: trainings on S4 with noise.
fn training() -> Result<Vec<Row>> {
    let noise = Noise { additive: 0.005, ..Noise::default() };
    let spectra = Generator::Mixed.spectra(&REFERENCE_PPB, &reference_nm(), &noise, 1)?;
    let settings = Settings::default();
    let mut trainers: Vec<Trainer> = (0..6)
        .map(|fold| Task { fold, start: 0 }.trainer(&spectra, settings))
        .collect::<std::result::Result<_, _>>()?;
    // An epoch uses every training wavelength once.
    let epoch = measured(1.0, || {
        for trainer in &mut trainers {
            for _ in 0..settings.stride {
                trainer.advance()?;
            }
        }
        Ok(())
    })?;
    let axes = Axes::new(spectra.ppb(), spectra.nm())?;
    let training = spectra.without(3)?;
    let variance = difference_variance(&training);
    let mut trainer = Trainer::new(training, axes, settings, 3)?;
    let before = cpu_ms()?;
    while !trainer.finished() && 1.0 - trainer.validation_loss() / variance < VALIDATION_R2 {
        trainer.advance()?;
    }
    let took = cpu_ms()? - before;
    let reached = 1.0 - trainer.validation_loss() / variance;
    let title = format!(
        "T5 one model to R2 of {VALIDATION_R2} on the inner validation split ({reached:.4} after {} steps)",
        trainer.steps()
    );
    let once = Figure { best: took, median: took, repeats: 1 };
    Ok(vec![
        row(
            "T4 one epoch of the six fold models, decoder and optimizer included".to_owned(),
            "ms",
            epoch,
            &[],
            Vec::new(),
        ),
        row(title, "ms", once, &[], Vec::new()),
    ])
}

/// Mean square of the standardised differences between spectra, around their mean of zero.
fn difference_variance(spectra: &engram_geodesic::Spectra) -> f64 {
    let n = spectra.ppb().len();
    let all: Vec<f64> = (0..n).flat_map(|i| spectra.row(i).to_vec()).collect();
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    let square = all.iter().map(|a| (a - mean).powi(2)).sum::<f64>() / all.len() as f64;
    let (mut sum, mut count) = (0.0, 0.0);
    for i in 0..n {
        for j in (0..n).filter(|j| *j != i) {
            sum += spectra.row(i).iter().zip(spectra.row(j)).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
            count += spectra.nm().len() as f64;
        }
    }
    sum / count / square
}
