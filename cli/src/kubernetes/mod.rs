//! A cluster in a Kubernetes: found by its `LearnerCluster`, reached through the API server.
//!
//! Workers tell clients the addresses of their pods, which mean nothing outside. Nothing is translated for that: whoever opens a
//! connection to such an address gets one to the pod that has it ([`Forwarder`]), so that the client library goes straight to each
//! owner and follows the map as it does inside.

mod error;
mod forward;
mod orders;
mod pass;
mod place;
mod runs;
mod upgrade;

pub(crate) use forward::{Dialer, Forwarder};

use crate::error::said;
use crate::route::{Door, Route};
use anyhow::Context as _;
use engram_api::ExitCode;
use engram_mapstore::with_causes;
use engram_memory::ClusterId;
use futures::FutureExt as _;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod};
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::{Value, json};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// What workers and operator agree on, and never change.
const CLIENT_PORT: u16 = 7443;
const ADMIN_PORT: u16 = 7445;
/// Who changes objects, in their managed fields.
const MANAGER: &str = "engram-cli";
/// How long the API server may take to take a connection, and to answer all that a cluster is found by.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
const FIND_DEADLINE: Duration = Duration::from_secs(20);

/// Which Kubernetes, and where in it.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Kubernetes")]
pub(crate) struct Asked {
    /// The cluster is in Kubernetes, in this namespace [default: that of the context]
    #[arg(short, long, value_name = "NAMESPACE", global = true)]
    pub(crate) namespace: Option<String>,
    /// The cluster is in the Kubernetes of this context of the kubeconfig
    #[arg(long, value_name = "NAME", global = true)]
    pub(crate) context: Option<String>,
    /// The kubeconfig [default: KUBECONFIG, ~/.kube/config, or the account of the pod that this runs in]
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) kubeconfig: Option<PathBuf>,
}

impl Asked {
    /// Whether anything was said of Kubernetes.
    pub(crate) const fn is_given(&self) -> bool {
        self.namespace.is_some() || self.context.is_some() || self.kubeconfig.is_some()
    }

    async fn config(&self) -> anyhow::Result<Config> {
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        let config = match (&self.kubeconfig, &self.context) {
            (Some(file), _) => match Kubeconfig::read_from(file) {
                Ok(read) => Config::from_custom_kubeconfig(read, &options).boxed().await,
                Err(error) => Err(error),
            },
            (None, Some(_)) => Config::from_kubeconfig(&options).boxed().await,
            (None, None) => {
                let inferred = Config::infer().boxed().await;
                return inferred.map_err(|found| unconfigured(&with_causes(&found)));
            }
        };
        config.map_err(|found| unconfigured(&with_causes(&found)))
    }
}

fn unconfigured(why: &str) -> anyhow::Error {
    let message = format!(
        "no Kubernetes to ask: {why}; set KUBECONFIG, or name a file with --kubeconfig and a context with --context"
    );
    said(ExitCode::Usage, message)
}

/// A worker's pod.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    /// Its place in the cluster.
    pub(crate) ordinal: u32,
    /// The pod.
    pub(crate) pod: String,
    /// Its address, once it has one.
    host: Option<String>,
    /// Whether it serves.
    ready: bool,
    /// How often its container was started again.
    pub(crate) restarts: u32,
    /// What Kubernetes says of it: `Pending`, `Running`.
    phase: String,
}

/// A cluster in a Kubernetes, as it was when it was looked at.
#[derive(Clone)]
pub(crate) struct Cluster {
    client: Client,
    namespace: String,
    name: String,
    /// The `LearnerCluster`.
    object: Value,
    /// By ordinal.
    pub(crate) workers: Vec<Worker>,
    route: Route,
}

impl Cluster {
    /// Finds a cluster: by name, or the only one of the namespace.
    ///
    /// # Errors
    /// No Kubernetes is configured or answers, the caller may not look, or there is no such cluster: the message names those
    /// that there are.
    pub(crate) async fn find(asked: &Asked, name: Option<&str>, token: Option<&Path>) -> anyhow::Result<Self> {
        let mut config = asked.config().await?;
        config.connect_timeout = Some(CONNECT_DEADLINE);
        let namespace = asked.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|found| unconfigured(&with_causes(&found)))?;
        let found = tokio::time::timeout(FIND_DEADLINE, Self::look(client, namespace, name, token).boxed()).await;
        found.map_err(|_| {
            let message =
                format!("the API server did not tell where the cluster is within {} s", FIND_DEADLINE.as_secs());
            said(ExitCode::Unreachable, message)
        })?
    }

    async fn look(client: Client, namespace: String, name: Option<&str>, token: Option<&Path>) -> anyhow::Result<Self> {
        let object = find_object(&client, &namespace, name).await?;
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let selector = format!("engram.dev/cluster={name},engram.dev/component=worker");
        let pods = forward::list(&client, &namespace, &selector).await?;
        let forwarder = Arc::new(Forwarder::new(client.clone(), &namespace, &selector, &pods));
        let network = pass::network(&client, &namespace, &object, &forwarder, token).await?;
        let mut workers: Vec<Worker> = pods.iter().filter_map(worker).collect();
        workers.sort_by_key(|worker| worker.ordinal);
        let route = Route::Forwarded(forwarder, network);
        Ok(Self { client, namespace, name, object, workers, route })
    }

    /// The way to its pods.
    pub(crate) const fn route(&self) -> &Route {
        &self.route
    }

    /// Its id.
    ///
    /// # Errors
    /// The operator has not given it one yet.
    pub(crate) fn id(&self) -> anyhow::Result<ClusterId> {
        let id = self.object["status"]["clusterId"].as_str().and_then(|id| id.parse().ok());
        id.ok_or_else(|| said(ExitCode::NotReady, format!("{self} has not been made yet: {}", self.told())))
    }

    /// Where its Ready workers serve clients.
    ///
    /// # Errors
    /// None is Ready.
    pub(crate) fn endpoints(&self) -> anyhow::Result<Vec<String>> {
        let ready = self.workers.iter().filter(|worker| worker.ready);
        let endpoints: Vec<String> = ready.filter_map(|worker| worker.address(CLIENT_PORT)).collect();
        if !endpoints.is_empty() {
            return Ok(endpoints);
        }
        let pods: Vec<String> = self.workers.iter().map(|it| format!("{} is {}", it.pod, it.phase)).collect();
        let pods = if pods.is_empty() { "it has no pods".to_owned() } else { pods.join(", ") };
        Err(said(ExitCode::NotReady, format!("no worker of {self} is Ready: {pods}; {}", self.told())))
    }

    /// Opens a connection to a worker, and closes it: whether the caller may at all.
    ///
    /// # Errors
    /// No Ready worker is reached.
    pub(crate) async fn reach(&self) -> anyhow::Result<()> {
        let mut why = None;
        for endpoint in self.endpoints()? {
            match self.route.open(&endpoint).await {
                Ok(_) => return Ok(()),
                Err(error) => why = Some(self.route.failure(error.into())),
            }
        }
        Err(why.expect("there is an endpoint where there is no error"))
    }

    /// Where its coordinators listen, as its workers are told.
    ///
    /// # Errors
    /// The operator has not looked at it yet, or the caller may not look.
    pub(crate) async fn coordinator(&self) -> anyhow::Result<Door> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let found = maps.get_opt(&format!("{}-config", self.name)).boxed().await;
        let refused =
            |found: kube::Error| error::told(&found, "to find the coordinator", "get configmaps", &self.namespace);
        let text = found.map_err(refused)?.and_then(|map| map.data?.remove("cluster.json"));
        let settings: Option<Value> = text.and_then(|text| serde_json::from_str(&text).ok());
        let address = settings.and_then(|settings| settings["coordinators"][0].as_str().map(str::to_owned));
        let address =
            address.ok_or_else(|| said(ExitCode::NotReady, format!("no operator has looked at {self} yet")))?;
        Ok(Door { address, route: self.route.clone() })
    }

    /// Where each worker is administered, by ordinal; those without an address are absent.
    pub(crate) fn administration(&self) -> Vec<(u32, Door)> {
        // Who has a token instead of a certificate is administered where clients are served.
        let port = if matches!(self.route, Route::Forwarded(_, Some(_))) { CLIENT_PORT } else { ADMIN_PORT };
        let door = |worker: &Worker| {
            Some((worker.ordinal, Door { address: worker.address(port)?, route: self.route.clone() }))
        };
        self.workers.iter().filter_map(door).collect()
    }

    /// Asks for so many workers, as `kubectl scale` does.
    ///
    /// # Errors
    /// The API server refuses it: the caller may not, or the spec's rules forbid it.
    pub(crate) async fn scale(&self, workers: u32) -> anyhow::Result<()> {
        let objects = objects(&self.client, Some(&self.namespace));
        let change = Patch::Merge(json!({ "spec": { "replicas": workers } }));
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        let patched = objects.patch_scale(&self.name, &parameters, &change).boxed().await;
        let refused =
            |found: kube::Error| error::told(&found, "to scale", "patch learnerclusters/scale", &self.namespace);
        patched.map(drop).map_err(refused)
    }

    /// What keeps it from having so many workers that all have their share, as the operator tells it.
    ///
    /// # Errors
    /// The API server does not tell.
    pub(crate) async fn unscaled(&self, workers: u32) -> anyhow::Result<Option<String>> {
        let found = objects(&self.client, Some(&self.namespace)).get(&self.name).boxed().await;
        let found = found.map_err(|found| error::told(&found, "to look", "get learnerclusters", &self.namespace))?;
        Ok(unscaled(&serde_json::to_value(found)?, workers))
    }

    /// What the operator says of it.
    fn told(&self) -> String {
        told(&self.object)
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LearnerCluster {}/{}", self.namespace, self.name)
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("namespace", &self.namespace).field("name", &self.name).finish_non_exhaustive()
    }
}

impl Worker {
    fn address(&self, port: u16) -> Option<String> {
        self.host.as_ref().map(|host| format!("{host}:{port}"))
    }
}

fn worker(pod: &Pod) -> Option<Worker> {
    let name = pod.metadata.name.clone()?;
    let ordinal = name.rsplit_once('-')?.1.parse().ok()?;
    let status = pod.status.as_ref();
    let containers = || status.into_iter().flat_map(|status| status.container_statuses.iter().flatten());
    let host = forward::address(pod).map(|ip| if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() });
    Some(Worker {
        ordinal,
        host,
        ready: forward::is_ready(pod),
        restarts: containers().map(|it| u32::try_from(it.restart_count).unwrap_or(0)).sum(),
        phase: status.and_then(|status| status.phase.clone()).unwrap_or_else(|| "Unknown".into()),
        pod: name,
    })
}

fn objects(client: &Client, namespace: Option<&str>) -> Api<DynamicObject> {
    let resource = ApiResource {
        group: "engram.dev".into(),
        version: "v1alpha1".into(),
        api_version: engram_api::API_VERSION.into(),
        kind: "LearnerCluster".into(),
        plural: "learnerclusters".into(),
    };
    match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    }
}

/// The `LearnerCluster` that is meant.
async fn find_object(client: &Client, namespace: &str, name: Option<&str>) -> anyhow::Result<Value> {
    let found = objects(client, Some(namespace)).list(&ListParams::default()).await;
    let found = match found {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            return Err(said(
                ExitCode::NotFound,
                "this Kubernetes does not know LearnerClusters: Engram is not installed in it",
            ));
        }
        found => {
            found.map_err(|found| error::told(&found, "to list LearnerClusters", "list learnerclusters", namespace))?
        }
    };
    let names =
        |found: &[DynamicObject]| -> Vec<String> { found.iter().filter_map(|it| it.metadata.name.clone()).collect() };
    let here = names(&found.items);
    let chosen = found.items.into_iter().filter(|it| name.is_none_or(|name| it.metadata.name.as_deref() == Some(name)));
    let mut chosen: Vec<DynamicObject> = chosen.collect();
    if chosen.len() == 1 {
        return serde_json::to_value(chosen.remove(0)).context("the LearnerCluster is no JSON");
    }
    if !here.is_empty() {
        let there = here.join(", ");
        return Err(match name {
            Some(name) => {
                let message = format!("there is no LearnerCluster {name} in namespace {namespace}; there are: {there}");
                said(ExitCode::NotFound, message)
            }
            None => {
                said(ExitCode::Usage, format!("namespace {namespace} has several LearnerClusters ({there}); name one"))
            }
        });
    }
    let what = name.map_or_else(|| "no LearnerCluster".to_owned(), |name| format!("no LearnerCluster {name}"));
    Err(said(
        ExitCode::NotFound,
        format!("there is {what} in namespace {namespace}{}", elsewhere(client, namespace).await),
    ))
}

/// What may have been meant where a namespace has nothing: as far as the caller may look.
async fn elsewhere(client: &Client, namespace: &str) -> String {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let mut text = String::new();
    if matches!(namespaces.get_opt(namespace).await, Ok(None)) {
        text.push_str(", and no such namespace");
    }
    let all = objects(client, None).list(&ListParams::default()).await;
    let place = |it: DynamicObject| Some(format!("{}/{}", it.metadata.namespace?, it.metadata.name?));
    match all.map(|all| all.items.into_iter().filter_map(place).collect::<Vec<_>>()) {
        Ok(all) if all.is_empty() => text.push_str("; there is none in any namespace"),
        Ok(all) => text.push_str(&format!("; there are: {}", all.join(", "))),
        // Who may look at one namespace alone is told of that one.
        Err(_) => {}
    }
    text
}

/// What the operator says of a cluster: its phase, and why it is not Ready.
fn told(object: &Value) -> String {
    let Some(phase) = object["status"]["phase"].as_str() else { return "no operator has looked at it yet".into() };
    let why = ready(object).and_then(|condition| condition["message"].as_str()).filter(|message| !message.is_empty());
    match why {
        Some(why) => format!("the operator says {phase}: {why}"),
        None => format!("the operator says {phase}"),
    }
}

fn ready(object: &Value) -> Option<&Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == "Ready")
}

fn unscaled(object: &Value, workers: u32) -> Option<String> {
    let status = &object["status"];
    if status["observedGeneration"] != object["metadata"]["generation"] || object["spec"]["workers"] != workers {
        return Some("the operator has not looked at it yet".into());
    }
    let counted = &status["workers"];
    for (field, what) in [("total", "there"), ("ready", "ready")] {
        if counted[field] != workers {
            return Some(format!("{} of {workers} workers are {what}", counted[field]));
        }
    }
    let partitions = &status["partitions"];
    for field in ["degraded", "alone", "unavailable"] {
        if partitions[field].as_u64().unwrap_or(0) > 0 {
            return Some(format!("{} partitions are {field}", partitions[field]));
        }
    }
    ready(object).is_none_or(|ready| ready["status"] != "True").then(|| told(object))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(workers: u32, total: u32, ready: &str) -> Value {
        json!({
            "metadata": { "generation": 4 },
            "spec": { "workers": workers },
            "status": {
                "observedGeneration": 4, "phase": "Reconciling",
                "workers": { "total": total, "ready": total },
                "partitions": { "healthy": 16, "degraded": 0, "alone": 0, "unavailable": 0 },
                "conditions": [{ "type": "Ready", "status": ready, "message": "moving" }],
            },
        })
    }

    #[test]
    fn a_cluster_is_scaled_when_the_operator_says_so_of_the_newest_spec() {
        let says = |object: &Value| unscaled(object, 3).unwrap_or_default();
        assert_eq!(says(&object(3, 3, "True")), "");
        assert!(says(&object(5, 3, "True")).contains("not looked"));
        assert!(says(&object(3, 2, "True")).contains("2 of 3 workers are there"));
        assert_eq!(says(&object(3, 3, "False")), "the operator says Reconciling: moving");
        let mut behind = object(3, 3, "True");
        behind["metadata"]["generation"] = 5.into();
        assert!(says(&behind).contains("not looked"), "what it says of an older spec does not count");
        let mut short = object(3, 3, "True");
        short["status"]["partitions"]["degraded"] = 2.into();
        assert_eq!(says(&short), "2 partitions are degraded");
    }

    #[test]
    fn a_worker_is_read_from_its_pod() {
        let pod = |status: Value| -> Pod {
            serde_json::from_value(json!({ "metadata": { "name": "words-worker-12" }, "status": status })).unwrap()
        };
        let running = worker(&pod(json!({
            "phase": "Running", "podIP": "fd00::7", "conditions": [{ "type": "Ready", "status": "True" }],
            "containerStatuses": [{ "name": "worker", "image": "", "imageID": "", "ready": true, "restartCount": 2 }],
        })));
        let running = running.unwrap();
        assert_eq!((running.ordinal, running.ready, running.restarts), (12, true, 2));
        assert_eq!(running.address(CLIENT_PORT).as_deref(), Some("[fd00::7]:7443"));
        let pending = worker(&pod(json!({ "phase": "Pending" }))).unwrap();
        assert_eq!((pending.ready, pending.address(CLIENT_PORT), pending.phase.as_str()), (false, None, "Pending"));
    }

    #[test]
    fn what_the_operator_says_is_told_in_a_line() {
        assert_eq!(told(&json!({})), "no operator has looked at it yet");
        assert_eq!(told(&object(3, 3, "False")), "the operator says Reconciling: moving");
    }
}
