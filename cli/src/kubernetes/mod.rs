//! A cluster in Kubernetes: found by its `LearnerCluster`, reached through the API server.
//!
//! Workers advertise pod addresses, which are not routable from outside. [`Forwarder`] connects to the pod that has such an
//! address, so that the client library connects to each primary directly and follows the partition map as inside of Kubernetes.

mod address;
mod autoscaling;
mod error;
mod forward;
mod overrides;
pub(crate) mod runs;
mod token;
mod upgrade;

pub(crate) use forward::{Dialer, Forwarder};
pub(crate) use upgrade::UpgradeState;

use crate::context::KubernetesOptions;
use crate::error::failure;
use crate::route::{Endpoint, Route};
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
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Ports of workers, fixed by the operator.
const CLIENT_PORT: u16 = 7443;
const ADMIN_PORT: u16 = 7445;
/// Field manager of changes to objects.
const MANAGER: &str = "engram-cli";
/// Deadlines to connect to the API server, and to find a cluster.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
const FIND_DEADLINE: Duration = Duration::from_secs(20);

/// Loads the client configuration that the options select.
async fn client_config(options: &KubernetesOptions) -> anyhow::Result<Config> {
    let kubeconfig_options = KubeConfigOptions { context: options.context.clone(), ..KubeConfigOptions::default() };
    let config = match (&options.kubeconfig, &options.context) {
        (Some(file), _) => match Kubeconfig::read_from(file) {
            Ok(kubeconfig) => Config::from_custom_kubeconfig(kubeconfig, &kubeconfig_options).boxed().await,
            Err(error) => Err(error),
        },
        _ if let Some(paths) = kubeconfig_paths(std::env::var_os("KUBECONFIG").as_deref()) => {
            let merged = paths.iter().try_fold(Kubeconfig::default(), |merged, path| {
                Kubeconfig::read_from(path).and_then(|next| merged.merge(next))
            });
            match merged {
                Ok(kubeconfig) => Config::from_custom_kubeconfig(kubeconfig, &kubeconfig_options).boxed().await,
                Err(error) => Err(error),
            }
        }
        (None, Some(_)) => Config::from_kubeconfig(&kubeconfig_options).boxed().await,
        (None, None) => {
            let inferred = Config::infer().boxed().await;
            return inferred.map_err(|error| unconfigured(&with_causes(&error)));
        }
    };
    config.map_err(|error| unconfigured(&with_causes(&error)))
}

/// Returns the existing files of `KUBECONFIG`, `None` if there are none. Like kubectl, ignores files that do not exist.
fn kubeconfig_paths(variable: Option<&OsStr>) -> Option<Vec<PathBuf>> {
    let paths: Vec<PathBuf> = std::env::split_paths(variable?).filter(|path| path.exists()).collect();
    (!paths.is_empty()).then_some(paths)
}

fn unconfigured(reason: &str) -> anyhow::Error {
    let message =
        format!("failed to load a Kubernetes configuration: {reason}; set KUBECONFIG, --kubeconfig or --context");
    failure(ExitCode::Usage, message)
}

/// A worker and its pod.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    pub(crate) ordinal: u32,
    /// Name of the pod.
    pub(crate) pod: String,
    /// IP address of the pod, once assigned.
    host: Option<String>,
    /// Whether the pod is ready.
    ready: bool,
    /// Container restarts.
    pub(crate) restarts: u32,
    /// Pod phase, such as `Pending` or `Running`.
    phase: String,
}

/// Snapshot of a cluster in Kubernetes.
#[derive(Clone)]
pub(crate) struct Cluster {
    client: Client,
    namespace: String,
    name: String,
    /// The `LearnerCluster` object.
    object: Value,
    /// By ordinal.
    pub(crate) workers: Vec<Worker>,
    route: Route,
    /// CA certificates of a cluster with TLS, in PEM.
    ca: Option<String>,
}

/// Returns the selector of the pods of a cluster's workers.
fn selector(cluster: &str) -> String {
    format!("engram.dev/cluster={cluster},engram.dev/component=worker")
}

fn logs_command(namespace: &str, cluster: &str, worker: Option<u32>, options: &str) -> String {
    let pods =
        worker.map_or_else(|| format!("-l {}", selector(cluster)), |ordinal| format!("{cluster}-worker-{ordinal}"));
    format!("kubectl -n {namespace} logs {pods} -c worker{options}")
}

impl Cluster {
    /// Finds a cluster by name, or the only one of the namespace.
    ///
    /// # Errors
    /// Kubernetes is not configured or does not respond, a permission is missing, or the cluster does not exist.
    pub(crate) async fn find(
        options: &KubernetesOptions,
        name: Option<&str>,
        token: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let mut config = client_config(options).await?;
        config.connect_timeout = Some(CONNECT_DEADLINE);
        let namespace = options.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|error| unconfigured(&with_causes(&error)))?;
        let cluster = tokio::time::timeout(FIND_DEADLINE, Self::read(client, namespace, name, token).boxed()).await;
        cluster.map_err(|_| {
            let message = format!("the API server did not respond within {} s", FIND_DEADLINE.as_secs());
            failure(ExitCode::Unreachable, message)
        })?
    }

    async fn read(client: Client, namespace: String, name: Option<&str>, token: Option<&Path>) -> anyhow::Result<Self> {
        let object = find_object(&client, &namespace, name).await?;
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let selector = selector(&name);
        let pods = forward::list(&client, &namespace, &selector).await?;
        let forwarder = Arc::new(Forwarder::new(client.clone(), &namespace, &selector, &pods));
        let (network, ca) = token::network(&client, &namespace, &object, &forwarder, token).await?.unzip();
        let mut workers: Vec<Worker> = pods.iter().filter_map(worker).collect();
        workers.sort_by_key(|worker| worker.ordinal);
        let route = Route::Forwarded(forwarder, network);
        Ok(Self { client, namespace, name, object, workers, route, ca })
    }

    /// Returns the route to the pods.
    pub(crate) const fn route(&self) -> &Route {
        &self.route
    }

    /// Returns the command that shows the logs of a worker, or of all. `options` starts with a space unless it is empty.
    pub(crate) fn logs_command(&self, worker: Option<u32>, options: &str) -> String {
        logs_command(&self.namespace, &self.name, worker, options)
    }

    /// Returns the CA certificates of a cluster with TLS, in PEM.
    pub(crate) fn ca(&self) -> Option<&str> {
        self.ca.as_deref()
    }

    /// Returns the cluster id.
    ///
    /// # Errors
    /// The operator has not created the cluster yet.
    pub(crate) fn id(&self) -> anyhow::Result<ClusterId> {
        let id = self.object["status"]["clusterId"].as_str().and_then(|id| id.parse().ok());
        id.ok_or_else(|| {
            failure(ExitCode::NotReady, format!("{self} has not been created yet: {}", self.operator_status()))
        })
    }

    /// Returns the client addresses of the ready workers.
    ///
    /// # Errors
    /// No worker is ready.
    pub(crate) fn endpoints(&self) -> anyhow::Result<Vec<String>> {
        let ready = self.workers.iter().filter(|worker| worker.ready);
        let endpoints: Vec<String> = ready.filter_map(|worker| worker.address(CLIENT_PORT)).collect();
        if !endpoints.is_empty() {
            return Ok(endpoints);
        }
        let pods: Vec<String> = self.workers.iter().map(|it| format!("{} is {}", it.pod, it.phase)).collect();
        let pods = if pods.is_empty() { "no pods".to_owned() } else { pods.join(", ") };
        Err(failure(ExitCode::NotReady, format!("no worker of {self} is ready: {pods}; {}", self.operator_status())))
    }

    /// Opens and closes a connection to a worker, to check permissions.
    ///
    /// # Errors
    /// No ready worker can be reached.
    pub(crate) async fn check_access(&self) -> anyhow::Result<()> {
        let mut last_error = None;
        for endpoint in self.endpoints()? {
            match self.route.open(&endpoint).await {
                Ok(_) => return Ok(()),
                Err(error) => last_error = Some(self.route.explain(error.into())),
            }
        }
        Err(last_error.expect("endpoints() returns at least one"))
    }

    /// Returns the coordinator's endpoint, from the configuration of the workers.
    ///
    /// # Errors
    /// The operator has not reconciled the cluster yet, or a permission is missing.
    pub(crate) async fn coordinator(&self) -> anyhow::Result<Endpoint> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let map = maps.get_opt(&format!("{}-config", self.name)).boxed().await;
        let describe =
            |error: kube::Error| error::describe(&error, "to find the coordinator", "get configmaps", &self.namespace);
        let text = map.map_err(describe)?.and_then(|map| map.data?.remove("cluster.json"));
        let settings: Option<Value> = text.and_then(|text| serde_json::from_str(&text).ok());
        let address = settings.and_then(|settings| settings["coordinators"][0].as_str().map(str::to_owned));
        let address = address
            .ok_or_else(|| failure(ExitCode::NotReady, format!("{self} has not been reconciled by an operator yet")))?;
        Ok(Endpoint { address, route: self.route.clone() })
    }

    /// Returns the admin endpoints of the workers, by ordinal, except of pods without an address.
    pub(crate) fn admin_endpoints(&self) -> Vec<(u32, Endpoint)> {
        // Token authentication is served on the client port only.
        let port = if matches!(self.route, Route::Forwarded(_, Some(_))) { CLIENT_PORT } else { ADMIN_PORT };
        let endpoint = |worker: &Worker| {
            Some((worker.ordinal, Endpoint { address: worker.address(port)?, route: self.route.clone() }))
        };
        self.workers.iter().filter_map(endpoint).collect()
    }

    /// Sets the number of workers, as `kubectl scale` does.
    ///
    /// # Errors
    /// A permission is missing, or the value is invalid.
    pub(crate) async fn scale(&self, workers: u32) -> anyhow::Result<()> {
        let objects = objects(&self.client, Some(&self.namespace));
        let change = Patch::Merge(json!({ "spec": { "replicas": workers } }));
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        let patched = objects.patch_scale(&self.name, &parameters, &change).boxed().await;
        let describe =
            |error: kube::Error| error::describe(&error, "to scale", "patch learnerclusters/scale", &self.namespace);
        patched.map(drop).map_err(describe)
    }

    /// Returns why scaling to `workers` is not complete, according to the operator.
    pub(crate) async fn unscaled(&self, workers: u32) -> anyhow::Result<Option<String>> {
        let object = objects(&self.client, Some(&self.namespace)).get(&self.name).boxed().await;
        let object = object.map_err(|error| {
            error::describe(&error, "to read the LearnerCluster", "get learnerclusters", &self.namespace)
        })?;
        Ok(unscaled(&serde_json::to_value(object)?, workers))
    }

    /// Returns phase and message that the operator reports.
    fn operator_status(&self) -> String {
        operator_status(&self.object)
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

/// Finds the `LearnerCluster` with this name, or the only one of the namespace.
async fn find_object(client: &Client, namespace: &str, name: Option<&str>) -> anyhow::Result<Value> {
    let list = objects(client, Some(namespace)).list(&ListParams::default()).await;
    let list = match list {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            return Err(failure(
                ExitCode::NotFound,
                "the LearnerCluster resource does not exist: Engram is not installed in this Kubernetes cluster",
            ));
        }
        list => {
            list.map_err(|error| error::describe(&error, "to list LearnerClusters", "list learnerclusters", namespace))?
        }
    };
    let existing: Vec<String> = list.items.iter().filter_map(|it| it.metadata.name.clone()).collect();
    let chosen = list.items.into_iter().filter(|it| name.is_none_or(|name| it.metadata.name.as_deref() == Some(name)));
    let mut chosen: Vec<DynamicObject> = chosen.collect();
    if chosen.len() == 1 {
        return serde_json::to_value(chosen.remove(0)).context("failed to serialize the LearnerCluster");
    }
    if !existing.is_empty() {
        let existing = existing.join(", ");
        return Err(match name {
            Some(name) => {
                let message = format!("LearnerCluster {name} not found in namespace {namespace}; existing: {existing}");
                failure(ExitCode::NotFound, message)
            }
            None => failure(
                ExitCode::Usage,
                format!("namespace {namespace} has several LearnerClusters ({existing}); select one with --cluster"),
            ),
        });
    }
    let subject = name.map_or_else(|| "LearnerCluster".to_owned(), |name| format!("LearnerCluster {name}"));
    Err(failure(
        ExitCode::NotFound,
        format!("{subject} not found in namespace {namespace}{}", alternatives(client, namespace).await),
    ))
}

/// Lists clusters of other namespaces, as far as the caller has permission.
async fn alternatives(client: &Client, namespace: &str) -> String {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let mut text = String::new();
    if matches!(namespaces.get_opt(namespace).await, Ok(None)) {
        text.push_str(", which does not exist");
    }
    let all = objects(client, None).list(&ListParams::default()).await;
    let qualified_name = |it: DynamicObject| Some(format!("{}/{}", it.metadata.namespace?, it.metadata.name?));
    match all.map(|all| all.items.into_iter().filter_map(qualified_name).collect::<Vec<_>>()) {
        Ok(all) if all.is_empty() => text.push_str("; no namespace has one"),
        Ok(all) => text.push_str(&format!("; existing: {}", all.join(", "))),
        // The caller has permission for this namespace only.
        Err(_) => {}
    }
    text
}

/// Returns the phase of a cluster, and the message of its Ready condition.
fn operator_status(object: &Value) -> String {
    let Some(phase) = object["status"]["phase"].as_str() else { return "not reconciled by an operator yet".into() };
    let message =
        ready(object).and_then(|condition| condition["message"].as_str()).filter(|message| !message.is_empty());
    match message {
        Some(message) => format!("phase {phase}: {message}"),
        None => format!("phase {phase}"),
    }
}

fn ready(object: &Value) -> Option<&Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == "Ready")
}

fn unscaled(object: &Value, workers: u32) -> Option<String> {
    let status = &object["status"];
    if status["observedGeneration"] != object["metadata"]["generation"] || object["spec"]["workers"] != workers {
        return Some("waiting for the operator to reconcile the change".into());
    }
    let counts = &status["workers"];
    for (field, state) in [("total", "created"), ("ready", "ready")] {
        if counts[field] != workers {
            return Some(format!("{} of {workers} workers are {state}", counts[field]));
        }
    }
    let partitions = &status["partitions"];
    for (field, state) in [("underReplicated", "under-replicated"), ("unavailable", "unavailable")] {
        if partitions[field].as_u64().unwrap_or(0) > 0 {
            return Some(format!("{} partitions are {state}", partitions[field]));
        }
    }
    ready(object).is_none_or(|ready| ready["status"] != "True").then(|| operator_status(object))
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
                "partitions": { "healthy": 16, "underReplicated": 0, "singleReplica": 0, "unavailable": 0 },
                "conditions": [{ "type": "Ready", "status": ready, "message": "moving" }],
            },
        })
    }

    #[test]
    fn logs_of_pods_are_shown_by_kubectl() {
        let all = "kubectl -n research logs -l engram.dev/cluster=words,engram.dev/component=worker -c worker -f";
        assert_eq!(logs_command("research", "words", None, " -f"), all);
        let one = "kubectl -n research logs words-worker-2 -c worker --previous";
        assert_eq!(logs_command("research", "words", Some(2), " --previous"), one);
    }

    #[test]
    fn missing_files_of_kubeconfig_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let (present, absent) = (folder.path().join("present"), folder.path().join("absent"));
        std::fs::write(&present, "").unwrap();
        let paths = |all: &[&PathBuf]| kubeconfig_paths(Some(&std::env::join_paths(all).unwrap()));
        assert_eq!(paths(&[&absent, &present]), Some(vec![present.clone()]));
        assert_eq!(paths(&[&absent]), None);
        assert_eq!(kubeconfig_paths(Some(OsStr::new(""))), None);
        assert_eq!(kubeconfig_paths(None), None);
    }

    #[test]
    fn scaling_is_complete_when_the_operator_reports_it_for_the_latest_spec() {
        let missing = |object: &Value| unscaled(object, 3).unwrap_or_default();
        assert_eq!(missing(&object(3, 3, "True")), "");
        assert!(missing(&object(5, 3, "True")).contains("waiting for the operator"));
        assert!(missing(&object(3, 2, "True")).contains("2 of 3 workers are created"));
        assert_eq!(missing(&object(3, 3, "False")), "phase Reconciling: moving");
        let mut behind = object(3, 3, "True");
        behind["metadata"]["generation"] = 5.into();
        assert!(missing(&behind).contains("waiting for the operator"), "status of an older generation does not count");
        let mut short = object(3, 3, "True");
        short["status"]["partitions"]["underReplicated"] = 2.into();
        assert_eq!(missing(&short), "2 partitions are under-replicated");
    }

    #[test]
    fn workers_are_read_from_pods() {
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
    fn operator_status_has_phase_and_message() {
        assert_eq!(operator_status(&json!({})), "not reconciled by an operator yet");
        assert_eq!(operator_status(&object(3, 3, "False")), "phase Reconciling: moving");
    }
}
