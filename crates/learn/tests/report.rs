//! The example and the experiment applied to a table by the eager law, scored and reported: the results that a cluster must reach,
//! and the content of the pages. The pages are left in the target folder for inspection.

#![expect(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use engram_learn::prediction::{HitRate, Prediction};
use engram_learn::report::{
    Coverage, EpochName, EpochRow, Experiment, GroupBins, GroupSummary, RankEntry, RankHistory, RankNote, ReportError,
    RunReport, RunSettings, SourceName, page, summary,
};
use engram_learn::source::{
    self, Content, Epoch, ExampleName, Limits, Population, Signal, SourceOptions, SyntheticOptions,
};
use engram_learn::statistics::{Inversion, Separation};
use engram_memory::{Digest, Group, Histogram, MemoryId, QualityVector, Weight, edge, law};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

const RATE: u32 = 53_687_091;

/// A store that applies the law memory by memory.
#[derive(Default)]
struct Eager {
    memories: HashMap<MemoryId, (Weight, Group, Option<Arc<str>>)>,
}

impl Eager {
    fn apply(&mut self, decay: u32, epoch: &Epoch) {
        self.memories.values_mut().for_each(|memory| memory.0 = memory.0.decayed(decay));
        let delta = |signal| match signal {
            Signal::Quality(quality) => law::delta(RATE, edge::quality(quality).unwrap()),
            Signal::Delta(delta) => edge::delta(delta).unwrap(),
        };
        match &epoch.content {
            Content::Events(events) => {
                for event in events {
                    let new = || (Weight::ZERO, Group(0), event.key.clone());
                    let memory = self.memories.entry(event.id).or_insert_with(new);
                    memory.0 = memory.0.updated(delta(event.signal));
                }
            }
            Content::Groups(groups) => {
                for memory in self.memories.values_mut() {
                    for (_, signal) in groups.iter().filter(|(group, _)| *group == memory.1) {
                        memory.0 = memory.0.updated(delta(*signal));
                    }
                }
            }
            Content::Noise(noise) => {
                for event in noise.events(0..noise.memories()) {
                    let memory = self.memories.get_mut(&event.id).unwrap();
                    memory.0 = memory.0.updated(delta(event.signal));
                }
            }
        }
    }

    fn rank(&self, depth: usize) -> Vec<MemoryId> {
        let mut rank: Vec<(Weight, MemoryId)> = self.memories.iter().map(|(&id, memory)| (memory.0, id)).collect();
        if rank.len() > depth {
            rank.select_nth_unstable_by(depth, |a, b| law::rank_order(*a, *b));
            rank.truncate(depth);
        }
        rank.sort_unstable_by(|a, b| law::rank_order(*a, *b));
        rank.into_iter().map(|(_, id)| id).collect()
    }

    fn quality(&self) -> QualityVector {
        let mut quality = QualityVector::default();
        self.memories.values().for_each(|memory| quality.add(memory.1, memory.0));
        quality
    }

    fn histogram(&self) -> Histogram {
        let mut histogram = Histogram::new(12).unwrap();
        self.memories.values().for_each(|memory| histogram.add(memory.1, memory.0));
        histogram
    }

    fn digest(&self) -> String {
        let mut digest = Digest::default();
        self.memories.iter().for_each(|(&id, memory)| digest.add(id, memory.0, memory.1, 0));
        digest.to_string()
    }

    fn known(&self, id: MemoryId) -> RankEntry {
        let (weight, _, key) = &self.memories[&id];
        RankEntry { id, key: key.as_deref().map(str::to_owned), weight: *weight }
    }
}

/// Runs `epochs` of a source and reports it like a driver.
fn run(options: &SourceOptions, store: &mut Eager, decay: u32, top_k: &[u32], epochs: usize) -> RunReport {
    let mut source = source::open(options, Limits::default(), 0).unwrap();
    let mut prediction = Prediction::new(top_k, 21);
    let (mut history, mut rows) = (RankHistory::default(), Vec::<EpochRow>::new());
    let mut first = None;
    while rows.len() < epochs
        && let Some(epoch) = source.next_epoch().unwrap()
    {
        let ranking = prediction.is_scored(&epoch).then(|| store.rank(prediction.depth()));
        let hits = prediction.score(&epoch, ranking.as_deref());
        let before = store.memories.len() as u64;
        store.apply(decay, &epoch);
        let name = EpochName { number: epoch.number, label: epoch.label.clone() };
        if !top_k.is_empty() && history.needs_note(epoch.number) {
            let head = store.rank(RankHistory::DEPTH);
            let ranking = head.iter().map(|id| (id.0, store.memories[id].0.units())).collect();
            history.note(RankNote { epoch: name.clone(), ranking });
        }
        let quality = store.quality();
        let separation = Separation::of(&quality.group(Group(0)), &quality.group(Group(1)));
        first = first.or(separation);
        let memories = store.memories.len() as u64;
        rows.push(EpochRow {
            epoch: name,
            events: if matches!(epoch.content, Content::Groups(_)) { memories } else { epoch.content.len() },
            created: memories - before,
            memories,
            mean: quality.total().mean(),
            separation: separation.map(Separation::to_f64),
            hits,
        });
    }
    history.before(rows.len() as u64 - 1);
    let (quality, histogram) = (store.quality(), store.histogram());
    let depth = if top_k.is_empty() { 0 } else { RankHistory::DEPTH };
    let now: Vec<RankEntry> = store.rank(depth).into_iter().map(|id| store.known(id)).collect();
    let head: HashSet<MemoryId> = now.iter().map(|known| known.id).collect();
    let others: Vec<RankEntry> =
        history.noted_ids().into_iter().filter(|id| !head.contains(id)).map(|id| store.known(id)).collect();
    let movers = history.movers(&now, &others, 20);
    let separation = Separation::of(&quality.group(Group(0)), &quality.group(Group(1)));
    let experiment = separation.zip(first).map(|(separation, first)| {
        let bins = |group| &histogram.groups().iter().find(|entry| entry.0 == Group(group)).unwrap().1;
        let inversion = Inversion::of_histograms(bins(0), bins(1));
        let memories = quality.group(Group(0)).count;
        Experiment {
            separation: separation.to_f64(),
            convergence_factor: separation.factor(first),
            inversion_ratio: inversion.ratio().unwrap(),
            inversion_error: inversion.error(),
            coverage: [0, 1].map(|group| Coverage { group, complete: memories, memories }).to_vec(),
        }
    });
    RunReport {
        api_version: RunReport::API_VERSION.to_owned(),
        kind: RunReport::KIND.to_owned(),
        run: "state-of-the-union".to_owned(),
        cluster: "words".to_owned(),
        source: SourceName { kind: options.kind().to_owned(), name: "StateOfTheUnion".to_owned() },
        settings: RunSettings { decay: 0.02, rate: 0.05, initial_weight: 0.0 },
        workers: 5,
        partitions: 256,
        quality: GroupSummary::of(&quality),
        histogram: GroupBins::of(&histogram),
        earlier: history.epochs(),
        top: movers.top,
        risen: movers.risen,
        fallen: movers.fallen,
        prediction: HitRate::over(rows.iter().map(|row| row.hits.as_slice())),
        experiment,
        elapsed_s: 1.5,
        epochs_per_s: rows.len() as f64 / 1.5,
        updates_per_s: rows.iter().map(|row| row.events).sum::<u64>() as f64 / 1.5,
        digest: store.digest(),
        epochs: rows,
    }
}

/// Exact figures, computed independently with the same law. At 200 the most frequent words win, and the report must state it.
#[test]
fn the_example_reports_exact_hits_and_where_a_baseline_wins() {
    let options = SourceOptions::Example(ExampleName::StateOfTheUnion);
    let mut store = Eager::default();
    let report = run(&options, &mut store, 21_474_836, &[500, 1_000, 200], usize::MAX);
    let hits = |report: &RunReport| -> Vec<_> {
        assert!(report.prediction.iter().all(|rate| rate.epochs == 212));
        report.prediction.iter().map(|r| (r.hits.k, r.hits.memory, r.hits.frequent, r.hits.recent)).collect()
    };
    let expected = [(200, 36_908, 37_216, 20_666), (500, 82_767, 78_036, 49_914), (1_000, 134_694, 128_113, 98_630)];
    assert_eq!(hits(&report), expected);
    assert_eq!(report.digest, "82de3b4850164e2866d319c3c0dab744");
    assert_eq!((report.epochs.len(), report.events(), report.memories()), (233, 368_457, 23_147));

    let text = summary(&report);
    assert!(text.contains("! Top 200: simply counting predicts better. 87.8 % of the most frequent"), "{text}");
    assert!(text.contains("+ Top 500: the memory predicts best. 78.1 % of its top 500"), "{text}");
    assert!(text.contains("0.8705        *0.8777       0.4874"), "{text}");
    let html = page(&report).unwrap();
    write_page("example.html", &html);
    self_contained(&html);
    assert!(html.contains("Top 200: simply counting predicts better."));
    assert_eq!(html.matches("<svg ").count(), 5);
    let json = serde_json::to_string(&report).unwrap();
    assert!(serde_json::from_str::<RunReport>(&json).unwrap() == report, "a report survives serialization");

    let report = run(&options, &mut Eager::default(), 10_737_418, &[500, 1_000], usize::MAX);
    assert_eq!(hits(&report), [(500, 79_855, 78_036, 49_914), (1_000, 136_250, 128_113, 98_630)]);
    assert_eq!(report.digest, "79574579f17a98d99a2c6c14216efb00");
}

#[test]
fn the_experiment_converges_by_the_law_and_reports_coverage() {
    let options = SyntheticOptions { memories: 1_000, ..SyntheticOptions::default() };
    let population = || {
        let member = |id| (id, (Weight::HALF, Population::group_of(id), None));
        Eager { memories: options.population().ids().map(member).collect() }
    };
    let source = SourceOptions::Synthetic(options.clone());
    let report = run(&source, &mut population(), 10_737_418, &[], 50);
    let experiment = report.experiment.clone().unwrap();
    assert!((experiment.convergence_factor.unwrap() - 12.5).abs() < 1e-6);
    assert_eq!((experiment.separation, experiment.inversion_ratio, experiment.inversion_error), (1.0, 1.0, 0.0));
    assert_eq!(report.digest, "81614da90c4f4be97e63ff0b5f2fb1ce");
    assert_eq!(run(&source, &mut population(), 10_737_418, &[], 5).digest, "85540e11f201328e777384429e8fcfa8");
    assert!(summary(&report).contains("coverage of group 1 500/500"), "{}", summary(&report));
    let html = page(&report).unwrap();
    write_page("experiment.html", &html);
    self_contained(&html);

    let mut blind = report;
    blind.experiment.as_mut().unwrap().coverage[1].complete = 1;
    let text = summary(&blind);
    assert!(text.contains("! Group 1: only 1 of 500 memories were updated in every epoch."), "{text}");

    // Noise changes the factor through the first epoch, and hardly the end.
    let noisy = SourceOptions::Synthetic(SyntheticOptions { noise: 0.15, ..options.clone() });
    let experiment = run(&noisy, &mut population(), 10_737_418, &[], 50).experiment.unwrap();
    assert!(experiment.separation > 0.99 && experiment.inversion_ratio == 1.0, "{experiment:?}");
    assert!((12.6..13.8).contains(&experiment.convergence_factor.unwrap()), "{experiment:?}");
}

#[test]
fn untrusted_names_are_escaped_in_the_page() {
    let mut report = run(&SourceOptions::Example(ExampleName::StateOfTheUnion), &mut Eager::default(), 0, &[50], 40);
    let hostile = "<script>alert(1)</script>\"'&\u{1b}[31m\u{202e}";
    report.run = hostile.to_owned();
    report.cluster = hostile.to_owned();
    report.source.name = hostile.to_owned();
    report.top[0].key = Some(hostile.to_owned());
    report.epochs.iter_mut().for_each(|row| row.epoch.label = Some(hostile.to_owned()));
    report.earlier.iter_mut().for_each(|epoch| epoch.label = Some(hostile.to_owned()));
    let html = page(&report).unwrap();
    write_page("hostile.html", &html);
    self_contained(&html);
    assert!(html.contains("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#39;&amp;\u{fffd}[31m"));
    assert!(!html.contains('\u{1b}'));
}

#[test]
fn runs_without_epochs_or_with_one_still_make_a_page() -> Result<(), ReportError> {
    let options = SourceOptions::Example(ExampleName::StateOfTheUnion);
    let mut report = run(&options, &mut Eager::default(), 0, &[10], 1);
    self_contained(&page(&report)?);
    (report.epochs, report.quality, report.histogram) = (Vec::new(), Vec::new(), Vec::new());
    self_contained(&page(&report)?);
    assert!(summary(&report).contains("0 epochs, 0 updates, 0 memories"), "{}", summary(&report));
    Ok(())
}

/// Nothing to load, nothing to run, and drawings that take their colours from the style sheet.
fn self_contained(html: &str) {
    for forbidden in ["<script", "http:", "https:", "src=", "url(", "@import", "<link", "<iframe", "\"#01", "onload"] {
        assert!(!html.contains(forbidden), "{forbidden} in the page");
    }
    assert!(html.contains("default-src 'none'"));
    assert_eq!(html.matches("<svg ").count(), html.matches("<desc ").count());
}

fn write_page(name: &str, html: &str) {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("reports");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(name), html).unwrap();
}
