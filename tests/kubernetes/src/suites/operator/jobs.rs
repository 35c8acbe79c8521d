//! Runs of kind `Job`: the Job of a run, and what its status says of pods whose containers are stand-ins.

use super::runs::{RUNS, delete, run_of, suspend, wait_for_run};
use super::{TAKEOVER, condition};
use crate::cluster::Cluster;
use crate::http::STRATEGIC;
use crate::process::until;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

const JOBS: &str = "/apis/batch/v1/namespaces/default/jobs";
const PODS: &str = "/api/v1/namespaces/default/pods";

fn begin(cluster: &Cluster, name: &str, labels: &Value) -> Result<()> {
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": name, "labels": labels },
        "spec": {
            "clusterRef": { "name": "words" }, "kind": "Job",
            "job": { "image": "local.test/train:1", "command": ["train"], "replicas": 2, "gracePeriodSeconds": 1 },
        },
    });
    cluster.api().create(RUNS, &object).map(drop)
}

fn job_of(cluster: &Cluster, name: &str) -> Result<Value> {
    until("the Job", TAKEOVER, || cluster.api().find(&format!("{JOBS}/{name}")))
}

/// Waits for the running pod of an index.
fn pod(cluster: &Cluster, run: &str, index: &str) -> Result<Value> {
    until("the pod to run", TAKEOVER, || {
        let pods = cluster.api().get(&format!("{PODS}?labelSelector=engram.dev%2Frun%3D{run}"))?;
        let of_index = |pod: &&Value| {
            let annotations = &pod["metadata"]["annotations"];
            annotations["batch.kubernetes.io/job-completion-index"] == index && pod["status"]["phase"] == "Running"
        };
        Ok(pods["items"].as_array().context("no list")?.iter().find(of_index).cloned())
    })
}

/// Ends the container of a pod.
fn end(cluster: &Cluster, pod: &Value, code: i32, message: &str) -> Result<()> {
    let name = pod["metadata"]["name"].as_str().context("no name")?;
    let time = pod["metadata"]["creationTimestamp"].clone();
    let reason = if code == 0 { "Completed" } else { "Error" };
    let terminated =
        json!({ "exitCode": code, "reason": reason, "message": message, "startedAt": time, "finishedAt": time });
    let container = json!({
        "name": "main", "image": "local.test/train:1", "imageID": "fake", "ready": false, "restartCount": 0,
        "state": { "terminated": terminated },
    });
    let phase = if code == 0 { "Succeeded" } else { "Failed" };
    let conditions = ["Ready", "ContainersReady"].map(|it| json!({ "type": it, "status": "False" }));
    let status = json!({ "status": { "phase": phase, "containerStatuses": [container], "conditions": conditions } });
    cluster.api().patch(&format!("{PODS}/{name}/status"), STRATEGIC, &status).map(drop)
}

pub(super) fn reports(cluster: &Cluster) -> Result<String> {
    begin(cluster, "train", &json!({}))?;
    let job = job_of(cluster, "train")?;
    let owner = &job["metadata"]["ownerReferences"][0];
    let uid = run_of(cluster, "train")?["metadata"]["uid"].take();
    ensure!(owner["kind"] == "LearnerRun" && owner["uid"] == uid, "{owner:#}");
    ensure!(job["spec"]["completionMode"] == "Indexed" && job["spec"]["parallelism"] == 2, "{job:#}");
    let (first, second) = (pod(cluster, "train", "0")?, pod(cluster, "train", "1")?);
    wait_for_run(cluster, "train", "in progress", |it| it["phase"] == "Running" && it["job"]["active"] == 2)?;
    end(cluster, &first, 0, "")?;
    wait_for_run(cluster, "train", "half done", |it| it["progress"]["epoch"] == 1 && it["progress"]["total"] == 2)?;
    end(cluster, &second, 3, "first\nno data\n")?;
    let failed = wait_for_run(cluster, "train", "Failed", |it| it["phase"] == "Failed")?;
    let process = &failed["job"]["processes"][1];
    ensure!(process["exitCode"] == 3 && process["logTail"] == "first\nno data", "{failed:#}");
    let (_, _, message) = condition(&failed, "Failed").context("no condition")?;
    ensure!(message.starts_with("process 1 exited with code 3: no data"), "{message}");

    // Suspended, it has no pods; resumed, it has new ones. A queue starts a Job itself.
    begin(cluster, "pauses", &json!({}))?;
    pod(cluster, "pauses", "0")?;
    suspend(cluster, "pauses", true)?;
    wait_for_run(cluster, "pauses", "suspended", |it| it["phase"] == "Suspended" && it["job"]["active"] == 0)?;
    suspend(cluster, "pauses", false)?;
    wait_for_run(cluster, "pauses", "in progress again", |it| it["phase"] == "Running" && it["job"]["active"] == 2)?;
    begin(cluster, "queued", &json!({ "kueue.x-k8s.io/queue-name": "gpus" }))?;
    let queued = job_of(cluster, "queued")?;
    ensure!(queued["spec"]["suspend"] == true, "{queued:#}");
    ensure!(queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus", "{queued:#}");
    wait_for_run(cluster, "queued", "held by its queue", |it| it["phase"] == "Suspended")?;
    for name in ["train", "pauses", "queued"] {
        delete(cluster, name)?;
        until("its Job to be deleted with it", TAKEOVER, || {
            Ok(cluster.api().find(&format!("{JOBS}/{name}"))?.is_none().then_some(()))
        })?;
    }
    Ok(String::new())
}
