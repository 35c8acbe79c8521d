//! Runs of kind `Job`: the Job of a run. This control plane has no controller of Jobs, so that no pod is started.

use super::TAKEOVER;
use super::runs::{RUNS, delete, run_of, suspend, wait_for_run};
use crate::cluster::Cluster;
use crate::process::until;
use anyhow::{Result, ensure};
use serde_json::{Value, json};

const JOBS: &str = "/apis/batch/v1/namespaces/default/jobs";

fn begin(cluster: &Cluster, name: &str, labels: &Value) -> Result<()> {
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": name, "labels": labels },
        "spec": {
            "clusterRef": { "name": "words" }, "kind": "Job",
            "job": { "image": "local.test/train:1", "command": ["train"], "replicas": 2 },
        },
    });
    cluster.api().create(RUNS, &object).map(drop)
}

/// Waits for the Job of a run that is suspended, or is not.
fn job_of(cluster: &Cluster, name: &str, is_suspended: bool) -> Result<Value> {
    until("the Job", TAKEOVER, || {
        let job = cluster.api().find(&format!("{JOBS}/{name}"))?;
        Ok(job.filter(|job| job["spec"]["suspend"] == is_suspended))
    })
}

pub(super) fn creates(cluster: &Cluster) -> Result<String> {
    begin(cluster, "train", &json!({}))?;
    let job = job_of(cluster, "train", false)?;
    let owner = &job["metadata"]["ownerReferences"][0];
    let uid = run_of(cluster, "train")?["metadata"]["uid"].take();
    ensure!(owner["kind"] == "LearnerRun" && owner["uid"] == uid, "{owner:#}");
    ensure!(job["spec"]["completionMode"] == "Indexed" && job["spec"]["parallelism"] == 2, "{job:#}");
    wait_for_run(cluster, "train", "in progress", |it| it["phase"] == "Running" && it["progress"]["total"] == 2)?;
    suspend(cluster, "train", true)?;
    job_of(cluster, "train", true)?;
    wait_for_run(cluster, "train", "suspended", |it| it["phase"] == "Suspended")?;
    suspend(cluster, "train", false)?;
    job_of(cluster, "train", false)?;
    wait_for_run(cluster, "train", "in progress again", |it| it["phase"] == "Running")?;
    // A queue starts a Job itself.
    begin(cluster, "queued", &json!({ "kueue.x-k8s.io/queue-name": "gpus" }))?;
    let queued = job_of(cluster, "queued", true)?;
    ensure!(queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus", "{queued:#}");
    wait_for_run(cluster, "queued", "held by its queue", |it| it["phase"] == "Suspended")?;
    for name in ["train", "queued"] {
        delete(cluster, name)?;
        until("its Job to be deleted with it", TAKEOVER, || {
            Ok(cluster.api().find(&format!("{JOBS}/{name}"))?.is_none().then_some(()))
        })?;
    }
    Ok(String::new())
}
