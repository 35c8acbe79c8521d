//! `engram validate`: reports all errors of manifests.

use crate::commands::manifest;
use crate::context::Context;
use engram_api::{ExitCode, Requirement};
use std::path::PathBuf;

/// Validate manifests without starting anything
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram validate cluster.yaml
  engram validate examples/*.yaml")]
pub(crate) struct Validate {
    /// Manifests to validate; `-` is stdin
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

pub(crate) fn run(arguments: &Validate, context: &Context) -> anyhow::Result<ExitCode> {
    let mut first = None;
    for file in &arguments.files {
        match manifest::read(file, Requirement::Anything) {
            Ok(manifest) => {
                let objects = manifest.cluster.iter().count() + manifest.runs.len();
                manifest::print_notes(&manifest, context);
                context.output.note(format!("{}: {objects} object(s), valid", file.display()));
            }
            // All files are validated; the first error decides the exit code.
            Err(error) if first.is_none() => first = Some(error),
            Err(error) => drop(crate::error::report(&error, context)),
        }
    }
    first.map_or(Ok(ExitCode::Ok), Err)
}
