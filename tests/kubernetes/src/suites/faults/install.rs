//! The operator in pods, by the chart, and a cluster of three workers that have disks: both from images of the programs next to
//! this one.

use super::watch::{self, CLUSTERS, condition};
use super::{TRIALS, WORKERS};
use crate::Skip;
use crate::cluster::Cluster;
use crate::image::{Content, Image, write_archive};
use crate::process::until;
use crate::suites::helpers::WHILE;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const NAMESPACE: &str = "engram-system";
/// Who runs the programs.
pub(in crate::suites) const USER: &str = "65532:65532";
/// What the images are called: as the chart and `cargo xtask images` do.
const OPERATOR: &str = concat!("localhost/engram/operator:", env!("CARGO_PKG_VERSION"));
pub(super) const WORKER: &str = "localhost/engram/worker";
/// The page with the commands that load images, and how these begin.
const PAGE: &str = include_str!("../../../../../docs/install.md");
const IMPORT: &str = "ctr -n k8s.io images import ";
/// The tag of an earlier build, and its program next to this one.
pub(super) const EARLIER: &str = "earlier";
const EARLIER_PROGRAM: &str = "engram-worker-earlier";
/// Pods start, disks are made, a map is formed, on a machine that may be busy.
const READY: Duration = Duration::from_secs(120);

/// A collector that has lost the API server lists everything again, and a pod may take its whole grace.
const GONE: Duration = Duration::from_secs(240);

/// Check: two operators are Ready.
pub(in crate::suites) fn operator(cluster: &Cluster) -> Result<String> {
    load_images(cluster)?;
    let began = Instant::now();
    let namespace = json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": { "name": NAMESPACE, "labels": { "pod-security.kubernetes.io/enforce": "restricted" } },
    });
    cluster.apply(&namespace.to_string())?;
    // Another suite's outage may have left nodes in doubt for a while: what Helm did not wait long enough for it does again.
    until("two operators", READY, || helm(cluster, "worker.image.tag=1").map(Some))?;
    let operators = watch::operators(cluster)?.len();
    ensure!(operators == 2, "{operators} operators");
    Ok(format!("{:.1} s without the images", began.elapsed().as_secs_f64()))
}

/// Installs or upgrades the release, and waits for it.
pub(in crate::suites) fn helm(cluster: &Cluster, values: &str) -> Result<()> {
    helm_set(cluster, values, &[])
}

/// The same, with `others` that are no texts.
pub(in crate::suites) fn helm_set(cluster: &Cluster, values: &str, others: &[&str]) -> Result<()> {
    let program = cluster.kubernetes_program("helm")?;
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../charts/engram");
    let chart = chart.to_string_lossy();
    // Images have the chart's names and pull policy.
    let chosen = ["upgrade", "--install", "engram", &chart, "--namespace", NAMESPACE, "--set-string", values];
    let how = ["--take-ownership", "--wait", "--timeout=55s"];
    let others: Vec<&str> = others.iter().flat_map(|value| ["--set", value]).collect();
    cluster.client(program, [&chosen[..], &others, &how].concat(), "").map(drop)
}

/// Check: a cluster is Ready soon after it was applied.
pub(super) fn trials(cluster: &Cluster) -> Result<String> {
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": TRIALS },
        "spec": {
            "workers": WORKERS, "replicationFactor": watch::COPIES, "partitions": 16,
            "capacity": { "memories": 20_000_000 }, "gpu": { "mode": "Disabled" }, "storage": { "size": "1Gi" },
            // The writers of the load are no pods; suite `identity` has a cluster under load with certificates.
            "tls": { "mode": "Disabled" },
        },
    });
    let began = Instant::now();
    if cluster.api().find(&format!("{CLUSTERS}/{TRIALS}"))?.is_none() {
        until("the kind", WHILE, || cluster.api().create(CLUSTERS, &object).map(Some))?;
    }
    let mut said = String::new();
    let ready = until("the cluster to be Ready", READY, || {
        let (holds, now) = condition(&watch::status(cluster)?, "Ready");
        said = now;
        Ok(holds.then(|| began.elapsed()))
    });
    let ready = ready.with_context(|| said.clone())?;
    watch::settled(cluster, WORKERS)?;
    Ok(format!("Ready after {:.1} s", ready.as_secs_f64()))
}

/// Check: the pods go, and the disks stay for a cluster of the same name.
pub(super) fn deleted(cluster: &Cluster) -> Result<String> {
    const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims?labelSelector=engram.dev%2Fcluster%3D";
    let began = Instant::now();
    cluster.api().delete(&format!("{CLUSTERS}/{TRIALS}"), None)?;
    until("the pods to go", GONE, || Ok(watch::pods(cluster)?.is_empty().then_some(())))?;
    let gone = began.elapsed().as_secs_f64();
    let claims = cluster.api().get(&format!("{CLAIMS}{TRIALS}"))?["items"].as_array().map_or(0, Vec::len);
    ensure!(claims == WORKERS, "{claims} disks are left of {WORKERS}");
    Ok(format!("gone after {gone:.1} s"))
}

/// Loads the images of operator and workers, unless nodes have those of the same programs from the suite before.
pub(in crate::suites) fn load_images(cluster: &Cluster) -> Result<()> {
    let programs = ["engram-operator", "engram-worker"];
    let archive = cluster.path("engram.tar");
    let changed = |path: &Path| path.metadata().and_then(|it| it.modified()).ok();
    let packed_at = changed(&archive);
    let is_packed = |name: &str| Ok::<_, anyhow::Error>(changed(&built_program(name)?) < packed_at);
    if is_packed(programs[0])? && is_packed(programs[1])? {
        return Ok(());
    }
    let [operator, worker] = programs.map(|name| program(cluster, name));
    let operator = Content::default().program("/engram-operator", &operator?)?;
    let worker = Content::default().program("/engram-worker", &worker?)?;
    import_as_documented(cluster, &operator, &worker)?;
    // More tags of the same image: what a rolling change needs.
    let tags = [format!("{WORKER}:1"), format!("{WORKER}:2"), format!("{WORKER}-cuda:1")];
    let images = tags.iter().map(|name| Image { name, content: &worker, entrypoint: &["/engram-worker"], user: USER });
    let images: Vec<Image<'_>> = images.collect();
    // It has its name when nodes have what is in it.
    let packed = cluster.path("engram-new.tar");
    write_archive(&packed, &images)?;
    cluster.load_image(&packed)?;
    Ok(fs::rename(packed, archive)?)
}

/// Writes the archives that `cargo xtask images` writes, with the same names, and loads them into every node by the commands of
/// docs/install.md.
fn import_as_documented(cluster: &Cluster, operator: &Content, worker: &Content) -> Result<()> {
    let commands: Vec<&str> = PAGE.lines().filter(|line| line.starts_with(IMPORT)).collect();
    ensure!(commands.len() == 3, "docs/install.md has {} commands `{IMPORT}`, and images are 3", commands.len());
    let root = cluster.path("documented");
    let images = root.join("target/images");
    fs::create_dir_all(&images)?;
    let version = env!("CARGO_PKG_VERSION");
    for (archive, name, content, program) in [
        ("operator", OPERATOR.to_owned(), operator, "/engram-operator"),
        ("worker", format!("{WORKER}:{version}"), worker, "/engram-worker"),
        ("worker-cuda", format!("{WORKER}-cuda:{version}"), worker, "/engram-worker"),
    ] {
        let path = images.join(format!("{archive}.tar"));
        write_archive(&path, &[Image { name: &name, content, entrypoint: &[program], user: USER }])?;
        if cluster.is_given() {
            cluster.load_image(&path)?;
        }
    }
    if cluster.is_given() {
        return Ok(());
    }
    commands.into_iter().try_for_each(|command| cluster.on_every_node(&root, command))
}

/// Check: nodes have the workers of an earlier build.
pub(super) fn earlier(cluster: &Cluster) -> Result<String> {
    if !built_program(EARLIER_PROGRAM)?.is_file() {
        let how = "`cargo xtask kubernetes --earlier REVISION` builds it";
        return Err(Skip(format!("there is no {EARLIER_PROGRAM} next to this program: {how}")).into());
    }
    let worker = Content::default().program("/engram-worker", &program(cluster, EARLIER_PROGRAM)?)?;
    let name = format!("{WORKER}:{EARLIER}");
    let archive = cluster.path("earlier.tar");
    write_archive(&archive, &[Image { name: &name, content: &worker, entrypoint: &["/engram-worker"], user: USER }])?;
    cluster.load_image(&archive)?;
    Ok(String::new())
}

fn built_program(name: &str) -> Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(name))
}

/// A program of the project next to this one, without what only a debugger reads: every node gets a copy.
pub(in crate::suites) fn program(cluster: &Cluster, name: &str) -> Result<PathBuf> {
    let built = built_program(name)?;
    if !built.is_file() {
        return Err(Skip(format!("there is no {}: `cargo xtask kubernetes` builds it", built.display())).into());
    }
    let small = cluster.path("bin").join(format!("{name}-small"));
    let stripped = Command::new("strip").arg("-o").arg(&small).arg(&built).status();
    if !stripped.is_ok_and(|status| status.success()) {
        fs::copy(&built, &small)?;
    }
    Ok(small)
}
