//! Applies a plan: objects by server-side apply in order, then actions, each on exactly the observed object.

use engram_api::Size;
use engram_mapstore::MapLocation;
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, Preconditions, PropagationPolicy};
use serde::Serialize;
use serde_json::{Value, json};

use crate::cluster::observe::is_owned;
use crate::cluster::plan::{Action, Applied, Plan};
use crate::cluster::validate::ValidatedCluster;
use crate::context::{Context, Key};
use crate::kube::api_request::{Error, request};
use crate::kube::resource_kinds::{CLAIM, CLUSTER, Kind, MAP, POD, SET, built};
use crate::names::REPLACE;

/// Field manager of built objects.
const MANAGER: &str = "engram-operator";
/// Field manager of statuses.
const STATUS_MANAGER: &str = "engram-operator-status";

/// Applies `plan`. Steps before an error stay applied: the next plan continues from there.
pub(crate) async fn apply(context: &Context, cluster: &ValidatedCluster, plan: Plan) -> Plan<Applied> {
    let result = apply_steps(context, cluster, &plan).await;
    if plan.writes() {
        let key = Key { namespace: cluster.namespace.clone(), name: cluster.names.cluster.clone() };
        context.clusters.with(&key, |state| state.lists.invalidate_all());
    }
    plan.applied(result)
}

async fn apply_steps(context: &Context, cluster: &ValidatedCluster, plan: &Plan) -> Result<(), Error> {
    for object in &plan.objects {
        apply_object(context, cluster, object).await?;
    }
    for action in &plan.actions {
        execute(context, cluster, action).await?;
    }
    Ok(())
}

/// Checks leadership before every write, since a Lease may expire meanwhile.
pub(crate) fn check_leader(context: &Context) -> Result<(), Error> {
    if context.leadership.is_leader() { Ok(()) } else { Err(Error::NotLeader) }
}

async fn apply_object(context: &Context, cluster: &ValidatedCluster, object: &Value) -> Result<(), Error> {
    let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default();
    let (kind, name) = (built(text("/kind")), text("/metadata/name"));
    let api = kind.of(&context.client, &cluster.namespace);
    let existing = request(|| format!("read {} {name}", kind.name), api.get_opt(name)).await?;
    // Objects that are not owned by the cluster, such as a Service of the same name, are never adopted.
    if existing.is_some_and(|existing| !is_owned(&kind.value(&existing), &cluster.uid)) {
        return Err(Error::NotOwned { kind: kind.name.to_owned(), name: name.to_owned() });
    }
    write_object(context, cluster, kind, name, object).await.map(drop)
}

/// Applies an object, creating it if necessary.
pub(crate) async fn write_object(
    context: &Context,
    cluster: &ValidatedCluster,
    kind: Kind,
    name: &str,
    object: &Value,
) -> Result<DynamicObject, Error> {
    check_leader(context)?;
    let api = kind.of(&context.client, &cluster.namespace);
    let parameters = PatchParams::apply(MANAGER).force();
    let patch = Patch::Apply(object);
    let written = request(|| format!("apply {} {name}", kind.name), api.patch(name, &parameters, &patch)).await?;
    tracing::info!(cluster = %cluster.names.cluster, namespace = %cluster.namespace, kind = kind.name, name, "applied");
    Ok(written)
}

async fn execute(context: &Context, cluster: &ValidatedCluster, action: &Action) -> Result<(), Error> {
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
) -> Result<(), Error> {
    let preconditions = Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None });
    let parameters = DeleteParams { preconditions, ..parameters };
    let api = kind.of(&context.client, &cluster.namespace);
    match request(|| format!("delete {} {name}", kind.name), api.delete(name, &parameters)).await {
        Ok(_) => Ok(()),
        // 409: the object was replaced by one of the same name.
        Err(Error::Api { source: kube::Error::Api(status), .. }) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Writes the status of an object.
pub(crate) async fn write_status(
    context: &Context,
    kind: Kind,
    key: &Key,
    status: &impl Serialize,
) -> Result<DynamicObject, Error> {
    check_leader(context)?;
    let api = kind.of(&context.client, &key.namespace);
    let object = json!({
        "apiVersion": engram_api::API_VERSION,
        "kind": kind.name,
        "metadata": { "name": key.name },
        "status": status,
    });
    let parameters = PatchParams::apply(STATUS_MANAGER).force();
    let patch = Patch::Apply(&object);
    let written = api.patch_status(&key.name, &parameters, &patch);
    request(|| format!("write the status of {} {}", kind.name, key.name), written).await
}
