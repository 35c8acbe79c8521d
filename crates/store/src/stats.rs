//! What the engine counts, readable from any thread at any time.

use crate::{Error, WriteError};
use engram_kernels::Standing;
use engram_memory::{Lsn, PartitionId, Settings, Term};
use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Powers of two that a histogram tells apart.
const BUCKETS: usize = 40;

/// A histogram in powers of two: bucket `i` counts values below `2^i` that no earlier bucket counts.
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

    /// How many values there were, and their sum.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let count = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum();
        (count, self.sum.load(Ordering::Relaxed))
    }

    fn snapshot(&self) -> Distribution {
        let counts: Vec<u64> = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        Distribution { count: counts.iter().sum(), sum: self.sum.load(Ordering::Relaxed), counts }
    }
}

/// A histogram as it was read: entry `i` of `counts` counts values in `[2^(i-1), 2^i)`, entry 0 those that are 0.
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
    /// An upper bound, a power of two, of the smallest value that `share` (0 to 1) of all values do not pass.
    pub fn quantile(&self, share: f64) -> u64 {
        let wanted = (self.count as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return 1 << bucket;
            }
        }
        u64::MAX
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a store since its start, as they were read.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            /// Records per log batch.
            pub batch_records: Distribution,
            /// Bytes per log batch, padding included.
            pub batch_bytes: Distribution,
            /// Microseconds from handing a batch to the disk until it is durable (as the mode asks).
            pub write_us: Distribution,
            /// Microseconds of applying a batch.
            pub apply_us: Distribution,
            /// Why nothing is served any more, when that is so.
            pub fault: Option<String>,
            /// Partitions that the map gives to this worker, whose copy here cannot lead.
            pub unled: Vec<PartitionId>,
            /// The last damage that was found in a snapshot, and where, when there was any.
            pub damage: Option<String>,
            /// How the GPU stands that does large passes, where there is one.
            pub gpu: Option<Standing>,
        }

        /// The live counters.
        #[derive(Debug, Default)]
        pub(crate) struct Shared {
            $(pub(crate) $name: AtomicU64,)*
            pub(crate) batch_records: Counts,
            pub(crate) batch_bytes: Counts,
            pub(crate) write_us: Counts,
            pub(crate) apply_us: Counts,
            fault: RwLock<Option<WriteError>>,
            unled: RwLock<Vec<PartitionId>>,
            pub(crate) damage: RwLock<Option<String>>,
            gpu: RwLock<Option<Standing>>,
            /// Settings in force by partition, for whoever prepares records.
            settings: Vec<RwLock<Option<Settings>>>,
            /// Term served (0 = not served) and last applied lsn by partition.
            positions: Vec<(AtomicU64, AtomicU64)>,
        }

        impl Shared {
            pub(crate) fn snapshot(&self) -> Stats {
                Stats {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    batch_records: self.batch_records.snapshot(),
                    batch_bytes: self.batch_bytes.snapshot(),
                    write_us: self.write_us.snapshot(),
                    apply_us: self.apply_us.snapshot(),
                    fault: self.fault.read().expect(UNPOISONED).as_ref().map(WriteError::reason),
                    unled: self.unled.read().expect(UNPOISONED).clone(),
                    damage: self.damage.read().expect(UNPOISONED).clone(),
                    gpu: self.gpu.read().expect(UNPOISONED).clone(),
                }
            }
        }
    };
}

counters! {
    /// Records answered after they were applied.
    applied_records,
    /// Updates and rows that they applied.
    applied_rows,
    /// Memories that they created.
    created_memories,
    /// Memories that they evicted or removed.
    evicted_memories,
    /// Records answered without being logged: repeats and refusals.
    answered_records,
    /// Records refused before the log: not primary, capacity, malformed.
    refused_records,
    /// Records whose log batch could not be written.
    failed_records,
    /// Calls turned away because the queue was full.
    overloaded_calls,
    /// Bytes of records logged.
    logged_bytes,
    /// Bytes that the log holds (gauge).
    log_bytes,
    /// Bytes of deleted log segments.
    deleted_log_bytes,
    /// Snapshots written.
    snapshots,
    /// Bytes of snapshots written.
    snapshot_bytes,
    /// Snapshots that failed.
    failed_snapshots,
    /// Snapshots that were read again, and right.
    scrubbed_snapshots,
    /// Bytes of snapshots that were read again.
    scrubbed_bytes,
    /// Snapshots that were found damaged when they were read again.
    damaged_snapshots,
    /// Memories here (gauge).
    memories,
    /// Bytes of device, columns and indices (gauge).
    memory_bytes,
    /// Records proposed and not yet answered (gauge).
    waiting_records,
    /// Reads that ran.
    reads,
    /// Records sent to other copies, each time.
    shipped_records,
    /// Copies of a partition's state sent to a follower.
    copies_sent,
    /// Bytes of such copies that were sent.
    copied_bytes,
    /// Copies of a partition's state that took the place of what was here.
    copies_installed,
    /// Digests compared with the primary's.
    digests_compared,
    /// Those that differed: the copy was made anew.
    digests_different,
    /// Messages of peers that were refused as malformed.
    malformed_messages,
}

pub(crate) const UNPOISONED: &str = "no panic while the lock is held";

impl Shared {
    pub(crate) fn new(partitions: u32) -> Self {
        Self {
            settings: (0..partitions).map(|_| RwLock::default()).collect(),
            positions: (0..partitions).map(|_| Default::default()).collect(),
            ..Self::default()
        }
    }

    pub(crate) fn settings(&self, partition: PartitionId) -> Option<Settings> {
        *self.settings.get(partition.0 as usize)?.read().expect(UNPOISONED)
    }

    pub(crate) fn set_settings(&self, partition: PartitionId, settings: Option<Settings>) {
        if let Some(place) = self.settings.get(partition.0 as usize) {
            *place.write().expect(UNPOISONED) = settings;
        }
    }
}

impl Shared {
    /// The partitions that the map gives to this worker, and nobody leads.
    pub(crate) fn set_unled(&self, partitions: Vec<PartitionId>) {
        // There is hardly ever one.
        if !partitions.is_empty() || !self.unled.read().expect(UNPOISONED).is_empty() {
            *self.unled.write().expect(UNPOISONED) = partitions;
        }
    }

    /// Nothing is served any more, for this reason; what is answered therefore.
    pub(crate) fn end(&self, fault: &Error) -> WriteError {
        self.fault.write().expect(UNPOISONED).insert(WriteError::of_failure(fault)).clone()
    }

    /// What is answered when nothing is served any more.
    pub(crate) fn ended(&self) -> WriteError {
        let fault = self.fault.read().expect(UNPOISONED).clone();
        fault.unwrap_or_else(|| WriteError::of_failure(&Error::Stopped))
    }

    /// Tells how the GPU stands now.
    pub(crate) fn set_gpu(&self, standing: Option<&Standing>) {
        if self.gpu.read().expect(UNPOISONED).as_ref() != standing {
            *self.gpu.write().expect(UNPOISONED) = standing.cloned();
        }
    }

    /// Term at which `partition` is served, and its last applied lsn.
    pub(crate) fn position(&self, partition: PartitionId) -> Option<(Term, Lsn)> {
        let (term, lsn) = self.positions.get(partition.0 as usize)?;
        let term = Term(term.load(Ordering::Acquire));
        (term > Term(0)).then(|| (term, Lsn(lsn.load(Ordering::Acquire))))
    }

    pub(crate) fn set_term(&self, partition: PartitionId, term: Option<Term>) {
        self.positions[partition.0 as usize].0.store(term.unwrap_or_default().0, Ordering::Release);
    }

    pub(crate) fn set_lsn(&self, partition: PartitionId, lsn: Lsn) {
        self.positions[partition.0 as usize].1.store(lsn.0, Ordering::Release);
    }
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

impl Shared {
    /// Writes and reads that were served.
    pub(crate) fn served(&self) -> u64 {
        self.applied_records.load(Ordering::Relaxed) + self.reads.load(Ordering::Relaxed)
    }
}

/// Sets a gauge.
pub(crate) fn set(gauge: &AtomicU64, value: u64) {
    gauge.store(value, Ordering::Relaxed);
}
