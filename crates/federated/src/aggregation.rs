//! The next model from the updates of a batch: plainly, with noise, or from an unmasked sum.

use crate::error::InvalidInput;
use crate::job::{Job, PrivacySettings};
use crate::model::Update;
use crate::privacy::clipping::ClippedUpdate;
use crate::privacy::sum::{PrivateSum, ReleaseNoise};
use crate::random::{Seed, derive};
use crate::secure::SecureSum;
use crate::strategy::{Aggregator, Strategy, staleness_weight};

/// Aggregates the updates of batch `number` into the next version. The same batch, seed and model give the same version, so a repeated
/// aggregation releases nothing more.
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
    let clip = aggregator.adaptive_clip().map_or(privacy.clip, |clip| clip.norm);
    let mut sum = PrivateSum::new(job.parameters());
    for update in updates {
        update.check(job.parameters(), aggregator.version(), false)?;
        let weight = match job.strategy {
            Strategy::FedBuff { .. } => staleness_weight(aggregator.version() - update.version),
            _ => 1.0,
        };
        let delta: Vec<f32> = update.delta.iter().map(|value| (f64::from(*value) * weight) as f32).collect();
        sum.add(&ClippedUpdate::new(&delta, clip)?)?;
    }
    release(sum, privacy, aggregator, number, seed)
}

/// Moves the model by the unmasked sum of a cohort, with noise if the run has a budget.
///
/// # Errors
/// The sum has another length, or moves a parameter out of the range of f32. Nothing changes then.
pub fn aggregate_sum(
    job: &Job,
    aggregator: &mut Aggregator,
    sum: &SecureSum,
    number: u64,
    seed: &Seed,
) -> Result<(), InvalidInput> {
    let Some(privacy) = &job.privacy else { return aggregator.advance(&sum.weighted_mean()) };
    release(PrivateSum::of_values(&sum.scaled, privacy.clip)?, privacy, aggregator, number, seed)
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
    let seed = derive(seed, &[b"noise of a batch", &number.to_le_bytes()]);
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
