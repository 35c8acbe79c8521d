//! `engram config`: what a manifest means, and what it may say.

use crate::args::Context;
use crate::commands::manifest;
use crate::error::problem;
use crate::output::Format;
use engram_api::{Code, ExitCode, Needs};
use std::path::PathBuf;

/// Show what a manifest means, or what it may say
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram config show cluster.yaml --effective
  engram config schema > manifest.schema.json")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Print a manifest as it was understood
    #[command(before_help = "Examples:
  engram config show cluster.yaml               the file, checked
  engram config show cluster.yaml --effective   with every default filled in")]
    Show {
        /// The manifest; `-` is stdin
        file: PathBuf,
        /// Fill in every default
        #[arg(long)]
        effective: bool,
    },
    /// Print the JSON Schema of manifests, with which editors complete and check them
    #[command(before_help = "Examples:
  engram config schema > manifest.schema.json
  engram config schema LearnerRun")]
    Schema {
        /// One kind only: `LearnerCluster` or `LearnerRun`
        kind: Option<String>,
    },
}

pub(crate) fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        Command::Show { file, effective } => {
            let text = manifest::text(file)?;
            let manifest = engram_api::parse(&text, &file.display().to_string(), Needs::Anything)?;
            if context.output.format == Format::Json {
                let documents: Vec<serde_json::Value> = manifest
                    .cluster
                    .iter()
                    .map(serde_json::to_value)
                    .chain(manifest.runs.iter().map(|run| {
                        let cluster = manifest.cluster.as_ref().map(|cluster| &cluster.spec);
                        let spec = if *effective { run.spec.effective(cluster) } else { run.spec.clone() };
                        serde_json::to_value(engram_api::LearnerRun { spec, ..run.clone() })
                    }))
                    .collect::<Result<_, _>>()?;
                context.output.value(&serde_json::json!({
                    "apiVersion": engram_api::API_VERSION, "kind": "List", "items": documents
                }))?;
            } else if *effective {
                context.output.text(&manifest.to_effective_yaml())?;
            } else {
                context.output.text(&text)?;
            }
        }
        Command::Schema { kind } => {
            let schema = engram_api::schema(kind.as_deref()).ok_or_else(|| {
                let word = kind.as_deref().unwrap_or_default();
                problem(Code::NotOneOf, format!("kind is {word}; allowed: LearnerCluster, LearnerRun"))
            })?;
            context.output.value(&schema)?;
        }
    }
    Ok(ExitCode::Ok)
}
