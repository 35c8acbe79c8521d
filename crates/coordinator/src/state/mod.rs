//! State of a coordinator as plain values. Time comes in as milliseconds of the detector's clock.
//!
//! Each part decides one thing: [`KnownMap`] which map is in force, [`Workers`] which processes are alive, [`Decisions`] what is to be
//! written next. [`State`] is where an event concerns more than one of them.

mod bootstrap;
mod known_map;
mod planning;
mod workers;

pub use bootstrap::BootstrapProgress;
pub(crate) use planning::{MapUpdate, Proposal};
pub(crate) use workers::{Addresses, HeartbeatInfo, HelloOutcome, Introduction, WorkerReport, WorkerState};
pub use workers::{GpuFault, WorkerCertificate};

use crate::environment::Environment;
use crate::manual_recovery::MapStateReports;
use crate::{Options, wire};
use engram_cluster::{LeadershipTransfer, PartitionMap};
use engram_mapstore::{Goal, MapOverride};
use engram_memory::{Member, Ordinal, StoreId};
use engram_proto::v1;
use known_map::KnownMap;
use planning::Decisions;
use std::collections::BTreeSet;
use workers::Workers;

/// State of a coordinator.
#[derive(Debug)]
pub(crate) struct State {
    known: KnownMap,
    workers: Workers,
    decisions: Decisions,
    goal: Goal,
    environment: Environment,
    map_state_reports: MapStateReports,
}

impl State {
    pub(crate) fn new(map: Option<PartitionMap>, goal: Goal, now_ms: u64) -> Self {
        Self {
            known: KnownMap::new(map),
            workers: Workers::new(now_ms),
            decisions: Decisions::default(),
            goal,
            environment: Environment::default(),
            map_state_reports: MapStateReports::default(),
        }
    }

    pub(crate) const fn map(&self) -> Option<&PartitionMap> {
        self.known.map()
    }

    pub(crate) const fn goal(&self) -> &Goal {
        &self.goal
    }

    pub(crate) fn set_goal(&mut self, goal: Goal) {
        self.goal = goal;
    }

    /// Sets the environment; returns whether it changed.
    pub(crate) fn set_environment(&mut self, surroundings: Environment) -> bool {
        let changed = self.environment != surroundings;
        self.environment = surroundings;
        changed
    }

    pub(crate) const fn map_state_reports(&self) -> &MapStateReports {
        &self.map_state_reports
    }

    pub(crate) const fn map_state_reports_mut(&mut self) -> &mut MapStateReports {
        &mut self.map_state_reports
    }

    /// Returns why the map is lost, if it is.
    pub(crate) fn lost(&self) -> Option<&str> {
        self.known.lost()
    }

    /// Returns the orders that overrode the map.
    pub(crate) fn orders(&self) -> &[MapOverride] {
        self.known.orders()
    }

    pub(crate) fn set_orders(&mut self, orders: Vec<MapOverride>) {
        self.known.set_orders(orders);
    }

    /// Whether an order may have been written since the orders were read.
    pub(crate) const fn reads_orders(&self) -> bool {
        self.known.reads_orders()
    }

    /// Marks the map as lost: nothing is written until it is found again or rebuilt.
    pub(crate) fn lose(&mut self, why: String) {
        self.known.lose(why);
    }

    /// Whether a worker has seen a newer map than this coordinator.
    pub(crate) fn is_behind(&self) -> bool {
        self.known.is_behind()
    }

    /// Applies a map written by an order.
    pub(crate) fn map_overridden(&mut self, map: PartitionMap, orders: Vec<MapOverride>, now_ms: u64) {
        let failed = self.known.override_with(map, orders, now_ms);
        self.workers.failed_over(failed, now_ms);
    }

    /// Handles a read of the map. A missing map never counts as one not yet written, nor an older one as the newest.
    pub(crate) fn map_read(&mut self, map: Option<PartitionMap>, now_ms: u64) {
        let failed = self.known.read(map, now_ms);
        self.workers.failed_over(failed, now_ms);
    }

    /// Applies the current map of the store.
    pub(crate) fn set_map(&mut self, map: Option<PartitionMap>, now_ms: u64) {
        let failed = self.known.replace(map, now_ms);
        self.workers.failed_over(failed, now_ms);
    }

    pub(crate) fn members(&self) -> impl Iterator<Item = &WorkerState> {
        self.workers.iter()
    }

    /// Returns the workers that are alive.
    pub(crate) fn living(&self) -> impl Iterator<Item = &WorkerState> {
        self.members().filter(|worker| worker.alive)
    }

    /// Handles a hello.
    pub(crate) fn accept_hello(&mut self, hello: Introduction, now_ms: u64) -> HelloOutcome {
        self.known.note_seen(hello.seen_version);
        let domain = self.environment.domain(hello.member.ordinal);
        self.workers.accept_hello(hello, domain, now_ms)
    }

    /// Handles a heartbeat; returns whether anything visible to others changed.
    pub(crate) fn heartbeat(&mut self, member: &Member, info: HeartbeatInfo, now_ms: u64) -> bool {
        if !self.workers.knows(member) {
            return false;
        }
        let overtakes = self.known.note_reported(info.map_version);
        self.workers.heartbeat(member, info, now_ms) || overtakes
    }

    /// Handles the end of this exact process's stream; returns whether anything changed.
    pub(crate) fn closed(&mut self, member: &Member, now_ms: u64) -> bool {
        self.workers.closed(member, now_ms)
    }

    /// Handles a supervisor's report that a process of `ordinal` is dead: the one with that incarnation, disk and
    /// process id, as far as given. Returns whether anything changed.
    pub(crate) fn died(
        &mut self,
        ordinal: Ordinal,
        store: Option<StoreId>,
        incarnation: u64,
        process_id: u32,
        now_ms: u64,
    ) -> bool {
        self.workers.died(ordinal, store, incarnation, process_id, now_ms)
    }

    /// Handles a report that this exact process has exited. For a process that never connected it has no effect: it may
    /// have exited long ago. Returns whether anything changed.
    pub(crate) fn ended(&mut self, member: &Member, now_ms: u64) -> bool {
        self.workers.ended(member, now_ms)
    }

    /// Handles a timer tick; returns whether anything changed.
    pub(crate) fn tick(&mut self, options: &Options, now_ms: u64) -> bool {
        let changed = self.workers.tick(now_ms);
        self.forget_drained(options) || changed
    }

    /// Removes drained workers that have stopped and hold nothing; returns whether there were any.
    fn forget_drained(&mut self, options: &Options) -> bool {
        if !self.workers.any_silent() {
            return false;
        }
        let candidates = self.known.entries().iter().flat_map(|entry| entry.candidates());
        let holders: BTreeSet<Ordinal> = candidates.map(|member| member.ordinal).collect();
        let draining = self.draining(options);
        self.workers.forget_drained(|ordinal| holders.contains(&ordinal) || !draining.contains(&ordinal))
    }

    /// Returns the view for workers.
    pub(crate) fn view(&self) -> v1::HeartbeatResponse {
        let order =
            |order: &LeadershipTransfer| v1::LeadershipTransfer { partition: order.partition.0, to: order.to.0 };
        v1::HeartbeatResponse {
            map: self.map().map(engram_wire::map_to_proto),
            members: self.members().map(wire::member_to_proto).collect(),
            leadership_transfers: self.decisions.transfers().iter().map(order).collect(),
            map_state_request: self.map_state_reports.request_number(),
        }
    }
}

#[cfg(test)]
mod tests;
