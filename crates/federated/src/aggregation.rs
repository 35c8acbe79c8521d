//! The next model from the updates of a batch: plainly, with noise, or from an unmasked sum.

use crate::error::{InvalidInput, require};
use crate::job::{Job, PrivacySettings};
use crate::model::Update;
use crate::privacy::clipping::ClippedUpdate;
use crate::privacy::sum::{PrivateSum, ReleaseNoise};
use crate::random::{Seed, derive};
use crate::secure::SecureSum;
use crate::strategy::{Aggregator, Strategy, staleness_weight};

/// Aggregates the updates of batch `number` into the next version. The same batch, seed and model give the same version, so a repeated
/// aggregation releases nothing more. Other updates get other noise, also under the same number: a run that was restored from a backup repeats
/// numbers, and the same noise on two sums would reveal their difference.
///
/// With privacy an update is clipped before it is weighted. A weight is at most 1, so one client moves the sum by the clipping norm at most, which
/// is what the accountant charges.
///
/// # Errors
/// An update is invalid, or there are too few for the strategy. Nothing changes then.
pub fn aggregate_updates(
    job: &Job,
    aggregator: &mut Aggregator,
    updates: &[Update],
    number: u64,
    seed: &Seed,
) -> Result<(), InvalidInput> {
    let Some(privacy) = &job.privacy else { return aggregator.aggregate(updates) };
    let sum = private_sum(job, privacy, aggregator, updates)?;
    release(sum, privacy, aggregator, number, seed)
}

/// Returns the sum of updates, each clipped, then weighted.
fn private_sum(
    job: &Job,
    privacy: &PrivacySettings,
    aggregator: &Aggregator,
    updates: &[Update],
) -> Result<PrivateSum, InvalidInput> {
    let clip = aggregator.adaptive_clip().map_or(privacy.clip, |clip| clip.norm);
    let mut sum = PrivateSum::new(job.parameters());
    for update in updates {
        update.check(job.parameters(), aggregator.version(), false)?;
        let weight = match job.strategy {
            Strategy::FedBuff { .. } => staleness_weight(aggregator.version() - update.version),
            _ => 1.0,
        };
        sum.add(&ClippedUpdate::new(&update.delta, clip)?.weighted(weight)?)?;
    }
    Ok(sum)
}

/// Moves the model by the unmasked sum of a cohort that trained from `version`, with noise if the run has a budget. With `FedBuff` the whole sum has
/// the weight of the staleness of that version: its updates cannot be weighted one by one, and all are from the same version.
///
/// # Errors
/// The version is newer than the model, the sum has another length, or it moves a parameter out of the range of f32. Nothing changes then.
pub fn aggregate_sum(
    job: &Job,
    aggregator: &mut Aggregator,
    sum: &SecureSum,
    version: u64,
    number: u64,
    seed: &Seed,
) -> Result<(), InvalidInput> {
    let newest = aggregator.version();
    require(version <= newest, "version", version, &format!("at most that of the model, {newest}"))?;
    let weight = match job.strategy {
        Strategy::FedBuff { .. } => staleness_weight(newest - version),
        _ => 1.0,
    };
    let weighted = |values: &[f64]| values.iter().map(|value| value * weight).collect::<Vec<f64>>();
    let Some(privacy) = &job.privacy else { return aggregator.advance(&weighted(&sum.weighted_mean())) };
    release(PrivateSum::of_values(&weighted(&sum.scaled), privacy.clip)?, privacy, aggregator, number, seed)
}

fn release(
    sum: PrivateSum,
    privacy: &PrivacySettings,
    aggregator: &mut Aggregator,
    number: u64,
    seed: &Seed,
) -> Result<(), InvalidInput> {
    let multiplier = privacy.mechanism.noise_multiplier;
    let (clip, noise) = match aggregator.adaptive_clip() {
        None => (privacy.clip, ReleaseNoise { multiplier, share_sigma: None }),
        // Both releases together cost as much as the charged multiplier alone.
        Some(clip) => {
            let multiplier = clip.update_multiplier(multiplier)?;
            (clip.norm, ReleaseNoise { multiplier, share_sigma: Some(clip.share_sigma()) })
        }
    };
    // Releases that differ in any of this have other noise.
    let below = noise.share_sigma.map_or(0, |_| sum.below());
    let parts = [number.to_le_bytes(), clip.to_le_bytes(), below.to_le_bytes()].concat();
    let seed = derive(seed, &[b"noise of a batch", &parts, &sum.digest()]);
    let released = sum.release(clip, privacy.expected, noise, &seed)?;
    aggregator.advance(&released.mean)?;
    if let Some(share) = released.noisy_share_sum {
        aggregator.advance_clip(share);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::tests::run;
    use crate::privacy::clipping::STEPS_PER_NORM;

    #[test]
    fn private_aggregation_clips_divides_by_the_expected_number_and_repeats_exactly() {
        let job =
            Job::new("a", &run(r#"{"privacy":{"epsilon":50,"delta":0.01,"noiseMultiplier":0.3,"clip":1},"seed":3}"#))
                .unwrap();
        let next = |seed: &Seed| {
            let mut aggregator = Aggregator::new(Strategy::FedAvg, vec![0.0; 8]).unwrap();
            let update = Update { client: 1, version: 0, samples: 1_000, delta: vec![9.0; 8], control: None };
            aggregate_updates(&job, &mut aggregator, &[update], 7, seed).unwrap();
            aggregator.model().to_vec()
        };
        let model = next(&[1; 32]);
        let norm = model.iter().map(|value| value * value).sum::<f32>().sqrt();
        assert!((norm - 0.25).abs() < 0.25, "one clipped update of four: {norm}");
        assert_eq!(next(&[1; 32]), model, "a repeated aggregation releases the same");
        assert_ne!(next(&[2; 32]), model);
    }

    const PARAMETERS: usize = 20_000;

    /// A run of clients with `PARAMETERS` parameters.
    fn large(clients: u64, fields: &str) -> Job {
        let layers = format!(r#""model":{{"layers":[{{"name":"w","shape":[{PARAMETERS}]}}]}}"#);
        let clients = format!(r#""clients":{{"population":{clients},"perRound":{clients}}}"#);
        Job::new("a", &run(&format!("{{{layers},{clients},{fields}}}"))).unwrap()
    }

    /// An update whose first value is `first`; the others are 0.
    fn update(client: u64, version: u64, first: f32) -> Update {
        let delta = std::iter::once(first).chain(std::iter::repeat_n(0.0, PARAMETERS - 1)).collect();
        Update { client, version, samples: 1, delta, control: None }
    }

    /// Standard deviation of the model without its first value.
    fn deviation(aggregator: &Aggregator) -> f64 {
        let squares = aggregator.model()[1..].iter().map(|value| f64::from(*value).powi(2));
        (squares.sum::<f64>() / (PARAMETERS - 1) as f64).sqrt()
    }

    fn assert_near(value: f64, expected: f64) {
        assert!((value / expected - 1.0).abs() < 0.05, "{value}, expected {expected}");
    }

    #[test]
    fn noise_has_the_charged_scale_and_is_drawn_for_each_batch() {
        let job = large(4, r#""privacy":{"epsilon":50,"delta":0.01,"noiseMultiplier":0.5,"clip":2}"#);
        let next = |number| {
            let mut aggregator = Aggregator::new(Strategy::FedAvg, vec![0.0; PARAMETERS]).unwrap();
            aggregate_updates(&job, &mut aggregator, &[update(1, 0, 0.0)], number, &[1; 32]).unwrap();
            aggregator
        };
        // Noise multiplier times clip over the expected number of clients.
        assert_near(deviation(&next(7)), 0.5 * 2.0 / 4.0);
        assert_ne!(next(7), next(8), "the same noise in two batches would cancel in their difference");
    }

    #[test]
    fn run_that_repeats_a_batch_with_other_updates_after_a_restore_has_other_noise() {
        let job = large(4, r#""privacy":{"epsilon":50,"delta":0.01,"noiseMultiplier":0.5,"clip":2}"#);
        let masked =
            large(4, r#""privacy":{"epsilon":50,"delta":0.01,"noiseMultiplier":0.5,"clip":2},"secureAggregation":{}"#);
        let single = |first: f32| {
            let mut aggregator = Aggregator::new(Strategy::FedAvg, vec![0.0; PARAMETERS]).unwrap();
            aggregate_updates(&job, &mut aggregator, &[update(1, 0, first)], 7, &[1; 32]).unwrap();
            aggregator
        };
        let sum = |first: f32| {
            let scaled = update(0, 0, first).delta.iter().map(|value| f64::from(*value)).collect();
            let sum = SecureSum { clients: (0..3).collect(), weight: 3, scaled, max_weight: 1 };
            let mut aggregator = Aggregator::new(Strategy::FedAvg, vec![0.0; PARAMETERS]).unwrap();
            aggregate_sum(&masked, &mut aggregator, &sum, 0, 7, &[1; 32]).unwrap();
            aggregator
        };
        for (first, second) in [(single(0.5), single(0.75)), (sum(0.5), sum(0.75))] {
            // The updates are equal there: the same noise would leave nothing.
            let others = first.model()[1..].iter().zip(&second.model()[1..]);
            let equal = others.filter(|(first, second)| first == second).count();
            assert!(equal < PARAMETERS / 100, "{equal} of {PARAMETERS} values have the same noise");
        }
        assert_eq!(single(0.5), single(0.5), "another driver repeats the same release");
    }

    #[test]
    fn masked_sum_has_the_same_noise_and_divisor_as_single_updates() {
        let fields = r#""privacy":{"epsilon":50,"delta":0.01,"noiseMultiplier":0.5,"clip":2},"secureAggregation":{}"#;
        let job = large(4, fields);
        let scaled = update(0, 0, 6.0).delta.iter().map(|value| f64::from(*value)).collect();
        let sum = SecureSum { clients: (0..3).collect(), weight: 3, scaled, max_weight: 1 };
        let mut aggregator = Aggregator::new(Strategy::FedAvg, vec![0.0; PARAMETERS]).unwrap();
        assert_eq!(aggregate_sum(&job, &mut aggregator, &sum, 1, 0, &[1; 32]).unwrap_err().field, "version");
        aggregate_sum(&job, &mut aggregator, &sum, 0, 0, &[1; 32]).unwrap();
        assert_near(deviation(&aggregator), 0.5 * 2.0 / 4.0);
        let single = |client| update(client, 0, 2.0);
        let mut other = Aggregator::new(Strategy::FedAvg, vec![0.0; PARAMETERS]).unwrap();
        aggregate_updates(&job, &mut other, &[single(0), single(1), single(2)], 0, &[1; 32]).unwrap();
        assert_eq!(aggregator, other);
    }

    #[test]
    fn private_fedbuff_weighs_by_staleness_and_checks_updates_first() {
        let privacy = r#""privacy":{"epsilon":50,"delta":0.01,"noiseMultiplier":0.5,"clip":1}"#;
        let job = large(4, &format!(r#"{privacy},"strategy":{{"kind":"FedBuff"}}"#));
        let mut before = job.aggregator().unwrap();
        (0..3).for_each(|_| before.advance(&vec![0.0; PARAMETERS]).unwrap());
        let first = |version, norm| {
            let privacy = job.privacy.as_ref().unwrap();
            private_sum(&job, privacy, &before, &[update(1, version, norm)]).unwrap().steps()[0]
        };
        // An update that is 3 versions old counts half, whatever its norm was: it is clipped before it is weighted.
        for norm in [1.0, 9.0] {
            assert_eq!((first(3, norm), first(0, norm)), (STEPS_PER_NORM, STEPS_PER_NORM / 2), "norm {norm}");
        }
        let mut aggregator = before.clone();
        for invalid in [Update { samples: 0, ..update(2, 3, 0.0) }, update(2, 4, 0.0)] {
            let updates = [update(1, 3, 1.0), invalid];
            assert!(aggregate_updates(&job, &mut aggregator, &updates, 0, &[1; 32]).is_err());
            assert_eq!(aggregator, before);
        }
    }

    #[test]
    fn adaptive_clip_pays_for_the_share_of_clients_with_noise_on_the_update() {
        let fields =
            r#""privacy":{"epsilon":50,"delta":0.01,"noiseMultiplier":1.9,"clip":1,"adaptiveClip":true},"rounds":9"#;
        let job = large(20, fields);
        // 20 clients: the share has the standard deviation 2, and 1.9^-2 = multiplier^-2 + 2^-2.
        let multiplier = (1.9_f64.powi(-2) - 0.25).powf(-0.5);
        let mut aggregator = job.aggregator().unwrap();
        aggregate_updates(&job, &mut aggregator, &[update(1, 0, 0.0)], 0, &[1; 32]).unwrap();
        assert_near(deviation(&aggregator), multiplier / 20.0);
        // The noise follows the norm.
        let mut lower = job.aggregator().unwrap();
        (0..10).for_each(|_| lower.advance_clip(20.0));
        let norm = lower.adaptive_clip().unwrap().norm;
        aggregate_updates(&job, &mut lower, &[update(1, 0, 0.0)], 0, &[1; 32]).unwrap();
        assert!(norm < 0.5);
        assert_near(deviation(&lower), multiplier * norm / 20.0);
    }

    #[test]
    fn share_of_clients_below_the_norm_has_noise() {
        let fields = r#"{"clients":{"population":40,"perRound":40},
            "privacy":{"epsilon":50,"delta":0.01,"noiseMultiplier":0.5,"clip":1,"adaptiveClip":true}}"#;
        let job = Job::new("a", &run(fields)).unwrap();
        let update = |client: u64| {
            let delta = vec![if client.is_multiple_of(2) { 0.0 } else { 9.0 }; 8];
            Update { client, version: 0, samples: 1, delta, control: None }
        };
        let updates: Vec<Update> = (0..40).map(update).collect();
        // Half of the norms are below: only the noise moves the norm, by a factor of e^(-0.2 noise / 80).
        let noise = |number| {
            let mut aggregator = job.aggregator().unwrap();
            aggregate_updates(&job, &mut aggregator, &updates, number, &[1; 32]).unwrap();
            aggregator.adaptive_clip().unwrap().norm.ln() * 80.0 / -0.2
        };
        let variance = (0..1_000).map(|number| noise(number).powi(2)).sum::<f64>() / 1_000.0;
        assert!((variance / 16.0 - 1.0).abs() < 0.2, "{variance}: twice the standard deviation of 40/20, squared");
    }

    #[test]
    fn adaptive_clip_follows_the_norms_and_repeats_exactly() {
        let fields = r#"{"clients":{"population":40,"perRound":40},
            "privacy":{"epsilon":50,"delta":0.01,"noiseMultiplier":0.5,"clip":0.1,"adaptiveClip":true}}"#;
        let job = Job::new("a", &run(fields)).unwrap();
        let after = |rounds: u64| {
            let mut aggregator = job.aggregator().unwrap();
            for number in 0..rounds {
                let update = |client| Update {
                    client,
                    version: aggregator.version(),
                    samples: 1,
                    delta: vec![1.0; 8],
                    control: None,
                };
                let updates: Vec<Update> = (0..40).map(update).collect();
                aggregate_updates(&job, &mut aggregator, &updates, number, &[1; 32]).unwrap();
            }
            aggregator
        };
        let norm = |aggregator: &Aggregator| aggregator.adaptive_clip().unwrap().norm;
        assert!((norm(&after(0)) - 0.1).abs() < 1e-12);
        // Every norm is sqrt(8): the bound rises by e^0.1 a round until it is above them, and stays near them.
        let (few, many) = (norm(&after(10)), norm(&after(80)));
        assert!((0.2..0.35).contains(&few), "{few}");
        assert!((1.5..5.0).contains(&many), "{many}");
        assert_eq!(after(5), after(5));
    }
}
