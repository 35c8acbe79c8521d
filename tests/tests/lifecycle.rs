//! Lifecycle of a local cluster: rejected starts, stops, and process failures.

use engram_tests::{Cluster, ClusterBuilder, DEADLINE, binary, cluster_manifest, engram, is_running, wait_for};
use std::net::TcpListener;
use std::time::Duration;

/// Inserts three memories.
fn insert_three(cluster: &Cluster) {
    cluster.engram(&["insert", "red", "green", "blue", "--weight", "0.25"]).exits_with(0);
}

#[test]
fn data_survives_kills_and_graceful_stops() {
    let cluster = Cluster::up(&cluster_manifest("kept", 3, "  partitions: 16\n"));
    insert_three(&cluster);
    let before = cluster.digest();
    assert_eq!(before.1, 3);
    let up = cluster.kill_all(DEADLINE);
    let cluster = up.start();
    assert_eq!(cluster.digest(), before, "after kill -9 of everything");
    let (up, status) = cluster.stop();
    assert_eq!(status.code(), Some(0), "Ctrl-C is a graceful stop");
    let cluster = up.start();
    assert_eq!(cluster.digest(), before, "after a graceful stop");
    // `down` from another process is a graceful stop too.
    cluster.engram(&["down"]).exits_with(0);
    let pid = cluster.supervisor();
    wait_for("up to exit after down", DEADLINE, || (!is_running(pid)).then_some(()));
}

#[test]
fn locked_state_directories_are_rejected_with_the_holder() {
    let up = ClusterBuilder::new(&cluster_manifest("held", 1, "  partitions: 4\n"));
    let state_dir = up.state_dir().display().to_string();
    let cluster = up.start();
    let manifest = cluster.folder().join("cluster.yaml").display().to_string();
    let holder = cluster.supervisor().to_string();
    let second = engram(["up", &manifest, "--state-dir", &state_dir, "--port-base", "0"], "");
    second.fails_with(5, &["ENG-0401", &state_dir, &holder]);
    insert_three(&cluster);
    cluster.stop();
}

#[test]
fn workers_can_be_profiled() {
    let cluster = Cluster::up(&cluster_manifest("profiled", 1, "  partitions: 4\n"));
    insert_three(&cluster);
    let trace = cluster.folder().join("timeline.json").display().to_string();
    let profile =
        cluster.engram(&["profile", "0", "--seconds", "0.2", "--trace", &trace, "-o", "json"]).exits_with(0).json();
    assert_eq!((&profile["worker"], &profile["trace"]), (&0.into(), &trace.as_str().into()));
    let devices = profile["devices"].as_array().expect("a list");
    let [device] = &devices[..] else { panic!("one device: {profile}") };
    let timeline = std::fs::read_to_string(&trace).expect("a timeline");
    let timeline: serde_json::Value = serde_json::from_str(&timeline).expect("JSON");
    let named = timeline["traceEvents"].as_array().expect("events").iter().find(|it| it["name"] == "thread_name");
    assert_eq!(named.expect("a thread for the device")["args"]["name"], device["device"]);

    cluster.engram(&["profile", "--seconds", "0"]).fails_with(2, &["--seconds is 0; allowed: 0.01 to 50 seconds"]);
    cluster.engram(&["profile", "7"]).fails_with(3, &["worker 7 not found; existing workers: 0"]);
    let remote = engram(["profile", "--address", "127.0.0.1:1"], "");
    remote.fails_with(2, &["--address names"]);
    cluster.stop();
}

#[test]
fn upgrade_check_compares_the_versions_of_all_processes() {
    let cluster = Cluster::up(&cluster_manifest("checked", 2, "  partitions: 4\n"));
    let report = cluster.engram(&["upgrade-check", "-o", "json"]).exits_with(0).json();
    let components = report["components"].as_array().expect("a list");
    let names: Vec<&str> = components.iter().filter_map(|it| it["name"].as_str()).collect();
    assert_eq!(names, ["coordinator", "worker-0", "worker-1"]);
    // All processes run this build; the coordinator has no disk format.
    for (component, format) in components.iter().zip([false, true, true]) {
        let (versions, build) = (&component["versions"], &report["build"]);
        assert_eq!((&versions["version"], &versions["protocol"]), (&build["version"], &build["protocol"]), "{report}");
        assert_eq!(versions["diskFormat"] == build["diskFormat"], format, "{report}");
    }
    assert_eq!((&report["possible"], report["findings"].as_array().map(Vec::len)), (&true.into(), Some(1)), "{report}");
    engram(["upgrade-check", "--address", "127.0.0.1:1"], "").fails_with(2, &["--address names"]);
    cluster.stop();
}

#[test]
fn ports_in_use_are_reported_before_anything_is_started() {
    // Worker 1's client port, ten above the base.
    let (base, _held) = (10_300_u16..30_000)
        .step_by(50)
        .find_map(|base| Some((base, TcpListener::bind(("127.0.0.1", base + 10)).ok()?)))
        .expect("no free port");
    let up = ClusterBuilder::new(&cluster_manifest("ports", 2, "")).with(&["--port-base", &base.to_string()]);
    up.run().fails_with(5, &["ENG-0402", &(base + 10).to_string()]);
    assert!(!up.state_dir().exists(), "a rejected start leaves no files");
}

#[test]
fn killing_up_leaves_no_process_behind() {
    let cluster = Cluster::up(&cluster_manifest("orphans", 5, "  partitions: 16\n"));
    assert_eq!(cluster.processes().len(), 7, "five workers, the coordinator, up");
    // Expected within two seconds; the deadline allows for other tests.
    cluster.kill_all(Duration::from_secs(10));
}

#[test]
fn coordinator_failure_restarts_no_worker() {
    let mut cluster = Cluster::up(&cluster_manifest("headless", 2, "  partitions: 16\n"));
    let workers = [0, 1].map(|ordinal| cluster.worker(ordinal));
    let coordinator = cluster.coordinator().expect("the process is running");
    cluster.kill(coordinator);
    insert_three(&cluster);
    wait_for("the coordinator to restart", DEADLINE, || cluster.coordinator().filter(|pid| *pid != coordinator));
    assert_eq!([0, 1].map(|ordinal| cluster.worker(ordinal)), workers, "no worker was restarted");
    // A worker that fails under the new coordinator recovers its data.
    let victim = workers[0].expect("the process is running");
    cluster.kill(victim);
    cluster.wait_for_restart(0, victim);
    assert_eq!(cluster.digest().1, 3);
    cluster.stop();
}

#[test]
fn workers_killed_during_start_are_restarted() {
    let mut cluster = ClusterBuilder::new(&cluster_manifest("early", 3, "  partitions: 16\n")).launch();
    let victim = wait_for("a worker to start", DEADLINE, || {
        let endpoints = cluster.endpoints()?;
        assert_eq!(endpoints["ready"], false, "the cluster is already ready");
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
fn state_directories_of_other_clusters_and_formats_are_rejected() {
    let up = ClusterBuilder::new(&cluster_manifest("one", 1, "  partitions: 4\n"));
    let cluster = up.start();
    insert_three(&cluster);
    let (up, _) = cluster.stop();

    up.change(&cluster_manifest("two", 1, "  partitions: 4\n"));
    up.run().fails_with(5, &["ENG-0403", "one", "two"]);
    up.change(&cluster_manifest("one", 1, "  partitions: 8\n"));
    up.run().fails_with(5, &["ENG-0108", "partitions", "8", "4"]);

    up.change(&cluster_manifest("one", 1, "  partitions: 4\n"));
    let identity = up.state_dir().join("workers/0/identity");
    let good = std::fs::read(&identity).expect("failed to read the identity");
    // The format version follows the magic of eight bytes. A newer format has another layout: with the version of this build its checksum
    // does not hold, or the file would count as damaged.
    let mut newer = good.clone();
    newer[8] = 99;
    *newer.last_mut().expect("the identity is not empty") ^= 1;
    std::fs::write(&identity, &newer).expect("failed to write a file");
    up.run().fails_with(8, &["ENG-0404", "format version 99"]);
    std::fs::write(&identity, &good).expect("failed to write a file");

    let path = up.state_dir().join("cluster.json");
    let text = std::fs::read_to_string(&path).expect("the file exists");
    std::fs::write(&path, text.replace("\"formatVersion\": 1", "\"formatVersion\": 2"))
        .expect("failed to write a file");
    up.run().fails_with(8, &["ENG-0404", "format version 2"]);
    std::fs::write(&path, text).expect("failed to write a file");

    let cluster = up.start();
    assert_eq!(cluster.digest().1, 3, "rejected starts do not change the data");
    cluster.stop();
}

/// Damages the content of a file.
type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);

#[test]
fn damaged_stores_are_reported_with_their_code_and_not_changed() {
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
            &|identity| {
                *identity = std::fs::read(other.state_dir().join("workers/0/identity")).expect("the file exists");
            },
            5,
            &["ENG-0403", "belongs to cluster"],
        ),
        // In the foreground `up` would wait for rebuild-map.
        ("map.json", &|map| map.truncate(map.len() / 2), 4, &["ENG-0409", "map.json is damaged", "rebuild-map"]),
    ];
    let script = up.with(&["--exit-when-done"]);
    for (name, damage, code, words) in cases {
        let path = script.state_dir().join(name);
        let good = std::fs::read(&path).expect("the file exists");
        let mut bad = good.clone();
        damage(&mut bad);
        std::fs::write(&path, &bad).expect("failed to write a file");
        let ran = script.run().fails_with(code, words);
        assert!(!ran.stderr.contains("is restarted"), "a restart cannot help:\n{}", ran.stderr);
        assert!(std::fs::read(&path).expect("the file exists") == bad, "{name} was changed");
        std::fs::write(&path, &good).expect("failed to write a file");
    }
    let cluster = script.without_arguments().start();
    assert_eq!(cluster.digest().1, 3);
    cluster.stop();
}

/// Flips one bit of a text in a file.
fn flip_in(file: &mut [u8], text: &[u8]) {
    let at = file.windows(text.len()).position(|window| window == text);
    file[at.expect("the text is in the file")] ^= 1;
}

#[test]
fn unusable_state_directories_are_reported_by_path() {
    let up = ClusterBuilder::new(&cluster_manifest("walled", 1, ""));
    std::fs::write(up.state_dir(), "a file where a folder should be").expect("failed to write a file");
    up.run().fails_with(1, &["ENG-0405", &up.state_dir().display().to_string()]);
    let manifest = up.state_dir().with_file_name("cluster.yaml").display().to_string();
    // A folder with other files is rejected and not changed.
    let home = tempfile::tempdir().expect("failed to create a temporary folder");
    std::fs::write(home.path().join("letter.txt"), "dear").expect("failed to write a file");
    let home_path = home.path().display().to_string();
    let foreign = engram(["up", manifest.as_str(), "--state-dir", home_path.as_str(), "--port-base", "0"], "");
    foreign.fails_with(5, &["ENG-0403", &home_path, "letter.txt"]);
    assert_eq!(std::fs::read_dir(home.path()).expect("the file exists").count(), 1);
}

/// Stops a cluster in the background when a test fails.
struct StopsAtEnd(std::path::PathBuf);

impl Drop for StopsAtEnd {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = std::process::Command::new(binary()).args(["down", "--state-dir"]).arg(&self.0).status();
        }
    }
}

#[test]
fn clusters_in_the_background_keep_nothing_of_their_caller_and_obey_nohup() {
    let up = ClusterBuilder::new(&cluster_manifest("behind", 1, "  partitions: 4\n"));
    let (state, folder) = (up.state_dir(), up.state_dir().with_file_name("caller"));
    std::fs::create_dir(&folder).expect("failed to create a folder");
    // As `flock` and `nohup` do: a descriptor that is inherited, and a signal that is ignored.
    let line = r#"trap '' HUP; exec 9> lock; exec "$0" up ../cluster.yaml -d --state-dir "$1" --port-base 0"#;
    let mut shell = std::process::Command::new("sh");
    let output = shell.args(["-c", line]).arg(binary()).arg(&state).current_dir(&folder).output().expect("sh runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let _stopped = StopsAtEnd(state.clone());
    let endpoints = std::fs::read(state.join("endpoints.json")).expect("the cluster runs");
    let endpoints: serde_json::Value = serde_json::from_slice(&endpoints).expect("JSON");
    let worker = &endpoints["workers"][0]["process"]["pid"];
    for pid in [&endpoints["pid"], worker].map(|pid| pid.as_u64().expect("a process id")) {
        let process = std::path::PathBuf::from(format!("/proc/{pid}"));
        let held = std::fs::read_dir(process.join("fd")).expect("the process runs").flatten();
        let held = held.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        assert_eq!(
            held.filter(|file| file.starts_with(&folder)).count(),
            0,
            "process {pid} holds a file of its caller"
        );
        assert_eq!(std::fs::read_link(process.join("cwd")).expect("the process runs"), std::path::Path::new("/"));
    }
    let supervisor = i32::try_from(endpoints["pid"].as_u64().expect("a process id")).expect("it fits");
    let hangup = nix::sys::signal::Signal::SIGHUP;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(supervisor), hangup).expect("the cluster runs");
    let state = state.display().to_string();
    // One that obeys the signal has stopped by then.
    std::thread::sleep(Duration::from_secs(2));
    engram(["insert", "red", "--state-dir", &state], "").exits_with(0);
    engram(["down", "--state-dir", &state], "").exits_with(0);
}
