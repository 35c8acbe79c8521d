//! Faults at random points of trainings: killed and paused workers, drivers among them, and links that are reset.
//!
//! `cargo xtask chaos --training` runs the same campaign with more faults. At each fault the newest checkpoint of every worker loads. A training ends with
//! the parameters and the optimizer state, bit by bit, of an undisturbed one on a single worker, so no gradient sum differed in a bit; all members have them.

use crate::has_ended;
use engram_tests::{Cluster, ClusterBuilder, DEADLINE, cluster_manifest, wait_for};
use engram_train::Checkpoint;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, io};

/// Steps of a training, and its most faults.
const STEPS: u64 = 1_200;
const FAULTS: u64 = 6;
/// Faults in CI: keep it short.
const DEFAULT_COUNT: u64 = 3;
/// Files of a checkpoint that are for users.
const USER_FILES: [&str; 3] = ["manifest.json", "model.yaml", "model.py"];

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn manifest(name: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: faults }}\n  \
         kind: Replay\n  replay:\n    source: {{ synthetic: {{ features: 60, samples: 1000, largest: 20 }} }}\n    model:\n      \
         inputs: [{{ field: mask, dim: 60 }}]\n      layers: [{{ dense: 32, activation: Relu }}, {{ dropout: 0.1 }}, {{ dense: 1, \
         activation: Sigmoid }}]\n      loss: {{ kind: Mse, target: score }}\n    optimizer: {{ rate: 0.003 }}\n    batch: 128\n    \
         steps: {STEPS}\n    order: PartitionInvariant\n    detectAfter: 500ms\n    checkpoint: {{ every: 20 }}\n"
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
    let file = cluster.file("run.yaml", manifest("undisturbed"));
    cluster.engram(&["run", &file]).exits_with(0);
    let ended = run(&cluster, "undisturbed").expect("the run is known");
    cluster.stop();
    ended
}

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// A random worker is killed.
    Kill,
    /// The worker that drives the run, primary of the partition of its group, is killed.
    KillDriver,
    /// A worker is stopped for a while.
    Pause,
    /// Connections between two workers, new ones too, are reset for a while.
    CutLink,
}

impl Fault {
    fn random(random: &mut StdRng) -> Self {
        let kinds = [Self::Kill, Self::Kill, Self::KillDriver, Self::Pause, Self::CutLink];
        kinds[random.random_range(0..kinds.len())]
    }
}

/// Injects one fault, and waits until the process of its worker runs. A link that cannot be cut here, which takes root and `ss` of iproute2, is replaced
/// by a pause.
fn inject(cluster: &mut Cluster, workers: usize, fault: Fault, random: &mut StdRng) -> Fault {
    let driver = run(cluster, "disturbed").and_then(|run| run["driver"].as_u64());
    let victim = driver.filter(|_| fault == Fault::KillDriver).map(|it| it as usize);
    let worker = victim.unwrap_or_else(|| random.random_range(0..workers));
    let pid = wait_for("a process", DEADLINE, || cluster.worker(worker));
    let lasts = Duration::from_millis(random.random_range(50..2_500));
    if matches!(fault, Fault::Kill | Fault::KillDriver) {
        cluster.kill(pid);
        checkpoints_load(&cluster.state_dir());
        cluster.wait_for_restart(worker, pid);
        return if victim.is_some() { Fault::KillDriver } else { Fault::Kill };
    }
    let other = (worker + random.random_range(1..workers.max(2))) % workers;
    let peer = cluster.worker(other).filter(|_| fault == Fault::CutLink && workers > 1);
    if let Some(peer) = peer
        && cut(pid, peer, lasts)
    {
        return Fault::CutLink;
    }
    cluster.pause(pid);
    std::thread::sleep(lasts);
    cluster.resume(pid);
    Fault::Pause
}

/// Resets the connections between two processes for a while; returns whether one was reset.
fn cut(a: u32, b: u32, lasts: Duration) -> bool {
    let end = Instant::now() + lasts;
    let mut is_cut = false;
    while Instant::now() < end {
        let open = connections(a, b).unwrap_or_default();
        if !open.is_empty() {
            let filter: Vec<String> =
                open.iter().map(|(from, to)| format!("( sport = :{from} and dport = :{to} )")).collect();
            let reset = Command::new("ss").args(["-KtnH", "state", "established", &filter.join(" or ")]).output();
            is_cut |= reset.is_ok_and(|output| !output.stdout.is_empty());
        }
        if !is_cut {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    is_cut
}

/// Returns the ports of the connections between two processes, at both ends.
fn connections(a: u32, b: u32) -> io::Result<Vec<(u16, u16)>> {
    let listed = Command::new("ss").args(["-tnpH", "state", "established"]).output()?;
    let mut ends = BTreeMap::new();
    for line in String::from_utf8_lossy(&listed.stdout).lines() {
        let mut words = line.split_whitespace().skip(2);
        let mut port = || words.next()?.rsplit_once(':')?.1.parse::<u16>().ok();
        let process = [a, b].into_iter().find(|pid| line.contains(&format!("pid={pid},")));
        if let (Some(from), Some(to), Some(process)) = (port(), port(), process) {
            ends.insert((from, to), process);
        }
    }
    let is_between =
        |((from, to), process): &(&(u16, u16), &u32)| ends.get(&(*to, *from)).is_some_and(|other| other != *process);
    Ok(ends.iter().filter(is_between).map(|(ports, _)| *ports).collect())
}

/// Loads what `LATEST` names on every worker that has a checkpoint; returns their number.
fn checkpoints_load(state_dir: &Path) -> usize {
    let workers = fs::read_dir(state_dir.join("workers")).into_iter().flatten().flatten();
    let runs = workers.flat_map(|worker| fs::read_dir(worker.path().join("training")).into_iter().flatten().flatten());
    runs.filter(|run| run.path().join("LATEST").exists()).map(|run| latest_loads(&run.path())).count()
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

/// Measured times from the last step before a loss to the first one after it, in ascending order.
fn print_recovery(mut seconds: Vec<f64>) {
    seconds.sort_by(f64::total_cmp);
    let at = |share: f64| seconds.get(((seconds.len() as f64 * share) as usize).min(seconds.len().saturating_sub(1)));
    let text = |share: f64| at(share).map_or_else(|| "-".to_owned(), |it| format!("{it:.3} s"));
    println!("recovery, {} measured: median {}, p99 {}, longest {}", seconds.len(), text(0.5), text(0.99), text(1.0));
}

#[test]
fn trainings_lose_no_step_and_no_bit_to_random_faults() {
    let count = number("ENGRAM_TRAINING_FAULTS").unwrap_or(DEFAULT_COUNT);
    let seed = number("ENGRAM_TRAINING_SEED").unwrap_or(7);
    let expected = undisturbed();
    let mut random = StdRng::seed_from_u64(seed);
    let (mut done, mut trainings, mut loaded) = (0, 0, 0);
    let (mut kinds, mut recovery) = (BTreeMap::<Fault, u32>::new(), Vec::new());
    while done < count {
        let faults = FAULTS.min(count - done);
        let workers = if count == DEFAULT_COUNT { 3 } else { random.random_range(2..=5) };
        let replay = format!(
            "cargo xtask chaos --training --count {count} --seed {seed}: training {trainings}, {workers} workers"
        );
        println!("{replay}, {faults} faults");
        let builder = ClusterBuilder::new(&cluster_manifest("faults", workers, "  partitions: 8\n"));
        let mut cluster = if trainings % 2 == 1 { builder.with(&["--tls"]) } else { builder }.start();
        let file = cluster.file("run.yaml", manifest("disturbed"));
        cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
        for fault in 0..faults {
            let step = random.random_range(fault * STEPS / (faults + 1)..(fault + 1) * STEPS / (faults + 1));
            let reached = |run: &Value| run["epoch"].as_u64() >= Some(step) || has_ended(run);
            wait_for(&replay, DEADLINE, || run(&cluster, "disturbed").filter(reached));
            let kind = Fault::random(&mut random);
            let kind = inject(&mut cluster, workers as usize, kind, &mut random);
            println!("  step {step}: {kind:?}");
            *kinds.entry(kind).or_default() += 1;
            loaded += checkpoints_load(&cluster.state_dir());
            let measured = run(&cluster, "disturbed").and_then(|run| run["metrics"]["recovery_seconds"].as_f64());
            recovery.extend(measured.filter(|measured| recovery.last() != Some(measured)));
        }
        let ended = wait_for(&replay, DEADLINE, || run(&cluster, "disturbed").filter(has_ended));
        assert_eq!((&ended["phase"], ended["epoch"].as_u64()), (&"Succeeded".into(), Some(STEPS)), "{replay}: {ended}");
        assert_eq!(ended["outputs"]["digest"], expected["outputs"]["digest"], "{replay}: {ended}");
        assert_eq!(ended["updates"], expected["updates"], "{replay}: a step was lost or repeated");
        cluster.stop();
        (done, trainings) = (done + faults, trainings + 1);
    }
    println!(
        "{done} faults in {trainings} trainings, {kinds:?}: every step counted once, parameters equal to the undisturbed ones, {loaded} checkpoints loaded"
    );
    print_recovery(recovery);
}
