//! Aggregates that tolerate hostile updates: median, trimmed mean (Yin 2018), Krum (Blanchard 2017).

use super::weighted_sum;
use crate::error::InvalidInput;
use crate::model::Update;

/// Median per coordinate; the mean of the two middle values of an even number.
pub(super) fn median(updates: &[&Update]) -> Vec<f64> {
    let middle = (updates.len() - 1) / 2;
    by_coordinate(updates, |sorted| mean(&sorted[middle..=updates.len() / 2]))
}

/// Mean per coordinate without the `floor(beta n)` smallest and largest values.
pub(super) fn trimmed_mean(updates: &[&Update], beta: f64) -> Vec<f64> {
    let cut = (beta * updates.len() as f64).floor() as usize;
    by_coordinate(updates, |sorted| mean(&sorted[cut..sorted.len() - cut]))
}

/// Mean of the `keep` updates with the least sum of squared distances to their `n - f - 2` nearest neighbours.
pub(super) fn krum(updates: &[&Update], byzantine: usize, keep: usize) -> Result<Vec<f64>, InvalidInput> {
    let least = (2 * byzantine + 3).max(keep + byzantine);
    if updates.len() < least {
        return Err(InvalidInput::new("updates", updates.len(), format!("at least {least} for Krum")));
    }
    let nearest = updates.len() - byzantine - 2;
    let score = |update: &Update| {
        let others = updates.iter().filter(|other| other.client != update.client);
        let mut distances: Vec<f64> = others.map(|other| distance(update, other)).collect();
        distances.sort_by(f64::total_cmp);
        distances[..nearest].iter().sum::<f64>()
    };
    let mut scored: Vec<(f64, &Update)> = updates.iter().map(|update| (score(update), *update)).collect();
    scored.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.client.cmp(&b.1.client)));
    let kept: Vec<&Update> = scored[..keep].iter().map(|(_, update)| *update).collect();
    Ok(weighted_sum(&kept, |_| 1.0 / keep as f64))
}

fn distance(a: &Update, b: &Update) -> f64 {
    a.delta.iter().zip(&b.delta).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}

fn mean(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len() as f64
}

/// Applies `statistic` to the sorted values of each coordinate.
fn by_coordinate(updates: &[&Update], statistic: impl Fn(&[f32]) -> f64) -> Vec<f64> {
    let parameters = updates.first().map_or(0, |update| update.delta.len());
    let mut values = Vec::with_capacity(updates.len());
    let coordinate = |at: usize| {
        values.clear();
        values.extend(updates.iter().map(|update| update.delta[at]));
        values.sort_by(f32::total_cmp);
        statistic(&values)
    };
    (0..parameters).map(coordinate).collect()
}
