//! Tests of the store's files through their public interface.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod folder;
mod golden;
mod identity;
mod snapshot;

use engram_memory::{ClusterId, DecayClock, FeatureShape, FeatureType, Law, Lsn, PartitionId, Shape, StoreId, Term};
use engram_store::{FileHead, SnapshotHead};

fn shape() -> Shape {
    Shape { partitions: 256, law: Law::Linear, features: FeatureShape { dimension: 8, dtype: FeatureType::F16 } }
}

fn head() -> FileHead {
    FileHead { cluster: ClusterId(0x0123_4567_89ab_cdef), store: StoreId(0xfeed), shape: shape() }
}

fn snapshot_head(partition: u32, lsn: u64) -> SnapshotHead {
    SnapshotHead {
        partition: PartitionId(partition),
        lsn: Lsn(lsn),
        term: Term(3),
        clock: DecayClock::from_units(1_000).unwrap(),
        memories: 42,
        created_ms: 1_700_000_000_000,
        digest: 0xd1_9e57,
    }
}
