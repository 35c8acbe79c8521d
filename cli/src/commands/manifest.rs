//! Reads manifests, for all commands that take one.

use crate::context::Context;
use crate::error::problem;
use engram_api::{Code, Manifest, Requirement};
use std::io::Read as _;
use std::path::Path;

/// Size limit of a manifest: bounds memory for a file given by mistake.
const MAX_BYTES: u64 = 1 << 20;

/// Reads and validates a manifest; `-` is stdin, with paths relative to the current directory.
///
/// # Errors
/// The file cannot be read (ENG-0302) or is invalid.
pub(crate) fn read(path: &Path, needs: Requirement) -> anyhow::Result<Manifest> {
    Ok(engram_api::parse(&text(path)?, &path.display().to_string(), needs)?)
}

/// Reads the text of a manifest without validation; `-` is stdin.
///
/// # Errors
/// The file cannot be read, is too large, or is not UTF-8.
pub(crate) fn text(path: &Path) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let result = if path == Path::new("-") {
        std::io::stdin().lock().take(MAX_BYTES + 1).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
    };
    let unreadable =
        |reason: String| problem(Code::SourceUnreadable, format!("failed to read {}: {reason}", path.display()));
    result.map_err(|error| unreadable(error.to_string()))?;
    if bytes.len() as u64 > MAX_BYTES {
        let message = format!("{} exceeds {MAX_BYTES} bytes, the size limit of a manifest", path.display());
        return Err(problem(Code::NotAManifest, message));
    }
    String::from_utf8(bytes)
        .map_err(|error| problem(Code::NotAManifest, format!("{} is not UTF-8: {error}", path.display())))
}

/// Prints notes about fields that have no effect in a local cluster.
pub(crate) fn print_notes(manifest: &Manifest, context: &Context) {
    for note in manifest.local_notes() {
        context.output.note(format!("note: {note}"));
    }
}
