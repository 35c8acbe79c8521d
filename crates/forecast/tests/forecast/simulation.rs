//! Both rules on the loads that autoscalers fail on.

use engram_forecast::simulate::{ClusterModel, LoadPoint, Rule, RuleReport, replay};
use engram_forecast::{Reason, Settings};
use std::f64::consts::TAU;

const DAY: usize = 1_440;
const MODEL: ClusterModel = ClusterModel { startup_seconds: 900.0, drain_seconds: 60.0 };

/// Uniform numbers in [0, 1) from a seed (SplitMix64).
struct Noise(u64);

impl Noise {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A normal number by the Box-Muller transform.
    fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.uniform()).ln()).sqrt() * (TAU * self.uniform()).cos()
    }
}

fn settings() -> Settings {
    Settings { target_utilization: 0.85, max_workers: 200, ..Settings::new(100.0) }
}

/// A load with one value per minute and relative noise.
fn load(days: usize, deviation: f64, seed: u64, shape: impl Fn(usize) -> f64) -> Vec<LoadPoint> {
    let mut noise = Noise(seed);
    let mut point = |minute: usize| {
        let demand = shape(minute) * (1.0 + deviation * noise.normal()).max(0.0);
        LoadPoint::exact(demand, 1.7e9 + minute as f64 * 60.0)
    };
    (0..days * DAY).map(&mut point).collect()
}

fn sine(minute: usize) -> f64 {
    2_000.0 * (1.0 + 0.8 * (TAU * minute as f64 / DAY as f64).sin())
}

/// Returns the reports of the reactive and of the predictive rule.
fn both(load: &[LoadPoint]) -> (RuleReport, RuleReport) {
    let run = |rule| replay(rule, load, &settings(), MODEL).expect("the settings are valid");
    let (reactive, predictive) = (run(Rule::Reactive), run(Rule::Predictive));
    for report in [&reactive, &predictive] {
        let RuleReport { violations, unserved_load_hours, replica_hours, changes, reversals, .. } = report;
        println!(
            "{:?}: {violations} violations, {unserved_load_hours:.1} unserved, {replica_hours:.1} hours, {changes} changes, \
             {reversals} reversals, {:?}",
            report.rule, report.reasons
        );
    }
    (reactive, predictive)
}

/// Asserts that the predictive rule is worse by at most 5 % in violations, unserved load and replica-hours, and does not thrash.
fn assert_not_worse((reactive, predictive): &(RuleReport, RuleReport)) {
    let allowed = |value: u64| value + value / 20;
    assert!(predictive.violations <= allowed(reactive.violations), "violations");
    assert!(predictive.unserved_load_hours <= 1.05 * reactive.unserved_load_hours, "unserved load");
    assert!(predictive.replica_hours <= 1.05 * reactive.replica_hours, "replica-hours");
    assert_no_thrash(reactive, predictive);
}

/// Asserts that changes in both directions within 10 minutes are rare: one per day more than those of the reactive rule.
fn assert_no_thrash(reactive: &RuleReport, predictive: &RuleReport) {
    let days = predictive.steps.len().div_ceil(DAY) as u64;
    assert!(predictive.reversals <= reactive.reversals + days, "{} reversals in {days} days", predictive.reversals);
}

#[test]
fn daily_sine_has_fewer_violations_at_no_more_replica_hours() {
    for (seed, deviation) in [(1, 0.01), (2, 0.02), (3, 0.05)] {
        let (reactive, predictive) = both(&load(10, deviation, seed, sine));
        assert!(predictive.violations < reactive.violations, "seed {seed}");
        assert!(predictive.replica_hours <= reactive.replica_hours, "seed {seed}");
        assert_no_thrash(&reactive, &predictive);
        assert!(predictive.changes <= 2 * reactive.changes, "seed {seed}");
        assert!(predictive.reasons[&Reason::ForecastAboveTarget] > 0);
    }
}

#[test]
fn step_is_not_worse_than_reactive() {
    assert_not_worse(&both(&load(4, 0.02, 4, |minute| if minute < 2 * DAY { 1_000.0 } else { 3_000.0 })));
}

#[test]
fn flash_crowd_is_not_worse_than_reactive() {
    let crowd = |minute: usize| if (6 * DAY + 200..6 * DAY + 220).contains(&minute) { 5.0 } else { 1.0 };
    assert_not_worse(&both(&load(8, 0.02, 5, |minute| sine(minute) * crowd(minute))));
}

#[test]
fn missing_metrics_keep_workers_and_let_the_forecast_add_them() {
    let mut points = load(8, 0.02, 6, sine);
    // The steepest hours of a day.
    for point in &mut points[5 * DAY - 120..5 * DAY + 120] {
        point.metric = None;
    }
    let reports = both(&points);
    assert_not_worse(&reports);
    let predictive = &reports.1;
    let during = &predictive.steps[5 * DAY - 119..5 * DAY + 120];
    assert!(during.windows(2).all(|pair| pair[1].desired >= pair[0].desired), "no scale-down without samples");
    assert!(during[238].desired > during[0].desired, "the forecast scales up");
}

#[test]
fn clock_jump_changes_no_decision() {
    let straight = load(6, 0.02, 7, sine);
    let mut jumping = straight.clone();
    for point in &mut jumping[4 * DAY..4 * DAY + 300] {
        point.wall_seconds += 7_200.0;
    }
    for point in &mut jumping[5 * DAY..] {
        point.wall_seconds -= 86_405.0;
    }
    let (reactive, predictive) = both(&jumping);
    let expected = replay(Rule::Predictive, &straight, &settings(), MODEL).unwrap();
    assert_eq!(predictive.steps, expected.steps);
    assert_not_worse(&(reactive, predictive));
}

#[test]
fn stuck_metric_removes_no_worker_and_lets_the_forecast_add_them() {
    let mut points = load(8, 0.02, 8, sine);
    // Reports the load of the night through the morning.
    let value = points[5 * DAY - 120].metric;
    for point in &mut points[5 * DAY - 120..5 * DAY + 180] {
        point.metric = value;
    }
    let reports = both(&points);
    assert_not_worse(&reports);
    assert!(reports.1.reasons[&Reason::MetricStuck] > 60);
    assert!(reports.1.violations < reports.0.violations / 2, "the forecast replaces the metric");
}

#[test]
fn metric_stuck_at_the_peak_costs_no_more_than_the_reactive_rule() {
    let mut points = load(8, 0.02, 9, sine);
    let value = points[5 * DAY + 400].metric;
    for point in &mut points[5 * DAY + 400..5 * DAY + 700] {
        point.metric = value;
    }
    assert_not_worse(&both(&points));
}
