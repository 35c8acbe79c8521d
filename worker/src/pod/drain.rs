//! The pod's `preStop` hook: an order over the worker's socket, waited for.

use super::socket;
use anyhow::{Context as _, Result};
use engram_proto::v1::{DrainReply, DrainRequest};
use std::path::Path;
use std::time::Duration;
use tokio::time::timeout;

/// What the answer may take beyond the drain itself.
const SLACK: Duration = Duration::from_secs(2);

/// Has the worker behind the socket at `path` hand over all that it leads within `deadline`, 1 ms to 55 s.
///
/// # Errors
/// Nobody answers there in time, or the order is refused.
pub async fn drain(path: &Path, deadline: Duration) -> Result<DrainReply> {
    let order = async {
        let request = DrainRequest { deadline_ms: deadline.as_millis() as u64, call_off: false };
        anyhow::Ok(socket::connect(path).await?.drain(request).await?.into_inner())
    };
    let answer = timeout(deadline + SLACK, order).await.context("no answer in time");
    answer.and_then(|answer| answer).with_context(|| format!("the worker at {} was not drained", path.display()))
}
