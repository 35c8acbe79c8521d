//! What proves that a client is the one that was enrolled.

use crate::Error;
use engram_federated::secure::keys::verifying_key;
use serde::{Deserialize, Serialize};
use std::io::Write as _;
use std::path::Path;

/// Secret and identity key of a client. Keep them: another pair is another client.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientKeys {
    secret: [u8; 32],
    identity: [u8; 32],
}

impl std::fmt::Debug for ClientKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClientKeys(redacted)")
    }
}

impl ClientKeys {
    /// Draws new keys.
    #[must_use]
    pub fn generate() -> Self {
        Self { secret: rand::random(), identity: rand::random() }
    }

    /// Reads the keys in a file; creates it for its user only if it does not exist.
    ///
    /// # Errors
    /// The file cannot be read, written or understood.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let error = |source| Error::file(path, source);
        match std::fs::read(path) {
            Ok(content) => serde_json::from_slice(&content).map_err(|failure| error(std::io::Error::other(failure))),
            Err(failure) if failure.kind() == std::io::ErrorKind::NotFound => {
                let keys = Self::generate();
                let folder = path.parent().unwrap_or_else(|| Path::new("."));
                std::fs::create_dir_all(folder).map_err(error)?;
                // Readable by its user only, as temporary files are.
                let mut file = tempfile::NamedTempFile::new_in(folder).map_err(error)?;
                let content = serde_json::to_vec(&keys).map_err(|failure| error(std::io::Error::other(failure)))?;
                file.write_all(&content).and_then(|()| file.as_file().sync_all()).map_err(error)?;
                match file.persist_noclobber(path) {
                    Ok(_) => Ok(keys),
                    // Another process of this client was first.
                    Err(failure) if failure.error.kind() == std::io::ErrorKind::AlreadyExists => Self::open(path),
                    Err(failure) => Err(error(failure.error)),
                }
            }
            Err(failure) => Err(error(failure)),
        }
    }

    pub(crate) const fn secret(&self) -> &[u8; 32] {
        &self.secret
    }

    /// The seed of the Ed25519 key.
    pub(crate) const fn identity(&self) -> &[u8; 32] {
        &self.identity
    }

    /// The Ed25519 public key.
    pub(crate) fn identity_key(&self) -> [u8; 32] {
        verifying_key(&self.identity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_kept_in_a_file_that_others_cannot_read() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/keys.json");
        let keys = ClientKeys::open(&path).unwrap();
        assert_eq!(ClientKeys::open(&path).unwrap(), keys);
        assert_ne!(ClientKeys::generate(), keys);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o077, 0);
        assert_eq!(format!("{keys:?}"), "ClientKeys(redacted)");
        std::fs::write(&path, "{}").unwrap();
        assert!(ClientKeys::open(&path).is_err());
    }
}
