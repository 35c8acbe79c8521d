//! Items of a buffer as files: an array per field, and arrays whose names begin with `_` for what an item carries with its fields.

use super::npz::{self, Array};
use crate::error::problem;
use crate::output_file::OutputFile;
use anyhow::Context as _;
use engram_api::Code;
use engram_client::{Batch, Buffer, BufferSpec, Client, Column, DType, Field, Fields, Items};
use engram_memory::MemoryId;
use std::path::Path;

/// Items per call.
const CALL_ITEMS: usize = 4_096;
/// Rows per item of a jagged field follow in an array of this suffix.
const ROWS: &str = ".rows";
const PRIORITY: &str = "_priority";
const VERSION: &str = "_version";
const TRAJECTORY: &str = "_trajectory";
const HANDLE: &str = "_handle";

/// Writes all items to an archive; returns their number.
pub(crate) async fn export(buffer: &Buffer, path: &Path, force: bool) -> anyhow::Result<usize> {
    if !force && OutputFile::is_overwritten(path).unwrap_or(false) {
        let message = format!("{} exists; overwrite it with --force", path.display());
        return Err(problem(Code::InvalidValue, message));
    }
    let handles = buffer.list(None, 0).await?.handles;
    let items = buffer.stats().await?.items;
    if items > handles.len() as u64 {
        let message = format!("buffer {} has {items} items; allowed: at most 65,536 in one file", buffer.name());
        return Err(problem(Code::OutOfRange, message));
    }
    let mut arrays = Arrays::new(buffer.spec());
    for handles in handles.chunks(CALL_ITEMS) {
        arrays.push(&buffer.get(handles, Fields::All).await?);
    }
    let count = arrays.handles.len() / 8;
    let bytes = npz::encode(&arrays.finish())?;
    OutputFile::write(path, &bytes).with_context(|| format!("failed to write {}", path.display()))?;
    Ok(count)
}

/// The arrays of an archive under construction.
struct Arrays<'a> {
    spec: &'a BufferSpec,
    fields: Vec<(Vec<u8>, Vec<u8>)>,
    handles: Vec<u8>,
    priorities: Vec<u8>,
    versions: Vec<u8>,
    trajectories: Vec<u8>,
}

impl<'a> Arrays<'a> {
    fn new(spec: &'a BufferSpec) -> Self {
        let fields = vec![Default::default(); spec.fields.len()];
        let empty = Vec::new;
        Self { spec, fields, handles: empty(), priorities: empty(), versions: empty(), trajectories: empty() }
    }

    fn push(&mut self, batch: &Batch) {
        self.handles.extend(batch.handles.iter().flat_map(|handle| handle.0.to_le_bytes()));
        self.priorities.extend(batch.priorities.iter().flat_map(|it| it.to_le_bytes()));
        self.versions.extend(batch.versions.iter().flat_map(|it| it.to_le_bytes()));
        self.trajectories.extend(batch.trajectories.iter().flat_map(|it| it.to_le_bytes()));
        for ((data, rows), column) in self.fields.iter_mut().zip(&batch.columns) {
            data.extend_from_slice(&column.data);
            rows.extend(column.rows.iter().flatten().flat_map(|rows| rows.to_le_bytes()));
        }
    }

    fn finish(self) -> Vec<Array> {
        let flat = |name: &str, dtype: DType, data: Vec<u8>| Array {
            name: name.to_owned(),
            dtype,
            shape: vec![data.len() / dtype.bytes()],
            data,
        };
        let mut arrays = Vec::new();
        for (field, (data, rows)) in self.spec.fields.iter().zip(self.fields) {
            let row_bytes = field.row_bytes().unwrap_or(1).max(1);
            let shape = std::iter::once(data.len() / row_bytes).chain(field.shape.iter().map(|it| *it as usize));
            arrays.push(Array { name: field.name.clone(), dtype: field.dtype, shape: shape.collect(), data });
            if field.jagged {
                arrays.push(flat(&format!("{}{ROWS}", field.name), DType::UInt32, rows));
            }
        }
        arrays.push(flat(HANDLE, DType::UInt64, self.handles));
        arrays.push(flat(PRIORITY, DType::Float64, self.priorities));
        arrays.push(flat(VERSION, DType::UInt64, self.versions));
        arrays.push(flat(TRAJECTORY, DType::UInt64, self.trajectories));
        arrays
    }
}

/// Appends the items of an archive; creates the buffer with this capacity if it does not exist. Returns the handles.
pub(crate) async fn import(
    client: &Client,
    name: &str,
    path: &Path,
    capacity: Option<u64>,
) -> anyhow::Result<Vec<MemoryId>> {
    let bytes = std::fs::read(path).with_context(|| format!("failed to read {}", path.display()))?;
    let mut arrays = npz::decode(&bytes).with_context(|| format!("failed to read {}", path.display()))?;
    let mut take = |name: &str| arrays.iter().position(|array| array.name == name).map(|index| arrays.remove(index));
    take(HANDLE);
    let priorities = column(take(PRIORITY), DType::Float64, f64::from_le_bytes)?;
    let versions = column(take(VERSION), DType::UInt64, u64::from_le_bytes)?;
    let trajectories = column(take(TRAJECTORY), DType::UInt64, u64::from_le_bytes)?;
    let mut fields: Vec<(Array, Option<Vec<u32>>)> = Vec::new();
    while let Some(array) =
        arrays.iter().position(|array| !array.name.ends_with(ROWS)).map(|index| arrays.remove(index))
    {
        let rows = format!("{}{ROWS}", array.name);
        let rows = arrays.iter().position(|array| array.name == rows).map(|index| arrays.remove(index));
        let rows = rows.map(|rows| column(Some(rows), DType::UInt32, u32::from_le_bytes)).transpose()?;
        fields.push((array, rows));
    }
    let items = |(array, rows): &(Array, Option<Vec<u32>>)| match rows {
        Some(rows) => rows.len(),
        None => array.shape.first().copied().unwrap_or(0),
    };
    let count = fields.first().map_or(0, items);
    if let Some((array, _)) = fields.iter().find(|field| items(field) != count) {
        let message = format!("array {:?} has not {count} items as the first one", array.name);
        return Err(problem(Code::InvalidValue, message));
    }
    let buffer = open(client, name, capacity, &fields).await?;
    let columns: Vec<Column> = fields.into_iter().map(|(array, rows)| into_column(array, rows)).collect();
    append(&buffer, &columns, count, &priorities, &versions, &trajectories).await
}

async fn open(
    client: &Client,
    name: &str,
    capacity: Option<u64>,
    fields: &[(Array, Option<Vec<u32>>)],
) -> anyhow::Result<Buffer> {
    let Some(capacity) = capacity else { return Ok(client.buffer(name).await?) };
    let field = |(array, rows): &(Array, Option<Vec<u32>>)| Field {
        name: array.name.clone(),
        dtype: array.dtype,
        shape: array.shape.iter().skip(1).map(|it| *it as u32).collect(),
        jagged: rows.is_some(),
    };
    Ok(client.create_buffer(&BufferSpec::new(name, fields.iter().map(field).collect(), capacity)).await?)
}

fn into_column(array: Array, rows: Option<Vec<u32>>) -> Column {
    let shape = array.shape.iter().skip(1).map(|it| *it as u32).collect();
    Column { rows, ..Column::new(array.name, array.dtype, shape, array.data) }
}

/// Appends all items in calls of a bounded size.
async fn append(
    buffer: &Buffer,
    columns: &[Column],
    count: usize,
    priorities: &[f64],
    versions: &[u64],
    trajectories: &[u64],
) -> anyhow::Result<Vec<MemoryId>> {
    let mut handles = Vec::with_capacity(count);
    let mut starts: Vec<usize> = vec![0; columns.len()];
    for first in (0..count).step_by(CALL_ITEMS) {
        let items = first..count.min(first + CALL_ITEMS);
        let part = |(column, start): (&Column, &mut usize)| {
            let row_bytes = column.shape.iter().fold(column.dtype.bytes(), |bytes, it| bytes * *it as usize);
            let rows = column.rows.as_ref().map(|rows| rows[items.clone()].to_vec());
            let count = rows.as_ref().map_or(items.len(), |rows| rows.iter().map(|it| *it as usize).sum());
            let end = (*start + count * row_bytes).min(column.data.len());
            let data = column.data.slice(*start..end);
            *start = end;
            Column { rows, data, ..column.clone() }
        };
        let columns = columns.iter().zip(&mut starts).map(part).collect();
        let part = Items {
            count: items.len(),
            columns,
            priorities: priorities.get(items.clone()).unwrap_or_default().to_vec(),
            versions: versions.get(items.clone()).unwrap_or_default().to_vec(),
            trajectories: trajectories.get(items.clone()).unwrap_or_default().to_vec(),
            ..Items::default()
        };
        handles.extend(buffer.append(part).await?.handles);
    }
    Ok(handles)
}

/// Returns the numbers of an array; none if it is absent.
fn column<const N: usize, T>(array: Option<Array>, dtype: DType, number: fn([u8; N]) -> T) -> anyhow::Result<Vec<T>> {
    let Some(array) = array else { return Ok(Vec::new()) };
    if array.dtype != dtype || array.shape.len() != 1 {
        let message =
            format!("array {:?} is {}{:?}; allowed: {dtype} with one dimension", array.name, array.dtype, array.shape);
        return Err(problem(Code::InvalidValue, message));
    }
    let (numbers, _) = array.data.as_chunks::<N>();
    Ok(numbers.iter().copied().map(number).collect())
}
