//! The worker of the images: reads its options, runs until it is told to stop.

use anyhow::Context as _;
use clap::Parser;
use engram_worker::{Options, Worker};
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};

/// One worker of an Engram cluster.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Options as JSON: cluster, place in it, state directory, listeners, coordinators.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()))
        .with_writer(std::io::stderr)
        .init();
    let text = std::fs::read(&arguments.config)
        .with_context(|| format!("failed to read the options from {}", arguments.config.display()))?;
    let options: Options = serde_json::from_slice(&text)
        .with_context(|| format!("{} is not what a worker's options look like", arguments.config.display()))?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("failed to start threads")?;
    runtime.block_on(async {
        let worker = Worker::build(options).await?;
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        worker
            .run(async move {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
            })
            .await?;
        Ok(())
    })
}
