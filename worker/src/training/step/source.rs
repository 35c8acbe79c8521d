//! Data of a member's steps: generated samples, or items of a replay buffer, of which the next batch is drawn while the present one is
//! computed.
//!
//! # What is reproducible
//!
//! A draw is a function of (seed, batch number, state of the buffer), and the batch number follows from the step: a member that joins at step
//! k, and a driver that takes over there, draw the batches of step k; a checkpoint needs the step only. Which draw is which row of the batch
//! depends on seed and batch number ([`Job::draws`]), so a buffer that does not change gives the same batches on any number of workers, and
//! with the order `PartitionInvariant` the same parameters, bit for bit.
//!
//! A buffer that changes while a run trains, by appends, by other programs or by the priorities of the run itself, is read at whatever
//! state it has when a member draws, up to `prefetch` steps ahead. Two members may then draw from two states: each draw is exact for the state that it
//! saw, and its importance weight is relative to the largest one of that state over all partitions, but another execution of the run draws
//! other items. The parameters are equal on all members in any case, because they follow from the reduced sums alone.

use crate::buffers::{Buffers, is_passing};
use crate::shared::Shared;
use crate::training::step::work::EngineEvent;
use engram_neural::Model;
use engram_proto::v1::sample_items_request::Sampler;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_replay::columns::ColumnView;
use engram_replay::importance::Beta;
use engram_replay::schema::DType;
use engram_train::buffer::{BufferPlan, DrawnItems};
use engram_train::dataset::Dataset;
use engram_train::job::{Job, Rows};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Wait of a call for items, after which the reason is reported and the call repeated.
const WAIT: Duration = Duration::from_millis(500);
/// Pause before a draw is repeated while partitions have no primary, or their items are missing: other workers do not announce either.
const PAUSE: Duration = Duration::from_millis(50);
/// Most items that the result is measured on, and the time to draw them.
const HELD_OUT_ITEMS: u64 = 4_096;
const HELD_OUT_DEADLINE: Duration = Duration::from_secs(30);
/// Handles or samples of a batch that a message names.
const NAMED_SAMPLES: usize = 8;

/// The member's part of the batches of a step.
#[derive(Debug, Default)]
pub(in crate::training) struct StepData {
    /// Rows of each batch, of one model after the other.
    pub(in crate::training) batches: Vec<Rows>,
    /// Handles of the items, or numbers of the samples, of all batches in the order of the rows.
    pub(in crate::training) names: Vec<u64>,
}

impl StepData {
    /// Names the first samples, for messages.
    pub(in crate::training) fn describe(&self) -> String {
        let mut named: Vec<String> = self.names.iter().take(NAMED_SAMPLES).map(ToString::to_string).collect();
        if self.names.len() > NAMED_SAMPLES {
            named.push(format!("... ({} samples of this worker)", self.names.len()));
        }
        named.join(", ")
    }
}

/// Why there is no data.
#[derive(Debug)]
pub(in crate::training) enum SourceError {
    /// The member ends.
    Ended,
    /// The run cannot go on.
    Failed(String),
}

/// A step, from 0, and the rows of its batches.
type Key = (u64, Range<usize>);

/// Data of a member.
pub(in crate::training) struct Source {
    job: Arc<Job>,
    kind: Kind,
    /// The newest data, which a repetition of the step uses again.
    current: Option<(Key, Arc<StepData>)>,
    /// Steps whose items had been drawn when they were needed, since they were counted last.
    drawn_ahead: u64,
}

enum Kind {
    Generated(Arc<Dataset>),
    Buffer(Draws),
}

/// Draws of a member from a replay buffer.
struct Draws {
    buffers: Buffers,
    runtime: Handle,
    /// Becomes true when the member ends.
    ending: watch::Receiver<bool>,
    events: mpsc::Sender<EngineEvent>,
    /// The batches of the next steps, while they are drawn.
    next: VecDeque<(Key, JoinHandle<Result<StepData, String>>)>,
}

impl Source {
    /// Creates the source of a job. Must be called within the runtime of the worker.
    pub(in crate::training) fn new(
        shared: &Arc<Shared>,
        job: Arc<Job>,
        events: mpsc::Sender<EngineEvent>,
        ending: watch::Receiver<bool>,
    ) -> Self {
        let kind = job.dataset().map_or_else(
            || {
                let buffers = Buffers::of_cluster(shared);
                Kind::Buffer(Draws { buffers, runtime: Handle::current(), ending, events, next: VecDeque::new() })
            },
            Kind::Generated,
        );
        Self { job, kind, current: None, drawn_ahead: 0 }
    }

    /// Returns the samples in memory; `None` with a buffer.
    pub(in crate::training) fn dataset(&self) -> Option<&Dataset> {
        match &self.kind {
            Kind::Generated(data) => Some(data),
            Kind::Buffer(_) => None,
        }
    }

    /// Draws items of the buffer that the result is measured on; `None` without such a buffer, and where it is empty.
    ///
    /// # Errors
    /// The buffer does not exist any more, has other fields, or does not answer in time.
    pub(in crate::training) fn held_out(&self) -> Result<Option<Rows>, String> {
        let (Kind::Buffer(draws), Some(plan)) = (&self.kind, self.job.buffer()) else { return Ok(None) };
        let Some(name) = &plan.held_out else { return Ok(None) };
        let sample = async {
            let (schema, _, items) = draws.buffers.contents(name).await.map_err(|problem| problem.message)?;
            plan.fit(&schema).map_err(|error| error.to_string())?;
            let count = u32::try_from(items.min(HELD_OUT_ITEMS)).unwrap_or(u32::MAX);
            if count == 0 {
                return Ok(None);
            }
            let request = v1::SampleItemsRequest {
                buffer: name.clone(),
                sampler: Some(Sampler::Uniform(v1::UniformSampler {})),
                count,
                ..request(&self.job, plan, 0, 0)
            };
            let all: Vec<u32> = (0..count).collect();
            let batch = draw_batch(&draws.buffers, request, &all, &draws.events).await?;
            Ok(Some(rows_of(plan, &batch, &all)?.0))
        };
        let sampled = draws.runtime.block_on(async { tokio::time::timeout(HELD_OUT_DEADLINE, sample).await });
        sampled.unwrap_or_else(|_| Err(format!("buffer {name}: no items within {} s", HELD_OUT_DEADLINE.as_secs())))
    }

    /// Returns the rows `rows` of each batch of a step, and begins to draw those of the next step.
    ///
    /// # Errors
    /// The member ends, the buffer does not exist any more, or an item does not fit the model.
    pub(in crate::training) fn step_data(
        &mut self,
        model: &Model,
        step: u64,
        rows: &Range<usize>,
    ) -> Result<Arc<StepData>, SourceError> {
        let key = (step, rows.clone());
        if let Some((_, data)) = self.current.as_ref().filter(|(known, _)| *known == key) {
            return Ok(Arc::clone(data));
        }
        let data = match &mut self.kind {
            Kind::Generated(data) => generated(&self.job, model, data, step, rows),
            Kind::Buffer(draws) => {
                let is_drawn = draws.is_drawn(&key);
                let data = draws.finish_draw(&self.job, &key)?;
                self.drawn_ahead += u64::from(is_drawn);
                let ahead = self.job.buffer().map_or(0, |plan| plan.prefetch);
                (1..=ahead).for_each(|ahead| draws.begin(&self.job, (step + ahead, rows.clone())));
                data
            }
        };
        let data = Arc::new(data);
        self.current = Some((key, Arc::clone(&data)));
        Ok(data)
    }
}

impl Source {
    /// Returns the number of steps whose items had been drawn when they were needed, and counts from 0 again.
    pub(in crate::training) fn take_drawn_ahead(&mut self) -> u64 {
        std::mem::take(&mut self.drawn_ahead)
    }
}

impl Drop for Draws {
    fn drop(&mut self) {
        self.next.iter().for_each(|(_, task)| task.abort());
    }
}

fn generated(job: &Job, model: &Model, data: &Dataset, step: u64, rows: &Range<usize>) -> StepData {
    let samples: Vec<Vec<usize>> = (0..job.ensemble).flat_map(|member| job.samples(member, data, step, rows)).collect();
    let batches = samples.iter().map(|samples| Rows::of(model, data, samples)).collect();
    StepData { batches, names: samples.iter().flatten().map(|sample| *sample as u64).collect() }
}

impl Draws {
    /// Begins to draw a step, unless that is in progress.
    fn begin(&mut self, job: &Arc<Job>, key: Key) {
        if key.0 >= job.steps || self.next.iter().any(|(known, _)| *known == key) {
            return;
        }
        let draw = draw(self.buffers.clone(), Arc::clone(job), key.clone(), self.events.clone());
        self.next.push_back((key, self.runtime.spawn(draw)));
    }

    /// Whether the items of a step are drawn already.
    fn is_drawn(&self, key: &Key) -> bool {
        self.next.iter().any(|(known, task)| known == key && task.is_finished())
    }

    /// Waits for a step, however long the buffer has too few items or a partition no primary. Draws of other parts are stopped.
    fn finish_draw(&mut self, job: &Arc<Job>, key: &Key) -> Result<StepData, SourceError> {
        self.next.retain(|((step, rows), task)| {
            let is_current = *step >= key.0 && *rows == key.1;
            if !is_current {
                task.abort();
            }
            is_current
        });
        self.begin(job, key.clone());
        let at = self.next.iter().position(|(known, _)| known == key);
        let Some((_, task)) = at.and_then(|at| self.next.remove(at)) else { return Err(SourceError::Ended) };
        let abort = task.abort_handle();
        let ending = &mut self.ending;
        let drawn = self.runtime.block_on(async {
            tokio::select! {
                drawn = task => drawn.ok(),
                _ = ending.wait_for(|ending| *ending) => None,
            }
        });
        match drawn {
            Some(drawn) => drawn.map_err(SourceError::Failed),
            None => {
                abort.abort();
                Err(SourceError::Ended)
            }
        }
    }
}

/// Draws the batches of a step.
async fn draw(
    buffers: Buffers,
    job: Arc<Job>,
    (step, rows): Key,
    events: mpsc::Sender<EngineEvent>,
) -> Result<StepData, String> {
    let plan = job.buffer().ok_or("the source of the run is no buffer")?;
    let mut data = StepData::default();
    let batches = job.batches as u64;
    let batches = (0..job.ensemble).flat_map(|member| (0..batches).map(move |micro| (member, step * batches + micro)));
    for (member, number) in batches {
        let draws = job.draws(member, number, &rows);
        if draws.is_empty() {
            data.batches.push(Rows::default());
            continue;
        }
        let request = v1::SampleItemsRequest { seed: job.member_seed(member), ..request(&job, plan, step, number) };
        let batch = draw_batch(&buffers, request, &draws, &events).await?;
        let (rows, handles) = rows_of(plan, &batch, &draws)?;
        data.batches.push(rows);
        data.names.extend(handles);
    }
    Ok(data)
}

fn request(job: &Job, plan: &BufferPlan, step: u64, number: u64) -> v1::SampleItemsRequest {
    let prioritized =
        |(alpha, beta): (f64, Beta)| Sampler::Prioritized(v1::PrioritizedSampler { alpha, beta: beta.at(step) });
    v1::SampleItemsRequest {
        buffer: plan.name.clone(),
        sampler: Some(plan.prioritized.map_or(Sampler::Uniform(v1::UniformSampler {}), prioritized)),
        count: u32::try_from(job.batch).unwrap_or(u32::MAX),
        seed: job.spec.seed,
        step: number,
        fields: plan.fields.to_vec(),
        world: 1,
        wait_ms: u32::try_from(WAIT.as_millis()).unwrap_or(u32::MAX),
        ..v1::SampleItemsRequest::default()
    }
}

/// Draws one batch, and reports why it waits.
async fn draw_batch(
    buffers: &Buffers,
    request: v1::SampleItemsRequest,
    draws: &[u32],
    events: &mpsc::Sender<EngineEvent>,
) -> Result<v1::ItemBatch, String> {
    let mut sorted = draws.to_vec();
    sorted.sort_unstable();
    loop {
        let mut problem: Problem = match buffers.sample_draws(request.clone(), sorted.clone()).await {
            Ok(batch) => return Ok(batch),
            Err(problem) => problem,
        };
        if problem.kind() == ProblemKind::BufferUnknown {
            // A worker without a partition learns here what the buffer is.
            match buffers.contents(&request.buffer).await {
                Ok(_) => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Err(other) => problem = other,
            }
        }
        if problem.kind() != ProblemKind::BufferWait && !is_passing(&problem) {
            return Err(format!("failed to draw from buffer {}: {}", request.buffer, problem.message));
        }
        let reason = format!("buffer {}: {}", request.buffer, problem.message);
        // A driver that does not read gets the next one.
        let _ = events.try_send(EngineEvent::Waiting(reason));
        tokio::time::sleep(PAUSE).await;
    }
}

/// Returns drawn items, which are in ascending order of their draws, in the order of the rows, with their handles.
fn rows_of(plan: &BufferPlan, batch: &v1::ItemBatch, draws: &[u32]) -> Result<(Rows, Vec<u64>), String> {
    let mut by_draw: Vec<usize> = (0..draws.len()).collect();
    by_draw.sort_unstable_by_key(|row| draws[*row]);
    let mut order = vec![0; draws.len()];
    by_draw.into_iter().enumerate().for_each(|(position, row)| order[row] = position);
    let handles = order.iter().filter_map(|position| batch.handles.get(*position).copied()).collect();
    let column = |name: &str| batch.columns.iter().find(|column| column.field == name);
    let (Some(input), Some(target)) = (column(&plan.fields[0]), column(&plan.fields[1])) else {
        return Err(format!("buffer {} returned no column of {}", plan.name, plan.fields.join(" or ")));
    };
    let view = |column| view(column).ok_or_else(|| format!("buffer {} returned a column of unknown type", plan.name));
    let (input, target) = (view(input)?, view(target)?);
    let items = DrawnItems { input, target, weights: &batch.weights, order: &order };
    let rows = plan.rows(&items).map_err(|error| {
        let handle = error.position.and_then(|position| batch.handles.get(position));
        handle.map_or_else(|| error.text.clone(), |handle| format!("item {handle}: {}", error.text))
    })?;
    Ok((rows, handles))
}

/// Returns a column for the plan. A jagged one has the length of each item, a fixed one has none.
fn view(column: &v1::FieldColumn) -> Option<ColumnView<'_>> {
    Some(ColumnView {
        field: &column.field,
        dtype: DType::from_name(&column.dtype)?,
        shape: &column.shape,
        rows: (!column.rows.is_empty()).then_some(&column.rows[..]),
        data: &column.data,
    })
}
