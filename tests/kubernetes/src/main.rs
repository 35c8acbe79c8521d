//! `engram-test-cluster`: starts and ends the cluster, runs suites on it, and is every small program that lives in it.
#![forbid(unsafe_code)]

use anyhow::{Context as _, Result, bail};
use clap::{Parser, Subcommand};
use engram_kubernetes_tests::{
    Api, Cluster, Content, Image, Options, Skip, fake_kubelet, holder, host, panics, programs, provisioner, rights,
    suites, tool, write_archive,
};
use nix::sys::signal::{SigSet, Signal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Parser)]
#[command(about = "A real Kubernetes cluster on this machine, and the tests that run on it", max_term_width = 100)]
#[command(args_conflicts_with_subcommands = true)]
struct Arguments {
    /// The long campaign of faults: an hour; its result goes to docs/results/kubernetes-faults.json
    #[arg(long)]
    campaign: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Starts a cluster and leaves it running
    Up(Shape),
    /// Ends the cluster; the machine is as it was
    Down {
        /// Keeps the folder with the logs
        #[arg(long)]
        keep: bool,
    },
    /// kubectl inside the cluster
    Kubectl {
        /// Its command line
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Imports an image (an OCI or Docker archive) into every node
    LoadImage {
        /// As written by `docker save` or `buildah push ... oci-archive:`
        archive: PathBuf,
    },
    /// Packs a program, with the libraries that it is linked to, as an image that load-image takes
    PackImage {
        /// The archive to write
        archive: PathBuf,
        /// `host/repository:tag`; more than one gives one image several tags
        #[arg(long, required = true)]
        name: Vec<String>,
        /// The program; it lies in /bin, and is what the image starts
        #[arg(long)]
        program: PathBuf,
        /// A further file
        #[arg(long, value_name = "INSIDE=FILE")]
        file: Vec<String>,
        /// Who runs it
        #[arg(long, value_name = "UID:GID", default_value = "65532:65532")]
        user: String,
    },
    /// Starts a cluster, runs the suites, ends it, and checks that nothing is left behind
    Run {
        /// Suites to run; all of them but the campaign when none is named
        #[arg(value_parser = suites::names())]
        suites: Vec<String>,
        /// Uses the cluster that is up, and leaves it up
        #[arg(long)]
        keep: bool,
        /// Only the checks whose name contains this
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
        /// Uses the cluster of this kubeconfig (kind or the like) through its API server; what needs control over nodes is skipped
        #[arg(long, value_name = "FILE", conflicts_with = "keep")]
        kubeconfig: Option<PathBuf>,
        /// Command that loads an image archive, whose path is added, into the nodes of that cluster: "kind load image-archive"
        #[arg(long, value_name = "COMMAND", default_value = "", requires = "kubeconfig")]
        image_loader: String,
    },
    /// Prints the folder of the Kubernetes programs; finds, unpacks or builds them first
    Programs,
    /// First process of a node
    #[command(hide = true)]
    Hold { name: String, ready: PathBuf },
    /// First process of a pod
    #[command(hide = true)]
    Pause,
    /// Volumes for claims of the default class
    #[command(hide = true)]
    Provision { socket: PathBuf, folder: PathBuf },
    /// Stand-ins for kubelets
    #[command(hide = true)]
    FakeKubelet { socket: PathBuf, nodes: Vec<String> },
    /// What test pods do
    #[command(hide = true, subcommand)]
    Tool(tool::Command),
}

#[derive(clap::Args, Clone, Copy)]
struct Shape {
    /// Nodes; of several, the first is tainted as the control plane's own
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=9))]
    nodes: u8,
    /// Fake kubelets: pods turn Ready and no container runs
    #[arg(long)]
    fake: bool,
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(code) => code,
        Err(error) if error.is::<Skip>() => {
            eprintln!("{error:#}");
            ExitCode::from(Skip::STATUS)
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<ExitCode> {
    let suites = if arguments.campaign { vec![suites::CAMPAIGN.to_owned()] } else { Vec::new() };
    match arguments.command.unwrap_or(Command::Run {
        suites,
        keep: false,
        only: None,
        kubeconfig: None,
        image_loader: String::new(),
    }) {
        Command::Up(shape) => {
            let cluster = Cluster::start(Options { nodes: shape.nodes, fake: shape.fake })?;
            println!("up: {}", cluster.folder().display());
            println!("kubectl: cargo xtask kubernetes kubectl get pods -A");
        }
        Command::Down { keep } => Cluster::attach()?.stop(keep)?,
        Command::Kubectl { arguments } => return kubectl(&arguments),
        Command::LoadImage { archive } => {
            let archive = archive.canonicalize().with_context(|| format!("no image at {}", archive.display()))?;
            Cluster::attach()?.load_image(&archive)?;
        }
        Command::PackImage { archive, name, program, file, user } => pack(&archive, &name, &program, &file, &user)?,
        Command::Run { suites, only, kubeconfig: Some(kubeconfig), image_loader, .. } => {
            let cluster = Cluster::given(&kubeconfig, &image_loader)?;
            return test_given(&cluster, &suites, only.as_deref());
        }
        Command::Run { suites, keep, only, .. } => return test(&suites, keep, only.as_deref()),
        Command::Programs => println!("{}", programs::find()?.display()),
        Command::Hold { name, ready } => holder::hold(&name, &ready)?,
        Command::Pause => holder::pause()?,
        Command::Provision { socket, folder } => provisioner::run(&Api::new(socket), &folder),
        Command::FakeKubelet { socket, nodes } => fake_kubelet::run(&Api::new(socket), &nodes),
        Command::Tool(command) => tool::run(command)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn pack(archive: &Path, names: &[String], program: &Path, files: &[String], user: &str) -> Result<()> {
    let inside = format!("/bin/{}", program.file_name().context("--program names no file")?.to_string_lossy());
    let mut content = Content::default().program(&inside, program)?;
    for file in files {
        let (inside, outside) = file.split_once('=').with_context(|| format!("--file {file} is not INSIDE=FILE"))?;
        content = content.file(inside, Path::new(outside));
    }
    let entrypoint = [inside.as_str()];
    let image = |name| Image { name, content: &content, entrypoint: &entrypoint, user };
    write_archive(archive, &names.iter().map(|name| image(name.as_str())).collect::<Vec<_>>())
}

/// Runs kubectl attached to this process's terminal.
fn kubectl(arguments: &[String]) -> Result<ExitCode> {
    let status = Cluster::attach()?.kubectl_command(arguments)?.status()?;
    Ok(ExitCode::from(status.code().and_then(|it| u8::try_from(it).ok()).unwrap_or(1)))
}

/// Runs suites on a cluster that was not started here.
fn test_given(cluster: &Cluster, names: &[String], only: Option<&str>) -> Result<ExitCode> {
    cluster.load_tools().context("failed to load the images of the test pods")?;
    let mut summary = suites::Summary::default();
    suites::run(cluster, names, only, &mut summary);
    println!("\n{summary}");
    Ok(match summary {
        suites::Summary { failed: 1.., .. } => ExitCode::FAILURE,
        suites::Summary { passed: 0, .. } => ExitCode::from(Skip::STATUS),
        _ => ExitCode::SUCCESS,
    })
}

fn test(names: &[String], keep: bool, only: Option<&str>) -> Result<ExitCode> {
    let mut summary = suites::Summary::default();
    if keep {
        let cluster = Cluster::attach()?;
        cluster.join_clients()?;
        suites::run(&cluster, names, only, &mut summary);
    } else {
        end_when_interrupted()?;
        let mut audit = rights::AuditReport::default();
        for options in suites::clusters(names) {
            let before = host::State::read()?;
            let cluster = Cluster::start(options)?;
            let failed = summary.failed;
            cluster.join_clients()?;
            let watch = panics::PanicWatch::start(&cluster);
            suites::run(&cluster, names, only, &mut summary);
            summary.record("no program has panicked", || watch.finish());
            summary.record("all requests to the API server are granted", || audit.read(&cluster));
            let keep = summary.failed > failed;
            cluster.stop(keep)?;
            if keep {
                println!("the logs are in {}", cluster.folder().display());
            }
            summary.record("nothing is left behind", || {
                let left = host::State::settled(&before)?;
                if !left.is_empty() {
                    bail!("left behind or changed: {}", left.join("; "));
                }
                Ok("processes, mounts, links, cgroups, sysctls as before".into())
            });
            if keep {
                // Another cluster would overwrite the logs in the same folder.
                break;
            }
        }
        // Meaningful only if all suites ran completely.
        if summary.failed == 0 && only.is_none() && rights::AuditReport::sees_all(names) {
            summary.record("every granted permission was used", || audit.all_used());
        }
    }
    println!("\n{summary}");
    Ok(if summary.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Makes SIGINT and SIGTERM stop the cluster.
fn end_when_interrupted() -> Result<()> {
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    // Before any other thread exists, so that only the thread below receives the signals. Daemons are started with none blocked
    // (cluster.rs).
    signals.thread_block()?;
    std::thread::spawn(move || {
        let signal = signals.wait();
        eprintln!("interrupted ({signal:?}): ending the cluster");
        if let Err(error) = Cluster::attach().and_then(|it| it.stop(true)) {
            eprintln!("{error:#}");
        }
        std::process::exit(130);
    });
    Ok(())
}
