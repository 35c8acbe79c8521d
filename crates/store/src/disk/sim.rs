//! An in-memory directory with faults derived from a seed.
//!
//! Keeps two states of everything: what a reader sees and what would survive a power loss. Between two syncs any subset of the
//! written sectors may survive, including torn ones; of the changed names a prefix survives, as in journaling file systems. A
//! failed sync discards what it should have written, as Linux does: a later sync succeeds without covering it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use engram_memory::mix64;
use parking_lot::{Mutex, MutexGuard};

use super::{Disk, File, Lock, LockError};

/// Unit that a device writes at once; a torn sector is a fault that checksums must catch.
const SECTOR: usize = 512;

/// An in-memory directory. Clones share it.
#[derive(Clone)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
}

struct State {
    names: BTreeMap<String, u64>,
    durable_names: BTreeMap<String, u64>,
    unsynced_names: Vec<NameChange>,
    inodes: BTreeMap<u64, Inode>,
    next_inode: u64,
    draw: Draw,
    /// Incremented at every power loss, which invalidates open handles.
    boot: u64,
    locked: bool,
    capacity_bytes: Option<u64>,
    changes_left: Option<u64>,
    failing_syncs: u32,
    stale: Option<Vec<u8>>,
}

enum NameChange {
    Set(String, u64),
    Rename(String, String),
    Remove(String),
}

#[derive(Default)]
struct Inode {
    now: Vec<u8>,
    durable: Vec<u8>,
    dirty: BTreeSet<usize>,
}

/// Pseudo-random numbers from a seed.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix64(self.0)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

impl SimDisk {
    /// Creates an empty directory whose faults and random numbers derive from `seed`.
    pub fn new(seed: u64) -> Self {
        let state = State {
            names: BTreeMap::new(),
            durable_names: BTreeMap::new(),
            unsynced_names: Vec::new(),
            inodes: BTreeMap::new(),
            next_inode: 0,
            draw: Draw(seed),
            boot: 0,
            locked: false,
            capacity_bytes: None,
            changes_left: None,
            failing_syncs: 0,
            stale: None,
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Simulates a power loss: unsynced data survives in part, open handles become invalid, the lock is released, and planned
    /// faults end.
    pub fn lose_power(&self) {
        self.state().lose_power();
    }

    /// Kills every process that uses the directory without a power loss: everything written remains.
    pub fn kill(&self) {
        let mut state = self.state();
        state.boot += 1;
        state.locked = false;
        state.changes_left = None;
    }

    /// Allows `count` more changes (writes, syncs, renames); every later one fails, as if the process had been killed.
    pub fn stop_after(&self, count: u64) {
        self.state().changes_left = Some(count);
    }

    /// Makes the next `count` file syncs fail with EIO.
    pub fn fail_syncs(&self, count: u32) {
        self.state().failing_syncs = count;
    }

    /// Limits the total size of all files; `None` = no limit.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.state().capacity_bytes = bytes;
    }

    /// Makes preallocated space contain data of removed files instead of zeros.
    pub fn show_stale_bytes(&self) {
        self.state().stale.get_or_insert_default();
    }

    /// Returns the content of a file as a reader sees it.
    ///
    /// # Panics
    /// When there is no such file.
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        let state = self.state();
        state.inodes[&state.names[name]].now.clone()
    }

    /// Creates or replaces a file, durable at once.
    pub fn put(&self, name: &str, bytes: &[u8]) {
        let mut state = self.state();
        let inode = state.next_inode;
        state.next_inode += 1;
        state.inodes.insert(inode, Inode { now: bytes.to_vec(), durable: bytes.to_vec(), dirty: BTreeSet::new() });
        state.names.insert(name.to_owned(), inode);
        state.durable_names.insert(name.to_owned(), inode);
    }

    /// Flips one bit of a file, both durable and as seen by readers.
    ///
    /// # Panics
    /// When there is no such file or bit.
    pub fn flip_bit(&self, name: &str, bit: u64) {
        let mut state = self.state();
        let inode = state.names[name];
        let inode = state.inodes.get_mut(&inode).expect("names point to inodes");
        let (byte, mask) = ((bit / 8) as usize, 1 << (bit % 8));
        inode.now[byte] ^= mask;
        if let Some(byte) = inode.durable.get_mut(byte) {
            *byte ^= mask;
        }
    }

    /// Copies the directory, with all files durable and faults from `seed`.
    pub fn fork(&self, seed: u64) -> Self {
        let copy = Self::new(seed);
        let state = self.state();
        for (name, inode) in &state.names {
            copy.put(name, &state.inodes[inode].now);
        }
        copy
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    fn lose_power(&mut self) {
        self.boot += 1;
        self.locked = false;
        self.changes_left = None;
        self.failing_syncs = 0;
        let survives = self.draw.below(self.unsynced_names.len() as u64 + 1) as usize;
        for change in std::mem::take(&mut self.unsynced_names).into_iter().take(survives) {
            apply(&mut self.durable_names, change);
        }
        self.names = self.durable_names.clone();
        let Self { inodes, names, draw, .. } = self;
        inodes.retain(|inode, _| names.values().any(|named| named == inode));
        for inode in inodes.values_mut() {
            inode.lose_power(draw);
        }
    }

    /// Counts one change against the allowed number.
    fn change(&mut self, boot: u64) -> io::Result<()> {
        self.alive(boot)?;
        match &mut self.changes_left {
            Some(0) => Err(io::Error::other("the process was killed here")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn alive(&self, boot: u64) -> io::Result<()> {
        if boot == self.boot { Ok(()) } else { Err(io::Error::other("this handle belongs to a dead process")) }
    }

    fn inode(&mut self, inode: u64) -> &mut Inode {
        self.inodes.get_mut(&inode).expect("open files keep their inode until power is lost")
    }

    /// Fails if growth by `more` bytes does not fit.
    fn take_space(&self, more: u64) -> io::Result<()> {
        let Some(capacity) = self.capacity_bytes else { return Ok(()) };
        let used: u64 = self.names.values().map(|inode| self.inodes[inode].now.len() as u64).sum();
        if used + more > capacity { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

fn apply(names: &mut BTreeMap<String, u64>, change: NameChange) {
    match change {
        NameChange::Set(name, inode) => {
            names.insert(name, inode);
        }
        NameChange::Rename(from, to) => {
            if let Some(inode) = names.remove(&from) {
                names.insert(to, inode);
            }
        }
        NameChange::Remove(name) => {
            names.remove(&name);
        }
    }
}

impl Inode {
    fn touch(&mut self, from: usize, to: usize) {
        self.dirty.extend(from / SECTOR..to.div_ceil(SECTOR));
    }

    fn sync(&mut self) {
        self.durable.resize(self.now.len(), 0);
        for sector in std::mem::take(&mut self.dirty) {
            let from = sector * SECTOR;
            let to = (from + SECTOR).min(self.now.len());
            if from < to {
                self.durable[from..to].copy_from_slice(&self.now[from..to]);
            }
        }
    }

    fn lose_power(&mut self, draw: &mut Draw) {
        if self.now.len() != self.durable.len() && draw.below(2) == 0 {
            self.durable.resize(self.now.len(), 0);
        }
        for sector in std::mem::take(&mut self.dirty) {
            let from = sector * SECTOR;
            let kept = match draw.below(8) {
                0..=3 => 0,
                4..=6 => SECTOR,
                _ => draw.below(SECTOR as u64) as usize,
            };
            let to = (from + kept).min(self.now.len()).min(self.durable.len());
            if from < to {
                self.durable[from..to].copy_from_slice(&self.now[from..to]);
            }
        }
        self.now.clone_from(&self.durable);
    }
}

impl Disk for SimDisk {
    fn create(&self, name: &str) -> io::Result<Box<dyn File>> {
        let mut state = self.state();
        let boot = state.boot;
        state.change(boot)?;
        if state.names.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let inode = state.next_inode;
        state.next_inode += 1;
        state.inodes.insert(inode, Inode::default());
        state.names.insert(name.to_owned(), inode);
        state.unsynced_names.push(NameChange::Set(name.to_owned(), inode));
        Ok(Box::new(SimFile { disk: self.clone(), inode, boot }))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn File>> {
        let state = self.state();
        let inode = *state.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(Box::new(SimFile { disk: self.clone(), inode, boot: state.boot }))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.state().names.keys().cloned().collect())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.state();
        let boot = state.boot;
        state.change(boot)?;
        let inode = state.names.remove(from).ok_or(io::ErrorKind::NotFound)?;
        state.names.insert(to.to_owned(), inode);
        state.unsynced_names.push(NameChange::Rename(from.to_owned(), to.to_owned()));
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.state();
        let boot = state.boot;
        state.change(boot)?;
        let inode = state.names.remove(name).ok_or(io::ErrorKind::NotFound)?;
        let removed = state.inodes[&inode].now.clone();
        if let Some(stale) = &mut state.stale {
            *stale = removed;
        }
        state.unsynced_names.push(NameChange::Remove(name.to_owned()));
        Ok(())
    }

    fn sync_dir(&self) -> io::Result<()> {
        let mut state = self.state();
        let boot = state.boot;
        state.change(boot)?;
        state.unsynced_names.clear();
        state.durable_names = state.names.clone();
        Ok(())
    }

    fn lock(&self) -> Result<Lock, LockError> {
        let mut state = self.state();
        if state.locked {
            return Err(LockError::Held { pid: Some(std::process::id()) });
        }
        state.locked = true;
        Ok(Lock(Box::new(SimLock { disk: self.clone(), boot: state.boot })))
    }

    fn random(&self) -> u128 {
        let mut state = self.state();
        u128::from(state.draw.next()) << 64 | u128::from(state.draw.next())
    }

    fn describe(&self, name: &str) -> String {
        format!("sim/{name}")
    }
}

struct SimLock {
    disk: SimDisk,
    boot: u64,
}

impl Drop for SimLock {
    fn drop(&mut self) {
        let mut state = self.disk.state();
        if state.boot == self.boot {
            state.locked = false;
        }
    }
}

struct SimFile {
    disk: SimDisk,
    inode: u64,
    boot: u64,
}

impl File for SimFile {
    fn len(&self) -> io::Result<u64> {
        let mut state = self.disk.state();
        state.alive(self.boot)?;
        Ok(state.inode(self.inode).now.len() as u64)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut state = self.disk.state();
        state.alive(self.boot)?;
        let offset = offset as usize;
        let content = state.inode(self.inode).now.get(offset..offset + bytes.len());
        bytes.copy_from_slice(content.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.disk.state();
        state.change(self.boot)?;
        let (from, to) = (offset as usize, offset as usize + bytes.len());
        let grows = to.saturating_sub(state.inode(self.inode).now.len());
        state.take_space(grows as u64)?;
        let inode = state.inode(self.inode);
        if grows > 0 {
            inode.now.resize(to, 0);
        }
        inode.now[from..to].copy_from_slice(bytes);
        inode.touch(from, to);
        Ok(())
    }

    fn preallocate(&self, bytes: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        state.change(self.boot)?;
        let len = state.inode(self.inode).now.len();
        let bytes = bytes as usize;
        if bytes <= len {
            return Ok(());
        }
        state.take_space((bytes - len) as u64)?;
        let stale = state.stale.clone().unwrap_or_default();
        let inode = state.inode(self.inode);
        inode.now.resize(bytes, 0);
        if len < stale.len().min(bytes) {
            let to = stale.len().min(bytes);
            inode.now[len..to].copy_from_slice(&stale[len..to]);
            inode.touch(len, to);
        }
        Ok(())
    }

    fn truncate(&self, bytes: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        state.change(self.boot)?;
        state.inode(self.inode).now.truncate(bytes as usize);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.disk.state();
        state.change(self.boot)?;
        if state.failing_syncs > 0 {
            state.failing_syncs -= 1;
            state.inode(self.inode).dirty.clear();
            return Err(io::Error::from_raw_os_error(nix::libc::EIO));
        }
        state.inode(self.inode).sync();
        Ok(())
    }
}
