//! Writes the seed inputs of the fuzz targets, created by the real encoders: `cargo run -p engram-fuzz --example seeds`.
//!
//! They are named `seed-*`; other files were found by fuzzing and are not changed.
#![allow(clippy::unwrap_used, reason = "a generator that cannot go on fails")]

use bytes::Bytes;
use engram_cluster::replica::{self, History};
use engram_cluster::{Change, Entry as MapEntry, PartitionMap, rebuild};
use engram_fuzz::{tokens, world};
use engram_mapstore::{FileStore, Goal, MapStore as _, Scale};
use engram_memory::buffer::{BufferCommand, BufferRef, Limits, Remover, handle_at, order, position};
use engram_memory::codec::{encode_ledger, encode_record, encode_reply};
use engram_memory::{
    Blobs, ClusterId, Command, FeatureShape, FeatureType, Group, Incarnation, Lsn, Member, Ordinal, Record, StoreId,
    Term, key_id,
};
use engram_proto::v1;
use engram_replay::item::Head;
use engram_store::peer::{Envelope, Message, StateChunk};
use engram_store::{Content, SimDisk, SnapshotHead, SnapshotWriter, snapshot_file};
use engram_testing::commands::World;
use engram_wire as wire;
use proptest::strategy::{Strategy, ValueTree as _};
use proptest::test_runner::TestRunner;
use prost::Message as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const FEATURES: FeatureShape = FeatureShape { dimension: 2, dtype: FeatureType::F16 };
/// The primary's term in `replication_frame`.
const TERM: Term = Term(3);

fn main() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let state = State::make();
    let seeds: [(&str, Vec<Vec<u8>>); 14] = [
        ("wal_record", records(&state)),
        ("wal_segment_recover", logs(&state)),
        ("snapshot_manifest", snapshots(&state)),
        ("payload_segment", payloads()),
        ("replication_frame", frames(&state)),
        ("public_requests", requests()),
        ("heartbeat", heartbeats()),
        ("api_object", objects()),
        ("map_json", maps()),
        ("manifest", manifests()),
        ("event_file", events()),
        ("worker_settings", settings()),
        ("buffer_messages", buffers()),
        ("account_token", tokens()),
    ];
    for (target, seeds) in seeds {
        let folder = corpus.join(target);
        fs::create_dir_all(&folder).unwrap();
        let old = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path());
        for path in old.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("seed-")) {
            fs::remove_file(path).unwrap();
        }
        for (number, seed) in seeds.iter().enumerate() {
            fs::write(folder.join(format!("seed-{number:02}")), seed).unwrap();
        }
        println!("{target}: {} seeds, {} bytes", seeds.len(), seeds.iter().map(Vec::len).sum::<usize>());
    }
}

fn with_kind(kind: u8, bytes: &[u8]) -> Vec<u8> {
    [&[kind], bytes].concat()
}

/// A partition with a history, and its encoded records.
struct State {
    records: Vec<Record>,
    replies: Vec<Vec<u8>>,
    ledger: Vec<u8>,
    content: Content,
    disk: SimDisk,
}

impl State {
    fn make() -> Self {
        let world = World::small(FEATURES);
        let records = world.arb_records(24).new_tree(&mut TestRunner::deterministic()).unwrap().current();
        let disk = world::disk();
        let (mut store, _) = world::open(&disk, 1).unwrap();
        store.activate(vec![(world::P, Term(1))], |_| {});
        store.turn().unwrap();
        let replies = Arc::new(Mutex::new(Vec::new()));
        for record in &records {
            let replies = Arc::clone(&replies);
            store.write(vec![(world::P, record.clone())], move |answers| {
                let committed = answers.into_iter().filter_map(Result::ok);
                for committed in committed {
                    let mut bytes = Vec::new();
                    encode_reply(&committed.reply, &mut bytes);
                    replies.lock().unwrap().push(bytes);
                }
            });
            store.turn().unwrap();
        }
        let mut ledger = Vec::new();
        encode_ledger(store.partitions().ledger(world::P).unwrap(), &mut ledger);
        let content = store.partitions().export(world::P).unwrap().unwrap();
        let replies = std::mem::take(&mut *replies.lock().unwrap());
        Self { records, replies, ledger, content, disk }
    }

    fn encoded(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.records.iter().map(|record| {
            let mut bytes = Vec::new();
            encode_record(record, &mut bytes);
            bytes
        })
    }
}

fn distinct(mut seeds: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    seeds.sort();
    seeds.dedup();
    seeds
}

fn records(state: &State) -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = state.encoded().map(|bytes| with_kind(0, &bytes)).collect();
    seeds.push(with_kind(1, &state.ledger));
    seeds.extend(state.replies.iter().map(|bytes| with_kind(2, bytes)));
    // The records of the second batch of a real log; its header has their length.
    let file = log(&state.disk);
    let batch = &file[2 * 4_096..];
    let word = |at: usize| u32::from_le_bytes(batch[at..at + 4].try_into().unwrap()) as usize;
    let from = 48 + 20 * word(12);
    seeds.push(with_kind(3, &batch[from..from + word(40)]));
    distinct(seeds)
}

/// Returns the newest segment of a log, without preallocated bytes.
fn log(disk: &SimDisk) -> Vec<u8> {
    let names = engram_store::Disk::list(disk).unwrap();
    let mut bytes = disk.bytes(names.iter().rfind(|name| name.ends_with(".log")).unwrap());
    let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    bytes.truncate(used.next_multiple_of(4_096).min(4 * 4_096));
    bytes
}

/// Hand-written inputs: see `segments.rs` and `wal.rs` for their format.
fn logs(state: &State) -> Vec<Vec<u8>> {
    let entry = |kind: u8, partition: u8, term: u16, lsn: u16, payload: &[u8]| {
        let mut bytes = vec![kind, partition];
        for value in [term, lsn, payload.len() as u16] {
            bytes.extend_from_slice(&value.to_le_bytes());
        }
        bytes.extend_from_slice(payload);
        bytes
    };
    let batch = |entries: &[Vec<u8>]| [vec![0, 0, entries.len() as u8], entries.concat()].concat();
    let segment = |batches: &[Vec<u8>]| [vec![0, 1, batches.len() as u8], batches.concat()].concat();
    let first = segment(&[
        batch(&[entry(3, 0, 1, 0, &[1]), entry(1, 0, 1, 1, b"one"), entry(1, 1, 1, 1, b"")]),
        batch(&[entry(1, 0, 1, 2, b"two"), entry(4, 0, 2, 0, b"map"), entry(3, 0, 2, 0, &[0])]),
    ]);
    let second = segment(&[
        batch(&[entry(2, 0, 3, 1, b""), entry(1, 0, 3, 2, b"other")]),
        batch(&[entry(5, 1, 3, 9, b""), entry(1, 1, 3, 10, b"behind")]),
    ]);
    let commands: Vec<u8> = (0..6_u8)
        .flat_map(|number| {
            [vec![number & 3 | (number & 1) << 2, number * 40, 0], vec![number; usize::from(number) * 40]].concat()
        })
        .collect();
    let damage = |place: u32, file: u8| [&[2], &place.to_le_bytes()[..], &[file, 1, 0, 0, 128], &commands].concat();
    vec![
        with_kind(0, &log(&state.disk)),
        with_kind(1, &first),
        with_kind(1, &[first.clone(), second].concat()),
        // Every field is overridden with a wrong value.
        [&[1, 0, 1, 1, 0b11_1111, 0, 1][..], &entry(1, 0, 1, 1, b"x"), &[9; 40]].concat(),
        [&[1, 0b11_0111][..], &[2, 0, 0, 0, 0, 0, 0, 0], &[0, 16, 0, 0, 0, 0, 0, 0], &[3; 10]].concat(),
        damage(4_096 + 60, 0),
        damage(20, 0),
        damage(12_000, 0),
    ]
}

/// Inputs of `buffers.rs`: definitions, items, columns, and commands of the first of three partitions.
fn buffers() -> Vec<Vec<u8>> {
    let field = |name: &str, dtype: &str, shape: &[u32], jagged| v1::BufferField {
        name: name.into(),
        dtype: dtype.into(),
        shape: shape.to_vec(),
        jagged,
    };
    let spec = v1::BufferSpec {
        name: "train".into(),
        fields: vec![field("obs", "float32", &[2], false), field("tokens", "uint16", &[3], true)],
        capacity: 100,
        max_age: Some(2),
        limiter: Some(v1::RateLimit { samples_per_insert: 4.0, min_size: 10, min_diff: 30.0, max_diff: 50.0 }),
        sampler: Some(v1::BufferSampler {
            sampler: Some(v1::buffer_sampler::Sampler::Prioritized(v1::PrioritizedSampler { alpha: 0.6, beta: 0.4 })),
        }),
        ..v1::BufferSpec::default()
    };
    let mut item = Vec::new();
    Head { version: 3, trajectory: 9, tag: b"done" }.encode(&mut item);
    item.extend([[0; 8].as_slice(), &[1, 0, 0, 0, 1, 0, 2, 0, 3, 0], &[1]].concat());
    let column = |field: &str, dtype: &str, shape: &[u32], data: &[u8], rows: &[u32]| v1::FieldColumn {
        field: field.into(),
        dtype: dtype.into(),
        shape: shape.to_vec(),
        data: data.to_vec().into(),
        rows: rows.to_vec(),
    };
    let columns = vec![
        column("done", "bool", &[], &[1, 0], &[]),
        column("obs", "float32", &[2], &[7; 16], &[]),
        column("tokens", "uint16", &[3], &[9; 12], &[2, 0]),
    ];
    let append = v1::AppendItems { count: 2, columns, ..v1::AppendItems::default() };
    let buffer = BufferRef { group: Group(255), stamp: xxhash_rust::xxh3::xxh3_64(b"definition") };
    let at = |row| position(order(1_700_000_000_000, row), 0, 3);
    let limits = Limits { capacity: 9, share: 3, remover: Remover::HighestPriority, max_reuse: 1 };
    let payloads: Blobs = [&b"a"[..], b"b"].iter().collect();
    let rows = |from| BufferCommand::Append { buffer, from, weights: vec![1, 2], payloads: payloads.clone() };
    let id = |row| handle_at(at(row));
    let (consumer, now_ms) = ("learner".to_owned(), 1);
    let sequence = [
        BufferCommand::Define { group: None, name: "train".into(), definition: b"definition".to_vec(), limits },
        rows(at(0)),
        rows(at(0)),
        BufferCommand::SetWeights { buffer, ids: vec![id(1)], weights: vec![1 << 30] },
        BufferCommand::Lease { buffer, consumer: consumer.clone(), ids: vec![id(0), id(1)], now_ms, until_ms: 9 },
        BufferCommand::Acknowledge { buffer, consumer, ids: vec![id(0)] },
        BufferCommand::Use { buffer, sampled: 2, ids: vec![id(1)] },
        BufferCommand::Delete { buffer, ids: vec![id(2)] },
        rows(at(9)),
        BufferCommand::Drop { buffer },
    ];
    let commands = sequence.into_iter().flat_map(|command| {
        let mut record = Vec::new();
        encode_record(&Record::bare(Command::Buffer(command)), &mut record);
        [(record.len() as u16).to_le_bytes().to_vec(), record].concat()
    });
    vec![
        with_kind(0, &spec.encode_to_vec()),
        with_kind(1, &item),
        with_kind(2, &append.encode_to_vec()),
        with_kind(3, &commands.collect::<Vec<u8>>()),
    ]
}

/// One change of a payload segment each: a flipped bit in head and payload, a cut, appended bytes, another file, none.
fn payloads() -> Vec<Vec<u8>> {
    let change = |kind: u8, at: u32, rest: &[u8]| [&[kind][..], &at.to_le_bytes(), rest].concat();
    vec![
        change(0, 100, &[]),
        change(0, 9_000, &[]),
        change(1, 300, &[]),
        change(2, 0, b"\x03\x00abc"),
        change(3, 0, b"\x03\x00abc"),
        change(4, 0, &[]),
        Vec::new(),
    ]
}

fn snapshots(state: &State) -> Vec<Vec<u8>> {
    let (store, _) = world::open(&world::disk(), 1).unwrap();
    let whose = store.identity().head();
    let make = |content: &Content| {
        let disk = SimDisk::new(3);
        let head = SnapshotHead {
            partition: content.partition,
            lsn: Lsn(24),
            term: Term(1),
            clock: content.clock,
            memories: content.memories,
            created_ms: 1,
            digest: content.digest.0,
        };
        let mut writer = SnapshotWriter::create(&disk, &whose, head, &content.ledger).unwrap();
        for (column, bytes) in &content.chunks {
            writer.chunk(column.code(), bytes).unwrap();
        }
        writer.finish().unwrap();
        disk.bytes(&snapshot_file::name(content.partition, Lsn(24)))
    };
    let whole = make(&state.content);
    let empty = make(&Content { memories: 0, chunks: Vec::new(), ..state.content.clone() });
    vec![with_kind(0, &whole), with_kind(1, &whole), with_kind(1, &empty)]
}

fn frames(state: &State) -> Vec<Vec<u8>> {
    let frame = |role: u8, messages: &[Message]| {
        let envelopes = messages.iter().map(|body| Envelope::new(world::P, body.clone()));
        let messages = envelopes.map(engram_fuzz::encode_envelope).collect();
        with_kind(role, &v1::PeerFrame { hello: None, messages }.encode_to_vec())
    };
    let bare = |message| Message::Replica(message, Vec::new());
    let append = |after: u64, runs: &[(u64, u64)], commit: u64| {
        let runs: Vec<(Lsn, Term)> = runs.iter().map(|(lsn, term)| (Lsn(*lsn), Term(*term))).collect();
        let named = runs.last().map_or(0, |run| run.0.0 - after);
        let records = state.encoded().skip(after as usize).take(named as usize).map(Bytes::from).collect();
        Message::Replica(replica::Message::Append { term: TERM, after: Lsn(after), runs, commit: Lsn(commit) }, records)
    };
    let open = |lsn: u64, term: u64| {
        let history = History::from_floor(Lsn(lsn), Term(term));
        bare(replica::Message::Open { term: TERM, history, commit: Lsn(lsn) })
    };
    let empty = || open(0, 0);
    let content = &state.content;
    let chunks: Vec<(u32, Bytes)> = std::iter::once((0, Bytes::from(content.ledger.clone())))
        .chain(content.chunks.iter().map(|(column, bytes)| (column.code(), Bytes::from(bytes.clone()))))
        .collect();
    let copy = chunks.iter().zip(0..).map(|((kind, chunk), index)| {
        Message::State(StateChunk {
            term: TERM,
            lsn: Lsn(24),
            record_term: Term(2),
            index,
            count: chunks.len() as u32,
            clock: content.clock,
            memories: content.memories,
            digest: content.digest.0,
            kind: *kind,
            bytes: chunk.clone(),
        })
    });
    let copied: Vec<Message> = std::iter::once(open(24, 2)).chain(copy).chain([append(24, &[], 24)]).collect();
    let opened = |end: Option<u64>, written: u64| {
        bare(replica::Message::Opened { term: TERM, end: end.map(Lsn), written: Lsn(written) })
    };
    let ack = |written: u64| bare(replica::Message::Ack { term: TERM, written: Lsn(written) });
    let digest = |lsn: u64| Message::Digest { term: TERM, lsn: Lsn(lsn), digest: 1 << 100 };
    vec![
        frame(0, &[empty(), append(0, &[(3, 3)], 0), append(3, &[(8, 3)], 3), append(8, &[], 8)]),
        frame(0, &[empty(), append(0, &[(4, 3)], 0), open(2, 3), append(2, &[(5, 3)], 5)]),
        frame(0, &copied),
        frame(0, &[empty(), append(0, &[(2, 1), (4, 2), (6, 3)], 9), ack(3), opened(Some(2), 1)]),
        frame(0, &[bare(replica::Message::Rejected { term: TERM, promised: Term(9) }), empty()]),
        frame(1, &[opened(Some(0), 0), ack(0), ack(1), ack(2)]),
        frame(0, &[empty(), append(0, &[(24, 3)], 24), digest(3), digest(24)]),
        frame(1, &[opened(None, 0), bare(replica::Message::NotOpen { term: TERM }), opened(Some(0), 0)]),
        frame(1, &[bare(replica::Message::Rejected { term: TERM, promised: Term(4) }), empty()]),
    ]
}

fn requests() -> Vec<Vec<u8>> {
    let session = Some(v1::Session { opened_ms: 5, random: 6 });
    let ids = || vec![1, 2, key_id(b"key").0];
    let keys = || v1::Blobs::column(["", "a", "key"]);
    let part = v1::UpsertPart {
        partition: Some(1),
        seq: 1,
        ids: ids(),
        weights: vec![0.5, f32::NAN, 1.0],
        groups: vec![0, 7, 255].into(),
        keys: keys(),
        features: vec![1.0, 2.0, -3.0, 65_504.0, 0.0, 0.1],
        payloads: v1::Blobs::column(["one", "", "three"]),
    };
    let updates = v1::Updates { ids: ids(), keys: keys(), on_missing: 2, ..Default::default() };
    let group = |group, signal| v1::GroupUpdate { group, signal: Some(signal) };
    let signals = [
        v1::Updates { quality: Some(0.9), ..updates.clone() },
        v1::Updates { qualities: vec![0.0, 0.5, 1.0], ..updates.clone() },
        v1::Updates { deltas: vec![-1.0, 0.0, 1.0], keys: None, ..updates },
        v1::Updates {
            groups: vec![
                group(0, v1::group_update::Signal::Quality(0.75)),
                group(255, v1::group_update::Signal::Delta(-0.5)),
            ],
            ..Default::default()
        },
    ];
    let epoch = |(updates, number): (v1::Updates, u32)| v1::LearnEpochRequest {
        run: vec![3; 16].into(),
        epoch: 4,
        decay: 0.01,
        parts: vec![v1::EpochPart { partition: 2, part: number, parts: 4, updates: Some(updates) }],
    };
    let reinforce = |updates: v1::Updates| v1::ApplyReinforcementRequest {
        session,
        parts: vec![v1::ReinforcePart { partition: Some(0), seq: 9, updates: Some(updates) }],
    };
    let quality = v1::GroupQuality { group: 3, count: 2, sum_units: 1 << 30, min_units: 1 << 28, max_units: 3 << 28 };
    let batch = v1::MemoryBatch {
        ids: ids(),
        weight_units: vec![1, 2, 3],
        keys: keys(),
        payloads: v1::Blobs::column(["x", "yy", ""]),
        ..Default::default()
    };
    let mut problem = v1::Problem::of(v1::ProblemKind::NotPrimary, "partition 3 is not served here").retry_after(20);
    problem.primary = Some(2);
    let mut seeds = vec![
        with_kind(0, &v1::UpsertRequest { session, parts: vec![part] }.encode_to_vec()),
        with_kind(
            1,
            &v1::RemoveRequest { session, parts: vec![v1::RemovePart { partition: None, seq: 0, ids: ids() }] }
                .encode_to_vec(),
        ),
        with_kind(
            3,
            &v1::ApplyDecayRequest { session, amount: 0.5, parts: vec![v1::DecayPart { partition: 1, seq: 2 }] }
                .encode_to_vec(),
        ),
        with_kind(
            5,
            &v1::BroadcastQualityRequest { run: vec![3; 16].into(), epoch: 4, quality: vec![quality] }.encode_to_vec(),
        ),
        with_kind(
            6,
            &v1::GetMemoriesRequest { ids: ids(), with_features: true, with_payloads: true, read: None }
                .encode_to_vec(),
        ),
        with_kind(8, &batch.encode_to_vec()),
        with_kind(9, &problem.encode_to_vec()),
    ];
    seeds.extend(signals.iter().cloned().map(|updates| with_kind(2, &reinforce(updates).encode_to_vec())));
    seeds.extend(signals.into_iter().zip(1..).map(epoch).map(|request| with_kind(4, &request.encode_to_vec())));
    seeds
}

/// Returns the member at an ordinal, with the store id of the target's entries.
fn member(ordinal: u32) -> Member {
    let store = StoreId(u128::from_be_bytes([ordinal as u8 + 1; 16]));
    Member { ordinal: Ordinal(ordinal), store, incarnation: Incarnation(1) }
}

fn map() -> PartitionMap {
    let mut third = MapEntry::first(vec![member(0), member(1)]);
    third.prev = vec![member(2)];
    third.activated = false;
    third.learners = vec![Ordinal(3)];
    let partitions = vec![MapEntry::solo(Term(1), member(0)), MapEntry::first(vec![member(1), member(2)]), third];
    PartitionMap { cluster: ClusterId(7), version: 0, partitions }
}

fn heartbeats() -> Vec<Vec<u8>> {
    let cluster = || Bytes::copy_from_slice(&7_u128.to_be_bytes());
    let hello = v1::Hello {
        cluster: cluster(),
        member: Some(wire::member_id_to_proto(&member(1))),
        protocol_min: 1,
        protocol_max: 1,
        lossless_since: 1,
        client_address: "127.0.0.1:7443".into(),
        ..Default::default()
    };
    let trouble = v1::GpuFault { was_in_use: true, reason: "device failed".into() };
    let heartbeat = v1::HeartbeatRequest {
        hello: Some(hello),
        map_version: 3,
        suspects: vec![2],
        gpu_fault: Some(trouble),
        certificate: Some(v1::CertificateStatus { trusted_roots: vec![7, 8], issuer_root: 8 }),
        ..Default::default()
    };
    let reply = v1::HeartbeatResponse {
        map: Some(wire::map_to_proto(&map())),
        leadership_transfers: vec![v1::LeadershipTransfer { partition: 1, to: 2 }],
        map_state_request: 9,
        ..Default::default()
    };
    let proposal = |change: &Change| v1::MapChange {
        term: 1,
        activated: true,
        change: wire::change_to_proto(change),
        ..Default::default()
    };
    let seen = |ordinal: u32, promised: u64, seen: Option<PartitionMap>| {
        let copy =
            rebuild::ReplicaState { promised: Term(promised), last: Lsn(9), last_term: Term(1), damaged: ordinal == 2 };
        let report = rebuild::MapStateReport { member: member(ordinal), last_map: seen, replicas: vec![copy; 3] };
        wire::map_state_to_proto(ClusterId(7), 5, &report).encode_length_delimited_to_vec()
    };
    let mut seeds = vec![
        with_kind(0, &heartbeat.encode_to_vec()),
        with_kind(1, &reply.encode_to_vec()),
        with_kind(3, &seen(0, 1, Some(map()))),
        with_kind(3, &[seen(0, 1, Some(map())), seen(1, 1, None), seen(2, 1, None), seen(3, 1, None)].concat()),
        with_kind(3, &[seen(1, 4, Some(map())), seen(2, 1, None)].concat()),
    ];
    let changes = [
        Change::Activate,
        Change::Add { primary: member(0), newcomer: member(2) },
        Change::Remove { primary: member(0), leaver: Ordinal(1) },
        Change::Promote { primary: member(1), isr: vec![Ordinal(1)] },
    ];
    seeds.extend(changes.iter().map(|change| with_kind(2, &proposal(change).encode_to_vec())));
    seeds
}

/// Objects as an API server returns them: user manifests as JSON, and a map.
fn objects() -> Vec<Vec<u8>> {
    let of = |kind: &str, spec: serde_json::Value| {
        serde_json::json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": kind, "metadata": { "name": "words", "namespace": "ml" }, "spec": spec,
        })
    };
    let texts = manifests().into_iter().map(|text| String::from_utf8(text).unwrap());
    let read = texts.filter_map(|text| engram_api::parse(&text, "seed.yaml", engram_api::Requirement::Anything).ok());
    let mut objects = Vec::new();
    for manifest in read {
        objects.extend(manifest.cluster.iter().map(|it| of("LearnerCluster", serde_json::to_value(&it.spec).unwrap())));
        objects.extend(manifest.runs.iter().map(|it| of("LearnerRun", serde_json::to_value(&it.spec).unwrap())));
    }
    let store = |ordinal: u32| {
        let id = member(ordinal).store.to_string();
        serde_json::json!({ "ordinal": ordinal, "storeId": id })
    };
    let map = serde_json::json!({
        "formatVersion": 1, "clusterId": ClusterId(7).to_string(), "law": "Linear", "partitionCount": 2, "version": 3,
        "stores": { "0": store(0), "1": store(1) },
        "partitions": {
            "0": { "term": 2, "primary": 0, "isr": ["0/1", "1/1"], "activated": true },
            "1": { "term": 3, "primary": 1, "isr": ["1/4"], "activated": false, "prev": ["0/1", "1/4"], "learners": [2] },
        },
    });
    objects.push(of("PartitionMap", map));
    let mut seeds: Vec<Vec<u8>> = objects.iter().map(|object| object.to_string().into_bytes()).collect();
    seeds.dedup();
    seeds
}

fn maps() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
    store.compare_and_swap(None, map()).unwrap();
    let goal = Goal { workers: Some(Scale { to: 4, from: 3 }), draining: [Ordinal(1)].into_iter().collect() };
    store.set_goal(&goal).unwrap();
    ["map.json", "goal.json"].map(|name| fs::read(folder.path().join(name)).unwrap()).into()
}

fn manifests() -> Vec<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut paths: Vec<PathBuf> = fs::read_dir(root.join("examples")).unwrap().map(|it| it.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    paths.sort();
    paths.push(root.join("crates/api/tests/golden/many-errors.yaml"));
    paths.push(root.join("operator/tests/golden/configuration.yaml"));
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

fn events() -> Vec<Vec<u8>> {
    let lines = "{\"memory\":\"a\",\"when\":1,\"signal\":0.5}\n\n{\"when\":2,\"memory\":\"b\\u0041\",\"signal\":1,\"x\":[{}]}\n";
    let days = "{\"memory\":7,\"when\":\"2026-01-31T23:59:59.5+01:00\",\"signal\":-1e-3}\n{\"memory\":8,\"when\":1769990400000,\"signal\":0}\n";
    let table = "when,memory,signal\n1,a,0.5\n1,\"b\"\"c\",1\n3,a,0\n";
    let times = "memory,when,signal\n18446744073709551615,2026-01-31T00:00:00Z,-0.5\n0,2026-02-03T12:00:00Z,1\n";
    // Bits: packing (0, 1), CSV (2), ids (3), times (4), strength (5, 6).
    let mut seeds = vec![
        with_kind(0b100_0000, lines.as_bytes()),
        with_kind(0b111_1000, days.as_bytes()),
        with_kind(0b100_0100, table.as_bytes()),
        with_kind(0b111_1100, times.as_bytes()),
        with_kind(0b000_0100, table.as_bytes()),
        with_kind(0b010_0000, lines.as_bytes()),
    ];
    for (packing, program) in [(1, "gzip"), (2, "zstd")] {
        seeds.push(with_kind(0b100_0100 | packing, &packed(program, table.as_bytes())));
    }
    seeds
}

/// Settings as operators write them: minimal, nearly complete, and with unknown fields of later versions.
fn settings() -> Vec<Vec<u8>> {
    let least = serde_json::json!({
        "clusterId": ClusterId(7).to_string(), "coordinators": ["localhost:7440"], "replicationFactor": 1, "partitions": 2,
    });
    let with = |more: serde_json::Value| {
        let mut settings = least.clone();
        settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        settings
    };
    let operators = with(serde_json::json!({
        "workers": 3, "replicationFactor": 2, "partitions": 256,
        "capacity": { "memories": 1_000_000, "policy": "Refuse" },
        "learning": { "decay": 0.01, "initialWeight": 0.5, "law": "Linear", "rate": 0.05 },
        "features": { "dimension": 64, "dtype": "F32" },
        "durability": { "mode": "Sync" }, "soloPolicy": "SoloDurable", "restartGrace": "3s",
        "maintenance": { "scrubInterval": "2h", "copyRate": "16Mi/s" },
        "gpu": { "mode": "Auto", "threshold": null }, "fieldOfALaterOperator": [{}],
    }));
    let secured = with(serde_json::json!({
        "tls": { "mode": "Auto", "certificateLifetime": "1h" }, "threads": 2,
        "listen": { "client": "127.0.0.1:1", "peer": "[::1]:2", "admin": "0.0.0.0:0", "http": "127.0.0.1:9090" },
    }));
    let snapshot = serde_json::json!({
        "url": "s3://backups/words/monday", "region": "eu-west-1", "endpoint": "http://minio.storage:9000",
        "secretRef": { "name": "storage" },
    });
    let loaded = with(serde_json::json!({
        "workers": 2, "bootstrapWorkers": 2, "bootstrap": { "snapshot": snapshot },
        "durability": { "mode": "Replicated" }, "soloPolicy": "MinIsr", "gpu": { "mode": "Disabled", "partitioner": "Balanced" },
    }));
    [least.clone(), operators, secured, loaded].iter().map(|settings| settings.to_string().into_bytes()).collect()
}

/// Tokens and parts of them, key sets and access lists.
fn tokens() -> Vec<Vec<u8>> {
    let part = |number: usize| engram_testing::tokens::decode(tokens::TOKEN.split('.').nth(number).unwrap()).unwrap();
    let loose = serde_json::json!({
        "iss": tokens::ISSUER, "aud": tokens::AUDIENCE, "sub": "system:serviceaccount:ml:trainer", "exp": tokens::NOW as f64 + 0.5,
    });
    // The public example of RFC 7517, A.1.
    let rsa = serde_json::json!({
        "kty": "RSA", "alg": "RS256", "kid": "2011-04-29", "e": "AQAB", "use": "sig",
        "n": "0vx7agoebGcQSuuPiLJXZptN9nndrQmbXEps2aiAFbWhM78LhWx4cbbfAAtVT86zwu1RK7aPFFxuhDR1L6tSoc_BJECPebWKRXjBZCiFV4n3oknjhMstn64tZ_2W-5JsGY4Hc5n9yBXArwl93lqt7_RN5w6Cf0h4QyQ5v-65YGjQR0_FDW2QvzqY368QQMicAtaSqzs8KJZgnYb9c7d0zgdAZHzu6qMQvRL5hajrn1n91CbOpbISD08qNLyrdkt-bFTWhAI4vMQFh6WeZu0fM4lFd2NcRwr3XPksINHaQ-G_xBniIqbw0Ls1jF44-csFCur-kEgU8awapJzKnqDKgw",
    });
    let both = serde_json::json!({ "keys": [rsa, { "kty": "oct", "k": "AA" }, { "kty": "EC", "crv": "P-256", "x": "AA", "y": "AA" }] });
    let rights = serde_json::json!([
        { "serviceAccount": "trainer", "namespace": "ml", "rights": ["Read", "Reinforce", "Decay"] },
        { "serviceAccount": "keeper", "namespace": "ml", "rights": ["Admin"] },
    ]);
    vec![
        with_kind(0, tokens::TOKEN.as_bytes()),
        with_kind(1, &part(1)),
        with_kind(1, loose.to_string().as_bytes()),
        with_kind(2, &part(0)),
        with_kind(2, br#"{"alg":"none"}"#),
        with_kind(3, tokens::KEYS.as_bytes()),
        with_kind(3, both.to_string().as_bytes()),
        with_kind(4, rights.to_string().as_bytes()),
    ]
}

/// Compresses with the libraries that decompress it.
fn packed(how: &str, bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    if how == "zstd" {
        return zstd::encode_all(bytes, 3).unwrap();
    }
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}
