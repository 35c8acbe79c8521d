//! Numerics without a cluster: max-plus products, Fisher matrices, geodesic models.

use crate::convert;
use crate::error;
use engram_geodesic::{
    Axes, CalibrationResult, CalibrationTask, ErrorProfile, Report, Settings, Spectra, Task, TaskResult, Trainer,
    invert,
};
use engram_information as information;
use engram_tropical::{Layer, LayerOutput, Matrix, Semiring, product};
use numpy::{IntoPyArray as _, PyArray1, PyArray2, PyArrayMethods as _, PyReadonlyArray1, PyReadonlyArray2};
use numpy::{PyUntypedArrayMethods as _, ndarray::Array2};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Mutex;

/// Steps of a training between checks for signals: a step takes a few milliseconds.
const STEPS_PER_CHECK: usize = 8;

/// Python arrays.
type Vector<'py, T> = Bound<'py, PyArray1<T>>;
type Table<'py, T> = Bound<'py, PyArray2<T>>;

fn invalid(py: Python<'_>, text: &str) -> PyErr {
    error::raise(py, "InvalidValue", text, Some(engram_api::Code::InvalidValue))
}

fn matrix(py: Python<'_>, name: &'static str, array: &PyReadonlyArray2<'_, f32>) -> PyResult<Matrix> {
    let shape = array.shape();
    let (rows, columns) = (shape[0], shape[1]);
    Matrix::new(name, rows, columns, array.as_slice()?.to_vec()).map_err(|failure| invalid(py, &failure.to_string()))
}

fn array<'py>(py: Python<'py>, matrix: &Matrix) -> Bound<'py, PyArray2<f32>> {
    let entries = matrix.entries().to_vec();
    Array2::from_shape_vec((matrix.rows(), matrix.columns()), entries).expect("a matrix is full").into_pyarray(py)
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the product over max and plus, or over min and plus.
#[pyfunction]
#[pyo3(signature = (left, right, *, min_plus=false))]
pub(crate) fn tropical_matmul<'py>(
    py: Python<'py>,
    left: PyReadonlyArray2<'py, f32>,
    right: PyReadonlyArray2<'py, f32>,
    min_plus: bool,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let semiring = if min_plus { Semiring::MinPlus } else { Semiring::MaxPlus };
    let (left, right) = (matrix(py, "left", &left)?, matrix(py, "right", &right)?);
    let result = py.detach(|| product(&left, &right, threads()));
    let result = result.map_err(|failure| invalid(py, &failure.to_string()))?;
    // The caller negates the operands of min-plus, where missing is positive infinity.
    Ok(array(py, &result.negated(semiring)))
}

/// Returns outputs and winners of a tropical layer.
#[pyfunction]
pub(crate) fn tropical_forward<'py>(
    py: Python<'py>,
    weights: PyReadonlyArray2<'py, f32>,
    biases: PyReadonlyArray1<'py, f32>,
    batch: PyReadonlyArray2<'py, f32>,
) -> PyResult<(Table<'py, f32>, Vector<'py, u32>)> {
    let (weights, batch) = (matrix(py, "weights", &weights)?, matrix(py, "batch", &batch)?);
    let biases = convert::column(&biases)?;
    let output = py.detach(|| Layer::new(weights, biases)?.forward(&batch));
    let output = output.map_err(|failure| invalid(py, &failure.to_string()))?;
    Ok((array(py, &output.values), output.winners.into_pyarray(py)))
}

/// Returns the gradients of weights, biases and inputs: sums over the samples.
#[pyfunction]
pub(crate) fn tropical_backward<'py>(
    py: Python<'py>,
    inputs: usize,
    winners: PyReadonlyArray1<'py, u32>,
    upstream: PyReadonlyArray2<'py, f32>,
) -> PyResult<(Table<'py, f32>, Vector<'py, f32>, Table<'py, f32>)> {
    let (samples, outputs) = (upstream.shape()[0], upstream.shape()[1]);
    let (winners, upstream) = (convert::column(&winners)?, upstream.as_slice()?.to_vec());
    let gradient = py.detach(|| {
        // Winners are all that a gradient depends on.
        let layer = Layer::new(Matrix::missing(inputs, outputs), vec![0.0; outputs])?;
        let output = LayerOutput { values: Matrix::missing(samples, outputs), winners };
        layer.backward(&output, &upstream)
    });
    let gradient = gradient.map_err(|failure| invalid(py, &failure.to_string()))?;
    let mut weights = vec![0.0; inputs * outputs];
    for (entry, value) in gradient.weights {
        weights[entry as usize] = value;
    }
    let weights = Array2::from_shape_vec((inputs, outputs), weights).expect("one entry per edge");
    let to_inputs = Array2::from_shape_vec((samples, inputs), gradient.inputs).expect("one entry per input");
    Ok((weights.into_pyarray(py), gradient.biases.into_pyarray(py), to_inputs.into_pyarray(py)))
}

/// Returns the Fisher matrix of scores (samples x parameters); unless `fast`, with the same bits for any split of the samples.
#[pyfunction]
#[pyo3(signature = (scores, *, fast=false))]
pub(crate) fn fisher_matrix<'py>(
    py: Python<'py>,
    scores: PyReadonlyArray2<'py, f32>,
    fast: bool,
) -> PyResult<Bound<'py, PyArray2<f64>>> {
    let (samples, parameters) = (scores.shape()[0], scores.shape()[1]);
    let scores = scores.as_slice()?.to_vec();
    let result = py.detach(|| {
        if fast {
            return information::fast_sum(&scores, parameters);
        }
        let parts = information::partial_sums(&scores, parameters, 0..information::LEAVES, samples)?;
        information::combine(parts, parameters, samples as u64)
    });
    let result = result.map_err(|failure| invalid(py, &failure.to_string()))?;
    let entry = |(row, column): (usize, usize)| result.get(row, column);
    Ok(Array2::from_shape_fn((parameters, parameters), entry).into_pyarray(py))
}

/// Returns the natural gradient: the solution of `(F + damping I) x = gradient`.
#[pyfunction]
pub(crate) fn natural_gradient<'py>(
    py: Python<'py>,
    scores: PyReadonlyArray2<'py, f32>,
    gradient: PyReadonlyArray1<'py, f64>,
    damping: f64,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let (scores, gradient) = (scores.as_slice()?.to_vec(), convert::column(&gradient)?);
    let result = py.detach(|| information::natural_gradient(&scores, &gradient, damping));
    Ok(result.map_err(|failure| invalid(py, &failure.to_string()))?.into_pyarray(py))
}

/// Training of one geodesic model.
#[pyclass(frozen, module = "engram._engram")]
pub(crate) struct GeodesicTrainer {
    spectra: Spectra,
    settings: Settings,
    task: Option<HeldOut>,
    trainer: Mutex<Trainer>,
}

/// What a training does not see.
#[derive(Clone, Copy)]
enum HeldOut {
    One(Task),
    /// Two spectra, for the calibration of bands.
    Two(CalibrationTask),
}

fn failed(failure: &engram_geodesic::Error) -> PyErr {
    Python::attach(|py| invalid(py, &failure.to_string()))
}

fn spectra(
    ppb: &PyReadonlyArray1<'_, f64>,
    nm: &PyReadonlyArray1<'_, f64>,
    absorbance: &PyReadonlyArray2<'_, f64>,
) -> PyResult<Spectra> {
    let absorbance = absorbance.as_slice()?.to_vec();
    Spectra::new(convert::column(ppb)?, convert::column(nm)?, absorbance).map_err(|failure| failed(&failure))
}

#[pymethods]
impl GeodesicTrainer {
    /// `settings` as JSON, with the names of a manifest; `fold` is the concentration to hold out, `other` a second one, above it.
    #[new]
    #[pyo3(signature = (ppb, nm, absorbance, *, settings="{}", fold=None, other=None, start=0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a private class")]
    fn new(
        py: Python<'_>,
        ppb: PyReadonlyArray1<'_, f64>,
        nm: PyReadonlyArray1<'_, f64>,
        absorbance: PyReadonlyArray2<'_, f64>,
        settings: &str,
        fold: Option<usize>,
        other: Option<usize>,
        start: u64,
    ) -> PyResult<Self> {
        let settings: Settings =
            serde_json::from_str(settings).map_err(|failure| invalid(py, &format!("settings: {failure}")))?;
        let spectra = spectra(&ppb, &nm, &absorbance)?;
        let task = fold.map(|fold| match other {
            None => HeldOut::One(Task { fold, start }),
            Some(second) => HeldOut::Two(CalibrationTask { first: fold, second }),
        });
        let trainer = match task {
            Some(HeldOut::One(task)) => task.trainer(&spectra, settings),
            Some(HeldOut::Two(task)) => task.trainer(&spectra, settings),
            None => Axes::new(spectra.ppb(), spectra.nm())
                .and_then(|axes| Trainer::new(spectra.clone(), axes, settings, start)),
        };
        let trainer = Mutex::new(trainer.map_err(|failure| failed(&failure))?);
        Ok(Self { spectra, settings, task, trainer })
    }

    /// Makes up to `steps` steps; returns whether training has ended.
    fn advance(&self, py: Python<'_>, steps: usize) -> PyResult<bool> {
        let mut left = steps;
        loop {
            let now = left.min(STEPS_PER_CHECK);
            let finished = py.detach(|| {
                let mut trainer = self.locked();
                for _ in 0..now {
                    trainer.advance()?;
                }
                Ok(trainer.finished())
            });
            let finished = finished.map_err(|failure: engram_geodesic::Error| failed(&failure))?;
            left -= now;
            if finished || left == 0 {
                return Ok(finished);
            }
            py.check_signals()?;
        }
    }

    /// Returns number of steps, reconstruction loss of the last one, and least validation loss.
    fn progress(&self) -> (u64, f64, f64) {
        let trainer = self.locked();
        (trainer.steps(), trainer.last_loss().reconstruction, trainer.validation_loss())
    }

    /// Predicts the spectrum at a concentration; of a training spectrum, from the others.
    fn predict<'py>(&self, py: Python<'py>, ppb: f64) -> PyResult<Bound<'py, PyArray1<f64>>> {
        let result = py.detach(|| {
            let seen = match self.task {
                None => self.spectra.ppb().iter().position(|known| known.total_cmp(&ppb).is_eq()),
                Some(_) => None,
            };
            let trainer = self.locked();
            seen.map_or_else(|| trainer.predict(ppb), |row| trainer.predict_seen(row))
        });
        Ok(result.map_err(|failure| failed(&failure))?.into_pyarray(py))
    }

    /// Returns the state of the training.
    fn save<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.locked().save())
    }

    /// Replaces the state by a saved one of the same data, settings and start.
    fn resume(&self, state: &[u8]) -> PyResult<()> {
        let mut trainer = self.locked();
        let resumed = trainer.clone().resume(state).map_err(|failure| failed(&failure))?;
        *trainer = resumed;
        Ok(())
    }

    /// Returns the result of a finished training with held-out concentrations, as JSON.
    fn result(&self, py: Python<'_>) -> PyResult<String> {
        let trainer = self.locked();
        let json = match self.task {
            Some(HeldOut::One(task)) => {
                let result = task.result(&self.spectra, self.settings, &trainer).map_err(|failure| failed(&failure))?;
                serde_json::to_string(&result)
            }
            Some(HeldOut::Two(task)) => {
                let result = task.result(&self.spectra, self.settings, &trainer).map_err(|failure| failed(&failure))?;
                serde_json::to_string(&result)
            }
            None => return Err(invalid(py, "fold is absent; required: the held-out concentration")),
        };
        json.map_err(|failure| invalid(py, &failure.to_string()))
    }

    /// Returns the comparison of the held-out spectrum with predictions at all concentrations, as JSON.
    fn profile(&self, py: Python<'_>) -> PyResult<String> {
        let Some(HeldOut::One(task)) = self.task else {
            return Err(invalid(py, "fold is absent; required: the held-out concentration"));
        };
        let profile = py.detach(|| ErrorProfile::new(&self.locked(), self.spectra.row(task.fold)));
        let profile = profile.map_err(|failure| failed(&failure))?;
        serde_json::to_string(&profile).map_err(|failure| invalid(py, &failure.to_string()))
    }

    /// Returns the learned metric and its geodesics at a few wavelengths, as JSON.
    fn metric(&self, py: Python<'_>) -> PyResult<String> {
        let figure = py.detach(|| self.locked().metric_figure()).map_err(|failure| failed(&failure))?;
        serde_json::to_string(&figure).map_err(|failure| invalid(py, &failure.to_string()))
    }

    /// Returns the leave-one-out report as JSON, and its table and verdict as text. `results` has one result per model of a fold,
    /// `profiles` its profile, `calibrations` the results of models without two concentrations.
    #[pyo3(signature = (results, profiles, calibrations))]
    fn report(
        &self,
        py: Python<'_>,
        results: Vec<String>,
        profiles: Vec<String>,
        calibrations: Vec<String>,
    ) -> PyResult<(String, String)> {
        let results: Vec<TaskResult> = parsed(py, &results)?;
        let profiles: Vec<ErrorProfile> = parsed(py, &profiles)?;
        let calibrations: Vec<CalibrationResult> = parsed(py, &calibrations)?;
        let of_fold = |fold: usize| {
            let all = results.iter().zip(&profiles);
            all.filter(|(result, _)| result.task.fold == fold).map(|(_, profile)| profile.clone()).collect()
        };
        let by_fold: Vec<Vec<ErrorProfile>> = (0..self.spectra.ppb().len()).map(of_fold).collect();
        let report = Report::new(&self.spectra, &self.settings, &results, None).and_then(|mut report| {
            report.calibrate(&self.spectra, &calibrations)?;
            report.invert_folds(&by_fold)?;
            Ok(report)
        });
        let report = report.map_err(|failure| failed(&failure))?;
        Ok((report.to_json(), report.table()))
    }
}

fn parsed<T: serde::de::DeserializeOwned>(py: Python<'_>, texts: &[String]) -> PyResult<Vec<T>> {
    let all = texts.iter().map(|text| serde_json::from_str(text)).collect::<Result<_, _>>();
    all.map_err(|failure| invalid(py, &failure.to_string()))
}

/// Estimates the concentration of a spectrum by models of the same training spectra: estimate, interval, RMSE of the closest
/// prediction, and whether the estimate lies at the end of the range that is searched.
#[pyfunction]
pub(crate) fn geodesic_invert(
    py: Python<'_>,
    trainers: Vec<Py<GeodesicTrainer>>,
    spectrum: PyReadonlyArray1<'_, f64>,
    confidence: f64,
) -> PyResult<(f64, f64, f64, f64, bool)> {
    let spectrum = convert::column(&spectrum)?;
    let found = py.detach(|| {
        let profile = |trainer: &Py<GeodesicTrainer>| ErrorProfile::new(&trainer.get().locked(), &spectrum);
        invert(&trainers.iter().map(profile).collect::<Result<Vec<_>, _>>()?, confidence)
    });
    let found = found.map_err(|failure| failed(&failure))?;
    Ok((found.ppb, found.low, found.high, found.rmse, found.at_limit))
}

/// Returns the pairs of concentrations, by position, without which models calibrate the bands of a leave-one-out.
#[pyfunction]
pub(crate) fn geodesic_calibration_pairs(folds: usize) -> Vec<(usize, usize)> {
    engram_geodesic::calibration_tasks(folds).into_iter().map(|task| (task.first, task.second)).collect()
}

impl GeodesicTrainer {
    fn locked(&self) -> std::sync::MutexGuard<'_, Trainer> {
        // A panic while it was held leaves a state between two steps, which is as valid as any other.
        self.trainer.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Returns synthetic spectra: concentrations in ppb, wavelengths in nm, absorbances.
#[pyfunction]
pub(crate) fn geodesic_example(
    py: Python<'_>,
    step: usize,
) -> PyResult<(Vector<'_, f64>, Vector<'_, f64>, Table<'_, f64>)> {
    let nm: Vec<f64> = engram_geodesic::reference_nm().into_iter().step_by(step.max(1)).collect();
    let noise = engram_geodesic::Noise::default();
    let mixed = engram_geodesic::Generator::Mixed.spectra(&engram_geodesic::REFERENCE_PPB, &nm, &noise, 0);
    let spectra = mixed.map_err(|failure| failed(&failure))?;
    let rows: Vec<f64> = (0..spectra.ppb().len()).flat_map(|row| spectra.row(row).to_vec()).collect();
    let absorbance = rows.into_pyarray(py).reshape([spectra.ppb().len(), nm.len()])?;
    Ok((spectra.ppb().to_vec().into_pyarray(py), nm.into_pyarray(py), absorbance))
}
