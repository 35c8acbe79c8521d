//! Error messages for requests to the API server.

use crate::error::failure;
use engram_api::ExitCode;
use engram_mapstore::with_causes;
use kube::Error;

/// Converts an error of the API server. `action` is what failed (`to list pods`), `permission` what it requires (`list pods`).
pub(super) fn describe(error: &Error, action: &str, permission: &str, namespace: &str) -> anyhow::Error {
    let code = match error {
        Error::Api(status) => Some(status.code),
        Error::UpgradeConnection(kube::client::UpgradeConnectionError::ProtocolSwitch(code)) => Some(code.as_u16()),
        _ => None,
    };
    let text = match error {
        // The Display of a status repeats the message.
        Error::Api(status) => status.message.clone(),
        Error::UpgradeConnection(_) => format!("{error}"),
        _ => with_causes(error),
    };
    match code {
        Some(401) => failure(
            ExitCode::Denied,
            format!("failed {action}: unauthenticated: {text}; log in, or select another --context"),
        ),
        Some(403) => failure(
            ExitCode::Denied,
            format!("failed {action}: missing permission to {permission} in namespace {namespace}: {text}"),
        ),
        Some(404) => failure(ExitCode::NotFound, format!("failed {action} in namespace {namespace}: {text}")),
        Some(409) => failure(ExitCode::Conflict, format!("failed {action} in namespace {namespace}: {text}")),
        Some(_) => failure(ExitCode::Failed, format!("failed {action} in namespace {namespace}: {text}")),
        None => failure(ExitCode::Unreachable, format!("failed {action}: the API server does not respond: {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;

    fn describe_status(code: u16, message: &str) -> (String, ExitCode) {
        let status = Status { code, message: message.into(), ..Status::default() };
        let error = describe(&Error::Api(Box::new(status)), "to list pods", "list pods", "research");
        (error.to_string(), crate::error::code(&error))
    }

    #[test]
    fn missing_permissions_are_named() {
        let (text, code) = describe_status(403, "pods is forbidden: User \"ann\" cannot list");
        assert!(text.contains("missing permission to list pods in namespace research"), "{text}");
        assert!(text.contains("User \"ann\""), "{text}");
        assert_eq!(code, ExitCode::Denied);
        assert_eq!(describe_status(404, "gone").1, ExitCode::NotFound);
        assert_eq!(describe_status(401, "Unauthorized").1, ExitCode::Denied);
        assert_eq!(describe_status(422, "workers: 101").1, ExitCode::Failed);
    }

    #[test]
    fn forbidden_port_forwarding_names_the_permission() {
        let code = tonic::codegen::http::StatusCode::FORBIDDEN;
        let error = Error::UpgradeConnection(kube::client::UpgradeConnectionError::ProtocolSwitch(code));
        let error = describe(&error, "to forward a port of pod words-worker-0", "create pods/portforward", "research");
        assert!(error.to_string().contains("create pods/portforward in namespace research"), "{error}");
        assert_eq!(crate::error::code(&error), ExitCode::Denied);
    }
}
