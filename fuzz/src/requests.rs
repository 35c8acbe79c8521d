//! Client messages: every request of the memory service, through its validation.

use engram_memory::codec::{decode_record, encode_record};
use engram_memory::{Command, FeatureShape, FeatureType, PartitionId, Record, Settings};
use engram_proto::columns::{self, Invalid};
use engram_proto::{answers, split, v1};
use prost::Message;

const PARTITIONS: u32 = 3;
const SHAPE: FeatureShape = FeatureShape { dimension: 2, dtype: FeatureType::F16 };

/// The first byte selects the message type of the rest.
pub(crate) fn public(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    match kind % 10 {
        0 => each::<v1::UpsertRequest>(bytes, |request| request.parts.into_iter().for_each(upsert)),
        1 => each::<v1::RemoveRequest>(bytes, |request| {
            request.parts.into_iter().for_each(|part| remove(part.partition, part.ids));
        }),
        2 => each::<v1::ApplyReinforcementRequest>(bytes, |request| {
            request.parts.iter().filter_map(|part| part.updates.as_ref()).for_each(reinforce);
        }),
        3 => each::<v1::ApplyDecayRequest>(bytes, |request| {
            accepted(columns::decay("amount", request.amount).map(|amount| Command::Decay { amount }));
        }),
        4 => each::<v1::LearnEpochRequest>(bytes, |request| {
            let _ = answers::run_id(&request.run);
            accepted(columns::decay("decay", request.decay).map(|amount| Command::Decay { amount }));
            request.parts.iter().filter_map(|part| part.updates.as_ref()).for_each(reinforce);
        }),
        5 => each::<v1::BroadcastQualityRequest>(bytes, |request| {
            if let Ok(vector) = answers::quality_from_wire(&request.quality) {
                assert_eq!(answers::quality_from_wire(&answers::quality_to_wire(&vector)), Ok(vector));
            }
        }),
        6 => each::<v1::GetMemoriesRequest>(bytes, |request| remove(None, request.ids)),
        7 => each::<v1::SubmitRunRequest>(bytes, drop),
        // Decoded by a client: a response with its columns, and the problem in a trailer.
        8 => each::<v1::MemoryBatch>(bytes, |batch| {
            for row in 0..batch.ids.len() {
                for column in [&batch.keys, &batch.payloads].into_iter().flatten() {
                    assert!(column.entry(row).len() <= bytes.len());
                }
            }
        }),
        _ => each::<v1::Problem>(bytes, |problem| {
            let status = problem.into_status();
            assert!(v1::Problem::from_status(&status).is_some(), "a problem round-trips through a status");
        }),
    }
}

fn each<M: Message + Default>(bytes: &[u8], check: impl FnOnce(M)) {
    if let Ok(message) = M::decode(bytes) {
        check(message);
    }
}

/// A command that the edge accepts is valid for the log: it round-trips, and can be applied.
fn accepted(command: Result<Command, Invalid>) {
    let command = match command {
        Ok(command) => command,
        Err(invalid) => return assert!(!invalid.to_string().is_empty()),
    };
    command.check().expect("the edge is at least as strict as the log");
    command.check_features(SHAPE).expect("the edge is at least as strict as the log");
    let record = Record::bare(command);
    let mut bytes = Vec::new();
    encode_record(&record, &mut bytes);
    assert_eq!(decode_record(&bytes), Ok(record));
}

fn upsert(part: v1::UpsertPart) {
    if let Some(partition) = part.partition {
        let _ = columns::check_partition(&part.ids, PartitionId(partition), PARTITIONS);
    }
    if columns::check_lengths(&part).is_ok() {
        let rows = part.ids.len();
        let parts = split::upsert(&part, PARTITIONS);
        assert_eq!(parts.iter().map(|(_, part)| part.ids.len()).sum::<usize>(), rows);
        let whole = columns::upsert(part.clone(), SHAPE).is_ok();
        for (partition, part) in parts {
            columns::check_partition(&part.ids, partition, PARTITIONS).expect("a part belongs to its partition");
            let part = columns::upsert(part, SHAPE);
            assert!(!whole || part.is_ok(), "a part of a valid request is valid");
            accepted(part.map(Command::Upsert));
        }
    }
    accepted(columns::upsert(part, SHAPE).map(Command::Upsert));
}

fn remove(partition: Option<u32>, ids: Vec<u64>) {
    if let Some(partition) = partition {
        let _ = columns::check_partition(&ids, PartitionId(partition), PARTITIONS);
    }
    let parts = split::ids(&ids, PARTITIONS);
    assert_eq!(parts.iter().map(|(_, ids)| ids.len()).sum::<usize>(), ids.len());
    accepted(columns::check_rows(ids.len()).map(|()| Command::Remove { ids: columns::ids(ids) }));
}

fn reinforce(updates: &v1::Updates) {
    let command = |updates: v1::Updates| columns::updates(updates, Settings::DEFAULT_RATE).map(Command::Reinforce);
    let whole = command(updates.clone());
    if columns::check_updates(updates).is_ok() && updates.groups.is_empty() {
        let rows = updates.ids.len();
        let parts = split::updates(updates, PARTITIONS);
        assert_eq!(parts.iter().map(|(_, part)| part.ids.len()).sum::<usize>(), rows);
        for (_, part) in parts {
            let part = command(part);
            assert!(whole.is_err() || part.is_ok(), "a part of a valid request is valid");
            accepted(part);
        }
    }
    accepted(whole);
}
