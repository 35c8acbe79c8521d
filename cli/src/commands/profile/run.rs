//! `engram profile RUN`: what the workers and the driver did during a run, and what it waited for.

use super::{BottleneckAnalysis, MAX_NAMES, Shares, percent, shares, summarize};
use crate::context::Context;
use crate::error::{failure, problem};
use crate::output::{Table, bytes, seconds, short_seconds};
use crate::output_file::OutputFile;
use crate::target;
use anyhow::{Context as _, ensure};
use engram_api::{Code, ExitCode, printable};
use engram_client::Client;
use engram_kernels::profiler::{Kind, Span, Track, analyse, chrome_trace};
use engram_learn::task_run::{SpanDevice, TaskReport, TimelineKind, TimelineRow, TimelineSpan, timeline_page};
use engram_proto::v1::RunStatus;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Share of the time from which waiting in a training is its bottleneck.
const WORTH_NAMING: f64 = 0.1;

/// Result for JSON and YAML output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    run: String,
    devices: Vec<Device>,
    /// What the tasks were computed with.
    hardware: Vec<Hardware>,
    /// Tasks that lost workers repeated.
    lost: usize,
    #[serde(flatten)]
    analysis: Option<BottleneckAnalysis>,
}

/// A worker or the driver, and its shares of the time of all complete stages.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    device: String,
    spans: usize,
    shares: Shares,
}

/// A CPU or GPU of a worker, and what it computed of all complete stages.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Hardware {
    worker: u32,
    device: String,
    /// Absent where it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
    tasks: usize,
    /// Of a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    computations: Option<u64>,
    seconds: f64,
}

/// Header of the table of [`Hardware`]; a leading > aligns to the right.
const HARDWARE: [&str; 6] = ["worker", "computed with", ">memory", ">tasks", ">computations", ">time"];

impl Hardware {
    fn cells(&self) -> [String; 6] {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            format!("worker {}", self.worker),
            self.device.clone(),
            or_dash(self.memory_bytes.map(bytes)),
            self.tasks.to_string(),
            or_dash(self.computations.map(|it| it.to_string())),
            seconds(self.seconds),
        ]
    }
}

/// Result for a run of kind Replay.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct TrainingReport {
    run: String,
    step_seconds: f64,
    parts: Vec<Part>,
    #[serde(skip_serializing_if = "Option::is_none")]
    efficiency: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slowest_link: Option<SlowestLink>,
    /// Share of the steps whose items of a buffer had been drawn before.
    #[serde(skip_serializing_if = "Option::is_none")]
    drawn_ahead_share: Option<f64>,
    /// Share of the time of reductions that the backward pass hides.
    #[serde(skip_serializing_if = "Option::is_none")]
    hidden_reduction_share: Option<f64>,
    /// Algorithm that reduced the gradients of the last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    reduction: Option<String>,
    /// Whether NCCL was a candidate for it, or why it was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    nccl: Option<String>,
    /// Devices that computed the gradients of the last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    devices: Option<String>,
    bottleneck: &'static str,
    bottleneck_share: f64,
}

/// The slowest link between members, as measured when the group was formed.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct SlowestLink {
    latency_seconds: f64,
    bytes_per_second: f64,
}

/// A part of a training step.
#[derive(Debug, Serialize)]
struct Part {
    part: &'static str,
    seconds: f64,
    share: f64,
}

/// Prints the profile of a run, and writes its timeline to `to`.
///
/// # Errors
/// The run is unknown, has no timeline, or the file cannot be written.
pub(super) async fn profile(name: &str, to: Option<&Path>, context: &Context) -> anyhow::Result<ExitCode> {
    let client = target::connect(context).await?;
    let status = status(&client, name).await?;
    if status.kind == "Replay" {
        if to.is_some() {
            let message = format!("--to is not supported: run {name} of kind Replay has figures, but no timeline");
            return Err(failure(ExitCode::Usage, message));
        }
        return print_training(&training(&status)?, context);
    }
    if !["Tropical", "Fisher", "Geodesic"].contains(&&*status.kind) {
        let kind = &status.kind;
        let message =
            format!("run {name} of kind {kind} has no profile; supported: Tropical, Fisher, Geodesic, Replay");
        return Err(problem(Code::NotSupported, message));
    }
    let json = client.report(name).await?;
    let report: TaskReport =
        serde_json::from_str(&json).with_context(|| format!("the report of run {name} has an unknown format"))?;
    if report.timeline.is_empty() {
        context.output.note(format!("no stage of run {name} is complete; profile it later"));
        return Ok(ExitCode::Ok);
    }
    let tracks = tracks(&report.timeline)?;
    let profile = run_report(name, &report.timeline, &tracks);
    if let Some(path) = to {
        write(path, name, &report.timeline, (&tracks, &profile))?;
    }
    if context.output.is_structured() {
        context.output.value(&serde_json::to_value(&profile)?)?;
        return Ok(ExitCode::Ok);
    }
    let mut table = Table::new(&["device", ">spans", ">computing", ">transfers", ">idle"]);
    for device in &profile.devices {
        let Shares { kernels, copies, waits, idle } = device.shares;
        let cells = [percent(kernels), percent(copies), percent(waits + idle)];
        table.row([device.device.clone(), device.spans.to_string()].into_iter().chain(cells));
    }
    context.output.list(&profile.devices, &table)?;
    if !profile.hardware.is_empty() {
        let mut table = Table::new(&HARDWARE);
        profile.hardware.iter().for_each(|hardware| table.row(hardware.cells()));
        context.output.text("\n")?;
        context.output.list(&profile.hardware, &table)?;
    }
    context.output.text(&format!("\n{}", sentences(&profile).join("\n") + "\n"))?;
    if let Some(path) = to {
        context.output.note(format!("wrote {}", path.display()));
    }
    Ok(ExitCode::Ok)
}

async fn status(client: &Client, name: &str) -> anyhow::Result<RunStatus> {
    let runs = client.list_runs().await?;
    let unknown = || problem(Code::RunUnknown, format!("run {name} not found"));
    runs.into_iter().find(|run| run.name == name).ok_or_else(unknown)
}

/// Returns the tracks of the workers in order, and the driver's last.
fn tracks(timeline: &[TimelineSpan]) -> anyhow::Result<Vec<Track>> {
    let workers: BTreeSet<u32> = timeline.iter().filter_map(|span| span.worker).collect();
    let mut names: BTreeMap<&str, &'static str> = BTreeMap::new();
    let mut track = |device: String, worker: Option<u32>| -> anyhow::Result<Track> {
        let mut spans = Vec::new();
        for span in timeline.iter().filter(|span| span.worker == worker) {
            // The limit is for malformed reports: the profiler expects static names, and this process is short-lived.
            ensure!(names.len() < 100 * MAX_NAMES, "the report has more than {} names of tasks", 100 * MAX_NAMES);
            let name = *names.entry(&span.name).or_insert_with_key(|name| String::leak(printable(name).to_string()));
            let kind = match span.kind {
                // The work of a lost worker is no progress.
                TimelineKind::Task if span.lost => Kind::Wait,
                TimelineKind::Task | TimelineKind::Plan => Kind::Kernel,
                TimelineKind::Transfer | TimelineKind::Record => Kind::Copy,
            };
            let begin_ns = span.begin_us.saturating_mul(1_000);
            spans.push(Span { kind, name, begin_ns, end_ns: span.end_us.saturating_mul(1_000).max(begin_ns) });
        }
        Ok(Track { device, spans, dropped: 0 })
    };
    let mut tracks: Vec<Track> =
        workers.into_iter().map(|worker| track(format!("worker {worker}"), Some(worker))).collect::<Result<_, _>>()?;
    tracks.push(track("driver".to_owned(), None)?);
    Ok(tracks)
}

fn run_report(name: &str, timeline: &[TimelineSpan], tracks: &[Track]) -> Report {
    let overall = analyse(tracks);
    let device = |(at, track): (usize, &Track)| Device {
        device: track.device.clone(),
        spans: track.spans.len(),
        shares: overall.as_ref().map_or(Shares { kernels: 0.0, copies: 0.0, waits: 0.0, idle: 0.0 }, |overall| {
            shares(&overall.devices[at], overall.window_ns as f64)
        }),
    };
    // The driver is the host of the workers, not one of them.
    let workers = &tracks[..tracks.len() - 1];
    let analysis = analyse(workers).map(|analysis| {
        let mut summary = summarize(&analysis, workers);
        summary.advice = match summary.bottleneck {
            "kernel" => "the workers compute; this task takes longest",
            "transfer" => "the workers wait for specification, data and inputs of tasks",
            "imbalance" => "the other workers have no task while this one computes: tasks are too few or too unequal",
            "synchronization" => "work of lost workers was repeated",
            _ => "the workers have no task: they wait for the driver, which plans stages and records results",
        };
        summary
    });
    let lost = timeline.iter().filter(|span| span.lost).count();
    let devices = tracks.iter().enumerate().map(device).collect();
    Report { run: name.to_owned(), devices, hardware: hardware(timeline), lost, analysis }
}

/// Returns the devices of the workers in order, each worker's CPU first.
fn hardware(timeline: &[TimelineSpan]) -> Vec<Hardware> {
    let mut found: BTreeMap<(u32, bool, &str), (usize, SpanDevice)> = BTreeMap::new();
    for (worker, span) in timeline.iter().filter_map(|span| Some((span.worker?, span))) {
        for device in &span.devices {
            let key = (worker, !device.name.starts_with("CPU"), &*device.name);
            let none = || (0, SpanDevice { busy_us: 0, computations: 0, ..device.clone() });
            let (tasks, sum) = found.entry(key).or_insert_with(none);
            *tasks += 1;
            sum.busy_us = sum.busy_us.saturating_add(device.busy_us);
            sum.computations = sum.computations.saturating_add(device.computations);
        }
    }
    let row = |((worker, is_gpu, name), (tasks, sum)): ((u32, bool, &str), (usize, SpanDevice))| Hardware {
        worker,
        device: printable(name).to_string(),
        memory_bytes: Some(sum.memory_bytes).filter(|bytes| *bytes > 0),
        tasks,
        computations: is_gpu.then_some(sum.computations),
        seconds: sum.busy_us as f64 / 1e6,
    };
    found.into_iter().map(row).collect()
}

fn sentences(profile: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(analysis) = &profile.analysis {
        let name = analysis.bottleneck_name.as_ref().map_or_else(String::new, |name| format!(" {name}"));
        lines.push(format!(
            "load imbalance {}, transfer {}",
            percent(analysis.load_imbalance),
            percent(analysis.transfer_share)
        ));
        lines.push(format!(
            "bottleneck: {}{name}, {} of the time: {}",
            analysis.bottleneck,
            percent(analysis.bottleneck_share),
            analysis.advice
        ));
    }
    if profile.lost > 0 {
        lines.push(format!("tasks repeated because their worker was lost: {}", profile.lost));
    }
    lines
}

/// Writes an HTML page if the name of the file says so, otherwise a trace for Perfetto.
fn write(
    path: &Path,
    name: &str,
    timeline: &[TimelineSpan],
    (tracks, profile): (&[Track], &Report),
) -> anyhow::Result<()> {
    let is_page = path.extension().is_some_and(|it| it.eq_ignore_ascii_case("html") || it.eq_ignore_ascii_case("htm"));
    let content = if is_page { page(name, timeline, profile) } else { chrome_trace(tracks) };
    OutputFile::write(path, content.as_bytes()).with_context(|| format!("failed to write {}", path.display()))
}

fn page(name: &str, timeline: &[TimelineSpan], profile: &Report) -> String {
    let workers: BTreeSet<Option<u32>> = timeline.iter().map(|span| span.worker).collect();
    // `None` comes first in the set: the driver is the first row.
    let row = |worker: &Option<u32>| -> TimelineRow {
        let spans = timeline.iter().filter(|span| span.worker == *worker).map(|span| {
            let class = match span.kind {
                TimelineKind::Task if span.lost => "lost",
                TimelineKind::Task | TimelineKind::Plan => "kernel",
                TimelineKind::Transfer | TimelineKind::Record => "copy",
            };
            (class, span.name.clone(), span.begin_us, span.end_us.max(span.begin_us))
        });
        (worker.map_or_else(|| "driver".to_owned(), |worker| format!("worker {worker}")), spans.collect())
    };
    let rows: Vec<TimelineRow> = workers.iter().map(row).collect();
    let mut table = vec![["device", "computing", "transfers", "idle"].map(str::to_owned).to_vec()];
    table.extend(profile.devices.iter().map(|device| {
        let Shares { kernels, copies, waits, idle } = device.shares;
        vec![device.device.clone(), percent(kernels), percent(copies), percent(waits + idle)]
    }));
    let mut tables = vec![("Shares of the time", table)];
    if !profile.hardware.is_empty() {
        let header = HARDWARE.map(|name| name.trim_start_matches('>').to_owned()).to_vec();
        let body = profile.hardware.iter().map(|hardware| hardware.cells().to_vec());
        tables.push(("Devices", [header].into_iter().chain(body).collect()));
    }
    timeline_page(name, &sentences(profile), &tables, &rows)
}

/// Returns the parts of a training step from the figures of the run.
fn training(status: &RunStatus) -> anyhow::Result<TrainingReport> {
    let figure = |name: &str| status.metrics.get(name).copied().filter(|it| it.is_finite() && *it >= 0.0);
    let step_seconds = figure("step_seconds")
        .filter(|it| *it > 0.0)
        .with_context(|| format!("run {} has no figures of its steps yet; profile it while it trains", status.name))?;
    let waits = [("reduction of gradients", "reduce_seconds"), ("sampling", "draw_seconds")];
    let mut parts: Vec<Part> = waits
        .into_iter()
        .filter_map(|(part, name)| {
            let seconds = figure(name)?.min(step_seconds);
            Some(Part { part, seconds, share: seconds / step_seconds })
        })
        .collect();
    let rest = (step_seconds - parts.iter().map(|part| part.seconds).sum::<f64>()).max(0.0);
    parts.insert(0, Part { part: "computing and the rest", seconds: rest, share: rest / step_seconds });
    let longest = parts[1..].iter().max_by(|one, other| one.share.total_cmp(&other.share));
    let named = longest.filter(|part| part.share >= WORTH_NAMING).unwrap_or(&parts[0]);
    let (bottleneck, bottleneck_share) = (named.part, named.share);
    let (run, efficiency) = (status.name.clone(), figure("efficiency"));
    let link = figure("link_latency_seconds").zip(figure("link_bytes_per_second"));
    let slowest_link =
        link.map(|(latency_seconds, bytes_per_second)| SlowestLink { latency_seconds, bytes_per_second });
    let text = |name: &str| status.outputs.get(name).cloned();
    let (reduction, nccl, devices) = (text("reduction"), text("nccl"), text("devices"));
    Ok(TrainingReport {
        run,
        step_seconds,
        parts,
        efficiency,
        slowest_link,
        drawn_ahead_share: figure("drawn_ahead_share"),
        hidden_reduction_share: figure("hidden_reduction_share"),
        reduction,
        nccl,
        devices,
        bottleneck,
        bottleneck_share,
    })
}

fn print_training(report: &TrainingReport, context: &Context) -> anyhow::Result<ExitCode> {
    if context.output.is_structured() {
        context.output.value(&serde_json::to_value(report)?)?;
        return Ok(ExitCode::Ok);
    }
    let mut table = Table::new(&["part of a step", ">time", ">share"]);
    for part in &report.parts {
        table.row([part.part.to_owned(), short_seconds(part.seconds), percent(part.share)]);
    }
    context.output.list(&report.parts, &table)?;
    let efficiency = report.efficiency.map_or_else(String::new, |it| {
        format!("efficiency: {} of the sum of the members' own throughput\n", percent(it))
    });
    let link = report.slowest_link.as_ref().map_or_else(String::new, |it| {
        format!("slowest link: {:.0} us, {:.2} GB/s\n", it.latency_seconds * 1e6, it.bytes_per_second / 1e9)
    });
    let drawn = report.drawn_ahead_share.map_or_else(String::new, |it| format!("steps drawn ahead: {}\n", percent(it)));
    let hidden = report.hidden_reduction_share.map_or_else(String::new, |it| {
        format!("hidden by the backward pass: {} of the time of reductions\n", percent(it))
    });
    let texts = [("devices", &report.devices), ("reduction", &report.reduction), ("NCCL", &report.nccl)];
    let texts = texts.into_iter().filter_map(|(name, text)| Some((name, text.as_ref()?)));
    let texts: String = texts.map(|(name, text)| format!("{name}: {}\n", printable(text))).collect();
    let (name, share) = (report.bottleneck, percent(report.bottleneck_share));
    context
        .output
        .text(&format!("\n{efficiency}{link}{drawn}{hidden}{texts}bottleneck: {name}, {share} of the time\n"))?;
    Ok(ExitCode::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(worker: Option<u32>, kind: TimelineKind, name: &str, begin_us: u64, end_us: u64) -> TimelineSpan {
        let devices = Vec::new();
        TimelineSpan { worker, kind, name: name.to_owned(), stage: 0, begin_us, end_us, lost: false, devices }
    }

    fn timeline() -> Vec<TimelineSpan> {
        use TimelineKind::{Plan, Record, Task, Transfer};
        vec![
            span(None, Plan, "plan of stage 1", 0, 100),
            span(Some(0), Transfer, "a", 100, 110),
            span(Some(0), Task, "a", 110, 1_000),
            span(Some(2), Task, "b", 110, 400),
            span(None, Record, "b", 400, 410),
        ]
    }

    #[test]
    fn uneven_tasks_are_named_as_the_bottleneck() {
        let timeline = timeline();
        let tracks = tracks(&timeline).unwrap();
        let names: Vec<&str> = tracks.iter().map(|track| &*track.device).collect();
        assert_eq!(names, ["worker 0", "worker 2", "driver"]);
        let profile = run_report("r", &timeline, &tracks);
        let analysis = profile.analysis.as_ref().unwrap();
        assert_eq!((analysis.bottleneck, analysis.bottleneck_name.as_deref()), ("imbalance", Some("worker 0")));
        assert!((profile.devices[0].shares.kernels - 0.89).abs() < 1e-9, "{:?}", profile.devices[0]);
        assert!(chrome_trace(&tracks).contains(r#""cat":"copy","name":"a""#));
        let page = page("r", &timeline, &profile);
        assert_eq!(page.matches("<rect").count(), 5);
        assert!(page.contains(">driver<") && page.contains("bottleneck: imbalance worker 0"));
    }

    #[test]
    fn devices_of_a_worker_have_the_sums_of_its_tasks() {
        let mut timeline = timeline();
        let device = |name: &str, memory_bytes, busy_us, computations| SpanDevice {
            name: name.to_owned(),
            memory_bytes,
            busy_us,
            computations,
        };
        timeline.push(span(Some(2), TimelineKind::Task, "c", 400, 900));
        let gpu = |busy_us| device("<H100>", 80 << 30, busy_us, 30);
        timeline[3].devices = vec![device("CPU, 2 threads", 0, 100_000, 0), gpu(1_500_000)];
        timeline[5].devices = vec![device("CPU, 2 threads", 0, 50_000, 0), gpu(500_000)];
        let profile = run_report("r", &timeline, &tracks(&timeline).unwrap());
        let [cpu, h100] = &profile.hardware[..] else { panic!("{:?}", profile.hardware) };
        let common = (2, 2, None);
        assert_eq!((cpu.worker, cpu.tasks, cpu.computations), common);
        assert_eq!((cpu.memory_bytes, cpu.seconds), (None, 0.15));
        assert_eq!((h100.memory_bytes, h100.tasks, h100.computations), (Some(80 << 30), 2, Some(60)));
        assert_eq!((&*h100.device, h100.seconds), ("<H100>", 2.0));
        let page = page("r", &timeline, &profile);
        assert!(page.contains("<h2>Devices</h2>") && page.contains("<td>&lt;H100&gt;</td>"), "{page}");
        let without = run_report("r", &self::timeline(), &tracks(&self::timeline()).unwrap());
        assert!(without.hardware.is_empty() && !super::page("r", &self::timeline(), &without).contains("Devices"));
    }

    #[test]
    fn work_of_a_lost_worker_is_no_progress() {
        let mut timeline = timeline();
        timeline[2].lost = true;
        let tracks = tracks(&timeline).unwrap();
        let profile = run_report("r", &timeline, &tracks);
        assert_eq!((profile.lost, profile.devices[0].shares.kernels), (1, 0.0));
        assert!(sentences(&profile).iter().any(|line| line == "tasks repeated because their worker was lost: 1"));
    }

    #[test]
    fn training_names_reduction_only_if_it_takes_long() {
        let with = |reduce: f64| {
            let figures = [
                ("step_seconds", 0.1),
                ("reduce_seconds", reduce),
                ("efficiency", 0.9),
                ("link_latency_seconds", 2e-5),
                ("link_bytes_per_second", 3e9),
            ];
            let metrics = figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            let outputs = [("nccl", "no candidate: not found"), ("devices", "H100 on 2 workers")];
            let outputs = outputs.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
            training(&RunStatus { name: "r".into(), metrics, outputs, ..RunStatus::default() }).unwrap()
        };
        assert_eq!(
            (with(0.03).bottleneck, with(0.001).bottleneck),
            ("reduction of gradients", "computing and the rest")
        );
        assert!((with(0.03).bottleneck_share - 0.3).abs() < 1e-9 && with(0.03).efficiency == Some(0.9));
        let link = SlowestLink { latency_seconds: 2e-5, bytes_per_second: 3e9 };
        assert_eq!(with(0.03).slowest_link, Some(link));
        assert_eq!(with(0.03).nccl.as_deref(), Some("no candidate: not found"));
        assert_eq!(with(0.03).devices.as_deref(), Some("H100 on 2 workers"));
        assert!(training(&RunStatus::default()).unwrap_err().to_string().contains("no figures of its steps"));
    }
}
