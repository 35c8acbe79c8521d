//! The pod's `preStop` hook: an order over the worker's socket, waited for.

use anyhow::{Context as _, Result};
use engram_proto::v1::admin_service_client::AdminServiceClient;
use engram_proto::v1::{DrainReply, DrainRequest};
use hyper_util::rt::TokioIo;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::transport::Endpoint;
use tower::service_fn;

/// What the answer may take beyond the drain itself.
const SLACK: Duration = Duration::from_secs(2);

/// Has the worker behind `socket` hand over all that it leads within `deadline`, 1 ms to 55 s.
///
/// # Errors
/// Nobody answers there in time, or the order is refused.
pub async fn drain(socket: &Path, deadline: Duration) -> Result<DrainReply> {
    let path = socket.to_owned();
    let connect = service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let order = async {
        // The name is of no use to a socket, and of none to whoever answers.
        let channel = Endpoint::from_static("http://worker").connect_with_connector(connect).await?;
        let request = DrainRequest { deadline_ms: deadline.as_millis() as u64, call_off: false };
        anyhow::Ok(AdminServiceClient::new(channel).drain(request).await?.into_inner())
    };
    let answer = timeout(deadline + SLACK, order).await.context("no answer in time");
    answer.and_then(|answer| answer).with_context(|| format!("the worker at {} was not drained", socket.display()))
}
