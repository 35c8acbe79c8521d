//! A Prometheus in the network of node 1 that scrapes both operators and the workers: dashboards and rules that need an operator have data.

use super::runs::{MANY, begin_run, delete, in_config_map, suspend, wait_for_run};
use super::{CLUSTERS, HTTP_PORTS, REPLICAS, edit, map, words};
use crate::cluster::Cluster;
use crate::process::until;
use crate::requirements::{Skip, find};
use crate::suites::chart::DASHBOARDS;
use crate::suites::command::named;
use crate::suites::helpers::WHILE;
use anyhow::{Context, Result, ensure};
use dashboard::{Dashboard, Panel};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

#[path = "../../../../src/dashboard.rs"]
#[allow(unreachable_pub, reason = "public in the package of the other tests")]
mod dashboard;

const NAME: &str = "prometheus";
const ADDRESS: &str = "127.0.0.1:9090";
const RULES: &str = include_str!("../../../../../charts/engram/files/alerts.yaml");
/// Decisions from which the autoscaler continues: more than the forecast needs.
const DECISIONS: u64 = 60;
/// Interval of decisions, the shortest that is allowed.
const INTERVAL_SECONDS: u64 = 10;
/// Not exported here: workers that are processes have no certificate. Suite `identity` has some.
const NOT_EXPORTED: &str = "engram_certificate_expiry_seconds";
/// Time that a picture shows.
const PICTURE: Duration = Duration::from_secs(150);

/// Starts Prometheus with the rules of the chart.
fn start(cluster: &Cluster) -> Result<()> {
    let program = find(NAME).ok_or_else(|| Skip("there is no prometheus: apt-get install prometheus".into()))?;
    let folder = cluster.path(NAME);
    fs::create_dir_all(&folder)?;
    let (rules, file) = (folder.join("rules.yaml"), folder.join("prometheus.yaml"));
    fs::write(&rules, RULES)?;
    let of = |port: &u16| format!("127.0.0.1:{port}");
    let scrape =
        |ports: &[u16], labels: Value| json!({ "targets": ports.iter().map(of).collect::<Vec<_>>(), "labels": labels });
    let targets = [scrape(&REPLICAS.map(|it| it.2), json!({})), scrape(&HTTP_PORTS, json!({ "namespace": "default" }))];
    let configuration = json!({
        "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
        "rule_files": [rules],
        "scrape_configs": [{ "job_name": "engram", "honor_labels": true, "static_configs": targets }],
    });
    fs::write(&file, configuration.to_string())?;
    let arguments = [
        format!("--config.file={}", file.display()),
        format!("--storage.tsdb.path={}", folder.join("data").display()),
        format!("--web.listen-address={ADDRESS}"),
    ];
    cluster.start_daemon(1, NAME, &program, &arguments)?;
    until("Prometheus to start", WHILE, || request(cluster, "/-/ready", &[]).map(Some)).map(drop)
}

fn request(cluster: &Cluster, path: &str, parameters: &[String]) -> Result<String> {
    let url = format!("http://{ADDRESS}{path}");
    let mut arguments = vec!["-sSf", "-G", "--max-time", "5", "--noproxy", "*", &url];
    arguments.extend(parameters.iter().flat_map(|parameter| ["--data-urlencode", parameter.as_str()]));
    cluster.in_network(1, "curl", arguments)
}

fn read(cluster: &Cluster, path: &str, parameters: &[String]) -> Result<Value> {
    Ok(serde_json::from_str::<Value>(&request(cluster, path, parameters)?)?["data"].take())
}

/// Waits until an expression has data.
fn wait_for_data(cluster: &Cluster, what: &str, expression: &str) -> Result<()> {
    until(&format!("data of {what}: {expression}"), WHILE, || {
        let found = read(cluster, "/api/v1/query", &[format!("query={expression}")])?;
        Ok(found["result"].as_array().is_some_and(|series| !series.is_empty()).then_some(()))
    })
}

/// Saves decisions of the last ten minutes for the autoscaler of `words`, as another operator would have, and enables it.
fn forecast(cluster: &Cluster) -> Result<()> {
    let object = cluster.api().get(&format!("{CLUSTERS}/words"))?;
    let now = SystemTime::UNIX_EPOCH.elapsed()?.as_secs();
    let decision = |number: u64| {
        let load = 900 + 25 * (number % 6);
        format!("{},{load},3,3,,,,,Learning,OnTarget,\n", now - (DECISIONS - number) * INTERVAL_SECONDS)
    };
    let decisions: String = (0..DECISIONS).map(decision).collect();
    let header = "time,load,workers,desired,expected,upper,horizon,startup,forecast,reason,message\n";
    let owner = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "name": "words", "uid": object["metadata"]["uid"],
    });
    let saved = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "words-autoscaling", "ownerReferences": [owner] },
        "data": { "decisions.csv": format!("{header}{decisions}") },
    });
    cluster.api().create("/api/v1/namespaces/default/configmaps", &saved)?;
    let autoscaling = json!({
        "mode": "DryRun", "minWorkers": 2, "maxWorkers": 5, "operationsPerWorker": 1000,
        "interval": format!("{INTERVAL_SECONDS}s"),
    });
    edit(cluster, &json!({ "autoscaling": autoscaling }))
}

/// Applies a run over the events of `waits`.
fn begin(cluster: &Cluster, name: &str, epochs: u64) -> Result<()> {
    begin_run(cluster, name, &in_config_map("many", "events.csv"), epochs)
}

/// Check: every panel of the dashboard of operators and every metric of an alert has data, and every rule is evaluated.
pub(super) fn have_data(cluster: &Cluster) -> Result<String> {
    start(cluster)?;
    // With certificates; its pods are stand-ins.
    let mut sealed = words(&json!({ "tls": { "mode": "Auto" } }));
    sealed["metadata"]["name"] = "sealed".into();
    cluster.api().create(CLUSTERS, &sealed)?;
    begin(cluster, "seen", 2)?;
    wait_for_run(cluster, "seen", "Complete", |it| it["phase"] == "Complete")?;
    begin(cluster, "seen-longer", MANY.into())?;
    forecast(cluster)?;

    let operators = Dashboard::parse(DASHBOARDS[1]);
    let panels = operators.panels.iter().flat_map(|panel| panel.targets.iter().map(move |(it, _)| (panel, it)));
    let mut expressions = 0;
    for (panel, expression) in panels {
        wait_for_data(cluster, &panel.title, &Panel::expression(expression))?;
        expressions += 1;
    }
    let metrics = named(RULES);
    for name in metrics.iter().filter(|name| **name != NOT_EXPORTED) {
        wait_for_data(cluster, "an alert", name)?;
    }
    let rules = read(cluster, "/api/v1/rules", &[])?;
    let rules: Vec<&Value> = rules["groups"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|group| group["rules"].as_array().into_iter().flatten())
        .collect();
    ensure!(rules.len() > 30, "{} rules", rules.len());
    // What is recorded is of workers: the test `observability` has writes of clients, and its data.
    rules.iter().try_for_each(|rule| {
        ensure!(rule["health"] == "ok", "{rule:#}");
        Ok(())
    })?;
    if let Some(folder) = std::env::var_os("ENGRAM_DASHBOARD_PICTURES") {
        draw(cluster, &operators, Path::new(&folder))?;
    }
    delete(cluster, "seen")?;
    delete(cluster, "seen-longer")?;
    cluster.api().delete(&format!("{CLUSTERS}/sealed"), None)?;
    cluster.end_daemon(1, NAME, Signal::SIGTERM)?;
    Ok(format!("{expressions} expressions, {} rules, {} metrics", rules.len(), metrics.len()))
}

/// Draws the dashboard after some minutes of runs, failures and changes.
fn draw(cluster: &Cluster, operators: &Dashboard, folder: &Path) -> Result<()> {
    let began = Instant::now();
    for round in 0.. {
        if began.elapsed() > PICTURE {
            break;
        }
        suspend(cluster, "seen-longer", round % 3 == 1)?;
        let name = format!("seen-{round}");
        begin(cluster, &name, 50)?;
        if round == 3 {
            let lost = super::primaries(&map(cluster)?).first().copied().context("a primary")?;
            cluster.end_daemon(1, &format!("worker-{lost}"), Signal::SIGKILL)?;
            thread::sleep(Duration::from_secs(10));
            super::start_worker(cluster, lost)?;
        }
        thread::sleep(Duration::from_secs(10));
        delete(cluster, &name)?;
    }
    let end = SystemTime::UNIX_EPOCH.elapsed()?.as_secs();
    let results = |expression: &str| {
        let times = [("start", end - PICTURE.as_secs()), ("end", end), ("step", 1)];
        let mut parameters = vec![format!("query={expression}")];
        parameters.extend(times.map(|(name, value)| format!("{name}={value}")));
        let found = read(cluster, "/api/v1/query_range", &parameters).unwrap_or_default();
        found["result"].as_array().cloned().unwrap_or_default()
    };
    fs::write(folder.join("dashboard-operator.svg"), operators.render(results)).context("failed to write a picture")
}
