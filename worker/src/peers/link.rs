//! One link: dialled by the worker with the lower number, read by both.

use super::links::Link;
use super::{each_partner, partners, wire};
use crate::shared::Shared;
use engram_identity::{Expected, Role};
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

/// How long a connection may take to come up.
pub(super) const CONNECT_DEADLINE: Duration = Duration::from_secs(1);
/// How long the other side may take for its hello.
pub(super) const HELLO_DEADLINE: Duration = Duration::from_secs(2);
/// Between attempts to dial: at first, and at most.
const REDIAL: Duration = Duration::from_millis(20);
const REDIAL_MOST: Duration = Duration::from_secs(1);
/// A connection without an answer to a ping is closed after these: beats find a silent worker sooner, this finds a dead route.
const KEEPALIVE: Duration = Duration::from_secs(2);
/// Bytes handed to the store and not worked on, per link; then the stream is not read, and the sender's outbox fills.
const UNDER_WAY_BYTES: usize = 32 << 20;
/// Bytes that may be on their way: one frame of the largest kind, or a stream of large records stalls at every one.
pub(crate) const STREAM_WINDOW: u32 = 16 << 20;
pub(crate) const CONNECTION_WINDOW: u32 = 32 << 20;

/// Keeps a link to every worker that shares a partition with this one and has a higher number. Ends when dropped.
pub(crate) async fn dial_partners(shared: Arc<Shared>) {
    each_partner(&shared, keep).await;
}

/// Where a process is found.
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

/// Dials one worker again and again.
async fn keep(shared: Arc<Shared>, ordinal: Ordinal) {
    let mut view = shared.view.subscribe();
    let (mut wait, mut was_told) = (REDIAL, false);
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
            Ok(()) => (wait, was_told) = (REDIAL, false),
            Err(reason) => {
                // Once: a worker that is away would fill the log.
                if !std::mem::replace(&mut was_told, true) {
                    tracing::info!(worker = ordinal.0, address = target.address, reason, "no link");
                }
                wait = (wait * 2).min(REDIAL_MOST);
            }
        }
        // Jitter, so that workers do not come back to a restarted one in one moment; a process found elsewhere is dialled at once.
        let moved = view.wait_for(|view| Target::of(&view.members, ordinal).is_some_and(|now| now != target));
        let _ = timeout(wait.mul_f64(rand::random_range(0.5..1.0)), moved).await;
    }
}

/// A connection to another worker's listener for peers.
pub(super) async fn connect(
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
        .initial_connection_window_size(CONNECTION_WINDOW);
    let connected = shared.network.to(Expected::one(Role::Worker, ordinal.0)).connect(endpoint).await;
    connected.map_err(|error| std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string))
}

/// One link, until it breaks; the error says why none came up.
async fn dial(shared: &Arc<Shared>, ordinal: Ordinal, target: &Target) -> Result<(), String> {
    let channel = connect(shared, ordinal, &target.address, KEEPALIVE).await?;
    let outbox = shared.links.outbox(shared.greeter.hello());
    let mut client = PeerServiceClient::new(channel)
        .max_decoding_message_size(MAX_PEER_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_PEER_MESSAGE_BYTES);
    let opened = timeout(HELLO_DEADLINE, async {
        let answer = client.exchange(outbox.frames()).await.map_err(|status| status.message().to_owned())?;
        let mut frames = answer.into_inner();
        let first = frames.message().await.map_err(|status| status.message().to_owned())?;
        Ok::<_, String>((frames, first))
    });
    let (frames, first) = opened.await.map_err(|_| "it does not answer".to_owned())??;
    let hello = first.as_ref().and_then(|frame| frame.hello.as_ref());
    let member = shared.greeter.check_callee(hello, ordinal).map_err(|refused| refused.to_string())?;
    let link = shared
        .links
        .install(member, outbox)
        .map_err(|newest| format!("process {} answered, but {newest} was heard", member.incarnation))?;
    let reading = read(shared, &link, frames);
    let mut view = shared.view.subscribe();
    // The one that was dialled may hang without a sign of it while another process has its place.
    let replaced = |now: Target| now != *target && now.member != member;
    let newer = view.wait_for(|view| Target::of(&view.members, ordinal).is_some_and(replaced));
    let reason = tokio::select! {
        reason = reading => reason,
        _ = newer => "a newer process of the worker is there".to_owned(),
    };
    ended(shared, &link, &reason);
    Ok(())
}

/// Takes what comes on a link until it ends; returns why. The store hears first that the link is open.
pub(super) async fn read(shared: &Arc<Shared>, link: &Link, mut frames: Streaming<PeerFrame>) -> String {
    let member: Member = link.member;
    tracing::info!(peer = %member, "link is open");
    shared.engine.connected(member);
    let room = Arc::new(Semaphore::new(UNDER_WAY_BYTES));
    loop {
        let frame = tokio::select! {
            frame = frames.message() => frame,
            reason = link.is_cut() => return reason.to_owned(),
        };
        let messages = match frame {
            Ok(Some(frame)) => frame.messages,
            Ok(None) => return "the other side ended it".to_owned(),
            Err(status) => return status.message().to_owned(),
        };
        let partitions = shared.partitions();
        let envelopes = messages.into_iter().map(|message| wire::decode(message, partitions));
        let envelopes: Vec<Envelope> = match envelopes.collect() {
            Ok(envelopes) => envelopes,
            Err(malformed) => {
                tracing::error!(peer = %member, %malformed, "cut a link that carries what no worker of this version says");
                return malformed.to_string();
            }
        };
        if envelopes.is_empty() {
            continue;
        }
        let bytes = envelopes.iter().map(Envelope::bytes).sum::<usize>();
        shared.links.traffic.received_bytes.inc_by(bytes as u64);
        let permits = u32::try_from(bytes.min(UNDER_WAY_BYTES)).expect("the limit fits");
        let permit = tokio::select! {
            permit = Arc::clone(&room).acquire_many_owned(permits) => permit.expect("the semaphore is never closed"),
            reason = link.is_cut() => return reason.to_owned(),
        };
        shared.engine.hear(member, envelopes, move || drop(permit));
    }
}

/// A link has ended.
pub(super) fn ended(shared: &Shared, link: &Arc<Link>, reason: &str) {
    if shared.links.remove(link) {
        tracing::info!(peer = %link.member, reason, "link is closed");
    }
}
