//! The run as a user sees it, and the matrix against NumPy.

use super::*;
use crate::task_run::fit::softmax;
use crate::task_run::local::LocalContext;
use crate::task_run::run_locally;
use engram_api::FisherForm;

/// Values that `golden/make_golden.py` computed with NumPy in f64.
#[derive(serde::Deserialize)]
struct Golden {
    values: Vec<f32>,
    labels: Vec<u32>,
    parameters: Vec<f32>,
    empirical: Vec<f64>,
    model: Vec<f64>,
    model_eigenvalues: Vec<f64>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("golden/fisher.json")).unwrap()
}

/// A run over the golden samples with a number of shards, and bands of at most half of the sums.
fn run_of(golden: &Golden, form: FisherForm, shards: usize) -> FisherTasks {
    let data = Dataset::unscaled(golden.values.clone(), golden.labels.clone(), 3);
    let split = Split { training: (0..data.len()).collect(), validation: Vec::new(), test: Vec::new() };
    let spec = FisherRun { form, ..FisherRun::default() };
    let parameters = parameters_of(data.width, 0, 3);
    // Several bands, except for one shard: whole sums.
    let entries = parameters * (parameters + 1) / if shards > 1 { 4 } else { 2 };
    FisherTasks { spec, parameters, data, split, shards, bands: bands(parameters, entries) }
}

/// A context with several threads.
struct Threads(LocalContext, usize);

impl TaskContext for Threads {
    fn progress(&self, fraction: f64) {
        assert!((0.0..=1.0).contains(&fraction), "{fraction}");
    }

    fn stop(&self) -> &crate::source::StopFlag {
        self.0.stop()
    }

    fn threads(&self) -> usize {
        self.1
    }
}

fn matrix_of(golden: &Golden, form: FisherForm, shards: usize) -> FisherMatrix {
    matrix_on(golden, form, shards, 1)
}

fn matrix_on(golden: &Golden, form: FisherForm, shards: usize, threads: usize) -> FisherMatrix {
    let run = run_of(golden, form, shards);
    let context = Threads(LocalContext::default(), threads);
    assert_eq!(run.bands.len() > 1, shards > 1, "{:?}", run.bands);
    let shard = |index| run.shard(index, &golden.parameters, &context).unwrap();
    run.fisher(&(0..shards * run.bands.len()).map(shard).collect()).unwrap()
}

#[test]
fn matrices_equal_those_of_numpy() {
    let golden = golden();
    for (form, expected) in [(FisherForm::Empirical, &golden.empirical), (FisherForm::Model, &golden.model)] {
        let matrix = matrix_of(&golden, form, 4);
        let size = matrix.parameters();
        assert_eq!(size * size, expected.len());
        for (index, expected) in expected.iter().enumerate() {
            let found = matrix.get(index / size, index % size);
            assert!((found - expected).abs() < 1e-6, "{form} {index}: {found} {expected}");
        }
    }
    let spectrum = matrix_of(&golden, FisherForm::Model, 1).spectrum();
    for (found, expected) in spectrum.iter().zip(&golden.model_eigenvalues) {
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
    let different = golden.empirical.iter().zip(&golden.model).any(|(a, b)| (a - b).abs() > 1e-2);
    assert!(different, "the two forms must not be confused");
}

#[test]
fn any_number_of_shards_and_threads_gives_the_same_bits() {
    let golden = golden();
    for form in [FisherForm::Empirical, FisherForm::Model] {
        let whole = matrix_of(&golden, form, 1);
        for shards in [2, 8, 64] {
            assert_eq!(matrix_of(&golden, form, shards), whole, "{form}, {shards} shards");
        }
        for (shards, threads) in [(1, 2), (1, 3), (4, 5)] {
            assert_eq!(matrix_on(&golden, form, shards, threads), whole, "{form}, {shards} shards, {threads} threads");
        }
    }
}

/// Scores are up to their sign the gradients of ln p: by finite differences, and their mean over the labels of the model is 0.
#[test]
fn scores_are_gradients_of_the_log_probability_with_mean_zero() {
    const STEP: f32 = 1e-2;
    let golden = golden();
    let run = run_of(&golden, FisherForm::Empirical, 1);
    let mut classifier = run.classifier().unwrap();
    let log_probability = |classifier: &mut Classifier, parameters: &[f32], values: &[f32], class: usize| {
        classifier.model.parameters_mut().copy_from_slice(parameters);
        softmax(&classifier.logits(values).unwrap())[class].ln()
    };
    for values in golden.values.chunks_exact(run.data.width).step_by(7) {
        let mut mean = vec![0.0; run.parameters];
        for class in 0..3 {
            let probability = log_probability(&mut classifier, &golden.parameters, values, class).exp();
            let score = run.score(&mut classifier, values, class as u32, 0).unwrap();
            mean.iter_mut().zip(&score).for_each(|(mean, &score)| *mean += probability * f64::from(score));
            for parameter in (0..run.parameters).step_by(3) {
                let mut at = |change: f32| {
                    let mut moved = golden.parameters.clone();
                    moved[parameter] += change;
                    log_probability(&mut classifier, &moved, values, class)
                };
                let slope = (at(STEP) - at(-STEP)) / f64::from(2.0 * STEP);
                let found = f64::from(-score[parameter]);
                assert!((slope - found).abs() < 2e-3, "class {class}, parameter {parameter}: {found} {slope}");
            }
        }
        assert!(mean.iter().all(|mean| mean.abs() < 1e-6), "{mean:?}");
    }
}

/// A few steps on the digits: seconds in a debug build.
fn short() -> FisherRun {
    FisherRun {
        epochs: 8,
        steps: 12,
        natural_rates: vec![0.3],
        sgd_rates: vec![3.0],
        form: FisherForm::Empirical,
        ..FisherRun::default()
    }
}

#[test]
fn run_on_digits_is_the_same_on_any_number_of_workers() {
    let run = FisherTasks::new(&short(), None).unwrap();
    assert_eq!((run.parameters, run.shards), (650, 8));
    let findings = run_locally(&run, 1).unwrap();
    assert_eq!(run_locally(&run, 3).unwrap(), findings);
    let metric = |name: &str| findings.metrics[name];
    println!("{:?}", findings.metrics);
    assert!(metric("test_accuracy") > 0.9, "chance is 0.1, 0.95 expected");
    // Pixels that are 0 in every image give 0 rows, and softmax logits have one redundant class.
    assert!((300.0..=585.0).contains(&metric("fisher_rank")), "{}", metric("fisher_rank"));
    assert!(metric("effective_dimension") < metric("fisher_rank") && metric("effective_dimension") > 10.0);
    assert!(metric("natural_gradient_loss") < metric("sgd_loss"), "same samples, same number of steps");
    assert!(findings.page.matches("<svg").count() == 2 && findings.summary.len() == 2);
    assert_eq!(findings.outputs["fisherDigest"].len(), 16);
}

#[test]
fn singular_matrix_without_damping_is_an_error() {
    let run = FisherTasks::new(&FisherRun { damping: 0.0, ..short() }, None).unwrap();
    let error = run_locally(&run, 1).unwrap_err().to_string();
    assert!(error.starts_with("spec.fisher.damping: 0"), "{error}");
    assert!(error.ends_with(" is not allowed for a singular Fisher matrix; allowed: a positive number"), "{error}");
}

#[test]
fn model_that_is_too_large_for_a_message_is_an_error() {
    let refused = |hidden| FisherTasks::new(&FisherRun { hidden, ..short() }, None).err().unwrap().to_string();
    let error = refused(24);
    assert!(error.starts_with("spec.fisher.hidden: 24 gives 1810 parameters for 64 inputs and 10 classes"), "{error}");
    assert!(error.contains("at most 1773 parameters"), "{error}");
    let largest = FisherTasks::new(&FisherRun { hidden: 23, ..short() }, None).unwrap();
    assert_eq!((largest.parameters, largest.shards, largest.bands.len()), (1_735, 2, 4));
    let small = FisherTasks::new(&FisherRun { hidden: 11, ..short() }, None).unwrap();
    assert_eq!((small.parameters, small.shards, small.bands.len()), (835, 8, 1));
}

#[test]
fn hidden_layer_is_trained_and_measured() {
    let golden = golden();
    let rows: String = golden
        .values
        .chunks(3)
        .zip(&golden.labels)
        .map(|(row, label)| format!("{},{},{},c{label}\n", row[0], row[1], row[2]))
        .collect();
    let data =
        serde_json::from_value(serde_json::json!({ "csv": { "file": { "path": "t.csv" }, "label": "kind" } })).unwrap();
    let spec = FisherRun { data, hidden: 5, batch: 16, form: FisherForm::Model, ..short() };
    let run = FisherTasks::new(&spec, Some(format!("a,b,c,kind\n{rows}").as_bytes())).unwrap();
    let findings = run_locally(&run, 2).unwrap();
    assert_eq!(findings.metrics["parameters"], 38.0);
    assert!(findings.metrics["fisher_smallest_eigenvalue"] >= -1e-6 * findings.metrics["fisher_trace"] / 38.0);
    let error = FisherTasks::new(&spec, Some(b"a,kind\n1,x\ny,x\n")).err().unwrap().to_string();
    assert!(error.contains("t.csv, line 3, column a: \"y\""), "{error}");
}
