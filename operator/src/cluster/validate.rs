//! Validation of LearnerCluster objects.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use engram_api::kubernetes_only::{IssuerRef, RetainPolicy, TlsMode};
use engram_api::{LearnerClusterSpec, crd, parse_object};
use engram_identity::LIFETIME;
use serde_json::Value;

use crate::cluster::object::ClusterObject;
use crate::kube::stored_object::StoredObject as _;
use crate::names::Names;

/// Why a spec is invalid: the message of condition `Accepted`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InvalidSpec {
    /// One sentence per problem, each with the field, its value and the allowed values.
    pub message: String,
}

/// A cluster with a valid spec and all defaults.
#[derive(Clone, Debug)]
pub struct ValidatedCluster {
    /// Names of its objects.
    pub names: Names,
    /// Its namespace.
    pub namespace: String,
    /// UID of the object.
    pub uid: String,
    /// Generation of the object.
    pub generation: i64,
    /// Annotations of the object.
    pub annotations: BTreeMap<String, String>,
    /// The spec with every default filled in.
    pub spec: LearnerClusterSpec,
}

impl ValidatedCluster {
    /// Returns the id of a new cluster, 32 hexadecimal digits from the object's UID, which the API server never reuses.
    pub fn new_cluster_id(&self) -> String {
        self.uid.chars().filter(char::is_ascii_hexdigit).collect::<String>().to_ascii_lowercase()
    }

    /// Returns whether the data is in the pods.
    pub fn is_ephemeral(&self) -> bool {
        self.spec.storage.as_ref().and_then(|storage| storage.ephemeral) == Some(true)
    }

    /// Returns whether its data, and therefore its map, is deleted with it.
    pub fn is_data_deleted_with_it(&self) -> bool {
        let policy = self.spec.storage.as_ref().and_then(|storage| storage.retain_policy);
        policy == Some(RetainPolicy::Delete) || self.is_ephemeral()
    }

    /// Returns whether its pods claim GPUs by a ResourceClaimTemplate.
    pub fn claims_gpu(&self) -> bool {
        self.spec.gpu.resource_claim_template_name.as_ref().is_some_and(|name| !name.is_empty())
    }

    /// Returns the certificate lifetime, if TLS is enabled.
    pub fn certificates(&self) -> Option<Duration> {
        let lifetime = self.spec.tls.as_ref().and_then(|tls| tls.certificate_lifetime);
        let lifetime = lifetime.map_or(LIFETIME, |lifetime| Duration::from_millis(lifetime.as_millis()));
        (self.spec.tls_mode() != TlsMode::Disabled).then_some(lifetime)
    }

    /// Returns the Secret with the provided certificate of its workers, if any.
    pub fn provided_secret(&self) -> Option<String> {
        match self.spec.tls_mode() {
            TlsMode::Secret => self.spec.tls.as_ref()?.secret_name.clone(),
            TlsMode::CertManager => Some(self.names.certificate()),
            TlsMode::Auto | TlsMode::Disabled => None,
        }
    }

    /// Returns the cert-manager issuer of its workers' certificate, if any.
    pub fn issuer(&self) -> Option<&IssuerRef> {
        self.spec.tls.as_ref().filter(|tls| tls.mode == Some(TlsMode::CertManager))?.issuer_ref.as_ref()
    }

    /// Returns whether reconciliation is paused.
    pub fn is_paused(&self) -> bool {
        self.spec.paused == Some(true)
    }

    /// Returns whether suspension is requested.
    pub fn is_suspended(&self) -> bool {
        self.spec.suspend == Some(true)
    }
}

/// The schema with the defaults, cached for all reconciles.
static SCHEMA: LazyLock<Value> = LazyLock::new(|| crd::schema("learnerclusters").expect("there is such a kind"));

/// Validates a `LearnerCluster`, and fills in defaults that an older CustomResourceDefinition left out.
///
/// # Errors
///
/// Returns all problems at once, in the order of the fields.
pub fn validate(object: &ClusterObject) -> Result<ValidatedCluster, InvalidSpec> {
    Ok(validated(object, check(object.manifest())?))
}

/// Validates a cluster with another spec.
///
/// # Errors
///
/// Returns all problems at once, in the order of the fields.
pub(crate) fn validate_with_spec(object: &ClusterObject, spec: Value) -> Result<ValidatedCluster, InvalidSpec> {
    Ok(validated(object, check(object.manifest_with_spec(spec))?))
}

fn check(mut manifest: Value) -> Result<LearnerClusterSpec, InvalidSpec> {
    crd::fill_defaults(&SCHEMA, &mut manifest);
    let manifest = parse_object(&manifest).map_err(|problems| {
        let sentences: Vec<&str> = problems.iter().map(|problem| problem.message()).collect();
        InvalidSpec { message: sentences.join("; ") }
    })?;
    let cluster = manifest.cluster.ok_or_else(|| InvalidSpec { message: "kind is not LearnerCluster".into() })?;
    Ok(cluster.spec)
}

fn validated(object: &ClusterObject, spec: LearnerClusterSpec) -> ValidatedCluster {
    ValidatedCluster {
        names: Names { cluster: object.name().to_owned() },
        namespace: object.namespace().to_owned(),
        uid: object.uid().to_owned(),
        generation: object.generation(),
        annotations: object.metadata.annotations.clone().unwrap_or_default(),
        spec,
    }
}
