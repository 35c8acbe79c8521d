//! Supervises the processes of a job: starts them, starts failed ones again, and stops them.

use super::{JobPhase, JobRecord};
use anyhow::Context as _;
use engram_api::status::{JobProcess, MAX_LOG_TAILS, ProcessPhase, log_tail};
use engram_api::{JobRun, retry_delay_seconds};
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;
use tokio::process::Command;
use tokio::sync::{oneshot, watch};
use tokio::time::sleep;

/// Bytes of a log that are read for its last lines; the status keeps fewer.
const READ_BYTES: u64 = 8 << 10;
/// Time to reap processes after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// What to start.
#[derive(Debug)]
pub(crate) struct JobPlan {
    pub(crate) state_dir: PathBuf,
    pub(crate) record: JobRecord,
    pub(crate) run: JobRun,
    /// Failures after which the processes are started again.
    pub(crate) backoff_limit: u32,
    /// Variables of every process; the supervisor adds `ENGRAM_RANK`.
    pub(crate) variables: Vec<(String, String)>,
}

/// A job in execution. Dropped, it stops its processes; [`stopped`] waits for that.
#[derive(Debug)]
pub(crate) struct Job {
    /// The newest record.
    pub(crate) updates: watch::Receiver<JobRecord>,
    /// Its end cancels the job.
    _stop: oneshot::Sender<()>,
}

/// Number of jobs of this process whose processes have not all ended.
fn open_jobs() -> &'static watch::Sender<usize> {
    static OPEN: OnceLock<watch::Sender<usize>> = OnceLock::new();
    OPEN.get_or_init(|| watch::Sender::new(0))
}

/// Waits until all processes of jobs of this process have ended.
pub(crate) async fn stopped() {
    // The sender is never dropped.
    let _ = open_jobs().subscribe().wait_for(|open| *open == 0).await;
}

impl Job {
    /// Starts the processes. Has to be called by the main thread, since the kernel ties a process to the thread that starts it.
    ///
    /// # Errors
    /// A folder or file cannot be written, or a process cannot be started.
    pub(crate) fn start(plan: JobPlan) -> anyhow::Result<Self> {
        let folder = JobRecord::folder(&plan.state_dir, &plan.record.name);
        if folder.exists() {
            plan.record.remove(&plan.state_dir)?;
        }
        std::fs::create_dir_all(&folder).with_context(|| format!("failed to create {}", folder.display()))?;
        let (stop, stopping) = oneshot::channel();
        let (updates, receiver) = watch::channel(plan.record.clone());
        let mut supervisor =
            Supervisor { plan, folder, updates, groups: BTreeMap::new(), running: FuturesUnordered::new() };
        let replicas = supervisor.plan.run.replicas;
        let process = |index| JobProcess { index, ..JobProcess::default() };
        supervisor.plan.record.status.processes = (0..replicas).map(process).collect();
        // Dropped on an error: its processes are killed.
        (0..replicas).try_for_each(|index| supervisor.spawn(index))?;
        supervisor.publish()?;
        open_jobs().send_modify(|open| *open += 1);
        tokio::spawn(async move {
            if let Err(error) = supervisor.run(stopping).await {
                tracing::error!(error = format!("{error:#}"), "failed to record the state of a job");
            }
            open_jobs().send_modify(|open| *open -= 1);
        });
        Ok(Self { updates: receiver, _stop: stop })
    }
}

/// Index and result of a process that ended, and the size of its log at its start.
type Ended = (u32, std::io::Result<ExitStatus>, u64);

struct Supervisor {
    plan: JobPlan,
    folder: PathBuf,
    updates: watch::Sender<JobRecord>,
    /// Process groups by index.
    groups: BTreeMap<u32, Pid>,
    running: FuturesUnordered<BoxFuture<'static, Ended>>,
}

impl Supervisor {
    fn log(&self, index: u32) -> PathBuf {
        self.folder.join(format!("{index}.log"))
    }

    /// Starts a process, in a process group of its own so that a Ctrl-C in the terminal reaches this command only.
    fn spawn(&mut self, index: u32) -> anyhow::Result<()> {
        let path = self.log(index);
        let log = File::options().create(true).append(true).open(&path);
        let log = log.with_context(|| format!("failed to open {}", path.display()))?;
        let size = log.metadata().map_or(0, |metadata| metadata.len());
        let program = std::env::current_exe().context("failed to find this program")?;
        let run = &self.plan.run;
        let mut command = Command::new(program);
        // Selections of the caller would contradict the address.
        for name in ["ENGRAM_STATE_DIR", "ENGRAM_CLUSTER", "ENGRAM_TOKEN_FILE", "ENGRAM_UP_IN_BACKGROUND"] {
            command.env_remove(name);
        }
        command
            .args(["job-process", "--"])
            .args(run.command.iter().chain(&run.args))
            .envs(self.plan.variables.iter().cloned())
            .env("ENGRAM_RANK", index.to_string())
            .envs(run.env.iter().map(|variable| (&variable.name, &variable.value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().with_context(|| format!("failed to open {}", path.display()))?)
            .stderr(log)
            .process_group(0)
            .kill_on_drop(true);
        if let Some(folder) = &run.working_dir {
            command.current_dir(folder);
        }
        let mut child = command.spawn().with_context(|| {
            let folder = run.working_dir.as_ref().map_or_else(String::new, |folder| format!(" in {folder}"));
            format!("failed to start process {index} of run {}{folder}", self.plan.record.name)
        })?;
        if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
            self.groups.insert(index, Pid::from_raw(pid));
        }
        self.process(index).phase = ProcessPhase::Running;
        self.plan.record.status.active += 1;
        self.running.push(Box::pin(async move { (index, child.wait().await, size) }));
        Ok(())
    }

    fn process(&mut self, index: u32) -> &mut JobProcess {
        &mut self.plan.record.status.processes[index as usize]
    }

    /// Writes and publishes the record.
    fn publish(&self) -> anyhow::Result<()> {
        self.plan.record.save(&self.plan.state_dir)?;
        self.updates.send_replace(self.plan.record.clone());
        Ok(())
    }

    /// Runs until all processes have ended.
    async fn run(mut self, stopping: oneshot::Receiver<()>) -> anyhow::Result<()> {
        let (phase, message) = self.supervise(stopping).await?;
        if phase != JobPhase::Succeeded {
            self.stop().await;
        }
        self.plan.record.end(phase, message);
        self.publish()
    }

    async fn supervise(&mut self, mut stopping: oneshot::Receiver<()>) -> anyhow::Result<(JobPhase, String)> {
        let limit = self.plan.run.active_deadline_seconds;
        let mut deadline = Box::pin(async move {
            match limit {
                Some(seconds) => sleep(Duration::from_secs(seconds)).await,
                None => std::future::pending().await,
            }
        });
        let mut delayed: FuturesUnordered<BoxFuture<'static, u32>> = FuturesUnordered::new();
        loop {
            if self.running.is_empty() && delayed.is_empty() {
                return Ok((JobPhase::Succeeded, String::new()));
            }
            tokio::select! {
                Some(ended) = self.running.next() => {
                    let (index, has_failed) = self.record_end(ended);
                    let failures = u32::try_from(self.plan.record.status.failed).unwrap_or(u32::MAX);
                    if has_failed && failures > self.plan.backoff_limit {
                        return Ok((JobPhase::Failed, self.failure()));
                    }
                    if has_failed {
                        let delay = Duration::from_secs(retry_delay_seconds(failures));
                        delayed.push(Box::pin(async move { sleep(delay).await; index }));
                    }
                    self.publish()?;
                }
                Some(index) = delayed.next() => {
                    self.process(index).restarts += 1;
                    self.spawn(index)?;
                    self.publish()?;
                }
                _ = &mut stopping => return Ok((JobPhase::Cancelled, String::new())),
                () = &mut deadline => {
                    let seconds = limit.unwrap_or_default();
                    return Ok((JobPhase::Failed, format!("has not ended within activeDeadlineSeconds ({seconds} s)")));
                }
            }
        }
    }

    fn failure(&self) -> String {
        let first = self.plan.record.status.first_failure().unwrap_or_default();
        match self.plan.backoff_limit {
            0 => first,
            limit => format!("{first} (after {limit} restarts)"),
        }
    }

    /// Records the end of a process. Returns its index and whether it failed.
    fn record_end(&mut self, (index, result, size): Ended) -> (u32, bool) {
        if let Some(group) = self.groups.remove(&index) {
            // Ends children that the program left behind, as the end of a pod does.
            let _ = killpg(group, Signal::SIGKILL);
        }
        let path = self.log(index);
        let code = result.ok().and_then(|status| status.code().or(status.signal().map(|signal| 128 + signal)));
        let has_failed = code != Some(0);
        let tails = self.plan.record.status.processes.iter().filter(|process| process.log_tail.is_some()).count();
        let tail = (has_failed && tails < MAX_LOG_TAILS).then(|| last_lines(&path, size)).flatten();
        let status = &mut self.plan.record.status;
        status.active -= 1;
        if has_failed {
            status.failed += 1;
        } else {
            status.succeeded += 1;
        }
        let process = self.process(index);
        process.phase = if has_failed { ProcessPhase::Failed } else { ProcessPhase::Succeeded };
        process.exit_code = code;
        process.reason = has_failed.then(|| "Error".to_owned());
        process.log_tail = tail;
        (index, has_failed)
    }

    /// Stops all processes: SIGTERM, after the grace period SIGKILL.
    async fn stop(&mut self) {
        let grace = Duration::from_secs(self.plan.run.grace_period_seconds);
        for (signal, limit) in [(Signal::SIGTERM, grace), (Signal::SIGKILL, KILL_TIMEOUT)] {
            // A group that has ended meanwhile is no error.
            for group in self.groups.values() {
                let _ = killpg(*group, signal);
            }
            let end = async {
                while let Some((index, ..)) = self.running.next().await {
                    self.groups.remove(&index);
                    let process = &mut self.plan.record.status.processes[index as usize];
                    (process.phase, process.reason) = (ProcessPhase::Failed, Some("Stopped".into()));
                }
            };
            if tokio::time::timeout(limit, end).await.is_ok() {
                return;
            }
        }
    }
}

/// Returns the last lines of a log that begins at `start`.
fn last_lines(path: &PathBuf, start: u64) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let end = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(start.max(end.saturating_sub(READ_BYTES)))).ok()?;
    let mut bytes = Vec::new();
    file.take(READ_BYTES).read_to_end(&mut bytes).ok()?;
    Some(log_tail(&String::from_utf8_lossy(&bytes))).filter(|tail| !tail.is_empty())
}
