//! kubectl plug-in: `kubectl-engram` runs the commands, `kubectl_complete-engram` completes them.

use clap::Command;
use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

/// Role of this process, by the name of its executable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// `engram`.
    Engram,
    /// `kubectl engram`: commands default to a cluster in Kubernetes.
    Plugin,
    /// kubectl requests completions.
    Completion,
}

impl Role {
    /// Returns the role for `argv[0]`.
    pub(crate) fn of(name: Option<&OsStr>) -> Self {
        match name.and_then(|name| Path::new(name).file_name()).and_then(OsStr::to_str) {
            Some("kubectl-engram") => Self::Plugin,
            Some("kubectl_complete-engram") => Self::Completion,
            _ => Self::Engram,
        }
    }
}

/// Prints completions for the arguments of this process in the format of kubectl.
pub(crate) fn complete(root: &Command) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let completions = completions(root, &arguments);
    // A closed stdout is no reason to fail.
    let _ = io::stdout().lock().write_all(completions.as_bytes());
    ExitCode::SUCCESS
}

/// Returns candidates for the last argument, each with a description, and a directive to complete file names if there are none.
fn completions(root: &Command, arguments: &[String]) -> String {
    let (last, before) = arguments.split_last().map_or(("", arguments), |(last, before)| (last.as_str(), before));
    let mut command = root;
    for argument in before {
        command = command.find_subcommand(argument).unwrap_or(command);
    }
    let first_line =
        |text: Option<String>| text.and_then(|text| text.lines().next().map(str::to_owned)).unwrap_or_default();
    let mut lines = Vec::new();
    if last.starts_with('-') {
        let own = command.get_arguments();
        let global = root.get_arguments().filter(|option| option.is_global_set() && !std::ptr::eq(command, root));
        for option in own.chain(global).filter(|option| !option.is_hide_set()) {
            if let Some(long) = option.get_long() {
                lines.push((format!("--{long}"), first_line(option.get_help().map(ToString::to_string))));
            }
        }
    } else {
        for child in command.get_subcommands().filter(|child| !child.is_hide_set()) {
            lines.push((child.get_name().to_owned(), first_line(child.get_about().map(ToString::to_string))));
        }
    }
    lines.retain(|(candidate, _)| candidate.starts_with(last));
    lines.sort();
    lines.dedup();
    // Directives of Cobra, the library of kubectl: 0 falls back to file names, 4 does not.
    let directive = if lines.is_empty() { 0 } else { 4 };
    let lines: String = lines.iter().map(|(candidate, about)| format!("{candidate}\t{about}\n")).collect();
    format!("{lines}:{directive}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executable_name_decides_the_role() {
        let role = |name: &str| Role::of(Some(OsStr::new(name)));
        assert_eq!(role("/usr/local/bin/kubectl-engram"), Role::Plugin);
        assert_eq!(role("kubectl_complete-engram"), Role::Completion);
        assert_eq!(role("target/debug/engram"), Role::Engram);
        assert_eq!(Role::of(None), Role::Engram);
    }

    #[test]
    fn commands_and_options_are_completed() {
        let complete = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
            completions(&crate::command(), &arguments)
        };
        assert!(complete(&["sta"]).starts_with("status\tShow the health of a cluster"), "{}", complete(&["sta"]));
        assert!(complete(&["-n", "research", "partition", ""]).contains("force-promote\t"));
        let options = complete(&["rank", "--"]);
        assert!(options.contains("--limit\t") && options.contains("--namespace\t"), "{options}");
        assert!(!complete(&[""]).contains("coordinator\t"), "hidden commands are not offered");
        assert_eq!(complete(&["validate", "exam"]), ":0\n", "file names are");
    }
}
