//! What this worker counts, in the format of Prometheus. Names begin with `engram_`; every series carries `learner_cluster` and `worker`.

use crate::admission::{Admission, Kind};
use crate::peers::Traffic;
use crate::rights::Accounts;
use crate::shared::Shared;
use engram_identity::{Keys, Reason};
use engram_kernels::Standing;
use engram_proto::v1::PartitionStatus;
use engram_store::Distribution;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use tonic::Code;

/// Methods whose calls are told apart; others are counted together, so that a caller cannot make series.
const METHODS: [&str; 25] = [
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
    "GetReport",
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

/// Calls by method and code.
#[derive(Debug, Clone)]
pub(crate) struct Calls {
    total: Family<CallLabels, Counter>,
    seconds: Family<MethodLabels, Histogram>,
    panics: Counter,
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

    pub(crate) fn count(&self, method: usize, code: Code, elapsed: Duration) {
        let method = METHODS[method];
        self.total.get_or_create(&CallLabels { method, code: code_name(code) }).inc();
        self.seconds.get_or_create(&MethodLabels { method }).observe(elapsed.as_secs_f64());
    }

    pub(crate) fn panicked(&self) {
        self.panics.inc();
    }
}

/// All that is counted.
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) calls: Calls,
    /// Updates and rows applied through the services.
    pub(crate) updates: Counter,
    /// Partitions' epochs completed.
    pub(crate) epoch_parts: Counter,
    /// Parts passed on to their owners.
    pub(crate) forwarded: Counter,
    /// Partitions that this worker began to serve.
    pub(crate) taken_over: Counter,
    build: Family<BuildLabels, Gauge>,
    admitted: Admitted,
    tls: Option<Tls>,
    mirrors: Mirrors,
}

/// What is let in, by kind.
struct Admitted {
    limit: Family<KindLabels, Gauge<u64, AtomicU64>>,
    under_way: Family<KindLabels, Gauge<u64, AtomicU64>>,
    refused: Family<KindLabels, Counter>,
}

impl Admitted {
    fn registered(registry: &mut Registry) -> Self {
        let own = Self { limit: Family::default(), under_way: Family::default(), refused: Family::default() };
        let help = "Reads and writes that may be under way: found out from how long they take";
        registry.register("admission_limit", help, own.limit.clone());
        registry.register("admission_under_way", "Reads and writes that are under way", own.under_way.clone());
        let help = "Reads and writes turned away because as many were under way as are answered in time";
        registry.register("admission_refused", help, own.refused.clone());
        own
    }

    fn set(&self, admission: &Admission) {
        for kind in Kind::ALL {
            let labels = KindLabels { kind: kind.word() };
            let (limit, under_way, refused) =
                admission.with(kind, |it| (it.limit() as u64, it.under_way() as u64, it.refused()));
            self.limit.get_or_create(&labels).set(limit);
            self.under_way.get_or_create(&labels).set(under_way);
            self.refused.get_or_create(&labels).inner().store(refused, Ordering::Relaxed);
        }
    }
}

/// What is counted under TLS.
struct Tls {
    refused: Family<ReasonLabels, Counter>,
    expiry: Gauge<i64>,
    failures: Counter,
    token_failures: Counter,
}

impl Tls {
    fn registered(registry: &mut Registry) -> Self {
        let own = Self {
            refused: Family::default(),
            expiry: Gauge::default(),
            failures: Counter::default(),
            token_failures: Counter::default(),
        };
        let help = "Connections and calls that were refused for their certificate or token, by reason";
        registry.register("tls_refused", help, own.refused.clone());
        let help = "Seconds until the certificate in use is valid no more";
        registry.register("certificate_expiry_seconds", help, own.expiry.clone());
        let help = "Looks at the certificates' files that found them of no use; the old ones stay in use";
        registry.register("certificate_reload_failures", help, own.failures.clone());
        let help = "Looks at the keys of tokens and the rights of accounts that found them of no use; what was known stays in use";
        registry.register("token_reload_failures", help, own.token_failures.clone());
        own
    }

    fn set(&self, keys: &Keys, accounts: Option<&Accounts>) {
        for reason in Reason::ALL {
            let counter = self.refused.get_or_create(&ReasonLabels { reason: reason.word() });
            counter.inner().store(keys.refusals().of(reason), Ordering::Relaxed);
        }
        let seconds = |duration: Duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
        let left = keys.until().duration_since(SystemTime::now());
        self.expiry.set(left.map_or_else(|error| -seconds(error.duration()), seconds));
        self.failures.inner().store(keys.failures(), Ordering::Relaxed);
        self.token_failures.inner().store(accounts.map_or(0, Accounts::failures), Ordering::Relaxed);
    }
}

/// Counters and gauges whose value lives elsewhere, set when the page is asked for.
struct Mirrors {
    applied_records: Counter,
    created: Counter,
    evicted: Counter,
    refused: Counter,
    failed: Counter,
    overloaded: Counter,
    logged_bytes: Counter,
    snapshots: Counter,
    failed_snapshots: Counter,
    scrubbed_snapshots: Counter,
    damaged_snapshots: Counter,
    reads: Counter,
    shipped_records: Counter,
    copies_sent: Counter,
    copied_bytes: Counter,
    copies_installed: Counter,
    memories: Gauge<u64, AtomicU64>,
    memory_bytes: Gauge<u64, AtomicU64>,
    log_bytes: Gauge<u64, AtomicU64>,
    gpus: Gpus,
    gpu_threshold: Gauge<i64>,
    waiting: Gauge<u64, AtomicU64>,
    partitions: Gauge<u64, AtomicU64>,
    map_version: Gauge<u64, AtomicU64>,
    ready: Gauge<u64, AtomicU64>,
    resident: Gauge<u64, AtomicU64>,
    uptime: Gauge<u64, AtomicU64>,
    lag_ms: Gauge<u64, AtomicU64>,
    links: Gauge<u64, AtomicU64>,
    replication_lag: Gauge<u64, AtomicU64>,
    healing_lag: Gauge<u64, AtomicU64>,
    short_of_copies: Gauge<u64, AtomicU64>,
    healing: Gauge<u64, AtomicU64>,
}

impl Mirrors {
    fn registered(registry: &mut Registry) -> Self {
        let gpu_threshold = Gauge::<i64>::default();
        let help = "Memories of a pass from which GPUs do it; -1 = never, or there is none";
        registry.register("gpu_threshold_memories", help, gpu_threshold.clone());
        let gpus = Gpus::registered(registry);
        Self {
            applied_records: counter(registry, "applied_records", "Records applied"),
            created: counter(registry, "created_memories", "Memories created"),
            evicted: counter(registry, "evicted_memories", "Memories evicted or removed"),
            refused: counter(registry, "refused_records", "Records refused before the log"),
            failed: counter(registry, "failed_records", "Records whose log batch could not be written"),
            overloaded: counter(
                registry,
                "overloaded_calls",
                "Calls turned away because as much was under way as is taken",
            ),
            logged_bytes: counter(registry, "logged_bytes", "Bytes of records logged"),
            snapshots: counter(registry, "snapshots", "Snapshots written"),
            failed_snapshots: counter(registry, "failed_snapshots", "Snapshots that failed"),
            scrubbed_snapshots: counter(registry, "scrubbed_snapshots", "Snapshots that were read again, and right"),
            damaged_snapshots: counter(
                registry,
                "damaged_snapshots",
                "Snapshots that were found damaged when they were read again",
            ),
            reads: counter(registry, "store_reads", "Reads that the store ran"),
            shipped_records: counter(registry, "shipped_records", "Records sent to other copies, each time"),
            copies_sent: counter(registry, "copies_sent", "Copies of a partition's state sent to a worker"),
            copied_bytes: counter(registry, "copied_bytes", "Bytes of such copies that were sent"),
            copies_installed: counter(
                registry,
                "copies_installed",
                "Copies of a partition's state that were taken over here",
            ),
            gpu_threshold,
            gpus,
            memories: gauge(registry, "memories", "Memories on this worker"),
            memory_bytes: gauge(registry, "memory_bytes", "Bytes of device, columns and indices"),
            log_bytes: gauge(registry, "log_bytes", "Bytes that the write-ahead log holds"),
            waiting: gauge(registry, "waiting_records", "Records proposed and not yet answered"),
            partitions: gauge(registry, "partitions", "Partitions served"),
            map_version: gauge(registry, "map_version", "Version of the partition map that this worker has"),
            ready: gauge(registry, "ready", "1 when all partitions given to this worker are served"),
            resident: gauge(registry, "resident_memory_bytes", "Resident memory of the process"),
            uptime: gauge(registry, "uptime_seconds", "Seconds since the worker started"),
            replication_lag: gauge(
                registry,
                "replication_lag_records",
                "Records that the copy in sync which is furthest behind lacks, of the partitions served here",
            ),
            healing_lag: gauge(
                registry,
                "healing_lag_records",
                "Records that the copy being made which is furthest behind lacks, of the partitions served here",
            ),
            short_of_copies: gauge(
                registry,
                "partitions_short_of_copies",
                "Partitions served here with fewer copies in sync than the cluster shall have",
            ),
            healing: gauge(registry, "partitions_healing", "Partitions served here of which copies are being made"),
            links: gauge(registry, "peer_links", "Open streams to other workers"),
            lag_ms: gauge(registry, "loop_lag_milliseconds", "Lateness of timers on the threads of the services"),
        }
    }
}

fn counter(registry: &mut Registry, name: &str, help: &str) -> Counter {
    let counter = Counter::default();
    registry.register(name, help, counter.clone());
    counter
}

fn gauge(registry: &mut Registry, name: &str, help: &str) -> Gauge<u64, AtomicU64> {
    let gauge = Gauge::default();
    registry.register(name, help, gauge.clone());
    gauge
}

/// What is counted of each GPU.
struct Gpus {
    passes: Family<GpuLabels, Counter>,
    fallbacks: Family<GpuLabels, Counter>,
    mirrored_bytes: Family<GpuLabels, Counter>,
    bytes: Family<GpuLabels, Gauge<u64, AtomicU64>>,
    memories: Family<GpuLabels, Gauge<u64, AtomicU64>>,
    given_up: Family<GpuLabels, Gauge<u64, AtomicU64>>,
    host_memories: Gauge<u64, AtomicU64>,
}

impl Gpus {
    fn registered(registry: &mut Registry) -> Self {
        let own = Self {
            passes: Family::default(),
            fallbacks: Family::default(),
            mirrored_bytes: Family::default(),
            bytes: Family::default(),
            memories: Family::default(),
            given_up: Family::default(),
            host_memories: Gauge::default(),
        };
        registry.register("gpu_passes", "Passes over memories that a GPU did, or its part of", own.passes.clone());
        let help = "Passes large enough for a GPU whose part the CPU did, as it was full or failed";
        registry.register("gpu_fallbacks", help, own.fallbacks.clone());
        let help = "Bytes of changed memories that a GPU took before its passes";
        registry.register("gpu_mirrored_bytes", help, own.mirrored_bytes.clone());
        registry.register("gpu_bytes", "Bytes of columns on a GPU", own.bytes.clone());
        registry.register("gpu_memories", "Memories of the partitions on a GPU", own.memories.clone());
        let help = "1 when this worker had a GPU and gave it up; restart it to try again";
        registry.register("gpu_given_up", help, own.given_up.clone());
        let help = "Memories of the partitions that no GPU has room for, where there are GPUs";
        registry.register("gpu_host_memories", help, own.host_memories.clone());
        own
    }

    fn set(&self, standing: &Standing) {
        for held in &standing.devices {
            let labels = GpuLabels { device: held.id.clone() };
            let count = |family: &Family<GpuLabels, Counter>, value| {
                family.get_or_create(&labels).inner().store(value, Ordering::Relaxed);
            };
            count(&self.passes, held.passes);
            count(&self.fallbacks, held.fallbacks);
            count(&self.mirrored_bytes, held.mirrored_bytes);
            let state = |family: &Family<GpuLabels, Gauge<u64, AtomicU64>>, value| {
                family.get_or_create(&labels).set(value);
            };
            state(&self.bytes, held.bytes);
            state(&self.memories, held.memories);
            state(&self.given_up, u64::from(held.given_up.is_some()));
        }
        if standing.devices.is_empty() {
            // An alert waits for this one, so every worker tells it; an empty label is none.
            self.given_up.get_or_create(&GpuLabels { device: String::new() }).set(0);
        }
        self.host_memories.set(standing.host_memories);
    }
}

impl Metrics {
    pub(crate) fn new(cluster: &str, ordinal: u32, traffic: &Traffic, has_tls: bool) -> Self {
        let labels = [("learner_cluster", cluster.to_owned()), ("worker", ordinal.to_string())];
        let labels = labels.map(|(name, value)| (name.into(), value.into()));
        let mut registry = Registry::with_prefix_and_labels("engram", labels.into_iter());
        // From 20 us, about the cost of a loopback call, to 10 s, the deadline of an attempt.
        let buckets =
            || Histogram::new([2e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0]);
        let calls = Calls {
            total: Family::default(),
            seconds: Family::new_with_constructor(buckets as fn() -> Histogram),
            panics: Counter::default(),
        };
        registry.register("requests", "Calls by method and gRPC code", calls.total.clone());
        registry.register("request_seconds", "Seconds from a call's head to its answer's", calls.seconds.clone());
        registry.register("panics", "Calls that ended in a panic", calls.panics.clone());
        let of_links = [
            ("peer_sent_bytes", "Bytes of records, copies and answers sent to other workers", &traffic.sent_bytes),
            (
                "peer_received_bytes",
                "Bytes of records, copies and answers that came from them",
                &traffic.received_bytes,
            ),
            ("peer_links_opened", "Streams to other workers that were opened", &traffic.opened),
            ("peer_links_overflowed", "Streams cut because a worker did not read what waited", &traffic.overflowed),
        ];
        for (name, help, counter) in of_links {
            registry.register(name, help, counter.clone());
        }
        let updates = counter(&mut registry, "updates", "Updates and rows applied for callers of this worker");
        let epoch_parts =
            counter(&mut registry, "partition_epochs", "Learning epochs completed, counted per partition");
        let taken_over = counter(&mut registry, "partitions_taken_over", "Partitions that this worker began to serve");
        let forwarded = counter(&mut registry, "forwarded_parts", "Parts of requests passed on to their owner");
        let mirrors = Mirrors::registered(&mut registry);
        let build = Family::<BuildLabels, Gauge>::default();
        registry.register("build_info", "Always 1; what runs here", build.clone());
        let admitted = Admitted::registered(&mut registry);
        let tls = has_tls.then(|| Tls::registered(&mut registry));
        Self { registry, calls, updates, epoch_parts, forwarded, taken_over, build, admitted, tls, mirrors }
    }

    /// The page, with how the partitions stand.
    pub(crate) fn page(&self, shared: &Shared, partitions: &[PartitionStatus]) -> String {
        let served = || partitions.iter().filter(|status| status.primary);
        let copies = shared.options.spec.replication_factor;
        self.mirrors.replication_lag.set(served().map(|status| status.lag).max().unwrap_or(0));
        self.mirrors.healing_lag.set(served().map(|status| status.healing_lag).max().unwrap_or(0));
        self.mirrors.short_of_copies.set(served().filter(|status| status.in_sync < copies).count() as u64);
        self.mirrors.healing.set(served().filter(|status| !status.healing.is_empty()).count() as u64);
        let stats = shared.engine.stats();
        let set = |counter: &Counter, value: u64| counter.inner().store(value, Ordering::Relaxed);
        let mirrors = &self.mirrors;
        set(&mirrors.applied_records, stats.applied_records);
        set(&mirrors.created, stats.created_memories);
        set(&mirrors.evicted, stats.evicted_memories);
        set(&mirrors.refused, stats.refused_records);
        set(&mirrors.failed, stats.failed_records);
        let refused: u64 = Kind::ALL.iter().map(|kind| shared.admission.with(*kind, |it| it.refused())).sum();
        set(&mirrors.overloaded, stats.overloaded_calls + refused);
        set(&mirrors.logged_bytes, stats.logged_bytes);
        set(&mirrors.snapshots, stats.snapshots);
        set(&mirrors.failed_snapshots, stats.failed_snapshots);
        set(&mirrors.scrubbed_snapshots, stats.scrubbed_snapshots);
        set(&mirrors.damaged_snapshots, stats.damaged_snapshots);
        set(&mirrors.reads, stats.reads);
        set(&mirrors.shipped_records, stats.shipped_records);
        set(&mirrors.copies_sent, stats.copies_sent);
        set(&mirrors.copied_bytes, stats.copied_bytes);
        set(&mirrors.copies_installed, stats.copies_installed);
        let gpu = stats.gpu.clone().unwrap_or_default();
        mirrors.gpus.set(&gpu);
        let threshold = gpu.threshold.filter(|_| gpu.at_work().next().is_some());
        mirrors.gpu_threshold.set(threshold.map_or(-1, |memories| i64::try_from(memories).unwrap_or(i64::MAX)));
        mirrors.links.set(shared.links.members().len() as u64);
        mirrors.memories.set(stats.memories);
        mirrors.memory_bytes.set(stats.memory_bytes);
        mirrors.log_bytes.set(stats.log_bytes);
        mirrors.waiting.set(stats.waiting_records);
        mirrors.partitions.set(shared.engine.versions(shared.partitions()).len() as u64);
        mirrors.map_version.set(shared.view.borrow().version());
        mirrors.ready.set(u64::from(shared.is_ready()));
        mirrors.resident.set(resident_bytes());
        mirrors.uptime.set(shared.started.elapsed().as_secs());
        mirrors.lag_ms.set(shared.loop_lag_ms.load(Ordering::Relaxed));
        self.admitted.set(&shared.admission);
        if let Some((tls, keys)) = self.tls.as_ref().zip(shared.keys.as_ref()) {
            tls.set(keys, shared.accounts.as_deref());
        }
        let build = BuildLabels { version: env!("CARGO_PKG_VERSION"), device: shared.device.name(stats.gpu.as_ref()) };
        // What runs here may have become another.
        self.build.clear();
        self.build.get_or_create(&build).set(1);
        let mut page = String::new();
        text::encode(&mut page, &self.registry).expect("writing to a string does not fail");
        let page_end = "# EOF\n";
        page.truncate(page.len() - if page.ends_with(page_end) { page_end.len() } else { 0 });
        let labels =
            format!("learner_cluster=\"{}\",worker=\"{}\"", shared.options.cluster_name, shared.options.ordinal);
        distribution(
            &mut page,
            &labels,
            "log_batch_records",
            "Records per batch of the log",
            &stats.batch_records,
            1.0,
        );
        distribution(&mut page, &labels, "log_batch_bytes", "Bytes per batch of the log", &stats.batch_bytes, 1.0);
        distribution(
            &mut page,
            &labels,
            "log_sync_seconds",
            "Seconds until a batch was durable",
            &stats.write_us,
            1e-6,
        );
        distribution(&mut page, &labels, "apply_seconds", "Seconds to apply a batch", &stats.apply_us, 1e-6);
        page.push_str(page_end);
        page
    }
}

/// A distribution of the store in powers of two, as a histogram.
fn distribution(page: &mut String, labels: &str, name: &str, help: &str, values: &Distribution, unit: f64) {
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

/// Resident memory of this process; 0 where the system does not tell.
pub(crate) fn resident_bytes() -> u64 {
    /// The kernel tells pages of this size on every platform that workers run on.
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
    fn a_caller_cannot_make_series() {
        let metrics = Metrics::new("demo", 0, &Traffic::default(), false);
        let calls = &metrics.calls;
        assert_eq!(calls.name(calls.method("/engram.v1.MemoryService/Rank")), "Rank");
        assert_eq!(calls.name(calls.method("/x/anything")), "other");
        assert!(resident_bytes() > 0, "the system tells what this process uses");
    }
}
