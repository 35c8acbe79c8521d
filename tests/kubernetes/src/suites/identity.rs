//! Certificates: only pods get theirs from the operator, they are renewed under load, and failover goes on with them.
//!
//! Certificates live for half a minute here. The clients are threads of the suite with a certificate that the suite signs itself, with the
//! CA that only operators may read. At the end, clusters with a provided certificate.

mod ca_rotation;
mod cert_manager;
mod provided;

use super::Check;
use super::faults::clients::runtime;
use super::faults::install::{helm, operator};
use super::helpers::{PODS, WHILE, service_address};
use crate::cluster::Cluster;
use crate::process::until;
use anyhow::{Context, Result, bail, ensure};
use engram_client::Network;
use engram_faults::ledger::Tally;
use engram_faults::load::Load;
use engram_identity::{
    CertificateAuthority, ExpectedPeer, Keys, Name, Realm, Role, Roots, connect_anonymously, create_request,
};
use engram_memory::{ClusterId, MemoryId};
use engram_proto::v1::SignRequest;
use engram_proto::v1::certificate_service_client::CertificateServiceClient;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::runtime::Runtime;
use tonic::Code;
use tonic::transport::Endpoint;

const NAME: &str = "sealed";
const WORKERS: u32 = 3;
const CLUSTERS: &str = "/apis/engram.dev/v1alpha1/namespaces/default/learnerclusters";
const SECRET: &str = "/api/v1/namespaces/engram-system/secrets/engram-operator-ca";
const OPERATORS: &str =
    "/api/v1/namespaces/engram-system/pods?labelSelector=app.kubernetes.io%2Fname%3Dengram-operator";
/// How long a certificate of a worker lives, in seconds: renewed after 20.
const LIFETIME: u64 = 30;
const RENEWALS: u64 = 3;
/// Pods start, disks are made, a map is formed, on a machine that may be busy.
const READY: Duration = Duration::from_secs(180);
/// Three renewals, and as long again.
const RENEWED: Duration = Duration::from_secs(180);
/// Each a batch of 16 ids: several while anything is renewed, on every partition.
const OPERATIONS_PER_SECOND: f64 = 40.0;
const SLOW: Duration = Duration::from_millis(100);
/// How long every partition may take to execute another operation.
const SERVED: Duration = Duration::from_secs(60);

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "two operators start from the chart", run: operator },
        Check { name: "images are pulled from a registry as documented", run: super::registry::check },
        Check { name: "a cluster with certificates is Ready", run: begins },
    ]
}

/// The life of that cluster.
pub(super) fn lives() -> Vec<Check> {
    vec![
        Check { name: "certificates are renewed three times under load, and no write fails", run: renewals },
        Check { name: "a worker that is killed is taken over for", run: killed },
        Check { name: "only that pod gets its certificate", run: strangers },
        Check { name: "a certificate of another cluster is refused, and counted", run: other_cluster },
        Check { name: "the CA is rotated under load, and no write fails", run: ca_rotation::follows },
        Check { name: "with the cluster goes what was published of it", run: ends },
    ]
}

/// Clusters with a provided certificate: the operators' CA is not used.
pub(super) fn others() -> Vec<Check> {
    provided::checks().into_iter().chain(cert_manager::checks()).collect()
}

/// Suite `cert-manager`.
pub(super) fn cert_manager() -> Vec<Check> {
    cert_manager::real()
}

fn begins(cluster: &Cluster) -> Result<String> {
    until("operators with short certificates", READY, || {
        helm(cluster, &format!("worker.image.tag=1,extraArgs[0]=--certificate-seconds={LIFETIME}")).map(Some)
    })?;
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": NAME },
        "spec": {
            "workers": WORKERS, "replicationFactor": 2, "partitions": 16, "capacity": { "memories": 20_000_000 },
            "gpu": { "mode": "Disabled" }, "storage": { "size": "1Gi" }, "tls": { "mode": "Auto" },
        },
    });
    let began = Instant::now();
    until("the kind", WHILE, || cluster.api().create(CLUSTERS, &object).map(Some))?;
    whole(cluster, NAME, READY)?;
    let took = began.elapsed();
    let clear = json!({ "spec": { "tls": { "mode": "Disabled" } } });
    let refused = cluster.api().patch(&format!("{CLUSTERS}/{NAME}"), "application/merge-patch+json", &clear);
    let said = refused.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(said.contains("spec.tls.mode cannot change"), "TLS of a running cluster was disabled: {said}");
    Ok(format!("Ready after {:.1} s", took.as_secs_f64()))
}

/// Waits until all partitions are fully replicated and all workers are ready.
fn whole(cluster: &Cluster, name: &str, deadline: Duration) -> Result<()> {
    until("the cluster to be whole", deadline, || {
        let status = cluster.api().get(&format!("{CLUSTERS}/{name}"))?["status"].take();
        let holds = |kind: &str| {
            let found = status["conditions"].as_array().into_iter().flatten().find(|it| it["type"] == kind);
            found.is_some_and(|it| it["status"] == "True")
        };
        ensure!(holds("Ready") && holds("Replicated") && status["workers"]["ready"] == WORKERS, "{status}");
        Ok(Some(()))
    })
}

/// Returns the operator's CA.
fn ca(cluster: &Cluster) -> Result<CertificateAuthority> {
    let secret = cluster.api().get(SECRET)?;
    let text = |key: &str| -> Result<String> {
        let encoded = secret["data"][key].as_str().with_context(|| format!("the Secret has no {key}"))?;
        let decoded = cluster.in_network_fed(1, "base64", ["-d"], encoded)?;
        Ok(decoded)
    };
    Ok(CertificateAuthority::open(Realm::Operator, &text("ca.key")?, &text("ca.pem")?)?)
}

fn roots(cluster: &Cluster, name: &str) -> Result<String> {
    let published = cluster.api().get(&format!("/api/v1/namespaces/default/configmaps/{name}-ca"))?;
    Ok(published["data"]["ca.pem"].as_str().context("no ca.pem is published")?.to_owned())
}

fn id(cluster: &Cluster, name: &str) -> Result<ClusterId> {
    let found = cluster.api().get(&format!("{CLUSTERS}/{name}"))?;
    found["status"]["clusterId"].as_str().and_then(|it| it.parse().ok()).context("the status has no clusterId")
}

/// Clients that write until they are closed.
struct Clients {
    runtime: Runtime,
    load: Load,
    keys: Arc<Keys>,
}

impl Clients {
    /// Starts clients with ids from `first`.
    fn start(cluster: &Cluster, first: u64) -> Result<Self> {
        Self::signed_by(&ca(cluster)?, cluster, NAME, first)
    }

    /// Starts clients of the cluster `of`, with a certificate signed by `ca`.
    fn signed_by(ca: &CertificateAuthority, cluster: &Cluster, of: &str, first: u64) -> Result<Self> {
        let id = id(cluster, of)?;
        let name = Name::on_kubernetes("default", of, id, Role::Client, 0);
        let issued = ca.issue(&name, SystemTime::now(), Duration::from_secs(3_600))?;
        let keys = Keys::from_pem(&roots(cluster, of)?, &issued.pem, Arc::default())?;
        let network = Network::with_tls(Arc::clone(&keys), ExpectedPeer::any(Role::Worker));
        let endpoints = vec![format!("{}:7443", service_address(cluster, of)?)];
        let runtime = runtime(cluster)?;
        let start = async move { Load::start_over(network, &endpoints, id, SLOW, MemoryId(first << 32)).await };
        let load = runtime.block_on(runtime.spawn(start))??;
        load.set_rate(Some(OPERATIONS_PER_SECOND));
        Ok(Self { runtime, load, keys })
    }

    /// Renews the clients' certificate with the current CA and trust bundle.
    fn follow(&self, cluster: &Cluster) -> Result<()> {
        let (ca, name) = (ca(cluster)?, self.keys.name());
        let issued = ca.issue(&name, SystemTime::now(), Duration::from_secs(3_600))?;
        self.keys.replace(&roots(cluster, &name.cluster_name)?, &issued.pem);
        Ok(())
    }

    /// Waits until every partition accepts writes, stops, and compares every weight with the ledger. Also returns the longest outage.
    fn close(self, since: tokio::time::Instant) -> Result<(Tally, Duration)> {
        let Self { runtime, load, .. } = self;
        let ending = async move {
            let unserved = load.wait_until_served(SERVED).await.err().map_or(0, |behind| behind.len());
            let gap = load.outages(since, |_| true).into_iter().max().unwrap_or_default();
            let tally = load.finish().await.check().await;
            (unserved, gap, tally)
        };
        let (unserved, gap, tally) = runtime.block_on(runtime.spawn(ending))?;
        let tally = tally?;
        ensure!(unserved == 0, "{unserved} partitions take no writes");
        ensure!(tally.is_clean(), "writes were lost, duplicated or invented: {tally:?}");
        Ok((tally, gap))
    }
}

/// Returns a metric of a pod, summed over the series with this label (all, if empty).
fn figure(cluster: &Cluster, pod: &Value, name: &str, label: &str) -> Result<u64> {
    let address = pod["status"]["podIP"].as_str().context("the pod has no address")?;
    let url = format!("http://{address}:9090/metrics");
    let page = cluster.in_network(1, "curl", ["-sSf", "--max-time", "5", "--noproxy", "*", &url])?;
    let lines = page.lines().filter(|line| line.starts_with(name) && line.contains(label));
    let values = lines.filter_map(|line| line.split(' ').next_back());
    Ok(values.filter_map(|value| value.parse::<f64>().ok()).sum::<f64>() as u64)
}

fn operators(cluster: &Cluster) -> Result<Vec<Value>> {
    let list = cluster.api().get(OPERATORS)?;
    let pods = list["items"].as_array().context("no list of pods")?;
    Ok(pods.iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null()).cloned().collect())
}

fn worker(cluster: &Cluster, ordinal: u32) -> Result<Value> {
    worker_of(cluster, NAME, ordinal)
}

fn worker_of(cluster: &Cluster, name: &str, ordinal: u32) -> Result<Value> {
    cluster.api().get(&format!("{PODS}/{name}-worker-{ordinal}"))
}

fn signed(cluster: &Cluster) -> Result<u64> {
    let of = |pod: &Value| figure(cluster, pod, "engram_operator_certificate_requests_total", "result=\"signed\"");
    operators(cluster)?.iter().map(of).sum()
}

fn renewals(cluster: &Cluster) -> Result<String> {
    let clients = Clients::start(cluster, 1)?;
    let (before, began) = (signed(cluster)?, Instant::now());
    let since = tokio::time::Instant::now();
    until("three renewals of every worker", RENEWED, || {
        let now = signed(cluster)?;
        ensure!(now >= before + RENEWALS * u64::from(WORKERS), "{now} were signed, {before} of them before");
        Ok(Some(()))
    })?;
    let took = began.elapsed();
    let (tally, gap) = clients.close(since)?;
    ensure!(tally.acked == tally.operations, "writes failed: {tally:?}");
    undisturbed(cluster, |_| 0)?;
    Ok(format!("{:.0} s, {} writes, longest wait {} ms", took.as_secs_f64(), tally.acked, gap.as_millis()))
}

/// Checks that no worker found an invalid certificate, that each was restarted as expected, and that all serve.
fn undisturbed(cluster: &Cluster, restarted: impl Fn(u32) -> u64) -> Result<()> {
    for ordinal in 0..WORKERS {
        let pod = worker(cluster, ordinal)?;
        let failures = figure(cluster, &pod, "engram_certificate_reload_failures_total", "")?;
        ensure!(failures == 0, "worker {ordinal} found invalid certificates {failures} times");
        let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
        ensure!(*restarts == restarted(ordinal), "worker {ordinal} was restarted {restarts} times");
    }
    whole(cluster, NAME, READY)
}

fn killed(cluster: &Cluster) -> Result<String> {
    let clients = Clients::start(cluster, 2)?;
    let victim = format!("{NAME}-worker-0");
    let starts = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0);
    let before = starts(&worker(cluster, 0)?);
    let since = tokio::time::Instant::now();
    cluster.kill_children("default", &victim, "worker")?;
    until("the container to be started again", READY, || Ok((starts(&worker(cluster, 0)?) > before).then_some(())))?;
    whole(cluster, NAME, READY)?;
    let (tally, gap) = clients.close(since)?;
    Ok(format!("{} writes, longest wait {} ms", tally.acked, gap.as_millis()))
}

/// Requests a token of a ServiceAccount.
fn token(cluster: &Cluster, namespace: &str, account: &str, audience: &str, pod: Option<&Value>) -> Result<String> {
    let mut spec = json!({ "audiences": [audience], "expirationSeconds": 600 });
    if let Some(pod) = pod {
        let (name, uid) = (&pod["metadata"]["name"], &pod["metadata"]["uid"]);
        spec["boundObjectRef"] = json!({ "apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid });
    }
    let request = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec });
    let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
    let granted = cluster.api().create(&path, &request)?;
    Ok(granted["status"]["token"].as_str().context("no token was given")?.to_owned())
}

fn strangers(cluster: &Cluster) -> Result<String> {
    let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "elsewhere" } });
    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": { "name": format!("{NAME}-worker"), "namespace": "elsewhere" } });
    cluster.apply(&format!("{namespace}\n---\n{account}"))?;
    let (own, pods) = (format!("{NAME}-worker"), [worker(cluster, 0)?, worker(cluster, 1)?]);
    let of = |audience: &str, pod| token(cluster, "default", &own, audience, pod);
    let good = of("engram-csr", Some(&pods[0]))?;
    let id = id(cluster, NAME)?;
    let name = |role, ordinal| Name::on_kubernetes("default", NAME, id, role, ordinal);
    let me = name(Role::Worker, 0);
    let rows = [
        ("the pod itself", good.clone(), me.clone(), None),
        ("another audience", of("engram-other", Some(&pods[0]))?, me.clone(), Some(Code::PermissionDenied)),
        ("the token of another pod", of("engram-csr", Some(&pods[1]))?, me.clone(), Some(Code::PermissionDenied)),
        ("a token of no pod", of("engram-csr", None)?, me.clone(), Some(Code::PermissionDenied)),
        (
            "an account of another namespace",
            token(cluster, "elsewhere", &own, "engram-csr", None)?,
            me.clone(),
            Some(Code::PermissionDenied),
        ),
        ("no token of this API server", "a.b.c".to_owned(), me, Some(Code::PermissionDenied)),
        ("a request for another worker", good.clone(), name(Role::Worker, 1), Some(Code::PermissionDenied)),
        ("a request for another role", good, name(Role::Coordinator, 0), Some(Code::PermissionDenied)),
    ];
    let address = operators(cluster)?[0]["status"]["podIP"].as_str().context("the operator has no address")?.to_owned();
    let (address, roots) = (format!("{address}:7440"), Roots::parse(roots(cluster, NAME)?.as_bytes())?);
    let runtime = runtime(cluster)?;
    for (what, token, name, refused) in rows {
        let asking = asked(roots.clone(), id, address.clone(), token, name);
        let answer = runtime.block_on(runtime.spawn(asking))?.with_context(|| what.to_owned())?;
        match (answer, refused) {
            (Ok(certificate), None) => ensure!(certificate.contains("BEGIN CERTIFICATE"), "{what}: {certificate}"),
            (Err(status), Some(code)) => ensure!(status.code() == code, "{what}: {status}"),
            (Ok(_), Some(_)) => bail!("{what} got a certificate"),
            (Err(status), None) => bail!("{what} got none: {status}"),
        }
    }
    let of = |pod: &Value| figure(cluster, pod, "engram_operator_certificate_requests_total", "");
    let all = operators(cluster)?.iter().map(of).sum::<Result<u64>>()?;
    let refused = all - signed(cluster)?;
    ensure!(refused == 7, "{refused} refusals were counted");
    Ok(String::new())
}

/// Requests a certificate from an operator with this token.
async fn asked(
    roots: Roots,
    cluster: ClusterId,
    address: String,
    token: String,
    name: Name,
) -> Result<Result<String, tonic::Status>> {
    let stream = connect_anonymously(&roots, cluster, ExpectedPeer::any(Role::Coordinator), &address).await?;
    let mut stream = Some(TokioIo::new(stream));
    let connect = tower::service_fn(move |_| {
        let stream = stream.take().ok_or_else(|| std::io::Error::other("the connection has ended"));
        async move { stream }
    });
    let channel = Endpoint::from_static("http://operator").connect_with_connector(connect).await?;
    let mut call = tonic::Request::new(SignRequest { request: create_request(&name)?.request.into() });
    call.metadata_mut().insert("authorization", format!("Bearer {token}").parse()?);
    let answer = CertificateServiceClient::new(channel).sign(call).await;
    Ok(answer.map(|reply| reply.into_inner().certificate))
}

/// Presents a certificate at a port of a worker. Returns how often the worker counted `reason`.
fn shown(cluster: &Cluster, pod: &Value, port: u16, pem: &str, reason: &str) -> Result<u64> {
    let file = cluster.path("stranger.pem");
    std::fs::write(&file, pem)?;
    let file = file.to_string_lossy();
    let address = pod["status"]["podIP"].as_str().context("the pod has no address")?;
    let refused = || figure(cluster, pod, "engram_authentication_failures_total", &format!("reason=\"{reason}\""));
    let before = refused()?;
    let at = format!("{address}:{port}");
    // The exit status does not matter, only the worker's metric.
    let show = ["s_client", "-connect", &at, "-alpn", "h2", "-cert", &file, "-key", &file];
    let _ = cluster.in_network(1, "openssl", show);
    Ok(refused()? - before)
}

fn other_cluster(cluster: &Cluster) -> Result<String> {
    // Same CA and same name; only the cluster id differs.
    let name = Name::on_kubernetes("default", NAME, ClusterId(1), Role::Worker, 1);
    let issued = ca(cluster)?.issue(&name, SystemTime::now(), Duration::from_secs(3_600))?;
    let pod = worker(cluster, 0)?;
    for port in [7443, 7444, 7445] {
        let refused = shown(cluster, &pod, port, &issued.pem, "other_cluster")?;
        ensure!(refused == 1, "port {port}: {refused} refusals of another cluster");
    }
    Ok(String::new())
}

fn ends(cluster: &Cluster) -> Result<String> {
    cluster.api().delete(&format!("{CLUSTERS}/{NAME}"), None)?;
    let left = || -> Result<bool> {
        let published = cluster.api().find(&format!("/api/v1/namespaces/default/configmaps/{NAME}-ca"))?;
        Ok(published.is_some() || cluster.api().find(&format!("{PODS}/{NAME}-worker-0"))?.is_some())
    };
    until("the pods and what was published to go", READY, || Ok((!left()?).then_some(())))?;
    ensure!(cluster.api().find(SECRET)?.is_some(), "the CA was deleted with the cluster");
    // Claims are retained by default, and later suites need the space.
    cluster.kubectl(["delete", "pvc", "-l", &format!("engram.dev/cluster={NAME}"), "--wait=false"])?;
    Ok(String::new())
}
