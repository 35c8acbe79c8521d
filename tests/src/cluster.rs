//! A local cluster under `engram up`.

use crate::command::{Ran, command, engram, engram_within};
use crate::{DEADLINE, wait_for};
use engram_client::{Client, Network, Options};
use engram_identity::{Expected, Files, Keys, Role};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Lines of each log that a failed test shows.
const LAST_LINES: usize = 25;

/// How a cluster is started.
#[derive(Debug)]
pub struct Up {
    /// Holds everything of the test; goes when the cluster does.
    home: TempDir,
    arguments: Vec<String>,
    /// What its processes find in their environment beside what this one has.
    environment: Vec<(String, String)>,
}

/// A local cluster that runs, or ran.
#[derive(Debug)]
pub struct Cluster {
    home: TempDir,
    arguments: Vec<String>,
    /// What its processes find in their environment beside what this one has.
    environment: Vec<(String, String)>,
    up: Child,
    /// Every process that was ever seen of it.
    seen: BTreeSet<u32>,
}

impl Up {
    /// A cluster after the text of a manifest, in a new folder.
    ///
    /// # Panics
    /// The folder cannot be written.
    pub fn of(manifest: &str) -> Self {
        let home = TempDir::with_prefix("engram-test-").expect("a temporary folder can be made");
        let up = Self { home, arguments: Vec::new(), environment: Vec::new() };
        up.change(manifest);
        up
    }

    /// Replaces the manifest.
    ///
    /// # Panics
    /// It cannot be written.
    pub fn change(&self, manifest: &str) {
        fs::write(self.home.path().join("cluster.yaml"), manifest).expect("the manifest can be written");
    }

    /// The same, with more arguments for `up`.
    #[must_use]
    pub fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|it| (*it).to_owned()));
        self
    }

    /// The same, with no arguments for `up`.
    #[must_use]
    pub fn without_arguments(mut self) -> Self {
        self.arguments.clear();
        self
    }

    /// The same, with more in the environment of its processes.
    #[must_use]
    pub fn within(mut self, environment: &[(&str, &str)]) -> Self {
        self.environment.extend(environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self
    }

    /// The state directory.
    pub fn state_dir(&self) -> PathBuf {
        self.home.path().join("state")
    }

    /// Runs `up` to its end and says how it ended: for starts that are refused, and for `--exit-when-done`.
    pub fn run(&self) -> Ran {
        engram_within(self.line(), &self.environment, "")
    }

    /// Starts it and waits until all of it is served.
    ///
    /// # Panics
    /// It is not ready in time, or ends before.
    pub fn start(self) -> Cluster {
        let mut cluster = self.launch();
        cluster.wait_until_ready();
        cluster
    }

    /// Starts it and does not wait.
    ///
    /// # Panics
    /// The binary cannot be started.
    pub fn launch(self) -> Cluster {
        let line = self.line();
        let Self { home, arguments, environment } = self;
        let up = spawn(&line, &environment, &home.path().join("up.log"));
        Cluster { home, arguments, environment, up, seen: BTreeSet::new() }
    }

    fn line(&self) -> Vec<String> {
        let manifest = self.home.path().join("cluster.yaml").display().to_string();
        let state_dir = self.state_dir().display().to_string();
        let mut line: Vec<String> = vec!["up".into(), manifest, "--state-dir".into(), state_dir];
        if !self.arguments.iter().any(|argument| argument == "--port-base") {
            line.extend(["--port-base".into(), "0".into()]);
        }
        line.extend(self.arguments.iter().cloned());
        line
    }
}

fn spawn(line: &[String], environment: &[(String, String)], log: &Path) -> Child {
    let log = File::options().create(true).append(true).open(log).expect("the log can be opened");
    let mut command = command();
    command.envs(environment.iter().cloned());
    command.args(line).stdin(Stdio::null()).stdout(log.try_clone().expect("a file can be shared")).stderr(log);
    command.spawn().expect("the binary starts")
}

impl Cluster {
    /// Starts a cluster after the text of a manifest and waits until all of it is served.
    ///
    /// # Panics
    /// It is not ready in time.
    pub fn up(manifest: &str) -> Self {
        Up::of(manifest).start()
    }

    /// The state directory.
    pub fn state_dir(&self) -> PathBuf {
        self.home.path().join("state")
    }

    /// A folder for files of the test.
    pub fn folder(&self) -> &Path {
        self.home.path()
    }

    /// Writes a file for the test and returns its path.
    ///
    /// # Panics
    /// It cannot be written.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.home.path().join(name);
        fs::write(&path, content).expect("a file of the test can be written");
        path.display().to_string()
    }

    /// Waits until every worker serves.
    ///
    /// # Panics
    /// That takes too long, or `up` ends.
    pub fn wait_until_ready(&mut self) {
        wait_for("the cluster to be ready", DEADLINE, || {
            let ended = self.up.try_wait().expect("a child can be waited for");
            assert!(ended.is_none(), "up ended with {ended:?} before the cluster was ready\n{}", self.logs());
            self.endpoints().filter(|endpoints| endpoints["ready"] == true)
        });
        self.note_processes();
    }

    /// What the cluster wrote of itself; `None` before it did.
    pub fn endpoints(&self) -> Option<Value> {
        let text = fs::read_to_string(self.state_dir().join("endpoints.json")).ok()?;
        let endpoints: Value = serde_json::from_str(&text).ok()?;
        // A cluster that was killed has left its own behind.
        (endpoints["pid"] == self.supervisor()).then_some(endpoints)
    }

    /// Process of a worker; `None` between its end and its restart.
    pub fn worker(&self, ordinal: usize) -> Option<u32> {
        process(&self.endpoints()?["workers"][ordinal])
    }

    /// Process of the coordinator; `None` between its end and its restart.
    pub fn coordinator(&self) -> Option<u32> {
        process(&self.endpoints()?["coordinator"])
    }

    /// How many workers there are.
    ///
    /// # Panics
    /// The cluster is not up.
    pub fn workers(&self) -> usize {
        let endpoints = self.endpoints().expect("the cluster is up");
        endpoints["workers"].as_array().expect("workers are a list").len()
    }

    /// Process of `up`.
    pub fn supervisor(&self) -> u32 {
        self.up.id()
    }

    /// All its processes that run, `up` included.
    pub fn processes(&self) -> Vec<u32> {
        let workers = (0..self.workers()).filter_map(|ordinal| self.worker(ordinal));
        workers.chain(self.coordinator()).chain([self.supervisor()]).collect()
    }

    fn note_processes(&mut self) {
        self.seen.extend(self.processes());
    }

    /// Runs a command about this cluster.
    pub fn engram(&self, arguments: &[&str]) -> Ran {
        self.engram_with(arguments, "")
    }

    /// The same, with something to read.
    pub fn engram_with(&self, arguments: &[&str], input: &str) -> Ran {
        let state_dir = self.state_dir().display().to_string();
        let more = ["--state-dir", state_dir.as_str()];
        engram(arguments.iter().copied().chain(more), input)
    }

    /// Starts a command about this cluster and leaves it running.
    ///
    /// # Panics
    /// The binary cannot be started.
    pub fn spawn(&self, arguments: &[&str]) -> Child {
        let mut command = command();
        command.args(arguments).arg("--state-dir").arg(self.state_dir());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the binary starts")
    }

    /// Does to a command that was left running what Ctrl-C does.
    ///
    /// # Panics
    /// It has ended.
    pub fn interrupt(command: &Child) {
        signal(command.id(), Signal::SIGINT).expect("the command runs");
    }

    /// Does something with the client library.
    ///
    /// # Panics
    /// The cluster cannot be reached.
    pub fn client<T>(&self, with: impl AsyncFnOnce(Client) -> T) -> T {
        let endpoints = self.endpoints().expect("the cluster is up");
        let workers = endpoints["workers"].as_array().expect("workers are a list").clone();
        let addresses = workers.iter().filter_map(|worker| worker["client"].as_str()).map(str::to_owned);
        let mut options = Options::new(addresses);
        if endpoints["tls"] == true {
            let tls = self.state_dir().join("tls");
            let keys = Keys::open(Files::pair(tls.join("ca.pem"), tls.join("client.pem"))).expect("certificates");
            options.network = Network::secured(keys, Expected::any(Role::Worker));
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
        runtime.block_on(async move {
            let client = Client::connect(options).await.expect("the cluster answers");
            with(client).await
        })
    }

    /// Digest of all memories, and how many there are.
    ///
    /// # Panics
    /// The cluster does not answer.
    pub fn digest(&self) -> (String, u64) {
        let digested = self.client(async |client| client.digest().await.expect("the digest is told"));
        (digested.digest.to_string(), digested.memories)
    }

    /// Kills a process of this cluster with SIGKILL.
    pub fn kill(&mut self, pid: u32) {
        self.note_processes();
        assert!(self.seen.contains(&pid), "process {pid} is not of this cluster");
        // It may have ended in this very moment.
        let _ = signal(pid, Signal::SIGKILL);
    }

    /// Keeps a process of this cluster from doing anything, as an overloaded machine would.
    ///
    /// # Panics
    /// It does not run.
    pub fn pause(&self, pid: u32) {
        signal(pid, Signal::SIGSTOP).expect("it runs");
    }

    /// Lets a process go on that was paused.
    ///
    /// # Panics
    /// It does not run.
    pub fn resume(&self, pid: u32) {
        signal(pid, Signal::SIGCONT).expect("it runs");
    }

    /// Waits until a worker runs as another process than `before`.
    ///
    /// # Panics
    /// That takes too long.
    pub fn wait_for_restart(&self, ordinal: usize, before: u32) -> u32 {
        wait_for("the worker to be started again", DEADLINE, || self.worker(ordinal).filter(|pid| *pid != before))
    }

    /// Kills these workers one after another, each when all serve again.
    ///
    /// # Panics
    /// That takes too long.
    pub fn kill_in_turn(&mut self, ordinals: std::ops::Range<usize>) {
        for ordinal in ordinals {
            let worker = self.worker(ordinal).expect("it runs");
            self.kill(worker);
            self.wait_for_restart(ordinal, worker);
            self.wait_until_ready();
        }
    }

    /// Stops it in order, as Ctrl-C does, and waits until nothing of it runs. What it needs for another start stays.
    ///
    /// # Panics
    /// It does not stop.
    pub fn stop(mut self) -> (Up, ExitStatus) {
        self.note_processes();
        signal(self.up.id(), Signal::SIGINT).expect("up runs");
        let status = self.wait(DEADLINE);
        self.wait_until_nothing_runs(DEADLINE);
        (self.again(), status)
    }

    /// Kills `up` and waits until nothing of the cluster runs.
    ///
    /// # Panics
    /// Something goes on running.
    pub fn kill_all(mut self, deadline: Duration) -> Up {
        self.note_processes();
        signal(self.up.id(), Signal::SIGKILL).expect("up runs");
        self.wait(deadline);
        self.wait_until_nothing_runs(deadline);
        self.again()
    }

    /// Waits until `up` ends.
    ///
    /// # Panics
    /// That takes too long.
    pub fn wait(&mut self, deadline: Duration) -> ExitStatus {
        let up = &mut self.up;
        wait_for("up to end", deadline, || up.try_wait().expect("a child can be waited for"))
    }

    fn wait_until_nothing_runs(&self, deadline: Duration) {
        wait_for("every process of the cluster to end", deadline, || {
            (!self.seen.iter().any(|pid| is_running(*pid))).then_some(())
        });
    }

    /// The start that this one was, on the same folder.
    fn again(mut self) -> Up {
        let placeholder = TempDir::new().expect("a temporary folder can be made");
        Up {
            home: std::mem::replace(&mut self.home, placeholder),
            arguments: std::mem::take(&mut self.arguments),
            environment: std::mem::take(&mut self.environment),
        }
    }

    /// The end of every log.
    pub fn logs(&self) -> String {
        let mut paths = vec![self.home.path().join("up.log")];
        let listed = fs::read_dir(self.state_dir().join("logs")).into_iter().flatten().flatten();
        paths.extend(listed.map(|entry| entry.path()));
        paths.sort();
        let mut text = String::new();
        for path in paths {
            let log = fs::read(&path).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let lines: Vec<&str> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
            text.push_str(&format!("--- {}\n{last}\n", path.display()));
        }
        text
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        if matches!(self.up.try_wait(), Ok(None)) {
            // Its processes end with it; a test says so.
            let _ = self.up.kill();
            let _ = self.up.wait();
        }
    }
}

/// Whether a process runs. One that has ended and was not waited for does not.
pub fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

fn process(of: &Value) -> Option<u32> {
    of["process"]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
}

fn signal(pid: u32, signal: Signal) -> nix::Result<()> {
    kill(Pid::from_raw(i32::try_from(pid).expect("a process id fits")), signal)
}
