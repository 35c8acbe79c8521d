//! Figures of a Replay run: throughput, efficiency, loss, and what the run found.

use engram_api::{ReplayRun, ReplaySource};
use engram_learn::run::{RunState, TrainingRow, TrainingState};
use engram_learn::task_run::{TaskError, TaskFindings, training_page};
use engram_memory::Ordinal;
use engram_proto::v1::{self, TrainingBaseline};
use engram_train::PrivacySpec;
use engram_train::efficiency::EfficiencyMeter;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Shortest time between two statuses.
const SHOW_INTERVAL: Duration = Duration::from_millis(200);
/// Length of the window over which rates are measured.
const WINDOW: Duration = Duration::from_secs(2);
/// Steps of the first window.
const FIRST_STEPS: u64 = 10;
/// Ratio of spreads below which the predictions have collapsed to a constant.
const COLLAPSED: f64 = 0.3;

/// Sums over a window.
#[derive(Debug, Clone, Copy, Default)]
struct Window {
    steps: u64,
    samples: u64,
    wall_seconds: f64,
    reduce_seconds: f64,
    bytes: u64,
    draw_seconds: f64,
}

/// Rates over the last complete window.
#[derive(Debug, Clone, Copy, Default)]
struct Rates {
    steps_per_second: f64,
    samples_per_second: f64,
    step_seconds: f64,
    reduce_seconds: f64,
    bytes_per_step: f64,
    efficiency: Option<f64>,
}

/// Figures of a group.
pub(super) struct Figures {
    meter: EfficiencyMeter,
    window: Window,
    window_since: Instant,
    rates: Rates,
    shown: Instant,
    members: usize,
    /// Newest progress of the first rank.
    last: v1::TrainingProgress,
    stall_seconds: f64,
    /// Of the newest loss of a member that the first rank observed; 0 before.
    recovery_seconds: f64,
    /// Figures of a buffer; `None` with another source.
    items: Option<ItemFigures>,
    /// Newest measured ratio of the spreads of predictions and targets; 0 before the first.
    spread_ratio: f64,
    /// Samples per step of each member.
    parts: BTreeMap<Ordinal, f64>,
    /// Models that are trained.
    ensemble: u64,
    /// Whether devices of the workers share batches.
    has_pipelines: bool,
    /// With differential privacy: what a step costs, and the newest number of steps with their epsilon.
    privacy: Option<(PrivacySpec, u64, f64)>,
}

/// Parts of a run for which epsilon is computed: the value that is shown is that of the end of the part in progress.
const EPSILON_PARTS: u64 = 16;

/// What became of the priorities of all members since this driver began, and the part of a step in which the first rank waited for a draw.
#[derive(Debug, Clone, Copy, Default)]
struct ItemFigures {
    changed: u64,
    stale: u64,
    skipped: u64,
    draw_seconds: f64,
}

impl Figures {
    pub(super) fn new(replay: &ReplayRun) -> Self {
        let now = Instant::now();
        let is_buffer = matches!(replay.source, ReplaySource::Buffer(_));
        Self {
            meter: EfficiencyMeter::new(),
            window: Window::default(),
            window_since: now,
            rates: Rates::default(),
            shown: now,
            members: 0,
            last: v1::TrainingProgress::default(),
            stall_seconds: 0.0,
            recovery_seconds: 0.0,
            items: is_buffer.then(ItemFigures::default),
            spread_ratio: 0.0,
            parts: BTreeMap::new(),
            ensemble: replay.ensemble,
            has_pipelines: replay.parallelism.is_some(),
            privacy: None,
        }
    }

    /// Shows the privacy budget.
    pub(super) fn set_privacy(&mut self, privacy: Option<PrivacySpec>) {
        self.privacy = privacy.map(|spec| (spec, 0, 0.0));
    }

    /// Computes what was spent by the end of the part of the run that has this step.
    pub(super) fn update_epsilon(&mut self, step: u64) {
        let Some((spec, steps, epsilon)) = &mut self.privacy else { return };
        if step > *steps {
            let part = spec.steps.div_ceil(EPSILON_PARTS);
            *steps = (step.div_ceil(part) * part).min(spec.steps);
            *epsilon = spec.spent(*steps);
        }
    }

    /// The group has other members.
    pub(super) fn restart(&mut self, members: usize) {
        self.members = members;
        self.meter.restart();
        (self.window, self.window_since) = (Window::default(), Instant::now());
    }

    /// A member left.
    pub(super) fn remove(&mut self, worker: Ordinal) {
        self.meter.remove(worker.0);
        self.parts.remove(&worker);
    }

    /// Takes the progress of a member; that of the first rank stands for the group.
    pub(super) fn observe(&mut self, worker: Ordinal, rank: Option<usize>, progress: &v1::TrainingProgress) {
        if let Some(items) = &mut self.items {
            items.changed += progress.priorities_changed;
            items.stale += progress.priorities_stale;
            items.skipped += progress.priorities_skipped;
        }
        // The last message has nothing but the counts above.
        if progress.steps == 0 {
            return;
        }
        if progress.spread_ratio > 0.0 {
            self.spread_ratio = progress.spread_ratio;
        }
        self.parts.insert(worker, progress.own_samples as f64 / progress.steps as f64);
        self.meter.record_solo(worker.0, progress.own_samples, progress.compute_seconds);
        self.stall_seconds = self.stall_seconds.max(progress.checkpoint_stall_seconds);
        if rank != Some(0) {
            return;
        }
        if progress.recovery_seconds > 0.0 {
            self.recovery_seconds = progress.recovery_seconds;
        }
        self.meter.record_step(progress.samples, progress.wall_seconds, progress.reduce_seconds);
        let window = &mut self.window;
        window.steps += progress.steps;
        window.samples += progress.samples;
        window.wall_seconds += progress.wall_seconds;
        window.reduce_seconds += progress.reduce_seconds;
        window.bytes += progress.reduced_bytes;
        window.draw_seconds += progress.draw_seconds;
        self.last = *progress;
        let is_first = self.rates.samples_per_second == 0.0 && self.window.steps >= FIRST_STEPS;
        if self.window_since.elapsed() >= WINDOW || is_first {
            self.close_window();
        }
    }

    fn close_window(&mut self) {
        let Window { steps, samples, wall_seconds, reduce_seconds, bytes, draw_seconds } = self.window;
        if steps > 0 && wall_seconds > 0.0 {
            if let Some(items) = &mut self.items {
                items.draw_seconds = draw_seconds / steps as f64;
            }
            self.rates = Rates {
                steps_per_second: steps as f64 / wall_seconds,
                samples_per_second: samples as f64 / wall_seconds,
                step_seconds: wall_seconds / steps as f64,
                reduce_seconds: reduce_seconds / steps as f64,
                bytes_per_step: bytes as f64 / steps as f64,
                efficiency: self.meter.efficiency(),
            };
            self.meter.restart();
            (self.window, self.window_since) = (Window::default(), Instant::now());
        }
    }

    /// Returns whether a status is due, at most every [`SHOW_INTERVAL`].
    pub(super) fn is_due(&mut self) -> bool {
        let is_due = self.shown.elapsed() >= SHOW_INTERVAL && self.last.step > 0;
        if is_due {
            self.shown = Instant::now();
            self.update_epsilon(self.last.step);
        }
        is_due
    }

    pub(super) const fn step(&self) -> u64 {
        self.last.step
    }

    pub(super) const fn total_samples(&self) -> u64 {
        self.last.total_samples
    }

    pub(super) const fn steps_per_second(&self) -> f64 {
        self.rates.steps_per_second
    }

    pub(super) const fn samples_per_second(&self) -> f64 {
        self.rates.samples_per_second
    }

    /// Returns the figures by name.
    pub(super) fn metrics(&self, workers: usize, failures: u64) -> BTreeMap<String, f64> {
        let rates = &self.rates;
        let mut metrics = BTreeMap::from([
            ("loss".to_owned(), self.last.loss),
            ("gradient_norm".to_owned(), self.last.gradient_norm),
            ("learning_rate".to_owned(), self.last.learning_rate),
            ("samples_per_second".to_owned(), rates.samples_per_second),
            ("step_seconds".to_owned(), rates.step_seconds),
            ("reduce_seconds".to_owned(), rates.reduce_seconds),
            ("reduced_bytes_per_step".to_owned(), rates.bytes_per_step),
            ("checkpoint_stall_seconds".to_owned(), self.stall_seconds),
            ("members".to_owned(), self.members as f64),
            ("failed_members".to_owned(), failures as f64),
            // One worker is left of several.
            ("fallback".to_owned(), f64::from(u8::from(self.members == 1 && workers > 1))),
        ]);
        if self.recovery_seconds > 0.0 {
            metrics.insert("recovery_seconds".to_owned(), self.recovery_seconds);
        }
        if self.last.link_latency_seconds > 0.0 {
            metrics.insert("link_latency_seconds".to_owned(), self.last.link_latency_seconds);
            metrics.insert("link_bytes_per_second".to_owned(), self.last.link_bytes_per_second);
        }
        if self.spread_ratio > 0.0 {
            metrics.insert("spread_ratio".to_owned(), self.spread_ratio);
        }
        let parts = || self.parts.values().copied();
        let (least, most) = (parts().fold(f64::INFINITY, f64::min), parts().fold(0.0, f64::max));
        if least > 0.0 && most > 0.0 {
            metrics.insert("part_ratio".to_owned(), most / least);
        }
        if self.has_pipelines {
            metrics.insert("pipeline_bubble".to_owned(), self.last.pipeline_bubble);
        }
        if self.ensemble > 1 {
            metrics.insert("ensemble".to_owned(), self.ensemble as f64);
        }
        if let Some((spec, _, epsilon)) = &self.privacy {
            metrics.extend([
                ("epsilon_spent".to_owned(), *epsilon),
                ("epsilon_budget".to_owned(), spec.epsilon),
                ("delta".to_owned(), spec.delta),
            ]);
        }
        if let Some(items) = &self.items {
            metrics.extend([
                ("priorities_changed".to_owned(), items.changed as f64),
                ("priorities_stale".to_owned(), items.stale as f64),
                ("priorities_skipped".to_owned(), items.skipped as f64),
                ("draw_seconds".to_owned(), items.draw_seconds),
            ]);
        }
        metrics.extend(rates.efficiency.map(|efficiency| ("efficiency".to_owned(), efficiency)));
        metrics
    }

    /// Returns a row of the history; `None` before the first step.
    pub(super) fn row(&self) -> Option<TrainingRow> {
        (self.last.step > 0).then(|| TrainingRow {
            step: self.last.step,
            loss: self.last.loss,
            samples_per_s: self.rates.samples_per_second,
            efficiency: self.rates.efficiency.unwrap_or_default(),
            members: u32::try_from(self.members).unwrap_or(u32::MAX),
        })
    }
}

/// Returns what a run found.
///
/// # Errors
/// A figure is not finite.
pub(super) fn findings(
    state: &RunState,
    training: &TrainingState,
    replay: &ReplayRun,
    result: &v1::TrainingResult,
) -> Result<TaskFindings, TaskError> {
    let loss = state.metrics.get("loss").copied().unwrap_or_default();
    let mut verdicts = if result.held_out > 0 { held_out_verdicts(result) } else { buffer_verdicts(replay, loss) };
    let same = format!("All members have the same parameters after step {}: digest {}.", result.step, result.digest);
    verdicts.push((true, same));
    let models = match replay.ensemble {
        1 => String::new(),
        models => format!("Ensemble of {models} models. Each: "),
    };
    let about = format!(
        "{models}{} parameters, {} steps of {} samples, {} samples in all.",
        result.parameters,
        replay.steps,
        replay.batch * replay.sync_every * replay.accumulate,
        result.samples
    );
    let figure = |name: &str| state.metrics.get(name).copied();
    let number = |name: &str, digits: usize| figure(name).map_or_else(|| "-".into(), |it| format!("{it:.digits$}"));
    let on = "on held-out samples".to_owned();
    let mut tiles = if result.classes > 0 {
        vec![("Accuracy", format!("{:.3}", result.accuracy), on)]
    } else if result.held_out > 0 {
        vec![
            ("Correlation", format!("{:.3}", result.correlation), on.clone()),
            ("Squared error", format!("{:.5}", result.squared_error), on),
        ]
    } else {
        vec![("Loss", format!("{loss:.5}"), "of the last step".to_owned())]
    };
    tiles.extend([
        ("Samples/s", number("samples_per_second", 0), "all members".to_owned()),
        ("Efficiency", number("efficiency", 2), "of the members' own throughput".to_owned()),
        ("Members", number("members", 0), format!("{} left by failures", training.failures)),
    ]);
    let summary = verdicts.iter().map(|(_, text)| text.clone()).collect();
    let page = training_page(&state.name, &about, verdicts, tiles, &training.history)?;
    let mut metrics = BTreeMap::from([("parameters".to_owned(), result.parameters as f64)]);
    for (name, baseline) in [("ridge", &result.ridge), ("boosted", &result.boosted)] {
        let Some(TrainingBaseline { squared_error, correlation, accuracy }) = *baseline else { continue };
        if result.classes > 0 {
            metrics.insert(format!("{name}_accuracy"), accuracy);
        } else {
            metrics.insert(format!("{name}_squared_error"), squared_error);
            metrics.insert(format!("{name}_correlation"), correlation);
        }
    }
    if replay.ensemble > 1 && result.held_out > 0 {
        metrics.insert("held_out_deviation".to_owned(), result.deviation);
    }
    if result.classes > 0 {
        metrics.insert("held_out_accuracy".to_owned(), result.accuracy);
    } else if result.held_out > 0 {
        metrics.extend([
            ("held_out_correlation".to_owned(), result.correlation),
            ("held_out_squared_error".to_owned(), result.squared_error),
            ("spread_ratio".to_owned(), result.spread_ratio),
        ]);
    }
    Ok(TaskFindings {
        metrics,
        outputs: BTreeMap::from([
            ("digest".to_owned(), result.digest.clone()),
            ("checkpoint".to_owned(), result.checkpoint.clone()),
        ]),
        summary,
        page,
    })
}

/// Returns the alarm for predictions that have collapsed to a constant; `None` if their spread was not measured.
pub(super) fn collapse(spread_ratio: f64) -> Option<String> {
    let is_collapsed = spread_ratio > 0.0 && spread_ratio < COLLAPSED;
    is_collapsed
        .then(|| format!("The predictions have collapsed: their spread is {spread_ratio:.2} of that of the targets."))
}

fn held_out_verdicts(result: &v1::TrainingResult) -> Vec<(bool, String)> {
    if result.classes > 0 {
        let text = format!(
            "The class of {:.1} % of {} held-out samples is predicted.",
            100.0 * result.accuracy,
            result.held_out
        );
        return [(true, text)].into_iter().chain(comparisons(result)).collect();
    }
    let alarm = collapse(result.spread_ratio);
    let is_collapsed = alarm.is_some();
    let spread = alarm.unwrap_or_else(|| {
        format!("The spread of the predictions is {:.2} of that of the targets.", result.spread_ratio)
    });
    let correlation = format!(
        "On {} held-out samples the predictions correlate with the targets by {:.3}.",
        result.held_out, result.correlation
    );
    [(result.correlation > 0.9, correlation), (!is_collapsed, spread)].into_iter().chain(comparisons(result)).collect()
}

/// Compares the model with other predictors that were fitted to the same samples.
fn comparisons(result: &v1::TrainingResult) -> Vec<(bool, String)> {
    let baselines = [("a ridge regression", &result.ridge), ("boosted trees", &result.boosted)];
    let compared =
        baselines.into_iter().filter_map(|(name, baseline)| Some(comparison(result, name, baseline.as_ref()?)));
    compared.collect()
}

fn comparison(result: &v1::TrainingResult, name: &str, baseline: &TrainingBaseline) -> (bool, String) {
    let (wins, figures) = if result.classes > 0 {
        let figures =
            format!("{:.1} % against {:.1} % of the classes", 100.0 * result.accuracy, 100.0 * baseline.accuracy);
        (result.accuracy > baseline.accuracy, figures)
    } else {
        let figures = format!("squared error {:.5} against {:.5}", result.squared_error, baseline.squared_error);
        (result.squared_error < baseline.squared_error, figures)
    };
    let verb = if wins { "is" } else { "is not" };
    (wins, format!("The model {verb} better than {name} on the held-out samples: {figures}."))
}

fn buffer_verdicts(replay: &ReplayRun, loss: f64) -> Vec<(bool, String)> {
    let ReplaySource::Buffer(source) = &replay.source else { return Vec::new() };
    let text = format!(
        "The loss of step {} on items of buffer {} is {loss:.5}. source.buffer.heldOut names no buffer to measure the result on.",
        replay.steps, source.name
    );
    vec![(true, text)]
}
