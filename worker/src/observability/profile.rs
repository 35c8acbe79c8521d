//! Recording of what the devices of this worker do.

use crate::shared::Shared;
use engram_kernels::profiler::{Kind, Recorder, Track};
use engram_proto::v1::{self, Problem, ProblemKind, ProfileKind};
use engram_proto::{MAX_PROFILE_MS, MAX_PROFILE_SPANS};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Retry hint while another recording is running, in milliseconds.
const BUSY_RETRY_MS: u64 = 1_000;

/// Recorders of this worker: first of its CPU passes, then of its GPUs. All are off unless a recording is running.
#[derive(Debug, Default)]
pub(crate) struct Profiling {
    recorders: Vec<Recorder>,
    is_recording: AtomicBool,
}

/// Ends a recording, also if the client that requested it has gone.
struct Recording<'a>(&'a Profiling);

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        self.0.recorders.iter().for_each(|recorder| drop(recorder.stop()));
        self.0.is_recording.store(false, Ordering::Release);
    }
}

impl Profiling {
    pub(crate) fn of(recorders: Vec<Recorder>) -> Self {
        Self { recorders, is_recording: AtomicBool::new(false) }
    }

    /// Starts a recording; `None` if one is running.
    fn begin(&self, max_spans: u32) -> Option<Recording<'_>> {
        if self.is_recording.swap(true, Ordering::AcqRel) {
            return None;
        }
        let origin = Instant::now();
        self.recorders.iter().for_each(|recorder| recorder.start(origin, max_spans as usize));
        Some(Recording(self))
    }
}

impl Recording<'_> {
    /// Ends the recording and returns all tracks, including those of idle devices.
    fn end(self) -> v1::ProfileResponse {
        v1::ProfileResponse { tracks: self.0.recorders.iter().map(|recorder| to_wire(&recorder.stop())).collect() }
    }
}

/// Records for the requested time, or until the worker stops.
pub(crate) async fn record(shared: &Shared, request: v1::ProfileRequest) -> Result<v1::ProfileResponse, Problem> {
    let v1::ProfileRequest { duration_ms, max_spans } = request;
    let limits = [("duration_ms", duration_ms, MAX_PROFILE_MS), ("max_spans", max_spans, MAX_PROFILE_SPANS)];
    for (field, value, most) in limits {
        if !(1..=most).contains(&value) {
            let text = format!("{field}: {value} is not allowed; allowed: 1 to {most}");
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
    }
    let Some(recording) = shared.setup.device.profiling.begin(max_spans) else {
        let text = "another recording of this worker's devices is in progress";
        return Err(Problem::of(ProblemKind::Overloaded, text).retry_after(BUSY_RETRY_MS));
    };
    let mut stopping = shared.lifecycle.stopping();
    tokio::select! {
        () = sleep(Duration::from_millis(duration_ms.into())) => {}
        _ = stopping.wait_for(|stopping| *stopping) => {}
    }
    Ok(recording.end())
}

fn to_wire(track: &Track) -> v1::ProfileTrack {
    let mut wire = v1::ProfileTrack { device: track.device.clone(), dropped: track.dropped, ..Default::default() };
    for span in &track.spans {
        let existing = wire.names.iter().position(|name| name == span.name);
        let name = existing.unwrap_or_else(|| {
            wire.names.push(span.name.to_owned());
            wire.names.len() - 1
        });
        let kind = match span.kind {
            Kind::Kernel => ProfileKind::Kernel,
            Kind::Copy => ProfileKind::Copy,
            Kind::Wait => ProfileKind::Wait,
        };
        wire.name_indices.push(name as u32);
        wire.kinds.push(kind.into());
        wire.start_ns.push(span.begin_ns);
        wire.duration_ns.push(span.end_ns - span.begin_ns);
    }
    wire
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_are_exclusive_and_end_with_their_request() {
        let recorders = ["cpu", "gpu"].map(|name| Recorder::off(name.to_owned()));
        let profiling = Profiling::of(recorders.to_vec());
        let recording = profiling.begin(2).unwrap();
        assert!(profiling.begin(2).is_none());
        for name in ["rank", "epoch", "rank"] {
            recorders[0].span(Kind::Kernel, name, || ());
        }
        recorders[1].span(Kind::Wait, "wait", || ());
        let reply = recording.end();
        let [cpu, gpu] = &reply.tracks[..] else { panic!("{reply:?}") };
        assert_eq!(
            (cpu.device.as_str(), &cpu.names[..], &cpu.name_indices[..]),
            ("cpu", &["rank".into(), "epoch".into()][..], &[0, 1][..])
        );
        assert_eq!((cpu.dropped, cpu.start_ns.len(), cpu.duration_ns.len()), (1, 2, 2));
        assert_eq!(gpu.kinds, [i32::from(ProfileKind::Wait)]);

        drop(profiling.begin(2).unwrap());
        assert!(recorders.iter().all(|recorder| !recorder.is_on()));
        assert!(profiling.begin(2).unwrap().end().tracks.iter().all(|track| track.names.is_empty()));
    }
}
