//! A process's certificate and trusted roots, reloaded from files while it runs.

use crate::ca::{Renewal, SKEW};
use crate::material::{Callers, Material};
use crate::watched_files::{WatchedFiles, read};
use crate::{Error, ExpectedPeer, Name, Refusals, RootId};
use engram_memory::ClusterId;
use rustls::{ClientConfig, ServerConfig};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Interval between reloads of the files. They are polled and not watched: a Kubernetes mount replaces a symlink, which
/// a watch of the old file does not see.
pub const RELOAD_INTERVAL: Duration = Duration::from_secs(2);

/// Paths of the PEM files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Files {
    /// Trust bundle.
    pub trust_bundle: PathBuf,
    /// This process's certificate.
    pub certificate: PathBuf,
    /// Its key; may be the same file.
    pub key: PathBuf,
}

impl Files {
    /// Returns the paths of a bundle, and of one file with certificate and key.
    pub fn pair(trust_bundle: impl Into<PathBuf>, pair: impl Into<PathBuf>) -> Self {
        let certificate = pair.into();
        Self { trust_bundle: trust_bundle.into(), key: certificate.clone(), certificate }
    }

    /// Returns the files to read, each once: one file is one version of both certificate and key.
    fn into_list(self) -> Vec<PathBuf> {
        let Self { trust_bundle, certificate, key } = self;
        if key == certificate { vec![trust_bundle, certificate] } else { vec![trust_bundle, certificate, key] }
    }
}

/// Parses the contents of [`Files::into_list`], which must be of the same process as before.
fn parse(contents: &[Vec<u8>], before: Option<&Material>) -> Result<Material, Error> {
    let (roots, certificate, key) = match contents {
        [roots, pair] => (roots, pair, pair),
        [roots, certificate, key] => (roots, certificate, key),
        other => return Err(Error::unusable(format!("{} files; needed: roots, certificate, key", other.len()))),
    };
    let material = Material::parse(roots, certificate, key, SystemTime::now())?;
    match before.filter(|before| before.name != material.name) {
        Some(before) => {
            Err(Error::unusable(format!("the certificate names {}, expected {}", material.name, before.name)))
        }
        None => Ok(material),
    }
}

/// A process's current certificate and trusted roots.
pub struct Keys {
    files: Arc<WatchedFiles<Material>>,
    refusals: Arc<Refusals>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.name())
    }
}

impl Keys {
    /// Reads the files.
    ///
    /// # Errors
    /// A file cannot be read, or they do not fit together.
    pub fn open(files: Files) -> Result<Arc<Self>, Error> {
        let files = files.into_list();
        let contents = read(&files)?;
        Self::new(files, contents, Arc::default())
    }

    /// Creates keys from PEM text: the trust bundle, and key and certificate in one text. Rejected connections are
    /// counted in `refusals`.
    ///
    /// They do not fit together.
    pub fn from_pem(trust_bundle: &str, pair: &str, refusals: Arc<Refusals>) -> Result<Arc<Self>, Error> {
        Self::new(Vec::new(), vec![trust_bundle.into(), pair.into()], refusals)
    }

    fn new(files: Vec<PathBuf>, contents: Vec<Vec<u8>>, refusals: Arc<Refusals>) -> Result<Arc<Self>, Error> {
        let material = parse(&contents, None)?;
        let what = format!("certificates of {}", material.name);
        let files = WatchedFiles::new(what, files, Box::new(parse), material, Some(contents));
        Ok(Arc::new(Self { files, refusals }))
    }

    /// Opens the files of the `expected` process.
    ///
    /// # Errors
    /// As [`Self::open`], or the certificate names another process.
    pub fn open_for(files: Files, cluster: ClusterId, expected: ExpectedPeer) -> Result<Arc<Self>, Error> {
        let keys = Self::open(files)?;
        expected.check(cluster, &keys.name())?;
        Ok(keys)
    }

    /// Reloads the files periodically until these keys are dropped. Needs a runtime.
    pub fn watch(&self) {
        self.files.watch();
    }

    /// Reloads the files now, and takes them if they are valid, complete and of the same process.
    pub fn reload(&self) {
        self.files.reload();
    }

    /// Replaces keys that were created [from PEM](Self::from_pem), if the new ones are valid and of the same process.
    pub fn replace(&self, trust_bundle: &str, pair: &str) {
        self.files.replace(vec![trust_bundle.into(), pair.into()]);
    }

    /// Reloads the files if the last reload is old: for a process that does not [watch](Self::watch) them.
    pub(crate) fn reload_if_due(&self) {
        self.files.reload_if_due();
    }

    /// Returns the process that the certificate names.
    pub fn name(&self) -> Name {
        self.current().name.clone()
    }

    /// Returns the end of validity of the current certificate.
    pub fn expires_at(&self) -> SystemTime {
        self.current().until
    }

    /// Returns the lifetime for which the current certificate was issued.
    pub fn lifetime(&self) -> Duration {
        let current = self.current();
        current.until.duration_since(current.from + SKEW).unwrap_or_default()
    }

    /// Whether the current certificate is due for renewal at `now`.
    pub fn is_due(&self, now: SystemTime) -> bool {
        Renewal::of(self.expires_at() - self.lifetime(), self.lifetime()).is_due(now)
    }

    /// Returns the trusted roots, in their order.
    pub fn trusted_roots(&self) -> Vec<RootId> {
        self.current().trusted_roots()
    }

    /// Returns the root that issued the current certificate.
    pub fn root(&self) -> RootId {
        self.current().root
    }

    /// Returns how often a reload failed.
    pub fn failures(&self) -> u64 {
        self.files.failures()
    }

    /// Returns the counters of rejected connections.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    pub(crate) fn server(&self, callers: Callers) -> Arc<ServerConfig> {
        self.current().server(callers)
    }

    pub(crate) fn client(&self, expected: ExpectedPeer) -> Arc<ClientConfig> {
        self.current().client(expected)
    }

    fn current(&self) -> Arc<Material> {
        self.files.current()
    }
}
