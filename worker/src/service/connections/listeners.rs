//! Listeners: clients, peers, administration (with its socket), HTTP.

use crate::lifecycle::worker::Error;
use crate::machine::{Connection, Listener};
use crate::options::{Listen, Tls};
use crate::peers;
use crate::service::admin::Admin;
use crate::service::connections::accept::{Acceptor, Bounded, ConnectionCounters, GRPC_SILENCE, OpenTracker};
use crate::service::connections::http;
use crate::service::edge::{Authorizer, Edge, ListenerKind};
use crate::service::{Memories, Plane};
use crate::shared::Shared;
use engram_identity::{Callers, Keys, accept};
use engram_proto::v1::admin_service_server::AdminServiceServer;
use engram_proto::v1::memory_service_server::MemoryServiceServer;
use engram_proto::{DESCRIPTORS, MAX_MESSAGE_BYTES, MAX_PEER_MESSAGE_BYTES};
use futures::{Stream, StreamExt as _};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;
use tonic::service::Routes;
use tonic::transport::Server;

/// Maximum duration of a call, whatever its client allows.
const CALL_DEADLINE: Duration = Duration::from_secs(60);
/// Maximum number of calls per connection, an eighth of those of the listener; further ones wait at their client.
const MAX_STREAMS: u32 = 128;
/// The same between workers, whose connections carry the calls of many clients.
const MAX_PEER_STREAMS: u32 = 1_024;
/// Maximum size of request headers; the library's default is 16 MiB.
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// HTTP/2 flow-control windows: one full message per stream, several per connection.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Largest HTTP/2 frame that is accepted: a batch of payload takes a quarter of the reads that it takes with the default of 16 KiB.
const FRAME_BYTES: u32 = 64 << 10;
const KEEPALIVE: Duration = Duration::from_secs(10);

/// A listener whose connections are counted.
struct BoundListener {
    listener: Listener,
    open: OpenTracker,
    /// Time after which a silent connection is closed.
    silence: Option<Duration>,
}

impl BoundListener {
    /// Returns the accepted connections.
    fn incoming(self) -> impl Stream<Item = std::io::Result<Bounded<Connection>>> {
        let Self { listener, open, silence } = self;
        listener.incoming.map(move |accepted| accepted.map(|it| Bounded::new(it, silence, open.opened())))
    }
}

/// Bound listeners.
pub(crate) struct Listeners {
    client: BoundListener,
    peer: BoundListener,
    /// Administration and HTTP; absent on a simulated machine.
    admin_and_http: Option<(BoundListener, Acceptor<TcpListener>)>,
    /// Connections of all listeners.
    connections: ConnectionCounters,
    /// Age after which clients and administrators must reconnect, under TLS.
    connection_age: Option<Duration>,
}

/// Addresses of the bound listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BoundAddresses {
    pub(crate) client: SocketAddr,
    pub(crate) peer: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) http: SocketAddr,
}

/// Accepts connections: over TLS if there are certificates, and then with a maximum lifetime.
fn listener(
    listener: Acceptor<TcpListener>,
    address: SocketAddr,
    keys: Option<&Arc<Keys>>,
    callers: Callers,
    lifetime: Option<Duration>,
) -> BoundListener {
    let open = listener.tracker();
    let incoming = listener.into_stream();
    let incoming = match keys {
        None => incoming.map(|accepted| accepted.map(Connection::Tcp)).boxed(),
        Some(keys) => accept(incoming, Arc::clone(keys), callers, lifetime)
            .map(|accepted| accepted.map(|secured| Connection::Tls(Box::new(secured))))
            .boxed(),
    };
    BoundListener { listener: Listener { address, incoming }, open, silence: Some(GRPC_SILENCE) }
}

impl Listeners {
    /// Wraps the listeners of a simulated machine.
    pub(crate) fn simulated(client: Listener, peer: Listener) -> (Self, BoundAddresses) {
        let unbound = SocketAddr::new(client.address.ip(), 0);
        let bound = BoundAddresses { client: client.address, peer: peer.address, admin: unbound, http: unbound };
        let [client, peer] =
            [client, peer].map(|listener| BoundListener { listener, open: OpenTracker::default(), silence: None });
        let connections = ConnectionCounters::default();
        (Self { client, peer, admin_and_http: None, connections, connection_age: None }, bound)
    }

    /// Binds all listeners, or none.
    pub(crate) async fn bind(
        listen: &Listen,
        secured: Option<(&Tls, &Arc<Keys>)>,
    ) -> Result<(Self, BoundAddresses), Error> {
        let connections = ConnectionCounters::default();
        let bind = |role: &'static str, address: SocketAddr| {
            let connections = connections.clone();
            async move {
                let failed = |source| Error::Bind { role, address, source };
                let listener = TcpListener::bind(address).await.map_err(failed)?;
                let bound = listener.local_addr().map_err(failed)?;
                Ok::<_, Error>((Acceptor::new(listener, role, connections), bound))
            }
        };
        let (client, client_at) = bind("client", listen.client).await?;
        let (peer, peer_at) = bind("peer", listen.peer).await?;
        let (admin, admin_at) = bind("admin", listen.admin).await?;
        let (http, http_at) = bind("HTTP", listen.http).await?;
        let bound = BoundAddresses { client: client_at, peer: peer_at, admin: admin_at, http: http_at };
        let (tls, keys) = secured.unzip();
        let lifetime = tls.map(Tls::connection_lifetime);
        let accepts_tokens = tls.is_some_and(|tls| tls.tokens.is_some());
        let clients = if accepts_tokens { Callers::Anyone } else { Callers::Certified };
        let client = listener(client, client_at, keys, clients, lifetime);
        // The end of a connection between members is evidence of a death, so these connections have no maximum lifetime.
        let peer = listener(peer, peer_at, keys, Callers::Certified, None);
        let admin = listener(admin, admin_at, keys, Callers::Certified, lifetime);
        let connection_age = tls.map(Tls::connection_age);
        Ok((Self { client, peer, admin_and_http: Some((admin, http)), connections, connection_age }, bound))
    }

    /// Returns the connections of all listeners, for the metrics.
    pub(crate) const fn connections(&self) -> &ConnectionCounters {
        &self.connections
    }

    /// Serves on all listeners until the worker stops and calls in flight are complete. The peer servers are returned separately,
    /// because the others may wait for them.
    pub(crate) async fn serve(
        self,
        shared: Arc<Shared>,
        authorizer: Arc<dyn Authorizer>,
        services: Routes,
    ) -> (JoinSet<Result<(), Error>>, JoinSet<Result<(), Error>>) {
        let (mut servers, mut peer_servers) = (JoinSet::new(), JoinSet::new());
        let edge = |listener| Edge::new(Arc::clone(&shared), Arc::clone(&authorizer), listener);
        let age = self.connection_age;
        let stop = || {
            let mut stopping = shared.lifecycle.stopping();
            async move {
                // An error means that the worker was dropped, which ends this as well.
                let _ = stopping.wait_for(|stopping| *stopping).await;
            }
        };

        let memories = Memories { shared: Arc::clone(&shared), plane: Plane::Client };
        let service = MemoryServiceServer::new(memories)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let admin = || AdminServiceServer::new(Admin { shared: Arc::clone(&shared) });
        let accounts = shared.setup.accounts.clone();
        let server = builder(age)
            .layer(edge(ListenerKind::Client).with_accounts(accounts.clone()))
            .add_routes(services)
            .add_service(service)
            // Clients with a token can reach no other listener.
            .add_optional_service(accounts.map(|_| admin()));
        servers.spawn(serve_as("client", server.serve_with_incoming_shutdown(self.client.incoming(), stop())));

        let memories = Memories { shared: Arc::clone(&shared), plane: Plane::Peer };
        let service = MemoryServiceServer::new(memories)
            .max_decoding_message_size(MAX_PEER_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_PEER_MESSAGE_BYTES);
        let peer = crate::lifecycle::services::peer_services(&shared);
        let server = builder(None)
            .max_concurrent_streams(MAX_PEER_STREAMS)
            .initial_stream_window_size(peers::STREAM_WINDOW)
            .initial_connection_window_size(peers::CONNECTION_WINDOW)
            .max_frame_size(peers::FRAME_BYTES)
            .layer(edge(ListenerKind::Peer))
            .add_routes(peer)
            .add_service(service);
        peer_servers.spawn(serve_as("peer", server.serve_with_incoming_shutdown(self.peer.incoming(), stop())));

        let Some((admin_listener, http_listener)) = self.admin_and_http else { return (servers, peer_servers) };
        let server = builder(age).layer(edge(ListenerKind::Admin)).add_service(admin());
        servers.spawn(serve_as("admin", server.serve_with_incoming_shutdown(admin_listener.incoming(), stop())));
        match admin_socket(&shared) {
            Ok((listener, path)) => {
                let server = builder(None).layer(edge(ListenerKind::Admin)).add_service(admin());
                let listener = Acceptor::new(listener, "admin socket", self.connections.clone());
                let open = listener.tracker();
                let incoming = listener
                    .into_unix_stream()
                    .map(move |accepted| accepted.map(|it| Bounded::new(it, Some(GRPC_SILENCE), open.opened())));
                let served = server.serve_with_incoming_shutdown(incoming, stop());
                servers.spawn(async move {
                    let result = serve_as("admin socket", served).await;
                    // The next start replaces a leftover.
                    let _ = std::fs::remove_file(path);
                    result
                });
            }
            // Socket paths have a short maximum length; the port remains.
            Err(error) => {
                tracing::warn!(%error, "failed to bind the admin socket in the state directory; use the admin port");
            }
        }

        let http = axum::serve(http_listener, http::router(Arc::clone(&shared))).with_graceful_shutdown(stop());
        servers.spawn(async move { http.await.map_err(|source| Error::Http { source }) });
        (servers, peer_servers)
    }
}

fn builder(connection_age: Option<Duration>) -> Server {
    let server = Server::builder();
    // Without a grace period: with one the library would end connections at once, with the calls in flight on them.
    let server = match connection_age {
        Some(age) => server.max_connection_age(age),
        None => server,
    };
    server
        .timeout(CALL_DEADLINE)
        .max_concurrent_streams(MAX_STREAMS)
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_BYTES)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
}

/// Adds reflection of all services; the health service comes with its reporter.
pub(crate) fn reflection(routes: &mut tonic::service::RoutesBuilder) {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1();
    routes.add_service(reflection.expect("the descriptors are generated at build time"));
}

async fn serve_as(
    role: &'static str,
    servers: impl Future<Output = Result<(), tonic::transport::Error>>,
) -> Result<(), Error> {
    servers.await.map_err(|source| Error::Serve { role, source })
}

/// Binds the socket in the state directory, for this user only. The lock of the directory excludes another listener.
fn admin_socket(shared: &Shared) -> std::io::Result<(UnixListener, PathBuf)> {
    let path = shared.setup.options.state_dir.join("admin.sock");
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    Ok((listener, path))
}
