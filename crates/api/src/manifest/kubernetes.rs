//! Rules for settings that apply to Kubernetes only. The API server and the operator enforce the same.

use super::check::entry_place;
use super::rules::{Rules, find};
use super::suggestion::nearest;
use super::tree::{Entry, Yaml};
use crate::code::Code;
use crate::operator::is_object_name;
use crate::problem::Problem;
use crate::quantity::Duration;
use crate::unsupported::{self, UnsupportedField};

/// Container fields that the operator writes.
const CONTAINER: [&str; 8] =
    ["command", "args", "ports", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "image"];
/// Pod fields that the operator writes.
const POD: [&str; 6] = [
    "serviceAccountName",
    "automountServiceAccountToken",
    "hostNetwork",
    "hostPID",
    "terminationGracePeriodSeconds",
    "restartPolicy",
];
/// The API group of cert-manager's own issuers, and their kinds.
const CERT_MANAGER: &str = "cert-manager.io";
const ISSUERS: [&str; 2] = ["Issuer", "ClusterIssuer"];
/// Minimum certificate lifetime of cert-manager, in milliseconds.
const CERT_MANAGER_LEAST_MS: u64 = 3_600_000;
/// Prefixes of labels and annotations that the operator writes.
const RESERVED: [&str; 2] = ["engram.dev/", "app.kubernetes.io/"];

/// Resources of a container that Kubernetes itself provides.
const RESOURCES: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

/// Returns whether Kubernetes accepts the name of a container's resource.
fn is_resource_name(name: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    };
    RESOURCES.contains(&name)
        || name.strip_prefix("hugepages-").is_some_and(is_part)
        || name.split_once('/').is_some_and(|(domain, name)| is_part(domain) && is_part(name))
}

impl Rules<'_> {
    /// Checks the settings of a `LearnerCluster`.
    pub(super) fn kubernetes(&mut self) {
        for later in unsupported::CLUSTER {
            self.later(later);
        }
        self.ephemeral();
        self.exclusive("spec.image", &["spec.version"], "image is the full reference");
        let devices = ["spec.gpu.count", "spec.gpu.resourceName"];
        self.exclusive("spec.gpu.resourceClaimTemplateName", &devices, "the template defines the devices");
        self.secret_name();
        self.issuer();
        self.access();
        self.resources();
        self.pod_template();
    }

    /// `secretName` is set if and only if the mode is `Secret`.
    fn secret_name(&mut self) {
        let (mode, path) = ("spec.tls.mode", "spec.tls.secretName");
        let name = self.text(path).unwrap_or_default();
        match self.text(mode) {
            Some("Secret") if name.is_empty() => {
                let message = format!("{path} is missing, but {mode} is Secret; allowed: the name of a Secret");
                self.problem(Code::Missing, path, message, "add secretName: words-tls");
            }
            Some("Secret") if !is_object_name(name) => {
                let message =
                    format!("{path} is {}; allowed: the name of a Secret: a-z, 0-9, - and .", self.display(path));
                self.problem(Code::OutOfRange, path, message, "name a Secret of the cluster's namespace");
            }
            Some("Secret") => {}
            _ if name.is_empty() => {}
            other => {
                let message = format!(
                    "{path} is {}, but {mode} is {}; allowed: with mode Secret",
                    self.display(path),
                    other.unwrap_or("absent")
                );
                self.problem(Code::Conflicting, path, message, "set mode: Secret, or remove the line");
            }
        }
    }

    /// `issuerRef` is set if and only if the mode is `CertManager`.
    fn issuer(&mut self) {
        let (mode, path) = ("spec.tls.mode", "spec.tls.issuerRef.name");
        let name = self.text(path).unwrap_or_default();
        match self.text(mode) {
            Some("CertManager") if name.is_empty() => {
                let message =
                    format!("{path} is missing, but {mode} is CertManager; allowed: the name of a cert-manager issuer");
                self.problem(Code::Missing, path, message, "add issuerRef: { name: our-ca, kind: Issuer }");
            }
            Some("CertManager") if !is_object_name(name) => {
                let message =
                    format!("{path} is {}; allowed: the name of an issuer: a-z, 0-9, - and .", self.display(path));
                self.problem(Code::OutOfRange, path, message, "name a cert-manager issuer");
            }
            Some("CertManager") => {}
            _ if name.is_empty() => {}
            other => {
                let message = format!(
                    "{path} is {}, but {mode} is {}; allowed: with mode CertManager",
                    self.display(path),
                    other.unwrap_or("absent")
                );
                self.problem(Code::Conflicting, path, message, "set mode: CertManager, or remove the line");
            }
        }
        self.certificate_lifetime();
        let path = "spec.tls.issuerRef.group";
        let group = self.text(path).filter(|group| !group.is_empty()).unwrap_or(CERT_MANAGER);
        let is_own = group == CERT_MANAGER;
        if !is_object_name(group) {
            let message = format!("{path} is {}; allowed: an API group: a-z, 0-9, - and .", self.display(path));
            self.problem(Code::OutOfRange, path, message, "remove the line for cert-manager's own issuers");
        }
        let path = "spec.tls.issuerRef.kind";
        let kind = self.text(path).unwrap_or_default();
        let is_kind = kind.starts_with(|letter: char| letter.is_ascii_uppercase())
            && kind.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !kind.is_empty() && !ISSUERS.contains(&kind) && (is_own || !is_kind) {
            let allowed = if is_own { "Issuer, ClusterIssuer" } else { "a kind of its group" };
            let message = format!("{path} is {}; allowed: {allowed}", self.display(path));
            self.problem(Code::OutOfRange, path, message, "set issuerRef.group for another kind");
        }
    }

    /// cert-manager has a longer minimum lifetime than the operator's CA.
    fn certificate_lifetime(&mut self) {
        let path = "spec.tls.certificateLifetime";
        let lifetime = self.text(path).and_then(|text| text.parse::<Duration>().ok());
        let is_short = lifetime.is_some_and(|lifetime| lifetime.as_millis() < CERT_MANAGER_LEAST_MS);
        if is_short && self.text("spec.tls.mode") == Some("CertManager") {
            let message =
                format!("{path} is {}, but spec.tls.mode is CertManager; allowed: at least 1h", self.display(path));
            self.problem(Code::OutOfRange, path, message, "cert-manager accepts no shorter lifetime");
        }
    }

    /// Access uses tokens, which must not be sent in plaintext.
    fn access(&mut self) {
        let path = "spec.access";
        let is_given = |entry: &Entry| matches!(&entry.value.value, Yaml::List(entries) if !entries.is_empty());
        if self.text("spec.tls.mode") == Some("Disabled") && find(self.document, path).is_some_and(is_given) {
            let message = format!("{path} gives rights, but spec.tls.mode is Disabled; allowed: access with TLS");
            self.problem(
                Code::Conflicting,
                path,
                message,
                "remove tls, or set mode: Auto; a token sent in plaintext can be stolen",
            );
        }
    }

    /// Resources have names of Kubernetes, or of an extended resource with a domain.
    fn resources(&mut self) {
        for path in ["spec.resources.requests", "spec.resources.limits"] {
            let Some(Yaml::Map(entries)) = find(self.document, path).map(|entry| &entry.value.value) else { continue };
            for entry in entries.iter().filter(|entry| !is_resource_name(&entry.key)) {
                let field = format!("{path}.{}", entry.key);
                let allowed =
                    format!("{}, hugepages-SIZE, or DOMAIN/NAME of an extended resource", RESOURCES.join(", "));
                let message = format!("{field} is not a resource; allowed: {allowed}");
                let near = nearest(&entry.key, RESOURCES).map(|near| format!("did you mean {near}?"));
                let problem = Problem::new(Code::UnknownField, message).of(field).at(entry_place(entry, self.source));
                self.problems.push(problem.help(near.unwrap_or_else(|| "correct the name, or remove the line".into())));
            }
        }
    }

    /// Refuses a field whose feature comes later.
    pub(super) fn later(&mut self, later: &UnsupportedField) {
        let path = later.path();
        if find(self.document, &path).is_some() {
            self.problem(Code::NotSupported, &path, format!("{path} is not supported yet"), later.advice);
        }
    }

    fn ephemeral(&mut self) {
        let path = "spec.storage.ephemeral";
        let is_true = |entry: &Entry| entry.value.value == Yaml::Bool(true);
        let copies = self.integer("spec.replicationFactor").or_else(|| self.integer("spec.workers"));
        if find(self.document, path).is_some_and(is_true) && copies == Some(1) {
            let message =
                format!("{path} is true, but replicationFactor is 1; allowed: a replicationFactor of at least 2");
            self.problem(Code::Conflicting, path, message, "with a single replica a restart would lose its memories");
        }
    }

    /// Rejects `path` in combination with any of `others`.
    fn exclusive(&mut self, path: &str, others: &[&str], why: &str) {
        let is_set = |path: &str| self.has(path) && self.text(path) != Some("");
        let Some(other) = others.iter().find(|other| is_set(other)).filter(|_| is_set(path)) else { return };
        let message =
            format!("{path} is {}, but {other} is {}; allowed: one of them", self.display(path), self.display(other));
        self.problem(Code::Conflicting, path, message, why);
    }

    /// Rejects fields that the operator writes.
    fn pod_template(&mut self) {
        let template = "spec.podTemplate";
        let mut owned: Vec<String> = POD.iter().map(|field| format!("{template}.spec.{field}")).collect();
        for map in ["labels", "annotations"] {
            let path = format!("{template}.metadata.{map}");
            if let Some(Yaml::Map(entries)) = find(self.document, &path).map(|entry| &entry.value.value) {
                for entry in entries.iter().filter(|entry| RESERVED.iter().any(|prefix| entry.key.starts_with(prefix)))
                {
                    let field = format!("{path}.{}", entry.key);
                    let message =
                        format!("{field} is written by the operator; allowed: keys without {}", RESERVED.join(", "));
                    let place = entry_place(entry, self.source);
                    let problem = Problem::new(Code::Conflicting, message).of(field).at(place);
                    self.problems.push(problem.help("remove the line"));
                }
            }
        }
        owned.retain(|path| self.has(path));
        for path in owned {
            let message = format!("{path} is written by the operator; allowed: other fields of a pod");
            self.problem(Code::Conflicting, &path, message, "remove the line");
        }
        let Some(Yaml::List(containers)) =
            find(self.document, &format!("{template}.spec.containers")).map(|entry| &entry.value.value)
        else {
            return;
        };
        for container in containers.iter().map(|node| &node.value) {
            if container.get("name").and_then(|entry| entry.value.value.text()) != Some("worker") {
                continue;
            }
            for entry in CONTAINER.iter().filter_map(|field| container.get(field)) {
                let field = format!("{template}.spec.containers[worker].{}", entry.key);
                let message = format!("{field} is written by the operator; allowed: other fields of the container");
                let problem = Problem::new(Code::Conflicting, message).of(field).at(entry_place(entry, self.source));
                self.problems.push(problem.help("remove the line"));
            }
        }
    }
}
