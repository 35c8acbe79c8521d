//! Federated runs: clients train together, and a round goes on when the worker that drives it dies.

use crate::has_ended;
use engram_client::Client;
use engram_federated::service::{digest, digest_of_chunks};
use engram_participant::{Assignment, ClientKeys, Next, Participant, Training};
use engram_proto::v1;
use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};
use serde_json::Value;
use std::time::Duration;

pub(crate) const CLIENTS: usize = 4;
const WAIT: Duration = Duration::from_secs(10);

pub(crate) fn manifest(name: &str, rounds: usize, more: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: fed }}\n  \
         kind: Federated\n  federated:\n    model: {{ layers: [{{ name: w, shape: [{CLIENTS}] }}] }}\n    rounds: {rounds}\n    \
         clients: {{ population: {CLIENTS}, perRound: {CLIENTS}, minimum: {CLIENTS} }}\n{more}"
    )
}

pub(crate) fn keys() -> Vec<ClientKeys> {
    (0..CLIENTS).map(|_| ClientKeys::generate()).collect()
}

pub(crate) fn participants(client: &Client, run: &str, keys: &[ClientKeys]) -> Vec<Participant> {
    let one = |(number, keys): (usize, &ClientKeys)| {
        Participant::new(client.clone(), run, &format!("c{number}"), keys.clone())
    };
    keys.iter().enumerate().map(one).collect()
}

/// The update of a client: 1 at its own place, so that the model counts how often each client was aggregated.
pub(crate) fn update(number: usize) -> Vec<f32> {
    (0..CLIENTS).map(|place| if place == number { 1.0 } else { 0.0 }).collect()
}

/// Lets a client check in until it has a task; `None` when the run has ended.
pub(crate) async fn task(participant: &Participant) -> Option<Assignment> {
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
    take_part_with(participants, |number, _| update(number)).await;
}

/// As [`take_part`]; `train` returns the update of a client for a version.
async fn take_part_with(
    participants: Vec<Participant>,
    train: impl Fn(usize, u64) -> Vec<f32> + Clone + Send + 'static,
) {
    let clients = participants.into_iter().enumerate().map(|(number, participant)| {
        let train = train.clone();
        tokio::spawn(async move {
            while let Some(assignment) = task(&participant).await {
                let update = train(number, assignment.task.version);
                match participant.submit(&assignment.task, &update, 1, Some(1.0)).await {
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

pub(crate) fn named(cluster: &Cluster, name: &str) -> Option<Value> {
    let listed = cluster.engram(&["list", "runs", "-o", "json"]);
    // Runs of partitions without primary are not listed.
    let items = (listed.code == Some(0)).then(|| listed.json()["items"].clone())?;
    items.as_array()?.iter().find(|run| run["name"] == name).cloned()
}

pub(crate) fn kill_driver(cluster: &mut Cluster, name: &str) {
    let driver = wait_for("the driver", DEADLINE, || named(cluster, name)?["driver"].as_u64()) as usize;
    let pid = cluster.worker(driver).expect("the worker runs");
    cluster.kill(pid);
}

pub(crate) fn wait_for_success(cluster: &Cluster, name: &str) -> Value {
    let ended = wait_for("the run to end", DEADLINE, || named(cluster, name).filter(has_ended));
    assert_eq!(ended["phase"], "Succeeded", "{ended}");
    ended
}

pub(crate) async fn model(client: &Client, run: &str) -> Vec<f32> {
    participants(client, run, &keys())[0].newest_model().await.expect("failed to download the model")
}

/// Updates that were acknowledged when the worker dies: none while no client has its task, none, one, all. Of the last the version may be stored or not.
const STAGES: [Option<usize>; 4] = [None, Some(0), Some(1), Some(CLIENTS)];

#[test]
fn a_round_survives_the_death_of_its_worker_at_each_stage_and_counts_each_update_once() {
    let mut cluster = Cluster::up(&cluster_manifest("fed", 3, "  partitions: 4\n"));
    let wrong =
        cluster.file("wrong.yaml", manifest("wrong", 2, "    secureAggregation: {}\n    strategy: { kind: Median }\n"));
    cluster.engram(&["run", &wrong]).fails_with(2, &["secureAggregation", "robust strategy", "single updates"]);
    let rounds = STAGES.len() + 1;
    let file = cluster.file("run.yaml", manifest("plain", rounds, ""));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let keys = keys();
    let mut last = Vec::new();
    for stage in STAGES {
        last = survive_death_after(&mut cluster, &keys, stage);
    }
    cluster.client(async |client| take_part(participants(&client, "plain", &keys)).await);
    let ended = wait_for_success(&cluster, "plain");
    let updates = (rounds * CLIENTS) as u64;
    assert_eq!((ended["epoch"].as_u64(), ended["updates"].as_u64()), (Some(rounds as u64), Some(updates)), "{ended}");
    cluster.client(async |client| {
        let late = participants(&client, "plain", &keys)[1].submit(&last[1].task, &update(1), 1, None).await;
        let refused = late.expect_err("the run has ended");
        assert!(refused.is_stale(), "{refused}");
    });
    // Each client is in each of the means of four once.
    let expected = [rounds as f32 / CLIENTS as f32; CLIENTS];
    assert_eq!(cluster.client(async |client| model(&client, "plain").await), expected);
    hide_updates(&mut cluster);
    correct_drift(&mut cluster);
    train_on_device(&cluster);
    send_small_updates_during_a_slow_upload(&mut cluster);
    revoke_a_client(&cluster);
    begin_an_upload_again(&cluster);
    super::federated_input::refuse_bad_uploads(&cluster);
    cluster.stop();
}

/// One round whose driver dies after so many updates were acknowledged; returns the tasks.
fn survive_death_after(cluster: &mut Cluster, keys: &[ClientKeys], acknowledged: Option<usize>) -> Vec<Assignment> {
    if acknowledged.is_none() {
        // Enrolled and waiting, without a task.
        cluster.client(async |client| {
            let first = participants(&client, "plain", keys);
            assert!(
                matches!(first[0].next(Duration::ZERO).await, Ok(Next::Nothing)),
                "the round has begun with one client"
            );
        });
        kill_driver(cluster, "plain");
    }
    let count = acknowledged.unwrap_or_default();
    let tasks = cluster.client(async |client| {
        let participants = participants(&client, "plain", keys);
        let assigned = futures_of(&participants).await;
        for number in 0..count {
            let submitted = participants[number].submit(&assigned[number].task, &update(number), 1, Some(1.0)).await;
            assert!(!submitted.expect("failed to submit"), "client {number} was counted before");
        }
        let stranger = Participant::new(client.clone(), "plain", "c0", ClientKeys::generate());
        let forged = stranger.submit(&assigned[0].task, &update(1), 1, None).await.expect_err("another secret");
        assert!(forged.to_string().contains("secret"), "{forged}");
        if count < CLIENTS {
            let foreign =
                participants[3].submit(&assigned[1].task, &update(1), 1, None).await.expect_err("another's task");
            assert!(foreign.to_string().contains("another client"), "{foreign}");
        }
        assigned
    });
    if acknowledged.is_some() {
        kill_driver(cluster, "plain");
    }
    cluster.client(async |client| {
        let participants = participants(&client, "plain", keys);
        for number in 0..CLIENTS {
            let submitted = participants[number].submit(&tasks[number].task, &update(number), 1, Some(1.0)).await;
            let is_repeated =
                submitted.unwrap_or_else(|error| panic!("client {number} after {acknowledged:?}: {error}"));
            assert_eq!(is_repeated, number < count, "client {number} after {acknowledged:?}");
        }
    });
    tasks
}

/// Lets all clients check in at once; returns their tasks.
async fn futures_of(participants: &[Participant]) -> Vec<Assignment> {
    let tasks = all_of(participants.iter().map(task)).await;
    tasks.into_iter().map(|task| task.expect("the run has not ended")).collect()
}

/// Runs futures at the same time; returns their outputs in order.
pub(crate) async fn all_of<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut waiting: Vec<_> = futures.into_iter().map(|future| (Some(Box::pin(future)), None)).collect();
    std::future::poll_fn(|context| {
        for (future, output) in &mut waiting {
            if let Some(std::task::Poll::Ready(ready)) = future.as_mut().map(|future| future.as_mut().poll(context)) {
                (*future, *output) = (None, Some(ready));
            }
        }
        if waiting.iter().all(|(_, output)| output.is_some()) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    waiting.into_iter().filter_map(|(_, output)| output).collect()
}

/// With secure aggregation and privacy, rounds go on when the worker that relays the masks dies, and a client clips its update before it masks it.
fn hide_updates(cluster: &mut Cluster) {
    const ROUNDS: usize = 3;
    let privacy =
        "    privacy: { epsilon: 1000, delta: 0.1, noiseMultiplier: 0.3, clip: 1 }\n    secureAggregation: {}\n";
    let file = cluster.file("secure.yaml", manifest("secure", ROUNDS, privacy));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let keys = keys();
    let driver = wait_for("the driver", DEADLINE, || named(cluster, "secure")?["driver"].as_u64()) as usize;
    let pid = cluster.worker(driver).expect("the worker runs");
    let has_died = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let train = move |number, version| {
        if version == 1 && !has_died.swap(true, std::sync::atomic::Ordering::SeqCst) {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::Signal::SIGKILL)
                .expect("failed to kill the worker");
        }
        // A client that sends two hundred times the norm.
        if number == 0 { vec![100.0; CLIENTS] } else { update(number) }
    };
    cluster.client(async |client| take_part_with(participants(&client, "secure", &keys), train).await);
    let ended = wait_for_success(cluster, "secure");
    assert_eq!((ended["epoch"].as_u64(), ended["updates"].as_u64()), (Some(3), Some(12)), "{ended}");
    assert!(ended["metrics"]["epsilon_spent"].as_f64() > Some(0.0), "{ended}");
    let model = cluster.client(async |client| model(&client, "secure").await);
    // A round adds a quarter of half from client 0, a quarter of one from another client, and noise with a deviation of 0.075.
    let expected = |place: usize| ROUNDS as f32 * (0.125 + if place == 0 { 0.0 } else { 0.25 });
    let is_near = |(place, value): (usize, &f32)| (value - expected(place)).abs() < 0.9;
    assert!(model.iter().enumerate().all(is_near), "{model:?}");
}

/// SCAFFOLD: two clients with loss `a/2 (y - t)^2` reach the common optimum, which many local steps without control variates miss, although each client
/// forgets everything between tasks and the worker dies in between.
fn correct_drift(cluster: &mut Cluster) {
    const ROUNDS: usize = 14;
    let curvature_and_optimum = [(1.0_f32, 0.0_f32), (4.0, 5.0)];
    let (steps, rate) = (5_u8, 0.05_f32);
    let text = manifest("drift", ROUNDS, "    strategy: { kind: Scaffold }\n")
        .replace(&format!("shape: [{CLIENTS}]"), "shape: [1]")
        .replace(
            &format!("population: {CLIENTS}, perRound: {CLIENTS}, minimum: {CLIENTS}"),
            "population: 2, perRound: 2, minimum: 2",
        );
    let file = cluster.file("drift.yaml", text);
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let keys = [ClientKeys::generate(), ClientKeys::generate()];
    for part in [4, ROUNDS - 4] {
        cluster.client(async |client| {
            for _ in 0..part {
                let clients = participants(&client, "drift", &keys);
                let assigned = futures_of(&clients).await;
                for ((participant, assignment), (a, t)) in clients.iter().zip(&assigned).zip(curvature_and_optimum) {
                    let correction = assignment.correction.as_ref().expect("the strategy is Scaffold")[0];
                    let mut y = assignment.model[0];
                    for _ in 0..steps {
                        y -= rate * (a * (y - t) + correction);
                    }
                    let rate_sum = Some(f64::from(steps) * f64::from(rate));
                    let training = Training { samples: 1, loss: None, rate_sum };
                    let incomplete = Training { rate_sum: None, ..training };
                    let update = [y - assignment.model[0]];
                    let refused = participant.submit_training(&assignment.task, &update, incomplete).await;
                    assert!(refused.expect_err("rate_sum is required").to_string().contains("rate_sum"));
                    participant.submit_training(&assignment.task, &update, training).await.expect("failed to submit");
                }
            }
        });
        if part == 4 {
            kill_driver(cluster, "drift");
        }
    }
    wait_for_success(cluster, "drift");
    // (1 * 0 + 4 * 5) / (1 + 4); the mean of the local models converges to 3.74.
    let found = cluster.client(async |client| model(&client, "drift").await);
    assert!((found[0] - 4.0).abs() < 0.01, "{found:?}");
}

/// A run with one client whose model is on disk: its upload is cut in the middle, other clients end a whole run meanwhile, and it resumes after the death
/// of the worker that received it. The next driver aggregates it after another death.
fn send_small_updates_during_a_slow_upload(cluster: &mut Cluster) {
    const VALUES: usize = 8 << 20;
    let one = format!("population: {CLIENTS}, perRound: {CLIENTS}, minimum: {CLIENTS}");
    let large = manifest("large", 1, "    lease: 600s\n    deadline: 600s\n")
        .replace(&one, "population: 1, perRound: 1")
        .replace(&format!("shape: [{CLIENTS}]"), &format!("shape: [{}, {}]", VALUES >> 10, 1 << 10));
    for (name, text) in [("large", large), ("small", manifest("small", 2, ""))] {
        let file = cluster.file(&format!("{name}.yaml"), text);
        cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    }
    let slow = SlowClient::new(VALUES);
    let half = slow.chunks() / 2;
    let task = cluster.client(async |client| {
        slow.leave_no_chunks_of_a_task(&client).await;
        let task = slow.check_in(&client).await;
        for next in 0..half {
            assert_eq!(slow.chunk(&client, task, Some(next)).await, next + 1);
        }
        task
    });
    cluster.client(async |client| take_part(participants(&client, "small", &keys())).await);
    wait_for_success(cluster, "small");
    kill_driver(cluster, "large");
    // Another connection, of a client that can reach its endpoints only, as behind an ingress.
    cluster.client(async |client| {
        let mut map = (*client.map().expect("the client is connected")).clone();
        map.version += 1;
        map.workers.values_mut().for_each(|worker| "127.0.0.1:9".clone_into(&mut worker.client_address));
        client.set_map(map);
        assert_eq!(slow.chunk(&client, task, None).await, half, "the upload resumes where it was cut");
        for next in half..slow.chunks() {
            assert_eq!(slow.chunk(&client, task, Some(next)).await, next + 1);
        }
        slow.commit(&client, task).await;
    });
    kill_driver(cluster, "large");
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
            // Until the first version is on disk, the run has no driver.
            let Ok(answer) = client.federated_check_in(request).await else { continue };
            if let Some(task) = answer.task {
                return task.number;
            }
        }
    }

    /// What a task left that ended without an update is removed at once, not with the next version.
    async fn leave_no_chunks_of_a_task(&self, client: &Client) {
        let task = self.check_in(client).await;
        let buffer = client.buffer("engram-federated").await.expect("the buffer exists");
        let stored = async || buffer.stats().await.expect("failed to read the figures").items;
        let model = stored().await;
        for next in 0..3 {
            self.chunk(client, task, Some(next)).await;
        }
        assert_eq!(stored().await, model + 3);
        let caller = Some(self.caller.clone());
        client.federated_give_up(v1::GiveUpTaskRequest { caller, task }).await.expect("failed to give up");
        tokio::time::timeout(DEADLINE, async { while stored().await != model {} }).await.expect("chunks remain");
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
        let chunks: Vec<_> = self.update.chunks(Self::CHUNK).map(digest).collect();
        let digest = digest_of_chunks(&chunks).to_vec().into();
        let caller = Some(self.caller.clone());
        let request = v1::CommitUpdateRequest {
            caller,
            task,
            nonce: 1,
            digest,
            samples: 1,
            ..v1::CommitUpdateRequest::default()
        };
        let answer = client.federated_commit(request).await.expect("failed to commit");
        assert_eq!((answer.refusal, answer.repeated), (None, false));
    }
}

/// A revoked client is refused at its next call, whatever it asks for, and its round goes on without it.
fn revoke_a_client(cluster: &Cluster) {
    let all = format!("population: {CLIENTS}, perRound: {CLIENTS}, minimum: {CLIENTS}");
    let text = manifest("open", 1, "    lease: 600s\n    deadline: 600s\n");
    let three = text.replace(&all, &format!("population: {CLIENTS}, perRound: 3, minimum: 3"));
    let file = cluster.file("open.yaml", three);
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let keys = keys();
    let secret = vec![7; 32];
    let caller = v1::FederatedCaller { run: "open".into(), client: "bad".into(), secret: secret.into() };
    let caller = Some(caller);
    let (bad, tasks) = cluster.client(async |client| {
        let others = participants(&client, "open", &keys);
        let bad = async {
            loop {
                let request =
                    v1::CheckInRequest { caller: caller.clone(), wait_ms: 5_000, ..v1::CheckInRequest::default() };
                let answer = client.federated_check_in(request).await.expect("failed to check in");
                if let Some(task) = answer.task {
                    return task;
                }
            }
        };
        tokio::join!(bad, futures_of(&others[1..3]))
    });
    let revoked = cluster.engram(&["federated", "revoke", "open", "bad"]).exits_with(0);
    assert!(revoked.stdout.contains("is revoked"), "{}", revoked.stdout);
    cluster.client(async |client| {
        let is_refused = |refusal: Option<v1::FederatedRefusal>| {
            let refusal = refusal.expect("the client is revoked");
            assert_eq!(refusal.reason(), v1::FederatedRefusalReason::NotEnrolled, "{refusal:?}");
            assert!(refusal.message.contains("not revoked"), "{refusal:?}");
        };
        let request = v1::CheckInRequest { caller: caller.clone(), ..v1::CheckInRequest::default() };
        is_refused(client.federated_check_in(request).await.expect("failed to check in").refusal);
        let part = v1::GetModelPartRequest {
            caller: caller.clone(),
            version: bad.version,
            bytes: 16,
            ..v1::GetModelPartRequest::default()
        };
        let part = client.federated_model_part(part).await.expect("failed to read the model");
        assert!(part.content.is_empty());
        is_refused(part.refusal);
        let chunk = v1::UploadChunkRequest {
            caller: caller.clone(),
            task: bad.number,
            update_bytes: bad.model_bytes,
            ..v1::UploadChunkRequest::default()
        };
        is_refused(client.federated_upload_chunk(chunk).await.expect("failed to upload").refusal);
        // Another client takes its place in the round.
        let others = participants(&client, "open", &keys);
        let last = task(&others[3]).await.expect("the round is in progress");
        assert_eq!(last.task.round, bad.round);
        for (number, task) in [(1, &tasks[0]), (2, &tasks[1]), (3, &last)] {
            others[number].submit(&task.task, &update(number), 1, None).await.expect("failed to submit");
        }
    });
    let ended = wait_for_success(cluster, "open");
    assert_eq!((ended["epoch"].as_u64(), ended["updates"].as_u64()), (Some(1), Some(3)), "{ended}");
    let model = cluster.client(async |client| model(&client, "open").await);
    assert!(model[0] == 0.0 && model[1..].iter().all(|value| (value - 1.0 / 3.0).abs() < 1e-6), "{model:?}");
}

/// A client that trained a task again, as after a restart, gives up the upload that it had begun; a reader of the model sees one version.
fn begin_an_upload_again(cluster: &Cluster) {
    let all = format!("population: {CLIENTS}, perRound: {CLIENTS}, minimum: {CLIENTS}");
    let text = manifest("again", 2, "    lease: 600s\n    deadline: 600s\n");
    let file = cluster.file("again.yaml", text.replace(&all, "population: 1, perRound: 1"));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    cluster.client(async |client| {
        let path = cluster.folder().join("again.json");
        let restarted = || Participant::new(client.clone(), "again", "one", ClientKeys::open(&path).expect("keys"));
        let first = restarted();
        let begun = task(&first).await.expect("the run goes on");
        let stored = std::fs::read(&path).expect("failed to read the keys");
        let stored: Value = serde_json::from_slice(&stored).expect("keys are JSON");
        let secret: Vec<u8> = serde_json::from_value(stored["secret"].clone()).expect("a secret is bytes");
        let content = [0; 4 * CLIENTS];
        let chunk = v1::UploadChunkRequest {
            caller: Some(v1::FederatedCaller { run: "again".into(), client: "one".into(), secret: secret.into() }),
            task: begun.task.number,
            nonce: 1,
            update_bytes: content.len() as u64,
            checksum: crc32c::crc32c(&content),
            content: content.to_vec().into(),
            ..v1::UploadChunkRequest::default()
        };
        assert_eq!(client.federated_upload_chunk(chunk).await.expect("failed to upload").refusal, None);
        let again = restarted();
        let same = task(&again).await.expect("the run goes on");
        assert_eq!(same.task.number, begun.task.number, "its lease lasts");
        let lost = again.submit(&same.task, &update(0), 1, None).await.expect_err("another upload has begun");
        assert!(lost.is_stale() && lost.to_string().contains("another upload"), "{lost}");
        let part = async |version, offset| {
            let request = v1::GetPublishedModelRequest { run: "again".into(), version, offset, bytes: 8 };
            client.federated_published(request).await.expect("failed to read the model")
        };
        let old = part(None, 0).await;
        assert_eq!((old.version, old.content.len(), old.model_signature.len()), (0, 8, 64));
        let next = task(&again).await.expect("the run goes on");
        assert_ne!(next.task.number, begun.task.number);
        again.submit(&next.task, &update(0), 1, None).await.expect("failed to submit");
        // The next task is that of the next version: the first one is not kept any more.
        task(&again).await.expect("the run goes on");
        let rest = part(Some(old.version), 8).await.refusal.expect("no part of another version");
        assert_eq!(rest.reason(), v1::FederatedRefusalReason::Stale);
        assert_eq!(part(None, 8).await.version, 1);
        assert_eq!(again.newest_model().await.expect("failed to read the model"), update(0));
        client.cancel_run("again").await.expect("failed to cancel");
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
