//! Prints the cost of the spans of one write, without a recorder, and at several fractions of sampled traces.
//!
//! `cargo run --release -p engram-trace --example overhead`

use engram_trace::{Context, FinishedSpan, Recorder, Span, current, in_span, is_recording, record_child, set_recorder};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

/// Writes per measurement.
const WRITES: u32 = 2_000_000;
/// Measurements, of which the median counts.
const ROUNDS: usize = 5;

/// Bound of sampled trace ids.
static BOUND: AtomicU64 = AtomicU64::new(0);
static RECORDED: AtomicU64 = AtomicU64::new(0);

/// Counts spans, as cheaply as a queue takes them.
#[derive(Debug)]
struct Counter;

impl Recorder for Counter {
    fn samples(&self, trace: u128) -> bool {
        (trace as u64) >> 1 < BOUND.load(Ordering::Relaxed)
    }

    fn follows_parent(&self) -> bool {
        true
    }

    fn record(&self, span: FinishedSpan) {
        RECORDED.fetch_add(1, Ordering::Relaxed);
        drop(black_box(span));
    }
}

/// What client, worker and two replicas do for one write besides the write.
async fn write() {
    let mut span = Span::child_or_root("write").as_client();
    span.set("engram.parts", 1_u64);
    let header = in_span(&span, async { current().map(|context| context.to_string()) }).await;
    let parent = black_box(header).and_then(|header| header.parse::<Context>().ok());
    let served = if is_recording() { Span::server(parent, "Upsert", true) } else { Span::none() };
    in_span(&served, async {
        drop(Span::child("admission"));
        if let Some(context) = current().filter(|context| context.is_sampled()) {
            for step in ["log", "replicate", "apply", "append", "apply"] {
                record_child(context, step, (SystemTime::now(), SystemTime::now()), Vec::new());
            }
        }
    })
    .await;
}

fn measure(runtime: &tokio::runtime::Runtime) -> f64 {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let started = Instant::now();
            runtime.block_on(async {
                for _ in 0..WRITES {
                    write().await;
                }
            });
            started.elapsed().as_secs_f64() * 1e9 / f64::from(WRITES)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    println!("traces off: {:.0} ns per write", measure(&runtime));
    set_recorder(Box::new(Counter))?;
    for (fraction, name) in [(0.0, "0 %"), (0.01, "1 %"), (0.1, "10 %"), (1.0, "100 %")] {
        BOUND.store((fraction * (1_u64 << 63) as f64) as u64, Ordering::Relaxed);
        RECORDED.store(0, Ordering::Relaxed);
        let cost = measure(&runtime);
        let spans = RECORDED.load(Ordering::Relaxed) as f64 / f64::from(WRITES) / ROUNDS as f64;
        println!("{name} sampled: {cost:.0} ns per write, {spans:.2} spans");
    }
    Ok(())
}
