//! Where the containerds of all nodes keep images and containers: a file system in memory.
//!
//! Each start of a container is several transactions of a containerd, each with an fsync. Real nodes have a disk each; here all nodes
//! share one, and one node's fsync makes those of all others wait, those of the workers under test among them (30 to 110 ms each time
//! pods start, measured). What workers write, in volumes and in folders of their pods, stays on the disk.

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount, umount};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Mounts it for this machine, not for a node: a node that is killed comes back with its images.
pub(crate) fn mount_at(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("mode=0711"))
        .with_context(|| format!("failed to mount a tmpfs on {}", folder.display()))
}

/// Gives its memory back, where it is mounted.
pub(crate) fn unmount(folder: &Path) -> Result<()> {
    let device = |it: &Path| Some(fs::metadata(it).ok()?.dev());
    let mounted = device(folder).is_some_and(|it| Some(it) != folder.parent().and_then(device));
    if mounted {
        umount(folder).with_context(|| format!("failed to unmount {}", folder.display()))?;
    }
    Ok(())
}
