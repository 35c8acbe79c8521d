//! Figures of a Replay run: throughput, efficiency, loss, and what the run found.

use crate::runs::replay::members::MemberWork;
use crate::training::{COMPRESSION_LEVEL, LEVELS, algorithm_name, level_number};
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
    drawn_ahead: u64,
    hidden_seconds: f64,
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
    /// Share of the time of reductions that the backward pass hides; 0 where gradients are reduced after it.
    hidden_share: f64,
}

/// Speed of a group, measured over windows.
struct Pace {
    meter: EfficiencyMeter,
    window: Window,
    window_since: Instant,
    rates: Rates,
}

impl Pace {
    fn restart(&mut self) {
        self.meter.restart();
        (self.window, self.window_since) = (Window::default(), Instant::now());
    }
}

/// Figures of a group.
pub(in crate::runs) struct Figures {
    pace: Pace,
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
    /// What each member computes.
    work: MemberWork,
    /// Models that are trained.
    ensemble: u64,
    /// Whether devices of the workers share batches.
    has_pipelines: bool,
    /// With differential privacy: what a step costs, and the newest number of steps with their epsilon.
    privacy: Option<(PrivacySpec, u64, f64)>,
}

/// Parts of a run for which epsilon is computed: the value that is shown is that of the end of the part in progress.
const EPSILON_PARTS: u64 = 16;

/// What became of the priorities of all members since this driver began, and the part of a step in which the first rank waited for a draw, and its share of
/// steps that did not wait.
#[derive(Debug, Clone, Copy, Default)]
struct ItemFigures {
    changed: u64,
    stale: u64,
    skipped: u64,
    draw_seconds: f64,
    drawn_ahead_share: f64,
}

impl Figures {
    pub(in crate::runs) fn new(replay: &ReplayRun) -> Self {
        let now = Instant::now();
        let is_buffer = matches!(replay.source, ReplaySource::Buffer(_));
        Self {
            pace: Pace {
                meter: EfficiencyMeter::new(),
                window: Window::default(),
                window_since: now,
                rates: Rates::default(),
            },
            shown: now,
            members: 0,
            last: v1::TrainingProgress::default(),
            stall_seconds: 0.0,
            recovery_seconds: 0.0,
            items: is_buffer.then(ItemFigures::default),
            spread_ratio: 0.0,
            work: MemberWork::default(),
            ensemble: replay.ensemble,
            has_pipelines: replay.parallelism.is_some(),
            privacy: None,
        }
    }

    /// Shows the privacy budget.
    pub(in crate::runs) fn set_privacy(&mut self, privacy: Option<PrivacySpec>) {
        self.privacy = privacy.map(|spec| (spec, 0, 0.0));
    }

    /// Computes what was spent by the end of the part of the run that has this step.
    pub(in crate::runs) fn update_epsilon(&mut self, step: u64) {
        let Some((spec, steps, epsilon)) = &mut self.privacy else { return };
        if step > *steps {
            let part = spec.steps.div_ceil(EPSILON_PARTS);
            *steps = (step.div_ceil(part) * part).min(spec.steps);
            *epsilon = spec.spent(*steps);
        }
    }

    /// The group has other members.
    pub(in crate::runs) fn restart(&mut self, members: usize) {
        self.members = members;
        self.pace.restart();
    }

    /// A member left.
    pub(in crate::runs) fn remove(&mut self, worker: Ordinal) {
        self.pace.meter.remove(worker.0);
        self.work.remove(worker);
    }

    /// Takes the progress of a member; that of the first rank stands for the group.
    pub(in crate::runs) fn observe(&mut self, worker: Ordinal, rank: Option<usize>, progress: &v1::TrainingProgress) {
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
        self.work.observe(worker, progress);
        self.pace.meter.record_solo(worker.0, progress.own_samples, progress.compute_seconds);
        self.stall_seconds = self.stall_seconds.max(progress.checkpoint_stall_seconds);
        if rank != Some(0) {
            return;
        }
        if progress.recovery_seconds > 0.0 {
            self.recovery_seconds = progress.recovery_seconds;
        }
        self.pace.meter.record_step(progress.samples, progress.wall_seconds, progress.reduce_seconds);
        let window = &mut self.pace.window;
        window.steps += progress.steps;
        window.samples += progress.samples;
        window.wall_seconds += progress.wall_seconds;
        window.reduce_seconds += progress.reduce_seconds;
        window.bytes += progress.reduced_bytes;
        window.draw_seconds += progress.draw_seconds;
        window.drawn_ahead += progress.drawn_ahead;
        window.hidden_seconds += progress.hidden_seconds;
        self.last.clone_from(progress);
        let is_first = self.pace.rates.samples_per_second == 0.0 && self.pace.window.steps >= FIRST_STEPS;
        if self.pace.window_since.elapsed() >= WINDOW || is_first {
            self.close_window();
        }
    }

    fn close_window(&mut self) {
        let Window { steps, samples, wall_seconds, reduce_seconds, bytes, draw_seconds, drawn_ahead, hidden_seconds } =
            self.pace.window;
        if steps > 0 && wall_seconds > 0.0 {
            if let Some(items) = &mut self.items {
                items.draw_seconds = draw_seconds / steps as f64;
                items.drawn_ahead_share = drawn_ahead as f64 / steps as f64;
            }
            self.pace.rates = Rates {
                steps_per_second: steps as f64 / wall_seconds,
                samples_per_second: samples as f64 / wall_seconds,
                step_seconds: wall_seconds / steps as f64,
                reduce_seconds: reduce_seconds / steps as f64,
                bytes_per_step: bytes as f64 / steps as f64,
                efficiency: self.pace.meter.efficiency(),
                hidden_share: if hidden_seconds > 0.0 {
                    hidden_seconds / (hidden_seconds + reduce_seconds)
                } else {
                    0.0
                },
            };
            self.pace.restart();
        }
    }

    /// Returns whether a status is due, at most every [`SHOW_INTERVAL`].
    pub(in crate::runs) fn is_due(&mut self) -> bool {
        let is_due = self.shown.elapsed() >= SHOW_INTERVAL && self.last.step > 0;
        if is_due {
            self.shown = Instant::now();
            self.update_epsilon(self.last.step);
        }
        is_due
    }

    pub(in crate::runs) const fn step(&self) -> u64 {
        self.last.step
    }

    pub(in crate::runs) const fn total_samples(&self) -> u64 {
        self.last.total_samples
    }

    pub(in crate::runs) const fn steps_per_second(&self) -> f64 {
        self.pace.rates.steps_per_second
    }

    pub(in crate::runs) const fn samples_per_second(&self) -> f64 {
        self.pace.rates.samples_per_second
    }

    /// Returns the figures by name.
    pub(in crate::runs) fn metrics(&self, workers: usize, failures: u64) -> BTreeMap<String, f64> {
        let rates = &self.pace.rates;
        let mut metrics = BTreeMap::from([
            ("loss".to_owned(), self.last.loss),
            ("gradient_norm".to_owned(), self.last.gradient_norm),
            ("learning_rate".to_owned(), self.last.learning_rate),
            ("checkpoint_stall_seconds".to_owned(), self.stall_seconds),
            ("members".to_owned(), self.members as f64),
            ("failed_members".to_owned(), failures as f64),
            // One worker is left of several.
            ("fallback".to_owned(), f64::from(u8::from(self.members == 1 && workers > 1))),
        ]);
        if rates.samples_per_second > 0.0 {
            metrics.extend([
                ("samples_per_second".to_owned(), rates.samples_per_second),
                ("step_seconds".to_owned(), rates.step_seconds),
                ("reduce_seconds".to_owned(), rates.reduce_seconds),
                ("reduced_bytes_per_step".to_owned(), rates.bytes_per_step),
            ]);
        }
        if rates.hidden_share > 0.0 {
            metrics.insert("hidden_reduction_share".to_owned(), rates.hidden_share);
        }
        if let Some(level) = level_number(self.last.compression_level()) {
            metrics.insert(COMPRESSION_LEVEL.to_owned(), level as f64);
        }
        if self.recovery_seconds > 0.0 {
            metrics.insert("recovery_seconds".to_owned(), self.recovery_seconds);
        }
        if self.last.link_latency_seconds > 0.0 {
            metrics.insert("link_latency_seconds".to_owned(), self.last.link_latency_seconds);
            metrics.insert("link_bytes_per_second".to_owned(), self.last.link_bytes_per_second);
            metrics.insert("shared_memory_links".to_owned(), f64::from(self.last.shared_connections));
            metrics.insert("link_streams".to_owned(), f64::from(self.last.link_streams));
        }
        if self.spread_ratio > 0.0 {
            metrics.insert("spread_ratio".to_owned(), self.spread_ratio);
        }
        metrics.extend(self.work.part_ratio().map(|ratio| ("part_ratio".to_owned(), ratio)));
        metrics.extend(self.work.gpu_share().map(|share| ("gpu_share".to_owned(), share)));
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
                ("drawn_ahead_share".to_owned(), items.drawn_ahead_share),
            ]);
        }
        metrics.extend(rates.efficiency.map(|efficiency| ("efficiency".to_owned(), efficiency)));
        metrics
    }

    /// Returns which devices computed the gradients of the last step, the level of automatic compression, and how gradients were added, by name.
    pub(in crate::runs) fn texts(&self) -> BTreeMap<String, String> {
        let devices = self.work.devices().map(|devices| ("devices".to_owned(), devices));
        let nccl = (!self.last.nccl.is_empty()).then(|| ("nccl".to_owned(), self.last.nccl.clone()));
        let algorithm = algorithm_name(self.last.algorithm());
        let level = level_number(self.last.compression_level());
        let level = level.map(|level| ("compression".to_owned(), LEVELS[level].to_owned()));
        let algorithm = algorithm.map(|name| ("reduction".to_owned(), name.to_owned()));
        algorithm.into_iter().chain(nccl).chain(level).chain(devices).collect()
    }

    /// Returns a row of the history; `None` before the first step.
    pub(in crate::runs) fn row(&self) -> Option<TrainingRow> {
        (self.last.step > 0).then(|| TrainingRow {
            step: self.last.step,
            loss: self.last.loss,
            samples_per_s: self.pace.rates.samples_per_second,
            efficiency: self.pace.rates.efficiency.unwrap_or_default(),
            members: u32::try_from(self.members).unwrap_or(u32::MAX),
        })
    }
}

/// Returns what a run found.
///
/// # Errors
/// A figure is not finite.
pub(in crate::runs) fn findings(
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
    let fallback = if figure("fallback") == Some(1.0) { ", fallback to one worker" } else { "" };
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
        ("Step", number("step_seconds", 4) + " s", format!("{} s of it in reduction", number("reduce_seconds", 4))),
        ("Members", number("members", 0), format!("{} left by failures{fallback}", training.failures)),
    ]);
    if let Some(level) = figure(COMPRESSION_LEVEL).and_then(|level| LEVELS.get(level as usize)) {
        tiles.push(("Compression", (*level).to_owned(), "automatic, after the last step".to_owned()));
    }
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
pub(in crate::runs) fn collapse(spread_ratio: f64) -> Option<String> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn figures() -> Figures {
        let spec = json!({
            "source": { "synthetic": { "features": 60, "samples": 200 } },
            "model": {
                "inputs": [{ "field": "mask", "dim": 60 }],
                "layers": [{ "dense": 1 }],
                "loss": { "kind": "Mse", "target": "score" },
            },
            "optimizer": { "rate": 0.01 },
            "batch": 64,
            "steps": 100,
        });
        Figures::new(&serde_json::from_value(spec).unwrap())
    }

    /// Observes ten steps of two members with the same part of each batch; a step computes for a second, then communicates.
    fn efficiency(compute_seconds: [f64; 2], communication_seconds: f64) -> f64 {
        let mut figures = figures();
        figures.restart(2);
        let longest = compute_seconds[0].max(compute_seconds[1]);
        for (rank, seconds) in compute_seconds.into_iter().enumerate().rev() {
            let progress = v1::TrainingProgress {
                step: 10,
                steps: 10,
                samples: 640,
                own_samples: 320,
                compute_seconds: 10.0 * seconds,
                reduce_seconds: 10.0 * (longest - seconds + communication_seconds),
                wall_seconds: 10.0 * (longest + communication_seconds),
                ..v1::TrainingProgress::default()
            };
            figures.observe(Ordinal(rank as u32), Some(rank), &progress);
        }
        figures.metrics(2, 0)["efficiency"]
    }

    #[test]
    fn efficiency_of_a_run_falls_with_slow_communication_and_with_a_slow_member() {
        assert!((efficiency([1.0, 1.0], 0.0) - 1.0).abs() < 1e-9);
        assert!(efficiency([1.0, 1.0], 0.5) < 0.7, "half a step of communication per step");
        assert!(efficiency([1.0, 3.0], 0.0) < 0.7, "the fast member waits for the slow one");
    }

    #[test]
    fn predictions_that_vary_less_than_a_third_of_the_targets_raise_an_alarm() {
        assert_eq!(collapse(0.0), None, "not measured");
        assert_eq!(collapse(0.31), None);
        assert!(collapse(0.29).is_some_and(|alarm| alarm.contains("collapsed") && alarm.contains("0.29")));
    }

    #[test]
    fn figures_that_were_not_measured_are_absent() {
        let mut figures = figures();
        let measured = ["efficiency", "samples_per_second", "step_seconds", "reduce_seconds", "recovery_seconds"];
        let measured = || measured.iter().chain(&["link_latency_seconds", "spread_ratio", "part_ratio"]);
        let shown = figures.metrics(2, 0);
        assert!(measured().all(|name| !shown.contains_key(*name)), "{shown:?}");
        // A member alone has no link, and none was lost.
        let progress = v1::TrainingProgress {
            step: 10,
            steps: 10,
            samples: 640,
            own_samples: 640,
            compute_seconds: 1.0,
            wall_seconds: 1.0,
            ..v1::TrainingProgress::default()
        };
        figures.restart(1);
        figures.observe(Ordinal(0), Some(0), &progress);
        let shown = figures.metrics(2, 1);
        let absent: Vec<&str> = measured().copied().filter(|name| !shown.contains_key(*name)).collect();
        assert_eq!(absent, ["recovery_seconds", "link_latency_seconds", "spread_ratio"], "{shown:?}");
        assert_eq!((shown["members"], shown["failed_members"], shown["fallback"]), (1.0, 1.0, 1.0));
    }
}
