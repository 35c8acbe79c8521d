//! Locations of snapshots and of the files of one: in a directory or in object storage.

use super::folder::Folder;
use super::manifest::{Entry, FILE_NAME, MAX_BYTES, Manifest, unusable};
use anyhow::{Context as _, Result};
use engram_api::{Code, Problem, is_name};
use engram_objects::{Bucket, Error, Options};
use futures::{StreamExt as _, TryStreamExt as _};
use std::fs;
use std::path::Path;

/// Files transferred concurrently.
const MAX_CONCURRENT_FILES: usize = 4;
/// Scheme of addresses in a volume.
const VOLUME: &str = "volume://";

/// A location of snapshots, or of one of them.
#[derive(Debug)]
pub enum Location {
    /// A local directory, or one in a mounted volume.
    Folder(Folder),
    /// Object storage.
    Objects(Bucket),
}

impl Location {
    /// Opens a location given on this host: `s3://BUCKET/PREFIX`, or the path of a directory.
    ///
    /// # Errors
    /// ENG-0510: invalid address, or no credentials.
    pub fn open(address: &str, options: &Options) -> Result<Self> {
        if !engram_objects::Location::has_scheme(address) {
            let folder = std::path::absolute(address).with_context(|| format!("{address:?} is not a path"))?;
            return Ok(Self::Folder(Folder::local(folder)));
        }
        Ok(Self::Objects(bucket(address, options)?))
    }

    /// Resolves the location given by a run or a new cluster: `s3://BUCKET/PREFIX`, or `volume://VOLUME/PATH`, where `volumes` has a
    /// directory for each volume of the cluster; `None` if the cluster has no volumes.
    ///
    /// # Errors
    /// ENG-0510: invalid address, no such volume, or no credentials.
    pub async fn resolve(address: &str, options: &Options, volumes: Option<&Path>) -> Result<Self> {
        let Some(path) = address.strip_prefix(VOLUME) else { return Ok(Self::Objects(bucket(address, options)?)) };
        let wrong = |what: String| Problem::new(Code::StorageUnusable, format!("{address}: {what}"));
        let volumes = volumes.ok_or_else(|| wrong("only clusters in Kubernetes have volumes".into()))?;
        let (name, path) = path.split_once('/').unwrap_or((path, ""));
        let all = Folder::local(volumes.to_owned());
        let root = all.join(name);
        let exists =
            is_name(name) && run_blocking(&root, |root| Ok(root.path().is_dir())).await.map_err(storage_error)?;
        if !exists {
            let mut names = run_blocking(&all, Folder::list).await.map_err(storage_error)?;
            names.sort();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            let what = format!("this worker has no volume {name:?}; allowed: those of spec.snapshotVolumes ({names})");
            return Err(wrong(what).into());
        }
        let folder = Folder::in_volume(root.path().to_owned(), path, address);
        Ok(Self::Folder(folder.ok_or_else(|| wrong(format!("{path:?} is not a path below the volume")))?))
    }

    /// Returns the location `name` below this one.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        match self {
            Self::Folder(folder) => Self::Folder(folder.join(name)),
            Self::Objects(bucket) => Self::Objects(bucket.join(name)),
        }
    }

    /// Reads the manifest of the snapshot here; `None` if there is none or it is unfinished.
    ///
    /// # Errors
    /// The manifest is damaged or has another format; ENG-0510.
    pub async fn manifest(&self) -> Result<Option<Manifest>> {
        let parse = |bytes: Vec<u8>| Manifest::parse(&bytes, self.join(FILE_NAME));
        Ok(self.manifest_bytes().await?.map(parse).transpose()?)
    }

    /// Whether a finished snapshot is here, valid or not.
    ///
    /// # Errors
    /// ENG-0510.
    pub async fn has_manifest(&self) -> Result<bool> {
        self.manifest_bytes().await.map(|bytes| bytes.is_some())
    }

    async fn manifest_bytes(&self) -> Result<Option<Vec<u8>>> {
        let bytes = match self {
            Self::Folder(folder) => run_blocking(folder, |folder| folder.get(FILE_NAME, MAX_BYTES)).await,
            Self::Objects(bucket) => bucket.get(FILE_NAME, MAX_BYTES).await,
        };
        bytes.map_err(storage_error)
    }

    /// Reads a small file here; `None` if there is none.
    ///
    /// # Errors
    /// It is larger than `limit` bytes; ENG-0510.
    pub async fn get(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        let bytes = match self {
            Self::Folder(folder) => {
                let name = name.to_owned();
                run_blocking(folder, move |folder| folder.get(&name, limit)).await
            }
            Self::Objects(bucket) => bucket.get(name, limit).await,
        };
        bytes.map_err(storage_error)
    }

    /// Writes a file here, complete or not at all; the location was created.
    ///
    /// # Errors
    /// ENG-0510.
    pub async fn put(&self, name: &str, bytes: Vec<u8>) -> Result<()> {
        let put = match self {
            Self::Folder(folder) => {
                let name = name.to_owned();
                run_blocking(folder, move |folder| folder.put(&name, &bytes)).await
            }
            Self::Objects(bucket) => bucket.put(name, bytes).await,
        };
        put.map_err(storage_error)
    }

    /// Lists the names of the snapshots below, finished or not.
    ///
    /// # Errors
    /// ENG-0510. A missing directory has none.
    pub async fn names(&self) -> Result<Vec<String>> {
        let names = match self {
            Self::Folder(folder) => run_blocking(folder, Folder::list).await,
            Self::Objects(bucket) => bucket.list().await.map(|(_, below)| below),
        };
        names.map_err(storage_error)
    }

    /// Whether anything exists here.
    ///
    /// # Errors
    /// ENG-0510.
    pub async fn is_occupied(&self) -> Result<bool> {
        let occupied = match self {
            Self::Folder(folder) => run_blocking(folder, Folder::list).await.map(|names| !names.is_empty()),
            Self::Objects(bucket) => {
                bucket.list().await.map(|(objects, below)| !objects.is_empty() || !below.is_empty())
            }
        };
        occupied.map_err(storage_error)
    }

    /// Creates the directory; object storage needs none.
    ///
    /// # Errors
    /// ENG-0510.
    pub async fn create(&self) -> Result<()> {
        match self {
            Self::Folder(folder) => run_blocking(folder, Folder::create).await.map_err(storage_error),
            Self::Objects(_) => Ok(()),
        }
    }

    /// Writes the text of a manifest, which completes the snapshot.
    ///
    /// # Errors
    /// ENG-0510.
    pub async fn put_manifest(&self, text: &str) -> Result<()> {
        let bytes = text.as_bytes().to_vec();
        let put = match self {
            Self::Folder(folder) => run_blocking(folder, move |folder| folder.put(FILE_NAME, &bytes)).await,
            Self::Objects(bucket) => bucket.put(FILE_NAME, bytes).await,
        };
        put.map_err(storage_error)
    }

    /// Puts a file here, complete or not at all; the location was created. Returns its size.
    ///
    /// # Errors
    /// ENG-0510; nothing is kept then unless the storage is unreachable.
    pub async fn put_file(&self, name: &str, path: &Path) -> Result<u64> {
        let put = match self {
            Self::Folder(folder) => {
                let (name, path) = (name.to_owned(), path.to_owned());
                run_blocking(folder, move |folder| folder.put_file(&name, &path)).await
            }
            Self::Objects(bucket) => bucket.put_file(name, path).await,
        };
        put.map_err(storage_error)
    }

    /// Fetches one file of the snapshot here into a directory. [`Manifest::verify_file`] verifies it.
    ///
    /// # Errors
    /// ENG-0509 for a file that is missing or longer than expected; ENG-0510.
    pub async fn fetch(&self, entry: &Entry, to: &Path) -> Result<u64> {
        // The name becomes a local path.
        let Some((below, _)) = entry.split_path() else {
            let what = format!("names a file {:?}, which is not a snapshot file", entry.file);
            return Err(unusable(self, what).into());
        };
        if let Some(below) = below {
            fs::create_dir_all(to.join(below)).with_context(|| format!("failed to create {}", to.display()))?;
        }
        let (name, path, bytes) = (entry.file.clone(), to.join(&entry.file), entry.bytes);
        let got = match self {
            Self::Folder(folder) => run_blocking(folder, move |folder| folder.get_file(&name, &path, bytes)).await,
            Self::Objects(bucket) => bucket.get_file(&name, &path, bytes).await,
        };
        let wrong = |what: &str| unusable(self.join(&entry.file), what);
        got.map_err(|error| match error {
            Error::NotFound { .. } => wrong("does not exist").into(),
            Error::TooLong { .. } => wrong("is damaged: it is longer than the manifest says").into(),
            error => storage_error(error),
        })
    }

    /// Removes the files here, best effort; the rest is named by no manifest.
    pub async fn remove_files(&self) {
        match self {
            Self::Folder(folder) => drop(run_blocking(folder, Folder::remove).await),
            Self::Objects(bucket) => {
                let Ok((objects, _)) = bucket.list().await else { return };
                for object in objects {
                    let _ = bucket.remove(&object.name).await;
                }
            }
        }
    }
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Folder(folder) => f.write_str(folder.display_name()),
            Self::Objects(bucket) => bucket.location().fmt(f),
        }
    }
}

/// Runs an operation on a directory on a blocking thread.
async fn run_blocking<T: Send + 'static>(
    folder: &Folder,
    operation: impl FnOnce(&Folder) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (folder, object) = (folder.clone(), folder.display_name().to_owned());
    let result = tokio::task::spawn_blocking(move || operation(&folder)).await;
    result.unwrap_or_else(|error| Err(Error::Storage { operation: "access", object, source: Box::new(error) }))
}

/// Opens a location in object storage.
///
/// # Errors
/// ENG-0510: invalid address, or no credentials.
pub fn bucket(address: &str, options: &Options) -> Result<Bucket> {
    let location = engram_objects::Location::parse(address).map_err(storage_error)?;
    Bucket::open(location, options).map_err(storage_error)
}

/// Uploads a snapshot whose files are in `folder`, the manifest last. `progress` receives the bytes uploaded.
///
/// # Errors
/// ENG-0510. Uploaded files are then removed, best effort.
pub async fn upload(manifest: &mut Manifest, folder: &Path, to: &Bucket, mut progress: impl FnMut(u64)) -> Result<()> {
    let text = manifest.text()?;
    let files = || manifest.files.iter().map(|entry| entry.file.as_str());
    let put = async {
        let puts = files().map(|file| async move { to.put_file(file, &folder.join(file)).await });
        let mut puts = futures::stream::iter(puts).buffer_unordered(MAX_CONCURRENT_FILES);
        while let Some(bytes) = puts.try_next().await? {
            progress(bytes);
        }
        to.put(FILE_NAME, text.into_bytes()).await
    };
    if let Err(error) = put.await {
        // Without a manifest the rest is listed as an unfinished snapshot.
        let removals = files().map(|file| to.remove(file));
        let _: Vec<_> = futures::stream::iter(removals).buffer_unordered(MAX_CONCURRENT_FILES).collect().await;
        return Err(storage_error(error));
    }
    Ok(())
}

/// Fetches the files of a snapshot into a directory. [`Manifest::verify`] verifies them.
///
/// # Errors
/// ENG-0509 for a file that is not there or longer than it should be; ENG-0510.
pub async fn download(
    manifest: &Manifest,
    from: &Location,
    folder: &Path,
    mut progress: impl FnMut(u64),
) -> Result<()> {
    let gets = manifest.files.iter().map(|entry| from.fetch(entry, folder));
    let mut gets = futures::stream::iter(gets).buffer_unordered(MAX_CONCURRENT_FILES);
    while let Some(bytes) = gets.try_next().await? {
        progress(bytes);
    }
    Ok(())
}

/// Converts a storage error with its causes into a problem ENG-0510.
pub fn storage_error(error: Error) -> anyhow::Error {
    let mut message = String::new();
    for cause in anyhow::Error::new(error).chain() {
        let text = cause.to_string();
        if !message.contains(&text) {
            let separator = if message.is_empty() { "" } else { ": " };
            message.extend([separator, &text]);
        }
    }
    Problem::new(Code::StorageUnusable, without_response(&message)).into()
}

/// Removes the response body from an error of the storage, except for the code of an S3 error: an endpoint is named by the client of a
/// cluster, and what another service answers there must not reach the client.
fn without_response(message: &str) -> String {
    /// Longer messages are shortened.
    const MAX_CHARS: usize = 500;
    /// Longest code of S3 is 45 characters.
    const MAX_CODE: usize = 64;
    let body = BODY_MARKERS.into_iter().find_map(|marker| {
        let start = message.find(marker)? + marker.len();
        // The status, as in "403 Forbidden: ", is kept.
        let status =
            if marker == STATUS { message[start..].find(": ").map_or(message.len(), |end| start + end) } else { start };
        Some(status)
    });
    let markup = ["<?xml", "<Error", "<!", "<html"].into_iter().filter_map(|tag| message.find(tag)).min();
    let end = body.into_iter().chain(markup).min().unwrap_or(message.len());
    let code =
        message[end..].split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(code, _)| code);
    let is_code = |code: &&str| code.len() <= MAX_CODE && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let mut text: String = message[..end].trim_end_matches([':', ' ']).chars().take(MAX_CHARS).collect();
    if let Some(code) = code.filter(is_code) {
        text.extend([": ", code]);
    }
    text
}

/// Precedes the status and the body of a response.
const STATUS: &str = "status code: ";
/// What the client of the storage writes before a response's body.
const BODY_MARKERS: [&str; 2] = [STATUS, "error response: "];

#[cfg(test)]
mod tests {
    use super::without_response;

    #[test]
    fn an_error_names_the_status_and_the_code_and_nothing_else_of_the_response() {
        let response = "failed: Server returned non-2xx status code: 403 Forbidden: <?xml version=\"1.0\"?>\n\
            <Error><Code>AccessDenied</Code><Message>No</Message></Error>";
        assert_eq!(
            without_response(response),
            "failed: Server returned non-2xx status code: 403 Forbidden: AccessDenied"
        );
        let foreign = "failed: Server returned non-2xx status code: 401 Unauthorized: {\"token\": \"s3cret\"}";
        assert_eq!(without_response(foreign), "failed: Server returned non-2xx status code: 401 Unauthorized");
        assert_eq!(without_response("Server returned error response: s3cret"), "Server returned error response");
        assert_eq!(without_response("failed: <Error><Code>s3 cret</Code></Error>"), "failed");
        assert_eq!(without_response("connection refused"), "connection refused");
        assert!(without_response(&"x".repeat(10_000)).len() <= 500);
    }
}
