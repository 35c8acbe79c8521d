//! Federated runs over real connections: every client has a connection of its own to one worker process, as devices have.
//!
//! Training takes no time here, so a round is the cost of the protocol: check-in, download of the model, upload, commit, aggregation.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use engram_client::{Client, Options};
use engram_federated::service::{digest, digest_of_chunks};
use engram_participant::{ClientKeys, Next, Participant};
use engram_proto::v1;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::measure;
use crate::row::{Budget, Figure, Row};
use crate::wire::processes::Cluster;

/// Parameters of the model, 40 kB: small enough that 2,000 updates fit the bound of a round.
const PARAMETERS: usize = 10_000;
/// Rounds that are measured, after one that is not.
const ROUNDS: u64 = 8;
/// Parameters of the slow client's model, the largest that is supported: an update of 1 GiB.
const LARGE: usize = engram_federated::job::MAX_PARAMETERS;
/// Bytes of a chunk, and the pause of the slow client after each, until it is cut.
const CHUNK: usize = 1 << 20;
const SLOW: Duration = Duration::from_millis(250);
/// Small updates that are sent alongside a slow upload.
const SMALL: u64 = 1_000;
/// Clients that send them.
const SENDERS: usize = 8;
/// Time for the first version of the large model, 1 GiB, to be written on a machine that does other work too.
const VERSION_LIMIT: Duration = Duration::from_secs(600);
const WAIT: Duration = Duration::from_secs(20);

/// Measures rounds at each number of clients, and small updates alongside a slow upload.
pub(in crate::wire) fn federated_rows(runtime: &Runtime, clients: &[u32], scratch: &Path) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &clients in clients {
        eprintln!("federated: {clients} clients, each with its connection");
        let cluster = start(scratch)?;
        rows.extend(runtime.block_on(rounds(&cluster, clients))?);
    }
    eprintln!("federated: {SMALL} small updates alongside a slow upload");
    let cluster = start(scratch)?;
    rows.extend(runtime.block_on(slow_upload(&cluster))?);
    Ok(rows)
}

fn start(scratch: &Path) -> Result<Cluster> {
    let spec = json!({ "workers": 1, "partitions": 4 });
    Cluster::start(scratch, &spec, |command: &mut Command| Ok(command.spawn()?))
}

async fn submit(client: &Client, name: &str, parameters: usize, clients: u32, rounds: u64) -> Result<()> {
    // A dimension has a limit.
    let shape = if parameters < LARGE { vec![parameters] } else { vec![parameters / 1024, 1024] };
    let spec = json!({
        "clusterRef": { "name": "bench" }, "kind": "Federated",
        "federated": {
            "model": { "layers": [{ "name": "w", "shape": shape }] },
            "rounds": rounds, "deadline": "600s", "lease": "600s",
            "clients": { "population": clients, "perRound": clients, "minimum": clients },
        },
    });
    client.submit_run(name, &spec.to_string(), None, None).await?;
    Ok(())
}

async fn connect(cluster: &Cluster) -> Result<Client> {
    let endpoints = cluster.endpoints().iter().cloned();
    let options = Options {
        read_deadline: Duration::from_secs(60),
        write_deadline: Duration::from_secs(60),
        ..Options::new(endpoints)
    };
    Ok(Client::connect(options).await?)
}

/// Bytes that the loopback device has received since the start of the machine, headers included.
fn loopback_bytes() -> Result<f64> {
    let text = fs::read_to_string("/proc/net/dev").context("failed to read /proc/net/dev")?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("lo:")).context("no loopback device")?;
    line.split_whitespace().next().and_then(|bytes| bytes.parse().ok()).context("no counter of the loopback device")
}

async fn rounds(cluster: &Cluster, clients: u32) -> Result<Vec<Row>> {
    let first = connect(cluster).await?;
    let idle_mib = cluster.resident_mib()?;
    submit(&first, "bench", PARAMETERS, clients, ROUNDS + 1).await?;
    let mut connections = JoinSet::new();
    let mut participants = Vec::new();
    for number in 0..clients {
        // In groups: a listener accepts so many that have not sent anything yet.
        if connections.len() >= 64
            && let Some(connected) = connections.join_next().await
        {
            participants.push(connected??);
        }
        let endpoints = cluster.endpoints().to_vec();
        connections.spawn(async move {
            let waits = Duration::from_secs(60);
            let options = Options {
                read_deadline: waits,
                write_deadline: waits,
                attempt_deadline: waits,
                ..Options::new(endpoints)
            };
            let client = Client::connect(options).await?;
            anyhow::Ok(Participant::new(client, "bench", &format!("c{number}"), ClientKeys::generate()))
        });
    }
    while let Some(connected) = connections.join_next().await {
        participants.push(connected??);
    }
    let mut workers = JoinSet::new();
    for (number, participant) in participants.into_iter().enumerate() {
        workers.spawn(take_part(participant, number == 0));
    }
    let mut marks = Vec::new();
    let mut most_mib: f64 = 0.0;
    let mut updates = 0;
    loop {
        tokio::select! {
            ended = workers.join_next() => match ended {
                Some(ended) => {
                    let (sent, own) = ended??;
                    updates += sent;
                    if !own.is_empty() {
                        marks = own;
                    }
                }
                None => break,
            },
            () = tokio::time::sleep(Duration::from_millis(100)) => most_mib = most_mib.max(cluster.resident_mib()?),
        }
    }
    ensure!(updates == u64::from(clients) * (ROUNDS + 1), "{updates} updates were acknowledged");
    let took_ms = marks.windows(2).map(|pair| (pair[1].0 - pair[0].0).as_secs_f64() * 1e3).collect();
    let per_client = |bytes: f64| bytes / 1024.0 / f64::from(clients);
    let moved = marks.windows(2).map(|pair| per_client(pair[1].1 - pair[0].1)).collect();
    let memory = measure::once((most_mib - idle_mib) * 1024.0 / f64::from(clients));
    let title = |text: &str| format!("federated, model of 40 kB: {text}");
    Ok(vec![
        Row::lower(title("a round of all clients"), clients, "ms", measure::lowest(took_ms))
            .workload("federated-round"),
        Row::lower(title("bytes moved per client and round"), clients, "KiB", measure::lowest(moved))
            .workload("federated-bytes"),
        Row::lower(title("server memory per client"), clients, "KiB", memory).workload("federated-memory"),
    ])
}

/// Takes part until the run ends. Returns the acknowledged updates, and the time and the counter of the loopback device at each task of a marker.
async fn take_part(participant: Participant, is_marker: bool) -> Result<(u64, Vec<(Instant, f64)>)> {
    let (mut acknowledged, mut marks) = (0, Vec::new());
    loop {
        match participant.next(WAIT).await? {
            Next::Nothing => {}
            Next::Ended(_) => {
                if is_marker {
                    marks.push((Instant::now(), loopback_bytes()?));
                }
                return Ok((acknowledged, marks));
            }
            Next::Task(assignment) => {
                if is_marker {
                    marks.push((Instant::now(), loopback_bytes()?));
                }
                let update = vec![0.5; assignment.model.len()];
                participant.submit(&assignment.task, &update, 1, Some(1.0)).await?;
                acknowledged += 1;
            }
        }
    }
}

/// A client that uploads the largest update in chunks with pauses, and is cut; others send small updates meanwhile.
async fn slow_upload(cluster: &Cluster) -> Result<Vec<Row>> {
    let client = connect(cluster).await?;
    let alone = small_updates(cluster, &client, "alone").await?;
    let idle_mib = cluster.resident_mib()?;
    submit(&client, "large", LARGE, 1, 1).await?;
    let slow = Arc::new(SlowClient::check_in(connect(cluster).await?).await?);
    let (cut, is_cut) = watch::channel(false);
    let uploading = {
        let slow = Arc::clone(&slow);
        tokio::spawn(async move {
            let mut next = 0;
            while !*is_cut.borrow() && next + 1 < slow.chunks() {
                next = slow.chunk(Some(next)).await?;
                tokio::time::sleep(SLOW).await;
            }
            anyhow::Ok(next)
        })
    };
    let alongside = small_updates(cluster, &client, "alongside").await?;
    cut.send_replace(true);
    let sent = uploading.await??;
    // The connection is cut: another one asks what is missing.
    let resumed = slow.on(connect(cluster).await?);
    let mut next = resumed.chunk(None).await?;
    ensure!(next == sent, "the upload resumes at chunk {next} instead of {sent}");
    let mut most_mib: f64 = 0.0;
    while next < resumed.chunks() {
        next = resumed.chunk(Some(next)).await?;
        most_mib = most_mib.max(cluster.resident_mib()?);
    }
    resumed.commit().await?;
    while !has_succeeded(&client, "large").await? {
        most_mib = most_mib.max(cluster.resident_mib()?);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let row = |figure| {
        Row::lower(
            "small update, check-in to acknowledgement, alongside a slow upload of 1 GiB: 99 of 100",
            SMALL as u32,
            "ms",
            figure,
        )
    };
    Ok(vec![
        row(alongside)
            .with_peer("alone", alone)
            .with_budgets([Budget::Ratio { peer: "alone".to_owned(), at_least: 0.5 }]),
        Row::lower("server memory for an update of 1 GiB", 1, "MiB", measure::once(most_mib - idle_mib)),
    ])
}

/// Whether a run has succeeded.
async fn has_succeeded(client: &Client, name: &str) -> Result<bool> {
    let runs = client.list_runs().await?;
    let run = runs.iter().find(|run| run.name == name).context("the run is not listed")?;
    ensure!(run.phase() != v1::RunPhase::Failed, "the run failed: {}", run.message);
    Ok(run.phase() == v1::RunPhase::Succeeded)
}

/// Returns the 99th percentile of small updates of one run, in which clients take part independently.
async fn small_updates(cluster: &Cluster, client: &Client, name: &str) -> Result<Figure> {
    let spec = json!({
        "clusterRef": { "name": "bench" }, "kind": "Federated",
        "federated": {
            "model": { "layers": [{ "name": "w", "shape": [100] }] }, "strategy": { "kind": "FedBuff" },
            "rounds": SMALL / SENDERS as u64, "lease": "600s",
            "clients": { "population": SENDERS, "perRound": SENDERS },
        },
    });
    client.submit_run(name, &spec.to_string(), None, None).await?;
    let mut senders = JoinSet::new();
    for number in 0..SENDERS {
        let participant =
            Participant::new(connect(cluster).await?, name, &format!("c{number}"), ClientKeys::generate());
        senders.spawn(async move {
            let mut took_ms = Vec::new();
            loop {
                let begun = Instant::now();
                match participant.next(WAIT).await? {
                    Next::Ended(_) => return anyhow::Ok(took_ms),
                    Next::Nothing => {}
                    Next::Task(assignment) => match participant.submit(&assignment.task, &[1.0; 100], 1, None).await {
                        Ok(_) => took_ms.push(begun.elapsed().as_secs_f64() * 1e3),
                        Err(error) if error.is_stale() => {}
                        Err(error) => return Err(error.into()),
                    },
                }
            }
        });
    }
    let mut took_ms: Vec<f64> = Vec::new();
    while let Some(sent) = senders.join_next().await {
        took_ms.extend(sent??);
    }
    ensure!(!took_ms.is_empty(), "no update was acknowledged");
    took_ms.sort_by(f64::total_cmp);
    let at = |share: f64| took_ms[((took_ms.len() - 1) as f64 * share) as usize];
    Ok(Figure { best: at(0.5), median: at(0.99), repeats: took_ms.len() as u32 })
}

/// A client without the library of clients: it sends chunks when it likes.
struct SlowClient {
    client: Client,
    caller: v1::FederatedCaller,
    task: u64,
    update: Arc<Vec<u8>>,
}

impl SlowClient {
    async fn check_in(client: Client) -> Result<Self> {
        let caller =
            v1::FederatedCaller { run: "large".to_owned(), client: "slow".to_owned(), secret: vec![7; 32].into() };
        let begun = Instant::now();
        while begun.elapsed() < VERSION_LIMIT {
            let request =
                v1::CheckInRequest { caller: Some(caller.clone()), wait_ms: 5_000, identity_key: Vec::new().into() };
            // Until the first version of the model is on disk, a call may end at its deadline.
            let Ok(answer) = client.federated_check_in(request).await else { continue };
            if let Some(task) = answer.task {
                let update = Arc::new(1.0_f32.to_le_bytes().repeat(LARGE));
                return Ok(Self { client, caller, task: task.number, update });
            }
        }
        bail!("the slow client received no task")
    }

    fn chunks(&self) -> u32 {
        self.update.len().div_ceil(CHUNK) as u32
    }

    /// The same client on another connection.
    fn on(&self, client: Client) -> Self {
        Self { client, caller: self.caller.clone(), task: self.task, update: Arc::clone(&self.update) }
    }

    /// Sends a chunk, or asks for the first missing one, which is returned.
    async fn chunk(&self, index: Option<u32>) -> Result<u32> {
        let start = index.unwrap_or_default() as usize * CHUNK;
        let content = index.map_or(&[][..], |_| &self.update[start..self.update.len().min(start + CHUNK)]);
        let request = v1::UploadChunkRequest {
            caller: Some(self.caller.clone()),
            task: self.task,
            nonce: 1,
            index: index.unwrap_or_default(),
            update_bytes: self.update.len() as u64,
            content: content.to_vec().into(),
            checksum: crc32c::crc32c(content),
        };
        let answer = self.client.federated_upload_chunk(request).await?;
        ensure!(answer.refusal.is_none(), "a chunk was refused: {:?}", answer.refusal);
        Ok(answer.next)
    }

    async fn commit(&self) -> Result<()> {
        let chunks: Vec<_> = self.update.chunks(CHUNK).map(digest).collect();
        let digest = digest_of_chunks(&chunks);
        let request = v1::CommitUpdateRequest {
            caller: Some(self.caller.clone()),
            task: self.task,
            nonce: 1,
            digest: digest.to_vec().into(),
            samples: 1,
            ..v1::CommitUpdateRequest::default()
        };
        let answer = self.client.federated_commit(request).await?;
        ensure!(answer.refusal.is_none() && !answer.repeated, "the update was not accepted: {:?}", answer.refusal);
        Ok(())
    }
}
