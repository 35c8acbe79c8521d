//! The pod's `preStop` hook: requests a drain over the worker's socket and waits for it.

use super::socket;
use anyhow::{Context as _, Result};
use engram_proto::v1::{DrainRequest, DrainResponse};
use std::path::Path;
use std::time::Duration;
use tokio::time::timeout;

/// Time for the response in addition to the drain itself.
const SLACK: Duration = Duration::from_secs(2);

/// Requests the worker behind the socket at `path` to transfer all its primaries within `deadline`, 1 ms to 55 s.
///
/// # Errors
/// The worker does not respond in time, or rejects the request.
pub async fn drain(path: &Path, deadline: Duration) -> Result<DrainResponse> {
    let call = async {
        let request = DrainRequest { deadline_ms: deadline.as_millis() as u64, cancel: false };
        anyhow::Ok(socket::connect(path).await?.drain(request).await?.into_inner())
    };
    let response = timeout(deadline + SLACK, call).await.context("no response in time");
    response.and_then(|response| response).with_context(|| format!("failed to drain the worker at {}", path.display()))
}
