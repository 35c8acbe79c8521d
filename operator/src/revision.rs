//! What the workers run: pinned in the status, so that an upgrade of the operator restarts nobody.

use engram_api::kubernetes_only::Upgrade;
use engram_api::status::WorkerRevision;

use crate::names::UPGRADE;
use crate::validate::ValidatedCluster;

/// The newest revision of the pod template that this operator can build. The builder of the one before stays.
pub(crate) const TEMPLATE_REVISION: u32 = 1;

/// What this operator would build by itself.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Repository of the worker's image, without a tag.
    pub repository: String,
    /// Version of the worker: the tag.
    pub version: String,
    /// Revision of the pod template.
    pub template_revision: u32,
    /// Where workers find the coordinators, each as `host:port`; a name may stand for several.
    pub coordinators: Vec<String>,
    /// Secrets with which nodes pull the worker's image.
    pub pull_secrets: Vec<String>,
}

impl Offer {
    /// Makes the offer of this operator: its newest template.
    pub fn new(repository: impl Into<String>, version: impl Into<String>) -> Self {
        Self {
            repository: repository.into(),
            version: version.into(),
            template_revision: TEMPLATE_REVISION,
            coordinators: Vec::new(),
            pull_secrets: Vec::new(),
        }
    }

    fn revision(&self) -> WorkerRevision {
        WorkerRevision {
            image: format!("{}:{}", self.repository, self.version),
            template_revision: self.template_revision,
        }
    }
}

/// What shall run now, and what could run if somebody said so.
pub(crate) fn choose(
    cluster: &ValidatedCluster,
    pinned: Option<&WorkerRevision>,
    offer: &Offer,
) -> (WorkerRevision, Option<WorkerRevision>) {
    let offered = offer.revision();
    let Some(pinned) = pinned else {
        return (WorkerRevision { image: asked(cluster, offer).unwrap_or(offered.image), ..offered }, None);
    };
    let asked_image = asked(cluster, offer);
    let accepted = cluster.spec.upgrade == Some(Upgrade::Auto)
        || cluster.annotations.get(UPGRADE).is_some_and(|revision| *revision == offer.template_revision.to_string())
        || asked_image.as_ref() == Some(&offered.image);
    if accepted {
        return (WorkerRevision { image: asked_image.unwrap_or(offered.image), ..offered }, None);
    }
    let running = WorkerRevision {
        image: asked_image.clone().unwrap_or_else(|| pinned.image.clone()),
        template_revision: pinned.template_revision,
    };
    let would = WorkerRevision { image: asked_image.unwrap_or(offered.image), ..offered };
    let available = Some(would).filter(|would| *would != running);
    (running, available)
}

/// The image that the spec names.
fn asked(cluster: &ValidatedCluster, offer: &Offer) -> Option<String> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    given(&cluster.spec.image)
        .or_else(|| given(&cluster.spec.version).map(|version| format!("{}:{version}", offer.repository)))
}
