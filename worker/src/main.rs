//! The worker of the images.
//!
//! Without a command it is the first process of a pod's container: it reads what the operator and the kubelet say, starts the worker and
//! looks after it.

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use engram_worker::{Options, TokenFiles, Worker, exit, pod};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// One worker of an Engram cluster: without a command, in a pod, told by the operator's settings.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// The settings of the cluster, as the operator mounts them
    #[arg(long, value_name = "FILE", default_value = pod::SETTINGS)]
    settings: PathBuf,
    /// The worker's disk
    #[arg(long, value_name = "FOLDER", default_value = pod::STATE)]
    state_dir: PathBuf,
    /// Whom the cluster's processes believe, as the operator mounts it
    #[arg(long, value_name = "FOLDER", default_value = pod::AUTHORITY)]
    authority: PathBuf,
    /// Where the pod keeps its key and certificate: in memory
    #[arg(long, value_name = "FOLDER", default_value = pod::IDENTITY)]
    identity: PathBuf,
    /// The token with which it asks for a certificate
    #[arg(long, value_name = "FILE", default_value = pod::IDENTITY_TOKEN)]
    identity_token: PathBuf,
}

impl Arguments {
    fn places(&self) -> pod::Places {
        let tokens = TokenFiles {
            keys: self.authority.join("jwks.json"),
            issuer: self.authority.join("issuer"),
            access: self.settings.with_file_name("access.json"),
        };
        let (authority, folder, token) = (self.authority.clone(), self.identity.clone(), self.identity_token.clone());
        pod::Places { authority, folder, token, tokens }
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serves, with no process above it
    Serve {
        /// Options as JSON: cluster, place in it, state directory, listeners, coordinators; - reads standard input
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Hands over all that the worker of this machine leads, and waits for it: what a pod does before it is stopped
    Drain {
        /// How long it may take, 1ms to 55s
        #[arg(long, value_name = "DURATION", default_value = "45s", value_parser = deadline)]
        deadline: Duration,
        /// The worker's socket
        #[arg(long, value_name = "PATH", default_value = "/var/lib/engram/admin.sock")]
        socket: PathBuf,
    },
    /// Asks a page until it answers with 200: for health checks, and for tests of an installation
    Healthcheck {
        /// The page
        #[arg(value_name = "HOST:PORT/PATH", default_value = "127.0.0.1:9090/readyz")]
        page: String,
        /// For how long it is asked again
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
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_env("ENGRAM_LOG").unwrap_or_else(|_| "info".into()))
        .with_ansi(false)
        .with_writer(std::io::stderr)
        // Telling that stderr cannot be written to would be a write to stderr, and a panic.
        .log_internal_errors(false)
        .init();
    let ended = match &arguments.command {
        None => supervise(&arguments),
        Some(Command::Serve { config }) => serve(config),
        Some(Command::Drain { deadline, socket }) => drain(socket, *deadline),
        Some(Command::Healthcheck { page, wait }) => {
            pod::healthcheck(page, Duration::from_millis(wait.as_millis())).map(|()| 0)
        }
    };
    let status = ended.unwrap_or_else(|error| {
        tracing::error!(error = format!("{error:#}"), "ended");
        if matches!(arguments.command, None | Some(Command::Serve { .. })) {
            pod::tell_kubelet(&format!("{error:#}"));
        }
        exit::status(&error)
    });
    std::process::exit(status)
}

fn supervise(arguments: &Arguments) -> Result<i32> {
    let settings = pod::Settings::read(&arguments.settings)?;
    let place = pod::Place::from_environment()?;
    let identity = settings.identity(&place, || arguments.places())?;
    let options = settings.options(place, arguments.state_dir.clone());
    // One thread: the kernel ties a child to the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("failed to start")?;
    runtime.block_on(pod::supervise(options, identity))
}

/// The status to end with.
fn serve(config: &Path) -> Result<i32> {
    let text = if config == Path::new("-") {
        // The process that writes them is the one to end with.
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
        .with_context(|| format!("{} is not what a worker's options look like", config.display()))?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("failed to start threads")?;
    runtime.block_on(async {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let stop = async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        let worker = Worker::build(options).await?;
        let handle = worker.handle();
        pod::introduce(&handle.member());
        worker.run(stop).await?;
        Ok(if handle.begins_again() { exit::AGAIN } else { 0 })
    })
}

/// 0 when nothing that could have been handed over is left.
fn drain(socket: &Path, deadline: Duration) -> Result<i32> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("failed to start")?;
    let began = Instant::now();
    let reply = runtime.block_on(pod::drain(socket, deadline))?;
    let left = reply.left.len();
    // The kubelet shows this to whoever looks at the pod's events, where the hook failed.
    if left == 0 {
        println!("handed over {} partition(s)", reply.handed_over);
        return Ok(0);
    }
    let late = began.elapsed() >= deadline;
    let why = if late { "the time is over" } else { "no other copy is in sync, or no coordinator answers" };
    println!("handed over {} partition(s); {left} stay here: {why}", reply.handed_over);
    Ok(i32::from(late))
}
