//! A hidden Markov model in fixed-point logarithms, and the sequence to decode.
//!
//! Logarithms are rounded to multiples of 2^-12, so that sums of as many of them as a block has are exact in f32, and sums of all of them
//! in f64. The best path is then the same whatever the order of additions.

use crate::task_run::TaskError;
use crate::task_run::random::Random;
use engram_api::{DecodeSource, MarkovModel, MarkovSynthetic};
use engram_tropical::Matrix;

/// Logarithms are multiples of one over this.
const GRID: f64 = 4_096.0;
/// Sums up to this are exact in f32: 2^24 multiples of 2^-12.
pub(super) const EXACT: f32 = 4_096.0;
/// Smallest probability above 0: its logarithm leaves room for blocks of 29 steps.
const SMALLEST: f64 = 1e-30;
/// Probability that a generated state is kept, which makes neighbours informative.
const STICKY: f64 = 0.8;
const FIELD: &str = "spec.tropical.decode.source.model";

/// A model with n states and m symbols, and observations.
pub(super) struct Chain {
    pub(super) states: usize,
    pub(super) symbols: usize,
    /// Logarithm of the probability of each first state.
    prior: Vec<f32>,
    /// Per symbol: `transition[from][to] + emission[to][symbol]`.
    pub(super) steps: Vec<Matrix>,
    /// `emission[state][symbol]`.
    pub(super) emission: Matrix,
    pub(super) observations: Vec<u32>,
    /// States that the observations were drawn from, if known.
    pub(super) truth: Option<Vec<u32>>,
}

impl Chain {
    /// Reads or generates model and observations.
    pub(super) fn new(source: &DecodeSource) -> Result<Self, TaskError> {
        match source {
            DecodeSource::Model(model) => Self::from_model(model, None),
            DecodeSource::Synthetic(settings) => generate(settings),
        }
    }

    fn from_model(model: &MarkovModel, truth: Option<Vec<u32>>) -> Result<Self, TaskError> {
        let states = model.prior.len();
        let symbols = model.emission.first().map_or(0, Vec::len);
        distribution(&format!("{FIELD}.prior"), &model.prior)?;
        table("transition", &model.transition, states, states)?;
        table("emission", &model.emission, states, symbols)?;
        if model.observations.is_empty() {
            return Err(TaskError::Invalid(format!("{FIELD}.observations is empty; allowed: at least 1 symbol")));
        }
        if let Some(at) = model.observations.iter().position(|&symbol| symbol as usize >= symbols) {
            let symbol = model.observations[at];
            return Err(TaskError::Invalid(format!(
                "{FIELD}.observations[{at}]: {symbol} is not allowed; allowed: 0 to {}",
                symbols - 1
            )));
        }
        let logarithms = |rows: &[Vec<f64>]| rows.iter().flatten().map(|&it| logarithm(it)).collect::<Vec<f32>>();
        let emission = matrix(states, symbols, logarithms(&model.emission))?;
        let transition = logarithms(&model.transition);
        let step = |symbol: usize| {
            let entry = |(index, log): (usize, &f32)| log + emission.row(index % states)[symbol];
            matrix(states, states, transition.iter().enumerate().map(entry).collect())
        };
        Ok(Self {
            states,
            symbols,
            prior: model.prior.iter().map(|&it| logarithm(it)).collect(),
            steps: (0..symbols).map(step).collect::<Result<_, _>>()?,
            emission,
            observations: model.observations.clone(),
            truth,
        })
    }

    /// Returns the values of all states after the first observation.
    pub(super) fn start(&self) -> Vec<f64> {
        let symbol = self.observations[0] as usize;
        let value = |state: usize| f64::from(self.prior[state]) + f64::from(self.emission.row(state)[symbol]);
        (0..self.states).map(value).collect()
    }

    /// Returns the number of steps whose sums are exact in f32.
    pub(super) fn exact_steps(&self) -> usize {
        let entries = self.steps.iter().flat_map(Matrix::entries).filter(|entry| entry.is_finite());
        let largest = entries.fold(1.0_f32, |largest, entry| largest.max(entry.abs()));
        ((EXACT / largest) as usize).max(1)
    }
}

fn matrix(rows: usize, columns: usize, entries: Vec<f32>) -> Result<Matrix, TaskError> {
    Matrix::new("logarithms", rows, columns, entries).map_err(|error| TaskError::Failed(error.to_string()))
}

/// Returns the logarithm, rounded to the grid; of 0 it is negative infinity.
fn logarithm(probability: f64) -> f32 {
    if probability == 0.0 { f32::NEG_INFINITY } else { ((probability.ln() * GRID).round() / GRID) as f32 }
}

fn table(name: &str, rows: &[Vec<f64>], states: usize, columns: usize) -> Result<(), TaskError> {
    if rows.len() != states || columns == 0 {
        let found = rows.len();
        return Err(TaskError::Invalid(format!(
            "{FIELD}.{name} has {found} rows of {columns} values; allowed: {states} rows, one per value of prior"
        )));
    }
    for (row, values) in rows.iter().enumerate() {
        if values.len() != columns {
            let found = values.len();
            return Err(TaskError::Invalid(format!("{FIELD}.{name}[{row}] has {found} values; allowed: {columns}")));
        }
        distribution(&format!("{FIELD}.{name}[{row}]"), values)?;
    }
    Ok(())
}

fn distribution(field: &str, values: &[f64]) -> Result<(), TaskError> {
    let allowed = |&&value: &&f64| value == 0.0 || (SMALLEST..=1.0).contains(&value);
    if let Some((at, value)) = values.iter().enumerate().find(|(_, value)| !allowed(value)) {
        return Err(TaskError::Invalid(format!("{field}[{at}]: {value:?} is not allowed; allowed: 0, and 1e-30 to 1")));
    }
    let sum: f64 = values.iter().sum();
    if (sum - 1.0).abs() > 1e-6 {
        return Err(TaskError::Invalid(format!("{field} sums to {sum:?}; allowed: 1 within 0.000001")));
    }
    Ok(())
}

/// Generates sticky states with a few favourite successors, each with a few favourite symbols, and draws a sequence.
fn generate(settings: &MarkovSynthetic) -> Result<Chain, TaskError> {
    let (states, symbols) = (settings.states as usize, settings.symbols as usize);
    let mut random = Random::new(settings.seed, 2);
    let mut peaked = |columns: usize| -> Vec<f64> {
        // The cube of a uniform number: a few large values, many small ones.
        let values: Vec<f64> = (0..columns).map(|_| random.unit().powi(3) + 1e-3).collect();
        let sum: f64 = values.iter().sum();
        values.iter().map(|value| value / sum).collect()
    };
    let prior = vec![1.0 / states as f64; states];
    let emission: Vec<Vec<f64>> = (0..states).map(|_| peaked(symbols)).collect();
    let sticky = |from: usize, row: Vec<f64>| -> Vec<f64> {
        let stay = |to: usize| if to == from { STICKY } else { 0.0 };
        row.into_iter().enumerate().map(|(to, it)| (1.0 - STICKY) * it + stay(to)).collect()
    };
    let transition: Vec<Vec<f64>> = (0..states).map(|from| sticky(from, peaked(states))).collect();
    let mut drawn = Random::new(settings.seed, 3);
    let mut truth = Vec::with_capacity(settings.length as usize);
    let mut observations = Vec::with_capacity(settings.length as usize);
    for _ in 0..settings.length {
        let weights = truth.last().map_or(&prior, |&state: &u32| &transition[state as usize]);
        let state = drawn.draw(weights);
        truth.push(state as u32);
        observations.push(drawn.draw(&emission[state]) as u32);
    }
    Chain::from_model(&MarkovModel { prior, transition, emission, observations }, Some(truth))
}
