//! One place in a storage: objects put, fetched, listed and removed.

use crate::Error;
use crate::http::Connector;
use crate::options::{Keys, Options, Place};
use bytes::Bytes;
use futures::TryStreamExt as _;
use futures::stream::BoxStream;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path as Key;
use object_store::{BackoffConfig, MultipartUpload, ObjectStore, ObjectStoreExt as _, PutPayload, RetryConfig};
use std::path::Path;
use std::time::Duration;
use tokio::fs::File;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// A part of an upload, and the most that goes up in one request. A storage takes 10,000 parts of 5 MiB or more: 78 GiB of one object.
const PART_BYTES: usize = 8 << 20;
/// Parts of one object that are on their way at once.
const PARTS_AT_ONCE: usize = 4;
/// How long a storage may be silent in the middle of an answer.
const SILENCE: Duration = Duration::from_secs(30);
/// Tries after the first, and how long they may take in all: a storage that is started again is waited for, one that is gone is told.
const RETRIES: RetryConfig = RetryConfig {
    backoff: BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(5), base: 2.0 },
    max_retries: 8,
    retry_timeout: Duration::from_secs(60),
};
/// Variables that say who asks: both of the first, or one of the others.
const KEYS: [&str; 2] = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];
const ROLES: [&str; 3] =
    ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"];

/// A place in a storage.
#[derive(Debug)]
pub struct Bucket {
    store: AmazonS3,
    place: Place,
}

/// An object of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Its name below the place, without what is below a further slash.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

impl Bucket {
    /// Opens a place. Nothing is asked of the storage yet.
    ///
    /// # Errors
    /// [`Error::NoCredentials`], [`Error::Settings`], [`Error::File`].
    pub fn open(place: Place, options: &Options) -> Result<Self, Error> {
        Self::with(place, options, RETRIES)
    }

    fn with(place: Place, options: &Options, retries: RetryConfig) -> Result<Self, Error> {
        // Variables of no value are as good as none.
        let said = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let mut builder = AmazonS3Builder::from_env();
        if let Some(credentials) = &options.credentials {
            let Keys { id, secret, token } = credentials.keys()?;
            builder = AmazonS3Builder::new().with_access_key_id(id).with_secret_access_key(secret);
            if let Some(token) = token {
                builder = builder.with_token(token);
            }
        } else if !KEYS.into_iter().all(said) && !ROLES.into_iter().any(said) {
            // Otherwise the address of a cloud's own metadata would be asked, and not answer.
            return Err(Error::NoCredentials { place: place.to_string() });
        }
        let from_environment = |names: [&str; 2]| {
            names.into_iter().filter_map(|name| std::env::var(name).ok()).find(|value| !value.is_empty())
        };
        let endpoint = options.endpoint.clone();
        let endpoint = endpoint.or_else(|| from_environment(["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]));
        let mut in_clear = false;
        if let Some(endpoint) = endpoint {
            let http = endpoint.starts_with("http://");
            if !http && !endpoint.starts_with("https://") {
                let what = format!("the endpoint {endpoint:?} of the storage begins with neither http:// nor https://");
                return Err(Error::Settings { what });
            }
            in_clear = http;
            builder = builder.with_endpoint(endpoint.trim_end_matches('/')).with_allow_http(http);
        }
        let region = options.region.clone().or_else(|| from_environment(["AWS_REGION", "AWS_DEFAULT_REGION"]));
        if let Some(region) = region {
            builder = builder.with_region(region);
        }
        let store = builder
            .with_bucket_name(&place.bucket)
            .with_http_connector(Connector { in_clear })
            .with_retry(retries)
            .build();
        let store = store.map_err(|error| Error::Settings { what: error.to_string() })?;
        Ok(Self { store, place })
    }

    /// Where it is.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The place `name` below this one, of the same storage.
    #[must_use]
    pub fn below(&self, name: &str) -> Self {
        Self { store: self.store.clone(), place: self.place.join(name) }
    }

    /// Puts an object of at most some MiB, in place of one of its name.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), Error> {
        let put = self.store.put(&self.key(name), PutPayload::from(bytes)).await;
        put.map(drop).map_err(|error| self.failed("write", name, error))
    }

    /// Puts a file as an object, in parts where it is large: it is there when all of it is, and not before. Returns its size.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Storage`]; nothing of it is kept then, unless the storage cannot be reached to be told so.
    pub async fn put_file(&self, name: &str, path: &Path) -> Result<u64, Error> {
        let failed = |source| Error::File { operation: "read", path: path.display().to_string(), source };
        let mut file = File::open(path).await.map_err(failed)?;
        let first = read_part(&mut file).await.map_err(failed)?;
        if first.len() < PART_BYTES {
            let bytes = first.len() as u64;
            return self.put(name, first).await.map(|()| bytes);
        }
        let upload = self.store.put_multipart(&self.key(name)).await;
        let mut upload = upload.map_err(|error| self.failed("begin to write", name, error))?;
        let sent = self.put_parts(name, path, &mut *upload, file, first).await;
        let done = match sent {
            Ok(bytes) => upload.complete().await.map(|_| bytes).map_err(|error| self.failed("finish", name, error)),
            Err(error) => Err(error),
        };
        if done.is_err() {
            // What cannot be aborted is left to the storage's own rule about unfinished uploads.
            let _ = upload.abort().await;
        }
        done
    }

    async fn put_parts(
        &self,
        name: &str,
        path: &Path,
        upload: &mut dyn MultipartUpload,
        mut file: File,
        first: Vec<u8>,
    ) -> Result<u64, Error> {
        let failed = |source| Error::File { operation: "read", path: path.display().to_string(), source };
        let (mut bytes, mut next, mut under_way) = (0, first, futures::stream::FuturesUnordered::new());
        while !next.is_empty() {
            bytes += next.len() as u64;
            under_way.push(upload.put_part(PutPayload::from(next)));
            if under_way.len() == PARTS_AT_ONCE {
                under_way.try_next().await.map_err(|error| self.failed("write", name, error))?;
            }
            next = read_part(&mut file).await.map_err(failed)?;
        }
        under_way.try_collect::<()>().await.map_err(|error| self.failed("write", name, error))?;
        Ok(bytes)
    }

    /// The bytes of an object; `None` where there is none.
    ///
    /// # Errors
    /// [`Error::TooLong`] above `limit` bytes; [`Error::Storage`].
    pub async fn get(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, Error> {
        let mut pieces = match self.pieces(name, limit).await {
            Ok(pieces) => pieces,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        while let Some(piece) = pieces.next(self).await? {
            bytes.extend_from_slice(&piece);
        }
        Ok(Some(bytes))
    }

    /// Writes an object to a file, durable when this returns. Returns its size.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::TooLong`] above `limit` bytes; [`Error::File`], [`Error::Storage`]. The file may be there in part then.
    pub async fn get_file(&self, name: &str, path: &Path, limit: u64) -> Result<u64, Error> {
        let failed = |operation| move |source| Error::File { operation, path: path.display().to_string(), source };
        let mut file = File::create(path).await.map_err(failed("make"))?;
        let bytes = self.get_into(name, &mut file, path, limit, |_, _| {}).await?;
        file.sync_all().await.map_err(failed("sync"))?;
        Ok(bytes)
    }

    /// Appends an object to a file that is open, which errors call by `shown`. `progress` hears of the bytes that are there, and of how
    /// many there will be. Returns its size.
    ///
    /// # Errors
    /// As [`Bucket::get_file`].
    pub async fn get_into(
        &self,
        name: &str,
        file: &mut File,
        shown: &Path,
        limit: u64,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<u64, Error> {
        let failed = |source| Error::File { operation: "write", path: shown.display().to_string(), source };
        let (mut pieces, mut bytes) = (self.pieces(name, limit).await?, 0);
        while let Some(piece) = pieces.next(self).await? {
            bytes += piece.len() as u64;
            file.write_all(&piece).await.map_err(failed)?;
            progress(bytes, pieces.size);
        }
        // What fails to be written may say so with the next write only.
        file.flush().await.map_err(failed)?;
        Ok(bytes)
    }

    async fn pieces(&self, name: &str, limit: u64) -> Result<Pieces, Error> {
        let found = self.store.get(&self.key(name)).await.map_err(|error| self.failed("read", name, error))?;
        if found.meta.size > limit {
            return Err(Error::TooLong { object: self.shown(name), limit });
        }
        let size = found.meta.size;
        Ok(Pieces { stream: found.into_stream(), name: name.to_owned(), size, limit, left: limit })
    }

    /// What is here: objects, and the names of places below.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn list(&self) -> Result<(Vec<Object>, Vec<String>), Error> {
        let prefix = (!self.place.prefix.is_empty()).then(|| Key::from(self.place.prefix.as_str()));
        let failed = |error| self.failed("list", "", error);
        let found = self.store.list_with_delimiter(prefix.as_ref()).await.map_err(failed)?;
        let last = |key: &Key| key.filename().map(str::to_owned);
        let objects = found.objects.iter();
        let objects = objects.filter_map(|it| Some(Object { name: last(&it.location)?, bytes: it.size })).collect();
        Ok((objects, found.common_prefixes.iter().filter_map(last).collect()))
    }

    /// Removes an object; one that is not there is removed already.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn remove(&self, name: &str) -> Result<(), Error> {
        match self.store.delete(&self.key(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed("remove", name, error)),
        }
    }

    fn key(&self, name: &str) -> Key {
        Key::from(self.place.key(name))
    }

    fn shown(&self, name: &str) -> String {
        if name.is_empty() { self.place.to_string() } else { self.place.join(name).to_string() }
    }

    fn failed(&self, operation: &'static str, name: &str, error: object_store::Error) -> Error {
        let object = self.shown(name);
        match error {
            // It is not the name that is wrong then.
            object_store::Error::NotFound { source, .. } if source.to_string().contains("NoSuchBucket") => {
                Error::NotFound { object: format!("bucket {}", self.place.bucket) }
            }
            object_store::Error::NotFound { .. } => Error::NotFound { object },
            error => Error::Storage { operation, object, source: Box::new(error) },
        }
    }
}

/// An object on its way down.
struct Pieces {
    stream: BoxStream<'static, object_store::Result<Bytes>>,
    name: String,
    /// How long it will be in all.
    size: u64,
    limit: u64,
    left: u64,
}

impl Pieces {
    /// The next piece; `None` behind the last.
    async fn next(&mut self, of: &Bucket) -> Result<Option<Bytes>, Error> {
        let shown = || of.shown(&self.name);
        let silent = |late| Error::Storage { operation: "read", object: shown(), source: Box::new(late) };
        let piece = tokio::time::timeout(SILENCE, self.stream.try_next()).await.map_err(silent)?;
        let Some(piece) = piece.map_err(|error| of.failed("read", &self.name, error))? else { return Ok(None) };
        let left = self.left.checked_sub(piece.len() as u64);
        self.left = left.ok_or_else(|| Error::TooLong { object: shown(), limit: self.limit })?;
        Ok(Some(piece))
    }
}

/// Reads as much of a file as goes up at once; less at its end.
async fn read_part(file: &mut File) -> std::io::Result<Vec<u8>> {
    let mut part = Vec::new();
    file.take(PART_BYTES as u64).read_to_end(&mut part).await?;
    Ok(part)
}

#[cfg(test)]
mod tests;
