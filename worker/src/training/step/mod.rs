//! The computing and reducing part of a step. What it computes is kept until the step is finished, see [`crate::training::engine`].

mod agreement;
pub(super) mod meter;
pub(super) mod priorities;
pub(super) mod reduce;
pub(super) mod source;
mod stages;
mod sums;
pub(super) mod work;

use crate::training::engine::{Engine, Kept, Part, chain};
use crate::training::step::agreement::agree;
use crate::training::step::reduce::{Connections, GroupReduce, OwnWork, ReduceError};
use crate::training::step::source::{SourceError, StepData};
use crate::training::step::stages::Stages;
use crate::training::step::work::EngineEvent;
use crate::training::transport::connections::Generation;
use engram_api::SumOrder;
use engram_collective::group::{Cause, MemberId, Suspicion};
use engram_collective::transport::{self, Wait};
use engram_neural::GradientSum;
use engram_proto::v1::ReduceAlgorithm;
use engram_trace::{Span, record_child};
use engram_train::job::Job;
use engram_train::sharing::Planner;
use engram_train::{Alone, Ensemble, EnsembleStep, SummationOrder, TrainError};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

impl Engine {
    /// Whether gradients depend on the other members, so that they are computed during the reduction.
    fn is_coupled(&self, part: Part) -> bool {
        let is_stage = self.job.place(part.rank, part.members).is_some();
        is_stage || self.job.spec.loss.correlation.is_some() && self.job.spec.local_updates == 1
    }

    /// Returns the ranges of a gradient that the group reduces one by one while the rest is computed; empty: it is reduced as a whole.
    fn buckets(&self, members: usize) -> Vec<Range<usize>> {
        let is_by_rank = self.job.order != SumOrder::PartitionInvariant;
        if is_by_rank && members > 1 { self.trained.buckets() } else { Vec::new() }
    }

    pub(in crate::training) fn compute(&mut self, step: u64, part: Part) {
        // After the last step the group waits for the driver.
        if step != self.position.step + 1 || step > self.job.steps {
            return;
        }
        self.reduced = None;
        self.begin_span(step, part.rank);
        let started = SystemTime::now();
        let is_ready = self.begin_sums(part);
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
    pub(in crate::training) fn record_span(&self, name: &'static str, started: SystemTime) {
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
        progress.drawn_ahead += self.source.take_drawn_ahead();
        match data {
            Ok(data) => Some(data),
            Err(SourceError::Ended) => None,
            Err(SourceError::Failed(message)) => {
                self.fail(format!("step {}: {message}", self.position.step + 1));
                None
            }
        }
    }

    /// Begins the gradient sums of a part: computes them, or obtains the data from which they are computed during the reduction. Returns whether it
    /// succeeded.
    fn begin_sums(&mut self, part: Part) -> bool {
        self.gpu.attach(&self.job, &mut self.trained);
        if !self.is_coupled(part) && self.buckets(part.members).is_empty() {
            return self.prepare_alone(part);
        }
        let Some(data) = self.part_data(part) else { return false };
        let (share, counts_in) = (self.share(part), part.generation);
        self.kept = Some(Kept { local: None, part, counts_in, share, data, nanoseconds: 0 });
        true
    }

    /// Computes the gradient sums without communication; returns whether it succeeded.
    fn prepare_alone(&mut self, part: Part) -> bool {
        let Some(data) = self.part_data(part) else { return false };
        let (started, share) = (Instant::now(), self.share(part));
        self.trained.set_place(None);
        match prepare(&self.job, &data, &mut self.trained, &share, &mut Alone) {
            Ok(local) => {
                let elapsed = started.elapsed();
                let nanoseconds = elapsed.as_nanos() as u64;
                self.kept =
                    Some(Kept { local: Some(local), part, counts_in: part.generation, share, data, nanoseconds });
                self.meter.progress.compute_seconds += elapsed.as_secs_f64();
                true
            }
            Err(error) => {
                self.computation_failed(&error, &data);
                false
            }
        }
    }

    /// What the numbers of samples in a message are.
    pub(in crate::training) fn samples_name(&self) -> String {
        self.job.buffer().map_or_else(|| "samples".to_owned(), |plan| format!("items of buffer {}", plan.name))
    }

    pub(in crate::training) fn reduce(&mut self, step: u64, generation: &Generation) {
        if step != self.position.step + 1 {
            return;
        }
        let part = Part { generation: generation.number, rank: generation.rank, members: generation.members.len() };
        let started = Instant::now();
        if !self.establish(step, generation) {
            return;
        }
        let mut reducing = started.elapsed();
        // Survivors of a failure reduce the sums that they kept, if all members have some.
        let is_stale = self.is_coupled(part) || self.kept.as_ref().is_none_or(|kept| kept.is_stale(&self.job, part));
        if is_stale {
            // Draws may wait for a failover: the peers wait for a member that is slow, not cut off.
            self.send(EngineEvent::Computes(true));
            let is_ready = self.begin_sums(part);
            self.send(EngineEvent::Computes(false));
            if !is_ready {
                return;
            }
        }
        let started = Instant::now();
        let computed = self.meter.progress.compute_seconds;
        let began = SystemTime::now();
        let reduced = self.reduce_over(step, generation, part);
        self.record_span("reduce", began);
        match reduced {
            Ok(sum) => {
                let scaled = self.job.spec.scaler.is_some() || self.job.spec.precision == engram_neural::Precision::F16;
                let valid = scaled || (sum.loss.is_finite() && sum.values.iter().all(|value| value.is_finite()));
                self.reduced = Some((sum, valid));
                self.send(EngineEvent::Reduced { generation: generation.number, step, valid });
            }
            Err(error @ TrainError::Batch(_)) => {
                let data = Arc::clone(&self.kept.as_ref().expect("the step began with them").data);
                self.computation_failed(&error, &data);
            }
            Err(error) => self.reduction_failed(generation, &error),
        }
        reducing += started.elapsed();
        let in_compute = self.meter.progress.compute_seconds - computed;
        self.meter.add_reduction((reducing.as_secs_f64() - in_compute).max(0.0));
    }

    /// Connects to the members of a generation, unless it is so already; returns whether it is.
    fn establish(&mut self, step: u64, generation: &Generation) -> bool {
        if self.connections.as_ref().is_some_and(|open| open.generation == generation.number) {
            return true;
        }
        self.connections = None;
        self.planned = None;
        match self.connect(step, generation) {
            Ok(connections) => {
                let sent_bytes = connections.transport.as_ref().map_or(0, |it| it.counters().sent);
                let (members, job) = (connections.members.len(), &self.job);
                let balance = job.balance.filter(|_| connections.rank == 0 && members > 1);
                self.planner = balance.map(|balance| Planner::new(balance, job.batch, members));
                self.connections = Some(connections);
                self.reset_stages();
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

    /// Connects to the members of a generation, measures the links between them, and agrees with them on the sums that count.
    fn connect(&mut self, step: u64, generation: &Generation) -> Result<Connections, transport::Error> {
        let events = self.events.clone();
        let mut keep_waiting = |rank: usize| {
            let suspicion = Suspicion { peer: generation.members[rank].id, cause: Cause::Stalled };
            let _ = events.blocking_send(EngineEvent::PeerFailed { generation: generation.number, suspicion });
            true
        };
        let mut wait = Wait::new(self.connector.limit, &generation.cancel, &mut keep_waiting);
        let mut connections = self.connector.connect(generation, &mut wait)?;
        self.measure_links(&mut connections, &mut wait)?;
        agree(&mut connections, step, &mut self.kept, &mut wait)?;
        Ok(connections)
    }

    fn reduce_over(
        &mut self,
        step: u64,
        generation: &Generation,
        part: Part,
    ) -> Result<GradientSum, TrainError<ReduceError>> {
        let (job, events, is_coupled) = (Arc::clone(&self.job), self.events.clone(), self.is_coupled(part));
        let place = job.place(part.rank, part.members);
        self.trained.set_place(place);
        let mut buckets = self.buckets(part.members);
        let connections = self.connections.as_mut().expect("the caller established them");
        if connections.accelerator.is_some() {
            // A library adds the gradient as a whole.
            buckets.clear();
        }
        let number = generation.number;
        let computes = |computes| {
            let _ = events.blocking_send(EngineEvent::Computes(computes));
        };
        let mut suspect = |suspicion| {
            let _ = events.blocking_send(EngineEvent::PeerFailed { generation: number, suspicion });
        };
        let leaves = |rank: usize| match job.part(rank, part.members).1 {
            SummationOrder::Rank { leaves } => leaves as usize * job.batches,
            SummationOrder::PartitionInvariant { owned, .. } => owned.len() * job.batches,
        };
        let mut reduce = GroupReduce {
            connections,
            executor: &mut self.executor,
            step,
            leaves: &leaves,
            job: &job,
            own: OwnWork::default(),
            planner: self.planner.as_mut(),
            planned: None,
            times: Vec::new(),
            moments: 0,
            stages: Stages::default(),
            buckets,
            overlapped: None,
            hidden: Duration::ZERO,
            waited: Duration::ZERO,
            algorithm: ReduceAlgorithm::Unspecified,
            cancel: &generation.cancel,
            limit: self.connector.limit,
            computes: &computes,
            suspect: &mut suspect,
        };
        if place.is_some() {
            stages::cut_by_measured_costs(&mut self.trained, &mut reduce, step).map_err(TrainError::Reduce)?;
        }
        let kept = self.kept.as_mut().expect("the caller began them");
        if kept.local.is_none() {
            let (started, began) = (Instant::now(), SystemTime::now());
            // One that is coupled waits for its peers meanwhile.
            computes(!is_coupled);
            kept.local = Some(prepare(&job, &kept.data, &mut self.trained, &kept.share, &mut reduce)?);
            computes(false);
            let elapsed = started.elapsed().saturating_sub(reduce.waited);
            kept.nanoseconds = elapsed.as_nanos() as u64;
            self.meter.progress.compute_seconds += elapsed.as_secs_f64();
            if let Some(span) = self.span.1.context() {
                record_child(span, "compute", (began, SystemTime::now()), Vec::new());
            }
        }
        let local = kept.local.as_ref().expect("it was computed above or before");
        reduce.own = OwnWork {
            rows: kept.data.names.len() as u64,
            nanoseconds: kept.nanoseconds,
            last_step: self.meter.last_step,
        };
        let sum = engram_train::Reduce::gradient(&mut reduce, local.gradient()).map_err(TrainError::Reduce)?;
        self.meter.progress.hidden_seconds += reduce.hidden.as_secs_f64();
        let algorithm = reduce.algorithm;
        (self.planned, self.times) = (reduce.planned, reduce.times);
        self.meter.progress.set_algorithm(algorithm);
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

    /// Ends the run because of samples whose gradients cannot be computed.
    fn computation_failed(&mut self, error: &(dyn std::error::Error + 'static), data: &StepData) {
        let (step, named) = (self.position.step + 1, data.describe());
        self.fail(format!("step {step}: {}; {}: {named}", chain(error), self.samples_name()));
    }

    pub(in crate::training) fn flags(&mut self, step: u64, valid: bool, cancel: &AtomicBool) {
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
            times: Vec::new(),
            moments: 0,
            stages: Stages::default(),
            buckets: Vec::new(),
            overlapped: None,
            hidden: Duration::ZERO,
            waited: Duration::ZERO,
            algorithm: ReduceAlgorithm::Unspecified,
            cancel,
            limit: self.connector.limit,
            computes: &|_| (),
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
        self.meter.add_reduction(started.elapsed().as_secs_f64());
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
