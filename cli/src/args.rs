//! The command line: what every command understands, and the tree of commands.

use crate::commands::Command;
use crate::kubernetes;
use crate::output::{ColorChoice, Format, Output};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory as _, FromArgMatches as _, Parser};
use std::path::PathBuf;

/// A store for memories that learn: weights that fade with time and move with quality.
#[derive(Debug, Parser)]
#[command(
    name = "engram",
    version,
    arg_required_else_help = true,
    disable_help_subcommand = true,
    max_term_width = 120,
    before_help = "Examples:
  engram up cluster.yaml          start a local cluster and learn what the file says
  engram status                   is it fine?
  engram rank --limit 20          the memories of highest weight
  engram down                     stop the cluster; the data stays
  engram -n research status       the same of a cluster in Kubernetes; also as kubectl engram -n research status",
    after_help = "Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 not ready or out of time, 5 conflict, 6 unreachable, \
7 denied, 8 incompatible version, 130 interrupted."
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command understands.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// How to print results: a table on a terminal, tab-separated values in a pipe, unless said
    #[arg(short, long, value_name = "FORMAT", global = true, value_enum)]
    pub(crate) output: Option<Format>,
    /// When to use colour; NO_COLOR, CLICOLOR_FORCE and TERM=dumb are honoured
    #[arg(long, value_name = "WHEN", global = true, value_enum, default_value_t = ColorChoice::Auto)]
    pub(crate) color: ColorChoice,
    /// Print results and errors only
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    /// State directory of a local cluster
    #[arg(long, value_name = "DIR", global = true, env = "ENGRAM_STATE_DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Name of the cluster; needed where several run, or a namespace has several
    #[arg(long, value_name = "NAME", global = true, env = "ENGRAM_CLUSTER")]
    pub(crate) cluster: Option<String>,
    /// Workers to talk to, instead of a local cluster
    #[arg(
        long,
        alias = "server",
        value_name = "HOST:PORT,..",
        global = true,
        env = "ENGRAM_ADDRESS",
        value_delimiter = ','
    )]
    pub(crate) address: Vec<String>,
    #[command(flatten)]
    pub(crate) kubernetes: kubernetes::Asked,
}

/// The cluster that a command is about, for those where nothing else could stand in its place.
#[derive(Debug, Clone, Args)]
pub(crate) struct Named {
    /// Name of the cluster, as --cluster says it
    #[arg(value_name = "CLUSTER", conflicts_with = "cluster")]
    pub(crate) name: Option<String>,
}

/// What every command is given.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    /// How to print.
    pub(crate) output: Output,
    /// `--state-dir`.
    pub(crate) state_dir: Option<PathBuf>,
    /// `--cluster`.
    pub(crate) cluster: Option<String>,
    /// `--address`.
    pub(crate) address: Vec<String>,
    /// `--namespace` and the like, where the cluster is in Kubernetes. It comes before all the others.
    pub(crate) kubernetes: Option<kubernetes::Asked>,
}

impl Global {
    /// Looks at terminal and environment, once. As a plug-in of kubectl a cluster is in Kubernetes unless an address is given.
    pub(crate) fn context(self, is_plugin: bool) -> Context {
        let Self { output, color, quiet, state_dir, cluster, address, kubernetes } = self;
        let elsewhere = !address.is_empty() || state_dir.is_some();
        let kubernetes = (kubernetes.is_given() || is_plugin && !elsewhere).then_some(kubernetes);
        Context { output: Output::new(output, color, quiet), state_dir, cluster, address, kubernetes }
    }
}

impl Context {
    /// The same for the cluster of this name, where one was given.
    pub(crate) fn of(&self, named: &Named) -> Self {
        Self { cluster: named.name.clone().or_else(|| self.cluster.clone()), ..self.clone() }
    }
}

/// Options that name a cluster in Kubernetes, and options that name one elsewhere.
const PLACES: ([&str; 3], [&str; 2]) = (["namespace", "context", "kubeconfig"], ["address", "state_dir"]);

impl Arguments {
    /// Reads the command line; ends the process where it says nonsense, or names two places for one cluster.
    pub(crate) fn read() -> Self {
        let mut command = Self::command();
        let matches = command.get_matches_mut();
        if let Some(message) = contradiction(&command, &matches) {
            command.error(ErrorKind::ArgumentConflict, message).exit();
        }
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command).exit())
    }
}

/// What is wrong where both places were named on the command line. What the environment says gives way to an option.
fn contradiction(command: &clap::Command, matches: &ArgMatches) -> Option<String> {
    let given = |id: &&&str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let (in_kubernetes, elsewhere) = (PLACES.0.iter().find(given)?, PLACES.1.iter().find(given)?);
    let shown = |id: &str| command.get_arguments().find(|it| it.get_id() == id).map(ToString::to_string);
    let (a, b) = (shown(in_kubernetes)?, shown(elsewhere)?);
    Some(format!("'{a}' names a cluster in Kubernetes, and '{b}' one that is not reached through it: give one of them"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_places_for_one_cluster_are_refused_by_both_names() {
        let told = |words: &[&str]| {
            let mut command = Arguments::command();
            let matches = command.try_get_matches_from_mut(words).unwrap();
            contradiction(&command, &matches)
        };
        for words in [
            ["engram", "-n", "research", "status", "--address", "10.0.0.1:7443"],
            ["engram", "status", "--address", "10.0.0.1:7443", "-n", "research"],
        ] {
            let message = told(&words).unwrap();
            assert!(
                message.contains("--namespace <NAMESPACE>") && message.contains("--address <HOST:PORT,..>"),
                "{message}"
            );
        }
        assert!(told(&["engram", "--context", "lab", "--state-dir", "x", "status"]).is_some());
        for words in [["engram", "-n", "research", "status"], ["engram", "--address", "10.0.0.1:7443", "status"]] {
            assert_eq!(told(&words), None);
        }
    }

    #[test]
    fn the_tree_is_sound_and_every_command_shows_examples() {
        Arguments::command().debug_assert();
        fn walk(command: &clap::Command, path: &str) {
            for child in command.get_subcommands().filter(|child| !child.is_hide_set()) {
                let path = format!("{path} {}", child.get_name());
                if child.has_subcommands() {
                    walk(child, &path);
                } else {
                    let help = child.get_before_help().map(ToString::to_string).unwrap_or_default();
                    assert!(help.contains(&path), "{path} shows no example before its help");
                }
            }
        }
        walk(&Arguments::command(), "engram");
    }
}
