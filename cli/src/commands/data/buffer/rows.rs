//! Items as a file holds them: columns of fields, and what an item carries with its fields.

use anyhow::ensure;
use bytes::Bytes;
use engram_client::{Batch, BufferSpec, Column, Field, Items};

/// Names of what an item carries with its fields.
pub(super) const HANDLE: &str = "_handle";
pub(super) const PRIORITY: &str = "_priority";
pub(super) const VERSION: &str = "_version";
pub(super) const TRAJECTORY: &str = "_trajectory";
pub(super) const TAG: &str = "_tag";
pub(super) const WEIGHT: &str = "_weight";

/// Items of a file. Columns have one entry per item; optional ones may be empty.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Rows {
    pub(super) count: usize,
    /// A column per field.
    pub(super) columns: Vec<Column>,
    pub(super) handles: Vec<u64>,
    pub(super) weights: Vec<f32>,
    pub(super) priorities: Vec<f64>,
    pub(super) versions: Vec<u64>,
    pub(super) trajectories: Vec<u64>,
    pub(super) tags: Vec<Bytes>,
}

impl Rows {
    /// Returns no items of a buffer.
    pub(super) fn empty(spec: &BufferSpec) -> Self {
        let column = |field: &Field| Column {
            rows: field.jagged.then(Vec::new),
            ..Column::new(&field.name, field.dtype, field.shape.clone(), Bytes::new())
        };
        Self { columns: spec.fields.iter().map(column).collect(), ..Self::default() }
    }

    pub(super) fn of_batch(batch: Batch) -> Self {
        Self {
            count: batch.handles.len(),
            handles: batch.handles.into_iter().map(|handle| handle.0).collect(),
            weights: batch.weights,
            priorities: batch.priorities,
            versions: batch.versions,
            trajectories: batch.trajectories,
            tags: batch.tags,
            columns: batch.columns,
        }
    }

    /// Returns the bytes of the fields.
    pub(super) fn bytes(&self) -> usize {
        self.columns.iter().map(|column| column.data.len()).sum()
    }

    /// Joins items with the same columns, in order.
    pub(super) fn join(parts: Vec<Self>, empty: Self) -> Self {
        let mut data: Vec<Vec<u8>> = vec![Vec::new(); empty.columns.len()];
        let mut joined = empty;
        for part in parts {
            joined.count += part.count;
            joined.handles.extend(part.handles);
            joined.weights.extend(part.weights);
            joined.priorities.extend(part.priorities);
            joined.versions.extend(part.versions);
            joined.trajectories.extend(part.trajectories);
            joined.tags.extend(part.tags);
            for ((column, bytes), more) in joined.columns.iter_mut().zip(&mut data).zip(part.columns) {
                bytes.extend_from_slice(&more.data);
                if let (Some(rows), Some(more)) = (&mut column.rows, more.rows) {
                    rows.extend(more);
                }
            }
        }
        for (column, bytes) in joined.columns.iter_mut().zip(data) {
            column.data = bytes.into();
        }
        joined
    }

    /// Returns the fields that the columns declare.
    pub(super) fn fields(&self) -> Vec<Field> {
        let field = |column: &Column| Field {
            name: column.name.clone(),
            dtype: column.dtype,
            shape: column.shape.clone(),
            jagged: column.rows.is_some(),
        };
        self.columns.iter().map(field).collect()
    }

    /// Cuts the items into appends of at most `items` each.
    ///
    /// # Errors
    /// A column has another length than its shape and rows say.
    pub(super) fn appends(&self, items: usize) -> anyhow::Result<Vec<Items>> {
        let mut starts: Vec<usize> = vec![0; self.columns.len()];
        let mut appends = Vec::new();
        for first in (0..self.count).step_by(items) {
            let range = first..self.count.min(first + items);
            let mut columns = Vec::with_capacity(self.columns.len());
            for (column, start) in self.columns.iter().zip(&mut starts) {
                let rows = column.rows.as_ref().map(|rows| rows[range.clone()].to_vec());
                let count = rows.as_ref().map_or(range.len(), |rows| rows.iter().map(|it| *it as usize).sum());
                let end = *start + count * row_bytes(column);
                ensure!(end <= column.data.len(), "field {:?} has fewer values than its items need", column.name);
                let data = column.data.slice(*start..end);
                *start = end;
                columns.push(Column { rows, data, ..column.clone() });
            }
            appends.push(Items {
                count: range.len(),
                columns,
                priorities: self.priorities.get(range.clone()).unwrap_or_default().to_vec(),
                versions: self.versions.get(range.clone()).unwrap_or_default().to_vec(),
                trajectories: self.trajectories.get(range.clone()).unwrap_or_default().to_vec(),
                tags: self.tags.get(range).unwrap_or_default().to_vec(),
                ..Items::default()
            });
        }
        Ok(appends)
    }
}

/// Returns the bytes of one row of a column.
pub(super) fn row_bytes(column: &Column) -> usize {
    column.shape.iter().fold(column.dtype.bytes(), |bytes, dimension| bytes * *dimension as usize)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use engram_client::DType;

    /// Items with a scalar, a fixed and a jagged field of every type, one item without rows.
    pub(in super::super) fn every_type() -> Rows {
        let mut columns = Vec::new();
        for dtype in DType::ALL {
            let rows = vec![2, 0, 1];
            let data = |elements: usize| -> Bytes {
                let byte =
                    |index: usize| if dtype == DType::Bool { (index % 2) as u8 } else { (index * 37 + 11) as u8 };
                (0..elements * dtype.bytes()).map(byte).collect::<Vec<_>>().into()
            };
            columns.push(Column::new(format!("{dtype}"), dtype, vec![], data(3)));
            columns.push(Column::new(format!("{dtype}_fixed"), dtype, vec![2, 3], data(18)));
            let jagged = Column::new(format!("{dtype}_jagged"), dtype, vec![2], data(6));
            columns.push(Column { rows: Some(rows), ..jagged });
        }
        Rows {
            count: 3,
            columns,
            handles: vec![5, u64::MAX, 7],
            weights: Vec::new(),
            priorities: vec![0.25, 3.5, 1e-3],
            versions: vec![1, u64::MAX, 0],
            trajectories: vec![9, 9, 8],
            tags: vec![Bytes::from_static(b"done"), Bytes::new(), Bytes::from_static(&[0, 255])],
        }
    }

    #[test]
    fn appends_cover_all_items_in_order() {
        let rows = every_type();
        let appends = rows.appends(2).unwrap();
        assert_eq!(appends.iter().map(|items| items.count).collect::<Vec<_>>(), [2, 1]);
        for (index, column) in rows.columns.iter().enumerate() {
            let data: Vec<u8> = appends.iter().flat_map(|items| items.columns[index].data.to_vec()).collect();
            assert_eq!(data, column.data, "{}", column.name);
        }
        assert_eq!(appends[1].tags, rows.tags[2..]);
    }
}
