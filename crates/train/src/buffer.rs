//! Batches from a replay buffer: which items a run draws, whether a buffer fits its model, and items as rows.

use std::collections::BTreeSet;

use engram_api::{BufferSampler, BufferSource, PRIORITY_ALPHA, PRIORITY_BETA, ReplayRun};
use engram_replay::columns::ColumnView;
use engram_replay::importance::Beta;
use engram_replay::schema::{DType, Field, Schema};
use half::{bf16, f16};
use thiserror::Error;

use crate::job::{JobError, field};
use crate::rows::Rows;

/// Most items of a batch from a buffer.
pub const MAX_BATCH: u64 = 65_536;
/// Added to the error of a sample, so that an item without error keeps a chance to be drawn. Of the usual sizes of errors it is a
/// thousandth.
const PRIORITY_EPSILON: f64 = 1e-3;

/// How a run draws from a replay buffer.
#[derive(Debug, Clone, PartialEq)]
pub struct BufferPlan {
    /// Name of the buffer.
    pub name: String,
    /// Exponents of prioritized sampling; `None` draws every item alike.
    pub prioritized: Option<(f64, Beta)>,
    /// Whether errors become priorities.
    pub updates_priorities: bool,
    /// Items that the buffer must have before the first step.
    pub min_size: u64,
    /// Buffer of items to measure the result on.
    pub held_out: Option<String>,
    /// Steps that are drawn ahead.
    pub prefetch: u64,
    /// Fields of the buffer: input and target.
    pub fields: [String; 2],
    /// Names that the model uses for them.
    names: [String; 2],
    /// Inputs of the model, and whether it reads feature numbers.
    inputs: usize,
    reads_features: bool,
}

/// Items of a batch that belong to one member.
#[derive(Debug, Clone, Copy)]
pub struct DrawnItems<'a> {
    /// Column of the input.
    pub input: ColumnView<'a>,
    /// Column of the target.
    pub target: ColumnView<'a>,
    /// Importance weights; none = 1.
    pub weights: &'a [f32],
    /// Position in the columns of each row.
    pub order: &'a [usize],
}

/// An item that the model cannot read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text}")]
pub struct ItemError {
    /// Position in the columns; `None` where the columns as a whole do not fit.
    pub position: Option<usize>,
    /// Field, value and what is allowed.
    pub text: String,
}

impl BufferPlan {
    /// Checks a source.
    ///
    /// # Errors
    /// A setting is out of range, belongs to the other sampler, or names what the model does not use.
    pub(crate) fn new(source: &BufferSource, run: &ReplayRun) -> Result<Self, JobError> {
        if run.batch > MAX_BATCH {
            let allowed = format!("at most {MAX_BATCH} with source.buffer");
            return Err(field("spec.replay.batch", run.batch, allowed));
        }
        if source.held_out.as_ref() == Some(&source.name) {
            let allowed = "a buffer other than that of the run";
            return Err(field("spec.replay.source.buffer.heldOut", &source.name, allowed));
        }
        let input = &run.model.inputs[0];
        let names = [input.field.clone(), run.model.loss.target.clone()];
        if let Some(name) = source.fields.keys().find(|name| !names.contains(name)) {
            let allowed = format!("names that the model uses: {}", names.join(", "));
            return Err(field("spec.replay.source.buffer.fields", name, allowed));
        }
        let first = run.model.layers.first();
        let is_prioritized = source.sampler == BufferSampler::Prioritized;
        Ok(Self {
            name: source.name.clone(),
            prioritized: exponents(source, run.steps)?,
            updates_priorities: source.update_priorities.unwrap_or(is_prioritized),
            min_size: source.min_size.unwrap_or(run.batch),
            held_out: source.held_out.clone(),
            prefetch: source.prefetch.unwrap_or(1),
            fields: names.clone().map(|name| source.fields.get(&name).cloned().unwrap_or(name)),
            names,
            inputs: input.dim as usize,
            reads_features: first.is_some_and(|it| it.feature_bag.or(it.feature_attention).is_some()),
        })
    }

    /// Checks that a buffer has the fields of the model, of types and shapes that it can read.
    ///
    /// # Errors
    /// Names the input or target, and the type and shape of both sides.
    pub fn fit(&self, schema: &Schema) -> Result<(), JobError> {
        const PLACES: [&str; 2] = ["spec.replay.model.inputs[0].field", "spec.replay.model.loss.target"];
        for (side, place) in PLACES.into_iter().enumerate() {
            let Some(found) = schema.fields().iter().find(|it| it.name == self.fields[side]) else {
                let all: Vec<String> = schema.fields().iter().map(describe).collect();
                let allowed = format!("a field of buffer {}: {}", self.name, all.join(", "));
                return Err(field(place, self.wanted(side), allowed));
            };
            if !self.reads(side, found.dtype, &found.shape, found.jagged) {
                let allowed = format!("what buffer {} has, {}", self.name, describe(found));
                return Err(field(place, self.wanted(side), allowed));
            }
        }
        Ok(())
    }

    /// Describes input (0) or target (1): `mask number[60] or integer[*]`.
    fn wanted(&self, side: usize) -> String {
        let types = match (side, self.reads_features) {
            (0, false) => format!("number[{}] or integer[*]", self.inputs),
            (0, true) => "integer[*]".to_owned(),
            _ => "number[]".to_owned(),
        };
        let (name, of) = (&self.names[side], &self.fields[side]);
        if name == of { format!("{name} {types}") } else { format!("{name} (field {of}) {types}") }
    }

    /// Whether the model can read a field as input (0) or target (1).
    fn reads(&self, side: usize, dtype: DType, shape: &[u32], jagged: bool) -> bool {
        let is_number = !matches!(dtype, DType::Complex64 | DType::Complex128);
        match (side, jagged) {
            (0, true) => is_integer(dtype) && shape.is_empty(),
            (0, false) => !self.reads_features && is_number && matches!(shape, [dim] if *dim as usize == self.inputs),
            (_, jagged) => !jagged && is_number && matches!(shape, [] | [1]),
        }
    }

    /// Returns items as rows.
    ///
    /// # Errors
    /// The columns are not those of a buffer that fits, or a feature is out of range.
    pub fn rows(&self, items: &DrawnItems<'_>) -> Result<Rows, ItemError> {
        for (side, column) in [items.input, items.target].into_iter().enumerate() {
            if !self.reads(side, column.dtype, column.shape, column.rows.is_some()) {
                let found = Field {
                    name: column.field.to_owned(),
                    dtype: column.dtype,
                    shape: column.shape.to_vec(),
                    jagged: column.rows.is_some(),
                };
                let text = format!("the buffer returned {}, the model needs {}", describe(&found), self.wanted(side));
                return Err(ItemError { position: None, text });
            }
        }
        let mut rows = match items.input.rows {
            Some(lengths) => {
                let subsets = self.subsets(&items.input, lengths, items.order)?;
                Rows::of_subsets(self.inputs, self.reads_features, subsets.iter().map(Vec::as_slice))
            }
            None => {
                let dense = picked(&items.input, self.inputs, items.order)?;
                Rows { dense, width: self.inputs, ..Rows::default() }
            }
        };
        rows.targets = picked(&items.target, 1, items.order)?;
        if !items.weights.is_empty() {
            rows.weights = items.order.iter().map(|at| items.weights[*at]).collect();
        }
        Ok(rows)
    }

    /// Returns the features of items, in the order of the rows.
    fn subsets(&self, column: &ColumnView<'_>, lengths: &[u32], order: &[usize]) -> Result<Vec<Vec<u32>>, ItemError> {
        let bytes = column.dtype.bytes();
        let mut ends = vec![0];
        lengths.iter().for_each(|length| ends.push(ends[ends.len() - 1] + *length as usize * bytes));
        let one = |position: &usize| {
            let range = ends.get(*position).copied().zip(ends.get(position + 1).copied());
            let data = range.and_then(|(start, end)| column.data.get(start..end)).ok_or_else(|| short(column))?;
            let feature = |value: i128| {
                u32::try_from(value).ok().filter(|it| (*it as usize) < self.inputs).ok_or_else(|| ItemError {
                    position: Some(*position),
                    text: format!(
                        "field {}: feature {value} is not allowed; allowed: 0 to {}",
                        column.field,
                        self.inputs.saturating_sub(1)
                    ),
                })
            };
            integers(column.dtype, data).into_iter().map(feature).collect()
        };
        order.iter().map(one).collect()
    }
}

/// Returns alpha and beta of prioritized sampling.
fn exponents(source: &BufferSource, steps: u64) -> Result<Option<(f64, Beta)>, JobError> {
    if source.sampler == BufferSampler::Uniform {
        let set = [("alpha", source.alpha.is_some()), ("beta", source.beta.is_some())];
        return match set.into_iter().find(|(_, is_set)| *is_set) {
            Some((name, _)) => {
                Err(field("spec.replay.source.buffer.sampler", format!("Uniform with {name}"), "Prioritized with it"))
            }
            None => Ok(None),
        };
    }
    let beta = source.beta.as_ref().map_or(Beta { start: PRIORITY_BETA, end: 1.0, steps }, |beta| Beta {
        start: beta.start,
        end: beta.end,
        steps: beta.steps.unwrap_or(steps),
    });
    Ok(Some((source.alpha.unwrap_or(PRIORITY_ALPHA), beta)))
}

/// Returns the new priority of each item of a committed step, once per item: |error| + 0.001. Of an item that was drawn more than once the
/// last error counts. An error that is not finite gives none.
pub fn priorities(handles: &[u64], errors: &[f32]) -> (Vec<u64>, Vec<f64>) {
    let mut seen = BTreeSet::new();
    let pairs = handles.iter().zip(errors).rev().filter(|(handle, error)| error.is_finite() && seen.insert(**handle));
    pairs.map(|(handle, error)| (*handle, f64::from(error.abs()) + PRIORITY_EPSILON)).unzip()
}

fn describe(field: &Field) -> String {
    format!("{} {}", field.name, field.describe())
}

const fn is_integer(dtype: DType) -> bool {
    use DType::{Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64};
    matches!(dtype, Int8 | Int16 | Int32 | Int64 | UInt8 | UInt16 | UInt32 | UInt64)
}

fn short(column: &ColumnView<'_>) -> ItemError {
    let text = format!("field {}: the column of {} bytes lacks items of the batch", column.field, column.data.len());
    ItemError { position: None, text }
}

/// Returns the numbers of items with `width` elements each, in the order of the rows.
fn picked(column: &ColumnView<'_>, width: usize, order: &[usize]) -> Result<Vec<f32>, ItemError> {
    let bytes = column.dtype.bytes() * width;
    let mut values = Vec::with_capacity(order.len() * width);
    for position in order {
        let data = column.data.get(position * bytes..(position + 1) * bytes).ok_or_else(|| short(column))?;
        floats(column.dtype, data, &mut values);
    }
    Ok(values)
}

fn each<const N: usize, T>(data: &[u8], read: impl Fn([u8; N]) -> T) -> impl Iterator<Item = T> {
    data.as_chunks::<N>().0.iter().map(move |bytes| read(*bytes))
}

/// Appends little-endian numbers; none for complex types, which are refused before.
fn floats(dtype: DType, data: &[u8], values: &mut Vec<f32>) {
    match dtype {
        DType::Bool => values.extend(data.iter().map(|byte| f32::from(u8::from(*byte != 0)))),
        DType::Float16 => values.extend(each(data, |it| f16::from_le_bytes(it).to_f32())),
        DType::BFloat16 => values.extend(each(data, |it| bf16::from_le_bytes(it).to_f32())),
        DType::Float32 => values.extend(each(data, f32::from_le_bytes)),
        DType::Float64 => values.extend(each(data, |it| f64::from_le_bytes(it) as f32)),
        _ => values.extend(integers(dtype, data).into_iter().map(|value| value as f32)),
    }
}

/// Returns little-endian integers; none for other types.
fn integers(dtype: DType, data: &[u8]) -> Vec<i128> {
    match dtype {
        DType::Int8 => each(data, |it| i8::from_le_bytes(it).into()).collect(),
        DType::Int16 => each(data, |it| i16::from_le_bytes(it).into()).collect(),
        DType::Int32 => each(data, |it| i32::from_le_bytes(it).into()).collect(),
        DType::Int64 => each(data, |it| i64::from_le_bytes(it).into()).collect(),
        DType::UInt8 => each(data, |it| u8::from_le_bytes(it).into()).collect(),
        DType::UInt16 => each(data, |it| u16::from_le_bytes(it).into()).collect(),
        DType::UInt32 => each(data, |it| u32::from_le_bytes(it).into()).collect(),
        DType::UInt64 => each(data, |it| u64::from_le_bytes(it).into()).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use serde_json::{Value, json};

    #[expect(clippy::needless_pass_by_value, reason = "callers pass literals")]
    fn job(source: Value, layer: Value) -> Result<Job, JobError> {
        let spec = json!({
            "source": { "buffer": source },
            "model": {
                "inputs": [{ "field": "mask", "dim": 4 }],
                "layers": [layer, { "dense": 1 }],
                "loss": { "kind": "Mse", "target": "score" },
            },
            "optimizer": { "rate": 0.01 },
            "batch": 64,
            "steps": 10,
        });
        Job::new(&serde_json::from_value(spec).unwrap())
    }

    fn plan(source: Value, layer: Value) -> BufferPlan {
        job(source, layer).unwrap().buffer().unwrap().clone()
    }

    fn dense() -> Value {
        json!({ "dense": 8 })
    }

    fn schema(fields: &[(&str, DType, &[u32], bool)]) -> Schema {
        let field = |(name, dtype, shape, jagged): &(&str, DType, &[u32], bool)| Field {
            name: (*name).into(),
            dtype: *dtype,
            shape: shape.to_vec(),
            jagged: *jagged,
        };
        Schema::new(fields.iter().map(field).collect()).unwrap()
    }

    #[test]
    fn settings_have_the_documented_defaults_and_errors_name_field_value_and_what_is_allowed() {
        let default = plan(json!({ "name": "train" }), dense());
        assert_eq!(default.prioritized, Some((0.6, Beta { start: 0.4, end: 1.0, steps: 10 })));
        assert_eq!((default.updates_priorities, default.min_size), (true, 64));
        assert_eq!(default.fields, ["mask".to_owned(), "score".to_owned()]);
        let uniform = plan(json!({ "name": "train", "sampler": "Uniform", "minSize": 3 }), dense());
        assert_eq!((uniform.prioritized, uniform.updates_priorities, uniform.min_size), (None, false, 3));
        let beta = json!({ "name": "train", "alpha": 0.5, "beta": { "start": 0.2, "end": 0.9, "steps": 4 } });
        assert_eq!(plan(beta, dense()).prioritized, Some((0.5, Beta { start: 0.2, end: 0.9, steps: 4 })));
        let refused = |source| job(source, dense()).unwrap_err().to_string();
        let text = refused(json!({ "name": "train", "fields": { "masks": "obs" } }));
        let expected = "spec.replay.source.buffer.fields is masks; allowed: names that the model uses: mask, score";
        assert_eq!(text, expected);
        let text = refused(json!({ "name": "train", "sampler": "Uniform", "alpha": 0.5 }));
        assert_eq!(text, "spec.replay.source.buffer.sampler is Uniform with alpha; allowed: Prioritized with it");
    }

    #[test]
    fn schema_that_does_not_fit_is_refused_with_type_and_shape_of_both_sides() {
        use DType::{Complex64, Float32, Int32, UInt16};
        let mapped = plan(json!({ "name": "train", "fields": { "mask": "obs" } }), dense());
        let score: (&str, DType, &[u32], bool) = ("score", Float32, &[], false);
        for obs in [("obs", Float32, &[4][..], false), ("obs", UInt16, &[], true)] {
            mapped.fit(&schema(&[obs, score])).unwrap();
        }
        let refused = |fields: &[_]| mapped.fit(&schema(fields)).unwrap_err().to_string();
        assert_eq!(
            refused(&[("obs", Float32, &[5], false), score]),
            "spec.replay.model.inputs[0].field is mask (field obs) number[4] or integer[*]; allowed: what buffer train has, \
             obs float32[5]"
        );
        assert!(refused(&[("obs", Float32, &[], true), score]).contains("obs float32[*]"));
        assert_eq!(
            refused(&[("obs", Int32, &[4], false), ("score", Complex64, &[], false)]),
            "spec.replay.model.loss.target is score number[]; allowed: what buffer train has, score complex64[]"
        );
        assert_eq!(
            refused(&[("mask", Int32, &[4], false), score]),
            "spec.replay.model.inputs[0].field is mask (field obs) number[4] or integer[*]; allowed: a field of buffer train: \
             mask int32[4], score float32[]"
        );
        // A model that reads feature numbers needs them.
        let bag = plan(json!({ "name": "train" }), json!({ "featureBag": 8 }));
        bag.fit(&schema(&[("mask", Int32, &[], true), score])).unwrap();
        let text = bag.fit(&schema(&[("mask", Float32, &[4], false), score])).unwrap_err().to_string();
        assert!(text.contains("mask integer[*]; allowed: what buffer train has, mask float32[4]"), "{text}");
    }

    #[test]
    fn items_become_rows_in_the_order_of_the_draws_with_their_weights() {
        let plan = plan(json!({ "name": "train" }), dense());
        let targets: Vec<u8> = [1.0_f64, 2.0, 3.0].iter().flat_map(|it| it.to_le_bytes()).collect();
        let target = ColumnView { field: "score", dtype: DType::Float64, shape: &[], rows: None, data: &targets };
        let features: Vec<u8> = [0_u16, 3, 2].iter().flat_map(|it| it.to_le_bytes()).collect();
        let input =
            ColumnView { field: "mask", dtype: DType::UInt16, shape: &[], rows: Some(&[2, 0, 1]), data: &features };
        let items = DrawnItems { input, target, weights: &[0.1, 0.2, 0.3], order: &[2, 0] };
        let rows = plan.rows(&items).unwrap();
        assert_eq!(rows.dense, [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]);
        assert_eq!((&rows.targets[..], &rows.weights[..]), (&[3.0, 1.0][..], &[0.3, 0.1][..]));
        assert_eq!(rows.labeled(0).unwrap().weights, Some(&[0.3, 0.1][..]));
        let bytes = [1_u8, 0, 0, 1, 0, 1, 1, 0, 7, 7, 7, 7];
        let input = ColumnView { field: "mask", dtype: DType::UInt8, shape: &[4], rows: None, data: &bytes };
        let rows = plan.rows(&DrawnItems { input, weights: &[], ..items }).unwrap();
        assert_eq!((&rows.dense[..4], rows.weights.len()), (&[7.0; 4][..], 0));
        let out_of_range: Vec<u8> = [0_u16, 4, 2].iter().flat_map(|it| it.to_le_bytes()).collect();
        let input = ColumnView { data: &out_of_range, ..items.input };
        let error = plan.rows(&DrawnItems { input, ..items }).unwrap_err();
        assert_eq!((error.position, &*error.text), (Some(0), "field mask: feature 4 is not allowed; allowed: 0 to 3"));
    }

    #[test]
    fn rows_are_the_same_draws_for_any_number_of_members() {
        let job = job(json!({ "name": "train" }), dense()).unwrap();
        for batch in [0, 7] {
            let whole = job.draws(0, batch, &(0..64));
            let mut sorted = whole.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..64).collect::<Vec<_>>(), "every draw is one row");
            for members in 1..6 {
                let parts = (0..members).flat_map(|rank| job.draws(0, batch, &job.part(rank, members).0));
                assert_eq!(parts.collect::<Vec<_>>(), whole);
            }
        }
        assert_ne!(job.draws(0, 0, &(0..64)), job.draws(0, 1, &(0..64)));
    }

    #[test]
    fn priorities_are_errors_and_an_item_has_one() {
        let (handles, priorities) = priorities(&[7, 8, 7, 9], &[0.5, -0.25, 0.125, f32::NAN]);
        assert_eq!((handles, priorities), (vec![7, 8], vec![0.126, 0.251]));
    }
}
