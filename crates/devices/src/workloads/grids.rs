//! Rules of grids: a cellular automaton on a torus, and a heat equation with fixed temperature outside.

use crate::{Error, Rule};

/// Conway's cellular automaton: a cell (1 = alive) lives on with 2 or 3 living neighbours of 8, and is born with 3. Borders are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LifeAutomaton;

impl Rule<u8> for LifeAutomaton {
    fn name(&self) -> &'static str {
        "cellular automaton"
    }

    fn outside(&self) -> Option<u8> {
        None
    }

    fn row(&self, above: &[u8], row: &[u8], below: &[u8], next: &mut [u8]) {
        let columns = row.len();
        for column in 0..columns {
            let (left, right) = ((column + columns - 1) % columns, (column + 1) % columns);
            let sides = [left, column, right].map(|it| above[it] + row[it] + below[it]);
            let neighbours = sides.iter().sum::<u8>() - row[column];
            next[column] = u8::from(neighbours == 3 || (neighbours == 2 && row[column] == 1));
        }
    }
}

/// Explicit steps of the heat equation `du/dt = a laplace(u)` on a square grid: `u + r (sum of the 4 neighbours - 4 u)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeatEquation {
    ratio: f64,
    outside: f64,
}

impl HeatEquation {
    /// Creates the rule with `ratio` r = a dt / dx^2 and the temperature outside the grid.
    ///
    /// # Errors
    /// A ratio for which steps are unstable; a temperature that is not finite.
    pub fn new(ratio: f64, outside: f64) -> Result<Self, Error> {
        if !(ratio > 0.0 && ratio <= 0.25) {
            return Err(Error::argument("ratio", ratio, "above 0, at most 0.25, where steps are stable"));
        }
        if !outside.is_finite() {
            return Err(Error::argument("outside", outside, "a finite temperature"));
        }
        Ok(Self { ratio, outside })
    }
}

impl Rule<f64> for HeatEquation {
    fn name(&self) -> &'static str {
        "heat equation"
    }

    fn outside(&self) -> Option<f64> {
        Some(self.outside)
    }

    fn row(&self, above: &[f64], row: &[f64], below: &[f64], next: &mut [f64]) {
        let columns = row.len();
        let step = |column: usize, left: f64, right: f64| {
            let neighbours = (above[column] + below[column]) + (left + right);
            row[column] + self.ratio * (neighbours - 4.0 * row[column])
        };
        for column in 1..columns.saturating_sub(1) {
            next[column] = step(column, row[column - 1], row[column + 1]);
        }
        let at = |column: Option<usize>| column.and_then(|it| row.get(it)).copied().unwrap_or(self.outside);
        next[0] = step(0, self.outside, at(Some(1)));
        next[columns - 1] = step(columns - 1, at((columns - 1).checked_sub(1)), self.outside);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ComputeDevice, Grid, GridRun, run_grid};
    use engram_kernels::partitioner::Strategy;
    use std::time::Duration;

    fn run(steps: usize) -> GridRun {
        GridRun { steps, steps_per_round: 8, strategy: Strategy::Balanced, limit: Duration::from_secs(60) }
    }

    #[test]
    fn glider_moves_diagonally_and_returns_on_the_torus() {
        let mut cells = vec![0_u8; 64];
        [1, 10, 16, 17, 18].iter().for_each(|&cell| cells[cell] = 1);
        let mut grid = Grid::new(8, cells).unwrap();
        let start = grid.clone();
        let devices = [ComputeDevice::new("a"), ComputeDevice::new("b")];
        run_grid(&devices, &mut grid, &LifeAutomaton, &run(4)).unwrap();
        let moved: Vec<u8> = (0..64).map(|cell| start.cells()[(cell + 64 - 9) % 64]).collect();
        assert_eq!(grid.cells(), moved, "one row and one column in four steps");
        run_grid(&devices, &mut grid, &LifeAutomaton, &run(28)).unwrap();
        assert_eq!(grid, start, "32 steps are once around a torus of 8");
    }

    #[test]
    fn heat_decays_like_the_lowest_mode() {
        // sin(pi x) sin(pi y) is an eigenvector of the discrete operator for a temperature of 0 outside.
        const SIZE: usize = 15;
        let wave = |at: usize| (std::f64::consts::PI * (at + 1) as f64 / (SIZE + 1) as f64).sin();
        let cells: Vec<f64> = (0..SIZE * SIZE).map(|cell| wave(cell / SIZE) * wave(cell % SIZE)).collect();
        let mut grid = Grid::new(SIZE, cells.clone()).unwrap();
        let rule = HeatEquation::new(0.2, 0.0).unwrap();
        run_grid(&[ComputeDevice::new("a")], &mut grid, &rule, &run(50)).unwrap();
        let factor = 1.0 - 0.2 * (4.0 - 4.0 * (std::f64::consts::PI / (SIZE + 1) as f64).cos());
        let expected = factor.powi(50);
        assert!(grid.cells().iter().zip(cells).all(|(now, before)| (now - expected * before).abs() < 1e-12));
    }

    #[test]
    fn unstable_ratios_and_incomplete_grids_are_refused() {
        for ratio in [0.0, -0.1, 0.26, f64::NAN] {
            assert!(HeatEquation::new(ratio, 0.0).is_err(), "{ratio}");
        }
        assert!(HeatEquation::new(0.1, f64::INFINITY).is_err());
        assert_eq!(
            Grid::new(3, vec![0_u8; 4]).unwrap_err().to_string(),
            "grid: 4 cells in 3 columns is not allowed; allowed: whole rows, at least one"
        );
        assert!(Grid::<u8>::new(3, Vec::new()).is_err());
    }
}
