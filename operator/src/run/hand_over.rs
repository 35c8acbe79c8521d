//! A run whose turn it is: handed to its workers with what it learns from, suspended and let go on as its spec says.

use std::time::Duration;

use engram_api::status::SnapshotResult;
use engram_api::{ConfigMapKey, LearnerRunSpec, MANAGED_BY, Source};
use engram_client::Client;
use engram_proto::v1;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use super::asking::{Error, ask};
use super::kinds::built;
use super::runs::{WAITING, client};
use super::{Context, Key};
use crate::learner_run::{Seen, Told};
use crate::names::Names;

/// How often a run is asked for its progress: its status is never older than twice that.
const PROGRESS: Duration = Duration::from_secs(1);
/// How often a suspended run is looked at, if nothing is heard before.
const SUSPENDED: Duration = Duration::from_secs(30);
/// How long an input may come after the run that names it: whoever applies a folder applies one file after the other.
const INPUT_GRACE_SECONDS: i64 = 5;

/// What a run asks for that is not there.
struct Missing {
    message: String,
    /// It cannot come any more.
    for_good: bool,
    /// Why, in one word.
    reason: &'static str,
}

/// Hands a run to its cluster, or finds it there, and has it suspended or go on; also when to look again.
pub(super) async fn hand_over(
    context: &Context,
    key: &Key,
    object: &Value,
    spec: &LearnerRunSpec,
    has_started: bool,
) -> Result<(Told, Option<Duration>), Error> {
    let cluster = Key { namespace: key.namespace.clone(), name: spec.cluster_ref.name.clone() };
    let waiting = |reason, message| Ok((Told::Waiting { reason, message }, Some(WAITING)));
    let Some(client) = client(context, &cluster).await? else {
        let name = &cluster.name;
        let message = format!("LearnerCluster {name} is not there, or nobody serves its partitions yet");
        return waiting("ClusterNotReady", message);
    };
    let status = match submit(context, &client, key, spec, has_started).await? {
        Ok(status) => status,
        Err(Refusal::Input(missing)) if !missing.for_good && is_young(object) => {
            return waiting(missing.reason, missing.message);
        }
        // Its workers have it, and wait for what they need to go on.
        Err(Refusal::Input(missing)) if has_started => return waiting(missing.reason, missing.message),
        Err(Refusal::Input(missing)) => {
            return Ok((Told::Failed { reason: missing.reason, message: missing.message }, None));
        }
        Err(Refusal::Spec(message)) => return Ok((Told::Refused(message), None)),
    };
    let status = as_asked(&client, key, spec.suspend, status).await?;
    let again = if status.phase() == v1::RunPhase::Suspended { SUSPENDED } else { PROGRESS };
    Ok((Told::Seen(seen(&cluster, status)), Some(again)))
}

/// Why workers do not get a run.
enum Refusal {
    Input(Missing),
    Spec(String),
}

async fn submit(
    context: &Context,
    client: &Client,
    key: &Key,
    spec: &LearnerRunSpec,
    has_started: bool,
) -> Result<Result<v1::RunStatus, Refusal>, Error> {
    // Whoever finds it with the workers later knows that it has an object.
    let spec = LearnerRunSpec { managed_by: Some(MANAGED_BY.to_owned()), ..spec.clone() };
    let text = serde_json::to_string(&spec).expect("a spec has string keys only");
    let file = match spec.memory.as_ref().map(|memory| &memory.source) {
        Some(Source::Events(events)) => events.config_map.as_ref(),
        _ => None,
    };
    // Workers that have the run have its input.
    let mut input = None;
    if let Some(file) = file.filter(|_| !has_started) {
        match content(context, &key.namespace, file).await? {
            Ok(content) => input = Some(content),
            Err(missing) => return Ok(Err(Refusal::Input(missing))),
        }
    }
    let secret = secret_of(&spec);
    let mut credentials = None;
    if let Some(name) = secret.filter(|_| !has_started) {
        match keys(context, &key.namespace, name).await? {
            Ok(found) => credentials = Some(found),
            Err(missing) => return Ok(Err(Refusal::Input(missing))),
        }
    }
    let had_credentials = credentials.is_some();
    match client.submit_run(&key.name, &text, input.as_deref(), credentials).await {
        // A driver that took the run over knows nothing that is in no record.
        Ok(v1::SubmitRunReply { status: Some(status), .. }) if status.needs_credentials && !had_credentials => {
            let Some(name) = secret else { return Ok(Ok(status)) };
            match keys(context, &key.namespace, name).await? {
                Ok(found) => {
                    let again = client.submit_run(&key.name, &text, None, Some(found)).await;
                    let again = again.map_err(|source| Error::Workers {
                        action: "hand the credentials over",
                        source: Box::new(source),
                    })?;
                    Ok(Ok(again.status.unwrap_or(status)))
                }
                Err(missing) => Ok(Err(Refusal::Input(missing))),
            }
        }
        Ok(reply) => {
            if reply.created {
                tracing::info!(run = %key, cluster = spec.cluster_ref.name, "handed over");
            }
            Ok(Ok(reply.status.unwrap_or_default()))
        }
        Err(engram_client::Error::Refused(problem)) if problem.kind() == v1::ProblemKind::Invalid => {
            Ok(Err(Refusal::Spec(problem.message)))
        }
        Err(source) => Err(Error::Workers { action: "hand the run over", source: Box::new(source) }),
    }
}

/// Has a run suspended or go on, where it is not as its spec says.
pub(super) async fn as_asked(
    client: &Client,
    key: &Key,
    suspend: bool,
    status: v1::RunStatus,
) -> Result<v1::RunStatus, Error> {
    use v1::RunPhase::{Queued, Running, Suspended};
    let is_as_asked = match status.phase() {
        Suspended => suspend,
        Queued | Running => !suspend,
        _ => true,
    };
    if is_as_asked {
        return Ok(status);
    }
    let action = if suspend { "suspend the run" } else { "let the run go on" };
    let asked = client.suspend_run(&key.name, suspend).await;
    asked.map_err(|source| Error::Workers { action, source: Box::new(source) })
}

/// Reads the file that a run learns from.
async fn content(context: &Context, namespace: &str, file: &ConfigMapKey) -> Result<Result<Vec<u8>, Missing>, Error> {
    let ConfigMapKey { name, key } = file;
    let api = built("ConfigMap").of(&context.client, namespace);
    let found = ask(|| format!("read ConfigMap {name}"), api.get_opt(name)).await?;
    let missing = |message: String, for_good| Ok(Err(Missing { message, for_good, reason: "InputNotFound" }));
    let Some(found) = found else { return missing(format!("there is no ConfigMap {name}"), false) };
    let map: ConfigMap = match found.try_parse() {
        Ok(map) => map,
        Err(error) => return missing(format!("ConfigMap {name} cannot be read: {error}"), true),
    };
    let binary = map.binary_data.unwrap_or_default().remove(key).map(|ByteString(bytes)| bytes);
    match map.data.unwrap_or_default().remove(key).map(String::into_bytes).or(binary) {
        Some(content) => Ok(Ok(content)),
        None => missing(format!("ConfigMap {name} has no key {key}"), true),
    }
}

/// The Secret that says who asks the storage of a run.
fn secret_of(spec: &LearnerRunSpec) -> Option<&str> {
    let events = match spec.memory.as_ref().map(|memory| &memory.source) {
        Some(Source::Events(events)) => events.s3.as_ref(),
        _ => None,
    };
    let snapshot = spec.snapshot.as_ref().and_then(|place| place.secret_ref.as_ref());
    let secret = snapshot.or_else(|| events?.secret_ref.as_ref());
    secret.map(|secret| secret.name.as_str())
}

/// Reads who asks a storage. This operator may read a Secret where somebody has allowed it, and no other.
async fn keys(context: &Context, namespace: &str, name: &str) -> Result<Result<v1::ObjectCredentials, Missing>, Error> {
    let api: kube::Api<Secret> = kube::Api::namespaced(context.client.clone(), namespace);
    let missing = |message: String, for_good| Ok(Err(Missing { message, for_good, reason: "SecretNotFound" }));
    let found = match ask(|| format!("read Secret {name}"), api.get_opt(name)).await {
        Ok(found) => found,
        Err(Error::Api { source: kube::Error::Api(status), .. }) if status.code == 403 => {
            let message = format!(
                "the operator may not read Secret {name}: allow its service account to get it, by a Role of this namespace \
                 that names it (docs/backup.md)"
            );
            return Ok(Err(Missing { message, for_good: false, reason: "SecretForbidden" }));
        }
        Err(error) => return Err(error),
    };
    let Some(found) = found else { return missing(format!("there is no Secret {name}"), false) };
    let mut data = found.data.unwrap_or_default();
    let mut read = |key: &str| {
        let text = data.remove(key).and_then(|ByteString(bytes)| String::from_utf8(bytes).ok());
        text.map(|text| text.trim().to_owned()).filter(|text| text.chars().all(|it| it.is_ascii_graphic()))
    };
    let (id, secret, token) = (read("accessKeyId"), read("secretAccessKey"), read("sessionToken"));
    match (id.filter(|id| !id.is_empty()), secret.filter(|secret| !secret.is_empty())) {
        (Some(access_key_id), Some(secret_access_key)) => {
            Ok(Ok(v1::ObjectCredentials { access_key_id, secret_access_key, session_token: token.unwrap_or_default() }))
        }
        _ => missing(format!("Secret {name} lacks accessKeyId or secretAccessKey"), false),
    }
}

/// Whether an input that is not there may still be on its way.
fn is_young(object: &Value) -> bool {
    let created = object.pointer("/metadata/creationTimestamp").and_then(Value::as_str);
    let created = created.and_then(|time| time.parse::<Timestamp>().ok());
    created.is_some_and(|created| Timestamp::now().as_second() - created.as_second() < INPUT_GRACE_SECONDS)
}

fn seen(cluster: &Key, status: v1::RunStatus) -> Seen {
    let phase = status.phase();
    let code = if status.code.is_empty() { String::new() } else { format!("{}: ", status.code) };
    let names = Names { cluster: cluster.name.clone() };
    let mut metrics: Vec<(String, f64)> = status.metrics.into_iter().collect();
    metrics.sort_by(|a, b| a.0.cmp(&b.0));
    Seen {
        phase,
        epoch: status.epoch,
        epochs: status.epochs,
        eta_seconds: status.eta_seconds,
        driver: status.driver.map(|ordinal| names.pod(ordinal)),
        metrics,
        message: format!("{code}{}", status.message),
        is_snapshot: status.kind == "Snapshot",
        written: status.snapshot.map(|written| SnapshotResult {
            url: written.url,
            digest: written.digest,
            memories: i64::try_from(written.memories).unwrap_or(i64::MAX),
            bytes: i64::try_from(written.bytes).unwrap_or(i64::MAX),
            partitions: i32::try_from(written.partitions).unwrap_or(i32::MAX),
        }),
    }
}
