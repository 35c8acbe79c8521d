//! Faults at random points of trainings: killed and paused workers, drivers among them, and links that are reset or swallow
//! packets.
//!
//! `cargo xtask chaos --training` runs the same campaign with more faults. At each fault the newest checkpoint of every worker loads. A training ends with
//! the parameters and the optimizer state, bit by bit, of an undisturbed one on a single worker, so no gradient sum differed in a bit. Some trainings add in
//! the order of the ranks, where the part of a worker that dies is missing in a step: none may have more samples than its steps. In both orders the states
//! that the workers saved after the last step are equal.

use crate::cuts::{Cut, cut, enter_namespace};
use crate::has_ended;
use engram_faults::ledger::Tally;
use engram_faults::outcome::{FaultReport, Outcome};
use engram_faults::runner::SeedRunner;
use engram_tests::{Cluster, ClusterBuilder, DEADLINE, cluster_manifest, wait_for};
use engram_train::Checkpoint;
use rand::RngExt as _;
use rand::rngs::StdRng;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

/// Steps of a training, and its most faults.
const STEPS: u64 = 1_200;
const FAULTS: u64 = 6;
/// Faults in CI: each takes about a second.
const DEFAULT_COUNT: u64 = 12;
/// Longest pause or cut: over twice the time after which a silent member leaves.
const LONGEST_MS: u64 = 1_200;
/// Files of a checkpoint that are for users.
const USER_FILES: [&str; 3] = ["manifest.json", "model.yaml", "model.py"];

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Order of additions that gives the same bits on any number of workers.
const INVARIANT: &str = "PartitionInvariant";

fn manifest(name: &str, order: &str, shared_memory: bool) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: faults }}\n  \
         kind: Replay\n  replay:\n    source: {{ synthetic: {{ features: 60, samples: 1000, largest: 20 }} }}\n    model:\n      \
         inputs: [{{ field: mask, dim: 60 }}]\n      layers: [{{ dense: 32, activation: Relu }}, {{ dropout: 0.1 }}, {{ dense: 1, \
         activation: Sigmoid }}]\n      loss: {{ kind: Mse, target: score }}\n    optimizer: {{ rate: 0.003 }}\n    batch: 128\n    \
         steps: {STEPS}\n    order: {order}\n    detectAfter: 500ms\n    sharedMemory: {shared_memory}\n    checkpoint: {{ every: 20 }}\n"
    )
}

fn run(cluster: &Cluster, name: &str) -> Option<Value> {
    let listed = cluster.engram(&["list", "runs", "-o", "json"]);
    // Runs of partitions without primary are not listed.
    let found = (listed.code == Some(0)).then(|| listed.json()["items"].as_array().cloned()).flatten()?;
    found.into_iter().find(|run| run["name"] == name && run["phase"].is_string())
}

/// Trains to the end without a fault, on one worker.
fn undisturbed() -> Value {
    let cluster = Cluster::up(&cluster_manifest("faults", 1, "  partitions: 4\n"));
    let file = cluster.file("run.yaml", manifest("undisturbed", INVARIANT, true));
    cluster.engram(&["run", &file]).exits_with(0);
    let ended = run(&cluster, "undisturbed").expect("the run is known");
    cluster.stop();
    ended
}

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// A random worker is killed.
    Kill,
    /// The worker that drives the run, primary of the partition of its group, is killed.
    KillDriver,
    /// A worker is stopped for a while.
    Pause,
    /// Connections between two workers, new ones too, are reset for a while.
    CutLink,
    /// Packets between two workers vanish for a while, and no connection is reset.
    Swallow,
    /// Packets from one worker to another vanish, and those of the opposite direction arrive.
    SwallowOneWay,
}

impl Fault {
    fn random(random: &mut StdRng) -> Self {
        let cuts = [Self::CutLink, Self::Swallow, Self::SwallowOneWay];
        let kinds = [[Self::Kill, Self::KillDriver, Self::Pause], cuts].concat();
        kinds[random.random_range(0..kinds.len())]
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Kill => "Kill",
            Self::KillDriver => "KillDriver",
            Self::Pause => "Pause",
            Self::CutLink => "CutLink",
            Self::Swallow => "Swallow",
            Self::SwallowOneWay => "SwallowOneWay",
        }
    }

    const fn cut(self) -> Option<Cut> {
        Some(match self {
            Self::CutLink => Cut::Reset,
            Self::Swallow => Cut::BothWays,
            Self::SwallowOneWay => Cut::OneWay,
            Self::Kill | Self::KillDriver | Self::Pause => return None,
        })
    }
}

/// Injects one fault, and waits until the process of its worker runs. A link that cannot be cut, for which `can_cut` or
/// a connection is missing, is replaced by a pause.
fn inject(cluster: &mut Cluster, (workers, can_cut): (usize, bool), fault: Fault, random: &mut StdRng) -> Fault {
    let driver = run(cluster, "disturbed").and_then(|run| run["driver"].as_u64());
    let victim = driver.filter(|_| fault == Fault::KillDriver).map(|it| it as usize);
    let worker = victim.unwrap_or_else(|| random.random_range(0..workers));
    let pid = wait_for("a process", DEADLINE, || cluster.worker(worker));
    let lasts = Duration::from_millis(random.random_range(50..LONGEST_MS));
    if matches!(fault, Fault::Kill | Fault::KillDriver) {
        cluster.kill(pid);
        checkpoints_load(&cluster.state_dir());
        cluster.wait_for_restart(worker, pid);
        return if victim.is_some() { Fault::KillDriver } else { Fault::Kill };
    }
    let other = (worker + random.random_range(1..workers.max(2))) % workers;
    let peer = cluster.worker(other).filter(|_| can_cut && workers > 1);
    if let (Some(kind), Some(peer)) = (fault.cut(), peer)
        && cut(kind, (pid, peer), lasts) > 0
    {
        return fault;
    }
    cluster.pause(pid);
    std::thread::sleep(lasts);
    cluster.resume(pid);
    Fault::Pause
}

/// Returns the folders of trainings, of all workers, that have a checkpoint.
fn training_folders(state_dir: &Path) -> impl Iterator<Item = PathBuf> {
    let workers = fs::read_dir(state_dir.join("workers")).into_iter().flatten().flatten();
    let runs = workers.flat_map(|worker| fs::read_dir(worker.path().join("training")).into_iter().flatten().flatten());
    runs.map(|run| run.path()).filter(|run| run.join("LATEST").exists())
}

/// Loads what `LATEST` names on every worker that has a checkpoint; returns their number.
fn checkpoints_load(state_dir: &Path) -> usize {
    training_folders(state_dir).map(|folder| latest_loads(&folder)).count()
}

/// Returns parameters and optimizer state after the last step, of each worker that saved them.
fn last_states(state_dir: &Path) -> Vec<[Vec<u8>; 2]> {
    let latest = |folder: PathBuf| {
        let name = fs::read_to_string(folder.join("LATEST")).expect("LATEST is readable");
        folder.join(name.trim())
    };
    let is_last = |folder: &PathBuf| {
        let manifest = fs::read(folder.join("manifest.json")).expect("the manifest is readable");
        let manifest: Value = serde_json::from_slice(&manifest).expect("the manifest is JSON");
        manifest["counters"]["step"] == STEPS
    };
    let read = |folder: PathBuf| {
        ["model.safetensors", "optimizer.safetensors"].map(|name| fs::read(folder.join(name)).expect("it is readable"))
    };
    training_folders(state_dir).map(latest).filter(is_last).map(read).collect()
}

/// # Panics
/// The checkpoint that `LATEST` names is missing or damaged, although `LATEST` named no other one meanwhile.
fn latest_loads(folder: &Path) {
    let latest = || fs::read_to_string(folder.join("LATEST")).expect("LATEST is readable");
    let mut named = latest();
    loop {
        match load(&folder.join(named.trim())) {
            Ok(()) => return,
            Err(error) => {
                let newer = latest();
                assert_ne!(newer, named, "{}: {error}", folder.display());
                named = newer;
            }
        }
    }
}

fn load(folder: &Path) -> Result<(), String> {
    let text = |error: io::Error| error.to_string();
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(text)? {
        let entry = entry.map_err(text)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !USER_FILES.contains(&name.as_str()) {
            files.insert(name, fs::read(entry.path()).map_err(text)?);
        }
    }
    let manifest = fs::read(folder.join("manifest.json")).map_err(text)?;
    Checkpoint { manifest, files }.verify().map(drop).map_err(|error| error.to_string())
}

/// Injects up to this number of faults into one training, and adds what is wrong with its end to the outcome. Returns the number of faults that it had before
/// its last step.
fn train(
    runner: &mut SeedRunner,
    training: u64,
    (replay, can_cut): (&str, bool),
    faults: u64,
    expected: &Value,
) -> u64 {
    let workers = runner.draws().random_range(2..=5);
    let (has_tls, shared_memory) = (training % 2 == 1, training % 4 == 1 || training % 4 == 2);
    let order = if training % 3 == 1 { "Rank" } else { INVARIANT };
    let replay = format!(
        "{replay}: training {training}, {workers} workers, order {order}, TLS {has_tls}, shared memory {shared_memory}"
    );
    println!("{replay}, {faults} faults");
    let builder = ClusterBuilder::new(&cluster_manifest("faults", workers, "  partitions: 8\n"));
    let mut cluster = if has_tls { builder.with(&["--tls"]) } else { builder }.start();
    let file = cluster.file("run.yaml", manifest("disturbed", order, shared_memory));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let mut done = 0;
    while done < faults {
        let step = runner.draws().random_range(done * STEPS / (faults + 1)..(done + 1) * STEPS / (faults + 1));
        let reached = |run: &Value| run["epoch"].as_u64() >= Some(step) || has_ended(run);
        if has_ended(&wait_for(&replay, DEADLINE, || run(&cluster, "disturbed").filter(reached))) {
            break;
        }
        runner.next_fault().expect("no fault failed");
        let kind = Fault::random(runner.draws());
        let kind = inject(&mut cluster, (workers as usize, can_cut), kind, runner.draws());
        let loaded = checkpoints_load(&cluster.state_dir());
        println!("  step {step}: {kind:?}, {loaded} checkpoints load");
        let measured = run(&cluster, "disturbed").and_then(|run| run["metrics"]["recovery_seconds"].as_f64());
        let measured =
            measured.map(Duration::from_secs_f64).filter(|it| recoveries(runner.outcome()).last() != Some(it));
        let target = format!("training {training}, step {step}");
        let outages = measured.into_iter().collect();
        let _ = runner.note(Ok(FaultReport { kind: kind.name(), target, outages, ..FaultReport::default() }));
        done += 1;
    }
    let ended = wait_for(&replay, DEADLINE, || run(&cluster, "disturbed").filter(has_ended));
    let states = last_states(&cluster.state_dir());
    println!("  {} of {workers} workers saved the last step", states.len());
    cluster.stop();
    let tally = tally(expected, &ended, order);
    let outcome = runner.outcome();
    outcome.ledger.get_or_insert_default().add(&tally);
    let mut problems = problems(expected, &ended, &tally, order);
    if states.is_empty() || states.iter().any(|state| *state != states[0]) {
        problems.push("parameters or optimizer state differ between workers");
    }
    let problems = problems.into_iter();
    outcome.problems.extend(problems.map(|problem| format!("{replay}: {problem}: {ended}")));
    done
}

/// The ledger of a training: the samples that its committed steps counted, against those of the undisturbed one. In the order of the ranks the samples
/// of workers that die in a step are missing.
fn tally(expected: &Value, ended: &Value, order: &str) -> Tally {
    let samples = |run: &Value| run["updates"].as_u64().expect("a training counts its samples");
    let (planned, counted) = (samples(expected), samples(ended));
    Tally {
        operations: planned,
        acked: planned,
        lost: if order == INVARIANT { planned.saturating_sub(counted) } else { 0 },
        doubled: counted.saturating_sub(planned),
        ..Tally::default()
    }
}

/// Compares the end of a training with that of the undisturbed one.
fn problems(expected: &Value, ended: &Value, tally: &Tally, order: &str) -> Vec<&'static str> {
    let differs = ended["outputs"]["digest"] != expected["outputs"]["digest"];
    let found = [
        (ended["phase"] != "Succeeded" || ended["epoch"] != STEPS, "the training did not end after its last step"),
        (differs && order == INVARIANT, "parameters or optimizer state differ"),
        (!tally.is_clean(), "a step was lost or repeated"),
    ];
    found.into_iter().filter(|(is_wrong, _)| *is_wrong).map(|(_, problem)| problem).collect()
}

/// Times from the last step with a lost worker to the next committed one, of the faults that have one.
fn recoveries(outcome: &Outcome) -> impl DoubleEndedIterator<Item = &Duration> {
    outcome.faults.iter().flat_map(|fault| &fault.outages)
}

/// Writes what a campaign measured, for `cargo xtask chaos --training`; times in seconds, in ascending order.
fn write_report(path: &str, outcome: &Outcome, trainings: u64) {
    let mut seconds: Vec<f64> = recoveries(outcome).map(Duration::as_secs_f64).collect();
    seconds.sort_by(f64::total_cmp);
    let report = serde_json::json!({ "outcome": outcome, "trainings": trainings, "recoverySeconds": seconds });
    fs::write(path, report.to_string()).expect("failed to write the report");
}

#[test]
fn trainings_lose_no_step_and_no_bit_to_random_faults() {
    let count = number("ENGRAM_TRAINING_FAULTS").unwrap_or(DEFAULT_COUNT);
    let seed = number("ENGRAM_TRAINING_SEED").unwrap_or(7);
    let replay = format!("cargo xtask chaos --training --count {count} --seed {seed}");
    let namespace = enter_namespace();
    if let Err(reason) = &namespace {
        println!("links are not cut: {reason}");
    }
    let expected = undisturbed();
    let mut runner = SeedRunner::new(seed, count as usize);
    let (mut done, mut trainings) = (0, 0);
    while done < count {
        let faults = FAULTS.min(count - done);
        let injected = train(&mut runner, trainings, (&replay, namespace.is_ok()), faults, &expected);
        assert!(injected > 0, "{replay}: training {trainings} ended before its first fault");
        assert_eq!(runner.outcome().violations(), [""; 0], "{replay}");
        (done, trainings) = (done + injected, trainings + 1);
    }
    let outcome = runner.finish();
    let kinds: Vec<_> = outcome.by_kind().iter().map(|kind| format!("{} {}", kind.kind, kind.done)).collect();
    println!(
        "{} faults in {trainings} trainings, {}: every step counted once, parameters of the invariant order equal to the undisturbed ones",
        outcome.faults.len(),
        kinds.join(", ")
    );
    println!("{} recoveries measured, longest {:?}", recoveries(&outcome).count(), recoveries(&outcome).max());
    if let Ok(path) = std::env::var("ENGRAM_TRAINING_REPORT") {
        write_report(&path, &outcome, trainings);
    }
}

#[test]
fn a_lost_step_a_repeated_one_and_other_bits_are_violations() {
    let run = |samples: u64, digest: &str| serde_json::json!({ "phase": "Succeeded", "epoch": STEPS, "updates": samples, "outputs": { "digest": digest } });
    let expected = run(128 * STEPS, "a");
    let in_order = |ended: &Value, order: &str| {
        let tally = tally(&expected, ended, order);
        (tally.lost, tally.doubled, problems(&expected, ended, &tally, order))
    };
    let of = |ended: &Value| in_order(ended, INVARIANT);
    assert_eq!(of(&run(128 * STEPS, "a")), (0, 0, vec![]));
    assert_eq!(of(&run(128 * (STEPS - 1), "a")), (128, 0, vec!["a step was lost or repeated"]));
    assert_eq!(of(&run(128 * (STEPS + 1), "a")), (0, 128, vec!["a step was lost or repeated"]));
    assert_eq!(of(&run(128 * STEPS, "b")), (0, 0, vec!["parameters or optimizer state differ"]));
    assert_eq!(in_order(&run(128 * STEPS - 40, "b"), "Rank"), (0, 0, vec![]));
    assert_eq!(in_order(&run(128 * STEPS + 40, "b"), "Rank"), (0, 40, vec!["a step was lost or repeated"]));
}
