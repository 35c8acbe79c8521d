//! Analysis of timelines: how time divides, how evenly, and the bottleneck.

use super::{Kind, Span, Track};
use std::collections::BTreeMap;

/// Minimum share of the time for a loss to be the bottleneck: twice the 5 % that a good assignment stays within.
const WORTH_NAMING: f64 = 0.1;

/// Division of the time of one device, or of all. Overlapping spans count once: as kernel, otherwise as copy, otherwise as wait, so that a copy
/// hidden by a kernel is no transfer time. In nanoseconds of one device, or as shares that add up to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Parts {
    /// Kernels.
    pub kernels: f64,
    /// Copies not hidden by kernels.
    pub copies: f64,
    /// Waits not hidden by either.
    pub waits: f64,
    /// Time without spans: the host had no work for the device.
    pub idle: f64,
}

impl Parts {
    fn busy(&self) -> f64 {
        self.kernels + self.copies
    }
}

/// Result of an analysis.
#[derive(Debug, Clone, PartialEq)]
pub struct Analysis {
    /// From the first start to the last end, over all devices.
    pub window_ns: u64,
    /// By track, in nanoseconds; each adds up to the window.
    pub devices: Vec<Parts>,
    /// Shares of the time of all devices: copies are the transfer share, waits the synchronization share.
    pub shares: Parts,
    /// Imbalance of busy time (kernels and copies): max / mean - 1. 0 for one device.
    pub imbalance: f64,
    /// The bottleneck.
    pub bottleneck: Bottleneck,
}

/// The largest reducible part of the time.
#[derive(Debug, Clone, PartialEq)]
pub enum Bottleneck {
    /// No loss is significant: the devices compute, longest in this kernel.
    Kernel {
        /// Name of the kernel.
        name: &'static str,
        /// Share of the time of all devices.
        share: f64,
    },
    /// Devices wait for data transfers.
    Transfer {
        /// Share of the time.
        share: f64,
    },
    /// Devices finish before the busiest one: partitions are unbalanced.
    Imbalance {
        /// Index of the busiest track.
        device: usize,
        /// Share of the time lost by the others.
        share: f64,
    },
    /// Devices wait, but not for a busier one.
    Synchronization {
        /// Share of the time.
        share: f64,
    },
    /// The devices have no work.
    Host {
        /// Share of the time.
        share: f64,
    },
}

impl Bottleneck {
    const fn share(&self) -> f64 {
        match self {
            Self::Kernel { share, .. }
            | Self::Transfer { share }
            | Self::Imbalance { share, .. }
            | Self::Synchronization { share }
            | Self::Host { share } => *share,
        }
    }
}

/// Analyses the tracks of one timeline; returns `None` for an empty window.
///
/// With B_d the busy time of device d in the window W, its loss W - B_d has two parts: max B - B_d, which a balanced assignment would remove,
/// and W - max B, during which even the busiest device waits or idles. A device's waits count as imbalance first, since it waits for the
/// busiest; the remainder is synchronization, and the rest of the loss is the host's. The largest of imbalance, synchronization, host and
/// transfer is the bottleneck if it takes a tenth of the time; otherwise it is the longest kernel.
pub fn analyse(tracks: &[Track]) -> Option<Analysis> {
    let spans = || tracks.iter().flat_map(|track| &track.spans);
    let begin = spans().map(|span| span.begin_ns).min()?;
    let end = spans().map(|span| span.end_ns).max()?;
    let window_ns = end - begin;
    if window_ns == 0 {
        return None;
    }
    let window = window_ns as f64;
    let devices: Vec<Parts> = tracks.iter().map(|track| parts(&track.spans, window_ns)).collect();
    let all = window * devices.len() as f64;
    let share = |part: fn(&Parts) -> f64| devices.iter().map(part).sum::<f64>() / all;
    let shares = Parts {
        kernels: share(|it| it.kernels),
        copies: share(|it| it.copies),
        waits: share(|it| it.waits),
        idle: share(|it| it.idle),
    };

    let mut busiest = 0;
    for (device, parts) in devices.iter().enumerate() {
        if parts.busy() > devices[busiest].busy() {
            busiest = device;
        }
    }
    let most = devices[busiest].busy();
    let mean = shares.busy() * window;
    let (mut uneven, mut synchronizing, mut idle) = (0.0, 0.0, 0.0);
    for parts in &devices {
        let behind = most - parts.busy();
        let waiting = (parts.waits - behind).max(0.0);
        uneven += behind;
        synchronizing += waiting;
        idle += window - most - waiting;
    }
    let mut losses = [
        Bottleneck::Transfer { share: shares.copies },
        Bottleneck::Imbalance { device: busiest, share: uneven / all },
        Bottleneck::Synchronization { share: synchronizing / all },
        Bottleneck::Host { share: idle / all },
    ];
    losses.sort_by(|one, other| other.share().total_cmp(&one.share()));
    let [largest, ..] = losses;
    let kernel = longest_kernel(tracks).map(|(name, ns)| Bottleneck::Kernel { name, share: ns as f64 / all });
    let bottleneck = if largest.share() >= WORTH_NAMING { largest } else { kernel.unwrap_or(largest) };
    let imbalance = if mean > 0.0 { most / mean - 1.0 } else { 0.0 };
    Some(Analysis { window_ns, devices, shares, imbalance, bottleneck })
}

/// Divides one device's window.
fn parts(spans: &[Span], window_ns: u64) -> Parts {
    // Starts and ends in time order; the first kind among open spans counts.
    let mut turns: Vec<(u64, Kind, i64)> =
        spans.iter().flat_map(|span| [(span.begin_ns, span.kind, 1), (span.end_ns, span.kind, -1)]).collect();
    turns.sort_unstable();
    let (mut open, mut times) = ([0_i64; 3], [0_u64; 3]);
    for (turn, &(at, kind, change)) in turns.iter().enumerate() {
        open[kind as usize] += change;
        let next = turns.get(turn + 1).map_or(at, |next| next.0);
        if let Some(first) = open.iter().position(|&open| open > 0) {
            times[first] += next - at;
        }
    }
    let [kernels, copies, waits] = times;
    let idle = window_ns - kernels - copies - waits;
    Parts { kernels: kernels as f64, copies: copies as f64, waits: waits as f64, idle: idle as f64 }
}

/// Returns the kernel with the longest total time; ties go to the first by name.
fn longest_kernel(tracks: &[Track]) -> Option<(&'static str, u64)> {
    let mut kernels: BTreeMap<&'static str, u64> = BTreeMap::new();
    for span in tracks.iter().flat_map(|track| &track.spans).filter(|span| span.kind == Kind::Kernel) {
        *kernels.entry(span.name).or_default() += span.end_ns - span.begin_ns;
    }
    kernels.into_iter().rev().max_by_key(|&(_, ns)| ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Kind::{Copy, Kernel, Wait};

    fn track(spans: &[(Kind, &'static str, u64, u64)]) -> Track {
        let spans = spans.iter().map(|&(kind, name, begin_ns, end_ns)| Span { kind, name, begin_ns, end_ns });
        Track { device: "made up".to_owned(), spans: spans.collect(), dropped: 0 }
    }

    fn close(one: f64, other: f64) -> bool {
        (one - other).abs() < 1e-12
    }

    #[test]
    fn empty_timeline_has_no_analysis() {
        assert_eq!(analyse(&[]), None);
        assert_eq!(analyse(&[track(&[])]), None);
        assert_eq!(analyse(&[track(&[(Kernel, "epoch", 5, 5)])]), None);
    }

    #[test]
    fn devices_that_only_compute_are_bound_by_their_longest_kernel() {
        let one = track(&[(Kernel, "epoch", 1_000, 1_060), (Kernel, "sort", 1_060, 1_098)]);
        let two = track(&[(Kernel, "sort", 1_002, 1_040), (Kernel, "epoch", 1_040, 1_100)]);
        let analysis = analyse(&[one, two]).unwrap();
        assert_eq!((analysis.window_ns, analysis.imbalance), (100, 0.0));
        assert_eq!(analysis.shares, Parts { kernels: 0.98, copies: 0.0, waits: 0.0, idle: 0.02 });
        assert_eq!(analysis.bottleneck, Bottleneck::Kernel { name: "epoch", share: 0.6 });
    }

    #[test]
    fn waiting_for_a_busier_device_is_imbalance() {
        // One computes all the time; two waits at a barrier for half of it, three idles for a quarter.
        let one = track(&[(Kernel, "epoch", 0, 100)]);
        let two = track(&[(Kernel, "epoch", 0, 50), (Wait, "barrier", 50, 100)]);
        let three = track(&[(Kernel, "epoch", 0, 75)]);
        let analysis = analyse(&[two, one, three]).unwrap();
        assert!(close(analysis.imbalance, 100.0 / 75.0 - 1.0));
        assert!(close(analysis.shares.waits, 50.0 / 300.0) && close(analysis.shares.idle, 25.0 / 300.0));
        let Bottleneck::Imbalance { device: 1, share } = analysis.bottleneck else { panic!("{analysis:?}") };
        assert!(close(share, 75.0 / 300.0));

        // Only the wait beyond the other's work is synchronization: 20 of 60; 20 are unattributed.
        let one = track(&[(Kernel, "epoch", 0, 80)]);
        let two = track(&[(Kernel, "epoch", 0, 40), (Wait, "barrier", 40, 100)]);
        let analysis = analyse(&[one, two]).unwrap();
        let Bottleneck::Imbalance { device: 0, share } = analysis.bottleneck else { panic!("{analysis:?}") };
        assert!(close(share, 40.0 / 200.0) && close(analysis.shares.waits, 60.0 / 200.0));
    }

    #[test]
    fn waiting_of_equally_busy_devices_is_synchronization() {
        let own = [(Kernel, "epoch", 0, 60), (Wait, "all-reduce", 60, 95), (Kernel, "epoch", 95, 100)];
        let analysis = analyse(&[track(&own), track(&own)]).unwrap();
        assert_eq!((analysis.imbalance, analysis.shares.waits), (0.0, 0.35));
        assert_eq!(analysis.bottleneck, Bottleneck::Synchronization { share: 0.35 });
    }

    #[test]
    fn copy_counts_only_outside_of_kernels() {
        let hidden = track(&[(Kernel, "recall_keys", 0, 100), (Copy, "upload", 0, 90), (Wait, "download", 0, 100)]);
        let analysis = analyse(std::slice::from_ref(&hidden)).unwrap();
        assert_eq!(analysis.shares, Parts { kernels: 1.0, ..Parts::default() });
        assert_eq!(analysis.bottleneck, Bottleneck::Kernel { name: "recall_keys", share: 1.0 });

        // Overlapping copies count once; half of them are hidden by the kernel.
        let exposed = track(&[
            (Copy, "upload", 0, 40),
            (Copy, "upload", 10, 60),
            (Kernel, "recall_keys", 30, 100),
            (Wait, "download", 20, 100),
        ]);
        let analysis = analyse(&[exposed]).unwrap();
        assert_eq!(analysis.devices[0], Parts { kernels: 70.0, copies: 30.0, waits: 0.0, idle: 0.0 });
        assert_eq!(analysis.bottleneck, Bottleneck::Transfer { share: 0.3 });
    }

    #[test]
    fn devices_without_work_wait_for_the_host() {
        let one = track(&[(Kernel, "epoch", 0, 10), (Kernel, "epoch", 90, 100)]);
        let two = track(&[(Kernel, "epoch", 0, 20), (Wait, "barrier", 20, 30)]);
        let analysis = analyse(&[one, two]).unwrap();
        assert_eq!(analysis.shares, Parts { kernels: 0.2, copies: 0.0, waits: 0.05, idle: 0.75 });
        // Both are equally busy, so the wait is not for the other's work.
        assert_eq!(analysis.bottleneck, Bottleneck::Host { share: 0.75 });
    }

    #[test]
    fn parts_add_up_to_the_window_for_any_overlap() {
        let kinds = [Kernel, Copy, Wait];
        let random = |seed: u64| {
            let number = |at: u64| engram_memory::mix64(seed * 1_000 + at);
            let spans = (0..20).map(|at| {
                let begin_ns = number(at) % 1_000;
                let kind = kinds[(number(at + 100) % 3) as usize];
                Span { kind, name: "any", begin_ns, end_ns: begin_ns + number(at + 200) % 300 }
            });
            Track { device: String::new(), spans: spans.collect(), dropped: 0 }
        };
        for seed in 0..200 {
            let tracks = [random(seed), random(seed + 1_000)];
            let analysis = analyse(&tracks).unwrap();
            // Reference: nanosecond by nanosecond.
            for (track, parts) in tracks.iter().zip(&analysis.devices) {
                let begin = tracks.iter().flat_map(|it| &it.spans).map(|span| span.begin_ns).min().unwrap();
                let mut expected = Parts::default();
                for at in begin..begin + analysis.window_ns {
                    let open = track.spans.iter().filter(|span| (span.begin_ns..span.end_ns).contains(&at));
                    match open.map(|span| span.kind).min() {
                        Some(Kernel) => expected.kernels += 1.0,
                        Some(Copy) => expected.copies += 1.0,
                        Some(Wait) => expected.waits += 1.0,
                        None => expected.idle += 1.0,
                    }
                }
                assert_eq!(*parts, expected, "seed {seed}");
            }
        }
    }
}
