//! Locations in object storage.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, Ipv6Addr};

/// Pattern of an address; a run may have `{name}` as its last part.
pub(crate) const PATTERN: &str =
    "^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_-][A-Za-z0-9._-]*)*(/[{]name[}])?/?$";
/// Description of [`PATTERN`] for error messages.
pub(crate) const ALLOWED: &str = "s3://BUCKET/PREFIX, with 3 to 63 of a-z, 0-9, - and . in the bucket, and A-Z, a-z, 0-9, -, _ and . between \
     the slashes of the prefix";

/// A file in S3-compatible object storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ObjectLocation {
    /// Bucket and key of the file.
    #[schemars(length(min = 1, max = 1024), extend("format" = "engram-s3"), example = &"s3://events/2026/sales.csv")]
    pub url: String,

    /// Endpoint of the storage, such as `http://minio.storage:9000`; absent means the environment of the workers, else AWS. `http://`
    /// is unencrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("format" = "engram-endpoint"))]
    pub endpoint: Option<String>,

    /// Region; absent means the environment of the workers, else `us-east-1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64), extend("format" = "engram-region"))]
    pub region: Option<String>,

    /// Credentials: a Secret in the same namespace with the keys `accessKeyId`, `secretAccessKey` and optionally `sessionToken`;
    /// absent, and always in local mode, means the environment of the workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub secret_ref: Option<SecretRef>,
}

/// Reference to a Secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretRef {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253), example = &"s3")]
    pub name: String,
}

/// Returns whether a text is an address in object storage.
pub(crate) fn is_address(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("s3://") else { return false };
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let rest = rest.strip_suffix("/{name}").unwrap_or(rest);
    let mut parts = rest.split('/');
    let bucket = parts.next().unwrap_or_default().as_bytes();
    let plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let ends = [bucket.first(), bucket.last()].iter().all(|end| end.is_some_and(plain));
    let inside = bucket.iter().all(|byte| plain(byte) || matches!(byte, b'-' | b'.'));
    (3..=63).contains(&bucket.len()) && ends && inside && parts.all(is_part)
}

/// Returns whether an address names one object: not a bucket, not a folder, without `{name}`.
pub(crate) fn is_object(text: &str) -> bool {
    let (_, key) = text.strip_prefix("s3://").and_then(|rest| rest.split_once('/')).unwrap_or_default();
    !key.is_empty() && !key.ends_with(['/', '}'])
}

/// Returns whether a text is a valid path segment: neither `..` nor hidden.
pub(crate) fn is_part(part: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !part.is_empty() && !part.starts_with('.') && part.bytes().all(word)
}

/// Pattern of an endpoint; the range of the port is checked in addition.
pub(crate) const ENDPOINT_PATTERN: &str =
    r"^https?://([A-Za-z0-9_.-]+|[\[][0-9A-Fa-f:.]+[\]])(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?$";
/// Pattern of a region.
pub(crate) const REGION_PATTERN: &str = "^[A-Za-z0-9_-]+$";

/// Returns whether a text is an endpoint of object storage, as the client of the storage requires.
pub(crate) fn is_endpoint(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://")) else { return false };
    let (host_port, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
    // Credentials in the URL would be logged.
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'/');
    let (host, port) = match host_port.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, port)) => {
            (address.parse::<Ipv6Addr>().is_ok(), port.strip_prefix(':').or((!port.is_empty()).then_some("")))
        }
        None => {
            let (host, port) = host_port.split_once(':').map_or((host_port, None), |(host, port)| (host, Some(port)));
            (is_host(host), port)
        }
    };
    let is_port = |port: &str| {
        port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|number| number > 0)
    };
    host && port.is_none_or(is_port) && path.bytes().all(is_plain)
}

/// Returns whether a text is a DNS name or an IPv4 address.
fn is_host(text: &str) -> bool {
    let label = |label: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        (1..=63).contains(&label.len()) && label.bytes().all(is_plain) && !label.starts_with('-')
    };
    let last = text.rsplit('.').next().unwrap_or_default();
    if last.bytes().all(|byte| byte.is_ascii_digit()) || last.starts_with("0x") || last.starts_with("0X") {
        return text.parse::<Ipv4Addr>().is_ok();
    }
    text.len() <= 253 && !text.contains("xn--") && text.split('.').all(label)
}

/// Returns whether a text is a region: it becomes a part of host names.
pub(crate) fn is_region(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_a_bucket_and_a_prefix_and_may_end_with_the_name_of_the_run() {
        for good in ["s3://backups", "s3://my.backups-1/a/B_2/2026-11-20", "s3://backups/words/", "s3://backups/{name}"]
        {
            assert!(is_address(good), "{good}");
        }
        for bad in [
            "backups",
            "s3://",
            "s3://ab",
            "s3://-ab",
            "s3://Backups",
            "s3://b-b//a",
            "s3://bbb/../a",
            "s3://bbb/{name}/a",
        ] {
            assert!(!is_address(bad), "{bad}");
        }
        assert!(is_object("s3://bbb/a/b.csv") && is_object("s3://bbb/b"));
        assert!(!["s3://bbb", "s3://bbb/", "s3://bbb/a/", "s3://bbb/{name}"].into_iter().any(is_object));
        assert!(is_endpoint("http://minio.storage:9000") && is_endpoint("https://s3.example.com"));
        assert!(is_endpoint("http://[fd00::1]:9000/base/") && is_endpoint("http://10.0.0.1"));
        for bad in [
            "minio:9000",
            "http://key:secret@minio:9000",
            "http://127.0.0.1:99999",
            "http://minio:0",
            "http://minio:",
            "http://",
            "http://minio\n",
            "http://[::1",
            "http://[::1]9",
            "http://999.1.1.1",
            "http://a..b",
            "http://minio?x",
        ] {
            assert!(!is_endpoint(bad), "{bad}");
        }
        assert!(is_region("eu-central-1") && !is_region("") && !is_region("eu\n") && !is_region("a.b"));
    }
}
