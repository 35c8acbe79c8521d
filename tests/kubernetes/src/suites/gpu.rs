//! A GPU that is allocated to a pod but unusable, as on a node without a driver: it is reported, and nothing else changes.
//!
//! Part of the suite of the command line.

use super::command::{NAMESPACE, engram, read};
use super::helpers::WHILE;
use crate::cluster::Cluster;
use crate::http::MERGE;
use crate::process::until;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

const OBJECTS: &str = "/apis/engram.dev/v1alpha1/namespaces/outside/learnerclusters";
const OBJECT: &str = "/apis/engram.dev/v1alpha1/namespaces/outside/learnerclusters/devices";
const POD: &str = "/api/v1/namespaces/outside/pods/devices-worker-0";
const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/outside/events";
/// A node that offers GPUs that it does not have.
const NODE: u8 = 3;

/// Checks that a condition and an event report the unusable GPU.
pub(super) fn reported(cluster: &Cluster) -> Result<String> {
    cluster.offer_gpus(NODE, 2)?;
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": "devices", "namespace": NAMESPACE },
        "spec": {
            "workers": 2, "replicationFactor": 2, "partitions": 4, "gpu": { "mode": "Auto" }, "paused": true,
            "capacity": { "memories": 1_000 }, "storage": { "ephemeral": true },
        },
    });
    cluster.api().create(OBJECTS, &object)?;
    let mut threshold = 1;
    until("the operator to see the node's GPUs", WHILE, || {
        let found = condition(cluster)?.context("no condition GpuAvailable")?;
        if found["reason"] == "NoGpuNodes" {
            // The operator decides again for a new generation.
            threshold += 1;
            let change = json!({ "spec": { "gpu": { "threshold": threshold } } });
            cluster.api().patch(OBJECT, MERGE, &change)?;
        }
        Ok((found["reason"] == "GpuNodesAvailable").then_some(()))
    })?;
    cluster.api().patch(OBJECT, MERGE, &json!({ "spec": { "paused": false } }))?;
    let condition = until("condition GpuAvailable to be False", WHILE, || {
        let found = condition(cluster)?;
        Ok(found.filter(|found| found["status"] == "False" && found["reason"] == "GpuUnusable"))
    })?;
    let message = condition["message"].as_str().unwrap_or_default();
    ensure!(message.contains(": no CUDA driver found"), "{condition}");
    let pod = cluster.api().get(POD)?;
    let container = &pod["spec"]["containers"][0];
    ensure!(container["resources"]["limits"]["nvidia.com/gpu"] == "1", "{container}");
    until("an event", WHILE, || {
        let events = cluster.api().get(EVENTS)?;
        let events = events["items"].as_array().context("no list of events")?;
        let is_reported = |event: &&Value| {
            event["reason"] == "GpuUnusable" && event["type"] == "Warning" && event["regarding"]["name"] == "devices"
        };
        Ok(events.iter().find(is_reported).map(drop))
    })?;
    // The coordinators have two clusters now.
    until("its partitions to be listed", WHILE, || {
        let listed = engram(cluster, &["--cluster", "devices", "list", "partitions", "-o", "json"])?;
        let listed = read(&listed)?["items"].as_array().map(Vec::len);
        ensure!(listed == Some(4), "{listed:?} partitions are listed of 4");
        Ok(Some(()))
    })?;
    cluster.api().delete(OBJECT, None)?;
    cluster.offer_gpus(NODE, 0)?;
    Ok(message.to_owned())
}

fn condition(cluster: &Cluster) -> Result<Option<Value>> {
    let object = cluster.api().get(OBJECT)?;
    let conditions = object["status"]["conditions"].as_array();
    Ok(conditions.into_iter().flatten().find(|it| it["type"] == "GpuAvailable").cloned())
}
