//! The state directory of a local cluster: ownership, lock and layout.
//!
//! Invariants: one `up` at a time, enforced by a file lock that the kernel releases when its holder exits; data of another cluster
//! or of a newer format is never changed; a rejected start leaves no files.
//!
//! ```text
//! up.lock          lock of `up`, with its process id
//! cluster.json     cluster id, name, specification
//! map.json         partition map (coordinator)
//! workers/<i>/     store of worker i
//! logs/            one log per process
//! owner.key        key of the owner, readable by its user only: clients that send it may name files of this machine
//! endpoints.json   processes and addresses, while running
//! ```

use crate::error::problem;
use anyhow::Context as _;
use engram_api::{Code, LearnerClusterSpec, Problem};
use engram_memory::ClusterId;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Format version of the JSON files.
pub(crate) const FORMAT: u32 = 1;

/// Returns the parent of all state directories: `$XDG_STATE_HOME/engram`, else `~/.local/state/engram`.
///
/// # Errors
/// Neither `XDG_STATE_HOME` nor `HOME` is set.
pub(crate) fn base() -> anyhow::Result<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")));
    state
        .map(|state| state.join("engram"))
        .ok_or_else(|| problem(Code::StateDirectoryUnusable, "neither HOME nor XDG_STATE_HOME is set; set --state-dir"))
}

/// Contents of `cluster.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Cluster {
    /// Version of the file format.
    pub(crate) format_version: u32,
    /// Cluster id, 32 hex digits.
    pub(crate) cluster: String,
    /// Cluster name.
    pub(crate) name: String,
    /// Number of memories at the last graceful stop.
    pub(crate) memories: u64,
    /// Specification at the last start.
    pub(crate) spec: LearnerClusterSpec,
}

impl Cluster {
    /// Returns the cluster id.
    ///
    /// # Errors
    /// The file is invalid.
    pub(crate) fn id(&self) -> anyhow::Result<ClusterId> {
        self.cluster.parse().ok().context("cluster.json: cluster is not 32 hex digits")
    }
}

/// A state directory, locked by this process.
#[derive(Debug)]
pub(crate) struct StateDir {
    folder: PathBuf,
    /// Released by the kernel when the process exits.
    _lock: Flock<File>,
    /// Topmost directory that was created.
    created: Option<PathBuf>,
    /// Whether the lock file was created.
    created_lock: bool,
    /// Whether `cluster.json` was written.
    is_saved: bool,
}

impl StateDir {
    /// Creates the directory if necessary and locks it.
    ///
    /// # Errors
    /// ENG-0401 if another process holds the lock, ENG-0405 if the directory cannot be used.
    pub(crate) fn hold(folder: &Path) -> anyhow::Result<Self> {
        let unusable = |error: &io::Error| {
            problem(
                Code::StateDirectoryUnusable,
                format!("failed to use state directory {}: {error}", folder.display()),
            )
        };
        let folder = std::path::absolute(folder).map_err(|error| unusable(&error))?;
        // The configuration files of the processes hold paths as JSON strings.
        if folder.to_str().is_none() {
            return Err(unusable(&io::Error::other("its path is not UTF-8")));
        }
        let created = folder.ancestors().take_while(|path| !path.exists()).last().map(Path::to_owned);
        fs::create_dir_all(&folder).map_err(|error| unusable(&error))?;
        let path = folder.join("up.lock");
        let created_lock = !path.exists();
        let opened = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
        let mut file = opened.map_err(|error| unusable(&error))?;
        let mut holder = String::new();
        // The contents are used in the error message only.
        let _ = file.read_to_string(&mut holder);
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            nix::errno::Errno::EWOULDBLOCK => {
                let message = format!("state directory {} is in use by process {}", folder.display(), holder.trim());
                Problem::new(Code::StateDirectoryInUse, message)
                    .help(format!("stop that process: engram down --state-dir {}", folder.display()))
                    .help("use another state directory: --state-dir DIR")
                    .into()
            }
            errno => unusable(&errno.into()),
        })?;
        let state = Self { folder, _lock: lock, created, created_lock, is_saved: false };
        let pid = format!("{}\n", std::process::id());
        let written = state._lock.set_len(0).and_then(|()| state._lock.write_all_at(pid.as_bytes(), 0));
        written.map_err(|error| unusable(&error))?;
        Ok(state)
    }

    /// Returns the path of the directory.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Reads `cluster.json`; `None` for a new directory.
    ///
    /// # Errors
    /// ENG-0404 for a newer format, ENG-0405 if it cannot be read, ENG-0403 if the directory contains other files.
    pub(crate) fn cluster(&self) -> anyhow::Result<Option<Cluster>> {
        let path = self.folder.join("cluster.json");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return self.check_empty().map(|()| None),
            Err(error) => {
                return Err(problem(
                    Code::StateDirectoryUnusable,
                    format!("failed to read {}: {error}", path.display()),
                ));
            }
        };
        check_format(&path, &text)?;
        let damaged = |error| format!("{} is damaged: {error}", path.display());
        let read = serde_json::from_str(&text);
        read.map(Some).map_err(|error| problem(Code::StateDirectoryUnusable, damaged(error)))
    }

    /// Rejects a directory with other files, such as a home directory.
    fn check_empty(&self) -> anyhow::Result<()> {
        let entries =
            fs::read_dir(&self.folder).with_context(|| format!("failed to list {}", self.folder.display()))?;
        for entry in entries {
            let name = entry?.file_name();
            if name != "up.lock" {
                let message = format!(
                    "state directory {} contains {} but no cluster.json; allowed: a new or empty directory",
                    self.folder.display(),
                    name.display()
                );
                return Err(problem(Code::OtherCluster, message));
            }
        }
        Ok(())
    }

    /// Writes `cluster.json`. From then on the directory is kept.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn save(&mut self, cluster: &Cluster) -> anyhow::Result<()> {
        write_json(&self.folder.join("cluster.json"), cluster)?;
        self.is_saved = true;
        for folder in ["logs", "workers", "config"] {
            let path = self.folder.join(folder);
            fs::create_dir_all(&path).map_err(|error| {
                problem(Code::StateDirectoryUnusable, format!("failed to create {}: {error}", path.display()))
            })?;
        }
        Ok(())
    }

    /// Creates the owner's key unless it exists.
    ///
    /// # Errors
    /// ENG-0405: the file cannot be written.
    pub(crate) fn create_owner_key(&self) -> anyhow::Result<()> {
        let path = owner_key(&self.folder);
        if fs::metadata(&path).is_ok_and(|file| file.len() > 0) {
            return Ok(());
        }
        let key = format!("{:032x}\n", rand::random::<u128>());
        let temporary = path.with_extension("tmp");
        let create = || {
            // Other modes would apply to a file left there.
            let _ = fs::remove_file(&temporary);
            let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&temporary)?;
            file.write_all(key.as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        create().map_err(|error: io::Error| {
            problem(Code::StateDirectoryUnusable, format!("failed to write {}: {error}", path.display()))
        })
    }

    /// Deletes the directory.
    pub(crate) fn delete(self) -> anyhow::Result<()> {
        fs::remove_dir_all(&self.folder).map_err(|error| {
            problem(Code::StateDirectoryUnusable, format!("failed to delete {}: {error}", self.folder.display()))
        })
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        if self.is_saved {
            return;
        }
        // A rejected start leaves no files. Only empty directories are removed.
        if self.created_lock {
            let _ = fs::remove_file(self.folder.join("up.lock"));
        }
        if let Some(topmost) = &self.created {
            for path in self.folder.ancestors().take_while(|path| path.starts_with(topmost)) {
                let _ = fs::remove_dir(path);
            }
        }
    }
}

/// Returns the path of the key that proves that a client can read the state directory.
pub(crate) fn owner_key(folder: &Path) -> PathBuf {
    folder.join("owner.key")
}

/// Returns the owner's key; empty if this user cannot read it.
pub(crate) fn read_owner_key(folder: &Path) -> String {
    fs::read_to_string(owner_key(folder)).unwrap_or_default().trim().to_owned()
}

/// Returns the path of the log of a process.
pub(crate) fn log(folder: &Path, process: &str) -> PathBuf {
    folder.join("logs").join(format!("{process}.log"))
}

/// Rejects a file of a newer format before it is parsed.
///
/// # Errors
/// ENG-0404.
pub(crate) fn check_format(path: &Path, text: &str) -> anyhow::Result<()> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Head {
        format_version: u32,
    }
    match serde_json::from_str::<Head>(text) {
        Ok(head) if head.format_version > FORMAT => Err(problem(
            Code::NewerFormat,
            format!(
                "{} has format version {}; this version supports up to {FORMAT}",
                path.display(),
                head.format_version
            ),
        )),
        // Other errors are reported by the caller, which parses the whole file.
        _ => Ok(()),
    }
}

/// Saves the number of workers of a running cluster, for its next start.
///
/// # Errors
/// The file cannot be read or written.
pub(crate) fn save_workers(folder: &Path, workers: u32) -> anyhow::Result<()> {
    let path = folder.join("cluster.json");
    let text = fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
    let mut cluster: Cluster = serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))?;
    cluster.spec.workers = workers;
    write_json(&path, &cluster)
}

/// Replaces a file atomically and durably.
///
/// # Errors
/// ENG-0501 if the disk is full, else ENG-0405.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    write(path, value, true)
}

/// Replaces a file atomically for concurrent readers, but not durably.
///
/// # Errors
/// As [`write_json`].
pub(crate) fn replace_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    write(path, value, false)
}

fn write(path: &Path, value: &impl Serialize, durably: bool) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value).context("failed to serialize JSON")? + "\n";
    let temporary = path.with_extension("json.tmp");
    let write = || -> io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(text.as_bytes())?;
        if durably {
            file.sync_all()?;
        }
        fs::rename(&temporary, path)?;
        if durably { File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all() } else { Ok(()) }
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&temporary);
        let code = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::DiskFull,
            _ => Code::StateDirectoryUnusable,
        };
        problem(code, format!("failed to write {}: {error}", path.display()))
    })
}
