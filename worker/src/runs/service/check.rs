//! Checks of a submission: permissions, paths, specification.

use super::RunEndpoint;
use crate::runs::{input, local_files};
use crate::service::Plane;
use crate::service::edge::authorization;
use engram_api::Requirement;
use engram_identity::Caller;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_train::job::Job;
use std::time::SystemTime;
use tonic::Request;

/// Maximum size of a run's specification in bytes.
const MAX_SPEC_BYTES: usize = 64 << 10;
/// Method whose permission a run requires if workers access a storage for it.
const STORAGE_METHOD: &str = "/engram.v1.AdminService/CreateSnapshot";

impl RunEndpoint {
    /// Checks permissions beyond the right to learn: a snapshot contains all memories, and workers may access a storage under their
    /// own identity, so a client that may only learn can request neither. It must not supply credentials either, which could
    /// replace those of another client's run.
    pub(super) fn admit_stored(&self, request: &Request<v1::SubmitRunRequest>) -> Result<(), Problem> {
        let Some(accounts) = self.shared.setup.accounts.as_ref().filter(|_| self.plane == Plane::Client) else {
            return Ok(());
        };
        if Caller::of(request.extensions()) != Caller::Anonymous {
            return Ok(());
        }
        let spec: serde_json::Value = serde_json::from_str(&request.get_ref().spec_json).unwrap_or_default();
        let is_stored = spec["kind"] == "Snapshot"
            || !spec["memory"]["source"]["events"]["s3"].is_null()
            || !spec["replay"]["checkpoint"]["location"].is_null()
            || request.get_ref().credentials.is_some();
        if !is_stored {
            return Ok(());
        }
        let admission = accounts.admit(request.metadata().as_ref(), STORAGE_METHOD, SystemTime::now());
        admission.map(drop).map_err(|refused| {
            self.shared.setup.count_refusal(refused.reason);
            authorization::problem(refused)
        })
    }

    /// Checks the paths in a specification, which workers open with the rights of the cluster's owner.
    pub(super) fn check_files(&self, message: &v1::SubmitRunRequest) -> Result<(), Problem> {
        // Pods have volumes only, which the manifest names.
        if self.shared.setup.options.inputs.is_some() {
            return Ok(());
        }
        // An invalid specification is rejected by the worker that has the run.
        let spec: serde_json::Value = serde_json::from_str(&message.spec_json).unwrap_or_default();
        let source = &spec["memory"]["source"];
        let files = self.shared.setup.options.local_files.as_ref();
        let parsed = serde_json::from_value::<engram_api::LearnerRunSpec>(spec.clone());
        if let Some(path) = parsed.as_ref().ok().and_then(|spec| spec.data_file()?.path.as_deref()) {
            local_files::check(files, "path of the data file", path, &message.owner_key)?;
        }
        for kind in ["events", "git"] {
            let named = source[kind]["path"].as_str();
            // The default is the current folder, which is that of the client.
            let Some(path) = named.or((kind == "git" && !source[kind].is_null()).then_some(".")) else { continue };
            let field = format!("spec.memory.source.{kind}.path");
            local_files::check(files, &field, path, &message.owner_key)?;
        }
        Ok(())
    }

    /// Checks a specification like a manifest, because the client may have another version. Returns it, and whether content must be
    /// supplied with it.
    pub(super) fn check_spec(&self, message: &v1::SubmitRunRequest) -> Result<(serde_json::Value, bool), Problem> {
        let invalid = |text: String| Problem::of(ProblemKind::Invalid, text);
        if message.spec_json.len() > MAX_SPEC_BYTES {
            let length = message.spec_json.len();
            return Err(invalid(format!("spec_json: {length} bytes are not allowed; allowed: up to {MAX_SPEC_BYTES}")));
        }
        if let Some(length) =
            message.input.as_ref().map(|input| input.len()).filter(|length| *length > input::MAX_BYTES)
        {
            let most = input::MAX_BYTES;
            return Err(invalid(format!("input: {length} bytes are not allowed; allowed: up to {most}")));
        }
        let spec: serde_json::Value =
            serde_json::from_str(&message.spec_json).map_err(|error| invalid(format!("spec_json: {error}")))?;
        let manifest = serde_json::json!({
            "apiVersion": engram_api::API_VERSION,
            "kind": "LearnerRun",
            "metadata": { "name": message.name },
            "spec": spec,
        });
        // JSON is YAML, so the manifest checker applies.
        let parsed = engram_api::parse(&manifest.to_string(), "spec_json", Requirement::Runs)
            .map_err(|problems| invalid(problems.to_string()))?;
        parsed
            .check_runs_on(&self.shared.setup.options.cluster_name, &self.shared.setup.options.spec)
            .map_err(|problems| invalid(problems.to_string()))?;
        let run = &parsed.runs.first().ok_or_else(|| invalid("spec_json: no run".into()))?.spec;
        if !run.depends_on.is_empty() || run.backoff_limit > 0 {
            let text = "spec.dependsOn: workers do not order runs; allowed: a run without dependsOn and backoffLimit, submitted when its \
                        dependencies have ended, as `engram run`, `engram up` and the operator do";
            return Err(invalid(text.into()));
        }
        if run.job.is_some() {
            let text = "spec.kind is Job: workers do not start programs of users; allowed: a run that `engram run` or `engram up` executes on a \
                        local cluster, or the operator in Kubernetes";
            return Err(invalid(text.into()));
        }
        if let Some(replay) = &run.replay {
            Job::new(replay).map_err(|error| invalid(error.to_string()))?;
        }
        if let Some(federated) = &run.federated {
            engram_federated::job::Job::new(&message.name, federated)
                .map_err(|error| invalid(format!("spec.federated.{error}")))?;
        }
        match input::refusal(&self.shared, run) {
            Some(refusal) => Err(invalid(refusal)),
            None => Ok((spec, input::is_supplied(run))),
        }
    }
}
