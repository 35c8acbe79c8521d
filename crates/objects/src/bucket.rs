//! Operations on the objects below one location: put, get, list, remove.

use crate::Error;
use crate::endpoint::Endpoint;
use crate::environment::Environment;
use crate::http::Connector;
use crate::options::{EndpointOwner, Keys, Location, Options, check_region};
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

/// Size of an upload part, and the most sent in one request. S3 takes 10,000 parts of at least 5 MiB: objects up to 78 GiB.
const PART_BYTES: usize = 8 << 20;
/// Parts of one object uploaded concurrently.
const MAX_CONCURRENT_PARTS: usize = 4;
/// Timeout between two pieces of a response body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Retries outlast a restart of the storage; an unavailable storage is reported after a minute.
const RETRIES: RetryConfig = RetryConfig {
    backoff: BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(5), base: 2.0 },
    max_retries: 8,
    retry_timeout: Duration::from_secs(60),
};
/// Client for one location in object storage.
#[derive(Debug)]
pub struct Bucket {
    store: AmazonS3,
    location: Location,
}

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Name below the location, without further slashes.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
}

impl Bucket {
    /// Opens a location. Sends no request yet.
    ///
    /// # Errors
    /// [`Error::NoCredentials`], [`Error::Settings`], [`Error::File`].
    pub fn open(location: Location, options: &Options) -> Result<Self, Error> {
        Self::with_retries(location, options, RETRIES)
    }

    fn with_retries(location: Location, options: &Options, retries: RetryConfig) -> Result<Self, Error> {
        Self::in_environment(location, options, retries, &Environment::of_process())
    }

    fn in_environment(
        location: Location,
        options: &Options,
        retries: RetryConfig,
        environment: &Environment,
    ) -> Result<Self, Error> {
        let mut builder = if let Some(credentials) = &options.credentials {
            let Keys { id, secret, token } = credentials.keys()?;
            let builder = AmazonS3Builder::new().with_access_key_id(id).with_secret_access_key(secret);
            if let Some(token) = token { builder.with_token(token) } else { builder }
        } else if environment.has_credentials() {
            environment.builder()?
        } else {
            // Without this check the client would query the cloud's metadata endpoint until it times out.
            return Err(Error::NoCredentials { location: location.to_string() });
        };
        let chosen = options.endpoint.as_deref().map(|text| Endpoint::parse("endpoint", text)).transpose()?;
        let refuse_local = match &chosen {
            Some(endpoint) => is_restricted(endpoint, options, environment)?,
            None => false,
        };
        let endpoint = chosen.map_or_else(|| environment.endpoint(), |endpoint| Ok(Some(endpoint)))?;
        let plaintext = endpoint.as_ref().is_some_and(|endpoint| endpoint.plaintext);
        if let Some(endpoint) = endpoint {
            builder = builder.with_endpoint(endpoint.to_string()).with_allow_http(plaintext);
        }
        let region = match &options.region {
            Some(region) => check_region("region", region).map(|()| Some(region.as_str()))?,
            None => environment.region()?,
        };
        if let Some(region) = region {
            builder = builder.with_region(region);
        }
        let store = builder
            .with_bucket_name(&location.bucket)
            .with_http_connector(Connector { plaintext, refuse_local })
            .with_retry(retries)
            .build();
        let store = store.map_err(|error| Error::Settings { what: error.to_string() })?;
        Ok(Self { store, location })
    }

    /// Returns the location.
    pub fn location(&self) -> &Location {
        &self.location
    }

    /// Returns the location `name` below this one, in the same storage.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        Self { store: self.store.clone(), location: self.location.join(name) }
    }

    /// Puts an object of at most some MiB, replacing one of the same name.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), Error> {
        let put = self.store.put(&self.key(name), PutPayload::from(bytes)).await;
        put.map(drop).map_err(|error| self.storage_error("write", name, error))
    }

    /// Uploads a file as an object, in parts if it is large; the object appears only when complete. Returns its size.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Storage`]; parts are removed unless the storage is unreachable.
    pub async fn put_file(&self, name: &str, path: &Path) -> Result<u64, Error> {
        let failed = |source| Error::File { operation: "read", path: path.display().to_string(), source };
        let mut file = File::open(path).await.map_err(failed)?;
        let first = read_part(&mut file).await.map_err(failed)?;
        if first.len() < PART_BYTES {
            let bytes = first.len() as u64;
            return self.put(name, first).await.map(|()| bytes);
        }
        let upload = self.store.put_multipart(&self.key(name)).await;
        let mut upload = upload.map_err(|error| self.storage_error("begin to write", name, error))?;
        let sent = self.put_parts(name, path, &mut *upload, file, first).await;
        let done = match sent {
            Ok(bytes) => {
                upload.complete().await.map(|_| bytes).map_err(|error| self.storage_error("finish", name, error))
            }
            Err(error) => Err(error),
        };
        if done.is_err() {
            // The storage's lifecycle rule for incomplete uploads removes what cannot be aborted.
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
        let (mut bytes, mut next, mut in_flight) = (0, first, futures::stream::FuturesUnordered::new());
        while !next.is_empty() {
            bytes += next.len() as u64;
            in_flight.push(upload.put_part(PutPayload::from(next)));
            if in_flight.len() == MAX_CONCURRENT_PARTS {
                in_flight.try_next().await.map_err(|error| self.storage_error("write", name, error))?;
            }
            next = read_part(&mut file).await.map_err(failed)?;
        }
        in_flight.try_collect::<()>().await.map_err(|error| self.storage_error("write", name, error))?;
        Ok(bytes)
    }

    /// The bytes of an object; `None` where there is none.
    ///
    /// # Errors
    /// [`Error::TooLong`] above `limit` bytes; [`Error::Storage`].
    pub async fn get(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, Error> {
        let mut pieces = match self.download(name, limit).await {
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

    /// Downloads an object to a file, durable when this returns. Returns its size.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::TooLong`] above `limit` bytes; [`Error::File`], [`Error::Storage`]. The file may be incomplete then.
    pub async fn get_file(&self, name: &str, path: &Path, limit: u64) -> Result<u64, Error> {
        let failed = |operation| move |source| Error::File { operation, path: path.display().to_string(), source };
        let mut file = File::create(path).await.map_err(failed("create"))?;
        let bytes = self.get_into(name, &mut file, path, limit, |_, _| {}).await?;
        file.sync_all().await.map_err(failed("sync"))?;
        Ok(bytes)
    }

    /// Appends an object to an open file, named `shown` in errors. `progress` receives the bytes written and the total.
    /// Returns the size.
    ///
    /// # Errors
    /// As [`Bucket::get_file`].
    pub async fn get_into(
        &self,
        name: &str,
        file: &mut File,
        address: &Path,
        limit: u64,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<u64, Error> {
        let failed = |source| Error::File { operation: "write", path: address.display().to_string(), source };
        let (mut pieces, mut bytes) = (self.download(name, limit).await?, 0);
        while let Some(piece) = pieces.next(self).await? {
            bytes += piece.len() as u64;
            file.write_all(&piece).await.map_err(failed)?;
            progress(bytes, pieces.size);
        }
        // A failed write may be reported only by the next operation.
        file.flush().await.map_err(failed)?;
        Ok(bytes)
    }

    async fn download(&self, name: &str, limit: u64) -> Result<Download, Error> {
        let object = self.store.get(&self.key(name)).await.map_err(|error| self.storage_error("read", name, error))?;
        if object.meta.size > limit {
            return Err(Error::TooLong { object: self.address(name), limit });
        }
        let size = object.meta.size;
        Ok(Download { stream: object.into_stream(), name: name.to_owned(), size, limit, left: limit })
    }

    /// Lists objects, and the names of locations below.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn list(&self) -> Result<(Vec<Object>, Vec<String>), Error> {
        let prefix = (!self.location.prefix.is_empty()).then(|| Key::from(self.location.prefix.as_str()));
        let failed = |error| self.storage_error("list", "", error);
        let listing = self.store.list_with_delimiter(prefix.as_ref()).await.map_err(failed)?;
        let last = |key: &Key| key.filename().map(str::to_owned);
        let objects = listing.objects.iter();
        let objects = objects.filter_map(|it| Some(Object { name: last(&it.location)?, bytes: it.size })).collect();
        Ok((objects, listing.common_prefixes.iter().filter_map(last).collect()))
    }

    /// Removes an object; a missing one is no error.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub async fn remove(&self, name: &str) -> Result<(), Error> {
        match self.store.delete(&self.key(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.storage_error("remove", name, error)),
        }
    }

    fn key(&self, name: &str) -> Key {
        Key::from(self.location.key(name))
    }

    fn address(&self, name: &str) -> String {
        if name.is_empty() { self.location.to_string() } else { self.location.join(name).to_string() }
    }

    fn storage_error(&self, operation: &'static str, name: &str, error: object_store::Error) -> Error {
        let object = self.address(name);
        match error {
            // The bucket is missing, not the object.
            object_store::Error::NotFound { source, .. } if source.to_string().contains("NoSuchBucket") => {
                Error::NotFound { object: format!("bucket {}", self.location.bucket) }
            }
            object_store::Error::NotFound { .. } => Error::NotFound { object },
            error => Error::Storage { operation, object, source: Box::new(error) },
        }
    }
}

/// Checks an endpoint named in the options. Returns whether its host may not resolve to an address of this machine or of its cloud.
fn is_restricted(endpoint: &Endpoint, options: &Options, environment: &Environment) -> Result<bool, Error> {
    let EndpointOwner::Client { allowed } = &options.endpoint_owner else { return Ok(false) };
    // A broken variable is reported only where it is used.
    if environment.endpoint().ok().flatten().is_some_and(|own| own == *endpoint) {
        return Ok(false);
    }
    let is_allowed = allowed.iter().any(|it| Endpoint::parse("", it).is_ok_and(|it| it == *endpoint));
    if let Some(kind) = endpoint.local_address().filter(|_| !is_allowed) {
        let what = format!(
            "endpoint {endpoint} is {kind}; allowed: other addresses, the endpoint in the workers' environment, and those in \
             spec.storageEndpoints of the cluster"
        );
        return Err(Error::Settings { what });
    }
    if options.credentials.is_none() {
        let what = format!(
            "endpoint {endpoint} is not the one in the workers' environment, and the credentials there are sent to no other; allowed: \
             credentials of its own (secretRef), or the endpoint in AWS_ENDPOINT_URL of the workers"
        );
        return Err(Error::Settings { what });
    }
    Ok(!is_allowed)
}

/// An object being downloaded.
struct Download {
    stream: BoxStream<'static, object_store::Result<Bytes>>,
    name: String,
    /// Total size.
    size: u64,
    limit: u64,
    left: u64,
}

impl Download {
    /// Returns the next piece; `None` after the last.
    async fn next(&mut self, bucket: &Bucket) -> Result<Option<Bytes>, Error> {
        let address = || bucket.address(&self.name);
        let timed_out = |elapsed| Error::Storage { operation: "read", object: address(), source: Box::new(elapsed) };
        let piece = tokio::time::timeout(READ_TIMEOUT, self.stream.try_next()).await.map_err(timed_out)?;
        let Some(piece) = piece.map_err(|error| bucket.storage_error("read", &self.name, error))? else {
            return Ok(None);
        };
        let left = self.left.checked_sub(piece.len() as u64);
        self.left = left.ok_or_else(|| Error::TooLong { object: address(), limit: self.limit })?;
        Ok(Some(piece))
    }
}

/// Reads one upload part of a file; less at its end.
async fn read_part(file: &mut File) -> std::io::Result<Vec<u8>> {
    let mut part = Vec::new();
    file.take(PART_BYTES as u64).read_to_end(&mut part).await?;
    Ok(part)
}

#[cfg(test)]
mod tests;
