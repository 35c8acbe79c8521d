//! Status of the processes of a run of kind `Job`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::manifest_enum::words;

/// Processes of which a status has the last lines: a status is one small object.
pub const MAX_LOG_TAILS: usize = 32;
/// Maximum length of the last lines of a process, in bytes.
const LOG_TAIL_BYTES: usize = 2048;

words! {
    /// State of a process.
    #[derive(Default)]
    pub enum ProcessPhase {
        /// Not started, or waits to be started again.
        #[default]
        Pending,
        /// In progress.
        Running,
        /// Ended with exit code 0.
        Succeeded,
        /// Ended with another exit code or by a signal.
        Failed,
    }
}

/// Processes of a run of kind Job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct JobStatus {
    /// Processes in progress.
    pub active: i32,
    /// Indexes that have succeeded.
    pub succeeded: i32,
    /// Failures, those of processes that were started again included.
    pub failed: i32,
    /// The processes, by index.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["index"]), length(max = 1024))]
    pub processes: Vec<JobProcess>,
}

impl JobStatus {
    /// Describes the first process that failed, with its last line: `process 1 exited with code 3: no data`.
    pub fn first_failure(&self) -> Option<String> {
        let has_failed = |process: &&JobProcess| process.exit_code.is_some_and(|code| code != 0);
        let processes = || self.processes.iter();
        let is_final = |process: &&JobProcess| process.phase == ProcessPhase::Failed;
        let process = processes().filter(has_failed).find(is_final);
        let process = process.or_else(|| processes().find(has_failed)).or_else(|| processes().find(is_final))?;
        let line = process.log_tail.as_ref().and_then(|tail| tail.lines().last());
        let line = line.map_or_else(String::new, |line| format!(": {line}"));
        Some(format!("process {} {}{line}", process.index, process.end()))
    }
}

/// A process of a run of kind Job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobProcess {
    /// Index of the process, which it has as `ENGRAM_RANK`.
    pub index: u32,
    /// State.
    #[serde(default)]
    pub phase: ProcessPhase,
    /// How often it was started again.
    #[serde(default)]
    pub restarts: u32,
    /// Exit code of the last process of the index that ended; 128 plus the number of a signal that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Why it ended or does not start: `Error`, `OOMKilled`, `ImagePullBackOff`, ...
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub reason: Option<String>,
    /// Last lines that a failed process wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub log_tail: Option<String>,
}

impl JobProcess {
    /// Describes how it ended: `exited with code 3`.
    fn end(&self) -> String {
        match (self.exit_code, &self.reason) {
            (Some(code), _) if code > 128 => format!("was ended by signal {}", code - 128),
            (Some(code), _) => format!("exited with code {code}"),
            (None, Some(reason)) => format!("failed ({reason})"),
            (None, None) => "failed".into(),
        }
    }
}

/// Returns the last lines of a text, at most 2,048 bytes in whole characters, without the line break at the end.
pub fn log_tail(text: &str) -> String {
    let text = text.trim_end();
    let mut start = text.len().saturating_sub(LOG_TAIL_BYTES);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    text[start..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_process_its_end_and_its_last_line() {
        let process = |index, phase, exit_code, log_tail: Option<&str>| JobProcess {
            index,
            phase,
            exit_code,
            log_tail: log_tail.map(str::to_owned),
            ..JobProcess::default()
        };
        let restarted = process(0, ProcessPhase::Running, Some(1), None);
        let failed = process(1, ProcessPhase::Failed, Some(3), Some("a\nno data"));
        let status = |processes: &[JobProcess]| JobStatus { processes: processes.to_vec(), ..JobStatus::default() };
        let first = |processes: &[JobProcess]| status(processes).first_failure();
        assert_eq!(first(&[restarted.clone(), failed]).as_deref(), Some("process 1 exited with code 3: no data"));
        assert_eq!(first(&[restarted]).as_deref(), Some("process 0 exited with code 1"));
        let killed = process(2, ProcessPhase::Failed, Some(137), None);
        assert_eq!(first(&[killed]).as_deref(), Some("process 2 was ended by signal 9"));
        assert_eq!(first(&[process(0, ProcessPhase::Succeeded, Some(0), None)]), None);
    }

    #[test]
    fn a_tail_has_whole_characters() {
        let text = "ä".repeat(2000) + "\n";
        assert_eq!(log_tail(&text), "ä".repeat(1024));
        assert_eq!(log_tail("short\n"), "short");
    }
}
