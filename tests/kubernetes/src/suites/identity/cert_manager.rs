//! Clusters with `tls.mode: CertManager`: conditions, the requested Certificate, and its renewal.
//!
//! In suite `identity` only the Certificate kind exists and the suite fills the Secret itself. In suite `cert-manager` cert-manager runs.

use super::provided::{HOUR, ca, certified, fill, filled, let_read, shown_under_load};
use super::{CLUSTERS, LIFETIME, READY, WORKERS, id, operator, whole};
use crate::cluster::Cluster;
use crate::process::{Record, until};
use crate::programs;
use crate::requirements::Skip;
use crate::suites::Check;
use crate::suites::faults::install::helm_set;
use crate::suites::helpers::{PODS, WHILE};
use anyhow::{Result, ensure};
use engram_identity::Name;
use nix::sys::signal::Signal;
use serde_json::json;
use std::fs;
use std::time::Instant;

const NAME: &str = "asked";
/// Name of the Certificate and of its Secret.
const CERTIFICATE: &str = "asked-worker-tls";
const CERTIFICATES: &str = "/apis/cert-manager.io/v1/namespaces/default/certificates";
const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const ISSUER: &str = "our-ca";
const MERGE: &str = "application/merge-patch+json";

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "a cluster reports why it cannot request a Certificate, then requests it", run: asks },
        Check {
            name: "a cluster with a filled Secret becomes Ready and reports cert-manager's state",
            run: becomes_ready,
        },
        Check { name: "the Certificate is deleted with the cluster", run: ends },
    ]
}

/// Checks with cert-manager itself, which is built if necessary.
pub(super) fn real() -> Vec<Check> {
    vec![
        Check { name: "two operators start from the chart", run: operator },
        Check { name: "cert-manager starts, with an issuer", run: starts },
        Check { name: "cert-manager issues the certificate of a cluster, which becomes Ready", run: given },
        Check { name: "cert-manager replaces the certificate under load, and no write fails", run: replaced },
        Check { name: "the Certificate is deleted with the cluster", run: stops },
    ]
}

fn make(cluster: &Cluster) -> Result<()> {
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": NAME },
        "spec": {
            "workers": WORKERS, "replicationFactor": 2, "partitions": 16, "capacity": { "memories": 20_000_000 },
            "gpu": { "mode": "Disabled" }, "storage": { "size": "1Gi" },
            "tls": { "mode": "CertManager", "issuerRef": { "name": ISSUER } },
        },
    });
    until("the kind", WHILE, || cluster.api().create(CLUSTERS, &object).map(Some)).map(drop)
}

/// Grants or revokes the operators' access to Certificates.
fn allow(cluster: &Cluster, allowed: bool) -> Result<()> {
    let values = format!("worker.image.tag=1,extraArgs[0]=--certificate-seconds={LIFETIME}");
    let set = format!("certManager.enabled={allowed}");
    until("the operators with changed permissions", READY, || helm_set(cluster, &values, &[&set]).map(Some))
}

fn asks(cluster: &Cluster) -> Result<String> {
    allow(cluster, false)?;
    make(cluster)?;
    let said = certified(cluster, NAME, "False", "CertManagerForbidden")?;
    ensure!(said.contains("certManager.enabled=true"), "the chart's value is not named: {said}");
    allow(cluster, true)?;
    let said = certified(cluster, NAME, "False", "CertManagerMissing")?;
    ensure!(said.contains("install cert-manager"), "the remedy is missing: {said}");
    define(cluster)?;
    // The Certificate is requested even before its Secret is readable.
    certified(cluster, NAME, "False", "SecretForbidden")?;
    let certificate = cluster.api().get(&format!("{CERTIFICATES}/{CERTIFICATE}"))?;
    let (spec, uid) =
        (&certificate["spec"], cluster.api().get(&format!("{CLUSTERS}/{NAME}"))?["metadata"]["uid"].take());
    let needed = Name::shared_by_workers("default", NAME, id(cluster, NAME)?).to_string();
    ensure!(spec["uris"] == json!([needed]) && spec["secretName"] == CERTIFICATE, "{spec}");
    ensure!(spec["issuerRef"] == json!({ "name": ISSUER, "kind": "Issuer", "group": "cert-manager.io" }), "{spec}");
    ensure!(spec["duration"] == "24h0m0s" && spec["renewBefore"] == "8h0m0s", "{spec}");
    ensure!(
        certificate["metadata"]["ownerReferences"][0]["uid"] == uid,
        "it has no owner: {}",
        certificate["metadata"]
    );
    let_read(cluster, CERTIFICATE)?;
    let said = certified(cluster, NAME, "False", "CertificateNotReady")?;
    ensure!(said.contains("has not processed it"), "unexpected message: {said}");
    let longer = json!({ "spec": { "tls": { "certificateLifetime": "48h" } } });
    cluster.api().patch(&format!("{CLUSTERS}/{NAME}"), MERGE, &longer)?;
    until("the new lifetime to be requested", READY, || {
        let asked = cluster.api().get(&format!("{CERTIFICATES}/{CERTIFICATE}"))?["spec"]["duration"].take();
        Ok((asked == "48h0m0s").then_some(()))
    })?;
    Ok(String::new())
}

/// Defines a minimal Certificate kind.
fn define(cluster: &Cluster) -> Result<()> {
    let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let version = json!({ "name": "v1", "served": true, "storage": true, "subresources": { "status": {} },
        "schema": { "openAPIV3Schema": schema } });
    let names = json!({ "kind": "Certificate", "plural": "certificates", "singular": "certificate" });
    let definition = json!({ "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": "certificates.cert-manager.io" },
        "spec": { "group": "cert-manager.io", "scope": "Namespaced", "names": names, "versions": [version] } });
    cluster.api().create(DEFINITIONS, &definition).map(drop)
}

/// Sets the Ready condition as cert-manager would.
fn say(cluster: &Cluster, truth: &str, reason: &str, message: &str) -> Result<()> {
    let ready = json!({ "type": "Ready", "status": truth, "reason": reason, "message": message });
    let status = json!({ "status": { "conditions": [ready] } });
    cluster.api().patch(&format!("{CERTIFICATES}/{CERTIFICATE}/status"), MERGE, &status).map(drop)
}

fn becomes_ready(cluster: &Cluster) -> Result<String> {
    say(cluster, "False", "DoesNotExist", "unknown issuer")?;
    let heard = |truth: &str, reason: &str, part: &str| {
        until(part, READY, || {
            let said = certified(cluster, NAME, truth, reason)?;
            ensure!(said.contains(part), "{said}");
            Ok(Some(()))
        })
    };
    heard("False", "CertificateNotReady", "DoesNotExist: unknown issuer")?;
    let pods = cluster.api().get(&format!("{PODS}?labelSelector=engram.dev%2Fcluster%3D{NAME}"))?;
    ensure!(pods["items"].as_array().is_none_or(Vec::is_empty), "pods start without a certificate");
    let needed = Name::shared_by_workers("default", NAME, id(cluster, NAME)?);
    let began = Instant::now();
    fill(cluster, CERTIFICATE, &filled(&ca(cluster)?, &needed, HOUR)?)?;
    heard("True", "Valid", "renewal: Certificate asked-worker-tls is not Ready")?;
    say(cluster, "True", "Ready", "")?;
    whole(cluster, NAME, READY)?;
    Ok(format!("Ready {:.1} s after the Secret was filled", began.elapsed().as_secs_f64()))
}

fn ends(cluster: &Cluster) -> Result<String> {
    goes(cluster)?;
    cluster.api().delete(&format!("{DEFINITIONS}/certificates.cert-manager.io"), None)?;
    allow(cluster, false)?;
    Ok(String::new())
}

/// Deletes the cluster, and waits for the deletion of the Certificate.
fn goes(cluster: &Cluster) -> Result<()> {
    cluster.api().delete(&format!("{CLUSTERS}/{NAME}"), None)?;
    let left = || -> Result<bool> {
        let asked = cluster.api().find(&format!("{CERTIFICATES}/{CERTIFICATE}"))?;
        Ok(asked.is_some() || cluster.api().find(&format!("{PODS}/{NAME}-worker-0"))?.is_some())
    };
    until("the pods and the Certificate to go", READY, || Ok((!left()?).then_some(())))?;
    cluster.kubectl(["delete", "pvc", "-l", &format!("engram.dev/cluster={NAME}"), "--wait=false"])?;
    cluster.kubectl(["delete", "secret", CERTIFICATE, "--ignore-not-found"]).map(drop)
}

fn starts(cluster: &Cluster) -> Result<String> {
    allow(cluster, true)?;
    let folder = programs::cert_manager()?;
    for entry in fs::read_dir(folder.join(programs::DEFINITIONS))? {
        cluster.apply_on_server(&fs::read_to_string(entry?.path())?)?;
    }
    for kind in ["certificates", "certificaterequests", "issuers", "clusterissuers"] {
        let name = format!("crd/{kind}.cert-manager.io");
        cluster.kubectl(["wait", "--for=condition=Established", &name, "--timeout=20s"])?;
    }
    let kubeconfig = format!("--kubeconfig={}", cluster.kubeconfig("admin"));
    cluster.start_daemon(1, programs::CERT_MANAGER, &folder.join(programs::CERT_MANAGER), &[kubeconfig])?;
    let ca = ca(cluster)?;
    let of_ca = json!({ "tls.key": ca.key(), "tls.crt": ca.certificate() });
    fill(cluster, ISSUER, &of_ca)?;
    let issuer = json!({ "apiVersion": "cert-manager.io/v1", "kind": "Issuer",
        "metadata": { "name": ISSUER, "namespace": "default" }, "spec": { "ca": { "secretName": ISSUER } } });
    cluster.apply(&issuer.to_string())?;
    cluster.kubectl(["wait", "--for=condition=Ready", &format!("issuer/{ISSUER}"), "--timeout=50s"])?;
    Ok(String::new())
}

/// Skips checks if cert-manager could not be built.
fn runs(cluster: &Cluster) -> Result<()> {
    let is_alive = cluster.daemon(1, programs::CERT_MANAGER).is_some_and(Record::is_alive);
    if is_alive { Ok(()) } else { Err(Skip("cert-manager is not running".into()).into()) }
}

fn given(cluster: &Cluster) -> Result<String> {
    runs(cluster)?;
    let_read(cluster, CERTIFICATE)?;
    let began = Instant::now();
    make(cluster)?;
    certified(cluster, NAME, "True", "Valid")?;
    let signed = began.elapsed();
    whole(cluster, NAME, READY)?;
    let (signed, ready) = (signed.as_secs_f64(), began.elapsed().as_secs_f64());
    Ok(format!("signed after {signed:.1} s, Ready after {ready:.1} s"))
}

/// Changing the lifetime makes cert-manager issue a new certificate.
fn replaced(cluster: &Cluster) -> Result<String> {
    runs(cluster)?;
    let longer = json!({ "spec": { "tls": { "certificateLifetime": "48h" } } });
    shown_under_load(cluster, NAME, 36 * HOUR, || {
        cluster.api().patch(&format!("{CLUSTERS}/{NAME}"), MERGE, &longer).map(drop)
    })
}

fn stops(cluster: &Cluster) -> Result<String> {
    runs(cluster)?;
    goes(cluster)?;
    cluster.end_daemon(1, programs::CERT_MANAGER, Signal::SIGTERM)?;
    Ok(String::new())
}
