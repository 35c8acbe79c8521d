//! The key of a run's models: what a client checks before it uses a download.

use crate::Error;
use engram_federated::error::InvalidInput;
use engram_federated::model_signature::verify_model;
use engram_proto::v1::FederatedTask;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The Ed25519 key that signs the models of a run.
#[derive(Debug, Default)]
pub struct ModelKey {
    key: Mutex<Option<[u8; 32]>>,
    /// Where the key of the first task is kept.
    file: Option<PathBuf>,
}

impl ModelKey {
    /// Uses a key that the user has from the owner of the run, in 64 hexadecimal digits: output `model_key` of the run.
    ///
    /// # Errors
    /// It is no key.
    pub fn given(digits: &str) -> Result<Self, Error> {
        let allowed = "64 hexadecimal digits: output model_key of the run";
        let key = parse(digits).ok_or_else(|| InvalidInput::new("model_key", format!("{digits:?}"), allowed))?;
        Ok(Self { key: Mutex::new(Some(key)), file: None })
    }

    /// Uses the key in a file; without the file that of the first task, which is then kept there.
    ///
    /// # Errors
    /// The file cannot be read, or has no key.
    pub fn kept_in(file: &Path) -> Result<Self, Error> {
        let key = match std::fs::read_to_string(file) {
            Ok(text) => Some(
                parse(text.trim())
                    .ok_or_else(|| Error::file(file, std::io::Error::other("64 hexadecimal digits are required")))?,
            ),
            Err(failure) if failure.kind() == std::io::ErrorKind::NotFound => None,
            Err(failure) => return Err(Error::file(file, failure)),
        };
        Ok(Self { key: Mutex::new(key), file: Some(file.to_owned()) })
    }

    /// Checks the signature of the model of a task; keeps the key of the first one.
    pub(crate) fn check(&self, run: &str, task: &FederatedTask) -> Result<(), Error> {
        let mut kept = self.key.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = <[u8; 32]>::try_from(&task.model_key[..]).map_err(|_| Error::Signature("the task has no key"))?;
        let model =
            <[u8; 32]>::try_from(&task.model_digest[..]).map_err(|_| Error::Signature("the task has no digest"))?;
        let key = kept.unwrap_or(sent);
        if key != sent {
            return Err(Error::Signature("the task names another key"));
        }
        verify_model(&key, run, task.version, &model, &task.model_signature)
            .map_err(|_| Error::Signature("the signature is invalid"))?;
        if let (None, Some(file)) = (*kept, &self.file) {
            let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
            std::fs::write(file, digits + "\n").map_err(|failure| Error::file(file, failure))?;
        }
        *kept = Some(key);
        Ok(())
    }
}

impl ModelKey {
    /// Checks the signature of something else of the run, after that of a model.
    pub(crate) fn check_digest(&self, name: &str, version: u64, digest: &[u8], signature: &[u8]) -> Result<(), Error> {
        let kept = *self.key.lock().unwrap_or_else(PoisonError::into_inner);
        let key = kept.ok_or(Error::Signature("the task has no key"))?;
        let digest = <[u8; 32]>::try_from(digest).map_err(|_| Error::Signature("the correction has no digest"))?;
        verify_model(&key, name, version, &digest, signature)
            .map_err(|_| Error::Signature("the signature of the correction is invalid"))
    }
}

fn parse(digits: &str) -> Option<[u8; 32]> {
    let mut key = [0; 32];
    if digits.len() != 64 || !digits.is_ascii() {
        return None;
    }
    for (byte, pair) in key.iter_mut().zip(digits.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_federated::model_signature::{model_key, sign_model};

    fn task(secret: u8, version: u64) -> FederatedTask {
        FederatedTask {
            version,
            model_digest: vec![9; 32].into(),
            model_key: model_key(&[secret; 32]).to_vec().into(),
            model_signature: sign_model(&[secret; 32], "fleet", version, &[9; 32]).into(),
            ..FederatedTask::default()
        }
    }

    #[test]
    fn the_first_key_is_kept_and_models_of_another_one_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model-key");
        let first = ModelKey::kept_in(&file).unwrap();
        let forged = FederatedTask { model_signature: vec![0; 64].into(), ..task(1, 0) };
        assert!(matches!(first.check("fleet", &forged), Err(Error::Signature("the signature is invalid"))));
        assert!(!file.exists(), "a key that signed nothing is not kept");
        first.check("fleet", &task(1, 0)).unwrap();
        let restarted = ModelKey::kept_in(&file).unwrap();
        restarted.check("fleet", &task(1, 1)).unwrap();
        assert!(matches!(restarted.check("fleet", &task(2, 2)), Err(Error::Signature("the task names another key"))));
        assert!(restarted.check("other", &task(1, 1)).is_err());
        let exchanged = FederatedTask { model_digest: vec![8; 32].into(), ..task(1, 1) };
        assert!(restarted.check("fleet", &exchanged).is_err());
        assert!(!Error::Signature("").is_temporary());
    }

    #[test]
    fn a_given_key_is_the_only_one() {
        let digits: String = model_key(&[1; 32]).iter().map(|byte| format!("{byte:02x}")).collect();
        let given = ModelKey::given(&digits).unwrap();
        given.check("fleet", &task(1, 0)).unwrap();
        assert!(given.check("fleet", &task(2, 0)).is_err());
        let wrong = ModelKey::given("12").unwrap_err().to_string();
        assert!(wrong.starts_with("model_key"), "{wrong}");
    }
}
