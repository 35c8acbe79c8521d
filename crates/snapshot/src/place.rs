//! Where snapshots lie, one below another by name: in a folder, or in a storage for objects.

use super::manifest::{Entry, FILE_NAME, MAX_BYTES, Manifest, unusable};
use anyhow::{Context as _, Result};
use engram_api::{Code, Problem};
use engram_objects::{Bucket, Error, Options};
use futures::{StreamExt as _, TryStreamExt as _};
use std::fs;
use std::path::{Path, PathBuf};

/// Files that go up or come down at once.
const FILES_AT_ONCE: usize = 4;

/// Where snapshots lie.
#[derive(Debug)]
pub enum Place {
    /// In a folder of this machine.
    Folder(PathBuf),
    /// In a storage for objects.
    Objects(Bucket),
}

impl Place {
    /// The place of an address: `s3://bucket/prefix`, or the path of a folder.
    ///
    /// # Errors
    /// ENG-0510: no address of a storage, or nobody says who asks it.
    pub fn open(address: &str, options: &Options) -> Result<Self> {
        if !engram_objects::Place::is_meant(address) {
            let folder = std::path::absolute(address).with_context(|| format!("{address:?} is no path"))?;
            return Ok(Self::Folder(folder));
        }
        Ok(Self::Objects(bucket(address, options)?))
    }

    /// How messages name a snapshot here.
    pub fn shown(&self, name: &str) -> String {
        match self {
            Self::Folder(folder) => folder.join(name).display().to_string(),
            Self::Objects(bucket) => bucket.place().join(name).to_string(),
        }
    }

    /// The manifest of a snapshot, `None` where there is none or it was never finished.
    ///
    /// # Errors
    /// It is damaged or of another format; the storage does not answer.
    pub async fn manifest(&self, name: &str) -> Result<Option<Manifest>> {
        let bucket = match self {
            Self::Folder(folder) => return Manifest::read(&folder.join(name)),
            Self::Objects(bucket) => bucket.below(name),
        };
        fetch_manifest(&bucket).await
    }

    /// Names of what is here: snapshots, finished or not.
    ///
    /// # Errors
    /// It cannot be listed. A folder that is not there has none.
    pub async fn names(&self) -> Result<Vec<String>> {
        let folder = match self {
            Self::Folder(folder) => folder,
            Self::Objects(bucket) => return Ok(bucket.list().await.map_err(failed)?.1),
        };
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error).with_context(|| format!("failed to list {}", folder.display())),
        };
        let mut names = Vec::new();
        for entry in entries {
            names.extend(entry?.file_name().into_string().ok());
        }
        Ok(names)
    }

    /// Whether anything is here under a name.
    ///
    /// # Errors
    /// The storage does not answer.
    pub async fn is_taken(&self, name: &str) -> Result<bool> {
        match self {
            Self::Folder(folder) => Ok(folder.join(name).exists()),
            Self::Objects(bucket) => {
                let (objects, below) = bucket.below(name).list().await.map_err(failed)?;
                Ok(!objects.is_empty() || !below.is_empty())
            }
        }
    }
}

/// Opens a place in a storage.
///
/// # Errors
/// ENG-0510: no address of a storage, or nobody says who asks it.
pub fn bucket(address: &str, options: &Options) -> Result<Bucket> {
    let place = engram_objects::Place::parse(address).map_err(failed)?;
    Bucket::open(place, options).map_err(failed)
}

/// The manifest of the snapshot at a place of a storage, `None` where there is none or it was never finished.
///
/// # Errors
/// It is damaged or of another format; the storage does not answer.
pub async fn fetch_manifest(from: &Bucket) -> Result<Option<Manifest>> {
    let bytes = from.get(FILE_NAME, MAX_BYTES).await.map_err(failed)?;
    let parse = |bytes: Vec<u8>| Manifest::parse(&bytes, from.place().join(FILE_NAME));
    Ok(bytes.map(parse).transpose()?)
}

/// Fetches one file of a snapshot into a folder. Whether it is right is for [`Manifest::verify_file`].
///
/// # Errors
/// ENG-0509 for a file that is not there or longer than it should be; ENG-0510.
pub async fn fetch_file(entry: &Entry, from: &Bucket, folder: &Path) -> Result<u64> {
    let wrong = |what: &str| unusable(from.place().join(&entry.file), what);
    // It becomes a path of this machine.
    let Some((below, _)) = entry.place() else {
        let what = format!("names a file {:?}, which is no snapshot file", entry.file);
        return Err(unusable(from.place(), what).into());
    };
    if let Some(below) = below {
        fs::create_dir_all(folder.join(below)).with_context(|| format!("failed to make {}", folder.display()))?;
    }
    let got = from.get_file(&entry.file, &folder.join(&entry.file), entry.bytes).await;
    got.map_err(|error| match error {
        Error::NotFound { .. } => wrong("is not there").into(),
        Error::TooLong { .. } => wrong("is damaged: it is longer than its manifest says").into(),
        error => failed(error),
    })
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
pub async fn download(manifest: &Manifest, from: &Bucket, folder: &Path, mut progress: impl FnMut(u64)) -> Result<()> {
    let gets = manifest.files.iter().map(|entry| fetch_file(entry, from, folder));
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
