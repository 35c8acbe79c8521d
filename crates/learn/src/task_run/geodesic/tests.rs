use super::super::local::run_locally;
use super::*;
use crate::source::StopFlag;
use engram_api::{DataFile, SpectraSource};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

fn spec(yaml: &str) -> GeodesicRun {
    serde_json::from_str(yaml).unwrap()
}

fn small(extra: &str) -> GeodesicRun {
    spec(&format!(
        r#"{{"source":{{"synthetic":{{"name":"S4","wavelengths":61}}}},"starts":2{extra},"training":{{"steps":30,"evaluateEvery":10}}}}"#
    ))
}

#[test]
fn findings_do_not_depend_on_the_number_of_workers_and_label_the_leaking_variant() {
    let run = Geodesic::new(&small(r#","leakingVariant":true,"calibratedBands":true"#), None).unwrap();
    let tasks = run.plan(&[]).unwrap();
    assert_eq!(tasks.len(), 14 + 9);
    assert_eq!((&*tasks[0].name, &*tasks[13].name), ("fold 1, start 1", "leaking variant, start 2"));
    assert_eq!(tasks[22].name, "calibration without 5 and 6");
    assert!(tasks[13].cost > tasks[0].cost && tasks[0].cost > tasks[22].cost);
    let (one, three) = (run_locally(&run, 1).unwrap(), run_locally(&run, 3).unwrap());
    assert_eq!(one, three);
    assert!(one.metrics["mean_rmse"] > 0.0 && one.metrics.contains_key("leaking_mean_rmse"));
    assert!(one.page.contains("leaking variant (has seen the spectra)") && one.page.contains("40 ppb"));
    assert!(one.page.contains("The closed form predicts.") && one.page.contains("christoffel grid"));
    assert!(!one.metrics.contains_key("max_difference_from_closed_form"));
    assert!(one.summary.iter().any(|line| line.starts_with("Leaking variant, not a validation")));
    assert!(one.summary.iter().any(|line| line.starts_with("RBF-GP")), "{:?}", one.summary);
    assert!((one.metrics["noise_level"] / 0.005 - 1.0).abs() < 0.1);
    assert!(
        one.metrics["two_dimensional_mean_rmse"] < 1.5 * one.metrics["best_baseline_mean_rmse"],
        "{:?}",
        one.metrics
    );
    assert!(one.summary.iter().any(|line| line.contains("RBF-GP; it is at least as good in ")), "{:?}", one.summary);
    for part in [
        "geometry of two dimensions",
        "Against the best baseline of each fold",
        "90 % band",
        "Concentration from a spectrum",
        "Learned metric",
        "Geodesics",
        "Agreement of the engines",
        "Loss curves",
        "<polygon",
    ] {
        assert!(one.page.contains(part), "{part}");
    }
    assert!((0.0..=1.0).contains(&one.metrics["band_coverage"]) && one.metrics["concentration_error_ppb"] >= 0.0);
}

#[test]
fn another_engine_predicts_and_the_report_names_it_with_its_distance_from_the_closed_form() {
    let spec = GeodesicRun { starts: 1, ..small(r#","engine":"ChristoffelGrid""#) };
    let found = run_locally(&Geodesic::new(&spec, None).unwrap(), 2).unwrap();
    let difference = found.metrics["max_difference_from_closed_form"];
    assert!(difference > 0.0 && difference < 1e-4, "{difference}");
    let sentence = "ChristoffelGrid predicts; its absorbances differ";
    assert!(found.page.contains(sentence) && found.summary.iter().any(|line| line.contains(sentence)));
    let mut flow = small(r#","engine":"ChristoffelGrid""#);
    flow.training.decoder = SpectraDecoder::Flow;
    let error = Geodesic::new(&flow, None).err().unwrap().to_string();
    assert_eq!(error, "spec.geodesic: engine ChristoffelGrid does not support decoder Flow");
}

#[test]
fn samples_of_a_table_get_a_concentration_and_an_interval() {
    let nm: Vec<f64> = (0..61).map(|i| 200.0 + 10.0 * f64::from(i)).collect();
    let mixed = |ppb: &[f64]| {
        let noise = engram_geodesic::Noise { additive: 0.002, ..Default::default() };
        engram_geodesic::Generator::Mixed.spectra(ppb, &nm, &noise, 5).unwrap()
    };
    let sample: String = mixed(&[25.0]).row(0).iter().map(|a| format!(",{a}")).collect();
    let text = mixed(&[0.0, 10.0, 20.0, 30.0, 40.0, 60.0]).to_csv() + "? river" + &sample + "\n";
    let mut spec = GeodesicRun { source: SpectraSource::Csv(DataFile::default()), starts: 1, ..small("") };
    spec.training.steps = 60;
    spec.training.stride = 2;
    let run = Geodesic::new(&spec, Some(text.as_bytes())).unwrap();
    assert_eq!(run.plan(&[]).unwrap()[6].name, "all spectra, start 1");
    let found = run_locally(&run, 2).unwrap();
    let estimate = &found.outputs["sample_river"];
    let ppb: f64 = estimate.split(' ').next().unwrap().parse().unwrap();
    assert!((ppb - 25.0).abs() < 8.0, "{estimate}");
    assert!(found.page.contains("Samples of unknown concentration") && !found.page.contains("leaking variant"));
    assert!(!found.metrics.contains_key("leaking_mean_rmse"));
}

/// Takes a checkpoint after a number of steps and then stops the task.
struct Interrupted {
    asked: AtomicU64,
    after: u64,
    stop: StopFlag,
    resumed_from: Option<Vec<u8>>,
    kept: Mutex<Option<(Vec<u8>, f64)>>,
    reported: Mutex<Vec<f64>>,
}

impl Interrupted {
    fn after(after: u64, resumed_from: Option<Vec<u8>>) -> Self {
        let (stop, kept, reported) = (StopFlag::default(), Mutex::default(), Mutex::default());
        Self { asked: AtomicU64::new(0), after, stop, resumed_from, kept, reported }
    }
}

impl TaskContext for Interrupted {
    fn progress(&self, fraction: f64) {
        self.reported.lock().unwrap().push(fraction);
    }

    fn stop(&self) -> &StopFlag {
        &self.stop
    }

    fn threads(&self) -> usize {
        1
    }

    fn resumed_from(&self) -> Option<&[u8]> {
        self.resumed_from.as_deref()
    }

    fn checkpoint_due(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed) + 1 == self.after
    }

    fn checkpoint(&self, state: Vec<u8>, fraction: f64) {
        *self.kept.lock().unwrap() = Some((state, fraction));
        self.stop.set();
    }
}

#[test]
fn task_continues_from_its_checkpoint_at_the_exact_step_with_the_same_bits() {
    let run = Geodesic::new(&small(""), None).unwrap();
    let task = &run.plan(&[]).unwrap()[2];
    let whole = run.execute(task, &Interrupted::after(u64::MAX, None)).unwrap();
    let first = Interrupted::after(17, None);
    assert!(matches!(run.execute(task, &first), Err(TaskError::Stopped)));
    let (state, fraction) = first.kept.into_inner().unwrap().expect("a checkpoint");
    assert!((fraction - 17.0 / 30.0).abs() < 1e-12 && state.len() <= crate::task_run::MAX_RESULT_BYTES);
    // A second loss, 5 steps later.
    let second = Interrupted::after(5, Some(state));
    assert!(matches!(run.execute(task, &second), Err(TaskError::Stopped)));
    let (state, fraction) = second.kept.into_inner().unwrap().expect("a checkpoint");
    assert!((fraction - 22.0 / 30.0).abs() < 1e-12, "{fraction}");
    let last = Interrupted::after(u64::MAX, Some(state.clone()));
    assert_eq!(run.execute(task, &last).unwrap(), whole);
    assert_eq!(*last.reported.lock().unwrap(), [1.0], "steps 1 to 22 are not repeated");
    // A damaged one, and one of another task, cost the work but not the result.
    let mut damaged = state.clone();
    damaged[100] ^= 1;
    for unusable in [damaged, vec![7; 9], Vec::new()] {
        let again = Interrupted::after(u64::MAX, Some(unusable));
        assert_eq!(run.execute(task, &again).unwrap(), whole);
        assert_eq!(again.reported.lock().unwrap().len(), 3);
    }
    let other = &run.plan(&[]).unwrap()[3];
    let foreign = run.execute(other, &Interrupted::after(u64::MAX, Some(state))).unwrap();
    assert_eq!(foreign, run.execute(other, &Interrupted::after(u64::MAX, None)).unwrap());
}

#[test]
fn bad_input_is_refused_with_field_value_and_allowed() {
    let csv = |text: &str| {
        let run = GeodesicRun { source: SpectraSource::Csv(DataFile::default()), ..small("") };
        Geodesic::new(&run, Some(text.as_bytes())).map(drop).unwrap_err().to_string()
    };
    let header: String = (0..40).map(|i| format!(",{}", 200 + i)).collect();
    let row = |ppb: u32, last: &str| format!("\n{ppb}{}{last}", ",1".repeat(39));
    let rows = |last: &str| format!("ppb{header}{}{}{}{}", row(0, ",1"), row(5, ",2"), row(9, ",1"), row(20, last));
    let missing = csv(&rows(","));
    assert!(missing.contains("spec.geodesic.source.csv") && missing.contains("239"), "{missing}");
    let few = csv(&format!("ppb{header}{}{}{}", row(0, ",1"), row(5, ",2"), row(9, ",1")));
    assert!(few.contains("3 concentrations; allowed: 4 to 64"), "{few}");
    let narrow = csv("ppb,1,2\n0,1,2\n1,1,2\n2,1,2\n3,1,2\n");
    assert!(narrow.contains("wavelengths"), "{narrow}");
    let mut rates = small("");
    rates.training.clip = 0.0;
    let rates = Geodesic::new(&rates, None).map(drop).unwrap_err().to_string();
    assert!(rates.contains("clip") && rates.contains("(0, 1e6]"), "{rates}");
    let bands = GeodesicRun { source: SpectraSource::Csv(DataFile::default()), ..small(r#","calibratedBands":true"#) };
    let bands = Geodesic::new(&bands, Some(rows(",1").as_bytes())).map(drop).unwrap_err().to_string();
    assert!(bands.contains("spec.geodesic.calibratedBands") && bands.contains("at least 5"), "{bands}");
    let good = GeodesicRun { source: SpectraSource::Csv(DataFile::default()), ..small("") };
    assert!(Geodesic::new(&good, Some(rows(",1").as_bytes())).is_ok());
}

#[test]
fn starts_of_a_fold_are_one_task_on_gpus_and_continue_from_their_checkpoint_with_the_same_bits() {
    let alone = Geodesic::new(&GeodesicRun { starts: 4, ..small("") }, None).unwrap();
    let run =
        Geodesic::new(&GeodesicRun { starts: 4, ..small(r#","leakingVariant":true,"useGpus":true"#) }, None).unwrap();
    let tasks = run.plan(&[]).unwrap();
    // Three of four starts of six folds and of the leaking variant, then the fourth.
    assert_eq!(tasks.len(), 14);
    assert_eq!((&*tasks[0].name, &*tasks[6].name), ("fold 1, start 1 and 2 more", "fold 1, start 4"));
    let outcomes = |run: &Geodesic, task: &Task| -> Vec<serde_json::Value> {
        serde_json::from_slice(&run.execute(task, &Interrupted::after(u64::MAX, None)).unwrap()).unwrap()
    };
    let together = outcomes(&run, &tasks[0]);
    for (start, outcome) in together.iter().enumerate() {
        assert_eq!(*outcome, outcomes(&alone, &alone.plan(&[]).unwrap()[6 * start])[0], "start {start}");
    }
    let first = Interrupted::after(12, None);
    assert!(matches!(run.execute(&tasks[0], &first), Err(TaskError::Stopped)));
    let (state, _) = first.kept.into_inner().unwrap().expect("a checkpoint");
    assert!(state.len() <= crate::task_run::MAX_RESULT_BYTES);
    let last = Interrupted::after(u64::MAX, Some(state));
    let resumed: Vec<serde_json::Value> = serde_json::from_slice(&run.execute(&tasks[0], &last).unwrap()).unwrap();
    assert_eq!(resumed, together);
    assert_eq!(last.reported.lock().unwrap().len(), 2, "steps 1 to 12 are not repeated");
}
