//! Runs seeds of the simulation on every core, and prints how to replay a failing one.
//!
//! Exit status: 0 if every invariant held and, without `--items`, every kind of fault happened, 1 otherwise, 2 for an invalid command line.
#![forbid(unsafe_code)]

#[cfg(feature = "defects")]
use engram_cluster::injected::Bug;
use engram_simulation::{Counters, Durability, Options, Outcome, Scenario, run};
#[cfg(feature = "defects")]
use engram_simulation::{first_seed, is_in_model, target, undetectable_reason};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum number of reported failing seeds.
const MAX_REPORTED: usize = 5;

/// Selects every bug, one after the other.
#[cfg(feature = "defects")]
const ALL_BUGS: &str = "all";

const USAGE: &str = "engram-simulation [--seeds N] [--start S] [--seconds T] [--mode sync|replicated|async] [--threads N] \
                     [--scenario NAME] [--items] [--seed S] [--injected-bug NAME|all]";

#[derive(Clone)]
struct Arguments {
    seeds: u64,
    start: u64,
    limit: Duration,
    mode: String,
    threads: usize,
    scenario: Option<String>,
    has_items: bool,
    replay: Option<u64>,
    injected_bug: Option<String>,
}

fn parse() -> Option<Arguments> {
    let mut parsed = Arguments {
        seeds: 1_000,
        start: 0,
        limit: Duration::from_secs(3_600),
        mode: "sync".to_owned(),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        scenario: None,
        has_items: false,
        replay: None,
        injected_bug: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        if name == "--items" {
            parsed.has_items = true;
            continue;
        }
        let value = arguments.next()?;
        match name.as_str() {
            "--seeds" => parsed.seeds = value.parse().ok()?,
            "--start" => parsed.start = value.parse().ok()?,
            "--seconds" => parsed.limit = Duration::from_secs(value.parse().ok()?),
            "--mode" => parsed.mode = value,
            "--scenario" => parsed.scenario = Some(value),
            "--threads" => parsed.threads = value.parse().ok()?,
            "--seed" => parsed.replay = Some(value.parse().ok()?),
            "--injected-bug" => parsed.injected_bug = Some(value),
            _ => return None,
        }
    }
    Some(parsed)
}

#[cfg(feature = "defects")]
const fn mode_name(durability: Durability) -> &'static str {
    match durability {
        Durability::Sync => "sync",
        Durability::Replicated => "replicated",
        Durability::Async => "async",
    }
}

fn options(arguments: &Arguments) -> Option<Options> {
    let durability = match arguments.mode.as_str() {
        "sync" => Durability::Sync,
        "replicated" => Durability::Replicated,
        "async" => Durability::Async,
        _ => return None,
    };
    let mut options = Options { has_items: arguments.has_items, ..Options::new(durability) };
    if let Some(name) = &arguments.scenario {
        options.scenario = Some(Scenario::from_name(name)?);
    }
    #[cfg(feature = "defects")]
    if let Some(name) = arguments.injected_bug.as_ref().filter(|name| *name != ALL_BUGS) {
        options.injected_bug = Some(Bug::from_name(name)?);
    }
    (cfg!(feature = "defects") || arguments.injected_bug.is_none()).then_some(options)
}

#[derive(Default)]
struct Sum {
    seeds: u64,
    steps: u64,
    simulated_us: u64,
    acked: u64,
    never: u64,
    unknown: u64,
    promotions: u64,
    failovers: u64,
    unnecessary: u64,
    snapshots: u64,
    unrecoverable: u64,
    lost: u64,
    reads: u64,
    searched: u64,
    traces: u64,
    faults: Counters,
    failures: Vec<(u64, String)>,
}

impl Sum {
    fn add(&mut self, seed: u64, outcome: Outcome) {
        self.seeds += 1;
        self.steps += outcome.steps;
        self.simulated_us += outcome.simulated_us;
        self.acked += outcome.acked;
        self.never += outcome.never;
        self.unknown += outcome.unknown;
        self.promotions += outcome.promotions;
        self.failovers += outcome.failovers;
        self.unnecessary += outcome.unnecessary;
        self.snapshots += outcome.snapshots;
        self.unrecoverable += u64::from(outcome.unrecoverable);
        self.lost += outcome.lost;
        self.reads += outcome.reads;
        self.searched += outcome.searched;
        // A sum does not depend on the order of the threads.
        self.traces = self.traces.wrapping_add(outcome.trace_hash);
        self.faults.merge(&outcome.faults);
        self.failures.extend(outcome.failure.map(|failure| (seed, failure)));
    }
}

fn main() -> ExitCode {
    let Some((arguments, options)) = parse().and_then(|parsed| options(&parsed).map(|options| (parsed, options)))
    else {
        eprintln!("usage: {USAGE}");
        return ExitCode::from(2);
    };
    match arguments.replay {
        Some(seed) => replay(seed, &options),
        #[cfg(feature = "defects")]
        None if arguments.injected_bug.as_deref() == Some(ALL_BUGS) => score(&arguments, &options),
        None => campaign(&arguments, &options),
    }
}

fn replay(seed: u64, options: &Options) -> ExitCode {
    let outcome = run(seed, &Options { prints: true, ..*options });
    println!("{outcome:#?}");
    println!("seed {seed}: trace {:016x}", outcome.trace_hash);
    if outcome.failure.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn campaign(arguments: &Arguments, options: &Options) -> ExitCode {
    let began = Instant::now();
    let sum = run_all(arguments, std::slice::from_ref(options), MAX_REPORTED);
    report(arguments, options, &sum, began.elapsed())
}

/// Runs seeds until all are done, the time is over or there are enough failures; each seed with the next of the options.
fn run_all(arguments: &Arguments, options: &[Options], max_failures: usize) -> Sum {
    let began = Instant::now();
    let next = AtomicU64::new(0);
    let sum = Mutex::new(Sum::default());
    // Panics are reported as failures of their seed.
    std::panic::set_hook(Box::new(|_| {}));
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let failures = sum.lock().expect("no panic while it is held").failures.len();
                    if number >= arguments.seeds || began.elapsed() >= arguments.limit || failures >= max_failures {
                        return;
                    }
                    let seed = arguments.start + number;
                    let outcome = run(seed, &options[(seed % options.len() as u64) as usize]);
                    sum.lock().expect("no panic while it is held").add(seed, outcome);
                }
            });
        }
    });
    sum.into_inner().expect("all threads are done")
}

/// Injects one bug after the other, each where it is found soonest, and prints a table of the seeds that find it.
#[cfg(feature = "defects")]
fn score(arguments: &Arguments, options: &Options) -> ExitCode {
    let (mut missed, mut injected) = (Vec::new(), 0);
    println!("| bug | mode, scenario | seeds | symptom | model |");
    println!("| --- | --- | --- | --- | --- |");
    for (bug, name) in Bug::REPLICA.into_iter().chain(Bug::ENVIRONMENT) {
        injected += 1;
        let model = if is_in_model(bug) { "yes" } else { "-" };
        let Some((scenario, durability)) = target(bug) else {
            println!("| {name} | - | - | none: {} | {model} |", undetectable_reason(bug).unwrap_or_default());
            continue;
        };
        let correct = Options { durability, scenario: Some(scenario), ..*options };
        let with_bug = Options { injected_bug: Some(bug), ..correct };
        let from_first = Arguments { start: arguments.start + first_seed(bug), ..arguments.clone() };
        let sum = run_all(&from_first, std::slice::from_ref(&with_bug), 1);
        let target = format!("{}, {}", mode_name(durability), scenario.name());
        match sum.failures.iter().min() {
            Some((seed, failure)) => {
                // A seed that fails without the bug does not show the bug.
                if let Some(failure) = run(*seed, &correct).failure {
                    println!("{target}, seed {seed} fails without an injected bug: {failure}");
                    return ExitCode::FAILURE;
                }
                let (count, summary) = (seed - from_first.start + 1, summarize(failure));
                let from = if from_first.start > arguments.start {
                    format!(" from {} on", from_first.start)
                } else {
                    String::new()
                };
                println!("| {name} | {target} | {count}{from} | {summary} | {model} |");
            }
            None => {
                println!("| {name} | {target} | more than {} | none | {model} |", sum.seeds);
                missed.push((name, model));
            }
        }
    }
    let not_found: Vec<&str> = missed.iter().filter(|(_, model)| *model == "-").map(|(name, _)| *name).collect();
    println!("\n{} of {injected} found by seeds; not found at all: {not_found:?}", injected - missed.len());
    if not_found.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Summarizes a failure without the numbers of its run.
#[cfg(feature = "defects")]
fn summarize(failure: &str) -> &'static str {
    const KINDS: &[(&str, &str)] = &[
        ("not healthy", "does not recover"),
        ("would read", "stale read"),
        ("no linearization", "reads without a legal order"),
        ("has term", "replicas that differ"),
        ("the replicas differ", "replicas that differ"),
        ("the digest of", "replicas that differ"),
        ("is served by", "two primaries in a term"),
        ("and then", "state that went back"),
        ("differ from their responses", "acknowledged, then lost or applied twice"),
        ("got response", "contradictory responses"),
        ("of an id that is there", "acknowledged, then lost or applied twice"),
        ("failed to start", "log that does not open"),
        ("is proven dead", "false proof of death"),
        ("panic", "assertion failed"),
    ];
    let kind = KINDS.iter().find(|(part, _)| failure.lines().next().unwrap_or_default().contains(part));
    kind.map_or("other", |(_, summary)| summary)
}

fn report(arguments: &Arguments, options: &Options, sum: &Sum, took: Duration) -> ExitCode {
    let Sum {
        seeds,
        steps,
        acked,
        never,
        unknown,
        promotions,
        failovers,
        unnecessary,
        snapshots,
        unrecoverable,
        lost,
        reads,
        searched,
        traces,
        ..
    } = sum;
    println!(
        "{seeds} seeds in {:.1} s: {:.0} a minute, {:.0} times faster than simulated time",
        took.as_secs_f64(),
        *seeds as f64 * 60.0 / took.as_secs_f64(),
        sum.simulated_us as f64 / 1e6 / took.as_secs_f64()
    );
    println!(
        "{steps} steps, {acked} operations acknowledged, {never} closed, {unknown} unknown, {lost} lost (allowed in mode async)"
    );
    println!("{failovers} failovers, {unnecessary} of running processes");
    println!("{searched} operations on shared ids are linearizable");
    println!(
        "{promotions} promotions, {snapshots} snapshots installed, {unrecoverable} seeds ended without an intact replica, {reads} possible reads; traces {traces:016x}"
    );
    println!("faults: {}", sum.faults);
    let named = |name: &str, value: &Option<String>| value.as_ref().map(|value| format!(" --{name} {value}"));
    let selected = [named("injected-bug", &arguments.injected_bug), named("scenario", &arguments.scenario)];
    let mut selected: String = selected.into_iter().flatten().collect();
    if arguments.has_items {
        selected.push_str(" --items");
    }
    for (seed, failure) in &sum.failures {
        println!("\nseed {seed} FAILED {failure}");
        println!("replay: cargo xtask simulate --mode {}{selected} --seed {seed}", arguments.mode);
    }
    // Runs with items are few, in addition to those without.
    let missing = if arguments.has_items { Vec::new() } else { sum.faults.missing(options.durability) };
    if sum.failures.is_empty() && !missing.is_empty() {
        println!("never happened: {}", missing.join(", "));
    }
    if sum.failures.is_empty() && missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
