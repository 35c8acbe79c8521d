//! The way to a collector, and what is told where it does not take anything.

use std::sync::{Arc, Mutex, PoisonError};
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

/// Longest wait for a connection: part of the time of one export.
const CONNECT: Duration = Duration::from_secs(5);
/// A collector that is away for a day is told of so often, and no oftener.
const TELL_AGAIN: Duration = Duration::from_secs(600);

/// Makes an exporter; it connects when there is something to send. To be called on a runtime, which carries the connection.
pub(crate) fn exporter(traces: &Traces) -> Result<QuietExporter, Error> {
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_channel(channel(traces)?)
        .with_timeout(traces.timeout)
        // Not its default everywhere: a collector that is being restarted is away for a second.
        .with_retry_policy(RetryPolicy::recommended())
        .build()
        .map_err(|error| Error::Exporter(error.to_string()))?;
    Ok(QuietExporter { exporter, endpoint: traces.endpoint.to_string(), away: Mutex::default() })
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
    let unfit = |what: &dyn std::fmt::Display| Error::Exporter(format!("TLS to the collector: {what}"));
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(ring)
        .with_safe_default_protocol_versions()
        .map_err(|error| unfit(&error))?;
    let read = |path: &std::path::Path| {
        let found = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        found.map_err(|error| unfit(&format!("{}: {error}", path.display())))
    };
    let builder = match &trust.roots {
        None => builder.with_native_roots().map_err(|error| unfit(&error))?,
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for root in read(path)? {
                roots.add(root).map_err(|error| unfit(&format!("{}: {error}", path.display())))?;
            }
            builder.with_root_certificates(roots)
        }
    };
    let mut config = match &trust.own {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let secret = PrivateKeyDer::from_pem_file(key);
            let secret = secret.map_err(|error| unfit(&format!("{}: {error}", key.display())))?;
            builder.with_client_auth_cert(read(certificate)?, secret).map_err(|error| unfit(&error))?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// An exporter that says of a collector that is away when it goes and when it is back, and little between. What could not be sent is
/// lost: nobody waits for it.
#[derive(Debug)]
pub(crate) struct QuietExporter {
    exporter: opentelemetry_otlp::SpanExporter,
    endpoint: String,
    away: Mutex<Away>,
}

/// Since when nothing is told, and what was lost.
#[derive(Debug, Default)]
struct Away {
    told: Option<Instant>,
    is_away: bool,
    lost: usize,
}

impl Away {
    /// How many spans were lost, if that is to be told.
    fn fails(&mut self, spans: usize, now: Instant) -> Option<usize> {
        self.lost += spans;
        if self.told.is_some_and(|told| now.saturating_duration_since(told) < TELL_AGAIN) {
            return None;
        }
        (self.told, self.is_away) = (Some(now), true);
        Some(std::mem::take(&mut self.lost))
    }

    /// Whether that is to be told.
    fn works(&mut self) -> bool {
        std::mem::take(&mut self.is_away)
    }
}

impl SpanExporter for QuietExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let result = self.exporter.export(batch).await;
        let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
        match &result {
            Err(error) => {
                if let Some(lost) = away.fails(spans, Instant::now()) {
                    tracing::warn!(endpoint = self.endpoint, %error, lost, "the collector takes no traces");
                }
            }
            Ok(()) if away.works() => tracing::info!(endpoint = self.endpoint, "the collector takes traces again"),
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
    fn a_collector_that_is_away_is_told_of_rarely_and_nothing_lost_is_forgotten() {
        let (mut away, start) = (Away::default(), Instant::now());
        assert_eq!(away.fails(3, start), Some(3));
        assert_eq!(away.fails(5, start + Duration::from_secs(5)), None);
        assert_eq!(away.fails(1, start + TELL_AGAIN), Some(6));
        assert!(away.works());
        assert!(!away.works());
        // One that comes and goes is not told of more often.
        assert_eq!(away.fails(2, start + TELL_AGAIN + Duration::from_secs(1)), None);
        assert!(!away.works());
    }
}
