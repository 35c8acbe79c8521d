//! `Buffer`: a replay buffer for Python. Columns cross the border as bytes, copied once.

use crate::call::Call;
use crate::client::Client;
use crate::convert;
use crate::runtime::Threads;
use engram_client::{
    Batch, Buffer as Native, BufferDescription, BufferSpec, BufferStats, Changed, Column, Fields, Items, Sample,
    SampleBy,
};
use engram_memory::MemoryId;
use engram_memory::buffer::Remover;
use engram_replay::limiter;
use engram_replay::schema::{DType, Field};
use numpy::{IntoPyArray as _, PyArray1, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use std::sync::Arc;
use std::time::Duration;

/// A replay buffer of a cluster.
#[pyclass(frozen, module = "engram._engram")]
pub(crate) struct Buffer {
    threads: Arc<Threads>,
    /// `None` only while it is dropped.
    buffer: Option<Native>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !self.threads.is_own() {
            // As of a client.
            std::mem::forget(self.buffer.take());
        }
    }
}

/// Name, dtype, fixed dimensions, whether it is jagged.
type FieldParts = (String, String, Vec<u32>, bool);
/// Name, dtype, fixed dimensions, rows per item of a jagged field, elements.
type ColumnParts<'py> = (String, String, Vec<u32>, Option<Vec<u32>>, PyReadonlyArray1<'py, u8>);
/// Ratio, minimum size, bounds of the difference.
type LimiterParts = (f64, u64, f64, f64);

/// Creates a buffer, or opens an existing one with the same settings.
#[pyfunction]
#[pyo3(signature = (client, name, fields, *, capacity, remover="fifo", max_reuse=0, max_age=None, max_priority=None,
    initial_priority=None, limiter=None, timeout=None))]
pub(crate) fn create_buffer(
    client: &Client,
    name: String,
    fields: Vec<FieldParts>,
    capacity: u64,
    remover: &str,
    max_reuse: u32,
    max_age: Option<u64>,
    max_priority: Option<f64>,
    initial_priority: Option<f64>,
    limiter: Option<LimiterParts>,
    timeout: Option<f64>,
) -> PyResult<Call> {
    let field = |(name, dtype, shape, jagged): FieldParts| Ok(Field { name, dtype: dtype_of(&dtype)?, shape, jagged });
    let fields = fields.into_iter().map(field).collect::<PyResult<_>>()?;
    let mut spec =
        BufferSpec { remover: remover_of(remover)?, max_reuse, max_age, ..BufferSpec::new(name, fields, capacity) };
    spec.max_priority = max_priority.unwrap_or(spec.max_priority);
    spec.initial_priority = initial_priority.unwrap_or(spec.initial_priority);
    spec.limiter = limiter.map(|(samples_per_insert, min_size, min_diff, max_diff)| limiter::Settings {
        samples_per_insert,
        min_size,
        min_diff,
        max_diff,
    });
    let native = client.client().clone();
    Ok(opened(client, timeout, async move { native.create_buffer(&spec).await }))
}

/// Opens an existing buffer.
#[pyfunction]
#[pyo3(signature = (client, name, *, timeout=None))]
pub(crate) fn open_buffer(client: &Client, name: String, timeout: Option<f64>) -> Call {
    let native = client.client().clone();
    opened(client, timeout, async move { native.buffer(&name).await })
}

/// Creates a request whose result is a buffer.
fn opened(
    client: &Client,
    timeout: Option<f64>,
    future: impl Future<Output = Result<Native, engram_client::Error>> + Send + 'static,
) -> Call {
    let threads = Arc::clone(client.threads());
    Call::new(client.threads(), timeout, future, move |py, buffer| {
        Ok(Py::new(py, Buffer { threads, buffer: Some(buffer) })?.into_any())
    })
}

/// Returns name, capacity and items of every buffer.
#[pyfunction]
#[pyo3(signature = (client, *, timeout=None))]
pub(crate) fn list_buffers(client: &Client, timeout: Option<f64>) -> Call {
    let native = client.client().clone();
    Call::new(client.threads(), timeout, async move { native.list_buffers().await }, |py, buffers| {
        let parts = |buffer: BufferDescription| (buffer.spec.name, buffer.spec.capacity, buffer.stats.items);
        convert::object(py, buffers.into_iter().map(parts).collect::<Vec<_>>())
    })
}

/// Removes a buffer with its items; returns their number.
#[pyfunction]
#[pyo3(signature = (client, name, *, timeout=None))]
pub(crate) fn drop_buffer(client: &Client, name: String, timeout: Option<f64>) -> Call {
    let native = client.client().clone();
    Call::new(client.threads(), timeout, async move { native.drop_buffer(&name).await }, |py, removed| {
        Ok(removed.into_pyobject(py)?.into_any().unbind())
    })
}

impl Buffer {
    fn native(&self) -> &Native {
        self.buffer.as_ref().expect("is only absent while it is dropped")
    }

    /// Creates a request whose result is a batch.
    fn read<F>(&self, timeout: Option<f64>, send: impl FnOnce(Native) -> F) -> Call
    where
        F: Future<Output = Result<Batch, engram_client::Error>> + Send + 'static,
    {
        Call::new(&self.threads, timeout, send(self.native().clone()), |py, read| {
            Ok(batch(py, read)?.into_any().unbind())
        })
    }

    /// Creates a request whose result is counts of changed items and stale handles.
    fn change<F>(&self, timeout: Option<f64>, send: impl FnOnce(Native) -> F) -> Call
    where
        F: Future<Output = Result<Changed, engram_client::Error>> + Send + 'static,
    {
        Call::new(&self.threads, timeout, send(self.native().clone()), |py, changed| {
            convert::object(py, (changed.applied, changed.stale))
        })
    }
}

#[pymethods]
impl Buffer {
    /// Whether this process made it: a forked child has to open it again.
    #[getter]
    fn is_own(&self) -> bool {
        self.threads.is_own()
    }

    /// Returns the fields: name, dtype, fixed dimensions, whether it is jagged.
    fn fields(&self) -> Vec<FieldParts> {
        let parts =
            |field: &Field| (field.name.clone(), field.dtype.name().to_owned(), field.shape.clone(), field.jagged);
        self.native().schema().fields().iter().map(parts).collect()
    }

    /// Returns the most items that it holds.
    fn capacity(&self) -> u64 {
        self.native().spec().capacity
    }

    /// Whether it refuses items when it is full.
    fn refuses(&self) -> bool {
        self.native().spec().remover == Remover::Refuse
    }

    /// Returns the priority of items appended without one.
    fn initial_priority(&self) -> f64 {
        self.native().spec().initial_priority
    }

    /// Appends items; returns their handles, and how many items were removed to make room.
    #[pyo3(signature = (count, columns, *, priorities=None, versions=None, trajectories=None, tags=None, wait=0.0, timeout=None))]
    fn append(
        &self,
        count: usize,
        columns: Vec<ColumnParts<'_>>,
        priorities: Option<PyReadonlyArray1<'_, f64>>,
        versions: Option<PyReadonlyArray1<'_, u64>>,
        trajectories: Option<PyReadonlyArray1<'_, u64>>,
        tags: Option<Vec<Vec<u8>>>,
        wait: f64,
        timeout: Option<f64>,
    ) -> PyResult<Call> {
        let items = Items {
            count,
            columns: columns.into_iter().map(column).collect::<PyResult<_>>()?,
            priorities: convert::optional(priorities.as_ref())?,
            versions: convert::optional(versions.as_ref())?,
            trajectories: convert::optional(trajectories.as_ref())?,
            tags: tags.unwrap_or_default().into_iter().map(Into::into).collect(),
            wait: duration(wait)?,
        };
        let native = self.native().clone();
        Ok(Call::new(&self.threads, timeout, async move { native.append(items).await }, |py, appended| {
            convert::object(py, (handles(py, appended.handles), appended.removed))
        }))
    }

    /// Draws a batch.
    #[pyo3(signature = (by, count, *, alpha=0.0, beta=0.0, length=1, seed=0, step=0, fields=None, version=0, rank=0, world=1,
        local=false, wait=0.0, timeout=None))]
    fn sample(
        &self,
        by: &str,
        count: u32,
        alpha: f64,
        beta: f64,
        length: u32,
        seed: u64,
        step: u64,
        fields: Option<Vec<String>>,
        version: u64,
        rank: u32,
        world: u32,
        local: bool,
        wait: f64,
        timeout: Option<f64>,
    ) -> PyResult<Call> {
        let by = match by {
            "default" => SampleBy::Default,
            "prioritized" => SampleBy::Prioritized { alpha, beta },
            "uniform" => SampleBy::Uniform,
            "fifo" => SampleBy::Fifo,
            "lifo" => SampleBy::Lifo,
            "slices" => SampleBy::Slices { length },
            "groups" => SampleBy::Groups { size: length },
            _ => return Err(PyValueError::new_err(format!("sampler is {by:?}"))),
        };
        let (wait, fields) = (duration(wait)?, selection(fields));
        let sample = Sample { version, rank, world, local, wait, fields, ..Sample::new(by, count, seed, step) };
        Ok(self.read(timeout, |buffer| async move { buffer.sample(sample).await }))
    }

    /// Returns items by handle.
    #[pyo3(signature = (ids, *, fields=None, timeout=None))]
    fn get(&self, ids: PyReadonlyArray1<'_, u64>, fields: Option<Vec<String>>, timeout: Option<f64>) -> PyResult<Call> {
        let ids = convert::ids(&ids)?;
        Ok(self.read(timeout, |buffer| async move { buffer.get(&ids, selection(fields)).await }))
    }

    /// Returns items without fields, oldest first.
    #[pyo3(signature = (*, tag=None, limit=0, timeout=None))]
    fn list(&self, tag: Option<Vec<u8>>, limit: u32, timeout: Option<f64>) -> Call {
        self.read(timeout, move |buffer| async move { buffer.list(tag.as_deref(), limit).await })
    }

    /// Sets priorities; returns how many were set, and how many handles are stale.
    #[pyo3(signature = (ids, priorities, *, timeout=None))]
    fn update_priorities(
        &self,
        ids: PyReadonlyArray1<'_, u64>,
        priorities: PyReadonlyArray1<'_, f64>,
        timeout: Option<f64>,
    ) -> PyResult<Call> {
        let (ids, priorities) = (convert::ids(&ids)?, convert::column(&priorities)?);
        Ok(self.change(timeout, |buffer| async move { buffer.update_priorities(&ids, &priorities).await }))
    }

    /// Deletes items; returns how many, and how many handles are stale.
    #[pyo3(signature = (ids, *, timeout=None))]
    fn delete(&self, ids: PyReadonlyArray1<'_, u64>, timeout: Option<f64>) -> PyResult<Call> {
        let ids = convert::ids(&ids)?;
        Ok(self.change(timeout, |buffer| async move { buffer.delete(&ids).await }))
    }

    /// Leases the oldest items that a consumer has not had.
    #[pyo3(signature = (consumer, count, *, lease=60.0, fields=None, wait=0.0, timeout=None))]
    fn consume(
        &self,
        consumer: String,
        count: u32,
        lease: f64,
        fields: Option<Vec<String>>,
        wait: f64,
        timeout: Option<f64>,
    ) -> PyResult<Call> {
        let (lease, wait, fields) = (duration(lease)?, duration(wait)?, selection(fields));
        Ok(self.read(timeout, move |buffer| async move { buffer.consume(&consumer, count, lease, wait, fields).await }))
    }

    /// Records that a consumer is done with items.
    #[pyo3(signature = (consumer, ids, *, timeout=None))]
    fn acknowledge(&self, consumer: String, ids: PyReadonlyArray1<'_, u64>, timeout: Option<f64>) -> PyResult<Call> {
        let ids = convert::ids(&ids)?;
        Ok(self.change(timeout, |buffer| async move { buffer.acknowledge(&consumer, &ids).await }))
    }

    /// Returns the figures.
    #[pyo3(signature = (*, timeout=None))]
    fn stats(&self, timeout: Option<f64>) -> Call {
        let native = self.native().clone();
        Call::new(&self.threads, timeout, async move { native.stats().await }, |py, stats| {
            Ok(figures(py, stats)?.into_any().unbind())
        })
    }
}

fn figures(py: Python<'_>, stats: BufferStats) -> PyResult<Bound<'_, PyDict>> {
    let result = PyDict::new(py);
    result.set_item("items", stats.items)?;
    result.set_item("priority_sum", stats.priority_sum)?;
    result.set_item("appended", stats.appended)?;
    result.set_item("sampled", stats.sampled)?;
    result.set_item("deleted", stats.deleted)?;
    let consumers = PyDict::new(py);
    for consumer in stats.consumers {
        consumers.set_item(consumer.name, consumer.leased)?;
    }
    result.set_item("consumers", consumers)?;
    result.set_item("limiter_cursor", stats.limiter_cursor)?;
    result.set_item("append_waits", stats.append_waits)?;
    result.set_item("sample_waits", stats.sample_waits)?;
    Ok(result)
}

fn dtype_of(name: &str) -> PyResult<DType> {
    let names = || DType::ALL.map(DType::name).join(", ");
    DType::from_name(name).ok_or_else(|| PyValueError::new_err(format!("dtype is {name}; allowed: {}", names())))
}

fn remover_of(name: &str) -> PyResult<Remover> {
    Ok(match name {
        "fifo" => Remover::Fifo,
        "lifo" => Remover::Lifo,
        "lowest_priority" => Remover::LowestPriority,
        "highest_priority" => Remover::HighestPriority,
        "refuse" => Remover::Refuse,
        _ => {
            let allowed = "fifo, lifo, lowest_priority, highest_priority, refuse";
            return Err(PyValueError::new_err(format!("remover is {name:?}; allowed: {allowed}")));
        }
    })
}

fn duration(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| PyValueError::new_err(format!("a wait of {seconds} s; allowed: 0 s or more")))
}

fn selection(fields: Option<Vec<String>>) -> Fields {
    fields.map_or(Fields::All, Fields::Named)
}

fn column((name, dtype, shape, rows, data): ColumnParts<'_>) -> PyResult<Column> {
    let dtype = dtype_of(&dtype)?;
    Ok(Column { name, dtype, shape, rows, data: convert::column(&data)?.into() })
}

fn handles(py: Python<'_>, handles: Vec<MemoryId>) -> Bound<'_, PyArray1<u64>> {
    handles.into_iter().map(|handle| handle.0).collect::<Vec<u64>>().into_pyarray(py)
}

/// Creates the columns of a batch; each field is name, dtype, fixed dimensions, rows per item, and elements as bytes.
fn batch(py: Python<'_>, batch: Batch) -> PyResult<Bound<'_, PyDict>> {
    let result = PyDict::new(py);
    result.set_item("handles", handles(py, batch.handles))?;
    result.set_item("missing", handles(py, batch.missing))?;
    result.set_item("weights", batch.weights.into_pyarray(py))?;
    result.set_item("scale", batch.scale)?;
    result.set_item("priorities", batch.priorities.into_pyarray(py))?;
    result.set_item("versions", batch.versions.into_pyarray(py))?;
    result.set_item("trajectories", batch.trajectories.into_pyarray(py))?;
    result.set_item("tags", PyList::new(py, batch.tags.iter().map(|tag| PyBytes::new(py, tag)))?)?;
    let columns = PyList::empty(py);
    for column in batch.columns {
        let rows = column.rows.map(|rows| rows.into_pyarray(py));
        // Without a copy if this batch is the only owner of the bytes.
        let data = Vec::from(column.data).into_pyarray(py);
        columns.append((column.name, column.dtype.name(), column.shape, rows, data))?;
    }
    result.set_item("columns", columns)?;
    Ok(result)
}
