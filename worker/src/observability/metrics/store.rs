//! The store, its replication and the process: values that other components own, set at each scrape.

use super::gpu::GpuMetrics;
use super::registry::{Registrar, counter, gauge};
use crate::observability::panics;
use crate::shared::Shared;
use crate::write::admission::RequestKind;
use engram_proto::v1::PartitionStatus;
use engram_store::{Distribution, Stats};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters and gauges of values that other components own, set at each scrape.
///
/// One field for each series without labels, therefore more than a dozen: a table, whose rows share nothing but the scrape.
pub(super) struct StoreMetrics {
    applied_records: Counter,
    created: Counter,
    evicted: Counter,
    rejected: Counter,
    failed: Counter,
    overload_rejections: Counter,
    wal_written_bytes: Counter,
    snapshots: Counter,
    failed_snapshots: Counter,
    scrubbed_snapshots: Counter,
    damaged_snapshots: Counter,
    payloads: PayloadMetrics,
    reads: Counter,
    replicated_records: Counter,
    transfers_sent: Counter,
    transfer_sent_bytes: Counter,
    transfers_installed: Counter,
    memories: Gauge<u64, AtomicU64>,
    panics: Counter,
    memory_bytes: Gauge<u64, AtomicU64>,
    run_records: Gauge<u64, AtomicU64>,
    run_record_bytes: Gauge<u64, AtomicU64>,
    sessions: Gauge<u64, AtomicU64>,
    session_bytes: Gauge<u64, AtomicU64>,
    epoch_entries: Gauge<u64, AtomicU64>,
    wal_bytes: Gauge<u64, AtomicU64>,
    disk_bytes: Gauge<u64, AtomicU64>,
    disk_free_bytes: Gauge<u64, AtomicU64>,
    gpus: GpuMetrics,
    gpu_threshold: Gauge<i64>,
    pending: Gauge<u64, AtomicU64>,
    partitions: Gauge<u64, AtomicU64>,
    map_version: Gauge<u64, AtomicU64>,
    ready: Gauge<u64, AtomicU64>,
    resident: Gauge<u64, AtomicU64>,
    uptime: Gauge<u64, AtomicU64>,
    event_loop_lag: Gauge<f64, AtomicU64>,
    streams: Gauge<u64, AtomicU64>,
    replication_lag: Gauge<u64, AtomicU64>,
    rereplication_lag: Gauge<u64, AtomicU64>,
    under_replicated: Gauge<u64, AtomicU64>,
    rereplicating: Gauge<u64, AtomicU64>,
}

impl StoreMetrics {
    pub(super) fn new(registrar: &mut Registrar) -> Self {
        let gpu_threshold = Gauge::<i64>::default();
        let help = "Memories in a pass from which the GPUs run it; -1 without GPUs or when they never run passes";
        registrar.register("gpu_threshold_memories", &[], help, gpu_threshold.clone());
        let event_loop_lag = Gauge::<f64, AtomicU64>::default();
        let help = "Delay of the last timer tick on the threads of the gRPC services";
        registrar.register("event_loop_lag_seconds", &[], help, event_loop_lag.clone());
        let gpus = GpuMetrics::new(registrar);
        Self {
            applied_records: counter(registrar, "applied_records", "Records applied"),
            created: counter(registrar, "created_memories", "Memories created"),
            evicted: counter(registrar, "evicted_memories", "Memories evicted or removed"),
            rejected: counter(registrar, "rejected_records", "Records rejected before they reached the log"),
            failed: counter(registrar, "failed_records", "Records whose batch could not be written to the log"),
            overload_rejections: counter(
                registrar,
                "overload_rejections",
                "Calls rejected because the worker was at its limit of work in flight",
            ),
            wal_written_bytes: counter(
                registrar,
                "wal_written_bytes",
                "Bytes of records written to the write-ahead log",
            ),
            snapshots: counter(registrar, "snapshots", "Snapshots written"),
            failed_snapshots: counter(registrar, "failed_snapshots", "Snapshots that failed"),
            scrubbed_snapshots: counter(registrar, "scrubbed_snapshots", "Snapshots scrubbed and found intact"),
            damaged_snapshots: counter(registrar, "damaged_snapshots", "Snapshots that scrubbing found damaged"),
            payloads: PayloadMetrics::register(registrar),
            reads: counter(registrar, "store_reads", "Reads executed by the store"),
            replicated_records: counter(
                registrar,
                "replicated_records",
                "Records sent to other replicas, counted once per replica and attempt",
            ),
            transfers_sent: counter(
                registrar,
                "state_transfers_sent",
                "Transfers of a partition's state sent to another worker",
            ),
            transfer_sent_bytes: counter(registrar, "state_transfer_sent_bytes", "Bytes sent in state transfers"),
            transfers_installed: counter(
                registrar,
                "state_transfers_installed",
                "Transfers of a partition's state received and installed",
            ),
            gpu_threshold,
            gpus,
            memories: gauge(registrar, "memories", "Memories on this worker"),
            memory_bytes: gauge(
                registrar,
                "store_memory_bytes",
                "Bytes of host memory in columns with keys and payloads, indices, the payload cache, run records, sessions and retained log records",
            ),
            run_records: gauge(registrar, "run_records", "Records of runs in the replicas here, ended runs included"),
            run_record_bytes: gauge(registrar, "run_record_bytes", "Bytes of the records of runs in the replicas here"),
            sessions: gauge(registrar, "sessions", "Client sessions in the replicas here, counted once per replica"),
            session_bytes: gauge(
                registrar,
                "session_bytes",
                "Approximate bytes of the client sessions in the replicas here",
            ),
            epoch_entries: gauge(
                registrar,
                "run_epoch_entries",
                "Runs of which the replicas here remember learning epochs, counted once per replica",
            ),
            wal_bytes: gauge(registrar, "wal_bytes", "Size of the write-ahead log on disk"),
            disk_bytes: gauge(registrar, "disk_bytes", "Size of the file system with the state directory"),
            disk_free_bytes: gauge(
                registrar,
                "disk_free_bytes",
                "Bytes of the file system with the state directory that the worker can still write",
            ),
            pending: gauge(registrar, "pending_records", "Records proposed and not yet acknowledged"),
            partitions: gauge(registrar, "partitions", "Partitions served"),
            map_version: gauge(registrar, "partition_map_version", "Version of the partition map in use"),
            ready: gauge(registrar, "ready", "1 if the worker serves every partition assigned to it"),
            panics: counter(registrar, "panics", "Panics of calls, tasks and threads of the process"),
            resident: gauge(registrar, "resident_memory_bytes", "Resident memory of the process"),
            uptime: gauge(registrar, "uptime_seconds", "Seconds since the worker started"),
            replication_lag: gauge(
                registrar,
                "replication_lag_records",
                "Records that the slowest in-sync replica of a partition served here lacks",
            ),
            rereplication_lag: gauge(
                registrar,
                "rereplication_lag_records",
                "Records that the slowest learner of a partition served here lacks",
            ),
            under_replicated: gauge(
                registrar,
                "under_replicated_partitions",
                "Partitions served here with fewer in-sync replicas than configured",
            ),
            rereplicating: gauge(
                registrar,
                "rereplicating_partitions",
                "Partitions served here that are being re-replicated",
            ),
            streams: gauge(registrar, "peer_streams", "Open streams to other workers"),
            event_loop_lag,
        }
    }

    /// Sets the values of this scrape; `partitions` are the current statuses of the partitions on this worker.
    pub(super) fn set(&self, shared: &Shared, partitions: &[PartitionStatus], stats: &Stats) {
        let served = || partitions.iter().filter(|status| status.primary);
        let replicas = shared.setup.options.spec.replication_factor;
        self.replication_lag.set(served().map(|status| status.lag).max().unwrap_or(0));
        self.rereplication_lag.set(served().map(|status| status.re_replication_lag).max().unwrap_or(0));
        self.under_replicated.set(served().filter(|status| status.in_sync < replicas).count() as u64);
        self.rereplicating.set(served().filter(|status| !status.re_replicating_to.is_empty()).count() as u64);
        let set = |counter: &Counter, value: u64| counter.inner().store(value, Ordering::Relaxed);
        set(&self.applied_records, stats.applied_records);
        set(&self.created, stats.created_memories);
        set(&self.evicted, stats.evicted_memories);
        set(&self.rejected, stats.refused_records);
        set(&self.failed, stats.failed_records);
        let rejected: u64 =
            RequestKind::ALL.iter().map(|kind| shared.limits.admission().with(*kind, |it| it.rejected())).sum();
        set(&self.overload_rejections, stats.overloaded_calls + rejected);
        set(&self.wal_written_bytes, stats.logged_bytes);
        set(&self.snapshots, stats.snapshots);
        set(&self.failed_snapshots, stats.failed_snapshots);
        set(&self.scrubbed_snapshots, stats.scrubbed_snapshots);
        set(&self.damaged_snapshots, stats.damaged_snapshots);
        self.payloads.set(stats);
        set(&self.reads, stats.reads);
        set(&self.panics, panics::count());
        set(&self.replicated_records, stats.shipped_records);
        set(&self.transfers_sent, stats.transfers_sent);
        set(&self.transfer_sent_bytes, stats.transfer_sent_bytes);
        set(&self.transfers_installed, stats.transfers_installed);
        let gpu = stats.gpu.clone().unwrap_or_default();
        self.gpus.set(&gpu);
        let threshold = gpu.threshold.filter(|_| gpu.at_work().next().is_some());
        self.gpu_threshold.set(threshold.map_or(-1, |memories| i64::try_from(memories).unwrap_or(i64::MAX)));
        self.streams.set(shared.peers.links().members().len() as u64);
        self.memories.set(stats.memories);
        self.memory_bytes.set(stats.memory_bytes);
        self.run_records.set(stats.run_records);
        self.run_record_bytes.set(stats.run_record_bytes);
        self.sessions.set(stats.sessions);
        self.session_bytes.set(stats.session_bytes);
        self.epoch_entries.set(stats.epoch_entries);
        self.wal_bytes.set(stats.log_bytes);
        if let Ok(disk) = nix::sys::statvfs::statvfs(&shared.setup.options.state_dir) {
            self.disk_bytes.set(disk.blocks().saturating_mul(disk.fragment_size()));
            self.disk_free_bytes.set(disk.blocks_available().saturating_mul(disk.fragment_size()));
        }
        self.pending.set(stats.waiting_records);
        self.partitions.set(shared.engine.versions(shared.partitions()).len() as u64);
        self.map_version.set(shared.membership.view().version());
        self.ready.set(u64::from(shared.is_ready()));
        self.resident.set(resident_bytes());
        self.uptime.set(shared.lifecycle.uptime().as_secs());
        self.event_loop_lag.set(shared.lifecycle.event_loop_lag_ms() as f64 / 1e3);
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

/// Payloads of items on disk.
#[derive(Debug)]
struct PayloadMetrics {
    bytes: Family<StateLabels, Gauge<u64, AtomicU64>>,
    segments: Gauge<u64, AtomicU64>,
    cache_hits: Counter,
    cache_misses: Counter,
    compacted_bytes: Counter,
    damaged: Counter,
}

impl PayloadMetrics {
    fn register(registrar: &mut Registrar) -> Self {
        let bytes = Family::default();
        registrar.register(
            "payload_bytes",
            &["state"],
            "Bytes of payloads of items: live = referred to, disk = of all payload segments, cached = in memory",
            bytes.clone(),
        );
        Self {
            bytes,
            segments: gauge(registrar, "payload_segments", "Files with payloads of items"),
            cache_hits: counter(registrar, "payload_cache_hits", "Payloads of items read from the cache"),
            cache_misses: counter(registrar, "payload_cache_misses", "Payloads of items read from disk"),
            compacted_bytes: counter(
                registrar,
                "payload_compacted_bytes",
                "Bytes of payloads of items moved out of segments with few live bytes",
            ),
            damaged: counter(
                registrar,
                "damaged_payloads",
                "Damaged payloads of items found by reads, transfers and scrubbing",
            ),
        }
    }

    fn set(&self, stats: &Stats) {
        let states = [
            ("live", stats.payload_live_bytes),
            ("disk", stats.payload_disk_bytes),
            ("cached", stats.payload_cached_bytes),
        ];
        for (state, bytes) in states {
            self.bytes.get_or_create(&StateLabels { state }).set(bytes);
        }
        self.segments.set(stats.payload_segments);
        let set = |counter: &Counter, value: u64| counter.inner().store(value, Ordering::Relaxed);
        set(&self.cache_hits, stats.payload_cache_hits);
        set(&self.cache_misses, stats.payload_cache_misses);
        set(&self.compacted_bytes, stats.payload_compacted_bytes);
        set(&self.damaged, stats.damaged_payloads);
    }
}

/// Histograms that the store collects itself: name and help.
pub(super) const DISTRIBUTIONS: [(&str, &str); 4] = [
    ("wal_batch_records", "Records per batch of the write-ahead log"),
    ("wal_batch_bytes", "Bytes per batch of the write-ahead log"),
    ("wal_sync_duration_seconds", "Time until a batch of the write-ahead log was durable"),
    ("apply_duration_seconds", "Time to apply a batch"),
];

/// Appends a distribution of the store, whose buckets are powers of two, as a histogram.
pub(super) fn encode_distribution(
    page: &mut String,
    labels: &str,
    name: &str,
    help: &str,
    values: &Distribution,
    unit: f64,
) {
    let mut lines = format!("# HELP engram_{name} {help}.\n# TYPE engram_{name} histogram\n");
    let mut cumulated = 0;
    for (power, count) in values.counts.iter().enumerate().take_while(|(power, _)| *power < 32) {
        cumulated += count;
        let bound = (1_u64 << power) as f64 * unit;
        writeln!(lines, "engram_{name}_bucket{{{labels},le=\"{bound}\"}} {cumulated}").expect("a string");
    }
    let (sum, count) = (values.sum as f64 * unit, values.count);
    writeln!(lines, "engram_{name}_bucket{{{labels},le=\"+Inf\"}} {count}").expect("a string");
    writeln!(lines, "engram_{name}_sum{{{labels}}} {sum}\nengram_{name}_count{{{labels}}} {count}").expect("a string");
    page.push_str(&lines);
}

/// Returns the resident memory of this process, or 0 if the system does not report it.
pub(crate) fn resident_bytes() -> u64 {
    /// Size of the pages that the kernel counts, on every platform that workers run on.
    const PAGE_BYTES: u64 = 4_096;
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).map_or(0, |pages| pages * PAGE_BYTES)
}
