//! Definitions of buffers, parsed once per worker.

use engram_client::BufferSpec;
use engram_memory::Group;
use engram_memory::buffer::BufferRef;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_replay::schema::Schema;
use engram_store::{Partitions, Sampler};
use parking_lot::RwLock;
use prost::Message as _;
use std::collections::HashMap;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Tables of priorities kept; a learner uses one exponent.
const MAX_SAMPLERS: usize = 16;

/// A buffer as the records of partitions define it.
#[derive(Debug)]
pub(crate) struct Definition {
    pub(crate) buffer: BufferRef,
    pub(crate) spec: BufferSpec,
    pub(crate) schema: Schema,
    /// Number of partitions that it was placed on; 0 = all.
    pub(crate) partitions: u32,
}

impl Definition {
    /// Parses a definition of a partition.
    pub(crate) fn parse(name: &str, group: Group, definition: &[u8]) -> Result<Self, Problem> {
        let read = || {
            let wire = v1::BufferSpec::decode(definition).ok()?;
            let partitions = wire.partitions;
            let spec = BufferSpec::from_wire(wire).ok()?;
            let schema = spec.check().ok()?;
            Some(Self { buffer: reference(group, definition), spec, schema, partitions })
        };
        read().ok_or_else(|| {
            let text = format!(
                "buffer {name:?}: failed to parse its stored definition, which another version wrote; export its items with the version that created \
                 it, run engram buffer delete {name}, and create it again"
            );
            Problem::of(ProblemKind::DataCorruption, text)
        })
    }

    /// Encodes settings of a buffer on this number of partitions as a definition: equal settings have equal bytes.
    pub(crate) fn encode(spec: &BufferSpec, partitions: u32) -> Vec<u8> {
        v1::BufferSpec { partitions, ..spec.to_wire() }.encode_to_vec()
    }
}

/// Definitions by name, and tables of priorities by exponent.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    definitions: RwLock<HashMap<String, Arc<Definition>>>,
    samplers: RwLock<HashMap<u32, Sampler>>,
    /// Held while a batch is drawn whose uses are limited.
    pub(crate) one_batch: tokio::sync::Mutex<()>,
}

impl Catalog {
    pub(crate) fn get(&self, name: &str) -> Option<Arc<Definition>> {
        self.definitions.read().get(name).cloned()
    }

    pub(crate) fn insert(&self, name: &str, definition: Definition) -> Arc<Definition> {
        let definition = Arc::new(definition);
        self.definitions.write().insert(name.to_owned(), Arc::clone(&definition));
        definition
    }

    /// Forgets a definition that may be outdated.
    pub(crate) fn forget(&self, name: &str) {
        self.definitions.write().remove(name);
    }

    /// Returns prioritized sampling with an exponent, at most 2^16.
    pub(crate) fn sampler(&self, exponent: u32) -> Sampler {
        if let Some(sampler) = self.samplers.read().get(&exponent) {
            return sampler.clone();
        }
        let mut samplers = self.samplers.write();
        if samplers.len() >= MAX_SAMPLERS {
            samplers.clear();
        }
        samplers.entry(exponent).or_insert_with(|| Sampler::prioritized(exponent)).clone()
    }
}

/// Returns what identifies a buffer in records: its group and the hash of its definition, whether or not that can be parsed.
pub(crate) fn reference(group: Group, definition: &[u8]) -> BufferRef {
    BufferRef { group, stamp: xxh3_64(definition) }
}

/// Returns the definition of a buffer in any local partition.
pub(crate) fn find(store: &Partitions, name: &str) -> Option<(Group, Vec<u8>)> {
    store.iter().find_map(|partition| {
        let (group, buffer) = store.ledger(partition)?.buffers.find(name)?;
        Some((group, buffer.definition.clone()))
    })
}

/// Returns the problem of a name without a buffer.
pub(crate) fn unknown(name: &str) -> Problem {
    Problem::of(ProblemKind::BufferUnknown, format!("buffer {name:?} does not exist"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definition_of_another_version_is_refused_with_the_way_out() {
        let problem = Definition::parse("train", Group(3), &[0xFF; 8]).unwrap_err();
        assert_eq!(problem.kind(), ProblemKind::DataCorruption);
        assert!(
            problem.message.contains("\"train\"") && problem.message.contains("engram buffer delete train"),
            "{}",
            problem.message
        );
    }
}
