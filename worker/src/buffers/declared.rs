//! Buffers that the manifest declares: the primary of the first partition creates them.

use super::Buffers;
use super::manage::HOME;
use crate::shared::Shared;
use engram_api::{DeclaredBuffer, DeclaredLimiter, DeclaredRemover, DeclaredSampler, ManifestEnum as _, SamplerKind};
use engram_client::{BufferSpec, DType, Field, RateLimit, Remover, SampleBy};
use engram_proto::v1::{self, Problem};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Interval of checks that the declared buffers exist. A check reads the definitions of one local partition; nothing announces that another client
/// has dropped a buffer.
const CHECK: Duration = Duration::from_secs(1);
/// Exponents of a declared prioritized sampler that names none.
const ALPHA: f64 = 0.6;
const BETA: f64 = 0.4;

/// Converts a declaration to settings.
pub(crate) fn spec_of(declared: &DeclaredBuffer) -> Result<BufferSpec, String> {
    let field = |field: &engram_api::DeclaredField| {
        let dtype = DType::from_name(field.dtype.as_str()).ok_or_else(|| format!("unknown dtype {:?}", field.dtype))?;
        Ok(Field { name: field.name.clone(), dtype, shape: field.shape.clone(), jagged: field.jagged })
    };
    let fields = declared.fields.iter().map(field).collect::<Result<_, String>>()?;
    Ok(BufferSpec {
        remover: match declared.remover {
            DeclaredRemover::Fifo => Remover::Fifo,
            DeclaredRemover::Lifo => Remover::Lifo,
            DeclaredRemover::LowestPriority => Remover::LowestPriority,
            DeclaredRemover::HighestPriority => Remover::HighestPriority,
            DeclaredRemover::Refuse => Remover::Refuse,
        },
        max_reuse: declared.max_reuse.unwrap_or(0),
        max_age: declared.max_age,
        max_priority: declared.max_priority,
        initial_priority: declared.initial_priority,
        limiter: declared.limiter.as_ref().map(limiter),
        sampler: declared.sampler.as_ref().map(sampler),
        ..BufferSpec::new(&declared.name, fields, declared.capacity)
    })
}

fn limiter(declared: &DeclaredLimiter) -> RateLimit {
    let DeclaredLimiter { samples_per_insert, min_size, tolerance } = *declared;
    let middle = min_size as f64 * samples_per_insert;
    RateLimit { samples_per_insert, min_size, min_diff: middle - tolerance, max_diff: middle + tolerance }
}

fn sampler(declared: &DeclaredSampler) -> SampleBy {
    let length = declared.length.unwrap_or(1);
    match declared.kind {
        SamplerKind::Prioritized => {
            SampleBy::Prioritized { alpha: declared.alpha.unwrap_or(ALPHA), beta: declared.beta.unwrap_or(BETA) }
        }
        SamplerKind::Uniform => SampleBy::Uniform,
        SamplerKind::Fifo => SampleBy::Fifo,
        SamplerKind::Lifo => SampleBy::Lifo,
        SamplerKind::Slices => SampleBy::Slices { length },
        SamplerKind::Groups => SampleBy::Groups { size: length },
    }
}

/// Creates the declared buffers as long as this worker is primary of the first partition, and creates them again when they were dropped.
pub(crate) async fn follow_declarations(shared: Arc<Shared>) {
    let buffers = Buffers::of_cluster(&shared);
    // Buffers whose creation has ended while this worker is primary, and refusals that were logged.
    let (mut created, mut logged) = (BTreeSet::new(), BTreeMap::new());
    while !shared.lifecycle.is_stopping() {
        if shared.served().contains(&HOME) {
            let refused = buffers.create_missing(&mut created).await;
            for (name, problem) in &refused {
                if logged.insert(name.clone(), problem.clone()).as_ref() != Some(problem) {
                    tracing::warn!(buffer = name, problem, "failed to create a buffer of spec.buffers");
                }
            }
            shared.metrics.buffers.declaration_problems.set(refused.len() as i64);
        } else {
            created.clear();
            shared.metrics.buffers.declaration_problems.set(0);
        }
        sleep(CHECK).await;
    }
}

impl Buffers {
    /// Creates the declared buffers that do not exist; returns those that were refused, with the reason.
    async fn create_missing(&self, created: &mut BTreeSet<String>) -> BTreeMap<String, String> {
        let existing = self.definitions_at_home().await.unwrap_or_default();
        let mut refused = BTreeMap::new();
        for declared in &self.shared.setup.options.spec.buffers {
            let name = &declared.name;
            if existing.contains_key(name) && created.contains(name) {
                continue;
            }
            match self.create_declared(declared).await {
                Ok(()) => {
                    tracing::info!(buffer = name, "created or confirmed a buffer of spec.buffers");
                    created.insert(name.clone());
                }
                Err(text) => {
                    refused.insert(name.clone(), text);
                }
            }
        }
        refused
    }

    async fn create_declared(&self, declared: &DeclaredBuffer) -> Result<(), String> {
        let spec = spec_of(declared)?;
        self.create(Some(spec.to_wire())).await.map(|_| ()).map_err(|problem| problem.message)
    }

    /// Returns the definitions in the first partition, by name.
    async fn definitions_at_home(&self) -> Result<BTreeMap<String, Vec<u8>>, Problem> {
        let read = self.shared.engine.read(|store| {
            let ledger = store.ledger(HOME)?;
            Some(ledger.buffers.iter().map(|(_, buffer)| (buffer.name.clone(), buffer.definition.clone())).collect())
        });
        Ok(read.await?.unwrap_or_default())
    }

    /// Returns the declared buffers that do not exist as declared.
    pub(crate) fn declaration_problems(&self, existing: &[v1::DescribeBufferResponse]) -> Vec<v1::DeclarationProblem> {
        let problem = |declared: &DeclaredBuffer| {
            let found = existing.iter().filter_map(|it| it.spec.as_ref()).find(|spec| spec.name == declared.name);
            let problem = difference(declared, found)?;
            Some(v1::DeclarationProblem { buffer: declared.name.clone(), problem })
        };
        self.shared.setup.options.spec.buffers.iter().filter_map(problem).collect()
    }
}

/// Returns how a buffer differs from its declaration.
fn difference(declared: &DeclaredBuffer, found: Option<&v1::BufferSpec>) -> Option<String> {
    let wanted = match spec_of(declared) {
        Ok(wanted) => wanted,
        Err(text) => return Some(text),
    };
    if let Err(error) = wanted.check() {
        return Some(error.to_string());
    }
    let Some(found) = found else { return Some("does not exist yet".to_owned()) };
    let existing = BufferSpec::from_wire(found.clone()).and_then(|existing| existing.expect(&wanted));
    let error = existing.err()?;
    Some(format!("{error}; a buffer cannot change: declare it as it is, or delete it first"))
}

#[cfg(test)]
mod tests {
    use super::super::catalog::Definition;
    use super::*;
    use engram_memory::Group;

    fn declared(more: &str) -> DeclaredBuffer {
        let text = format!(
            r#"{{ "name": "train", "capacity": 100,
                "fields": [{{ "name": "obs", "dtype": "float32", "shape": [2, 3] }},
                           {{ "name": "tokens", "dtype": "bfloat16", "jagged": true }}]{more} }}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn declaration_becomes_the_settings_of_a_buffer() {
        let spec = spec_of(&declared(
            r#", "sampler": { "kind": "Prioritized", "beta": 0.5 }, "remover": "Refuse", "maxAge": 2,
                "limiter": { "samplesPerInsert": 4, "minSize": 10, "tolerance": 8 }"#,
        ));
        let spec = spec.unwrap();
        spec.check().unwrap();
        assert_eq!(spec.sampler, Some(SampleBy::Prioritized { alpha: 0.6, beta: 0.5 }));
        assert_eq!((spec.remover, spec.max_age, spec.max_reuse), (Remover::Refuse, Some(2), 0));
        let limiter = spec.limiter.unwrap();
        assert_eq!((limiter.min_diff, limiter.max_diff), (32.0, 48.0));
        assert_eq!(
            (spec.fields[0].describe(), spec.fields[1].describe()),
            ("float32[2, 3]".into(), "bfloat16[*]".into())
        );
        for dtype in engram_api::ElementType::ALL {
            assert!(DType::from_name(dtype.as_str()).is_some(), "{dtype:?}");
        }
        // What a partition stores is read back as the same settings.
        let definition = Definition::parse("train", Group(1), &Definition::encode(&spec, 3)).unwrap();
        assert_eq!((definition.spec, definition.partitions), (spec, 3));
    }

    #[test]
    fn changed_declaration_is_named() {
        let existing = spec_of(&declared("")).unwrap().to_wire();
        assert_eq!(difference(&declared(""), Some(&existing)), None);
        assert_eq!(difference(&declared(""), None).unwrap(), "does not exist yet");
        let changed = difference(&declared(r#", "maxReuse": 3"#), Some(&existing)).unwrap();
        assert!(changed.contains("max_reuse: the buffer has 0, the request declares 3"), "{changed}");
    }
}
