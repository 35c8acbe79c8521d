//! A cluster that is there already, such as one of kind: known by its kubeconfig, and reached through its API server alone.

use crate::cluster::{COMMAND, Cluster};
use crate::process::{self, until};
use crate::requirements::find;
use crate::{Skip, programs};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// How long the API server may take to answer the first request.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a cluster may take to load an image into its nodes.
const LOAD: Duration = Duration::from_secs(300);

/// How a cluster is reached that was not started here.
#[derive(Debug, Clone)]
pub(crate) struct GivenCluster {
    kubeconfig: PathBuf,
    kubectl: PathBuf,
    /// Program and first arguments of the command that loads an image archive.
    image_loader: Vec<String>,
    _proxy: Arc<Proxy>,
}

/// A kubectl that signs in for the suites, and listens on a socket; ends with the last handle of its cluster.
#[derive(Debug)]
struct Proxy {
    child: Child,
    folder: PathBuf,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        drop(fs::remove_dir_all(&self.folder));
    }
}

impl GivenCluster {
    pub(crate) fn kubectl_command(&self) -> Command {
        let mut command = Command::new(&self.kubectl);
        command.arg("--kubeconfig").arg(&self.kubeconfig);
        command
    }

    /// Whether images of this build can be loaded into its nodes.
    pub(crate) const fn loads_images(&self) -> bool {
        !self.image_loader.is_empty()
    }

    /// Loads an image archive into the nodes.
    pub(crate) fn load_image(&self, archive: &Path) -> Result<()> {
        let [program, arguments @ ..] = &self.image_loader[..] else {
            return Err(Skip(
                "images cannot be loaded into the given cluster: name a command by --image-loader".into(),
            )
            .into());
        };
        let mut command = Command::new(program);
        command.args(arguments).arg(archive);
        process::read(&mut command, b"", LOAD).map(drop)
    }
}

impl Cluster {
    /// Uses the cluster of a kubeconfig. It offers no nodes: what needs one is skipped. `image_loader` is a command line, to which the path
    /// of an image archive is added; empty for none.
    ///
    /// # Errors
    /// There is no such file, [`Skip`] without kubectl, or the API server does not answer.
    pub fn given(kubeconfig: &Path, image_loader: &str) -> Result<Self> {
        let kubeconfig =
            kubeconfig.canonicalize().with_context(|| format!("no kubeconfig at {}", kubeconfig.display()))?;
        let kubectl = match find("kubectl") {
            Some(kubectl) => kubectl,
            None => programs::find()?.join("kubectl"),
        };
        let image_loader = image_loader.split_whitespace().map(str::to_owned).collect();
        let folder = std::env::temp_dir().join(format!("engram-kubernetes-{}", std::process::id()));
        for part in ["bin", "images", "volumes"] {
            let path = folder.join(part);
            fs::create_dir_all(&path).with_context(|| format!("failed to create {}", path.display()))?;
        }
        let socket = folder.join("api.sock");
        let mut command = Command::new(&kubectl);
        command.arg("--kubeconfig").arg(&kubeconfig).arg("proxy").arg(format!("--unix-socket={}", socket.display()));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.with_context(|| format!("failed to start {}", kubectl.display()))?;
        let proxy = Arc::new(Proxy { child, folder: folder.clone() });
        let cluster = Self::reached_by(folder, GivenCluster { kubeconfig, kubectl, image_loader, _proxy: proxy });
        fs::copy(std::env::current_exe()?, cluster.program())?;
        until("the API server of the given cluster", ANSWER, || {
            ensure!(socket.exists(), "kubectl proxy does not listen yet");
            cluster.api().get("/version").map(Some)
        })?;
        Ok(cluster)
    }

    /// Loads the images of the test pods into the nodes of a given cluster, if it takes any.
    ///
    /// # Errors
    /// They cannot be packed, or are refused.
    pub fn load_tools(&self) -> Result<()> {
        match &self.given {
            Some(given) if given.loads_images() => given.load_image(&self.pack_tools()?),
            _ => Ok(()),
        }
    }

    /// The kubeconfig of an administrator as JSON, with all certificates inside.
    pub(crate) fn admin_config(&self) -> Result<Value> {
        let text = match &self.given {
            Some(_) => self.kubectl(["config", "view", "--raw", "--minify", "--flatten", "-o", "json"])?,
            None => fs::read_to_string(self.kubeconfig("admin"))?,
        };
        serde_json::from_str(&text).context("the kubeconfig of the administrator is not JSON")
    }

    /// A program of this machine that reaches the API server as an administrator, by `KUBECONFIG`.
    pub(crate) fn client_command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let Some(given) = &self.given else { return self.network_command(1, program) };
        let mut command = Command::new(program);
        command.env("KUBECONFIG", &given.kubeconfig);
        Ok(command)
    }

    /// What such a program prints.
    pub(crate) fn client<S: AsRef<OsStr>>(
        &self,
        program: impl AsRef<OsStr>,
        arguments: impl IntoIterator<Item = S>,
        input: &str,
    ) -> Result<String> {
        process::read(self.client_command(program)?.args(arguments), input.as_bytes(), COMMAND)
    }
}

/// Why something cannot be done on a given cluster.
pub(crate) fn needs_nodes(what: &str) -> anyhow::Error {
    Skip(format!("{what} needs control over nodes, which a given cluster does not offer: use the built-in cluster"))
        .into()
}
