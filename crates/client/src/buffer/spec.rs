//! Settings and figures of a buffer.

use super::read::SampleBy;
use crate::error::Error;
use engram_memory::buffer::{Limits, MAX_NAME_BYTES, Remover};
use engram_memory::edge::ShortNumber;
use engram_memory::{MAX_ITEM_PAYLOAD_BYTES, ONE};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_replay::limiter::{RateLimiter, Settings};
use engram_replay::schema::{DType, Field, Schema};

/// Priority of weight 1 by default.
pub(super) const DEFAULT_MAX_PRIORITY: f64 = 1_024.0;
/// Priority of items appended without one by default.
pub(super) const DEFAULT_INITIAL_PRIORITY: f64 = 1.0;

/// Settings of a buffer.
#[derive(Debug, Clone, PartialEq)]
pub struct BufferSpec {
    /// Name: letters, digits, `_`, `.` and `-`, 1 to 128 bytes.
    pub name: String,
    /// Fields of an item.
    pub fields: Vec<Field>,
    /// Most items, at least 1.
    pub capacity: u64,
    /// What happens above the capacity.
    pub remover: Remover,
    /// Batches that may contain an item before it is removed; 0 = unlimited.
    pub max_reuse: u32,
    /// Policy versions that a sampled item may be behind the learner.
    pub max_age: Option<u64>,
    /// Priority of weight 1: larger priorities count as this one. Priorities are stored in steps of 2^-30 of it.
    pub max_priority: f64,
    /// Priority of items appended without one.
    pub initial_priority: f64,
    /// Keeps samples and appends in a ratio.
    pub limiter: Option<Settings>,
    /// Sampler of requests that name none.
    pub sampler: Option<SampleBy>,
}

impl BufferSpec {
    /// Returns the defaults for these fields.
    pub fn new(name: impl Into<String>, fields: Vec<Field>, capacity: u64) -> Self {
        Self {
            name: name.into(),
            fields,
            capacity,
            remover: Remover::default(),
            max_reuse: 0,
            max_age: None,
            max_priority: DEFAULT_MAX_PRIORITY,
            initial_priority: DEFAULT_INITIAL_PRIORITY,
            limiter: None,
            sampler: None,
        }
    }

    /// Checks all settings.
    ///
    /// # Errors
    /// Names the setting, its value and what is allowed.
    pub fn check(&self) -> Result<Schema, Error> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if !(1..=MAX_NAME_BYTES).contains(&self.name.len()) || !self.name.bytes().all(allowed) {
            let what = "letters, digits, '_', '.' and '-', 1 to 128 bytes";
            return Err(refused("name", format!("{:?}", self.name), what));
        }
        if self.capacity == 0 {
            return Err(refused("capacity", 0, "at least 1"));
        }
        if !(self.max_priority.is_finite() && self.max_priority > 0.0) {
            return Err(refused("max_priority", ShortNumber(self.max_priority), "a positive finite number"));
        }
        if !(self.initial_priority > 0.0 && self.initial_priority <= self.max_priority) {
            return Err(refused("initial_priority", ShortNumber(self.initial_priority), "above 0, up to max_priority"));
        }
        self.sampler.map_or(Ok(()), SampleBy::check)?;
        if let Some(limiter) = self.limiter {
            RateLimiter::new(limiter).map_err(|error| invalid(format!("limiter.{error}")))?;
            if limiter.min_size > self.capacity {
                return Err(refused("limiter.min_size", limiter.min_size, "at most the capacity"));
            }
        }
        let schema = Schema::new(self.fields.clone()).map_err(|error| invalid(error.to_string()))?;
        let fixed =
            self.fields.iter().map(|field| if field.jagged { 4 } else { field.row_bytes().unwrap_or(usize::MAX) });
        let bytes = fixed.fold(0_usize, usize::saturating_add);
        if bytes > MAX_ITEM_PAYLOAD_BYTES - engram_replay::item::MAX_TAG_BYTES - 17 {
            return Err(refused("fields", format!("{bytes} bytes per item"), "at most 4,194,032 bytes"));
        }
        Ok(schema)
    }

    /// Returns the limits that partitions enforce, as of all partitions together.
    pub const fn limits(&self) -> Limits {
        Limits { capacity: self.capacity, share: 0, remover: self.remover, max_reuse: self.max_reuse }
    }

    /// Converts a priority to weight units.
    ///
    /// # Errors
    /// It is negative, infinite or not a number: `None`.
    pub fn weight_units(&self, priority: f64) -> Option<u32> {
        if !(priority.is_finite() && priority >= 0.0) {
            return None;
        }
        let units = (priority / self.max_priority * f64::from(ONE)).round().min(f64::from(ONE)) as u32;
        // A positive priority stays positive.
        Some(if priority > 0.0 { units.max(1) } else { 0 })
    }

    /// Converts weight units to the priority.
    pub fn priority(&self, units: u32) -> f64 {
        f64::from(units) / f64::from(ONE) * self.max_priority
    }

    /// Encodes the settings.
    pub fn to_wire(&self) -> v1::BufferSpec {
        let field = |field: &Field| v1::BufferField {
            name: field.name.clone(),
            dtype: field.dtype.name().into(),
            shape: field.shape.clone(),
            jagged: field.jagged,
        };
        v1::BufferSpec {
            name: self.name.clone(),
            fields: self.fields.iter().map(field).collect(),
            capacity: self.capacity,
            remover: i32::from(self.remover.number()),
            max_reuse: self.max_reuse,
            max_age: self.max_age,
            max_priority: self.max_priority,
            initial_priority: self.initial_priority,
            limiter: self.limiter.map(|limiter| v1::RateLimit {
                samples_per_insert: limiter.samples_per_insert,
                min_size: limiter.min_size,
                min_diff: limiter.min_diff,
                max_diff: limiter.max_diff,
            }),
            sampler: self
                .sampler
                .and_then(SampleBy::to_wire)
                .map(|sampler| v1::BufferSampler { sampler: Some(sampler) }),
            partitions: 0,
        }
    }

    /// Decodes settings; they are still to be checked.
    ///
    /// # Errors
    /// A type or a remover is unknown.
    pub fn from_wire(from: v1::BufferSpec) -> Result<Self, Error> {
        let remover = match from.remover {
            0 => Some(Remover::default()),
            code => u8::try_from(code).ok().and_then(Remover::from_number),
        };
        let remover = remover.ok_or_else(|| refused("remover", from.remover, "0 to 5"))?;
        let field = |field: v1::BufferField| {
            let dtype = DType::from_name(&field.dtype).ok_or_else(|| {
                let names: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
                invalid(format!(
                    "field {}: dtype {:?} is not allowed; allowed: {}",
                    field.name,
                    field.dtype,
                    names.join(", ")
                ))
            })?;
            Ok(Field { name: field.name, dtype, shape: field.shape, jagged: field.jagged })
        };
        let or = |value: f64, default: f64| if value == 0.0 { default } else { value };
        let max_priority = or(from.max_priority, DEFAULT_MAX_PRIORITY);
        Ok(Self {
            name: from.name,
            fields: from.fields.into_iter().map(field).collect::<Result<_, Error>>()?,
            capacity: from.capacity,
            remover,
            max_reuse: from.max_reuse,
            max_age: from.max_age,
            max_priority,
            initial_priority: or(from.initial_priority, DEFAULT_INITIAL_PRIORITY.min(max_priority)),
            limiter: from.limiter.map(|limiter| Settings {
                samples_per_insert: limiter.samples_per_insert,
                min_size: limiter.min_size,
                min_diff: limiter.min_diff,
                max_diff: limiter.max_diff,
            }),
            sampler: from.sampler.and_then(|sampler| sampler.sampler).map(SampleBy::from_setting),
        })
    }

    /// Compares with other settings of the same name.
    ///
    /// # Errors
    /// Names the first difference.
    pub fn expect(&self, declared: &Self) -> Result<(), Error> {
        let (existing, wanted) = (self.check()?, declared.check()?);
        existing.expect(&wanted).map_err(|error| invalid(error.to_string()))?;
        let differs = |setting: &str, existing: String, declared: String| match existing == declared {
            true => Ok(()),
            false => Err(invalid(format!("{setting}: the buffer has {existing}, the request declares {declared}"))),
        };
        differs("capacity", self.capacity.to_string(), declared.capacity.to_string())?;
        differs("remover", format!("{:?}", self.remover), format!("{:?}", declared.remover))?;
        differs("max_reuse", self.max_reuse.to_string(), declared.max_reuse.to_string())?;
        differs("max_age", format!("{:?}", self.max_age), format!("{:?}", declared.max_age))?;
        differs("max_priority", self.max_priority.to_string(), declared.max_priority.to_string())?;
        differs("initial_priority", self.initial_priority.to_string(), declared.initial_priority.to_string())?;
        differs("limiter", format!("{:?}", self.limiter), format!("{:?}", declared.limiter))?;
        differs("sampler", format!("{:?}", self.sampler), format!("{:?}", declared.sampler))
    }
}

/// Figures of a consumer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConsumerStats {
    /// Its name.
    pub name: String,
    /// Items that are leased to it.
    pub leased: u64,
}

/// Figures of a buffer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BufferStats {
    /// Items.
    pub items: u64,
    /// Sum of their priorities, before the exponent.
    pub priority_sum: f64,
    /// Items appended so far.
    pub appended: u64,
    /// Items drawn so far, with repetition; counted only in buffers with a limiter or `max_reuse`.
    pub sampled: u64,
    /// Items removed so far.
    pub deleted: u64,
    /// Consumers.
    pub consumers: Vec<ConsumerStats>,
    /// Cursor of the limiter, if there is one.
    pub limiter_cursor: Option<f64>,
    /// Why an append would wait now.
    pub append_waits: Option<String>,
    /// Why a sample would wait now.
    pub sample_waits: Option<String>,
}

/// A buffer with its figures.
#[derive(Debug, Clone, PartialEq)]
pub struct BufferDescription {
    /// Settings.
    pub spec: BufferSpec,
    /// Figures.
    pub stats: BufferStats,
    /// Number of partitions that take appends.
    pub partitions: usize,
}

/// A buffer that the manifest declares and that does not exist as declared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclarationProblem {
    /// Its name.
    pub buffer: String,
    /// What differs, or why it does not exist yet.
    pub problem: String,
}

impl BufferDescription {
    pub(crate) fn from_wire(from: v1::DescribeBufferResponse) -> Result<Self, Error> {
        let stats = from.stats.unwrap_or_default();
        let consumer = |it: v1::ConsumerStats| ConsumerStats { name: it.name, leased: it.leased };
        let reason = |text: String| (!text.is_empty()).then_some(text);
        let stats = BufferStats {
            items: stats.items,
            priority_sum: stats.priority_sum,
            appended: stats.appended,
            sampled: stats.sampled,
            deleted: stats.deleted,
            consumers: stats.consumers.into_iter().map(consumer).collect(),
            limiter_cursor: stats.limiter_cursor,
            append_waits: reason(stats.append_waits),
            sample_waits: reason(stats.sample_waits),
        };
        let partitions = from.partitions.len();
        Ok(Self { spec: BufferSpec::from_wire(from.spec.unwrap_or_default())?, stats, partitions })
    }
}

pub(crate) fn invalid(text: impl Into<String>) -> Error {
    Error::rejected(Problem::of(ProblemKind::Invalid, text))
}

pub(crate) fn refused(field: &str, value: impl std::fmt::Display, allowed: &str) -> Error {
    invalid(format!("{field}: {value} is not allowed; allowed: {allowed}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> BufferSpec {
        let field = Field { name: "x".into(), dtype: DType::Float32, shape: vec![2], jagged: false };
        BufferSpec::new("train", vec![field], 100)
    }

    #[test]
    fn settings_survive_the_wire_and_a_change_is_named() {
        let limiter = Some(Settings::around(4.0, 10, 20.0).unwrap());
        let sampler = Some(SampleBy::Prioritized { alpha: 0.6, beta: 0.4 });
        let spec = BufferSpec { limiter, sampler, max_age: Some(0), remover: Remover::Refuse, ..spec() };
        assert_eq!(BufferSpec::from_wire(spec.to_wire()).unwrap(), spec);
        let other = BufferSpec { capacity: 7, limiter: None, ..spec.clone() };
        let text = spec.expect(&other).unwrap_err().to_string();
        assert_eq!(text, "capacity: the buffer has 100, the request declares 7");
        assert!(spec.expect(&spec).is_ok());
    }

    #[test]
    fn limiter_that_can_deadlock_is_refused() {
        let limiter = Settings { samples_per_insert: 4.0, min_size: 10, min_diff: 39.0, max_diff: 41.0 };
        let text = BufferSpec { limiter: Some(limiter), ..spec() }.check().unwrap_err().to_string();
        assert!(text.contains("inserts and samples block each other"), "{text}");
    }

    #[test]
    fn priorities_become_weights_and_return() {
        let spec = spec();
        assert_eq!((spec.weight_units(0.0), spec.weight_units(1e-300)), (Some(0), Some(1)));
        assert_eq!((spec.weight_units(1e9), spec.weight_units(1_024.0)), (Some(ONE), Some(ONE)));
        assert!([f64::NAN, f64::INFINITY, -1.0].into_iter().all(|it| spec.weight_units(it).is_none()));
        assert!((spec.priority(spec.weight_units(3.7).unwrap()) - 3.7).abs() < 1e-6);
    }
}
