//! Conversion of wire columns to log columns. Every value is checked here, once, before anything is written.
//!
//! Floats become integers. A NaN, infinite or out-of-range value rejects the whole part; the error names field, index and value. A column
//! has one entry per id, or none.

use crate::v1;
use engram_memory::edge::{self, OutOfRange, ShortNumber};
use engram_memory::{
    Blobs, FeatureShape, FeatureType, Group, MAX_IDS, MAX_KEY_BYTES, MAX_PAYLOAD_BYTES, MemoryId, OnMissing,
    PartitionId, Updates, Upsert, law, partition_of,
};
use half::f16;
use std::fmt;

/// Error for a value out of its allowed range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}{index}: {value} is not allowed; allowed: {allowed}", index = ColumnIndex(*index))]
pub struct Invalid {
    /// Name of the message field.
    pub field: &'static str,
    /// Index in the column; `None` for a field as a whole.
    pub index: Option<usize>,
    /// The rejected value, as text.
    pub value: String,
    /// The allowed values, as text.
    pub allowed: &'static str,
}

/// Displays as `[index]`, or as nothing for a whole field.
struct ColumnIndex(Option<usize>);

impl fmt::Display for ColumnIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |index| write!(f, "[{index}]"))
    }
}

impl Invalid {
    /// Creates the error for a field as a whole.
    pub fn field(field: &'static str, value: impl Into<String>, allowed: &'static str) -> Self {
        Self { field, index: None, value: value.into(), allowed }
    }

    fn entry(field: &'static str, index: usize, value: impl Into<String>, allowed: &'static str) -> Self {
        Self { field, index: Some(index), value: value.into(), allowed }
    }

    fn float(field: &'static str, index: Option<usize>, refused: OutOfRange) -> Self {
        Self { field, index, value: ShortNumber(refused.value).to_string(), allowed: refused.allowed }
    }
}

/// Checks that every id belongs to `partition`.
///
/// # Errors
/// Names the first id of another partition.
pub fn check_partition(ids: &[u64], partition: PartitionId, partitions: u32) -> Result<(), Invalid> {
    match ids.iter().position(|&id| partition_of(MemoryId(id), partitions) != partition) {
        None => Ok(()),
        Some(index) => Err(Invalid::entry(
            "ids",
            index,
            format!(
                "{} (of partition {}, not {partition})",
                ids[index],
                partition_of(MemoryId(ids[index]), partitions)
            ),
            "ids of this partition: mix64(id) mod P",
        )),
    }
}

/// Converts the decay of a request or an epoch to weight units.
///
/// # Errors
/// The amount is not in [0, 1].
pub fn decay(field: &'static str, amount: f64) -> Result<u32, Invalid> {
    edge::setting(amount).map_err(|refused| Invalid::float(field, None, refused))
}

/// Converts the updates of one record. Qualities become deltas at learning rate `rate`, in weight units.
///
/// # Errors
/// Names the first value out of range.
pub fn updates(from: v1::Updates, rate: u32) -> Result<Updates, Invalid> {
    check_rows(from.ids.len())?;
    if from.groups.is_empty() {
        if from.ids.is_empty() {
            return no_updates(&from);
        }
        return updates_by_id(from, rate);
    }
    if !from.ids.is_empty() {
        return Err(Invalid::field("groups", "ids and groups together", "updates by id or by group, not both"));
    }
    if from.groups.len() > MAX_IDS {
        return Err(Invalid::field("groups", from.groups.len().to_string(), "at most 65,536 entries"));
    }
    let groups = from.groups.iter().enumerate().map(|(index, update)| {
        let group = u8::try_from(update.group)
            .map_err(|_| Invalid::entry("groups.group", index, update.group.to_string(), "0 to 255"))?;
        let delta = match update.signal {
            Some(v1::group_update::Signal::Quality(quality)) => {
                law::delta(rate, float("groups.quality", Some(index), edge::quality(quality))?)
            }
            Some(v1::group_update::Signal::Delta(delta)) => float("groups.delta", Some(index), edge::delta(delta))?,
            None => return Err(Invalid::entry("groups", index, "no signal", "a quality or a delta")),
        };
        Ok((Group(group), delta))
    });
    groups.collect::<Result<_, _>>().map(Updates::ByGroup)
}

/// Checks that an update without ids and groups has no columns.
fn no_updates(from: &v1::Updates) -> Result<Updates, Invalid> {
    check_column("qualities", from.qualities.len(), 0)?;
    check_column("deltas", from.deltas.len(), 0)?;
    if let Some(keys) = &from.keys {
        check_column("keys", keys.ends.len(), 0)?;
    }
    Ok(Updates::NONE)
}

fn updates_by_id(from: v1::Updates, rate: u32) -> Result<Updates, Invalid> {
    let rows = from.ids.len();
    let on_missing = match v1::OnMissing::try_from(from.on_missing) {
        Ok(v1::OnMissing::Unspecified | v1::OnMissing::Report) => OnMissing::Report,
        Ok(v1::OnMissing::Create) => OnMissing::Create,
        Err(_) => return Err(Invalid::field("on_missing", from.on_missing.to_string(), "REPORT or CREATE")),
    };
    let deltas = match (from.quality, from.qualities.is_empty(), from.deltas.is_empty()) {
        (Some(quality), true, true) => vec![law::delta(rate, float("quality", None, edge::quality(quality))?); rows],
        (None, false, true) => {
            check_column("qualities", from.qualities.len(), rows)?;
            column("qualities", &from.qualities, |value| edge::quality(value).map(|quality| law::delta(rate, quality)))?
        }
        (None, true, false) => {
            check_column("deltas", from.deltas.len(), rows)?;
            column("deltas", &from.deltas, edge::delta)?
        }
        (None, true, true) => return Err(Invalid::field("updates", "no signal", "quality, qualities or deltas")),
        _ => return Err(Invalid::field("updates", "several signals", "one of quality, qualities, deltas")),
    };
    let keys = keys(from.keys, rows)?;
    Ok(Updates::ById { ids: ids(from.ids), deltas, on_missing, keys })
}

/// Converts rows to insert or change. `shape` is the cluster's; features are rounded to nearest even for f16.
///
/// # Errors
/// Names the first value out of range.
pub fn upsert(from: v1::UpsertPart, shape: FeatureShape) -> Result<Upsert, Invalid> {
    let rows = from.ids.len();
    check_rows(rows)?;
    check_column("weights", from.weights.len(), rows)?;
    check_column("groups", from.groups.len(), rows)?;
    let weights = column("weights", &from.weights, |value| {
        if value.is_nan() { Ok(Upsert::KEEP) } else { edge::weight(value).map(|weight| weight.units()) }
    })?;
    Ok(Upsert {
        features: features(&from.features, rows, shape)?,
        ids: ids(from.ids),
        weights,
        groups: from.groups.iter().copied().map(Group).collect(),
        keys: keys(from.keys, rows)?,
        payloads: blobs("payloads", from.payloads, rows, MAX_PAYLOAD_BYTES, "at most 65,536 bytes")?,
    })
}

/// Converts a recall query to f16 bits, the format of stored features.
///
/// # Errors
/// The cluster has no features of f16, the query has another dimension, or a number is not finite in f16.
pub fn query(from: &[f32], shape: FeatureShape) -> Result<Vec<u16>, Invalid> {
    let given = || format!("{} values", from.len());
    if shape.dimension == 0 {
        return Err(Invalid::field("query", given(), "none: the cluster has no features"));
    }
    if shape.dtype != FeatureType::F16 {
        return Err(Invalid::field("query", given(), "none: recall needs features of f16, and the cluster keeps f32"));
    }
    if from.len() != shape.dimension as usize {
        return Err(Invalid::field("query", given(), "as many values as the cluster's dimension"));
    }
    let rounded = |(index, value): (usize, &f32)| {
        let short = f16::from_f32(*value);
        let refused = || Invalid::entry("query", index, shown(*value), "a finite number of at most 65,504");
        short.is_finite().then(|| short.to_bits()).ok_or_else(refused)
    };
    from.iter().enumerate().map(rounded).collect()
}

/// Checks that columns have one entry per row, or none, as [`crate::split`] requires.
///
/// # Errors
/// Names the first column of another length.
pub fn check_lengths(part: &v1::UpsertPart) -> Result<(), Invalid> {
    let rows = part.ids.len();
    check_column("weights", part.weights.len(), rows)?;
    check_column("groups", part.groups.len(), rows)?;
    for (field, column) in [("keys", &part.keys), ("payloads", &part.payloads)] {
        check_column(field, column.as_ref().map_or(0, |column| column.ends.len()), rows)?;
    }
    if rows == 0 && !part.features.is_empty() || rows > 0 && !part.features.len().is_multiple_of(rows) {
        let given = format!("{} values for {rows} ids", part.features.len());
        return Err(Invalid::field("features", given, "as many values per id as the cluster's dimension"));
    }
    Ok(())
}

/// Checks the values of a batch of updates before it is split, so that an error names the caller's index.
///
/// # Errors
/// Names the first value out of range.
pub fn check_updates(from: &v1::Updates) -> Result<(), Invalid> {
    let rows = from.ids.len();
    check_column("qualities", from.qualities.len(), rows)?;
    check_column("deltas", from.deltas.len(), rows)?;
    let signals = [from.quality.is_some(), !from.qualities.is_empty(), !from.deltas.is_empty()]
        .into_iter()
        .filter(|&it| it)
        .count();
    if rows > 0 && from.groups.is_empty() && signals != 1 {
        let given = if signals == 0 { "no signal" } else { "several signals" };
        return Err(Invalid::field("updates", given, "one of quality, qualities, deltas"));
    }
    if let Some(quality) = from.quality {
        float("quality", None, edge::quality(quality))?;
    }
    let first =
        |values: &[f32], allowed: std::ops::RangeInclusive<f32>| values.iter().position(|it| !allowed.contains(it));
    if let Some(index) = first(&from.qualities, 0.0..=1.0) {
        float("qualities", Some(index), edge::quality(from.qualities[index]))?;
    }
    if let Some(index) = first(&from.deltas, -1.0..=1.0) {
        float("deltas", Some(index), edge::delta(from.deltas[index]))?;
    }
    let Some(keys) = &from.keys else { return Ok(()) };
    check_column("keys", keys.ends.len(), rows)?;
    let long = (0..rows).find(|&row| keys.entry(row).len() > MAX_KEY_BYTES);
    long.map_or(Ok(()), |row| {
        Err(Invalid::entry("keys", row, format!("{} bytes", keys.entry(row).len()), "at most 1,024 bytes"))
    })
}

/// Converts wire ids to log ids in place.
pub fn ids(from: Vec<u64>) -> Vec<MemoryId> {
    from.into_iter().map(MemoryId).collect()
}

/// Checks the number of ids of one part or read.
///
/// # Errors
/// The number exceeds the limit of a message.
pub fn check_rows(rows: usize) -> Result<(), Invalid> {
    if rows <= MAX_IDS { Ok(()) } else { Err(Invalid::field("ids", format!("{rows} ids"), "at most 65,536")) }
}

fn features(from: &[f32], rows: usize, shape: FeatureShape) -> Result<Vec<u8>, Invalid> {
    if from.is_empty() {
        return Ok(Vec::new());
    }
    if shape.dimension == 0 {
        return Err(Invalid::field("features", format!("{} values", from.len()), "none: the cluster has no features"));
    }
    if Some(from.len()) != rows.checked_mul(shape.dimension as usize) {
        return Err(Invalid::field(
            "features",
            format!("{} values for {rows} ids at dimension {}", from.len(), shape.dimension),
            "as many values per id as the cluster's dimension",
        ));
    }
    let refused = |index: usize, allowed| Invalid::entry("features", index, shown(from[index]), allowed);
    let mut bits = Vec::with_capacity(rows * shape.bytes());
    for (index, value) in from.iter().enumerate() {
        match shape.dtype {
            FeatureType::F32 if value.is_finite() => bits.extend_from_slice(&value.to_le_bytes()),
            FeatureType::F32 => return Err(refused(index, "a finite number")),
            FeatureType::F16 => {
                let short = f16::from_f32(*value);
                if !short.is_finite() {
                    return Err(refused(index, "a finite number of at most 65,504"));
                }
                bits.extend_from_slice(&short.to_le_bytes());
            }
        }
    }
    Ok(bits)
}

fn shown(value: f32) -> String {
    ShortNumber(f64::from(value)).to_string()
}

fn keys(from: Option<v1::Blobs>, rows: usize) -> Result<Option<Blobs>, Invalid> {
    let keys = blobs("keys", from, rows, MAX_KEY_BYTES, "at most 1,024 bytes")?;
    let not_text = keys.as_ref().and_then(|keys| keys.iter().position(|key| std::str::from_utf8(key).is_err()));
    match not_text {
        None => Ok(keys),
        Some(index) => Err(Invalid::entry("keys", index, "not UTF-8", "UTF-8 of 1 to 1,024 bytes, or empty")),
    }
}

fn blobs(
    field: &'static str,
    from: Option<v1::Blobs>,
    rows: usize,
    longest: usize,
    allowed: &'static str,
) -> Result<Option<Blobs>, Invalid> {
    let Some(v1::Blobs { ends, data }) = from else { return Ok(None) };
    if ends.is_empty() && data.is_empty() {
        return Ok(None);
    }
    check_column(field, ends.len(), rows)?;
    let blobs = Blobs::from_parts(ends, data.into())
        .ok_or_else(|| Invalid::field(field, "ends that do not ascend to the length of the data", "ascending ends"))?;
    let too_long = blobs.iter().position(|blob| blob.len() > longest);
    match too_long {
        None => Ok(Some(blobs)),
        Some(index) => Err(Invalid::entry(field, index, format!("{} bytes", blobs.get(index).len()), allowed)),
    }
}

fn check_column(field: &'static str, len: usize, rows: usize) -> Result<(), Invalid> {
    if len == 0 || len == rows {
        Ok(())
    } else {
        Err(Invalid::field(field, format!("{len} entries for {rows} ids"), "one entry per id, or none"))
    }
}

fn column<T>(
    field: &'static str,
    from: &[f32],
    convert: impl Fn(f32) -> Result<T, OutOfRange>,
) -> Result<Vec<T>, Invalid> {
    let mut to = Vec::with_capacity(from.len());
    for (index, &value) in from.iter().enumerate() {
        to.push(float(field, Some(index), convert(value))?);
    }
    Ok(to)
}

fn float<T>(field: &'static str, index: Option<usize>, converted: Result<T, OutOfRange>) -> Result<T, Invalid> {
    converted.map_err(|refused| Invalid::float(field, index, refused))
}

impl From<&Blobs> for v1::Blobs {
    fn from(blobs: &Blobs) -> Self {
        Self { ends: blobs.ends().to_vec(), data: blobs.bytes().to_vec().into() }
    }
}

impl v1::Blobs {
    /// Creates a column of `entries`; `None` if all of them are empty.
    pub fn column<T: AsRef<[u8]>>(entries: impl IntoIterator<Item = T>) -> Option<Self> {
        let blobs = entries.into_iter().collect::<Blobs>();
        (!blobs.bytes().is_empty()).then(|| Self::from(&blobs))
    }

    /// Returns entry `index`; empty if it does not exist or the column is inconsistent.
    pub fn entry(&self, index: usize) -> &[u8] {
        let start = if index == 0 { Some(&0) } else { self.ends.get(index - 1) };
        match (start, self.ends.get(index)) {
            (Some(&start), Some(&end)) => self.data.get(start as usize..end as usize).unwrap_or_default(),
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::{ONE, Settings, key_id};

    fn by_id(ids: Vec<u64>) -> v1::Updates {
        v1::Updates { ids, ..Default::default() }
    }

    #[test]
    fn out_of_range_value_is_named_by_field_index_and_value() {
        let rate = Settings::DEFAULT_RATE;
        let qualities = |values: Vec<f32>| v1::Updates { qualities: values, ..by_id(vec![1, 2, 3]) };
        let deltas = |values: Vec<f32>| v1::Updates { deltas: values, ..by_id(vec![1, 2, 3]) };
        let text = |updates_: v1::Updates| updates(updates_, rate).expect_err("refused").to_string();
        assert_eq!(
            text(qualities(vec![0.5, f32::NAN, 1.0])),
            "qualities[1]: NaN is not allowed; allowed: a number from 0 to 1"
        );
        assert_eq!(
            text(deltas(vec![0.5, 0.0, -1.5])),
            "deltas[2]: -1.5 is not allowed; allowed: a number from -1 to 1"
        );
        assert!(text(qualities(vec![f32::INFINITY, 0.0, 0.0])).starts_with("qualities[0]: inf "));
        assert!(text(qualities(vec![0.5])).contains("1 entries for 3 ids"));
        assert!(text(by_id(vec![1])).contains("no signal"));
        assert!(text(v1::Updates { quality: Some(0.5), ..deltas(vec![0.0; 3]) }).contains("several signals"));
        assert!(text(v1::Updates { quality: Some(f32::NEG_INFINITY), ..by_id(vec![1]) }).starts_with("quality: -inf"));
        assert!(text(by_id(vec![0; MAX_IDS + 1])).contains("65537 ids"));
        assert_eq!(decay("amount", 1.5).expect_err("refused").field, "amount");
        let torn = v1::Blobs { ends: vec![3, 1, 2], data: b"ab".to_vec().into() };
        assert!(text(v1::Updates { keys: Some(torn), ..qualities(vec![0.5; 3]) }).contains("ascending"));
    }

    #[test]
    fn quality_becomes_the_delta_of_the_law() {
        let from = v1::Updates { qualities: vec![0.9, 0.2], ..by_id(vec![7, 8]) };
        let expected: Vec<i32> =
            [0.9_f32, 0.2].iter().map(|&q| law::delta(53_687_091, edge::quality(q).expect("in range"))).collect();
        match updates(from, 53_687_091).expect("valid") {
            Updates::ById { deltas, on_missing: OnMissing::Report, keys: None, .. } => assert_eq!(deltas, expected),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn features_of_wrong_dimension_or_not_finite_are_rejected() {
        let shape = FeatureShape { dimension: 2, dtype: FeatureType::F16 };
        let part = |features: Vec<f32>| v1::UpsertPart { ids: vec![1, 2], features, ..Default::default() };
        assert_eq!(upsert(part(vec![1.0; 4]), shape).expect("valid").features.len(), 8);
        assert!(upsert(part(vec![1.0; 3]), shape).expect_err("refused").to_string().contains("dimension 2"));
        assert!(upsert(part(vec![1.0, 2.0, 70_000.0, 0.0]), shape).expect_err("refused").to_string().contains("[2]"));
        assert!(upsert(part(vec![1.0; 4]), FeatureShape::NONE).is_err());
    }

    #[test]
    fn accepted_upsert_passes_the_check_of_the_log() {
        let part = v1::UpsertPart {
            ids: vec![key_id(b"a").0, 2],
            weights: vec![1.0, f32::NAN],
            groups: vec![3, 0].into(),
            keys: v1::Blobs::column(["a", ""]),
            ..Default::default()
        };
        let upsert = upsert(part, FeatureShape::NONE).expect("valid");
        assert_eq!(upsert.weights, [ONE, Upsert::KEEP]);
        engram_memory::Command::Upsert(upsert).check().expect("the edge is at least as strict as the log");
    }

    #[test]
    fn id_of_another_partition_is_named() {
        let id = 42;
        let home = partition_of(MemoryId(id), 256);
        assert_eq!(check_partition(&[id], home, 256), Ok(()));
        let refused = check_partition(&[id, 43], home, 256).expect_err("43 lives elsewhere");
        assert_eq!(refused.index, Some(1));
    }
}
