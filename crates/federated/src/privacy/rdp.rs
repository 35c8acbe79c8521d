//! Rényi differential privacy of the Poisson-sampled Gaussian mechanism (Mironov, Talwar, Zhang 2019).

use super::Mechanism;

/// The orders at which the bound is computed: 1.1 to 10.9 by 0.1, and 12 to 63.
pub fn orders() -> impl Iterator<Item = f64> {
    (11..=109).map(|tenths| f64::from(tenths) / 10.0).chain((12..=63).map(f64::from))
}

/// Returns the least epsilon over `orders` of a composition, and its order. Infinite when `delta` can't be reached.
pub fn epsilon(composition: &[(Mechanism, u64)], delta: f64, orders: impl Iterator<Item = f64>) -> (f64, f64) {
    let at = |order: f64| {
        let total: f64 =
            composition.iter().map(|(mechanism, count)| *count as f64 * divergence(*mechanism, order)).sum();
        let epsilon = total - (delta.ln() + order.ln()) / (order - 1.0) + ((order - 1.0) / order).ln();
        (epsilon.max(0.0), order)
    };
    orders.map(at).min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::INFINITY, 0.0))
}

/// The Rényi divergence of one step at `order` above 1.
#[must_use]
pub fn divergence(mechanism: Mechanism, order: f64) -> f64 {
    let (q, s) = (mechanism.sampling_rate, mechanism.noise_multiplier);
    if q == 0.0 {
        0.0
    } else if q == 1.0 {
        order / (2.0 * s * s)
    } else if order.fract() == 0.0 {
        log_moment_integer(q, s, order as u32) / (order - 1.0)
    } else {
        log_moment_fractional(q, s, order) / (order - 1.0)
    }
}

fn log_moment_integer(q: f64, s: f64, order: u32) -> f64 {
    let alpha = f64::from(order);
    let (mut sum, mut log_binomial) = (f64::NEG_INFINITY, 0.0_f64);
    for i in 0..=order {
        let k = f64::from(i);
        let term = log_binomial + (alpha - k) * (-q).ln_1p() + k * q.ln() + (k * k - k) / (2.0 * s * s);
        sum = log_add(sum, term);
        log_binomial += ((alpha - k) / (k + 1.0)).ln();
    }
    sum
}

/// The two series over i run until both terms are below e^-30.
fn log_moment_fractional(q: f64, s: f64, alpha: f64) -> f64 {
    let z = s * s * (1.0 / q - 1.0).ln() + 0.5;
    let (log_q, log_rest) = (q.ln(), (-q).ln_1p());
    let (mut below, mut above) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
    let (mut log_binomial, mut positive) = (0.0_f64, true);
    for i in 0_u32.. {
        let (k, j) = (f64::from(i), alpha - f64::from(i));
        let tail = |x: f64| 0.5_f64.ln() + log_erfc(x / (std::f64::consts::SQRT_2 * s));
        let first = log_binomial + k * log_q + j * log_rest + (k * k - k) / (2.0 * s * s) + tail(k - z);
        let second = log_binomial + j * log_q + k * log_rest + (j * j - j) / (2.0 * s * s) + tail(z - j);
        let combine = if positive { log_add } else { log_subtract };
        (below, above) = (combine(below, first), combine(above, second));
        if first.max(second) < -30.0 {
            break;
        }
        log_binomial += (j.abs() / (k + 1.0)).ln();
        positive ^= j < 0.0;
    }
    log_add(below, above)
}

fn log_add(a: f64, b: f64) -> f64 {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    if low == f64::NEG_INFINITY { high } else { high + (low - high).exp().ln_1p() }
}

/// `ln(e^a - e^b)`; the series never becomes negative except by rounding, which counts as 0.
fn log_subtract(a: f64, b: f64) -> f64 {
    if b == f64::NEG_INFINITY {
        a
    } else if a <= b {
        f64::NEG_INFINITY
    } else {
        a + (-(b - a).exp()).ln_1p()
    }
}

/// `ln erfc(x)`, by its asymptotic series where erfc is below the range of f64.
fn log_erfc(x: f64) -> f64 {
    if x < 25.0 {
        return libm::erfc(x).ln();
    }
    let square = 1.0 / (x * x);
    let series = 1.0 - square * (0.5 - square * (0.75 - square * 1.875));
    -x * x - (x * std::f64::consts::PI.sqrt()).ln() + series.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_of_erfc_joins_the_function() {
        let (a, b) = (libm::erfc(24.999).ln(), log_erfc(25.0));
        assert!((b - a - (-25.0_f64 * 25.0 + 24.999 * 24.999)).abs() < 1e-3);
        let at = |x: f64| -x * x - (x * std::f64::consts::PI.sqrt()).ln();
        assert!((log_erfc(26.0) - libm::erfc(26.0).ln()).abs() < 1e-9 && log_erfc(100.0) < at(100.0));
    }

    #[test]
    fn integer_and_fractional_series_agree_at_the_same_order() {
        for (q, s, order) in [(0.01, 1.0, 2), (0.1, 2.0, 5), (0.05, 1.1, 3)] {
            let integer = log_moment_integer(q, s, order);
            let fractional = log_moment_fractional(q, s, f64::from(order) + 1e-9);
            assert!((integer - fractional).abs() < 1e-6, "{integer} {fractional}");
        }
    }
}
