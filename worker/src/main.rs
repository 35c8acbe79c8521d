//! Worker program of the container images.
//!
//! Without a command it is the first process of a pod's container: it reads the settings of the operator and the kubelet, and
//! starts and supervises the worker.

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use engram_telemetry::{Log, LogFormat, Program, Spans};
use engram_worker::{Options, TokenFiles, Worker, exit, pod};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tikv_jemallocator::Jemalloc;
use tokio::signal::unix::{SignalKind, signal};

/// Returns freed memory to the system within seconds: docs/decisions/0011-allocator.md.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// One worker of an Engram cluster. Without a command it runs in a pod, with the settings of the operator
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Settings of the cluster, as mounted by the operator
    #[arg(long, value_name = "FILE", default_value = pod::SETTINGS)]
    settings: PathBuf,
    /// State directory of the worker
    #[arg(long, value_name = "FOLDER", default_value = pod::STATE)]
    state_dir: PathBuf,
    /// Directory with the cluster's trust bundle, as mounted by the operator
    #[arg(long, value_name = "FOLDER", default_value = pod::TRUST_BUNDLE)]
    trust_bundle: PathBuf,
    /// In-memory directory for the pod's key and certificate
    #[arg(long, value_name = "FOLDER", default_value = pod::IDENTITY)]
    identity: PathBuf,
    /// Token for certificate requests
    #[arg(long, value_name = "FILE", default_value = pod::IDENTITY_TOKEN)]
    identity_token: PathBuf,
}

impl Arguments {
    fn identity_paths(&self) -> pod::IdentityPaths {
        let tokens = TokenFiles {
            keys: self.trust_bundle.join("jwks.json"),
            issuer: self.trust_bundle.join("issuer"),
            access: self.settings.with_file_name("access.json"),
        };
        let (ca, folder, token) = (self.trust_bundle.clone(), self.identity.clone(), self.identity_token.clone());
        pod::IdentityPaths { ca, folder, token, tokens }
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the worker without a supervisor
    Serve {
        /// Options as JSON: cluster, ordinal, state directory, listeners, coordinators; - reads standard input
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Transfer all primaries of the worker of this machine to other workers and wait: run before a pod is stopped
    Drain {
        /// Maximum duration, 1ms to 55s
        #[arg(long, value_name = "DURATION", default_value = "45s", value_parser = deadline)]
        deadline: Duration,
        /// Admin socket of the worker
        #[arg(long, value_name = "PATH", default_value = "/var/lib/engram/admin.sock")]
        socket: PathBuf,
    },
    /// Request a page until it responds with 200: for health checks and installation tests
    Healthcheck {
        /// The page
        #[arg(value_name = "HOST:PORT/PATH", default_value = "127.0.0.1:9090/readyz")]
        page: String,
        /// How long to retry
        #[arg(long, value_name = "DURATION", default_value = "0s")]
        wait: engram_api::Duration,
    },
}

fn deadline(text: &str) -> Result<Duration, String> {
    let duration: engram_api::Duration = text.parse()?;
    let duration = Duration::from_millis(duration.as_millis());
    let allowed = Duration::from_millis(1)..=Duration::from_secs(55);
    if allowed.contains(&duration) { Ok(duration) } else { Err(format!("{text} is not allowed; allowed: 1ms to 55s")) }
}

fn main() {
    let arguments = Arguments::parse();
    // A worker that serves sends traces as well, on its own threads.
    if !matches!(arguments.command, Some(Command::Serve { .. })) {
        log_lines();
    }
    let result = match &arguments.command {
        None => supervise(&arguments),
        Some(Command::Serve { config }) => serve(config),
        Some(Command::Drain { deadline, socket }) => drain(socket, *deadline),
        Some(Command::Healthcheck { page, wait }) => {
            pod::healthcheck(page, Duration::from_millis(wait.as_millis())).map(|()| 0)
        }
    };
    let status = result.unwrap_or_else(|error| {
        if !tracing::dispatcher::has_been_set() {
            log_lines();
        }
        tracing::error!(error = format!("{error:#}"), "failed");
        if matches!(arguments.command, None | Some(Command::Serve { .. })) {
            pod::write_termination_message(&format!("{error:#}"));
        }
        exit::status(&error)
    });
    std::process::exit(status)
}

fn log_lines() {
    tracing_subscriber::fmt()
        .with_env_filter(engram_telemetry::environment_filter())
        .with_ansi(false)
        .with_writer(std::io::stderr)
        // Reporting a failed write to stderr would write to stderr, and panic.
        .log_internal_errors(false)
        .init();
}

fn supervise(arguments: &Arguments) -> Result<i32> {
    let settings = pod::Settings::read(&arguments.settings)?;
    let info = pod::PodInfo::from_environment()?;
    let identity = settings.identity(&info, || arguments.identity_paths())?;
    let options = settings.options(info, arguments.state_dir.clone());
    // One thread: the kernel ties a child to the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("failed to start")?;
    runtime.block_on(pod::supervise(options, identity))
}

/// Returns the exit status.
fn serve(config: &Path) -> Result<i32> {
    engram_worker::count_panics();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("failed to start threads")?;
    let telemetry = {
        let _entered = runtime.enter();
        let program = Program { name: "engram-worker", version: env!("CARGO_PKG_VERSION"), spans: Spans::Sampled };
        let filter = engram_telemetry::environment_filter();
        engram_telemetry::start(program, Log { filter: &filter, format: LogFormat::Text })?
    };
    let text = if config == Path::new("-") {
        // The parent writes the options; this process ends with it.
        #[cfg(target_os = "linux")]
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)
            .context("failed to tie this process to its parent")?;
        let mut text = Vec::new();
        std::io::stdin().read_to_end(&mut text).context("failed to read the options from standard input")?;
        text
    } else {
        std::fs::read(config).with_context(|| format!("failed to read the options from {}", config.display()))?
    };
    let options: Options = serde_json::from_slice(&text)
        .with_context(|| format!("{} does not contain valid worker options", config.display()))?;
    let result = runtime.block_on(async {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let stop = async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        let worker = Worker::build(options).await?;
        let handle = worker.handle();
        pod::announce(&handle.member());
        worker.run(stop).await?;
        Ok(if handle.restart_requested() { exit::RESTART } else { 0 })
    });
    // Sends the last spans while the runtime still carries the connection.
    drop(telemetry);
    result
}

/// Returns 0 if no partition is left that could have been transferred.
fn drain(socket: &Path, deadline: Duration) -> Result<i32> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("failed to start")?;
    let started = Instant::now();
    let reply = runtime.block_on(pod::drain(socket, deadline))?;
    let remaining = reply.remaining.len();
    // The kubelet shows the output in the pod's events if the hook failed.
    if remaining == 0 {
        println!("transferred {} partition(s)", reply.transferred);
        return Ok(0);
    }
    let timed_out = started.elapsed() >= deadline;
    let reason =
        if timed_out { "the deadline passed" } else { "no other replica is in sync, or no coordinator responds" };
    println!("transferred {} partition(s); {remaining} remain: {reason}", reply.transferred);
    Ok(i32::from(timed_out))
}
