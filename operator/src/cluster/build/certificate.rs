//! The cert-manager Certificate of a cluster, shared by all its workers.

use std::time::Duration;

use engram_identity::Name;
use serde_json::{Value, json};

use super::metadata;
use crate::cluster::validate::ValidatedCluster;

/// Builds the `Certificate` with the name that the workers must have; `None` without `tls.mode: CertManager`. It is not part of
/// [`super::objects`], since it is created first and API servers may not serve its kind.
pub fn certificate(cluster: &ValidatedCluster, needed: &Name) -> Option<Value> {
    let (issuer, secret, lifetime) = (cluster.issuer()?, cluster.provided_secret()?, cluster.certificates()?);
    let or = |text: &Option<String>, otherwise: &str| match text {
        Some(text) if !text.is_empty() => text.clone(),
        _ => otherwise.to_owned(),
    };
    Some(json!({
        "apiVersion": "cert-manager.io/v1",
        "kind": "Certificate",
        "metadata": metadata(cluster, &cluster.names.certificate()),
        "spec": {
            "secretName": secret,
            "issuerRef": {
                "name": or(&issuer.name, ""),
                "kind": or(&issuer.kind, "Issuer"),
                "group": or(&issuer.group, "cert-manager.io"),
            },
            "uris": [needed.to_string()],
            "usages": ["digital signature", "server auth", "client auth"],
            // Limits the use of a leaked key to one renewal period.
            "privateKey": { "algorithm": "ECDSA", "size": 256, "encoding": "PKCS8", "rotationPolicy": "Always" },
            "duration": go_duration(lifetime),
            // Renewed after two thirds of its lifetime, like the operator's own certificates.
            "renewBefore": go_duration(lifetime / 3),
        },
    }))
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
