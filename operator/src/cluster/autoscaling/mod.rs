//! The autoscaler of a cluster: the load from the workers' counters, one decision per interval, and who may write it.
//!
//! Pure: times and observations are passed in. [`engram_forecast`] decides; this module connects it with the manifest, the status and
//! other writers of `/scale`.

pub(crate) mod autoscalers;
pub(crate) mod history;
pub(crate) mod keda;
pub(crate) mod metrics;

use std::collections::BTreeMap;

use engram_api::{Autoscaling, AutoscalingMode, AutoscalingStatus};
use engram_forecast::history::{History, Record};
use engram_forecast::{Autoscaler, Decision, Observation, Settings};
use engram_memory::Ordinal;

/// Pause after another writer changed the number of workers, in seconds.
const CONFLICT_PAUSE_SECONDS: f64 = 600.0;
/// Reason of a decision that is not written because of another writer.
const CONFLICT: &str = "Conflict";
/// Time between two writes of the history that are not for a change, in seconds. Each costs the API server an object of a few hundred kB.
const SAVE_SECONDS: f64 = 300.0;

/// What is known at the time of a step.
#[derive(Clone, Debug)]
pub struct ScalingObservation<'a> {
    /// Wall clock in seconds since the epoch.
    pub wall_seconds: f64,
    /// The same as RFC 3339.
    pub time: &'a str,
    /// Monotonic clock of the process in seconds.
    pub monotonic_seconds: f64,
    /// Operations that each live worker has served since its process started; empty if unknown.
    pub operations: &'a BTreeMap<Ordinal, u64>,
    /// `spec.workers`.
    pub workers: u32,
    /// Workers that are ready.
    pub ready: u32,
    /// Whether workers are being drained.
    pub is_draining: bool,
}

/// Result of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalingStep {
    /// Status to publish.
    pub status: AutoscalingStatus,
    /// Number of workers to write to `/scale`.
    pub write: Option<u32>,
    /// Whether another writer changed the number of workers since the last step.
    pub is_conflict: bool,
}

/// Autoscaler of one cluster.
#[derive(Debug)]
pub struct ClusterAutoscaler {
    spec: Autoscaling,
    autoscaler: Autoscaler,
    load: LoadMeter,
    next_seconds: f64,
    /// Number of workers that this operator wrote last.
    written: Option<u32>,
    /// When a scale-up was written, and to how many workers, until these are ready.
    starting: Option<(f64, u32)>,
    /// End of the pause after a conflict.
    paused_until: f64,
    /// Status of the last decision.
    last: Option<AutoscalingStatus>,
    history: History,
    /// Start-up time that was measured since the last decision.
    startup_seconds: Option<f64>,
    /// When the history was last written.
    saved_seconds: Option<f64>,
    /// Whether the last decision is one that is written immediately.
    is_change: bool,
}

impl ClusterAutoscaler {
    /// Creates an autoscaler that continues after `history`. Fails with a sentence if the settings are invalid.
    ///
    /// # Errors
    /// A setting is outside of its range.
    pub fn new(spec: &Autoscaling, history: History) -> Result<Self, String> {
        let mut autoscaler = Autoscaler::new(settings(spec)).map_err(|error| error.to_string())?;
        autoscaler.resume(history.records());
        Ok(Self {
            spec: spec.clone(),
            autoscaler,
            load: LoadMeter::default(),
            next_seconds: 0.0,
            written: None,
            starting: None,
            paused_until: 0.0,
            last: None,
            history,
            startup_seconds: None,
            saved_seconds: None,
            is_change: false,
        })
    }

    /// Returns the past decisions.
    pub const fn history(&self) -> &History {
        &self.history
    }

    /// Returns whether two decisions were missed: another replica has decided meanwhile, or the cluster was suspended.
    pub fn is_outdated(&self, monotonic_seconds: f64) -> bool {
        self.next_seconds > 0.0 && monotonic_seconds > self.next_seconds + 2.0 * interval_seconds(&self.spec)
    }

    /// Returns the history if it is to be written now: after a change, and every five minutes.
    pub fn take_unsaved(&mut self, monotonic_seconds: f64) -> Option<String> {
        let is_due = self.saved_seconds.is_none_or(|saved| monotonic_seconds - saved >= SAVE_SECONDS);
        if !is_due && !self.is_change {
            return None;
        }
        self.is_change = false;
        self.saved_seconds = Some(monotonic_seconds);
        Some(self.history.to_text())
    }

    /// Returns whether it was created for this block of a manifest.
    pub fn is_for(&self, spec: &Autoscaling) -> bool {
        self.spec == *spec
    }

    /// Returns the seconds until the next step.
    pub fn wait_seconds(&self, monotonic_seconds: f64) -> f64 {
        (self.next_seconds - monotonic_seconds).max(0.0)
    }

    /// Returns the status of the last decision; `None` before the first.
    pub fn last(&self) -> Option<&AutoscalingStatus> {
        self.last.as_ref()
    }

    /// Records how long started workers took, and takes the next decision if it is due.
    pub fn step(&mut self, observed: &ScalingObservation<'_>) -> Option<ScalingStep> {
        let now = observed.monotonic_seconds;
        if let Some((since, _)) = self.starting.filter(|&(_, workers)| observed.ready >= workers) {
            self.autoscaler.record_startup(now - since);
            self.startup_seconds = Some(now - since);
            self.starting = None;
        }
        if self.wait_seconds(now) > 0.0 {
            return None;
        }
        self.next_seconds = now + interval_seconds(&self.spec);
        let is_conflict = self.spec.mode == AutoscalingMode::Operator
            && self.written.take_if(|written| *written != observed.workers).is_some();
        if is_conflict {
            self.paused_until = now + CONFLICT_PAUSE_SECONDS;
        }
        let load = self.load.rate(now, observed.operations);
        let decision = self.autoscaler.step(&Observation {
            wall_seconds: observed.wall_seconds,
            monotonic_seconds: now,
            load,
            workers: observed.workers,
            is_draining: observed.is_draining,
        });
        let mut status = status_of(&decision, observed.time);
        let is_paused = now < self.paused_until;
        if is_paused {
            status.reason = CONFLICT.to_owned();
            status.message = format!(
                "Another writer set spec.workers to {}, so the operator writes nothing for {:.0} s; use mode External for it. {}",
                observed.workers,
                self.paused_until - now,
                decision.message
            );
        }
        let is_writer = self.spec.mode == AutoscalingMode::Operator && !is_paused;
        let write = Some(decision.desired).filter(|desired| is_writer && *desired != observed.workers);
        self.is_change = write.is_some() || is_conflict;
        self.record(&status, &decision, observed.wall_seconds);
        self.last = Some(status.clone());
        Some(ScalingStep { status, write, is_conflict })
    }

    fn record(&mut self, status: &AutoscalingStatus, decision: &Decision, wall_seconds: f64) {
        let is_explained = decision.desired != decision.workers || status.reason == CONFLICT;
        self.history.push(Record {
            seconds: wall_seconds as i64,
            load: status.load,
            workers: decision.workers,
            desired: decision.desired,
            expected: status.expected_load,
            upper: status.upper_load,
            horizon_seconds: status.horizon_seconds,
            startup_seconds: self.startup_seconds.take().map(rounded),
            forecast: status.forecast.clone(),
            reason: status.reason.clone(),
            message: if is_explained { status.message.clone() } else { String::new() },
        });
    }

    /// Records that a number of workers was written.
    pub fn wrote(&mut self, workers: u32, previous: u32, monotonic_seconds: f64) {
        self.written = Some(workers);
        self.starting = (workers > previous).then_some((monotonic_seconds, workers));
    }
}

fn interval_seconds(spec: &Autoscaling) -> f64 {
    spec.interval.as_millis() as f64 / 1e3
}

fn settings(spec: &Autoscaling) -> Settings {
    let mut settings = Settings::new(f64::from(spec.operations_per_worker));
    settings.set_interval(interval_seconds(spec).round().max(1.0) as u32);
    settings.min_workers = spec.min_workers;
    settings.max_workers = spec.max_workers;
    settings.target_utilization = spec.target_utilization;
    settings
}

fn status_of(decision: &Decision, time: &str) -> AutoscalingStatus {
    let forecast = decision.forecast.as_ref();
    AutoscalingStatus {
        desired_workers: i32::try_from(decision.desired).unwrap_or(i32::MAX),
        reason: decision.reason.as_str().to_owned(),
        message: decision.message.clone(),
        load: decision.load.map(rounded),
        expected_load: forecast.map(|it| rounded(it.expected)),
        upper_load: forecast.map(|it| rounded(it.upper)),
        horizon_seconds: forecast.map(|it| rounded(it.horizon_seconds)),
        forecast: format!("{:?}", decision.forecast_status),
        time: Some(time.to_owned()),
    }
}

/// Returns a figure for people.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Turns counters of workers, which start from 0 with each process, into a rate.
#[derive(Debug, Default)]
struct LoadMeter {
    at_seconds: Option<f64>,
    counts: BTreeMap<Ordinal, u64>,
}

impl LoadMeter {
    /// Returns the operations per second of all workers since the last call; `None` at the first call, and without workers.
    fn rate(&mut self, now: f64, counts: &BTreeMap<Ordinal, u64>) -> Option<f64> {
        if counts.is_empty() {
            return None;
        }
        let before = self.at_seconds.replace(now);
        // Workers that do not report for a while keep their count.
        let mut served = 0;
        for (&worker, &count) in counts {
            let last = self.counts.insert(worker, count).unwrap_or(0);
            served += count.checked_sub(last).unwrap_or(count);
        }
        before.filter(|before| now > *before).map(|before| served as f64 / (now - before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(mode: AutoscalingMode) -> Autoscaling {
        Autoscaling {
            mode,
            min_workers: 2,
            max_workers: 8,
            operations_per_worker: 1_000,
            target_utilization: 0.7,
            interval: "60s".parse().unwrap(),
        }
    }

    struct Cluster {
        autoscaler: ClusterAutoscaler,
        seconds: f64,
        served: u64,
        workers: u32,
        is_draining: bool,
    }

    impl Cluster {
        fn new(mode: AutoscalingMode) -> Self {
            let autoscaler = ClusterAutoscaler::new(&spec(mode), History::default()).unwrap();
            Self { autoscaler, seconds: 1_000.0, served: 0, workers: 2, is_draining: false }
        }

        /// Serves `rate` operations per second for an interval, and steps.
        fn minute(&mut self, rate: u64) -> ScalingStep {
            self.seconds += 60.0;
            self.served += rate * 60;
            let operations =
                BTreeMap::from([(Ordinal(0), self.served / 2), (Ordinal(1), self.served - self.served / 2)]);
            let step = self.autoscaler.step(&ScalingObservation {
                wall_seconds: 1e9 + self.seconds,
                time: "2026-11-27T16:00:00Z",
                monotonic_seconds: self.seconds,
                operations: &operations,
                workers: self.workers,
                ready: self.workers,
                is_draining: self.is_draining,
            });
            let step = step.expect("a decision is due every minute");
            if let Some(workers) = step.write {
                self.autoscaler.wrote(workers, self.workers, self.seconds);
                self.workers = workers;
            }
            step
        }
    }

    #[test]
    fn operator_writes_what_the_load_needs_and_others_only_report_it() {
        for (mode, written) in
            [(AutoscalingMode::Operator, Some(6)), (AutoscalingMode::DryRun, None), (AutoscalingMode::External, None)]
        {
            let mut cluster = Cluster::new(mode);
            assert_eq!(cluster.minute(500).status.reason, "MetricMissing", "the first count is no rate");
            assert_eq!(cluster.minute(1_400).status.reason, "OnTarget");
            let step = cluster.minute(4_200);
            assert_eq!((step.status.desired_workers, step.status.load), (6, Some(4_200.0)), "4200 / (1000 * 0.7)");
            assert_eq!((step.write, step.is_conflict), (written, false), "{mode}");
            assert!(step.status.message.contains("Scale from 2 to 6 workers"), "{}", step.status.message);
        }
    }

    #[test]
    fn last_decision_is_kept_until_the_next() {
        let mut cluster = Cluster::new(AutoscalingMode::DryRun);
        assert_eq!(cluster.autoscaler.last(), None);
        let first = cluster.minute(1_400).status;
        assert_eq!(cluster.autoscaler.last(), Some(&first));
        let second = cluster.minute(1_400).status;
        assert!(first != second && cluster.autoscaler.last() == Some(&second), "{second:?}");
    }

    #[test]
    fn change_by_another_writer_pauses_the_operator() {
        let mut cluster = Cluster::new(AutoscalingMode::Operator);
        cluster.minute(1_400);
        assert_eq!(cluster.minute(4_200).write, Some(6));
        cluster.workers = 3;
        let step = cluster.minute(4_200);
        assert!(step.is_conflict && step.write.is_none() && step.status.reason == "Conflict");
        assert!(step.status.message.contains("spec.workers to 3"), "{}", step.status.message);
        let pause: Vec<_> = (0..9).map(|_| cluster.minute(4_200)).collect();
        assert!(pause.iter().all(|step| step.write.is_none() && !step.is_conflict));
        assert_eq!(cluster.minute(4_200).write, Some(6), "after ten minutes it decides again");
    }

    #[test]
    fn no_worker_is_removed_while_another_is_drained() {
        let mut cluster = Cluster::new(AutoscalingMode::Operator);
        cluster.minute(1_400);
        assert_eq!(cluster.minute(4_200).write, Some(6));
        let removed = |cluster: &mut Cluster| (0..30).find_map(|_| cluster.minute(100).write);
        assert_eq!(removed(&mut cluster), Some(5));
        cluster.is_draining = true;
        assert_eq!(removed(&mut cluster), None);
        assert_eq!(cluster.minute(100).status.reason, "Draining");
        cluster.is_draining = false;
        assert_eq!(removed(&mut cluster), Some(4));
    }

    #[test]
    fn restarted_worker_counts_from_zero_and_a_silent_one_is_not_counted_twice() {
        let mut load = LoadMeter::default();
        let counts = |of: &[(u32, u64)]| of.iter().map(|&(worker, count)| (Ordinal(worker), count)).collect();
        assert_eq!(load.rate(0.0, &counts(&[(0, 1_000), (1, 500)])), None);
        assert_eq!(load.rate(10.0, &counts(&[(0, 1_100), (1, 600)])), Some(20.0));
        assert_eq!(load.rate(20.0, &counts(&[(0, 50)])), Some(5.0), "it started again");
        assert_eq!(load.rate(30.0, &counts(&[(0, 60), (1, 700)])), Some(11.0));
        assert_eq!(load.rate(40.0, &counts(&[])), None);
    }

    #[test]
    fn horizon_follows_the_measured_start_of_workers() {
        let mut cluster = Cluster::new(AutoscalingMode::Operator);
        let before = cluster.autoscaler.autoscaler.horizon_seconds();
        cluster.minute(1_400);
        cluster.minute(4_200);
        cluster.minute(4_200);
        let after = cluster.autoscaler.autoscaler.horizon_seconds();
        assert!((before, after) == (180.0, 120.0), "{before} {after}: 120 s until one is measured, then 60 s");
    }

    #[test]
    fn history_is_written_at_once_for_a_change_and_continued_by_another_process() {
        let mut cluster = Cluster::new(AutoscalingMode::Operator);
        cluster.minute(1_400);
        let mut saved = cluster.autoscaler.take_unsaved(cluster.seconds).expect("the first decision is written");
        for minute in 1..=40_u64 {
            let step = cluster.minute(1_400 + minute % 2);
            let unsaved = cluster.autoscaler.take_unsaved(cluster.seconds);
            assert_eq!((unsaved.is_some(), step.write), (minute % 5 == 0, None), "minute {minute}");
            saved = unsaved.unwrap_or(saved);
        }
        cluster.minute(1_400);
        assert_eq!(cluster.minute(4_200).write, Some(6));
        let text = cluster.autoscaler.take_unsaved(cluster.seconds).expect("a change is written at once");
        assert!(text.contains(",LoadAboveTarget,\"Scale from 2 to 6 workers"), "{text}");
        assert!(text.len() > saved.len() && !cluster.autoscaler.is_outdated(cluster.seconds + 170.0));
        assert!(cluster.autoscaler.is_outdated(cluster.seconds + 190.0));

        let (history, invalid) = History::parse(&text);
        let autoscaler = ClusterAutoscaler::new(&spec(AutoscalingMode::Operator), history).unwrap();
        let mut restarted =
            Cluster { autoscaler, seconds: cluster.seconds, served: cluster.served, workers: 6, is_draining: false };
        assert_eq!(restarted.minute(4_200).status.reason, "MetricMissing", "the first count of a process is no rate");
        let status = restarted.minute(4_200).status;
        assert_eq!((invalid, status.forecast.as_str()), (0, "Active"), "the forecast does not start empty");
        assert_eq!(restarted.autoscaler.history().records().len(), 45);
    }
}
