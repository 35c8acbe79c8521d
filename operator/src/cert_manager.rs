//! What cert-manager says to the Certificate that it is asked for, beside what is in the Secret that it fills.

use serde_json::Value;

use crate::given::{Fit, Unfit};

/// How it stands with what cert-manager was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// The certificate is there, as far as cert-manager knows, or nobody asks it.
    Ready,
    /// It was asked, and the certificate is not there, or not as it was asked for.
    Waiting(Unfit),
    /// It cannot be asked.
    Failed(Unfit),
}

impl Asked {
    /// What is to be told of the Secret, with what cert-manager says. A certificate that is good is good, whatever becomes of the next one.
    pub(crate) fn beside(self, found: Result<Fit, Unfit>) -> Result<Fit, Unfit> {
        match (self, found) {
            (Self::Ready, found) => found,
            (Self::Waiting(why) | Self::Failed(why), Ok(fit)) => {
                Ok(Fit { message: format!("{}; for the next one: {}", fit.message, why.message), ..fit })
            }
            // Nobody has filled it yet: why, is the whole of it.
            (Self::Waiting(why) | Self::Failed(why), Err(unfit)) if unfit.reason == Unfit::MISSING => Err(why),
            (Self::Failed(why), Err(unfit)) => Err(both(&why, &unfit)),
            (Self::Waiting(why), Err(unfit)) => Err(both(&unfit, &why)),
        }
    }
}

fn both(first: &Unfit, second: &Unfit) -> Unfit {
    Unfit { reason: first.reason, message: format!("{}; and {}", first.message, second.message) }
}

/// Reads what cert-manager says of Certificate `name`, as it was found.
pub(crate) fn judge(name: &str, found: &Value) -> Asked {
    let conditions = || found.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
    let said = |kind: &str, truth: &str| conditions().find(|it| it["type"] == kind && it["status"] == truth);
    let told = |condition: &Value| {
        let text = |field: &str| condition[field].as_str().unwrap_or_default().trim_end_matches('.').to_owned();
        [text("reason"), text("message")].iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join(": ")
    };
    // What it says of an older one that was asked for is no answer.
    let generation = &found["metadata"]["generation"];
    let is_of_this = |condition: &&Value| {
        condition["observedGeneration"].is_null() || condition["observedGeneration"] == *generation
    };
    if said("Ready", "True").filter(is_of_this).is_some() {
        return Asked::Ready;
    }
    let why = match (said("Ready", "False"), said("Issuing", "False")) {
        (Some(ready), Some(failed)) => format!("{}; its last attempt: {}", told(ready), told(failed)),
        (Some(one), None) | (None, Some(one)) => told(one),
        (None, None) => "cert-manager has not looked at it yet".to_owned(),
    };
    let message = format!("Certificate {name} is not Ready: {why} (kubectl describe certificate {name})");
    Asked::Waiting(Unfit { reason: "CertificateNotReady", message })
}

/// Says why the API server does not let Certificate `name` be read or written; `reason` and `message` are its own.
pub(crate) fn refused(name: &str, code: u16, reason: &str, message: &str) -> Unfit {
    // What admission refuses may have the same code. These are the API server's own words for a missing right.
    let is_right = message.contains("cannot") && message.contains("resource \"certificates\"");
    let (reason, message) = match code {
        // Of an object that is not there it says so in this word; of a kind, in others.
        404 if reason != "NotFound" || message.contains("could not find the requested resource") => (
            "CertManagerMissing",
            "the API server does not know Certificates of cert-manager.io/v1: install cert-manager, or make the cluster anew with \
             tls.mode: Auto, in which the operator signs"
                .to_owned(),
        ),
        403 if is_right => (
            "CertManagerForbidden",
            format!(
                "the operator may not keep Certificate {name}: install its chart with certManager.enabled=true, which lets it get, create \
                 and patch certificates.cert-manager.io ({message})"
            ),
        ),
        _ => ("CertManagerFailed", format!("Certificate {name} is refused: {message}")),
    };
    Unfit { reason, message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn unfit(reason: &'static str) -> Unfit {
        Unfit { reason, message: format!("why {reason}") }
    }

    #[test]
    fn what_cert_manager_says_is_told_until_the_certificate_is_there_as_it_was_asked_for() {
        let of = |conditions: &Value| {
            let status = json!({ "conditions": conditions });
            judge("words-tls", &json!({ "metadata": { "generation": 2 }, "status": status }))
        };
        let waits = |conditions: &Value| match of(conditions) {
            Asked::Waiting(Unfit { reason: "CertificateNotReady", message }) => message,
            other => panic!("{conditions}: {other:?}"),
        };
        assert_eq!(of(&json!([{ "type": "Ready", "status": "True", "observedGeneration": 2 }])), Asked::Ready);
        assert_eq!(of(&json!([{ "type": "Ready", "status": "True" }])), Asked::Ready);
        let older = waits(&json!([{ "type": "Ready", "status": "True", "observedGeneration": 1 }]));
        assert!(older.contains("has not looked at it yet"), "{older}");
        assert!(waits(&json!([])).contains("has not looked at it yet"));
        let ready = json!({ "type": "Ready", "status": "False", "reason": "DoesNotExist",
            "message": "Issuing certificate as Secret does not exist", "observedGeneration": 2 });
        let issuing = json!({ "type": "Issuing", "status": "True", "reason": "DoesNotExist", "message": "m" });
        let said = waits(&json!([issuing, ready]));
        let all = "Certificate words-tls is not Ready: DoesNotExist: Issuing certificate as Secret does not exist (kubectl describe \
            certificate words-tls)";
        assert_eq!(said, all);
        let failed =
            json!({ "type": "Issuing", "status": "False", "reason": "Failed", "message": "The request is denied." });
        let said = waits(&json!([ready, failed]));
        assert!(said.contains("does not exist; its last attempt: Failed: The request is denied (kubectl"), "{said}");
    }

    #[test]
    fn a_missing_kind_a_missing_right_and_a_refusal_are_told_apart() {
        let why = |code, reason, message| {
            let Unfit { reason, message } = refused("words-tls", code, reason, message);
            (reason, message)
        };
        // As an API server answers for a path that it does not serve: in plain text.
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
    fn what_stands_in_the_way_first_is_told_first_and_nothing_hides_a_good_certificate() {
        let fit = Fit { roots: "r".into(), message: "Secret words-tls, valid until then".into() };
        let (waiting, failed) =
            (|| Asked::Waiting(unfit("CertificateNotReady")), || Asked::Failed(unfit("CertManagerMissing")));
        assert_eq!(Asked::Ready.beside(Ok(fit.clone())), Ok(fit.clone()));
        assert_eq!(Asked::Ready.beside(Err(unfit("SecretUnusable"))), Err(unfit("SecretUnusable")));
        for asked in [waiting(), failed()] {
            let beside = asked.beside(Ok(fit.clone())).unwrap();
            assert!(
                beside.roots == fit.roots && beside.message.contains("then; for the next one: why Cert"),
                "{beside:?}"
            );
        }
        for (asked, found, first, second) in [
            (waiting(), "SecretNotFound", "CertificateNotReady", ""),
            (failed(), "SecretNotFound", "CertManagerMissing", ""),
            (waiting(), "SecretForbidden", "SecretForbidden", "CertificateNotReady"),
            (failed(), "SecretForbidden", "CertManagerMissing", "SecretForbidden"),
            (waiting(), "SecretUnusable", "SecretUnusable", "CertificateNotReady"),
        ] {
            let told = asked.beside(Err(unfit(found))).unwrap_err();
            let and = if second.is_empty() { String::new() } else { format!("; and why {second}") };
            assert_eq!((told.reason, told.message), (first, format!("why {first}{and}")));
        }
    }
}
