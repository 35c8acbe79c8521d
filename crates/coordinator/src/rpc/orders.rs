//! Proposals of workers, orders of administrators, and the status that they see.

use super::malformed;
use crate::state::Proposal;
use crate::{Shared, wire};
use engram_cluster::ExpectedEntry;
use engram_mapstore::{Goal, Scale};
use engram_memory::{Ordinal, PartitionId, Term};
use engram_proto::{protocol, v1};
use std::sync::Arc;
use tonic::Status;

impl Shared {
    /// Queues the proposals of a worker; returns the version of the current map.
    pub(super) fn propose_map_changes(&self, request: &v1::ProposeMapChangesRequest) -> Result<u64, Status> {
        let proposer =
            request.member.as_ref().ok_or_else(|| Status::invalid_argument("the request names no member"))?;
        let proposer = engram_wire::member_id_from_proto(proposer).map_err(|error| malformed(&error))?;
        let proposals = request.proposals.iter().map(|proposal| self.proposal(proposal)).collect::<Result<_, _>>()?;
        let mut state = self.state();
        if state.is_closing() {
            return Err(Status::unavailable("this coordinator is shutting down: retry with its successor"));
        }
        state.propose(proposer.ordinal, proposals);
        let map_version = state.map().map_or(0, |map| map.version);
        drop(state);
        self.reconsider.notify_one();
        Ok(map_version)
    }

    fn proposal(&self, message: &v1::MapChange) -> Result<Proposal, Status> {
        let partition = PartitionId(message.partition);
        let partitions = self.options.partitions;
        if partition.0 >= partitions {
            return Err(Status::invalid_argument(format!(
                "partition {partition} does not exist: there are {partitions}, numbered from 0"
            )));
        }
        let change = engram_wire::change_from_proto(message.change.as_ref()).map_err(|error| malformed(&error))?;
        let (activated, solo_safe) = (message.activated, message.solo_safe);
        Ok(Proposal { partition, expected: ExpectedEntry { term: Term(message.term), activated, solo_safe }, change })
    }

    /// Stores a new goal, which survives the coordinator, and takes effect.
    pub(super) async fn order_goal(&self, request: &v1::SetGoalRequest) -> Result<v1::SetGoalResponse, Status> {
        let _exclusive = self.ordering.lock().await;
        let goal = self.updated_goal(request)?;
        let store = Arc::clone(&self.store);
        let stored = goal.clone();
        let written = tokio::task::spawn_blocking(move || store.set_goal(&stored)).await;
        match written {
            Ok(Ok(())) => {}
            Ok(Err(error @ engram_mapstore::Error::NotSupported { .. })) => {
                return Err(Status::failed_precondition(error.to_string()));
            }
            Ok(Err(error)) => return Err(Status::unavailable(format!("failed to store the order: {error}"))),
            Err(_) => return Err(Status::internal("the map store panicked")),
        }
        let mut state = self.state();
        state.set_goal(goal);
        let reply = v1::SetGoalResponse {
            workers: state.goal().workers(self.options.workers),
            draining: state.draining(&self.options).iter().map(|ordinal| ordinal.0).collect(),
        };
        drop(state);
        tracing::info!(workers = reply.workers, draining = ?reply.draining, "cluster goal changed");
        self.reconsider.notify_one();
        Ok(reply)
    }

    /// Returns the goal after an order, if it is valid.
    fn updated_goal(&self, request: &v1::SetGoalRequest) -> Result<Goal, Status> {
        let options = &self.options;
        let state = self.state();
        let mut goal = state.goal().clone();
        let max_workers = state.max_workers(options).max(request.workers);
        drop(state);
        if request.workers > 0 {
            if request.workers < options.replication_factor {
                return Err(Status::invalid_argument(format!(
                    "workers: {} cannot hold {} replicas of each partition; allowed: at least {}",
                    request.workers, options.replication_factor, options.replication_factor
                )));
            }
            goal.workers = Some(Scale { to: request.workers, from: options.workers });
        }
        let unknown = request.drain.iter().chain(&request.undrain).find(|ordinal| **ordinal >= max_workers);
        if let Some(ordinal) = unknown {
            return Err(Status::invalid_argument(format!(
                "worker {ordinal} does not exist: there are {max_workers}, numbered from 0"
            )));
        }
        if let Some(both) = request.drain.iter().find(|ordinal| request.undrain.contains(ordinal)) {
            return Err(Status::invalid_argument(format!("worker {both} cannot be drained and undrained at once")));
        }
        goal.draining.extend(request.drain.iter().map(|&ordinal| Ordinal(ordinal)));
        goal.draining.retain(|ordinal| !request.undrain.contains(&ordinal.0));
        Ok(goal)
    }

    /// Returns the status of the cluster.
    pub(super) fn status(&self) -> v1::ClusterStatus {
        let options = &self.options;
        let state = self.state();
        let silent = state.members().filter(|worker| !worker.alive);
        let silent = silent.map(|worker| format!("worker {} sends no heartbeats", worker.member.ordinal));
        let starting = state.members().filter(|worker| worker.alive && !worker.report.ready);
        let starting = starting.map(|worker| format!("worker {} is starting", worker.member.ordinal));
        let leaderless = state
            .members()
            .flat_map(|worker| worker.report.leaderless.iter().map(move |partition| (partition, worker)));
        let leaderless = leaderless.map(|(partition, worker)| {
            let ordinal = worker.member.ordinal;
            format!(
                "partition {partition} is leaderless: the replica of worker {ordinal} is damaged or incomplete, and no other in-sync replica \
                 took over; `engram partition force-promote {partition}` shows what a forced promotion would lose"
            )
        });
        v1::ClusterStatus {
            cluster: options.cluster.0.to_be_bytes().to_vec().into(),
            cluster_name: options.cluster_name.clone(),
            map: state.map().map(engram_wire::map_to_proto),
            members: state.members().map(wire::member_to_proto).collect(),
            expected_workers: state.goal().workers(options.workers),
            conditions: state.conditions().iter().cloned().chain(leaderless).chain(silent).chain(starting).collect(),
            draining: state.draining(options).iter().map(|ordinal| ordinal.0).collect(),
            replication_factor: options.replication_factor,
            map_lost: state.lost().unwrap_or_default().to_owned(),
            overrides: state.orders().iter().map(wire::order_to_proto).collect(),
            version: env!("CARGO_PKG_VERSION").into(),
            protocol_min: protocol::OLDEST,
            protocol_max: protocol::NEWEST,
        }
    }
}
