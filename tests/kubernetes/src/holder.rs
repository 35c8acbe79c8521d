//! The process that is a node: the first in its pid namespace, which owns all the others.

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::sethostname;
use std::fs;
use std::path::Path;

/// Folders that programs of a node write to by fixed names: each node gets its own, in memory. Otherwise nodes would share
/// the socket of device plugins and the network's cache, and would leave names and links behind.
pub(crate) const PRIVATE: [&str; 4] = ["/run", "/var/lib/kubelet", "/var/lib/cni", "/var/log/containers"];

/// Makes the namespaces that this process was started in a node's, says so by writing the file `ready`, and waits to be ended.
///
/// # Errors
/// A mount is refused, or the file cannot be written.
pub fn hold(name: &str, ready: &Path) -> Result<()> {
    let none = None::<&str>;
    // Volumes that kubelet mounts have to appear in containers.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SHARED, none).context("failed to share mounts")?;
    for folder in PRIVATE {
        mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), none)
            .with_context(|| format!("failed to mount a tmpfs on {folder}"))?;
    }
    fs::create_dir_all("/run/netns")?;
    sethostname(name)?;
    let signals = SigSet::from_iter([Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block()?;
    fs::write(ready, name).with_context(|| format!("failed to write {}", ready.display()))?;
    wait(&signals)
}

/// First process of a pod: waits, reaps, ends at SIGTERM.
///
/// # Errors
/// Signals cannot be waited for.
pub fn pause() -> Result<()> {
    let signals = SigSet::from_iter([Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block()?;
    wait(&signals)
}

fn wait(signals: &SigSet) -> Result<()> {
    while signals.wait()? == Signal::SIGCHLD {
        // One signal may stand for several children.
        while !matches!(waitpid(None, Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive) | Err(_)) {}
    }
    Ok(())
}
