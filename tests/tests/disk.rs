//! A disk that is really full: a small file system in memory, mounted for this test alone.
//!
//! The test runs itself once more in a mount namespace of its own, where temporary folders lie on the small file system. All that
//! is mounted goes with the last process in there. Where the machine allows no such namespace the test says so and passes.

use engram_client::{GetOptions, Rows};
use engram_memory::{Blobs, MemoryId};
use engram_proto::v1::ProblemKind;
use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names the folder below which the file system is to be mounted, and so says that this is the inner run.
const FOLDER: &str = "ENGRAM_TEST_DISK";
/// Room for three segments of the log (64 MiB each): a full one, one that a crash left, one for the start after it.
const DISK: &str = "size=208m";
/// Payload of a memory that fills the disk quickly; the most that one may have is 64 KiB.
const LARGE: usize = 60_000;

#[test]
fn a_full_disk_refuses_writes_keeps_what_was_acknowledged_and_serves_on_when_there_is_room() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        mount(Path::new(&folder)).expect("the outer run has tried it");
        return on_a_small_disk();
    }
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let why = match namespace(folder.path()) {
        Ok(mut namespace) => {
            let this = std::env::current_exe().expect("a test knows its own file");
            let name = "a_full_disk_refuses_writes_keeps_what_was_acknowledged_and_serves_on_when_there_is_room";
            namespace.arg(this).args(["--exact", name, "--nocapture"]);
            namespace.env(FOLDER, folder.path()).env("TMPDIR", folder.path());
            // Processes that talk much meet the end of their logs' disk, too.
            namespace.env("ENGRAM_LOG", "debug");
            let ended = namespace.output().expect("it was started a moment ago");
            let said = [ended.stdout, ended.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
            // A name that no longer fits would run no test at all, and succeed.
            assert!(ended.status.success() && said.contains("1 passed"), "the inner run: {}\n{said}", ended.status);
            return;
        }
        Err(why) => why,
    };
    // Past the test harness, which shows nothing of a test that passes.
    let _ = writeln!(io::stderr(), "\nskipped: no small file system can be mounted here, so no disk is full: {why}\n");
}

/// A command that runs others where mounting is allowed and seen by nobody else: as root of a user namespace, or as real root.
fn namespace(folder: &Path) -> Result<Command, String> {
    let mut why = String::new();
    for options in [&["--map-root-user", "--mount"][..], &["--mount"]] {
        let unshare = || {
            let mut command = Command::new("unshare");
            command.args(options).arg("--");
            command
        };
        match unshare().args(["mount", "-t", "tmpfs", "-o", DISK, "engram-test"]).arg(folder).output() {
            Ok(output) if output.status.success() => return Ok(unshare()),
            Ok(output) => why = String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => why = format!("failed to start unshare: {error}"),
        }
    }
    Err(why)
}

fn mount(folder: &Path) -> io::Result<()> {
    let status = Command::new("mount").args(["-t", "tmpfs", "-o", DISK, "engram-test"]).arg(folder).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(status.to_string())) }
}

fn on_a_small_disk() {
    let cluster = Cluster::up(&cluster_manifest("small", 1, "  partitions: 4\n"));
    let worker = cluster.worker(0).expect("it runs");
    cluster.engram(&["insert", "first", "--weight", "0.25"]).ended(0);
    let ballast = Ballast::fill(cluster.folder());

    // A stream is cut off where the log's room ends, and what was applied of it is told to the row.
    let rows = |range: std::ops::Range<usize>| {
        let row = |at| format!("{{\"key\":\"row-{at}\",\"payload\":\"{}\"}}\n", "x".repeat(LARGE));
        range.map(row).collect::<String>()
    };
    let ran = cluster.engram_with(&["insert", "--file", "-"], &rows(0..1_200)).refused(1, &["ENG-0501", "no space"]);
    let stored = cluster.digest().1 - 1;
    let told = format!("{} rows before the error were applied", thousands(stored));
    assert!(ran.stderr.contains(&told), "{told:?} is not what it says:\n{}", ran.stderr);

    // The log's last bytes; then even the smallest change is refused, by its kind, and changes nothing.
    let acknowledged = fill_the_log(&cluster);
    let before = cluster.digest();
    assert_eq!(before.1, 1 + stored + acknowledged.len() as u64);
    for change in
        [&["insert", "late"][..], &["reinforce", "first", "--delta", "0.5"], &["remove", "first"], &["decay", "0.1"]]
    {
        cluster.engram(change).refused(1, &["ENG-0501", "no space"]);
    }
    cluster.engram(&["snapshot", "create", "full"]).refused(1, &["ENG-0501", "no space"]);
    assert_eq!(cluster.engram(&["snapshot", "list", "-o", "name"]).ended(0).stdout, "");
    let export = cluster.folder().join("all.jsonl").display().to_string();
    cluster.engram(&["export", &export]).refused(1, &["ENG-0501", &export]);
    assert_eq!(cluster.digest(), before);

    // Everything acknowledged is there and read as ever.
    let found = cluster.engram(&["get", "first", "row-0", "-o", "json"]).ended(0).json();
    assert_eq!((&found["items"][0]["weight"], payload(&found["items"][1])), (&0.25.into(), LARGE));
    cluster.engram(&["get", "late"]).refused(3, &["ENG-0508"]);
    cluster.engram(&["rank", "--limit", "3"]).ended(0);
    cluster.engram(&["quality"]).ended(0);
    let got = cluster.client(async |client| {
        client.get(&acknowledged, GetOptions::default()).await.expect("reads go on").memories.len()
    });
    assert_eq!(got, acknowledged.len());

    // Room is all it takes: the same process goes on.
    drop(ballast);
    cluster.engram(&["insert", "late"]).ended(0);
    assert_eq!(cluster.digest().1, before.1 + 1);
    assert_eq!(cluster.worker(0), Some(worker), "nothing was started again");

    restarts_on_a_full_disk(cluster);
}

/// Neither the crash of a worker nor a stop and a start on the full disk costs anything but time.
fn restarts_on_a_full_disk(mut cluster: Cluster) {
    let before = cluster.digest();
    let ballast = Ballast::fill(cluster.folder());
    let worker = cluster.worker(0).expect("it runs");
    cluster.kill(worker);
    // It ends for want of room as often as it is started, until there is some.
    wait_for("a start to fail", DEADLINE, || {
        let told = fs::read_to_string(cluster.folder().join("up.log")).expect("up has a log");
        told.contains("worker-0 ended (disk full, ENG-0501)").then_some(())
    });
    drop(ballast);
    wait_for("the worker to serve again", DEADLINE, || {
        (cluster.engram(&["get", "first"]).code == Some(0)).then_some(())
    });
    assert_eq!(cluster.digest(), before);

    let ballast = Ballast::fill(cluster.folder());
    let (up, status) = cluster.stop();
    assert_eq!(status.code(), Some(0), "a stop takes no room");
    let ballast = ballast.more();
    up.run().refused(1, &["ENG-0501"]);
    // With room for what `up` itself writes it is the worker that finds none.
    ballast.leave(1 << 20);
    up.run().refused(1, &["ENG-0501", "worker-0", "no space"]);
    drop(ballast);
    let cluster = up.start();
    assert_eq!(cluster.digest(), before);
    let (up, _) = cluster.stop();
    let unfinished: Vec<PathBuf> =
        files(&up.state_dir()).into_iter().filter(|path| path.extension().is_some_and(|it| it == "tmp")).collect();
    assert!(unfinished.is_empty(), "{unfinished:?} were left half-done");
}

/// Writes memories, ever smaller ones, until none fits; returns those that were acknowledged.
fn fill_the_log(cluster: &Cluster) -> Vec<MemoryId> {
    cluster.client(async |client| {
        let session = client.session();
        let mut acknowledged = Vec::new();
        for bytes in [LARGE, 1] {
            let refused = loop {
                assert!(acknowledged.len() < 10_000, "the disk is never full");
                let id = MemoryId(acknowledged.len() as u64);
                let payloads: Blobs = [vec![b'x'; bytes]].into_iter().collect();
                match session.upsert(Rows { ids: vec![id], payloads: Some(payloads), ..Rows::default() }).await {
                    Ok(_) => acknowledged.push(id),
                    Err(refused) => break refused,
                }
            };
            assert_eq!(refused.kind(), ProblemKind::DiskFull, "{refused}");
        }
        acknowledged
    })
}

/// A file that takes all the room there is, until it is dropped.
struct Ballast {
    path: PathBuf,
    file: File,
}

impl Ballast {
    fn fill(folder: &Path) -> Self {
        let path = folder.join("ballast");
        let file = File::create(&path).expect("a file takes no room");
        Self { path, file }.more()
    }

    /// Takes what has become free.
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

    /// Gives some of it back.
    fn leave(&self, bytes: u64) {
        let taken = self.file.metadata().expect("it is there").len();
        self.file.set_len(taken - bytes).expect("a file can be made shorter");
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        fs::remove_file(&self.path).expect("it is there");
    }
}

fn payload(memory: &serde_json::Value) -> usize {
    memory["payload"].as_str().expect("it has one").len()
}

/// As the command writes numbers for people.
fn thousands(number: u64) -> String {
    match number {
        0..1_000 => number.to_string(),
        _ => format!("{},{:03}", number / 1_000, number % 1_000),
    }
}

/// Every file below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("it is there").flatten() {
        let path = entry.path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}
