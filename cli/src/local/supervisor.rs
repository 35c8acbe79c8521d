//! Supervises the processes of a local cluster: starts and restarts them, reports deaths to the coordinator, follows the goal (number of
//! workers), and stops them gracefully.
//!
//! Invariants: a death report names the incarnation that died, never a later one; a surplus worker is stopped only after the partition
//! map assigns it nothing; processes are started by the main thread, because the kernel ties a child to the thread that starts it;
//! a dropped supervisor leaves no process running; workers stop before the coordinator.

use super::certificates::Certificates;
use super::child::CoordinatorOptions;
use super::endpoints::{CoordinatorEndpoint, Endpoints, WorkerEndpoints};
use super::ports::Ports;
use super::process::Process;
use super::state::{self, FORMAT};
use super::traces::TraceVariables;
use crate::error::problem;
use crate::route::Route;
use anyhow::Context as _;
use engram_api::{Code, DurabilityMode, LearnerClusterSpec};
use engram_identity as identity;
use engram_memory::ClusterId;
use engram_proto::v1;
use engram_worker::{Listen, LocalFiles, MapLocation, exit as worker_exit, supervise};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Stdio;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, LocalSet};

mod goal;

/// Restart back-off: initial and maximum.
const BACK_OFF: Duration = Duration::from_millis(100);
const BACK_OFF_MAX: Duration = Duration::from_secs(5);
/// Uptime after which the back-off is reset.
const STABLE_UPTIME: Duration = Duration::from_secs(10);
/// Exits of one process before the cluster is ready after which the start fails.
const MAX_EXITS_AT_START: u32 = 3;
/// Timeout of a graceful stop: a worker finishes its requests and seals its log in less.
const STOP_TIMEOUT: Duration = Duration::from_secs(45);
/// Size above which a log is rotated when its process starts; one old log is kept.
const MAX_LOG_BYTES: u64 = 16 << 20;
/// Interval of checks for certificates that are due.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(1);
/// Lines of the log in the error message of a failed start.
const LAST_LINES: usize = 12;
/// Capacity of the event channel.
const EVENTS: usize = 64;

/// Configuration of a local cluster.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) cluster: ClusterId,
    pub(crate) name: String,
    /// Specification. `workers` applies to a new cluster; initially one worker per entry of `ports` is started, later the goal of the
    /// coordinator decides.
    pub(crate) spec: LearnerClusterSpec,
    /// State directory.
    pub(crate) folder: PathBuf,
    /// Listen addresses.
    pub(crate) ports: Ports,
    /// Compute threads of each worker.
    pub(crate) threads: usize,
    /// Folders whose files every client may name.
    pub(crate) allowed_folders: Vec<PathBuf>,
    /// Addresses of proxies between the processes.
    pub(crate) proxies: Option<ProxyAddresses>,
    /// Certificates of the processes; absent = plaintext.
    pub(crate) tls: Option<Rc<Certificates>>,
    /// Route to the processes.
    pub(crate) route: Route,
    /// Variables of the processes for traces.
    pub(crate) traces: TraceVariables,
}

/// Addresses of fault-injection proxies that workers connect to instead of the real ones. Indexed by the connecting worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct ProxyAddresses {
    /// Proxies to the coordinator.
    pub(crate) coordinator: Vec<SocketAddr>,
    /// Proxies to other workers, by ordinal.
    pub(crate) peers: Vec<BTreeMap<u32, String>>,
}

/// Events that are shown to the user.
#[derive(Debug)]
pub(crate) enum Event {
    /// A process exited and is restarted.
    Restarted {
        /// Name of the process.
        name: String,
        /// Exit status.
        exit: String,
    },
    /// The number of workers has changed.
    Resized {
        /// Number of workers.
        workers: usize,
    },
    /// The disk of a worker is damaged: the cluster starts without it.
    Damaged {
        /// Name of the process.
        name: String,
        /// Folder of its store.
        folder: PathBuf,
        /// Last lines of its log.
        lines: String,
    },
    /// An operation failed and is retried.
    Retrying(anyhow::Error),
    /// The start failed.
    Failed(anyhow::Error),
}

/// Desired state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Desired {
    Run,
    Stop,
    Kill,
}

/// Supervisor of the processes of a local cluster. Dropping it kills them.
pub(crate) struct Supervisor {
    shared: Rc<Shared>,
    coordinator: ManagedProcess,
    goal: JoinHandle<()>,
    renewal: JoinHandle<()>,
    events: mpsc::Receiver<Event>,
    tasks: LocalSet,
}

struct Shared {
    plan: Plan,
    endpoints: RefCell<Endpoints>,
    workers: RefCell<BTreeMap<u32, ManagedProcess>>,
    damaged: DamagedWorkers,
    events: mpsc::Sender<Event>,
}

/// Ordinals of workers whose disk was damaged at the start.
pub(crate) type DamagedWorkers = Rc<RefCell<BTreeSet<u32>>>;

/// A process that is restarted when it exits.
struct ManagedProcess {
    desired: watch::Sender<Desired>,
    task: JoinHandle<()>,
}

/// One of the processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Coordinator,
    Worker(u32),
}

impl Supervisor {
    /// Writes the configuration of all processes and starts them.
    ///
    /// # Errors
    /// A file cannot be written; no process is running then.
    pub(crate) fn start(plan: Plan) -> anyhow::Result<Self> {
        let endpoints = endpoints(&plan);
        configure(&plan)?;
        endpoints.write(&plan.folder)?;
        let (sender, events) = mpsc::channel(EVENTS);
        let (endpoints, workers) = (RefCell::new(endpoints), RefCell::default());
        let shared = Rc::new(Shared { plan, endpoints, workers, damaged: Rc::default(), events: sender });
        let tasks = LocalSet::new();
        let coordinator = ManagedProcess::start(&shared, Role::Coordinator, |task| tasks.spawn_local(task));
        for ordinal in 0..shared.plan.ports.workers.len() as u32 {
            let process = ManagedProcess::start(&shared, Role::Worker(ordinal), |task| tasks.spawn_local(task));
            shared.workers.borrow_mut().insert(ordinal, process);
        }
        let goal = tasks.spawn_local(goal::follow(Rc::clone(&shared)));
        let renewal = tasks.spawn_local(renew(Rc::clone(&shared)));
        Ok(Self { shared, coordinator, goal, renewal, events, tasks })
    }

    /// Runs `body` and the supervision of the processes, which makes progress only meanwhile.
    pub(crate) async fn while_running<T>(&mut self, body: impl AsyncFnOnce(&mut mpsc::Receiver<Event>) -> T) -> T {
        let Self { tasks, events, .. } = self;
        tasks.run_until(body(events)).await
    }

    /// Returns the current processes and addresses.
    pub(crate) fn endpoints(&self) -> Endpoints {
        self.shared.endpoints.borrow().clone()
    }

    /// Returns the state directory.
    pub(crate) fn folder(&self) -> &Path {
        &self.shared.plan.folder
    }

    /// Returns the workers whose disk is damaged, updated while the cluster runs.
    pub(crate) fn damaged(&self) -> DamagedWorkers {
        Rc::clone(&self.shared.damaged)
    }

    /// Marks the cluster as ready: from then on processes are restarted without limit.
    pub(crate) fn set_ready(&self) -> anyhow::Result<()> {
        self.shared.endpoints.borrow_mut().ready = true;
        self.shared.write()
    }

    /// Stops the workers, then the coordinator, gracefully. When `kill` completes, remaining processes are killed.
    pub(crate) async fn stop(mut self, kill: impl Future<Output = ()>) {
        // No more workers are started or stopped.
        self.goal.abort();
        self.renewal.abort();
        let Self { shared, coordinator, tasks, .. } = &mut self;
        let mut workers = shared.workers.take();
        let coordinator_state = coordinator.desired.clone();
        let states: Vec<_> = workers.values().map(|worker| worker.desired.clone()).chain([coordinator_state]).collect();
        let stopping = async {
            for worker in workers.values() {
                worker.desired.send_replace(Desired::Stop);
            }
            for worker in workers.values_mut() {
                worker.exited().await;
            }
            coordinator.desired.send_replace(Desired::Stop);
            coordinator.exited().await;
        };
        let killing = async {
            kill.await;
            for state in &states {
                state.send_replace(Desired::Kill);
            }
            std::future::pending::<()>().await;
        };
        tasks
            .run_until(async {
                tokio::select! {
                    () = stopping => {}
                    () = killing => {}
                }
            })
            .await;
        Endpoints::remove(&self.shared.plan.folder);
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // The tasks own the children, which are killed when dropped.
        Endpoints::remove(&self.shared.plan.folder);
    }
}

impl ManagedProcess {
    fn start(
        shared: &Rc<Shared>,
        role: Role,
        spawn: impl FnOnce(Pin<Box<dyn Future<Output = ()>>>) -> JoinHandle<()>,
    ) -> Self {
        let (desired, receiver) = watch::channel(Desired::Run);
        Self { desired, task: spawn(Box::pin(supervise_process(Rc::clone(shared), role, receiver))) }
    }

    /// Waits until the process has exited and is not restarted.
    async fn exited(&mut self) {
        // A task that panicked has dropped its child, which killed it.
        let _ = (&mut self.task).await;
    }
}

impl Shared {
    fn write(&self) -> anyhow::Result<()> {
        self.endpoints.borrow().write(&self.plan.folder)
    }

    /// Records the process of a role, or its exit. A failed write (disk full) does not affect the process.
    fn record(&self, role: Role, process: Option<Process>) {
        {
            let mut endpoints = self.endpoints.borrow_mut();
            let (slot, restarts) = match role {
                Role::Coordinator => {
                    let coordinator = &mut endpoints.coordinator;
                    (&mut coordinator.process, &mut coordinator.restarts)
                }
                Role::Worker(ordinal) => {
                    let mut workers = endpoints.workers.iter_mut();
                    // Removed workers are not recorded.
                    let Some(worker) = workers.find(|worker| worker.ordinal == ordinal) else { return };
                    (&mut worker.process, &mut worker.restarts)
                }
            };
            if process.is_none() {
                *restarts += 1;
            }
            *slot = process;
        }
        let _ = self.write();
    }

    /// Whether every partition has a replica on another worker if the disks of this worker and of those known are damaged.
    fn tolerates_damage(&self, ordinal: u32) -> bool {
        let damaged = self.damaged.borrow();
        let others = damaged.iter().filter(|other| **other != ordinal).count();
        others + 1 < self.plan.spec.replication_factor as usize
    }

    /// Reports a damaged disk once.
    fn note_damage(&self, ordinal: u32) {
        if self.damaged.borrow_mut().insert(ordinal) {
            let name = Role::Worker(ordinal).name();
            let (_, lines) = last_lines(&self.plan, &name);
            self.publish(Event::Damaged { folder: worker_folder(&self.plan, ordinal), name, lines });
        }
    }

    fn publish(&self, event: Event) {
        // Events are dropped if the reader has stopped or is behind.
        let _ = self.events.try_send(event);
    }
}

impl Role {
    fn name(self) -> String {
        match self {
            Self::Coordinator => "coordinator".into(),
            Self::Worker(ordinal) => format!("worker-{ordinal}"),
        }
    }

    const fn command(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Worker(_) => "worker",
        }
    }
}

/// Renews certificates before they expire, by wall-clock time, which also advances during system sleep.
async fn renew(shared: Rc<Shared>) {
    let Some(certificates) = &shared.plan.tls else { return };
    let mut is_reported = false;
    loop {
        tokio::time::sleep(RENEWAL_INTERVAL).await;
        match certificates.renew() {
            Ok(()) => is_reported = false,
            // Retried until it succeeds; a third of the lifetime is left. Reported once.
            Err(error) if !std::mem::replace(&mut is_reported, true) => shared.publish(Event::Retrying(error)),
            Err(_) => {}
        }
    }
}

/// Restarts one process until it should stop.
async fn supervise_process(shared: Rc<Shared>, role: Role, mut desired: watch::Receiver<Desired>) {
    let (mut back_off, mut exits) = (BACK_OFF, 0);
    while *desired.borrow() == Desired::Run {
        let started_at = Instant::now();
        let (exit, cause) = match spawn(&shared.plan, role) {
            Ok(mut child) => {
                let process = child.id().map(Process::of);
                shared.record(role, process);
                // Taken, because waiting closes stdin, which makes the process stop.
                let stdin = child.stdin.take();
                let identity = MemberIdentity::query(&shared, role);
                let exit = tokio::select! {
                    exit = child.wait() => exit,
                    () = should_stop(&mut desired) => return stop_process(child, stdin, desired).await,
                };
                let restarts_at_once = exit.as_ref().is_ok_and(|status| status.code() == Some(worker_exit::RESTART));
                let cause = exit.as_ref().ok().and_then(|status| worker_exit::cause(*status));
                let exit = exit.map_or_else(|error| error.to_string(), worker_exit::description);
                if let (Some(member), Some(process)) = (identity.member(), process) {
                    report_death(&shared, member, process.pid, exit.clone());
                }
                shared.record(role, None);
                if restarts_at_once {
                    continue;
                }
                (exit, cause)
            }
            Err(error) => (format!("failed to start: {error:#}"), worker_exit::of(&error)),
        };
        exits += 1;
        let has_failed = exits >= MAX_EXITS_AT_START || cause.is_some_and(worker_exit::is_permanent);
        let is_ready = shared.endpoints.borrow().ready;
        match (role, cause) {
            (Role::Worker(ordinal), Some(Code::Corrupt)) if is_ready || shared.tolerates_damage(ordinal) => {
                shared.note_damage(ordinal);
                // Until its folder is moved away: then it starts with an empty disk and receives its replicas again.
                back_off = BACK_OFF_MAX;
            }
            _ if has_failed && !is_ready => {
                return shared.publish(Event::Failed(failed_start(&shared.plan, role, exits, &exit, cause)));
            }
            _ => shared.publish(Event::Restarted { name: role.name(), exit }),
        }
        if started_at.elapsed() >= STABLE_UPTIME {
            back_off = BACK_OFF;
        }
        tokio::select! {
            () = tokio::time::sleep(back_off) => {}
            () = should_stop(&mut desired) => return,
        }
        back_off = (back_off * 2).min(BACK_OFF_MAX);
    }
}

/// Completes when the process should stop.
async fn should_stop(desired: &mut watch::Receiver<Desired>) {
    // An error means that the supervisor was dropped.
    let _ = desired.wait_for(|state| *state > Desired::Run).await;
}

/// Stops a process gracefully, and kills it after a timeout or on request.
async fn stop_process(mut child: Child, stdin: Option<ChildStdin>, mut desired: watch::Receiver<Desired>) {
    // The child exits when its stdin closes.
    drop(stdin);
    let stopped = tokio::select! {
        exit = tokio::time::timeout(STOP_TIMEOUT, child.wait()) => exit.is_ok(),
        _ = desired.wait_for(|state| *state == Desired::Kill) => false,
    };
    if !stopped {
        // Fails if the process has just exited.
        let _ = child.kill().await;
    }
}

/// Member identity of a worker process, queried from the process. The death of a process that never responded need not be reported.
struct MemberIdentity {
    member: Rc<RefCell<Option<v1::MemberId>>>,
    query: Option<JoinHandle<()>>,
}

impl MemberIdentity {
    fn query(shared: &Rc<Shared>, role: Role) -> Self {
        let member = Rc::new(RefCell::new(None));
        let Role::Worker(ordinal) = role else { return Self { member, query: None } };
        let endpoints = shared.endpoints.borrow();
        let admin = endpoints.workers.iter().find(|worker| worker.ordinal == ordinal).map(|worker| worker.admin);
        let (target, network) = (Rc::clone(&member), shared.plan.route.network());
        let query = async move |admin| *target.borrow_mut() = Some(supervise::member(admin, &network).await);
        Self { member, query: admin.map(|admin| tokio::task::spawn_local(async move { query(admin).await })) }
    }

    fn member(&self) -> Option<v1::MemberId> {
        self.member.borrow().clone()
    }
}

impl Drop for MemberIdentity {
    fn drop(&mut self) {
        if let Some(query) = &self.query {
            query.abort();
        }
    }
}

/// Reports a death to the coordinator in the background. If the coordinator is down, it detects the death by missing heartbeats.
fn report_death(shared: &Shared, member: v1::MemberId, pid: u32, exit: String) {
    let (coordinator, cluster) = (shared.plan.ports.coordinator, shared.plan.cluster);
    let network = shared.plan.route.network();
    tokio::task::spawn_local(async move {
        let _ = supervise::report_death(&coordinator.to_string(), &network, cluster, &member, pid, exit).await;
    });
}

fn spawn(plan: &Plan, role: Role) -> anyhow::Result<Child> {
    let log = open_log(&state::log(&plan.folder, &role.name()))?;
    let program = std::env::current_exe().context("failed to locate this executable")?;
    let mut command = Command::new(program);
    command
        .arg(role.command())
        .arg("--config")
        .arg(config(&plan.folder, role))
        .stdin(Stdio::piped())
        .stdout(log.try_clone().context("failed to share the log")?)
        .stderr(log)
        .envs(plan.traces.of_process(&format!("{}-{}", plan.name, role.name())))
        // Ctrl-C at the terminal goes to `up` only, which stops its processes.
        .process_group(0)
        .kill_on_drop(true);
    command.spawn().context("failed to start a process")
}

fn open_log(path: &Path) -> anyhow::Result<File> {
    if path.metadata().is_ok_and(|metadata| metadata.len() > MAX_LOG_BYTES) {
        // If rotation fails, the log continues to grow.
        let _ = std::fs::rename(path, path.with_extension("log.old"));
    }
    let log = OpenOptions::new().create(true).append(true).open(path);
    log.with_context(|| format!("failed to open {}", path.display()))
}

fn config(folder: &Path, role: Role) -> PathBuf {
    folder.join("config").join(format!("{}.json", role.name()))
}

/// Writes the configuration of all processes.
fn configure(plan: &Plan) -> anyhow::Result<()> {
    let coordinator = CoordinatorOptions {
        cluster: plan.cluster.to_string(),
        cluster_name: plan.name.clone(),
        partitions: plan.spec.partitions,
        workers: plan.spec.workers,
        replication_factor: plan.spec.replication_factor,
        restart_grace_ms: plan.spec.restart_grace.as_millis(),
        keeps_all: plan.spec.durability.mode == DurabilityMode::Sync,
        state_dir: plan.folder.clone(),
        listen: plan.ports.coordinator,
        bootstraps: plan.spec.bootstrap.is_some(),
        tls: plan.tls.as_ref().map(|certificates| certificates.tls(identity::Role::Coordinator, 0).files),
    };
    state::write_json(&config(&plan.folder, Role::Coordinator), &coordinator)?;
    (0..).zip(&plan.ports.workers).try_for_each(|(ordinal, listen)| configure_worker(plan, ordinal, *listen))
}

/// Writes the configuration of a worker.
fn configure_worker(plan: &Plan, ordinal: u32, listen: Listen) -> anyhow::Result<()> {
    let proxies = plan.proxies.as_ref();
    let coordinator = proxies.and_then(|proxies| proxies.coordinator.get(ordinal as usize));
    let peers = proxies.and_then(|proxies| proxies.peers.get(ordinal as usize));
    if let Some(certificates) = &plan.tls {
        certificates.issue(identity::Role::Worker, ordinal)?;
    }
    let options = engram_worker::Options {
        cluster: plan.cluster,
        cluster_name: plan.name.clone(),
        ordinal,
        state_dir: worker_folder(plan, ordinal),
        listen,
        advertise_host: None,
        coordinators: vec![coordinator.unwrap_or(&plan.ports.coordinator).to_string()],
        peer_detours: peers.cloned().unwrap_or_default(),
        map_location: Some(MapLocation::Folder(plan.folder.clone())),
        threads: Some(plan.threads),
        machine_workers: Some(plan.spec.workers),
        gpu_deadline_ms: None,
        inputs: None,
        local_files: Some(LocalFiles {
            owner_key: state::owner_key(&plan.folder),
            folders: plan.allowed_folders.clone(),
        }),
        snapshots: None,
        bootstrap: None,
        tls: plan.tls.as_ref().map(|certificates| certificates.tls(identity::Role::Worker, ordinal)),
        spec: plan.spec.clone(),
    };
    std::fs::create_dir_all(&options.state_dir).map_err(|error| {
        let message = format!("failed to create {}: {error}", options.state_dir.display());
        problem(Code::StateDirectoryUnusable, message)
    })?;
    state::write_json(&config(&plan.folder, Role::Worker(ordinal)), &options)
}

/// Returns the folder of a worker's store.
fn worker_folder(plan: &Plan, ordinal: u32) -> PathBuf {
    plan.folder.join("workers").join(ordinal.to_string())
}

fn endpoints(plan: &Plan) -> Endpoints {
    Endpoints {
        format_version: FORMAT,
        cluster: plan.cluster.to_string(),
        name: plan.name.clone(),
        supervisor: Process::this(),
        ready: false,
        tls: plan.tls.is_some(),
        coordinator: CoordinatorEndpoint { process: None, address: plan.ports.coordinator, restarts: 0 },
        workers: (0..)
            .zip(&plan.ports.workers)
            .map(|(ordinal, listen)| WorkerEndpoints::new(ordinal, *listen))
            .collect(),
    }
}

fn failed_start(plan: &Plan, role: Role, exits: u32, exit: &str, cause: Option<Code>) -> anyhow::Error {
    let name = role.name();
    let (path, last) = last_lines(plan, &name);
    let times = if exits == 1 { String::new() } else { format!(" {exits} times") };
    let message =
        format!("{name} exited{times} before it was ready ({exit}); last lines of {}:\n  {last}", path.display());
    problem(cause.unwrap_or(Code::WorkerFailedToStart), message)
}

/// Returns the path of the log of a process, and its last lines.
fn last_lines(plan: &Plan, name: &str) -> (PathBuf, String) {
    let path = state::log(&plan.folder, name);
    let log = std::fs::read(&path).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = log.lines().collect();
    let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n  ");
    (path, last)
}
