//! The partition map as this coordinator knows it: what it read and wrote, what workers have seen, and whether it is lost.

use engram_cluster::{Entry, PartitionMap};
use engram_mapstore::MapOverride;
use engram_memory::Ordinal;
use std::collections::BTreeSet;

/// Consecutive reads that find an older map before it counts as a replacement of the newest one: a single read may be
/// stale.
const MAX_OLDER_READS: u32 = 2;
/// Duration of a deletion, from the end of the map to that of the coordinator. The operator stops it within 5 s of the end of the
/// LearnerCluster, which a terminating namespace may delete after the map.
pub(super) const DELETION_MS: u64 = 30_000;

/// The newest known map, and the orders that overrode it.
#[derive(Debug, Default)]
pub(super) struct KnownMap {
    map: Option<PartitionMap>,
    last_failover_ms: Option<u64>,
    /// Why the map is lost, if it is.
    lost: Option<String>,
    /// Since when the map has been missing; `None` once this was logged as an error.
    missing_since_ms: Option<u64>,
    /// Newest map version on any worker's disk.
    seen_version: u64,
    /// Newest map version reported in heartbeats.
    reported_version: u64,
    /// Another writer has changed the map since it was read here.
    is_overtaken: bool,
    /// Consecutive reads that found an older map than the known one.
    older_reads: u32,
    orders: Vec<MapOverride>,
    /// Another writer has changed the map since the orders were read.
    reads_orders: bool,
}

impl KnownMap {
    pub(super) fn new(map: Option<PartitionMap>) -> Self {
        Self { map, ..Self::default() }
    }

    pub(super) const fn map(&self) -> Option<&PartitionMap> {
        self.map.as_ref()
    }

    /// Returns the entries of all partitions; none without a map.
    pub(super) fn entries(&self) -> &[Entry] {
        self.map.as_ref().map_or(&[], |map| &map.partitions)
    }

    fn version(&self) -> u64 {
        self.map.as_ref().map_or(0, |map| map.version)
    }

    /// Returns when a primary was last replaced by failover.
    pub(super) const fn last_failover_ms(&self) -> Option<u64> {
        self.last_failover_ms
    }

    /// Returns why the map is lost, if it is.
    pub(super) fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Returns the orders that overrode the map.
    pub(super) fn orders(&self) -> &[MapOverride] {
        &self.orders
    }

    pub(super) fn set_orders(&mut self, orders: Vec<MapOverride>) {
        (self.orders, self.reads_orders) = (orders, false);
    }

    /// Whether an order may have been written since the orders were read.
    pub(super) const fn reads_orders(&self) -> bool {
        self.reads_orders
    }

    /// Whether another writer has changed the map, or a worker has seen a newer one.
    pub(super) fn is_behind(&self) -> bool {
        let older = |map: &PartitionMap| self.is_overtaken || map.version < self.seen_version;
        self.lost.is_none() && self.map.as_ref().is_some_and(older)
    }

    /// Notes the version of a map on a worker's disk.
    pub(super) fn note_seen(&mut self, version: u64) {
        self.seen_version = self.seen_version.max(version);
    }

    /// Notes the version of the map that a worker has read; returns whether it is newer than any reported before.
    pub(super) fn note_reported(&mut self, version: u64) -> bool {
        let overtakes = version > self.version().max(self.reported_version);
        if overtakes {
            (self.reported_version, self.is_overtaken) = (version, true);
        }
        overtakes
    }

    /// Notes that a worker knows an entry that is newer than the known one.
    pub(super) const fn note_overtaken(&mut self) {
        self.is_overtaken = true;
    }

    /// Marks the map as lost: nothing is written until it is found again or rebuilt.
    pub(super) fn lose(&mut self, why: String) {
        if self.lost.as_ref() != Some(&why) {
            tracing::error!(why, "partition map lost");
            self.lost = Some(why);
        }
    }

    /// Marks the map as lost because it is missing. It is an error only if the cluster is still coordinated after [`DELETION_MS`]: the map
    /// of a deleted cluster or namespace is often gone before its coordinator stops.
    fn lose_missing(&mut self, version: u64, now_ms: u64) {
        let why = format!("the partition map is missing, but workers have seen version {version}");
        if self.lost.as_ref() != Some(&why) {
            tracing::info!(why, "partition map missing; normal while the cluster or its namespace is deleted");
            self.lost = Some(why);
            self.missing_since_ms = Some(now_ms);
        }
    }

    /// Returns why the map is lost if it has been missing for longer than a deletion takes, once.
    pub(super) fn take_overdue_loss(&mut self, now_ms: u64) -> Option<&str> {
        self.missing_since_ms.take_if(|since_ms| now_ms >= *since_ms + DELETION_MS)?;
        self.lost.as_deref()
    }

    /// Returns why the map is lost, if it is: also if there is none, and a worker has seen one.
    pub(super) fn check_loss(&mut self, now_ms: u64) -> Option<&str> {
        if self.map.is_none() && self.seen_version > 0 && self.lost.is_none() {
            self.lose_missing(self.seen_version, now_ms);
        }
        if let Some(why) = self.take_overdue_loss(now_ms) {
            tracing::error!(why, "partition map lost");
        }
        self.lost()
    }

    /// Handles a read of the map. A missing map never counts as one not yet written, nor an older one as the newest. Returns the workers
    /// that it fails over.
    pub(super) fn read(&mut self, map: Option<PartitionMap>, now_ms: u64) -> BTreeSet<Ordinal> {
        self.is_overtaken = false;
        let newest = self.version().max(self.seen_version);
        let version = map.as_ref().map_or(0, |map| map.version);
        if version >= newest {
            (self.lost, self.older_reads) = (None, 0);
            if map != self.map {
                self.reads_orders = true;
                return self.replace(map, now_ms);
            }
            return BTreeSet::new();
        }
        self.older_reads += 1;
        match map {
            None => self.lose_missing(newest, now_ms),
            Some(_) if self.older_reads >= MAX_OLDER_READS => {
                self.lose(format!(
                    "the partition map has version {version}, but version {newest} was seen: it was replaced by an older one"
                ));
            }
            Some(_) => {}
        }
        BTreeSet::new()
    }

    /// Applies a map written by an order. Returns the workers that it fails over.
    pub(super) fn override_with(
        &mut self,
        map: PartitionMap,
        orders: Vec<MapOverride>,
        now_ms: u64,
    ) -> BTreeSet<Ordinal> {
        self.lost = None;
        self.orders = orders;
        self.replace(Some(map), now_ms)
    }

    /// Applies the current map of the store. Returns the workers that it fails over: former primaries that are not in sync any more.
    pub(super) fn replace(&mut self, map: Option<PartitionMap>, now_ms: u64) -> BTreeSet<Ordinal> {
        let mut failed = BTreeSet::new();
        if let (Some(old), Some(new)) = (&self.map, &map) {
            // A leadership transfer keeps both in sync.
            failed = (old.partitions.iter().zip(&new.partitions))
                .filter(|(old, new)| old.primary != new.primary && new.in_sync(old.primary).is_none())
                .map(|(old, _)| old.primary)
                .collect();
        }
        if !failed.is_empty() {
            self.last_failover_ms = Some(now_ms);
        }
        self.map = map;
        failed
    }
}
