//! Signatures of models: a client uses a model only if the key of its run signed it.
//!
//! The digest of a task proves that the download is what the task names; the signature proves that the task names a model of this run, also if
//! another process relayed it.

use crate::random::{Seed, derive};
use crate::round::Digest;
use crate::secure::SecureError;
use crate::secure::keys::{PublicKeyBytes, sign, verify, verifying_key};

/// Returns the signing seed of a run's models.
fn signing_seed(secret: &Seed) -> Seed {
    derive(secret, &[b"model signing"])
}

fn signed_bytes(run: &str, version: u64, model: &Digest) -> Vec<u8> {
    [b"engram-federated-model\0", &version.to_le_bytes()[..], model, run.as_bytes()].concat()
}

/// The Ed25519 key by which the models of the run with this secret are signed.
#[must_use]
pub fn model_key(secret: &Seed) -> PublicKeyBytes {
    verifying_key(&signing_seed(secret))
}

/// Name under which the correction of a client is signed as a model is; names of runs have no `/`.
#[must_use]
pub fn correction_name(run: &str, client: &str) -> String {
    format!("{run}/{client}")
}

/// Signs the digest of what clients download as a version of a run.
#[must_use]
pub fn sign_model(secret: &Seed, run: &str, version: u64, model: &Digest) -> Vec<u8> {
    sign(&signing_seed(secret), &signed_bytes(run, version, model))
}

/// Checks the signature of a model.
///
/// # Errors
/// It is of another key, run, version or model.
pub fn verify_model(
    key: &PublicKeyBytes,
    run: &str,
    version: u64,
    model: &Digest,
    signature: &[u8],
) -> Result<(), SecureError> {
    verify(key, &signed_bytes(run, version, model), signature)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_holds_for_one_key_run_version_and_model() {
        let (secret, model) = ([3; 32], [5; 32]);
        let key = model_key(&secret);
        let signature = sign_model(&secret, "hospitals", 7, &model);
        assert!(verify_model(&key, "hospitals", 7, &model, &signature).is_ok());
        assert!(verify_model(&model_key(&[4; 32]), "hospitals", 7, &model, &signature).is_err());
        assert!(verify_model(&key, "hospital", 7, &model, &signature).is_err());
        assert!(verify_model(&key, "hospitals", 8, &model, &signature).is_err());
        assert!(verify_model(&key, "hospitals", 7, &[6; 32], &signature).is_err());
        assert!(verify_model(&key, "hospitals", 7, &model, &signature[1..]).is_err());
    }
}
