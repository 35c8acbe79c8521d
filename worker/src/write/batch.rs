//! Splits memories into wire batches that stay below the message limits.

use engram_memory::{FeatureShape, FeatureType};
use engram_proto::v1;
use engram_store::{Memory, PayloadPart};
use half::f16;

/// Maximum number of rows in a batch: the reader processes one batch while the next ones are read.
const BATCH_ROWS: usize = 4_096;
/// A batch is closed once it has this many bytes. An answer that is not read holds a few batches, and one more row of the maximum
/// size still fits into a message.
const BATCH_BYTES: usize = 512 << 10;
/// Rows that are read at once while a page is filled: a page may exceed its size by them.
const MAX_CHUNK_ROWS: usize = 1_024;
/// The same with payloads, of at most 4 MiB each.
const MAX_PAYLOAD_ROWS: usize = 3;
/// Size of a row without its optional columns and its key.
const ROW_BYTES: usize = 21;

/// Optional columns of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Columns {
    pub(crate) features: bool,
    pub(crate) payloads: bool,
}

impl Columns {
    /// Returns the part of payloads on disk to read.
    pub(crate) const fn payload_part(self) -> PayloadPart {
        if self.payloads { PayloadPart::All } else { PayloadPart::None }
    }

    /// Returns how many rows to read at once: with columns of the maximum size, about as many as fit into a batch. Items of buffers may be
    /// larger; with payloads, few rows are read at once.
    pub(crate) const fn chunk_rows(self, shape: FeatureShape) -> usize {
        let features = if self.features { 4 * shape.dimension as usize } else { 0 };
        let payload = if self.payloads { engram_memory::MAX_PAYLOAD_BYTES } else { 0 };
        let rows = BATCH_BYTES / (ROW_BYTES + engram_memory::MAX_KEY_BYTES + features + payload);
        let most = if self.payloads { MAX_PAYLOAD_ROWS } else { MAX_CHUNK_ROWS };
        if rows > most { most } else { rows }
    }
}

/// Builds batches row by row.
pub(crate) struct Batches {
    columns: Columns,
    shape: FeatureShape,
    open: v1::MemoryBatch,
    groups: Vec<u8>,
    keys: engram_memory::Blobs,
    payloads: engram_memory::Blobs,
    bytes: usize,
    full: Vec<v1::MemoryBatch>,
}

impl Batches {
    pub(crate) fn new(columns: Columns, shape: FeatureShape) -> Self {
        Self {
            columns,
            shape,
            open: v1::MemoryBatch::default(),
            groups: Vec::new(),
            keys: engram_memory::Blobs::default(),
            payloads: engram_memory::Blobs::default(),
            bytes: 0,
            full: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, memory: &Memory<'_>) {
        self.open.ids.push(memory.id.0);
        self.open.weight_units.push(memory.weight.units());
        self.groups.push(memory.group.0);
        self.keys.push(memory.key);
        self.bytes += ROW_BYTES + memory.key.len();
        if self.columns.features {
            push_floats(&mut self.open.features, memory.features, self.shape.dtype);
            self.bytes += 4 * self.shape.dimension as usize;
        }
        if self.columns.payloads {
            self.payloads.push(memory.payload);
            self.bytes += 4 + memory.payload.len();
        }
        if self.open.ids.len() >= BATCH_ROWS || self.bytes >= BATCH_BYTES {
            self.close();
        }
    }

    pub(crate) fn missing(&mut self, id: u64) {
        self.open.missing.push(id);
        self.bytes += 8;
        if self.bytes >= BATCH_BYTES {
            self.close();
        }
    }

    /// Returns whether a page is full: it has a whole batch.
    pub(crate) const fn is_page(&self) -> bool {
        !self.full.is_empty()
    }

    fn close(&mut self) {
        self.bytes = 0;
        let mut batch = std::mem::take(&mut self.open);
        batch.groups = std::mem::take(&mut self.groups).into();
        batch.keys = column(&std::mem::take(&mut self.keys));
        batch.payloads = column(&std::mem::take(&mut self.payloads));
        self.full.push(batch);
    }

    /// Returns the batches: at least one, which may be empty.
    pub(crate) fn finish(mut self) -> Vec<v1::MemoryBatch> {
        if !self.open.ids.is_empty() || !self.open.missing.is_empty() || self.full.is_empty() {
            self.close();
        }
        self.full
    }
}

/// Returns a column, or `None` if all its values are empty.
fn column(blobs: &engram_memory::Blobs) -> Option<v1::Blobs> {
    (!blobs.bytes().is_empty()).then(|| v1::Blobs::from(blobs))
}

fn push_floats(to: &mut Vec<f32>, bits: &[u8], dtype: FeatureType) {
    match dtype {
        FeatureType::F16 => {
            to.extend(bits.chunks_exact(2).map(|bytes| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()));
        }
        FeatureType::F32 => {
            to.extend(bits.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])));
        }
    }
}

/// Builds a batch from rows that another worker returned.
pub(crate) fn of_rows(rows: &[engram_client::Memory]) -> v1::MemoryBatch {
    v1::MemoryBatch {
        ids: rows.iter().map(|row| row.id.0).collect(),
        weight_units: rows.iter().map(|row| row.weight.units()).collect(),
        groups: rows.iter().map(|row| row.group.0).collect::<Vec<u8>>().into(),
        keys: v1::Blobs::column(rows.iter().map(|row| row.key.as_deref().unwrap_or_default())),
        features: rows.iter().flat_map(|row| row.features.iter().copied()).collect(),
        payloads: v1::Blobs::column(rows.iter().map(|row| row.payload.clone())),
        missing: Vec::new(),
        versions: Vec::new(),
    }
}
