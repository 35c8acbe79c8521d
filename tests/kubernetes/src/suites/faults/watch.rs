//! What is seen of the cluster of the trials through the API server: its status, its map, its pods, and when it is whole.

use super::TRIALS;
use super::map::{Map, Process};
use crate::cluster::Cluster;
use crate::process::until;
use crate::suites::helpers::{PODS, is_ready};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::{Duration, Instant};

pub(super) const CLUSTERS: &str = "/apis/engram.dev/v1alpha1/namespaces/default/learnerclusters";
const MAPS: &str = "/apis/engram.dev/v1alpha1/namespaces/default/partitionmaps";
const OPERATORS: &str =
    "/api/v1/namespaces/engram-system/pods?labelSelector=app.kubernetes.io%2Fname%3Dengram-operator";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/engram-system/leases/engram-operator";
/// Copies of each partition.
pub(super) const COPIES: usize = 2;
/// How long copies may take to come back before a fault has failed.
pub(super) const WHOLE: Duration = Duration::from_secs(90);
/// How long nodes, pods and status may take after that: nodes come back slowly after an outage of the API server.
const SETTLED: Duration = Duration::from_secs(180);

pub(super) fn status(cluster: &Cluster) -> Result<Value> {
    Ok(cluster.api().get(&format!("{CLUSTERS}/{TRIALS}"))?["status"].take())
}

/// A condition of a status: whether it is true, and what it says.
pub(super) fn condition(status: &Value, kind: &str) -> (bool, String) {
    let found = status["conditions"].as_array().into_iter().flatten().find(|it| it["type"] == kind);
    let said = found.map_or_else(|| format!("no {kind}"), |it| format!("{kind}: {} {}", it["reason"], it["message"]));
    (found.is_some_and(|it| it["status"] == "True"), said)
}

pub(super) fn map(cluster: &Cluster) -> Result<Map> {
    Map::read(&cluster.api().get(&format!("{MAPS}/{TRIALS}"))?)
}

/// The worker pods, by ordinal.
pub(super) fn pods(cluster: &Cluster) -> Result<Vec<Value>> {
    let list = cluster.api().get(&format!("{PODS}?labelSelector=engram.dev%2Fcluster%3D{TRIALS}"))?;
    let mut pods = list["items"].as_array().cloned().context("no list of pods")?;
    pods.sort_by_key(ordinal);
    Ok(pods)
}

/// The place of a worker's pod.
pub(super) fn ordinal(pod: &Value) -> u32 {
    let name = pod["metadata"]["name"].as_str().and_then(|it| it.rsplit_once('-'));
    name.and_then(|(_, number)| number.parse().ok()).unwrap_or(u32::MAX)
}

/// What must not change where nothing is to be restarted: each pod's identity, and how often its container was started.
pub(super) fn identities(cluster: &Cluster) -> Result<Vec<(Value, Value)>> {
    let of =
        |pod: &Value| (pod["metadata"]["uid"].clone(), pod["status"]["containerStatuses"][0]["restartCount"].clone());
    Ok(pods(cluster)?.iter().map(of).collect())
}

/// Pods of the operator that are not on their way out.
pub(super) fn operators(cluster: &Cluster) -> Result<Vec<Value>> {
    let list = cluster.api().get(OPERATORS)?;
    let pods = list["items"].as_array().context("no list of pods")?;
    Ok(pods.iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null()).cloned().collect())
}

/// The pod of the operator that holds the Lease.
pub(super) fn leader(cluster: &Cluster) -> Result<Value> {
    let lease = cluster.api().get(LEASE)?;
    let holder =
        lease["spec"]["holderIdentity"].as_str().and_then(|it| it.split_once('_')).context("there is no leader")?.0;
    let found = operators(cluster)?.into_iter().find(|pod| pod["metadata"]["name"] == holder);
    found.with_context(|| format!("the leader {holder} is no pod"))
}

/// Waits until every partition is served with all its copies, none of them of a process that has gone; how long that took from `began`.
pub(super) fn whole(cluster: &Cluster, began: Instant, gone: &[Process]) -> Result<Duration> {
    until("all copies to be in sync", WHOLE, || match map(cluster)?.wanting(COPIES, gone) {
        None => Ok(Some(began.elapsed())),
        Some(wanting) => anyhow::bail!(wanting),
    })
}

/// Whether each of these pods' workers serves all that it should, as it answers a kubelet that asks.
pub(super) fn ready_by_themselves(cluster: &Cluster, pods: &[Value]) -> Result<()> {
    for pod in pods {
        let address = pod["status"]["podIP"].as_str().context("the pod has no address")?;
        let url = format!("http://{address}:9090/readyz");
        let asked = cluster.in_network(1, "curl", ["-sSf", "--max-time", "5", "--noproxy", "*", &url]);
        asked.with_context(|| format!("{} does not say that it is ready", pod["metadata"]["name"]))?;
    }
    Ok(())
}

/// Waits until all is as if nothing had been: nodes, pods, the operator and what the cluster's status says.
pub(super) fn settled(cluster: &Cluster, workers: usize) -> Result<()> {
    settled_but(cluster, workers, || Ok(()))
}

/// Waits in the same way, while an invariant must hold at every poll.
pub(super) fn settled_but(cluster: &Cluster, workers: usize, holds: impl Fn() -> Result<()>) -> Result<()> {
    let mut broken = Ok(());
    until("the cluster to be idle", SETTLED, || {
        broken = holds();
        if broken.is_err() {
            return Ok(Some(()));
        }
        // What takes longest comes first: an early poll costs the busy API server little.
        if let Some(wanting) = map(cluster)?.wanting(COPIES, &[]) {
            anyhow::bail!(wanting);
        }
        let pods = pods(cluster)?;
        ensure!(pods.len() == workers, "{} of {workers} worker pods", pods.len());
        for pod in pods.iter().chain(&operators(cluster)?) {
            let stays = pod["metadata"]["deletionTimestamp"].is_null();
            ensure!(stays && is_ready(pod), "pod {} is not Ready", pod["metadata"]["name"]);
        }
        let status = status(cluster)?;
        for kind in ["Ready", "Replicated"] {
            let (holds, said) = condition(&status, kind);
            ensure!(holds, said);
        }
        ensure!(
            status["workers"]["ready"] == workers,
            "the status counts {} Ready workers",
            status["workers"]["ready"]
        );
        for node in 1..=4 {
            let found = cluster.api().get(&format!("/api/v1/nodes/n{node}"))?;
            ensure!(is_ready(&found), "node n{node} is not Ready");
        }
        Ok(Some(()))
    })?;
    broken
}
