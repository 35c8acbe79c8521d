//! `cargo xtask images`: the images of the Dockerfile, as OCI archives under `target/images`.
//!
//! Nothing is pulled. Cargo builds the programs, and their base contains files of Debian packages installed on this machine, so that the image has
//! the C library that the programs link; only the last stages of the Dockerfile run. With `--from-source` all stages run, on a Debian base built
//! here. The same commit, toolchain and packages produce images with the same digest.

mod bases;
mod builder;
mod verify;

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use self::builder::Builder;
use crate::{kubernetes, process};

/// Version of the programs: the workspace's, which is also this package's.
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

    /// Environment variables for container runtimes with GPU support.
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
    /// Images to build
    #[arg(value_enum, default_values_t = [Target::Operator, Target::Worker, Target::WorkerCuda])]
    targets: Vec<Target>,
    /// Run every stage of the Dockerfile, on bases built here; also needs mmdebstrap
    #[arg(long)]
    from_source: bool,
    /// Use programs of the development profile: faster to build, but larger and slower
    #[arg(long, conflicts_with = "from_source")]
    debug: bool,
    /// Build each image twice and check that the digests match, that it has no shell, and that it starts as an unprivileged user
    #[arg(long)]
    verify: bool,
    /// Prefix of the names: PREFIX/operator, PREFIX/worker, PREFIX/worker-cuda. The default is that of the chart, which no public
    /// registry serves
    #[arg(long, value_name = "PREFIX", default_value = "localhost/engram")]
    prefix: String,
    /// Runtime base image to pull, instead of the C library of the build base
    #[arg(long, value_name = "IMAGE", requires = "from_source")]
    runtime_base: Option<String>,
    /// Build base image to pull
    #[arg(long, value_name = "IMAGE", requires = "from_source")]
    rust_base: Option<String>,
}

/// Builds the images and prints their paths.
///
/// # Errors
/// When buildah is missing, a step fails, or an image fails its checks.
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
            // Bases included, since they may differ between builds.
            self::arguments(builder, options)?;
            let again = builder.build(target, &name, &arguments)?;
            ensure!(digest == again, "{name} is not reproducible: {digest} and {again}");
        }
    }
    Ok(())
}

/// Builds the bases and returns the build arguments for the Dockerfile.
fn arguments(builder: &Builder, options: &Options) -> Result<Vec<String>> {
    if !options.from_source {
        bases::runtime(builder)?;
        for &target in &options.targets {
            bases::check_libraries(builder, target)?;
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
    // Both stages are passed explicitly, since buildah does not detect the dependency between them.
    let runtime = options.runtime_base.as_deref().unwrap_or("runtime");
    Ok(vec!["BINARIES=build".to_owned(), format!("RUST_BASE={rust}"), format!("RUNTIME_BASE={runtime}")])
}

/// Builds the programs and copies them, stripped, to where the Dockerfile expects them.
fn programs(folder: &Path, debug: bool) -> Result<()> {
    let built = if debug { kubernetes::build(false)? } else { kubernetes::build_images()? };
    for program in [Target::Operator, Target::Worker].map(Target::program) {
        let mut strip = Command::new("strip");
        process::run(strip.arg("-o").arg(folder.join(program)).arg(built.join(program)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;
    use clap::{CommandFactory as _, Parser};

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn images_have_the_names_of_the_chart_on_a_host_that_no_registry_serves() {
        let prefix = Arguments::parse_from(["images"]).options.prefix;
        let (registry, folder) = prefix.split_once('/').expect("a full name");
        assert_eq!(registry, "localhost");
        let read = |path: &str| std::fs::read_to_string(workspace::root().join(path)).expect("it is committed");
        let (values, page) = (read("charts/engram/values.yaml"), read("docs/install.md"));
        for target in [Target::Operator, Target::Worker, Target::WorkerCuda] {
            let repository = format!("registry: {registry}\n    repository: {folder}/{}\n", target.name());
            assert!(values.contains(&repository), "charts/engram/values.yaml lacks {repository}");
            let name = format!("`{prefix}/{}:{VERSION}`", target.name());
            assert!(page.contains(&name), "docs/install.md lacks {name}");
        }
        Arguments::command().debug_assert();
    }
}
