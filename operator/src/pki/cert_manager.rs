//! Issuance state of a cert-manager Certificate, combined with the state of its Secret.

use serde::Deserialize;

use crate::kube::api_object::ApiObject;
use crate::pki::provided_certificate::{CertificateProblem, UsableCertificate};

/// State of a Certificate that the operator requests from cert-manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum IssuanceState {
    /// The Certificate is ready, or cert-manager is not used.
    Ready,
    /// The Certificate is requested and not ready.
    Pending(CertificateProblem),
    /// The Certificate cannot be requested.
    Failed(CertificateProblem),
}

impl IssuanceState {
    /// Combines the issuance state with the state of the Secret. A valid certificate stays valid while its renewal is pending or fails.
    pub(crate) fn combine(
        self,
        secret: Result<UsableCertificate, CertificateProblem>,
    ) -> Result<UsableCertificate, CertificateProblem> {
        match (self, secret) {
            (Self::Ready, secret) => secret,
            (Self::Pending(why) | Self::Failed(why), Ok(usable)) => {
                Ok(UsableCertificate { message: format!("{}; renewal: {}", usable.message, why.message), ..usable })
            }
            // The Secret does not exist because the Certificate is not issued yet.
            (Self::Pending(why) | Self::Failed(why), Err(problem)) if problem.reason == CertificateProblem::MISSING => {
                Err(why)
            }
            (Self::Failed(why), Err(problem)) => Err(joined(&why, &problem)),
            (Self::Pending(why), Err(problem)) => Err(joined(&problem, &why)),
        }
    }
}

fn joined(first: &CertificateProblem, second: &CertificateProblem) -> CertificateProblem {
    CertificateProblem { reason: first.reason, message: format!("{}; and {}", first.message, second.message) }
}

/// A Certificate as cert-manager reports it.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ReportedCertificate {
    status: ReportedStatus,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ReportedStatus {
    conditions: Vec<CertificateCondition>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CertificateCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: String,
    message: String,
    observed_generation: Option<i64>,
}

impl CertificateCondition {
    fn describe(&self) -> String {
        let parts = [&self.reason, &self.message].map(|text| text.trim_end_matches('.'));
        let known: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        known.join(": ")
    }
}

/// Returns the issuance state of Certificate `name`, from its conditions; `None` for one that does not exist yet.
pub(crate) fn issuance_state(name: &str, certificate: Option<&ApiObject>) -> IssuanceState {
    let reported = certificate.and_then(|certificate| certificate.read::<ReportedCertificate>().ok());
    let conditions = reported.unwrap_or_default().status.conditions;
    let condition_with = |kind: &str, truth: &str| conditions.iter().find(|it| it.kind == kind && it.status == truth);
    // Conditions of an older generation do not count.
    let generation = certificate.and_then(|certificate| certificate.metadata().generation);
    let is_of_this = |condition: &&CertificateCondition| {
        condition.observed_generation.is_none() || condition.observed_generation == generation
    };
    if condition_with("Ready", "True").filter(is_of_this).is_some() {
        return IssuanceState::Ready;
    }
    let why = match (condition_with("Ready", "False"), condition_with("Issuing", "False")) {
        (Some(ready), Some(failed)) => format!("{}; its last attempt: {}", ready.describe(), failed.describe()),
        (Some(one), None) | (None, Some(one)) => one.describe(),
        (None, None) => "cert-manager has not processed it yet".to_owned(),
    };
    let message = format!("Certificate {name} is not Ready: {why} (kubectl describe certificate {name})");
    IssuanceState::Pending(CertificateProblem { reason: "CertificateNotReady", message })
}

/// Converts an error of the API server for Certificate `name`.
pub(crate) fn rejection(name: &str, code: u16, reason: &str, message: &str) -> CertificateProblem {
    // Admission webhooks deny with the same code; this is the text of missing RBAC permissions.
    let is_rbac = message.contains("cannot") && message.contains("resource \"certificates\"");
    let (reason, message) = match code {
        // A missing object has reason NotFound; a missing kind has not.
        404 if reason != "NotFound" || message.contains("could not find the requested resource") => (
            "CertManagerMissing",
            "the API server does not serve cert-manager.io/v1 Certificates: install cert-manager, or recreate the cluster with \
             tls.mode: Auto"
                .to_owned(),
        ),
        403 if is_rbac => (
            "CertManagerForbidden",
            format!(
                "the operator is not allowed to manage Certificate {name}: install its chart with certManager.enabled=true, which grants \
                 get, create and patch on certificates.cert-manager.io ({message})"
            ),
        ),
        _ => ("CertManagerFailed", format!("Certificate {name} was rejected: {message}")),
    };
    CertificateProblem { reason, message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::resource_kinds::CERTIFICATE;
    use serde_json::{Value, json};

    fn problem(reason: &'static str) -> CertificateProblem {
        CertificateProblem { reason, message: format!("why {reason}") }
    }

    #[test]
    fn the_message_has_cert_managers_reason_until_the_certificate_is_ready() {
        let of = |conditions: &Value| {
            let status = json!({ "conditions": conditions });
            let content = json!({ "metadata": { "generation": 2 }, "status": status });
            issuance_state("words-tls", Some(&ApiObject::new(CERTIFICATE, content)))
        };
        let waits = |conditions: &Value| match of(conditions) {
            IssuanceState::Pending(CertificateProblem { reason: "CertificateNotReady", message }) => message,
            other => panic!("{conditions}: {other:?}"),
        };
        assert_eq!(of(&json!([{ "type": "Ready", "status": "True", "observedGeneration": 2 }])), IssuanceState::Ready);
        assert_eq!(of(&json!([{ "type": "Ready", "status": "True" }])), IssuanceState::Ready);
        let older = waits(&json!([{ "type": "Ready", "status": "True", "observedGeneration": 1 }]));
        assert!(older.contains("has not processed it yet"), "{older}");
        assert!(waits(&json!([])).contains("has not processed it yet"));
        let ready = json!({ "type": "Ready", "status": "False", "reason": "DoesNotExist",
            "message": "Issuing certificate as Secret does not exist", "observedGeneration": 2 });
        let issuing = json!({ "type": "Issuing", "status": "True", "reason": "DoesNotExist", "message": "m" });
        let message = waits(&json!([issuing, ready]));
        let all = "Certificate words-tls is not Ready: DoesNotExist: Issuing certificate as Secret does not exist (kubectl describe \
            certificate words-tls)";
        assert_eq!(message, all);
        let failed =
            json!({ "type": "Issuing", "status": "False", "reason": "Failed", "message": "The request is denied." });
        let message = waits(&json!([ready, failed]));
        assert!(
            message.contains("does not exist; its last attempt: Failed: The request is denied (kubectl"),
            "{message}"
        );
    }

    #[test]
    fn missing_kind_missing_permission_and_rejection_have_distinct_reasons() {
        let why = |code, reason, message| {
            let CertificateProblem { reason, message } = rejection("words-tls", code, reason, message);
            (reason, message)
        };
        // The API server's response to an unknown path is plain text.
        let (reason, message) = why(404, "Failed to parse error data", "404 page not found");
        assert!(reason == "CertManagerMissing" && message.contains("install cert-manager"), "{message}");
        let (reason, _) = why(404, "NotFound", "the server could not find the requested resource");
        assert_eq!(reason, "CertManagerMissing");
        let text = "certificates.cert-manager.io \"words-tls\" is forbidden: User \"u\" cannot get resource \"certificates\" in API group";
        let (reason, message) = why(403, "Forbidden", text);
        assert!(reason == "CertManagerForbidden" && message.contains("certManager.enabled=true"), "{message}");
        let text = "admission webhook \"webhook.cert-manager.io\" denied the request: spec.issuerRef: wrong";
        let policy = "\"words-tls\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no";
        for (code, text) in [(403, text), (403, policy), (422, "spec.duration: wrong"), (500, "failed calling webhook")]
        {
            let (reason, message) = why(code, "Forbidden", text);
            assert!(reason == "CertManagerFailed" && message.contains(text), "{message}");
        }
        let (reason, _) = why(404, "NotFound", "namespaces \"research\" not found");
        assert_eq!(reason, "CertManagerFailed");
    }

    #[test]
    fn the_first_cause_is_reported_first_and_never_hides_a_valid_certificate() {
        let usable = UsableCertificate { roots: "r".into(), message: "Secret words-tls, valid until then".into() };
        let (waiting, failed) = (
            || IssuanceState::Pending(problem("CertificateNotReady")),
            || IssuanceState::Failed(problem("CertManagerMissing")),
        );
        assert_eq!(IssuanceState::Ready.combine(Ok(usable.clone())), Ok(usable.clone()));
        assert_eq!(IssuanceState::Ready.combine(Err(problem("SecretUnusable"))), Err(problem("SecretUnusable")));
        for state in [waiting(), failed()] {
            let combined = state.combine(Ok(usable.clone())).unwrap();
            assert!(
                combined.roots == usable.roots && combined.message.contains("then; renewal: why Cert"),
                "{combined:?}"
            );
        }
        for (state, secret, first, second) in [
            (waiting(), "SecretNotFound", "CertificateNotReady", ""),
            (failed(), "SecretNotFound", "CertManagerMissing", ""),
            (waiting(), "SecretForbidden", "SecretForbidden", "CertificateNotReady"),
            (failed(), "SecretForbidden", "CertManagerMissing", "SecretForbidden"),
            (waiting(), "SecretUnusable", "SecretUnusable", "CertificateNotReady"),
        ] {
            let joined = state.combine(Err(problem(secret))).unwrap_err();
            let and = if second.is_empty() { String::new() } else { format!("; and why {second}") };
            assert_eq!((joined.reason, joined.message), (first, format!("why {first}{and}")));
        }
    }
}
