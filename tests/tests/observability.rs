//! A cluster as it is seen from outside: traces in a real Jaeger, metrics, rules and dashboards in a real Prometheus.

use engram_client::{Sample, SampleBy};
use engram_participant::{ClientKeys, Next, Participant};
use engram_proto::v1::ProblemKind;
use engram_tests::{
    Cluster, ClusterBuilder, DEADLINE, Dashboard, Jaeger, Panel, Prometheus, SpanRecord, checkout, cluster_manifest,
    page, run_manifest, skipped, wait_for,
};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

const WORKER: &str = "engram-worker";
const UPSERT: &str = "engram.v1.MemoryService/Upsert";
/// Dashboards of metrics that workers export, and the one of the operator.
const DASHBOARDS: [&str; 4] = ["clusters", "runs", "devices", "operator"];
/// Beginnings of metrics that this cluster does not export, since it has no operator and no certificates. The Kubernetes suite `operator`
/// evaluates the expressions that have them.
const NOT_EXPORTED: [&str; 8] = [
    "engram_certificate_expiry",
    "engram_cluster_",
    "engram_ended_runs",
    "engram_last_run",
    "engram_operator_",
    "engram_runs{",
    "leader_election",
    "engram_authentication",
];
fn training(name: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: {{ name: {name} }}\nspec:\n  clusterRef: {{ name: seen }}\n  \
         kind: Replay\n  replay:\n    source: {{ synthetic: {{ features: 60, samples: 1000, largest: 20 }} }}\n    model:\n      \
         inputs: [{{ field: mask, dim: 60 }}]\n      layers: [{{ dense: 8, activation: Relu }}, {{ dense: 1, activation: Sigmoid }}]\n      \
         loss: {{ kind: Mse, target: score }}\n    optimizer: {{ rate: 0.003 }}\n    batch: 32\n    steps: 40\n"
    )
}

/// Starts a Federated run with privacy, lets its clients end the first of two rounds, and leaves it running.
fn begin_federated_run(cluster: &Cluster) {
    let run = cluster.file(
        "federated.yaml",
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata: { name: shared }\nspec:\n  clusterRef: { name: seen }\n  \
         kind: Federated\n  federated:\n    model: { layers: [{ name: w, shape: [4] }] }\n    rounds: 2\n    \
         clients: { population: 2, perRound: 2, minimum: 2 }\n    \
         privacy: { epsilon: 1000, delta: 0.1, noiseMultiplier: 0.5, clip: 1 }\n",
    );
    cluster.engram(&["run", &run, "--no-wait"]).exits_with(0);
    cluster.client(async |client| {
        let train = async |name: &str| {
            let participant = Participant::new(client.clone(), "shared", name, ClientKeys::generate());
            let assignment = loop {
                match participant.next(Duration::from_secs(10)).await.expect("failed to check in") {
                    Next::Task(assignment) => break assignment,
                    Next::Nothing => {}
                    Next::Ended(how) => panic!("the run ended: {how}"),
                }
            };
            participant.submit(&assignment.task, &[0.5; 4], 1, Some(1.0)).await.expect("failed to submit");
        };
        tokio::join!(train("first"), train("second"));
    });
}

/// Fills a replay buffer from a file of 1,000 numbers, and draws from it.
fn fill_a_buffer(cluster: &Cluster) {
    let header = format!("{:<117}\n", "{'descr': '<f4', 'fortran_order': False, 'shape': (1000,), }");
    let mut array = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    array.extend(header.bytes());
    array.extend((0..1_000_u16).flat_map(|value| f32::from(value).to_le_bytes()));
    let file = cluster.file("reward.npy", array);
    cluster.engram(&["buffer", "import", "train", &file, "--capacity", "5000"]).exits_with(0);
    cluster.engram(&["buffer", "sample", "train", "--count", "64"]).exits_with(0);
}

/// Waits for items that a replay buffer does not have, until the deadline.
fn wait_for_items(cluster: &Cluster) {
    cluster.client(async |client| {
        let buffer = client.buffer("train").await.expect("the buffer exists");
        let mut sample = Sample::new(SampleBy::Fifo, 4_000, 0, 0);
        sample.wait = Duration::from_millis(300);
        let error = buffer.sample(sample).await.expect_err("the buffer has 1,000 items");
        assert_eq!(error.kind(), ProblemKind::BufferWait, "{error}");
    });
}

/// Draws the dashboards after two minutes of different work, for the documentation.
fn draw_pictures(cluster: &Cluster, prometheus: &Prometheus, folder: &Path) {
    const SECONDS: u64 = 120;
    let end = std::time::Instant::now() + Duration::from_secs(SECONDS);
    for round in 0.. {
        if std::time::Instant::now() > end {
            break;
        }
        let rows: String = (0..50 * (1 + round % 7))
            .map(|id| format!("{{\"id\":{},\"group\":{}}}\n", round * 1_000 + id, 7 + id % 5))
            .collect();
        cluster.engram_in(&[], &["insert", "--file", "-"], &rows).exits_with(0);
        cluster.engram(&["rank", "--limit", "50"]).exits_with(0);
        cluster.engram(&["buffer", "sample", "train", "--count", "256"]).exits_with(0);
        let name = format!("model-{round}");
        let steps = format!("steps: {}", 200 * (1 + round % 3));
        let run = cluster.file(&format!("{name}.yaml"), training(&name).replace("steps: 40", &steps));
        cluster.engram(&["run", &run]).exits_with(0);
        if round % 5 == 4 {
            cluster.engram(&["snapshot", "create", &name]).exits_with(0);
            fill_a_buffer(cluster);
        }
    }
    for name in DASHBOARDS {
        let picture = read_dashboard(name).render(|expression| prometheus.query_range(expression, SECONDS));
        std::fs::write(folder.join(format!("dashboard-{name}.svg")), picture).expect("failed to write a picture");
    }
}

fn read_dashboard(name: &str) -> Dashboard {
    let path = checkout().join(format!("charts/engram/files/dashboards/{name}.json"));
    Dashboard::parse(&std::fs::read_to_string(path).expect("the dashboard exists"))
}

/// Returns the span of this name that is a child of `parent`.
fn child<'a>(spans: &'a [SpanRecord], parent: &SpanRecord, name: &str) -> Option<&'a SpanRecord> {
    let is_child =
        |span: &&SpanRecord| span.name == name && span.trace == parent.trace && span.parent() == Some(&parent.id);
    spans.iter().find(is_child)
}

/// Waits until a trace has a path of spans, each the parent of the next, from a span without parent; returns the path.
fn wait_for_path(jaeger: &Jaeger, service: &str, path: &[&str]) -> Vec<SpanRecord> {
    wait_for(&format!("a trace with {path:?}"), DEADLINE, || {
        let spans = jaeger.spans(service, path[0]);
        let roots = spans.iter().filter(|span| span.name == path[0] && span.parent().is_none());
        let mut paths = roots.filter_map(|root| {
            let mut found = vec![root.clone()];
            for name in &path[1..] {
                found.push(child(&spans, found.last()?, name)?.clone());
            }
            Some(found)
        });
        paths.next()
    })
}

/// Writes memories by a command: the client, the worker that serves the call, and the replicas are one trace.
fn writes_are_one_trace(cluster: &Cluster, jaeger: &Jaeger) {
    let write = ["engram insert", "write", UPSERT];
    let path = wait_for_path(jaeger, "engram-cli", &write);
    assert_eq!((path[0].service.as_str(), path[2].service.as_str()), ("engram-cli", WORKER));
    for step in ["admission", "log", "replicate", "apply"] {
        wait_for_path(jaeger, "engram-cli", &[&write[..], &[step]].concat());
    }
    let replicated = wait_for_path(jaeger, "engram-cli", &[&write[..], &["replicate", "append"]].concat());
    assert_eq!(replicated[4].service, WORKER);
    assert!(replicated[4].tag("engram.lsn").is_some() && cluster.workers() == 3);
}

/// Waits until a span exists, with a link to the trace of its run.
fn wait_for_link(jaeger: &Jaeger, name: &str) {
    let runs: BTreeSet<String> =
        wait_for("traces of runs", DEADLINE, || Some(jaeger.spans(WORKER, "run")).filter(|spans| !spans.is_empty()))
            .into_iter()
            .map(|span| span.trace)
            .collect();
    wait_for(&format!("a link of {name} to its run"), DEADLINE, || {
        let spans = jaeger.spans(WORKER, name);
        let links = spans.iter().filter(|span| span.name == name).flat_map(|span| span.references.clone());
        links.into_iter().any(|(_, trace, _)| runs.contains(&trace)).then_some(())
    });
}

fn runs_and_steps_are_traces(jaeger: &Jaeger) {
    wait_for_path(
        jaeger,
        WORKER,
        &["epoch", "learn epoch", "engram.v1.MemoryService/LearnEpoch", "replicate", "append"],
    );
    wait_for_path(jaeger, WORKER, &["epoch", "predict"]);
    wait_for_link(jaeger, "epoch");
    for part in ["compute", "reduce", "update"] {
        wait_for_path(jaeger, WORKER, &["training step", part]);
        // The members agree on the trace of a step: that of rank 0 is the parent of the others.
        wait_for_path(jaeger, WORKER, &["training step", "training step", part]);
    }
    wait_for_link(jaeger, "training step");
}

/// Kills a worker: those that take over, and the coordinator that writes the map, record one trace.
fn a_failover_is_one_trace(cluster: &mut Cluster, jaeger: &Jaeger) {
    let pid = cluster.worker(1).expect("the worker runs");
    cluster.kill(pid);
    wait_for("the trace of the failover", DEADLINE, || {
        let spans = jaeger.spans(WORKER, "failover");
        let failovers = spans.iter().filter(|span| span.name == "failover");
        let mut complete = failovers.filter(|span| {
            let parts = ["promote", "activate"].iter().all(|part| child(&spans, span, part).is_some());
            parts && spans.iter().any(|other| other.name == "write partition map" && other.trace == span.trace)
        });
        complete.next().map(|span| assert_eq!(span.tag("engram.worker.failed"), Some(&1.into())))
    });
    cluster.wait_until_ready();
}

fn http_ports(cluster: &Cluster) -> Vec<u16> {
    let endpoints = cluster.endpoints().expect("the cluster runs");
    let workers = endpoints["workers"].as_array().expect("workers are a list").clone();
    let port = |text: &str| text.rsplit(':').next().and_then(|port| port.parse().ok());
    workers.iter().filter_map(|worker| port(worker["http"].as_str()?)).collect()
}

/// Each link of a panel to traces of workers finds some.
fn links_find_traces(jaeger: &Jaeger) {
    let mut operations = BTreeSet::new();
    for name in ["clusters", "runs"] {
        let path = checkout().join(format!("charts/engram/files/dashboards/{name}.json"));
        let text = std::fs::read_to_string(path).expect("the dashboard exists");
        let before = operations.len();
        let service = format!("%22service%22:%22{WORKER}%22,%22operation%22:%22");
        let linked = text.split(&service).skip(1).filter_map(|rest| rest.split("%22").next());
        operations.extend(linked.map(|it| it.replace("%20", " ").replace("%2F", "/")));
        assert!(operations.len() > before + 2, "links of {name}: {operations:?}");
    }
    for operation in operations {
        wait_for(&format!("a trace with {operation}"), DEADLINE, || {
            jaeger.spans(WORKER, &operation).iter().any(|span| span.name == operation).then_some(())
        });
    }
}

/// Every panel of workers, and every recorded indicator, has data; exemplars name traces that Jaeger has.
fn dashboards_have_data(prometheus: &Prometheus, jaeger: &Jaeger) {
    let mut evaluated = 0;
    for name in DASHBOARDS {
        let dashboard = read_dashboard(name);
        let expressions =
            dashboard.panels.iter().flat_map(|panel| panel.targets.iter().map(move |(it, _)| (panel, it)));
        for (panel, expression) in expressions.filter(|(_, it)| !NOT_EXPORTED.iter().any(|metric| it.contains(metric)))
        {
            let expression = Panel::expression(expression);
            wait_for(&format!("data of {} / {}: {expression}", dashboard.title, panel.title), DEADLINE, || {
                Some(prometheus.query(&expression)).filter(|found| !found.is_empty())
            });
            evaluated += 1;
        }
    }
    assert!(evaluated > 50, "{evaluated} expressions");
    let exemplar = wait_for("an exemplar", DEADLINE, || {
        let found = prometheus.exemplars("engram_request_duration_seconds_bucket{method=\"Upsert\"}");
        found.iter().find_map(|series| series["exemplars"][0]["labels"]["trace_id"].as_str().map(str::to_owned))
    });
    wait_for("the trace of the exemplar", DEADLINE, || {
        jaeger.spans(WORKER, UPSERT).iter().any(|span| span.trace == exemplar).then_some(())
    });
}

/// Every rule is evaluated, every recorded one has data, and so has what alerts of workers name.
fn rules_have_data(prometheus: &Prometheus) {
    let (mut recorded, mut named) = (0, BTreeSet::new());
    let wait = |expression: &str| {
        wait_for(expression, DEADLINE, || Some(prometheus.query(expression)).filter(|found| !found.is_empty()));
    };
    for rule in wait_for("the rules", DEADLINE, || {
        let rules = prometheus.rules();
        rules.iter().all(|rule| rule["health"] == "ok").then_some(rules)
    }) {
        if rule["type"] == "recording" {
            wait(rule["name"].as_str().expect("a rule has a name"));
            recorded += 1;
            continue;
        }
        let expression = rule["query"].as_str().expect("an alert has an expression");
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let metrics = words.filter(|word| word.starts_with("engram_"));
        named.extend(
            metrics
                .filter(|metric| !NOT_EXPORTED.iter().any(|it| format!("{metric}{{").contains(it)))
                .map(str::to_owned),
        );
    }
    assert!(recorded > 12 && named.len() > 7, "{recorded} recorded, {named:?}");
    named.iter().for_each(|metric| wait(metric));
}

#[test]
fn traces_reach_jaeger_and_every_panel_has_data() {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join("observability");
    std::fs::create_dir_all(&scratch).expect("failed to create a folder");
    let (Some(jaeger), Some(prometheus)) = (Jaeger::find(&scratch), Prometheus::find()) else {
        skipped("no Jaeger (ENGRAM_JAEGER, or shared/observability next to the checkout) or no prometheus on the path");
        return;
    };
    let manifest = cluster_manifest("seen", 3, "  partitions: 8\n  replicationFactor: 2\n");
    let builder = ClusterBuilder::new(&manifest);
    let folder = builder.state_dir().parent().expect("the state directory has a parent").to_owned();
    let jaeger = Jaeger::start(&jaeger, &folder);
    let endpoint = jaeger.endpoint();
    // A second instead of five: the test waits for its last spans.
    let often = [("OTEL_BSP_SCHEDULE_DELAY", "500")];
    let mut cluster =
        builder.with(&["--otlp-endpoint", &endpoint, "--trace-sample", "1"]).with_environment(&often).start();
    let targets: Vec<String> = http_ports(&cluster).iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let prometheus = Prometheus::start(&prometheus, &folder, &targets);

    let environment = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str())];
    let rows: String = (0..200).map(|id| format!("{{\"id\":{id},\"group\":7}}\n")).collect();
    cluster.engram_in(&environment, &["insert", "--file", "-"], &rows).exits_with(0);
    writes_are_one_trace(&cluster, &jaeger);
    let memory = cluster.file(
        "memory.yaml",
        run_manifest("few", "seen", "    source: { synthetic: { memories: 500 } }\n    epochs: 12\n"),
    );
    cluster.engram(&["run", &memory]).exits_with(0);
    let replay = cluster.file("replay.yaml", training("model"));
    cluster.engram(&["run", &replay]).exits_with(0);
    cluster.engram_in(&environment, &["snapshot", "create", "seen"], "").exits_with(0);
    wait_for_path(&jaeger, "engram-cli", &["engram snapshot", "engram.v1.AdminService/CreateSnapshot", "snapshot"]);
    runs_and_steps_are_traces(&jaeger);
    begin_federated_run(&cluster);
    fill_a_buffer(&cluster);
    wait_for_items(&cluster);
    dashboards_have_data(&prometheus, &jaeger);
    // A rate needs calls after the first scrape of their counter.
    cluster.engram_in(&[], &["insert", "--file", "-"], &rows).exits_with(0);
    let again = cluster.file(
        "again.yaml",
        run_manifest("again", "seen", "    source: { example: { name: StateOfTheUnion } }\n    epochs: 12\n"),
    );
    cluster.engram(&["run", &again]).exits_with(0);
    rules_have_data(&prometheus);
    if let Some(folder) = std::env::var_os("ENGRAM_DASHBOARD_PICTURES") {
        draw_pictures(&cluster, &prometheus, Path::new(&folder));
    }
    a_failover_is_one_trace(&mut cluster, &jaeger);
    links_find_traces(&jaeger);
    let exported = page(http_ports(&cluster)[0], "/metrics").expect("the worker responds");
    assert!(
        exported.lines().any(|line| line.contains("request_duration") && line.contains("# {trace_id=")),
        "{exported}"
    );
    let (_, status) = cluster.stop();
    assert!(status.success());
}

/// Alerts have a page each, and no page is left over.
#[test]
fn every_alert_links_to_its_runbook() {
    let rules = std::fs::read_to_string(checkout().join("charts/engram/files/alerts.yaml")).expect("the rules exist");
    let value = |line: &str, key: &str| line.trim().strip_prefix(key).map(str::to_owned);
    let alerts: Vec<String> = rules.lines().filter_map(|line| value(line, "- alert: ")).collect();
    let links: Vec<String> = rules.lines().filter_map(|line| value(line, "runbook_url: ")).collect();
    let expected: Vec<String> = alerts.iter().map(|alert| format!("docs/runbooks/{alert}.md")).collect();
    assert_eq!(links, expected);
    for link in &links {
        let page = std::fs::read_to_string(checkout().join(link)).unwrap_or_else(|error| panic!("{link}: {error}"));
        assert!(["## Diagnosis", "## Mitigation"].iter().all(|part| page.contains(part)), "{link} is incomplete");
    }
    let pages = std::fs::read_dir(checkout().join("docs/runbooks")).expect("the folder exists").count();
    assert_eq!(pages, alerts.len() + 1, "pages without an alert, besides the index");
}
