//! Which files of this machine clients of a local cluster may name.
//!
//! A path is opened with the rights of the cluster's owner, so it is accepted from the owner, who proves it with a key that only the
//! owner can read, and from others below folders that the owner allowed. Clusters in pods have no such files.

use crate::options::LocalFiles;
use engram_proto::v1::{Problem, ProblemKind};
use std::path::{Component, Path, PathBuf};

/// File systems of the kernel: their files are secrets of processes, devices, or endless.
const KERNEL_FOLDERS: [&str; 3] = ["/proc", "/dev", "/sys"];
/// Longer paths are shortened in messages.
const MAX_SHOWN_CHARS: usize = 120;

/// Checks a path that a client named in `field`. Returns where it leads, symbolic links resolved.
///
/// # Errors
/// [`ProblemKind::Invalid`]: the field, the path and what is allowed.
pub(crate) fn check(files: Option<&LocalFiles>, field: &str, path: &str, owner_key: &str) -> Result<PathBuf, Problem> {
    let refused = |allowed: &str| {
        let shown: String = path.chars().take(MAX_SHOWN_CHARS).collect();
        let dots = if shown.len() < path.len() { "..." } else { "" };
        Problem::of(ProblemKind::Invalid, format!("{field}: {shown:?}{dots} is not allowed; allowed: {allowed}"))
    };
    let Some(files) = files else {
        return Err(refused("none in this cluster: name object storage or a volume of the cluster instead"));
    };
    let path = Path::new(path);
    if !path.is_absolute() {
        return Err(refused("an absolute path"));
    }
    let resolved = resolve(path);
    if resolved.components().any(|part| part == Component::ParentDir) {
        return Err(refused("an absolute path, or one with .. whose folders exist"));
    }
    if KERNEL_FOLDERS.iter().any(|folder| path.starts_with(folder) || resolved.starts_with(folder)) {
        return Err(refused("files outside /proc, /dev and /sys"));
    }
    let is_allowed = |folder: &PathBuf| resolved.starts_with(folder.canonicalize().as_ref().unwrap_or(folder));
    if is_owner(files, owner_key) || files.folders.iter().any(is_allowed) {
        return Ok(resolved);
    }
    Err(refused(
        "a file in a folder of `engram up --allow-folder`, or a client that uses the cluster's state directory (--state-dir)",
    ))
}

/// Checks a folder for a snapshot, which may also not contain or be in the worker's own state directory.
///
/// # Errors
/// As [`check`].
pub(crate) fn check_snapshot_folder(
    files: Option<&LocalFiles>,
    state_dir: &Path,
    folder: &str,
    owner_key: &str,
) -> Result<PathBuf, Problem> {
    let resolved = check(files, "folder", folder, owner_key)?;
    let own = state_dir.canonicalize().unwrap_or_else(|_| state_dir.to_owned());
    if resolved.starts_with(&own) || own.starts_with(&resolved) {
        let text = format!("folder: {folder:?} is not allowed; allowed: a folder apart from the state of the worker");
        return Err(Problem::of(ProblemKind::Invalid, text));
    }
    Ok(resolved)
}

fn is_owner(files: &LocalFiles, key: &str) -> bool {
    let expected = std::fs::read_to_string(&files.owner_key).unwrap_or_default();
    let (expected, key) = (expected.trim().as_bytes(), key.as_bytes());
    // Independent of the position of the first difference.
    let difference = expected.iter().zip(key).fold(0, |all, (left, right)| all | (left ^ right));
    !expected.is_empty() && expected.len() == key.len() && difference == 0
}

/// Resolves the symbolic links of the part of a path that exists.
fn resolve(path: &Path) -> PathBuf {
    let existing = path.ancestors().find_map(|part| Some((part, part.canonicalize().ok()?)));
    let Some((part, resolved)) = existing else { return path.to_owned() };
    match path.strip_prefix(part) {
        Ok(rest) if rest.as_os_str().is_empty() => resolved,
        Ok(rest) => resolved.join(rest),
        Err(_) => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_names_files_only_where_the_owner_allowed_it() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name).display().to_string();
        std::fs::create_dir_all(at("data/deep")).unwrap();
        std::fs::create_dir_all(at("state")).unwrap();
        std::fs::write(at("key"), "k3y\n").unwrap();
        std::fs::write(at("secret.csv"), "").unwrap();
        std::os::unix::fs::symlink(at("secret.csv"), at("data/link.csv")).unwrap();
        std::os::unix::fs::symlink("/proc/self/environ", at("data/proc.csv")).unwrap();
        let files = LocalFiles { owner_key: at("key").into(), folders: vec![at("data").into()] };
        let verdict = |path: &str, key: &str| check(Some(&files), "path", path, key).is_ok();
        assert!(verdict(&at("data/a.csv"), "") && verdict(&at("data/deep/new/a.csv"), ""));
        for path in [at("secret.csv"), at("data/link.csv"), at("data/../secret.csv"), "/etc/shadow".into()] {
            assert!(!verdict(&path, "") && !verdict(&path, "k3"), "{path}");
        }
        assert!(verdict(&at("secret.csv"), "k3y") && verdict(&at("data/link.csv"), "k3y"));
        for path in ["/proc/self/environ", "/dev/zero", "/sys/kernel", &at("data/proc.csv"), "relative.csv", ""] {
            assert!(!verdict(path, "k3y"), "{path}");
        }
        assert!(check(None, "path", &at("data/a.csv"), "k3y").is_err());
        let keyless = LocalFiles { owner_key: at("absent").into(), folders: Vec::new() };
        assert!(check(Some(&keyless), "path", &at("data/a.csv"), "").is_err());
        let state = home.path().join("state");
        let snapshot = |folder: &str| check_snapshot_folder(Some(&files), &state, folder, "k3y");
        assert!(snapshot(&at("data/monday")).is_ok());
        for folder in [at("state"), at("state/wal"), home.path().display().to_string(), "/proc/x".into()] {
            assert!(snapshot(&folder).is_err(), "{folder}");
        }
        let long = check(Some(&files), "path", &format!("/{}", "x".repeat(4_000)), "").unwrap_err().message;
        assert!(long.len() < 400, "{long}");
    }
}
