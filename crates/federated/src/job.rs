//! A `Federated` run as what the rounds need: strategy, mode, privacy, layers, initial parameters.

use engram_api::{
    FederatedClients, FederatedEncoding, FederatedInit, FederatedRun, FederatedStrategy, FederatedStrategyKind,
};

use crate::error::{InvalidInput, require};
use crate::model::{Layer, Layout};
use crate::privacy::budget::Budget;
use crate::privacy::clipping::AdaptiveClip;
use crate::privacy::{Combination, Mechanism, Sampling};
use crate::random::{derive, stream, unit};
use crate::round::{Mode, RoundSettings};
use crate::secure::masked_bytes;
use crate::selection::over_selected;
use crate::strategy::{AdaptiveSettings, Aggregator, BlockAggregator, Strategy};

/// Most parameters of a model, shared and local ones: an update has 1 GiB.
pub const MAX_PARAMETERS: usize = 1 << 28;
/// Most shared parameters of a model that is held in memory. Such models and updates are records of the run's partition: a record holds 64 MiB and
/// a partition 256 MiB, and two versions of the model with the updates of a round have to fit. Larger ones are items of a buffer, on disk, and are
/// aggregated block by block.
pub const MAX_PARAMETERS_IN_MEMORY: usize = 1 << 22;
/// Most bytes of the updates of one round of a model that is on disk: half of what the buffer holds in a partition.
pub const MAX_ROUND_BYTES_ON_DISK: u64 = 32 << 30;
/// Parameters of a block: a chunk of 1 MiB.
pub const BLOCK_PARAMETERS: usize = 1 << 18;
/// Most bytes of a model with what its strategy remembers: they are one record, of 64 MiB with its framing.
pub const MAX_VERSION_BYTES: u64 = 60 << 20;
/// Most bytes of the updates of one round that are kept until they are aggregated.
pub const MAX_ROUND_BYTES: u64 = 96 << 20;
/// Most bytes of the masked updates of one round: they are one record.
pub const MAX_MASKED_BYTES: u64 = 48 << 20;
/// Most bytes of one masked update: it is one message.
pub const MAX_MASKED_UPDATE_BYTES: usize = 4 << 20;
/// Longest wait of a client for a task, in milliseconds.
pub const MAX_WAIT_MILLIS: u64 = 30_000;
/// How much longer than its wait a client counts as available: the time until it checks in again.
const CHECK_IN_GRACE_MILLIS: u64 = 5_000;
/// Least noise: below it a round costs more than any budget that protects a client.
const MIN_NOISE: f64 = 0.3;
/// Rounds without enough updates in sequence after which a run fails.
const MAX_ABORTS: u32 = 10;

/// Settings of secure aggregation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SecureSettings {
    /// Share of the clients of a round that may disappear.
    pub drop_out: f64,
    /// Largest absolute value of an update.
    pub range: f64,
}

/// Privacy of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrivacySettings {
    /// The mechanism that is charged per round.
    pub mechanism: Mechanism,
    /// Norm to which updates are clipped.
    pub clip: f64,
    /// Fixed divisor of the noisy sum.
    pub expected: f64,
    /// The budget, and the probability with which it may be exceeded.
    pub budget: (f64, f64),
    /// Whether `clip` follows the median of the norms.
    pub adaptive_clip: bool,
}

/// A checked specification.
#[derive(Debug, Clone)]
pub struct Job {
    /// The rule of aggregation.
    pub strategy: Strategy,
    /// Rounds.
    pub rounds: RoundSettings,
    /// Most clients.
    pub population: u64,
    /// Differential privacy.
    pub privacy: Option<PrivacySettings>,
    /// Secure aggregation.
    pub secure: Option<SecureSettings>,
    /// The layers.
    pub layout: Layout,
    run: FederatedRun,
}

impl Job {
    /// Checks the specification of the run called `name`.
    ///
    /// # Errors
    /// A setting is out of its range, or settings cannot be combined.
    pub fn new(name: &str, run: &FederatedRun) -> Result<Self, InvalidInput> {
        let layout = layout(run)?;
        let strategy = strategy(&run.strategy, run.clients.population);
        strategy.validate()?;
        let clients = &run.clients;
        let (population, per_round) = (clients.population, clients.per_round);
        require(per_round <= population, "clients.perRound", per_round, &format!("1 to population, {population}"))?;
        let privacy = run.privacy.as_ref().map(|privacy| PrivacySettings {
            mechanism: Mechanism {
                sampling_rate: privacy.sampling_rate.unwrap_or(1.0),
                noise_multiplier: privacy.noise_multiplier,
            },
            clip: privacy.clip,
            expected: privacy.sampling_rate.map_or(per_round as f64, |rate| rate * population as f64),
            budget: (privacy.epsilon, privacy.delta),
            adaptive_clip: privacy.adaptive_clip,
        });
        let secure = run.secure_aggregation.as_ref().map(|secure| SecureSettings {
            drop_out: secure.drop_out,
            range: privacy.map_or(secure.range, |privacy| privacy.clip),
        });
        let mode = mode(run, &strategy)?;
        let job = Self {
            rounds: RoundSettings {
                run: name.to_owned(),
                mode,
                versions: run.rounds,
                lease_millis: if secure.is_some() { run.deadline.as_millis() } else { run.lease.as_millis() },
                deadline_millis: run.deadline.as_millis(),
                check_in_millis: MAX_WAIT_MILLIS + CHECK_IN_GRACE_MILLIS,
                max_waiting: usize::try_from(population).unwrap_or(usize::MAX),
                max_aborts: MAX_ABORTS,
                is_masked: secure.is_some(),
            },
            strategy,
            population,
            privacy,
            secure,
            layout,
            run: run.clone(),
        };
        job.check()?;
        job.check_bytes()?;
        Ok(job)
    }

    fn check(&self) -> Result<(), InvalidInput> {
        self.rounds.validate()?;
        let is_poisson = matches!(self.rounds.mode, Mode::Poisson { .. });
        Combination {
            strategy: &self.strategy,
            sampling: if is_poisson { Sampling::Poisson } else { Sampling::FixedSize },
            mechanism: self.privacy.map(|privacy| privacy.mechanism),
            secure_aggregation: self.secure.is_some(),
            stops_on_private_loss: false,
        }
        .validate()?;
        if let Some(privacy) = &self.privacy {
            require(privacy.clip > 0.0 && privacy.clip.is_finite(), "privacy.clip", privacy.clip, "above 0")?;
            let noise = privacy.mechanism.noise_multiplier;
            require(noise >= MIN_NOISE, "privacy.noiseMultiplier", noise, &format!("{MIN_NOISE} to 64"))?;
            Budget::new(privacy.budget.0, privacy.budget.1, self.population)?;
            self.check_adaptive_clip(privacy)?;
        }
        if let (Strategy::Krum { byzantine, keep }, Mode::Synchronous { minimum, .. }) =
            (&self.strategy, self.rounds.mode)
        {
            let least = (2 * byzantine + 3).max(keep + byzantine);
            let allowed = format!("at least {least} with Krum");
            require(minimum as usize >= least, "clients.minimum", minimum, &allowed)?;
        }
        if let Some(secure) = &self.secure {
            let per_round = self.run.clients.per_round;
            require(
                (0.0..=0.34).contains(&secure.drop_out),
                "secureAggregation.dropOut",
                secure.drop_out,
                "0 to 0.34",
            )?;
            require(secure.range > 0.0, "secureAggregation.range", secure.range, "above 0")?;
            require(per_round >= 3, "clients.perRound", per_round, "at least 3 with secureAggregation")?;
            let allowed = "rounds of perRound clients: with samplingRate it is not supported";
            require(!is_poisson, "secureAggregation", "on", allowed)?;
            self.check_cohorts()?;
        }
        Ok(())
    }

    /// Checks the number of clients that mask together, and what their messages occupy.
    fn check_cohorts(&self) -> Result<(), InvalidInput> {
        let (clients, cohorts) = self.cohort_sizes();
        let drop_out = self.cohort_drop_out();
        let percent = self.run.clients.over_selection;
        let allowed = "less with secureAggregation: perRound clients without those that may disappear (dropOut) have to be 0.66 of all";
        require(drop_out <= 0.34, "clients.overSelection", percent, allowed)?;
        let one = masked_bytes(self.parameters(), usize::try_from(clients).unwrap_or(usize::MAX));
        let value = format!("{} shared parameters, {one} bytes of a masked update", self.parameters());
        let allowed = format!("at most {MAX_MASKED_UPDATE_BYTES} bytes with secureAggregation");
        require(one <= MAX_MASKED_UPDATE_BYTES, "model.layers", value, &allowed)?;
        let bytes = clients * self.update_bytes();
        let allowed = format!("at most {MAX_MASKED_BYTES} bytes of masked updates per round");
        require(bytes <= MAX_MASKED_BYTES, "clients.perRound", format!("{clients} masked updates"), &allowed)?;
        let value = format!("{cohorts} cohorts of {clients} masked updates");
        let allowed = format!("at most {MAX_ROUND_BYTES} bytes of masked updates at the same time");
        require(cohorts * bytes <= MAX_ROUND_BYTES, "clients.concurrency", value, &allowed)
    }

    /// Clients that mask together, and how many such cohorts there are at the same time.
    fn cohort_sizes(&self) -> (u64, u64) {
        match self.rounds.mode {
            Mode::Cohorts { size, cohorts, .. } => (size.into(), cohorts.into()),
            _ => (self.run.clients.per_round, 1),
        }
    }

    /// Share of the clients of a cohort that may be missing: those that are not waited for, and those that disappear later.
    pub(crate) fn cohort_drop_out(&self) -> f64 {
        let drop_out = self.secure.map_or(0.0, |secure| secure.drop_out);
        match self.rounds.mode {
            Mode::Cohorts { size, goal, .. } => 1.0 - f64::from(goal) / f64::from(size) * (1.0 - drop_out),
            _ => drop_out,
        }
    }

    /// Checks what the model and the updates of a round occupy.
    fn check_bytes(&self) -> Result<(), InvalidInput> {
        if self.is_on_disk() {
            let value = format!("{} shared parameters", self.parameters());
            let allowed = format!(
                "at most {MAX_PARAMETERS_IN_MEMORY}; more with FedAvg, FedProx or FedBuff, without privacy, secureAggregation and Int8"
            );
            let is_plain = self.privacy.is_none() && self.secure.is_none() && !self.is_quantized();
            require(is_plain && BlockAggregator::supports(&self.strategy), "model.layers", value, &allowed)?;
        } else {
            self.check_version_bytes()?;
        }
        let updates = match self.rounds.mode {
            Mode::Synchronous { target, over_selection_percent, .. } => {
                over_selected(target, over_selection_percent) as u64
            }
            Mode::Poisson { .. } => self.population,
            Mode::Buffered { concurrency, buffer } => u64::from(concurrency) + u64::from(buffer),
            // Their messages are checked with the cohorts.
            Mode::Cohorts { .. } => 0,
        };
        let bytes = if self.secure.is_some() { 0 } else { updates * self.update_bytes() };
        let most = if self.is_on_disk() { MAX_ROUND_BYTES_ON_DISK } else { MAX_ROUND_BYTES };
        let allowed = format!("at most {most} bytes of updates per round: fewer clients, or a smaller model");
        require(bytes <= most, "clients", format!("{updates} updates of {} bytes", self.update_bytes()), &allowed)
    }

    fn check_version_bytes(&self) -> Result<(), InvalidInput> {
        let per_parameter = match self.strategy {
            Strategy::Scaffold { population, .. } => 12 + 4 * population,
            _ if self.strategy.has_moments() => 20,
            _ => 4,
        };
        let bytes = per_parameter * self.parameters() as u64;
        let allowed = format!("at most {MAX_VERSION_BYTES} bytes of a model and what its strategy remembers");
        require(bytes <= MAX_VERSION_BYTES, "model.layers", format!("{bytes} bytes"), &allowed)
    }

    fn check_adaptive_clip(&self, privacy: &PrivacySettings) -> Result<(), InvalidInput> {
        if !privacy.adaptive_clip {
            return Ok(());
        }
        let allowed = "false with secureAggregation: the workers see no norm of an update";
        require(self.secure.is_none(), "privacy.adaptiveClip", true, allowed)?;
        let expected = privacy.expected;
        let allowed = "with at least 20 expected clients per round";
        require(expected >= 20.0, "privacy.adaptiveClip", format!("with {expected} expected clients"), allowed)?;
        let clip = AdaptiveClip::starting_at(privacy.clip, expected)?;
        clip.update_multiplier(privacy.mechanism.noise_multiplier).map(drop)
    }

    /// Creates version 0 of the model, with what its strategy remembers.
    ///
    /// # Errors
    /// A setting is out of its range.
    pub fn aggregator(&self) -> Result<Aggregator, InvalidInput> {
        let aggregator = Aggregator::new(self.strategy.clone(), self.initial_model())?;
        match self.privacy.filter(|privacy| privacy.adaptive_clip) {
            None => Ok(aggregator),
            Some(privacy) => {
                Ok(aggregator.with_adaptive_clip(AdaptiveClip::starting_at(privacy.clip, privacy.expected)?))
            }
        }
    }

    /// Whether models and updates are on disk, and are aggregated block by block.
    #[must_use]
    pub fn is_on_disk(&self) -> bool {
        self.parameters() > MAX_PARAMETERS_IN_MEMORY
    }

    /// Whether clients download the model as 8-bit integers.
    #[must_use]
    pub fn is_quantized(&self) -> bool {
        self.run.model_encoding == FederatedEncoding::Int8
    }

    /// Shared parameters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.layout.shared_parameters()
    }

    /// Bytes of a model and of an update.
    #[must_use]
    pub fn update_bytes(&self) -> u64 {
        4 * self.parameters() as u64
    }

    /// The specification.
    #[must_use]
    pub const fn run(&self) -> &FederatedRun {
        &self.run
    }

    /// Weight of the proximal term of the clients; 0 without.
    #[must_use]
    pub const fn proximal_weight(&self) -> f64 {
        if let Strategy::FedProx { mu } = self.strategy { mu } else { 0.0 }
    }

    /// Norm to which clients clip masked updates. The remainder covers what stochastic rounding of the encoding and rounding of the sum to the
    /// grid of the noise can add to the norm.
    #[must_use]
    pub fn client_clip(&self) -> Option<f64> {
        let privacy = self.privacy.filter(|_| self.secure.is_some())?;
        let per_value = 2.0 / f64::from((1_u32 << 16) - 1) + 1.0 / crate::privacy::clipping::STEPS_PER_NORM as f64;
        Some(privacy.clip * (1.0 - (self.parameters() as f64).sqrt() * per_value).max(0.01))
    }

    /// The initial shared parameters: the same for the same seed.
    #[must_use]
    pub fn initial_model(&self) -> Vec<f32> {
        self.initial_values().collect()
    }

    /// The initial shared parameters, one after the other.
    pub fn initial_values(&self) -> impl Iterator<Item = f32> {
        let seed = derive(&self.run.seed.to_le_bytes(), &[b"initial parameters"]);
        let layers = self.run.model.layers.iter().enumerate().filter(|(_, layer)| !layer.local);
        layers.flat_map(move |(number, layer)| {
            let count = layer.shape.iter().product::<u64>();
            let outputs = layer.shape.last().copied().unwrap_or(1);
            let limit = (6.0 / (count / outputs + outputs) as f64).sqrt();
            let mut rng = stream(&seed, "layer", number as u64);
            (0..count).map(move |_| match layer.init {
                FederatedInit::Zeros => 0.0,
                FederatedInit::GlorotUniform => ((2.0 * unit(&mut rng) - 1.0) * limit) as f32,
            })
        })
    }
}

fn layout(run: &FederatedRun) -> Result<Layout, InvalidInput> {
    let mut total = 0_u64;
    let mut layers = Vec::with_capacity(run.model.layers.len());
    for layer in &run.model.layers {
        let parameters = layer.shape.iter().try_fold(1_u64, |product, dimension| product.checked_mul(*dimension));
        total = total.saturating_add(parameters.unwrap_or(u64::MAX));
        let shape = format!("{} with shape {:?}", layer.name, layer.shape);
        let allowed = format!("at most {MAX_PARAMETERS} parameters in all layers");
        require(total <= MAX_PARAMETERS as u64, "model.layers", shape, &allowed)?;
        let parameters = parameters.unwrap_or_default() as usize;
        layers.push(Layer { name: layer.name.clone(), parameters, local: layer.local });
    }
    Layout::new(layers)
}

fn strategy(strategy: &FederatedStrategy, population: u64) -> Strategy {
    let defaults = AdaptiveSettings::default();
    let adaptive = AdaptiveSettings {
        eta: strategy.rate.unwrap_or(defaults.eta),
        beta1: strategy.beta1.unwrap_or(defaults.beta1),
        beta2: strategy.beta2.unwrap_or(defaults.beta2),
        tau: strategy.tau.unwrap_or(defaults.tau),
    };
    match strategy.kind {
        FederatedStrategyKind::FedAvg => Strategy::FedAvg,
        FederatedStrategyKind::FedProx => Strategy::FedProx { mu: strategy.mu.unwrap_or(0.01) },
        FederatedStrategyKind::FedAdam => Strategy::FedAdam(adaptive),
        FederatedStrategyKind::FedYogi => Strategy::FedYogi(adaptive),
        FederatedStrategyKind::FedAdagrad => Strategy::FedAdagrad(adaptive),
        FederatedStrategyKind::Scaffold => Strategy::Scaffold { server_rate: strategy.rate.unwrap_or(1.0), population },
        FederatedStrategyKind::FedBuff => Strategy::FedBuff { server_rate: strategy.rate.unwrap_or(1.0) },
        FederatedStrategyKind::Median => Strategy::Median,
        FederatedStrategyKind::TrimmedMean => Strategy::TrimmedMean { beta: strategy.trim.unwrap_or(0.1) },
        FederatedStrategyKind::Krum => Strategy::Krum {
            byzantine: strategy.byzantine.unwrap_or(1) as usize,
            keep: strategy.keep.unwrap_or(1) as usize,
        },
    }
}

fn mode(run: &FederatedRun, strategy: &Strategy) -> Result<Mode, InvalidInput> {
    let clients = &run.clients;
    let target = clients.per_round as u32;
    let minimum = clients.minimum.unwrap_or_else(|| clients.per_round.div_ceil(2)) as u32;
    if matches!(strategy, Strategy::FedBuff { .. }) && run.secure_aggregation.is_some() {
        return cohorts(run, minimum);
    }
    if matches!(strategy, Strategy::FedBuff { .. }) {
        let concurrency = clients.concurrency.unwrap_or(clients.population);
        let allowed = format!("perRound, {target}, to population, {}", clients.population);
        let holds = (clients.per_round..=clients.population).contains(&concurrency);
        require(holds, "clients.concurrency", concurrency, &allowed)?;
        return Ok(Mode::Buffered { concurrency: concurrency as u32, buffer: target });
    }
    if let Some(rate) = run.privacy.as_ref().and_then(|privacy| privacy.sampling_rate) {
        return Ok(Mode::Poisson { rate });
    }
    let allowed = "0 with secureAggregation and synchronous rounds, which wait for all their clients: use FedBuff, or dropOut and deadline";
    let holds = clients.over_selection == 0 || run.secure_aggregation.is_none();
    require(holds, "clients.overSelection", clients.over_selection, allowed)?;
    Ok(Mode::Synchronous { target, minimum, over_selection_percent: clients.over_selection as u32 })
}

/// The mode of `FedBuff` with secure aggregation.
fn cohorts(run: &FederatedRun, minimum: u32) -> Result<Mode, InvalidInput> {
    let FederatedClients { population, per_round, over_selection, concurrency, .. } = run.clients;
    let goal = per_round as u32;
    let size = over_selected(goal, over_selection as u32) as u64;
    let concurrency = concurrency.unwrap_or_else(|| population.min(2 * size));
    let allowed = format!("perRound with overSelection, {size}, to population, {population}");
    require((size..=population).contains(&concurrency), "clients.concurrency", concurrency, &allowed)?;
    Ok(Mode::Cohorts { size: size as u32, goal, minimum: minimum.max(2), cohorts: (concurrency / size) as u32 })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn run(fields: &str) -> FederatedRun {
        let mut value: serde_json::Value = serde_json::from_str(
            r#"{"model":{"layers":[{"name":"w","shape":[3,2],"init":"GlorotUniform"},{"name":"b","shape":[2]}]},
                "rounds":3,"clients":{"population":8,"perRound":4}}"#,
        )
        .unwrap();
        let fields: serde_json::Value = serde_json::from_str(fields).unwrap();
        for (name, field) in fields.as_object().unwrap() {
            value[name] = field.clone();
        }
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn initial_parameters_depend_on_the_seed_only() {
        let job = Job::new("a", &run("{}")).unwrap();
        let model = job.initial_model();
        assert_eq!((model.len(), job.parameters()), (8, 8));
        assert!(model[..6].iter().all(|value| *value != 0.0 && value.abs() <= (6.0_f32 / 5.0).sqrt()));
        assert_eq!(model[6..], [0.0, 0.0]);
        assert_eq!(Job::new("b", &run("{}")).unwrap().initial_model(), model);
        assert_ne!(Job::new("a", &run(r#"{"seed":1}"#)).unwrap().initial_model(), model);
    }

    #[test]
    fn specifications_that_cannot_work_are_refused_with_the_field() {
        let field = |fields: &str| Job::new("a", &run(fields)).unwrap_err().field;
        assert_eq!(field(r#"{"clients":{"population":3,"perRound":4}}"#), "clients.perRound");
        assert_eq!(field(r#"{"model":{"layers":[{"name":"w","shape":[4194304,65]}]}}"#), "model.layers");
        assert_eq!(field(r#"{"secureAggregation":{},"strategy":{"kind":"Median"}}"#), "secureAggregation");
        assert_eq!(field(r#"{"privacy":{"epsilon":1,"delta":0.2,"noiseMultiplier":1,"clip":1}}"#), "delta");
        let sampled = r#"{"privacy":{"epsilon":1,"delta":0.01,"noiseMultiplier":1,"clip":1,"samplingRate":0.5},"strategy":{"kind":"FedBuff"}}"#;
        assert_eq!(field(sampled), "samplingRate");
        let adaptive = r#"{"privacy":{"epsilon":9,"delta":0.01,"noiseMultiplier":1,"clip":1,"adaptiveClip":true}}"#;
        assert_eq!(field(adaptive), "privacy.adaptiveClip", "of 4 clients");
        let masked = r#"{"clients":{"population":40,"perRound":40},"secureAggregation":{},
            "privacy":{"epsilon":9,"delta":0.01,"noiseMultiplier":1,"clip":1,"adaptiveClip":true}}"#;
        assert_eq!(field(masked), "privacy.adaptiveClip", "norms are hidden");
        let remembered = r#"{"model":{"layers":[{"name":"w","shape":[4194304]}]},"strategy":{"kind":"FedAdam"},
            "clients":{"population":1,"perRound":1}}"#;
        assert_eq!(field(remembered), "model.layers", "the moments do not fit a record");
        let large =
            r#"{"model":{"layers":[{"name":"w","shape":[1048576]}]},"clients":{"population":100,"perRound":50}}"#;
        assert_eq!(field(large), "clients");
        let variates = r#"{"model":{"layers":[{"name":"w","shape":[1048576]}]},"strategy":{"kind":"Scaffold"},
            "clients":{"population":20,"perRound":4}}"#;
        assert_eq!(field(variates), "model.layers", "a control variate per client");
        let job = Job::new("a", &run(r#"{"clients":{"population":20,"perRound":10,"overSelection":25}}"#)).unwrap();
        assert_eq!(job.rounds.mode, Mode::Synchronous { target: 10, minimum: 5, over_selection_percent: 25 });
    }

    #[test]
    fn settings_out_of_range_are_refused_with_the_field() {
        let field = |fields: &str| Job::new("a", &run(fields)).unwrap_err().field;
        assert_eq!(field(r#"{"rounds":0}"#), "versions");
        assert_eq!(field(r#"{"clients":{"population":8,"perRound":4,"minimum":5}}"#), "minimum");
        let private = |fields: &str| format!(r#"{{"privacy":{{"epsilon":9,"delta":0.01,{fields}}}}}"#);
        assert_eq!(field(&private(r#""noiseMultiplier":1,"clip":0"#)), "privacy.clip");
        assert_eq!(field(&private(r#""noiseMultiplier":0.29,"clip":1"#)), "privacy.noiseMultiplier");
        let share = r#"{"clients":{"population":40,"perRound":20},
            "privacy":{"epsilon":9,"delta":0.01,"noiseMultiplier":2,"clip":1,"adaptiveClip":true}}"#;
        assert_eq!(field(share), "noiseMultiplier", "the share of clients alone costs as much");
        let krum = r#"{"clients":{"population":8,"perRound":8,"minimum":4},"strategy":{"kind":"Krum","byzantine":1}}"#;
        assert_eq!(field(krum), "clients.minimum", "2 f + 3 are 5");
        assert_eq!(field(r#"{"secureAggregation":{"dropOut":0.35}}"#), "secureAggregation.dropOut");
        assert_eq!(field(r#"{"secureAggregation":{"range":0}}"#), "secureAggregation.range");
        let two = r#"{"clients":{"population":8,"perRound":2},"secureAggregation":{}}"#;
        assert_eq!(field(two), "clients.perRound", "a mask of two clients hides nothing");
        let idle = r#"{"clients":{"population":8,"perRound":4,"concurrency":9},"strategy":{"kind":"FedBuff"}}"#;
        assert_eq!(field(idle), "clients.concurrency");
        assert_eq!(field(r#"{"model":{"layers":[{"name":"w","shape":[4294967296,4294967296]}]}}"#), "model.layers");
    }

    #[test]
    fn updates_of_all_clients_that_may_report_fit_into_memory() {
        let with = |fields: &str| {
            let layers = r#""model":{"layers":[{"name":"w","shape":[1048576]}]}"#;
            Job::new("a", &run(&format!("{{{layers},{fields}}}"))).map(drop).map_err(|error| error.field)
        };
        let sampled = |population: u64| {
            let privacy = r#""privacy":{"epsilon":9,"delta":0.01,"noiseMultiplier":1,"clip":1,"samplingRate":0.1}"#;
            with(&format!(r#"{privacy},"clients":{{"population":{population},"perRound":2}}"#))
        };
        assert_eq!([sampled(24), sampled(25)], [Ok(()), Err("clients")], "every client may be chosen");
        let buffered = |concurrency: u64| {
            let clients = format!(r#""clients":{{"population":40,"perRound":4,"concurrency":{concurrency}}}"#);
            with(&format!(r#"{clients},"strategy":{{"kind":"FedBuff"}}"#))
        };
        assert_eq!([buffered(20), buffered(21)], [Ok(()), Err("clients")], "with those of the next buffer");
        let masked = |per_round: u64| {
            with(&format!(r#""secureAggregation":{{}},"clients":{{"population":40,"perRound":{per_round}}}"#))
        };
        assert_eq!([masked(12), masked(13)], [Ok(()), Err("clients.perRound")], "masked updates are one record");
    }

    #[test]
    fn masked_update_that_fits_no_message_is_refused() {
        let masked = |parameters: u64| {
            let model = format!(r#""model":{{"layers":[{{"name":"w","shape":[{parameters}]}}]}}"#);
            let clients = r#""secureAggregation":{},"clients":{"population":40,"perRound":3}"#;
            Job::new("a", &run(&format!("{{{model},{clients}}}"))).map(drop).map_err(|error| error.field)
        };
        // 18 bits per value: 16, and two for the sum of three; one value is the weight.
        let most = (4 << 20) * 8 / 18 - 1;
        assert_eq!([masked(most), masked(most + 1)], [Ok(()), Err("model.layers")]);
    }

    #[test]
    fn privacy_divides_by_the_expected_number_and_clients_clip_what_is_masked() {
        let privacy = r#""privacy":{"epsilon":9,"delta":0.01,"noiseMultiplier":1,"clip":2"#;
        let job = |fields: &str| Job::new("a", &run(&format!("{{{privacy}{fields}}}"))).unwrap();
        let (sampled, plain, masked) =
            (job(r#","samplingRate":0.25}"#), job("}"), job(r#"},"secureAggregation":{"range":8}"#));
        let (sampling, whole) = (sampled.privacy.unwrap(), plain.privacy.unwrap());
        assert_eq!((sampling.expected, sampling.mechanism.sampling_rate), (2.0, 0.25), "a quarter of 8");
        assert_eq!((whole.expected, whole.mechanism.sampling_rate), (4.0, 1.0));
        assert_eq!(plain.client_clip(), None);
        assert_eq!(masked.secure.unwrap().range, 2.0, "no value exceeds the norm");
        // Rounding adds at most this to the norm of 8 values.
        let rounding = 8.0_f64.sqrt() * (2.0 * 2.0 / 65_535.0 + 2.0 / crate::privacy::clipping::STEPS_PER_NORM as f64);
        let clip = masked.client_clip().unwrap();
        assert!(clip + rounding <= 2.0 + 1e-12 && clip > 1.999, "{clip}");
    }

    #[test]
    fn rounds_follow_from_the_specification() {
        let job = |fields: &str| Job::new("a", &run(fields)).unwrap();
        let clients = r#""clients":{"population":8,"perRound":4,"overSelection":50}"#;
        let masked = job(r#"{"lease":"1h","deadline":"1m","secureAggregation":{}}"#);
        assert_eq!(masked.rounds.lease_millis, 60_000, "a mask is not valid after its round");
        let exact = Mode::Synchronous { target: 4, minimum: 2, over_selection_percent: 0 };
        assert_eq!((masked.rounds.mode, masked.rounds.is_masked), (exact, true));
        let surplus = format!(r#"{{"secureAggregation":{{}},{clients}}}"#);
        let refused = Job::new("a", &run(&surplus)).unwrap_err().to_string();
        assert!(
            refused.starts_with("clients.overSelection: 50"),
            "all clients of a masked round are waited for: {refused}"
        );
        let plain = job(&format!(r#"{{"lease":"1h","deadline":"1m",{clients}}}"#));
        assert_eq!((plain.rounds.lease_millis, plain.rounds.max_aborts), (3_600_000, 10));
        assert!(!plain.rounds.is_masked);
        let cohorts = job(r#"{"strategy":{"kind":"FedBuff"},"secureAggregation":{},
            "clients":{"population":8,"perRound":3,"minimum":1}}"#);
        assert_eq!(cohorts.rounds.mode, Mode::Cohorts { size: 3, goal: 3, minimum: 2, cohorts: 2 });
        assert_eq!(job(r#"{"strategy":{"kind":"FedProx","mu":0.5}}"#).proximal_weight(), 0.5);
        let local = r#"{"model":{"layers":[{"name":"w","shape":[3]},{"name":"own","shape":[5],"local":true}]}}"#;
        assert_eq!((job(local).parameters(), job(local).initial_model().len()), (3, 3));
        let adaptive = r#"{"clients":{"population":40,"perRound":20},
            "privacy":{"epsilon":9,"delta":0.01,"noiseMultiplier":1,"clip":2,"adaptiveClip":true}}"#;
        assert_eq!(job(adaptive).aggregator().unwrap().adaptive_clip().map(|clip| clip.norm), Some(2.0));
    }

    #[test]
    fn models_that_do_not_fit_into_memory_are_plain_weighted_means() {
        let with = |fields: &str| {
            let layers = r#""model":{"layers":[{"name":"w","shape":[4194304,2]}]}"#;
            Job::new("a", &run(&format!("{{{layers}{fields}}}")))
        };
        for kind in ["FedAvg", "FedProx", "FedBuff"] {
            assert!(with(&format!(r#","strategy":{{"kind":"{kind}"}}"#)).unwrap().is_on_disk());
        }
        for fields in [
            r#","strategy":{"kind":"Median"}"#,
            r#","strategy":{"kind":"FedAdam"}"#,
            r#","modelEncoding":"Int8""#,
            r#","privacy":{"epsilon":9,"delta":0.01,"noiseMultiplier":1,"clip":1}"#,
        ] {
            assert_eq!(with(fields).unwrap_err().field, "model.layers", "{fields}");
        }
        let many = r#","clients":{"population":10000,"perRound":2000}"#;
        assert_eq!(with(many).unwrap_err().field, "clients");
    }
}
