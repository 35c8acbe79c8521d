//! Connections through `engram proxy`: the way to a cluster whose addresses are not routable from here.

use engram_client::{Dial, Stream, StreamOpener};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint, Error};
use tower::service_fn;

/// Opens connections through the Unix socket of `engram proxy`.
#[derive(Clone)]
pub(crate) struct Proxy {
    socket: Arc<PathBuf>,
}

impl Proxy {
    /// Uses the proxy that listens on `socket`.
    pub(crate) fn new(socket: PathBuf) -> Self {
        Self { socket: Arc::new(socket) }
    }

    /// Opens a connection to `host:port`.
    async fn connect(self, address: String) -> io::Result<BufReader<UnixStream>> {
        let mut stream = BufReader::new(UnixStream::connect(self.socket.as_path()).await?);
        stream.write_all(format!("{address}\n").as_bytes()).await?;
        let mut answer = String::new();
        stream.read_line(&mut answer).await?;
        match answer.trim_end() {
            "ok" => Ok(stream),
            "" => Err(io::Error::other("the proxy has ended")),
            reason => Err(io::Error::other(reason.to_owned())),
        }
    }

    fn of_uri(&self, uri: &Uri) -> BoxFuture<'static, io::Result<TokioIo<BufReader<UnixStream>>>> {
        let address = uri.authority().map(ToString::to_string).unwrap_or_default();
        self.clone().connect(address).map(|stream| stream.map(TokioIo::new)).boxed()
    }
}

impl StreamOpener for Proxy {
    fn open(&self, address: &str) -> BoxFuture<'static, io::Result<Box<dyn Stream>>> {
        let opened = self.clone().connect(address.to_owned());
        opened.map(|stream| stream.map(|stream| Box::new(stream) as Box<dyn Stream>)).boxed()
    }
}

impl Dial for Proxy {
    fn connect(&self, endpoint: Endpoint) -> BoxFuture<'static, Result<Channel, Error>> {
        let proxy = self.clone();
        async move { endpoint.connect_with_connector(service_fn(move |uri| proxy.of_uri(&uri))).await }.boxed()
    }

    fn connect_lazy(&self, endpoint: Endpoint) -> Channel {
        let proxy = self.clone();
        endpoint.connect_with_connector_lazy(service_fn(move |uri| proxy.of_uri(&uri)))
    }
}
