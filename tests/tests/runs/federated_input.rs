//! Bad uploads over the wire: each is refused with what is wrong and what is allowed, and nothing of it is aggregated.

use super::federated::{CLIENTS, manifest, named};
use crate::has_ended;
use engram_client::Client;
use engram_federated::service::{digest, encode_values};
use engram_proto::v1::FederatedRefusalReason as Reason;
use engram_proto::v1::{self, FederatedRefusal};
use engram_tests::{Cluster, DEADLINE, wait_for};

const GOOD: [f32; CLIENTS] = [1.0; CLIENTS];

/// A client of run `strict` unless stated otherwise.
fn caller(run: &str, client: &str) -> v1::FederatedCaller {
    v1::FederatedCaller { run: run.to_owned(), client: client.to_owned(), secret: vec![9; 32].into() }
}

fn submit(cluster: &Cluster, name: &str, more: &str) {
    let clients = format!("population: {CLIENTS}, perRound: {CLIENTS}, minimum: {CLIENTS}");
    let text = manifest(name, 2, more).replace(&clients, "population: 2, perRound: 2, minimum: 2");
    let file = cluster.file(&format!("{name}.yaml"), text);
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
}

/// Checks in a client of a run; returns its task.
async fn check_in(client: &Client, run: &str, name: &str) -> u64 {
    loop {
        let request =
            v1::CheckInRequest { caller: Some(caller(run, name)), wait_ms: 5_000, ..v1::CheckInRequest::default() };
        let answer = client.federated_check_in(request).await.expect("failed to check in");
        if let Some(task) = answer.task {
            return task.number;
        }
    }
}

/// Checks in two clients of a run at once; returns their tasks.
async fn tasks(client: &Client, run: &str, names: [&str; 2]) -> [u64; 2] {
    let (first, second) = tokio::join!(check_in(client, run, names[0]), check_in(client, run, names[1]));
    [first, second]
}

/// An update as one chunk and a commit.
#[derive(Clone)]
struct Upload {
    caller: v1::FederatedCaller,
    task: u64,
    nonce: u64,
    content: Vec<u8>,
    samples: u64,
}

impl Upload {
    fn new(task: u64, values: &[f32]) -> Self {
        Self { caller: caller("strict", "c0"), task, nonce: 1, content: encode_values(values), samples: 1 }
    }

    async fn chunk(&self, client: &Client) -> Option<FederatedRefusal> {
        let request = v1::UploadChunkRequest {
            caller: Some(self.caller.clone()),
            task: self.task,
            nonce: self.nonce,
            index: 0,
            update_bytes: self.content.len() as u64,
            checksum: crc32c::crc32c(&self.content),
            content: self.content.clone().into(),
        };
        client.federated_upload_chunk(request).await.expect("failed to upload").refusal
    }

    async fn commit(&self, client: &Client) -> Result<bool, FederatedRefusal> {
        let request = v1::CommitUpdateRequest {
            caller: Some(self.caller.clone()),
            task: self.task,
            nonce: self.nonce,
            digest: digest(&self.content).to_vec().into(),
            samples: self.samples,
            ..v1::CommitUpdateRequest::default()
        };
        let answer = client.federated_commit(request).await.expect("failed to commit");
        answer.refusal.map_or(Ok(answer.repeated), Err)
    }

    async fn send(&self, client: &Client) -> Result<bool, FederatedRefusal> {
        match self.chunk(client).await {
            Some(refusal) => Err(refusal),
            None => self.commit(client).await,
        }
    }
}

#[track_caller]
fn is_refused<T: std::fmt::Debug>(result: Result<T, FederatedRefusal>, reason: Reason, texts: &[&str]) {
    let refusal = result.expect_err("refused");
    assert_eq!(refusal.reason(), reason, "{refusal:?}");
    for text in texts {
        assert!(refusal.message.contains(text), "no {text:?} in {refusal:?}");
    }
}

pub(super) fn refuse_bad_uploads(cluster: &Cluster) {
    submit(cluster, "strict", "");
    submit(cluster, "elsewhere", "");
    cluster.client(async |client| {
        let [task, other] = tasks(&client, "strict", ["c0", "c1"]).await;
        tasks(&client, "elsewhere", ["e0", "e1"]).await;
        let good = Upload::new(task, &GOOD);
        let long = Upload::new(task, &[1.0; CLIENTS + 1]);
        is_refused(long.send(&client).await, Reason::Invalid, &["update_bytes", "20", "16"]);
        let mut values = GOOD;
        values[2] = f32::NAN;
        is_refused(Upload::new(task, &values).send(&client).await, Reason::Invalid, &["update", "NaN at 2", "finite"]);
        let unsent = Upload { nonce: 5, ..good.clone() };
        is_refused(unsent.commit(&client).await, Reason::Invalid, &["update", "not uploaded completely"]);
        // The chunks of the update with the NaN are there under this nonce.
        is_refused(good.commit(&client).await, Reason::Invalid, &["digest"]);
        let good = begin_again(&client, &good).await;
        read_parts(&client).await;
        let empty = Upload { samples: 0, ..good.clone() };
        is_refused(empty.send(&client).await, Reason::Invalid, &["samples", "0", "at least 1"]);
        let forged = Upload {
            caller: v1::FederatedCaller { secret: vec![8; 32].into(), ..good.caller.clone() },
            ..good.clone()
        };
        is_refused(forged.send(&client).await, Reason::WrongSecret, &["secret", "c0"]);
        let of_another_run = Upload { caller: caller("strict", "e0"), ..good.clone() };
        is_refused(of_another_run.send(&client).await, Reason::NotEnrolled, &["e0", "not allowed"]);
        let exchanged = Upload { task: other, ..good.clone() };
        is_refused(exchanged.send(&client).await, Reason::OtherClient, &["another client"]);
        assert_eq!(good.send(&client).await, Ok(false));
        assert_eq!(good.commit(&client).await, Ok(true), "a repeated commit has the same answer");
        let replayed = Upload { nonce: 3, content: encode_values(&[2.0; CLIENTS]), ..good.clone() };
        is_refused(replayed.commit(&client).await, Reason::Conflict, &["answered already"]);
        is_refused(replayed.send(&client).await, Reason::LeaseExpired, &["check in again"]);
        let second = Upload { caller: caller("strict", "c1"), task: other, ..good };
        assert_eq!(second.send(&client).await, Ok(false));
    });
    let status = wait_for("the version", DEADLINE, || named(cluster, "strict").filter(|run| run["epoch"] == 1));
    assert_eq!(status["updates"].as_u64(), Some(2), "{status}");
    let model = cluster.client(async |client| super::federated::model(&client, "strict").await);
    assert_eq!(model, GOOD, "the mean of the two good updates");
    let elsewhere = named(cluster, "elsewhere").expect("the run is listed");
    assert_eq!((elsewhere["epoch"].as_u64(), elsewhere["updates"].as_u64()), (Some(0), Some(0)), "{elsewhere}");
    refuse_late_uploads(cluster);
    refuse_rounds_without_budget(cluster);
    charge_a_round_before_its_first_version(cluster);
    cluster.client(async |client| {
        for run in ["strict", "elsewhere", "late", "charged"] {
            client.cancel_run(run).await.expect("failed to cancel");
        }
    });
}

/// A task has one upload: others would be records that nothing bounds. Returns the update for the next task of the client.
async fn begin_again(client: &Client, good: &Upload) -> Upload {
    for nonce in 2..10 {
        let another = Upload { nonce, ..good.clone() };
        is_refused(another.send(client).await, Reason::Conflict, &["another upload", "give the task up"]);
    }
    let give_up = v1::GiveUpTaskRequest { caller: Some(good.caller.clone()), task: good.task };
    assert_eq!(client.federated_give_up(give_up).await.expect("failed to give up").refusal, None);
    let task = check_in(client, "strict", "c0").await;
    assert_ne!(task, good.task);
    Upload { task, nonce: 2, ..good.clone() }
}

/// Only a client of the run reads the model of a task, and a part after the end is empty.
async fn read_parts(client: &Client) {
    let part = async |caller, offset| {
        let request = v1::GetModelPartRequest {
            caller: Some(caller),
            offset,
            bytes: 1 << 20,
            ..v1::GetModelPartRequest::default()
        };
        client.federated_model_part(request).await.expect("failed to read the model")
    };
    let own = caller("strict", "c0");
    for (offset, length) in [(0, 4 * CLIENTS), (4, 4 * CLIENTS - 4), (1 << 40, 0), (u64::MAX - 1, 0)] {
        let answer = part(own.clone(), offset).await;
        assert_eq!((answer.refusal, answer.content.len()), (None, length), "offset {offset}");
    }
    let stranger = part(caller("strict", "reader"), 0).await;
    is_refused::<()>(Err(stranger.refusal.expect("refused")), Reason::NotEnrolled, &["reader"]);
    let forged = part(v1::FederatedCaller { secret: vec![8; 32].into(), ..own }, 0).await;
    is_refused::<()>(Err(forged.refusal.expect("refused")), Reason::WrongSecret, &["secret"]);
}

fn refuse_late_uploads(cluster: &Cluster) {
    submit(cluster, "late", "    lease: 1s\n    deadline: 600s\n");
    cluster.client(async |client| {
        let [task, _] = tasks(&client, "late", ["c0", "c1"]).await;
        let upload = Upload { caller: caller("late", "c0"), ..Upload::new(task, &GOOD) };
        assert_eq!(upload.chunk(&client).await, None, "the lease has begun");
        let refusal = loop {
            if let Some(refusal) = upload.chunk(&client).await {
                break refusal;
            }
        };
        is_refused::<()>(Err(refusal), Reason::LeaseExpired, &["lease", "check in again"]);
        is_refused(upload.commit(&client).await, Reason::LeaseExpired, &["lease", "check in again"]);
    });
    let late = named(cluster, "late").expect("the run is listed");
    assert_eq!((late["epoch"].as_u64(), late["updates"].as_u64()), (Some(0), Some(0)), "{late}");
}

/// The spent epsilon is that of the budget, not that of the last version.
fn charge_a_round_before_its_first_version(cluster: &Cluster) {
    submit(cluster, "charged", "    privacy: { epsilon: 1000, delta: 0.1, noiseMultiplier: 1, clip: 1 }\n");
    cluster.client(async |client| tasks(&client, "charged", ["c0", "c1"]).await);
    wait_for("the charge", DEADLINE, || {
        let run = named(cluster, "charged")?;
        (run["epoch"] == 0 && run["metrics"]["epsilon_spent"].as_f64() > Some(0.0)).then_some(())
    });
}

fn refuse_rounds_without_budget(cluster: &Cluster) {
    submit(cluster, "spent", "    privacy: { epsilon: 0.01, delta: 0.1, noiseMultiplier: 1, clip: 1 }\n");
    let ended = cluster.client(async |client| {
        let check_in = async |name: &str| loop {
            let request = v1::CheckInRequest {
                caller: Some(caller("spent", name)),
                wait_ms: 5_000,
                ..v1::CheckInRequest::default()
            };
            let answer = client.federated_check_in(request).await.expect("failed to check in");
            assert!(answer.task.is_none(), "a task without budget");
            if !answer.ended.is_empty() {
                break answer.ended;
            }
        };
        tokio::join!(check_in("c0"), check_in("c1"))
    });
    let run = wait_for("the run to end", DEADLINE, || named(cluster, "spent").filter(has_ended));
    assert_eq!((run["phase"].as_str(), run["updates"].as_u64()), (Some("Failed"), Some(0)), "{ended:?} {run}");
    let message = run["message"].as_str().unwrap_or_default();
    assert!(message.contains("privacy budget exhausted") && message.contains("0.01"), "{run}");
    let page = cluster.folder().join("spent.html").display().to_string();
    cluster.engram(&["describe", "run", "spent", "--report", &page]).exits_with(0);
    let page = std::fs::read_to_string(page).expect("a failed run has a page");
    assert!(page.contains("privacy budget exhausted"), "{page}");
}
