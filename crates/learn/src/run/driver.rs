//! The loop of a run.

use super::cluster::{Cluster, ClusterError, Learned, LogError, RunLog, Turn};
use super::fetch::{Fetch, Unfetched};
use super::finish;
use super::job::Job;
use super::pin::pin;
use super::state::{FirstSeparation, Input, Row, RunState};
use super::status::{Order, Phase, Status};
use crate::prediction::{HitRate, Hits, Prediction};
use crate::report::{EpochName, EpochRow, RankHistory, RankNote};
use crate::source::{self, Content, Epoch, Limits, Population, Source, SourceError, SourceOptions};
use crate::statistics::Separation;
use engram_memory::{GroupQuality, LearningEpoch, MemoryId, QualityVector, RunId};
use hashbrown::HashSet;
use std::future::Future;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Shortest and longest wait between two attempts at what a cluster could not do.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// How often a run that waits for its turn asks again.
const TURN: Duration = Duration::from_millis(200);

/// Drives one run.
pub struct Driver<C, L> {
    run: RunId,
    job: Job,
    /// Who brings the input, where it is not here.
    fetch: Option<Box<dyn Fetch>>,
    cluster: C,
    log: L,
    status: watch::Sender<Status>,
    orders: watch::Receiver<Order>,
    state: RunState,
    version: u64,
    rates: Vec<Vec<Hits>>,
    history: RankHistory,
    /// When this driver began, and with how many epochs and updates done.
    began: (Instant, u64, u64),
    elapsed_before_ms: u64,
}

/// The ids whose keys this driver has told the cluster.
#[derive(Debug, Default)]
pub struct KnownKeys(HashSet<MemoryId>);

impl KnownKeys {
    /// Whether the key of `id` was told and stored.
    pub fn contains(&self, id: MemoryId) -> bool {
        self.0.contains(&id)
    }

    fn learn(&mut self, content: &Content) {
        if let Content::Events(events) = content {
            self.0.extend(events.iter().filter(|event| event.key.is_some()).map(|event| event.id));
        }
    }
}

/// Why a driver stops before the end of its run.
#[derive(Debug)]
enum Stop {
    /// Another driver has the run.
    Superseded,
    Suspended,
    Cancelled,
    Failed {
        code: &'static str,
        message: String,
    },
}

impl From<SourceError> for Stop {
    fn from(error: SourceError) -> Self {
        Self::Failed { code: error.code(), message: error.to_string() }
    }
}

impl<C: Cluster, L: RunLog> Driver<C, L> {
    /// A driver for a run whose record is in `log`, at `version`.
    pub fn new(
        run: RunId,
        job: Job,
        (state, version): (RunState, u64),
        cluster: C,
        log: L,
        status: watch::Sender<Status>,
        orders: watch::Receiver<Order>,
    ) -> Self {
        let began = (Instant::now(), state.done, state.updates);
        let elapsed_before_ms = state.elapsed_ms;
        Self {
            run,
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
            began,
            elapsed_before_ms,
        }
    }

    /// The same, with somebody who brings the input before it is opened.
    #[must_use]
    pub fn fetched_by(self, fetch: Box<dyn Fetch>) -> Self {
        Self { fetch: Some(fetch), ..self }
    }

    /// Drives the run to its end, however long the cluster takes; dropped at any await, another driver can go on.
    pub async fn run(mut self) {
        let ended = self.drive().await;
        let (phase, code, message) = match ended {
            Ok(()) => (Phase::Succeeded, "", String::new()),
            Err(Stop::Superseded) => return,
            Err(Stop::Suspended) => {
                self.state.suspended = true;
                (self.state.phase, "", String::new())
            }
            Err(Stop::Cancelled) => (Phase::Cancelled, "", "cancelled".to_owned()),
            Err(Stop::Failed { code, message }) => (Phase::Failed, code, message),
        };
        (self.state.phase, self.state.code, self.state.message) = (phase, code.to_owned(), message);
        if phase != Phase::Succeeded && self.record(None).await.is_err() {
            return;
        }
        // The turn goes back before anybody hears of the end, so that the next run finds it free.
        let _ = self.persist(|| self.cluster.return_turn(self.run)).await;
        self.tell(None);
    }

    async fn drive(&mut self) -> Result<(), Stop> {
        self.wait_for_turn().await?;
        self.fetch().await?;
        let source = self.open().await?;
        let mut known = KnownKeys::default();
        let mut prediction = Prediction::new(&self.job.top_k, self.job.skip);
        let mut source = self.catch_up(source, &mut prediction).await?;
        if self.state.phase != Phase::Running {
            self.state.phase = Phase::Running;
            self.record(None).await?;
        }
        self.tell(None);
        let mut row = None;
        while !self.is_complete() {
            let (rest, epoch) = next(source).await?;
            source = rest;
            let Some(epoch) = epoch else { break };
            let stop = match *self.orders.borrow() {
                Order::GoOn => None,
                Order::Suspend => Some(Stop::Suspended),
                Order::Cancel => Some(Stop::Cancelled),
            };
            if let Some(stop) = stop {
                self.record(row.take()).await?;
                return Err(stop);
            }
            let hits = self.predict(&mut prediction, &epoch).await?;
            self.record(row.take()).await?;
            let learned = self.learn(&epoch, &known).await?;
            known.learn(&epoch.content);
            row = Some(self.close(&epoch, learned, hits).await?);
        }
        self.state.result = Some(self.find().await?);
        self.state.phase = Phase::Succeeded;
        self.record(row).await
    }

    async fn wait_for_turn(&mut self) -> Result<(), Stop> {
        loop {
            match self.persist(|| self.cluster.take_turn(self.run, &self.state.name, self.state.submitted_ms)).await? {
                Turn::Granted => {
                    self.status.send_modify(|status| status.message.clear());
                    return Ok(());
                }
                Turn::Held { by, before } => {
                    let others = if before > 0 { format!(", {before} before it") } else { String::new() };
                    self.status.send_modify(|status| status.message = format!("waits for run {by} to end{others}"));
                    self.pause(TURN).await?;
                    // Nothing is under way that would have to be finished first.
                    if *self.orders.borrow() == Order::Suspend {
                        return Err(Stop::Suspended);
                    }
                }
            }
        }
    }

    /// Has the input brought here. It takes as long as it takes, and nothing is torn when the run is stopped meanwhile.
    async fn fetch(&mut self) -> Result<(), Stop> {
        let Some(fetch) = self.fetch.take() else { return Ok(()) };
        if self.state.phase != Phase::Running {
            self.state.phase = Phase::Running;
            self.record(None).await?;
        }
        self.tell(None);
        let mut orders = self.orders.clone();
        let fetched = tokio::select! {
            fetched = fetch.fetch(&self.status) => fetched,
            Ok(order) = orders.wait_for(|order| *order != Order::GoOn) => {
                return Err(if *order == Order::Cancel { Stop::Cancelled } else { Stop::Suspended });
            }
        };
        let origin = fetched.map_err(|Unfetched { code, message }| Stop::Failed { code, message })?;
        if let SourceOptions::Events(events) = &mut self.job.source {
            events.origin = origin;
        }
        Ok(())
    }

    /// Opens the source where the run stands, and makes sure that it is the one the run began with.
    async fn open(&mut self) -> Result<Box<dyn Source>, Stop> {
        let mut options = self.job.source.clone();
        if let (SourceOptions::Git(git), Some(Input { revision: Some(commit), .. })) = (&mut options, &self.state.input)
        {
            git.revision.clone_from(commit);
        }
        let (pinned, content) = blocking(move || pin(&options)).await?;
        match &self.state.input {
            Some(input) if input.content != content => {
                return Err(Stop::Failed {
                    code: "ENG-0302",
                    message: format!(
                        "the input changed since the run began: it was {}, now it is {content}; \
                         start a new run under a new name",
                        input.content
                    ),
                });
            }
            Some(_) => {}
            None => {
                let revision = matches!(&pinned, SourceOptions::Git(_)).then(|| content.clone());
                self.state.input = Some(Input { content, revision });
            }
        }
        if let Some(experiment) = self.job.experiment().cloned()
            && !self.state.populated
        {
            self.populate(experiment.population()).await?;
        }
        // From the beginning, always: the baselines of the prediction are what the epochs so far have touched.
        let source = blocking(move || source::open(&pinned, Limits::default(), 0)).await?;
        self.state.epochs = match (source.epochs(), self.job.epochs) {
            (Some(there), Some(wanted)) => Some(there.min(wanted)),
            (there, wanted) => there.or(wanted),
        };
        Ok(source)
    }

    async fn populate(&mut self, population: Population) -> Result<(), Stop> {
        let here = self.persist(|| self.cluster.quality()).await?;
        let held: u64 = [Population::REWARDED, Population::PUNISHED].map(|group| here.group(group).count).iter().sum();
        // A first attempt that was cut short has left some of the population there, and nothing else.
        if self.state.done == 0 && held > 0 && self.state.phase == Phase::Queued {
            return Err(Stop::Failed {
                code: "ENG-0306",
                message: format!(
                    "a synthetic run needs groups {} and {} to itself, and they hold {held} memories; \
                     give it a cluster of its own",
                    Population::REWARDED,
                    Population::PUNISHED
                ),
            });
        }
        self.state.phase = Phase::Running;
        self.record(None).await?;
        self.status.send_modify(|status| {
            status.phase = Phase::Running;
            status.message = format!("inserts {} memories", population.memories);
        });
        let counted = self.job.coverage;
        let mut orders = self.orders.clone();
        let populated = self.persist(|| async {
            self.cluster.populate(&population).await?;
            // Off and on again: every count starts at zero.
            self.cluster.count_updates(false).await?;
            if counted { self.cluster.count_updates(true).await } else { Ok(()) }
        });
        // Millions of memories take a while, and no epoch is torn.
        tokio::select! {
            populated = populated => populated?,
            Ok(_) = orders.wait_for(|order| *order == Order::Cancel) => return Err(Stop::Cancelled),
        }
        self.state.populated = true;
        self.record(None).await
    }

    /// Reads past the epochs that are done, so that the baselines know what they touched.
    async fn catch_up(
        &mut self,
        mut source: Box<dyn Source>,
        prediction: &mut Prediction,
    ) -> Result<Box<dyn Source>, Stop> {
        if self.state.done == 0 {
            return Ok(source);
        }
        let entry = self.persist_log(|| self.log.load(self.run)).await?;
        let rows = entry.map(|entry| RunState::rows(&entry)).transpose();
        let rows = rows.map_err(|damaged| Stop::Failed { code: "ENG-0302", message: damaged.to_string() })?;
        let rows = rows.unwrap_or_default();
        self.history = Row::remember(&rows);
        self.rates = rows.into_iter().map(|row| row.row.hits).collect();
        for _ in 0..self.state.done {
            let (rest, epoch) = next(source).await?;
            source = rest;
            let Some(epoch) = epoch else { break };
            prediction.turn(&epoch, None);
        }
        Ok(source)
    }

    fn is_complete(&self) -> bool {
        let enough = self.job.epochs.is_some_and(|epochs| self.state.done >= epochs);
        let metrics = self.status.borrow().metrics.clone();
        let figure = |name: &str| metrics.get(name).copied();
        enough || (self.state.done > 0 && self.job.until.hold(figure("separation"), figure("convergence")))
    }

    /// Scores the rankings as they stand before the epoch; what an earlier driver noted holds.
    async fn predict(&mut self, prediction: &mut Prediction, epoch: &Epoch) -> Result<Vec<Hits>, Stop> {
        if let Some(noted) = self.state.predicted.clone() {
            prediction.turn(epoch, None);
            return Ok(noted);
        }
        let ranking = if prediction.asks(epoch) {
            let depth = prediction.depth();
            let top = self.persist(|| self.cluster.top(depth)).await?;
            Some(top.into_iter().map(|ranked| ranked.id).collect::<Vec<_>>())
        } else {
            None
        };
        let hits = prediction.turn(epoch, ranking.as_deref());
        self.state.predicted = Some(hits.clone());
        Ok(hits)
    }

    async fn learn(&mut self, epoch: &Epoch, known: &KnownKeys) -> Result<Learned, Stop> {
        let n = LearningEpoch(epoch.number + 1);
        let learned = self
            .persist(|| async {
                let job = &self.job;
                self.cluster.learn(self.run, n, job.decay, &epoch.content, job.on_missing, known).await
            })
            .await?;
        self.persist(|| self.cluster.broadcast(self.run, n, &learned.quality)).await?;
        Ok(learned)
    }

    /// Takes note of an epoch that is done; the note is written with the record of the next one.
    async fn close(&mut self, epoch: &Epoch, learned: Learned, hits: Vec<Hits>) -> Result<Row, Stop> {
        let name = EpochName { number: epoch.number, label: epoch.label.clone() };
        let mut note = None;
        if self.job.source.is_predictable() && self.history.wants(epoch.number) {
            let top = self.persist(|| self.cluster.top(RankHistory::DEPTH)).await?;
            let ranking = top.iter().map(|ranked| (ranked.id.0, ranked.weight.units())).collect();
            note = Some(RankNote { epoch: name.clone(), ranking });
            note.iter().cloned().for_each(|note| self.history.note(note));
        }
        self.state.done = epoch.number + 1;
        self.state.predicted = None;
        self.state.updates += learned.applied;
        self.state.elapsed_ms = self.elapsed_before_ms + self.began.0.elapsed().as_millis() as u64;
        let separation = self.separation(&learned.quality);
        if !hits.is_empty() {
            self.rates.push(hits.clone());
        }
        let total = learned.quality.total();
        let row = EpochRow {
            epoch: name,
            events: learned.applied,
            created: learned.created,
            memories: total.count,
            mean: total.mean(),
            separation: separation.map(Separation::to_f64),
            hits,
        };
        self.tell(Some((&row, separation)));
        Ok(Row { row, note })
    }

    /// Separation of an experiment; that of the first epoch is kept.
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

    async fn find(&self) -> Result<super::state::Findings, Stop> {
        self.persist(|| finish::find(&self.job, &self.state, &self.history, &self.cluster)).await
    }

    /// Writes the state, and the row of the last epoch.
    async fn record(&mut self, row: Option<Row>) -> Result<(), Stop> {
        let row = row.map(|row| serde_json::to_vec(&row).expect("a row has string keys only"));
        let state = self.state.encode();
        let expected = self.version;
        self.persist_log(|| async {
            match self.log.record(self.run, expected, state.clone(), row.clone()).await {
                // The write whose answer was lost, or another driver's? The record tells.
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

    /// Says where the run stands.
    fn tell(&self, last: Option<(&EpochRow, Option<Separation>)>) {
        let (began, epochs_before, updates_before) = self.began;
        let seconds = began.elapsed().as_secs_f64().max(1e-9);
        self.status.send_modify(|status| {
            status.phase = self.state.told_phase();
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

    /// Repeats what a cluster cannot do yet until it can, or the run is cancelled.
    async fn persist<T, F>(&self, attempt: impl Fn() -> F) -> Result<T, Stop>
    where
        F: Future<Output = Result<T, ClusterError>>,
    {
        self.persist_log(|| async { attempt().await.map_err(LogError::from) }).await
    }

    async fn persist_log<T, F>(&self, attempt: impl Fn() -> F) -> Result<T, Stop>
    where
        F: Future<Output = Result<T, LogError>>,
    {
        let mut wait = RETRY.0;
        loop {
            match attempt().await {
                Ok(done) => return Ok(done),
                Err(LogError::Superseded) => return Err(Stop::Superseded),
                Err(LogError::Cluster(ClusterError::Permanent { code, message })) => {
                    return Err(Stop::Failed { code, message });
                }
                Err(LogError::Cluster(ClusterError::Temporary(message))) => {
                    tracing::warn!(run = %self.run, %message, "the run waits for the cluster");
                    self.status.send_modify(|status| status.message = format!("waits: {message}"));
                }
            }
            self.pause(wait).await?;
            wait = (wait * 2).min(RETRY.1);
        }
    }

    /// Waits, unless the run is cancelled meanwhile.
    async fn pause(&self, wait: Duration) -> Result<(), Stop> {
        let mut orders = self.orders.clone();
        tokio::select! {
            () = tokio::time::sleep(wait) => Ok(()),
            Ok(_) = orders.wait_for(|order| *order == Order::Cancel) => Err(Stop::Cancelled),
        }
    }
}

impl FirstSeparation {
    /// The separation that it stands for.
    pub(super) fn separation(self) -> Option<Separation> {
        let group = |(sum, count)| GroupQuality { count, sum: u128::from(sum), ..GroupQuality::EMPTY };
        Separation::of(&group(self.rewarded), &group(self.punished))
    }
}

/// Reads the next epoch where reading a file does not hold up other tasks.
async fn next(mut source: Box<dyn Source>) -> Result<(Box<dyn Source>, Option<Epoch>), Stop> {
    blocking(move || {
        let epoch = source.next_epoch()?;
        Ok((source, epoch))
    })
    .await
}

async fn blocking<T: Send + 'static>(
    task: impl FnOnce() -> Result<T, SourceError> + Send + 'static,
) -> Result<T, Stop> {
    let joined = tokio::task::spawn_blocking(task).await;
    match joined {
        Ok(result) => result.map_err(Stop::from),
        Err(panicked) => {
            Err(Stop::Failed { code: "ENG-0302", message: format!("failed to read the source: {panicked}") })
        }
    }
}
