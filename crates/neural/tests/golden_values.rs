//! Layers, losses and optimizers against values that PyTorch computed: see `golden/make_golden.py`.

#![allow(clippy::unwrap_used, reason = "a helper of a test may panic")]

use std::collections::BTreeMap;

use engram_neural::{
    Batch, GradientEngine, LabeledBatch, Loss, LossSpec, Model, ModelSpec, Optimizer, OptimizerSpec, RandomStep,
    Targets, View, clip_factor, global_norm,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct LayerCase {
    name: String,
    spec: ModelSpec,
    loss: LossSpec,
    rows: Option<Vec<f32>>,
    features: Option<Vec<Vec<u32>>>,
    targets: Option<Vec<f32>>,
    classes: Option<Vec<u32>>,
    weights: Vec<f32>,
    parameters: BTreeMap<String, Vec<f32>>,
    gradient: BTreeMap<String, Vec<f64>>,
    predictions: Vec<f64>,
    objective: f64,
    losses: Vec<f64>,
    errors: Vec<f64>,
}

fn assert_close(what: &str, actual: &[f32], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{what}: lengths");
    let scale = expected.iter().fold(1e-3, |a: f64, b| a.max(b.abs()));
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((f64::from(*a) - e).abs() <= 2e-6 * scale, "{what}: value {i} is {a}, expected {e}");
    }
}

fn check(case: &LayerCase) {
    let name = &case.name;
    let mut model = Model::new(&case.spec, 1).unwrap();
    assert_eq!(model.views().len(), case.parameters.len(), "{name}: tensors");
    for view in model.views().to_vec() {
        let values = case.parameters.get(&view.name).unwrap_or_else(|| panic!("{name}: no tensor {}", view.name));
        model.parameters_mut()[view.range].copy_from_slice(values);
    }
    let (mut offsets, mut indices) = (vec![0], Vec::new());
    for sample in case.features.iter().flatten() {
        indices.extend_from_slice(sample);
        offsets.push(indices.len() as u32);
    }
    let batch = match &case.rows {
        Some(rows) => Batch::rows(rows, rows.len() / case.spec.inputs, case.spec.inputs).unwrap(),
        None => Batch::features(&offsets, &indices).unwrap(),
    };
    assert_close(&format!("{name}: predictions"), &model.predict(&batch).unwrap(), &case.predictions);

    let targets = match &case.classes {
        Some(classes) => Targets::Classes(classes),
        None => Targets::Values(case.targets.as_ref().unwrap()),
    };
    let data = LabeledBatch { batch, targets, weights: Some(&case.weights) };
    let loss = Loss::new(&case.loss, model.outputs()).unwrap();
    for leaves in [1, 4, 16] {
        let random = RandomStep { seed: 1, step: 1 };
        let mut engine = GradientEngine::new();
        let (sum, moments, samples) = engine.gradient(&model, &data, &loss, leaves, random, 1.0).unwrap();
        for view in model.views() {
            let what = format!("{name}, {leaves} leaves: gradient of {}", view.name);
            assert_close(&what, &sum.values[view.range.clone()], &case.gradient[&view.name]);
        }
        let objective = sum.loss + sum.samples as f64 * loss.penalty(&moments);
        assert!((objective - case.objective).abs() < 3e-6 * case.objective, "{name}: objective {objective}");
        assert_close(&format!("{name}: losses"), &samples.losses, &case.losses);
        assert_close(&format!("{name}: errors"), &samples.errors, &case.errors);
    }
}

#[test]
fn layers_and_losses_agree_with_pytorch() {
    let cases: Vec<LayerCase> = serde_json::from_str(include_str!("golden/layers.json")).unwrap();
    assert_eq!(cases.len(), 8);
    cases.iter().for_each(check);
}

#[derive(Deserialize)]
struct OptimizerCase {
    spec: OptimizerSpec,
    start: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    norms: Vec<f64>,
    end: Vec<f64>,
}

#[test]
fn optimizers_and_clipping_agree_with_pytorch_for_20_steps() {
    let cases: Vec<OptimizerCase> = serde_json::from_str(include_str!("golden/optimizers.json")).unwrap();
    assert_eq!(cases.len(), 5);
    for case in cases {
        let mut parameters = case.start.clone();
        let views = [View { name: "x".into(), shape: vec![12], range: 0..12, frozen: false }];
        let mut optimizer = Optimizer::new(case.spec, parameters.len()).unwrap();
        assert_eq!(case.gradients.len(), 20);
        for (gradient, expected) in case.gradients.iter().zip(&case.norms) {
            // Sums over 8 samples: powers of two keep the bits.
            let sum: Vec<f32> = gradient.iter().map(|g| 8.0 * g).collect();
            let norm = global_norm(&sum) / 8.0;
            assert!((norm - expected).abs() < 1e-6 * expected, "norm {norm}, expected {expected}");
            let factor = (clip_factor(norm, 100.0) / 8.0) as f32;
            optimizer.step(&mut parameters, &sum, &views, factor, 0.01);
        }
        assert_eq!(optimizer.steps(), 20);
        for (i, (a, e)) in parameters.iter().zip(&case.end).enumerate() {
            assert!(
                (f64::from(*a) - e).abs() < 3e-6 * e.abs().max(1.0),
                "{:?}: parameter {i} is {a}, not {e}",
                case.spec
            );
        }
    }
}
