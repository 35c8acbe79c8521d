//! The member of a group on this worker: runs its state machine, passes its decisions to the engine, and talks to the driver of the run.

use crate::shared::Shared;
use crate::training::checkpoint::files::CheckpointFolder;
use crate::training::engine::{Engine, Start};
use crate::training::inbox::{Inbox, SignOfLife};
use crate::training::serving::serve::Served;
use crate::training::step::work::{EngineEvent, Work};
use crate::training::transport::connections::{Connector, Generation, Peer};
use crate::training::transport::remote::RemoteCheckpoints;
use crate::training::transport::transfer;
use engram_client::group::{notice_from_wire, position_to_wire, report_to_wire};
use engram_collective::group::{
    Member, MemberAction, MemberEvent, MemberId, Notice, Position, Prepared, Stage, Timing,
};
use engram_memory::RunId;
use engram_proto::v1;
use engram_proto::v1::training_event::Event;
use engram_proto::v1::training_order::Order;
use engram_train::Checkpoint;
use engram_train::job::Job;
use std::collections::{BTreeMap, VecDeque};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};
use tonic::Status;

/// Time without a driver after which a member ends: long enough for any failover of a partition.
const LINGER: Duration = Duration::from_secs(120);
/// Queued work, events and messages. A member has at most one step in progress, and a handful of each.
const QUEUE: usize = 256;

/// Identifies a run: its name may be used again.
pub(in crate::training) type Key = (RunId, u64);
/// Where a member sends its events: the stream of the driver.
pub(in crate::training) type EventSender = mpsc::Sender<Result<v1::TrainingEvent, Status>>;

/// What a member receives.
pub(in crate::training) enum Inbound {
    /// A driver connected.
    Driver(EventSender),
    Order(Order),
    /// Another worker wants the state, at a position if one is named.
    Copy(Option<Position>, oneshot::Sender<Checkpoint>),
}

/// What a member needs to start.
pub(in crate::training) struct Settings {
    pub(in crate::training) key: Key,
    pub(in crate::training) run: engram_api::ReplayRun,
    pub(in crate::training) job: Arc<Job>,
    pub(in crate::training) served: Arc<Served>,
    pub(in crate::training) warm_start: Option<Vec<Vec<u8>>>,
    pub(in crate::training) remote: Option<RemoteCheckpoints>,
}

/// The stream to the driver of the run.
struct DriverStream {
    events: Option<EventSender>,
    missing_since: Instant,
}

impl DriverStream {
    /// Sends an event to the driver. One that does not read gets the next report instead.
    fn send(&mut self, event: Event) {
        let Some(events) = &self.events else { return };
        let result = events.try_send(Ok(v1::TrainingEvent { event: Some(event) }));
        if matches!(result, Err(mpsc::error::TrySendError::Closed(_))) {
            *self = Self { events: None, missing_since: Instant::now() };
        }
    }
}

/// Host of a member: its state machine between a driver, an engine and the other members. It owns one end of the channel to each of them,
/// therefore more than a dozen fields.
struct Host {
    shared: Arc<Shared>,
    key: Key,
    id: MemberId,
    address: v1::GroupMember,
    member: Member,
    timing: Timing,
    started: Instant,
    driver: DriverStream,
    inbox: Inbox,
    engine: SyncSender<Work>,
    /// The generation that the engine works for, or is to.
    generation: Option<Generation>,
    /// Addresses of the members that notices named.
    addresses: BTreeMap<MemberId, v1::GroupMember>,
    /// Commit flag that the engine exchanges.
    flagged: Option<(u64, u64)>,
    caught_up: mpsc::Sender<Checkpoint>,
    is_transferring: Arc<AtomicBool>,
    /// Set when the member ends, for an engine that waits for data.
    ending: watch::Sender<bool>,
}

/// Starts a member; returns where to send messages for it. It ends by itself.
///
/// # Errors
/// The specification or the newest checkpoint cannot be used.
pub(in crate::training) async fn start(
    shared: &Arc<Shared>,
    settings: Settings,
) -> anyhow::Result<mpsc::Sender<Inbound>> {
    let Settings { key, run, job, served, warm_start, remote } = settings;
    let timing = Timing::new(run.detect_after.as_millis());
    let (events_sender, events) = mpsc::channel(QUEUE);
    let (work, works) = std::sync::mpsc::sync_channel(QUEUE);
    let listener = TcpListener::bind((shared.setup.options.listen.peer.ip(), 0))?;
    let address = v1::GroupMember {
        id: rand::random(),
        ordinal: shared.ordinal().0,
        reduce_address: reduce_address(shared, &listener)?,
        state_address: String::new(),
    };
    let (ending, is_ending) = watch::channel(false);
    let start = Start {
        shared: Arc::clone(shared),
        job,
        key,
        ending: is_ending,
        connector: Connector {
            listener,
            keys: shared.setup.keys.clone(),
            limit: Duration::from_millis(timing.progress_ms()),
            streams: run.streams as usize,
            shared_memory: run.shared_memory,
        },
        events: events_sender,
        remote,
        folder: CheckpointFolder::new(&shared.setup.options.state_dir, key.0, key.1, run.checkpoint.keep),
        checkpoint_every: run.checkpoint.every,
        served,
        warm_start,
    };
    let engine = tokio::task::spawn_blocking(move || Engine::new(start)).await??;
    let position = engine.position();
    std::thread::Builder::new().name("training".into()).spawn(move || engine.run(&works))?;
    let (inbox_sender, inbox) = mpsc::channel(QUEUE);
    let (caught_up, transfers) = mpsc::channel(1);
    let id = MemberId(address.id);
    let host = Host {
        shared: Arc::clone(shared),
        key,
        id,
        address,
        member: Member::new(id, position, timing, 0),
        timing,
        started: Instant::now(),
        driver: DriverStream { events: None, missing_since: Instant::now() },
        inbox: Inbox::new(inbox),
        engine: work,
        generation: None,
        addresses: BTreeMap::new(),
        flagged: None,
        caught_up,
        is_transferring: Arc::default(),
        ending,
    };
    tracing::info!(run = %key.0, member = id.0, step = position.step, "started a training member");
    tokio::spawn(host.run(events, transfers));
    Ok(inbox_sender)
}

/// Completes when the worker stops.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // An error means that the worker was dropped.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

/// Returns the address at which the other members reach the listener.
fn reduce_address(shared: &Shared, listener: &TcpListener) -> anyhow::Result<String> {
    let peer = shared.setup.hello.hello().peer_address;
    let host = peer.rsplit_once(':').map_or(&*peer, |(host, _)| host);
    Ok(format!("{host}:{}", listener.local_addr()?.port()))
}

impl Host {
    async fn run(mut self, mut events: mpsc::Receiver<EngineEvent>, mut transfers: mpsc::Receiver<Checkpoint>) {
        let mut tick = tokio::time::interval(Duration::from_millis(self.timing.probe_ms()));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut stopping = self.shared.lifecycle.stopping();
        let mut leaving = self.shared.membership.leaving_changes();
        // A drain that began before must be seen, too.
        leaving.mark_changed();
        self.shared.metrics.training.members.inc();
        self.shared.trainings.running.send_modify(|running| *running += 1);
        loop {
            let is_running = tokio::select! {
                biased;
                event = events.recv() => match event {
                    Some(EngineEvent::Stopped) | None => break,
                    Some(event) => self.engine_event(event).await,
                },
                inbound = self.inbox.next() => match inbound {
                    Some(inbound) => self.inbound(inbound).await,
                    None => false,
                },
                // One that arrives when the member is in the group is of another history, or older.
                Some(checkpoint) = transfers.recv() => {
                    self.member.report().generation != 0 || self.work(Work::Install { checkpoint })
                }
                _ = tick.tick() => self.tick().await,
                Ok(()) = leaving.changed() => {
                    let is_leaving = *leaving.borrow_and_update();
                    self.leaving(is_leaving).await
                }
                () = stopped(&mut stopping) => false,
            };
            if !is_running {
                self.cancel();
                self.ending.send_replace(true);
                // It may be full of work that is dropped below.
                if self.engine.try_send(Work::Stop).is_err() {
                    break;
                }
                while !matches!(events.recv().await, Some(EngineEvent::Stopped) | None) {}
                break;
            }
        }
        self.shared.metrics.training.members.dec();
        self.shared.trainings.running.send_modify(|running| *running -= 1);
        let step = self.member.report().position.step;
        tracing::info!(run = %self.key.0, member = self.id.0, step, "training member ended");
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Passes work to the engine; returns whether it can go on.
    fn work(&self, work: Work) -> bool {
        let sent = self.engine.try_send(work).is_ok();
        if !sent {
            tracing::error!(run = %self.key.0, "the training thread does not accept work");
        }
        sent
    }

    fn cancel(&self) {
        if let Some(generation) = &self.generation {
            generation.cancel.store(true, Ordering::Relaxed);
        }
    }

    async fn tick(&mut self) -> bool {
        if self.driver.events.is_none() && self.driver.missing_since.elapsed() > LINGER {
            tracing::warn!(run = %self.key.0, "training member ends: no driver connected");
            return false;
        }
        self.step(MemberEvent::Tick).await
    }

    /// Leaves the group at the end of a step if the worker is being drained. If the drain is cancelled meanwhile, this member ends and the driver
    /// starts another.
    async fn leaving(&mut self, is_leaving: bool) -> bool {
        if is_leaving { self.step(MemberEvent::Leave).await } else { !self.member.report().leaving }
    }

    async fn inbound(&mut self, inbound: Inbound) -> bool {
        match inbound {
            Inbound::Driver(driver) => {
                self.driver.events = Some(driver);
                let position = Some(position_to_wire(self.member.report().position));
                self.driver.send(Event::Member(v1::TrainingMember { member: Some(self.address.clone()), position }));
                true
            }
            Inbound::Order(Order::Start(_)) => true,
            Inbound::Order(Order::Probe(probe)) => {
                self.driver.send(Event::ProbeAnswer(probe));
                true
            }
            Inbound::Order(Order::Stop(stop)) if stop.complete => self.work(Work::Complete),
            Inbound::Order(Order::Stop(_)) => false,
            Inbound::Order(Order::Notice(notice)) => self.notice(notice).await,
            Inbound::Copy(at, reply) => self.work(Work::Copy { at, reply }),
        }
    }

    async fn notice(&mut self, notice: v1::GroupNotice) -> bool {
        let Some((term, notice, members)) = notice_from_wire(notice) else { return true };
        self.addresses.extend(members.into_iter().map(|it| (MemberId(it.id), it)));
        if let Notice::Publish { record, .. } = &notice {
            let is_known = self.generation.as_ref().is_some_and(|known| known.number >= record.generation);
            if let Some(rank) = record.members.iter().position(|it| *it == self.id).filter(|_| !is_known) {
                self.cancel();
                let members = record.members.iter().map(|id| {
                    let v1::GroupMember { ordinal, reduce_address, .. } =
                        self.addresses.get(id).cloned().unwrap_or_default();
                    Peer { id: *id, ordinal, address: reduce_address }
                });
                let members = members.collect();
                let cancel = Arc::default();
                self.generation = Some(Generation { number: record.generation, members, rank, cancel });
            }
        }
        let is_running = self.step(MemberEvent::Notice { term, notice }).await;
        if matches!(self.member.report().stage, Stage::Fenced | Stage::Outside) {
            // An exchange of flags ends as well: the service finishes the step or repeats it.
            self.cancel();
        }
        is_running
    }

    async fn engine_event(&mut self, event: EngineEvent) -> bool {
        match event {
            EngineEvent::Gradients { step } => self.step(MemberEvent::Gradients { step }).await,
            EngineEvent::Computes(computes) => self.step(MemberEvent::Computes(computes)).await,
            EngineEvent::Reduced { generation, step, valid } => {
                self.step(MemberEvent::Reduced { generation, step, valid }).await
            }
            EngineEvent::Flag { generation, step, from, valid } => {
                let flag = Prepared { generation, step, valid };
                self.step(MemberEvent::Flag { from, flag }).await
            }
            EngineEvent::PeerFailed { generation, suspicion } => {
                self.step(MemberEvent::PeerFailed { generation, suspicion }).await
            }
            EngineEvent::CaughtUp(position) => self.step(MemberEvent::CaughtUp { position }).await,
            EngineEvent::Failed(failure) => {
                self.driver.send(Event::Failure(failure));
                true
            }
            EngineEvent::Waiting(reason) => {
                self.driver.send(Event::Wait(v1::TrainingWait { reason }));
                true
            }
            EngineEvent::Progress(progress) => {
                self.shared.metrics.training.add_progress(&progress);
                self.driver.send(Event::Progress(progress));
                true
            }
            EngineEvent::Completed(result) => {
                self.driver.send(Event::Result(result));
                true
            }
            EngineEvent::Stopped => false,
        }
    }

    /// Passes an event to the state machine and executes its actions; returns whether the member goes on.
    async fn step(&mut self, event: MemberEvent) -> bool {
        let mut actions = VecDeque::from(self.member.step(event, self.now_ms()));
        while let Some(action) = actions.pop_front() {
            let is_running = match action {
                MemberAction::Compute { step } => {
                    let part = self.generation.as_ref().map_or((0, 0, 1), |it| (it.number, it.rank, it.members.len()));
                    self.work(Work::Compute { step, generation: part.0, rank: part.1, members: part.2 })
                }
                MemberAction::Reduce { generation, step, .. } => match &self.generation {
                    Some(known) if known.number == generation => {
                        let generation = known.clone();
                        self.work(Work::Reduce { step, generation })
                    }
                    _ => true,
                },
                MemberAction::Cancel => {
                    self.cancel();
                    true
                }
                MemberAction::SendFlag { flag, .. } => self.exchange_flags(flag),
                MemberAction::Apply { step, apply } => {
                    let (digest, applied) = oneshot::channel();
                    if !self.work(Work::Apply { step, apply, digest }) {
                        return false;
                    }
                    let every = Duration::from_millis(self.timing.probe_ms());
                    let show = |sign| {
                        self.driver.send(match sign {
                            SignOfLife::Answer(probe) => Event::ProbeAnswer(probe),
                            SignOfLife::Report => Event::Report(report_to_wire(&self.member.report())),
                        });
                    };
                    // The state machine must see nothing before this. Without an answer the engine has reported why.
                    if let Some(digest) = self.inbox.wait_for(applied, every, show).await {
                        actions.extend(self.member.step(MemberEvent::Applied { digest }, self.now_ms()));
                    }
                    true
                }
                MemberAction::Report(report) => {
                    self.driver.send(Event::Report(report_to_wire(&report)));
                    true
                }
                MemberAction::CatchUp { position, sources } => {
                    self.catch_up(position, &sources);
                    true
                }
                MemberAction::Left => false,
                MemberAction::Stalled { step } => {
                    tracing::warn!(run = %self.key.0, step, "no training step was finished for long");
                    true
                }
            };
            if !is_running {
                return false;
            }
        }
        true
    }

    /// Lets the engine exchange commit flags, once per step and generation: the connections lose nothing, so that repetitions are not
    /// needed.
    fn exchange_flags(&mut self, flag: Prepared) -> bool {
        let exchange = (flag.generation, flag.step);
        let Some(generation) = self.generation.as_ref().filter(|it| it.number == flag.generation) else { return true };
        if self.flagged.replace(exchange) == Some(exchange) {
            return true;
        }
        let cancel = Arc::clone(&generation.cancel);
        self.work(Work::Flags { step: flag.step, valid: flag.valid, cancel })
    }

    /// Fetches the state from other members, unless a transfer is in progress.
    fn catch_up(&self, position: Position, sources: &[MemberId]) {
        if self.is_transferring.swap(true, Ordering::AcqRel) {
            return;
        }
        let ordinals = sources.iter().filter_map(|id| self.addresses.get(id)).map(|it| it.ordinal).collect();
        let (shared, key, done) = (Arc::clone(&self.shared), self.key, self.caught_up.clone());
        let is_transferring = Arc::clone(&self.is_transferring);
        tokio::spawn(async move {
            match transfer::fetch(&shared, key, position, ordinals).await {
                // The member may have ended.
                Ok(checkpoint) => drop(done.send(checkpoint).await),
                Err(error) => {
                    tracing::warn!(run = %key.0, error = format!("{error:#}"), "failed to fetch a training state");
                }
            }
            is_transferring.store(false, Ordering::Release);
        });
    }
}
