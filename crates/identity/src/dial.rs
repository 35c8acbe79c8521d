//! TLS on the connections that a process makes.

use crate::{Expected, Keys, Roots};
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

/// How long a handshake may take.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);

/// Connects to `host:port`, where whom is `expected` must answer.
///
/// It returns when the other side has let this one in: a listener speaks first (of HTTP/2 its settings), and what it says instead is the
/// error.
///
/// # Errors
/// Nobody listens, somebody else does, or this process is refused. The text says which.
pub async fn connect(keys: &Keys, expected: Expected, address: &str) -> io::Result<TlsStream<TcpStream>> {
    keys.look_if_due();
    let stream = reach(address).await?;
    // With the certificate of this moment.
    secured(keys.client(expected), keys.name().cluster, address, stream).await
}

/// The same of whoever has no certificate: whom is `expected` in `cluster` must answer, with one that leads to `roots`.
///
/// # Errors
/// As [`connect`].
pub async fn connect_anonymously(
    roots: &Roots,
    cluster: ClusterId,
    expected: Expected,
    address: &str,
) -> io::Result<TlsStream<TcpStream>> {
    connect_anonymously_over(roots, cluster, expected, address, reach(address).await?).await
}

/// The same over a stream that is there; `address` is what errors call it.
///
/// # Errors
/// As [`connect`].
pub async fn connect_anonymously_over<S: AsyncRead + AsyncWrite + Unpin>(
    roots: &Roots,
    cluster: ClusterId,
    expected: Expected,
    address: &str,
    stream: S,
) -> io::Result<TlsStream<S>> {
    secured(roots.client(cluster, expected), cluster, address, stream).await
}

/// What stands where the name of a host is expected: a listener of several clusters learns from it which is meant. It is sent in clear,
/// and not checked: the certificate has another kind of name.
const SUFFIX: &str = ".engram";

fn server_name(cluster: ClusterId) -> ServerName<'static> {
    ServerName::try_from(format!("{cluster}{SUFFIX}")).expect("digits and a word are a name of a host")
}

/// The cluster that a caller means.
pub(crate) fn meant(server_name: &str) -> Option<ClusterId> {
    server_name.strip_suffix(SUFFIX)?.parse().ok()
}

async fn reach(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn secured<S: AsyncRead + AsyncWrite + Unpin>(
    config: Arc<ClientConfig>,
    cluster: ClusterId,
    address: &str,
    stream: S,
) -> io::Result<TlsStream<S>> {
    let connector = TlsConnector::from(config);
    let greeted = timeout(HANDSHAKE, async {
        let mut stream = connector.connect(server_name(cluster), stream).await?;
        if stream.fill_buf().await?.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection"));
        }
        Ok(stream)
    });
    match greeted.await {
        Ok(result) => result.map_err(|error| told(address, &error)),
        Err(_) => {
            let text = format!("{address} did not finish a TLS handshake within {} s", HANDSHAKE.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        }
    }
}

/// The error in words of certificates.
fn told(address: &str, error: &io::Error) -> io::Error {
    use rustls::{AlertDescription, CertificateError, Error, OtherError};
    let text = match error.get_ref().and_then(|source| source.downcast_ref::<Error>()) {
        Some(Error::InvalidMessage(_)) => format!("{address} does not speak TLS"),
        Some(Error::InvalidCertificate(CertificateError::Other(OtherError(cause)))) => {
            format!("{address} is not believed: {cause}")
        }
        Some(Error::InvalidCertificate(cause)) => format!("{address} is not believed: {cause}"),
        Some(Error::AlertReceived(alert)) => {
            let why = match alert {
                AlertDescription::CertificateExpired => "it is expired, or not valid yet",
                AlertDescription::UnknownCA | AlertDescription::DecryptError => "another authority signed it",
                AlertDescription::AccessDenied => "it is of another cluster",
                AlertDescription::CertificateRequired => "there is none",
                _ => return io::Error::new(error.kind(), format!("{address} refused this connection: {alert:?}")),
            };
            format!("{address} refused the certificate of this process: {why}")
        }
        _ => format!("{address}: TLS failed: {error}"),
    };
    io::Error::new(error.kind(), text)
}
