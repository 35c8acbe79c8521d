//! The operator of the images: reads its arguments, runs until it is told to stop.

#![forbid(unsafe_code)]

use anyhow::{Context as _, Result};
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser};
use engram_api::operator;
use engram_operator::options;
use engram_operator::run::{self, Options};
use engram_telemetry::{Log, Program};
use std::io::Write as _;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

/// Keeps what LearnerClusters ask for, and coordinates their workers.
///
/// Any number of replicas may run. One of them, chosen by a Lease, writes Kubernetes objects; all of them coordinate workers, since
/// compare-and-swap on the PartitionMap decides between them.
///
/// Settings may stand in a file (--config). A flag or variable that is given counts more than the file, and the file more than a default.
#[derive(Debug, Parser)]
#[command(name = "engram-operator", version, max_term_width = 100)]
struct Arguments {
    #[command(flatten)]
    options: Options,
    /// Print the settings that are in force, as a file for --config, and end
    #[arg(long)]
    print_config: bool,
    /// Which lines are logged: a level, or targets with levels (engram_operator=debug,info)
    #[arg(long, env = "ENGRAM_LOG", value_name = "FILTER", default_value = "info")]
    log: String,
    /// How lines are logged
    #[arg(long, env = "ENGRAM_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
}

impl Arguments {
    /// Takes what was given, and from the file that is named what was not.
    fn read(given: &ArgMatches) -> Result<Self> {
        let mut arguments = Self::from_arg_matches(given)?;
        let operator::Logging { level, format } = arguments.options.read_file(given)?;
        options::fill(given, "log", &mut arguments.log, level);
        let format = format.map(|format| match format {
            operator::LogFormat::Text => LogFormat::Text,
            operator::LogFormat::Json => LogFormat::Json,
        });
        options::fill(given, "log_format", &mut arguments.log_format, format);
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

/// How long threads that wait for something are waited for when all else has ended.
const THREADS_END: Duration = Duration::from_secs(5);

fn main() -> Result<()> {
    let arguments = Arguments::read(&Arguments::command().get_matches())?;
    if arguments.print_config {
        return Ok(std::io::stdout().write_all(arguments.effective().to_yaml().as_bytes())?);
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("failed to start threads")?;
    let result = work(arguments, &runtime);
    // A name server that is away may hold a thread that looks for the collector.
    runtime.shutdown_timeout(THREADS_END);
    result
}

fn work(arguments: Arguments, runtime: &Runtime) -> Result<()> {
    let program = Program { name: "engram-operator", version: env!("CARGO_PKG_VERSION") };
    let log = Log { filter: &arguments.log, format: arguments.log_format.into() };
    let entered = runtime.enter();
    let _telling = engram_telemetry::start(program, log)?;
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
        // Whatever the environment says here.
        let command = Arguments::command().mut_args(|argument| argument.env(Resettable::Reset));
        let given = command.try_get_matches_from(line).expect("arguments that are known");
        Arguments::read(&given).expect("a file without fault")
    }

    /// Every field that `schema` has, and not one that is absent from `value` or is as in `default`.
    fn assert_says_all(value: &serde_json::Value, default: &serde_json::Value, schema: &serde_json::Value, path: &str) {
        for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            let said = value.get(name).unwrap_or_else(|| panic!("{path} is not in the example"));
            if schema["properties"].is_object() {
                assert_says_all(said, &default[name], schema, &path);
            } else if schema["const"].is_null() {
                assert_ne!(said, &default[name], "{path} is what it is without the file");
            }
        }
    }

    #[test]
    fn a_file_can_set_whatever_a_flag_can_and_is_printed_as_it_is() {
        let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/configuration.yaml"));
        let file = options::read(&path).expect("a file without fault");
        let default = read(&["--coordinator-address=default:1"]).effective();
        let json = |file: &operator::Configuration| serde_json::to_value(file).expect("JSON");
        assert_says_all(&json(&file), &json(&default), &engram_api::operator_schema(), "");

        let said = read(&["--config", &path.to_string_lossy()]).effective();
        assert_eq!(said, file, "a setting that the file does not reach, or that is printed otherwise");
        assert_eq!(
            said.to_yaml(),
            std::fs::read_to_string(&path).expect("the golden file"),
            "printed as it was written"
        );

        let flags = ["--config", &path.to_string_lossy(), "--log=trace", "--log-format=text"];
        let logging = read(&flags).effective().logging.expect("logging");
        assert_eq!((logging.level.as_deref(), logging.format), (Some("trace"), Some(operator::LogFormat::Text)));
    }
}
