//! A real directory: what a simulated one cannot show.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

use engram_memory::{ClusterId, Lsn, PartitionId, Term};
use engram_store::wal::{self, Body, Entry};
use engram_store::{Disk, Error, FileDisk, Identity, Origin, Wal, abort_on_sync_failure};

use crate::shape;

#[test]
fn a_log_is_recovered_after_a_graceful_stop_and_after_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let disk: Arc<dyn Disk> = Arc::new(FileDisk::new(folder.path().join("state")).unwrap());
    let mut expected = Vec::new();
    for start in 1..=4u64 {
        let identity = Identity::open(&disk, ClusterId(9), shape(), Origin::current(0)).unwrap();
        assert_eq!((identity.incarnation().0, identity.clean_end().is_some()), (start, start % 2 == 0));
        let options = wal::Options { sealed_at: identity.durable_end(), segment_bytes: 1 << 20, ..Default::default() };
        let mut replayed = Vec::new();
        let (mut wal, mut writer, recovery) = Wal::open(Arc::clone(&disk), identity.head(), options, &mut |entry| {
            replayed.push(entry.lsn.0);
            Ok(())
        })
        .unwrap();
        assert_eq!(replayed, expected);
        assert_eq!((identity.is_lossless(&recovery), recovery.dropped_bytes), (start > 1, 0));
        for lsn in start * 10 - 9..=start * 10 {
            let body = Body::Command(&[1; 1_000]);
            wal.append(&Entry { partition: PartitionId(1), term: Term(1), lsn: Lsn(lsn), body }).unwrap();
            writer.write(&wal.seal(&[]).unwrap(), 0).unwrap();
            expected.push(lsn);
        }
        if start % 2 == 1 {
            identity.leave_clean_mark(&disk, writer.close().unwrap()).unwrap();
        }
    }
    let names = disk.list().unwrap();
    assert_eq!(names.iter().filter(|name| name.starts_with("wal-")).count(), 4, "{names:?}");
    assert!(names.iter().all(|name| !name.ends_with(".tmp")), "{names:?}");
}

#[test]
fn a_second_process_gets_the_pid_of_the_lock_holder() {
    let folder = tempfile::tempdir().unwrap();
    let open = || {
        let disk: Arc<dyn Disk> = Arc::new(FileDisk::new(folder.path()).unwrap());
        Identity::open(&disk, ClusterId(9), shape(), Origin::current(0))
    };
    let first = open().unwrap();
    let refused = open().unwrap_err();
    let text = refused.to_string();
    assert!(matches!(refused, Error::Locked { pid: Some(pid), .. } if pid == std::process::id()), "{text}");
    assert!(text.contains(&format!("is in use by process {}", std::process::id())), "{text}");
    drop(first);
    open().unwrap();
}

#[test]
fn a_path_that_cannot_be_a_directory_is_unwritable() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, b"").unwrap();
    for path in [file.clone(), file.join("below"), "/proc/engram".into()] {
        assert!(matches!(FileDisk::new(&path), Err(Error::Unwritable { .. })), "{}", path.display());
    }
}

#[test]
fn a_failed_sync_aborts_the_process_with_a_message() {
    const CHILD: &str = "ENGRAM_TEST_FAILED_SYNC";
    if std::env::var_os(CHILD).is_some() {
        let source = std::io::Error::other("the device is gone");
        let _ = abort_on_sync_failure::<()>(Err(Error::SyncFailed { path: "wal".into(), source }));
        return;
    }
    let name = "folder::a_failed_sync_aborts_the_process_with_a_message";
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(6), "SIGABRT: {text}");
    assert!(text.contains("fatal: failed to sync wal: the device is gone"), "{text}");

    let full = Error::DiskFull { operation: "write", path: "wal".into() };
    assert!(matches!(abort_on_sync_failure::<()>(Err(full)), Err(Error::DiskFull { .. })), "other errors do not abort");
}
