//! Images from a registry, by the commands of docs/install.md. The registry listens on the loopback interface of node 1, where containerd
//! accepts plain HTTP.

use super::helpers::{PODS, WHILE};
use crate::cluster::{Cluster, node_name};
use crate::process::until;
use crate::requirements::{Skip, find};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use std::fs;
use std::path::Path;

/// The page with the commands, the registry that they name, and the one of this suite.
const PAGE: &str = include_str!("../../../../docs/install.md");
const DOCUMENTED: &str = "registry.example.com";
const REGISTRY: &str = "127.0.0.1:5000";
const POD: &str = "from-registry";

/// Check: the documented commands push the images, and a node pulls the one that the chart then names. Needs the archives that
/// [`super::faults::install::operator`] writes.
pub(super) fn check(cluster: &Cluster) -> Result<String> {
    let server = find("docker-registry").ok_or_else(|| Skip("there is no docker-registry".into()))?;
    find("skopeo").ok_or_else(|| Skip("there is no skopeo".into()))?;
    cluster.start_daemon(1, "registry", &server, &["serve".into(), write_configuration(cluster)?])?;
    let pushed = push(cluster).and_then(|()| run_operator(cluster, &image_of_chart(cluster)?));
    cluster.end_daemon(1, "registry", Signal::SIGTERM)?;
    pushed
}

fn write_configuration(cluster: &Cluster) -> Result<String> {
    let configuration = json!({
        "version": "0.1",
        "storage": { "filesystem": { "rootdirectory": cluster.path("registry") } },
        "http": { "addr": REGISTRY },
    });
    let path = cluster.path("registry.yml");
    fs::write(&path, configuration.to_string())?;
    Ok(path.to_string_lossy().into_owned())
}

/// Runs the documented loop.
fn push(cluster: &Cluster) -> Result<()> {
    let start = PAGE.find("for image in").context("docs/install.md has no loop that pushes images")?;
    let commands = PAGE[start..].split_inclusive("\ndone").next().unwrap_or_default().replace(DOCUMENTED, REGISTRY);
    // The settings of a user who trusts this registry without TLS.
    let home = cluster.path("registry-home");
    let settings = home.join(".config/containers");
    fs::create_dir_all(&settings)?;
    fs::write(settings.join("registries.conf"), format!("[[registry]]\nlocation = \"{REGISTRY}\"\ninsecure = true\n"))?;
    let (folder, home) = (cluster.path("documented"), home.display().to_string());
    let settings = format!("cd '{}' && export HOME='{home}'", folder.display());
    let url = format!("http://{REGISTRY}/v2/");
    until("the registry", WHILE, || cluster.in_network(1, "curl", ["-sSf", "--noproxy", "*", &url]).map(Some))?;
    cluster.shell(1, &format!("{settings}; set -e\n{commands}")).map(drop)
}

/// Returns the operator's image if the chart is installed as documented for a registry.
fn image_of_chart(cluster: &Cluster) -> Result<String> {
    const OPTION: &str = "--set global.imageRegistry=";
    let value = PAGE.split(OPTION).nth(1).and_then(|rest| rest.split_whitespace().next());
    let value = value.with_context(|| format!("docs/install.md has no `{OPTION}`"))?.replace(DOCUMENTED, REGISTRY);
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../charts/engram");
    let chart = chart.to_string_lossy();
    let arguments = ["template", "engram", &chart, "--set", &format!("global.imageRegistry={value}")];
    let objects = cluster.client(cluster.kubernetes_program("helm")?, arguments, "")?;
    let image =
        objects.lines().filter_map(|line| line.trim().strip_prefix("image: ")).find(|it| it.contains("operator"));
    Ok(image.context("the chart names no image of the operator")?.trim_matches('"').to_owned())
}

/// Runs `--version` of the operator in a pod that always pulls.
fn run_operator(cluster: &Cluster, image: &str) -> Result<String> {
    ensure!(image.starts_with(REGISTRY), "the chart names {image}; expected: an image of {REGISTRY}");
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": POD },
        "spec": {
            "nodeName": node_name(1), "restartPolicy": "Never", "tolerations": [{ "operator": "Exists" }],
            "containers": [{ "name": "operator", "image": image, "imagePullPolicy": "Always", "args": ["--version"] }],
        },
    });
    cluster.api().create(PODS, &pod)?;
    let path = format!("{PODS}/{POD}");
    let ended = until("the pod", WHILE, || {
        let status = &cluster.api().get(&path)?["status"];
        match status["phase"].as_str() {
            Some("Succeeded") => Ok(Some(Ok(()))),
            Some("Failed") => Ok(Some(Err(status.to_string()))),
            _ => bail!("{}", status["containerStatuses"]),
        }
    })?;
    cluster.api().delete(&path, None)?;
    ended.map_err(|status| anyhow::anyhow!("the pod failed: {status}"))?;
    Ok(format!("pulled {image}"))
}
