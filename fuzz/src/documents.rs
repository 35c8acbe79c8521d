//! Text files written by users and programs: the map with its goal, and manifests.

use crate::heartbeats::accepted;
use crate::input::folder;
use engram_api::{Requirement, parse_operator_configuration};
use engram_mapstore::{FileStore, MapStore as _};
use engram_memory::ClusterId;
use serde_json::Value;
use std::fs;
use xxhash_rust::xxh3::xxh3_64;

/// Text as map and as goal: unchanged, and with a corrected checksum.
pub(crate) fn map(bytes: &[u8]) {
    let folder = folder();
    let store = FileStore::open(folder.path(), ClusterId(7)).expect("the folder is writable");
    let sealed = std::str::from_utf8(bytes).ok().and_then(sealed);
    for text in [Some(bytes), sealed.as_deref().map(str::as_bytes)].into_iter().flatten() {
        for name in ["map.json", "goal.json"] {
            fs::write(folder.path().join(name), text).expect("the folder is writable");
        }
        // An error names the file and its defect; an accepted map is valid.
        match store.get() {
            Ok(map) => accepted(&map.expect("the file exists")),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        if let Err(error) = store.goal() {
            assert!(error.to_string().contains("goal.json"), "{error}");
        }
    }
}

/// Returns the object with the checksum of its content.
fn sealed(text: &str) -> Option<String> {
    let mut value: Value = serde_json::from_str(text).ok()?;
    let fields = value.as_object_mut()?;
    let content = fields.get("map").or_else(|| fields.get("goal"))?;
    let checksum = format!("{:016x}", xxh3_64(content.to_string().as_bytes()));
    fields.insert("checksum".to_owned(), checksum.into());
    Some(value.to_string())
}

/// Text as a manifest, and as an operator's configuration file.
pub(crate) fn manifest(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match engram_api::parse(text, "fuzz.yaml", Requirement::Anything) {
        Ok(manifest) => assert!(manifest.cluster.is_some() || !manifest.runs.is_empty(), "a manifest has an object"),
        // Errors are printed with their line, whatever it contains.
        Err(problems) => assert!(!problems.render(true).is_empty()),
    }
    match parse_operator_configuration(text, "fuzz.yaml") {
        Ok(file) => {
            let again = parse_operator_configuration(&file.to_yaml(), "again.yaml");
            assert_eq!(again.expect("a written file is readable"), file);
        }
        Err(problems) => assert!(!problems.render(true).is_empty()),
    }
}
