//! Runs through the command line: submitted, followed, cancelled, suspended and reported.

#[path = "runs/algebra.rs"]
mod algebra;
#[path = "runs/faults/cuts.rs"]
mod cuts;
#[path = "runs/faults/mod.rs"]
mod faults;
#[path = "runs/federated.rs"]
mod federated;
#[path = "runs/federated_edge.rs"]
mod federated_edge;
#[path = "runs/federated_input.rs"]
mod federated_input;
#[path = "runs/federated_masks.rs"]
mod federated_masks;
#[path = "runs/graph.rs"]
mod graph;
#[path = "runs/job.rs"]
mod job;
#[path = "runs/leave.rs"]
mod leave;
#[path = "runs/faults/links.rs"]
mod links;
#[path = "runs/replay.rs"]
mod replay;
#[path = "runs/settings.rs"]
mod settings;
#[path = "runs/tune.rs"]
mod tune;

use engram_tests::{Cluster, DEADLINE, checkout, cluster_manifest, run_manifest, wait_for};
use serde_json::Value;

fn runs(cluster: &Cluster) -> Vec<Value> {
    let listed = cluster.engram(&["list", "runs", "-o", "json"]).exits_with(0).json();
    listed["items"].as_array().expect("a list").clone()
}

/// Returns whether a run has ended. It is queued while its next driver starts.
fn has_ended(run: &Value) -> bool {
    ["Succeeded", "Failed", "Cancelled"].contains(&run["phase"].as_str().unwrap_or_default())
}

#[test]
fn ctrl_c_cancels_a_run_after_its_epoch() {
    let cluster = Cluster::up(&cluster_manifest("demo", 2, "  partitions: 16\n"));
    let endless = "    source: { synthetic: { memories: 1000 } }\n    epochs: 1000000\n";
    let file = cluster.file("run.yaml", run_manifest("endless", "demo", endless));
    let mut run = cluster.spawn(&["run", &file]);
    wait_for("the run to learn", DEADLINE, || (runs(&cluster).first()?["epoch"].as_u64()? >= 3).then_some(()));
    Cluster::interrupt(&run);
    let status = wait_for("the command to exit", DEADLINE, || run.try_wait().expect("failed to wait for the command"));
    assert_eq!(status.code(), Some(130));
    let stopped = &runs(&cluster)[0];
    assert_eq!(stopped["phase"], "Cancelled");
    assert!(stopped["epoch"].as_u64() >= Some(3));
    assert_eq!(cluster.digest().1, 1_000);
    // Submitted again, it continues.
    cluster
        .engram(&["run", &file, "--no-wait"])
        .fails_with(0, &["run endless had ended after", "describe run endless"]);
    let done = stopped["epoch"].as_u64();
    wait_for("the run to continue", DEADLINE, || (runs(&cluster).first()?["epoch"].as_u64() > done).then_some(()));
    cluster.engram(&["delete", "run", "endless"]).fails_with(2, &["has not ended"]);
    cluster.engram(&["run", &file, "--rerun"]).fails_with(5, &["run endless has not ended"]);
    cluster.stop();
}

#[test]
fn imports_and_manifests_apply_events_once() {
    let cluster = Cluster::up(&cluster_manifest("shop", 2, "  partitions: 16\n  learning: { initialWeight: 0.0 }\n"));
    let events = checkout().join("examples/own-events.csv").display().to_string();
    let page = cluster.folder().join("report.html").display().to_string();
    let import = ["import", "events", &events, "--key", "product", "--time", "sold_at", "--quality-column", "quality"];
    cluster.engram(&[&import[..], &["--report", &page]].concat()).exits_with(0);
    assert!(std::fs::read_to_string(&page).expect("failed to read the page").contains("<svg"));
    let learned = cluster.digest();
    assert!(learned.1 > 0);
    // The name is derived from the file, so that a second import is not applied.
    let again = cluster.engram(&import).fails_with(0, &["run import-own-events-", "before", "nothing was added since"]);
    assert!(again.stdout.contains(&learned.0), "{}", again.stdout);
    assert_eq!(cluster.digest(), learned);
    cluster.stop();

    // The same file with the manifest of the example gives the same memories.
    let cluster = Cluster::up(&cluster_manifest("shop", 1, "  partitions: 3\n  learning: { initialWeight: 0.0 }\n"));
    let example =
        std::fs::read_to_string(checkout().join("examples/own-events.yaml")).expect("failed to read the example");
    let (_, run) = example.split_once("\n---\n").expect("a cluster and a run");
    let file = cluster.file("run.yaml", run.replace("own-events.csv", &events));
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    wait_for("the run to finish", DEADLINE, || (runs(&cluster).first()?["phase"] == "Succeeded").then_some(()));
    assert_eq!(cluster.digest(), learned);
    // Run again, it applies the events again and replaces its record.
    cluster.engram(&["run", &file, "--rerun"]).exits_with(0);
    assert_ne!(cluster.digest().0, learned.0);
    assert_eq!((runs(&cluster).len(), &runs(&cluster)[0]["phase"]), (1, &"Succeeded".into()));
    let wrong = cluster.file("wrong.yaml", run.replace("name: shop", "name: chop"));
    cluster.engram(&["run", &wrong]).fails_with(3, &["ENG-0301", "chop", "shop"]);
    cluster.stop();
}

#[test]
fn a_corrected_file_continues_its_run_and_few_ended_runs_are_kept() {
    let spec =
        "  partitions: 2\n  learning: { initialWeight: 0.0, decay: 0.01 }\n  maintenance: { runHistoryLimit: 2 }\n";
    let cluster = Cluster::up(&cluster_manifest("shop", 1, spec));
    let write = |rows: &str| cluster.file("days.csv", format!("key,day,q\n{rows}"));
    let file = write("a,1,0.9\nb,2,7\n");
    let import = ["import", "events", &file, "--key", "key", "--epoch", "day", "--quality-column", "q"];
    cluster.engram(&import).fails_with(1, &["ENG-0304", "after 1 epochs"]);
    write("a,1,0.9\nb,2,0.7\n");
    cluster.engram(&import).fails_with(0, &["has learned 1 epochs of it before"]);
    let weight = |key: &str| {
        let got = cluster.engram(&["get", key, "-o", "json"]).exits_with(0).json();
        got["items"][0]["weight"].as_f64().unwrap_or_else(|| panic!("{got}"))
    };
    assert!((weight("a") - 0.035).abs() < 1e-6, "epoch 1 was applied once: {}", weight("a"));
    write("a,1,0.9\nb,2,0.7\nc,3,0.9\n");
    cluster.engram(&import).exits_with(0);
    assert!((weight("c") - 0.045).abs() < 1e-6, "what was added is learned: {}", weight("c"));
    let learned = cluster.digest();
    write("a,1,0.8\nb,2,0.7\nc,3,0.9\nd,4,0.9\n");
    cluster.engram(&import).fails_with(3, &["ENG-0302", "epoch 1 (1)"]);
    assert_eq!(cluster.digest(), learned);

    let from_stdin =
        ["import", "events", "-", "--format", "csv", "--separator", "semicolon", "--key", "k", "--epoch", "e"];
    cluster.engram(&["import", "events", "-", "--key", "k", "--epoch", "e"]).fails_with(2, &["--format"]);
    cluster.engram_with(&from_stdin, "k;e\nx;5\n").exits_with(0);
    assert!(weight("x") > 0.0);
    let names = || -> Vec<String> {
        runs(&cluster).iter().map(|run| run["name"].as_str().expect("a name").to_owned()).collect()
    };
    let kept = names();
    assert!(kept.len() == 2 && kept[1].starts_with("import-stdin-"), "{kept:?}");
    let named = cluster.engram_with(&[&from_stdin[..], &["--name", "third"]].concat(), "k;e\ny;6\n");
    named.exits_with(0);
    wait_for("the run that ended first to be removed", DEADLINE, || {
        (names() == [kept[1].as_str(), "third"]).then_some(())
    });
    cluster.engram(&["delete", "run", "third"]).exits_with(0);
    assert_eq!(names(), [kept[1].as_str()]);
    cluster.engram(&["delete", "run", "third"]).fails_with(3, &["ENG-0307", "third"]);
    cluster.stop();
}

#[test]
fn suspended_runs_resume_at_their_epoch_after_worker_failures() {
    let example =
        std::fs::read_to_string(checkout().join("examples/cluster.yaml")).expect("failed to read the example");
    let (_, run) = example.split_once("\n---\n").expect("a cluster and a run");
    let learning = "  partitions: 16\n  learning: { initialWeight: 0.0, decay: 0.02 }\n";
    let mut cluster = Cluster::up(&cluster_manifest("words", 3, learning));
    let name = "state-of-the-union";
    let file = cluster.file("run.yaml", run);
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let is_at = |epoch| (runs(&cluster).first()?["epoch"].as_u64()? >= epoch).then_some(());
    wait_for("the run to learn", DEADLINE, || is_at(20));
    cluster.engram(&["suspend", name]).exits_with(0);
    let suspended = runs(&cluster)[0].clone();
    assert_eq!(suspended["phase"], "Suspended");
    let digest = cluster.digest();
    let pids: Vec<u32> = (0..3).filter_map(|worker| cluster.worker(worker)).collect();
    for (worker, pid) in pids.into_iter().enumerate() {
        cluster.kill(pid);
        cluster.wait_for_restart(worker, pid);
    }
    let after = wait_for("the run to be listed", DEADLINE, || {
        let ran = cluster.engram(&["list", "runs", "-o", "json"]);
        // Runs of partitions without primary are not listed.
        let run = (ran.code == Some(0)).then(|| ran.json()["items"][0].clone())?;
        run["phase"].is_string().then_some(run)
    });
    assert_eq!((&after["phase"], &after["epoch"]), (&suspended["phase"], &suspended["epoch"]));
    assert_eq!(cluster.digest(), digest);
    cluster.engram(&["resume", name]).exits_with(0);
    wait_for("the run to finish", DEADLINE, || (runs(&cluster).first()?["phase"] == "Succeeded").then_some(()));
    // The digest of an uninterrupted run, as in example.rs.
    assert_eq!(cluster.digest(), ("82de3b4850164e2866d319c3c0dab744".to_owned(), 23_147));
    cluster.engram(&["suspend", name]).fails_with(0, &["is already finished"]);
    cluster.engram(&["suspend", "another"]).fails_with(3, &["another"]);
    cluster.stop();
}

#[test]
fn runs_start_in_the_order_of_submission() {
    let cluster = Cluster::up(&cluster_manifest("shop", 2, "  partitions: 16\n"));
    let lines: String = (0..5_000).map(|day| format!("{day},word-{}\n", day % 9)).collect();
    let events = cluster.file("events.csv", format!("day,word\n{lines}"));
    let columns = "columns: { key: word, epoch: day }";
    let source = format!("    source: {{ events: {{ path: {events}, {columns} }} }}\n");
    let submit = |name: &str, more: &str| {
        let file = cluster.file(&format!("{name}.yaml"), run_manifest(name, "shop", &format!("{source}{more}")));
        cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    };
    submit("first", "");
    // Alphabetical order differs from the order of submission.
    for name in ["zebra", "mule", "ant"] {
        submit(name, "    epochs: 3\n");
    }
    let of = |name: &str| runs(&cluster).into_iter().find(|run| run["name"] == name).expect("the run exists");
    wait_for("all runs to wait for the first", DEADLINE, || {
        let waits = |name, text: &str| of(name)["message"].as_str().is_some_and(|message| message.ends_with(text));
        (waits("zebra", "waits for run first to end") && waits("ant", "waits for run first to end, 2 before it"))
            .then_some(())
    });
    cluster.engram(&["suspend", "first"]).exits_with(0);
    wait_for("the other runs to finish", DEADLINE, || {
        let done = |name| of(name)["phase"] == "Succeeded";
        // No run finishes before one that was submitted earlier.
        assert!((!done("mule") || done("zebra")) && (!done("ant") || done("mule")), "{:?}", runs(&cluster));
        done("ant").then_some(())
    });
    assert_eq!(of("first")["phase"], "Suspended");
    let held = cluster.file(
        "held.yaml",
        run_manifest("held", "shop", &source).replace("  kind: Memory", "  suspend: true\n  kind: Memory"),
    );
    cluster.engram(&["run", &held, "--no-wait"]).exits_with(0);
    assert_eq!((&of("held")["phase"], &of("held")["epoch"]), (&Value::from("Suspended"), &Value::from(0)));
    let wrong = source.replace(&format!("path: {events}"), "configMap: { name: a, key: b.csv }");
    let wrong = cluster.file("wrong.yaml", run_manifest("wrong", "shop", &wrong));
    cluster.engram(&["run", &wrong]).fails_with(2, &["ENG-0107", "supported in Kubernetes only"]);
    cluster.stop();
}

/// Geodesic run of 7 tasks.
const SPECTRA: &str = "apiVersion: engram.dev/v1alpha1
kind: LearnerRun
metadata: { name: spectra }
spec:
  clusterRef: { name: demo }
  kind: Geodesic
  geodesic:
    source: { synthetic: { name: S4, wavelengths: 61 } }
    starts: 1
    leakingVariant: true
    training: { steps: 100, stride: 1 }
";

#[test]
fn runs_of_tasks_give_the_same_results_on_any_number_of_workers_and_after_kills() {
    let cluster = Cluster::up(&cluster_manifest("demo", 1, "  partitions: 4\n"));
    let file = cluster.file("spectra.yaml", SPECTRA);
    let page = cluster.folder().join("report.html");
    let alone =
        cluster.engram(&["run", &file, "-o", "json", "--report", &page.display().to_string()]).exits_with(0).json();
    assert_eq!((&alone["kind"], &alone["tasks"]), (&Value::from("RunResult"), &Value::from(7)));
    let page = std::fs::read_to_string(page).expect("failed to read the page");
    assert!(
        page.contains("<svg") && page.contains("RBF-GP") && page.contains("leaking variant (has seen the spectra)")
    );
    assert_eq!(cluster.digest().1, 0, "the run changes no memories");
    let wrong = SPECTRA.replace("synthetic: { name: S4, wavelengths: 61 }", "csv: { path: missing.csv }");
    let wrong = cluster.file("wrong.yaml", wrong.replace("name: spectra", "name: wrong"));
    cluster.engram(&["run", &wrong]).fails_with(3, &["ENG-0302", "missing.csv"]);
    cluster.stop();

    let mut cluster = Cluster::up(&cluster_manifest("demo", 2, "  partitions: 4\n"));
    let file = cluster.file("spectra.yaml", SPECTRA);
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
    let message = wait_for("both workers to execute tasks", DEADLINE, || {
        let run = runs(&cluster).into_iter().next()?;
        let message = run["message"].as_str()?.to_owned();
        (message.contains("on worker 0") && message.contains("on worker 1")).then_some(message)
    });
    assert!(message.contains("task ") && message.contains("fold "), "{message}");
    // One of them drives the run. The other one is killed in the first half of a task that it has accepted.
    let mut before = Value::Null;
    let driver = wait_for("a list of both tasks", DEADLINE, || {
        let tasks = cluster.engram(&["list", "tasks", "-o", "json"]).exits_with(0).json()["items"].clone();
        let values = |key| tasks.as_array().into_iter().flatten().map(|task| task[key].as_u64()).collect::<Vec<_>>();
        let (numbers, workers) = (values("task"), values("worker"));
        if workers != [Some(0), Some(1)] {
            return None;
        }
        assert_ne!(numbers[0], numbers[1], "one task has two workers: {tasks}");
        let driver = usize::try_from(runs(&cluster)[0]["driver"].as_u64()?).ok()?;
        let task = &tasks[1 - driver];
        let was_listed = std::mem::replace(&mut before, task["task"].clone()) == task["task"];
        (was_listed && task["fraction"].as_f64()? < 0.5).then_some(driver)
    });
    let other = 1 - driver;
    let process = cluster.worker(other).expect("the process is running");
    cluster.kill(process);
    let reassigned = wait_for("the task to be assigned again", DEADLINE, || {
        let ran = cluster.engram(&["list", "runs", "-o", "json"]);
        let run = (ran.code == Some(0)).then(|| ran.json()["items"][0].clone())?;
        run["metrics"]["reassigned_tasks"].as_f64().filter(|reassigned| *reassigned > 0.0)
    });
    assert_eq!(reassigned, 1.0, "one task of one lost worker");
    cluster.wait_for_restart(other, process);
    cluster.wait_until_ready();
    cluster.kill_in_turn(driver..driver + 1);
    let run = wait_for("the run to finish", DEADLINE, || {
        let ran = cluster.engram(&["list", "runs", "-o", "json"]);
        let run = (ran.code == Some(0)).then(|| ran.json()["items"][0].clone())?;
        assert_ne!(run["phase"], "Failed", "{run}");
        (run["phase"] == "Succeeded").then_some(run)
    });
    assert_eq!(run["outputs"], alone["outputs"]);
    assert_eq!((&run["epoch"], &run["epochs"]), (&Value::from(7), &Value::from(7)));
    cluster.stop();
}
