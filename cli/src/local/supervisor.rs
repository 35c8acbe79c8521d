//! Looks after the processes of a local cluster: starts them, starts them again, reports deaths, follows the goal that a person
//! set (more or fewer workers), stops them in order.
//!
//! Invariants: a report of a death names the incarnation that died, never a later one; a worker that shall go is stopped when
//! the map gives it nothing any more; a process is started by the thread that lasts as long as this program (the kernel ties a child to that
//! thread); a dropped supervisor leaves nothing running; workers stop before the coordinator.

use super::certificates::Certificates;
use super::child::CoordinatorOptions;
use super::endpoints::{CoordinatorEndpoint, Endpoints, WorkerEndpoints};
use super::ports::Ports;
use super::process::Process;
use super::state::{self, FORMAT};
use crate::error::problem;
use crate::route::Route;
use anyhow::Context as _;
use engram_api::{Code, DurabilityMode, LearnerClusterSpec};
use engram_identity as identity;
use engram_memory::ClusterId;
use engram_proto::v1;
use engram_worker::{Listen, MapPlace, exit as cause, supervise};
use std::cell::RefCell;
use std::collections::BTreeMap;
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

/// Before a process is started again: at first, and at most.
const BACK_OFF: Duration = Duration::from_millis(100);
const BACK_OFF_MOST: Duration = Duration::from_secs(5);
/// A process that ran this long has earned a quick restart.
const STEADY: Duration = Duration::from_secs(10);
/// Deaths of one process before the cluster was ready, after which the start is given up: the first may be bad luck.
const DEATHS_AT_START: u32 = 3;
/// How long a process may take to stop in order: a worker drains calls and seals its log in less.
const STOP: Duration = Duration::from_secs(45);
/// A log longer than this at the start of its process is put aside, over the one put aside before.
const LOG_BYTES: u64 = 16 << 20;
/// Between looks at the certificates that are due.
const RENEWAL: Duration = Duration::from_secs(1);
/// Lines of a log that a failed start shows.
const LAST_LINES: usize = 12;
/// Restarts that may wait to be told.
const EVENTS: usize = 64;

/// What a local cluster consists of.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// The cluster.
    pub(crate) cluster: ClusterId,
    /// Its name.
    pub(crate) name: String,
    /// Its specification. The workers that it names are those of a new cluster; as many are started as have ports, and then
    /// the coordinator says how many there shall be.
    pub(crate) spec: LearnerClusterSpec,
    /// Its state directory.
    pub(crate) folder: PathBuf,
    /// Where it listens.
    pub(crate) ports: Ports,
    /// Threads of each worker's passes over memories.
    pub(crate) threads: usize,
    /// Proxies between the processes.
    pub(crate) detours: Option<Detours>,
    /// Certificates of the processes; absent = they talk in clear.
    pub(crate) tls: Option<Rc<Certificates>>,
    /// The way from here to the processes.
    pub(crate) route: Route,
}

/// Addresses that workers are given instead of the real ones, those of proxies in between. Indexed by who is given them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Detours {
    /// Where the coordinator is found.
    pub(crate) coordinator: Vec<SocketAddr>,
    /// Where other workers are found, by ordinal.
    pub(crate) peers: Vec<BTreeMap<u32, String>>,
}

/// Something that people should hear of.
#[derive(Debug)]
pub(crate) enum Event {
    /// A process ended and is started again.
    Restarted {
        /// What it is called.
        name: String,
        /// How it ended.
        exit: String,
    },
    /// The cluster has more workers, or fewer.
    Resized {
        /// Workers now.
        workers: usize,
    },
    /// Something that was asked for while it ran could not be done; it is tried again.
    Trouble(anyhow::Error),
    /// The start is given up.
    Failed(anyhow::Error),
}

/// What a process shall do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Will {
    Run,
    Stop,
    Kill,
}

/// The processes of a local cluster. They end when it is dropped.
pub(crate) struct Supervisor {
    shared: Rc<Shared>,
    coordinator: Kept,
    goal: JoinHandle<()>,
    renewal: JoinHandle<()>,
    events: mpsc::Receiver<Event>,
    tasks: LocalSet,
}

struct Shared {
    plan: Plan,
    endpoints: RefCell<Endpoints>,
    workers: RefCell<BTreeMap<u32, Kept>>,
    events: mpsc::Sender<Event>,
}

/// A process that is kept running.
struct Kept {
    will: watch::Sender<Will>,
    task: JoinHandle<()>,
}

/// One of the processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Coordinator,
    Worker(u32),
}

impl Supervisor {
    /// Writes what each process is told, and starts them.
    ///
    /// # Errors
    /// A file cannot be written. Nothing runs then.
    pub(crate) fn start(plan: Plan) -> anyhow::Result<Self> {
        let endpoints = endpoints(&plan);
        configure(&plan)?;
        endpoints.write(&plan.folder)?;
        let (sender, events) = mpsc::channel(EVENTS);
        let (endpoints, workers) = (RefCell::new(endpoints), RefCell::default());
        let shared = Rc::new(Shared { plan, endpoints, workers, events: sender });
        let tasks = LocalSet::new();
        let coordinator = Kept::start(&shared, Role::Coordinator, |task| tasks.spawn_local(task));
        for ordinal in 0..shared.plan.ports.workers.len() as u32 {
            let kept = Kept::start(&shared, Role::Worker(ordinal), |task| tasks.spawn_local(task));
            shared.workers.borrow_mut().insert(ordinal, kept);
        }
        let goal = tasks.spawn_local(goal::follow(Rc::clone(&shared)));
        let renewal = tasks.spawn_local(renew(Rc::clone(&shared)));
        Ok(Self { shared, coordinator, goal, renewal, events, tasks })
    }

    /// Runs `body` while the processes are looked after; nothing happens to them otherwise.
    pub(crate) async fn while_running<T>(&mut self, body: impl AsyncFnOnce(&mut mpsc::Receiver<Event>) -> T) -> T {
        let Self { tasks, events, .. } = self;
        tasks.run_until(body(events)).await
    }

    /// What is known of the processes now.
    pub(crate) fn endpoints(&self) -> Endpoints {
        self.shared.endpoints.borrow().clone()
    }

    /// The state directory.
    pub(crate) fn folder(&self) -> &Path {
        &self.shared.plan.folder
    }

    /// Remembers that all were ready: from here on a process that dies is started again for ever.
    pub(crate) fn set_ready(&self) -> anyhow::Result<()> {
        self.shared.endpoints.borrow_mut().ready = true;
        self.shared.write()
    }

    /// Stops the workers in order, then the coordinator. When `killed` completes, what still runs is killed.
    pub(crate) async fn stop(mut self, killed: impl Future<Output = ()>) {
        // Nobody comes or goes any more.
        self.goal.abort();
        self.renewal.abort();
        let Self { shared, coordinator, tasks, .. } = &mut self;
        let mut workers = shared.workers.take();
        let coordinator_will = coordinator.will.clone();
        let wills: Vec<_> = workers.values().map(|kept| kept.will.clone()).chain([coordinator_will]).collect();
        let stopping = async {
            for kept in workers.values() {
                kept.will.send_replace(Will::Stop);
            }
            for kept in workers.values_mut() {
                kept.ended().await;
            }
            coordinator.will.send_replace(Will::Stop);
            coordinator.ended().await;
        };
        let killing = async {
            killed.await;
            for will in &wills {
                will.send_replace(Will::Kill);
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
        // The tasks own the children, which are killed with them; here no way leads past an orderly stop.
        Endpoints::remove(&self.shared.plan.folder);
    }
}

impl Kept {
    fn start(
        shared: &Rc<Shared>,
        role: Role,
        spawn: impl FnOnce(Pin<Box<dyn Future<Output = ()>>>) -> JoinHandle<()>,
    ) -> Self {
        let (will, told) = watch::channel(Will::Run);
        Self { will, task: spawn(Box::pin(keep(Rc::clone(shared), role, told))) }
    }

    /// Waits until its process has ended for good.
    async fn ended(&mut self) {
        // A task that panicked has dropped its child, which killed it.
        let _ = (&mut self.task).await;
    }
}

impl Shared {
    fn write(&self) -> anyhow::Result<()> {
        self.endpoints.borrow().write(&self.plan.folder)
    }

    /// Notes what became of a process. A note that cannot be written (a full disk) costs nobody a process.
    fn note(&self, role: Role, process: Option<Process>) {
        {
            let mut endpoints = self.endpoints.borrow_mut();
            let (slot, restarts) = match role {
                Role::Coordinator => {
                    let coordinator = &mut endpoints.coordinator;
                    (&mut coordinator.process, &mut coordinator.restarts)
                }
                Role::Worker(ordinal) => {
                    let mut workers = endpoints.workers.iter_mut();
                    // One that went for good is not told of any more.
                    let Some(worker) = workers.find(|worker| worker.ordinal == ordinal) else { return };
                    (&mut worker.process, &mut worker.restarts)
                }
            };
            if process.is_none() {
                *restarts += 1;
            }
            *slot = process;
        }
        // See above.
        let _ = self.write();
    }

    fn tell(&self, event: Event) {
        // Nobody reads while the cluster stops, and a reader that is behind has enough to read.
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

/// Replaces certificates before they end. By the clock of the wall, as certificates go: a machine may have slept.
async fn renew(shared: Rc<Shared>) {
    let Some(certificates) = &shared.plan.tls else { return };
    let mut is_told = false;
    loop {
        tokio::time::sleep(RENEWAL).await;
        match certificates.renew() {
            Ok(()) => is_told = false,
            // Tried again until it succeeds: a third of their life is left. Once is enough to tell.
            Err(error) if !std::mem::replace(&mut is_told, true) => shared.tell(Event::Trouble(error)),
            Err(_) => {}
        }
    }
}

/// Keeps one process running until it shall stop.
async fn keep(shared: Rc<Shared>, role: Role, mut will: watch::Receiver<Will>) {
    let (mut wait, mut deaths) = (BACK_OFF, 0);
    while *will.borrow() == Will::Run {
        let began = Instant::now();
        let (exit, cause) = match spawn(&shared.plan, role) {
            Ok(mut child) => {
                let process = child.id().map(Process::of);
                shared.note(role, process);
                // Taken out, since waiting closes it, and its end is what tells the process to stop.
                let stdin = child.stdin.take();
                let known = Known::of(&shared, role);
                let exit = tokio::select! {
                    exit = child.wait() => exit,
                    () = told(&mut will) => return end(child, stdin, will).await,
                };
                let begins_again = exit.as_ref().is_ok_and(|status| status.code() == Some(cause::AGAIN));
                let cause = exit.as_ref().ok().and_then(|status| cause::told(*status));
                let exit = exit.map_or_else(|error| error.to_string(), cause::described);
                if let (Some(member), Some(process)) = (known.member(), process) {
                    report(&shared, member, process.pid, exit.clone());
                }
                shared.note(role, None);
                if begins_again {
                    continue;
                }
                (exit, cause)
            }
            Err(error) => (format!("it cannot be started: {error:#}"), cause::of(&error)),
        };
        deaths += 1;
        let hopeless = deaths >= DEATHS_AT_START || cause.is_some_and(cause::is_lasting);
        if hopeless && !shared.endpoints.borrow().ready {
            return shared.tell(Event::Failed(failed_start(&shared.plan, role, deaths, &exit, cause)));
        }
        shared.tell(Event::Restarted { name: role.name(), exit });
        if began.elapsed() >= STEADY {
            wait = BACK_OFF;
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = told(&mut will) => return,
        }
        wait = (wait * 2).min(BACK_OFF_MOST);
    }
}

/// Completes when the process shall no longer run.
async fn told(will: &mut watch::Receiver<Will>) {
    // An error means that the supervisor is gone, and its processes with it.
    let _ = will.wait_for(|will| *will > Will::Run).await;
}

/// Ends a process: in order, by force when that takes too long or is asked for.
async fn end(mut child: Child, stdin: Option<ChildStdin>, mut will: watch::Receiver<Will>) {
    // The end of its stdin is what it waits for.
    drop(stdin);
    let stopped = tokio::select! {
        exit = tokio::time::timeout(STOP, child.wait()) => exit.is_ok(),
        _ = will.wait_for(|will| *will == Will::Kill) => false,
    };
    if !stopped {
        // It may have ended in this very moment.
        let _ = child.kill().await;
    }
}

/// Who a process is in the cluster: learnt from itself once it answers. A process that died before it could say is nobody whose
/// death the coordinator could have use of.
struct Known {
    member: Rc<RefCell<Option<v1::MemberId>>>,
    asking: Option<JoinHandle<()>>,
}

impl Known {
    fn of(shared: &Rc<Shared>, role: Role) -> Self {
        let member = Rc::new(RefCell::new(None));
        let Role::Worker(ordinal) = role else { return Self { member, asking: None } };
        let endpoints = shared.endpoints.borrow();
        let at = endpoints.workers.iter().find(|worker| worker.ordinal == ordinal).map(|worker| worker.admin);
        let (told, network) = (Rc::clone(&member), shared.plan.route.network());
        let ask = async move |at| *told.borrow_mut() = Some(supervise::member(at, &network).await);
        Self { member, asking: at.map(|at| tokio::task::spawn_local(async move { ask(at).await })) }
    }

    fn member(&self) -> Option<v1::MemberId> {
        self.member.borrow().clone()
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        if let Some(asking) = &self.asking {
            asking.abort();
        }
    }
}

/// Tells the coordinator of a death, beside everything else: it may be dead itself, and learns then from silence.
fn report(shared: &Shared, member: v1::MemberId, pid: u32, exit: String) {
    let (coordinator, cluster) = (shared.plan.ports.coordinator, shared.plan.cluster);
    let network = shared.plan.route.network();
    tokio::task::spawn_local(async move {
        let _ = supervise::report_death(&coordinator.to_string(), &network, cluster, &member, pid, exit).await;
    });
}

fn spawn(plan: &Plan, role: Role) -> anyhow::Result<Child> {
    let log = open_log(&state::log(&plan.folder, &role.name()))?;
    let program = std::env::current_exe().context("failed to find this program")?;
    let mut command = Command::new(program);
    command
        .arg(role.command())
        .arg("--config")
        .arg(config(&plan.folder, role))
        .stdin(Stdio::piped())
        .stdout(log.try_clone().context("failed to share the log")?)
        .stderr(log)
        // A Ctrl-C at the terminal is for `up`, which stops its processes in order.
        .process_group(0)
        .kill_on_drop(true);
    command.spawn().context("failed to start a process")
}

fn open_log(path: &Path) -> anyhow::Result<File> {
    if path.metadata().is_ok_and(|metadata| metadata.len() > LOG_BYTES) {
        // A log that cannot be put aside goes on growing.
        let _ = std::fs::rename(path, path.with_extension("log.old"));
    }
    let log = OpenOptions::new().create(true).append(true).open(path);
    log.with_context(|| format!("failed to open {}", path.display()))
}

fn config(folder: &Path, role: Role) -> PathBuf {
    folder.join("config").join(format!("{}.json", role.name()))
}

/// Writes what each process is told.
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

/// Writes what a worker is told.
fn configure_worker(plan: &Plan, ordinal: u32, listen: Listen) -> anyhow::Result<()> {
    let detours = plan.detours.as_ref();
    let coordinator = detours.and_then(|detours| detours.coordinator.get(ordinal as usize));
    let peers = detours.and_then(|detours| detours.peers.get(ordinal as usize));
    if let Some(certificates) = &plan.tls {
        certificates.issue(identity::Role::Worker, ordinal)?;
    }
    let options = engram_worker::Options {
        cluster: plan.cluster,
        cluster_name: plan.name.clone(),
        ordinal,
        state_dir: plan.folder.join("workers").join(ordinal.to_string()),
        listen,
        advertise_host: None,
        coordinators: vec![coordinator.unwrap_or(&plan.ports.coordinator).to_string()],
        peer_detours: peers.cloned().unwrap_or_default(),
        map_place: Some(MapPlace::Folder(plan.folder.clone())),
        threads: Some(plan.threads),
        machine_workers: Some(plan.spec.workers),
        gpu_deadline_ms: None,
        inputs: None,
        snapshots: None,
        bootstrap: None,
        tls: plan.tls.as_ref().map(|certificates| certificates.tls(identity::Role::Worker, ordinal)),
        spec: plan.spec.clone(),
    };
    std::fs::create_dir_all(&options.state_dir).map_err(|error| {
        let message = format!("failed to make {}: {error}", options.state_dir.display());
        problem(Code::StateDirectoryUnusable, message)
    })?;
    state::write_json(&config(&plan.folder, Role::Worker(ordinal)), &options)
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

fn failed_start(plan: &Plan, role: Role, deaths: u32, exit: &str, cause: Option<Code>) -> anyhow::Error {
    let name = role.name();
    let path = state::log(&plan.folder, &name);
    let log = std::fs::read(&path).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = log.lines().collect();
    let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n  ");
    let times = if deaths == 1 { String::new() } else { format!(" {deaths} times") };
    let message = format!("{name} ended{times} before it was ready ({exit}); the end of {}:\n  {last}", path.display());
    problem(cause.unwrap_or(Code::WorkerFailedToStart), message)
}
