//! Relative links in the Markdown files of the checkout lead to a file, and to a heading where they name one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use crate::words::files;
use crate::workspace;

/// Text outside of code: links in code are examples.
fn prose(text: &str) -> String {
    let mut prose = String::new();
    let mut is_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            // Odd parts lie between backquotes.
            line.split('`').step_by(2).for_each(|part| prose.push_str(part));
        }
        prose.push('\n');
    }
    prose
}

/// Targets of the links `[text](target)`.
fn targets(text: &str) -> Vec<String> {
    let prose = prose(text);
    let after = |part: &str| part.split_once(')').map(|(target, _)| target.to_owned());
    prose.split("](").skip(1).filter_map(after).collect()
}

/// Anchors of the headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen = BTreeMap::<String, usize>::new();
    let mut anchors = BTreeSet::new();
    let mut is_code = false;
    for line in text.lines() {
        if line.starts_with("```") {
            is_code = !is_code;
        }
        let title = line.trim_start_matches('#');
        if is_code || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let kept = title
            .trim()
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .collect::<String>();
        let anchor = kept.replace(' ', "-");
        let count = seen.entry(anchor.clone()).or_default();
        anchors.insert(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
        *count += 1;
    }
    anchors
}

/// `path` without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}

#[test]
fn links_in_markdown_lead_to_a_file_and_a_heading() {
    let paths: Vec<String> =
        files().expect("git lists the files").into_iter().filter(|path| path.ends_with(".md")).collect();
    let mut broken = Vec::new();
    for path in &paths {
        let text = std::fs::read_to_string(workspace::root().join(path)).expect("a page is UTF-8");
        for target in targets(&text).iter().filter(|target| !target.contains("://") && !target.starts_with("mailto:")) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let linked =
                if file.is_empty() { PathBuf::from(path) } else { normal(&Path::new(path).with_file_name(file)) };
            let absolute = workspace::root().join(&linked);
            if !absolute.exists() {
                broken.push(format!("{path}: no file {target}"));
            } else if !anchor.is_empty() {
                let page = std::fs::read_to_string(absolute).expect("a page with headings is UTF-8");
                if !anchors(&page).contains(anchor) {
                    broken.push(format!("{path}: no heading {target}"));
                }
            }
        }
    }
    assert!(broken.is_empty(), "broken links: {broken:#?}");
}

/// Paths from the root of the checkout in the code spans of `text`: their first folder is one of `folders`.
fn quoted_paths<'a>(text: &'a str, folders: &BTreeSet<&str>) -> Vec<&'a str> {
    let spans = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let is_path = |span: &&str| {
        let plain = span.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
        plain && span.split_once('/').is_some_and(|(folder, _)| folders.contains(folder))
    };
    spans.filter(is_path).collect()
}

#[test]
fn quoted_paths_of_sources_exist() {
    let all = files().expect("git lists the files");
    let folders: BTreeSet<&str> =
        all.iter().filter_map(|path| path.split_once('/')).map(|(folder, _)| folder).collect();
    let mut missing = Vec::new();
    for path in all.iter().filter(|path| path.ends_with(".md")) {
        let text = std::fs::read_to_string(workspace::root().join(path)).expect("a page is UTF-8");
        let exists = |quoted: &&str| workspace::root().join(quoted).exists();
        // Fuzzing makes this folder when it finds something.
        let quoted =
            quoted_paths(&text, &folders).into_iter().filter(|quoted| !exists(quoted) && *quoted != "fuzz/artifacts");
        // Some pages name files from their own crate.
        let next_to_page = |quoted: &&str| !workspace::root().join(path).with_file_name(quoted).exists();
        missing.extend(quoted.filter(next_to_page).map(|quoted| format!("{path}: {quoted}")));
    }
    assert!(missing.is_empty(), "no such files: {missing:#?}");
}

#[test]
fn anchors_are_those_of_github() {
    let page = "# S3-compatible `storage`\n## A, B\n```\n# no heading\n```\n## A, B\n";
    assert_eq!(Vec::from_iter(anchors(page)), ["a-b", "a-b-1", "s3-compatible-storage"]);
}

#[test]
fn links_in_code_are_ignored() {
    assert_eq!(targets("[a](b.md#c) `[x](y)`\n```\n[x](y)\n```\n"), ["b.md#c"]);
}

#[test]
fn manifest_of_the_readme_is_the_example() {
    let read = |path: &str| std::fs::read_to_string(workspace::root().join(path)).expect("the file is there");
    let (readme, example) = (read("README.md"), read("examples/kubernetes/cluster.yaml"));
    assert!(readme.contains(&format!("```yaml\n{example}```\n")), "README.md shows examples/kubernetes/cluster.yaml");
}
