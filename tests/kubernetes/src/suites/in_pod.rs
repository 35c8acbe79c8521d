//! The command line inside a pod: it finds the Kubernetes that it is in by the account of the pod, and by nothing else.

use super::faults::install::{USER, program};
use super::helpers::{WHILE, wait_for_pod};
use crate::cluster::Cluster;
use crate::image::{Content, Image, write_archive};
use crate::process::until;
use anyhow::{Result, ensure};
use serde_json::json;

const IMAGE: &str = "local.test/engram:1";
const NAME: &str = "asker";

/// What `engram` prints in a pod of the namespace `default` whose account may reach the workers of another namespace.
pub(super) fn asked(cluster: &Cluster, namespace: &str, arguments: &[&str]) -> Result<String> {
    let built = Content::default().program("/engram", &program(cluster, "engram")?)?;
    // For the one node that the pod runs on.
    let archive = cluster.path("n1-engram.tar");
    write_archive(&archive, &[Image { name: IMAGE, content: &built, entrypoint: &["/engram"], user: USER }])?;
    cluster.load_image_on(1, &archive)?;
    let node = (!cluster.is_given()).then_some("n1");
    let command = [&["-n", namespace], arguments].concat();
    let roles = "rbac.authorization.k8s.io";
    let (account, role) =
        (json!({ "name": NAME, "namespace": "default" }), json!({ "name": NAME, "namespace": namespace }));
    let rules = json!([
        { "apiGroups": ["engram.dev"], "resources": ["learnerclusters"], "verbs": ["list"] },
        { "apiGroups": [""], "resources": ["pods"], "verbs": ["list"] },
        { "apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["create", "get"] },
    ]);
    let restricted = json!({
        "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "runAsNonRoot": true,
        "capabilities": { "drop": ["ALL"] }, "seccompProfile": { "type": "RuntimeDefault" },
    });
    let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": "v1", "kind": "ServiceAccount", "metadata": account },
        { "apiVersion": format!("{roles}/v1"), "kind": "Role", "metadata": role, "rules": rules },
        { "apiVersion": format!("{roles}/v1"), "kind": "RoleBinding", "metadata": role,
          "roleRef": { "apiGroup": roles, "kind": "Role", "name": NAME },
          "subjects": [{ "kind": "ServiceAccount", "name": NAME, "namespace": "default" }] },
        { "apiVersion": "v1", "kind": "Pod", "metadata": account, "spec": {
            "serviceAccountName": NAME, "restartPolicy": "Never", "nodeName": node, "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "engram", "image": IMAGE, "imagePullPolicy": "Never", "securityContext": restricted,
                "args": command,
            }],
        } },
    ] });
    cluster.apply(&objects.to_string())?;
    let ended = |pod: &serde_json::Value| ["Succeeded", "Failed"].iter().any(|phase| pod["status"]["phase"] == *phase);
    let pod = wait_for_pod(cluster, NAME, "at its end", ended)?;
    let said = cluster.kubectl(["logs", NAME, "--namespace=default"])?;
    ensure!(pod["status"]["phase"] == "Succeeded", "it failed: {said}");
    for kind in ["pod", "serviceaccount"] {
        cluster.kubectl(["delete", kind, NAME, "--namespace=default", "--wait=false"])?;
    }
    until("the pod to go", WHILE, || {
        Ok(cluster.api().find(&format!("{}/{NAME}", super::helpers::PODS))?.is_none().then_some(()))
    })?;
    Ok(said)
}
