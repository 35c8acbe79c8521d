//! The cluster itself, and the faults that other suites rest on. Checks rest on one another, in order.

use super::Check;
use super::helpers::{PODS, WHILE, is_ready, pod, ready, recreated, service_address, spread, uid, wait_for_pod};
use crate::cluster::Cluster;
use crate::kubeconfig::needs_nodes;
use crate::process::until;
use crate::requirements::{Skip, find};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

const CLAIM: &str = "/api/v1/namespaces/default/persistentvolumeclaims/data-db-0";
const WIDGETS: &str = "/apis/example.test/v1/namespaces/default/widgets";

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "an anti-affine StatefulSet of three is Ready", run: spread_over_three },
        Check { name: "its pods are on the nodes that are not tainted", run: three_nodes },
        Check { name: "every pod reaches every pod by name", run: all_pairs },
        Check { name: "a deleted pod comes back", run: recreated },
        Check { name: "a kind's rule takes a good object and refuses a bad one", run: rule },
        Check { name: "an admission policy compares an object with what it was", run: policy },
        Check { name: "a claim of the default class is written to by uid 65532", run: volume },
        Check { name: "its volume is bound to the pod's node", run: affine },
        Check { name: "a volume grows (in its object)", run: grow },
        Check { name: "a deleted claim takes volume and folder along", run: remove },
        Check { name: "offered GPUs are scheduled", run: gpus },
        Check { name: "an S3 server takes signed requests and refuses a wrong key", run: s3 },
        Check { name: "a container is killed, frozen and resumed past kubelet", run: containers },
        Check { name: "three pods answer under one address", run: web },
        Check { name: "a rolling change by deletion under UID preconditions fails no request", run: rolling },
        Check { name: "Helm installs, upgrades and removes a chart", run: helm },
    ]
}

/// The program of the test pods, in the network of node 1.
fn tool(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    cluster.in_network(1, cluster.program(), [&["tool"], arguments].concat())
}

/// The same inside a pod.
fn tool_in(cluster: &Cluster, pod: &str, arguments: &[&str]) -> Result<String> {
    cluster.kubectl([&["exec", pod, "--", "/bin/engram-test-cluster", "tool"], arguments].concat())
}

/// What other checks rest on: on a given cluster there may be fewer nodes.
fn spread_over_three(cluster: &Cluster) -> Result<String> {
    if cluster.is_given() {
        let nodes = cluster.api().get("/api/v1/nodes")?;
        let takes_pods = |node: &&Value| node["spec"]["taints"].is_null() && node["spec"]["unschedulable"] != true;
        let number = nodes["items"].as_array().into_iter().flatten().filter(takes_pods).count();
        if number < 3 {
            return Err(Skip(format!("three nodes that take pods are needed, and the cluster has {number}")).into());
        }
    }
    spread(cluster)
}

fn three_nodes(cluster: &Cluster) -> Result<String> {
    let list = cluster.api().get(&format!("{PODS}?labelSelector=app%3Dsp"))?;
    let pods = list["items"].as_array().context("no list")?;
    let nodes: BTreeSet<&str> = pods.iter().filter_map(|it| it["spec"]["nodeName"].as_str()).collect();
    let expected = nodes.len() == 3 && (cluster.is_given() || nodes == BTreeSet::from(["n2", "n3", "n4"]));
    ensure!(expected, "they are on {nodes:?}");
    Ok(String::new())
}

fn all_pairs(cluster: &Cluster) -> Result<String> {
    for from in 0..3 {
        for to in 0..3 {
            let url = format!("http://sp-{to}.sp.default.svc.cluster.local:8080/");
            // Nodes learn of one another's pods a moment after these are Ready.
            let answer =
                until("an answer", WHILE, || tool_in(cluster, &format!("sp-{from}"), &["get", &url]).map(Some))?;
            ensure!(answer == format!("sp-{to}"), "sp-{from} asked for sp-{to} and heard {answer:?}");
        }
    }
    Ok("nine pairs".into())
}

fn widget(replicas: u32, size: &str) -> Value {
    let spec = json!({"replicas": replicas, "size": size});
    json!({"apiVersion": "example.test/v1", "kind": "Widget", "metadata": {"name": "one"}, "spec": spec})
}

fn rule(cluster: &Cluster) -> Result<String> {
    cluster.apply(include_str!("../../manifests/widget.yaml"))?;
    until("the new kind", WHILE, || cluster.api().find(WIDGETS))?;
    let refused = cluster.api().create(WIDGETS, &widget(2, "large"));
    let refused = refused.err().context("two large replicas were taken")?;
    let refused = format!("{refused:#}");
    ensure!(refused.contains("large needs 3 replicas"), "{refused}");
    cluster.api().create(WIDGETS, &widget(3, "large"))?;
    Ok(String::new())
}

fn policy(cluster: &Cluster) -> Result<String> {
    let change = |replicas| {
        let change = json!({"spec": {"replicas": replicas}});
        cluster.api().patch(&format!("{WIDGETS}/one"), crate::http::MERGE, &change)
    };
    // It acts a moment after it was taken.
    until("the policy to refuse a step of two", WHILE, || match change(5) {
        Err(error) if format!("{error:#}").contains("replicas grow one by one") => Ok(Some(())),
        Err(error) => Err(error),
        Ok(_) => change(3).map(|_| None),
    })?;
    change(4)?;
    Ok(String::new())
}

fn volume(cluster: &Cluster) -> Result<String> {
    cluster.apply(include_str!("../../manifests/volume.yaml"))?;
    ready(cluster, "db")?;
    let about = tool_in(cluster, "db-0", &["write", "/data/file", "text"])?;
    ensure!(about.starts_with("65532:65532 "), "the file belongs to {about}");
    Ok(about.trim().into())
}

fn volume_of_claim(cluster: &Cluster) -> Result<Value> {
    let claim = cluster.api().get(CLAIM)?;
    let volume = claim["spec"]["volumeName"].as_str().context("the claim is not bound")?;
    cluster.api().get(&format!("/api/v1/persistentvolumes/{volume}"))
}

fn affine(cluster: &Cluster) -> Result<String> {
    let volume = volume_of_claim(cluster)?;
    let node = &volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0]["values"][0];
    let pod = pod(cluster, "db-0")?;
    ensure!(*node == pod["spec"]["nodeName"], "the volume is on {node}, the pod on {}", pod["spec"]["nodeName"]);
    Ok(String::new())
}

fn grow(cluster: &Cluster) -> Result<String> {
    let change = json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}});
    cluster.api().patch(CLAIM, crate::http::MERGE, &change)?;
    until("2Gi", WHILE, || Ok((cluster.api().get(CLAIM)?["status"]["capacity"]["storage"] == "2Gi").then_some(())))?;
    Ok(String::new())
}

fn remove(cluster: &Cluster) -> Result<String> {
    if cluster.is_given() {
        return Err(needs_nodes("looking into the folder of a volume"));
    }
    let volume = volume_of_claim(cluster)?;
    let folder = Path::new(volume["spec"]["local"]["path"].as_str().context("the volume has no folder")?);
    ensure!(folder.join("file").is_file(), "the file of the pod is not in {}", folder.display());
    cluster.api().delete("/apis/apps/v1/namespaces/default/statefulsets/db", None)?;
    cluster.api().delete(CLAIM, None)?;
    until("the folder to go", WHILE, || Ok((!folder.exists()).then_some(())))?;
    Ok(String::new())
}

fn gpus(cluster: &Cluster) -> Result<String> {
    cluster.offer_gpus(3, 2)?;
    let manifest = include_str!("../../manifests/gpu.yaml");
    cluster.apply(manifest)?;
    let placed = wait_for_pod(cluster, "gpu", "Ready", is_ready)?;
    ensure!(placed["spec"]["nodeName"] == "n3", "it is on {}", placed["spec"]["nodeName"]);
    wait_for_pod(cluster, "gpu-too-many", "unschedulable", |it| {
        it["status"]["conditions"].as_array().is_some_and(|it| it.iter().any(|it| it["reason"] == "Unschedulable"))
    })?;
    cluster.api().delete(&format!("{PODS}/gpu"), None)?;
    cluster.api().delete(&format!("{PODS}/gpu-too-many"), None)?;
    Ok(String::new())
}

fn s3(cluster: &Cluster) -> Result<String> {
    cluster.kubernetes_program("versitygw")?;
    let curl = find("curl").ok_or_else(|| Skip("there is no curl to sign requests with".into()))?;
    cluster.apply(include_str!("../../manifests/s3.yaml"))?;
    cluster.kubectl(["rollout", "status", "deployment/s3", "--timeout=50s"])?;
    let url = format!("http://{}:9000/bucket", service_address(cluster, "s3")?);
    let ask = |secret: &str, arguments: &[&str]| {
        let user = format!("engram:{secret}");
        let fixed = ["-sS", "--fail", "--max-time", "10", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", &user];
        let unsigned = ["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"];
        cluster.in_network(1, &curl, [&fixed[..], &unsigned, arguments].concat())
    };
    let (file, right) = (cluster.path("cluster.json"), "engram-secret");
    let object = format!("{url}/a/b");
    until("a bucket", WHILE, || ask(right, &["-X", "PUT", &url]).map(Some))?;
    ask(right, &["-T", &file.to_string_lossy(), &object])?;
    ensure!(ask(right, &[&object])? == std::fs::read_to_string(&file)?, "it reads other than what was written");
    ensure!(ask(right, &[&format!("{url}?list-type=2&prefix=a")])?.contains("<Key>a/b</Key>"), "it is not listed");
    let refused = ask("wrong", &[&object]).err().context("a wrong key was taken")?.to_string();
    ensure!(refused.contains("403"), "a wrong key: {refused}");
    cluster.api().delete("/apis/apps/v1/namespaces/default/deployments/s3", None)?;
    Ok("put, get, list".into())
}

fn containers(cluster: &Cluster) -> Result<String> {
    let before = uid(&pod(cluster, "sp-0")?);
    cluster.kill_container("default", "sp-0", "c")?;
    let restarted = |it: &Value| it["status"]["containerStatuses"][0]["restartCount"] == 1 && is_ready(it);
    let after = wait_for_pod(cluster, "sp-0", "restarted and Ready", restarted)?;
    ensure!(uid(&after) == before, "the pod is another one");
    cluster.pause_container("default", "sp-0", "c")?;
    wait_for_pod(cluster, "sp-0", "frozen and not Ready", |it| !is_ready(it))?;
    cluster.resume_container("default", "sp-0", "c")?;
    wait_for_pod(cluster, "sp-0", "Ready again", is_ready)?;
    Ok(String::new())
}

fn web(cluster: &Cluster) -> Result<String> {
    cluster.apply(include_str!("../../manifests/web.yaml"))?;
    ready(cluster, "web")?;
    let url = format!("http://{}/", service_address(cluster, "web-vip")?);
    until("an answer", WHILE, || tool(cluster, &["get", &url]).map(Some))?;
    Ok(String::new())
}

/// Starts a client in node 1 for so many seconds; the function that comes back waits for its figures.
fn client(cluster: &Cluster, seconds: u64) -> Result<impl FnOnce() -> Result<String>> {
    let url = format!("http://{}/", service_address(cluster, "web-vip")?);
    let owned = cluster.clone();
    let thread = std::thread::spawn(move || tool(&owned, &["gap", &url, &seconds.to_string()]));
    Ok(move || {
        let said = thread.join().expect("the client does not panic")?;
        ensure!(said.contains(" errors 0 "), "a request failed: {said}");
        Ok(said.trim().to_owned())
    })
}

fn rolling(cluster: &Cluster) -> Result<String> {
    // The same client once more in a pod, by name: the first one began before there was anybody to answer.
    cluster.kubectl(["delete", "job", "client", "--wait", "--timeout=50s"])?;
    cluster.apply(include_str!("../../manifests/web.yaml"))?;
    let figures = client(cluster, 20)?;
    let image =
        json!({"spec": {"template": {"spec": {"containers": [{"name": "web", "image": "local.test/tools:2"}]}}}});
    let set = "/apis/apps/v1/namespaces/default/statefulsets/web";
    let changed = cluster.api().patch(set, crate::http::STRATEGIC, &image)?;
    let generation = changed["metadata"]["generation"].clone();
    until("the controller to see the change", WHILE, || {
        Ok((cluster.api().get(set)?["status"]["observedGeneration"] == generation).then_some(()))
    })?;
    for name in ["web-2", "web-1", "web-0"] {
        let before = uid(&pod(cluster, name)?);
        let path = format!("{PODS}/{name}");
        let options = |uid: &str| json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}});
        if cluster.api().delete(&path, Some(&options("00000000-0000-0000-0000-000000000000"))).is_ok() {
            bail!("{name} was deleted under a wrong uid");
        }
        cluster.api().delete(&path, Some(&options(&before)))?;
        let after = wait_for_pod(cluster, name, "new and Ready", |it| uid(it) != before && is_ready(it))?;
        let image = &after["spec"]["containers"][0]["image"];
        ensure!(image == "local.test/tools:2", "{name} runs {image}");
    }
    let here = figures()?;
    cluster.kubectl(["wait", "--for=condition=complete", "job/client", "--timeout=50s"])?;
    let there = cluster.kubectl(["logs", "job/client"])?;
    ensure!(there.contains(" errors 0 "), "a request of the pod failed: {there}");
    Ok(format!("node 1: {here}; pod: {}", there.trim()))
}

fn helm(cluster: &Cluster) -> Result<String> {
    let program = cluster.kubernetes_program("helm")?;
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("chart");
    let chart = chart.to_string_lossy();
    let helm = |arguments: &[&str]| cluster.client(&program, arguments, "");
    let image = || -> Result<Option<Value>> {
        let found = cluster.api().find("/api/v1/namespaces/default/configmaps/one")?;
        Ok(found.map(|it| it["data"]["image"].clone()))
    };
    helm(&["install", "one", &chart, "--wait", "--timeout=40s"])?;
    let change = "image=local.test/tools:2,replicas=2";
    helm(&["upgrade", "one", &chart, "--set", change, "--wait", "--timeout=40s"])?;
    ensure!(image()? == Some(json!("local.test/tools:2")), "the upgrade changed nothing");
    helm(&["uninstall", "one", "--wait"])?;
    ensure!(image()?.is_none(), "the ConfigMap outlives its release");
    Ok(String::new())
}
