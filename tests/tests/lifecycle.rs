//! The life of a local cluster: what a start refuses, what an end leaves, what a death costs.

use engram_tests::{Cluster, DEADLINE, Up, cluster_manifest, engram, is_running, wait_for};
use std::net::TcpListener;
use std::time::Duration;

/// A handful of memories whose fate a test can follow.
fn insert_three(cluster: &Cluster) {
    cluster.engram(&["insert", "red", "green", "blue", "--weight", "0.25"]).ended(0);
}

#[test]
fn the_data_is_there_at_the_next_start_however_the_last_one_ended() {
    let cluster = Cluster::up(&cluster_manifest("kept", 3, "  partitions: 16\n"));
    insert_three(&cluster);
    let before = cluster.digest();
    assert_eq!(before.1, 3);
    let up = cluster.kill_all(DEADLINE);
    let cluster = up.start();
    assert_eq!(cluster.digest(), before, "after kill -9 of everything");
    let (up, status) = cluster.stop();
    assert_eq!(status.code(), Some(0), "Ctrl-C is how a cluster is meant to end");
    let cluster = up.start();
    assert_eq!(cluster.digest(), before, "after an orderly stop");
    // `down` from another process is an orderly stop too.
    cluster.engram(&["down"]).ended(0);
    let pid = cluster.supervisor();
    wait_for("up to end after down", DEADLINE, || (!is_running(pid)).then_some(()));
}

#[test]
fn a_second_start_on_a_state_directory_is_refused_and_names_the_holder() {
    let up = Up::of(&cluster_manifest("held", 1, "  partitions: 4\n"));
    let state_dir = up.state_dir().display().to_string();
    let cluster = up.start();
    let manifest = cluster.folder().join("cluster.yaml").display().to_string();
    let holder = cluster.supervisor().to_string();
    let second = engram(["up", &manifest, "--state-dir", &state_dir, "--port-base", "0"], "");
    second.refused(5, &["ENG-0401", &state_dir, &holder]);
    insert_three(&cluster);
    cluster.stop();
}

#[test]
fn what_a_worker_does_is_recorded_for_whoever_asks() {
    let cluster = Cluster::up(&cluster_manifest("recorded", 1, "  partitions: 4\n"));
    insert_three(&cluster);
    let trace = cluster.folder().join("timeline.json").display().to_string();
    let recorded =
        cluster.engram(&["profile", "0", "--seconds", "0.2", "--trace", &trace, "-o", "json"]).ended(0).json();
    assert_eq!((&recorded["worker"], &recorded["trace"]), (&0.into(), &trace.as_str().into()));
    let devices = recorded["devices"].as_array().expect("a list");
    let [device] = &devices[..] else { panic!("one device: {recorded}") };
    let timeline = std::fs::read_to_string(&trace).expect("a timeline");
    let timeline: serde_json::Value = serde_json::from_str(&timeline).expect("JSON");
    let named = timeline["traceEvents"].as_array().expect("events").iter().find(|it| it["name"] == "thread_name");
    assert_eq!(named.expect("a thread for the device")["args"]["name"], device["device"]);

    cluster.engram(&["profile", "--seconds", "0"]).refused(2, &["--seconds is 0; allowed: 0.01 to 50 seconds"]);
    cluster.engram(&["profile", "7"]).refused(3, &["there is no worker 7; there are: 0"]);
    let remote = engram(["profile", "--address", "127.0.0.1:1"], "");
    remote.refused(2, &["--address does not name"]);
    cluster.stop();
}

#[test]
fn an_upgrade_is_checked_against_what_every_process_says_of_itself() {
    let cluster = Cluster::up(&cluster_manifest("checked", 2, "  partitions: 4\n"));
    let told = cluster.engram(&["upgrade-check", "-o", "json"]).ended(0).json();
    let components = told["components"].as_array().expect("a list");
    let names: Vec<&str> = components.iter().filter_map(|it| it["name"].as_str()).collect();
    assert_eq!(names, ["coordinator", "worker-0", "worker-1"]);
    // All of them are of this build, files included; the coordinator has none.
    for (component, format) in components.iter().zip([false, true, true]) {
        let (versions, build) = (&component["versions"], &told["build"]);
        assert_eq!((&versions["version"], &versions["protocol"]), (&build["version"], &build["protocol"]), "{told}");
        assert_eq!(versions["diskFormat"] == build["diskFormat"], format, "{told}");
    }
    assert_eq!((&told["possible"], told["findings"].as_array().map(Vec::len)), (&true.into(), Some(1)), "{told}");
    engram(["upgrade-check", "--address", "127.0.0.1:1"], "").refused(2, &["--address does not name"]);
    cluster.stop();
}

#[test]
fn a_port_in_use_is_told_before_anything_is_started_or_written() {
    // Worker 1's client port, ten above the base.
    let (base, _held) = (10_300_u16..30_000)
        .step_by(50)
        .find_map(|base| Some((base, TcpListener::bind(("127.0.0.1", base + 10)).ok()?)))
        .expect("some port is free");
    let up = Up::of(&cluster_manifest("ports", 2, "")).with(&["--port-base", &base.to_string()]);
    up.run().refused(5, &["ENG-0402", &(base + 10).to_string()]);
    assert!(!up.state_dir().exists(), "nothing is left of a start that was refused");
}

#[test]
fn killing_up_leaves_no_process_behind() {
    let cluster = Cluster::up(&cluster_manifest("orphans", 5, "  partitions: 16\n"));
    assert_eq!(cluster.processes().len(), 7, "five workers, the coordinator, up");
    // The promise is two seconds; the rest is for a machine that runs other tests.
    cluster.kill_all(Duration::from_secs(10));
}

#[test]
fn the_death_of_the_coordinator_ends_nobody() {
    let mut cluster = Cluster::up(&cluster_manifest("headless", 2, "  partitions: 16\n"));
    let workers = [0, 1].map(|ordinal| cluster.worker(ordinal));
    let coordinator = cluster.coordinator().expect("it runs");
    cluster.kill(coordinator);
    insert_three(&cluster);
    wait_for("the coordinator to be started again", DEADLINE, || {
        cluster.coordinator().filter(|pid| *pid != coordinator)
    });
    assert_eq!([0, 1].map(|ordinal| cluster.worker(ordinal)), workers, "no worker was restarted");
    // A worker that dies under the new coordinator comes back with what it held.
    let victim = workers[0].expect("it runs");
    cluster.kill(victim);
    cluster.wait_for_restart(0, victim);
    assert_eq!(cluster.digest().1, 3);
    cluster.stop();
}

#[test]
fn a_worker_killed_while_it_starts_is_started_again() {
    let mut cluster = Up::of(&cluster_manifest("early", 3, "  partitions: 16\n")).launch();
    let victim = wait_for("a worker to start", DEADLINE, || {
        let endpoints = cluster.endpoints()?;
        assert_eq!(endpoints["ready"], false, "the kill is to fall into the start");
        cluster.worker(1)
    });
    cluster.kill(victim);
    cluster.wait_until_ready();
    assert_ne!(cluster.worker(1), Some(victim));
    insert_three(&cluster);
    assert_eq!(cluster.digest().1, 3);
    cluster.stop();
}

#[test]
fn a_state_directory_is_taken_for_what_it_is() {
    let up = Up::of(&cluster_manifest("one", 1, "  partitions: 4\n"));
    let cluster = up.start();
    insert_three(&cluster);
    let (up, _) = cluster.stop();

    up.change(&cluster_manifest("two", 1, "  partitions: 4\n"));
    up.run().refused(5, &["ENG-0403", "one", "two"]);
    up.change(&cluster_manifest("one", 1, "  partitions: 8\n"));
    up.run().refused(5, &["ENG-0108", "partitions", "8", "4"]);

    up.change(&cluster_manifest("one", 1, "  partitions: 4\n"));
    let identity = up.state_dir().join("workers/0/identity");
    let good = std::fs::read(&identity).expect("the store has an identity");
    // The format version stands behind the magic of eight bytes.
    let mut newer = good.clone();
    newer[8] = 99;
    std::fs::write(&identity, &newer).expect("it can be written");
    up.run().refused(8, &["ENG-0404", "format version 99"]);
    std::fs::write(&identity, &good).expect("it can be written");

    let path = up.state_dir().join("cluster.json");
    let text = std::fs::read_to_string(&path).expect("it is there");
    std::fs::write(&path, text.replace("\"formatVersion\": 1", "\"formatVersion\": 2")).expect("it can be written");
    up.run().refused(8, &["ENG-0404", "format version 2"]);
    std::fs::write(&path, text).expect("it can be written");

    let cluster = up.start();
    assert_eq!(cluster.digest().1, 3, "nothing of all that changed the data");
    cluster.stop();
}

/// What is done to the content of a file.
type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);

#[test]
fn a_store_that_cannot_be_opened_says_why_under_its_own_code_and_stays_as_it_was() {
    let manifest = cluster_manifest("one", 1, "  partitions: 4\n");
    let (other, _) = Cluster::up(&manifest).stop();
    let cluster = Cluster::up(&manifest);
    insert_three(&cluster);
    let (up, _) = cluster.stop();
    let cases: [(&str, Damage<'_>, i32, &[&str]); 4] = [
        ("workers/0/wal-0000000000000001.log", &|log| flip_in(log, b"green"), 1, &["ENG-0503", "is corrupt at byte"]),
        ("workers/0/identity", &|identity| identity[100] ^= 1, 1, &["ENG-0503", "checksum"]),
        (
            "workers/0/identity",
            &|identity| *identity = std::fs::read(other.state_dir().join("workers/0/identity")).expect("it is there"),
            5,
            &["ENG-0403", "belongs to cluster"],
        ),
        // In the foreground it would wait for the order that makes a map anew.
        ("map.json", &|map| map.truncate(map.len() / 2), 4, &["ENG-0409", "map.json is damaged", "rebuild-map"]),
    ];
    let script = up.with(&["--exit-when-done"]);
    for (name, damage, code, words) in cases {
        let path = script.state_dir().join(name);
        let good = std::fs::read(&path).expect("it is there");
        let mut bad = good.clone();
        damage(&mut bad);
        std::fs::write(&path, &bad).expect("it can be written");
        let ran = script.run().refused(code, words);
        assert!(!ran.stderr.contains("started again"), "another try would meet the same:\n{}", ran.stderr);
        assert!(std::fs::read(&path).expect("it is there") == bad, "{name} was changed");
        std::fs::write(&path, &good).expect("it can be written");
    }
    let cluster = script.without_arguments().start();
    assert_eq!(cluster.digest().1, 3);
    cluster.stop();
}

/// Changes one bit of what a file holds.
fn flip_in(file: &mut [u8], what: &[u8]) {
    let at = file.windows(what.len()).position(|window| window == what);
    file[at.expect("it is in the file")] ^= 1;
}

#[test]
fn a_state_directory_that_cannot_be_written_is_named() {
    let up = Up::of(&cluster_manifest("walled", 1, ""));
    std::fs::write(up.state_dir(), "a file where a folder should be").expect("it can be written");
    up.run().refused(1, &["ENG-0405", &up.state_dir().display().to_string()]);
    let manifest = up.state_dir().with_file_name("cluster.yaml").display().to_string();
    // Somebody's folder is nobody's state directory, and stays as it was.
    let home = tempfile::tempdir().expect("a temporary folder can be made");
    std::fs::write(home.path().join("letter.txt"), "dear").expect("it can be written");
    let home_path = home.path().display().to_string();
    let foreign = engram(["up", manifest.as_str(), "--state-dir", home_path.as_str(), "--port-base", "0"], "");
    foreign.refused(5, &["ENG-0403", &home_path, "letter.txt"]);
    assert_eq!(std::fs::read_dir(home.path()).expect("it is there").count(), 1);
}
