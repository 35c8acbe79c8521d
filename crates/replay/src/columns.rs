//! Columns of fields, checked against a schema as a whole, and split into items.

use crate::schema::{DType, Error, Schema};
use std::ops::Range;

/// A column of one field.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ColumnView<'a> {
    /// Name of the field.
    pub field: &'a str,
    /// Type of the elements.
    pub dtype: DType,
    /// Fixed dimensions.
    pub shape: &'a [u32],
    /// Of a jagged field: rows per item.
    pub rows: Option<&'a [u32]>,
    /// Elements of all items, little-endian, row-major.
    pub data: &'a [u8],
}

/// A column in the order of the schema.
#[derive(Debug, Clone, PartialEq)]
struct Checked<'a> {
    view: ColumnView<'a>,
    /// Bytes of a row.
    row_bytes: usize,
    /// Of a jagged field: the row at which each item begins, and the end.
    starts: Vec<u64>,
}

/// Columns of a batch that match a schema.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns<'a> {
    columns: Vec<Checked<'a>>,
    count: usize,
}

impl Schema {
    /// Checks the columns of `count` items: every field once, of its type and shape, with the bytes of all items.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Missing`], [`Error::Value`]; [`Error::ItemBytes`] for an item above the limit.
    pub fn columns<'a>(&self, given: &[ColumnView<'a>], count: usize) -> Result<Columns<'a>, Error> {
        let names: Vec<&str> = given.iter().map(|column| column.field).collect();
        self.select(&names)?;
        let mut columns = Vec::with_capacity(given.len());
        for field in self.fields() {
            let mut of_field = given.iter().filter(|column| column.field == field.name);
            let missing = || Error::Missing { field: field.name.clone() };
            let (view, None) = (*of_field.next().ok_or_else(missing)?, of_field.next()) else {
                return Err(Error::Value {
                    field: field.name.clone(),
                    found: "a second column".into(),
                    expected: "one".into(),
                });
            };
            columns.push(field.column(view, count)?);
        }
        let columns = Columns { columns, count };
        let too_large = (0..count).map(|item| columns.bytes(item)).find(|bytes| *bytes > crate::schema::MAX_ITEM_BYTES);
        too_large.map_or(Ok(columns), |bytes| Err(Error::ItemBytes(bytes)))
    }
}

impl crate::schema::Field {
    fn column<'a>(&self, view: ColumnView<'a>, count: usize) -> Result<Checked<'a>, Error> {
        let refused = |found: String| Error::Value { field: self.name.clone(), found, expected: self.describe() };
        if view.dtype != self.dtype || view.shape != self.shape || view.rows.is_some() != self.jagged {
            let found = Self {
                name: String::new(),
                dtype: view.dtype,
                shape: view.shape.to_vec(),
                jagged: view.rows.is_some(),
            };
            return Err(refused(found.describe()));
        }
        let row_bytes = self.row_bytes().unwrap_or(usize::MAX);
        let mut starts = Vec::new();
        if let Some(rows) = view.rows {
            if rows.len() != count {
                return Err(refused(format!("{} lengths for {count} items", rows.len())));
            }
            starts.push(0);
            starts.extend(rows.iter().scan(0_u64, |sum, rows| {
                *sum += u64::from(*rows);
                Some(*sum)
            }));
        }
        let rows = starts.last().copied().unwrap_or(count as u64);
        if Some(view.data.len() as u64) != rows.checked_mul(row_bytes as u64) {
            let text = format!("{} bytes for {rows} of {}", view.data.len(), self.describe());
            return Err(refused(text));
        }
        Ok(Checked { view, row_bytes, starts })
    }
}

impl Checked<'_> {
    /// Returns the bytes of an item in the column.
    fn range(&self, item: usize) -> Range<usize> {
        let rows = match self.starts.get(item..item + 2) {
            Some(ends) => ends[0] as usize..ends[1] as usize,
            None => item..item + 1,
        };
        rows.start * self.row_bytes..rows.end * self.row_bytes
    }
}

impl Columns<'_> {
    /// Returns the number of items.
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Whether there is no item.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the encoded bytes of an item.
    pub fn bytes(&self, item: usize) -> usize {
        self.columns
            .iter()
            .map(|column| column.range(item).len() + if column.view.rows.is_some() { 4 } else { 0 })
            .sum()
    }

    /// Appends the encoded fields of an item, as [`Schema::encode`] does.
    pub fn encode(&self, item: usize, payload: &mut Vec<u8>) {
        for column in &self.columns {
            if let Some(rows) = column.view.rows {
                payload.extend_from_slice(&rows[item].to_le_bytes());
            }
            payload.extend_from_slice(&column.view.data[column.range(item)]);
        }
    }

    /// Returns the rows of some items in the column of schema field `field`; empty unless it is jagged.
    pub fn rows(&self, field: usize, items: &[usize]) -> Vec<u32> {
        let rows = self.columns[field].view.rows;
        rows.map_or_else(Vec::new, |rows| items.iter().map(|item| rows[*item]).collect())
    }

    /// Copies the elements of some items of the column of schema field `field`.
    pub fn elements(&self, field: usize, items: &[usize]) -> Vec<u8> {
        let column = &self.columns[field];
        let mut data = Vec::with_capacity(items.iter().map(|item| column.range(*item).len()).sum());
        items.iter().for_each(|item| data.extend_from_slice(&column.view.data[column.range(*item)]));
        data
    }

    /// Returns the place of the elements of some items in the column of schema field `field`; `None` if the items do not follow one another.
    pub fn range(&self, field: usize, items: &[usize]) -> Option<Range<usize>> {
        let (first, last) = (*items.first()?, *items.last()?);
        let column = &self.columns[field];
        items.iter().copied().eq(first..=last).then(|| column.range(first).start..column.range(last).end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Field, Value};

    fn schema() -> Schema {
        let field = |name: &str, dtype, shape: &[u32], jagged| Field {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            jagged,
        };
        Schema::new(vec![field("x", DType::Int16, &[2], false), field("t", DType::UInt8, &[], true)]).unwrap()
    }

    #[test]
    fn columns_encode_items_as_values_do() {
        let x = [1_u8, 0, 2, 0, 3, 0, 4, 0];
        let x = ColumnView { field: "x", dtype: DType::Int16, shape: &[2], rows: None, data: &x };
        let t = ColumnView { field: "t", dtype: DType::UInt8, shape: &[], rows: Some(&[3, 0]), data: &[7, 8, 9] };
        let columns = schema().columns(&[t, x], 2).unwrap();
        let mut first = Vec::new();
        columns.encode(0, &mut first);
        let values = [
            Value { field: "x", dtype: DType::Int16, shape: &[2], bytes: &[1, 0, 2, 0] },
            Value { field: "t", dtype: DType::UInt8, shape: &[3], bytes: &[7, 8, 9] },
        ];
        assert_eq!(first, schema().encode(&values).unwrap());
        assert_eq!((columns.bytes(0), columns.bytes(1)), (11, 8));
        assert_eq!((columns.rows(1, &[1, 0]), columns.elements(1, &[1, 0])), (vec![0, 3], vec![7, 8, 9]));
        assert_eq!((columns.rows(0, &[1, 0]), columns.elements(0, &[1, 0])), (vec![], vec![3, 0, 4, 0, 1, 0, 2, 0]));
        assert_eq!(
            [columns.range(0, &[0, 1]), columns.range(0, &[1]), columns.range(1, &[1])],
            [Some(0..8), Some(4..8), Some(3..3)]
        );
        assert_eq!([columns.range(0, &[1, 0]), columns.range(0, &[])], [None, None]);
    }

    #[test]
    fn column_that_differs_is_named_with_both_types() {
        let t = ColumnView { field: "t", dtype: DType::UInt8, shape: &[], rows: Some(&[1]), data: &[7] };
        let wrong = |dtype, shape: &'static [u32], data: &'static [u8]| {
            let x = ColumnView { field: "x", dtype, shape, rows: None, data };
            schema().columns(&[x, t], 1).unwrap_err().to_string()
        };
        assert_eq!(wrong(DType::Float32, &[2], &[0; 8]), "field x: float32[2] is not allowed; allowed: int16[2]");
        assert_eq!(wrong(DType::Int16, &[3], &[0; 6]), "field x: int16[3] is not allowed; allowed: int16[2]");
        assert!(wrong(DType::Int16, &[2], &[0; 6]).contains("6 bytes for 1"));
        assert!(schema().columns(&[t], 1).unwrap_err().to_string().contains("x is missing"));
        let unknown = ColumnView { field: "y", ..t };
        assert!(schema().columns(&[t, unknown], 1).unwrap_err().to_string().contains("\"y\" does not exist"));
    }
}
