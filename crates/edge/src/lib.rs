//! A client of a federated run on a device, whose training is a program of the user: `engram edge`, and the program `engram-edge`, which is that
//! command alone as one small static file.
//!
//! Decides when a device checks in, trains, waits and sends; what an update is and how it is sent are of `engram-participant`. An update that was
//! computed is on disk before it is sent. Several runs may share a folder: each update is sent to its own run only.
#![forbid(unsafe_code)]

use anyhow::Context as _;
use engram_client::{Client, Network, Options, Token};
use engram_identity::{ExpectedPeer, Files, Keys, Role, Roots, WatchedFiles, token};
use engram_participant::{
    Assignment, Backoff, ClientKeys, DroppedUpdate, Error, Limits, ModelKey, Next, Participant, Queue, QueuedUpdate,
    Training,
};
use engram_proto::v1::FederatedTask;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// Bounds of the pause after a failure.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// Wait of one call for a task.
const WAIT: Duration = Duration::from_secs(25);
/// Time in which a call is repeated at once, as after the death of a worker. Then the growing pauses begin, which spare server and battery.
const CALL_DEADLINE: Duration = Duration::from_secs(10);

/// Take part in a federated run with a training program
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram edge --run hospitals --client ward-3 --state ./ward-3 -- python3 train.py
  engram edge --run fleet --client car-17 --state /var/lib/engram --endpoint fed.example.com:7443 --ca ca.pem --token token -- ./train

For each task the program runs in STATE/task, where it finds:
  task.json     number, round, version, layers (name, shape), settings, proximalWeight, leaseSeconds
  model.f32     the shared parameters, layer after layer, as 32-bit little-endian floats
  correction.f32  with strategy Scaffold only: a local step is y - rate * (gradient + correction)
and where it writes:
  trained.f32   the trained parameters in the same order
  result.json   {\"samples\": 120, \"loss\": 0.31}; loss, that of model.f32 on the device's data, may be absent. With Scaffold also rateSum,
                the sum of the step sizes of all local steps

Updates are kept on disk until the cluster has acknowledged them: the device may be offline for as long as the lease of its task. Several
runs, one process after another, may share the folder of the state and its queue.")]
pub struct Edge {
    /// Name of the run
    #[arg(long, value_name = "NAME")]
    run: String,
    /// Name of this client, unique within the run
    #[arg(long, value_name = "NAME")]
    client: String,
    /// Folder for keys, the queue of updates and the task in progress, of one process at a time
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
    /// Address of a worker or an ingress; may be repeated [default: the cluster of the context]
    #[arg(long = "endpoint", value_name = "HOST:PORT")]
    addresses: Vec<String>,
    /// CA certificates of the cluster
    #[arg(long, value_name = "FILE", requires = "addresses")]
    ca: Option<PathBuf>,
    /// Token of this client
    #[arg(long, value_name = "FILE", requires = "ca", conflicts_with = "certificate")]
    token: Option<PathBuf>,
    /// Certificate of this client
    #[arg(long, value_name = "FILE", requires = "ca")]
    certificate: Option<PathBuf>,
    /// Private key of the certificate [default: the file of the certificate]
    #[arg(long, value_name = "FILE", requires = "certificate")]
    key: Option<PathBuf>,
    /// Key by which the models of the run are signed: its output model_key [default: that of the run's first task, kept in STATE/model-key]
    #[arg(long, value_name = "HEX")]
    model_key: Option<String>,
    /// Most updates in the queue, of all runs: the oldest make room
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    queue_updates: u32,
    /// Most MiB in the queue, of all runs: the oldest make room
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    queue_mib: u32,
    /// End after this many updates were acknowledged [default: when the run ends]
    #[arg(long, value_name = "N")]
    updates: Option<u64>,
    /// Training program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

/// What the program reports.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TrainingResult {
    samples: u64,
    loss: Option<f64>,
    rate_sum: Option<f64>,
}

impl TrainingResult {
    const fn training(&self) -> Training {
        Training { samples: self.samples, loss: self.loss, rate_sum: self.rate_sum }
    }
}

/// Why a device ends without its work done.
#[derive(Debug, thiserror::Error)]
pub enum EdgeError {
    /// The command line is invalid.
    #[error("{0}")]
    Usage(String),
    /// The training program failed, or did not write what it has to.
    #[error("{0}")]
    Training(String),
}

impl Edge {
    /// Whether the command line has addresses, rather than a cluster that is found otherwise.
    #[must_use]
    pub const fn has_addresses(&self) -> bool {
        !self.addresses.is_empty()
    }
}

/// Takes part until the run ends, or as many updates as asked for were acknowledged. `found` is the connection to use where the command line has no
/// addresses.
///
/// # Errors
/// [`EdgeError`]; the run refuses the device; a file of the state cannot be read or written.
pub async fn run(arguments: &Edge, found: Option<Client>) -> anyhow::Result<()> {
    std::fs::create_dir_all(&arguments.state)
        .with_context(|| format!("failed to create {}", arguments.state.display()))?;
    let keys = ClientKeys::open(&arguments.state.join("keys.json"))?;
    let limits = Limits { updates: arguments.queue_updates as usize, bytes: u64::from(arguments.queue_mib) << 20 };
    let queue = Queue::open(&arguments.state.join("queue"), limits)?;
    let mut device = Device { arguments, queue, backoff: Backoff::new(PAUSES.0, PAUSES.1), acknowledged: 0 };
    device.report_dropped();
    let model_key = match &arguments.model_key {
        Some(digits) => ModelKey::given(digits)?,
        None => ModelKey::kept_in(&arguments.state.join("model-key"))?,
    };
    let client = match found {
        Some(client) => client,
        None => device.connect().await?,
    };
    let participant = Participant::new(client, &arguments.run, &arguments.client, keys).with_model_key(model_key);
    loop {
        match device.step(&participant).await {
            Ok(true) => return Ok(()),
            Ok(false) => device.backoff.reset(),
            Err(error) if is_temporary(&error) => device.pause(&error).await,
            Err(error) => return Err(error),
        }
    }
}

fn is_temporary(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Error>().is_some_and(Error::is_temporary)
}

/// A device that takes part.
struct Device<'a> {
    arguments: &'a Edge,
    queue: Queue,
    backoff: Backoff,
    acknowledged: u64,
}

impl Device<'_> {
    /// Connects to the addresses of the command line, as often as it takes.
    async fn connect(&mut self) -> anyhow::Result<Client> {
        let network = network(self.arguments)?;
        let options = Options {
            network,
            read_deadline: CALL_DEADLINE,
            write_deadline: CALL_DEADLINE,
            ..Options::new(self.arguments.addresses.clone())
        };
        loop {
            match Client::connect(options.clone()).await {
                Ok(client) => return Ok(client),
                Err(error) => self.pause(&error.into()).await,
            }
        }
    }

    async fn pause(&mut self, error: &anyhow::Error) {
        let bound = self.backoff.bound().as_secs();
        let wait = self.backoff.next_wait();
        let (attempt, queued) = (self.backoff.failures(), self.queue.len());
        eprintln!(
            "warning: attempt {attempt} to reach run {} failed, {queued} updates queued; retrying in {:.2} of at most {bound} s: {error:#}",
            self.arguments.run,
            wait.as_secs_f64()
        );
        tokio::time::sleep(wait).await;
    }

    /// Logs what the queue has dropped.
    fn report_dropped(&mut self) {
        for DroppedUpdate { task, bytes } in self.queue.take_dropped() {
            match task {
                Some((run, task)) => eprintln!(
                    "warning: update of task {task} of run {run} dropped, {bytes} bytes: the queue is full, and the oldest update makes room; see --queue-updates and --queue-mib"
                ),
                None => eprintln!("warning: update of {bytes} bytes dropped: its file in the queue is damaged"),
            }
        }
    }

    /// Sends what is queued, then executes a task. Returns whether the work is done.
    async fn step(&mut self, participant: &Participant) -> anyhow::Result<bool> {
        self.flush(participant).await?;
        if self.arguments.updates.is_some_and(|most| self.acknowledged >= most) {
            return Ok(true);
        }
        match participant.next(WAIT).await? {
            Next::Ended(how) => {
                println!(
                    "run {} ended ({how}); {} updates of this client were acknowledged",
                    self.arguments.run, self.acknowledged
                );
                Ok(true)
            }
            Next::Nothing => Ok(false),
            Next::Task(assignment) => {
                self.work_on(participant, &assignment).await?;
                Ok(false)
            }
        }
    }

    /// Sends the queued updates, the oldest first. Those that are too old are dropped: the client checks in again.
    async fn flush(&mut self, participant: &Participant) -> anyhow::Result<()> {
        loop {
            let first = self.queue.first(&self.arguments.run);
            self.report_dropped();
            let Some((number, queued)) = first? else { return Ok(()) };
            let bytes = 4 * queued.update.len() as u64;
            let task = FederatedTask { number: queued.task, model_bytes: bytes, ..FederatedTask::default() };
            match participant.submit_training(&task, &queued.update, queued.training).await {
                Ok(_) => {
                    self.acknowledged += 1;
                    println!("update of task {} acknowledged", queued.task);
                }
                Err(error @ Error::Client(_)) => return Err(error.into()),
                Err(error) if error.is_temporary() && !error.is_stale() => return Err(error.into()),
                Err(error) => println!("update of task {} dropped: {error}", queued.task),
            }
            self.queue.delete(number)?;
        }
    }

    async fn work_on(&mut self, participant: &Participant, assignment: &Assignment) -> anyhow::Result<()> {
        let task = &assignment.task;
        println!("task {}: training version {} of the model", task.number, task.version);
        let trained = match self.queue.check_size(assignment.model.len()) {
            Ok(()) => self.train(assignment).await,
            Err(error) => Err(EdgeError::Usage(format!("{error}; raise --queue-mib")).into()),
        };
        let (update, result) = match trained {
            Ok(trained) => trained,
            Err(error) => {
                // Another client can have it.
                let _ = participant.give_up(task.number).await;
                return Err(error);
            }
        };
        if task.cohort.is_empty() {
            let run = self.arguments.run.clone();
            let pushed = self.queue.push(&QueuedUpdate { run, task: task.number, training: result.training(), update });
            self.report_dropped();
            pushed?;
            return self.flush(participant).await;
        }
        // A masked update belongs to the round in progress: it cannot wait on disk.
        match participant.submit_training(task, &update, result.training()).await {
            Ok(_) => {
                self.acknowledged += 1;
                println!("update of task {} acknowledged", task.number);
            }
            Err(error) if error.is_stale() => println!("update of task {} dropped: {error}", task.number),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Runs the program on a task. Returns the update and what the program reports.
    async fn train(&self, assignment: &Assignment) -> anyhow::Result<(Vec<f32>, TrainingResult)> {
        let folder = self.arguments.state.join("task");
        prepare(&folder, assignment).with_context(|| format!("failed to write the task to {}", folder.display()))?;
        let (program, options) = self.arguments.program.split_first().context("a program is required")?;
        let status = tokio::process::Command::new(program)
            .args(options)
            .current_dir(&folder)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .status()
            .await
            .with_context(|| format!("failed to start {program}"))?;
        if !status.success() {
            return Err(EdgeError::Training(format!("the training program failed: {status}")).into());
        }
        let read = |name: &str| {
            std::fs::read(folder.join(name)).with_context(|| format!("failed to read {name} in {}", folder.display()))
        };
        let result: TrainingResult =
            serde_json::from_slice(&read("result.json")?).context("failed to parse result.json")?;
        if assignment.correction.is_some() && result.rate_sum.is_none() {
            let message =
                "result.json has no rateSum; required with strategy Scaffold: the sum of the local step sizes";
            return Err(EdgeError::Training(message.to_owned()).into());
        }
        let trained = engram_federated::service::decode_values(&read("trained.f32")?);
        if trained.len() != assignment.model.len() {
            let (found, expected) = (trained.len(), assignment.model.len());
            let message = format!("trained.f32 has {found} values; required: the {expected} of model.f32");
            return Err(EdgeError::Training(message).into());
        }
        if result.samples == 0 {
            return Err(EdgeError::Training("result.json: samples is 0; required: at least 1".to_owned()).into());
        }
        let update: Vec<f32> =
            trained.iter().zip(assignment.model.iter()).map(|(trained, received)| trained - received).collect();
        if let Some(at) = update.iter().position(|value| !value.is_finite()) {
            let message = format!("trained.f32: value {at} is {}; required: finite numbers", trained[at]);
            return Err(EdgeError::Training(message).into());
        }
        Ok((update, result))
    }
}

/// Writes a task into a folder for the program.
fn prepare(folder: &Path, assignment: &Assignment) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => std::fs::create_dir_all(folder)?,
    }
    let task = &assignment.task;
    let shared = task.layers.iter().filter(|layer| !layer.local);
    let layers: Vec<serde_json::Value> =
        shared.map(|layer| serde_json::json!({ "name": layer.name, "shape": layer.shape })).collect();
    let description = serde_json::json!({
        "number": task.number,
        "round": task.round,
        "version": task.version,
        "layers": layers,
        "settings": task.settings,
        "proximalWeight": task.proximal_weight,
        "leaseSeconds": task.lease_ms as f64 / 1_000.0,
    });
    std::fs::write(folder.join("task.json"), serde_json::to_vec_pretty(&description)?)?;
    std::fs::write(folder.join("model.f32"), engram_federated::service::encode_values(&assignment.model))?;
    if let Some(correction) = &assignment.correction {
        std::fs::write(folder.join("correction.f32"), engram_federated::service::encode_values(correction))?;
    }
    Ok(())
}

fn network(arguments: &Edge) -> anyhow::Result<Network> {
    let expected = ExpectedPeer::any(Role::Worker);
    match (&arguments.ca, &arguments.certificate, &arguments.token) {
        (Some(ca), Some(certificate), None) => {
            let key = arguments.key.as_ref().unwrap_or(certificate).clone();
            let files = Files { trust_bundle: ca.clone(), certificate: certificate.clone(), key };
            Ok(Network::with_tls(Keys::open(files)?, expected))
        }
        (Some(ca), None, Some(path)) => {
            let parse = |contents: &[Vec<u8>]| Roots::parse(&contents[0]);
            let roots = WatchedFiles::open("CA certificates", vec![ca.clone()], parse)?;
            let source = Token::file(path)?;
            let cluster = token::cluster_of(&source.text())
                .with_context(|| format!("the token in {} has no cluster as audience", path.display()))?;
            Ok(Network::with_token(source, roots, cluster, expected))
        }
        (Some(_), None, None) => Err(EdgeError::Usage("--ca requires --token or --certificate".to_owned()).into()),
        _ => Ok(Network::default()),
    }
}
