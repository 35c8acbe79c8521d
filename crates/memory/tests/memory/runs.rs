//! Run records: one driver at a time, bounded, removed as a whole.

use engram_memory::reference::Partition;
use engram_memory::run::{MAX_RUN_BYTES, Table};
use engram_memory::{Command, FeatureShape, Law, LearningEpoch, Record, Refusal, RunId, Settings, Shape, Updates};

#[test]
fn one_of_two_drivers_is_rejected_without_a_change() {
    let mut table = Table::default();
    let run = RunId(1);
    assert_eq!(table.record(run, 0, b"a", Some(b"row 1")), Ok(()));
    assert_eq!(table.record(run, 1, b"bc", None), Ok(()));
    let before = table.clone();
    assert_eq!(table.record(run, 1, b"other", Some(b"row")), Err(Refusal::RunConflict { expected: 1, found: 2 }));
    assert_eq!(table.record(RunId(2), 5, b"", None), Err(Refusal::RunConflict { expected: 5, found: 0 }));
    assert_eq!(table, before);
    let entry = table.get(run).unwrap();
    assert_eq!((entry.version, &entry.state[..], &entry.rows[..]), (2, &b"bc"[..], &[b"row 1".to_vec()][..]));
    assert_eq!((table.len(), table.total_bytes()), (1, 2 + 5 + 4));
    assert!(entry.without_rows().rows.is_empty());
    assert!(table.remove(run) && !table.remove(run) && table.get(run).is_none());
    assert_eq!((table.is_empty(), table.total_bytes()), (true, 0));
}

#[test]
fn history_is_bounded_and_a_full_one_stays_unchanged() {
    let mut table = Table::default();
    let run = RunId(1);
    let row = vec![7; 8 << 20];
    for version in 0..7 {
        assert_eq!(table.record(run, version, b"state", Some(&row)), Ok(()));
    }
    let free = MAX_RUN_BYTES as usize - 7 * (row.len() + 4);
    let full = Err(Refusal::RunFull { bytes: MAX_RUN_BYTES });
    assert_eq!(table.record(run, 7, &[], Some(&vec![0; free])), full);
    assert_eq!(table.record(run, 7, &vec![0; free + 1], None), full);
    assert_eq!(table.get(run).unwrap().version, 7);
    assert_eq!(table.record(run, 7, &vec![0; free], None), Ok(()), "a new state replaces the old one in the count");
    assert_eq!(table.record(run, 8, &[], Some(&vec![0; free - 4])), Ok(()));
}

#[test]
fn removing_a_run_removes_its_epochs_too() {
    let shape = Shape { partitions: 1, law: Law::Linear, features: FeatureShape::NONE };
    let mut partition = Partition::new(shape, Settings::default());
    let run = RunId(6);
    let epoch = Record::bare(Command::Epoch { run, n: LearningEpoch(1), decay: 0, updates: Updates::NONE });
    partition.apply(&epoch);
    partition.apply(&Record::bare(Command::RunRecord { run, expected: 0, state: vec![1], row: None }));
    assert!(partition.apply(&Record::bare(Command::RunRemove { run })).into_result().is_ok());
    assert_eq!(partition.ledger().epochs.progress(run), None);
    // A partition without the run's record removes its epochs too, and returns that there was no record.
    partition.apply(&epoch);
    assert_eq!(partition.apply(&Record::bare(Command::RunRemove { run })).into_result(), Err(Refusal::RunUnknown));
    assert_eq!(partition.ledger().epochs.progress(run), None);
}

#[test]
fn the_number_of_runs_is_bounded_and_recorded_ones_go_on() {
    use engram_memory::run::{MAX_PARTITION_BYTES, MAX_RUNS};
    let mut table = Table::default();
    for run in 0..MAX_RUNS as u128 {
        assert_eq!(table.record(RunId(run), 0, b"state", None), Ok(()));
    }
    let full = Err(Refusal::RunFull { bytes: MAX_PARTITION_BYTES });
    assert_eq!(table.record(RunId(u128::MAX), 0, b"state", None), full);
    assert_eq!(table.record(RunId(1), 1, b"later", None), Ok(()));
    assert!(table.remove(RunId(0)));
    assert_eq!(table.record(RunId(u128::MAX), 0, b"state", None), Ok(()));
}
