//! An in-memory store that targets start from.

use engram_kernels::Cpu;
use engram_memory::{ClusterId, FeatureShape, FeatureType, Law, Ordinal, PartitionId, Settings, Shape};
use engram_store::{Error, ManualClock, Options, Origin, Recovery, SimDisk, Store};
use std::sync::{Arc, LazyLock};

/// The only partition.
pub const P: PartitionId = PartitionId(0);
const FEATURES: FeatureShape = FeatureShape { dimension: 2, dtype: FeatureType::F16 };
const SHAPE: Shape = Shape { partitions: 1, law: Law::Linear, features: FEATURES };

/// A disk with an identity and an empty log, from a store that was stopped cleanly.
static EMPTY: LazyLock<SimDisk> = LazyLock::new(|| {
    let disk = SimDisk::new(1);
    let (store, _) = open(&disk, 1).expect("an empty disk can be opened");
    store.stop().expect("the disk does not fail");
    disk
});

/// Returns a copy of an empty store's disk.
pub fn disk() -> SimDisk {
    EMPTY.fork(2)
}

/// Opens the store of worker 1 with a fixed clock.
///
/// # Errors
/// As [`Store::open`].
pub fn open(disk: &SimDisk, copies: u32) -> Result<(Store, Recovery), Error> {
    open_at(disk, copies, Arc::new(ManualClock::new(1_000_000)))
}

pub(crate) fn open_at(disk: &SimDisk, copies: u32, clock: Arc<ManualClock>) -> Result<(Store, Recovery), Error> {
    let mut options = Options::new(ClusterId(7), SHAPE, Settings::default());
    options.origin = Origin { boot: 1, mount: 1 };
    options.replication.ordinal = Ordinal(1);
    options.replication.replicas = copies;
    options.wal.segment_bytes = 32 << 10;
    Store::open(Arc::new(disk.clone()), clock, Box::new(Cpu::new(1)), options)
}
