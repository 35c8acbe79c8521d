//! Which memories a command is about: keys as they are, ids by `--id`. Any key can be written, none is mistaken for an id.

use crate::error::problem;
use engram_api::Code;
use engram_memory::{Blobs, MAX_KEY_BYTES, MemoryId, key_id};

/// Memories by key or id.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Selection {
    /// Keys of memories
    #[arg(value_name = "KEY")]
    pub(crate) keys: Vec<String>,
    /// Ids of memories, after the keys
    #[arg(long = "id", value_name = "N,..", value_delimiter = ',')]
    pub(crate) ids: Vec<u64>,
}

impl Selection {
    pub(crate) const fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.ids.is_empty()
    }

    /// The ids: those of the keys, then those given, in the order of the command line.
    ///
    /// # Errors
    /// No memory is named, or a key is too long or empty.
    pub(crate) fn ids(&self) -> anyhow::Result<Vec<MemoryId>> {
        if self.is_empty() {
            return Err(problem(Code::InvalidValue, "no memory is named; give keys, or ids with --id"));
        }
        if let Some(key) = self.keys.iter().find(|key| key.is_empty() || key.len() > MAX_KEY_BYTES) {
            let message = format!("a key has {} bytes; allowed: 1 to {MAX_KEY_BYTES}", key.len());
            return Err(problem(Code::InvalidValue, message));
        }
        let keys = self.keys.iter().map(|key| key_id(key.as_bytes()));
        Ok(keys.chain(self.ids.iter().copied().map(MemoryId)).collect())
    }

    /// The keys, one per id, empty for those that were given as ids; `None` without keys.
    pub(crate) fn key_column(&self) -> Option<Blobs> {
        let keys = self.keys.iter().map(|key| key.as_bytes().to_vec());
        let none = self.ids.iter().map(|_| Vec::new());
        (!self.keys.is_empty()).then(|| keys.chain(none).collect())
    }

    /// What the user called a memory.
    pub(crate) fn name(&self, id: MemoryId) -> String {
        let key = self.keys.iter().find(|key| key_id(key.as_bytes()) == id);
        key.cloned().unwrap_or_else(|| format!("id {id}"))
    }
}
