//! Viterbi decoding by max-plus products of blocks.
//!
//! Stage 0 multiplies the step matrices of each block; the value of every state at every block border follows from the products. Stage 1
//! decodes each group of blocks from those values and finds, for each last state of the group, the state it was entered from. Stage 2
//! returns the states of each group once its last state is known. Ties go to the lowest predecessor, as in the sequential algorithm, which
//! is a task of stage 0 as well: both paths must be equal.

use super::chain::Chain;
use super::{Findings, Section, Workload};
use crate::report::Ink;
use crate::task_run::accelerated::product_on_devices;
use crate::task_run::page::Chart;
use crate::task_run::wire::{decode, encode, get_f32, get_f64, put_f32, put_f64};
use crate::task_run::{MAX_RESULT_BYTES, StageResults, Task, TaskContext, TaskError};
use engram_api::DecodeSource;
use engram_tropical::Matrix;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// Groups of blocks: enough for the workers of a large cluster.
const GROUPS: usize = 32;
/// Largest size of all products together, which the record of the run keeps.
const MAX_PRODUCTS: usize = 48 << 20;
/// Steps that the chart of states shows.
const SHOWN: usize = 240;

const PRODUCTS: u8 = 0;
const SEQUENTIAL: u8 = 1;
const ENTRIES: u8 = 2;
const STATES: u8 = 3;

/// Result of the sequential algorithm.
#[derive(Serialize, Deserialize)]
pub(super) struct Sequential {
    score: f64,
    digest: u64,
}

pub(super) struct DecodeWorkload {
    chain: Chain,
    /// Steps of each block; step t leads to observation t + 1.
    blocks: Vec<Range<usize>>,
    /// Blocks of each group.
    groups: Vec<Range<usize>>,
}

impl DecodeWorkload {
    pub(super) fn new(source: &DecodeSource) -> Result<Self, TaskError> {
        let chain = Chain::new(source)?;
        let steps = chain.observations.len() - 1;
        let length = chain.exact_steps();
        let blocks: Vec<Range<usize>> =
            (0..steps).step_by(length).map(|start| start..(start + length).min(steps)).collect();
        let block_bytes = chain.states * chain.states * 4;
        let bytes = blocks.len() * block_bytes;
        if bytes > MAX_PRODUCTS {
            return Err(TaskError::Invalid(format!(
                "spec.tropical.decode.source: {} blocks of {} x {} values are {bytes} bytes; allowed: {MAX_PRODUCTS}; use fewer states \
                 or observations, or larger probabilities",
                blocks.len(),
                chain.states,
                chain.states
            )));
        }
        // One byte less than the limit: the run adds the number of the workload.
        let count = blocks.len().min(GROUPS).max(bytes.div_ceil(MAX_RESULT_BYTES - 1 - block_bytes));
        let border = |group: usize| group * blocks.len() / count.max(1);
        let groups = (0..count).map(|group| border(group)..border(group + 1)).collect();
        Ok(Self { chain, blocks, groups })
    }

    fn steps_of(&self, group: usize) -> Range<usize> {
        let blocks = &self.groups[group];
        self.blocks[blocks.start].start..self.blocks[blocks.end - 1].end
    }

    /// Multiplies the step matrices of each block of a group.
    fn products(&self, group: usize, context: &dyn TaskContext) -> Result<Vec<u8>, TaskError> {
        let mut bytes = Vec::new();
        for block in self.groups[group].clone() {
            let mut matrix = Matrix::identity(self.chain.states);
            for step in self.blocks[block].clone() {
                let symbol = self.chain.observations[step + 1] as usize;
                matrix = product_on_devices(&matrix, &self.chain.steps[symbol], 0..self.chain.states, context)?;
            }
            if context.stop().is_set() {
                return Err(TaskError::Stopped);
            }
            put_f32(&mut bytes, matrix.entries());
        }
        Ok(bytes)
    }

    /// Returns the values of all states before each group, and after the last one.
    fn borders(&self, products: &[Vec<u8>]) -> Vec<Vec<f64>> {
        let states = self.chain.states;
        let mut borders = vec![self.chain.start()];
        for group in products {
            let mut values = borders.last().expect("it starts with the first values").clone();
            for block in get_f32(group).chunks_exact(states * states) {
                let entry = |from: usize, to: usize| values[from] + f64::from(block[from * states + to]);
                let largest = |to: usize| (0..states).map(|from| entry(from, to)).fold(f64::NEG_INFINITY, f64::max);
                values = (0..states).map(largest).collect();
            }
            borders.push(values);
        }
        borders
    }

    /// Runs the sequential algorithm over some steps. Returns the last values and the back pointers, steps x states.
    fn forward(&self, mut values: Vec<f64>, steps: Range<usize>) -> Result<(Vec<f64>, Vec<u16>), TaskError> {
        let states = self.chain.states;
        let mut pointers = Vec::with_capacity(steps.len() * states);
        for step in steps {
            let matrix = &self.chain.steps[self.chain.observations[step + 1] as usize];
            let mut next = vec![f64::NEG_INFINITY; states];
            let mut from = vec![0_u16; states];
            for (state, &value) in values.iter().enumerate() {
                for (to, &edge) in matrix.row(state).iter().enumerate() {
                    let candidate = value + f64::from(edge);
                    if candidate > next[to] {
                        (next[to], from[to]) = (candidate, state as u16);
                    }
                }
            }
            reachable(&next, step + 1)?;
            pointers.extend_from_slice(&from);
            values = next;
        }
        Ok((values, pointers))
    }

    /// Follows back pointers from the last state. Returns the states after each step, and the state before the first one.
    fn path(&self, pointers: &[u16], last: u16) -> (Vec<u16>, u16) {
        let mut path = vec![last];
        for row in pointers.chunks_exact(self.chain.states).rev() {
            path.push(row[*path.last().expect("it starts with the last state") as usize]);
        }
        path.reverse();
        let entry = path.remove(0);
        (path, entry)
    }

    fn sequential(&self) -> Result<Sequential, TaskError> {
        let start = self.chain.start();
        reachable(&start, 0)?;
        let (values, pointers) = self.forward(start, 0..self.chain.observations.len() - 1)?;
        let last = best_state(&values);
        let (path, first) = self.path(&pointers, last);
        Ok(Sequential { score: values[last as usize], digest: digest(&[vec![first], path].concat()) })
    }

    /// Returns the last state of each group, followed back from the best state at the end.
    fn last_states(&self, results: &[StageResults]) -> (u16, Vec<u16>) {
        let borders = self.borders(&results[0][..self.groups.len()]);
        let mut state = best_state(borders.last().expect("there is at least the start"));
        let mut last = vec![0; self.groups.len()];
        for group in (0..self.groups.len()).rev() {
            last[group] = state;
            state = states_of(&results[1][group])[state as usize];
        }
        (state, last)
    }

    /// Returns path and score, and what the sequential algorithm found.
    pub(super) fn result(&self, results: &[StageResults]) -> Result<(Vec<u16>, f64, Sequential), TaskError> {
        let sequential: Sequential = decode(&results[0][self.groups.len()])?;
        let values = self.borders(&results[0][..self.groups.len()]).pop().expect("there is at least the start");
        let score = values[best_state(&values) as usize];
        if self.groups.is_empty() {
            return Ok((vec![best_state(&values)], score, sequential));
        }
        let (first, _) = self.last_states(results);
        let path = results[2].iter().flat_map(|states| states_of(states));
        Ok(([first].into_iter().chain(path).collect(), score, sequential))
    }
}

impl Workload for DecodeWorkload {
    fn plan(&self, results: &[StageResults]) -> Result<Vec<Task>, TaskError> {
        let states = self.chain.states as u64;
        let task = |verb: &str, group: usize, kind: u8, rest: &[u8], power: u32| Task {
            name: format!("decode: {verb} of group {group}"),
            input: [&[kind][..], &(group as u32).to_le_bytes(), rest].concat(),
            cost: self.steps_of(group).len() as u64 * states.pow(power),
        };
        let groups = 0..self.groups.len();
        Ok(match results.len() {
            0 => {
                let cost = self.chain.observations.len() as u64 * states * states;
                let sequential =
                    Task { name: "decode: sequential algorithm".to_owned(), input: vec![SEQUENTIAL; 5], cost };
                groups.map(|group| task("products", group, PRODUCTS, &[], 3)).chain([sequential]).collect()
            }
            1 if !self.groups.is_empty() => {
                let borders = self.borders(&results[0][..self.groups.len()]);
                groups.map(|group| task("entries", group, ENTRIES, &numbers(&borders[group]), 2)).collect()
            }
            2 => {
                let borders = self.borders(&results[0][..self.groups.len()]);
                let (_, last) = self.last_states(results);
                let rest = |group: usize| [&last[group].to_le_bytes()[..], &numbers(&borders[group])].concat();
                groups.map(|group| task("states", group, STATES, &rest(group), 2)).collect()
            }
            _ => Vec::new(),
        })
    }

    fn execute(&self, input: &[u8], context: &dyn TaskContext) -> Result<Vec<u8>, TaskError> {
        let damaged = || TaskError::Failed("failed to decode the input of a task".to_owned());
        let (head, rest) = input.split_at_checked(5).ok_or_else(damaged)?;
        let group = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if head[0] == SEQUENTIAL {
            return Ok(encode(&self.sequential()?));
        }
        if group >= self.groups.len() {
            return Err(damaged());
        }
        match head[0] {
            PRODUCTS => self.products(group, context),
            ENTRIES => {
                let (_, pointers) = self.forward(get_f64(rest), self.steps_of(group))?;
                let entries = (0..self.chain.states as u16).map(|last| self.path(&pointers, last).1);
                Ok(entries.flat_map(u16::to_le_bytes).collect())
            }
            STATES => {
                let (last, values) = rest.split_at_checked(2).ok_or_else(damaged)?;
                let (_, pointers) = self.forward(get_f64(values), self.steps_of(group))?;
                let (path, _) = self.path(&pointers, u16::from_le_bytes([last[0], last[1]]));
                Ok(path.into_iter().flat_map(u16::to_le_bytes).collect())
            }
            _ => Err(damaged()),
        }
    }

    fn finish(&self, results: &[StageResults], report: &mut Findings) -> Result<(), TaskError> {
        let (path, score, sequential) = self.result(results)?;
        let digest = digest(&path);
        let equal = digest == sequential.digest && score == sequential.score;
        let (observations, states, symbols) = (path.len(), self.chain.states, self.chain.symbols);
        report.verdict(
            equal,
            format!(
                "Decoded {observations} observations of a hidden Markov model with {states} states and {symbols} symbols by max-plus \
                 products of {} blocks: the path {} that of the sequential Viterbi algorithm.",
                self.blocks.len(),
                if equal { "equals" } else { "DIFFERS from" }
            ),
        );
        report.metric("decode_equals_viterbi", f64::from(u8::from(equal)));
        report.metric("decode_log_probability", score);
        report.output("decodeDigest", format!("{digest:016x}"));
        report.tile("log probability", format!("{score:.3}"), "of the decoded path with the observations");
        if let Some(truth) = &self.chain.truth {
            self.accuracy(&path, truth, report);
        }
        report.section(self.section(&path));
        Ok(())
    }
}

impl DecodeWorkload {
    /// Compares the path with the true states, and with the best state of each symbol alone.
    fn accuracy(&self, path: &[u16], truth: &[u32], report: &mut Findings) {
        let likely = |symbol: u32| {
            let values: Vec<f64> =
                (0..self.chain.states).map(|it| f64::from(self.chain.emission.row(it)[symbol as usize])).collect();
            best_state(&values)
        };
        let share = |states: &mut dyn Iterator<Item = u16>| {
            let hits = states.zip(truth).filter(|(state, truth)| u32::from(*state) == **truth).count();
            hits as f64 / truth.len() as f64
        };
        let decoded = share(&mut path.iter().copied());
        let alone = share(&mut self.chain.observations.iter().map(|&symbol| likely(symbol)));
        report.metric("decode_accuracy", decoded);
        report.metric("decode_accuracy_by_symbol_alone", alone);
        let text = format!(
            "The decoded path names {:.1} % of the true states; the likeliest state of each symbol alone names {:.1} %.",
            decoded * 100.0,
            alone * 100.0
        );
        report.verdict(decoded > alone, text);
        report.tile("states named", format!("{:.1} %", decoded * 100.0), "of the true states");
    }

    fn section(&self, path: &[u16]) -> Section {
        let points = |states: &mut dyn Iterator<Item = f64>| {
            // Two points per step draw a staircase.
            let pairs = (0..).zip(states.take(SHOWN));
            pairs.flat_map(|(step, state)| [(f64::from(step), state), (f64::from(step + 1), state)]).collect()
        };
        let mut lines = Vec::new();
        if let Some(truth) = &self.chain.truth {
            lines.push(("true".to_owned(), Ink::Frequent, points(&mut truth.iter().map(|&it| f64::from(it)))));
        }
        lines.push(("decoded".to_owned(), Ink::Memory, points(&mut path.iter().map(|&it| f64::from(it)))));
        Section {
            title: "Decoded states".to_owned(),
            caption: format!("State after each of the first {} observations.", path.len().min(SHOWN)),
            chart: Some(Chart { lines, logarithmic: false, x_name: "observation" }),
            table: None,
        }
    }
}

/// Returns the lowest index of the largest value.
fn best_state(values: &[f64]) -> u16 {
    let better = |best: usize, at: usize| if values[at] > values[best] { at } else { best };
    (0..values.len()).reduce(better).unwrap_or(0) as u16
}

fn reachable(values: &[f64], observation: usize) -> Result<(), TaskError> {
    if values.iter().any(|value| value.is_finite()) {
        return Ok(());
    }
    Err(TaskError::Invalid(format!(
        "spec.tropical.decode.source.model.observations[{observation}]: no state is reachable at this observation"
    )))
}

fn numbers(values: &[f64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_f64(&mut bytes, values);
    bytes
}

fn states_of(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|it| u16::from_le_bytes([it[0], it[1]])).collect()
}

fn digest(path: &[u16]) -> u64 {
    xxh3_64(&path.iter().flat_map(|state| state.to_le_bytes()).collect::<Vec<u8>>())
}
