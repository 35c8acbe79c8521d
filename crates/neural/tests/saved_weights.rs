//! Saved weights and the generated PyTorch module.
//!
//! `golden/<name>_model.py` and `golden/<name>.safetensors` are what this crate writes; `golden/predictions.json` is
//! what PyTorch predicts with them (`golden/run_models.py`). After a change of the generator, run this test with
//! `ENGRAM_UPDATE_GOLDEN=1` (it writes the files and compares nothing), then the script, then the test again.
#![allow(clippy::unwrap_used, reason = "a helper of a test may panic")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use engram_neural::{Batch, Coverage, Model, ModelSpec};
use serde::Deserialize;

const ROWS: &str = "
inputs: 6
layers:
  - { dense: 8, activation: Gelu }
  - { dropout: 0.25 }
  - { layerNorm: { epsilon: 1e-3 } }
  - { residual: [{ activation: Relu }, { dense: 8, bias: false, activation: Tanh }, { residual: [{ dense: 8 }] }] }
  - { activation: Relu }
  - { dense: 3, activation: Sigmoid, initializer: HeUniform }
";
const BAG: &str = "{ inputs: 12, layers: [{ featureBag: 8, activation: Relu }, { dense: 2 }] }";
const ATTENTION: &str =
    "{ inputs: 12, layers: [{ featureAttention: 8, heads: 4 }, { layerNorm: {} }, { dense: 2, activation: Tanh }] }";
const TROPICAL: &str = "
inputs: 6
layers:
  - { tropical: 8 }
  - { residual: [{ tropical: 8, bias: false, activation: Tanh }] }
  - { dense: 2 }
";

#[derive(Deserialize)]
struct Prediction {
    rows: Option<Vec<f32>>,
    features: Option<Vec<Vec<u32>>>,
    predictions: Vec<f32>,
}

fn model(yaml: &str) -> Model {
    Model::new(&serde_saphyr::from_str::<ModelSpec>(yaml).unwrap(), 42).unwrap()
}

fn golden(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "golden", name].iter().collect()
}

#[test]
fn generated_python_module_predicts_the_same_from_saved_weights() {
    let text = std::fs::read_to_string(golden("predictions.json")).unwrap_or_else(|_| "{}".to_owned());
    let recorded: BTreeMap<String, Prediction> = serde_json::from_str(&text).unwrap();
    for (name, yaml) in [("rows", ROWS), ("bag", BAG), ("attention", ATTENTION), ("tropical", TROPICAL)] {
        let model = model(yaml);
        let module = golden(&format!("{name}_model.py"));
        let weights = golden(&format!("{name}.safetensors"));
        if std::env::var_os("ENGRAM_UPDATE_GOLDEN").is_some() {
            std::fs::write(&module, model.python_source()).unwrap();
            std::fs::write(&weights, model.to_safetensors().unwrap()).unwrap();
            continue;
        }
        assert_eq!(model.python_source(), std::fs::read_to_string(module).unwrap(), "{name}: module differs");
        assert!(model.to_safetensors().unwrap() == std::fs::read(weights).unwrap(), "{name}: weights differ");
        let golden = &recorded[name];
        let (mut offsets, mut indices) = (vec![0], Vec::new());
        for sample in golden.features.iter().flatten() {
            indices.extend_from_slice(sample);
            offsets.push(indices.len() as u32);
        }
        let batch = match &golden.rows {
            Some(rows) => Batch::rows(rows, rows.len() / 6, 6).unwrap(),
            None => Batch::features(&offsets, &indices).unwrap(),
        };
        let predictions = model.predict(&batch).unwrap();
        assert_eq!(predictions.len(), golden.predictions.len());
        for (i, (a, b)) in predictions.iter().zip(&golden.predictions).enumerate() {
            assert!((a - b).abs() < 2e-6, "{name}: value {i} is {a}, PyTorch has {b}");
        }
    }
}

#[test]
fn weights_survive_a_round_trip_and_those_of_another_model_are_refused() {
    let saved = model(ROWS).to_safetensors().unwrap();
    let spec: ModelSpec = serde_saphyr::from_str(ROWS).unwrap();
    let mut other = Model::new(&spec, 43).unwrap();
    assert_ne!(other.parameters(), model(ROWS).parameters());
    assert_eq!(other.load_safetensors(&saved, Coverage::Exact).unwrap(), other.views().len());
    assert_eq!(other, model(ROWS));

    let wide = ROWS.replace("dense: 3,", "dense: 4,");
    let mut wide = model(&wide);
    let before = wide.clone();
    let error = wide.load_safetensors(&saved, Coverage::Exact).unwrap_err();
    let expected = "tensor layers.5.weight: has type F32 and shape [3, 8], expected F32 and [4, 8]";
    assert_eq!(error.to_string(), expected);
    assert_eq!(wide, before, "a refused file changes nothing");
    // A warm start takes the layers that fit.
    assert_eq!(wide.load_safetensors(&saved, Coverage::Matching).unwrap(), wide.views().len() - 2);
    assert_eq!(wide.tensor("layers.0.weight"), model(ROWS).tensor("layers.0.weight"));
    assert_eq!(wide.tensor("layers.5.weight"), before.tensor("layers.5.weight"));

    let mut small = model("{ inputs: 6, layers: [{ dense: 8 }] }");
    let error = small.load_safetensors(&saved, Coverage::Exact).unwrap_err();
    assert_eq!(error.to_string(), "tensor layers.2.bias: in the file, but not in the model");
    let error = other.load_safetensors(&small.to_safetensors().unwrap(), Coverage::Exact).unwrap_err();
    assert_eq!(error.to_string(), "tensor layers.2.weight: missing from the file, expected shape [8]");
    assert!(other.load_safetensors(&saved[..saved.len() - 1], Coverage::Exact).is_err(), "truncated");
    small.parameters_mut()[3] = f32::NAN;
    let bytes = small.to_safetensors().unwrap();
    let error = small.load_safetensors(&bytes, Coverage::Exact).unwrap_err();
    assert_eq!(error.to_string(), "tensor layers.0.weight: value 3 is not finite");
}
