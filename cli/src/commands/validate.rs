//! `engram validate`: everything that is wrong with a manifest, at once.

use crate::args::Context;
use crate::commands::manifest;
use engram_api::{ExitCode, Needs};
use std::path::PathBuf;

/// Check manifests; nothing is started or changed
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram validate cluster.yaml
  engram validate examples/*.yaml")]
pub(crate) struct Arguments {
    /// Files to check; `-` is stdin
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let mut first = None;
    for file in &arguments.files {
        match manifest::read(file, Needs::Anything) {
            Ok(manifest) => {
                let objects = manifest.cluster.iter().count() + manifest.runs.len();
                manifest::tell_notes(&manifest, context);
                context.output.note(format!("{}: {objects} object(s), valid", file.display()));
            }
            // Every file is checked; the first failure decides how the command ends.
            Err(error) if first.is_none() => first = Some(error),
            Err(error) => drop(crate::error::report(&error, context)),
        }
    }
    first.map_or(Ok(ExitCode::Ok), Err)
}
