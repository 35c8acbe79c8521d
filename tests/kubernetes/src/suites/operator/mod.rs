//! The operator: its real program, against a real API server, with real workers that send it heartbeats as processes of node 1. Pods are
//! stand-ins: what happens in a container is not seen here. Checks rest on one another, in order.

mod autoscaling;
mod dashboards;
mod jobs;
mod runs;
mod traces;

use super::Check;
use super::helpers::{PODS, WHILE, is_ready};
use crate::MERGE;
use crate::cluster::Cluster;
use crate::process::until;
use crate::requirements::Skip;
use crate::rights::{OPERATORS, kubeconfig_of, operators_rights};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CLUSTERS: &str = "/apis/engram.dev/v1alpha1/namespaces/default/learnerclusters";
const MAPS: &str = "/apis/engram.dev/v1alpha1/namespaces/default/partitionmaps";
const SETS: &str = "/apis/apps/v1/namespaces/default/statefulsets";
const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/operators/leases/engram-operator";
const WORKERS: u64 = 3;
/// A lease of 15 s that was not released has to expire.
const TAKEOVER: Duration = Duration::from_secs(90);
/// Heartbeat port and HTTP port of each replica.
const REPLICAS: [(&str, u16, u16); 2] = [("operator-a", 7440, 9190), ("operator-b", 7441, 9191)];
/// HTTP port of each worker.
const HTTP_PORTS: [u16; WORKERS as usize] = [9290, 9291, 9292];

/// What the builder makes for a cluster of this name.
const OBJECTS: [&str; 9] = [
    "/api/v1/namespaces/default/serviceaccounts/words-worker",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles/words-worker",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings/words-worker",
    "/api/v1/namespaces/default/configmaps/words-config",
    "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies/words-worker",
    "/api/v1/namespaces/default/services/words-worker",
    "/api/v1/namespaces/default/services/words",
    "/apis/policy/v1/namespaces/default/poddisruptionbudgets/words-worker",
    "/apis/apps/v1/namespaces/default/statefulsets/words-worker",
];

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "two replicas start, and one of them leads", run: start },
        Check { name: "a cluster gets its objects, and its pods", run: objects },
        Check { name: "its workers send heartbeats, a map is made in the API server, and it is Ready", run: forms },
        Check { name: "traces of what was done for it arrive at a collector", run: traces::arrive },
        Check { name: "an idle cluster is not written to", run: rests },
        Check { name: "what a killed worker served is served by the others", run: fails_over },
        Check {
            name: "with no operator at all workers take over by themselves, with rights of their own",
            run: by_themselves,
        },
        Check { name: "an edit is carried out, and one while paused only afterwards", run: edits },
        Check { name: "what others change or remove is put right", run: repairs },
        Check {
            name: "what another version left goes, and so does an order to replace a pod that is gone",
            run: tidies,
        },
        Check { name: "a cluster that is refused says why, and holds up no other", run: refuses },
        Check {
            name: "a cluster that is refused is coordinated as it was, also by operators that start afterwards",
            run: refused_and_restarted,
        },
        Check { name: "a lost map with a volume left stalls the cluster, and nothing is started on it", run: stalls },
        Check {
            name: "a run learns to its end, and one that is deleted makes room for it, while no operator is there",
            run: runs::learns,
        },
        Check { name: "a run that is done goes when the time is over for which it was to be kept", run: expires },
        Check { name: "runs wait for their turn in order, and go on where they were suspended", run: runs::waits },
        Check { name: "runs learn from ConfigMaps and volumes, and say what is wrong with them", run: runs::reads },
        Check { name: "a run of kind Job creates a Job, which is suspended and deleted with it", run: jobs::creates },
        Check {
            name: "the operator scales by its forecast, reports another writer, and answers KEDA",
            run: autoscaling::scales,
        },
        Check { name: "a worker is removed by the autoscaler once it is drained", run: autoscaling::drains },
        Check { name: "panels and rules of operators have data in Prometheus", run: dashboards::have_data },
        Check { name: "when the leader is killed the other leads, and workers notice nothing", run: leader_killed },
        Check { name: "a stopping leader releases the lease at once", run: leader_stops },
        Check { name: "a cluster that is deleted takes all along, with no operator at all", run: deleted },
    ]
}

/// A program of the project next to this one.
pub(super) fn program(cluster: &Cluster, name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let built = own.with_file_name(name);
    if !built.is_file() {
        return Err(Skip(format!("there is no {}: `cargo xtask kubernetes` builds it", built.display())).into());
    }
    // A copy: a build while the cluster is up must not take the program away.
    let copy = cluster.path("bin").join(name);
    if !copy.exists() {
        fs::copy(&built, &copy)?;
    }
    Ok(copy)
}

pub(super) fn start_replica(cluster: &Cluster, replica: (&str, u16, u16)) -> Result<()> {
    start_replica_with(cluster, replica, &[])
}

fn start_replica_with(
    cluster: &Cluster,
    (name, heartbeats, pages): (&str, u16, u16),
    variables: &[String],
) -> Result<()> {
    let program = program(cluster, "engram-operator")?;
    let arguments = [
        program.display().to_string(),
        format!("--pod-namespace={OPERATORS}"),
        format!("--coordinator-listen=127.0.0.1:{heartbeats}"),
        "--coordinator-address=127.0.0.1:7440".into(),
        format!("--http-listen=127.0.0.1:{pages}"),
        format!("--pod-name={name}"),
        "--worker-repository=local.test/engram-worker".into(),
        "--worker-version=1".into(),
    ];
    let kubeconfig = format!("KUBECONFIG={}", operators_rights(cluster)?.display());
    let arguments = [&[kubeconfig], variables, &arguments].concat();
    cluster.start_daemon(1, name, Path::new("/usr/bin/env"), &arguments)?;
    until(&format!("{name} to answer"), WHILE, || Ok(page(cluster, pages, "readyz").ok()))?;
    Ok(())
}

pub(super) fn page(cluster: &Cluster, port: u16, path: &str) -> Result<String> {
    let url = format!("http://127.0.0.1:{port}/{path}");
    cluster.in_network(1, "curl", ["-sSf", "--max-time", "5", "--noproxy", "*", &url])
}

fn status(cluster: &Cluster, name: &str) -> Result<Value> {
    Ok(cluster.api().get(&format!("{CLUSTERS}/{name}"))?["status"].take())
}

/// A condition of a status: its truth, its reason, its message.
fn condition<'a>(status: &'a Value, kind: &str) -> Option<(&'a str, &'a str, &'a str)> {
    let all = status["conditions"].as_array()?;
    let found = all.iter().find(|it| it["type"] == kind)?;
    Some((found["status"].as_str()?, found["reason"].as_str()?, found["message"].as_str()?))
}

fn wait_for_status<T>(
    cluster: &Cluster,
    name: &str,
    what: &str,
    mut holds: impl FnMut(&Value) -> Option<T>,
) -> Result<T> {
    let mut last = Value::Null;
    let found = until(&format!("{name} to be {what}"), TAKEOVER, || {
        last = status(cluster, name)?;
        Ok(holds(&last))
    });
    found.with_context(|| format!("its status is {last:#}"))
}

fn leader(cluster: &Cluster) -> Result<Option<String>> {
    let lease = cluster.api().find(LEASE)?;
    let holder = lease.as_ref().and_then(|lease| lease["spec"]["holderIdentity"].as_str());
    Ok(holder.and_then(|holder| holder.split_once('_')).map(|(pod, _)| pod.to_owned()))
}

/// The definitions, and the policy that whatever operators and workers write has to pass.
pub(super) fn define(cluster: &Cluster) -> Result<()> {
    for definition in [
        include_str!("../../../../../crds/learnerclusters.yaml"),
        include_str!("../../../../../crds/learnerruns.yaml"),
        include_str!("../../../../../crds/partitionmaps.yaml"),
    ] {
        // The largest of them does not fit into the annotation of a client-side apply.
        cluster.apply_on_server(definition)?;
    }
    cluster.apply_on_server(include_str!("../../../../../charts/engram/files/policy.yaml"))
}

fn start(cluster: &Cluster) -> Result<String> {
    define(cluster)?;
    traces::collect(cluster)?;
    for replica in REPLICAS {
        start_replica_with(cluster, replica, &traces::variables())?;
    }
    let leader = until("a leader", WHILE, || leader(cluster))?;
    Ok(format!("{leader} leads"))
}

fn words(spec: &Value) -> Value {
    let mut whole = json!({
        "workers": WORKERS, "replicationFactor": 2, "partitions": 16, "capacity": { "memories": 1000 },
        "gpu": { "mode": "Disabled" }, "storage": { "ephemeral": true },
        // Workers are no pods here, and get no certificate.
        "tls": { "mode": "Disabled" },
    });
    for (field, value) in spec.as_object().into_iter().flatten() {
        whole[field] = value.clone();
    }
    json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": "words" }, "spec": whole,
    })
}

fn objects(cluster: &Cluster) -> Result<String> {
    // The API server itself then refuses a worker's pod that asks for more.
    let restricted = json!({ "metadata": { "labels": { "pod-security.kubernetes.io/enforce": "restricted" } } });
    cluster.api().patch("/api/v1/namespaces/default", MERGE, &restricted)?;
    let made = cluster.api().create(CLUSTERS, &words(&Value::Null))?;
    let uid = &made["metadata"]["uid"];
    for path in OBJECTS {
        let object = until(path, WHILE, || cluster.api().find(path))?;
        let owner = &object["metadata"]["ownerReferences"][0];
        ensure!(owner["uid"] == *uid && owner["controller"] == true, "{path} is owned by {owner}");
    }
    until("three pods", WHILE, || {
        let pods = cluster.api().get(&format!("{PODS}?labelSelector=engram.dev%2Fcluster%3Dwords"))?;
        let ready = pods["items"].as_array().into_iter().flatten().filter(|it| is_ready(it)).count();
        Ok((ready as u64 == WORKERS).then_some(()))
    })?;
    wait_for_status(cluster, "words", "waiting for its map", |status| {
        let waits = condition(status, "Ready").is_some_and(|(truth, reason, message)| {
            (truth, reason) == ("False", "WaitingForPartitionMap")
                && message.contains("the PartitionMap does not exist yet")
        });
        (waits && status["workers"]["ready"] == WORKERS).then_some(())
    })?;
    let scale = cluster.api().get(&format!("{CLUSTERS}/words/scale"))?;
    ensure!(scale["status"]["replicas"] == WORKERS, "the scale subresource says {scale}");
    Ok(String::new())
}

/// Starts a worker as a process of node 1, with its previous disk.
fn start_worker(cluster: &Cluster, ordinal: u64) -> Result<()> {
    let object = cluster.api().get(&format!("{CLUSTERS}/words"))?;
    let state = cluster.path("volumes").join(format!("words-{ordinal}"));
    fs::create_dir_all(&state)?;
    let any = "127.0.0.1:0";
    let http = format!("127.0.0.1:{}", HTTP_PORTS[ordinal as usize]);
    let spec = &object["spec"];
    let options = json!({
        "cluster": object["status"]["clusterId"], "clusterName": "words", "ordinal": ordinal, "stateDir": state,
        "listen": { "client": any, "peer": any, "admin": any, "http": http },
        "coordinators": REPLICAS.map(|(_, heartbeats, _)| format!("127.0.0.1:{heartbeats}")),
        "threads": 1, "mapLocation": { "object": { "namespace": "default", "name": "words" } },
        "inputs": runs::inputs(cluster),
        "spec": {
            "workers": spec["workers"], "replicationFactor": spec["replicationFactor"], "partitions": spec["partitions"],
            "capacity": { "memories": 1000 }, "gpu": { "mode": "Disabled" },
        },
    });
    let file = state.with_extension("json");
    fs::write(&file, serde_json::to_vec(&options)?)?;
    let kubeconfig = format!("KUBECONFIG={}", kubeconfig_of(cluster, OBJECTS[0], "words-worker.kubeconfig")?.display());
    let worker = program(cluster, "engram-worker")?.display().to_string();
    let arguments = [kubeconfig, worker, "serve".into(), format!("--config={}", file.display())];
    cluster.start_daemon(1, &format!("worker-{ordinal}"), Path::new("/usr/bin/env"), &arguments).map(drop)
}

fn map(cluster: &Cluster) -> Result<Value> {
    cluster.api().get(&format!("{MAPS}/words"))
}

/// Ordinals of the primaries of all partitions.
fn primaries(map: &Value) -> Vec<u64> {
    let spec = &map["spec"];
    let entries = spec["partitions"].as_object().into_iter().flatten();
    let of = |entry: &Value| spec["stores"][entry["primary"].to_string().as_str()]["ordinal"].as_u64();
    entries.filter_map(|(_, entry)| of(entry)).collect()
}

/// Ordinals of the in-sync replicas of each partition.
fn in_sync(map: &Value) -> Vec<Vec<u64>> {
    let spec = &map["spec"];
    let of = |member: &Value| spec["stores"][member.as_str()?.split_once('/')?.0]["ordinal"].as_u64();
    let entries = spec["partitions"].as_object().into_iter().flatten();
    entries.map(|(_, entry)| entry["isr"].as_array().into_iter().flatten().filter_map(of).collect()).collect()
}

fn is_ready_cluster(status: &Value) -> Option<()> {
    (condition(status, "Ready")?.0 == "True" && condition(status, "Replicated")?.0 == "True").then_some(())
}

fn forms(cluster: &Cluster) -> Result<String> {
    let began = Instant::now();
    for ordinal in 0..WORKERS {
        start_worker(cluster, ordinal)?;
    }
    wait_for_status(cluster, "words", "Ready", is_ready_cluster)?;
    let took = began.elapsed();
    let (map, status) = (map(cluster)?, status(cluster, "words")?);
    ensure!(map["spec"]["clusterId"] == status["clusterId"] && primaries(&map).len() == 16, "{map:#}");
    ensure!(map["metadata"]["ownerReferences"].is_array(), "the map of an ephemeral cluster is not owned by it");
    ensure!(status["partitions"]["healthy"] == 16 && status["phase"] == "Ready", "{status:#}");
    let budget = cluster.api().get(OBJECTS[7])?;
    until("the budget to let one pod go", WHILE, || {
        Ok((cluster.api().get(OBJECTS[7])?["spec"]["maxUnavailable"] == 1).then_some(()))
    })
    .with_context(|| format!("{budget:#}"))?;
    Ok(format!("{:.1} s after the workers' start", took.as_secs_f64()))
}

/// Number of successful reconciles.
fn reconciles(cluster: &Cluster, pages: u16) -> Result<u64> {
    let metrics = page(cluster, pages, "metrics")?;
    let line = metrics.lines().find(|line| line.starts_with("engram_operator_reconcile_total{result=\"success\"}"));
    Ok(line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok()).unwrap_or(0))
}

fn pages_of(name: &str) -> Result<u16> {
    REPLICAS.iter().find(|replica| replica.0 == name).map(|replica| replica.2).context("unknown leader")
}

fn rests(cluster: &Cluster) -> Result<String> {
    let pages = pages_of(&leader(cluster)?.context("no leader")?)?;
    let versions = || -> Result<Vec<Value>> {
        let paths = OBJECTS.map(str::to_owned).into_iter().chain([format!("{MAPS}/words")]);
        paths.map(|path| Ok(cluster.api().get(&path)?["metadata"]["resourceVersion"].take())).collect()
    };
    // Reconciled twice again after the touch, and nothing but the touch was written.
    let before = versions()?;
    for touch in 0..2 {
        let seen = reconciles(cluster, pages)?;
        let change = json!({ "metadata": { "annotations": { "touched": touch.to_string() } } });
        let touched = cluster.api().patch(&format!("{CLUSTERS}/words"), MERGE, &change)?;
        until("another reconcile", WHILE, || Ok((reconciles(cluster, pages)? > seen).then_some(())))?;
        let now = cluster.api().get(&format!("{CLUSTERS}/words"))?;
        let version = |object: &Value| object["metadata"]["resourceVersion"].clone();
        ensure!(version(&now) == version(&touched), "the status was written without need: {:#}", now["status"]);
    }
    let after = versions()?;
    ensure!(before == after, "written without need: {before:?} became {after:?}");
    Ok(String::new())
}

fn fails_over(cluster: &Cluster) -> Result<String> {
    ensure!(primaries(&map(cluster)?).contains(&0), "worker 0 has no primaries");
    let began = Instant::now();
    cluster.end_daemon(1, "worker-0", Signal::SIGKILL)?;
    until("other primaries", WHILE, || Ok((!primaries(&map(cluster)?).contains(&0)).then_some(())))?;
    let took = began.elapsed();
    wait_for_status(cluster, "words", "under-replicated or not Ready", |status| {
        (condition(status, "Ready")?.0 != "True" || status["partitions"]["underReplicated"] != 0).then_some(())
    })?;
    start_worker(cluster, 0)?;
    wait_for_status(cluster, "words", "Ready again", is_ready_cluster)?;
    Ok(format!("written {:.1} s after the kill", took.as_secs_f64()))
}

fn by_themselves(cluster: &Cluster) -> Result<String> {
    // The lease is released: the next leader need not wait for its expiry.
    for (replica, ..) in REPLICAS {
        cluster.end_daemon(1, replica, Signal::SIGTERM)?;
    }
    // A restarted worker has no primaries for a while.
    let before = primaries(&map(cluster)?);
    let led_by = |worker: u64| before.iter().filter(|it| **it == worker).count();
    let most = (0..WORKERS).max_by_key(|worker| led_by(*worker)).context("there are workers")?;
    let began = Instant::now();
    cluster.end_daemon(1, &format!("worker-{most}"), Signal::SIGKILL)?;
    until("other primaries", WHILE, || Ok((!primaries(&map(cluster)?).contains(&most)).then_some(())))?;
    let took = began.elapsed();
    until("them to serve", WHILE, || {
        let map = map(cluster)?;
        let entries = map["spec"]["partitions"].as_object().into_iter().flatten();
        Ok(entries.map(|(_, entry)| &entry["activated"]).all(|it| it == true).then_some(()))
    })?;
    for replica in REPLICAS {
        start_replica(cluster, replica)?;
    }
    start_worker(cluster, most)?;
    wait_for_status(cluster, "words", "Ready again", is_ready_cluster)?;
    Ok(format!("{} partitions written {:.1} s after the kill", led_by(most), took.as_secs_f64()))
}

fn edit(cluster: &Cluster, spec: &Value) -> Result<()> {
    cluster.api().patch(&format!("{CLUSTERS}/words"), MERGE, &json!({ "spec": spec })).map(drop)
}

fn edits(cluster: &Cluster) -> Result<String> {
    edit(cluster, &json!({ "service": { "annotations": { "team": "a" } }, "networkPolicy": { "enabled": false } }))?;
    let team = |wanted: &str| {
        until(&format!("the Service's team to be {wanted}"), WHILE, || {
            Ok((cluster.api().get(OBJECTS[6])?["metadata"]["annotations"]["team"] == wanted).then_some(()))
        })
    };
    team("a")?;
    until("the NetworkPolicy to go", WHILE, || Ok(cluster.api().find(OBJECTS[4])?.is_none().then_some(())))?;
    edit(cluster, &json!({ "paused": true, "service": { "annotations": { "team": "b" } } }))?;
    wait_for_status(cluster, "words", "paused", |status| {
        (condition(status, "Reconciling")?.1 == "Paused").then_some(())
    })?;
    ensure!(cluster.api().get(OBJECTS[6])?["metadata"]["annotations"]["team"] == "a", "it was changed while paused");
    edit(cluster, &json!({ "paused": false, "networkPolicy": { "enabled": true } }))?;
    team("b")?;
    until("the NetworkPolicy", WHILE, || cluster.api().find(OBJECTS[4]))?;
    wait_for_status(cluster, "words", "Ready", is_ready_cluster)?;
    Ok(String::new())
}

fn repairs(cluster: &Cluster) -> Result<String> {
    let uid = cluster.api().get(OBJECTS[5])?["metadata"]["uid"].clone();
    cluster.api().delete(OBJECTS[5], None)?;
    until("another headless Service", WHILE, || {
        Ok(cluster.api().find(OBJECTS[5])?.filter(|found| found["metadata"]["uid"] != uid).map(drop))
    })?;
    let change = json!({ "spec": { "unhealthyPodEvictionPolicy": "IfHealthyBudget" } });
    cluster.api().patch(OBJECTS[7], MERGE, &change)?;
    until("the budget to be put right", WHILE, || {
        Ok((cluster.api().get(OBJECTS[7])?["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow").then_some(()))
    })?;
    // A Service that has the name of a new cluster and is not owned by it is not adopted.
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "taken" }, "spec": { "ports": [{ "port": 80 }] },
    });
    let services = "/api/v1/namespaces/default/services";
    cluster.api().create(services, &service)?;
    let mut other = words(&Value::Null);
    other["metadata"]["name"] = "taken".into();
    cluster.api().create(CLUSTERS, &other)?;
    let message = wait_for_status(cluster, "taken", "ReconcileFailed", |status| {
        let (_, reason, message) = condition(status, "Reconciling")?;
        (reason == "ReconcileFailed").then(|| message.to_owned())
    })?;
    ensure!(message.contains("Service taken exists and is not owned by this cluster"), "{message}");
    let ports = cluster.api().get(&format!("{services}/taken"))?["spec"]["ports"][0]["port"].clone();
    ensure!(ports == 80, "it was adopted: its port is {ports}");
    cluster.api().delete(&format!("{services}/taken"), None)?;
    until("the set, once the name is free", WHILE, || cluster.api().find(&format!("{SETS}/taken-worker")))?;
    cluster.api().delete(&format!("{CLUSTERS}/taken"), None)?;
    Ok(String::new())
}

/// Obsolete objects of the cluster: one of each kind except for the StatefulSet.
fn tidies(cluster: &Cluster) -> Result<String> {
    let mut left = Vec::new();
    for path in OBJECTS.iter().filter(|path| !path.contains("/statefulsets/")) {
        let (collection, _) = path.rsplit_once('/').context("a path has parts")?;
        let made = cluster.api().get(path)?;
        let metadata = json!({
            "name": "words-former", "labels": made["metadata"]["labels"],
            "ownerReferences": made["metadata"]["ownerReferences"],
        });
        let mut former = json!({ "apiVersion": made["apiVersion"], "kind": made["kind"], "metadata": metadata });
        match made["kind"].as_str() {
            Some("RoleBinding") => former["roleRef"] = made["roleRef"].clone(),
            Some("Service") => former["spec"] = json!({ "ports": [{ "port": 80 }] }),
            Some("NetworkPolicy") => former["spec"] = json!({ "podSelector": {} }),
            Some("PodDisruptionBudget") => {
                former["spec"] = json!({ "selector": { "matchLabels": { "former": "yes" } } });
            }
            _ => {}
        }
        let path = format!("{collection}/words-former");
        // A cluster has two Services.
        if !left.contains(&path) {
            cluster.api().create(collection, &former)?;
            left.push(path);
        }
    }
    for path in &left {
        until(&format!("{path} to go"), WHILE, || Ok(cluster.api().find(path)?.is_none().then_some(())))?;
    }
    let words = format!("{CLUSTERS}/words");
    let order = json!({ "metadata": { "annotations": { "engram.dev/replace": "of-a-pod-that-is-gone" } } });
    cluster.api().patch(&words, MERGE, &order)?;
    until("the order to be taken away", WHILE, || {
        Ok(cluster.api().get(&words)?["metadata"]["annotations"]["engram.dev/replace"].is_null().then_some(()))
    })?;
    wait_for_status(cluster, "words", "Ready", is_ready_cluster)?;
    Ok(format!("{} kinds", left.len()))
}

fn refuses(cluster: &Cluster) -> Result<String> {
    let mut bad =
        words(&json!({ "podTemplate": { "spec": { "containers": [{ "name": "worker", "command": ["sh"] }] } } }));
    bad["metadata"]["name"] = "bad".into();
    let taken = cluster.api().create(CLUSTERS, &bad);
    let output = match taken {
        // Rejected by the CustomResourceDefinition's rules.
        Err(error) => {
            let refused = error.downcast_ref::<crate::Refused>().map(|it| it.message.clone());
            refused.with_context(|| format!("{error:#}"))?
        }
        Ok(_) => wait_for_status(cluster, "bad", "refused", |status| {
            let (truth, _, message) = condition(status, "Accepted")?;
            (truth == "False").then(|| message.to_owned())
        })?,
    };
    ensure!(output.contains("podTemplate") && output.contains("command"), "{output}");
    ensure!(cluster.api().find(&format!("{SETS}/bad-worker"))?.is_none(), "objects were made for it");
    let mut good = words(&json!({ "workers": 2 }));
    good["metadata"]["name"] = "good".into();
    cluster.api().create(CLUSTERS, &good)?;
    until("the next cluster's set", WHILE, || cluster.api().find(&format!("{SETS}/good-worker")))?;
    cluster.api().delete(&format!("{CLUSTERS}/good"), None)?;
    cluster.api().delete(&format!("{CLUSTERS}/bad"), None)?;
    Ok(output)
}

/// A field that the CustomResourceDefinition accepts and the operator rejects.
fn set_command(command: &Value) -> Value {
    json!({ "podTemplate": { "spec": { "containers": [{ "name": "worker", "command": command }] } } })
}

fn refused_and_restarted(cluster: &Cluster) -> Result<String> {
    edit(cluster, &set_command(&json!(["sh"])))?;
    let wait_for_condition = |truth: &'static str| {
        wait_for_status(cluster, "words", &format!("Accepted: {truth}"), move |status| {
            (condition(status, "Accepted")?.0 == truth).then_some(())
        })
    };
    wait_for_condition("False")?;
    for (replica, ..) in REPLICAS {
        cluster.end_daemon(1, replica, Signal::SIGTERM)?;
    }
    for replica in REPLICAS {
        start_replica(cluster, replica)?;
    }
    // Workers fail over without an operator, but only a coordinator re-replicates.
    let lost = *primaries(&map(cluster)?).first().context("a primary")?;
    let began = Instant::now();
    cluster.end_daemon(1, &format!("worker-{lost}"), Signal::SIGKILL)?;
    until("two replicas of every partition on the other workers", TAKEOVER, || {
        let whole = in_sync(&map(cluster)?).iter().all(|of| of.len() == 2 && !of.contains(&lost));
        Ok(whole.then_some(()))
    })?;
    let took = began.elapsed();
    edit(cluster, &json!({ "podTemplate": null }))?;
    wait_for_condition("True")?;
    start_worker(cluster, lost)?;
    wait_for_status(cluster, "words", "Ready again", is_ready_cluster)?;
    Ok(format!("re-replicated {:.1} s after the kill", took.as_secs_f64()))
}

fn stalls(cluster: &Cluster) -> Result<String> {
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": "data-old-worker-0", "labels": {
            "engram.dev/cluster": "old", "engram.dev/component": "worker", "engram.dev/cluster-id": "00000000000000000000000000000001",
        } },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
    });
    cluster.api().create(CLAIMS, &claim)?;
    let mut old = words(&json!({ "storage": { "size": "1Gi" } }));
    old["metadata"]["name"] = "old".into();
    cluster.api().create(CLUSTERS, &old)?;
    let message = wait_for_status(cluster, "old", "stalled", |status| {
        let (truth, reason, message) = condition(status, "Stalled")?;
        (truth == "True" && reason == "PartitionMapMissing").then(|| message.to_owned())
    })?;
    ensure!(cluster.api().find(&format!("{SETS}/old-worker"))?.is_none(), "workers were started on it");
    ensure!(cluster.api().find(&format!("{MAPS}/old"))?.is_none(), "a map was made");
    until("an event with that reason", WHILE, || {
        let events = cluster.api().get("/apis/events.k8s.io/v1/namespaces/default/events")?;
        let mut events = events["items"].as_array().into_iter().flatten();
        Ok(events.any(|it| it["reason"] == "PartitionMapMissing" && it["regarding"]["name"] == "old").then_some(()))
    })?;
    // Without the claim the cluster starts.
    cluster.api().delete(&format!("{CLAIMS}/data-old-worker-0"), None)?;
    until("the set, with the claim gone", WHILE, || cluster.api().find(&format!("{SETS}/old-worker")))?;
    cluster.api().delete(&format!("{CLUSTERS}/old"), None)?;
    Ok(message)
}

fn expires(cluster: &Cluster) -> Result<String> {
    const RUNS: &str = "/apis/engram.dev/v1alpha1/namespaces/default/learnerruns";
    let runs = cluster.api().get(RUNS)?;
    let mut runs = runs["items"].as_array().into_iter().flatten();
    let done = runs.find(|it| it["status"]["phase"] == "Complete").context("no run is done")?;
    let name = done["metadata"]["name"].as_str().context("it has a name")?;
    let path = format!("{RUNS}/{name}");
    cluster.api().patch(&path, MERGE, &json!({ "spec": { "ttlSecondsAfterFinished": 1 } }))?;
    until("the run to go", WHILE, || Ok(cluster.api().find(&path)?.is_none().then_some(())))?;
    Ok(name.to_owned())
}

/// A map that did not change for so long is idle: moves follow each other faster.
const IDLE_AFTER: Duration = Duration::from_secs(8);

fn leader_killed(cluster: &Cluster) -> Result<String> {
    let first = leader(cluster)?.context("no leader")?;
    let term = |map: &Value| {
        map["spec"]["partitions"].as_object().into_iter().flatten().map(|(_, it)| it["term"].clone()).collect()
    };
    // Primaries may still move back after the previous check, independently of the leader.
    let mut before: Vec<Value> = term(&map(cluster)?);
    let mut rested = Instant::now();
    until("the map to become idle", WHILE, || {
        let now = term(&map(cluster)?);
        if now != before {
            (before, rested) = (now, Instant::now());
        }
        Ok((rested.elapsed() >= IDLE_AFTER).then_some(()))
    })?;
    let began = Instant::now();
    cluster.end_daemon(1, &first, Signal::SIGKILL)?;
    let second = until("another leader", TAKEOVER, || Ok(leader(cluster)?.filter(|it| *it != first)))?;
    let took = began.elapsed();
    cluster.api().delete(OBJECTS[5], None)?;
    until("the new leader to write", WHILE, || cluster.api().find(OBJECTS[5]))?;
    let after: Vec<Value> = term(&map(cluster)?);
    ensure!(before == after, "partitions were moved: terms {before:?} became {after:?}");
    let replica = REPLICAS.into_iter().find(|it| it.0 == first).context("unknown leader")?;
    start_replica(cluster, replica)?;
    wait_for_status(cluster, "words", "Ready", is_ready_cluster)?;
    Ok(format!("{second} leads {:.0} s after the kill", took.as_secs_f64()))
}

fn leader_stops(cluster: &Cluster) -> Result<String> {
    let first = leader(cluster)?.context("no leader")?;
    let began = Instant::now();
    cluster.end_daemon(1, &first, Signal::SIGTERM)?;
    until("another leader", TAKEOVER, || Ok(leader(cluster)?.filter(|it| *it != first)))?;
    Ok(format!("{:.1} s after the order", began.elapsed().as_secs_f64()))
}

fn deleted(cluster: &Cluster) -> Result<String> {
    let last = leader(cluster)?.context("no leader")?;
    let pages = pages_of(&last)?;
    ensure!(page(cluster, pages, "metrics")?.contains("learner_cluster=\"words\""), "its metrics are missing");
    let made = cluster.api().get(&format!("{CLUSTERS}/words"))?;
    ensure!(made["metadata"].get("finalizers").is_none(), "a finalizer holds it up: {made:#}");
    cluster.end_daemon(1, &last, Signal::SIGTERM)?;
    cluster.api().delete(&format!("{CLUSTERS}/words"), None)?;
    for path in OBJECTS.map(str::to_owned).into_iter().chain([format!("{MAPS}/words")]) {
        until(&format!("{path} to go"), WHILE, || Ok(cluster.api().find(&path)?.is_none().then_some(())))?;
    }
    for ordinal in 0..WORKERS {
        cluster.end_daemon(1, &format!("worker-{ordinal}"), Signal::SIGKILL)?;
    }
    Ok(String::new())
}
