//! Metrics of a worker in the Prometheus text format. Names begin with `engram_`; every series has the labels `learner_cluster` and `worker`.

mod calls;
mod gpu;
mod limits;
mod registry;
mod store;

pub(crate) use calls::Calls;
pub(crate) use registry::Registrar;
pub use registry::{MetricDescriptor, MetricType};
pub(crate) use store::resident_bytes;

use crate::buffers::BufferMetrics;
use crate::peers::Traffic;
use crate::runs::FederatedMetrics;
use crate::service::connections::accept::ConnectionCounters;
use crate::shared::Shared;
use crate::training::TrainingMetrics;
use engram_proto::v1::PartitionStatus;
use limits::{AdmissionMetrics, ConnectionMetrics, TlsMetrics};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use registry::{WORKER_LABELS, counter, descriptor};
use store::{DISTRIBUTIONS, StoreMetrics, encode_distribution};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
    device: String,
}

/// Returns the descriptors of all metrics that a worker exports, by name.
pub fn catalog() -> Vec<MetricDescriptor> {
    let mut catalog = Metrics::new("", 0, &Traffic::default(), &ConnectionCounters::default(), true).catalog;
    catalog.extend(DISTRIBUTIONS.map(|(name, help)| descriptor(name, MetricType::Histogram, &[], help)));
    catalog.sort_by(|left, right| left.name.cmp(&right.name));
    catalog
}

/// The metrics of a worker.
///
/// One field for each component that counts, and one for each counter of the services, therefore more than a dozen: nothing here decides.
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
        let calls = Calls::new(&mut registrar);
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
        let stats = shared.engine.stats();
        self.store.set(shared, partitions, &stats);
        self.admission.set(shared.limits.admission());
        self.connections.open.set(self.connections.counters.open() as u64);
        if let Some((tls, keys)) = self.tls.as_ref().zip(shared.setup.keys.as_ref()) {
            tls.set(keys, shared.setup.accounts.as_deref());
        }
        let build =
            BuildLabels { version: env!("CARGO_PKG_VERSION"), device: shared.setup.device.name(stats.gpu.as_ref()) };
        // The device may have changed since the last scrape.
        self.build.clear();
        self.build.get_or_create(&build).set(1);
        let mut page = String::new();
        text::encode(&mut page, &self.registry).expect("writing to a string does not fail");
        let page_end = "# EOF\n";
        page.truncate(page.len() - if page.ends_with(page_end) { page_end.len() } else { 0 });
        let labels = format!(
            "learner_cluster=\"{}\",worker=\"{}\"",
            shared.setup.options.cluster_name, shared.setup.options.ordinal
        );
        let values =
            [(&stats.batch_records, 1.0), (&stats.batch_bytes, 1.0), (&stats.write_us, 1e-6), (&stats.apply_us, 1e-6)];
        for ((name, help), (distribution, unit)) in DISTRIBUTIONS.into_iter().zip(values) {
            encode_distribution(&mut page, &labels, name, help, distribution, unit);
        }
        page.push_str(page_end);
        page
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
