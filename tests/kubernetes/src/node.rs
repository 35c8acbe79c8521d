//! A real node: containerd, kubelet and kube-proxy.

use crate::cluster::{Cluster, node_name};
use crate::network::{MOST_NODES, address};
use crate::process::until;
use crate::requirements::{cni_programs, find};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::time::Duration;

impl Cluster {
    /// Starts a further node, or one that was killed: it comes back with its disk.
    ///
    /// # Errors
    /// It is up, or does not turn Ready.
    pub fn add_node(&self, node: u8) -> Result<()> {
        self.start_holder(node)?;
        self.start_node(node)
    }

    /// Starts what a real node consists of and waits until it is Ready.
    pub(crate) fn start_node(&self, node: u8) -> Result<()> {
        let name = node_name(node);
        let folder = self.path(&name);
        for part in ["cni", "podlogs", "volume-plugins"] {
            fs::create_dir_all(folder.join(part))?;
        }
        self.certificates(|it| it.make_node(&name, &address(node)))?;
        self.write_configuration(node, &folder)?;

        let configuration = format!("--config={}", folder.join("containerd.toml").display());
        self.start_daemon(
            node,
            "containerd",
            &find("containerd").context("there is no containerd")?,
            &[configuration],
        )?;
        until("containerd", Duration::from_secs(30), || self.ctr(node, ["version"]).map(Some))
            .with_context(|| self.tail(node, "containerd"))?;
        for image in fs::read_dir(self.path("images"))? {
            let image = image?.path();
            // Those are for services that run on node 1 only.
            let of_first = image.file_name().is_some_and(|it| it.to_string_lossy().starts_with("n1-"));
            if node == 1 || !of_first {
                self.import(node, &image)?;
            }
        }
        let arguments = [
            format!("--config={}", folder.join("kubelet.yaml").display()),
            format!("--kubeconfig={}", self.kubeconfig(&format!("kubelet-{name}"))),
            format!("--root-dir={}", folder.join("kubelet").display()),
            format!("--cert-dir={}", folder.join("kubelet/pki").display()),
            format!("--hostname-override={name}"),
            format!("--node-ip={}", address(node)),
            format!("--node-labels=topology.kubernetes.io/zone=zone-{name}"),
        ];
        self.start_daemon(node, "kubelet", &self.kubernetes_program("kubelet")?, &arguments)?;
        let arguments = [
            format!("--kubeconfig={}", self.kubeconfig("proxy")),
            format!("--hostname-override={name}"),
            "--proxy-mode=iptables".into(),
            "--cluster-cidr=10.244.0.0/16".into(),
            // The limit of tracked connections is the machine's, not the node's.
            "--conntrack-max-per-core=0".into(),
            "--metrics-bind-address=127.0.0.1:10249".into(),
            "--healthz-bind-address=127.0.0.1:10256".into(),
        ];
        self.start_daemon(node, "kube-proxy", &self.kubernetes_program("kube-proxy")?, &arguments)?;
        self.wait_for_node(&name, true).with_context(|| self.tail(node, "kubelet"))
    }

    fn write_configuration(&self, node: u8, folder: &Path) -> Result<()> {
        let alone = self.about.options.nodes == 1;
        let taint = "[{key: node-role.kubernetes.io/control-plane, effect: NoSchedule}]";
        let values = [
            ("@NODE_FOLDER@", folder.to_string_lossy().into_owned()),
            ("@IMAGE_STORE@", self.image_stores().join(node_name(node)).to_string_lossy().into_owned()),
            ("@CERTIFICATES@", self.path("certificates").to_string_lossy().into_owned()),
            ("@CNI_PROGRAMS@", cni_programs().context("there are no CNI programs")?.to_string_lossy().into_owned()),
            ("@NODE@", node_name(node)),
            ("@ADDRESS@", address(node)),
            ("@POD_NETWORK@", format!("10.244.{node}.0/24")),
            ("@TAINTS@", if node == 1 && !alone { taint } else { "[]" }.to_owned()),
        ];
        let templates = [
            ("containerd.toml", include_str!("../templates/containerd.toml")),
            ("kubelet.yaml", include_str!("../templates/kubelet.yaml")),
            ("cni/10-bridge.conflist", include_str!("../templates/bridge.conflist")),
            ("resolv.conf", "nameserver 10.96.0.10\n"),
        ];
        for (file, template) in templates {
            let text = values.iter().fold(template.to_owned(), |text, (key, value)| text.replace(key, value));
            fs::write(folder.join(file), text).with_context(|| format!("failed to write {file} of a node"))?;
        }
        Ok(())
    }

    /// Imports an image archive into every node, those that come later included.
    ///
    /// # Errors
    /// It is no image, or a node refuses it.
    pub fn load_image(&self, archive: &Path) -> Result<()> {
        ensure!(!self.is_fake(), "this cluster's nodes are fake, and run no image");
        if let Some(given) = &self.given {
            return given.load_image(archive);
        }
        let name = archive.file_name().context("the archive has no name")?;
        let kept = self.path("images").join(name);
        fs::copy(archive, &kept).with_context(|| format!("failed to copy {}", archive.display()))?;
        (1..=MOST_NODES).filter(|&it| self.holder(it).is_ok()).try_for_each(|it| self.import(it, &kept))
    }

    /// Runs a command line for people on every node, in a folder of this machine.
    pub(crate) fn on_every_node(&self, folder: &Path, line: &str) -> Result<()> {
        ensure!(!self.is_fake(), "this cluster's nodes are fake, and run no command");
        let line = format!("cd '{}' && {line}", folder.display());
        (1..=MOST_NODES).filter(|&it| self.holder(it).is_ok()).try_for_each(|node| self.shell(node, &line).map(drop))
    }

    /// Imports an image into one node alone, where nodes are this cluster's own.
    pub(crate) fn load_image_on(&self, node: u8, archive: &Path) -> Result<()> {
        match &self.given {
            Some(given) => given.load_image(archive),
            None => self.import(node, archive),
        }
    }

    fn import(&self, node: u8, archive: &Path) -> Result<()> {
        self.ctr(node, ["images".as_ref(), "import".as_ref(), archive.as_os_str()]).map(drop)
    }
}
