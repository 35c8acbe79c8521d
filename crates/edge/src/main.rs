//! `engram-edge`: a client of a federated run as one static file.
#![forbid(unsafe_code)]

use clap::Parser as _;
use engram_edge::{Edge, EdgeError};
use std::process::ExitCode;

/// Take part in a federated run with a training program
#[derive(Debug, clap::Parser)]
#[command(name = "engram-edge", version)]
struct Line {
    #[command(flatten)]
    edge: Edge,
}

fn main() -> ExitCode {
    let Line { edge } = Line::parse();
    let result = if edge.has_addresses() { take_part(&edge) } else { Err(no_address()) };
    let Err(error) = result else { return ExitCode::SUCCESS };
    eprintln!("error: {error:#}");
    let is_usage = matches!(error.downcast_ref::<EdgeError>(), Some(EdgeError::Usage(_)));
    ExitCode::from(if is_usage { 2 } else { 1 })
}

fn no_address() -> anyhow::Error {
    EdgeError::Usage("--endpoint is required: the address of a worker or an ingress".to_owned()).into()
}

fn take_part(edge: &Edge) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(engram_edge::run(edge, None))
}
