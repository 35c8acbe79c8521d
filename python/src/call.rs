//! `Call`: a request that is made but not sent. Python waits for it, or has it complete a future of an event loop.

use crate::error;
use crate::runtime::{Threads, cut_off, passed, within};
use engram_client::Error;
use pyo3::prelude::*;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::task::AbortHandle;
use tokio::time::timeout_at;

/// Converts a result to Python.
type Answer = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;
type Pending = Pin<Box<dyn Future<Output = Result<Answer, Error>> + Send>>;

/// A request. It is sent by `wait` or `start`, once.
#[pyclass(frozen, module = "engram._engram")]
pub(crate) struct Call {
    threads: Arc<Threads>,
    limit: Option<f64>,
    state: Mutex<State>,
}

enum State {
    Prepared(Pending),
    Running(AbortHandle),
    Taken,
}

impl Call {
    /// Creates a request whose result `convert` converts. `limit` is its deadline in seconds from when it is sent.
    pub(crate) fn new<T: Send + 'static>(
        threads: &Arc<Threads>,
        limit: Option<f64>,
        future: impl Future<Output = Result<T, Error>> + Send + 'static,
        convert: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> Self {
        let pending = async move {
            let value = future.await?;
            Ok(Box::new(move |py: Python<'_>| convert(py, value)) as Answer)
        };
        Self { threads: Arc::clone(threads), limit, state: Mutex::new(State::Prepared(Box::pin(pending))) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, py: Python<'_>) -> PyResult<Pending> {
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Taken) {
            State::Prepared(pending) => Ok(pending),
            sent => {
                *state = sent;
                Err(error::raise(py, "Conflict", "the request was already sent", None))
            }
        }
    }
}

#[pymethods]
impl Call {
    /// Sends the request, and waits for the result without the interpreter lock. `traceparent` is the W3C context of its parent span.
    #[pyo3(signature = (traceparent = None))]
    fn wait(&self, py: Python<'_>, traceparent: Option<&str>) -> PyResult<Py<PyAny>> {
        let pending = traced(self.take(py)?, traceparent);
        self.threads.wait(py, self.limit, pending)?(py)
    }

    /// Sends the request. `done(result, exception)` is called in a thread of the runtime; not after `cancel`. `traceparent` is as of `wait`.
    #[pyo3(signature = (done, traceparent = None))]
    fn start(&self, py: Python<'_>, done: Py<PyAny>, traceparent: Option<&str>) -> PyResult<()> {
        let runtime = self.threads.of_this_process(py)?;
        let (pending, limit) = (traced(self.take(py)?, traceparent), self.limit);
        let task = runtime.spawn(async move {
            let pending = within(limit, pending);
            let result = match cut_off(limit) {
                Some(end) => timeout_at(end, pending).await.ok(),
                None => Some(pending.await),
            };
            // The other thread goes on with the connections while this one waits for the interpreter lock.
            tokio::task::block_in_place(|| complete(result, limit, &done));
        });
        *self.state() = State::Running(task.abort_handle());
        Ok(())
    }

    /// Cancels the request. A write that was sent may have been applied.
    fn cancel(&self) {
        if let State::Running(task) = &*self.state() {
            task.abort();
        }
    }
}

/// Makes a request part of a trace. A context that is not one of W3C starts none: it comes from another package.
fn traced(pending: Pending, traceparent: Option<&str>) -> Pending {
    match traceparent.and_then(|text| text.parse().ok()) {
        Some(context) => Box::pin(engram_trace::within(context, pending)),
        None => pending,
    }
}

/// Calls `done` with the result, or with the exception. `None` is a passed deadline.
fn complete(result: Option<Result<Answer, Error>>, limit: Option<f64>, done: &Py<PyAny>) {
    // Without an interpreter, which is then ending, there is no event loop either.
    Python::try_attach(|py| {
        let result = match result {
            Some(Ok(answer)) => answer(py),
            Some(Err(failure)) => Err(error::of_client(py, &failure)),
            None => Err(passed(py, limit)),
        };
        let called = match result {
            Ok(value) => done.call1(py, (value, py.None())),
            Err(failure) => done.call1(py, (py.None(), failure)),
        };
        if let Err(failure) = called {
            failure.write_unraisable(py, Some(done.bind(py)));
        }
    });
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.threads.is_own() {
            // As of a client: what the request holds belongs to the parent's runtime.
            std::mem::forget(std::mem::replace(&mut *self.state(), State::Taken));
        }
    }
}
