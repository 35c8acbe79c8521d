//! The state of a cluster for `status` and `top`: from its partition map, its metrics pages and its runs.

use super::replication::Replication;
use crate::local::admin;
use crate::route::Endpoint;
use crate::target::Target;
use engram_client::{BufferDescription, Client, QualityOptions};
use engram_memory::ONE;
use engram_proto::v1::{RunPhase, RunStatus, RunningTask};
use serde::Serialize;
use std::collections::BTreeMap;

/// State of a cluster at one moment.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Overview {
    pub(crate) api_version: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) name: String,
    /// Cluster id, 32 hex digits.
    pub(crate) cluster: String,
    /// Version of the partition map.
    pub(crate) map_version: u64,
    pub(crate) partitions: usize,
    /// Memories on all workers that respond.
    pub(crate) memories: u64,
    /// Whether there are no problems.
    pub(crate) ready: bool,
    /// Problems that need attention.
    pub(crate) conditions: Vec<String>,
    /// Findings that do not affect service yet, such as panics.
    pub(crate) warnings: Vec<String>,
    /// Manual overrides of the partition map, oldest first.
    pub(crate) overrides: Vec<String>,
    /// Absent if the coordinator does not respond.
    pub(crate) replication: Option<Replication>,
    pub(crate) workers: Vec<Worker>,
    pub(crate) runs: Vec<Run>,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) quality: Vec<Group>,
}

/// State of a worker.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Worker {
    pub(crate) ordinal: u32,
    pub(crate) address: String,
    /// Whether it responds.
    pub(crate) alive: bool,
    /// Whether it serves all partitions that the map assigns to it.
    pub(crate) ready: bool,
    pub(crate) incarnation: u64,
    pub(crate) device: String,
    pub(crate) memories: u64,
    pub(crate) partitions: u64,
    pub(crate) updates: u64,
    pub(crate) resident_bytes: u64,
    pub(crate) log_bytes: u64,
    pub(crate) pending_records: u64,
    pub(crate) uptime_seconds: f64,
    /// Panics since its start.
    pub(crate) panics: u64,
}

/// State of a run.
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
    /// Absent while unknown.
    pub(crate) eta_seconds: Option<f64>,
    pub(crate) driver: Option<u32>,
    pub(crate) label: String,
    pub(crate) message: String,
    pub(crate) metrics: BTreeMap<String, f64>,
    /// Tasks in execution.
    pub(crate) tasks: Vec<Task>,
}

/// A task of a run in execution.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Task {
    pub(crate) number: u64,
    pub(crate) name: String,
    /// Ordinal of the worker that executes it.
    pub(crate) worker: u32,
    /// Completed share, 0 to 1.
    pub(crate) fraction: f64,
    /// Workers that were lost while they executed it.
    pub(crate) lost_workers: u32,
    /// Share from which another worker would continue; 0 without a checkpoint.
    pub(crate) checkpoint: f64,
}

/// A replay buffer.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Buffer {
    pub(crate) name: String,
    pub(crate) items: u64,
    pub(crate) capacity: u64,
    pub(crate) appended: u64,
    /// Why an append or a sample would wait now.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) waits: Vec<String>,
}

/// Weight statistics of a group.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Group {
    pub(crate) group: u8,
    pub(crate) count: u64,
    pub(crate) mean: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// Reads the state of a cluster. A process that does not respond is a condition, not an error.
///
/// # Errors
/// No partition map can be read.
pub(crate) async fn read(client: &Client, target: &Target) -> anyhow::Result<Overview> {
    let map = client.refreshed_map().await?;
    let (mut conditions, mut warnings) = (Vec::new(), Vec::new());
    let owners = map.owners();
    let mut workers = Vec::new();
    for (ordinal, placement) in &map.workers {
        let worker = Worker {
            ordinal: ordinal.0,
            address: placement.client_address.clone(),
            incarnation: placement.incarnation.0,
            ..Worker::default()
        };
        let endpoint = Endpoint { address: placement.http_address.clone(), route: target.route() };
        let worker = match page(&endpoint).await {
            Ok(text) => with_metrics(worker, &Metrics::read(&text)),
            Err(error) => {
                conditions.push(format!("worker {ordinal} does not respond: {error}"));
                worker
            }
        };
        warnings.extend(panics(ordinal.0, worker.panics));
        if worker.alive && !worker.ready {
            conditions.push(format!("worker {ordinal} is starting"));
        }
        if worker.alive && !placement.alive {
            conditions.push(format!("the coordinator receives no heartbeats from worker {ordinal}"));
        }
        workers.push(worker);
    }
    let missing = owners.iter().filter(|owner| !map.workers.contains_key(*owner));
    conditions.extend(missing.map(|owner| format!("worker {owner} has partitions but has not registered")));
    let ready = conditions.is_empty();
    let runs = ok_or_condition(client.list_runs().await, "runs", ready, &mut conditions).unwrap_or_default();
    let buffers = ok_or_condition(client.declared_buffers().await, "buffers", ready, &mut conditions);
    let (buffers, problems) = buffers.unwrap_or_default();
    conditions.extend(problems.into_iter().map(|it| format!("buffer {}: {}", it.buffer, it.problem)));
    let quality = ok_or_condition(client.quality(QualityOptions::default()).await, "quality", ready, &mut conditions);
    let groups = quality.iter().flat_map(|quality| quality.vector.groups());
    let weight = |units: u32| f64::from(units) / f64::from(ONE);
    Ok(Overview {
        api_version: engram_api::API_VERSION,
        kind: "ClusterStatus",
        name: map.cluster_name.clone(),
        cluster: map.cluster.to_string(),
        map_version: map.version,
        partitions: map.partitions.len(),
        memories: workers.iter().map(|worker| worker.memories).sum(),
        ready: conditions.is_empty(),
        conditions,
        warnings,
        overrides: Vec::new(),
        replication: Replication::read(target).await,
        workers,
        runs: runs.into_iter().map(Run::from).collect(),
        buffers: buffers.into_iter().map(Buffer::from).collect(),
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

impl From<BufferDescription> for Buffer {
    fn from(buffer: BufferDescription) -> Self {
        let BufferDescription { spec, stats, .. } = buffer;
        let waits = [("append", stats.append_waits), ("sample", stats.sample_waits)];
        Self {
            name: spec.name,
            items: stats.items,
            capacity: spec.capacity,
            appended: stats.appended,
            waits: waits.into_iter().filter_map(|(call, why)| Some(format!("{call}: {}", why?))).collect(),
        }
    }
}

/// Returns the value, or records a condition if the request failed on an otherwise ready cluster.
fn ok_or_condition<T>(
    result: Result<T, engram_client::Error>,
    subject: &str,
    ready: bool,
    conditions: &mut Vec<String>,
) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(_) if !ready => None,
        Err(error) => {
            conditions.push(format!("failed to read {subject}: {error}"));
            None
        }
    }
}

/// Describes panics of a worker.
fn panics(ordinal: u32, panics: u64) -> Option<String> {
    let times = if panics == 1 { "once" } else { "repeatedly" };
    let message = format!(
        "worker {ordinal} panicked {times} ({panics} since its start); engram logs worker-{ordinal} shows where"
    );
    (panics > 0).then_some(message)
}

async fn page(endpoint: &Endpoint) -> anyhow::Result<String> {
    let (code, text) = admin::page(endpoint, "/metrics").await?;
    anyhow::ensure!(code == 200, "GET /metrics returned status {code}");
    Ok(text)
}

fn with_metrics(worker: Worker, metrics: &Metrics<'_>) -> Worker {
    let integer = |name| metrics.sum(name) as u64;
    let device = metrics.label("engram_build_info", "device").unwrap_or_default();
    let note = if integer("engram_gpu_disabled") > 0 { ", GPU disabled after an error" } else { "" };
    Worker {
        alive: true,
        ready: metrics.sum("engram_ready") >= 1.0,
        device: format!("{device}{note}"),
        memories: integer("engram_memories"),
        partitions: integer("engram_partitions"),
        updates: integer("engram_updates_total"),
        resident_bytes: integer("engram_resident_memory_bytes"),
        log_bytes: integer("engram_wal_bytes"),
        pending_records: integer("engram_pending_records"),
        uptime_seconds: metrics.sum("engram_uptime_seconds"),
        panics: integer("engram_panics_total"),
        ..worker
    }
}

/// A page in the Prometheus text format.
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

    fn sum(&self, metric: &str) -> f64 {
        self.0.iter().filter(|(name, ..)| *name == metric).map(|(.., value)| value).sum()
    }

    fn label(&self, metric: &str, label: &str) -> Option<&'a str> {
        let (_, labels, _) = self.0.iter().find(|(name, ..)| *name == metric)?;
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
            tasks: status.tasks.into_iter().map(Task::from).collect(),
        }
    }
}

impl From<RunningTask> for Task {
    fn from(task: RunningTask) -> Self {
        let RunningTask { number, name, worker, fraction, losses, checkpoint } = task;
        Self { number, name, worker, fraction, lost_workers: losses, checkpoint }
    }
}

impl Overview {
    /// Returns what a worker executes and drives: tasks with their run, then the runs whose driver it is.
    pub(crate) fn assignments(&self, worker: u32) -> String {
        let active = || self.runs.iter().filter(|run| run.is_active());
        let task = |run: &Run, task: &Task| format!("{}/{} {:.0} %", run.name, task.name, task.fraction * 100.0);
        let tasks = active().flat_map(|run| {
            run.tasks.iter().filter(|it| it.worker == worker).map(|it| task(run, it)).collect::<Vec<_>>()
        });
        let drives = active().filter(|run| run.driver == Some(worker)).map(|run| format!("drives {}", run.name));
        tasks.chain(drives).collect::<Vec<_>>().join(", ")
    }

    /// Returns the names of the runs that wait for their turn.
    pub(crate) fn queued(&self) -> Vec<&str> {
        self.runs.iter().filter(|run| run.phase == "Queued").map(|run| run.name.as_str()).collect()
    }
}

impl Run {
    /// Whether it is queued or running.
    pub(crate) fn is_active(&self) -> bool {
        matches!(self.phase.as_str(), "Queued" | "Running")
    }

    /// Completed fraction; `None` while the number of epochs is unknown.
    pub(crate) fn ratio(&self) -> Option<f64> {
        (self.epochs > 0).then(|| (self.epoch as f64 / self.epochs as f64).min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_read_by_name_and_label() {
        let page = "# TYPE engram_updates counter\n\
            engram_updates_total{learner_cluster=\"demo\",worker=\"0\"} 12\n\
            engram_ready{learner_cluster=\"demo\",worker=\"0\"} 1\n\
            engram_build_info{learner_cluster=\"demo\",version=\"0.1.0\",device=\"CPU (AVX2), 2 threads\"} 1\n# EOF\n";
        let worker = with_metrics(Worker::default(), &Metrics::read(page));
        assert_eq!((worker.updates, worker.ready, worker.device.as_str()), (12, true, "CPU (AVX2), 2 threads"));
        let page = page.replace("# EOF", "engram_gpu_disabled{learner_cluster=\"demo\"} 1\n# EOF");
        let worker = with_metrics(Worker::default(), &Metrics::read(&page));
        assert_eq!(worker.device, "CPU (AVX2), 2 threads, GPU disabled after an error");
        let page = page.replace("# EOF", "engram_panics_total{learner_cluster=\"demo\"} 7\n# EOF");
        let worker = with_metrics(Worker::default(), &Metrics::read(&page));
        assert!(panics(0, worker.panics).is_some_and(|text| text.contains("7 since its start")));
        assert_eq!(panics(0, 0), None);
    }
}
