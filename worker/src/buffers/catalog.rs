//! Definitions of buffers, parsed once per worker.

use engram_client::BufferSpec;
use engram_memory::buffer::BufferRef;
use engram_memory::{Group, PartitionId};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_replay::schema::Schema;
use engram_store::{Partitions, Sampler};
use parking_lot::{Mutex, RwLock};
use prost::Message as _;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// Tables of priorities kept; a learner uses one exponent.
const MAX_SAMPLERS: usize = 16;
/// How long appends are admitted after a sample lacked items: 20 times the interval in which a waiting sample checks again.
const LACK_VALID: Duration = Duration::from_secs(1);

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
    /// Whether the partitions count its samples.
    pub(crate) const fn counts_samples(&self) -> bool {
        self.spec.max_reuse > 0 || self.spec.limiter.is_some()
    }

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

/// Definitions of the buffers of one message, by name.
pub(crate) type Definitions = BTreeMap<String, Arc<Definition>>;

/// Definitions by name, and tables of priorities by exponent.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    definitions: RwLock<Cached>,
    /// When a sample of a buffer last lacked items.
    lacks: Mutex<HashMap<String, Instant>>,
    samplers: RwLock<HashMap<u32, Sampler>>,
    /// Held while a batch is drawn whose uses are limited.
    pub(crate) one_batch: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Cached {
    by_name: HashMap<String, Arc<Definition>>,
    /// Number of changes: a definition that was read before a change is not cached after it.
    changes: u64,
}

impl Catalog {
    pub(crate) fn get(&self, name: &str) -> Option<Arc<Definition>> {
        self.definitions.read().by_name.get(name).cloned()
    }

    /// Returns the number of changes so far. Read it before a definition that is to be cached.
    pub(crate) fn changes(&self) -> u64 {
        self.definitions.read().changes
    }

    /// Caches a definition, unless a definition has changed since there were `changes`.
    pub(crate) fn insert(&self, name: &str, definition: Definition, changes: u64) -> Arc<Definition> {
        let definition = Arc::new(definition);
        let mut definitions = self.definitions.write();
        if definitions.changes == changes {
            definitions.by_name.insert(name.to_owned(), Arc::clone(&definition));
        }
        definition
    }

    /// Forgets a definition that may be outdated: call it after the change.
    pub(crate) fn forget(&self, name: &str) {
        let mut definitions = self.definitions.write();
        definitions.by_name.remove(name);
        definitions.changes += 1;
        drop(definitions);
        self.lacks.lock().remove(name);
    }

    /// Records whether the last sample of a buffer with a rate limiter lacked items.
    pub(crate) fn set_lacks_items(&self, name: &str, lacks: bool) {
        let mut all = self.lacks.lock();
        if lacks {
            all.insert(name.to_owned(), Instant::now());
        } else {
            all.remove(name);
        }
    }

    /// Whether a sample of a buffer waits for items here, or lacked them a moment ago.
    pub(crate) fn lacks_items(&self, name: &str) -> bool {
        self.lacks.lock().get(name).is_some_and(|since| since.elapsed() < LACK_VALID)
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

/// Returns the definition of a buffer in the partitions served here; without any, in the replicas, which may lag behind.
pub(crate) fn find(store: &Partitions, served: &[PartitionId], name: &str) -> Option<(Group, Vec<u8>)> {
    let replicas = || if served.is_empty() { store.iter().collect() } else { Vec::new() };
    served.iter().copied().chain(replicas()).find_map(|partition| {
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
    use engram_client::{DType, Field};

    fn definition(field: &str) -> Definition {
        let field = Field { name: field.into(), dtype: DType::Float32, shape: vec![], jagged: false };
        let spec = BufferSpec::new("train", vec![field], 10);
        Definition::parse("train", Group(3), &Definition::encode(&spec, 1)).unwrap()
    }

    #[test]
    fn definition_read_before_a_change_is_not_cached_after_it() {
        let catalog = Catalog::default();
        let changes = catalog.changes();
        catalog.forget("train");
        catalog.insert("train", definition("old"), changes);
        assert!(catalog.get("train").is_none());
        catalog.insert("train", definition("new"), catalog.changes());
        assert_eq!(catalog.get("train").unwrap().spec.fields[0].name, "new");
    }

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
