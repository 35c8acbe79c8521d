//! Immutable shape of a cluster, and settings that a logged `Configure` can change.

use crate::law::{ONE, Weight};
use crate::outcome::Refusal;

/// Most partitions of a cluster.
pub const MAX_PARTITIONS: u32 = 1_024;

/// Decay law. Immutable, in every file header; an unknown law is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Law {
    /// The same amount is subtracted from every weight.
    Linear,
}

impl Law {
    /// Returns its number in files and on the wire.
    pub const fn code(self) -> u32 {
        match self {
            Self::Linear => 1,
        }
    }

    /// Returns the law of `code`; `None` if unknown.
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self::Linear),
            _ => None,
        }
    }
}

/// Element type of features, which are opaque bits to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FeatureType {
    /// IEEE 754 binary16.
    F16,
    /// IEEE 754 binary32.
    F32,
}

impl FeatureType {
    /// Returns its number in digests, files and on the wire; 0 means no features.
    pub const fn code(self) -> u32 {
        match self {
            Self::F16 => 1,
            Self::F32 => 2,
        }
    }

    /// Returns the type of `code`; `None` if unknown.
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self::F16),
            2 => Some(Self::F32),
            _ => None,
        }
    }

    /// Returns the bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Shape of the feature vectors of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FeatureShape {
    /// Elements of a vector; 0 = no features.
    pub dimension: u32,
    /// Type of an element, as stored.
    pub dtype: FeatureType,
}

impl FeatureShape {
    /// No features.
    pub const NONE: Self = Self { dimension: 0, dtype: FeatureType::F16 };

    /// Returns the bytes of one vector.
    pub const fn bytes(self) -> usize {
        self.dimension as usize * self.dtype.bytes()
    }
}

/// Immutable properties of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Number of partitions P, 1 to [`MAX_PARTITIONS`].
    pub partitions: u32,
    /// The decay law.
    pub law: Law,
    /// Feature vectors.
    pub features: FeatureShape,
}

/// What happens when a partition exceeds its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CapacityPolicy {
    /// A record that exceeds the limit evicts the lowest memories by rank order, including those it inserted.
    Evict,
    /// Records that would exceed the limit are rejected before the log.
    Refuse,
}

/// Settings of a partition: replicated, changed by a logged `Configure` only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Settings {
    /// Learning rate in units, 1 to [`ONE`].
    pub rate: u32,
    /// Weight of a memory created without one.
    pub initial_weight: Weight,
    /// Most memories of this partition, at least 1.
    pub limit: u64,
    /// What happens above the limit.
    pub policy: CapacityPolicy,
    /// Whether each memory counts the updates that addressed it (for coverage), saturating at 65,535.
    pub count_updates: bool,
}

impl Settings {
    /// Learning rate 0.05 in units, the default.
    pub const DEFAULT_RATE: u32 = 53_687_091;

    /// Returns the limit of one of `partitions` partitions in a cluster for `capacity` memories: five percent above its share, since
    /// hashing does not split evenly.
    ///
    /// # Panics
    /// When `partitions` is 0.
    pub const fn limit_of(capacity: u64, partitions: u32) -> u64 {
        let limit = (capacity as u128 * 105).div_ceil(100 * partitions as u128);
        match limit {
            0 => 1,
            limit if limit > u64::MAX as u128 => u64::MAX,
            limit => limit as u64,
        }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`Refusal::Malformed`] with the field and what is allowed.
    pub fn check(&self) -> Result<(), Refusal> {
        if self.rate == 0 || self.rate > ONE {
            Err(Refusal::Malformed { what: "learning rate: 1 to 2^30 units" })
        } else if self.limit == 0 {
            Err(Refusal::Malformed { what: "limit: at least 1 memory" })
        } else {
            Ok(())
        }
    }

    /// Returns the number of memories to evict from a partition of `count`: none at or below the limit, else the excess but at least
    /// one percent of the limit, so that not every record evicts.
    pub fn excess(&self, count: u64) -> u64 {
        match self.policy {
            CapacityPolicy::Evict if count > self.limit => {
                (count - self.limit).max(self.limit.div_ceil(100)).min(count)
            }
            _ => 0,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            rate: Self::DEFAULT_RATE,
            initial_weight: Weight::HALF,
            limit: u64::from(ONE),
            policy: CapacityPolicy::Evict,
            count_updates: false,
        }
    }
}
