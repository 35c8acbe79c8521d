//! The host of one group: it runs the membership service and talks to the processes.

use super::formation;
use super::state::{GroupState, MemberState};
use crate::runs;
use crate::shared::Shared;
use engram_client::group::{notice_to_wire, report_from_wire};
use engram_collective::group::{
    MemberId, Notice, PauseReason, Position, Record, Report, Service, ServiceAction, ServiceEvent,
};
use engram_identity::SharedCertificate;
use engram_memory::{Command, PartitionId, RunId};
use engram_proto::v1::{self, Problem, group_request::Request as Received, group_response::Response as Sent};
use std::collections::{BTreeMap, VecDeque};
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};
use tonic::Status;

/// Interval between attempts to write the record, a fraction of a failover: a partition does not announce that it takes writes again.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Time without a process after which the record of a group is removed: any restart of its processes takes less.
const FORGET_AFTER: Duration = Duration::from_secs(600);
/// The same for a group whose members have all left.
const FORGET_LEFT_AFTER: Duration = Duration::from_secs(5);
/// Limit of the check whether a process still listens.
const CHECK_DEADLINE: Duration = Duration::from_millis(100);

/// Where a process receives its messages.
pub(super) type Responses = mpsc::Sender<Result<v1::GroupResponse, Status>>;

/// What a host receives.
pub(super) enum HostEvent {
    /// A process opened a stream, which has a number of its own.
    Joined {
        stream: u64,
        join: v1::JoinGroup,
        responses: Responses,
    },
    Received {
        member: MemberId,
        request: v1::GroupRequest,
    },
    Closed {
        member: MemberId,
        stream: u64,
    },
    /// Nothing listens at the address of a process: it is dead.
    Refused(MemberId),
    Status(oneshot::Sender<v1::GroupStatus>),
}

struct Process {
    stream: u64,
    responses: Responses,
    /// The newest status; `None` before the first.
    report: Option<Report>,
}

/// A hosted group. Its fields are one record, the processes that it names, and the times since which it waits: each event changes some of
/// all three, therefore more than a dozen.
pub(super) struct Host {
    shared: Arc<Shared>,
    run: RunId,
    partition: PartitionId,
    state: GroupState,
    version: u64,
    term: u64,
    /// `None` until the processes of the record have connected, or those of the first generation have the same state.
    service: Option<Service>,
    processes: BTreeMap<MemberId, Process>,
    addresses: BTreeMap<MemberId, v1::GroupMember>,
    events: mpsc::Sender<HostEvent>,
    started: Instant,
    joined: Instant,
    /// Since when no member of the record is connected.
    lost: Option<Instant>,
    idle: Option<Instant>,
    pause: Option<PauseReason>,
    /// By which the processes recognize each other, in a cluster with TLS. Only this process and they have it.
    certificate: Option<SharedCertificate>,
}

/// Another host has the group, or this worker is not the primary.
struct Deposed;

impl Host {
    /// Takes a group over: the record of an earlier host is rejected from now on.
    pub(super) async fn load(
        shared: &Arc<Shared>,
        run: RunId,
        settings: GroupState,
        events: mpsc::Sender<HostEvent>,
    ) -> Result<Self, Problem> {
        let partition = runs::partition(shared, run);
        let (state, version) = GroupState::load(shared, partition, run).await?.unwrap_or((settings, 0));
        if !state.store_state(shared, (partition, run), version).await? {
            return Err(Problem::of(v1::ProblemKind::Unavailable, "another worker has taken the group over"));
        }
        let version = version + 1;
        let addresses = state.members.iter().map(|member| {
            let MemberState { id, reduce_address, state_address } = member.clone();
            (MemberId(id), v1::GroupMember { id, ordinal: 0, reduce_address, state_address })
        });
        let certificate = shared.setup.keys.as_ref().map(|_| SharedCertificate::create()).transpose();
        let failed =
            |error| Problem::of(v1::ProblemKind::Unavailable, format!("failed to create a certificate: {error}"));
        let certificate = certificate.map_err(failed)?;
        tracing::info!(group = state.name, generation = state.generation, term = version, "hosting a group");
        let now = Instant::now();
        Ok(Self {
            shared: Arc::clone(shared),
            run,
            partition,
            addresses: addresses.collect(),
            state,
            version,
            term: version,
            service: None,
            processes: BTreeMap::new(),
            events,
            started: now,
            joined: now,
            lost: None,
            idle: None,
            pause: None,
            certificate,
        })
    }

    /// Hosts the group until it is forgotten, or another worker has it.
    pub(super) async fn run(mut self, mut events: mpsc::Receiver<HostEvent>) {
        let mut tick = tokio::time::interval(Duration::from_millis(self.state.timing().probe_ms()));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut stopping = self.shared.lifecycle.stopping();
        loop {
            // Events first: a process that was heard is not silent.
            let result = tokio::select! {
                biased;
                () = stopped(&mut stopping) => break,
                event = events.recv() => match event {
                    Some(event) => self.event(event).await,
                    None => break,
                },
                _ = tick.tick() => self.host_tick().await,
            };
            match result {
                Ok(true) => {}
                Ok(false) => {
                    events.close();
                    let command = Command::RunRemove { run: self.run };
                    if let Err(problem) = runs::record::write(&self.shared, self.partition, command).await {
                        tracing::warn!(
                            group = self.state.name,
                            problem = problem.message,
                            "failed to remove the record of a group"
                        );
                    }
                    break;
                }
                Err(Deposed) => {
                    tracing::info!(group = self.state.name, "another worker hosts the group");
                    break;
                }
            }
        }
    }

    fn elapsed_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    fn send(&self, to: MemberId, response: Sent) {
        if let Some(process) = self.processes.get(&to) {
            // One that does not read gets the next message instead.
            let _ = process.responses.try_send(Ok(v1::GroupResponse { response: Some(response) }));
        }
    }

    fn notify(&self, to: MemberId, term: u64, notice: Notice) {
        let address = |member| self.addresses.get(&member).cloned().unwrap_or_default();
        self.send(to, Sent::Notice(notice_to_wire(term, notice, &address)));
    }

    async fn event(&mut self, event: HostEvent) -> Result<bool, Deposed> {
        match event {
            HostEvent::Joined { stream, join, responses } => self.join(stream, join, responses).await?,
            HostEvent::Received { member, request } => match request.request {
                Some(Received::Report(report)) => self.member_report(report_from_wire(member, &report)).await?,
                Some(Received::ProbeAnswer(_)) => self.service(ServiceEvent::ProbeAnswered(member)).await?,
                Some(Received::Join(_)) | None => {}
            },
            HostEvent::Closed { member, stream } => {
                if self.processes.get(&member).is_some_and(|process| process.stream == stream) {
                    self.processes.remove(&member);
                    self.check_process(member);
                }
            }
            HostEvent::Refused(member) => {
                if !self.processes.contains_key(&member) {
                    tracing::info!(group = self.state.name, member = member.0, "a process of a group is dead");
                    self.service(ServiceEvent::Died(member)).await?;
                }
            }
            HostEvent::Status(reply) => {
                // The caller may have gone.
                let _ = reply.send(self.group_status());
            }
        }
        Ok(true)
    }

    async fn join(&mut self, stream: u64, join: v1::JoinGroup, responses: Responses) -> Result<(), Deposed> {
        if let Err(problem) = self.state.check(&join) {
            // The caller may have gone.
            let _ = responses.try_send(Err(problem.into_status()));
            return Ok(());
        }
        let address = join.member.unwrap_or_default();
        let member = MemberId(address.id);
        self.addresses.insert(member, address);
        self.processes.insert(member, Process { stream, responses, report: None });
        self.joined = Instant::now();
        let certificate = self.certificate.as_ref().map(|it| v1::GroupCertificate {
            certificate: it.certificate().to_vec().into(),
            key: it.private_key().to_vec().into(),
        });
        let GroupState { detect_ms, min_members, .. } = self.state;
        let settings = v1::GroupJoined { detect_ms, min_members, certificate };
        self.send(member, Sent::Joined(settings));
        self.start_service().await
    }

    /// A stream ended: finds out whether its process did.
    fn check_process(&self, member: MemberId) {
        let Some(address) = self.addresses.get(&member).map(|it| it.reduce_address.clone()) else { return };
        let events = self.events.clone();
        tokio::spawn(async move {
            let connected = tokio::time::timeout(CHECK_DEADLINE, tokio::net::TcpStream::connect(address)).await;
            if matches!(connected, Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused) {
                // The host may have ended.
                let _ = events.send(HostEvent::Refused(member)).await;
            }
        });
    }

    async fn member_report(&mut self, report: Report) -> Result<(), Deposed> {
        let Some(process) = self.processes.get_mut(&report.member) else { return Ok(()) };
        process.report = Some(report);
        if report.leaving && self.is_dissolving() {
            return self.dissolve().await;
        }
        if self.service.is_none() {
            self.start_service().await?;
        }
        self.service(ServiceEvent::Report(report)).await
    }

    /// Whether every member of the record that lives wants to leave.
    fn is_dissolving(&self) -> bool {
        let is_leaving = |member: &MemberState| {
            let process = self.processes.get(&MemberId(member.id));
            process.is_none_or(|process| process.report.is_some_and(|report| report.leaving))
        };
        self.state.members.iter().all(is_leaving)
    }

    /// Releases the last members: no other member continues the training.
    async fn dissolve(&mut self) -> Result<(), Deposed> {
        let leaving: Vec<MemberId> = self
            .processes
            .iter()
            .filter(|(_, process)| process.report.is_some_and(|report| report.leaving))
            .map(|(member, _)| *member)
            .collect();
        if !self.state.members.is_empty() {
            self.state.members.clear();
            self.store_record().await?;
            self.service = None;
        }
        leaving.into_iter().for_each(|member| self.notify(member, self.term, Notice::Release));
        Ok(())
    }

    async fn host_tick(&mut self) -> Result<bool, Deposed> {
        if self.shared.engine.position(self.partition).is_none() {
            return Err(Deposed);
        }
        let timing = self.state.timing();
        let is_lost = !self.state.members.iter().any(|member| self.processes.contains_key(&MemberId(member.id)));
        let lost =
            if is_lost && !self.state.members.is_empty() { Some(self.lost.unwrap_or_else(Instant::now)) } else { None };
        self.lost = lost;
        if lost.is_some_and(|since| since.elapsed() > Duration::from_millis(timing.abort_ms()))
            && !self.processes.is_empty()
        {
            tracing::warn!(
                group = self.state.name,
                step = self.state.step,
                "no member has the state of the group; starting from the newest that a process offers"
            );
            self.state.members.clear();
            (self.service, self.lost) = (None, None);
            self.store_record().await?;
        }
        let idle = if self.processes.is_empty() { Some(self.idle.unwrap_or_else(Instant::now)) } else { None };
        self.idle = idle;
        let limit = if self.state.members.is_empty() { FORGET_LEFT_AFTER } else { FORGET_AFTER };
        if idle.is_some_and(|since| since.elapsed() > limit) {
            return Ok(false);
        }
        self.start_service().await?;
        self.service(ServiceEvent::Tick).await?;
        Ok(true)
    }

    /// Starts the membership service: from the record once its members have connected, or the time for it is over; otherwise once enough processes
    /// have the same state.
    async fn start_service(&mut self) -> Result<(), Deposed> {
        if self.service.is_some() || self.processes.is_empty() {
            return Ok(());
        }
        let timing = self.state.timing();
        let record = if self.state.members.is_empty() {
            let Some(position) = self.first_position() else { return Ok(()) };
            Record { generation: self.state.generation, members: Vec::new(), position }
        } else {
            let is_here = |member: &MemberState| self.processes.contains_key(&MemberId(member.id));
            let is_over = self.started.elapsed() > Duration::from_millis(timing.change_ms());
            if !is_over && !self.state.members.iter().all(is_here) {
                return Ok(());
            }
            self.state.group_record()
        };
        self.service = Some(Service::new(record, self.term, self.state.settings(), self.elapsed_ms()));
        let reports: Vec<Report> = self.processes.values().filter_map(|process| process.report).collect();
        for report in reports {
            self.service(ServiceEvent::Report(report)).await?;
        }
        Ok(())
    }

    /// Returns the position of the first generation; until then, lets processes with another state fetch it.
    fn first_position(&self) -> Option<Position> {
        let timing = self.state.timing();
        let settled = self.joined.elapsed();
        let positions: BTreeMap<MemberId, Position> = self
            .processes
            .iter()
            .filter_map(|(member, process)| Some((*member, process.report.filter(|report| !report.leaving)?.position)))
            .collect();
        let required = self.state.min_members as usize;
        if positions.len() < required.max(1) || settled < Duration::from_millis(timing.probe_ms()) {
            return None;
        }
        let base = formation::base(&positions)?;
        let sources: Vec<MemberId> =
            positions.iter().filter(|(_, it)| **it == base).map(|(member, _)| *member).collect();
        if sources.len() == positions.len()
            || (sources.len() >= required && settled > Duration::from_millis(timing.change_ms()))
        {
            return Some(base);
        }
        for member in positions.keys().filter(|member| !sources.contains(member)) {
            self.notify(*member, self.term, Notice::CatchUp { position: base, sources: sources.clone() });
        }
        None
    }

    /// Passes an event to the membership service and executes its actions.
    async fn service(&mut self, event: ServiceEvent) -> Result<(), Deposed> {
        let now_ms = self.elapsed_ms();
        let Some(service) = &mut self.service else { return Ok(()) };
        let mut actions = VecDeque::from(service.step(event, now_ms));
        while let Some(action) = actions.pop_front() {
            match action {
                ServiceAction::Send { to, term, notice } => self.notify(to, term, notice),
                ServiceAction::Probe(member) => self.send(member, Sent::Probe(v1::GroupProbe {})),
                ServiceAction::Record { record, .. } => {
                    self.keep_record(&record);
                    self.store_record().await?;
                    let (now_ms, generation) = (self.elapsed_ms(), record.generation);
                    if let Some(service) = &mut self.service {
                        actions.extend(service.step(ServiceEvent::Recorded { generation }, now_ms));
                    }
                }
                ServiceAction::Removed(member) => {
                    tracing::warn!(group = self.state.name, member = member.0, "removed a member of a group");
                }
                ServiceAction::Left(member) => {
                    tracing::info!(group = self.state.name, member = member.0, "a member leaves the group");
                }
                ServiceAction::Committed(_) => {}
                ServiceAction::Paused(reason) => {
                    tracing::warn!(group = self.state.name, reason = pause_text(reason), "group paused");
                    self.pause = Some(reason);
                }
                ServiceAction::Resumed { generation } => {
                    tracing::info!(group = self.state.name, generation, "group trains");
                    self.pause = None;
                }
            }
        }
        Ok(())
    }

    fn keep_record(&mut self, record: &Record) {
        let member = |id: &MemberId| {
            let v1::GroupMember { reduce_address, state_address, .. } =
                self.addresses.get(id).cloned().unwrap_or_default();
            MemberState { id: id.0, reduce_address, state_address }
        };
        let members = record.members.iter().map(member).collect();
        let Position { step, digest } = record.position;
        (self.state.generation, self.state.step, self.state.digest) = (record.generation, step, digest);
        self.state.members = members;
        let (processes, state) = (&self.processes, &self.state);
        let is_known = |id: &MemberId| processes.contains_key(id) || state.members.iter().any(|it| it.id == id.0);
        self.addresses.retain(|id, _| is_known(id));
    }

    /// Writes the record, with retries while this worker is the primary.
    async fn store_record(&mut self) -> Result<(), Deposed> {
        loop {
            match self.state.store_state(&self.shared, (self.partition, self.run), self.version).await {
                Ok(true) => {
                    self.version += 1;
                    return Ok(());
                }
                // A write whose result was lost ends here as well: the next host reads the record again.
                Ok(false) => return Err(Deposed),
                Err(problem) => {
                    tracing::warn!(
                        group = self.state.name,
                        problem = problem.message,
                        "failed to record a generation; retrying"
                    );
                    if self.shared.lifecycle.is_stopping() || self.shared.engine.position(self.partition).is_none() {
                        return Err(Deposed);
                    }
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
            }
        }
    }

    fn group_status(&self) -> v1::GroupStatus {
        let GroupState { generation, step, digest, detect_ms, min_members, .. } = self.state;
        let address = |member: &MemberState| self.addresses.get(&MemberId(member.id)).cloned().unwrap_or_default();
        let members = self.state.members.iter().map(address).collect();
        let position = Some(v1::GroupPosition { step, digest });
        let paused = match self.pause {
            Some(reason) => pause_text(reason),
            None if self.service.is_none() => "waiting for processes".to_owned(),
            None => String::new(),
        };
        v1::GroupStatus {
            record: Some(v1::GroupRecord { generation, members, position }),
            detect_ms,
            min_members,
            connected: self.processes.len() as u32,
            paused,
        }
    }
}

/// Completes when the worker stops.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // An error means that the worker was dropped.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

fn pause_text(reason: PauseReason) -> String {
    match reason {
        PauseReason::Members { present, required } => format!("{present} members, min_members is {required}"),
        PauseReason::Quorum { present, .. } => format!("waiting for members of the last generation; {present} answer"),
        PauseReason::StateLost { step } => format!("no member has the state of step {step}"),
    }
}
