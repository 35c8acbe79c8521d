//! Runs Python programs where the repository is not visible, as on a machine that has never seen it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::{process, workspace};

/// Names of the arguments: environment, `engram` program or nothing, repository, folder, example.
const SCRIPT: &str = r#"
mount --bind "$1" "$4/environment"
if [ -n "$2" ]; then
    mount --bind "$2" "$4/engram"
    export ENGRAM_BIN="$4/engram"
fi
mount -t tmpfs tmpfs "$3"
cd "$4"
exec "$4/environment/bin/python" "$5"
"#;
/// Longest time that a probe of namespaces may take.
const PROBE: Duration = Duration::from_secs(10);

/// A folder outside the repository with copies of what runs, removed at the end.
pub(super) struct Hidden {
    folder: PathBuf,
    unshare: Vec<&'static str>,
}

impl Hidden {
    /// Creates the folder; `None` where this user can't have a mount namespace.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub(super) fn new() -> Result<Option<Self>> {
        let namespaces = [vec!["--mount"], vec!["--map-root-user", "--mount"]];
        let works = |arguments: &Vec<&str>| {
            let mut probe = Command::new("unshare");
            probe.args(arguments).args(["mount", "-t", "tmpfs", "tmpfs", "/mnt"]);
            process::capture_within(&mut probe, PROBE).is_ok_and(|output| output.status.success())
        };
        let Some(unshare) = namespaces.into_iter().find(works) else { return Ok(None) };
        let folder = std::env::temp_dir().join(format!("engram-examples-{}", std::process::id()));
        fs::create_dir_all(folder.join("environment"))
            .with_context(|| format!("failed to create {}", folder.display()))?;
        fs::write(folder.join("engram"), "").context("failed to create the place of the engram program")?;
        Ok(Some(Self { folder, unshare }))
    }

    /// Runs an example with the Python of an environment. `program` is `engram`; `None` is the one of the wheel.
    ///
    /// # Errors
    /// The example cannot be copied, or fails.
    pub(super) fn run(&self, python: &Path, program: Option<&Path>, example: &Path) -> Result<()> {
        let name = example.file_name().context("an example is a file")?;
        fs::copy(example, self.folder.join(name)).with_context(|| format!("failed to copy {}", example.display()))?;
        let environment = python.parent().and_then(Path::parent).context("python is in an environment")?;
        let mut command = Command::new("unshare");
        command.args(&self.unshare).args(["sh", "-euc", SCRIPT, "sh"]).arg(environment);
        command.arg(program.unwrap_or(Path::new(""))).arg(workspace::root()).arg(&self.folder).arg(name);
        command.env_remove("ENGRAM_BIN").env_remove("CARGO_MANIFEST_DIR");
        process::run(&mut command)
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            eprintln!("failed to remove {}: {error}", self.folder.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn example_runs_where_the_repository_is_not_visible() {
        let Some(hidden) = Hidden::new().unwrap() else {
            eprintln!("skipped: this user can't have a mount namespace");
            return;
        };
        let environment = hidden.folder.with_extension("environment");
        fs::create_dir_all(environment.join("bin")).unwrap();
        let python = environment.join("bin/python");
        // In place of Python: a shell, which runs the example as a script.
        std::os::unix::fs::symlink("/bin/sh", &python).unwrap();
        let example = environment.join("example.sh");
        let manifest = workspace::root().join("Cargo.toml");
        let write = |condition: &str| {
            let text = format!("test {condition} -e {} && test -s \"$ENGRAM_BIN\"\n", manifest.display());
            fs::write(&example, text).unwrap();
        };
        write("!");
        hidden.run(&python, Some(Path::new("/bin/sh")), &example).unwrap();
        write("");
        hidden.run(&python, Some(Path::new("/bin/sh")), &example).unwrap_err();
        assert!(manifest.exists(), "only the example does not see it");
        fs::remove_dir_all(environment).unwrap();
    }
}
