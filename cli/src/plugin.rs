//! Names under which kubectl finds this command: `kubectl-engram` is its plug-in, `kubectl_complete-engram` completes for it.

use crate::args::Arguments;
use clap::{Command, CommandFactory as _};
use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

/// What this process is, by the name that it was started under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// `engram`.
    Engram,
    /// `kubectl engram`: the same commands, about a cluster in Kubernetes.
    Plugin,
    /// kubectl asks how a line may go on.
    Completion,
}

impl Role {
    /// By the first argument of a process.
    pub(crate) fn of(name: Option<&OsStr>) -> Self {
        match name.and_then(|name| Path::new(name).file_name()).and_then(OsStr::to_str) {
            Some("kubectl-engram") => Self::Plugin,
            Some("kubectl_complete-engram") => Self::Completion,
            _ => Self::Engram,
        }
    }
}

/// Prints how the line of the arguments may go on, as kubectl wants it.
pub(crate) fn complete() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let answer = answer(&Arguments::command(), &words);
    // Nobody listens on a closed stdout.
    let _ = io::stdout().lock().write_all(answer.as_bytes());
    ExitCode::SUCCESS
}

/// Candidates for the last word, each with what it is for, and the order to complete file names where there are none.
fn answer(root: &Command, words: &[String]) -> String {
    let (last, before) = words.split_last().map_or(("", words), |(last, before)| (last.as_str(), before));
    let mut command = root;
    for word in before {
        command = command.find_subcommand(word).unwrap_or(command);
    }
    let first_line =
        |text: Option<String>| text.and_then(|text| text.lines().next().map(str::to_owned)).unwrap_or_default();
    let mut lines = Vec::new();
    if last.starts_with('-') {
        // What holds for every command is the root's.
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
    lines.retain(|(word, _)| word.starts_with(last));
    lines.sort();
    lines.dedup();
    // The directives of Cobra, kubectl's library: 0 completes file names where nothing was offered, 4 does not.
    let directive = if lines.is_empty() { 0 } else { 4 };
    let lines: String = lines.iter().map(|(word, about)| format!("{word}\t{about}\n")).collect();
    format!("{lines}:{directive}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_decides_what_the_command_is() {
        let role = |name: &str| Role::of(Some(OsStr::new(name)));
        assert_eq!(role("/usr/local/bin/kubectl-engram"), Role::Plugin);
        assert_eq!(role("kubectl_complete-engram"), Role::Completion);
        assert_eq!(role("target/debug/engram"), Role::Engram);
        assert_eq!(Role::of(None), Role::Engram);
    }

    #[test]
    fn a_line_is_completed_with_commands_and_options() {
        let answer = |words: &[&str]| {
            answer(&Arguments::command(), &words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>())
        };
        assert!(answer(&["sta"]).starts_with("status\tShow whether a cluster is fine"), "{}", answer(&["sta"]));
        assert!(answer(&["-n", "research", "partition", ""]).contains("force-promote\t"));
        let options = answer(&["rank", "--"]);
        assert!(options.contains("--limit\t") && options.contains("--namespace\t"), "{options}");
        assert!(!answer(&[""]).contains("coordinator\t"), "what is hidden is not offered");
        assert_eq!(answer(&["validate", "exam"]), ":0\n", "files may be");
    }
}
