//! The key of a run's models: what a client checks before it uses a download.

use crate::Error;
use engram_federated::error::InvalidInput;
use engram_federated::model_signature::{correction_name, verify_model};
use engram_proto::v1::FederatedTask;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The Ed25519 key that signs the models of a run.
#[derive(Debug, Default)]
pub struct ModelKey {
    given: Option<[u8; 32]>,
    /// Keys of first tasks by run.
    kept: Mutex<BTreeMap<String, [u8; 32]>>,
    /// Where they are kept: a line with run and key for each.
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
        Ok(Self { given: Some(key), ..Self::default() })
    }

    /// Uses the key of the run in a file; without one that of the first task, which is then kept there.
    ///
    /// # Errors
    /// The file cannot be read, or has a line without a run and its key.
    pub fn kept_in(file: &Path) -> Result<Self, Error> {
        let text = match std::fs::read_to_string(file) {
            Ok(text) => text,
            Err(failure) if failure.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(failure) => return Err(Error::file(file, failure)),
        };
        let key_of = |line: &str| {
            let (run, digits) = line.split_once(' ')?;
            Some((run.to_owned(), parse(digits)?))
        };
        let kept: Option<BTreeMap<_, _>> = text.lines().map(key_of).collect();
        let invalid = || std::io::Error::other("each line must be a run and 64 hexadecimal digits");
        let kept = kept.ok_or_else(|| Error::file(file, invalid()))?;
        Ok(Self { given: None, kept: Mutex::new(kept), file: Some(file.to_owned()) })
    }

    /// Checks the signature of the model of a task; keeps the key of the first one.
    pub(crate) fn check(&self, run: &str, task: &FederatedTask) -> Result<(), Error> {
        self.check_signed(run, task.version, [&task.model_key, &task.model_digest, &task.model_signature])
    }

    /// Checks key, digest and signature of a version of a model; keeps the key of the first one.
    pub(crate) fn check_signed(
        &self,
        run: &str,
        version: u64,
        [key, digest, signature]: [&[u8]; 3],
    ) -> Result<(), Error> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = <[u8; 32]>::try_from(key).map_err(|_| Error::Signature("the model has no key"))?;
        let model = <[u8; 32]>::try_from(digest).map_err(|_| Error::Signature("the model has no digest"))?;
        let known = self.given.or_else(|| kept.get(run).copied());
        if known.is_some_and(|key| key != sent) {
            return Err(Error::Signature("the task names another key"));
        }
        verify_model(&sent, run, version, &model, signature)
            .map_err(|_| Error::Signature("the signature is invalid"))?;
        if known.is_none() {
            self.keep(run, &sent)?;
            kept.insert(run.to_owned(), sent);
        }
        Ok(())
    }

    fn keep(&self, run: &str, key: &[u8; 32]) -> Result<(), Error> {
        let Some(file) = &self.file else { return Ok(()) };
        let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        let options = std::fs::OpenOptions::new().create(true).append(true).open(file);
        let written = options.and_then(|mut opened| {
            opened.write_all(format!("{run} {digits}\n").as_bytes())?;
            opened.sync_all()
        });
        written.map_err(|failure| Error::file(file, failure))
    }

    /// Checks the signature of the correction of a client, after that of a model.
    pub(crate) fn check_correction(&self, (run, client): (&str, &str), task: &FederatedTask) -> Result<(), Error> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let key = self.given.or_else(|| kept.get(run).copied()).ok_or(Error::Signature("the task has no key"))?;
        let digest = <[u8; 32]>::try_from(&task.correction_digest[..])
            .map_err(|_| Error::Signature("the correction has no digest"))?;
        verify_model(&key, &correction_name(run, client), task.version, &digest, &task.correction_signature)
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
        let other = FederatedTask { model_signature: sign_model(&[2; 32], "other", 0, &[9; 32]).into(), ..task(2, 0) };
        restarted.check("other", &other).unwrap();
        let both = ModelKey::kept_in(&file).unwrap();
        both.check("fleet", &task(1, 1)).unwrap();
        both.check("other", &other).unwrap();
        assert!(both.check("fleet", &task(2, 2)).is_err(), "each run has its own key");
        let exchanged = FederatedTask { model_digest: vec![8; 32].into(), ..task(1, 1) };
        assert!(restarted.check("fleet", &exchanged).is_err());
        assert!(!Error::Signature("").is_temporary());
    }

    #[test]
    fn a_correction_is_refused_unless_the_key_of_the_run_signed_it_for_this_client() {
        let key = ModelKey::default();
        let name = correction_name("fleet", "car");
        let signature = sign_model(&[1; 32], &name, 3, &[7; 32]);
        let signed = FederatedTask {
            correction_digest: vec![7; 32].into(),
            correction_signature: signature.into(),
            ..task(1, 3)
        };
        assert!(key.check_correction(("fleet", "car"), &signed).is_err(), "no model was checked");
        key.check("fleet", &signed).unwrap();
        key.check_correction(("fleet", "car"), &signed).unwrap();
        assert!(key.check_correction(("fleet", "bus"), &signed).is_err());
        let altered = FederatedTask { correction_digest: vec![8; 32].into(), ..signed };
        assert!(key.check_correction(("fleet", "car"), &altered).is_err());
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
