//! Plaintext connections that detect a TLS listener.

use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint, Error};
use tower::util::BoxCloneService;
use tower::{Service as _, ServiceExt as _};

/// First byte of a TLS record: an alert, or a handshake. HTTP/2 starts with the length of a short frame, whose first
/// byte is 0.
const TLS: [u8; 2] = [0x15, 0x16];

/// Marker in the error text: layers below the client library keep only the text of an error.
pub(crate) const SPEAKS_TLS: &str = "speaks TLS: this client has neither a certificate nor a token for it";

type Connector = BoxCloneService<tonic::codegen::http::Uri, TokioIo<Plain>, tower::BoxError>;

pub(crate) async fn connect(endpoint: Endpoint) -> Result<Channel, Error> {
    let connector = connector(&endpoint);
    endpoint.connect_with_connector(connector).await
}

pub(crate) fn connect_lazy(endpoint: &Endpoint) -> Channel {
    endpoint.connect_with_connector_lazy(connector(endpoint))
}

fn connector(endpoint: &Endpoint) -> Connector {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    // The connector divides this time among the addresses of a name.
    http.set_connect_timeout(endpoint.get_connect_timeout());
    let plain = tower::service_fn(move |uri: tonic::codegen::http::Uri| {
        let mut http = http.clone();
        async move {
            let address = uri.authority().map(ToString::to_string).unwrap_or_default();
            let stream = http.ready().await?.call(uri).await?;
            Ok::<_, tower::BoxError>(TokioIo::new(Plain { stream: stream.into_inner(), address: Some(address) }))
        }
    });
    BoxCloneService::new(plain)
}

/// A connection whose first byte is inspected.
struct Plain {
    stream: TcpStream,
    /// Its address, until that byte has arrived.
    address: Option<String>,
}

impl AsyncRead for Plain {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if self.address.is_none() || read.is_pending() {
            return read;
        }
        let address = self.address.take().unwrap_or_default();
        if buf.filled().get(before).is_some_and(|first| TLS.contains(first)) {
            let text = format!("{address} {SPEAKS_TLS}");
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, text)));
        }
        read
    }
}

impl AsyncWrite for Plain {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
