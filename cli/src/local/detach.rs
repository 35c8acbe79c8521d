//! `up -d`: runs the command as a background process in its own session. The background process closes its stderr when ready.

use super::state;
use anyhow::Context as _;
use engram_api::ExitCode;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;

/// Environment variable that marks the background process.
const VARIABLE: &str = "ENGRAM_UP_IN_BACKGROUND";

/// State of the background process.
pub(crate) enum Background {
    /// The cluster is ready; process id.
    Ready(u32),
    /// It exited, after printing the reason.
    Exited(ExitCode),
}

/// Whether this is the background process.
pub(crate) fn is_child() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Returns the signals that this process ignores, as a mask with bit 0 for signal 1; 0 where the system does not say.
pub(crate) fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    parse_ignored(&status)
}

fn parse_ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Closes the descriptors that the background process inherited, except for the standard streams: a lock or a pipe of the caller must
/// not be held until the cluster stops. Called before the process opens any.
pub(crate) fn close_inherited() {
    let descriptors: Vec<i32> = std::fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for descriptor in descriptors.into_iter().filter(|descriptor| *descriptor > 2) {
        // The descriptor of the listing itself is closed already.
        let _ = nix::unistd::close(descriptor);
    }
}

/// Starts the background process, forwards its stderr, and returns when it is ready or has exited.
///
/// # Errors
/// The process cannot be started.
pub(crate) async fn start() -> anyhow::Result<Background> {
    let program = std::env::current_exe().context("failed to locate this executable")?;
    let mut child = Command::new(program)
        .args(std::env::args_os().skip(1))
        .env(VARIABLE, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("failed to start the background process")?;
    let pid = child.id().context("the background process exited immediately")?;
    let mut stderr = child.stderr.take().context("the background process has no stderr")?;
    let mut buffer = [0; 4_096];
    loop {
        match stderr.read(&mut buffer).await.context("failed to read stderr of the background process")? {
            0 => break,
            // A closed stderr is no reason to fail.
            read => drop(std::io::stderr().write_all(&buffer[..read])),
        }
    }
    // stderr is closed: the process is ready, or has exited.
    let exited = tokio::time::timeout(std::time::Duration::from_millis(500), child.wait()).await;
    match exited {
        Err(_) => Ok(Background::Ready(pid)),
        Ok(status) => {
            let code = status.context("failed to wait for the background process")?.code().unwrap_or(1);
            let exit_code = ExitCode::ALL.into_iter().find(|it| i32::from(it.number()) == code);
            Ok(Background::Exited(exit_code.unwrap_or(ExitCode::Failed)))
        }
    }
}

/// Detaches from the terminal: starts a new session and redirects output to `logs/up.log`.
///
/// # Errors
/// The log cannot be opened.
pub(crate) fn leave_terminal(folder: &Path) -> anyhow::Result<()> {
    // Fails only for a process group leader, which has its own group already.
    let _ = nix::unistd::setsid();
    let path = state::log(folder, "up");
    let log = OpenOptions::new().create(true).append(true).open(&path);
    let log = log.with_context(|| format!("failed to open {}", path.display()))?;
    nix::unistd::dup2_stdout(&log).context("failed to redirect stdout")?;
    nix::unistd::dup2_stderr(&log).context("failed to redirect stderr")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_process_status() {
        let status = "Name:\tengram\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\nSigCgt:\t0\n";
        assert_eq!(parse_ignored(status), 0x1001);
        assert_eq!(parse_ignored(""), 0);
    }
}
