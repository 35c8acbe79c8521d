//! Rules between fields, and unsupported features.
//!
//! A rule does not apply where a field that it needs is absent or invalid: that is reported elsewhere.

use super::buffers;
use super::check::entry_place;
use super::tree::{Entry, Node, Yaml, place};
use crate::cluster::Capacity;
use crate::code::Code;
use crate::objects::{is_address, is_object};
use crate::problem::{Location, Problem};
use crate::run::{DATA_FILES, EventFormat, JOB_VARIABLES, KUBERNETES_EVENTS, KUBERNETES_FILES, Synthetic};
use crate::snapshot::NAME;
use crate::unsupported;

const EVENTS: &str = "spec.memory.source.events";
const SYNTHETIC: &str = "spec.memory.source.synthetic";

/// Kinds of runs, the block of each, and how to add it.
const BLOCKS: [(&str, &str, &str); 8] = [
    ("Memory", "memory", "add memory: { source: { synthetic: {} } }"),
    ("Snapshot", "snapshot", "add snapshot: { url: s3://backups/words/monday }"),
    ("Geodesic", "geodesic", "add geodesic: { source: { synthetic: {} } }"),
    ("Tropical", "tropical", "add tropical: { decode: {}, classify: {} }"),
    ("Fisher", "fisher", "add fisher: {}"),
    ("Replay", "replay", "see examples/replay.yaml"),
    ("Federated", "federated", "see examples/federated.yaml"),
    ("Job", "job", "see examples/job.yaml"),
];

/// Rules applied to one document.
pub(super) struct Rules<'a> {
    pub(super) source: &'a str,
    pub(super) document: &'a Node,
    pub(super) problems: Vec<Problem>,
}

/// Checks the rules of a `LearnerCluster`.
pub(super) fn cluster(source: &str, document: &Node) -> Vec<Problem> {
    let mut rules = Rules { source, document, problems: Vec::new() };
    rules.replication_factor();
    rules.autoscaling();
    rules.bootstrap();
    rules.kubernetes();
    rules.problems.append(&mut buffers::check(source, document));
    rules.problems
}

/// Checks the rules of a `LearnerRun`; `capacity` is that of its cluster, if in the same file.
pub(super) fn run(source: &str, document: &Node, capacity: Option<i128>) -> Vec<Problem> {
    let mut rules = Rules { source, document, problems: Vec::new() };
    rules.block_of_kind();
    rules.snapshot("spec.snapshot");
    rules.snapshot("spec.replay.checkpoint.location");
    rules.events();
    DATA_FILES.iter().for_each(|at| rules.data_file(at));
    rules.tropical();
    rules.job();
    rules.report();
    rules.until();
    rules.population(capacity);
    rules.problems
}

/// Checks a `LearnerRun` for settings of local mode.
pub(super) fn run_in_kubernetes(source: &str, document: &Node) -> Vec<Problem> {
    let mut rules = Rules { source, document, problems: Vec::new() };
    unsupported::RUN.iter().for_each(|later| rules.later(later));
    rules.events_in_kubernetes();
    rules.job_in_kubernetes();
    DATA_FILES.iter().for_each(|at| rules.data_file_in_kubernetes(at));
    rules.problems
}

/// Returns the capacity of a `LearnerCluster` document, or the default.
pub(super) fn capacity(document: &Node) -> Option<i128> {
    match find(document, "spec.capacity.memories") {
        Some(entry) => entry.value.value.integer(),
        None => Some(Capacity::default().memories.into()),
    }
}

/// Returns a field by its path.
pub(super) fn find<'a>(document: &'a Node, path: &str) -> Option<&'a Entry> {
    match path.rsplit_once('.') {
        Some((parent, name)) => find(document, parent)?.value.value.get(name),
        None => document.value.get(path),
    }
}

impl Rules<'_> {
    fn replication_factor(&mut self) {
        let path = "spec.replicationFactor";
        let Some(copies @ 2..=3) = self.integer(path) else { return };
        let Some(workers) = self.integer("spec.workers").filter(|workers| (1..copies).contains(workers)) else {
            return;
        };
        let message =
            format!("{path} is {copies}, but spec.workers is {workers}; allowed: replicationFactor <= workers");
        let help = format!("set workers: {copies}, or replicationFactor: {workers}");
        self.problem(Code::Conflicting, path, message, &help);
    }

    fn autoscaling(&mut self) {
        let (minimum, maximum) = ("spec.autoscaling.minWorkers", "spec.autoscaling.maxWorkers");
        let Some(fewest) = self.integer(minimum) else { return };
        if let Some(most) = self.integer(maximum).filter(|most| *most < fewest) {
            let message = format!("{maximum} is {most}, but minWorkers is {fewest}; allowed: minWorkers <= maxWorkers");
            self.problem(Code::Conflicting, maximum, message, &format!("set maxWorkers: {fewest}"));
        }
        if let Some(copies) = self.integer("spec.replicationFactor").filter(|copies| *copies > fewest) {
            let message = format!(
                "{minimum} is {fewest}, but spec.replicationFactor is {copies}; allowed: minWorkers >= replicationFactor"
            );
            self.problem(Code::Conflicting, minimum, message, &format!("set minWorkers: {copies}"));
        }
    }

    fn bootstrap(&mut self) {
        let snapshot = "spec.bootstrap.snapshot";
        for path in ["url", "path"].map(|name| format!("{snapshot}.{name}")) {
            if let Some(place) = self.text(&path).filter(|place| place.trim_end_matches('/').ends_with(NAME)) {
                let message = format!("{path} is {place}; allowed: the location of one snapshot, without {NAME}");
                self.problem(
                    Code::OutOfRange,
                    &path,
                    message,
                    "`engram snapshot list --from LOCATION` lists snapshots",
                );
            }
        }
        self.snapshot(snapshot);
    }

    /// A snapshot is in object storage or in a volume.
    fn snapshot(&mut self, at: &str) {
        if !self.has(at) {
            return;
        }
        let [url, volume, path] = ["url", "volume", "path"].map(|name| format!("{at}.{name}"));
        self.one_of(at, &[url, volume.clone()], true);
        match (self.has(&volume), self.has(&path)) {
            (true, false) => {
                let (value, help) = (self.display(&volume), "add path: the folder in that volume");
                let message = format!("{volume} is {value}, but {path} is absent; allowed: volume with path");
                self.problem(Code::Conflicting, &volume, message, help);
            }
            (false, true) => {
                let (value, help) =
                    (self.display(&path), "add volume: an entry of spec.snapshotVolumes of the cluster");
                let message = format!("{path} is {value}, but {volume} is absent; allowed: path with volume");
                self.problem(Code::Conflicting, &path, message, help);
            }
            _ => {}
        }
        for field in ["endpoint", "region", "secretRef"].map(|name| format!("{at}.{name}")) {
            if self.has(&volume) && self.has(&field) {
                let value = self.display(&volume);
                let message = format!("{field} is present, but {volume} is {value}; allowed: {field} with url");
                self.problem(Code::Conflicting, &field, message, "remove it: it belongs to object storage");
            }
        }
    }

    fn block_of_kind(&mut self) {
        let kind = self.text("spec.kind");
        let Some((kind, own, help)) = BLOCKS.into_iter().find(|(name, ..)| Some(*name) == kind) else { return };
        let rule = "allowed: the block of that name, and no other";
        if !self.has(&format!("spec.{own}")) {
            let message = format!("spec.kind is {kind}, but spec.{own} is absent; {rule}");
            self.problem(Code::Conflicting, "spec.kind", message, help);
        }
        for block in BLOCKS.into_iter().map(|(_, block, _)| block) {
            let path = format!("spec.{block}");
            if block != own && self.has(&path) {
                let message = format!("{path} is present, but spec.kind is {kind}; {rule}");
                self.problem(Code::Conflicting, &path, message, "remove the block");
            }
        }
    }

    fn events(&mut self) {
        if !self.has(EVENTS) {
            return;
        }
        let [path, key, url] = ["path", "configMap.key", "s3.url"].map(|name| format!("{EVENTS}.{name}"));
        self.one_of(EVENTS, &["path", "configMap", "s3"].map(|name| format!("{EVENTS}.{name}")), true);
        self.input(EVENTS, &path);
        self.events_object(&url);
        let path = [path, key].into_iter().find(|path| self.has(path)).unwrap_or_else(|| url.clone());
        if let (None | Some("Auto"), Some(file)) = (self.text(&format!("{EVENTS}.format")), self.text(&path))
            && !file.is_empty()
            && (path != url || is_object(file))
            && EventFormat::of_path(file).is_none()
        {
            let message = format!(
                "{path} is {file}, but {EVENTS}.format is Auto; allowed with Auto: .jsonl, .ndjson, .csv, .parquet, optionally \
                 followed by .zst or .gz"
            );
            self.problem(Code::Conflicting, &path, message, "set format: Jsonl, Csv or Parquet");
        }
        let columns = format!("{EVENTS}.columns");
        if self.has(&columns) {
            for pair in [["id", "key"], ["epoch", "time"]] {
                self.one_of(&columns, &pair.map(|name| format!("{columns}.{name}")), true);
            }
        }
        let signals = ["quality", "delta", "columns.quality", "columns.delta"];
        self.one_of(EVENTS, &signals.map(|name| format!("{EVENTS}.{name}")), false);
        let (span, time) = (format!("{EVENTS}.epochSpan"), format!("{columns}.time"));
        if self.has(&span) && !self.has(&time) {
            let value = self.display(&span);
            let message = format!("{span} is {value}, but {time} is absent; allowed: epochSpan with columns.time");
            self.problem(Code::Conflicting, &span, message, "remove epochSpan: the file has epoch numbers");
        }
    }

    /// With `input`, the path is relative to the volume and inside it.
    fn input(&mut self, at: &str, path: &str) {
        let input = format!("{at}.input");
        if !self.has(&input) {
            return;
        }
        let Some(file) = self.text(path) else {
            let message =
                format!("{input} is {}, but {path} is absent; allowed: input with path", self.display(&input));
            return self.problem(Code::Conflicting, &input, message, "add path: the file in that volume");
        };
        if file.starts_with('/') || file.split('/').any(|part| part == "..") {
            let message = format!("{path} is {file}, but {input} is present; allowed: a path inside the volume");
            self.problem(Code::Conflicting, path, message, "write it relative to the root of the volume");
        }
    }

    /// A data file is a file or a key of a ConfigMap.
    fn data_file(&mut self, at: &str) {
        if !self.has(at) {
            return;
        }
        let [path, config_map] = ["path", "configMap"].map(|name| format!("{at}.{name}"));
        self.one_of(at, &[path.clone(), config_map], true);
        self.input(at, &path);
    }

    /// A tropical run has something to compute and reads at most one file.
    fn tropical(&mut self) {
        const AT: &str = "spec.tropical";
        const SAMPLES: &str = "spec.tropical.classify.data.csv";
        let graph = format!("{AT}.graph");
        if self.has(AT) && !["decode", "classify", "graph"].iter().any(|name| self.has(&format!("{AT}.{name}"))) {
            let message = format!("{AT} has none of them; allowed: decode, classify, graph, or several of them");
            self.problem(Code::Conflicting, AT, message, "add decode: {} or classify: {}");
        }
        if self.has(&graph) && self.has(SAMPLES) {
            let message = format!("{graph} and {SAMPLES} are both present; allowed: one file per run");
            self.problem(Code::Conflicting, &graph, message, "make two runs of it");
        }
    }

    /// Variables of a job are not those that every process receives.
    fn job(&mut self) {
        const AT: &str = "spec.job.env";
        let Some(Yaml::List(variables)) = find(self.document, AT).map(|entry| &entry.value.value) else { return };
        let names = variables.iter().filter_map(|node| node.value.get("name"));
        let reserved = names.filter(|entry| entry.value.value.text().is_some_and(|it| it.starts_with(JOB_VARIABLES)));
        for entry in reserved {
            let name = entry.value.value.to_string();
            let message = format!("{AT} sets {name}; allowed: names that do not start with {JOB_VARIABLES}");
            let problem = Problem::new(Code::Conflicting, message).of(format!("{AT}.name"));
            let place = entry_place(entry, self.source);
            self.problems.push(problem.at(place).help("every process receives these variables"));
        }
    }

    /// A job on Kubernetes needs an image.
    fn job_in_kubernetes(&mut self) {
        let (job, path) = ("spec.job", "spec.job.image");
        if self.has(job) && !self.has(path) {
            let message = format!("{path} is missing; allowed in Kubernetes: the image of the program");
            self.problem(Code::Missing, path, message, "add image: registry.example.com/training:1");
        }
    }

    /// Events are a single object of object storage.
    fn events_object(&mut self, path: &str) {
        let Some(url) = self.text(path).filter(|url| is_address(url) && !is_object(url)) else { return };
        let message = format!("{path} is {url}; allowed: the address of one file, s3://BUCKET/KEY, without {{name}}");
        self.problem(Code::OutOfRange, path, message, "name the file: s3://events/2026/sales.csv");
    }

    /// Events on Kubernetes must be readable by pods.
    fn events_in_kubernetes(&mut self) {
        let path = format!("{EVENTS}.path");
        if self.has(&path) && !self.has(&format!("{EVENTS}.input")) {
            let message =
                format!("{path} without input is a local file, which pods cannot read; allowed: {KUBERNETES_EVENTS}");
            self.problem(Code::NotSupported, &path, message, "or use an example or a synthetic source");
        }
    }

    /// A data file on Kubernetes must be readable by pods.
    fn data_file_in_kubernetes(&mut self, at: &str) {
        let path = format!("{at}.path");
        if self.has(&path) && !self.has(&format!("{at}.input")) {
            let message =
                format!("{path} without input is a local file, which pods cannot read; allowed: {KUBERNETES_FILES}");
            self.problem(Code::NotSupported, &path, message, "or use a synthetic source");
        }
    }

    /// Requires at most one of `fields`, and at least one if `required`.
    fn one_of(&mut self, parent: &str, fields: &[String], required: bool) {
        let names = fields.iter().map(|path| path.strip_prefix("spec.memory.source.").unwrap_or(path));
        let names = names.collect::<Vec<_>>().join(", ");
        let present: Vec<&String> = fields.iter().filter(|path| self.has(path)).collect();
        let (path, found) = match &present[..] {
            [] if required => (parent, format!("{parent} has none of them; allowed: exactly one of {names}")),
            [first, second, ..] => {
                let rule = if required { "exactly" } else { "at most" };
                let (one, other) = (self.display(first), self.display(second));
                let message = format!("{second} is {other}, but {first} is {one}; allowed: {rule} one of {names}");
                (second.as_str(), message)
            }
            _ => return,
        };
        let help = if present.is_empty() { "add one of them" } else { "remove one of them" };
        self.problem(Code::Conflicting, path, found, help);
    }

    /// The report must be supported by the source.
    fn report(&mut self) {
        let Some(synthetic) = self.is_synthetic() else { return };
        let (fields, rule) = if synthetic {
            (["topK", "skip"], "with a synthetic source: inversion and coverage only")
        } else {
            (["inversion", "coverage"], "with example, events and git: topK and skip only")
        };
        for path in fields.map(|name| format!("spec.memory.report.{name}")) {
            if self.has(&path) {
                let (value, source) = (self.display(&path), self.source_name());
                let message = format!("{path} is {value}, but spec.memory.source is {source}; allowed {rule}");
                self.problem(Code::Conflicting, &path, message, "remove the line");
            }
        }
    }

    fn until(&mut self) {
        let path = "spec.until";
        let Some(entry) = find(self.document, path) else { return };
        if matches!(&entry.value.value, Yaml::Map(conditions) if conditions.is_empty()) {
            let message = format!("{path} is empty; allowed: separation, convergence, or both");
            self.problem(Code::Conflicting, path, message, "remove it to run all epochs");
        } else if let Some(kind) = self.text("spec.kind").filter(|kind| *kind != "Memory") {
            let message = format!("{path} is present, but spec.kind is {kind}; allowed: until with synthetic");
            self.problem(Code::Conflicting, path, message, "remove it");
        } else if self.is_synthetic() == Some(false) {
            let source = self.source_name();
            let message =
                format!("{path} is present, but spec.memory.source is {source}; allowed: until with synthetic");
            self.problem(Code::Conflicting, path, message, "remove it; epochs: limits the run");
        }
    }

    fn population(&mut self, capacity: Option<i128>) {
        let Some(capacity) = capacity.filter(|_| self.has(SYNTHETIC)) else { return };
        let path = format!("{SYNTHETIC}.memories");
        let memories = match find(self.document, &path) {
            Some(entry) => entry.value.value.integer(),
            None => Some(Synthetic::default().memories.into()),
        };
        if let Some(memories) = memories.filter(|memories| *memories > capacity) {
            let message = format!(
                "{path} is {memories}, but spec.capacity.memories of the cluster is {capacity}; allowed: memories <= \
                 capacity"
            );
            self.problem(Code::Conflicting, &path, message, "lower memories, or raise spec.capacity.memories");
        }
    }

    /// Returns whether the source is synthetic; `None` unless it is exactly one known source.
    fn is_synthetic(&self) -> Option<bool> {
        match find(self.document, "spec.memory.source").map(|entry| &entry.value.value) {
            Some(Yaml::Map(sources)) if sources.len() == 1 => match &*sources[0].key {
                "synthetic" => Some(true),
                "example" | "events" | "git" => Some(false),
                _ => None,
            },
            _ => None,
        }
    }

    fn source_name(&self) -> String {
        match find(self.document, "spec.memory.source").map(|entry| &entry.value.value) {
            Some(Yaml::Map(sources)) if !sources.is_empty() => sources[0].key.clone(),
            _ => String::new(),
        }
    }

    pub(super) fn has(&self, path: &str) -> bool {
        find(self.document, path).is_some()
    }

    pub(super) fn text(&self, path: &str) -> Option<&str> {
        find(self.document, path)?.value.value.text()
    }

    pub(super) fn integer(&self, path: &str) -> Option<i128> {
        find(self.document, path)?.value.value.integer()
    }

    pub(super) fn display(&self, path: &str) -> String {
        find(self.document, path).map_or_else(String::new, |entry| entry.value.value.to_string())
    }

    /// Returns the location of a field.
    fn place(&self, path: &str) -> Location {
        find(self.document, path)
            .map_or_else(|| place(self.document.referenced), |entry| entry_place(entry, self.source))
    }

    pub(super) fn problem(&mut self, code: Code, path: &str, message: String, help: &str) {
        self.problems.push(Problem::new(code, message).of(path).at(self.place(path)).help(help));
    }
}
