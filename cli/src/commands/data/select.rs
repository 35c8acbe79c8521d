//! Selection of memories: keys as positional arguments, ids by `--id`, so that no key is mistaken for an id.

use crate::error::problem;
use engram_api::Code;
use engram_memory::{Blobs, MAX_KEY_BYTES, MemoryId, key_id};

/// Memories by key or id.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Selection {
    /// Keys of memories
    #[arg(value_name = "KEY")]
    pub(crate) keys: Vec<String>,
    /// Ids of memories
    #[arg(long = "id", value_name = "N,..", value_delimiter = ',')]
    pub(crate) ids: Vec<u64>,
}

impl Selection {
    pub(crate) const fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.ids.is_empty()
    }

    /// Returns the ids of the keys, then the given ids, in the order of the command line.
    ///
    /// # Errors
    /// The selection is empty, or a key is empty or too long.
    pub(crate) fn ids(&self) -> anyhow::Result<Vec<MemoryId>> {
        if self.is_empty() {
            return Err(problem(Code::InvalidValue, "no memory is given; give keys, or ids with --id"));
        }
        if let Some(key) = self.keys.iter().find(|key| key.is_empty() || key.len() > MAX_KEY_BYTES) {
            let message = format!("key has {} bytes; allowed: 1 to {MAX_KEY_BYTES}", key.len());
            return Err(problem(Code::InvalidValue, message));
        }
        let keys = self.keys.iter().map(|key| key_id(key.as_bytes()));
        Ok(keys.chain(self.ids.iter().copied().map(MemoryId)).collect())
    }

    /// Returns one key per id, empty for memories given by id; `None` without keys.
    pub(crate) fn key_column(&self) -> Option<Blobs> {
        let keys = self.keys.iter().map(|key| key.as_bytes().to_vec());
        let none = self.ids.iter().map(|_| Vec::new());
        (!self.keys.is_empty()).then(|| keys.chain(none).collect())
    }

    /// Returns the key of a memory as given by the user, else its id.
    pub(crate) fn name(&self, id: MemoryId) -> String {
        let key = self.keys.iter().find(|key| key_id(key.as_bytes()) == id);
        key.cloned().unwrap_or_else(|| format!("id {id}"))
    }
}
