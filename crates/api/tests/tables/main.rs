//! Every field of both kinds: what is taken, what is refused, with which code and where.

mod of_cluster;
mod of_run;

use engram_api::{Code, Manifest, Problems, Requirement, parse};

/// A document with a hole `_`, the code and the path of what is wrong with the bad values in it, bad and good values.
pub(crate) type Row<Text> = (Text, &'static str, Text, &'static [&'static str], &'static [&'static str]);

pub(crate) fn cluster(spec: &str) -> String {
    format!("apiVersion: engram.dev/v1alpha1\nkind: LearnerCluster\nmetadata: {{ name: words }}\nspec: {spec}\n")
}

pub(crate) fn run(spec: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: learn }}\n\
         spec: {{ clusterRef: {{ name: words }}, {spec} }}\n"
    )
}

pub(crate) fn events(fields: &str) -> String {
    run(&format!("kind: Memory, memory: {{ source: {{ events: {{ {fields} }} }} }}"))
}

pub(crate) fn source(source: &str, rest: &str) -> String {
    run(&format!("kind: Memory, memory: {{ source: {{ {source} }} }}{rest}"))
}

pub(crate) fn memory(source: &str, rest: &str) -> String {
    run(&format!("kind: Memory, memory: {{ source: {{ {source} }}{rest} }}"))
}

pub(crate) fn check(text: &str) -> Result<Manifest, Problems> {
    parse(text, "test.yaml", Requirement::Anything)
}

pub(crate) fn codes(text: &str) -> Vec<&'static str> {
    check(text).err().map_or_else(Vec::new, |problems| problems.iter().map(|problem| problem.code().id()).collect())
}

/// Asserts that each document has exactly one problem, `code`, about `path`.
#[track_caller]
pub(crate) fn refused(code: &str, path: &str, documents: impl IntoIterator<Item = String>) {
    for text in documents {
        let problems = check(&text).expect_err(&format!("must be refused: {text}"));
        let found: Vec<_> =
            problems.iter().map(|problem| (problem.code().id(), problem.path().unwrap_or(""))).collect();
        assert_eq!(found, [(code, path)], "{text}\n{}", problems.render(false));
        assert!(problems[0].location().is_some_and(|place| place.line > 0 && place.column > 0), "{text}");
        assert!(problems[0].message().starts_with(path), "{}", problems[0].message());
    }
}

#[track_caller]
pub(crate) fn taken(documents: impl IntoIterator<Item = String>) {
    for text in documents {
        if let Err(problems) = check(&text) {
            panic!("must be taken: {text}\n{}", problems.render(false));
        }
    }
}

#[test]
fn fields_that_do_not_go_together_are_refused_with_the_rule() {
    let with = |fields: &str| events(&format!("path: a.csv, {fields}"));
    let columns = |names: &str| with(&format!("columns: {{ {names} }}"));
    let rows = [
        (run("kind: Memory"), "spec.kind"),
        (source("git: {}", ", fisher: {}"), "spec.fisher"),
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
        let place = problems[0].location().expect("a place");
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
    assert!(codes(&both, Requirement::Cluster).is_empty());
    assert!(codes(&both, Requirement::Runs).is_empty());
    assert_eq!(codes(&run, Requirement::Cluster), ["ENG-0109"]);
    assert_eq!(codes(&cluster, Requirement::Runs), ["ENG-0109"]);
    assert_eq!(codes(&format!("{other}---\n{run}"), Requirement::Cluster), ["ENG-0301"]);
    assert!(codes(&format!("{other}---\n{run}"), Requirement::Anything).is_empty());

    let running = check(&other).unwrap().cluster.unwrap().spec;
    let manifest = parse(&run, "test.yaml", Requirement::Runs).unwrap();
    assert!(manifest.check_runs_on("words", &running).is_ok());
    assert_eq!(manifest.check_runs_on("other", &running).unwrap_err()[0].code(), Code::ClusterNotFound);
    let large = parse(&source("synthetic: { memories: 1000002 }", ""), "test.yaml", Requirement::Runs).unwrap();
    assert_eq!(large.check_runs_on("words", &running).unwrap_err()[0].code(), Code::Conflicting);
}

#[test]
fn problems_end_the_process_with_the_code_of_their_class() {
    let unknown_cluster = cluster("{ workers: 1 }").replace("words", "other") + "---\n" + &source("git: {}", "");
    let exit = |text: &str| parse(text, "test.yaml", Requirement::Cluster).unwrap_err().exit_code().number();
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

    let with = |text: &str| check(&cluster(&format!("{{ workers: 5, buffers: [{text}] }}"))).unwrap();
    let old_buffer =
        "{ name: b, capacity: 10, fields: [{ name: x, dtype: float32, shape: [2] }], sampler: { kind: Fifo } }";
    let declared = with(old_buffer).cluster.unwrap().spec;
    assert!(with(old_buffer).check_against(&declared, 0).is_ok());
    // Another buffer may be declared first, and one may be removed.
    assert!(with(&format!("{}, {old_buffer}", old_buffer.replace("b,", "a,"))).check_against(&declared, 0).is_ok());
    assert!(with("").check_against(&declared, 0).is_ok());
    let changed = old_buffer.replace("10, ", "20, maxAge: 2, ").replace("float32", "float64").replace("Fifo", "Lifo");
    let problems = with(&changed).check_against(&declared, 0).unwrap_err();
    let messages: Vec<&str> = problems.iter().map(|problem| problem.message()).collect();
    let of = |path: &str, new: &str, old: &str| {
        format!("spec.buffers[0].{path} of buffer b is {new}, but the buffer was declared with {old}; it cannot change")
    };
    let expected = [
        of("capacity", "20", "10"),
        of("fields[0].dtype", "float64", "float32"),
        of("maxAge", "2", "absent"),
        of("sampler.kind", "Lifo", "Fifo"),
    ];
    assert_eq!(messages, expected);
    assert_eq!(problems.exit_code().number(), 5);

    let lowered = |policy: &str| cluster(&format!("{{ workers: 5, capacity: {{ memories: 10, policy: {policy} }} }}"));
    assert!(check(&lowered("Evict")).unwrap().check_against(&old, 1000).is_ok());
    assert!(check(&lowered("Refuse")).unwrap().check_against(&old, 10).is_ok());
    let problems = check(&lowered("Refuse")).unwrap().check_against(&old, 11).unwrap_err();
    assert_eq!((problems[0].code(), problems.len()), (Code::Conflicting, 1));
}
