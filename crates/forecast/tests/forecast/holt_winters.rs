//! Holt-Winters against an independent implementation, its fit, and missing samples.

use engram_forecast::holt_winters::{HoltWinters, Smoothing, detect_period, fit};
use serde::Deserialize;
use std::f64::consts::TAU;

#[derive(Deserialize)]
struct Case {
    smoothing: Smoothing,
    level: f64,
    trend: f64,
    seasonal: Vec<f64>,
    samples: Vec<f64>,
    fitted: Vec<f64>,
    forecast: Vec<f64>,
}

#[test]
fn forecasts_equal_those_of_statsmodels() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("golden/holt_winters.json")).unwrap();
    assert_eq!(cases.len(), 3);
    for case in cases {
        let mut state = HoltWinters::new(case.smoothing, case.level, case.trend, case.seasonal);
        for (index, (sample, fitted)) in case.samples.iter().zip(&case.fitted).enumerate() {
            assert!((state.forecast(1) - fitted).abs() < 1e-9, "sample {index}: {} and {fitted}", state.forecast(1));
            state.update(Some(*sample));
        }
        for (index, forecast) in case.forecast.iter().enumerate() {
            let own = state.forecast(index + 1);
            assert!((own - forecast).abs() < 1e-9, "{} slots ahead: {own} and {forecast}", index + 1);
        }
        let highest = case.forecast[..10].iter().copied().fold(f64::MIN, f64::max);
        assert!((state.peak(10) - highest).abs() < 1e-9);
    }
}

/// A wave with a trend, a value per slot.
fn wave(slots: usize, period: usize) -> Vec<Option<f64>> {
    let sample = |slot: usize| 200.0 + 0.1 * slot as f64 + 50.0 * (TAU * slot as f64 / period as f64).sin();
    (0..slots).map(|slot| Some(sample(slot))).collect()
}

#[test]
fn fit_forecasts_a_wave_with_a_trend_and_through_missing_samples() {
    let period = 48;
    let all = wave(6 * period, period);
    let mut samples = all[..5 * period].to_vec();
    // A gap at the end, and scattered samples.
    for slot in (4 * period + 30..5 * period).chain((7..samples.len()).step_by(11)) {
        samples[slot] = None;
    }
    let state = fit(&samples, Some(period), 6).unwrap();
    for steps in 1..=period {
        let actual = all[5 * period + steps - 1].unwrap();
        let forecast = state.forecast(steps);
        assert!((forecast - actual).abs() < 5.0, "{steps} slots ahead: {forecast}, actually {actual}");
    }
}

#[test]
fn fit_needs_samples_and_two_periods() {
    assert_eq!(fit(&[], None, 1), None);
    assert_eq!(fit(&[None; 30], None, 1), None);
    assert_eq!(fit(&wave(95, 48), Some(48), 1), None);
    assert!(fit(&wave(96, 48), Some(48), 1).is_some());
}

#[test]
fn period_is_detected_only_where_there_is_one() {
    assert_eq!(detect_period(&wave(600, 240), &[20, 240]), Some(240), "a slow wave resembles itself at a short lag");
    assert_eq!(detect_period(&wave(600, 60), &[240, 60]), Some(60), "the shortest of the multiples");
    assert_eq!(detect_period(&wave(400, 240), &[20, 240]), None, "fewer than two periods");
    let line: Vec<Option<f64>> = (0..600_u32).map(|slot| Some(f64::from(slot))).collect();
    assert_eq!(detect_period(&line, &[60, 240]), None);
    let step: Vec<Option<f64>> = (0..600).map(|slot| Some(if slot < 300 { 1.0 } else { 9.0 })).collect();
    assert_eq!(detect_period(&step, &[60, 240]), None);
    assert_eq!(detect_period(&[], &[60]), None);
}
