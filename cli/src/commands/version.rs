//! `engram version`: versions of the client and of the cluster.

use crate::context::Context;
use crate::output::Table;
use crate::target::Target;
use engram_api::ExitCode;
use serde_json::json;

/// Commit that this program was built from, or `unknown`; see build.rs.
const COMMIT: &str = env!("ENGRAM_COMMIT");

/// Print the versions of the client and of the workers
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram version
  engram version --client -o json")]
pub(crate) struct Version {
    /// Print the client version only
    #[arg(long)]
    client: bool,
}

pub(crate) async fn run(arguments: &Version, context: &Context) -> anyhow::Result<ExitCode> {
    let mut workers = Vec::new();
    // Without a cluster only the client version is printed.
    if !arguments.client
        && let Ok(target) = Target::find(context).await
    {
        for (ordinal, endpoint) in target.admin_endpoints() {
            if let Ok(status) = crate::local::admin::status(&endpoint).await {
                workers.push(json!({ "worker": ordinal, "version": status.version }));
            }
        }
    }
    let mut table = Table::new(&["component", "version", "commit"]);
    table.row(["engram", env!("CARGO_PKG_VERSION"), COMMIT]);
    for worker in &workers {
        let version = worker["version"].as_str().unwrap_or("-").to_owned();
        table.row([format!("worker-{}", worker["worker"]), version, "-".to_owned()]);
    }
    let object = json!({
        "apiVersion": engram_api::API_VERSION, "kind": "Version",
        "client": env!("CARGO_PKG_VERSION"), "commit": COMMIT, "workers": workers,
    });
    context.output.object(&object, &table)?;
    Ok(ExitCode::Ok)
}
