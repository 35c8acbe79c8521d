//! Decisions of single steps.

use engram_forecast::decision::Decision;
use engram_forecast::forecaster::{ForecastStatus, MAX_SAMPLES};
use engram_forecast::history::{History, Record};
use engram_forecast::{Autoscaler, Observation, Reason, Settings};
use std::f64::consts::TAU;

/// Wants a worker per 50 of load.
fn settings() -> Settings {
    Settings { min_workers: 2, max_workers: 20, target_utilization: 0.5, ..Settings::new(100.0) }
}

/// Drives an autoscaler minute by minute.
struct Driver {
    autoscaler: Autoscaler,
    minute: u32,
    workers: u32,
    is_draining: bool,
}

impl Driver {
    fn new(settings: Settings, workers: u32) -> Self {
        Self {
            autoscaler: Autoscaler::new(settings).expect("the settings are valid"),
            minute: 0,
            workers,
            is_draining: false,
        }
    }

    fn step(&mut self, load: Option<f64>) -> Decision {
        let seconds = f64::from(self.minute) * 60.0;
        self.minute += 1;
        let decision = self.autoscaler.step(&Observation {
            wall_seconds: seconds,
            monotonic_seconds: seconds,
            load,
            workers: self.workers,
            is_draining: self.is_draining,
        });
        self.workers = decision.desired;
        decision
    }
}

#[test]
fn cold_start_is_reactive() {
    let mut driver = Driver::new(settings(), 4);
    let decision = driver.step(Some(400.0));
    assert_eq!((decision.desired, decision.reason), (8, Reason::LoadAboveTarget));
    assert_eq!((decision.forecast_status, decision.forecast), (ForecastStatus::Learning, None));
    assert_eq!(decision.message, "Scale from 4 to 8 workers: the load is 400 and needs 8 workers.");
}

#[test]
fn limits_hold_for_any_load() {
    let mut driver = Driver::new(settings(), 4);
    let decision = driver.step(Some(1e300));
    assert_eq!((decision.desired, decision.reason), (20, Reason::MaximumReached));
    assert_eq!(driver.step(Some(0.0)).reason, Reason::Stabilizing);
    driver.workers = 30;
    assert_eq!(driver.step(Some(1.0)).reason, Reason::OutsideLimits);
    for _ in 0..200 {
        driver.step(Some(0.0));
    }
    assert_eq!(driver.workers, 2);
    for unusable in [f64::NAN, f64::INFINITY, -1.0] {
        assert_eq!(driver.step(Some(unusable)).reason, Reason::MetricMissing);
    }
}

#[test]
fn scale_down_waits_for_the_window_and_goes_in_small_steps() {
    let mut driver = Driver::new(settings(), 20);
    driver.step(Some(1_000.0));
    let decisions: Vec<Decision> = (0..9).map(|_| driver.step(Some(100.0))).collect();
    assert!(decisions[..5].iter().all(|decision| decision.desired == 20), "the window is 300 s");
    assert!(decisions[..5].iter().all(|decision| decision.reason == Reason::Stabilizing));
    let after: Vec<u32> = decisions[5..].iter().map(|decision| decision.desired).collect();
    assert_eq!(after, [18, 17, 16, 15], "a tenth, at least one");
    assert_eq!(decisions[8].reason, Reason::LoadBelowTarget);
}

#[test]
fn drain_stops_scale_down_but_not_scale_up() {
    let mut driver = Driver::new(settings(), 10);
    driver.is_draining = true;
    let reasons: Vec<Reason> = (0..20).map(|minute| driver.step(Some(100.0 + f64::from(minute))).reason).collect();
    assert_eq!((driver.workers, reasons[19]), (10, Reason::Draining));
    assert_eq!(driver.step(Some(900.0)).desired, 18);
}

#[test]
fn gap_of_the_metric_keeps_the_workers_and_opens_the_window_again() {
    let mut driver = Driver::new(settings(), 10);
    for minute in 0..5 {
        driver.step(Some(100.0 + f64::from(minute)));
    }
    let decision = driver.step(None);
    assert_eq!((decision.desired, decision.reason, decision.reactive), (10, Reason::MetricMissing, None));
    assert!((0..5).all(|minute| driver.step(Some(100.0 + f64::from(minute))).desired == 10));
    assert_eq!(driver.step(Some(99.0)).desired, 9);
}

#[test]
fn decisions_never_fall_below_what_the_reactive_rule_accepts() {
    let mut driver = Driver::new(Settings { max_workers: 1_000, ..settings() }, 10);
    let mut state = 7_u64;
    for minute in 0..6_000_u32 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let noise = 1.0 + 0.3 * ((state >> 40) as f64 / (1_u64 << 24) as f64 - 0.5);
        let load = 800.0 * (1.0 + 0.7 * (TAU * f64::from(minute) / 1_440.0).sin()) * noise;
        let decision = driver.step(Some(load));
        let least = (load / 55.0).ceil() as u32;
        assert!(decision.desired >= least.min(1_000), "minute {minute}: {decision:?}");
        assert!(decision.message.ends_with('.') && decision.message.len() < 200, "{}", decision.message);
    }
}

#[test]
fn restored_state_decides_the_same_and_is_bounded() {
    let mut driver = Driver::new(settings(), 4);
    let load = |minute: u32| 500.0 + 300.0 * (TAU * f64::from(minute % 1_440) / 1_440.0).sin() + f64::from(minute % 7);
    for minute in 0..MAX_SAMPLES as u32 + 700 {
        driver.step(Some(load(minute)));
    }
    let state = postcard::to_stdvec(&driver.autoscaler).unwrap();
    assert!(state.len() < 80 << 10, "{} bytes", state.len());
    let restored = postcard::from_bytes(&state).unwrap();
    let mut restored = Driver { autoscaler: restored, ..driver };
    let mut original = driver;
    for minute in restored.minute..restored.minute + 50 {
        let (first, second) = (restored.step(Some(load(minute))), original.step(Some(load(minute))));
        assert_eq!(first, second);
        assert_eq!(first.forecast_status, ForecastStatus::Active);
        assert_eq!(first.forecast.unwrap().period_seconds, Some(86_400));
    }
}

#[test]
fn forecast_that_is_worse_than_the_last_sample_takes_no_part() {
    // A pattern that is learned for three days, and then inverted every six hours.
    let mut driver = Driver::new(Settings { max_workers: 1_000, ..settings() }, 10);
    let statuses: Vec<ForecastStatus> = (0..6 * 1_440_u32)
        .map(|minute| {
            let sign = if minute < 3 * 1_440 || (minute / 360) % 2 == 0 { 1.0 } else { -1.0 };
            let load = 1_000.0 + sign * 600.0 * (TAU * f64::from(minute) / 1_440.0).sin();
            driver.step(Some(load)).forecast_status
        })
        .collect();
    assert!(statuses[2 * 1_440 + 100..3 * 1_440].iter().all(|status| *status == ForecastStatus::Active));
    assert!(statuses[3 * 1_440..].contains(&ForecastStatus::Inaccurate));
}

#[test]
fn autoscaler_of_another_process_continues_from_the_written_history() {
    let mut driver = Driver::new(settings(), 4);
    let load = |minute: u32| (400.0 + 300.0 * (f64::from(minute) * TAU / 60.0).sin()).round();
    let mut history = History::default();
    for minute in 0..240 {
        let workers = driver.workers;
        let decision = driver.step(Some(load(minute)));
        history.push(Record {
            seconds: i64::from(minute) * 60,
            load: Some(load(minute)),
            workers,
            desired: decision.desired,
            reason: decision.reason.to_string(),
            ..Record::default()
        });
    }
    let (parsed, invalid) = History::parse(&history.to_text());
    let mut resumed = Driver { minute: driver.minute, workers: driver.workers, ..Driver::new(settings(), 4) };
    resumed.autoscaler.resume(parsed.records());
    let decisions: Vec<_> =
        (240..300).map(|minute| (driver.step(Some(load(minute))), resumed.step(Some(load(minute))))).collect();
    assert_eq!(invalid, 0);
    assert_eq!(decisions[0].1.forecast_status, ForecastStatus::Active, "the forecast does not start empty");
    assert!(decisions.iter().all(|(first, second)| first == second));
    assert!(decisions.iter().any(|(first, _)| first.reason == Reason::ForecastAboveTarget));
}
