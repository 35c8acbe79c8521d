//! `engram profile`: timeline and bottleneck analysis of a worker's devices, or of a run.

mod run;

use crate::context::Context;
use crate::error::failure;
use crate::local::admin;
use crate::output::{Table, count};
use crate::output_file::OutputFile;
use crate::target::Target;
use anyhow::{Context as _, ensure};
use engram_api::ExitCode;
use engram_kernels::profiler::{Analysis, Bottleneck, Kind, Parts, Span, Track, analyse, chrome_trace};
use engram_proto::v1::{self, ProfileKind};
use engram_proto::{MAX_PROFILE_MS, MAX_PROFILE_SPANS};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Allowed recording time in seconds.
const SECONDS: std::ops::RangeInclusive<f64> = 0.01..=MAX_PROFILE_MS as f64 / 1e3;
/// Limit on distinct span names, which are leaked: bounds memory for a malformed response.
const MAX_NAMES: usize = 1_000;

/// Default of `--seconds`.
const DEFAULT_SECONDS: f64 = 5.0;

/// Profile the devices of a worker, or a run, and report the bottleneck
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram profile                            record worker 0 for 5 seconds to profile-0.json
  engram profile 2 --seconds 20
  engram profile --to rank.json -o json | jq .bottleneck
  engram -n research profile 1              a worker in Kubernetes
  engram profile digits --to digits.html    a run: what each worker did, and what the run waited for

Open a trace with https://ui.perfetto.dev. Recording a GPU synchronizes after every kernel, which slows it down. A run of kind Tropical, Fisher or \
Geodesic records its timeline itself, stage by stage; a run of kind Replay has figures of its steps.")]
pub(crate) struct Profile {
    /// Number of a worker, or name of a run
    #[arg(value_name = "WORKER_OR_RUN", default_value = "0")]
    subject: String,
    /// Recording time in seconds, for a worker [default: 5]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Output file for the timeline in Chrome trace format; for a run also as a page, if it ends in .html [default for a worker: profile-WORKER.json]
    #[arg(long, value_name = "FILE", alias = "trace")]
    to: Option<PathBuf>,
}

/// Result for JSON and YAML output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    worker: u32,
    seconds: f64,
    trace: String,
    devices: Vec<Device>,
    /// Absent if no device was active.
    #[serde(flatten)]
    analysis: Option<BottleneckAnalysis>,
}

/// A device and its shares of the time from the first span of any device to the last.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    device: String,
    spans: usize,
    dropped: u64,
    /// Absent if no device was active.
    #[serde(skip_serializing_if = "Option::is_none")]
    shares: Option<Shares>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shares {
    kernels: f64,
    copies: f64,
    waits: f64,
    idle: f64,
}

/// Bottleneck analysis over the devices that execute passes.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct BottleneckAnalysis {
    load_imbalance: f64,
    transfer_share: f64,
    synchronization_share: f64,
    bottleneck: &'static str,
    /// Share of the time that the bottleneck takes.
    bottleneck_share: f64,
    /// Name of the kernel, or of the slowest device; absent for other bottlenecks.
    #[serde(skip_serializing_if = "Option::is_none")]
    bottleneck_name: Option<String>,
    advice: &'static str,
}

pub(crate) async fn run(arguments: &Profile, context: &Context) -> anyhow::Result<ExitCode> {
    let Profile { subject, seconds, to } = arguments;
    match subject.parse::<u32>() {
        Ok(worker) => profile_worker(worker, seconds.unwrap_or(DEFAULT_SECONDS), to.as_deref(), context).await,
        Err(_) if seconds.is_some() => {
            let message = "--seconds is for workers: a run records its timeline itself";
            Err(failure(ExitCode::Usage, message))
        }
        Err(_) => run::profile(subject, to.as_deref(), context).await,
    }
}

async fn profile_worker(worker: u32, seconds: f64, to: Option<&Path>, context: &Context) -> anyhow::Result<ExitCode> {
    if !SECONDS.contains(&seconds) {
        let message = format!("--seconds is {seconds}; allowed: {} to {} seconds", SECONDS.start(), SECONDS.end());
        return Err(failure(ExitCode::Usage, message));
    }
    let target = Target::find(context).await?;
    let admin_endpoints = target.admin_endpoints();
    if admin_endpoints.is_empty() {
        let message = "this command needs the admin port of a worker, and --address names client ports only; use --cluster, --state-dir or --namespace";
        return Err(failure(ExitCode::Usage, message));
    }
    let Some((_, endpoint)) = admin_endpoints.iter().find(|(ordinal, _)| *ordinal == worker) else {
        let existing: Vec<String> = admin_endpoints.iter().map(|(ordinal, _)| ordinal.to_string()).collect();
        return Err(failure(
            ExitCode::NotFound,
            format!("worker {worker} not found; existing workers: {}", existing.join(", ")),
        ));
    };
    context.output.note(format!("profiling worker {worker} for {seconds} s"));
    let request = v1::ProfileRequest { duration_ms: (seconds * 1e3) as u32, max_spans: MAX_PROFILE_SPANS };
    let reply = admin::profile(endpoint, request).await?;
    let tracks = tracks(reply)?;

    let path = to.map_or_else(|| PathBuf::from(format!("profile-{worker}.json")), Path::to_path_buf);
    OutputFile::write(&path, chrome_trace(&tracks).as_bytes())
        .with_context(|| format!("failed to write {}", path.display()))?;
    let report = report(worker, seconds, path.display().to_string(), &tracks);
    if context.output.is_structured() {
        context.output.value(&serde_json::to_value(&report)?)?;
        return Ok(ExitCode::Ok);
    }
    let mut table = Table::new(&["device", ">spans", ">kernels", ">copies", ">waits", ">idle"]);
    for device in &report.devices {
        let share = |of: fn(Shares) -> f64| device.shares.map_or_else(|| "-".into(), |shares| percent(of(shares)));
        table.row([
            device.device.clone(),
            count(device.spans as u64),
            share(|it| it.kernels),
            share(|it| it.copies),
            share(|it| it.waits),
            share(|it| it.idle),
        ]);
    }
    context.output.list(&report.devices, &table)?;
    for device in report.devices.iter().filter(|device| device.dropped > 0) {
        context.output.note(format!("{}: dropped {} spans", device.device, count(device.dropped)));
    }
    match &report.analysis {
        None => context.output.note("no device was active; profile while the cluster is under load"),
        Some(analysis) => {
            let name = analysis.bottleneck_name.as_ref().map_or_else(String::new, |name| format!(" {name}"));
            context.output.text(&format!(
                "\nload imbalance {}, transfer {}, synchronization {}\nbottleneck: {}{name}, {} of the time: {}\n",
                percent(analysis.load_imbalance),
                percent(analysis.transfer_share),
                percent(analysis.synchronization_share),
                analysis.bottleneck,
                percent(analysis.bottleneck_share),
                analysis.advice,
            ))?;
        }
    }
    context.output.note(format!("wrote {}; open it with https://ui.perfetto.dev", report.trace));
    Ok(ExitCode::Ok)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Converts the tracks of a response.
fn tracks(reply: v1::ProfileResponse) -> anyhow::Result<Vec<Track>> {
    let mut names = BTreeMap::new();
    reply.tracks.into_iter().map(|track| from_wire(track, &mut names)).collect()
}

fn from_wire(wire: v1::ProfileTrack, interned: &mut BTreeMap<String, &'static str>) -> anyhow::Result<Track> {
    let count = wire.start_ns.len();
    let lengths = [wire.name_indices.len(), wire.kinds.len(), wire.duration_ns.len()];
    ensure!(lengths.iter().all(|&length| length == count), "the worker returned span columns of different lengths");
    let names: Vec<&'static str> = wire
        .names
        .into_iter()
        .map(|name| {
            ensure!(interned.len() < MAX_NAMES, "the worker returned more than {MAX_NAMES} span names");
            // The profiler expects static names; this process is short-lived.
            Ok(*interned.entry(name).or_insert_with_key(|name| String::leak(name.clone())))
        })
        .collect::<anyhow::Result<_>>()?;
    let mut spans = Vec::with_capacity(count);
    for at in 0..count {
        let name = names.get(wire.name_indices[at] as usize).context("the worker returned a span without a name")?;
        let kind = match ProfileKind::try_from(wire.kinds[at]) {
            Ok(ProfileKind::Kernel) => Kind::Kernel,
            Ok(ProfileKind::Copy) => Kind::Copy,
            // Span kinds of later versions count as waiting.
            Ok(ProfileKind::Wait | ProfileKind::Unspecified) | Err(_) => Kind::Wait,
        };
        let begin_ns = wire.start_ns[at];
        spans.push(Span { kind, name, begin_ns, end_ns: begin_ns.saturating_add(wire.duration_ns[at]) });
    }
    Ok(Track { device: wire.device, spans, dropped: wire.dropped })
}

/// Returns the tracks to compare: the GPUs if one was active (the CPU track then waits for them), else the CPU.
fn compared(tracks: &[Track]) -> &[Track] {
    match tracks.split_first() {
        Some((_, gpus)) if gpus.iter().any(|track| !track.spans.is_empty()) => gpus,
        _ => &tracks[..tracks.len().min(1)],
    }
}

fn report(worker: u32, seconds: f64, trace: String, tracks: &[Track]) -> Report {
    let overall = analyse(tracks);
    let devices = tracks.iter().enumerate().map(|(at, track)| Device {
        device: track.device.clone(),
        spans: track.spans.len(),
        dropped: track.dropped,
        shares: overall.as_ref().map(|overall| shares(&overall.devices[at], overall.window_ns as f64)),
    });
    let compared = compared(tracks);
    let analysis = analyse(compared).map(|analysis| summarize(&analysis, compared));
    Report { worker, seconds, trace, devices: devices.collect(), analysis }
}

fn shares(parts: &Parts, window: f64) -> Shares {
    Shares {
        kernels: parts.kernels / window,
        copies: parts.copies / window,
        waits: parts.waits / window,
        idle: parts.idle / window,
    }
}

fn summarize(analysis: &Analysis, tracks: &[Track]) -> BottleneckAnalysis {
    let (bottleneck, bottleneck_share, bottleneck_name, advice) = match &analysis.bottleneck {
        Bottleneck::Kernel { name, share } => {
            ("kernel", *share, Some((*name).to_owned()), "the devices are compute-bound in this kernel")
        }
        Bottleneck::Transfer { share } => ("transfer", *share, None, "the devices are bound by data transfer"),
        Bottleneck::Imbalance { device, share } => {
            let name = tracks.get(*device).map(|track| track.device.clone());
            ("imbalance", *share, name, "this device is the slowest: partitions are distributed unevenly")
        }
        Bottleneck::Synchronization { share } => {
            ("synchronization", *share, None, "the devices wait for synchronization")
        }
        Bottleneck::Host { share } => ("host", *share, None, "the devices are idle: the host is the bottleneck"),
    };
    BottleneckAnalysis {
        load_imbalance: analysis.imbalance,
        transfer_share: analysis.shares.copies,
        synchronization_share: analysis.shares.waits,
        bottleneck,
        bottleneck_share,
        bottleneck_name,
        advice,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (name, kind, begin, duration)
    fn wire(device: &str, names: &[&str], spans: &[(u32, ProfileKind, u64, u64)]) -> v1::ProfileTrack {
        v1::ProfileTrack {
            device: device.into(),
            names: names.iter().map(|&name| name.to_owned()).collect(),
            name_indices: spans.iter().map(|span| span.0).collect(),
            kinds: spans.iter().map(|span| span.1.into()).collect(),
            start_ns: spans.iter().map(|span| span.2).collect(),
            duration_ns: spans.iter().map(|span| span.3).collect(),
            dropped: 3,
        }
    }

    #[test]
    fn gpus_are_compared_with_each_other_and_not_with_the_cpu() {
        use ProfileKind::{Copy, Kernel, Wait};
        let reply = v1::ProfileResponse {
            tracks: vec![
                wire("cpu", &["rank"], &[(0, Wait, 0, 1_000)]),
                wire("gpu 0", &["upload", "sort"], &[(0, Copy, 0, 50), (1, Kernel, 50, 950)]),
                wire("gpu 1", &["sort"], &[(0, Kernel, 0, 400)]),
            ],
        };
        let tracks = tracks(reply).unwrap();
        let report = report(0, 1.0, "t.json".into(), &tracks);
        assert_eq!(report.devices[0].shares, Some(Shares { kernels: 0.0, copies: 0.0, waits: 1.0, idle: 0.0 }));
        assert_eq!(report.devices[1].shares, Some(Shares { kernels: 0.95, copies: 0.05, waits: 0.0, idle: 0.0 }));
        let analysis = report.analysis.unwrap();
        assert_eq!((analysis.bottleneck, analysis.bottleneck_name.as_deref()), ("imbalance", Some("gpu 0")));
        assert!((analysis.bottleneck_share - 0.3).abs() < 1e-9 && (analysis.transfer_share - 0.025).abs() < 1e-9);
    }

    #[test]
    fn cpu_passes_are_the_bottleneck_without_gpus() {
        let reply = v1::ProfileResponse {
            tracks: vec![
                wire("cpu", &["rank", "write"], &[(0, ProfileKind::Kernel, 0, 970), (1, ProfileKind::Copy, 970, 30)]),
                wire("gpu", &[], &[]),
            ],
        };
        let tracks = tracks(reply).unwrap();
        let report = report(0, 1.0, "t.json".into(), &tracks);
        let analysis = report.analysis.unwrap();
        assert_eq!((analysis.bottleneck, analysis.bottleneck_name.as_deref()), ("kernel", Some("rank")));
        assert!(chrome_trace(&tracks).contains(r#""cat":"copy","name":"write""#));
        assert_eq!(report.devices[0].dropped, 3);
    }

    #[test]
    fn idle_workers_have_no_analysis_and_malformed_responses_are_rejected() {
        let nothing = tracks(v1::ProfileResponse { tracks: vec![wire("cpu", &[], &[])] }).unwrap();
        assert!(report(0, 1.0, String::new(), &nothing).analysis.is_none());
        let unnamed = wire("cpu", &["rank"], &[(1, ProfileKind::Kernel, 0, 1)]);
        assert!(tracks(v1::ProfileResponse { tracks: vec![unnamed] }).is_err());
        let mut short = wire("cpu", &["rank"], &[(0, ProfileKind::Kernel, 0, 1)]);
        short.duration_ns.clear();
        assert!(tracks(v1::ProfileResponse { tracks: vec![short] }).is_err());
    }
}
