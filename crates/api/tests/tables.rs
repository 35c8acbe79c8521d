//! Every field of both kinds: what is taken, what is refused, with which code and where.

use engram_api::{Code, Manifest, Needs, Problems, parse};

/// A document with a hole `_`, the code and the path of what is wrong with the bad values in it, bad and good values.
type Row<Text> = (Text, &'static str, Text, &'static [&'static str], &'static [&'static str]);

fn cluster(spec: &str) -> String {
    format!("apiVersion: engram.dev/v1alpha1\nkind: LearnerCluster\nmetadata: {{ name: words }}\nspec: {spec}\n")
}

fn run(spec: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: learn }}\n\
         spec: {{ clusterRef: {{ name: words }}, {spec} }}\n"
    )
}

fn events(fields: &str) -> String {
    run(&format!("kind: Memory, memory: {{ source: {{ events: {{ {fields} }} }} }}"))
}

fn source(source: &str, rest: &str) -> String {
    run(&format!("kind: Memory, memory: {{ source: {{ {source} }} }}{rest}"))
}

fn memory(source: &str, rest: &str) -> String {
    run(&format!("kind: Memory, memory: {{ source: {{ {source} }}{rest} }}"))
}

fn check(text: &str) -> Result<Manifest, Problems> {
    parse(text, "test.yaml", Needs::Anything)
}

fn codes(text: &str) -> Vec<&'static str> {
    check(text).err().map_or_else(Vec::new, |problems| problems.iter().map(|problem| problem.code().id()).collect())
}

/// Asserts that each document has exactly one problem, `code`, about `path`.
#[track_caller]
fn refused(code: &str, path: &str, documents: impl IntoIterator<Item = String>) {
    for text in documents {
        let problems = check(&text).expect_err(&format!("must be refused: {text}"));
        let found: Vec<_> =
            problems.iter().map(|problem| (problem.code().id(), problem.path().unwrap_or(""))).collect();
        assert_eq!(found, [(code, path)], "{text}\n{}", problems.render(false));
        assert!(problems[0].place().is_some_and(|place| place.line > 0 && place.column > 0), "{text}");
        assert!(problems[0].message().starts_with(path), "{}", problems[0].message());
    }
}

#[track_caller]
fn taken(documents: impl IntoIterator<Item = String>) {
    for text in documents {
        if let Err(problems) = check(&text) {
            panic!("must be taken: {text}\n{}", problems.render(false));
        }
    }
}

#[test]
fn cluster_fields_are_taken_in_their_range_and_refused_outside() {
    let rows: &[Row<&str>] = &[
        ("{ workers: _ }", "ENG-0103", "spec.workers", &["0", "-1", "101"], &["1", "100"]),
        ("{ workers: _ }", "ENG-0102", "spec.workers", &["\"5\"", "5.0", "five", "[5]", "", "1_0"], &[]),
        ("{ workers: 5, replicationFactor: _ }", "ENG-0103", "spec.replicationFactor", &["0", "4"], &["1"]),
        ("{ workers: 1, replicationFactor: _ }", "ENG-0106", "spec.replicationFactor", &["2", "3"], &[]),
        ("{ workers: 5, replicationFactor: _ }", "ENG-0107", "spec.replicationFactor", &["2", "3"], &[]),
        ("{ workers: 5, partitions: _ }", "ENG-0103", "spec.partitions", &["0", "2000"], &["1", "1024", "0x10b"]),
        ("{ workers: 5, partitions: _ }", "ENG-0102", "spec.partitions", &["0b11", "1:30"], &[]),
        (
            "{ workers: 5, capacity: { memories: _ } }",
            "ENG-0103",
            "spec.capacity.memories",
            &["0", "1000000001"],
            &["1", "1000000000"],
        ),
        (
            "{ workers: 5, capacity: { memories: _ } }",
            "ENG-0102",
            "spec.capacity.memories",
            &["1M", "1e6", "1_000"],
            &[],
        ),
        (
            "{ workers: 5, capacity: { policy: _ } }",
            "ENG-0104",
            "spec.capacity.policy",
            &["evict"],
            &["Evict", "Refuse"],
        ),
        ("{ workers: 5, learning: { law: _ } }", "ENG-0107", "spec.learning.law", &["Exponential"], &["Linear"]),
        ("{ workers: 5, learning: { law: _ } }", "ENG-0104", "spec.learning.law", &["linear", "Cubic"], &[]),
        (
            "{ workers: 5, learning: { rate: _ } }",
            "ENG-0103",
            "spec.learning.rate",
            &["0", "1.5", ".nan", ".inf", "-.inf", "4.656612873077393e-10"],
            &["1", "4.7e-10"],
        ),
        (
            "{ workers: 5, learning: { initialWeight: _ } }",
            "ENG-0103",
            "spec.learning.initialWeight",
            &["-0.1", "1.5", ".nan", "1e-10"],
            &["0", "0.0", "1", "5e-10"],
        ),
        (
            "{ workers: 5, learning: { decay: _ } }",
            "ENG-0103",
            "spec.learning.decay",
            &["-0.1", "1.5", ".inf", "1e-10"],
            &["0", "1.0"],
        ),
        ("{ workers: 5, learning: { decay: _ } }", "ENG-0102", "spec.learning.decay", &["\"0.1\"", "true"], &[]),
        (
            "{ workers: 5, features: { dimension: _ } }",
            "ENG-0103",
            "spec.features.dimension",
            &["-1", "4097"],
            &["0", "4096"],
        ),
        ("{ workers: 5, features: { dtype: _ } }", "ENG-0104", "spec.features.dtype", &["F8", "f16"], &["F16", "F32"]),
        (
            "{ workers: 5, durability: { mode: _ } }",
            "ENG-0104",
            "spec.durability.mode",
            &["sync", "Fast"],
            &["Sync", "Replicated", "Async"],
        ),
        ("{ workers: 5, soloPolicy: _ }", "ENG-0104", "spec.soloPolicy", &["solo-durable"], &["SoloDurable", "MinIsr"]),
        ("{ workers: 5, gpu: { mode: _ } }", "ENG-0104", "spec.gpu.mode", &["On"], &["Auto", "Required", "Disabled"]),
        (
            "{ workers: 5, gpu: { threshold: _ } }",
            "ENG-0103",
            "spec.gpu.threshold",
            &["-1", "1000000001"],
            &["0", "1000000000"],
        ),
        ("{ workers: 5, restartGrace: _ }", "ENG-0107", "spec.restartGrace", &["3s"], &[]),
        ("{ workers: 5, bootstrap: _ }", "ENG-0107", "spec.bootstrap", &["{}"], &[]),
        ("{ workers: 5, storage: { size: _ } }", "ENG-0102", "spec.storage.size", &["50GB", "50"], &["50Gi"]),
        (
            "{ workers: 5, storage: { retainPolicy: _ } }",
            "ENG-0104",
            "spec.storage.retainPolicy",
            &["Keep"],
            &["Retain"],
        ),
        (
            "{ workers: 5, telemetry: { samplerRatio: _ } }",
            "ENG-0103",
            "spec.telemetry.samplerRatio",
            &["2"],
            &["0.01"],
        ),
    ];
    for (template, code, path, bad, good) in rows {
        refused(code, path, bad.iter().map(|value| cluster(&template.replace('_', value))));
        taken(good.iter().map(|value| cluster(&template.replace('_', value))));
    }
    refused("ENG-0105", "spec.workers", [cluster("{}")]);
    refused(
        "ENG-0105",
        "spec",
        ["apiVersion: engram.dev/v1alpha1\nkind: LearnerCluster\nmetadata: { name: a }\n".into()],
    );
}

#[test]
fn run_fields_are_taken_in_their_range_and_refused_outside() {
    const EVENTS: &str = "spec.memory.source.events";
    let columns = "columns: { key: word, epoch: day }";
    let rows: &[Row<String>] = &[
        (
            run("kind: _, memory: { source: { git: {} } }"),
            "ENG-0107",
            "spec.kind".into(),
            &["Replay", "Fisher"],
            &["Memory"],
        ),
        (run("kind: _, memory: { source: { git: {} } }"), "ENG-0104", "spec.kind".into(), &["memory", "Dream"], &[]),
        (
            source("example: { name: _ }", ""),
            "ENG-0104",
            "spec.memory.source.example.name".into(),
            &["Sotu"],
            &["StateOfTheUnion"],
        ),
        (
            events(&format!("path: a.csv, format: _, {columns}")),
            "ENG-0104",
            format!("{EVENTS}.format"),
            &["CSV"],
            &["Auto", "Jsonl", "Csv", "Parquet"],
        ),
        (
            events(&format!("path: _, {columns}")),
            "ENG-0106",
            format!("{EVENTS}.path"),
            &["events", "events.txt", "csv.zst"],
            &["a.csv", "b/c.jsonl.gz", "D.PARQUET", "e.ndjson.zst"],
        ),
        (events(&format!("path: _, {columns}")), "ENG-0103", format!("{EVENTS}.path"), &["\"\""], &[]),
        (events(&format!("path: _, {columns}")), "ENG-0102", format!("{EVENTS}.path"), &["7", "", "true"], &[]),
        (
            events(&format!("path: a.csv, {columns}, quality: _")),
            "ENG-0103",
            format!("{EVENTS}.quality"),
            &["-0.1", "1.1", ".nan"],
            &["0", "1", "0.9"],
        ),
        (
            events(&format!("path: a.csv, {columns}, delta: _")),
            "ENG-0103",
            format!("{EVENTS}.delta"),
            &["-1.1", "1.1", ".inf"],
            &["-1", "0", "1"],
        ),
        (
            events("path: a.csv, columns: { key: word, time: at }, epochSpan: _"),
            "ENG-0103",
            format!("{EVENTS}.epochSpan"),
            &["0s", "0ms"],
            &["1ms", "3s", "1d"],
        ),
        (
            events("path: a.csv, columns: { key: word, time: at }, epochSpan: _"),
            "ENG-0102",
            format!("{EVENTS}.epochSpan"),
            &["3", "1 day", "-3s"],
            &[],
        ),
        (
            source("git: { maxCommits: _ }", ""),
            "ENG-0103",
            "spec.memory.source.git.maxCommits".into(),
            &["-1"],
            &["0", "1000"],
        ),
        (source("git: { quality: _ }", ""), "ENG-0103", "spec.memory.source.git.quality".into(), &["2"], &["0.5"]),
        (
            source("synthetic: { memories: _ }", ""),
            "ENG-0103",
            "spec.memory.source.synthetic.memories".into(),
            &["0", "3", "1000000002"],
            &["2", "1000000000"],
        ),
        (
            source("synthetic: { seed: _ }", ""),
            "ENG-0103",
            "spec.memory.source.synthetic.seed".into(),
            &["-1"],
            &["0", "18446744073709551615"],
        ),
        (
            source("synthetic: { seed: _ }", ""),
            "ENG-0102",
            "spec.memory.source.synthetic.seed".into(),
            &["18446744073709551616", "1.5"],
            &[],
        ),
        (
            memory("git: {}", ", epochs: _"),
            "ENG-0103",
            "spec.memory.epochs".into(),
            &["0", "1000000001"],
            &["1", "1000000000"],
        ),
        (
            memory("git: {}", ", decay: _"),
            "ENG-0103",
            "spec.memory.decay".into(),
            &["-1", "1e-10", "2"],
            &["0", "0.02"],
        ),
        (
            memory("git: {}", ", onMissing: _"),
            "ENG-0104",
            "spec.memory.onMissing".into(),
            &["create"],
            &["Create", "Report"],
        ),
        (
            memory("git: {}", ", report: { topK: _ }"),
            "ENG-0103",
            "spec.memory.report.topK".into(),
            &["[]", "[1, 2, 3, 4, 5, 6, 7, 8, 9]", "[5, 5]"],
            &["[1]", "[10000, 1, 3]"],
        ),
        (
            memory("git: {}", ", report: { topK: [_] }"),
            "ENG-0103",
            "spec.memory.report.topK[0]".into(),
            &["0", "10001"],
            &["10000"],
        ),
        (memory("git: {}", ", report: { skip: _ }"), "ENG-0103", "spec.memory.report.skip".into(), &["-1"], &["0"]),
        (
            memory("synthetic: {}", ", report: { inversion: _ }"),
            "ENG-0104",
            "spec.memory.report.inversion".into(),
            &["exact"],
            &["Histogram", "Exact"],
        ),
        (
            memory("synthetic: {}", ", report: { coverage: _ }"),
            "ENG-0102",
            "spec.memory.report.coverage".into(),
            &["yes", "1", "\"true\""],
            &["true", "false"],
        ),
        (
            source("synthetic: {}", ", until: { separation: _ }"),
            "ENG-0103",
            "spec.until.separation".into(),
            &["0", "1.1", ".nan"],
            &["1", "0.5"],
        ),
        (
            source("synthetic: {}", ", until: { convergence: _ }"),
            "ENG-0103",
            "spec.until.convergence".into(),
            &["1", "0", ".inf"],
            &["1.1", "12.5"],
        ),
        (source("git: {}", ", suspend: _"), "ENG-0102", "spec.suspend".into(), &["no"], &["true", "false"]),
    ];
    for (template, code, path, bad, good) in rows {
        refused(code, path, bad.iter().map(|value| template.replace('_', value)));
        taken(good.iter().map(|value| template.replace('_', value)));
    }
    for name in ["initialWeight", "rewarded", "punished", "noise"] {
        let field = |value: &str| source(&format!("synthetic: {{ {name}: {value} }}"), "");
        refused("ENG-0103", &format!("spec.memory.source.synthetic.{name}"), ["-0.1", "1.1", ".nan"].map(field));
        taken(["0", "1"].map(field));
    }
    for (text, path) in [
        (source("example: {}", ""), "spec.memory.source.example.name"),
        (events(columns), "spec.memory.source.events.path"),
        (events("path: a.csv"), "spec.memory.source.events.columns"),
        (run("memory: { source: { git: {} } }"), "spec.kind"),
        (source("git: {}", "").replace("{ name: words }", "{}"), "spec.clusterRef.name"),
    ] {
        refused("ENG-0105", path, [text]);
    }
    for later in ["s3: {}", "configMap: {}", "input: corpus"] {
        let path = format!("{EVENTS}.{}", later.split(':').next().unwrap_or(later));
        refused("ENG-0107", &path, [events(&format!("path: a.csv, {columns}, {later}"))]);
    }
}

#[test]
fn fields_that_do_not_go_together_are_refused_with_the_rule() {
    let with = |fields: &str| events(&format!("path: a.csv, {fields}"));
    let columns = |names: &str| with(&format!("columns: {{ {names} }}"));
    let rows = [
        (run("kind: Memory"), "spec.kind"),
        (source("git: {}", ", replay: {}"), "spec.replay"),
        (run("kind: Memory, memory: {}"), "spec.memory.source"),
        (source("", ""), "spec.memory.source"),
        (source("git: {}, synthetic: {}", ""), "spec.memory.source"),
        (columns("epoch: day"), "spec.memory.source.events.columns"),
        (columns("key: a"), "spec.memory.source.events.columns"),
        (columns("id: a, key: b, epoch: c"), "spec.memory.source.events.columns.key"),
        (columns("id: a, epoch: b, time: c"), "spec.memory.source.events.columns.time"),
        (with("columns: { id: a, epoch: b }, quality: 1, delta: 1"), "spec.memory.source.events.delta"),
        (with("columns: { id: a, epoch: b, quality: c }, delta: 1"), "spec.memory.source.events.columns.quality"),
        (columns("id: a, epoch: b, quality: c, delta: d"), "spec.memory.source.events.columns.delta"),
        (with("columns: { id: a, epoch: b }, epochSpan: 1d"), "spec.memory.source.events.epochSpan"),
        (memory("synthetic: {}", ", report: { topK: [5] }"), "spec.memory.report.topK"),
        (memory("synthetic: {}", ", report: { skip: 5 }"), "spec.memory.report.skip"),
        (memory("git: {}", ", report: { inversion: Exact }"), "spec.memory.report.inversion"),
        (memory("git: {}", ", report: { coverage: false }"), "spec.memory.report.coverage"),
        (source("git: {}", ", until: { separation: 0.5 }"), "spec.until"),
        (source("synthetic: {}", ", until: {}"), "spec.until"),
        (
            cluster("{ workers: 1, capacity: { memories: 1000 } }")
                + "---\n"
                + &source("synthetic: { memories: 1002 }", ""),
            "spec.memory.source.synthetic.memories",
        ),
        (
            cluster("{ workers: 1, capacity: { memories: 99999 } }") + "---\n" + &source("synthetic: {}", ""),
            "spec.memory.source.synthetic.memories",
        ),
    ];
    for (text, path) in rows {
        let problems = check(&text).expect_err(&text);
        assert_eq!(
            (problems.len(), problems[0].code(), problems[0].path()),
            (1, Code::Conflicting, Some(path)),
            "{text}"
        );
        assert!(problems[0].message().contains("; "), "the rule is missing: {}", problems[0].message());
    }
    taken([columns("id: a, epoch: b, quality: c"), columns("key: a, time: b, delta: c")]);
    taken([source("synthetic: {}", ", until: { separation: 0.99, convergence: 12.4 }")]);
}

#[test]
fn unknown_fields_are_refused_at_every_level_with_the_nearest_name() {
    let rows = [
        (cluster("{ workers: 5, wrokers: 5 }"), "spec.wrokers", "did you mean workers?"),
        (cluster("{ workers: 5, decay: 0.1 }"), "spec.decay", "did you mean spec.learning.decay?"),
        (cluster("{ workers: 5, capacity: { memorys: 1 } }"), "spec.capacity.memorys", "did you mean memories?"),
        (
            cluster("{ workers: 5, storage: { onNodeLoss: { afer: 5m } } }"),
            "spec.storage.onNodeLoss.afer",
            "did you mean after?",
        ),
        (cluster("{ workers: 5 }").replace("name: words", "name: a, nam: b"), "metadata.nam", "did you mean name?"),
        (cluster("{ workers: 5 }") + "specs: {}\n", "specs", "did you mean spec?"),
        (source("git: { pathh: . }", ""), "spec.memory.source.git.pathh", "did you mean path?"),
        (source("git: {}, gti: {}", ""), "spec.memory.source.gti", "did you mean git?"),
        (source("git: {}", ", untill: {}"), "spec.untill", "did you mean until?"),
    ];
    for (text, path, help) in rows {
        refused("ENG-0101", path, [text.clone()]);
        assert_eq!(check(&text).unwrap_err()[0].advice(), [help], "{text}");
    }
}

#[test]
fn a_file_that_is_no_manifest_is_refused_where_it_stops_being_one() {
    let good = cluster("{ workers: 5 }");
    for (text, line, column) in [
        ("kind: [".to_owned(), 1, 7),
        ("- kind: LearnerCluster".to_owned(), 1, 1),
        ("kind: LearnerClusters\nmetadata: {}".to_owned(), 1, 1),
        (good.replace("v1alpha1", "v1"), 1, 1),
        (good.replace("workers: 5", "workers: 5, workers: 6"), 4, 21),
        (format!("{good}---\n{good}"), 7, 1),
        (format!("{0}---\n{0}", source("git: {}", "")), 8, 13),
        (format!("{good}---\nkind: *x\n"), 6, 7),
    ] {
        let problems = check(&text).expect_err(&text);
        assert_eq!(problems.len(), 1, "{text}\n{}", problems.render(false));
        assert_eq!(problems[0].code(), Code::NotAManifest, "{text}");
        let place = problems[0].place().expect("a place");
        assert_eq!((place.line, place.column), (line, column), "{text}\n{}", problems.render(false));
    }
    assert_eq!(codes(""), ["ENG-0109"]);
    assert_eq!(codes("# nothing\n---\n"), ["ENG-0109"]);
    assert_eq!(codes("apiVersion: engram.dev/v1alpha1\n"), ["ENG-0105"]);
    assert_eq!(codes(&format!("{good}? [a]\n: b\n")), ["ENG-0101"]);
    // Deep nesting and alias bombs end in an error, not in the process.
    assert_eq!(codes(&"[".repeat(100_000)), ["ENG-0109"]);
    let bomb: String =
        (1..12).map(|n| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 10].join(","))).collect();
    assert_eq!(codes(&format!("a0: &a0 x\n{bomb}")), ["ENG-0109"]);
}

#[test]
fn each_command_gets_what_it_needs_or_an_error() {
    let (cluster, other, run) =
        (cluster("{ workers: 5 }"), cluster("{ workers: 1 }").replace("words", "other"), source("git: {}", ""));
    let codes = |text: &str, needs| match parse(text, "test.yaml", needs) {
        Ok(_) => Vec::new(),
        Err(problems) => problems.iter().map(|problem| problem.code().id()).collect(),
    };
    let both = format!("{cluster}---\n{run}");
    assert!(codes(&both, Needs::Cluster).is_empty());
    assert!(codes(&both, Needs::Runs).is_empty());
    assert_eq!(codes(&run, Needs::Cluster), ["ENG-0109"]);
    assert_eq!(codes(&cluster, Needs::Runs), ["ENG-0109"]);
    assert_eq!(codes(&format!("{other}---\n{run}"), Needs::Cluster), ["ENG-0301"]);
    assert!(codes(&format!("{other}---\n{run}"), Needs::Anything).is_empty());

    let running = check(&other).unwrap().cluster.unwrap().spec;
    let manifest = parse(&run, "test.yaml", Needs::Runs).unwrap();
    assert!(manifest.check_runs_on("words", &running).is_ok());
    assert_eq!(manifest.check_runs_on("other", &running).unwrap_err()[0].code(), Code::ClusterNotFound);
    let large = parse(&source("synthetic: { memories: 1000002 }", ""), "test.yaml", Needs::Runs).unwrap();
    assert_eq!(large.check_runs_on("words", &running).unwrap_err()[0].code(), Code::Conflicting);
}

#[test]
fn problems_end_the_process_with_the_code_of_their_class() {
    let unknown_cluster = cluster("{ workers: 1 }").replace("words", "other") + "---\n" + &source("git: {}", "");
    let exit = |text: &str| parse(text, "test.yaml", Needs::Cluster).unwrap_err().exit_code().number();
    assert_eq!(exit(&unknown_cluster), 3);
    assert_eq!(exit(&cluster("{}")), 2);
    let old = check(&cluster("{ workers: 5 }")).unwrap().cluster.unwrap().spec;
    let new = check(&cluster("{ workers: 6, partitions: 128, features: { dimension: 4, dtype: F32 } }")).unwrap();
    let problems = new.check_against(&old, 0).unwrap_err();
    assert_eq!(problems.exit_code().number(), 5);
    let found: Vec<_> = problems.iter().map(|problem| (problem.code().id(), problem.path().unwrap())).collect();
    let immutable = |path| ("ENG-0108", path);
    assert_eq!(found, ["spec.partitions", "spec.features.dimension", "spec.features.dtype"].map(immutable));
    assert!(problems[0].message().contains("128") && problems[0].message().contains("256"));

    let lowered = |policy: &str| cluster(&format!("{{ workers: 5, capacity: {{ memories: 10, policy: {policy} }} }}"));
    assert!(check(&lowered("Evict")).unwrap().check_against(&old, 1000).is_ok());
    assert!(check(&lowered("Refuse")).unwrap().check_against(&old, 10).is_ok());
    let problems = check(&lowered("Refuse")).unwrap().check_against(&old, 11).unwrap_err();
    assert_eq!((problems[0].code(), problems.len()), (Code::Conflicting, 1));
}

#[test]
fn kubernetes_settings_are_checked_and_listed_as_ignored() {
    let text = cluster(
        "{ workers: 5, storage: { size: 50Gi }, tls: { mode: Auto }, gpu: { count: 1, mode: Auto }, \
         podTemplate: { metadata: { labels: { a: b } }, any: [1, 2.5, null] }, resources: { requests: { cpu: \"2\" } } }",
    ) + "---\n"
        + &source("git: {}", ", ttlSecondsAfterFinished: 60, managedBy: someone");
    let manifest = check(&text).unwrap_or_else(|problems| panic!("{}", problems.render(false)));
    let expected = [
        "spec.storage",
        "spec.tls",
        "spec.gpu.count",
        "spec.podTemplate",
        "spec.resources",
        "spec.ttlSecondsAfterFinished",
        "spec.managedBy",
    ];
    assert_eq!(manifest.ignored, expected);
    assert_eq!(manifest.local_notes(), [format!("ignored in local mode: {}", expected.join(", "))]);
    let replicated = check(&cluster("{ workers: 5, durability: { mode: Replicated } }")).unwrap();
    assert_eq!(replicated.local_notes(), ["spec.durability.mode: Replicated means Sync with one copy"]);
}
