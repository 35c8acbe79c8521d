//! `OperatorConfiguration`: the operator's configuration file (`--config`).
//!
//! Every field is optional: flags and environment variables take precedence, defaults come last. The attributes are the single source
//! of truth: the schema generated from them validates a file and is published with the chart.

use std::borrow::Cow;
use std::net::SocketAddr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::kubernetes::optional;
use crate::manifest_enum::words;
use crate::quantity::Duration;

/// API group and version of the file. The group is separate because the kind is not served by API servers.
pub const API_VERSION: &str = "operator.engram.dev/v1alpha1";
/// Value of `kind`.
pub const KIND: &str = "OperatorConfiguration";

/// Settings of the operator. Flags and environment variables take precedence; absent fields have their defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Configuration {
    /// Always `operator.engram.dev/v1alpha1`.
    #[schemars(extend("const" = API_VERSION))]
    pub api_version: Cow<'static, str>,

    /// Always `OperatorConfiguration`.
    #[schemars(extend("const" = KIND))]
    pub kind: Cow<'static, str>,

    /// Endpoint for workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<Coordinator>,

    /// Endpoint for probes and metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<Http>,

    /// Default worker image. A change is offered to clusters as an update and restarts no worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<Worker>,

    /// Namespaces to watch; absent or empty means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "namespaces")]
    pub watch_namespaces: Option<Vec<String>>,

    /// Leader election between replicas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader_election: Option<LeaderElection>,

    /// Identity of this replica. Replicas that share a file must differ: set the environment variable `POD_NAME` instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<Pod>,

    /// Maximum number of concurrent reconciles, 1 to 256; absent means 8. Higher completes a restart sooner and loads the API server
    /// more.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub concurrency: Option<u16>,

    /// Certificate lifetime that overrides the clusters' settings, at least 6s; absent means no override. For tests only.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-minimum" = "6s", "x-maximum" = "365d"))]
    pub certificate_lifetime: Option<Duration>,

    /// Logging.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logging: Option<Logging>,
}

impl Default for Configuration {
    fn default() -> Self {
        Self {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            coordinator: None,
            http: None,
            worker: None,
            watch_namespaces: None,
            leader_election: None,
            pod: None,
            concurrency: None,
            certificate_lifetime: None,
            logging: None,
        }
    }
}

impl Configuration {
    /// Serializes the configuration; parsing the result returns the same value.
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).expect("the type has text keys and finite numbers only")
    }
}

optional! {
    /// Endpoint for workers.
    pub struct Coordinator {
        /// Listen address for worker heartbeats, an IP address and a port; absent means `0.0.0.0:7440`.
        #[schemars(extend("format" = "engram-listen"), example = &"0.0.0.0:7440")]
        pub listen: SocketAddr,
        /// Addresses, each HOST:PORT, by which workers reach all replicas of this operator. Required, here or as a flag.
        #[serde(default)]
        #[schemars(schema_with = "addresses")]
        pub addresses: Vec<String>,
    }
}

optional! {
    /// Endpoint for probes and metrics.
    pub struct Http {
        /// Listen address for `/startupz`, `/livez`, `/readyz` and `/metrics`, plain HTTP; absent means `0.0.0.0:9090`.
        #[schemars(extend("format" = "engram-listen"), example = &"0.0.0.0:9090")]
        pub listen: SocketAddr,
    }
}

optional! {
    /// Default worker image.
    pub struct Worker {
        /// Repository of the image; absent means `localhost/engram/worker`.
        #[schemars(length(min = 1))]
        pub repository: String,
        /// Repository of the image for pods with GPUs, with the same tag. Absent or empty means one image for all pods.
        pub cuda_repository: String,
        /// Tag of both images; absent means the version of the operator.
        #[schemars(length(min = 1))]
        pub version: String,
        /// Image pull secrets; absent means none.
        #[serde(default)]
        #[schemars(schema_with = "object_names")]
        pub pull_secrets: Vec<String>,
    }
}

optional! {
    /// Leader election between replicas.
    pub struct LeaderElection {
        /// Whether replicas elect a leader by a Lease; absent means `true`. Without it run a single replica only.
        pub enabled: bool,
        /// Name of the Lease; absent means `engram-operator`.
        #[schemars(extend("format" = "engram-object-name"))]
        pub lease_name: String,
    }
}

optional! {
    /// Identity of this replica.
    pub struct Pod {
        /// Name of the pod, which identifies the holder of the Lease; absent means `engram-operator`.
        #[schemars(extend("format" = "engram-object-name"))]
        pub name: String,
        /// Namespace of the pod and of the Lease; absent means `default`.
        #[schemars(extend("format" = "engram-namespace"))]
        pub namespace: String,
    }
}

optional! {
    /// Logging.
    pub struct Logging {
        /// Log filter: a level, or targets with levels; absent means `info`.
        #[schemars(extend("format" = "engram-log"), example = &"engram_operator=debug,info")]
        pub level: String,
        /// Log format; absent means `Text`.
        pub format: LogFormat,
    }
}

words! {
    /// Log format.
    pub enum LogFormat {
        /// Human-readable text.
        Text,
        /// One JSON object per line.
        Json,
    }
}

fn list(format: &str) -> Schema {
    json_schema!({ "type": "array", "items": { "type": "string", "format": format }, "uniqueItems": true })
}

fn addresses(_: &mut SchemaGenerator) -> Schema {
    list("engram-host-port")
}

fn namespaces(_: &mut SchemaGenerator) -> Schema {
    list("engram-namespace")
}

fn object_names(_: &mut SchemaGenerator) -> Schema {
    list("engram-object-name")
}

/// A string format: its name, its check, and a description of valid values.
pub(crate) type Format = (&'static str, fn(&str) -> bool, &'static str);

/// String formats of this file.
pub(crate) const FORMATS: [Format; 5] = [
    ("engram-listen", is_listen, "an IP address and a port, such as 0.0.0.0:7440 or [::]:7440"),
    ("engram-host-port", is_host_port, "HOST:PORT"),
    ("engram-namespace", is_label, "a-z, 0-9 and -, neither first nor last a -, 1 to 63 characters"),
    ("engram-object-name", is_bounded_name, "a-z, 0-9, - and ., neither first nor last a - or ., 1 to 253 characters"),
    (
        "engram-log",
        is_filter,
        "off, error, warn, info, debug or trace, optionally per target: engram_operator=debug,info",
    ),
];

fn is_listen(text: &str) -> bool {
    text.parse::<SocketAddr>().is_ok()
}

fn is_host_port(text: &str) -> bool {
    let is_port =
        |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|it| it > 0);
    let is_host =
        |host: &str| !host.is_empty() && !host.contains(|letter: char| letter.is_whitespace() || "/@".contains(letter));
    text.rsplit_once(':').is_some_and(|(host, port)| is_host(host) && is_port(port))
}

fn is_label(text: &str) -> bool {
    text.len() <= 63 && !text.contains('.') && is_object_name(text)
}

fn is_bounded_name(text: &str) -> bool {
    text.len() <= 253 && is_object_name(text)
}

/// Returns whether a text is a valid name of a Kubernetes object.
pub(crate) fn is_object_name(text: &str) -> bool {
    let is_alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let all = text.as_bytes();
    all.first().is_some_and(is_alphanumeric)
        && all.last().is_some_and(is_alphanumeric)
        && all.iter().all(|byte| is_alphanumeric(byte) || b"-.".contains(byte))
}

/// Returns whether a text is a log filter. The flag accepts the logging library's full syntax: spans and expressions, too.
fn is_filter(text: &str) -> bool {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let is_target = |target: &str| {
        !target.is_empty() && target.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_:".contains(&byte))
    };
    text.split(',').all(|part| match part.split_once('=') {
        Some((target, level)) => is_target(target) && LEVELS.contains(&level),
        None => LEVELS.contains(&part),
    })
}
