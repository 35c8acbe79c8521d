//! Many clusters under one operator: its memory, reconciles and API requests while all clusters are idle.
//!
//! Pods and workers are simulated: each worker is a stream of heartbeats of an idle worker, so that only the operator's own cost is
//! measured. Checks depend on one another, in order.

use super::Check;
use super::helpers::{WHILE, runtime};
use super::operator::{define, page, start_replica};
use crate::cluster::Cluster;
use crate::process::until;
use crate::rights::OPERATORS;
use anyhow::{Context, Result, ensure};
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_proto::v1::{HeartbeatRequest, Hello, MemberId};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

const NAMESPACE: &str = "many";
const CLUSTERS: &str = "/apis/engram.dev/v1alpha1/namespaces/many/learnerclusters";
const MAPS: &str = "/apis/engram.dev/v1alpha1/namespaces/many/partitionmaps";
const PODS: &str = "/api/v1/namespaces/many/pods?limit=1";
/// The operator: name, coordinator port, HTTP port.
const OPERATOR: (&str, u16, u16) = ("operator-many", 7442, 9192);
/// Workers of each cluster.
const WORKERS: u32 = 5;
/// Heartbeat interval of a worker.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(200);
/// How long all of them may take to be Ready.
const READY: Duration = Duration::from_secs(600);
const MINUTE: Duration = Duration::from_secs(60);
/// Tolerated minutes with activity, on a busy machine.
const UNREST: u32 = 5;
/// Maximum API requests per idle cluster and minute: a reconcile lists ten kinds and reads the map.
const REQUESTS: f64 = 15.0;
/// Tolerated growth of memory while idle: allocators retain freed memory.
const GROWTH: (f64, u64) = (1.1, 4 << 20);

/// Number of clusters, and idle minutes.
struct Size {
    clusters: usize,
    minutes: u32,
}

const SMALL: Size = Size { clusters: 20, minutes: 1 };
const LARGE: Size = Size { clusters: 200, minutes: 10 };

/// Runtime of the heartbeats, kept between checks.
static HEARTBEATS: Mutex<Option<Runtime>> = Mutex::new(None);

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "an operator without clusters", run: begins },
        Check { name: "20 clusters with 100 workers are Ready", run: |it| forms(it, &SMALL) },
        Check {
            name: "idle clusters are reconciled at most once a minute, with few requests and constant memory",
            run: |it| rests(it, &SMALL),
        },
        Check { name: "deleted clusters leave nothing behind", run: ends },
    ]
}

pub(super) fn hundreds() -> Vec<Check> {
    vec![
        Check { name: "an operator without clusters", run: begins },
        Check { name: "200 clusters with 1,000 workers are Ready", run: |it| forms(it, &LARGE) },
        Check {
            name: "idle clusters are reconciled at most once a minute, with few requests and constant memory",
            run: |it| rests(it, &LARGE),
        },
        Check { name: "deleted clusters leave nothing behind", run: ends },
    ]
}

fn begins(cluster: &Cluster) -> Result<String> {
    define(cluster)?;
    delete_all_clusters(cluster)?;
    cluster
        .apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } }).to_string())?;
    start_replica(cluster, OPERATOR)?;
    until("it to lead", Duration::from_secs(90), || {
        Ok(page(cluster, OPERATOR.2, "metrics")?.contains("leader_election_master_status 1").then_some(()))
    })?;
    Ok(format!("{} MiB", resident(cluster)? >> 20))
}

/// Deletes the clusters that a failed check of an earlier suite has left: their reconciles would count.
fn delete_all_clusters(cluster: &Cluster) -> Result<()> {
    const ALL: &str = "/apis/engram.dev/v1alpha1/learnerclusters";
    let all = || Ok::<_, anyhow::Error>(cluster.api().get(ALL)?["items"].as_array().cloned().unwrap_or_default());
    for left in all()? {
        let text = |field: &str| left["metadata"][field].as_str().unwrap_or_default().to_owned();
        let (namespace, name) = (text("namespace"), text("name"));
        println!("      deletes {namespace}/{name}, which an earlier suite left");
        cluster
            .api()
            .delete(&format!("/apis/engram.dev/v1alpha1/namespaces/{namespace}/learnerclusters/{name}"), None)?;
    }
    until("the clusters of earlier suites to be gone", WHILE, || Ok(all()?.is_empty().then_some(())))
}

fn forms(cluster: &Cluster, size: &Size) -> Result<String> {
    let began = Instant::now();
    for number in 0..size.clusters {
        let object = json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": format!("c{number}") },
            "spec": {
                "workers": WORKERS, "replicationFactor": 2, "partitions": 16, "capacity": { "memories": 1000 },
                "gpu": { "mode": "Disabled" }, "storage": { "ephemeral": true },
                "resources": { "requests": { "cpu": "0", "memory": "0" } },
                // The simulated workers are not pods and get no certificate.
                "tls": { "mode": "Disabled" },
            },
        });
        cluster.api().create(CLUSTERS, &object)?;
    }
    let made = began.elapsed();
    let runtime = runtime(cluster)?;
    let mut sending = BTreeMap::new();
    until("all to be Ready", READY, || {
        let list = cluster.api().get(CLUSTERS)?;
        let items = list["items"].as_array().context("no list")?;
        for item in items {
            let name = item["metadata"]["name"].as_str().context("no name")?;
            let id = item["status"]["clusterId"].as_str().and_then(|id| u128::from_str_radix(id, 16).ok());
            if let Some(id) = id.filter(|_| !sending.contains_key(name)) {
                sending.insert(name.to_owned(), id);
                for ordinal in 0..WORKERS {
                    runtime.spawn(send_heartbeats(id, ordinal));
                }
            }
        }
        let ready = items.iter().filter(|item| item["status"]["phase"] == "Ready").count();
        ensure!(ready == size.clusters, "{ready} of {} are Ready", size.clusters);
        Ok(Some(()))
    })?;
    *HEARTBEATS.lock().unwrap_or_else(PoisonError::into_inner) = Some(runtime);
    let (made, ready) = (made.as_secs_f64(), began.elapsed().as_secs_f64());
    Ok(format!("made in {made:.1} s, all Ready after {ready:.1} s, {} MiB", resident(cluster)? >> 20))
}

/// Sends heartbeats as an idle worker; reconnects when the stream breaks; never returns.
async fn send_heartbeats(cluster: u128, ordinal: u32) {
    loop {
        // What went wrong shows in the cluster's status.
        let _ = stream(cluster, ordinal).await;
        tokio::time::sleep(HEARTBEAT_INTERVAL).await;
    }
}

async fn stream(cluster: u128, ordinal: u32) -> Result<()> {
    let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{}", OPERATOR.1))?;
    let mut client = CoordinatorServiceClient::new(endpoint.connect().await?);
    let (heartbeats, outgoing) = mpsc::channel(1);
    // A disk of its own for each.
    let store = (cluster ^ u128::from(ordinal) << 64).to_be_bytes().to_vec().into();
    let address = |port: u32| format!("127.0.0.1:{}", port + ordinal);
    let hello = Hello {
        cluster: cluster.to_be_bytes().to_vec().into(),
        member: Some(MemberId { ordinal, store, incarnation: 1 }),
        protocol_min: 1,
        protocol_max: 1,
        client_address: address(20_000),
        peer_address: address(21_000),
        http_address: address(22_000),
        lossless_since: 1,
        ..Hello::default()
    };
    heartbeats.send(HeartbeatRequest { hello: Some(hello), ..HeartbeatRequest::default() }).await?;
    let mut replies = client.heartbeat(ReceiverStream::new(outgoing)).await?.into_inner();
    let (mut ticks, mut progress_count, mut version) = (tokio::time::interval(HEARTBEAT_INTERVAL), 0, 0);
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                progress_count += 1;
                heartbeats.send(HeartbeatRequest { map_version: version, ready: version > 0, progress_count, ..HeartbeatRequest::default() }).await?;
            }
            reply = replies.message() => {
                let reply = reply?.context("the stream ended")?;
                version = reply.map.map_or(version, |map| map.version);
            }
        }
    }
}

fn rests(cluster: &Cluster, size: &Size) -> Result<String> {
    let mut memory = vec![resident(cluster)?];
    let (mut rates, mut asked, mut unrest) = (Vec::new(), Vec::new(), 0);
    while rates.len() < size.minutes as usize {
        let (maps, looks, mut requests) = (versions(cluster)?, looked(cluster)?, Requests::from_now(cluster)?);
        // A figure per minute takes a minute: there is nothing to wait for.
        std::thread::sleep(MINUTE);
        memory.push(resident(cluster)?);
        let rate = (looked(cluster)? - looks) / size.clusters as f64;
        if versions(cluster)? == maps {
            let requests = requests.since()? as f64 / size.clusters as f64;
            let resident = memory.last().unwrap_or(&0) >> 20;
            println!(
                "      {rate:.2} reconciles of each and {requests:.1} requests for it in a minute, {resident} MiB"
            );
            rates.push(rate);
            asked.push(requests);
        } else {
            // Late heartbeats changed a map, which triggers a reconcile.
            unrest += 1;
            ensure!(unrest <= UNREST, "maps are changed though nothing happens: no rest in {unrest} minutes");
        }
    }
    let most = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
    let (most, requests) = (most(&rates), most(&asked));
    ensure!(most <= 1.0, "each was reconciled {most:.2} times in an idle minute");
    ensure!(requests > 0.0, "looks ask the API server, and its audit log has no request");
    ensure!(
        requests <= REQUESTS,
        "{requests:.1} requests for each in a minute in which nothing happened; allowed: {REQUESTS}"
    );
    let (first, last) = (memory[0], memory[memory.len() - 1]);
    let allowed = (first as f64 * GROWTH.0) as u64 + GROWTH.1;
    ensure!(last <= allowed, "memory grew from {first} bytes to {last} while nothing happened");
    let minutes = rates.len();
    let memory = format!("{} MiB before and {} MiB after", first >> 20, last >> 20);
    Ok(format!("{most:.2} looks and {requests:.1} requests at most in {minutes} minute(s), {memory}"))
}

fn ends(cluster: &Cluster) -> Result<String> {
    let began = Instant::now();
    let sending = HEARTBEATS.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(runtime) = sending {
        runtime.shutdown_background();
    }
    let list = cluster.api().get(CLUSTERS)?;
    for item in list["items"].as_array().context("no list")? {
        cluster.api().delete(&format!("{CLUSTERS}/{}", item["metadata"]["name"].as_str().context("no name")?), None)?;
    }
    until("pods and maps to go", READY, || {
        let empty = |path: &str| -> Result<bool> {
            Ok(cluster.api().get(path)?["items"].as_array().is_some_and(Vec::is_empty))
        };
        Ok((empty(PODS)? && empty(MAPS)?).then_some(()))
    })?;
    until("the figures to go", WHILE, || {
        // Runs that other suites left keep their series.
        let of_these = format!("namespace=\"{NAMESPACE}\"");
        Ok((!page(cluster, OPERATOR.2, "metrics")?.contains(&of_these)).then_some(()))
    })?;
    let left = resident(cluster)? >> 20;
    cluster.end_daemon(1, OPERATOR.0, Signal::SIGTERM)?;
    Ok(format!("after {:.1} s, {left} MiB", began.elapsed().as_secs_f64()))
}

/// Versions of all maps.
fn versions(cluster: &Cluster) -> Result<Vec<Value>> {
    let list = cluster.api().get(MAPS)?;
    let items = list["items"].as_array().context("no list")?;
    Ok(items.iter().map(|map| map["metadata"]["resourceVersion"].clone()).collect())
}

/// Number of reconciles, with and without an error.
fn looked(cluster: &Cluster) -> Result<f64> {
    let page = page(cluster, OPERATOR.2, "metrics")?;
    let of =
        |line: &str| line.strip_prefix("engram_operator_reconcile_total{")?.rsplit_once(' ')?.1.parse::<f64>().ok();
    Ok(page.lines().filter_map(of).sum())
}

/// Requests that are answered from some time on, watches apart, by the API server's audit log.
struct Requests(BufReader<File>);

impl Requests {
    fn from_now(cluster: &Cluster) -> Result<Self> {
        let path = cluster.path("log").join("audit.log");
        let mut log = File::open(&path).with_context(|| format!("failed to read {}", path.display()))?;
        log.seek(SeekFrom::End(0))?;
        Ok(Self(BufReader::new(log)))
    }

    fn since(&mut self) -> Result<usize> {
        let mut count = 0;
        for line in self.0.by_ref().lines() {
            // The last one may be half written.
            let Ok(event) = serde_json::from_str::<Value>(&line?) else { continue };
            let is_ours =
                event["user"]["username"].as_str().is_some_and(|name| name.contains(&format!(":{OPERATORS}:")));
            count += usize::from(is_ours && event["verb"] != "watch" && event["objectRef"]["namespace"] == NAMESPACE);
        }
        Ok(count)
    }
}

/// Resident memory of the operator, in bytes.
fn resident(cluster: &Cluster) -> Result<u64> {
    let record = cluster.daemon(1, OPERATOR.0).context("the operator was never started")?;
    let status = fs::read_to_string(format!("/proc/{}/status", record.pid))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib << 10)
}
