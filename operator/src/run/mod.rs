//! The running operator: everything that talks to an API server or to workers. It decides nothing: [`crate::plan`] does.
//!
//! ```text
//! watches ─> reconcile: observe -> validate -> plan -> steer the coordinator ─┬─> leader: apply -> status
//!                                                                             └─> others: nothing
//! beats ──> coordinators (one per cluster, on every replica) ─> PartitionMap by compare-and-swap
//! ```
//!
//! Every replica looks at every cluster and coordinates its workers; the holder of the Lease alone writes Kubernetes objects. A
//! replica that takes the Lease over so needs no time to find out how things stand.

mod apply;
mod asking;
mod cert_manager;
mod certificates;
mod coordinate;
mod epochs;
mod events;
mod given;
mod hand_over;
mod issuer;
mod kinds;
mod leader;
mod lists;
mod metrics;
mod nodes;
mod observe;
mod page;
mod reconcile;
mod runs;
mod signing;
mod statuses;
mod told;
mod traced;
mod watching;

use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use engram_coordinator::Host;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::service::Routes;

use self::certificates::Certificates;
use self::coordinate::Coordinators;
use self::epochs::Epochs;
use self::events::Events;
use self::issuer::Issuers;
use self::leader::Leadership;
use self::lists::Lists;
use self::metrics::Metrics;
use self::nodes::Nodes;
use self::signing::Signing;
use self::statuses::Statuses;
use crate::revision::Offer;

pub use crate::options::Options;

/// How long an orderly stop may take: less than a pod's usual grace of 30 s.
const STOP_DEADLINE: Duration = Duration::from_secs(10);

/// Namespace and name of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    /// Whether what is known of this cluster is kept: it is in `present`, or in another namespace than the one that was looked through, or
    /// `None` for all.
    fn stays(&self, scope: Option<&str>, present: impl Fn(&Self) -> bool) -> bool {
        scope.is_some_and(|scope| self.namespace != scope) || present(self)
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// What every look at a cluster needs.
struct Context {
    client: Client,
    offer: Offer,
    certificates: Arc<Certificates>,
    issuers: Arc<Issuers>,
    leadership: Arc<Leadership>,
    coordinators: Coordinators,
    nodes: Arc<Nodes>,
    lists: Lists,
    events: Events,
    epochs: Epochs,
    statuses: Statuses,
    metrics: Arc<Metrics>,
    /// Failures of each cluster, one after the other: the next look waits the longer.
    failures: Mutex<BTreeMap<Key, u32>>,
    /// Runs that were handed over: whose object goes is called off.
    handed: Mutex<BTreeMap<Key, Handed>>,
}

/// A run that its workers know.
#[derive(Clone, Debug)]
struct Handed {
    /// The cluster that has it.
    cluster: Key,
    /// Whether it has the turn, or was handed over to take it: not while it is suspended.
    has_turn: bool,
}

impl Context {
    fn failures(&self) -> MutexGuard<'_, BTreeMap<Key, u32>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handed(&self) -> MutexGuard<'_, BTreeMap<Key, Handed>> {
        self.handed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs an operator until `stop` completes.
///
/// # Errors
/// An address cannot be listened on, there is no way to an API server, or a part of the operator ended by itself.
pub async fn run(options: Options, stop: impl Future<Output = ()> + Send + 'static) -> Result<()> {
    let config = kube::Config::infer().await.context("failed to find out where the API server is")?;
    let client = Client::try_from(config.clone()).context("failed to make a client of the API server")?;
    let beats = bind(options.coordinator_listen).await?;
    let pages = bind(options.http_listen).await?;
    let (stopping, stopped) = watch::channel(false);

    let host = Host::default();
    let metrics = Arc::new(Metrics::new(Arc::clone(host.refusals())));
    let leadership = Arc::new(Leadership::new(&options.pod_name, options.leader_election));
    let nodes = Arc::new(Nodes::default());
    let offer = Offer {
        coordinators: options.coordinator_address.clone(),
        pull_secrets: options.worker_pull_secret.clone(),
        cuda_repository: options.worker_cuda_repository.clone().filter(|repository| !repository.is_empty()),
        ..Offer::new(&options.worker_repository, &options.worker_version)
    };
    let place = Key { namespace: options.pod_namespace.clone(), name: format!("{}-ca", options.lease_name) };
    let certificates =
        Certificates::new(client.clone(), place, options.certificate_lifetime, Arc::clone(host.refusals()));
    let certificates = Arc::new(certificates);
    let issuers = Arc::new(Issuers::default());
    let context = Arc::new(Context {
        client: client.clone(),
        offer,
        leadership: Arc::clone(&leadership),
        coordinators: Coordinators::new(client.clone(), host.clone(), Arc::clone(&certificates), Arc::clone(&issuers)),
        certificates,
        issuers: Arc::clone(&issuers),
        nodes: Arc::clone(&nodes),
        lists: Lists::default(),
        events: Events::new(client.clone(), &options.pod_name),
        epochs: Epochs::default(),
        statuses: Statuses::default(),
        metrics: Arc::clone(&metrics),
        failures: Mutex::default(),
        handed: Mutex::default(),
    });
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        beats = %options.coordinator_listen,
        http = %options.http_listen,
        worker = format!("{}:{}", options.worker_repository, options.worker_version),
        namespaces = ?options.watch_namespace,
        "operator started"
    );

    let mut parts = JoinSet::new();
    let page = page::Page { metrics: Arc::clone(&metrics), leadership: Arc::clone(&leadership) };
    parts.spawn(part("pages", page::serve(pages, page, until(stopped.clone()))));
    let signing = Signing::server(Arc::clone(&context), options.watch_namespace.is_empty());
    let serving = host.run_beside(beats, Routes::new(signing), until(stopped.clone()));
    parts.spawn(part("coordinators", async move { Ok(serving.await?) }));
    let (renewing, ended) = (Arc::clone(&context), until(stopped.clone()));
    parts.spawn(part("certificates", async move { renewing.coordinators.renew(&metrics, ended).await }));
    let (following, ended) = (Arc::clone(&context), until(stopped.clone()));
    let scopes: Vec<Option<String>> = match options.watch_namespace.as_slice() {
        [] => vec![None],
        named => named.iter().cloned().map(Some).collect(),
    };
    let looked_after = scopes.clone();
    parts.spawn(part("the authority", async move {
        let leads = || following.leadership.leads();
        following.certificates.follow(leads, || told::of(&following, &looked_after), ended).await
    }));
    let (follower, ended) = (client.clone(), until(stopped.clone()));
    parts.spawn(part("the issuer of tokens", async move { issuers.follow(follower, ended).await }));
    parts.spawn(part("nodes", nodes::follow(client.clone(), nodes, until(stopped.clone()))));
    if options.leader_election {
        let place = Key { namespace: options.pod_namespace.clone(), name: options.lease_name.clone() };
        parts.spawn(part("lease", leader::take_part(config, place, leadership, stopped.clone())));
    }
    for scope in scopes {
        let clusters = reconcile::run(Arc::clone(&context), scope.clone(), options.concurrency, stopped.clone());
        parts.spawn(part("the controller of clusters", clusters));
        let runs = runs::run(Arc::clone(&context), scope, options.concurrency, stopped.clone());
        parts.spawn(part("the controller of runs", runs));
    }

    tokio::select! {
        () = stop => tracing::info!("stopping"),
        ended = parts.join_next() => {
            // Nothing that is missing is noticed from outside: the whole process ends, and is started again.
            stopping.send_replace(true);
            return match ended {
                Some(Ok(Err(error))) => Err(error),
                Some(Err(panic)) => Err(panic).context("a part of the operator panicked"),
                Some(Ok(Ok(()))) | None => bail!("a part of the operator ended by itself"),
            };
        }
    }
    stopping.send_replace(true);
    let all = async {
        while let Some(ended) = parts.join_next().await {
            ended.context("a part of the operator panicked")??;
        }
        Ok(())
    };
    match tokio::time::timeout(STOP_DEADLINE, all).await {
        Ok(result) => result,
        Err(_) => {
            tracing::warn!("some requests were not waited for");
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
async fn until(mut stopped: watch::Receiver<bool>) {
    // A sender that is gone means the same.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}
