//! Simulation of a run in virtual time: the real round state machine and the real strategies, over clients with synthetic data.
//!
//! Client k has the loss `a_k/2 * norm(y - t_k)^2`, so local training and the global loss are closed forms and 10^5 clients fit on one core.
//! Laws: how long training takes, how often a client disappears, how much the clients' optima differ.

mod clients;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use chacha20::ChaCha20Rng;
use serde::{Deserialize, Serialize};

use self::clients::{Population, half_normal, normal};
use crate::error::{InvalidInput, require};
use crate::model::{ClientId, Update};
use crate::random::{Seed, derive, stream, unit};
use crate::round::{Action, Batch, Event, Mode, Outcome, Refusal, RoundSettings, Rounds, UploadedUpdate};
use crate::strategy::{Aggregator, Strategy};

/// How long a task takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum StragglerLaw {
    /// Absolute value of a normal number: the law that Nguyen et al. 2022 measured on devices.
    HalfNormal {
        /// Mean seconds of a task.
        mean_seconds: f64,
    },
    /// Log-normal: a heavy tail.
    LogNormal {
        /// Median seconds of a task.
        median_seconds: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
    },
}

impl StragglerLaw {
    fn validate(self) -> Result<(), InvalidInput> {
        let (Self::HalfNormal { mean_seconds: seconds } | Self::LogNormal { median_seconds: seconds, .. }) = self;
        require(seconds > 0.0 && seconds.is_finite(), "straggler.seconds", seconds, "above 0")?;
        let Self::LogNormal { sigma, .. } = self else { return Ok(()) };
        require((0.0..=4.0).contains(&sigma), "straggler.sigma", sigma, "0 to 4")
    }

    /// Milliseconds of one task, at least 1.
    fn draw(self, rng: &mut ChaCha20Rng) -> u64 {
        let seconds = match self {
            Self::HalfNormal { mean_seconds } => mean_seconds * half_normal(rng),
            Self::LogNormal { median_seconds, sigma } => median_seconds * (sigma * normal(rng)).exp(),
        };
        (seconds * 1e3) as u64 + 1
    }
}

/// Settings of a simulation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SimulationSettings {
    /// Number of clients.
    pub clients: u64,
    /// Parameters of the model.
    pub parameters: usize,
    /// Strategy; SCAFFOLD is not simulated.
    pub strategy: Strategy,
    /// Mode of the rounds.
    pub mode: Mode,
    /// How long training takes.
    pub straggler: StragglerLaw,
    /// Probability that a client disappears during a task.
    pub drop_out: f64,
    /// Standard deviation of the clients' optima around the common one, which is 1 from the initial model per parameter.
    pub heterogeneity: f64,
    /// Local gradient steps per task.
    pub local_steps: u32,
    /// Local rate, in (0, 1): the mean curvature is 1.
    pub local_rate: f64,
    /// Standard deviation of the noise on a client's delta, per parameter.
    pub gradient_noise: f64,
    /// Mean seconds between a client's task and its next check-in.
    pub pause_seconds: f64,
    /// Deadline of a synchronous round and lease of a task, in seconds.
    pub deadline_seconds: f64,
    /// The run ends when the loss above the minimum falls below this share of the initial one.
    pub target: f64,
    /// The run ends after this number of aggregations.
    pub versions: u64,
    /// Seed of everything.
    pub seed: Seed,
}

impl SimulationSettings {
    /// Checks the ranges.
    ///
    /// # Errors
    /// When a number is out of its range, or the strategy is not simulated.
    pub fn validate(&self) -> Result<(), InvalidInput> {
        require((1..=10_000_000).contains(&self.clients), "clients", self.clients, "1 to 10000000")?;
        require((1..=10_000).contains(&self.parameters), "parameters", self.parameters, "1 to 10000")?;
        let control = self.strategy.has_control();
        require(!control, "strategy", "Scaffold", "a strategy without control variates")?;
        let buffered = matches!(self.mode, Mode::Buffered { .. });
        let masked = matches!(self.mode, Mode::Cohorts { .. });
        require(!masked, "mode", "Cohorts", "a mode without secure aggregation")?;
        let buffer_strategy = matches!(self.strategy, Strategy::FedBuff { .. });
        require(buffered == buffer_strategy, "mode", "not that of the strategy", "Buffered with FedBuff only")?;
        self.straggler.validate()?;
        require((0.0..1.0).contains(&self.drop_out), "dropOut", self.drop_out, "0 to below 1")?;
        require(
            self.heterogeneity >= 0.0 && self.heterogeneity.is_finite(),
            "heterogeneity",
            self.heterogeneity,
            "at least 0",
        )?;
        require(
            self.gradient_noise >= 0.0 && self.gradient_noise.is_finite(),
            "gradientNoise",
            self.gradient_noise,
            "at least 0",
        )?;
        require(self.local_steps > 0, "localSteps", self.local_steps, "at least 1")?;
        require(self.local_rate > 0.0 && self.local_rate < 1.0, "localRate", self.local_rate, "above 0, below 1")?;
        require(
            self.pause_seconds > 0.0 && self.pause_seconds.is_finite(),
            "pauseSeconds",
            self.pause_seconds,
            "above 0",
        )?;
        let deadline = self.deadline_seconds;
        require((0.001..1e9).contains(&deadline), "deadlineSeconds", deadline, "0.001 to 1e9")?;
        require(self.target > 0.0 && self.target < 1.0, "target", self.target, "above 0, below 1")?;
        require(self.versions > 0, "versions", self.versions, "at least 1")
    }
}

/// State after an aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryPoint {
    /// Simulated seconds.
    pub seconds: f64,
    /// Version of the model.
    pub version: u64,
    /// Updates in the batch.
    pub updates: usize,
    /// Loss above its minimum, as a share of the initial one.
    pub loss: f64,
}

/// What a simulation showed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SimulationReport {
    /// One point per aggregation.
    pub history: Vec<HistoryPoint>,
    /// Simulated seconds to the target; `None` when it was not reached.
    pub seconds_to_target: Option<f64>,
    /// Clients with at least one update in the model.
    pub participants: u64,
    /// Updates in the model.
    pub updates: u64,
    /// Tasks that were assigned.
    pub tasks: u64,
    /// Accepted updates that were not used, and updates that were refused.
    pub wasted: u64,
    /// Rounds below their minimum.
    pub aborted: u64,
    /// Loss of each client after training, at the 10th, 50th and 90th percentile.
    pub client_loss_percentiles: [f64; 3],
    /// How the run ended, when not at its target.
    pub outcome: Option<Outcome>,
}

/// What happens next at a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Occurrence {
    CheckIn(ClientId),
    /// The check-in of a waiting client expires, so it checks in again.
    Renewal(ClientId),
    Upload(ClientId, u64),
    Tick,
}

/// Clients that may wait at a time, beyond those that can be assigned.
const SPARE_CLIENTS: usize = 1_000;
/// How long a client stays available after a check-in.
const CHECK_IN_MILLIS: u64 = 3_600_000;

/// A run in virtual time.
pub struct Simulation {
    settings: SimulationSettings,
    population: Population,
    rounds: Rounds,
    aggregator: Aggregator,
    queue: BinaryHeap<Reverse<(u64, u64, Occurrence)>>,
    sequence: u64,
    tick_at: Option<u64>,
    rng: ChaCha20Rng,
    /// Deltas of tasks in progress and of accepted updates, with the version they started from.
    deltas: BTreeMap<u64, Update>,
    contributors: BTreeSet<ClientId>,
    /// When the check-in of each waiting client expires.
    waiting: BTreeMap<ClientId, u64>,
    initial_loss: f64,
    report: SimulationReport,
}

impl Simulation {
    /// Creates the clients and the run.
    ///
    /// # Errors
    /// When the settings are invalid.
    pub fn new(settings: SimulationSettings) -> Result<Self, InvalidInput> {
        settings.validate()?;
        let population = Population::new(&settings);
        let assigned = match settings.mode {
            Mode::Synchronous { target, over_selection_percent, .. } => {
                crate::selection::over_selected(target, over_selection_percent)
            }
            Mode::Poisson { .. } => settings.clients as usize,
            Mode::Buffered { concurrency, .. } => concurrency as usize,
            Mode::Cohorts { size, cohorts, .. } => size as usize * cohorts as usize,
        };
        let deadline_millis = (settings.deadline_seconds * 1e3) as u64;
        let round_settings = RoundSettings {
            run: "simulation".into(),
            mode: settings.mode,
            versions: settings.versions,
            lease_millis: deadline_millis,
            deadline_millis,
            check_in_millis: CHECK_IN_MILLIS,
            max_waiting: assigned + SPARE_CLIENTS,
            max_aborts: 100,
            is_masked: false,
        };
        let enrolled = (0..settings.clients).collect();
        let rounds = Rounds::new(round_settings, derive(&settings.seed, &[b"rounds"]), enrolled, None, [0; 32])?;
        let aggregator = Aggregator::new(settings.strategy.clone(), vec![0.0; settings.parameters])?;
        let initial_loss = population.excess_loss(aggregator.model());
        let mut simulation = Self {
            rng: stream(&settings.seed, "events", 0),
            settings,
            population,
            rounds,
            aggregator,
            queue: BinaryHeap::new(),
            sequence: 0,
            tick_at: None,
            deltas: BTreeMap::new(),
            contributors: BTreeSet::new(),
            waiting: BTreeMap::new(),
            initial_loss,
            report: SimulationReport {
                history: Vec::new(),
                seconds_to_target: None,
                participants: 0,
                updates: 0,
                tasks: 0,
                wasted: 0,
                aborted: 0,
                client_loss_percentiles: [0.0; 3],
                outcome: None,
            },
        };
        for client in 0..simulation.settings.clients {
            simulation.pause(client, 0);
        }
        Ok(simulation)
    }

    /// Runs to the target or to the end. `progress` is called after each aggregation.
    ///
    /// # Errors
    /// When the model leaves the range of f32: the rates are too large.
    pub fn run(mut self, mut progress: impl FnMut(&HistoryPoint)) -> Result<SimulationReport, InvalidInput> {
        while let Some(Reverse((now, _, occurrence))) = self.queue.pop() {
            let event = match occurrence {
                Occurrence::CheckIn(client) => Event::CheckIn(client),
                Occurrence::Renewal(client) if self.waiting.get(&client) != Some(&now) => continue,
                Occurrence::Renewal(client) => Event::CheckIn(client),
                Occurrence::Upload(client, task) => {
                    Event::Upload(UploadedUpdate { run: "simulation".into(), client, task, digest: [0; 32] })
                }
                Occurrence::Tick => {
                    self.tick_at = None;
                    Event::Tick
                }
            };
            let before = self.report.history.len();
            self.handle(event, now)?;
            self.report.history[before..].iter().for_each(&mut progress);
            if self.report.seconds_to_target.is_some() || self.rounds.outcome().is_some() {
                break;
            }
            self.schedule_tick();
        }
        self.report.outcome = self.rounds.outcome();
        self.report.participants = self.contributors.len() as u64;
        self.report.client_loss_percentiles = self.population.loss_percentiles(self.aggregator.model());
        Ok(self.report)
    }

    fn push(&mut self, at_millis: u64, occurrence: Occurrence) {
        self.queue.push(Reverse((at_millis, self.sequence, occurrence)));
        self.sequence += 1;
    }

    /// The client checks in again after an exponential pause.
    fn pause(&mut self, client: ClientId, now: u64) {
        let seconds = -self.settings.pause_seconds * (1.0 - unit(&mut self.rng)).ln();
        self.push(now + (seconds * 1e3) as u64, Occurrence::CheckIn(client));
    }

    fn schedule_tick(&mut self) {
        let Some(deadline) = self.rounds.next_deadline() else { return };
        if self.tick_at.is_none_or(|at| deadline < at) {
            self.tick_at = Some(deadline);
            self.push(deadline, Occurrence::Tick);
        }
    }

    /// Applies an event and everything that follows from it at once.
    fn handle(&mut self, event: Event, now: u64) -> Result<(), InvalidInput> {
        let mut actions = self.rounds.step(event, now);
        while let Some(action) = actions.pop() {
            match action {
                Action::Assign(task) => self.train(task.client, task.number, task.version, now),
                Action::Aggregate(batch) => {
                    let number = batch.number;
                    self.aggregate(&batch, now)?;
                    actions.extend(self.rounds.step(Event::Aggregated { batch: number, model: [0; 32] }, now));
                }
                Action::Refuse(client, refusal) => {
                    self.report.wasted += u64::from(refusal != Refusal::Busy);
                    self.pause(client, now);
                }
                Action::Discard(update) => {
                    self.report.wasted += 1;
                    self.deltas.remove(&update.task);
                }
                Action::Revoke { task, .. } => drop(self.deltas.remove(&task)),
                Action::Acknowledge { client, .. } => self.pause(client, now),
                Action::Abort { .. } => self.report.aborted += 1,
                Action::Wait(client) => {
                    self.waiting.insert(client, now + CHECK_IN_MILLIS);
                    self.push(now + CHECK_IN_MILLIS, Occurrence::Renewal(client));
                }
                Action::End(_) => {}
            }
        }
        Ok(())
    }

    /// Trains from the current model; the update arrives later, or never.
    fn train(&mut self, client: ClientId, task: u64, version: u64, now: u64) {
        self.report.tasks += 1;
        self.waiting.remove(&client);
        let update = self.population.train(client, version, self.aggregator.model(), &self.settings, &mut self.rng);
        self.deltas.insert(task, update);
        let end = now + self.settings.straggler.draw(&mut self.rng);
        if unit(&mut self.rng) < self.settings.drop_out {
            self.pause(client, end);
        } else {
            self.push(end, Occurrence::Upload(client, task));
        }
    }

    fn aggregate(&mut self, batch: &Batch, now: u64) -> Result<(), InvalidInput> {
        let updates: Vec<Update> =
            batch.contributions.iter().filter_map(|accepted| self.deltas.remove(&accepted.task)).collect();
        if updates.is_empty() {
            self.aggregator.advance(&vec![0.0; self.settings.parameters])?;
        } else {
            self.aggregator.aggregate(&updates)?;
        }
        self.contributors.extend(updates.iter().map(|update| update.client));
        self.report.updates += updates.len() as u64;
        let loss = self.population.excess_loss(self.aggregator.model()) / self.initial_loss;
        let seconds = now as f64 / 1e3;
        let version = self.aggregator.version();
        self.report.history.push(HistoryPoint { seconds, version, updates: updates.len(), loss });
        if loss <= self.settings.target && self.report.seconds_to_target.is_none() {
            self.report.seconds_to_target = Some(seconds);
        }
        Ok(())
    }
}
