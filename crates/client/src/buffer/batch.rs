//! Columns of items: as appended and as returned.

use super::spec::invalid;
use crate::error::Error;
use bytes::{Bytes, BytesMut};
use engram_memory::MemoryId;
use engram_proto::v1;
use engram_replay::columns::ColumnView;
use engram_replay::schema::DType;

/// The values of one field for all items of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Name of the field.
    pub name: String,
    /// Type of the elements.
    pub dtype: DType,
    /// Fixed dimensions; empty = a scalar.
    pub shape: Vec<u32>,
    /// Of a jagged field: rows per item.
    pub rows: Option<Vec<u32>>,
    /// Elements of all items, little-endian, row-major.
    pub data: Bytes,
}

impl Column {
    /// Returns a column of a field with fixed shape.
    pub fn new(name: impl Into<String>, dtype: DType, shape: Vec<u32>, data: impl Into<Bytes>) -> Self {
        Self { name: name.into(), dtype, shape, rows: None, data: data.into() }
    }

    /// Returns the column for a check.
    pub fn view(&self) -> ColumnView<'_> {
        ColumnView {
            field: &self.name,
            dtype: self.dtype,
            shape: &self.shape,
            rows: self.rows.as_deref(),
            data: &self.data,
        }
    }

    /// Decodes a column. Whether it is jagged is known by the schema.
    pub(crate) fn from_wire(from: v1::FieldColumn, jagged: bool) -> Result<Self, Error> {
        let dtype = DType::from_name(&from.dtype);
        let dtype = dtype.ok_or_else(|| Error::Protocol(format!("a column of type {:?}", from.dtype)))?;
        let rows = jagged.then_some(from.rows);
        Ok(Self { name: from.field, dtype, shape: from.shape, rows, data: from.data })
    }
}

/// Items returned by a call. Columns have one entry per item.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Handles.
    pub handles: Vec<MemoryId>,
    /// Importance weights in (0, 1] of a prioritized sample; empty otherwise.
    pub weights: Vec<f32>,
    /// Of a local sample: factor of the sum of weighted gradients, `T_k / (T b_k)`; sums of members are added and divided by nothing.
    pub scale: Option<f64>,
    /// Priorities before the exponent.
    pub priorities: Vec<f64>,
    /// Policy versions.
    pub versions: Vec<u64>,
    /// Trajectories or prompts; 0 = none.
    pub trajectories: Vec<u64>,
    /// Tags.
    pub tags: Vec<Bytes>,
    /// Selected fields, in the order of the schema.
    pub columns: Vec<Column>,
    /// Requested handles that name no item.
    pub missing: Vec<MemoryId>,
}

impl Batch {
    /// Returns the number of items.
    pub const fn len(&self) -> usize {
        self.handles.len()
    }

    /// Whether there is no item.
    pub const fn is_empty(&self) -> bool {
        self.handles.is_empty()
    }

    /// Returns the column of a field.
    pub fn column(&self, field: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.name == field)
    }

    /// Appends a batch without fields.
    pub(crate) fn extend(&mut self, more: Self) {
        self.handles.extend(more.handles);
        self.weights.extend(more.weights);
        self.priorities.extend(more.priorities);
        self.versions.extend(more.versions);
        self.trajectories.extend(more.trajectories);
        self.tags.extend(more.tags);
        self.missing.extend(more.missing);
    }

    /// Joins the parts of a response; `jagged` says whether a field is jagged.
    pub(crate) fn join(parts: Vec<v1::ItemBatch>, jagged: impl Fn(&str) -> bool) -> Result<Self, Error> {
        let mut batch = Self::default();
        let mut data: Vec<BytesMut> = Vec::new();
        let single = parts.len() == 1;
        let bytes_of = |index: usize| {
            let columns = parts.iter().filter_map(|part| part.columns.get(index));
            columns.map(|column| column.data.len()).sum::<usize>()
        };
        let lengths: Vec<usize> = (0..parts.first().map_or(0, |part| part.columns.len())).map(bytes_of).collect();
        for part in parts {
            batch.handles.extend(part.handles.into_iter().map(MemoryId));
            batch.missing.extend(part.missing.into_iter().map(MemoryId));
            batch.scale = batch.scale.or(part.scale);
            batch.weights.extend(part.weights);
            batch.priorities.extend(part.priorities);
            batch.versions.extend(part.versions);
            batch.trajectories.extend(part.trajectories);
            batch.tags.extend(part.tags);
            for (index, column) in part.columns.into_iter().enumerate() {
                let is_jagged = jagged(&column.field);
                let column = Column::from_wire(column, is_jagged)?;
                if single {
                    batch.columns.push(column);
                    continue;
                }
                match (batch.columns.get_mut(index), data.get_mut(index)) {
                    (Some(whole), Some(bytes)) if whole.name == column.name => {
                        bytes.extend_from_slice(&column.data);
                        if let (Some(rows), Some(more)) = (&mut whole.rows, column.rows) {
                            rows.extend(more);
                        }
                    }
                    (None, None) => {
                        let mut whole = BytesMut::with_capacity(lengths.get(index).copied().unwrap_or_default());
                        whole.extend_from_slice(&column.data);
                        data.push(whole);
                        batch.columns.push(column);
                    }
                    _ => return Err(Error::Protocol("parts of a batch with other columns".into())),
                }
            }
        }
        for (column, bytes) in batch.columns.iter_mut().zip(data) {
            column.data = bytes.freeze();
        }
        Ok(batch)
    }
}

/// Checks that a column of an append has an entry per item, or none.
pub(crate) fn check_length(column: &str, found: usize, count: usize) -> Result<(), Error> {
    if found == 0 || found == count {
        return Ok(());
    }
    Err(invalid(format!("{column}: {found} entries are not allowed; allowed: one per item ({count}), or none")))
}
