//! The fields of a `LearnerRun`.

use super::{Row, events, memory, refused, run, source, taken};

#[test]
fn run_fields_are_taken_in_their_range_and_refused_outside() {
    const EVENTS: &str = "spec.memory.source.events";
    let columns = "columns: { key: word, epoch: day }";
    let rows: &[Row<String>] = &[
        (
            run("kind: Snapshot, snapshot: { url: _ }"),
            "ENG-0103",
            "spec.snapshot.url".into(),
            &["words", "s3://backups//words", "\"s3://backups/{name}/a\""],
            &["s3://backups/words", "\"s3://backups/words/{name}\""],
        ),
        (
            run("kind: Snapshot, snapshot: { volume: backups, path: _ }"),
            "ENG-0103",
            "spec.snapshot.path".into(),
            &["/words", "..", "words/../../a", "words//a", "\"{name}/a\"", "words/.a"],
            &["words", "\"{name}\"", "\"words/{name}\"", "words/a..b"],
        ),
        (
            run("kind: _, memory: { source: { git: {} } }"),
            "ENG-0104",
            "spec.kind".into(),
            &["memory", "Dream"],
            &["Memory"],
        ),
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
        (events("path: a.csv"), "spec.memory.source.events.columns"),
        (run("memory: { source: { git: {} } }"), "spec.kind"),
        (source("git: {}", "").replace("{ name: words }", "{}"), "spec.clusterRef.name"),
    ] {
        refused("ENG-0105", path, [text]);
    }
    refused("ENG-0106", "spec.kind", [run("kind: Snapshot")]);
    refused("ENG-0106", "spec.snapshot", [source("git: {}", ", snapshot: { url: s3://backups/words }")]);
    let blocks = [
        ("Geodesic", "geodesic", "{ source: { synthetic: {} } }"),
        ("Tropical", "tropical", "{ decode: {} }"),
        ("Fisher", "fisher", "{}"),
    ];
    for (index, (kind, block, body)) in blocks.into_iter().enumerate() {
        refused("ENG-0106", "spec.kind", [run(&format!("kind: {kind}"))]);
        taken([run(&format!("kind: {kind}, {block}: {body}"))]);
        let (_, other, other_body) = blocks[(index + 1) % blocks.len()];
        let both = format!("kind: {kind}, {block}: {body}, {other}: {other_body}");
        refused("ENG-0106", &format!("spec.{other}"), [run(&both)]);
    }
    let csv = |file: &str| run(&format!("kind: Geodesic, geodesic: {{ source: {{ csv: {file} }} }}"));
    taken([csv("{ path: a.csv }"), csv("{ input: corpus, path: a.csv }"), csv("{ configMap: { name: a, key: b } }")]);
    for (file, field) in [
        ("{}", ""),
        ("{ path: a.csv, configMap: { name: a, key: b } }", ".configMap"),
        ("{ input: corpus, path: ../a.csv }", ".path"),
        ("{ input: corpus, configMap: { name: a, key: b } }", ".input"),
    ] {
        refused("ENG-0106", &format!("spec.geodesic.source.csv{field}"), [csv(file)]);
    }
    tropical_and_fisher_fields();
    for (place, field) in [
        ("{}", ""),
        ("{ url: s3://backups/words, volume: backups, path: words }", ".volume"),
        ("{ volume: backups }", ".volume"),
        ("{ url: s3://backups/words, path: words }", ".path"),
        ("{ volume: backups, path: words, endpoint: http://minio:9000 }", ".endpoint"),
        ("{ volume: backups, path: words, region: r }", ".region"),
        ("{ volume: backups, path: words, secretRef: { name: s3 } }", ".secretRef"),
    ] {
        let text = run(&format!("kind: Snapshot, snapshot: {place}"));
        refused("ENG-0106", &format!("spec.snapshot{field}"), [text]);
    }
    let until = "kind: Snapshot, snapshot: { url: s3://backups/words }, until: { separation: 0.5 }";
    refused("ENG-0106", "spec.until", [run(until)]);
    let stored = |place: &str, more: &str| events(&format!("s3: {{ {place} }}, {columns}{more}"));
    let url = format!("{EVENTS}.s3.url");
    refused("ENG-0105", &url, [stored("region: r", "")]);
    refused(
        "ENG-0103",
        &url,
        ["a.csv", "gs://bbb/a.csv", "s3://bbb", "s3://bbb/a/", "\"s3://bbb/{name}\""]
            .map(|url| stored(&format!("url: {url}"), "")),
    );
    refused("ENG-0106", &url, [stored("url: s3://bbb/a.txt", "")]);
    refused("ENG-0106", &format!("{EVENTS}.s3"), [stored("url: s3://bbb/a.csv", ", path: a.csv")]);
    refused("ENG-0106", &format!("{EVENTS}.input"), [stored("url: s3://bbb/a.csv", ", input: corpus")]);
    taken([
        stored("url: s3://bbb/a/b.csv.zst, endpoint: http://minio:9000, region: r, secretRef: { name: s3 }", ""),
        stored("url: s3://bbb/a", ", format: Jsonl"),
    ]);
}

/// Fields of the blocks `tropical` and `fisher`.
fn tropical_and_fisher_fields() {
    let tropical = |body: &str| run(&format!("kind: Tropical, tropical: {{ {body} }}"));
    let fisher = |body: &str| run(&format!("kind: Fisher, fisher: {{ {body} }}"));
    taken([
        tropical("decode: { source: { synthetic: { states: 2 } } }, classify: { learningRates: [0.1] }"),
        tropical("graph: { file: { path: a.csv }, semiring: MinPlus, power: 3 }, classify: {}"),
        fisher("data: { csv: { file: { configMap: { name: a, key: b } }, label: kind } }, form: Empirical"),
    ]);
    refused("ENG-0106", "spec.tropical", [tropical("")]);
    let csv = "csv: { file: { path: a.csv }, label: kind }";
    let both = format!("graph: {{ file: {{ path: a.csv }} }}, classify: {{ data: {{ {csv} }} }}");
    refused("ENG-0106", "spec.tropical.graph", [tropical(&both)]);
    refused("ENG-0106", "spec.tropical.graph.file", [tropical("graph: { file: {} }")]);
    refused("ENG-0106", "spec.fisher.data.csv.file", [fisher("data: { csv: { file: {}, label: kind } }")]);
    refused("ENG-0105", "spec.fisher.data.csv.label", [fisher("data: { csv: { file: { path: a.csv } } }")]);
    let ranges = [
        ("classify: { hidden: _ }", "classify.hidden", &["0", "1025"][..]),
        ("classify: { learningRates: _ }", "classify.learningRates", &["[]"]),
        ("classify: { learningRates: [_] }", "classify.learningRates[0]", &["0", "11", ".nan"]),
        ("classify: { test: _ }", "classify.test", &["0", "0.6"]),
        ("classify: { temperature: _ }", "classify.temperature", &["-1", ".inf"]),
        ("decode: { source: { synthetic: { states: _ } } }", "decode.source.synthetic.states", &["1", "129"]),
        ("graph: { file: { path: a.csv }, power: _ }", "graph.power", &["0", "1000001"]),
    ];
    for (template, field, bad) in ranges {
        let path = format!("spec.tropical.{field}");
        refused("ENG-0103", &path, bad.iter().map(|value| tropical(&template.replace('_', value))));
    }
    for (field, bad) in [("damping", "-0.1"), ("hidden", "257"), ("batch", "0"), ("steps", "0"), ("test", "0.01")] {
        refused("ENG-0103", &format!("spec.fisher.{field}"), [fisher(&format!("{field}: {bad}"))]);
    }
    refused("ENG-0104", "spec.fisher.form", [fisher("form: Observed")]);
}
