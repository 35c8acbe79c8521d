//! Local clusters, started by `engram up`.

use crate::command::{CommandOutput, command, engram, engram_in_environment, find_panic};
use crate::{DEADLINE, wait_for};
use engram_client::{Client, Network, Options};
use engram_identity::{ExpectedPeer, Files, Keys, Role};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Lines of each log that a failed test prints.
const LAST_LINES: usize = 25;
/// Deadline for all replicas to be in sync, on a machine that executes other tests.
const REPLICATION_DEADLINE: Duration = Duration::from_secs(240);

/// Configuration of a cluster to start.
#[derive(Debug)]
pub struct ClusterBuilder {
    /// Temporary folder of the test, deleted with the cluster.
    home: TempDir,
    arguments: Vec<String>,
    /// Additional environment variables.
    environment: Vec<(String, String)>,
}

/// A local cluster.
#[derive(Debug)]
pub struct Cluster {
    home: TempDir,
    arguments: Vec<String>,
    /// Additional environment variables.
    environment: Vec<(String, String)>,
    up: Child,
    /// All processes that the cluster had so far.
    known_processes: BTreeSet<u32>,
}

impl ClusterBuilder {
    /// Creates a configuration with this manifest in a new folder.
    ///
    /// # Panics
    /// The folder cannot be written.
    pub fn new(manifest: &str) -> Self {
        let home = TempDir::with_prefix("engram-test-").expect("failed to create a temporary folder");
        let builder = Self { home, arguments: Vec::new(), environment: Vec::new() };
        builder.change(manifest);
        builder
    }

    /// Replaces the manifest.
    ///
    /// # Panics
    /// The file cannot be written.
    pub fn change(&self, manifest: &str) {
        fs::write(self.home.path().join("cluster.yaml"), manifest).expect("failed to write the manifest");
    }

    /// Adds arguments for `up`.
    #[must_use]
    pub fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|it| (*it).to_owned()));
        self
    }

    /// Removes all arguments for `up`.
    #[must_use]
    pub fn without_arguments(mut self) -> Self {
        self.arguments.clear();
        self
    }

    /// Adds environment variables.
    #[must_use]
    pub fn with_environment(mut self, environment: &[(&str, &str)]) -> Self {
        self.environment.extend(environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self
    }

    /// Returns the state directory.
    pub fn state_dir(&self) -> PathBuf {
        self.home.path().join("state")
    }

    /// Runs `up` until it exits: for failing starts and `--exit-when-done`.
    pub fn run(&self) -> CommandOutput {
        engram_in_environment(self.line(), &self.environment, "")
    }

    /// Starts the cluster and waits until it is ready.
    ///
    /// # Panics
    /// The cluster exits or is not ready in time.
    pub fn start(self) -> Cluster {
        let mut cluster = self.launch();
        cluster.wait_until_ready();
        cluster
    }

    /// Starts the cluster without waiting.
    ///
    /// # Panics
    /// The binary cannot be started.
    pub fn launch(self) -> Cluster {
        let line = self.line();
        let Self { home, arguments, environment } = self;
        let up = spawn(&line, &environment, &home.path().join("up.log"));
        Cluster { home, arguments, environment, up, known_processes: BTreeSet::new() }
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
    let log = File::options().create(true).append(true).open(log).expect("failed to open the log");
    let mut command = command();
    command.envs(environment.iter().cloned());
    command.args(line).stdin(Stdio::null()).stdout(log.try_clone().expect("failed to clone a file handle")).stderr(log);
    command.spawn().expect("failed to start the binary")
}

impl Cluster {
    /// Starts a cluster with this manifest and waits until it is ready.
    ///
    /// # Panics
    /// The cluster is not ready in time.
    pub fn up(manifest: &str) -> Self {
        ClusterBuilder::new(manifest).start()
    }

    /// Returns the state directory.
    pub fn state_dir(&self) -> PathBuf {
        self.home.path().join("state")
    }

    /// Returns the folder for files of the test.
    pub fn folder(&self) -> &Path {
        self.home.path()
    }

    /// Writes a file and returns its path.
    ///
    /// # Panics
    /// The file cannot be written.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.home.path().join(name);
        fs::write(&path, content).expect("failed to write a file");
        path.display().to_string()
    }

    /// Waits until the cluster is ready.
    ///
    /// # Panics
    /// The deadline expires, or `up` exits.
    pub fn wait_until_ready(&mut self) {
        wait_for("the cluster to be ready", DEADLINE, || {
            let status = self.up.try_wait().expect("failed to wait for up");
            assert!(status.is_none(), "up exited with {status:?} before the cluster was ready\n{}", self.logs());
            self.endpoints().filter(|endpoints| endpoints["ready"] == true)
        });
        self.record_processes();
    }

    /// Reads `endpoints.json`; `None` if it does not exist yet.
    pub fn endpoints(&self) -> Option<Value> {
        let text = fs::read_to_string(self.state_dir().join("endpoints.json")).ok()?;
        let endpoints: Value = serde_json::from_str(&text).ok()?;
        // A killed cluster leaves a stale file behind.
        (endpoints["pid"] == self.supervisor()).then_some(endpoints)
    }

    /// Returns the process of a worker; `None` while it restarts.
    pub fn worker(&self, ordinal: usize) -> Option<u32> {
        process(&self.endpoints()?["workers"][ordinal])
    }

    /// Returns the process of the coordinator; `None` while it restarts.
    pub fn coordinator(&self) -> Option<u32> {
        process(&self.endpoints()?["coordinator"])
    }

    /// Returns the number of workers.
    ///
    /// # Panics
    /// The cluster is not running.
    pub fn workers(&self) -> usize {
        let endpoints = self.endpoints().expect("the cluster is running");
        endpoints["workers"].as_array().expect("workers are a list").len()
    }

    /// Returns the process of `up`.
    pub fn supervisor(&self) -> u32 {
        self.up.id()
    }

    /// Returns all running processes, including `up`.
    pub fn processes(&self) -> Vec<u32> {
        let workers = (0..self.workers()).filter_map(|ordinal| self.worker(ordinal));
        workers.chain(self.coordinator()).chain([self.supervisor()]).collect()
    }

    fn record_processes(&mut self) {
        self.known_processes.extend(self.processes());
    }

    /// Runs a command for this cluster.
    pub fn engram(&self, arguments: &[&str]) -> CommandOutput {
        self.engram_with(arguments, "")
    }

    /// Runs a command for this cluster with input.
    pub fn engram_with(&self, arguments: &[&str], input: &str) -> CommandOutput {
        let state_dir = self.state_dir().display().to_string();
        let more = ["--state-dir", state_dir.as_str()];
        engram(arguments.iter().copied().chain(more), input)
    }

    /// Runs a command for this cluster with additional environment variables.
    pub fn engram_in(&self, environment: &[(&str, &str)], arguments: &[&str], input: &str) -> CommandOutput {
        let state_dir = self.state_dir().display().to_string();
        let more = ["--state-dir", state_dir.as_str()];
        let environment: Vec<_> = environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        engram_in_environment(arguments.iter().copied().chain(more), &environment, input)
    }

    /// Starts a command for this cluster without waiting.
    ///
    /// # Panics
    /// The binary cannot be started.
    pub fn spawn(&self, arguments: &[&str]) -> Child {
        let mut command = command();
        command.args(arguments).arg("--state-dir").arg(self.state_dir());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("failed to start the binary")
    }

    /// Sends SIGINT to a command, as Ctrl-C does.
    ///
    /// # Panics
    /// The command has exited.
    pub fn interrupt(command: &Child) {
        signal(command.id(), Signal::SIGINT).expect("failed to send SIGINT");
    }

    /// Runs a closure with the client library.
    ///
    /// # Panics
    /// The cluster cannot be reached.
    pub fn client<T>(&self, with: impl AsyncFnOnce(Client) -> T) -> T {
        let endpoints = self.endpoints().expect("the cluster is running");
        let workers = endpoints["workers"].as_array().expect("workers are a list").clone();
        let addresses = workers.iter().filter_map(|worker| worker["client"].as_str()).map(str::to_owned);
        let mut options = Options::new(addresses);
        if endpoints["tls"] == true {
            let tls = self.state_dir().join("tls");
            let keys = Keys::open(Files::pair(tls.join("ca.pem"), tls.join("client.pem")))
                .expect("failed to load certificates");
            options.network = Network::with_tls(keys, ExpectedPeer::any(Role::Worker));
        }
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("failed to create a runtime");
        runtime.block_on(async move {
            let client = Client::connect(options).await.expect("failed to connect");
            with(client).await
        })
    }

    /// Returns digest and number of all memories.
    ///
    /// # Panics
    /// The request fails.
    pub fn digest(&self) -> (String, u64) {
        let response = self.client(async |client| client.digest().await.expect("failed to read the digest"));
        (response.digest.to_string(), response.memories)
    }

    /// Sends SIGKILL to a process of this cluster.
    pub fn kill(&mut self, pid: u32) {
        self.record_processes();
        assert!(self.known_processes.contains(&pid), "process {pid} does not belong to this cluster");
        // Fails if the process has just exited.
        let _ = signal(pid, Signal::SIGKILL);
    }

    /// Sends SIGSTOP to a process, to simulate an overloaded machine.
    ///
    /// # Panics
    /// The process is not running.
    pub fn pause(&self, pid: u32) {
        signal(pid, Signal::SIGSTOP).expect("the process is running");
    }

    /// Sends SIGCONT to a paused process.
    ///
    /// # Panics
    /// The process is not running.
    pub fn resume(&self, pid: u32) {
        signal(pid, Signal::SIGCONT).expect("the process is running");
    }

    /// Waits until a worker runs in another process than `before`.
    ///
    /// # Panics
    /// The deadline expires.
    pub fn wait_for_restart(&self, ordinal: usize, before: u32) -> u32 {
        wait_for("the worker to restart", DEADLINE, || self.worker(ordinal).filter(|pid| *pid != before))
    }

    /// Returns the partitions as `engram list partitions` shows them; `None` while the coordinator does not respond.
    ///
    /// # Panics
    /// The command prints something else.
    pub fn partitions(&self) -> Option<Vec<Value>> {
        let output = self.engram(&["list", "partitions", "-o", "json"]);
        (output.code == Some(0)).then(|| output.json()["items"].as_array().expect("a list").clone())
    }

    /// Waits until each partition has this many replicas in sync and no others, and returns the partitions.
    ///
    /// # Panics
    /// The deadline expires.
    pub fn wait_until_replicated(&self, replicas: usize) -> Vec<Value> {
        wait_for("all partitions to be fully replicated", REPLICATION_DEADLINE, || {
            let is_replicated = |it: &Value| {
                it["inSync"].as_array().is_some_and(|it| it.len() == replicas)
                    && it["activated"] == true
                    && it["learners"] == Value::Array(vec![])
            };
            self.partitions().filter(|all| all.iter().all(is_replicated))
        })
    }

    /// Kills workers one after another, waiting until the cluster is ready again after each.
    ///
    /// # Panics
    /// The deadline expires.
    pub fn kill_in_turn(&mut self, ordinals: std::ops::Range<usize>) {
        for ordinal in ordinals {
            let worker = self.worker(ordinal).expect("the process is running");
            self.kill(worker);
            self.wait_for_restart(ordinal, worker);
            self.wait_until_ready();
        }
    }

    /// Stops the cluster gracefully, as Ctrl-C does, and returns the configuration to start it again.
    ///
    /// # Panics
    /// The cluster does not stop in time.
    pub fn stop(mut self) -> (ClusterBuilder, ExitStatus) {
        self.record_processes();
        signal(self.up.id(), Signal::SIGINT).expect("up is running");
        let status = self.wait(DEADLINE);
        self.wait_until_stopped(DEADLINE);
        (self.into_builder(), status)
    }

    /// Kills `up` and waits until all processes have exited.
    ///
    /// # Panics
    /// A process keeps running.
    pub fn kill_all(mut self, deadline: Duration) -> ClusterBuilder {
        self.record_processes();
        signal(self.up.id(), Signal::SIGKILL).expect("up is running");
        self.wait(deadline);
        self.wait_until_stopped(deadline);
        self.into_builder()
    }

    /// Waits until `up` exits.
    ///
    /// # Panics
    /// The deadline expires.
    pub fn wait(&mut self, deadline: Duration) -> ExitStatus {
        let up = &mut self.up;
        wait_for("up to exit", deadline, || up.try_wait().expect("failed to wait for up"))
    }

    fn wait_until_stopped(&self, deadline: Duration) {
        wait_for("all processes of the cluster to exit", deadline, || {
            (!self.known_processes.iter().any(|pid| is_running(*pid))).then_some(())
        });
    }

    /// Returns the configuration of this cluster, with the same folder.
    fn into_builder(mut self) -> ClusterBuilder {
        self.assert_no_panics();
        let placeholder = TempDir::new().expect("failed to create a temporary folder");
        ClusterBuilder {
            home: std::mem::replace(&mut self.home, placeholder),
            arguments: std::mem::take(&mut self.arguments),
            environment: std::mem::take(&mut self.environment),
        }
    }

    /// Returns the logs of all processes.
    fn log_paths(&self) -> Vec<PathBuf> {
        let mut paths = vec![self.home.path().join("up.log")];
        let entries = fs::read_dir(self.state_dir().join("logs")).into_iter().flatten().flatten();
        paths.extend(entries.map(|entry| entry.path()));
        paths.sort();
        paths
    }

    /// Checks that no process has panicked, whatever the test checks.
    fn assert_no_panics(&self) {
        for path in self.log_paths() {
            let log = fs::read(&path).unwrap_or_default();
            if let Some(panic) = find_panic(&String::from_utf8_lossy(&log)) {
                panic!("a process has panicked, {}:\n{panic}", path.display());
            }
        }
    }

    /// Returns the last lines of every log.
    pub fn logs(&self) -> String {
        let mut text = String::new();
        for path in self.log_paths() {
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
            // The other processes exit with it.
            let _ = self.up.kill();
            let _ = self.up.wait();
        }
        if !std::thread::panicking() {
            self.assert_no_panics();
        }
    }
}

/// Whether a process is running; zombies are not.
pub fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

fn process(endpoint: &Value) -> Option<u32> {
    endpoint["process"]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
}

fn signal(pid: u32, signal: Signal) -> nix::Result<()> {
    kill(Pid::from_raw(i32::try_from(pid).expect("process ids fit in i32")), signal)
}
