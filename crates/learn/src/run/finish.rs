//! Final results of a run, and the report made from its record.

use super::cluster::{Cluster, ClusterError};
use super::job::Job;
use super::state::{CorruptRecord, Findings, RunState};
use crate::prediction::HitRate;
use crate::report::{Coverage, Experiment, GroupBins, GroupSummary, RankHistory, RunReport, RunSettings, SourceName};
use crate::source::{Population, SourceOptions};
use crate::statistics::{Inversion, Separation};
use engram_memory::quality::MAX_HISTOGRAM_BITS;
use engram_memory::run::Entry;
use engram_memory::{Group, Histogram, MemoryId, QualityVector};
use hashbrown::HashSet;

/// Rows of each table of memories in a report.
const ROWS: usize = 50;
/// Bins of the histogram in a report, as a power of two.
const SHOWN_BITS: u32 = 6;

pub(super) async fn findings(
    job: &Job,
    state: &RunState,
    history: &RankHistory,
    cluster: &impl Cluster,
) -> Result<Findings, ClusterError> {
    let facts = cluster.facts();
    let quality = cluster.quality().await?;
    let mut history = history.clone();
    history.before(state.done.saturating_sub(1));
    let now = cluster.top(RankHistory::DEPTH).await?;
    let top_ids: HashSet<MemoryId> = now.iter().map(|entry| entry.id).collect();
    let others: Vec<MemoryId> = history.noted_ids().into_iter().filter(|id| !top_ids.contains(id)).collect();
    let movers = history.movers(&now, &cluster.get(&others).await?, ROWS);
    Ok(Findings {
        workers: facts.workers,
        partitions: facts.partitions,
        cluster: facts.name,
        rate: facts.rate,
        initial_weight: job.experiment().map_or(facts.initial_weight, |it| f64::from(it.initial_weight)),
        decay: job.decay,
        histogram: GroupBins::of(&cluster.histogram(SHOWN_BITS).await?),
        earlier: history.epochs(),
        top: movers.top,
        risen: movers.risen,
        fallen: movers.fallen,
        experiment: match job.experiment() {
            Some(_) => experiment(job, state, &quality, cluster).await?,
            None => None,
        },
        quality: GroupSummary::of(&quality),
        digest: cluster.digest().await?.to_string(),
    })
}

async fn experiment(
    job: &Job,
    state: &RunState,
    quality: &QualityVector,
    cluster: &impl Cluster,
) -> Result<Option<Experiment>, ClusterError> {
    let (rewarded, punished) = (Population::REWARDED, Population::PUNISHED);
    let Some(separation) = Separation::of(&quality.group(rewarded), &quality.group(punished)) else { return Ok(None) };
    let inversion = if job.exact_inversion {
        Inversion::of_rank(cluster.ranked_pairs(rewarded, punished).await?)
    } else {
        let histogram = cluster.histogram(MAX_HISTOGRAM_BITS).await?;
        Inversion::of_histograms(&bins(&histogram, rewarded), &bins(&histogram, punished))
    };
    let coverage = if job.coverage {
        let wanted = u16::try_from(state.done).unwrap_or(u16::MAX);
        let counted = cluster.coverage(wanted).await?;
        counted.into_iter().map(|(group, complete, memories)| Coverage { group: group.0, complete, memories }).collect()
    } else {
        Vec::new()
    };
    Ok(Some(Experiment {
        separation: separation.to_f64(),
        convergence_factor: state.first.and_then(|first| separation.factor(first.separation()?)),
        inversion_ratio: inversion.ratio().unwrap_or(0.5),
        inversion_error: inversion.error(),
        coverage,
    }))
}

fn bins(histogram: &Histogram, group: Group) -> Vec<u64> {
    let findings = histogram.groups().iter().find(|(other, _)| *other == group);
    findings.map_or_else(|| vec![0; 1 << histogram.bits()], |(_, bins)| bins.clone())
}

/// Builds the report of a run from its record; for an unfinished run from the epochs so far.
///
/// # Errors
/// The record cannot be read.
pub fn report(entry: &Entry, source: &SourceOptions, cluster: &str) -> Result<RunReport, CorruptRecord> {
    let state = RunState::of(entry)?;
    let rows = RunState::rows(entry)?;
    let findings = state.result.clone();
    let elapsed_s = state.elapsed_ms as f64 / 1_000.0;
    let per_second = |count: u64| if elapsed_s > 0.0 { count as f64 / elapsed_s } else { 0.0 };
    Ok(RunReport {
        api_version: RunReport::API_VERSION.into(),
        kind: RunReport::KIND.into(),
        run: state.name.clone(),
        cluster: cluster.to_owned(),
        source: SourceName { kind: source.kind().into(), name: source_name(source) },
        settings: findings.as_ref().map_or(RunSettings { decay: 0.0, rate: 0.0, initial_weight: 0.0 }, |findings| {
            RunSettings { decay: findings.decay, rate: findings.rate, initial_weight: findings.initial_weight }
        }),
        workers: findings.as_ref().map_or(0, |findings| findings.workers),
        partitions: findings.as_ref().map_or(0, |findings| findings.partitions),
        prediction: HitRate::over(rows.iter().map(|row| row.row.hits.as_slice())),
        epochs: rows.into_iter().map(|row| row.row).collect(),
        earlier: findings.as_ref().map_or_else(Vec::new, |findings| findings.earlier.clone()),
        risen: findings.as_ref().map_or_else(Vec::new, |findings| findings.risen.clone()),
        elapsed_s,
        epochs_per_s: per_second(state.done),
        updates_per_s: per_second(state.updates),
        quality: findings.as_ref().map_or_else(Vec::new, |findings| findings.quality.clone()),
        histogram: findings.as_ref().map_or_else(Vec::new, |findings| findings.histogram.clone()),
        top: findings.as_ref().map_or_else(Vec::new, |findings| findings.top.clone()),
        fallen: findings.as_ref().map_or_else(Vec::new, |findings| findings.fallen.clone()),
        experiment: findings.as_ref().and_then(|findings| findings.experiment.clone()),
        digest: findings.map_or_else(String::new, |findings| findings.digest),
    })
}

fn source_name(source: &SourceOptions) -> String {
    match source {
        SourceOptions::Example(name) => name.as_str().to_owned(),
        SourceOptions::Events(events) => events.path.display().to_string(),
        SourceOptions::Git(git) => git.path.display().to_string(),
        SourceOptions::Synthetic(_) => String::new(),
    }
}
