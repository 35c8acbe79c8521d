//! `engram manifests`: what a cluster of Kubernetes needs for Engram, for people without Helm.

use crate::args::Context;
use engram_api::ExitCode;
use engram_api::crd::{PLURALS, to_yaml};

/// What the chart makes with its defaults, the definitions aside.
const OPERATOR: &str = include_str!("../../../deploy/operator.yaml");

/// What guards PartitionMaps: it holds for all namespaces, as definitions do, and the operator's part has it too.
const POLICY: &str = include_str!("../../../charts/engram/files/policy.yaml");

/// Print what Kubernetes needs for Engram: definitions and operator
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram manifests | kubectl apply --server-side -f -
  engram manifests crds | kubectl apply --server-side -f -")]
pub(crate) struct Arguments {
    /// Which part
    #[arg(value_enum, default_value_t = Part::All)]
    part: Part,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Definitions and operator
    All,
    /// The CustomResourceDefinitions, and the policy that guards PartitionMaps
    Crds,
    /// The operator in namespace engram-system, for all namespaces
    Operator,
}

pub(crate) fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let definitions = PLURALS.iter().filter(|_| arguments.part != Part::Operator).filter_map(|plural| to_yaml(plural));
    let rest = if arguments.part == Part::Crds { POLICY } else { OPERATOR };
    let all: Vec<String> = definitions.chain([rest.to_owned()]).collect();
    context.output.text(&all.join("---\n"))?;
    Ok(ExitCode::Ok)
}
