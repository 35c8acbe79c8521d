//! Tests of the simulation.

use super::*;
use crate::strategy::AdaptiveSettings;

const SYNCHRONOUS: Mode = Mode::Synchronous { target: 100, minimum: 50, over_selection_percent: 30 };

fn settings(clients: u64) -> SimulationSettings {
    SimulationSettings {
        clients,
        parameters: 8,
        strategy: Strategy::FedAvg,
        mode: SYNCHRONOUS,
        straggler: StragglerLaw::HalfNormal { mean_seconds: 60.0 },
        drop_out: 0.05,
        heterogeneity: 0.5,
        local_steps: 5,
        local_rate: 0.01,
        gradient_noise: 0.05,
        pause_seconds: 600.0,
        deadline_seconds: 600.0,
        target: 0.01,
        versions: 5_000,
        seed: [1; 32],
    }
}

fn run(settings: SimulationSettings) -> SimulationReport {
    Simulation::new(settings).unwrap().run(|_| {}).unwrap()
}

fn buffered(settings: &SimulationSettings) -> SimulationSettings {
    let mode = Mode::Buffered { concurrency: 130, buffer: 13 };
    SimulationSettings { mode, strategy: Strategy::FedBuff { server_rate: 1.0 }, ..settings.clone() }
}

#[test]
fn fedbuff_reaches_the_loss_of_synchronous_rounds_2_5_times_sooner() {
    for straggler in
        [StragglerLaw::HalfNormal { mean_seconds: 60.0 }, StragglerLaw::LogNormal { median_seconds: 40.0, sigma: 1.0 }]
    {
        let common = SimulationSettings { straggler, ..settings(20_000) };
        let synchronous = run(common.clone()).seconds_to_target.unwrap();
        let buffered = run(buffered(&common)).seconds_to_target.unwrap();
        let ratio = synchronous / buffered;
        assert!(ratio >= 2.5, "{ratio}: {synchronous} s against {buffered} s");
    }
}

#[test]
fn hundred_thousand_clients_take_part() {
    let many = SimulationSettings {
        mode: Mode::Synchronous { target: 2_000, minimum: 1_000, over_selection_percent: 30 },
        ..settings(100_000)
    };
    let report = run(many);
    assert!(report.seconds_to_target.is_some());
    assert!(report.participants > 50_000, "{}", report.participants);
    assert!(report.tasks > report.updates);
    let last = report.history.last().unwrap();
    assert!(last.loss <= 0.01 && last.updates == 2_000);
}

#[test]
fn simulation_is_a_function_of_its_seed() {
    let (a, b) = (run(settings(500)), run(settings(500)));
    assert_eq!(a, b);
    assert_ne!(run(SimulationSettings { seed: [2; 32], ..settings(500) }), a);
}

#[test]
fn every_mode_and_mean_strategy_reaches_the_target() {
    let adaptive = AdaptiveSettings { eta: 0.05, ..AdaptiveSettings::default() };
    for (strategy, mode) in [
        (Strategy::FedProx { mu: 0.1 }, SYNCHRONOUS),
        (Strategy::FedAdam(adaptive), SYNCHRONOUS),
        (Strategy::FedYogi(adaptive), SYNCHRONOUS),
        (Strategy::FedAdagrad(AdaptiveSettings { eta: 0.2, ..adaptive }), SYNCHRONOUS),
        (Strategy::Median, SYNCHRONOUS),
        (Strategy::FedAvg, Mode::Poisson { rate: 0.1 }),
    ] {
        let report = run(SimulationSettings { strategy: strategy.clone(), mode, target: 0.05, ..settings(1_000) });
        assert!(report.seconds_to_target.is_some(), "{strategy:?}: {:?}", report.history.last());
    }
}

#[test]
fn rounds_in_which_nearly_all_clients_disappear_are_aborted() {
    let report = run(SimulationSettings { drop_out: 0.95, ..settings(2_000) });
    assert_eq!(report.outcome, Some(Outcome::TooManyAborts));
    assert_eq!((report.aborted, report.updates), (100, 0));
    assert!(report.wasted > 0);
}

#[test]
fn loss_of_clients_differs_with_heterogeneity() {
    let [low, _, high] = run(settings(1_000)).client_loss_percentiles;
    assert!(high > 2.0 * low, "{low} {high}");
    let [_, _, alike] = run(SimulationSettings { heterogeneity: 0.0, ..settings(1_000) }).client_loss_percentiles;
    assert!(alike < low);
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let refused = |settings: SimulationSettings| settings.validate().unwrap_err().field;
    let scaffold = Strategy::Scaffold { server_rate: 1.0, population: 10 };
    assert_eq!(refused(SimulationSettings { strategy: scaffold, ..settings(10) }), "strategy");
    assert_eq!(
        refused(SimulationSettings { strategy: Strategy::FedBuff { server_rate: 1.0 }, ..settings(10) }),
        "mode"
    );
    assert_eq!(refused(SimulationSettings { drop_out: 1.0, ..settings(10) }), "dropOut");
    assert_eq!(refused(SimulationSettings { clients: 0, ..settings(10) }), "clients");
}
