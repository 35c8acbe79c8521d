//! The state directory of a local cluster: whose it is, who holds it, what lies where.
//!
//! Invariants: one `up` at a time (a lock that the kernel lets go of when its holder ends, however it ends); nothing of
//! another cluster or of a newer version is changed; a start that is refused leaves nothing behind.
//!
//! ```text
//! up.lock          held by `up`; its process id
//! cluster.json     cluster id, name, specification at creation
//! map.json         the partition map (coordinator)
//! workers/<i>/     the store of worker i
//! logs/            a file per process
//! endpoints.json   while it runs
//! ```

use crate::error::problem;
use anyhow::Context as _;
use engram_api::{Code, LearnerClusterSpec, Problem};
use engram_memory::ClusterId;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Version of the files that the command line keeps here.
pub(crate) const FORMAT: u32 = 1;

/// The folder of all local clusters: `$XDG_STATE_HOME/engram`, else `~/.local/state/engram`.
///
/// # Errors
/// Neither `XDG_STATE_HOME` nor `HOME` is set.
pub(crate) fn base() -> anyhow::Result<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")));
    state.map(|state| state.join("engram")).ok_or_else(|| {
        problem(Code::StateDirectoryUnusable, "neither HOME nor XDG_STATE_HOME is set; name a --state-dir")
    })
}

/// What a cluster was created with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Cluster {
    /// Version of this structure.
    pub(crate) format_version: u32,
    /// The cluster, 32 hex digits.
    pub(crate) cluster: String,
    /// Its name.
    pub(crate) name: String,
    /// Memories held when it was last stopped in order.
    pub(crate) memories: u64,
    /// Its specification, as of its last start.
    pub(crate) spec: LearnerClusterSpec,
}

impl Cluster {
    /// The cluster.
    ///
    /// # Errors
    /// The file was changed by hand.
    pub(crate) fn id(&self) -> anyhow::Result<ClusterId> {
        self.cluster.parse().ok().context("cluster.json: cluster is not 32 hex digits")
    }
}

/// A state directory, held by this process.
#[derive(Debug)]
pub(crate) struct StateDir {
    folder: PathBuf,
    /// The kernel lets go of it when the process ends.
    _lock: Flock<File>,
    /// The topmost folder that was made for it.
    created: Option<PathBuf>,
    /// Whether the lock file was made for it.
    made_lock: bool,
    /// Whether anything was written that a later start needs.
    kept: bool,
}

impl StateDir {
    /// Makes it where it is not there, and takes its lock.
    ///
    /// # Errors
    /// ENG-0401 where another process holds it, ENG-0405 where it cannot be used.
    pub(crate) fn hold(folder: &Path) -> anyhow::Result<Self> {
        let unusable = |error: &io::Error| {
            problem(
                Code::StateDirectoryUnusable,
                format!("failed to use state directory {}: {error}", folder.display()),
            )
        };
        let folder = std::path::absolute(folder).map_err(|error| unusable(&error))?;
        let created = folder.ancestors().take_while(|path| !path.exists()).last().map(Path::to_owned);
        fs::create_dir_all(&folder).map_err(|error| unusable(&error))?;
        let path = folder.join("up.lock");
        let made_lock = !path.exists();
        let opened = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
        let mut file = opened.map_err(|error| unusable(&error))?;
        let mut holder = String::new();
        // What stands there is for the message alone; the lock is the kernel's.
        let _ = file.read_to_string(&mut holder);
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            nix::errno::Errno::EWOULDBLOCK => {
                let message = format!("state directory {} is in use by process {}", folder.display(), holder.trim());
                Problem::new(Code::StateDirectoryInUse, message)
                    .help(format!("stop it:               engram down --state-dir {}", folder.display()))
                    .help("or start another one:  --state-dir DIR")
                    .into()
            }
            errno => unusable(&errno.into()),
        })?;
        let held = Self { folder, _lock: lock, created, made_lock, kept: false };
        let note = format!("{}\n", std::process::id());
        let noted = held._lock.set_len(0).and_then(|()| held._lock.write_all_at(note.as_bytes(), 0));
        noted.map_err(|error| unusable(&error))?;
        Ok(held)
    }

    /// The folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it was created with; `None` for a new one.
    ///
    /// # Errors
    /// ENG-0404 for a newer version, ENG-0405 where it cannot be read, ENG-0403 where it holds something else.
    pub(crate) fn cluster(&self) -> anyhow::Result<Option<Cluster>> {
        let path = self.folder.join("cluster.json");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return self.nothing_foreign().map(|()| None),
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

    /// A folder without `cluster.json` is taken only if nothing is in it: it may be somebody's home.
    fn nothing_foreign(&self) -> anyhow::Result<()> {
        let entries =
            fs::read_dir(&self.folder).with_context(|| format!("failed to list {}", self.folder.display()))?;
        for entry in entries {
            let name = entry?.file_name();
            if name != "up.lock" {
                let message = format!(
                    "state directory {} has no cluster.json, but holds {}; allowed: a new or an empty folder",
                    self.folder.display(),
                    name.display()
                );
                return Err(problem(Code::OtherCluster, message));
            }
        }
        Ok(())
    }

    /// Writes what the cluster was created with; from here on the folder stays.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn keep(&mut self, cluster: &Cluster) -> anyhow::Result<()> {
        write_json(&self.folder.join("cluster.json"), cluster)?;
        self.kept = true;
        for folder in ["logs", "workers", "config"] {
            let path = self.folder.join(folder);
            fs::create_dir_all(&path).map_err(|error| {
                problem(Code::StateDirectoryUnusable, format!("failed to make {}: {error}", path.display()))
            })?;
        }
        Ok(())
    }

    /// Deletes everything in it.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn delete(self) -> anyhow::Result<()> {
        fs::remove_dir_all(&self.folder).map_err(|error| {
            problem(Code::StateDirectoryUnusable, format!("failed to delete {}: {error}", self.folder.display()))
        })
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // A start that was refused leaves nothing behind. Only empty folders go.
        if self.made_lock {
            let _ = fs::remove_file(self.folder.join("up.lock"));
        }
        if let Some(topmost) = &self.created {
            for path in self.folder.ancestors().take_while(|path| path.starts_with(topmost)) {
                let _ = fs::remove_dir(path);
            }
        }
    }
}

/// The log of a process.
pub(crate) fn log(folder: &Path, process: &str) -> PathBuf {
    folder.join("logs").join(format!("{process}.log"))
}

/// Refuses a file of a newer version, before anything else of it is looked at.
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
            format!("{} has format version {}; this version knows up to {FORMAT}", path.display(), head.format_version),
        )),
        // What is not even a head is told by whoever reads the rest.
        _ => Ok(()),
    }
}

/// Notes that a cluster that runs has so many workers now, for its next start.
///
/// # Errors
/// The file cannot be read or written.
pub(crate) fn note_workers(folder: &Path, workers: u32) -> anyhow::Result<()> {
    let path = folder.join("cluster.json");
    let text = fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
    let mut cluster: Cluster = serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))?;
    cluster.spec.workers = workers;
    write_json(&path, &cluster)
}

/// Writes a file so that after a crash the old one is there or the new one.
///
/// # Errors
/// ENG-0501 where the disk is full, ENG-0405 where the file system refuses otherwise.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    write(path, value, true)
}

/// Writes a file in one step for whoever reads it meanwhile; after a crash of the machine it may be damaged or gone.
///
/// # Errors
/// As [`write_json`].
pub(crate) fn replace_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    write(path, value, false)
}

fn write(path: &Path, value: &impl Serialize, durably: bool) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value).context("failed to write JSON")? + "\n";
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
