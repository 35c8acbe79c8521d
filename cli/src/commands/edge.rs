//! `engram edge`: a client of a federated run on a device, whose training is a program of the user.

use crate::context::Context;
use crate::error::failure;
use crate::target;
use engram_api::ExitCode;
use engram_edge::{Edge, EdgeError};

pub(crate) async fn run(arguments: &Edge, context: &Context) -> anyhow::Result<ExitCode> {
    let found = if arguments.has_addresses() { None } else { Some(target::connect(context).await?) };
    engram_edge::run(arguments, found).await.map_err(|error| match error.downcast_ref::<EdgeError>() {
        Some(EdgeError::Usage(text)) => failure(ExitCode::Usage, text.clone()),
        Some(EdgeError::Training(text)) => failure(ExitCode::Failed, text.clone()),
        None => error,
    })?;
    Ok(ExitCode::Ok)
}
