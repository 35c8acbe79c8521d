//! Empirical audit: an attacker who sees releases on two neighbouring data sets may not do better than the claimed epsilon.

use super::clipping::ClippedUpdate;
use super::sum::{PrivateSum, ReleaseNoise};
use super::{Mechanism, pld};
use crate::random::{Seed, stream, unit};

const TRIALS: u64 = 20_000;
const DELTA: f64 = 1e-5;
const CLAIMED: Mechanism = Mechanism { sampling_rate: 0.5, noise_multiplier: 1.0 };

/// What one trial releases.
type Release = fn(&[f32], f64, u64) -> f64;

/// The mean of a round over clients with one parameter each, sampled and noised as the run does.
fn release(clients: &[f32], noise: f64, trial: u64) -> f64 {
    let mut sum = PrivateSum::new(1);
    let mut participation = stream(&[1; 32], "participation", trial);
    for client in clients {
        if unit(&mut participation) < CLAIMED.sampling_rate {
            sum.add(&ClippedUpdate::new(&[*client], 1.0).unwrap()).unwrap();
        }
    }
    let mut seed: Seed = [2; 32];
    seed[..8].copy_from_slice(&trial.to_le_bytes());
    let noise = ReleaseNoise { multiplier: noise, share_sigma: None };
    sum.release(1.0, 4.0, noise, &seed).unwrap().mean[0]
}

/// A mechanism that skips empty rounds.
fn release_without_empty_rounds(clients: &[f32], noise: f64, trial: u64) -> f64 {
    let mut participation = stream(&[1; 32], "participation", trial);
    let any = clients.iter().any(|_| unit(&mut participation) < CLAIMED.sampling_rate);
    if any { release(clients, noise, trial) } else { 0.0 }
}

/// Upper and lower bound of a probability at about 4 standard deviations (Wilson).
fn wilson(count: usize, trials: usize) -> (f64, f64) {
    let (n, z) = (trials as f64, 4.0_f64);
    let share = count as f64 / n;
    let center = (share + z * z / (2.0 * n)) / (1.0 + z * z / n);
    let half = z / (1.0 + z * z / n) * (share * (1.0 - share) / n + z * z / (4.0 * n * n)).sqrt();
    (center - half, center + half)
}

/// Lower bound of epsilon that the best threshold shows.
fn empirical_epsilon(mechanism: Release, noise: f64, data: [&[f32]; 2]) -> f64 {
    let [first, second] = data.map(|clients| {
        let offset = if clients.is_empty() { 0 } else { TRIALS * clients.len() as u64 };
        (offset..offset + TRIALS).map(|trial| mechanism(clients, noise, trial)).collect::<Vec<f64>>()
    });
    let shown = |a: &[f64], b: &[f64], event: &dyn Fn(f64) -> bool| {
        let count = |values: &[f64]| values.iter().filter(|value| event(**value)).count();
        let (low, high) = (wilson(count(a), a.len()).0, wilson(count(b), b.len()).1);
        if low > DELTA { ((low - DELTA) / high).ln() } else { f64::NEG_INFINITY }
    };
    let mut best = f64::NEG_INFINITY;
    for step in -20..=20 {
        let threshold = f64::from(step) * 0.1;
        let events: [&dyn Fn(f64) -> bool; 3] = [&move |x| x > threshold, &move |x| x < threshold, &|x: f64| x == 0.0];
        for event in events {
            best = best.max(shown(&first, &second, event)).max(shown(&second, &first, event));
        }
    }
    best
}

#[test]
fn attacker_on_neighbouring_data_stays_below_the_claimed_epsilon() {
    let claimed = pld::epsilon(&[(CLAIMED, 1)], DELTA);
    let neighbours: [&[f32]; 2] = [&[0.2, -0.1, 0.3], &[0.2, -0.1, 0.3, 50.0]];
    let shown = empirical_epsilon(release, CLAIMED.noise_multiplier, neighbours);
    assert!(shown > 0.3, "the attack shows something: {shown}");
    assert!(shown < claimed, "{shown} against {claimed}");
}

#[test]
fn audit_detects_too_little_noise_and_skipped_empty_rounds() {
    let claimed = pld::epsilon(&[(CLAIMED, 1)], DELTA);
    let neighbours: [&[f32]; 2] = [&[0.2, -0.1, 0.3], &[0.2, -0.1, 0.3, 50.0]];
    let quiet = empirical_epsilon(release, 0.1 * CLAIMED.noise_multiplier, neighbours);
    assert!(quiet > claimed, "{quiet} against {claimed}");
    let skipping = empirical_epsilon(release_without_empty_rounds, CLAIMED.noise_multiplier, [&[], &[1.0; 12]]);
    assert!(skipping > claimed, "{skipping} against {claimed}");
}
