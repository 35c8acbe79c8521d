//! Boundary value problems on any manifold by shooting.

use crate::baseline::solve;
use crate::error::{Error, in_range};
use crate::integrate::{State, initial, integrate};
use crate::manifold::{Line, Manifold, squared_speed};
use crate::metric::MetricNetwork;
use crate::quadrature::gauss_legendre;
use crate::trajectory::Problem;

/// Halvings of a Newton step before it is given up.
const HALVINGS: u32 = 12;
/// Numbers of continuation steps, tried in turn; 1 is the direct attempt.
const CONTINUATION: [u32; 4] = [1, 4, 8, 16];
/// Panels and nodes of the integral of a gradient over time.
const PANELS: usize = 8;
const NODES: usize = 8;

/// Shooting with damped Newton steps and the exact Jacobian of the variational equation.
///
/// Every problem has its own step sizes and its own convergence, so a difficult problem changes no other result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchedShooting {
    /// Error tolerance per step, absolute and relative, in [1e-13, 1e-2]. Default 1e-11.
    pub tolerance: f64,
    /// Largest accepted distance of the end point, in [1e-13, 1]. Default 1e-10.
    pub residual: f64,
    /// Most Newton steps per target, 1 to 100. Default 10.
    pub newton_steps: u32,
}

impl Default for BatchedShooting {
    fn default() -> Self {
        Self { tolerance: 1e-11, residual: 1e-10, newton_steps: 10 }
    }
}

/// What shooting found for one problem. It is an answer only if `converged`.
#[derive(Debug, Clone, PartialEq)]
pub struct Shot {
    /// x'(0).
    pub initial_velocity: Vec<f64>,
    /// Largest coordinate of `|x(1) - end|`; infinite if no path reached time 1.
    pub residual: f64,
    /// Whether the residual is within the limit.
    pub converged: bool,
    /// `dx(1)/dx'(0)`, row-major [d, d].
    pub jacobian: Vec<f64>,
    /// Relative change of `g_ij x'^i x'^j` between time 0 and 1.
    pub invariant_drift: f64,
    /// Newton steps over all targets.
    pub newton_steps: u32,
    /// Continuation steps; 1 if the direct attempt converged.
    pub continuation_steps: u32,
    /// Evaluations of the right-hand side.
    pub evaluations: u64,
}

struct Attempt {
    velocity: Vec<f64>,
    state: Option<State>,
    residual: f64,
}

impl BatchedShooting {
    /// Refuses settings out of range.
    ///
    /// # Errors
    /// [`Error::Range`] with the name of the field.
    pub fn check(&self) -> Result<(), Error> {
        in_range("tolerance", self.tolerance, 1e-13, 1e-2, "in [1e-13, 1e-2]")?;
        in_range("residual", self.residual, 1e-13, 1.0, "in [1e-13, 1]")?;
        in_range("newton steps", f64::from(self.newton_steps), 1.0, 100.0, "1 to 100")
    }

    /// Solves `x(0) = start, x(1) = end` for each (manifold, start, end), in order.
    ///
    /// # Errors
    /// If a setting is out of range, or the length of a point differs from its manifold's dimension. A problem that does
    /// not converge is not an error: its [`Shot`] says so.
    pub fn solve(&self, problems: &[(&dyn Manifold, &[f64], &[f64])]) -> Result<Vec<Shot>, Error> {
        self.check()?;
        problems.iter().map(|(manifold, start, end)| self.solve_one(*manifold, start, end)).collect()
    }

    /// Positions and velocities [time][2d] of the geodesic with the given initial velocity at increasing `times` in
    /// [0, 1]; none if it leaves every bound before the last time.
    pub fn path(
        &self,
        manifold: &dyn Manifold,
        start: &[f64],
        velocity: &[f64],
        times: &[f64],
    ) -> Option<Vec<Vec<f64>>> {
        let states = self.states(manifold, initial(start, velocity), times)?;
        Some(states.into_iter().map(|s| s[..2 * start.len()].to_vec()).collect())
    }

    fn states(&self, manifold: &dyn Manifold, mut state: State, times: &[f64]) -> Option<Vec<State>> {
        let mut at = 0.0;
        let mut out = Vec::with_capacity(times.len());
        for &t in times {
            state = integrate(manifold, state, (at, t), self.tolerance, &mut 0)?;
            out.push(state.clone());
            at = t;
        }
        Some(out)
    }

    fn solve_one(&self, manifold: &dyn Manifold, start: &[f64], end: &[f64]) -> Result<Shot, Error> {
        let d = manifold.dimension();
        for (field, point) in [("start", start), ("end", end)] {
            if point.len() != d {
                return Err(Error::Length { field, actual: point.len(), expected: d });
            }
        }
        let (mut newton_steps, mut evaluations) = (0, 0);
        let mut best: Option<(Attempt, u32)> = None;
        for steps in CONTINUATION {
            let mut velocity: Vec<f64> = (0..d).map(|i| (end[i] - start[i]) / f64::from(steps)).collect();
            let mut attempt = None;
            for k in 1..=steps {
                let part = f64::from(k) / f64::from(steps);
                let target: Vec<f64> = (0..d).map(|i| start[i] + part * (end[i] - start[i])).collect();
                let found = self.newton(manifold, start, &target, velocity, &mut newton_steps, &mut evaluations);
                // The next target is farther by about this factor.
                velocity = found.velocity.iter().map(|v| v * f64::from(k + 1) / f64::from(k)).collect();
                let good = found.residual <= self.residual;
                if k == steps {
                    attempt = Some(found);
                } else if !good {
                    break;
                }
            }
            let Some(attempt) = attempt else { continue };
            let better = best.as_ref().is_none_or(|(b, _)| attempt.residual < b.residual);
            let good = attempt.residual <= self.residual;
            if better {
                best = Some((attempt, steps));
            }
            if good {
                break;
            }
        }
        let (attempt, continuation_steps) = best.expect("the direct attempt always gives a result");
        let n = 2 * d;
        let speed = |x: &[f64], v: &[f64]| squared_speed(d, &manifold.jet(x).g, v);
        let (jacobian, invariant_drift) = match &attempt.state {
            Some(s) => {
                let before = speed(start, &attempt.velocity);
                let drift = if before > 0.0 { (speed(&s[..d], &s[d..n]) / before - 1.0).abs() } else { 0.0 };
                ((0..d).flat_map(|i| s[n + i * n + d..n + (i + 1) * n].to_vec()).collect(), drift)
            }
            None => (Vec::new(), f64::INFINITY),
        };
        Ok(Shot {
            initial_velocity: attempt.velocity,
            residual: attempt.residual,
            converged: attempt.residual <= self.residual,
            jacobian,
            invariant_drift,
            newton_steps,
            continuation_steps,
            evaluations,
        })
    }

    fn shoot(
        &self,
        manifold: &dyn Manifold,
        start: &[f64],
        end: &[f64],
        velocity: Vec<f64>,
        evaluations: &mut u64,
    ) -> Attempt {
        let state = integrate(manifold, initial(start, &velocity), (0.0, 1.0), self.tolerance, evaluations);
        let residual = match &state {
            Some(s) => (0..end.len()).map(|i| (s[i] - end[i]).abs()).fold(0.0, f64::max),
            None => f64::INFINITY,
        };
        Attempt { velocity, state, residual }
    }

    /// Damped Newton steps: a step is halved until the residual falls; a path that leaves every bound is no improvement.
    fn newton(
        &self,
        manifold: &dyn Manifold,
        start: &[f64],
        end: &[f64],
        velocity: Vec<f64>,
        newton_steps: &mut u32,
        evaluations: &mut u64,
    ) -> Attempt {
        let d = start.len();
        let mut current = self.shoot(manifold, start, end, velocity, evaluations);
        // The guess itself may blow up.
        for _ in 0..HALVINGS {
            if current.state.is_some() {
                break;
            }
            let slower = current.velocity.iter().map(|v| 0.5 * v).collect();
            current = self.shoot(manifold, start, end, slower, evaluations);
        }
        for _ in 0..self.newton_steps {
            // Continue to a tenth of the limit where the integrator allows it.
            if current.residual <= 0.1 * self.residual {
                break;
            }
            let Some(state) = &current.state else { break };
            *newton_steps += 1;
            let n = 2 * d;
            let jacobian = (0..d).map(|i| state[n + i * n + d..n + (i + 1) * n].to_vec()).collect();
            let step = solve(jacobian, (0..d).map(|i| end[i] - state[i]).collect());
            if step.iter().any(|s| !s.is_finite()) {
                break;
            }
            let mut improved = None;
            for halving in 0..HALVINGS {
                let scale = 0.5f64.powi(halving as i32);
                let velocity = current.velocity.iter().zip(&step).map(|(v, s)| v + scale * s).collect();
                let trial = self.shoot(manifold, start, end, velocity, evaluations);
                if trial.residual < current.residual {
                    improved = Some(trial);
                    break;
                }
            }
            match improved {
                Some(trial) => current = trial,
                None => break,
            }
        }
        current
    }

    /// Adds `adjoint * dv0/dtheta` of a problem of one dimension to `gradient`.
    ///
    /// Implicit: `dv0/dtheta = -J^-1 dx(1)/dtheta` at fixed v0, by variation of constants along the path. Newton's
    /// iterations are not differentiated.
    ///
    /// # Errors
    /// [`Error::Incomplete`] if the shot has not converged.
    pub fn velocity_gradient(
        &self,
        metric: &MetricNetwork,
        problem: Problem,
        shot: &Shot,
        adjoint: f64,
        gradient: &mut [f64],
    ) -> Result<(), Error> {
        let refuse = || Error::Incomplete(format!("shot has residual {:e} and no gradient", shot.residual));
        if !shot.converged {
            return Err(refuse());
        }
        let line = Line { metric, wavelength: problem.wavelength };
        let half = 0.5 / PANELS as f64;
        let nodes: Vec<(f64, f64)> = (0..PANELS)
            .flat_map(|p| {
                gauss_legendre(NODES).into_iter().map(move |(x, w)| (half * (x + (2 * p + 1) as f64), half * w))
            })
            .collect();
        let times: Vec<f64> = nodes.iter().map(|n| n.0).chain([1.0]).collect();
        let start = initial(&[problem.start], &shot.initial_velocity);
        let states = self.states(&line, start, &times).ok_or_else(refuse)?;
        let end = &states[NODES * PANELS];
        let inputs = states[..NODES * PANELS].iter().flat_map(|s| [s[0], problem.wavelength]).collect();
        let pass = metric.forward(2, inputs);
        let mut to_g = Vec::with_capacity(2 * nodes.len());
        for ((state, (_, weight)), g) in states.iter().zip(&nodes).zip(pass.g.chunks_exact(2)) {
            // [Phi(1) Phi(t)^-1]_{x, v}: how a change of velocity at time t moves the end point.
            let determinant = state[2] * state[5] - state[3] * state[4];
            let reach = (end[3] * state[2] - end[2] * state[3]) / determinant;
            let to_gamma = adjoint / end[3] * weight * reach * state[1] * state[1];
            to_g.extend([-to_gamma * g[1] / (2.0 * g[0] * g[0]), to_gamma / (2.0 * g[0])]);
        }
        metric.backward(&pass, &to_g, gradient);
        Ok(())
    }
}

#[cfg(test)]
#[path = "shooting_tests.rs"]
mod tests;
