//! Geodesics as initial value problems: Dormand-Prince 5(4) with a step size per path.

use crate::manifold::{Manifold, connection};

/// Most accepted and rejected steps of one integration.
const MAX_STEPS: u32 = 20_000;
/// A step below this fraction of the interval means that the solution leaves every bound.
const MIN_STEP: f64 = 1e-12;

const A: [[f64; 6]; 6] = [
    [0.2, 0.0, 0.0, 0.0, 0.0, 0.0],
    [3.0 / 40.0, 9.0 / 40.0, 0.0, 0.0, 0.0, 0.0],
    [44.0 / 45.0, -56.0 / 15.0, 32.0 / 9.0, 0.0, 0.0, 0.0],
    [19372.0 / 6561.0, -25360.0 / 2187.0, 64448.0 / 6561.0, -212.0 / 729.0, 0.0, 0.0],
    [9017.0 / 3168.0, -355.0 / 33.0, 46732.0 / 5247.0, 49.0 / 176.0, -5103.0 / 18656.0, 0.0],
    [35.0 / 384.0, 0.0, 500.0 / 1113.0, 125.0 / 192.0, -2187.0 / 6784.0, 11.0 / 84.0],
];
/// Fifth-order minus fourth-order weights.
const E: [f64; 7] =
    [71.0 / 57600.0, 0.0, -71.0 / 16695.0, 71.0 / 1920.0, -17253.0 / 339_200.0, 22.0 / 525.0, -1.0 / 40.0];

/// A point of a geodesic with its variations: x [d], x' [d], then the state transition matrix [2d, 2d] by rows.
pub(crate) type State = Vec<f64>;

/// The state at time 0.
pub(crate) fn initial(x: &[f64], velocity: &[f64]) -> State {
    let n = 2 * x.len();
    let mut state = [x, velocity].concat();
    state.extend((0..n * n).map(|ij| f64::from(u8::from(ij / n == ij % n))));
    state
}

fn derivative(manifold: &dyn Manifold, y: &[f64]) -> State {
    let d = manifold.dimension();
    let n = 2 * d;
    let (x, v, phi) = (&y[..d], &y[d..n], &y[n..]);
    let (gamma, slope) = connection(d, &manifold.jet(x));
    let mut out = vec![0.0; y.len()];
    out[..d].copy_from_slice(v);
    for k in 0..d {
        for i in 0..d {
            for j in 0..d {
                let symbol = gamma[(k * d + i) * d + j];
                out[d + k] -= symbol * v[i] * v[j];
                for c in 0..n {
                    // dx'' = -(d_m Gamma) dx^m x' x' - 2 Gamma x' dx'
                    let mut change = 2.0 * symbol * v[i] * phi[(d + j) * n + c];
                    for m in 0..d {
                        change += slope[((m * d + k) * d + i) * d + j] * v[i] * v[j] * phi[m * n + c];
                    }
                    out[n + (d + k) * n + c] -= change;
                }
            }
        }
    }
    out[n..n + d * n].copy_from_slice(&phi[d * n..]);
    out
}

/// Integrates from `from` to `to`; none if the solution leaves every bound on the way or needs too many steps.
/// Adds the number of evaluations of the right-hand side to `evaluations`.
pub(crate) fn integrate(
    manifold: &dyn Manifold,
    mut y: State,
    (from, to): (f64, f64),
    tolerance: f64,
    evaluations: &mut u64,
) -> Option<State> {
    let mut t = from;
    let mut h = 0.02 * (to - from);
    let mut first = derivative(manifold, &y);
    *evaluations += 1;
    for _ in 0..MAX_STEPS {
        if t >= to {
            return Some(y);
        }
        let last = t + h >= to;
        if last {
            h = to - t;
        }
        let mut k = vec![first.clone()];
        let mut next = y.clone();
        for row in &A {
            next.clone_from(&y);
            for (stage, a) in k.iter().zip(row) {
                next.iter_mut().zip(stage).for_each(|(n, s)| *n += h * a * s);
            }
            k.push(derivative(manifold, &next));
            *evaluations += 1;
        }
        let mut sum = 0.0;
        for i in 0..y.len() {
            let error: f64 = h * k.iter().zip(E).map(|(k, e)| k[i] * e).sum::<f64>();
            sum += (error / (tolerance * (1.0 + y[i].abs().max(next[i].abs())))).powi(2);
        }
        let error = (sum / y.len() as f64).sqrt();
        if error.is_finite() && error <= 1.0 {
            t = if last { to } else { t + h };
            first = k.pop().expect("seven stages");
            y = next;
        }
        let factor = if error.is_finite() { 0.9 * error.max(1e-10).powf(-0.2) } else { 0.1 };
        h *= factor.clamp(0.1, 5.0);
        if h < MIN_STEP * (to - from) && t < to {
            return None;
        }
    }
    None
}
