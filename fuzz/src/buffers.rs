//! Replay buffers: definitions, stored items, appended columns, and commands applied to a partition.

use engram_client::BufferSpec;
use engram_memory::buffer::{BufferCommand, position_of};
use engram_memory::codec::{decode_ledger, decode_record, encode_ledger, encode_record};
use engram_memory::outcome::Reply;
use engram_memory::reference::Partition;
use engram_memory::{Command, FeatureShape, FeatureType, Group, Law, MemoryId, Record, Settings, Shape, partition_of};
use engram_proto::v1;
use engram_replay::columns::ColumnView;
use engram_replay::item::Head;
use engram_replay::limiter::{Counts, RateLimiter};
use engram_replay::schema::{DType, Field, Schema};
use prost::Message;
use std::collections::BTreeMap;

const PARTITIONS: u32 = 3;
/// Commands of a sequence that are applied: each scans the partition.
const MOST_COMMANDS: usize = 64;
/// Items that a sequence may append.
const MOST_ITEMS: usize = 512;

/// The first byte selects the kind of the rest.
pub(crate) fn messages(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => definition(bytes),
        1 => item(bytes),
        2 => append(bytes),
        _ => commands(bytes),
    }
}

/// A definition that is accepted survives the wire, and its limiter lets one side proceed.
fn definition(bytes: &[u8]) {
    let Ok(spec) =
        v1::BufferSpec::decode(bytes).map_err(drop).and_then(|spec| BufferSpec::from_wire(spec).map_err(drop))
    else {
        return;
    };
    let Ok(schema) = spec.check() else { return };
    let again = BufferSpec::from_wire(spec.to_wire()).expect("accepted settings survive");
    assert_eq!(again, spec);
    assert!(again.expect(&spec).is_ok());
    assert_eq!(schema.fields(), spec.fields);
    if let Some(settings) = spec.limiter {
        let (limiter, _) = RateLimiter::restore(settings, Counts::default()).expect("accepted settings");
        assert!(limiter.insert(1).is_ok() || limiter.sample(1).is_ok(), "a limiter blocks both sides");
    }
    let units = spec.weight_units(spec.initial_priority).expect("an accepted priority");
    assert!(units > 0 && spec.priority(units) <= spec.max_priority);
}

fn schema() -> Schema {
    let field =
        |name: &str, dtype, shape: &[u32], jagged| Field { name: name.into(), dtype, shape: shape.to_vec(), jagged };
    let fields = vec![
        field("obs", DType::Float32, &[2], false),
        field("tokens", DType::UInt16, &[3], true),
        field("done", DType::Bool, &[], false),
    ];
    Schema::new(fields).expect("a valid schema")
}

/// The parts of a stored item lie inside it, and cover it.
fn item(bytes: &[u8]) {
    let Some((head, fields)) = Head::decode(bytes) else { return };
    let mut again = Vec::new();
    head.encode(&mut again);
    assert_eq!([&again[..], fields].concat(), bytes);
    if let Ok(ranges) = schema().ranges(fields) {
        let lengths = ranges.iter().filter(|range| range.rows.is_some()).count() * 4;
        assert_eq!(ranges.iter().map(|range| range.bytes.len()).sum::<usize>() + lengths, fields.len());
    }
}

/// Columns that are accepted become items of which each field is found again.
fn append(bytes: &[u8]) {
    let Ok(append) = v1::AppendItems::decode(bytes) else { return };
    let schema = schema();
    let view = |column| view(column, &schema);
    let Some(views) = append.columns.iter().map(view).collect::<Option<Vec<_>>>() else { return };
    let Ok(columns) = schema.columns(&views, append.count as usize) else { return };
    for row in 0..append.count as usize {
        let mut payload = Vec::new();
        columns.encode(row, &mut payload);
        assert_eq!(payload.len(), columns.bytes(row));
        let ranges = schema.ranges(&payload).expect("an encoded item matches the schema");
        for (index, range) in ranges.iter().enumerate() {
            let (rows, data) = (columns.rows(index, &[row]), columns.elements(index, &[row]));
            assert_eq!((&payload[range.bytes.clone()], range.rows), (&data[..], rows.first().copied()));
        }
    }
}

fn view<'a>(column: &'a v1::FieldColumn, schema: &Schema) -> Option<ColumnView<'a>> {
    let dtype = DType::from_name(&column.dtype)?;
    let jagged = schema.fields().iter().any(|field| field.jagged && field.name == column.field);
    let rows = (jagged || !column.rows.is_empty()).then_some(&column.rows[..]);
    Some(ColumnView { field: &column.field, dtype, shape: &column.shape, rows, data: &column.data })
}

/// Records behind their lengths, applied in order: no buffer exceeds its share, no handle is given twice, and the state survives its encoding.
fn commands(bytes: &[u8]) {
    let shape = Shape {
        partitions: PARTITIONS,
        law: Law::Linear,
        features: FeatureShape { dimension: 0, dtype: FeatureType::F16 },
    };
    let mut partition = Partition::new(shape, Settings::default());
    let mut newest: BTreeMap<Group, u64> = BTreeMap::new();
    let (mut rest, mut items) = (bytes, 0);
    for _ in 0..MOST_COMMANDS {
        let Some((length, tail)) = rest.split_first_chunk::<2>() else { break };
        let (encoded, tail) = tail.split_at(usize::from(u16::from_le_bytes(*length)).min(tail.len()));
        rest = tail;
        let Ok(record) = decode_record(encoded) else { continue };
        let Record { command: Command::Buffer(command), .. } = &record else { continue };
        items += command.appended();
        if command.check().is_err() || items > MOST_ITEMS || !is_of_partition(command) {
            continue;
        }
        let mut again = Vec::new();
        encode_record(&record, &mut again);
        assert_eq!(again, encoded);
        let reply = partition.apply(&record);
        if let (BufferCommand::Append { buffer, weights, .. }, Reply::Applied(outcome)) = (command, &reply)
            && let Some(first) = outcome.first
        {
            let last = position_of(first) + (weights.len() as u64 - 1) * u64::from(PARTITIONS);
            assert!(
                newest.insert(buffer.group, last).is_none_or(|before| before < position_of(first)),
                "a handle is used again"
            );
        }
        check(&partition);
    }
    let mut ledger = Vec::new();
    encode_ledger(partition.ledger(), &mut ledger);
    assert_eq!(decode_ledger(&ledger).as_ref(), Ok(partition.ledger()));
}

/// Whether a command addresses the first partition, as the edge ensures.
fn is_of_partition(command: &BufferCommand) -> bool {
    let position = if let BufferCommand::Append { from, .. } = command { *from } else { 0 };
    // Far from the end of the numbers, as the clock of an append is.
    position % u64::from(PARTITIONS) == 0
        && position < 1 << 56
        && command.ids().iter().all(|id: &MemoryId| partition_of(*id, PARTITIONS).0 == 0)
}

fn check(partition: &Partition) {
    for (_, buffer) in partition.ledger().buffers.iter() {
        let items = buffer.counts.inserted.saturating_sub(buffer.counts.deleted);
        assert!(items <= buffer.limits.share, "{items} items in a share of {}", buffer.limits.share);
    }
}
