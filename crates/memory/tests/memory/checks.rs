//! Validation of commands before the log: valid commands can be applied.

use engram_memory::reference::Partition;
use engram_memory::{
    Blobs, Command, FeatureShape, FeatureType, Group, Law, LearningEpoch, MAX_IDS, MAX_KEY_BYTES, MAX_PAYLOAD_BYTES,
    MemoryId, ONE, OnMissing, Record, Refusal, Request, RunId, SessionId, Settings, Shape, Updates, Upsert,
};
use engram_testing::commands::arb_log;
use proptest::collection::vec;
use proptest::prelude::*;

fn two_ids() -> Upsert {
    Upsert { ids: vec![MemoryId(1), MemoryId(2)], ..Upsert::default() }
}

fn by_id(deltas: Vec<i32>, keys: Option<Blobs>) -> Updates {
    Updates::ById { ids: vec![MemoryId(1), MemoryId(2)], deltas, on_missing: OnMissing::Report, keys }
}

fn blobs(entries: &[&[u8]]) -> Option<Blobs> {
    Some(entries.iter().collect())
}

fn refused(command: &Command) -> String {
    match command.check() {
        Err(Refusal::Malformed { what }) => what.to_owned(),
        other => panic!("{command:?}: {other:?}"),
    }
}

#[test]
fn malformed_commands_are_rejected_with_the_name_of_the_field() {
    let (run, n, decay) = (RunId(1), LearningEpoch(1), ONE + 1);
    let one = ONE as i32;
    let long_key = vec![b'k'; MAX_KEY_BYTES + 1];
    let long_payload = vec![0; MAX_PAYLOAD_BYTES + 1];
    let many = vec![MemoryId(3); MAX_IDS + 1];
    let upserts = [
        (Upsert { weights: vec![1], ..two_ids() }, "weights"),
        (Upsert { weights: vec![1, ONE + 1], ..two_ids() }, "weight"),
        (Upsert { groups: vec![Group(1); 3], ..two_ids() }, "groups"),
        (Upsert { keys: blobs(&[b"a"]), ..two_ids() }, "keys"),
        (Upsert { keys: blobs(&[b"a", &long_key]), ..two_ids() }, "key"),
        (Upsert { keys: blobs(&["é".as_bytes(), &"é".as_bytes()[..1]]), ..two_ids() }, "key"),
        (Upsert { keys: blobs(&[&"é".as_bytes()[..1], &"é".as_bytes()[1..]]), ..two_ids() }, "key"),
        (Upsert { features: vec![0; 5], ..two_ids() }, "features"),
        (Upsert { features: vec![0; 5], ..Upsert::default() }, "features"),
        (Upsert { payloads: blobs(&[b""]), ..two_ids() }, "payloads"),
        (Upsert { payloads: blobs(&[b"", &long_payload]), ..two_ids() }, "payload"),
        (Upsert { ids: many.clone(), ..Upsert::default() }, "ids"),
    ];
    for (upsert, field) in upserts {
        let what = refused(&Command::Upsert(upsert));
        assert_eq!(what.split(':').next(), Some(field), "{what}");
    }
    let updates = [
        (by_id(vec![1], None), "deltas"),
        (by_id(vec![1, one + 1], None), "delta"),
        (by_id(vec![1, i32::MIN], None), "delta"),
        (by_id(vec![1, 1], blobs(&[b"a"])), "keys"),
        (by_id(vec![1, 1], blobs(&[b"a", &long_key])), "key"),
        (Updates::ByGroup(vec![(Group(0), 1), (Group(0), -one - 1)]), "delta"),
        (Updates::ByGroup(vec![(Group(0), 1); MAX_IDS + 1]), "group updates"),
    ];
    for (updates, field) in updates {
        for command in [
            Command::Reinforce(updates.clone()),
            Command::Epoch { run, n, decay: 0, updates: updates.clone() },
            Command::EpochPart { run, n, part: 1, updates: updates.clone() },
        ] {
            let what = refused(&command);
            assert_eq!(what.split(':').next(), Some(field), "{what}");
        }
    }
    let zero = LearningEpoch(0);
    let closed = Request { session: SessionId { opened_ms: 0, random: 0 }, seq: 0 };
    let others = [
        (Command::Remove { ids: many }, "ids"),
        (Command::Decay { amount: decay }, "decay"),
        (Command::Epoch { run, n, decay, updates: Updates::NONE }, "decay"),
        (Command::EpochBegin { run, n, decay }, "decay"),
        (Command::Epoch { run, n: zero, decay: 0, updates: Updates::NONE }, "learning epoch"),
        (Command::EpochBegin { run, n: zero, decay: 0 }, "learning epoch"),
        (Command::EpochPart { run, n: zero, part: 1, updates: Updates::NONE }, "learning epoch"),
        (Command::EpochPart { run, n, part: 0, updates: Updates::NONE }, "part"),
        (Command::EpochEnd { run, n: zero, parts: 1 }, "learning epoch"),
        (Command::Configure(Settings { rate: 0, ..Settings::default() }), "learning rate"),
        (Command::Configure(Settings { rate: ONE + 1, ..Settings::default() }), "learning rate"),
        (Command::Configure(Settings { limit: 0, ..Settings::default() }), "limit"),
        (Command::CloseRequest(closed), "sequence number"),
    ];
    for (command, field) in others {
        let what = refused(&command);
        assert_eq!(what.split(':').next(), Some(field), "{what}");
    }
    let unnumbered = Record { request: Some(closed), command: Command::Decay { amount: 0 } };
    assert!(unnumbered.check().is_err() && unnumbered.command.check().is_ok());
    // The limits themselves are allowed.
    let keys = blobs(&[b"", &long_key[1..]]);
    let payloads = blobs(&[b"", &long_payload[1..]]);
    let upsert = Upsert { weights: vec![ONE, Upsert::KEEP], keys, payloads, features: vec![0; 8], ..two_ids() };
    assert_eq!(Command::Upsert(upsert).check(), Ok(()));
    assert_eq!(Command::Reinforce(by_id(vec![-one, one], None)).check(), Ok(()));
    assert_eq!(Command::Decay { amount: ONE }.check(), Ok(()));
}

#[test]
fn features_have_the_shape_of_the_cluster_or_are_absent() {
    let shape = |dimension, dtype| FeatureShape { dimension, dtype };
    let upsert = |bytes| Command::Upsert(Upsert { features: vec![0; bytes], ..two_ids() });
    assert_eq!(upsert(0).check_features(FeatureShape::NONE), Ok(()));
    assert_eq!(upsert(0).check_features(shape(3, FeatureType::F16)), Ok(()));
    assert_eq!(upsert(12).check_features(shape(3, FeatureType::F16)), Ok(()));
    assert_eq!(upsert(24).check_features(shape(3, FeatureType::F32)), Ok(()));
    assert_eq!(Command::Decay { amount: 1 }.check_features(shape(3, FeatureType::F32)), Ok(()));
    assert!(upsert(12).check_features(FeatureShape::NONE).unwrap_err().to_string().contains("dimension 0"));
    assert!(upsert(12).check_features(shape(3, FeatureType::F32)).is_err());
    assert!(upsert(8).check_features(shape(3, FeatureType::F16)).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A record that passes both checks for one shape is applied without a panic, in any state.
    #[test]
    fn checked_records_never_panic((features, settings, records) in arb_log(0..80), other in 0..3_u32) {
        let shape = |features| Shape { partitions: 1, law: Law::Linear, features };
        let another = FeatureShape { dimension: other, dtype: FeatureType::F32 };
        let mut partition = Partition::new(shape(features), settings);
        let mut differing = Partition::new(shape(another), settings);
        for record in &records {
            prop_assert_eq!(record.check(), Ok(()));
            prop_assert_eq!(record.command.check_features(features), Ok(()));
            partition.apply(record);
            if record.command.check_features(another).is_ok() {
                differing.apply(record);
            }
        }
        for memory in partition.memories().values() {
            prop_assert_eq!(memory.features.len(), features.bytes());
        }
    }

    #[test]
    fn a_column_of_byte_strings_returns_what_was_pushed(entries in vec(vec(any::<u8>(), 0..5), 0..20)) {
        let column: Blobs = entries.iter().collect();
        prop_assert_eq!(column.len(), entries.len());
        prop_assert_eq!(column.is_empty(), entries.is_empty());
        prop_assert_eq!(column.iter().map(<[u8]>::to_vec).collect::<Vec<_>>(), entries);
        let rebuilt = Blobs::from_parts(column.ends().to_vec(), column.bytes().to_vec());
        prop_assert_eq!(rebuilt, Some(column.clone()));
        let mut longer = column.bytes().to_vec();
        longer.push(0);
        prop_assert_eq!(Blobs::from_parts(column.ends().to_vec(), longer), None);
        if column.len() > 1 && column.ends()[0] < column.ends()[column.len() - 1] {
            let mut swapped = column.ends().to_vec();
            swapped.swap(0, column.len() - 1);
            prop_assert_eq!(Blobs::from_parts(swapped, column.bytes().to_vec()), None);
        }
    }
}
