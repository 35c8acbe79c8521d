//! The loop of a run.

use super::cluster::{Cluster, ClusterError, EpochOutcome, LogError, RunLog, Turn};
use super::fetch::{FetchError, Fetcher};
use super::finish;
use super::job::Job;
use super::pin::pin;
use super::state::{FirstSeparation, Input, Row, RunState};
use super::status::{Order, Phase, Status};
use crate::prediction::{HitRate, Hits, Prediction};
use crate::report::{EpochName, EpochRow, RankHistory, RankNote};
use crate::source::{self, Content, Epoch, Limits, Population, Source, SourceError, SourceOptions, StopFlag};
use crate::statistics::Separation;
use engram_memory::{GroupQuality, LearningEpoch, MemoryId, QualityVector, RunId};
use engram_trace::{Span, in_span};
use hashbrown::HashSet;
use std::future::Future;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;

/// Shortest and longest interval between attempts at a failed call.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Interval between requests for the turn.
const TURN_INTERVAL: Duration = Duration::from_millis(200);

/// Drives one run.
pub struct Driver<C, L> {
    /// Id of the record.
    run: RunId,
    /// Identity for the epochs and the turn.
    identity: RunId,
    job: Job,
    /// Fetches the input, if it is remote.
    fetch: Option<Box<dyn Fetcher>>,
    cluster: C,
    log: L,
    status: watch::Sender<Status>,
    orders: watch::Receiver<Order>,
    state: RunState,
    version: u64,
    rates: Vec<Vec<Hits>>,
    history: RankHistory,
    /// Row of the last epoch, written with the next record.
    pending_row: Option<Row>,
    /// The input, if the run was resumed with another content, until it is known to have the epochs that the run has learned.
    changed_input: Option<Input>,
    /// When this driver started, and with how many epochs and updates done.
    started: (Instant, u64, u64),
    elapsed_before_ms: u64,
}

/// Ids whose keys this driver has sent to the cluster.
#[derive(Debug, Default)]
pub struct SentKeys(HashSet<MemoryId>);

impl SentKeys {
    /// Returns whether the key of `id` was sent and stored.
    pub fn contains(&self, id: MemoryId) -> bool {
        self.0.contains(&id)
    }

    fn record(&mut self, content: &Content) {
        if let Content::Events(events) = content {
            self.0.extend(events.iter().filter(|event| event.key.is_some()).map(|event| event.id));
        }
    }
}

/// Why a driver stops before its run is complete.
#[derive(Debug)]
enum Interruption {
    /// Another driver has the run.
    Superseded,
    Suspended,
    Cancelled,
    Failed {
        code: &'static str,
        message: String,
    },
}

impl From<SourceError> for Interruption {
    fn from(error: SourceError) -> Self {
        Self::Failed { code: error.code(), message: error.without_content() }
    }
}

impl<C: Cluster, L: RunLog> Driver<C, L> {
    /// Creates a driver for a run whose record is in `log`, at `version`.
    pub fn new(
        run: RunId,
        job: Job,
        (state, version): (RunState, u64),
        cluster: C,
        log: L,
        status: watch::Sender<Status>,
        orders: watch::Receiver<Order>,
    ) -> Self {
        let started = (Instant::now(), state.done, state.updates);
        let elapsed_before_ms = state.elapsed_ms;
        let identity = state.identity(run);
        Self {
            run,
            identity,
            job,
            fetch: None,
            cluster,
            log,
            status,
            orders,
            state,
            version,
            rates: Vec::new(),
            history: RankHistory::default(),
            pending_row: None,
            changed_input: None,
            started,
            elapsed_before_ms,
        }
    }

    /// Uses a fetcher for the input before it is opened.
    #[must_use]
    pub fn with_fetcher(self, fetch: Box<dyn Fetcher>) -> Self {
        Self { fetch: Some(fetch), ..self }
    }

    /// Drives the run to its end, however long the cluster takes. If dropped at any await, another driver can continue.
    pub async fn run(mut self) {
        let result = self.drive().await;
        let (phase, code, message) = match result {
            Ok(()) => (Phase::Succeeded, "", String::new()),
            Err(Interruption::Superseded) => return,
            Err(Interruption::Suspended) => {
                self.state.suspended = true;
                (self.state.phase, "", String::new())
            }
            Err(Interruption::Cancelled) => (Phase::Cancelled, "", "cancelled".to_owned()),
            Err(Interruption::Failed { code, message }) => (Phase::Failed, code, message),
        };
        if phase.is_final() {
            self.keep_metrics();
            if phase != Phase::Succeeded {
                self.state.end(phase, code, message, SystemTime::now());
            }
        }
        if phase != Phase::Succeeded && self.record().await.is_err() {
            return;
        }
        // The turn is released before the end is visible, so that the next run finds it free.
        let _ = self.persist(|| self.cluster.release_turn(self.identity)).await;
        self.publish_status(None);
    }

    async fn drive(&mut self) -> Result<(), Interruption> {
        self.wait_for_turn().await?;
        self.fetch().await?;
        let source = self.open().await?;
        let mut sent_keys = SentKeys::default();
        let mut prediction = Prediction::new(&self.job.top_k, self.job.skip);
        let mut source = self.catch_up(source, &mut prediction).await?;
        if self.state.phase != Phase::Running {
            self.state.phase = Phase::Running;
            self.record().await?;
        }
        self.publish_status(None);
        while !self.is_complete() {
            let (rest, epoch) = match next(&self.orders, source).await {
                Err(stop @ (Interruption::Suspended | Interruption::Cancelled)) => {
                    self.record().await?;
                    return Err(stop);
                }
                read => read?,
            };
            source = rest;
            if self.state.predicted.is_some() {
                // Parts of it may have been applied before the run ended.
                self.check_learned(self.state.done, epoch.as_ref(), self.state.sent.as_deref())?;
            }
            let Some(epoch) = epoch else { break };
            self.accept_input();
            let fingerprint = epoch.fingerprint();
            let stop = match *self.orders.borrow() {
                Order::Continue => None,
                Order::Suspend => Some(Interruption::Suspended),
                Order::Cancel => Some(Interruption::Cancelled),
            };
            if let Some(stop) = stop {
                self.record().await?;
                return Err(stop);
            }
            let mut span = Span::root("epoch");
            span.set("engram.run.name", self.state.name.clone());
            span.set("engram.run.epoch", epoch.number + 1);
            span.link_agreed(self.run_trace());
            let learned = in_span(&span, self.learn_epoch(&mut prediction, &epoch, &fingerprint, &mut sent_keys)).await;
            drop(span);
            let (row, note) = learned?;
            self.pending_row = Some(Row { row, note, fingerprint: Some(fingerprint) });
        }
        self.accept_input();
        self.state.result = Some(self.findings().await?);
        self.state.end(Phase::Succeeded, "", String::new(), SystemTime::now());
        self.keep_metrics();
        self.record().await
    }

    /// Predicts, records and learns an epoch.
    async fn learn_epoch(
        &mut self,
        prediction: &mut Prediction,
        epoch: &Epoch,
        fingerprint: &str,
        sent_keys: &mut SentKeys,
    ) -> Result<(EpochRow, Option<RankNote>), Interruption> {
        let hits = in_span(&Span::child("predict"), self.predict(prediction, epoch)).await?;
        self.state.sent = Some(fingerprint.to_owned());
        in_span(&Span::child("record"), self.record()).await?;
        let outcome = self.learn(epoch, sent_keys).await?;
        sent_keys.record(&epoch.content);
        self.close(epoch, outcome, hits).await
    }

    /// Returns the trace of the run.
    fn run_trace(&self) -> engram_trace::Context {
        engram_trace::Context::of("run", &self.run.0.to_be_bytes())
    }

    async fn wait_for_turn(&mut self) -> Result<(), Interruption> {
        loop {
            match self
                .persist(|| self.cluster.acquire_turn(self.identity, &self.state.name, self.state.submitted_ms))
                .await?
            {
                Turn::Granted => {
                    self.status.send_modify(|status| status.message.clear());
                    return Ok(());
                }
                Turn::Held { holder: by, runs_ahead: before } => {
                    let others = if before > 0 { format!(", {before} before it") } else { String::new() };
                    self.status.send_modify(|status| status.message = format!("waits for run {by} to end{others}"));
                    self.pause(TURN_INTERVAL).await?;
                    // Nothing is in progress that would have to be completed first.
                    if *self.orders.borrow() == Order::Suspend {
                        return Err(Interruption::Suspended);
                    }
                }
            }
        }
    }

    /// Fetches the input, however long that takes. The run may be stopped meanwhile without side effects.
    async fn fetch(&mut self) -> Result<(), Interruption> {
        let Some(fetch) = self.fetch.take() else { return Ok(()) };
        if self.state.phase != Phase::Running {
            self.state.phase = Phase::Running;
            self.record().await?;
        }
        self.publish_status(None);
        let mut orders = self.orders.clone();
        let fetched = tokio::select! {
            fetched = fetch.fetch(&self.status) => fetched,
            Ok(order) = orders.wait_for(|order| *order != Order::Continue) => {
                return Err(if *order == Order::Cancel { Interruption::Cancelled } else { Interruption::Suspended });
            }
        };
        let origin = fetched.map_err(|FetchError { code, message }| Interruption::Failed { code, message })?;
        if let SourceOptions::Events(events) = &mut self.job.source {
            events.origin = origin;
        }
        Ok(())
    }

    /// Opens the source and checks that it is the one that the run started with.
    async fn open(&mut self) -> Result<Box<dyn Source>, Interruption> {
        let mut options = self.job.source.clone();
        if let (SourceOptions::Git(git), Some(Input { revision: Some(commit), .. })) = (&mut options, &self.state.input)
            && !self.state.resumed
        {
            git.revision.clone_from(commit);
        }
        let (pinned, content) = blocking(&self.orders, move |stop| pin(&options, stop)).await?;
        let revision = matches!(&pinned, SourceOptions::Git(_)).then(|| content.clone());
        match &self.state.input {
            Some(input) if input.content != content && self.state.resumed => {
                self.changed_input = Some(Input { content, revision });
            }
            Some(input) if input.content != content => {
                return Err(Interruption::Failed {
                    code: "ENG-0302",
                    message: format!(
                        "the input changed while the run learned: it was {}, now it is {content}; submit the run again: it \
                         continues if the epochs that it has learned are unchanged",
                        input.content
                    ),
                });
            }
            Some(_) => {}
            None => {
                self.state.input = Some(Input { content, revision });
            }
        }
        if let Some(experiment) = self.job.experiment().cloned()
            && !self.state.populated
        {
            self.populate(experiment.population()).await?;
        }
        // Always from the beginning: the baselines of the prediction depend on all epochs so far.
        let source = blocking(&self.orders, move |_| source::open(&pinned, Limits::default(), 0)).await?;
        self.state.epochs = match (source.epochs(), self.job.epochs) {
            (Some(available), Some(requested)) => Some(available.min(requested)),
            (available, requested) => available.or(requested),
        };
        Ok(source)
    }

    async fn populate(&mut self, population: Population) -> Result<(), Interruption> {
        let current = self.persist(|| self.cluster.quality()).await?;
        let existing: u64 =
            [Population::REWARDED, Population::PUNISHED].map(|group| current.group(group).count).iter().sum();
        // An interrupted first attempt has left part of the population, and nothing else.
        if self.state.done == 0 && existing > 0 && self.state.phase == Phase::Queued && !self.state.resumed {
            return Err(Interruption::Failed {
                code: "ENG-0306",
                message: format!(
                    "a synthetic run needs groups {} and {} to itself, and they hold {existing} memories; \
                     give it a cluster of its own",
                    Population::REWARDED,
                    Population::PUNISHED
                ),
            });
        }
        self.state.phase = Phase::Running;
        self.record().await?;
        self.status.send_modify(|status| {
            status.phase = Phase::Running;
            status.message = format!("inserts {} memories", population.memories);
        });
        let counts_updates = self.job.coverage;
        let mut orders = self.orders.clone();
        let populated = self.persist(|| async {
            self.cluster.populate(&population).await?;
            // Turned off and on again, so that every count starts at zero.
            self.cluster.set_update_counting(false).await?;
            if counts_updates { self.cluster.set_update_counting(true).await } else { Ok(()) }
        });
        // Inserting millions of memories takes a while, and can be cancelled safely.
        tokio::select! {
            populated = populated => populated?,
            Ok(_) = orders.wait_for(|order| *order == Order::Cancel) => return Err(Interruption::Cancelled),
        }
        self.state.populated = true;
        self.record().await
    }

    /// Skips completed epochs, recording their touches for the baselines.
    async fn catch_up(
        &mut self,
        mut source: Box<dyn Source>,
        prediction: &mut Prediction,
    ) -> Result<Box<dyn Source>, Interruption> {
        if self.state.done == 0 {
            return Ok(source);
        }
        let entry = self.persist_log(|| self.log.load(self.run)).await?;
        let rows = entry.map(|entry| RunState::rows(&entry)).transpose();
        let rows = rows.map_err(|damaged| Interruption::Failed { code: "ENG-0302", message: damaged.to_string() })?;
        let rows = rows.unwrap_or_default();
        self.history = Row::history(&rows);
        for number in 0..self.state.done {
            let (rest, epoch) = next(&self.orders, source).await?;
            source = rest;
            let learned = rows.get(number as usize).and_then(|row| row.fingerprint.as_deref());
            self.check_learned(number, epoch.as_ref(), learned)?;
            let Some(epoch) = epoch else { break };
            prediction.score(&epoch, None);
        }
        self.rates = rows.into_iter().map(|row| row.row.hits).collect();
        Ok(source)
    }

    /// Checks an epoch of a changed input against what the run has learned, or may have sent.
    fn check_learned(&self, number: u64, epoch: Option<&Epoch>, learned: Option<&str>) -> Result<(), Interruption> {
        let Some(changed) = &self.changed_input else { return Ok(()) };
        let label = epoch.and_then(|epoch| epoch.label.as_deref());
        let name =
            label.map_or_else(|| format!("epoch {}", number + 1), |label| format!("epoch {} ({label})", number + 1));
        let message = match (epoch.map(Epoch::fingerprint), learned) {
            (Some(found), Some(learned)) if found == learned => return Ok(()),
            (Some(_), Some(_)) => format!("{name} of the input differs from the one that this run has learned"),
            (Some(_), None) => format!("{name} of the changed input cannot be compared: an earlier version learned it"),
            (None, _) => format!("{name}, which this run has learned, is missing in the input"),
        };
        let previous = self.state.input.as_ref().map_or("", |input| input.content.as_str());
        let message = format!(
            "{message} (the input was {previous}, now it is {}); restore that epoch, or learn all of the input by a run under \
             another name, which applies its epochs again",
            changed.content
        );
        Err(Interruption::Failed { code: "ENG-0302", message })
    }

    /// Uses a changed input from here on: another driver compares it as a whole.
    fn accept_input(&mut self) {
        self.state.resumed = false;
        if let Some(changed) = self.changed_input.take() {
            self.state.input = Some(changed);
        }
    }

    fn is_complete(&self) -> bool {
        let enough = self.job.epochs.is_some_and(|epochs| self.state.done >= epochs);
        let metrics = self.status.borrow().metrics.clone();
        let metric = |name: &str| metrics.get(name).copied();
        enough || (self.state.done > 0 && self.job.until.hold(metric("separation"), metric("convergence")))
    }

    /// Scores the rankings before the epoch; a score recorded by an earlier driver is kept.
    async fn predict(&mut self, prediction: &mut Prediction, epoch: &Epoch) -> Result<Vec<Hits>, Interruption> {
        if let Some(recorded) = self.state.predicted.clone() {
            prediction.score(epoch, None);
            return Ok(recorded);
        }
        let ranking = if prediction.is_scored(epoch) {
            let depth = prediction.depth();
            let top = self.persist(|| self.cluster.top(depth)).await?;
            Some(top.into_iter().map(|ranked| ranked.id).collect::<Vec<_>>())
        } else {
            None
        };
        let hits = prediction.score(epoch, ranking.as_deref());
        self.state.predicted = Some(hits.clone());
        Ok(hits)
    }

    async fn learn(&mut self, epoch: &Epoch, sent_keys: &SentKeys) -> Result<EpochOutcome, Interruption> {
        let n = LearningEpoch(epoch.number + 1);
        let outcome = self
            .persist(|| async {
                let job = &self.job;
                self.cluster.learn(self.identity, n, job.decay, &epoch.content, job.on_missing, sent_keys).await
            })
            .await?;
        self.persist(|| self.cluster.broadcast(self.identity, n, &outcome.quality)).await?;
        Ok(outcome)
    }

    /// Records a completed epoch; the row is written with the record of the next one.
    async fn close(
        &mut self,
        epoch: &Epoch,
        outcome: EpochOutcome,
        hits: Vec<Hits>,
    ) -> Result<(EpochRow, Option<RankNote>), Interruption> {
        let name = EpochName { number: epoch.number, label: epoch.label.clone() };
        let mut note = None;
        if self.job.source.is_predictable() && self.history.needs_note(epoch.number) {
            let top = self.persist(|| self.cluster.top(RankHistory::DEPTH)).await?;
            let ranking = top.iter().map(|ranked| (ranked.id.0, ranked.weight.units())).collect();
            note = Some(RankNote { epoch: name.clone(), ranking });
            note.iter().cloned().for_each(|note| self.history.note(note));
        }
        self.state.done = epoch.number + 1;
        (self.state.predicted, self.state.sent) = (None, None);
        self.state.updates += outcome.applied;
        self.state.elapsed_ms = self.elapsed_before_ms + self.started.0.elapsed().as_millis() as u64;
        let separation = self.separation(&outcome.quality);
        if !hits.is_empty() {
            self.rates.push(hits.clone());
        }
        let total = outcome.quality.total();
        let row = EpochRow {
            epoch: name,
            events: outcome.applied,
            created: outcome.created,
            memories: total.count,
            mean: total.mean(),
            separation: separation.map(Separation::to_f64),
            hits,
        };
        self.publish_status(Some((&row, separation)));
        Ok((row, note))
    }

    /// Returns the separation of an experiment; that of the first epoch is recorded.
    fn separation(&mut self, quality: &QualityVector) -> Option<Separation> {
        self.job.experiment()?;
        let (rewarded, punished) = (quality.group(Population::REWARDED), quality.group(Population::PUNISHED));
        let separation = Separation::of(&rewarded, &punished)?;
        if self.state.first.is_none() {
            let exact = |group: &GroupQuality| (u64::try_from(group.sum).unwrap_or(u64::MAX), group.count);
            self.state.first = Some(FirstSeparation { rewarded: exact(&rewarded), punished: exact(&punished) });
        }
        Some(separation)
    }

    /// Keeps the latest figures with the record, because the status ends with its driver.
    fn keep_metrics(&mut self) {
        self.state.metrics.extend(self.status.borrow().metrics.clone());
    }

    async fn findings(&self) -> Result<super::state::Findings, Interruption> {
        self.persist(|| finish::findings(&self.job, &self.state, &self.history, &self.cluster)).await
    }

    /// Writes the state, and the row of the last epoch.
    async fn record(&mut self) -> Result<(), Interruption> {
        let row = self.pending_row.take().map(|row| serde_json::to_vec(&row).expect("a row has string keys only"));
        let state = self.state.encode();
        let expected = self.version;
        self.persist_log(|| async {
            match self.log.record(self.run, expected, state.clone(), row.clone()).await {
                // Either this driver's write whose result was lost, or another driver's: the record shows.
                Err(LogError::Superseded) => match self.log.load(self.run).await? {
                    Some(entry) if entry.version == expected + 1 && entry.state == state => Ok(()),
                    _ => Err(LogError::Superseded),
                },
                other => other,
            }
        })
        .await?;
        self.version += 1;
        Ok(())
    }

    /// Publishes the status of the run.
    fn publish_status(&self, last: Option<(&EpochRow, Option<Separation>)>) {
        let (started, epochs_before, updates_before) = self.started;
        let seconds = started.elapsed().as_secs_f64().max(1e-9);
        self.status.send_modify(|status| {
            status.phase = self.state.reported_phase();
            status.epoch = self.state.done;
            status.epochs = self.state.epochs;
            status.updates = self.state.updates;
            status.elapsed_s = self.state.elapsed_ms as f64 / 1_000.0;
            if !self.state.phase.is_final() {
                status.epochs_per_s = (self.state.done - epochs_before) as f64 / seconds;
                status.updates_per_s = (self.state.updates - updates_before) as f64 / seconds;
            }
            status.message.clone_from(&self.state.message);
            if status.phase == Phase::Suspended {
                status.message = "suspended".into();
            }
            status.code.clone_from(&self.state.code);
            status.outputs.extend(self.state.outputs());
            if let Some((row, separation)) = last {
                status.label = row.epoch.label.clone().unwrap_or_default();
                status.metrics.insert("memories".into(), row.memories as f64);
                status.metrics.extend(row.mean.map(|mean| ("mean_weight".into(), mean)));
                status.metrics.extend(row.separation.map(|separation| ("separation".into(), separation)));
                let factor = separation.and_then(|now| now.factor(self.state.first?.separation()?));
                status.metrics.extend(factor.map(|factor| ("convergence".into(), factor)));
            }
            for rate in HitRate::over(self.rates.iter().map(Vec::as_slice)) {
                let k = rate.hits.k;
                status.metrics.insert(format!("hit_rate_{k}"), rate.memory());
                status.metrics.insert(format!("hit_rate_{k}_most_frequent"), rate.frequent());
                status.metrics.insert(format!("hit_rate_{k}_most_recent"), rate.recent());
            }
        });
    }

    /// Retries temporary failures until the call succeeds or the run is cancelled.
    async fn persist<T, F>(&self, attempt: impl Fn() -> F) -> Result<T, Interruption>
    where
        F: Future<Output = Result<T, ClusterError>>,
    {
        self.persist_log(|| async { attempt().await.map_err(LogError::from) }).await
    }

    async fn persist_log<T, F>(&self, attempt: impl Fn() -> F) -> Result<T, Interruption>
    where
        F: Future<Output = Result<T, LogError>>,
    {
        let mut wait = RETRY.0;
        loop {
            match attempt().await {
                Ok(completed) => return Ok(completed),
                Err(LogError::Superseded) => return Err(Interruption::Superseded),
                Err(LogError::Cluster(ClusterError::Permanent { code, message })) => {
                    return Err(Interruption::Failed { code, message });
                }
                Err(LogError::Cluster(ClusterError::Temporary(message))) => {
                    tracing::warn!(run = %self.run, %message, "run waits for the cluster");
                    self.status.send_modify(|status| status.message = format!("waits: {message}"));
                }
            }
            self.pause(wait).await?;
            wait = (wait * 2).min(RETRY.1);
        }
    }

    /// Waits, unless the run is cancelled meanwhile.
    async fn pause(&self, wait: Duration) -> Result<(), Interruption> {
        let mut orders = self.orders.clone();
        tokio::select! {
            () = tokio::time::sleep(wait) => Ok(()),
            Ok(_) = orders.wait_for(|order| *order == Order::Cancel) => Err(Interruption::Cancelled),
        }
    }
}

impl FirstSeparation {
    /// Returns the separation that it represents.
    pub(super) fn separation(self) -> Option<Separation> {
        let group = |(sum, count)| GroupQuality { count, sum: u128::from(sum), ..GroupQuality::EMPTY };
        Separation::of(&group(self.rewarded), &group(self.punished))
    }
}

/// Stops a read when the driver no longer waits for it, also if the driver is dropped.
struct StopOnDrop(StopFlag);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.set();
    }
}

/// Reads the next epoch on a thread where blocking is allowed.
async fn next(
    orders: &watch::Receiver<Order>,
    mut source: Box<dyn Source>,
) -> Result<(Box<dyn Source>, Option<Epoch>), Interruption> {
    blocking(orders, move |stop| {
        source.stop_by(stop.clone());
        let epoch = source.next_epoch()?;
        Ok((source, epoch))
    })
    .await
}

/// Reads on a thread where blocking is allowed. An order ends the wait at once, however long the read takes, and stops the read.
async fn blocking<T: Send + 'static>(
    orders: &watch::Receiver<Order>,
    task: impl FnOnce(&StopFlag) -> Result<T, SourceError> + Send + 'static,
) -> Result<T, Interruption> {
    let stop = StopOnDrop(StopFlag::default());
    let flag = stop.0.clone();
    let mut orders = orders.clone();
    let joined = tokio::select! {
        biased;
        joined = tokio::task::spawn_blocking(move || task(&flag)) => joined,
        Ok(order) = orders.wait_for(|order| *order != Order::Continue) => {
            return Err(if *order == Order::Cancel { Interruption::Cancelled } else { Interruption::Suspended });
        }
    };
    match joined {
        Ok(result) => result.map_err(Interruption::from),
        Err(panicked) => {
            Err(Interruption::Failed { code: "ENG-0302", message: format!("failed to read the source: {panicked}") })
        }
    }
}
