//! Joins a group of a cluster.

use super::tcp::TcpConnect;
use super::wire::position_to_wire;
use super::{
    Fetch, Group, GroupError, Outgoing, Parts, PeerAddress, Provide, Security, Shared, StateServer, state, stream,
};
use crate::client::Client;
use engram_collective::group::{MemberId, Position, Timing};
use engram_proto::v1;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

/// How a process takes part in a group.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    /// Name of the group, 1 to 128 characters.
    pub name: String,
    /// Address on which other members reach this process; `None` for the one from which it reaches the cluster.
    pub address: Option<IpAddr>,
    /// Time after which a silent member is removed; all other limits of the membership follow from it. The same for all members.
    pub timing: Timing,
    /// Below this number of members the group pauses. The same for all members.
    pub min_members: u32,
    /// Digest of names, shapes and order of all reduced tensors.
    pub layout: u64,
    /// Longest wait for the end of a step, also while the group is paused.
    pub wait_limit: Duration,
    /// Of the state that the process has.
    pub position: Position,
}

impl Group {
    /// Takes part in a group. `provide` copies the state for members that join. Returns the group, and the server of copies, which must live as
    /// long. In a cluster with TLS the connections between the processes of a group are secured, too.
    ///
    /// # Errors
    /// The process cannot listen.
    pub fn join(
        client: &Client,
        runtime: &Handle,
        options: &GroupOptions,
        provide: Provide,
    ) -> Result<(Self, StateServer), GroupError> {
        let is_secured = client.options().network.is_secured();
        let security = if is_secured { Security::required() } else { Security::default() };
        let listen = |error: std::io::Error| GroupError::Listen(error.to_string());
        let address = options.address.unwrap_or_else(|| own_address(client));
        let reduce = TcpListener::bind((address, 0)).map_err(listen)?;
        let state = TcpListener::bind((address, 0)).map_err(listen)?;
        let port = |listener: &TcpListener| listener.local_addr().map(|it| SocketAddr::new(address, it.port()));
        let member = v1::GroupMember {
            id: rand::random(),
            ordinal: 0,
            reduce_address: port(&reduce).map_err(listen)?.to_string(),
            state_address: port(&state).map_err(listen)?.to_string(),
        };
        let timing = options.timing;
        let patience = Duration::from_millis(timing.change_ms());
        let server = StateServer::start(state, provide, patience, security.clone()).map_err(listen)?;
        let shared = Arc::<Shared>::default();
        let (reports, queued) = mpsc::channel(stream::QUEUE);
        // A report that finds no place is replaced by the next.
        let outgoing: Outgoing = Box::new(move |report| drop(reports.try_send(stream::outgoing(report))));
        let parts = Parts {
            id: MemberId(member.id),
            position: options.position,
            timing,
            connect: Box::new(TcpConnect { listener: reduce, shared: Arc::clone(&shared), security: security.clone() }),
            outgoing,
            fetch: fetcher(patience, security.clone()),
            wait_limit: options.wait_limit,
        };
        let join = v1::JoinGroup {
            name: options.name.clone(),
            member: Some(member),
            position: Some(position_to_wire(options.position)),
            layout: options.layout,
            detect_ms: timing.progress_ms(),
            min_members: options.min_members,
        };
        let (group, signals) = Self::start_with(parts, shared).map_err(listen)?;
        runtime.spawn(stream::keep_open(client.clone(), join, signals, queued, security));
        Ok((group, server))
    }
}

/// Returns the address from which this process reaches the cluster. No packet is sent.
fn own_address(client: &Client) -> IpAddr {
    let found = || {
        let map = client.map().ok()?;
        let worker = map.workers.values().find(|worker| !worker.client_address.is_empty())?;
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        socket.connect(&*worker.client_address).ok()?;
        socket.local_addr().ok().map(|it| it.ip())
    };
    found().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// Fetches states over TCP, on a thread per transfer.
fn fetcher(patience: Duration, security: Security) -> Fetch {
    Box::new(move |position: Position, sources: Vec<PeerAddress>, done: Box<dyn FnOnce(_) + Send>| {
        let security = security.clone();
        let transfer = move || {
            let state = state::fetch(position, &sources, patience, &security);
            if let Err(error) = &state {
                tracing::warn!(%error, step = position.step, "failed to fetch a state");
            }
            done(state.ok());
        };
        if let Err(error) = std::thread::Builder::new().name("group-fetch".into()).spawn(transfer) {
            // The service repeats its request.
            tracing::error!(%error, "failed to start a thread");
        }
    })
}
