//! Kubernetes map store: a `PartitionMap` object, changed by compare-and-swap on its `resourceVersion`.
//!
//! The object has few nodes, since the API server's cost grows with them: members are `store/incarnation`, where `spec.stores`
//! numbers the stores. A write is a merge patch of the changes with the resource version that was read; `spec.version` identifies
//! a map. The layout is in [`layout`].

mod layout;

use crate::file::{overridden, successor};
use crate::{ChangeState, Error, Goal, MapOverride, MapStore, map_override};
use engram_cluster::PartitionMap;
use engram_memory::{ClusterId, Law};
use futures::{StreamExt as _, pin_mut};
use kube::api::{
    ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams, WatchEvent, WatchParams,
};
use kube::{Api, Client, Config};
use layout::{OVERRIDES_ANNOTATION, StoredMap};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use tokio::runtime::Handle;

/// Deadline of a request: several times the duration for the largest map on a busy machine, and less than the writer's lease.
const DEADLINE: Duration = Duration::from_secs(5);
/// Timeout of a watch.
const WATCH_SECONDS: u32 = 10;
/// Maximum attempts against concurrent writers of other fields.
const ATTEMPTS: u32 = 3;
/// Maximum size of the overrides annotation; the oldest are dropped. All annotations together are limited to 256 KiB.
const MAX_OVERRIDES_BYTES: usize = 128 << 10;

/// Location of a map, and the metadata of a new object.
#[derive(Debug, Clone, Default)]
pub struct MapLocation {
    /// Namespace.
    pub namespace: String,
    /// Name: that of the cluster.
    pub name: String,
    /// Labels of a new object.
    pub labels: serde_json::Map<String, Value>,
    /// Owners of a new object, with which it is deleted. Empty if the data outlives the cluster's object.
    pub owners: Vec<Value>,
}

impl MapLocation {
    /// Returns the location of a `LearnerCluster`'s map; with the `uid` of that object, the map is deleted with it.
    pub fn of_cluster(namespace: &str, name: &str, uid: Option<&str>) -> Self {
        let labels = [
            ("app.kubernetes.io/name", "engram"),
            ("app.kubernetes.io/instance", name),
            ("app.kubernetes.io/managed-by", "engram-operator"),
            ("engram.dev/cluster", name),
        ];
        let owner = |uid: &str| {
            json!({
                "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "name": name, "uid": uid,
                "controller": true, "blockOwnerDeletion": true,
            })
        };
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            labels: labels.into_iter().map(|(label, value)| (label.to_owned(), value.into())).collect(),
            owners: uid.map(owner).into_iter().collect(),
        }
    }
}

/// Stores the map in a `PartitionMap` object.
///
/// Calls block on the API server and must not run on a thread of the async runtime.
pub struct KubernetesStore {
    api: Api<DynamicObject>,
    runtime: Handle,
    cluster: ClusterId,
    law: Law,
    place: MapLocation,
    /// The map that was last read or written, as the base of the next write.
    known: Mutex<Option<StoredMap>>,
    /// Whether the object is watched.
    watched: bool,
    /// The last watched object, until it is taken or the object is read.
    last_watched: Mutex<Option<WatchedObject>>,
}

/// The object as last seen by a watch.
#[derive(Debug, Clone)]
struct WatchedObject {
    resource_version: String,
    /// Newest map version seen since the last read.
    version: u64,
    /// The map, if it is certainly current.
    there: Option<StoredMap>,
}

impl std::fmt::Debug for KubernetesStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubernetesStore").field("cluster", &self.cluster).field("place", &self.place).finish()
    }
}

/// Decodes the map of a `PartitionMap` object.
///
/// # Errors
/// [`Error::Damaged`], [`Error::NewerFormat`].
pub fn read_object(object: &Value) -> Result<PartitionMap, Error> {
    layout::read(object).map(|known| known.map).map_err(|unreadable| unreadable.of(PathBuf::from("the object")))
}

impl KubernetesStore {
    /// Creates a store for the map of `cluster`. Nothing is read yet.
    pub fn new(client: Client, runtime: Handle, place: MapLocation, cluster: ClusterId, law: Law) -> Self {
        let kind = GroupVersionKind::gvk("engram.dev", "v1alpha1", "PartitionMap");
        let api = Api::namespaced_with(client, &place.namespace, &ApiResource::from_gvk(&kind));
        Self {
            api,
            runtime,
            cluster,
            law,
            place,
            known: Mutex::new(None),
            watched: false,
            last_watched: Mutex::new(None),
        }
    }

    /// Marks the object as watched since before its first read, with events passed to [`Self::observe`]. Changes are then detected and mostly
    /// read without requests.
    #[must_use]
    pub fn watched(self) -> Self {
        Self { watched: true, ..self }
    }

    /// Handles a watch event, which does not distinguish updates from deletions. A deleted object has a map that was seen before, so only a
    /// newer map is taken from the event; otherwise the next access reads the object.
    pub fn observe(&self, object: &Value) {
        let resource_version = layout::resource_version(object);
        let mut watched_object = self.watched_slot();
        // Events of own writes are ignored.
        let known = self.cached().filter(|known| follows(&resource_version, known.resource_version()));
        let before = watched_object.as_ref().map_or(0, |watched| watched.version);
        let map = known.and_then(|known| {
            let newest = known.map.version.max(before);
            self.decode(object).ok().filter(|there| there.map.version > newest)
        });
        let version = map.as_ref().map_or(before, |there| there.map.version);
        *watched_object = Some(WatchedObject { resource_version, version, there: map });
    }

    fn watched_slot(&self) -> MutexGuard<'_, Option<WatchedObject>> {
        self.last_watched.lock()
    }

    /// Takes the watched map, if it is newer than the cached one, and caches it.
    fn take_watched(&self) -> Option<PartitionMap> {
        let there = self.watched_slot().as_mut()?.there.take()?;
        // The cached map may be newer.
        let is_news = |known: StoredMap| follows(there.resource_version(), known.resource_version());
        if !self.cached().is_some_and(is_news) {
            return None;
        }
        let map = there.map.clone();
        self.cache(Some(there));
        Some(map)
    }

    /// The same, at the API server that this process's environment names: the one of its pod, or of a kubeconfig.
    ///
    /// # Errors
    /// It names none, or what it names cannot be used.
    pub async fn connect(place: MapLocation, cluster: ClusterId, law: Law) -> Result<Self, Error> {
        let path = PathBuf::from("the API server");
        let failed = |source| Error::Io { action: "find", path: path.clone(), source };
        let mut config = Config::infer().await.map_err(|error| failed(io::Error::other(error)))?;
        // Callers retry themselves.
        config.default_retry = false;
        let client = Client::try_from(config).map_err(|error| failed(io::Error::other(error)))?;
        Ok(Self::new(client, Handle::current(), place, cluster, law))
    }

    /// Waits until the map may be another than the one that was read or written last, but no longer than ten seconds, and returns
    /// what is there then. Needs the rights to get and to watch this object, and no other.
    ///
    /// # Errors
    /// As for [`MapStore::get`].
    pub async fn changed(&self) -> Result<Option<PartitionMap>, Error> {
        if let Some(known) = self.cached()
            && !self.wait_for_change(known.resource_version()).await
        {
            return Ok(Some(known.map));
        }
        // There may have been further changes since the event.
        Ok(self.read_now().await?.map(|known| known.map))
    }

    /// Waits for a change of the object. Returns `false` on timeout, `true` on a change or error.
    async fn wait_for_change(&self, resource_version: &str) -> bool {
        let one = WatchParams::default().fields(&format!("metadata.name={}", self.place.name)).timeout(WATCH_SECONDS);
        let Ok(events) = with_deadline(self.api.watch(&one, resource_version)).await else { return true };
        pin_mut!(events);
        let change = async {
            while let Some(event) = events.next().await {
                if !matches!(event, Ok(WatchEvent::Bookmark(_))) {
                    return true;
                }
            }
            false
        };
        // The server closes the watch itself.
        let most = Duration::from_secs(u64::from(WATCH_SECONDS)) + DEADLINE;
        tokio::time::timeout(most, change).await.unwrap_or(true)
    }

    /// Returns the name of the object for errors.
    fn path(&self) -> PathBuf {
        PathBuf::from(format!("PartitionMap {}/{}", self.place.namespace, self.place.name))
    }

    /// Sends a request with a deadline.
    fn request<T>(&self, request: impl Future<Output = kube::Result<T>>) -> Result<T, RequestError> {
        self.runtime.block_on(with_deadline(request))
    }

    fn failed(&self, action: &'static str, asked: RequestError) -> Error {
        let source = match asked {
            RequestError::Failed(source) | RequestError::NotFound(source) => source,
            RequestError::Conflict => io::Error::other("too many concurrent writes"),
        };
        Error::Io { action, path: self.path(), source }
    }

    fn object(&self) -> Result<Option<Value>, Error> {
        self.runtime.block_on(self.object_now())
    }

    async fn object_now(&self) -> Result<Option<Value>, Error> {
        let found =
            with_deadline(self.api.get_opt(&self.place.name)).await.map_err(|asked| self.failed("read", asked))?;
        found.map(|object| self.value(&object)).transpose()
    }

    fn value(&self, object: &DynamicObject) -> Result<Value, Error> {
        serde_json::to_value(object)
            .map_err(|error| Error::Damaged { path: self.path(), why: format!("it is not JSON: {error}") })
    }

    /// Reads and caches the map.
    fn read(&self) -> Result<Option<StoredMap>, Error> {
        self.runtime.block_on(self.read_now())
    }

    async fn read_now(&self) -> Result<Option<StoredMap>, Error> {
        // Objects watched meanwhile may be newer than the read one.
        let watched = self.watched_slot().take();
        let object = self.object_now().await.inspect_err(|_| {
            let mut now = self.watched_slot();
            *now = now.take().or(watched);
        })?;
        let known = object.as_ref().map(|object| self.decode(object)).transpose();
        self.cache(known.as_ref().ok().cloned().flatten());
        known
    }

    fn decode(&self, object: &Value) -> Result<StoredMap, Error> {
        let known = layout::read(object).map_err(|unreadable| unreadable.of(self.path()))?;
        if known.map.cluster != self.cluster {
            let (expected, found) = (self.cluster, known.map.cluster);
            return Err(Error::OtherCluster { path: self.path(), expected, found });
        }
        Ok(known)
    }

    fn cache(&self, known: Option<StoredMap>) {
        *self.known.lock() = known;
    }

    fn cached(&self) -> Option<StoredMap> {
        self.known.lock().clone()
    }

    /// Writes `next` over `known`, together with these annotations.
    fn write(
        &self,
        known: Option<&StoredMap>,
        next: &PartitionMap,
        annotations: &Value,
    ) -> Result<PartitionMap, RequestError> {
        let written = match known {
            Some(known) => {
                let patch = layout::patch(known, next, annotations);
                let written =
                    self.request(self.api.patch(&self.place.name, &PatchParams::default(), &Patch::Merge(&patch)));
                written.map_err(|error| match error {
                    // It was deleted, which the next read shows.
                    RequestError::NotFound(_) => RequestError::Conflict,
                    error => error,
                })
            }
            None => {
                let object = layout::first(&self.place, self.law, next, annotations);
                let object =
                    serde_json::from_value(object).map_err(|error| RequestError::Failed(io::Error::other(error)))?;
                self.request(self.api.create(&PostParams::default(), &object))
            }
        };
        let written = written.inspect_err(|_| self.cache(None))?;
        let known = self.value(&written).and_then(|object| self.decode(&object));
        let known = known.map_err(|error| RequestError::Failed(io::Error::other(error)))?;
        let map = known.map.clone();
        self.cache(Some(known));
        Ok(map)
    }
}

/// Returns whether a resource version is newer than another. They are increasing numbers; otherwise any different one is newer.
fn follows(one: &str, other: &str) -> bool {
    match (one.parse::<u64>(), other.parse::<u64>()) {
        (Ok(one), Ok(other)) => one > other,
        _ => one != other,
    }
}

/// Sends a request with a deadline.
async fn with_deadline<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, RequestError> {
    match tokio::time::timeout(DEADLINE, request).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => Err(RequestError::Conflict),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => {
            Err(RequestError::NotFound(io::Error::other(kube::Error::Api(status))))
        }
        Ok(Err(error)) => Err(RequestError::Failed(io::Error::other(error))),
        Err(_) => Err(RequestError::Failed(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the API server did not respond within {} s", DEADLINE.as_secs()),
        ))),
    }
}

/// Error of a request.
enum RequestError {
    /// The object is not the one that was read.
    Conflict,
    /// The object, or the namespace of a new one, does not exist.
    NotFound(io::Error),
    /// The outcome is unknown.
    Failed(io::Error),
}

impl MapStore for KubernetesStore {
    fn get(&self) -> Result<Option<PartitionMap>, Error> {
        match self.take_watched() {
            Some(map) => Ok(Some(map)),
            None => Ok(self.read()?.map(|known| known.map)),
        }
    }

    fn compare_and_swap(&self, expected: Option<u64>, map: PartitionMap) -> Result<PartitionMap, Error> {
        if map.cluster != self.cluster {
            return Err(Error::OtherCluster { path: self.path(), expected: self.cluster, found: map.cluster });
        }
        let mut there = self.cached().filter(|known| Some(known.map.version) == expected);
        if there.is_none() {
            there = self.read()?;
        }
        for _ in 0..ATTEMPTS {
            let next = successor(there.as_ref().map(|known| &known.map), expected, map.clone())?;
            match self.write(there.as_ref(), &next, &Value::Null) {
                // Possibly only another field was changed.
                Err(RequestError::Conflict) => there = self.read()?,
                written => return written.map_err(|asked| self.failed("write", asked)),
            }
        }
        Err(self.failed("write", RequestError::Conflict))
    }

    fn goal(&self) -> Result<Goal, Error> {
        // What people want is in the LearnerCluster.
        Ok(Goal::default())
    }

    fn set_goal(&self, _goal: &Goal) -> Result<(), Error> {
        Err(Error::NotSupported {
            what: "an order for the number of workers, or to empty one",
            instead: "change spec.workers of the LearnerCluster, or annotate it with engram.dev/replace=<pod UID>",
        })
    }

    fn overrides(&self) -> Result<Vec<MapOverride>, Error> {
        // They were there with the map that was read or written last.
        let text = match self.cached() {
            Some(known) => known.orders,
            None => self
                .object()?
                .as_ref()
                .and_then(|object| layout::annotation(object, OVERRIDES_ANNOTATION))
                .map(str::to_owned),
        };
        let Some(text) = text else { return Ok(Vec::new()) };
        map_override::decode(&text).map_err(|unreadable| layout::ObjectError::from(unreadable).of(self.path()))
    }

    fn change_state(&self) -> ChangeState {
        if !self.watched {
            return ChangeState::Unknown;
        }
        let watched = self.watched_slot();
        let Some(watched) = watched.as_ref() else { return ChangeState::Unchanged };
        let known = self.known.lock();
        // Events of own writes are ignored.
        let is_known =
            known.as_ref().is_some_and(|known| !follows(&watched.resource_version, known.resource_version()));
        if is_known { ChangeState::Unchanged } else { ChangeState::Changed }
    }

    fn override_map(
        &self,
        expected: Option<u64>,
        map: PartitionMap,
        order: MapOverride,
    ) -> Result<PartitionMap, Error> {
        if map.cluster != self.cluster {
            return Err(Error::OtherCluster { path: self.path(), expected: self.cluster, found: map.cluster });
        }
        let known = match self.read() {
            Err(Error::Damaged { .. }) if expected.is_none() => None,
            read => read?,
        };
        let next = overridden(known.as_ref().map(|known| &known.map), expected, map)?;
        let mut orders = self.overrides()?;
        orders.push(MapOverride { version: next.version, ..order });
        let mut text = map_override::encode(&orders);
        while text.len() > MAX_OVERRIDES_BYTES && orders.len() > 1 {
            orders.remove(0);
            text = map_override::encode(&orders);
        }
        let annotations = json!({ OVERRIDES_ANNOTATION: text });
        // One object: the record is there with the map, and not without it.
        let base = match known {
            Some(known) => Some(known),
            None => self.object()?.map(|damaged| StoredMap::damaged(&damaged)),
        };
        self.write(base.as_ref(), &next, &annotations).map_err(|asked| match asked {
            RequestError::Conflict => Error::Conflict { expected, found: None },
            asked => self.failed("write", asked),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::Entry;
    use engram_memory::{Incarnation, Member, Ordinal, StoreId};
    use http::{Request, Response, StatusCode};
    use kube::client::Body;
    use parking_lot::Mutex;
    use std::convert::Infallible;
    use std::sync::Arc;

    /// What an API server answers: an object of this resource version, that there is none, or that it cannot say.
    #[derive(Clone, Copy)]
    enum Answer {
        Version(u64),
        Gone,
        Failure,
    }

    fn store(answer: Arc<Mutex<Answer>>) -> KubernetesStore {
        let location = MapLocation { namespace: "research".into(), name: "words".into(), ..MapLocation::default() };
        let member = Member { ordinal: Ordinal(0), store: StoreId(1), incarnation: Incarnation(1) };
        let map = PartitionMap { cluster: ClusterId(7), version: 1, partitions: vec![Entry::first(vec![member])] };
        let object = layout::first(&location, Law::Linear, &map, &Value::Null);
        let service = tower::service_fn(move |_: Request<Body>| {
            let (status, body) = match *answer.lock() {
                Answer::Version(version) => {
                    let mut object = object.clone();
                    object["metadata"]["resourceVersion"] = version.to_string().into();
                    (StatusCode::OK, object)
                }
                Answer::Gone => (StatusCode::NOT_FOUND, refusal(404, "NotFound")),
                Answer::Failure => (StatusCode::INTERNAL_SERVER_ERROR, refusal(500, "InternalError")),
            };
            let response = Response::builder().status(status).body(Body::from(body.to_string().into_bytes()));
            async move { Ok::<_, Infallible>(response.unwrap()) }
        });
        KubernetesStore::new(Client::new(service, "research"), Handle::current(), location, ClusterId(7), Law::Linear)
    }

    fn refusal(code: u16, reason: &str) -> Value {
        json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason })
    }

    /// What a watch has.
    fn object(resource_version: u64, version: u64) -> Value {
        let member = Member { ordinal: Ordinal(0), store: StoreId(1), incarnation: Incarnation(1) };
        let map = PartitionMap { cluster: ClusterId(7), version, partitions: vec![Entry::first(vec![member])] };
        let mut object = layout::first(&MapLocation::default(), Law::Linear, &map, &Value::Null);
        object["metadata"]["resourceVersion"] = resource_version.to_string().into();
        object
    }

    #[tokio::test]
    async fn store_with_a_watch_detects_writes_of_others() {
        let answer = Arc::new(Mutex::new(Answer::Version(5)));
        let say = |next| *answer.lock() = next;
        assert_eq!(store(Arc::clone(&answer)).change_state(), ChangeState::Unknown);
        let store = store(Arc::clone(&answer)).watched();
        assert_eq!(store.change_state(), ChangeState::Unchanged);

        store.observe(&object(5, 1));
        assert_eq!(store.change_state(), ChangeState::Changed, "it was never read");
        store.read_now().await.unwrap().unwrap();
        assert_eq!(store.change_state(), ChangeState::Unchanged);
        store.observe(&object(4, 1));
        assert_eq!(store.change_state(), ChangeState::Unchanged, "what was read is newer");
        store.observe(&object(10, 1));
        assert_eq!(store.change_state(), ChangeState::Changed, "these are numbers");

        say(Answer::Failure);
        assert!(store.read_now().await.is_err());
        assert_eq!(store.change_state(), ChangeState::Changed, "the change was not read yet");
        say(Answer::Version(10));
        store.read_now().await.unwrap();
        assert_eq!(store.change_state(), ChangeState::Unchanged);

        store.observe(&object(11, 1));
        say(Answer::Gone);
        assert!(store.read_now().await.unwrap().is_none());
        assert_eq!(store.change_state(), ChangeState::Unchanged, "the deletion was read");
        store.observe(&object(12, 1));
        assert_eq!(store.change_state(), ChangeState::Changed, "it is there again");
    }

    #[tokio::test]
    async fn a_newer_watched_map_is_taken_without_a_read() {
        let answer = Arc::new(Mutex::new(Answer::Version(5)));
        let store = store(Arc::clone(&answer)).watched();
        store.observe(&object(4, 9));
        assert_eq!(store.take_watched(), None, "nothing is known that it could follow");
        store.read_now().await.unwrap().unwrap();

        let taken = |store: &KubernetesStore| store.take_watched().map(|map| map.version);
        store.observe(&object(6, 2));
        store.observe(&object(7, 3));
        assert_eq!(
            (store.change_state(), taken(&store), store.change_state()),
            (ChangeState::Changed, Some(3), ChangeState::Unchanged)
        );
        assert_eq!(store.cached().unwrap().resource_version(), "7");
        assert_eq!(taken(&store), None, "it was taken");

        // A change of another field and a deletion cannot be distinguished.
        store.observe(&object(8, 3));
        assert_eq!((store.change_state(), taken(&store)), (ChangeState::Changed, None));
        store.observe(&object(9, 4));
        store.observe(&object(10, 4));
        assert_eq!((store.change_state(), taken(&store)), (ChangeState::Changed, None), "it may be deleted");
        store.observe(&object(11, 4));
        assert_eq!(
            (store.change_state(), taken(&store)),
            (ChangeState::Changed, None),
            "another word of it is no news"
        );

        store.observe(&object(12, 5));
        *answer.lock() = Answer::Version(13);
        store.read_now().await.unwrap();
        assert_eq!((store.change_state(), taken(&store)), (ChangeState::Unchanged, None), "what was read is newer");
        store.observe(&object(12, 5));
        assert_eq!((store.change_state(), taken(&store)), (ChangeState::Unchanged, None), "a watch that lags behind");

        let mut other = object(14, 6);
        other["spec"]["clusterId"] = ClusterId(8).to_string().into();
        store.observe(&other);
        assert_eq!(
            (store.change_state(), taken(&store)),
            (ChangeState::Changed, None),
            "who reads it says what is wrong with it"
        );
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_write_over_a_deleted_map_is_a_conflict() {
        let answer = Arc::new(Mutex::new(Answer::Version(5)));
        let store = store(Arc::clone(&answer));
        let known = store.read_now().await.unwrap().unwrap().map;
        *answer.lock() = Answer::Gone;
        let writing = tokio::task::spawn_blocking(move || store.compare_and_swap(Some(1), known));
        let error = writing.await.unwrap().unwrap_err();
        assert!(matches!(error, Error::Conflict { expected: Some(1), found: None }), "{error}");
    }
}
