//! Beats between partners: whether they live, and read leases.
//!
//! Of two workers the one with the lower number keeps the stream; both beat on it. A beat is a sign of life when it shows that a
//! newer one of this worker has come to its sender: what is broken in one direction is broken.
//!
//! A beat answers one that came: it renews the read leases of that beat's sender, but for partitions of which this worker follows
//! somebody else. The holder counts a lease from when it *sent* the beat that was answered, the granter from when it *worked on* it
//! and a little longer, so that whoever grants waits longer than whoever holds, whatever the clocks say.

use super::link::{HELLO_DEADLINE, connect};
use super::witness::{NO_COORDINATOR_MS, Verdict, Witness};
use super::{each_partner, proposals};
use crate::shared::Shared;
use engram_cluster::{Change, Entry};
use engram_mapstore::with_causes;
use engram_memory::{Member, Ordinal, PartitionId};
use engram_proto::v1::peer_service_client::PeerServiceClient;
use engram_proto::v1::{MemberEntry, PeerBeat};
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

/// Between beats: a sixth of the silence after which a worker is suspected.
pub(crate) const BEAT: Duration = Duration::from_millis(200);
/// Between looks at everybody.
const TICK: Duration = Duration::from_millis(100);
/// Between attempts to reach a partner: at first, and at most.
const REDIAL: Duration = Duration::from_millis(50);
const REDIAL_MOST: Duration = Duration::from_secs(1);
/// Beats without an answer that are remembered: more than a lease lasts.
const SENT_KEPT: usize = 16;
/// Beats that wait for a partner that does not read; a newer one says more.
const WAITING: usize = 2;
/// Between own promotions that are asked for again.
const PROMOTE_AGAIN_MS: u64 = 500;

/// Keeps streams to all partners with a higher number, and looks at everybody. Ends when dropped.
pub(crate) async fn run(shared: Arc<Shared>) {
    tokio::join!(each_partner(&shared, keep), look(&shared), follow_map_store(&shared));
}

async fn keep(shared: Arc<Shared>, ordinal: Ordinal) {
    let mut wait = REDIAL;
    let address = |members: &[MemberEntry]| {
        members.iter().find(|member| member.ordinal == ordinal.0).map(|member| member.peer_address.clone())
    };
    loop {
        let found = address(&shared.view.borrow().members).filter(|address| !address.is_empty());
        match found {
            Some(address) => match stream(&shared, ordinal, &address).await {
                Ok(()) => wait = REDIAL,
                Err(reason) => {
                    tracing::debug!(worker = ordinal.0, address, reason, "no stream of beats");
                    wait = (wait * 2).min(REDIAL_MOST);
                }
            },
            None => wait = REDIAL_MOST,
        }
        sleep(wait.mul_f64(rand::random_range(0.5..1.0))).await;
    }
}

/// One stream, until it breaks; the error says why none came up.
async fn stream(shared: &Arc<Shared>, ordinal: Ordinal, address: &str) -> Result<(), String> {
    let refused = |reason: String| {
        shared.find_out(|witness, now_ms| witness.refused(ordinal, now_ms));
        reason
    };
    let channel = connect(shared, ordinal, address, BEAT * 5).await.map_err(refused)?;
    let (sender, outgoing) = mpsc::channel(WAITING);
    let first = PeerBeat { hello: Some(shared.greeter.hello()), number: 1, ..PeerBeat::default() };
    sender.try_send(first).map_err(|error| error.to_string())?;
    let sent_ms = shared.elapsed_ms();
    let mut client = PeerServiceClient::new(channel);
    let opened = timeout(HELLO_DEADLINE, async {
        let answer = client.beat(ReceiverStream::new(outgoing)).await.map_err(|status| status.message().to_owned())?;
        let mut beats = answer.into_inner();
        let first = beats.message().await.map_err(|status| status.message().to_owned())?;
        Ok::<_, String>((beats, first))
    });
    let (beats, first) = opened.await.map_err(|_| "it does not answer".to_owned())??;
    let hello = first.as_ref().and_then(|beat| beat.hello.as_ref());
    let member = shared.greeter.check_callee(hello, ordinal).map_err(|refused| refused.to_string())?;
    let mut talk = Talk::new(Arc::clone(shared), member, sent_ms);
    talk.meet(host(address));
    if let Some(first) = first {
        talk.hear(&first);
    }
    talk.run(beats, sender).await;
    Ok(())
}

/// The host of `host:port`.
fn host(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// The listening side of a stream of beats.
pub(super) fn answer(
    shared: Arc<Shared>,
    member: Member,
    first: Option<PeerBeat>,
    beats: Streaming<PeerBeat>,
) -> Result<Response<BoxStream<'static, Result<PeerBeat, Status>>>, Status> {
    let (sender, outgoing) = mpsc::channel(WAITING);
    let heard = first.as_ref().map_or(0, |beat| beat.number);
    let hello = PeerBeat { hello: Some(shared.greeter.hello()), number: 1, heard, ..PeerBeat::default() };
    sender.try_send(hello).map_err(|error| Status::internal(error.to_string()))?;
    let mut talk = {
        let now_ms = shared.elapsed_ms();
        Talk::new(shared, member, now_ms)
    };
    tokio::spawn(async move {
        let address = first.as_ref().and_then(|beat| beat.hello.as_ref()).map(|hello| hello.peer_address.clone());
        let address = address.unwrap_or_default();
        // A process that is known may dial again and again because it hears nothing from here.
        if talk.shared.witness().has_met(&member) {
            talk.unmet = Some(host(&address).to_owned());
        } else {
            talk.meet(host(&address));
        }
        if let Some(first) = first {
            talk.hear(&first);
        }
        talk.run(beats, sender).await;
    });
    Ok(Response::new(Box::pin(ReceiverStream::new(outgoing).map(Ok))))
}

/// Which beats of a stream have come, here and there.
#[derive(Debug, Default)]
struct Ways {
    /// The newest one that came here.
    newest: u64,
    /// The newest one that the other side is known to have heard.
    heard: u64,
}

impl Ways {
    /// Takes a beat that came; whether it shows that one more was heard on the other side.
    fn came(&mut self, beat: &PeerBeat) -> bool {
        self.newest = beat.number;
        let answers = beat.heard > self.heard;
        self.heard = self.heard.max(beat.heard);
        answers
    }
}

/// One stream of beats with one process.
struct Talk {
    shared: Arc<Shared>,
    member: Member,
    /// Number of the last beat sent, and when the newest ones were.
    number: u64,
    sent: VecDeque<(u64, u64)>,
    ways: Ways,
    /// Its host, until it is known to hear this worker.
    unmet: Option<String>,
    /// The beat that came, while the store grants its sender a lease.
    asked: Option<(u64, oneshot::Receiver<Vec<PartitionId>>)>,
}

impl Talk {
    fn new(shared: Arc<Shared>, member: Member, sent_ms: u64) -> Self {
        let sent = VecDeque::from([(1, sent_ms)]);
        Self { shared, member, number: 1, sent, ways: Ways::default(), unmet: None, asked: None }
    }

    fn meet(&self, host: &str) {
        tracing::debug!(peer = %self.member, "beats");
        self.shared.find_out(|witness, now_ms| witness.met(self.member, host, now_ms));
    }

    /// Beats and listens until the stream ends.
    async fn run(&mut self, mut beats: Streaming<PeerBeat>, sender: mpsc::Sender<PeerBeat>) {
        let mut ticks = interval(BEAT);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut stopping = self.shared.stopping.subscribe();
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    let beat = self.next();
                    if let Err(mpsc::error::TrySendError::Closed(_)) = sender.try_send(beat) {
                        break;
                    }
                }
                beat = beats.message() => match beat {
                    Ok(Some(beat)) => self.hear(&beat),
                    Ok(None) | Err(_) => break,
                },
                // It says no more; whether it is dead is for others to find out.
                _ = stopping.wait_for(|stopping| *stopping) => return,
            }
        }
        self.shared.find_out(|witness, now_ms| witness.closed(self.member, now_ms));
    }

    fn hear(&mut self, beat: &PeerBeat) {
        if self.ways.came(beat) {
            if let Some(host) = self.unmet.take() {
                self.meet(&host);
            }
            self.shared.find_out(|witness, now_ms| witness.beat(self.member, beat.number, now_ms));
        }
        let shared = &self.shared;
        // One at a time: a store that is behind is asked again when it has answered.
        if self.asked.is_none() {
            self.asked = Some((beat.number, shared.engine.grant_lease(self.member)));
        }
        if let Some((_, sent_ms)) = self.sent.iter().find(|(number, _)| *number == beat.grants) {
            let except = beat.except.iter().copied().map(PartitionId).collect();
            shared.engine.lease_held(self.member, sent_ms + LEASE_MS, except);
        }
    }

    /// The next beat, with what was granted meanwhile.
    fn next(&mut self) -> PeerBeat {
        self.number += 1;
        self.sent.push_back((self.number, self.shared.elapsed_ms()));
        if self.sent.len() > SENT_KEPT {
            self.sent.pop_front();
        }
        let mut beat = PeerBeat { number: self.number, heard: self.ways.newest, ..PeerBeat::default() };
        if let Some((asked, mut granted)) = self.asked.take() {
            match granted.try_recv() {
                Ok(except) => {
                    beat.grants = asked;
                    beat.except = except.iter().map(|partition| partition.0).collect();
                }
                Err(oneshot::error::TryRecvError::Empty) => self.asked = Some((asked, granted)),
                // The store has ended.
                Err(oneshot::error::TryRecvError::Closed) => {}
            }
        }
        beat
    }
}

/// Looks at everybody, again and again.
async fn look(shared: &Arc<Shared>) {
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut view = shared.view.subscribe();
    view.mark_changed();
    let mut promoted_ms = 0;
    loop {
        let ticked = tokio::select! {
            _ = ticks.tick() => true,
            // What a coordinator says may be the second witness: no reason to wait for the next tick.
            changed = view.changed() => {
                if changed.is_err() {
                    return;
                }
                false
            }
        };
        let (now_ms, unheard_ms) = (shared.elapsed_ms(), shared.coordinators.unheard_ms());
        let members = view.borrow_and_update().members.clone();
        shared.find_out(|witness, now_ms| {
            let mut verdicts = witness.told(&members, now_ms);
            if ticked {
                verdicts.extend(witness.tick(now_ms));
            }
            verdicts.extend(witness.look(unheard_ms, now_ms));
            verdicts
        });
        if unheard_ms >= NO_COORDINATOR_MS && now_ms.saturating_sub(promoted_ms) >= PROMOTE_AGAIN_MS {
            promoted_ms = now_ms;
            promote(shared);
        }
    }
}

impl Shared {
    /// Lets the witness find something out at this moment, and tells the store.
    ///
    /// Nobody else finds anything out before the store knows: were a suspicion told after the trust that came later, the store would
    /// take a living partner for dead until that one falls silent the next time.
    fn find_out(&self, find: impl FnOnce(&mut Witness, u64) -> Vec<Verdict>) {
        let mut witness = self.witness();
        for verdict in find(&mut witness, self.elapsed_ms()) {
            match verdict {
                Verdict::Suspected(ordinal) => {
                    tracing::warn!(worker = ordinal.0, "a partner is taken for dead");
                    self.engine.suspected(ordinal);
                }
                Verdict::Trusted(ordinal) => {
                    tracing::info!(worker = ordinal.0, "a partner is there again");
                    self.engine.trusted(ordinal);
                }
                Verdict::Dead(member) => {
                    tracing::info!(%member, "a process is dead, by proof");
                    self.engine.proven_dead(member);
                }
            }
        }
    }
}

/// Takes over from primaries that are gone while no coordinator is there to say so, this worker's own process before included.
/// The map's compare-and-swap decides between several that try.
fn promote(shared: &Shared) {
    if shared.map_keeper.is_none() {
        return;
    }
    let Some(map) = shared.view.borrow().map.clone() else { return };
    let witness = shared.witness();
    let proposals: Vec<Proposal> = map
        .entries()
        .filter(|(_, entry)| is_gone(&witness, entry, &shared.member) && may_lead(shared, entry))
        .map(|(partition, entry)| {
            let living = entry.candidates().map(|member| member.ordinal).filter(|ordinal| witness.is_alive(*ordinal));
            let isr: BTreeSet<Ordinal> = living.chain([shared.ordinal()]).collect();
            let change = Change::Promote { primary: shared.member, isr: isr.into_iter().collect() };
            Proposal { partition, expected: entry.expected(), change }
        })
        .collect();
    drop(witness);
    if !proposals.is_empty() {
        tracing::warn!(partitions = proposals.len(), "no coordinator answers: this worker takes over from the dead");
        shared.proposals.add(proposals);
    }
}

/// Whether the process that leads a partition serves no more: it is taken for dead, or another one runs in its place, which
/// leads nothing before the map says so.
fn is_gone(witness: &Witness, entry: &Entry, own: &Member) -> bool {
    if entry.primary == own.ordinal {
        return !entry.served_by(own);
    }
    witness.is_suspected(entry.primary) || entry.primary_member().is_some_and(|primary| witness.is_replaced(primary))
}

fn may_lead(shared: &Shared, entry: &Entry) -> bool {
    let keeps_all = shared.options.durability() == Durability::Sync;
    entry.candidates().any(|member| member.ordinal == shared.ordinal() && member.store == shared.member.store)
        && entry.holds_all(&shared.member, shared.greeter.lossless_since, keeps_all)
}

/// Reads the map where it is kept while no coordinator tells it.
async fn follow_map_store(shared: &Arc<Shared>) {
    let Some(keeper) = &shared.map_keeper else { return };
    loop {
        sleep(TICK).await;
        // As long as a proposal waits before it is written here.
        if u128::from(shared.coordinators.unheard_ms()) < proposals::UNANSWERED.as_millis() {
            continue;
        }
        match keeper.newest().await {
            Ok(Some(map)) => shared.read_map(map),
            Ok(None) => {}
            Err(error) => tracing::debug!(error = with_causes(&error), "the map cannot be read"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beat_is_a_sign_of_life_when_it_answers_a_newer_one() {
        let (mut here, mut there) = (Ways::default(), Ways::default());
        let beat = |number, ways: &Ways| PeerBeat { number, heard: ways.newest, ..PeerBeat::default() };
        assert!(!there.came(&beat(1, &here)), "who says hello has heard nothing yet");
        assert!(here.came(&beat(1, &there)) && there.came(&beat(2, &here)), "and then each hears the other");
        // From here on nothing of what is sent there arrives.
        assert!(here.came(&beat(2, &there)), "it heard the last one that came");
        for number in 3..20 {
            assert!(!here.came(&beat(number, &there)), "beat {number} comes from one that hears nothing");
        }
        assert!(there.came(&beat(12, &here)) && here.came(&beat(20, &there)), "the way is whole again");
    }
}
