//! The running operator: all I/O with the API server and with workers. Decisions are made by [`crate::plan()`] and other pure modules.
//!
//! ```text
//! watches ─> reconcile: validate -> observe -> plan -> steer the coordinator ─┬─> leader: apply -> autoscale -> status
//!                                                                             └─> others: nothing
//! heartbeats ──> coordinators (one per cluster, on every replica) ─> PartitionMap by compare-and-swap
//! ```
//!
//! Every replica reconciles every cluster and coordinates its workers; only the leader writes Kubernetes objects, apart from the map
//! and the Secret of a new CA ([`crate::pki::certificates`]). A new leader therefore needs no warm-up.

use parking_lot::Mutex;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use engram_coordinator::Host;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::service::Routes;

use crate::cluster::coordination::coordinators::Coordinators;
use crate::cluster::observe::nodes::Nodes;
use crate::cluster::plan::revision::Offer;
use crate::kube::leader::Leadership;
use crate::kube::written_statuses::WrittenStatuses;
use crate::pki::certificates::Certificates;
use crate::pki::signing::Signing;
use crate::pki::token_issuer::Issuers;
use crate::telemetry::events::Events;
use crate::telemetry::metrics::Metrics;

use crate::cluster::autoscaling::keda;
use crate::cluster::controller;
use crate::cluster::observe::nodes;
use crate::cluster::state::ClusterStates;
use crate::context::{Context, Key};
use crate::kube::leader;
use crate::learner_run::reconcile as runs;
use crate::pki::certificate_reports;
use crate::telemetry::{page, worker_traces};

pub use crate::options::Options;

/// Deadline of a graceful shutdown: less than a pod's default grace period of 30 s.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(10);

/// Runs an operator until `stop` completes.
///
/// # Errors
/// Fails if an address cannot be bound, the API server cannot be found, or a component of the operator fails.
pub async fn run(options: Options, stop: impl Future<Output = ()> + Send + 'static) -> Result<()> {
    let config = kube::Config::infer().await.context("failed to find the API server")?;
    let client = Client::try_from(config.clone()).context("failed to create a client of the API server")?;
    let coordinator_listener = bind(options.coordinator_listen).await?;
    let http_listener = bind(options.http_listen).await?;
    let (stopping, stopped) = watch::channel(false);

    let host = Host::default();
    let metrics = Arc::new(Metrics::new(Arc::clone(host.refusals()), Arc::clone(host.refused_connections())));
    let leadership = Arc::new(Leadership::new(&options.pod_name, options.leader_election));
    let nodes = Arc::new(Nodes::default());
    let offer = Offer {
        coordinators: options.coordinator_address.clone(),
        pull_secrets: options.worker_pull_secret.clone(),
        traces: worker_traces::variables(|name| std::env::var(name).ok()),
        cuda_repository: options.worker_cuda_repository.clone().filter(|repository| !repository.is_empty()),
        ..Offer::new(&options.worker_repository, &options.worker_version)
    };
    let place = Key { namespace: options.pod_namespace.clone(), name: format!("{}-ca", options.lease_name) };
    let certificates =
        Certificates::new(client.clone(), place, options.certificate_lifetime, Arc::clone(host.refusals()));
    let certificates = Arc::new(certificates);
    let issuers = Arc::new(Issuers::default());
    let unlisted = Arc::new(AtomicUsize::new(options.watch_namespace.len().max(1)));
    let context = Arc::new(Context {
        client: client.clone(),
        offer,
        leadership: Arc::clone(&leadership),
        coordinators: Coordinators::new(client.clone(), host.clone(), Arc::clone(&certificates), Arc::clone(&issuers)),
        certificates,
        issuers: Arc::clone(&issuers),
        nodes: Arc::clone(&nodes),
        events: Events::new(client.clone(), &options.pod_name),
        clusters: ClusterStates::default(),
        written_clusters: WrittenStatuses::default(),
        written_runs: WrittenStatuses::default(),
        metrics: Arc::clone(&metrics),
        unlisted: Arc::clone(&unlisted),
        started: Instant::now(),
        handed: Mutex::default(),
        succeeded: Mutex::default(),
    });
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        coordinator = %options.coordinator_listen,
        http = %options.http_listen,
        worker = format!("{}:{}", options.worker_repository, options.worker_version),
        namespaces = ?options.watch_namespace,
        "operator started"
    );

    let mut parts = JoinSet::new();
    let page = page::Page { metrics: Arc::clone(&metrics), leadership: Arc::clone(&leadership), unlisted };
    parts.spawn(part("http server", page::serve(http_listener, page, until(stopped.clone()))));
    let signing = Signing::server(Arc::clone(&context), options.watch_namespace.is_empty());
    let routes = Routes::new(signing).add_service(keda::Scaler::server(Arc::clone(&context)));
    let serving = host.run_with(coordinator_listener, routes, until(stopped.clone()));
    parts.spawn(part("coordinator server", async move { Ok(serving.await?) }));
    let (renewing, ended) = (Arc::clone(&context), until(stopped.clone()));
    parts.spawn(part("certificate renewal", async move { renewing.coordinators.renew(&metrics, ended).await }));
    let (following, ended) = (Arc::clone(&context), until(stopped.clone()));
    let scopes: Vec<Option<String>> = match options.watch_namespace.as_slice() {
        [] => vec![None],
        named => named.iter().cloned().map(Some).collect(),
    };
    let scopes_of_reports = scopes.clone();
    parts.spawn(part("CA rotation", async move {
        let leads = || following.leadership.is_leader();
        following
            .certificates
            .follow(leads, || certificate_reports::collect(&following, &scopes_of_reports), ended)
            .await
    }));
    let (follower, ended) = (client.clone(), until(stopped.clone()));
    parts.spawn(part("token issuer", async move { issuers.follow(follower, ended).await }));
    parts.spawn(part("node watcher", nodes::follow(client.clone(), nodes, until(stopped.clone()))));
    if options.leader_election {
        let place = Key { namespace: options.pod_namespace.clone(), name: options.lease_name.clone() };
        parts.spawn(part("leader election", leader::run_election(config, place, leadership, stopped.clone())));
    }
    for scope in scopes {
        let clusters = controller::run(Arc::clone(&context), scope.clone(), options.concurrency, stopped.clone());
        parts.spawn(part("LearnerCluster controller", clusters));
        let runs = runs::run(Arc::clone(&context), scope, options.concurrency, stopped.clone());
        parts.spawn(part("LearnerRun controller", runs));
    }

    tokio::select! {
        () = stop => tracing::info!("stopping"),
        ended = parts.join_next() => {
            // A missing component would go unnoticed: exit, so that the kubelet restarts the process.
            stopping.send_replace(true);
            return match ended {
                Some(Ok(Err(error))) => Err(error),
                Some(Err(panic)) => Err(panic).context("a component of the operator panicked"),
                Some(Ok(Ok(()))) | None => bail!("a component of the operator ended unexpectedly"),
            };
        }
    }
    stopping.send_replace(true);
    let all = async {
        while let Some(ended) = parts.join_next().await {
            ended.context("a component of the operator panicked")??;
        }
        Ok(())
    };
    match tokio::time::timeout(SHUTDOWN_DEADLINE, all).await {
        Ok(result) => result,
        Err(_) => {
            tracing::warn!("shutdown deadline exceeded; requests in flight were dropped");
            Ok(())
        }
    }
}

async fn part(name: &'static str, work: impl Future<Output = Result<()>>) -> Result<()> {
    work.await.with_context(|| format!("{name} failed"))
}

async fn bind(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("failed to listen on {address}"))
}

/// Completes when the operator stops.
pub(crate) async fn until(mut stopped: watch::Receiver<bool>) {
    // A dropped sender means the same.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}
