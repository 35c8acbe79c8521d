//! Runs that depend on others.

use engram_tests::{Cluster, cluster_manifest, run_manifest};
use serde_json::Value;
use std::collections::BTreeMap;

fn source(events: &str) -> String {
    format!("    source: {{ events: {{ path: {events}, columns: {{ key: key, epoch: day, quality: q }} }} }}\n")
}

/// A manifest of six runs. `load` leads to `left` and `broken`; `report` needs both ways.
fn graph(good: &str, bad: &str, left_epochs: u32) -> String {
    let run = |name: &str, on: &str, memory: &str| {
        let manifest = run_manifest(name, "demo", memory);
        let order = format!("  dependsOn: [{on}]\n  kind: Memory\n");
        assert!(manifest.contains("  kind: Memory\n"), "{manifest}");
        if on.is_empty() { manifest } else { manifest.replace("  kind: Memory\n", &order) }
    };
    let short = format!("{}    epochs: 2\n", source(good));
    let left = format!("{}    epochs: {left_epochs}\n", source(good));
    [
        run("report", "{ run: left }, { run: after-broken }", &short),
        run("load", "", &short),
        run("left", "{ run: load }", &left),
        run("right", "{ run: left }", &short),
        run("broken", "{ run: load }", &source(bad)).replace("  kind: Memory\n", "  backoffLimit: 1\n  kind: Memory\n"),
        run("after-broken", "{ run: broken }", &short),
    ]
    .join("---\n")
}

fn states(output: &Value) -> BTreeMap<String, String> {
    let items = output["items"].as_array().unwrap_or_else(|| panic!("no list: {output}"));
    let text = |item: &Value, field: &str| item[field].as_str().expect("a text").to_owned();
    items.iter().map(|item| (text(item, "run"), text(item, "state"))).collect()
}

fn expected(list: [(&str, &str); 6]) -> BTreeMap<String, String> {
    list.into_iter().map(|(run, state)| (run.to_owned(), state.to_owned())).collect()
}

#[test]
fn a_failed_run_ends_its_dependants_and_only_what_changed_is_repeated() {
    let cluster = Cluster::up(&cluster_manifest("demo", 1, "  partitions: 2\n"));
    let good = cluster.file("good.csv", "key,day,q\na,1,0.9\nb,2,0.5\na,3,0.1\n");
    let events = cluster.file("days.csv", "key,day,q\na,1,0.9\nb,2,7\n");
    let file = cluster.file("graph.yaml", graph(&good, &events, 2));
    let arguments = ["run", file.as_str(), "-o", "json"];
    let failed =
        cluster.engram(&arguments).fails_with(1, &["ENG-0304", "retry 1 of 1", "1 runs failed, 2 were skipped"]);
    let first = failed.json();
    let outcome = [
        ("load", "Succeeded"),
        ("left", "Succeeded"),
        ("right", "Succeeded"),
        ("broken", "Failed"),
        ("after-broken", "Skipped"),
        ("report", "Skipped"),
    ];
    assert_eq!(states(&first), expected(outcome));
    let report = first["items"].as_array().expect("a list").iter().find(|item| item["run"] == "report");
    let message = report.and_then(|report| report["message"].as_str()).expect("a message");
    assert!(
        message.contains("run after-broken") && message.contains("run broken") && message.contains("ENG-0304"),
        "{message}"
    );

    // A corrected file: the failed run continues, what depends on it is executed, the rest is not.
    cluster.file("days.csv", "key,day,q\na,1,0.9\nb,2,0.7\n");
    let fixed = cluster.engram(&arguments).exits_with(0).json();
    let outcome = [
        ("load", "Unchanged"),
        ("left", "Unchanged"),
        ("right", "Unchanged"),
        ("broken", "Succeeded"),
        ("after-broken", "Succeeded"),
        ("report", "Succeeded"),
    ];
    assert_eq!(states(&fixed), expected(outcome));

    // A changed run and what depends on it; and from one run on.
    let changed = cluster.file("graph.yaml", graph(&good, &events, 3));
    let outcome = [
        ("load", "Unchanged"),
        ("left", "Succeeded"),
        ("right", "Succeeded"),
        ("broken", "Unchanged"),
        ("after-broken", "Unchanged"),
        ("report", "Succeeded"),
    ];
    assert_eq!(states(&cluster.engram(&["run", &changed, "-o", "json"]).exits_with(0).json()), expected(outcome));
    let outcome = [
        ("load", "Unchanged"),
        ("left", "Unchanged"),
        ("right", "Unchanged"),
        ("broken", "Unchanged"),
        ("after-broken", "Succeeded"),
        ("report", "Succeeded"),
    ];
    let again = cluster.engram(&["run", &changed, "--rerun-from", "after-broken", "-o", "json"]).exits_with(0).json();
    assert_eq!(states(&again), expected(outcome));

    let lone = run_manifest("lone", "demo", &source(&good))
        .replace("  kind: Memory\n", "  dependsOn: [{ run: absent }]\n  kind: Memory\n");
    cluster.engram(&["run", &cluster.file("lone.yaml", lone)]).fails_with(2, &["absent", "neither"]);
    // The first run that depends on `load` is `left`.
    let cycle = graph(&good, &events, 2).replacen("dependsOn: [{ run: load }]", "dependsOn: [{ run: right }]", 1);
    cluster.engram(&["validate", &cluster.file("cycle.yaml", cycle)]).fails_with(2, &["left -> right -> left"]);
    cluster.stop();
}
