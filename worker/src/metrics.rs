//! Metrics of a worker in the Prometheus text format. Names begin with `engram_`; every series has the labels `learner_cluster` and `worker`.

use crate::accept::ConnectionCounters;
use crate::admission::{Admission, RequestKind};
use crate::authorization::AccountAuthorizer;
use crate::buffers::BufferMetrics;
use crate::panics;
use crate::peers::Traffic;
use crate::runs::FederatedMetrics;
use crate::shared::Shared;
use crate::training::TrainingMetrics;
pub use engram_api::metrics::{MetricDescriptor, MetricType};
use engram_identity::{Keys, Reason};
use engram_kernels::MirrorStatus;
use engram_proto::v1::PartitionStatus;
use engram_store::{Distribution, Stats};
use engram_trace::Context;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use tonic::Code;

/// Methods with their own series. All others share one, so that a client cannot create series.
const METHODS: [&str; 27] = [
    "OpenSession",
    "GetOutcome",
    "Upsert",
    "Remove",
    "ApplyReinforcement",
    "ApplyDecay",
    "LearnEpoch",
    "BroadcastQuality",
    "GetMemories",
    "ScanMemories",
    "GetQuality",
    "Rank",
    "Recall",
    "GetDigest",
    "GetPartitionMap",
    "SubmitRun",
    "WatchRun",
    "CancelRun",
    "ListRuns",
    "RemoveRun",
    "GetReport",
    "Predict",
    "GetWorkerStatus",
    "CreateSnapshot",
    "Stop",
    "Check",
    "other",
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MethodLabels {
    method: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    method: &'static str,
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
    device: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabels {
    device: String,
}

/// Labels of an exemplar.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TraceLabels {
    trace_id: String,
    span_id: String,
}

impl TraceLabels {
    fn of(context: Context) -> Self {
        Self { trace_id: format!("{:032x}", context.trace), span_id: format!("{:016x}", context.span) }
    }
}

/// Labels of every series.
const WORKER_LABELS: [&str; 2] = ["learner_cluster", "worker"];

/// Registers metrics and records their descriptors.
pub(crate) struct Registrar {
    registry: Registry,
    catalog: Vec<MetricDescriptor>,
}

impl Registrar {
    /// Registers `metric` as `engram_<name>`, whose series have `labels` in addition to those of the worker.
    pub(crate) fn register(&mut self, name: &str, labels: &[&'static str], help: &str, metric: impl Metric) {
        let (metric_type, suffix) = match metric.metric_type() {
            prometheus_client::metrics::MetricType::Counter => (MetricType::Counter, "_total"),
            prometheus_client::metrics::MetricType::Histogram => (MetricType::Histogram, ""),
            _ => (MetricType::Gauge, ""),
        };
        self.catalog.push(descriptor(&format!("{name}{suffix}"), metric_type, labels, help));
        self.registry.register(name, help, metric);
    }
}

fn descriptor(name: &str, metric_type: MetricType, labels: &[&'static str], help: &str) -> MetricDescriptor {
    let labels = WORKER_LABELS.iter().chain(labels).copied().collect();
    MetricDescriptor { name: format!("engram_{name}"), metric_type, help: help.to_owned(), labels }
}

/// Returns the descriptors of all metrics that a worker exports, by name.
pub fn catalog() -> Vec<MetricDescriptor> {
    let mut catalog = Metrics::new("", 0, &Traffic::default(), &ConnectionCounters::default(), true).catalog;
    catalog.extend(DISTRIBUTIONS.map(|(name, help)| descriptor(name, MetricType::Histogram, &[], help)));
    catalog.sort_by(|left, right| left.name.cmp(&right.name));
    catalog
}

/// Calls by method and code.
#[derive(Debug, Clone)]
pub(crate) struct Calls {
    total: Family<CallLabels, Counter>,
    seconds: Family<MethodLabels, HistogramWithExemplars<TraceLabels>>,
}

impl Calls {
    /// The number of a method, by the path of its call.
    pub(crate) fn method(&self, path: &str) -> usize {
        let name = path.rsplit('/').next().unwrap_or_default();
        METHODS.iter().position(|method| *method == name).unwrap_or(METHODS.len() - 1)
    }

    pub(crate) const fn name(&self, method: usize) -> &'static str {
        METHODS[method]
    }

    /// Counts a call; `trace` is its span, if its trace is sampled, and becomes an exemplar.
    pub(crate) fn count(&self, method: usize, code: Code, elapsed: Duration, trace: Option<Context>) {
        let method = METHODS[method];
        self.total.get_or_create(&CallLabels { method, code: code_name(code) }).inc();
        self.seconds.get_or_create(&MethodLabels { method }).observe(
            elapsed.as_secs_f64(),
            trace.map(TraceLabels::of),
            trace.map(|_| SystemTime::now()),
        );
    }
}

/// The metrics of a worker.
pub(crate) struct Metrics {
    registry: Registry,
    catalog: Vec<MetricDescriptor>,
    pub(crate) calls: Calls,
    /// Updates and rows applied through the services.
    pub(crate) updates: Counter,
    /// Learning epochs completed, one per partition.
    pub(crate) partition_epochs: Counter,
    /// Sub-requests forwarded to their primary.
    pub(crate) forwarded: Counter,
    /// Partitions of which this worker became the serving primary.
    pub(crate) promotions: Counter,
    /// What was done with buffers.
    pub(crate) buffers: BufferMetrics,
    /// What the training members on this worker did.
    pub(crate) training: TrainingMetrics,
    /// What the drivers of Federated runs on this worker did.
    pub(crate) federated: FederatedMetrics,
    build: Family<BuildLabels, Gauge>,
    admission: AdmissionMetrics,
    connections: ConnectionMetrics,
    tls: Option<TlsMetrics>,
    store: StoreMetrics,
}

/// Admission control by kind of request.
struct AdmissionMetrics {
    limit: Family<KindLabels, Gauge<u64, AtomicU64>>,
    in_flight: Family<KindLabels, Gauge<u64, AtomicU64>>,
    rejected: Family<KindLabels, Counter>,
}

impl AdmissionMetrics {
    fn new(registrar: &mut Registrar) -> Self {
        let metrics = Self { limit: Family::default(), in_flight: Family::default(), rejected: Family::default() };
        let help = "Adaptive limit of reads and writes in flight";
        registrar.register("requests_in_flight_limit", &["kind"], help, metrics.limit.clone());
        let help = "Reads and writes in flight";
        registrar.register("requests_in_flight", &["kind"], help, metrics.in_flight.clone());
        let help = "Reads and writes rejected because the limit of requests in flight was reached";
        registrar.register("rejected_requests", &["kind"], help, metrics.rejected.clone());
        metrics
    }

    fn set(&self, admission: &Admission) {
        for kind in RequestKind::ALL {
            let labels = KindLabels { kind: kind.as_str() };
            let (limit, in_flight, rejected) =
                admission.with(kind, |it| (it.limit() as u64, it.in_flight() as u64, it.rejected()));
            self.limit.get_or_create(&labels).set(limit);
            self.in_flight.get_or_create(&labels).set(in_flight);
            self.rejected.get_or_create(&labels).inner().store(rejected, Ordering::Relaxed);
        }
    }
}

/// Connections of all listeners.
struct ConnectionMetrics {
    open: Gauge<u64, AtomicU64>,
    counters: ConnectionCounters,
}

impl ConnectionMetrics {
    fn new(registrar: &mut Registrar, counters: &ConnectionCounters) -> Self {
        let open = gauge(registrar, "connections", "Open connections of all listeners");
        let help = "Connections refused because too many were open or too few file descriptors were free";
        registrar.register("refused_connections", &[], help, counters.refused.clone());
        let help = "Connections that could not be accepted, for example without a free file descriptor";
        registrar.register("failed_accepts", &[], help, counters.failed.clone());
        Self { open, counters: counters.clone() }
    }
}

/// Authentication and certificates; only with TLS.
struct TlsMetrics {
    failures: Family<ReasonLabels, Counter>,
    expiry: Gauge<i64>,
    reload_failures: Counter,
    token_reload_failures: Counter,
}

impl TlsMetrics {
    fn new(registrar: &mut Registrar) -> Self {
        let metrics = Self {
            failures: Family::default(),
            expiry: Gauge::default(),
            reload_failures: Counter::default(),
            token_reload_failures: Counter::default(),
        };
        let help = "Connections and calls refused for their certificate, token or permissions";
        registrar.register("authentication_failures", &["reason"], help, metrics.failures.clone());
        let help = "Seconds until the certificate in use expires, negative once it is expired";
        registrar.register("certificate_expiry_seconds", &[], help, metrics.expiry.clone());
        let help = "Failed reloads of the certificate files; the certificate in use stays";
        registrar.register("certificate_reload_failures", &[], help, metrics.reload_failures.clone());
        let help = "Failed reloads of the token keys or the access list; those in use stay";
        registrar.register("token_reload_failures", &[], help, metrics.token_reload_failures.clone());
        metrics
    }

    fn set(&self, keys: &Keys, accounts: Option<&AccountAuthorizer>) {
        for reason in Reason::ALL {
            let counter = self.failures.get_or_create(&ReasonLabels { reason: reason.as_str() });
            counter.inner().store(keys.refusals().of(reason), Ordering::Relaxed);
        }
        let seconds = |duration: Duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
        let left = keys.expires_at().duration_since(SystemTime::now());
        self.expiry.set(left.map_or_else(|error| -seconds(error.duration()), seconds));
        self.reload_failures.inner().store(keys.failures(), Ordering::Relaxed);
        self.token_reload_failures
            .inner()
            .store(accounts.map_or(0, AccountAuthorizer::reload_failures), Ordering::Relaxed);
    }
}

/// Counters and gauges of values that other components own, set at each scrape.
struct StoreMetrics {
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
    fn new(registrar: &mut Registrar) -> Self {
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

fn counter(registrar: &mut Registrar, name: &str, help: &str) -> Counter {
    let counter = Counter::default();
    registrar.register(name, &[], help, counter.clone());
    counter
}

fn gauge(registrar: &mut Registrar, name: &str, help: &str) -> Gauge<u64, AtomicU64> {
    let gauge = Gauge::default();
    registrar.register(name, &[], help, gauge.clone());
    gauge
}

/// Metrics by GPU.
struct GpuMetrics {
    passes: Family<GpuLabels, Counter>,
    fallbacks: Family<GpuLabels, Counter>,
    uploaded_bytes: Family<GpuLabels, Counter>,
    allocated_bytes: Family<GpuLabels, Gauge<u64, AtomicU64>>,
    memories: Family<GpuLabels, Gauge<u64, AtomicU64>>,
    disabled: Family<GpuLabels, Gauge<u64, AtomicU64>>,
    host_memories: Gauge<u64, AtomicU64>,
}

impl GpuMetrics {
    fn new(registrar: &mut Registrar) -> Self {
        let metrics = Self {
            passes: Family::default(),
            fallbacks: Family::default(),
            uploaded_bytes: Family::default(),
            allocated_bytes: Family::default(),
            memories: Family::default(),
            disabled: Family::default(),
            host_memories: Gauge::default(),
        };
        let labels = &["device"];
        registrar.register(
            "gpu_passes",
            labels,
            "Passes over memories that the GPU took part in",
            metrics.passes.clone(),
        );
        let help = "GPU passes that fell back to the CPU because the GPU was full or failed";
        registrar.register("gpu_fallbacks", labels, help, metrics.fallbacks.clone());
        let help = "Bytes of changed memories uploaded to the GPU";
        registrar.register("gpu_uploaded_bytes", labels, help, metrics.uploaded_bytes.clone());
        let help = "Bytes of GPU memory in columns";
        registrar.register("gpu_allocated_bytes", labels, help, metrics.allocated_bytes.clone());
        registrar.register("gpu_memories", labels, "Memories of the partitions on the GPU", metrics.memories.clone());
        let help = "1 if the worker disabled this GPU after an error; a restart tries it again";
        registrar.register("gpu_disabled", labels, help, metrics.disabled.clone());
        let help = "Memories of partitions that fit on no GPU, on workers with GPUs";
        registrar.register("gpu_host_memories", &[], help, metrics.host_memories.clone());
        metrics
    }

    fn set(&self, status: &MirrorStatus) {
        for device in &status.devices {
            let labels = GpuLabels { device: device.id.clone() };
            let count = |family: &Family<GpuLabels, Counter>, value| {
                family.get_or_create(&labels).inner().store(value, Ordering::Relaxed);
            };
            count(&self.passes, device.passes);
            count(&self.fallbacks, device.fallbacks);
            count(&self.uploaded_bytes, device.mirrored_bytes);
            let state = |family: &Family<GpuLabels, Gauge<u64, AtomicU64>>, value| {
                family.get_or_create(&labels).set(value);
            };
            state(&self.allocated_bytes, device.bytes);
            state(&self.memories, device.memories);
            state(&self.disabled, u64::from(device.given_up.is_some()));
        }
        if status.devices.is_empty() {
            // An alert refers to this series, so a worker without GPUs exports it, too; an empty label counts as absent.
            self.disabled.get_or_create(&GpuLabels { device: String::new() }).set(0);
        }
        self.host_memories.set(status.host_memories);
    }
}

impl Metrics {
    pub(crate) fn new(
        cluster: &str,
        ordinal: u32,
        traffic: &Traffic,
        connections: &ConnectionCounters,
        has_tls: bool,
    ) -> Self {
        let labels = WORKER_LABELS.into_iter().zip([cluster.to_owned(), ordinal.to_string()]);
        let labels = labels.map(|(name, value)| (name.into(), value.into()));
        let registry = Registry::with_prefix_and_labels("engram", labels);
        let mut registrar = Registrar { registry, catalog: Vec::new() };
        // From 20 us, about the cost of a loopback call, to 10 s, the deadline of an attempt.
        let buckets = || {
            HistogramWithExemplars::new(
                [2e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0].into_iter(),
            )
        };
        let calls = Calls {
            total: Family::default(),
            seconds: Family::new_with_constructor(buckets as fn() -> HistogramWithExemplars<TraceLabels>),
        };
        registrar.register(
            "requests",
            &["method", "code"],
            "Calls by method and gRPC status code",
            calls.total.clone(),
        );
        let help = "Time from the head of a request to the head of its response";
        registrar.register("request_duration_seconds", &["method"], help, calls.seconds.clone());
        let by_traffic = [
            ("peer_sent_bytes", "Bytes sent to other workers on peer streams", &traffic.sent_bytes),
            ("peer_received_bytes", "Bytes received from other workers on peer streams", &traffic.received_bytes),
            ("peer_streams_opened", "Streams to other workers opened", &traffic.opened),
            (
                "peer_stream_overflows",
                "Streams closed because the other worker did not read what was queued",
                &traffic.overflowed,
            ),
        ];
        for (name, help, counter) in by_traffic {
            registrar.register(name, &[], help, counter.clone());
        }
        let updates = counter(&mut registrar, "updates", "Updates and rows applied for clients of this worker");
        let help = "Learning epochs completed, counted per partition";
        let partition_epochs = counter(&mut registrar, "partition_epochs", help);
        let help = "Partitions that this worker started to serve as primary";
        let promotions = counter(&mut registrar, "partition_promotions", help);
        let help = "Sub-requests forwarded to the primary of their partition";
        let forwarded = counter(&mut registrar, "forwarded_requests", help);
        let store = StoreMetrics::new(&mut registrar);
        let buffers = BufferMetrics::new(&mut registrar);
        let training = TrainingMetrics::new(&mut registrar);
        let federated = FederatedMetrics::new(&mut registrar);
        let build = Family::<BuildLabels, Gauge>::default();
        registrar.register("build_info", &["version", "device"], "Always 1; version and device in use", build.clone());
        let admission = AdmissionMetrics::new(&mut registrar);
        let connections = ConnectionMetrics::new(&mut registrar, connections);
        let tls = has_tls.then(|| TlsMetrics::new(&mut registrar));
        let Registrar { registry, catalog } = registrar;
        Self {
            registry,
            catalog,
            calls,
            updates,
            training,
            federated,
            partition_epochs,
            forwarded,
            promotions,
            buffers,
            build,
            admission,
            connections,
            tls,
            store,
        }
    }

    /// Renders the page; `partitions` are the current statuses of the partitions on this worker.
    pub(crate) fn page(&self, shared: &Shared, partitions: &[PartitionStatus]) -> String {
        let served = || partitions.iter().filter(|status| status.primary);
        let replicas = shared.options.spec.replication_factor;
        let store = &self.store;
        store.replication_lag.set(served().map(|status| status.lag).max().unwrap_or(0));
        store.rereplication_lag.set(served().map(|status| status.re_replication_lag).max().unwrap_or(0));
        store.under_replicated.set(served().filter(|status| status.in_sync < replicas).count() as u64);
        store.rereplicating.set(served().filter(|status| !status.re_replicating_to.is_empty()).count() as u64);
        let stats = shared.engine.stats();
        let set = |counter: &Counter, value: u64| counter.inner().store(value, Ordering::Relaxed);
        set(&store.applied_records, stats.applied_records);
        set(&store.created, stats.created_memories);
        set(&store.evicted, stats.evicted_memories);
        set(&store.rejected, stats.refused_records);
        set(&store.failed, stats.failed_records);
        let rejected: u64 = RequestKind::ALL.iter().map(|kind| shared.admission.with(*kind, |it| it.rejected())).sum();
        set(&store.overload_rejections, stats.overloaded_calls + rejected);
        set(&store.wal_written_bytes, stats.logged_bytes);
        set(&store.snapshots, stats.snapshots);
        set(&store.failed_snapshots, stats.failed_snapshots);
        set(&store.scrubbed_snapshots, stats.scrubbed_snapshots);
        set(&store.damaged_snapshots, stats.damaged_snapshots);
        store.payloads.set(&stats);
        set(&store.reads, stats.reads);
        set(&store.panics, panics::count());
        set(&store.replicated_records, stats.shipped_records);
        set(&store.transfers_sent, stats.transfers_sent);
        set(&store.transfer_sent_bytes, stats.transfer_sent_bytes);
        set(&store.transfers_installed, stats.transfers_installed);
        let gpu = stats.gpu.clone().unwrap_or_default();
        store.gpus.set(&gpu);
        let threshold = gpu.threshold.filter(|_| gpu.at_work().next().is_some());
        store.gpu_threshold.set(threshold.map_or(-1, |memories| i64::try_from(memories).unwrap_or(i64::MAX)));
        store.streams.set(shared.links.members().len() as u64);
        store.memories.set(stats.memories);
        store.memory_bytes.set(stats.memory_bytes);
        store.run_records.set(stats.run_records);
        store.run_record_bytes.set(stats.run_record_bytes);
        store.sessions.set(stats.sessions);
        store.session_bytes.set(stats.session_bytes);
        store.epoch_entries.set(stats.epoch_entries);
        store.wal_bytes.set(stats.log_bytes);
        if let Ok(disk) = nix::sys::statvfs::statvfs(&shared.options.state_dir) {
            store.disk_bytes.set(disk.blocks().saturating_mul(disk.fragment_size()));
            store.disk_free_bytes.set(disk.blocks_available().saturating_mul(disk.fragment_size()));
        }
        store.pending.set(stats.waiting_records);
        store.partitions.set(shared.engine.versions(shared.partitions()).len() as u64);
        store.map_version.set(shared.view.borrow().version());
        store.ready.set(u64::from(shared.is_ready()));
        store.resident.set(resident_bytes());
        store.uptime.set(shared.started.elapsed().as_secs());
        store.event_loop_lag.set(shared.event_loop_lag_ms.load(Ordering::Relaxed) as f64 / 1e3);
        self.admission.set(&shared.admission);
        self.connections.open.set(self.connections.counters.open() as u64);
        if let Some((tls, keys)) = self.tls.as_ref().zip(shared.keys.as_ref()) {
            tls.set(keys, shared.accounts.as_deref());
        }
        let build = BuildLabels { version: env!("CARGO_PKG_VERSION"), device: shared.device.name(stats.gpu.as_ref()) };
        // The device may have changed since the last scrape.
        self.build.clear();
        self.build.get_or_create(&build).set(1);
        let mut page = String::new();
        text::encode(&mut page, &self.registry).expect("writing to a string does not fail");
        let page_end = "# EOF\n";
        page.truncate(page.len() - if page.ends_with(page_end) { page_end.len() } else { 0 });
        let labels =
            format!("learner_cluster=\"{}\",worker=\"{}\"", shared.options.cluster_name, shared.options.ordinal);
        let values =
            [(&stats.batch_records, 1.0), (&stats.batch_bytes, 1.0), (&stats.write_us, 1e-6), (&stats.apply_us, 1e-6)];
        for ((name, help), (distribution, unit)) in DISTRIBUTIONS.into_iter().zip(values) {
            encode_distribution(&mut page, &labels, name, help, distribution, unit);
        }
        page.push_str(page_end);
        page
    }
}

/// Histograms that the store collects itself: name and help.
const DISTRIBUTIONS: [(&str, &str); 4] = [
    ("wal_batch_records", "Records per batch of the write-ahead log"),
    ("wal_batch_bytes", "Bytes per batch of the write-ahead log"),
    ("wal_sync_duration_seconds", "Time until a batch of the write-ahead log was durable"),
    ("apply_duration_seconds", "Time to apply a batch"),
];

/// Appends a distribution of the store, whose buckets are powers of two, as a histogram.
fn encode_distribution(page: &mut String, labels: &str, name: &str, help: &str, values: &Distribution, unit: f64) {
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

const fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_has_a_unique_prefixed_name_in_base_units() {
        let catalog = catalog();
        for pair in catalog.windows(2) {
            assert!(pair[0].name < pair[1].name, "{} is registered twice", pair[1].name);
        }
        for metric in catalog {
            let is_total = metric.name.ends_with("_total");
            assert_eq!(is_total, metric.metric_type == MetricType::Counter, "{}", metric.name);
            let foreign_unit = ["_ms", "_milliseconds", "_us", "_mib"].into_iter().find(|it| metric.name.contains(it));
            assert_eq!(foreign_unit, None, "{} is not in a base unit", metric.name);
        }
    }

    #[test]
    fn a_client_cannot_create_series() {
        let metrics = Metrics::new("demo", 0, &Traffic::default(), &ConnectionCounters::default(), false);
        let calls = &metrics.calls;
        assert_eq!(calls.name(calls.method("/engram.v1.MemoryService/Rank")), "Rank");
        assert_eq!(calls.name(calls.method("/x/anything")), "other");
        assert!(resident_bytes() > 0, "the system reports the resident memory of a process");
    }
}
