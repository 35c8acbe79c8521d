//! Pattern halo exchange: a grid in regions of rows, which exchange their borders before every step.
//!
//! A run advances in rounds of several steps. The cells change only at the end of a round, behind a barrier that either all regions pass or
//! none; a device that is removed meanwhile costs a round, which the others repeat with new regions.

use crate::barrier::{Barrier, BarrierError, Event};
use crate::{ComputeDevice, Error, shares};
use engram_kernels::partitioner::{Resource, Strategy};
use engram_kernels::profiler::Kind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Cells in rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid<T> {
    columns: usize,
    cells: Vec<T>,
}

impl<T: Copy> Grid<T> {
    /// Creates a grid of whole rows.
    ///
    /// # Errors
    /// No columns, no rows, or a last row that is not complete.
    pub fn new(columns: usize, cells: Vec<T>) -> Result<Self, Error> {
        if columns == 0 || cells.is_empty() || !cells.len().is_multiple_of(columns) {
            let value = format!("{} cells in {columns} columns", cells.len());
            return Err(Error::argument("grid", value, "whole rows, at least one"));
        }
        Ok(Self { columns, cells })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.cells.len() / self.columns
    }

    /// Returns the number of columns.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the cells, row by row.
    pub fn cells(&self) -> &[T] {
        &self.cells
    }
}

/// What a step does to a row; it reads the row and its two neighbours.
pub trait Rule<T>: Sync {
    /// Returns the name of the kernel.
    fn name(&self) -> &'static str;

    /// Returns the value of the cells above the first row and below the last one; `None`: the first row follows the last one.
    fn outside(&self) -> Option<T>;

    /// Computes a row of the next step.
    fn row(&self, above: &[T], row: &[T], below: &[T], next: &mut [T]);
}

/// How a grid is advanced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridRun {
    /// Number of steps.
    pub steps: usize,
    /// Steps of a round, at least 1: what a removed device costs at most.
    pub steps_per_round: usize,
    /// How rows are divided.
    pub strategy: Strategy,
    /// Time limit.
    pub limit: Duration,
}

/// Why a region has not completed a round.
enum Stop {
    /// Its device was removed.
    Removed,
    /// Another region has stopped, or the deadline passed.
    Wait(BarrierError),
}

impl From<BarrierError> for Stop {
    fn from(error: BarrierError) -> Self {
        Self::Wait(error)
    }
}

/// The borders that a region publishes, by the parity of the step: a region is at most one step ahead of its neighbours.
struct Borders<T> {
    first_row: [Event<Vec<T>>; 2],
    last_row: [Event<Vec<T>>; 2],
}

impl<T> Default for Borders<T> {
    fn default() -> Self {
        Self { first_row: Default::default(), last_row: Default::default() }
    }
}

/// One round.
struct Round<'a, T, R> {
    rule: &'a R,
    columns: usize,
    steps: usize,
    deadline: Instant,
    borders: Vec<Borders<T>>,
    end: Barrier,
}

/// Advances a grid by `run.steps` steps. Returns the number of rounds that were repeated because a device was removed.
///
/// # Errors
/// A rule panics, all devices are removed, or the time limit passes.
pub fn run_grid<T: Copy + Send + Sync, R: Rule<T>>(
    devices: &[ComputeDevice],
    grid: &mut Grid<T>,
    rule: &R,
    run: &GridRun,
) -> Result<usize, Error> {
    if run.steps_per_round == 0 {
        return Err(Error::argument("steps_per_round", 0, "at least 1 step"));
    }
    let deadline = Instant::now() + run.limit;
    let (mut done, mut repeated) = (0, 0);
    while done < run.steps {
        let steps = run.steps_per_round.min(run.steps - done);
        let regions = regions(devices, grid, rule.name(), run.strategy)?;
        let round = Round::new(rule, grid.columns, steps, regions.len(), deadline);
        match round.execute(&regions, &mut grid.cells) {
            Ok(()) => done += steps,
            Err(Stop::Removed) => repeated += 1,
            Err(Stop::Wait(BarrierError::Deadline)) => {
                return Err(Error::Deadline { what: rule.name(), limit: run.limit });
            }
            Err(Stop::Wait(BarrierError::Failed(message))) => {
                return Err(Error::Kernel { what: rule.name(), device: "of a region".to_owned(), message });
            }
        }
    }
    Ok(repeated)
}

/// Returns the devices in use with the number of their rows.
fn regions<'a, T: Copy>(
    devices: &'a [ComputeDevice],
    grid: &Grid<T>,
    what: &'static str,
    strategy: Strategy,
) -> Result<Vec<(&'a ComputeDevice, usize)>, Error> {
    let resources: Vec<Resource> = devices.iter().map(ComputeDevice::resource).collect();
    if !resources.iter().any(|resource| resource.healthy) {
        return Err(Error::NoDevice { what, devices: devices.len() });
    }
    // A region holds its rows twice.
    let bytes = 2 * (grid.columns * size_of::<T>()) as u64;
    let rows = shares(grid.rows(), bytes, strategy, &resources)?;
    Ok(devices.iter().zip(rows).filter(|(_, rows)| *rows > 0).collect())
}

impl<'a, T: Copy + Send + Sync, R: Rule<T>> Round<'a, T, R> {
    fn new(rule: &'a R, columns: usize, steps: usize, regions: usize, deadline: Instant) -> Self {
        let borders = (0..regions).map(|_| Borders::default()).collect();
        Self { rule, columns, steps, deadline, borders, end: Barrier::new(regions) }
    }

    /// Advances all regions, or none.
    fn execute(&self, regions: &[(&ComputeDevice, usize)], cells: &mut [T]) -> Result<(), Stop> {
        let mut rest = cells;
        let mut results: Vec<Result<(), Stop>> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (index, &(device, rows)) in regions.iter().enumerate() {
                let (own, others) = std::mem::take(&mut rest).split_at_mut(rows * self.columns);
                rest = others;
                threads.push(scope.spawn(move || self.region(index, device, own)));
            }
            let panicked = || Err(Stop::Wait(BarrierError::Failed("the rule panicked".to_owned())));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
        });
        // The cause first: the others only learned of it.
        results.sort_by_key(|result| match result {
            Err(Stop::Removed) => 0,
            Err(Stop::Wait(BarrierError::Deadline)) => 1,
            Err(Stop::Wait(BarrierError::Failed(_))) => 2,
            Ok(()) => 3,
        });
        results.swap_remove(0)
    }

    /// Advances one region, and stops the others if that fails.
    fn region(&self, index: usize, device: &ComputeDevice, own: &mut [T]) -> Result<(), Stop> {
        let result = catch_unwind(AssertUnwindSafe(|| self.advance(index, device, own)));
        let result = result.unwrap_or_else(|_| Err(Stop::Wait(BarrierError::Failed("the rule panicked".to_owned()))));
        if let Err(stop) = &result {
            let message = match stop {
                Stop::Removed => format!("device {} was removed", device.name()),
                Stop::Wait(error) => error.to_string(),
            };
            let events = self.borders.iter().flat_map(|it| it.first_row.iter().chain(&it.last_row));
            events.for_each(|event| event.fail(message.clone()));
            self.end.fail(message);
        }
        result
    }

    fn advance(&self, index: usize, device: &ComputeDevice, own: &mut [T]) -> Result<(), Stop> {
        let count = self.borders.len();
        let outside: Option<Vec<T>> = self.rule.outside().map(|value| vec![value; self.columns]);
        let (mut rows, mut next) = (own.to_vec(), own.to_vec());
        for step in 0..self.steps as u64 {
            let parity = (step % 2) as usize;
            let borders = &self.borders[index];
            borders.first_row[parity].publish(step, rows[..self.columns].to_vec());
            borders.last_row[parity].publish(step, rows[rows.len() - self.columns..].to_vec());
            let (above, below) = device.recorder().span(Kind::Wait, "halo", || {
                let above = match &outside {
                    Some(outside) if index == 0 => Ok(outside.clone()),
                    _ => self.borders[(index + count - 1) % count].last_row[parity].wait(step, self.deadline),
                };
                let below = match &outside {
                    Some(outside) if index + 1 == count => Ok(outside.clone()),
                    _ => self.borders[(index + 1) % count].first_row[parity].wait(step, self.deadline),
                };
                (above, below)
            });
            let (above, below) = (above?, below?);
            let step = || step_rows(self.rule, [&above, &rows, &below], &mut next);
            device.execute(self.rule.name(), step).ok_or(Stop::Removed)?;
            std::mem::swap(&mut rows, &mut next);
        }
        device.recorder().span(Kind::Wait, "end of round", || self.end.wait(self.deadline))?;
        own.copy_from_slice(&rows);
        Ok(())
    }
}

/// Computes the next step of the rows between two borders.
fn step_rows<T, R: Rule<T>>(rule: &R, [above, rows, below]: [&[T]; 3], next: &mut [T]) {
    let columns = above.len();
    let count = rows.len() / columns;
    for (index, next) in next.chunks_exact_mut(columns).enumerate() {
        let at = |row: usize| &rows[row * columns..(row + 1) * columns];
        let above = if index == 0 { above } else { at(index - 1) };
        let below = if index + 1 == count { below } else { at(index + 1) };
        rule.row(above, at(index), below, next);
    }
}
