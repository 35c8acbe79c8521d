//! Memories in files: JSON Lines and CSV, plain or packed, as `insert` and `reinforce` read and `export` writes them.
//!
//! A row names its memory by `id` or `key` (both only where they agree). What a row may hold is checked when it is read, with
//! its line; a name that is not known is refused, so that a misspelt column is never ignored. What `export` wrote can be
//! inserted again.

mod packing;
mod reader;
mod writer;

pub(crate) use packing::Packing;
pub(crate) use reader::Reader;
pub(crate) use writer::Writer;

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::ValueEnum;
use engram_api::{Code, Problem};
use engram_client::Memory;
use engram_memory::MemoryId;
use serde::Serialize;
use std::io::{self, Write as _};
use std::path::Path;
use tempfile::NamedTempFile;

/// How rows are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// One JSON object per line.
    Jsonl,
    /// Comma-separated values under a line of names.
    Csv,
}

impl Format {
    /// The format that a file's name tells, packed or not.
    ///
    /// # Errors
    /// The name tells none.
    pub(crate) fn of_path(path: &Path) -> Result<Self, Problem> {
        let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
        let bare = name.strip_suffix(".zst").or(name.strip_suffix(".gz")).unwrap_or(&name);
        match bare.rsplit_once('.').map(|(_, extension)| extension) {
            Some("jsonl" | "ndjson" | "json") => Ok(Self::Jsonl),
            Some("csv") => Ok(Self::Csv),
            _ => Err(Problem::new(
                Code::Conflicting,
                format!(
                    "the name of {} tells no format; known: .jsonl, .csv, each also with .zst or .gz",
                    path.display()
                ),
            )
            .help("say it:    --format jsonl")),
        }
    }
}

/// What rows are read for: which names they may have, and which they must.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Memories, with feature vectors of so many numbers.
    Insert {
        /// Of the cluster; 0 = it takes none.
        dimension: usize,
    },
    /// Updates: each with a quality or a delta.
    Reinforce,
}

impl Purpose {
    /// The command that wants them.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Insert { .. } => "insert",
            Self::Reinforce => "reinforce",
        }
    }
}

/// One row of a file.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Row {
    pub(crate) id: MemoryId,
    pub(crate) key: Option<String>,
    pub(crate) weight: Option<f32>,
    pub(crate) group: Option<u8>,
    pub(crate) features: Vec<f32>,
    pub(crate) payload: Vec<u8>,
    pub(crate) quality: Option<f32>,
    pub(crate) delta: Option<f32>,
}

/// A memory as JSON, in files and on stdout. What it does not have is left out.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Object<'a> {
    id: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    weight: f64,
    group: u8,
    #[serde(skip_serializing_if = "<[f32]>::is_empty")]
    features: &'a [f32],
    /// Where it is text.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a str>,
    /// Where it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

impl<'a> Object<'a> {
    pub(crate) fn of(memory: &'a Memory) -> Self {
        let text = std::str::from_utf8(&memory.payload);
        Self {
            id: memory.id.0,
            key: memory.key.as_deref(),
            weight: weight(memory),
            group: memory.group.0,
            features: &memory.features,
            payload: text.ok().filter(|text| !text.is_empty()),
            payload_base64: text.is_err().then(|| STANDARD.encode(&memory.payload)),
        }
    }
}

/// The weight, exact.
pub(crate) fn weight(memory: &Memory) -> f64 {
    f64::from(memory.weight.units()) / f64::from(engram_memory::ONE)
}

/// Writes a file that appears whole or not at all.
///
/// # Errors
/// The file system refuses.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let write = || {
        let mut file = temporary_beside(path)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        io::Result::Ok(())
    };
    write().with_context(|| format!("failed to write {}", path.display()))
}

/// A file that takes the name `path` when it is persisted.
pub(crate) fn temporary_beside(path: &Path) -> io::Result<NamedTempFile> {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // As a file that is simply created: others may read it, as far as the umask admits.
    let permissions = std::fs::Permissions::from_mode(0o666);
    tempfile::Builder::new().prefix(".engram-").permissions(permissions).tempfile_in(folder)
}

#[cfg(test)]
mod tests;
