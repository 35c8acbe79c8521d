//! `engram chaos`: a local cluster of its own, troubled for a bounded time, and what that cost.
//!
//! The cluster is that of `engram up`, with a proxy on every link between its processes. Load and proxies run on threads of their
//! own, so that neither waits for the other nor for the supervisor.

use crate::args::Context;
use crate::commands::up;
use crate::error::Ended;
use crate::local::Endpoints;
use crate::local::ports::Ports;
use crate::local::state::{Cluster, FORMAT, StateDir};
use crate::local::supervisor::{Detours, Plan, Supervisor};
use crate::output::{Output, Table, count};
use crate::progress::Progress;
use crate::route::Route;
use anyhow::Context as _;
use engram_api::{API_VERSION, DurabilityMode, ExitCode, LearnerClusterSpec};
use engram_faults::campaign::{self, Field, Processes};
use engram_faults::health::Health;
use engram_faults::network::{Network, Node};
use engram_faults::outages::Spread;
use engram_faults::outcome::{Outcome, Troubled};
use engram_memory::ClusterId;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// How long the cluster may take to get ready.
const READY: Duration = Duration::from_secs(120);
/// Memories that it may hold: more than a campaign of hours makes.
const CAPACITY: u64 = 100_000_000;
/// Threads of load and proxies.
const THREADS: usize = 2;
/// Faults that may wait to be told.
const TOLD: usize = 16;

/// Trouble a local cluster of its own and check that nothing acknowledged is lost or applied twice
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram chaos                                         20 kills, 5 pauses, 5 cuts
  engram chaos --kills 300 --pauses 100 --cuts 100 --seconds 7200 -o json > chaos.json
  engram chaos --seed 7                                the same faults in the same order

It starts a cluster on free ports, writes to it through the client library, and does one fault after another, each when the
cluster is whole again: kill -9 of workers and coordinator, stopped processes, cut, slow and reset links, empty disks. In the end
every weight and every copy is checked. Exit code 1: something was lost, applied twice, different, or did not heal.")]
pub(crate) struct Arguments {
    /// Workers of the cluster
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=32))]
    workers: u32,
    /// Copies of each partition, at most as many as workers
    #[arg(long, value_name = "N", default_value_t = COPIES, value_parser = clap::value_parser!(u32).range(1..=3))]
    copies: u32,
    /// Partitions; each has a client of its own
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    partitions: u32,
    /// When a write counts as done
    #[arg(long, value_name = "MODE", value_enum, default_value = "sync")]
    durability: Durability,
    /// Kills of processes
    #[arg(long, value_name = "N", default_value_t = 20)]
    kills: u32,
    /// Stops of processes that go on afterwards
    #[arg(long, value_name = "N", default_value_t = 5)]
    pauses: u32,
    /// Cuts, delays and resets of links
    #[arg(long, value_name = "N", default_value_t = 5)]
    cuts: u32,
    /// How long the faults may take all together; the campaign fails when some are left then
    #[arg(long, value_name = "SECONDS", default_value_t = 240, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Decides order and victims [default: random, and printed]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Load during the campaign, as a share of the throughput measured without faults just before
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, value_parser = share)]
    load: f64,
}

/// Copies that this version keeps unless told otherwise.
const COPIES: u32 = 2;

/// The words of `spec.durability.mode` on the command line that make a promise about what was acknowledged.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Durability {
    Sync,
    Replicated,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().map_err(|_| "it is no number".to_owned())?;
    if (0.01..=1.0).contains(&share) { Ok(share) } else { Err("allowed: 0.01 to 1".into()) }
}

/// The processes of the cluster as it writes them down.
struct Local {
    folder: PathBuf,
}

impl Processes for Local {
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

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let copies = arguments.copies.min(arguments.workers);
    let plan = campaign::Plan {
        kills: arguments.kills,
        pauses: arguments.pauses,
        cuts: arguments.cuts,
        limit: Duration::from_secs(arguments.seconds),
        seed: arguments.seed.unwrap_or_else(|| u64::from(rand::random::<u32>())),
        share: arguments.load,
        workers: arguments.workers,
        copies,
    };
    let (folder, temporary) = match &context.state_dir {
        Some(folder) => (folder.clone(), None),
        None => {
            let made = tempfile::TempDir::with_prefix("engram-chaos-").context("failed to make a temporary folder")?;
            (made.path().join("state"), Some(made))
        }
    };
    let (faults, seed) = (plan.kills + plan.pauses + plan.cuts, plan.seed);
    context.output.note(format!("{faults} faults with seed {seed}; state and logs in {}", folder.display()));
    let ran = troubled(arguments, plan, &folder, context).await;
    let good = ran.as_ref().is_ok_and(|outcome| outcome.wrong().is_empty());
    if let Some(temporary) = temporary.filter(|_| !good) {
        let kept = temporary.keep();
        context.output.note(format!("what is left of the cluster stays in {}", kept.display()));
    }
    let outcome = ran?;
    tell(&outcome, &context.output)?;
    let wrong = outcome.wrong();
    for problem in &wrong {
        context.output.note(format!("failed: {problem}"));
    }
    if wrong.is_empty() { Ok(ExitCode::Ok) } else { Err(Ended(ExitCode::Failed).into()) }
}

fn spec(arguments: &Arguments, copies: u32) -> LearnerClusterSpec {
    let mut spec = LearnerClusterSpec::with_workers(arguments.workers);
    spec.replication_factor = copies;
    spec.partitions = arguments.partitions;
    spec.capacity.memories = CAPACITY;
    spec.durability.mode = match arguments.durability {
        Durability::Sync => DurabilityMode::Sync,
        Durability::Replicated => DurabilityMode::Replicated,
    };
    spec
}

/// Starts the cluster, runs the campaign, and stops the cluster.
async fn troubled(
    arguments: &Arguments,
    plan: campaign::Plan,
    folder: &std::path::Path,
    context: &Context,
) -> anyhow::Result<Outcome> {
    let mut state = StateDir::hold(folder)?;
    anyhow::ensure!(state.cluster()?.is_none(), "{} holds a cluster; chaos wants a new folder", folder.display());
    let spec = spec(arguments, plan.copies);
    let cluster = ClusterId(rand::random());
    let created = Cluster {
        format_version: FORMAT,
        cluster: cluster.to_string(),
        name: "chaos".into(),
        memories: 0,
        spec: spec.clone(),
    };
    state.keep(&created)?;
    let ports = Ports::choose(spec.workers, 0)?;
    let peers: Vec<_> = ports.workers.iter().map(|listen| listen.peer).collect();
    let endpoints: Vec<String> = ports.workers.iter().map(|listen| listen.client.to_string()).collect();
    let coordinator = ports.coordinator;

    let threads = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .context("failed to start threads")?;
    let opened = threads.spawn(async move { Network::open(&peers, coordinator, plan.seed).await });
    let network = opened.await.context("the proxies panicked")?.context("failed to open a proxy")?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut supervisor = Supervisor::start(Plan {
        cluster,
        name: created.name.clone(),
        threads: (cores / spec.workers as usize).max(1),
        spec,
        folder: state.folder().to_owned(),
        ports,
        detours: Some(detours(&network, plan.workers)),
        tls: None,
        route: Route::Direct,
    })?;
    let processes = Local { folder: state.folder().to_owned() };
    let known = supervisor.endpoints();
    let readied = supervisor
        .while_running(async |events| {
            tokio::select! {
                ready = up::ready(&known, context, READY) => ready,
                error = up::failure(events, context) => Err(error),
            }
        })
        .await;
    let outcome = match readied.and_then(|()| supervisor.set_ready()) {
        Ok(()) => {
            let (told, mut heard) = mpsc::channel(TOLD);
            let campaign = threads.spawn(async move {
                let health = Health::new(coordinator, plan.copies);
                let (plan, processes, network) = (&plan, &processes, &network);
                let field = Field { plan, processes, network, health: &health, endpoints: &endpoints, cluster };
                // One that is not told for want of room is in the outcome all the same.
                campaign::run(field, |troubled| drop(told.try_send((troubled.number as u64, line(troubled))))).await
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
                            Some((done, line)) = heard.recv() => {
                                progress.note(&context.output, &line);
                                if context.output.live {
                                    progress.set(done, "");
                                }
                            }
                            // The end of a process is one that was asked for, or the campaign finds out.
                            Some(_) = events.recv() => {}
                            Some(()) = interrupted.recv() => return Err(Ended(ExitCode::Interrupted).into()),
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

fn detours(network: &Network, workers: u32) -> Detours {
    let address = |from, to| network.address(Node::Worker(from), to);
    let peers = |from| {
        let others = (0..workers).filter_map(|to| Some((to, address(from, Node::Worker(to))?.to_string())));
        others.collect::<BTreeMap<u32, String>>()
    };
    Detours {
        coordinator: (0..workers).filter_map(|from| address(from, Node::Coordinator)).collect(),
        peers: (0..workers).map(peers).collect(),
    }
}

/// A fault that is over, in a line.
fn line(troubled: &Troubled) -> String {
    let Troubled { number, of, kind, whom, restored, outages } = troubled;
    let longest = outages.iter().max().copied().unwrap_or_default().as_secs_f64();
    format!(
        "{number}/{of} {kind} ({whom}): whole after {:.2} s; {} partitions waited, {longest:.2} s at most",
        restored.as_secs_f64(),
        outages.len()
    )
}

fn tell(outcome: &Outcome, output: &Output) -> anyhow::Result<()> {
    if output.is_structured() {
        let wrong = outcome.wrong();
        let mut value =
            json!({ "apiVersion": API_VERSION, "kind": "Chaos", "passed": wrong.is_empty(), "wrong": wrong });
        let fields = serde_json::to_value(outcome)?;
        value.as_object_mut().context("it is an object")?.extend(fields.as_object().cloned().unwrap_or_default());
        return output.value(&value);
    }
    let mut faults = Table::new(&[
        "fault",
        ">done",
        ">waits",
        ">p50 s",
        ">p99 s",
        ">max s",
        ">longest p50 s",
        ">longest p99 s",
        ">whole p50 s",
        ">whole max s",
    ]);
    let second = |ms: f64| format!("{:.2}", ms / 1_000.0);
    for kind in &outcome.faults {
        let Spread { count: waits, p50_ms, p99_ms, max_ms } = kind.unavailable;
        faults.row([
            kind.kind.to_owned(),
            kind.done.to_string(),
            waits.to_string(),
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
        "\nseed {}, {} workers, {} copies of {} partitions, {:.0} s\nat full load:   {}\nwithout faults: {}\nwith them:      {}\n",
        outcome.seed,
        outcome.workers,
        outcome.copies,
        outcome.partitions,
        outcome.seconds,
        throughput(&outcome.clear),
        throughput(&outcome.calm),
        throughput(&outcome.troubled)
    );
    if let Some(ledger) = &outcome.ledger {
        text.push_str(&format!(
            "operations: {} acknowledged, {} never, {} unknown (the fate of {} batches was asked for)\n\
             lost: {}, applied twice: {}, applied unasked: {}\n",
            count(ledger.acked),
            count(ledger.never),
            count(ledger.unknown),
            outcome.asked_for_fate,
            ledger.lost,
            ledger.doubled,
            ledger.conjured
        ));
    }
    if let Some(replicas) = &outcome.replicas {
        text.push_str(&format!(
            "copies: {} of {} looks at the digest differ, {} memories\n",
            replicas.different,
            replicas.compared,
            count(replicas.memories)
        ));
    }
    output.text(&text)?;
    Ok(())
}
