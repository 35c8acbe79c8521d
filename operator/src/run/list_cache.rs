//! Cache of list results, invalidated by watches and by the operator's own writes.
//!
//! A changing cluster is reconciled several times a second, and a reconcile depends on ten kinds of objects, of which one or two changed.
//! Listing all of them each time dominates the load of the API server.
//!
//! kube's reflector is not suitable, because it lags behind the operator's own writes.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Key;
use super::resource_kinds::Kind;

/// Maximum age of an entry: a broken watch misses deletions until it is re-established.
const MAX_AGE: Duration = Duration::from_secs(10);

/// The lists of all clusters.
#[derive(Default)]
pub(super) struct ListCache(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    /// By kind.
    of: BTreeMap<Key, BTreeMap<&'static str, List>>,
    /// When expired lists were last dropped.
    swept: Option<Instant>,
}

impl Entries {
    fn list(&mut self, key: &Key, kind: Kind) -> &mut List {
        self.of.entry(key.clone()).or_default().entry(kind.name).or_default()
    }

    /// Drops expired lists: idle clusters are reconciled once a minute, and their lists would dominate the operator's memory.
    fn sweep(&mut self, now: Instant) {
        if self.swept.is_some_and(|at| now.saturating_duration_since(at) < MAX_AGE) {
            return;
        }
        self.swept = Some(now);
        for list in self.of.values_mut().flat_map(BTreeMap::values_mut) {
            list.items.take_if(|(at, _)| now.saturating_duration_since(*at) >= MAX_AGE);
        }
    }
}

#[derive(Default)]
struct List {
    /// Number of known changes.
    changes: u64,
    /// Newest `spec.version` seen, for kinds that have one.
    version: u64,
    items: Option<(Instant, Arc<Vec<Value>>)>,
}

impl List {
    /// Returns the list after a change.
    const fn invalidate(&self) -> Self {
        Self { changes: self.changes + 1, version: self.version, items: None }
    }
}

/// Result of a cache lookup.
pub(super) enum Lookup {
    /// The cached list.
    Cached(Arc<Vec<Value>>),
    /// Not cached; the number of changes is to be passed to [`ListCache::insert`].
    Missing(u64),
}

impl ListCache {
    fn all(&self) -> MutexGuard<'_, Entries> {
        self.0.lock()
    }

    /// Looks up a list of a cluster.
    pub(super) fn get(&self, key: &Key, kind: Kind, now: Instant) -> Lookup {
        let mut all = self.all();
        let list = all.list(key, kind);
        match &list.items {
            Some((at, items)) if now.saturating_duration_since(*at) < MAX_AGE => Lookup::Cached(Arc::clone(items)),
            _ => Lookup::Missing(list.changes),
        }
    }

    /// Caches a list requested at `now`, unless it changed since the lookup that returned `changes`.
    pub(super) fn insert(&self, key: &Key, kind: Kind, changes: u64, now: Instant, items: &Arc<Vec<Value>>) {
        let mut all = self.all();
        all.sweep(now);
        let list = all.list(key, kind);
        if list.changes == changes {
            list.version = items.iter().map(version).max().unwrap_or_default().max(list.version);
            list.items = Some((now, Arc::clone(items)));
        }
    }

    /// Handles a watch event of a kind with one object per cluster. The event does not distinguish updates from deletions: a deleted object has a
    /// version that was seen before, so only a newer version is cached, and otherwise the entry is invalidated.
    pub(super) fn update_from_watch(&self, key: &Key, kind: Kind, now: Instant, object: Value) {
        let mut all = self.all();
        let list = all.list(key, kind);
        let version = version(&object);
        let follows = list.version > 0 && version > list.version;
        let items = follows.then(|| (now, Arc::new(vec![object])));
        *list = List { version: version.max(list.version), items, ..list.invalidate() };
    }

    /// Invalidates a list after a watch event.
    pub(super) fn changed(&self, key: &Key, kind: Kind) {
        let mut all = self.all();
        let list = all.list(key, kind);
        *list = list.invalidate();
    }

    /// Invalidates all lists of a cluster after a write of this operator, whose watch events arrive later.
    pub(super) fn invalidate_all(&self, key: &Key) {
        let mut all = self.all();
        let lists = all.of.get_mut(key).into_iter().flat_map(BTreeMap::values_mut);
        lists.for_each(|list| *list = list.invalidate());
    }

    /// Removes clusters of a scope that are not in `present`.
    pub(super) fn keep_only(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) {
        self.all().of.retain(|key, _| key.stays(scope, &present));
    }
}

/// Returns `spec.version` of an object.
fn version(object: &Value) -> u64 {
    object.pointer("/spec/version").and_then(Value::as_u64).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::resource_kinds::{CLAIM, MAP, POD};
    use super::*;

    #[test]
    fn a_list_is_cached_until_a_watch_event_a_write_or_its_maximum_age() {
        let lists = ListCache::default();
        let key = Key { namespace: "research".into(), name: "words".into() };
        let items = Arc::new(vec![Value::Null]);
        let now = Instant::now();
        let unknown = |kind: Kind, at: Instant| match lists.get(&key, kind, at) {
            Lookup::Cached(_) => None,
            Lookup::Missing(changes) => Some(changes),
        };

        let changes = unknown(POD, now).expect("empty cache");
        lists.insert(&key, POD, changes, now, &items);
        assert_eq!((unknown(POD, now), unknown(CLAIM, now)), (None, Some(0)));
        assert_eq!(unknown(POD, now + MAX_AGE), Some(changes), "it is too old");

        lists.changed(&key, POD);
        lists.insert(&key, POD, changes, now, &items);
        let changes = unknown(POD, now).expect("a list requested before the change is not cached");
        lists.insert(&key, POD, changes, now, &items);
        lists.invalidate_all(&key);
        assert!(unknown(POD, now).is_some());

        let (later, other) = (now + MAX_AGE, Key { namespace: "research".into(), name: "others".into() });
        lists.insert(&key, POD, changes + 1, now, &items);
        lists.insert(&other, POD, 0, later, &items);
        let kept = |key: &Key| lists.all().list(key, POD).items.is_some();
        assert_eq!((kept(&key), kept(&other)), (false, true), "expired lists are dropped");
        assert_eq!(unknown(POD, later), Some(changes + 1), "the number of changes is kept");

        lists.keep_only(Some("elsewhere"), |_| false);
        assert_eq!(lists.all().of.len(), 2);
        lists.keep_only(None, |_| false);
        assert_eq!(lists.all().of.len(), 0);
    }

    #[test]
    fn a_watched_object_is_cached_only_if_it_is_newer() {
        let lists = ListCache::default();
        let key = Key { namespace: "research".into(), name: "words".into() };
        let now = Instant::now();
        let map = |version: u64| json!({ "spec": { "version": version } });
        let items = || match lists.get(&key, MAP, now) {
            Lookup::Cached(items) => items.first().map(version),
            Lookup::Missing(_) => None,
        };
        lists.update_from_watch(&key, MAP, now, map(3));
        assert_eq!(items(), None, "it may be a deletion");
        lists.update_from_watch(&key, MAP, now, map(4));
        assert_eq!(items(), Some(4));
        lists.update_from_watch(&key, MAP, now, map(4));
        assert_eq!(items(), None, "it may be deleted");

        let Lookup::Missing(changes) = lists.get(&key, MAP, now) else { panic!("expected a miss") };
        lists.insert(&key, MAP, changes, now, &Arc::new(vec![map(9)]));
        lists.update_from_watch(&key, MAP, now, map(8));
        assert_eq!(items(), None, "the watch lags behind the read");
        lists.update_from_watch(&key, MAP, now, map(10));
        assert_eq!(items(), Some(10));
        lists.invalidate_all(&key);
        assert_eq!(items(), None);
        lists.update_from_watch(&key, MAP, now, map(11));
        assert_eq!(items(), Some(11));
    }
}
