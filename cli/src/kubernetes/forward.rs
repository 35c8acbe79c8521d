//! Connections to pods through the API server, as `kubectl port-forward` makes them, but without a port on this machine: each
//! connection is a stream of its own, and nobody else here can use it.

use super::error;
use super::pass::Pass;
use super::place::Place;
use crate::error::said;
use engram_api::ExitCode;
use engram_client::{Dial, Open, Stream};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::ListParams;
use kube::{Api, Client};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::io::DuplexStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Error, Uri};

/// How long a connection may take: a few calls of the API server, which has a node's kubelet make it.
const OPEN_DEADLINE: Duration = Duration::from_secs(10);

/// The way to the pods of one cluster.
pub(crate) struct Forwarder {
    client: Client,
    namespace: String,
    /// What selects the pods of the workers.
    selector: String,
    /// Names of pods by their addresses, as last heard.
    pods: Mutex<HashMap<IpAddr, String>>,
    /// What callers carry, where the cluster asks for it.
    pass: OnceLock<Arc<Pass>>,
    /// Why the last connection was not made, if it was not: what the client library tells is that nobody answered.
    failed: Mutex<Option<anyhow::Error>>,
}

impl Forwarder {
    pub(super) fn new(client: Client, namespace: &str, selector: &str, pods: &[Pod]) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            selector: selector.to_owned(),
            pods: Mutex::new(by_address(pods)),
            pass: OnceLock::new(),
            failed: Mutex::default(),
        }
    }

    /// Has every connection wait until there is a pass.
    pub(super) fn with_pass(&self, pass: Arc<Pass>) {
        let _ = self.pass.set(pass);
    }

    /// Opens a connection to an address of the cluster.
    ///
    /// # Errors
    /// No pod has the address, or the API server does not let the caller through.
    pub(crate) async fn open(&self, address: &str) -> io::Result<DuplexStream> {
        // On the heap: what the API server's client makes of it is large.
        let opened = timeout(OPEN_DEADLINE, self.connect(address).boxed()).await.unwrap_or_else(|_| {
            let message = format!("the API server opened no way to {address} within {} s", OPEN_DEADLINE.as_secs());
            Err(said(ExitCode::Unreachable, message))
        });
        let mut failed = self.failed();
        *failed = None;
        opened.map_err(|error| {
            let text = format!("{error:#}");
            *failed = Some(error);
            io::Error::other(text)
        })
    }

    /// Why the last connection was not made, once.
    pub(crate) fn take_failure(&self) -> Option<anyhow::Error> {
        self.failed().take()
    }

    fn failed(&self) -> MutexGuard<'_, Option<anyhow::Error>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self, address: &str) -> anyhow::Result<DuplexStream> {
        let (place, port) = Place::parse(address).map_err(anyhow::Error::msg)?;
        if let Some(pass) = self.pass.get() {
            pass.ask_if_due().await?;
        }
        let (namespace, pod, port) = match place {
            Place::Pod(ip) => (self.namespace.clone(), self.pod(ip).await?, port),
            Place::Service { name, namespace } => {
                let (pod, port) = self.behind(&name, &namespace, port).await?;
                (namespace, pod, port)
            }
        };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let wanted = format!("to forward a port of pod {pod}");
        let forwarded = pods.portforward(&pod, &[port]).await;
        let mut forwarded =
            forwarded.map_err(|error| error::told(&error, &wanted, "create pods/portforward", &namespace))?;
        forwarded.take_stream(port).ok_or_else(|| anyhow::anyhow!("{wanted}: the API server gave no stream"))
    }

    /// The pod with this address. One that is not known may be new.
    async fn pod(&self, ip: IpAddr) -> anyhow::Result<String> {
        if let Some(name) = self.known(ip) {
            return Ok(name);
        }
        let pods = list(&self.client, &self.namespace, &self.selector).await?;
        *self.pods.lock().unwrap_or_else(PoisonError::into_inner) = by_address(&pods);
        let namespace = &self.namespace;
        self.known(ip).ok_or_else(|| anyhow::anyhow!("no worker's pod in namespace {namespace} has the address {ip}"))
    }

    fn known(&self, ip: IpAddr) -> Option<String> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner).get(&ip).cloned()
    }

    /// A pod behind a Service, a Ready one if there is any, and the port in it.
    async fn behind(&self, name: &str, namespace: &str, port: u16) -> anyhow::Result<(String, u16)> {
        let services: Api<Service> = Api::namespaced(self.client.clone(), namespace);
        let service = services.get(name).await;
        let wanted = format!("to find Service {name}");
        let service = service.map_err(|error| error::told(&error, &wanted, "get services", namespace))?;
        let spec = service.spec.unwrap_or_default();
        let labels = spec.selector.unwrap_or_default();
        let selector = labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",");
        let mut pods = list(&self.client, namespace, &selector).await?;
        pods.retain(is_running);
        pods.sort_by_key(|pod| !is_ready(pod));
        let pod = pods.first().ok_or_else(|| anyhow::anyhow!("no pod runs behind Service {name} of {namespace}"))?;
        let target = spec.ports.into_iter().flatten().find(|known| known.port == i32::from(port));
        let port = port_in(pod, target.and_then(|port| port.target_port), port);
        Ok((pod.metadata.name.clone().unwrap_or_default(), port))
    }
}

/// The number of the port in a pod that a Service's port stands for.
fn port_in(pod: &Pod, target: Option<IntOrString>, port: u16) -> u16 {
    let number = match target {
        Some(IntOrString::Int(number)) => Some(number),
        Some(IntOrString::String(name)) => {
            let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
            let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
            ports.find(|port| port.name.as_deref() == Some(&name)).map(|port| port.container_port)
        }
        None => None,
    };
    number.and_then(|number| u16::try_from(number).ok()).unwrap_or(port)
}

/// Pods by label.
///
/// # Errors
/// The API server does not tell.
pub(super) async fn list(client: &Client, namespace: &str, selector: &str) -> anyhow::Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let listed = pods.list(&ListParams::default().labels(selector)).boxed().await;
    Ok(listed.map_err(|error| error::told(&error, "to list pods", "list pods", namespace))?.items)
}

/// Whether a pod serves.
pub(super) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    is_running(pod) && conditions.into_iter().any(|it| it.type_ == "Ready" && it.status == "True")
}

fn is_running(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none()
        && pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
}

/// Address of a pod.
pub(super) fn address(pod: &Pod) -> Option<IpAddr> {
    pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()
}

fn by_address(pods: &[Pod]) -> HashMap<IpAddr, String> {
    pods.iter().filter_map(|pod| Some((address(pod)?, pod.metadata.name.clone()?))).collect()
}

/// The same, with TLS laid on top by the client library.
pub(super) struct Opener(pub(super) Arc<Forwarder>);

impl Open for Opener {
    fn open(&self, address: &str) -> BoxFuture<'static, io::Result<Box<dyn Stream>>> {
        let (forwarder, address) = (Arc::clone(&self.0), address.to_owned());
        async move { forwarder.open(&address).await.map(|stream| Box::new(stream) as Box<dyn Stream>) }.boxed()
    }
}

/// The same for the client library and for tonic.
pub(crate) struct Dialer(pub(crate) Arc<Forwarder>);

impl Dial for Dialer {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        let connector = connector(&self.0);
        async move { endpoint.connect_with_connector(connector).await }.boxed()
    }

    fn connect_lazy(&self, endpoint: Endpoint) -> Channel {
        endpoint.connect_with_connector_lazy(connector(&self.0))
    }
}

type Connected = BoxFuture<'static, io::Result<TokioIo<DuplexStream>>>;

fn connector(forwarder: &Arc<Forwarder>) -> tower::util::ServiceFn<impl FnMut(Uri) -> Connected + Send + use<>> {
    let forwarder = Arc::clone(forwarder);
    tower::service_fn(move |uri: Uri| {
        let forwarder = Arc::clone(&forwarder);
        let address = uri.authority().map(ToString::to_string).unwrap_or_default();
        async move { forwarder.open(&address).await.map(TokioIo::new) }.boxed()
    })
}

impl fmt::Debug for Forwarder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Forwarder").field("namespace", &self.namespace).field("selector", &self.selector).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, ip: &str, ready: &str) -> Pod {
        let pod = json!({
            "metadata": { "name": name },
            "spec": { "containers": [{ "name": "operator", "ports": [{ "name": "coordinator", "containerPort": 7450 }] }] },
            "status": { "phase": "Running", "podIP": ip, "conditions": [{ "type": "Ready", "status": ready }] },
        });
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn a_pod_is_known_by_its_address_and_ready_by_its_condition() {
        let pods = [pod("words-worker-0", "10.244.1.3", "True"), pod("words-worker-1", "fd00::9", "False")];
        let known = by_address(&pods);
        assert_eq!(known[&"fd00::9".parse::<IpAddr>().unwrap()], "words-worker-1");
        assert_eq!(pods.iter().map(is_ready).collect::<Vec<_>>(), [true, false]);
        let mut going = pod("words-worker-2", "10.244.1.4", "True");
        going.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        assert!(!is_ready(&going), "a pod on its way out takes nobody in");
    }

    #[test]
    fn a_port_of_a_service_is_found_in_the_pod_by_name_or_number() {
        let pod = pod("engram-operator-1", "10.244.1.5", "True");
        assert_eq!(port_in(&pod, Some(IntOrString::String("coordinator".into())), 7440), 7450);
        assert_eq!(port_in(&pod, Some(IntOrString::Int(8080)), 7440), 8080);
        assert_eq!(port_in(&pod, None, 7440), 7440);
    }
}
