//! The committed fatbins match the committed sources: `manifest.toml` has the hashes of both, and no build needs nvcc.
#![allow(clippy::unwrap_used)] // Test helpers.

use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn hash(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

/// Returns the folder of a file, by its extension.
fn part(file: &str) -> &'static str {
    match Path::new(file).extension().and_then(|extension| extension.to_str()) {
        Some("fatbin") => "fatbins",
        Some("cuh") => "cuda/include",
        _ => "cuda",
    }
}

/// Returns the files of a directory with an extension.
fn named(folder: &Path, extension: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let names = entries.filter(|path| path.extension().is_some_and(|it| it == extension));
    names.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
}

/// Collects a source and its includes.
fn with_includes(source: &str, sources: &mut BTreeSet<String>) {
    if sources.insert(source.to_owned()) {
        let text = fs::read_to_string(folder().join(part(source)).join(source)).unwrap();
        let included = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
        included.for_each(|included| with_includes(included, sources));
    }
}

#[test]
fn fatbins_and_sources_match_the_manifest() {
    let manifest = fs::read_to_string(folder().join("manifest.toml")).unwrap();
    let mut sections = BTreeMap::<_, BTreeMap<_, _>>::new();
    let mut section = None;
    for line in manifest.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = Some(name.to_owned());
        } else if let (Some(section), Some((file, hash))) = (&section, line.split_once(" = ")) {
            let entries = sections.entry(section.clone()).or_default();
            entries.insert(file.trim_matches('"').to_owned(), hash.trim_matches('"').to_owned());
        }
    }
    let again = "; run `cargo xtask kernels` to update fatbins and manifest";
    let kernels: BTreeSet<_> = sections.keys().map(|name| format!("{name}.cu")).collect();
    assert_eq!(named(&folder().join("cuda"), "cu"), kernels, "a section for each source{again}");
    let fatbins: BTreeSet<_> = sections.keys().map(|name| format!("{name}.fatbin")).collect();
    assert_eq!(named(&folder().join("fatbins"), "fatbin"), fatbins, "a fatbin for each section{again}");
    for (name, entries) in sections {
        let mut files = BTreeSet::from([format!("{name}.fatbin")]);
        with_includes(&format!("{name}.cu"), &mut files);
        assert_eq!(entries.keys().cloned().collect::<BTreeSet<_>>(), files, "sources of {name}.fatbin{again}");
        for (file, expected) in entries {
            assert_eq!(hash(&folder().join(part(&file)).join(&file)), expected, "{file}{again}");
        }
    }
}
