//! Runs that ended and are submitted again.

use super::*;
use crate::source::{Columns, EventsOptions, Format, MemoryColumn, SignalSource, TimeColumn};
use std::time::SystemTime;

fn events(content: &str) -> Job {
    let (_, job) = sotu(&[2], 24);
    let source = SourceOptions::Events(EventsOptions {
        path: "days.csv".into(),
        origin: Origin::Content(content.as_bytes().into()),
        format: Format::Auto,
        separator: None,
        columns: Columns { memory: MemoryColumn::Key("k".into()), time: TimeColumn::Epoch("e".into()) },
        signal: SignalSource::QualityColumn("q".into()),
    });
    Job { source, epochs: None, skip: 0, ..job }
}

/// Submits a run again after its end, drives it, and returns its last status.
async fn resume(fake: &FakeCluster, job: &Job) -> Status {
    let (state, version) = {
        let mut fake = fake.0.lock().unwrap();
        let entry = fake.records.get(run_id()).cloned().unwrap();
        let state = RunState::of(&entry).unwrap();
        assert!(state.phase.is_final() && state.ended_ms > 0, "{state:?}");
        let state = state.resume("", SystemTime::now());
        fake.records.record(run_id(), entry.version, &state.encode(), None).unwrap();
        (state, entry.version + 1)
    };
    let (status, watched) = watch::channel(Status::default());
    let (_orders, ordered) = watch::channel(Order::Continue);
    Driver::new(run_id(), job.clone(), (state, version), fake.clone(), fake.clone(), status, ordered).run().await;
    watched.borrow().clone()
}

fn outcome(status: &Status) -> (Phase, u64) {
    (status.phase, status.epoch)
}

const GOOD: &str = "k,e,q\na,1,0.9\nb,1,0.2\na,2,0.7\nc,3,1\n";

#[tokio::test(start_paused = true)]
async fn a_run_that_failed_continues_with_the_corrected_epoch() {
    let calm = FakeCluster::new(Settings { initial_weight: Weight::ZERO, ..Settings::default() });
    assert_eq!(outcome(&drive(&calm, &events(GOOD), std::iter::empty()).await), (Phase::Succeeded, 3));
    let undisturbed = finished(&calm, &events(GOOD));

    let (fake, _) = sotu(&[], 1);
    let bad = events(&GOOD.replace("a,2,0.7", "a,2,7"));
    let failed = drive(&fake, &bad, std::iter::empty()).await;
    assert_eq!((outcome(&failed), &*failed.code), ((Phase::Failed, 1), "ENG-0304"));
    let again = resume(&fake, &bad).await;
    assert_eq!((outcome(&again), &*again.code), ((Phase::Failed, 1), "ENG-0304"), "it is still wrong");

    let changed = events(&GOOD.replace("b,1,0.2", "b,1,0.3"));
    for _ in 0..2 {
        let refused = resume(&fake, &changed).await;
        assert_eq!((outcome(&refused), &*refused.code), ((Phase::Failed, 1), "ENG-0302"), "{refused:?}");
        assert!(refused.message.contains("epoch 1 (1) of the input differs"), "{}", refused.message);
    }
    let missing = resume(&fake, &events("k,e,q\n")).await;
    assert!(missing.message.contains("epoch 1, which this run has learned, is missing"), "{}", missing.message);

    assert_eq!(outcome(&resume(&fake, &events(GOOD)).await), (Phase::Succeeded, 3));
    let report = finished(&fake, &events(GOOD));
    assert_eq!((&report.digest, &report.epochs), (&undisturbed.digest, &undisturbed.epochs));
    assert_eq!(fake.digest_now(), undisturbed.digest);

    let longer = format!("{GOOD}a,4,0.9\n");
    assert_eq!(outcome(&resume(&fake, &events(&longer)).await), (Phase::Succeeded, 4), "what was added is learned");
    let calm = FakeCluster::new(Settings { initial_weight: Weight::ZERO, ..Settings::default() });
    drive(&calm, &events(&longer), std::iter::empty()).await;
    assert_eq!(fake.digest_now(), calm.digest_now());
}

#[tokio::test(start_paused = true)]
async fn an_epoch_that_may_have_been_sent_is_not_exchanged() {
    let (fake, _) = sotu(&[], 1);
    drive(&fake, &events(&GOOD.replace("a,2,0.7", "a,2,7")), std::iter::empty()).await;
    // As after a cancellation while epoch 2 was applied.
    {
        let mut fake = fake.0.lock().unwrap();
        let entry = fake.records.get(run_id()).cloned().unwrap();
        let mut state = RunState::of(&entry).unwrap();
        (state.predicted, state.sent) = (Some(Vec::new()), Some("0".repeat(32)));
        fake.records.record(run_id(), entry.version, &state.encode(), None).unwrap();
    }
    for content in [GOOD, "k,e,q\na,1,0.9\nb,1,0.2\n"] {
        let refused = resume(&fake, &events(content)).await;
        assert_eq!((outcome(&refused), &*refused.code), ((Phase::Failed, 1), "ENG-0302"), "{refused:?}");
        assert!(refused.message.starts_with("epoch 2"), "{}", refused.message);
    }
}

#[test]
fn a_resumed_run_keeps_the_identity_of_its_epochs_and_old_records_are_readable() {
    let mut state = RunState::new("test", serde_json::Value::Null);
    state.uid = "first".into();
    let identity = state.identity(run_id());
    state.end(Phase::Failed, "ENG-0304", "bad".into(), SystemTime::now());
    let resumed = state.resume("second", SystemTime::now()).resume("third", SystemTime::now());
    assert_eq!((resumed.identity(run_id()), resumed.uid.as_str()), (identity, "third"));
    assert_eq!((resumed.phase, resumed.ended_ms, resumed.code.as_str()), (Phase::Queued, 0, ""));
    let old = r#"{"format":1,"name":"test","spec":null,"phase":"Failed","done":3}"#;
    let mut table = Table::default();
    table.record(run_id(), 0, old.as_bytes(), None).unwrap();
    let old = RunState::of(table.get(run_id()).unwrap()).unwrap();
    assert_eq!((old.done, old.ended_ms, old.sent), (3, 0, None));
}
