//! Which cluster a command is about, and the way to it: in Kubernetes, at addresses, or the local cluster that runs.

use crate::args::{Context, Credentials};
use crate::error::{problem, said};
use crate::kubernetes;
use crate::local::{Endpoints, certificates, state};
use crate::route::{Door, Route};
use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use engram_client::{Client, Options};
use engram_identity::Keys;
use engram_memory::ClusterId;
use futures::FutureExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long it may take until anybody answers: people wait for this, and a worker that lives answers at once.
const CONNECT: Duration = Duration::from_secs(5);
/// The same through an API server, which may be far away and asks a kubelet first.
const CONNECT_FORWARDED: Duration = Duration::from_secs(20);

/// A cluster that a command is about.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    /// Addresses given by the user, and the way there.
    Remote(Vec<String>, Route),
    /// A local cluster, running when it was looked at.
    Local(Local),
    /// A cluster in a Kubernetes.
    Kubernetes(Box<kubernetes::Cluster>),
}

/// A local cluster that runs.
#[derive(Debug, Clone)]
pub(crate) struct Local {
    /// Its state directory.
    pub(crate) folder: PathBuf,
    /// What it wrote there of itself.
    pub(crate) endpoints: Endpoints,
    /// The way to what it says.
    pub(crate) route: Route,
}

impl Target {
    /// Finds the cluster: in Kubernetes where anything was said of it (`-n`, `--context`, `--kubeconfig`, or the name
    /// `kubectl-engram`), at `--address`, then `--state-dir`, `--cluster`, else the one local cluster that runs. The environment
    /// (`ENGRAM_ADDRESS`, `ENGRAM_STATE_DIR`, `ENGRAM_CLUSTER`) stands in for a flag that is absent.
    ///
    /// # Errors
    /// None is found (ENG-0408), or several run and none was named. In Kubernetes: as [`kubernetes::Cluster::find`].
    pub(crate) async fn find(context: &Context) -> anyhow::Result<Self> {
        if let Some(asked) = &context.kubernetes {
            let (name, token) = (context.cluster.as_deref(), context.token_file.as_deref());
            let found = kubernetes::Cluster::find(asked, name, token).await?;
            return Ok(Self::Kubernetes(Box::new(found)));
        }
        if context.credentials.is_some() && context.address.is_empty() {
            let message = "--ca, --cert and --token-file are for --address; commands find the certificate of a local cluster themselves";
            return Err(said(ExitCode::Usage, message));
        }
        if !context.address.is_empty() {
            let route = match &context.credentials {
                Some(Credentials::Certificate(files)) => Route::Secured(Keys::open(files.clone())?),
                Some(Credentials::Token { authority, token }) => Route::carrying(authority, token)?,
                Some(Credentials::Nothing) => {
                    let message = "--ca: a cluster with TLS wants to know who calls; add --cert or --token-file";
                    return Err(said(ExitCode::Usage, message));
                }
                None => Route::Direct,
            };
            return Ok(Self::Remote(context.address.clone(), route));
        }
        Local::find(context).map(Self::Local)
    }

    /// Connects to it.
    ///
    /// # Errors
    /// Nobody answers, or another cluster does.
    pub(crate) async fn connect(&self) -> anyhow::Result<Client> {
        let (options, patience) = match self {
            Self::Remote(addresses, route) => {
                let options = Options::new(addresses.iter().cloned());
                (Options { network: route.network(), ..options }, CONNECT)
            }
            Self::Local(local) => (local.options()?, CONNECT),
            Self::Kubernetes(cluster) => {
                let options = Options::new(cluster.endpoints()?).of_cluster(cluster.id()?);
                let network = self.route().network();
                // The client library would go on asking until its deadline, also where the caller may not.
                cluster.reach().await?;
                (Options { network, connect_deadline: CONNECT, ..options }, CONNECT_FORWARDED)
            }
        };
        let endpoints = options.endpoints.join(", ");
        let connecting = Client::connect(options).boxed();
        let connected = tokio::time::timeout(patience, connecting).await.unwrap_or_else(|_| {
            let last = format!("nobody answers within {} s", patience.as_secs());
            Err(engram_client::Error::Connect { endpoints, last })
        });
        connected.map_err(|error| self.route().failure(error.into()))
    }

    /// The way to its addresses.
    pub(crate) fn route(&self) -> Route {
        match self {
            Self::Remote(_, route) => route.clone(),
            Self::Local(local) => local.route.clone(),
            Self::Kubernetes(cluster) => cluster.route().clone(),
        }
    }

    /// Where its coordinator listens, and its id.
    ///
    /// # Errors
    /// `--address` names workers, which are not enough; in Kubernetes: the operator has not looked at it yet.
    pub(crate) async fn coordinator(&self) -> anyhow::Result<(Door, ClusterId)> {
        match self {
            Self::Remote(..) => Err(nothing(
                "this command asks the coordinator, which --address does not name; name a local cluster".into(),
            )),
            Self::Local(local) => Ok((local.coordinator(), local.cluster()?)),
            Self::Kubernetes(cluster) => Ok((cluster.coordinator().await?, cluster.id()?)),
        }
    }

    /// Where its workers are administered, by ordinal; none for addresses, which are for clients.
    pub(crate) fn administration(&self) -> Vec<(u32, Door)> {
        match self {
            Self::Remote(..) => Vec::new(),
            Self::Local(local) => {
                let door = |admin| Door::at(admin, &local.route);
                local.endpoints.workers.iter().map(|worker| (worker.ordinal, door(worker.admin))).collect()
            }
            Self::Kubernetes(cluster) => cluster.administration(),
        }
    }
}

/// Finds the cluster and connects to it: what most commands begin with.
///
/// # Errors
/// As [`Target::find`] and [`Target::connect`].
pub(crate) async fn connect(context: &Context) -> anyhow::Result<Client> {
    Target::find(context).await?.connect().await
}

impl Local {
    /// Finds a local cluster that runs.
    ///
    /// # Errors
    /// None does, or several do and none was named.
    pub(crate) fn find(context: &Context) -> anyhow::Result<Self> {
        if let Some(folder) = &context.state_dir {
            return Self::at(folder)?.ok_or_else(|| nothing(format!("no cluster runs in {}", folder.display())));
        }
        let base = state::base()?;
        if let Some(name) = &context.cluster {
            let folder = base.join(name);
            return Self::at(&folder)?.ok_or_else(|| nothing(format!("no local cluster called {name} runs")));
        }
        let mut running = Self::all(&base);
        match running.len() {
            0 => Err(nothing("no local cluster runs".into())),
            1 => Ok(running.remove(0)),
            _ => {
                let names: Vec<&str> = running.iter().map(|local| local.endpoints.name.as_str()).collect();
                let message = format!("several local clusters run ({}); name one with --cluster", names.join(", "));
                Err(problem(Code::NoLocalCluster, message))
            }
        }
    }

    /// All local clusters that run below the usual folder, by name.
    pub(crate) fn all(base: &Path) -> Vec<Self> {
        let folders = std::fs::read_dir(base).into_iter().flatten().flatten().map(|entry| entry.path());
        // A folder that cannot be read is of nobody who could be talked to.
        let mut running: Vec<Self> = folders.filter_map(|folder| Self::at(&folder).ok().flatten()).collect();
        running.sort_by(|a, b| a.endpoints.name.cmp(&b.endpoints.name));
        running
    }

    /// The cluster of a state directory, if it runs.
    ///
    /// # Errors
    /// What it wrote of itself cannot be read.
    pub(crate) fn at(folder: &Path) -> anyhow::Result<Option<Self>> {
        let endpoints = Endpoints::read(folder)?.filter(Endpoints::is_running);
        endpoints.map(|endpoints| Self::of(folder.to_owned(), endpoints)).transpose()
    }

    /// A cluster that runs and has written `endpoints`.
    ///
    /// # Errors
    /// It speaks TLS, and the person's certificate is of no use.
    pub(crate) fn of(folder: PathBuf, endpoints: Endpoints) -> anyhow::Result<Self> {
        let route = if endpoints.tls {
            let keys = Keys::open(certificates::client(&folder));
            Route::Secured(keys.with_context(|| format!("no certificate for cluster {}", endpoints.name))?)
        } else {
            Route::Direct
        };
        Ok(Self { folder, endpoints, route })
    }

    /// Where its coordinator listens.
    pub(crate) fn coordinator(&self) -> Door {
        Door::at(self.endpoints.coordinator.address, &self.route)
    }

    /// How to reach its workers.
    ///
    /// # Errors
    /// What it wrote of itself makes no sense.
    pub(crate) fn options(&self) -> anyhow::Result<Options> {
        let workers = self.endpoints.workers.iter().map(|worker| worker.client.to_string());
        let options = Options::new(workers).of_cluster(self.cluster()?);
        Ok(Options { network: self.route.network(), ..options })
    }

    /// Its id.
    ///
    /// # Errors
    /// As [`Local::options`].
    pub(crate) fn cluster(&self) -> anyhow::Result<ClusterId> {
        self.endpoints.cluster.parse().ok().context("endpoints.json: cluster is not 32 hex digits")
    }
}

fn nothing(message: String) -> anyhow::Error {
    problem(Code::NoLocalCluster, message)
}
