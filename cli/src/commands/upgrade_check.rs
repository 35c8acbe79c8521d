//! `engram upgrade-check`: whether a cluster can be upgraded to this build, without changing anything.
//!
//! Three versions must be compatible: the protocol between processes, because an upgrade replaces workers one by one; the disk
//! format; and the stored versions of the custom resources.

use crate::context::{ClusterArgument, Context};
use crate::error::{self, Exit};
use crate::kubernetes::UpgradeState;
use crate::local::admin;
use crate::output::Table;
use crate::target::Target;
use engram_api::ExitCode;
use engram_proto::protocol;
use engram_proto::v1;
use serde::Serialize;
use std::collections::BTreeSet;

/// Check whether a cluster can be upgraded to this build
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram upgrade-check
  engram upgrade-check -o json | jq -r '.findings[].message'
  engram -n research upgrade-check words      LearnerCluster words in Kubernetes

Exit codes: 0 compatible, 8 incompatible, 4 a process does not respond.")]
pub(crate) struct UpgradeCheck {
    #[command(flatten)]
    cluster: ClusterArgument,
}

/// A process and its versions; `None` if it does not respond.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Component {
    name: String,
    versions: Option<Versions>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Versions {
    version: String,
    /// Oldest and newest supported protocol version.
    protocol: [u32; 2],
    /// Version of the files that it writes; absent for the coordinator, which has none.
    disk_format: Option<u32>,
}

impl Versions {
    /// Creates versions as reported; 0 stands for version 1, which did not report itself.
    fn new(version: &str, protocol: [u32; 2], disk_format: Option<u32>) -> Self {
        let protocol = if protocol == [0, 0] { [1, 1] } else { protocol };
        Self { version: version.to_owned(), protocol, disk_format: disk_format.map(|format| format.max(1)) }
    }

    /// Returns the versions of this build.
    fn own() -> Self {
        let format = engram_store::FileHead::VERSION;
        Self::new(env!("CARGO_PKG_VERSION"), [protocol::OLDEST, protocol::NEWEST], Some(format))
    }
}

impl From<&v1::WorkerStatus> for Versions {
    fn from(status: &v1::WorkerStatus) -> Self {
        Self::new(&status.version, [status.protocol_min, status.protocol_max], Some(status.disk_format))
    }
}

/// One finding of the check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Finding {
    severity: Severity,
    message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
enum Severity {
    /// The upgrade is not possible.
    Blocks,
    /// Compatibility is unknown.
    Unknown,
    /// For information.
    Note,
}

pub(crate) async fn run(arguments: &UpgradeCheck, context: &Context) -> anyhow::Result<ExitCode> {
    let target = Target::find(&context.for_cluster(&arguments.cluster)).await?;
    let components = components(&target, context).await?;
    let kubernetes = match &target {
        Target::Kubernetes(cluster) => Some(cluster.upgrade().await?),
        Target::Local(_) | Target::Remote(..) => None,
    };
    let findings = check(&Versions::own(), &components, kubernetes.as_ref());
    let has = |severity| findings.iter().any(|finding| finding.severity == severity);
    let code = match () {
        () if has(Severity::Blocks) => ExitCode::Incompatible,
        () if has(Severity::Unknown) => ExitCode::NotReady,
        () => ExitCode::Ok,
    };
    if context.output.is_structured() {
        context.output.value(&serde_json::json!({
            "apiVersion": engram_api::API_VERSION, "kind": "UpgradeCheck", "build": Versions::own(),
            "components": components, "kubernetes": kubernetes, "findings": findings, "possible": code == ExitCode::Ok,
        }))?;
    } else {
        context.output.text(&text(&components, &findings, context))?;
    }
    if code == ExitCode::Ok { Ok(code) } else { Err(Exit(code).into()) }
}

/// Reads the versions of coordinator and workers.
async fn components(target: &Target, context: &Context) -> anyhow::Result<Vec<Component>> {
    if let Target::Remote(..) = target {
        let message = "this command needs the admin ports of the workers, and --address names client ports only";
        return Err(error::failure(ExitCode::Usage, message));
    }
    let coordinator = async {
        let (endpoint, cluster) = target.coordinator().await?;
        admin::cluster(&endpoint, cluster).await
    };
    let versions = match coordinator.await {
        Ok(status) => Some(Versions::new(&status.version, [status.protocol_min, status.protocol_max], None)),
        Err(error) => {
            context.output.note(format!("note: {error:#}"));
            None
        }
    };
    let mut components = vec![Component { name: "coordinator".into(), versions }];
    let admin_endpoints = target.admin_endpoints();
    if let Target::Kubernetes(cluster) = target {
        // Pods without an address cannot be queried.
        let absent = cluster
            .workers
            .iter()
            .filter(|worker| admin_endpoints.iter().all(|(ordinal, _)| *ordinal != worker.ordinal));
        components
            .extend(absent.map(|worker| Component { name: format!("worker-{}", worker.ordinal), versions: None }));
    }
    for (ordinal, endpoint) in admin_endpoints {
        let versions = admin::status(&endpoint).await.ok().as_ref().map(Versions::from);
        components.push(Component { name: format!("worker-{ordinal}"), versions });
    }
    Ok(components)
}

/// Compares the versions of a cluster with those of a build.
fn check(own: &Versions, components: &[Component], kubernetes: Option<&UpgradeState>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |severity, message| findings.push(Finding { severity, message });
    let mut versions = BTreeSet::new();
    for Component { name, versions: reported } in components {
        let Some(reported) = reported else {
            add(Severity::Unknown, format!("{name} does not respond; its compatibility is unknown"));
            continue;
        };
        versions.insert(reported.version.as_str());
        let ([oldest, newest], [ours, our_newest]) = (reported.protocol, own.protocol);
        if oldest.max(ours) > newest.min(our_newest) {
            let message = format!(
                "{name} supports protocol {oldest} to {newest}, this build {ours} to {our_newest}: old and new workers could not communicate \
                 during a rolling upgrade; upgrade to an intermediate release first"
            );
            add(Severity::Blocks, message);
        }
        if let (Some(format), Some(supported)) = (reported.disk_format, own.disk_format)
            && format != supported
        {
            let message = format!(
                "{name} writes disk format {format}, and this build supports {supported}: a new worker would not start on that disk"
            );
            add(Severity::Blocks, message);
        }
    }
    let stored = kubernetes.map(|kubernetes| &kubernetes.stored);
    match stored {
        Some(Some(stored)) => {
            for (definition, stored) in stored {
                for version in stored.iter().filter(|version| *version != engram_api::crd::VERSION) {
                    let message = format!(
                        "objects of {definition} are stored as {version}, which the operator of this build does not support"
                    );
                    add(Severity::Blocks, message);
                }
            }
        }
        Some(None) => {
            let permission = "get customresourcedefinitions";
            add(Severity::Note, format!("stored versions were not checked: missing permission to {permission}"));
        }
        None => {}
    }
    if let Some(available) = kubernetes.and_then(|kubernetes| kubernetes.available.as_ref()) {
        add(Severity::Note, available.clone());
    }
    if versions.len() > 1 {
        let versions: Vec<&str> = versions.iter().copied().collect();
        add(Severity::Note, format!("an upgrade is in progress: {} are running", versions.join(" and ")));
    }
    let same = versions.iter().all(|version| *version == own.version) && !versions.is_empty();
    if !findings.iter().any(|finding| finding.severity != Severity::Note) {
        let message = match (same, kubernetes.is_some()) {
            (true, _) => format!("all processes already run {}", own.version),
            (false, true) => "compatible: helm upgrade replaces the operator without restarting workers; then annotate the cluster as \
                              condition UpdateAvailable describes, or set spec.version, to upgrade the workers one by one"
                .to_owned(),
            (false, false) => "compatible: run `engram down`, then `engram up FILE` with this build; the cluster is unavailable in between, its data is kept".to_owned(),
        };
        findings.push(Finding { severity: Severity::Note, message });
    }
    findings
}

fn text(components: &[Component], findings: &[Finding], context: &Context) -> String {
    let own = Component { name: "this build".into(), versions: Some(Versions::own()) };
    let mut table = Table::new(&["component", "version", "protocol", "disk format"]);
    for Component { name, versions } in [&own].into_iter().chain(components) {
        let none = || ["-", "-", "-"].map(str::to_owned);
        let [version, protocol, format] = versions.as_ref().map_or_else(none, |versions| {
            let [oldest, newest] = versions.protocol;
            let protocol = if oldest == newest { oldest.to_string() } else { format!("{oldest} to {newest}") };
            let format = versions.disk_format.map_or_else(|| "-".into(), |format| format.to_string());
            [versions.version.clone(), protocol, format]
        });
        table.row([name.clone(), version, protocol, format]);
    }
    let mut text = table.render(&context.output);
    for Finding { severity, message } in findings {
        let mark = match severity {
            Severity::Blocks => "incompatible: ",
            Severity::Unknown => "unknown: ",
            Severity::Note => "",
        };
        text.push_str(&format!("\n{mark}{message}"));
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn component(name: &str, version: &str, protocol: [u32; 2], disk_format: Option<u32>) -> Component {
        Component { name: name.into(), versions: Some(Versions::new(version, protocol, disk_format)) }
    }

    fn check_messages(
        own: &Versions,
        components: &[Component],
        kubernetes: Option<&UpgradeState>,
    ) -> Vec<(Severity, String)> {
        let findings = check(own, components, kubernetes);
        findings.into_iter().map(|Finding { severity, message }| (severity, message)).collect()
    }

    #[test]
    fn incompatible_versions_block_an_upgrade() {
        let own = Versions::new("0.5.0", [3, 4], Some(2));
        let compatible =
            [component("coordinator", "0.4.0", [2, 3], None), component("worker-0", "0.4.0", [2, 3], Some(2))];
        let findings = check_messages(&own, &compatible, None);
        assert!(matches!(&findings[..], [(Severity::Note, text)] if text.contains("engram up")), "{findings:?}");

        // Two releases behind: no common protocol version.
        let old = [component("worker-0", "0.2.0", [1, 2], Some(2))];
        let findings = check_messages(&own, &old, None);
        assert!(matches!(&findings[..], [(Severity::Blocks, text)] if text.contains("supports protocol 1 to 2")));
        // Downgrade to a build that cannot read the disk format.
        let newer = [component("worker-1", "0.6.0", [4, 5], Some(3))];
        let findings = check_messages(&own, &newer, None);
        assert!(matches!(&findings[..], [(Severity::Blocks, text)] if text.contains("disk format 3")), "{findings:?}");
        let silent = [Component { name: "worker-2".into(), versions: None }];
        assert_eq!(check_messages(&own, &silent, None)[0].0, Severity::Unknown);
    }

    #[test]
    fn unreported_versions_count_as_version_1() {
        let first = v1::WorkerStatus { version: "0.1.0".into(), ..Default::default() };
        assert_eq!(Versions::from(&first), Versions::new("0.1.0", [1, 1], Some(1)));
        let own = Versions::new("0.1.0", [1, 1], Some(1));
        let worker = Component { name: "worker-0".into(), versions: Some(Versions::from(&first)) };
        assert_eq!(check_messages(&own, &[worker], None), [(Severity::Note, "all processes already run 0.1.0".into())]);
    }

    #[test]
    fn unsupported_stored_versions_block_an_upgrade() {
        let own = Versions::own();
        let worker = [component("worker-0", "0.0.1", own.protocol, own.disk_format)];
        let stored = |version: &str| {
            let definition = ("learnerclusters.engram.dev".to_owned(), vec![version.to_owned()]);
            UpgradeState { stored: Some(BTreeMap::from([definition])), ..UpgradeState::default() }
        };
        let findings = check_messages(&own, &worker, Some(&stored(engram_api::crd::VERSION)));
        assert!(matches!(&findings[..], [(Severity::Note, text)] if text.contains("helm upgrade")), "{findings:?}");
        let findings = check_messages(&own, &worker, Some(&stored("v2")));
        assert!(matches!(&findings[..], [(Severity::Blocks, text)] if text.contains("stored as v2")), "{findings:?}");
        let hidden = UpgradeState::default();
        assert!(check_messages(&own, &worker, Some(&hidden))[0].1.contains("get customresourcedefinitions"));
    }
}
