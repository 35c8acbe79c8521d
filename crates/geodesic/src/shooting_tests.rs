use super::*;
use crate::manifold::Surface;
use crate::metric::{LinearRootMetric, Metric};
use crate::random::Stream;
use crate::trajectory::trajectory;

#[test]
fn shooting_agrees_with_the_closed_form_on_one_dimensional_metrics() {
    let (analytic, network) = (LinearRootMetric { depth: 0.8 }, MetricNetwork::stress(2));
    let draws = Stream::new(12, 1);
    let mut index = 0;
    for metric in [&analytic as &dyn Metric, &network] {
        for _ in 0..6 {
            let mut next = || {
                index += 1;
                2.0 * draws.uniform(index) - 1.0
            };
            let bvp = Problem { start: next(), end: next(), wavelength: next() };
            let line = Line { metric, wavelength: bvp.wavelength };
            let engine = BatchedShooting::default();
            let shot = engine.solve(&[(&line, &[bvp.start], &[bvp.end])]).unwrap().remove(0);
            assert!(shot.converged && shot.invariant_drift < 1e-8, "{bvp:?} {shot:?}");
            let exact = trajectory(metric, bvp, &[0.37, 0.8]).unwrap();
            assert!((shot.initial_velocity[0] - exact.initial_velocity).abs() < 1e-8, "{bvp:?} {shot:?}");
            let path = engine.path(&line, &[bvp.start], &shot.initial_velocity, &[0.37, 0.8]).unwrap();
            for (state, (c, v)) in path.iter().zip(exact.c.iter().zip(&exact.velocity)) {
                assert!((state[0] - c).abs() < 1e-8 && (state[1] - v).abs() < 1e-8, "{bvp:?}");
            }
        }
    }
}

#[test]
fn geodesics_of_known_surfaces_have_their_known_length() {
    let length = |surface: Surface, a: [f64; 2], b: [f64; 2]| {
        let shot = BatchedShooting::default().solve(&[(&surface, &a, &b)]).unwrap().remove(0);
        assert!(shot.converged, "{surface:?} {shot:?}");
        squared_speed(2, &surface.jet(&a).g, &shot.initial_velocity).sqrt()
    };
    let polar = length(Surface::Polar, [1.0, 0.2], [2.0, 1.4]);
    assert!((polar - (5.0 - 4.0 * 1.2f64.cos()).sqrt()).abs() < 1e-8, "{polar}");
    let sphere = length(Surface::Sphere, [1.0, 0.1], [1.8, 1.3]);
    let cosine = 1.0f64.cos() * 1.8f64.cos() + 1.0f64.sin() * 1.8f64.sin() * 1.2f64.cos();
    assert!((sphere - cosine.acos()).abs() < 1e-8, "{sphere}");
    let half_plane = length(Surface::HalfPlane, [0.0, 1.0], [1.5, 0.7]);
    assert!((half_plane - (1.0f64 + (2.25 + 0.09) / 1.4).acosh()).abs() < 1e-8, "{half_plane}");
}

#[test]
fn a_problem_that_fails_is_reported_and_changes_no_other_result() {
    // One Newton step without continuation is not enough on this metric.
    let engine = BatchedShooting { newton_steps: 1, residual: 1e-13, ..BatchedShooting::default() };
    let (metric, easy) = (LinearRootMetric { depth: 0.95 }, LinearRootMetric { depth: 0.0 });
    let (hard, easy) = (Line { metric: &metric, wavelength: 0.0 }, Line { metric: &easy, wavelength: 0.0 });
    let both = engine.solve(&[(&hard, &[-1.0], &[1.0]), (&easy, &[-1.0], &[1.0])]).unwrap();
    assert!(!both[0].converged && both[0].residual > 1e-13, "{:?}", both[0]);
    let alone = engine.solve(&[(&easy, &[-1.0], &[1.0])]).unwrap();
    assert!(both[1] == alone[0] && alone[0].converged);
    let default = BatchedShooting::default().solve(&[(&hard, &[-1.0], &[1.0])]).unwrap();
    assert!(default[0].converged, "{default:?}");
    assert_eq!(default, BatchedShooting::default().solve(&[(&hard, &[-1.0], &[1.0])]).unwrap());
}

#[test]
fn implicit_gradient_of_the_initial_velocity_equals_that_of_the_closed_form() {
    let mut metric = MetricNetwork::stress(6);
    let bvp = Problem { start: -0.9, end: 0.7, wavelength: 0.3 };
    let engine = BatchedShooting::default();
    let line = Line { metric: &metric, wavelength: 0.3 };
    let shot = engine.solve(&[(&line, &[bvp.start], &[bvp.end])]).unwrap().remove(0);
    let mut gradient = vec![0.0; metric.network().parameters().len()];
    engine.velocity_gradient(&metric, bvp, &shot, 1.0, &mut gradient).unwrap();
    assert!(gradient.iter().any(|g| g.abs() > 1e-2));
    for i in (0..gradient.len()).step_by(501) {
        let mut shifted = |h: f64| {
            metric.parameters_mut()[i] += h;
            let value = trajectory(&metric, bvp, &[]).unwrap().initial_velocity;
            metric.parameters_mut()[i] -= h;
            value
        };
        let difference = (shifted(1e-5) - shifted(-1e-5)) / 2e-5;
        assert!((difference - gradient[i]).abs() < 1e-6, "parameter {i}: {difference} {}", gradient[i]);
    }
    let failed = Shot { converged: false, ..shot };
    assert!(matches!(engine.velocity_gradient(&metric, bvp, &failed, 1.0, &mut gradient), Err(Error::Incomplete(_))));
}
