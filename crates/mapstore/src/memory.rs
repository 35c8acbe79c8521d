//! The map in memory.

use crate::file::{overridden, successor};
use crate::{Error, Goal, MapOverride, MapStore};
use engram_cluster::PartitionMap;
use parking_lot::{Mutex, MutexGuard};

/// A map in the memory of this process, gone with it: for simulations and tests.
#[derive(Debug, Default)]
pub struct MemoryStore {
    map: Mutex<Option<PartitionMap>>,
    goal: Mutex<Goal>,
    orders: Mutex<Vec<MapOverride>>,
}

impl MapStore for MemoryStore {
    fn get(&self) -> Result<Option<PartitionMap>, Error> {
        Ok(held(&self.map).clone())
    }

    fn compare_and_swap(&self, expected: Option<u64>, map: PartitionMap) -> Result<PartitionMap, Error> {
        let mut current = held(&self.map);
        let next = successor(current.as_ref(), expected, map)?;
        Ok(current.insert(next).clone())
    }

    fn goal(&self) -> Result<Goal, Error> {
        Ok(held(&self.goal).clone())
    }

    fn set_goal(&self, goal: &Goal) -> Result<(), Error> {
        held(&self.goal).clone_from(goal);
        Ok(())
    }

    fn overrides(&self) -> Result<Vec<MapOverride>, Error> {
        Ok(held(&self.orders).clone())
    }

    fn override_map(
        &self,
        expected: Option<u64>,
        map: PartitionMap,
        order: MapOverride,
    ) -> Result<PartitionMap, Error> {
        let mut current = held(&self.map);
        let next = overridden(current.as_ref(), expected, map)?;
        held(&self.orders).push(MapOverride { version: next.version, ..order });
        Ok(current.insert(next).clone())
    }

    fn may_wait(&self) -> bool {
        false
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
