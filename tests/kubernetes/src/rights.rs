//! Least rights: what operator and workers may ask of the API server, and what they did ask by its audit log.
//!
//! The tables below are the whole of what is granted, each with its reason; a test holds the shipped roles against them. After
//! suites the audit log is read: whoever asked for more than a table grants fails the run, and so does a right that is granted
//! and was used by nobody.

use crate::cluster::Cluster;
use crate::requirements::Skip;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Namespace of the operators that a suite runs as processes.
pub(crate) const OPERATORS: &str = "operators";
/// Whoever is not of these namespaces is not looked at: Metadata of the whole of a Kubernetes would be megabytes a minute.
pub(crate) const POLICY: &str = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n  - level: Metadata\n    \
    userGroups: [\"system:serviceaccounts:engram-system\", \"system:serviceaccounts:operators\", \"system:serviceaccounts:default\"]\n  \
    - level: None\n";
/// Suites in which, together, everything happens that operator and workers do.
const EVERYTHING: [&str; 3] = ["operator", "faults", "identity"];
/// What an operator may be refused to get, by what people granted or did not.
const MAY_BE_MISSING: [&str; 2] = ["secrets", "certificates.cert-manager.io"];
/// How the API server says that it does not know the kind of an owner.
const UNKNOWN_KIND: &str = "cannot find RESTMapping";

/// Rights, and why they are granted.
struct Rule {
    /// `resource.group/subresource`, separated by spaces.
    resources: &'static str,
    verbs: &'static str,
    /// For people who ask why.
    #[allow(dead_code, reason = "a rule without a reason does not come into the table")]
    why: &'static str,
    /// The right is looked at while another request is admitted, and no request of its own shows its use.
    by_admission: bool,
}

const fn rule(resources: &'static str, verbs: &'static str, why: &'static str) -> Rule {
    Rule { resources, verbs, why, by_admission: false }
}

/// What the operator may do where it looks after clusters, and with its own Lease.
const OPERATOR: [Rule; 16] = [
    rule("learnerclusters.engram.dev learnerruns.engram.dev", "list watch", "run/watching.rs: what people ask for"),
    rule(
        "learnerclusters.engram.dev",
        "patch",
        "run/apply.rs: the annotation `engram.dev/replace` goes when that is done",
    ),
    rule("learnerruns.engram.dev", "delete", "run/runs.rs: ttlSecondsAfterFinished"),
    rule("learnerclusters.engram.dev/status learnerruns.engram.dev/status", "patch", "run/apply.rs: server-side apply"),
    Rule {
        by_admission: true,
        ..rule(
            "learnerclusters.engram.dev/finalizers",
            "update",
            "owner references that block the owner's deletion: OwnerReferencesPermissionEnforcement asks for it",
        )
    },
    rule(
        "partitionmaps.engram.dev",
        "get list watch create patch",
        "the coordinators write it, and hand get, watch and patch on to workers",
    ),
    rule("pods", "list watch delete", "run/observe.rs; workers are replaced and rolled by deletion"),
    rule("persistentvolumeclaims", "list watch patch delete", "disks grow; those of workers that went are removed"),
    rule("configmaps services serviceaccounts", "get list watch create patch delete", "build/: objects of a cluster"),
    rule("statefulsets.apps", "get list watch create patch delete", "build/stateful_set.rs; made anew when disks grow"),
    rule("poddisruptionbudgets.policy", "get list watch create patch delete", "build/network.rs"),
    rule("networkpolicies.networking.k8s.io", "get list watch create patch delete", "build/network.rs"),
    rule(
        "roles.rbac.authorization.k8s.io rolebindings.rbac.authorization.k8s.io",
        "get list watch create patch delete",
        "build/access.rs: the workers' own right, which is a part of this table",
    ),
    rule("events.events.k8s.io", "create patch", "run/events.rs: repeats of six minutes are one event"),
    rule("leases.coordination.k8s.io", "create get update", "run/leader.rs"),
    rule(
        "secrets",
        "create get update",
        "run/certificates.rs: the authority, which is the one Secret that may be read, and replaced",
    ),
];
// Beside resources: `get` of `/openid/v1/jwks` and `/.well-known/openid-configuration`, run/issuer.rs: workers verify tokens by these keys. Not
// granted by our roles: Kubernetes binds `system:service-account-issuer-discovery` to every ServiceAccount.
/// What a ClusterRole grants beyond that: what is in no namespace.
const EVERYWHERE: [Rule; 2] = [
    rule("nodes", "list", "run/nodes.rs: GPUs, zones, and which nodes are lost"),
    rule("tokenreviews.authentication.k8s.io", "create", "run/signing.rs: whose token a pod asks with"),
];
/// What `certManager.enabled` of the chart adds, wherever the operator looks after clusters.
const CERT_MANAGER: Rule = rule(
    "certificates.cert-manager.io",
    "get create patch",
    "run/cert_manager.rs: clusters with tls.mode: CertManager",
);
/// What a worker may do, with the map of its own cluster.
const WORKER: Rule = rule("partitionmaps.engram.dev", "get watch patch", "taking over while no operator answers");

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Operator,
    Worker,
}

/// A verb on a kind of object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    who: Who,
    verb: String,
    resource: String,
}

impl std::fmt::Display for Right {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { who, verb, resource } = self;
        write!(f, "{who:?}: {verb} {resource}")
    }
}

fn rights<'a>(who: Who, rules: impl IntoIterator<Item = &'a Rule>) -> BTreeSet<Right> {
    let of = |rule: &Rule| {
        let verbs = rule.verbs.split(' ');
        let resources = |verb: &str| {
            let verb = verb.to_owned();
            let right = move |resource: &str| Right { who, verb: verb.clone(), resource: resource.to_owned() };
            rule.resources.split(' ').map(right).collect::<Vec<_>>()
        };
        verbs.flat_map(resources).collect::<Vec<_>>()
    };
    rules.into_iter().flat_map(of).collect()
}

fn operators() -> impl Iterator<Item = &'static Rule> {
    OPERATOR.iter().chain(&EVERYWHERE)
}

/// What was asked, of one cluster or of several.
#[derive(Debug, Default)]
pub struct Asked {
    used: BTreeSet<Right>,
    /// Refused though a table grants it, or refused and granted by none: with what was said.
    refused: BTreeMap<Right, String>,
    /// Refused before the API server had read its roles, or after a cluster's role had gone with it.
    early: u64,
}

impl Asked {
    /// Reads the audit log of a cluster.
    ///
    /// # Errors
    /// It cannot be read, or somebody asked for more than is granted.
    pub fn read(&mut self, cluster: &Cluster) -> Result<String> {
        let (mut requests, before) = (0_u64, self.refused.len());
        for file in logs(&cluster.path("log"))? {
            let text = fs::read_to_string(&file).with_context(|| format!("failed to read {}", file.display()))?;
            // The server may have been killed within a line.
            for event in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
                requests += u64::from(self.take(&event));
            }
        }
        let told: Vec<String> = self.refused.iter().map(|(right, why)| format!("{right} ({why})")).collect();
        ensure!(self.refused.len() == before, "refused: {}", told.join("; "));
        Ok(format!(
            "{requests} requests; {} came before roles were read or a definition was known, or after they had gone",
            self.early
        ))
    }

    /// Whether the event is of somebody who is looked at.
    fn take(&mut self, event: &Value) -> bool {
        let text = |path: &str| event.pointer(path).and_then(Value::as_str).unwrap_or_default();
        let Some((who, cluster)) = who(text("/user/username")) else { return false };
        // Discovery and versions are open to everybody.
        let Some(resource) = event.pointer("/objectRef/resource").and_then(Value::as_str) else { return false };
        let (group, part) = (text("/objectRef/apiGroup"), text("/objectRef/subresource"));
        let dot = if group.is_empty() { "" } else { "." };
        let slash = if part.is_empty() { "" } else { "/" };
        let resource = format!("{resource}{dot}{group}{slash}{part}");
        let right = |verb: &str| Right { who, verb: verb.to_owned(), resource: resource.clone() };
        let asked = right(text("/verb"));
        let code = event.pointer("/responseStatus/code").and_then(Value::as_u64);
        if code != Some(403) {
            // Server-side apply of what is not there creates it, and the right to do so is asked for as well.
            if asked.verb == "patch" && code == Some(201) {
                self.used.insert(right("create"));
            }
            self.used.insert(asked);
            return true;
        }
        let granted = match who {
            Who::Operator => rights(who, operators().chain([&CERT_MANAGER])).contains(&asked),
            Who::Worker => text("/objectRef/name") == cluster && rights(who, [&WORKER]).contains(&asked),
        };
        let message = text("/responseStatus/message");
        // A definition that has just come is not known to every part of the API server at once.
        let is_early =
            text("/annotations/authorization.k8s.io~1decision") == "forbid" || message.contains(UNKNOWN_KIND);
        // It may read the Secrets that somebody lets it read, and Certificates where the chart is told so; a status says what is missing.
        if who == Who::Operator && asked.verb == "get" && MAY_BE_MISSING.contains(&&*asked.resource) {
            return true;
        }
        if granted && is_early {
            self.early += 1;
        } else {
            self.refused.insert(asked, message.to_owned());
        }
        true
    }

    /// Whether the suites run so far use every right; a list of those that were used by nobody.
    ///
    /// # Errors
    /// There is such a right; [`Skip`] where nobody was seen at all.
    pub fn all_used(&self) -> Result<String> {
        if self.used.is_empty() {
            return Err(Skip("neither operator nor workers were there".into()).into());
        }
        let asked_for = operators().chain([&CERT_MANAGER]).filter(|rule| !rule.by_admission);
        let granted: BTreeSet<Right> =
            rights(Who::Operator, asked_for).into_iter().chain(rights(Who::Worker, [&WORKER])).collect();
        let unused: Vec<String> = granted.difference(&self.used).map(ToString::to_string).collect();
        ensure!(unused.is_empty(), "granted, and used by nobody: {}", unused.join("; "));
        Ok(format!("{} rights", granted.len()))
    }

    /// Whether these suites (all, where none is named) are enough to see every right used.
    pub fn sees_all(suites: &[String]) -> bool {
        suites.is_empty() || EVERYTHING.iter().all(|one| suites.iter().any(|it| it == one))
    }
}

/// Who asks, and the cluster of a worker.
fn who(user: &str) -> Option<(Who, &str)> {
    let (namespace, account) = user.strip_prefix("system:serviceaccount:")?.split_once(':')?;
    match account {
        "engram-operator" if namespace == "engram-system" || namespace == OPERATORS => Some((Who::Operator, "")),
        _ => Some((Who::Worker, account.strip_suffix("-worker")?)),
    }
}

/// A log that has grown large is put aside under another name.
fn logs(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("audit") && name.ends_with(".log") {
            found.push(path);
        }
    }
    Ok(found)
}

/// The kubeconfig of an operator that runs as a process: with the account and the rights that are shipped, and no other.
pub(crate) fn operators_rights(cluster: &Cluster) -> Result<PathBuf> {
    const SHIPPED: &str = include_str!("../../../deploy/operator.yaml");
    let role = format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/engram-operator-{OPERATORS}");
    if cluster.api().find(&role)?.is_none() {
        let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": OPERATORS } });
        let kinds = ["ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"];
        let is_meant = |object: &&str| {
            kinds.iter().any(|kind| object.contains(&format!("\nkind: {kind}\n")))
                && object.contains("\n  name: engram-operator")
        };
        let objects: Vec<&str> = SHIPPED.split("\n---").filter(is_meant).collect();
        cluster.apply(&format!("{namespace}\n---{}", objects.join("\n---").replace("engram-system", OPERATORS)))?;
    }
    let account = format!("/api/v1/namespaces/{OPERATORS}/serviceaccounts/engram-operator");
    kubeconfig_of(cluster, &account, "operator.kubeconfig")
}

/// A kubeconfig with a token of a ServiceAccount: what a pod has mounted.
pub(crate) fn kubeconfig_of(cluster: &Cluster, account: &str, file: &str) -> Result<PathBuf> {
    let path = cluster.path("volumes").join(file);
    let request = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {} });
    let granted = cluster.api().create(&format!("{account}/token"), &request)?;
    let mut config: Value = serde_json::from_slice(&fs::read(cluster.kubeconfig("admin"))?)?;
    config["users"] = json!([{ "name": "u", "user": { "token": granted["status"]["token"] } }]);
    fs::write(&path, serde_json::to_vec(&config)?)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rights of the roles of a file whose names begin so.
    fn shipped(who: Who, file: &str, name: &str) -> BTreeSet<Right> {
        let mut found = BTreeSet::new();
        for text in file.split("\n---\n") {
            let object: Value = serde_saphyr::from_str(text).unwrap();
            let is_role = object["kind"] == "ClusterRole" || object["kind"] == "Role";
            if !is_role || !object["metadata"]["name"].as_str().unwrap().starts_with(name) {
                continue;
            }
            let all = |value: &Value| -> Vec<String> {
                value.as_array().unwrap().iter().map(|it| it.as_str().unwrap().to_owned()).collect()
            };
            for rule in object["rules"].as_array().unwrap() {
                for group in all(&rule["apiGroups"]) {
                    let dot = if group.is_empty() { "" } else { "." };
                    for resource in all(&rule["resources"]) {
                        let (kind, part) = resource.split_once('/').unwrap_or((&resource, ""));
                        let slash = if part.is_empty() { "" } else { "/" };
                        let resource = format!("{kind}{dot}{group}{slash}{part}");
                        let verbs = all(&rule["verbs"]).into_iter();
                        found.extend(verbs.map(|verb| Right { who, verb, resource: resource.clone() }));
                    }
                }
            }
        }
        found
    }

    #[test]
    fn what_is_shipped_is_the_table_and_holds_no_wildcard() {
        let operator = shipped(Who::Operator, include_str!("../../../deploy/operator.yaml"), "engram-operator");
        assert_eq!(operator, rights(Who::Operator, operators()));
        let role = include_str!("../../../operator/tests/golden/plain/role-words-worker.yaml");
        assert_eq!(shipped(Who::Worker, role, "words-worker"), rights(Who::Worker, [&WORKER]));
        assert!(operator.iter().all(|right| !right.verb.contains('*') && !right.resource.contains('*')));
        // The authority alone, by its name.
        let role = include_str!("../../../deploy/operator.yaml").split("\n---\n").find(|it| it.contains("[secrets]"));
        let rule = role.unwrap().split("resources: [secrets]").nth(2).unwrap();
        assert!(
            role.unwrap().contains("\nkind: Role\n") && rule.contains("resourceNames: [engram-operator-ca]"),
            "{rule}"
        );
        // Rights by which an account could take more.
        for (verb, resource) in
            [("list", "secrets"), ("watch", "secrets"), ("create", "pods"), ("create", "pods/exec"), ("bind", "roles")]
        {
            assert!(!operator.iter().any(|it| it.verb == verb && it.resource.split('.').next() == Some(resource)));
        }
    }

    #[test]
    fn what_the_chart_adds_for_cert_manager_is_in_the_table() {
        let rules = include_str!("../../../charts/engram/templates/_rules.tpl");
        let (_, added) = rules.split_once("{{- if .Values.certManager.enabled }}").unwrap();
        let (added, _) = added.split_once("{{- end }}").unwrap();
        let role = format!("kind: Role\nmetadata: {{ name: engram-operator }}\nrules:\n{added}");
        let added = shipped(Who::Operator, &role, "engram-operator");
        assert_eq!(added, rights(Who::Operator, [&CERT_MANAGER]));
    }

    fn event(user: &str, verb: &str, object: &Value, code: u64, decision: &str) -> Value {
        json!({
            "user": { "username": format!("system:serviceaccount:{user}") }, "verb": verb, "objectRef": object,
            "responseStatus": { "code": code, "message": "no" },
            "annotations": { "authorization.k8s.io/decision": decision },
        })
    }

    #[test]
    fn a_request_beyond_the_table_is_told_and_one_before_the_roles_were_read_is_not() {
        let (operator, worker) = ("engram-system:engram-operator", "default:words-worker");
        let map = |name: &str| json!({ "resource": "partitionmaps", "apiGroup": "engram.dev", "name": name });
        let mut asked = Asked::default();
        assert!(!asked.take(&event("default:somebody", "get", &json!({ "resource": "secrets" }), 403, "forbid")));
        assert!(asked.take(&event(operator, "list", &json!({ "resource": "pods" }), 403, "forbid")));
        assert!(asked.take(&event(worker, "patch", &map("words"), 403, "forbid")));
        assert_eq!((asked.early, asked.refused.len(), asked.used.len()), (2, 0, 0));

        asked.take(&event(operator, "list", &json!({ "resource": "secrets" }), 403, "forbid"));
        let certificate = json!({ "resource": "certificates", "apiGroup": "cert-manager.io" });
        asked.take(&event(operator, "get", &certificate, 403, "forbid"));
        asked.take(&event(worker, "patch", &map("others"), 403, "forbid"));
        // Granted, and refused for another reason: a right that another request needs is missing.
        let service = json!({ "resource": "services" });
        asked.take(&event(operator, "patch", &service, 403, "allow"));
        assert_eq!(asked.refused.len(), 3);
        // Granted, and refused since the API server does not know the owner's kind yet.
        let mut unknown = event(operator, "patch", &json!({ "resource": "serviceaccounts" }), 403, "allow");
        let why = "cannot set blockOwnerDeletion in this case because cannot find RESTMapping for APIVersion engram.dev/v1alpha1";
        unknown["responseStatus"]["message"] = why.into();
        asked.take(&unknown);
        assert_eq!((asked.early, asked.refused.len()), (3, 3));

        asked.take(&event(operator, "patch", &service, 201, "allow"));
        let created = Right { who: Who::Operator, verb: "create".into(), resource: "services".into() };
        assert!(asked.used.contains(&created));
        let unused = asked.all_used().unwrap_err().to_string();
        assert!(unused.contains("Operator: delete pods") && !unused.contains("create services"), "{unused}");
        assert!(!unused.contains("finalizers"), "{unused}");
    }
}
