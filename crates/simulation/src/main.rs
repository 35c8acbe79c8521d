//! Runs seeds of the simulation on every core, and says how to see a failing one again.
//!
//! Exit status: 0 when everything held and every kind of fault happened, 1 otherwise, 2 for a command line that does not parse.
#![forbid(unsafe_code)]

#[cfg(feature = "defects")]
use engram_cluster::replica::Defect;
use engram_simulation::{Counters, Durability, Options, Outcome, Season, run};
#[cfg(feature = "defects")]
use engram_simulation::{aim, first_seed, is_in_model, unseen};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Failing seeds that are told of; one is enough to begin with.
const MOST_TOLD: usize = 5;

/// Stands for every defect, one after the other.
#[cfg(feature = "defects")]
const ALL_DEFECTS: &str = "all";

const USAGE: &str = "engram-simulation [--seeds N] [--start S] [--seconds T] [--mode sync|replicated|async] [--threads N] \
                     [--season NAME] [--seed S] [--defect NAME|all]";

#[derive(Clone)]
struct Arguments {
    seeds: u64,
    start: u64,
    limit: Duration,
    mode: String,
    threads: usize,
    season: Option<String>,
    replay: Option<u64>,
    defect: Option<String>,
}

fn parse() -> Option<Arguments> {
    let mut parsed = Arguments {
        seeds: 1_000,
        start: 0,
        limit: Duration::from_secs(3_600),
        mode: "sync".to_owned(),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        season: None,
        replay: None,
        defect: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next()?;
        match name.as_str() {
            "--seeds" => parsed.seeds = value.parse().ok()?,
            "--start" => parsed.start = value.parse().ok()?,
            "--seconds" => parsed.limit = Duration::from_secs(value.parse().ok()?),
            "--mode" => parsed.mode = value,
            "--season" => parsed.season = Some(value),
            "--threads" => parsed.threads = value.parse().ok()?,
            "--seed" => parsed.replay = Some(value.parse().ok()?),
            "--defect" => parsed.defect = Some(value),
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
    let mut options = Options::new(durability);
    if let Some(name) = &arguments.season {
        options.season = Some(Season::named(name)?);
    }
    #[cfg(feature = "defects")]
    if let Some(name) = arguments.defect.as_ref().filter(|name| *name != ALL_DEFECTS) {
        options.defect = Some(Defect::named(name)?);
    }
    (cfg!(feature = "defects") || arguments.defect.is_none()).then_some(options)
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
    copies: u64,
    forsaken: u64,
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
        self.copies += outcome.copies;
        self.forsaken += u64::from(outcome.forsaken);
        self.lost += outcome.lost;
        self.reads += outcome.reads;
        self.searched += outcome.searched;
        // Addition does not mind which thread was first.
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
        None if arguments.defect.as_deref() == Some(ALL_DEFECTS) => score(&arguments, &options),
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
    let sum = run_all(arguments, std::slice::from_ref(options), MOST_TOLD);
    report(arguments, options, &sum, began.elapsed())
}

/// Runs seeds until they, the time or the patience with failures are used up; one after the other with each of the options.
fn run_all(arguments: &Arguments, options: &[Options], most_failures: usize) -> Sum {
    let began = Instant::now();
    let next = AtomicU64::new(0);
    let sum = Mutex::new(Sum::default());
    // Panics are failures of their seed and are told of with it.
    std::panic::set_hook(Box::new(|_| {}));
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let told = sum.lock().expect("no panic while it is held").failures.len();
                    if number >= arguments.seeds || began.elapsed() >= arguments.limit || told >= most_failures {
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

/// Plants one defect after the other, each where it shows soonest, and tells as a table which seeds notice it.
#[cfg(feature = "defects")]
fn score(arguments: &Arguments, options: &Options) -> ExitCode {
    let (mut missed, mut planted) = (Vec::new(), 0);
    println!("| defect | mode, season | seeds | what the last one of them shows | model |");
    println!("| --- | --- | --- | --- | --- |");
    for (defect, name) in Defect::ALL.into_iter().chain(Defect::AROUND) {
        planted += 1;
        let model = if is_in_model(defect) { "yes" } else { "-" };
        let Some((season, durability)) = aim(defect) else {
            println!("| {name} | - | - | nothing: {} | {model} |", unseen(defect).unwrap_or_default());
            continue;
        };
        let sound = Options { durability, season: Some(season), ..*options };
        let aimed = Options { defect: Some(defect), ..sound };
        let near = Arguments { start: arguments.start + first_seed(defect), ..arguments.clone() };
        let sum = run_all(&near, std::slice::from_ref(&aimed), 1);
        let place = format!("{}, {}", mode_name(durability), season.name());
        match sum.failures.iter().min() {
            Some((seed, failure)) => {
                // What fails without it says nothing about the defect, and much about everything else.
                if let Some(failure) = run(*seed, &sound).failure {
                    println!("{place}, seed {seed} fails without a defect: {failure}");
                    return ExitCode::FAILURE;
                }
                let (after, what) = (seed - near.start + 1, in_short(failure));
                let from =
                    if near.start > arguments.start { format!(" from {} on", near.start) } else { String::new() };
                println!("| {name} | {place} | {after}{from} | {what} | {model} |");
            }
            None => {
                println!("| {name} | {place} | more than {} | nothing | {model} |", sum.seeds);
                missed.push((name, model));
            }
        }
    }
    let unfound: Vec<&str> = missed.iter().filter(|(_, model)| *model == "-").map(|(name, _)| *name).collect();
    println!("\n{} of {planted} found by seeds; by nothing: {unfound:?}", planted - missed.len());
    if unfound.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What failed, without the numbers of its run.
#[cfg(feature = "defects")]
fn in_short(failure: &str) -> &'static str {
    const KINDS: &[(&str, &str)] = &[
        ("not whole", "it does not become whole"),
        ("would read", "a stale read"),
        ("no order", "reads that fit no order"),
        ("has term", "copies that differ"),
        ("the copies differ", "copies that differ"),
        ("the digest of", "copies that differ"),
        ("is served by", "two primaries of a term"),
        ("and then", "a state that went back"),
        ("not as told", "acknowledged, and lost or doubled"),
        ("was told", "answers that contradict each other"),
        ("of an id that is there", "acknowledged, and lost or doubled"),
        ("does not start", "a log that does not open"),
        ("dead by proof", "proof that is none"),
        ("panic", "an assertion"),
    ];
    let kind = KINDS.iter().find(|(part, _)| failure.lines().next().unwrap_or_default().contains(part));
    kind.map_or("something else", |(_, what)| what)
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
        copies,
        forsaken,
        lost,
        reads,
        searched,
        traces,
        ..
    } = sum;
    println!(
        "{seeds} seeds in {:.1} s: {:.0} a minute, {:.0} times as fast as the time they simulate",
        took.as_secs_f64(),
        *seeds as f64 * 60.0 / took.as_secs_f64(),
        sum.simulated_us as f64 / 1e6 / took.as_secs_f64()
    );
    println!(
        "{steps} steps, {acked} operations acknowledged, {never} closed, {unknown} unknown, {lost} lost as they may be"
    );
    println!("{failovers} failovers, {unnecessary} of them of a process that ran");
    println!("{searched} operations of which every client saw a part fit one order");
    println!(
        "{promotions} promotions, {copies} copies of a state, {forsaken} seeds that ended without a whole copy, {reads} moments for reads; traces {traces:016x}"
    );
    println!("faults: {}", sum.faults);
    let named = |name: &str, value: &Option<String>| value.as_ref().map(|value| format!(" --{name} {value}"));
    let chosen = [named("defect", &arguments.defect), named("season", &arguments.season)];
    let chosen: String = chosen.into_iter().flatten().collect();
    for (seed, failure) in &sum.failures {
        println!("\nseed {seed} FAILED {failure}");
        println!("again, step by step: cargo xtask simulate --mode {}{chosen} --seed {seed}", arguments.mode);
    }
    let missing = sum.faults.missing(options.durability);
    if sum.failures.is_empty() && !missing.is_empty() {
        println!("never happened: {}", missing.join(", "));
    }
    if sum.failures.is_empty() && missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
