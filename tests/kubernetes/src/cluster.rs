//! The cluster: its folder, its start and end, and the ways into it.

use crate::http::Api;
use crate::kubeconfig::{GivenCluster, needs_nodes};
use crate::network::MOST_NODES;
use crate::process::{self, Record, until};
use crate::requirements::{self, PATH, find};
use crate::{PROGRAM, Skip, cgroup, host, image_store, programs};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{SigSet, Signal};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long a command in the cluster may take unless it says so itself.
pub(crate) const COMMAND: Duration = Duration::from_secs(60);
/// Describes the cluster of a folder.
const ABOUT: &str = "cluster.json";
/// Folder of the images and containers of all nodes, with a mount of its own.
const IMAGE_STORES: &str = "containerd";
/// Sockets below the folder have paths of at most 107 bytes, and kubelet adds some of its own.
const LONGEST_FOLDER: usize = 60;

/// What a cluster consists of.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Options {
    /// Nodes, 1 to 9. Of several real ones, the first is tainted as the control plane's own.
    pub nodes: u8,
    /// Nodes are stand-ins: pods turn Ready, no container runs.
    pub fake: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { nodes: 4, fake: false }
    }
}

/// A cluster on this machine. There is one at a time.
///
/// Its folder is `ENGRAM_KUBERNETES_STATE`, else `/var/tmp/engram-kubernetes`. Dropping this ends nothing: [`Cluster::stop`] does.
#[derive(Debug, Clone)]
pub struct Cluster {
    folder: PathBuf,
    pub(crate) about: About,
    /// `None` for a cluster that was started here.
    pub(crate) given: Option<GivenCluster>,
}

/// What a later process has to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct About {
    pub(crate) options: Options,
    pub(crate) programs: PathBuf,
    restore: host::Restore,
}

impl Cluster {
    /// Starts a cluster and waits until its nodes are Ready, DNS answers and claims get volumes.
    ///
    /// # Errors
    /// [`Skip`] where it cannot run here; a cluster that is up; a part that does not start: all is ended then, and the folder
    /// with the logs stays.
    pub fn start(options: Options) -> Result<Self> {
        let began = Instant::now();
        requirements::check(!options.fake)?;
        let programs = programs::find()?;
        let folder = folder()?;
        if let Ok(up) = Self::attach() {
            ensure!(!up.is_up(), "a cluster is up in {}: `cargo xtask kubernetes down` ends it", folder.display());
            up.stop(false)?;
        } else if folder.exists() {
            // All that is left of a cluster that was ended while it started.
            let stores = folder.join(IMAGE_STORES);
            if stores.is_dir() {
                image_store::unmount(&stores)?;
                // Fails when it has files: then it is not of a cluster.
                let _ = fs::remove_dir(&stores);
            }
            let empty = fs::read_dir(&folder)?.next().is_none();
            ensure!(empty, "{} holds other things than a cluster: name another folder", folder.display());
        }
        fs::create_dir_all(&folder)?;
        let about = About { options, programs, restore: host::Restore::prepare()? };
        let cluster = Self { folder, about, given: None };
        // First of all: by this file the folder is known as a cluster's, whenever the start is cut off.
        fs::write(cluster.path(ABOUT), serde_json::to_vec(&cluster.about)?)?;
        for part in ["bin", "certificates", "images", "log", "volumes"] {
            fs::create_dir_all(cluster.path(part))?;
        }
        if !options.fake {
            image_store::mount_at(&cluster.image_stores())?;
        }
        // A copy: a build while the cluster is up must not take the program away.
        fs::copy(std::env::current_exe()?, cluster.program())?;
        match cluster.start_parts() {
            Ok(()) => {
                let kind = if options.fake { "fake" } else { "real" };
                eprintln!("{} {kind} node(s) up after {:.1} s", options.nodes, began.elapsed().as_secs_f64());
                Ok(cluster)
            }
            Err(error) => {
                let error = error.context(format!("no cluster; the logs are in {}", cluster.folder.display()));
                Err(match cluster.stop(true) {
                    Ok(()) => error,
                    Err(more) => error.context(format!("and not all of it could be ended: {more:#}")),
                })
            }
        }
    }

    fn start_parts(&self) -> Result<()> {
        self.start_holder(1)?;
        thread::scope(|scope| {
            // Packing takes no more of the cluster than its folder.
            let images = scope.spawn(|| if self.about.options.fake { Ok(()) } else { self.pack_images() });
            self.start_control_plane()?;
            images.join().expect("packing does not panic")
        })?;
        if self.about.options.fake { self.start_fake_nodes() } else { self.start_real_nodes() }
    }

    fn start_real_nodes(&self) -> Result<()> {
        self.start_node(1)?;
        self.apply(include_str!("../manifests/coredns.yaml"))?;
        self.apply(include_str!("../manifests/storageclass.yaml"))?;
        let arguments = ["provision".into(), self.socket().into_os_string(), self.path("volumes").into_os_string()];
        self.start_daemon(1, "provisioner", &self.program(), &arguments)?;
        for node in 2..=self.about.options.nodes {
            self.add_node(node)?;
        }
        self.kubectl(["-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=50s"]).map(drop)
    }

    fn start_fake_nodes(&self) -> Result<()> {
        let names: Vec<String> = (1..=self.about.options.nodes).map(node_name).collect();
        let mut arguments = vec!["fake-kubelet".into(), self.socket().into_os_string()];
        arguments.extend(names.iter().map(Into::into));
        self.start_daemon(1, "fake-kubelet", &self.program(), &arguments)?;
        names.iter().try_for_each(|name| self.wait_for_node(name, true))
    }

    /// The cluster that another process has started.
    ///
    /// # Errors
    /// There is none.
    pub fn attach() -> Result<Self> {
        let folder = folder()?;
        let about = fs::read(folder.join(ABOUT));
        let about =
            about.with_context(|| format!("no cluster in {}: `cargo xtask kubernetes up`", folder.display()))?;
        Ok(Self { about: serde_json::from_slice(&about)?, folder, given: None })
    }

    /// A cluster that was not started here, with a folder for files of the suites.
    pub(crate) fn reached_by(folder: PathBuf, given: GivenCluster) -> Self {
        let options = Options { nodes: 0, fake: false };
        // Optional: the API server and kubectl are elsewhere.
        let programs = programs::find().unwrap_or_default();
        let about = About { options, programs, restore: host::Restore::default() };
        Self { folder, about, given: Some(given) }
    }

    /// Whether it was not started here: only its API server can be used.
    pub const fn is_given(&self) -> bool {
        self.given.is_some()
    }

    /// Whether a node's holder lives.
    fn is_up(&self) -> bool {
        (1..=MOST_NODES).any(|node| self.holder(node).is_ok())
    }

    /// Ends every node and with it all that belongs to it, gives the machine back its settings, and removes the folder unless
    /// it is to be kept.
    ///
    /// # Errors
    /// Something does not end or cannot be removed.
    pub fn stop(&self, keep: bool) -> Result<()> {
        cgroup::leave_clients()?;
        for node in (1..=MOST_NODES).rev() {
            if let Ok(holder) = self.holder(node) {
                holder.end(Signal::SIGTERM)?;
            }
        }
        self.about.restore.restore()?;
        image_store::unmount(&self.image_stores())?;
        if keep {
            // The next start finds by this file that a cluster was here; a dead holder does not block it.
            return Ok(());
        }
        // With the last holder went the last mount below it. Not at once: a mount namespace outlives its processes a moment.
        until("the removal of the folder", Duration::from_secs(10), || Ok(Some(remove(&self.folder)?)))
            .with_context(|| format!("failed to remove {}", self.folder.display()))
    }

    /// Has the clients that this process is, or will start, weigh as much as nodes of real clusters: they measure.
    ///
    /// # Errors
    /// Its cgroup cannot be changed.
    pub fn join_clients(&self) -> Result<()> {
        if self.is_fake() { Ok(()) } else { cgroup::join_clients() }
    }

    /// Whether its nodes are stand-ins.
    pub fn is_fake(&self) -> bool {
        self.about.options.fake
    }

    /// The cluster's folder: logs are in `log/NODE-NAME.log`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What the containerds of all nodes keep.
    pub(crate) fn image_stores(&self) -> PathBuf {
        self.path(IMAGE_STORES)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// This package's program, for nodes and images.
    pub(crate) fn program(&self) -> PathBuf {
        self.path("bin").join(PROGRAM)
    }

    /// One of the Kubernetes programs.
    ///
    /// # Errors
    /// [`Skip`] when it is not there: Helm and the S3 server are optional.
    pub fn kubernetes_program(&self, name: &str) -> Result<PathBuf> {
        let path = self.about.programs.join(name);
        let installed = self.given.as_ref().and_then(|_| find(name));
        if let Some(path) = installed {
            return Ok(path);
        }
        if path.is_file() { Ok(path) } else { Err(Skip(format!("there is no {}", path.display())).into()) }
    }

    pub(crate) fn kubeconfig(&self, name: &str) -> String {
        self.path("certificates").join(format!("{name}.kubeconfig")).to_string_lossy().into_owned()
    }

    /// The number of the node that a pod is on.
    ///
    /// # Errors
    /// The pod is on none, or [`Skip`] where nodes are not this cluster's own.
    pub(crate) fn node_of(&self, pod: &Value) -> Result<u8> {
        if self.is_given() {
            return Err(needs_nodes("this check"));
        }
        let number = pod["spec"]["nodeName"].as_str().and_then(|name| name.strip_prefix('n')?.parse().ok());
        number.context("the pod is on no node")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path("api.sock")
    }

    /// The API server, with all rights.
    pub fn api(&self) -> Api {
        Api::new(self.socket())
    }

    /// The process that is a node.
    ///
    /// # Errors
    /// The node is not up.
    pub(crate) fn holder(&self, node: u8) -> Result<Record> {
        if self.is_given() {
            return Err(needs_nodes("this check"));
        }
        let record = Record::load(&self.record(node, "holder")).filter(|it| it.is_alive());
        record.with_context(|| format!("node {} is not up", node_name(node)))
    }

    fn record(&self, node: u8, name: &str) -> PathBuf {
        self.path("log").join(format!("{}-{name}.pid", node_name(node)))
    }

    fn log(&self, node: u8, name: &str) -> PathBuf {
        self.path("log").join(format!("{}-{name}.log", node_name(node)))
    }

    /// The end of a daemon's log, for messages.
    pub(crate) fn tail(&self, node: u8, name: &str) -> String {
        let text = fs::read(self.log(node, name)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        format!("the end of its log:\n{}", lines[lines.len().saturating_sub(5)..].join("\n"))
    }

    /// Makes a node's namespaces and network.
    pub(crate) fn start_holder(&self, node: u8) -> Result<()> {
        ensure!(self.holder(node).is_err(), "node {} is up", node_name(node));
        let name = node_name(node);
        let ready = self.path("log").join(format!("{name}.ready"));
        drop(fs::remove_file(&ready));
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "--pid", "--uts", "--fork", "--propagation", "private", "--mount-proc"]);
        command.arg(self.program()).args(["hold", &name]).arg(&ready);
        let parent = self.detach(node, "holder", &mut command)?;
        let started = until("a node's namespaces", Duration::from_secs(10), || {
            if !ready.is_file() {
                ensure!(Record::of(parent).is_some(), "it ended; {}", self.tail(node, "holder"));
                return Ok(None);
            }
            Ok(Record::of_child(parent))
        });
        started?.save(&self.record(node, "holder"))?;
        if !self.is_fake() {
            cgroup::make(&name, node > 1)?;
        }
        self.connect(node)
    }

    /// Starts a program in a node. It ends with the node.
    ///
    /// # Errors
    /// It does not start.
    pub(crate) fn start_daemon<S: AsRef<OsStr>>(
        &self,
        node: u8,
        name: &str,
        program: &Path,
        arguments: &[S],
    ) -> Result<Record> {
        let mut command = self.enter(node, &["-n", "-m", "-p", "-u"])?;
        command.arg(program).args(arguments);
        let parent = self.detach(node, name, &mut command)?;
        let record = until(&format!("the start of {name}"), Duration::from_secs(10), || {
            ensure!(Record::of(parent).is_some(), "it ended; {}", self.tail(node, name));
            Ok(Record::of_child(parent))
        })?;
        record.save(&self.record(node, name))?;
        Ok(record)
    }

    /// A program of a node that was started.
    pub(crate) fn daemon(&self, node: u8, name: &str) -> Option<Record> {
        Record::load(&self.record(node, name))
    }

    /// Ends a program of a node, and waits until it has gone.
    ///
    /// # Errors
    /// It lives on.
    pub(crate) fn end_daemon(&self, node: u8, name: &str, signal: Signal) -> Result<()> {
        let Some(record) = Record::load(&self.record(node, name)) else { bail!("{name} was never started") };
        record.end(signal)
    }

    /// Starts a process that outlives this one, with a log of its own.
    fn detach(&self, node: u8, name: &str, command: &mut Command) -> Result<i32> {
        let log = OpenOptions::new().create(true).append(true).open(self.log(node, name))?;
        // A group of its own: what is typed at the terminal is not for it.
        command.process_group(0).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut child = spawn_stoppable(command).with_context(|| format!("failed to start {name}"))?;
        let pid = child.id().cast_signed();
        // Reaped when it ends, should this process live that long.
        thread::spawn(move || child.wait());
        Ok(pid)
    }

    /// A command in some of a node's namespaces and among its own programs, with nothing of this process's environment.
    fn enter(&self, node: u8, namespaces: &[&str]) -> Result<Command> {
        let holder = self.holder(node)?.pid.to_string();
        let nsenter = find("nsenter").context("there is no nsenter")?;
        let mut command = match cgroup::of_system(&node_name(node)) {
            Some(group) => {
                let mut command = Command::new("/bin/sh");
                command.args(["-c", "echo 0 > \"$0\" && exec \"$@\""]).arg(group).arg(nsenter);
                command
            }
            None => Command::new(nsenter),
        };
        command.args(["-t", &holder]).args(namespaces).arg("--");
        command.env_clear().env("PATH", PATH).env("HOME", &self.folder);
        command.env("KUBECONFIG", self.kubeconfig("admin"));
        Ok(command)
    }

    /// A command in the network of a node, and nothing else of the node: files are this machine's.
    ///
    /// # Errors
    /// The node is not up.
    pub fn network_command(&self, node: u8, program: impl AsRef<OsStr>) -> Result<Command> {
        let mut command = self.enter(node, &["-n"])?;
        command.arg(program);
        Ok(command)
    }

    /// The network of a node, for a thread that goes there.
    ///
    /// # Errors
    /// The node is not up.
    pub fn network_namespace(&self, node: u8) -> Result<File> {
        let path = format!("/proc/{}/ns/net", self.holder(node)?.pid);
        File::open(&path).with_context(|| format!("failed to open {path}"))
    }

    /// Sends a signal to processes of a node, by the numbers that they have there.
    pub(crate) fn signal(&self, node: u8, signal: Signal, processes: &[u32]) -> Result<()> {
        let numbers: Vec<String> = processes.iter().map(u32::to_string).collect();
        let line = format!("kill -{} {}", signal as i32, numbers.join(" "));
        let mut command = self.enter(node, &["-p"])?;
        process::read(command.args(["sh", "-c", &line]), b"", COMMAND).map(drop)
    }

    /// Runs a command in the network of a node and returns what it printed. Node 1 reaches every pod and every Service by IP.
    ///
    /// # Errors
    /// It fails or does not end within a minute.
    pub fn in_network<S: AsRef<OsStr>>(
        &self,
        node: u8,
        program: impl AsRef<OsStr>,
        arguments: impl IntoIterator<Item = S>,
    ) -> Result<String> {
        self.in_network_fed(node, program, arguments, "")
    }

    pub(crate) fn in_network_fed<S: AsRef<OsStr>>(
        &self,
        node: u8,
        program: impl AsRef<OsStr>,
        arguments: impl IntoIterator<Item = S>,
        input: &str,
    ) -> Result<String> {
        let mut command = self.network_command(node, program)?;
        process::read(command.args(arguments), input.as_bytes(), COMMAND)
    }

    /// `ctr` of a node's containerd.
    pub(crate) fn ctr<S: AsRef<OsStr>>(&self, node: u8, arguments: impl IntoIterator<Item = S>) -> Result<String> {
        let mut command = self.enter(node, &["-n", "-m"])?;
        command.args(["ctr", "-a", "/run/engram-containerd/containerd.sock", "-n", "k8s.io"]).args(arguments);
        process::read(&mut command, b"", COMMAND)
    }

    /// Runs a command line on a node, where `ctr` finds the node's containerd.
    pub(crate) fn shell(&self, node: u8, line: &str) -> Result<String> {
        let mut command = self.enter(node, &["-n", "-m"])?;
        command.args(["env", "CONTAINERD_ADDRESS=/run/engram-containerd/containerd.sock", "sh", "-c", line]);
        process::read(&mut command, b"", COMMAND)
    }

    /// A kubectl that is to be started.
    ///
    /// # Errors
    /// Node 1 of a cluster that was started here is not up.
    pub fn kubectl_command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Result<Command> {
        let mut command = match &self.given {
            Some(given) => given.kubectl_command(),
            None => self.network_command(1, self.about.programs.join("kubectl"))?,
        };
        command.args(arguments);
        Ok(command)
    }

    /// What kubectl prints.
    ///
    /// # Errors
    /// It fails or does not end within a minute.
    pub fn kubectl<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Result<String> {
        process::read(&mut self.kubectl_command(arguments)?, b"", COMMAND)
    }

    /// Applies a manifest.
    ///
    /// # Errors
    /// The API server refuses it.
    pub fn apply(&self, manifest: &str) -> Result<()> {
        process::read(&mut self.kubectl_command(["apply", "-f", "-"])?, manifest.as_bytes(), COMMAND).map(drop)
    }

    /// Applies a manifest by server-side apply: one that is too large for the annotation of the other kind.
    ///
    /// # Errors
    /// The API server refuses it.
    pub fn apply_on_server(&self, manifest: &str) -> Result<()> {
        let mut command = self.kubectl_command(["apply", "--server-side", "-f", "-"])?;
        process::read(&mut command, manifest.as_bytes(), COMMAND).map(drop)
    }

    /// Waits for a node's Ready condition to be this (silence turns it into Unknown).
    ///
    /// # Errors
    /// It is not within two minutes: after an outage of the API server nodes come back only slowly.
    pub fn wait_for_node(&self, name: &str, ready: bool) -> Result<()> {
        let what = format!("node {name} to be {}", if ready { "Ready" } else { "not Ready" });
        until(&what, Duration::from_secs(120), || {
            let Some(node) = self.api().find(&format!("/api/v1/nodes/{name}"))? else { return Ok(None) };
            let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let found = conditions.iter().any(|it| it["type"] == "Ready" && it["status"] == "True");
            Ok((found == ready).then_some(()))
        })
    }
}

/// Starts a process that SIGINT and SIGTERM reach: a child inherits what is blocked here, and runs wait for these two.
fn spawn_stoppable(command: &mut Command) -> Result<std::process::Child> {
    let blocked = SigSet::thread_get_mask()?;
    SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]).thread_unblock()?;
    let child = command.spawn();
    blocked.thread_set_mask()?;
    Ok(child?)
}

/// Name of a node.
pub(crate) fn node_name(node: u8) -> String {
    format!("n{node}")
}

/// Removes a cluster's folder. The file by which the next start knows it goes last: that start removes what a failed or killed removal left.
fn remove(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else if entry.file_name() != ABOUT {
            fs::remove_file(entry.path())?;
        }
    }
    fs::remove_dir_all(folder)
}

fn folder() -> Result<PathBuf> {
    let folder = std::env::var_os("ENGRAM_KUBERNETES_STATE").unwrap_or_else(|| "/var/tmp/engram-kubernetes".into());
    let folder = std::path::absolute(folder)?;
    ensure!(
        folder.as_os_str().len() <= LONGEST_FOLDER,
        "the cluster's folder {} is longer than {LONGEST_FOLDER} bytes, so that sockets below it cannot be made: set \
         ENGRAM_KUBERNETES_STATE",
        folder.display()
    );
    Ok(folder)
}
