//! Limits of the services: requests in flight, connections, certificates and tokens.

use super::registry::{Registrar, gauge};
use crate::service::connections::accept::ConnectionCounters;
use crate::service::edge::authorization::AccountAuthorizer;
use crate::write::admission::{Admission, RequestKind};
use engram_identity::{Keys, Reason};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

/// Admission control by kind of request.
pub(super) struct AdmissionMetrics {
    limit: Family<KindLabels, Gauge<u64, AtomicU64>>,
    in_flight: Family<KindLabels, Gauge<u64, AtomicU64>>,
    rejected: Family<KindLabels, Counter>,
}

impl AdmissionMetrics {
    pub(super) fn new(registrar: &mut Registrar) -> Self {
        let metrics = Self { limit: Family::default(), in_flight: Family::default(), rejected: Family::default() };
        let help = "Adaptive limit of reads and writes in flight";
        registrar.register("requests_in_flight_limit", &["kind"], help, metrics.limit.clone());
        let help = "Reads and writes in flight";
        registrar.register("requests_in_flight", &["kind"], help, metrics.in_flight.clone());
        let help = "Reads and writes rejected because the limit of requests in flight was reached";
        registrar.register("rejected_requests", &["kind"], help, metrics.rejected.clone());
        metrics
    }

    pub(super) fn set(&self, admission: &Admission) {
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
pub(super) struct ConnectionMetrics {
    pub(super) open: Gauge<u64, AtomicU64>,
    pub(super) counters: ConnectionCounters,
}

impl ConnectionMetrics {
    pub(super) fn new(registrar: &mut Registrar, counters: &ConnectionCounters) -> Self {
        let open = gauge(registrar, "connections", "Open connections of all listeners");
        let help = "Connections refused because too many were open or too few file descriptors were free";
        registrar.register("refused_connections", &[], help, counters.refused.clone());
        let help = "Connections that could not be accepted, for example without a free file descriptor";
        registrar.register("failed_accepts", &[], help, counters.failed.clone());
        Self { open, counters: counters.clone() }
    }
}

/// Authentication and certificates; only with TLS.
pub(super) struct TlsMetrics {
    failures: Family<ReasonLabels, Counter>,
    expiry: Gauge<i64>,
    reload_failures: Counter,
    token_reload_failures: Counter,
}

impl TlsMetrics {
    pub(super) fn new(registrar: &mut Registrar) -> Self {
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

    pub(super) fn set(&self, keys: &Keys, accounts: Option<&AccountAuthorizer>) {
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
