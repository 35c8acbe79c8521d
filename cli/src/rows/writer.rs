//! Writes memories as rows that [`super::Reader`] can read.

use super::{Format, Object, weight};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use engram_client::{GetOptions, Memory};
use std::io::{self, Write};

/// Writes memories as rows.
pub(crate) struct Writer<W: Write> {
    rows: Rows<W>,
    columns: GetOptions,
}

enum Rows<W: Write> {
    Jsonl(W),
    Csv(Box<csv::Writer<W>>),
}

impl<W: Write> Writer<W> {
    /// Starts a file. `columns` decides whether it has features and payloads.
    ///
    /// # Errors
    /// Writing fails.
    pub(crate) fn new(to: W, format: Format, columns: GetOptions) -> io::Result<Self> {
        let rows = match format {
            Format::Jsonl => Rows::Jsonl(to),
            Format::Csv => {
                let mut writer = csv::Writer::from_writer(to);
                let mut names = vec!["id", "key", "weight", "group"];
                names.extend(columns.features.then_some("features"));
                names.extend(columns.payloads.then_some("payloadBase64"));
                writer.write_record(names)?;
                Rows::Csv(Box::new(writer))
            }
        };
        Ok(Self { rows, columns })
    }

    /// Writes a memory.
    ///
    /// # Errors
    /// Writing fails.
    pub(crate) fn write(&mut self, memory: &Memory) -> io::Result<()> {
        match &mut self.rows {
            Rows::Jsonl(to) => {
                serde_json::to_writer(&mut *to, &Object::of(memory))?;
                to.write_all(b"\n")
            }
            Rows::Csv(writer) => {
                let mut record = vec![
                    memory.id.to_string(),
                    memory.key.clone().unwrap_or_default(),
                    weight(memory).to_string(),
                    memory.group.0.to_string(),
                ];
                if self.columns.features {
                    record.push(memory.features.iter().map(f32::to_string).collect::<Vec<_>>().join(" "));
                }
                record.extend(self.columns.payloads.then(|| STANDARD.encode(&memory.payload)));
                Ok(writer.write_record(record)?)
            }
        }
    }

    /// Flushes all rows.
    ///
    /// # Errors
    /// Writing fails.
    pub(crate) fn finish(self) -> io::Result<W> {
        match self.rows {
            Rows::Jsonl(to) => Ok(to),
            Rows::Csv(writer) => writer.into_inner().map_err(|error| io::Error::other(error.to_string())),
        }
    }
}
