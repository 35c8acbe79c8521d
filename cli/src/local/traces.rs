//! Variables that make the processes of a local cluster send traces.

/// Settings of traces: of the command line, or of this process's environment.
#[derive(Debug, Clone, Default)]
pub(crate) struct TraceVariables {
    /// OTLP endpoint; absent = that of the environment, if any.
    pub(crate) endpoint: Option<String>,
    /// Fraction of traces; absent = as the environment says.
    pub(crate) sample: Option<f64>,
}

impl TraceVariables {
    /// Returns the variables of a process, in addition to those that it inherits.
    pub(crate) fn of_process(&self, instance: &str) -> Vec<(&'static str, String)> {
        const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
        let given = std::env::var(ATTRIBUTES).ok().filter(|given| !given.is_empty());
        let own = format!("service.instance.id={instance}");
        let attributes = given.map_or_else(|| own.clone(), |given| format!("{own},{given}"));
        let mut variables = vec![(ATTRIBUTES, attributes)];
        if let Some(endpoint) = &self.endpoint {
            variables.push(("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.clone()));
        }
        if let Some(sample) = self.sample {
            variables.push(("OTEL_TRACES_SAMPLER", "parentbased_traceidratio".into()));
            variables.push(("OTEL_TRACES_SAMPLER_ARG", sample.to_string()));
        }
        variables
    }
}

/// Parses a fraction of traces.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    let fraction = text.parse().ok().filter(|fraction| (0.0..=1.0).contains(fraction));
    fraction.ok_or_else(|| format!("{text} is not allowed; allowed: 0 to 1"))
}
