use super::*;
use crate::metric::LinearRootMetric;
use crate::random::Stream;

const BREAKS: [f64; 6] = [-1.0, -2.0 / 3.0, -1.0 / 3.0, 0.0, 1.0 / 3.0, 1.0];

#[test]
fn features_equal_the_test_vectors_of_the_analytic_metric() {
    let lattice = Lattice::new(&BREAKS, &[0.3], 8).unwrap();
    let f = lattice.features(&LinearRootMetric { depth: 0.8 }, &[(0, 5), (0, 2), (5, 3)]);
    let close = |actual: &[f64], expected: [f64; 3]| {
        assert!(actual.iter().zip(expected).all(|(a, e)| (a - e).abs() < 2e-12), "{actual:?} {expected:?}");
    };
    close(&f.displacement, [2.0, 0.457_676_354_740, -1.235_114_100_917]);
    close(&f.mean, [0.156_742_733_945, -0.641_298_144_206, 0.531_726_367_189]);
    close(&f.velocity, [3.775_210_396_106, 0.863_912_266_234, 1.235_114_100_917]);
    close(&f.initial_velocity, [3.775_210_396_106, 0.863_912_266_234, -0.840_083_260_120]);
}

#[test]
fn eight_nodes_reach_the_documented_accuracy_on_the_stress_metric() {
    let wavelengths: Vec<f64> = (0..=60).map(|i| f64::from(i) / 30.0 - 1.0).collect();
    let metric = MetricNetwork::stress(1);
    let of = |nodes| {
        let lattice = Lattice::new(&BREAKS, &wavelengths, nodes).unwrap();
        lattice.features(&metric, &lattice.all_pairs()).displacement
    };
    let (exact, four, eight) = (of(64), of(4), of(8));
    let error = |x: &[f64]| x.iter().zip(&exact).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
    assert!(error(&eight) < 1e-11 && error(&four) < 1e-5, "{} {}", error(&eight), error(&four));
}

#[test]
fn gradients_of_all_features_equal_central_differences() {
    for softness in [None, Some(1e-3)] {
        let mut lattice = Lattice::new(&BREAKS, &[-0.7, 0.1, 0.9], 8).unwrap();
        if let Some(t) = softness {
            lattice = lattice.soft_minimum(t).unwrap();
        }
        let pairs = lattice.all_pairs();
        let draws: Vec<f64> = (0..3 * pairs.len() * 3).map(|i| Stream::new(2, 2).normal(i as u64)).collect();
        let n = pairs.len() * 3;
        let adjoint = FeatureAdjoint {
            length: draws[..n].to_vec(),
            mean: draws[n..2 * n].to_vec(),
            velocity: draws[2 * n..].to_vec(),
        };
        let mut metric = MetricNetwork::stress(4);
        let loss = |metric: &MetricNetwork| -> f64 {
            let f = lattice.features(metric, &pairs);
            (0..n)
                .map(|i| {
                    draws[i] * f.displacement[i].abs() + draws[n + i] * f.mean[i] + draws[2 * n + i] * f.velocity[i]
                })
                .sum()
        };
        let pass = lattice.forward(&metric, &pairs);
        let mut gradient = vec![0.0; metric.network().parameters().len()];
        lattice.backward(&metric, &pass, &adjoint, &mut gradient);
        assert!(gradient.iter().any(|g| g.abs() > 0.1));
        for i in (0..gradient.len()).step_by(211).chain([gradient.len() - 1]) {
            let h = 1e-6;
            let mut shifted = |h: f64| {
                metric.parameters_mut()[i] += h;
                let value = loss(&metric);
                metric.parameters_mut()[i] -= h;
                value
            };
            let difference = (shifted(h) - shifted(-h)) / (2.0 * h);
            let scale = 1.0 + gradient[i].abs();
            assert!((difference - gradient[i]).abs() < 1e-6 * scale, "parameter {i}: {difference} {}", gradient[i]);
        }
    }
}

/// A metric whose two valleys exchange depth as `tilt` changes sign.
struct TwoValleys {
    tilt: f64,
}

impl Metric for TwoValleys {
    fn jets(&self, _: &[(f64, f64)]) -> Vec<crate::metric::MetricJet> {
        unreachable!("features need values only")
    }

    fn values(&self, points: &[(f64, f64)]) -> Vec<f64> {
        points.iter().map(|(c, _)| (1.0 + 0.3 * (5.0 * c).cos() + self.tilt * c).powi(2)).collect()
    }

    fn version(&self) -> u128 {
        0
    }
}

#[test]
fn soft_minimum_removes_the_jump_of_the_velocity_gradient() {
    let slope = |lattice: &Lattice, tilt: f64| {
        let velocity = |tilt| lattice.features(&TwoValleys { tilt }, &[(0, 1)]).velocity[0];
        (velocity(tilt + 1e-7) - velocity(tilt - 1e-7)) / 2e-7
    };
    let hard = Lattice::new(&[-1.0, 1.0], &[0.0], 16).unwrap();
    let soft = hard.clone().soft_minimum(1e-3).unwrap();
    let jump = |lattice: &Lattice| (slope(lattice, 1e-5) - slope(lattice, -1e-5)).abs();
    assert!(jump(&hard) > 1.0, "hard {}", jump(&hard));
    assert!(jump(&soft) < 0.1, "soft {}", jump(&soft));
}

#[test]
fn lattices_without_two_increasing_break_points_are_refused() {
    assert!(matches!(Lattice::new(&[0.0], &[0.0], 8), Err(Error::Length { .. })));
    assert!(matches!(Lattice::new(&[0.0, 0.0], &[0.0], 8), Err(Error::Order { index: 1, .. })));
    assert!(matches!(Lattice::new(&[0.0, 1.0], &[0.0], 0), Err(Error::Range { .. })));
}

/// Counts the points at which it is evaluated.
struct Counted<'a>(&'a MetricNetwork, std::sync::atomic::AtomicUsize);

impl Metric for Counted<'_> {
    fn values(&self, points: &[(f64, f64)]) -> Vec<f64> {
        self.1.fetch_add(points.len(), std::sync::atomic::Ordering::Relaxed);
        self.0.values(points)
    }

    fn jets(&self, points: &[(f64, f64)]) -> Vec<crate::metric::MetricJet> {
        self.0.jets(points)
    }

    fn version(&self) -> u128 {
        self.0.version()
    }
}

#[test]
fn evaluations_do_not_grow_with_the_number_of_pairs() {
    let network = MetricNetwork::stress(1);
    let breaks: Vec<f64> = (0..6).map(|i| -1.0 + 0.4 * f64::from(i)).collect();
    let lattice = Lattice::new(&breaks, &[-0.5, 0.0, 0.5], 8).unwrap();
    let evaluations = |pairs: &[(usize, usize)]| {
        let metric = Counted(&network, std::sync::atomic::AtomicUsize::new(0));
        let features = lattice.features(&metric, pairs);
        assert_eq!(features.displacement.len(), 3 * pairs.len());
        metric.1.into_inner()
    };
    let (one, all) = (evaluations(&[(0, 1)]), evaluations(&lattice.all_pairs()));
    assert_eq!((one, all), (3 * (5 * 8 + 6), lattice.evaluations()));
    assert_eq!(one, all);
}
