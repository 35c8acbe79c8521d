//! `engram config`: effective manifests and their JSON Schema.

use crate::commands::manifest;
use crate::context::Context;
use crate::error::problem;
use crate::output::Format;
use engram_api::{Code, ExitCode, Requirement};
use std::path::PathBuf;

/// Show the effective manifest or the JSON Schema
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram config show cluster.yaml --effective
  engram config schema > manifest.schema.json")]
pub(crate) struct Config {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, clap::Subcommand)]
enum ConfigCommand {
    /// Print a validated manifest
    #[command(before_help = "Examples:
  engram config show cluster.yaml               print the file after validation
  engram config show cluster.yaml --effective   with all defaults filled in")]
    Show {
        /// Path of the manifest; `-` is stdin
        file: PathBuf,
        /// Fill in all defaults
        #[arg(long)]
        effective: bool,
    },
    /// Print the JSON Schema of manifests, for completion and validation in editors
    #[command(before_help = "Examples:
  engram config schema > manifest.schema.json
  engram config schema LearnerRun")]
    Schema {
        /// Limit the schema to one kind: `LearnerCluster` or `LearnerRun`
        kind: Option<String>,
    },
}

pub(crate) fn run(arguments: &Config, context: &Context) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        ConfigCommand::Show { file, effective } => {
            let text = manifest::text(file)?;
            let manifest = engram_api::parse(&text, &file.display().to_string(), Requirement::Anything)?;
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
        ConfigCommand::Schema { kind } => {
            let schema = engram_api::schema(kind.as_deref()).ok_or_else(|| {
                let name = kind.as_deref().unwrap_or_default();
                problem(Code::NotOneOf, format!("kind is {name}; allowed: LearnerCluster, LearnerRun"))
            })?;
            context.output.value(&schema)?;
        }
    }
    Ok(ExitCode::Ok)
}
