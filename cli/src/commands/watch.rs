//! What `status` and `top` show: one look at a cluster, from its map, its metrics pages and its runs.

use super::copies::Copies;
use crate::local::admin;
use crate::route::Door;
use crate::target::Target;
use engram_client::{Client, QualityOptions};
use engram_memory::ONE;
use engram_proto::v1::{RunPhase, RunStatus};
use serde::Serialize;
use std::collections::BTreeMap;

/// One look at a cluster.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Look {
    pub(crate) api_version: &'static str,
    pub(crate) kind: &'static str,
    /// Its name.
    pub(crate) name: String,
    /// Its id, 32 hex digits.
    pub(crate) cluster: String,
    /// Version of its map.
    pub(crate) map_version: u64,
    /// Partitions of it.
    pub(crate) partitions: usize,
    /// Memories on all workers that answer.
    pub(crate) memories: u64,
    /// Whether every worker that has partitions answers and is ready.
    pub(crate) ready: bool,
    /// What is not as it should be.
    pub(crate) conditions: Vec<String>,
    /// What people ordered against the rules of the map, oldest first. They are on record for good.
    pub(crate) orders: Vec<String>,
    /// Of a cluster whose coordinator answers.
    pub(crate) copies: Option<Copies>,
    /// By ordinal.
    pub(crate) workers: Vec<Worker>,
    /// By name.
    pub(crate) runs: Vec<Run>,
    /// By group.
    pub(crate) quality: Vec<Group>,
}

/// A worker at one moment.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Worker {
    pub(crate) ordinal: u32,
    pub(crate) address: String,
    /// Whether it answers.
    pub(crate) alive: bool,
    /// Whether it serves all that the map gives it.
    pub(crate) ready: bool,
    pub(crate) incarnation: u64,
    pub(crate) device: String,
    pub(crate) memories: u64,
    pub(crate) partitions: u64,
    pub(crate) updates: u64,
    pub(crate) resident_bytes: u64,
    pub(crate) log_bytes: u64,
    pub(crate) waiting_records: u64,
    pub(crate) uptime_seconds: f64,
}

/// A run at one moment.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Run {
    pub(crate) name: String,
    pub(crate) phase: String,
    pub(crate) epoch: u64,
    pub(crate) epochs: u64,
    pub(crate) updates: u64,
    pub(crate) epochs_per_second: f64,
    pub(crate) updates_per_second: f64,
    pub(crate) elapsed_seconds: f64,
    /// Absent while it is not known.
    pub(crate) eta_seconds: Option<f64>,
    pub(crate) driver: Option<u32>,
    pub(crate) label: String,
    pub(crate) message: String,
    pub(crate) metrics: BTreeMap<String, f64>,
}

/// Quality of a group.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Group {
    pub(crate) group: u8,
    pub(crate) count: u64,
    pub(crate) mean: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// Looks at a cluster. What does not answer is a condition, not an error.
///
/// # Errors
/// Not even a map is known.
pub(crate) async fn look(client: &Client, target: &Target) -> anyhow::Result<Look> {
    let map = client.refreshed_map().await?;
    let mut conditions = Vec::new();
    let owners = map.owners();
    let mut workers = Vec::new();
    for (ordinal, known) in &map.workers {
        let worker = Worker {
            ordinal: ordinal.0,
            address: known.client_address.clone(),
            incarnation: known.incarnation.0,
            ..Worker::default()
        };
        let door = Door { address: known.http_address.clone(), route: target.route() };
        let worker = match page(&door).await {
            Ok(text) => measured(worker, &Metrics::read(&text)),
            Err(error) => {
                conditions.push(format!("worker {ordinal} does not answer: {error}"));
                worker
            }
        };
        if worker.alive && !worker.ready {
            conditions.push(format!("worker {ordinal} is getting ready"));
        }
        if worker.alive && !known.alive {
            conditions.push(format!("the coordinator does not hear worker {ordinal}"));
        }
        workers.push(worker);
    }
    let unknown = owners.iter().filter(|owner| !map.workers.contains_key(*owner));
    conditions.extend(unknown.map(|owner| format!("worker {owner} has partitions and was not heard of")));
    let ready = conditions.is_empty();
    let runs = told(client.list_runs().await, "runs", ready, &mut conditions).unwrap_or_default();
    let quality = told(client.quality(QualityOptions::default()).await, "quality", ready, &mut conditions);
    let groups = quality.iter().flat_map(|quality| quality.vector.groups());
    let weight = |units: u32| f64::from(units) / f64::from(ONE);
    Ok(Look {
        api_version: engram_api::API_VERSION,
        kind: "ClusterStatus",
        name: map.cluster_name.clone(),
        cluster: map.cluster.to_string(),
        map_version: map.version,
        partitions: map.partitions.len(),
        memories: workers.iter().map(|worker| worker.memories).sum(),
        ready: conditions.is_empty(),
        conditions,
        orders: Vec::new(),
        copies: Copies::look(target).await,
        workers,
        runs: runs.into_iter().map(Run::from).collect(),
        quality: groups
            .map(|(group, quality)| Group {
                group: group.0,
                count: quality.count,
                mean: quality.mean().unwrap_or_default(),
                min: weight(quality.min),
                max: weight(quality.max),
            })
            .collect(),
    })
}

fn told<T>(
    answer: Result<T, engram_client::Error>,
    what: &str,
    ready: bool,
    conditions: &mut Vec<String>,
) -> Option<T> {
    match answer {
        Ok(answer) => Some(answer),
        // Of a cluster with a known trouble this is no news.
        Err(_) if !ready => None,
        Err(error) => {
            conditions.push(format!("no answer about {what}: {error}"));
            None
        }
    }
}

async fn page(door: &Door) -> anyhow::Result<String> {
    let (code, text) = admin::page(door, "/metrics").await?;
    anyhow::ensure!(code == 200, "its metrics answer with code {code}");
    Ok(text)
}

fn measured(worker: Worker, metrics: &Metrics<'_>) -> Worker {
    let whole = |name| metrics.sum(name) as u64;
    let device = metrics.label("engram_build_info", "device").unwrap_or_default();
    let note = if whole("engram_gpu_given_up") > 0 { ", its GPU was given up" } else { "" };
    Worker {
        alive: true,
        ready: metrics.sum("engram_ready") >= 1.0,
        device: format!("{device}{note}"),
        memories: whole("engram_memories"),
        partitions: whole("engram_partitions"),
        updates: whole("engram_updates_total"),
        resident_bytes: whole("engram_resident_memory_bytes"),
        log_bytes: whole("engram_log_bytes"),
        waiting_records: whole("engram_waiting_records"),
        uptime_seconds: metrics.sum("engram_uptime_seconds"),
        ..worker
    }
}

/// A page in the format of Prometheus.
struct Metrics<'a>(Vec<(&'a str, &'a str, f64)>);

impl<'a> Metrics<'a> {
    fn read(text: &'a str) -> Self {
        let sample = |line: &'a str| {
            let (series, value) = line.rsplit_once(' ')?;
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            Some((name, labels.trim_end_matches('}'), value.parse().ok()?))
        };
        Self(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    fn sum(&self, wanted: &str) -> f64 {
        self.0.iter().filter(|(name, ..)| *name == wanted).map(|(.., value)| value).sum()
    }

    fn label(&self, wanted: &str, label: &str) -> Option<&'a str> {
        let (_, labels, _) = self.0.iter().find(|(name, ..)| *name == wanted)?;
        let (_, rest) = labels.split_once(&format!("{label}=\""))?;
        rest.split_once('"').map(|(value, _)| value)
    }
}

impl From<RunStatus> for Run {
    fn from(status: RunStatus) -> Self {
        let phase = match status.phase() {
            RunPhase::Unspecified => "Unknown",
            RunPhase::Queued => "Queued",
            RunPhase::Running => "Running",
            RunPhase::Succeeded => "Succeeded",
            RunPhase::Failed => "Failed",
            RunPhase::Cancelled => "Cancelled",
            RunPhase::Suspended => "Suspended",
        };
        Self {
            phase: phase.into(),
            name: status.name,
            epoch: status.epoch,
            epochs: status.epochs,
            updates: status.updates,
            epochs_per_second: status.epochs_per_second,
            updates_per_second: status.updates_per_second,
            elapsed_seconds: status.elapsed_seconds,
            eta_seconds: (status.eta_seconds >= 0.0).then_some(status.eta_seconds),
            driver: status.driver,
            label: status.label,
            message: status.message,
            metrics: status.metrics.into_iter().collect(),
        }
    }
}

impl Run {
    /// Whether it will go on.
    pub(crate) fn is_going_on(&self) -> bool {
        matches!(self.phase.as_str(), "Queued" | "Running")
    }

    /// How far it is, from 0 to 1; `None` while the number of epochs is not known.
    pub(crate) fn ratio(&self) -> Option<f64> {
        (self.epochs > 0).then(|| (self.epoch as f64 / self.epochs as f64).min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metrics_page_is_read_by_name_and_label() {
        let page = "# TYPE engram_updates counter\n\
            engram_updates_total{learner_cluster=\"demo\",worker=\"0\"} 12\n\
            engram_ready{learner_cluster=\"demo\",worker=\"0\"} 1\n\
            engram_build_info{learner_cluster=\"demo\",version=\"0.1.0\",device=\"CPU (AVX2), 2 threads\"} 1\n# EOF\n";
        let worker = measured(Worker::default(), &Metrics::read(page));
        assert_eq!((worker.updates, worker.ready, worker.device.as_str()), (12, true, "CPU (AVX2), 2 threads"));
        let page = page.replace("# EOF", "engram_gpu_given_up{learner_cluster=\"demo\"} 1\n# EOF");
        let worker = measured(Worker::default(), &Metrics::read(&page));
        assert_eq!(worker.device, "CPU (AVX2), 2 threads, its GPU was given up");
    }
}
