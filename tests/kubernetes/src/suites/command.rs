//! The command line against a cluster in Kubernetes, from a place where no address of a pod means anything: this machine, from which
//! only the API server is reached.
//!
//! What it prints is compared with what a worker says inside the network of the pods. Checks rest on one another, in order.

use super::Check;
use super::chart::DASHBOARDS;
use super::faults::install::operator;
use super::helpers::{WHILE, is_ready, uid};
use super::{gpu, in_pod, orders, run_graph, runs, traces};
use crate::cluster::Cluster;
use crate::process::{self, Ended, until};
use crate::requirements::Skip;
use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CloneFlags, setns};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// Where the cluster is, and its name.
pub(super) const NAMESPACE: &str = "outside";
pub(super) const NAME: &str = "words";
const WORKERS: usize = 3;
const CLUSTERS: &str = "/apis/engram.dev/v1alpha1/namespaces/outside/learnerclusters";
pub(super) const PODS: &str = "/api/v1/namespaces/outside/pods";
/// A command that waits for a change of the cluster.
pub(super) const COMMAND: Duration = Duration::from_secs(180);
/// A user who may look at objects, and at nothing inside of pods.
const LOOKER: &str = "looker";
/// How `engram` ends: the table of its help.
const USAGE: i32 = 2;
const NOT_FOUND: i32 = 3;
const NOT_READY: i32 = 4;
pub(super) const CONFLICT: i32 = 5;
pub(super) const DENIED: i32 = 7;

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "two operators start from the chart", run: operator },
        Check { name: "an upgrade with an endpoint enables traces", run: traces::enabled },
        Check { name: "a cluster is Ready", run: begins },
        // While it holds nothing: what is learned is compared to the bit.
        Check { name: "a run whose driver's node is killed learns what it would have", run: runs::moves },
        Check { name: "a run learns from a ConfigMap, and stops when it is deleted", run: runs::stops },
        Check { name: "only what changed of a graph of six runs is repeated", run: run_graph::executes },
        Check { name: "kubectl engram says of it what its object says", run: status },
        Check { name: "memories written through the API server are what a worker serves", run: memories },
        Check { name: "traces of operators and workers arrive in Jaeger", run: traces::arrive },
        Check { name: "what a worker's devices do is recorded from outside", run: profiled },
        Check { name: "inside a pod it finds them by the account of the pod", run: inside_a_pod },
        Check { name: "a run is followed to its end", run: follows },
        Check { name: "partitions are listed, and an order that is not needed is refused", run: partitions },
        Check { name: "a worker that comes back elsewhere is found again", run: replaced },
        Check { name: "every metric that an alert or a dashboard names is exported", run: figures },
        Check { name: "scaled to 4 workers and back", run: scaled },
        Check { name: "an unknown name is an error that lists the existing ones", run: absent },
        Check { name: "a right that is missing is named", run: forbidden },
        Check { name: "kubectl completes for the plug-in", run: completed },
        Check { name: "a GPU that is assigned and cannot be used is reported", run: gpu::reported },
        Check { name: "a deleted map is rebuilt, and nothing is lost", run: orders::rebuilt },
        Check { name: "a lagging replica is promoted by an administrator", run: orders::promoted },
        Check { name: "a cluster that is not Ready is reported, and so is a deleted one", run: ends },
    ]
}

/// `engram` next to this program, under one of its names.
pub(super) fn program(cluster: &Cluster, name: &str) -> Result<PathBuf> {
    let built = std::env::current_exe()?.with_file_name("engram");
    if !built.is_file() {
        return Err(Skip(format!("there is no {}: `cargo xtask kubernetes` builds it", built.display())).into());
    }
    let link = cluster.path("bin").join(name);
    if !link.exists() {
        symlink(&built, &link).with_context(|| format!("failed to make {}", link.display()))?;
    }
    Ok(link)
}

/// Runs it on this machine, with a kubeconfig for the API server and a home of its own.
pub(super) fn started(cluster: &Cluster, name: &str, kubeconfig: &Path, arguments: &[&str]) -> Result<Ended> {
    let mut command = Command::new(program(cluster, name)?);
    command.env_clear().env("HOME", cluster.folder()).env("KUBECONFIG", kubeconfig).args(arguments);
    process::run(&mut command, b"", COMMAND)
}

/// Its output with all rights.
pub(super) fn engram(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    let ended = started(cluster, "engram", &admin(cluster)?, &[&["-n", NAMESPACE], arguments].concat())?;
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.success(), "engram {} ended with {}: {}", arguments.join(" "), ended.status, said.trim());
    Ok(String::from_utf8(ended.stdout)?)
}

/// What it says when it refuses, with this status.
pub(super) fn refused(cluster: &Cluster, kubeconfig: &Path, status: i32, arguments: &[&str]) -> Result<String> {
    let ended = started(cluster, "engram", kubeconfig, arguments)?;
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    ensure!(ended.status.code() == Some(status), "engram {} ended with {}: {said}", arguments.join(" "), ended.status);
    Ok(said)
}

pub(super) fn read(text: &str) -> Result<Value> {
    serde_json::from_str(text).with_context(|| format!("not JSON: {text}"))
}

/// The kubeconfig of an administrator, with the address at which the API server is reached from here.
pub(super) fn admin(cluster: &Cluster) -> Result<PathBuf> {
    let config = cluster.admin_config()?;
    kubeconfig(cluster, "outside", config["users"][0]["user"].clone())
}

pub(super) fn kubeconfig(cluster: &Cluster, name: &str, user: Value) -> Result<PathBuf> {
    let mut config = cluster.admin_config()?;
    if !cluster.is_given() {
        let server = &mut config["clusters"][0]["cluster"]["server"];
        let inside = server.as_str().context("the kubeconfig names no server")?.to_owned();
        *server = format!("https://127.0.0.1:{}", outside(cluster, &inside)?).into();
    }
    config["contexts"][0]["context"]["namespace"] = NAMESPACE.into();
    config["users"][0]["user"] = user;
    let path = cluster.path(&format!("{name}.kubeconfig"));
    // Commands that run at the same time read it: it is replaced as a whole.
    let mut written = tempfile::NamedTempFile::new_in(path.parent().context("the file is in no folder")?)?;
    written.write_all(config.to_string().as_bytes())?;
    written.persist(&path)?;
    Ok(path)
}

/// The port of this machine behind which the API server is.
fn outside(cluster: &Cluster, server: &str) -> Result<u16> {
    static PORT: OnceLock<u16> = OnceLock::new();
    if let Some(port) = PORT.get() {
        return Ok(*port);
    }
    let address = server.trim_start_matches("https://").to_owned();
    let network = Arc::new(cluster.network_namespace(1)?);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for taken in listener.incoming().flatten() {
            let (network, address) = (Arc::clone(&network), address.clone());
            // A broken connection is reported to its client.
            thread::spawn(move || drop(passed(taken, &network, &address)));
        }
    });
    Ok(*PORT.get_or_init(|| port))
}

/// Passes bytes between a connection to this machine and one that is made in another network.
fn passed(taken: TcpStream, network: &File, address: &str) -> io::Result<()> {
    setns(network, CloneFlags::CLONE_NEWNET)?;
    let made = TcpStream::connect(address)?;
    let (mut from, mut to) = (taken.try_clone()?, made.try_clone()?);
    let there = thread::spawn(move || {
        let copied = io::copy(&mut from, &mut to);
        to.shutdown(Shutdown::Write).and(copied)
    });
    let (mut from, mut to) = (made, taken);
    let back = io::copy(&mut from, &mut to);
    to.shutdown(Shutdown::Both)?;
    drop(there.join());
    back.map(drop)
}

fn begins(cluster: &Cluster) -> Result<String> {
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": NAME, "namespace": NAMESPACE },
        "spec": {
            "workers": WORKERS, "replicationFactor": 2, "partitions": 16, "gpu": { "mode": "Disabled" },
            "capacity": { "memories": 100_000 }, "learning": { "initialWeight": 0.0 }, "storage": { "ephemeral": true },
            // What workers say themselves is asked for without a certificate; suite `access` has a cluster with TLS.
            "tls": { "mode": "Disabled" },
        },
    });
    cluster
        .apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } }).to_string())?;
    until("the kind", WHILE, || cluster.api().create(CLUSTERS, &object).map(Some))?;
    ready(cluster)
}

pub(super) fn ready(cluster: &Cluster) -> Result<String> {
    let began = Instant::now();
    until("the cluster to be Ready", COMMAND, || {
        let status = &object(cluster)?["status"];
        ensure!(status["partitions"]["healthy"] == 16 && status["workers"]["ready"] == WORKERS, "{status}");
        Ok(Some(()))
    })?;
    Ok(format!("after {:.1} s", began.elapsed().as_secs_f64()))
}

fn ends(cluster: &Cluster) -> Result<String> {
    // A second one, whose pods fit on no node, so that none is ever Ready.
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": "large", "namespace": NAMESPACE },
        "spec": { "workers": 1, "replicationFactor": 1, "storage": { "size": "1Gi" }, "resources": { "requests": { "cpu": "1k" } } },
    });
    cluster.api().create(CLUSTERS, &object)?;
    let admin = admin(cluster)?;
    until("a pod of it", WHILE, || cluster.api().find(&format!("{PODS}/large-worker-0")))?;
    let said = refused(cluster, &admin, NOT_READY, &["-n", NAMESPACE, "rank", "--cluster", "large"])?;
    ensure!(said.contains("no worker of LearnerCluster outside/large is ready: large-worker-0 is Pending"), "{said}");
    let said = refused(cluster, &admin, USAGE, &["-n", NAMESPACE, "rank"])?;
    ensure!(said.contains("several LearnerClusters (large, words); select one"), "{said}");
    for name in ["large", NAME] {
        cluster.api().delete(&format!("{CLUSTERS}/{name}"), None)?;
    }
    until("the pods to go", COMMAND, || {
        Ok(cluster.api().get(PODS)?["items"].as_array().is_some_and(Vec::is_empty).then_some(()))
    })?;
    let said = refused(cluster, &admin, NOT_FOUND, &["-n", NAMESPACE, "status"])?;
    ensure!(said.contains("LearnerCluster not found in namespace outside"), "{said}");
    Ok(String::new())
}

pub(super) fn pod(cluster: &Cluster, name: &str) -> Result<Value> {
    cluster.api().get(&format!("{PODS}/{name}"))
}

fn object(cluster: &Cluster) -> Result<Value> {
    cluster.api().get(&format!("{CLUSTERS}/{NAME}"))
}

fn status(cluster: &Cluster) -> Result<String> {
    let arguments = ["-n", NAMESPACE, "status", NAME, "-o", "json"];
    let ended = started(cluster, "kubectl-engram", &admin(cluster)?, &arguments)?;
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.success(), "it ended with {}: {}", ended.status, said.trim());
    let output = read(&String::from_utf8(ended.stdout)?)?;
    let object = object(cluster)?;
    ensure!(output["ready"] == true, "{output}");
    ensure!(output["cluster"] == object["status"]["clusterId"], "cluster {}", output["cluster"]);
    ensure!(output["workers"].as_array().is_some_and(|it| it.len() == WORKERS), "{}", output["workers"]);
    ensure!(output["replication"]["healthy"] == object["status"]["partitions"]["healthy"], "{}", output["replication"]);
    // Without -n the namespace is that of the kubeconfig, and without a name the only cluster of it is meant.
    let ended = started(cluster, "kubectl-engram", &admin(cluster)?, &["top", "--once", "-o", "json"])?;
    let top = read(&String::from_utf8(ended.stdout)?)?;
    ensure!(top["name"] == NAME, "{top}");
    Ok(format!("map version {}", output["mapVersion"]))
}

/// What a worker says in the network of the pods.
fn inside(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    let found = pod(cluster, &format!("{NAME}-worker-1"))?;
    let address = format!("{}:7443", found["status"]["podIP"].as_str().context("the pod has no address")?);
    let program = program(cluster, "engram")?;
    cluster.in_network(1, program, [&["--address", &address], arguments].concat())
}

fn memories(cluster: &Cluster) -> Result<String> {
    let keys: Vec<String> = (0..300).map(|number| format!("command-{number}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    engram(cluster, &[&["insert", "--weight", "0.25", "--group", "7"], &keys[..]].concat())?;
    engram(cluster, &[&["reinforce", "--quality", "1"], &keys[..7]].concat())?;
    for arguments in [
        &["rank", "--limit", "40", "-o", "json"][..],
        &[&["get", "-o", "json"], &keys[..20]].concat(),
        &["quality", "-o", "json"],
    ] {
        let (output, meant) = (engram(cluster, arguments)?, inside(cluster, arguments)?);
        ensure!(output == meant, "engram {}: {output} from outside, {meant} from inside", arguments.join(" "));
    }
    // A quarter, rewarded with the whole of the learning rate of 0.05.
    let raised = read(&engram(cluster, &["get", "-o", "json", keys[0]])?)?["items"][0]["weight"].as_f64();
    ensure!(raised.is_some_and(|weight| (weight - 0.3).abs() < 1e-6), "it weighs {raised:?}");
    Ok("300 written, 40 ranked".into())
}

fn profiled(cluster: &Cluster) -> Result<String> {
    let file = cluster.path("profile.json");
    let path = file.to_string_lossy();
    let record = ["profile", "1", "--seconds", "3", "--trace", &path, "-o", "json"];
    let output = thread::scope(|scope| {
        let recording = scope.spawn(|| engram(cluster, &record));
        while !recording.is_finished() {
            engram(cluster, &["rank", "--limit", "10"])?;
        }
        recording.join().expect("it does not panic")
    });
    let output = read(&output?)?;
    let spans: u64 = output["devices"].as_array().into_iter().flatten().filter_map(|it| it["spans"].as_u64()).sum();
    let timeline = read(&fs::read_to_string(&file)?)?;
    let drawn = timeline["traceEvents"].as_array().into_iter().flatten().filter(|it| it["ph"] == "X").count();
    ensure!(spans > 0 && drawn as u64 == spans, "{spans} spans are reported, {drawn} are drawn: {output}");
    let bottleneck = output["bottleneck"].as_str().with_context(|| format!("no bottleneck: {output}"))?;
    Ok(format!("{spans} spans, bottleneck: {bottleneck}"))
}

fn inside_a_pod(cluster: &Cluster) -> Result<String> {
    let arguments = ["rank", "--limit", "40", "-o", "json"];
    let (output, meant) = (in_pod::asked(cluster, NAMESPACE, &arguments)?, inside(cluster, &arguments)?);
    ensure!(output == meant, "{output} in a pod, {meant} of a worker");
    Ok(String::new())
}

fn follows(cluster: &Cluster) -> Result<String> {
    let manifest = |source: Value| {
        json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": "from-outside" },
            "spec": { "clusterRef": { "name": NAME }, "kind": "Memory", "memory": { "source": source, "epochs": 5 } },
        })
    };
    let file = cluster.path("run.yaml");
    let path = file.to_string_lossy().into_owned();
    fs::write(
        &file,
        manifest(json!({ "events": { "path": "words.csv", "columns": { "epoch": "day", "key": "word" } } }))
            .to_string(),
    )?;
    let said = refused(cluster, &admin(cluster)?, USAGE, &["-n", NAMESPACE, "run", &path])?;
    ensure!(said.contains("is a local path"), "{said}");
    fs::write(&file, manifest(json!({ "example": { "name": "StateOfTheUnion" } })).to_string())?;
    engram(cluster, &["run", &path])?;
    // Others see it as any run that was applied.
    let object = format!("/apis/engram.dev/v1alpha1/namespaces/{NAMESPACE}/learnerruns/from-outside");
    let object = until("the run's object to be Complete", WHILE, || {
        Ok(Some(cluster.api().get(&object)?).filter(|object| object["status"]["phase"] == "Complete"))
    })?;
    ensure!(object["status"]["progress"]["epoch"] == 5, "{}", object["status"]);
    // The same once more is the same run; another of its name is none.
    engram(cluster, &["run", &path])?;
    let mut other = manifest(json!({ "example": { "name": "StateOfTheUnion" } }));
    other["spec"]["memory"]["epochs"] = 6.into();
    fs::write(&file, other.to_string())?;
    let said = refused(cluster, &admin(cluster)?, CONFLICT, &["-n", NAMESPACE, "run", &path])?;
    ensure!(said.contains("another LearnerRun from-outside"), "{said}");
    let both = ["-n", NAMESPACE, "status", "--address", "127.0.0.1:7443"];
    let said = refused(cluster, &admin(cluster)?, USAGE, &both)?;
    ensure!(said.contains("--namespace <NAMESPACE>") && said.contains("--address <HOST:PORT,..>"), "{said}");
    let output = read(&engram(cluster, &["describe", "run", "from-outside", "-o", "json"])?)?;
    ensure!(output["status"]["epoch"] == 5, "{}", output["status"]);
    Ok(String::new())
}

fn partitions(cluster: &Cluster) -> Result<String> {
    let list = read(&engram(cluster, &["list", "partitions", "-o", "json"])?)?;
    let items = list["items"].as_array().context("no list")?;
    ensure!(items.len() == 16, "{} partitions", items.len());
    let map = cluster.api().get(&format!("/apis/engram.dev/v1alpha1/namespaces/{NAMESPACE}/partitionmaps/{NAME}"))?;
    for item in items {
        let number = item["partition"].as_u64().context("no number")?.to_string();
        let meant = &map["spec"]["partitions"][&number]["term"];
        ensure!(item["term"] == *meant, "partition {number} is of term {}, in the object {meant}", item["term"]);
        ensure!(item["lsn"].is_u64(), "the primary of partition {number} does not answer");
    }
    let order = ["-n", NAMESPACE, "partition", "force-promote", "3"];
    let said = refused(cluster, &admin(cluster)?, CONFLICT, &order)?;
    ensure!(said.contains("needs no forced promotion"), "{said}");
    let order = ["-n", NAMESPACE, "partition", "force-promote", "3", "--accept-data-loss", "no reason"];
    let said = refused(cluster, &admin(cluster)?, CONFLICT, &order)?;
    ensure!(said.contains("needs no forced promotion"), "{said}");
    let said = refused(cluster, &admin(cluster)?, CONFLICT, &["-n", NAMESPACE, "partition", "rebuild-map", "--yes"])?;
    ensure!(said.contains("the partition map is intact"), "{said}");
    Ok(String::new())
}

fn replaced(cluster: &Cluster) -> Result<String> {
    let name = format!("{NAME}-worker-0");
    let (before, ranked) = (pod(cluster, &name)?, engram(cluster, &["rank", "-k", "40"])?);
    cluster.api().delete(&format!("{PODS}/{name}"), None)?;
    let after = until("another pod of the name", WHILE, || {
        Ok(Some(pod(cluster, &name)?).filter(|it| uid(it) != uid(&before) && is_ready(it)))
    })?;
    let output = engram(cluster, &["rank", "-k", "40"])?;
    ensure!(output == ranked, "{ranked} before, {output} after");
    let worker = read(&engram(cluster, &["describe", "worker", "0", "-o", "json"])?)?;
    ensure!(worker["pod"] == name, "{worker}");
    Ok(format!("from {} to {}", before["status"]["podIP"], after["status"]["podIP"]))
}

/// What an alert waits for under a wrong name never comes, and a panel stays empty.
fn figures(cluster: &Cluster) -> Result<String> {
    let mut named = named(include_str!("../../../../charts/engram/files/alerts.yaml"));
    DASHBOARDS[..2].iter().for_each(|dashboard| named.extend(self::named(dashboard)));
    // This cluster has neither certificates nor an autoscaler; those of suites `identity` and `operator` have. Runs have series while
    // there are any.
    let is_here = |name: &&str| !name.contains("certificate_expiry") && !name.contains("_autoscaling_");
    named.retain(|name| is_here(name) && *name != "engram_runs");
    let pages = pages(cluster)?;
    let missing = missing(&named, &pages);
    ensure!(missing.is_empty(), "not exported: {missing:?}");
    ensure!(named.len() > 8, "only {named:?} are named");
    Ok(format!("{} names", named.len()))
}

/// Figures that rules name. No other word of an expression begins as they do.
pub(super) fn named(rules: &str) -> BTreeSet<&str> {
    let lines = rules.lines().filter(|line| !line.contains("description") && !line.trim_start().starts_with('#'));
    let words = lines.flat_map(|line| line.split(|it: char| !it.is_ascii_alphanumeric() && it != '_'));
    words.filter(|word| word.starts_with("engram_")).collect()
}

/// Those of them that no page has a series of.
fn missing<'a>(named: &BTreeSet<&'a str>, pages: &'a str) -> Vec<&'a str> {
    let output: BTreeSet<&str> = pages.lines().filter_map(|line| line.split(['{', ' ']).next()).collect();
    named.difference(&output).copied().collect()
}

/// What Prometheus would collect.
fn pages(cluster: &Cluster) -> Result<String> {
    const OPERATORS: &str =
        "/api/v1/namespaces/engram-system/pods?labelSelector=app.kubernetes.io%2Fname%3Dengram-operator";
    let mut pages = String::new();
    for path in [PODS, OPERATORS] {
        let list = cluster.api().get(path)?;
        for pod in list["items"].as_array().context("no list of pods")? {
            let url = format!("http://{}:9090/metrics", pod["status"]["podIP"].as_str().context("no address")?);
            pages += &cluster.in_network(1, "curl", ["-sSf", "--max-time", "5", "--noproxy", "*", &url])?;
        }
    }
    Ok(pages)
}

fn scaled(cluster: &Cluster) -> Result<String> {
    for workers in [WORKERS + 1, WORKERS] {
        engram(cluster, &["scale", NAME, "--workers", &workers.to_string(), "--wait", "--timeout", "120"])?;
        let object = object(cluster)?;
        ensure!(object["spec"]["workers"] == workers, "{}", object["spec"]["workers"]);
        ensure!(object["status"]["workers"]["ready"] == workers, "{}", object["status"]["workers"]);
    }
    // The spec's rules hold for every writer.
    let arguments = ["-n", NAMESPACE, "scale", NAME, "--workers", "1"];
    let ended = started(cluster, "engram", &admin(cluster)?, &arguments)?;
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(!ended.status.success() && said.contains("replicationFactor"), "{said}");
    Ok(String::new())
}

fn absent(cluster: &Cluster) -> Result<String> {
    let admin = admin(cluster)?;
    let meant = format!("{NAMESPACE}/{NAME}");
    for (status, arguments, said) in [
        (NOT_FOUND, &["-n", NAMESPACE, "status", "verbs"][..], format!("existing: {NAME}")),
        (NOT_FOUND, &["-n", "kube-system", "status"], meant.clone()),
        (NOT_FOUND, &["-n", "research", "rank"], format!("which does not exist; existing: {meant}")),
        (USAGE, &["--context", "moon", "status"], "moon".into()),
        (USAGE, &["-n", NAMESPACE, "up", "cluster.yaml"], "kubectl apply".into()),
        (USAGE, &["-n", NAMESPACE, "down"], "kubectl delete learnercluster".into()),
        (USAGE, &["-n", NAMESPACE, "drain", "1"], "engram.dev/replace".into()),
    ] {
        let output = refused(cluster, &admin, status, arguments)?;
        ensure!(output.contains(&said), "engram {}: {output}", arguments.join(" "));
    }
    let nowhere = refused(cluster, Path::new("/nonexistent"), USAGE, &["-n", NAMESPACE, "status"])?;
    ensure!(nowhere.contains("set KUBECONFIG"), "{nowhere}");
    Ok(String::new())
}

fn forbidden(cluster: &Cluster) -> Result<String> {
    let rules = json!([
        { "apiGroups": ["engram.dev"], "resources": ["learnerclusters"], "verbs": ["get", "list"] },
        { "apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"] },
    ]);
    let named = json!({ "name": LOOKER, "namespace": NAMESPACE });
    let roles = "rbac.authorization.k8s.io";
    let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": "v1", "kind": "ServiceAccount", "metadata": named },
        { "apiVersion": format!("{roles}/v1"), "kind": "Role", "metadata": named, "rules": rules },
        { "apiVersion": format!("{roles}/v1"), "kind": "RoleBinding", "metadata": named,
          "roleRef": { "apiGroup": roles, "kind": "Role", "name": LOOKER },
          "subjects": [{ "kind": "ServiceAccount", "name": LOOKER, "namespace": NAMESPACE }] },
    ] });
    cluster.apply(&objects.to_string())?;
    let looker = kubeconfig(cluster, LOOKER, json!({ "token": token(cluster, LOOKER)? }))?;
    for (arguments, right) in [
        (&["-n", NAMESPACE, "rank"][..], "create pods/portforward in namespace outside"),
        (&["-n", NAMESPACE, "scale", NAME, "--workers", "5"], "patch learnerclusters/scale in namespace outside"),
        (&["-n", NAMESPACE, "list", "partitions"], "get configmaps in namespace outside"),
        (&["-n", "kube-system", "rank"], "list learnerclusters in namespace kube-system"),
    ] {
        let said = refused(cluster, &looker, DENIED, arguments)?;
        ensure!(said.contains(right), "engram {}: {said}", arguments.join(" "));
    }
    let unknown = kubeconfig(cluster, "unknown", json!({ "token": "none" }))?;
    let said = refused(cluster, &unknown, DENIED, &["-n", NAMESPACE, "rank"])?;
    ensure!(said.contains("unauthenticated"), "{said}");
    Ok(String::new())
}

/// A token of an account of the namespace.
pub(super) fn token(cluster: &Cluster, account: &str) -> Result<String> {
    const ACCOUNTS: &str = "/api/v1/namespaces/outside/serviceaccounts";
    let request =
        json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": { "audiences": [] } });
    let granted = cluster.api().create(&format!("{ACCOUNTS}/{account}/token"), &request)?;
    Ok(granted["status"]["token"].as_str().context("no token was granted")?.to_owned())
}

fn completed(cluster: &Cluster) -> Result<String> {
    // As kubectl finds it: on the path, under a name of its own.
    let folder = program(cluster, "kubectl-engram")?.with_file_name("");
    program(cluster, "kubectl_complete-engram")?;
    let kubectl = cluster.kubernetes_program("kubectl")?;
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(kubectl);
    command.env_clear().env("PATH", path).env("HOME", cluster.folder()).env("KUBECONFIG", admin(cluster)?);
    let offered = process::read(command.args(["__complete", "engram", "part"]), b"", COMMAND)?;
    ensure!(offered.starts_with("partition\t"), "{offered}");
    let mut command = Command::new(cluster.kubernetes_program("kubectl")?);
    command.env_clear().env("PATH", format!("{}:/usr/bin:/bin", folder.display())).env("HOME", cluster.folder());
    command.env("KUBECONFIG", admin(cluster)?);
    let output =
        process::read(command.args(["engram", "-n", NAMESPACE, "list", "workers", "-o", "json"]), b"", COMMAND)?;
    let Some(items) = read(&output)?["items"].as_array().map(Vec::len) else { bail!("{output}") };
    ensure!(items == WORKERS, "kubectl engram lists {items} workers");
    Ok(String::new())
}

#[cfg(test)]
mod tests {
    use super::{missing, named};

    #[test]
    fn metric_that_is_not_exported_is_found() {
        let rules = "# engram_comment\nexpr: sum by (learner_cluster) (engram_ready) > rate(engram_log_total{state=\"x\"}[5m])\n\
            description: \"engram_words\"\n";
        let pages = "# TYPE engram_log counter\nengram_ready{worker=\"0\"} 1\nengram_log_total_of_others 4\n";
        assert_eq!(missing(&named(rules), pages), ["engram_log_total"]);
    }
}
