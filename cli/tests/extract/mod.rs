//! Extracts commands such as `engram status` from documentation and from string literals, so that tests can parse them.
//! Shared by the tests of `engram` and of `cargo xtask`.

use std::fs;
use std::path::{Path, PathBuf};

/// A command that a text mentions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mention {
    /// File and line.
    pub(crate) location: String,
    /// Arguments after the name of the program, with placeholders replaced.
    pub(crate) arguments: Vec<String>,
    /// Whether the text had placeholders such as `FILE`, whose replacement may be an invalid value.
    pub(crate) has_placeholder: bool,
    /// Whether the command is complete: from a code block or an example, not from a sentence.
    pub(crate) is_complete: bool,
}

/// Root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("packages are in folders of the root").to_owned()
}

/// Returns all commands of `program` (`engram` or `cargo xtask`) in documentation, examples, charts and sources.
pub(crate) fn documented(program: &str) -> Vec<Mention> {
    let root = root();
    let mut mentions = Vec::new();
    for path in files(&root) {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let name = path.strip_prefix(&root).unwrap_or(&path).display().to_string();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("md") => markdown(program, &name, &text, &mut mentions),
            Some("rs") => rust(program, &name, &text, &mut mentions),
            _ => plain(program, &name, &without_templates(&text), 0, &mut mentions),
        }
    }
    mentions
}

/// Replaces the expressions of Go templates by a placeholder.
fn without_templates(text: &str) -> String {
    let mut parts = text.split("{{");
    let mut replaced = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (expression, rest) = part.split_once("}}").unwrap_or((part, ""));
        replaced.push_str("{}");
        replaced.push_str(&"\n".repeat(expression.matches('\n').count()));
        replaced.push_str(rest);
    }
    replaced
}

/// Documentation for users, and sources whose messages name commands.
fn files(root: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = ["README.md", "CONTRIBUTING.md", "SECURITY.md"].map(|name| root.join(name)).into();
    for folder in ["docs", "examples", "charts"] {
        walk(&root.join(folder), &["md", "yaml", "txt"], &mut found);
    }
    for folder in ["cli/src", "operator/src", "worker/src", "xtask/src", "crates"] {
        walk(&root.join(folder), &["rs"], &mut found);
    }
    // Tests may contain invalid commands, and the reference page is generated from the help texts.
    found.retain(|path| {
        !path.components().any(|part| part.as_os_str() == "tests") && !path.ends_with("docs/reference/cli.md")
    });
    found.sort();
    found
}

fn walk(folder: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            walk(&path, extensions, found);
        } else if path.extension().and_then(|it| it.to_str()).is_some_and(|it| extensions.contains(&it)) {
            found.push(path);
        }
    }
}

/// Commands in blocks of shell code are complete; code spans and diagrams only mention commands.
fn markdown(program: &str, name: &str, text: &str, mentions: &mut Vec<Mention>) {
    let mut prose = String::new();
    let mut lines = text.lines().enumerate();
    let (mut is_block, mut is_shell) = (false, false);
    while let Some((index, line)) = lines.next() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            is_block = !is_block;
            is_shell = matches!(language, "sh" | "bash" | "console");
            prose.push('\n');
            continue;
        }
        if !is_block {
            prose.push_str(line);
            prose.push('\n');
            continue;
        }
        prose.push('\n');
        let mut command = line.to_owned();
        while command.ends_with('\\') {
            command.pop();
            let Some((_, next)) = lines.next() else { break };
            prose.push('\n');
            command.push_str(next);
        }
        let location = format!("{name}:{}", index + 1);
        mentions.extend(shell(program, &command).into_iter().map(|words| mention(&location, &words, is_shell)));
    }
    spans(program, name, &prose, 0, mentions);
}

/// Code spans: text between two backquotes.
fn spans(program: &str, name: &str, text: &str, first_line: usize, mentions: &mut Vec<Mention>) {
    let mut line = first_line + 1;
    for (index, part) in text.split('`').enumerate() {
        if index % 2 == 1 && part.len() < 400 {
            let location = format!("{name}:{line}");
            mentions.extend(shell(program, part).into_iter().map(|words| mention(&location, &words, false)));
        }
        line += part.matches('\n').count();
    }
}

/// Text without markup: code spans, and commands at the start of a line or after a colon.
pub(crate) fn plain(program: &str, name: &str, text: &str, first_line: usize, mentions: &mut Vec<Mention>) {
    spans(program, name, text, first_line, mentions);
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start_matches(['#', ' ', '/']);
        let starts = line.match_indices(program).map(|(start, _)| start).filter(|start| {
            let before = &line[..*start];
            before.is_empty() || [": ", "&& ", "kubectl "].iter().any(|end| before.ends_with(end))
        });
        // Only the first: later ones are part of the same sequence.
        let Some(command) = starts.map(|start| &line[start..]).next() else { continue };
        let end =
            ["  ", "; ", " (", ", ", "`"].iter().filter_map(|end| command.find(end)).min().unwrap_or(command.len());
        let location = format!("{name}:{}", first_line + index + 1);
        let commands = shell(program, &command[..end]);
        mentions.extend(commands.into_iter().map(|words| mention(&location, &words, false)));
    }
}

/// String literals of a Rust source.
fn rust(program: &str, name: &str, text: &str, mentions: &mut Vec<Mention>) {
    let text = text.split("#[cfg(test)]").next().unwrap_or(text);
    for (line, literal) in literals(text) {
        plain(program, name, &literal, line, mentions);
    }
}

/// Returns the string literals of a Rust source, with the number of lines before each.
fn literals(text: &str) -> Vec<(usize, String)> {
    let bytes: Vec<char> = text.chars().collect();
    let (mut literals, mut line, mut at) = (Vec::new(), 0, 0);
    while at < bytes.len() {
        match bytes[at] {
            '\n' => line += 1,
            '/' if bytes.get(at + 1) == Some(&'/') => {
                while at < bytes.len() && bytes[at] != '\n' {
                    at += 1;
                }
                continue;
            }
            // A character literal, as opposed to a lifetime.
            '\'' if bytes.get(at + 1) == Some(&'\\') => at += 3,
            '\'' if bytes.get(at + 2) == Some(&'\'') => at += 2,
            '"' => {
                let raw = bytes[..at].iter().rev().take_while(|it| **it == '#').count();
                let is_raw = at > raw && bytes[at - raw - 1] == 'r';
                let (start_line, mut literal) = (line, String::new());
                at += 1;
                while at < bytes.len() {
                    let is_end = bytes[at] == '"'
                        && (!is_raw || bytes[at + 1..].iter().take(raw).filter(|it| **it == '#').count() == raw);
                    if is_end {
                        break;
                    }
                    if bytes[at] == '\n' {
                        line += 1;
                    }
                    if bytes[at] == '\\' && !is_raw {
                        at += 1;
                        match bytes.get(at) {
                            Some('n') => literal.push('\n'),
                            Some('\n') => {
                                line += 1;
                                while bytes.get(at + 1).is_some_and(|it| it.is_whitespace()) {
                                    at += 1;
                                    line += usize::from(bytes[at] == '\n');
                                }
                            }
                            Some(other) => literal.push(*other),
                            None => {}
                        }
                    } else {
                        literal.push(bytes[at]);
                    }
                    at += 1;
                }
                literals.push((start_line, literal));
            }
            _ => {}
        }
        at += 1;
    }
    literals
}

/// Splits a shell command line into the commands of `program`, each as its arguments.
fn shell(program: &str, text: &str) -> Vec<Vec<String>> {
    let mut commands = vec![vec![]];
    let (mut word, mut quote, mut has_word) = (String::new(), None, false);
    for letter in text.chars().chain([' ']) {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (Some(_), _) => word.push(letter),
            (None, '\'' | '"') => (quote, has_word) = (Some(letter), true),
            (None, '#') if word.is_empty() => break,
            (None, _) if letter.is_whitespace() || "|;&()".contains(letter) => {
                if has_word || !word.is_empty() {
                    commands.last_mut().expect("there is always one").push(std::mem::take(&mut word));
                    has_word = false;
                }
                if !letter.is_whitespace() {
                    commands.push(vec![]);
                }
            }
            (None, _) => word.push(letter),
        }
    }
    let names: Vec<&str> = program.split(' ').collect();
    commands.into_iter().filter_map(|words| arguments(&names, &words)).collect()
}

fn arguments(program: &[&str], words: &[String]) -> Option<Vec<String>> {
    let is_prefix = |word: &String| word == "$" || word == "sudo" || word == "kubectl" || word.contains('=');
    let start = words.iter().position(|word| !is_prefix(word))?;
    let words = &words[start..];
    let first = words.first()?.rsplit('/').next()?;
    let matches = first == program[0]
        && words.len() > program.len()
        && program.iter().zip(words).skip(1).all(|(name, word)| name == word);
    let is_argument = |word: &&String| !word.starts_with('>') && word.as_str() != "<";
    // A variable as the command: cannot be checked.
    let is_known = words.get(program.len()).is_some_and(|word| !word.starts_with('{'));
    (matches && is_known).then(|| words[program.len()..].iter().take_while(is_argument).cloned().collect())
}

fn mention(location: &str, words: &[String], is_complete: bool) -> Mention {
    let mut has_placeholder = false;
    let mut arguments = Vec::new();
    for word in words {
        let word = word.trim_matches(['[', ']']);
        let word = if word.len() > 1 { word.trim_end_matches([',', '.', ':', '?']) } else { word };
        let (replaced, changed) = placeholder(word);
        has_placeholder |= changed;
        arguments.extend((!replaced.is_empty()).then_some(replaced));
    }
    Mention { location: location.to_owned(), arguments, has_placeholder, is_complete }
}

/// Replaces placeholders: `FILE`, `<name>`, `...`, `{variable}`. A variable that is appended to a word stands for more options.
fn placeholder(word: &str) -> (String, bool) {
    if word.starts_with('<') || (word.starts_with('{') && word.ends_with('}')) {
        return ("1".to_owned(), true);
    }
    if word.len() > 1 && word.chars().all(|letter| letter == '.' || letter == '\u{2026}') {
        return (String::new(), true);
    }
    let is_name = |letter: char| letter.is_ascii_uppercase() || letter.is_ascii_digit() || "-_.,:/".contains(letter);
    if word.starts_with(|letter: char| letter.is_ascii_uppercase()) && word.chars().all(is_name) {
        return ("1".to_owned(), true);
    }
    match word.split_once('{') {
        Some((before, _)) => (before.to_owned(), true),
        None => (word.to_owned(), false),
    }
}

/// Returns why a command does not parse; `None` if it does, or if only a required argument of an incomplete one is missing.
pub(crate) fn failure(grammar: &clap::Command, program: &str, mention: &Mention) -> Option<String> {
    use clap::error::ErrorKind;
    let words = program.rsplit(' ').next().into_iter().map(str::to_owned).chain(mention.arguments.iter().cloned());
    let error = grammar.clone().try_get_matches_from(words).err()?;
    let is_accepted = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
        ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => !mention.is_complete,
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => mention.has_placeholder || !mention.is_complete,
        _ => false,
    };
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    (!is_accepted).then(|| format!("{}: {program} {}: {first}", mention.location, mention.arguments.join(" ")))
}

/// Appends the commands in all help texts of a grammar.
pub(crate) fn help_texts(program: &str, grammar: &clap::Command, path: &str, mentions: &mut Vec<Mention>) {
    let own = [
        grammar.get_about(),
        grammar.get_long_about(),
        grammar.get_before_help(),
        grammar.get_before_long_help(),
        grammar.get_after_help(),
        grammar.get_after_long_help(),
    ];
    let arguments = grammar.get_arguments().flat_map(|argument| [argument.get_help(), argument.get_long_help()]);
    for text in own.into_iter().chain(arguments).flatten() {
        plain(program, &format!("{path} --help"), &text.to_string(), 0, mentions);
    }
    for child in grammar.get_subcommands() {
        help_texts(program, child, &format!("{path} {}", child.get_name()), mentions);
    }
}
