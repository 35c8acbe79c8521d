//! The group of a Replay run as its driver sees it: connections to the members, and the service that decides about the membership.

use crate::runs::replay::figures::Figures;
use crate::training::{LinkEvent, Links};
use engram_api::ReplayRun;
use engram_client::group::position_from_wire;
use engram_collective::group::{
    MemberId, Position, Quorum, Record, Service, ServiceAction, ServiceEvent, Settings, Timing,
};
use engram_learn::run::{GroupMemberState, TrainingState};
use engram_memory::Ordinal;
use engram_proto::v1::{self, training_order};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Time to wait for members to end.
const END_DEADLINE: Duration = Duration::from_secs(5);

/// The group while it trains: members of one state machine, which each event of a link or of the clock may change, therefore more than a dozen
/// fields.
pub(in crate::runs) struct Group {
    pub(in crate::runs) links: Links,
    pub(in crate::runs) term: u64,
    pub(in crate::runs) timing: Timing,
    pub(in crate::runs) started: Instant,
    /// `None` until enough workers have joined to choose the position from which the training starts.
    pub(in crate::runs) service: Option<Service>,
    /// Addresses of all members that were ever seen.
    pub(in crate::runs) members: BTreeMap<MemberId, v1::GroupMember>,
    /// The member on each worker with an open connection, and the position at which it joined.
    pub(in crate::runs) joined: BTreeMap<Ordinal, (MemberId, Position)>,
    pub(in crate::runs) first_joined: Option<Instant>,
    /// Since when no member that has the state answers.
    pub(in crate::runs) lost_since: Option<Instant>,
    pub(in crate::runs) figures: Figures,
    /// Whether the status says why a member waits for data.
    pub(in crate::runs) is_waiting: bool,
    /// Whether the status says that predictions have collapsed.
    pub(in crate::runs) is_collapsed: bool,
    pub(in crate::runs) results: BTreeMap<Ordinal, v1::TrainingResult>,
    /// Workers whose member was asked for its result before it had the state of the last step.
    pub(in crate::runs) behind: BTreeSet<Ordinal>,
    /// Since when all steps are committed.
    pub(in crate::runs) completed: Option<Instant>,
    pub(in crate::runs) recorded: Instant,
    /// When a row was last added to the history.
    pub(in crate::runs) noted: Instant,
}

impl Group {
    pub(in crate::runs) fn new(links: Links, term: u64, replay: &ReplayRun) -> Self {
        let now = Instant::now();
        Self {
            links,
            term,
            timing: Timing::new(replay.detect_after.as_millis()),
            started: now,
            service: None,
            members: BTreeMap::new(),
            joined: BTreeMap::new(),
            first_joined: None,
            lost_since: None,
            figures: Figures::new(replay),
            is_waiting: false,
            is_collapsed: false,
            results: BTreeMap::new(),
            behind: BTreeSet::new(),
            completed: None,
            recorded: now,
            noted: now,
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Continues with a recorded membership.
    pub(in crate::runs) fn resume(&mut self, training: &TrainingState, min_workers: u64) {
        for member in &training.members {
            let GroupMemberState { id, ordinal, address } = member.clone();
            let member = v1::GroupMember { id, ordinal, reduce_address: address, state_address: String::new() };
            self.members.insert(MemberId(id), member);
        }
        let position = Position { step: training.step, digest: training.digest };
        let members = training.members.iter().map(|member| MemberId(member.id)).collect();
        self.start(Record { generation: training.generation, members, position }, min_workers);
    }

    pub(in crate::runs) fn start(&mut self, record: Record, min_workers: u64) {
        let min_members = usize::try_from(min_workers).unwrap_or(usize::MAX);
        let settings = Settings { timing: self.timing, min_members, quorum: Quorum::StoreTerm };
        // Those of the driver before this one, until the group changes.
        self.figures.restart(record.members.len());
        self.service = Some(Service::new(record, self.term, settings, self.now_ms()));
    }

    pub(in crate::runs) fn service_event(&mut self, event: ServiceEvent) -> Vec<ServiceAction> {
        let now_ms = self.now_ms();
        self.service.as_mut().map_or_else(Vec::new, |service| service.step(event, now_ms))
    }

    /// A worker has a member; of an earlier process of the worker it is proof that it is dead.
    pub(in crate::runs) fn join(&mut self, worker: Ordinal, joined: v1::TrainingMember) -> Vec<ServiceAction> {
        let position = position_from_wire(joined.position);
        let Some(address) = joined.member else { return Vec::new() };
        let member = MemberId(address.id);
        self.first_joined.get_or_insert_with(Instant::now);
        self.members.insert(member, address);
        self.joined.insert(worker, (member, position));
        let others = self.members.iter().filter(|(id, it)| it.ordinal == worker.0 && **id != member);
        let dead: Vec<MemberId> = others.map(|(id, _)| *id).collect();
        if self.completed.is_some() {
            let stop = training_order::Order::Stop(v1::StopTraining { complete: true });
            self.links.send(worker, stop);
        }
        dead.into_iter().flat_map(|dead| self.service_event(ServiceEvent::Died(dead))).collect()
    }

    /// Returns the rank of the member on a worker.
    pub(in crate::runs) fn rank_of(&self, worker: Ordinal) -> Option<usize> {
        let (member, _) = self.joined.get(&worker)?;
        self.service.as_ref()?.record().members.iter().position(|it| it == member)
    }
}

/// Ends the members, and waits a moment until they have.
pub(in crate::runs) async fn end_group(group: &Group, events: &mut mpsc::Receiver<(Ordinal, LinkEvent)>) {
    group.links.end_members();
    let mut open = group.joined.len();
    let closed = async {
        while open > 0 {
            match events.recv().await {
                Some((_, LinkEvent::Closed)) => open -= 1,
                Some(_) => {}
                None => return,
            }
        }
    };
    // Members without a driver end by themselves.
    let _ = tokio::time::timeout(END_DEADLINE, closed).await;
}
