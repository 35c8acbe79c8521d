//! Privacy loss distribution of the Poisson-sampled Gaussian mechanism, composed by FFT (Koskela 2020; Doroshenko, Ghazi, Kamath, Kumar,
//! Manurangsi 2022).
//!
//! The loss is discretised pessimistically: the mass of each interval of the grid moves to both ends such that the masses under both
//! distributions are kept ("connect the dots"); what lies above the grid counts as infinite. Both directions of neighbouring data, one
//! record more and one less, are composed, and the larger epsilon is returned.

use rustfft::FftPlanner;
use rustfft::num_complex::Complex;

use super::Mechanism;

/// Distance of the grid for compositions that fit.
const GRID: f64 = 1e-4;
/// Longest transform; the grid is doubled until the composition fits.
const MAX_CELLS: usize = 1 << 21;
/// Standard deviations that the discretisation covers on each side; outside lies less than 1e-17 of the mass.
const REACH: f64 = 8.5;

/// Direction of neighbouring data.
#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Remove,
    Add,
}

/// Loss of one step on a grid: mass `masses[i]` at `(first + i) * grid`.
struct LossDistribution {
    grid: f64,
    first: i64,
    masses: Vec<f64>,
    infinite: f64,
}

/// Returns an upper bound of epsilon of a composition at `delta`.
#[must_use]
pub fn epsilon(composition: &[(Mechanism, u64)], delta: f64) -> f64 {
    let charged: Vec<(Mechanism, u64)> =
        composition.iter().copied().filter(|(mechanism, count)| *count > 0 && mechanism.sampling_rate > 0.0).collect();
    if charged.is_empty() {
        return 0.0;
    }
    let mut planner = FftPlanner::new();
    let directed = |direction| directed_epsilon(&charged, delta, direction, &mut planner);
    [Direction::Remove, Direction::Add].map(directed).into_iter().fold(0.0, f64::max)
}

fn directed_epsilon(
    composition: &[(Mechanism, u64)],
    delta: f64,
    direction: Direction,
    planner: &mut FftPlanner<f64>,
) -> f64 {
    let mut grid = GRID;
    loop {
        let parts: Vec<(LossDistribution, u64)> = composition
            .iter()
            .map(|(mechanism, count)| (LossDistribution::new(*mechanism, direction, grid), *count))
            .collect();
        // What the transform folds into the window from above is added to delta.
        let tail = delta * 1e-6;
        let (low, high) = (-bound(&parts, tail, -1.0), bound(&parts, tail, 1.0));
        let cells = ((high - low) / grid) as usize + 2;
        if cells > MAX_CELLS {
            grid *= 2.0;
            continue;
        }
        let kept: f64 = parts.iter().map(|(part, count)| *count as f64 * (-part.infinite).ln_1p()).sum();
        let infinite = -kept.exp_m1() + tail;
        let first = (low / grid).floor() as i64;
        let masses = compose(&parts, first, cells.next_power_of_two(), planner);
        return solve(&masses, first, grid, infinite, delta);
    }
}

impl LossDistribution {
    fn new(mechanism: Mechanism, direction: Direction, grid: f64) -> Self {
        let (q, s) = (mechanism.sampling_rate, mechanism.noise_multiplier);
        let ends = [-REACH * s, 1.0 + REACH * s].map(|x| mixture_loss(q, s, x));
        let (low, high) = match direction {
            Direction::Remove => (ends[0], ends[1]),
            Direction::Add => (-ends[1], -ends[0]),
        };
        let first = (low / grid).floor() as i64;
        let cells = ((high / grid).ceil() as i64 - first) as usize + 1;
        let mut masses = vec![0.0; cells];
        let at = |i: usize| position(q, s, direction, (first + i as i64) as f64 * grid);
        // What lies below the grid moves up to its first point.
        let mut from = at(0);
        masses[0] = interval(q, s, direction, None, Some(from)).0;
        for i in 1..cells {
            let to = at(i);
            let (upper, lower) = interval(q, s, direction, Some(from), Some(to));
            let ratio = lower * ((first + i as i64) as f64 * grid).exp();
            let left = ((ratio - upper) / grid.exp_m1()).clamp(0.0, upper);
            masses[i - 1] += left;
            masses[i] += upper - left;
            from = to;
        }
        let infinite = interval(q, s, direction, Some(from), None).0;
        Self { grid, first, masses, infinite }
    }

    /// `ln E[e^(rate * loss)]` over the finite part.
    fn log_moment(&self, rate: f64) -> f64 {
        let value = |i: usize| rate * (self.first + i as i64) as f64 * self.grid;
        let top = value(0).max(value(self.masses.len() - 1));
        let sum: f64 = self.masses.iter().enumerate().map(|(i, mass)| mass * (value(i) - top).exp()).sum();
        top + sum.ln()
    }
}

/// `ln(1 - q + q e^((2x - 1)/(2 s^2)))`: the log of the density of the sampled mechanism over N(0, s^2).
fn mixture_loss(q: f64, s: f64, x: f64) -> f64 {
    let exponent = (2.0 * x - 1.0) / (2.0 * s * s);
    if q >= 1.0 {
        return exponent;
    }
    if exponent > 30.0 {
        // 1 - q is lost in rounding anyway.
        return q.ln() + exponent + ((1.0 - q) / q * (-exponent).exp()).ln_1p();
    }
    (q * exponent.exp_m1()).ln_1p()
}

/// The x at which the loss is `loss`; infinite where the loss is not reached.
fn position(q: f64, s: f64, direction: Direction, loss: f64) -> f64 {
    let mixture = if direction == Direction::Remove { loss } else { -loss };
    // e^mixture = 1 - q + q e^((2x - 1)/(2 s^2)).
    let ratio = mixture.exp_m1() / q;
    if ratio <= -1.0 {
        return f64::NEG_INFINITY;
    }
    s * s * ratio.ln_1p() + 0.5
}

/// Masses of the losses between two positions under the first and the second distribution.
fn interval(q: f64, s: f64, direction: Direction, from: Option<f64>, to: Option<f64>) -> (f64, f64) {
    // The loss falls with x in the direction `Add`.
    let (a, b) = match direction {
        Direction::Remove => (from.unwrap_or(f64::NEG_INFINITY), to.unwrap_or(f64::INFINITY)),
        Direction::Add => (to.unwrap_or(f64::NEG_INFINITY), from.unwrap_or(f64::INFINITY)),
    };
    let plain = normal_mass(a / s, b / s);
    let mixture = (1.0 - q) * plain + q * normal_mass((a - 1.0) / s, (b - 1.0) / s);
    if direction == Direction::Remove { (mixture, plain) } else { (plain, mixture) }
}

/// Mass of the standard normal distribution between a and b, from the tail in which it loses fewer digits.
fn normal_mass(a: f64, b: f64) -> f64 {
    let upper = |x: f64| 0.5 * libm::erfc(x * std::f64::consts::FRAC_1_SQRT_2);
    let mass = if a > 0.0 { upper(a) - upper(b) } else { upper(-b) - upper(-a) };
    mass.max(0.0)
}

/// Chernoff bound: the sum of losses exceeds the returned value in direction `sign` with probability at most `tail`.
fn bound(parts: &[(LossDistribution, u64)], tail: f64, sign: f64) -> f64 {
    let at = |rate: f64| {
        let moments: f64 = parts.iter().map(|(part, count)| *count as f64 * part.log_moment(sign * rate)).sum();
        (moments - tail.ln()) / rate
    };
    let widest: f64 = parts
        .iter()
        .map(|(part, count)| {
            let ends = [part.first, part.first + part.masses.len() as i64];
            *count as f64 * ends.map(|end| sign * end as f64 * part.grid).into_iter().fold(f64::MIN, f64::max)
        })
        .sum();
    (-6..=10).map(|exponent| at(f64::from(exponent).exp2())).fold(widest, f64::min)
}

/// The masses of the sum of all losses on `cells` cells from `first`; what lies outside is folded in.
fn compose(parts: &[(LossDistribution, u64)], first: i64, cells: usize, planner: &mut FftPlanner<f64>) -> Vec<f64> {
    let mut product = vec![Complex::new(1.0, 0.0); cells];
    let mut start: i64 = 0;
    let forward = planner.plan_fft_forward(cells);
    for (part, count) in parts {
        let mut spectrum = vec![Complex::new(0.0, 0.0); cells];
        for (i, mass) in part.masses.iter().enumerate() {
            spectrum[i % cells].re += mass;
        }
        forward.process(&mut spectrum);
        for (product, value) in product.iter_mut().zip(&spectrum) {
            *product *= power(*value, *count);
        }
        start = (start + part.first * (*count as i64)).rem_euclid(cells as i64);
    }
    planner.plan_fft_inverse(cells).process(&mut product);
    let shift = (first - start).rem_euclid(cells as i64) as usize;
    (0..cells).map(|i| (product[(i + shift) % cells].re / cells as f64).max(0.0)).collect()
}

fn power(value: Complex<f64>, count: u64) -> Complex<f64> {
    let (mut base, mut rest, mut result) = (value, count, Complex::new(1.0, 0.0));
    while rest > 0 {
        if rest & 1 == 1 {
            result *= base;
        }
        base *= base;
        rest >>= 1;
    }
    result
}

/// The least point of the grid at which delta is reached, plus one cell for the rounding of the transforms.
fn solve(masses: &[f64], first: i64, grid: f64, infinite: f64, delta: f64) -> f64 {
    // delta(e) = infinite + sum over losses l > e of mass * (1 - e^(e - l)), from the top down.
    let (mut above, mut discounted) = (infinite, 0.0);
    let decay = (-grid).exp();
    for i in (0..masses.len()).rev() {
        let loss = (first + i as i64) as f64 * grid;
        if loss < 0.0 {
            return grid;
        }
        // At this loss: `discounted` is the sum of mass * e^(loss - l).
        discounted *= decay;
        if above - discounted > delta {
            return loss + 2.0 * grid;
        }
        above += masses[i];
        discounted += masses[i];
    }
    if first > 0 { first as f64 * grid } else { grid }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exact delta of the Gaussian mechanism without sampling (Balle, Wang 2018).
    fn exact_delta(mu: f64, epsilon: f64) -> f64 {
        let phi = |x: f64| 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
        phi(mu / 2.0 - epsilon / mu) - epsilon.exp() * phi(-mu / 2.0 - epsilon / mu)
    }

    #[test]
    fn without_sampling_epsilon_is_the_exact_one() {
        for (s, steps, delta) in [(8.0, 100, 1e-5), (1.0, 1, 1e-6), (5.0, 400, 1e-6), (0.3, 2, 1e-8)] {
            let mechanism = Mechanism { sampling_rate: 1.0, noise_multiplier: s };
            let epsilon = epsilon(&[(mechanism, steps)], delta);
            let mu = (steps as f64).sqrt() / s;
            assert!(exact_delta(mu, epsilon) <= delta, "{s} {steps}");
            assert!(exact_delta(mu, epsilon - 0.001) > delta, "{s} {steps}: {epsilon} is not tight");
        }
    }

    #[test]
    fn masses_add_up_and_unequal_steps_compose_in_any_order() {
        let a = Mechanism { sampling_rate: 0.1, noise_multiplier: 1.0 };
        let b = Mechanism { sampling_rate: 1.0, noise_multiplier: 10.0 };
        for direction in [Direction::Remove, Direction::Add] {
            let part = LossDistribution::new(a, direction, GRID);
            assert!((part.masses.iter().sum::<f64>() + part.infinite - 1.0).abs() < 1e-9);
        }
        let both = epsilon(&[(a, 10), (b, 5)], 1e-5);
        assert!((both - epsilon(&[(b, 5), (a, 10)], 1e-5)).abs() < 1e-9);
        assert!(both > epsilon(&[(a, 10)], 1e-5) && both > epsilon(&[(b, 5)], 1e-5));
        assert_eq!(epsilon(&[(a, 0)], 1e-5), 0.0);
    }
}
