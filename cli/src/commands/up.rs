//! `engram up`: a local cluster from a manifest, and the runs of that manifest on it.

use crate::args::Context;
use crate::commands::data::run as runs;
use crate::commands::manifest;
use crate::error::{Ended, problem, report, said};
use crate::local::certificates::{self, Certificates};
use crate::local::ports::{self, Ports};
use crate::local::state::{self, Cluster, FORMAT, StateDir};
use crate::local::supervisor::{Event, Plan, Supervisor};
use crate::local::{Endpoints, admin, detach};
use crate::output::count;
use crate::progress::Progress;
use crate::route::{Door, Route};
use crate::target::Local;
use anyhow::Context as _;
use engram_api::{Code, ExitCode, GpuMode, LearnerClusterSpec, Manifest, Needs, Problem};
use engram_client::Client;
use engram_identity::{Keys, Role};
use engram_kernels::gpu::cuda;
use engram_memory::ClusterId;
use engram_proto::v1::RunPhase;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Between looks at a worker that is getting ready.
const LOOK: Duration = Duration::from_millis(50);

/// Start a local cluster and learn what the manifest says
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram up examples/cluster.yaml                     start, learn, keep serving until Ctrl-C
  engram up examples/cluster.yaml --exit-when-done    for scripts: the exit code is the result of the runs
  engram up cluster.yaml -d                           in the background; `engram down` stops it
  engram up cluster.yaml --port-base 0                on free ports, beside another cluster
  engram up cluster.yaml --tls                        with certificates on every connection
  engram up cluster.yaml --report report.html         and write a page with charts about the run

The first Ctrl-C stops the cluster in order; a run that was going on resumes at the next `up`. A second one kills it.")]
pub(crate) struct Arguments {
    /// Manifest with one LearnerCluster and any number of LearnerRuns; `-` is stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Run in the background; returns when the cluster is ready
    #[arg(short, long, conflicts_with = "exit_when_done")]
    detach: bool,
    /// With --detach: return when the runs have ended, with their result
    #[arg(long, requires = "detach")]
    wait: bool,
    /// Use a GPU: where there is one, always, never; instead of spec.gpu.mode
    #[arg(long, value_name = "WHEN")]
    gpu: Option<Gpu>,
    /// Memories of a pass from which a GPU does it; instead of spec.gpu.threshold [default: measured at start]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=1_000_000_000))]
    gpu_threshold: Option<u64>,
    /// First port of worker 0; the others follow. 0 = free ports
    #[arg(long, value_name = "PORT", default_value_t = ports::BASE)]
    port_base: u16,
    /// Threads of each worker's passes over memories [default: cores / workers, at least 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    worker_threads: Option<u16>,
    /// Stop when the runs have ended, with their result as exit code
    #[arg(long)]
    exit_when_done: bool,
    /// Write a self-contained HTML page about the run (one run in the file)
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Certificates on every connection between the processes and of commands, of an authority of this cluster's own
    #[arg(long)]
    tls: bool,
    /// How long a certificate is valid: for tests of their renewal
    #[arg(long, value_name = "SECONDS", hide = true, requires = "tls", value_parser = clap::value_parser!(u32).range(6..))]
    certificate_lifetime: Option<u32>,
    /// How long the cluster may take to get ready, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

/// The words of `spec.gpu.mode` on the command line.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Gpu {
    Auto,
    Required,
    Disabled,
}

/// How the time of serving ended.
enum End {
    /// The runs have ended, and nothing else is wanted.
    Done(anyhow::Result<()>),
    /// Somebody asked.
    Asked(anyhow::Result<()>),
}

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    if arguments.detach && arguments.file == Path::new("-") {
        return Err(said(
            ExitCode::Usage,
            "--detach reads the manifest twice, and stdin can be read once; give a file",
        ));
    }
    let manifest = manifest::read(&arguments.file, Needs::Cluster)?;
    let detached = arguments.detach && detach::is_child();
    if !detached {
        manifest::tell_notes(&manifest, context);
    }
    let cluster = manifest.cluster.as_ref().context("a manifest for `up` has a cluster")?;
    let mut spec = cluster.spec.clone();
    if let Some(gpu) = arguments.gpu {
        spec.gpu.mode = match gpu {
            Gpu::Auto => GpuMode::Auto,
            Gpu::Required => GpuMode::Required,
            Gpu::Disabled => GpuMode::Disabled,
        };
    }
    spec.gpu.threshold = arguments.gpu_threshold.or(spec.gpu.threshold);
    check(arguments, &manifest, &spec)?;
    let folder = match &context.state_dir {
        Some(folder) => folder.clone(),
        None => state::base()?.join(&cluster.metadata.name),
    };
    if arguments.detach && !detached {
        return leave(arguments, context, &manifest, &folder).await;
    }

    let mut state = StateDir::hold(&folder)?;
    let created = prepare(&state, &manifest, &spec)?;
    // Who holds something is needed for the start, whatever the manifest says by now.
    let ports = Ports::choose(created.spec.workers, arguments.port_base)?;
    state.keep(&created)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (cores / spec.workers as usize).max(1);
    let cluster = created.id()?;
    let lifetime = arguments.certificate_lifetime.map(|seconds| Duration::from_secs(seconds.into()));
    let open = || Certificates::open(state.folder(), &created.name, cluster, lifetime).map(Rc::new);
    let tls = arguments.tls.then(open).transpose()?;
    let route = match &tls {
        // This process reports deaths and asks for status: what coordinators do.
        Some(tls) => Route::Secured(Keys::open(tls.tls(Role::Coordinator, 0).files)?),
        None => Route::Direct,
    };
    let plan = Plan {
        cluster,
        name: created.name.clone(),
        spec,
        folder: state.folder().to_owned(),
        ports,
        threads: arguments.worker_threads.map_or(threads, usize::from),
        detours: None,
        tls,
        route: route.clone(),
    };
    let mut signals = Signals::new()?;
    let mut supervisor = Supervisor::start(plan)?;
    let ended = serve(&mut supervisor, &mut signals, arguments, context, &manifest, detached).await;
    let held = match &ended {
        Ok(_) => memories(&supervisor.endpoints(), &route).await,
        Err(_) => None,
    };
    if !matches!(ended, Err(_) | Ok(End::Done(_))) {
        context.output.note("stopping; Ctrl-C again kills");
    }
    supervisor.stop(signals.next()).await;
    if let Some(memories) = held {
        let known = state.cluster()?.unwrap_or(created);
        state.keep(&Cluster { memories, ..known })?;
    }
    match ended? {
        End::Done(result) | End::Asked(result) => result.map(|()| ExitCode::Ok),
    }
}

/// Checks what needs no state: a start that cannot succeed changes nothing.
fn check(arguments: &Arguments, manifest: &Manifest, spec: &LearnerClusterSpec) -> anyhow::Result<()> {
    if spec.gpu.mode == GpuMode::Required
        && let Err(why) = cuda::probe()
    {
        let message = format!("spec.gpu.mode is Required, and no GPU can be used: {why}; nothing was started");
        return Err(Problem::new(Code::GpuRequired, message).help("run on the CPU:   --gpu disabled").into());
    }
    let runs: Vec<_> = manifest.runs.iter().filter(|run| !run.spec.suspend).collect();
    if arguments.report.is_some() && runs.len() != 1 {
        let message = format!("--report is for a file with one run; {} has {}", arguments.file.display(), runs.len());
        return Err(problem(Code::Conflicting, message));
    }
    runs.into_iter().try_for_each(|run| runs::check_source(&runs::absolute(manifest, &run.spec)?))
}

/// Compares the manifest with what is in the state directory, and says what shall be there.
fn prepare(state: &StateDir, manifest: &Manifest, spec: &LearnerClusterSpec) -> anyhow::Result<Cluster> {
    let name = manifest.cluster.as_ref().map(|cluster| cluster.metadata.name.clone()).unwrap_or_default();
    let Some(old) = state.cluster()? else {
        if let Some(volume) = spec.bootstrap.as_ref().and_then(|bootstrap| bootstrap.snapshot.volume.as_ref()) {
            let message = format!(
                "spec.bootstrap.snapshot.volume is {volume}; allowed in clusters in Kubernetes only: here set url"
            );
            let help = "or bring it here from its folder: engram snapshot restore NAME --from FOLDER --state-dir DIR";
            return Err(Problem::new(Code::NotSupported, message).help(help).into());
        }
        let cluster = ClusterId(rand::random()).to_string();
        return Ok(Cluster { format_version: FORMAT, cluster, name, memories: 0, spec: spec.clone() });
    };
    if old.name != name {
        let message = format!("state directory {} is of cluster {}, not of {name}", state.folder().display(), old.name);
        return Err(problem(Code::OtherCluster, message));
    }
    manifest.check_against(&old.spec, old.memories)?;
    let workers = spec.workers.max(old.spec.workers);
    Ok(Cluster { spec: LearnerClusterSpec { workers, ..spec.clone() }, ..old })
}

/// Waits until the cluster is ready, runs what the manifest says, and serves until it is time to stop.
async fn serve(
    supervisor: &mut Supervisor,
    signals: &mut Signals,
    arguments: &Arguments,
    context: &Context,
    manifest: &Manifest,
    detached: bool,
) -> anyhow::Result<End> {
    let endpoints = supervisor.endpoints();
    let limit = Duration::from_secs(arguments.timeout);
    let folder = supervisor.folder().to_owned();
    let stays = !detached && !arguments.exit_when_done;
    let local = Local::of(folder.clone(), endpoints)?;
    let client = supervisor
        .while_running(async |events| {
            let ready = async {
                wait_for_map(&local, context, limit, stays).await?;
                ready(&local.endpoints, context, limit).await
            };
            tokio::select! {
                ready = ready => ready?,
                error = failure(events, context) => return Err(error),
                () = signals.next() => return Err(Ended(ExitCode::Interrupted).into()),
            }
            anyhow::Ok(Client::connect(local.options()?).await?)
        })
        .await?;
    supervisor.set_ready()?;
    if detached {
        detach::settle(&folder)?;
    } else {
        tell_endpoints(&supervisor.endpoints(), &folder, context);
    }
    supervisor
        .while_running(async |events| {
            let learnt = tokio::select! {
                learnt = learn(&client, manifest, arguments, context) => learnt,
                error = failure(events, context) => return Err(error),
                () = signals.next() => return Ok(End::Asked(Err(Ended(ExitCode::Interrupted).into()))),
            };
            if arguments.exit_when_done {
                return Ok(End::Done(learnt));
            }
            let told = match learnt {
                Ok(()) => Ok(()),
                // The cluster goes on serving what it has learnt so far; the end has the code of the failure.
                Err(error) => {
                    report(&error, context);
                    Err(Ended(crate::error::code(&error)).into())
                }
            };
            tell_next(&folder, context);
            tokio::select! {
                error = failure(events, context) => Err(error),
                () = signals.next() => Ok(End::Asked(told)),
            }
        })
        .await
}

/// Waits until there is a map. Of one that is lost it tells what to do: where `stays` it waits until that is done, since the order
/// needs the cluster up. What else keeps a map from being there is found by whoever waits for the workers.
async fn wait_for_map(local: &Local, context: &Context, limit: Duration, stays: bool) -> anyhow::Result<()> {
    let (coordinator, cluster) = (local.coordinator(), local.cluster()?);
    let deadline = Instant::now() + limit;
    let mut told = false;
    while told || Instant::now() < deadline {
        // A coordinator that is just starting does not answer yet.
        if let Ok(status) = admin::cluster(&coordinator, cluster).await {
            if !status.map_lost.is_empty() && !told {
                let lost = Problem::new(Code::MapLost, status.map_lost)
                    .help(format!(
                        "make it anew:       engram partition rebuild-map --state-dir {}",
                        local.folder.display()
                    ))
                    .help("that order needs the cluster up, in the foreground: engram up FILE");
                if !stays {
                    return Err(lost.into());
                }
                report(&lost.into(), context);
                context.output.note("the cluster stays up for that order and serves nothing before; Ctrl-C stops it");
                told = true;
            } else if status.map_lost.is_empty() && status.map.is_some() {
                return Ok(());
            }
        }
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
}

/// Waits for every worker's readiness.
pub(crate) async fn ready(endpoints: &Endpoints, context: &Context, limit: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + limit;
    let workers = &endpoints.workers;
    let mut progress = Progress::new(&context.output, "starting workers", Some(workers.len() as u64));
    for (done, worker) in (0_u64..).zip(workers) {
        progress.set(done, &format!("waiting for {}", worker.name()));
        let mut last = String::new();
        loop {
            match admin::page(&worker.http.into(), "/readyz").await {
                Ok((200, _)) => break,
                Ok((_, reason)) => last = reason.trim().to_owned(),
                Err(_) => {}
            }
            if Instant::now() >= deadline {
                let why = if last.is_empty() { "it does not answer yet" } else { &last };
                let message = format!("{} is not ready after {} s: {why}", worker.name(), limit.as_secs());
                return Err(Problem::new(Code::StartTimedOut, message)
                    .help("give it more time:   --timeout SECONDS")
                    .into());
            }
            tokio::time::sleep(LOOK).await;
        }
    }
    progress.set(workers.len() as u64, "");
    Ok(())
}

/// Tells of processes that are started again; completes when the start is given up.
pub(crate) async fn failure(events: &mut mpsc::Receiver<Event>, context: &Context) -> anyhow::Error {
    while let Some(event) = events.recv().await {
        match event {
            Event::Restarted { name, exit } => {
                context.output.note(format!("{name} ended ({exit}) and is started again; see: engram logs {name}"));
            }
            Event::Resized { workers } => context.output.note(format!("the cluster has {workers} worker(s) now")),
            Event::Trouble(error) => context.output.note(format!("not done yet, tried again: {error:#}")),
            Event::Failed(error) => return error,
        }
    }
    anyhow::anyhow!("the supervisor ended")
}

/// Runs what the manifest says, in its order.
async fn learn(client: &Client, manifest: &Manifest, arguments: &Arguments, context: &Context) -> anyhow::Result<()> {
    for object in &manifest.runs {
        let name = &object.metadata.name;
        let on_cluster = client.list_runs().await?.into_iter().find(|status| status.name == *name);
        if object.spec.suspend {
            if on_cluster.is_some() {
                runs::suspend(client, name, true).await?;
            }
            context.output.note(format!("run {name} is suspended: spec.suspend is true"));
            continue;
        }
        if on_cluster.is_some_and(|status| status.phase() == RunPhase::Suspended) {
            runs::suspend(client, name, false).await?;
        }
        // With --detach --wait two processes submit it, and neither of them is late.
        if !runs::submit(client, manifest, object).await? && !arguments.wait {
            let known = client.list_runs().await?;
            let phase = known.iter().find(|status| status.name == *name).map(|status| status.phase());
            context.output.note(match phase {
                Some(RunPhase::Succeeded | RunPhase::Failed | RunPhase::Cancelled) => {
                    format!("run {name} has ended already and is not run again; a new run needs a new name")
                }
                _ => format!("run {name} goes on where it was"),
            });
        }
        let learnt = runs::follow_to_end(client, name, &context.output).await?;
        let path = arguments.report.as_ref().filter(|_| !arguments.wait || !detach::is_child());
        if let (Some(path), Some(learnt)) = (path, &learnt) {
            runs::write_page(learnt, path)?;
            context.output.note(format!("wrote {}", path.display()));
        }
    }
    Ok(())
}

/// Starts a copy of this command in the background, waits until it is ready, and leaves it.
async fn leave(
    arguments: &Arguments,
    context: &Context,
    manifest: &Manifest,
    folder: &Path,
) -> anyhow::Result<ExitCode> {
    let pid = match detach::start().await? {
        detach::Started::Ready(pid) => pid,
        detach::Started::Ended(code) => return Err(Ended(code).into()),
    };
    let Some(local) = Local::at(folder)? else {
        return Err(problem(
            Code::WorkerFailedToStart,
            format!("the cluster ended at once; see {}/logs", folder.display()),
        ));
    };
    tell_endpoints(&local.endpoints, folder, context);
    if arguments.wait {
        let client = Client::connect(local.options()?).await?;
        learn(&client, manifest, arguments, context).await?;
    }
    context.output.note(format!("process {pid} serves in the background"));
    tell_next(folder, context);
    Ok(ExitCode::Ok)
}

fn tell_endpoints(endpoints: &Endpoints, folder: &Path, context: &Context) {
    let mut text = format!("cluster {} is ready: {} worker(s)\n", endpoints.name, endpoints.workers.len());
    for worker in &endpoints.workers {
        let line = format!("  {:<10} gRPC {}   http://{}/metrics\n", worker.name(), worker.client, worker.http);
        text.push_str(&line);
    }
    let security = if endpoints.tls {
        let client = certificates::client(folder).certificate;
        format!("TLS, both sides with certificates; yours: {}", client.display())
    } else {
        "loopback only, in clear: whoever runs programs on this machine may call it".to_owned()
    };
    text.push_str(&format!("  security   {security}\n  state      {}", folder.display()));
    context.output.note(text);
}

fn tell_next(folder: &Path, context: &Context) {
    let usual = state::base().is_ok_and(|base| folder.parent() == Some(base.as_path()));
    let option = if usual { String::new() } else { format!(" --state-dir {}", folder.display()) };
    context.output.note(format!(
        "next:\n  engram status{option}\n  engram rank --limit 20{option}\n  engram top{option}\n  engram down{option}"
    ));
}

/// Memories held, for the next start; `None` where a worker does not answer.
async fn memories(endpoints: &Endpoints, route: &Route) -> Option<u64> {
    let mut sum = 0;
    for worker in &endpoints.workers {
        sum += admin::status(&Door::at(worker.admin, route)).await.ok()?.memories;
    }
    tracing::debug!(memories = count(sum), "held");
    Some(sum)
}

/// The signals that ask for an end.
struct Signals([Signal; 3]);

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("failed to listen for signals");
        Ok(Self([listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?, listen(SignalKind::hangup())?]))
    }

    async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
