//! Folders and structs are small: what outgrows a dozen has a second subject, or says why not. A reconcile is a list of its steps, on typed objects.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use crate::words::files;
use crate::workspace;

/// Most source files of a folder without subfolders, and most fields of a struct without a reason.
const DOZEN: usize = 12;
/// Files that are sources. Lists of documents, of inputs of fuzz targets and of compiled kernels may be long.
const SOURCES: [&str; 6] = [".rs", ".py", ".cu", ".cuh", ".cpp", ".proto"];
/// Crates whose structs are checked.
const CHECKED: [&str; 4] = ["worker/src/", "crates/store/src/", "crates/coordinator/src/", "operator/src/"];
/// Sources of the operator, and the most lines of its functions that reconcile.
const OPERATOR: &str = "operator/src/";
const RECONCILE_LINES: usize = 60;
/// What the comment of a larger struct says, with the reason.
const REASON: &str = "more than a dozen";

/// Returns the folders with too many source files and no subfolder.
fn long_folders(paths: &[String]) -> Vec<String> {
    let (mut counts, mut parents) = (BTreeMap::<&str, usize>::new(), BTreeSet::new());
    for path in paths {
        let Some((folder, name)) = path.rsplit_once('/') else { continue };
        *counts.entry(folder).or_default() += usize::from(SOURCES.iter().any(|source| name.ends_with(source)));
        parents.extend(folder.match_indices('/').map(|(end, _)| &folder[..end]));
    }
    let long = counts.into_iter().filter(|(folder, count)| *count > DOZEN && !parents.contains(folder));
    long.map(|(folder, count)| format!("{folder}: {count} source files and no subfolder")).collect()
}

/// Returns the structs of a formatted file that have too many fields without a reason.
fn large_structs(source: &str) -> Vec<String> {
    let lines: Vec<&str> = source.lines().collect();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some((name, indent)) = struct_head(line) else { continue };
        let fields = lines[index + 1..].iter().take_while(|line| !line.starts_with(&format!("{indent}}}")));
        let fields = fields.filter(|line| is_field(line, indent)).count();
        if fields > DOZEN && !comment_above(&lines[..index]).contains(REASON) {
            found.push(format!("{name} has {fields} fields; allowed: {DOZEN}, or a comment that says why {REASON}"));
        }
    }
    found
}

/// Returns the comment that ends with these lines, without its attributes and line breaks.
fn comment_above(lines: &[&str]) -> String {
    let above = lines.iter().rev().map(|line| line.trim_start()).take_while(|line| line.starts_with(['/', '#']));
    let mut comment: Vec<&str> = above.filter_map(|line| line.strip_prefix("//")).collect();
    comment.reverse();
    comment.iter().map(|line| line.trim_start_matches('/').trim()).collect::<Vec<_>>().join(" ")
}

/// Returns name and indentation of a struct with named fields that begins in this line.
fn struct_head(line: &str) -> Option<(&str, &str)> {
    let declaration = line.trim_start();
    let indent = &line[..line.len() - declaration.len()];
    let (visibility, rest) = declaration.split_once("struct ")?;
    let is_declaration = line.ends_with('{') && (visibility.is_empty() || visibility.starts_with("pub"));
    is_declaration.then(|| (rest.split(|next: char| !next.is_alphanumeric() && next != '_').next().unwrap(), indent))
}

fn is_field(line: &str, indent: &str) -> bool {
    let Some(field) = line.strip_prefix(indent).and_then(|line| line.strip_prefix("    ")) else { return false };
    let name = field.split_once(": ").map_or("", |(name, _)| name);
    let name = name.rsplit(' ').next().unwrap_or_default();
    !name.is_empty() && name.chars().all(|next| next.is_alphanumeric() || next == '_') && !field.starts_with([' ', '/'])
}

/// Returns the lines of each function of a formatted file whose name begins with `reconcile`, from its signature to its last brace.
fn reconciles(source: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = source.lines().collect();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some((before, rest)) = line.split_once("fn reconcile") else { continue };
        let indent = &before[..before.len() - before.trim_start().len()];
        let end = lines[index..].iter().position(|line| *line == format!("{indent}}}"));
        if let Some(end) = end.filter(|_| !before.contains("//")) {
            let suffix = rest.split(|next: char| !next.is_alphanumeric() && next != '_').next().unwrap_or_default();
            let start = line.len() - rest.len() - "reconcile".len();
            found.push((&line[start..start + "reconcile".len() + suffix.len()], end + 1));
        }
    }
    found
}

/// Returns the lines that read a JSON value by a pointer.
fn pointer_reads(source: &str) -> Vec<&str> {
    source.lines().filter(|line| [".pointer(", ".pointer_mut("].iter().any(|read| line.contains(read))).collect()
}

#[test]
fn the_operator_reconciles_typed_objects_in_short_functions() {
    let mut lengths = Vec::new();
    for path in files().unwrap().iter().filter(|path| path.starts_with(OPERATOR) && path.ends_with(".rs")) {
        let source = fs::read_to_string(workspace::root().join(path)).unwrap();
        assert_eq!(pointer_reads(&source), Vec::<&str>::new(), "{path}");
        for (name, lines) in reconciles(&source) {
            assert!(lines <= RECONCILE_LINES, "{path}: {name} has {lines} lines; allowed: {RECONCILE_LINES}");
            lengths.push(lines);
        }
    }
    assert!(lengths.len() >= 3, "only {} functions found", lengths.len());
}

#[test]
fn a_long_reconcile_and_a_read_by_pointer_are_found() {
    let body = "        step().await;\n".repeat(3);
    let source = format!("impl A {{\n    async fn reconcile_cluster(\n        &self,\n    ) {{\n{body}    }}\n}}\n");
    assert_eq!(reconciles(&source), [("reconcile_cluster", 7)]);
    assert_eq!(pointer_reads("let a = 1;\nlet b = value.pointer(\"/spec\");\n").len(), 1);
}

#[test]
fn folders_of_over_a_dozen_sources_have_subfolders() {
    let paths = files().unwrap();
    assert!(paths.len() > 1_000, "only {} files found", paths.len());
    assert_eq!(long_folders(&paths), Vec::<String>::new());
}

#[test]
fn structs_of_over_a_dozen_fields_say_why() {
    let (mut checked, mut found) = (0, Vec::new());
    for path in files().unwrap() {
        if !path.ends_with(".rs") || !CHECKED.iter().any(|folder| path.starts_with(folder)) {
            continue;
        }
        let source = fs::read_to_string(workspace::root().join(&path)).unwrap();
        checked += source.lines().filter(|line| struct_head(line).is_some()).count();
        found.extend(large_structs(&source).into_iter().map(|problem| format!("{path}: {problem}")));
    }
    assert!(checked > 200, "only {checked} structs found");
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn a_long_folder_without_subfolders_is_reported() {
    let files = |folder: &str, count: usize, ending: &str| -> Vec<String> {
        (0..count).map(|number| format!("{folder}/{number}{ending}")).collect()
    };
    let paths = [
        files("a/long", 13, ".rs"),
        files("a/short", 12, ".py"),
        files("a/nested", 13, ".rs"),
        files("a/nested/part", 1, ".rs"),
        files("docs/runbooks", 30, ".md"),
    ];
    assert_eq!(long_folders(&paths.concat()), ["a/long: 13 source files and no subfolder"]);
}

#[test]
fn a_large_struct_without_a_reason_is_reported() {
    let text = |comment: &str, count: usize| {
        let fields: String =
            (0..count).map(|number| format!("    /// Text: a: b.\n    pub(crate) f{number}: u32,\n")).collect();
        format!(
            "/// A table{comment}.\n#[derive(Debug)]\npub(crate) struct Table<'a> {{\n{fields}}}\n\nstruct Next {{\n    one: u32,\n}}\n"
        )
    };
    let report = "Table has 13 fields; allowed: 12, or a comment that says why more than a dozen";
    assert_eq!(large_structs(&text("", 13)), [report]);
    assert_eq!(large_structs(&text("", 12)), Vec::<String>::new());
    assert_eq!(large_structs(&text(" of rows, therefore more\n/// than a dozen", 13)), Vec::<String>::new());
}
