//! Clusters with a provided certificate: conditions while it is missing, and its replacement under load.

use super::{CLUSTERS, Clients, READY, RENEWED, WORKERS, figure, id, whole, worker_of};
use crate::cluster::Cluster;
use crate::process::until;
use crate::suites::Check;
use crate::suites::helpers::{PODS, WHILE};
use anyhow::{Context, Result, ensure};
use engram_identity::{CertificateAuthority, Name, Realm, Role};
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant, SystemTime};

const NAME: &str = "given";
const SECRET: &str = "given-tls";
const SECRETS: &str = "/api/v1/namespaces/default/secrets";
pub(super) const HOUR: Duration = Duration::from_secs(3_600);

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "a cluster reports the required certificate, and becomes Ready with it", run: begins },
        Check { name: "a provided certificate is replaced under load, and no write fails", run: replaced },
        Check { name: "a deleted Secret is reported and affects no running worker", run: lost },
    ]
}

/// The CA of provided certificates, whose key no operator has.
pub(super) fn ca(cluster: &Cluster) -> Result<CertificateAuthority> {
    let [key, certificate] = ["given-ca.key", "given-ca.pem"].map(|name| cluster.path(name));
    if !key.exists() {
        let made = CertificateAuthority::create(Realm::Operator, SystemTime::now())?;
        fs::write(&certificate, made.certificate())?;
        fs::write(&key, made.key())?;
    }
    Ok(CertificateAuthority::open(Realm::Operator, &fs::read_to_string(key)?, &fs::read_to_string(certificate)?)?)
}

/// Content of the Secret: a certificate with this name and lifetime.
pub(super) fn filled(ca: &CertificateAuthority, name: &Name, lifetime: Duration) -> Result<Value> {
    let issued = ca.issue(name, SystemTime::now(), lifetime)?;
    let at = issued.pem.find("-----BEGIN CERTIFICATE").context("there is a certificate")?;
    let (key, certificate) = issued.pem.split_at(at);
    Ok(json!({ "tls.key": key, "tls.crt": certificate, "ca.crt": ca.certificate() }))
}

pub(super) fn fill(cluster: &Cluster, secret: &str, data: &Value) -> Result<()> {
    let secret = json!({ "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
        "metadata": { "name": secret, "namespace": "default" }, "stringData": data });
    cluster.apply(&secret.to_string())
}

/// Grants operators access to one Secret.
pub(super) fn let_read(cluster: &Cluster, secret: &str) -> Result<()> {
    let metadata = json!({ "name": format!("{secret}-reader"), "namespace": "default" });
    let group = "rbac.authorization.k8s.io";
    let role = json!({ "apiVersion": format!("{group}/v1"), "kind": "Role", "metadata": metadata,
        "rules": [{ "apiGroups": [""], "resources": ["secrets"], "resourceNames": [secret], "verbs": ["get"] }] });
    let binding = json!({ "apiVersion": format!("{group}/v1"), "kind": "RoleBinding", "metadata": metadata,
        "roleRef": { "apiGroup": group, "kind": "Role", "name": format!("{secret}-reader") },
        "subjects": [{ "kind": "ServiceAccount", "name": "engram-operator", "namespace": "engram-system" }] });
    cluster.apply(&format!("{role}\n---\n{binding}"))
}

/// Waits for this status and reason of condition CertificateValid. Returns its message.
pub(super) fn certified(cluster: &Cluster, name: &str, truth: &str, reason: &str) -> Result<String> {
    until(reason, READY, || {
        let status = cluster.api().get(&format!("{CLUSTERS}/{name}"))?["status"].take();
        let found = status["conditions"].as_array().into_iter().flatten().find(|it| it["type"] == "CertificateValid");
        let found = found.with_context(|| format!("no condition CertificateValid: {status}"))?;
        ensure!(found["status"] == truth && found["reason"] == reason, "{found}");
        Ok(Some(found["message"].as_str().unwrap_or_default().to_owned()))
    })
}

fn begins(cluster: &Cluster) -> Result<String> {
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": NAME },
        "spec": {
            "workers": WORKERS, "replicationFactor": 2, "partitions": 16, "capacity": { "memories": 20_000_000 },
            "gpu": { "mode": "Disabled" }, "storage": { "size": "1Gi" },
            "tls": { "mode": "Secret", "secretName": SECRET },
        },
    });
    until("the kind", WHILE, || cluster.api().create(CLUSTERS, &object).map(Some))?;
    certified(cluster, NAME, "False", "SecretForbidden")?;
    let_read(cluster, SECRET)?;
    let said = certified(cluster, NAME, "False", "SecretNotFound")?;
    let (ca, id) = (ca(cluster)?, id(cluster, NAME)?);
    let needed = Name::shared_by_workers("default", NAME, id);
    ensure!(said.contains(&needed.to_string()), "the required name is missing: {said}");
    fill(cluster, SECRET, &filled(&ca, &Name::on_kubernetes("default", NAME, id, Role::Worker, 0), HOUR)?)?;
    let said = certified(cluster, NAME, "False", "SecretUnusable")?;
    ensure!(said.contains("/worker/0"), "the actual name is missing: {said}");
    let pods = cluster.api().get(&format!("{PODS}?labelSelector=engram.dev%2Fcluster%3D{NAME}"))?;
    ensure!(pods["items"].as_array().is_none_or(Vec::is_empty), "pods start without a certificate");
    let began = Instant::now();
    fill(cluster, SECRET, &filled(&ca, &needed, HOUR)?)?;
    certified(cluster, NAME, "True", "Valid")?;
    whole(cluster, NAME, READY)?;
    Ok(format!("Ready {:.1} s after the Secret was filled", began.elapsed().as_secs_f64()))
}

fn replaced(cluster: &Cluster) -> Result<String> {
    let (ca, id) = (ca(cluster)?, id(cluster, NAME)?);
    shown_under_load(cluster, NAME, 2 * HOUR, || {
        fill(cluster, SECRET, &filled(&ca, &Name::shared_by_workers("default", NAME, id), 3 * HOUR)?)
    })
}

/// Replaces the certificate while clients write, and waits until every worker uses it, with at least this remaining lifetime. No write may
/// fail, and no worker may restart.
pub(super) fn shown_under_load(
    cluster: &Cluster,
    name: &str,
    good_for: Duration,
    renew: impl FnOnce() -> Result<()>,
) -> Result<String> {
    let ca = ca(cluster)?;
    let clients = Clients::signed_by(&ca, cluster, name, 1)?;
    let (since, began) = (tokio::time::Instant::now(), Instant::now());
    renew()?;
    until("every worker to show the new certificate", RENEWED, || {
        for ordinal in 0..WORKERS {
            let left = figure(cluster, &worker_of(cluster, name, ordinal)?, "engram_certificate_expiry_seconds", "")?;
            ensure!(left > good_for.as_secs(), "the certificate of worker {ordinal} is valid for {left} s");
        }
        Ok(Some(()))
    })?;
    let took = began.elapsed();
    // Client connections live for ten minutes; new ones see the new certificate.
    let after = Clients::signed_by(&ca, cluster, name, 2)?;
    for clients in [clients, after] {
        let (tally, _) = clients.close(since)?;
        ensure!(tally.acked == tally.operations && tally.acked > 0, "writes failed: {tally:?}");
    }
    for ordinal in 0..WORKERS {
        let restarts = &worker_of(cluster, name, ordinal)?["status"]["containerStatuses"][0]["restartCount"];
        ensure!(*restarts == 0, "worker {ordinal} was restarted {restarts} times");
    }
    whole(cluster, name, READY)?;
    Ok(format!("in use everywhere after {:.0} s", took.as_secs_f64()))
}

fn lost(cluster: &Cluster) -> Result<String> {
    cluster.api().delete(&format!("{SECRETS}/{SECRET}"), None)?;
    certified(cluster, NAME, "False", "SecretNotFound")?;
    whole(cluster, NAME, READY)?;
    let clients = Clients::signed_by(&ca(cluster)?, cluster, NAME, 3)?;
    let (tally, _) = clients.close(tokio::time::Instant::now())?;
    ensure!(tally.acked == tally.operations, "writes failed: {tally:?}");
    cluster.api().delete(&format!("{CLUSTERS}/{NAME}"), None)?;
    let left = || -> Result<bool> { Ok(cluster.api().find(&format!("{PODS}/{NAME}-worker-0"))?.is_some()) };
    until("the pods to go", READY, || Ok((!left()?).then_some(())))?;
    cluster.kubectl(["delete", "pvc", "-l", &format!("engram.dev/cluster={NAME}"), "--wait=false"])?;
    Ok(String::new())
}
