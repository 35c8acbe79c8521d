//! Runs of kind `Job`: programs of users as processes of the command that executes the run.

use super::runs;
use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};
use serde_json::Value;

fn manifest(name: &str, replicas: u32, more: &str, script: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: demo }}\n  \
         kind: Job\n{more}  job:\n    command: [sh, -c]\n    args: ['{script}']\n    replicas: {replicas}\n    \
         env: [{{ name: GREETING, value: hello }}]\n    gracePeriodSeconds: 5\n"
    )
}

fn describe(cluster: &Cluster, name: &str) -> Value {
    cluster.engram(&["describe", "run", name, "-o", "json"]).exits_with(0).json()["status"].clone()
}

fn log(cluster: &Cluster, name: &str, index: u32) -> String {
    let path = cluster.state_dir().join("jobs").join(name).join(format!("{index}.log"));
    std::fs::read_to_string(path).expect("failed to read a log")
}

#[test]
fn processes_of_a_job_get_their_variables_and_its_status_their_exit_codes() {
    let cluster = Cluster::up(&cluster_manifest("demo", 1, "  partitions: 2\n"));
    let script =
        "echo $ENGRAM_RUN $ENGRAM_GROUP $ENGRAM_RANK $ENGRAM_WORLD_SIZE $GREETING; test -n \"$ENGRAM_ADDRESS\"; pwd";
    let good = cluster.file("good.yaml", manifest("good", 2, "", script));
    cluster.engram(&["run", &good]).exits_with(0);
    let folder = cluster.folder().canonicalize().expect("a folder").display().to_string();
    for index in 0..2 {
        assert_eq!(log(&cluster, "good", index), format!("good good {index} 2 hello\n{folder}\n"));
    }
    let done = describe(&cluster, "good");
    assert_eq!(
        (&done["phase"], &done["epoch"], &done["epochs"]),
        (&"Succeeded".into(), &2.into(), &2.into()),
        "{done}"
    );
    cluster.engram(&["run", &good]).fails_with(0, &["unchanged"]);

    // One process fails: its exit code and last line are in the status, and the others are stopped.
    let script = "test $ENGRAM_RANK = 1 || exec sleep 600; echo no data; exit 3";
    let bad = cluster.file("bad.yaml", manifest("bad", 2, "  backoffLimit: 1\n", script));
    cluster.engram(&["run", &bad]).fails_with(1, &["process 1 exited with code 3: no data", "after 1 restarts"]);
    let failed = describe(&cluster, "bad");
    let [first, second] = &failed["job"]["processes"].as_array().expect("processes")[..] else { panic!("{failed}") };
    assert_eq!((&failed["phase"], &failed["job"]["failed"]), (&"Failed".into(), &2.into()), "{failed}");
    assert_eq!(
        (&second["exitCode"], &second["restarts"], &second["logTail"]),
        (&3.into(), &1.into(), &"no data".into())
    );
    assert_eq!((&first["phase"], &first["reason"]), (&"Failed".into(), &"Stopped".into()), "{failed}");
    let listed = runs(&cluster);
    assert!(listed.iter().any(|run| run["name"] == "bad" && run["phase"] == "Failed"), "{listed:?}");
    cluster.engram(&["run", &bad, "--no-wait"]).fails_with(2, &["--no-wait", "kind Job"]);
    let reserved = manifest("bad", 1, "", "true").replace("GREETING", "ENGRAM_RANK");
    cluster.engram(&["validate", &cluster.file("reserved.yaml", reserved)]).fails_with(2, &["ENGRAM_RANK", "ENGRAM_"]);
    let absent = manifest("absent", 1, "", "true").replace("[sh, -c]", "[/no/such/program]");
    cluster.engram(&["run", &cluster.file("absent.yaml", absent)]).fails_with(1, &["code 127", "/no/such/program"]);
    cluster.engram(&["delete", "run", "bad"]).exits_with(0);
    cluster.engram(&["describe", "run", "bad"]).fails_with(3, &["run bad not found"]);
    cluster.stop();
}

#[test]
fn ctrl_c_stops_the_processes_of_a_job_and_a_program_reaches_the_cluster() {
    let cluster = Cluster::up(&cluster_manifest("demo", 1, "  partitions: 2\n"));
    let script = "trap \"echo stopped; exit 0\" TERM; echo started; while :; do sleep 0.05; done";
    let file = cluster.file("endless.yaml", manifest("endless", 1, "", script));
    let mut run = cluster.spawn(&["run", &file]);
    let started = cluster.state_dir().join("jobs/endless/0.log");
    wait_for("the process to start", DEADLINE, || {
        std::fs::read_to_string(&started).ok().filter(|log| log.contains("started"))
    });
    assert_eq!(runs(&cluster)[0]["phase"], "Running");
    cluster.engram(&["delete", "run", "endless"]).fails_with(2, &["has not ended"]);
    Cluster::interrupt(&run);
    let status = wait_for("the command to exit", DEADLINE, || run.try_wait().expect("failed to wait for the command"));
    assert_eq!(status.code(), Some(130));
    assert!(log(&cluster, "endless", 0).contains("stopped"), "it was not ended gracefully");
    assert_eq!(describe(&cluster, "endless")["phase"], "Cancelled");

    // The program of a user is this command: it finds the cluster by its variables.
    let program = engram_tests::binary().display().to_string();
    let insert = manifest("insert", 1, "", "").replace("[sh, -c]", &format!("[{program}]"));
    let insert = insert.replace("args: ['']", "args: [status]");
    cluster.engram(&["run", &cluster.file("insert.yaml", insert)]).exits_with(0);
    assert!(log(&cluster, "insert", 0).contains("demo"), "{}", log(&cluster, "insert", 0));
    cluster.stop();
}
