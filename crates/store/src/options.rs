//! Options of a store.

use crate::{Origin, payload, replication, wal};
use engram_memory::{ClusterId, Settings, Shape};

/// Options of a store. One public field per documented setting, therefore more than a dozen.
#[derive(Debug, Clone)]
pub struct Options {
    /// Cluster that the disk belongs to.
    pub cluster: ClusterId,
    /// Immutable shape of the cluster.
    pub shape: Shape,
    /// Settings of a partition on activation; whether updates are counted is kept.
    pub settings: Settings,
    /// Kernel boot and volume mount of this process.
    pub origin: Origin,
    /// Replication options.
    pub replication: replication::Options,
    /// Options of the log; its replicas are those of `replication`.
    pub wal: wal::Options,
    /// Bytes of log after which partitions are snapshotted. Lower shortens recovery and increases disk writes.
    pub snapshot_bytes: u64,
    /// Milliseconds after which changed partitions are snapshotted.
    pub snapshot_ms: u64,
    /// Milliseconds in which the digest of every served partition is compared with its replicas once.
    pub digest_ms: u64,
    /// Milliseconds in which every snapshot here is scrubbed once; 0 = never. Lower finds damage earlier and increases disk reads.
    pub scrub_ms: u64,
    /// Interval between proposals of session expiry, in milliseconds. Lower removes expired sessions earlier and writes more records.
    pub expiry_ms: u64,
    /// Bytes of memory for payloads of items that were read or written last. Higher saves disk reads.
    pub payload_cache_bytes: u64,
    /// Bytes after which a payload segment is closed. Lower frees disk space earlier and opens more files.
    pub payload_segment_bytes: u32,
    /// Disk space kept in reserve, so that a store on a full disk still starts; 0 = none.
    pub reserve_bytes: u64,
    /// Most bytes of unanswered records in the engine; calls above are rejected.
    pub queue_bytes: usize,
    /// Most unanswered calls in the engine; calls above are rejected.
    pub queue_calls: usize,
}

impl Options {
    /// Returns production defaults.
    pub fn new(cluster: ClusterId, shape: Shape, settings: Settings) -> Self {
        Self {
            cluster,
            shape,
            settings,
            origin: Origin::current(0),
            replication: replication::Options::default(),
            wal: wal::Options::default(),
            snapshot_bytes: 256 << 20,
            snapshot_ms: 5 * 60 * 1_000,
            digest_ms: 60 * 60 * 1_000,
            scrub_ms: 24 * 60 * 60 * 1_000,
            expiry_ms: 60 * 60 * 1_000,
            payload_cache_bytes: 128 << 20,
            payload_segment_bytes: payload::SEGMENT_BYTES,
            reserve_bytes: 0,
            queue_bytes: 64 << 20,
            queue_calls: 16_384,
        }
    }
}
