//! The reference metamodel on its synthetic data, as `examples/replay.yaml` trains it.
#![allow(clippy::unwrap_used, reason = "a helper of a test may panic")]

use engram_api::ReplayRun;
use engram_train::Alone;
use engram_train::job::{Job, Rows, evaluate};

/// The Replay run of the example.
fn example() -> Job {
    let text = include_str!("../../../examples/replay.yaml");
    let run: serde_json::Value = serde_saphyr::from_str(text.split("\n---\n").nth(1).unwrap()).unwrap();
    let run: ReplayRun = serde_json::from_value(run["spec"]["replay"].clone()).unwrap();
    Job::new(&run).unwrap()
}

#[test]
#[ignore = "full: half a minute of computation"]
fn metamodel_of_500_features_predicts_held_out_scores_with_a_correlation_above_0_9() {
    let job = example();
    let data = job.dataset().unwrap();
    let mut trainer = job.trainer().unwrap();
    assert_eq!((data.features, trainer.model().parameter_count()), (500, 432_641));
    for step in 0..job.steps {
        let (range, order) = job.part(0, 1);
        let rows = Rows::of(trainer.model(), &data, &job.samples(0, &data, step, &range)[0]);
        trainer.step(&[rows.labeled(0).unwrap()], &order, &mut Alone).unwrap();
    }
    let found = evaluate(trainer.model(), job.spec.loss.kind, &data).unwrap();
    println!("{found:?}");
    assert!(found.correlation > 0.9 && found.spread_ratio > 0.3, "{found:?}");
}
