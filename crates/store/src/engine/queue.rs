//! Bounds the calls of the engine that are not answered yet.

use crate::Options;
use engram_memory::{Blobs, BufferCommand, Command, Record, Updates};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes counted per queued call in addition to its columns.
const CALL_BYTES: usize = 256;

/// The queue is full: retry later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the store is overloaded: {bytes} bytes in {calls} calls are in flight")]
pub struct Overload {
    /// Bytes of queued records.
    pub bytes: usize,
    /// Queued calls.
    pub calls: usize,
}

/// Accounting of calls that are not answered yet.
pub(super) struct Queue {
    bytes: AtomicUsize,
    calls: AtomicUsize,
    max_bytes: usize,
    max_calls: usize,
}

/// Capacity taken by one call, released on drop.
pub(super) struct QueueSlot {
    queue: Arc<Queue>,
    bytes: usize,
}

impl Queue {
    pub(super) const fn of(options: &Options) -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
            max_bytes: options.queue_bytes,
            max_calls: options.queue_calls,
        }
    }

    pub(super) fn reserve(self: &Arc<Self>, bytes: usize) -> Result<QueueSlot, Overload> {
        let bytes = bytes + CALL_BYTES;
        let slot = QueueSlot { queue: Arc::clone(self), bytes };
        let bytes_before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let calls_before = self.calls.fetch_add(1, Ordering::Relaxed);
        // A single call always fits: its size is bounded by the caller.
        if calls_before > 0 && (bytes_before + bytes > self.max_bytes || calls_before >= self.max_calls) {
            return Err(Overload { bytes: bytes_before, calls: calls_before });
        }
        Ok(slot)
    }
}

impl Drop for QueueSlot {
    fn drop(&mut self) {
        self.queue.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.queue.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Approximate memory of a record until it is answered: once decoded, once in the log buffer.
pub(super) fn record_bytes(record: &Record) -> usize {
    let strings = |blobs: &Option<Blobs>| blobs.as_ref().map_or(0, |blobs| blobs.bytes().len() + blobs.len() * 4);
    let columns = match &record.command {
        Command::Upsert(upsert) => {
            upsert.ids.len() * 13 + strings(&upsert.keys) + upsert.features.len() + strings(&upsert.payloads)
        }
        Command::Remove { ids } => ids.len() * 8,
        Command::Reinforce(updates) | Command::Epoch { updates, .. } | Command::EpochPart { updates, .. } => {
            match updates {
                Updates::ById { ids, keys, .. } => ids.len() * 12 + strings(keys),
                Updates::ByGroup(groups) => groups.len() * 8,
            }
        }
        Command::Buffer(BufferCommand::Append { weights, payloads, .. }) => weights.len() * 8 + payloads.bytes().len(),
        Command::RunRecord { state, row, .. } => state.len() + row.as_ref().map_or(0, Vec::len),
        _ => 0,
    };
    2 * columns + CALL_BYTES
}
