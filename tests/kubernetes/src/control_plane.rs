//! etcd, the API server, the controllers and the scheduler, in node 1.

use crate::certificates::Certificates;
use crate::cluster::Cluster;
use crate::network::address;
use crate::process::until;
use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// Deadline of a start on a machine that is also compiling.
const START: Duration = Duration::from_secs(60);

/// Flags that name a file of the certificates' folder.
const API_SERVER_FILES: [(&str, &str); 11] = [
    ("tls-cert-file", "apiserver.crt"),
    ("tls-private-key-file", "apiserver.key"),
    ("client-ca-file", "ca.crt"),
    ("service-account-key-file", "sa.pub"),
    ("service-account-signing-key-file", "sa.key"),
    ("kubelet-client-certificate", "apiserver-kubelet.crt"),
    ("kubelet-client-key", "apiserver-kubelet.key"),
    ("kubelet-certificate-authority", "ca.crt"),
    ("requestheader-client-ca-file", "front.crt"),
    ("proxy-client-cert-file", "front-client.crt"),
    ("proxy-client-key-file", "front-client.key"),
];

impl Cluster {
    pub(crate) fn certificates<T>(&self, with: impl FnOnce(Certificates<'_>) -> Result<T>) -> Result<T> {
        let server = format!("https://{}:6443", address(1));
        with(Certificates::new(&self.path("certificates"), &server))
    }

    fn certificate(&self, name: &str) -> String {
        self.path("certificates").join(name).to_string_lossy().into_owned()
    }

    /// Starts all of it and waits until controllers are at work.
    pub(crate) fn start_control_plane(&self) -> Result<()> {
        self.certificates(|it| it.make_cluster(&address(1)))?;
        let arguments = [
            // In memory, as all else that a node writes for itself: flushes of volumes would wait for it on a disk that is theirs as well.
            "--data-dir=/run/etcd",
            "--unsafe-no-fsync",
            "--log-level=warn",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--initial-advertise-peer-urls=http://127.0.0.1:2380",
            "--initial-cluster=default=http://127.0.0.1:2380",
        ];
        self.start_daemon(1, "etcd", &self.kubernetes_program("etcd")?, &arguments)?;
        self.start_api()?;
        let arguments = [
            format!("--kubeconfig={}", self.kubeconfig("controller-manager")),
            format!("--service-account-private-key-file={}", self.certificate("sa.key")),
            format!("--root-ca-file={}", self.certificate("ca.crt")),
            format!("--cluster-signing-cert-file={}", self.certificate("ca.crt")),
            format!("--cluster-signing-key-file={}", self.certificate("ca.key")),
            "--leader-elect=false".into(),
            "--bind-address=127.0.0.1".into(),
            "--use-service-account-credentials=true".into(),
            "--cluster-cidr=10.244.0.0/16".into(),
            "--allocate-node-cidrs=false".into(),
            "--service-cluster-ip-range=10.96.0.0/16".into(),
            // Half of the default, so that tests of a node's death take half as long.
            "--node-monitor-grace-period=20s".into(),
        ];
        self.start_daemon(1, "controllers", &self.kubernetes_program("kube-controller-manager")?, &arguments)?;
        let arguments = [
            format!("--kubeconfig={}", self.kubeconfig("scheduler")),
            "--leader-elect=false".into(),
            "--bind-address=127.0.0.1".into(),
        ];
        self.start_daemon(1, "scheduler", &self.kubernetes_program("kube-scheduler")?, &arguments)?;
        until("the controllers", START, || self.api().find("/api/v1/namespaces/default/serviceaccounts/default"))
            .with_context(|| self.tail(1, "controllers"))?;
        Ok(())
    }

    /// Starts the API server and waits until it is ready.
    ///
    /// # Errors
    /// It is not within a minute.
    pub fn start_api(&self) -> Result<()> {
        let own = address(1);
        let mut arguments: Vec<String> =
            API_SERVER_FILES.iter().map(|(flag, file)| format!("--{flag}={}", self.certificate(file))).collect();
        // Not loopback: the Service `kubernetes` would be refused that endpoint.
        arguments.extend([format!("--bind-address={own}"), format!("--advertise-address={own}")]);
        arguments.extend(
            [
                "--secure-port=6443",
                "--etcd-servers=http://127.0.0.1:2379",
                "--allow-privileged=true",
                "--profiling=false",
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--authorization-mode=Node,RBAC",
                // The second as on OpenShift: blocking an owner's deletion needs a right of its own.
                "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
                "--kubelet-preferred-address-types=InternalIP",
                "--requestheader-allowed-names=front-proxy-client",
                "--requestheader-username-headers=X-Remote-User",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            ]
            .map(String::from),
        );
        // What operator and workers ask for is compared with what they may, when suites are over.
        let policy = self.path("certificates").join("audit.yaml");
        fs::write(&policy, crate::rights::POLICY)?;
        arguments.push(format!("--audit-policy-file={}", policy.display()));
        arguments.push(format!("--audit-log-path={}", self.path("log").join("audit.log").display()));
        self.start_daemon(1, "apiserver", &self.kubernetes_program("kube-apiserver")?, &arguments)?;
        if !self.socket().exists() {
            let arguments = ["proxy".to_owned(), format!("--unix-socket={}", self.socket().display())];
            let config = format!("--kubeconfig={}", self.kubeconfig("admin"));
            self.start_daemon(1, "proxy", &self.kubernetes_program("kubectl")?, &[&arguments[..], &[config]].concat())?;
        }
        until("the API server", START, || {
            let ready = self.kubectl_command(["get", "--raw", "/readyz", "--request-timeout=3s"])?.output()?;
            Ok((ready.status.success() && self.socket().exists()).then_some(()))
        })
        .with_context(|| self.tail(1, "apiserver"))
    }

    /// Kills the API server; etcd lives on.
    ///
    /// # Errors
    /// It lives on.
    pub fn stop_api(&self) -> Result<()> {
        // The outage begins at once, without the grace of an orderly stop.
        self.end_daemon(1, "apiserver", Signal::SIGKILL)
    }

    /// What is packed of the cluster's own programs: `tools` under two tags, DNS, and the S3 server where there is one.
    pub(crate) fn pack_images(&self) -> Result<()> {
        use crate::image::{Content, Image, write_archive};
        self.pack_tools()?;
        let images = self.path("images");
        let dns = Content::default().program("/coredns", &self.kubernetes_program("coredns")?)?;
        let dns = Image { name: "local.test/coredns:1", content: &dns, entrypoint: &["/coredns"], user: "" };
        write_archive(&images.join("n1-coredns.tar"), &[dns])?;
        if let Ok(s3) = self.kubernetes_program("versitygw") {
            let s3 = Content::default().program("/s3", &s3)?;
            let s3 = Image { name: "local.test/s3:1", content: &s3, entrypoint: &["/s3"], user: "65532:65532" };
            write_archive(&images.join("n1-s3.tar"), &[s3])?;
        }
        Ok(())
    }

    /// Writes the archive with the images of the test pods, and returns its path.
    pub(crate) fn pack_tools(&self) -> Result<PathBuf> {
        use crate::image::{Content, Image, write_archive};
        let inside = format!("/bin/{}", crate::PROGRAM);
        let tools = Content::default().program(&inside, &self.program())?;
        let image = |name, entrypoint, user| Image { name, content: &tools, entrypoint, user };
        let images = self.path("images");
        fs::create_dir_all(&images)?;
        let archive = images.join("every-node.tar");
        write_archive(
            &archive,
            &[
                image("local.test/pause:1", &[&inside, "pause"], ""),
                // Two tags: a rolling change without a second build.
                image("local.test/tools:1", &[&inside, "tool"], "65532:65532"),
                image("local.test/tools:2", &[&inside, "tool"], "65532:65532"),
            ],
        )?;
        Ok(archive)
    }
}
