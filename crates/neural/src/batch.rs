//! Borrowed inputs, targets and weights of a batch. Constructors check shapes; the model checks what depends on it.

use std::ops::Range;

use crate::error::BatchError;

/// Input rows of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    pub(crate) rows: usize,
    pub(crate) input: Input<'a>,
    /// Position of each row in the global batch.
    pub(crate) positions: Positions<'a>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Input<'a> {
    /// Row-major values.
    Rows { values: &'a [f32], width: usize },
    /// Indices of row i are `indices[offsets[i]..offsets[i + 1]]`.
    Features { offsets: &'a [u32], indices: &'a [u32] },
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Positions<'a> {
    From(u32),
    List(&'a [u32]),
}

impl<'a> Batch<'a> {
    /// Dense rows: `values` has `rows * width` entries, row-major.
    ///
    /// # Errors
    /// `values` has another length.
    pub fn rows(values: &'a [f32], rows: usize, width: usize) -> Result<Self, BatchError> {
        length("values", values.len(), rows * width)?;
        Ok(Self { rows, input: Input::Rows { values, width }, positions: Positions::From(0) })
    }

    /// Jagged feature indices: row i has `indices[offsets[i]..offsets[i + 1]]`. A repeated index counts twice.
    ///
    /// # Errors
    /// `offsets` does not start at 0, decreases, or does not end at the length of `indices`.
    pub fn features(offsets: &'a [u32], indices: &'a [u32]) -> Result<Self, BatchError> {
        let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else {
            return Err(BatchError::Length { field: "offsets", actual: 0, expected: 1 });
        };
        let error = |at: usize, value: u32, expected: String| Err(BatchError::Offsets { at, value, expected });
        if *first != 0 {
            return error(0, *first, "0".to_owned());
        }
        if let Some(i) = offsets.windows(2).position(|w| w[0] > w[1]) {
            return error(i + 1, offsets[i + 1], format!("at least {}", offsets[i]));
        }
        if *last as usize != indices.len() {
            return error(offsets.len() - 1, *last, format!("the number of indices, {}", indices.len()));
        }
        let input = Input::Features { offsets, indices };
        Ok(Self { rows: offsets.len() - 1, input, positions: Positions::From(0) })
    }

    /// Sets the position in the global batch of the first row; the others follow. Dropout depends on positions.
    #[must_use]
    pub fn starting_at(self, position: u32) -> Self {
        Self { positions: Positions::From(position), ..self }
    }

    /// Sets the position in the global batch of every row.
    ///
    /// # Errors
    /// `positions` has another length than the batch.
    pub fn at_positions(self, positions: &'a [u32]) -> Result<Self, BatchError> {
        length("positions", positions.len(), self.rows)?;
        Ok(Self { positions: Positions::List(positions), ..self })
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Position in the global batch of row `i`.
    pub(crate) fn position(&self, i: usize) -> u32 {
        match self.positions {
            Positions::From(first) => first.wrapping_add(i as u32),
            Positions::List(list) => list[i],
        }
    }

    /// The rows of `range`. Offsets keep their values, so they need not start at 0.
    pub(crate) fn slice(&self, range: Range<usize>) -> Batch<'a> {
        let input = match self.input {
            Input::Rows { values, width } => {
                Input::Rows { values: &values[range.start * width..range.end * width], width }
            }
            Input::Features { offsets, indices } => {
                Input::Features { offsets: &offsets[range.start..range.end + 1], indices }
            }
        };
        let positions = match self.positions {
            Positions::From(first) => Positions::From(first.wrapping_add(range.start as u32)),
            Positions::List(list) => Positions::List(&list[range.clone()]),
        };
        Batch { rows: range.len(), input, positions }
    }

    /// Checks the batch against a model with `inputs` inputs.
    pub(crate) fn check(&self, inputs: usize, jagged: bool) -> Result<(), BatchError> {
        const ROWS: &str = "dense rows";
        const FEATURES: &str = "feature indices";
        match self.input {
            Input::Rows { .. } if jagged => Err(BatchError::Kind { expected: FEATURES, actual: ROWS }),
            Input::Features { .. } if !jagged => Err(BatchError::Kind { expected: ROWS, actual: FEATURES }),
            Input::Rows { width, .. } => length("width", width, inputs),
            Input::Features { offsets, indices } => {
                let Some(at) = indices.iter().position(|&i| i as usize >= inputs) else { return Ok(()) };
                let sample = offsets.partition_point(|&o| o as usize <= at) - 1;
                Err(BatchError::Feature { sample, value: indices[at], limit: inputs })
            }
        }
    }
}

/// What the model should give for each row.
#[derive(Debug, Clone, Copy)]
pub enum Targets<'a> {
    /// `rows * outputs` values, row-major.
    Values(&'a [f32]),
    /// One class per row.
    Classes(&'a [u32]),
}

impl<'a> Targets<'a> {
    pub(crate) fn slice(self, rows: Range<usize>, outputs: usize) -> Targets<'a> {
        match self {
            Self::Values(v) => Self::Values(&v[rows.start * outputs..rows.end * outputs]),
            Self::Classes(c) => Self::Classes(&c[rows]),
        }
    }
}

/// A batch with targets and, where samples were drawn with unequal probabilities, importance weights.
#[derive(Debug, Clone, Copy)]
pub struct LabeledBatch<'a> {
    /// Inputs.
    pub batch: Batch<'a>,
    /// Targets, one entry or row per input row.
    pub targets: Targets<'a>,
    /// One finite weight >= 0 per row; `None` means 1.
    pub weights: Option<&'a [f32]>,
}

impl<'a> LabeledBatch<'a> {
    pub(crate) fn slice(&self, rows: Range<usize>, outputs: usize) -> LabeledBatch<'a> {
        LabeledBatch {
            batch: self.batch.slice(rows.clone()),
            targets: self.targets.slice(rows.clone(), outputs),
            weights: self.weights.map(|w| &w[rows]),
        }
    }
}

pub(crate) fn length(field: &'static str, actual: usize, expected: usize) -> Result<(), BatchError> {
    if actual == expected { Ok(()) } else { Err(BatchError::Length { field, actual, expected }) }
}
