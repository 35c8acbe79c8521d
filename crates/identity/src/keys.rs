//! The files with a process's certificate and the roots that it believes, read again while it runs.

use crate::authority::{SKEW, renewal};
use crate::followed::{Followed, read};
use crate::material::{Callers, Material};
use crate::{Error, Expected, Name, Refusals, RootId};
use engram_memory::ClusterId;
use rustls::{ClientConfig, ServerConfig};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Between looks at the files. They are looked at and not watched: a mount of Kubernetes replaces a link, of which who watches the old
/// file hears nothing.
pub const LOOK: Duration = Duration::from_secs(2);

/// Where certificates are, all as PEM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Files {
    /// The roots that are believed.
    pub authority: PathBuf,
    /// This process's certificate.
    pub certificate: PathBuf,
    /// Its key; may be the same file.
    pub key: PathBuf,
}

impl Files {
    /// The roots, and one file with certificate and key.
    pub fn pair(authority: impl Into<PathBuf>, pair: impl Into<PathBuf>) -> Self {
        let certificate = pair.into();
        Self { authority: authority.into(), key: certificate.clone(), certificate }
    }

    /// The roots, the certificate, and the key where that is another file: read once, one file is one version of both.
    fn into_list(self) -> Vec<PathBuf> {
        let Self { authority, certificate, key } = self;
        if key == certificate { vec![authority, certificate] } else { vec![authority, certificate, key] }
    }
}

/// Reads what [`Files::into_list`] names, in place of what was there of the same process.
fn parse(contents: &[Vec<u8>], before: Option<&Material>) -> Result<Material, Error> {
    let (roots, certificate, key) = match contents {
        [roots, pair] => (roots, pair, pair),
        [roots, certificate, key] => (roots, certificate, key),
        other => return Err(Error::unusable(format!("{} files; needed: roots, certificate, key", other.len()))),
    };
    let material = Material::parse(roots, certificate, key, SystemTime::now())?;
    match before.filter(|before| before.name != material.name) {
        Some(before) => {
            Err(Error::unusable(format!("the certificate is of {}, not of {}", material.name, before.name)))
        }
        None => Ok(material),
    }
}

/// A process's certificate and the roots that it believes, as they are now.
pub struct Keys {
    followed: Arc<Followed<Material>>,
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
    /// One cannot be read, or they are not good together.
    pub fn open(files: Files) -> Result<Arc<Self>, Error> {
        let files = files.into_list();
        let contents = read(&files)?;
        Self::of(files, contents, Arc::default())
    }

    /// Keys of a process that holds them in memory: the roots, and key and certificate in one text. Who is not let in is counted in
    /// `refusals`.
    ///
    /// # Errors
    /// They are not good together.
    pub fn given(authority: &str, pair: &str, refusals: Arc<Refusals>) -> Result<Arc<Self>, Error> {
        Self::of(Vec::new(), vec![authority.into(), pair.into()], refusals)
    }

    fn of(files: Vec<PathBuf>, contents: Vec<Vec<u8>>, refusals: Arc<Refusals>) -> Result<Arc<Self>, Error> {
        let material = parse(&contents, None)?;
        let what = format!("certificates of {}", material.name);
        let followed = Followed::of(what, files, Box::new(parse), material, Some(contents));
        Ok(Arc::new(Self { followed, refusals }))
    }

    /// The same, for the process that is `expected`.
    ///
    /// # Errors
    /// As [`Self::open`], or the certificate is somebody else's.
    pub fn open_for(files: Files, cluster: ClusterId, expected: Expected) -> Result<Arc<Self>, Error> {
        let keys = Self::open(files)?;
        expected.check(cluster, &keys.name())?;
        Ok(keys)
    }

    /// Looks at the files again and again, until these keys are dropped. Needs a runtime.
    pub fn follow(&self) {
        self.followed.follow();
    }

    /// Looks at the files now, and takes them if they are good, whole and of the same process.
    pub fn look(&self) {
        self.followed.look();
    }

    /// Takes others in place of [given](Self::given) ones, as files are taken: if they are good, and of the same process.
    pub fn replace(&self, authority: &str, pair: &str) {
        self.followed.replace(vec![authority.into(), pair.into()]);
    }

    /// The same where nobody looked for a while: for a process that does not [follow](Self::follow) them.
    pub(crate) fn look_if_due(&self) {
        self.followed.look_if_due();
    }

    /// Whose they are.
    pub fn name(&self) -> Name {
        self.current().name.clone()
    }

    /// Until when the certificate in use is valid.
    pub fn until(&self) -> SystemTime {
        self.current().until
    }

    /// For how long the certificate in use was issued.
    pub fn lifetime(&self) -> Duration {
        let current = self.current();
        current.until.duration_since(current.from + SKEW).unwrap_or_default()
    }

    /// When the certificate in use is due to be replaced.
    pub fn renew_at(&self) -> SystemTime {
        renewal(self.until() - self.lifetime(), self.lifetime())
    }

    /// The roots that are believed, in their order.
    pub fn believed(&self) -> Vec<RootId> {
        self.current().believed()
    }

    /// The root that the certificate in use leads to.
    pub fn root(&self) -> RootId {
        self.current().root
    }

    /// How often a look found files of no use.
    pub fn failures(&self) -> u64 {
        self.followed.failures()
    }

    /// Who was not let in.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    pub(crate) fn server(&self, callers: Callers) -> Arc<ServerConfig> {
        self.current().server(callers)
    }

    pub(crate) fn client(&self, expected: Expected) -> Arc<ClientConfig> {
        self.current().client(expected)
    }

    fn current(&self) -> Arc<Material> {
        self.followed.current()
    }
}
