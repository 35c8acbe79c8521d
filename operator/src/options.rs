//! The operator's settings, by precedence: flags and environment, configuration file, defaults.
//!
//! Clap reads flags and environment; the file replaces defaults ([`Options::fill`]). Two functions destructure options and settings
//! field by field, so that an option without a counterpart in the file does not compile.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ArgMatches;
use clap::parser::ValueSource;
use engram_api::operator::{self, Configuration};
use engram_api::{Problems, parse_operator_configuration};

// One field per flag, therefore more than a dozen.
/// Settings of an operator.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Configuration file of kind OperatorConfiguration; flags and environment variables take precedence
    #[arg(long, env = "ENGRAM_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Listen address for worker heartbeats
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:7440")]
    pub(crate) coordinator_listen: SocketAddr,
    /// Address by which workers reach all replicas of this operator; may be repeated
    #[arg(long, env = "ENGRAM_COORDINATOR_ADDRESS", value_name = "HOST:PORT", required_unless_present = "config")]
    pub(crate) coordinator_address: Vec<String>,
    /// Listen address for /startupz, /livez, /readyz and /metrics, plain HTTP
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:9090")]
    pub(crate) http_listen: SocketAddr,
    /// Repository of the default worker image
    #[arg(
        long,
        env = "ENGRAM_WORKER_REPOSITORY",
        value_name = "REPOSITORY",
        default_value = "localhost/engram/worker"
    )]
    pub(crate) worker_repository: String,
    /// Repository of the default worker image for pods with GPUs [default: one image for all pods]
    #[arg(long, env = "ENGRAM_WORKER_CUDA_REPOSITORY", value_name = "REPOSITORY")]
    pub(crate) worker_cuda_repository: Option<String>,
    /// Tag of the default worker image
    #[arg(long, env = "ENGRAM_WORKER_VERSION", value_name = "TAG", default_value = env!("CARGO_PKG_VERSION"))]
    pub(crate) worker_version: String,
    /// Image pull secret for workers; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) worker_pull_secret: Vec<String>,
    /// Namespace to watch; may be repeated [default: all]
    #[arg(long, env = "ENGRAM_WATCH_NAMESPACE", value_name = "NAMESPACE", value_delimiter = ',')]
    pub(crate) watch_namespace: Vec<String>,
    /// Elect a leader between replicas by a Lease
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) leader_election: bool,
    /// Name of the Lease
    #[arg(long, value_name = "NAME", default_value = "engram-operator")]
    pub(crate) lease_name: String,
    /// Name of this pod, which identifies the holder of the Lease
    #[arg(long, env = "POD_NAME", value_name = "NAME", default_value = "engram-operator")]
    pub(crate) pod_name: String,
    /// Namespace of this pod and of the Lease
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAMESPACE", default_value = "default")]
    pub(crate) pod_namespace: String,
    /// Maximum number of concurrent reconciles: higher completes a restart sooner and loads the API server more
    #[arg(long, value_name = "NUMBER", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) concurrency: u16,
    /// Certificate lifetime in seconds that overrides the clusters' settings; for tests
    #[arg(long = "certificate-seconds", value_name = "SECONDS", hide = true, value_parser = lifetime)]
    pub(crate) certificate_lifetime: Option<Duration>,
}

fn lifetime(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<u32>().ok().filter(|seconds| *seconds >= 6);
    seconds.map(|seconds| Duration::from_secs(seconds.into())).ok_or_else(|| "allowed: 6 or more".to_owned())
}

/// Why a configuration file is rejected.
#[derive(Debug, thiserror::Error)]
pub enum ConfigurationError {
    /// The file cannot be read.
    #[error("failed to read the configuration {0}")]
    Unreadable(PathBuf, #[source] std::io::Error),
    /// The file is invalid.
    #[error("invalid configuration\n\n{}", .0.render(false).trim_end())]
    Invalid(Problems),
    /// The required coordinator address is set neither in the file nor otherwise.
    #[error(
        "coordinator.addresses is missing in {0}, and neither --coordinator-address nor ENGRAM_COORDINATOR_ADDRESS is given; \
         allowed: one HOST:PORT or more"
    )]
    NoAddress(PathBuf),
}

/// Reads the configuration file.
///
/// # Errors
/// Fails when the file cannot be read or is invalid.
pub fn read(path: &Path) -> Result<Configuration, ConfigurationError> {
    let text = std::fs::read_to_string(path).map_err(|error| ConfigurationError::Unreadable(path.to_owned(), error))?;
    parse_operator_configuration(&text, &path.to_string_lossy()).map_err(ConfigurationError::Invalid)
}

/// Replaces the default of the argument `id` with the value from the file; a flag or environment variable stays.
pub fn fill<T>(matches: &ArgMatches, id: &str, value: &mut T, from_file: Option<T>) {
    let is_default = matches!(matches.value_source(id), None | Some(ValueSource::DefaultValue));
    if let Some(from_file) = from_file.filter(|_| is_default) {
        *value = from_file;
    }
}

impl Options {
    /// Replaces defaults with the values of the configuration file, if any. Returns its logging settings.
    ///
    /// Lists are not merged: a list from a flag replaces that of the file.
    ///
    /// # Errors
    /// Fails when the file cannot be read or is invalid, or when the coordinator address is missing.
    pub fn read_file(&mut self, matches: &ArgMatches) -> Result<operator::Logging, ConfigurationError> {
        let Some(path) = self.config.clone() else { return Ok(operator::Logging::default()) };
        let logging = self.fill(read(&path)?, matches);
        if self.coordinator_address.is_empty() { Err(ConfigurationError::NoAddress(path)) } else { Ok(logging) }
    }

    fn fill(&mut self, file: Configuration, matches: &ArgMatches) -> operator::Logging {
        let Configuration {
            api_version: _,
            kind: _,
            coordinator,
            http,
            worker,
            watch_namespaces,
            leader_election,
            pod,
            concurrency,
            certificate_lifetime,
            logging,
        } = file;
        let operator::Coordinator { listen, addresses } = coordinator.unwrap_or_default();
        fill(matches, "coordinator_listen", &mut self.coordinator_listen, listen);
        fill(matches, "coordinator_address", &mut self.coordinator_address, addresses);
        let operator::Http { listen } = http.unwrap_or_default();
        fill(matches, "http_listen", &mut self.http_listen, listen);
        let operator::Worker { repository, cuda_repository, version, pull_secrets } = worker.unwrap_or_default();
        fill(matches, "worker_repository", &mut self.worker_repository, repository);
        fill(matches, "worker_cuda_repository", &mut self.worker_cuda_repository, cuda_repository.map(Some));
        fill(matches, "worker_version", &mut self.worker_version, version);
        fill(matches, "worker_pull_secret", &mut self.worker_pull_secret, pull_secrets);
        fill(matches, "watch_namespace", &mut self.watch_namespace, watch_namespaces);
        let operator::LeaderElection { enabled, lease_name } = leader_election.unwrap_or_default();
        fill(matches, "leader_election", &mut self.leader_election, enabled);
        fill(matches, "lease_name", &mut self.lease_name, lease_name);
        let operator::Pod { name, namespace } = pod.unwrap_or_default();
        fill(matches, "pod_name", &mut self.pod_name, name);
        fill(matches, "pod_namespace", &mut self.pod_namespace, namespace);
        fill(matches, "concurrency", &mut self.concurrency, concurrency);
        let lifetime = certificate_lifetime.map(|lifetime| Some(lifetime.to_std()));
        fill(matches, "certificate_lifetime", &mut self.certificate_lifetime, lifetime);
        logging.unwrap_or_default()
    }

    /// Returns the effective settings as a complete configuration file.
    pub fn effective(&self, logging: operator::Logging) -> Configuration {
        let Self {
            config: _,
            coordinator_listen,
            coordinator_address,
            http_listen,
            worker_repository,
            worker_cuda_repository,
            worker_version,
            worker_pull_secret,
            watch_namespace,
            leader_election,
            lease_name,
            pod_name,
            pod_namespace,
            concurrency,
            certificate_lifetime,
        } = self.clone();
        Configuration {
            coordinator: Some(operator::Coordinator {
                listen: Some(coordinator_listen),
                addresses: Some(coordinator_address),
            }),
            http: Some(operator::Http { listen: Some(http_listen) }),
            worker: Some(operator::Worker {
                repository: Some(worker_repository),
                cuda_repository: worker_cuda_repository,
                version: Some(worker_version),
                pull_secrets: Some(worker_pull_secret),
            }),
            watch_namespaces: Some(watch_namespace),
            leader_election: Some(operator::LeaderElection {
                enabled: Some(leader_election),
                lease_name: Some(lease_name),
            }),
            pod: Some(operator::Pod { name: Some(pod_name), namespace: Some(pod_namespace) }),
            concurrency: Some(concurrency),
            certificate_lifetime: certificate_lifetime
                .map(|lifetime| engram_api::Duration::from_millis(lifetime.as_millis() as u64)),
            logging: Some(logging),
            ..Configuration::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::builder::Resettable;
    use clap::{Command, CommandFactory as _, FromArgMatches as _, Parser};
    use engram_api::operator::Configuration;
    use engram_api::parse_operator_configuration;

    use super::{ConfigurationError, Options};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    /// Ignores the environment of the test.
    fn command() -> Command {
        Line::command().mut_args(|argument| argument.env(Resettable::Reset))
    }

    const HEAD: &str = "apiVersion: operator.engram.dev/v1alpha1\nkind: OperatorConfiguration\n";

    fn file(text: &str) -> Configuration {
        parse_operator_configuration(&format!("{HEAD}{text}"), "config.yaml").expect(text)
    }

    fn options(command: Command, flags: &[&str], text: &str) -> Configuration {
        let line = ["operator", "--config=config.yaml"].iter().chain(flags);
        let matches = command.try_get_matches_from(line).expect("known flags");
        let mut options = Line::from_arg_matches(&matches).expect("known flags").options;
        let logging = options.fill(file(text), &matches);
        options.effective(logging)
    }

    #[test]
    fn flags_and_variables_take_precedence_over_the_file_and_the_file_over_defaults() {
        let none = options(command(), &[], "");
        assert_eq!(none.concurrency, Some(8));
        let text =
            "concurrency: 16\nleaderElection: { enabled: false }\npod: { namespace: file }\nwatchNamespaces: [a, b]";
        let from_file = options(command(), &[], text);
        assert_eq!(from_file.concurrency, Some(16));
        assert_eq!(from_file.leader_election.unwrap().enabled, Some(false));
        assert_eq!(from_file.pod.unwrap().namespace.unwrap(), "file");
        assert_eq!(from_file.watch_namespaces.unwrap(), ["a", "b"]);

        // An explicit default takes precedence over the file, and a list is replaced as a whole.
        let flags = ["--concurrency=8", "--watch-namespace=c"];
        // PATH, which is always set, stands for POD_NAMESPACE, which a test must not set.
        let command = command().mut_arg("pod_namespace", |argument| argument.env("PATH"));
        let path = std::env::var("PATH").expect("a path of programs");
        let from_flags = options(command, &flags, text);
        assert_eq!(from_flags.concurrency, Some(8));
        assert_eq!(from_flags.leader_election.unwrap().enabled, Some(false));
        assert_eq!(from_flags.pod.unwrap().namespace.unwrap(), path);
        assert_eq!(from_flags.watch_namespaces.unwrap(), ["c"]);
    }

    #[test]
    fn an_invalid_file_is_rejected_with_its_path() {
        let folder = std::env::temp_dir().join(format!("engram-operator-options-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let read = |name: &str, text: Option<&str>| {
            let path = folder.join(name);
            if let Some(text) = text {
                std::fs::write(&path, text).expect("a file");
            }
            let config = format!("--config={}", path.display());
            let matches = command().try_get_matches_from(["operator", &config]).expect("a file is enough");
            let mut options = Line::from_arg_matches(&matches).expect("a file is enough").options;
            options.read_file(&matches).map(|_| options)
        };
        let absent = read("absent.yaml", None).expect_err("no such file");
        assert!(
            matches!(&absent, ConfigurationError::Unreadable(..)) && absent.to_string().ends_with("absent.yaml"),
            "{absent}"
        );
        let wrong =
            read("wrong.yaml", Some(&format!("{HEAD}concurency: 4\n"))).expect_err("a misspelt field").to_string();
        for part in ["wrong.yaml:3:1", "concurency is not a known field; allowed here: ", "did you mean concurrency?"] {
            assert!(wrong.contains(part), "{wrong}");
        }
        let nowhere = read("nowhere.yaml", Some(HEAD)).expect_err("no address").to_string();
        assert!(
            nowhere.starts_with("coordinator.addresses is missing in ") && nowhere.contains("nowhere.yaml"),
            "{nowhere}"
        );
        let text = format!("{HEAD}coordinator: {{ addresses: ['engram:7440'] }}\n");
        assert_eq!(read("right.yaml", Some(&text)).expect("an address").coordinator_address, ["engram:7440"]);
        std::fs::remove_dir_all(&folder).expect("the folder is removed");

        let without = command().try_get_matches_from(["operator"]).expect_err("no address").to_string();
        assert!(without.contains("--coordinator-address <HOST:PORT>"), "{without}");
    }
}
