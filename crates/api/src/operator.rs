//! `OperatorConfiguration`: the file that an operator is started with (`--config`).
//!
//! A field that is absent is left to a flag, to the environment and then to its default, so every field is optional here. As with
//! manifests the attributes are the one source of truth: they make the schema that checks a file and that the chart publishes.

use std::borrow::Cow;
use std::net::SocketAddr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::kubernetes::optional;
use crate::quantity::Duration;
use crate::word::words;

/// The group and version of the file. A group of its own: no API server knows the kind.
pub const API_VERSION: &str = "operator.engram.dev/v1alpha1";
/// The word after `kind:`.
pub const KIND: &str = "OperatorConfiguration";

/// Settings of an operator. What flags and environment say counts more, what is absent from both has its default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Configuration {
    /// Always `operator.engram.dev/v1alpha1`.
    #[schemars(extend("const" = API_VERSION))]
    pub api_version: Cow<'static, str>,

    /// Always `OperatorConfiguration`.
    #[schemars(extend("const" = KIND))]
    pub kind: Cow<'static, str>,

    /// How workers find the operator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<Coordinator>,

    /// Probes and metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<Http>,

    /// What workers run where a cluster does not say. A change is offered to the clusters, and restarts no worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<Worker>,

    /// Namespaces to look after; absent or empty means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "namespaces")]
    pub watch_namespaces: Option<Vec<String>>,

    /// Who of several replicas writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader_election: Option<LeaderElection>,

    /// Who this operator is. Replicas that share a file must not share a name: Kubernetes tells each its own in the variable `POD_NAME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<Pod>,

    /// Clusters that are looked at at the same time, 1 to 256; absent means 8. More finish a restart sooner and load the API server more.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub concurrency: Option<u16>,

    /// How long certificates are good instead of what clusters say, at least 6s; absent means as they say. For tests, which cannot wait for
    /// days: short ones are renewed all the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-minimum" = "6s", "x-maximum" = "365d"))]
    pub certificate_lifetime: Option<Duration>,

    /// What is logged.
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
    /// Writes the file. It parses to what was written.
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).expect("the type has text keys and finite numbers only")
    }
}

optional! {
    /// How workers find the operator.
    pub struct Coordinator {
        /// Where workers' beats are listened for, an IP address and a port; absent means `0.0.0.0:7440`.
        #[schemars(extend("format" = "engram-listen"), example = &"0.0.0.0:7440")]
        pub listen: SocketAddr,
        /// Where workers find every replica of this operator, each a host and a port: names that stand for all of them. Needed, here or as
        /// a flag.
        #[serde(default)]
        #[schemars(schema_with = "addresses")]
        pub addresses: Vec<String>,
    }
}

optional! {
    /// Probes and metrics.
    pub struct Http {
        /// Where `/startupz`, `/livez`, `/readyz` and `/metrics` are, plain HTTP; absent means `0.0.0.0:9090`.
        #[schemars(extend("format" = "engram-listen"), example = &"0.0.0.0:9090")]
        pub listen: SocketAddr,
    }
}

optional! {
    /// What workers run where a cluster does not say.
    pub struct Worker {
        /// Repository of their image; absent means `engram/worker`.
        #[schemars(length(min = 1))]
        pub repository: String,
        /// The same for workers whose pods are given GPUs; the tag is that of the other. Absent or empty means one image for all.
        pub cuda_repository: String,
        /// Tag of both; absent means the version of the operator.
        #[schemars(length(min = 1))]
        pub version: String,
        /// Secrets with which nodes pull them; absent means none.
        #[serde(default)]
        #[schemars(schema_with = "object_names")]
        pub pull_secrets: Vec<String>,
    }
}

optional! {
    /// Who of several replicas writes.
    pub struct LeaderElection {
        /// Whether a Lease decides; absent means `true`. Without one there must be one replica only.
        pub enabled: bool,
        /// Name of that Lease; absent means `engram-operator`.
        #[schemars(extend("format" = "engram-object-name"))]
        pub lease_name: String,
    }
}

optional! {
    /// Who this operator is.
    pub struct Pod {
        /// Name of its pod: who holds the Lease; absent means `engram-operator`.
        #[schemars(extend("format" = "engram-object-name"))]
        pub name: String,
        /// Namespace of its pod and of the Lease; absent means `default`.
        #[schemars(extend("format" = "engram-namespace"))]
        pub namespace: String,
    }
}

optional! {
    /// What is logged.
    pub struct Logging {
        /// Which lines: a level, or targets with levels; absent means `info`.
        #[schemars(extend("format" = "engram-log"), example = &"engram_operator=debug,info")]
        pub level: String,
        /// How; absent means `Text`.
        pub format: LogFormat,
    }
}

words! {
    /// How lines are logged.
    pub enum LogFormat {
        /// For people.
        Text,
        /// One object a line, for collectors.
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

/// A format of a text: its name, whether a text is of it, and what is, in words.
pub(crate) type Format = (&'static str, fn(&str) -> bool, &'static str);

/// Formats that only this file has.
pub(crate) const FORMATS: [Format; 5] = [
    ("engram-listen", is_listen, "an IP address and a port, as 0.0.0.0:7440 or [::]:7440"),
    ("engram-host-port", is_host_port, "HOST:PORT"),
    ("engram-namespace", is_label, "a-z, 0-9 and -, neither first nor last a -, 1 to 63 characters"),
    ("engram-object-name", is_bounded_name, "a-z, 0-9, - and ., neither first nor last a - or ., 1 to 253 characters"),
    (
        "engram-log",
        is_filter,
        "off, error, warn, info, debug or trace, or such for single targets: engram_operator=debug,info",
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

/// Whether a text is the name of an object of Kubernetes, and no path.
pub(crate) fn is_object_name(text: &str) -> bool {
    let is_alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let all = text.as_bytes();
    all.first().is_some_and(is_alphanumeric)
        && all.last().is_some_and(is_alphanumeric)
        && all.iter().all(|byte| is_alphanumeric(byte) || b"-.".contains(byte))
}

/// Whether a text says which lines are logged. What the logging library takes beyond this, spans and expressions, has its flag.
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
