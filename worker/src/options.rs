//! Options of a worker.

use engram_api::{LearnerClusterSpec, SoloPolicy};
use engram_identity::Files;
use engram_memory::edge::OutOfRange;
use engram_memory::{
    CapacityPolicy, ClusterId, FeatureShape, FeatureType, Law, Ordinal, Settings, Shape, Weight, edge,
};
use engram_store::Durability;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Disk space kept in reserve for a start on a full disk: its identity and a small log segment.
const RESERVE_BYTES: u64 = 1 << 20;

/// Options of a worker, as JSON. One public field per setting, therefore more than a dozen.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Options {
    /// Cluster of the worker, 32 hex digits.
    #[serde(with = "hex")]
    pub cluster: ClusterId,
    /// Name of the cluster.
    pub cluster_name: String,
    /// Ordinal in the cluster, 0 to workers - 1.
    pub ordinal: u32,
    /// State directory.
    pub state_dir: PathBuf,
    /// Listen addresses.
    #[serde(default)]
    pub listen: Listen,
    /// Advertised host of its listeners; absent = the listen address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advertise_host: Option<String>,
    /// Coordinators as `host:port`. The worker sends heartbeats to all of them.
    pub coordinators: Vec<String>,
    /// Overrides of other workers' peer addresses as `host:port`, by ordinal, for a proxy in between.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub peer_detours: BTreeMap<u32, String>,
    /// Location of the partition map, if this worker can reach it: it writes the map itself while no coordinator responds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub map_location: Option<MapLocation>,
    /// Threads of passes over memories; absent = all cores. Workers on one machine share its cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Number of workers that share the GPUs of this machine, including this one; absent = all visible GPUs are its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_workers: Option<u32>,
    /// Maximum duration of one wait for a GPU before it counts as failed; absent = 2 s. The worker answers nothing meanwhile, and
    /// if this exceeds its leases, others take over its partitions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_deadline_ms: Option<u64>,
    /// Folder with the volumes that runs may read, one subfolder each; absent = runs read the disk of this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs: Option<PathBuf>,
    /// Files of this machine that clients may name in runs and snapshots; absent = none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_files: Option<LocalFiles>,
    /// Folder with the volumes of snapshots, one subfolder each; absent = there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<PathBuf>,
    /// Certificates; absent = all listeners use plaintext.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    /// How a new disk is loaded in a cluster with `spec.bootstrap`; absent = as the specification and the environment say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap: Option<Bootstrap>,
    /// The cluster's specification.
    pub spec: LearnerClusterSpec,
}

/// How a new disk is loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Bootstrap {
    /// Number of workers that the snapshot is divided between, unaffected by scaling meanwhile; absent = that of the specification.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// Folder with the credentials of the storage, if the specification names a Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<PathBuf>,
}

/// TLS for incoming and outgoing connections, with certificates on both sides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tls {
    /// Certificate files.
    pub files: Files,
    /// Verification of client tokens as an alternative to certificates; absent = tokens are rejected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<TokenFiles>,
    /// Age in milliseconds after which clients and administrators must reconnect, which verifies their certificate again; absent =
    /// 10 min. Shorter ends connections of an old certificate sooner, and costs more handshakes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_age_ms: Option<u64>,
    /// Time in milliseconds for running streams after that; absent = 65 s, longer than any call except streams.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_grace_ms: Option<u64>,
}

/// Files for verifying tokens, and the permissions of their accounts. They are reloaded when they change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TokenFiles {
    /// Public keys of the issuer, as a JSON Web Key Set.
    pub keys: PathBuf,
    /// Name of the issuer: the `iss` of tokens.
    pub issuer: PathBuf,
    /// Permissions by account: JSON in the format of `spec.access`, each with its namespace.
    pub access: PathBuf,
}

/// Maximum age of client connections, and grace period for running streams after it.
const CONNECTION_AGE: Duration = Duration::from_secs(600);
const CONNECTION_GRACE: Duration = Duration::from_secs(65);
/// Connections of an old certificate end well within the third of its lifetime that remains at renewal: age and grace period are
/// each at most this fraction of the lifetime.
const LIFETIME_FRACTION: u32 = 6;

impl Tls {
    /// Creates options for certificates with this lifetime.
    pub fn of(files: Files, lifetime: Duration) -> Self {
        let ms = |maximum: Duration| Some(maximum.min(lifetime / LIFETIME_FRACTION).as_millis() as u64);
        Self { files, tokens: None, connection_age_ms: ms(CONNECTION_AGE), connection_grace_ms: ms(CONNECTION_GRACE) }
    }

    /// Returns the age after which clients and administrators must reconnect.
    pub fn connection_age(&self) -> Duration {
        self.connection_age_ms.map_or(CONNECTION_AGE, Duration::from_millis)
    }

    /// Returns the age after which a connection is closed, including running streams.
    pub fn connection_lifetime(&self) -> Duration {
        self.connection_age() + self.connection_grace_ms.map_or(CONNECTION_GRACE, Duration::from_millis)
    }
}

/// Location of the partition map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum MapLocation {
    /// A folder that the workers of a machine share with their coordinator.
    Folder(PathBuf),
    /// A `PartitionMap` object. The environment of the process determines API server and permissions.
    Object {
        /// Its namespace.
        namespace: String,
        /// Name of the object: that of the cluster.
        name: String,
    },
}

/// Listen addresses of a worker; port 0 = any free port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Listen {
    /// For clients.
    pub client: SocketAddr,
    /// For workers of the same cluster.
    pub peer: SocketAddr,
    /// For administration.
    pub admin: SocketAddr,
    /// For metrics and health, plain HTTP.
    pub http: SocketAddr,
}

impl Listen {
    /// Uses any free ports of `address`.
    pub const fn any_port(address: IpAddr) -> Self {
        let any = SocketAddr::new(address, 0);
        Self { client: any, peer: any, admin: any, http: any }
    }
}

impl Default for Listen {
    fn default() -> Self {
        let at = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
        Self { client: at(7443), peer: at(7444), admin: at(7445), http: at(9090) }
    }
}

impl Options {
    /// Returns the ordinal.
    pub const fn ordinal(&self) -> Ordinal {
        Ordinal(self.ordinal)
    }

    /// Returns the immutable properties of the cluster.
    pub fn shape(&self) -> Shape {
        let dtype = match self.spec.features.dtype {
            engram_api::FeatureType::F16 => FeatureType::F16,
            engram_api::FeatureType::F32 => FeatureType::F32,
        };
        let law = match self.spec.learning.law {
            engram_api::Law::Linear => Law::Linear,
        };
        let features = match self.spec.features.dimension {
            0 => FeatureShape::NONE,
            dimension => FeatureShape { dimension, dtype },
        };
        Shape { partitions: self.spec.partitions, law, features }
    }

    /// Returns the settings of a partition when it is activated.
    ///
    /// # Errors
    /// A learning rate or initial weight is out of range for the law.
    pub fn settings(&self) -> Result<Settings, OutOfRange> {
        let learning = &self.spec.learning;
        let initial = edge::setting(learning.initial_weight)?;
        Ok(Settings {
            rate: edge::rate(learning.rate)?,
            initial_weight: Weight::from_units(initial).expect("a setting is at most ONE"),
            limit: Settings::limit_of(self.spec.capacity.memories, self.spec.partitions),
            policy: match self.spec.capacity.policy {
                engram_api::CapacityPolicy::Evict => CapacityPolicy::Evict,
                engram_api::CapacityPolicy::Refuse => CapacityPolicy::Refuse,
            },
            count_updates: false,
        })
    }

    /// Returns the options of its store.
    ///
    /// # Errors
    /// As [`Self::settings`].
    pub fn store(&self) -> Result<engram_store::Options, OutOfRange> {
        let mut store = engram_store::Options::new(self.cluster, self.shape(), self.settings()?);
        store.reserve_bytes = RESERVE_BYTES;
        if let Some(cache) = self.spec.capacity.payload_cache {
            store.payload_cache_bytes = cache.as_bytes();
        }
        store.scrub_ms = self.spec.maintenance.scrub_interval.as_millis();
        store.wal.durability = self.durability();
        store.replication.ordinal = self.ordinal();
        store.replication.replicas = self.spec.replication_factor;
        store.replication.min_in_sync = self.min_in_sync();
        store.replication.transfer_bytes_per_s = self.spec.maintenance.copy_rate.as_bytes();
        Ok(store)
    }

    /// Returns the minimum number of in-sync replicas for writes.
    pub const fn min_in_sync(&self) -> usize {
        match self.spec.solo_policy {
            SoloPolicy::MinIsr if self.spec.replication_factor > 1 => 2,
            SoloPolicy::MinIsr | SoloPolicy::SoloDurable => 1,
        }
    }

    /// Returns when a write counts as durable.
    pub const fn durability(&self) -> Durability {
        match self.spec.durability.mode {
            engram_api::DurabilityMode::Sync => Durability::Sync,
            engram_api::DurabilityMode::Replicated => Durability::Replicated,
            engram_api::DurabilityMode::Async => Durability::Async,
        }
    }
}

/// Parses a cluster id: 32 hex digits without a sign.
pub(crate) fn cluster_of(id: &str) -> Option<ClusterId> {
    id.parse().ok().filter(|_| id.len() == 32 && !id.starts_with('+'))
}

mod hex {
    use engram_memory::ClusterId;
    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(cluster: &ClusterId, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(cluster)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ClusterId, D::Error> {
        let text = String::deserialize(deserializer)?;
        let wrong = || D::Error::custom(format!("cluster: '{text}' is not allowed; allowed: 32 hex digits"));
        super::cluster_of(&text).ok_or_else(wrong)
    }
}

/// Files of this machine that clients may name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LocalFiles {
    /// File with the owner's key: a client that sends its content may name every file.
    pub owner_key: PathBuf,
    /// Folders that every client may name files in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub folders: Vec<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options {
            cluster: ClusterId(42),
            cluster_name: "demo".into(),
            ordinal: 3,
            state_dir: "/var/lib/engram".into(),
            listen: Listen::default(),
            advertise_host: None,
            coordinators: vec!["127.0.0.1:7440".into()],
            peer_detours: BTreeMap::from([(1, "127.0.0.1:7001".into())]),
            map_location: Some(MapLocation::Object { namespace: "research".into(), name: "demo".into() }),
            threads: Some(2),
            machine_workers: None,
            local_files: None,
            gpu_deadline_ms: None,
            tls: Some(Tls {
                files: Files::pair("/tls/ca.pem", "/tls/worker.pem"),
                tokens: Some(TokenFiles {
                    keys: "/ca/jwks.json".into(),
                    issuer: "/ca/issuer".into(),
                    access: "/etc/access.json".into(),
                }),
                connection_age_ms: None,
                connection_grace_ms: Some(5),
            }),
            inputs: None,
            snapshots: None,
            bootstrap: None,
            spec: LearnerClusterSpec::with_workers(5),
        }
    }

    #[test]
    fn options_round_trip_through_json_and_unknown_fields_are_rejected() {
        let options = options();
        let json = serde_json::to_string(&options).unwrap();
        let read: Options = serde_json::from_str(&json).unwrap();
        assert_eq!((read.cluster, read.spec), (options.cluster, options.spec.clone()));
        assert_eq!((&read.peer_detours, &read.map_location), (&options.peer_detours, &options.map_location));
        assert_eq!(read.tls, options.tls);
        let misspelt = json.replace("stateDir", "statedir");
        assert!(serde_json::from_str::<Options>(&misspelt).unwrap_err().to_string().contains("statedir"));
        assert_eq!(options.settings().unwrap().rate, Settings::DEFAULT_RATE);
    }

    #[test]
    fn store_options_follow_the_manifest_and_default_to_the_stores_own() {
        let configured = |options: &Options| {
            let store = options.store().unwrap();
            (store.scrub_ms, store.replication.transfer_bytes_per_s)
        };
        let mut options = options();
        let defaults = engram_store::Options::new(options.cluster, options.shape(), options.settings().unwrap());
        assert_eq!(configured(&options), (defaults.scrub_ms, defaults.replication.transfer_bytes_per_s));
        let manifest = r#"{ "scrubInterval": "2h", "copyRate": "16Mi/s" }"#;
        options.spec.maintenance = serde_json::from_str(manifest).unwrap();
        assert_eq!(configured(&options), (2 * 60 * 60 * 1_000, 16 << 20));
    }
}
