//! The operator of the images: reads its arguments, runs until it is told to stop.

#![forbid(unsafe_code)]

use anyhow::{Context as _, Result};
use clap::Parser;
use engram_operator::run::{self, Options};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Keeps what LearnerClusters ask for, and coordinates their workers.
///
/// Any number of replicas may run. One of them, chosen by a Lease, writes Kubernetes objects; all of them coordinate workers, since
/// compare-and-swap on the PartitionMap decides between them.
#[derive(Debug, Parser)]
#[command(name = "engram-operator", version, max_term_width = 100)]
struct Arguments {
    #[command(flatten)]
    options: Options,
    /// Which lines are logged: a level, or targets with levels (engram_operator=debug,info)
    #[arg(long, env = "ENGRAM_LOG", value_name = "FILTER", default_value = "info")]
    log: String,
    /// How lines are logged
    #[arg(long, env = "ENGRAM_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_new(&arguments.log).with_context(|| format!("--log {}", arguments.log))?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(std::io::stderr);
    // Telling that stderr cannot be written to would be a write to stderr, and a panic.
    let subscriber = subscriber.log_internal_errors(false);
    match arguments.log_format {
        LogFormat::Text => subscriber.init(),
        LogFormat::Json => subscriber.json().init(),
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("failed to start threads")?;
    runtime.block_on(async {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        run::run(arguments.options, async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        })
        .await
    })
}
