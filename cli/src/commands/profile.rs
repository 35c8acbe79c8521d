//! `engram profile`: where the time of a worker's devices goes.

use crate::args::Context;
use crate::error::said;
use crate::local::admin;
use crate::output::{Table, count};
use crate::target::Target;
use anyhow::{Context as _, ensure};
use engram_api::ExitCode;
use engram_kernels::profiler::{Analysis, Bottleneck, Kind, Parts, Span, Track, analyse, chrome_trace};
use engram_proto::v1::{self, ProfileKind};
use engram_proto::{MAX_PROFILE_MS, MAX_PROFILE_SPANS};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Seconds that may be recorded.
const SECONDS: std::ops::RangeInclusive<f64> = 0.01..=MAX_PROFILE_MS as f64 / 1e3;
/// Names of kernels and passes are few; a worker that tells of more makes them up.
const MAX_NAMES: usize = 1_000;

/// Record what a worker's devices do for a while, and say what bounds them
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram profile                            worker 0 for 5 seconds, to profile-0.json
  engram profile 2 --seconds 20
  engram profile --trace rank.json -o json | jq .bottleneck
  engram -n research profile 1              a worker in Kubernetes

The trace is for https://ui.perfetto.dev or chrome://tracing. While a GPU is recorded each of its kernels is waited for, so it is slower.")]
pub(crate) struct Arguments {
    /// Number of the worker
    #[arg(value_name = "WORKER", default_value_t = 0)]
    worker: u32,
    /// How long to record
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    seconds: f64,
    /// Where the timeline goes, as Chrome trace JSON; profile-WORKER.json unless said
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// What was found, for programs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Found {
    worker: u32,
    seconds: f64,
    trace: String,
    devices: Vec<Device>,
    /// Absent where nothing was done.
    #[serde(flatten)]
    analysis: Option<Verdict>,
}

/// A device; shares of the time from the first span of all to the last.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    device: String,
    spans: usize,
    dropped: u64,
    /// Absent where no device did anything.
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

/// What is to be said of all devices that passes were for.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Verdict {
    load_imbalance: f64,
    transfer_share: f64,
    synchronization_share: f64,
    bottleneck: &'static str,
    /// The part of the time that it takes.
    bottleneck_share: f64,
    /// The kernel, or the device that others wait for; absent for the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    bottleneck_name: Option<String>,
    advice: &'static str,
}

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let Arguments { worker, seconds, trace } = arguments;
    if !SECONDS.contains(seconds) {
        let message = format!("--seconds is {seconds}; allowed: {} to {} seconds", SECONDS.start(), SECONDS.end());
        return Err(said(ExitCode::Usage, message));
    }
    let target = Target::find(context).await?;
    let doors = target.administration();
    if doors.is_empty() {
        let message = "this command asks a worker's administration, which --address does not name; name a local cluster, or one in Kubernetes";
        return Err(said(ExitCode::Usage, message));
    }
    let Some((_, door)) = doors.iter().find(|(ordinal, _)| ordinal == worker) else {
        let known: Vec<String> = doors.iter().map(|(ordinal, _)| ordinal.to_string()).collect();
        return Err(said(ExitCode::NotFound, format!("there is no worker {worker}; there are: {}", known.join(", "))));
    };
    context.output.note(format!("recording worker {worker} for {seconds} s"));
    let asked = v1::ProfileRequest { duration_ms: (seconds * 1e3) as u32, most_spans: MAX_PROFILE_SPANS };
    let reply = admin::profile(door, asked).await?;
    let tracks = tracks(reply)?;

    let path = trace.clone().unwrap_or_else(|| PathBuf::from(format!("profile-{worker}.json")));
    std::fs::write(&path, chrome_trace(&tracks)).with_context(|| format!("failed to write {}", path.display()))?;
    let found = found(*worker, *seconds, path.display().to_string(), &tracks);
    if context.output.is_structured() {
        context.output.value(&serde_json::to_value(&found)?)?;
        return Ok(ExitCode::Ok);
    }
    let mut table = Table::new(&["device", ">spans", ">kernels", ">copies", ">waits", ">idle"]);
    for device in &found.devices {
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
    context.output.list(&found.devices, &table)?;
    for device in found.devices.iter().filter(|device| device.dropped > 0) {
        context.output.note(format!("{}: {} spans more were dropped", device.device, count(device.dropped)));
    }
    match &found.analysis {
        None => context.output.note("no device did anything meanwhile: ask the cluster for something"),
        Some(verdict) => {
            let name = verdict.bottleneck_name.as_ref().map_or_else(String::new, |name| format!(" {name}"));
            context.output.text(&format!(
                "\nload imbalance {}, transfer {}, synchronization {}\nbottleneck: {}{name}, {} of the time: {}\n",
                percent(verdict.load_imbalance),
                percent(verdict.transfer_share),
                percent(verdict.synchronization_share),
                verdict.bottleneck,
                percent(verdict.bottleneck_share),
                verdict.advice,
            ))?;
        }
    }
    context.output.note(format!("the timeline is in {}, for https://ui.perfetto.dev", found.trace));
    Ok(ExitCode::Ok)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// The tracks as the profiler knows them.
fn tracks(reply: v1::ProfileReply) -> anyhow::Result<Vec<Track>> {
    let mut names = BTreeMap::new();
    reply.tracks.into_iter().map(|track| from_wire(track, &mut names)).collect()
}

fn from_wire(wire: v1::ProfileTrack, known: &mut BTreeMap<String, &'static str>) -> anyhow::Result<Track> {
    let count = wire.begin_ns.len();
    let lengths = [wire.name_of.len(), wire.kind_of.len(), wire.duration_ns.len()];
    ensure!(lengths.iter().all(|&length| length == count), "the worker told of spans without all that belongs to them");
    let names: Vec<&'static str> = wire
        .names
        .into_iter()
        .map(|name| {
            ensure!(known.len() < MAX_NAMES, "the worker told of more than {MAX_NAMES} names");
            // Names of the profiler live as long as the process: here for one command.
            Ok(*known.entry(name).or_insert_with_key(|name| String::leak(name.clone())))
        })
        .collect::<anyhow::Result<_>>()?;
    let mut spans = Vec::with_capacity(count);
    for at in 0..count {
        let name = names.get(wire.name_of[at] as usize).context("the worker told of a span without a name")?;
        let kind = match ProfileKind::try_from(wire.kind_of[at]) {
            Ok(ProfileKind::Kernel) => Kind::Kernel,
            Ok(ProfileKind::Copy) => Kind::Copy,
            // What a later version tells of is no work of a device that this one knows.
            Ok(ProfileKind::Wait | ProfileKind::Unspecified) | Err(_) => Kind::Wait,
        };
        let begin_ns = wire.begin_ns[at];
        spans.push(Span { kind, name, begin_ns, end_ns: begin_ns.saturating_add(wire.duration_ns[at]) });
    }
    Ok(Track { device: wire.device, spans, dropped: wire.dropped })
}

/// Which tracks compete: those of GPUs where one did anything, since the worker's own passes then wait for them.
fn compared(tracks: &[Track]) -> &[Track] {
    match tracks.split_first() {
        Some((_, gpus)) if gpus.iter().any(|track| !track.spans.is_empty()) => gpus,
        _ => &tracks[..tracks.len().min(1)],
    }
}

fn found(worker: u32, seconds: f64, trace: String, tracks: &[Track]) -> Found {
    let whole = analyse(tracks);
    let devices = tracks.iter().enumerate().map(|(at, track)| Device {
        device: track.device.clone(),
        spans: track.spans.len(),
        dropped: track.dropped,
        shares: whole.as_ref().map(|whole| shares(&whole.devices[at], whole.window_ns as f64)),
    });
    let compared = compared(tracks);
    let analysis = analyse(compared).map(|analysis| verdict(&analysis, compared));
    Found { worker, seconds, trace, devices: devices.collect(), analysis }
}

fn shares(parts: &Parts, window: f64) -> Shares {
    Shares {
        kernels: parts.kernels / window,
        copies: parts.copies / window,
        waits: parts.waits / window,
        idle: parts.idle / window,
    }
}

fn verdict(analysis: &Analysis, tracks: &[Track]) -> Verdict {
    let (bottleneck, bottleneck_share, bottleneck_name, advice) = match &analysis.bottleneck {
        Bottleneck::Kernel { name, share } => {
            ("kernel", *share, Some((*name).to_owned()), "the devices compute; this is what they do longest")
        }
        Bottleneck::Transfer { share } => ("transfer", *share, None, "devices wait for their data"),
        Bottleneck::Imbalance { device, share } => {
            let name = tracks.get(*device).map(|track| track.device.clone());
            ("imbalance", *share, name, "the others are done before it: partitions are spread unevenly")
        }
        Bottleneck::Synchronization { share } => {
            ("synchronization", *share, None, "devices wait, and not because another has more to do")
        }
        Bottleneck::Host { share } => ("host", *share, None, "nothing is asked of the devices"),
    };
    Verdict {
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
            name_of: spans.iter().map(|span| span.0).collect(),
            kind_of: spans.iter().map(|span| span.1.into()).collect(),
            begin_ns: spans.iter().map(|span| span.2).collect(),
            duration_ns: spans.iter().map(|span| span.3).collect(),
            dropped: 3,
        }
    }

    #[test]
    fn gpus_are_compared_with_each_other_and_the_worker_with_nobody() {
        use ProfileKind::{Copy, Kernel, Wait};
        let reply = v1::ProfileReply {
            tracks: vec![
                wire("cpu", &["rank"], &[(0, Wait, 0, 1_000)]),
                wire("gpu 0", &["upload", "sort"], &[(0, Copy, 0, 50), (1, Kernel, 50, 950)]),
                wire("gpu 1", &["sort"], &[(0, Kernel, 0, 400)]),
            ],
        };
        let tracks = tracks(reply).unwrap();
        let found = found(0, 1.0, "t.json".into(), &tracks);
        assert_eq!(found.devices[0].shares, Some(Shares { kernels: 0.0, copies: 0.0, waits: 1.0, idle: 0.0 }));
        assert_eq!(found.devices[1].shares, Some(Shares { kernels: 0.95, copies: 0.05, waits: 0.0, idle: 0.0 }));
        let verdict = found.analysis.unwrap();
        assert_eq!((verdict.bottleneck, verdict.bottleneck_name.as_deref()), ("imbalance", Some("gpu 0")));
        assert!((verdict.bottleneck_share - 0.3).abs() < 1e-9 && (verdict.transfer_share - 0.025).abs() < 1e-9);
    }

    #[test]
    fn a_worker_without_gpus_is_bound_by_its_own_passes() {
        let reply = v1::ProfileReply {
            tracks: vec![
                wire("cpu", &["rank", "write"], &[(0, ProfileKind::Kernel, 0, 970), (1, ProfileKind::Copy, 970, 30)]),
                wire("gpu", &[], &[]),
            ],
        };
        let tracks = tracks(reply).unwrap();
        let found = found(0, 1.0, "t.json".into(), &tracks);
        let verdict = found.analysis.unwrap();
        assert_eq!((verdict.bottleneck, verdict.bottleneck_name.as_deref()), ("kernel", Some("rank")));
        assert!(chrome_trace(&tracks).contains(r#""cat":"copy","name":"write""#));
        assert_eq!(found.devices[0].dropped, 3);
    }

    #[test]
    fn a_worker_that_did_nothing_has_no_verdict_and_nonsense_is_refused() {
        let nothing = tracks(v1::ProfileReply { tracks: vec![wire("cpu", &[], &[])] }).unwrap();
        assert!(found(0, 1.0, String::new(), &nothing).analysis.is_none());
        let unnamed = wire("cpu", &["rank"], &[(1, ProfileKind::Kernel, 0, 1)]);
        assert!(tracks(v1::ProfileReply { tracks: vec![unnamed] }).is_err());
        let mut short = wire("cpu", &["rank"], &[(0, ProfileKind::Kernel, 0, 1)]);
        short.duration_ns.clear();
        assert!(tracks(v1::ProfileReply { tracks: vec![short] }).is_err());
    }
}
