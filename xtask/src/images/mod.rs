//! `cargo xtask images`: the images of the Dockerfile, as OCI archives under `target/images`.
//!
//! Nothing is pulled. Cargo builds the programs here, and their base is made of files of the Debian packages that are installed on this
//! machine, so that the C library of the image is the one that the programs were linked with; only the last stages of the Dockerfile run
//! then. With `--from-source` all stages do, on a Debian that is made here as well. The same commit, toolchain and packages give images of
//! the same digest.

mod bases;
mod builder;
mod verify;

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use self::builder::Builder;
use crate::workspace::Profile;
use crate::{kubernetes, process};

/// The version of the programs: the workspace's, which is this package's too.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A target of the Dockerfile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Target {
    /// The operator
    Operator,
    /// The worker
    Worker,
    /// The worker for nodes with NVIDIA GPUs
    WorkerCuda,
}

impl Target {
    const fn name(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Worker => "worker",
            Self::WorkerCuda => "worker-cuda",
        }
    }

    const fn program(self) -> &'static str {
        match self {
            Self::Operator => "engram-operator",
            Self::Worker | Self::WorkerCuda => "engram-worker",
        }
    }

    /// What a container runtime for GPUs reads in its environment.
    const fn environment(self) -> &'static [&'static str] {
        match self {
            Self::Operator => &[],
            Self::Worker => &["NVIDIA_DRIVER_CAPABILITIES=compute,utility"],
            Self::WorkerCuda => &["NVIDIA_DRIVER_CAPABILITIES=compute,utility", "NVIDIA_VISIBLE_DEVICES=all"],
        }
    }
}

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Which images
    #[arg(value_enum, default_values_t = [Target::Operator, Target::Worker, Target::WorkerCuda])]
    targets: Vec<Target>,
    /// Runs every stage of the Dockerfile, on bases that are made here; needs mmdebstrap too
    #[arg(long)]
    from_source: bool,
    /// Takes the programs of the development profile: built sooner, several times as large, and slower
    #[arg(long, conflicts_with = "from_source")]
    debug: bool,
    /// Makes each image twice, and checks that both are the same, have no shell, and start as nobody in particular
    #[arg(long)]
    verify: bool,
    /// What stands before the names: PREFIX/operator, PREFIX/worker, PREFIX/worker-cuda
    #[arg(long, value_name = "PREFIX", default_value = "engram")]
    prefix: String,
    /// An image for the programs to run on, which is pulled, instead of the C library of what they are built on
    #[arg(long, value_name = "IMAGE", requires = "from_source")]
    runtime_base: Option<String>,
    /// An image to build on, which is pulled
    #[arg(long, value_name = "IMAGE", requires = "from_source")]
    rust_base: Option<String>,
}

/// Makes the images and prints where they are.
///
/// # Errors
/// There is no buildah, a step fails, or an image is not what is promised of it.
pub(crate) fn run(options: &Options) -> Result<()> {
    let builder = Builder::new()?;
    let made = make(&builder, options);
    builder.clean()?;
    made
}

fn make(builder: &Builder, options: &Options) -> Result<()> {
    if !options.from_source {
        programs(&builder.folder, options.debug)?;
    }
    let arguments = arguments(builder, options)?;
    for &target in &options.targets {
        let name = format!("{}/{}:{VERSION}", options.prefix, target.name());
        let digest = builder.build(target, &name, &arguments)?;
        if options.verify {
            verify::image(builder, target, &name)?;
        }
        let archive = builder.archive(target);
        let size = archive.metadata().map_or(0, |metadata| metadata.len());
        println!("{} ({:.1} MiB) {digest}", archive.display(), size as f64 / f64::from(1 << 20));
        if options.verify {
            // From the bases on: what differs from one making to the next may lie there.
            self::arguments(builder, options)?;
            let again = builder.build(target, &name, &arguments)?;
            ensure!(digest == again, "{name} is {digest}, and made once more {again}");
        }
    }
    Ok(())
}

/// Makes the bases, and says of what the Dockerfile makes the images.
fn arguments(builder: &Builder, options: &Options) -> Result<Vec<String>> {
    if !options.from_source {
        bases::runtime(builder)?;
        for &target in &options.targets {
            bases::suits(builder, target)?;
        }
        return Ok(vec!["BINARIES=prebuilt".to_owned(), format!("RUNTIME_BASE={}", bases::RUNTIME)]);
    }
    let rust = match &options.rust_base {
        Some(image) => image,
        None => {
            bases::rust(builder)?;
            bases::RUST
        }
    };
    // The Dockerfile names both stages as well, where buildah does not see that another needs them.
    let runtime = options.runtime_base.as_deref().unwrap_or("runtime");
    Ok(vec!["BINARIES=build".to_owned(), format!("RUST_BASE={rust}"), format!("RUNTIME_BASE={runtime}")])
}

/// Builds the programs and puts them, without symbols, where the Dockerfile takes them from.
fn programs(folder: &Path, debug: bool) -> Result<()> {
    let built = if debug {
        kubernetes::build(false)?
    } else {
        let packages = ["--package", "engram-operator", "--package", "engram-worker", "--bins"];
        process::run(Profile::Release.cargo("build", ["--locked"]).args(packages))?;
        Profile::Release.folder()
    };
    for program in [Target::Operator, Target::Worker].map(Target::program) {
        let mut strip = Command::new("strip");
        process::run(strip.arg("-o").arg(folder.join(program)).arg(built.join(program)))?;
    }
    Ok(())
}
