//! Backups on real nodes: a snapshot of a cluster that is being written to, in an S3 server in a pod and in a volume that all nodes have, and
//! clusters that begin from it.
//!
//! Checks rest on one another, in order.

mod million;

use super::Check;
use super::command::{COMMAND, admin, started};
use super::faults::install::{USER as NON_ROOT, operator};
use super::helpers::{WHILE, service_address};
use crate::cluster::Cluster;
use crate::image::{Content, Image, write_archive};
use crate::process::until;
use crate::requirements::{Skip, find};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

const NAMESPACE: &str = "kept";
const CLUSTERS: &str = "/apis/engram.dev/v1alpha1/namespaces/kept/learnerclusters";
const RUNS: &str = "/apis/engram.dev/v1alpha1/namespaces/kept/learnerruns";
/// The user of the server, as its manifest has it.
const USER: &str = "engram:engram-secret";
const ROLES: &str = "rbac.authorization.k8s.io";

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "two operators start from the chart, for backups", run: operator },
        Check { name: "a cluster is there to be backed up, and a storage", run: begins },
        Check { name: "a snapshot whose Secret the operator may not read fails and says so", run: forbidden },
        Check { name: "a snapshot is made while clients write", run: made },
        Check { name: "a cluster of other workers and partitions begins from it with its digest", run: restored },
        Check { name: "a cluster does not begin from what is damaged, unfinished or foreign", run: refused },
        Check { name: "a run learns from a file in the storage, and fails where it cannot", run: learned },
        Check { name: "the CronJob of the example makes a snapshot", run: scheduled },
        Check { name: "a snapshot goes to a volume of all workers, and none leads out of it", run: kept },
        Check {
            name: "a cluster begins from the volume with its digest, and says which volume it lacks",
            run: restored_from_volume,
        },
        Check { name: "the clusters of backups go", run: ends },
    ]
}

pub(super) use million::checks as million;

/// Asks the S3 server, signed.
fn ask(cluster: &Cluster, path: &str, arguments: &[&str]) -> Result<String> {
    let curl = find("curl").ok_or_else(|| Skip("there is no curl to sign requests with".into()))?;
    let url = format!("{}/{path}", endpoint(cluster)?);
    let fixed = ["-sS", "--fail", "--max-time", "10", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", USER];
    let unsigned = ["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"];
    cluster.in_network(1, &curl, [&fixed[..], &unsigned, arguments, &[&url]].concat())
}

fn endpoint(cluster: &Cluster) -> Result<String> {
    Ok(format!("http://{}:9000", service_address(cluster, "s3")?))
}

fn place(cluster: &Cluster, url: &str) -> Result<Value> {
    Ok(json!({ "url": url, "endpoint": endpoint(cluster)?, "secretRef": { "name": "s3" } }))
}

fn object(name: &str, workers: u32, partitions: u32, more: &Value) -> Value {
    let mut spec = json!({
        "workers": workers, "replicationFactor": workers.min(2), "partitions": partitions, "gpu": { "mode": "Disabled" },
        "capacity": { "memories": 100_000 }, "storage": { "size": "1Gi", "retainPolicy": "Delete" },
    });
    for (field, value) in more.as_object().into_iter().flatten() {
        spec[field] = value.clone();
    }
    json!({ "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "spec": spec,
        "metadata": { "name": name, "namespace": NAMESPACE } })
}

fn create(cluster: &Cluster, object: &Value) -> Result<()> {
    until("the kind", WHILE, || cluster.api().create(CLUSTERS, object).map(Some)).map(drop)
}

fn ready(cluster: &Cluster, name: &str, (workers, partitions): (u32, u32)) -> Result<()> {
    until(&format!("cluster {name} to be Ready"), COMMAND, || {
        let status = cluster.api().get(&format!("{CLUSTERS}/{name}"))?["status"].take();
        let is_up = status["partitions"]["healthy"] == partitions && status["workers"]["ready"] == workers;
        ensure!(is_up, "{status}");
        Ok(Some(()))
    })
}

fn engram(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    let ended = started(cluster, "engram", &admin(cluster)?, &[&["-n", NAMESPACE], arguments].concat())?;
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.success(), "engram {} ended with {}: {}", arguments.join(" "), ended.status, said.trim());
    Ok(String::from_utf8(ended.stdout)?)
}

/// Makes a snapshot of a cluster, and waits for the end of the run.
fn snapshot(cluster: &Cluster, name: &str, of: &str) -> Result<Value> {
    let run = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": name, "namespace": NAMESPACE },
        "spec": { "clusterRef": { "name": of }, "kind": "Snapshot", "snapshot": place(cluster, "s3://backups/{name}")? },
    });
    ended(cluster, &run)
}

/// Makes a run, and waits for its end.
fn ended(cluster: &Cluster, run: &Value) -> Result<Value> {
    cluster.api().create(RUNS, run)?;
    let name = run["metadata"]["name"].as_str().unwrap_or_default();
    until("the run to end", COMMAND, || {
        let status = cluster.api().get(&format!("{RUNS}/{name}"))?["status"].take();
        Ok(["Complete", "Failed"].iter().any(|phase| status["phase"] == *phase).then_some(status))
    })
}

/// A server with a bucket, and the Secrets for it.
fn storage(cluster: &Cluster) -> Result<()> {
    cluster.kubernetes_program("versitygw")?;
    cluster.apply(include_str!("../../manifests/s3.yaml"))?;
    cluster.kubectl(["rollout", "status", "deployment/s3", "--timeout=50s"])?;
    until("a bucket", WHILE, || ask(cluster, "backups", &["-X", "PUT"]).map(Some))?;
    let secret = |name: &str, key: &str| {
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": name, "namespace": NAMESPACE },
            "stringData": { "accessKeyId": "engram", "secretAccessKey": key } })
    };
    let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } });
    let items = [namespace, secret("s3", "engram-secret"), secret("wrong", "another")];
    cluster.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": items }).to_string())
}

fn begins(cluster: &Cluster) -> Result<String> {
    storage(cluster)?;
    fs::create_dir_all(shared(cluster))?;
    cluster.apply(&volume(cluster).to_string())?;
    create(cluster, &object("first", 3, 16, &volumes()))?;
    ready(cluster, "first", (3, 16))?;
    let keys: Vec<String> = (0..400).map(|number| format!("kept-{number}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    engram(cluster, &[&["insert", "--cluster", "first", "--weight", "0.75"], &keys[..]].concat())?;
    engram(cluster, &["decay", "0.125", "--cluster", "first"])?;
    Ok("400 memories".into())
}

/// The folder of a volume that every node has: all nodes are of one machine.
fn shared(cluster: &Cluster) -> PathBuf {
    cluster.path("volumes").join("shared")
}

/// That volume, and a claim to it. Of another class than what is provisioned.
fn volume(cluster: &Cluster) -> Value {
    let name = "backups";
    let (size, modes, class) = (json!({ "storage": "1Gi" }), json!(["ReadWriteMany"]), "shared");
    let anywhere = json!([{ "matchExpressions": [{ "key": "kubernetes.io/hostname", "operator": "Exists" }] }]);
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
        "spec": {
            "capacity": size, "accessModes": modes, "storageClassName": class, "persistentVolumeReclaimPolicy": "Retain",
            "local": { "path": shared(cluster) }, "nodeAffinity": { "required": { "nodeSelectorTerms": anywhere } },
            "claimRef": { "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": NAMESPACE, "name": name },
        },
    });
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name, "namespace": NAMESPACE },
        "spec": { "accessModes": modes, "storageClassName": class, "volumeName": name, "resources": { "requests": size } },
    });
    json!({ "apiVersion": "v1", "kind": "List", "items": [volume, claim] })
}

fn volumes() -> Value {
    json!({ "snapshotVolumes": [{ "name": "nightly", "persistentVolumeClaim": { "claimName": "backups" } }] })
}

fn forbidden(cluster: &Cluster) -> Result<String> {
    let status = snapshot(cluster, "forbidden", "first")?;
    let failed = condition(&status, "Failed");
    ensure!(failed["reason"] == "SecretForbidden", "{status:#}");
    allow(cluster)?;
    Ok(String::new())
}

/// Lets the operator read the Secrets.
fn allow(cluster: &Cluster) -> Result<()> {
    let rules =
        json!([{ "apiGroups": [""], "resources": ["secrets"], "resourceNames": ["s3", "wrong"], "verbs": ["get"] }]);
    let metadata = json!({ "name": "engram-reads-s3", "namespace": NAMESPACE });
    let account = json!({ "kind": "ServiceAccount", "name": "engram-operator", "namespace": "engram-system" });
    let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": format!("{ROLES}/v1"), "kind": "Role", "metadata": metadata, "rules": rules },
        { "apiVersion": format!("{ROLES}/v1"), "kind": "RoleBinding", "metadata": metadata, "subjects": [account],
          "roleRef": { "apiGroup": ROLES, "kind": "Role", "name": "engram-reads-s3" } },
    ] });
    cluster.apply(&objects.to_string())
}

fn made(cluster: &Cluster) -> Result<String> {
    let done = AtomicBool::new(false);
    let (status, written) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut written = 0;
            while !done.load(Ordering::Relaxed) {
                engram(cluster, &["insert", "--cluster", "first", &format!("during-{written}")])?;
                written += 1;
            }
            anyhow::Ok(written)
        });
        let status = snapshot(cluster, "online", "first");
        done.store(true, Ordering::Relaxed);
        let written = writer.join().expect("the writer does not panic");
        anyhow::Ok((status?, written?))
    })?;
    ensure!(status["phase"] == "Complete", "{status:#}");
    let output = &status["snapshot"];
    ensure!(output["partitions"] == 16 && output["url"] == "s3://backups/online", "{output}");
    ensure!(output["memories"].as_u64() >= Some(400), "{output}");
    ensure!(status["progress"]["epoch"] == 16, "{status:#}");
    // Nothing of who asks is anywhere in the object.
    ensure!(
        !cluster.api().get(&format!("{RUNS}/online"))?.to_string().contains("engram-secret"),
        "a secret is published"
    );
    Ok(format!("{} memories, {written} written meanwhile", output["memories"]))
}

fn restored(cluster: &Cluster) -> Result<String> {
    let online = cluster.api().get(&format!("{RUNS}/online"))?["status"]["snapshot"].take();
    let bootstrap = json!({ "bootstrap": { "snapshot": place(cluster, "s3://backups/online")? } });
    let mut second = object("second", 2, 7, &bootstrap);
    create(cluster, &second)?;
    ready(cluster, "second", (2, 7))?;
    let again = snapshot(cluster, "again", "second")?;
    ensure!(again["phase"] == "Complete", "{again:#}");
    let output = &again["snapshot"];
    ensure!(
        (&output["digest"], &output["memories"]) == (&online["digest"], &online["memories"]),
        "{output}, and {online}"
    );
    let runs = engram(cluster, &["list", "runs", "--cluster", "second", "-o", "json"]);
    let runs: Value = serde_json::from_str(&runs?)?;
    ensure!(runs["items"].as_array().map(Vec::len) == Some(1), "runs of the first cluster go on in the second: {runs}");
    second["spec"]["bootstrap"]["snapshot"]["url"] = "s3://backups/other".into();
    let changed = cluster.apply(&second.to_string()).err().context("its bootstrap was changed")?;
    ensure!(format!("{changed:#}").contains("spec.bootstrap cannot change"), "{changed:#}");
    Ok(format!("digest {}", online["digest"]))
}

fn refused(cluster: &Cluster) -> Result<String> {
    let path = cluster.path("object");
    let file = path.to_string_lossy().into_owned();
    let listed = ask(cluster, "backups?list-type=2&prefix=online", &[])?;
    let keys: Vec<&str> =
        listed.split("<Key>").skip(1).filter_map(|it| it.split_once("</Key>")).map(|it| it.0).collect();
    let first = keys.iter().find(|key| key.ends_with(".snap")).context("no file is listed")?;
    for what in ["flipped", "cut", "unfinished"] {
        for key in &keys {
            ask(cluster, &format!("backups/{key}"), &["-o", &file])?;
            let mut bytes = fs::read(&path)?;
            let middle = bytes.len() / 2;
            match what {
                "flipped" if key == first => bytes[middle] ^= 4,
                "cut" if key == first => bytes.truncate(middle),
                "unfinished" if key.ends_with("manifest.json") => continue,
                _ => {}
            }
            fs::write(&path, bytes)?;
            ask(cluster, &format!("backups/{}", key.replacen("online", what, 1)), &["-T", &file])?;
        }
    }
    let name = first.rsplit('/').next().unwrap_or_default();
    let bad = [
        ("flipped", "flipped", json!({}), name),
        ("cut", "cut", json!({}), name),
        ("unfinished", "unfinished", json!({}), "no manifest.json"),
        ("foreign", "online", json!({ "features": { "dimension": 2, "dtype": "F16" } }), "feature dimension"),
    ];
    for (what, from, more, _) in &bad {
        let mut spec = json!({ "bootstrap": { "snapshot": place(cluster, &format!("s3://backups/{from}"))? } });
        for (field, value) in more.as_object().into_iter().flatten() {
            spec[field] = value.clone();
        }
        create(cluster, &object(what, 1, 7, &spec))?;
    }
    for (what, _, _, said) in &bad {
        until(&format!("{what} to be refused"), COMMAND, || {
            let status = cluster.api().get(&format!("{CLUSTERS}/{what}"))?["status"].take();
            let stalled = condition(&status, "Stalled");
            let text = stalled["message"].as_str().unwrap_or_default();
            ensure!(stalled["reason"] == "SnapshotUnusable" && text.contains(said), "{status}");
            Ok(Some(()))
        })?;
        let map = format!("/apis/engram.dev/v1alpha1/namespaces/{NAMESPACE}/partitionmaps/{what}");
        ensure!(cluster.api().find(&map)?.is_none(), "it has a map");
        cluster.api().delete(&format!("{CLUSTERS}/{what}"), None)?;
    }
    Ok(String::new())
}

fn learned(cluster: &Cluster) -> Result<String> {
    let path = cluster.path("events.csv");
    let rows: String = (0..20).map(|day| format!("red,{day}\ngreen,{day}\n")).collect();
    fs::write(&path, format!("word,day\n{rows}"))?;
    ask(cluster, "backups/events/days.csv", &["-T", &path.to_string_lossy()])?;
    let learn = |name: &str, file: &str, secret: &str| {
        let mut s3 = place(cluster, &format!("s3://backups/events/{file}"))?;
        s3["secretRef"]["name"] = secret.into();
        let events = json!({ "s3": s3, "columns": { "key": "word", "epoch": "day" } });
        let run = json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": name, "namespace": NAMESPACE },
            "spec": { "clusterRef": { "name": "second" }, "kind": "Memory", "memory": { "source": { "events": events } } },
        });
        ended(cluster, &run)
    };
    for (name, file, secret, said) in [
        ("absent", "absent.csv", "s3", ["ENG-0302", "s3://backups/events/absent.csv", "not found"]),
        ("wrong", "days.csv", "wrong", ["ENG-0510", "s3://backups/events/days.csv", "SignatureDoesNotMatch"]),
    ] {
        let status = learn(name, file, secret)?;
        let failed = condition(&status, "Failed");
        let text = failed["message"].as_str().unwrap_or_default();
        ensure!(failed["reason"] == "RunFailed" && said.iter().all(|word| text.contains(word)), "{status:#}");
    }
    let status = learn("stored", "days.csv", "s3")?;
    ensure!(status["phase"] == "Complete" && status["progress"]["epoch"] == 20, "{status:#}");
    ensure!(
        !cluster.api().get(&format!("{RUNS}/stored"))?.to_string().contains("engram-secret"),
        "a secret is published"
    );
    let found = engram(cluster, &["get", "red", "green", "--cluster", "second", "-o", "json"])?;
    let found: Value = serde_json::from_str(&found)?;
    ensure!(found["items"].as_array().map(Vec::len) == Some(2), "{found}");
    ready(cluster, "second", (2, 7))?;
    Ok("20 epochs".into())
}

/// `examples/kubernetes/backups.yaml` as it is, but for what is everybody's own.
fn scheduled(cluster: &Cluster) -> Result<String> {
    const IMAGE: &str = "local.test/kubectl:1";
    const NODE: u8 = 2;
    let kubectl = Content::default().file("/bin/kubectl", &cluster.kubernetes_program("kubectl")?);
    let archive = cluster.path("kubectl.tar");
    write_archive(&archive, &[Image { name: IMAGE, content: &kubectl, entrypoint: &[], user: NON_ROOT }])?;
    cluster.load_image_on(NODE, &archive)?;
    let on_node = format!("restartPolicy: Never\n          nodeName: n{NODE}");
    let own = [
        (r#"accessKeyId: "", secretAccessKey: """#, "accessKeyId: engram, secretAccessKey: engram-secret".to_owned()),
        ("clusterRef: { name: words }", "clusterRef: { name: second }".to_owned()),
        ("http://minio.storage:9000", endpoint(cluster)?),
        ("rancher/kubectl:v1.36.0", IMAGE.to_owned()),
        ("restartPolicy: Never", if cluster.is_given() { "restartPolicy: Never".to_owned() } else { on_node }),
    ];
    let mut manifest = include_str!("../../../../examples/kubernetes/backups.yaml").to_owned();
    for (of_the_example, here) in own {
        ensure!(manifest.contains(of_the_example), "the example has no {of_the_example}");
        manifest = manifest.replace(of_the_example, &here);
    }
    let file = cluster.path("backups.yaml");
    fs::write(&file, manifest)?;
    cluster.kubectl(["-n", NAMESPACE, "apply", "-f", &file.to_string_lossy()])?;
    cluster.kubectl(["-n", NAMESPACE, "create", "job", "tonight", "--from=cronjob/nightly-snapshot"])?;
    let status = until("a run of the night to end", COMMAND, || {
        let mut runs = cluster.api().get(RUNS)?;
        let runs = runs["items"].as_array_mut().context("no list of runs")?;
        let nightly = |run: &&mut Value| run["metadata"]["generateName"] == "nightly-";
        let status = runs.iter_mut().find(nightly).context("the job has made no run yet")?["status"].take();
        Ok(["Complete", "Failed"].iter().any(|phase| status["phase"] == *phase).then_some(status))
    })?;
    let url = status["snapshot"]["url"].as_str().unwrap_or_default();
    ensure!(status["phase"] == "Complete" && url.starts_with("s3://backups/words/nightly-"), "{status:#}");
    cluster.kubectl(["-n", NAMESPACE, "delete", "cronjob", "nightly-snapshot"])?;
    Ok(url.to_owned())
}

/// Makes a snapshot of the first cluster in a volume, and waits for the end of the run.
fn snapshot_in(cluster: &Cluster, name: &str, volume: &str, path: &str) -> Result<Value> {
    let run = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": name, "namespace": NAMESPACE },
        "spec": { "clusterRef": { "name": "first" }, "kind": "Snapshot", "snapshot": { "volume": volume, "path": path } },
    });
    ended(cluster, &run)
}

fn kept(cluster: &Cluster) -> Result<String> {
    let status = snapshot_in(cluster, "volume", "nightly", "words/{name}")?;
    let output = &status["snapshot"];
    ensure!(status["phase"] == "Complete" && output["url"] == "volume://nightly/words/volume", "{status:#}");
    let folder = shared(cluster).join("words/volume");
    ensure!(folder.join("manifest.json").is_file(), "there is no manifest in {}", folder.display());
    symlink("/var/lib/engram", shared(cluster).join("out"))?;
    for (name, volume, path, said) in [
        ("twice", "nightly", "words/volume", ["ENG-0106", "volume://nightly/words/volume"]),
        ("tapes", "tapes", "words/{name}", ["ENG-0510", "spec.snapshotVolumes (nightly)"]),
        ("escape", "nightly", "out/{name}", ["ENG-0510", "symbolic link points outside the volume"]),
    ] {
        let status = snapshot_in(cluster, name, volume, path)?;
        let failed = condition(&status, "Failed");
        let text = failed["message"].as_str().unwrap_or_default();
        ensure!(failed["reason"] == "RunFailed" && said.iter().all(|word| text.contains(word)), "{status:#}");
    }
    let dots = snapshot_in(cluster, "dots", "nightly", "../words").err().context("a path with .. was taken")?;
    ensure!(format!("{dots:#}").contains("spec.snapshot.path"), "{dots:#}");
    Ok(format!("{} memories", output["memories"]))
}

fn restored_from_volume(cluster: &Cluster) -> Result<String> {
    let made = cluster.api().get(&format!("{RUNS}/volume"))?["status"]["snapshot"].take();
    let mut spec = volumes();
    spec["bootstrap"] = json!({ "snapshot": { "volume": "nightly", "path": "words/volume" } });
    create(cluster, &object("third", 2, 5, &spec))?;
    ready(cluster, "third", (2, 5))?;
    let again = snapshot(cluster, "third", "third")?;
    let output = &again["snapshot"];
    ensure!((&output["digest"], &output["memories"]) == (&made["digest"], &made["memories"]), "{output}, and {made}");
    // Without the volume it says what it lacks.
    spec["snapshotVolumes"] = json!([]);
    create(cluster, &object("lacking", 1, 5, &spec))?;
    until("lacking to say so", COMMAND, || {
        let status = cluster.api().get(&format!("{CLUSTERS}/lacking"))?["status"].take();
        let stalled = condition(&status, "Stalled");
        let text = stalled["message"].as_str().unwrap_or_default();
        ensure!(stalled["reason"] == "StorageUnusable" && text.contains("spec.snapshotVolumes (none)"), "{status}");
        Ok(Some(()))
    })?;
    cluster.api().delete(&format!("{CLUSTERS}/lacking"), None)?;
    Ok(format!("digest {}", made["digest"]))
}

fn ends(cluster: &Cluster) -> Result<String> {
    go(cluster, &["first", "second", "third"])?;
    Ok(String::new())
}

/// Deletes these clusters and the server, and waits for their pods to go.
fn go(cluster: &Cluster, names: &[&str]) -> Result<()> {
    for name in names {
        cluster.api().delete(&format!("{CLUSTERS}/{name}"), None)?;
    }
    let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods");
    until("their pods to go", COMMAND, || {
        Ok(cluster.api().get(&pods)?["items"].as_array().is_some_and(Vec::is_empty).then_some(()))
    })?;
    cluster.api().delete("/apis/apps/v1/namespaces/default/deployments/s3", None).map(drop)
}

fn condition(status: &Value, kind: &str) -> Value {
    let conditions = status["conditions"].as_array();
    let found = conditions.and_then(|all| all.iter().find(|it| it["type"] == kind));
    found.cloned().unwrap_or(Value::Null)
}
