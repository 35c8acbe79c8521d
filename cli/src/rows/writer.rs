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
                writer.write_record(names).map_err(io_error)?;
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
                writer.write_record(record).map_err(io_error)
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
            Rows::Csv(writer) => {
                writer.into_inner().map_err(|error| io::Error::new(error.error().kind(), error.to_string()))
            }
        }
    }
}

/// Returns the I/O error behind a CSV error: its kind distinguishes a closed pipe and a full disk from other failures.
fn io_error(error: csv::Error) -> io::Error {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error,
        other => io::Error::other(format!("{other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct ClosedPipe;

    impl Write for ClosedPipe {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_pipe_is_reported_as_such_in_every_format() {
        let columns = GetOptions { features: false, payloads: true };
        // Larger than the buffer of any writer.
        let memory = Memory { payload: vec![b'x'; 1 << 16].into(), ..Memory::default() };
        for format in [Format::Jsonl, Format::Csv] {
            let mut writer = Writer::new(ClosedPipe, format, columns).unwrap();
            assert_eq!(writer.write(&memory).unwrap_err().kind(), io::ErrorKind::BrokenPipe, "{format:?}");
        }
        let writer = Writer::new(ClosedPipe, Format::Csv, columns).unwrap();
        assert_eq!(writer.finish().err().unwrap().kind(), io::ErrorKind::BrokenPipe);
    }
}
