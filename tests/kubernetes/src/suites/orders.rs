//! What a person orders of a cluster in Kubernetes when nothing automatic is safe: by rights of their own, and on record.
//!
//! Part of the suite of the command line, on its cluster, whose data lies in the pods. What is destroyed here stays so.

use super::command::{
    CONFLICT, DENIED, NAME, NAMESPACE, PODS, engram, kubeconfig, pod, read, ready, refused, started, token,
};
use super::helpers::{WHILE, uid};
use crate::cluster::Cluster;
use crate::process::until;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const MAP: &str = "/apis/engram.dev/v1alpha1/namespaces/outside/partitionmaps/words";
const ROLES: &str = "rbac.authorization.k8s.io";
/// A user who may edit these namespaces.
const KEEPER: &str = "keeper";
/// Who is left behind.
const LEFT: u64 = 2;

/// Check: a lost map is rebuilt, proven, and nothing is lost.
pub(super) fn rebuilt(cluster: &Cluster) -> Result<String> {
    let ranked = engram(cluster, &["rank", "-k", "40"])?;
    let before = cluster.api().get(MAP)?;
    cluster.api().delete(MAP, None)?;
    let shown = until("the coordinator to know", WHILE, || {
        read(&engram(cluster, &["partition", "rebuild-map", "-o", "json"])?).map(Some)
    })?;
    let proven = |it: &Value| it["items"].as_array().is_some_and(|it| it.iter().all(|it| it["proven"] == true));
    ensure!(proven(&shown), "{shown}");
    ensure!(cluster.api().find(MAP)?.is_none(), "it was written without an order");
    engram(cluster, &["partition", "rebuild-map", "--yes"])?;
    let after = cluster.api().get(MAP)?;
    for field in ["labels", "ownerReferences"] {
        let (was, is) = (&before["metadata"][field], &after["metadata"][field]);
        ensure!(was == is, "{field}: {was} before, {is} after");
    }
    let version = |map: &Value| map["spec"]["version"].as_u64().unwrap_or_default();
    ensure!(version(&after) > version(&before), "version {} follows {}", version(&after), version(&before));
    ready(cluster)?;
    let output = engram(cluster, &["rank", "-k", "40"])?;
    ensure!(output == ranked, "{ranked} before, {output} after");
    Ok(String::new())
}

/// Check: all in-sync replicas of a partition are destroyed, and an administrator promotes a lagging one.
pub(super) fn promoted(cluster: &Cluster) -> Result<String> {
    let keeper = keeper(cluster)?;
    let before = in_sync(cluster)?;
    let held = memories(cluster)?;
    let worker = |ordinal: u64| format!("{NAME}-worker-{ordinal}");
    cluster.pause_container(NAMESPACE, &worker(LEFT), "worker")?;
    let partition = until("a partition to go on without worker 2", WHILE, || {
        let now = in_sync(cluster)?;
        let goes_on = |(id, copies): &(&u64, &BTreeSet<u64>)| {
            before[id].contains(&LEFT) && held.get(id) > Some(&0) && !copies.contains(&LEFT)
        };
        Ok(now.iter().find(goes_on).map(|(id, _)| *id))
    });
    let destroyed = partition.and_then(|partition| destroy(cluster, &worker).map(|()| partition));
    cluster.resume_container(NAMESPACE, &worker(LEFT), "worker")?;
    let partition = destroyed?;

    let number = partition.to_string();
    let order =
        |reason: &'static str| ["-n", NAMESPACE, "partition", "force-promote", &number, "--accept-data-loss", reason];
    until("the data loss to be reported", WHILE, || {
        let said = refused(cluster, &keeper, CONFLICT, &order("")[..5])?;
        ensure!(said.contains("worker 2 holds everything up to lsn"), "{said}");
        Ok(Some(()))
    })?;
    // By the rules of access first, by the policy then.
    let said = refused(cluster, &keeper, DENIED, &order("both disks burnt"))?;
    ensure!(said.contains("to patch and to force-promote partitionmaps.engram.dev in namespace outside"), "{said}");
    let rules = json!([{ "apiGroups": ["engram.dev"], "resources": ["partitionmaps"], "verbs": ["patch"] }]);
    let patches = json!({ "apiVersion": format!("{ROLES}/v1"), "kind": "Role", "rules": rules,
        "metadata": { "name": KEEPER, "namespace": NAMESPACE } });
    cluster.apply(&patches.to_string())?;
    cluster.apply(&bound(NAMESPACE, "Role", KEEPER).to_string())?;
    until("the policy to refuse", WHILE, || {
        let said = refused(cluster, &keeper, DENIED, &order("both disks burnt"))?;
        ensure!(said.contains("permission to force-promote partitionmaps.engram.dev"), "{said}");
        ensure!(said.contains("ValidatingAdmissionPolicy"), "{said}");
        Ok(Some(()))
    })?;
    ensure!(orders(cluster)?.iter().all(|it| it["what"] != "force-promote"), "what was refused is on record");
    cluster.apply(&bound(NAMESPACE, "ClusterRole", "engram-force-promote").to_string())?;
    until("the right to be known", WHILE, || by(cluster, &keeper, &order("both disks burnt")).map(Some))?;

    let back = until("the partition to be served", WHILE, || Ok(memories(cluster)?.get(&partition).copied()))?;
    ensure!(back == held[&partition], "partition {partition} had {} memories, and has {back}", held[&partition]);
    let mut orders = orders(cluster)?;
    orders.retain(|it| it["what"] == "force-promote");
    let order = orders.first().context("nothing is on record")?;
    ensure!(orders.len() == 1, "{orders:?}");
    ensure!(order["by"] == format!("system:serviceaccount:{NAMESPACE}:{KEEPER}"), "{order}");
    ensure!(order["reason"] == "both disks burnt" && order["steps"][0]["partition"] == partition, "{order}");
    until("the coordinator to report it", WHILE, || {
        let output = engram(cluster, &["list", "partitions", "-o", "json"])?;
        Ok(output.contains("both disks burnt").then_some(()))
    })?;
    let again = ["-n", NAMESPACE, "partition", "force-promote", &number, "--accept-data-loss", "once more"];
    let said = refused(cluster, &keeper, CONFLICT, &again)?;
    ensure!(said.contains("serves it"), "{said}");
    Ok(format!("partition {partition} with {back} memories"))
}

/// Takes the data of all workers but the one that is left behind: it goes with the pods.
fn destroy(cluster: &Cluster, worker: &dyn Fn(u64) -> String) -> Result<()> {
    let at_once = json!({ "gracePeriodSeconds": 0 });
    let others = (0..LEFT).map(worker);
    let before = others.map(|name| Ok((pod(cluster, &name)?, name))).collect::<Result<Vec<_>>>()?;
    for (_, name) in &before {
        cluster.api().delete(&format!("{PODS}/{name}"), Some(&at_once))?;
    }
    for (before, name) in &before {
        until(&format!("another {name}"), WHILE, || {
            let found = cluster.api().find(&format!("{PODS}/{name}"))?;
            Ok(found.filter(|it| uid(it) != uid(before) && it["status"]["phase"] == "Running"))
        })?;
    }
    Ok(())
}

/// A user who may edit and no more, with access to pods here and to the coordinator.
fn keeper(cluster: &Cluster) -> Result<PathBuf> {
    let named = json!({ "name": KEEPER, "namespace": NAMESPACE });
    cluster.apply(&json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": named }).to_string())?;
    for namespace in [NAMESPACE, "engram-system"] {
        cluster.apply(&bound(namespace, "ClusterRole", "edit").to_string())?;
    }
    kubeconfig(cluster, KEEPER, json!({ "token": token(cluster, KEEPER)? }))
}

fn bound(namespace: &str, kind: &str, role: &str) -> Value {
    json!({
        "apiVersion": format!("{ROLES}/v1"), "kind": "RoleBinding",
        "metadata": { "name": format!("{KEEPER}-{}-{role}", kind.to_lowercase()), "namespace": namespace },
        "roleRef": { "apiGroup": ROLES, "kind": kind, "name": role },
        "subjects": [{ "kind": "ServiceAccount", "name": KEEPER, "namespace": NAMESPACE }],
    })
}

/// Runs a command as a user.
fn by(cluster: &Cluster, kubeconfig: &Path, arguments: &[&str]) -> Result<()> {
    let ended = started(cluster, "engram", kubeconfig, arguments)?;
    ensure!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr).trim());
    Ok(())
}

/// The workers whose copy of each partition is in sync, as the object says.
fn in_sync(cluster: &Cluster) -> Result<BTreeMap<u64, BTreeSet<u64>>> {
    let map = cluster.api().get(MAP)?;
    let stores = &map["spec"]["stores"];
    let partitions = map["spec"]["partitions"].as_object().context("a map without partitions")?;
    let ordinal = |member: &Value| stores[member.as_str()?.split('/').next()?]["ordinal"].as_u64();
    let copies = |entry: &Value| entry["isr"].as_array().into_iter().flatten().filter_map(ordinal).collect();
    partitions.iter().map(|(id, entry)| Ok((id.parse()?, copies(entry)))).collect()
}

/// How many memories each partition has whose primary answers.
fn memories(cluster: &Cluster) -> Result<BTreeMap<u64, u64>> {
    let list = read(&engram(cluster, &["list", "partitions", "-o", "json"])?)?;
    let items = list["items"].as_array().context("no list")?;
    Ok(items.iter().filter_map(|it| Some((it["partition"].as_u64()?, it["memories"].as_u64()?))).collect())
}

/// The overrides recorded with the map.
fn orders(cluster: &Cluster) -> Result<Vec<Value>> {
    let map = cluster.api().get(MAP)?;
    let Some(text) = map["metadata"]["annotations"]["engram.dev/overrides"].as_str() else { return Ok(Vec::new()) };
    Ok(read(text)?["orders"].as_array().context("no list of orders")?.clone())
}
