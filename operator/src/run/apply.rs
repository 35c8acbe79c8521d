//! Carries a plan out: objects by server-side apply in their order, then actions, each on exactly the object that was looked at.

use engram_api::Size;
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, Preconditions, PropagationPolicy};
use serde::Serialize;
use serde_json::{Value, json};

use super::asking::{Error, ask};
use super::kinds::{CLAIM, CLUSTER, Kind, MAP, POD, SET, built};
use super::observe::is_owned;
use super::{Context, Key};
use crate::names::REPLACE;
use crate::plan::{Action, Plan};
use crate::validate::ValidatedCluster;

/// Who owns the fields of the objects that are built.
const MANAGER: &str = "engram-operator";
/// Who owns the status.
const STATUS_MANAGER: &str = "engram-operator-status";

/// Carries out `plan`. What was done before an error stays done: the next plan goes on from there.
pub(super) async fn apply(context: &Context, cluster: &ValidatedCluster, plan: &Plan) -> Result<(), Error> {
    for object in &plan.objects {
        apply_object(context, cluster, object).await?;
    }
    for action in &plan.actions {
        carry_out(context, cluster, action).await?;
    }
    Ok(())
}

/// Asked before every write: a Lease runs out while an operator waits.
pub(super) fn check_lead(context: &Context) -> Result<(), Error> {
    if context.leadership.leads() { Ok(()) } else { Err(Error::Deposed) }
}

async fn apply_object(context: &Context, cluster: &ValidatedCluster, object: &Value) -> Result<(), Error> {
    let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default();
    let (kind, name) = (built(text("/kind")), text("/metadata/name"));
    let api = kind.of(&context.client, &cluster.namespace);
    let there = ask(|| format!("read {} {name}", kind.name), api.get_opt(name)).await?;
    // A Service of somebody else may have the cluster's name: what was not made for this cluster is never taken.
    if there.is_some_and(|there| !is_owned(&kind.value(&there), &cluster.uid)) {
        return Err(Error::Foreign { kind: kind.name.to_owned(), name: name.to_owned() });
    }
    write_object(context, cluster, kind, name, object).await.map(drop)
}

/// Writes what is said of an object; it is made where there is none.
pub(super) async fn write_object(
    context: &Context,
    cluster: &ValidatedCluster,
    kind: Kind,
    name: &str,
    object: &Value,
) -> Result<DynamicObject, Error> {
    check_lead(context)?;
    let api = kind.of(&context.client, &cluster.namespace);
    let parameters = PatchParams::apply(MANAGER).force();
    let patch = Patch::Apply(object);
    let written = ask(|| format!("apply {} {name}", kind.name), api.patch(name, &parameters, &patch)).await?;
    tracing::info!(cluster = %cluster.names.cluster, namespace = %cluster.namespace, kind = kind.name, name, "applied");
    Ok(written)
}

async fn carry_out(context: &Context, cluster: &ValidatedCluster, action: &Action) -> Result<(), Error> {
    let names = &cluster.names;
    let merge = |kind: Kind, name: String, patch: Value| async move {
        let api = kind.of(&context.client, &cluster.namespace);
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
        ask(|| format!("change {} {name}", kind.name), api.patch(&name, &parameters, &patch)).await.map(drop)
    };
    // The coordinator empties workers: it was told with the plan.
    if matches!(action, Action::Drain { .. }) {
        return Ok(());
    }
    check_lead(context)?;
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
        Action::ForgetReplace => {
            let metadata = json!({ "uid": cluster.uid, "annotations": { REPLACE: null } });
            merge(CLUSTER, names.cluster.clone(), json!({ "metadata": metadata })).await?;
        }
    }
    context.events.done(cluster, action).await;
    Ok(())
}

/// Deletes exactly the object that has this UID; one that is gone already is what was wanted.
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
    match ask(|| format!("delete {} {name}", kind.name), api.delete(name, &parameters)).await {
        Ok(_) => Ok(()),
        // 409: another has its name now.
        Err(Error::Api { source: kube::Error::Api(status), .. }) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Writes the status of an object, of the generation that it speaks about or an older one.
pub(super) async fn write_status(
    context: &Context,
    kind: Kind,
    key: &Key,
    status: &impl Serialize,
) -> Result<DynamicObject, Error> {
    check_lead(context)?;
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
    ask(|| format!("write the status of {} {}", kind.name, key.name), written).await
}
