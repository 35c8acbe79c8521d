//! A map in an object of a Kubernetes API server, changed by compare-and-swap on its `resourceVersion`.
//!
//! The object has few nodes, since the server's work grows with them: members are `store/incarnation`, where `spec.stores` gives
//! each disk a number once and never again. A write names only what changes, as a merge patch with the resource version that was
//! read; `spec.version` is what workers tell maps apart by. The layout is in [`layout`].

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

/// How long the API server may take: several times what it needs for the largest map on a busy machine, and less than the lease
/// of whoever writes.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long a change is waited for: whoever waits looks up as often.
const WATCH_SECONDS: u32 = 10;
/// Writers that may be faster before this one gives up: those change other things than the map's entries.
const ATTEMPTS: u32 = 3;
/// Orders of people take no more of the object than this; of more, the oldest go. All annotations together may have 256 KiB.
const MAX_OVERRIDES_BYTES: usize = 128 << 10;

/// Where a map is, and what else its object shall say when it is made.
#[derive(Debug, Clone, Default)]
pub struct MapLocation {
    /// Namespace.
    pub namespace: String,
    /// Name: that of the cluster.
    pub name: String,
    /// Labels of a new object.
    pub labels: serde_json::Map<String, Value>,
    /// Owners of a new object: the map goes with them. None where the data outlives the cluster's object.
    pub owners: Vec<Value>,
}

impl MapLocation {
    /// Where the map of a `LearnerCluster` is; with `uid`, that of its object, the map goes with it.
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

/// Keeps the map in the `PartitionMap` of a place.
///
/// Calls wait for the API server: they belong on a thread that may, never on one of the runtime's own.
pub struct KubernetesStore {
    api: Api<DynamicObject>,
    runtime: Handle,
    cluster: ClusterId,
    law: Law,
    place: MapLocation,
    /// What was read or written last. A write begins with it; the server says whether it is still there.
    known: Mutex<Option<StoredMap>>,
    /// Whether somebody watches the object.
    watched: bool,
    /// What was told last, until it is taken or the object is read.
    told: Mutex<Option<WatchedObject>>,
}

/// What a watch says of the object.
#[derive(Debug, Clone)]
struct WatchedObject {
    resource_version: String,
    /// The newest version of the map that was told since it was read, plain or not.
    version: u64,
    /// What is there, where that is plain.
    there: Option<StoredMap>,
}

impl std::fmt::Debug for KubernetesStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubernetesStore").field("cluster", &self.cluster).field("place", &self.place).finish()
    }
}

/// Reads the map in an object of the API server.
///
/// # Errors
/// [`Error::Damaged`], [`Error::NewerFormat`]: what is there is no map that this version reads.
pub fn read_object(object: &Value) -> Result<PartitionMap, Error> {
    layout::read(object).map(|known| known.map).map_err(|unreadable| unreadable.of(PathBuf::from("the object")))
}

impl KubernetesStore {
    /// The map of `cluster` at `place`. Nothing is read yet.
    pub fn new(client: Client, runtime: Handle, place: MapLocation, cluster: ClusterId, law: Law) -> Self {
        let kind = GroupVersionKind::gvk("engram.dev", "v1alpha1", "PartitionMap");
        let api = Api::namespaced_with(client, &place.namespace, &ApiResource::from_gvk(&kind));
        Self { api, runtime, cluster, law, place, known: Mutex::new(None), watched: false, told: Mutex::new(None) }
    }

    /// The same, where somebody watches the object from before it is first read, and [tells](Self::tell) what that has: nobody has to read
    /// it again to see whether it was changed, nor to what, for the most part.
    #[must_use]
    pub fn watched(self) -> Self {
        Self { watched: true, ..self }
    }

    /// A watch has this object, or had it last where it is gone: which of the two it does not say. One that is gone has the map that was
    /// told before. So a map that follows the one that is known is there, and anything else is read when somebody asks.
    pub fn observe(&self, object: &Value) {
        let resource_version = layout::resource_version(object);
        let mut watched_object = self.told();
        // What was written here is told as well, and needs no reading.
        let known = self.cached().filter(|known| follows(&resource_version, known.resource_version()));
        let before = watched_object.as_ref().map_or(0, |told| told.version);
        let map = known.and_then(|known| {
            let newest = known.map.version.max(before);
            self.decode(object).ok().filter(|there| there.map.version > newest)
        });
        let version = map.as_ref().map_or(before, |there| there.map.version);
        *watched_object = Some(WatchedObject { resource_version, version, there: map });
    }

    fn told(&self) -> MutexGuard<'_, Option<WatchedObject>> {
        self.told.lock()
    }

    /// What a watch has told since the map was read or written, where that is plain; it is known then.
    fn take_watched(&self) -> Option<PartitionMap> {
        let there = self.told().as_mut()?.there.take()?;
        // What was read or written since may be newer.
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
        // Whoever asks knows best when to ask again.
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
        // An event tells of one change; there may have been many since.
        Ok(self.read_now().await?.map(|known| known.map))
    }

    /// Whether the object was changed since, or that cannot be told.
    async fn wait_for_change(&self, resource_version: &str) -> bool {
        let one = WatchParams::default().fields(&format!("metadata.name={}", self.place.name)).timeout(WATCH_SECONDS);
        let Ok(events) = with_deadline(self.api.watch(&one, resource_version)).await else { return true };
        pin_mut!(events);
        let told = async {
            while let Some(event) = events.next().await {
                if !matches!(event, Ok(WatchEvent::Bookmark(_))) {
                    return true;
                }
            }
            false
        };
        // The server ends it by itself, where there is one.
        let most = Duration::from_secs(u64::from(WATCH_SECONDS)) + DEADLINE;
        tokio::time::timeout(most, told).await.unwrap_or(true)
    }

    /// What errors call the object.
    fn path(&self) -> PathBuf {
        PathBuf::from(format!("PartitionMap {}/{}", self.place.namespace, self.place.name))
    }

    /// Waits for the API server, but not for ever.
    fn request<T>(&self, request: impl Future<Output = kube::Result<T>>) -> Result<T, RequestError> {
        self.runtime.block_on(with_deadline(request))
    }

    fn failed(&self, action: &'static str, asked: RequestError) -> Error {
        let source = match asked {
            RequestError::Failed(source) => source,
            RequestError::Conflict => io::Error::other("somebody else writes it all the time"),
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
            .map_err(|error| Error::Damaged { path: self.path(), why: format!("it is no JSON: {error}") })
    }

    /// Reads what the API server has, and remembers it.
    fn read(&self) -> Result<Option<StoredMap>, Error> {
        self.runtime.block_on(self.read_now())
    }

    async fn read_now(&self) -> Result<Option<StoredMap>, Error> {
        // What is told meanwhile may be newer than what is read.
        let told = self.told().take();
        let object = self.object_now().await.inspect_err(|_| {
            let mut now = self.told();
            *now = now.take().or(told);
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
                self.request(self.api.patch(&self.place.name, &PatchParams::default(), &Patch::Merge(&patch)))
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

/// Whether a resource version follows another. They are numbers that grow; where they are not, another one is a later one.
fn follows(one: &str, other: &str) -> bool {
    match (one.parse::<u64>(), other.parse::<u64>()) {
        (Ok(one), Ok(other)) => one > other,
        _ => one != other,
    }
}

/// Waits for the API server, but not for ever.
async fn with_deadline<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, RequestError> {
    match tokio::time::timeout(DEADLINE, request).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => Err(RequestError::Conflict),
        Ok(Err(error)) => Err(RequestError::Failed(io::Error::other(error))),
        Err(_) => Err(RequestError::Failed(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the API server did not answer within {} s", DEADLINE.as_secs()),
        ))),
    }
}

/// Why the API server did not do it.
enum RequestError {
    /// The object is not the one that was read.
    Conflict,
    /// Whether it was done is not known.
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
                // Perhaps only a mark beside the map was changed.
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
        let told = self.told();
        let Some(told) = told.as_ref() else { return ChangeState::Unchanged };
        let known = self.known.lock();
        // Of what was written here it is told as well.
        let is_known = known.as_ref().is_some_and(|known| !follows(&told.resource_version, known.resource_version()));
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
    async fn a_store_that_is_told_knows_when_somebody_else_has_written() {
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
        assert_eq!(store.change_state(), ChangeState::Changed, "nobody has read what it was told of");
        say(Answer::Version(10));
        store.read_now().await.unwrap();
        assert_eq!(store.change_state(), ChangeState::Unchanged);

        store.observe(&object(11, 1));
        say(Answer::Gone);
        assert!(store.read_now().await.unwrap().is_none());
        assert_eq!(store.change_state(), ChangeState::Unchanged, "that it is gone is known");
        store.observe(&object(12, 1));
        assert_eq!(store.change_state(), ChangeState::Changed, "it is there again");
    }

    #[tokio::test]
    async fn a_map_that_follows_the_known_one_is_taken_as_it_is_told() {
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

        // A mark beside the map, or the end of the object: neither is plain.
        store.observe(&object(8, 3));
        assert_eq!((store.change_state(), taken(&store)), (ChangeState::Changed, None));
        store.observe(&object(9, 4));
        store.observe(&object(10, 4));
        assert_eq!(
            (store.change_state(), taken(&store)),
            (ChangeState::Changed, None),
            "what was told before is gone, perhaps"
        );
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
}
