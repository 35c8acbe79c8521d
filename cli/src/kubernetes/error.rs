//! What the API server refuses, in words that say what can be done about it.

use crate::error::said;
use engram_api::ExitCode;
use engram_mapstore::with_causes;
use kube::Error;

/// An error of the API server: what was `wanted`, and the right that it takes (`list pods`).
pub(super) fn told(error: &Error, wanted: &str, right: &str, namespace: &str) -> anyhow::Error {
    let code = match error {
        Error::Api(status) => Some(status.code),
        Error::UpgradeConnection(kube::client::UpgradeConnectionError::ProtocolSwitch(code)) => Some(code.as_u16()),
        _ => None,
    };
    let text = match error {
        // Its own display says everything twice.
        Error::Api(status) => status.message.clone(),
        Error::UpgradeConnection(_) => format!("{error}"),
        _ => with_causes(error),
    };
    match code {
        Some(401) => said(
            ExitCode::Denied,
            format!(
                "failed {wanted}: the API server does not know who asks: {text}; log in, or name another --context"
            ),
        ),
        Some(403) => said(
            ExitCode::Denied,
            format!("failed {wanted}: not allowed, it takes the right to {right} in namespace {namespace}: {text}"),
        ),
        Some(404) => said(ExitCode::NotFound, format!("failed {wanted} in namespace {namespace}: {text}")),
        Some(409) => said(ExitCode::Conflict, format!("failed {wanted} in namespace {namespace}: {text}")),
        Some(_) => said(ExitCode::Failed, format!("failed {wanted} in namespace {namespace}: {text}")),
        None => said(ExitCode::Unreachable, format!("failed {wanted}: the API server does not answer: {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;

    fn refused(code: u16, message: &str) -> (String, ExitCode) {
        let status = Status { code, message: message.into(), ..Status::default() };
        let error = told(&Error::Api(Box::new(status)), "to list pods", "list pods", "research");
        (error.to_string(), crate::error::code(&error))
    }

    #[test]
    fn what_is_missing_is_named_with_the_right_that_it_takes() {
        let (text, code) = refused(403, "pods is forbidden: User \"ann\" cannot list");
        assert!(text.contains("the right to list pods in namespace research"), "{text}");
        assert!(text.contains("User \"ann\""), "{text}");
        assert_eq!(code, ExitCode::Denied);
        assert_eq!(refused(404, "gone").1, ExitCode::NotFound);
        assert_eq!(refused(401, "Unauthorized").1, ExitCode::Denied);
        assert_eq!(refused(422, "workers: 101").1, ExitCode::Failed);
    }

    #[test]
    fn a_port_that_may_not_be_forwarded_is_a_right_too() {
        let code = tonic::codegen::http::StatusCode::FORBIDDEN;
        let error = Error::UpgradeConnection(kube::client::UpgradeConnectionError::ProtocolSwitch(code));
        let error = told(&error, "to forward a port of pod words-worker-0", "create pods/portforward", "research");
        assert!(error.to_string().contains("create pods/portforward in namespace research"), "{error}");
        assert_eq!(crate::error::code(&error), ExitCode::Denied);
    }
}
