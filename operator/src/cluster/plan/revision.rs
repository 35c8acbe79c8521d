//! Worker revisions: pinned in the status, so that an upgrade of the operator restarts no worker.

use std::collections::BTreeMap;

use engram_api::kubernetes_only::Upgrade;
use engram_api::status::WorkerRevision;

use crate::cluster::validate::ValidatedCluster;
use crate::names::UPGRADE;

/// The newest pod template revision that this operator can build. Builders of older revisions are kept.
pub(crate) const TEMPLATE_REVISION: u32 = 1;

/// The worker that this operator offers.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Repository of the worker's image, without a tag.
    pub repository: String,
    /// Repository of the image for pods with GPUs, if different.
    pub cuda_repository: Option<String>,
    /// Version of the worker: the tag.
    pub version: String,
    /// Revision of the pod template.
    pub template_revision: u32,
    /// Addresses of the coordinators, each `host:port`.
    pub coordinators: Vec<String>,
    /// Image pull secrets of the workers.
    pub pull_secrets: Vec<String>,
    /// Environment variables of the workers for traces; empty = none are sent.
    pub traces: Vec<(String, String)>,
    /// Published files of clusters with TLS, by name: trust bundle and token issuer.
    pub published: BTreeMap<String, String>,
}

impl Offer {
    /// Creates the offer with the newest template.
    pub fn new(repository: impl Into<String>, version: impl Into<String>) -> Self {
        Self {
            repository: repository.into(),
            cuda_repository: None,
            version: version.into(),
            template_revision: TEMPLATE_REVISION,
            coordinators: Vec::new(),
            pull_secrets: Vec::new(),
            traces: Vec::new(),
            published: BTreeMap::new(),
        }
    }

    /// Returns the offer to a cluster whose workers receive these files.
    pub(crate) fn with_published(&self, files: &BTreeMap<String, String>) -> Self {
        Self { published: files.clone(), ..self.clone() }
    }

    fn image(&self, version: &str, on_gpu: bool) -> String {
        let repository = self.cuda_repository.as_ref().filter(|_| on_gpu).unwrap_or(&self.repository);
        format!("{repository}:{version}")
    }

    /// Returns the revision that a pinned cluster keeps. The GPU image exposes all GPUs of a node to a pod without its own, so pods that no
    /// longer request GPUs get the other image.
    fn kept(&self, pinned: &WorkerRevision, on_gpu: bool) -> WorkerRevision {
        let of_cuda = |repository: &String| pinned.image.strip_prefix(repository)?.strip_prefix(':');
        match self.cuda_repository.as_ref().and_then(of_cuda).filter(|_| !on_gpu) {
            Some(version) => WorkerRevision { image: self.image(version, false), ..pinned.clone() },
            None => pinned.clone(),
        }
    }
}

/// Returns the revision to run, and an available update; `on_gpu` is whether pods request GPUs.
pub(crate) fn choose(
    cluster: &ValidatedCluster,
    pinned: Option<&WorkerRevision>,
    offer: &Offer,
    on_gpu: bool,
) -> (WorkerRevision, Option<WorkerRevision>) {
    let image = offer.image(&offer.version, on_gpu);
    let offered = WorkerRevision { image, template_revision: offer.template_revision };
    let pinned = pinned.map(|pinned| offer.kept(pinned, on_gpu));
    let asked_image = requested_image(cluster, offer, pinned.as_ref(), on_gpu);
    let Some(pinned) = pinned else {
        return (WorkerRevision { image: asked_image.unwrap_or(offered.image), ..offered }, None);
    };
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

/// Returns the image that the spec requests.
fn requested_image(
    cluster: &ValidatedCluster,
    offer: &Offer,
    pinned: Option<&WorkerRevision>,
    on_gpu: bool,
) -> Option<String> {
    let non_empty = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let of_version = |version: String| {
        // Both images have the same program, so workers are not restarted for the other one.
        let plain = offer.image(&version, false);
        let runs = pinned.is_some_and(|pinned| pinned.image == plain);
        if runs { plain } else { offer.image(&version, on_gpu) }
    };
    non_empty(&cluster.spec.image).or_else(|| non_empty(&cluster.spec.version).map(of_version))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::object::ClusterObject;
    use crate::cluster::validate::validate;
    use serde_json::{Value, json};

    fn cluster(field: &str, value: Value) -> ValidatedCluster {
        let mut object = json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": "words", "uid": "u" },
            "spec": { "workers": 3, "storage": { "size": "1Gi" } },
        });
        object["spec"][field] = value;
        validate(&serde_json::from_value::<ClusterObject>(object).expect("an object")).expect("a spec within the rules")
    }

    fn runs(image: &str) -> WorkerRevision {
        WorkerRevision { image: image.to_owned(), template_revision: TEMPLATE_REVISION }
    }

    #[test]
    fn only_pods_with_gpus_use_the_gpu_image() {
        let offer = Offer { cuda_repository: Some("a/worker-cuda".into()), ..Offer::new("a/worker", "2") };
        let plain = cluster("paused", false.into());
        let chosen = |cluster: &ValidatedCluster, pinned: Option<&str>, on_gpu: bool| {
            choose(cluster, pinned.map(runs).as_ref(), &offer, on_gpu)
        };
        assert_eq!(chosen(&plain, None, true), (runs("a/worker-cuda:2"), None));
        assert_eq!(chosen(&plain, None, false), (runs("a/worker:2"), None));
        let one = Offer::new("a/worker", "2");
        assert_eq!(choose(&plain, None, &one, true).0, runs("a/worker:2"), "one image for all pods");

        // Running workers are not restarted for the GPU image; it is offered.
        assert_eq!(chosen(&plain, Some("a/worker:2"), true), (runs("a/worker:2"), Some(runs("a/worker-cuda:2"))));
        assert_eq!(chosen(&plain, Some("a/worker:1"), true), (runs("a/worker:1"), Some(runs("a/worker-cuda:2"))));
        // Pods that no longer request GPUs are recreated with the other image.
        assert_eq!(chosen(&plain, Some("a/worker-cuda:1"), false), (runs("a/worker:1"), Some(runs("a/worker:2"))));

        let version = cluster("version", "1".into());
        assert_eq!(chosen(&version, None, true).0, runs("a/worker-cuda:1"));
        assert_eq!(chosen(&version, Some("a/worker:1"), true), (runs("a/worker:1"), None));
        assert_eq!(chosen(&version, Some("a/worker:2"), true).0, runs("a/worker-cuda:1"));
        let image = cluster("image", "b/own:7".into());
        assert_eq!(chosen(&image, Some("a/worker:1"), true).0, runs("b/own:7"), "an explicit image is used");
    }
}
