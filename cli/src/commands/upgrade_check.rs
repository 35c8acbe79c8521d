//! `engram upgrade-check`: whether a cluster can go over to this build, before anything is changed.
//!
//! Three things have to fit: what processes say to each other, since an upgrade is rolled out one worker after the other; the files on
//! the disks; and what the API server stores. Each is known by a version that the cluster tells; this build has its own.

use crate::args::{Context, Named};
use crate::error::{self, Ended};
use crate::local::admin;
use crate::output::Table;
use crate::target::Target;
use engram_api::ExitCode;
use engram_proto::protocol;
use engram_proto::v1;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Say what an upgrade of a cluster to this build would mean; nothing is changed
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram upgrade-check
  engram upgrade-check -o json | jq -r '.findings[].message'
  engram -n research upgrade-check words      LearnerCluster words in Kubernetes

Exit codes: 0 it can be done, 8 something does not fit, 4 a process does not answer.")]
pub(crate) struct Arguments {
    #[command(flatten)]
    named: Named,
}

/// The versions of a process; `None` where it does not answer.
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
    /// Oldest and newest version of the protocol between members that it speaks.
    protocol: [u32; 2],
    /// Of the files that it writes; absent for the coordinator, which has none.
    disk_format: Option<u32>,
}

impl Versions {
    /// The first builds did not tell what they speak and write: there was one version of both.
    fn new(version: &str, protocol: [u32; 2], disk_format: Option<u32>) -> Self {
        let protocol = if protocol == [0, 0] { [1, 1] } else { protocol };
        Self { version: version.to_owned(), protocol, disk_format: disk_format.map(|format| format.max(1)) }
    }

    /// What this build is.
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

/// What an upgrade would meet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Finding {
    severity: Severity,
    message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
enum Severity {
    /// It cannot be done so.
    Blocks,
    /// It cannot be told.
    Unknown,
    /// Worth knowing.
    Note,
}

/// What Kubernetes adds.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct InKubernetes {
    /// The image of the workers, as the operator keeps it until somebody says otherwise.
    pub(crate) image: Option<String>,
    /// What the operator offers instead, in its words.
    pub(crate) offered: Option<String>,
    /// Versions in which the API server stores objects, by definition; `None` where the caller may not look.
    pub(crate) stored: Option<BTreeMap<String, Vec<String>>>,
}

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let target = Target::find(&context.of(&arguments.named)).await?;
    let components = components(&target, context).await?;
    let kubernetes = match &target {
        Target::Kubernetes(cluster) => Some(cluster.upgrade().await?),
        Target::Local(_) | Target::Remote(..) => None,
    };
    let findings = judge(&Versions::own(), &components, kubernetes.as_ref());
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
    if code == ExitCode::Ok { Ok(code) } else { Err(Ended(code).into()) }
}

/// Asks coordinator and workers.
async fn components(target: &Target, context: &Context) -> anyhow::Result<Vec<Component>> {
    if let Target::Remote(..) = target {
        let message = "workers tell their versions at their admin ports, which --address does not name";
        return Err(error::said(ExitCode::Usage, message));
    }
    let coordinator = async {
        let (door, cluster) = target.coordinator().await?;
        admin::cluster(&door, cluster).await
    };
    let versions = match coordinator.await {
        Ok(status) => Some(Versions::new(&status.version, [status.protocol_min, status.protocol_max], None)),
        Err(error) => {
            context.output.note(format!("note: {error:#}"));
            None
        }
    };
    let mut found = vec![Component { name: "coordinator".into(), versions }];
    let doors = target.administration();
    if let Target::Kubernetes(cluster) = target {
        // Pods without an address: nobody can be asked there.
        let absent =
            cluster.workers.iter().filter(|worker| doors.iter().all(|(ordinal, _)| *ordinal != worker.ordinal));
        found.extend(absent.map(|worker| Component { name: format!("worker-{}", worker.ordinal), versions: None }));
    }
    for (ordinal, door) in doors {
        let versions = admin::status(&door).await.ok().as_ref().map(Versions::from);
        found.push(Component { name: format!("worker-{ordinal}"), versions });
    }
    Ok(found)
}

/// Holds what a cluster is against a build.
fn judge(own: &Versions, components: &[Component], kubernetes: Option<&InKubernetes>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |severity, message| findings.push(Finding { severity, message });
    let mut versions = BTreeSet::new();
    for Component { name, versions: found } in components {
        let Some(found) = found else {
            find(Severity::Unknown, format!("{name} does not answer: whether it fits is not known"));
            continue;
        };
        versions.insert(found.version.as_str());
        let ([oldest, newest], [ours, our_newest]) = (found.protocol, own.protocol);
        if oldest.max(ours) > newest.min(our_newest) {
            let message = format!(
                "{name} speaks the protocol {oldest} to {newest}, this build {ours} to {our_newest}: while one is exchanged after the \
                 other they would refuse each other; go by a release that speaks both"
            );
            find(Severity::Blocks, message);
        }
        if let (Some(format), Some(known)) = (found.disk_format, own.disk_format)
            && format != known
        {
            let message = format!(
                "{name} writes files of format {format}, and this build reads {known}: it would not start on that disk"
            );
            find(Severity::Blocks, message);
        }
    }
    let stored = kubernetes.map(|kubernetes| &kubernetes.stored);
    match stored {
        Some(Some(stored)) => {
            for (definition, stored) in stored {
                for version in stored.iter().filter(|version| *version != engram_api::crd::VERSION) {
                    let message = format!(
                        "objects of {definition} are stored as {version}, which an operator of this build does not know"
                    );
                    find(Severity::Blocks, message);
                }
            }
        }
        Some(None) => {
            let right = "get customresourcedefinitions";
            find(Severity::Note, format!("how objects are stored was not looked at: it takes the right to {right}"));
        }
        None => {}
    }
    if let Some(offered) = kubernetes.and_then(|kubernetes| kubernetes.offered.as_ref()) {
        find(Severity::Note, offered.clone());
    }
    if versions.len() > 1 {
        let versions: Vec<&str> = versions.iter().copied().collect();
        find(Severity::Note, format!("an upgrade is under way: {} run side by side", versions.join(" and ")));
    }
    let same = versions.iter().all(|version| *version == own.version) && !versions.is_empty();
    if !findings.iter().any(|finding| finding.severity != Severity::Note) {
        let message = match (same, kubernetes.is_some()) {
            (true, _) => format!("everybody runs {} already", own.version),
            (false, true) => "helm upgrade exchanges the operator and restarts no worker; then annotate the cluster as \
                              UpdateAvailable says, or set spec.version: workers follow one after the other, and nothing that was \
                              acknowledged is lost"
                .to_owned(),
            (false, false) => "engram down, then engram up with this build: the cluster is away meanwhile, its data stays".to_owned(),
        };
        findings.push(Finding { severity: Severity::Note, message });
    }
    findings
}

fn text(components: &[Component], findings: &[Finding], context: &Context) -> String {
    let own = Component { name: "this build".into(), versions: Some(Versions::own()) };
    let mut table = Table::new(&["component", "version", "protocol", "files"]);
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
            Severity::Blocks => "no: ",
            Severity::Unknown => "?: ",
            Severity::Note => "",
        };
        text.push_str(&format!("\n{mark}{message}"));
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn component(name: &str, version: &str, protocol: [u32; 2], disk_format: Option<u32>) -> Component {
        Component { name: name.into(), versions: Some(Versions::new(version, protocol, disk_format)) }
    }

    fn told(own: &Versions, components: &[Component], kubernetes: Option<&InKubernetes>) -> Vec<(Severity, String)> {
        let findings = judge(own, components, kubernetes);
        findings.into_iter().map(|Finding { severity, message }| (severity, message)).collect()
    }

    #[test]
    fn what_does_not_fit_is_told_before_anything_is_changed() {
        let own = Versions::new("0.5.0", [3, 4], Some(2));
        let fits = [component("coordinator", "0.4.0", [2, 3], None), component("worker-0", "0.4.0", [2, 3], Some(2))];
        let findings = told(&own, &fits, None);
        assert!(matches!(&findings[..], [(Severity::Note, text)] if text.contains("engram up")), "{findings:?}");

        // Two releases behind: nobody would hear the other.
        let old = [component("worker-0", "0.2.0", [1, 2], Some(2))];
        let findings = told(&own, &old, None);
        assert!(matches!(&findings[..], [(Severity::Blocks, text)] if text.contains("speaks the protocol 1 to 2")));
        // Back to a build that cannot read what is on the disk.
        let newer = [component("worker-1", "0.6.0", [4, 5], Some(3))];
        let findings = told(&own, &newer, None);
        assert!(
            matches!(&findings[..], [(Severity::Blocks, text)] if text.contains("files of format 3")),
            "{findings:?}"
        );
        let silent = [Component { name: "worker-2".into(), versions: None }];
        assert_eq!(told(&own, &silent, None)[0].0, Severity::Unknown);
    }

    #[test]
    fn a_first_build_that_tells_nothing_speaks_and_writes_the_first_version() {
        let first = v1::WorkerStatus { version: "0.1.0".into(), ..Default::default() };
        assert_eq!(Versions::from(&first), Versions::new("0.1.0", [1, 1], Some(1)));
        let own = Versions::new("0.1.0", [1, 1], Some(1));
        let worker = Component { name: "worker-0".into(), versions: Some(Versions::from(&first)) };
        assert_eq!(told(&own, &[worker], None), [(Severity::Note, "everybody runs 0.1.0 already".into())]);
    }

    #[test]
    fn a_stored_version_that_this_build_does_not_know_is_in_the_way() {
        let own = Versions::own();
        let worker = [component("worker-0", "0.0.1", own.protocol, own.disk_format)];
        let stored = |version: &str| {
            let definition = ("learnerclusters.engram.dev".to_owned(), vec![version.to_owned()]);
            InKubernetes { stored: Some(BTreeMap::from([definition])), ..InKubernetes::default() }
        };
        let findings = told(&own, &worker, Some(&stored(engram_api::crd::VERSION)));
        assert!(matches!(&findings[..], [(Severity::Note, text)] if text.contains("helm upgrade")), "{findings:?}");
        let findings = told(&own, &worker, Some(&stored("v2")));
        assert!(matches!(&findings[..], [(Severity::Blocks, text)] if text.contains("stored as v2")), "{findings:?}");
        let hidden = InKubernetes::default();
        assert!(told(&own, &worker, Some(&hidden))[0].1.contains("get customresourcedefinitions"));
    }
}
