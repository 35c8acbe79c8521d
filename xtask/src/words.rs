//! `cargo xtask words`: the language that names, comments, messages and pages are written in.
//!
//! Decides whether a text uses the terms of `docs/glossary.md`. `xtask/words.txt` lists words and phrases to avoid with their
//! replacements, `xtask/words-exceptions.txt` the lines that may keep one, each with a reason. Identifiers are split at `_` and at
//! capitals, and a phrase is found across a line break of a comment. Rules about Rust definitions are in [`names`].
//! Text in, findings out: only [`run`] reads files.

mod names;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace;

/// Words and phrases to avoid.
const TABLE: &str = include_str!("../words.txt");
/// Lines that may keep one.
const EXCEPTIONS: &str = include_str!("../words-exceptions.txt");

/// Endings of the names of files that are checked.
const EXTENSIONS: &[&str] =
    &["md", "rs", "proto", "yaml", "yml", "tpl", "txt", "sh", "py", "cu", "cuh", "h", "cpp", "toml", "go"];
/// Files without such an ending that are checked: scripts, and texts of the chart in JSON.
const FILES: &[&str] = &[
    "Dockerfile",
    ".ci/run",
    "charts/engram/files/dashboards/clusters.json",
    "charts/engram/files/dashboards/devices.json",
    "charts/engram/files/dashboards/operator.json",
    "charts/engram/files/dashboards/runs.json",
    "charts/engram/values.schema.json",
];
/// Paths that hold data, other programs' texts, or the lists of this command.
const SKIPPED: &[&str] = &[
    "xtask/words",
    "fuzz/corpus/",
    "crates/learn/data/",
    "proto/src/v1_generated.rs",
    "tests/kubernetes/programs/build",
];

/// Options of `cargo xtask words`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Checks only files whose path begins with one of these
    paths: Vec<String>,
    /// Prints the number of findings by file instead of each finding
    #[arg(long)]
    summary: bool,
}

/// A line that should say something else.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    path: String,
    line: usize,
    found: String,
    replacement: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {} -> {}", self.path, self.line, self.found, self.replacement)
    }
}

/// One phrase to avoid.
#[derive(Debug)]
struct Phrase {
    words: Vec<String>,
    replacement: String,
    /// A line that contains one of these, in lower case, uses the word in another sense.
    unless: Vec<String>,
}

/// The phrases to avoid by their first word.
#[derive(Debug)]
struct Table(BTreeMap<String, Vec<Phrase>>);

/// A line that may keep a word.
#[derive(Debug)]
struct Exception {
    /// Beginning of the path.
    path: String,
    /// Part of the line; empty: every line of the file.
    text: String,
}

/// The columns of a line of a list, and `None` for comments and empty lines.
fn columns(line: &str) -> Option<Vec<&str>> {
    let line = line.trim();
    (!line.is_empty() && !line.starts_with('#')).then(|| line.split(" | ").map(str::trim).collect())
}

/// The items of a cell.
fn items(cell: &str) -> impl Iterator<Item = &str> {
    cell.split(',').map(str::trim).filter(|item| !item.is_empty())
}

impl Table {
    /// Reads the lines `phrase, phrase | replacement | unless, unless`.
    ///
    /// # Errors
    /// When a line has no replacement.
    fn parse(text: &str) -> Result<Self> {
        let mut phrases = BTreeMap::<String, Vec<Phrase>>::new();
        for columns in text.lines().filter_map(columns) {
            let (avoided, replacement) = match columns[..] {
                [avoided, replacement] | [avoided, replacement, _] => (avoided, replacement),
                _ => bail!("xtask/words.txt: a line has two or three columns: {}", columns.join(" | ")),
            };
            let unless: Vec<String> =
                columns.get(2).map_or_else(Vec::new, |cell| items(cell).map(str::to_lowercase).collect());
            for phrase in items(avoided) {
                let words: Vec<String> = split(phrase).map(|word| word.text).collect();
                let first = words.first().with_context(|| format!("xtask/words.txt: no word in `{phrase}`"))?.clone();
                let phrase = Phrase { words, replacement: replacement.to_owned(), unless: unless.clone() };
                phrases.entry(first).or_default().push(phrase);
            }
        }
        Ok(Self(phrases))
    }

    /// Phrases to avoid in `text`, with the number of their line and what to write instead.
    fn find(&self, path: &str, text: &str) -> Vec<Finding> {
        let words: Vec<Word> = split(text).collect();
        let lines: Vec<&str> = text.lines().collect();
        let mut findings = Vec::new();
        for (index, word) in words.iter().enumerate() {
            for phrase in self.0.get(&word.text).into_iter().flatten() {
                let Some(candidate) = words.get(index..index + phrase.words.len()) else { continue };
                let same = candidate.iter().map(|word| &word.text).eq(&phrase.words);
                let adjacent = candidate.windows(2).all(|pair| joins(&text[pair[0].end..pair[1].start]));
                let line = lines[word.line - 1].to_lowercase();
                if same && adjacent && !phrase.unless.iter().any(|part| line.contains(part.as_str())) {
                    findings.push(Finding {
                        path: path.to_owned(),
                        line: word.line,
                        found: phrase.words.join(" "),
                        replacement: phrase.replacement.clone(),
                    });
                }
            }
        }
        findings
    }
}

/// Reads the lines `path | part of the line | reason`.
///
/// # Errors
/// When a line has no reason.
fn exceptions(text: &str) -> Result<Vec<Exception>> {
    let parse = |columns: Vec<&str>| match columns[..] {
        [path, text, reason] if !path.is_empty() && !reason.is_empty() => {
            let text = if text == "*" { String::new() } else { text.to_owned() };
            Ok(Exception { path: path.to_owned(), text })
        }
        _ => bail!(
            "xtask/words-exceptions.txt: a line is `path | part of the line, or * | reason`: {}",
            columns.join(" | ")
        ),
    };
    text.lines().filter_map(columns).map(parse).collect()
}

/// A word of a text in lower case.
#[derive(Debug)]
struct Word {
    text: String,
    line: usize,
    start: usize,
    end: usize,
}

/// The words of a text. An identifier is split at `_`, at capitals, and between letters and digits.
fn split(text: &str) -> impl Iterator<Item = Word> {
    let bytes = text.as_bytes();
    let mut at = 0;
    let mut line = 1;
    std::iter::from_fn(move || {
        while at < bytes.len() && !bytes[at].is_ascii_alphanumeric() {
            line += usize::from(bytes[at] == b'\n');
            at += 1;
        }
        let start = at;
        while at < bytes.len() && bytes[at].is_ascii_alphanumeric() && (at == start || !boundary(bytes, at)) {
            at += 1;
        }
        (start < at).then(|| Word { text: text[start..at].to_lowercase(), line, start, end: at })
    })
}

/// Whether a word begins at `at` within an identifier: `old|Name`, `HTTP|Server`, `v|1`.
fn boundary(bytes: &[u8], at: usize) -> bool {
    let (before, here, after) = (bytes[at - 1], bytes[at], bytes.get(at + 1).copied().unwrap_or(b' '));
    before.is_ascii_digit() != here.is_ascii_digit()
        || here.is_ascii_uppercase()
            && (before.is_ascii_lowercase() || before.is_ascii_uppercase() && after.is_ascii_lowercase())
}

/// Whether words with `between` between them are of one phrase: spaces, hyphens, underscores, or a line break of a comment.
fn joins(between: &str) -> bool {
    between.matches('\n').count() <= 1 && between.chars().all(|c| c.is_whitespace() || "-_/!#*\\".contains(c))
}

/// Whether the file is checked.
fn is_checked(path: &str) -> bool {
    let extension = Path::new(path).extension().and_then(|extension| extension.to_str());
    let named = FILES.contains(&path) || extension.is_some_and(|extension| EXTENSIONS.contains(&extension));
    named && !SKIPPED.iter().any(|skipped| path.starts_with(skipped))
}

/// Files of the checkout that git does not ignore, by their path from the root.
pub(crate) fn files() -> Result<Vec<String>> {
    let mut git = std::process::Command::new("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard"]).current_dir(workspace::root());
    let output = git.output().context("failed to start git")?;
    ensure!(output.status.success(), "git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    let mut paths: Vec<String> = String::from_utf8(output.stdout)?.lines().map(str::to_owned).collect();
    // A file that was removed and not committed yet is still in the index.
    paths.retain(|path| workspace::root().join(path).is_file());
    paths.sort();
    paths.dedup();
    Ok(paths)
}

/// Checks the words and names of all files.
///
/// # Errors
/// When a finding is not excepted, and when an exception is not used.
pub(crate) fn run(options: &Options) -> Result<()> {
    let table = Table::parse(TABLE)?;
    let exceptions = exceptions(EXCEPTIONS)?;
    let paths = files()?;
    let mut texts = BTreeMap::new();
    for path in paths.iter().filter(|path| is_checked(path)) {
        // What is not UTF-8 is not a text.
        if let Ok(text) = fs::read_to_string(workspace::root().join(path)) {
            texts.insert(path.as_str(), text);
        }
    }
    let mut findings = Vec::new();
    let mut definitions = Vec::new();
    for (path, text) in &texts {
        findings.extend(table.find(path, text));
        if path.ends_with(".rs") {
            let of_source = names::definitions(text);
            findings.extend(names::participles(path, &of_source));
            definitions.extend(of_source.into_iter().map(|definition| ((*path).to_owned(), definition)));
        }
    }
    findings.extend(names::repeated(&paths, &definitions));
    let mut used = vec![false; exceptions.len()];
    findings.retain(|finding| {
        let line = texts[finding.path.as_str()].lines().nth(finding.line - 1).unwrap_or_default();
        let excepts =
            |exception: &Exception| finding.path.starts_with(&exception.path) && line.contains(&exception.text);
        let exception = exceptions.iter().position(excepts);
        if let Some(index) = exception {
            used[index] = true;
        }
        exception.is_none()
    });
    findings.sort();
    findings.retain(|finding| {
        options.paths.is_empty() || options.paths.iter().any(|path| finding.path.starts_with(path.as_str()))
    });
    print_findings(&findings, options.summary);
    let unused: Vec<String> = exceptions
        .iter()
        .zip(&used)
        .filter(|(_, used)| !**used)
        .map(|(exception, _)| format!("{} | {}", exception.path, exception.text))
        .collect();
    ensure!(findings.is_empty(), "{} words or names to replace (docs/glossary.md has the terms)", findings.len());
    ensure!(unused.is_empty(), "exceptions that no line needs (xtask/words-exceptions.txt): {}", unused.join("; "));
    println!("words: no finding");
    Ok(())
}

/// Prints the findings, or how many there are by file.
fn print_findings(findings: &[Finding], summary: bool) {
    if !summary {
        findings.iter().for_each(|finding| println!("{finding}"));
        return;
    }
    let mut by_file = BTreeMap::<&str, usize>::new();
    for finding in findings {
        *by_file.entry(&finding.path).or_default() += 1;
    }
    by_file.iter().for_each(|(path, count)| println!("{count:5}  {path}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(usize, String)> {
        let table = Table::parse(TABLE).expect("the table is well-formed");
        table.find("page.md", text).into_iter().map(|finding| (finding.line, finding.found)).collect()
    }

    #[test]
    fn sentence_with_told_is_reported() {
        assert_eq!(found("Fine.\n\nThe operator is told of it.\n"), [(3, "told".to_owned())]);
    }

    #[test]
    fn identifiers_are_split_at_underscores_capitals_and_digits() {
        for text in ["fn was_told()", "struct WasTold;", "enum HTTPTold {}", "told2", "TOLD"] {
            assert_eq!(found(text), [(1, "told".to_owned())], "{text}");
        }
        assert_eq!(found("stolde untold"), []);
    }

    #[test]
    fn phrase_is_found_across_a_line_break_of_a_comment() {
        assert_eq!(found("/// Calls that are under\n/// way.\n"), [(1, "under way".to_owned())]);
        assert_eq!(found("let under_way = 1;\nstruct UnderWay;").len(), 2);
        assert_eq!(found("It goes under.\n\nWay to go.\n"), []);
    }

    #[test]
    fn words_in_another_sense_are_allowed() {
        assert_eq!(found("The `:authority` header, a URI authority, and a certificate authority."), []);
        assert_eq!(found("Encryption at rest is up to the volume."), []);
        assert_eq!(found("The authority of the cluster.").len(), 1);
    }

    #[test]
    fn exception_needs_a_reason() {
        assert!(exceptions("docs/a.md | told | a quotation").is_ok());
        assert!(exceptions("docs/a.md | told").is_err());
        assert!(exceptions(EXCEPTIONS).is_ok());
    }
}
