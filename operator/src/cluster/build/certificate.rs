//! The cert-manager Certificate of a cluster, shared by all its workers.

use std::time::Duration;

use engram_identity::Name;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;

use super::{metadata, text};
use crate::cluster::validate::ValidatedCluster;
use crate::kube::api_object::{ApiObject, to_json};
use crate::kube::resource_kinds::CERTIFICATE;

/// A Certificate of cert-manager 1, as far as the operator sets it; nothing in this tree has its types.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Certificate {
    api_version: &'static str,
    kind: &'static str,
    metadata: ObjectMeta,
    spec: CertificateSpec,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CertificateSpec {
    secret_name: String,
    issuer_ref: Issuer,
    uris: [String; 1],
    usages: [&'static str; 3],
    private_key: PrivateKey,
    duration: String,
    renew_before: String,
}

#[derive(Serialize)]
struct Issuer {
    name: String,
    kind: String,
    group: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PrivateKey {
    algorithm: &'static str,
    size: u32,
    encoding: &'static str,
    rotation_policy: &'static str,
}

/// Builds the `Certificate` with the name that the workers must have; `None` without `tls.mode: CertManager`. It is not part of
/// [`super::objects`], since it is created first and API servers may not serve its kind.
pub fn certificate(cluster: &ValidatedCluster, needed: &Name) -> Option<ApiObject> {
    let (issuer, secret_name, lifetime) = (cluster.issuer()?, cluster.provided_secret()?, cluster.certificates()?);
    let or = |value: &Option<String>, otherwise: &str| text(value.as_ref()).unwrap_or_else(|| otherwise.to_owned());
    let certificate = Certificate {
        api_version: "cert-manager.io/v1",
        kind: "Certificate",
        metadata: metadata(cluster, cluster.names.certificate()),
        spec: CertificateSpec {
            secret_name,
            issuer_ref: Issuer {
                name: or(&issuer.name, ""),
                kind: or(&issuer.kind, "Issuer"),
                group: or(&issuer.group, "cert-manager.io"),
            },
            uris: [needed.to_string()],
            usages: ["digital signature", "server auth", "client auth"],
            // Limits the use of a leaked key to one renewal period.
            private_key: PrivateKey { algorithm: "ECDSA", size: 256, encoding: "PKCS8", rotation_policy: "Always" },
            duration: go_duration(lifetime),
            // Renewed after two thirds of its lifetime, like the operator's own certificates.
            renew_before: go_duration(lifetime / 3),
        },
    };
    Some(ApiObject::new(CERTIFICATE, to_json(&certificate)))
}

/// Formats a duration as Go does. cert-manager normalizes durations, so another spelling would be a permanent difference.
fn go_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match (seconds / 3_600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds}s"),
        (0, minutes, seconds) => format!("{minutes}m{seconds}s"),
        (hours, minutes, seconds) => format!("{hours}h{minutes}m{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_formatted_as_in_go() {
        let of = |seconds| go_duration(Duration::from_secs(seconds));
        assert_eq!([of(86_400), of(3_600), of(1_200), of(90), of(59)], ["24h0m0s", "1h0m0s", "20m0s", "1m30s", "59s"]);
    }
}
