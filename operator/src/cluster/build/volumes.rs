//! The volumes of a worker's pod.

use k8s_openapi::api::core::v1::{
    ConfigMapProjection, ConfigMapVolumeSource, DownwardAPIProjection, DownwardAPIVolumeFile, EmptyDirVolumeSource,
    KeyToPath, ObjectFieldSelector, PersistentVolumeClaimVolumeSource, ProjectedVolumeSource, SecretVolumeSource,
    ServiceAccountTokenProjection, Volume, VolumeProjection,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::cluster::validate::ValidatedCluster;
use crate::names::CSR_AUDIENCE;

/// Mode of files with secrets: read by the user and the group of the worker.
const SECRET_MODE: i32 = 0o440;

/// Returns the Secret with the storage credentials for bootstrap, which workers read from a volume.
pub(super) fn bootstrap_secret(cluster: &ValidatedCluster) -> Option<&str> {
    let place = &cluster.spec.bootstrap.as_ref()?.snapshot;
    place.secret_ref.as_ref().map(|secret| secret.name.as_str())
}

fn volume(name: impl Into<String>) -> Volume {
    Volume { name: name.into(), ..Volume::default() }
}

fn in_memory(name: &str, limit: &str) -> Volume {
    let source =
        EmptyDirVolumeSource { medium: Some("Memory".to_owned()), size_limit: Some(Quantity(limit.to_owned())) };
    Volume { empty_dir: Some(source), ..volume(name) }
}

fn of_config_map(name: &str, config_map: String) -> Volume {
    let source = ConfigMapVolumeSource { name: config_map, ..ConfigMapVolumeSource::default() };
    Volume { config_map: Some(source), ..volume(name) }
}

fn of_claim(name: String, claim_name: &str, read_only: Option<bool>) -> Volume {
    let source = PersistentVolumeClaimVolumeSource { claim_name: claim_name.to_owned(), read_only };
    Volume { persistent_volume_claim: Some(source), ..volume(name) }
}

/// Returns a volume of several sources.
pub(crate) fn projected(name: &str, sources: Vec<VolumeProjection>) -> Volume {
    let source = ProjectedVolumeSource { sources: Some(sources), ..ProjectedVolumeSource::default() };
    Volume { projected: Some(source), ..volume(name) }
}

/// Returns the source of a token; without an audience, for the API server.
pub(crate) fn token(path: &str, audience: Option<String>, expiration_seconds: i64) -> VolumeProjection {
    let source =
        ServiceAccountTokenProjection { path: path.to_owned(), audience, expiration_seconds: Some(expiration_seconds) };
    VolumeProjection { service_account_token: Some(source), ..VolumeProjection::default() }
}

fn key(name: &str) -> KeyToPath {
    KeyToPath { key: name.to_owned(), path: name.to_owned(), ..KeyToPath::default() }
}

/// Returns the source of one file of a ConfigMap.
pub(crate) fn config_file(config_map: String, file: &str) -> VolumeProjection {
    let source =
        ConfigMapProjection { name: config_map, items: Some(vec![key(file)]), ..ConfigMapProjection::default() };
    VolumeProjection { config_map: Some(source), ..VolumeProjection::default() }
}

fn tokens(cluster: &ValidatedCluster) -> Volume {
    let mut sources = vec![token("token", None, 3_600)];
    if cluster.certificates().is_some() && cluster.provided_secret().is_none() {
        // The shortest possible expiry: it is used at start and for renewals only.
        sources.push(token(CSR_AUDIENCE, Some(CSR_AUDIENCE.to_owned()), 600));
    }
    sources.push(config_file("kube-root-ca.crt".to_owned(), "ca.crt"));
    let field_ref =
        ObjectFieldSelector { field_path: "metadata.namespace".to_owned(), ..ObjectFieldSelector::default() };
    let namespace = DownwardAPIVolumeFile {
        path: "namespace".to_owned(),
        field_ref: Some(field_ref),
        ..DownwardAPIVolumeFile::default()
    };
    sources.push(VolumeProjection {
        downward_api: Some(DownwardAPIProjection { items: Some(vec![namespace]) }),
        ..VolumeProjection::default()
    });
    projected("tokens", sources)
}

/// Returns the volume with the key and the certificate of a worker.
fn identity(cluster: &ValidatedCluster) -> Volume {
    match cluster.provided_secret() {
        // Not optional: a new pod waits for it, and deleting it by mistake does not affect running pods.
        Some(secret) => {
            let source = SecretVolumeSource {
                secret_name: Some(secret),
                default_mode: Some(SECRET_MODE),
                items: Some(["tls.crt", "tls.key"].map(key).into()),
                ..SecretVolumeSource::default()
            };
            Volume { secret: Some(source), ..volume("identity") }
        }
        // The pod generates its key, which is never on disk.
        None => in_memory("identity", "1Mi"),
    }
}

pub(super) fn volumes(cluster: &ValidatedCluster) -> Vec<Volume> {
    let mut volumes = vec![of_config_map("config", cluster.names.config()), in_memory("tmp", "64Mi"), tokens(cluster)];
    if cluster.certificates().is_some() {
        volumes.extend([of_config_map("ca", cluster.names.ca()), identity(cluster)]);
    }
    if cluster.is_ephemeral() {
        volumes.push(Volume { empty_dir: Some(EmptyDirVolumeSource::default()), ..volume("data") });
    }
    volumes.extend(
        cluster.spec.inputs.iter().flatten().map(|input| {
            of_claim(format!("input-{}", input.name), &input.persistent_volume_claim.claim_name, Some(true))
        }),
    );
    volumes.extend(cluster.spec.snapshot_volumes.iter().flatten().map(|volume| {
        of_claim(format!("snapshots-{}", volume.name), &volume.persistent_volume_claim.claim_name, None)
    }));
    if let Some(secret) = bootstrap_secret(cluster) {
        // Optional: it is not needed after bootstrap, and its absence before is reported by the worker.
        let source = SecretVolumeSource {
            secret_name: Some(secret.to_owned()),
            optional: Some(true),
            default_mode: Some(SECRET_MODE),
            ..SecretVolumeSource::default()
        };
        volumes.push(Volume { secret: Some(source), ..volume("bootstrap") });
    }
    volumes
}
