//! Where snapshots lie, one below another by name, and the files of one: in a folder, or in a storage for objects.

use super::folder::Folder;
use super::manifest::{Entry, FILE_NAME, MAX_BYTES, Manifest, unusable};
use anyhow::{Context as _, Result};
use engram_api::{Code, Problem, is_name};
use engram_objects::{Bucket, Error, Options};
use futures::{StreamExt as _, TryStreamExt as _};
use std::fs;
use std::path::Path;

/// Files that go up or come down at once.
const FILES_AT_ONCE: usize = 4;
/// What the address of a place in a volume begins with.
const VOLUME: &str = "volume://";

/// Where snapshots lie, or one of them.
#[derive(Debug)]
pub enum Place {
    /// In a folder of this machine, or of a volume that is mounted in it.
    Folder(Folder),
    /// In a storage for objects.
    Objects(Bucket),
}

impl Place {
    /// The place that somebody at this machine names: `s3://BUCKET/PREFIX`, or the path of a folder.
    ///
    /// # Errors
    /// ENG-0510: no address of a storage, or nobody says who asks it.
    pub fn open(address: &str, options: &Options) -> Result<Self> {
        if !engram_objects::Place::is_meant(address) {
            let folder = std::path::absolute(address).with_context(|| format!("{address:?} is no path"))?;
            return Ok(Self::Folder(Folder::of_machine(folder)));
        }
        Ok(Self::Objects(bucket(address, options)?))
    }

    /// The place that a run or a new cluster names: `s3://BUCKET/PREFIX`, or `volume://VOLUME/PATH`, where `volumes` has a folder for each
    /// volume of the cluster; `None` of one that has no volumes.
    ///
    /// # Errors
    /// ENG-0510: no such address, no such volume, or nobody says who asks the storage.
    pub async fn named(address: &str, options: &Options, volumes: Option<&Path>) -> Result<Self> {
        let Some(place) = address.strip_prefix(VOLUME) else { return Ok(Self::Objects(bucket(address, options)?)) };
        let wrong = |what: String| Problem::new(Code::StorageUnusable, format!("{address}: {what}"));
        let volumes = volumes.ok_or_else(|| wrong("only clusters in Kubernetes have volumes".into()))?;
        let (name, path) = place.split_once('/').unwrap_or((place, ""));
        let all = Folder::of_machine(volumes.to_owned());
        let root = all.below(name);
        let is_there = is_name(name) && apart(&root, |root| Ok(root.path().is_dir())).await.map_err(failed)?;
        if !is_there {
            let mut there = apart(&all, Folder::list).await.map_err(failed)?;
            there.sort();
            let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
            let what = format!("this worker has no volume {name:?}; allowed: those of spec.snapshotVolumes ({there})");
            return Err(wrong(what).into());
        }
        let folder = Folder::of_volume(root.path().to_owned(), path, address);
        Ok(Self::Folder(folder.ok_or_else(|| wrong(format!("{path:?} is no path below the volume")))?))
    }

    /// The place `name` below this one.
    #[must_use]
    pub fn below(&self, name: &str) -> Self {
        match self {
            Self::Folder(folder) => Self::Folder(folder.below(name)),
            Self::Objects(bucket) => Self::Objects(bucket.below(name)),
        }
    }

    /// The manifest of the snapshot that is here, `None` where there is none or it was never finished.
    ///
    /// # Errors
    /// It is damaged or of another format; ENG-0510.
    pub async fn manifest(&self) -> Result<Option<Manifest>> {
        let parse = |bytes: Vec<u8>| Manifest::parse(&bytes, self.below(FILE_NAME));
        Ok(self.manifest_bytes().await?.map(parse).transpose()?)
    }

    /// Whether a snapshot is here that was finished, whatever it is worth.
    ///
    /// # Errors
    /// ENG-0510.
    pub async fn has_manifest(&self) -> Result<bool> {
        self.manifest_bytes().await.map(|bytes| bytes.is_some())
    }

    async fn manifest_bytes(&self) -> Result<Option<Vec<u8>>> {
        let bytes = match self {
            Self::Folder(folder) => apart(folder, |folder| folder.get(FILE_NAME, MAX_BYTES)).await,
            Self::Objects(bucket) => bucket.get(FILE_NAME, MAX_BYTES).await,
        };
        bytes.map_err(failed)
    }

    /// Names of the snapshots that are below, finished or not.
    ///
    /// # Errors
    /// ENG-0510. A folder that is not there has none.
    pub async fn names(&self) -> Result<Vec<String>> {
        let names = match self {
            Self::Folder(folder) => apart(folder, Folder::list).await,
            Self::Objects(bucket) => bucket.list().await.map(|(_, below)| below),
        };
        names.map_err(failed)
    }

    /// Whether anything is here.
    ///
    /// # Errors
    /// ENG-0510.
    pub async fn is_taken(&self) -> Result<bool> {
        let taken = match self {
            Self::Folder(folder) => apart(folder, Folder::list).await.map(|names| !names.is_empty()),
            Self::Objects(bucket) => {
                bucket.list().await.map(|(objects, below)| !objects.is_empty() || !below.is_empty())
            }
        };
        taken.map_err(failed)
    }

    /// Makes room for files: a folder is made, a storage needs nothing.
    ///
    /// # Errors
    /// ENG-0510.
    pub async fn make(&self) -> Result<()> {
        match self {
            Self::Folder(folder) => apart(folder, Folder::make).await.map_err(failed),
            Self::Objects(_) => Ok(()),
        }
    }

    /// Writes the text of a manifest: after this, and not before, the snapshot is here.
    ///
    /// # Errors
    /// ENG-0510.
    pub async fn put_manifest(&self, text: &str) -> Result<()> {
        let bytes = text.as_bytes().to_vec();
        let put = match self {
            Self::Folder(folder) => apart(folder, move |folder| folder.put(FILE_NAME, &bytes)).await,
            Self::Objects(bucket) => bucket.put(FILE_NAME, bytes).await,
        };
        put.map_err(failed)
    }

    /// Puts a file here: it appears whole or not at all. The place was made. Returns its size.
    ///
    /// # Errors
    /// ENG-0510; nothing of it is kept then, unless the storage cannot be reached to be told so.
    pub async fn put_file(&self, name: &str, path: &Path) -> Result<u64> {
        let put = match self {
            Self::Folder(folder) => {
                let (name, path) = (name.to_owned(), path.to_owned());
                apart(folder, move |folder| folder.put_file(&name, &path)).await
            }
            Self::Objects(bucket) => bucket.put_file(name, path).await,
        };
        put.map_err(failed)
    }

    /// Fetches one file of the snapshot that is here into a folder. Whether it is right is for [`Manifest::verify_file`].
    ///
    /// # Errors
    /// ENG-0509 for a file that is not there or longer than it should be; ENG-0510.
    pub async fn fetch(&self, entry: &Entry, to: &Path) -> Result<u64> {
        // It becomes a path of this machine.
        let Some((below, _)) = entry.place() else {
            let what = format!("names a file {:?}, which is no snapshot file", entry.file);
            return Err(unusable(self, what).into());
        };
        if let Some(below) = below {
            fs::create_dir_all(to.join(below)).with_context(|| format!("failed to make {}", to.display()))?;
        }
        let (name, path, bytes) = (entry.file.clone(), to.join(&entry.file), entry.bytes);
        let got = match self {
            Self::Folder(folder) => apart(folder, move |folder| folder.get_file(&name, &path, bytes)).await,
            Self::Objects(bucket) => bucket.get_file(&name, &path, bytes).await,
        };
        let wrong = |what: &str| unusable(self.below(&entry.file), what);
        got.map_err(|error| match error {
            Error::NotFound { .. } => wrong("is not there").into(),
            Error::TooLong { .. } => wrong("is damaged: it is longer than its manifest says").into(),
            error => failed(error),
        })
    }

    /// Removes the files that are here, as far as the storage lets it; what stays is named by no manifest.
    pub async fn remove_files(&self) {
        match self {
            Self::Folder(folder) => drop(apart(folder, Folder::remove).await),
            Self::Objects(bucket) => {
                let Ok((objects, _)) = bucket.list().await else { return };
                for object in objects {
                    let _ = bucket.remove(&object.name).await;
                }
            }
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Folder(folder) => f.write_str(folder.shown()),
            Self::Objects(bucket) => bucket.place().fmt(f),
        }
    }
}

/// Has a folder asked by a thread that may wait: that of a volume may take its time.
async fn apart<T: Send + 'static>(
    folder: &Folder,
    ask: impl FnOnce(&Folder) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (asked, object) = (folder.clone(), folder.shown().to_owned());
    let answer = tokio::task::spawn_blocking(move || ask(&asked)).await;
    answer.unwrap_or_else(|error| Err(Error::Storage { operation: "ask", object, source: Box::new(error) }))
}

/// Opens a place in a storage.
///
/// # Errors
/// ENG-0510: no address of a storage, or nobody says who asks it.
pub fn bucket(address: &str, options: &Options) -> Result<Bucket> {
    let place = engram_objects::Place::parse(address).map_err(failed)?;
    Bucket::open(place, options).map_err(failed)
}

/// Puts a snapshot whose files lie in `folder` into a storage, its manifest last. `progress` hears of the bytes that are there.
///
/// # Errors
/// ENG-0510. What was put is removed then, as far as the storage lets it.
pub async fn upload(manifest: &mut Manifest, folder: &Path, to: &Bucket, mut progress: impl FnMut(u64)) -> Result<()> {
    let text = manifest.text()?;
    let files = || manifest.files.iter().map(|entry| entry.file.as_str());
    let put = async {
        let puts = files().map(|file| async move { to.put_file(file, &folder.join(file)).await });
        let mut puts = futures::stream::iter(puts).buffer_unordered(FILES_AT_ONCE);
        while let Some(bytes) = puts.try_next().await? {
            progress(bytes);
        }
        to.put(FILE_NAME, text.into_bytes()).await
    };
    if let Err(error) = put.await {
        // Without a manifest it is no snapshot; what stays is listed as unfinished.
        let removals = files().map(|file| to.remove(file));
        let _: Vec<_> = futures::stream::iter(removals).buffer_unordered(FILES_AT_ONCE).collect().await;
        return Err(failed(error));
    }
    Ok(())
}

/// Fetches the files of a snapshot into a folder. Whether they are right is for [`Manifest::verify`].
///
/// # Errors
/// ENG-0509 for a file that is not there or longer than it should be; ENG-0510.
pub async fn download(manifest: &Manifest, from: &Place, folder: &Path, mut progress: impl FnMut(u64)) -> Result<()> {
    let gets = manifest.files.iter().map(|entry| from.fetch(entry, folder));
    let mut gets = futures::stream::iter(gets).buffer_unordered(FILES_AT_ONCE);
    while let Some(bytes) = gets.try_next().await? {
        progress(bytes);
    }
    Ok(())
}

/// What went wrong with a storage, and why.
pub fn failed(error: Error) -> anyhow::Error {
    let mut message = String::new();
    for cause in anyhow::Error::new(error).chain() {
        let text = cause.to_string();
        if !message.contains(&text) {
            let between = if message.is_empty() { "" } else { ": " };
            message.extend([between, &text]);
        }
    }
    Problem::new(Code::StorageUnusable, without_markup(&message)).into()
}

/// A storage explains a refusal in XML: its code and message are for people, the rest is not.
fn without_markup(message: &str) -> String {
    let Some((before, document)) = message.split_once("<?xml").or_else(|| message.split_once("<Error")) else {
        return message.to_owned();
    };
    let of = |tag: &str| {
        let (_, rest) = document.split_once(&format!("<{tag}>"))?;
        rest.split_once(&format!("</{tag}>")).map(|(text, _)| text.trim())
    };
    let told: Vec<&str> = ["Code", "Message"].into_iter().filter_map(of).collect();
    format!("{}: {}", before.trim_end_matches([':', ' ']), told.join(": "))
}

#[cfg(test)]
mod tests {
    #[test]
    fn of_what_a_storage_says_its_code_and_message_are_told() {
        let said =
            "failed: 403: <?xml version=\"1.0\"?>\n<Error><Code>AccessDenied</Code><Message>No\n</Message></Error>";
        assert_eq!(super::without_markup(said), "failed: 403: AccessDenied: No");
        assert_eq!(super::without_markup("connection refused"), "connection refused");
    }
}
