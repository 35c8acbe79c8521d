//! Converts the settings of the operator and the kubelet to the options of a worker.
//!
//! The file is the same for all workers of a cluster; ordinal and address come from the environment. Unknown fields are ignored,
//! because a newer operator may manage older workers.
//!
//! Pure: `environment` reads the file and the variables. Fuzzing compiles this file on its own.

use crate::options::{self, Bootstrap, Listen, MapLocation, Options};
use anyhow::{Context as _, Result, bail, ensure};
use engram_api::LearnerClusterSpec;
use engram_api::kubernetes_only::TlsMode;
use engram_memory::{ClusterId, MAX_DIMENSION, MAX_PARTITIONS};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

/// Ports of the pod: clients, other workers, operator, HTTP.
const PORTS: [u16; 4] = [7443, 7444, 7445, 9090];
/// Maximum number of workers and replicas of a cluster, as in the manifest.
const MAX_WORKERS: u32 = 100;
const MAX_REPLICAS: u32 = 3;
/// Mount path of the volumes that runs may read.
const INPUTS: &str = "/inputs";
/// Mount path of the volumes of snapshots.
const SNAPSHOTS: &str = "/snapshots";
/// Mount path of the Secret of the storage that a new cluster starts from.
const BOOTSTRAP: &str = "/bootstrap";
/// The fields of a cluster's specification that workers use.
const SPEC: [&str; 13] = [
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
    "buffers",
    "bootstrap",
];

/// Parsed settings of the operator.
#[derive(Debug, Clone)]
pub struct Settings {
    pub(super) cluster: ClusterId,
    pub(super) coordinators: Vec<String>,
    listen: Option<Listen>,
    threads: Option<usize>,
    pub(super) has_certificates: bool,
    /// Whether the certificate comes from a mounted Secret and is not requested.
    pub(super) has_mounted_certificates: bool,
    bootstrap_workers: Option<u32>,
    spec: LearnerClusterSpec,
}

/// The fields that are not part of the specification.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SettingsFile {
    cluster_id: String,
    coordinators: Vec<String>,
    listen: Option<Listen>,
    threads: Option<usize>,
    bootstrap_workers: Option<u32>,
    tls: Option<TlsSettings>,
}

/// Source of certificates; absent in a plaintext cluster. The operator knows their lifetime.
#[derive(Deserialize)]
struct TlsSettings {
    mode: Option<TlsMode>,
}

/// Identity of the pod, from the kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInfo {
    /// Name of the cluster.
    pub cluster: String,
    /// Ordinal of the worker.
    pub ordinal: u32,
    /// Namespace of the pod and its cluster; without it this worker never writes the map directly.
    pub namespace: Option<String>,
    /// Address at which others reach this pod.
    pub address: IpAddr,
}

impl Settings {
    /// Parses the operator's file.
    ///
    /// # Errors
    /// It lacks a field, or requests a feature that this version does not have.
    pub fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)?;
        let fields_outside_spec: SettingsFile = serde_json::from_value(value.clone())?;
        let cluster = options::cluster_of(&fields_outside_spec.cluster_id);
        let cluster = cluster
            .with_context(|| format!("clusterId: '{}'; allowed: 32 hex digits", fields_outside_spec.cluster_id))?;
        ensure!(!fields_outside_spec.coordinators.is_empty(), "coordinators: none; allowed: at least one HOST:PORT");
        let bootstrap_workers = fields_outside_spec.bootstrap_workers.unwrap_or(1);
        ensure!(
            (1..=MAX_WORKERS).contains(&bootstrap_workers),
            "bootstrapWorkers: {bootstrap_workers}; allowed: 1 to {MAX_WORKERS}"
        );
        let Value::Object(fields) = value else { bail!("not an object") };
        let spec = spec(fields)?;
        let SettingsFile { coordinators, listen, threads, bootstrap_workers, tls, .. } = fields_outside_spec;
        let mode = tls.and_then(|tls| tls.mode).unwrap_or(TlsMode::Disabled);
        let (has_certificates, is_given_certificates) = (mode != TlsMode::Disabled, mode == TlsMode::Secret);
        Ok(Self {
            cluster,
            coordinators,
            listen,
            threads,
            bootstrap_workers,
            has_certificates,
            has_mounted_certificates: is_given_certificates,
            spec,
        })
    }

    /// Returns the options of the worker of the pod `info`, with its disk at `state_dir`.
    pub fn options(self, info: PodInfo, state_dir: PathBuf) -> Options {
        let any_address: IpAddr = match info.address {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let [client, peer, admin, http] = PORTS.map(|port| SocketAddr::new(any_address, port));
        let host = match info.address {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        };
        Options {
            cluster: self.cluster,
            cluster_name: info.cluster.clone(),
            ordinal: info.ordinal,
            state_dir,
            listen: self.listen.unwrap_or(Listen { client, peer, admin, http }),
            advertise_host: Some(host),
            coordinators: self.coordinators,
            peer_detours: BTreeMap::new(),
            map_location: info.namespace.map(|namespace| MapLocation::Object { namespace, name: info.cluster.clone() }),
            threads: self.threads,
            machine_workers: None,
            local_files: None,
            gpu_deadline_ms: None,
            tls: None,
            inputs: Some(INPUTS.into()),
            snapshots: Some(SNAPSHOTS.into()),
            bootstrap: Some(Bootstrap { workers: self.bootstrap_workers, credentials: Some(BOOTSTRAP.into()) }),
            spec: self.spec,
        }
    }
}

/// Extracts the specification from the fields. A null field is one that was not set.
fn spec(mut fields: Map<String, Value>) -> Result<LearnerClusterSpec> {
    fields.retain(|name, value| SPEC.contains(&name.as_str()) && !value.is_null());
    let replicas = fields.get("replicationFactor").cloned().context("replicationFactor: missing")?;
    // Used only in reports: the map shows how many workers there are.
    fields.entry("workers").or_insert(replicas);
    let spec: LearnerClusterSpec = serde_json::from_value(Value::Object(fields))?;
    // Checked first, because memory is allocated by these numbers.
    let dimension = u64::from(spec.features.dimension);
    for (name, value, least, most) in [
        ("workers", u64::from(spec.workers), 1, MAX_WORKERS.into()),
        ("replicationFactor", spec.replication_factor.into(), 1, MAX_REPLICAS.into()),
        ("partitions", spec.partitions.into(), 1, MAX_PARTITIONS.into()),
        ("features.dimension", dimension, 0, MAX_DIMENSION.into()),
    ] {
        ensure!((least..=most).contains(&value), "{name}: {value}; allowed: {least} to {most}");
    }
    Ok(spec)
}

/// Returns the ordinal of a StatefulSet's pod.
pub(super) fn ordinal_of(pod: &str) -> Result<u32> {
    let number = pod.rsplit_once('-').and_then(|(_, number)| number.parse().ok());
    number.with_context(|| format!("POD_NAME: '{pod}'; allowed: a name that ends in -0, -1 and so on"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A file of the operator, with a field of a later version.
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

    fn info(address: &str) -> PodInfo {
        PodInfo {
            cluster: "words".into(),
            ordinal: ordinal_of("words-worker-12").unwrap(),
            namespace: Some("research".into()),
            address: address.parse().unwrap(),
        }
    }

    #[test]
    fn the_operators_file_and_the_pods_name_determine_the_options() {
        let settings = Settings::parse(&file().to_string()).unwrap();
        assert!(!settings.has_certificates);
        let options = settings.clone().options(info("10.244.2.7"), STATE.into());
        assert_eq!((options.ordinal, options.spec.partitions, options.spec.replication_factor), (12, 256, 2));
        assert_eq!(options.listen.client.to_string(), "0.0.0.0:7443");
        assert_eq!(options.advertise_host.as_deref(), Some("10.244.2.7"));
        assert_eq!(options.coordinators, ["engram-coordinator.engram.svc:7440"]);
        let map = MapLocation::Object { namespace: "research".into(), name: "words".into() };
        assert_eq!(options.map_location, Some(map), "a worker in a pod can write the map itself");
        let options = settings.options(info("fd00::7"), STATE.into());
        assert_eq!(
            (options.listen.http.to_string().as_str(), options.advertise_host.as_deref()),
            ("[::]:9090", Some("[fd00::7]"))
        );
    }

    const STATE: &str = "/var/lib/engram";

    #[test]
    fn invalid_settings_are_rejected_by_field() {
        let error_of = |change: &dyn Fn(&mut Value)| {
            let mut file = file();
            change(&mut file);
            format!("{:#}", Settings::parse(&file.to_string()).unwrap_err())
        };
        assert!(error_of(&|file| file["clusterId"] = "words".into()).contains("32 hex digits"));
        assert!(error_of(&|file| file["coordinators"] = json!([])).contains("coordinators: none"));
        assert!(error_of(&|file| file["replicationFactor"] = Value::Null).contains("replicationFactor: missing"));
        for (field, number, message) in [
            ("partitions", 0, "partitions: 0; allowed: 1 to 1024"),
            ("replicationFactor", 4, "replicationFactor: 4; allowed: 1 to 3"),
            ("workers", 101, "workers: 101; allowed: 1 to 100"),
            ("bootstrapWorkers", u32::MAX, "bootstrapWorkers: 4294967295; allowed: 1 to 100"),
        ] {
            assert!(error_of(&|file| file[field] = number.into()).contains(message), "{message}");
        }
        let wide = error_of(&|file| file["features"]["dimension"] = 4_097.into());
        assert!(wide.contains("features.dimension: 4097; allowed: 0 to 4096"), "{wide}");
        let signed = "+0f6c1d528a534a0a9d1e2f8f5f0f7a1";
        assert!(error_of(&|file| file["clusterId"] = signed.into()).contains("32 hex digits"));
        assert!(error_of(&|file| file["gpu"]["mode"] = "Sometimes".into()).contains("Sometimes"));
        assert!(ordinal_of("words-worker").unwrap_err().to_string().contains("'words-worker'"));
    }
}
