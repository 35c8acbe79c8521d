//! Riemannian metrics of any dimension, and their connection.

use crate::baseline::solve;
use crate::metric::Metric;

/// A metric tensor and its derivatives at one point, d = dimension.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorJet {
    /// `g[i d + j]`, symmetric and positive definite.
    pub g: Vec<f64>,
    /// `first[(m d + i) d + j] = d_m g_ij`.
    pub first: Vec<f64>,
    /// `second[((m d + n) d + i) d + j] = d_m d_n g_ij`.
    pub second: Vec<f64>,
}

/// A Riemannian metric in coordinates.
pub trait Manifold {
    /// Number of coordinates, at least 1.
    fn dimension(&self) -> usize;

    /// The metric tensor and its exact first and second derivatives at `x`.
    fn jet(&self, x: &[f64]) -> TensorJet;
}

/// Christoffel symbols `gamma[(k d + i) d + j]` and their derivatives `derivative[((m d + k) d + i) d + j]`.
pub(crate) fn connection(d: usize, jet: &TensorJet) -> (Vec<f64>, Vec<f64>) {
    let g1 = |m: usize, i: usize, j: usize| jet.first[(m * d + i) * d + j];
    let g2 = |m: usize, n: usize, i: usize, j: usize| jet.second[((m * d + n) * d + i) * d + j];
    let rows = || (0..d).map(|i| jet.g[i * d..(i + 1) * d].to_vec()).collect::<Vec<_>>();
    let inverse: Vec<Vec<f64>> =
        (0..d).map(|k| solve(rows(), (0..d).map(|i| f64::from(u8::from(i == k))).collect())).collect();
    // Symbols of the first kind with l lowered, and their derivatives.
    let low = |l: usize, i: usize, j: usize| 0.5 * (g1(i, j, l) + g1(j, i, l) - g1(l, i, j));
    let low_derivative =
        |m: usize, l: usize, i: usize, j: usize| 0.5 * (g2(m, i, j, l) + g2(m, j, i, l) - g2(m, l, i, j));
    let mut gamma = vec![0.0; d * d * d];
    let mut derivative = vec![0.0; d * d * d * d];
    for k in 0..d {
        for i in 0..d {
            for j in 0..d {
                gamma[(k * d + i) * d + j] = (0..d).map(|l| inverse[k][l] * low(l, i, j)).sum();
            }
        }
    }
    for m in 0..d {
        for k in 0..d {
            for i in 0..d {
                for j in 0..d {
                    // d(g^-1) = -g^-1 dg g^-1, so the first term is -g^ka d_m g_ab Gamma^b_ij.
                    let mut sum = 0.0;
                    for (a, weight) in inverse[k].iter().enumerate() {
                        let turned: f64 = (0..d).map(|b| g1(m, a, b) * gamma[(b * d + i) * d + j]).sum();
                        sum += weight * (low_derivative(m, a, i, j) - turned);
                    }
                    derivative[((m * d + k) * d + i) * d + j] = sum;
                }
            }
        }
    }
    (gamma, derivative)
}

/// `g_ij u^i u^j`, constant along a geodesic with velocity u.
pub(crate) fn squared_speed(d: usize, g: &[f64], u: &[f64]) -> f64 {
    (0..d * d).map(|ij| g[ij] * u[ij / d] * u[ij % d]).sum()
}

/// A [`Metric`] of one dimension at one wavelength.
#[derive(Clone, Copy)]
pub struct Line<'a> {
    /// The metric.
    pub metric: &'a dyn Metric,
    /// Normalised wavelength.
    pub wavelength: f64,
}

impl Manifold for Line<'_> {
    fn dimension(&self) -> usize {
        1
    }

    fn jet(&self, x: &[f64]) -> TensorJet {
        let jet = self.metric.jets(&[(x[0], self.wavelength)])[0];
        TensorJet { g: vec![jet.g], first: vec![jet.first], second: vec![jet.second] }
    }
}

/// Spaces of two dimensions whose geodesics are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surface {
    /// The plane in polar coordinates (r, phi): straight lines.
    Polar,
    /// The unit sphere in (colatitude, longitude): great circles.
    Sphere,
    /// The upper half-plane (x, y) with `(dx^2 + dy^2) / y^2`: semicircles.
    HalfPlane,
}

impl Manifold for Surface {
    fn dimension(&self) -> usize {
        2
    }

    fn jet(&self, x: &[f64]) -> TensorJet {
        let mut jet = TensorJet { g: vec![1.0, 0.0, 0.0, 1.0], first: vec![0.0; 8], second: vec![0.0; 16] };
        match self {
            Self::Polar => {
                (jet.g[3], jet.first[3], jet.second[3]) = (x[0] * x[0], 2.0 * x[0], 2.0);
            }
            Self::Sphere => {
                let (sin, double) = (x[0].sin(), 2.0 * x[0]);
                (jet.g[3], jet.first[3], jet.second[3]) = (sin * sin, double.sin(), 2.0 * double.cos());
            }
            Self::HalfPlane => {
                let y = x[1];
                for ij in [0, 3] {
                    (jet.g[ij], jet.first[4 + ij], jet.second[12 + ij]) =
                        (y.powi(-2), -2.0 * y.powi(-3), 6.0 * y.powi(-4));
                }
            }
        }
        jet
    }
}
