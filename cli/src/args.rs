//! The grammar of the command line.

use crate::commands::Command;
use crate::context::GlobalOptions;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser};

/// Replicated, GPU-accelerated learning memory: weights decay over time and are reinforced by feedback
#[derive(Debug, Parser)]
#[command(
    name = "engram",
    version,
    arg_required_else_help = true,
    disable_help_subcommand = true,
    max_term_width = 120,
    before_help = "Examples:
  engram up cluster.yaml          start a local cluster and execute the runs of the manifest
  engram status                   show the health of the cluster
  engram rank --limit 20          list the memories with the highest weight
  engram down                     stop the cluster and keep its data
  engram -n research status       show the health of a cluster in Kubernetes; also: kubectl engram -n research status",
    after_help = "Exit codes: 0 success, 1 failure, 2 usage error, 3 not found, 4 not ready or timed out, 5 conflict, \
6 unreachable, 7 permission denied, 8 incompatible version, 130 interrupted."
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: GlobalOptions,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options that select a cluster in Kubernetes, and options that select one outside of it.
const SELECTORS: ([&str; 3], [&str; 2]) = (["namespace", "context", "kubeconfig"], ["address", "state_dir"]);

impl Arguments {
    /// Parses the command line. Exits the process on a usage error.
    pub(crate) fn read() -> Self {
        let mut command = Self::command();
        let matches = command.get_matches_mut();
        if let Some(message) = conflict(&command, &matches) {
            command.error(ErrorKind::ArgumentConflict, message).exit();
        }
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command).exit())
    }
}

/// Returns why global options contradict each other. Options on the command line override environment variables, so only
/// options on the command line conflict.
fn conflict(command: &clap::Command, matches: &ArgMatches) -> Option<String> {
    let is_set = |id: &&&str| matches.value_source(id) == Some(ValueSource::CommandLine);
    if is_set(&&"token_file") && is_set(&&"address") && !is_set(&&"certificate_authority") {
        let message = "'--token-file <FILE>' with '--address' requires '--certificate-authority <FILE>': \
                       a token is never sent over a plaintext connection";
        return Some(message.to_owned());
    }
    let (in_kubernetes, outside) = (SELECTORS.0.iter().find(is_set)?, SELECTORS.1.iter().find(is_set)?);
    let usage = |id: &str| command.get_arguments().find(|it| it.get_id() == id).map(ToString::to_string);
    let (kubernetes, other) = (usage(in_kubernetes)?, usage(outside)?);
    Some(format!("'{kubernetes}' selects a cluster in Kubernetes and cannot be used with '{other}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicting_cluster_selectors_are_rejected_by_name() {
        let check = |arguments: &[&str]| {
            let mut command = Arguments::command();
            let matches = command.try_get_matches_from_mut(arguments).unwrap();
            conflict(&command, &matches)
        };
        for arguments in [
            ["engram", "-n", "research", "status", "--address", "10.0.0.1:7443"],
            ["engram", "status", "--address", "10.0.0.1:7443", "-n", "research"],
        ] {
            let message = check(&arguments).unwrap();
            assert!(
                message.contains("--namespace <NAMESPACE>") && message.contains("--address <HOST:PORT,..>"),
                "{message}"
            );
        }
        assert!(check(&["engram", "--context", "lab", "--state-dir", "x", "status"]).is_some());
        let token = check(&["engram", "--address", "10.0.0.1:7443", "--token-file", "t", "status"]).unwrap();
        assert!(token.contains("--certificate-authority"), "{token}");
        let address = "10.0.0.1:7443";
        let with_ca = ["engram", "--address", address, "--token-file", "t", "--certificate-authority", "c", "status"];
        assert_eq!(check(&with_ca), None);
        for arguments in [["engram", "-n", "research", "status"], ["engram", "--address", address, "status"]] {
            assert_eq!(check(&arguments), None);
        }
    }

    #[test]
    fn every_command_has_examples() {
        Arguments::command().debug_assert();
        fn walk(command: &clap::Command, path: &str) {
            for child in command.get_subcommands().filter(|child| !child.is_hide_set()) {
                let path = format!("{path} {}", child.get_name());
                if child.has_subcommands() {
                    walk(child, &path);
                } else {
                    let help = child.get_before_help().map(ToString::to_string).unwrap_or_default();
                    assert!(help.contains(&path), "{path} has no example in its help");
                }
            }
        }
        walk(&Arguments::command(), "engram");
    }
}
