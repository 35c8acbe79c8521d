//! The command line: what every command understands, and the tree of commands.

use crate::commands::Command;
use crate::kubernetes;
use crate::output::{ColorChoice, Format, Output};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory as _, FromArgMatches as _, Parser};
use engram_identity::Files;
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
    /// With --address: the authority that signed the workers' certificates, as PEM; turns TLS on
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) ca: Option<PathBuf>,
    /// With --ca: your certificate, as PEM
    #[arg(long, value_name = "FILE", global = true, requires = "ca")]
    pub(crate) cert: Option<PathBuf>,
    /// With --ca: the key of your certificate, as PEM [default: in the file of --cert]
    #[arg(long, value_name = "FILE", global = true, requires = "cert")]
    pub(crate) cert_key: Option<PathBuf>,
    /// With --ca, or in Kubernetes: a token of a service account for this cluster, instead of a certificate; read again when it changes
    #[arg(long, value_name = "FILE", global = true, env = "ENGRAM_TOKEN_FILE")]
    pub(crate) token_file: Option<PathBuf>,
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

/// What a caller shows, and whom it believes, under TLS.
#[derive(Debug, Clone)]
pub(crate) enum Credentials {
    /// A certificate.
    Certificate(Files),
    /// A token, which is shown to whom `authority` signed.
    Token { authority: PathBuf, token: PathBuf },
    /// Neither.
    Nothing,
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
    /// `--ca` and what goes with it.
    pub(crate) credentials: Option<Credentials>,
    /// `--token-file`.
    pub(crate) token_file: Option<PathBuf>,
    /// `--namespace` and the like, where the cluster is in Kubernetes. It comes before all the others.
    pub(crate) kubernetes: Option<kubernetes::Asked>,
}

impl Global {
    /// Looks at terminal and environment, once. As a plug-in of kubectl a cluster is in Kubernetes unless an address is given.
    pub(crate) fn context(self, is_plugin: bool) -> Context {
        let Self { output, color, quiet, state_dir, cluster, address, ca, cert, cert_key, token_file, kubernetes } =
            self;
        let credentials = ca.map(|authority| match (cert, &token_file) {
            (Some(certificate), _) => {
                let key = cert_key.unwrap_or_else(|| certificate.clone());
                Credentials::Certificate(Files { authority, certificate, key })
            }
            (None, Some(token)) => Credentials::Token { authority, token: token.clone() },
            (None, None) => Credentials::Nothing,
        });
        let elsewhere = !address.is_empty() || state_dir.is_some();
        let kubernetes = (kubernetes.is_given() || is_plugin && !elsewhere).then_some(kubernetes);
        let output = Output::new(output, color, quiet);
        Context { output, state_dir, cluster, address, credentials, token_file, kubernetes }
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
    if given(&&"token_file") && given(&&"address") && !given(&&"ca") {
        let message =
            "'--token-file <FILE>' goes with '--ca <FILE>' and '--address': a token that is sent in clear is anybody's";
        return Some(message.to_owned());
    }
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
        let token = told(&["engram", "--address", "10.0.0.1:7443", "--token-file", "t", "status"]).unwrap();
        assert!(token.contains("--ca"), "{token}");
        let with_ca = ["engram", "--address", "10.0.0.1:7443", "--token-file", "t", "--ca", "c", "status"];
        assert_eq!(told(&with_ca), None);
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
