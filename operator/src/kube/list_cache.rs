//! Cache of list results, invalidated by watches and by the operator's own writes.
//!
//! A changing cluster is reconciled several times a second, and a reconcile depends on ten kinds of objects, of which one or two changed.
//! Listing all of them each time dominates the load of the API server.
//!
//! kube's reflector is not suitable, because it lags behind the operator's own writes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::kube::api_object::ApiObject;
use crate::kube::resource_kinds::Kind;

/// Maximum age of an entry: a broken watch misses deletions until it is re-established.
const MAX_AGE: Duration = Duration::from_secs(10);

/// The lists of a cluster, by kind.
#[derive(Default)]
pub(crate) struct ListCache(BTreeMap<&'static str, List>);

#[derive(Default)]
struct List {
    /// Number of known changes.
    changes: u64,
    /// Newest `spec.version` seen, for kinds that have one.
    version: u64,
    items: Option<(Instant, Arc<Vec<ApiObject>>)>,
}

impl List {
    /// Returns the list after a change.
    const fn invalidate(&self) -> Self {
        Self { changes: self.changes + 1, version: self.version, items: None }
    }
}

/// Result of a cache lookup.
pub(crate) enum Lookup {
    /// The cached list.
    Cached(Arc<Vec<ApiObject>>),
    /// Not cached; the number of changes is to be passed to [`ListCache::insert`].
    Missing(u64),
}

impl ListCache {
    fn list(&mut self, kind: Kind) -> &mut List {
        self.0.entry(kind.name).or_default()
    }

    /// Looks up a list.
    pub(crate) fn get(&mut self, kind: Kind, now: Instant) -> Lookup {
        let list = self.list(kind);
        match &list.items {
            Some((at, items)) if now.saturating_duration_since(*at) < MAX_AGE => Lookup::Cached(Arc::clone(items)),
            _ => Lookup::Missing(list.changes),
        }
    }

    /// Caches a list requested at `now`, unless it changed since the lookup that returned `changes`.
    pub(crate) fn insert(&mut self, kind: Kind, changes: u64, now: Instant, items: &Arc<Vec<ApiObject>>) {
        let list = self.list(kind);
        if list.changes == changes {
            list.version = items.iter().map(version).max().unwrap_or_default().max(list.version);
            list.items = Some((now, Arc::clone(items)));
        }
    }

    /// Handles a watch event of a kind with one object per cluster. The event does not distinguish updates from deletions: a deleted object has a
    /// version that was seen before, so only a newer version is cached, and otherwise the entry is invalidated.
    pub(crate) fn update_from_watch(&mut self, kind: Kind, now: Instant, object: ApiObject) {
        let list = self.list(kind);
        let version = version(&object);
        let follows = list.version > 0 && version > list.version;
        let items = follows.then(|| (now, Arc::new(vec![object])));
        *list = List { version: version.max(list.version), items, ..list.invalidate() };
    }

    /// Invalidates a list after a watch event.
    pub(crate) fn changed(&mut self, kind: Kind) {
        let list = self.list(kind);
        *list = list.invalidate();
    }

    /// Invalidates all lists after a write of this operator, whose watch events arrive later.
    pub(crate) fn invalidate_all(&mut self) {
        self.0.values_mut().for_each(|list| *list = list.invalidate());
    }

    /// Drops expired lists: idle clusters are reconciled once a minute, and their lists would dominate the operator's memory.
    pub(crate) fn drop_expired(&mut self, now: Instant) {
        for list in self.0.values_mut() {
            list.items.take_if(|(at, _)| now.saturating_duration_since(*at) >= MAX_AGE);
        }
    }
}

/// Returns `spec.version` of an object.
fn version(object: &ApiObject) -> u64 {
    #[derive(Deserialize)]
    struct Versioned {
        spec: Spec,
    }
    #[derive(Deserialize)]
    struct Spec {
        version: u64,
    }
    object.read().map_or(0, |object: Versioned| object.spec.version)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::kube::resource_kinds::{CLAIM, MAP, POD};

    fn unknown(lists: &mut ListCache, kind: Kind, at: Instant) -> Option<u64> {
        match lists.get(kind, at) {
            Lookup::Cached(_) => None,
            Lookup::Missing(changes) => Some(changes),
        }
    }

    #[test]
    fn a_list_is_cached_until_a_watch_event_a_write_or_its_maximum_age() {
        let mut lists = ListCache::default();
        let items = Arc::new(vec![ApiObject::new(POD, Value::Null)]);
        let now = Instant::now();

        let changes = unknown(&mut lists, POD, now).expect("empty cache");
        lists.insert(POD, changes, now, &items);
        assert_eq!((unknown(&mut lists, POD, now), unknown(&mut lists, CLAIM, now)), (None, Some(0)));
        assert_eq!(unknown(&mut lists, POD, now + MAX_AGE), Some(changes), "it is too old");

        lists.changed(POD);
        lists.insert(POD, changes, now, &items);
        let changes = unknown(&mut lists, POD, now).expect("a list requested before the change is not cached");
        lists.insert(POD, changes, now, &items);
        lists.invalidate_all();
        assert!(unknown(&mut lists, POD, now).is_some());

        lists.insert(POD, changes + 1, now, &items);
        lists.insert(CLAIM, 1, now + MAX_AGE, &items);
        lists.drop_expired(now + MAX_AGE);
        let kept = |lists: &mut ListCache, kind: Kind| lists.list(kind).items.is_some();
        assert_eq!((kept(&mut lists, POD), kept(&mut lists, CLAIM)), (false, true), "expired lists are dropped");
        assert_eq!(unknown(&mut lists, POD, now + MAX_AGE), Some(changes + 1), "the number of changes is kept");
    }

    #[test]
    fn a_watched_object_is_cached_only_if_it_is_newer() {
        let mut lists = ListCache::default();
        let now = Instant::now();
        let map = |version: u64| ApiObject::new(MAP, json!({ "spec": { "version": version } }));
        let items = |lists: &mut ListCache| match lists.get(MAP, now) {
            Lookup::Cached(items) => items.first().map(version),
            Lookup::Missing(_) => None,
        };
        lists.update_from_watch(MAP, now, map(3));
        assert_eq!(items(&mut lists), None, "it may be a deletion");
        lists.update_from_watch(MAP, now, map(4));
        assert_eq!(items(&mut lists), Some(4));
        lists.update_from_watch(MAP, now, map(4));
        assert_eq!(items(&mut lists), None, "it may be deleted");

        let changes = unknown(&mut lists, MAP, now).expect("a miss");
        lists.insert(MAP, changes, now, &Arc::new(vec![map(9)]));
        lists.update_from_watch(MAP, now, map(8));
        assert_eq!(items(&mut lists), None, "the watch lags behind the read");
        lists.update_from_watch(MAP, now, map(10));
        assert_eq!(items(&mut lists), Some(10));
        lists.invalidate_all();
        assert_eq!(items(&mut lists), None);
        lists.update_from_watch(MAP, now, map(11));
        assert_eq!(items(&mut lists), Some(11));
    }
}
