//! Files of memories, JSON Lines or CSV, optionally compressed: read by `insert` and `reinforce`, written by `export`.
//!
//! A row names its memory by `id` or `key` (both only if they agree). Rows are validated when read, and errors name the line.
//! Unknown columns are rejected, so that a misspelt column is never ignored. Exported files can be inserted again.

mod compression;
mod reader;
mod writer;

pub(crate) use compression::Compression;
pub(crate) use reader::Reader;
pub(crate) use writer::Writer;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::ValueEnum;
use engram_api::{Code, Problem};
use engram_client::Memory;
use engram_memory::MemoryId;
use serde::Serialize;
use std::path::Path;

/// Format of a file of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// One JSON object per line.
    Jsonl,
    /// Comma-separated values with a header line.
    Csv,
}

impl Format {
    /// Returns the format for the extension of a file name.
    ///
    /// # Errors
    /// The extension is unknown.
    pub(crate) fn of_path(path: &Path) -> Result<Self, Problem> {
        let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
        let bare = name.strip_suffix(".zst").or(name.strip_suffix(".gz")).unwrap_or(&name);
        match bare.rsplit_once('.').map(|(_, extension)| extension) {
            Some("jsonl" | "ndjson" | "json") => Ok(Self::Jsonl),
            Some("csv") => Ok(Self::Csv),
            _ => Err(Problem::new(
                Code::Conflicting,
                format!(
                    "{} has an unknown extension; known: .jsonl, .csv, optionally followed by .zst or .gz",
                    path.display()
                ),
            )
            .help("give the format: --format jsonl")),
        }
    }
}

/// The command that reads rows, which decides the allowed and required columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Memories to insert.
    Insert {
        /// Feature dimension of the cluster; 0 = no features.
        dimension: usize,
    },
    /// Updates, each with a quality or a delta.
    Reinforce,
}

impl Purpose {
    /// Returns the name of the command.
    pub(crate) const fn command(self) -> &'static str {
        match self {
            Self::Insert { .. } => "insert",
            Self::Reinforce => "reinforce",
        }
    }
}

/// A row of a file.
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

/// A memory as JSON, in files and on stdout. Absent fields are omitted.
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
    /// Set if the payload is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a str>,
    /// Set if the payload is not UTF-8.
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

/// Returns the exact weight.
pub(crate) fn weight(memory: &Memory) -> f64 {
    f64::from(memory.weight.units()) / f64::from(engram_memory::ONE)
}

#[cfg(test)]
mod tests;
