//! Predictions of an ensemble: mean and spread over its members.

use engram_neural::{BatchError, LossKind, Model};

use crate::dataset::Dataset;
use crate::rows::{Evaluation, Rows, evaluate_rows, likeliest, measure, predict};

/// Predictions of some samples.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prediction {
    /// One per sample: the mean over the models, or the likeliest class by their mean probabilities.
    pub values: Vec<f32>,
    /// Of several models: standard deviation over them of the prediction, or of the probability of the class. The sum of squares is divided by the
    /// number of models.
    pub deviations: Vec<f32>,
    /// Predictions of each model.
    pub members: Vec<Vec<f32>>,
}

/// Predicts samples with all models.
///
/// # Errors
/// A feature is out of range.
pub fn predict_all(models: &[&Model], loss: LossKind, rows: &Rows) -> Result<Prediction, BatchError> {
    let members: Vec<Vec<f32>> = models.iter().map(|model| predict(model, loss, rows)).collect::<Result<_, _>>()?;
    if let [values] = &members[..] {
        return Ok(Prediction { values: values.clone(), deviations: Vec::new(), members });
    }
    if loss == LossKind::CrossEntropy {
        let classes = models.first().map_or(1, |model| model.outputs());
        let all = probabilities(models, rows)?;
        let (means, deviations) = moments(&all);
        let values: Vec<f32> = means.chunks(classes).map(|mean| likeliest(mean) as f32).collect();
        let deviation = |(sample, class): (usize, &f32)| deviations[sample * classes + *class as usize];
        let deviations = values.iter().enumerate().map(deviation).collect();
        return Ok(Prediction { values, deviations, members });
    }
    let (values, deviations) = moments(&members);
    Ok(Prediction { values, deviations, members })
}

/// Measures the mean prediction of all models on the held-out samples, and the mean of the deviations.
///
/// # Errors
/// The data do not fit the models.
pub fn evaluate_all(
    models: &[&Model],
    loss: LossKind,
    rows: &Rows,
    classes: usize,
) -> Result<(Evaluation, f64), BatchError> {
    if let [model] = models {
        return Ok((evaluate_rows(model, loss, rows, classes)?, 0.0));
    }
    let predicted = predict_all(models, loss, rows)?;
    let spread =
        predicted.deviations.iter().map(|it| f64::from(*it)).sum::<f64>() / predicted.deviations.len().max(1) as f64;
    if classes == 0 {
        return Ok((measure(&predicted.values, &rows.targets, 0), spread));
    }
    let targets: Vec<f32> = rows.classes.iter().map(|class| *class as f32).collect();
    let (means, _) = moments(&probabilities(models, rows)?);
    Ok((measure(&means, &targets, models[0].outputs()), spread))
}

impl Rows {
    /// Collects the held-out samples of a data set for `model`.
    pub fn held_out(model: &Model, data: &Dataset) -> Self {
        let samples: Vec<usize> = (data.training_len()..data.len()).collect();
        Self::of(model, data, &samples)
    }
}

/// Probabilities of the classes, of each model.
fn probabilities(models: &[&Model], rows: &Rows) -> Result<Vec<Vec<f32>>, BatchError> {
    let batch = rows.batch()?;
    let of = |model: &&Model| {
        let mut logits = model.predict(&batch)?;
        logits.chunks_mut(model.outputs()).for_each(softmax);
        Ok(logits)
    };
    models.iter().map(of).collect()
}

fn softmax(logits: &mut [f32]) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter_mut().for_each(|it| *it = (*it - largest).exp());
    let sum: f32 = logits.iter().sum();
    logits.iter_mut().for_each(|it| *it /= sum);
}

/// Mean and standard deviation over the members, of each value.
fn moments(members: &[Vec<f32>]) -> (Vec<f32>, Vec<f32>) {
    let count = members.len().max(1) as f64;
    let of = |at: usize| {
        let values = || members.iter().map(|member| f64::from(member[at]));
        let mean = values().sum::<f64>() / count;
        let variance = values().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        (mean as f32, variance.sqrt() as f32)
    };
    (0..members.first().map_or(0, Vec::len)).map(of).unzip()
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_neural::ModelSpec;

    fn models(outputs: usize, weights: &[&[f32]]) -> Vec<Model> {
        let spec = serde_json::json!({ "inputs": 1, "layers": [{ "dense": outputs }] });
        let spec: ModelSpec = serde_json::from_value(spec).unwrap();
        let model = |weights: &&[f32]| {
            let mut model = Model::new(&spec, 1).unwrap();
            model.parameters_mut().copy_from_slice(weights);
            model
        };
        weights.iter().map(model).collect()
    }

    #[test]
    fn mean_and_deviation_over_models_are_those_of_the_formulas() {
        let all = models(1, &[&[1.0, 0.0], &[3.0, 0.0]]);
        let rows = Rows { dense: vec![2.0, 0.5], width: 1, offsets: Vec::new(), ..Rows::default() };
        let found = predict_all(&all.iter().collect::<Vec<_>>(), LossKind::Mse, &rows).unwrap();
        assert_eq!(found.members, [[2.0, 0.5], [6.0, 1.5]]);
        assert_eq!((found.values, found.deviations), (vec![4.0, 1.0], vec![2.0, 0.5]));
        let found = predict_all(&[&all[1]], LossKind::Mse, &rows).unwrap();
        assert_eq!((found.values, found.deviations), (vec![6.0, 1.5], vec![]));
    }

    /// The first model is sure of class 1, the others lean to class 0: their mean probabilities decide, not the votes.
    #[test]
    fn classes_follow_from_mean_probabilities() {
        let logit = |p: f32| (p / (1.0 - p)).ln();
        let bias = |p: f32| [0.0, 0.0, 0.0, logit(p)];
        let all = models(2, &[&bias(0.99), &bias(0.4), &bias(0.4)]);
        let rows = Rows { dense: vec![1.0], width: 1, classes: vec![1], ..Rows::default() };
        let models: Vec<&Model> = all.iter().collect();
        let found = predict_all(&models, LossKind::CrossEntropy, &rows).unwrap();
        assert_eq!((found.values, found.members), (vec![1.0], vec![vec![1.0], vec![0.0], vec![0.0]]));
        assert!((found.deviations[0] - 0.278_13).abs() < 1e-4, "{:?}", found.deviations);
        let (evaluation, spread) = evaluate_all(&models, LossKind::CrossEntropy, &rows, 2).unwrap();
        assert_eq!((evaluation.accuracy, evaluation.samples), (1.0, 1));
        assert!((spread - 0.278_13).abs() < 1e-4);
    }
}
