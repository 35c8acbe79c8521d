//! `cargo xtask sbom`: a bill of materials for each shipped program, as CycloneDX 1.5 JSON.
//!
//! Based on `cargo metadata` and `Cargo.lock`: the crates that a program on Linux links, and procedural macros, with their licences and registry
//! checksums. The output is deterministic: it contains neither times nor random numbers. Features are those of the whole workspace, so a crate may
//! be listed that one of the programs does not use.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{process, workspace};

/// Shipped programs and their packages.
const PROGRAMS: [(&str, &str); 3] =
    [("engram", "engram-cli"), ("engram-worker", "engram-worker"), ("engram-operator", "engram-operator")];
/// Target of the shipped programs; crates for other systems are excluded.
const TARGET: &str = "x86_64-unknown-linux-gnu";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Output folder (default: target/sbom)
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
}

/// Writes one file for each program.
///
/// # Errors
/// When cargo metadata fails, or a bill is inconsistent.
pub(crate) fn run(options: &Options) -> Result<()> {
    let folder = options.output.clone().unwrap_or_else(|| workspace::target().join("sbom"));
    fs::create_dir_all(&folder).with_context(|| format!("failed to create {}", folder.display()))?;
    let mut metadata = workspace::cargo(["metadata", "--format-version=1", "--locked", "--filter-platform", TARGET]);
    let metadata: Value = serde_json::from_str(&process::read(&mut metadata)?)?;
    let lock = fs::read_to_string(workspace::root().join("Cargo.lock"))?;
    let checksums = checksums(&lock);
    for (program, package) in PROGRAMS {
        let bill = bill(&metadata, &checksums, program, package)?;
        let path = folder.join(format!("{program}.cdx.json"));
        fs::write(&path, serde_json::to_string_pretty(&bill)? + "\n")
            .with_context(|| format!("failed to write {}", path.display()))?;
        println!("{}: {} components", path.display(), bill["components"].as_array().map_or(0, Vec::len));
    }
    Ok(())
}

/// Returns the SHA-256 checksums of the registry's files by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let mut found = BTreeMap::new();
    for package in lock.split("[[package]]").skip(1) {
        let field = |name: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""));
            line.and_then(|value| value.strip_suffix('"')).map(str::to_owned)
        };
        if let (Some(name), Some(version), Some(checksum)) = (field("name"), field("version"), field("checksum")) {
            found.insert((name, version), checksum);
        }
    }
    found
}

/// Returns the bill of materials of a program.
fn bill(
    metadata: &Value,
    checksums: &BTreeMap<(String, String), String>,
    program: &str,
    package: &str,
) -> Result<Value> {
    let all = metadata["packages"].as_array().context("the metadata lists no packages")?;
    let packages: BTreeMap<&str, &Value> = all.iter().filter_map(|it| Some((it["id"].as_str()?, it))).collect();
    let nodes = metadata["resolve"]["nodes"].as_array().context("the metadata has no resolve graph")?;
    let nodes: BTreeMap<&str, &Value> = nodes.iter().filter_map(|it| Some((it["id"].as_str()?, it))).collect();
    let root = packages.iter().find(|(_, it)| it["name"] == package && it["source"].is_null());
    let (root, about) = root.with_context(|| format!("no package {package}"))?;

    let mut linked: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut next = vec![*root];
    while let Some(id) = next.pop() {
        if linked.contains_key(id) {
            continue;
        }
        let node = nodes.get(id).with_context(|| format!("{id} is not resolved"))?;
        // Excludes build and development dependencies.
        let is_linked = |dependency: &&Value| {
            dependency["dep_kinds"].as_array().into_iter().flatten().any(|kind| kind["kind"].is_null())
        };
        let dependencies = node["deps"].as_array().into_iter().flatten().filter(is_linked);
        let dependencies: BTreeSet<&str> = dependencies.filter_map(|it| it["pkg"].as_str()).collect();
        next.extend(&dependencies);
        linked.insert(id, dependencies);
    }

    let reference = |id: &str| packages.get(id).map(|package| purl(package)).unwrap_or_default();
    let mut components = Vec::new();
    for id in linked.keys().filter(|id| *id != root) {
        let package = packages.get(id).with_context(|| format!("{id} has no package"))?;
        components.push(component(package, checksums));
    }
    let dependencies: Vec<Value> = linked
        .iter()
        .map(|(id, on)| json!({ "ref": reference(id), "dependsOn": on.iter().map(|id| reference(id)).collect::<BTreeSet<_>>() }))
        .collect();
    let names: BTreeSet<&str> = components.iter().filter_map(|it| it["bom-ref"].as_str()).collect();
    ensure!(names.len() == components.len(), "component names are not unique");
    let mut main = component(about, checksums);
    main["type"] = "application".into();
    main["name"] = program.into();
    Ok(json!({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": { "component": main }, "components": components, "dependencies": dependencies,
    }))
}

fn purl(package: &Value) -> String {
    let text = |field: &str| package[field].as_str().unwrap_or_default();
    // Version characters that a purl must escape.
    format!("pkg:cargo/{}@{}", text("name"), text("version").replace('+', "%2B"))
}

fn component(package: &Value, checksums: &BTreeMap<(String, String), String>) -> Value {
    let text = |field: &str| package[field].as_str().unwrap_or_default().to_owned();
    let (name, version, purl) = (text("name"), text("version"), purl(package));
    let mut component = json!({
        "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "scope": "required",
    });
    // Older crates separate alternatives by a slash, which is not a valid expression.
    let licence = text("license").replace('/', " OR ");
    if !licence.is_empty() {
        component["licenses"] = json!([{ "expression": licence }]);
    }
    if let Some(checksum) = checksums.get(&(name, version)) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    let repository = text("repository");
    if !repository.is_empty() {
        component["externalReferences"] = json!([{ "type": "vcs", "url": repository }]);
    }
    component
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, version: &str, source: Option<&str>) -> Value {
        json!({
            "id": format!("{name}#{version}"), "name": name, "version": version, "source": source,
            "license": "MIT/Apache-2.0", "repository": null,
        })
    }

    fn node(id: &str, on: &[(&str, Option<&str>)]) -> Value {
        let on: Vec<Value> =
            on.iter().map(|(id, kind)| json!({ "pkg": id, "dep_kinds": [{ "kind": kind, "target": null }] })).collect();
        json!({ "id": id, "deps": on })
    }

    #[test]
    fn bill_lists_linked_crates_with_checksums_only() {
        let registry = Some("registry+https://github.com/rust-lang/crates.io-index");
        let metadata = json!({
            "packages": [
                package("engram-cli", "0.1.0", None), package("bytes", "1.2.3+z", registry), package("cc", "1.0.0", registry),
                package("proptest", "1.0.0", registry), package("spin", "2.0.0", registry),
            ],
            "resolve": { "nodes": [
                node("engram-cli#0.1.0", &[("bytes#1.2.3+z", None), ("cc#1.0.0", Some("build")), ("proptest#1.0.0", Some("dev"))]),
                node("bytes#1.2.3+z", &[("spin#2.0.0", None)]),
                node("spin#2.0.0", &[]),
                node("cc#1.0.0", &[]),
            ] },
        });
        let lock = "version = 4\n\n[[package]]\nname = \"bytes\"\nversion = \"1.2.3+z\"\nsource = \"r\"\nchecksum = \"abc\"\n\
                    dependencies = [\n \"spin\",\n]\n\n[[package]]\nname = \"engram-cli\"\nversion = \"0.1.0\"\n";
        let bill = bill(&metadata, &checksums(lock), "engram", "engram-cli").unwrap();
        let names: Vec<&Value> = bill["components"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
        assert_eq!(names, ["bytes", "spin"]);
        let bytes = &bill["components"][0];
        assert_eq!(bytes["hashes"][0]["content"], "abc");
        assert_eq!(bytes["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(bytes["purl"], "pkg:cargo/bytes@1.2.3%2Bz");
        assert_eq!(bill["metadata"]["component"]["name"], "engram");
        // Every reference resolves.
        let listed: BTreeSet<&str> =
            bill["components"].as_array().unwrap().iter().filter_map(|it| it["bom-ref"].as_str()).collect();
        for dependency in bill["dependencies"].as_array().unwrap() {
            assert!(dependency["dependsOn"].as_array().unwrap().iter().all(|it| listed.contains(it.as_str().unwrap())));
        }
        assert_eq!(bill["dependencies"].as_array().unwrap().len(), 3);
    }
}
