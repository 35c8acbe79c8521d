//! HTTP endpoints: probes and metrics.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use engram_api::metrics::negotiate;
use tokio::net::TcpListener;

use crate::kube::leader::Leadership;
use crate::telemetry::metrics::Metrics;

/// State of the endpoints.
#[derive(Clone)]
pub(crate) struct Page {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) leadership: Arc<Leadership>,
    /// Number of watched namespaces whose LearnerClusters were never listed.
    pub(crate) unlisted: Arc<AtomicUsize>,
}

/// Serves the endpoints until `stopped`.
pub(crate) async fn serve(
    listener: TcpListener,
    page: Page,
    stopped: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    // A response shows that the runtime is alive. After the first list probes depend neither on the API server nor on the Lease: a replica
    // without them still coordinates workers, and a restart would not help.
    let router = Router::new()
        .route("/startupz", get(async || "started\n"))
        .route("/livez", get(async || "works\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(page);
    axum::serve(listener, router).with_graceful_shutdown(stopped).await?;
    Ok(())
}

/// Fails until the LearnerClusters were listed: an operator without the rights or the definitions does nothing.
async fn ready(State(page): State<Page>) -> (StatusCode, &'static str) {
    match page.unlisted.load(Ordering::Relaxed) {
        0 => (StatusCode::OK, "ready\n"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "failed to list LearnerClusters so far; the log shows why\n"),
    }
}

async fn metrics(State(page): State<Page>, headers: HeaderMap) -> impl IntoResponse {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let (content_type, text) = negotiate(accept, page.metrics.page(page.leadership.is_leader()));
    ([(header::CONTENT_TYPE, content_type)], text)
}
