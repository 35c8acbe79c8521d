//! The cluster's own CAs, certificates and kubeconfigs, made with openssl (EC P-256).

use crate::process;
use anyhow::{Context, Result};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const KEY: [&str; 5] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
const LIMIT: Duration = Duration::from_secs(20);

/// The folder that they lie in.
pub(crate) struct Certificates<'a> {
    folder: &'a Path,
    server: &'a str,
}

impl<'a> Certificates<'a> {
    /// In this folder, for an API server at this URL.
    pub(crate) fn new(folder: &'a Path, server: &'a str) -> Self {
        Self { folder, server }
    }

    /// Everything but what belongs to single nodes.
    pub(crate) fn make_cluster(&self, address: &str) -> Result<()> {
        fs::create_dir_all(self.folder)?;
        self.create_ca("ca", "kubernetes-ca")?;
        self.create_ca("front", "front-proxy-ca")?;
        let names =
            ["", ".default", ".default.svc", ".default.svc.cluster.local"].map(|it| format!("DNS:kubernetes{it}"));
        let names = format!("{},DNS:localhost,IP:127.0.0.1,IP:10.96.0.1,IP:{address}", names.join(","));
        self.certificate("apiserver", "ca", "/CN=kube-apiserver", "serverAuth", &names)?;
        self.certificate("apiserver-kubelet", "ca", "/O=system:masters/CN=apiserver-kubelet-client", "clientAuth", "")?;
        self.certificate("front-client", "front", "/CN=front-proxy-client", "clientAuth", "")?;
        self.kubeconfig("admin", "/O=system:masters/CN=admin")?;
        self.kubeconfig("controller-manager", "/CN=system:kube-controller-manager")?;
        self.kubeconfig("scheduler", "/CN=system:kube-scheduler")?;
        self.kubeconfig("proxy", "/CN=system:kube-proxy")?;
        self.openssl(&["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key"])?;
        self.openssl(&["ec", "-in", "sa.key", "-pubout", "-out", "sa.pub"])
    }

    /// The kubelet's serving certificate and its kubeconfig.
    pub(crate) fn make_node(&self, name: &str, address: &str) -> Result<()> {
        let names = format!("DNS:{name},IP:{address},IP:127.0.0.1");
        self.certificate(&format!("kubelet-server-{name}"), "ca", &format!("/CN={name}"), "serverAuth", &names)?;
        self.kubeconfig(&format!("kubelet-{name}"), &format!("/O=system:nodes/CN=system:node:{name}"))
    }

    fn create_ca(&self, file: &str, name: &str) -> Result<()> {
        let (key, crt, subject) = (format!("{file}.key"), format!("{file}.crt"), format!("/CN={name}"));
        let mut arguments = vec!["req", "-x509", "-days", "3650", "-subj", &subject, "-keyout", &key, "-out", &crt];
        arguments.extend(KEY);
        arguments.extend(["-addext", "basicConstraints=critical,CA:TRUE"]);
        arguments.extend(["-addext", "keyUsage=critical,keyCertSign,digitalSignature"]);
        self.openssl(&arguments)
    }

    fn certificate(&self, file: &str, ca_name: &str, subject: &str, usage: &str, names: &str) -> Result<()> {
        let [key, csr, crt, ext] = ["key", "csr", "crt", "ext"].map(|it| format!("{file}.{it}"));
        let mut request = vec!["req", "-subj", subject, "-keyout", &key, "-out", &csr];
        request.extend(KEY);
        self.openssl(&request)?;
        let mut extensions =
            format!("basicConstraints=CA:FALSE\nkeyUsage=digitalSignature\nextendedKeyUsage={usage}\n");
        if !names.is_empty() {
            extensions += &format!("subjectAltName={names}\n");
        }
        fs::write(self.folder.join(&ext), extensions)?;
        let [ca, ca_key] = ["crt", "key"].map(|it| format!("{ca_name}.{it}"));
        // A serial number of its own for each: nodes are added side by side, and a file of serials would be shared.
        let serial = format!("0x{:x}", hash(file));
        self.openssl(&[
            "x509",
            "-req",
            "-in",
            &csr,
            "-CA",
            &ca,
            "-CAkey",
            &ca_key,
            "-set_serial",
            &serial,
            "-days",
            "3650",
            "-extfile",
            &ext,
            "-out",
            &crt,
        ])
    }

    fn kubeconfig(&self, name: &str, subject: &str) -> Result<()> {
        self.certificate(name, "ca", subject, "clientAuth", "")?;
        // JSON is YAML. Files are named, not copied: they stay where they are.
        let file = |name: &str| self.path(name).to_string_lossy().into_owned();
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": self.server, "certificate-authority": file("ca.crt")}}],
            "users": [{"name": "u", "user": {
                "client-certificate": file(&format!("{name}.crt")), "client-key": file(&format!("{name}.key"))}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        let path = self.path(&format!("{name}.kubeconfig"));
        fs::write(&path, config.to_string()).with_context(|| format!("failed to write {}", path.display()))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn openssl(&self, arguments: &[&str]) -> Result<()> {
        process::read(Command::new("openssl").args(arguments).current_dir(self.folder), b"", LIMIT).map(drop)
    }
}

/// A serial number from a file's name (FNV-1a).
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)) >> 1
}
