//! A bounded cache of solved problems, least recently used out first.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Error, in_range};
use crate::trajectory::Problem;

const MAGIC: &[u8; 8] = b"GEOSOL01";
/// Bytes of one encoded entry: metric version, three coordinates, four numbers.
const ENTRY: usize = 16 + 24 + 32;

/// Features of one solved problem.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CachedSolution {
    /// Signed length.
    pub displacement: f64,
    /// Mean of c over time.
    pub mean: f64,
    /// Largest |c'|.
    pub velocity: f64,
    /// c'(0).
    pub initial_velocity: f64,
}

/// Metric version, and the bits of start, end and wavelength.
type Key = (u128, [u64; 3]);

/// A cache of [`CachedSolution`]s by metric version and problem, which any number of threads may use. A change of one weight
/// is a miss. There are no approximate hits.
#[derive(Debug)]
pub struct SolutionCache {
    capacity: usize,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    solutions: HashMap<Key, (u64, CachedSolution)>,
    /// Keys by the time of their last use.
    order: BTreeMap<u64, Key>,
    uses: u64,
    hits: u64,
    misses: u64,
}

impl Entries {
    fn get(&mut self, key: Key) -> Option<CachedSolution> {
        let Some((used, solution)) = self.solutions.get_mut(&key) else {
            self.misses += 1;
            return None;
        };
        self.hits += 1;
        self.order.remove(used);
        self.uses += 1;
        *used = self.uses;
        self.order.insert(self.uses, key);
        Some(*solution)
    }

    fn insert(&mut self, key: Key, solution: CachedSolution, capacity: usize) {
        self.uses += 1;
        if let Some((used, _)) = self.solutions.insert(key, (self.uses, solution)) {
            self.order.remove(&used);
        }
        self.order.insert(self.uses, key);
        if self.solutions.len() > capacity
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.solutions.remove(&oldest);
        }
    }
}

fn key(version: u128, problem: Problem) -> Key {
    // +0 and -0 are one coordinate.
    (version, [problem.start, problem.end, problem.wavelength].map(|x| (x + 0.0).to_bits()))
}

impl SolutionCache {
    /// An empty cache of at most `capacity` (1 to 16 Mi) solutions, each of about 200 bytes in memory.
    ///
    /// # Errors
    /// [`Error::Range`] for a capacity out of range.
    pub fn new(capacity: usize) -> Result<Self, Error> {
        in_range("capacity", capacity as f64, 1.0, (1u64 << 24) as f64, "1 to 16,777,216")?;
        Ok(Self { capacity, entries: Mutex::default() })
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The solution of `problem` for the metric of `version`; counts a hit or a miss.
    pub fn get(&self, version: u128, problem: Problem) -> Option<CachedSolution> {
        self.entries().get(key(version, problem))
    }

    /// Stores a solution; drops the least recently used one if the cache is full.
    pub fn insert(&self, version: u128, problem: Problem, solution: CachedSolution) {
        self.entries().insert(key(version, problem), solution, self.capacity);
    }

    /// Number of solutions.
    pub fn len(&self) -> usize {
        self.entries().solutions.len()
    }

    /// Whether it holds no solution.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lookups that found a solution, and lookups that did not.
    pub fn hits_and_misses(&self) -> (u64, u64) {
        let entries = self.entries();
        (entries.hits, entries.misses)
    }

    /// All solutions as bytes, least recently used first, with a checksum. Counters are not kept.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        let entries = self.entries();
        for key in entries.order.values() {
            let (_, s) = entries.solutions[key];
            out.extend(key.0.to_le_bytes());
            key.1.iter().for_each(|bits| out.extend(bits.to_le_bytes()));
            for x in [s.displacement, s.mean, s.velocity, s.initial_velocity] {
                out.extend(x.to_bits().to_le_bytes());
            }
        }
        drop(entries);
        out.extend(xxh3_128(&out).to_le_bytes());
        out
    }

    /// Decodes [`encode`](Self::encode) into a cache of `capacity`, keeping the most recently used solutions.
    ///
    /// # Errors
    /// [`Error::Encoding`] if the bytes are damaged, [`Error::Range`] for a capacity out of range.
    pub fn decode(bytes: &[u8], capacity: usize) -> Result<Self, Error> {
        let refuse = |problem: &str| Err(Error::Encoding { object: "solution cache", problem: problem.to_owned() });
        if bytes.len() < 24 || !(bytes.len() - 24).is_multiple_of(ENTRY) || !bytes.starts_with(MAGIC) {
            return refuse("length or magic number is wrong");
        }
        let (body, checksum) = bytes.split_at(bytes.len() - 16);
        if xxh3_128(body).to_le_bytes() != checksum {
            return refuse("checksum mismatch");
        }
        let cache = Self::new(capacity)?;
        for entry in body[8..].chunks_exact(ENTRY) {
            let version = u128::from_le_bytes(entry[..16].try_into().expect("16 bytes"));
            let number = |k: usize| {
                let at = 16 + 8 * k;
                f64::from_bits(u64::from_le_bytes(entry[at..at + 8].try_into().expect("8 bytes")))
            };
            let problem = Problem { start: number(0), end: number(1), wavelength: number(2) };
            let solution = CachedSolution {
                displacement: number(3),
                mean: number(4),
                velocity: number(5),
                initial_velocity: number(6),
            };
            cache.insert(version, problem, solution);
        }
        Ok(cache)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::{Metric, MetricNetwork};

    fn problem(start: f64) -> Problem {
        Problem { start, end: 1.0, wavelength: 0.5 }
    }

    fn solution(x: f64) -> CachedSolution {
        CachedSolution { displacement: x, mean: 0.0, velocity: 1.0, initial_velocity: -x }
    }

    #[test]
    fn a_changed_weight_is_a_miss_and_the_least_recently_used_solution_is_dropped() {
        let mut metric = MetricNetwork::xavier(1);
        let version = metric.version();
        let cache = SolutionCache::new(2).unwrap();
        cache.insert(version, problem(0.0), solution(1.0));
        cache.insert(version, problem(0.1), solution(2.0));
        assert_eq!(cache.get(version, problem(-0.0)), Some(solution(1.0)));
        cache.insert(version, problem(0.2), solution(3.0));
        assert_eq!((cache.len(), cache.get(version, problem(0.1))), (2, None));
        let weight = &mut metric.parameters_mut()[100];
        *weight = weight.next_up();
        assert_eq!(cache.get(metric.version(), problem(0.0)), None);
        assert_eq!(cache.hits_and_misses(), (1, 2));
    }

    #[test]
    fn decoded_caches_hold_the_same_solutions_in_the_same_order() {
        let cache = SolutionCache::new(3).unwrap();
        (0..4).for_each(|i| cache.insert(u128::MAX - 7, problem(0.1 * f64::from(i)), solution(f64::from(i))));
        let mut bytes = cache.encode();
        assert_eq!(SolutionCache::decode(&bytes, 3).unwrap().encode(), bytes);
        let smaller = SolutionCache::decode(&bytes, 1).unwrap();
        assert_eq!(smaller.get(u128::MAX - 7, problem(0.1 * 3.0)), Some(solution(3.0)));
        bytes[40] ^= 1;
        assert!(matches!(SolutionCache::decode(&bytes, 3), Err(Error::Encoding { .. })));
    }

    #[test]
    fn threads_share_a_bounded_cache() {
        let cache = SolutionCache::new(50).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4_u32 {
                let cache = &cache;
                scope.spawn(move || {
                    for i in 0..500_u32 {
                        let x = f64::from(i.wrapping_mul(31 + thread) % 100) / 100.0;
                        match cache.get(7, problem(x)) {
                            Some(found) => assert_eq!(found, solution(x)),
                            None => cache.insert(7, problem(x), solution(x)),
                        }
                    }
                });
            }
        });
        let (hits, misses) = cache.hits_and_misses();
        assert_eq!((hits + misses, cache.len()), (2_000, 50));
    }
}
