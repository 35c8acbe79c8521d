//! Training on real nodes, over mutual TLS: a replay run that loses the node of its driver, and programs of the user's in pods.

use super::Check;
use super::faults::install::{USER, operator, program};
use super::helpers::WHILE;
use crate::cluster::Cluster;
use crate::image::{Content, Image, write_archive};
use crate::process::until;
use crate::requirements::Skip;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const NAMESPACE: &str = "training";
const NAME: &str = "trainers";
const CLUSTERS: &str = "/apis/engram.dev/v1alpha1/namespaces/training/learnerclusters";
const RUNS: &str = "/apis/engram.dev/v1alpha1/namespaces/training/learnerruns";
const PODS: &str = "/api/v1/namespaces/training/pods";
const READY: Duration = Duration::from_secs(180);
const RUN: Duration = Duration::from_secs(240);
const STEPS: u64 = 600;
/// The image with `engram` and a shell.
const IMAGE: &str = "local.test/program:1";
/// Names the Python of an environment with the packages `engram` and `torch`.
const TORCH_PYTHON: &str = "ENGRAM_TORCH_PYTHON";

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "two operators start from the chart", run: operator },
        Check { name: "a cluster for training is Ready", run: begins },
        Check { name: "a replay run whose driver's node is killed ends with the undisturbed result", run: trains },
        Check { name: "a program in two pods goes on when one of them is killed", run: job },
        Check { name: "a PyTorch program in two pods loses no step when one of them is killed", run: torch },
        Check { name: "the cluster is deleted with its runs", run: ends },
    ]
}

fn begins(cluster: &Cluster) -> Result<String> {
    let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } });
    cluster.apply(&namespace.to_string())?;
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": NAME, "namespace": NAMESPACE },
        "spec": {
            "workers": 3, "replicationFactor": 2, "partitions": 8, "gpu": { "mode": "Disabled" },
            "capacity": { "memories": 10_000 }, "storage": { "ephemeral": true }, "tls": { "mode": "Auto" },
            "access": [{ "serviceAccount": "default", "rights": ["Read", "Reinforce", "Decay"] }],
        },
    });
    let began = Instant::now();
    until("the kind", WHILE, || cluster.api().create(CLUSTERS, &object).map(Some))?;
    ready(cluster)?;
    Ok(format!("after {:.1} s", began.elapsed().as_secs_f64()))
}

fn ready(cluster: &Cluster) -> Result<()> {
    until("the cluster to be Ready", READY, || {
        let status = &cluster.api().get(&format!("{CLUSTERS}/{NAME}"))?["status"];
        ensure!(status["partitions"]["healthy"] == 8 && status["workers"]["ready"] == 3, "{status}");
        Ok(Some(()))
    })
}

/// The status of a run, unless it has failed.
fn status(cluster: &Cluster, name: &str) -> Result<Value> {
    let status = cluster.api().get(&format!("{RUNS}/{name}"))?["status"].take();
    ensure!(status["phase"] != "Failed", "{name}: {status:#}");
    Ok(status)
}

fn complete(cluster: &Cluster, name: &str) -> Result<Value> {
    until("the run to be complete", RUN, || {
        let status = status(cluster, name)?;
        ensure!(status["phase"] == "Complete", "{name}: {status:#}");
        Ok(Some(status))
    })
}

/// Starts a run whose result is the same for any number of workers.
fn train(cluster: &Cluster, name: &str) -> Result<()> {
    let layers =
        json!([{ "dense": 32, "activation": "Relu" }, { "dropout": 0.1 }, { "dense": 1, "activation": "Sigmoid" }]);
    let replay = json!({
        "source": { "synthetic": { "features": 50, "samples": 2_000, "smallest": 2, "largest": 20 } },
        "model": { "inputs": [{ "field": "mask", "dim": 50 }], "layers": layers, "loss": { "kind": "Mse", "target": "score" } },
        "optimizer": { "kind": "AdamW", "rate": 0.001, "clip": 1.0 },
        "batch": 128, "steps": STEPS, "order": "PartitionInvariant",
    });
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": name, "namespace": NAMESPACE },
        "spec": { "clusterRef": { "name": NAME }, "kind": "Replay", "replay": replay },
    });
    cluster.api().create(RUNS, &object).map(drop)
}

fn digest(status: &Value) -> Result<&str> {
    status["outputs"]["digest"].as_str().with_context(|| format!("no digest: {status:#}"))
}

fn trains(cluster: &Cluster) -> Result<String> {
    let began = Instant::now();
    train(cluster, "undisturbed")?;
    let undisturbed = complete(cluster, "undisturbed")?;
    let alone = began.elapsed().as_secs_f64();
    train(cluster, "disturbed")?;
    let (driver, step) = until("the run to train", WHILE, || {
        let status = status(cluster, "disturbed")?;
        let step = status["progress"]["epoch"].as_u64().unwrap_or(0);
        ensure!(status["phase"] != "Complete", "it was done before its driver was found");
        Ok(status["driver"].as_str().filter(|_| step > 0).map(|driver| (driver.to_owned(), step)))
    })?;
    let pod = cluster.api().get(&format!("{PODS}/{driver}"))?;
    let node = pod["spec"]["nodeName"].as_str().and_then(|name| name.strip_prefix('n')?.parse().ok());
    let node: u8 = node.context("the driver is on no node")?;
    cluster.kill_node(node)?;
    let killed = Instant::now();
    let ended = complete(cluster, "disturbed");
    let took = killed.elapsed().as_secs_f64();
    cluster.add_node(node)?;
    let disturbed = ended?;
    ensure!(disturbed["progress"]["epoch"] == STEPS, "{disturbed:#}");
    ensure!(digest(&disturbed)? == digest(&undisturbed)?, "results differ: {undisturbed:#} {disturbed:#}");
    ready(cluster)?;
    Ok(format!("{STEPS} steps in {alone:.1} s; n{node} killed at step {step}, complete {took:.1} s later"))
}

/// The pods of a run of kind `Job` with this index, the newest last.
fn pods_of(cluster: &Cluster, run: &str, index: u32) -> Result<Vec<Value>> {
    let mut all = cluster.api().get(&format!("{PODS}?labelSelector=engram.dev%2Frun%3D{run}"))?;
    let index = index.to_string();
    let of = |pod: &Value| pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == index.as_str();
    let mut pods = all["items"].as_array_mut().context("pods are a list")?.drain(..).filter(of).collect::<Vec<_>>();
    pods.sort_by_key(|pod| pod["metadata"]["creationTimestamp"].to_string());
    Ok(pods)
}

/// Waits for a running pod of a run other than `except`; its name.
fn running(cluster: &Cluster, run: &str, index: u32, except: &str) -> Result<String> {
    until("the pod to run", RUN, || {
        status(cluster, run)?;
        let pods = pods_of(cluster, run, index)?;
        let running = |pod: &&Value| pod["status"]["phase"] == "Running" && pod["metadata"]["name"] != except;
        Ok(pods.iter().rev().find(running).and_then(|pod| pod["metadata"]["name"].as_str()).map(str::to_owned))
    })
}

fn begin_job(cluster: &Cluster, name: &str, job: &Value) -> Result<()> {
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": name, "namespace": NAMESPACE },
        "spec": { "clusterRef": { "name": NAME }, "kind": "Job", "backoffLimit": 3, "job": job },
    });
    cluster.api().create(RUNS, &object).map(drop)
}

/// Loads an image with a shell and `engram`.
fn load_program(cluster: &Cluster) -> Result<()> {
    let shell = Path::new("/bin/sh").canonicalize().context("this machine has no shell")?;
    let sleep = Path::new("/bin/sleep").canonicalize().context("this machine has no sleep")?;
    let content = Content::default().program("/bin/sh", &shell)?.program("/bin/sleep", &sleep)?;
    let content = content.program("/bin/engram", &program(cluster, "engram")?)?;
    let archive = cluster.path("program.tar");
    write_archive(&archive, &[Image { name: IMAGE, content: &content, entrypoint: &["/bin/sh"], user: USER }])?;
    cluster.load_image(&archive)
}

/// Each pod inserts a memory, waits for one that the second pod inserts once it was started again, and inserts another one.
fn job(cluster: &Cluster) -> Result<String> {
    load_program(cluster)?;
    let script = "set -e; engram insert started-$ENGRAM_RANK-$HOSTNAME\n\
        until engram get go > /dev/null 2>&1; do sleep 0.5; done\n\
        engram insert ended-$ENGRAM_RANK-of-$ENGRAM_WORLD_SIZE; echo done";
    begin_job(cluster, "program", &json!({ "image": IMAGE, "command": ["/bin/sh", "-c", script], "replicas": 2 }))?;
    let first = running(cluster, "program", 1, "")?;
    running(cluster, "program", 0, "")?;
    let began = Instant::now();
    cluster.kill_container(NAMESPACE, &first, "main")?;
    let second = running(cluster, "program", 1, &first)?;
    let took = began.elapsed().as_secs_f64();
    in_pod(cluster, &second, "engram insert go")?;
    let status = complete(cluster, "program")?;
    let process = status["job"]["processes"].as_array().and_then(|all| all.iter().find(|it| it["index"] == 1));
    ensure!(status["job"]["succeeded"] == 2, "{status:#}");
    ensure!(process.is_some_and(|it| it["restarts"] == 1), "{status:#}");
    Ok(format!("another pod after {took:.1} s"))
}

/// Runs a line of the shell in the container of a pod.
fn in_pod(cluster: &Cluster, pod: &str, line: &str) -> Result<String> {
    let namespace = format!("--namespace={NAMESPACE}");
    cluster.kubectl(["exec", pod, namespace.as_str(), "--", "/bin/sh", "-c", line])
}

/// The example with PyTorch, by the Python of this machine: folders of nodes that are this machine's are mounted into the pods.
fn torch(cluster: &Cluster) -> Result<String> {
    let python = std::env::var_os(TORCH_PYTHON).map(PathBuf::from);
    let python = python.ok_or_else(|| Skip(format!("{TORCH_PYTHON} names no Python with engram and torch")))?;
    let environment = python.parent().and_then(Path::parent).context("the Python is in no environment")?;
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/python").canonicalize()?;
    let folders = [Path::new("/usr"), Path::new("/lib"), Path::new("/lib64"), environment, &examples];
    let folders = || folders.iter().filter(|path| path.exists()).enumerate();
    let volumes: Vec<Value> =
        folders().map(|(at, path)| json!({ "name": format!("f{at}"), "hostPath": { "path": path } })).collect();
    let mounts: Vec<Value> =
        folders().map(|(at, path)| json!({ "name": format!("f{at}"), "mountPath": path, "readOnly": true })).collect();
    let main = json!({ "name": "main", "volumeMounts": mounts });
    let job = json!({
        "image": IMAGE, "command": [python, examples.join("ddp_elastic.py")],
        "args": ["--steps", "300", "--no-kill", "--pause", "0.02"],
        "env": [{ "name": "OMP_NUM_THREADS", "value": "1" }, { "name": "HOME", "value": "/tmp" }],
        "replicas": 2, "podTemplate": { "spec": { "volumes": volumes, "containers": [main] } },
    });
    begin_job(cluster, "torch", &job)?;
    let first = running(cluster, "torch", 1, "")?;
    until("steps", RUN, || Ok(log(cluster, &first)?.contains("\"loss\"").then_some(())))?;
    cluster.kill_container(NAMESPACE, &first, "main")?;
    running(cluster, "torch", 1, &first)?;
    complete(cluster, "torch")?;
    let (survivor, joined) = (result_of(cluster, 0)?, result_of(cluster, 1)?);
    ensure!(survivor["taken"] == 300 && survivor["without_gaps"] == true, "a step is lost: {survivor}");
    ensure!(survivor["digest"] == joined["digest"], "the processes differ: {survivor} {joined}");
    Ok(format!("the second pod's successor took part from step {}", joined["first"]))
}

fn log(cluster: &Cluster, pod: &str) -> Result<String> {
    cluster.kubectl(["logs", pod, format!("--namespace={NAMESPACE}").as_str()])
}

/// The last line of the program that ended last with this index.
fn result_of(cluster: &Cluster, index: u32) -> Result<Value> {
    let pods = pods_of(cluster, "torch", index)?;
    let name = pods.last().and_then(|pod| pod["metadata"]["name"].as_str()).context("no pod is left")?;
    let log = log(cluster, name)?;
    let line = log.lines().last().context("the program printed nothing")?;
    serde_json::from_str(line).with_context(|| format!("not a result: {line}"))
}

fn ends(cluster: &Cluster) -> Result<String> {
    cluster.api().delete(&format!("/api/v1/namespaces/{NAMESPACE}"), None)?;
    until("the namespace to go", RUN, || {
        Ok(cluster.api().find(&format!("/api/v1/namespaces/{NAMESPACE}"))?.is_none().then_some(()))
    })?;
    Ok(String::new())
}
