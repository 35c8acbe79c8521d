//! The operator's settings: what flags and environment say, then a file, then defaults.
//!
//! Clap reads flags and environment; a file fills what they left to defaults ([`Options::fill`]). Two functions take values and settings
//! apart field by field, so that a setting which the file lacks does not compile.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ArgMatches;
use clap::parser::ValueSource;
use engram_api::operator::{self, Configuration};
use engram_api::{Problems, parse_operator_configuration};

/// Settings of an operator.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// File with settings, of kind OperatorConfiguration: each counts where neither a flag nor a variable is given
    #[arg(long, env = "ENGRAM_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where workers' beats are listened for
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:7440")]
    pub(crate) coordinator_listen: SocketAddr,
    /// Where workers find every replica of this operator: a name that stands for all of them
    #[arg(long, env = "ENGRAM_COORDINATOR_ADDRESS", value_name = "HOST:PORT", required_unless_present = "config")]
    pub(crate) coordinator_address: Vec<String>,
    /// Where /startupz, /livez, /readyz and /metrics are, plain HTTP
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:9090")]
    pub(crate) http_listen: SocketAddr,
    /// Repository of the image that workers run, where a cluster names none
    #[arg(long, env = "ENGRAM_WORKER_REPOSITORY", value_name = "REPOSITORY", default_value = "engram/worker")]
    pub(crate) worker_repository: String,
    /// The same for workers whose pods are given GPUs; the tag is that of the other [default: one image for all]
    #[arg(long, env = "ENGRAM_WORKER_CUDA_REPOSITORY", value_name = "REPOSITORY")]
    pub(crate) worker_cuda_repository: Option<String>,
    /// Its tag
    #[arg(long, env = "ENGRAM_WORKER_VERSION", value_name = "TAG", default_value = env!("CARGO_PKG_VERSION"))]
    pub(crate) worker_version: String,
    /// Secret with which nodes pull it; more than one may be named
    #[arg(long, value_name = "NAME")]
    pub(crate) worker_pull_secret: Vec<String>,
    /// Namespace to look after; more than one may be named, none means all
    #[arg(long, env = "ENGRAM_WATCH_NAMESPACE", value_name = "NAMESPACE", value_delimiter = ',')]
    pub(crate) watch_namespace: Vec<String>,
    /// Whether a Lease decides who of several replicas writes
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) leader_election: bool,
    /// Name of that Lease
    #[arg(long, value_name = "NAME", default_value = "engram-operator")]
    pub(crate) lease_name: String,
    /// Name of this pod: who holds the Lease
    #[arg(long, env = "POD_NAME", value_name = "NAME", default_value = "engram-operator")]
    pub(crate) pod_name: String,
    /// Namespace of this pod and of the Lease
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAMESPACE", default_value = "default")]
    pub(crate) pod_namespace: String,
    /// Clusters that are looked at at the same time: more finish a restart sooner and load the API server more
    #[arg(long, value_name = "NUMBER", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) concurrency: u16,
    /// How long certificates are good instead of what clusters say, in seconds: tests cannot wait for days
    #[arg(long = "certificate-seconds", value_name = "SECONDS", hide = true, value_parser = lifetime)]
    pub(crate) certificate_lifetime: Option<Duration>,
}

fn lifetime(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<u32>().ok().filter(|seconds| *seconds >= 6);
    seconds.map(|seconds| Duration::from_secs(seconds.into())).ok_or_else(|| "allowed: 6 or more".to_owned())
}

/// Why an operator does not start with a file.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// There is no such file, or none that may be read.
    #[error("failed to read the configuration {0}")]
    Unreadable(PathBuf, #[source] std::io::Error),
    /// It says what it may not.
    #[error("the configuration cannot be used\n\n{}", .0.render(false).trim_end())]
    Wrong(Problems),
    /// A setting that has no default is nowhere.
    #[error(
        "coordinator.addresses is missing in {0}, and neither --coordinator-address nor ENGRAM_COORDINATOR_ADDRESS is given; \
         allowed: one HOST:PORT or more"
    )]
    NoAddress(PathBuf),
}

/// Reads the file that an operator is started with.
///
/// # Errors
/// It cannot be read, or says what it may not.
pub fn read(path: &Path) -> Result<Configuration, Unusable> {
    let text = std::fs::read_to_string(path).map_err(|error| Unusable::Unreadable(path.to_owned(), error))?;
    parse_operator_configuration(&text, &path.to_string_lossy()).map_err(Unusable::Wrong)
}

/// Puts what a file says in the place of the default of the argument `id`: what was given, as a flag or in the environment, stays.
pub fn fill<T>(given: &ArgMatches, id: &str, value: &mut T, said: Option<T>) {
    let is_default = matches!(given.value_source(id), None | Some(ValueSource::DefaultValue));
    if let Some(said) = said.filter(|_| is_default) {
        *value = said;
    }
}

impl Options {
    /// Takes from the file that is named what was not given otherwise. Returns what the file says of things that are no options.
    ///
    /// A list that was given stands for itself: that of the file is not added to it.
    ///
    /// # Errors
    /// The file cannot be read or is wrong, or nobody says where workers find the operator.
    pub fn read_file(&mut self, given: &ArgMatches) -> Result<operator::Logging, Unusable> {
        let Some(path) = self.config.clone() else { return Ok(operator::Logging::default()) };
        let logging = self.fill(read(&path)?, given);
        if self.coordinator_address.is_empty() { Err(Unusable::NoAddress(path)) } else { Ok(logging) }
    }

    fn fill(&mut self, file: Configuration, given: &ArgMatches) -> operator::Logging {
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
        fill(given, "coordinator_listen", &mut self.coordinator_listen, listen);
        fill(given, "coordinator_address", &mut self.coordinator_address, addresses);
        let operator::Http { listen } = http.unwrap_or_default();
        fill(given, "http_listen", &mut self.http_listen, listen);
        let operator::Worker { repository, cuda_repository, version, pull_secrets } = worker.unwrap_or_default();
        fill(given, "worker_repository", &mut self.worker_repository, repository);
        fill(given, "worker_cuda_repository", &mut self.worker_cuda_repository, cuda_repository.map(Some));
        fill(given, "worker_version", &mut self.worker_version, version);
        fill(given, "worker_pull_secret", &mut self.worker_pull_secret, pull_secrets);
        fill(given, "watch_namespace", &mut self.watch_namespace, watch_namespaces);
        let operator::LeaderElection { enabled, lease_name } = leader_election.unwrap_or_default();
        fill(given, "leader_election", &mut self.leader_election, enabled);
        fill(given, "lease_name", &mut self.lease_name, lease_name);
        let operator::Pod { name, namespace } = pod.unwrap_or_default();
        fill(given, "pod_name", &mut self.pod_name, name);
        fill(given, "pod_namespace", &mut self.pod_namespace, namespace);
        fill(given, "concurrency", &mut self.concurrency, concurrency);
        let lifetime = certificate_lifetime.map(|lifetime| Some(lifetime.to_std()));
        fill(given, "certificate_lifetime", &mut self.certificate_lifetime, lifetime);
        logging.unwrap_or_default()
    }

    /// What is in force, as a file that says all of it.
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

    use super::{Options, Unusable};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    /// Whatever the environment says here.
    fn command() -> Command {
        Line::command().mut_args(|argument| argument.env(Resettable::Reset))
    }

    const HEAD: &str = "apiVersion: operator.engram.dev/v1alpha1\nkind: OperatorConfiguration\n";

    fn file(text: &str) -> Configuration {
        parse_operator_configuration(&format!("{HEAD}{text}"), "config.yaml").expect(text)
    }

    fn options(command: Command, flags: &[&str], text: &str) -> Configuration {
        let line = ["operator", "--config=config.yaml"].iter().chain(flags);
        let given = command.try_get_matches_from(line).expect("flags that are known");
        let mut options = Line::from_arg_matches(&given).expect("flags that are known").options;
        let logging = options.fill(file(text), &given);
        options.effective(logging)
    }

    #[test]
    fn a_flag_and_a_variable_count_more_than_the_file_and_the_file_more_than_a_default() {
        let none = options(command(), &[], "");
        assert_eq!(none.concurrency, Some(8));
        let text =
            "concurrency: 16\nleaderElection: { enabled: false }\npod: { namespace: file }\nwatchNamespaces: [a, b]";
        let said = options(command(), &[], text);
        assert_eq!(said.concurrency, Some(16));
        assert_eq!(said.leader_election.unwrap().enabled, Some(false));
        assert_eq!(said.pod.unwrap().namespace.unwrap(), "file");
        assert_eq!(said.watch_namespaces.unwrap(), ["a", "b"]);

        // The default, given by hand, is given; of the rest the file counts, and a list is replaced as a whole.
        let flags = ["--concurrency=8", "--watch-namespace=c"];
        // A variable that is always there stands for POD_NAMESPACE, which a test must not set.
        let command = command().mut_arg("pod_namespace", |argument| argument.env("PATH"));
        let path = std::env::var("PATH").expect("a path of programs");
        let given = options(command, &flags, text);
        assert_eq!(given.concurrency, Some(8));
        assert_eq!(given.leader_election.unwrap().enabled, Some(false));
        assert_eq!(given.pod.unwrap().namespace.unwrap(), path);
        assert_eq!(given.watch_namespaces.unwrap(), ["c"]);
    }

    #[test]
    fn what_no_operator_can_start_with_is_told_with_the_file() {
        let folder = std::env::temp_dir().join(format!("engram-operator-options-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let read = |name: &str, text: Option<&str>| {
            let path = folder.join(name);
            if let Some(text) = text {
                std::fs::write(&path, text).expect("a file");
            }
            let config = format!("--config={}", path.display());
            let given = command().try_get_matches_from(["operator", &config]).expect("a file is enough");
            let mut options = Line::from_arg_matches(&given).expect("a file is enough").options;
            options.read_file(&given).map(|_| options)
        };
        let absent = read("absent.yaml", None).expect_err("no such file");
        assert!(matches!(&absent, Unusable::Unreadable(..)) && absent.to_string().ends_with("absent.yaml"), "{absent}");
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
        std::fs::remove_dir_all(&folder).expect("the folder goes");

        let without = command().try_get_matches_from(["operator"]).expect_err("no address").to_string();
        assert!(without.contains("--coordinator-address <HOST:PORT>"), "{without}");
    }
}
