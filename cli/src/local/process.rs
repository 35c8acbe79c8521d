//! Operating system processes, identified by process id and start time, because ids are reused.

use serde::{Deserialize, Serialize};

/// A local process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Process {
    /// Process id.
    pub(crate) pid: u32,
    /// Start time in clock ticks since boot; 0 if unknown.
    pub(crate) started: u64,
}

impl Process {
    /// Returns the process that has this id.
    pub(crate) fn of(pid: u32) -> Self {
        Self { pid, started: stat(pid).map_or(0, |stat| stat.started) }
    }

    /// Returns this process.
    pub(crate) fn this() -> Self {
        Self::of(std::process::id())
    }

    /// Whether the process is running; zombies are not.
    pub(crate) fn is_alive(self) -> bool {
        match stat(self.pid) {
            Some(stat) => stat.started == self.started && !matches!(stat.state, 'Z' | 'X'),
            None if cfg!(target_os = "linux") => false,
            None => i32::try_from(self.pid)
                .is_ok_and(|pid| nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None).is_ok()),
        }
    }

    /// Sends a signal if the process is running.
    pub(crate) fn signal(self, signal: nix::sys::signal::Signal) -> bool {
        let Ok(pid) = i32::try_from(self.pid) else { return false };
        self.is_alive() && nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).is_ok()
    }

    /// Returns the resident memory in bytes.
    pub(crate) fn resident_bytes(self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
    }

    /// Returns the seconds since the start.
    pub(crate) fn uptime_seconds(self) -> Option<f64> {
        /// USER_HZ, which Linux reports to programs independently of its own clock.
        const TICKS_PER_SECOND: f64 = 100.0;
        let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
        let now: f64 = uptime.split_whitespace().next()?.parse().ok()?;
        Some((now - self.started as f64 / TICKS_PER_SECOND).max(0.0))
    }
}

struct Stat {
    state: char,
    started: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may contain parentheses.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    // The state is the third field; the start is the 22nd.
    Some(Stat { state, started: fields.nth(18)?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_with_a_reused_id_are_distinguished() {
        let this = Process::this();
        assert!(this.is_alive() && this.resident_bytes().is_some_and(|bytes| bytes > 0));
        assert!(!Process { started: this.started + 1, ..this }.is_alive());
        assert!(this.uptime_seconds().is_some_and(|seconds| seconds < 86_400.0));
    }
}
