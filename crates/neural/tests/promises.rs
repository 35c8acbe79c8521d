//! Promises of the crate: derivatives by finite differences, independence of samples, splits and threads, validation.

#![allow(clippy::unwrap_used, reason = "a helper of a test may panic")]

use engram_neural::tree::combine;
use engram_neural::{
    Activation, Batch, BatchError, CorrelationSpec, GradientEngine, GradientSum, LabeledBatch, LayerSpec, LeafSplit,
    Loss, LossKind, LossSpec, Model, ModelSpec, Moments, Optimizer, OptimizerSpec, Precision, RandomStep, Targets,
    philox,
};

const RANDOM: RandomStep = RandomStep { seed: 42, step: 3 };
const MSE: LossSpec = LossSpec { kind: LossKind::Mse, delta: None, correlation: None };

fn model(yaml: &str) -> Model {
    let spec: ModelSpec = serde_saphyr::from_str(yaml).unwrap();
    let mut model = Model::new(&spec, 42).unwrap();
    // Biases that start at 0 would hide errors in them.
    let noise = noise(model.parameter_count(), 9);
    model.parameters_mut().iter_mut().zip(noise).for_each(|(p, n)| *p += 0.3 * n);
    model
}

/// Numbers in [-1, 1).
fn noise(count: usize, key: u64) -> Vec<f32> {
    (0..count as u32).map(|i| philox(key, [i, 0, 0, 0])[0] as f32 / 2f32.powi(31) - 1.0).collect()
}

/// `count` samples of 1 to 6 of `features` features.
fn samples(count: usize, features: u32) -> (Vec<u32>, Vec<u32>) {
    let (mut offsets, mut indices) = (vec![0], Vec::new());
    for i in 0..count as u32 {
        let words = philox(5, [i, 0, 0, 0]);
        indices.extend((0..=words[3] % 6).map(|j| philox(6, [i, j, 0, 0])[0] % features));
        offsets.push(indices.len() as u32);
    }
    (offsets, indices)
}

/// Objective in f64 for the directional derivative below.
fn objective(model: &Model, data: &LabeledBatch<'_>, loss: &Loss) -> f64 {
    let (sum, moments, _) = GradientEngine::new().gradient(model, data, loss, 1, RANDOM, 1.0).unwrap();
    sum.loss + sum.samples as f64 * loss.penalty(&moments)
}

fn assert_finite_differences(name: &str, model: &Model, data: &LabeledBatch<'_>, spec: &LossSpec) {
    let loss = Loss::new(spec, model.outputs()).unwrap();
    let (sum, _, _) = GradientEngine::new().gradient(model, data, &loss, 2, RANDOM, 1.0).unwrap();
    for view in model.views() {
        let direction = noise(view.range.len(), 77);
        let at = |step: f32| {
            let mut moved = model.clone();
            let values = &mut moved.parameters_mut()[view.range.clone()];
            values.iter_mut().zip(&direction).for_each(|(p, d)| *p += step * d);
            objective(&moved, data, &loss)
        };
        // Central differences of two widths, extrapolated to width 0: an error of fourth order.
        let slope = |h: f32| (at(h) - at(-h)) / (2.0 * f64::from(h));
        let numeric = (4.0 * slope(0.01) - slope(0.02)) / 3.0;
        let gradient = &sum.values[view.range.clone()];
        let exact: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
        let size: f64 = gradient.iter().map(|g| f64::from(g.abs())).sum();
        assert!(size > 1e-3, "{name}: {} has no gradient", view.name);
        assert!((numeric - exact).abs() < 2e-3 * size, "{name}: {}: numeric {numeric}, exact {exact}", view.name);
    }
}

#[test]
fn gradients_of_dense_layers_agree_with_finite_differences() {
    let (rows, targets) = (noise(12 * 5, 1), noise(12 * 2, 2));
    let weights: Vec<f32> = noise(12, 3).iter().map(|w| w + 1.5).collect();
    let classes: Vec<u32> = (0..12).map(|i| i % 2).collect();
    let unit: Vec<f32> = targets.iter().map(|t| 0.5 + 0.4 * t).collect();
    let bodies = [
        ("tanh", "{ dense: 6, activation: Tanh }"),
        ("gelu", "{ dense: 6, activation: Gelu }"),
        ("sigmoid", "{ dense: 6, activation: Sigmoid }"),
        ("dropout", "{ dense: 6, activation: Tanh }, { dropout: 0.4 }"),
        ("dropout in residual", "{ residual: [{ dense: 5, activation: Gelu }, { dropout: 0.3 }] }"),
        ("norm", "{ layerNorm: {} }, { dense: 4, activation: Tanh }, { layerNorm: { epsilon: 0.01 } }"),
        ("residual", "{ residual: [{ dense: 9, activation: Gelu }, { dense: 5 }] }, { activation: Sigmoid }"),
    ];
    for (name, body) in bodies {
        let model = model(&format!("{{ inputs: 5, layers: [{body}, {{ dense: 2 }}] }}"));
        let batch = Batch::rows(&rows, 12, 5).unwrap();
        for kind in [LossKind::Mse, LossKind::Huber, LossKind::Bce, LossKind::CrossEntropy] {
            let targets = match kind {
                LossKind::CrossEntropy => Targets::Classes(&classes),
                LossKind::Bce => Targets::Values(&unit),
                _ => Targets::Values(&targets),
            };
            let data = LabeledBatch { batch, targets, weights: Some(&weights) };
            let spec = LossSpec { kind, delta: None, correlation: None };
            assert_finite_differences(&format!("{name}, {kind:?}"), &model, &data, &spec);
        }
    }
}

#[test]
fn gradients_of_feature_layers_agree_with_finite_differences() {
    let (offsets, indices) = samples(12, 9);
    let targets = noise(12, 2);
    let correlation = Some(CorrelationSpec { weight: 0.7, target: 0.95 });
    for body in ["{ featureBag: 6 }", "{ featureAttention: 6, heads: 3 }"] {
        let model = model(&format!("{{ inputs: 9, layers: [{body}, {{ activation: Tanh }}, {{ dense: 1 }}] }}"));
        let batch = Batch::features(&offsets, &indices).unwrap();
        let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: None };
        assert_finite_differences(body, &model, &data, &LossSpec { correlation, ..MSE });
        assert_finite_differences(body, &model, &data, &MSE);
    }
}

/// Smallest distance between the largest and the second largest edge, or bias, of an output of a tropical layer.
fn margin(x: &[f32], weight: &[f32], bias: &[f32]) -> f32 {
    let outputs = bias.len();
    let gap = |output: usize| {
        let edges = x.iter().enumerate().map(|(input, x)| x + weight[input * outputs + output]);
        let mut edges: Vec<f32> = edges.chain([bias[output]]).collect();
        edges.sort_by(|a, b| b.total_cmp(a));
        edges[0] - edges[1]
    };
    (0..outputs).map(gap).fold(f32::INFINITY, f32::min)
}

#[test]
fn gradients_of_tropical_layers_agree_with_finite_differences_away_from_ties() {
    let (candidates, targets) = (noise(2_000 * 5, 1), noise(12 * 2, 2));
    for (below, above) in [("", ""), ("{ dense: 4, activation: Tanh },", "{ activation: Tanh },")] {
        let prefix = usize::from(!below.is_empty());
        let mut model = model(&format!("{{ inputs: 5, layers: [{below} {{ tropical: 3 }}, {above} {{ dense: 2 }}] }}"));
        let tropical = format!("layers.{prefix}");
        // Biases that win for some of the rows.
        let bias = model.views().iter().find(|view| view.name == format!("{tropical}.bias")).unwrap().range.clone();
        model.parameters_mut()[bias].iter_mut().for_each(|bias| *bias += 1.6);
        let tensor = |name: &str| model.tensor(&format!("{tropical}.{name}")).unwrap();
        let (weight, bias) = (tensor("weight"), tensor("bias"));
        // A step moves an input of the layer by less than 0.1, and an edge or a bias by less than 0.02 more.
        let is_apart = |row: &&[f32]| match (model.tensor("layers.0.weight"), model.tensor("layers.0.bias")) {
            (Some(dense), Some(offsets)) if prefix == 1 => {
                let sum = |(w, b): (&[f32], &f32)| (b + w.iter().zip(*row).map(|(w, x)| w * x).sum::<f32>()).tanh();
                let x: Vec<f32> = dense.chunks_exact(5).zip(offsets).map(sum).collect();
                margin(&x, weight, bias) > 0.26
            }
            _ => margin(row, weight, bias) > 0.05,
        };
        let rows: Vec<f32> = candidates.chunks_exact(5).filter(is_apart).take(12).flatten().copied().collect();
        let batch = Batch::rows(&rows, 12, 5).unwrap();
        let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: None };
        assert_finite_differences(&format!("{below} tropical"), &model, &data, &MSE);
    }
}

#[test]
fn tropical_layer_learns_the_largest_of_shifted_inputs_which_a_linear_model_cannot() {
    let rows = noise(512 * 6, 1);
    let shifts = noise(6, 2);
    let largest = |row: &[f32]| row.iter().zip(&shifts).map(|(x, shift)| x + shift).fold(f32::NEG_INFINITY, f32::max);
    let targets: Vec<f32> = rows.chunks_exact(6).map(largest).collect();
    let data =
        LabeledBatch { batch: Batch::rows(&rows, 512, 6).unwrap(), targets: Targets::Values(&targets), weights: None };
    let train = |first: &str| {
        let mut model = model(&format!("{{ inputs: 6, layers: [{first} {{ dense: 1 }}] }}"));
        let (mut engine, loss) = (GradientEngine::new(), Loss::new(&MSE, 1).unwrap());
        let mut optimizer = Optimizer::new(OptimizerSpec::default(), model.parameter_count()).unwrap();
        let mut error = f64::INFINITY;
        for _ in 0..400 {
            let (sum, ..) = engine.gradient(&model, &data, &loss, 2, RANDOM, 1.0).unwrap();
            error = sum.loss / sum.samples as f64;
            let views = model.views().to_vec();
            optimizer.step(model.parameters_mut(), &sum.values, &views, 1.0 / sum.samples as f32, 0.02);
            engine.recycle(sum);
        }
        error
    };
    let (linear, tropical) = (train(""), train("{ tropical: 4 },"));
    assert!(tropical < 0.1 * linear, "squared error {tropical} with a tropical layer, {linear} without");
}

#[test]
fn reference_metamodel_has_432641_parameters_with_each_replacement_of_its_attention() {
    let tail = "{ dropout: 0.2 }, { dense: 128, activation: Relu }, { dropout: 0.2 }, { dense: 64, activation: Relu }, \
                { dense: 1, activation: Sigmoid }";
    let residual = "{ residual: [{ dense: 256, activation: Relu }, { dense: 256 }] }";
    let heads = [
        format!("{{ dense: 256, activation: Relu }}, {{ dropout: 0.2 }}, {residual}, {residual}"),
        format!("{{ featureBag: 256, activation: Relu }}, {{ dropout: 0.2 }}, {residual}, {residual}"),
        "{ featureAttention: 256, heads: 8 }".to_owned(),
    ];
    for head in heads {
        let model = model(&format!("{{ inputs: 500, layers: [{head}, {tail}] }}"));
        assert_eq!(model.parameter_count(), 432_641, "{head}");
    }
}

#[test]
fn prediction_of_a_sample_does_not_depend_on_the_other_rows() {
    let yaml = "{ inputs: 40, layers: [{ featureAttention: 16, heads: 4 }, { layerNorm: {} }, { dense: 3 }] }";
    let model = model(yaml);
    let (offsets, indices) = samples(300, 40);
    let all = model.predict(&Batch::features(&offsets, &indices).unwrap()).unwrap();
    for i in [0, 1, 127, 128, 299] {
        let own = &indices[offsets[i] as usize..offsets[i + 1] as usize];
        let alone = model.predict(&Batch::features(&[0, own.len() as u32], own).unwrap()).unwrap();
        for (a, b) in alone.iter().zip(&all[3 * i..]) {
            assert!((a - b).abs() < 2e-6, "sample {i}: {a} alone, {b} with others");
        }
    }
    // With other rows replaced and its own place kept, the bits stay.
    let rows = noise(64 * 40, 1);
    let mut changed = noise(64 * 40, 2);
    changed[7 * 40..8 * 40].copy_from_slice(&rows[7 * 40..8 * 40]);
    let dense =
        self::model("{ inputs: 40, layers: [{ dense: 32, activation: Gelu }, { layerNorm: {} }, { dense: 3 }] }");
    let predict = |rows: &[f32]| dense.predict(&Batch::rows(rows, 64, 40).unwrap()).unwrap();
    assert_eq!(predict(&rows)[21..24], predict(&changed)[21..24]);
}

#[test]
fn column_of_predictions_is_compared_with_its_own_targets_only() {
    // y = x with targets 0, 1, 1: a broadcast of 3 x 1 against 3 would give a mean of 14/9 instead of 5/3.
    let mut model = model("{ inputs: 1, layers: [{ dense: 1 }] }");
    model.parameters_mut().copy_from_slice(&[1.0, 0.0]);
    let rows = [1.0, 3.0, 1.0];
    let sum = |targets: &[f32]| {
        let batch = Batch::rows(&rows, 3, 1).unwrap();
        let data = LabeledBatch { batch, targets: Targets::Values(targets), weights: None };
        let loss = Loss::new(&MSE, 1).unwrap();
        GradientEngine::new().gradient(&model, &data, &loss, 1, RANDOM, 1.0).map(|(sum, ..)| sum)
    };
    let straight = sum(&[0.0, 1.0, 1.0]).unwrap();
    assert_eq!((straight.loss, straight.samples), (5.0, 3));
    assert_eq!(straight.values, [2.0 * (1.0 + 2.0 * 3.0), 2.0 * (1.0 + 2.0)]);
    assert_eq!(sum(&[1.0, 0.0, 1.0]).unwrap().loss, 9.0, "the order of the targets matters");
    let error = sum(&[0.0; 9]).unwrap_err();
    assert_eq!(error.to_string(), "targets: length is 9, expected 3");
}

#[test]
fn uneven_batches_give_the_mean_over_samples_not_the_mean_of_means() {
    // Gradient of the bias of y = b at b = 0 is -2 y. With targets c_k the mean over samples has a closed form.
    let mut model = model("{ inputs: 1, layers: [{ dense: 1 }] }");
    model.parameters_mut().fill(0.0);
    let loss = Loss::new(&MSE, 1).unwrap();
    let mut total = GradientSum { values: vec![0.0; 2], ..GradientSum::default() };
    let mut mean_of_means = 0.0;
    for (count, target) in [(200, -0.25f32), (90, 0.5), (10, 1.5)] {
        let (rows, targets) = (vec![0.0; count], vec![target; count]);
        let batch = Batch::rows(&rows, count, 1).unwrap();
        let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: None };
        let (sum, ..) = GradientEngine::new().gradient(&model, &data, &loss, 4, RANDOM, 1.0).unwrap();
        mean_of_means += sum.values[1] / count as f32 / 3.0;
        total.add(&sum);
    }
    assert_eq!(total.samples, 300);
    assert_eq!(total.values[1], -2.0 * (200.0 * -0.25 + 90.0 * 0.5 + 10.0 * 1.5));
    assert!((mean_of_means - total.values[1] / 300.0).abs() > 1.0, "the two differ on this data");
}

#[test]
fn gradient_in_64_leaves_has_the_same_bits_on_any_number_of_workers_and_threads() {
    let model = model("{ inputs: 9, layers: [{ featureBag: 24, activation: Relu }, { dropout: 0.2 }, { dense: 1 }] }");
    let (offsets, indices) = samples(200, 9);
    let targets = noise(200, 4);
    let correlation = Some(CorrelationSpec { weight: 0.1, target: 0.9 });
    let loss = Loss::new(&LossSpec { correlation, ..MSE }, 1).unwrap();
    let run = |cuts: &[u32]| {
        let parts: Vec<_> = cuts.windows(2).map(|w| w[0]..w[1]).collect();
        let mut engines: Vec<_> = parts.iter().map(|_| GradientEngine::new()).collect();
        let local: Vec<(Vec<u32>, Vec<u32>, std::ops::Range<usize>)> = parts
            .iter()
            .map(|owned| {
                let rows = LeafSplit::global_rows(200, 64, owned.clone());
                let first = offsets[rows.start];
                let own = offsets[rows.start..=rows.end].iter().map(|o| o - first).collect();
                (own, indices[first as usize..offsets[rows.end] as usize].to_vec(), rows)
            })
            .collect();
        let data: Vec<_> = local
            .iter()
            .map(|(offsets, indices, rows)| LabeledBatch {
                batch: Batch::features(offsets, indices).unwrap().starting_at(rows.start as u32),
                targets: Targets::Values(&targets[rows.clone()]),
                weights: None,
            })
            .collect();
        let mut moments = Moments::default();
        for ((engine, data), owned) in engines.iter_mut().zip(&data).zip(&parts) {
            let split = LeafSplit::partition(200, 64, owned.clone());
            engine.forward(&model, data, &loss, &split, RANDOM).unwrap().iter().for_each(|m| moments.add(m));
        }
        let mut sums = Vec::new();
        for (engine, data) in engines.iter_mut().zip(&data) {
            sums.extend(engine.backward(&model, data, &loss, &moments, 1.0).0);
        }
        combine(64, sums, |a, b| a.add(&b)).unwrap()
    };
    let whole = run(&[0, 64]);
    assert_eq!(whole.samples, 200);
    for cuts in [&[0u32, 1, 64][..], &[0, 17, 33, 64], &[0, 5, 9, 21, 30, 48, 63, 64]] {
        assert!(run(cuts) == whole, "other bits for the cuts {cuts:?}");
    }
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let four = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    assert!(one.install(|| run(&[0, 17, 64])) == four.install(|| run(&[0, 64])), "other bits on other threads");
}

/// Gradient with a precision and a loss scale, and the bytes of activations stored for it.
fn scaled_gradient(model: &Model, data: &LabeledBatch<'_>, precision: Precision, scale: f32) -> (Vec<f32>, usize) {
    let loss = Loss::new(&MSE, model.outputs()).unwrap();
    let mut engine = GradientEngine::with_precision(precision);
    let (sum, ..) = engine.gradient(model, data, &loss, 2, RANDOM, scale).unwrap();
    // The second pass works on reused buffers.
    let (again, ..) = engine.gradient(model, data, &loss, 2, RANDOM, scale).unwrap();
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&sum.values), bits(&again.values));
    (sum.values.iter().map(|v| v / scale).collect(), engine.activation_bytes())
}

fn relative_error(values: &[f32], expected: &[f32]) -> f32 {
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut values.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
}

#[test]
fn sixteen_bit_activations_take_half_the_memory_and_give_close_gradients() {
    let body = "{ dense: 32, activation: Gelu }, { layerNorm: {} }, { dropout: 0.2 }, \
                { residual: [{ dense: 32, activation: Tanh }, { residual: [{ dense: 32 }] }] }, { activation: Relu }";
    let model = model(&format!("{{ inputs: 8, layers: [{body}, {{ dense: 2 }}] }}"));
    let (rows, targets) = (noise(64 * 8, 1), noise(64 * 2, 2));
    let batch = Batch::rows(&rows, 64, 8).unwrap();
    let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: None };
    let (exact, full) = scaled_gradient(&model, &data, Precision::F32, 1.0);
    for (precision, most) in [(Precision::Bf16, 0.02), (Precision::F16, 0.003)] {
        let (values, bytes) = scaled_gradient(&model, &data, precision, 1.0);
        let error = relative_error(&values, &exact);
        assert!(error < most && error > most / 50.0, "{precision:?}: {error}");
        assert!(bytes * 100 < full * 56, "{precision:?}: {bytes} of {full} bytes");
    }
}

#[test]
fn values_and_gradients_between_layers_are_those_that_16_bits_can_hold() {
    let model =
        model("{ inputs: 5, layers: [{ dense: 6, activation: Tanh }, { dense: 7, activation: Gelu }, { dense: 1 }] }");
    let rows = noise(5, 1);
    let data =
        LabeledBatch { batch: Batch::rows(&rows, 1, 5).unwrap(), targets: Targets::Values(&[0.0]), weights: None };
    let loss = Loss::new(&MSE, 1).unwrap();
    let mut engine = GradientEngine::with_precision(Precision::F16);
    let (sum, _, samples) = engine.gradient(&model, &data, &loss, 1, RANDOM, 1.0).unwrap();
    // With one row the gradient of a bias is the gradient between two layers, and with target 0 the error is the output.
    let biases = model.views().iter().filter(|v| v.name.ends_with("bias"));
    let values = biases.flat_map(|v| &sum.values[v.range.clone()]).chain(&samples.errors);
    assert_eq!(values.clone().count(), 6 + 7 + 1 + 1);
    for value in values {
        assert_eq!(half::f16::from_f32(*value).to_f32(), *value);
    }
}

#[test]
fn loss_scale_rescues_gradients_that_vanish_in_f16_and_too_large_a_scale_overflows() {
    let model = model("{ inputs: 4, layers: [{ dense: 6, activation: Tanh }, { dense: 1 }] }");
    let rows = noise(16 * 4, 1);
    let targets = model.predict(&Batch::rows(&rows, 16, 4).unwrap()).unwrap();
    let targets: Vec<f32> = targets.iter().map(|t| t + 1e-3).collect();
    // Errors of 1e-3 with weights of 1e-6: gradients near 1e-9, below the smallest f16 of 6e-8.
    let weights = [1e-6; 16];
    let batch = Batch::rows(&rows, 16, 4).unwrap();
    let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: Some(&weights) };
    let (exact, _) = scaled_gradient(&model, &data, Precision::F32, 1.0);
    let (lost, _) = scaled_gradient(&model, &data, Precision::F16, 1.0);
    assert!(lost.iter().all(|v| *v == 0.0), "{lost:?}");
    let (kept, _) = scaled_gradient(&model, &data, Precision::F16, 16_777_216.0);
    // The predictions themselves are rounded to 11 bits, so an error of 1e-3 keeps only a few.
    assert!(relative_error(&kept, &exact) < 0.5 && kept.iter().any(|v| *v != 0.0), "{kept:?} {exact:?}");
    let plain = LabeledBatch { weights: None, ..data };
    let (overflow, _) = scaled_gradient(&model, &plain, Precision::F16, 1e9);
    assert!(overflow.iter().any(|v| !v.is_finite()), "{overflow:?}");
    let (range, _) = scaled_gradient(&model, &plain, Precision::Bf16, 1e9);
    assert!(range.iter().all(|v| v.is_finite()), "bf16 has the range of f32");
}

#[test]
fn dropout_drops_the_configured_share_and_keeps_a_samples_mask_in_any_split() {
    let mut model = model("{ inputs: 100, layers: [{ dropout: 0.3 }, { dense: 1 }] }");
    model.parameters_mut().fill(1.0);
    let rows = vec![1.0; 60 * 100];
    let targets = vec![0.0; 60];
    let loss = Loss::new(&MSE, 1).unwrap();
    let errors = |rows: &[f32], positions: &[u32], step: u64| {
        let batch = Batch::rows(rows, positions.len(), 100).unwrap().at_positions(positions).unwrap();
        let data = LabeledBatch { batch, targets: Targets::Values(&targets[..positions.len()]), weights: None };
        let random = RandomStep { seed: 42, step };
        GradientEngine::new().gradient(&model, &data, &loss, 4, random, 1.0).unwrap().2.errors
    };
    let all: Vec<u32> = (0..60).collect();
    let whole = errors(&rows, &all, 1);
    // The output is 1 + (units kept) / 0.7.
    let kept: f32 = whole.iter().map(|e| (e - 1.0) * 0.7).sum::<f32>() / 6000.0;
    assert!((kept - 0.7).abs() < 0.02, "share kept: {kept}");
    let picked = errors(&rows[..300], &[58, 3, 17], 1);
    assert_eq!(picked, [whole[58], whole[3], whole[17]]);
    assert_ne!(errors(&rows, &all, 2), whole, "another step has other masks");
    let predicted = model.predict(&Batch::rows(&rows[..100], 1, 100).unwrap()).unwrap();
    assert!((predicted[0] - 101.0).abs() < 1e-4, "no dropout in predictions: {}", predicted[0]);
}

#[test]
fn frozen_layers_keep_their_parameters_and_do_not_change_other_gradients() {
    let yaml = "{ inputs: 4, layers: [{ dense: 6, activation: Tanh }, { residual: [{ dense: 6 }] }, { dense: 1 }] }";
    let free = model(yaml);
    let rows = noise(8 * 4, 1);
    let targets = noise(8, 2);
    let data =
        LabeledBatch { batch: Batch::rows(&rows, 8, 4).unwrap(), targets: Targets::Values(&targets), weights: None };
    let loss = Loss::new(&MSE, 1).unwrap();
    let gradient = |m: &Model| {
        let mut engine = GradientEngine::new();
        // Buffers of an earlier step, from before a layer was frozen.
        for _ in 0..2 {
            engine.recycle(GradientSum { values: vec![7.0; m.parameter_count()], ..GradientSum::default() });
        }
        engine.gradient(m, &data, &loss, 2, RANDOM, 1.0).unwrap().0
    };
    let full = gradient(&free);
    for path in ["layers.0", "layers.1", "layers.1.layers.0", "layers.2"] {
        let mut frozen = free.clone();
        assert_eq!(frozen.set_frozen(path, true), 2, "{path}");
        let partial = gradient(&frozen);
        let before = frozen.parameters().to_vec();
        let spec = OptimizerSpec::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.5 };
        let mut optimizer = Optimizer::new(spec, before.len()).unwrap();
        let views = frozen.views().to_vec();
        optimizer.step(frozen.parameters_mut(), &partial.values, &views, 0.125, 0.1);
        for view in &views {
            let range = view.range.clone();
            let same = frozen.parameters()[range.clone()] == before[range.clone()];
            assert_eq!(same, view.frozen, "{path}: {}", view.name);
            let expected = if view.frozen { vec![0.0; range.len()] } else { full.values[range.clone()].to_vec() };
            assert_eq!(partial.values[range], expected, "{path}: gradient of {}", view.name);
        }
    }
}

#[test]
fn invalid_models_are_refused_with_the_layer_and_both_dimensions() {
    let cases = [
        ("inputs: 0\nlayers: [{ dense: 1 }]", "model: inputs is empty, at least one is required"),
        (
            "inputs: 1048576\nlayers: [{ dense: 1048576, bias: false }]",
            "model: has 1099511627776 parameters, allowed: at most 2147483648",
        ),
        ("inputs: 18446744073709551615\nlayers: [{ dense: 2 }, { dense: 2 }]", "model: has 18446744073709551615"),
        ("inputs: 3\nlayers: []", "model: layers is empty, at least one is required"),
        (
            "inputs: 3\nlayers: [{ dense: 4 }, { inputs: 5, dense: 1 }]",
            "layer 1: inputs is 5, but the layer below gives 4",
        ),
        (
            "inputs: 3\nlayers: [{ dense: 4 }, { residual: [{ dense: 7 }] }]",
            "layer 1: residual takes 4 values, but its last layer gives 7: both must be equal",
        ),
        (
            "inputs: 3\nlayers: [{ residual: [{ dense: 3 }, { dense: 0 }] }]",
            "layer 0.1: dense is 0, allowed: 1 to 1048576",
        ),
        ("inputs: 3\nlayers: [{ dense: 1, dropout: 0.1 }]", "layer 0: names dense and dropout, exactly one of"),
        ("inputs: 3\nlayers: [{ frozen: true }]", "layer 0: names no layer, exactly one of"),
        ("inputs: 3\nlayers: [{ dropout: 1.0 }]", "layer 0: dropout is 1, allowed: 0 to 1 exclusive"),
        ("inputs: 3\nlayers: [{ dense: 1, heads: 2 }]", "layer 0: heads does not apply to dense"),
        ("inputs: 3\nlayers: [{ tropical: 1, heads: 2 }]", "layer 0: heads does not apply to tropical"),
        ("inputs: 3\nlayers: [{ dense: 2 }, { tropical: 0 }]", "layer 1: tropical is 0, allowed: 1 to 1048576"),
        ("inputs: 3\nlayers: [{ dense: 4 }, { featureBag: 2 }]", "layer 1: featureBag reads feature indices and"),
        ("inputs: 3\nlayers: [{ featureAttention: 12 }]", "layer 0: width 12 is not a multiple of heads 8"),
        ("inputs: 3\nlayers: [{ layerNorm: { epsilon: 0 } }]", "layer 0: epsilon is 0, allowed: a positive number"),
    ];
    for (yaml, expected) in cases {
        let spec: ModelSpec = serde_saphyr::from_str(yaml).unwrap();
        let error = Model::new(&spec, 1).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{yaml}: {error}");
    }
    let unknown = serde_saphyr::from_str::<ModelSpec>("inputs: 3\nlayers: [{ convolution: 3 }]").unwrap_err();
    assert!(unknown.to_string().contains("convolution"), "{unknown}");
}

#[test]
fn batches_that_do_not_fit_are_refused_with_the_sample_and_the_value() {
    let bag = model("{ inputs: 5, layers: [{ featureBag: 2 }] }");
    let predict = |offsets: &[u32], indices: &[u32]| bag.predict(&Batch::features(offsets, indices)?);
    assert_eq!(predict(&[0, 1, 3], &[4, 0, 5]).unwrap_err(), BatchError::Feature { sample: 1, value: 5, limit: 5 });
    assert_eq!(predict(&[0, 2, 1], &[1]).unwrap_err().to_string(), "offsets: entry 2 is 1, expected at least 2");
    assert!(predict(&[0, 2], &[1]).is_err() && predict(&[], &[]).is_err() && predict(&[1, 1], &[0]).is_err());
    assert_eq!(predict(&[0, 0], &[]).unwrap().len(), 2, "a sample without features is valid");
    let error = bag.predict(&Batch::rows(&[0.0; 5], 1, 5).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "input: the model reads feature indices, the batch has dense rows");
    let batch = Batch::features(&[0, 1], &[2]).unwrap();
    let loss = Loss::new(&MSE, 2).unwrap();
    let run = |targets: Targets<'_>, weights: Option<&[f32]>| {
        let data = LabeledBatch { batch, targets, weights };
        GradientEngine::new().gradient(&bag, &data, &loss, 1, RANDOM, 1.0).unwrap_err().to_string()
    };
    let good = Targets::Values(&[0.0, 1.0]);
    assert_eq!(run(good, Some(&[-1.0])), "sample 0: weight is -1, allowed: finite numbers >= 0");
    assert_eq!(run(good, Some(&[1.0; 2])), "weights: length is 2, expected 1");
    assert_eq!(run(Targets::Values(&[0.0, f32::NAN]), None), "sample 0: target is NaN, allowed: finite numbers");
    assert_eq!(run(Targets::Classes(&[1]), None), "targets: loss Mse needs values");
}

#[test]
fn training_the_model_lowers_the_loss_and_keeps_the_outputs_apart() {
    let spec = ModelSpec {
        inputs: 30,
        layers: vec![
            LayerSpec { feature_bag: Some(32), activation: Some(Activation::Relu), ..LayerSpec::default() },
            LayerSpec { dense: Some(1), ..LayerSpec::default() },
        ],
    };
    let mut model = Model::new(&spec, 7).unwrap();
    let (offsets, indices) = samples(256, 30);
    let truth = noise(30, 8);
    let target =
        |w: &[u32]| indices[w[0] as usize..w[1] as usize].iter().map(|&f| truth[f as usize]).sum::<f32>().tanh();
    let targets: Vec<f32> = offsets.windows(2).map(target).collect();
    let correlation = Some(CorrelationSpec { weight: 0.1, target: 0.9 });
    let loss = Loss::new(&LossSpec { correlation, ..MSE }, 1).unwrap();
    let mut engine = GradientEngine::new();
    let mut optimizer = Optimizer::new(OptimizerSpec::default(), model.parameter_count()).unwrap();
    let batch = Batch::features(&offsets, &indices).unwrap();
    let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: None };
    let mut last = Moments::default();
    for step in 0..300 {
        let random = RandomStep { seed: 7, step };
        let (sum, moments, _) = engine.gradient(&model, &data, &loss, 2, random, 1.0).unwrap();
        let views = model.views().to_vec();
        optimizer.step(model.parameters_mut(), &sum.values, &views, 1.0 / sum.samples as f32, 0.01);
        engine.recycle(sum);
        last = moments;
    }
    assert!(last.correlation() > 0.97, "correlation {}", last.correlation());
    assert!(last.spread_ratio().unwrap() > 0.9, "spread {:?}", last.spread_ratio());
}

#[test]
fn layers_announce_their_gradients_from_the_last_to_the_first_with_their_final_bits() {
    let (rows, targets) = (noise(30 * 5, 1), noise(30, 2));
    let (offsets, indices) = samples(30, 5);
    let body = "{ dense: 7, activation: Gelu }, { dropout: 0.3 }, \
                { residual: [{ dense: 7, activation: Tanh }, { layerNorm: {} }] }, { tropical: 6 }, { dense: 1 }, \
                { activation: Sigmoid }";
    let firsts =
        ["", "{ layerNorm: {} },", "{ featureBag: 6, activation: Relu },", "{ featureAttention: 6, heads: 2 },"];
    for (first, frozen) in firsts.iter().flat_map(|first| [(first, None), (first, Some("layers.0"))]) {
        let mut model = model(&format!("{{ inputs: 5, layers: [{first} {body}] }}"));
        frozen.iter().for_each(|path| assert!(model.set_frozen(path, true) > 0));
        let batch = if model.reads_features() {
            Batch::features(&offsets, &indices).unwrap()
        } else {
            Batch::rows(&rows, 30, 5).unwrap()
        };
        let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: None };
        let loss = Loss::new(&MSE, 1).unwrap();
        let layers = model.backward_order();
        let pairs = layers.chunks(2).map(|pair| pair[pair.len() - 1].start..pair[0].end).collect();
        let all = 0..model.parameter_count();
        for (precision, buckets) in [Precision::F32, Precision::Bf16].into_iter().flat_map(|precision| {
            [(precision, layers.clone()), (precision, Vec::clone(&pairs)), (precision, vec![all.clone()])]
        }) {
            let split = LeafSplit::local(30, 4);
            let mut engine = GradientEngine::with_precision(precision);
            engine.forward(&model, &data, &loss, &split, RANDOM).unwrap();
            let whole = engine.backward(&model, &data, &loss, &Moments::default(), 3.0);
            // Buffers of the last pass are used again: none of its values may remain.
            engine.recycle(GradientSum { values: noise(model.parameter_count(), 4), ..GradientSum::default() });
            engine.forward(&model, &data, &loss, &split, RANDOM).unwrap();
            let mut announced = Vec::new();
            let scaled = (&Moments::default(), 3.0);
            let by_bucket = engine.backward_by_bucket(&model, &data, &loss, scaled, &buckets, &mut |range, values| {
                announced.push((range, values.to_vec()));
            });
            let ranges: Vec<_> = announced.iter().map(|(range, _)| range.clone()).collect();
            assert_eq!(ranges, buckets, "{first}");
            assert!(ranges.iter().zip(&ranges[1..]).all(|(later, earlier)| earlier.end == later.start));
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
            for (range, values) in &announced {
                assert_eq!(bits(values), bits(&whole.0[0].1.values[range.clone()]), "{first}: {range:?}");
            }
            assert_eq!(bits(&by_bucket.0[0].1.values), bits(&whole.0[0].1.values), "{first}");
            assert_eq!(by_bucket, whole, "{first}");
        }
    }
}
