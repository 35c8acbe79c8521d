//! Manifests: the parser of the command line, so that Python reads what `engram up` reads.

use crate::error;
use engram_api::Requirement;
use pyo3::prelude::*;

/// Returns the `LearnerCluster` of a manifest as JSON, with every default filled in.
#[pyfunction]
pub(crate) fn parse_manifest(py: Python<'_>, text: &str, origin: &str) -> PyResult<String> {
    let failed = |text: &str| error::raise(py, "Config", text, None);
    let manifest = engram_api::parse(text, origin, Requirement::Cluster)
        .map_err(|problems| failed(problems.render(false).trim_end()))?;
    let cluster = manifest.cluster.as_ref().ok_or_else(|| failed("the manifest has no LearnerCluster"))?;
    serde_json::to_string(cluster).map_err(|failure| failed(&format!("failed to serialize the manifest: {failure}")))
}
