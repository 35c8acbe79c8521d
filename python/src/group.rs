//! `Group`: this process in an elastic group. Buckets are memory of PyTorch tensors; a finished step completes futures of PyTorch, or wakes the
//! thread that waits for it.

use crate::client::Client;
use crate::error;
use crate::runtime::Threads;
use engram_api::Code;
use engram_client::group::{
    Bucket, Completion, Group as ClientGroup, GroupError, GroupOptions, Outcome, Provide, Readiness, StateCopy,
    StateServer,
};
use engram_collective::group::{Position, Timing};
use parking_lot::{Condvar, Mutex};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Interval of checks for signals while a step is waited for.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Result of a step: how it ended, step, generation, members, samples.
type Finished = Result<(&'static str, u64, u64, usize, u64), GroupError>;

/// Futures of PyTorch, and what they are completed with.
type Futures = Vec<(Py<PyAny>, Py<PyAny>)>;

/// Where the engine puts the result of a step.
#[derive(Default)]
struct Slot {
    result: Mutex<Option<Finished>>,
    changed: Condvar,
}

/// Memory of two tensors: sums, and the reduced gradient.
struct TensorBucket {
    key: u32,
    sums: *const f32,
    reduced: *mut f32,
    elements: usize,
    /// Keeps the tensors.
    _tensors: Py<PyAny>,
}

// SAFETY: the memory belongs to tensors that `_tensors` keeps. Until the step is handed back only the engine writes to the reduced gradient, and
// nothing writes to the sums.
#[allow(unsafe_code, reason = "the memory of tensors has no type that can be sent")]
unsafe impl Send for TensorBucket {}

impl Bucket for TensorBucket {
    fn key(&self) -> u32 {
        self.key
    }

    #[allow(unsafe_code, reason = "the memory of tensors has no other view")]
    fn parts(&mut self) -> (&[f32], &mut [f32]) {
        // SAFETY: `Group::submit` checked that both are aligned and do not overlap; for the rest see `Send` above.
        unsafe {
            (
                std::slice::from_raw_parts(self.sums, self.elements),
                std::slice::from_raw_parts_mut(self.reduced, self.elements),
            )
        }
    }
}

/// Completes a step exactly once, also if the engine ends before.
struct Completed {
    slot: Arc<Slot>,
    futures: Futures,
}

impl Completed {
    fn finish(&mut self, result: Finished) {
        let failure = result.as_ref().err().map(ToString::to_string);
        *self.slot.result.lock() = Some(result);
        self.slot.changed.notify_all();
        if self.futures.is_empty() {
            return;
        }
        let futures = std::mem::take(&mut self.futures);
        // Without an interpreter, which is then ending, nothing waits for them.
        let attached = Python::try_attach(|py| {
            for (future, value) in &futures {
                let done = match &failure {
                    None => future.call_method1(py, "set_result", (value,)),
                    Some(text) => future.call_method1(py, "set_exception", (PyRuntimeError::new_err(text.clone()),)),
                };
                if let Err(error) = done {
                    error.print(py);
                }
            }
        });
        if attached.is_none() {
            std::mem::forget(futures);
        }
    }
}

impl Drop for Completed {
    fn drop(&mut self) {
        if self.slot.result.lock().is_none() {
            self.finish(Err(GroupError::Left));
        }
    }
}

/// This process in a group.
#[pyclass(frozen, module = "engram._engram")]
pub(crate) struct Group {
    threads: Arc<Threads>,
    group: Arc<ClientGroup>,
    /// `None` after the end.
    server: Mutex<Option<StateServer>>,
    slot: Mutex<Option<Arc<Slot>>>,
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.threads.is_own() {
            // The threads do not exist in a forked child, which would wait for them.
            std::mem::forget((Arc::clone(&self.group), self.server.get_mut().take()));
        }
    }
}

fn raise_group(py: Python<'_>, failure: &GroupError) -> PyErr {
    let (class, code) = match failure {
        GroupError::Stalled { .. } | GroupError::Paused { .. } => ("Timeout", Some(Code::DeadlineExceeded)),
        GroupError::Rejected(_) => ("Conflict", Some(Code::InvalidValue)),
        GroupError::Left | GroupError::Listen(_) => ("Unavailable", None),
    };
    error::raise(py, class, &failure.to_string(), code)
}

fn milliseconds(field: &str, seconds: f64) -> PyResult<u64> {
    let duration = Duration::try_from_secs_f64(seconds).ok().filter(|it| !it.is_zero());
    let allowed = || PyValueError::new_err(format!("{field} is {seconds}; allowed: seconds, above 0"));
    duration.map(|it| it.as_millis() as u64).ok_or_else(allowed)
}

impl Group {
    fn check_own(&self, py: Python<'_>) -> PyResult<()> {
        if self.threads.is_own() {
            return Ok(());
        }
        Err(error::raise(py, "Forked", "this group belongs to the parent process; join it again after the fork", None))
    }
}

#[pymethods]
impl Group {
    #[new]
    #[pyo3(signature = (client, name, provide, *, layout, digest, step=0, timeout=0.5, wait_limit=60.0, min_members=1, address=None))]
    fn new(
        py: Python<'_>,
        client: &Client,
        name: String,
        provide: Py<PyAny>,
        layout: u64,
        digest: u64,
        step: u64,
        timeout: f64,
        wait_limit: f64,
        min_members: u32,
        address: Option<&str>,
    ) -> PyResult<Self> {
        let parse = |text: &str| {
            text.parse::<IpAddr>()
                .map_err(|_| PyValueError::new_err(format!("bind is {text:?}; allowed: an IP address of this machine")))
        };
        let options = GroupOptions {
            name,
            address: address.map(parse).transpose()?,
            timing: Timing::new(milliseconds("timeout", timeout)?),
            min_members,
            layout,
            wait_limit: Duration::from_millis(milliseconds("join_timeout", wait_limit)?),
            position: Position { step, digest },
        };
        let threads = Arc::clone(client.threads());
        let runtime = threads.of_this_process(py)?.handle().clone();
        let (connection, known) = (client.client().clone(), Arc::<OnceLock<Arc<ClientGroup>>>::default());
        let provider = provider(provide, Arc::clone(&known));
        let joined = py.detach(|| ClientGroup::join(&connection, &runtime, &options, provider));
        let (group, server) = joined.map_err(|failure| raise_group(py, &failure))?;
        let group = Arc::new(group);
        // It is set here only.
        let _ = known.set(Arc::clone(&group));
        Ok(Self { threads, group, server: Mutex::new(Some(server)), slot: Mutex::default() })
    }

    /// Submits a bucket: `elements` floats at the addresses `sums` and `reduced`, in the memory of `tensors`.
    fn submit(
        &self,
        py: Python<'_>,
        key: u32,
        sums: usize,
        reduced: usize,
        elements: usize,
        tensors: Py<PyAny>,
    ) -> PyResult<()> {
        self.check_own(py)?;
        let bytes = elements * size_of::<f32>();
        let is_aligned = sums.is_multiple_of(align_of::<f32>()) && reduced.is_multiple_of(align_of::<f32>());
        if !is_aligned || sums == 0 || reduced == 0 || (sums < reduced + bytes && reduced < sums + bytes) {
            return Err(PyValueError::new_err("sums and reduced must be aligned, and must not overlap"));
        }
        let (sums, reduced) = (sums as *const f32, reduced as *mut f32);
        let bucket = TensorBucket { key, sums, reduced, elements, _tensors: tensors };
        self.group.submit(Box::new(bucket)).map_err(|failure| raise_group(py, &failure))
    }

    /// Ends a step. Each of the futures is completed with its value.
    fn finish(&self, py: Python<'_>, samples: u64, state_digest: u64, futures: Futures) -> PyResult<()> {
        self.check_own(py)?;
        let slot = Arc::<Slot>::default();
        *self.slot.lock() = Some(Arc::clone(&slot));
        let mut completed = Completed { slot, futures };
        let completion: Completion = Box::new(move |result, mut buckets| {
            let finished = result.map(|outcome| match outcome {
                Outcome::Applied(it) => ("applied", it.step, it.generation, it.members.len(), it.samples),
                Outcome::Skipped(it) => ("skipped", it.step, it.generation, it.members.len(), it.samples),
                Outcome::Superseded => {
                    // What futures get must be numbers; it is not used.
                    buckets.iter_mut().for_each(|bucket| bucket.parts().1.fill(0.0));
                    ("superseded", 0, 0, 0, 0)
                }
            });
            completed.finish(finished);
            drop(buckets);
        });
        self.group.finish(samples, state_digest, completion).map_err(|failure| raise_group(py, &failure))
    }

    /// Waits for the end of the step: how it ended ("applied", "skipped" or "superseded"), its number, generation, members and samples.
    fn wait_step(&self, py: Python<'_>) -> PyResult<(&'static str, u64, u64, usize, u64)> {
        self.check_own(py)?;
        let missing = || PyRuntimeError::new_err("no step was finished");
        let slot = self.slot.lock().clone().ok_or_else(missing)?;
        loop {
            let result = py.detach(|| {
                let mut result = slot.result.lock();
                if result.is_none() {
                    slot.changed.wait_for(&mut result, SIGNAL_INTERVAL);
                }
                result.clone()
            });
            if let Some(result) = result {
                *self.slot.lock() = None;
                return result.map_err(|failure| raise_group(py, &failure));
            }
            py.check_signals()?;
        }
    }

    /// Waits at most `limit` seconds: ("ready",), ("install", step, digest, content) or ("pending", why).
    fn wait_ready(&self, py: Python<'_>, limit: f64) -> PyResult<(&'static str, u64, u64, Py<PyAny>)> {
        self.check_own(py)?;
        let limit = Duration::try_from_secs_f64(limit).unwrap_or_default();
        match py.detach(|| self.group.wait_ready(limit)).map_err(|failure| raise_group(py, &failure))? {
            Readiness::Ready => Ok(("ready", 0, 0, py.None())),
            Readiness::Pending(why) => Ok(("pending", 0, 0, why.into_pyobject(py)?.into_any().unbind())),
            Readiness::Install(state) => {
                let content = PyBytes::new(py, &state.content).into_any().unbind();
                Ok(("install", state.position.step, state.position.digest, content))
            }
        }
    }

    /// The state of a position was installed.
    fn installed(&self, py: Python<'_>, step: u64, digest: u64) -> PyResult<()> {
        self.check_own(py)?;
        self.group.installed(Position { step, digest });
        Ok(())
    }

    /// Generation, rank, members, committed step, and whether the group is paused.
    fn view(&self) -> (u64, usize, usize, u64, bool) {
        let view = self.group.view();
        (view.generation, view.rank, view.size, view.step, view.is_paused)
    }

    /// Figures since the start.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let figures = self.group.statistics();
        let result = PyDict::new(py);
        let counts = [
            ("steps", figures.steps),
            ("skipped", figures.skipped),
            ("superseded", figures.superseded),
            ("repeated", figures.repeated),
            ("recoveries", figures.recoveries),
            ("sent_bytes", figures.sent_bytes),
        ];
        for (name, value) in counts {
            result.set_item(name, value)?;
        }
        let seconds = [
            ("reduce_seconds", figures.reduce_seconds),
            ("hidden_seconds", figures.hidden_seconds),
            ("exposed_seconds", figures.exposed_seconds),
            ("last_recovery_seconds", figures.last_recovery_seconds),
            ("max_recovery_seconds", figures.max_recovery_seconds),
            ("link_latency_seconds", figures.link_latency_seconds),
            ("link_bytes_per_second", figures.link_bytes_per_second),
        ];
        for (name, value) in seconds {
            result.set_item(name, value)?;
        }
        Ok(result)
    }

    /// Leaves the group, and waits at most `limit` seconds for it; 0 = ends without a word.
    fn leave(&self, py: Python<'_>, limit: f64) {
        if !self.threads.is_own() {
            return;
        }
        let limit = Duration::try_from_secs_f64(limit).unwrap_or_default();
        // Threads that complete futures need the lock of the interpreter.
        py.detach(|| {
            if limit.is_zero() {
                self.group.stop();
            } else {
                self.group.leave(limit);
            }
            drop(self.server.lock().take());
        });
    }
}

/// Copies the state by a function of Python, which returns the step and the content, or `None`.
fn provider(provide: Py<PyAny>, group: Arc<OnceLock<Arc<ClientGroup>>>) -> Provide {
    Arc::new(move || {
        let (step, content) = Python::try_attach(|py| {
            let result = provide.call0(py).and_then(|it| it.extract::<Option<(u64, Py<PyBytes>)>>(py));
            let copied = result.map(|found| found.map(|(step, content)| (step, content.as_bytes(py).to_vec())));
            copied.unwrap_or_else(|error| {
                error.print(py);
                None
            })
        })??;
        let position = group.get()?.position_after(step)?;
        Some(StateCopy { position, content: Arc::new(content) })
    })
}
