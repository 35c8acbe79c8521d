//! Training on real nodes, over mutual TLS: a replay run that loses the node of its driver, and programs of the user's in pods.

use super::Check;
use super::faults::install::{USER, operator, program};
use super::helpers::WHILE;
use crate::PROGRAM;
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
/// Steps of a program in pods.
const GROUP_STEPS: u64 = 300;
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
        Check { name: "a group of two pods loses no step when one of them is killed", run: group },
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
    let node = cluster.node_of(&pod)?;
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
    ensure!(status["job"]["succeeded"] == 2 && process_of(&status, 1)["restarts"] == 1, "{status:#}");
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
    // The Python that the environment was made from, which may be outside of the system's folders.
    let base = python.canonicalize().with_context(|| format!("no Python at {}", python.display()))?;
    let base = base.parent().and_then(Path::parent).context("the Python is in no folder")?;
    let mut folders = vec![Path::new("/usr"), Path::new("/lib"), Path::new("/lib64"), environment, &examples];
    if !folders.iter().any(|folder| base.starts_with(folder)) {
        folders.push(base);
    }
    let folders = || folders.iter().filter(|path| path.exists()).enumerate();
    let mut volumes: Vec<Value> =
        folders().map(|(at, path)| json!({ "name": format!("f{at}"), "hostPath": { "path": path } })).collect();
    let mut mounts: Vec<Value> =
        folders().map(|(at, path)| json!({ "name": format!("f{at}"), "mountPath": path, "readOnly": true })).collect();
    // PyTorch needs a folder for temporary files.
    volumes.push(json!({ "name": "temporary", "emptyDir": {} }));
    mounts.push(json!({ "name": "temporary", "mountPath": "/tmp" }));
    let main = json!({ "name": "main", "volumeMounts": mounts });
    let job = json!({
        "image": IMAGE, "command": [python, examples.join("ddp_elastic.py")],
        "args": ["--steps", GROUP_STEPS.to_string(), "--no-kill", "--pause", "0.1"],
        "env": [{ "name": "OMP_NUM_THREADS", "value": "1" }, { "name": "HOME", "value": "/tmp" }],
        "replicas": 2, "podTemplate": { "spec": { "volumes": volumes, "containers": [main] } },
    });
    loses_no_step(cluster, "torch", &job)
}

/// A program of this package, for machines without PyTorch.
fn group(cluster: &Cluster) -> Result<String> {
    let job = json!({
        "image": "local.test/tools:1", "command": [format!("/bin/{PROGRAM}"), "tool", "train", GROUP_STEPS.to_string()],
        "replicas": 2, "group": "shared",
        "podTemplate": { "spec": { "containers": [{ "name": "main", "imagePullPolicy": "Never" }] } },
    });
    let note = loses_no_step(cluster, "members", &job)?;
    let hints = log(cluster, &newest(cluster, "members", 1)?)?;
    let hints: Value = serde_json::from_str(hints.lines().next().context("the program printed nothing")?)?;
    ensure!(hints["rank"] == 1 && hints["of"] == 2 && hints["group"] == "shared", "{hints}");
    Ok(note)
}

/// Runs a program of two pods that train in one group, and kills the second pod in the middle: the first one takes every step, and both end with
/// the same parameters.
fn loses_no_step(cluster: &Cluster, run: &str, job: &Value) -> Result<String> {
    begin_job(cluster, run, job)?;
    let first = running(cluster, run, 1, "")?;
    let progress = until("steps of both pods", RUN, || {
        let status = status(cluster, run)?;
        ensure!(status["job"]["failed"].as_u64().unwrap_or_default() == 0, "a process failed: {status:#}");
        let log = log(cluster, &first)?;
        let mut reports = log.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        Ok(reports.find(|report| report["members"] == 2))
    })?;
    cluster.kill_container(NAMESPACE, &first, "main")?;
    until("the exit code and the last lines of the killed pod", RUN, || {
        let process = process_of(&status(cluster, run)?, 1);
        let tail = process["logTail"].as_str().unwrap_or_default();
        Ok((process["exitCode"] == 137 && tail.contains("\"loss\"")).then_some(()))
    })?;
    running(cluster, run, 1, &first)?;
    let status = complete(cluster, run)?;
    let process = process_of(&status, 1);
    ensure!(status["job"]["succeeded"] == 2 && process["restarts"] == 1 && process["exitCode"] == 0, "{status:#}");
    let (survivor, joined) = (result_of(cluster, run, 0)?, result_of(cluster, run, 1)?);
    ensure!(survivor["taken"] == GROUP_STEPS && survivor["without_gaps"] == true, "a step is lost: {survivor}");
    ensure!(survivor["digest"] == joined["digest"], "the processes differ: {survivor} {joined}");
    ensure!(joined["first"].as_u64() > Some(1), "the successor did not receive the state of the group: {joined}");
    Ok(format!("killed after step {}; its successor took part from step {}", progress["step"], joined["first"]))
}

/// A process of a run of kind `Job` by its index, from the status of the run.
fn process_of(status: &Value, index: u64) -> Value {
    let processes = status["job"]["processes"].as_array();
    processes.and_then(|all| all.iter().find(|it| it["index"] == index)).cloned().unwrap_or_default()
}

fn log(cluster: &Cluster, pod: &str) -> Result<String> {
    cluster.kubectl(["logs", pod, format!("--namespace={NAMESPACE}").as_str()])
}

/// The newest pod with this index.
fn newest(cluster: &Cluster, run: &str, index: u32) -> Result<String> {
    let pods = pods_of(cluster, run, index)?;
    pods.last().and_then(|pod| pod["metadata"]["name"].as_str()).map(str::to_owned).context("no pod is left")
}

/// The last line of the program that ended last with this index.
fn result_of(cluster: &Cluster, run: &str, index: u32) -> Result<Value> {
    let log = log(cluster, &newest(cluster, run, index)?)?;
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
