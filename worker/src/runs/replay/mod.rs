//! Runs of kind `Replay`: hosts the membership of the group that trains, and reports its progress.
//!
//! The driver may die at any await. The members train on without it, as long as their group does not change; the next driver connects to
//! them and continues from the recorded membership. Its term is the version of the record with which it began, so that members ignore a
//! driver that was replaced, and the record of such a driver is rejected.

mod buffer;
mod figures;
mod group;
mod members;

use crate::runs::frame::{
    Interruption, RETRY_INTERVAL, conclude, failed, ordered, show_end, unless_ordered, write_record,
};
use crate::runs::input;
use crate::runs::replay::figures::{collapse, findings};
use crate::runs::replay::group::{Group, end_group};
use crate::shared::Shared;
use crate::training::{LinkEvent, Links};
use engram_api::{Code, ReplayRun, ReplaySource};
use engram_client::group::{notice_to_wire, report_from_wire};
use engram_collective::group::{MemberId, PauseReason, Record, ServiceAction, ServiceEvent};
use engram_learn::run::{GroupMemberState, Order, Phase, RunState, Status, TrainingState};
use engram_learn::task_run::{TaskSummary, digits_table, page_row};
use engram_memory::{Ordinal, RunId};
use engram_neural::Parallelism;
use engram_proto::v1::{self, training_event::Event, training_order};
use engram_train::buffer::BufferPlan;
use engram_train::job::Job;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Interval between records of the progress: each is a replicated write.
const RECORD_INTERVAL: Duration = Duration::from_secs(2);
/// Interval between rows of the history, so that a short training has curves too.
const NOTE_INTERVAL: Duration = Duration::from_millis(200);
/// Time to wait for further members before the first generation is formed.
const GATHER: Duration = Duration::from_secs(5);
/// Time to wait for the results of all members at the end.
const RESULTS_DEADLINE: Duration = Duration::from_secs(120);
/// Time to wait at the end for workers that are joining.
const JOIN_DEADLINE: Duration = Duration::from_secs(2);

/// Refuses pipelines that need more workers than the cluster has.
fn check_workers(job: &Job, workers: usize) -> Result<(), Interruption> {
    let Some(Parallelism { data, pipeline }) = job.stages.filter(|it| it.data * it.pipeline > workers) else {
        return Ok(());
    };
    let message = format!(
        "spec.replay.parallelism is {data} pipelines of {pipeline} workers; allowed: data times pipeline at most {workers}, the workers of the cluster"
    );
    Err(failed(Code::InvalidValue, message))
}

/// Driver of one Replay run.
pub(in crate::runs) struct ReplayDriver {
    pub(in crate::runs) shared: Arc<Shared>,
    pub(in crate::runs) run: RunId,
    pub(in crate::runs) state: RunState,
    pub(in crate::runs) version: u64,
    pub(in crate::runs) replay: ReplayRun,
    pub(in crate::runs) status: watch::Sender<Status>,
    pub(in crate::runs) orders: watch::Receiver<Order>,
}

impl Drop for ReplayDriver {
    fn drop(&mut self) {
        self.shared.metrics.training.runs.remove(&self.state.name);
    }
}

impl ReplayDriver {
    /// Drives the run to its end, however long the cluster takes. If dropped at any await, another driver can continue.
    pub(in crate::runs) async fn run(mut self) {
        let started = (Instant::now(), self.state.elapsed_ms);
        let result = self.train_to_end(started).await;
        self.state.elapsed_ms = started.1 + started.0.elapsed().as_millis() as u64;
        let Some(page) = conclude(&mut self.state, result) else { return };
        if let Some(training) = &mut self.state.training {
            // Its processes have ended; others continue from checkpoints.
            training.members.clear();
        }
        if self.write_record(page).await.is_err() {
            return;
        }
        if self.state.phase.is_final() {
            // Otherwise the next primary of the partition does it.
            let _ = input::forget(&self.shared, self.run, self.state.identity(self.run)).await;
        }
        let (done, epochs) = (self.state.done, self.state.epochs);
        self.status.send_modify(|status| (status.epoch, status.epochs) = (done, epochs));
        show_end(&self.status, &self.state);
    }

    /// Trains. Returns the row of the report page.
    async fn train_to_end(&mut self, started: (Instant, u64)) -> Result<Vec<u8>, Interruption> {
        let table = self.table().await?;
        let job = Job::with_table(&self.replay, table.as_deref());
        let job = job.map_err(|error| failed(Code::InvalidValue, error.to_string()))?;
        self.state.phase = Phase::Running;
        self.state.epochs = Some(self.replay.steps);
        let submitted_ms = self.state.submitted_ms;
        let is_private = job.spec.privacy.is_some();
        let training = self
            .state
            .training
            .get_or_insert_with(|| TrainingState { started_ms: submitted_ms, ..TrainingState::default() });
        if is_private && training.noise_secret.is_empty() {
            training.noise_secret = rand::random::<[u8; 32]>().to_vec();
        }
        let start = v1::StartTraining {
            noise_secret: training.noise_secret.clone().into(),
            run: engram_proto::answers::identity(self.run.0),
            name: self.state.name.clone(),
            submitted_ms: training.started_ms,
            spec_json: self.state.spec.to_string(),
            table: table.unwrap_or_default().into(),
        };
        self.write_record(None).await?;
        if let Some(plan) = job.buffer() {
            self.buffer_ready(plan).await?;
        }
        let (links, mut events) = Links::new(&self.shared, start);
        if self.state.done == 0 {
            check_workers(&job, links.cluster_workers())?;
        }
        let mut group = Group::new(links, self.version, &self.replay);
        group.figures.set_privacy(job.spec.privacy);
        if let Some(training) = self.state.training.as_ref().filter(|training| !training.members.is_empty()) {
            group.resume(training, self.replay.min_workers);
        }
        let result = self.train(&mut group, &mut events, started).await;
        if !matches!(result, Err(Interruption::Superseded)) {
            end_group(&group, &mut events).await;
        }
        result
    }

    /// Returns the table of the samples; `None` with other sources.
    async fn table(&self) -> Result<Option<Vec<u8>>, Interruption> {
        let file = match &self.replay.source {
            ReplaySource::Csv(table) => &table.file,
            ReplaySource::Example(_) => {
                let table = digits_table().map_err(|error| failed(Code::RunFailed, error.to_string()))?;
                return Ok(Some(table));
            }
            ReplaySource::Synthetic(_) | ReplaySource::Buffer(_) => return Ok(None),
        };
        let ids = (self.run, self.state.identity(self.run));
        loop {
            match input::data(&self.shared, ids, file).await {
                Ok(content) => return Ok(Some(content)),
                Err(input::DataError::Unusable(problem)) => return Err(problem.into()),
                Err(input::DataError::Unavailable(problem)) => {
                    tracing::warn!(run = %self.run, problem = problem.message, "failed to read run data; retrying");
                    unless_ordered(&self.orders, tokio::time::sleep(RETRY_INTERVAL)).await?;
                }
            }
        }
    }

    /// Waits until the buffer of the run fits its model and has enough items; a run that has begun does not wait for items here.
    async fn buffer_ready(&self, plan: &BufferPlan) -> Result<(), Interruption> {
        let has_begun = self.state.done > 0 || self.state.training.as_ref().is_some_and(|it| !it.members.is_empty());
        let min_size = if has_begun { 0 } else { plan.min_size };
        let phase = self.state.phase;
        let show = |reason: String| self.status.send_modify(|status| (status.phase, status.message) = (phase, reason));
        let ready = unless_ordered(&self.orders, buffer::ready(&self.shared, plan, min_size, show)).await;
        let result = ready.and_then(|ready| ready.map_err(|message| failed(Code::InvalidValue, message)));
        show(String::new());
        result
    }

    async fn train(
        &mut self,
        group: &mut Group,
        events: &mut mpsc::Receiver<(Ordinal, LinkEvent)>,
        started: (Instant, u64),
    ) -> Result<Vec<u8>, Interruption> {
        let mut orders = self.orders.clone();
        let mut view = self.shared.membership.subscribe();
        let mut tick = tokio::time::interval(Duration::from_millis(group.timing.probe_ms()));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        group.links.extend();
        loop {
            // Events first: a member that was heard is not silent.
            let actions = tokio::select! {
                biased;
                order = ordered(&mut orders) => return Err(Interruption::Ordered(order)),
                Some((worker, event)) = events.recv() => self.link_event(group, worker, event)?,
                _ = view.changed() => {
                    group.links.extend();
                    Vec::new()
                }
                _ = tick.tick() => self.tick(group)?,
            };
            self.execute_actions(group, actions).await?;
            self.show(group, started);
            if group.noted.elapsed() >= NOTE_INTERVAL {
                self.note(group, started);
            }
            if group.recorded.elapsed() >= RECORD_INTERVAL {
                self.write_record(None).await?;
                group.recorded = Instant::now();
            }
            if let Some(result) = self.result(group)? {
                return self.finish(group, &result, started);
            }
        }
    }

    /// Handles what a connection reports; returns the actions of the membership service.
    fn link_event(
        &self,
        group: &mut Group,
        worker: Ordinal,
        event: LinkEvent,
    ) -> Result<Vec<ServiceAction>, Interruption> {
        match event {
            LinkEvent::Opened | LinkEvent::Closed => Ok(Vec::new()),
            LinkEvent::Refused => Ok(group.joined.remove(&worker).map_or_else(Vec::new, |(member, _)| {
                tracing::warn!(run = %self.run, worker = worker.0, "the process of a training member is dead");
                group.service_event(ServiceEvent::Died(member))
            })),
            LinkEvent::Rejected(message) => {
                Err(failed(Code::RunFailed, format!("worker {worker} cannot train: {message}")))
            }
            LinkEvent::Event(Event::Member(joined)) => Ok(group.join(worker, joined)),
            LinkEvent::Event(Event::Report(report)) => {
                let Some((member, _)) = group.joined.get(&worker) else { return Ok(Vec::new()) };
                let report = report_from_wire(*member, &report);
                Ok(group.service_event(ServiceEvent::Report(report)))
            }
            LinkEvent::Event(Event::ProbeAnswer(_)) => {
                let Some((member, _)) = group.joined.get(&worker).copied() else { return Ok(Vec::new()) };
                Ok(group.service_event(ServiceEvent::ProbeAnswered(member)))
            }
            LinkEvent::Event(Event::Wait(wait)) => {
                group.is_waiting = true;
                self.status.send_modify(|status| status.message = wait.reason);
                Ok(Vec::new())
            }
            LinkEvent::Event(Event::Progress(progress)) => {
                if std::mem::take(&mut group.is_waiting) {
                    self.status.send_modify(|status| status.message = String::new());
                }
                if let Some(alarm) = collapse(progress.spread_ratio) {
                    tracing::warn!(run = %self.run, step = progress.step, spread_ratio = progress.spread_ratio, "predictions have collapsed");
                    self.status.send_modify(|status| status.message = alarm);
                    group.is_collapsed = true;
                } else if progress.spread_ratio > 0.0 && std::mem::take(&mut group.is_collapsed) {
                    self.status.send_modify(|status| status.message = String::new());
                }
                let rank = group.rank_of(worker);
                group.figures.observe(worker, rank, &progress);
                Ok(Vec::new())
            }
            LinkEvent::Event(Event::Failure(failure)) => {
                Err(failed(Code::RunFailed, format!("worker {worker}: {}", failure.message)))
            }
            LinkEvent::Event(Event::Result(result)) => {
                if result.step >= self.replay.steps {
                    group.results.insert(worker, result);
                } else {
                    group.behind.insert(worker);
                }
                Ok(Vec::new())
            }
        }
    }

    fn tick(&mut self, group: &mut Group) -> Result<Vec<ServiceAction>, Interruption> {
        if group.completed.is_some_and(|since| since.elapsed() > RESULTS_DEADLINE) {
            return Err(failed(Code::RunFailed, "no member reported the result of the training in time"));
        }
        for worker in std::mem::take(&mut group.behind) {
            group.links.send(worker, training_order::Order::Stop(v1::StopTraining { complete: true }));
        }
        let restart_after = Duration::from_millis(group.timing.change_ms()).max(Duration::from_secs(2));
        if group.lost_since.is_some_and(|since| since.elapsed() > restart_after) {
            tracing::warn!(run = %self.run, "no member has the state of the training; starting from the newest checkpoint");
            (group.service, group.lost_since, group.first_joined) = (None, None, Some(Instant::now()));
        }
        if group.service.is_none() {
            self.choose_position(group);
        }
        // The driver before this one may have recorded the last step: no step follows that would end the training.
        let recorded = group.service.as_ref().map_or(0, |service| service.record().position.step);
        if group.joined.values().any(|(_, position)| position.step >= recorded) {
            self.complete_after(group, recorded);
        }
        Ok(group.service_event(ServiceEvent::Tick))
    }

    /// Starts the membership service from the newest position that a worker has, once all workers joined or the time for it is over.
    fn choose_position(&mut self, group: &mut Group) {
        let is_complete = group.joined.len() == group.links.workers();
        let is_over = group.first_joined.is_some_and(|since| since.elapsed() > GATHER);
        let positions = group.joined.values().map(|(_, position)| *position);
        let Some(position) = positions.max_by_key(|position| position.step).filter(|_| is_complete || is_over) else {
            return;
        };
        let generation = self.state.training.as_ref().map_or(0, |training| training.generation);
        group.start(Record { generation, members: Vec::new(), position }, self.replay.min_workers);
        if position.step > 0 {
            tracing::info!(run = %self.run, step = position.step, "training continues from a checkpoint");
        }
    }

    /// Executes actions of the membership service, and those that follow from them.
    async fn execute_actions(&mut self, group: &mut Group, actions: Vec<ServiceAction>) -> Result<(), Interruption> {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            match action {
                ServiceAction::Send { to, term, notice } => {
                    let address = |member| group.members.get(&member).cloned().unwrap_or_default();
                    let notice = notice_to_wire(term, notice, &address);
                    if let Some(worker) = group.members.get(&to).map(|it| Ordinal(it.ordinal)) {
                        group.links.send(worker, training_order::Order::Notice(notice));
                    }
                }
                ServiceAction::Probe(member) => {
                    if let Some(worker) = group.members.get(&member).map(|it| Ordinal(it.ordinal)) {
                        group.links.send(worker, training_order::Order::Probe(v1::GroupProbe {}));
                    }
                }
                ServiceAction::Record { record, .. } => {
                    self.keep(group, &record);
                    self.write_record(None).await?;
                    let (generation, members) = (record.generation, record.members.len());
                    tracing::info!(run = %self.run, generation, members, step = record.position.step, "training group changed");
                    group.figures.restart(members);
                    self.shared.metrics.training.group_changes.inc();
                    actions.extend(group.service_event(ServiceEvent::Recorded { generation }));
                }
                ServiceAction::Removed(member) => {
                    let worker = group.members.get(&member).map_or(0, |it| it.ordinal);
                    tracing::warn!(run = %self.run, worker, "removed a member of the training group");
                    group.figures.remove(Ordinal(worker));
                    if let Some(training) = &mut self.state.training {
                        training.failures += 1;
                    }
                }
                ServiceAction::Left(member) => {
                    let worker = group.members.get(&member).map_or(0, |it| it.ordinal);
                    tracing::info!(run = %self.run, worker, "a member leaves the training group");
                    group.figures.remove(Ordinal(worker));
                }
                ServiceAction::Committed(position) => {
                    self.state.done = self.state.done.max(position.step);
                    self.complete_after(group, position.step);
                }
                ServiceAction::Paused(reason) => {
                    self.paused(group, reason);
                }
                ServiceAction::Resumed { .. } => {
                    group.lost_since = None;
                    self.status.send_modify(|status| status.message = String::new());
                }
            }
        }
        Ok(())
    }

    /// Asks all members for their results, once, if this was the last step.
    fn complete_after(&self, group: &mut Group, step: u64) {
        if step >= self.replay.steps && group.completed.is_none() {
            group.completed = Some(Instant::now());
            group.links.send_all(&training_order::Order::Stop(v1::StopTraining { complete: true }));
        }
    }

    fn paused(&self, group: &mut Group, reason: PauseReason) {
        let message = match reason {
            PauseReason::Members { present, required } => {
                format!("paused: {present} workers train, spec.replay.minWorkers is {required}")
            }
            PauseReason::Quorum { present, .. } => format!("waiting for members of the group; {present} answer"),
            PauseReason::StateLost { step } => format!("no member has the state of step {step}"),
        };
        if matches!(reason, PauseReason::Quorum { present: 0, .. } | PauseReason::StateLost { .. }) {
            group.lost_since.get_or_insert_with(Instant::now);
        }
        tracing::warn!(run = %self.run, reason = message, "training paused");
        self.status.send_modify(|status| status.message = message);
    }

    /// Takes a membership over into the state of the run.
    fn keep(&mut self, group: &Group, record: &Record) {
        let Some(training) = &mut self.state.training else { return };
        (training.generation, training.step, training.digest) =
            (record.generation, record.position.step, record.position.digest);
        let member = |id: &MemberId| {
            let address = group.members.get(id).cloned().unwrap_or_default();
            GroupMemberState { id: id.0, ordinal: address.ordinal, address: address.reduce_address }
        };
        training.members = record.members.iter().map(member).collect();
        self.state.done = self.state.done.max(record.position.step);
    }

    /// Shows the progress to those that watch the run.
    fn show(&mut self, group: &mut Group, started: (Instant, u64)) {
        if !group.figures.is_due() {
            return;
        }
        let failures = self.state.training.as_ref().map_or(0, |training| training.failures);
        let elapsed_s = (started.1 + started.0.elapsed().as_millis() as u64) as f64 / 1_000.0;
        let figures = &group.figures;
        self.state.done = self.state.done.max(figures.step());
        self.state.updates = figures.total_samples();
        self.state.metrics = figures.metrics(group.links.workers(), failures);
        self.shared.metrics.training.runs.set(&self.state.name, &self.state.metrics);
        let state = &self.state;
        self.status.send_modify(|status| {
            status.phase = state.phase;
            (status.epoch, status.epochs) = (state.done, state.epochs);
            (status.updates, status.elapsed_s) = (state.updates, elapsed_s);
            (status.epochs_per_s, status.updates_per_s) = (figures.steps_per_second(), figures.samples_per_second());
            status.metrics.clone_from(&state.metrics);
            status.outputs = figures.texts();
        });
    }

    /// Adds a row to the history.
    fn note(&mut self, group: &mut Group, started: (Instant, u64)) {
        group.noted = Instant::now();
        self.state.elapsed_ms = started.1 + started.0.elapsed().as_millis() as u64;
        if let (Some(training), Some(row)) = (&mut self.state.training, group.figures.row()) {
            training.note(row);
        }
    }

    /// Returns the result once all members that are alive have reported it.
    fn result(&self, group: &Group) -> Result<Option<v1::TrainingResult>, Interruption> {
        let Some(service) = group.service.as_ref().filter(|_| group.completed.is_some()) else { return Ok(None) };
        // A worker that joins at the end predicts with the final weights as well, if it receives them in time.
        let is_patient = group.completed.is_some_and(|since| since.elapsed() < JOIN_DEADLINE);
        let expected: Vec<Ordinal> = group
            .joined
            .iter()
            .filter(|(_, (member, _))| is_patient || service.record().members.contains(member))
            .map(|(worker, _)| *worker)
            .collect();
        if expected.is_empty() || !expected.iter().all(|worker| group.results.contains_key(worker)) {
            return Ok(None);
        }
        let first = &group.results[&expected[0]];
        for worker in &expected {
            let other = &group.results[worker];
            if (other.step, &other.digest) != (first.step, &first.digest) {
                let message = format!(
                    "the parameters of workers {} and {worker} differ after step {}: {} and {}",
                    expected[0], first.step, first.digest, other.digest
                );
                return Err(failed(Code::Corrupt, message));
            }
        }
        Ok(Some(first.clone()))
    }

    fn finish(
        &mut self,
        group: &mut Group,
        result: &v1::TrainingResult,
        started: (Instant, u64),
    ) -> Result<Vec<u8>, Interruption> {
        self.note(group, started);
        self.state.done = result.step;
        self.state.updates = result.samples;
        let failures = self.state.training.as_ref().map_or(0, |training| training.failures);
        group.figures.update_epsilon(result.step);
        self.state.metrics = group.figures.metrics(group.links.workers(), failures);
        let training = self.state.training.clone().unwrap_or_default();
        let mut findings = findings(&self.state, &training, &self.replay, result)
            .map_err(|error| failed(Code::RunFailed, error.to_string()))?;
        findings.outputs.extend(group.figures.texts());
        self.state.metrics.extend(findings.metrics.clone());
        let page = page_row(&findings.page);
        self.state.tasks = Some(TaskSummary::new(findings, result.digest.clone()));
        Ok(page)
    }

    async fn write_record(&mut self, row: Option<Vec<u8>>) -> Result<(), Interruption> {
        write_record(&self.shared, (self.run, &mut self.version), &self.state, row).await
    }
}
