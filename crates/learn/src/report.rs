//! Results of a run: [`RunReport`] as data (JSON, versioned), [`summary`] as text for a terminal, [`page()`] as one self-contained
//! HTML file.
//!
//! The report states plainly where a baseline predicts better than the memory, and never shows a convergence factor without the
//! numbers that show what it hides (separation, inversion ratio, coverage).

mod chart;
mod figures;
mod format;
mod page;
mod ranks;
mod summary;
mod tables;
mod verdict;

pub(crate) use chart::{Frame, Hint, Ink, Line};
pub(crate) use format::escape;
pub(crate) use page::PAGE_STYLE;
pub use page::{ReportError, page};
pub use ranks::{Movers, RankEntry, RankHistory, RankNote};
pub use summary::summary;

use crate::prediction::{HitRate, Hits};
use engram_memory::{Histogram, ONE, QualityVector};
use serde::{Deserialize, Serialize};

/// Everything that is reported of a run. Fields are added, never renamed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunReport {
    /// Version of this structure, [`RunReport::API_VERSION`].
    pub api_version: String,
    /// [`RunReport::KIND`].
    pub kind: String,
    /// Name of the run.
    pub run: String,
    /// Name of the cluster.
    pub cluster: String,
    /// Where the epochs came from.
    pub source: SourceName,
    /// The settings that the figures depend on.
    pub settings: RunSettings,
    /// Workers of the cluster.
    pub workers: u32,
    /// Partitions of the cluster.
    pub partitions: u32,
    /// The epochs, in order.
    pub epochs: Vec<EpochRow>,
    /// Quality after the last epoch, per group, ascending.
    pub quality: Vec<GroupSummary>,
    /// Histogram of weights after the last epoch, per group, ascending.
    pub histogram: Vec<GroupBins>,
    /// The epochs after which ranks were noted, ascending; see [`RankedMemory::earlier`].
    pub earlier: Vec<EpochName>,
    /// The memories of highest rank now.
    pub top: Vec<RankedMemory>,
    /// Memories that gained most since the middle of [`RunReport::earlier`].
    pub risen: Vec<RankedMemory>,
    /// Memories that lost most since they were noted at their heaviest.
    pub fallen: Vec<RankedMemory>,
    /// Hit rates over all scored epochs, by ascending k; empty where nothing was predicted.
    pub prediction: Vec<HitRate>,
    /// Results of the two-population experiment.
    pub experiment: Option<Experiment>,
    /// Seconds from the first epoch to the last, pauses included.
    pub elapsed_s: f64,
    /// Epochs per second.
    pub epochs_per_s: f64,
    /// Reinforced memories per second.
    pub updates_per_s: f64,
    /// Digest of the store after the last epoch, 32 hexadecimal digits.
    pub digest: String,
}

impl RunReport {
    /// The version of the structure.
    pub const API_VERSION: &'static str = "engram.dev/v1alpha1";
    /// The kind of object that it is.
    pub const KIND: &'static str = "RunReport";

    /// All events that were applied.
    pub fn events(&self) -> u64 {
        self.epochs.iter().map(|row| row.events).sum()
    }

    /// Memories after the last epoch.
    pub fn memories(&self) -> u64 {
        self.quality.iter().map(|group| group.count).sum()
    }
}

/// Where the epochs of a run came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceName {
    /// `example`, `events`, `git` or `synthetic`.
    pub kind: String,
    /// Name of the example, path of the file or repository; empty for `synthetic`.
    pub name: String,
}

/// Settings that the figures of a run depend on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunSettings {
    /// Decay per epoch.
    pub decay: f64,
    /// Learning rate.
    pub rate: f64,
    /// Weight of a new memory.
    pub initial_weight: f64,
}

/// An epoch by number and name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EpochName {
    /// Number, from 0.
    pub number: u64,
    /// Name in the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
}

/// One epoch of a run: also what `run -o json` prints for each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EpochRow {
    /// Number and name.
    #[serde(flatten)]
    pub epoch: EpochName,
    /// Reinforcements that were applied (for a group: its memories).
    pub events: u64,
    /// Memories that it created.
    pub created: u64,
    /// Memories after it.
    pub memories: u64,
    /// Mean weight after it; `None` without memories.
    pub mean: Option<f64>,
    /// Separation after it, in the experiment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub separation: Option<f64>,
    /// Hits of the rankings before it, by ascending k; empty where it was not scored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hits: Vec<Hits>,
}

/// Quality of a group.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupSummary {
    /// The group.
    pub group: u8,
    /// Memories, those of weight 0 included.
    pub count: u64,
    /// Mean weight.
    pub mean: f64,
    /// Smallest weight.
    pub min: f64,
    /// Largest weight.
    pub max: f64,
}

impl GroupSummary {
    /// The groups of a quality vector.
    pub fn of(quality: &QualityVector) -> Vec<Self> {
        let weight = |units: u32| f64::from(units) / f64::from(ONE);
        let summary = |(group, quality): &(engram_memory::Group, engram_memory::GroupQuality)| {
            let mean = quality.mean()?;
            let (min, max) = (weight(quality.min), weight(quality.max));
            Some(Self { group: group.0, count: quality.count, mean, min, max })
        };
        quality.groups().iter().filter_map(summary).collect()
    }
}

/// Histogram of a group: equal bins over [0, 1], their number a power of two up to 4,096.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupBins {
    /// The group.
    pub group: u8,
    /// Memories per bin, by ascending weight.
    pub bins: Vec<u64>,
}

impl GroupBins {
    /// The groups of a histogram.
    pub fn of(histogram: &Histogram) -> Vec<Self> {
        histogram.groups().iter().map(|(group, bins)| Self { group: group.0, bins: bins.clone() }).collect()
    }
}

/// A memory and its rank, now and earlier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RankedMemory {
    /// Its id.
    pub id: u64,
    /// Its key, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Its weight now.
    pub weight: f64,
    /// Its rank now, 1 plus the number of heavier memories; `None` if it is not among the requested ones.
    pub rank: Option<u64>,
    /// Its rank after each of [`RunReport::earlier`]; `None` if it was not noted.
    pub earlier: Vec<Option<Standing>>,
}

/// Rank and weight of a memory after an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Standing {
    /// 1 plus the number of heavier memories.
    pub rank: u64,
    /// Its weight.
    pub weight: f64,
}

impl RankedMemory {
    /// Returns its name for users: its key, or else its id.
    pub fn name(&self) -> String {
        self.key.clone().unwrap_or_else(|| self.id.to_string())
    }
}

/// Results of the two-population experiment: the numbers that are only worth something together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Experiment {
    /// Difference of the groups' mean weights.
    pub separation: f64,
    /// Separation over that after the first epoch; `None` where that was 0.
    pub convergence_factor: Option<f64>,
    /// Share of pairs (rewarded, punished) in the right order.
    pub inversion_ratio: f64,
    /// By how much the ratio may be off at most: 0 when it was counted exactly and nothing is tied.
    pub inversion_error: f64,
    /// Coverage per group, where it was counted.
    pub coverage: Vec<Coverage>,
}

/// How much of a group was reached by every epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Coverage {
    /// The group.
    pub group: u8,
    /// Memories that were updated in every epoch.
    pub complete: u64,
    /// Memories of the group.
    pub memories: u64,
}
