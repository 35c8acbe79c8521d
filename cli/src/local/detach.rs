//! `up -d`: a copy of the command in a session of its own, that says with the end of its stderr that it has settled.

use super::state;
use anyhow::Context as _;
use engram_api::ExitCode;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;

/// Set for the copy that runs in the background.
const VARIABLE: &str = "ENGRAM_UP_IN_BACKGROUND";

/// What became of the copy.
pub(crate) enum Started {
    /// It serves; its process id.
    Ready(u32),
    /// It ended, having said why.
    Ended(ExitCode),
}

/// Whether this is the copy.
pub(crate) fn is_child() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Starts the copy, passes on what it says, and returns when it serves or has ended. It looks after its own deadlines.
///
/// # Errors
/// It cannot be started.
pub(crate) async fn start() -> anyhow::Result<Started> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let mut child = Command::new(program)
        .args(std::env::args_os().skip(1))
        .env(VARIABLE, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("failed to start a copy of this program")?;
    let pid = child.id().context("the copy ended at once")?;
    let mut said = child.stderr.take().context("the copy has no stderr")?;
    let mut buffer = [0; 4_096];
    loop {
        match said.read(&mut buffer).await.context("failed to listen to the copy")? {
            0 => break,
            // Nobody listens on a closed stderr, and that is no reason to lose sight of the copy.
            read => drop(std::io::stderr().write_all(&buffer[..read])),
        }
    }
    // Its stderr has ended: it has settled, or it has ended, which takes no time to see.
    let ended = tokio::time::timeout(std::time::Duration::from_millis(500), child.wait()).await;
    match ended {
        Err(_) => Ok(Started::Ready(pid)),
        Ok(status) => {
            let code = status.context("failed to wait for the copy")?.code().unwrap_or(1);
            let known = ExitCode::ALL.into_iter().find(|known| i32::from(known.number()) == code);
            Ok(Started::Ended(known.unwrap_or(ExitCode::Failed)))
        }
    }
}

/// Leaves the terminal: from here on this process is in a session of its own, and says what it says to `logs/up.log`.
///
/// # Errors
/// The log cannot be opened.
pub(crate) fn settle(folder: &Path) -> anyhow::Result<()> {
    // It fails for the leader of a group, which this process is not unless somebody made it one; then it has its session.
    let _ = nix::unistd::setsid();
    let path = state::log(folder, "up");
    let log = OpenOptions::new().create(true).append(true).open(&path);
    let log = log.with_context(|| format!("failed to open {}", path.display()))?;
    nix::unistd::dup2_stdout(&log).context("failed to redirect stdout")?;
    nix::unistd::dup2_stderr(&log).context("failed to redirect stderr")?;
    Ok(())
}
