//! The listeners: clients, peers, administration (and its socket), the HTTP page.

use crate::admin::Admin;
use crate::edge::{ADMINISTRATORS, Authorizer, Edge};
use crate::machine::{Connection, Listening};
use crate::options::{Listen, Tls};
use crate::page;
use crate::peers;
use crate::service::{Memories, Plane};
use crate::shared::Shared;
use crate::worker::Error;
use engram_identity::{Callers, Keys, Role, accept};
use engram_proto::v1::admin_service_server::AdminServiceServer;
use engram_proto::v1::memory_service_server::MemoryServiceServer;
use engram_proto::{DESCRIPTORS, MAX_MESSAGE_BYTES, MAX_PEER_MESSAGE_BYTES};
use futures::StreamExt as _;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

/// A call may take at most this long, whatever its sender allows.
const CALL_DEADLINE: Duration = Duration::from_secs(60);
/// Streams per connection; a sender of more waits.
const STREAMS: u32 = 256;
/// Bytes of the head of a request: the library's default would be 16 MiB.
const HEADER_BYTES: u32 = 16 << 10;
/// Bytes that may be on their way: one full message per stream, several per connection.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
const KEEPALIVE: Duration = Duration::from_secs(10);

/// Bound listeners.
pub(crate) struct Listeners {
    client: Listening,
    peer: Listening,
    /// For administration and for HTTP; absent on a simulated machine.
    looked_after: Option<(Listening, TcpListener)>,
    /// When clients and administrators are asked to connect anew, under TLS.
    connection_age: Option<Duration>,
}

/// Where they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bound {
    pub(crate) client: SocketAddr,
    pub(crate) peer: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) http: SocketAddr,
}

/// Accepts connections: over TLS where there are certificates, and then for `lifetime` each.
fn listening(
    listener: TcpListener,
    address: SocketAddr,
    keys: Option<&Arc<Keys>>,
    callers: Callers,
    lifetime: Option<Duration>,
) -> Listening {
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let incoming = match keys {
        None => incoming.map(|accepted| accepted.map(Connection::Tcp)).boxed(),
        Some(keys) => accept(incoming, Arc::clone(keys), callers, lifetime)
            .map(|accepted| accepted.map(|secured| Connection::Tls(Box::new(secured))))
            .boxed(),
    };
    Listening { address, incoming }
}

/// Whose calls a listener takes, of those that are known: of a connection in clear, and on the socket, nobody is.
///
/// A person's certificate is one of the whole cluster, so it administrates as well; a worker's never does, and only a worker's passes
/// between workers.
const CLIENTS: &[Role] = &[Role::Worker, Role::Coordinator, Role::Client];
const PEERS: &[Role] = &[Role::Worker];

impl Listeners {
    /// Those of a simulated machine.
    pub(crate) fn simulated(client: Listening, peer: Listening) -> (Self, Bound) {
        let nowhere = SocketAddr::new(client.address.ip(), 0);
        let bound = Bound { client: client.address, peer: peer.address, admin: nowhere, http: nowhere };
        (Self { client, peer, looked_after: None, connection_age: None }, bound)
    }

    /// Binds all of them, or none.
    pub(crate) async fn bind(listen: &Listen, secured: Option<(&Tls, &Arc<Keys>)>) -> Result<(Self, Bound), Error> {
        let bind = |role: &'static str, address: SocketAddr| async move {
            let listener = TcpListener::bind(address).await.map_err(|source| Error::Bind { role, address, source })?;
            let bound = listener.local_addr().map_err(|source| Error::Bind { role, address, source })?;
            Ok::<_, Error>((listener, bound))
        };
        let (client, client_at) = bind("client", listen.client).await?;
        let (peer, peer_at) = bind("peer", listen.peer).await?;
        let (admin, admin_at) = bind("admin", listen.admin).await?;
        let (http, http_at) = bind("HTTP", listen.http).await?;
        let bound = Bound { client: client_at, peer: peer_at, admin: admin_at, http: http_at };
        let (tls, keys) = secured.unzip();
        let lifetime = tls.map(Tls::connection_lifetime);
        let with_tokens = tls.is_some_and(|tls| tls.tokens.is_some());
        let clients = if with_tokens { Callers::Anyone } else { Callers::Certified };
        let client = listening(client, client_at, keys, clients, lifetime);
        // The end of a connection between members is evidence of a death: these last until they break.
        let peer = listening(peer, peer_at, keys, Callers::Certified, None);
        let admin = listening(admin, admin_at, keys, Callers::Certified, lifetime);
        let connection_age = tls.map(Tls::connection_age);
        Ok((Self { client, peer, looked_after: Some((admin, http)), connection_age }, bound))
    }

    /// Serves on all of them until the worker stops and what was in flight is done. What workers say to each other apart: others may
    /// wait for it.
    pub(crate) async fn serve(
        self,
        shared: Arc<Shared>,
        authorizer: Arc<dyn Authorizer>,
        services: Routes,
    ) -> (JoinSet<Result<(), Error>>, JoinSet<Result<(), Error>>) {
        let (mut serving, mut between) = (JoinSet::new(), JoinSet::new());
        let edge = |callers| Edge::new(Arc::clone(&shared), Arc::clone(&authorizer), callers);
        let age = self.connection_age;
        let stop = || {
            let mut stopping = shared.stopping.subscribe();
            async move {
                // An error means that the worker is gone, which ends this as well.
                let _ = stopping.wait_for(|stopping| *stopping).await;
            }
        };

        let memories = Memories { shared: Arc::clone(&shared), plane: Plane::Client };
        let service = MemoryServiceServer::new(memories)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let admin = || AdminServiceServer::new(Admin { shared: Arc::clone(&shared) });
        let accounts = shared.accounts.clone();
        let server = builder(age)
            .layer(edge(CLIENTS).with_accounts(accounts.clone()))
            .add_routes(services)
            .add_service(service)
            // Who has a token instead of a certificate reaches no other listener.
            .add_optional_service(accounts.map(|_| admin()));
        serving.spawn(failed("client", server.serve_with_incoming_shutdown(self.client.incoming, stop())));

        let memories = Memories { shared: Arc::clone(&shared), plane: Plane::Peer };
        let service = MemoryServiceServer::new(memories)
            .max_decoding_message_size(MAX_PEER_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_PEER_MESSAGE_BYTES);
        let peer = crate::worker::peer_services(&shared);
        let server = builder(None)
            .initial_stream_window_size(peers::STREAM_WINDOW)
            .initial_connection_window_size(peers::CONNECTION_WINDOW)
            .layer(edge(PEERS))
            .add_routes(peer)
            .add_service(service);
        between.spawn(failed("peer", server.serve_with_incoming_shutdown(self.peer.incoming, stop())));

        let Some((admin_listener, http_listener)) = self.looked_after else { return (serving, between) };
        let server = builder(age).layer(edge(ADMINISTRATORS)).add_service(admin());
        serving.spawn(failed("admin", server.serve_with_incoming_shutdown(admin_listener.incoming, stop())));
        match admin_socket(&shared) {
            Ok((listener, path)) => {
                let server = builder(None).layer(edge(ADMINISTRATORS)).add_service(admin());
                let served = server.serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop());
                serving.spawn(async move {
                    let result = failed("admin socket", served).await;
                    // Gone already, or left for the next start to replace.
                    let _ = std::fs::remove_file(path);
                    result
                });
            }
            // The path of a socket is short on every system; the port remains.
            Err(error) => tracing::warn!(%error, "no admin socket in the state directory; use the admin port"),
        }

        let http = axum::serve(http_listener, page::router(Arc::clone(&shared))).with_graceful_shutdown(stop());
        serving.spawn(async move { http.await.map_err(|source| Error::Http { source }) });
        (serving, between)
    }
}

fn builder(connection_age: Option<Duration>) -> Server {
    let server = Server::builder();
    // Without a grace: with one the library would end connections at once, and what is under way on them.
    let server = match connection_age {
        Some(age) => server.max_connection_age(age),
        None => server,
    };
    server
        .timeout(CALL_DEADLINE)
        .max_concurrent_streams(STREAMS)
        .http2_max_header_list_size(HEADER_BYTES)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
}

/// Reflection of all services; health comes with its reporter.
pub(crate) fn reflection(routes: &mut tonic::service::RoutesBuilder) {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1();
    routes.add_service(reflection.expect("the descriptors were made by the build of the protocol"));
}

async fn failed(
    role: &'static str,
    serving: impl Future<Output = Result<(), tonic::transport::Error>>,
) -> Result<(), Error> {
    serving.await.map_err(|source| Error::Serve { role, source })
}

/// A socket in the state directory, for this user alone; the lock of the directory says that nobody else listens on it.
fn admin_socket(shared: &Shared) -> std::io::Result<(UnixListener, PathBuf)> {
    let path = shared.options.state_dir.join("admin.sock");
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    Ok((listener, path))
}
