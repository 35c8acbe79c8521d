//! What a cluster could leave behind on the machine: read before and after, and compared.

use crate::cgroup::{CLIENTS, hierarchies};
use crate::holder::PRIVATE;
use crate::process::until;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Settings of the whole machine that kubelet changes.
const SETTINGS: [&str; 6] = [
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
];

/// Prefix of the cgroups of nodes and of clients.
const GROUP: &str = "engram-";
/// Prefix of a node's name.
const NODE: &str = "n";

/// What is to be put back when a cluster ends.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Restore {
    settings: BTreeMap<String, String>,
    /// Mount points that were made for the nodes' own folders, outermost first.
    made: Vec<PathBuf>,
}

impl Restore {
    /// Notes the settings and makes the mount points.
    pub(crate) fn prepare() -> Result<Self> {
        let mut made = Vec::new();
        for folder in PRIVATE.map(Path::new) {
            let missing: Vec<&Path> = folder.ancestors().take_while(|it| !it.exists()).collect();
            for &path in missing.iter().rev() {
                fs::create_dir(path)?;
                made.push(path.to_owned());
            }
        }
        Ok(Self { settings: settings(), made })
    }

    /// Puts everything back, and removes the nodes' cgroups.
    pub(crate) fn restore(&self) -> Result<()> {
        // A group is empty a moment after its last process.
        until("the nodes' cgroups to be empty", Duration::from_secs(20), || {
            let left: Vec<PathBuf> = groups().into_iter().filter(|it| remove_group(it).is_err()).collect();
            anyhow::ensure!(left.is_empty(), "left: {left:?}");
            Ok(Some(()))
        })?;
        for (name, value) in &self.settings {
            let path = setting(name);
            if fs::read_to_string(&path)? != *value {
                fs::write(path, value)?;
            }
        }
        for folder in self.made.iter().rev() {
            // One that another program has filled meanwhile is its own now.
            drop(fs::remove_dir(folder));
        }
        Ok(())
    }
}

fn setting(name: &str) -> PathBuf {
    Path::new("/proc/sys").join(name)
}

fn settings() -> BTreeMap<String, String> {
    SETTINGS.iter().filter_map(|&it| Some((it.to_owned(), fs::read_to_string(setting(it)).ok()?))).collect()
}

fn groups() -> Vec<PathBuf> {
    let is_ours = |it: &PathBuf| {
        let name = it.file_name().map(|name| name.to_string_lossy().into_owned());
        name.as_deref().and_then(|it| it.strip_prefix(GROUP)).is_some_and(|it| it == CLIENTS || it.starts_with(NODE))
    };
    let entries = hierarchies().into_iter().flat_map(|it| fs::read_dir(it).into_iter().flatten().flatten());
    entries.map(|it| it.path()).filter(is_ours).collect()
}

/// Removes a group and those below it: in these file systems a folder with files goes when it has no processes and no groups.
fn remove_group(group: &Path) -> Result<()> {
    for entry in fs::read_dir(group)?.flatten() {
        if entry.file_type()?.is_dir() {
            remove_group(&entry.path())?;
        }
    }
    Ok(fs::remove_dir(group)?)
}

/// The machine, as far as a cluster could have changed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State(BTreeMap<&'static str, BTreeSet<String>>);

impl State {
    /// Reads it.
    ///
    /// # Errors
    /// `/proc` or `/sys` cannot be read.
    pub fn read() -> Result<Self> {
        let names = |folder: &str| -> BTreeSet<String> {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|it| it.file_name().to_string_lossy().into_owned()).collect()
        };
        let top = hierarchies().into_iter().flat_map(|it| fs::read_dir(it).into_iter().flatten().flatten());
        let groups = top.filter(|it| it.path().is_dir()).map(|it| it.path().display().to_string()).collect();
        Ok(Self(BTreeMap::from([
            // A mount's number differs when it was created again.
            ("mount", fs::read_to_string("/proc/self/mountinfo")?.lines().map(str::to_owned).collect()),
            ("link", names("/sys/class/net")),
            ("cgroup", groups),
            ("sysctl", settings().into_iter().map(|(name, value)| format!("{name} = {}", value.trim())).collect()),
            ("folder", PRIVATE.iter().filter(|it| Path::new(it).exists()).map(|&it| it.to_owned()).collect()),
            ("network namespace with processes", network_namespaces()),
            ("process", processes()),
        ])))
    }

    /// What is different from `before`, once processes that end have ended (10 s at most). Empty when nothing is.
    ///
    /// # Errors
    /// As [`State::read`].
    pub fn settled(before: &Self) -> Result<Vec<String>> {
        let compared = until("the machine to be as before", Duration::from_secs(10), || {
            Ok(Self::read()?.difference(before).is_empty().then_some(()))
        });
        if compared.is_ok() { Ok(Vec::new()) } else { Ok(Self::read()?.difference(before)) }
    }

    fn difference(&self, before: &Self) -> Vec<String> {
        let mut found = Vec::new();
        for (kind, now) in &self.0 {
            let then = &before.0[kind];
            found.extend(now.difference(then).map(|it| format!("{kind} {it} is new")));
            // Others may end their own processes meanwhile.
            if !matches!(*kind, "process" | "network namespace with processes") {
                found.extend(then.difference(now).map(|it| format!("{kind} {it} has gone")));
            }
        }
        found
    }
}

fn processes_folders() -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.map(|it| it.path()).filter(|it| it.join("stat").is_file() && it.join("ns").is_dir())
}

/// The network namespaces that some process lives in: every process of a node is in one of its own.
fn network_namespaces() -> BTreeSet<String> {
    let name = |it: PathBuf| Some(fs::read_link(it.join("ns/net")).ok()?.to_string_lossy().into_owned());
    processes_folders().filter_map(name).collect()
}

/// Processes that a cluster is started with: they are outside of the nodes' namespaces.
fn processes() -> BTreeSet<String> {
    let names = ["nsenter", "unshare", crate::PROGRAM];
    let ours = |it: PathBuf| {
        let line = fs::read(it.join("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let name = Path::new(line.split(' ').next()?).file_name()?.to_str()?.to_owned();
        let pid = it.file_name()?.to_string_lossy().into_owned();
        let own = pid == std::process::id().to_string();
        (!own && names.contains(&name.as_str())).then(|| format!("{pid} {line}"))
    };
    processes_folders().filter_map(ours).collect()
}
