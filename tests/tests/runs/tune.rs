//! `engram tune` on histories of which the best answer is known.

use engram_tests::{cluster_manifest, engram, run_manifest};
use serde_json::Value;
use std::fs;
use std::path::Path;

const EPOCHS: u64 = 6_000;

/// Writes a history and the manifest of a run that learns it; returns the path of the manifest.
fn manifest(folder: &Path, name: &str, events: &str) -> String {
    let (history, file) = (folder.join(format!("{name}.csv")), folder.join(format!("{name}.yaml")));
    fs::write(&history, events).expect("failed to write the history");
    let source =
        format!("    source: {{ events: {{ path: {}, columns: {{ key: key, epoch: day }} }} }}\n", history.display());
    fs::write(&file, run_manifest(name, "demo", &source)).expect("failed to write the manifest");
    path(&file)
}

fn path(file: &Path) -> String {
    file.display().to_string()
}

/// Some memories come back for 40 epochs and never again, others occur once: neither all counts nor the last touch predict.
fn phases() -> String {
    let epoch = |day: u64| {
        let popular = (0..4).filter(move |offset| !(day + offset).is_multiple_of(3));
        let popular: String = popular.map(|offset| format!("popular-{}-{offset},{day}\n", day / 40)).collect();
        format!("{popular}once-{day}-a,{day}\nonce-{day}-b,{day}\n")
    };
    format!("key,day\n{}", (0..EPOCHS).map(epoch).collect::<String>())
}

/// Uniform choices of 40 memories, which nothing predicts: three in each of 60 epochs.
fn noise(mut state: u64) -> String {
    let mut key = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % 40
    };
    let rows: String = (0..180).map(|row| format!("key-{},{}\n", key(), row / 3)).collect();
    format!("key,day\n{rows}")
}

/// Returns the result for the top 5, and the hit rates on the held-out epochs: tuned, most frequent, most recent.
fn tuned(file: &str) -> (Value, [f64; 3]) {
    let result = engram(["tune", file, "--top-k", "5", "-o", "json"], "").exits_with(0).json();
    let rates = ["tuned", "frequent", "recent"].map(|key| result["heldOut"][0][key].as_f64().expect("a hit rate"));
    (result, rates)
}

#[test]
fn tuning_a_long_history_predicts_better_than_both_baselines_and_is_repeatable() {
    let folder = tempfile::tempdir().expect("failed to create a folder");
    let file = manifest(folder.path(), "phases", &phases());
    let (result, [tuned_rate, frequent, recent]) = tuned(&file);
    assert_eq!((&result["searchedEpochs"], &result["heldOut"][0]["epochs"]), (&4_200.into(), &1_800.into()));
    assert!(result["candidates"].as_u64() > Some(100), "{result}");
    assert!(result["holds"] == true && tuned_rate > 1.05 * frequent.max(recent), "{result}");
    assert_eq!(tuned(&file).0, result);
    // The manifest that it prints has these settings.
    let with_cluster = folder.path().join("cluster.yaml");
    let run = fs::read_to_string(&file).expect("the manifest exists");
    fs::write(&with_cluster, format!("{}---\n{run}", cluster_manifest("demo", 1, ""))).expect("failed to write");
    for (file, rest) in
        [(&file, "# The LearnerCluster demo needs spec.learning: { rate: "), (&path(&with_cluster), "rate: ")]
    {
        let printed = engram(["tune", file, "--top-k", "5"], "").exits_with(0).stdout;
        let settings = ["decay", "rate", "initialWeight"].map(|name| format!("{name}: {}", result["tuned"][name]));
        assert!(
            printed.contains(rest) && settings.iter().all(|text| printed.contains(text)),
            "{settings:?}:\n{printed}"
        );
        let printed_file = folder.path().join("tuned.yaml");
        fs::write(&printed_file, printed).expect("failed to write the manifest");
        engram(["validate", &path(&printed_file)], "").exits_with(0);
    }
}

#[test]
fn tuning_reports_that_a_baseline_predicts_better() {
    let folder = tempfile::tempdir().expect("failed to create a folder");
    let mut verdicts = [0, 0];
    for seed in 1..=6 {
        let (result, [tuned_rate, frequent, recent]) = tuned(&manifest(folder.path(), "noise", &noise(seed)));
        let holds = tuned_rate >= frequent.max(recent);
        assert_eq!(result["holds"], holds, "{result}");
        let verdict = result["verdict"].as_str().expect("a text");
        assert_eq!(verdict.contains("predicts worse than the top 5 of the most"), !holds, "{verdict}");
        assert_eq!(verdict.contains("at least as well as both baselines"), holds, "{verdict}");
        verdicts[usize::from(holds)] += 1;
    }
    assert!(verdicts.iter().all(|count| *count > 0), "both verdicts occur: {verdicts:?}");
}
