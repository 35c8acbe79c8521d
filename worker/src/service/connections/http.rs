//! HTTP listener for metrics and health. It changes nothing and exposes no data.

use crate::buffers::Buffers;
use crate::shared::Shared;
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use engram_api::metrics::negotiate;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Deadline of the store for the status of its replicas.
const STORE_DEADLINE: Duration = Duration::from_secs(1);
/// A heartbeat thread without progress for this long counts as stuck, in milliseconds: far longer than any delay on a busy machine.
const STUCK_MS: u64 = 20_000;

pub(crate) fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/", get(index))
        .route("/metrics", get(metrics))
        .route("/startupz", get(startup))
        .route("/livez", get(live))
        .route("/readyz", get(ready))
        .with_state(shared)
}

async fn index(State(shared): State<Arc<Shared>>) -> String {
    format!(
        "Engram worker {} of cluster {} ({})\n\n/metrics   metrics for Prometheus\n/startupz  200 once it has started\n\
         /livez     200 while it is alive\n/readyz    200 when it serves all partitions assigned to it\n",
        shared.setup.options.ordinal, shared.setup.options.cluster_name, shared.setup.options.cluster
    )
}

async fn metrics(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> impl IntoResponse {
    // Metrics are needed above all when the store is stuck.
    let partitions = timeout(STORE_DEADLINE, crate::service::admin::partitions(&shared)).await;
    let partitions = partitions.ok().and_then(Result::ok).unwrap_or_default();
    // Of a stuck store the last values remain.
    let _ = timeout(STORE_DEADLINE, Buffers::update_metrics(&shared)).await;
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let (content_type, text) = negotiate(accept, shared.metrics.page(&shared, &partitions));
    ([(header::CONTENT_TYPE, content_type)], text)
}

/// The listener is bound after recovery, so a response means that the worker has started.
async fn startup() -> &'static str {
    "started\n"
}

/// Checks that the loops of this process make progress, regardless of peers, map and device. The response itself shows that the
/// service threads do.
async fn live(State(shared): State<Arc<Shared>>) -> (StatusCode, String) {
    let stalled_ms = shared.lifecycle.heartbeat_stalled_ms();
    let stuck = || format!("the heartbeat thread has made no progress for {stalled_ms} ms");
    match shared.fault().or_else(|| (stalled_ms >= STUCK_MS).then(stuck)) {
        None => (StatusCode::OK, "alive\n".into()),
        Some(fault) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{fault}\n")),
    }
}

async fn ready(State(shared): State<Arc<Shared>>) -> (StatusCode, String) {
    let wait = |reason: &str| (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n"));
    match shared.fault() {
        Some(fault) => wait(&fault),
        None if shared.lifecycle.is_stopping() => wait("stopping"),
        None if shared.membership.view().map.is_none() => wait("the partition map is not known yet"),
        None if !shared.is_ready() => wait("partitions are being activated"),
        None => (StatusCode::OK, "ready\n".into()),
    }
}
