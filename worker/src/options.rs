//! What a worker is told at its start.

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

/// What a worker is told at its start, as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Options {
    /// Cluster it belongs to, 32 hex digits.
    #[serde(with = "hex")]
    pub cluster: ClusterId,
    /// Name of the cluster.
    pub cluster_name: String,
    /// Place in the cluster, 0 to workers - 1.
    pub ordinal: u32,
    /// Its disk.
    pub state_dir: PathBuf,
    /// Where it listens.
    #[serde(default)]
    pub listen: Listen,
    /// Host under which others reach its listeners; absent = the address that it listens on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advertise_host: Option<String>,
    /// `host:port` of the coordinators. It beats to all of them.
    pub coordinators: Vec<String>,
    /// `host:port` at which this worker finds others' peer listeners, by ordinal, instead of what they say of themselves: for a
    /// proxy in between.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub peer_detours: BTreeMap<u32, String>,
    /// Where the partition map is kept, if this worker reaches it: it writes the map itself while no coordinator answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub map_place: Option<MapPlace>,
    /// Threads of the passes over memories; absent = the cores of the machine. Workers that share a machine share its cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// How many workers share the GPUs of this machine, this one among them; absent = it has all that it sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_workers: Option<u32>,
    /// How long a GPU may take for one wait before it counts as lost; absent = 2 s. Meanwhile this worker answers nothing, and longer
    /// than its leases last others take over what it leads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_deadline_ms: Option<u64>,
    /// Where the volumes are that runs may name, a folder each; absent = runs read the disk of this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs: Option<PathBuf>,
    /// Where the volumes are that snapshots go to and come from, a folder each; absent = there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<PathBuf>,
    /// Certificates; absent = all listeners but that of metrics are in clear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    /// How a new disk is loaded, of a cluster whose specification has a `bootstrap`; absent = as the specification and the environment say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap: Option<Bootstrap>,
    /// The cluster's specification.
    pub spec: LearnerClusterSpec,
}

/// How a new disk is loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Bootstrap {
    /// Workers that the snapshot is shared out between, which a change of their number meanwhile does not change; absent = those of the
    /// specification.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// A folder with the credentials of the storage, where the specification names a Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<PathBuf>,
}

/// TLS on the listeners and towards others, with certificates on both sides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tls {
    /// Where the certificates are.
    pub files: Files,
    /// Whose tokens clients may show instead of a certificate; absent = nobody's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<TokenFiles>,
    /// When clients and administrators are asked to connect anew, which shows their certificate again, in milliseconds; absent = 10 min. Shorter ends
    /// connections of an old certificate sooner, and costs more handshakes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_age_ms: Option<u64>,
    /// How long streams that then go on may still take, in milliseconds; absent = 65 s, more than any call but a stream takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_grace_ms: Option<u64>,
}

/// Where it stands whose tokens are taken, and what their accounts may do. All of it is read again when it changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TokenFiles {
    /// Public keys of the issuer, as a JSON Web Key Set.
    pub keys: PathBuf,
    /// Name of the issuer: what tokens have as `iss`.
    pub issuer: PathBuf,
    /// Rights by account: a list as `spec.access`, as JSON, each with its namespace.
    pub access: PathBuf,
}

/// When clients are asked to connect anew, at most, and how long streams may go on then.
const CONNECTION_AGE: Duration = Duration::from_secs(600);
const CONNECTION_GRACE: Duration = Duration::from_secs(65);
/// Connections of an old certificate end well within the third of its life that is left when the next one comes: this part of a life is
/// their age at most, and their grace.
const PARTS_OF_LIFE: u32 = 6;

impl Tls {
    /// With these files, whose certificates are good for `lifetime` each.
    pub fn of(files: Files, lifetime: Duration) -> Self {
        let ms = |most: Duration| Some(most.min(lifetime / PARTS_OF_LIFE).as_millis() as u64);
        Self { files, tokens: None, connection_age_ms: ms(CONNECTION_AGE), connection_grace_ms: ms(CONNECTION_GRACE) }
    }

    /// When clients and administrators are asked to connect anew.
    pub fn connection_age(&self) -> Duration {
        self.connection_age_ms.map_or(CONNECTION_AGE, Duration::from_millis)
    }

    /// When a connection of theirs ends, whatever goes on over it.
    pub fn connection_lifetime(&self) -> Duration {
        self.connection_age() + self.connection_grace_ms.map_or(CONNECTION_GRACE, Duration::from_millis)
    }
}

/// Where the partition map is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum MapPlace {
    /// In a folder that the workers of a machine share with their coordinator.
    Folder(PathBuf),
    /// In an API server, as a `PartitionMap`. Which server, and with which rights, this process's environment says.
    Object {
        /// Its namespace.
        namespace: String,
        /// Its name: that of the cluster.
        name: String,
    },
}

/// Where a worker listens; port 0 = any free one.
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
    /// Any free ports of `address`.
    pub const fn anywhere(address: IpAddr) -> Self {
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
    /// Its place.
    pub const fn ordinal(&self) -> Ordinal {
        Ordinal(self.ordinal)
    }

    /// What is fixed of the cluster.
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

    /// What a partition is configured to when it is activated.
    ///
    /// # Errors
    /// A learning rate or initial weight that the law does not admit.
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

    /// What its store is told.
    ///
    /// # Errors
    /// As [`Self::settings`].
    pub fn store(&self) -> Result<engram_store::Options, OutOfRange> {
        let mut store = engram_store::Options::new(self.cluster, self.shape(), self.settings()?);
        store.scrub_ms = self.spec.maintenance.scrub_interval.as_millis();
        store.wal.durability = self.durability();
        store.replication.ordinal = self.ordinal();
        store.replication.copies = self.spec.replication_factor;
        store.replication.min_in_sync = self.min_in_sync();
        store.replication.copy_bytes_per_s = self.spec.maintenance.copy_rate.as_bytes();
        Ok(store)
    }

    /// Fewest copies in sync with which a partition takes writes.
    pub const fn min_in_sync(&self) -> usize {
        match self.spec.solo_policy {
            SoloPolicy::MinIsr if self.spec.replication_factor > 1 => 2,
            SoloPolicy::MinIsr | SoloPolicy::SoloDurable => 1,
        }
    }

    /// When a write counts as done.
    pub const fn durability(&self) -> Durability {
        match self.spec.durability.mode {
            engram_api::DurabilityMode::Sync => Durability::Sync,
            engram_api::DurabilityMode::Replicated => Durability::Replicated,
            engram_api::DurabilityMode::Async => Durability::Async,
        }
    }
}

/// The cluster of an id as it is written: 32 hex digits, and no sign before them.
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
            map_place: Some(MapPlace::Object { namespace: "research".into(), name: "demo".into() }),
            threads: Some(2),
            machine_workers: None,
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
    fn options_survive_json_and_misspelt_fields_do_not() {
        let options = options();
        let json = serde_json::to_string(&options).unwrap();
        let read: Options = serde_json::from_str(&json).unwrap();
        assert_eq!((read.cluster, read.spec), (options.cluster, options.spec.clone()));
        assert_eq!((&read.peer_detours, &read.map_place), (&options.peer_detours, &options.map_place));
        assert_eq!(read.tls, options.tls);
        let misspelt = json.replace("stateDir", "statedir");
        assert!(serde_json::from_str::<Options>(&misspelt).unwrap_err().to_string().contains("statedir"));
        assert_eq!(options.settings().unwrap().rate, Settings::DEFAULT_RATE);
    }

    #[test]
    fn a_store_reads_again_and_copies_as_the_manifest_says_and_by_its_own_defaults_where_that_is_silent() {
        let told = |options: &Options| {
            let store = options.store().unwrap();
            (store.scrub_ms, store.replication.copy_bytes_per_s)
        };
        let mut options = options();
        let by_itself = engram_store::Options::new(options.cluster, options.shape(), options.settings().unwrap());
        assert_eq!(told(&options), (by_itself.scrub_ms, by_itself.replication.copy_bytes_per_s));
        let manifest = r#"{ "scrubInterval": "2h", "copyRate": "16Mi/s" }"#;
        options.spec.maintenance = serde_json::from_str(manifest).unwrap();
        assert_eq!(told(&options), (2 * 60 * 60 * 1_000, 16 << 20));
    }
}
