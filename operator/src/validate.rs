//! From an object of the API server to a cluster that can be planned for, or to what is wrong with it.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use engram_api::kubernetes_only::{IssuerRef, TlsMode};
use engram_api::{LearnerClusterSpec, crd, parse_object};
use engram_identity::LIFETIME;
use serde_json::Value;

use crate::names::Names;

/// Why a cluster is refused: the sentences that a person reads in its `Accepted` condition.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InvalidSpec {
    /// One sentence per problem, each with the field, what was found and what is allowed.
    pub message: String,
}

/// A cluster whose spec is complete and within all rules.
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
    /// Returns the identity that a new cluster of this object gets: 32 hexadecimal digits. An object's UID is given once
    /// in the life of an API server, so that no second cluster has it.
    pub fn new_cluster_id(&self) -> String {
        self.uid.chars().filter(char::is_ascii_hexdigit).collect::<String>().to_ascii_lowercase()
    }

    /// Whether the state lies in the pods.
    pub fn is_ephemeral(&self) -> bool {
        self.spec.storage.as_ref().and_then(|storage| storage.ephemeral) == Some(true)
    }

    /// Whether its pods claim a device by a template, and not as a resource.
    pub fn claims_gpu(&self) -> bool {
        self.spec.gpu.resource_claim_template_name.as_ref().is_some_and(|name| !name.is_empty())
    }

    /// How long a certificate of its processes is valid, where they have any.
    pub fn certificates(&self) -> Option<Duration> {
        let lifetime = self.spec.tls.as_ref().and_then(|tls| tls.certificate_lifetime);
        let lifetime = lifetime.map_or(LIFETIME, |lifetime| Duration::from_millis(lifetime.as_millis()));
        (self.spec.tls_mode() != TlsMode::Disabled).then_some(lifetime)
    }

    /// The Secret with the certificate of its workers, where somebody else gives them one.
    pub fn provided_secret(&self) -> Option<String> {
        match self.spec.tls_mode() {
            TlsMode::Secret => self.spec.tls.as_ref()?.secret_name.clone(),
            TlsMode::CertManager => Some(self.names.certificate()),
            TlsMode::Auto | TlsMode::Disabled => None,
        }
    }

    /// The issuer of cert-manager that signs for its workers, where it is asked for their certificate.
    pub fn issuer(&self) -> Option<&IssuerRef> {
        self.spec.tls.as_ref().filter(|tls| tls.mode == Some(TlsMode::CertManager))?.issuer_ref.as_ref()
    }

    /// Whether reconciliation is paused.
    pub fn is_paused(&self) -> bool {
        self.spec.paused == Some(true)
    }

    /// Whether the cluster shall be suspended.
    pub fn is_suspended(&self) -> bool {
        self.spec.suspend == Some(true)
    }
}

/// The schema that has the defaults; made once, since every look at a cluster needs it.
static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let definition = crd::definition("learnerclusters").expect("there is such a kind");
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
});

/// Checks `object`, a `LearnerCluster` as JSON, and fills in what an older API server or definition left out.
///
/// # Errors
///
/// All problems at once, in the order of the fields.
pub fn validate(object: &Value) -> Result<ValidatedCluster, InvalidSpec> {
    let mut object = object.clone();
    crd::fill_defaults(&SCHEMA, &mut object);
    let manifest = parse_object(&object).map_err(|problems| {
        let sentences: Vec<&str> = problems.iter().map(|problem| problem.message()).collect();
        InvalidSpec { message: sentences.join("; ") }
    })?;
    let cluster = manifest.cluster.ok_or_else(|| InvalidSpec { message: "kind is not LearnerCluster".into() })?;
    let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
    let annotations = object.pointer("/metadata/annotations").cloned().unwrap_or_default();
    Ok(ValidatedCluster {
        names: Names { cluster: cluster.metadata.name },
        namespace: text("/metadata/namespace"),
        uid: text("/metadata/uid"),
        generation: object.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or_default(),
        annotations: serde_json::from_value(annotations).unwrap_or_default(),
        spec: cluster.spec,
    })
}
