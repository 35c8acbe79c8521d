//! The computing and reducing part of a step. What it computes is kept until the step is finished, see [`super::engine`].

use super::connections::Generation;
use super::engine::{Engine, Kept, Part, chain};
use super::network::wire_algorithm;
use super::reduce::{GroupReduce, OwnWork, ReduceError};
use super::source::{SourceError, StepData};
use super::work::EngineEvent;
use engram_api::SumOrder;
use engram_collective::group::{Cause, MemberId, Suspicion};
use engram_collective::transport;
use engram_neural::GradientSum;
use engram_trace::{Span, record_child};
use engram_train::job::Job;
use engram_train::sharing::Planner;
use engram_train::{Alone, Ensemble, EnsembleStep, SummationOrder, TrainError};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

impl Engine {
    /// Whether gradients depend on sums over the group, so that they are computed during the reduction.
    fn is_coupled(&self) -> bool {
        self.job.spec.loss.correlation.is_some() && self.job.spec.local_updates == 1
    }

    pub(super) fn compute(&mut self, step: u64, part: Part) {
        // After the last step the group waits for the driver.
        if step != self.position.step + 1 || step > self.job.steps {
            return;
        }
        self.reduced = None;
        self.begin_span(step, part.rank);
        let started = SystemTime::now();
        let is_ready = if self.is_coupled() { self.part_data(part).is_some() } else { self.prepare_alone(part) };
        self.record_span("compute", started);
        if is_ready {
            self.send(EngineEvent::Gradients { step });
        }
    }

    /// Starts the span of a step: that of rank 0 is the root of the trace, on which the members agree.
    fn begin_span(&mut self, step: u64, rank: usize) {
        if self.span.0 == step || !engram_trace::is_recording() {
            return;
        }
        let root = engram_wire::step_trace(self.key.0, self.key.1, step);
        let (context, parent) = if rank == 0 { (root, None) } else { (root.child(), Some(root)) };
        let mut span = Span::agreed(context, parent, "training step");
        span.set("engram.training.step", step);
        span.set("engram.training.rank", rank);
        span.link_agreed(engram_wire::run_trace(self.key.0));
        self.span = (step, span);
    }

    /// Records a part of the step in progress.
    pub(super) fn record_span(&self, name: &'static str, started: SystemTime) {
        if let Some(context) = self.span.1.context() {
            record_child(context, name, (started, SystemTime::now()), Vec::new());
        }
    }

    /// Returns the rows of a part, and the order of additions.
    fn share(&self, part: Part) -> (Range<usize>, SummationOrder) {
        match &self.shares {
            Some((generation, shares)) if *generation == part.generation && shares.sizes().len() == part.members => {
                self.job.part_of(part.rank, shares)
            }
            _ => self.job.part(part.rank, part.members),
        }
    }

    /// Returns the data of the next step; `None` after a failure, which is reported, or when the member ends.
    fn part_data(&mut self, part: Part) -> Option<Arc<StepData>> {
        let (started, rows) = (Instant::now(), self.share(part).0);
        let data = self.source.step_data(self.trained.first().model(), self.trained.counters().step, &rows);
        let progress = &mut self.meter.progress;
        // Generated samples are part of the computation.
        let seconds =
            if self.job.buffer().is_some() { &mut progress.draw_seconds } else { &mut progress.compute_seconds };
        *seconds += started.elapsed().as_secs_f64();
        match data {
            Ok(data) => Some(data),
            Err(SourceError::Ended) => None,
            Err(SourceError::Failed(message)) => {
                self.fail(format!("step {}: {message}", self.position.step + 1));
                None
            }
        }
    }

    /// Computes the gradient sums without communication; returns whether it succeeded.
    fn prepare_alone(&mut self, part: Part) -> bool {
        let Some(data) = self.part_data(part) else { return false };
        let (started, share) = (Instant::now(), self.share(part));
        match prepare(&self.job, &data, &mut self.trained, &share, &mut Alone) {
            Ok(local) => {
                let elapsed = started.elapsed();
                self.kept = Some(Kept { local, part, data, nanoseconds: elapsed.as_nanos() as u64 });
                self.meter.progress.compute_seconds += elapsed.as_secs_f64();
                true
            }
            Err(error) => {
                let (step, named) = (self.position.step + 1, data.describe());
                self.fail(format!("step {step}: {}; {}: {named}", chain(&error), self.samples_name()));
                false
            }
        }
    }

    /// What the numbers of samples in a message are.
    pub(super) fn samples_name(&self) -> String {
        self.job.buffer().map_or_else(|| "samples".to_owned(), |plan| format!("items of buffer {}", plan.name))
    }

    pub(super) fn reduce(&mut self, step: u64, generation: &Generation) {
        if step != self.position.step + 1 {
            return;
        }
        let part = Part { generation: generation.number, rank: generation.rank, members: generation.members.len() };
        // Survivors of a failure reduce the sums that they kept. In the order of a tree no leaf may be missing, and after a join no row
        // may count twice.
        let is_private = self.job.spec.privacy.is_some();
        let is_stale = self.kept.as_ref().is_none_or(|kept| match self.job.order {
            // A step that is repeated uses the same samples, so that it is the same release.
            _ if is_private => kept.part != part,
            SumOrder::PartitionInvariant => (kept.part.rank, kept.part.members) != (part.rank, part.members),
            SumOrder::Rank if kept.part.generation == part.generation => false,
            SumOrder::Rank => kept.part.members <= part.members,
        });
        let data = if self.is_coupled() { self.part_data(part) } else { None };
        let is_ready = if self.is_coupled() { data.is_some() } else { !is_stale || self.prepare_alone(part) };
        if !is_ready {
            return;
        }
        let started = Instant::now();
        if !self.establish(generation) {
            return;
        }
        let computed = self.meter.progress.compute_seconds;
        let began = SystemTime::now();
        let reduced = self.reduce_over(step, generation, part, data);
        self.record_span("reduce", began);
        match reduced {
            Ok(sum) => {
                let scaled = self.job.spec.scaler.is_some() || self.job.spec.precision == engram_neural::Precision::F16;
                let valid = scaled || (sum.loss.is_finite() && sum.values.iter().all(|value| value.is_finite()));
                self.reduced = Some((sum, valid));
                self.send(EngineEvent::Reduced { generation: generation.number, step, valid });
            }
            Err(error) => self.reduction_failed(generation, &error),
        }
        let in_compute = self.meter.progress.compute_seconds - computed;
        self.meter.progress.reduce_seconds += (started.elapsed().as_secs_f64() - in_compute).max(0.0);
    }

    /// Connects to the members of a generation, unless it is so already; returns whether it is.
    fn establish(&mut self, generation: &Generation) -> bool {
        if self.connections.as_ref().is_some_and(|open| open.generation == generation.number) {
            return true;
        }
        self.connections = None;
        self.planned = None;
        match self.connector.connect(generation) {
            Ok(mut connections) => {
                if let Err(error) = self.measure_links(&mut connections, generation) {
                    self.reduction_failed(generation, &ReduceError::Transport(error));
                    return false;
                }
                let sent_bytes = connections.transport.as_ref().map_or(0, |it| it.counters().sent);
                let (members, job) = (connections.members.len(), &self.job);
                let balance = job.balance.filter(|_| connections.rank == 0 && members > 1);
                self.planner = balance.map(|balance| Planner::new(balance, job.batch, members));
                self.connections = Some(connections);
                self.meter.begin_connections(sent_bytes);
                // The time until the group was formed is no training.
                self.meter.since = Instant::now();
                true
            }
            Err(error) => {
                self.reduction_failed(generation, &ReduceError::Transport(error));
                false
            }
        }
    }

    fn reduce_over(
        &mut self,
        step: u64,
        generation: &Generation,
        part: Part,
        data: Option<Arc<StepData>>,
    ) -> Result<GradientSum, TrainError<ReduceError>> {
        let (job, events, share) = (Arc::clone(&self.job), self.events.clone(), self.share(part));
        let number = generation.number;
        let mut suspect = |suspicion| {
            let _ = events.blocking_send(EngineEvent::PeerFailed { generation: number, suspicion });
        };
        let leaves = |rank: usize| match job.part(rank, part.members).1 {
            SummationOrder::Rank { leaves } => leaves as usize * job.batches,
            SummationOrder::PartitionInvariant { owned, .. } => owned.len() * job.batches,
        };
        let mut reduce = GroupReduce {
            connections: self.connections.as_mut().expect("the caller established them"),
            executor: &mut self.executor,
            step,
            leaves: &leaves,
            job: &job,
            own: OwnWork::default(),
            planner: self.planner.as_mut(),
            planned: None,
            moments: 0,
            waited: Duration::ZERO,
            algorithm: None,
            cancel: &generation.cancel,
            limit: self.connector.limit,
            suspect: &mut suspect,
        };
        if let Some(data) = data {
            let started = Instant::now();
            let local = prepare(&job, &data, &mut self.trained, &share, &mut reduce)?;
            let elapsed = started.elapsed().saturating_sub(reduce.waited);
            self.kept = Some(Kept { local, part, data, nanoseconds: elapsed.as_nanos() as u64 });
            self.meter.progress.compute_seconds += elapsed.as_secs_f64();
        }
        let kept = self.kept.as_ref().expect("the sums were computed above or before");
        reduce.own = OwnWork { rows: kept.data.names.len() as u64, nanoseconds: kept.nanoseconds };
        let sum = engram_train::Reduce::gradient(&mut reduce, kept.local.gradient()).map_err(TrainError::Reduce)?;
        let algorithm = reduce.algorithm;
        self.planned = reduce.planned;
        self.meter.progress.set_algorithm(wire_algorithm(algorithm));
        Ok(sum)
    }

    fn reduction_failed(&mut self, generation: &Generation, error: &(dyn std::error::Error + 'static)) {
        let members: Vec<MemberId> = generation.members.iter().map(|peer| peer.id).collect();
        self.exchange_failed(generation.number, &members, error);
    }

    /// Reports the member that failed in an exchange.
    fn exchange_failed(&mut self, generation: u64, members: &[MemberId], error: &(dyn std::error::Error + 'static)) {
        self.connections = None;
        match transport_error(error) {
            Some(transport::Error::Cancelled) => {}
            Some(failed) => {
                tracing::warn!(error = chain(failed), generation, "reduction failed");
                let Some(peer) = failed.rank().and_then(|rank| members.get(rank)) else { return };
                let suspicion = Suspicion { peer: *peer, cause: Cause::Broken };
                self.send(EngineEvent::PeerFailed { generation, suspicion });
            }
            None => self.fail(format!("step {}: {}", self.position.step + 1, chain(error))),
        }
    }

    pub(super) fn flags(&mut self, step: u64, valid: bool, cancel: &AtomicBool) {
        let started = Instant::now();
        let (events, job) = (self.events.clone(), Arc::clone(&self.job));
        let Some(connections) = &mut self.connections else { return };
        let (number, rank, members) = (connections.generation, connections.rank, connections.members.clone());
        let mut suspect = |suspicion| {
            let _ = events.blocking_send(EngineEvent::PeerFailed { generation: number, suspicion });
        };
        let mut reduce = GroupReduce {
            connections,
            executor: &mut self.executor,
            step,
            leaves: &|_| 0,
            job: &job,
            own: OwnWork::default(),
            planner: None,
            planned: None,
            moments: 0,
            waited: Duration::ZERO,
            algorithm: None,
            cancel,
            limit: self.connector.limit,
            suspect: &mut suspect,
        };
        match reduce.flags(valid) {
            Ok(flags) => {
                for (from, valid) in
                    members.iter().zip(flags).enumerate().filter(|(it, _)| *it != rank).map(|(_, it)| it)
                {
                    self.send(EngineEvent::Flag { generation: number, step, from: *from, valid });
                }
            }
            Err(error) => self.exchange_failed(number, &members, &error),
        }
        self.meter.progress.reduce_seconds += started.elapsed().as_secs_f64();
    }
}

/// Computes the gradient sums of the next step over the data of a part of each of its batches.
fn prepare<R: engram_train::Reduce>(
    job: &Job,
    data: &StepData,
    trained: &mut Ensemble,
    (rows, order): &(Range<usize>, SummationOrder),
    reduce: &mut R,
) -> Result<EnsembleStep, TrainError<R::Error>>
where
    R::Error: std::error::Error + 'static,
{
    let positions: Vec<u32> = data.names.iter().map(|name| *name as u32).collect();
    let first = |at: usize| at % job.batches * job.batch + rows.start;
    let labeled: Result<Vec<_>, _> =
        data.batches.iter().enumerate().map(|(at, batch)| batch.labeled(first(at))).collect();
    let mut labeled = labeled?;
    if job.spec.privacy.is_some() {
        // Dropout follows the sample, wherever it is computed.
        let mut rest = &positions[..];
        for data in &mut labeled {
            let (own, others) = rest.split_at(data.batch.len());
            data.batch = data.batch.at_positions(own)?;
            rest = others;
        }
    }
    trained.prepare(&labeled, order, reduce)
}

/// Returns the failure of the transport within an error.
fn transport_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a transport::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(ReduceError::Transport(found)) = error.downcast_ref::<ReduceError>() {
            return Some(found);
        }
        next = error.source();
    }
    None
}
