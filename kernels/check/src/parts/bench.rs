//! Pass durations on the device: the median of many runs after warm-up, kernels by the device's clock and calls by the host's.

mod rank;
mod recall;
mod training;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use engram_kernels::gpu::Driver;
use engram_kernels::gpu::cuda::{Cuda, DeviceTiming};
use engram_kernels::priority::{Draws, Priorities};
use engram_kernels::{Device, DigestRequest, Error, Gpu, GroupUpdate, Segment, Update};
use engram_memory::{Group, MemoryId, ONE, mix64};

use super::Part;
use super::arena::Arena;
use crate::report::{Figure, PartResult, Row};

/// Warm-up runs.
const WARM_UP: usize = 3;
/// Number of runs that suffices if they took long enough.
const ENOUGH: usize = 20;
const LONG_ENOUGH: Duration = Duration::from_secs(1);
/// Updates of one learning epoch, and of one batch.
const UPDATES: u64 = 10_000;
/// Updates, look-ups and reads of a large batch.
const MANY: u64 = 1_000_000;
const DRAWS: u32 = 100_000;
/// Sizes of an epoch, and the budget of its call in milliseconds.
const EPOCHS: [(u64, f64); 2] = [(1_000_000, 0.040), (10_000_000, 0.050)];

/// Operations of the device that count.
#[derive(Clone, Copy)]
enum TimingFilter {
    /// These operations, regardless of others in between.
    Sum(&'static [&'static str]),
    /// All kernels.
    Kernels,
    /// From the start of the first operation to the end of the last.
    Span(&'static str, &'static str),
}

impl TimingFilter {
    fn milliseconds(self, timed: &[DeviceTiming]) -> Result<f64> {
        let sum = |counts: &dyn Fn(&DeviceTiming) -> bool| -> f64 {
            timed.iter().filter(|it| counts(it)).map(|it| it.end_ms - it.begin_ms).sum()
        };
        let copies = ["upload", "download", "copy"];
        Ok(match self {
            Self::Sum(names) => {
                ensure!(timed.iter().any(|it| names.contains(&it.name)), "the device executed none of {names:?}");
                sum(&|it| names.contains(&it.name))
            }
            Self::Kernels => sum(&|it| !copies.contains(&it.name)),
            Self::Span(first, last) => {
                let begin = timed.iter().find(|it| it.name == first).with_context(|| format!("no {first}"))?;
                let end = timed.iter().rfind(|it| it.name == last).with_context(|| format!("no {last}"))?;
                end.end_ms - begin.begin_ms
            }
        })
    }
}

/// Measures passes.
#[derive(Clone, Copy)]
struct Clock {
    /// Maximum runs.
    repeats: usize,
}

impl Clock {
    /// Measures a pass that must read or write `bytes`.
    fn row(
        self,
        gpu: &mut Gpu<Cuda>,
        (pass, workload): (&str, &str),
        memories: u64,
        bytes: u64,
        counted: TimingFilter,
        mut work: impl FnMut(&mut Gpu<Cuda>) -> Result<(), Error>,
    ) -> Result<Row> {
        eprintln!("{pass}, {memories} memories");
        for _ in 0..WARM_UP {
            work(gpu)?;
        }
        let (mut device, mut calls) = (Vec::new(), Vec::new());
        let begin = Instant::now();
        while device.len() < self.repeats.max(1) && (device.len() < ENOUGH || begin.elapsed() < LONG_ENOUGH) {
            let call = Instant::now();
            work(gpu)?;
            calls.push(call.elapsed().as_secs_f64() * 1e3);
            gpu.driver_mut().time();
            work(gpu)?;
            device.push(counted.milliseconds(&gpu.driver_mut().timings()?)?);
        }
        Ok(Row {
            pass: pass.to_owned(),
            workload: workload.to_owned(),
            memories,
            bytes,
            device: Figure::of(device),
            call: Figure::of(calls),
            of_copy: None,
            promised_ms: None,
            peers: Vec::new(),
        })
    }
}

/// Measures all passes.
///
/// # Errors
/// When the device fails, or has not enough memory.
pub(super) fn run(part: &Part) -> Result<PartResult> {
    let clock = Clock { repeats: part.repeats };
    let memories = u32::try_from(part.memories).context("too many memories")?;
    let ranked = u32::try_from(part.ranked).context("too many memories to rank")?;
    let mut gpu = Gpu::new(part.open()?, "gpu".to_owned());
    let mut rows = copies(clock, &mut gpu, part.memories)?;
    let copy_gb_per_s = gb_per_s(&rows[0]);
    rows.extend(epochs(clock, part)?);
    rows.extend(passes(clock, &mut gpu, memories)?);
    // Freed before the other passes allocate.
    let gpu = Gpu::new(gpu.into_driver(), "gpu".to_owned());
    let (of_rank, gpu) = rank::rows(clock, gpu, ranked, part.scratch.as_deref())?;
    rows.extend(of_rank);
    rows.extend(recall::rows(clock, gpu, memories)?);
    rows.extend(training::rows(clock, part)?);
    for row in &mut rows {
        row.of_copy = (row.bytes > 0).then(|| gb_per_s(row) / copy_gb_per_s);
    }
    let detail = format!("{} rows; a copy within the device reaches {copy_gb_per_s:.0} GB/s", rows.len());
    Ok(PartResult { detail, copy_gb_per_s: Some(copy_gb_per_s), rows, ..PartResult::default() })
}

fn gb_per_s(row: &Row) -> f64 {
    row.bytes as f64 / (row.device.median * 1e6)
}

/// Measures reference copies: within the device, and to and from it.
fn copies(clock: Clock, gpu: &mut Gpu<Cuda>, memories: u64) -> Result<Vec<Row>> {
    let bytes = memories as usize * 8;
    let (from, to) = (gpu.driver_mut().allocate(bytes)?, gpu.driver_mut().allocate(bytes)?);
    let within = clock.row(
        gpu,
        ("copy within the device", "copy"),
        memories,
        2 * bytes as u64,
        TimingFilter::Sum(&["copy"]),
        |gpu| {
            gpu.driver_mut().copy(&from, &to, bytes)?;
            gpu.driver_mut().wait()
        },
    )?;
    let mut host = vec![7_u8; bytes / 2];
    let uploads = TimingFilter::Span("upload", "upload");
    let upload = clock.row(gpu, ("upload, from pageable memory", ""), memories, 0, uploads, |gpu| {
        gpu.driver_mut().upload(&to, 0, &host)?;
        gpu.driver_mut().wait()
    })?;
    let downloads = TimingFilter::Span("download", "download");
    let download = clock.row(gpu, ("download, to pageable memory", ""), memories, 0, downloads, |gpu| {
        gpu.driver_mut().download(&to, 0, &mut host)
    })?;
    Ok(vec![within, upload, download])
}

/// Measures learning epochs of the sizes with a budget, and of the size of all other passes.
fn epochs(clock: Clock, part: &Part) -> Result<Vec<Row>> {
    let mut sizes: Vec<(u64, Option<f64>)> =
        EPOCHS.iter().filter(|size| size.0 < part.memories).map(|&(size, promised)| (size, Some(promised))).collect();
    sizes.push((part.memories, EPOCHS.iter().find(|size| size.0 == part.memories).map(|size| size.1)));
    let mut rows = Vec::new();
    for (size, promised_ms) in sizes {
        let arena = Arena::new(size as u32);
        let mut gpu = Gpu::new(part.open()?, "gpu".to_owned());
        arena.fill(&mut gpu)?;
        let (updates, mut quality) = (updates(UPDATES.min(size), size), Vec::new());
        // With few memories so many updates overflow the buckets and are sorted.
        let kernels = TimingFilter::Kernels;
        let row = clock.row(
            &mut gpu,
            ("epoch: 10,000 updates by slot, quality", "epoch-by-slot"),
            size,
            5 * size,
            kernels,
            |gpu| gpu.epoch(&arena.segments, &updates, &mut quality),
        )?;
        rows.push(Row { promised_ms, ..row });
    }
    Ok(rows)
}

/// Updates spread over memories, up and down.
fn updates(count: u64, memories: u64) -> Vec<Update> {
    let delta = |n: u64| if n.is_multiple_of(2) { 42_949_673 } else { -42_949_672 };
    (0..count).map(|n| Update { slot: (mix64(n + 77) % memories) as u32, delta: delta(n) }).collect()
}

fn passes(clock: Clock, gpu: &mut Gpu<Cuda>, memories: u32) -> Result<Vec<Row>> {
    let arena = Arena::new(memories);
    arena.fill(gpu)?;
    let (segments, ids, all) = (&arena.segments, &arena.ids, u64::from(memories));
    let folding: Vec<Segment> = segments.iter().map(|segment| Segment { fold: 1, ..*segment }).collect();
    let many = MANY.min(all);
    let slots: Vec<u32> = (0..many).map(|n| (mix64(n) % all) as u32).collect();
    let lookup_ids: Vec<MemoryId> = slots.iter().map(|&slot| ids.get(slot)).collect();
    let (few_updates, many_updates) = (updates(UPDATES.min(all), all), updates(many, all));
    let groups: Vec<GroupUpdate> =
        (0..segments.len() as u32).map(|segment| GroupUpdate { segment, group: Group(1), delta: 5 }).collect();
    let order: Vec<u32> = (0..ids.len() as u32).collect();
    let priorities = Priorities::new(39_322);
    let (mut quality, mut digests, mut counts, mut read) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());

    let mut rows = Vec::new();
    let mut row = |gpu: &mut Gpu<Cuda>,
                   names: (&str, &str),
                   bytes: u64,
                   counted: TimingFilter,
                   work: &mut dyn FnMut(&mut Gpu<Cuda>) -> Result<(), Error>|
     -> Result<()> {
        rows.push(clock.row(gpu, names, all, bytes, counted, work)?);
        Ok(())
    };
    // Bytes: a potential is 4, a group 1, an id 8.
    row(gpu, ("quality of 2 groups", "quality"), 5 * all, TimingFilter::Sum(&["fold_quality"]), &mut |gpu| {
        gpu.epoch(segments, &[], &mut quality)
    })?;
    row(gpu, ("fold and quality", ""), 9 * all, TimingFilter::Sum(&["fold_quality"]), &mut |gpu| {
        gpu.epoch(&folding, &[], &mut quality)
    })?;
    row(gpu, ("updates by slot, 10,000", ""), 0, TimingFilter::Kernels, &mut |gpu| gpu.update(segments, &few_updates))?;
    row(gpu, ("updates by slot, 1,000,000", ""), 0, TimingFilter::Kernels, &mut |gpu| {
        gpu.update(segments, &many_updates)
    })?;
    row(
        gpu,
        ("update of one group of all segments", ""),
        7 * all,
        TimingFilter::Sum(&["update_groups"]),
        &mut |gpu| {
            counts.clear();
            gpu.update_groups(segments, &groups, &mut counts)
        },
    )?;
    row(gpu, ("histogram, 2^12 bins", ""), 5 * all, TimingFilter::Sum(&["weight_histogram"]), &mut |gpu| {
        gpu.histogram(segments, 12).map(drop)
    })?;
    row(gpu, ("digest", ""), 13 * all, TimingFilter::Sum(&["digest"]), &mut |gpu| {
        gpu.digest(&DigestRequest { segments, ids, content: None }, &mut digests)
    })?;
    row(gpu, ("reads by slot, 1,000,000", "gather"), 0, TimingFilter::Kernels, &mut |gpu| gpu.read(&slots, &mut read))?;
    row(
        gpu,
        ("prefix sums of priorities", "prefix-sums"),
        12 * all,
        TimingFilter::Sum(&["priority_sums"]),
        &mut |gpu| gpu.priority_sums(segments, &order, &priorities).map(drop),
    )?;
    let sums = gpu.priority_sums(segments, &order, &priorities)?;
    let mut total = 0;
    let offsets: Vec<u64> = sums
        .shares()
        .iter()
        .map(|share| {
            total += share.total;
            total - share.total
        })
        .collect();
    let draws = Draws { seed: 5, step: 1, stream: 0, count: DRAWS, total };
    row(gpu, ("100,000 prioritized draws", "draws"), 0, TimingFilter::Sum(&["sample"]), &mut |gpu| {
        gpu.sample(&sums, &offsets, &draws).map(drop)
    })?;
    drop(sums);
    gpu.build_index(u64::from(ONE) + 5, ids)?;
    row(gpu, ("look-ups by id, 1,000,000", ""), 0, TimingFilter::Sum(&["index_find"]), &mut |gpu| {
        gpu.find(&lookup_ids).map(drop)
    })?;
    Ok(rows)
}
