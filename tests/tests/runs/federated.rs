//! Federated runs: clients train together, and a round goes on when the worker that drives it dies.

use super::runs;
use crate::has_ended;
use engram_client::Client;
use engram_participant::{Assignment, ClientKeys, Next, Participant};
use engram_proto::v1;
use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};
use serde_json::Value;
use std::time::Duration;

const CLIENTS: usize = 4;
const WAIT: Duration = Duration::from_secs(10);

fn manifest(name: &str, rounds: usize, more: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: fed }}\n  \
         kind: Federated\n  federated:\n    model: {{ layers: [{{ name: w, shape: [{CLIENTS}] }}] }}\n    rounds: {rounds}\n    \
         clients: {{ population: {CLIENTS}, perRound: {CLIENTS}, minimum: {CLIENTS} }}\n{more}"
    )
}

fn keys() -> Vec<ClientKeys> {
    (0..CLIENTS).map(|_| ClientKeys::generate()).collect()
}

fn participants(client: &Client, run: &str, keys: &[ClientKeys]) -> Vec<Participant> {
    let one = |(number, keys): (usize, &ClientKeys)| {
        Participant::new(client.clone(), run, &format!("c{number}"), keys.clone())
    };
    keys.iter().enumerate().map(one).collect()
}

/// The update of a client: 1 at its own place, so that the model counts how often each client was aggregated.
fn update(number: usize) -> Vec<f32> {
    (0..CLIENTS).map(|place| if place == number { 1.0 } else { 0.0 }).collect()
}

/// Lets a client check in until it has a task; `None` when the run has ended.
async fn task(participant: &Participant) -> Option<Assignment> {
    loop {
        match participant.next(WAIT).await.expect("failed to check in") {
            Next::Task(assignment) => return Some(*assignment),
            Next::Nothing => {}
            Next::Ended(_) => return None,
        }
    }
}

/// All clients take part at once until the run ends.
async fn take_part(participants: Vec<Participant>) {
    let clients = participants.into_iter().enumerate().map(|(number, participant)| {
        tokio::spawn(async move {
            while let Some(assignment) = task(&participant).await {
                match participant.submit(&assignment.task, &update(number), 1, Some(1.0)).await {
                    Ok(_) => {}
                    Err(error) if error.is_stale() => {}
                    Err(error) => panic!("client {number}: {error}"),
                }
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.expect("a client failed");
    }
}

fn named(cluster: &Cluster, name: &str) -> Option<Value> {
    let listed = cluster.engram(&["list", "runs", "-o", "json"]);
    // Runs of partitions without primary are not listed.
    let items = (listed.code == Some(0)).then(|| listed.json()["items"].clone())?;
    items.as_array()?.iter().find(|run| run["name"] == name).cloned()
}

fn kill_driver(cluster: &mut Cluster, name: &str) {
    let driver = wait_for("the driver", DEADLINE, || named(cluster, name)?["driver"].as_u64()) as usize;
    let pid = cluster.worker(driver).expect("the worker runs");
    cluster.kill(pid);
}

fn wait_for_success(cluster: &Cluster, name: &str) -> Value {
    let ended = wait_for("the run to end", DEADLINE, || named(cluster, name).filter(has_ended));
    assert_eq!(ended["phase"], "Succeeded", "{ended}");
    ended
}

async fn model(client: &Client, run: &str) -> Vec<f32> {
    participants(client, run, &keys())[0].newest_model().await.expect("failed to download the model")
}

#[test]
fn a_round_survives_the_death_of_its_worker_and_counts_each_update_once() {
    let mut cluster = Cluster::up(&cluster_manifest("fed", 3, "  partitions: 4\n"));
    let wrong =
        cluster.file("wrong.yaml", manifest("wrong", 2, "    secureAggregation: {}\n    strategy: { kind: Median }\n"));
    cluster.engram(&["run", &wrong]).fails_with(2, &["secureAggregation", "robust strategy", "single updates"]);
    let file = cluster.file("run.yaml", manifest("plain", 2, ""));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let keys = keys();
    // All have a task; one has committed, and one has a task of which the server knows nothing more.
    let tasks = cluster.client(async |client| {
        let participants = participants(&client, "plain", &keys);
        let assigned = futures_of(&participants).await;
        participants[0].submit(&assigned[0].task, &update(0), 1, Some(1.0)).await.expect("failed to submit");
        let stranger = Participant::new(client.clone(), "plain", "c0", ClientKeys::generate());
        let forged = stranger.submit(&assigned[0].task, &update(1), 1, None).await.expect_err("another secret");
        assert!(forged.to_string().contains("secret"), "{forged}");
        let foreign = participants[1].submit(&assigned[0].task, &update(1), 1, None).await.expect_err("another's task");
        assert!(foreign.to_string().contains("another client"), "{foreign}");
        assigned
    });
    kill_driver(&mut cluster, "plain");
    cluster.client(async |client| {
        let participants = participants(&client, "plain", &keys);
        let repeated = participants[0].submit(&tasks[0].task, &update(0), 1, Some(1.0)).await;
        assert!(repeated.expect("failed to repeat"), "it was acknowledged before");
        for number in 1..CLIENTS {
            let submitted = participants[number].submit(&tasks[number].task, &update(number), 1, Some(1.0)).await;
            assert!(!submitted.expect("failed to submit"), "client {number} was counted twice");
        }
    });
    // The last update of the round is acknowledged, its version may not be stored yet.
    kill_driver(&mut cluster, "plain");
    cluster.client(async |client| take_part(participants(&client, "plain", &keys)).await);
    let ended = wait_for_success(&cluster, "plain");
    assert_eq!((ended["epoch"].as_u64(), ended["updates"].as_u64()), (Some(2), Some(8)), "{ended}");
    cluster.client(async |client| {
        let late = participants(&client, "plain", &keys)[1].submit(&tasks[1].task, &update(1), 1, None).await;
        let refused = late.expect_err("the run has ended");
        assert!(refused.is_stale(), "{refused}");
    });
    // Each client is in each of the two means of four once.
    assert_eq!(cluster.client(async |client| model(&client, "plain").await), [0.5; CLIENTS]);
    hide_updates(&mut cluster);
    train_on_device(&cluster);
    send_small_updates_during_a_slow_upload(&cluster);
    revoke_a_client(&cluster);
    cluster.stop();
}

/// Lets all clients check in at once; returns their tasks.
async fn futures_of(participants: &[Participant]) -> Vec<Assignment> {
    let mut waiting: Vec<_> = participants.iter().map(|participant| Some(Box::pin(task(participant)))).collect();
    let mut tasks: Vec<Option<Assignment>> = participants.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, found) in waiting.iter_mut().zip(&mut tasks) {
            if let Some(std::task::Poll::Ready(task)) = future.as_mut().map(|future| future.as_mut().poll(context)) {
                *found = Some(task.expect("the run has not ended"));
                *future = None;
            }
        }
        if tasks.iter().all(Option::is_some) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    tasks.into_iter().flatten().collect()
}

/// With secure aggregation and privacy, rounds go on when the worker that relays the masks dies.
fn hide_updates(cluster: &mut Cluster) {
    let privacy =
        "    privacy: { epsilon: 1000, delta: 0.1, noiseMultiplier: 0.5, clip: 1 }\n    secureAggregation: {}\n";
    let file = cluster.file("secure.yaml", manifest("secure", 3, privacy));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let keys = keys();
    let driver = wait_for("the driver", DEADLINE, || named(cluster, "secure")?["driver"].as_u64()) as usize;
    let pid = cluster.worker(driver).expect("the worker runs");
    cluster.client(async |client| {
        let clients = take_part(participants(&client, "secure", &keys));
        let killed = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::Signal::SIGKILL)
                .expect("failed to kill the worker");
        };
        tokio::join!(clients, killed);
    });
    let ended = wait_for_success(cluster, "secure");
    assert_eq!((ended["epoch"].as_u64(), ended["updates"].as_u64()), (Some(3), Some(12)), "{ended}");
    assert!(ended["metrics"]["epsilon_spent"].as_f64() > Some(0.0), "{ended}");
    let model = cluster.client(async |client| model(&client, "secure").await);
    // Three means of four, with noise of half the norm over four in each.
    assert!(model.iter().all(|value| (value - 0.75).abs() < 1.2), "{model:?}");
    assert_eq!(runs(cluster).len(), 2);
}

/// A run with one client whose upload has several chunks: it is cut in the middle, other clients end a whole run meanwhile, and it resumes.
fn send_small_updates_during_a_slow_upload(cluster: &Cluster) {
    const VALUES: usize = 600_000;
    let one = format!("population: {CLIENTS}, perRound: {CLIENTS}, minimum: {CLIENTS}");
    let large = manifest("large", 1, "")
        .replace(&one, "population: 1, perRound: 1")
        .replace(&format!("shape: [{CLIENTS}]"), &format!("shape: [{VALUES}]"));
    for (name, text) in [("large", large), ("small", manifest("small", 2, ""))] {
        let file = cluster.file(&format!("{name}.yaml"), text);
        cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    }
    let slow = SlowClient::new(VALUES);
    let task = cluster.client(async |client| {
        let task = slow.check_in(&client).await;
        assert_eq!(slow.chunk(&client, task, Some(0)).await, 1);
        task
    });
    cluster.client(async |client| take_part(participants(&client, "small", &keys())).await);
    wait_for_success(cluster, "small");
    // Another connection, of a client that can reach its endpoints only, as behind an ingress.
    cluster.client(async |client| {
        let mut map = (*client.map().expect("the client is connected")).clone();
        map.version += 1;
        map.workers.values_mut().for_each(|worker| "127.0.0.1:9".clone_into(&mut worker.client_address));
        client.set_map(map);
        assert_eq!(slow.chunk(&client, task, None).await, 1, "the upload resumes where it was cut");
        for next in 1..slow.chunks() {
            assert_eq!(slow.chunk(&client, task, Some(next)).await, next + 1);
        }
        slow.commit(&client, task).await;
    });
    wait_for_success(cluster, "large");
    let model = cluster.client(async |client| model(&client, "large").await);
    assert!(model.len() == VALUES && model.iter().all(|value| *value == 0.5));
}

/// A client that sends single chunks.
struct SlowClient {
    caller: v1::FederatedCaller,
    update: Vec<u8>,
}

impl SlowClient {
    const CHUNK: usize = 1 << 20;

    fn new(values: usize) -> Self {
        let (run, client) = ("large".to_owned(), "slow".to_owned());
        let caller = v1::FederatedCaller { run, client, secret: vec![7; 32].into() };
        Self { caller, update: 0.5_f32.to_le_bytes().repeat(values) }
    }

    fn chunks(&self) -> u32 {
        self.update.len().div_ceil(Self::CHUNK) as u32
    }

    async fn check_in(&self, client: &Client) -> u64 {
        loop {
            let caller = Some(self.caller.clone());
            let request = v1::CheckInRequest { caller, wait_ms: 5_000, ..v1::CheckInRequest::default() };
            let answer = client.federated_check_in(request).await.expect("failed to check in");
            if let Some(task) = answer.task {
                return task.number;
            }
        }
    }

    /// Sends a chunk, or asks which is next. Returns the first missing one.
    async fn chunk(&self, client: &Client, task: u64, index: Option<u32>) -> u32 {
        let start = index.unwrap_or_default() as usize * Self::CHUNK;
        let end = self.update.len().min(start + Self::CHUNK);
        let content = if index.is_some() { self.update[start..end].to_vec() } else { Vec::new() };
        let request = v1::UploadChunkRequest {
            caller: Some(self.caller.clone()),
            task,
            nonce: 1,
            index: index.unwrap_or_default(),
            update_bytes: self.update.len() as u64,
            checksum: crc32c::crc32c(&content),
            content: content.into(),
        };
        let answer = client.federated_upload_chunk(request).await.expect("failed to upload");
        assert_eq!(answer.refusal, None);
        answer.next
    }

    async fn commit(&self, client: &Client, task: u64) {
        let digest = engram_federated::service::digest(&self.update).to_vec().into();
        let caller = Some(self.caller.clone());
        let request = v1::CommitUpdateRequest { caller, task, nonce: 1, digest, samples: 1, loss: None };
        let answer = client.federated_commit(request).await.expect("failed to commit");
        assert_eq!((answer.refusal, answer.repeated), (None, false));
    }
}

/// A revoked client is refused at its next call, and a round goes on without it.
fn revoke_a_client(cluster: &Cluster) {
    let file = cluster.file("open.yaml", manifest("open", 1, ""));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let keys = keys();
    cluster.client(async |client| {
        let participants = participants(&client, "open", &keys);
        assert!(matches!(participants[0].next(Duration::ZERO).await, Ok(Next::Nothing)), "it is enrolled");
    });
    let revoked = cluster.engram(&["federated", "revoke", "open", "c0"]).exits_with(0);
    assert!(revoked.stdout.contains("is revoked"), "{}", revoked.stdout);
    cluster.client(async |client| {
        let refused = participants(&client, "open", &keys)[0].next(Duration::ZERO).await.expect_err("revoked");
        assert!(refused.to_string().contains("not revoked"), "{refused}");
        client.cancel_run("open").await.expect("failed to cancel");
    });
}

/// A device with a training program takes part; a program that fails gives its task back.
fn train_on_device(cluster: &Cluster) {
    let one = format!("population: {CLIENTS}, perRound: {CLIENTS}, minimum: {CLIENTS}");
    let file = cluster.file(
        "device.yaml",
        manifest("device", 1, "    modelEncoding: Int8\n").replace(&one, "population: 1, perRound: 1"),
    );
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let state = cluster.folder().join("device").display().to_string();
    // What the harness appends are arguments of the program.
    let endpoints = cluster.endpoints().expect("the cluster is running");
    let address = endpoints["workers"][0]["client"].as_str().expect("a worker has an address");
    let named = ["edge", "--run", "device", "--client", "car", "--state", &state, "--endpoint", address];
    let edge = [&named[..], &["--updates", "1", "--", "sh", "-c"]].concat();
    cluster.engram(&[&edge[..], &["exit 3"]].concat()).fails_with(1, &["training program failed"]);
    let train =
        "grep -q '\"version\": 0' task.json && cp model.f32 trained.f32 && echo '{\"samples\": 7}' > result.json";
    let trained = cluster.engram(&[&edge[..], &[train]].concat()).exits_with(0);
    assert!(trained.stdout.contains("acknowledged"), "{}", trained.stdout);
    let ended = wait_for_success(cluster, "device");
    assert_eq!(ended["updates"].as_u64(), Some(1), "{ended}");
}
