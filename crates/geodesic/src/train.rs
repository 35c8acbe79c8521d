//! Training of one (metric, decoder) pair, step by step.

use xxhash_rust::xxh3::xxh3_128;

mod accelerated;
mod predict;

pub use accelerated::{StepError, advance_all};
pub(crate) use predict::GRID_SHOOTING;
pub use predict::Prediction;

use crate::closed::Lattice;
use crate::error::Error;
use crate::model::{Loss, Model};
use crate::random::Stream;
use crate::settings::Settings;
use crate::spectra::Spectra;

/// Scaling of the concentration and wavelength axes to [-1, 1]. It knows the axes, never a spectrum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Axes {
    ppb: (f64, f64),
    nm: (f64, f64),
}

impl Axes {
    /// Axes whose first and last values become -1 and 1: (ppb - 30) / 30 and (nm - 500) / 300 for the reference task.
    ///
    /// # Errors
    /// [`Error::Length`] with fewer than 2 values on an axis.
    pub fn new(ppb: &[f64], nm: &[f64]) -> Result<Self, Error> {
        let span = |field, axis: &[f64]| match axis {
            [first, .., last] => Ok((0.5 * (first + last), 0.5 * (last - first))),
            _ => Err(Error::Length { field, actual: axis.len(), expected: 2 }),
        };
        Ok(Self { ppb: span("concentrations", ppb)?, nm: span("wavelengths", nm)? })
    }

    /// Concentration in ppb of a normalised one.
    pub(crate) fn ppb(&self, c: f64) -> f64 {
        self.ppb.0 + self.ppb.1 * c
    }

    /// Normalised concentration.
    pub(crate) fn c(&self, ppb: f64) -> f64 {
        (ppb - self.ppb.0) / self.ppb.1
    }

    /// Normalised wavelength.
    pub(crate) fn l(&self, nm: f64) -> f64 {
        (nm - self.nm.0) / self.nm.1
    }
}

/// AdamW with the constants of its authors.
const BETA: (f64, f64) = (0.9, 0.999);
const EPSILON: f64 = 1e-8;
/// Identifies the encoding of a state.
const MAGIC: &[u8; 8] = b"GEOTRN01";

/// Training in progress. Two trainers with the same data, settings and start make the same steps, bit for bit.
#[derive(Debug, Clone)]
pub struct Trainer {
    data: Spectra,
    axes: Axes,
    settings: Settings,
    start: u64,
    /// Standard deviation of the training absorbances.
    scale: f64,
    model: Model,
    /// First and second moments, metric then decoder.
    moments: (Vec<f64>, Vec<f64>),
    step: u64,
    best: Model,
    best_loss: f64,
    /// Evaluations since the best.
    waited: u32,
    last: Loss,
}

/// Lattice, pairs and standardised differences [pair, wavelength].
type Validation = (Lattice, Vec<(usize, usize)>, Vec<f64>);

/// Inputs of a step.
struct StepInput {
    lattice: Lattice,
    pairs: Vec<(usize, usize)>,
    /// Standardised differences target - source, [pair, wavelength].
    targets: Vec<f64>,
    /// Seed of the regularisers' points.
    draws: u64,
}

impl Trainer {
    /// Starts the training of start number `start` on training spectra, at least 3.
    ///
    /// # Errors
    /// If a setting is out of range, or there are too few spectra or wavelengths.
    pub fn new(data: Spectra, axes: Axes, settings: Settings, start: u64) -> Result<Self, Error> {
        settings.check()?;
        if data.ppb().len() < 3 {
            return Err(Error::Length { field: "training spectra", actual: data.ppb().len(), expected: 3 });
        }
        let least = 2 * settings.validation_stride.max(settings.stride);
        if data.nm().len() < least {
            return Err(Error::Length { field: "wavelengths", actual: data.nm().len(), expected: least });
        }
        let scale = data.deviation();
        let seed = Stream::new(settings.seed, start);
        let model = Model::xavier((seed.uniform(0) * 2f64.powi(52)) as u64, settings.decoder);
        let count = model.metric.network().parameters().len() + model.decoder.parameters().len();
        let moments = (vec![0.0; count], vec![0.0; count]);
        let best = model.clone();
        let last = Loss::default();
        let (step, best_loss, waited) = (0, f64::INFINITY, 0);
        Ok(Self { data, axes, settings, start, scale, model, moments, step, best, best_loss, waited, last })
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Loss of the last step.
    pub fn last_loss(&self) -> Loss {
        self.last
    }

    /// Least loss of the inner validation split; infinite before its first evaluation.
    pub fn validation_loss(&self) -> f64 {
        self.best_loss
    }

    /// The model with that loss.
    pub fn best(&self) -> &Model {
        &self.best
    }

    /// Whether training has ended: all steps are done, or patience is exhausted.
    pub fn finished(&self) -> bool {
        self.step >= self.settings.steps || self.waited >= self.settings.patience
    }

    /// Makes one step; does nothing when finished.
    ///
    /// # Errors
    /// [`Error::Range`] if the loss is not finite.
    pub fn advance(&mut self) -> Result<(), Error> {
        if self.finished() {
            return Ok(());
        }
        let StepInput { lattice, pairs, targets, draws } = self.step_input()?;
        let gradient = self.model.gradient(&lattice, &pairs, &targets, &self.settings, draws)?;
        self.apply(&gradient)?;
        if self.evaluation_due() {
            let (lattice, pairs, targets) = self.validation()?;
            let predicted = self.model.differences(&lattice, &pairs);
            self.evaluate(&predicted, &targets);
        }
        Ok(())
    }

    /// What the gradient of the next step is computed from.
    fn step_input(&self) -> Result<StepInput, Error> {
        let every = self.settings.validation_stride;
        let training: Vec<usize> = (0..self.data.nm().len()).filter(|j| j % every != 0).collect();
        let draws = Stream::new(self.settings.seed ^ 0x5354_4550, self.start);
        // A different subset in each step; over `stride` steps every wavelength has about the same share.
        let offset = draws.below(self.step, self.settings.stride);
        let subset: Vec<usize> = training.into_iter().skip(offset).step_by(self.settings.stride).collect();
        let lattice = self.lattice(self.data.ppb(), &subset)?;
        let pairs = lattice.all_pairs();
        let targets = self.targets(&pairs, &subset);
        let draws = (draws.uniform(u64::MAX - self.step) * 2f64.powi(52)) as u64;
        Ok(StepInput { lattice, pairs, targets, draws })
    }

    /// Completes a step with its loss and the gradients with respect to the metric's and the decoder's parameters.
    fn apply(&mut self, (loss, metric, decoder): &(Loss, Vec<f64>, Vec<f64>)) -> Result<(), Error> {
        if !loss.total(&self.settings).is_finite() {
            return Err(Error::Range { field: "loss", value: loss.total(&self.settings), allowed: "finite" });
        }
        self.last = *loss;
        self.update(metric, decoder);
        self.step += 1;
        Ok(())
    }

    /// Whether the inner validation split is evaluated after this step.
    fn evaluation_due(&self) -> bool {
        self.step.is_multiple_of(self.settings.evaluate_every) || self.step == self.settings.steps
    }

    fn lattice(&self, ppb: &[f64], wavelengths: &[usize]) -> Result<Lattice, Error> {
        let breaks: Vec<f64> = ppb.iter().map(|p| self.axes.c(*p)).collect();
        let l: Vec<f64> = wavelengths.iter().map(|j| self.axes.l(self.data.nm()[*j])).collect();
        Lattice::new(&breaks, &l, self.settings.nodes)
    }

    /// Standardised differences target - source, [pair, wavelength].
    fn targets(&self, pairs: &[(usize, usize)], wavelengths: &[usize]) -> Vec<f64> {
        let difference = |i: usize, j: usize, w: usize| (self.data.row(j)[w] - self.data.row(i)[w]) / self.scale;
        pairs.iter().flat_map(|&(i, j)| wavelengths.iter().map(move |&w| difference(i, j, w))).collect()
    }

    /// Lattice, pairs and standardised differences of the inner validation split.
    fn validation(&self) -> Result<Validation, Error> {
        let subset: Vec<usize> = (0..self.data.nm().len()).step_by(self.settings.validation_stride).collect();
        let lattice = self.lattice(self.data.ppb(), &subset)?;
        let pairs = lattice.all_pairs();
        let targets = self.targets(&pairs, &subset);
        Ok((lattice, pairs, targets))
    }

    fn evaluate(&mut self, predicted: &[f64], targets: &[f64]) {
        let sum: f64 = predicted.iter().zip(targets).map(|(p, t)| (p - t).powi(2)).sum();
        let loss = sum / targets.len() as f64;
        if loss < self.best_loss {
            (self.best, self.best_loss, self.waited) = (self.model.clone(), loss, 0);
        } else {
            self.waited += 1;
        }
    }

    /// AdamW with clipping and a cosine schedule, metric and decoder with their own rates and norms.
    fn update(&mut self, metric: &[f64], decoder: &[f64]) {
        let progress = self.step as f64 / self.settings.steps as f64;
        let schedule = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
        let t = (self.step + 1) as i32;
        let corrections = (1.0 - BETA.0.powi(t), 1.0 - BETA.1.powi(t));
        let mut at = 0;
        let parts = [
            (self.model.metric.parameters_mut(), metric, self.settings.metric_rate, 0.0),
            (self.model.decoder.parameters_mut(), decoder, self.settings.decoder_rate, self.settings.weight_decay),
        ];
        for (parameters, gradient, rate, decay) in parts {
            let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
            let factor = if norm > self.settings.clip { self.settings.clip / norm } else { 1.0 };
            let rate = rate * schedule;
            for (p, g) in parameters.iter_mut().zip(gradient) {
                let g = g * factor;
                let (m, v) = (&mut self.moments.0[at], &mut self.moments.1[at]);
                *m = BETA.0 * *m + (1.0 - BETA.0) * g;
                *v = BETA.1 * *v + (1.0 - BETA.1) * g * g;
                let change = *m / corrections.0 / ((*v / corrections.1).sqrt() + EPSILON);
                *p -= rate * (change + decay * *p);
                at += 1;
            }
        }
    }

    fn numbers(&mut self) -> [&mut [f64]; 6] {
        [
            self.model.metric.parameters_mut(),
            self.model.decoder.parameters_mut(),
            &mut self.moments.0,
            &mut self.moments.1,
            self.best.metric.parameters_mut(),
            self.best.decoder.parameters_mut(),
        ]
    }

    /// Hash of the training data, the settings and the start: a state resumes only where these are equal.
    fn identity(&self) -> u128 {
        let mut bytes = self.settings.hash().to_le_bytes().to_vec();
        bytes.extend(self.start.to_le_bytes());
        bytes.extend(self.data.to_csv().as_bytes());
        for x in [self.axes.ppb.0, self.axes.ppb.1, self.axes.nm.0, self.axes.nm.1] {
            bytes.extend(x.to_bits().to_le_bytes());
        }
        xxh3_128(&bytes)
    }

    /// The state after the last step, as bytes with a checksum.
    pub fn save(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(self.identity().to_le_bytes());
        out.extend(self.step.to_le_bytes());
        out.extend(u64::from(self.waited).to_le_bytes());
        out.extend(self.best_loss.to_bits().to_le_bytes());
        for numbers in self.clone().numbers() {
            numbers.iter().for_each(|x| out.extend(x.to_bits().to_le_bytes()));
        }
        out.extend(xxh3_128(&out).to_le_bytes());
        out
    }

    /// Continues from a saved state of a trainer with the same data, settings and start.
    ///
    /// # Errors
    /// [`Error::Encoding`] if the bytes are damaged or belong to another training.
    pub fn resume(mut self, bytes: &[u8]) -> Result<Self, Error> {
        let refuse = |problem: &str| Err(Error::Encoding { object: "training state", problem: problem.to_owned() });
        let count: usize = self.numbers().iter().map(|n| n.len()).sum();
        if bytes.len() != 8 + 16 + 24 + 8 * count + 16 || !bytes.starts_with(MAGIC) {
            return refuse("length or magic number is wrong");
        }
        let (body, checksum) = bytes.split_at(bytes.len() - 16);
        if xxh3_128(body).to_le_bytes() != checksum {
            return refuse("checksum mismatch");
        }
        if self.identity().to_le_bytes() != body[8..24] {
            return refuse("data, settings or start differ");
        }
        let mut words = body[24..].chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("8 bytes")));
        let mut next = || words.next().expect("the length was checked");
        self.step = next();
        self.waited = u32::try_from(next()).unwrap_or(u32::MAX);
        self.best_loss = f64::from_bits(next());
        for numbers in self.numbers() {
            numbers.iter_mut().for_each(|x| *x = f64::from_bits(next()));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Generator, Noise};

    fn trainer(settings: Settings) -> Trainer {
        let (ppb, nm) = ([0.0, 15.0, 30.0, 60.0], (0..61).map(|i| 200.0 + 10.0 * f64::from(i)).collect::<Vec<_>>());
        let data = Generator::Mixed.spectra(&ppb, &nm, &Noise::default(), 0).unwrap();
        Trainer::new(data, Axes::new(&ppb, &nm).unwrap(), settings, 1).unwrap()
    }

    #[test]
    fn resumed_training_makes_the_same_steps_bit_for_bit() {
        let settings = Settings { steps: 30, evaluate_every: 5, stride: 4, ..Settings::default() };
        let mut whole = trainer(settings);
        let mut state = Vec::new();
        while !whole.finished() {
            whole.advance().unwrap();
            if whole.steps() == 13 {
                state = whole.save();
            }
        }
        let mut resumed = trainer(settings).resume(&state).unwrap();
        assert_eq!(resumed.save(), state);
        while !resumed.finished() {
            resumed.advance().unwrap();
        }
        assert_eq!(whole.save(), resumed.save());
        state[100] ^= 1;
        assert!(matches!(trainer(settings).resume(&state), Err(Error::Encoding { .. })));
        let other = trainer(Settings { seed: 5, ..settings }).resume(&whole.save());
        assert!(matches!(other, Err(Error::Encoding { .. })));
    }

    #[test]
    fn training_lowers_the_validation_loss_and_patience_stops_it() {
        let settings = Settings { steps: 400, evaluate_every: 10, stride: 2, ..Settings::default() };
        let mut long = trainer(settings);
        while long.steps() < 10 {
            long.advance().unwrap();
        }
        let first = long.validation_loss();
        while !long.finished() {
            long.advance().unwrap();
        }
        assert!(long.validation_loss() < 0.1 * first, "{first} {}", long.validation_loss());
        let mut impatient = trainer(Settings { metric_rate: 0.5, decoder_rate: 0.5, patience: 2, ..settings });
        while !impatient.finished() {
            impatient.advance().unwrap();
        }
        assert!(impatient.steps() < 400, "{}", impatient.steps());
    }
}
