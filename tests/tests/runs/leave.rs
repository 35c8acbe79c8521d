//! Members leave a training as planned when their worker is drained, and return if it stays.

use super::replay::{STEPS, manifest, named};
use engram_proto::v1::DrainRequest;
use engram_proto::v1::admin_service_client::AdminServiceClient;
use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};
use serde_json::Value;
use tonic::transport::Endpoint;

/// More than any machine trains in this test.
const LONG: u64 = 10_000_000;
const WORKERS: u32 = 3;
/// Name of the run.
const RUN: &str = "drained";

fn submit(cluster: &Cluster) {
    let text = manifest(RUN).replace(&format!("steps: {STEPS}"), &format!("steps: {LONG}"));
    cluster.engram(&["run", &cluster.file("run.yaml", text), "--no-wait"]).exits_with(0);
}

fn wait(cluster: &Cluster, is_reached: impl Fn(&Value) -> bool) -> Value {
    wait_for("the members of the training", DEADLINE, || named(cluster, RUN).filter(&is_reached))
}

fn has_members(run: &Value, members: u32) -> bool {
    run["metrics"]["members"].as_f64() == Some(f64::from(members))
}

/// Drains a worker as the `preStop` hook of its pod does, or cancels that.
fn drain(cluster: &Cluster, ordinal: u64, cancel: bool) {
    let endpoints = cluster.endpoints().expect("the cluster runs");
    let worker = endpoints["workers"].as_array().and_then(|all| all.iter().find(|it| it["ordinal"] == ordinal));
    let address = worker.and_then(|it| it["admin"].as_str()).expect("the worker has an address").to_owned();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    runtime.block_on(async {
        let channel = Endpoint::from_shared(format!("http://{address}")).expect("a valid address").connect().await;
        let mut admin = AdminServiceClient::new(channel.expect("the worker listens"));
        let request = DrainRequest { deadline_ms: 30_000, cancel };
        let drained = admin.drain(request).await.expect("the worker is drained").into_inner();
        assert_eq!(drained.remaining, [0; 0]);
    });
}

#[test]
fn drained_workers_leave_a_training_without_a_failure_and_return_if_they_stay() {
    let cluster = Cluster::up(&cluster_manifest("train", WORKERS, "  replicationFactor: 2\n  partitions: 8\n"));
    submit(&cluster);
    let mut step = 0;
    // Another worker than the driver, and the driver.
    for distance in [1, 0] {
        let reached = |run: &Value| {
            run["epoch"].as_u64() >= Some(step + 300) && has_members(run, WORKERS) && run["driver"].is_u64()
        };
        let running = wait(&cluster, reached);
        let driver = running["driver"].as_u64().expect("it is there");
        let worker = (driver + distance) % u64::from(WORKERS);
        drain(&cluster, worker, false);
        let left = wait(&cluster, |run| has_members(run, WORKERS - 1));
        assert_eq!(left["metrics"]["failed_members"], 0.0, "{left}");
        drain(&cluster, worker, true);
        step = left["epoch"].as_u64().expect("it counts steps");
    }
    let whole = wait(&cluster, |run| has_members(run, WORKERS));
    assert_eq!(whole["metrics"]["failed_members"], 0.0, "{whole}");
    cluster.engram(&["suspend", RUN]).exits_with(0);
    let suspended = wait(&cluster, |run| run["phase"] == "Suspended");
    assert!(suspended["epoch"].as_u64() > Some(step), "{suspended}");
    cluster.stop();
}
