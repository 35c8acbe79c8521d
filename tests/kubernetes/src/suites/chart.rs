//! The chart: what Helm makes of it, what the API server says to that, and what is left when it goes. The built-in cluster
//! has no image of the operator: its pods are stand-ins.

mod settings;

use super::Check;
use super::faults::install::load_images;
use super::helpers::WHILE;
use crate::cluster::Cluster;
use crate::process::{self, until};
use crate::requirements::{Skip, find};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// What the chart gives to Grafana.
/// Dashboards of the chart. The first two have metrics that every cluster exports.
pub(super) const DASHBOARDS: [&str; 4] = [
    include_str!("../../../../charts/engram/files/dashboards/clusters.json"),
    include_str!("../../../../charts/engram/files/dashboards/operator.json"),
    include_str!("../../../../charts/engram/files/dashboards/devices.json"),
    include_str!("../../../../charts/engram/files/dashboards/runs.json"),
];
const NAMESPACE: &str = "engram-system";
const OPERATOR: &str = "system:serviceaccount:engram-system:engram-operator";
const CLUSTERS: &str = "/apis/engram.dev/v1alpha1/namespaces/engram-system/learnerclusters";
const KINDS: [&str; 3] = ["learnerclusters", "learnerruns", "partitionmaps"];
/// Far more than Helm waits for stand-ins.
const TIMEOUT: &str = "--timeout=50s";
/// Far more than a program takes that only reads.
const LIMIT: Duration = Duration::from_secs(60);

/// Values that people install with; each is taken by the API server as a whole.
const INSTALLS: [(&str, &[&str]); 7] = [
    ("as it comes", &[]),
    ("with values kept from a release that had fewer", &["config=null", "otel=null"]),
    ("for two namespaces", &["watchNamespaces={research,ml}", "crds.enabled=false"]),
    ("with cert-manager", &["certManager.enabled=true"]),
    ("with a file of settings", &["config.concurrency=16"]),
    ("one operator on OpenShift", &["replicaCount=1", "leaderElection.enabled=false", "openshift=true"]),
    (
        "with everything named",
        &[
            "fullnameOverride=learn",
            "commonLabels.team=ml",
            "commonAnnotations.owner=ml",
            "global.imageRegistry=registry.example.com",
            "operator.image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "imagePullSecrets[0].name=pull",
            "serviceAccount.annotations.role=learn",
            "rbac.aggregateClusterRoles=false",
            "priorityClassName=system-cluster-critical",
            "hostUsers=false",
            "logging.format=json",
            "otel.endpoint=http://collector.observability:4317",
            "otel.resourceAttributes.team=machine learning",
            "extraArgs={--concurrency=4}",
            "extraEnv[0].name=ENGRAM_LOG",
            "extraEnv[0].value=debug",
            "metrics.enabled=false",
            "networkPolicy.enabled=false",
            "podDisruptionBudget.maxUnavailable=50%",
        ],
    ),
];

/// Invalid values, and a part of the expected error.
const REFUSED: [(&str, &str); 20] = [
    ("replicaCout=3", "replicaCout"),
    ("replicaCount=-1", "replicaCount"),
    ("logging.format=xml", "format"),
    ("otel.endpoint=collector", "endpoint"),
    ("otel.endpoint=http://collector:4318/v1/traces", "endpoint"),
    ("otel.protocol=http/protobuf", "protocol"),
    ("otel.samplerRatio=1.5", "samplerRatio"),
    ("otel.headers=none", "headers"),
    ("operator.image.digest=latest", "digest"),
    ("watchNamespaces={Research}", "watchNamespaces"),
    ("certManager.enabled=maybe", "certManager"),
    ("config.concurency=4", "concurency"),
    ("config.concurrency=0", "concurrency"),
    ("config.apiVersion=operator.engram.dev/v9", "apiVersion"),
    ("config.http.listen=0.0.0.0:80", "config.http: set by the chart"),
    ("config.watchNamespaces={ml}", "config.watchNamespaces: set watchNamespaces instead"),
    ("config.logging.level=debug", "config.logging: set logging instead"),
    ("leaderElection.enabled=false", "leaderElection.enabled: false; allowed only with replicaCount: 1"),
    ("serviceAccount.create=false", "serviceAccount.name is required"),
    ("metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true", "both would scrape every replica twice"),
];

/// Whether the operator may do a thing, as its one ServiceAccount.
const RIGHTS: [(&str, &str, &str, bool); 11] = [
    ("create", "statefulsets.apps", "research", true),
    ("patch", "partitionmaps.engram.dev", "research", true),
    ("patch", "learnerclusters.engram.dev/status", "research", true),
    ("list", "nodes", "", true),
    ("update", "leases.coordination.k8s.io/engram-operator", NAMESPACE, true),
    ("get", "secrets", NAMESPACE, false),
    ("get", "certificates.cert-manager.io", "research", false),
    ("create", "pods", "research", false),
    ("update", "leases.coordination.k8s.io", "research", false),
    ("patch", "customresourcedefinitions.apiextensions.k8s.io", "", false),
    ("force-promote", "partitionmaps.engram.dev", "research", false),
];

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "the chart passes Helm's own lint, and rejects invalid values", run: refuses },
        Check { name: "the API server takes what it makes of values that people install with", run: is_taken },
        Check { name: "settings become a file, which only those have who ask for it", run: settings::config },
        Check { name: "what the chart sets by itself is no setting of that file", run: settings::refused },
        Check { name: "rights for cert-manager are given where they are asked for, and only there", run: cert_manager },
        Check { name: "traces go where an endpoint is named, and nowhere else", run: traces },
        Check {
            name: "monitors, alerts and dashboards are made where they are asked for, and only there",
            run: monitors,
        },
        Check {
            name: "Prometheus takes alerts and dashboards, and each alert fires exactly where it should",
            run: alerts,
        },
        Check { name: "the manifests for people without Helm are what the chart makes", run: without_helm },
    ]
}

/// A release, on nodes that have its images.
pub(super) fn releases() -> Vec<Check> {
    vec![
        Check { name: "a release is Ready in a namespace that enforces restricted pods", run: installs },
        Check { name: "the operator may do what it does, and nothing else", run: rights },
        Check { name: "a map takes legal changes, and no others but those that a person may order", run: guards },
        Check { name: "an upgrade moves the operator, and clusters outlive the release", run: goes },
    ]
}

fn helm(cluster: &Cluster, command: &[&str], values: &[&str]) -> Result<String> {
    let program = cluster.kubernetes_program("helm")?;
    let sets = values.iter().flat_map(|value| ["--set", value]);
    let arguments: Vec<&str> = command.iter().copied().chain(sets).collect();
    cluster.client(program, arguments, "")
}

fn folder() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../charts/engram").to_string_lossy().into_owned()
}

fn template(cluster: &Cluster, values: &[&str]) -> Result<String> {
    helm(cluster, &["template", "engram", &folder(), "--namespace", NAMESPACE], values)
}

fn refuses(cluster: &Cluster) -> Result<String> {
    helm(cluster, &["lint", "--strict", &folder()], &[])?;
    for (values, output) in REFUSED {
        let Err(error) = template(cluster, &[values]) else { bail!("{values} is taken") };
        ensure!(format!("{error:#}").contains(output), "{values} is refused with other words: {error:#}");
    }
    Ok(format!("{} refusals", REFUSED.len()))
}

fn namespace(name: &str) -> Result<String> {
    let labels = json!({ "pod-security.kubernetes.io/enforce": "restricted" });
    let object = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": labels } });
    Ok(serde_json::to_string(&object)?)
}

fn is_taken(cluster: &Cluster) -> Result<String> {
    let kubectl = cluster.kubernetes_program("kubectl")?;
    for name in [NAMESPACE, "research", "ml"] {
        cluster.apply(&namespace(name)?)?;
    }
    let mut objects = 0;
    for (who, values) in INSTALLS {
        let rendered = template(cluster, values).with_context(|| who.to_owned())?;
        let arguments = ["create", "--dry-run=server", "--validate=strict", "-f", "-"];
        let taken = cluster.client(&kubectl, arguments, &without_definitions(&rendered));
        objects += taken.with_context(|| who.to_owned())?.lines().count();
    }
    Ok(format!("{objects} objects"))
}

/// Another suite's definitions may be there already, and its policy, and a dry run cannot make them twice.
fn without_definitions(rendered: &str) -> String {
    let kinds = ["kind: CustomResourceDefinition", "kind: ValidatingAdmissionPolicy"];
    let others = rendered.split("\n---\n").filter(|it| !kinds.iter().any(|kind| it.contains(kind)));
    others.collect::<Vec<_>>().join("\n---\n")
}

fn cert_manager(cluster: &Cluster) -> Result<String> {
    let asked = "certManager.enabled=true";
    let of_two = [asked, "watchNamespaces={research,ml}", "crds.enabled=false"];
    for (values, roles) in [(&[][..], 0), (&[asked], 1), (&of_two, 2)] {
        let rendered = template(cluster, values)?;
        let rule = "apiGroups: [cert-manager.io]\n    resources: [certificates]\n    verbs: [get, create, patch]\n";
        let found = rendered.matches(rule).count();
        ensure!(found == roles, "{found} roles, not {roles}, with {values:?}");
        ensure!(rendered.matches("apiGroups: [cert-manager.io]").count() == roles, "other rights with {values:?}");
    }
    Ok(String::new())
}

fn monitors(cluster: &Cluster) -> Result<String> {
    let kinds = ["kind: ServiceMonitor", "kind: PodMonitor", "kind: PrometheusRule", "grafana_dashboard: \"1\""];
    let plain = template(cluster, &[])?;
    ensure!(!kinds.iter().any(|kind| plain.contains(kind)), "a monitor that was not requested");
    let values = [
        "metrics.serviceMonitor.enabled=true",
        "metrics.workerPodMonitor.enabled=true",
        "metrics.prometheusRule.enabled=true",
        "metrics.prometheusRule.disabled.EngramWorkerNotReady=true",
        "metrics.prometheusRule.additionalRuleLabels.team=ml",
        "metrics.dashboards.enabled=true",
    ];
    let asked = template(cluster, &values)?;
    ensure!(kinds.iter().all(|kind| asked.contains(kind)), "a monitor that was asked for is missing");
    ensure!(
        asked.contains("EngramPartitionUnderReplicated") && asked.contains("team: ml"),
        "the alerts are not all there"
    );
    ensure!(!asked.contains("EngramWorkerNotReady"), "an alert that is not wanted is there");
    let dashboards = asked.split("\n---\n").find(|it| it.contains("grafana_folder: Engram"));
    let texts: Vec<&str> = dashboards.context("no dashboards in their folder")?.split(".json: |-\n").skip(1).collect();
    ensure!(texts.len() == DASHBOARDS.len(), "{} dashboards", texts.len());
    let mut panels = 0;
    for text in texts {
        // The name of the next one follows.
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
        panels += expressions(&values.next().context("an empty dashboard")?.context("a dashboard is no JSON")?).len();
    }
    ensure!(panels > 40, "the dashboards ask for {panels} things only");
    let linked = template(
        cluster,
        &["metrics.prometheusRule.enabled=true", "metrics.prometheusRule.runbookBaseUrl=https://wiki/run/"],
    )?;
    ensure!(
        linked.contains("runbook_url: https://wiki/run/EngramWorkerNotReady.md"),
        "alerts do not link to the runbooks"
    );
    Ok(format!("{panels} expressions in the dashboards"))
}

fn traces(cluster: &Cluster) -> Result<String> {
    ensure!(!template(cluster, &[])?.contains("OTEL_"), "a chart without an endpoint has variables of traces");
    let named = "otel.endpoint=http://collector.observability:4317";
    let values = [named, "otel.samplerRatio=0.25", "otel.resourceAttributes.team=machine learning\\, a=b"];
    let rendered = template(cluster, &values)?;
    for (name, value) in [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.observability:4317"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
        ("OTEL_RESOURCE_ATTRIBUTES", "team=machine%20learning%2C%20a%3Db"),
    ] {
        let variable = format!("- {{ name: {name}, value: \"{value}\" }}");
        ensure!(rendered.contains(&variable), "no variable {variable}");
    }
    ensure!(!rendered.contains("OTEL_EXPORTER_OTLP_INSECURE"), "it says what was left to the endpoint");
    ensure!(rendered.contains("- { port: 4317, protocol: TCP }"), "the operator's NetworkPolicy keeps traces in");
    let own = ["extraEnv[0].name=OTEL_TRACES_SAMPLER", "extraEnv[0].value=always_on"];
    let rendered = template(cluster, &[named, "otel.insecure=false", own[0], own[1]])?;
    ensure!(
        rendered.matches("name: OTEL_TRACES_SAMPLER\n").count() == 1,
        "a variable of the user's is not the only one"
    );
    ensure!(!rendered.contains("parentbased_traceidratio"), "a variable of the user's is not the only one");
    ensure!(rendered.contains("name: OTEL_EXPORTER_OTLP_INSECURE, value: \"false\""), "false is taken for nothing");
    Ok(String::new())
}

/// What the panels of a dashboard ask Prometheus for.
fn expressions(dashboard: &Value) -> Vec<&str> {
    let targets = dashboard["panels"].as_array().into_iter().flatten().filter_map(|panel| panel["targets"].as_array());
    targets.flatten().filter_map(|target| target["expr"].as_str()).collect()
}

/// The dashboard's expressions as rules, with what Grafana puts in for its variables: Prometheus checks no others.
fn as_rules(dashboard: &Value) -> Value {
    let rule = |(number, expression): (usize, &str)| {
        let expression = expression.replace("$__rate_interval", "2m");
        json!({ "record": format!("dashboard:{number}"), "expr": expression })
    };
    let rules: Vec<Value> = expressions(dashboard).into_iter().enumerate().map(rule).collect();
    json!({ "groups": [{ "name": "dashboard", "rules": rules }] })
}

/// The rules as a release has them, with the chart's own tests of them.
fn alerts(cluster: &Cluster) -> Result<String> {
    let promtool = find("promtool").ok_or_else(|| Skip("there is no promtool: apt-get install prometheus".into()))?;
    let only = ["--show-only", "templates/monitors.yaml"];
    let chart = folder();
    let rendered = ["template", "engram", &chart, "--namespace", NAMESPACE];
    let rendered = helm(cluster, &[&rendered[..], &only].concat(), &["metrics.prometheusRule.enabled=true"])?;
    let (_, groups) = rendered.split_once("\nspec:\n").context("the PrometheusRule has no spec")?;
    let scratch = tempfile::tempdir()?;
    let (rules, tests) = (scratch.path().join("files/alerts.yaml"), scratch.path().join("tests/alerts.yaml"));
    for file in [&rules, &tests] {
        std::fs::create_dir_all(file.with_file_name(""))?;
    }
    std::fs::write(&rules, groups)?;
    let written = std::fs::read_to_string(Path::new(&chart).join("tests/alerts.yaml"))?;
    std::fs::write(&tests, &written)?;
    let run = |verb: &str, file: &Path| {
        let mut command = Command::new(&promtool);
        process::read(command.args([verb, "rules"]).arg(file), b"", LIMIT)
    };
    run("check", &rules)?;
    run("test", &tests)?;
    for dashboard in DASHBOARDS {
        let path = scratch.path().join("dashboard.json");
        std::fs::write(&path, as_rules(&serde_json::from_str(dashboard)?).to_string())?;
        run("check", &path)?;
    }
    // An alert that never fires in a test may never fire at all.
    let names: Vec<&str> =
        groups.lines().filter_map(|line| line.trim_start_matches([' ', '-']).strip_prefix("alert: ")).collect();
    ensure!(!names.is_empty(), "the release has no alert");
    for name in &names {
        let fires = format!("alertname: {name}\n        exp_alerts:\n");
        ensure!(written.contains(&fires), "{name} fires in no test");
        let quiet = format!("alertname: {name} }}");
        ensure!(written.contains(&quiet), "no test holds {name} quiet");
    }
    Ok(format!("{} alerts", names.len()))
}

/// `deploy/operator.yaml` is rewritten if it differs, so that it only has to be reviewed and committed.
fn without_helm(cluster: &Cluster) -> Result<String> {
    const HEAD: &str = "# What the chart makes with its defaults, for people without Helm; do not edit. The suite `chart` of the \
        Kubernetes tests compares the two.\napiVersion: v1\nkind: Namespace\nmetadata:\n  name: engram-system\n  labels:\n    \
        pod-security.kubernetes.io/enforce: restricted\n";
    let rendered = template(cluster, &["crds.enabled=false"])?;
    let is_ours = |line: &&str| !line.contains("helm.sh/chart:") && !line.starts_with("# Source:");
    let mut fresh = HEAD.to_owned();
    for object in rendered.split("---\n").filter(|it| !it.trim().is_empty() && !it.contains("helm.sh/hook")) {
        let lines: Vec<&str> = object.lines().filter(is_ours).collect();
        let lines = lines.join("\n").replace("managed-by: Helm", "managed-by: engram");
        fresh.push_str(&format!("---\n{}\n", lines.trim_matches('\n')));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/operator.yaml");
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    if committed != fresh {
        std::fs::write(&path, &fresh).with_context(|| format!("failed to write {}", path.display()))?;
        bail!("deploy/operator.yaml differed from the chart and is rewritten");
    }
    let kubectl = cluster.kubernetes_program("kubectl")?;
    let taken = cluster.client(kubectl, ["apply", "--dry-run=server", "--validate=strict", "-f", "-"], &fresh)?;
    Ok(format!("{} objects", taken.lines().count()))
}

fn deployment(cluster: &Cluster) -> Result<Option<Value>> {
    cluster.api().find("/apis/apps/v1/namespaces/engram-system/deployments/engram-operator")
}

fn installs(cluster: &Cluster) -> Result<String> {
    if !cluster.is_fake() {
        load_images(cluster)?;
    }
    // Definitions may be there that no release made.
    let command = ["install", "engram", &folder(), "--namespace", NAMESPACE, "--take-ownership", "--wait", TIMEOUT];
    let output = helm(cluster, &command, &[])?;
    ensure!(
        output.lines().count() < 40 && output.contains("kubectl get learnerclusters"),
        "the notes are not short:\n{output}"
    );
    let found = deployment(cluster)?.context("no Deployment")?;
    ensure!(found["status"]["readyReplicas"] == 2, "not ready: {}", found["status"]);
    for kind in KINDS {
        cluster.kubectl(["wait", "--for=condition=Established", &format!("crd/{kind}.engram.dev"), "--timeout=20s"])?;
    }
    Ok(String::new())
}

fn rights(cluster: &Cluster) -> Result<String> {
    for (verb, resource, namespace, expected) in RIGHTS {
        // In two parts: a slash stands before a subresource, or, for the Lease, before a name.
        let (kind, rest) = resource.split_once('/').unwrap_or((resource, ""));
        let (resource, subresource) = if kind.starts_with("leases") {
            (resource, String::new())
        } else {
            (kind, format!("--subresource={rest}"))
        };
        let mut arguments = vec!["auth", "can-i", verb, resource, "--as", OPERATOR, "-n", namespace];
        if namespace.is_empty() {
            arguments.truncate(6);
        }
        if !subresource.is_empty() && !rest.is_empty() {
            arguments.push(&subresource);
        }
        // It ends with status 1 for "no".
        let output = cluster.kubectl_command(&arguments)?.output()?;
        let allowed = String::from_utf8_lossy(&output.stdout).trim() == "yes";
        ensure!(allowed == expected, "{verb} {resource} {rest} in '{namespace}': {allowed}, not {expected}");
    }
    Ok(format!("{} rights", RIGHTS.len()))
}

/// Changes of a map of two partitions on the disks 0, 1 and 2, one after the other: the requester, the change, and the error of one that
/// is refused.
const CHANGES: [(&str, &str, &str); 16] = [
    (OPERATOR, r#"{"clusterId":"00000000000000000000000000000002"}"#, "never change"),
    (OPERATOR, r#"{"stores":{"0":{"ordinal":5}}}"#, "store numbers are immutable"),
    (OPERATOR, r#"{"stores":{"2":null}}"#, "store numbers are immutable"),
    (OPERATOR, r#"{"partitions":{"1":null}}"#, "neither added nor removed"),
    (OPERATOR, r#"{"partitions":{"0":{"term":3}}}"#, "a term never decreases"),
    (OPERATOR, r#"{"partitions":{"0":{"isr":["0/1"]}}}"#, "raises the term by exactly 1"),
    (OPERATOR, r#"{"partitions":{"0":{"activated":false,"prev":["0/1","1/4"]}}}"#, "cannot be unset within a term"),
    (OPERATOR, r#"{"partitions":{"0":{"term":5,"primary":1,"isr":["1/4"],"activated":false}}}"#, "prev is the isr"),
    (OPERATOR, r#"{"partitions":{"0":{"term":5,"primary":1,"isr":["0/1"]}}}"#, "known store and in isr"),
    (
        OPERATOR,
        r#"{"partitions":{"0":{"term":5,"primary":2,"isr":["2/1"],"activated":false,"prev":["0/1","1/4"]}}}"#,
        "must be candidates of the old",
    ),
    // A failover: promoted, taken up, a copy made again on a new disk.
    (
        OPERATOR,
        r#"{"partitions":{"0":{"term":5,"primary":1,"isr":["1/4"],"activated":false,"prev":["0/1","1/4"]}}}"#,
        "",
    ),
    (OPERATOR, r#"{"partitions":{"0":{"activated":true,"soloSafe":true,"prev":null,"learners":[0]}}}"#, ""),
    (
        OPERATOR,
        r#"{"stores":{"3":{"ordinal":0,"storeId":"00000000000000000000000000000013"}},
           "partitions":{"0":{"term":6,"isr":["1/4","3/1"],"soloSafe":null,"learners":null}}}"#,
        "",
    ),
    // Overrides that an administrator may make, and changes that are never allowed.
    ("", r#"{"partitions":{"1":{"term":2}}}"#, "a term never decreases"),
    ("", r#"{"partitions":{"1":{"term":90,"primary":2,"isr":["2/1"],"activated":false,"soloSafe":null}}}"#, ""),
    ("", r#"{"partitionCount":3}"#, "never change"),
];

fn guards(cluster: &Cluster) -> Result<String> {
    const MAPS: &str = "/apis/engram.dev/v1alpha1/namespaces/engram-system/partitionmaps";
    let stores: serde_json::Map<String, Value> = (0..3)
        .map(|disk| (disk.to_string(), json!({ "ordinal": disk, "storeId": format!("{:032x}", disk + 16) })))
        .collect();
    let made = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "PartitionMap", "metadata": { "name": "guarded" },
        "spec": {
            "formatVersion": 1, "version": 1, "clusterId": format!("{:032x}", 1), "law": "Linear", "partitionCount": 2,
            "stores": stores, "partitions": {
                "0": { "term": 4, "primary": 0, "isr": ["0/1", "1/4"], "activated": true },
                "1": { "term": 7, "primary": 1, "isr": ["1/4"], "activated": true, "soloSafe": true },
            },
        },
    });
    cluster.api().create(MAPS, &made)?;
    let change = |who: &str, spec: &str| {
        let patch = format!("{{\"spec\":{spec}}}");
        let mut arguments = vec!["patch", "partitionmap", "guarded", "-n", NAMESPACE, "--type=merge", "-p", &patch];
        if !who.is_empty() {
            arguments.extend(["--as", who]);
        }
        cluster.kubectl(arguments)
    };
    // A policy holds a little after it was made.
    until("the policy to hold", WHILE, || Ok(change(CHANGES[0].0, CHANGES[0].1).is_err().then_some(())))?;
    for (who, spec, output) in CHANGES {
        match change(who, spec) {
            Ok(_) => ensure!(output.is_empty(), "{spec} is taken"),
            Err(error) => {
                let error = format!("{error:#}");
                ensure!(!output.is_empty() && error.contains(output), "{spec} is refused with other words: {error}");
            }
        }
    }
    let map = cluster.api().get(&format!("{MAPS}/guarded"))?;
    ensure!(map["spec"]["partitions"]["1"]["term"] == 90, "{map:#}");
    cluster.api().delete(&format!("{MAPS}/guarded"), None)?;
    let refused = CHANGES.iter().filter(|it| !it.2.is_empty()).count();
    Ok(format!("{} taken, {refused} refused", CHANGES.len() - refused))
}

fn goes(cluster: &Cluster) -> Result<String> {
    let words = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster",
        "metadata": { "name": "words", "namespace": NAMESPACE }, "spec": { "workers": 3, "storage": { "size": "1Gi" } },
    });
    cluster.apply(&serde_json::to_string(&words)?)?;
    let worker = "worker.image.tag=0.2.0";
    helm(cluster, &["upgrade", "engram", &folder(), "--namespace", NAMESPACE, "--wait", TIMEOUT], &[worker])?;
    let found = deployment(cluster)?.context("no Deployment")?;
    let arguments = found["spec"]["template"]["spec"]["containers"][0]["args"].to_string();
    ensure!(arguments.contains("--worker-version=0.2.0"), "the upgrade changed nothing: {arguments}");
    helm(cluster, &["uninstall", "engram", "--namespace", NAMESPACE, "--wait"], &[])?;
    ensure!(deployment(cluster)?.is_none(), "the operator outlives its release");
    let there = cluster.api().find(&format!("{CLUSTERS}/words"))?;
    ensure!(there.is_some(), "a cluster went with the release");
    // No operator runs: nothing may hold it.
    cluster.kubectl(["delete", "learnercluster", "words", "-n", NAMESPACE, "--timeout=20s"])?;
    Ok(String::new())
}
