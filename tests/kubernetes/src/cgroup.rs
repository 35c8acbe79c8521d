//! The cgroups of nodes: in each, kubelet creates one for all pods, next to the one of the node's own programs.
//!
//! So it is on a machine: pods share `kubepods`, what starts them is in `system.slice`. In no group, each busy thread of containerd,
//! kubelet or runc would weigh half as much as all pods of its node together, and pods that start would hold up those that run.
//!
//! Who tests is a machine of its own as well: its clients measure how long writes are held up, and in the group of its terminal they waited
//! for Helm, and for nodes that start pods, up to 0.2 s at a time.

use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread::available_parallelism;

const ROOT: &str = "/sys/fs/cgroup";
/// What a processor weighs, and what the node's own programs do: what kubelet gives pods for each processor that they ask for.
const SHARES: u64 = 1024;
const MOST_SHARES: u64 = 262_144;
/// How many times as much a node weighs as what is in no group or holds the control plane: on machines of their own, neither an API server
/// nor who asks it, nor a compiler, takes a processor away from pods that run elsewhere.
const OWN: u64 = 16;
/// The file of a group with the numbers of its processes.
const PROCESSES: &str = "cgroup.procs";
/// What stands for a node's name in the group of clients.
pub(crate) const CLIENTS: &str = "clients";
/// The group that this process was in before it joined that of the clients.
static CAME_FROM: OnceLock<PathBuf> = OnceLock::new();

/// The roots of the hierarchies: one under version 2, one for each controller under version 1.
pub(crate) fn hierarchies() -> Vec<PathBuf> {
    if is_unified() {
        return vec![ROOT.into()];
    }
    let entries = fs::read_dir(ROOT).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|it| it.path()).filter(|it| it.is_dir() && !it.is_symlink()).collect();
    found.sort();
    found
}

fn is_unified() -> bool {
    Path::new(ROOT).join("cgroup.controllers").is_file()
}

/// Makes a group for a node in every hierarchy, which weighs as many processors as the node says it has; more where it `is_apart` from the
/// control plane.
pub(crate) fn make(node: &str, is_apart: bool) -> Result<()> {
    if is_unified() {
        hand_down(Path::new(ROOT))?;
    }
    for hierarchy in hierarchies() {
        let folder = group(&hierarchy, node);
        fs::create_dir_all(&folder).with_context(|| format!("failed to make {}", folder.display()))?;
        if hierarchy.ends_with("cpuset") && !is_unified() {
            for file in ["cpuset.cpus", "cpuset.mems"] {
                fs::copy(hierarchy.join(file), folder.join(file)).with_context(|| format!("failed to set {file}"))?;
            }
        }
    }
    let Some(folder) = of_processor(node) else { return Ok(()) };
    weigh(&folder, machine(is_apart)?)?;
    if is_unified() {
        hand_down(&folder)?;
    }
    let system = folder.join("system");
    fs::create_dir_all(&system).with_context(|| format!("failed to make {}", system.display()))?;
    weigh(&system, SHARES)
}

/// File for the process ids of the node's own programs; 0 means the writer. Fake nodes have no group.
pub(crate) fn of_system(node: &str) -> Option<PathBuf> {
    of_processor(node).map(|it| it.join("system").join(PROCESSES)).filter(|it| it.is_file())
}

/// Puts this process, and what it will start, into a group that weighs as much as a node that is apart from the control plane.
pub(crate) fn join_clients() -> Result<()> {
    let Some(folder) = of_processor(CLIENTS) else { return Ok(()) };
    fs::create_dir_all(&folder).with_context(|| format!("failed to make {}", folder.display()))?;
    weigh(&folder, machine(true)?)?;
    let from = own_group().context("this process is in no group")?;
    fs::write(folder.join(PROCESSES), "0").with_context(|| format!("failed to join {}", folder.display()))?;
    CAME_FROM.get_or_init(|| from);
    Ok(())
}

/// Puts this process back where it came from: a group with processes cannot be removed.
pub(crate) fn leave_clients() -> Result<()> {
    let Some(folder) = CAME_FROM.get() else { return Ok(()) };
    fs::write(folder.join(PROCESSES), "0").with_context(|| format!("failed to go back to {}", folder.display()))
}

/// The group of this process in the hierarchy that shares out processors.
fn own_group() -> Option<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mut lines = text.lines().filter_map(|line| {
        let (_, line) = line.split_once(':')?;
        line.split_once(':')
    });
    let (_, path) = lines.find(|(controllers, _)| match is_unified() {
        true => controllers.is_empty(),
        false => controllers.split(',').any(|it| it == "cpu"),
    })?;
    Some(processors()?.join(path.trim_start_matches('/')))
}

fn group(hierarchy: &Path, node: &str) -> PathBuf {
    hierarchy.join(format!("engram-{node}"))
}

/// The node's group in the hierarchy that shares out processors.
fn of_processor(node: &str) -> Option<PathBuf> {
    processors().map(|it| group(&it, node))
}

/// The hierarchy that shares out processors.
fn processors() -> Option<PathBuf> {
    hierarchies().into_iter().find(|it| is_unified() || it.join("cpu.shares").is_file())
}

/// What a machine weighs: its processors, and more of it where it `is_apart` from the control plane.
fn machine(is_apart: bool) -> Result<u64> {
    let own = if is_apart { OWN } else { 1 };
    Ok(available_parallelism()?.get() as u64 * SHARES * own)
}

fn weigh(folder: &Path, shares: u64) -> Result<()> {
    // A machine with more processors than the range has room for weighs as much as it can.
    let shares = shares.min(MOST_SHARES);
    // The range of version 1, 2 to 262,144, onto that of version 2, 1 to 10,000, as kubelet does it.
    let (file, value) =
        if is_unified() { ("cpu.weight", 1 + (shares - 2) * 9_999 / 262_142) } else { ("cpu.shares", shares) };
    fs::write(folder.join(file), value.to_string())
        .with_context(|| format!("failed to set {file} of {}", folder.display()))
}

/// Lets the groups below use what this one may use.
fn hand_down(folder: &Path) -> Result<()> {
    let controllers = fs::read_to_string(folder.join("cgroup.controllers"))?;
    for controller in controllers.split_whitespace() {
        // Some cannot be handed down; kubelet says which it misses.
        drop(fs::write(folder.join("cgroup.subtree_control"), format!("+{controller}")));
    }
    Ok(())
}
