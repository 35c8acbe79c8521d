//! `engram chaos`: fault injection on a temporary local cluster.
//!
//! The cluster is started as by `engram up`, with a proxy on every link between its processes. Load and proxies run on their own
//! threads, so that neither delays the other or the supervisor.

use crate::commands::up;
use crate::context::Context;
use crate::error::Exit;
use crate::local::Endpoints;
use crate::local::ports::Ports;
use crate::local::state::{Cluster, FORMAT, StateDir};
use crate::local::supervisor::{Plan, ProxyAddresses, Supervisor};
use crate::local::traces::TraceVariables;
use crate::output::{Output, Table, count};
use crate::progress::Progress;
use crate::route::Route;
use anyhow::Context as _;
use engram_api::{API_VERSION, DurabilityMode, ExitCode, LearnerClusterSpec};
use engram_faults::campaign::{self, CampaignTarget, Processes};
use engram_faults::health::Health;
use engram_faults::network::{Network, Node};
use engram_faults::outages::Spread;
use engram_faults::outcome::{CampaignOutcome, FaultReport};
use engram_memory::ClusterId;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Timeout for the cluster to become ready.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// Capacity of the cluster: more memories than a campaign of hours creates.
const CAPACITY: u64 = 100_000_000;
/// Threads for load and proxies.
const THREADS: usize = 2;
/// Capacity of the channel of finished faults.
const PROGRESS_CAPACITY: usize = 16;

/// Inject faults into a temporary local cluster and verify its guarantees
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram chaos                                         20 kills, 5 pauses, 5 network faults
  engram chaos --kills 300 --pauses 100 --network-faults 100 --seconds 7200 -o json > chaos.json
  engram chaos --seed 7                                repeat the faults of a seed

Starts a cluster on free ports, writes through the client library and injects one fault after another, each when the cluster has
recovered: SIGKILL of workers and coordinator, SIGSTOP, dropped, delayed and reset links, empty disks. Finally every weight and
every replica is verified. Exit code 1: a write was lost or applied twice, replicas differ, or the cluster did not recover.")]
pub(crate) struct Chaos {
    /// Number of workers
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=32))]
    workers: u32,
    /// Replicas of each partition, at most the number of workers
    #[arg(long, value_name = "N", default_value_t = REPLICAS, value_parser = clap::value_parser!(u32).range(1..=3))]
    replicas: u32,
    /// Number of partitions, each with its own client
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    partitions: u32,
    /// Durability mode of the cluster
    #[arg(long, value_name = "MODE", value_enum, default_value = "sync")]
    durability: Durability,
    /// Number of process kills
    #[arg(long, value_name = "N", default_value_t = 20)]
    kills: u32,
    /// Number of process pauses
    #[arg(long, value_name = "N", default_value_t = 5)]
    pauses: u32,
    /// Number of network faults: dropped, delayed or reset links
    #[arg(long, value_name = "N", default_value_t = 5)]
    network_faults: u32,
    /// Time limit of the campaign in seconds; it fails if faults are left
    #[arg(long, value_name = "SECONDS", default_value_t = 240, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Seed for order and targets of the faults [default: random]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Load during the campaign, as a fraction of the throughput measured before it
    #[arg(long, value_name = "FRACTION", default_value_t = 0.5, value_parser = fraction)]
    load: f64,
}

/// Default number of replicas.
const REPLICAS: u32 = 2;

/// Values of `spec.durability.mode` that guarantee acknowledged writes.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Durability {
    Sync,
    Replicated,
}

fn fraction(text: &str) -> Result<f64, String> {
    let fraction = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.01..=1.0).contains(&fraction) { Ok(fraction) } else { Err("allowed: 0.01 to 1".into()) }
}

/// The processes of the cluster, from `endpoints.json`.
struct LocalProcesses {
    folder: PathBuf,
}

impl Processes for LocalProcesses {
    fn worker(&self, ordinal: u32) -> Option<u32> {
        let endpoints = Endpoints::read(&self.folder).ok()??;
        endpoints.workers.iter().find(|worker| worker.ordinal == ordinal)?.process.map(|process| process.pid)
    }

    fn coordinator(&self) -> Option<u32> {
        Endpoints::read(&self.folder).ok()??.coordinator.process.map(|process| process.pid)
    }

    fn disk(&self, ordinal: u32) -> PathBuf {
        self.folder.join("workers").join(ordinal.to_string())
    }
}

pub(crate) async fn run(arguments: &Chaos, context: &Context) -> anyhow::Result<ExitCode> {
    let replicas = arguments.replicas.min(arguments.workers);
    let plan = campaign::Plan {
        kills: arguments.kills,
        pauses: arguments.pauses,
        cuts: arguments.network_faults,
        limit: Duration::from_secs(arguments.seconds),
        seed: arguments.seed.unwrap_or_else(|| u64::from(rand::random::<u32>())),
        share: arguments.load,
        workers: arguments.workers,
        replicas,
    };
    let (folder, temporary) = match &context.state_dir {
        Some(folder) => (folder.clone(), None),
        None => {
            let created =
                tempfile::TempDir::with_prefix("engram-chaos-").context("failed to create a temporary directory")?;
            (created.path().join("state"), Some(created))
        }
    };
    let (faults, seed) = (plan.kills + plan.pauses + plan.cuts, plan.seed);
    context.output.note(format!("{faults} faults with seed {seed}; state and logs in {}", folder.display()));
    let result = run_campaign(arguments, plan, &folder, context).await;
    let passed = result.as_ref().is_ok_and(|outcome| outcome.outcome.violations().is_empty());
    if let Some(temporary) = temporary.filter(|_| !passed) {
        let kept = temporary.keep();
        context.output.note(format!("kept state and logs of the cluster in {}", kept.display()));
    }
    let outcome = result?;
    print(&outcome, &context.output)?;
    let wrong = outcome.outcome.violations();
    for problem in &wrong {
        context.output.note(format!("failed: {problem}"));
    }
    if wrong.is_empty() { Ok(ExitCode::Ok) } else { Err(Exit(ExitCode::Failed).into()) }
}

fn spec(arguments: &Chaos, replicas: u32) -> LearnerClusterSpec {
    let mut spec = LearnerClusterSpec::with_workers(arguments.workers);
    spec.replication_factor = replicas;
    spec.partitions = arguments.partitions;
    spec.capacity.memories = CAPACITY;
    spec.durability.mode = match arguments.durability {
        Durability::Sync => DurabilityMode::Sync,
        Durability::Replicated => DurabilityMode::Replicated,
    };
    spec
}

/// Starts the cluster, runs the campaign, and stops the cluster.
async fn run_campaign(
    arguments: &Chaos,
    plan: campaign::Plan,
    folder: &std::path::Path,
    context: &Context,
) -> anyhow::Result<CampaignOutcome> {
    let mut state = StateDir::hold(folder)?;
    anyhow::ensure!(
        state.cluster()?.is_none(),
        "{} contains a cluster; chaos requires a new state directory",
        folder.display()
    );
    let spec = spec(arguments, plan.replicas);
    let cluster = ClusterId(rand::random());
    let created = Cluster {
        format_version: FORMAT,
        cluster: cluster.to_string(),
        name: "chaos".into(),
        memories: 0,
        spec: spec.clone(),
    };
    state.save(&created)?;
    let ports = Ports::choose(spec.workers, 0)?;
    let peers: Vec<_> = ports.workers.iter().map(|listen| listen.peer).collect();
    let endpoints: Vec<String> = ports.workers.iter().map(|listen| listen.client.to_string()).collect();
    let coordinator = ports.coordinator;

    let threads = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .context("failed to start threads")?;
    let network = threads.spawn(async move { Network::open(&peers, coordinator, plan.seed).await });
    let network = network.await.context("the proxies panicked")?.context("failed to start the proxies")?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut supervisor = Supervisor::start(Plan {
        cluster,
        name: created.name.clone(),
        threads: (cores / spec.workers as usize).max(1),
        allowed_folders: Vec::new(),
        spec,
        folder: state.folder().to_owned(),
        ports,
        proxies: Some(proxies(&network, plan.workers)),
        tls: None,
        route: Route::Direct,
        traces: TraceVariables::default(),
    })?;
    let processes = LocalProcesses { folder: state.folder().to_owned() };
    let endpoints_at_start = supervisor.endpoints();
    let damaged = supervisor.damaged();
    let ready = supervisor
        .while_running(async |events| {
            tokio::select! {
                ready = up::wait_until_ready(&endpoints_at_start, &damaged, context, READY_TIMEOUT) => ready,
                error = up::wait_for_failure(events, context) => Err(error),
            }
        })
        .await;
    let outcome = match ready.and_then(|()| supervisor.set_ready()) {
        Ok(()) => {
            let (sender, mut receiver) = mpsc::channel(PROGRESS_CAPACITY);
            let campaign = threads.spawn(async move {
                let health = Health::new(coordinator, plan.replicas);
                let (plan, processes, network) = (&plan, &processes, &network);
                let target =
                    CampaignTarget { plan, processes, network, health: &health, endpoints: &endpoints, id: cluster };
                // A full channel drops progress only; the outcome has every fault.
                campaign::run(target, |troubled| drop(sender.try_send((troubled.number as u64, line(troubled))))).await
            });
            supervisor
                .while_running(async |events| {
                    let all = u64::from(plan.kills + plan.pauses + plan.cuts);
                    let mut progress = Progress::new(&context.output, "faults", Some(all));
                    let mut campaign = std::pin::pin!(campaign);
                    let mut interrupted = signal(SignalKind::interrupt()).context("failed to listen for Ctrl-C")?;
                    loop {
                        tokio::select! {
                            outcome = &mut campaign => break outcome,
                            Some((done, line)) = receiver.recv() => {
                                progress.note(&context.output, &line);
                                if context.output.live {
                                    progress.set(done, "");
                                }
                            }
                            // Process exits are injected, or detected by the campaign.
                            Some(_) = events.recv() => {}
                            Some(()) = interrupted.recv() => return Err(Exit(ExitCode::Interrupted).into()),
                        }
                    }
                    .context("the campaign panicked")?
                    .map_err(anyhow::Error::from)
                })
                .await
        }
        Err(error) => Err(error),
    };
    supervisor.stop(std::future::pending()).await;
    threads.shutdown_background();
    outcome
}

fn proxies(network: &Network, workers: u32) -> ProxyAddresses {
    let address = |from, to| network.address(Node::Worker(from), to);
    let peers = |from| {
        let others = (0..workers).filter_map(|to| Some((to, address(from, Node::Worker(to))?.to_string())));
        others.collect::<BTreeMap<u32, String>>()
    };
    ProxyAddresses {
        coordinator: (0..workers).filter_map(|from| address(from, Node::Coordinator)).collect(),
        peers: (0..workers).map(peers).collect(),
    }
}

/// Describes a finished fault in one line.
fn line(troubled: &FaultReport) -> String {
    let FaultReport { number, of, kind, target, restored, outages, .. } = troubled;
    let longest = troubled.longest().as_secs_f64();
    format!(
        "{number}/{of} {kind} ({target}): recovered after {:.2} s; {} partitions unavailable for at most {longest:.2} s",
        restored.as_secs_f64(),
        outages.len()
    )
}

fn print(outcome: &CampaignOutcome, output: &Output) -> anyhow::Result<()> {
    if output.is_structured() {
        let wrong = outcome.outcome.violations();
        let mut value =
            json!({ "apiVersion": API_VERSION, "kind": "Chaos", "passed": wrong.is_empty(), "wrong": wrong });
        let fields = serde_json::to_value(outcome)?;
        value
            .as_object_mut()
            .context("the result is not an object")?
            .extend(fields.as_object().cloned().unwrap_or_default());
        return output.value(&value);
    }
    let mut faults = Table::new(&[
        "fault",
        ">count",
        ">outages",
        ">p50 s",
        ">p99 s",
        ">max s",
        ">longest p50 s",
        ">longest p99 s",
        ">recovery p50 s",
        ">recovery max s",
    ]);
    let second = |ms: f64| format!("{:.2}", ms / 1_000.0);
    for kind in outcome.outcome.by_kind() {
        let Spread { count: outages, p50_ms, p99_ms, max_ms } = kind.unavailable;
        faults.row([
            kind.kind.to_owned(),
            kind.done.to_string(),
            outages.to_string(),
            second(p50_ms),
            second(p99_ms),
            second(max_ms),
            second(kind.longest.p50_ms),
            second(kind.longest.p99_ms),
            second(kind.restored.p50_ms),
            second(kind.restored.max_ms),
        ]);
    }
    output.text(&faults.render(output))?;
    let throughput = |load: &engram_faults::outcome::Throughput| {
        let Spread { p50_ms, p99_ms, .. } = load.latency;
        format!("{} batches/s, p50 {p50_ms:.1} ms, p99 {p99_ms:.1} ms", count(load.operations_per_second as u64))
    };
    let mut text = format!(
        "\nseed {}, {} workers, {} replicas of {} partitions, {:.0} s\nfull load:      {}\nwithout faults: {}\nwith faults:    {}\n",
        outcome.outcome.seed,
        outcome.workers,
        outcome.copies,
        outcome.partitions,
        outcome.seconds,
        throughput(&outcome.clear),
        throughput(&outcome.calm),
        throughput(&outcome.troubled)
    );
    if let Some(ledger) = &outcome.outcome.ledger {
        text.push_str(&format!(
            "operations: {} acknowledged, {} not applied, {} unknown (outcome queried for {} batches)\n\
             lost: {}, applied twice: {}, applied without request: {}\n",
            count(ledger.acked),
            count(ledger.never),
            count(ledger.unknown),
            outcome.outcome_queries,
            ledger.lost,
            ledger.doubled,
            ledger.conjured
        ));
    }
    if let Some(replicas) = &outcome.outcome.replicas {
        text.push_str(&format!(
            "replicas: {} of {} digest comparisons differ, {} memories\n",
            replicas.different,
            replicas.compared,
            count(replicas.memories)
        ));
    }
    output.text(&text)?;
    Ok(())
}
