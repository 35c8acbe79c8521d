//! Applies a plan: objects by server-side apply in order, then actions, each on exactly the observed object.

use engram_api::Size;
use engram_mapstore::MapLocation;
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, Preconditions, PropagationPolicy};
use serde_json::{Value, json};

use crate::cluster::coordination::SteerError;
use crate::cluster::plan::{Action, Plan};
use crate::cluster::validate::ValidatedCluster;
use crate::context::{Context, Key};
use crate::kube::api_object::{ApiObject, NotOwned, is_owned};
use crate::kube::api_request::{RequestError, WriteError, check_leader, request};
use crate::kube::failure::{Cause, Failure};
use crate::kube::resource_kinds::{CERTIFICATE, CLAIM, CLUSTER, Kind, MAP, POD, SET, built};
use crate::names::REPLACE;
use crate::pki::issuance;
use crate::pki::provided_certificate::CertificateProblem;

/// Field manager of built objects.
const MANAGER: &str = "engram-operator";

/// Why a plan was not applied completely.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApplyError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    NotOwned(#[from] NotOwned),
    /// The coordinator was not updated, so nothing was applied.
    #[error(transparent)]
    Steer(SteerError),
}

impl From<RequestError> for ApplyError {
    fn from(error: RequestError) -> Self {
        Self::Write(error.into())
    }
}

impl Failure for ApplyError {
    fn root_cause(&self) -> Cause<'_> {
        match self {
            Self::Write(error) => error.root_cause(),
            Self::NotOwned(_) => Cause::NotOwned,
            Self::Steer(error) => error.root_cause(),
        }
    }
}

/// The result of an application: up to the step that failed.
#[derive(Debug)]
pub(crate) struct Applied {
    pub(crate) result: Result<(), ApplyError>,
    /// Why the Certificate of the cluster could not be applied.
    pub(crate) rejected_certificate: Option<CertificateProblem>,
}

impl Plan {
    /// Returns the plan after its application: why its Certificate could not be applied, if it could not, or the step that failed.
    fn applied(self, result: Result<Option<CertificateProblem>, ApplyError>) -> Plan<Applied> {
        let (result, rejected_certificate) = match result {
            Ok(rejected) => (Ok(()), rejected),
            Err(error) => (Err(error), None),
        };
        self.with_stage(Applied { result, rejected_certificate })
    }

    /// Returns a plan of which nothing was applied, since the coordinator was not updated.
    pub(crate) fn unapplied(self, error: SteerError) -> Plan<Applied> {
        self.applied(Err(ApplyError::Steer(error)))
    }
}

/// Applies `plan`. Steps before an error stay applied: the next plan continues from there.
pub(crate) async fn apply(context: &Context, cluster: &ValidatedCluster, plan: Plan) -> Plan<Applied> {
    let result = apply_steps(context, cluster, &plan).await;
    if plan.writes() {
        let key = Key { namespace: cluster.namespace.clone(), name: cluster.names.cluster.clone() };
        context.clusters.with(&key, |state| state.lists.invalidate_all());
    }
    plan.applied(result)
}

async fn apply_steps(
    context: &Context,
    cluster: &ValidatedCluster,
    plan: &Plan,
) -> Result<Option<CertificateProblem>, ApplyError> {
    let mut rejected = None;
    for object in &plan.objects {
        match apply_object(context, cluster, object).await {
            // A running cluster has its certificate, so that what cert-manager does not accept stops nothing else.
            Err(error) if object.kind() == CERTIFICATE => rejected = Some(issuance::problem(object.name(), error)?),
            result => result?,
        }
    }
    for action in &plan.actions {
        execute(context, cluster, action).await?;
    }
    Ok(rejected)
}

async fn apply_object(context: &Context, cluster: &ValidatedCluster, object: &ApiObject) -> Result<(), ApplyError> {
    let (kind, name) = (object.kind(), object.name());
    let api = kind.of(&context.client, &cluster.namespace);
    let existing = request(|| format!("read {} {name}", kind.name), api.get_opt(name)).await?;
    // Objects that are not owned by the cluster, such as a Service of the same name, are never adopted.
    if existing.is_some_and(|existing| !is_owned(&existing.metadata, &cluster.uid)) {
        return Err(NotOwned { kind: kind.name, name: name.to_owned() }.into());
    }
    write_object(context, cluster, object).await?;
    Ok(())
}

/// Applies an object, creating it if necessary.
pub(crate) async fn write_object(
    context: &Context,
    cluster: &ValidatedCluster,
    object: &ApiObject,
) -> Result<DynamicObject, WriteError> {
    check_leader(context)?;
    let (kind, name) = (object.kind(), object.name());
    let api = kind.of(&context.client, &cluster.namespace);
    let parameters = PatchParams::apply(MANAGER).force();
    let patch = Patch::Apply(object.content());
    let written = request(|| format!("apply {} {name}", kind.name), api.patch(name, &parameters, &patch)).await?;
    tracing::info!(cluster = %cluster.names.cluster, namespace = %cluster.namespace, kind = kind.name, name, "applied");
    Ok(written)
}

async fn execute(context: &Context, cluster: &ValidatedCluster, action: &Action) -> Result<(), WriteError> {
    let names = &cluster.names;
    let merge = |kind: Kind, name: String, patch: Value| async move {
        let api = kind.of(&context.client, &cluster.namespace);
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
        request(|| format!("patch {} {name}", kind.name), api.patch(&name, &parameters, &patch)).await.map(drop)
    };
    // The coordinator drains workers, according to its goal.
    if matches!(action, Action::Drain { .. }) {
        return Ok(());
    }
    check_leader(context)?;
    match action {
        Action::Drain { .. } => return Ok(()),
        Action::DeleteObject { kind, name, uid } => {
            delete(context, cluster, built(kind), name, uid, DeleteParams::background()).await?;
        }
        Action::OrphanSet { uid } => {
            let orphan =
                DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
            delete(context, cluster, SET, &names.worker(), uid, orphan).await?;
        }
        Action::DeletePod { ordinal, uid, force } => {
            let grace_period_seconds = force.then_some(0);
            let parameters = DeleteParams { grace_period_seconds, ..DeleteParams::default() };
            delete(context, cluster, POD, &names.pod(*ordinal), uid, parameters).await?;
        }
        Action::DeleteClaim { ordinal, uid } => {
            delete(context, cluster, CLAIM, &names.claim(*ordinal), uid, DeleteParams::default()).await?;
        }
        Action::GrowClaim { ordinal, uid, size_bytes } => {
            let size = Size::from_bytes(*size_bytes).to_string();
            let spec = json!({ "resources": { "requests": { "storage": size } } });
            // A UID in a patch is a precondition.
            merge(CLAIM, names.claim(*ordinal), json!({ "metadata": { "uid": uid }, "spec": spec })).await?;
        }
        Action::MarkSuspended { suspended, resource_version } => {
            let metadata = json!({ "resourceVersion": resource_version, "managedFields": [{}] });
            merge(MAP, names.cluster.clone(), json!({ "metadata": metadata, "spec": { "suspended": suspended } }))
                .await?;
        }
        Action::SetMapOwner { uid, is_owned } => {
            let owner = is_owned.then_some(cluster.uid.as_str());
            let owners = MapLocation::of_cluster(&cluster.namespace, &names.cluster, owner).owners;
            let metadata = json!({ "uid": uid, "ownerReferences": owners, "managedFields": [{}] });
            merge(MAP, names.cluster.clone(), json!({ "metadata": metadata })).await?;
        }
        Action::ClearReplaceAnnotation => {
            let metadata = json!({ "uid": cluster.uid, "annotations": { REPLACE: null } });
            merge(CLUSTER, names.cluster.clone(), json!({ "metadata": metadata })).await?;
        }
    }
    context.events.publish_action(cluster, action).await;
    Ok(())
}

/// Deletes exactly the object with this UID; one that does not exist is a success.
async fn delete(
    context: &Context,
    cluster: &ValidatedCluster,
    kind: Kind,
    name: &str,
    uid: &str,
    parameters: DeleteParams,
) -> Result<(), RequestError> {
    let preconditions = Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None });
    let parameters = DeleteParams { preconditions, ..parameters };
    let api = kind.of(&context.client, &cluster.namespace);
    match request(|| format!("delete {} {name}", kind.name), api.delete(name, &parameters)).await {
        Ok(_) => Ok(()),
        // 409: the object was replaced by one of the same name.
        Err(error) if error.is_rejected_with(&[404, 409]) => Ok(()),
        Err(error) => Err(error),
    }
}
