//! Who may do what with a cluster that has TLS: people by `engram -n`, programs by tokens of their accounts.
//!
//! Tokens are the API server's own. What is wrong with one is tried on a worker alone in `worker/tests/worker/security/tokens.rs`; here it is that
//! keys, rights and accounts come together in a real Kubernetes, and go on without its API server. The operators look after the namespace of
//! this suite alone.

use super::Check;
use super::command::{DENIED, PODS, kubeconfig, read, refused, started};
use super::faults::install::{helm, operator};
use super::helpers::WHILE;
use crate::cluster::Cluster;
use crate::process::until;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const NAMESPACE: &str = "guarded";
const NAME: &str = "words";
const CLUSTERS: &str = "/apis/engram.dev/v1alpha1/namespaces/guarded/learnerclusters";
const ACCOUNTS: &str = "/api/v1/namespaces/guarded/serviceaccounts";
const READY: Duration = Duration::from_secs(180);
/// How long a change of a ConfigMap may take to reach a pod: kubelets look once a minute.
const MOUNTED: Duration = Duration::from_secs(150);

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "two operators start from the chart", run: operator },
        Check { name: "they may look after one namespace alone", run: narrows },
        Check { name: "a cluster with TLS and rights is Ready", run: begins },
        Check { name: "engram -n works with it by a token that the API server gives", run: people },
        Check { name: "an account does what its rights say, and nothing with what is of elsewhere", run: programs },
        Check { name: "rights that change are taken without a restart", run: changes },
        Check { name: "without the API server good tokens are taken, and others refused", run: alone },
    ]
}

fn object(access: &Value) -> Value {
    json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": NAME, "namespace": NAMESPACE },
        "spec": {
            "workers": 2, "replicationFactor": 2, "partitions": 8, "gpu": { "mode": "Disabled" },
            "capacity": { "memories": 10_000 }, "storage": { "ephemeral": true },
            "tls": { "mode": "Auto" }, "access": access,
        },
    })
}

/// Operators of one namespace ask for no TokenReview: they verify the tokens of pods by the API server's keys.
fn narrows(cluster: &Cluster) -> Result<String> {
    let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } });
    cluster.apply(&namespace.to_string())?;
    let values = format!("worker.image.tag=1,watchNamespaces[0]={NAMESPACE}");
    until("operators of one namespace", READY, || helm(cluster, &values).map(Some))?;
    let roles = "/apis/rbac.authorization.k8s.io/v1";
    let everywhere = cluster.api().find(&format!("{roles}/clusterrolebindings/engram-operator-engram-system"))?;
    ensure!(everywhere.is_none(), "they may do everywhere what they may do here: {everywhere:?}");
    Ok(String::new())
}

fn begins(cluster: &Cluster) -> Result<String> {
    for account in ["reader", "stranger"] {
        let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": { "name": account, "namespace": NAMESPACE } });
        cluster.apply(&account.to_string())?;
    }
    let access = json!([{ "serviceAccount": "reader", "rights": ["Read"] }]);
    let began = Instant::now();
    until("the kind", WHILE, || cluster.api().create(CLUSTERS, &object(&access)).map(Some))?;
    until("the cluster to be Ready", READY, || {
        let status = &cluster.api().get(&format!("{CLUSTERS}/{NAME}"))?["status"];
        ensure!(status["partitions"]["healthy"] == 8 && status["workers"]["ready"] == 2, "{status}");
        Ok(Some(()))
    })?;
    let published = cluster.api().get("/api/v1/namespaces/guarded/configmaps/words-ca")?;
    for file in ["ca.pem", "issuer", "jwks.json"] {
        ensure!(published["data"][file].is_string(), "{file} is not published: {published}");
    }
    Ok(format!("after {:.1} s", began.elapsed().as_secs_f64()))
}

/// A kubeconfig with all rights.
fn admin(cluster: &Cluster) -> Result<PathBuf> {
    let config = cluster.admin_config()?;
    kubeconfig(cluster, "guard", config["users"][0]["user"].clone())
}

/// Output of `engram -n` with all rights.
fn engram(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    let ended = started(cluster, "engram", &admin(cluster)?, &[&["-n", NAMESPACE], arguments].concat())?;
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.success(), "engram {} ended with {}: {}", arguments.join(" "), ended.status, said.trim());
    Ok(String::from_utf8(ended.stdout)?)
}

fn people(cluster: &Cluster) -> Result<String> {
    engram(cluster, &["insert", "green", "blue", "--weight", "0.5"])?;
    let ranked = read(&engram(cluster, &["rank", "-o", "json"])?)?;
    ensure!(ranked["items"].as_array().is_some_and(|items| items.len() == 2), "{ranked}");
    let status = read(&engram(cluster, &["status", "-o", "json"])?)?;
    ensure!(status["ready"] == true && status["replication"].is_object(), "{status}");
    let listed = read(&engram(cluster, &["list", "partitions", "-o", "json"])?)?;
    ensure!(listed["items"].as_array().is_some_and(|items| items.len() == 8), "{listed}");

    // A user who may read everything but get no token receives the missing right.
    let rules = json!([
        { "apiGroups": ["engram.dev"], "resources": ["learnerclusters"], "verbs": ["get", "list"] },
        { "apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"] },
        { "apiGroups": [""], "resources": ["pods"], "verbs": ["list"] },
        { "apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["create", "get"] },
    ]);
    let (roles, named) = ("rbac.authorization.k8s.io", json!({ "name": "stranger", "namespace": NAMESPACE }));
    let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": format!("{roles}/v1"), "kind": "Role", "metadata": named, "rules": rules },
        { "apiVersion": format!("{roles}/v1"), "kind": "RoleBinding", "metadata": named,
          "roleRef": { "apiGroup": roles, "kind": "Role", "name": "stranger" },
          "subjects": [{ "kind": "ServiceAccount", "name": "stranger", "namespace": NAMESPACE }] },
    ] });
    cluster.apply(&objects.to_string())?;
    let user = json!({ "token": token(cluster, "stranger", &[])? });
    let stranger = kubeconfig(cluster, "stranger", user)?;
    until("the role to be known", WHILE, || {
        let said = refused(cluster, &stranger, DENIED, &["-n", NAMESPACE, "rank"])?;
        ensure!(said.contains("create serviceaccounts/token in namespace guarded"), "{said}");
        Ok(Some(()))
    })?;
    Ok(String::new())
}

/// A token of an account, for these audiences, from the API server.
fn token(cluster: &Cluster, account: &str, audiences: &[&str]) -> Result<String> {
    let request = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": { "audiences": audiences, "expirationSeconds": 3600 } });
    let granted = cluster.api().create(&format!("{ACCOUNTS}/{account}/token"), &request)?;
    Ok(granted["status"]["token"].as_str().context("no token was granted")?.to_owned())
}

/// A file with a token for this cluster.
fn pass(cluster: &Cluster, account: &str) -> Result<String> {
    let object = cluster.api().get(&format!("{CLUSTERS}/{NAME}"))?;
    let id = object["status"]["clusterId"].as_str().context("the cluster has no id")?;
    file(cluster, account, &token(cluster, account, &[&format!("engram/{id}")])?)
}

fn file(cluster: &Cluster, name: &str, text: &str) -> Result<String> {
    let path = cluster.path(&format!("guarded-{name}"));
    fs::write(&path, text)?;
    Ok(path.to_string_lossy().into_owned())
}

fn programs(cluster: &Cluster) -> Result<String> {
    let admin = admin(cluster)?;
    let said = |file: &str, command: &[&str]| {
        refused(cluster, &admin, DENIED, &[&["-n", NAMESPACE, "--token-file", file], command].concat())
    };
    let reader = pass(cluster, "reader")?;
    let ranked = read(&engram(cluster, &["--token-file", &reader, "rank", "-o", "json"])?)?;
    ensure!(ranked["items"].as_array().is_some_and(|items| items.len() == 2), "{ranked}");
    let output = said(&reader, &["insert", "red"])?;
    ensure!(
        output.contains("guarded/reader") && output.contains("lacks the right Reinforce; it has: Read"),
        "{output}"
    );
    let output = said(&pass(cluster, "stranger")?, &["rank"])?;
    ensure!(output.contains("guarded/stranger") && output.contains("has no rights here"), "{output}");
    // As of a cluster that was deleted and made again, and a token that opens the API server.
    let other = "engram/0123456789abcdef0123456789abcdef";
    for audiences in [&[other][..], &[]] {
        let output = said(&file(cluster, "elsewhere", &token(cluster, "reader", audiences)?)?, &["rank"])?;
        ensure!(output.contains("audience"), "{output}");
    }
    // Changed by one letter, in what it says of itself.
    let good = fs::read_to_string(&reader)?;
    let (head, rest) = good.split_once('.').context("a token has parts")?;
    let forged = format!("{head}.{}{}", if rest.starts_with('e') { "f" } else { "e" }, &rest[1..]);
    let output = said(&file(cluster, "forged", &forged)?, &["rank"])?;
    ensure!(output.contains("signature"), "{output}");
    Ok(String::new())
}

fn changes(cluster: &Cluster) -> Result<String> {
    let before: Vec<Value> = pods(cluster)?;
    let access = json!([{ "serviceAccount": "reader", "rights": ["Read", "Reinforce"] }]);
    cluster.apply(&object(&access).to_string())?;
    let (reader, began) = (pass(cluster, "reader")?, Instant::now());
    until("the new right", MOUNTED, || engram(cluster, &["--token-file", &reader, "insert", "red"]).map(Some))?;
    ensure!(pods(cluster)? == before, "a worker was restarted");
    Ok(format!("after {:.0} s", began.elapsed().as_secs_f64()))
}

/// UIDs and restarts of the pods.
fn pods(cluster: &Cluster) -> Result<Vec<Value>> {
    let all = cluster.api().get(&PODS.replace("outside", NAMESPACE))?;
    let seen = |pod: &Value| json!([pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]]);
    Ok(all["items"].as_array().context("pods are a list")?.iter().map(seen).collect())
}

/// What `engram` does at the address of a pod, inside the network of the pods.
fn alone(cluster: &Cluster) -> Result<String> {
    let all = cluster.api().get(&PODS.replace("outside", NAMESPACE))?;
    let address = all["items"][0]["status"]["podIP"].as_str().context("the pod has no address")?;
    let address = format!("{address}:7443");
    let published = cluster.api().get("/api/v1/namespaces/guarded/configmaps/words-ca")?;
    let ca = file(cluster, "ca.pem", published["data"]["ca.pem"].as_str().context("there is no CA")?)?;
    let (reader, stranger) = (pass(cluster, "reader")?, pass(cluster, "stranger")?);
    let program = std::env::current_exe()?.with_file_name("engram");
    let asked = |token: &str| {
        let arguments =
            ["--address", &address, "--certificate-authority", &ca, "--token-file", token, "rank", "-o", "json"];
        cluster.in_network(1, &program, arguments)
    };
    cluster.stop_api()?;
    let (good, bad) = (asked(&reader), asked(&stranger));
    let plain = cluster.in_network(1, &program, ["--address", &address, "rank"]);
    cluster.start_api()?;
    let ranked = read(&good?)?;
    ensure!(ranked["items"].as_array().is_some_and(|items| items.len() == 3), "{ranked}");
    let output = format!("{:#}", bad.err().context("an unknown caller is accepted")?);
    ensure!(output.contains("has no rights here"), "{output}");
    let output = format!("{:#}", plain.err().context("a plaintext caller is accepted")?);
    ensure!(output.contains("speaks TLS"), "{output}");
    Ok(String::new())
}
