//! The plain HTTP page: metrics and health. It changes nothing and shows no data.

use crate::shared::Shared;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::timeout;

/// How long the store may take to tell how its copies stand.
const STORE_DEADLINE: Duration = Duration::from_secs(1);
/// A loop that has not turned for so long will not, in milliseconds: far longer than a machine under load lets anybody wait.
const STUCK_MS: u64 = 20_000;
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

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
        "Engram worker {} of cluster {} ({})\n\n/metrics   figures for Prometheus\n/startupz  200 once it has started\n\
         /livez     200 while it works\n/readyz    200 when it serves all that the partition map gives it\n",
        shared.options.ordinal, shared.options.cluster_name, shared.options.cluster
    )
}

async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    // A store that hangs is what the page is looked at for.
    let partitions = timeout(STORE_DEADLINE, crate::admin::partitions(&shared)).await;
    let partitions = partitions.ok().and_then(Result::ok).unwrap_or_default();
    ([(header::CONTENT_TYPE, METRICS_TYPE)], shared.metrics.page(&shared, &partitions))
}

/// Recovery is over when this page answers.
async fn startup() -> &'static str {
    "started\n"
}

/// Whether this process's own loops turn, whatever its peers, the map and its device do: that this page answers says it of the threads
/// of the services.
async fn live(State(shared): State<Arc<Shared>>) -> (StatusCode, String) {
    let still_ms = shared.elapsed_ms().saturating_sub(shared.turned_ms.load(Ordering::Relaxed));
    let stuck = || format!("the thread of the beats has not turned for {still_ms} ms");
    match shared.fault().or_else(|| (still_ms >= STUCK_MS).then(stuck)) {
        None => (StatusCode::OK, "works\n".into()),
        Some(fault) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{fault}\n")),
    }
}

async fn ready(State(shared): State<Arc<Shared>>) -> (StatusCode, String) {
    let wait = |reason: &str| (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n"));
    match shared.fault() {
        Some(fault) => wait(&fault),
        None if shared.is_stopping() => wait("stopping"),
        None if shared.view.borrow().map.is_none() => wait("the partition map is not known yet"),
        None if !shared.is_ready() => wait("partitions are being activated"),
        None => (StatusCode::OK, "ready\n".into()),
    }
}
