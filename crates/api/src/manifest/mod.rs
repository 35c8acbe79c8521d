//! Parsing and validation of manifests.
//!
//! ```text
//! text -> tree (values with locations) -> check (schema of the kind) -> rules (between fields) -> types
//! ```
//!
//! Types are made from valid trees only, so a [`Manifest`] holds no value outside its range.

mod buffers;
mod check;
mod dependencies;
mod immutability;
mod kubernetes;
mod operator;
mod rules;
mod suggestion;
mod tree;

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::Value;

use self::check::{Check, entry_place};
use self::rules::find;
use self::suggestion::nearest;
use self::tree::{Node, Yaml, place};
use crate::cluster::{DurabilityMode, LearnerCluster, LearnerClusterSpec};
use crate::code::Code;
use crate::object::Kind;
use crate::problem::{Location, Problem, Problems};
use crate::run::LearnerRun;
use crate::schema::KINDS;

pub use self::immutability::check_immutable;
pub use self::operator::parse_operator_configuration;

/// Objects that a command requires of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// Exactly one cluster, and any number of runs, all of that cluster: `up`.
    Cluster,
    /// At least one run: `run`.
    Runs,
    /// At least one object: `validate`, `apply`.
    Anything,
}

/// The validated objects of a file.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// The cluster; present where [`Needs::Cluster`] was asked for.
    pub cluster: Option<LearnerCluster>,
    /// The runs, in the order of the file.
    pub runs: Vec<LearnerRun>,
    /// Fields that are set but apply to Kubernetes only, each once, in the order of the file.
    pub ignored: Vec<String>,
    /// Fields that the API server has written, as in the output of `kubectl get -o yaml`, each once. They are ignored.
    pub server_fields: Vec<String>,
    origin: String,
    text: String,
    cluster_tree: Option<Node>,
    run_trees: Vec<Node>,
}

impl Manifest {
    /// Resolves `path` relative to the directory of the manifest.
    pub fn resolve(&self, path: impl AsRef<Path>) -> PathBuf {
        Path::new(&self.origin).parent().unwrap_or(Path::new("")).join(path)
    }

    /// Returns notes for users of a local cluster: one sentence each, in lower case.
    pub fn local_notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.server_fields.is_empty() {
            notes.push(format!("ignored, because the API server writes them: {}", self.server_fields.join(", ")));
        }
        if !self.ignored.is_empty() {
            notes.push(format!("ignored in local mode: {}", self.ignored.join(", ")));
        }
        let spec = self.cluster.as_ref().map(|cluster| &cluster.spec);
        if spec.is_some_and(|spec| spec.durability.mode == DurabilityMode::Replicated && spec.replication_factor == 1) {
            notes.push("spec.durability.mode: Replicated means Sync with a single replica".into());
        }
        notes
    }

    /// Serializes all objects as YAML with every default filled in. Parsing the result returns the same manifest.
    pub fn to_effective_yaml(&self) -> String {
        let cluster = self.cluster.as_ref();
        let yaml = |result: Result<String, _>| result.expect("the types have text keys and finite numbers only");
        let mut documents: Vec<String> =
            cluster.map(|cluster| yaml(serde_saphyr::to_string(cluster))).into_iter().collect();
        for run in &self.runs {
            let own_cluster = cluster.filter(|cluster| cluster.metadata.name == run.spec.cluster_ref.name);
            let effective =
                LearnerRun { spec: run.spec.effective(own_cluster.map(|cluster| &cluster.spec)), ..run.clone() };
            documents.push(yaml(serde_saphyr::to_string(&effective)));
        }
        documents.join("---\n")
    }
}

/// Parses and validates the manifest `text` of the file `origin`.
///
/// # Errors
///
/// Returns all problems of the file, in its order, each with its location.
pub fn parse(text: &str, origin: &str, needs: Requirement) -> Result<Manifest, Problems> {
    let mut documents = tree::read(text).map_err(|problem| Problems::new(origin, text, vec![problem]))?;
    let mut server_fields = Vec::new();
    for path in documents.iter_mut().flat_map(|document| tree::remove_server_fields(&mut document.value)) {
        if !server_fields.contains(&path) {
            server_fields.push(path);
        }
    }
    let mut file = File::new(text, needs);
    for document in &documents {
        file.document(document);
    }
    file.whole();

    let mut manifest = Manifest {
        cluster: None,
        runs: Vec::new(),
        ignored: file.ignored,
        server_fields,
        origin: origin.to_owned(),
        text: text.to_owned(),
        cluster_tree: file.clusters.first().copied().cloned(),
        run_trees: file.runs.iter().copied().cloned().collect(),
    };
    let mut problems = file.problems;
    if problems.is_empty() {
        let mut typed = || {
            manifest.cluster = file.clusters.first().map(|tree| typed(tree)).transpose()?;
            if let Some(LearnerCluster { spec, .. }) = &mut manifest.cluster {
                // An explicit value is valid; the default is for two workers or more.
                spec.replication_factor = spec.replication_factor.min(spec.workers);
            }
            manifest.runs = file.runs.iter().map(|tree| typed(tree)).collect::<Result<_, _>>()?;
            Ok(())
        };
        problems.extend(typed().err());
    }
    if problems.is_empty() {
        problems.extend(dependencies::check(text, &manifest, needs));
    }
    if problems.is_empty() { Ok(manifest) } else { Err(Problems::new(origin, text, problems)) }
}

/// Validates one object from an API server: its kind, metadata and spec. Settings for local mode only are rejected.
///
/// # Errors
///
/// Returns all problems of the object, in the order of its fields; their locations are meaningless.
pub fn parse_object(object: &Value) -> Result<Manifest, Problems> {
    let part = |path: &str| object.pointer(path).cloned().unwrap_or_default();
    let object = serde_json::json!({
        "apiVersion": part("/apiVersion"),
        "kind": part("/kind"),
        "metadata": { "name": part("/metadata/name") },
        "spec": part("/spec"),
    });
    let (text, origin) = (object.to_string(), "object");
    let manifest = parse(&text, origin, Requirement::Anything)?;
    let problems: Vec<Problem> =
        manifest.run_trees.iter().flat_map(|run| rules::run_in_kubernetes(&text, run)).collect();
    if problems.is_empty() { Ok(manifest) } else { Err(Problems::new(origin, &text, problems)) }
}

/// Converts a valid tree into its type. The schema is generated from the types, so this fails only where a type is stricter
/// than its schema.
fn typed<T: DeserializeOwned>(tree: &Node) -> Result<T, Problem> {
    serde_json::from_value(tree.value.to_json())
        .map_err(|error| Problem::new(Code::WrongType, error.to_string()).at(place(tree.referenced)))
}

/// A file during validation.
struct File<'a> {
    text: &'a str,
    needs: Requirement,
    problems: Vec<Problem>,
    ignored: Vec<String>,
    clusters: Vec<&'a Node>,
    runs: Vec<&'a Node>,
    /// Whether a document has an unknown kind: it may be the one that seems to be missing.
    has_unknown_kind: bool,
}

impl<'a> File<'a> {
    fn new(text: &'a str, needs: Requirement) -> Self {
        let (problems, ignored, clusters, runs) = Default::default();
        Self { text, needs, problems, ignored, clusters, runs, has_unknown_kind: false }
    }

    /// Validates a document and sorts it by kind.
    fn document(&mut self, document: &'a Node) {
        let (kind, schema) = match self.kind(document) {
            Ok(kind) => kind,
            Err(problem) => {
                self.has_unknown_kind = true;
                return self.problems.push(problem);
            }
        };
        let mut check = Check::document(self.text, document, schema);
        self.problems.append(&mut check.problems);
        for path in check.ignored {
            if !self.ignored.contains(&path) {
                self.ignored.push(path);
            }
        }
        if kind == LearnerClusterSpec::KIND { &mut self.clusters } else { &mut self.runs }.push(document);
    }

    /// Determines the kind of a document.
    fn kind(&self, document: &Node) -> Result<(&'static str, &'static Value), Problem> {
        let start = place(document.referenced);
        let kinds = KINDS.each_ref().map(|(kind, _)| *kind);
        let allowed = kinds.join(", ");
        let Yaml::Map(_) = document.value else {
            let message = format!("the document is {}; allowed: an object of kind {allowed}", document.value.kind());
            return Err(Problem::new(Code::NotAManifest, message).at(start));
        };
        let Some(entry) = document.value.get("kind") else {
            let problem = Problem::new(Code::Missing, "kind is missing").of("kind").at(start);
            return Err(problem.help("add kind: LearnerCluster, or kind: LearnerRun"));
        };
        let written = entry.value.value.to_string();
        if let Some((kind, schema)) = KINDS.iter().find(|(kind, _)| *kind == written) {
            return Ok((kind, schema));
        }
        let problem = Problem::new(Code::NotAManifest, format!("kind is {written}; allowed: {allowed}"));
        let problem = problem.of("kind").at(entry_place(entry, self.text));
        Err(nearest(&written, kinds)
            .into_iter()
            .fold(problem, |problem, near| problem.help(format!("did you mean {near}?"))))
    }

    /// Checks the rules inside and between documents.
    fn whole(&mut self) {
        for cluster in self.clusters.clone() {
            self.problems.append(&mut rules::cluster(self.text, cluster));
        }
        for run in self.runs.clone() {
            let cluster = self.clusters.iter().find(|cluster| name(cluster) == reference(run));
            let capacity = cluster.and_then(|cluster| rules::capacity(cluster));
            self.problems.append(&mut rules::run(self.text, run, capacity));
        }
        self.count();
        self.unique_names();
        if self.needs == Requirement::Cluster
            && let [cluster] = self.clusters[..]
        {
            // A cluster that is being started can run its own runs only.
            if let Some(name) = name(cluster) {
                self.problems.append(&mut foreign_clusters(self.text, self.runs.iter().copied(), name, "of the file"));
            }
        }
    }

    /// Checks the number of objects against the command's requirement.
    fn count(&mut self) {
        if let [first, .., last] = self.clusters[..] {
            let line = place(first.referenced).line;
            let message = format!("a second LearnerCluster, after the one in line {line}; allowed: one in a file");
            let problem = Problem::new(Code::NotAManifest, message).at(place_of(last, "kind", self.text));
            self.problems.push(problem.help("put it into a file of its own"));
        }
        let missing = match self.needs {
            Requirement::Cluster if self.clusters.is_empty() => "the file has no LearnerCluster; needed: exactly one",
            Requirement::Runs if self.runs.is_empty() => "the file has no LearnerRun; needed: at least one",
            Requirement::Anything if self.clusters.is_empty() && self.runs.is_empty() => {
                "the file has neither a LearnerCluster nor a LearnerRun; needed: at least one"
            }
            Requirement::Cluster | Requirement::Runs | Requirement::Anything => return,
        };
        if !self.has_unknown_kind {
            self.problems.push(Problem::new(Code::NotAManifest, missing));
        }
    }

    fn unique_names(&mut self) {
        for (index, run) in self.runs.iter().enumerate() {
            let twice = self.runs[..index].iter().find(|earlier| name(earlier).is_some() && name(earlier) == name(run));
            if let (Some(earlier), Some(name)) = (twice, name(run)) {
                let line = place(earlier.referenced).line;
                let message =
                    format!("metadata.name is {name}, as of the LearnerRun in line {line}; names must be unique");
                let problem = Problem::new(Code::NotAManifest, message).of("metadata.name");
                self.problems.push(problem.at(place_of(run, "metadata.name", self.text)).help("choose another name"));
            }
        }
    }
}

/// Returns a problem for each run that refers to another cluster than `cluster`; `which` describes that cluster.
fn foreign_clusters<'a>(
    text: &str,
    runs: impl IntoIterator<Item = &'a Node>,
    cluster: &str,
    which: &str,
) -> Vec<Problem> {
    let path = "spec.clusterRef.name";
    let others = runs.into_iter().filter_map(|run| Some((run, reference(run).filter(|wanted| *wanted != cluster)?)));
    others
        .map(|(run, wanted)| {
            let message = format!("{path} is {wanted}, but the cluster {which} is {cluster}");
            let problem = Problem::new(Code::ClusterNotFound, message).of(path).at(place_of(run, path, text));
            problem.help(format!("set clusterRef: {{ name: {cluster} }}"))
        })
        .collect()
}

/// Returns the location of a field, or of the document where the field is absent.
fn place_of(document: &Node, path: &str, text: &str) -> Location {
    find(document, path).map_or_else(|| place(document.referenced), |entry| entry_place(entry, text))
}

fn name(document: &Node) -> Option<&str> {
    find(document, "metadata.name")?.value.value.text()
}

fn reference(run: &Node) -> Option<&str> {
    find(run, "spec.clusterRef.name")?.value.value.text()
}
