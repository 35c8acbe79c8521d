//! Closed-form checks: client k has the loss `a_k/2 (y - t_k)^2`.

use super::local::{Scaffold, proximal_gradient};
use super::*;

/// A client of the toy: curvature, optimum, samples.
#[derive(Clone, Copy)]
struct Toy {
    a: f64,
    t: f64,
    samples: u64,
}

const UNEQUAL: [Toy; 3] =
    [Toy { a: 1.0, t: -1.0, samples: 10 }, Toy { a: 4.0, t: 2.0, samples: 10 }, Toy { a: 0.5, t: 5.0, samples: 10 }];

fn update(client: usize, version: u64, samples: u64, delta: &[f64]) -> Update {
    let delta = delta.iter().map(|value| *value as f32).collect();
    Update { client: client as u64, version, samples, delta, control: None }
}

fn aggregator(strategy: Strategy, model: &[f32]) -> Aggregator {
    Aggregator::new(strategy, model.to_vec()).unwrap()
}

/// Runs rounds in which `local` moves each client from x.
fn rounds(server: &mut Aggregator, count: u32, clients: &[Toy], local: impl Fn(&Toy, f64) -> f64) -> f64 {
    for _ in 0..count {
        let x = f64::from(server.model()[0]);
        let version = server.version();
        let updates: Vec<Update> = clients
            .iter()
            .enumerate()
            .map(|(client, toy)| update(client, version, toy.samples, &[local(toy, x) - x]))
            .collect();
        server.aggregate(&updates).unwrap();
    }
    f64::from(server.model()[0])
}

fn near(value: f64, expected: f64, tolerance: f64) {
    assert!((value - expected).abs() < tolerance, "{value}, expected {expected}");
}

/// The many local gradient steps that reach a client's own optimum.
fn exact(toy: &Toy, _: f64) -> f64 {
    toy.t
}

#[test]
fn aggregate_of_deltas_moves_the_model_and_never_replaces_it() {
    let mut server = aggregator(Strategy::FedAvg, &[1.0, 2.0]);
    server.aggregate(&[update(0, 0, 1, &[0.1, -0.1]), update(1, 0, 1, &[0.2, 0.0])]).unwrap();
    near(f64::from(server.model()[0]), 1.15, 1e-6);
    near(f64::from(server.model()[1]), 1.95, 1e-6);
}

#[test]
fn fedavg_with_one_step_follows_the_weighted_gradient() {
    let clients = [Toy { a: 2.0, t: 1.0, samples: 1 }, Toy { a: 2.0, t: 4.0, samples: 3 }];
    let mut server = aggregator(Strategy::FedAvg, &[10.0]);
    let x = rounds(&mut server, 1, &clients, |toy, x| x - 0.1 * toy.a * (x - toy.t));
    near(x, 10.0 - 0.1 * 2.0 * (10.0 - 3.25), 1e-5);
}

#[test]
fn fedavg_with_exact_local_solutions_misses_the_global_minimum() {
    let mut server = aggregator(Strategy::FedAvg, &[10.0]);
    let x = rounds(&mut server, 50, &UNEQUAL, exact);
    near(x, 2.0, 1e-5);
    let minimum = UNEQUAL.iter().map(|toy| toy.a * toy.t).sum::<f64>() / UNEQUAL.iter().map(|toy| toy.a).sum::<f64>();
    assert!((x - minimum).abs() > 0.1, "{minimum}");
}

#[test]
fn scaffold_reaches_the_global_minimum_on_unequal_clients() {
    let mut server = aggregator(Strategy::Scaffold { server_rate: 1.0, population: 3 }, &[10.0]);
    let (rate, steps) = (0.02, 10);
    let mut clients: Vec<Scaffold> = UNEQUAL.iter().map(|_| Scaffold::new(1)).collect();
    for _ in 0..400 {
        let (x, c) = ([f64::from(server.model()[0])], server.control().to_vec());
        let updates: Vec<Update> = UNEQUAL
            .iter()
            .zip(&mut clients)
            .enumerate()
            .map(|(client, (toy, scaffold))| {
                let mut y = x;
                for _ in 0..steps {
                    let gradient = [toy.a * (y[0] - toy.t)];
                    scaffold.step(&mut y, &gradient, &c, rate);
                }
                let control = Some(scaffold.finish(&x, &y, &c, steps, rate));
                Update { control, ..update(client, server.version(), 10, &[y[0] - x[0]]) }
            })
            .collect();
        server.aggregate(&updates).unwrap();
    }
    near(f64::from(server.model()[0]), (-1.0 + 8.0 + 2.5) / 5.5, 1e-3);
}

/// Solves a client's proximal problem by gradient descent.
fn proximal(toy: &Toy, x: f64, mu: f64) -> f64 {
    let mut y = [x];
    for _ in 0..2_000 {
        let mut gradient = [toy.a * (y[0] - toy.t)];
        proximal_gradient(&mut gradient, &y, &[x], mu);
        y[0] -= gradient[0] / (toy.a + mu) * 0.5;
    }
    y[0]
}

#[test]
fn fedprox_solution_is_closed_form_and_deltas_vanish_with_large_mu() {
    let toy = UNEQUAL[1];
    near(proximal(&toy, 10.0, 0.5), (toy.a * toy.t + 0.5 * 10.0) / (toy.a + 0.5), 1e-9);
    assert!((proximal(&toy, 10.0, 1e9) - 10.0).abs() < 1e-6);
    let mut server = aggregator(Strategy::FedProx { mu: 1e9 }, &[10.0]);
    near(rounds(&mut server, 1, &UNEQUAL, |toy, x| proximal(toy, x, 1e9)), 10.0, 1e-5);
}

#[test]
fn fedbuff_over_all_clients_without_staleness_equals_fedavg() {
    let (mut plain, mut buffered) =
        (aggregator(Strategy::FedAvg, &[10.0]), aggregator(Strategy::FedBuff { server_rate: 1.0 }, &[10.0]));
    let local = |toy: &Toy, x: f64| x - 0.1 * toy.a * (x - toy.t);
    near(rounds(&mut plain, 7, &UNEQUAL, local), rounds(&mut buffered, 7, &UNEQUAL, local), 1e-9);
}

#[test]
fn fedbuff_weighs_by_staleness_and_refuses_what_is_too_old() {
    let mut server = aggregator(Strategy::FedBuff { server_rate: 1.0 }, &[0.0]);
    for _ in 0..3 {
        server.advance(&[0.0]).unwrap();
    }
    server.aggregate(&[update(0, 3, 1, &[1.0]), update(1, 0, 1, &[1.0])]).unwrap();
    near(f64::from(server.model()[0]), (1.0 + 0.5) / 2.0, 1e-6);
    for _ in 0..21 {
        server.advance(&[0.0]).unwrap();
    }
    let error = server.aggregate(&[update(0, 4, 1, &[1.0])]).unwrap_err();
    assert_eq!(error.to_string(), "version: 4 is not allowed; allowed: at most 20 versions old, the current one is 25");
}

#[test]
fn adaptive_strategies_follow_their_formulas() {
    let settings = AdaptiveSettings::default();
    let (d0, d1) = (0.5, -0.2);
    let delta = |server: &mut Aggregator| {
        server.advance(&[d0]).unwrap();
        server.advance(&[d1]).unwrap();
        f64::from(server.model()[0])
    };
    let (m0, m1) = (0.1 * d0, 0.09 * d0 + 0.1 * d1);
    let rate = |t: i32| 0.1 * (1.0 - 0.99_f64.powi(t + 1)).sqrt() / (1.0 - 0.9_f64.powi(t + 1));
    let v0: f64 = 0.01 * d0 * d0;
    let adam: f64 = 0.99 * v0 + 0.01 * d1 * d1;
    let first = rate(0) * m0 / (v0.sqrt() + 1e-3);
    let expected = first + rate(1) * m1 / (adam.sqrt() + 1e-3);
    near(delta(&mut aggregator(Strategy::FedAdam(settings), &[0.0])), expected, 1e-6);
    // v0 is below d1^2, so Yogi adds.
    let yogi: f64 = v0 + 0.01 * d1 * d1;
    let expected = first + rate(1) * m1 / (yogi.sqrt() + 1e-3);
    near(delta(&mut aggregator(Strategy::FedYogi(settings), &[0.0])), expected, 1e-6);
    let sum: f64 = d0 * d0 + d1 * d1;
    let expected = 0.1 * m0 / (d0 + 1e-3) + 0.1 * m1 / (sum.sqrt() + 1e-3);
    near(delta(&mut aggregator(Strategy::FedAdagrad(settings), &[0.0])), expected, 1e-6);
}

#[test]
fn robust_strategies_ignore_a_hostile_update() {
    let honest = [0.9, 1.0, 1.1, 1.2];
    let mut updates: Vec<Update> = honest.iter().enumerate().map(|(k, d)| update(k, 0, 1, &[*d])).collect();
    updates.push(update(4, 0, 1, &[1e6]));
    let result = |strategy| {
        let mut server = aggregator(strategy, &[0.0]);
        server.aggregate(&updates).unwrap();
        f64::from(server.model()[0])
    };
    near(result(Strategy::Median), 1.1, 1e-6);
    near(result(Strategy::TrimmedMean { beta: 0.2 }), 1.1, 1e-6);
    near(result(Strategy::Krum { byzantine: 1, keep: 1 }), 1.0, 1e-6);
    assert!(result(Strategy::Krum { byzantine: 1, keep: 3 }) < 1.2);
    assert!(result(Strategy::FedAvg) > 1e5);
    let mut server = aggregator(Strategy::Krum { byzantine: 2, keep: 1 }, &[0.0]);
    assert_eq!(server.aggregate(&updates).unwrap_err().field, "updates");
}

#[test]
fn median_of_an_even_number_is_the_mean_of_the_middle() {
    let updates: Vec<Update> = [4.0, 1.0, 3.0, 2.0].iter().enumerate().map(|(k, d)| update(k, 0, 1, &[*d])).collect();
    let mut server = aggregator(Strategy::Median, &[0.0]);
    server.aggregate(&updates).unwrap();
    near(f64::from(server.model()[0]), 2.5, 1e-6);
}

#[test]
fn krum_counts_the_nearest_neighbours_and_refuses_too_few_updates() {
    let krum = |values: &[f64], byzantine, keep| {
        let updates: Vec<Update> = values.iter().enumerate().map(|(k, d)| update(k, 0, 1, &[*d])).collect();
        let mut server = aggregator(Strategy::Krum { byzantine, keep }, &[0.0]);
        server.aggregate(&updates).map(|()| f64::from(server.model()[0]))
    };
    // The hostile update comes first: no other update is near it.
    near(krum(&[100.0, 1.0, 1.1, 0.9, 1.05], 1, 1).unwrap(), 1.05, 1e-6);
    assert_eq!(krum(&[1.0; 4], 1, 1).unwrap_err().field, "updates", "2 f + 3 are 5");
    assert_eq!(krum(&[1.0; 5], 1, 5).unwrap_err().field, "updates", "all would be kept, the hostile one too");
}

#[test]
fn strategies_with_settings_out_of_range_are_refused() {
    let field = |strategy: Strategy| Aggregator::new(strategy, vec![0.0]).unwrap_err().field;
    assert_eq!(field(Strategy::FedProx { mu: 0.0 }), "mu");
    assert_eq!(field(Strategy::Scaffold { server_rate: 1.0, population: 0 }), "population");
    assert_eq!(field(Strategy::Scaffold { server_rate: f64::NAN, population: 1 }), "serverRate");
    assert_eq!(field(Strategy::FedBuff { server_rate: 0.0 }), "serverRate");
    assert_eq!(field(Strategy::TrimmedMean { beta: 0.5 }), "beta");
    assert_eq!(field(Strategy::Krum { byzantine: 0, keep: 0 }), "keep");
    let valid = AdaptiveSettings::default();
    for (name, settings) in [
        ("eta", AdaptiveSettings { eta: 0.0, ..valid }),
        ("beta1", AdaptiveSettings { beta1: 1.0, ..valid }),
        ("beta2", AdaptiveSettings { beta2: 1.0, ..valid }),
        ("tau", AdaptiveSettings { tau: 0.0, ..valid }),
    ] {
        assert_eq!(field(Strategy::FedAdam(settings)), name);
    }
    let model = |model: &[f32]| Aggregator::new(Strategy::FedAvg, model.to_vec()).unwrap_err().field;
    assert_eq!([model(&[]), model(&[0.0, f32::NAN])], ["model", "model"]);
}

#[test]
fn server_follows_the_control_variates_of_its_clients() {
    let mut server = aggregator(Strategy::Scaffold { server_rate: 0.5, population: 4 }, &[0.0]);
    let (rate, steps) = (0.1, 5);
    let mut clients = [Scaffold::new(1), Scaffold::new(1)];
    for _ in 0..3 {
        let (x, c) = (f64::from(server.model()[0]), server.control().to_vec());
        let mut updates = Vec::new();
        for (client, scaffold) in clients.iter_mut().enumerate() {
            // One step from 0 without a gradient moves by the correction alone.
            let mut moved = [0.0];
            scaffold.step(&mut moved, &[0.0], &c, 1.0);
            near(-moved[0], f64::from(server.correction(client as u64)[0]), 1e-6);
            let delta = [1.0 + client as f64];
            let update = update(client, server.version(), 1, &delta);
            let change = server.control_change(&update.delta, rate * f64::from(steps));
            let expected = scaffold.finish(&[x], &[x + delta[0]], &c, steps, rate);
            near(f64::from(change[0]), f64::from(expected[0]), 1e-5);
            updates.push(Update { control: Some(change), ..update });
        }
        let changes: f64 = updates.iter().flat_map(|update| &update.control).map(|change| f64::from(change[0])).sum();
        server.aggregate(&updates).unwrap();
        near(f64::from(server.model()[0]), x + 0.5 * 1.5, 1e-5);
        // Two of four clients: half of the mean change.
        near(server.control()[0], c[0] + changes / 4.0, 1e-9);
    }
}

#[test]
fn one_invalid_update_leaves_the_model_unchanged() {
    let mut server = aggregator(Strategy::FedAvg, &[1.0, 2.0]);
    let before = server.clone();
    let valid = update(0, 0, 1, &[0.1, 0.1]);
    for invalid in [
        update(1, 0, 1, &[0.1]),
        update(1, 0, 1, &[f64::NAN, 0.0]),
        update(0, 0, 1, &[0.0, 0.0]),
        update(1, 1, 1, &[0.0; 2]),
    ] {
        assert!(server.aggregate(&[valid.clone(), invalid]).is_err());
        assert_eq!(server, before);
    }
    assert_eq!(server.aggregate(&[]).unwrap_err().field, "updates");
    assert_eq!(server.advance(&[0.0; 3]).unwrap_err().field, "aggregate");
    assert_eq!(server.advance(&[0.0, f64::NAN]).unwrap_err().value, "not finite");
    assert_eq!(server, before);
    assert!(server.aggregate(&[update(0, 0, 1, &[f64::from(f32::MAX), 0.0])]).is_ok());
    let moved = server.clone();
    assert_eq!(server.aggregate(&[update(0, 0, 1, &[0.0; 2])]).unwrap_err().field, "version", "of a synchronous round");
    assert!(server.aggregate(&[update(0, 1, 1, &[f64::from(f32::MAX), 0.0])]).is_err(), "the sum overflows");
    assert_eq!(server, moved);
}

#[test]
fn aggregate_does_not_depend_on_the_order_of_arrival() {
    // The first two clients cancel, and hide what is added between them: the order is visible.
    let value = |k: usize| [1e25, -1e25].get(k).copied().unwrap_or(k as f64);
    let updates: Vec<Update> = (0..20).map(|k| update(k, 0, 1 + k as u64 / 2, &[0.1 * k as f64, value(k)])).collect();
    let mut other = updates.clone();
    other.rotate_left(1);
    let (mut a, mut b) = (aggregator(Strategy::FedAvg, &[0.0; 2]), aggregator(Strategy::FedAvg, &[0.0; 2]));
    a.aggregate(&updates).unwrap();
    assert!(a.model()[1] > 1.0);
    b.aggregate(&other).unwrap();
    assert_eq!(a, b);
}
