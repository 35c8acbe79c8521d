//! Helpers of all suites: StatefulSets, pods and Services of the namespace `default`.

use crate::cluster::Cluster;
use crate::process::until;
use anyhow::{Context, Result};
use nix::sched::{CloneFlags, setns};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

pub(super) const PODS: &str = "/api/v1/namespaces/default/pods";
/// Deadline of a short wait, on a busy machine.
pub(super) const WHILE: Duration = Duration::from_secs(60);

/// Creates a runtime in the network namespace of node 1, where operators run as processes.
pub(super) fn runtime(cluster: &Cluster) -> Result<Runtime> {
    let network = Arc::new(cluster.network_namespace(1)?);
    let enter = move || setns(&*network, CloneFlags::CLONE_NEWNET).expect("a thread may go to the network of a node");
    let mut runtime = Builder::new_multi_thread();
    runtime.worker_threads(1).enable_all().on_thread_start(enter).build().context("failed to start a thread")
}

/// Waits until a StatefulSet is rolled out.
pub(super) fn ready(cluster: &Cluster, set: &str) -> Result<()> {
    until(&format!("three Ready pods of {set}"), WHILE, || {
        let found = cluster.api().get(&format!("/apis/apps/v1/namespaces/default/statefulsets/{set}"))?;
        let (wanted, status) = (&found["spec"]["replicas"], &found["status"]);
        let seen = status["observedGeneration"] == found["metadata"]["generation"];
        Ok((seen && status["readyReplicas"] == *wanted).then_some(()))
    })
}

pub(super) fn pod(cluster: &Cluster, name: &str) -> Result<Value> {
    cluster.api().get(&format!("{PODS}/{name}"))
}

pub(super) fn uid(pod: &Value) -> String {
    pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned()
}

pub(super) fn is_ready(pod: &Value) -> bool {
    pod["status"]["conditions"]
        .as_array()
        .is_some_and(|it| it.iter().any(|it| it["type"] == "Ready" && it["status"] == "True"))
}

pub(super) fn wait_for_pod(cluster: &Cluster, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Result<Value> {
    until(&format!("{name} to be {what}"), WHILE, || Ok(cluster.api().find(&format!("{PODS}/{name}"))?.filter(&holds)))
}

pub(super) fn service_address(cluster: &Cluster, name: &str) -> Result<String> {
    service_in(cluster, "default", name)
}

pub(super) fn service_in(cluster: &Cluster, namespace: &str, name: &str) -> Result<String> {
    let service = cluster.api().get(&format!("/api/v1/namespaces/{namespace}/services/{name}"))?;
    Ok(service["spec"]["clusterIP"].as_str().context("the Service has no address")?.to_owned())
}

/// Checks that three pods with anti-affinity run on different nodes.
pub(super) fn spread(cluster: &Cluster) -> Result<String> {
    cluster.apply(include_str!("../../manifests/spread.yaml"))?;
    ready(cluster, "sp")?;
    Ok(String::new())
}

/// Checks that a deleted pod is recreated.
pub(super) fn recreated(cluster: &Cluster) -> Result<String> {
    let before = uid(&pod(cluster, "sp-1")?);
    cluster.api().delete(&format!("{PODS}/sp-1"), None)?;
    wait_for_pod(cluster, "sp-1", "new and Ready", |it| uid(it) != before && is_ready(it))?;
    Ok(String::new())
}
