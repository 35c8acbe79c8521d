//! The operator's binary: reads its arguments and runs until SIGINT or SIGTERM.

#![forbid(unsafe_code)]

use anyhow::{Context as _, Result};
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser};
use engram_api::operator;
use engram_operator::options;
use engram_operator::run::{self, Options};
use engram_telemetry::{Log, Program, Spans};
use std::io::Write as _;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

/// Reconciles LearnerClusters and LearnerRuns, and coordinates their workers.
///
/// Any number of replicas may run. The leader, elected by a Lease, writes Kubernetes objects; all replicas coordinate workers, with
/// compare-and-swap on the PartitionMap.
///
/// The operator can read its settings from a file (--config). Flags and environment variables take precedence over the file.
#[derive(Debug, Parser)]
#[command(name = "engram-operator", version, max_term_width = 100)]
struct Arguments {
    #[command(flatten)]
    options: Options,
    /// Print the effective settings, as a file for --config, and exit
    #[arg(long)]
    print_config: bool,
    /// Log filter: a level, or targets with levels (engram_operator=debug,info)
    #[arg(long, env = "ENGRAM_LOG", value_name = "FILTER", default_value = "info")]
    log: String,
    /// Log format
    #[arg(long, env = "ENGRAM_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
}

impl Arguments {
    /// Reads flags, environment and configuration file.
    fn read(matches: &ArgMatches) -> Result<Self> {
        let mut arguments = Self::from_arg_matches(matches)?;
        let operator::Logging { level, format } = arguments.options.read_file(matches)?;
        options::fill(matches, "log", &mut arguments.log, level);
        let format = format.map(|format| match format {
            operator::LogFormat::Text => LogFormat::Text,
            operator::LogFormat::Json => LogFormat::Json,
        });
        options::fill(matches, "log_format", &mut arguments.log_format, format);
        Ok(arguments)
    }

    fn effective(&self) -> operator::Configuration {
        let Self { options, print_config: _, log, log_format } = self;
        let format = match log_format {
            LogFormat::Text => operator::LogFormat::Text,
            LogFormat::Json => operator::LogFormat::Json,
        };
        options.effective(operator::Logging { level: Some(log.clone()), format: Some(format) })
    }
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

impl From<LogFormat> for engram_telemetry::LogFormat {
    fn from(format: LogFormat) -> Self {
        match format {
            LogFormat::Text => Self::Text,
            LogFormat::Json => Self::Json,
        }
    }
}

/// How long to wait for blocked threads at exit.
const THREAD_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

fn main() -> Result<()> {
    let arguments = Arguments::read(&Arguments::command().get_matches())?;
    if arguments.print_config {
        return Ok(std::io::stdout().write_all(arguments.effective().to_yaml().as_bytes())?);
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("failed to start threads")?;
    let result = work(arguments, &runtime);
    // A thread may be blocked in a DNS lookup of the trace collector.
    runtime.shutdown_timeout(THREAD_SHUTDOWN_TIMEOUT);
    result
}

fn work(arguments: Arguments, runtime: &Runtime) -> Result<()> {
    let program = Program { name: "engram-operator", version: env!("CARGO_PKG_VERSION"), spans: Spans::Tracing };
    let log = Log { filter: &arguments.log, format: arguments.log_format.into() };
    let entered = runtime.enter();
    let _telemetry = engram_telemetry::start(program, log)?;
    drop(entered);
    runtime.block_on(async {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        run::run(arguments.options, async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        })
        .await
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use clap::builder::Resettable;

    use super::*;

    fn read(arguments: &[&str]) -> Arguments {
        let line = ["engram-operator"].iter().chain(arguments);
        // Ignores the environment of the test.
        let command = Arguments::command().mut_args(|argument| argument.env(Resettable::Reset));
        let matches = command.try_get_matches_from(line).expect("known arguments");
        Arguments::read(&matches).expect("a valid file")
    }

    /// Asserts that `value` sets every field of `schema` to something else than `default`.
    fn assert_sets_all(value: &serde_json::Value, default: &serde_json::Value, schema: &serde_json::Value, path: &str) {
        for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            let set = value.get(name).unwrap_or_else(|| panic!("{path} is not in the example"));
            if schema["properties"].is_object() {
                assert_sets_all(set, &default[name], schema, &path);
            } else if schema["const"].is_null() {
                assert_ne!(set, &default[name], "{path} has its default");
            }
        }
    }

    #[test]
    fn the_file_can_set_every_flag_and_is_printed_unchanged() {
        let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/configuration.yaml"));
        let file = options::read(&path).expect("a valid file");
        let default = read(&["--coordinator-address=default:1"]).effective();
        let json = |file: &operator::Configuration| serde_json::to_value(file).expect("JSON");
        assert_sets_all(&json(&file), &json(&default), &engram_api::operator_schema(), "");

        let effective = read(&["--config", &path.to_string_lossy()]).effective();
        assert_eq!(effective, file, "a setting that the file does not set, or that is printed differently");
        assert_eq!(effective.to_yaml(), std::fs::read_to_string(&path).expect("the golden file"), "printed unchanged");

        let flags = ["--config", &path.to_string_lossy(), "--log=trace", "--log-format=text"];
        let logging = read(&flags).effective().logging.expect("logging");
        assert_eq!((logging.level.as_deref(), logging.format), (Some("trace"), Some(operator::LogFormat::Text)));
    }
}
