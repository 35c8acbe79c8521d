//! Free space of the disk of a worker, as reported to the coordinator.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time between measurements: the operating system announces no change.
const INTERVAL: Duration = Duration::from_secs(1);
/// Free bytes below which a disk counts as full, on disks of a GiB and more; a sixteenth of smaller ones.
const MIN_FREE_BYTES: u64 = 64 << 20;

/// Whether the disk has almost no free space. It counts as full until twice the limit is free again.
#[derive(Default)]
pub(crate) struct DiskSpace {
    is_full: Arc<AtomicBool>,
    is_measuring: Arc<AtomicBool>,
    measured_at: Option<Instant>,
}

impl DiskSpace {
    /// Returns the result of the last measurement, and starts another if it is due. Never waits for the disk.
    pub(crate) fn is_full(&mut self, folder: &Path) -> bool {
        let is_due = self.measured_at.is_none_or(|at| at.elapsed() >= INTERVAL);
        if is_due && !self.is_measuring.swap(true, Ordering::AcqRel) {
            self.measured_at = Some(Instant::now());
            let (is_full, is_measuring, folder) =
                (Arc::clone(&self.is_full), Arc::clone(&self.is_measuring), folder.to_owned());
            // Not a task: a runtime has no part in it, and so a simulated one gives the same trace.
            let measure = move || {
                if let Ok(disk) = nix::sys::statvfs::statvfs(&folder) {
                    let bytes = |blocks: u64| blocks.saturating_mul(disk.fragment_size());
                    let was_full = is_full.load(Ordering::Acquire);
                    let now_full = counts_as_full(was_full, bytes(disk.blocks()), bytes(disk.blocks_available()));
                    is_full.store(now_full, Ordering::Release);
                    if now_full != was_full {
                        let folder = folder.display();
                        tracing::warn!(%folder, full = now_full, "free disk space: this worker takes new replicas only while it has some");
                    }
                }
                is_measuring.store(false, Ordering::Release);
            };
            if std::thread::Builder::new().name("disk-space".to_owned()).spawn(measure).is_err() {
                self.is_measuring.store(false, Ordering::Release);
            }
        }
        self.is_full.load(Ordering::Acquire)
    }
}

/// Returns whether a disk of a size, with so many free bytes, counts as full.
fn counts_as_full(was_full: bool, size: u64, free: u64) -> bool {
    let limit = MIN_FREE_BYTES.min(size / 16);
    free < if was_full { 2 * limit } else { limit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disk_has_space_again_at_twice_the_limit() {
        let (large, small) = (100 << 30, 160 << 20);
        assert!(!counts_as_full(false, large, 64 << 20) && counts_as_full(false, large, (64 << 20) - 1));
        assert!(counts_as_full(true, large, (128 << 20) - 1) && !counts_as_full(true, large, 128 << 20));
        assert!(!counts_as_full(false, small, 10 << 20) && counts_as_full(false, small, (10 << 20) - 1));
    }
}
