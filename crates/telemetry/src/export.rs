//! The connection to a collector, and log lines about a collector that does not accept traces.

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector};
use hyper_util::client::legacy::connect::HttpConnector;
use opentelemetry_otlp::{RetryPolicy, WithExportConfig as _, WithTonicConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tonic::transport::{Channel, Endpoint};

use crate::Error;
use crate::settings::{Traces, Trust};

/// Connection time limit: part of the time of one export.
const CONNECT: Duration = Duration::from_secs(5);
/// Minimum interval between two warnings about an unavailable collector.
const WARN_INTERVAL: Duration = Duration::from_secs(600);

/// Creates an exporter, which connects on first use. Must be called on the runtime that carries the connection.
pub(crate) fn exporter(traces: &Traces) -> Result<QuietExporter, Error> {
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_channel(channel(traces)?)
        .with_timeout(traces.timeout)
        // Not its default everywhere: a collector that restarts is away for a second.
        .with_retry_policy(RetryPolicy::recommended())
        .build()
        .map_err(|error| Error::Exporter(error.to_string()))?;
    Ok(QuietExporter { exporter, endpoint: traces.endpoint.to_string(), availability: Mutex::default() })
}

fn channel(traces: &Traces) -> Result<Channel, Error> {
    let endpoint = Endpoint::from(traces.endpoint.clone()).timeout(traces.timeout);
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(CONNECT));
    tcp.set_nodelay(true);
    if traces.endpoint.scheme_str() == Some("http") {
        return Ok(endpoint.connect_with_connector_lazy(tcp));
    }
    Ok(endpoint.connect_with_connector_lazy(HttpsConnector::from((tcp, tls(&traces.trust)?))))
}

fn tls(trust: &Trust) -> Result<Arc<ClientConfig>, Error> {
    let invalid = |what: &dyn std::fmt::Display| Error::Exporter(format!("TLS to the collector: {what}"));
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(ring)
        .with_safe_default_protocol_versions()
        .map_err(|error| invalid(&error))?;
    let read = |path: &std::path::Path| {
        let found = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        found.map_err(|error| invalid(&format!("{}: {error}", path.display())))
    };
    let builder = match &trust.roots {
        None => builder.with_native_roots().map_err(|error| invalid(&error))?,
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for root in read(path)? {
                roots.add(root).map_err(|error| invalid(&format!("{}: {error}", path.display())))?;
            }
            builder.with_root_certificates(roots)
        }
    };
    let mut config = match &trust.own {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let secret = PrivateKeyDer::from_pem_file(key);
            let secret = secret.map_err(|error| invalid(&format!("{}: {error}", key.display())))?;
            builder.with_client_auth_cert(read(certificate)?, secret).map_err(|error| invalid(&error))?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// An exporter that logs when a collector becomes unavailable and available, and little in between. Spans that could
/// not be sent are lost, without delaying anything.
#[derive(Debug)]
pub(crate) struct QuietExporter {
    exporter: opentelemetry_otlp::SpanExporter,
    endpoint: String,
    availability: Mutex<Availability>,
}

/// State of the warnings.
#[derive(Debug, Default)]
struct Availability {
    warned: Option<Instant>,
    is_down: bool,
    lost: usize,
}

impl Availability {
    /// Notes a failed export; returns the number of lost spans if a warning is due.
    fn failed(&mut self, spans: usize, now: Instant) -> Option<usize> {
        self.lost += spans;
        if self.warned.is_some_and(|warned| now.saturating_duration_since(warned) < WARN_INTERVAL) {
            return None;
        }
        (self.warned, self.is_down) = (Some(now), true);
        Some(std::mem::take(&mut self.lost))
    }

    /// Notes a successful export; returns whether to log the recovery.
    fn succeeded(&mut self) -> bool {
        std::mem::take(&mut self.is_down)
    }
}

impl SpanExporter for QuietExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let result = self.exporter.export(batch).await;
        let mut availability = self.availability.lock();
        match &result {
            Err(error) => {
                if let Some(lost) = availability.failed(spans, Instant::now()) {
                    tracing::warn!(endpoint = self.endpoint, %error, lost, "failed to export traces");
                }
            }
            Ok(()) if availability.succeeded() => {
                tracing::info!(endpoint = self.endpoint, "trace export has recovered");
            }
            Ok(()) => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_about_an_unavailable_collector_are_rare_and_count_all_lost_spans() {
        let (mut availability, start) = (Availability::default(), Instant::now());
        assert_eq!(availability.failed(3, start), Some(3));
        assert_eq!(availability.failed(5, start + Duration::from_secs(5)), None);
        assert_eq!(availability.failed(1, start + WARN_INTERVAL), Some(6));
        assert!(availability.succeeded());
        assert!(!availability.succeeded());
        // An unstable collector causes no more warnings.
        assert_eq!(availability.failed(2, start + WARN_INTERVAL + Duration::from_secs(1)), None);
        assert!(!availability.succeeded());
    }
}
