//! What the operator mounts and the kubelet says, as a worker's options.
//!
//! The file is the same for all workers of a cluster; place and address come from the environment. Fields that this version does not
//! know are passed over: a newer operator looks after older workers.
//!
//! Text in, options out: what reads files and variables is beside it, in `environment`. Fuzzing compiles this file by itself.

use crate::options::{self, Bootstrap, Listen, MapPlace, Options};
use anyhow::{Context as _, Result, bail, ensure};
use engram_api::LearnerClusterSpec;
use engram_api::kubernetes_only::TlsMode;
use engram_memory::{ClusterId, MAX_DIMENSION, MAX_PARTITIONS};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

/// Ports of the pod: for clients, other workers, the operator, and plain HTTP.
const PORTS: [u16; 4] = [7443, 7444, 7445, 9090];
/// Most workers and copies of a cluster, as the manifest has them.
const MAX_WORKERS: u32 = 100;
const MAX_COPIES: u32 = 3;
/// Where the volumes are mounted that runs may name.
const INPUTS: &str = "/inputs";
/// Where those are that snapshots go to and come from.
const SNAPSHOTS: &str = "/snapshots";
/// Where the Secret is mounted of the storage that a new cluster begins from.
const BOOTSTRAP: &str = "/bootstrap";
/// The part of a cluster's specification that a worker is told of.
const SPEC: [&str; 12] = [
    "workers",
    "replicationFactor",
    "partitions",
    "capacity",
    "learning",
    "features",
    "durability",
    "soloPolicy",
    "restartGrace",
    "maintenance",
    "gpu",
    "bootstrap",
];

/// What the operator's file says.
#[derive(Debug, Clone)]
pub struct Settings {
    pub(super) cluster: ClusterId,
    pub(super) coordinators: Vec<String>,
    listen: Option<Listen>,
    threads: Option<usize>,
    pub(super) has_certificates: bool,
    /// Whether they come from a Secret that is mounted, and nobody signs.
    pub(super) is_given_certificates: bool,
    bootstrap_workers: Option<u32>,
    spec: LearnerClusterSpec,
}

/// The fields beside those of the specification.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Own {
    cluster_id: String,
    coordinators: Vec<String>,
    listen: Option<Listen>,
    threads: Option<usize>,
    bootstrap_workers: Option<u32>,
    tls: Option<OwnTls>,
}

/// Where certificates come from, which a cluster in clear says nothing of: the operator knows how long they are good.
#[derive(Deserialize)]
struct OwnTls {
    mode: Option<TlsMode>,
}

/// What the kubelet says: which pod this is, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Name of the cluster.
    pub cluster: String,
    /// Place in it.
    pub ordinal: u32,
    /// Namespace of the pod, which its cluster is in too; without it this worker never writes the map itself.
    pub namespace: Option<String>,
    /// Where others reach this pod.
    pub address: IpAddr,
}

impl Settings {
    /// Reads the text of the operator's file.
    ///
    /// # Errors
    /// It lacks something, or asks for what this version does not have.
    pub fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)?;
        let own: Own = serde_json::from_value(value.clone())?;
        let cluster = options::cluster_of(&own.cluster_id);
        let cluster = cluster.with_context(|| format!("clusterId: '{}'; allowed: 32 hex digits", own.cluster_id))?;
        ensure!(!own.coordinators.is_empty(), "coordinators: none; allowed: at least one HOST:PORT");
        let sharers = own.bootstrap_workers.unwrap_or(1);
        ensure!((1..=MAX_WORKERS).contains(&sharers), "bootstrapWorkers: {sharers}; allowed: 1 to {MAX_WORKERS}");
        let Value::Object(fields) = value else { bail!("not an object") };
        let spec = spec(fields)?;
        let Own { coordinators, listen, threads, bootstrap_workers, tls, .. } = own;
        let mode = tls.and_then(|tls| tls.mode).unwrap_or(TlsMode::Disabled);
        let (has_certificates, is_given_certificates) = (mode != TlsMode::Disabled, mode == TlsMode::Secret);
        Ok(Self {
            cluster,
            coordinators,
            listen,
            threads,
            bootstrap_workers,
            has_certificates,
            is_given_certificates,
            spec,
        })
    }

    /// The options of the worker at `place`, with its disk at `state_dir`.
    pub fn options(self, place: Place, state_dir: PathBuf) -> Options {
        let everywhere: IpAddr = match place.address {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let [client, peer, admin, http] = PORTS.map(|port| SocketAddr::new(everywhere, port));
        let host = match place.address {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        };
        Options {
            cluster: self.cluster,
            cluster_name: place.cluster.clone(),
            ordinal: place.ordinal,
            state_dir,
            listen: self.listen.unwrap_or(Listen { client, peer, admin, http }),
            advertise_host: Some(host),
            coordinators: self.coordinators,
            peer_detours: BTreeMap::new(),
            map_place: place.namespace.map(|namespace| MapPlace::Object { namespace, name: place.cluster.clone() }),
            threads: self.threads,
            machine_workers: None,
            gpu_deadline_ms: None,
            tls: None,
            inputs: Some(INPUTS.into()),
            snapshots: Some(SNAPSHOTS.into()),
            bootstrap: Some(Bootstrap { workers: self.bootstrap_workers, credentials: Some(BOOTSTRAP.into()) }),
            spec: self.spec,
        }
    }
}

/// The specification among the fields. A field without a value is one that was not set.
fn spec(mut fields: Map<String, Value>) -> Result<LearnerClusterSpec> {
    fields.retain(|name, value| SPEC.contains(&name.as_str()) && !value.is_null());
    let copies = fields.get("replicationFactor").cloned().context("replicationFactor: missing")?;
    // Told in reports alone: how many there are, a worker learns from the map.
    fields.entry("workers").or_insert(copies);
    let spec: LearnerClusterSpec = serde_json::from_value(Value::Object(fields))?;
    // What memory is taken for before anybody else looks at it.
    let dimension = u64::from(spec.features.dimension);
    for (name, found, least, most) in [
        ("workers", u64::from(spec.workers), 1, MAX_WORKERS.into()),
        ("replicationFactor", spec.replication_factor.into(), 1, MAX_COPIES.into()),
        ("partitions", spec.partitions.into(), 1, MAX_PARTITIONS.into()),
        ("features.dimension", dimension, 0, MAX_DIMENSION.into()),
    ] {
        ensure!((least..=most).contains(&found), "{name}: {found}; allowed: {least} to {most}");
    }
    Ok(spec)
}

/// The place of a StatefulSet's pod.
pub(super) fn ordinal_of(pod: &str) -> Result<u32> {
    let number = pod.rsplit_once('-').and_then(|(_, number)| number.parse().ok());
    number.with_context(|| format!("POD_NAME: '{pod}'; allowed: a name that ends in -0, -1 and so on"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// As the operator writes it, with a field that a later operator may add.
    fn file() -> Value {
        json!({
            "clusterId": "0f6c1d528a534a0a9d1e2f8f5f0f7a11",
            "coordinators": ["engram-coordinator.engram.svc:7440"],
            "replicationFactor": 2, "partitions": 256,
            "capacity": { "memories": 1_000_000, "policy": "Evict" },
            "learning": { "decay": 0.01, "initialWeight": 0.5, "law": "Linear", "rate": 0.05 },
            "features": { "dimension": 0, "dtype": "F16" },
            "durability": { "mode": "Sync" }, "soloPolicy": "SoloDurable", "restartGrace": "3s",
            "gpu": { "mode": "Auto", "threshold": null },
            "fieldOfALaterOperator": true,
        })
    }

    fn place(address: &str) -> Place {
        Place {
            cluster: "words".into(),
            ordinal: ordinal_of("words-worker-12").unwrap(),
            namespace: Some("research".into()),
            address: address.parse().unwrap(),
        }
    }

    #[test]
    fn the_operators_file_and_the_pods_name_make_a_worker() {
        let settings = Settings::parse(&file().to_string()).unwrap();
        assert!(!settings.has_certificates);
        let options = settings.clone().options(place("10.244.2.7"), STATE.into());
        assert_eq!((options.ordinal, options.spec.partitions, options.spec.replication_factor), (12, 256, 2));
        assert_eq!(options.listen.client.to_string(), "0.0.0.0:7443");
        assert_eq!(options.advertise_host.as_deref(), Some("10.244.2.7"));
        assert_eq!(options.coordinators, ["engram-coordinator.engram.svc:7440"]);
        let map = MapPlace::Object { namespace: "research".into(), name: "words".into() };
        assert_eq!(options.map_place, Some(map), "a worker in a pod can write the map itself");
        let options = settings.options(place("fd00::7"), STATE.into());
        assert_eq!(
            (options.listen.http.to_string().as_str(), options.advertise_host.as_deref()),
            ("[::]:9090", Some("[fd00::7]"))
        );
    }

    const STATE: &str = "/var/lib/engram";

    #[test]
    fn what_is_missing_or_not_there_yet_is_named() {
        let refused = |change: &dyn Fn(&mut Value)| {
            let mut file = file();
            change(&mut file);
            format!("{:#}", Settings::parse(&file.to_string()).unwrap_err())
        };
        assert!(refused(&|file| file["clusterId"] = "words".into()).contains("32 hex digits"));
        assert!(refused(&|file| file["coordinators"] = json!([])).contains("coordinators: none"));
        assert!(refused(&|file| file["replicationFactor"] = Value::Null).contains("replicationFactor: missing"));
        for (field, number, told) in [
            ("partitions", 0, "partitions: 0; allowed: 1 to 1024"),
            ("replicationFactor", 4, "replicationFactor: 4; allowed: 1 to 3"),
            ("workers", 101, "workers: 101; allowed: 1 to 100"),
            ("bootstrapWorkers", u32::MAX, "bootstrapWorkers: 4294967295; allowed: 1 to 100"),
        ] {
            assert!(refused(&|file| file[field] = number.into()).contains(told), "{told}");
        }
        let wide = refused(&|file| file["features"]["dimension"] = 4_097.into());
        assert!(wide.contains("features.dimension: 4097; allowed: 0 to 4096"), "{wide}");
        let signed = "+0f6c1d528a534a0a9d1e2f8f5f0f7a1";
        assert!(refused(&|file| file["clusterId"] = signed.into()).contains("32 hex digits"));
        assert!(refused(&|file| file["gpu"]["mode"] = "Sometimes".into()).contains("Sometimes"));
        assert!(ordinal_of("words-worker").unwrap_err().to_string().contains("'words-worker'"));
    }
}
