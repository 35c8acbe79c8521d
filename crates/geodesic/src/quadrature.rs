//! Gauss-Legendre rules.

/// Nodes in (-1, 1) and weights of the Gauss-Legendre rule with `count` nodes, exact for polynomials of degree
/// `2 count - 1`. Nodes increase.
///
/// # Panics
/// If `count` is 0.
pub fn gauss_legendre(count: usize) -> Vec<(f64, f64)> {
    assert!(count > 0, "a quadrature rule has at least one node");
    let n = count as f64;
    let rule = |i: usize| {
        // Newton's iteration on the Legendre polynomial, from the usual asymptotic guess.
        let mut x = -(std::f64::consts::PI * (i as f64 + 0.75) / (n + 0.5)).cos();
        let mut derivative = 1.0;
        for _ in 0..8 {
            let (mut below, mut value) = (1.0, x);
            for k in 2..=count {
                let k = k as f64;
                (below, value) = (value, ((2.0 * k - 1.0) * x * value - (k - 1.0) * below) / k);
            }
            derivative = n * (below - x * value) / (1.0 - x * x);
            x -= value / derivative;
        }
        (x, 2.0 / ((1.0 - x * x) * derivative * derivative))
    };
    (0..count).map(rule).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_exact_up_to_their_degree() {
        for count in 1..=16 {
            for degree in 0..2 * count {
                let sum: f64 = gauss_legendre(count).iter().map(|(x, w)| w * x.powi(degree as i32)).sum();
                let exact = if degree % 2 == 0 { 2.0 / (degree as f64 + 1.0) } else { 0.0 };
                assert!((sum - exact).abs() < 1e-14, "{count} nodes, degree {degree}: {sum}");
            }
        }
    }
}
