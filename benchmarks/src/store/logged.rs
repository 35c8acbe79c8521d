//! Store with a log: durable epochs, and recovery.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use engram_kernels::Cpu;
use engram_memory::{ClusterId, PartitionId, Record, Settings, Term};
use engram_store::disk::File;
use engram_store::{CommittedWrite, Disk, Engine, FileDisk, Handle, Options, Store, SystemClock};
use tempfile::TempDir;

use super::{Epochs, SHAPE, check_epoch, inserts};
use crate::measure;
use crate::population::PARTITIONS;
use crate::row::{Figure, Row};

/// Limit of one store response, exceeded only by a hang.
const DEADLINE: Duration = Duration::from_secs(120);

/// Preallocated bytes for bare writes, like a log segment.
const BARE_BYTES: u64 = 64 << 20;

/// A store with threads and its own folder.
pub(super) struct Logged {
    handle: Handle,
    threads: usize,
    folder: TempDir,
}

/// Measures one size.
pub(super) fn logged_rows(memories: u32, threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let store = Logged::create_filled(memories, threads, scratch)?;
    let epoch = store.epoch(memories)?;
    let (store, from_log) = store.recovery(memories)?;
    store.snapshot()?;
    let (store, from_snapshots) = store.recovery(memories)?;
    store.end()?;
    Ok(vec![
        epoch,
        Row::lower("recovery from the log alone: inserts and the epochs above", memories, "ms", from_log),
        Row::lower("recovery from snapshots, with the following log read and checked", memories, "ms", from_snapshots),
    ])
}

impl Logged {
    pub(super) fn create_filled(memories: u32, threads: usize, scratch: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("engram-bench-").tempdir_in(scratch);
        let folder = folder.with_context(|| format!("failed to create a folder in {}", scratch.display()))?;
        let logged = Self { handle: start(open(folder.path(), threads)?)?, threads, folder };
        let mut created = 0;
        for batch in inserts(memories) {
            let committed = logged.write(batch)?;
            created += committed.iter().map(|it| super::applied(&it.reply)).sum::<u64>();
        }
        ensure!(created == u64::from(memories), "{created} of {memories} memories were inserted");
        Ok(logged)
    }

    fn write(&self, records: Vec<(PartitionId, Record)>) -> Result<Vec<CommittedWrite>> {
        let answers = wait(|done| self.handle.write(records, done))?;
        Ok(answers.into_iter().collect::<Result<_, _>>()?)
    }

    /// Measures epochs alternately with bare writes and syncs of as many bytes.
    fn epoch(&self, memories: u32) -> Result<Row> {
        let mut epochs = Epochs::new(memories)?;
        let mut turn = || {
            // The store takes ownership of records, as it does for a request.
            let committed = self.write(epochs.next().to_vec())?;
            check_epoch(memories, committed.iter().map(|it| &it.reply))
        };
        let before = self.handle.stats().batch_bytes.sum;
        turn()?;
        let bytes = vec![0x5a; (self.handle.stats().batch_bytes.sum - before) as usize];
        let mut bare = Bare::create(&FileDisk::new(self.folder.path().join("bare"))?)?;
        let (ours, floor) = measure::side_by_side(turn, || bare.write(&bytes))?;
        let title = "learning epoch with log: a record per partition, one fdatasync, then applied";
        let name = format!("write and fdatasync of {} KiB", bytes.len() >> 10);
        Ok(Row::lower(title, memories, "ms", ours).with_peer(&name, floor))
    }

    fn snapshot(&self) -> Result<()> {
        wait(|done| -> Result<()> {
            self.handle.snapshot_all(None, done);
            Ok(())
        })??;
        Ok(())
    }

    /// Stops the store. Its folder is removed when the returned value is dropped, after all writers have stopped.
    pub(super) fn end(self) -> Result<TempDir> {
        wait(|done| -> Result<()> {
            self.handle.stop(done);
            Ok(())
        })??;
        Ok(self.folder)
    }

    /// Stops the store and measures opening it.
    fn recovery(self, memories: u32) -> Result<(Self, Figure)> {
        let threads = self.threads;
        let folder = self.end()?;
        let figure = measure::milliseconds(|| {
            let (store, recovered) = open(folder.path(), threads)?;
            ensure!(recovered == u64::from(memories), "{recovered} of {memories} memories were recovered");
            drop(store);
            Ok(())
        })?;
        let handle = start(open(folder.path(), threads)?)?;
        Ok((Self { handle, threads, folder }, figure))
    }
}

/// Opens the store in `folder` and returns the number of recovered memories.
fn open(folder: &Path, threads: usize) -> Result<(Store, u64)> {
    let disk = Arc::new(FileDisk::new(folder)?);
    let options = Options::new(ClusterId(1), SHAPE, Settings::default());
    let (store, recovery) = Store::open(disk, Arc::new(SystemClock), Box::new(Cpu::new(threads)), options)?;
    Ok((store, recovery.memories))
}

/// Starts a store that serves every partition.
fn start((store, _): (Store, u64)) -> Result<Handle> {
    let next = |partition| (partition, Term(store.promised(partition).0 + 1));
    let terms = (0..PARTITIONS).map(PartitionId).map(next).collect();
    let handle =
        Engine::start(store, Box::new(engram_store::NoPeers)).context("failed to start the threads of the store")?;
    let activated = wait(|done| -> Result<()> {
        handle.activate(terms, done);
        Ok(())
    })?;
    activated.into_iter().collect::<Result<(), _>>()?;
    Ok(handle)
}

/// Waits for an engine's callback.
fn wait<T: Send + 'static, E: Into<anyhow::Error>>(
    ask: impl FnOnce(Box<dyn FnOnce(T) + Send>) -> Result<(), E>,
) -> Result<T> {
    let (answer, answered) = channel();
    // The receiver may have timed out.
    ask(Box::new(move |value| drop(answer.send(value)))).map_err(Into::into)?;
    answered.recv_timeout(DEADLINE).map_err(|error| match error {
        RecvTimeoutError::Timeout => anyhow!("the store did not respond within {} s", DEADLINE.as_secs()),
        RecvTimeoutError::Disconnected => anyhow!("the store stopped"),
    })
}

/// A preallocated file that is written and synced like a log.
struct Bare {
    file: Box<dyn File>,
    offset: u64,
}

impl Bare {
    fn create(disk: &FileDisk) -> Result<Self> {
        let file = disk.create("bare").context("failed to create the file for bare writes")?;
        file.preallocate(BARE_BYTES).context("failed to preallocate the file for bare writes")?;
        Ok(Self { file, offset: 0 })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if self.offset + bytes.len() as u64 > BARE_BYTES {
            self.offset = 0;
        }
        self.file.write_at(self.offset, bytes).context("failed to write")?;
        self.offset += bytes.len() as u64;
        self.file.sync_data().context("failed to sync")
    }
}
