//! `engram manifests`: Kubernetes manifests of the CRDs and the operator, for installations without Helm.

use crate::context::Context;
use engram_api::ExitCode;
use engram_api::crd::{PLURALS, to_yaml};

/// Output of the chart with default values, without CRDs.
const OPERATOR: &str = include_str!("../../../deploy/operator.yaml");

/// ValidatingAdmissionPolicy for PartitionMaps: cluster-scoped like the CRDs. The operator's part includes it too.
const POLICY: &str = include_str!("../../../charts/engram/files/policy.yaml");

/// Print Kubernetes manifests to install Engram without Helm
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram manifests | kubectl apply --server-side -f -
  engram manifests crds | kubectl apply --server-side -f -")]
pub(crate) struct Manifests {
    /// Part to print
    #[arg(value_enum, default_value_t = Part::All)]
    part: Part,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// CRDs and operator
    All,
    /// CustomResourceDefinitions and the admission policy for PartitionMaps
    Crds,
    /// Operator in namespace engram-system, watching all namespaces
    Operator,
}

pub(crate) fn run(arguments: &Manifests, context: &Context) -> anyhow::Result<ExitCode> {
    let definitions = PLURALS.iter().filter(|_| arguments.part != Part::Operator).filter_map(|plural| to_yaml(plural));
    let remainder = if arguments.part == Part::Crds { POLICY } else { OPERATOR };
    let documents: Vec<String> = definitions.chain([remainder.to_owned()]).collect();
    context.output.text(&documents.join("---\n"))?;
    Ok(ExitCode::Ok)
}
