//! The operator as the owner of `/scale`, next to another writer, and as a scaler of KEDA.

use super::{
    CLUSTERS, REPLICAS, SETS, edit, in_sync, is_ready_cluster, map, page, primaries, start_worker, status,
    wait_for_status,
};
use crate::MERGE;
use crate::cluster::Cluster;
use crate::process::until;
use crate::suites::faults::clients::runtime;
use crate::suites::helpers::WHILE;
use anyhow::{Context, Result, ensure};
use engram_proto::keda::external_scaler_client::ExternalScalerClient;
use engram_proto::keda::{GetMetricsRequest, ScaledObjectRef};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use tonic::Code;
use tonic::transport::Endpoint;

const NAME: &str = "busy";

/// Check: the operator corrects a number of workers outside of the limits through `/scale`, reports another writer instead of fighting it,
/// and answers KEDA on both replicas.
pub(super) fn scales(cluster: &Cluster) -> Result<String> {
    let autoscaling = json!({
        "mode": "Operator", "minWorkers": 3, "maxWorkers": 5, "operationsPerWorker": 1000, "interval": "10s",
    });
    let busy = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": NAME },
        "spec": {
            "workers": 2, "replicationFactor": 2, "partitions": 4, "capacity": { "memories": 1000 },
            "gpu": { "mode": "Disabled" }, "storage": { "ephemeral": true }, "tls": { "mode": "Disabled" },
            "autoscaling": autoscaling,
        },
    });
    cluster.api().create(CLUSTERS, &busy)?;
    let path = format!("{CLUSTERS}/{NAME}");
    let object = until("the operator to scale to the minimum", WHILE, || {
        Ok(Some(cluster.api().get(&path)?).filter(|object| object["spec"]["workers"] == 3))
    })?;
    let writers = object["metadata"]["managedFields"].as_array().into_iter().flatten();
    let by_scale =
        |entry: &&Value| entry["subresource"] == "scale" && entry["manager"] == "engram-operator-autoscaling";
    ensure!(writers.clone().any(|entry| by_scale(&entry)), "{:#}", object["metadata"]["managedFields"]);
    wait_for_reason(cluster, "OutsideLimits")?;
    let decisions = until("the decisions in a ConfigMap", WHILE, || {
        let map = cluster.api().get(&format!("/api/v1/namespaces/default/configmaps/{NAME}-autoscaling")).ok();
        Ok(map.and_then(|map| map["data"]["decisions.csv"].as_str().map(str::to_owned)))
    })?;
    ensure!(decisions.contains(",2,3,") && decisions.contains(",OutsideLimits,\"Scale from 2 to 3"), "{decisions}");

    let by_other = json!({ "spec": { "replicas": 4 } });
    cluster.api().patch(&format!("{path}/scale"), MERGE, &by_other)?;
    let message = wait_for_reason(cluster, "Conflict")?;
    ensure!(message.contains("set spec.workers to 4") && message.contains("mode External"), "{message}");
    ensure!(cluster.api().get(&path)?["spec"]["workers"] == 4, "the operator fights another writer");

    let runtime = runtime(cluster)?;
    for (_, port, _) in REPLICAS {
        until("KEDA to get the decision", WHILE, || runtime.block_on(runtime.spawn(ask(port)))?.map(Some))?;
    }
    let is_exported = |port: u16| {
        let page = page(cluster, port, "metrics")?;
        let names = ["desired_workers{", "decision{"].map(|name| format!("engram_operator_autoscaling_{name}"));
        Ok::<_, anyhow::Error>(names.iter().all(|name| page.lines().any(|line| line.starts_with(name))))
    };
    let exported = REPLICAS.iter().map(|(_, _, port)| is_exported(*port)).collect::<Result<Vec<_>>>()?;
    ensure!(exported.contains(&true), "no replica exports the decision");
    cluster.api().delete(&path, None)?;
    Ok(String::new())
}

/// Check: a worker that the operator removes gives its replicas away first, however long that takes, and is reported as draining.
pub(super) fn drains(cluster: &Cluster) -> Result<String> {
    const REMOVED: u64 = 2;
    let of = |workers: u64| {
        json!({ "autoscaling": {
            "mode": "Operator", "minWorkers": workers, "maxWorkers": workers, "operationsPerWorker": 1000, "interval": "10s",
        } })
    };
    let replicas =
        || Ok::<_, anyhow::Error>(cluster.api().get(&format!("{SETS}/words-worker"))?["spec"]["replicas"].take());
    // Nothing can take its replicas over.
    cluster.end_daemon(1, "worker-0", Signal::SIGKILL)?;
    until("other primaries", WHILE, || Ok((!primaries(&map(cluster)?).contains(&0)).then_some(())))?;
    edit(cluster, &of(REMOVED))?;
    wait_for_status(cluster, "words", "draining one of its workers", |status| {
        (status["workers"]["draining"] == 1 && status["autoscaling"]["desiredWorkers"] == REMOVED).then_some(())
    })?;
    ensure!(cluster.api().get(&format!("{CLUSTERS}/words"))?["spec"]["workers"] == REMOVED, "written by another");
    ensure!(replicas()? == 3, "a worker was removed with its replicas");
    start_worker(cluster, 0)?;
    let holding = until("the StatefulSet to shrink", WHILE, || {
        let holding = in_sync(&map(cluster)?).iter().filter(|members| members.contains(&REMOVED)).count();
        Ok((replicas()? == REMOVED).then_some(holding))
    })?;
    ensure!(holding == 0, "it was removed with {holding} replicas");

    cluster.end_daemon(1, &format!("worker-{REMOVED}"), Signal::SIGKILL)?;
    fs::remove_dir_all(cluster.path("volumes").join(format!("words-{REMOVED}")))?;
    edit(cluster, &of(3))?;
    until("the StatefulSet to grow", WHILE, || Ok((replicas()? == 3).then_some(())))?;
    start_worker(cluster, REMOVED)?;
    wait_for_status(cluster, "words", "Ready again", is_ready_cluster)?;
    edit(cluster, &json!({ "autoscaling": null }))?;
    cluster.api().delete("/api/v1/namespaces/default/configmaps/words-autoscaling", None)?;
    Ok(String::new())
}

/// Waits for a reason of the last decision, and returns its message.
fn wait_for_reason(cluster: &Cluster, reason: &str) -> Result<String> {
    let mut last = Value::Null;
    let found = until(&format!("a decision because of {reason}"), WHILE, || {
        last = status(cluster, NAME)?["autoscaling"].take();
        Ok((last["reason"] == reason).then(|| last["message"].as_str().unwrap_or_default().to_owned()))
    });
    found.with_context(|| format!("{last:#}"))
}

/// Makes the calls of KEDA.
async fn ask(port: u16) -> Result<()> {
    let channel = Endpoint::from_shared(format!("http://127.0.0.1:{port}"))?.connect().await?;
    let mut keda = ExternalScalerClient::new(channel);
    let object = |name: &str| ScaledObjectRef {
        name: "scaled".into(),
        namespace: "default".into(),
        scaler_metadata: HashMap::from([("learnerCluster".to_owned(), name.to_owned())]),
    };
    ensure!(keda.is_active(object(NAME)).await?.into_inner().result, "it is not active");
    let spec = keda.get_metric_spec(object(NAME)).await?.into_inner().metric_specs;
    ensure!(spec.len() == 1 && spec[0].target_size_float == 1.0, "{spec:?}");
    let metric_name = spec[0].metric_name.clone();
    let metrics = GetMetricsRequest { scaled_object_ref: Some(object(NAME)), metric_name };
    let values = keda.get_metrics(metrics).await?.into_inner().metric_values;
    ensure!(values.len() == 1 && (3.0..=5.0).contains(&values[0].metric_value_float), "{values:?}");
    let mut active = keda.stream_is_active(object(NAME)).await?.into_inner();
    ensure!(active.message().await?.is_some_and(|it| it.result), "the stream says nothing");
    let mut specs = keda.stream_metric_spec(object(NAME)).await?.into_inner();
    ensure!(specs.message().await?.is_some_and(|it| it.metric_specs == spec), "the stream has another target");
    let unknown = keda.get_metric_spec(object("nothing")).await.err().context("an unknown cluster has a metric")?;
    ensure!(unknown.code() == Code::NotFound && unknown.message().contains("default/nothing"), "{unknown}");
    Ok(())
}
