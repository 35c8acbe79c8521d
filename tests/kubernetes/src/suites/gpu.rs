//! A GPU that a pod is given and its worker cannot use, as on a node whose driver is not there: people are told, and nothing else changes.
//!
//! Part of the suite of the command line, beside its cluster.

use super::command::{NAMESPACE, engram, read};
use super::look::WHILE;
use crate::cluster::Cluster;
use crate::http::MERGE;
use crate::process::until;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

const OBJECTS: &str = "/apis/engram.dev/v1alpha1/namespaces/outside/learnerclusters";
const OBJECT: &str = "/apis/engram.dev/v1alpha1/namespaces/outside/learnerclusters/devices";
const POD: &str = "/api/v1/namespaces/outside/pods/devices-worker-0";
const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/outside/events";
/// A node that offers what it does not have.
const NODE: u8 = 3;

/// Check: the condition and an event say that the GPU is not used, and why.
pub(super) fn told(cluster: &Cluster) -> Result<String> {
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
    until("the operator to know of the node's offer", WHILE, || {
        let found = condition(cluster)?.context("nothing is told of GPUs")?;
        if found["reason"] == "NotOffered" {
            // Of another spec it decides anew.
            threshold += 1;
            let change = json!({ "spec": { "gpu": { "threshold": threshold } } });
            cluster.api().patch(OBJECT, MERGE, &change)?;
        }
        Ok((found["reason"] == "Offered").then_some(()))
    })?;
    cluster.api().patch(OBJECT, MERGE, &json!({ "spec": { "paused": false } }))?;
    let condition = until("the condition to tell of the GPU", WHILE, || {
        let found = condition(cluster)?;
        Ok(found.filter(|found| found["status"] == "False" && found["reason"] == "GpuNotUsed"))
    })?;
    let message = condition["message"].as_str().unwrap_or_default();
    ensure!(message.contains(": no CUDA driver found"), "{condition}");
    let pod = cluster.api().get(POD)?;
    let container = &pod["spec"]["containers"][0];
    ensure!(container["resources"]["limits"]["nvidia.com/gpu"] == "1", "{container}");
    until("an event", WHILE, || {
        let events = cluster.api().get(EVENTS)?;
        let events = events["items"].as_array().context("no list of events")?;
        let is_told = |event: &&Value| {
            event["reason"] == "GpuNotUsed" && event["type"] == "Warning" && event["regarding"]["name"] == "devices"
        };
        Ok(events.iter().find(is_told).map(drop))
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
