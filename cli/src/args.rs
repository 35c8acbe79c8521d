//! The grammar of the command line.

use crate::commands::Command;
use crate::context::{CLUSTER_ARGUMENT, GlobalOptions};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser};
use std::ffi::{OsStr, OsString};

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
    /// Name of the command, for its trace.
    #[arg(skip)]
    pub(crate) name: String,
}

/// Options that select a cluster in Kubernetes.
const IN_KUBERNETES: [&str; 3] = ["namespace", "context", "kubeconfig"];
/// Options that select a cluster outside of Kubernetes.
const OUTSIDE: [&str; 2] = ["address", "state_dir"];
/// Options that name a cluster, locally or in Kubernetes.
const BY_NAME: [&str; 2] = ["cluster", CLUSTER_ARGUMENT];

impl Arguments {
    /// Parses the command line. Exits the process on a usage error.
    pub(crate) fn read() -> Self {
        let mut command = ignore_empty_variables(Self::command(), |name| std::env::var_os(name));
        let matches = command.get_matches_mut();
        if let Some(message) = conflict(&command, &matches) {
            command.error(ErrorKind::ArgumentConflict, message).exit();
        }
        let mut arguments = Self::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command).exit());
        if let Some((name, _)) = arguments.command.local_only()
            && is_option(&matches, "address")
        {
            let message = format!("engram {name} works on local clusters only and cannot be used with '--address'");
            command.error(ErrorKind::ArgumentConflict, message).exit();
        }
        arguments.global.override_environment(|id| is_option(&matches, id));
        arguments.name = format!("engram {}", matches.subcommand_name().unwrap_or_default());
        arguments
    }
}

/// Returns the grammar without the environment variables that are empty: they count as unset.
fn ignore_empty_variables(command: clap::Command, variable: impl Fn(&OsStr) -> Option<OsString>) -> clap::Command {
    command.mut_args(|argument| match argument.get_env().and_then(&variable) {
        Some(value) if value.is_empty() => argument.env(None),
        _ => argument,
    })
}

/// Returns whether an argument is on the command line, of the command or of the subcommand.
fn is_option(matches: &ArgMatches, id: &str) -> bool {
    let is_here = matches.try_contains_id(id).is_ok() && matches.value_source(id) == Some(ValueSource::CommandLine);
    is_here || matches.subcommand().is_some_and(|(_, matches)| is_option(matches, id))
}

/// Returns why options contradict each other. Options on the command line override environment variables, so only options on the
/// command line conflict.
fn conflict(command: &clap::Command, matches: &ArgMatches) -> Option<String> {
    let is_set = |id: &&&str| is_option(matches, id);
    if is_set(&&"token_file") && is_set(&&"address") && !is_set(&&"certificate_authority") {
        let message = "'--token-file <FILE>' with '--address' requires '--certificate-authority <FILE>': \
                       a token is never sent over a plaintext connection";
        return Some(message.to_owned());
    }
    let usage = |id: &str| {
        let option = command.get_arguments().find(|it| it.get_id() == id).map(ToString::to_string);
        option.unwrap_or_else(|| "[CLUSTER]".to_owned())
    };
    let outside: Vec<&str> = OUTSIDE.iter().chain(&BY_NAME).filter(is_set).copied().collect();
    if let (Some(kubernetes), Some(other)) = (IN_KUBERNETES.iter().find(is_set), OUTSIDE.iter().find(is_set)) {
        let (kubernetes, other) = (usage(kubernetes), usage(other));
        return Some(format!("'{kubernetes}' selects a cluster in Kubernetes and cannot be used with '{other}'"));
    }
    let [first, second, ..] = outside[..] else { return None };
    Some(format!("'{}' and '{}' both select a cluster; give one of them", usage(first), usage(second)))
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
    fn options_override_the_environment_and_contradictions_are_rejected() {
        let parse = |arguments: &[&str], variables: &[(&str, &'static str)]| {
            let set = |name: &OsStr| variables.iter().find(|(key, _)| name == *key).map(|(_, value)| *value);
            // The process environment is shared by all tests: defaults stand for variables, with the same precedence.
            let mut command = ignore_empty_variables(Arguments::command(), |name| set(name).map(OsString::from))
                .mut_args(|argument| match argument.get_env().and_then(set) {
                    Some(value) => argument.env(None::<&str>).default_value(value),
                    None => argument.env(None::<&str>),
                });
            let matches = command.try_get_matches_from_mut(arguments).unwrap();
            let mut parsed = Arguments::from_arg_matches(&matches).unwrap();
            parsed.global.override_environment(|id| is_option(&matches, id));
            (conflict(&command, &matches), parsed.global)
        };
        let environment = [("ENGRAM_ADDRESS", "a:1"), ("ENGRAM_STATE_DIR", "env"), ("ENGRAM_CLUSTER", "named")];
        let (_, from_option) = parse(&["engram", "status", "--state-dir", "x"], &environment);
        assert_eq!((from_option.address.len(), from_option.state_dir), (0, Some("x".into())));
        assert_eq!(from_option.cluster, None);
        for arguments in [&["engram", "status", "words"][..], &["engram", "--cluster", "words", "status"]] {
            let (conflict, global) = parse(arguments, &environment);
            assert_eq!((conflict, global.address.len(), global.state_dir), (None, 0, None), "{arguments:?}");
        }
        assert_eq!(from_option.selection, " --state-dir x");
        let (_, spaced) = parse(&["engram", "status", "--state-dir", "a b'c"], &environment);
        assert_eq!(spaced.selection, r" --state-dir 'a b'\''c'");
        let (_, in_kubernetes) = parse(&["engram", "-n", "lab", "status"], &environment);
        assert_eq!((in_kubernetes.address.len(), in_kubernetes.cluster.as_deref()), (0, Some("named")));
        let (_, from_environment) = parse(&["engram", "status"], &environment[..1]);
        assert_eq!((from_environment.address, from_environment.selection), (vec!["a:1".to_owned()], String::new()));
        let empty = environment.map(|(name, _)| (name, ""));
        let (_, unset) = parse(&["engram", "status"], &empty);
        assert_eq!((unset.address.len(), unset.state_dir, unset.cluster), (0, None, None));
        for contradiction in [
            &["engram", "status", "--address", "a:1", "--state-dir", "x"][..],
            &["engram", "status", "--address", "a:1", "--cluster", "x"],
            &["engram", "status", "x", "--state-dir", "y"],
            &["engram", "status", "x", "--cluster", "y"],
        ] {
            let message = parse(contradiction, &[]).0.unwrap();
            assert!(message.contains("both select a cluster"), "{message}");
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
