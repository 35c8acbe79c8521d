//! Looks after the processes of a local cluster: starts them, starts them again, reports deaths, stops them in order.
//!
//! Invariants: a process is started by the thread that lasts as long as this program (the kernel ties a child to that
//! thread); a dropped supervisor leaves nothing running; workers stop before the coordinator.

use super::admin;
use super::child::CoordinatorOptions;
use super::endpoints::{CoordinatorEndpoint, Endpoints, WorkerEndpoints};
use super::ports::Ports;
use super::process::Process;
use super::state::{self, FORMAT};
use crate::error::problem;
use anyhow::Context as _;
use engram_api::{Code, LearnerClusterSpec};
use engram_memory::ClusterId;
use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, LocalSet};

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
    /// Its specification.
    pub(crate) spec: LearnerClusterSpec,
    /// Its state directory.
    pub(crate) folder: PathBuf,
    /// Where it listens.
    pub(crate) ports: Ports,
    /// Threads of each worker's passes over memories.
    pub(crate) threads: usize,
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
    workers: JoinSet<()>,
    coordinator: JoinSet<()>,
    events: mpsc::Receiver<Event>,
    tasks: LocalSet,
}

struct Shared {
    plan: Plan,
    endpoints: RefCell<Endpoints>,
    workers: watch::Sender<Will>,
    coordinator: watch::Sender<Will>,
    events: mpsc::Sender<Event>,
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
        let shared = Rc::new(Shared {
            plan,
            endpoints: RefCell::new(endpoints),
            workers: watch::channel(Will::Run).0,
            coordinator: watch::channel(Will::Run).0,
            events: sender,
        });
        let tasks = LocalSet::new();
        let (mut workers, mut coordinator) = (JoinSet::new(), JoinSet::new());
        coordinator.spawn_local_on(keep(Rc::clone(&shared), Role::Coordinator), &tasks);
        for ordinal in 0..shared.plan.spec.workers {
            workers.spawn_local_on(keep(Rc::clone(&shared), Role::Worker(ordinal)), &tasks);
        }
        Ok(Self { shared, workers, coordinator, events, tasks })
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
        let Self { shared, workers, coordinator, tasks, .. } = &mut self;
        let stopping = async {
            shared.workers.send_replace(Will::Stop);
            while workers.join_next().await.is_some() {}
            shared.coordinator.send_replace(Will::Stop);
            while coordinator.join_next().await.is_some() {}
        };
        let killing = async {
            killed.await;
            shared.workers.send_replace(Will::Kill);
            shared.coordinator.send_replace(Will::Kill);
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
                    let worker = &mut endpoints.workers[ordinal as usize];
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

    fn will(&self, role: Role) -> watch::Receiver<Will> {
        match role {
            Role::Coordinator => self.coordinator.subscribe(),
            Role::Worker(_) => self.workers.subscribe(),
        }
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

/// Keeps one process running until it shall stop.
async fn keep(shared: Rc<Shared>, role: Role) {
    let mut will = shared.will(role);
    let (mut wait, mut deaths) = (BACK_OFF, 0);
    while *will.borrow() == Will::Run {
        let began = Instant::now();
        let exit = match spawn(&shared.plan, role) {
            Ok(mut child) => {
                let process = child.id().map(Process::of);
                shared.note(role, process);
                // Taken out, since waiting closes it, and its end is what tells the process to stop.
                let stdin = child.stdin.take();
                let exit = tokio::select! {
                    exit = child.wait() => exit,
                    () = told(&mut will) => return end(child, stdin, will).await,
                };
                shared.note(role, None);
                let exit = exit.map_or_else(|error| error.to_string(), described);
                if let (Role::Worker(ordinal), Some(process)) = (role, process) {
                    report(&shared, ordinal, process.pid, exit.clone());
                }
                exit
            }
            Err(error) => format!("it cannot be started: {error:#}"),
        };
        deaths += 1;
        if !shared.endpoints.borrow().ready && deaths >= DEATHS_AT_START {
            return shared.tell(Event::Failed(failed_start(&shared.plan, role, &exit)));
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

/// Tells the coordinator of a death, beside everything else: it may be dead itself, and learns then from silence.
fn report(shared: &Shared, ordinal: u32, pid: u32, exit: String) {
    let (coordinator, cluster) = (shared.plan.ports.coordinator, shared.plan.cluster);
    tokio::task::spawn_local(async move {
        let _ = admin::report_death(coordinator, cluster, ordinal, pid, exit).await;
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
        state_dir: plan.folder.clone(),
        listen: plan.ports.coordinator,
    };
    state::write_json(&config(&plan.folder, Role::Coordinator), &coordinator)?;
    for (ordinal, listen) in (0..).zip(&plan.ports.workers) {
        let options = engram_worker::Options {
            cluster: plan.cluster,
            cluster_name: plan.name.clone(),
            ordinal,
            state_dir: plan.folder.join("workers").join(ordinal.to_string()),
            listen: *listen,
            advertise_host: None,
            coordinators: vec![plan.ports.coordinator.to_string()],
            threads: Some(plan.threads),
            spec: plan.spec.clone(),
        };
        std::fs::create_dir_all(&options.state_dir).map_err(|error| {
            let message = format!("failed to make {}: {error}", options.state_dir.display());
            problem(Code::StateDirectoryUnusable, message)
        })?;
        state::write_json(&config(&plan.folder, Role::Worker(ordinal)), &options)?;
    }
    Ok(())
}

fn endpoints(plan: &Plan) -> Endpoints {
    let worker = |(ordinal, listen): (u32, &engram_worker::Listen)| WorkerEndpoints {
        ordinal,
        process: None,
        restarts: 0,
        client: listen.client,
        peer: listen.peer,
        admin: listen.admin,
        http: listen.http,
    };
    Endpoints {
        format_version: FORMAT,
        cluster: plan.cluster.to_string(),
        name: plan.name.clone(),
        supervisor: Process::this(),
        ready: false,
        coordinator: CoordinatorEndpoint { process: None, address: plan.ports.coordinator, restarts: 0 },
        workers: (0..).zip(&plan.ports.workers).map(worker).collect(),
    }
}

fn described(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

fn failed_start(plan: &Plan, role: Role, exit: &str) -> anyhow::Error {
    let name = role.name();
    let path = state::log(&plan.folder, &name);
    let log = std::fs::read(&path).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = log.lines().collect();
    let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n  ");
    let message = format!(
        "{name} ended {DEATHS_AT_START} times before it was ready, the last time with {exit}; the end of {}:\n  {last}",
        path.display()
    );
    problem(Code::WorkerFailedToStart, message)
}
