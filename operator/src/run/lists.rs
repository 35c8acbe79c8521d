//! What was listed, for as long as no watch has said that it changed.
//!
//! A cluster that changes is looked at several times a second, and a look rests on ten kinds of objects of which one or two changed. Listing
//! all of them each time took the API server, on two cores, more than all that it did else.
//!
//! Not kube's reflector, which would be planned by while it lags behind what this operator has just written itself: here that is listed again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Key;
use super::kinds::Kind;

/// How long a list is believed in at most: a watch that breaks misses what is deleted until it is there again.
const BELIEVED: Duration = Duration::from_secs(10);

/// The lists of all clusters.
#[derive(Default)]
pub(super) struct Lists(Mutex<All>);

#[derive(Default)]
struct All {
    /// By kind.
    of: BTreeMap<Key, BTreeMap<&'static str, List>>,
    /// When lists were last dropped that nobody believes in any more.
    swept: Option<Instant>,
}

impl All {
    fn list(&mut self, key: &Key, kind: Kind) -> &mut List {
        self.of.entry(key.clone()).or_default().entry(kind.name).or_default()
    }

    /// At rest a cluster is looked at once a minute: what was listed would lie there for most of it, and is most of what an operator of
    /// many clusters would keep in memory.
    fn sweep(&mut self, now: Instant) {
        if self.swept.is_some_and(|at| now.saturating_duration_since(at) < BELIEVED) {
            return;
        }
        self.swept = Some(now);
        for list in self.of.values_mut().flat_map(BTreeMap::values_mut) {
            list.found.take_if(|(at, _)| now.saturating_duration_since(*at) >= BELIEVED);
        }
    }
}

#[derive(Default)]
struct List {
    /// Times that it is known to have changed.
    changes: u64,
    /// Of a kind that counts its own versions: the newest that was seen.
    version: u64,
    found: Option<(Instant, Arc<Vec<Value>>)>,
}

impl List {
    /// After a change.
    const fn changed(&self) -> Self {
        Self { changes: self.changes + 1, version: self.version, found: None }
    }
}

/// What is known of a list.
pub(super) enum Known {
    /// What is in it.
    Found(Arc<Vec<Value>>),
    /// It is to be listed; what is found then holds unless it has changed since these changes.
    Unknown(u64),
}

impl Lists {
    fn all(&self) -> MutexGuard<'_, All> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is in a list of a cluster.
    pub(super) fn known(&self, key: &Key, kind: Kind, now: Instant) -> Known {
        let mut all = self.all();
        let list = all.list(key, kind);
        match &list.found {
            Some((at, found)) if now.saturating_duration_since(*at) < BELIEVED => Known::Found(Arc::clone(found)),
            _ => Known::Unknown(list.changes),
        }
    }

    /// Keeps what was found by a look that began at `now`, after so many changes; not if there were more meanwhile.
    pub(super) fn keep(&self, key: &Key, kind: Kind, changes: u64, now: Instant, found: &Arc<Vec<Value>>) {
        let mut all = self.all();
        all.sweep(now);
        let list = all.list(key, kind);
        if list.changes == changes {
            list.version = found.iter().map(version).max().unwrap_or_default().max(list.version);
            list.found = Some((now, Arc::clone(found)));
        }
    }

    /// A watch has an object of a kind of which the cluster has one, or had it last where it is gone: which of the two it does not say. One
    /// that is gone has the version that was seen before. So a later one is there, and anything else is to be read.
    pub(super) fn told(&self, key: &Key, kind: Kind, now: Instant, object: Value) {
        let mut all = self.all();
        let list = all.list(key, kind);
        let version = version(&object);
        let follows = list.version > 0 && version > list.version;
        let found = follows.then(|| (now, Arc::new(vec![object])));
        *list = List { version: version.max(list.version), found, ..list.changed() };
    }

    /// A watch has news of an object of the cluster.
    pub(super) fn changed(&self, key: &Key, kind: Kind) {
        let mut all = self.all();
        let list = all.list(key, kind);
        *list = list.changed();
    }

    /// This operator has written something itself, and looks at everything before it goes on: watches tell a little later.
    pub(super) fn wrote(&self, key: &Key) {
        let mut all = self.all();
        let lists = all.of.get_mut(key).into_iter().flat_map(BTreeMap::values_mut);
        lists.for_each(|list| *list = list.changed());
    }

    /// Forgets the clusters of a namespace, or of all, that are gone.
    pub(super) fn keep_only(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) {
        self.all().of.retain(|key, _| key.stays(scope, &present));
    }
}

/// The version that an object counts by itself.
fn version(object: &Value) -> u64 {
    object.pointer("/spec/version").and_then(Value::as_u64).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::kinds::{CLAIM, MAP, POD};
    use super::*;

    #[test]
    fn a_list_holds_until_a_watch_or_a_write_says_otherwise_and_not_for_long() {
        let lists = Lists::default();
        let key = Key { namespace: "research".into(), name: "words".into() };
        let found = Arc::new(vec![Value::Null]);
        let now = Instant::now();
        let unknown = |kind: Kind, at: Instant| match lists.known(&key, kind, at) {
            Known::Found(_) => None,
            Known::Unknown(changes) => Some(changes),
        };

        let changes = unknown(POD, now).expect("nothing was listed");
        lists.keep(&key, POD, changes, now, &found);
        assert_eq!((unknown(POD, now), unknown(CLAIM, now)), (None, Some(0)));
        assert_eq!(unknown(POD, now + BELIEVED), Some(changes), "it is too old");

        lists.changed(&key, POD);
        lists.keep(&key, POD, changes, now, &found);
        let changes = unknown(POD, now).expect("what was under way when it changed says nothing");
        lists.keep(&key, POD, changes, now, &found);
        lists.wrote(&key);
        assert!(unknown(POD, now).is_some());

        let (later, other) = (now + BELIEVED, Key { namespace: "research".into(), name: "others".into() });
        lists.keep(&key, POD, changes + 1, now, &found);
        lists.keep(&other, POD, 0, later, &found);
        let kept = |key: &Key| lists.all().list(key, POD).found.is_some();
        assert_eq!((kept(&key), kept(&other)), (false, true), "what nobody believes in is not kept");
        assert_eq!(unknown(POD, later), Some(changes + 1), "what changed meanwhile is still known");

        lists.keep_only(Some("elsewhere"), |_| false);
        assert_eq!(lists.all().of.len(), 2);
        lists.keep_only(None, |_| false);
        assert_eq!(lists.all().of.len(), 0);
    }

    #[test]
    fn what_a_watch_tells_is_found_where_it_follows_what_was_seen() {
        let lists = Lists::default();
        let key = Key { namespace: "research".into(), name: "words".into() };
        let now = Instant::now();
        let map = |version: u64| json!({ "spec": { "version": version } });
        let found = || match lists.known(&key, MAP, now) {
            Known::Found(found) => found.first().map(version),
            Known::Unknown(_) => None,
        };
        lists.told(&key, MAP, now, map(3));
        assert_eq!(found(), None, "it may be the end of one that nobody saw");
        lists.told(&key, MAP, now, map(4));
        assert_eq!(found(), Some(4));
        lists.told(&key, MAP, now, map(4));
        assert_eq!(found(), None, "it may be gone");

        let Known::Unknown(changes) = lists.known(&key, MAP, now) else { panic!("it is to be read") };
        lists.keep(&key, MAP, changes, now, &Arc::new(vec![map(9)]));
        lists.told(&key, MAP, now, map(8));
        assert_eq!(found(), None, "the watch lags behind what was read");
        lists.told(&key, MAP, now, map(10));
        assert_eq!(found(), Some(10));
        lists.wrote(&key);
        assert_eq!(found(), None);
        lists.told(&key, MAP, now, map(11));
        assert_eq!(found(), Some(11));
    }
}
