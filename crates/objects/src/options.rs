//! Which storage, where in it, and who asks.

use crate::Error;
use std::path::{Path, PathBuf};

/// Longest name of a bucket.
const MAX_BUCKET: usize = 63;

/// A bucket and a prefix in it: `s3://bucket/some/prefix`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub(crate) bucket: String,
    /// Without a slash at either end; empty = the whole bucket.
    pub(crate) prefix: String,
}

impl Place {
    /// Whether `address` is meant to be one, well-formed or not: what has the scheme of another storage is no path of a file either.
    pub fn is_meant(address: &str) -> bool {
        address.contains("://")
    }

    /// Reads an address.
    ///
    /// # Errors
    /// [`Error::Address`].
    pub fn parse(address: &str) -> Result<Self, Error> {
        let wrong = |what| Error::Address { address: address.to_owned(), what };
        let rest = address.strip_prefix("s3://").ok_or_else(|| wrong("it does not begin with s3://"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
        if !(3..=MAX_BUCKET).contains(&bucket.len()) || !bucket.bytes().all(allowed) {
            return Err(wrong("the name of a bucket has 3 to 63 of a-z, 0-9, - and ."));
        }
        let prefix = prefix.trim_end_matches('/');
        let allowed = |it: char| it.is_ascii_alphanumeric() || matches!(it, '-' | '_' | '.');
        let part = |part: &str| !part.is_empty() && !matches!(part, "." | "..") && part.chars().all(allowed);
        if !prefix.is_empty() && !prefix.split('/').all(part) {
            return Err(wrong("a prefix has A-Z, a-z, 0-9, -, _ and . between its slashes"));
        }
        Ok(Self { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }

    /// The place `name` below this one.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        Self { bucket: self.bucket.clone(), prefix: self.key(name) }
    }

    /// The key of an object here.
    pub(crate) fn key(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_owned() } else { format!("{}/{name}", self.prefix) }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "s3://{}", self.bucket)?;
        if self.prefix.is_empty() { Ok(()) } else { write!(f, "/{}", self.prefix) }
    }
}

/// How the storage is reached. What is not said is taken from the environment, by the names that AWS gave its variables:
/// `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, and
/// those of a role that a token of the web or a container gives.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Where it listens: `http://minio:9000`. Without one it is AWS. Over `http://` content can be read on the way.
    pub endpoint: Option<String>,
    /// Its region; `us-east-1` where nobody says.
    pub region: Option<String>,
    /// Who asks.
    pub credentials: Option<Credentials>,
}

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credentials {
    /// As a folder says, with the files `accessKeyId` and `secretAccessKey`, and `sessionToken` where there is one: a mounted Secret.
    Folder(PathBuf),
    /// As somebody has told.
    Keys(Keys),
}

impl Credentials {
    pub(crate) fn keys(&self) -> Result<Keys, Error> {
        match self {
            Self::Folder(folder) => Keys::read(folder),
            Self::Keys(keys) => Ok(keys.clone()),
        }
    }
}

/// A pair of keys, and the token that comes with those of a while.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys {
    /// The one that is no secret.
    pub id: String,
    /// The other.
    pub secret: String,
    /// The token.
    pub token: Option<String>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(not told)")
    }
}

impl Keys {
    /// Reads them from a folder.
    pub(crate) fn read(folder: &Path) -> Result<Self, Error> {
        let read = |name: &str| {
            let path = folder.join(name);
            let failed = |source| Error::File { operation: "read", path: path.display().to_string(), source };
            let text = std::fs::read_to_string(&path).map_err(failed)?;
            let text = text.trim();
            if text.is_empty() || !text.chars().all(|it| it.is_ascii_graphic()) {
                return Err(Error::Settings { what: format!("{} holds no credential", path.display()) });
            }
            Ok(text.to_owned())
        };
        let token = folder.join("sessionToken").exists().then(|| read("sessionToken")).transpose()?;
        Ok(Self { id: read("accessKeyId")?, secret: read("secretAccessKey")?, token })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_and_anything_else_is_refused_by_what_is_wrong() {
        for (address, bucket, prefix) in [
            ("s3://backups", "backups", ""),
            ("s3://backups/", "backups", ""),
            ("s3://my.backups-1/words/2026", "my.backups-1", "words/2026"),
            ("s3://backups/Words_2/", "backups", "Words_2"),
        ] {
            let place = Place::parse(address).unwrap();
            assert_eq!((place.bucket.as_str(), place.prefix.as_str()), (bucket, prefix));
            assert_eq!(place.to_string(), address.trim_end_matches('/'));
        }
        assert_eq!(Place::parse("s3://backups").unwrap().join("a").key("b"), "a/b");
        for address in [
            "gs://backups",
            "s3:/backups",
            "s3://",
            "s3://ab",
            "s3://UPPER",
            "s3://backups//a",
            "s3://backups/../a",
            "s3://backups/a b",
            "s3://backups/a?b",
            "s3://key:secret@backups/a",
        ] {
            assert!(matches!(Place::parse(address), Err(Error::Address { .. })), "{address}");
        }
    }

    #[test]
    fn a_mounted_secret_is_read_and_none_of_it_is_told() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(Keys::read(folder.path()), Err(Error::File { .. })));
        std::fs::write(folder.path().join("accessKeyId"), "AKIA\n").unwrap();
        std::fs::write(folder.path().join("secretAccessKey"), "s3 cret").unwrap();
        let refused = Keys::read(folder.path()).err().unwrap().to_string();
        assert!(refused.contains("secretAccessKey") && !refused.contains("cret\""), "{refused}");
        std::fs::write(folder.path().join("secretAccessKey"), "s3cret\n").unwrap();
        let read = Keys::read(folder.path()).unwrap();
        assert_eq!(format!("{read:?}"), "Keys(not told)");
        assert_eq!((read.id.as_str(), read.secret.as_str(), read.token), ("AKIA", "s3cret", None));
    }
}
