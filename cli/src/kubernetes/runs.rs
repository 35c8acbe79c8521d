//! Learning runs as objects: whoever makes one leaves the rest to the operator, which hands it to the workers.

use super::{Cluster, MANAGER, error};
use crate::error::said;
use anyhow::Context as _;
use engram_api::{ExitCode, LearnerRun, LearnerRunSpec, parse_object};
use futures::FutureExt as _;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::time::Duration;

/// Between looks at an object that waits for the operator.
const LOOK: Duration = Duration::from_millis(500);

impl Cluster {
    /// Makes the object of a run; `false` where the same is there already.
    ///
    /// # Errors
    /// The API server refuses it, or another run has its name.
    pub(crate) async fn make_run(&self, run: &LearnerRun) -> anyhow::Result<bool> {
        let name = &run.metadata.name;
        let spec = serde_json::to_value(&run.spec).context("failed to write the run as JSON")?;
        let object = json!({
            "apiVersion": engram_api::API_VERSION, "kind": "LearnerRun", "metadata": { "name": name }, "spec": spec,
        });
        let object: DynamicObject = serde_json::from_value(object).context("failed to write the run as an object")?;
        let parameters = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        match self.runs().create(&parameters, &object).boxed().await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                let is_same = spec_of(&self.run(name).await?).is_some_and(|there| same(&there, &run.spec));
                let message = || {
                    format!(
                        "namespace {} has another LearnerRun {name}; a new run needs a new name, or: kubectl delete learnerrun {name}",
                        self.namespace
                    )
                };
                if is_same { Ok(false) } else { Err(said(ExitCode::Conflict, message())) }
            }
            Err(found) => Err(error::told(&found, "to make the run", "create learnerruns", &self.namespace)),
        }
    }

    /// Waits until the workers have a run; `tell` is told what it waits for, whenever that is something else.
    ///
    /// # Errors
    /// The operator refuses it, or the API server does not answer.
    pub(crate) async fn handed_over(&self, name: &str, mut tell: impl FnMut(&str)) -> anyhow::Result<()> {
        let mut last = String::new();
        loop {
            match stage(&self.run(name).await?) {
                Stage::HandedOver => return Ok(()),
                Stage::Refused(message) => {
                    return Err(said(ExitCode::Failed, format!("run {name} is refused: {message}")));
                }
                Stage::Waits(message) if message == last => {}
                Stage::Waits(message) => {
                    tell(&message);
                    last = message;
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Sets whether a run is to be suspended.
    ///
    /// # Errors
    /// The API server refuses it, or there is no such run.
    pub(crate) async fn suspend_run(&self, name: &str, suspend: bool) -> anyhow::Result<()> {
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        let change = Patch::Merge(json!({ "spec": { "suspend": suspend } }));
        let patched = self.runs().patch(name, &parameters, &change).boxed().await;
        let refused =
            |found: kube::Error| error::told(&found, "to change the run", "patch learnerruns", &self.namespace);
        patched.map(drop).map_err(refused)
    }

    async fn run(&self, name: &str) -> anyhow::Result<Value> {
        let found = self.runs().get(name).boxed().await;
        let found = found.map_err(|found| error::told(&found, "to look", "get learnerruns", &self.namespace))?;
        serde_json::to_value(found).context("the LearnerRun is no JSON")
    }

    fn runs(&self) -> Api<DynamicObject> {
        let resource = ApiResource {
            group: "engram.dev".into(),
            version: "v1alpha1".into(),
            api_version: engram_api::API_VERSION.into(),
            kind: "LearnerRun".into(),
            plural: "learnerruns".into(),
        };
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
    }
}

/// How far the object of a run is.
#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// The workers have it.
    HandedOver,
    /// It will never be handed over.
    Refused(String),
    /// For what, in words.
    Waits(String),
}

fn stage(object: &Value) -> Stage {
    let status = &object["status"];
    if status["startTime"].is_string() {
        return Stage::HandedOver;
    }
    // Its input is not there: the workers were never asked.
    let reason = || {
        let conditions = status["conditions"].as_array().into_iter().flatten();
        let failed = conditions.into_iter().find(|it| it["type"] == "Failed");
        failed.and_then(|it| it["message"].as_str()).unwrap_or_default().to_owned()
    };
    if status["phase"] == "Failed" {
        return Stage::Refused(reason());
    }
    let conditions = || status["conditions"].as_array().into_iter().flatten();
    let said = |kind: &str, truth: &str| {
        let found = conditions().find(|it| it["type"] == kind && it["status"] == truth)?;
        Some(found["message"].as_str().unwrap_or_default().to_owned())
    };
    if let Some(message) = said("Accepted", "False") {
        return Stage::Refused(message);
    }
    Stage::Waits(match said("Complete", "False") {
        Some(message) => message,
        None => "no operator has looked at it yet".to_owned(),
    })
}

/// The spec of an object with its defaults.
fn spec_of(object: &Value) -> Option<LearnerRunSpec> {
    Some(parse_object(object).ok()?.runs.pop()?.spec)
}

/// Whether they say the same; who looks after the object is its own affair.
fn same(there: &LearnerRunSpec, asked: &LearnerRunSpec) -> bool {
    let of_run = |spec: &LearnerRunSpec| LearnerRunSpec { managed_by: None, ..spec.effective(None) };
    of_run(there) == of_run(asked)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(spec: &Value, status: &Value) -> Value {
        json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun",
            "metadata": { "name": "r", "namespace": "research", "uid": "1" }, "spec": spec, "status": status,
        })
    }

    #[test]
    fn a_run_waits_until_the_workers_have_it_or_the_operator_refuses_it() {
        let of = |status: &Value| stage(&object(&json!({}), status));
        let condition = |kind: &str, message: &str| json!({ "conditions": [{ "type": kind, "status": "False", "message": message }] });
        assert_eq!(of(&json!({})), Stage::Waits("no operator has looked at it yet".into()));
        assert_eq!(of(&condition("Complete", "words is not there")), Stage::Waits("words is not there".into()));
        assert_eq!(of(&condition("Accepted", "no such source")), Stage::Refused("no such source".into()));
        let gone = json!({ "type": "Failed", "status": "True", "message": "there is no ConfigMap sales" });
        let failed = json!({ "phase": "Failed", "conditions": [gone] });
        assert_eq!(of(&failed), Stage::Refused("there is no ConfigMap sales".into()));
        let mut queued = condition("Complete", "run a has the turn");
        queued["startTime"] = "2026-11-22T09:00:00Z".into();
        assert_eq!(of(&queued), Stage::HandedOver);
    }

    #[test]
    fn a_run_is_the_same_with_the_defaults_that_an_api_server_fills_in() {
        let spec = |epochs: u64, more: Value| {
            let mut spec = json!({
                "clusterRef": { "name": "words" }, "kind": "Memory",
                "memory": { "source": { "synthetic": { "memories": 500 } }, "epochs": epochs },
            });
            spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            spec_of(&object(&spec, &json!({}))).unwrap()
        };
        let asked = spec(5, json!({}));
        assert!(same(&spec(5, json!({ "suspend": false, "managedBy": "engram.dev/operator" })), &asked));
        assert!(!same(&spec(6, json!({})), &asked));
    }
}
