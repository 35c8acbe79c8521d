//! Rules for what means something in Kubernetes only. The API server and the operator refuse the same.

use super::check::entry_place;
use super::rules::{Rules, find};
use super::tree::{Entry, Yaml};
use crate::code::Code;
use crate::later::{self, Later};
use crate::problem::Problem;

/// Fields of a container that the operator writes: probes, ports and the end of a worker hang together.
const CONTAINER: [&str; 8] =
    ["command", "args", "ports", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "image"];
/// Fields of a pod that the operator writes.
const POD: [&str; 6] = [
    "serviceAccountName",
    "automountServiceAccountToken",
    "hostNetwork",
    "hostPID",
    "terminationGracePeriodSeconds",
    "restartPolicy",
];
/// Prefixes of labels and annotations that the operator writes.
const RESERVED: [&str; 2] = ["engram.dev/", "app.kubernetes.io/"];

impl Rules<'_> {
    /// Checks the settings of a `LearnerCluster`.
    pub(super) fn kubernetes(&mut self) {
        for later in later::CLUSTER {
            self.later(later);
        }
        self.ephemeral();
        self.exclusive("spec.image", &["spec.version"], "image is the whole reference");
        let devices = ["spec.gpu.count", "spec.gpu.resourceName"];
        self.exclusive("spec.gpu.resourceClaimTemplateName", &devices, "the template says which devices");
        self.pod_template();
    }

    /// Refuses a field whose feature comes later.
    pub(super) fn later(&mut self, later: &Later) {
        let path = later.path();
        let Some(value) = find(self.document, &path).map(|entry| &entry.value.value) else { return };
        let message = match later.unless {
            Some(allowed) if value.text() == Some(allowed) => return,
            Some(allowed) => format!("{path} is {value}, which is not supported yet; allowed: {allowed}"),
            None => format!("{path} is not supported yet"),
        };
        self.problem(Code::NotSupported, &path, message, later.advice);
    }

    fn ephemeral(&mut self) {
        let path = "spec.storage.ephemeral";
        let is_true = |entry: &Entry| entry.value.value == Yaml::Bool(true);
        let copies = self.integer("spec.replicationFactor").or_else(|| self.integer("spec.workers"));
        if find(self.document, path).is_some_and(is_true) && copies == Some(1) {
            let message = format!("{path} is true, but there is one copy; allowed: a replicationFactor of at least 2");
            self.problem(Code::Conflicting, path, message, "with one copy a restart would lose its memories");
        }
    }

    /// Refuses `others` beside `path`.
    fn exclusive(&mut self, path: &str, others: &[&str], why: &str) {
        let given = |path: &str| self.has(path) && self.text(path) != Some("");
        let Some(other) = others.iter().find(|other| given(other)).filter(|_| given(path)) else { return };
        let message =
            format!("{path} is {}, but {other} is {}; allowed: one of them", self.shown(path), self.shown(other));
        self.problem(Code::Conflicting, path, message, why);
    }

    /// Refuses what the operator writes itself, field by field.
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
