//! Heartbeats between partners: liveness and read leases.
//!
//! Of two workers the one with the lower ordinal opens the stream, and both send heartbeats on it. A heartbeat is a sign of life
//! only if it acknowledges a newer heartbeat of the receiver: a connection that is broken in one direction counts as broken.
//!
//! A heartbeat also renews the read leases of the heartbeat that it responds to, except for partitions of which this worker follows
//! another primary. The holder counts a lease from when it *sent* that heartbeat, the granter from when it *processed* it, plus a
//! margin, so that the granter always waits longer than the holder, regardless of clocks.

use super::link::{HELLO_DEADLINE, connect};
use super::peer_detector::{NO_COORDINATOR_MS, PeerDetector, Verdict};
use super::{each_partner, proposals};
use crate::shared::Shared;
use engram_cluster::{Change, Entry};
use engram_mapstore::with_causes;
use engram_memory::{Member, Ordinal, PartitionId};
use engram_proto::v1::peer_service_client::PeerServiceClient;
use engram_proto::v1::{MemberEntry, PeerHeartbeat};
use engram_store::Durability;
use engram_store::leases::LEASE_MS;
use engram_store::peer::Proposal;
use futures::stream::BoxStream;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{interval, sleep, timeout};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};

/// Heartbeat interval: a sixth of the silence after which a worker is suspected.
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(200);
/// Interval between evaluations of the peer detector: silence is the absence of an event.
const EVALUATION_INTERVAL: Duration = Duration::from_millis(100);
/// First and longest interval between attempts to connect to a partner, which announces nothing while it cannot be reached.
const REDIAL_INTERVAL: Duration = Duration::from_millis(50);
const MAX_REDIAL_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of remembered heartbeats without a response: more than a lease lasts.
const MAX_UNACKNOWLEDGED: usize = 16;
/// Heartbeats queued for a partner that does not read; a newer one makes them obsolete.
const QUEUE_LENGTH: usize = 2;
/// Interval between repeated proposals of own promotions.
const PROMOTION_RETRY_MS: u64 = 500;

/// Keeps streams to all partners with a higher ordinal, and evaluates the peer detector. Ends when dropped.
pub(crate) async fn run(shared: Arc<Shared>) {
    tokio::join!(each_partner(&shared, maintain_stream), evaluate_peers(&shared), follow_map_store(&shared));
}

async fn maintain_stream(shared: Arc<Shared>, ordinal: Ordinal) {
    let mut wait = REDIAL_INTERVAL;
    let address = |members: &[MemberEntry]| {
        members.iter().find(|member| member.ordinal == ordinal.0).map(|member| member.peer_address.clone())
    };
    loop {
        let current_address = address(&shared.membership.view().members).filter(|address| !address.is_empty());
        match current_address {
            Some(address) => match stream(&shared, ordinal, &address).await {
                Ok(()) => wait = REDIAL_INTERVAL,
                Err(reason) => {
                    tracing::debug!(worker = ordinal.0, address, reason, "failed to open heartbeat stream");
                    wait = (wait * 2).min(MAX_REDIAL_INTERVAL);
                }
            },
            None => wait = MAX_REDIAL_INTERVAL,
        }
        sleep(wait.mul_f64(rand::random_range(0.5..1.0))).await;
    }
}

/// Runs one stream until it breaks. The error says why it could not be opened.
async fn stream(shared: &Arc<Shared>, ordinal: Ordinal, address: &str) -> Result<(), String> {
    let on_refused = |reason: String| {
        shared.update_detector(|detector, now_ms| detector.connection_refused(ordinal, now_ms));
        reason
    };
    let channel = connect(shared, ordinal, address, HEARTBEAT_INTERVAL * 5).await.map_err(on_refused)?;
    let (sender, outgoing) = mpsc::channel(QUEUE_LENGTH);
    let first = PeerHeartbeat { hello: Some(shared.setup.hello.hello()), number: 1, ..PeerHeartbeat::default() };
    sender.try_send(first).map_err(|error| error.to_string())?;
    let sent_ms = shared.elapsed_ms();
    let mut client = PeerServiceClient::new(channel);
    let handshake = timeout(HELLO_DEADLINE, async {
        let accept =
            client.heartbeat(ReceiverStream::new(outgoing)).await.map_err(|status| status.message().to_owned())?;
        let mut heartbeats = accept.into_inner();
        let first = heartbeats.message().await.map_err(|status| status.message().to_owned())?;
        Ok::<_, String>((heartbeats, first))
    });
    let (heartbeats, first) = handshake.await.map_err(|_| "no response".to_owned())??;
    let hello = first.as_ref().and_then(|heartbeat| heartbeat.hello.as_ref());
    let member = shared.setup.hello.check_callee(hello, ordinal).map_err(|on_refused| on_refused.to_string())?;
    let mut exchange = HeartbeatExchange::new(Arc::clone(shared), member, sent_ms);
    exchange.report_connected(host(address));
    if let Some(first) = first {
        exchange.handle(&first);
    }
    exchange.run(heartbeats, sender).await;
    Ok(())
}

/// Returns the host of `host:port`.
fn host(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// Accepts a heartbeat stream.
pub(super) fn accept(
    shared: Arc<Shared>,
    member: Member,
    first: Option<PeerHeartbeat>,
    heartbeats: Streaming<PeerHeartbeat>,
) -> Result<Response<BoxStream<'static, Result<PeerHeartbeat, Status>>>, Status> {
    let (sender, outgoing) = mpsc::channel(QUEUE_LENGTH);
    let newest_received = first.as_ref().map_or(0, |heartbeat| heartbeat.number);
    let hello = PeerHeartbeat {
        hello: Some(shared.setup.hello.hello()),
        number: 1,
        newest_received,
        ..PeerHeartbeat::default()
    };
    sender.try_send(hello).map_err(|error| Status::internal(error.to_string()))?;
    let mut exchange = {
        let now_ms = shared.elapsed_ms();
        HeartbeatExchange::new(shared, member, now_ms)
    };
    tokio::spawn(async move {
        let address =
            first.as_ref().and_then(|heartbeat| heartbeat.hello.as_ref()).map(|hello| hello.peer_address.clone());
        let address = address.unwrap_or_default();
        // A known process may redial repeatedly because it receives nothing from here, so a redial is no sign of life.
        if exchange.shared.peers.detector().has_connected(&member) {
            exchange.unconfirmed_host = Some(host(&address).to_owned());
        } else {
            exchange.report_connected(host(&address));
        }
        if let Some(first) = first {
            exchange.handle(&first);
        }
        exchange.run(heartbeats, sender).await;
    });
    Ok(Response::new(Box::pin(ReceiverStream::new(outgoing).map(Ok))))
}

/// Heartbeats received on both sides of a stream.
#[derive(Debug, Default)]
struct HeartbeatAcks {
    /// Newest heartbeat received here.
    newest: u64,
    /// Newest own heartbeat that the other side has acknowledged.
    newest_acknowledged: u64,
}

impl HeartbeatAcks {
    /// Records a received heartbeat; returns whether it acknowledges a newer own heartbeat.
    fn receive(&mut self, heartbeat: &PeerHeartbeat) -> bool {
        self.newest = heartbeat.number;
        let is_acknowledgement = heartbeat.newest_received > self.newest_acknowledged;
        self.newest_acknowledged = self.newest_acknowledged.max(heartbeat.newest_received);
        is_acknowledgement
    }
}

/// A heartbeat stream with one process.
struct HeartbeatExchange {
    shared: Arc<Shared>,
    member: Member,
    /// Number of the last heartbeat sent, and the send times of recent ones.
    number: u64,
    sent: VecDeque<(u64, u64)>,
    acks: HeartbeatAcks,
    /// Host of the process until it acknowledges a heartbeat of this worker.
    unconfirmed_host: Option<String>,
    /// Received heartbeat whose sender the store is granting a lease.
    requested_lease: Option<(u64, oneshot::Receiver<Vec<PartitionId>>)>,
}

impl HeartbeatExchange {
    fn new(shared: Arc<Shared>, member: Member, sent_ms: u64) -> Self {
        let sent = VecDeque::from([(1, sent_ms)]);
        Self {
            shared,
            member,
            number: 1,
            sent,
            acks: HeartbeatAcks::default(),
            unconfirmed_host: None,
            requested_lease: None,
        }
    }

    fn report_connected(&self, host: &str) {
        tracing::debug!(peer = %self.member, "heartbeat stream opened");
        self.shared.update_detector(|detector, now_ms| detector.process_connected(self.member, host, now_ms));
    }

    /// Sends and receives heartbeats until the stream ends.
    async fn run(&mut self, mut heartbeats: Streaming<PeerHeartbeat>, sender: mpsc::Sender<PeerHeartbeat>) {
        let mut ticks = interval(HEARTBEAT_INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut stopping = self.shared.lifecycle.stopping();
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    let heartbeat = self.next();
                    if let Err(mpsc::error::TrySendError::Closed(_)) = sender.try_send(heartbeat) {
                        break;
                    }
                }
                heartbeat = heartbeats.message() => match heartbeat {
                    Ok(Some(heartbeat)) => self.handle(&heartbeat),
                    Ok(None) | Err(_) => break,
                },
                // This worker stops sending; others decide whether it is dead.
                _ = stopping.wait_for(|stopping| *stopping) => return,
            }
        }
        self.shared.update_detector(|detector, now_ms| detector.stream_closed(self.member, now_ms));
    }

    fn handle(&mut self, heartbeat: &PeerHeartbeat) {
        if heartbeat.wall_ms > 0 {
            let session_clock = self.shared.engine.session_clock();
            session_clock.observe(self.member.ordinal, heartbeat.wall_ms, heartbeat.session_watermark_ms);
        }
        if self.acks.receive(heartbeat) {
            if let Some(host) = self.unconfirmed_host.take() {
                self.report_connected(&host);
            }
            self.shared
                .update_detector(|detector, now_ms| detector.heartbeat_received(self.member, heartbeat.number, now_ms));
        }
        let shared = &self.shared;
        // One at a time: a store that lags is asked again after its response.
        if self.requested_lease.is_none() {
            self.requested_lease = Some((heartbeat.number, shared.engine.grant_lease(self.member)));
        }
        if let Some((_, sent_ms)) = self.sent.iter().find(|(number, _)| *number == heartbeat.lease_granted_for) {
            let except = heartbeat.excluded_partitions.iter().copied().map(PartitionId).collect();
            shared.engine.lease_held(self.member, sent_ms + LEASE_MS, except);
        }
    }

    /// Returns the next heartbeat, with the lease granted in the meantime.
    fn next(&mut self) -> PeerHeartbeat {
        self.number += 1;
        self.sent.push_back((self.number, self.shared.elapsed_ms()));
        if self.sent.len() > MAX_UNACKNOWLEDGED {
            self.sent.pop_front();
        }
        let session_clock = self.shared.engine.session_clock();
        let mut heartbeat = PeerHeartbeat {
            number: self.number,
            newest_received: self.acks.newest,
            wall_ms: session_clock.wall_ms(),
            session_watermark_ms: session_clock.watermark_ms(),
            ..PeerHeartbeat::default()
        };
        if let Some((requested_lease, mut granted)) = self.requested_lease.take() {
            match granted.try_recv() {
                Ok(except) => {
                    heartbeat.lease_granted_for = requested_lease;
                    heartbeat.excluded_partitions = except.iter().map(|partition| partition.0).collect();
                }
                Err(oneshot::error::TryRecvError::Empty) => self.requested_lease = Some((requested_lease, granted)),
                // The store has stopped.
                Err(oneshot::error::TryRecvError::Closed) => {}
            }
        }
        heartbeat
    }
}

/// Evaluates the peer detector periodically.
async fn evaluate_peers(shared: &Arc<Shared>) {
    let mut ticks = interval(EVALUATION_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut view = shared.membership.subscribe();
    view.mark_changed();
    let mut last_promotion_ms = 0;
    loop {
        let ticked = tokio::select! {
            _ = ticks.tick() => true,
            // A coordinator's report may be the second witness, so it is evaluated at once.
            changed = view.changed() => {
                if changed.is_err() {
                    return;
                }
                false
            }
        };
        let (now_ms, silence_ms) = (shared.elapsed_ms(), shared.membership.coordinators().silence_ms());
        let members = view.borrow_and_update().members.clone();
        shared.update_detector(|detector, now_ms| {
            let mut verdicts = detector.update_members(&members, now_ms);
            if ticked {
                verdicts.extend(detector.tick(now_ms));
            }
            verdicts.extend(detector.evaluate(silence_ms, now_ms));
            verdicts
        });
        if silence_ms >= NO_COORDINATOR_MS && now_ms.saturating_sub(last_promotion_ms) >= PROMOTION_RETRY_MS {
            last_promotion_ms = now_ms;
            promote(shared);
        }
    }
}

impl Shared {
    /// Updates the peer detector and passes its verdicts to the store.
    ///
    /// The lock is held until the store has the verdicts: if a suspicion reached the store after the trust that revokes it, the
    /// store would treat a living partner as dead until its next silence.
    fn update_detector(&self, find: impl FnOnce(&mut PeerDetector, u64) -> Vec<Verdict>) {
        let mut detector = self.peers.detector();
        for verdict in find(&mut detector, self.elapsed_ms()) {
            match verdict {
                Verdict::Suspected(ordinal) => {
                    tracing::warn!(worker = ordinal.0, "partner suspected dead");
                    self.membership.failovers().begin(ordinal);
                    self.engine.suspected(ordinal);
                }
                Verdict::Trusted(ordinal) => {
                    tracing::info!(worker = ordinal.0, "partner is alive again");
                    self.engine.trusted(ordinal);
                }
                Verdict::Dead(member) => {
                    tracing::info!(%member, "process death proven");
                    self.membership.failovers().begin(member.ordinal);
                    self.engine.proven_dead(member);
                }
            }
        }
    }
}

/// Proposes promotions for partitions whose primary is gone while no coordinator can, including primaries of this worker's previous
/// process. The map's compare-and-swap decides between several workers that try.
fn promote(shared: &Shared) {
    if shared.peers.map_store().is_none() {
        return;
    }
    let Some(map) = shared.membership.view().map.clone() else { return };
    let detector = shared.peers.detector();
    let proposals: Vec<Proposal> = map
        .entries()
        .filter(|(_, entry)| is_gone(&detector, entry, &shared.setup.member) && can_become_primary(shared, entry))
        .map(|(partition, entry)| {
            let living = entry.candidates().map(|member| member.ordinal).filter(|ordinal| detector.is_alive(*ordinal));
            let isr: BTreeSet<Ordinal> = living.chain([shared.ordinal()]).collect();
            let change = Change::Promote { primary: shared.setup.member, isr: isr.into_iter().collect() };
            Proposal { partition, expected: entry.expectation(), change }
        })
        .collect();
    drop(detector);
    if !proposals.is_empty() {
        tracing::warn!(
            partitions = proposals.len(),
            "no coordinator responds; proposing to take over partitions of dead primaries"
        );
        shared.peers.proposals().add(proposals);
    }
}

/// Returns whether the primary of a partition serves no more: it is suspected, or a newer process runs in its place, which is not
/// primary before the map says so.
fn is_gone(detector: &PeerDetector, entry: &Entry, own: &Member) -> bool {
    if entry.primary == own.ordinal {
        return !entry.served_by(own);
    }
    detector.is_suspected(entry.primary) || entry.primary_member().is_some_and(|primary| detector.is_replaced(primary))
}

fn can_become_primary(shared: &Shared, entry: &Entry) -> bool {
    let is_sync = shared.setup.options.durability() == Durability::Sync;
    entry.candidates().any(|member| member.ordinal == shared.ordinal() && member.store == shared.setup.member.store)
        && entry.holds_all(&shared.setup.member, shared.setup.hello.lossless_since, is_sync)
}

/// Reads the map from the map store while no coordinator sends it.
async fn follow_map_store(shared: &Arc<Shared>) {
    let Some(map_store) = &shared.peers.map_store() else { return };
    loop {
        sleep(EVALUATION_INTERVAL).await;
        // The same delay as before own writes of the map.
        if u128::from(shared.membership.coordinators().silence_ms()) < proposals::WRITE_AFTER_SILENCE.as_millis() {
            continue;
        }
        match map_store.newest().await {
            Ok(Some(map)) => shared.membership.read_map(map),
            Ok(None) => {}
            Err(error) => tracing::debug!(error = with_causes(&error), "failed to read the partition map"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heartbeat_is_a_sign_of_life_only_if_it_acknowledges_a_newer_one() {
        let (mut here, mut there) = (HeartbeatAcks::default(), HeartbeatAcks::default());
        let heartbeat = |number, acks: &HeartbeatAcks| PeerHeartbeat {
            number,
            newest_received: acks.newest,
            ..PeerHeartbeat::default()
        };
        assert!(!there.receive(&heartbeat(1, &here)), "a hello acknowledges nothing");
        assert!(
            here.receive(&heartbeat(1, &there)) && there.receive(&heartbeat(2, &here)),
            "then each side acknowledges the other"
        );
        // From here on no heartbeat sent there arrives.
        assert!(here.receive(&heartbeat(2, &there)), "it acknowledges the last heartbeat that arrived");
        for number in 3..20 {
            assert!(!here.receive(&heartbeat(number, &there)), "heartbeat {number} acknowledges nothing new");
        }
        assert!(
            there.receive(&heartbeat(12, &here)) && here.receive(&heartbeat(20, &there)),
            "the connection works again"
        );
    }
}
