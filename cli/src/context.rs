//! Shared context of all commands: global options, terminal, and cluster selection. Imports no command.

use crate::output::{ColorChoice, Format, Output};
use clap::Args;
use engram_identity::Files;
use std::path::PathBuf;

/// Options of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct GlobalOptions {
    /// Output format [default: table on a terminal, tsv otherwise]
    #[arg(short, long, value_name = "FORMAT", global = true, value_enum)]
    pub(crate) output: Option<Format>,
    /// When to use color; auto honors NO_COLOR, CLICOLOR_FORCE and TERM=dumb
    #[arg(long, value_name = "WHEN", global = true, value_enum, default_value_t = ColorChoice::Auto)]
    pub(crate) color: ColorChoice,
    /// Print results and errors only
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    /// State directory of a local cluster
    #[arg(long, value_name = "DIR", global = true, env = "ENGRAM_STATE_DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Name of the cluster; required if several local clusters run, or if the namespace has several
    #[arg(long, value_name = "NAME", global = true, env = "ENGRAM_CLUSTER")]
    pub(crate) cluster: Option<String>,
    /// Addresses of workers of a remote cluster
    #[arg(
        long,
        alias = "server",
        value_name = "HOST:PORT,..",
        global = true,
        env = "ENGRAM_ADDRESS",
        value_delimiter = ','
    )]
    pub(crate) address: Vec<String>,
    /// CA certificates (PEM) that the workers' certificates must be signed by; enables TLS with --address
    #[arg(long, value_name = "FILE", global = true, env = "ENGRAM_CERTIFICATE_AUTHORITY")]
    pub(crate) certificate_authority: Option<PathBuf>,
    /// Client certificate (PEM), with --certificate-authority
    #[arg(
        long,
        value_name = "FILE",
        global = true,
        requires = "certificate_authority",
        env = "ENGRAM_CLIENT_CERTIFICATE"
    )]
    pub(crate) client_certificate: Option<PathBuf>,
    /// Private key (PEM) of the client certificate [default: in the file of --client-certificate]
    #[arg(long, value_name = "FILE", global = true, requires = "client_certificate", env = "ENGRAM_CLIENT_KEY")]
    pub(crate) client_key: Option<PathBuf>,
    /// File with a service account token to present instead of a client certificate; read again when it changes
    #[arg(long, value_name = "FILE", global = true, env = "ENGRAM_TOKEN_FILE")]
    pub(crate) token_file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) kubernetes: KubernetesOptions,
    /// The options of the command line that select the cluster, as text.
    #[arg(skip)]
    pub(crate) selection: String,
}

/// Options that select a Kubernetes cluster and a namespace.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Kubernetes options")]
pub(crate) struct KubernetesOptions {
    /// Kubernetes namespace of the cluster [default: namespace of the kubeconfig context]
    #[arg(short, long, value_name = "NAMESPACE", global = true)]
    pub(crate) namespace: Option<String>,
    /// Context of the kubeconfig file
    #[arg(long, value_name = "NAME", global = true)]
    pub(crate) context: Option<String>,
    /// Path of the kubeconfig file [default: KUBECONFIG, ~/.kube/config, or the service account of the pod]
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) kubeconfig: Option<PathBuf>,
}

impl KubernetesOptions {
    /// Whether any of the options is set.
    pub(crate) const fn is_set(&self) -> bool {
        self.namespace.is_some() || self.context.is_some() || self.kubeconfig.is_some()
    }
}

/// Id of [`ClusterArgument`] in the grammar.
pub(crate) const CLUSTER_ARGUMENT: &str = "cluster-argument";

/// Cluster as a positional argument, for commands without another positional argument.
#[derive(Debug, Clone, Args)]
pub(crate) struct ClusterArgument {
    /// Name of the cluster; same as --cluster
    #[arg(value_name = "CLUSTER", id = CLUSTER_ARGUMENT)]
    pub(crate) name: Option<String>,
}

/// Credentials that a client presents, and the CA that it trusts, under TLS.
#[derive(Debug, Clone)]
pub(crate) enum Credentials {
    /// A client certificate.
    Certificate(Files),
    /// A token, presented to servers whose certificate is signed by `ca_file`.
    Token { ca_file: PathBuf, token: PathBuf },
    /// A CA without client credentials.
    Missing,
}

/// Settings shared by all commands of one invocation.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    /// Output format and terminal capabilities.
    pub(crate) output: Output,
    /// `--state-dir`.
    pub(crate) state_dir: Option<PathBuf>,
    /// `--cluster`.
    pub(crate) cluster: Option<String>,
    /// `--address`.
    pub(crate) address: Vec<String>,
    /// TLS credentials for `--address`.
    pub(crate) credentials: Option<Credentials>,
    /// `--token-file`.
    pub(crate) token_file: Option<PathBuf>,
    /// Set for a cluster in Kubernetes. Takes precedence over the fields above.
    pub(crate) kubernetes: Option<KubernetesOptions>,
}

impl GlobalOptions {
    /// Drops the selections of the environment if an option of the command line selects a cluster: the option replaces them all.
    /// `ENGRAM_CLUSTER` still names the cluster within a namespace.
    pub(crate) fn override_environment(&mut self, is_option: impl Fn(&str) -> bool) {
        self.selection = self.selecting_options(&is_option);
        let selects_one = ["address", "state_dir", "cluster", CLUSTER_ARGUMENT].into_iter().any(&is_option);
        if !selects_one && !self.kubernetes.is_set() {
            return;
        }
        if !is_option("address") {
            self.address.clear();
            // They belong to the address.
            if !is_option("certificate_authority") {
                (self.certificate_authority, self.client_certificate, self.client_key) = (None, None, None);
            }
        }
        if !is_option("state_dir") {
            self.state_dir = None;
        }
        if selects_one && !is_option("cluster") {
            self.cluster = None;
        }
    }

    /// Returns the options of the command line that select the cluster, each with a leading space.
    fn selecting_options(&self, is_option: impl Fn(&str) -> bool) -> String {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let options = [
            ("state_dir", "--state-dir", path(&self.state_dir)),
            ("cluster", "--cluster", self.cluster.clone()),
            ("address", "--address", Some(self.address.join(","))),
            ("certificate_authority", "--certificate-authority", path(&self.certificate_authority)),
            ("client_certificate", "--client-certificate", path(&self.client_certificate)),
            ("client_key", "--client-key", path(&self.client_key)),
            ("token_file", "--token-file", path(&self.token_file)),
            ("namespace", "-n", self.kubernetes.namespace.clone()),
            ("context", "--context", self.kubernetes.context.clone()),
            ("kubeconfig", "--kubeconfig", path(&self.kubernetes.kubeconfig)),
        ];
        let given = options.into_iter().filter(|(id, ..)| is_option(id));
        given.filter_map(|(_, option, value)| Some(format!(" {option} {}", quoted(&value?)))).collect()
    }

    /// Reads the terminal and the environment once. As a kubectl plug-in the cluster is in Kubernetes unless `--address` or
    /// `--state-dir` is given.
    pub(crate) fn context(self, is_plugin: bool) -> Context {
        let Self {
            output,
            color,
            quiet,
            state_dir,
            cluster,
            address,
            certificate_authority,
            client_certificate,
            client_key,
            token_file,
            kubernetes,
            selection,
        } = self;
        let credentials = certificate_authority.map(|ca_file| match (client_certificate, &token_file) {
            (Some(certificate), _) => {
                let key = client_key.unwrap_or_else(|| certificate.clone());
                Credentials::Certificate(Files { trust_bundle: ca_file, certificate, key })
            }
            (None, Some(token)) => Credentials::Token { ca_file, token: token.clone() },
            (None, None) => Credentials::Missing,
        });
        let is_outside_kubernetes = !address.is_empty() || state_dir.is_some();
        let kubernetes = (kubernetes.is_set() || is_plugin && !is_outside_kubernetes).then_some(kubernetes);
        let output = Output::new(output, color, quiet).with_selection(selection);
        Context { output, state_dir, cluster, address, credentials, token_file, kubernetes }
    }
}

/// Quotes a value for a shell, if necessary.
fn quoted(value: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:,@%+=".contains(letter);
    if !value.is_empty() && value.chars().all(is_plain) {
        return value.to_owned();
    }
    format!("'{}'", value.replace('\'', r"'\''"))
}

impl Context {
    /// Returns a copy with the cluster of `argument`, if it names one.
    pub(crate) fn for_cluster(&self, argument: &ClusterArgument) -> Self {
        Self { cluster: argument.name.clone().or_else(|| self.cluster.clone()), ..self.clone() }
    }
}
