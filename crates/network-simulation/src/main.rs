//! Runs seeds of the network simulation, each in its own process, and prints how to replay a failing one.
//!
//! Exit status: 0 if every invariant held and every kind of fault happened, 1 otherwise, 2 for an invalid command line.
#![forbid(unsafe_code)]

use engram_network_simulation::{Fault, run};
use std::collections::BTreeMap;
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const USAGE: &str =
    "engram-network-simulation [--seeds N] [--start S] [--seconds T] [--threads N] | --seed S [--quiet]";
/// Maximum number of reported failing seeds.
const MAX_REPORTED: usize = 5;
/// Fewer seeds may not meet every kind of fault.
const ENOUGH: u64 = 40;

struct Arguments {
    seeds: u64,
    start: u64,
    limit: Duration,
    threads: usize,
    replay: Option<u64>,
    quiet: bool,
}

fn parse() -> Option<Arguments> {
    let mut parsed = Arguments {
        seeds: 100,
        start: 0,
        limit: Duration::from_secs(3_600),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        replay: None,
        quiet: false,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        if name == "--quiet" {
            parsed.quiet = true;
            continue;
        }
        let value: u64 = arguments.next()?.parse().ok()?;
        match name.as_str() {
            "--seeds" => parsed.seeds = value,
            "--start" => parsed.start = value,
            "--seconds" => parsed.limit = Duration::from_secs(value),
            "--threads" => parsed.threads = usize::try_from(value).ok()?,
            "--seed" => parsed.replay = Some(value),
            _ => return None,
        }
    }
    Some(parsed)
}

fn main() -> ExitCode {
    let Some(arguments) = parse() else {
        eprintln!("usage: {USAGE}");
        return ExitCode::from(2);
    };
    match arguments.replay {
        Some(seed) => replay(seed, arguments.quiet),
        None => campaign(&arguments),
    }
}

/// Runs one seed in this process. The last lines are `name value`.
fn replay(seed: u64, quiet: bool) -> ExitCode {
    if !quiet && std::env::var_os("RUST_LOG").is_some() {
        tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .without_time()
            .init();
    }
    let outcome = run(seed, !quiet);
    println!("trace {:016x}", outcome.trace_hash);
    let numbers = [
        ("steps", outcome.steps),
        ("simulated_ms", outcome.simulated_ms),
        ("acknowledged", outcome.acked),
        ("unknown", outcome.unknown),
        ("resolved", outcome.resolved),
        ("reads", outcome.reads),
        ("epochs", outcome.epochs),
        ("drivers_died", outcome.drivers_died),
        ("map_writes", outcome.map_versions),
    ];
    numbers.iter().for_each(|(name, number)| println!("{name} {number}"));
    Fault::ALL.iter().for_each(|fault| println!("{fault:?} {}", outcome.faults.of(*fault)));
    match outcome.failure {
        Some(failure) => {
            println!("failure {failure}");
            ExitCode::FAILURE
        }
        None => ExitCode::SUCCESS,
    }
}

#[derive(Default)]
struct Sum {
    seeds: u64,
    numbers: BTreeMap<String, u64>,
    failures: Vec<(u64, String)>,
}

impl Sum {
    fn add(&mut self, seed: u64, text: &str, succeeded: bool) {
        self.seeds += 1;
        for line in text.lines() {
            let Some((name, value)) = line.split_once(' ') else { continue };
            if let Ok(value) = value.parse::<u64>() {
                *self.numbers.entry(name.to_owned()).or_default() += value;
            }
        }
        if !succeeded {
            let failure = text.lines().find_map(|line| line.strip_prefix("failure "));
            self.failures.push((seed, failure.unwrap_or("the process ended without output").to_owned()));
        }
    }
}

fn campaign(arguments: &Arguments) -> ExitCode {
    let began = Instant::now();
    let (next, sum) = (AtomicU64::new(0), Mutex::new(Sum::default()));
    let itself = match std::env::current_exe() {
        Ok(path) => path,
        Err(error) => {
            eprintln!("failed to find the current executable: {error}");
            return ExitCode::FAILURE;
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let failures = sum.lock().expect("no panic while it is held").failures.len();
                    if number >= arguments.seeds || began.elapsed() >= arguments.limit || failures >= MAX_REPORTED {
                        return;
                    }
                    let seed = arguments.start + number;
                    let output = Command::new(&itself).args(["--quiet", "--seed", &seed.to_string()]).output();
                    let (text, succeeded) = match output {
                        Ok(output) => (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success()),
                        Err(error) => (format!("failure failed to start: {error}"), false),
                    };
                    sum.lock().expect("no panic while it is held").add(seed, &text, succeeded);
                }
            });
        }
    });
    report(&sum.into_inner().expect("all threads are done"), began.elapsed())
}

fn report(sum: &Sum, took: Duration) -> ExitCode {
    let seconds = took.as_secs_f64();
    let simulated_s = sum.numbers.get("simulated_ms").copied().unwrap_or_default() as f64 / 1e3;
    println!(
        "{} seeds in {seconds:.1} s: {:.0} a minute, {:.1} times faster than simulated time",
        sum.seeds,
        sum.seeds as f64 * 60.0 / seconds,
        simulated_s / seconds
    );
    let numbers: Vec<String> = sum.numbers.iter().map(|(name, number)| format!("{name} {number}")).collect();
    println!("{}", numbers.join(", "));
    for (seed, failure) in &sum.failures {
        println!("\nseed {seed} FAILED {failure}");
        println!("replay: cargo xtask simulate --network --seed {seed}");
    }
    let absent = |fault: &&Fault| sum.numbers.get(&format!("{fault:?}")).is_none_or(|count| *count == 0);
    let missing: Vec<&Fault> = Fault::ALL.iter().filter(absent).collect();
    if sum.failures.is_empty() && sum.seeds >= ENOUGH && !missing.is_empty() {
        println!("never happened: {missing:?}");
        return ExitCode::FAILURE;
    }
    if sum.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
