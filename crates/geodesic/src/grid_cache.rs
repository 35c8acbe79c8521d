//! Christoffel grids in the files of a folder, one per metric version and shape.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Error;
use crate::grid::{ChristoffelGrid, GridSource};
use crate::grid_file::GridFile;
use crate::metric::Metric;

/// Distinguishes the unfinished files of the threads of a process.
static UNFINISHED: AtomicU64 = AtomicU64::new(0);

/// A folder of encoded grids. Processes may share it: a file appears whole, and is never changed.
#[derive(Debug, Clone)]
pub struct GridCache {
    folder: PathBuf,
    blocks: usize,
}

fn failed(what: &str, path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::File { action: format!("{what} {}", path.display()), problem: error.to_string() }
}

impl GridCache {
    /// The cache in `folder`, which must exist. Each opened grid keeps at most `blocks` blocks in memory.
    pub fn new(folder: impl Into<PathBuf>, blocks: usize) -> Self {
        Self { folder: folder.into(), blocks }
    }

    /// Path of the grid of a metric version.
    pub fn path(&self, version: u128, rows: usize, columns: usize) -> PathBuf {
        self.folder.join(format!("christoffel-{version:032x}-{rows}x{columns}.grid"))
    }

    /// Opens the grid of `metric` with `rows` uniform knots in c and `columns` in l, and whether the folder had it. A file
    /// that is absent, or whose index is damaged or of another metric, is built and written again.
    ///
    /// # Errors
    /// If the shape is out of range, or the file cannot be read or written.
    pub fn open(&self, metric: &dyn Metric, rows: usize, columns: usize) -> Result<(GridFile<File>, bool), Error> {
        let path = self.path(metric.version(), rows, columns);
        match self.read(&path) {
            Ok(Some(found)) if found.check_version(metric).is_ok() => return Ok((found, true)),
            Ok(_) | Err(Error::Encoding { .. } | Error::Order { .. }) => {}
            Err(error) => return Err(error),
        }
        let grid = ChristoffelGrid::build(metric, rows, columns)?;
        self.write(&path, &grid.encode())?;
        let written = self.read(&path)?;
        let absent = || failed("open", &path, &"it was removed after it was written");
        Ok((written.ok_or_else(absent)?, false))
    }

    fn read(&self, path: &Path) -> Result<Option<GridFile<File>>, Error> {
        match File::open(path) {
            Ok(file) => GridFile::open(file, self.blocks).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("open", path, &error)),
        }
    }

    /// Writes a file under another name and renames it, so that no reader sees a part of it.
    fn write(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        let number = UNFINISHED.fetch_add(1, Ordering::Relaxed);
        let unfinished = self.folder.join(format!(".unfinished-{}-{number}", std::process::id()));
        let written = File::create(&unfinished).and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&unfinished, path)
        });
        written.map_err(|error| {
            // The first error matters; what is left over is never read.
            let _ = fs::remove_file(&unfinished);
            failed("write", path, &error)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::MetricNetwork;

    #[test]
    fn a_hit_equals_a_rebuild_and_damaged_or_stale_files_are_built_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = GridCache::new(folder.path(), 2);
        let mut metric = MetricNetwork::stress(7);
        let built = ChristoffelGrid::build(&metric, 30, 9).unwrap();
        let open = |metric: &MetricNetwork| {
            let (file, is_hit) = cache.open(metric, 30, 9).unwrap();
            (file.load().unwrap(), is_hit)
        };
        assert_eq!(open(&metric), (built.clone(), false));
        assert_eq!(open(&metric), (built.clone(), true));

        let path = cache.path(metric.version(), 30, 9);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..100]).unwrap();
        assert_eq!(open(&metric), (built, false), "a part of a file");
        assert_eq!(fs::read(&path).unwrap(), whole);

        let before = metric.version();
        let weight = &mut metric.parameters_mut()[40];
        *weight = weight.next_up();
        assert_eq!(open(&metric), (ChristoffelGrid::build(&metric, 30, 9).unwrap(), false), "another metric");
        // Under the name of another metric.
        fs::copy(cache.path(before, 30, 9), cache.path(metric.version(), 30, 9)).unwrap();
        assert!(!open(&metric).1);
        let files = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(files, 2, "no unfinished file is left");
        let absent = GridCache::new(folder.path().join("absent"), 1).open(&metric, 30, 9);
        assert!(matches!(&absent, Err(Error::File { .. })) && absent.unwrap_err().to_string().contains("absent"));
    }
}
