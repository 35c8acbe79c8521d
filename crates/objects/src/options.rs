//! Storage endpoint, location in it, and credentials.

use crate::Error;
use std::path::{Path, PathBuf};

/// Longest bucket name.
const MAX_BUCKET: usize = 63;
/// Longest region, as in manifests; those of clouds have less than 20 characters.
const MAX_REGION: usize = 64;

/// A bucket and a prefix in it: `s3://bucket/some/prefix`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    pub(crate) bucket: String,
    /// Without a slash at either end; empty = the whole bucket.
    pub(crate) prefix: String,
}

impl Location {
    /// Whether `address` is a URL rather than a file path, well-formed or not.
    pub fn has_scheme(address: &str) -> bool {
        address.contains("://")
    }

    /// Parses an address.
    ///
    /// # Errors
    /// [`Error::Address`].
    pub fn parse(address: &str) -> Result<Self, Error> {
        let invalid = |what| Error::Address { address: address.to_owned(), what };
        let rest = address.strip_prefix("s3://").ok_or_else(|| invalid("it does not begin with s3://"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
        if !(3..=MAX_BUCKET).contains(&bucket.len()) || !bucket.bytes().all(allowed) {
            return Err(invalid("a bucket name has 3 to 63 characters of a-z, 0-9, - and ."));
        }
        let prefix = prefix.trim_end_matches('/');
        let allowed = |it: char| it.is_ascii_alphanumeric() || matches!(it, '-' | '_' | '.');
        let part = |part: &str| !part.is_empty() && !matches!(part, "." | "..") && part.chars().all(allowed);
        if !prefix.is_empty() && !prefix.split('/').all(part) {
            return Err(invalid("a prefix may contain A-Z, a-z, 0-9, -, _ and . between its slashes"));
        }
        Ok(Self { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }

    /// Returns the location `name` below this one.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        Self { bucket: self.bucket.clone(), prefix: self.key(name) }
    }

    /// Returns the key of the object `name`.
    pub(crate) fn key(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_owned() } else { format!("{}/{name}", self.prefix) }
    }
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "s3://{}", self.bucket)?;
        if self.prefix.is_empty() { Ok(()) } else { write!(f, "/{}", self.prefix) }
    }
}

/// How the storage is reached. Unset options are taken from the AWS environment variables `AWS_ENDPOINT_URL_S3` or
/// `AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, and those of web identity
/// and container roles. Empty variables count as unset.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Endpoint URL such as `http://minio:9000`; `None` = AWS. `http://` sends content in plaintext.
    pub endpoint: Option<String>,
    /// Region; defaults to `us-east-1`.
    pub region: Option<String>,
    /// Credentials.
    pub credentials: Option<Credentials>,
    /// Who chose the endpoint.
    pub endpoint_owner: EndpointOwner,
}

/// Who chose an endpoint, and hence what is sent to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum EndpointOwner {
    /// The owner of this process's environment, whose credentials may be sent to any endpoint.
    #[default]
    Process,
    /// A client of this process. The environment's credentials are sent to the environment's endpoint only, and loopback,
    /// link-local and metadata addresses are refused, except for `allowed` ones.
    Client {
        /// Endpoints that may have such an address.
        allowed: Vec<String>,
    },
}

/// Source of the credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credentials {
    /// Directory with the files `accessKeyId`, `secretAccessKey` and optionally `sessionToken`: a mounted Secret.
    Folder(PathBuf),
    /// Given keys.
    Keys(Keys),
}

impl Credentials {
    pub(crate) fn keys(&self) -> Result<Keys, Error> {
        match self {
            Self::Folder(folder) => Keys::read(folder),
            Self::Keys(keys) => keys.check().map(|()| keys.clone()),
        }
    }
}

/// Access key, and the session token of temporary ones.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys {
    /// Access key ID.
    pub id: String,
    /// Secret access key.
    pub secret: String,
    /// Session token.
    pub token: Option<String>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(redacted)")
    }
}

impl Keys {
    /// Reads the keys from a directory.
    pub(crate) fn read(folder: &Path) -> Result<Self, Error> {
        let read = |name: &str| {
            let path = folder.join(name);
            let failed = |source| Error::File { operation: "read", path: path.display().to_string(), source };
            let text = std::fs::read_to_string(&path).map_err(failed)?;
            let text = text.trim();
            check_credential(&path.display(), text)?;
            Ok(text.to_owned())
        };
        let token = folder.join("sessionToken").exists().then(|| read("sessionToken")).transpose()?;
        Ok(Self { id: read("accessKeyId")?, secret: read("secretAccessKey")?, token })
    }

    /// Checks that requests can be signed with the keys.
    fn check(&self) -> Result<(), Error> {
        let token = self.token.as_deref().map(|token| ("sessionToken", token));
        let keys = [("accessKeyId", self.id.as_str()), ("secretAccessKey", self.secret.as_str())];
        keys.into_iter().chain(token).try_for_each(|(field, text)| check_credential(&field, text))
    }
}

/// Checks a credential, without repeating it in the error.
pub(crate) fn check_credential(field: &dyn std::fmt::Display, text: &str) -> Result<(), Error> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    let found = if text.is_empty() { "is empty" } else { "contains a space, a line feed or another character" };
    let what = format!("{field} does not contain a credential: it {found}; allowed: visible ASCII characters");
    Err(Error::Settings { what })
}

/// Checks a region, which becomes a part of host names and signatures.
pub(crate) fn check_region(field: &str, text: &str) -> Result<(), Error> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if (1..=MAX_REGION).contains(&text.len()) && text.bytes().all(is_plain) {
        return Ok(());
    }
    let what = format!("{field} is {text:?}; allowed: 1 to {MAX_REGION} of A-Z, a-z, 0-9, - and _");
    Err(Error::Settings { what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_addresses_are_parsed_and_invalid_ones_rejected_with_a_reason() {
        for (address, bucket, prefix) in [
            ("s3://backups", "backups", ""),
            ("s3://backups/", "backups", ""),
            ("s3://my.backups-1/words/2026", "my.backups-1", "words/2026"),
            ("s3://backups/Words_2/", "backups", "Words_2"),
        ] {
            let location = Location::parse(address).unwrap();
            assert_eq!((location.bucket.as_str(), location.prefix.as_str()), (bucket, prefix));
            assert_eq!(location.to_string(), address.trim_end_matches('/'));
        }
        assert_eq!(Location::parse("s3://backups").unwrap().join("a").key("b"), "a/b");
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
            assert!(matches!(Location::parse(address), Err(Error::Address { .. })), "{address}");
        }
    }

    #[test]
    fn credentials_of_a_mounted_secret_are_read_and_redacted_in_debug_output() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(Keys::read(folder.path()), Err(Error::File { .. })));
        std::fs::write(folder.path().join("accessKeyId"), "AKIA\n").unwrap();
        std::fs::write(folder.path().join("secretAccessKey"), "s3 cret").unwrap();
        let refused = Keys::read(folder.path()).err().unwrap().to_string();
        assert!(refused.contains("secretAccessKey") && !refused.contains("cret\""), "{refused}");
        std::fs::write(folder.path().join("secretAccessKey"), "s3cret\n").unwrap();
        let read = Keys::read(folder.path()).unwrap();
        assert_eq!(format!("{read:?}"), "Keys(redacted)");
        assert_eq!((read.id.as_str(), read.secret.as_str(), read.token), ("AKIA", "s3cret", None));
    }
}
