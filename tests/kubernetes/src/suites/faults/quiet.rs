//! Quiet while a planned change is judged: on two cores, whoever computes beside a pod that starts holds up a write for longer than the
//! change does.

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, sync};

/// Names a process group that may be stopped for minutes, by whoever has something run beside these tests.
const GROUP: &str = "ENGRAM_BESIDE_GROUP";

/// Keeps that group stopped, if there is one.
pub(super) struct Quiet(Option<Pid>);

impl Quiet {
    /// # Errors
    /// The variable names no process group that may be stopped.
    pub(super) fn begin() -> Result<Self> {
        let stopped = Self(stop()?);
        // What anybody wrote last would go to the disk meanwhile, before what workers write.
        sync();
        Ok(stopped)
    }
}

/// Stops the group that is named, if there is one that is not done.
fn stop() -> Result<Option<Pid>> {
    let Ok(group) = std::env::var(GROUP) else { return Ok(None) };
    let named = || format!("{GROUP} is {group:?}; allowed: a process group of this user");
    // 0 and 1 would mean this program's own, and everybody.
    let number = group.parse().ok().filter(|&it: &i32| it > 1).map(Pid::from_raw).with_context(named)?;
    match killpg(number, Signal::SIGSTOP) {
        Ok(()) => Ok(Some(number)),
        // It is done with all that it had to do.
        Err(Errno::ESRCH) => Ok(None),
        Err(error) => Err(error).with_context(named),
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // Gone is as good.
            let _ = killpg(group, Signal::SIGCONT);
        }
    }
}
