//! A map store that fails in every way a store may.

use engram_cluster::PartitionMap;
use engram_mapstore::{Error, Goal, MapOverride, MapStore};
use engram_memory::mix64;
use parking_lot::{Mutex, MutexGuard};
use std::io;
use std::path::PathBuf;

/// Fault rates, each in thousandths of the operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultRates {
    /// Another writer writes first, without changing any entry.
    pub conflict: u32,
    /// The change is applied, but its writer receives an error.
    pub lost_reply: u32,
    /// The writer receives an error; the change is applied at the next operation, if it still fits.
    pub late: u32,
    /// The store does not respond, for a few operations.
    pub outage: u32,
    /// A map that has been replaced is returned.
    pub stale_read: u32,
}

impl FaultRates {
    /// All faults, often.
    pub const ALL: Self = Self { conflict: 100, lost_reply: 100, late: 100, outage: 20, stale_read: 100 };
}

/// Forwards operations to another store, or fails them, deterministically by a seed: the same operations in the same
/// order fail in the same way.
#[derive(Debug)]
pub struct FaultyMapStore<S> {
    inner: S,
    faults: FaultRates,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    random: u64,
    /// Remaining operations of the outage.
    outage: u32,
    forced_outage: bool,
    before: Option<PartitionMap>,
    late: Option<(Option<u64>, PartitionMap)>,
}

/// Longest outage, in operations.
const MAX_OUTAGE: u64 = 8;

impl<S: MapStore> FaultyMapStore<S> {
    /// Creates a store that fails operations on `inner` according to `seed`.
    pub const fn new(inner: S, seed: u64, faults: FaultRates) -> Self {
        let state = State { random: seed, outage: 0, forced_outage: false, before: None, late: None };
        Self { inner, faults, state: Mutex::new(state) }
    }

    /// Returns the wrapped store, which never fails.
    pub const fn inner(&self) -> &S {
        &self.inner
    }

    /// Starts or ends an outage.
    pub fn set_outage(&self, outage: bool) {
        held(&self.state).forced_outage = outage;
    }

    /// Starts every operation: a late change arrives, an outage starts or continues.
    fn begin(&self, state: &mut State) -> Result<(), Error> {
        if let Some((expected, map)) = state.late.take() {
            // Its writer no longer waits for a result.
            let _ = self.inner.compare_and_swap(expected, map);
        }
        if state.outage == 0 && state.happens(self.faults.outage) {
            state.outage = 1 + (state.draw() % MAX_OUTAGE) as u32;
        }
        if state.outage > 0 || state.forced_outage {
            state.outage = state.outage.saturating_sub(1);
            return Err(failed());
        }
        Ok(())
    }
}

impl<S: MapStore> MapStore for FaultyMapStore<S> {
    fn get(&self) -> Result<Option<PartitionMap>, Error> {
        let mut state = held(&self.state);
        self.begin(&mut state)?;
        let stale = state.before.clone().filter(|_| state.happens(self.faults.stale_read));
        if stale.is_some() { Ok(stale) } else { self.inner.get() }
    }

    fn compare_and_swap(&self, expected: Option<u64>, map: PartitionMap) -> Result<PartitionMap, Error> {
        let mut state = held(&self.state);
        self.begin(&mut state)?;
        let current = self.inner.get()?;
        if let Some(current) = current.clone().filter(|_| state.happens(self.faults.conflict)) {
            self.inner.compare_and_swap(Some(current.version), current)?;
        }
        if state.happens(self.faults.late) {
            state.late = Some((expected, map));
            return Err(failed());
        }
        let written = self.inner.compare_and_swap(expected, map)?;
        state.before = current;
        if state.happens(self.faults.lost_reply) { Err(failed()) } else { Ok(written) }
    }

    fn goal(&self) -> Result<Goal, Error> {
        self.begin(&mut held(&self.state))?;
        self.inner.goal()
    }

    fn set_goal(&self, goal: &Goal) -> Result<(), Error> {
        self.begin(&mut held(&self.state))?;
        self.inner.set_goal(goal)
    }

    fn overrides(&self) -> Result<Vec<MapOverride>, Error> {
        self.begin(&mut held(&self.state))?;
        self.inner.overrides()
    }

    fn override_map(
        &self,
        expected: Option<u64>,
        map: PartitionMap,
        order: MapOverride,
    ) -> Result<PartitionMap, Error> {
        self.begin(&mut held(&self.state))?;
        self.inner.override_map(expected, map, order)
    }

    fn may_wait(&self) -> bool {
        self.inner.may_wait()
    }
}

impl State {
    const fn draw(&mut self) -> u64 {
        self.random = mix64(self.random.wrapping_add(0x9e37_79b9_7f4a_7c15));
        self.random
    }

    const fn happens(&mut self, permille: u32) -> bool {
        self.draw() % 1_000 < permille as u64
    }
}

fn failed() -> Error {
    let source = io::Error::new(io::ErrorKind::TimedOut, "the map store does not respond");
    Error::Io { action: "reach", path: PathBuf::from("map"), source }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::Entry;
    use engram_mapstore::MemoryStore;
    use engram_memory::{ClusterId, Incarnation, Member, Ordinal, StoreId, Term};

    fn map(term: u64) -> PartitionMap {
        let member = Member { ordinal: Ordinal(0), store: StoreId(1), incarnation: Incarnation(term) };
        PartitionMap { cluster: ClusterId(7), version: 0, partitions: vec![Entry::solo(Term(term), member)] }
    }

    /// Raises the term ten times through every kind of fault; returns every response.
    fn raise_terms(seed: u64) -> Vec<String> {
        let store = FaultyMapStore::new(MemoryStore::default(), seed, FaultRates::ALL);
        store.inner().compare_and_swap(None, map(1)).unwrap();
        let mut answers = Vec::new();
        for _ in 0..1_000 {
            let read = store.get();
            answers.push(format!("{:?}", read.as_ref().map(|map| map.as_ref().map(|map| map.version)).ok()));
            let Ok(Some(current)) = read else { continue };
            let term = current.partitions[0].term.0;
            if term == 11 {
                break;
            }
            let next = PartitionMap { version: current.version, ..map(term + 1) };
            answers.push(match store.compare_and_swap(Some(current.version), next) {
                Ok(_) => "written".into(),
                Err(Error::Conflict { .. }) => "conflict".into(),
                Err(error) => error.to_string(),
            });
        }
        let last = store.inner().get().unwrap().unwrap();
        assert_eq!(last.partitions[0].term, Term(11), "seed {seed}: retrying after a new read succeeds");
        answers
    }

    #[test]
    fn every_kind_of_fault_happens_and_a_seed_reproduces_it() {
        let all: Vec<_> = (0..50).flat_map(raise_terms).collect();
        for kind in ["written", "conflict", "failed to reach map"] {
            assert!(all.iter().any(|answer| answer == kind), "{kind}");
        }
        assert_eq!(raise_terms(3), raise_terms(3));
        let lost =
            FaultyMapStore::new(MemoryStore::default(), 1, FaultRates { lost_reply: 1_000, ..FaultRates::default() });
        lost.inner().compare_and_swap(None, map(1)).unwrap();
        let next = PartitionMap { version: 1, ..map(2) };
        assert!(lost.compare_and_swap(Some(1), next).is_err());
        assert_eq!(lost.get().unwrap().unwrap().version, 2, "it was written nevertheless");
        let late = FaultyMapStore::new(MemoryStore::default(), 1, FaultRates { late: 1_000, ..FaultRates::default() });
        late.inner().compare_and_swap(None, map(1)).unwrap();
        let next = PartitionMap { version: 1, ..map(2) };
        assert!(late.compare_and_swap(Some(1), next).is_err());
        assert_eq!(late.inner().get().unwrap().unwrap().version, 1, "not applied yet");
        assert_eq!(late.get().unwrap().unwrap().version, 2, "applied before the next response");
        late.set_outage(true);
        assert!(late.get().is_err() && late.goal().is_err());
    }
}
