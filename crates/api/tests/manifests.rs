//! Whole files: rendering of errors, examples, and round trips.

#[path = "manifests/integrations.rs"]
mod integrations;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use engram_api::{
    Capacity, CapacityPolicy, Clock, Columns, DurabilityMode, Duration, Events, FeatureType, Git, GpuMode,
    GpuPartitioner, LearnerCluster, LearnerClusterSpec, LearnerRun, LearnerRunSpec, Learning, Manifest, ManifestEnum,
    OnMissing, Requirement, Source, Synthetic, Until, parse, schema,
};
use proptest::prelude::*;
use serde_json::Value;

fn folder(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn checked(text: &str, origin: &str) -> Manifest {
    parse(text, origin, Requirement::Anything).unwrap_or_else(|problems| panic!("{}\n{text}", problems.render(false)))
}

#[test]
fn objects_are_valid_as_an_api_server_returns_them() {
    let written = "apiVersion: engram.dev/v1alpha1\nkind: LearnerCluster\nmetadata:\n  creationTimestamp: \"2026-11-22T09:00:00Z\"\n  \
        generation: 2\n  managedFields: []\n  name: words\n  namespace: research\n  resourceVersion: \"17\"\n  uid: 0b1c\n\
        spec: { workers: 3 }\nstatus: { phase: Ready }\n";
    let manifest = checked(written, "kubectl get -o yaml");
    let fields = "metadata.creationTimestamp, metadata.generation, metadata.managedFields, metadata.resourceVersion, metadata.uid, status";
    assert_eq!(manifest.server_fields.join(", "), fields);
    assert!(manifest.local_notes()[0].ends_with(fields));
    let effective = checked(&manifest.to_effective_yaml(), "effective");
    assert_eq!((effective.cluster, effective.server_fields.len()), (manifest.cluster, 0));
    // A field of the server in a file that nothing has returned is a mistake.
    for (line, field) in [("  uid: 0b1c\n", "status"), ("  resourceVersion: \"17\"\n", "generation")] {
        let problems = parse(&written.replace(line, ""), "own.yaml", Requirement::Cluster).expect_err("a mistake");
        assert!(problems.render(false).contains(field), "{}", problems.render(false));
    }
}

/// Update the golden file with `UPDATE_GOLDEN=1 cargo test -p engram-api` and review the diff.
#[test]
fn all_problems_of_a_file_are_shown_with_location_and_advice() {
    let text = read(&folder("tests/golden/many-errors.yaml"));
    let problems = parse(&text, "many-errors.yaml", Requirement::Cluster).expect_err("the file is full of mistakes");
    let rendered = problems.render(false);
    let golden = folder("tests/golden/many-errors.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&golden, &rendered).expect("the golden file can be written");
    }
    assert!(rendered == read(&golden), "differs from {}:\n{rendered}", golden.display());

    let codes: BTreeSet<_> = problems.iter().map(|problem| problem.code().id()).collect();
    for code in ["ENG-0101", "ENG-0102", "ENG-0103", "ENG-0104", "ENG-0105", "ENG-0106", "ENG-0107", "ENG-0109"] {
        assert!(codes.contains(code), "the file should also have {code}");
    }
    let places: Vec<_> =
        problems.iter().map(|problem| problem.location().map(|place| (place.line, place.column))).collect();
    assert!(places.is_sorted(), "problems come in the order of the file: {places:?}");
    assert!(problems.render(true).contains("\u{1b}["), "colour when asked");
    assert!(!rendered.contains('\u{1b}'), "none when not");
}

#[test]
fn the_examples_are_manifests_and_fields_of_the_schema() {
    let examples = folder("../../examples");
    let mut found = 0;
    for entry in std::fs::read_dir(&examples).expect("the examples are there") {
        let path = entry.expect("a readable folder").path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        found += 1;
        let text = read(&path);
        let manifest = parse(&text, &path.to_string_lossy(), Requirement::Cluster)
            .unwrap_or_else(|problems| panic!("{}", problems.render(false)));
        assert!(manifest.ignored.is_empty(), "{}: an example means something everywhere", path.display());
        for run in &manifest.runs {
            match run.spec.memory.as_ref().map(|memory| &memory.source) {
                Some(Source::Events(events)) => assert!(manifest.resolve(events.file_name()).is_file(), "{events:?}"),
                Some(Source::Git(git)) => assert!(manifest.resolve(&git.path).join("Cargo.toml").is_file()),
                Some(Source::Example(_) | Source::Synthetic(_)) | None => {}
            }
            let json = serde_json::to_value(run).expect("JSON");
            assert_fits(&json, &schema(Some("LearnerRun")).expect("a schema"), "run");
        }
        let json = serde_json::to_value(manifest.cluster.expect("a cluster")).expect("JSON");
        assert_fits(&json, &schema(Some("LearnerCluster")).expect("a schema"), "cluster");
    }
    assert!(found >= 4, "found {found} examples");
}

/// Asserts that the published schema knows every field of `value` and has its type, and that it is closed.
fn assert_fits(value: &Value, schema: &Value, path: &str) {
    if let Some(alternatives) = schema["oneOf"].as_array() {
        let fits = |one: &&Value| match value {
            Value::Object(fields) => fields.keys().all(|field| one["properties"].get(field).is_some()),
            word => one["const"] == *word,
        };
        let fitting: Vec<_> = alternatives.iter().filter(fits).collect();
        assert_eq!(fitting.len(), 1, "{path}: {value} must fit one alternative");
        if value.is_object() {
            assert_fits(value, fitting[0], path);
        }
        return;
    }
    let kind = schema["type"].as_str().unwrap_or_else(|| panic!("{path}: no type in {schema}"));
    match value {
        Value::Object(fields) => {
            assert_eq!(kind, "object", "{path}");
            if let Some(properties) = schema["properties"].as_object() {
                assert_eq!(schema["additionalProperties"], false, "{path} must be closed");
                for (name, field) in fields {
                    let known = properties.get(name).unwrap_or_else(|| panic!("{path}.{name} is not in the schema"));
                    assert_fits(field, known, &format!("{path}.{name}"));
                }
            }
        }
        Value::Number(number) => assert!(kind == "number" || kind == "integer" && !number.is_f64(), "{path}: {number}"),
        Value::String(_) => assert_eq!(kind, "string", "{path}"),
        Value::Bool(_) => assert_eq!(kind, "boolean", "{path}"),
        Value::Array(_) => assert_eq!(kind, "array", "{path}"),
        Value::Null => panic!("{path}: null is never printed"),
    }
}

#[test]
fn the_published_schema_has_no_private_keywords_and_describes_all_fields() {
    fn walk(schema: &Value, path: &str) {
        for (keyword, value) in schema.as_object().into_iter().flatten() {
            assert!(!keyword.starts_with("x-"), "{path}: {keyword} is the checker's own");
            if keyword == "properties" {
                for (name, field) in value.as_object().into_iter().flatten() {
                    let envelope = ["apiVersion", "kind", "spec"].contains(&&**name) && !path.contains('.');
                    assert!(envelope || field["description"].is_string(), "{path}.{name} needs a description");
                    walk(field, &format!("{path}.{name}"));
                }
            }
            for alternative in value.as_array().filter(|_| keyword == "oneOf").into_iter().flatten() {
                walk(alternative, path);
            }
        }
    }
    for kind in ["LearnerCluster", "LearnerRun"] {
        let schema = schema(Some(kind)).expect("a kind");
        assert_eq!(schema["properties"]["kind"]["const"], kind);
        walk(&schema, kind);
    }
    assert_eq!(schema(None).expect("both kinds")["oneOf"].as_array().map(Vec::len), Some(2));
    assert_eq!(schema(Some("Pod")), None);
}

#[test]
fn absent_fields_have_the_documented_defaults() {
    let text = "apiVersion: engram.dev/v1alpha1\nkind: LearnerCluster\nmetadata: { name: demo }\nspec: { workers: 5 }\n---\n\
                apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: { name: a }\nspec:\n  clusterRef: { name: demo }\n  \
                kind: Memory\n  memory:\n    source:\n      events: { path: a.csv, columns: { key: w, time: t } }\n";
    let manifest = checked(text, "some/where/demo.yaml");
    assert_eq!(manifest.resolve("a.csv"), Path::new("some/where/a.csv"));
    assert_eq!(manifest.resolve("/a.csv"), Path::new("/a.csv"));
    let spec = &manifest.cluster.as_ref().expect("a cluster").spec;
    assert_eq!(*spec, LearnerClusterSpec::with_workers(5));
    assert_eq!((spec.replication_factor, spec.partitions, spec.capacity.memories), (2, 256, 1_000_000));
    let law = &spec.learning;
    assert_eq!((law.rate, law.initial_weight, law.decay), (0.05, 0.5, 0.01));
    let run = manifest.runs[0].spec.effective(Some(spec)).memory.expect("a memory run");
    assert_eq!((run.decay, run.epochs, run.on_missing), (Some(0.01), None, OnMissing::Create));
    assert_eq!((run.report.top_k(), run.report.skip()), (&[500][..], 21));
    let Source::Events(events) = &run.source else { panic!("events") };
    assert_eq!((events.quality, events.epoch_span), (Some(0.9), Some(Duration::from_millis(86_400_000))));
    assert_eq!(events.clock(), Clock::Time { column: "t", span: Duration::from_millis(86_400_000) });
    let synthetic = LearnerRunSpec::memory("demo", Source::Synthetic(Synthetic::default()));
    assert_eq!(synthetic.effective(None).memory.expect("a memory run").epochs, Some(50));
}

/// A weight or decay: 0, or above 2^-31 and at most 1.
fn setting() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), Just(1.0), 4.7e-10..=1.0]
}

fn word<T: ManifestEnum + std::fmt::Debug>() -> impl Strategy<Value = T> {
    proptest::sample::select(T::ALL)
}

fn cluster() -> impl Strategy<Value = LearnerCluster> {
    let name = "[a-z]([-a-z0-9]{0,20}[a-z0-9])?";
    let learning = (4.7e-10..=1.0, setting(), setting()).prop_map(|(rate, initial_weight, decay)| Learning {
        rate,
        initial_weight,
        decay,
        ..Learning::default()
    });
    let capacity = (1..=1_000_000_000_u64, word::<CapacityPolicy>()).prop_map(|(memories, policy)| Capacity {
        memories,
        policy,
        ..Capacity::default()
    });
    (name, 1..=100_u32, 1..=1024_u32, capacity, learning, 0..=4096_u32, word::<FeatureType>()).prop_flat_map(
        |(name, workers, partitions, capacity, learning, dimension, dtype)| {
            let partitioner = proptest::option::of(word::<GpuPartitioner>());
            let threshold = proptest::option::of(0..=1_000_000_000_u64);
            let rest = (word::<DurabilityMode>(), word::<GpuMode>(), threshold, partitioner);
            rest.prop_map(move |(mode, gpu, threshold, partitioner)| {
                let mut spec = LearnerClusterSpec::with_workers(workers);
                spec.partitions = partitions;
                spec.capacity = capacity.clone();
                spec.learning = learning.clone();
                (spec.features.dimension, spec.features.dtype) = (dimension, dtype);
                spec.durability.mode = mode;
                (spec.gpu.mode, spec.gpu.threshold, spec.gpu.partitioner) = (gpu, threshold, partitioner);
                LearnerCluster::new(name.clone(), spec)
            })
        },
    )
}

fn source() -> impl Strategy<Value = Source> {
    // Column names are anything that a file may have: words that YAML takes for numbers or truth values among them.
    let column = || prop_oneof!["[ -~]{1,12}", "\\PC{1,8}", Just("true".into()), Just("12".into()), Just("~".into())];
    let events = (column(), column(), any::<bool>(), proptest::option::of(-1.0..=1.0_f64), 1..u64::MAX).prop_map(
        |(key, clock, timed, delta, span)| {
            let (epoch, time) = if timed { (None, Some(clock)) } else { (Some(clock), None) };
            Source::Events(Events {
                path: Some("data/a b.csv.zst".into()),
                config_map: None,
                s3: None,
                input: None,
                format: Default::default(),
                separator: None,
                columns: Columns { key: Some(key), epoch, time, ..Columns::default() },
                quality: None,
                delta,
                epoch_span: timed.then_some(Duration::from_millis(span)),
            })
        },
    );
    let synthetic =
        (1..=50_000_u64, setting(), 0.0..=1.0_f64, any::<u64>()).prop_map(|(half, initial_weight, noise, seed)| {
            Source::Synthetic(Synthetic { memories: 2 * half, initial_weight, noise, seed, ..Synthetic::default() })
        });
    let git = ("[ -~]{1,12}", any::<u32>())
        .prop_map(|(path, commits)| Source::Git(Git { path, max_commits: commits.into(), ..Git::default() }));
    prop_oneof![events, synthetic, git]
}

fn run(cluster: String) -> impl Strategy<Value = LearnerRun> {
    (source(), proptest::option::of(1..=1_000_000_000_u64), proptest::option::of(setting()), 1.1..1e300_f64).prop_map(
        move |(source, epochs, decay, convergence)| {
            let synthetic = matches!(source, Source::Synthetic(_));
            let mut spec = LearnerRunSpec::memory(cluster.clone(), source);
            spec.until = synthetic.then_some(Until { separation: None, convergence: Some(convergence) });
            let memory = spec.memory.as_mut().expect("a memory run");
            (memory.epochs, memory.decay) = (epochs, decay);
            LearnerRun::new("a-run", spec)
        },
    )
}

#[test]
fn a_file_cut_anywhere_is_still_read_without_panic() {
    let text = read(&folder("tests/golden/many-errors.yaml"));
    for (end, _) in text.char_indices().step_by(3) {
        let problems = parse(&text[..end], "cut.yaml", Requirement::Cluster).expect_err("it is faulty from the start");
        assert!(!problems.is_empty() && problems.render(false).ends_with('\n'));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn the_effective_manifest_parses_to_itself(
        (cluster, mut run) in cluster().prop_flat_map(|cluster| {
            let name = cluster.metadata.name.clone();
            (Just(cluster), run(name))
        })
    ) {
        // A synthetic run must fit; how it is refused otherwise is tested elsewhere.
        let mut cluster = cluster;
        cluster.spec.capacity.memories = cluster.spec.capacity.memories.max(100_000);
        let text = serde_saphyr::to_string(&cluster).unwrap() + "---\n" + &serde_saphyr::to_string(&run).unwrap();
        let parsed = checked(&text, "printed.yaml");
        prop_assert_eq!(parsed.cluster.as_ref(), Some(&cluster));
        prop_assert_eq!(&parsed.runs[..], std::slice::from_ref(&run));

        let effective = checked(&parsed.to_effective_yaml(), "effective.yaml");
        run.spec = run.spec.effective(Some(&cluster.spec));
        prop_assert_eq!(effective.cluster.as_ref(), Some(&cluster));
        prop_assert_eq!(&effective.runs[..], &[run]);
        prop_assert_eq!(effective.to_effective_yaml(), parsed.to_effective_yaml());
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "(apiVersion|kind|spec|metadata|LearnerRun|[-:{}\\[\\]&*!|>'\"#%@`,? \n\té0-9.]){0,40}") {
        if let Err(problems) = parse(&text, "any.yaml", Requirement::Anything) {
            prop_assert!(!problems.render(false).is_empty());
        }
    }
}
