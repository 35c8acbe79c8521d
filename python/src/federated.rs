//! `Participant`: a client of a federated run for Python.

use crate::call::Call;
use crate::client::Client;
use crate::convert;
use crate::error;
use crate::runtime::Threads;
use engram_api::Code;
use engram_participant::{Assignment, ClientKeys, Error, ModelKey, Next, Training};
use engram_proto::v1::FederatedRefusalReason as Reason;
use numpy::{IntoPyArray as _, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A client of a federated run.
#[pyclass(frozen, module = "engram._engram")]
pub(crate) struct Participant {
    threads: Arc<Threads>,
    /// `None` only while it is dropped.
    participant: Option<Arc<engram_participant::Participant>>,
}

impl Drop for Participant {
    fn drop(&mut self) {
        if !self.threads.is_own() {
            // As of a client.
            std::mem::forget(self.participant.take());
        }
    }
}

/// A task with its model.
#[pyclass(frozen, module = "engram._engram")]
pub(crate) struct FederatedTask(Assignment);

#[pymethods]
impl FederatedTask {
    #[getter]
    fn number(&self) -> u64 {
        self.0.task.number
    }

    #[getter]
    fn round(&self) -> u64 {
        self.0.task.round
    }

    #[getter]
    fn version(&self) -> u64 {
        self.0.task.version
    }

    /// Seconds that were left when the task was received.
    #[getter]
    fn lease_seconds(&self) -> f64 {
        self.0.task.lease_ms as f64 / 1_000.0
    }

    #[getter]
    fn proximal_weight(&self) -> f64 {
        self.0.task.proximal_weight
    }

    #[getter]
    fn is_masked(&self) -> bool {
        !self.0.task.cohort.is_empty()
    }

    /// Name, shape, and whether it stays on the client, of each layer.
    fn layers(&self) -> Vec<(String, Vec<u64>, bool)> {
        let layer = |layer: &engram_proto::v1::FederatedLayer| (layer.name.clone(), layer.shape.clone(), layer.local);
        self.0.task.layers.iter().map(layer).collect()
    }

    fn settings(&self) -> std::collections::HashMap<String, f64> {
        self.0.task.settings.clone()
    }

    /// The shared parameters.
    fn model<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f32>> {
        self.0.model.to_vec().into_pyarray(py)
    }

    /// SCAFFOLD: what a local step adds to its gradient.
    fn correction<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<f32>>> {
        self.0.correction.clone().map(|correction| correction.into_pyarray(py))
    }
}

#[pymethods]
impl Participant {
    /// `keys` is a file that is created if it does not exist; without it the client is a new one.
    #[new]
    /// `model_key` is the key of the run's models in hexadecimal digits; without it that of the first task is kept next to `keys`.
    #[pyo3(signature = (client, run, name, *, keys=None, model_key=None))]
    fn new(
        py: Python<'_>,
        client: &Client,
        run: &str,
        name: &str,
        keys: Option<PathBuf>,
        model_key: Option<&str>,
    ) -> PyResult<Self> {
        let model_key = match (model_key, &keys) {
            (Some(digits), _) => ModelKey::given(digits),
            (None, Some(keys)) => ModelKey::kept_in(&keys.with_extension("model-key")),
            (None, None) => Ok(ModelKey::default()),
        };
        let model_key = model_key.map_err(|failure| of_participant(py, &failure))?;
        let keys = match keys {
            Some(path) => ClientKeys::open(&path).map_err(|failure| of_participant(py, &failure))?,
            None => ClientKeys::generate(),
        };
        let participant =
            engram_participant::Participant::new(client.client().clone(), run, name, keys).with_model_key(model_key);
        Ok(Self { threads: Arc::clone(client.threads()), participant: Some(Arc::new(participant)) })
    }

    /// Waits for a task: returns a task, a text if the run has ended, or nothing.
    #[pyo3(signature = (wait, *, timeout=None))]
    fn next(&self, wait: f64, timeout: Option<f64>) -> Call {
        let participant = Arc::clone(self.native());
        let wait = Duration::try_from_secs_f64(wait).unwrap_or_default();
        let next = async move { Ok(participant.next(wait).await) };
        Call::new(&self.threads, timeout, next, |py, next| {
            match next.map_err(|failure| of_participant(py, &failure))? {
                Next::Task(assignment) => Ok(Py::new(py, FederatedTask(*assignment))?.into_any()),
                Next::Ended(how) => convert::object(py, how),
                Next::Nothing => Ok(py.None()),
            }
        })
    }

    /// Sends an update; returns whether it was acknowledged before.
    #[pyo3(signature = (task, update, samples, *, loss=None, rate_sum=None, timeout=None))]
    fn submit(
        &self,
        task: &FederatedTask,
        update: PyReadonlyArray1<'_, f32>,
        samples: u64,
        loss: Option<f64>,
        rate_sum: Option<f64>,
        timeout: Option<f64>,
    ) -> PyResult<Call> {
        let (participant, task) = (Arc::clone(self.native()), task.0.task.clone());
        let update = update.as_slice()?.to_vec();
        let training = Training { samples, loss, rate_sum };
        let submit = async move { Ok(participant.submit_training(&task, &update, training).await) };
        Ok(Call::new(&self.threads, timeout, submit, |py, submitted| {
            convert::object(py, submitted.map_err(|failure| of_participant(py, &failure))?)
        }))
    }

    /// Gives a task up.
    #[pyo3(signature = (task, *, timeout=None))]
    fn give_up(&self, task: u64, timeout: Option<f64>) -> Call {
        let participant = Arc::clone(self.native());
        let give_up = async move { Ok(participant.give_up(task).await) };
        Call::new(&self.threads, timeout, give_up, |py, result| {
            result.map_err(|failure| of_participant(py, &failure))?;
            Ok(py.None())
        })
    }

    /// Returns the newest shared parameters.
    #[pyo3(signature = (*, timeout=None))]
    fn newest_model(&self, timeout: Option<f64>) -> Call {
        let participant = Arc::clone(self.native());
        let read = async move { Ok(participant.newest_model().await) };
        Call::new(&self.threads, timeout, read, |py, model| {
            let model = model.map_err(|failure| of_participant(py, &failure))?;
            convert::object(py, model.into_pyarray(py))
        })
    }
}

impl Participant {
    fn native(&self) -> &Arc<engram_participant::Participant> {
        self.participant.as_ref().expect("is only absent while it is dropped")
    }
}

/// Converts an error of the participant.
fn of_participant(py: Python<'_>, failure: &Error) -> PyErr {
    match failure {
        Error::Client(failure) => error::of_client(py, failure),
        Error::Refused { reason: Reason::NotEnrolled | Reason::WrongSecret, message } => {
            error::raise(py, "Denied", message, Some(Code::Denied))
        }
        Error::Refused { reason: Reason::Invalid, message } => {
            error::raise(py, "InvalidValue", message, Some(Code::InvalidValue))
        }
        Error::Invalid(invalid) => error::raise(py, "InvalidValue", &invalid.to_string(), Some(Code::InvalidValue)),
        Error::Signature(_) | Error::Digest => error::raise(py, "Denied", &failure.to_string(), None),
        failure if failure.is_stale() => error::raise(py, "Conflict", &failure.to_string(), None),
        failure => error::raise(py, "Unavailable", &failure.to_string(), None),
    }
}

/// Submits a run by its specification as JSON, or finds it; returns whether it is new.
#[pyfunction]
#[pyo3(signature = (client, name, spec, *, timeout=None))]
pub(crate) fn submit_run(client: &Client, name: String, spec: String, timeout: Option<f64>) -> Call {
    let threads = Arc::clone(client.threads());
    let client = client.client().clone();
    let submit = async move { client.submit_run(&name, &spec, None, None).await };
    Call::new(&threads, timeout, submit, |py, answer| convert::object(py, answer.created))
}

/// Returns phase, message, version, number of updates, and figures of a run; nothing if there is no such run.
#[pyfunction]
#[pyo3(signature = (client, name, *, timeout=None))]
pub(crate) fn run_status(client: &Client, name: String, timeout: Option<f64>) -> Call {
    let threads = Arc::clone(client.threads());
    let client = client.client().clone();
    let read = async move { client.list_runs().await };
    Call::new(&threads, timeout, read, move |py, runs| {
        let found = runs.into_iter().find(|run| run.name == name);
        let parts = found.map(|run| {
            let phase = run.phase().as_str_name().trim_start_matches("RUN_PHASE_").to_lowercase();
            (phase, run.message, run.epoch, run.updates, run.metrics)
        });
        convert::object(py, parts)
    })
}
