//! What the devices of this worker do, recorded while somebody asks for it.

use crate::shared::Shared;
use engram_kernels::profiler::{Kind, Recorder, Track};
use engram_proto::v1::{self, Problem, ProblemKind, ProfileKind};
use engram_proto::{MAX_PROFILE_MS, MAX_PROFILE_SPANS};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// When to come again while another records, in milliseconds.
const BUSY_RETRY_MS: u64 = 1_000;

/// The recorders of this worker: of its own passes first, then of its GPUs. All are off unless somebody records.
#[derive(Debug, Default)]
pub(crate) struct Profiling {
    recorders: Vec<Recorder>,
    is_recording: AtomicBool,
}

/// Ends a recording, also when whoever asked has gone.
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

    /// The only recording, from now on; `None` while there is another.
    fn begin(&self, most_spans: u32) -> Option<Recording<'_>> {
        if self.is_recording.swap(true, Ordering::AcqRel) {
            return None;
        }
        let origin = Instant::now();
        self.recorders.iter().for_each(|recorder| recorder.start(origin, most_spans as usize));
        Some(Recording(self))
    }
}

impl Recording<'_> {
    /// Ends it; what was recorded, also of the devices that did nothing.
    fn end(self) -> v1::ProfileReply {
        v1::ProfileReply { tracks: self.0.recorders.iter().map(|recorder| to_wire(&recorder.stop())).collect() }
    }
}

/// Records for as long as is asked for, or until this worker stops.
pub(crate) async fn record(shared: &Shared, asked: v1::ProfileRequest) -> Result<v1::ProfileReply, Problem> {
    let v1::ProfileRequest { duration_ms, most_spans } = asked;
    let limits = [("duration_ms", duration_ms, MAX_PROFILE_MS), ("most_spans", most_spans, MAX_PROFILE_SPANS)];
    for (field, value, most) in limits {
        if !(1..=most).contains(&value) {
            let text = format!("{field}: {value} is not allowed; allowed: 1 to {most}");
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
    }
    let Some(recording) = shared.device.profiling.begin(most_spans) else {
        let text = "the devices of this worker are being recorded for somebody else";
        return Err(Problem::of(ProblemKind::Overloaded, text).retry_after(BUSY_RETRY_MS));
    };
    let mut stopping = shared.stopping.subscribe();
    tokio::select! {
        () = sleep(Duration::from_millis(duration_ms.into())) => {}
        _ = stopping.wait_for(|stopping| *stopping) => {}
    }
    Ok(recording.end())
}

fn to_wire(track: &Track) -> v1::ProfileTrack {
    let mut wire = v1::ProfileTrack { device: track.device.clone(), dropped: track.dropped, ..Default::default() };
    for span in &track.spans {
        let known = wire.names.iter().position(|name| name == span.name);
        let name = known.unwrap_or_else(|| {
            wire.names.push(span.name.to_owned());
            wire.names.len() - 1
        });
        let kind = match span.kind {
            Kind::Kernel => ProfileKind::Kernel,
            Kind::Copy => ProfileKind::Copy,
            Kind::Wait => ProfileKind::Wait,
        };
        wire.name_of.push(name as u32);
        wire.kind_of.push(kind.into());
        wire.begin_ns.push(span.begin_ns);
        wire.duration_ns.push(span.end_ns - span.begin_ns);
    }
    wire
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_recording_at_a_time_and_none_outlives_whoever_asked() {
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
            (cpu.device.as_str(), &cpu.names[..], &cpu.name_of[..]),
            ("cpu", &["rank".into(), "epoch".into()][..], &[0, 1][..])
        );
        assert_eq!((cpu.dropped, cpu.begin_ns.len(), cpu.duration_ns.len()), (1, 2, 2));
        assert_eq!(gpu.kind_of, [i32::from(ProfileKind::Wait)]);

        drop(profiling.begin(2).unwrap());
        assert!(recorders.iter().all(|recorder| !recorder.is_on()));
        assert!(profiling.begin(2).unwrap().end().tracks.iter().all(|track| track.names.is_empty()));
    }
}
