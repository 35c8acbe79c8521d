//! Environment variables with which workers send traces to the operator's collector.

/// Variables of the operator that apply to its workers as well. Headers and certificates are not passed on: they are secrets and files of
/// the operator's pod.
const PASSED_ON: [&str; 7] = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_INSECURE",
    "OTEL_EXPORTER_OTLP_TIMEOUT",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_SDK_DISABLED",
];
/// Fraction of traces that workers sample; 0 = workers send none.
const SAMPLE: &str = "ENGRAM_WORKER_TRACE_SAMPLE";
/// Its default: a trace of every hundredth call costs less than one percent of the throughput.
const DEFAULT_SAMPLE: &str = "0.01";

/// Returns the variables of worker pods; empty without an endpoint. `get` returns the operator's own.
pub(crate) fn variables(get: impl Fn(&str) -> Option<String>) -> Vec<(String, String)> {
    let get = |name: &str| get(name).filter(|value| !value.is_empty());
    let passed: Vec<(String, String)> =
        PASSED_ON.iter().filter_map(|name| Some(((*name).to_owned(), get(name)?))).collect();
    let sample = get(SAMPLE).unwrap_or_else(|| DEFAULT_SAMPLE.to_owned());
    let has_endpoint = passed.iter().any(|(name, _)| name.ends_with("_ENDPOINT"));
    if !has_endpoint || sample.parse() == Ok(0.0) {
        return Vec::new();
    }
    let sampler = [("OTEL_TRACES_SAMPLER", "parentbased_traceidratio".to_owned()), ("OTEL_TRACES_SAMPLER_ARG", sample)];
    passed.into_iter().chain(sampler.map(|(name, value)| (name.to_owned(), value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_send_traces_to_the_collector_of_the_operator_at_their_own_fraction() {
        let of = |set: &[(&str, &str)]| {
            let set = set.to_vec();
            variables(move |name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
        };
        let at = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://jaeger:4317");
        assert_eq!(of(&[("OTEL_TRACES_SAMPLER", "always_on"), (SAMPLE, "1")]), []);
        assert_eq!(of(&[at, (SAMPLE, "0")]), []);
        let passed =
            of(&[at, ("OTEL_TRACES_SAMPLER_ARG", "1"), ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")]);
        let expected = [at, ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "0.01")];
        assert_eq!(passed, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert_eq!(of(&[at, (SAMPLE, "0.5")])[2].1, "0.5");
    }
}
