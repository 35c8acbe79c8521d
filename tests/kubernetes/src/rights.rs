//! Least privilege: the permissions of operator and workers, compared with their use in the API server's audit log.
//!
//! The tables below list all granted permissions with their reasons; a test compares the shipped roles with them. After suites
//! the audit log is read: a denied request that is not in a table fails the run, and so does a permission that is never used.

use crate::cluster::Cluster;
use crate::requirements::Skip;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Namespace of the operators that a suite runs as processes.
pub(crate) const OPERATORS: &str = "operators";
/// Audit policy for the accounts of these namespaces only: auditing all requests would produce megabytes a minute.
pub(crate) const POLICY: &str = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n  - level: Metadata\n    \
    userGroups: [\"system:serviceaccounts:engram-system\", \"system:serviceaccounts:operators\", \"system:serviceaccounts:default\"]\n  \
    - level: None\n";
/// Suites that together exercise all permissions.
const EVERYTHING: [&str; 3] = ["operator", "faults", "identity"];
/// Resources that the operator may legitimately be denied to get, depending on grants by users.
const MAY_BE_MISSING: [&str; 2] = ["secrets", "certificates.cert-manager.io"];
/// The API server's message for an unknown owner kind.
const UNKNOWN_KIND: &str = "cannot find RESTMapping";
/// The API server's message for an object in a namespace that is being deleted.
const TERMINATING: &str = "because it is being terminated";

/// Permissions and their reason.
struct Rule {
    /// `resource.group/subresource`, separated by spaces.
    resources: &'static str,
    verbs: &'static str,
    /// Documentation only.
    #[allow(dead_code, reason = "documents the rule")]
    why: &'static str,
    /// Whether the permission is checked by admission of other requests, so that no request shows its use.
    by_admission: bool,
}

const fn rule(resources: &'static str, verbs: &'static str, why: &'static str) -> Rule {
    Rule { resources, verbs, why, by_admission: false }
}

/// Permissions of the operator in watched namespaces, and for its Lease.
const OPERATOR: [Rule; 18] = [
    rule("learnerclusters.engram.dev learnerruns.engram.dev", "list watch", "run/controllers.rs: user-created objects"),
    rule("learnerclusters.engram.dev", "patch", "run/apply.rs: removes the annotation `engram.dev/replace`"),
    rule("learnerclusters.engram.dev/scale", "patch", "run/autoscalers.rs: spec.autoscaling with mode Operator"),
    rule("learnerruns.engram.dev", "delete", "run/runs.rs: ttlSecondsAfterFinished"),
    rule("learnerclusters.engram.dev/status learnerruns.engram.dev/status", "patch", "run/apply.rs: server-side apply"),
    Rule {
        by_admission: true,
        ..rule(
            "learnerclusters.engram.dev/finalizers",
            "update",
            "blockOwnerDeletion with OwnerReferencesPermissionEnforcement",
        )
    },
    rule(
        "partitionmaps.engram.dev",
        "get list watch create patch",
        "written by coordinators; get, watch and patch are granted to workers",
    ),
    rule("pods", "list watch delete", "run/observe.rs; replacement and rolling updates delete pods"),
    rule("persistentvolumeclaims", "list watch patch delete", "expansion, and deletion after scaling down"),
    rule("configmaps services serviceaccounts", "get list watch create patch delete", "build/: objects of a cluster"),
    rule("statefulsets.apps", "get list watch create patch delete", "build/stateful_set.rs; recreated when disks grow"),
    rule("jobs.batch", "get create patch", "run/jobs.rs: runs of kind Job"),
    rule("poddisruptionbudgets.policy", "get list watch create patch delete", "build/network.rs"),
    rule("networkpolicies.networking.k8s.io", "get list watch create patch delete", "build/network.rs"),
    rule(
        "roles.rbac.authorization.k8s.io rolebindings.rbac.authorization.k8s.io",
        "get list watch create patch delete",
        "build/access.rs: the workers' permissions, a subset of these",
    ),
    rule("events.events.k8s.io", "create patch", "run/events.rs: repetitions patch an event"),
    rule("leases.coordination.k8s.io", "create get update", "run/leader.rs"),
    rule("secrets", "create get update", "run/certificates.rs: the CA Secret, the only one that is readable"),
];
// In addition, non-resource URLs: `get` of `/openid/v1/jwks` and `/.well-known/openid-configuration` (run/issuer.rs). Not granted by our
// roles: Kubernetes binds `system:service-account-issuer-discovery` to every ServiceAccount.
/// Cluster-scoped permissions of the ClusterRole.
const EVERYWHERE: [Rule; 2] = [
    rule("nodes", "list", "run/nodes.rs: GPUs, zones, lost nodes"),
    rule("tokenreviews.authentication.k8s.io", "create", "run/signing.rs: authenticates pods"),
];
/// Permissions added by the chart's `certManager.enabled`.
const CERT_MANAGER: Rule = rule(
    "certificates.cert-manager.io",
    "get create patch",
    "run/cert_manager.rs: clusters with tls.mode: CertManager",
);
/// Permissions of a worker, on the map of its own cluster.
const WORKER: Rule = rule("partitionmaps.engram.dev", "get watch patch", "failover without an operator");

/// Caller of the API server.
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

/// Use of permissions in one cluster or several.
#[derive(Debug, Default)]
pub struct AuditReport {
    used: BTreeSet<Right>,
    /// Denied requests, with the API server's message.
    refused: BTreeMap<Right, String>,
    /// Requests denied before the API server had loaded roles, or after a cluster's role was deleted.
    early: u64,
}

impl AuditReport {
    /// Reads the audit log of a cluster.
    ///
    /// # Errors
    /// Fails if it cannot be read, or contains requests that are not granted.
    pub fn read(&mut self, cluster: &Cluster) -> Result<String> {
        let (mut requests, before) = (0_u64, self.refused.len());
        for file in logs(&cluster.path("log"))? {
            let text = fs::read_to_string(&file).with_context(|| format!("failed to read {}", file.display()))?;
            // The server may have been killed within a line.
            for event in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
                requests += u64::from(self.take(&event));
            }
        }
        let denied: Vec<String> = self.refused.iter().map(|(right, why)| format!("{right} ({why})")).collect();
        ensure!(self.refused.len() == before, "denied: {}", denied.join("; "));
        Ok(format!(
            "{requests} requests; {} were denied before roles or definitions were loaded, or after their deletion or that of the namespace",
            self.early
        ))
    }

    /// Records an audit event. Returns whether it is of an operator or a worker.
    fn take(&mut self, event: &Value) -> bool {
        let text = |path: &str| event.pointer(path).and_then(Value::as_str).unwrap_or_default();
        let Some((who, cluster)) = who(text("/user/username")) else { return false };
        // Discovery needs no permission.
        let Some(resource) = event.pointer("/objectRef/resource").and_then(Value::as_str) else { return false };
        let (group, part) = (text("/objectRef/apiGroup"), text("/objectRef/subresource"));
        let dot = if group.is_empty() { "" } else { "." };
        let slash = if part.is_empty() { "" } else { "/" };
        let resource = format!("{resource}{dot}{group}{slash}{part}");
        let right = |verb: &str| Right { who, verb: verb.to_owned(), resource: resource.clone() };
        let request = right(text("/verb"));
        let code = event.pointer("/responseStatus/code").and_then(Value::as_u64);
        if code != Some(403) {
            // Server-side apply that creates an object requires the verb create, too.
            if request.verb == "patch" && code == Some(201) {
                self.used.insert(right("create"));
            }
            self.used.insert(request);
            return true;
        }
        let granted = match who {
            Who::Operator => rights(who, operators().chain([&CERT_MANAGER])).contains(&request),
            Who::Worker => text("/objectRef/name") == cluster && rights(who, [&WORKER]).contains(&request),
        };
        let message = text("/responseStatus/message");
        // A new CustomResourceDefinition takes a moment to be known everywhere in the API server.
        let is_early = text("/annotations/authorization.k8s.io~1decision") == "forbid"
            || [UNKNOWN_KIND, TERMINATING].iter().any(|known| message.contains(known));
        // Secrets and Certificates need explicit grants; a missing one is reported in the status.
        if who == Who::Operator && request.verb == "get" && MAY_BE_MISSING.contains(&&*request.resource) {
            return true;
        }
        if granted && is_early {
            self.early += 1;
        } else {
            self.refused.insert(request, message.to_owned());
        }
        true
    }

    /// Checks that every permission was used.
    ///
    /// # Errors
    /// Fails if a permission was never used; [`Skip`] if there were no requests.
    pub fn all_used(&self) -> Result<String> {
        if self.used.is_empty() {
            return Err(Skip("neither operators nor workers ran".into()).into());
        }
        let asked_for = operators().chain([&CERT_MANAGER]).filter(|rule| !rule.by_admission);
        let granted: BTreeSet<Right> =
            rights(Who::Operator, asked_for).into_iter().chain(rights(Who::Worker, [&WORKER])).collect();
        let unused: Vec<String> = granted.difference(&self.used).map(ToString::to_string).collect();
        ensure!(unused.is_empty(), "granted but never used: {}", unused.join("; "));
        Ok(format!("{} rights", granted.len()))
    }

    /// Returns whether these suites (all, if none is named) exercise every permission.
    pub fn sees_all(suites: &[String]) -> bool {
        suites.is_empty() || EVERYTHING.iter().all(|one| suites.iter().any(|it| it == one))
    }
}

/// Returns the caller, and the cluster of a worker.
fn who(user: &str) -> Option<(Who, &str)> {
    let (namespace, account) = user.strip_prefix("system:serviceaccount:")?.split_once(':')?;
    match account {
        "engram-operator" if namespace == "engram-system" || namespace == OPERATORS => Some((Who::Operator, "")),
        _ => Some((Who::Worker, account.strip_suffix("-worker")?)),
    }
}

/// Returns the audit logs, including rotated ones.
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

/// Returns a kubeconfig for an operator that runs as a process, with exactly the shipped account and permissions.
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

/// Creates a kubeconfig with a token of a ServiceAccount.
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
        // The CA alone, by its name.
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
    fn request_beyond_the_table_is_reported_once_the_roles_are_read() {
        let (operator, worker) = ("engram-system:engram-operator", "default:words-worker");
        let map = |name: &str| json!({ "resource": "partitionmaps", "apiGroup": "engram.dev", "name": name });
        let mut report = AuditReport::default();
        assert!(!report.take(&event("default:other", "get", &json!({ "resource": "secrets" }), 403, "forbid")));
        assert!(report.take(&event(operator, "list", &json!({ "resource": "pods" }), 403, "forbid")));
        assert!(report.take(&event(worker, "patch", &map("words"), 403, "forbid")));
        assert_eq!((report.early, report.refused.len(), report.used.len()), (2, 0, 0));

        report.take(&event(operator, "list", &json!({ "resource": "secrets" }), 403, "forbid"));
        let certificate = json!({ "resource": "certificates", "apiGroup": "cert-manager.io" });
        report.take(&event(operator, "get", &certificate, 403, "forbid"));
        report.take(&event(worker, "patch", &map("others"), 403, "forbid"));
        // Granted, and refused for another reason: a right that another request needs is missing.
        let service = json!({ "resource": "services" });
        report.take(&event(operator, "patch", &service, 403, "allow"));
        assert_eq!(report.refused.len(), 3);
        // Granted, and refused since the API server does not know the owner's kind yet.
        let mut unknown = event(operator, "patch", &json!({ "resource": "serviceaccounts" }), 403, "allow");
        let why = "cannot set blockOwnerDeletion in this case because cannot find RESTMapping for APIVersion engram.dev/v1alpha1";
        unknown["responseStatus"]["message"] = why.into();
        report.take(&unknown);
        assert_eq!((report.early, report.refused.len()), (3, 3));

        report.take(&event(operator, "patch", &service, 201, "allow"));
        let created = Right { who: Who::Operator, verb: "create".into(), resource: "services".into() };
        assert!(report.used.contains(&created));
        let unused = report.all_used().unwrap_err().to_string();
        assert!(unused.contains("Operator: delete pods") && !unused.contains("create services"), "{unused}");
        assert!(!unused.contains("finalizers"), "{unused}");
    }
}
