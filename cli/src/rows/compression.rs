//! Compression of files, by extension: none, gzip or Zstandard.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

/// Trades time for size; suits text.
const ZSTD_LEVEL: i32 = 9;

/// Compression of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    pub(crate) fn of_path(path: &Path) -> Self {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("zst") => Self::Zstd,
            Some("gz") => Self::Gzip,
            _ => Self::None,
        }
    }

    pub(crate) fn reader(self, from: impl Read + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
        Ok(match self {
            Self::None => Box::new(from),
            Self::Gzip => Box::new(flate2::read::MultiGzDecoder::new(BufReader::new(from))),
            Self::Zstd => Box::new(zstd::Decoder::new(from)?),
        })
    }

    pub(crate) fn writer(self, to: File) -> io::Result<CompressedFile> {
        let to = BufWriter::new(CountedFile { file: to, bytes: 0 });
        Ok(match self {
            Self::None => CompressedFile::Plain(to),
            Self::Gzip => CompressedFile::Gzip(flate2::write::GzEncoder::new(to, flate2::Compression::default())),
            Self::Zstd => CompressedFile::Zstd(zstd::Encoder::new(to, ZSTD_LEVEL)?),
        })
    }
}

/// A file with compression on write.
pub(crate) enum CompressedFile {
    Plain(BufWriter<CountedFile>),
    Gzip(flate2::write::GzEncoder<BufWriter<CountedFile>>),
    Zstd(zstd::Encoder<'static, BufWriter<CountedFile>>),
}

impl CompressedFile {
    /// Finishes the stream and returns the number of bytes in the file.
    pub(crate) fn finish(self) -> io::Result<u64> {
        let buffered = match self {
            Self::Plain(file) => file,
            Self::Gzip(file) => file.finish()?,
            Self::Zstd(file) => file.finish()?,
        };
        Ok(buffered.into_inner().map_err(io::IntoInnerError::into_error)?.bytes)
    }
}

impl Write for CompressedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(file) => file.write(bytes),
            Self::Gzip(file) => file.write(bytes),
            Self::Zstd(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(file) => file.flush(),
            Self::Gzip(file) => file.flush(),
            Self::Zstd(file) => file.flush(),
        }
    }
}

/// A file that counts the bytes written: devices and pipes have no length.
pub(crate) struct CountedFile {
    file: File,
    bytes: u64,
}

impl Write for CountedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
