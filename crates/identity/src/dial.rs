//! TLS for outgoing connections.

use crate::{ExpectedPeer, Keys, Roots};
use engram_memory::ClusterId;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Limit of a handshake.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Connects to `host:port`, where the `expected` peer must answer.
///
/// It returns once the listener has accepted this process: a listener speaks first (its HTTP/2 settings), and anything
/// else it sends is the error.
///
/// # Errors
/// No listener, another peer, or this process is rejected. The text says which.
pub async fn connect(keys: &Keys, expected: ExpectedPeer, address: &str) -> io::Result<TlsStream<TcpStream>> {
    keys.reload_if_due();
    let stream = connect_tcp(address).await?;
    // Uses the certificate that is current now.
    handshake(keys.client(expected), keys.name().cluster, address, stream).await
}

/// Connects without a certificate: the `expected` peer of `cluster` must answer, with a certificate signed by one of
/// `roots`.
///
/// # Errors
/// As [`connect`].
pub async fn connect_anonymously(
    roots: &Roots,
    cluster: ClusterId,
    expected: ExpectedPeer,
    address: &str,
) -> io::Result<TlsStream<TcpStream>> {
    connect_anonymously_over(roots, cluster, expected, address, connect_tcp(address).await?).await
}

/// Performs the handshake of [`connect_anonymously`] over an existing stream; errors name it `address`.
///
/// # Errors
/// As [`connect`].
pub async fn connect_anonymously_over<S: AsyncRead + AsyncWrite + Unpin>(
    roots: &Roots,
    cluster: ClusterId,
    expected: ExpectedPeer,
    address: &str,
    stream: S,
) -> io::Result<TlsStream<S>> {
    handshake(roots.client(cluster, expected), cluster, address, stream).await
}

/// Sent as server name, in plaintext: a listener of several clusters learns from it which one is meant. It is not
/// verified: the certificate has another kind of name.
const SUFFIX: &str = ".engram";

pub(crate) fn server_name(cluster: ClusterId) -> ServerName<'static> {
    ServerName::try_from(format!("{cluster}{SUFFIX}")).expect("digits and a suffix are a valid host name")
}

/// Returns the cluster that a caller names.
pub(crate) fn intended_cluster(server_name: &str) -> Option<ClusterId> {
    server_name.strip_suffix(SUFFIX)?.parse().ok()
}

async fn connect_tcp(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    config: Arc<ClientConfig>,
    cluster: ClusterId,
    address: &str,
    stream: S,
) -> io::Result<TlsStream<S>> {
    let connector = TlsConnector::from(config);
    let connected = timeout(HANDSHAKE_TIMEOUT, async {
        let mut stream = connector.connect(server_name(cluster), stream).await?;
        if stream.fill_buf().await?.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed the connection"));
        }
        Ok(stream)
    });
    match connected.await {
        Ok(result) => result.map_err(|error| describe(address, &error)),
        Err(_) => {
            let text = format!("{address} did not complete a TLS handshake within {} s", HANDSHAKE_TIMEOUT.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        }
    }
}

/// Describes a TLS error in terms of certificates.
fn describe(address: &str, error: &io::Error) -> io::Error {
    use rustls::{AlertDescription, CertificateError, Error, OtherError};
    let text = match error.get_ref().and_then(|source| source.downcast_ref::<Error>()) {
        Some(Error::InvalidMessage(_)) => format!("{address} does not speak TLS"),
        Some(Error::InvalidCertificate(CertificateError::Other(OtherError(cause)))) => {
            format!("{address} is not trusted: {cause}")
        }
        Some(Error::InvalidCertificate(cause)) => format!("{address} is not trusted: {cause}"),
        Some(Error::AlertReceived(alert)) => {
            let why = match alert {
                AlertDescription::CertificateExpired => "it has expired, or is not valid yet",
                AlertDescription::UnknownCA | AlertDescription::DecryptError => "it is signed by another CA",
                AlertDescription::AccessDenied => "it belongs to another cluster",
                AlertDescription::CertificateRequired => "none was presented",
                _ => return io::Error::new(error.kind(), format!("{address} rejected this connection: {alert:?}")),
            };
            format!("{address} rejected the certificate of this process: {why}")
        }
        _ => format!("{address}: TLS failed: {error}"),
    };
    io::Error::new(error.kind(), text)
}
