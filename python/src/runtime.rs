//! The threads behind blocking calls, and the wait itself.

use crate::error;
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Interval of checks for signals while a call waits: Ctrl-C takes effect within this time.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
/// Threads of the runtime: they only move bytes of connections.
const THREADS: usize = 2;

/// Background threads of this process, shared by its connections.
#[pyclass(frozen, module = "engram._engram")]
pub(crate) struct Runtime(pub(crate) Arc<Threads>);

#[pymethods]
impl Runtime {
    #[new]
    fn new() -> PyResult<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("engram")
            .enable_all()
            .build()?;
        Ok(Self(Arc::new(Threads { process: std::process::id(), runtime: Some(runtime) })))
    }

    /// Process that the threads belong to.
    #[getter]
    fn process(&self) -> u32 {
        self.0.process
    }
}

/// How long a call may take beyond its deadline to return its own error.
const GRACE: Duration = Duration::from_millis(500);

/// A runtime that is left alone in a forked child.
pub(crate) struct Threads {
    process: u32,
    /// `None` only while it is dropped.
    runtime: Option<tokio::runtime::Runtime>,
}

impl Threads {
    /// Whether this process has the threads; a forked child does not.
    pub(crate) fn is_own(&self) -> bool {
        self.process == std::process::id()
    }

    /// Returns the runtime.
    ///
    /// # Errors
    /// This is a forked child.
    pub(crate) fn of_this_process(&self, py: Python<'_>) -> PyResult<&tokio::runtime::Runtime> {
        match &self.runtime {
            Some(runtime) if self.is_own() => Ok(runtime),
            _ => Err(error::raise(py, "Forked", "this connection belongs to the parent process", None)),
        }
    }

    /// Waits for a future, without the interpreter lock. A signal handler that raises, or the deadline, cancels it.
    ///
    /// # Errors
    /// The deadline passed, a signal handler raised, or this is a forked child.
    pub(crate) fn wait<T: Send>(
        &self,
        py: Python<'_>,
        limit: Option<f64>,
        future: impl Future<Output = Result<T, engram_client::Error>> + Send,
    ) -> PyResult<T> {
        let runtime = self.of_this_process(py)?;
        let pending = async move { within(limit, future).await };
        match py.detach(|| runtime.block_on(interruptible(cut_off(limit), pending))) {
            Ok(result) => result.map_err(|failure| error::of_client(py, &failure)),
            Err(Some(interrupt)) => Err(interrupt),
            Err(None) => Err(passed(py, limit)),
        }
    }
}

/// Returns the time `limit` seconds from now; beyond the range of a duration there is no deadline.
pub(crate) fn deadline(limit: Option<f64>) -> Option<Instant> {
    let limit = limit.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    limit.and_then(|limit| Instant::now().checked_add(limit))
}

/// Returns the time at which a call is cut off. Its own error, which says what failed last, comes first.
pub(crate) fn cut_off(limit: Option<f64>) -> Option<Instant> {
    deadline(limit).and_then(|deadline| deadline.checked_add(GRACE))
}

/// Runs the requests of a future with the limit as their deadline.
pub(crate) async fn within<F: Future>(limit: Option<f64>, future: F) -> F::Output {
    match deadline(limit) {
        Some(deadline) => engram_client::within(deadline, future).await,
        None => future.await,
    }
}

/// Creates the exception of a passed deadline.
pub(crate) fn passed(py: Python<'_>, limit: Option<f64>) -> PyErr {
    let text = format!("no result within timeout={} s", limit.unwrap_or_default());
    error::raise(py, "Timeout", &text, Some(engram_api::Code::DeadlineExceeded))
}

/// Completes with the future's result; fails with the exception of a signal handler, or with `None` at the deadline.
async fn interruptible<T>(deadline: Option<Instant>, future: impl Future<Output = T>) -> Result<T, Option<PyErr>> {
    let mut future = std::pin::pin!(future);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let slice = left.map_or(SIGNAL_INTERVAL, |left| left.min(SIGNAL_INTERVAL));
        match timeout(slice, &mut future).await {
            Ok(result) => return Ok(result),
            Err(_) if left.is_some_and(|left| left <= SIGNAL_INTERVAL) => return Err(None),
            // Without an interpreter, which is then ending, there are no handlers.
            Err(_) => Python::try_attach(|py| py.check_signals()).transpose().map_err(Some)?,
        };
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        match self.runtime.take() {
            Some(runtime) if self.is_own() => runtime.shutdown_background(),
            // Joining threads that do not exist would never return.
            runtime => std::mem::forget(runtime),
        }
    }
}
