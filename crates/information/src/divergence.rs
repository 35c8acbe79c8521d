//! Divergences between distributions.

use crate::Error;
use crate::distribution::precision;

/// Returns the Kullback-Leibler divergence `sum p ln(p / q)` in nats: infinite where q is 0 and p is not; terms with p = 0 are 0.
///
/// # Errors
/// Distributions of different length; an entry that is negative or not finite.
pub fn kullback_leibler(p: &[f64], q: &[f64]) -> Result<f64, Error> {
    Error::dimension("length of the second distribution", q.len(), p.len())?;
    for (name, values) in [("p", p), ("q", q)] {
        Error::finite(name, values.iter().copied())?;
        if let Some(&value) = values.iter().find(|&&value| value < 0.0) {
            return Err(Error::Range { name, value, allowed: "at least 0" });
        }
    }
    let term = |(&p, &q): (&f64, &f64)| match (p > 0.0, q > 0.0) {
        (false, _) => 0.0,
        (true, false) => f64::INFINITY,
        (true, true) => p * (p / q).ln(),
    };
    Ok(p.iter().zip(q).map(term).sum())
}

/// Returns the Kullback-Leibler divergence of two Gaussians, each (mu, sigma), in nats.
///
/// # Errors
/// A sigma that is not positive and finite.
pub fn kullback_leibler_gaussian(p: (f64, f64), q: (f64, f64)) -> Result<f64, Error> {
    precision(p.1)?;
    let precision = precision(q.1)?;
    Ok((q.1 / p.1).ln() + 0.5 * precision * (p.1 * p.1 + (p.0 - q.0).powi(2)) - 0.5)
}

/// Returns the Bregman divergence `phi(x) - phi(y) - <grad phi(y), x - y>` of a convex function and its gradient.
///
/// # Errors
/// Points of different length, or a gradient of another length.
pub fn bregman(
    phi: impl Fn(&[f64]) -> f64,
    gradient: impl Fn(&[f64]) -> Vec<f64>,
    x: &[f64],
    y: &[f64],
) -> Result<f64, Error> {
    Error::dimension("length of the second point", y.len(), x.len())?;
    let slope = gradient(y);
    Error::dimension("length of the gradient", slope.len(), y.len())?;
    let linear: f64 = slope.iter().zip(x.iter().zip(y)).map(|(slope, (x, y))| slope * (x - y)).sum();
    Ok(phi(x) - phi(y) - linear)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gaussian_fisher;

    #[test]
    fn divergence_is_infinite_where_the_second_has_no_mass() {
        assert_eq!(kullback_leibler(&[0.5, 0.5], &[1.0, 0.0]).unwrap(), f64::INFINITY);
        assert_eq!(kullback_leibler(&[1.0, 0.0], &[0.5, 0.5]).unwrap(), 2.0_f64.ln());
        assert_eq!(kullback_leibler(&[0.3, 0.7], &[0.3, 0.7]).unwrap(), 0.0);
        assert!(kullback_leibler(&[1.0], &[0.5, 0.5]).is_err());
        assert!(kullback_leibler(&[-0.1, 1.1], &[0.5, 0.5]).is_err());
    }

    #[test]
    fn bregman_of_negative_entropy_is_the_divergence() {
        let phi = |p: &[f64]| p.iter().map(|it| it * it.ln()).sum();
        let gradient = |p: &[f64]| p.iter().map(|it| it.ln() + 1.0).collect();
        let (p, q) = ([0.2, 0.5, 0.3], [0.4, 0.4, 0.2]);
        let difference = bregman(phi, gradient, &p, &q).unwrap() - kullback_leibler(&p, &q).unwrap();
        assert!(difference.abs() < 1e-12);
        let square = |x: &[f64]| x.iter().map(|it| it * it).sum();
        let twice = |x: &[f64]| x.iter().map(|it| 2.0 * it).collect();
        assert!((bregman(square, twice, &[1.0, 2.0], &[3.0, -1.0]).unwrap() - 13.0).abs() < 1e-12);
    }

    #[test]
    fn hessian_of_the_gaussian_divergence_is_the_fisher_matrix() {
        let (sigma, step) = (1.7, 1e-4);
        let fisher = gaussian_fisher(sigma).unwrap();
        let at = |mu: f64, change: f64| kullback_leibler_gaussian((0.3, sigma), (0.3 + mu, sigma + change)).unwrap();
        let second = |f: &dyn Fn(f64) -> f64| (f(step) - 2.0 * f(0.0) + f(-step)) / (step * step);
        assert!((second(&|it| at(it, 0.0)) - fisher[0][0]).abs() < 1e-5);
        assert!((second(&|it| at(0.0, it)) - fisher[1][1]).abs() < 1e-5);
    }
}
