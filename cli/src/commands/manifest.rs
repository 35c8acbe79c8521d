//! Reading manifests, for all commands that take one.

use crate::args::Context;
use crate::error::problem;
use engram_api::{Code, Manifest, Needs};
use std::io::Read as _;
use std::path::Path;

/// A manifest larger than this is a mistake: no file of settings is.
const MAX_BYTES: u64 = 1 << 20;

/// Reads and checks a manifest; `-` is stdin, whose relative paths are relative to the current folder.
///
/// # Errors
/// The file cannot be read (ENG-0302), or has problems.
pub(crate) fn read(path: &Path, needs: Needs) -> anyhow::Result<Manifest> {
    Ok(engram_api::parse(&text(path)?, &path.display().to_string(), needs)?)
}

/// Reads the text of a manifest, unchecked; `-` is stdin.
///
/// # Errors
/// The file cannot be read, is too large or no text.
pub(crate) fn text(path: &Path) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let taken = if path == Path::new("-") {
        std::io::stdin().lock().take(MAX_BYTES + 1).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
    };
    let unreadable = |why: String| problem(Code::SourceUnreadable, format!("failed to read {}: {why}", path.display()));
    taken.map_err(|error| unreadable(error.to_string()))?;
    if bytes.len() as u64 > MAX_BYTES {
        let message = format!("{} is larger than {MAX_BYTES} bytes, the most that a manifest may have", path.display());
        return Err(problem(Code::NotAManifest, message));
    }
    String::from_utf8(bytes)
        .map_err(|error| problem(Code::NotAManifest, format!("{} is not UTF-8: {error}", path.display())))
}

/// Tells what a user of a local cluster should know of a manifest, once.
pub(crate) fn tell_notes(manifest: &Manifest, context: &Context) {
    for note in manifest.local_notes() {
        context.output.note(format!("note: {note}"));
    }
}
