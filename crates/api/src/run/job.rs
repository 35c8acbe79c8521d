//! `kind: Job`: the user's own program, as local processes or as an Indexed Job of Kubernetes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::kubernetes::{FreeForm, Resources};

/// Prefix of the environment variables that a process receives; `env` cannot set them.
pub const JOB_VARIABLES: &str = "ENGRAM_";
/// Default time between SIGTERM and SIGKILL.
pub const JOB_GRACE_SECONDS: u64 = 30;

/// The user's own program, in several processes that know the address of the cluster, a group and their index.
///
/// Each process has the variables `ENGRAM_ADDRESS`, `ENGRAM_RUN`, `ENGRAM_GROUP`, `ENGRAM_RANK` (its index) and
/// `ENGRAM_WORLD_SIZE` (`replicas`), and the files of TLS and tokens where the cluster has them. Rank and world size are those at the
/// start; a group knows its members at any time. `spec.backoffLimit` is the number of failed processes that are started again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct JobRun {
    /// Program and its first arguments, without a shell.
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 4096)), example = serde_json::json!(["python", "train.py"]))]
    pub command: Vec<String>,

    /// Further arguments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(max = 4096)), example = serde_json::json!(["--steps", "300"]))]
    pub args: Vec<String>,

    /// Environment variables. Names that start with `ENGRAM_` are reserved.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    pub env: Vec<JobVariable>,

    /// Folder in which the program starts; on a local cluster relative to the manifest and by default its folder, in Kubernetes that of
    /// the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub working_dir: Option<String>,

    /// Number of processes, 1 to 1,024.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub replicas: u32,

    /// Name of the group in `ENGRAM_GROUP`; absent means the name of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128))]
    pub group: Option<String>,

    /// Seconds between SIGTERM and SIGKILL when a process is stopped, 0 to 3,600.
    #[serde(default = "grace_seconds")]
    #[schemars(range(min = 0, max = 3600))]
    pub grace_period_seconds: u64,

    /// Seconds after which a run that has not ended fails, 1 to 31,536,000; absent means never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 31_536_000))]
    pub active_deadline_seconds: Option<u64>,

    /// Image of the program; required in Kubernetes, not used by local clusters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), example = &"registry.example.com/training:1")]
    pub image: Option<String>,

    /// Resource requests and limits of each process, in Kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub resources: Option<Resources>,

    /// Pod template (metadata and spec) that is merged over the generated one; the program is container `main`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub pod_template: Option<FreeForm>,
}

impl JobRun {
    /// Returns the name of the group of the run called `run`.
    pub fn group<'a>(&'a self, run: &'a str) -> &'a str {
        self.group.as_deref().unwrap_or(run)
    }
}

/// An environment variable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct JobVariable {
    /// Name, which does not start with `ENGRAM_`.
    #[schemars(length(min = 1, max = 256), example = &"OMP_NUM_THREADS")]
    pub name: String,
    /// Value.
    #[schemars(length(max = 32768), example = &"1")]
    pub value: String,
}

fn one() -> u32 {
    1
}

fn grace_seconds() -> u64 {
    JOB_GRACE_SECONDS
}
