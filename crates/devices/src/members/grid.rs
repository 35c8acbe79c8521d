//! Halo exchange over members: each has a region of rows, and receives the border rows of its neighbours every few steps.
//!
//! With borders of k rows a member advances k steps on its own: a wrong value outside the borders moves one row inward per step, and so never
//! reaches the region. The devices of a member advance the region together with its borders by [`run_grid`].

use super::Member;
use super::exchange::{Exchange, Incoming, Outgoing, Phase, hash};
use crate::{Error, Grid, GridRun, Rule, run_grid, shares};
use bytemuck::Pod;
use engram_kernels::partitioner::{Resource, Strategy};
use std::ops::Range;
use std::time::Duration;

/// A grid at a boundary of its run. Every member has all cells there, so that any member can be lost.
#[derive(Debug, Clone, PartialEq)]
pub struct GridState<T> {
    /// Cells.
    pub grid: Grid<T>,
    /// Steps that the cells have advanced.
    pub steps: usize,
}

/// How a group advances a grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemberGridRun {
    /// Number of steps, those of the state included.
    pub steps: usize,
    /// Steps between two exchanges of borders, and rows of a border, at least 1. A region of fewer rows exchanges more often.
    pub steps_per_exchange: usize,
    /// Steps between two boundaries, at least 1: what a lost member costs at most.
    pub steps_per_boundary: usize,
    /// How rows are divided between members, and between the devices of a member.
    pub strategy: Strategy,
    /// Time limit.
    pub limit: Duration,
}

/// Advances a grid to `run.steps` steps, together with all other members. On return every member has all cells. After an error `state` is
/// that of the last boundary: call again in a new generation, from which members may be missing, and which new ones may have joined with
/// any earlier state.
///
/// # Errors
/// [`Error::Member`] if another member was lost, stalls, or fails; an own error if a rule panics, the devices of this member are removed, or
/// the time limit passes. The transport must be dropped then.
pub fn advance_grid<T: Pod + Send + Sync, R: Rule<T>>(
    member: &mut Member<'_>,
    state: &mut GridState<T>,
    rule: &R,
    run: &MemberGridRun,
) -> Result<(), Error> {
    if run.steps_per_exchange == 0 || run.steps_per_boundary == 0 {
        return Err(Error::argument("steps per exchange and per boundary", 0, "at least 1 step"));
    }
    let mut exchange = Exchange::new(member, rule.name(), run.limit);
    let result = advance_to_end(&mut exchange, state, rule, run);
    exchange.conclude(result)
}

fn advance_to_end<T: Pod + Send + Sync, R: Rule<T>>(
    exchange: &mut Exchange<'_, '_>,
    state: &mut GridState<T>,
    rule: &R,
    run: &MemberGridRun,
) -> Result<(), Error> {
    let (rows, columns) = (state.grid.rows(), state.grid.columns());
    let settings = [run.steps, run.steps_per_exchange, run.steps_per_boundary, run.strategy as usize, rows, columns];
    let settings = hash(settings.into_iter().chain([size_of::<T>()]).map(|it| it as u64));
    let agreed = exchange.agree(settings, [state.steps as u64, exchange.speed(), 0])?;
    catch_up(exchange, state, &agreed.iter().map(|it| it[0] as usize).collect::<Vec<_>>())?;

    let resource = |speed: u64| Resource {
        throughput: Some(speed).filter(|&it| it > 0),
        free_bytes: u64::MAX,
        latency_ns: 0,
        healthy: true,
    };
    let resources: Vec<Resource> = agreed.iter().map(|it| resource(it[1])).collect();
    let bytes_per_row = 2 * (columns * size_of::<T>()) as u64;
    let regions = Regions::new(columns, &shares(rows, bytes_per_row, run.strategy, &resources)?);
    while state.steps < run.steps {
        let steps = run.steps_per_boundary.min(run.steps - state.steps);
        let own = regions.advance_own(exchange, state, rule, run, steps)?;
        state.grid = Grid::new(columns, regions.gather(exchange, state.steps + steps, own)?)?;
        state.steps += steps;
    }
    Ok(())
}

/// Sends the state of the furthest boundary to the members that have not reached it.
fn catch_up<T: Pod>(exchange: &mut Exchange<'_, '_>, state: &mut GridState<T>, steps: &[usize]) -> Result<(), Error> {
    let furthest = steps.iter().copied().max().unwrap_or(0);
    let source = steps.iter().position(|&it| it == furthest).unwrap_or(0);
    if exchange.rank() == source {
        let bytes = bytemuck::cast_slice(state.grid.cells());
        let behind = (0..steps.len()).filter(|&rank| steps[rank] < furthest);
        let messages: Vec<_> = behind.map(|to| Outgoing { to, phase: Phase::State, bytes }).collect();
        return exchange.exchange(0, &messages, &mut []);
    }
    if steps[exchange.rank()] < furthest {
        let mut cells = state.grid.cells().to_vec();
        let bytes = bytemuck::cast_slice_mut(&mut cells);
        exchange.exchange(0, &[], &mut [Incoming { from: source, phase: Phase::State, bytes }])?;
        *state = GridState { grid: Grid::new(state.grid.columns(), cells)?, steps: furthest };
    }
    Ok(())
}

/// The rows of each rank.
struct Regions {
    columns: usize,
    rows: Vec<Range<usize>>,
    /// Ranks with rows, in the order of the rows.
    active: Vec<usize>,
}

impl Regions {
    fn new(columns: usize, counts: &[usize]) -> Self {
        let mut next = 0;
        let region = |count: &usize| {
            next += count;
            next - count..next
        };
        let rows: Vec<Range<usize>> = counts.iter().map(region).collect();
        let active = (0..rows.len()).filter(|&rank| !rows[rank].is_empty()).collect();
        Self { columns, rows, active }
    }

    fn cells_of(&self, rank: usize) -> Range<usize> {
        self.rows[rank].start * self.columns..self.rows[rank].end * self.columns
    }

    /// Returns the ranks above and below the own region; `None` where the grid ends, and without other regions.
    fn neighbours(&self, rank: usize, is_connected: bool) -> [Option<usize>; 2] {
        let count = self.active.len();
        let Some(place) = self.active.iter().position(|&it| it == rank).filter(|_| count > 1) else {
            return [None, None];
        };
        let above = (is_connected || place > 0).then(|| self.active[(place + count - 1) % count]);
        let below = (is_connected || place + 1 < count).then(|| self.active[(place + 1) % count]);
        [above, below]
    }

    /// Returns the own region some steps later; empty without one.
    fn advance_own<T: Pod + Send + Sync, R: Rule<T>>(
        &self,
        exchange: &mut Exchange<'_, '_>,
        state: &GridState<T>,
        rule: &R,
        run: &MemberGridRun,
        steps: usize,
    ) -> Result<Vec<T>, Error> {
        let mut region = state.grid.cells()[self.cells_of(exchange.rank())].to_vec();
        if region.is_empty() {
            return Ok(region);
        }
        let fewest_rows = self.active.iter().map(|&rank| self.rows[rank].len()).min().unwrap_or(1);
        let neighbours = self.neighbours(exchange.rank(), rule.outside().is_none());
        // Without neighbours nothing is exchanged.
        let most = if neighbours == [None, None] { steps } else { run.steps_per_exchange.min(fewest_rows) };
        let mut done = 0;
        while done < steps {
            let next = most.min(steps - done);
            let at = (state.steps + done) as u64;
            let [above, below] = self.exchange_borders(exchange, at, &region, next, neighbours)?;
            let own = above.len()..above.len() + region.len();
            let extended = Grid::new(self.columns, [above, region.clone(), below].concat())?;
            let advanced = step(exchange, extended, rule, run.strategy, next)?;
            region.copy_from_slice(&advanced.cells()[own]);
            done += next;
        }
        Ok(region)
    }

    /// Returns the rows above and below the own region.
    fn exchange_borders<T: Pod>(
        &self,
        exchange: &mut Exchange<'_, '_>,
        at: u64,
        region: &[T],
        rows: usize,
        [above, below]: [Option<usize>; 2],
    ) -> Result<[Vec<T>; 2], Error> {
        let cells = rows * self.columns;
        let border = |rank: Option<usize>| vec![T::zeroed(); if rank.is_some() { cells } else { 0 }];
        let (mut from_above, mut from_below) = (border(above), border(below));
        let mut outgoing = Vec::new();
        let mut incoming = Vec::new();
        if let Some(rank) = above {
            let bytes = bytemuck::cast_slice(&region[..cells]);
            outgoing.push(Outgoing { to: rank, phase: Phase::RowsToAbove, bytes });
            let bytes = bytemuck::cast_slice_mut(&mut from_above);
            incoming.push(Incoming { from: rank, phase: Phase::RowsToBelow, bytes });
        }
        if let Some(rank) = below {
            let bytes = bytemuck::cast_slice(&region[region.len() - cells..]);
            outgoing.push(Outgoing { to: rank, phase: Phase::RowsToBelow, bytes });
            let bytes = bytemuck::cast_slice_mut(&mut from_below);
            incoming.push(Incoming { from: rank, phase: Phase::RowsToAbove, bytes });
        }
        exchange.waiting("halo of members", |exchange| exchange.exchange(at, &outgoing, &mut incoming))?;
        Ok([from_above, from_below])
    }

    /// Exchanges the regions; returns all cells at the boundary after `steps` steps.
    fn gather<T: Pod>(&self, exchange: &mut Exchange<'_, '_>, steps: usize, own: Vec<T>) -> Result<Vec<T>, Error> {
        let rank = exchange.rank();
        let bytes = bytemuck::cast_slice(&own);
        let others = (0..self.rows.len()).filter(|&to| to != rank && !own.is_empty());
        let outgoing: Vec<_> = others.map(|to| Outgoing { to, phase: Phase::Region, bytes }).collect();
        let mut regions: Vec<Vec<T>> =
            (0..self.rows.len()).map(|from| vec![T::zeroed(); self.cells_of(from).len()]).collect();
        let incoming = regions.iter_mut().enumerate().filter(|(from, region)| *from != rank && !region.is_empty());
        let mut incoming: Vec<_> = incoming
            .map(|(from, region)| Incoming { from, phase: Phase::Region, bytes: bytemuck::cast_slice_mut(region) })
            .collect();
        exchange.waiting("boundary", |exchange| exchange.exchange(steps as u64, &outgoing, &mut incoming))?;
        regions[rank] = own;
        Ok(regions.concat())
    }
}

/// Advances a region with its borders by the devices of the member.
fn step<T: Pod + Send + Sync, R: Rule<T>>(
    exchange: &Exchange<'_, '_>,
    mut extended: Grid<T>,
    rule: &R,
    strategy: Strategy,
    steps: usize,
) -> Result<Grid<T>, Error> {
    let run = GridRun { steps, steps_per_round: steps, strategy, limit: exchange.time_left()? };
    run_grid(exchange.devices(), &mut extended, rule, &run)?;
    Ok(extended)
}
