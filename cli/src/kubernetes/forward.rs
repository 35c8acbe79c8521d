//! Connections to pods through the API server, as by `kubectl port-forward`, but without a local port: each connection is a
//! separate stream that no other local process can use.

use super::address::Address;
use super::error;
use super::token::ClientToken;
use crate::error::failure;
use engram_api::ExitCode;
use engram_client::{Dial, Stream, StreamOpener};
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

/// Deadline to open a connection: a few calls of the API server, which involves a kubelet.
const OPEN_DEADLINE: Duration = Duration::from_secs(10);

/// Opens connections to the pods of one cluster.
pub(crate) struct Forwarder {
    client: Client,
    namespace: String,
    /// Label selector of the worker pods.
    selector: String,
    /// Names of pods by address, from the last list.
    pods: Mutex<HashMap<IpAddr, String>>,
    /// Token of callers, for a cluster with TLS.
    token: OnceLock<Arc<ClientToken>>,
    /// Error of the last connection. The client library reports only that no worker was reached.
    last_error: Mutex<Option<anyhow::Error>>,
}

impl Forwarder {
    pub(super) fn new(client: Client, namespace: &str, selector: &str, pods: &[Pod]) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            selector: selector.to_owned(),
            pods: Mutex::new(by_address(pods)),
            token: OnceLock::new(),
            last_error: Mutex::default(),
        }
    }

    /// Makes every connection wait for a valid token.
    pub(super) fn set_token(&self, token: Arc<ClientToken>) {
        let _ = self.token.set(token);
    }

    /// Opens a connection to an address of the cluster.
    ///
    /// # Errors
    /// No pod has the address, or the API server rejects the request.
    pub(crate) async fn open(&self, address: &str) -> io::Result<DuplexStream> {
        // Boxed: the future of the Kubernetes client is large.
        let opened = timeout(OPEN_DEADLINE, self.connect(address).boxed()).await.unwrap_or_else(|_| {
            let message = format!("the API server did not connect to {address} within {} s", OPEN_DEADLINE.as_secs());
            Err(failure(ExitCode::Unreachable, message))
        });
        let mut last_error = self.last_error();
        *last_error = None;
        opened.map_err(|error| {
            let text = format!("{error:#}");
            *last_error = Some(error);
            io::Error::other(text)
        })
    }

    /// Takes the error of the last connection.
    pub(crate) fn take_failure(&self) -> Option<anyhow::Error> {
        self.last_error().take()
    }

    fn last_error(&self) -> MutexGuard<'_, Option<anyhow::Error>> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self, address: &str) -> anyhow::Result<DuplexStream> {
        let (address, port) = Address::parse(address).map_err(anyhow::Error::msg)?;
        if let Some(token) = self.token.get() {
            token.renew_if_due().await?;
        }
        let (namespace, pod, port) = match address {
            Address::Pod(ip) => (self.namespace.clone(), self.pod(ip).await?, port),
            Address::Service { name, namespace } => {
                let (pod, port) = self.service_pod(&name, &namespace, port).await?;
                (namespace, pod, port)
            }
        };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let action = format!("to forward a port of pod {pod}");
        let forwarded = pods.portforward(&pod, &[port]).await;
        let mut forwarded =
            forwarded.map_err(|error| error::describe(&error, &action, "create pods/portforward", &namespace))?;
        forwarded.take_stream(port).ok_or_else(|| anyhow::anyhow!("{action}: the API server returned no stream"))
    }

    /// Returns the name of the pod with this address. Lists the pods again if it is unknown.
    async fn pod(&self, ip: IpAddr) -> anyhow::Result<String> {
        if let Some(name) = self.cached_pod(ip) {
            return Ok(name);
        }
        let pods = list(&self.client, &self.namespace, &self.selector).await?;
        *self.pods.lock().unwrap_or_else(PoisonError::into_inner) = by_address(&pods);
        let namespace = &self.namespace;
        self.cached_pod(ip).ok_or_else(|| anyhow::anyhow!("no worker pod in namespace {namespace} has address {ip}"))
    }

    fn cached_pod(&self, ip: IpAddr) -> Option<String> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner).get(&ip).cloned()
    }

    /// Returns a running pod of a Service, preferably a ready one, and the target port.
    async fn service_pod(&self, name: &str, namespace: &str, port: u16) -> anyhow::Result<(String, u16)> {
        let services: Api<Service> = Api::namespaced(self.client.clone(), namespace);
        let service = services.get(name).await;
        let action = format!("to find Service {name}");
        let service = service.map_err(|error| error::describe(&error, &action, "get services", namespace))?;
        let spec = service.spec.unwrap_or_default();
        let labels = spec.selector.unwrap_or_default();
        let selector = labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",");
        let mut pods = list(&self.client, namespace, &selector).await?;
        pods.retain(is_running);
        pods.sort_by_key(|pod| !is_ready(pod));
        let pod = pods
            .first()
            .ok_or_else(|| anyhow::anyhow!("Service {name} in namespace {namespace} has no running pod"))?;
        let target = spec.ports.into_iter().flatten().find(|it| it.port == i32::from(port));
        let port = port_in(pod, target.and_then(|port| port.target_port), port);
        Ok((pod.metadata.name.clone().unwrap_or_default(), port))
    }
}

/// Returns the container port for the target port of a Service.
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

/// Lists pods by label.
pub(super) async fn list(client: &Client, namespace: &str, selector: &str) -> anyhow::Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let listed = pods.list(&ListParams::default().labels(selector)).boxed().await;
    Ok(listed.map_err(|error| error::describe(&error, "to list pods", "list pods", namespace))?.items)
}

/// Whether a pod is running and ready.
pub(super) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    is_running(pod) && conditions.into_iter().any(|it| it.type_ == "Ready" && it.status == "True")
}

fn is_running(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none()
        && pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
}

/// Returns the IP address of a pod.
pub(super) fn address(pod: &Pod) -> Option<IpAddr> {
    pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()
}

fn by_address(pods: &[Pod]) -> HashMap<IpAddr, String> {
    pods.iter().filter_map(|pod| Some((address(pod)?, pod.metadata.name.clone()?))).collect()
}

/// Opens forwarded streams for the client library, which adds TLS.
pub(super) struct Opener(pub(super) Arc<Forwarder>);

impl StreamOpener for Opener {
    fn open(&self, address: &str) -> BoxFuture<'static, io::Result<Box<dyn Stream>>> {
        let (forwarder, address) = (Arc::clone(&self.0), address.to_owned());
        async move { forwarder.open(&address).await.map(|stream| Box::new(stream) as Box<dyn Stream>) }.boxed()
    }
}

/// Opens forwarded channels for the client library and for tonic.
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
    fn pods_are_identified_by_address_and_ready_by_condition() {
        let pods = [pod("words-worker-0", "10.244.1.3", "True"), pod("words-worker-1", "fd00::9", "False")];
        let names = by_address(&pods);
        assert_eq!(names[&"fd00::9".parse::<IpAddr>().unwrap()], "words-worker-1");
        assert_eq!(pods.iter().map(is_ready).collect::<Vec<_>>(), [true, false]);
        let mut terminating = pod("words-worker-2", "10.244.1.4", "True");
        terminating.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        assert!(!is_ready(&terminating), "a terminating pod is not ready");
    }

    #[test]
    fn service_ports_resolve_to_container_ports_by_name_or_number() {
        let pod = pod("engram-operator-1", "10.244.1.5", "True");
        assert_eq!(port_in(&pod, Some(IntOrString::String("coordinator".into())), 7440), 7450);
        assert_eq!(port_in(&pod, Some(IntOrString::Int(8080)), 7440), 8080);
        assert_eq!(port_in(&pod, None, 7440), 7440);
    }
}
