//! `engram up`: starts a local cluster and executes the runs of a manifest.

use crate::commands::data::{graph, run as runs};
use crate::commands::manifest;
use crate::context::Context;
use crate::error::{Exit, failure, problem, report};
use crate::local::certificates::{self, Certificates};
use crate::local::ports::{self, Ports};
use crate::local::state::{self, Cluster, FORMAT, StateDir};
use crate::local::supervisor::{DamagedWorkers, Event, Plan, Supervisor};
use crate::local::traces::{self, TraceVariables};
use crate::local::{Endpoints, admin, child, detach, job};
use crate::output::count;
use crate::progress::Progress;
use crate::route::{Endpoint, Route};
use crate::target::Local;
use anyhow::Context as _;
use engram_api::{Code, ExitCode, GpuMode, LearnerClusterSpec, Manifest, Problem, Requirement};
use engram_client::Client;
use engram_identity::{Keys, Role};
use engram_kernels::gpu::cuda;
use engram_memory::ClusterId;
use engram_proto::v1::{ResumeMode, RunPhase};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// Poll interval while workers start.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Start a local cluster and execute the runs of the manifest
#[derive(Debug, Clone, clap::Args)]
#[command(before_help = "Examples:
  engram up examples/cluster.yaml                     start, execute the runs, serve until Ctrl-C
  engram up examples/cluster.yaml --exit-when-done    exit with the result of the runs, for scripts
  engram up cluster.yaml -d                           run in the background; stop it with `engram down`
  engram up cluster.yaml --port-base 0                on free ports, next to another cluster
  engram up cluster.yaml --tls                        with mutual TLS on every connection
  engram up cluster.yaml --report report.html         write an HTML page with charts about the run

The first Ctrl-C stops the cluster gracefully; the next `engram up` resumes interrupted runs. A second Ctrl-C kills it.")]
pub(crate) struct Up {
    /// Manifest with one LearnerCluster and any number of LearnerRuns; `-` is stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Run in the background; return when the cluster is ready
    #[arg(short, long, conflicts_with = "exit_when_done")]
    detach: bool,
    /// With --detach: wait for the runs and exit with their result
    #[arg(long, requires = "detach")]
    wait: bool,
    /// Use of GPUs; overrides spec.gpu.mode
    #[arg(long, value_name = "WHEN")]
    gpu: Option<Gpu>,
    /// Smallest pass, in memories, that runs on a GPU; overrides spec.gpu.threshold [default: measured at start]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=1_000_000_000))]
    gpu_threshold: Option<u64>,
    /// First port of worker 0, from which all other ports are derived; 0 = free ports
    #[arg(long, value_name = "PORT", default_value_t = ports::BASE)]
    port_base: u16,
    /// Compute threads of each worker [default: cores / workers, at least 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    worker_threads: Option<u16>,
    /// Allow every client to name files in this folder in runs and snapshots; repeatable [default: only clients that can read the
    /// state directory]
    #[arg(long, value_name = "DIR")]
    allow_folder: Vec<PathBuf>,
    /// Stop when the runs are finished and exit with their result
    #[arg(long)]
    exit_when_done: bool,
    /// Stop when standard input closes, for programs that start a cluster: it then ends with them
    #[arg(long, conflicts_with = "detach")]
    stop_with_stdin: bool,
    /// Write an HTML report of the run; requires a manifest with one run
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Use mutual TLS on all connections, with certificates of a CA created for this cluster
    #[arg(long)]
    tls: bool,
    /// Lifetime of certificates, for tests of their renewal
    #[arg(long, value_name = "SECONDS", hide = true, requires = "tls", value_parser = clap::value_parser!(u32).range(6..))]
    certificate_lifetime: Option<u32>,
    /// Send traces by OTLP over gRPC to a collector or Jaeger, http://HOST:PORT [default: OTEL_EXPORTER_OTLP_ENDPOINT, or none]
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Fraction of traces that are sampled, 0 to 1 [default: OTEL_TRACES_SAMPLER, or all]
    #[arg(long, value_name = "RATIO", value_parser = traces::fraction)]
    trace_sample: Option<f64>,
    /// Timeout in seconds for the cluster to become ready
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

/// Values of `spec.gpu.mode` on the command line.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Gpu {
    Auto,
    Required,
    Disabled,
}

/// Why the cluster stops.
enum Shutdown {
    /// All runs are finished (`--exit-when-done`).
    RunsFinished(anyhow::Result<()>),
    /// A signal was received.
    Signal(anyhow::Result<()>),
}

pub(crate) async fn run(arguments: &Up, context: &Context) -> anyhow::Result<ExitCode> {
    // The background process reads the manifest again.
    let is_read_once =
        std::fs::metadata(&arguments.file).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir());
    if arguments.detach && (arguments.file == Path::new("-") || is_read_once) {
        return Err(failure(
            ExitCode::Usage,
            "--detach reads the manifest twice and cannot read it from stdin or a pipe; give a file",
        ));
    }
    let detached = arguments.detach && detach::is_child();
    // The background process leaves the working directory.
    let absolute = |path: &Path| if detached { std::path::absolute(path) } else { Ok(path.to_owned()) };
    let failed = "failed to get the current directory";
    let arguments = &Up {
        file: absolute(&arguments.file).context(failed)?,
        report: arguments.report.as_deref().map(absolute).transpose().context(failed)?,
        allow_folder: arguments
            .allow_folder
            .iter()
            .map(|path| absolute(path))
            .collect::<Result<_, _>>()
            .context(failed)?,
        ..arguments.clone()
    };
    let manifest = manifest::read(&arguments.file, Requirement::Cluster)?;
    if !detached {
        manifest::print_notes(&manifest, context);
    }
    let cluster = manifest.cluster.as_ref().context("the manifest has no LearnerCluster")?;
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
        Some(folder) => absolute(folder).context(failed)?,
        None => state::base()?.join(&cluster.metadata.name),
    };
    if detached {
        // A process keeps the file system of its working directory from being unmounted.
        std::env::set_current_dir("/").context("failed to leave the working directory")?;
    }
    if arguments.detach && !detached {
        return start_detached(arguments, context, &manifest, &folder).await;
    }

    let mut state = StateDir::hold(&folder)?;
    let created = prepare(&state, &manifest, &spec)?;
    // Workers that still have partitions are started even if the manifest asks for fewer.
    let ports = Ports::choose(created.spec.workers, arguments.port_base)?;
    state.save(&created)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (cores / spec.workers as usize).max(1);
    let cluster = created.id()?;
    let lifetime = arguments.certificate_lifetime.map(|seconds| Duration::from_secs(seconds.into()));
    let open = || Certificates::open(state.folder(), &created.name, cluster, lifetime).map(Rc::new);
    let tls = arguments.tls.then(open).transpose()?;
    let route = match &tls {
        // The supervisor acts with the coordinator's role: it reports deaths and reads status.
        Some(tls) => Route::Secured(Keys::open(tls.tls(Role::Coordinator, 0).files)?),
        None => Route::Direct,
    };
    let allowed = arguments.allow_folder.iter().map(|folder| {
        let found = folder.canonicalize();
        found.with_context(|| format!("--allow-folder is {}; allowed: an existing folder", folder.display()))
    });
    let allowed_folders = allowed.collect::<anyhow::Result<_>>()?;
    state.create_owner_key()?;
    let plan = Plan {
        cluster,
        name: created.name.clone(),
        spec,
        folder: state.folder().to_owned(),
        ports,
        threads: arguments.worker_threads.map_or(threads, usize::from),
        allowed_folders,
        proxies: None,
        tls,
        route: route.clone(),
        traces: TraceVariables { endpoint: arguments.otlp_endpoint.clone(), sample: arguments.trace_sample },
    };
    let mut signals = Signals::new(arguments.stop_with_stdin)?;
    let mut supervisor = Supervisor::start(plan)?;
    let shutdown = serve(&mut supervisor, &mut signals, arguments, context, &manifest, detached).await;
    let memories = match &shutdown {
        Ok(_) => count_memories(&supervisor.endpoints(), &route).await,
        Err(_) => None,
    };
    if !matches!(shutdown, Err(_) | Ok(Shutdown::RunsFinished(_))) {
        context.output.note("stopping; press Ctrl-C again to kill");
    }
    tokio::select! {
        () = job::stopped() => {}
        () = signals.next() => {}
    }
    supervisor.stop(signals.next()).await;
    if let Some(memories) = memories {
        let cluster = state.cluster()?.unwrap_or(created);
        state.save(&Cluster { memories, ..cluster })?;
    }
    match shutdown? {
        Shutdown::RunsFinished(result) | Shutdown::Signal(result) => result.map(|()| ExitCode::Ok),
    }
}

/// Validates the request before anything is changed.
fn check(arguments: &Up, manifest: &Manifest, spec: &LearnerClusterSpec) -> anyhow::Result<()> {
    if spec.gpu.mode == GpuMode::Required
        && let Err(reason) = cuda::probe()
    {
        let message = format!("spec.gpu.mode is Required and no GPU is usable: {reason}; nothing was started");
        return Err(Problem::new(Code::GpuRequired, message).help("run on the CPU: --gpu disabled").into());
    }
    let runs: Vec<_> = manifest.runs.iter().filter(|run| !run.spec.suspend).collect();
    if arguments.report.is_some() && runs.len() != 1 {
        let message =
            format!("--report requires a manifest with one run; {} has {}", arguments.file.display(), runs.len());
        return Err(problem(Code::Conflicting, message));
    }
    runs.into_iter().try_for_each(|run| runs::check_source(&runs::absolute(manifest, &run.spec)?))
}

/// Compares the manifest with the state directory and returns the new contents of `cluster.json`.
fn prepare(state: &StateDir, manifest: &Manifest, spec: &LearnerClusterSpec) -> anyhow::Result<Cluster> {
    let name = manifest.cluster.as_ref().map(|cluster| cluster.metadata.name.clone()).unwrap_or_default();
    let Some(old) = state.cluster()? else {
        if let Some(volume) = spec.bootstrap.as_ref().and_then(|bootstrap| bootstrap.snapshot.volume.as_ref()) {
            let message = format!(
                "spec.bootstrap.snapshot.volume is {volume}, which is supported in Kubernetes only; set url instead"
            );
            let help = "or restore it from its folder: engram snapshot restore NAME --from FOLDER --state-dir DIR";
            return Err(Problem::new(Code::NotSupported, message).help(help).into());
        }
        let cluster = ClusterId(rand::random()).to_string();
        return Ok(Cluster { format_version: FORMAT, cluster, name, memories: 0, spec: spec.clone() });
    };
    if old.name != name {
        let message =
            format!("state directory {} belongs to cluster {}, not to {name}", state.folder().display(), old.name);
        return Err(problem(Code::OtherCluster, message));
    }
    manifest.check_against(&old.spec, old.memories)?;
    let workers = spec.workers.max(old.spec.workers);
    Ok(Cluster { spec: LearnerClusterSpec { workers, ..spec.clone() }, ..old })
}

/// Waits until the cluster is ready, executes the runs, and serves until shutdown.
async fn serve(
    supervisor: &mut Supervisor,
    signals: &mut Signals,
    arguments: &Up,
    context: &Context,
    manifest: &Manifest,
    detached: bool,
) -> anyhow::Result<Shutdown> {
    let endpoints = supervisor.endpoints();
    let limit = Duration::from_secs(arguments.timeout);
    let folder = supervisor.folder().to_owned();
    let stays_up = !detached && !arguments.exit_when_done;
    let local = Local::of(folder.clone(), endpoints)?;
    let damaged = supervisor.damaged();
    let client = supervisor
        .while_running(async |events| {
            let ready = async {
                wait_for_map(&local, context, limit, stays_up).await?;
                wait_until_ready(&local.endpoints, &damaged, context, limit).await
            };
            tokio::select! {
                ready = ready => ready?,
                error = wait_for_failure(events, context) => return Err(error),
                () = signals.next() => return Err(Exit(ExitCode::Interrupted).into()),
            }
            anyhow::Ok(Client::connect(local.options()?).await?)
        })
        .await?;
    supervisor.set_ready()?;
    if detached {
        detach::leave_terminal(&folder)?;
    } else {
        print_endpoints(&supervisor.endpoints(), &folder, context);
    }
    supervisor
        .while_running(async |events| {
            let result = tokio::select! {
                result = Box::pin(execute_runs((&client, &local), manifest, arguments, context)) => result,
                error = wait_for_failure(events, context) => return Err(error),
                () = signals.next() => return Ok(Shutdown::Signal(Err(Exit(ExitCode::Interrupted).into()))),
            };
            if arguments.exit_when_done {
                return Ok(Shutdown::RunsFinished(result));
            }
            let result = match result {
                Ok(()) => Ok(()),
                // The cluster continues to serve; the exit code reports the failure.
                Err(error) => {
                    report(&error, context);
                    Err(Exit(crate::error::code(&error)).into())
                }
            };
            print_next_steps(&folder, context);
            tokio::select! {
                error = wait_for_failure(events, context) => Err(error),
                () = signals.next() => Ok(Shutdown::Signal(result)),
            }
        })
        .await
}

/// Waits for a partition map. If the map is lost, reports how to rebuild it and, with `stays_up`, waits for the rebuild, which needs
/// a running cluster. Other failures surface while waiting for the workers.
async fn wait_for_map(local: &Local, context: &Context, limit: Duration, stays_up: bool) -> anyhow::Result<()> {
    let (coordinator, cluster) = (local.coordinator(), local.cluster()?);
    let deadline = Instant::now() + limit;
    let mut is_reported = false;
    while is_reported || Instant::now() < deadline {
        // A starting coordinator does not respond yet.
        if let Ok(status) = admin::cluster(&coordinator, cluster).await {
            if !status.map_lost.is_empty() && !is_reported {
                let lost = Problem::new(Code::MapLost, status.map_lost)
                    .help(format!(
                        "rebuild the map: engram partition rebuild-map --state-dir {}",
                        local.folder.display()
                    ))
                    .help("rebuild-map needs a running cluster, in the foreground: engram up FILE");
                if !stays_up {
                    return Err(lost.into());
                }
                report(&lost.into(), context);
                context
                    .output
                    .note("waiting for rebuild-map; no partition is served until then; Ctrl-C stops the cluster");
                is_reported = true;
            } else if status.map_lost.is_empty() && status.map.is_some() {
                return Ok(());
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

/// Waits until every worker with an intact disk is ready.
pub(crate) async fn wait_until_ready(
    endpoints: &Endpoints,
    damaged: &DamagedWorkers,
    context: &Context,
    limit: Duration,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + limit;
    let workers = &endpoints.workers;
    let mut progress = Progress::new(&context.output, "starting workers", Some(workers.len() as u64));
    for (done, worker) in (0_u64..).zip(workers) {
        progress.set(done, &format!("waiting for {}", worker.name()));
        let mut last = String::new();
        while !damaged.borrow().contains(&worker.ordinal) {
            match admin::page(&worker.http.into(), "/readyz").await {
                Ok((200, _)) => break,
                Ok((_, body)) => last = body.trim().to_owned(),
                Err(_) => {}
            }
            if Instant::now() >= deadline {
                let reason = if last.is_empty() { "no response" } else { &last };
                let message = format!("{} is not ready after {} s: {reason}", worker.name(), limit.as_secs());
                return Err(Problem::new(Code::StartTimedOut, message)
                    .help("increase the timeout: --timeout SECONDS")
                    .into());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
    progress.set(workers.len() as u64, "");
    Ok(())
}

/// Prints supervisor events; completes with an error when the start fails.
pub(crate) async fn wait_for_failure(events: &mut mpsc::Receiver<Event>, context: &Context) -> anyhow::Error {
    while let Some(event) = events.recv().await {
        match event {
            Event::Restarted { name, exit } => {
                let logs = context.output.command_line(&format!("logs {name}"));
                context.output.note(format!("{name} exited ({exit}) and is restarted; see: {logs}"));
            }
            Event::Damaged { name, folder, lines } => {
                context.output.note(format!(
                    "the disk of {name} is damaged; the cluster runs without it and re-replicates its partitions to other workers; \
                     last lines of its log:\n  {lines}\nto use {name} again, with an empty disk, move its folder away: {}",
                    folder.display()
                ));
            }
            Event::Resized { workers } => context.output.note(format!("the cluster has {workers} worker(s)")),
            Event::Retrying(error) => context.output.note(format!("retrying: {error:#}")),
            Event::Failed(error) => return error,
        }
    }
    anyhow::anyhow!("the supervisor exited")
}

/// Executes the runs of the manifest in order.
async fn execute_runs(
    (client, local): (&Client, &Local),
    manifest: &Manifest,
    arguments: &Up,
    context: &Context,
) -> anyhow::Result<()> {
    if graph::is_graph(&manifest.runs) {
        // With --detach --wait the process in the foreground executes the graph.
        let is_elsewhere = arguments.wait && detach::is_child();
        return if is_elsewhere { Ok(()) } else { graph::execute(client, local, manifest, context).await };
    }
    for object in &manifest.runs {
        let name = &object.metadata.name;
        let existing = client.list_runs().await?.into_iter().find(|status| status.name == *name);
        if object.spec.suspend {
            if existing.is_some() {
                runs::suspend(client, name, true).await?;
            }
            context.output.note(format!("run {name} is suspended: spec.suspend is true"));
            continue;
        }
        if existing.is_some_and(|status| status.phase() == RunPhase::Suspended) {
            runs::suspend(client, name, false).await?;
        }
        // With --detach --wait both processes submit the run.
        let submission = runs::submit(client, manifest, object, ResumeMode::Unfinished).await?;
        submission.note_resumed(context);
        if !submission.created && !submission.resumed && !arguments.wait {
            context.output.note(match submission.status.phase() {
                RunPhase::Succeeded | RunPhase::Failed | RunPhase::Cancelled => {
                    format!("run {name} is already finished; to run it again: engram run FILE --rerun")
                }
                _ => format!("resuming run {name}"),
            });
        }
        let report = runs::follow_to_end(client, name, &context.output).await?;
        let path = arguments.report.as_ref().filter(|_| !arguments.wait || !detach::is_child());
        if let (Some(path), Some(report)) = (path, &report) {
            report.write_page(path)?;
            context.output.note(format!("wrote {}", path.display()));
        }
    }
    Ok(())
}

/// Starts this command in the background and waits until the cluster is ready.
async fn start_detached(
    arguments: &Up,
    context: &Context,
    manifest: &Manifest,
    folder: &Path,
) -> anyhow::Result<ExitCode> {
    let pid = match detach::start().await? {
        detach::Background::Ready(pid) => pid,
        detach::Background::Exited(code) => return Err(Exit(code).into()),
    };
    let Some(local) = Local::at(folder)? else {
        return Err(problem(
            Code::WorkerFailedToStart,
            format!("the cluster exited immediately; see {}/logs", folder.display()),
        ));
    };
    print_endpoints(&local.endpoints, folder, context);
    if arguments.wait {
        let client = Client::connect(local.options()?).await?;
        Box::pin(execute_runs((&client, &local), manifest, arguments, context)).await?;
    }
    context.output.note(format!("running in the background as process {pid}"));
    print_next_steps(folder, context);
    Ok(ExitCode::Ok)
}

fn print_endpoints(endpoints: &Endpoints, folder: &Path, context: &Context) {
    let mut text = format!("cluster {} is ready: {} worker(s)\n", endpoints.name, endpoints.workers.len());
    for worker in &endpoints.workers {
        let line = format!("  {:<10} gRPC {}   http://{}/metrics\n", worker.name(), worker.client, worker.http);
        text.push_str(&line);
    }
    let security = if endpoints.tls {
        let client = certificates::client(folder).certificate;
        format!("mutual TLS; client certificate: {}", client.display())
    } else {
        "plaintext on loopback; every local user can connect".to_owned()
    };
    text.push_str(&format!("  security   {security}\n  state      {}", folder.display()));
    context.output.note(text);
}

fn print_next_steps(folder: &Path, context: &Context) {
    let is_default = state::base().is_ok_and(|base| folder.parent() == Some(base.as_path()));
    let option = if is_default { String::new() } else { format!(" --state-dir {}", folder.display()) };
    context.output.note(format!(
        "next:\n  engram status{option}\n  engram rank --limit 20{option}\n  engram top{option}\n  engram down{option}"
    ));
}

/// Counts the memories of all workers, for the next start; `None` if a worker does not respond.
async fn count_memories(endpoints: &Endpoints, route: &Route) -> Option<u64> {
    let mut sum = 0;
    for worker in &endpoints.workers {
        sum += admin::status(&Endpoint::at(worker.admin, route)).await.ok()?.memories;
    }
    tracing::debug!(memories = count(sum), "counted memories before shutdown");
    Some(sum)
}

/// What requests a shutdown: SIGINT, SIGTERM, SIGHUP unless it was ignored when this process started, as under `nohup`, and, if
/// requested, the end of standard input.
struct Signals {
    received: [Option<Signal>; 3],
    stdin_closed: Option<oneshot::Receiver<()>>,
}

impl Signals {
    fn new(stops_with_stdin: bool) -> anyhow::Result<Self> {
        let listen = |kind: SignalKind| signal(kind).context("failed to listen for signals");
        let hangup = SignalKind::hangup();
        let is_ignored = detach::ignored_signals() & (1 << (hangup.as_raw_value() - 1)) != 0;
        let hangup = (!is_ignored).then(|| listen(hangup)).transpose()?;
        let received = [Some(listen(SignalKind::interrupt())?), Some(listen(SignalKind::terminate())?), hangup];
        let stdin_closed = stops_with_stdin.then(child::watch_stdin).transpose()?;
        Ok(Self { received, stdin_closed })
    }

    async fn next(&mut self) {
        let Self { received, stdin_closed } = self;
        let received = received.iter_mut().map(|signal| {
            Box::pin(async {
                match signal {
                    Some(signal) => drop(signal.recv().await),
                    None => std::future::pending().await,
                }
            })
        });
        let closed = async {
            match stdin_closed.as_mut() {
                Some(receiver) => drop(receiver.await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = futures::future::select_all(received) => {}
            // It closes once: a second request is a signal.
            () = closed => *stdin_closed = None,
        }
    }
}
