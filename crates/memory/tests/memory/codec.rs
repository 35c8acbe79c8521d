//! Codec: one encoding per value, and decoders that neither panic nor over-allocate on any bytes.

use engram_memory::codec::{
    DecodeError, decode_ledger, decode_record, decode_reply, encode_ledger, encode_record, encode_reply,
};
use engram_memory::outcome::{Outcome, Rejection, RejectionReason, Reply};
use engram_memory::reference::Partition;
use engram_memory::{
    Digest, FeatureShape, FeatureType, Group, GroupQuality, Law, LearningEpoch, Ledger, MemoryId, QualityVector,
    Record, Refusal, Shape,
};
use engram_testing::commands::{arb_log, arb_record, arb_weight};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

fn bytes_of<T>(value: &T, encode: impl Fn(&T, &mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(value, &mut bytes);
    bytes
}

fn arb_reply() -> impl Strategy<Value = Reply> {
    let reason = prop_oneof![
        Just(RejectionReason::Unknown),
        Just(RejectionReason::KeyCollision),
        Just(RejectionReason::KeyMismatch)
    ];
    let rejections = vec((any::<u64>(), reason), 0..=64);
    let quality = vec((any::<u8>(), arb_weight()), 0..12).prop_map(|weights| {
        let mut vector = QualityVector::default();
        weights.into_iter().for_each(|(group, weight)| vector.add(Group(group), weight));
        vector
    });
    let (counts, first) = (any::<[u64; 3]>(), proptest::option::of(any::<u64>()));
    let digest = proptest::option::of(any::<u128>().prop_map(Digest));
    let applied = (counts, 0..1_000_u64, rejections, proptest::option::of(quality), digest, first).prop_map(
        |([applied, created, evicted], more, rejections, quality, digest, first)| {
            Reply::Applied(Outcome {
                applied,
                created,
                evicted,
                rejected: rejections.len() as u64 + more,
                rejections: rejections.into_iter().map(|(id, reason)| Rejection { id: MemoryId(id), reason }).collect(),
                quality,
                digest,
                first: first.map(MemoryId),
            })
        },
    );
    let n = || any::<u64>().prop_map(LearningEpoch);
    let refused = prop_oneof![
        Just(Refusal::SessionExpired),
        Just(Refusal::AlreadyClosed),
        any::<u64>().prop_map(|window| Refusal::OutOfWindow { window }),
        (n(), any::<u32>(), n(), any::<u32>()).prop_map(|(expected, expected_part, found, found_part)| {
            Refusal::EpochGap { expected, expected_part, found, found_part }
        }),
        n().prop_map(|n| Refusal::EpochForgotten { n }),
        any::<[u64; 2]>().prop_map(|[expected, found]| Refusal::RunConflict { expected, found }),
        Just(Refusal::RunUnknown),
        any::<u64>().prop_map(|bytes| Refusal::RunFull { bytes }),
        Just(Refusal::BufferUnknown),
        Just(Refusal::BufferConflict),
        any::<[u64; 3]>().prop_map(|[items, capacity, needed]| Refusal::BufferFull { items, capacity, needed }),
        any::<u64>().prop_map(|most| Refusal::BufferLimit { what: "buffers or consumers", most }),
        Just(Refusal::Malformed { what: "the request" }),
    ];
    prop_oneof![3 => applied, 1 => refused.prop_map(Reply::Refused)]
}

/// Ledgers that result from logs.
fn arb_ledger() -> impl Strategy<Value = Ledger> {
    arb_log(0..120).prop_map(|(features, settings, records)| {
        let mut partition = Partition::new(Shape { partitions: 1, law: Law::Linear, features }, settings);
        records.iter().for_each(|record| {
            partition.apply(record);
        });
        partition.ledger().clone()
    })
}

fn arb_any_record() -> impl Strategy<Value = Record> {
    prop_oneof![arb_record(FeatureShape::NONE), arb_record(FeatureShape { dimension: 2, dtype: FeatureType::F32 })]
}

/// A mutation of an encoding: bytes flipped, overwritten, truncated, inserted, appended.
#[derive(Debug, Clone)]
enum Mutation {
    Flip(Index, u8),
    Overwrite(Index, u32),
    Cut(Index),
    Insert(Index, u8),
    Append(Vec<u8>),
}

fn arb_mutation() -> impl Strategy<Value = Mutation> {
    prop_oneof![
        (any::<Index>(), 1..=255_u8).prop_map(|(at, bits)| Mutation::Flip(at, bits)),
        (any::<Index>(), prop_oneof![Just(u32::MAX), 0..300_u32]).prop_map(|(at, word)| Mutation::Overwrite(at, word)),
        any::<Index>().prop_map(Mutation::Cut),
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Mutation::Insert(at, byte)),
        vec(any::<u8>(), 1..4).prop_map(Mutation::Append),
    ]
}

fn mutate(bytes: &mut Vec<u8>, mutation: &Mutation) {
    match mutation {
        Mutation::Append(more) => bytes.extend(more),
        Mutation::Insert(at, byte) => bytes.insert(at.index(bytes.len() + 1), *byte),
        _ if bytes.is_empty() => {}
        Mutation::Flip(at, bits) => {
            let at = at.index(bytes.len());
            bytes[at] ^= bits;
        }
        Mutation::Overwrite(at, word) => {
            let at = at.index(bytes.len());
            bytes[at..].iter_mut().zip(word.to_le_bytes()).for_each(|(byte, new)| *byte = new);
        }
        Mutation::Cut(at) => bytes.truncate(at.index(bytes.len())),
    }
}

/// Decodes as every kind; asserts that decoded values encode to the same bytes.
fn assert_one_encoding(bytes: &[u8]) {
    if let Ok(record) = decode_record(bytes) {
        assert_eq!(bytes_of(&record, encode_record), bytes, "{record:?}");
        assert_eq!(record.check(), Ok(()));
    }
    if let Ok(reply) = decode_reply(bytes) {
        assert_eq!(bytes_of(&reply, encode_reply), bytes, "{reply:?}");
        if let Reply::Applied(Outcome { quality: Some(quality), .. }) = reply {
            quality.total();
        }
    }
    if let Ok(ledger) = decode_ledger(bytes) {
        assert_eq!(bytes_of(&ledger, encode_ledger), bytes, "{ledger:?}");
    }
}

proptest! {
    #[test]
    fn records_round_trip(record in arb_any_record()) {
        prop_assert_eq!(decode_record(&bytes_of(&record, encode_record)), Ok(record));
    }

    #[test]
    fn replies_round_trip(reply in arb_reply()) {
        prop_assert_eq!(decode_reply(&bytes_of(&reply, encode_reply)), Ok(reply));
    }

    #[test]
    fn mutated_records_and_replies_are_rejected_or_have_one_encoding(
        record in arb_any_record(), reply in arb_reply(), mutations in vec(arb_mutation(), 1..4),
    ) {
        for mut bytes in [bytes_of(&record, encode_record), bytes_of(&reply, encode_reply)] {
            for mutation in &mutations {
                mutate(&mut bytes, mutation);
                assert_one_encoding(&bytes);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..300), kind in 0..20_u8) {
        assert_one_encoding(&bytes);
        // A plausible header reaches more of the decoder.
        let headed = [&[0, kind][..], &bytes].concat();
        assert_one_encoding(&headed);
        assert_one_encoding(&headed[1..]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn ledgers_round_trip(ledger in arb_ledger()) {
        prop_assert_eq!(decode_ledger(&bytes_of(&ledger, encode_ledger)), Ok(ledger));
    }

    #[test]
    fn mutated_ledgers_are_rejected_or_have_one_encoding(
        ledger in arb_ledger(), mutations in vec(vec(arb_mutation(), 1..3), 1..100),
    ) {
        let bytes = bytes_of(&ledger, encode_ledger);
        for mutations in mutations {
            let mut bytes = bytes.clone();
            mutations.iter().for_each(|mutation| mutate(&mut bytes, mutation));
            assert_one_encoding(&bytes);
        }
    }

    /// An impossible count is rejected before allocation, at any position.
    #[test]
    fn hostile_counts_are_rejected_everywhere(record in arb_any_record(), reply in arb_reply(), ledger in arb_ledger()) {
        let encodings = [bytes_of(&record, encode_record), bytes_of(&reply, encode_reply), bytes_of(&ledger, encode_ledger)];
        for bytes in encodings {
            for at in (0..bytes.len().saturating_sub(3)).take(160) {
                for count in [u32::MAX, u32::MAX / 8, 1 << 24] {
                    let mut hostile = bytes.clone();
                    hostile[at..at + 4].copy_from_slice(&count.to_le_bytes());
                    assert_one_encoding(&hostile);
                }
            }
        }
    }
}

#[test]
fn every_truncation_and_extra_byte_is_rejected() {
    let record = Record::bare(engram_memory::Command::Remove { ids: vec![MemoryId(1), MemoryId(2)] });
    let bytes = bytes_of(&record, encode_record);
    (0..bytes.len())
        .for_each(|len| assert!(matches!(decode_record(&bytes[..len]), Err(DecodeError::Short(_))), "{len}"));
    assert_eq!(decode_record(&[&bytes[..], &[0]].concat()), Err(DecodeError::LeftOver(1)));
    assert!(matches!(decode_record(&[0, 99]), Err(DecodeError::Unknown { what: "kind of record", found: 99 })));
    assert!(matches!(decode_reply(&[99]), Err(DecodeError::Unknown { what: "kind of reply", found: 99 })));
}

#[test]
fn impossible_quality_is_rejected() {
    let group = |group, count, sum, min, max| (Group(group), GroupQuality { count, sum, min, max });
    let possible = |groups: &[(Group, GroupQuality)]| QualityVector::from_parts(groups.to_vec()).is_some();
    assert!(possible(&[]));
    assert!(possible(&[group(0, 2, 5, 2, 3), group(9, 1, 0, 0, 0)]));
    assert!(!possible(&[group(9, 1, 0, 0, 0), group(0, 2, 5, 2, 3)]), "groups ascend");
    assert!(!possible(&[group(0, 1, 0, 0, 0), group(0, 1, 0, 0, 0)]), "one entry per group");
    assert!(!possible(&[group(0, 0, 0, u32::MAX, 0)]), "empty groups are absent");
    assert!(
        !possible(&[group(0, 2, 7, 2, 3)]) && !possible(&[group(0, 2, 3, 2, 3)]),
        "the sum lies between the extremes"
    );
    assert!(!possible(&[group(0, 2, 5, 3, 2)]) && !possible(&[group(0, 1, 1 << 31, 1 << 31, 1 << 31)]));
    assert!(!possible(&[group(0, u64::MAX, 0, 0, 0), group(1, 1, 0, 0, 0)]), "the total is countable");
}

/// Ledger bytes are assembled by hand here, to test each wrong order.
#[test]
fn tables_out_of_order_are_rejected() {
    let mut settings = Vec::new();
    encode_ledger(&Ledger::default(), &mut settings);
    // Watermark and three empty tables follow the settings.
    settings.truncate(settings.len() - (8 + 3 * 4));
    let ledger = |watermark: u64, sessions: &[Vec<u8>], epochs: &[Vec<u8>], runs: &[Vec<u8>]| {
        let mut bytes = settings.clone();
        bytes.extend(watermark.to_le_bytes());
        for table in [sessions, epochs, runs] {
            bytes.extend((table.len() as u32).to_le_bytes());
            bytes.extend(table.concat());
        }
        decode_ledger(&bytes)
    };
    let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    // A session whose answers are all `Never`: no reply follows.
    let session = |opened: u64, high: u64, seqs: &[u64]| {
        let answers = seqs.iter().flat_map(|seq| [&seq.to_le_bytes()[..], &[0]].concat()).collect::<Vec<_>>();
        [words(&[opened, 0, high]), (seqs.len() as u32).to_le_bytes().to_vec(), answers].concat()
    };
    assert!(ledger(5, &[session(5, 9, &[1, 9]), session(6, 70, &[7, 70])], &[], &[]).is_ok());
    for (broken, why) in [
        (vec![session(4, 1, &[1])], "below the watermark"),
        (vec![session(6, 1, &[1]), session(5, 1, &[1])], "sessions ascend"),
        (vec![session(6, 1, &[1]), session(6, 1, &[1])], "one entry per session"),
        (vec![session(6, 9, &[9, 1])], "answers ascend"),
        (vec![session(6, 9, &[1])], "the highest seq has an answer"),
        (vec![session(6, 9, &[1, 9, 10])], "no answer above the highest"),
        (vec![session(6, 70, &[6, 70])], "no answer older than the window"),
        (vec![session(6, 0, &[])], "no session without an answer"),
    ] {
        assert!(matches!(ledger(5, &broken, &[], &[]), Err(DecodeError::Invalid(_))), "{why}");
    }
    let outcome = [0; 38];
    let epochs = |run: u64, done: u64, open: &[u8], results: &[u64]| {
        let kept = results.iter().flat_map(|n| [&n.to_le_bytes()[..], &outcome].concat()).collect::<Vec<_>>();
        [words(&[run, 0, done]), open.to_vec(), (results.len() as u32).to_le_bytes().to_vec(), kept].concat()
    };
    assert!(ledger(0, &[], &[epochs(1, 2, &[0], &[1, 2]), epochs(2, 0, &[1, 3, 0, 0, 0], &[])], &[]).is_ok());
    for (broken, why) in [
        (vec![epochs(2, 1, &[0], &[1]), epochs(1, 1, &[0], &[1])], "runs ascend"),
        (vec![epochs(1, 2, &[0], &[2, 1])], "results ascend"),
        (vec![epochs(1, 2, &[0], &[2])], "a result is missing"),
        (vec![epochs(1, 1, &[0], &[1, 2])], "a result ahead"),
        (vec![epochs(1, 17, &[0], &(1..=17).collect::<Vec<_>>())], "at most 16 are kept"),
        (vec![epochs(1, 0, &[0], &[])], "a run without a step"),
    ] {
        assert!(matches!(ledger(0, &[], &broken, &[]), Err(DecodeError::Invalid(_))), "{why}");
    }
    let run = |run: u64, version: u64, rows: u32| {
        [words(&[run, 0, version]), vec![0; 4], rows.to_le_bytes().to_vec(), vec![0; 4 * rows as usize]].concat()
    };
    assert!(ledger(0, &[], &[], &[run(1, 2, 2), run(2, 1, 0)]).is_ok());
    for (broken, why) in [
        (vec![run(2, 1, 0), run(1, 1, 0)], "runs ascend"),
        (vec![run(1, 0, 0)], "a run without a record"),
        (vec![run(1, 1, 2)], "more rows than records"),
    ] {
        assert!(matches!(ledger(0, &[], &[], &broken), Err(DecodeError::Invalid(_))), "{why}");
    }
}
