//! Settings from the standard `OTEL_*` variables. All are validated before anything starts: the SDK ignores what it
//! does not understand, and traces would silently be missing.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use opentelemetry_sdk::trace::Sampler;
use percent_encoding::percent_decode_str;
use tonic::transport::Uri;

/// Time limit of one export, as in the specification.
const EXPORT: Duration = Duration::from_secs(10);
const BOOLEAN: &str = "true, false";
/// Settings of the span queue, which the SDK reads itself.
const QUEUE: [&str; 3] = ["OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"];

/// An invalid variable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: {value:?} is not allowed; allowed: {allowed}")]
pub struct Invalid {
    variable: String,
    value: String,
    allowed: &'static str,
}

/// Destination, sampling and resource attributes of traces.
#[derive(Debug, Clone)]
pub(crate) struct Traces {
    /// With a scheme.
    pub(crate) endpoint: Uri,
    pub(crate) timeout: Duration,
    pub(crate) sampler: Sampler,
    pub(crate) head: HeadSampling,
    pub(crate) trust: Trust,
    pub(crate) resource: BTreeMap<String, String>,
}

/// Sampling of traces that start in this process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct HeadSampling {
    /// Fraction of traces.
    pub(crate) ratio: f64,
    /// Whether the decision of a remote parent is followed.
    pub(crate) follows_parent: bool,
}

/// TLS files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Trust {
    /// Trusted roots, instead of those of the system.
    pub(crate) roots: Option<PathBuf>,
    /// Client certificate and key.
    pub(crate) own: Option<(PathBuf, PathBuf)>,
}

/// Reads variables by `get`; `None` = no traces are wanted. `program` is name and version.
pub(crate) fn read(program: (&str, &str), get: impl Fn(&str) -> Option<String>) -> Result<Option<Traces>, Invalid> {
    // As in the specification: an empty variable counts as unset.
    let get = |name: &str| get(name).filter(|value| !value.is_empty());
    if boolean(get, "OTEL_SDK_DISABLED")? {
        return Ok(None);
    }
    let read = Variables { get };
    let Some((variable, endpoint)) = read.of_export("ENDPOINT") else { return Ok(None) };
    match get("OTEL_TRACES_EXPORTER").as_deref() {
        None | Some("otlp") => {}
        Some("none") => return Ok(None),
        Some(other) => return Err(invalid("OTEL_TRACES_EXPORTER", other, "otlp, none")),
    }
    if let Some((variable, protocol)) = read.of_export("PROTOCOL").filter(|(_, protocol)| protocol != "grpc") {
        return Err(invalid(&variable, &protocol, "grpc (OTLP over HTTP is not built in)"));
    }
    if let Some((variable, how)) = read.of_export("COMPRESSION").filter(|(_, how)| how != "none") {
        return Err(invalid(&variable, &how, "none"));
    }
    for name in QUEUE {
        if let Some(value) = get(name)
            && !value.parse::<u32>().is_ok_and(|number| number > 0)
        {
            return Err(invalid(name, &value, "whole numbers from 1"));
        }
    }
    let (sampler, head) = sampler(get)?;
    Ok(Some(Traces {
        endpoint: uri(&variable, &endpoint, read.insecure()?)?,
        timeout: read.timeout()?,
        sampler,
        head,
        trust: read.trust()?,
        resource: resource(program, get)?,
    }))
}

/// Variables of the exporter: those for traces override the general ones.
struct Variables<G> {
    get: G,
}

impl<G: Fn(&str) -> Option<String>> Variables<G> {
    /// Returns the variable that is set, and its value.
    fn of_export(&self, what: &str) -> Option<(String, String)> {
        let names = [format!("OTEL_EXPORTER_OTLP_TRACES_{what}"), format!("OTEL_EXPORTER_OTLP_{what}")];
        names.into_iter().find_map(|name| (self.get)(&name).map(|value| (name, value)))
    }

    fn insecure(&self) -> Result<bool, Invalid> {
        match self.of_export("INSECURE") {
            None => Ok(false),
            Some((name, _)) => boolean(&self.get, &name),
        }
    }

    fn timeout(&self) -> Result<Duration, Invalid> {
        let Some((name, value)) = self.of_export("TIMEOUT") else { return Ok(EXPORT) };
        let millis = value.parse::<u32>().ok().filter(|millis| *millis > 0);
        let millis = millis.ok_or_else(|| invalid(&name, &value, "milliseconds from 1"))?;
        Ok(Duration::from_millis(millis.into()))
    }

    fn trust(&self) -> Result<Trust, Invalid> {
        let path = |what: &str| self.of_export(what).map(|(name, path)| (name, PathBuf::from(path)));
        let own = match (path("CLIENT_CERTIFICATE"), path("CLIENT_KEY")) {
            (Some((_, certificate)), Some((_, key))) => Some((certificate, key)),
            (None, None) => None,
            (Some((name, path)), None) | (None, Some((name, path))) => {
                return Err(invalid(&name, &path.to_string_lossy(), "a client's certificate and key, both"));
            }
        };
        Ok(Trust { roots: path("CERTIFICATE").map(|(_, path)| path), own })
    }
}

fn invalid(variable: &str, value: &str, allowed: &'static str) -> Invalid {
    Invalid { variable: variable.to_owned(), value: value.to_owned(), allowed }
}

fn boolean(get: impl Fn(&str) -> Option<String>, variable: &str) -> Result<bool, Invalid> {
    match get(variable) {
        None => Ok(false),
        Some(value) if value.eq_ignore_ascii_case("true") => Ok(true),
        Some(value) if value.eq_ignore_ascii_case("false") => Ok(false),
        Some(value) => Err(invalid(variable, &value, BOOLEAN)),
    }
}

/// Parses an endpoint. Without a scheme it means TLS unless `insecure`, as in the specification.
fn uri(variable: &str, value: &str, insecure: bool) -> Result<Uri, Invalid> {
    let allowed = "http://HOST:PORT, https://HOST:PORT, or HOST:PORT with OTEL_EXPORTER_OTLP_INSECURE; no path";
    let scheme = if insecure { "http" } else { "https" };
    let full = if value.contains("://") { value.to_owned() } else { format!("{scheme}://{value}") };
    let parsed = full.parse::<Uri>().ok().filter(|uri| {
        let is_host = uri.authority().is_some_and(|host| !host.host().is_empty() && !host.as_str().contains('@'));
        // The parser ignores a port that is not a number.
        let has_port =
            uri.authority().is_some_and(|host| host.as_str().ends_with(host.host()) || host.port_u16().is_some());
        let is_bare = uri.path().trim_matches('/').is_empty() && uri.query().is_none();
        is_host && has_port && is_bare && matches!(uri.scheme_str(), Some("http" | "https"))
    });
    // A password must not appear in a log.
    let shown = if value.contains('@') { "(with a user)" } else { value };
    parsed.ok_or_else(|| invalid(variable, shown, allowed))
}

fn sampler(get: impl Fn(&str) -> Option<String>) -> Result<(Sampler, HeadSampling), Invalid> {
    const NAME: &str = "OTEL_TRACES_SAMPLER";
    const ARGUMENT: &str = "OTEL_TRACES_SAMPLER_ARG";
    let name = get(NAME).unwrap_or_else(|| "parentbased_always_on".into());
    let (kind, is_by_parent) = name.strip_prefix("parentbased_").map_or((name.as_str(), false), |kind| (kind, true));
    let (sampler, ratio) = match kind {
        "always_on" => (Sampler::AlwaysOn, 1.0),
        "always_off" => (Sampler::AlwaysOff, 0.0),
        "traceidratio" => {
            let value = get(ARGUMENT).unwrap_or_else(|| "1".into());
            let ratio = value.parse::<f64>().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
            let ratio = ratio.ok_or_else(|| invalid(ARGUMENT, &value, "0 to 1"))?;
            (Sampler::TraceIdRatioBased(ratio), ratio)
        }
        _ => {
            let allowed = "always_on, always_off, traceidratio, and each after parentbased_";
            return Err(invalid(NAME, &name, allowed));
        }
    };
    let sampler = if is_by_parent { Sampler::ParentBased(Box::new(sampler)) } else { sampler };
    Ok((sampler, HeadSampling { ratio, follows_parent: is_by_parent }))
}

/// Returns the resource attributes: detected ones, overridden by `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME`.
fn resource(
    (name, version): (&str, &str),
    get: impl Fn(&str) -> Option<String>,
) -> Result<BTreeMap<String, String>, Invalid> {
    const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
    let known = [("service.name", name), ("service.version", version)];
    let mut resource: BTreeMap<String, String> =
        known.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let of_pod = [
        ("service.instance.id", "POD_NAME"),
        ("k8s.pod.name", "POD_NAME"),
        ("k8s.namespace.name", "POD_NAMESPACE"),
        ("k8s.node.name", "NODE_NAME"),
    ];
    resource.extend(of_pod.into_iter().filter_map(|(key, variable)| Some((key.to_owned(), get(variable)?))));
    let attributes = get(ATTRIBUTES).unwrap_or_default();
    for pair in attributes.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let decoded = pair.split_once('=').and_then(|(key, value)| {
            let decoded = |text: &str| percent_decode_str(text.trim()).decode_utf8().ok().map(String::from);
            Some((decoded(key).filter(|key| !key.is_empty())?, decoded(value)?))
        });
        resource.extend([decoded.ok_or_else(|| invalid(ATTRIBUTES, &attributes, "key=value, ..., percent-encoded"))?]);
    }
    resource.extend(get("OTEL_SERVICE_NAME").map(|name| ("service.name".to_owned(), name)));
    Ok(resource)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317");

    fn of(variables: &[(&str, &str)]) -> Result<Option<Traces>, Invalid> {
        let variables: BTreeMap<&str, &str> = variables.iter().copied().collect();
        read(("engram-operator", "1.2.3"), |name| variables.get(name).map(|&value| value.to_owned()))
    }

    #[test]
    fn traces_require_an_endpoint() {
        for none in [
            &[][..],
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")],
            &[("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://collector:4317")],
            &[AT, ("OTEL_SDK_DISABLED", "True")],
            &[AT, ("OTEL_TRACES_EXPORTER", "none")],
            // Unused variables are not validated.
            &[("OTEL_TRACES_SAMPLER", "sometimes")],
        ] {
            assert!(of(none).unwrap().is_none(), "{none:?}");
        }
        let traces = of(&[AT]).unwrap().unwrap();
        assert_eq!((traces.endpoint.to_string().as_str(), traces.timeout), ("http://collector:4317/", EXPORT));
        assert_eq!(format!("{:?}", traces.sampler), "ParentBased(AlwaysOn)");
    }

    #[test]
    fn trace_variables_override_general_ones_and_a_missing_scheme_means_tls() {
        let endpoint = |variables: &[(&str, &str)]| of(variables).unwrap().unwrap().endpoint.to_string();
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "traces:4317");
        assert_eq!(endpoint(&[AT, own]), "https://traces:4317/");
        assert_eq!(endpoint(&[own, ("OTEL_EXPORTER_OTLP_INSECURE", "true")]), "http://traces:4317/");
        let both = [("OTEL_EXPORTER_OTLP_INSECURE", "true"), ("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "false")];
        assert_eq!(endpoint(&[own, both[0], both[1]]), "https://traces:4317/");
        assert_eq!(endpoint(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1]:4317/")]), "http://[::1]:4317/");
        let timeout = [("OTEL_EXPORTER_OTLP_TIMEOUT", "7"), ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "250")];
        assert_eq!(of(&[AT, timeout[0], timeout[1]]).unwrap().unwrap().timeout, Duration::from_millis(250));
    }

    #[test]
    fn samplers_are_those_of_the_specification() {
        let sampler = |name, argument| {
            let variables = [AT, ("OTEL_TRACES_SAMPLER", name), ("OTEL_TRACES_SAMPLER_ARG", argument)];
            format!("{:?}", of(&variables).unwrap().unwrap().sampler)
        };
        assert_eq!(sampler("parentbased_traceidratio", "0.25"), "ParentBased(TraceIdRatioBased(0.25))");
        assert_eq!(sampler("traceidratio", ""), "TraceIdRatioBased(1.0)");
        assert_eq!(sampler("always_off", "not asked"), "AlwaysOff");
        assert_eq!(sampler("parentbased_always_on", ""), "ParentBased(AlwaysOn)");
    }

    #[test]
    fn an_error_names_the_variable_the_value_and_what_is_allowed() {
        for (variable, value, allowed) in [
            ("OTEL_SDK_DISABLED", "maybe", "true, false"),
            ("OTEL_TRACES_EXPORTER", "jaeger", "otlp, none"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "collector:port", "http://HOST:PORT"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://", "http://HOST:PORT"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4318/v1/traces", "no path"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "unix:///run/collector.sock", "http://HOST:PORT"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "grpc (OTLP over HTTP is not built in)"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip", "none"),
            ("OTEL_EXPORTER_OTLP_INSECURE", "1", "true, false"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "milliseconds from 1"),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/keys/tls.key", "both"),
            ("OTEL_TRACES_SAMPLER", "xray", "parentbased_"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "whole numbers from 1"),
            ("OTEL_RESOURCE_ATTRIBUTES", "team", "key=value"),
        ] {
            let error = of(&[AT, (variable, value)]).unwrap_err().to_string();
            assert!([variable, value, allowed].iter().all(|part| error.contains(part)), "{error}");
        }
        for ratio in ["1.5", "-0.1", "NaN", "half"] {
            let sampler = ("OTEL_TRACES_SAMPLER", "traceidratio");
            let error = of(&[AT, sampler, ("OTEL_TRACES_SAMPLER_ARG", ratio)]).unwrap_err().to_string();
            assert_eq!(error, format!("OTEL_TRACES_SAMPLER_ARG: {ratio:?} is not allowed; allowed: 0 to 1"));
        }
        let error = of(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:secret@collector:4317")]).unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn resource_attributes_of_the_pod_can_be_overridden() {
        let resource = |variables: &[(&str, &str)]| of(variables).unwrap().unwrap().resource;
        let alone = resource(&[AT]);
        assert_eq!((alone["service.name"].as_str(), alone["service.version"].as_str()), ("engram-operator", "1.2.3"));
        assert!(!alone.contains_key("k8s.pod.name"));
        let pod = [AT, ("POD_NAME", "engram-operator-0"), ("POD_NAMESPACE", "engram-system"), ("NODE_NAME", "node-7")];
        let attributes = ("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,k8s.node.name=n,team=a%2Cb, empty=");
        let overridden = resource(&[pod[0], pod[1], pod[2], pod[3], attributes]);
        assert_eq!((overridden["service.name"].as_str(), overridden["k8s.node.name"].as_str()), ("mine", "n"));
        assert_eq!((overridden["team"].as_str(), overridden["empty"].as_str()), ("a,b", ""));
        assert_eq!(overridden["k8s.pod.name"], overridden["service.instance.id"]);
        let named = resource(&[AT, attributes, ("OTEL_SERVICE_NAME", "operator")]);
        assert_eq!(named["service.name"], "operator");
    }
}
