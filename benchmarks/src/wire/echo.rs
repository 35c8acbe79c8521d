//! Lower bound of a call: a bare tonic server that immediately returns one message.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::task::Poll;

use anyhow::{Context, Result};
use engram_proto::v1::{GetMemoriesRequest, MemoryBatch};
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Context as TaskContext, Service};
use tonic::server::{NamedService, UnaryService};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic_prost::ProstCodec;

const PATH: PathAndQuery = PathAndQuery::from_static("/bench.Echo/Echo");

/// A client of an echo server, which stops with it.
pub(super) struct Echo {
    grpc: tonic::client::Grpc<Channel>,
    server: AbortHandle,
}

impl Echo {
    /// Starts a server that answers with `reply`, and connects to it.
    pub(super) async fn start(reply: MemoryBatch) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("failed to listen")?;
        let address = listener.local_addr().context("failed to listen")?;
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let serving = Server::builder().add_service(Replier { reply }).serve_with_incoming(incoming);
        let server = tokio::spawn(serving).abort_handle();
        Ok(Self { grpc: tonic::client::Grpc::new(connected(address).await?), server })
    }

    /// Makes one call.
    pub(super) async fn call(&mut self, message: GetMemoriesRequest) -> Result<MemoryBatch> {
        self.grpc.ready().await.context("the echo server does not respond")?;
        let codec: ProstCodec<GetMemoriesRequest, MemoryBatch> = ProstCodec::default();
        Ok(self.grpc.unary(tonic::Request::new(message), PATH, codec).await?.into_inner())
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Opens a connection like the client library does.
pub(super) async fn connected(address: SocketAddr) -> Result<Channel> {
    let endpoint = Channel::from_shared(format!("http://{address}")).context("invalid address")?;
    endpoint.tcp_nodelay(true).connect().await.context("failed to connect")
}

#[derive(Clone)]
struct Replier {
    reply: MemoryBatch,
}

impl NamedService for Replier {
    const NAME: &'static str = "bench.Echo";
}

impl Service<Request<Body>> for Replier {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let replier = self.clone();
        Box::pin(async move {
            let codec: ProstCodec<MemoryBatch, GetMemoriesRequest> = ProstCodec::default();
            Ok(tonic::server::Grpc::new(codec).unary(replier, request).await)
        })
    }
}

impl UnaryService<GetMemoriesRequest> for Replier {
    type Response = MemoryBatch;
    type Future = std::future::Ready<Result<tonic::Response<MemoryBatch>, Status>>;

    fn call(&mut self, _: tonic::Request<GetMemoriesRequest>) -> Self::Future {
        std::future::ready(Ok(tonic::Response::new(self.reply.clone())))
    }
}
