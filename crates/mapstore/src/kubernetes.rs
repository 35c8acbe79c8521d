//! A map in an object of a Kubernetes API server, changed by compare-and-swap on its `resourceVersion`.
//!
//! The object has few nodes, since the server's work grows with them: members are `store/incarnation`, where `spec.stores` gives
//! each disk a number once and never again. A write names only what changes, as a merge patch with the resource version that was
//! read; `spec.version` is what workers tell maps apart by. The layout is in [`layout`].

mod layout;

use crate::file::{overruled, successor};
use crate::{Error, Goal, MapStore, Order, order};
use engram_cluster::PartitionMap;
use engram_memory::{ClusterId, Law};
use futures::{StreamExt as _, pin_mut};
use kube::api::{
    ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams, WatchEvent, WatchParams,
};
use kube::{Api, Client, Config};
use layout::{Known, ORDERS};
use serde_json::{Value, json};
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
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
const ORDERS_MOST_BYTES: usize = 128 << 10;

/// Where a map is, and what else its object shall say when it is made.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// Namespace.
    pub namespace: String,
    /// Name: that of the cluster.
    pub name: String,
    /// Labels of a new object.
    pub labels: serde_json::Map<String, Value>,
    /// Owners of a new object: the map goes with them. None where the data outlives the cluster's object.
    pub owners: Vec<Value>,
}

impl Place {
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
    place: Place,
    /// What was read or written last. A write begins with it; the server says whether it is still there.
    known: Mutex<Option<Known>>,
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
    pub fn new(client: Client, runtime: Handle, place: Place, cluster: ClusterId, law: Law) -> Self {
        let kind = GroupVersionKind::gvk("engram.dev", "v1alpha1", "PartitionMap");
        let api = Api::namespaced_with(client, &place.namespace, &ApiResource::from_gvk(&kind));
        Self { api, runtime, cluster, law, place, known: Mutex::new(None) }
    }

    /// The same, at the API server that this process's environment names: the one of its pod, or of a kubeconfig.
    ///
    /// # Errors
    /// It names none, or what it names cannot be used.
    pub async fn connect(place: Place, cluster: ClusterId, law: Law) -> Result<Self, Error> {
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
        if let Some(known) = self.remembered()
            && !self.has_moved_on(known.resource_version()).await
        {
            return Ok(Some(known.map));
        }
        // An event tells of one change; there may have been many since.
        Ok(self.read_now().await?.map(|known| known.map))
    }

    /// Whether the object was changed since, or that cannot be told.
    async fn has_moved_on(&self, resource_version: &str) -> bool {
        let one = WatchParams::default().fields(&format!("metadata.name={}", self.place.name)).timeout(WATCH_SECONDS);
        let Ok(events) = answered(self.api.watch(&one, resource_version)).await else { return true };
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
    fn ask<T>(&self, request: impl Future<Output = kube::Result<T>>) -> Result<T, Asked> {
        self.runtime.block_on(answered(request))
    }

    fn failed(&self, action: &'static str, asked: Asked) -> Error {
        let source = match asked {
            Asked::Failed(source) => source,
            Asked::Conflict => io::Error::other("somebody else writes it all the time"),
        };
        Error::Io { action, path: self.path(), source }
    }

    fn object(&self) -> Result<Option<Value>, Error> {
        self.runtime.block_on(self.object_now())
    }

    async fn object_now(&self) -> Result<Option<Value>, Error> {
        let found = answered(self.api.get_opt(&self.place.name)).await.map_err(|asked| self.failed("read", asked))?;
        found.map(|object| self.value(&object)).transpose()
    }

    fn value(&self, object: &DynamicObject) -> Result<Value, Error> {
        serde_json::to_value(object)
            .map_err(|error| Error::Damaged { path: self.path(), why: format!("it is no JSON: {error}") })
    }

    /// Reads what the API server has, and remembers it.
    fn read(&self) -> Result<Option<Known>, Error> {
        self.runtime.block_on(self.read_now())
    }

    async fn read_now(&self) -> Result<Option<Known>, Error> {
        let object = self.object_now().await?;
        let known = object.as_ref().map(|object| self.known_of(object)).transpose();
        self.remember(known.as_ref().ok().cloned().flatten());
        known
    }

    fn known_of(&self, object: &Value) -> Result<Known, Error> {
        let known = layout::read(object).map_err(|unreadable| unreadable.of(self.path()))?;
        if known.map.cluster != self.cluster {
            let (expected, found) = (self.cluster, known.map.cluster);
            return Err(Error::OtherCluster { path: self.path(), expected, found });
        }
        Ok(known)
    }

    fn remember(&self, known: Option<Known>) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = known;
    }

    fn remembered(&self) -> Option<Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes `next` over `known`, together with these annotations.
    fn write(&self, known: Option<&Known>, next: &PartitionMap, annotations: &Value) -> Result<PartitionMap, Asked> {
        let written = match known {
            Some(known) => {
                let patch = layout::patch(known, next, annotations);
                self.ask(self.api.patch(&self.place.name, &PatchParams::default(), &Patch::Merge(&patch)))
            }
            None => {
                let object = layout::first(&self.place, self.law, next, annotations);
                let object = serde_json::from_value(object).map_err(|error| Asked::Failed(io::Error::other(error)))?;
                self.ask(self.api.create(&PostParams::default(), &object))
            }
        };
        let written = written.inspect_err(|_| self.remember(None))?;
        let known = self.value(&written).and_then(|object| self.known_of(&object));
        let known = known.map_err(|error| Asked::Failed(io::Error::other(error)))?;
        let map = known.map.clone();
        self.remember(Some(known));
        Ok(map)
    }
}

/// Waits for the API server, but not for ever.
async fn answered<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Asked> {
    match tokio::time::timeout(DEADLINE, request).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => Err(Asked::Conflict),
        Ok(Err(error)) => Err(Asked::Failed(io::Error::other(error))),
        Err(_) => Err(Asked::Failed(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the API server did not answer within {} s", DEADLINE.as_secs()),
        ))),
    }
}

/// Why the API server did not do it.
enum Asked {
    /// The object is not the one that was read.
    Conflict,
    /// Whether it was done is not known.
    Failed(io::Error),
}

impl MapStore for KubernetesStore {
    fn get(&self) -> Result<Option<PartitionMap>, Error> {
        Ok(self.read()?.map(|known| known.map))
    }

    fn compare_and_swap(&self, expected: Option<u64>, map: PartitionMap) -> Result<PartitionMap, Error> {
        if map.cluster != self.cluster {
            return Err(Error::OtherCluster { path: self.path(), expected: self.cluster, found: map.cluster });
        }
        let mut there = self.remembered().filter(|known| Some(known.map.version) == expected);
        if there.is_none() {
            there = self.read()?;
        }
        for _ in 0..ATTEMPTS {
            let next = successor(there.as_ref().map(|known| &known.map), expected, map.clone())?;
            match self.write(there.as_ref(), &next, &Value::Null) {
                // Perhaps only a mark beside the map was changed.
                Err(Asked::Conflict) => there = self.read()?,
                written => return written.map_err(|asked| self.failed("write", asked)),
            }
        }
        Err(self.failed("write", Asked::Conflict))
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

    fn orders(&self) -> Result<Vec<Order>, Error> {
        let Some(object) = self.object()? else { return Ok(Vec::new()) };
        let Some(text) = layout::annotation(&object, ORDERS) else { return Ok(Vec::new()) };
        order::decode(text).map_err(|unreadable| layout::Unreadable::from(unreadable).of(self.path()))
    }

    fn overrule(&self, expected: Option<u64>, map: PartitionMap, order: Order) -> Result<PartitionMap, Error> {
        if map.cluster != self.cluster {
            return Err(Error::OtherCluster { path: self.path(), expected: self.cluster, found: map.cluster });
        }
        let known = match self.read() {
            Err(Error::Damaged { .. }) if expected.is_none() => None,
            read => read?,
        };
        let next = overruled(known.as_ref().map(|known| &known.map), expected, map)?;
        let mut orders = self.orders()?;
        orders.push(Order { version: next.version, ..order });
        let mut text = order::encode(&orders);
        while text.len() > ORDERS_MOST_BYTES && orders.len() > 1 {
            orders.remove(0);
            text = order::encode(&orders);
        }
        let annotations = json!({ ORDERS: text });
        // One object: the record is there with the map, and not without it.
        let base = match known {
            Some(known) => Some(known),
            None => self.object()?.map(|damaged| Known::damaged(&damaged)),
        };
        self.write(base.as_ref(), &next, &annotations).map_err(|asked| match asked {
            Asked::Conflict => Error::Conflict { expected, found: None },
            asked => self.failed("write", asked),
        })
    }
}
