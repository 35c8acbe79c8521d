//! Import and export of items, in calls of a bounded size.

use super::npz;
use super::parquet;
use super::rows::Rows;
use crate::error::problem;
use crate::output_file::OutputFile;
use anyhow::{Context as _, bail, ensure};
use engram_api::Code;
use engram_client::{Batch, Buffer, BufferSpec, Client, Field, Fields};
use engram_memory::MemoryId;
use engram_proto::v1::ProblemKind;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

/// Most items per call.
const CALL_ITEMS: usize = 4_096;
/// Items of the first call, while the size of an item is unknown.
const FIRST_ITEMS: usize = 64;
/// Bytes of fields per call.
const CALL_BYTES: usize = 8 << 20;
/// Bytes of fields per group of rows of a Parquet file.
const GROUP_BYTES: usize = 64 << 20;

/// Format of a file of items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Npy,
    Npz,
    Parquet,
}

impl Format {
    fn of_path(path: &Path) -> anyhow::Result<Self> {
        match path.extension().map(|it| it.to_string_lossy().to_lowercase()).as_deref() {
            Some("npy") => Ok(Self::Npy),
            Some("npz") => Ok(Self::Npz),
            Some("parquet") => Ok(Self::Parquet),
            _ => {
                let message = format!("{} has an unknown extension; known: .npz, .npy, .parquet", path.display());
                Err(problem(Code::InvalidValue, message))
            }
        }
    }
}

/// A file of items that is being written.
pub(super) struct ItemFile {
    out: OutputFile,
    empty: Rows,
    /// Items that are not written yet.
    parts: Vec<Rows>,
    bytes: usize,
    /// Bytes of fields that the format can hold.
    most: usize,
    content: Content,
}

enum Content {
    Npy,
    Npz,
    Parquet(Option<parquet::Writer<File>>),
}

impl ItemFile {
    /// Begins a file for items of a buffer.
    ///
    /// # Errors
    /// The file exists and `force` is not set, it cannot be written, or its format cannot hold the fields.
    pub(super) fn create(path: &Path, spec: &BufferSpec, force: bool) -> anyhow::Result<Self> {
        let format = Format::of_path(path)?;
        if !force && OutputFile::is_overwritten(path).unwrap_or(false) {
            let message = format!("{} exists; overwrite it with --force", path.display());
            return Err(problem(Code::InvalidValue, message));
        }
        if format == Format::Npy && (spec.fields.len() != 1 || spec.fields[0].jagged) {
            let message =
                format!("buffer {} does not fit into an .npy file; allowed: one field that is not jagged", spec.name);
            return Err(problem(Code::InvalidValue, message));
        }
        let out = OutputFile::create(path).with_context(|| format!("failed to write {}", path.display()))?;
        let content = match format {
            Format::Npy => Content::Npy,
            Format::Npz => Content::Npz,
            Format::Parquet => Content::Parquet(None),
        };
        let most = if format == Format::Npz { npz::MAX_BYTES } else { usize::MAX };
        Ok(Self { out, empty: Rows::empty(spec), parts: Vec::new(), bytes: 0, most, content })
    }

    /// Adds items.
    ///
    /// # Errors
    /// The format cannot hold as many bytes, or the file cannot be written.
    pub(super) fn push(&mut self, batch: Batch) -> anyhow::Result<()> {
        let rows = Rows::of_batch(batch);
        self.bytes += rows.bytes();
        if self.bytes > self.most {
            return Err(npz::Error::TooLarge(self.bytes).into());
        }
        self.parts.push(rows);
        if self.bytes >= GROUP_BYTES { self.write_group() } else { Ok(()) }
    }

    /// Writes a group of rows, if the format has them.
    fn write_group(&mut self) -> anyhow::Result<()> {
        let Content::Parquet(writer) = &mut self.content else { return Ok(()) };
        let rows = Rows::join(std::mem::take(&mut self.parts), self.empty.clone());
        self.bytes = 0;
        if writer.is_none() {
            *writer = Some(parquet::Writer::new(self.out.handle()?, &rows)?);
        }
        match writer {
            Some(writer) if rows.count > 0 => writer.push(&rows),
            _ => Ok(()),
        }
    }

    /// Completes the file.
    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        self.write_group()?;
        let bytes = match self.content {
            Content::Parquet(writer) => {
                writer.map(parquet::Writer::finish).transpose()?;
                None
            }
            Content::Npz => Some(npz::encode(&npz::arrays(&Rows::join(self.parts, self.empty)))?),
            Content::Npy => {
                let rows = Rows::join(self.parts, self.empty);
                npz::arrays(&rows).first().map(npz::encode_array)
            }
        };
        if let Some(bytes) = bytes {
            self.out.handle()?.write_all(&bytes)?;
        }
        Ok(self.out.finish()?)
    }
}

/// Writes all items to a file; returns their number.
pub(super) async fn export(buffer: &Buffer, path: &Path, force: bool) -> anyhow::Result<usize> {
    let mut file = ItemFile::create(path, buffer.spec(), force)?;
    let (mut after, mut count, mut calls) = (None, 0, CallSize::default());
    loop {
        let (page, more) = buffer.page(None, after, 0).await?;
        let mut handles = &page.handles[..];
        while !handles.is_empty() {
            let (now, later) = handles.split_at(calls.items.min(handles.len()));
            let batch = buffer.get(now, Fields::All).await?;
            calls.observe(&batch);
            count += batch.len();
            file.push(batch)?;
            handles = later;
        }
        after = more;
        if after.is_none() {
            break;
        }
    }
    file.finish().with_context(|| format!("failed to write {}", path.display()))?;
    Ok(count)
}

/// Items per call, by the size of earlier items.
struct CallSize {
    items: usize,
}

impl Default for CallSize {
    fn default() -> Self {
        Self { items: FIRST_ITEMS }
    }
}

impl CallSize {
    fn observe(&mut self, batch: &Batch) {
        let bytes: usize = batch.columns.iter().map(|column| column.data.len()).sum();
        let per_item = bytes.div_ceil(batch.len().max(1)).max(1);
        self.items = (CALL_BYTES / per_item).clamp(1, CALL_ITEMS);
    }
}

/// Appends the items of a file; creates the buffer with this capacity if it does not exist. Returns the handles.
pub(super) async fn import(
    client: &Client,
    name: &str,
    path: &Path,
    capacity: Option<u64>,
) -> anyhow::Result<Vec<MemoryId>> {
    let format = Format::of_path(path)?;
    let mut buffer = match client.buffer(name).await {
        Ok(buffer) => Some(buffer),
        Err(error) if error.kind() == ProblemKind::BufferUnknown && capacity.is_some() => None,
        Err(error) => return Err(error.into()),
    };
    let fields = buffer.as_ref().map(|buffer| buffer.spec().fields.clone());
    let unreadable = || format!("failed to read {}", path.display());
    let mut source = Source::open(path, format, fields.as_deref()).with_context(unreadable)?;
    let mut handles = Vec::new();
    while let Some(rows) = source.next_rows().with_context(unreadable).with_context(|| partial(handles.len()))? {
        let buffer = match &mut buffer {
            Some(buffer) => buffer,
            none => {
                none.insert(client.create_buffer(&BufferSpec::new(name, rows.fields(), capacity.unwrap_or(1))).await?)
            }
        };
        let items = (CALL_BYTES / rows.bytes().div_ceil(rows.count.max(1)).max(1)).clamp(1, CALL_ITEMS);
        let most = usize::try_from(buffer.spec().capacity).unwrap_or(usize::MAX);
        for append in rows.appends(items.min(most))? {
            let appended = buffer.append(append).await;
            handles.extend(appended.map_err(anyhow::Error::from).with_context(|| partial(handles.len()))?.handles);
        }
    }
    Ok(handles)
}

/// Describes what an import that failed has done.
fn partial(appended: usize) -> String {
    format!("failed to import; {appended} items were appended before")
}

/// A file of items that is being read.
enum Source {
    Whole(Option<Rows>),
    Parquet(parquet::Reader),
}

impl Source {
    fn open(path: &Path, format: Format, fields: Option<&[Field]>) -> anyhow::Result<Self> {
        Ok(match format {
            Format::Parquet => Self::Parquet(parquet::Reader::open(File::open(path)?, fields)?),
            Format::Npz => Self::Whole(Some(npz::rows(npz::decode(&std::fs::read(path)?)?)?)),
            Format::Npy => {
                let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
                let name = match fields {
                    None => stem,
                    Some([field]) => field.name.clone(),
                    Some(fields) => {
                        bail!("an .npy file has one field, the buffer has {}; allowed: .npz or .parquet", fields.len())
                    }
                };
                let array = npz::decode_array(&name, &std::fs::read(path)?)?;
                ensure!(!array.shape.is_empty(), "it is a scalar; allowed: an array with an entry per item");
                Self::Whole(Some(npz::rows(vec![array])?))
            }
        })
    }

    fn next_rows(&mut self) -> anyhow::Result<Option<Rows>> {
        match self {
            Self::Whole(rows) => Ok(rows.take()),
            Self::Parquet(reader) => reader.next_rows(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::tests::every_type;
    use super::*;

    fn batch(rows: Rows) -> Batch {
        Batch {
            handles: rows.handles.into_iter().map(MemoryId).collect(),
            weights: rows.weights,
            scale: None,
            priorities: rows.priorities,
            versions: rows.versions,
            trajectories: rows.trajectories,
            tags: rows.tags,
            columns: rows.columns,
            missing: Vec::new(),
        }
    }

    #[test]
    fn every_format_returns_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let rows = every_type();
        let spec = BufferSpec::new("all", rows.fields(), 10);
        for name in ["items.npz", "items.parquet"] {
            let path = folder.path().join(name);
            let mut file = ItemFile::create(&path, &spec, false).unwrap();
            file.push(batch(rows.clone())).unwrap();
            file.push(batch(rows.clone())).unwrap();
            file.finish().unwrap();
            let whole = Rows::join(vec![rows.clone(), rows.clone()], Rows::empty(&spec));
            let read = Source::open(&path, Format::of_path(&path).unwrap(), None).unwrap().next_rows().unwrap();
            assert_eq!(read, Some(Rows { handles: Vec::new(), ..whole }), "{name}");
            assert!(ItemFile::create(&path, &spec, false).is_err(), "it is overwritten without --force");
        }
        // An empty buffer is a file without items.
        let path = folder.path().join("empty.parquet");
        ItemFile::create(&path, &spec, false).unwrap().finish().unwrap();
        assert_eq!(Source::open(&path, Format::Parquet, None).unwrap().next_rows().unwrap(), None);

        // Items that an archive cannot hold are refused before they are gathered.
        let mut file = ItemFile::create(&folder.path().join("large.npz"), &spec, false).unwrap();
        file.most = rows.bytes();
        file.push(batch(rows.clone())).unwrap();
        let refused = file.push(batch(rows.clone())).unwrap_err().to_string();
        assert!(refused.contains("do not fit into an .npz archive"), "{refused}");

        let one = Rows { columns: rows.columns[..1].to_vec(), ..rows };
        let path = folder.path().join("x.npy");
        let mut file = ItemFile::create(&path, &BufferSpec::new("one", one.fields(), 10), false).unwrap();
        file.push(batch(one.clone())).unwrap();
        file.finish().unwrap();
        let read = Source::open(&path, Format::Npy, Some(&one.fields())).unwrap().next_rows().unwrap().unwrap();
        assert_eq!(read.columns, one.columns);
        assert!(ItemFile::create(&path, &spec, true).is_err(), "an .npy file has one field");
    }
}
