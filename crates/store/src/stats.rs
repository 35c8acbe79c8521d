//! Counters of the engine, readable from any thread.

use crate::{Error, WriteError};
use engram_kernels::MirrorStatus;
use engram_memory::PartitionId;
use parking_lot::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Buckets of a histogram.
const BUCKETS: usize = 40;

/// A histogram in powers of two: bucket `i` counts values in `[2^(i-1), 2^i)`, bucket 0 those that are 0.
#[derive(Debug)]
pub(crate) struct Counts {
    buckets: [AtomicU64; BUCKETS],
    sum: AtomicU64,
}

impl Default for Counts {
    fn default() -> Self {
        Self { buckets: [const { AtomicU64::new(0) }; BUCKETS], sum: AtomicU64::new(0) }
    }
}

impl Counts {
    pub(crate) fn add(&self, value: u64) {
        let bucket = (u64::BITS - value.leading_zeros()) as usize;
        self.buckets[bucket.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Returns the number of values and their sum.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let count = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum();
        (count, self.sum.load(Ordering::Relaxed))
    }

    fn snapshot(&self) -> Distribution {
        let counts: Vec<u64> = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        Distribution { count: counts.iter().sum(), sum: self.sum.load(Ordering::Relaxed), counts }
    }
}

/// A histogram reading: entry `i` of `counts` counts values in `[2^(i-1), 2^i)`, entry 0 those that are 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Distribution {
    /// Number of values.
    pub count: u64,
    /// Their sum.
    pub sum: u64,
    /// Values per power of two.
    pub counts: Vec<u64>,
}

impl Distribution {
    /// Returns an upper bound, a power of two, of the quantile `share` (0 to 1).
    pub fn quantile(&self, share: f64) -> u64 {
        let wanted = (self.count as f64 * share).ceil() as u64;
        let mut cumulative = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            cumulative += count;
            if cumulative >= wanted {
                return 1 << bucket;
            }
        }
        u64::MAX
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Reading of a store's counters since its start; one field per metric.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            /// Records per log batch.
            pub batch_records: Distribution,
            /// Bytes per log batch, padding included.
            pub batch_bytes: Distribution,
            /// Microseconds to write a batch, including the sync if the durability mode requires it.
            pub write_us: Distribution,
            /// Microseconds to apply a batch.
            pub apply_us: Distribution,
            /// Fault that ended the engine, if any.
            pub fault: Option<String>,
            /// Partitions assigned to this worker whose replica here declines the primary role.
            pub leaderless_partitions: Vec<PartitionId>,
            /// Last damage found in a snapshot, if any.
            pub damage: Option<String>,
            /// Status of the GPU, if there is one.
            pub gpu: Option<MirrorStatus>,
        }

        /// The live counters; one field per metric.
        #[derive(Debug, Default)]
        pub(crate) struct Shared {
            $(pub(crate) $name: AtomicU64,)*
            pub(crate) batch_records: Counts,
            pub(crate) batch_bytes: Counts,
            pub(crate) write_us: Counts,
            pub(crate) apply_us: Counts,
            fault: RwLock<Option<WriteError>>,
            leaderless_partitions: RwLock<Vec<PartitionId>>,
            pub(crate) damage: RwLock<Option<String>>,
            gpu: RwLock<Option<MirrorStatus>>,
        }

        impl Shared {
            pub(crate) fn snapshot(&self) -> Stats {
                Stats {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    batch_records: self.batch_records.snapshot(),
                    batch_bytes: self.batch_bytes.snapshot(),
                    write_us: self.write_us.snapshot(),
                    apply_us: self.apply_us.snapshot(),
                    fault: self.fault.read().as_ref().map(WriteError::reason),
                    leaderless_partitions: self.leaderless_partitions.read().clone(),
                    damage: self.damage.read().clone(),
                    gpu: self.gpu.read().clone(),
                }
            }
        }
    };
}

counters! {
    /// Records applied and answered.
    applied_records,
    /// Rows and updates applied.
    applied_rows,
    /// Memories created.
    created_memories,
    /// Memories evicted or removed.
    evicted_memories,
    /// Records answered without logging: repeats and refusals.
    answered_records,
    /// Records rejected before the log: not primary, capacity, malformed.
    refused_records,
    /// Records whose log batch could not be written.
    failed_records,
    /// Calls rejected because the queue was full.
    overloaded_calls,
    /// Bytes of records logged.
    logged_bytes,
    /// Bytes of the log (gauge).
    log_bytes,
    /// Bytes of deleted log segments.
    deleted_log_bytes,
    /// Snapshots written.
    snapshots,
    /// Bytes of snapshots written.
    snapshot_bytes,
    /// Snapshots that failed.
    failed_snapshots,
    /// Snapshots scrubbed without damage.
    scrubbed_snapshots,
    /// Bytes of snapshots scrubbed.
    scrubbed_bytes,
    /// Damaged snapshots found by scrubbing.
    damaged_snapshots,
    /// Damaged payloads of items found by reads and scrubbing.
    damaged_payloads,
    /// Bytes of payloads that items refer to (gauge).
    payload_live_bytes,
    /// Bytes of payload segments (gauge).
    payload_disk_bytes,
    /// Bytes of the payload cache (gauge).
    payload_cached_bytes,
    /// Payload segments (gauge).
    payload_segments,
    /// Payloads read from the cache.
    payload_cache_hits,
    /// Payloads read from disk.
    payload_cache_misses,
    /// Bytes of payloads moved by compaction.
    payload_compacted_bytes,
    /// Memories of visible partitions (gauge).
    memories,
    /// Bytes of device, columns with keys and payloads, indices, run records, sessions and retained log records (gauge).
    memory_bytes,
    /// Run records of all replicas here (gauge).
    run_records,
    /// Bytes of those records (gauge).
    run_record_bytes,
    /// Client sessions of all replicas here (gauge).
    sessions,
    /// Approximate bytes of those sessions (gauge).
    session_bytes,
    /// Runs of which the replicas here remember learning epochs, counted once per replica (gauge).
    epoch_entries,
    /// Records proposed and not yet answered (gauge).
    waiting_records,
    /// Reads that ran.
    reads,
    /// Records sent to followers.
    shipped_records,
    /// State transfers sent to followers.
    transfers_sent,
    /// Bytes of state transfers sent.
    transfer_sent_bytes,
    /// State transfers installed.
    transfers_installed,
    /// Digests compared with the primary's.
    digests_compared,
    /// Digests that differed, after which the replica was rebuilt.
    digest_mismatches,
    /// Malformed messages rejected.
    malformed_messages,
}

impl Shared {
    /// Sets the partitions assigned to this worker that are leaderless.
    pub(crate) fn set_leaderless_partitions(&self, partitions: Vec<PartitionId>) {
        // Usually empty before and after.
        if !partitions.is_empty() || !self.leaderless_partitions.read().is_empty() {
            *self.leaderless_partitions.write() = partitions;
        }
    }

    /// Records the fault that ended the engine; returns the answer to callers.
    pub(crate) fn end(&self, fault: &Error) -> WriteError {
        self.fault.write().insert(WriteError::of_failure(fault)).clone()
    }

    /// Returns the answer to callers of an ended engine.
    pub(crate) fn ended(&self) -> WriteError {
        let fault = self.fault.read().clone();
        fault.unwrap_or_else(|| WriteError::of_failure(&Error::Stopped))
    }

    /// Sets the status of the GPU.
    pub(crate) fn set_gpu(&self, status: Option<&MirrorStatus>) {
        if self.gpu.read().as_ref() != status {
            *self.gpu.write() = status.cloned();
        }
    }
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

impl Shared {
    /// Returns the number of writes and reads served.
    pub(crate) fn served(&self) -> u64 {
        self.applied_records.load(Ordering::Relaxed) + self.reads.load(Ordering::Relaxed)
    }
}

/// Sets a gauge.
pub(crate) fn set(gauge: &AtomicU64, value: u64) {
    gauge.store(value, Ordering::Relaxed);
}
