//! The layers of the workspace: a crate depends only on crates of lower layers (docs/architecture.md).

use std::collections::BTreeMap;
use std::fs;

use serde::Deserialize;

use crate::{process, workspace};

/// Packages from the lowest layer to the highest, without the prefix `engram-`. A package that is not listed fails the test.
const LAYERS: [&[&str]; 7] = [
    &["memory", "objects", "trace"],
    &["proto", "cluster", "kernels", "api", "identity", "forecast", "telemetry", "tropical"],
    &["wire", "collective", "replay", "neural", "information", "federated"],
    &["store", "client", "mapstore", "train", "geodesic", "devices"],
    &["learn", "coordinator", "faults", "simulation", "snapshot", "participant"],
    // Helpers of tests: everything below uses them as a dev-dependency only.
    &["worker", "operator", "testing", "edge"],
    &["cli", "python", "tests", "kubernetes-tests", "benchmarks", "fuzz", "xtask", "network-simulation", "gpu-check"],
];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `None` for an ordinary dependency.
    kind: Option<String>,
}

/// Returns one line per dependency that breaks the layers.
fn violations(packages: &[Package]) -> Vec<String> {
    let mut layers = BTreeMap::new();
    for (layer, names) in LAYERS.iter().enumerate() {
        layers.extend(names.iter().map(|name| (*name, layer)));
    }
    let layer_of = |package: &str| layers.get(package.strip_prefix("engram-").unwrap_or(package)).copied();
    let local = |name: &str| packages.iter().any(|package| package.name == name);
    let mut lines = Vec::new();
    for package in packages {
        let Some(layer) = layer_of(&package.name) else {
            lines.push(format!("{} is in no layer", package.name));
            continue;
        };
        let normal = |dependency: &&Dependency| dependency.kind.as_deref() != Some("dev") && local(&dependency.name);
        for dependency in package.dependencies.iter().filter(normal) {
            if layer_of(&dependency.name).is_none_or(|lower| lower >= layer) {
                lines.push(format!("{} must not depend on {}", package.name, dependency.name));
            }
        }
    }
    lines
}

#[test]
fn crates_depend_only_on_lower_layers() {
    let mut cargo = workspace::cargo(["metadata", "--no-deps", "--offline", "--locked", "--format-version", "1"]);
    let metadata: Metadata = serde_json::from_str(&process::read(&mut cargo).unwrap()).unwrap();
    assert!(metadata.packages.len() > 20, "{} packages", metadata.packages.len());
    assert_eq!(violations(&metadata.packages), Vec::<String>::new());
}

/// Returns the layers of a page, from the lowest: lines of a number and names, with notes in parentheses, three spaces apart.
fn shown_layers(page: &str) -> Vec<Vec<&str>> {
    let lines = page.lines().rev().filter_map(|line| line.strip_prefix("layer "));
    let names = lines.map(|line| line.split("   ").skip(1));
    names.map(|names| names.map(|name| name.split(" (").next().unwrap().trim()).collect()).collect()
}

#[test]
fn architecture_shows_the_layers() {
    let page = fs::read_to_string(workspace::root().join("docs/architecture.md")).unwrap();
    assert_eq!(shown_layers(&page), LAYERS.map(<[&str]>::to_vec));
}

#[test]
fn dependency_on_the_same_or_a_higher_layer_is_a_violation() {
    let package = |name: &str, dependencies: &[(&str, Option<&str>)]| Package {
        name: name.into(),
        dependencies: dependencies
            .iter()
            .map(|(name, kind)| Dependency { name: (*name).into(), kind: kind.map(str::to_owned) })
            .collect(),
    };
    let packages = [
        package("engram-memory", &[("engram-testing", Some("dev"))]),
        package("engram-client", &[("engram-memory", None), ("engram-store", None)]),
        package("engram-store", &[("engram-worker", None), ("tokio", None), ("engram-client", Some("dev"))]),
        package("engram-worker", &[("engram-testing", None)]),
        package("engram-fuzz", &[("engram-testing", None)]),
        package("engram-testing", &[]),
        package("engram-new", &[]),
    ];
    assert_eq!(
        violations(&packages),
        [
            "engram-client must not depend on engram-store",
            "engram-store must not depend on engram-worker",
            "engram-worker must not depend on engram-testing",
            "engram-new is in no layer",
        ]
    );
}
