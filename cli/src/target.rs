//! The cluster that a command is for, and the connection to it: in Kubernetes, at addresses, or a running local cluster.

use crate::context::{Context, Credentials};
use crate::error::{failure, problem};
use crate::kubernetes;
use crate::local::{Endpoints, certificates, state};
use crate::route::{Endpoint, Route};
use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use engram_client::{Client, Options, OwnerKey};
use engram_identity::Keys;
use engram_memory::ClusterId;
use futures::FutureExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Connect deadline: a live worker answers at once, and the user is waiting.
const CONNECT: Duration = Duration::from_secs(5);
/// Connect deadline through an API server, which may be remote and involves a kubelet.
const CONNECT_FORWARDED: Duration = Duration::from_secs(20);

/// The cluster that a command is for.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    /// Addresses given by the user, and the route to them.
    Remote(Vec<String>, Route),
    /// A running local cluster.
    Local(Local),
    /// A cluster in Kubernetes.
    Kubernetes(Box<kubernetes::Cluster>),
}

/// Processes of a running local cluster: enough to stop it, whatever its certificates are.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    /// State directory.
    pub(crate) folder: PathBuf,
    /// Contents of `endpoints.json`.
    pub(crate) endpoints: Endpoints,
}

/// A running local cluster, and the route to it.
#[derive(Debug, Clone)]
pub(crate) struct Local {
    /// State directory.
    pub(crate) folder: PathBuf,
    /// Contents of `endpoints.json`.
    pub(crate) endpoints: Endpoints,
    /// Route to the endpoints.
    pub(crate) route: Route,
}

/// What another process needs to reach the workers of a cluster.
pub(crate) struct Access {
    /// Id of the cluster.
    pub(crate) cluster: ClusterId,
    /// Client addresses of its workers.
    pub(crate) endpoints: Vec<String>,
    /// CA certificates in PEM; absent without TLS.
    pub(crate) ca: Option<String>,
}

impl Target {
    /// Finds the cluster: in Kubernetes if a Kubernetes option is set or the executable is `kubectl-engram`, else by `--address`,
    /// `--state-dir`, `--cluster`, else the only running local cluster. Environment variables (`ENGRAM_ADDRESS`,
    /// `ENGRAM_STATE_DIR`, `ENGRAM_CLUSTER`) replace absent flags.
    ///
    /// # Errors
    /// No cluster runs (ENG-0408), or several run and none is named. In Kubernetes: as [`kubernetes::Cluster::find`].
    pub(crate) async fn find(context: &Context) -> anyhow::Result<Self> {
        if let Some(options) = &context.kubernetes {
            let (name, token) = (context.cluster.as_deref(), context.token_file.as_deref());
            let cluster = kubernetes::Cluster::find(options, name, token).await?;
            return Ok(Self::Kubernetes(Box::new(cluster)));
        }
        // Options of the command line are consistent.
        let selections = [
            ("ENGRAM_ADDRESS", !context.address.is_empty()),
            ("ENGRAM_STATE_DIR", context.state_dir.is_some()),
            ("ENGRAM_CLUSTER", context.cluster.is_some()),
        ];
        let set: Vec<&str> = selections.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| *name).collect();
        if set.len() > 1 {
            let message = format!("{} all select a cluster; unset all but one of them", set.join(" and "));
            return Err(failure(ExitCode::Usage, message));
        }
        if context.credentials.is_some() && context.address.is_empty() {
            let message = "--certificate-authority, --client-certificate and --token-file require --address; for a local cluster certificates are found automatically";
            return Err(failure(ExitCode::Usage, message));
        }
        if !context.address.is_empty() {
            let route = match &context.credentials {
                Some(Credentials::Certificate(files)) => Route::Secured(Keys::open(files.clone())?),
                Some(Credentials::Token { ca_file, token }) => Route::with_token(ca_file, token)?,
                Some(Credentials::Missing) => {
                    let message =
                        "--certificate-authority requires client credentials; add --client-certificate or --token-file";
                    return Err(failure(ExitCode::Usage, message));
                }
                None => Route::Direct,
            };
            for address in &context.address {
                check_address(address)?;
            }
            return Ok(Self::Remote(context.address.clone(), route));
        }
        Local::find(context).map(Self::Local)
    }

    /// Connects to the cluster.
    ///
    /// # Errors
    /// No worker answers, or another cluster does.
    pub(crate) async fn connect(&self) -> anyhow::Result<Client> {
        let (options, deadline) = match self {
            Self::Remote(addresses, route) => {
                let options = Options::new(addresses.iter().cloned());
                (Options { network: route.network(), ..options }, CONNECT)
            }
            Self::Local(local) => (local.options()?, CONNECT),
            Self::Kubernetes(cluster) => {
                let options = Options::new(cluster.endpoints()?).with_cluster(cluster.id()?);
                let network = self.route().network();
                // Fails early if the caller has no permission: the client library would retry until its deadline.
                cluster.check_access().await?;
                (Options { network, connect_deadline: CONNECT, ..options }, CONNECT_FORWARDED)
            }
        };
        let endpoints = options.endpoints.join(", ");
        let connecting = Client::connect(options).boxed();
        let connected = tokio::time::timeout(deadline, connecting).await.unwrap_or_else(|_| {
            let last = format!("no answer within {} s", deadline.as_secs());
            Err(engram_client::Error::Connect { endpoints, last })
        });
        connected.map_err(|error| self.route().explain(error.into()))
    }

    /// Returns the route to the cluster.
    pub(crate) fn route(&self) -> Route {
        match self {
            Self::Remote(_, route) => route.clone(),
            Self::Local(local) => local.route.clone(),
            Self::Kubernetes(cluster) => cluster.route().clone(),
        }
    }

    /// Returns what another process needs to reach the workers through [`Route::open`].
    ///
    /// # Errors
    /// No worker is ready or reachable. A local cluster with TLS and `--address` are not supported: they are reachable without this.
    pub(crate) async fn access(&self) -> anyhow::Result<Access> {
        match self {
            Self::Kubernetes(cluster) => {
                cluster.check_access().await?;
                let (endpoints, ca) = (cluster.endpoints()?, cluster.ca().map(str::to_owned));
                Ok(Access { cluster: cluster.id()?, endpoints, ca })
            }
            Self::Local(local) if matches!(local.route, Route::Direct) => {
                let endpoints = local.endpoints.workers.iter().map(|worker| worker.client.to_string()).collect();
                Ok(Access { cluster: local.cluster()?, endpoints, ca: None })
            }
            _ => Err(failure(
                ExitCode::Usage,
                "this command is for clusters in Kubernetes and local clusters without TLS",
            )),
        }
    }

    /// Returns the coordinator's endpoint and the cluster id.
    ///
    /// # Errors
    /// `--address` names workers only; in Kubernetes: the operator has not reconciled the cluster yet.
    pub(crate) async fn coordinator(&self) -> anyhow::Result<(Endpoint, ClusterId)> {
        match self {
            Self::Remote(..) => Err(not_found(
                "this command needs the coordinator, and --address names workers only; use --cluster, --state-dir or --namespace".into(),
            )),
            Self::Local(local) => Ok((local.coordinator(), local.cluster()?)),
            Self::Kubernetes(cluster) => Ok((cluster.coordinator().await?, cluster.id()?)),
        }
    }

    /// Returns the admin endpoints of the workers, by ordinal; empty for `--address`, which names client ports.
    pub(crate) fn admin_endpoints(&self) -> Vec<(u32, Endpoint)> {
        match self {
            Self::Remote(..) => Vec::new(),
            Self::Local(local) => {
                let endpoint = |admin| Endpoint::at(admin, &local.route);
                local.endpoints.workers.iter().map(|worker| (worker.ordinal, endpoint(worker.admin))).collect()
            }
            Self::Kubernetes(cluster) => cluster.admin_endpoints(),
        }
    }
}

/// Finds the cluster and connects to it.
///
/// # Errors
/// As [`Target::find`] and [`Target::connect`].
pub(crate) async fn connect(context: &Context) -> anyhow::Result<Client> {
    Target::find(context).await?.connect().await
}

impl Running {
    /// Finds a running local cluster.
    ///
    /// # Errors
    /// None runs, or several run and none is named.
    pub(crate) fn find(context: &Context) -> anyhow::Result<Self> {
        if let Some(folder) = &context.state_dir {
            return Self::at(folder)?
                .ok_or_else(|| not_found(format!("no cluster is running in {}", folder.display())));
        }
        let base = state::base()?;
        if let Some(name) = &context.cluster {
            let folder = base.join(name);
            return Self::at(&folder)?.ok_or_else(|| not_found(format!("no local cluster named {name} is running")));
        }
        let mut running = Self::all(&base);
        match running.len() {
            0 => Err(not_found("no local cluster is running".into())),
            1 => Ok(running.remove(0)),
            _ => {
                let names: Vec<&str> = running.iter().map(|local| local.endpoints.name.as_str()).collect();
                let message =
                    format!("several local clusters are running ({}); select one with --cluster", names.join(", "));
                Err(problem(Code::NoLocalCluster, message))
            }
        }
    }

    /// Returns all running local clusters below the default state folder, by name.
    pub(crate) fn all(base: &Path) -> Vec<Self> {
        let folders = std::fs::read_dir(base).into_iter().flatten().flatten().map(|entry| entry.path());
        // Unreadable folders are skipped.
        let mut running: Vec<Self> = folders.filter_map(|folder| Self::at(&folder).ok().flatten()).collect();
        running.sort_by(|a, b| a.endpoints.name.cmp(&b.endpoints.name));
        running
    }

    /// Returns the cluster of a state directory if it is running.
    ///
    /// # Errors
    /// `endpoints.json` cannot be read.
    pub(crate) fn at(folder: &Path) -> anyhow::Result<Option<Self>> {
        let endpoints = Endpoints::read(folder)?.filter(Endpoints::is_running);
        Ok(endpoints.map(|endpoints| Self { folder: folder.to_owned(), endpoints }))
    }
}

impl Local {
    /// Finds a running local cluster.
    ///
    /// # Errors
    /// As [`Running::find`] and [`Local::of`].
    pub(crate) fn find(context: &Context) -> anyhow::Result<Self> {
        let Running { folder, endpoints } = Running::find(context)?;
        Self::of(folder, endpoints)
    }

    /// Returns the cluster of a state directory if it is running.
    ///
    /// # Errors
    /// As [`Running::at`] and [`Local::of`].
    pub(crate) fn at(folder: &Path) -> anyhow::Result<Option<Self>> {
        let running = Running::at(folder)?;
        running.map(|Running { folder, endpoints }| Self::of(folder, endpoints)).transpose()
    }

    /// Creates the target for a running cluster with these endpoints.
    ///
    /// # Errors
    /// The cluster uses TLS and the client certificate cannot be loaded.
    pub(crate) fn of(folder: PathBuf, endpoints: Endpoints) -> anyhow::Result<Self> {
        let route = if endpoints.tls {
            let keys = Keys::open(certificates::client(&folder));
            Route::Secured(
                keys.with_context(|| format!("failed to load the client certificate of cluster {}", endpoints.name))?,
            )
        } else {
            Route::Direct
        };
        Ok(Self { folder, endpoints, route })
    }

    /// Returns the coordinator's endpoint.
    pub(crate) fn coordinator(&self) -> Endpoint {
        Endpoint::at(self.endpoints.coordinator.address, &self.route)
    }

    /// Returns the client options for its workers.
    ///
    /// # Errors
    /// `endpoints.json` is invalid.
    pub(crate) fn options(&self) -> anyhow::Result<Options> {
        let workers = self.endpoints.workers.iter().map(|worker| worker.client.to_string());
        let options = Options::new(workers).with_cluster(self.cluster()?);
        let owner_key = OwnerKey(state::read_owner_key(&self.folder));
        Ok(Options { network: self.route.network(), owner_key, ..options })
    }

    /// Returns the cluster id.
    ///
    /// # Errors
    /// As [`Local::options`].
    pub(crate) fn cluster(&self) -> anyhow::Result<ClusterId> {
        self.endpoints.cluster.parse().ok().context("endpoints.json: cluster is not 32 hex digits")
    }
}

fn not_found(message: String) -> anyhow::Error {
    problem(Code::NoLocalCluster, message)
}

/// Rejects an address that is not `HOST:PORT`, which would otherwise be tried until the deadline.
fn check_address(address: &str) -> anyhow::Result<()> {
    let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
    let is_bracketed = host.starts_with('[') && host.ends_with(']');
    let is_host = !host.is_empty() && (is_bracketed || !host.contains([':', '/', '@', ' ']));
    if is_host && port.parse().is_ok_and(|port: u16| port != 0) {
        return Ok(());
    }
    let message = format!(
        "--address is {address:?}; allowed: HOST:PORT with a port from 1 to 65535, as in worker-0.example:7443 or [::1]:7443"
    );
    Err(failure(ExitCode::Usage, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_before_they_are_tried() {
        for good in ["127.0.0.1:7443", "worker-0.example:1", "[::1]:65535", "localhost:7443"] {
            check_address(good).unwrap();
        }
        for bad in
            ["", "localhost", "localhost:", ":7443", "localhost:0", "a:65536", "http://a:1", "::1:7443", "nonsense"]
        {
            let error = check_address(bad).unwrap_err().to_string();
            assert!(error.contains(&format!("{bad:?}")) && error.contains("HOST:PORT"), "{error}");
        }
    }
}
