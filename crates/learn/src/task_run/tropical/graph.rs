//! A weighted graph: cycle mean, closure, power.
//!
//! Stage 0 computes the largest cycle mean. The stages after it raise a matrix to a power by repeated squaring; a task computes a block of
//! rows of the result and of the square. The closure is the power n - 1 of the matrix with 0 on its diagonal; it exists if no cycle gains.

use super::{Findings, Section, Workload};
use crate::task_run::accelerated::product_on_devices;
use crate::task_run::fit::failed;
use crate::task_run::samples::file_name;
use crate::task_run::wire::{decode, encode, get_f32, put_f32};
use crate::task_run::{StageResults, Task, TaskContext, TaskError};
use engram_api::{Graph, GraphSemiring};
use engram_tropical::{Matrix, Semiring, cycle_mean};
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// Most nodes: two matrices fit into the input of a task.
const MAX_NODES: usize = 512;
/// Largest weight: powers up to 1,000,000 of it are finite.
const MAX_WEIGHT: f32 = 1e30;
/// Rows of a task.
const ROWS: usize = 64;
/// Most nodes whose matrix the report shows.
const SHOWN: usize = 16;
/// Cycle means up to this share of the largest weight count as 0: weights are f32.
const ROUNDING: f64 = 1e-6;

pub(super) struct GraphWorkload {
    settings: Graph,
    /// Name of the file.
    name: String,
    /// Weights for the maximum: negated where the minimum is asked for.
    weights: Matrix,
}

/// The power so far, the current square, and the exponent that is left.
struct Squaring {
    result: Matrix,
    square: Matrix,
    left: u32,
}

impl GraphWorkload {
    pub(super) fn new(settings: &Graph, file: Option<&[u8]>) -> Result<Self, TaskError> {
        let missing = || TaskError::Invalid("spec.tropical.graph.file: the content of the file is missing".to_owned());
        let name = file_name(&settings.file);
        let weights = parse(file.ok_or_else(missing)?, &name, settings.semiring)?;
        Ok(Self { settings: settings.clone(), name, weights })
    }

    fn nodes(&self) -> usize {
        self.weights.rows()
    }

    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let nodes = self.nodes();
        (0..nodes).step_by(ROWS).map(move |start| start..(start + ROWS).min(nodes))
    }

    /// Returns the matrix to raise and the exponent; none if there is no closure.
    fn start(&self, mean: Option<f64>) -> Option<Squaring> {
        let nodes = self.nodes();
        let (square, left) = match self.settings.power {
            Some(power) => (self.weights.clone(), power),
            None if self.gains(mean) => return None,
            None => {
                let mut entries = self.weights.entries().to_vec();
                (0..nodes).for_each(|it| entries[it * nodes + it] = entries[it * nodes + it].max(0.0));
                let matrix = Matrix::new("weights", nodes, nodes, entries).expect("the entries were checked");
                (matrix, (nodes as u32 - 1).max(1))
            }
        };
        Some(Squaring { result: Matrix::identity(nodes), square, left })
    }

    /// Returns whether walks can gain without bound.
    fn gains(&self, mean: Option<f64>) -> bool {
        let finite = self.weights.entries().iter().filter(|it| it.is_finite());
        let largest = finite.fold(0.0_f32, |largest, weight| largest.max(weight.abs()));
        mean.is_some_and(|mean| mean > ROUNDING * f64::from(largest))
    }

    /// Returns the state after the stages so far.
    fn state(&self, results: &[StageResults]) -> Result<Option<Squaring>, TaskError> {
        let Some((first, rest)) = results.split_first() else { return Ok(None) };
        let Some(mut state) = self.start(decode(&first[0])?) else { return Ok(None) };
        for stage in rest {
            let (mut result, mut square) = (Vec::new(), Vec::new());
            for (block, bytes) in self.blocks().zip(stage) {
                let numbers = get_f32(bytes);
                let mut parts = numbers.chunks_exact(block.len() * self.nodes());
                if state.left & 1 == 1 {
                    result.extend_from_slice(parts.next().unwrap_or_default());
                }
                if state.left > 1 {
                    square.extend_from_slice(parts.next().unwrap_or_default());
                }
            }
            let matrix = |entries| Matrix::new("product", self.nodes(), self.nodes(), entries).map_err(failed);
            if state.left & 1 == 1 {
                state.result = matrix(result)?;
            }
            if state.left > 1 {
                state.square = matrix(square)?;
            }
            state.left >>= 1;
        }
        Ok(Some(state))
    }
}

impl Workload for GraphWorkload {
    fn plan(&self, results: &[StageResults]) -> Result<Vec<Task>, TaskError> {
        let nodes = self.nodes() as u64;
        if results.is_empty() {
            return Ok(vec![Task { name: "graph: cycle mean".to_owned(), input: Vec::new(), cost: nodes.pow(3) }]);
        }
        let Some(state) = self.state(results)?.filter(|state| state.left > 0) else { return Ok(Vec::new()) };
        let task = |block: Range<usize>| {
            let mut input = [block.start as u32, block.end as u32, state.left].map(u32::to_le_bytes).concat();
            put_f32(&mut input, state.result.entries());
            put_f32(&mut input, state.square.entries());
            let name = format!("graph: product {}, rows {} to {}", results.len(), block.start, block.end - 1);
            Task { name, input, cost: block.len() as u64 * nodes * nodes }
        };
        Ok(self.blocks().map(task).collect())
    }

    fn execute(&self, input: &[u8], context: &dyn TaskContext) -> Result<Vec<u8>, TaskError> {
        if input.is_empty() {
            return Ok(encode(&cycle_mean(&self.weights).map_err(failed)?));
        }
        let nodes = self.nodes();
        let damaged = || TaskError::Failed("failed to decode the input of a task".to_owned());
        let (head, numbers) = input.split_at_checked(12).ok_or_else(damaged)?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
        let (rows, left) = (word(0)..word(4), word(8));
        let numbers = get_f32(numbers);
        let (result, square) = numbers.split_at_checked(nodes * nodes).ok_or_else(damaged)?;
        let matrix = |entries: &[f32]| Matrix::new("matrix", nodes, nodes, entries.to_vec()).map_err(failed);
        let (result, square) = (matrix(result)?, matrix(square)?);
        let mut bytes = Vec::new();
        for (left, _) in [(&result, left & 1 == 1), (&square, left > 1)].into_iter().filter(|(_, wanted)| *wanted) {
            let rows = product_on_devices(left, &square, rows.clone(), context)?;
            put_f32(&mut bytes, rows.entries());
        }
        Ok(bytes)
    }

    fn finish(&self, results: &[StageResults], report: &mut Findings) -> Result<(), TaskError> {
        let minimum = self.settings.semiring == GraphSemiring::MinPlus;
        let mean: Option<f64> = decode(&results[0][0])?;
        let shown = mean.map(|mean| if minimum { 0.0 - mean } else { mean });
        let (best, nodes) = (if minimum { "smallest" } else { "largest" }, self.nodes());
        let cycle = shown.map_or("no cycle".to_owned(), |mean| format!("a {best} cycle mean of {mean:.6}"));
        report.verdict(true, format!("The graph of {nodes} nodes in {} has {cycle}.", self.name));
        if let Some(mean) = shown {
            report.metric("graph_cycle_mean", mean);
            report.tile("cycle mean", format!("{mean:.6}"), "weight per edge of the best cycle");
        }
        let Some(state) = self.state(results)? else {
            report
                .verdict(false, "There is no closure: a walk around the best cycle improves without bound.".to_owned());
            return Ok(());
        };
        let semiring = if minimum { Semiring::MinPlus } else { Semiring::MaxPlus };
        self.matrix(&state.result.negated(semiring), report);
        Ok(())
    }
}

impl GraphWorkload {
    fn matrix(&self, matrix: &Matrix, report: &mut Findings) {
        let nodes = self.nodes();
        let pairs = matrix.entries().iter().filter(|entry| entry.is_finite()).count();
        let walks = self.settings.power.map_or("walks of any length".to_owned(), |it| format!("walks of {it} edges"));
        let total = nodes * nodes;
        report.verdict(true, format!("{pairs} of {total} pairs of nodes are connected by {walks}."));
        report.metric("graph_connected_pairs", pairs as f64);
        let mut bytes = Vec::new();
        put_f32(&mut bytes, matrix.entries());
        report.output("graphDigest", format!("{:016x}", xxh3_64(&bytes)));
        if nodes <= SHOWN {
            let cell = |entry: &f32| if entry.is_finite() { format!("{entry}") } else { "\u{b7}".to_owned() };
            let row = |node: usize| {
                [node.to_string()].into_iter().chain(matrix.row(node).iter().map(cell)).collect::<Vec<String>>()
            };
            let header = ["from".to_owned()].into_iter().chain((0..nodes).map(|node| node.to_string())).collect();
            report.section(Section {
                title: "Best walks".to_owned(),
                caption: format!("Weight of the best of the {walks} from each node to each other one."),
                chart: None,
                table: Some((header, (0..nodes).map(row).collect())),
            });
        }
    }
}

/// Parses a square matrix; missing edges become negative infinity, weights are negated for the minimum.
fn parse(content: &[u8], path: &str, semiring: GraphSemiring) -> Result<Matrix, TaskError> {
    let mut reader =
        csv::ReaderBuilder::new().has_headers(false).trim(csv::Trim::All).flexible(true).from_reader(content);
    let (mut entries, mut nodes, mut rows) = (Vec::new(), None, 0);
    for row in reader.records() {
        let row = row.map_err(|error| TaskError::Invalid(format!("{path}: {error}")))?;
        let line = row.position().map_or(0, csv::Position::line);
        let columns = *nodes.get_or_insert(row.len());
        if columns != row.len() || columns > MAX_NODES {
            let found = row.len();
            let allowed = if columns > MAX_NODES { format!("at most {MAX_NODES}") } else { columns.to_string() };
            return Err(TaskError::Invalid(format!("{path}, line {line}: {found} columns; allowed: {allowed}")));
        }
        for (column, cell) in row.iter().enumerate() {
            entries.push(weight(cell, semiring).ok_or_else(|| {
                let missing = if semiring == GraphSemiring::MaxPlus { "-inf" } else { "inf" };
                TaskError::Invalid(format!(
                    "{path}, line {line}, column {}: {cell:?} is not allowed; allowed: numbers from -1e30 to 1e30, and {missing} or nothing \
                     for a missing edge",
                    column + 1
                ))
            })?);
        }
        rows += 1;
    }
    let nodes = nodes.unwrap_or(0);
    if rows != nodes || nodes == 0 {
        return Err(TaskError::Invalid(format!("{path}: {rows} rows of {nodes} columns; allowed: a square matrix")));
    }
    Matrix::new("weights", nodes, nodes, entries).map_err(failed)
}

fn weight(cell: &str, semiring: GraphSemiring) -> Option<f32> {
    if cell.is_empty() {
        return Some(f32::NEG_INFINITY);
    }
    let sign = if semiring == GraphSemiring::MaxPlus { 1.0 } else { -1.0 };
    let value = sign * cell.parse::<f32>().ok()?;
    (value == f32::NEG_INFINITY || value.abs() <= MAX_WEIGHT).then_some(value)
}
