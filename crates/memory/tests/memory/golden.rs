//! Golden bytes of format version 1: they have to decode to the same values in every version.
//!
//! If `golden/record-v1.bin` is absent, this test writes it with its description and fails, so that both are reviewed and
//! committed. A format change is a new version with its own files; these are never rewritten.

use engram_memory::codec::{decode_ledger, decode_record, decode_reply, encode_ledger, encode_record, encode_reply};
use engram_memory::outcome::{Outcome, Rejection, RejectionReason, Reply};
use engram_memory::reference::Partition;
use engram_memory::{
    Blobs, CapacityPolicy, Command, Digest, FeatureShape, FeatureType, Group, GroupQuality, Law, LearningEpoch, Ledger,
    MemoryId, ONE, OnMissing, QualityVector, Record, Refusal, Request, RunId, SessionId, Settings, Shape, Updates,
    Upsert, Weight, key_id,
};
use std::fmt::Write as _;
use std::path::Path;

const SESSION: SessionId = SessionId { opened_ms: 1_700_000_000_123, random: 0x0123_4567_89ab_cdef };
const RUN: RunId = RunId(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff);

#[derive(Debug, PartialEq)]
pub(super) enum Value {
    Record(Box<Record>),
    Reply(Reply),
    Ledger(Box<Ledger>),
}

impl Value {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Record(record) => encode_record(record, &mut bytes),
            Self::Reply(reply) => encode_reply(reply, &mut bytes),
            Self::Ledger(ledger) => encode_ledger(ledger, &mut bytes),
        }
        bytes
    }

    /// Decodes bytes as a value of this kind.
    fn decode_like(&self, bytes: &[u8]) -> Self {
        match self {
            Self::Record(_) => Self::Record(Box::new(decode_record(bytes).unwrap())),
            Self::Reply(_) => Self::Reply(decode_reply(bytes).unwrap()),
            Self::Ledger(_) => Self::Ledger(Box::new(decode_ledger(bytes).unwrap())),
        }
    }
}

fn request(seq: u64) -> Request {
    Request { session: SESSION, seq }
}

fn settings() -> Settings {
    Settings {
        rate: Settings::DEFAULT_RATE,
        initial_weight: Weight::from_units(ONE / 4).unwrap(),
        limit: 41_016,
        policy: CapacityPolicy::Refuse,
        count_updates: true,
    }
}

fn records() -> Vec<(&'static str, Record)> {
    let (run, n, decay) = (RUN, LearningEpoch(300), 10_737_418);
    let keyed = key_id("Gedächtnis".as_bytes());
    let ids = vec![MemoryId(1), MemoryId(u64::MAX), keyed];
    let keys: Blobs = ["".as_bytes(), b"", "Gedächtnis".as_bytes()].iter().collect();
    let by_id = |on_missing, keys| Updates::ById {
        ids: ids.clone(),
        deltas: vec![42_949_673, -42_949_672, 0],
        on_missing,
        keys,
    };
    let by_group = Updates::ByGroup(vec![(Group(0), ONE as i32), (Group(255), -1)]);
    let full = Upsert {
        ids: ids.clone(),
        weights: vec![0, ONE, Upsert::KEEP],
        groups: vec![Group(0), Group(7), Group(255)],
        keys: Some(keys.clone()),
        features: (0..18).collect(),
        payloads: Some(["hello".as_bytes(), b"", &[0]].iter().collect()),
    };
    let bare = |what, command| (what, Record::bare(command));
    let requested = |what, command| (what, Record { request: Some(request(65)), command });
    vec![
        requested("upsert with every column, f16 features of dimension 3", Command::Upsert(full)),
        bare("upsert of ids alone", Command::Upsert(Upsert { ids: ids.clone(), ..Upsert::default() })),
        requested("remove", Command::Remove { ids: ids.clone() }),
        requested("reinforce by id, report, with keys", Command::Reinforce(by_id(OnMissing::Report, Some(keys)))),
        bare("reinforce by id, create, without keys", Command::Reinforce(by_id(OnMissing::Create, None))),
        bare("reinforce by group", Command::Reinforce(by_group.clone())),
        bare("decay", Command::Decay { amount: decay }),
        bare("small epoch", Command::Epoch { run, n, decay, updates: by_group }),
        bare("beginning of a large epoch", Command::EpochBegin { run, n, decay }),
        bare("part of a large epoch", Command::EpochPart { run, n, part: 2, updates: by_id(OnMissing::Create, None) }),
        bare("end of a large epoch", Command::EpochEnd { run, n, parts: 2 }),
        bare("evict", Command::Evict { count: 411 }),
        bare("configure", Command::Configure(settings())),
        bare("close a request", Command::CloseRequest(request(7))),
        bare("expire sessions", Command::ExpireSessions { before_ms: 1_699_999_999_000 }),
        bare(
            "record of a run with a row",
            Command::RunRecord { run, expected: 3, state: vec![1, 2], row: Some(vec![3]) },
        ),
        bare("record of a run without a row", Command::RunRecord { run, expected: 4, state: vec![], row: None }),
        bare("remove a run", Command::RunRemove { run }),
        bare("digest marker", Command::DigestMarker { marker: 9 }),
    ]
}

fn replies() -> Vec<(&'static str, Reply)> {
    let rejection = |id, reason| Rejection { id: MemoryId(id), reason };
    let quality = [
        (Group(0), GroupQuality { count: 2, sum: u128::from(ONE) + 5, min: 5, max: ONE }),
        (Group(255), GroupQuality { count: 1, sum: 0, min: 0, max: 0 }),
    ];
    let outcome = Outcome {
        applied: 1,
        created: 2,
        evicted: 3,
        rejected: 1_000,
        rejections: vec![
            rejection(1, RejectionReason::Unknown),
            rejection(2, RejectionReason::KeyCollision),
            rejection(3, RejectionReason::KeyMismatch),
        ],
        quality: QualityVector::from_parts(quality.to_vec()),
        digest: Some(Digest(0xc57d_e0e8_7480_2461_5e5f_8bdb_5166_2542)),
        first: None,
    };
    let (expected, found) = (LearningEpoch(4), LearningEpoch(6));
    let refused = |what, refusal| (what, Reply::Refused(refusal));
    vec![
        ("applied, nothing to tell", Reply::Applied(Outcome::default())),
        ("applied, everything told", Reply::Applied(outcome)),
        refused("session expired", Refusal::SessionExpired),
        refused("already closed", Refusal::AlreadyClosed),
        refused("out of window", Refusal::OutOfWindow { window: 64 }),
        refused("epoch gap", Refusal::EpochGap { expected, expected_part: 1, found, found_part: 2 }),
        refused("epoch forgotten", Refusal::EpochForgotten { n: found }),
        refused("run conflict", Refusal::RunConflict { expected: 5, found: 6 }),
        refused("run unknown", Refusal::RunUnknown),
        refused("run full", Refusal::RunFull { bytes: 64 << 20 }),
        refused("malformed", Refusal::Malformed { what: "the request" }),
    ]
}

/// The ledger after all records above, an open epoch, and a closed request.
fn ledger() -> Ledger {
    let features = FeatureShape { dimension: 3, dtype: FeatureType::F16 };
    let shape = Shape { partitions: 256, law: Law::Linear, features };
    let mut partition = Partition::new(shape, Settings::default());
    let mut records: Vec<_> = records().into_iter().map(|(_, record)| record).collect();
    records.retain(|record| !matches!(record.command, Command::RunRemove { .. }));
    let (run, updates) = (RunId(5), Updates::NONE);
    records.extend(
        (1..=18).map(|n| Record::bare(Command::Epoch { run, n: LearningEpoch(n), decay: 1, updates: updates.clone() })),
    );
    records.push(Record::bare(Command::EpochBegin { run, n: LearningEpoch(19), decay: 0 }));
    records.push(Record::bare(Command::EpochPart { run, n: LearningEpoch(19), part: 1, updates }));
    let reinforce = Command::Reinforce(Updates::ByGroup(vec![(Group(7), 1)]));
    records.push(Record { request: Some(request(2)), command: reinforce.clone() });
    records.push(Record::bare(Command::CloseRequest(request(3))));
    let younger = SessionId { opened_ms: 1_800_000_000_000, random: 0 };
    records.push(Record { request: Some(Request { session: younger, seq: 1 }), command: reinforce });
    records.push(Record::bare(Command::RunRecord { run, expected: 0, state: vec![9; 3], row: Some(vec![8]) }));
    records.iter().for_each(|record| {
        partition.apply(record);
    });
    partition.ledger().clone()
}

fn values() -> Vec<(String, Value)> {
    let records =
        records().into_iter().map(|(what, record)| (format!("record: {what}"), Value::Record(Box::new(record))));
    let replies = replies().into_iter().map(|(what, reply)| (format!("reply: {what}"), Value::Reply(reply)));
    let ledger = ("ledger: settings, sessions, epochs, runs".to_owned(), Value::Ledger(Box::new(ledger())));
    records.chain(replies).chain([ledger]).collect()
}

/// Encodes each value after its length (u32, little-endian), and describes each in a line.
fn render(name: &str, values: &[(String, Value)]) -> (Vec<u8>, String) {
    let mut bytes = Vec::new();
    let mut text = format!(
        "Values of format version 1 in {name}.bin, each behind its length (u32, little-endian).\n\
         Columns: offset of the value, its length, what it is.\n\n",
    );
    for (what, value) in values {
        let encoded = value.encode();
        bytes.extend((encoded.len() as u32).to_le_bytes());
        writeln!(text, "{:6} {:6}  {what}", bytes.len(), encoded.len()).unwrap();
        bytes.extend(encoded);
    }
    (bytes, text)
}

/// Compares values with the golden file of this name.
pub(super) fn check_golden(name: &str, values: &[(String, Value)]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let (bytes, text) = render(name, values);
    let file = folder.join(format!("{name}.bin"));
    if !file.exists() {
        std::fs::write(&file, &bytes).unwrap();
        std::fs::write(folder.join(format!("{name}.txt")), &text).unwrap();
        panic!("{} was absent and has been written: review and commit it", file.display());
    }
    let golden = std::fs::read(&file).unwrap();
    let mut rest = golden.as_slice();
    for (what, value) in values {
        let (len, tail) = rest.split_first_chunk::<4>().unwrap();
        let (encoded, tail) = tail.split_at(u32::from_le_bytes(*len) as usize);
        assert_eq!(&value.decode_like(encoded), value, "{what}");
        assert_eq!(value.encode(), encoded, "{what}");
        rest = tail;
    }
    assert!(rest.is_empty());
    assert_eq!(std::fs::read_to_string(folder.join(format!("{name}.txt"))).unwrap(), text);
}

#[test]
fn version_1_bytes_are_encoded_and_decoded_unchanged() {
    check_golden("record-v1", &values());
}

#[test]
fn golden_records_cover_every_kind() {
    let kinds: std::collections::BTreeSet<u8> = records()
        .iter()
        .map(|(what, record)| {
            assert_eq!(record.check(), Ok(()), "{what}");
            let mut bytes = Vec::new();
            encode_record(&Record::bare(record.command.clone()), &mut bytes);
            bytes[1]
        })
        .collect();
    assert_eq!(kinds, (1..=15).collect());
    let mut bytes = Vec::new();
    encode_record(&Record::bare(Command::DigestMarker { marker: 0 }), &mut bytes);
    bytes[1] = 16;
    assert!(decode_record(&bytes).is_err(), "a sixteenth kind needs a golden record");
    let kinds: std::collections::BTreeSet<u8> =
        replies().into_iter().map(|(_, reply)| Value::Reply(reply).encode()[0]).collect();
    assert_eq!(kinds, (0..=9).collect());
}
