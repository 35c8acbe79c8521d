//! Certificates of a local cluster: `up` is the CA. It issues one certificate to every process and one to the user, and renews each
//! before it expires.
//!
//! ```text
//! tls/ca.pem           CA certificate, the trust bundle
//! tls/ca.key           CA key, read by `up` only
//! tls/worker-0.pem ..  key and certificate of a process, in one file to replace both atomically
//! tls/coordinator.pem  for the coordinator, and for `up` itself
//! tls/client.pem       client certificate of the commands
//! ```

use crate::error::problem;
use anyhow::Context as _;
use engram_api::Code;
use engram_identity::{CertificateAuthority, Files, LIFETIME, Name, Renewal, Role};
use engram_memory::ClusterId;
use engram_worker::Tls;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const FOLDER: &str = "tls";
const CA_CERTIFICATE: &str = "ca.pem";
const CA_KEY: &str = "ca.key";

/// The CA of a local cluster, and the certificates that it has issued.
pub(crate) struct Certificates {
    folder: PathBuf,
    cluster_name: String,
    cluster: ClusterId,
    ca: CertificateAuthority,
    lifetime: Duration,
    /// Renewal time of each certificate.
    renewals: RefCell<BTreeMap<(Role, u32), Renewal>>,
}

impl std::fmt::Debug for Certificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Certificates({})", self.folder.display())
    }
}

impl Certificates {
    /// Opens or creates the CA of a state directory, and issues the certificates of `up` and of the user.
    ///
    /// # Errors
    /// A file cannot be read or written, or is damaged.
    pub(crate) fn open(
        state_dir: &Path,
        cluster_name: &str,
        cluster: ClusterId,
        lifetime: Option<Duration>,
    ) -> anyhow::Result<Self> {
        let folder = state_dir.join(FOLDER);
        let result = fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        result.map_err(|error| unusable("create", &folder, &error))?;
        let (key_path, path) = (folder.join(CA_KEY), folder.join(CA_CERTIFICATE));
        let ca = match fs::read_to_string(&key_path) {
            Ok(key) => {
                let text = fs::read_to_string(&path).map_err(|error| unusable("read", &path, &error))?;
                let opened = CertificateAuthority::open(cluster, &key, &text);
                opened.with_context(|| {
                    format!("the CA in {} is invalid; delete the folder to create a new one", folder.display())
                })?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let ca = CertificateAuthority::create(cluster, SystemTime::now())?;
                // The key is written last and marks a complete CA.
                replace(&path, ca.certificate())?;
                replace(&key_path, &ca.key())?;
                ca
            }
            Err(error) => return Err(unusable("read", &key_path, &error)),
        };
        let certificates = Self {
            folder,
            cluster_name: cluster_name.to_owned(),
            cluster,
            ca,
            lifetime: lifetime.unwrap_or(LIFETIME),
            renewals: RefCell::default(),
        };
        certificates.issue(Role::Coordinator, 0)?;
        certificates.issue(Role::Client, 0)?;
        Ok(certificates)
    }

    /// Issues a new certificate.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn issue(&self, role: Role, ordinal: u32) -> anyhow::Result<()> {
        self.issue_at(role, ordinal, SystemTime::now())
    }

    fn issue_at(&self, role: Role, ordinal: u32, now: SystemTime) -> anyhow::Result<()> {
        let name = Name::local(&self.cluster_name, self.cluster, role, ordinal);
        let issued = self.ca.issue(&name, now, self.lifetime)?;
        replace(&self.path(role, ordinal), &issued.pem)?;
        self.renewals.borrow_mut().insert((role, ordinal), issued.renewal);
        Ok(())
    }

    /// Renews all certificates that are due.
    ///
    /// # Errors
    /// As [`Self::issue`]; failed renewals stay due.
    pub(crate) fn renew(&self) -> anyhow::Result<()> {
        let now = SystemTime::now();
        let renewals = self.renewals.borrow().clone();
        let due = renewals.into_iter().filter(|(_, renewal)| renewal.is_due(now)).map(|(holder, _)| holder);
        // A failed renewal does not prevent the others.
        let mut errors = due.filter_map(|(role, ordinal)| self.issue(role, ordinal).err());
        let first = errors.next();
        errors.for_each(drop);
        first.map_or(Ok(()), Err)
    }

    /// Returns the TLS options of a process.
    pub(crate) fn tls(&self, role: Role, ordinal: u32) -> Tls {
        Tls::of(Files::pair(self.folder.join(CA_CERTIFICATE), self.path(role, ordinal)), self.lifetime)
    }

    fn path(&self, role: Role, ordinal: u32) -> PathBuf {
        match role {
            Role::Worker => self.folder.join(format!("worker-{ordinal}.pem")),
            role => self.folder.join(format!("{role}.pem")),
        }
    }
}

/// Returns the client certificate of a state directory.
pub(crate) fn client(state_dir: &Path) -> Files {
    let folder = state_dir.join(FOLDER);
    Files::pair(folder.join(CA_CERTIFICATE), folder.join("client.pem"))
}

/// Replaces a file atomically, readable by the owner only.
fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    let temporary = path.with_extension("tmp");
    let write = || {
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // A new file, so that the mode applies.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|error| unusable("write", path, &error))
}

fn unusable(action: &str, path: &Path, error: &io::Error) -> anyhow::Error {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::DiskFull,
        _ => Code::StateDirectoryUnusable,
    };
    problem(code, format!("failed to {action} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_identity::Keys;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn the_ca_is_kept_and_its_certificates_are_renewed_when_due() {
        let state = tempfile::tempdir().unwrap();
        let open = |lifetime| Certificates::open(state.path(), "demo", ClusterId(1), lifetime).unwrap();
        let first = open(None);
        first.issue(Role::Worker, 3).unwrap();
        let read = |name: &str| fs::read_to_string(state.path().join(FOLDER).join(name)).unwrap();
        let (ca, worker) = (read(CA_CERTIFICATE), read("worker-3.pem"));
        first.renew().unwrap();
        assert_eq!(read("worker-3.pem"), worker, "not due");
        // Due at once.
        let again = open(Some(Duration::ZERO));
        assert_eq!(read(CA_CERTIFICATE), ca, "the next `up` keeps the CA");
        again.issue(Role::Worker, 3).unwrap();
        let worker = read("worker-3.pem");
        again.renew().unwrap();
        assert_ne!(read("worker-3.pem"), worker);
        // A folder at the path makes the renewal fail.
        let client_certificate = read("client.pem");
        again.issue(Role::Worker, 0).unwrap();
        let path = state.path().join(FOLDER).join("worker-0.pem");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        again.renew().unwrap_err();
        assert_ne!(read("client.pem"), client_certificate, "a failed renewal does not prevent the others");
        fs::remove_dir(&path).unwrap();
        for entry in fs::read_dir(state.path().join(FOLDER)).unwrap() {
            let path = entry.unwrap().path();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "{}", path.display());
        }

        open(None);
        let keys = Keys::open(client(state.path())).unwrap();
        assert_eq!((keys.name().role, keys.name().cluster), (Role::Client, ClusterId(1)));
        assert_eq!(first.tls(Role::Worker, 3).connection_lifetime(), Duration::from_secs(665));
        let short = Certificates { lifetime: Duration::from_secs(12), ..first };
        assert_eq!(short.tls(Role::Worker, 3).connection_lifetime(), Duration::from_secs(4));
    }

    #[test]
    fn certificates_issued_by_a_clock_that_was_ahead_are_issued_again() {
        let state = tempfile::tempdir().unwrap();
        let certificates = Certificates::open(state.path(), "demo", ClusterId(1), None).unwrap();
        certificates.issue_at(Role::Client, 0, SystemTime::now() + 40 * LIFETIME).unwrap();
        assert!(Keys::open(client(state.path())).is_err(), "not valid yet");
        certificates.renew().unwrap();
        Keys::open(client(state.path())).unwrap();
    }

    #[test]
    fn a_damaged_ca_is_reported_and_not_replaced() {
        let state = tempfile::tempdir().unwrap();
        let open = || Certificates::open(state.path(), "demo", ClusterId(1), None);
        open().unwrap();
        let path = state.path().join(FOLDER).join(CA_KEY);
        fs::write(&path, "no key").unwrap();
        assert!(format!("{:#}", open().unwrap_err()).contains("is invalid"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "no key");
    }
}
