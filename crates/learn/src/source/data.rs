//! Data files of runs that are split into tasks: small, and read as a whole.

use super::{EventsOptions, Origin, SourceError};
use std::io::{self, Read as _};
use std::path::Path;

/// Reads a file of at most `limit` bytes.
///
/// # Errors
/// The file cannot be read, is no regular file, leads out of its folder, or is longer.
pub fn read_data(path: &Path, origin: &Origin, limit: usize) -> Result<Vec<u8>, SourceError> {
    let read = || -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        EventsOptions::open_origin(origin, path)?.take(limit as u64 + 1).read_to_end(&mut content)?;
        if content.len() > limit {
            return Err(io::Error::other(format!("it is longer than {limit} bytes")));
        }
        Ok(content)
    };
    read().map_err(|error| SourceError::Unreadable { path: path.to_owned(), cause: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_folders_and_paths_out_of_a_volume_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.csv");
        std::fs::write(&file, "12345").unwrap();
        assert_eq!(read_data(&file, &Origin::Disk, 5).unwrap(), b"12345");
        let refused = |path: &Path, origin: &Origin| read_data(path, origin, 4).unwrap_err().to_string();
        assert!(refused(&file, &Origin::Disk).contains("longer than 4 bytes"));
        assert!(refused(folder.path(), &Origin::Disk).contains("it is a folder"));
        let volume = folder.path().join("volume");
        std::fs::create_dir(&volume).unwrap();
        let outside = volume.join("../a.csv");
        assert!(refused(&outside, &Origin::Folder(volume)).contains("leads out of"));
    }
}
