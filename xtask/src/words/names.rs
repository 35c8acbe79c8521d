//! Names of Rust definitions: no type or module is named after a participle, and no name is defined too often in a crate.
//!
//! Reads sources with a small lexer instead of a parser: `cargo xtask` builds in seconds, and a definition differs from other
//! code by its keyword and by the block around it.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Finding, split};

/// Last words that name no thing.
const NO_NOUNS: &[&str] = &["told", "asked", "given", "seen", "found", "known", "fate", "scene", "season", "weather"];
/// Modules that name no subject.
const NO_SUBJECTS: &[&str] =
    &["asking", "asked", "given", "told", "seen", "found", "known", "hands", "relief", "trouble", "fate"];
/// How often a name may be defined in a crate.
const LIMIT: usize = 3;
/// Methods that a reader expects on many types.
const CONVENTIONAL: &[&str] = &[
    "new",
    "Error",
    "backward",
    "begin",
    "finish",
    "forward",
    "default",
    "from",
    "len",
    "is_empty",
    "iter",
    "get",
    "insert",
    "remove",
    "push",
    "pop",
    "clear",
    "contains",
    "run",
    "main",
    "open",
    "close",
    "start",
    "stop",
    "step",
    "next",
    "build",
    "apply",
    "read",
    "write",
    "encode",
    "decode",
    "parse",
    "name",
    "id",
    "as_str",
    "value",
    "kind",
    "load",
    "save",
    "send",
    "receive",
    "connect",
    "spawn",
    "wait",
    "check",
    "validate",
    "render",
    "plan",
    "with",
    "set",
    "add",
    "update",
    "find",
    "list",
    "create",
    "delete",
    "checks",
    "of",
    "bytes",
    "merge",
    "reserve",
    "install",
    "select",
    "Arguments",
    "Options",
];

/// What a definition defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Type,
    Function,
    Module,
}

/// A definition of a source file outside of trait implementations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Definition {
    pub(super) kind: Kind,
    pub(super) name: String,
    pub(super) line: usize,
    /// In a test module, or a test.
    pub(super) test: bool,
}

/// What a block of braces is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    TraitImplementation,
    Function,
    Test,
    Other,
}

/// A token that matters here: an identifier, a keyword, or one character.
struct Token<'a> {
    text: &'a str,
    line: usize,
}

/// The definitions of `source`, without those in trait implementations and in functions.
pub(super) fn definitions(source: &str) -> Vec<Definition> {
    let code = code(source);
    let tokens = tokens(&code);
    let mut definitions = Vec::new();
    let mut blocks = Vec::new();
    // The first token of the item that the current one belongs to.
    let mut item = 0;
    for (index, token) in tokens.iter().enumerate() {
        let header = &tokens[item..index];
        match token.text {
            "{" => {
                blocks.push(block(header));
                item = index + 1;
            }
            "}" => {
                blocks.pop();
                item = index + 1;
            }
            ";" => item = index + 1,
            "struct" | "enum" | "trait" | "type" | "fn" | "mod" => {
                let hidden = blocks.iter().any(|block| matches!(block, Block::TraitImplementation | Block::Function));
                let Some(name) = tokens.get(index + 1).filter(|name| is_identifier(name.text)) else { continue };
                if !hidden {
                    let kind = match token.text {
                        "fn" => Kind::Function,
                        "mod" => Kind::Module,
                        _ => Kind::Type,
                    };
                    let test = blocks.contains(&Block::Test) || is_test(header);
                    definitions.push(Definition { kind, name: name.text.to_owned(), line: name.line, test });
                }
            }
            _ => {}
        }
    }
    definitions
}

/// What a block with this header is.
fn block(header: &[Token<'_>]) -> Block {
    let has = |word: &str| header.iter().any(|token| token.text == word);
    if has("fn") {
        return Block::Function;
    }
    if has("mod") && is_test(header) {
        return Block::Test;
    }
    // `for<'a>` is a bound, not the trait of an implementation.
    let implements = header.windows(2).any(|pair| pair[0].text == "for" && pair[1].text != "<");
    if has("impl") && implements { Block::TraitImplementation } else { Block::Other }
}

/// Whether an attribute of the item says `test`.
fn is_test(header: &[Token<'_>]) -> bool {
    header.first().is_some_and(|token| token.text == "#") && header.iter().any(|token| token.text == "test")
}

fn is_identifier(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}

/// Identifiers and single characters of `code`.
fn tokens(code: &str) -> Vec<Token<'_>> {
    let bytes = code.as_bytes();
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let start = at;
        at += 1;
        if bytes[start] == b'\n' {
            line += 1;
        } else if bytes[start].is_ascii_alphanumeric() || bytes[start] == b'_' {
            while at < bytes.len() && (bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_') {
                at += 1;
            }
            tokens.push(Token { text: &code[start..at], line });
        } else if bytes[start].is_ascii_punctuation() {
            tokens.push(Token { text: &code[start..at], line });
        }
    }
    tokens
}

/// `source` with spaces in place of comments, strings and characters; lines stay where they are.
fn code(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut code = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let length = opaque(&bytes[at..], at.checked_sub(1).map(|before| bytes[before]));
        if length == 0 {
            code.push(if bytes[at].is_ascii() { bytes[at] } else { b' ' });
            at += 1;
        } else {
            let end = (at + length).min(bytes.len());
            code.extend(bytes[at..end].iter().map(|byte| if *byte == b'\n' { b'\n' } else { b' ' }));
            at = end;
        }
    }
    String::from_utf8(code).expect("bytes beyond ASCII are replaced")
}

/// The length of the comment, string or character that `rest` begins with after the byte `before`; 0 for anything else.
fn opaque(rest: &[u8], before: Option<u8>) -> usize {
    let until = |end: &[u8], from: usize| {
        rest[from..]
            .windows(end.len())
            .position(|window| window == end)
            .map_or(rest.len(), |found| from + found + end.len())
    };
    match rest {
        [b'/', b'/', ..] => rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len()),
        [b'/', b'*', ..] => block_comment(rest),
        [b'"', ..] => quoted(rest),
        [b'r', b'"' | b'#', ..]
            if !before.is_some_and(|byte| byte.is_ascii_alphanumeric() && byte != b'b' || byte == b'_') =>
        {
            let hashes = rest[1..].iter().take_while(|byte| **byte == b'#').count();
            if rest.get(1 + hashes) != Some(&b'"') {
                return 0; // a raw identifier
            }
            let end: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
            until(&end, 2 + hashes)
        }
        [b'\'', b'\\', ..] => until(b"'", 3),
        // A character; otherwise a lifetime.
        [b'\'', character, ..] => {
            let width = match character {
                0..0x80 => 1,
                0x80..0xe0 => 2,
                0xe0..0xf0 => 3,
                _ => 4,
            };
            if rest.get(1 + width) == Some(&b'\'') { 2 + width } else { 0 }
        }
        _ => 0,
    }
}

/// The length of a block comment, which may hold others.
fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at + 1 < rest.len() {
        match &rest[at..at + 2] {
            b"/*" => depth += 1,
            b"*/" => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// The length of a string in quotes.
fn quoted(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Types and modules that are named after a participle, or after a picture.
pub(super) fn participles(path: &str, definitions: &[Definition]) -> Vec<Finding> {
    let improper = |definition: &&Definition| match definition.kind {
        Kind::Type => {
            let words: Vec<String> = split(&definition.name).map(|word| word.text).collect();
            // `NotFound` is the field's name of an error.
            let last = words.last().is_some_and(|last| NO_NOUNS.contains(&last.as_str()));
            last && words.first().is_none_or(|first| first != "not")
        }
        Kind::Module => NO_SUBJECTS.contains(&definition.name.as_str()),
        Kind::Function => false,
    };
    let finding = |definition: &Definition| Finding {
        path: path.to_owned(),
        line: definition.line,
        found: definition.name.clone(),
        replacement: "a noun that says what it holds (types are nouns, modules are subjects)".to_owned(),
    };
    definitions.iter().filter(improper).map(finding).collect()
}

/// Names that a crate defines more than three times.
pub(super) fn repeated(files: &[String], definitions: &[(String, Definition)]) -> Vec<Finding> {
    let mut by_name = BTreeMap::<(&str, &str), Vec<(&str, usize)>>::new();
    for (path, definition) in definitions {
        let conventional = definition.kind == Kind::Module || CONVENTIONAL.contains(&definition.name.as_str());
        if conventional || definition.test || is_test_source(path) {
            continue;
        }
        let package = package(files, path);
        by_name.entry((package, &definition.name)).or_default().push((path, definition.line));
    }
    let finding = |((package, name), places): ((&str, &str), Vec<(&str, usize)>)| {
        let others: Vec<String> = places[1..].iter().map(|(path, line)| format!("{path}:{line}")).collect();
        Finding {
            path: places[0].0.to_owned(),
            line: places[0].1,
            found: format!("{name}, defined {} times in {package}", places.len()),
            replacement: format!("names that say what each is (also {})", others.join(", ")),
        }
    };
    by_name.into_iter().filter(|(_, places)| places.len() > LIMIT).map(finding).collect()
}

/// Whether the file holds tests, or what only tests use.
fn is_test_source(path: &str) -> bool {
    let ends = path.ends_with("tests.rs") || path.ends_with("testing.rs") || path.ends_with("build.rs");
    ends || path.starts_with("tests/")
        || ["/tests/", "/benches/", "/examples/", "/testing/"].iter().any(|part| path.contains(part))
}

/// The folder of the package that holds `path`.
fn package<'a>(files: &[String], path: &'a str) -> &'a str {
    let mut folder = Path::new(path);
    while let Some(parent) = folder.parent() {
        folder = parent;
        let manifest = folder.join("Cargo.toml");
        if files.binary_search_by(|file| Path::new(file.as_str()).as_os_str().cmp(manifest.as_os_str())).is_ok() {
            break;
        }
    }
    folder.to_str().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r##"
        //! struct Comment;
        pub(crate) struct Told { text: &'static str }
        impl fmt::Display for Told { fn fmt(&self) { fn local() {} } }
        impl<F> Told where F: for<'a> Fn(&'a str) { const C: char = '{'; fn method() { let s = "fn string() {"; } }
        trait Notify { fn notify(&self); }
        mod asking;
        const RAW: &str = r#"enum Raw {"#;
        #[test]
        fn promise() {}
        #[cfg(test)]
        mod tests { fn helper() {} }
    "##;

    #[test]
    fn definitions_are_found_outside_of_comments_strings_and_trait_implementations() {
        let names: Vec<String> = definitions(SOURCE).into_iter().filter(|it| !it.test).map(|it| it.name).collect();
        assert_eq!(names, ["Told", "method", "Notify", "notify", "asking"]);
    }

    #[test]
    fn type_named_after_a_participle_is_reported() {
        let found: Vec<String> = participles("lib.rs", &definitions(SOURCE)).into_iter().map(|it| it.found).collect();
        assert_eq!(found, ["Told", "asking"]);
        assert_eq!(participles("lib.rs", &definitions("enum Unknown {} struct NotFound;")), []);
    }

    #[test]
    fn name_defined_four_times_in_a_crate_is_reported() {
        let files: Vec<String> =
            ["a/Cargo.toml", "a/src/lib.rs", "b/Cargo.toml", "b/src/lib.rs"].map(str::to_owned).into();
        let of = |path: &str, count: usize| {
            let source = "fn place() {} ".repeat(count);
            definitions(&source).into_iter().map(|it| (path.to_owned(), it)).collect::<Vec<_>>()
        };
        let three: Vec<_> = [of("a/src/lib.rs", 3), of("b/src/lib.rs", 3)].concat();
        assert_eq!(repeated(&files, &three), []);
        assert_eq!(repeated(&files, &of("a/src/lib.rs", 4)).len(), 1);
    }
}
