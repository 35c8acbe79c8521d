//! Columns: from NumPy arrays, and into them.

use engram_client::{Memory, WriteResult};
use engram_memory::{Group, MemoryId, QualityVector, RejectionReason};
use numpy::{IntoPyArray as _, PyArray1, PyArrayMethods as _, PyReadonlyArray1};
use pyo3::IntoPyObjectExt as _;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

/// Copies a contiguous column.
///
/// # Errors
/// It is not contiguous.
pub(crate) fn column<T: numpy::Element + Copy>(array: &PyReadonlyArray1<'_, T>) -> PyResult<Vec<T>> {
    Ok(array.as_slice()?.to_vec())
}

/// Copies a column that may be absent.
///
/// # Errors
/// It is not contiguous.
pub(crate) fn optional<T: numpy::Element + Copy>(array: Option<&PyReadonlyArray1<'_, T>>) -> PyResult<Vec<T>> {
    array.map_or_else(|| Ok(Vec::new()), column)
}

/// Copies ids.
///
/// # Errors
/// They are not contiguous.
pub(crate) fn ids(array: &PyReadonlyArray1<'_, u64>) -> PyResult<Vec<MemoryId>> {
    Ok(array.as_slice()?.iter().copied().map(MemoryId).collect())
}

/// Copies groups.
///
/// # Errors
/// They are not contiguous.
pub(crate) fn groups(array: Option<&PyReadonlyArray1<'_, u8>>) -> PyResult<Vec<Group>> {
    Ok(optional(array)?.into_iter().map(Group).collect())
}

/// Converts a value to an object.
///
/// # Errors
/// Python is out of memory.
pub(crate) fn object<'py>(py: Python<'py>, value: impl IntoPyObject<'py>) -> PyResult<Py<PyAny>> {
    value.into_py_any(py)
}

/// Creates the columns of `memories`. The columns are moved, not copied again.
///
/// # Errors
/// Python is out of memory.
pub(crate) fn memories<'py>(py: Python<'py>, memories: &[Memory], keys: bool) -> PyResult<Bound<'py, PyDict>> {
    let columns = PyDict::new(py);
    let ids: Vec<u64> = memories.iter().map(|memory| memory.id.0).collect();
    let weights: Vec<f64> = memories.iter().map(|memory| memory.weight.to_f64()).collect();
    let groups: Vec<u8> = memories.iter().map(|memory| memory.group.0).collect();
    columns.set_item("ids", ids.into_pyarray(py))?;
    columns.set_item("weights", weights.into_pyarray(py))?;
    columns.set_item("groups", groups.into_pyarray(py))?;
    if keys {
        columns.set_item("keys", PyList::new(py, memories.iter().map(|memory| memory.key.as_deref()))?)?;
    }
    Ok(columns)
}

/// Adds the feature vectors of `memories`, row-major.
///
/// # Errors
/// Their dimensions differ.
pub(crate) fn add_features(columns: &Bound<'_, PyDict>, memories: &[Memory]) -> PyResult<()> {
    let dimension = memories.iter().map(|memory| memory.features.len()).max().unwrap_or(0);
    let mut flat = vec![f32::NAN; dimension * memories.len()];
    for (row, memory) in memories.iter().enumerate() {
        // A memory without features stays a row of NaN.
        if memory.features.len() == dimension {
            flat[row * dimension..][..dimension].copy_from_slice(&memory.features);
        }
    }
    let array: Bound<'_, PyArray1<f32>> = flat.into_pyarray(columns.py());
    columns.set_item("features", array.reshape([memories.len(), dimension])?)
}

/// Adds the payloads of `memories`.
///
/// # Errors
/// Python is out of memory.
pub(crate) fn add_payloads(columns: &Bound<'_, PyDict>, memories: &[Memory]) -> PyResult<()> {
    let py = columns.py();
    columns.set_item("payloads", PyList::new(py, memories.iter().map(|memory| PyBytes::new(py, &memory.payload)))?)
}

/// Counts of a write, and the first rejected ids with their reasons.
pub(crate) type WriteCounts = (u64, u64, u64, u64, Vec<(u64, &'static str)>);

/// Returns the counts of a write.
pub(crate) fn written(result: &WriteResult) -> WriteCounts {
    let outcome = &result.outcome;
    let reason = |reason| match reason {
        RejectionReason::Unknown => "unknown",
        RejectionReason::KeyCollision => "key collision",
        RejectionReason::KeyMismatch => "key mismatch",
    };
    let rejections = outcome.rejections.iter().map(|rejection| (rejection.id.0, reason(rejection.reason))).collect();
    (outcome.applied, outcome.created, outcome.evicted, outcome.rejected, rejections)
}

/// Group, number of memories, sum, least and greatest weight in units of 2^-30.
pub(crate) type GroupFigures = (u8, u64, u128, u32, u32);

/// Returns the figures of every group that has a memory.
pub(crate) fn quality(vector: &QualityVector) -> Vec<GroupFigures> {
    let figures = |(group, quality): &(Group, engram_memory::GroupQuality)| {
        (group.0, quality.count, quality.sum, quality.min, quality.max)
    };
    vector.groups().iter().map(figures).collect()
}
