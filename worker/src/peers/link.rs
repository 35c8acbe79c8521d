//! One link between two workers: dialed by the worker with the lower ordinal, read by both.

use super::links::Link;
use super::{each_partner, partners, wire};
use crate::shared::Shared;
use engram_identity::{ExpectedPeer, Role};
use engram_memory::{Incarnation, Member, Ordinal, StoreId};
use engram_proto::MAX_PEER_MESSAGE_BYTES;
use engram_proto::v1::peer_service_client::PeerServiceClient;
use engram_proto::v1::{MemberEntry, PeerFrame};
use engram_store::peer::Envelope;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

/// Deadline for opening a connection.
pub(super) const CONNECT_DEADLINE: Duration = Duration::from_secs(1);
/// Deadline for the hello of the other side.
pub(super) const HELLO_DEADLINE: Duration = Duration::from_secs(2);
/// First and longest interval between attempts to dial: a worker that does not listen yet announces nothing, but one at a new address is dialed at
/// once.
const REDIAL_INTERVAL: Duration = Duration::from_millis(20);
const MAX_REDIAL_INTERVAL: Duration = Duration::from_secs(1);
/// Ping interval and timeout of a connection. Heartbeats detect a silent worker sooner, this detects a dead route.
const KEEPALIVE: Duration = Duration::from_secs(2);
/// Maximum number of bytes that the store has received and not processed, per link. Beyond it the stream is not read, and the
/// sender's outbox fills.
const IN_FLIGHT_BYTES: usize = 32 << 20;
/// HTTP/2 flow-control window: one frame of the maximum size, otherwise a stream of large records would stall at each.
pub(crate) const STREAM_WINDOW: u32 = 16 << 20;
pub(crate) const CONNECTION_WINDOW: u32 = 32 << 20;
/// Largest HTTP/2 frame that is accepted: records of payload are large.
pub(crate) const FRAME_BYTES: u32 = 256 << 10;

/// Keeps a link to every worker that shares a partition with this one and has a higher ordinal. Ends when dropped.
pub(crate) async fn dial_partners(shared: Arc<Shared>) {
    each_partner(&shared, maintain_link).await;
}

/// Address of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    address: String,
    member: Member,
}

impl Target {
    fn of(members: &[MemberEntry], ordinal: Ordinal) -> Option<Self> {
        let entry = members.iter().find(|member| member.ordinal == ordinal.0 && !member.peer_address.is_empty())?;
        let store = StoreId(entry.store.as_ref().try_into().map(u128::from_be_bytes).ok()?);
        let member = Member { ordinal, store, incarnation: Incarnation(entry.incarnation) };
        Some(Self { address: entry.peer_address.clone(), member })
    }
}

/// Keeps a link to one worker, redialing when it breaks.
async fn maintain_link(shared: Arc<Shared>, ordinal: Ordinal) {
    let mut view = shared.membership.subscribe();
    let (mut wait, mut is_logged) = (REDIAL_INTERVAL, false);
    loop {
        let target = loop {
            let target = {
                let view = view.borrow_and_update();
                let shares = view.map.as_ref().is_some_and(|map| partners(map, shared.ordinal()).contains(&ordinal));
                shares.then(|| Target::of(&view.members, ordinal)).flatten()
            };
            match target {
                Some(target) => break target,
                None if view.changed().await.is_err() => return,
                None => {}
            }
        };
        match dial(&shared, ordinal, &target).await {
            Ok(()) => (wait, is_logged) = (REDIAL_INTERVAL, false),
            Err(reason) => {
                // Logged once: an unreachable worker would fill the log.
                if !std::mem::replace(&mut is_logged, true) {
                    tracing::info!(worker = ordinal.0, address = target.address, reason, "failed to open peer link");
                }
                wait = (wait * 2).min(MAX_REDIAL_INTERVAL);
            }
        }
        // Jitter, so that workers do not reconnect to a restarted one all at once. A process at a new address is dialed at once.
        let moved = view.wait_for(|view| Target::of(&view.members, ordinal).is_some_and(|now| now != target));
        let _ = timeout(wait.mul_f64(rand::random_range(0.5..1.0)), moved).await;
    }
}

/// Connects to another worker's peer listener.
pub(crate) async fn connect(
    shared: &Shared,
    ordinal: Ordinal,
    address: &str,
    keepalive: Duration,
) -> Result<Channel, String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| error.to_string())?;
    let endpoint = endpoint
        .connect_timeout(CONNECT_DEADLINE)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(keepalive)
        .keep_alive_timeout(keepalive)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_BYTES);
    let connected = shared.setup.network.for_peer(ExpectedPeer::one(Role::Worker, ordinal.0)).connect(endpoint).await;
    connected.map_err(|error| std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string))
}

/// Runs one link until it breaks. The error says why it could not be opened.
async fn dial(shared: &Arc<Shared>, ordinal: Ordinal, target: &Target) -> Result<(), String> {
    let channel = connect(shared, ordinal, &target.address, KEEPALIVE).await?;
    let outbox = shared.peers.links().outbox(shared.setup.hello.hello());
    let mut client = PeerServiceClient::new(channel)
        .max_decoding_message_size(MAX_PEER_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_PEER_MESSAGE_BYTES);
    let opened = timeout(HELLO_DEADLINE, async {
        let answer = client.exchange(outbox.frames()).await.map_err(|status| status.message().to_owned())?;
        let mut frames = answer.into_inner();
        let first = frames.message().await.map_err(|status| status.message().to_owned())?;
        Ok::<_, String>((frames, first))
    });
    let (frames, first) = opened.await.map_err(|_| "no response".to_owned())??;
    let hello = first.as_ref().and_then(|frame| frame.hello.as_ref());
    let member = shared.setup.hello.check_callee(hello, ordinal).map_err(|refused| refused.to_string())?;
    let link = shared.peers.links().install(member, outbox).map_err(|newest| {
        format!("process {} responded, but the newer process {newest} is known", member.incarnation)
    })?;
    let reading = read(shared, &link, frames);
    let mut view = shared.membership.subscribe();
    // The dialed process may be stuck without a sign while another process has replaced it.
    let replaced = |now: Target| now != *target && now.member != member;
    let newer = view.wait_for(|view| Target::of(&view.members, ordinal).is_some_and(replaced));
    let reason = tokio::select! {
        reason = reading => reason,
        _ = newer => "the worker has a newer process".to_owned(),
    };
    close_link(shared, &link, &reason);
    Ok(())
}

/// Passes received messages to the store until the link ends; returns the reason. The store learns first that the link is open.
pub(super) async fn read(shared: &Arc<Shared>, link: &Link, mut frames: Streaming<PeerFrame>) -> String {
    let member: Member = link.member;
    tracing::info!(peer = %member, "peer link opened");
    shared.engine.connected(member);
    let capacity = Arc::new(Semaphore::new(IN_FLIGHT_BYTES));
    loop {
        let frame = tokio::select! {
            frame = frames.message() => frame,
            reason = link.closed() => return reason.to_owned(),
        };
        let messages = match frame {
            Ok(Some(frame)) => frame.messages,
            Ok(None) => return "the other side closed the stream".to_owned(),
            Err(status) => return status.message().to_owned(),
        };
        let partitions = shared.partitions();
        let envelopes = messages.into_iter().map(|message| wire::decode(message, partitions));
        let envelopes: Vec<Envelope> = match envelopes.collect() {
            Ok(envelopes) => envelopes,
            Err(malformed) => {
                tracing::error!(peer = %member, %malformed, "closed peer link: received a malformed message");
                return malformed.to_string();
            }
        };
        if envelopes.is_empty() {
            continue;
        }
        let bytes = envelopes.iter().map(Envelope::bytes).sum::<usize>();
        shared.peers.links().traffic.received_bytes.inc_by(bytes as u64);
        let permits = u32::try_from(bytes.min(IN_FLIGHT_BYTES)).expect("the limit fits");
        let permit = tokio::select! {
            permit = Arc::clone(&capacity).acquire_many_owned(permits) => permit.expect("the semaphore is never closed"),
            reason = link.closed() => return reason.to_owned(),
        };
        shared.engine.receive(member, envelopes, move || drop(permit));
    }
}

/// Removes a link that has ended.
pub(super) fn close_link(shared: &Shared, link: &Arc<Link>, reason: &str) {
    if shared.peers.links().remove(link) {
        tracing::info!(peer = %link.member, reason, "peer link closed");
    }
}
