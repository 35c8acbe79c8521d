//! A full disk: a small tmpfs, mounted for this test only.
//!
//! The test runs itself again in a private mount namespace with temporary folders on the tmpfs, which is unmounted with the last
//! process in it. Without permission to create the namespace the test is skipped.

use engram_client::{GetOptions, Rows};
use engram_memory::{Blobs, MemoryId};
use engram_proto::v1::ProblemKind;
use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Environment variable with the mount point; set in the inner run.
const FOLDER: &str = "ENGRAM_TEST_DISK";
/// Space for three log segments of 64 MiB: a full one, one left by a crash, one for the next start.
const DISK: &str = "size=208m";
/// Payload that fills the disk quickly; the limit is 64 KiB.
const LARGE: usize = 60_000;

#[test]
fn full_disks_reject_writes_and_keep_acknowledged_data() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        mount(Path::new(&folder)).expect("the outer run has checked that mounting works");
        return on_a_small_disk();
    }
    let folder = tempfile::tempdir().expect("failed to create a temporary folder");
    let reason = match namespace(folder.path()) {
        Ok(mut namespace) => {
            let this = std::env::current_exe().expect("the path of this executable is known");
            let name = "full_disks_reject_writes_and_keep_acknowledged_data";
            namespace.arg(this).args(["--exact", name, "--nocapture"]);
            namespace.env(FOLDER, folder.path()).env("TMPDIR", folder.path());
            // Verbose logs also fill the disk.
            namespace.env("ENGRAM_LOG", "debug");
            let output = namespace.output().expect("failed to start the inner run");
            let text = [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned()).concat();
            // A wrong test name would run no test and succeed.
            assert!(output.status.success() && text.contains("1 passed"), "the inner run: {}\n{text}", output.status);
            return;
        }
        Err(reason) => reason,
    };
    engram_tests::skipped(&format!("no permission to mount a tmpfs: {reason}"));
}

/// Returns a command that runs others in a private mount namespace: as root of a user namespace, or as real root.
fn namespace(folder: &Path) -> Result<Command, String> {
    let mut reason = String::new();
    for options in [&["--map-root-user", "--mount"][..], &["--mount"]] {
        let unshare = || {
            let mut command = Command::new("unshare");
            command.args(options).arg("--");
            command
        };
        match unshare().args(["mount", "-t", "tmpfs", "-o", DISK, "engram-test"]).arg(folder).output() {
            Ok(output) if output.status.success() => return Ok(unshare()),
            Ok(output) => reason = String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => reason = format!("failed to start unshare: {error}"),
        }
    }
    Err(reason)
}

fn mount(folder: &Path) -> io::Result<()> {
    let status = Command::new("mount").args(["-t", "tmpfs", "-o", DISK, "engram-test"]).arg(folder).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(status.to_string())) }
}

fn on_a_small_disk() {
    let cluster = Cluster::up(&cluster_manifest("small", 1, "  partitions: 4\n"));
    let worker = cluster.worker(0).expect("the process is running");
    cluster.engram(&["insert", "first", "--weight", "0.25"]).exits_with(0);
    let ballast = Ballast::fill(cluster.folder());

    // A stream fails when the log is full, and reports the number of applied rows.
    let rows = |range: std::ops::Range<usize>| {
        let row = |at| format!("{{\"key\":\"row-{at}\",\"payload\":\"{}\"}}\n", "x".repeat(LARGE));
        range.map(row).collect::<String>()
    };
    let ran = cluster.engram_with(&["insert", "--file", "-"], &rows(0..1_200)).fails_with(1, &["ENG-0501", "no space"]);
    let stored = cluster.digest().1 - 1;
    let message = format!("applied {} rows before the error", thousands(stored));
    assert!(ran.stderr.contains(&message), "stderr lacks {message:?}:\n{}", ran.stderr);

    // With a full log even the smallest change is rejected.
    let acknowledged = fill_the_log(&cluster);
    let before = cluster.digest();
    assert_eq!(before.1, 1 + stored + acknowledged.len() as u64);
    for change in
        [&["insert", "late"][..], &["reinforce", "first", "--delta", "0.5"], &["remove", "first"], &["decay", "0.1"]]
    {
        cluster.engram(change).fails_with(1, &["ENG-0501", "no space"]);
    }
    cluster.engram(&["snapshot", "create", "full"]).fails_with(1, &["ENG-0501", "no space"]);
    assert_eq!(cluster.engram(&["snapshot", "list", "-o", "name"]).exits_with(0).stdout, "");
    let export = cluster.folder().join("all.jsonl").display().to_string();
    cluster.engram(&["export", &export]).fails_with(1, &["ENG-0501", &export]);
    assert_eq!(cluster.digest(), before);

    // Acknowledged data can be read.
    let found = cluster.engram(&["get", "first", "row-0", "-o", "json"]).exits_with(0).json();
    assert_eq!((&found["items"][0]["weight"], payload(&found["items"][1])), (&0.25.into(), LARGE));
    cluster.engram(&["get", "late"]).fails_with(3, &["ENG-0508"]);
    cluster.engram(&["rank", "--limit", "3"]).exits_with(0);
    cluster.engram(&["quality"]).exits_with(0);
    let got = cluster.client(async |client| {
        client.get(&acknowledged, GetOptions::default()).await.expect("reads work").memories.len()
    });
    assert_eq!(got, acknowledged.len());

    // With free space the same process accepts writes.
    drop(ballast);
    cluster.engram(&["insert", "late"]).exits_with(0);
    assert_eq!(cluster.digest().1, before.1 + 1);
    assert_eq!(cluster.worker(0), Some(worker), "the worker was not restarted");

    restarts_on_a_full_disk(cluster);
}

/// Neither a worker crash nor a restart on a full disk loses data.
fn restarts_on_a_full_disk(mut cluster: Cluster) {
    let before = cluster.digest();
    let ballast = Ballast::fill(cluster.folder());
    let worker = cluster.worker(0).expect("the process is running");
    cluster.kill(worker);
    // The worker starts read-only from its reserve: acknowledged data is served, and nothing is lost.
    wait_for("the worker to serve reads on the full disk", DEADLINE, || {
        let log = fs::read_to_string(cluster.folder().join("up.log")).expect("failed to read the log");
        (log.contains("worker-0 exited") && cluster.engram(&["get", "first"]).code == Some(0)).then_some(())
    });
    drop(ballast);
    wait_for("the worker to serve again", DEADLINE, || {
        (cluster.engram(&["get", "first"]).code == Some(0)).then_some(())
    });
    assert_eq!(cluster.digest(), before);

    let ballast = Ballast::fill(cluster.folder());
    let (up, status) = cluster.stop();
    assert_eq!(status.code(), Some(0), "a stop needs no space");
    let ballast = ballast.more();
    up.run().fails_with(1, &["ENG-0501"]);
    drop(ballast);
    let cluster = up.start();
    assert_eq!(cluster.digest(), before);
    let (up, _) = cluster.stop();
    let unfinished: Vec<PathBuf> =
        files(&up.state_dir()).into_iter().filter(|path| path.extension().is_some_and(|it| it == "tmp")).collect();
    assert!(unfinished.is_empty(), "temporary files are left: {unfinished:?}");
}

/// Writes memories of decreasing size until none fits. Returns the acknowledged ones.
fn fill_the_log(cluster: &Cluster) -> Vec<MemoryId> {
    cluster.client(async |client| {
        let session = client.session();
        let mut acknowledged = Vec::new();
        for bytes in [LARGE, 1] {
            let error = loop {
                assert!(acknowledged.len() < 10_000, "the disk does not fill up");
                let id = MemoryId(acknowledged.len() as u64);
                let payloads: Blobs = [vec![b'x'; bytes]].into_iter().collect();
                match session.upsert(Rows { ids: vec![id], payloads: Some(payloads), ..Rows::default() }).await {
                    Ok(_) => acknowledged.push(id),
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), ProblemKind::DiskFull, "{error}");
        }
        acknowledged
    })
}

/// A file that fills the disk until it is dropped.
struct Ballast {
    path: PathBuf,
    file: File,
}

impl Ballast {
    fn fill(folder: &Path) -> Self {
        let path = folder.join("ballast");
        let file = File::create(&path).expect("failed to create a file");
        Self { path, file }.more()
    }

    /// Fills free space again.
    fn more(mut self) -> Self {
        let block = vec![0; 1 << 20];
        loop {
            match self.file.write(&block) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::StorageFull => return self,
                Err(error) => panic!("failed to fill the disk: {error}"),
            }
        }
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        fs::remove_file(&self.path).expect("the file exists");
    }
}

fn payload(memory: &serde_json::Value) -> usize {
    memory["payload"].as_str().expect("the memory has a payload").len()
}

/// Formats a number with thousands separators, as the command does.
fn thousands(number: u64) -> String {
    match number {
        0..1_000 => number.to_string(),
        _ => format!("{},{:03}", number / 1_000, number % 1_000),
    }
}

/// Returns all files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("the file exists").flatten() {
        let path = entry.path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}
