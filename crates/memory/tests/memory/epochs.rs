//! Learning epochs: applied once, in order, resumable from a partition's progress.

use engram_memory::epoch::{Admission, KEPT_RESULTS, Step, Table};
use engram_memory::ledger::{Gate, Ledger, epoch_step};
use engram_memory::reference::Partition;
use engram_memory::{
    Command, FeatureShape, Group, Law, LearningEpoch, Outcome, Record, Refusal, Reply, RunId, Settings, Shape, Updates,
};
use proptest::collection::vec;
use proptest::prelude::*;

const RUN: RunId = RunId(3);

fn outcome(applied: u64) -> Outcome {
    Outcome { applied, ..Outcome::default() }
}

fn execute(table: &mut Table, n: u64, step: Step) {
    assert_eq!(table.admit(RUN, LearningEpoch(n), step), Admission::Execute, "{n} {step:?}");
    table.complete(RUN, LearningEpoch(n), step, &outcome(n));
}

/// Returns (expected, expected part, found, found part) of a gap.
fn gap(table: &Table, n: u64, step: Step) -> (u64, u32, u64, u32) {
    match table.admit(RUN, LearningEpoch(n), step) {
        Admission::Refuse(Refusal::EpochGap { expected, expected_part, found, found_part }) => {
            (expected.0, expected_part, found.0, found_part)
        }
        other => panic!("{n} {step:?} is not a gap: {other:?}"),
    }
}

#[test]
fn steps_are_sequential_and_gaps_return_the_expected_step() {
    let mut table = Table::default();
    assert_eq!(gap(&table, 2, Step::Whole), (1, 0, 2, 0));
    assert_eq!(gap(&table, 1, Step::Part(1)), (1, 0, 1, 1));
    assert_eq!(gap(&table, 1, Step::End(0)), (1, 0, 1, 1));
    for step in [Step::Whole, Step::Begin, Step::Part(1), Step::End(0)] {
        assert_eq!(gap(&table, 0, step).0, 1, "epochs are numbered from 1: {step:?}");
    }
    execute(&mut table, 1, Step::Whole);
    execute(&mut table, 2, Step::Begin);
    assert_eq!(table.progress(RUN).unwrap().open, Some(0));
    assert_eq!(gap(&table, 2, Step::Whole), (2, 1, 2, 0), "an epoch that was begun in parts ends in parts");
    assert_eq!(gap(&table, 2, Step::Part(2)), (2, 1, 2, 2));
    assert_eq!(gap(&table, 2, Step::Part(0)), (2, 1, 2, 0));
    execute(&mut table, 2, Step::Part(1));
    execute(&mut table, 2, Step::Part(2));
    assert_eq!(gap(&table, 2, Step::End(3)), (2, 3, 2, 4), "part 3 is missing");
    assert_eq!(gap(&table, 2, Step::End(1)), (2, 3, 2, 2), "an end with fewer parts comes from another driver");
    assert_eq!(gap(&table, 3, Step::Begin), (2, 3, 3, 0));
    execute(&mut table, 2, Step::End(2));
    assert_eq!(gap(&table, 4, Step::Whole), (3, 0, 4, 0));
    // An epoch without parts, and another run.
    execute(&mut table, 3, Step::Begin);
    execute(&mut table, 3, Step::End(0));
    assert_eq!(table.admit(RunId(4), LearningEpoch(1), Step::Whole), Admission::Execute);
    table.remove(RUN);
    assert_eq!(table.admit(RUN, LearningEpoch(1), Step::Whole), Admission::Execute, "a removed run starts again");
}

#[test]
fn the_last_sixteen_results_are_kept() {
    let mut table = Table::default();
    (1..=20).for_each(|n| execute(&mut table, n, Step::Whole));
    let repeat = |n| table.admit(RUN, LearningEpoch(n), Step::Whole);
    for n in 1..=4 {
        assert_eq!(repeat(n), Admission::Refuse(Refusal::EpochForgotten { n: LearningEpoch(n) }));
    }
    for n in 5..=20 {
        assert_eq!(repeat(n), Admission::Repeat(outcome(n)));
        assert_eq!(table.admit(RUN, LearningEpoch(n), Step::End(9)), Admission::Repeat(outcome(n)));
    }
    assert_eq!(table.progress(RUN).unwrap().results.len(), KEPT_RESULTS);
    assert_eq!(table.admit(RUN, LearningEpoch(1), Step::Part(1)), Admission::Repeat(Outcome::default()));
}

/// Steps planned by a driver: small epochs (0 parts, one record) and large ones.
fn plan(sizes: &[u32]) -> Vec<(u64, Step)> {
    let epoch = |(n, &size): (usize, &u32)| {
        let n = n as u64 + 1;
        let steps: Vec<_> = match size {
            0 => vec![Step::Whole],
            parts => {
                [Step::Begin].into_iter().chain((1..parts).map(Step::Part)).chain([Step::End(parts - 1)]).collect()
            }
        };
        steps.into_iter().map(move |step| (n, step)).collect::<Vec<_>>()
    };
    sizes.iter().enumerate().flat_map(epoch).collect()
}

/// Returns the first step of a new driver, from the partition's progress.
fn resume(plan: &[(u64, Step)], table: &Table) -> usize {
    let (done, open) = table.progress(RUN).map_or((0, None), |progress| (progress.done, progress.open));
    let before = plan.iter().take_while(|(n, _)| *n <= done).count();
    before + open.map_or(0, |applied| 1 + applied as usize)
}

proptest! {
    #[test]
    fn any_delivery_applies_each_step_once_and_in_order(
        sizes in vec(0..5_u32, 1..40),
        jumps in vec(prop_oneof![6 => Just(0_i64), 2 => -3..=0_i64, 1 => -80..=3_i64], 1..300),
    ) {
        let plan = plan(&sizes);
        let mut table = Table::default();
        let mut position = 0;
        for jump in jumps {
            prop_assert_eq!(resume(&plan, &table), position);
            let at = position as i64 + jump;
            let Some(&(n, step)) = usize::try_from(at).ok().and_then(|at| plan.get(at)) else { continue };
            match table.admit(RUN, LearningEpoch(n), step) {
                Admission::Execute => {
                    prop_assert_eq!(at as usize, position);
                    table.complete(RUN, LearningEpoch(n), step, &outcome(n));
                    position += 1;
                }
                Admission::Repeat(repeated) => {
                    prop_assert!((at as usize) < position);
                    let closes = matches!(step, Step::Whole | Step::End(_));
                    prop_assert_eq!(repeated, if closes { outcome(n) } else { Outcome::default() });
                }
                Admission::Refuse(Refusal::EpochForgotten { .. }) => {
                    prop_assert!(n + KEPT_RESULTS as u64 <= table.progress(RUN).unwrap().done);
                }
                Admission::Refuse(refusal) => {
                    prop_assert!((at as usize) > position, "{:?} {:?} at {} of {}", refusal, step, at, position);
                }
            }
        }
    }
}

#[test]
fn a_repeated_epoch_changes_nothing_and_returns_its_quality_again() {
    let shape = Shape { partitions: 1, law: Law::Linear, features: FeatureShape::NONE };
    let mut partition = Partition::new(shape, Settings::default());
    let create = Updates::ById {
        ids: vec![engram_memory::MemoryId(1)],
        deltas: vec![5],
        on_missing: engram_memory::OnMissing::Create,
        keys: None,
    };
    let n = LearningEpoch(1);
    let small = Record::bare(Command::Epoch { run: RUN, n, decay: 10, updates: create });
    let first = partition.apply(&small);
    let once = partition.clone();
    assert_eq!(partition.apply(&small), first);
    assert_eq!(partition, once);
    assert_eq!(first.clone().into_result().unwrap().quality.unwrap().total().sum, (1 << 29) + 5);
    // With a new request, the session stores the result too.
    let session = engram_memory::SessionId { opened_ms: 0, random: 0 };
    let with_request = Record { request: Some(engram_memory::Request { session, seq: 1 }), ..small };
    assert_eq!(partition.ledger().lookup_reply(&with_request), Some(first.clone()));
    assert_eq!(partition.apply(&with_request), first);
    assert_eq!(partition.memories(), once.memories());
    assert_eq!(partition.ledger().sessions.high(session), Some(1));
    assert_eq!(partition.apply(&with_request), first);
    // A gap is the final answer of a request too.
    let gap = Command::EpochEnd { run: RUN, n: LearningEpoch(9), parts: 1 };
    let ahead = Record { request: Some(engram_memory::Request { session, seq: 2 }), command: gap };
    assert!(matches!(partition.apply(&ahead), Reply::Refused(Refusal::EpochGap { .. })));
    assert_eq!(partition.clone().apply(&ahead), partition.apply(&ahead));
}

#[test]
fn a_large_epoch_equals_a_small_one() {
    let shape = Shape { partitions: 1, law: Law::Linear, features: FeatureShape::NONE };
    let settings = Settings { initial_weight: engram_memory::Weight::HALF, ..Settings::default() };
    let (mut whole, mut parts) = (Partition::new(shape, settings), Partition::new(shape, settings));
    let by_group = |deltas: &[i32]| Updates::ByGroup(deltas.iter().map(|&delta| (Group(0), delta)).collect());
    let upsert = engram_memory::Upsert { ids: vec![engram_memory::MemoryId(8)], ..Default::default() };
    for partition in [&mut whole, &mut parts] {
        partition.apply(&Record::bare(Command::Upsert(upsert.clone())));
    }
    let (run, decay) = (RUN, 1 << 28);
    for n in (1..=30).map(LearningEpoch) {
        let deltas = [1 << 29, -(1 << 27), 3];
        let quality = |reply: Reply| reply.into_result().unwrap().quality;
        let expected =
            quality(whole.apply(&Record::bare(Command::Epoch { run, n, decay, updates: by_group(&deltas) })));
        parts.apply(&Record::bare(Command::EpochBegin { run, n, decay }));
        for (part, delta) in (1..).zip(deltas) {
            parts.apply(&Record::bare(Command::EpochPart { run, n, part, updates: by_group(&[delta]) }));
        }
        let end = Record::bare(Command::EpochEnd { run, n, parts: 3 });
        assert_eq!(quality(parts.apply(&end)), expected);
        assert_eq!((whole.digest(), whole.clock()), (parts.digest(), parts.clock()));
    }
}

#[test]
fn a_primary_can_look_up_the_reply_before_logging() {
    let mut ledger = Ledger::default();
    let record = Record::bare(Command::Epoch { run: RUN, n: LearningEpoch(1), decay: 0, updates: Updates::NONE });
    assert_eq!(epoch_step(&record.command), Some((RUN, LearningEpoch(1), Step::Whole)));
    assert_eq!(ledger.lookup_reply(&record), None);
    assert_eq!(ledger.admit(&record), Gate::Execute);
    ledger.complete(&record, &Reply::Applied(outcome(4)));
    assert_eq!(ledger.lookup_reply(&record), Some(Reply::Applied(outcome(4))));
    assert_eq!(ledger.admit(&record), Gate::Answer(Reply::Applied(outcome(4))));
}

#[test]
fn runs_with_epochs_are_bounded_and_the_ones_that_did_least_go_first() {
    use engram_memory::epoch::MAX_RUNS;
    let mut table = Table::default();
    for n in 1..=3 {
        execute(&mut table, n, Step::Whole);
    }
    for unknown in 1_000..1_000 + 2 * MAX_RUNS as u128 {
        table.complete(RunId(unknown), LearningEpoch(1), Step::Whole, &outcome(1));
        assert!(table.progress(RunId(unknown)).is_some(), "the newest is kept");
    }
    assert_eq!(table.iter().count(), MAX_RUNS);
    assert_eq!(table.progress(RUN).unwrap().done, 3);
}
