//! Manual recovery when nothing automatic is safe: rebuilding a lost map, and promoting a replica that is not in sync.
//!
//! Both begin with map state reports of the workers that respond. Both override the rules of the map once, with a
//! permanent record; after that the rules hold again.

use crate::Shared;
use crate::wire;
use engram_cluster::rebuild::{self, MapStateReport, PromotionCandidate};
use engram_cluster::{Entry, PartitionMap, check_force_promotable};
use engram_mapstore::{EntryOverride, Error, MapOverride, MapStore, OverrideKind, unless_superseded};
use engram_memory::{Lsn, Member, Ordinal, PartitionId};
use engram_proto::v1::{self, OverrideRefusal};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};
use tokio::time::{Instant, timeout_at};
use tonic::Status;

/// How long workers may take to report their map state: it needs no disk reads, but they may be busy.
const REPORT_TIMEOUT: Duration = Duration::from_secs(3);

/// Map state reports by worker: the number of the request, and the report.
#[derive(Debug, Default)]
pub(crate) struct MapStateReports {
    last_request: u64,
    reports: BTreeMap<Ordinal, (u64, MapStateReport)>,
}

impl MapStateReports {
    /// Returns the number of the newest request; 0 = none.
    pub(crate) const fn request_number(&self) -> u64 {
        self.last_request
    }

    /// Starts a new request. Numbers continue over a restart, as far as the clock does: a worker answers each of them
    /// once.
    fn next_request(&mut self) -> u64 {
        self.last_request = (self.last_request + 1).max(now_ms());
        self.last_request
    }

    fn insert(&mut self, number: u64, report: MapStateReport) {
        self.reports.insert(report.member.ordinal, (number, report));
    }

    /// Returns the report of this exact process for the request, or a later one.
    fn report_of(&self, number: u64, member: &Member) -> Option<&MapStateReport> {
        let (answered, report) = self.reports.get(&member.ordinal)?;
        (*answered >= number && report.member == *member).then_some(report)
    }
}

/// Reports of the workers.
struct MapStates {
    reports: Vec<MapStateReport>,
    /// Expected workers that did not report in time.
    silent: BTreeSet<Ordinal>,
}

impl Shared {
    /// Receives the report of a worker.
    pub(crate) fn receive_map_state(&self, report: &v1::ReportMapStateRequest) -> Result<(), Status> {
        let malformed = |error: engram_wire::Malformed| Status::invalid_argument(error.to_string());
        let number = report.request_number;
        let report = engram_wire::map_state_from_proto(report).map_err(malformed)?;
        self.state().map_state_reports_mut().insert(number, report);
        self.map_state_received.notify_one();
        Ok(())
    }

    /// Requests the map state of all workers, and waits for their reports, also of workers that connect meanwhile.
    async fn request_map_states(&self) -> MapStates {
        let deadline = Instant::now() + REPORT_TIMEOUT;
        let number = self.state().map_state_reports_mut().next_request();
        self.publish();
        loop {
            let states = {
                let state = self.state();
                let reports: Vec<MapStateReport> = state
                    .living()
                    .filter_map(|worker| state.map_state_reports().report_of(number, &worker.member).cloned())
                    .collect();
                let expected = (0..state.goal().workers(self.options.workers)).map(Ordinal);
                let expected: BTreeSet<Ordinal> =
                    expected.chain(state.living().map(|worker| worker.member.ordinal)).collect();
                let answered = reports.iter().map(|report| report.member.ordinal).collect();
                MapStates { silent: &expected - &answered, reports }
            };
            if states.silent.is_empty() || timeout_at(deadline, self.map_state_received.notified()).await.is_err() {
                return states;
            }
        }
    }

    /// Executes, or previews, the rebuild of a lost map.
    pub(crate) async fn rebuild_map(&self, request: &v1::RebuildMapRequest) -> Result<v1::RebuildMapResponse, Status> {
        let _exclusive = self.ordering.lock().await;
        check_text_lengths(&request.requested_by, &request.accept_data_loss)?;
        let refusal_reply = |refusal: OverrideRefusal, text: String| v1::RebuildMapResponse {
            refusal: refusal.into(),
            message: text,
            ..Default::default()
        };
        let (lost, current, expected) = {
            let state = self.state();
            let expected: BTreeSet<Ordinal> = (0..state.goal().workers(self.options.workers)).map(Ordinal).collect();
            (state.lost().map(str::to_owned), state.map().cloned(), expected)
        };
        if lost.is_none() {
            let text = match current {
                Some(map) => {
                    format!("the partition map is intact, version {}: nothing to rebuild", map.version)
                }
                None => "no reporting worker has ever seen a partition map: nothing to rebuild".to_owned(),
            };
            return Ok(refusal_reply(OverrideRefusal::NotNeeded, text));
        }
        let MapStates { mut reports, .. } = self.request_map_states().await;
        // The map in this coordinator's memory was in force as well.
        if let (Some(map), Some(first)) = (current, reports.first_mut())
            && first.last_map.as_ref().is_none_or(|seen| seen.version < map.version)
        {
            first.last_map = Some(map);
        }
        let rebuilt = rebuild::rebuild(self.options.cluster, self.options.partitions, &expected, &reports)
            .ok_or_else(|| Status::unavailable("no worker reported its map state"))?;
        let unproven = |(partition, why): (&PartitionId, &String)| v1::UnprovenPartition {
            partition: partition.0,
            reason: why.clone(),
            last_observed: rebuilt.last_entries[partition.0 as usize].as_ref().map(engram_wire::entry_to_proto),
        };
        let mut reply = v1::RebuildMapResponse {
            map: Some(engram_wire::map_to_proto(&rebuilt.map)),
            unproven: rebuilt.unproven.iter().map(unproven).collect(),
            ..Default::default()
        };
        if !rebuilt.unproven.is_empty() && request.accept_data_loss.trim().is_empty() {
            let reasons: BTreeSet<&str> = rebuilt.unproven.values().map(String::as_str).collect();
            let reasons: Vec<&str> = reasons.into_iter().collect();
            reply.refusal = OverrideRefusal::DataLossNotAccepted.into();
            reply.message = format!(
                "{} of {} partitions are not proven and may lose acknowledged writes: {}",
                rebuilt.unproven.len(),
                rebuilt.map.partitions.len(),
                reasons.join("; ")
            );
            return Ok(reply);
        }
        if request.write {
            let step = |(partition, why): (&PartitionId, &String)| EntryOverride {
                partition: *partition,
                before: rebuilt.last_entries[partition.0 as usize].clone(),
                after: rebuilt.map.partitions[partition.0 as usize].clone(),
                lost: why.clone(),
            };
            let steps = rebuilt.unproven.iter().map(step).collect();
            let order =
                MapOverride::now(OverrideKind::RebuildMap, &request.requested_by, &request.accept_data_loss, steps);
            let rebuilt = rebuilt.map;
            let written = self.override_map(order, move |current| unless_superseded(&rebuilt, current)).await?;
            reply.map = Some(engram_wire::map_to_proto(&written));
            reply.written = true;
        }
        Ok(reply)
    }

    /// Executes a forced promotion of a replica that is not in sync.
    pub(crate) async fn force_promote(
        &self,
        request: &v1::ForcePromoteRequest,
    ) -> Result<v1::ForcePromoteResponse, Status> {
        let _exclusive = self.ordering.lock().await;
        check_text_lengths(&request.requested_by, &request.accept_data_loss)?;
        let partition = PartitionId(request.partition);
        let partitions = self.options.partitions;
        if partition.0 >= partitions {
            return Err(Status::invalid_argument(format!(
                "partition {partition} does not exist: there are {partitions}, numbered from 0"
            )));
        }
        let MapStates { reports, silent } = self.request_map_states().await;
        let damaged =
            reports.iter().filter(|it| rebuild::replica_state(it, partition).damaged).map(|it| it.member.ordinal);
        let damaged: BTreeSet<Ordinal> = damaged.collect();
        let (map, observed) = {
            let state = self.state();
            if let Some(lost) = state.lost() {
                return Err(Status::failed_precondition(format!("{lost}; run `engram partition rebuild-map` first")));
            }
            let map = state.map().cloned();
            let map = map.ok_or_else(|| Status::failed_precondition("the cluster has no partition map yet"))?;
            (map, state.observed(&self.options, self.now_ms()))
        };
        let refusal_reply = |refusal: OverrideRefusal, text: String, step| v1::ForcePromoteResponse {
            refusal: refusal.into(),
            message: text,
            step,
        };
        if let Err(why) = check_force_promotable(&map, partition, &observed, &damaged) {
            let text = format!("partition {partition} needs no forced promotion: {why}");
            return Ok(refusal_reply(OverrideRefusal::NotNeeded, text, None));
        }
        let requested = |it: &&MapStateReport| request.worker.is_none_or(|worker| it.member.ordinal.0 == worker);
        let chosen = rebuild::find_most_advanced(partition, reports.iter().filter(requested)).ok_or_else(|| {
            Status::not_found(match request.worker {
                Some(worker) => {
                    format!("worker {worker} did not report, or its replica of partition {partition} is damaged")
                }
                None => format!("no reporting worker has an intact replica of partition {partition}"),
            })
        })?;
        let before = map.partitions[partition.0 as usize].clone();
        let promised = rebuild::highest_promise(partition, &reports);
        let after = rebuild::force_entry(Some(&before), &chosen.member, promised);
        let lost = describe_loss(&before, partition, &chosen, &reports, &silent);
        let step = EntryOverride { partition, before: Some(before), after, lost };
        let step_message = wire::step_to_proto(&step);
        if request.accept_data_loss.trim().is_empty() {
            return Ok(refusal_reply(OverrideRefusal::DataLossNotAccepted, step.lost, Some(step_message)));
        }
        let order = MapOverride::now(
            OverrideKind::ForcePromote,
            &request.requested_by,
            &request.accept_data_loss,
            vec![step.clone()],
        );
        // Other partitions may have changed meanwhile; this one must be unchanged.
        self.override_map(order, move |current| step.apply_to(current)).await?;
        Ok(v1::ForcePromoteResponse { step: Some(step_message), ..Default::default() })
    }

    /// Writes a map against the rules: the result of `ordered` for the current one (`None`: it is lost), if there is
    /// one.
    async fn override_map(
        &self,
        order: MapOverride,
        ordered: impl Fn(Option<&PartitionMap>) -> Option<PartitionMap> + Send + 'static,
    ) -> Result<PartitionMap, Status> {
        if !self.options.executes_orders {
            return Err(Status::permission_denied(
                "the coordinator of this cluster only previews orders: write the map with your own permissions",
            ));
        }
        log_order(&order);
        let write =
            move |store: &dyn MapStore| -> Result<_, Error> { Ok((order.apply(store, ordered)?, store.overrides()?)) };
        let (map, orders) = match crate::writer::with_store(self, write).await {
            Some(Ok(written)) => written,
            Some(Err(Error::Conflict { .. })) => {
                return Err(Status::aborted(
                    "the partition changed meanwhile, nothing was done: check it, and repeat the order",
                ));
            }
            Some(Err(error)) => return Err(Status::unavailable(format!("failed to execute the order: {error}"))),
            None => return Err(Status::internal("the map store panicked")),
        };
        let now_ms = self.now_ms();
        let mut state = self.state();
        state.map_overridden(map.clone(), orders, now_ms);
        drop(state);
        self.publish();
        self.reconsider.notify_one();
        Ok(map)
    }
}

fn check_text_lengths(by: &str, reason: &str) -> Result<(), Status> {
    for (field, text) in [("by", by), ("accept_data_loss", reason)] {
        if text.len() > MapOverride::MAX_TEXT_BYTES {
            let (length, most) = (text.len(), MapOverride::MAX_TEXT_BYTES);
            return Err(Status::invalid_argument(format!("{field}: {length} bytes; allowed: up to {most}")));
        }
    }
    Ok(())
}

/// Logs an order.
pub(crate) fn log_order(order: &MapOverride) {
    tracing::warn!(by = order.by, reason = order.reason, what = ?order.what, steps = order.steps.len(), "partition map overridden by order");
}

/// Milliseconds since 1970.
fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Describes what a forced promotion loses.
fn describe_loss(
    before: &Entry,
    partition: PartitionId,
    chosen: &PromotionCandidate,
    reports: &[MapStateReport],
    silent: &BTreeSet<Ordinal>,
) -> String {
    let ordinals: BTreeSet<Ordinal> = before.candidates().map(|member| member.ordinal).collect();
    let in_sync: Vec<String> = ordinals.iter().map(ToString::to_string).collect();
    let promoted = chosen.member.ordinal;
    let held = |replica: &rebuild::ReplicaState| match replica.last {
        Lsn(0) => "nothing".to_owned(),
        last => format!("everything up to lsn {last}, written under term {}", replica.last_term),
    };
    let others = reports.iter().filter(|it| it.member.ordinal != promoted);
    let others =
        others.map(|it| format!("worker {} holds {}", it.member.ordinal, held(&rebuild::replica_state(it, partition))));
    let silent = silent.iter().map(|ordinal| format!("worker {ordinal} did not report, and may hold more"));
    let others: Vec<String> = others.chain(silent).collect();
    let others = if others.is_empty() { String::new() } else { format!("; {}", others.join(", ")) };
    format!(
        "partition {partition}: all acknowledged writes were on worker {} under term {}, and are lost; worker {promoted} holds {}; \
         later acknowledged writes are lost{others}",
        in_sync.join(", "),
        before.term,
        held(&chosen.replica)
    )
}
