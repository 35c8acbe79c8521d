//! TCP of the simulated network for tonic, workers and clients.

use engram_client::Dial;
use engram_worker::machine::{Connection, Listener};
use futures::future::BoxFuture;
use futures::{StreamExt as _, stream};
use hyper_util::rt::TokioIo;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint, Error};
use tower::service_fn;
use turmoil::net::{TcpListener, TcpStream};

/// Connects to simulated hosts by name.
pub(crate) struct Wire;

impl Dial for Wire {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        Box::pin(async move { endpoint.connect_with_connector(service_fn(connect)).await })
    }

    fn connect_lazy(&self, endpoint: Endpoint) -> Channel {
        endpoint.connect_with_connector_lazy(service_fn(connect))
    }
}

fn connect(uri: Uri) -> BoxFuture<'static, io::Result<TokioIo<TcpStream>>> {
    Box::pin(async move {
        let address = uri.authority().map(ToString::to_string).unwrap_or_default();
        Ok(TokioIo::new(TcpStream::connect(address).await?))
    })
}

/// Listens on a port of this simulated host.
pub(crate) async fn listen(port: u16) -> io::Result<Listener> {
    let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let listener = TcpListener::bind(address).await?;
    let incoming = stream::unfold(listener, |listener| async {
        let accepted = listener.accept().await.map(|(stream, _)| Connection::Simulated(Box::pin(stream)));
        Some((accepted, listener))
    });
    Ok(Listener { address, incoming: incoming.boxed() })
}
