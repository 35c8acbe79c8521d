//! The operator's file of settings, as the chart makes it.

use super::{LIMIT, template};
use crate::cluster::Cluster;
use crate::process;
use crate::suites::operator::program;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::Command;

/// A file is mounted where it is named, and another content replaces the pods.
pub(super) fn config(cluster: &Cluster) -> Result<String> {
    let parts = [
        "--config=/etc/engram/config.yaml",
        "mountPath: /etc/engram,",
        "name: engram-operator-config",
        "checksum/config: ",
    ];
    let plain = template(cluster, &[])?;
    ensure!(!parts.iter().any(|part| plain.contains(part)), "a file that was not requested");
    let of = |concurrency: &str| template(cluster, &[&format!("config.concurrency={concurrency}")]);
    let (four, five) = (of("4")?, of("5")?);
    ensure!(parts.iter().all(|part| four.contains(part)), "a part of the file is missing");
    let text = "  config.yaml: |\n    apiVersion: operator.engram.dev/v1alpha1\n    concurrency: 4\n    kind: OperatorConfiguration\n";
    ensure!(four.contains(text), "the file is another");
    let checksum = |rendered: &str| rendered.lines().find(|line| line.contains("checksum/config: ")).map(str::to_owned);
    ensure!(checksum(&four) != checksum(&five), "pods with another file are not replaced");
    Ok(String::new())
}

/// All settings, each unlike its default and unlike what the chart gives, with one field of each that the chart's values can set.
fn settings() -> [(&'static str, Value, &'static str); 9] {
    [
        ("coordinator", json!({ "listen": "0.0.0.0:1", "addresses": ["other:1"] }), "listen=0.0.0.0:1"),
        ("http", json!({ "listen": "0.0.0.0:2" }), "listen=0.0.0.0:2"),
        (
            "worker",
            json!({ "repository": "other", "cudaRepository": "more", "version": "9", "pullSecrets": ["other"] }),
            "version=9",
        ),
        ("watchNamespaces", json!(["other"]), ""),
        ("leaderElection", json!({ "enabled": true, "leaseName": "other" }), "leaseName=other"),
        ("pod", json!({ "name": "other", "namespace": "other" }), "name=other"),
        ("concurrency", json!(77), ""),
        ("certificateLifetime", json!("7m"), ""),
        ("logging", json!({ "level": "error", "format": "Json" }), "level=error"),
    ]
}

/// The operator is run with the flags and variables of its pod and a file that says everything: what the file says in vain is what the
/// chart does not take in `config`.
pub(super) fn refused(cluster: &Cluster) -> Result<String> {
    let values = [
        "watchNamespaces={research}",
        "imagePullSecrets[0].name=pull",
        "worker.cudaImage.repository=engram/worker-cuda",
        "replicaCount=1",
        "leaderElection.enabled=false",
        "logging.level=debug",
        "crds.enabled=false",
    ];
    let rendered = template(cluster, &values)?;
    let deployment =
        rendered.split("\n---\n").find(|it| it.contains("\nkind: Deployment\n")).context("no Deployment")?;
    let deployment: Value = serde_saphyr::from_str(deployment).context("the Deployment is no YAML")?;
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let words = |list: &Value| -> Vec<String> {
        list.as_array().into_iter().flatten().filter_map(|it| Some(it.as_str()?.to_owned())).collect()
    };
    // What a pod says of itself, such a pod says.
    let variables: BTreeMap<&str, &str> = container["env"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|it| Some((it["name"].as_str()?, it["value"].as_str().unwrap_or("a-pod"))))
        .collect();

    let mut file = json!({ "apiVersion": "operator.engram.dev/v1alpha1", "kind": "OperatorConfiguration" });
    for (field, value, _) in settings() {
        file[field] = value;
    }
    let scratch = tempfile::tempdir()?;
    let path = scratch.path().join("config.yaml");
    std::fs::write(&path, file.to_string())?;
    let mut command = Command::new(program(cluster, "engram-operator")?);
    command
        .env_clear()
        .envs(&variables)
        .args(words(&container["args"]))
        .arg("--print-config")
        .arg("--config")
        .arg(&path);
    let printed = process::read(&mut command, b"", LIMIT)?;
    let printed: Value = serde_saphyr::from_str(&printed).context("the operator printed no YAML")?;
    ensure!(
        printed.as_object().map(|it| it.len()) == file.as_object().map(|it| it.len()),
        "a setting is not in the file: {printed}"
    );

    let mut rejected = Vec::new();
    for (field, value, one) in settings() {
        let set = match (&value, one) {
            (Value::Array(_), _) => format!("config.{field}={{other}}"),
            (_, "") => format!("config.{field}={}", value.as_str().map_or_else(|| value.to_string(), str::to_owned)),
            (_, one) => format!("config.{field}.{one}"),
        };
        let is_taken = template(cluster, &[&set]).is_ok();
        match (printed[field] == value, is_taken) {
            (true, true) => {}
            (false, false) => rejected.push(field),
            (false, true) => bail!("the chart takes {set}, and its flags set it to {}", printed[field]),
            (true, false) => bail!("the chart refuses {set}, and sets it nowhere"),
        }
    }
    Ok(format!("refused: {}", rejected.join(", ")))
}
