//! The certificates of a local cluster: `up` is its authority, issues one to every process and one to the person, and replaces each before
//! it ends.
//!
//! ```text
//! tls/ca.pem           the authority's certificate: what everybody believes
//! tls/ca.key           its key, read by `up` alone
//! tls/worker-0.pem ..  key and certificate of a process, in one file so that both are replaced at once
//! tls/coordinator.pem  of the coordinator, and of `up` itself
//! tls/client.pem       of the person: what the commands show
//! ```

use crate::error::problem;
use anyhow::Context as _;
use engram_api::Code;
use engram_identity::{Authority, Files, LIFETIME, Name, Role};
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
const AUTHORITY: &str = "ca.pem";
const AUTHORITY_KEY: &str = "ca.key";

/// The authority of a local cluster, and what it has issued.
pub(crate) struct Certificates {
    folder: PathBuf,
    cluster_name: String,
    cluster: ClusterId,
    authority: Authority,
    lifetime: Duration,
    /// When each is due to be replaced.
    due: RefCell<BTreeMap<(Role, u32), SystemTime>>,
}

impl std::fmt::Debug for Certificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Certificates({})", self.folder.display())
    }
}

impl Certificates {
    /// Opens the authority of a state directory, which is made where there is none, and issues what `up` and the person need.
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
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|error| unusable("make", &folder, &error))?;
        let (key_path, path) = (folder.join(AUTHORITY_KEY), folder.join(AUTHORITY));
        let authority = match fs::read_to_string(&key_path) {
            Ok(key) => {
                let text = fs::read_to_string(&path).map_err(|error| unusable("read", &path, &error))?;
                let opened = Authority::open(cluster, &key, &text);
                opened.with_context(|| format!("{} is of no use; delete it for a new one", folder.display()))?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let authority = Authority::create(cluster, SystemTime::now())?;
                // The key last: without it there is no authority yet.
                replace(&path, authority.certificate())?;
                replace(&key_path, &authority.key())?;
                authority
            }
            Err(error) => return Err(unusable("read", &key_path, &error)),
        };
        let own = Self {
            folder,
            cluster_name: cluster_name.to_owned(),
            cluster,
            authority,
            lifetime: lifetime.unwrap_or(LIFETIME),
            due: RefCell::default(),
        };
        own.issue(Role::Coordinator, 0)?;
        own.issue(Role::Client, 0)?;
        Ok(own)
    }

    /// Issues a new certificate to a process.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn issue(&self, role: Role, ordinal: u32) -> anyhow::Result<()> {
        let name = Name::local(&self.cluster_name, self.cluster, role, ordinal);
        let issued = self.authority.issue(&name, SystemTime::now(), self.lifetime)?;
        replace(&self.path(role, ordinal), &issued.pem)?;
        self.due.borrow_mut().insert((role, ordinal), issued.renew_at);
        Ok(())
    }

    /// Replaces what is due.
    ///
    /// # Errors
    /// As [`Self::issue`]; what is left is due still.
    pub(crate) fn renew(&self) -> anyhow::Result<()> {
        let now = SystemTime::now();
        let due: Vec<_> = self.due.borrow().iter().filter(|(_, at)| **at <= now).map(|(whose, _)| *whose).collect();
        // One that cannot be written keeps nobody else's from being.
        let mut failed = due.into_iter().filter_map(|(role, ordinal)| self.issue(role, ordinal).err());
        let first = failed.next();
        failed.for_each(drop);
        first.map_or(Ok(()), Err)
    }

    /// What a process is told of its certificates.
    pub(crate) fn tls(&self, role: Role, ordinal: u32) -> Tls {
        Tls::of(Files::pair(self.folder.join(AUTHORITY), self.path(role, ordinal)), self.lifetime)
    }

    fn path(&self, role: Role, ordinal: u32) -> PathBuf {
        match role {
            Role::Worker => self.folder.join(format!("worker-{ordinal}.pem")),
            role => self.folder.join(format!("{role}.pem")),
        }
    }
}

/// The person's certificate in a state directory.
pub(crate) fn client(state_dir: &Path) -> Files {
    let folder = state_dir.join(FOLDER);
    Files::pair(folder.join(AUTHORITY), folder.join("client.pem"))
}

/// Writes a file that nobody else can read, in one step.
fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    let temporary = path.with_extension("tmp");
    let write = || {
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // New, so that its mode is this one.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|error| unusable("write", path, &error))
}

fn unusable(what: &str, path: &Path, error: &io::Error) -> anyhow::Error {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::DiskFull,
        _ => Code::StateDirectoryUnusable,
    };
    problem(code, format!("failed to {what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_identity::Keys;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn an_authority_stays_and_what_it_issues_is_replaced_when_due() {
        let state = tempfile::tempdir().unwrap();
        let open = |lifetime| Certificates::open(state.path(), "demo", ClusterId(1), lifetime).unwrap();
        let first = open(None);
        first.issue(Role::Worker, 3).unwrap();
        let read = |name: &str| fs::read_to_string(state.path().join(FOLDER).join(name)).unwrap();
        let (authority, worker) = (read(AUTHORITY), read("worker-3.pem"));
        first.renew().unwrap();
        assert_eq!(read("worker-3.pem"), worker, "not due");
        // Due at once.
        let again = open(Some(Duration::ZERO));
        assert_eq!(read(AUTHORITY), authority, "the next `up` has the same one");
        again.issue(Role::Worker, 3).unwrap();
        let worker = read("worker-3.pem");
        again.renew().unwrap();
        assert_ne!(read("worker-3.pem"), worker);
        // A folder in its place, which no file replaces.
        let person = read("client.pem");
        again.issue(Role::Worker, 0).unwrap();
        let path = state.path().join(FOLDER).join("worker-0.pem");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        again.renew().unwrap_err();
        assert_ne!(read("client.pem"), person, "one that fails keeps nobody from theirs");
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
    fn an_authority_that_is_damaged_is_told_and_not_replaced() {
        let state = tempfile::tempdir().unwrap();
        let open = || Certificates::open(state.path(), "demo", ClusterId(1), None);
        open().unwrap();
        let path = state.path().join(FOLDER).join(AUTHORITY_KEY);
        fs::write(&path, "no key").unwrap();
        assert!(format!("{:#}", open().unwrap_err()).contains("is of no use"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "no key");
    }
}
